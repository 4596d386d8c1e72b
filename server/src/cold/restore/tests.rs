//! Turns of restores, what one says of its blocks, and what is kept of those that are over.

use std::path::PathBuf;
use std::task::{Context, Waker};

use kvarts_bucket::time::TokioTime;
use kvarts_cold::testing::MemoryBucket;
use kvarts_contract::api::KvStore;
use kvarts_layout::identity::Arrangement;
use kvarts_layout::{Coordinate, Geometry, Group, Identity};
use kvarts_store::home::Home;

use super::*;
use crate::cold::{ColdConfig, Offer};

const MIB: usize = 1 << 20;

/// A tier over an empty bucket, behind an empty store.
struct Ground {
    cold: Arc<ColdTier>,
    home: Option<Home>,
    namespace: NamespaceId,
    directory: PathBuf,
}

impl Ground {
    fn new(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("kvarts-restore-{name}-{}", std::process::id()));
        let home = Home::in_directory(&directory, 128 << 20).unwrap();
        let geometry = Geometry::opaque(64).unwrap();
        let arrangement = Arrangement::new("test", "flat", "1");
        let identity = Identity::new("pages", "1", "bf16", arrangement, &geometry, 16);
        let namespace = home.store().register(&identity, &geometry).unwrap();
        let config = ColdConfig {
            bucket: "none".to_owned(),
            requests: 1 << 20,
            written: 1 << 30,
            read: 1 << 30,
            refresh: Duration::from_secs(60),
            memory: 32 << 20,
            spill: false,
            uses: 0,
            age: Duration::ZERO,
            token_bytes: None,
            rate: 1 << 30,
            offer: Offer::default(),
        };
        let bucket = MemoryBucket::new(Arc::new(TokioTime::start()));
        let cold = ColdTier::over(bucket, &config, home.store(), None, 1).unwrap();
        Self { cold, home: Some(home), namespace, directory }
    }

    fn name(&self, block: u8) -> Name {
        (self.namespace, 0, Coordinate::Replicated.to_u64(), BlockKey([block; 32]))
    }

    /// A flight of one block; in the books if it is still to be brought.
    async fn fly(&self, block: u8, is_in_the_books: bool) {
        let cold = &self.cold;
        let name = self.name(block);
        let names = Arc::new(vec![name]);
        let ((news, over), landed) = (watch::channel(()), Arc::<Landed>::default());
        let id = u64::from(block);
        if is_in_the_books {
            let (landed, names) = (Arc::clone(&landed), Arc::clone(&names));
            let (task, bytes, readers, has_begun) = (None, 64, 1, false);
            let flight = Flight { over, landed, task, bytes, names, readers, has_begun };
            let mut state = cold.flights.state();
            state.flights.insert(id, flight);
            state.under_way.insert(name, id);
        }
        let landing = Landing { cold: Arc::clone(cold), id, names, news, landed, is_stored: false };
        let (group, coordinate, durability) = (Group(0), Coordinate::Replicated, Durability::Relaxed);
        let wanted = Wanted { namespace: name.0, group, coordinate, keys: vec![name.3], durability };
        // ends: the bucket is in memory and has nothing
        Arc::clone(cold).fly(wanted, 64, FetchOptions::default(), landing).await;
    }

    /// Blocks that could not be brought and are not asked for again for a while.
    fn failed(&self) -> Vec<Name> {
        self.cold.flights.state().failed.keys().copied().collect()
    }

    async fn end(mut self) {
        self.cold.stop().await;
        self.home.take().unwrap().close().unwrap();
    }
}

impl Drop for Ground {
    #[allow(clippy::disallowed_methods, reason = "a test removes what it made")]
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn name(block: u8) -> Name {
    (NamespaceId([1; 32]), 0, Coordinate::Replicated.to_u64(), BlockKey([block; 32]))
}

#[tokio::test]
async fn a_restore_that_was_dropped_before_its_turn_says_nothing_of_its_blocks() {
    let ground = Ground::new("dropped");
    // Its readers had left, and it ran on until it was broken off: another one brings its block by now.
    ground.fly(1, false).await;
    assert_eq!(ground.failed(), []);
    // One that is waited for says what it did not bring.
    ground.fly(2, true).await;
    assert_eq!(ground.failed(), [ground.name(2)]);
    let lost = ground.cold.counted().counts.into_iter().find(|(name, ..)| *name == "lost_blocks").unwrap();
    assert_eq!(lost.2, 1);
    ground.end().await;
}

fn keep(flights: &Flights, id: u64, blocks: &[u8], since: u64) {
    let names = Arc::new(blocks.iter().map(|block| name(*block)).collect());
    let kept = Kept { names, landed: Arc::default(), since: Duration::from_secs(since) };
    flights.state().keep(id, kept);
    flights.keeps.notify_waiters();
}

/// What passes the gates of flights in which order: each names its tenant and its namespace. All memory is taken until they wait.
fn order_of(turns: &[(u8, u8)], meanwhile: impl FnOnce(&Flights)) -> Vec<(u64, bool)> {
    let flights = Flights::new(8 << 20);
    let all = flights.take(8 * MIB);
    let mut context = Context::from_waker(Waker::noop());
    let Poll::Ready(all) = std::pin::pin!(all).as_mut().poll(&mut context) else { panic!("no memory") };
    let boarding = |(id, (tenant, namespace)): (u64, &(u8, u8))| {
        let (_, over) = watch::channel(());
        let (landed, names, namespace) = (Arc::default(), Arc::default(), NamespaceId([*namespace; 32]));
        let (task, bytes, readers, has_begun) = (None, 0, 1, false);
        let flight = Flight { over, landed, task, bytes, names, readers, has_begun };
        flights.state().flights.insert(id, flight);
        let (tenant, begun) = (TenantSalt(vec![*tenant]), Notify::new());
        Boarding { flights: &flights, id, namespace, tenant, begun }
    };
    let turns: Vec<_> = (0..).zip(turns).map(boarding).collect();
    let mut waiting: Vec<_> = turns.iter().map(|turn| (turn.id, turn.take(8 * MIB))).collect();
    let mut order = Vec::new();
    let mut step = |waiting: &mut Vec<(u64, BoxFuture<'_, Option<SharedBuf>>)>| {
        waiting.retain_mut(|(id, take)| match take.as_mut().poll(&mut context) {
            Poll::Ready(taken) => {
                // It has had its turn, and its memory is free for the next one.
                order.push((*id, taken.is_some()));
                false
            }
            Poll::Pending => true,
        });
    };
    step(&mut waiting);
    drop(all);
    meanwhile(&flights);
    (0..2 * turns.len()).for_each(|_| step(&mut waiting));
    order
}

#[test]
fn restores_of_a_namespace_that_wants_much_are_not_in_front_of_all_others() {
    // Three of one namespace, then one of another. The last reader of the third one has left: no turn is its own.
    let order = order_of(&[(1, 1), (1, 1), (1, 1), (1, 2)], |flights| {
        assert_eq!(flights.left(2), 0);
        assert!(!flights.begins(2));
    });
    assert_eq!(order, [(0, true), (3, true), (1, true), (2, false)]);
}

#[test]
fn a_tenant_with_many_namespaces_takes_turns_with_others_as_one_that_has_one() {
    // Six namespaces of one tenant, then two restores of each of two others.
    let all = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (2, 7), (2, 7), (3, 8), (3, 8)];
    let order: Vec<u64> = order_of(&all, |_| ()).into_iter().map(|(id, _)| id).collect();
    let whose = |id: &u64| all[*id as usize].0;
    let tenants: Vec<u8> = order.iter().map(whose).collect();
    assert_eq!(tenants, [1, 2, 3, 1, 2, 3, 1, 1, 1, 1], "{order:?}");
}

#[test]
fn what_was_stored_is_kept_until_its_memory_is_needed_or_some_seconds_have_passed() {
    let flights = Flights::new(8 << 20);
    let mut context = Context::from_waker(Waker::noop());
    let mut take = |bytes| {
        let Poll::Ready(memory) = flights.take(bytes).as_mut().poll(&mut context) else { return None };
        memory
    };
    let (first, second) = (take(4 * MIB).unwrap(), take(4 * MIB).unwrap());
    keep(&flights, 0, &[1, 2], 10);
    keep(&flights, 1, &[3], 12);
    assert!(flights.kept(&name(2)).is_some() && flights.kept(&name(4)).is_none());
    // Nothing is free: everything that is kept goes, the oldest first, and who waits has what comes free.
    let mut context = Context::from_waker(Waker::noop());
    let mut third = flights.take(4 * MIB);
    assert!(third.as_mut().poll(&mut context).is_pending());
    assert!([1, 2, 3].iter().all(|block| flights.kept(&name(*block)).is_none()));
    // What is kept while a flight waits goes too.
    keep(&flights, 2, &[5], 13);
    assert!(third.as_mut().poll(&mut context).is_pending());
    assert!(flights.kept(&name(5)).is_none());
    drop(first);
    let Poll::Ready(Some(third)) = third.as_mut().poll(&mut context) else { panic!("no memory") };
    // Where there is room nothing has to go; a block that was brought again is kept for its last flight.
    drop((second, third));
    keep(&flights, 3, &[6, 7], 14);
    keep(&flights, 4, &[7], 15);
    assert_eq!(take(8 * MIB).map(|memory| memory.len()), Some(8 * MIB));
    assert!(flights.kept(&name(6)).is_some() && flights.kept(&name(7)).is_some());
    flights.rest(Duration::from_secs(14) + KEPT_FOR);
    assert!(flights.kept(&name(6)).is_none() && flights.kept(&name(7)).is_some());
    assert!(flights.memory.lock().unwrap().is_some());
    flights.rest(Duration::from_secs(15) + KEPT_FOR);
    assert!(flights.kept(&name(7)).is_none() && flights.memory.lock().unwrap().is_none());
    assert!(take(9 * MIB).is_none(), "more than there is");
}
