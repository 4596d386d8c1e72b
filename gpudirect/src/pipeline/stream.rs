//! One stream of layers: the thread that follows the store, the thread that follows the device, and the caller's end.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use kvarts_store::api::{ReadEnd, ReadEvent, ReadStream, Turns};
use kvarts_store::error::Reason;
use kvarts_store::io::Buf;
use kvarts_store::rt::blocking::block_on;

use crate::destination::Destination;
use crate::device::{Batch, Device, Direction, Event, Method, Piece, Stream};
use crate::error::{DeviceError, EndReason, LandError};
use crate::follow::{Followed, Follower};
use crate::gather::{Curve, copy_split};
use crate::pace::Worker;
use crate::ring::{Seat, open_after};

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
    /// No more layers come.
    End(LayerEnd),
}

/// What a stream works with.
pub(super) struct Landing {
    pub(super) followed: Followed,
    pub(super) curve: Arc<Curve>,
    /// The device stream of the copies.
    pub(super) copies: Stream,
    pub(super) into: Destination,
    /// The first wanted layer.
    pub(super) first: u32,
    pub(super) seats: Vec<Seat>,
    pub(super) ring: Buf,
    pub(super) turns: Turns,
    pub(super) has_deadline: bool,
}

#[derive(Default)]
struct State {
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
    /// The store's thread has ended: nothing is enqueued any more.
    fed: bool,
    /// The caller wants no more.
    stopped: bool,
    /// The thread that follows the store, if it sleeps.
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

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
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

    /// Lets the thread that follows the store look at what has changed.
    fn wake_feeder(&self) {
        let waker = self.lock().feeder.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Layers on their way to the device. Dropping it stops the read, waits for the copies that are enqueued and gives
/// everything back; what a stuck copy uses comes back when that copy is done.
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
    pub(super) fn start(landing: Landing, read: ReadStream) -> Result<Self, LandError> {
        let state = State { blocks: landing.into.blocks(), ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let wanted = landing.seats.len() as u32;
        let device = Arc::clone(&landing.followed.device);
        let thread = |why| LandError::Request(why);
        // What copies use; the stream too, which may wait for its work when it goes.
        let keeps = (landing.ring.clone(), landing.into.clone(), landing.copies.clone());
        let waiter = Waiter {
            seats: landing.seats.clone(),
            turns: landing.turns.clone(),
            shared: Arc::clone(&shared),
        };
        let (follower, events) =
            Follower::start("layer-copies", landing.followed.clone(), Box::new(keeps), move |ended| {
                waiter.hear(ended)
            })
            .map_err(thread)?;
        let theirs = Arc::clone(&shared);
        let feeder = Worker::start("layer-reads", move || {
            Feeder { landing, shared: theirs, events, pieces: Vec::new() }.run(read);
        });
        Ok(Self { shared, device, wanted, feeder: feeder.map_err(thread)?, follower })
    }

    /// The next layer. What is enqueued on `stream` from now on runs when the layer is in device memory; this thread
    /// waits only until its copies are enqueued. After the last layer, or where one fails, the end.
    pub fn next_layer(&mut self, stream: &Stream) -> Next {
        let mut state = self.shared.lock();
        loop {
            if let Some((layer, event)) = state.ready.pop_front() {
                drop(state);
                match self.device.wait(stream, &event) {
                    Ok(()) => return Next::Layer(layer),
                    Err(error) => self.shared.change(|state| state.fail(EndReason::Device(error))),
                }
                state = self.shared.lock();
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

/// Follows the device: opens the ring as copies end.
struct Waiter {
    seats: Vec<Seat>,
    turns: Turns,
    shared: Arc<Shared>,
}

impl Waiter {
    fn hear(&self, ended: Result<(), DeviceError>) {
        match ended {
            Ok(()) => {
                let mut landed = 0;
                self.shared.change(|state| {
                    state.landed += 1;
                    landed = state.landed;
                });
                self.turns.open(open_after(&self.seats, landed));
            }
            Err(error) => {
                self.shared.change(|state| state.fail(EndReason::Device(error)));
                self.shared.wake_feeder();
            }
        }
    }
}

/// Follows the store: enqueues the copies of each layer that is verified.
struct Feeder {
    landing: Landing,
    shared: Arc<Shared>,
    events: Sender<Event>,
    pieces: Vec<Piece>,
}

impl Feeder {
    fn run(mut self, read: ReadStream) {
        while let Some(event) = self.next(&read) {
            let outcome = match event {
                ReadEvent::Layer { layer, blocks } if blocks == self.landing.into.blocks() => {
                    self.copy(layer, blocks).map_err(EndReason::Device)
                }
                ReadEvent::Layer { blocks, .. } => {
                    self.shared.change(|state| state.blocks = blocks);
                    let failure = read.first_failure().map(|(_, reason)| reason);
                    Err(EndReason::Store(failure.unwrap_or(Reason::Bug("fewer blocks without a reason"))))
                }
                ReadEvent::End(end) => {
                    self.shared.change(|state| state.blocks = end.usable_blocks);
                    if end.failures.is_empty() && end.usable_layers == self.landing.seats.len() as u32 {
                        break;
                    }
                    Err(why(&end, self.landing.has_deadline))
                }
                ReadEvent::Block(_) | ReadEvent::Released => continue,
            };
            if let Err(reason) = outcome {
                self.shared.change(|state| state.fail(reason));
                break;
            }
        }
        drop(read);
        self.shared.change(|state| state.fed = true);
    }

    /// The next event, or `None` if there is no use in going on.
    fn next(&self, read: &ReadStream) -> Option<ReadEvent> {
        block_on(poll_fn(|context| {
            {
                let mut state = self.shared.lock();
                if state.stopped || state.reason.is_some() {
                    return Poll::Ready(None);
                }
                state.feeder = Some(context.waker().clone());
            }
            read.poll_next(context).map(Some)
        }))
    }

    fn copy(&mut self, layer: u32, blocks: u32) -> Result<(), DeviceError> {
        let landing = &self.landing;
        let at = layer.saturating_sub(landing.first) as usize;
        let seat = landing.seats.get(at).ok_or(DeviceError::OutOfBounds)?;
        let host = landing.ring.slice(seat.offset as usize, seat.bytes as usize);
        let host = host.ok_or(DeviceError::OutOfBounds)?;
        landing.into.pieces(layer, blocks, &mut self.pieces);
        let (direction, memories) = (Direction::ToDevice, landing.into.memories());
        let batch = Batch { direction, method: Method::Each, host: &host, memories, pieces: &[] };
        copy_split(&*landing.followed.device, &landing.copies, &landing.curve, &batch, &mut self.pieces)?;
        let event = landing.followed.device.record(&landing.copies)?;
        self.shared.change(|state| {
            state.enqueued += 1;
            state.ready.push_back((Layer { layer, blocks }, event.clone()));
        });
        // The other end lives as long as this one.
        let _ = self.events.send(event);
        Ok(())
    }
}

/// Why a read ended early.
fn why(end: &ReadEnd, has_deadline: bool) -> EndReason {
    match end.failures.first() {
        Some((_, Reason::DeadlinePassed)) => EndReason::Deadline,
        Some((_, reason)) => EndReason::Store(reason.clone()),
        None if has_deadline => EndReason::Deadline,
        None => EndReason::Store(Reason::Busy("the store is closing")),
    }
}
