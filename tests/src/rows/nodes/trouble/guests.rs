//! Tenants of the node that is asked: what a server does for their calls between connection and store, with the server's own memory of
//! requests and turns of puts; and clients that stop half-way.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteRequest, KvStore, LayeredPut, LeaseTerms, Order, Origins, Placed,
    Presence, PutRequest, ReadRequest, StepGate, Target,
};
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Kind;
use kvarts_layout::{BlockKey, BlockShape, NamespaceId};
use kvarts_peer::node::{ClusterNode, Column, Fate, Placing};
use kvarts_peer::read::Runner;
use kvarts_server::state::{Memory, MemoryShares, Puts};
use kvarts_store::engine::Store;
use kvarts_wire::limits::STALL;

use crate::conformance::pages;
use crate::fixture;
use crate::nodes::ledger::Book;
use crate::nodes::tasks::Owner;

/// Bytes that requests share, and the largest request that counts as small: one block.
const MEMORY: usize = 4 << 20;
const SMALL: u64 = 32 << 10;
/// Puts by layers that one shard has at a time.
const LAYERED: usize = 4;

/// What the server of a node has for requests, divided among its tenants.
#[derive(Debug)]
pub(super) struct Front {
    memory: Memory,
    shares: MemoryShares,
    puts: Puts,
    /// The turns that there are.
    turns: u64,
}

impl Front {
    pub(super) fn new(tenants: &[u32]) -> Result<Arc<Self>, String> {
        let memory = Memory::new(MEMORY, SMALL, 0).map_err(|error| error.to_string())?;
        let (shares, puts) = (MemoryShares::new(&memory, tenants), Puts::new(&memory, tenants));
        let (turns, _) = puts.left();
        Ok(Arc::new(Self { memory, shares, puts, turns }))
    }

    /// Whether no request holds anything.
    pub(super) fn holds_nothing(&self) -> Result<(), String> {
        let (used, left) = (self.memory.usage().map(|usage| usage.used), self.puts.left());
        match used == [0, 0] && left == (self.turns, 0) {
            true => Ok(()),
            false => Err(format!("requests have {used:?} bytes; turns of puts and waiting puts: {left:?}")),
        }
    }
}

/// What is called.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call {
    Read,
    Put,
}

#[derive(Debug, Default)]
struct Noted {
    took: [Vec<Duration>; 2],
    most: Option<[Duration; 2]>,
}

/// How long calls took, and how long they may take once that is known.
#[derive(Clone, Debug, Default)]
pub(super) struct Times(Arc<Mutex<Noted>>);

impl Times {
    fn lock(&self) -> MutexGuard<'_, Noted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, call: Call, took: Duration) {
        self.lock().took[call as usize].push(took);
    }

    pub(super) fn most(&self, call: Call) -> Option<Duration> {
        self.lock().most.map(|most| most[call as usize])
    }

    /// What was noted so far; from now on calls may take as long as `most` makes of it.
    pub(super) fn hold_to(&self, most: impl Fn(Call, Duration) -> Duration) {
        let mut all = self.lock();
        let p99 = |times: &mut Vec<Duration>| {
            times.sort_unstable();
            times.get(times.len().saturating_sub(1) * 99 / 100).copied().unwrap_or_default()
        };
        let [reads, puts] = &mut all.took;
        let of = [most(Call::Read, p99(reads)), most(Call::Put, p99(puts))];
        all.most = Some(of);
    }
}

/// A tenant, and where its calls arrive.
#[derive(Clone)]
pub(super) struct Guest {
    pub(super) number: u32,
    pub(super) namespace: NamespaceId,
    pub(super) front: Arc<Front>,
    pub(super) node: Arc<ClusterNode>,
    pub(super) store: Store,
    pub(super) owner: Owner,
    pub(super) book: Book,
    pub(super) shape: Arc<BlockShape>,
}

impl Guest {
    pub(super) fn now(&self) -> Nanos {
        self.owner.now()
    }

    pub(super) async fn pause(&self, time: Duration) {
        self.owner.sleep_until(self.now().plus(time)).await;
    }

    /// Memory for blocks, as soon as it is this tenant's turn. It is given back when the last user of the places is gone.
    async fn memory(&self, blocks: usize) -> Option<Placed> {
        let Front { memory, shares, .. } = &*self.front;
        let (block, blocks) = (self.shape.block_bytes(), blocks as u64);
        let piece = shares.take(memory, self.number, block * blocks).await?.share();
        Placed::blocks(&self.shape, piece, blocks as u32).ok()
    }

    /// Reads blocks, and takes all that comes. Gives those that came.
    pub(super) async fn read(
        &self,
        what: &str,
        keys: &[BlockKey],
        order: Order,
        deadline: Option<Nanos>,
    ) -> Vec<u32> {
        let Some(into) = self.memory(keys.len()).await else { return Vec::new() };
        self.read_into(what, (keys, into), order, deadline).await
    }

    /// The same into this memory.
    pub(super) async fn read_into(
        &self,
        what: &str,
        (keys, into): (&[BlockKey], Placed),
        order: Order,
        deadline: Option<Nanos>,
    ) -> Vec<u32> {
        let begun = self.now();
        let (group, coordinate) = pages();
        let request = ReadRequest {
            order,
            deadline,
            ..ReadRequest::new(self.namespace, group, coordinate, keys.to_vec(), into.clone())
        };
        let stream = match self.node.read(request, &self.shape, &Origins::any(keys.len())) {
            Ok(stream) => stream,
            Err(error) if error.0.kind() == Kind::Bug => {
                self.book.violation(format!("{what}: {error}"));
                return Vec::new();
            }
            Err(_) => return Vec::new(),
        };
        let (good, end) = self.book.look(what, (keys, &into, order), &stream, &self.shape).await;
        self.book.look_for_the_gone(what, (0, begun), (keys, &into, &good), &self.shape);
        if let Some((block, reason)) = end.failures.iter().find(|(_, reason)| reason.kind() == Kind::Bug) {
            self.book.violation(format!("{what}: block {block}: {reason}"));
        }
        good
    }

    /// Begins a read, takes some events of it, and then nothing more until this time.
    pub(super) async fn read_and_stand_still(&self, keys: &[BlockKey], events: u64, until: Nanos) {
        let Some(into) = self.memory(keys.len()).await else { return };
        let (group, coordinate) = pages();
        let request = ReadRequest {
            order: Order::Blocks,
            ..ReadRequest::new(self.namespace, group, coordinate, keys.to_vec(), into.clone())
        };
        let Ok(stream) = self.node.read(request, &self.shape, &Origins::any(keys.len())) else { return };
        for _ in 0..events {
            let event = std::future::poll_fn(|context| stream.poll_next(context)).await;
            if matches!(event, kvarts_contract::api::ReadEvent::End(_)) {
                break;
            }
        }
        // As long as a server waits for a client that takes nothing.
        self.owner.sleep_until(until.min(self.now().plus(STALL))).await;
    }

    /// Puts blocks, as a server does.
    pub(super) async fn put(
        &self,
        keys: &[BlockKey],
        producer: u64,
        expires_after: Option<Duration>,
    ) -> Vec<BlockOutcome> {
        let refused = vec![BlockOutcome::HeldElsewhere; keys.len()];
        let Some(_turn) = self.front.puts.turn(self.number).await else { return refused };
        let (group, coordinate) = pages();
        let column = Column { namespace: self.namespace, group, coordinate, keys };
        self.node.note_use(&column, None);
        let placing = self.node.place(column, None).await;
        let Some(from) = self.memory(keys.len()).await else { return refused };
        for (at, key) in (0..).zip(keys) {
            let content = fixture::content(key, group, coordinate, producer, &self.shape);
            fixture::write_block(&from, at, &content);
        }
        let is_held = |placing: &Placing| placing.fates().contains(&Fate::Held);
        if placing.is_some_and(|placing| is_held(&placing)) {
            return refused;
        }
        let request = PutRequest {
            expires_after,
            ..PutRequest::new(self.namespace, group, coordinate, keys.to_vec(), from)
        };
        match self.store.put(request).await {
            Ok(Ok(reply)) => reply.outcomes,
            _ => refused,
        }
    }

    /// Begins a put, of which no more comes than its beginning until this time.
    pub(super) async fn put_and_stand_still(&self, blocks: usize, until: Nanos) {
        let Some(_turn) = self.front.puts.turn(self.number).await else { return };
        let Some(_from) = self.memory(blocks).await else { return };
        self.owner.sleep_until(until.min(self.now().plus(STALL))).await;
    }

    /// Holds memory as a client does that takes nothing of a tile of this length.
    pub(super) async fn hold(&self, bytes: u64, until: Nanos) {
        let Front { memory, shares, .. } = &*self.front;
        let _piece = shares.take(memory, self.number, bytes).await;
        self.owner.sleep_until(until).await;
    }

    /// Begins a put by layers.
    async fn begin_layered(&self, keys: &[BlockKey]) -> Option<LayeredPut> {
        let ((group, coordinate), blocks) = (pages(), keys.len() as u32);
        let memory =
            |layer: &kvarts_layout::LayerShape| fixture::memory(layer.bytes() * u64::from(blocks), 0);
        let layers: Vec<SharedBuf> = self.shape.layers().iter().map(memory).collect();
        let from = Placed::gated_layers(&self.shape, layers, blocks, StepGate::new(0)).ok()?;
        let request = PutRequest::new(self.namespace, group, coordinate, keys.to_vec(), from);
        self.store.put_layers(request).await.ok()?.ok()
    }

    /// Begins a put by layers, of which some come, and then nothing until this time.
    pub(super) async fn layers_and_stand_still(&self, keys: &[BlockKey], layers: u32, until: Nanos) {
        let Some(mut put) = self.begin_layered(keys).await else { return };
        put.offer(layers);
        self.owner.sleep_until(until).await;
    }

    /// Begins as many puts by layers as there may be. Gives how many there could not be.
    pub(super) async fn all_layered(&self, keys: &[BlockKey]) -> usize {
        let mut all = Vec::new();
        for key in keys.iter().take(LAYERED) {
            all.extend(self.begin_layered(std::slice::from_ref(key)).await);
        }
        LAYERED - all.len()
    }

    /// Looks blocks up, with a lease on those that are here.
    pub(super) fn look_up(&self, keys: &[BlockKey], hold: Duration, cap_bytes: u64) -> Vec<Presence> {
        let (group, coordinate) = pages();
        let lease = Some(LeaseTerms { hold, tenant: self.number, cap_bytes });
        let request = ContainsRequest { namespace: self.namespace, group, coordinate, keys, lease };
        self.store.contains(&request).map(|reply| reply.presence).unwrap_or_default()
    }

    /// Deletes blocks everywhere.
    pub(super) async fn delete(&self, keys: &[BlockKey]) {
        let target = Target::Keys { column: None, keys: keys.to_vec() };
        let request = DeleteRequest { namespace: self.namespace, target, deadline: None };
        drop(self.node.delete(request).await);
    }

    /// Does something, and takes it back after a time if it has not ended.
    pub(super) async fn cut_off(&self, after: Duration, call: impl Future<Output = ()>) {
        let mut call = pin!(call);
        let mut time = self.owner.sleep_until(self.now().plus(after));
        std::future::poll_fn(|context| {
            let is_over = call.as_mut().poll(context).is_ready() || time.as_mut().poll(context).is_ready();
            if is_over { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Does something that may take so long, and notes how long it took.
    pub(super) async fn timed<T>(
        &self,
        times: &Times,
        (call, number): (Call, u64),
        what: &str,
        doing: impl Future<Output = T>,
    ) -> T {
        let (begun, most) = (self.now(), times.most(call));
        let due = most.map(|most| self.book.ends_by(number, begun.plus(most), what));
        let done = doing.await;
        drop(due);
        let took = self.now().since(begun);
        times.note(call, took);
        if let Some(most) = most.filter(|most| took > *most) {
            self.book.violation(format!("{what} took {took:?}, not {most:?} at most"));
        }
        done
    }
}
