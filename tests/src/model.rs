//! The reference model: a store in memory, plain enough to be right by reading it.
//!
//! It answers as the engine must, check by check, and keeps blocks as bytes in ordered maps. It has no disk, no
//! executors and no room to run out of: what depends on those is not compared. A put is done when it returns, so
//! nothing is ever in flight.

mod plan;
mod space;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, ContainsReply, ContainsRequest, DeleteReply, DeleteRequest, KvStore, LeaseId, LeaseTerms,
    MAX_MATCH_ENTRIES, MAX_REQUEST_BLOCKS, MatchReply, MatchRequest, Missing, Order, PIN_BYTES, Parent,
    Placed, Presence, PutReply, PutRequest, ReadEnd, ReadEvent, ReadRequest, ReadStream, Sequence,
    SnapshotCursor, SnapshotPage, Subscription, TtlReply, TtlRequest, read_channel,
};
use kvarts_contract::clock::{Clock, Nanos};
use kvarts_contract::error::{Error, Reason, ShapeCause};
use kvarts_contract::events::{Cause, EventKind, EventLog, Subject};
use kvarts_contract::ticket::{Ticket, ticket};
use kvarts_layout::arrange::LAYOUT_VERSION;
use kvarts_layout::plan::WritePlan;
use kvarts_layout::{
    BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, Layout, NamespaceId, RunLayout,
};

/// A block's name: namespace, group, coordinate, key.
type Name = (NamespaceId, Group, Coordinate, BlockKey);

struct Namespace {
    geometry: Geometry,
    block_tokens: u32,
    default_ttl: Option<Duration>,
}

struct Block {
    /// In canonical order.
    chunks: Vec<Vec<u8>>,
    /// In milliseconds of the wall clock as it stood at opening and went on since.
    expires: Option<u64>,
    /// What stands before it, where its put said so.
    parent: Option<BlockKey>,
}

struct Lease {
    until: Nanos,
    tenant: u32,
    bytes: u64,
    held: Vec<Name>,
}

#[derive(Default)]
struct State {
    namespaces: BTreeMap<NamespaceId, Namespace>,
    blocks: BTreeMap<Name, Block>,
    leases: BTreeMap<LeaseId, Lease>,
    leases_given: u64,
}

/// The reference model.
pub struct Model {
    clock: Arc<dyn Clock>,
    /// The clocks when the store was opened: jumps of the wall clock after that change nothing.
    opened: (Nanos, u64),
    events: Arc<EventLog>,
    state: Mutex<State>,
}

/// Bytes of events that the model keeps.
const RING_BYTES: usize = 1 << 20;

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Model({} blocks)", self.lock().blocks.len())
    }
}

impl Model {
    /// An empty store.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        let opened = (clock.now(), clock.unix_millis());
        Self { clock, opened, events: EventLog::new(opened.1, RING_BYTES), state: Mutex::default() }
    }

    fn wall_ms(&self) -> u64 {
        let (now, wall_ms) = self.opened;
        wall_ms + self.clock.now().since(now).as_millis() as u64
    }

    /// When something ends that may live so long.
    fn expiry(&self, ttl: Duration) -> u64 {
        self.wall_ms().saturating_add(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets what has ended by now.
    fn current(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        let now = self.clock.now();
        state.leases.retain(|_, lease| now < lease.until);
        let now_ms = self.wall_ms();
        let State { blocks, leases, .. } = &mut *state;
        let held = |name: &Name| leases.values().any(|lease| lease.held.contains(name));
        blocks.retain(|name, block| {
            let stays = block.expires.is_none_or(|at| now_ms < at) || held(name);
            if !stays {
                let subject = Subject::Block(space::index_key(*name));
                self.events.change().tell(now_ms, EventKind::Expired, Cause::Ttl, subject);
            }
            stays
        });
        state
    }

    fn deadline(&self, deadline: Option<Nanos>) -> Result<(), Reason> {
        match deadline {
            Some(deadline) if deadline <= self.clock.now() => Err(Reason::DeadlineInPast),
            _ => Ok(()),
        }
    }

    fn try_put(&self, request: &PutRequest) -> Result<PutReply, Reason> {
        check_keys(&request.keys)?;
        self.deadline(request.deadline)?;
        if let Parent::Key(parent) = request.parent
            && request.keys.contains(&parent)
        {
            return Err(Reason::OutOfOrder(parent));
        }
        let blocks = request.keys.len() as u64;
        let counts = [request.origins.as_ref().map(Vec::len), Some(request.from.block_count() as usize)];
        if let Some(found) = counts.into_iter().flatten().find(|&found| found as u64 != blocks) {
            return Err(Reason::Length { expected: blocks, found: found as u64 });
        }
        let mut state = self.current();
        let shape = state.shape(request.namespace, request.group, request.coordinate)?;
        check_placement(&shape, &request.from)?;
        let default_ttl = state.namespaces.get(&request.namespace).and_then(|one| one.default_ttl);
        let expires = request.expires_after.or(default_ttl).map(|ttl| self.expiry(ttl));
        let mut outcomes = Vec::new();
        for (at, key) in (0u32..).zip(&request.keys) {
            let name = (request.namespace, request.group, request.coordinate, *key);
            let there = state.blocks.contains_key(&name);
            outcomes.push(if there { BlockOutcome::AlreadyThere } else { BlockOutcome::Stored });
            let before = at.checked_sub(1).and_then(|at| request.keys.get(at as usize)).copied();
            let parent = match request.parent {
                Parent::Unknown => None,
                Parent::Key(parent) => Some(before.unwrap_or(parent)),
                Parent::Root => before,
            };
            let chunks = || crate::fixture::read_block(&request.from, at, &shape);
            state.blocks.entry(name).or_insert_with(|| {
                let subject = Subject::Block(space::index_key(name));
                self.events.change().tell(self.wall_ms(), EventKind::Stored, Cause::Put, subject);
                Block { chunks: chunks(), expires, parent }
            });
        }
        Ok(PutReply { outcomes })
    }

    fn try_match(&self, request: &MatchRequest<'_>) -> Result<MatchReply, Reason> {
        if request.keys.len() > MAX_REQUEST_BLOCKS {
            return Err(Reason::TooMany("blocks"));
        }
        let mut state = self.current();
        let namespace =
            state.namespaces.get(&request.namespace).ok_or(Reason::UnknownNamespace(request.namespace))?;
        if request.requirements.block_tokens() != namespace.block_tokens {
            return Err(Reason::Shape(ShapeCause::Rule("requirements for blocks of another size")));
        }
        let columns: Vec<_> = request
            .requirements
            .groups()
            .iter()
            .flat_map(|one| one.coordinates.iter().map(|coordinate| (one.group, *coordinate)))
            .collect();
        let mut sizes = BTreeMap::new();
        for &(group, coordinate) in &columns {
            let shape = state.shape(request.namespace, group, coordinate)?;
            sizes.insert((group, coordinate), shape.block_bytes().max(PIN_BYTES));
        }
        let name = |block: u32, group, coordinate| {
            (request.namespace, group, coordinate, request.keys[block as usize])
        };
        let blocks = request.keys.len() as u32;
        let present = |block, group, coordinate| state.blocks.contains_key(&name(block, group, coordinate));
        let usable = request.requirements.usable_prefix(blocks, request.recompute_tokens_max, present);
        let within = |&(group, coordinate): &(Group, Coordinate)| {
            (0..usable.longest.blocks).map(move |block| name(block, group, coordinate))
        };
        let live = |name: &Name| state.blocks.contains_key(name);
        let held: Vec<Name> = columns.iter().flat_map(within).filter(live).collect();
        let bytes = held.iter().map(|(_, group, coordinate, _)| sizes[&(*group, *coordinate)]).sum();
        let lease = match &request.lease {
            Some(terms) if !held.is_empty() => Some(state.lease(terms, bytes, held, self.clock.now())?),
            _ => None,
        };
        let plan = request.plan.map(|terms| {
            let layers = state.namespaces[&request.namespace].geometry.layers().len();
            let here = |block, group, coordinate| state.blocks.contains_key(&name(block, group, coordinate));
            let shape =
                |group, coordinate| Ok(state.shape(request.namespace, group, coordinate)?.layers().to_vec());
            plan::plan(request, &terms, layers, here, shape)
        });
        let missing = Missing::default();
        Ok(MatchReply { usable, pending: 0, missing, lease, plan: plan.transpose()?.map(Box::new) })
    }

    fn try_contains(&self, request: &ContainsRequest<'_>) -> Result<ContainsReply, Reason> {
        if request.keys.len() > MAX_REQUEST_BLOCKS {
            return Err(Reason::TooMany("blocks"));
        }
        let mut state = self.current();
        let shape = state.shape(request.namespace, request.group, request.coordinate)?;
        let name = |key: &BlockKey| (request.namespace, request.group, request.coordinate, *key);
        let here = |key: &BlockKey| state.blocks.contains_key(&name(key));
        let presence =
            request.keys.iter().map(|key| if here(key) { Presence::Here } else { Presence::Absent });
        let presence = presence.collect();
        let held: Vec<Name> = request.keys.iter().filter(|key| here(key)).map(name).collect();
        let bytes = shape.block_bytes().max(PIN_BYTES) * held.len() as u64;
        let lease = match &request.lease {
            Some(terms) if !held.is_empty() => Some(state.lease(terms, bytes, held, self.clock.now())?),
            _ => None,
        };
        Ok(ContainsReply { presence, missing: Missing::default(), lease, deletes: 0 })
    }

    fn try_read(&self, request: &ReadRequest) -> Result<Vec<ReadEvent>, Reason> {
        check_keys(&request.keys)?;
        let blocks = request.keys.len() as u32;
        if request.into.gate().is_some() {
            // It answers at once, so layers cannot take turns.
            return Err(Reason::Overlap);
        }
        if request.into.block_count() != blocks {
            let found = u64::from(request.into.block_count());
            return Err(Reason::Length { expected: u64::from(blocks), found });
        }
        self.deadline(request.deadline)?;
        let state = self.current();
        let shape = state.shape(request.namespace, request.group, request.coordinate)?;
        let all = shape.layers().len() as u32;
        let layers = request.layers.clone().unwrap_or(0..all);
        if layers.is_empty() {
            return Err(Reason::Empty);
        }
        if layers.end > all {
            return Err(Reason::Shape(ShapeCause::Layers { end: layers.end, count: all }));
        }
        check_placement(&shape, &request.into)?;
        let of_chunk = crate::fixture::layer_of_chunks(&shape);
        let (mut failures, mut good) = (Vec::new(), Vec::new());
        for (at, key) in (0..).zip(&request.keys) {
            let name = (request.namespace, request.group, request.coordinate, *key);
            let Some(block) = state.blocks.get(&name) else {
                failures.push((at, Reason::NotHere(*key)));
                continue;
            };
            for ((part, bytes), layer) in (0..).zip(&block.chunks).zip(&of_chunk) {
                if layers.contains(layer)
                    && let Some(to) = request.into.chunk(part, at, bytes.len() as u64)
                {
                    to.copy_in(0, bytes);
                }
            }
            good.push(at);
        }
        let usable_blocks = failures.first().map_or(blocks, |(at, _)| *at);
        let usable_layers = layers.end - layers.start;
        let mut events: Vec<_> = match request.order {
            // There is nothing to announce layers of.
            Order::Layers if good.is_empty() => Vec::new(),
            Order::Layers => layers.map(|layer| ReadEvent::Layer { layer, blocks: usable_blocks }).collect(),
            Order::Blocks => good.into_iter().map(ReadEvent::Block).collect(),
        };
        events.push(ReadEvent::End(ReadEnd { usable_blocks, usable_layers, failures, held_bytes: 0 }));
        Ok(events)
    }
}

impl State {
    fn shape(&self, id: NamespaceId, group: Group, coordinate: Coordinate) -> Result<BlockShape, Reason> {
        let namespace = self.namespaces.get(&id).ok_or(Reason::UnknownNamespace(id))?;
        Ok(namespace.geometry.shape(group, coordinate, namespace.block_tokens)?)
    }

    fn lease(
        &mut self,
        terms: &LeaseTerms,
        bytes: u64,
        held: Vec<Name>,
        now: Nanos,
    ) -> Result<LeaseId, Reason> {
        let mine = self.leases.values().filter(|lease| lease.tenant == terms.tenant);
        let wanted = mine.map(|lease| lease.bytes).sum::<u64>() + bytes;
        if wanted > terms.cap_bytes {
            return Err(Reason::PinCap { limit: terms.cap_bytes, wanted });
        }
        self.leases_given += 1;
        let id = LeaseId(self.leases_given);
        self.leases.insert(id, Lease { until: now.plus(terms.hold), tenant: terms.tenant, bytes, held });
        Ok(id)
    }
}

fn check_keys(keys: &[BlockKey]) -> Result<(), Reason> {
    if keys.is_empty() {
        return Err(Reason::Empty);
    }
    if keys.len() > MAX_REQUEST_BLOCKS {
        return Err(Reason::TooMany("blocks"));
    }
    let mut seen = std::collections::BTreeSet::new();
    match keys.iter().find(|key| !seen.insert(**key)) {
        Some(key) => Err(Reason::Duplicate(*key)),
        None => Ok(()),
    }
}

/// A placement made for another shape is refused.
fn check_placement(shape: &BlockShape, placed: &Placed) -> Result<(), Reason> {
    let layout = RunLayout::new(Layout::FullBlock, LAYOUT_VERSION, shape, placed.block_count())?;
    Ok(WritePlan::new(&layout, placed.places(), 0).map(drop)?)
}

impl KvStore for Model {
    fn register(&self, identity: &Identity, geometry: &Geometry) -> Result<NamespaceId, Error> {
        let id = identity.namespace_id().map_err(Reason::from)?;
        if identity.spec_fingerprint != geometry.fingerprint() {
            return Err(Error(Reason::SpecMismatch));
        }
        let block_tokens = identity.block_tokens;
        geometry.check_block_tokens(block_tokens).map_err(Reason::from)?;
        let fresh = Namespace { geometry: geometry.clone(), block_tokens, default_ttl: None };
        self.lock().namespaces.entry(id).or_insert(fresh);
        Ok(id)
    }

    fn put(&self, request: PutRequest) -> Ticket<Result<PutReply, Error>> {
        let (reply, answer) = ticket();
        // The ticket is still here, so it cannot have been dropped.
        let _ = reply.send(self.try_put(&request).map_err(Error));
        answer
    }

    fn match_prefix(&self, request: &MatchRequest<'_>) -> Result<MatchReply, Error> {
        let columns: usize = request.requirements.groups().iter().map(|group| group.coordinates.len()).sum();
        if request.keys.len() * columns > MAX_MATCH_ENTRIES {
            return Err(Reason::TooMany("keys times coordinates").into());
        }
        self.try_match(request).map_err(Error)
    }

    fn contains(&self, request: &ContainsRequest<'_>) -> Result<ContainsReply, Error> {
        self.try_contains(request).map_err(Error)
    }

    fn unlock(&self, lease: LeaseId) -> bool {
        self.current().leases.remove(&lease).is_some()
    }

    fn renew(&self, lease: LeaseId, hold: Duration) -> Result<(), Error> {
        self.try_renew(lease, hold).map_err(Error)
    }

    fn delete(&self, request: DeleteRequest) -> Ticket<Result<DeleteReply, Error>> {
        let (reply, answer) = ticket();
        let _ = reply.send(self.try_delete(&request).map_err(Error));
        answer
    }

    fn set_ttl(&self, request: &TtlRequest<'_>) -> Result<TtlReply, Error> {
        self.try_set_ttl(request).map_err(Error)
    }

    fn set_default_ttl(&self, namespace: NamespaceId, ttl: Option<Duration>) -> Result<(), Error> {
        self.try_set_default_ttl(namespace, ttl).map_err(Error)
    }

    fn subscribe(&self, from: Option<Sequence>) -> Subscription {
        self.events.subscribe(from)
    }

    fn snapshot(&self, cursor: Option<SnapshotCursor>) -> Ticket<Result<SnapshotPage, Error>> {
        let (reply, answer) = ticket();
        let _ = reply.send(self.try_snapshot(cursor).map_err(Error));
        answer
    }

    fn read(&self, request: ReadRequest) -> Result<ReadStream, Error> {
        let (sink, stream) = read_channel();
        self.try_read(&request)?.into_iter().for_each(|event| sink.send(event));
        Ok(stream)
    }
}
