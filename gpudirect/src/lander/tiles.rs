//! Landings and saves of layers that lie in host memory one by one, each in a place of its own, and that come or go one after the other:
//! those of a [`Pipeline`](crate::Pipeline). They take the same rings and kernels as those of a pool.

use std::sync::Mutex;

use kvarts_contract::buffers::SharedBuf;
use kvarts_layout::plan::Stretch;
use kvarts_layout::planted;

use super::lane::{Lane, Lies, Open};
use super::{Column, Lander, lock};
use crate::destination::Destination;
use crate::device::{Event, Stream};
use crate::error::{DeviceError, LandError};

/// Layers of one request. Dropping it ends the request; what was enqueued is done all the same, and keeps what it uses.
#[derive(Debug)]
pub(crate) struct Tiles {
    lander: Lander,
    lane: fn(&Lander) -> &Mutex<Lane>,
    columns: Vec<Column>,
    /// All memory that the layers lie in.
    host: SharedBuf,
    open: Option<Open>,
    is_whole: bool,
}

/// A layer that leaves: its pages may be written again behind the first event, and it is in host memory behind the second.
pub(crate) struct Left {
    pub(crate) gathered: Event,
    pub(crate) left: Event,
}

/// The pages of a destination, if this lander's kernels move them: the device has the kernel and the memory, and the ring has room for each chunk.
pub(crate) fn fits(lander: &Lander, blocks: &Destination) -> Option<Column> {
    let device = &lander.0.device;
    device.can_move_slots().ok()?;
    blocks.memories().iter().try_for_each(|memory| device.owns(memory)).ok()?;
    let pages = blocks.pages()?;
    let room = lock(&lander.0.inward).segment_bytes();
    let layers = pages.shape().layers();
    let all = layers.iter().flat_map(|layer| &layer.chunks).all(|chunk| chunk.bytes <= room);
    let (count, at, first) = (pages.blocks(), 0, 0);
    all.then(|| Column { stretches: vec![Stretch { at, blocks: count, first, count }], pages })
}

impl Tiles {
    /// Layers that come into these pages, behind `after` if it is given.
    pub(crate) fn land(
        lander: &Lander,
        column: Column,
        host: &SharedBuf,
        after: Option<&Event>,
    ) -> Result<Self, LandError> {
        let after = after.filter(|_| !planted!("tiles-landed-while-in-use"));
        if !lander.in_use(after)? {
            return Self::begin(lander, |lander| &lander.0.inward, column, host);
        }
        let mut tiles = Self::begin(lander, |lander| &lander.0.behind, column, host)?;
        if let Some(after) = after {
            tiles.with(|lane, _, _| lane.near_waits(after))?;
        }
        Ok(tiles)
    }

    /// Layers that leave these pages.
    pub(crate) fn save(lander: &Lander, column: Column, host: &SharedBuf) -> Result<Self, LandError> {
        Self::begin(lander, |lander| &lander.0.outward, column, host)
    }

    fn begin(
        lander: &Lander,
        lane: fn(&Lander) -> &Mutex<Lane>,
        column: Column,
        host: &SharedBuf,
    ) -> Result<Self, LandError> {
        let columns = vec![column];
        let open = lock(lane(lander)).open(&columns)?;
        let (lander, host) = (lander.clone(), host.clone());
        Ok(Self { lander, lane, columns, host, open: Some(open), is_whole: true })
    }

    /// Works on the lane. After an error it is not known what was enqueued: the lander takes no more.
    fn with<T>(
        &mut self,
        work: impl FnOnce(&mut Lane, &mut Open, &[Column]) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let open = self.open.as_mut().ok_or(DeviceError::OutOfBounds)?;
        let mut lane = lock((self.lane)(&self.lander));
        let done = work(&mut lane, open, &self.columns).inspect_err(|error| lane.fail(error));
        self.is_whole &= done.is_ok();
        done
    }

    /// Enqueues that a layer lands, which lies in `host` as [`Destination::pieces`] has it.
    pub(crate) fn layer(&mut self, host: &SharedBuf, layer: u32) -> Result<Event, DeviceError> {
        self.with(|lane, open, columns| lane.land(open, (host, columns), layer, Lies::Alone))
    }

    /// Enqueues that a layer leaves, behind what this stream was given so far.
    pub(crate) fn leave(
        &mut self,
        host: &SharedBuf,
        layer: u32,
        computed: &Stream,
    ) -> Result<Left, DeviceError> {
        // Of a stream that is being captured nothing is taken: the same layer may come again.
        let computed = self.lander.0.device.record(computed)?;
        self.with(|lane, open, columns| {
            if !planted!("tiles-left-before-computed") {
                lane.near_waits(&computed)?;
            }
            let (gathered, left) = lane.save(open, (host, columns), layer, Lies::Alone)?;
            Ok(Left { gathered, left })
        })
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        let Some(open) = self.open.take() else { return };
        let keeps = Box::new((std::mem::take(&mut self.columns), self.host.clone()));
        drop(lock((self.lane)(&self.lander)).close(open, keeps, self.is_whole));
    }
}
