//! The side that asks: a way to the bytes of another node.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};

use bytes::Bytes;
use kvarts_contract::api::{Origins, ReadProgress, ReadRequest, ReadSink, ReadStream, read_channel};
use kvarts_contract::error::Reason;
use kvarts_contract::{class::Class, clock::Nanos};
use kvarts_layout::plan::Order;
use kvarts_layout::{BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId, StoreId};
use kvarts_wire::{busy, convert, proto};

use super::asked::wire_origins;
use super::bell::Bell;
use super::delivery::chunk_count;
use super::frame::{Kind, frame};
use super::hello::Member;
use super::limits::{
    CHUNKS_MAX, CONNECT, IDENTITY_BYTES_MAX, KEYS_MAX, NAMESPACES_MAX, OUTBOX_BYTES_MAX, PIECE_BYTES_MAX,
    PIECES_MAX, TIMEOUT_MAX, UNDER_WAY_BYTES,
};
use super::wire::{Wire, moved};
use crate::path::{Path, Piece};

/// Why nothing can be asked of a peer now.
pub(super) const AWAY: Reason = Reason::Busy(busy::PEER_AWAY);

/// What was asked and came so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ClientCounts {
    /// Whether there is a connection now.
    pub connected: bool,
    /// How often a connection was tried to be made so far.
    pub attempts: u64,
    /// Connections that were made so far.
    pub connections: u64,
    /// Pieces that were asked for.
    pub pieces: u64,
    /// Pieces of which something was not delivered, for whatever reason.
    pub failures: u64,
    /// Bytes of blocks that came to their places.
    pub bytes: u64,
    /// Bytes of blocks that came when no reader waited for them any more.
    pub unwanted: u64,
    /// Chunks whose digest was another.
    pub damaged: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) attempts: AtomicU64,
    pub(super) connections: AtomicU64,
    pub(super) pieces: AtomicU64,
    pub(super) failures: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) unwanted: AtomicU64,
    pub(super) damaged: AtomicU64,
}

/// What a piece is about, as far as its answer has to fit: kept until the answer has come.
#[derive(Clone, Debug)]
pub(super) struct Outline {
    pub(super) order: Order,
    pub(super) shape: Arc<BlockShape>,
    pub(super) layers: Range<u32>,
    pub(super) blocks: u32,
}

/// A piece that a reader waits for. Its memory is this side's until it is dropped.
pub(super) struct Wanted {
    pub(super) request: ReadRequest,
    pub(super) origins: Arc<Origins>,
    pub(super) first: u32,
    pub(super) sink: ReadSink,
    pub(super) deadline: Nanos,
    /// When the reader asked.
    pub(super) asked: Nanos,
    pub(super) progress: ReadProgress,
    /// By what the peer knows the namespace.
    pub(super) namespace: u32,
}

/// A piece without an answer.
pub(super) struct Open {
    pub(super) outline: Outline,
    /// Bytes that its answer has at most.
    pub(super) bytes: u64,
    /// The peer was asked. The others wait until less is under way.
    pub(super) is_told: bool,
    /// None: no reader waits any more.
    pub(super) wanted: Option<Wanted>,
}

/// A namespace that the peer may be asked about.
struct Known {
    number: u32,
    encoded: Bytes,
    geometry: Geometry,
    block_tokens: u32,
    shapes: BTreeMap<(u32, u64), Arc<BlockShape>>,
}

/// Shapes that are kept of a namespace.
const SHAPES_MAX: usize = 256;

/// Bytes that wait to be sent.
#[derive(Default)]
struct Outbox {
    bytes: Vec<u8>,
    sent: usize,
}

/// What callers and the thread of the connection share.
#[derive(Default)]
pub(super) struct State {
    wire: Option<Arc<dyn Wire>>,
    /// Since when there is no connection.
    away_since: Nanos,
    outbox: Outbox,
    known: BTreeMap<NamespaceId, Known>,
    /// Namespaces that this connection has opened: each has a number of its own.
    numbers: u32,
    pub(super) open: BTreeMap<u64, Open>,
    next: u64,
    /// Pieces that the peer was not asked for yet, in order; those among them that no reader waits for any more have gone from
    /// `open`.
    waiting: VecDeque<u64>,
    /// Bytes that the peer was asked for and that have not come.
    under_way: u64,
    /// When the thread looks by itself.
    pub(super) looks_at: Nanos,
    /// When the first of those pieces was asked for that have no answer.
    pub(super) asked_at: Nanos,
    pub(super) stopping: bool,
}

impl State {
    /// Before the first connection, which may take as long as one may take to be made: the peer said a moment ago that it is there.
    pub(super) fn away(now: Nanos) -> Self {
        Self { away_since: now.plus(CONNECT), ..Self::default() }
    }

    /// Sends what there is room for. An error is noticed by the thread as well, which receives.
    fn flush(&mut self) {
        let Some(wire) = &self.wire else { return };
        while let Some(rest) = self.outbox.bytes.get(self.outbox.sent..).filter(|rest| !rest.is_empty()) {
            match moved(wire.send(rest, false)) {
                Ok(Some(sent)) => self.outbox.sent += sent,
                Ok(None) | Err(_) => return,
            }
        }
        self.outbox.bytes.clear();
        self.outbox.sent = 0;
    }

    /// Sends a frame, or has it wait.
    pub(super) fn say(&mut self, frame: &[u8]) {
        self.outbox.bytes.extend_from_slice(frame);
        self.flush();
    }

    /// Whether something waits to be sent.
    pub(super) fn flush_all(&mut self) -> bool {
        self.flush();
        self.outbox.sent < self.outbox.bytes.len()
    }

    /// A connection was made: the peer is told of all namespaces.
    pub(super) fn attach(&mut self, wire: Arc<dyn Wire>) {
        (self.wire, self.outbox) = (Some(wire), Outbox::default());
        self.numbers = self.known.len() as u32;
        (0..).zip(self.known.values_mut()).for_each(|(number, known)| known.number = number);
        let opens: Vec<Vec<u8>> = self.known.values().map(Known::frame).collect();
        opens.iter().for_each(|frame| self.say(frame));
    }

    /// `bytes` bytes are not under way any more: the peer is asked for what waits.
    pub(super) fn came(&mut self, bytes: u64, now: Nanos) {
        self.under_way = self.under_way.saturating_sub(bytes);
        self.ask_on(now);
    }

    /// Asks the peer for pieces that wait, as long as no more is under way than may be.
    fn ask_on(&mut self, now: Nanos) {
        while let Some(number) = self.waiting.front().copied() {
            let under_way = self.under_way;
            let frame = self.open.get_mut(&number).map(|open| {
                let has_room = under_way == 0 || under_way.saturating_add(open.bytes) <= UNDER_WAY_BYTES;
                has_room.then(|| open.tell(number, now))
            });
            match frame {
                Some(None) => return,
                Some(Some((frame, bytes))) => {
                    self.under_way = under_way.saturating_add(bytes);
                    self.say(&frame);
                }
                None => {}
            }
            self.waiting.pop_front();
        }
    }

    /// The connection has ended; what was under way.
    pub(super) fn detach(&mut self, now: Nanos) -> BTreeMap<u64, Open> {
        (self.wire, self.outbox, self.away_since) = (None, Outbox::default(), now);
        (self.waiting, self.under_way) = (VecDeque::new(), 0);
        std::mem::take(&mut self.open)
    }
}

impl Open {
    /// The request as it goes to the peer, and the bytes that it asks for.
    fn tell(&mut self, number: u64, now: Nanos) -> (Vec<u8>, u64) {
        self.is_told = true;
        let Some(wanted) = &self.wanted else { return (Vec::new(), 0) };
        let timeout = u64::try_from(wanted.deadline.since(now).as_micros()).unwrap_or(u64::MAX);
        let (from, keys) = (wanted.first as usize, &wanted.request.keys);
        let met = wanted.origins.met();
        let met = met.get(from..from.saturating_add(keys.len())).unwrap_or_default();
        let keys = convert::key_bytes(keys);
        let asked = wire_read(wanted, &self.outline.layers, keys, wire_origins(met), timeout);
        (frame(Kind::Read, number, &asked), self.bytes)
    }
}

impl Known {
    fn frame(&self) -> Vec<u8> {
        let open = proto::LaneOpen { namespace: self.number, identity: self.encoded.clone() };
        frame(Kind::Open, 0, &open)
    }

    fn shape(&mut self, group: Group, coordinate: Coordinate) -> Result<Arc<BlockShape>, Reason> {
        let key = (group.0, coordinate.to_u64());
        if let Some(shape) = self.shapes.get(&key) {
            return Ok(Arc::clone(shape));
        }
        let shape = self.geometry.shape(group, coordinate, self.block_tokens);
        let shape = Arc::new(shape?);
        if self.shapes.len() < SHAPES_MAX {
            self.shapes.insert(key, Arc::clone(&shape));
        }
        Ok(shape)
    }
}

pub(super) struct Shared {
    pub(super) address: SocketAddr,
    pub(super) peer: StoreId,
    pub(super) member: Member,
    pub(super) bell: Arc<Bell>,
    pub(super) counters: Counters,
    pub(super) state: Mutex<State>,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while it is held would be in code that cannot; what is in it is whole between any two steps.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A peer's store as a way to bytes.
pub struct LaneClient(pub(super) Arc<Shared>);

impl LaneClient {
    /// Lets blocks of this namespace be read, also in later connections. A caller that has not all of an identity, the tenant's
    /// salt included, cannot.
    pub fn open(&self, identity: &Identity, geometry: &Geometry) -> Result<NamespaceId, Reason> {
        if identity.spec_fingerprint != geometry.fingerprint() {
            return Err(Reason::SpecMismatch);
        }
        let encoded = identity.encode()?;
        if encoded.len() > IDENTITY_BYTES_MAX - 64 {
            return Err(Reason::TooMany("bytes"));
        }
        let id = kvarts_layout::identity::namespace_of(&encoded);
        let mut state = self.0.lock();
        if state.known.contains_key(&id) {
            return Ok(id);
        }
        if state.known.len() >= NAMESPACES_MAX {
            return Err(Reason::TooMany("models"));
        }
        let known = Known {
            number: state.numbers,
            encoded: encoded.into(),
            geometry: geometry.clone(),
            block_tokens: identity.block_tokens,
            shapes: BTreeMap::new(),
        };
        let told = known.frame();
        state.known.insert(id, known);
        state.numbers += 1;
        match &state.wire {
            // A connection opens `NAMESPACES_MAX` and no more: the next one begins with those that are known then.
            Some(wire) if state.numbers as usize > NAMESPACES_MAX => wire.close(),
            Some(_) => state.say(&told),
            None => return Ok(id),
        }
        self.0.bell.ring();
        Ok(id)
    }

    /// Blocks of this namespace are not asked for any more.
    pub fn forget(&self, namespace: NamespaceId) {
        self.0.lock().known.remove(&namespace);
    }

    /// What its clock says: deadlines of pieces are measured by it.
    pub fn now(&self) -> Nanos {
        self.0.member.clock.now()
    }

    /// What was asked and came so far.
    pub fn counts(&self) -> ClientCounts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.0.counters;
        ClientCounts {
            connected: self.0.lock().wire.is_some(),
            attempts: of(&counters.attempts),
            connections: of(&counters.connections),
            pieces: of(&counters.pieces),
            failures: of(&counters.failures),
            bytes: of(&counters.bytes),
            unwanted: of(&counters.unwanted),
            damaged: of(&counters.damaged),
        }
    }
}

/// What can be said against a piece before its peer is asked.
fn check(request: &ReadRequest, shape: &BlockShape, now: Nanos) -> Result<Range<u32>, Reason> {
    let blocks = request.keys.len();
    match blocks {
        0 => return Err(Reason::Empty),
        1..=KEYS_MAX => {}
        _ => return Err(Reason::TooMany("blocks")),
    }
    let (expected, found) = (blocks as u64, u64::from(request.into.block_count()));
    if expected != found {
        return Err(Reason::Length { expected, found });
    }
    if request.into.gate().is_some() {
        return Err(Reason::Overlap);
    }
    if request.deadline.is_some_and(|deadline| deadline <= now) {
        return Err(Reason::DeadlineInPast);
    }
    let all = shape.layers().len() as u32;
    let layers = request.layers.clone().unwrap_or(0..all);
    if layers.is_empty() || layers.end > all {
        return Err(if layers.is_empty() { Reason::Empty } else { Reason::TooMany("layers") });
    }
    request.into.places().check(shape, layers.clone())?;
    let bytes = shape.layers_bytes(&layers).saturating_mul(expected);
    if bytes > PIECE_BYTES_MAX || chunk_count(shape, &layers).saturating_mul(expected) > CHUNKS_MAX {
        return Err(Reason::TooMany("bytes"));
    }
    Ok(layers)
}

/// A piece as its peer is asked for it.
pub(super) fn wire_read(
    wanted: &Wanted,
    layers: &Range<u32>,
    keys: Bytes,
    origins: Bytes,
    timeout_us: u64,
) -> proto::LaneRead {
    let request = &wanted.request;
    let class = match request.class {
        Class::Background => proto::ReadClass::ReadBackground,
        _ => proto::ReadClass::ReadPrefetch,
    };
    proto::LaneRead {
        namespace: wanted.namespace,
        column: Some(convert::wire_column(request.group, request.coordinate)),
        keys,
        first_layer: layers.start,
        layers: layers.len() as u32,
        by_blocks: request.order == Order::Blocks,
        class: class.into(),
        timeout_us,
        origins,
    }
}

impl Path for LaneClient {
    fn read(&self, piece: Piece) -> Result<ReadStream, Reason> {
        let Piece { request, origins, first } = piece;
        let shared = &self.0;
        let now = shared.member.clock.now();
        if (first as usize).saturating_add(request.keys.len()) > origins.len() {
            return Err(Reason::OutOfBounds);
        }
        let mut state = shared.lock();
        let known = state.known.get_mut(&request.namespace);
        let known = known.ok_or(Reason::UnknownNamespace(request.namespace))?;
        let (shape, namespace) = (known.shape(request.group, request.coordinate)?, known.number);
        let layers = check(&request, &shape, now)?;
        let Some(_) = &state.wire else { return Err(AWAY) };
        let waiting = state.outbox.bytes.len() - state.outbox.sent;
        if state.open.len() >= PIECES_MAX || waiting > OUTBOX_BYTES_MAX {
            return Err(Reason::Busy("the limit of requests to the peer is reached"));
        }
        let most = now.plus(TIMEOUT_MAX);
        let deadline = request.deadline.map_or(most, |deadline| deadline.min(most));
        let (sink, stream) = read_channel();
        // The thread notices that the caller has dropped its stream. It has not yet.
        let _ = sink.poll_cancelled(&Context::from_waker(&Waker::from(Arc::clone(&shared.bell))));
        let (order, blocks) = (request.order, request.keys.len() as u32);
        let progress = ReadProgress::new(order, blocks, layers.clone());
        let asked = now;
        let wanted = Wanted { request, origins, first, sink, deadline, asked, progress, namespace };
        let bytes = shape.layers_bytes(&layers).saturating_mul(u64::from(blocks));
        let outline = Outline { order, shape, layers, blocks };
        state.next += 1;
        let number = state.next;
        if state.open.is_empty() {
            state.asked_at = now;
        }
        state.open.insert(number, Open { outline, bytes, is_told: false, wanted: Some(wanted) });
        state.waiting.push_back(number);
        state.ask_on(now);
        let wakes = deadline < state.looks_at || state.outbox.sent < state.outbox.bytes.len();
        drop(state);
        shared.counters.pieces.fetch_add(1, Ordering::Relaxed);
        if wakes {
            shared.bell.ring();
        }
        Ok(stream)
    }

    fn away_since(&self) -> Option<Nanos> {
        let state = self.0.lock();
        state.wire.is_none().then_some(state.away_since)
    }
}

impl Drop for LaneClient {
    fn drop(&mut self) {
        self.0.lock().stopping = true;
        self.0.bell.ring();
    }
}

impl fmt::Debug for LaneClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LaneClient({} at {}, {:?})", self.0.peer, self.0.address, self.counts())
    }
}
