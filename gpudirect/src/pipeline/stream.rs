//! One stream of layers: the thread that brings them, the thread that follows the device, and the caller's end.

use std::any::Any;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use kvarts_contract::api::{Arrived, Late, TileSource, TiledRead};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::error::Reason;
use kvarts_layout::planted;

use crate::destination::Destination;
use crate::device::{Batch, Device, Direction, Event, Method, Piece, Stream};
use crate::error::{DeviceError, EndReason, LandError};
use crate::follow::{Asked, Followed, Follower, keep_for_good};
use crate::gather::{Curve, copy_split};
use crate::lander::Tiles;
use crate::pace::Worker;
use crate::ring::{RingPlace, begun_after};

/// A layer that may be used on the stream that was given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layer {
    /// Which layer of the shape.
    pub layer: u32,
    /// Blocks of it: all that were asked for.
    pub blocks: u32,
}

/// How a stream ended: the first `usable_layers` wanted layers of the first `usable_blocks` blocks are in device
/// memory, whole and verified.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerEnd {
    /// Leading layers whose copies are done.
    pub usable_layers: u32,
    /// Leading blocks that are good in them.
    pub usable_blocks: u32,
    /// Why not all came, if so.
    pub reason: Option<EndReason>,
}

/// The next thing that a stream has to say.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Next {
    /// A layer is usable on the stream.
    Layer(Layer),
    /// The stream that was given is being captured into a graph and cannot wait for the layer, which is still the next:
    /// ask again when the capture has ended, or with another stream.
    Refused(DeviceError),
    /// No more layers come.
    End(LayerEnd),
}

/// Layers that come through the arena.
pub(super) struct Landing {
    pub(super) device: Arc<dyn Device>,
    pub(super) curve: Arc<Curve>,
    /// The device stream of the copies.
    pub(super) copies: Stream,
    pub(super) into: Destination,
    /// The first of them.
    pub(super) first: u32,
    pub(super) places: Vec<RingPlace>,
    pub(super) ring: SharedBuf,
    pub(super) read: TiledRead<Box<dyn TileSource>>,
    /// Layers that have got memory.
    pub(super) granted: u32,
    /// Layers that have been read.
    pub(super) arrived: u32,
    pub(super) has_deadline: bool,
    /// What takes layers to their pages, if it is a lander.
    pub(super) through: Option<Tiles>,
}

impl Landing {
    /// Begins the layers that may be read when `left` have left the ring ([`begun_after`]).
    pub(super) fn grant(&mut self, left: u32) -> Result<(), Reason> {
        let may = begun_after(&self.places, left, self.arrived);
        while self.granted < may {
            let Some(place) = self.places.get(self.granted as usize) else { break };
            let Some(tile) = self.read.next_tile(place.bytes) else { break };
            let memory = self.ring.slice(place.offset as usize, place.bytes as usize);
            self.read.grant(tile, memory.ok_or(Reason::OutOfBounds)?, ())?;
            self.granted += 1;
        }
        Ok(())
    }
}

/// A ring that is opened as layers leave it.
struct RingCredit {
    /// Layers that landed before the first of this ring.
    before: u32,
    open: Box<dyn Fn(u32) + Send>,
}

/// What copies use that are under way: held until the last is done.
pub(super) type Keeps = Mutex<Vec<Box<dyn Any + Send>>>;

/// What brings layers works with.
pub(super) struct CopyQueue {
    pub(super) shared: Arc<Shared>,
    pub(super) keeps: Arc<Keeps>,
    // Last, so that what is kept is the follower's alone when it hears of no more.
    events: Sender<Asked>,
}

/// Notes, when it is dropped, that the thread that brings layers has ended, by a panic or not: then no thread waits for more.
struct Bringing<'a>(&'a Shared);

impl Drop for Bringing<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(EndReason::Store(Reason::Bug("the thread that reads layers panicked")));
        }
        self.0.change(|state| state.fed = true);
    }
}

#[derive(Default)]
pub(super) struct State {
    /// Layers whose copies are enqueued and that the caller has not taken.
    ready: VecDeque<(Layer, Event)>,
    /// Wanted layers whose copies are enqueued.
    enqueued: u32,
    /// Wanted layers whose copies are done.
    landed: u32,
    /// Why no more layers come; the first reason stays.
    reason: Option<EndReason>,
    /// What the device failed with: copies that are enqueued may never be done.
    broken: Option<DeviceError>,
    /// Leading blocks that are good.
    blocks: u32,
    /// The thread that brings layers has ended: nothing is enqueued any more.
    fed: bool,
    /// The caller wants no more.
    stopped: bool,
    /// The thread that brings layers, if it sleeps.
    feeder: Option<Waker>,
}

impl State {
    fn fail(&mut self, reason: EndReason) {
        if let EndReason::Device(error) = &reason {
            self.broken.get_or_insert_with(|| error.clone());
            // What has not landed by now is not given out any more.
            let (landed, ready) = (self.landed, self.enqueued - self.ready.len() as u32);
            self.ready.truncate(landed.saturating_sub(ready) as usize);
        }
        self.reason.get_or_insert(reason);
    }
}

pub(super) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    credits: Mutex<Vec<RingCredit>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change under the lock is one step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Ends the stream with what has come so far.
    pub(super) fn fail(&self, reason: EndReason) {
        self.change(|state| state.fail(reason));
    }

    /// Whether the stream ended for something that the store said.
    pub(super) fn is_the_stores_fault(&self) -> bool {
        matches!(self.lock().reason, Some(EndReason::Store(_)))
    }

    /// Whether there is no use in going on; if there is, `waker` is woken when there is none any more.
    pub(super) fn is_over_or_wake(&self, waker: &Waker) -> bool {
        let mut state = self.lock();
        let over = state.stopped || state.reason.is_some();
        if !over {
            state.feeder = Some(waker.clone());
        }
        over
    }

    /// Has a ring told how many layers have left it, of those behind the first `before`.
    pub(super) fn add_door(&self, before: u32, open: Box<dyn Fn(u32) + Send>) {
        let mut credits = self.credits.lock().unwrap_or_else(PoisonError::into_inner);
        credits.push(RingCredit { before, open });
        // Under the lock, or what landed meanwhile would open less than this.
        let landed = self.lock().landed;
        credits.iter().for_each(|credit| credit.hear(landed));
    }

    fn open_doors(&self) {
        let credits = self.credits.lock().unwrap_or_else(PoisonError::into_inner);
        let landed = self.lock().landed;
        credits.iter().for_each(|credit| credit.hear(landed));
    }

    /// Lets the thread that brings layers look at what has changed.
    fn wake_feeder(&self) {
        let waker = self.lock().feeder.clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl RingCredit {
    fn hear(&self, landed: u32) {
        (self.open)(landed.saturating_sub(self.before));
    }
}

/// Layers on their way to the device. Dropping it stops the read, waits for the copies that are enqueued and gives
/// everything back; what a stuck copy uses, or a straight read that is under way, comes back when that is done.
pub struct LayerStream {
    shared: Arc<Shared>,
    device: Arc<dyn Device>,
    wanted: u32,
    /// Its end ends the other's inbox.
    feeder: Worker,
    follower: Follower,
}

impl std::fmt::Debug for LayerStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.shared.lock();
        write!(f, "LayerStream({} of {} landed)", state.landed, self.wanted)
    }
}

impl LayerStream {
    /// Starts the threads of a stream of `wanted` layers of `blocks` blocks, which `bring` brings. `keeps` is what its
    /// copies use.
    pub(super) fn start(
        followed: Followed,
        (wanted, blocks): (u32, u32),
        keeps: Box<dyn Any + Send>,
        bring: impl FnOnce(&CopyQueue) + Send + 'static,
    ) -> Result<Self, LandError> {
        let state = State { blocks, ..State::default() };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let shared = Arc::new(Shared { state, changed, credits: Mutex::default() });
        let device = Arc::clone(&followed.device);
        let thread = |why| LandError::Request(why);
        let keeps = Arc::new(Mutex::new(vec![keeps]));
        let waiter = Waiter(Arc::clone(&shared));
        let (follower, events) =
            Follower::start("layer-copies", followed, Box::new(Arc::clone(&keeps)), move |ended| {
                waiter.hear(ended)
            })
            .map_err(thread)?;
        let queue = CopyQueue { shared: Arc::clone(&shared), keeps, events };
        let feeder = Worker::start("layer-reads", move || {
            let _bringing = Bringing(&queue.shared);
            bring(&queue);
        });
        Ok(Self { shared, device, wanted, feeder: feeder.map_err(thread)?, follower })
    }

    /// The next layer. What is enqueued on `stream` from now on runs when the layer is in device memory; this thread
    /// waits only until its copies are enqueued. After the last layer, or where one fails, the end.
    pub fn next_layer(&mut self, stream: &Stream) -> Next {
        let mut state = self.shared.lock();
        loop {
            if let Some((layer, event)) = state.ready.front().cloned() {
                drop(state);
                let is_awaited = !planted!("layer-not-awaited");
                let waited = if is_awaited { self.device.wait(stream, &event) } else { Ok(()) };
                state = self.shared.lock();
                // No other thread takes a layer; but a device that has failed meanwhile takes back layers that have not
                // landed.
                let is_there = state.ready.front().is_some_and(|(front, _)| *front == layer);
                match waited {
                    Ok(()) if is_there => {
                        state.ready.pop_front();
                        return Next::Layer(layer);
                    }
                    Ok(()) => {}
                    Err(DeviceError::Captured) => return Next::Refused(DeviceError::Captured),
                    Err(error) => {
                        // Also of a layer that has landed: a device that is lost waits for nothing any more.
                        state.fail(EndReason::Device(error));
                        self.shared.changed.notify_all();
                        return Next::End(self.end(&state));
                    }
                }
                continue;
            }
            let whole = state.landed == self.wanted;
            // What is enqueued lands or fails; the end says how far it came.
            let settled = state.fed && state.landed == state.enqueued;
            if whole || settled || state.broken.is_some() {
                return Next::End(self.end(&state));
            }
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn end(&self, state: &State) -> LayerEnd {
        let broken = state.broken.clone().map(EndReason::Device);
        let reason = broken.or_else(|| state.reason.clone()).unwrap_or(EndReason::Stopped);
        let reason = (state.landed < self.wanted).then_some(reason);
        LayerEnd { usable_layers: state.landed, usable_blocks: state.blocks, reason }
    }

    /// Layers that are in device memory, whether taken or not.
    pub fn landed(&self) -> u32 {
        self.shared.lock().landed
    }

    /// Stops the read. What is enqueued still lands.
    pub fn stop(&self) {
        self.shared.change(|state| state.stopped = true);
        self.shared.wake_feeder();
    }
}

impl Drop for LayerStream {
    fn drop(&mut self) {
        self.stop();
        self.feeder.join();
        self.follower.leave();
    }
}

/// Follows the device: opens rings as copies end.
struct Waiter(Arc<Shared>);

impl Waiter {
    fn hear(&self, ended: Result<(), DeviceError>) {
        match ended {
            Ok(()) => {
                self.0.change(|state| state.landed += 1);
                self.0.open_doors();
                self.0.wake_feeder();
            }
            Err(error) => {
                self.0.fail(EndReason::Device(error));
                self.0.wake_feeder();
            }
        }
    }
}

impl CopyQueue {
    /// Says that a layer's copies are enqueued, or how far they came.
    pub(super) fn enqueued(
        &self,
        device: &dyn Device,
        copies: &Stream,
        layer: Layer,
        copied: Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        // Behind a part of them as well: what was enqueued before the error still reads what is kept for it.
        self.followed(device.record(copies), layer, copied)
    }

    /// The same, by the event behind them.
    fn followed(
        &self,
        event: Result<Event, DeviceError>,
        layer: Layer,
        copied: Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let failed = copied.and(event.as_ref().map(drop).map_err(DeviceError::clone));
        self.shared.change(|state| match (&failed, &event) {
            (Ok(()), Ok(event)) => {
                state.enqueued += 1;
                // Behind a hole nothing is given out any more.
                if state.broken.is_none() {
                    state.ready.push_back((layer, event.clone()));
                }
            }
            (Err(error), _) | (_, Err(error)) => state.fail(EndReason::Device(error.clone())),
        });
        // That of a layer that was enqueued in part ends none.
        self.follow(event, failed.is_ok());
        failed
    }

    /// Has an event followed, and says whether it ends a layer.
    pub(super) fn follow(&self, event: Result<Event, DeviceError>, ends_layer: bool) {
        match event {
            // The other end lives as long as this one, unless it panicked, and then it keeps everything.
            Ok(event) => drop(self.events.send(Asked { event, ends_layer })),
            Err(DeviceError::Lost(_)) => {}
            // It is unknown when the enqueued copies are done, so what they use is never handed out again.
            Err(_) => keep_for_good(Arc::clone(&self.keeps)),
        }
    }

    /// Keeps something until the copies that are enqueued are done.
    pub(super) fn keep(&self, what: Box<dyn Any + Send>) {
        self.keeps.lock().unwrap_or_else(PoisonError::into_inner).push(what);
    }

    /// Layers that have been enqueued.
    pub(super) fn count(&self) -> u32 {
        self.shared.lock().enqueued
    }
}

/// Follows the store: gives the read the memory that layers leave, and enqueues the copies of each layer that is verified.
pub(super) struct StagedReader<'a> {
    landing: Landing,
    queue: &'a CopyQueue,
    pieces: Vec<Piece>,
    /// Layers of this ring that have left it.
    left: Arc<AtomicU32>,
    /// How many of them the read has got memory for.
    given: u32,
}

/// What a feeder waits for.
enum Came {
    /// Layers have left the ring.
    Room,
    /// Something of the read; nothing at the end of a layer.
    Arrived(Option<Arrived<()>>),
    Late,
}

impl<'a> StagedReader<'a> {
    /// Layers behind those that have been enqueued.
    pub(super) fn new(landing: Landing, queue: &'a CopyQueue) -> Self {
        let left = Arc::new(AtomicU32::new(0));
        let leaving = Arc::clone(&left);
        let leave = Box::new(move |layers| {
            leaving.fetch_max(layers, Ordering::AcqRel);
        });
        queue.shared.add_door(queue.count(), leave);
        Self { landing, queue, pieces: Vec::new(), left, given: 0 }
    }

    pub(super) fn run(mut self) {
        let shared = &self.queue.shared;
        while let Some(came) = self.next() {
            let outcome = match came {
                Came::Room => self.make_room(),
                // Told before its layer is.
                Came::Arrived(Some(Arrived::Bytes(_) | Arrived::Block(_))) => Ok(()),
                Came::Arrived(Some(Arrived::Layer { layer, blocks }))
                    if blocks == self.landing.into.blocks() =>
                {
                    self.landing.arrived += 1;
                    // Before its copies are enqueued, so that the disks have work meanwhile.
                    self.make_room().and_then(|()| self.copy(layer, blocks).map_err(EndReason::Device))
                }
                Came::Arrived(_) if self.landing.read.good() < self.landing.into.blocks() => {
                    shared.change(|state| state.blocks = self.landing.read.good());
                    let failure = self.landing.read.first_failure().map(|(_, reason)| reason);
                    Err(match failure {
                        Some(Reason::DeadlinePassed) => EndReason::Deadline,
                        failure => EndReason::Store(failure.unwrap_or(Reason::Bug(
                            "the read returned fewer blocks than requested, without a reason",
                        ))),
                    })
                }
                Came::Arrived(_) => Ok(()),
                Came::Late => {
                    shared.change(|state| state.blocks = self.landing.read.good());
                    Err(match self.landing.has_deadline {
                        true => EndReason::Deadline,
                        false => EndReason::Store(Reason::Busy("the store is closing")),
                    })
                }
            };
            if let Err(reason) = outcome {
                shared.fail(reason);
                break;
            }
        }
    }

    /// Gives the read the memory that layers have left.
    fn make_room(&mut self) -> Result<(), EndReason> {
        self.given = self.left.load(Ordering::Acquire);
        self.landing.grant(self.given).map_err(|reason| match reason {
            Reason::DeadlineInPast | Reason::DeadlinePassed => EndReason::Deadline,
            reason => EndReason::Store(reason),
        })
    }

    /// The next thing to do, or `None` if all layers have come or there is no use in going on.
    fn next(&mut self) -> Option<Came> {
        block_on(poll_fn(|context| {
            // Registered before the looks, so that what changes in between wakes.
            if self.queue.shared.is_over_or_wake(context.waker()) {
                return Poll::Ready(None);
            }
            if self.given < self.left.load(Ordering::Acquire) {
                return Poll::Ready(Some(Came::Room));
            }
            let Landing { read, granted, places, .. } = &mut self.landing;
            if read.is_idle() {
                let whole = *granted as usize == places.len();
                return if whole { Poll::Ready(None) } else { Poll::Pending };
            }
            read.poll_next(context).map(|came| {
                Some(match came {
                    Ok(arrived) => Came::Arrived(arrived),
                    Err(Late) => Came::Late,
                })
            })
        }))
    }

    fn copy(&mut self, layer: u32, blocks: u32) -> Result<(), DeviceError> {
        let landing = &self.landing;
        let at = layer.saturating_sub(landing.first) as usize;
        let place = landing.places.get(at).ok_or(DeviceError::OutOfBounds)?;
        let host = landing.ring.slice(place.offset as usize, place.bytes as usize);
        let host = host.ok_or(DeviceError::OutOfBounds)?;
        if let Some(through) = &mut self.landing.through {
            // After an error the lander keeps what it uses, and the stream ends.
            let landed = through.layer(&host, layer)?;
            return self.queue.followed(Ok(landed), Layer { layer, blocks }, Ok(()));
        }
        let landing = &self.landing;
        landing.into.pieces(layer, blocks, &mut self.pieces);
        let (direction, memories) = (Direction::ToDevice, landing.into.memories());
        let batch = Batch { direction, method: Method::Each, host: &host, memories, pieces: &[] };
        let device = &*landing.device;
        let copied = copy_split(device, &landing.copies, &landing.curve, &batch, &mut self.pieces);
        self.queue.enqueued(device, &landing.copies, Layer { layer, blocks }, copied)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvarts_contract::api::{Order, Placed, ReadSink, ReadStream, read_channel};
    use kvarts_layout::plan::Tile;
    use kvarts_layout::{BlockShape, ChunkShape, LayerShape};

    use super::*;
    use crate::device::emulated::{Emulated, Model};
    use crate::ring::places;

    /// A source that only notes which layers were begun.
    #[derive(Clone, Default)]
    struct Noted(Arc<Mutex<Vec<(u32, ReadSink)>>>);

    impl TileSource for Noted {
        fn begin(&self, tile: &Tile, _: Placed) -> Result<ReadStream, Reason> {
            let (sink, stream) = read_channel();
            self.0.lock().unwrap().push((tile.layers.start, sink));
            Ok(stream)
        }
    }

    #[test]
    fn the_first_layer_is_begun_alone_and_no_more_of_the_others_than_keep_the_disks_busy() {
        let bytes = 4 << 20;
        let chunk = || ChunkShape { bytes, align: 1 };
        let layers = (0..12).map(|layer| LayerShape { layer, chunks: vec![chunk()] }).collect();
        let shape = Arc::new(BlockShape::new(layers).unwrap());
        let device: Arc<dyn Device> = Arc::new(Emulated::new(Model::default()));
        let into = Destination::contiguous(&shape, device.allocate(shape.block_bytes()).unwrap(), 1).unwrap();
        let (_region, ring) = Curve::scratch(bytes * 12).unwrap();
        let noted = Noted::default();
        let source: Box<dyn TileSource> = Box::new(noted.clone());
        let mut landing = Landing {
            copies: device.stream().unwrap(),
            device,
            curve: Arc::default(),
            into,
            first: 0,
            places: places(&[bytes; 12], bytes * 12).unwrap(),
            ring,
            read: TiledRead::new(source, shape, Order::Layers, 0..12, 1),
            granted: 0,
            arrived: 0,
            has_deadline: false,
            through: None,
        };
        for (arrived, begun) in [(0, 1), (1, 9), (2, 10), (6, 12), (12, 12)] {
            landing.arrived = arrived;
            landing.grant(0).unwrap();
            let layers: Vec<u32> = noted.0.lock().unwrap().iter().map(|(layer, _)| *layer).collect();
            assert_eq!(layers, (0..begun).collect::<Vec<_>>(), "{arrived} have arrived");
        }
    }

    #[test]
    fn whoever_waits_for_layers_is_told_that_what_brings_them_panicked() {
        let device: Arc<dyn Device> = Arc::new(Emulated::new(Model::default()));
        let stream = device.stream().unwrap();
        let followed = Followed { device, timeout: Duration::from_secs(60) };
        let bring = |_: &CopyQueue| panic!("on purpose");
        let mut layers = LayerStream::start(followed, (2, 1), Box::new(()), bring).unwrap();
        let reason = Some(EndReason::Store(Reason::Bug("the thread that reads layers panicked")));
        let end = LayerEnd { usable_layers: 0, usable_blocks: 1, reason };
        assert_eq!(layers.next_layer(&stream), Next::End(end));
    }
}
