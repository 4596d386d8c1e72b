//! Blocks that a read wants and that are not here are brought from the bucket into the store before the read begins.
//!
//! Each block is brought once, however many reads want it; what failed is not asked for again for a while. A read waits within
//! its deadline, and then reads what is here: bytes of the bucket reach it through the store alone, by its ordinary put and its
//! verified read.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_cold::ColdError;
use kvarts_cold::promote::{Restored, Wanted, restore_into};
use kvarts_cold::restore::FetchOptions;
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};
use kvarts_store::api::{ContainsRequest, Durability, KvStore, Presence};
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;

use super::counts::add;
use super::{ColdTier, RESTORE_MEMORY};

/// A block of more bytes is not brought: it takes too much memory.
const BLOCK_MOST: u64 = 64 << 20;
/// Bytes of blocks that one task brings: a read that needs the first of them does not wait for the last of another.
const FLIGHT_BYTES: u64 = 64 << 20;
/// Blocks that may be under way, waiting ones included.
const BLOCKS_MOST: usize = 1 << 16;
/// How long a task may take.
const FLIGHT_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a first manifest of a namespace may take before a read goes on without.
const MANIFEST_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a block that could not be brought is not asked for again.
const FAILED_FOR: Duration = Duration::from_secs(10);
/// How many of those are remembered.
const FAILED_MOST: usize = 1 << 14;

/// Blocks that a read wants.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// Their namespace.
    pub namespace: NamespaceId,
    /// Their group.
    pub group: Group,
    /// Their coordinate.
    pub coordinate: Coordinate,
    /// Their keys.
    pub keys: &'a [BlockKey],
    /// Bytes of each.
    pub block_bytes: u64,
}

/// A block by its whole name.
type Name = (NamespaceId, u32, u64, BlockKey);

impl Wish<'_> {
    fn name(&self, key: &BlockKey) -> Name {
        (self.namespace, self.group.0, self.coordinate.to_u64(), *key)
    }

    /// Which of the blocks are not here.
    fn absent(&self, store: &dyn KvStore) -> Vec<BlockKey> {
        let Self { namespace, group, coordinate, keys, .. } = *self;
        let request = ContainsRequest { namespace, group, coordinate, keys, lease: None };
        let Ok(found) = store.contains(&request) else { return Vec::new() };
        let absent = keys.iter().zip(&found.presence).filter(|(_, one)| **one == Presence::Absent);
        absent.map(|(key, _)| *key).collect()
    }
}

/// Blocks on their way.
#[derive(Clone, Debug)]
struct Flight {
    /// Closed when they have come, or will not.
    over: watch::Receiver<()>,
    task: Option<AbortHandle>,
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
}

/// What is being brought.
#[derive(Debug)]
pub(super) struct Flights {
    state: Mutex<State>,
    turns: Semaphore,
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
    pub(super) fn new(turns: usize) -> Self {
        Self { state: Mutex::default(), turns: Semaphore::new(turns) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic in between leaves a block that is said to be on its way: `Landing` takes it out.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks under way.
    pub(super) fn blocks(&self) -> usize {
        self.state().under_way.len()
    }

    /// Breaks off what is brought of a namespace, and lets nothing more of it begin. What a broken-off restore has put is
    /// here: puts that were begun count as before what comes after this.
    pub(super) async fn close(&self, namespace: NamespaceId) -> Closed<'_> {
        let flights: Vec<Flight> = {
            let mut state = self.state();
            *state.closed.entry(namespace).or_default() += 1;
            let of: BTreeSet<u64> =
                state.under_way.iter().filter(|(name, _)| name.0 == namespace).map(|(_, id)| *id).collect();
            of.iter().filter_map(|id| state.flights.get(id).cloned()).collect()
        };
        let closed = Closed(self, namespace);
        end_all(flights).await;
        closed
    }

    pub(super) async fn abort_all(&self) {
        let flights = self.state().flights.values().cloned().collect();
        end_all(flights).await;
    }
}

async fn end_all(flights: Vec<Flight>) {
    for flight in &flights {
        flight.task.iter().for_each(AbortHandle::abort);
    }
    for mut flight in flights {
        // Its sender is gone when it is over.
        while flight.over.changed().await.is_ok() {}
    }
}

/// Takes a flight out of the books, however it ends.
struct Landing {
    cold: Arc<ColdTier>,
    id: u64,
    names: Vec<Name>,
    _over: watch::Sender<()>,
}

impl Drop for Landing {
    fn drop(&mut self) {
        let mut state = self.cold.flights.state();
        for name in &self.names {
            state.under_way.remove(name);
        }
        state.flights.remove(&self.id);
    }
}

impl ColdTier {
    /// Whether some of these blocks are not here and may be in the bucket, from memory alone; also if that is not known yet.
    pub fn may_bring(&self, wish: &Wish<'_>) -> bool {
        if wish.block_bytes > BLOCK_MOST {
            return false;
        }
        let absent = wish.absent(&self.store);
        match (absent.is_empty(), self.known(wish.namespace)) {
            (true, _) => false,
            (false, Some(known)) => absent.iter().any(|key| known.may_have(key)),
            (false, None) => !self.tier.access().is_paused(),
        }
    }

    /// Brings what is not here and may be in the bucket into the store, and waits for it until the deadline. `elsewhere` says of which
    /// absent blocks there is no need.
    pub async fn bring(
        self: &Arc<Self>,
        wish: Wish<'_>,
        left: Duration,
        elsewhere: impl AsyncFnOnce(&[BlockKey]) -> Vec<bool>,
    ) {
        if wish.block_bytes > BLOCK_MOST || left.is_zero() {
            return;
        }
        let begun = tokio::time::Instant::now();
        let mut absent = wish.absent(&self.store);
        if absent.is_empty() {
            return;
        }
        let Some(known) = self.known_within(wish.namespace, left.min(MANIFEST_TIMEOUT)).await else { return };
        absent.retain(|key| known.may_have(key));
        if absent.is_empty() {
            return;
        }
        let others = elsewhere(&absent).await;
        let mut others = others.into_iter();
        absent.retain(|_| others.next() != Some(true));
        let flights = self.take_off(&wish, &absent);
        if flights.is_empty() {
            return;
        }
        add(&self.counts.waited_reads, 1);
        let wait = async {
            for mut flight in flights {
                while flight.over.changed().await.is_ok() {}
            }
        };
        if tokio::time::timeout(left.saturating_sub(begun.elapsed()), wait).await.is_err() {
            add(&self.counts.late_reads, 1);
        }
    }

    /// The flights that bring these blocks; those that are not on their way begin theirs.
    fn take_off(self: &Arc<Self>, wish: &Wish<'_>, keys: &[BlockKey]) -> Vec<Flight> {
        let now = self.tier.access().time().now();
        let mut state = self.flights.state();
        if state.closed.contains_key(&wish.namespace) {
            return Vec::new();
        }
        let (mut with, mut own, mut refused) = (BTreeSet::new(), Vec::new(), 0);
        for key in keys {
            let name = wish.name(key);
            match state.under_way.get(&name) {
                Some(flight) => drop(with.insert(*flight)),
                None if state.failed.get(&name).is_some_and(|until| now < *until) => {}
                None if state.under_way.len() + own.len() >= BLOCKS_MOST => refused += 1,
                None => own.push(*key),
            }
        }
        add(&self.counts.refused_blocks, refused);
        let at_once = usize::try_from(FLIGHT_BYTES / wish.block_bytes.max(1)).unwrap_or(1).clamp(1, 4096);
        let mut beginning = Vec::new();
        for keys in own.chunks(at_once) {
            let id = state.next;
            state.next += 1;
            with.insert(id);
            let names: Vec<Name> = keys.iter().map(|key| wish.name(key)).collect();
            state.under_way.extend(names.iter().map(|name| (*name, id)));
            let (sender, over) = watch::channel(());
            state.flights.insert(id, Flight { over, task: None });
            let landing = Landing { cold: Arc::clone(self), id, names, _over: sender };
            let wanted = Wanted {
                namespace: wish.namespace,
                group: wish.group,
                coordinate: wish.coordinate,
                keys: keys.to_vec(),
                durability: Durability::Relaxed,
            };
            beginning.push((wanted, landing));
        }
        let flights = with.iter().filter_map(|id| state.flights.get(id).cloned()).collect();
        // A runtime that ends drops a task at once, and its landing takes the lock.
        drop(state);
        for (wanted, landing) in beginning {
            let id = landing.id;
            let task = self.runtime.spawn(Arc::clone(self).fly(wanted, wish.block_bytes, landing));
            if let Some(flight) = self.flights.state().flights.get_mut(&id) {
                flight.task = Some(task.abort_handle());
            }
        }
        flights
    }

    /// Brings some blocks.
    async fn fly(self: Arc<Self>, wanted: Wanted, block_bytes: u64, landing: Landing) {
        add(&self.counts.restores, 1);
        let flown = async {
            let _turn = self.flights.turns.acquire().await;
            let standard = FetchOptions::default();
            let each = standard.range_bytes.max(block_bytes);
            let parallel = usize::try_from(RESTORE_MEMORY / 2 / each.max(1)).unwrap_or(1);
            let options = FetchOptions { parallel: parallel.clamp(1, standard.parallel), ..standard };
            let begun = tokio::time::Instant::now();
            let restored = restore_into(&self.tier, &self.store, &wanted, &options).await?;
            self.took(restored.stored.saturating_mul(block_bytes), begun.elapsed());
            Ok::<_, ColdError>(restored)
        };
        let restored = match tokio::time::timeout(FLIGHT_TIMEOUT, flown).await {
            Ok(Ok(restored)) => restored,
            Ok(Err(error)) => {
                tracing::debug!(%error, "blocks were not brought from the cold tier");
                Restored::default()
            }
            Err(_) => Restored::default(),
        };
        add(&self.counts.restored_blocks, restored.stored);
        add(&self.counts.restored_bytes, restored.stored.saturating_mul(block_bytes));
        add(&self.counts.over_read_bytes, restored.fetched.over_read_bytes);
        let Wanted { namespace, group, coordinate, ref keys, .. } = wanted;
        let wish = Wish { namespace, group, coordinate, keys, block_bytes };
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
        drop(landing);
    }
}
