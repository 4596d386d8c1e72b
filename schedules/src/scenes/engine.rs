//! A whole store: two executors on threads of their own over a simulated disk, and callers that get in each other's
//! way. Time passes only as operations of the disk complete, so a thread that waits for what no thread does is stuck.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use kvarts_layout::{BlockKey, NamespaceId};
use shuttle::thread;

use super::Scene;
use crate::engine::{EvictionPolicy, Limits, Options, Store};
use crate::fixture::{self, PAGES, Style, all_heads};
use crate::io::{Completion, Io, IoFacts, Op, Token, Unpark};
use crate::rt::local::LocalExecutor;
use crate::rt::{Body, Join, Launcher};
use crate::sim::{DiskConfig, Seed, SimClock, SimDisk, SimIo};
use crate::uses;
use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteRequest, Durability, KvStore, LeaseTerms, Order, Parent, Presence,
    PutRequest, ReadEvent, ReadRequest, Target, Verify,
};
use kvarts_contract::buffers::Region;
use kvarts_contract::clock::{ManualClock, SeededEntropy};
use kvarts_contract::error::Error;
use kvarts_contract::sync::{Event, Race};
use kvarts_contract::{
    class::Class,
    clock::{Clock, Entropy},
};

/// What an executor sleeps for at most when something is under way that it looks at again and again. What recurs, like
/// checkpoints, is set for later than that and never comes.
const SOON: Duration = Duration::from_millis(200);
const PRODUCER: u64 = 2;

pub(super) fn scenes() -> Vec<Scene> {
    let scene = |name, play, finds, cost| Scene { name, play, finds, cost };
    vec![
        scene("two reads of one prefix", reads, &[Race::AnnounceInTwoSteps], 400),
        scene("puts, a lease, a delete and a read of the same blocks", everything, &[], 600),
        scene("a namespace goes while it is used, and is there again", namespace, &[], 600),
    ]
}

/// The machine that all executors of a scene share.
#[derive(Clone)]
struct Machine {
    disk: SimDisk,
    clock: Arc<SimClock>,
    entropy: Arc<SeededEntropy>,
    bells: Arc<StdMutex<Vec<Arc<Bell>>>>,
}

/// Ends an executor's sleep.
struct Bell(Event);

impl Unpark for Bell {
    fn unpark(&self) {
        self.0.ring();
    }
}

/// An executor's way to the disk that all share. An executor that has nothing else to do completes an operation, its own
/// or another executor's, as an interrupt would.
struct ThreadIo {
    io: SimIo,
    machine: Machine,
    bell: Arc<Bell>,
}

impl Machine {
    fn new() -> Self {
        let clock = SimClock::new(1_800_000_000_000);
        let disk = SimDisk::new(&DiskConfig::default(), Arc::clone(&clock), Seed(1));
        Self { disk, clock, entropy: SeededEntropy::new(1), bells: Arc::default() }
    }

    fn bells(&self) -> Vec<Arc<Bell>> {
        self.bells.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn complete_one(&self) -> bool {
        let Some(due) = self.disk.next_completion() else { return false };
        self.clock.advance_to(due.max(self.clock.now()));
        let completed = self.disk.complete_one();
        self.bells().iter().for_each(|bell| bell.unpark());
        completed
    }
}

impl Io for ThreadIo {
    fn submit(&mut self, token: Token, op: Op) {
        self.io.submit(token, op);
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        self.io.reap(out);
    }

    fn park(&mut self, timeout: Option<Duration>) {
        if !self.bell.0.wait(Some(Duration::ZERO)) && !self.machine.complete_one() {
            match timeout.filter(|timeout| *timeout <= SOON) {
                Some(soon) => return self.machine.clock.advance_to(self.machine.clock.now().plus(soon)),
                None => drop(self.bell.0.wait(None)),
            }
        }
        self.bell.0.empty();
    }

    fn unparker(&self) -> Arc<dyn Unpark> {
        Arc::clone(&self.bell) as Arc<dyn Unpark>
    }

    fn register(&mut self, _: &Arc<Region>) -> Result<(), String> {
        Ok(())
    }

    fn unregister(&mut self, _: &Arc<Region>) {}

    fn facts(&self) -> IoFacts {
        self.io.facts()
    }
}

impl Launcher for Machine {
    fn launch(&self, index: usize, body: Body) -> Result<Box<dyn Join + Send>, String> {
        let machine = self.clone();
        let bell = Arc::new(Bell(Event::new().map_err(|error| error.to_string())?));
        self.bells.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&bell));
        let thread = thread::spawn(move || {
            let io = ThreadIo { io: machine.disk.io(), machine: machine.clone(), bell };
            let io = Rc::new(RefCell::new(io));
            let (clock, entropy) = (Launcher::clock(&machine), Launcher::entropy(&machine));
            let executor = LocalExecutor::new(index, io, clock, entropy);
            executor.start(body);
            executor.run();
        });
        Ok(Box::new(Started(thread)))
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.clock) as Arc<dyn Clock>
    }

    fn entropy(&self) -> Arc<dyn Entropy> {
        Arc::clone(&self.entropy) as Arc<dyn Entropy>
    }
}

struct Started(thread::JoinHandle<()>);

impl Join for Started {
    fn join(self: Box<Self>) -> Result<(), String> {
        self.0.join().map_err(|_| "an executor panicked".to_owned())
    }
}

/// A store with one namespace, and the blocks that the scene is about.
#[derive(Clone)]
struct Place {
    store: Store,
    namespace: NamespaceId,
}

/// Bytes that reads of this process had from another read's load.
static SHARED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Bytes that reads had from another read's load, in all schedules so far: that the scene is about what it says.
pub fn shared_bytes() -> u64 {
    SHARED_BYTES.load(Ordering::Relaxed)
}

fn with_store(play: impl FnOnce(&Place)) {
    with_store_of((32 << 10, 256 << 10), play);
}

fn with_store_of((record_bytes_max, segment_bytes): (u64, u64), play: impl FnOnce(&Place)) {
    let machine = Machine::new();
    let options = Options {
        directories: 1,
        absent: Default::default(),
        replace: Default::default(),
        shards_per_directory: 2,
        segment_bytes,
        budget_bytes: 16 << 20,
        budget_beyond_disk: false,
        record_bytes_max,
        eviction: EvictionPolicy::default(),
        endurance_bytes_per_day: None,
        index_bytes_max: None,
        executors: 2,
        limits: Limits { arena_bytes: 1 << 20, ..Limits::default() },
    };
    let opened = shuttle::future::block_on(Store::open(&machine, &options));
    let (store, executors) = opened.expect("an empty disk");
    let namespace = store.register(&fixture::identity("schedules"), &fixture::geometry());
    play(&Place { store: store.clone(), namespace: namespace.expect("a model that is in order") });
    let (counts, space) = (store.stats().counts, store.stats().space);
    SHARED_BYTES.fetch_add(counts.bytes_shared, Ordering::Relaxed);
    assert_eq!((counts.chunks_damaged, counts.blocks_quarantined), (0, 0), "nothing is damaged");
    assert_eq!(space.total.sum(), space.total.allocated, "the books add up");
    shuttle::future::block_on(store.close()).expect("a clean stop");
    for executor in executors {
        executor.join().expect("it ended");
    }
}

impl Place {
    fn put(&self, keys: &[BlockKey]) -> Vec<BlockOutcome> {
        self.try_put(keys).expect("a put in order")
    }

    fn try_put(&self, keys: &[BlockKey]) -> Result<Vec<BlockOutcome>, Error> {
        let (blocks, shape) = (keys.len() as u32, fixture::shape(PAGES, all_heads()));
        let from = fixture::place(&shape, blocks, Style::Blocks, 0).expect("it fits");
        for (at, key) in (0..).zip(keys) {
            let chunks = fixture::content(key, PAGES, all_heads(), PRODUCER, &shape);
            fixture::write_block(&from, at, &chunks);
        }
        let request = PutRequest {
            namespace: self.namespace,
            group: PAGES,
            coordinate: all_heads(),
            parent: Parent::Unknown,
            first_block: None,
            keys: keys.to_vec(),
            from,
            layout: None,
            durability: Durability::Durable,
            expires_after: None,
            origins: None,
            deadline: None,
        };
        let answer = self.store.put(request).wait(&**self.store.clock(), None);
        answer.expect("no deadline").expect("an answer").map(|reply| reply.outcomes)
    }

    /// Reads, looks at every byte of what is said to be good, and gives how many leading blocks are.
    fn read(&self, keys: &[BlockKey]) -> u32 {
        let (blocks, shape) = (keys.len() as u32, fixture::shape(PAGES, all_heads()));
        let into = fixture::place(&shape, blocks, Style::Layers, 0).expect("it fits");
        let request = ReadRequest {
            namespace: self.namespace,
            group: PAGES,
            coordinate: all_heads(),
            keys: keys.to_vec(),
            layers: None,
            order: Order::Layers,
            into: into.clone(),
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        };
        let stream = self.store.read(request).expect("a read in order");
        let mut next = 0;
        let end = loop {
            match stream.next_blocking() {
                ReadEvent::Layer { layer, .. } => {
                    assert_eq!(layer, next, "layers come in order");
                    next += 1;
                }
                ReadEvent::End(end) => break end,
                other => panic!("{other:?} in a read by layers"),
            }
        };
        assert_eq!(end.usable_layers as usize, shape.layers().len(), "no deadline passed");
        for (at, key) in (0..end.usable_blocks).zip(keys) {
            let expected = fixture::content(key, PAGES, all_heads(), PRODUCER, &shape);
            assert!(fixture::read_block(&into, at, &shape) == expected, "block {at} has other bytes");
        }
        end.usable_blocks
    }
}

fn spawn<T: Send + 'static>(
    place: &Place,
    keys: &[BlockKey],
    what: impl FnOnce(Place, Vec<BlockKey>) -> T + Send + 'static,
) -> thread::JoinHandle<T> {
    let (place, keys) = (place.clone(), keys.to_vec());
    thread::spawn(move || what(place, keys))
}

thread_local! {
    /// How many blocks [`counted_read`] reads, and what it counts.
    static COUNTED: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// A read of this many blocks of one record, which is counted.
pub(crate) fn read_of(blocks: u64) -> Scene {
    COUNTED.set((blocks, 0));
    Scene { name: "a read that is counted", play: counted_read, finds: &[], cost: 0 }
}

/// How often it has used what threads share.
pub(crate) fn counted() -> u64 {
    COUNTED.get().1
}

fn counted_read() {
    with_store_of((2 << 20, 4 << 20), |place| {
        let (blocks, _) = COUNTED.get();
        let keys = fixture::keys(3, 0..blocks);
        assert!(place.put(&keys).iter().all(|outcome| *outcome == BlockOutcome::Stored));
        let before = uses::so_far();
        assert_eq!(u64::from(place.read(&keys)), blocks);
        COUNTED.set((blocks, uses::so_far() - before));
    });
}

/// One leads and the other follows, or neither, over two executors: both get all of it.
fn reads() {
    with_store(|place| {
        // Some in either shard.
        let keys = fixture::keys(3, 0..4);
        for key in &keys {
            assert_eq!(place.put(&[*key]), [BlockOutcome::Stored]);
        }
        let readers = [(); 2].map(|()| spawn(place, &keys, |place, keys| place.read(&keys)));
        for reader in readers {
            assert_eq!(reader.join().expect("it did not panic"), 4);
        }
    });
}

/// Everything in it is gone when the delete is answered, whatever was put meanwhile, and what is put then stays.
fn namespace() {
    with_store(|place| {
        let keys = fixture::keys(3, 0..3);
        assert_eq!(place.put(&keys[..2]), vec![BlockOutcome::Stored; 2]);
        // Whatever it is answered: while the namespace is being deleted it is refused.
        let putting = spawn(place, &keys[1..], |place, keys| drop(place.try_put(&keys)));
        let reading = spawn(place, &keys, |place, keys| place.read(&keys));
        let request = DeleteRequest { namespace: place.namespace, target: Target::Namespace, deadline: None };
        let answer = place.store.delete(request).wait(&**place.store.clock(), None);
        answer.expect("no deadline").expect("an answer").expect("a delete in order");
        putting.join().expect("it did not panic");
        reading.join().expect("it did not panic");
        let there = place.read(&keys[..1]);
        assert_eq!(there, 0, "the first block was stored before the delete began");
        assert_eq!(place.put(&keys[..1]), [BlockOutcome::Stored]);
        assert_eq!(place.read(&keys[..1]), 1);
    });
}

fn everything() {
    with_store(|place| {
        let keys = fixture::keys(3, 0..3);
        let first = spawn(place, &keys, |place, keys| place.put(&keys));
        let second = spawn(place, &keys[..2], |place, keys| place.put(&keys));
        let reader = spawn(place, &keys, |place, keys| place.read(&keys));
        let deleted = keys[1];
        let deleter = spawn(place, &[deleted], |place, keys| {
            let target = Target::Keys { column: None, keys };
            let request = DeleteRequest { namespace: place.namespace, target, deadline: None };
            let answer = place.store.delete(request).wait(&**place.store.clock(), None);
            answer.expect("no deadline").expect("an answer").expect("a delete in order").blocks
        });
        let holder = spawn(place, &keys, |place, keys| place.hold(&keys));
        let outcomes = [first, second].map(|put| put.join().expect("it did not panic"));
        reader.join().expect("it did not panic");
        deleter.join().expect("it did not panic");
        holder.join().expect("it did not panic");
        for (at, key) in keys.iter().enumerate() {
            let stored =
                outcomes.iter().filter(|outcome| outcome.get(at) == Some(&BlockOutcome::Stored)).count();
            // Between two puts of one block there must be a delete.
            assert!(stored <= if *key == deleted { 2 } else { 1 }, "{stored} puts of block {at} were first");
            if *key != deleted {
                assert_eq!((stored, place.read(&[*key])), (1, 1), "what was stored is here");
            }
        }
    });
}

impl Place {
    /// Takes a lease on what is here, and looks again: only a delete takes it away.
    fn hold(&self, keys: &[BlockKey]) {
        let terms = LeaseTerms { hold: LeaseTerms::UNLIMITED, tenant: 1, cap_bytes: u64::MAX };
        let request = ContainsRequest {
            namespace: self.namespace,
            group: PAGES,
            coordinate: all_heads(),
            keys,
            lease: Some(terms),
        };
        let held = self.store.contains(&request).expect("no cap");
        let again = self.store.contains(&ContainsRequest { lease: None, ..request }).expect("in order");
        for (at, (was, is)) in held.presence.iter().zip(&again.presence).enumerate() {
            let gone = *was == Presence::Here && *is != Presence::Here;
            assert!(!gone || at == 1, "block {at} was leased and is gone");
        }
        if let Some(lease) = held.lease {
            assert!(self.store.unlock(lease), "an unlimited lease ended");
        }
    }
}
