//! The way back: layers leave the device as they are computed, are written as they come, and are blocks when all are
//! there.
//!
//! [`LayerSink::store_layer`] enqueues the copy of a layer behind what the caller has enqueued so far: layer i-1 leaves
//! the device and is written to disk while layer i is computed. A thread follows the device; it digests each layer that
//! has left and hands it to the store, which writes it. [`LayerSink::seal`] waits for the copies and makes the blocks.
//! Until then no lookup finds them: a sink that is dropped, or whose device fails, leaves nothing on disk or in the arena.
//!
//! Where the store cannot take them one by one ([`KvStore::put_layers`](kvarts_contract::api::KvStore::put_layers) says
//! when), the arena holds all layers and they are put at [`LayerSink::seal`].

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_contract::api::{Durability, LayeredPut, Parent, Placed, PutReply, PutRequest, StepGate};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::ticket::Ticket;
use kvarts_layout::{BlockKey, Coordinate, Group, Layout, NamespaceId, planted};

use crate::destination::Destination;
use crate::device::{Batch, Direction, Event, Method, Piece, Stream};
use crate::error::{DeviceError, LandError};
use crate::follow::{Asked, Follower, keep_for_good};
use crate::gather::copy_split;
use crate::lander::{Left, Tiles};
use crate::pipeline::{LAYERS_AHEAD, Pipeline};
use crate::ring::{ALIGN, RingPlace, bytes_needed, places};

/// How long a seal waits for copies before it looks whether the put has ended meanwhile.
const LOOK: Duration = Duration::from_millis(5);

/// Blocks that are to be stored, layer by layer.
#[derive(Clone, Debug)]
pub struct StoreRequest {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The group of all blocks.
    pub group: Group,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
    /// What stands before the first block.
    pub parent: Parent,
    /// How many blocks of the prompt stand before the first, if known.
    pub first_block: Option<u32>,
    /// One key for each block.
    pub keys: Vec<BlockKey>,
    /// Where the engine has them.
    pub from: Destination,
    /// When the put is acknowledged.
    pub durability: Durability,
    /// When the caller stops caring.
    pub deadline: Option<Nanos>,
}

/// What the thread that follows the device and the caller share.
#[derive(Debug)]
struct State {
    /// The put, where the store takes layers one by one. Taken when it is sealed or given up.
    put: Option<LayeredPut>,
    /// Layers that have left the device.
    left: u32,
    /// Leading layers that were seen to be written.
    written: u32,
    /// Why no more is taken.
    failed: Option<LandError>,
}

impl State {
    /// No more layers are taken, and a thread that waits for the put's memory is told so. The first reason stays.
    fn fail(&mut self, error: LandError) {
        self.look();
        self.failed.get_or_insert(error);
        self.put = None;
    }

    /// The put, if there is one, unless it is over.
    fn going(&mut self) -> Result<Option<&LayeredPut>, LandError> {
        self.look();
        self.failed.clone().map_or(Ok(self.put.as_ref()), Err)
    }

    /// Notes how far the put has come, and whether it has ended by itself.
    fn look(&mut self) {
        let Some(put) = &mut self.put else { return };
        let written = put.layers_written();
        // None is written that was not offered. A put that has ended gives more, whatever it has written.
        if written <= self.left {
            self.written = self.written.max(written);
        } else if let Some(ended) = put.ended() {
            self.failed.get_or_insert(LandError::Store(why(ended)));
            self.put = None;
        }
    }
}

/// Layers on their way from the device. Dropping it waits for the copies that are enqueued, unless one is stuck, and
/// leaves nothing of the put.
#[derive(Debug)]
pub struct LayerSink {
    pipeline: Pipeline,
    request: StoreRequest,
    copies: Stream,
    ring: SharedBuf,
    places: Vec<RingPlace>,
    pieces: Vec<Piece>,
    /// What takes layers from their pages, if it is a lander.
    through: Option<Tiles>,
    /// Layers that were taken.
    taken: u32,
    state: Arc<Mutex<State>>,
    events: Option<Sender<Asked>>,
    follower: Follower,
    streamed: bool,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // Every change under the lock is one step.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A piece of the arena, cut for layers.
struct Cut {
    ring: SharedBuf,
    places: Vec<RingPlace>,
}

impl Pipeline {
    /// Begins to take layers. The arena must have room for two of them, or for all where the store cannot take them
    /// one by one.
    pub fn store_layers(&self, request: StoreRequest) -> Result<LayerSink, LandError> {
        if request.keys.len() != request.from.blocks() as usize {
            let (keys, places) = (request.keys.len(), request.from.blocks());
            return Err(LandError::Request(format!(
                "{keys} keys were given for {places} destination slots: give one key for each slot"
            )));
        }
        let sizes = request.from.layer_bytes();
        let all: u64 = sizes.iter().map(|bytes| bytes.next_multiple_of(ALIGN)).sum();
        let least = bytes_needed(&sizes, LAYERS_AHEAD).min(all);
        let copies = self.device().stream()?;
        let mut cut = self.cut(&sizes, least, all)?;
        let put = match self.begin_put(&request, &cut) {
            Ok(put) => Some(put),
            // Later it would be later still.
            Err(reason @ (Reason::DeadlinePassed | Reason::DeadlineInPast)) => {
                return Err(LandError::Store(reason));
            }
            Err(_) => {
                // What is wrong with the request is said when it is put whole.
                if cut.places.iter().any(|place| place.after > 0) {
                    drop(cut);
                    cut = self.cut(&sizes, all, all)?;
                }
                None
            }
        };
        let streamed = put.is_some();
        let state = Arc::new(Mutex::new(State { put, left: 0, written: 0, failed: None }));
        let theirs = Arc::clone(&state);
        let keeps = (cut.ring.clone(), request.from.clone(), copies.clone());
        let hear = move |ended| hear(&theirs, ended);
        let followed = Follower::start("layers-out", self.followed(), Box::new(keeps), hear);
        let (follower, events) = followed.map_err(LandError::Request)?;
        let (pipeline, Cut { ring, places }) = (self.clone(), cut);
        let (pieces, events) = (Vec::new(), Some(events));
        let through = match pipeline.through(&request.from) {
            Some((lander, column)) => Some(Tiles::save(lander, column, &ring)?),
            None => None,
        };
        Ok(LayerSink {
            through,
            pipeline,
            request,
            copies,
            ring,
            places,
            pieces,
            taken: 0,
            state,
            events,
            follower,
            streamed,
        })
    }

    /// A piece of the arena with places for these layers: of all the bytes that they have if that can be had, and of
    /// `least` at least.
    fn cut(&self, sizes: &[u64], least: u64, all: u64) -> Result<Cut, LandError> {
        let total = self.arena().piece_max();
        if least > total {
            return Err(LandError::ArenaTooSmall { wanted: least, total });
        }
        let full = || LandError::ArenaFull { wanted: least, free: self.arena().usage().largest_free };
        let ring = self.arena().take(least, all.max(least).next_power_of_two()).ok_or_else(full)?;
        let bug = || LandError::Request("the layers do not fit into the host memory for layers".to_owned());
        let places = places(sizes, ring.len() as u64).ok_or_else(bug)?;
        if least == all && places.iter().any(|place| place.after > 0) {
            return Err(bug());
        }
        Ok(Cut { ring, places })
    }

    fn begin_put(&self, request: &StoreRequest, cut: &Cut) -> Result<LayeredPut, Reason> {
        let buffers = buffers(cut).ok_or(Reason::OutOfBounds)?;
        let shape = request.from.shape();
        let from = Placed::gated_layers(shape, buffers, request.from.blocks(), StepGate::new(0))?;
        let begun = block_on(self.store().put_layers(put_request(request, from)));
        begun.map_err(|_| Reason::Busy("the store is closing"))?.map_err(|error| error.0)
    }
}

/// The memory of each layer.
fn buffers(cut: &Cut) -> Option<Vec<SharedBuf>> {
    cut.places.iter().map(|place| cut.ring.slice(place.offset as usize, place.bytes as usize)).collect()
}

fn put_request(request: &StoreRequest, from: Placed) -> PutRequest {
    PutRequest {
        namespace: request.namespace,
        group: request.group,
        coordinate: request.coordinate,
        parent: request.parent,
        first_block: request.first_block,
        keys: request.keys.clone(),
        from,
        // As it lies in the arena, so that it is written without a copy.
        layout: Some(Layout::LayerBlock),
        durability: request.durability,
        expires_after: None,
        origins: None,
        deadline: request.deadline,
    }
}

/// The next layer has left the device, or never will.
fn hear(state: &Mutex<State>, ended: Result<(), DeviceError>) {
    let mut state = lock(state);
    match ended {
        Ok(()) => {
            state.left += 1;
            let left = state.left;
            if let Some(put) = &mut state.put {
                put.offer(left);
            }
        }
        Err(error) => state.fail(LandError::Device(error)),
    }
}

impl LayerSink {
    /// Whether layers are written as they come. If not, all are put when the sink is sealed.
    pub fn is_streamed(&self) -> bool {
        self.streamed
    }

    /// Leading layers that have been written to disk, where they are written as they come. No lookup finds them before the
    /// sink is sealed. After a failure this is the number that was known by then.
    pub fn layers_written(&self) -> u32 {
        let mut state = lock(&self.state);
        state.look();
        state.written
    }

    /// Takes the next layer, in the order of the shape, as it is behind everything that `computed` has been given so
    /// far. The caller must not change it before the returned event is done: let the stream that would wait for it.
    /// Where the arena has no room for all layers, this waits until the layer whose place it takes has been written.
    pub fn store_layer(&mut self, layer: u32, computed: &Stream) -> Result<Event, LandError> {
        if layer != self.taken {
            return Err(LandError::Request(format!(
                "layer {layer} came out of order: layer {} is next",
                self.taken
            )));
        }
        let place = self.places.get(layer as usize).copied();
        let layers = self.places.len();
        let missing = || format!("layer {layer} does not exist: the number of layers is {layers}");
        let place = place.ok_or_else(|| LandError::Request(missing()))?;
        self.wait_for(place.after)?;
        let host = self.ring.slice(place.offset as usize, place.bytes as usize);
        let host = host.ok_or(LandError::Device(DeviceError::OutOfBounds))?;
        if let Some(through) = &mut self.through {
            // After an error the lander keeps what it uses.
            let Left { gathered, left } = through.leave(&host, layer, computed).inspect_err(|error| {
                if *error != DeviceError::Captured {
                    lock(&self.state).fail(LandError::Device(error.clone()));
                }
            })?;
            if let Some(events) = &self.events {
                // The other end lives as long as this one.
                let _ = events.send(Asked { event: left, ends_layer: true });
            }
            self.taken += 1;
            return Ok(gathered);
        }
        let device = Arc::clone(self.pipeline.device());
        let computed = device.record(computed)?;
        if !planted!("stored-before-computed") {
            device.wait(&self.copies, &computed)?;
        }
        self.request.from.pieces(layer, self.request.from.blocks(), &mut self.pieces);
        let (direction, memories) = (Direction::ToHost, self.request.from.memories());
        let batch = Batch { direction, method: Method::Each, host: &host, memories, pieces: &[] };
        let copied = copy_split(&*device, &self.copies, self.pipeline.curve(), &batch, &mut self.pieces);
        if let Err(error) = &copied {
            // Nothing is offered any more, whatever leaves the device.
            lock(&self.state).fail(LandError::Device(error.clone()));
        }
        // Behind a part of them as well: what was enqueued before the error still writes to the arena.
        let event = device.record(&self.copies);
        if let (Some(events), Ok(event)) = (&self.events, &event) {
            // The other end lives as long as this one.
            let _ = events.send(Asked { event: event.clone(), ends_layer: copied.is_ok() });
        }
        if !matches!(event, Ok(_) | Err(DeviceError::Lost(_))) {
            // It is unknown when the enqueued copies are done, so what they use is never handed out again.
            keep_for_good((self.ring.clone(), self.request.from.clone(), self.copies.clone()));
        }
        copied?;
        let event = event?;
        self.taken += 1;
        Ok(event)
    }

    /// Waits until `layers` leading layers have been written.
    fn wait_for(&self, layers: u32) -> Result<(), LandError> {
        let written = lock(&self.state).going()?.map(LayeredPut::written_so_far);
        if let Some(written) = written.filter(|_| layers > 0) {
            block_on(written.until(layers));
            lock(&self.state).going()?;
        }
        Ok(())
    }

    /// Waits until every layer has left the device, and makes the blocks. A layer that was never taken, or whose copy
    /// failed, makes this an error, and nothing is stored. A put that ends meanwhile, by its deadline or a failed write,
    /// makes it one at once: what copies under way use is kept until they are done.
    pub fn seal(mut self) -> Result<Ticket<Result<PutReply, Error>>, LandError> {
        let layers = self.places.len() as u32;
        if self.taken < layers {
            return Err(LandError::Request(format!("layer {} was not read from the device", self.taken)));
        }
        self.events = None;
        while !self.follower.leave_within(LOOK) {
            // The store ends the put by its deadline, which is by the store's clock.
            if let Err(error) = lock(&self.state).going().map(drop) {
                self.follower.let_go();
                return Err(error);
            }
        }
        let put = {
            let mut state = lock(&self.state);
            state.going()?;
            state.put.take()
        };
        if let Some(put) = put {
            return Ok(put.seal());
        }
        let cut = Cut { ring: self.ring.clone(), places: self.places.clone() };
        let buffers = buffers(&cut).ok_or(LandError::Device(DeviceError::OutOfBounds))?;
        let from = Placed::layers(self.request.from.shape(), buffers, self.request.from.blocks());
        let request = put_request(&self.request, from.map_err(LandError::Store)?);
        Ok(self.pipeline.store().put(request))
    }
}

impl Drop for LayerSink {
    fn drop(&mut self) {
        self.events = None;
        // The device may still write to the arena's piece; where a copy is stuck, the follower keeps it.
        self.follower.leave();
    }
}

/// Why a put ended before it was sealed.
fn why(ended: Result<PutReply, Error>) -> Reason {
    match ended {
        Err(error) => error.0,
        Ok(reply) => {
            let refused = reply.outcomes.into_iter().find_map(|outcome| match outcome {
                kvarts_contract::api::BlockOutcome::Refused(reason) => Some(reason),
                _ => None,
            });
            refused.unwrap_or(Reason::Bug("a put ended before it was sealed"))
        }
    }
}
