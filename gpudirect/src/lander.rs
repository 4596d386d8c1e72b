//! Landing and saving: blocks of a pool in pinned host memory, and pages of an engine's memory on a device.
//!
//! Landing does not read: everything is in the pool, verified. Of each layer the stretches go to a ring in device memory by the copy engine, in
//! copies of megabytes whatever the size of a page, and a kernel spreads them within the device's memory to the engine's pages. All of it is
//! enqueued at once, when the landing begins: the ring's places are reused in the order of streams, so no thread of the host waits for a layer. An
//! event for each layer is there from the beginning, for which the engine's stream waits ([`Landed::wait`]).
//!
//! Saving is the mirror image, layer by layer: behind the engine's work a kernel gathers the pages of a layer in the ring, and one copy for each
//! stretch takes them to the pool. Nothing is stored by it: when all layers have left, the blocks are there to be put.
//!
//! - What the device may use is kept until an event behind it is done: the ring by order, the pool's memory and the engine's by what the caller
//!   gives to keep. On a device that is lost or stuck it is kept for good; then the process is to be restarted, and every later call says so.
//! - Nothing is allocated on the device for a layer; for a request at most memory for the numbers of its slots, which is used again.
//! - Calls on one of the engine's threads wait for nothing.

mod lane;
mod tiles;

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_layout::plan::Stretch;
use kvarts_layout::planted;

use crate::device::{Device, Event, Stream};
use crate::error::{DeviceError, LandError};
use crate::follow::{COPY_TIMEOUT, Followed};
use crate::pages::Pages;

use lane::{Lane, Lies, Open};
pub(crate) use tiles::{Left, Tiles, fits};

/// Bytes of a ring by default.
pub const RING_BYTES: u64 = 64 << 20;

/// What blocks of a column lie in the pool, and the pages that they belong to.
#[derive(Clone, Debug)]
pub struct Column {
    /// Where the blocks are in the pool, in the order of the pages' blocks.
    pub stretches: Vec<Stretch>,
    /// Where the engine has them.
    pub pages: Pages,
}

/// What is to be landed or saved.
pub struct Move {
    /// The pool's memory. Register it with the device first ([`Device::pin`]): copies with memory that is not pinned may wait inside the driver.
    pub pool: Arc<Region>,
    /// The columns. All have as many layers.
    pub columns: Vec<Column>,
    /// What holds the blocks in the pool; it is dropped when the device uses them no more.
    pub keeps: Box<dyn Any + Send>,
}

impl fmt::Debug for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Move").field("columns", &self.columns.len()).finish_non_exhaustive()
    }
}

impl Move {
    /// The layers of its columns, if all have as many, and every block has its place.
    fn layers(&self, device: &dyn Device, segment: u64) -> Result<u32, LandError> {
        let wrong = |what: &str| LandError::Request(what.to_owned());
        let mut layers = None;
        for Column { stretches, pages } in &self.columns {
            let shape = pages.shape();
            let own = shape.layers().len() as u32;
            if *layers.get_or_insert(own) != own {
                return Err(wrong(
                    "the columns have different numbers of layers: give columns with the same \
                    number of layers",
                ));
            }
            let blocks: u64 = stretches.iter().map(|stretch| u64::from(stretch.count)).sum();
            if blocks != u64::from(pages.blocks()) {
                return Err(LandError::Request(format!(
                    "{blocks} blocks were given, but the pages are for {} \
                    blocks",
                    pages.blocks()
                )));
            }
            pages.memories().iter().try_for_each(|memory| device.owns(memory))?;
            for (part, chunk) in (0..own).flat_map(|layer| pages.parts_of(layer)) {
                if chunk > segment {
                    return Err(LandError::Request(format!(
                        "a chunk has {chunk} bytes, but the ring copies at most {segment} bytes at a time: \
                        use a larger ring"
                    )));
                }
                let inside = |stretch: &Stretch| {
                    stretch.part(shape, part).is_some_and(|(at, bytes)| at + bytes <= self.pool.len() as u64)
                };
                if !stretches.iter().all(inside) {
                    return Err(wrong("a range of blocks lies outside the pool"));
                }
            }
        }
        layers.ok_or_else(|| wrong("the request has no block"))
    }
}

/// What moves blocks between pools and the memory of one device. Cheap to clone; all landings of a process share one.
#[derive(Clone, Debug)]
pub struct Lander(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device: Arc<dyn Device>,
    inward: Mutex<Lane>,
    /// For landings whose pages are in use when they come: they wait for each other, and no other landing for them.
    behind: Mutex<Lane>,
    outward: Mutex<Lane>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under these locks is one step, or is marked as failed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Lander {
    /// A lander with three rings of `ring_bytes` on the device: one for landings, one for those whose pages are in use when they come, and one for
    /// saves.
    pub fn new(device: &Arc<dyn Device>, ring_bytes: u64) -> Result<Self, LandError> {
        Self::with_timeout(device, ring_bytes, COPY_TIMEOUT)
    }

    /// The same with another bound on how long a request may take once the one before it has ended; what takes longer is stuck.
    pub fn with_timeout(
        device: &Arc<dyn Device>,
        ring_bytes: u64,
        timeout: Duration,
    ) -> Result<Self, LandError> {
        let lane = |name| {
            let followed = Followed { device: Arc::clone(device), timeout };
            Lane::new(followed, name, ring_bytes).map(Mutex::new)
        };
        let (inward, behind, outward) = (lane("kvarts-land")?, lane("kvarts-behind")?, lane("kvarts-save")?);
        Ok(Self(Arc::new(Inner { device: Arc::clone(device), inward, behind, outward })))
    }

    /// Enqueues the landing of all layers. Pages are written behind `after`, if it is given: the engine's last kernel that uses them; without
    /// it they must be idle now. The ring is filled before that. The engine must come to `after` within the lander's timeout; what is landed
    /// later waits only if its own `after` is not done either.
    ///
    /// Pages of a landing are in use until it is done ([`Landed::done`]), also if it was dropped: two landings into the same pages are in no order.
    ///
    /// An error is that of the device, or of the request before anything was enqueued. On a device that fails half-way pages may still be
    /// written: it is to be treated as lost.
    pub fn land(&self, what: Move, after: Option<&Event>) -> Result<Landed, LandError> {
        let in_use = self.in_use(after)?;
        let lane = if in_use { &self.0.behind } else { &self.0.inward };
        self.land_in(&mut lock(lane), what, after.filter(|_| in_use))
    }

    /// Whether pages are still in use until an event.
    fn in_use(&self, after: Option<&Event>) -> Result<bool, DeviceError> {
        let waits = |after| self.0.device.synchronize_within(after, Duration::ZERO).map(|is_done| !is_done);
        after.map_or(Ok(false), waits)
    }

    fn land_in(&self, lane: &mut Lane, what: Move, after: Option<&Event>) -> Result<Landed, LandError> {
        let layers = what.layers(&*self.0.device, lane.segment_bytes())?;
        let pool = whole(&what.pool)?;
        let mut open = lane.open(&what.columns)?;
        let after = after.filter(|_| !planted!("landed-while-in-use"));
        let waits = after.map_or(Ok(()), |after| lane.near_waits(after));
        let ended: Result<Vec<Event>, DeviceError> = waits.and_then(|()| {
            let layers =
                (0..layers).map(|layer| lane.land(&mut open, (&pool, &what.columns), layer, Lies::InExtents));
            layers.collect::<Result<_, _>>().inspect_err(|error| lane.fail(error))
        });
        let done = lane.close(open, Box::new((what, pool)), ended.is_ok());
        Ok(Landed { device: Arc::clone(&self.0.device), events: ended?, done })
    }

    /// Begins a save: layers leave by [`Saving::layer`]. The pages must have every byte of the blocks ([`Pages::is_whole`]): what lies in the
    /// pool afterwards are whole blocks.
    pub fn save(&self, what: Move) -> Result<Saving, LandError> {
        let mut lane = lock(&self.0.outward);
        let layers = what.layers(&*self.0.device, lane.segment_bytes())?;
        if !what.columns.iter().all(|column| column.pages.is_whole()) {
            return Err(LandError::Request(
                "the pages lack bytes of a block: a save needs all bytes of its blocks".to_owned(),
            ));
        }
        let pool = whole(&what.pool)?;
        let open = lane.open(&what.columns)?;
        drop(lane);
        Ok(Saving { lander: self.clone(), what: Some((what, pool)), open: Some(open), next: 0, layers })
    }
}

fn whole(pool: &Arc<Region>) -> Result<SharedBuf, LandError> {
    SharedBuf::new(pool, 0, pool.len()).ok_or(LandError::Device(DeviceError::OutOfBounds))
}

/// How a landing or a save ended, once it has.
#[derive(Clone, Debug, Default)]
pub struct Done(Arc<Ended>);

#[derive(Debug, Default)]
struct Ended {
    outcome: Mutex<Option<Result<(), DeviceError>>>,
    changed: Condvar,
}

impl Done {
    fn tell(&self, outcome: Result<(), DeviceError>) {
        lock(&self.0.outcome).get_or_insert(outcome);
        self.0.changed.notify_all();
    }

    /// How it ended, if it has: then the device uses neither the pool nor the pages for it.
    pub fn outcome(&self) -> Option<Result<(), DeviceError>> {
        lock(&self.0.outcome).clone()
    }

    /// Blocks the thread until it has ended, or for so long. Not for a thread of an engine that computes.
    pub fn wait(&self, most: Duration) -> Option<Result<(), DeviceError>> {
        let goes_on = |outcome: &mut Option<_>| outcome.is_none();
        let waited = self.0.changed.wait_timeout_while(lock(&self.0.outcome), most, goes_on);
        waited.unwrap_or_else(PoisonError::into_inner).0.clone()
    }
}

/// Layers on their way to the engine's pages. It may be dropped at any time: what was enqueued lands all the same.
#[derive(Debug)]
pub struct Landed {
    device: Arc<dyn Device>,
    events: Vec<Event>,
    done: Done,
}

impl Landed {
    /// What the engine's stream is given from now on runs when this layer has landed. The calling thread does not wait. Where the layer cannot
    /// land any more this is an error, at once if that is known already; if not, the work behind it does not run.
    pub fn wait(&self, layer: u32, stream: &Stream) -> Result<(), LandError> {
        if let Some(Err(error)) = self.done.outcome() {
            return Err(LandError::Device(error));
        }
        let event = self.events.get(layer as usize);
        let missing = || {
            let layers = self.events.len();
            LandError::Request(format!("layer {layer} does not exist: the number of layers is {layers}"))
        };
        let event = event.ok_or_else(missing)?;
        if planted!("landed-layer-not-awaited") {
            return Ok(());
        }
        Ok(self.device.wait(stream, event)?)
    }

    /// How it ended, once it has.
    pub fn done(&self) -> &Done {
        &self.done
    }
}

/// Layers on their way from the engine's pages. Dropping it early leaves bytes in the pool that are no blocks.
#[derive(Debug)]
pub struct Saving {
    lander: Lander,
    what: Option<(Move, SharedBuf)>,
    open: Option<Open>,
    next: u32,
    layers: u32,
}

impl Saving {
    /// Enqueues that a layer leaves its pages, behind what the engine's stream was given so far. The pages may be written again by what that
    /// stream is given behind the answer's event. Layers come in order.
    pub fn layer(&mut self, layer: u32, computed: &Stream) -> Result<Event, LandError> {
        if layer != self.next || layer >= self.layers {
            return Err(LandError::Request(format!(
                "layer {layer} came out of order: layer {} of {} is next",
                self.next, self.layers
            )));
        }
        let lander = self.lander.clone();
        let mut lane = lock(&lander.0.outward);
        let (Some((what, pool)), Some(open)) = (&self.what, &mut self.open) else {
            return Err(LandError::Request("the save has ended".to_owned()));
        };
        // Of a stream that is being captured nothing was taken: the same layer may come again.
        let computed = lander.0.device.record(computed)?;
        if !planted!("saved-before-computed") {
            lane.near_waits(&computed)?;
        }
        let saved = lane.save(open, (pool, &what.columns), layer, Lies::InExtents);
        match &saved {
            Ok(_) => self.next += 1,
            Err(error) => {
                lane.fail(error);
                self.end(&mut lane, false);
            }
        }
        Ok(saved?.0)
    }

    /// No more layers come; the answer tells when all have left. An error where some have not been given.
    pub fn finish(mut self) -> Result<Done, LandError> {
        if self.next < self.layers {
            return Err(LandError::Request(format!("layer {} was not saved", self.next)));
        }
        let lander = self.lander.clone();
        let mut lane = lock(&lander.0.outward);
        self.end(&mut lane, true).ok_or_else(|| LandError::Request("the save has ended".to_owned()))
    }

    fn end(&mut self, lane: &mut Lane, is_whole: bool) -> Option<Done> {
        let (what, open) = self.what.take().zip(self.open.take())?;
        Some(lane.close(open, Box::new(what), is_whole))
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        let lander = self.lander.clone();
        self.end(&mut lock(&lander.0.outward), false);
    }
}

#[cfg(test)]
mod tests;
