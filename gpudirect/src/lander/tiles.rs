//! Landings and saves of layers that lie in host memory one by one, each in a place of its own, and that come or go one after the other:
//! those of a [`Pipeline`](crate::Pipeline). They take the same rings and kernels as those of a pool.

use kvarts_contract::buffers::SharedBuf;
use kvarts_layout::plan::Stretch;

use super::lane::{Lane, Lies, Open};
use super::{Column, Lander, lock};
use crate::destination::Destination;
use crate::device::{Event, Stream};
use crate::error::{DeviceError, LandError};

/// Which ring they take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    In,
    /// In, behind pages that are still in use.
    Behind,
    Out,
}

/// Layers of one request. Dropping it ends the request; what was enqueued is done all the same, and keeps what it uses.
#[derive(Debug)]
pub(crate) struct Tiles {
    lander: Lander,
    way: Way,
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

/// What the ring has room for of one chunk, and whether a destination has pages that its kernels move.
pub(crate) fn fits(lander: &Lander, blocks: &Destination) -> Option<Column> {
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
        let in_use = lander.in_use(after)?;
        let way = if in_use { Way::Behind } else { Way::In };
        let mut tiles = Self::begin(lander, way, column, host)?;
        if let Some(after) = after.filter(|_| in_use) {
            tiles.with(|lane, _, _| lane.near_waits(after))?;
        }
        Ok(tiles)
    }

    /// Layers that leave these pages.
    pub(crate) fn save(lander: &Lander, column: Column, host: &SharedBuf) -> Result<Self, LandError> {
        Self::begin(lander, Way::Out, column, host)
    }

    fn begin(lander: &Lander, way: Way, column: Column, host: &SharedBuf) -> Result<Self, LandError> {
        let columns = vec![column];
        let open = lander.lane(way == Way::Out, way == Way::Behind, |lane| lane.open(&columns))??;
        let (lander, host) = (lander.clone(), host.clone());
        Ok(Self { lander, way, columns, host, open: Some(open), is_whole: true })
    }

    /// Works on the lane. After an error it is not known what was enqueued: the lander takes no more.
    fn with<T>(
        &mut self,
        work: impl FnOnce(&mut Lane, &mut Open, &[Column]) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let open = self.open.as_mut().ok_or(DeviceError::OutOfBounds)?;
        let columns = &self.columns;
        let done = self.lander.lane(self.way == Way::Out, self.way == Way::Behind, |lane| {
            work(lane, open, columns).inspect_err(|error| lane.fail(error))
        });
        let done = done.unwrap_or_else(|error| match error {
            LandError::Device(error) => Err(error),
            _ => Err(DeviceError::OutOfBounds),
        });
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
            lane.near_waits(&computed)?;
            let (gathered, left) = lane.save(open, (host, columns), layer, Lies::Alone)?;
            Ok(Left { gathered, left })
        })
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        let Some(open) = self.open.take() else { return };
        let keeps = Box::new((std::mem::take(&mut self.columns), self.host.clone()));
        let is_whole = self.is_whole;
        // A lane that is not there has no work.
        let close = |lane: &mut Lane| drop(lane.close(open, keeps, is_whole));
        let _ = self.lander.lane(self.way == Way::Out, self.way == Way::Behind, close);
    }
}
