//! Blocks that a read wants and that are not here are brought from the bucket into the store, and given to the read as they come.
//!
//! Each block is brought once, however many reads want it; what failed is not asked for again for a while. What comes is proven by its
//! digests before anything is done with it; then it lies in memory (`landed`), where pieces of reads take it from (`path`), until its
//! flight has had it stored by an ordinary put, and some seconds longer if nothing else needs the memory: a read by layers wants the last
//! layers of the first blocks long after these were stored.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use kvarts_cold::ColdError;
use kvarts_cold::promote::{Memory, News, Restored, Wanted, restore_and_tell};
use kvarts_cold::restore::FetchOptions;
use kvarts_cold::tier::Known;
use kvarts_cold::time::BoxFuture;
use kvarts_contract::api::{Durability, ReadRequest};
use kvarts_contract::buffers::{Arena, BufMut, Region, SharedBuf};
use kvarts_layout::identity::TenantSalt;
use kvarts_layout::{BlockKey, NamespaceId};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::AbortHandle;

use super::ColdTier;
use super::counts::add;
use super::landed::Landed;
use super::readers::{Boarding, Flying, Reading};
use super::spare::{Coming, Spare};
use super::wish::{Name, Wish};

/// A block of more bytes is not brought: it takes too much memory.
const BLOCK_MOST: u64 = 64 << 20;
/// Bytes of blocks that one task brings, and keeps in memory until it ends. Several at once: while one has its last blocks stored,
/// others use the way to the bucket.
const FLIGHT_BYTES: u64 = 32 << 20;
/// Blocks that may be under way, waiting ones included.
const BLOCKS_MOST: usize = 1 << 16;
/// How long a task may take from its turn on, beside the time for its bytes.
const FLIGHT_TIMEOUT: Duration = Duration::from_secs(60);
/// How long what came is held for the reads that wait for it if the store did not take it.
const HELD_FOR: Duration = Duration::from_secs(1);
/// How long what was stored is held for reads that take it layer by layer.
pub(super) const KEPT_FOR: Duration = Duration::from_secs(5);
/// How long a first manifest of a namespace may take before a read goes on without.
const MANIFEST_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a block that could not be brought is not asked for again.
const FAILED_FOR: Duration = Duration::from_secs(10);
/// How many of those are remembered.
const FAILED_MOST: usize = 1 << 14;

/// Blocks on their way.
#[derive(Clone, Debug)]
pub(super) struct Flight {
    /// News of some of them. Closed when nothing more comes.
    pub(super) over: watch::Receiver<()>,
    /// What has come.
    pub(super) landed: Arc<Landed>,
    task: Option<AbortHandle>,
    /// Bytes of its blocks.
    bytes: u64,
    names: Arc<Vec<Name>>,
    /// Reads that wait for it.
    readers: u32,
    /// Its turn has come.
    has_begun: bool,
}

/// What a flight brought that is over.
#[derive(Debug)]
struct Kept {
    names: Arc<Vec<Name>>,
    landed: Arc<Landed>,
    since: Duration,
}

#[derive(Debug, Default)]
struct State {
    /// By block.
    under_way: BTreeMap<Name, u64>,
    flights: BTreeMap<u64, Flight>,
    next: u64,
    /// Namespaces of which something is being deleted, and how many deletes there are.
    closed: BTreeMap<NamespaceId, u32>,
    /// Blocks that could not be brought, and until when they are not asked for.
    failed: BTreeMap<Name, Duration>,
    /// When flights have brought something last, or the first of them began, and whether anything has come since then.
    busy: Option<(Duration, bool)>,
    /// What flights have brought that are over, as long as there is memory.
    kept: BTreeMap<u64, Kept>,
    /// By block.
    kept_of: BTreeMap<Name, u64>,
}

impl State {
    fn keep(&mut self, id: u64, kept: Kept) {
        self.kept_of.extend(kept.names.iter().map(|name| (*name, id)));
        self.kept.insert(id, kept);
    }

    /// Lets go of what these flights brought.
    fn let_go(&mut self, is_one: impl Fn(&Kept) -> bool) {
        let gone: Vec<u64> = self.kept.iter().filter(|(_, kept)| is_one(kept)).map(|(id, _)| *id).collect();
        gone.into_iter().for_each(|id| self.let_go_of(id));
    }

    /// One more read waits for these flights.
    fn is_read(&mut self, flights: &BTreeSet<u64>) {
        for id in flights {
            if let Some(flight) = self.flights.get_mut(id) {
                flight.readers = flight.readers.saturating_add(1);
            }
        }
    }

    /// Takes a flight out of the books. A block of it may be on its way with another one by now.
    fn forget(&mut self, id: u64, names: &[Name]) {
        for name in names {
            if self.under_way.get(name) == Some(&id) {
                self.under_way.remove(name);
            }
        }
        self.flights.remove(&id);
        if self.flights.is_empty() {
            self.busy = None;
        }
    }

    fn let_go_of(&mut self, id: u64) {
        let Some(kept) = self.kept.remove(&id) else { return };
        for name in kept.names.iter() {
            // A block may have been brought again since.
            if self.kept_of.get(name) == Some(&id) {
                self.kept_of.remove(name);
            }
        }
    }
}

/// What flights pass one after the other.
#[derive(Debug, Default)]
struct Gates {
    namespaces: BTreeMap<NamespaceId, Arc<Semaphore>>,
    tenants: Vec<(TenantSalt, Arc<Semaphore>)>,
}

/// What is being brought.
#[derive(Debug)]
pub(super) struct Flights {
    state: Mutex<State>,
    /// How much memory they may take together.
    most: u64,
    /// The memory, while there are flights, and for a while after: fresh memory costs as much as what is done with it.
    memory: Mutex<Option<Arena>>,
    /// There is something more that can be let go of.
    keeps: Notify,
    /// Of each tenant one flight waits for memory at a time, behind it one of each of its namespaces.
    gates: Mutex<Gates>,
}

/// A namespace of which nothing is brought while this lives.
#[derive(Debug)]
pub(super) struct Closed<'a>(&'a Flights, NamespaceId);

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if let Some(count) = state.closed.get_mut(&self.1) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                state.closed.remove(&self.1);
            }
        }
    }
}

impl Flights {
    /// Flights that take this memory together.
    pub(super) fn new(memory: u64) -> Self {
        Self {
            state: Mutex::default(),
            most: memory,
            memory: Mutex::default(),
            keeps: Notify::new(),
            gates: Mutex::default(),
        }
    }

    /// The memory of all flights.
    fn arena(&self) -> Result<Arena, ColdError> {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(arena) = &*memory {
            return Ok(arena.clone());
        }
        let region = usize::try_from(self.most).map_err(|error| ColdError::Store(error.to_string()))?;
        let region = Region::anonymous_huge(region);
        let (region, _) = region.map_err(|error| ColdError::Store(format!("cold.memory: {error}")))?;
        Ok(memory.insert(Arena::new(region)).clone())
    }

    /// Lets go of what was kept long enough, and of all memory if there is no flight.
    pub(super) fn rest(&self, now: Duration) {
        let mut state = self.state();
        state.let_go(|kept| now.saturating_sub(kept.since) >= KEPT_FOR);
        if state.flights.is_empty() && state.kept.is_empty() {
            // A flight that begins now makes its own.
            self.memory.lock().unwrap_or_else(PoisonError::into_inner).take();
            *self.gates() = Gates::default();
        }
    }

    fn gates(&self) -> MutexGuard<'_, Gates> {
        self.gates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A reader of a flight has left. If it was the last one and the turn of the flight has not come the flight is dropped: gives how many
    /// blocks it was to bring.
    pub(super) fn left(&self, id: u64) -> u64 {
        let mut state = self.state();
        let Some(flight) = state.flights.get_mut(&id) else { return 0 };
        flight.readers = flight.readers.saturating_sub(1);
        if flight.readers > 0 || flight.has_begun {
            return 0;
        }
        let (task, names) = (flight.task.clone(), Arc::clone(&flight.names));
        state.forget(id, &names);
        // A task that ends takes the lock.
        drop(state);
        task.iter().for_each(AbortHandle::abort);
        names.len() as u64
    }

    /// Lets go of what the oldest flight brought that is over, if there is any.
    fn let_go_of_oldest(&self) -> bool {
        let mut state = self.state();
        let oldest = state.kept.keys().next().copied();
        oldest.into_iter().for_each(|id| state.let_go_of(id));
        oldest.is_some()
    }

    /// What brought a block, if it is kept.
    fn kept(&self, name: &Name) -> Option<Arc<Landed>> {
        let state = self.state();
        let id = state.kept_of.get(name)?;
        state.kept.get(id).map(|kept| Arc::clone(&kept.landed))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic in between leaves a block that is said to be on its way: `Landing` takes it out.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks under way.
    pub(super) fn blocks(&self) -> usize {
        self.state().under_way.len()
    }

    /// Bytes of the blocks of all flights, waiting ones included.
    pub(super) fn bytes(&self) -> u64 {
        self.state().flights.values().map(|flight| flight.bytes).sum()
    }

    /// Breaks off what is brought of a namespace, and lets nothing more of it begin. What a broken-off restore has put is
    /// here: puts that were begun count as before what comes after this.
    pub(super) async fn close(&self, namespace: NamespaceId) -> Closed<'_> {
        let flights: Vec<Flight> = {
            let mut state = self.state();
            *state.closed.entry(namespace).or_default() += 1;
            state.let_go(|kept| kept.names.first().is_some_and(|name| name.0 == namespace));
            let of: BTreeSet<u64> =
                state.under_way.iter().filter(|(name, _)| name.0 == namespace).map(|(_, id)| *id).collect();
            of.iter().filter_map(|id| state.flights.get(id).cloned()).collect()
        };
        let closed = Closed(self, namespace);
        end_all(flights).await;
        // A flight may have ended by itself meanwhile, and have left what it brought.
        self.state().let_go(|kept| kept.names.first().is_some_and(|name| name.0 == namespace));
        closed
    }

    pub(super) async fn abort_all(&self) {
        let flights = self.state().flights.values().cloned().collect();
        end_all(flights).await;
        self.state().let_go(|_| true);
    }
}

async fn end_all(flights: Vec<Flight>) {
    for flight in &flights {
        flight.task.iter().for_each(AbortHandle::abort);
    }
    for mut flight in flights {
        // Its sender is gone when it is over.
        // ends: the task was aborted above, and drops the sender
        while flight.over.changed().await.is_ok() {}
    }
}

/// Takes a flight out of the books, however it ends.
struct Landing {
    cold: Arc<ColdTier>,
    id: u64,
    names: Arc<Vec<Name>>,
    news: watch::Sender<()>,
    landed: Arc<Landed>,
    /// Whether what came was stored.
    is_stored: bool,
}

impl Drop for Landing {
    fn drop(&mut self) {
        let since = self.cold.tier.access().time().now();
        let mut state = self.cold.flights.state();
        state.forget(self.id, &self.names);
        if self.is_stored {
            let (names, landed) = (Arc::clone(&self.names), Arc::clone(&self.landed));
            state.keep(self.id, Kept { names, landed, since });
            drop(state);
            self.cold.flights.keeps.notify_waiters();
        }
    }
}

impl Flying for Flights {
    fn gates(&self, namespace: NamespaceId, tenant: &TenantSalt) -> [Arc<Semaphore>; 2] {
        let (mut gates, new) = (self.gates(), || Arc::new(Semaphore::new(1)));
        let own = Arc::clone(gates.namespaces.entry(namespace).or_insert_with(new));
        let known = gates.tenants.iter().find(|(salt, _)| salt == tenant);
        let all = known.map(|(_, gate)| Arc::clone(gate)).unwrap_or_else(|| {
            let gate = new();
            gates.tenants.push((tenant.clone(), Arc::clone(&gate)));
            gate
        });
        [own, all]
    }

    fn begins(&self, id: u64) -> bool {
        let mut state = self.state();
        let Some(flight) = state.flights.get_mut(&id) else { return false };
        flight.has_begun = true;
        true
    }
}

impl Memory for Flights {
    fn take(&self, bytes: usize) -> BoxFuture<'_, Option<SharedBuf>> {
        Box::pin(async move {
            let arena = self.arena().ok()?;
            let mut taken = std::pin::pin!(arena.take(bytes));
            loop {
                let mut keeps = std::pin::pin!(self.keeps.notified());
                // Before the look, so that nothing in between is missed.
                keeps.as_mut().enable();
                let fits = std::future::poll_fn(|context| Poll::Ready(taken.as_mut().poll(context)));
                // ends: its first poll: it asks once
                if let Poll::Ready(taken) = fits.await {
                    return taken.map(BufMut::share);
                }
                if self.let_go_of_oldest() {
                    continue;
                }
                tokio::select! {
                    // ends: its flight: readers that leave before its turn drop it
                    taken = &mut taken => return taken.map(BufMut::share),
                    // ends: its flight: readers that leave before its turn drop it
                    () = keeps => {}
                }
            }
        })
    }
}

impl ColdTier {
    /// Whether some of these blocks are not here and may be in the bucket, from memory alone; also if that is not known yet.
    pub fn may_bring(&self, wish: &Wish<'_>) -> bool {
        if wish.block_bytes > BLOCK_MOST {
            return false;
        }
        let missing = wish.missing(&self.store);
        match (missing.is_empty(), self.known(wish.namespace)) {
            (true, _) => false,
            (false, Some(known)) => missing.iter().any(|(key, _)| known.may_have(key)),
            (false, None) => !self.tier.access().is_paused(),
        }
    }

    /// Which of the blocks the bucket seems to have, without those that could not be brought lately, or never are. From memory alone.
    pub(super) fn may_come(&self, wish: &Wish<'_>, known: &Known) -> Vec<bool> {
        let now = self.tier.access().time().now();
        let state = self.flights.state();
        let has_failed = |key| state.failed.get(&wish.name(key)).is_some_and(|until: &Duration| now < *until);
        let comes = |key| wish.block_bytes <= BLOCK_MOST && known.may_have(key) && !has_failed(key);
        wish.keys.iter().map(comes).collect()
    }

    /// Begins to bring what is not here and may be in the bucket; says what the read takes of it, if it takes any. `elsewhere` says
    /// which absent blocks other nodes have: those are brought only if the read does not get them there.
    pub async fn bring(
        self: &Arc<Self>,
        wish: Wish<'_>,
        left: Duration,
        elsewhere: impl AsyncFnOnce(&[BlockKey]) -> Vec<bool>,
    ) -> Option<Coming> {
        if wish.block_bytes > BLOCK_MOST || left.is_zero() {
            return None;
        }
        let mut missing = wish.missing(&self.store);
        if missing.is_empty() {
            return None;
        }
        let known = self.known_within(wish.namespace, left.min(MANIFEST_TIMEOUT)).await?;
        missing.retain(|(key, _)| known.may_have(key));
        if missing.is_empty() {
            return None;
        }
        let keys: Vec<BlockKey> = missing.iter().map(|(key, _)| *key).collect();
        let others = elsewhere(&keys).await;
        let others = keys.iter().zip(others).filter(|(_, is_there)| *is_there);
        let others: BTreeSet<BlockKey> = others.map(|(key, _)| *key).collect();
        missing.retain(|(key, _)| !others.contains(key));
        let (coming, reading) = self.take_off(&wish, &missing);
        let comes = !coming.is_empty();
        add(&self.counts.waited_reads, u64::from(comes));
        let spare = Spare::of(self, &wish, |key| others.contains(key), comes);
        let blocks = wish.keys.iter().map(|key| coming.contains(key)).collect();
        (comes || spare.is_some()).then_some(Coming { blocks, spare, reading: Some(Arc::new(reading)) })
    }

    /// What brings a block of a request now.
    pub(super) fn flight_of(&self, request: &ReadRequest, key: &BlockKey) -> Option<Flight> {
        let ReadRequest { namespace, group, coordinate, .. } = *request;
        let state = self.flights.state();
        let id = state.under_way.get(&(namespace, group.0, coordinate.to_u64(), *key))?;
        state.flights.get(id).cloned()
    }

    /// What a flight that is over brought of a block of a request, if it is still kept.
    pub(super) fn kept_of(&self, request: &ReadRequest, key: &BlockKey) -> Option<Arc<Landed>> {
        let ReadRequest { namespace, group, coordinate, .. } = *request;
        self.flights.kept(&(namespace, group.0, coordinate.to_u64(), *key))
    }

    /// How this number of blocks is fetched.
    fn fetching(&self, wish: &Wish<'_>, blocks: usize) -> FetchOptions {
        let bytes = (blocks as u64).saturating_mul(wish.block_bytes);
        let ranges_at_once = self.tier.access().limits().ranges_at_once.max(1);
        let options = FetchOptions::for_restore(bytes, ranges_at_once);
        // All ranges of a flight wait for their turns at once, or its blocks would become whole behind the first ranges of all others.
        let parallel = 2 * ranges_at_once;
        FetchOptions { parallel, by_layers: wish.by_layers, ..options }
    }

    /// Has what is not on its way begin; gives the blocks that are, and makes the read one of the readers of what brings them. What a put
    /// brings here is on its way only if that is a restore's put.
    pub(super) fn take_off(
        self: &Arc<Self>,
        wish: &Wish<'_>,
        keys: &[(BlockKey, bool)],
    ) -> (BTreeSet<BlockKey>, Reading) {
        let now = self.tier.access().time().now();
        let mut state = self.flights.state();
        if state.closed.contains_key(&wish.namespace) {
            return (BTreeSet::new(), Reading::of(self, BTreeSet::new()));
        }
        let mut read = BTreeSet::new();
        let (mut coming, mut own, mut refused) = (BTreeSet::new(), Vec::new(), 0);
        for (key, is_pending) in keys {
            let name = wish.name(key);
            match state.under_way.get(&name) {
                Some(id) => {
                    coming.insert(*key);
                    read.insert(*id);
                }
                None if *is_pending => {}
                None if state.failed.get(&name).is_some_and(|until| now < *until) => {}
                None if state.under_way.len() + own.len() >= BLOCKS_MOST => refused += 1,
                None => own.push(*key),
            }
        }
        add(&self.counts.refused_blocks, refused);
        let at_once = usize::try_from(FLIGHT_BYTES / wish.block_bytes.max(1)).unwrap_or(1).clamp(1, 4096);
        let options = self.fetching(wish, own.len());
        state.is_read(&read);
        let mut beginning = Vec::new();
        for keys in own.chunks(at_once) {
            state.busy.get_or_insert((now, false));
            let id = state.next;
            state.next += 1;
            coming.extend(keys);
            read.insert(id);
            let names: Arc<Vec<Name>> = Arc::new(keys.iter().map(|key| wish.name(key)).collect());
            state.under_way.extend(names.iter().map(|name| (*name, id)));
            let ((news, over), landed) = (watch::channel(()), Arc::<Landed>::default());
            let bytes = wish.block_bytes.saturating_mul(keys.len() as u64);
            let flight = Flight {
                over,
                landed: Arc::clone(&landed),
                task: None,
                bytes,
                names: Arc::clone(&names),
                readers: 1,
                has_begun: false,
            };
            state.flights.insert(id, flight);
            let landing = Landing { cold: Arc::clone(self), id, names, news, landed, is_stored: false };
            let wanted = Wanted {
                namespace: wish.namespace,
                group: wish.group,
                coordinate: wish.coordinate,
                keys: keys.to_vec(),
                durability: Durability::Relaxed,
            };
            beginning.push((wanted, landing));
        }
        // A runtime that ends drops a task at once, and its landing takes the lock.
        drop(state);
        let reading = Reading::of(self, read);
        for (wanted, landing) in beginning {
            let id = landing.id;
            let task =
                self.runtime.spawn(Arc::clone(self).fly(wanted, wish.block_bytes, options.clone(), landing));
            if let Some(flight) = self.flights.state().flights.get_mut(&id) {
                flight.task = Some(task.abort_handle());
            }
        }
        (coming, reading)
    }

    /// Notes that bytes came, for what restores take. Flights share the way to the bucket, so they came in the time since any of them has
    /// brought something.
    fn came(&self, bytes: u64) {
        let now = self.tier.access().time().now();
        let mut state = self.flights.state();
        let (since, is_going) = state.busy.replace((now, true)).unwrap_or((now, false));
        drop(state);
        let latency = if is_going { None } else { self.tier.first_byte_time() };
        self.estimate().came(bytes, now.saturating_sub(since), latency, now);
    }

    /// Brings some blocks.
    async fn fly(
        self: Arc<Self>,
        wanted: Wanted,
        block_bytes: u64,
        options: FetchOptions,
        mut landing: Landing,
    ) {
        add(&self.counts.restores, 1);
        let (id, namespace) = (landing.id, wanted.namespace);
        // A read has made its namespace known.
        let tenant = self.store.identity_of(namespace).map(|(identity, _)| identity.tenant_salt);
        let tenant = tenant.unwrap_or_default();
        let memory = Boarding { flights: &self.flights, id, namespace, tenant, begun: Notify::new() };
        let bytes = block_bytes.saturating_mul(wanted.keys.len() as u64);
        let long = Duration::from_secs(bytes / self.tier.access().limits().slowest_rate.max(1));
        let too_late = async {
            // Until its turn its readers decide whether it waits.
            // ends: its flight: readers that leave before its turn drop it
            memory.begun.notified().await;
            tokio::time::sleep(FLIGHT_TIMEOUT.saturating_add(long)).await;
        };
        let flown = async {
            let tell = |news: News<'_>| {
                if let News::Came(arrived) = news
                    && let Ok(memory) = &arrived.bytes
                {
                    self.came(memory.len() as u64);
                }
                landing.landed.take(&wanted.keys, news);
                landing.news.send_replace(());
            };
            let restored = restore_and_tell(&self.tier, &self.store, &wanted, &options, &memory, tell);
            // ends: `too_late` beside it
            let restored = restored.await?;
            if restored.refused > 0 {
                // Reads may not have come to take it yet, and will not find it in the store.
                tokio::time::sleep(HELD_FOR).await;
            }
            Ok::<_, ColdError>(restored)
        };
        let restored = tokio::select! {
            biased;
            // ends: `too_late` in another arm
            flown = flown => flown.unwrap_or_else(|error| {
                tracing::debug!(%error, "blocks could not be restored from the cold tier");
                Restored::default()
            }),
            // ends: `FLIGHT_TIMEOUT` from its turn on; before that, readers that leave
            () = too_late => Restored::default(),
        };
        add(&self.counts.restored_blocks, restored.stored);
        add(&self.counts.restored_bytes, restored.stored.saturating_mul(block_bytes));
        add(&self.counts.over_read_bytes, restored.fetched.over_read_bytes);
        // One that was dropped before its turn may get this far until it is broken off, and says nothing of its blocks: a read that came
        // since then has them brought by another one.
        if !self.flights.state().flights.contains_key(&id) {
            return;
        }
        let Wanted { namespace, group, coordinate, ref keys, .. } = wanted;
        let wish = Wish { namespace, group, coordinate, keys, block_bytes, by_layers: options.by_layers };
        let lost = wish.absent(&self.store);
        add(&self.counts.lost_blocks, lost.len() as u64);
        let now = self.tier.access().time().now();
        let mut state = self.flights.state();
        if state.failed.len() + lost.len() > FAILED_MOST {
            state.failed.retain(|_, until| now < *until);
        }
        let room = FAILED_MOST.saturating_sub(state.failed.len());
        let until = now.saturating_add(FAILED_FOR.min(self.config.refresh));
        let failed = lost.iter().take(room).map(|key| (wish.name(key), until));
        state.failed.extend(failed);
        drop(state);
        landing.is_stored = restored.stored > 0 && restored.refused == 0;
        drop(landing);
    }
}

#[cfg(test)]
mod tests;
