//! Ends go before beginnings: what a full store keeps of chains of blocks can be used, from the first block on.
//!
//! A block can be used if every block before it is here. The engine runs over a disk in memory, in several shards: the blocks
//! of one chain lie in all of them.
#![allow(clippy::disallowed_methods, reason = "reads a trace that is named in the environment")]

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteRequest, Durability, KvStore, Order, Parent, Placed, Presence,
    PutRequest, ReadEvent, ReadRequest, Target, Verify,
};
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Group, Layout, ModelSpec, NamespaceId};
use kvarts_simulator::disk::{Machine, MemoryIo, Replay, Settings, block_key, identity};
use kvarts_store::engine::{EvictionPolicy, Options, Store};
use kvarts_store::io::Io;

const BLOCK: u64 = 16 << 10;
const SEGMENT: u64 = 256 << 10;
/// Blocks whose bytes are a budget of 64 segments.
const CAPACITY: u64 = 1024;

/// A store, and one model's blocks in it.
struct Desk {
    machine: Machine,
    store: Store,
    namespace: NamespaceId,
    shape: Arc<BlockShape>,
    group: Group,
    coordinate: Coordinate,
    memory: SharedBuf,
    at_ms: f64,
}

/// Blocks of one request at most.
const REQUEST_MAX: u64 = 2048;

fn keys(blocks: &[u64]) -> Vec<BlockKey> {
    blocks.iter().map(|block| block_key(*block)).collect()
}

fn in_memory() -> Machine {
    Machine::new(7, Box::new(|| Ok(Rc::new(RefCell::new(MemoryIo::default())) as Rc<RefCell<dyn Io>>)))
}

/// A store of this many segments.
fn options(policy: EvictionPolicy, shards: u32, segments: u64) -> Options {
    let settings = Settings {
        capacity_blocks: CAPACITY,
        block_bytes: BLOCK,
        policy,
        known_parents: true,
        endurance_blocks: None,
    };
    Options {
        budget_bytes: segments * SEGMENT,
        segment_bytes: SEGMENT,
        shards_per_directory: shards,
        ..settings.options()
    }
}

impl Desk {
    fn new(options: &Options) -> Self {
        let machine = in_memory();
        let store = machine.open(options).unwrap();
        let spec = ModelSpec::opaque("chains", BLOCK).unwrap();
        let (geometry, tokens) = (spec.geometry(), spec.default_block_tokens());
        let group = geometry.groups()[0].group;
        let coordinate = geometry.coordinate(group, 1, 0).unwrap();
        let shape = Arc::new(geometry.shape(group, coordinate, tokens).unwrap());
        let namespace = store.register(&identity(&spec), geometry).unwrap();
        let bytes = usize::try_from(BLOCK * REQUEST_MAX).unwrap();
        let memory = SharedBuf::new(&Region::anonymous(bytes).unwrap(), 0, bytes).unwrap();
        Self { machine, store, namespace, shape, group, coordinate, memory, at_ms: 0.0 }
    }

    fn placed(&self, blocks: usize) -> Placed {
        let memory = self.memory.slice(0, blocks * BLOCK as usize).unwrap();
        Placed::blocks(&self.shape, memory, blocks as u32).unwrap()
    }

    fn pass(&mut self, ms: f64) {
        self.at_ms += ms;
        self.machine.advance_to(self.at_ms);
    }

    fn put(&mut self, blocks: &[u64], parent: Parent) -> Vec<BlockOutcome> {
        let request = PutRequest {
            namespace: self.namespace,
            group: self.group,
            coordinate: self.coordinate,
            parent,
            first_block: None,
            keys: keys(blocks),
            from: self.placed(blocks.len()),
            layout: Some(Layout::FullBlock),
            durability: Durability::Relaxed,
            expires_after: None,
            origins: None,
            deadline: None,
        };
        let answer = self.machine.wait(self.store.put(request)).unwrap().unwrap();
        self.pass(5.0);
        answer.unwrap().outcomes
    }

    fn here(&self, blocks: &[u64]) -> Vec<bool> {
        let request = ContainsRequest {
            namespace: self.namespace,
            group: self.group,
            coordinate: self.coordinate,
            keys: &keys(blocks),
            lease: None,
        };
        let found = self.store.contains(&request).unwrap().presence;
        found.iter().map(|one| *one == Presence::Here).collect()
    }

    /// How many of these blocks are here, and how many of them from the first on.
    fn kept(&self, blocks: &[u64]) -> (usize, usize) {
        let here = self.here(blocks);
        (here.iter().filter(|one| **one).count(), here.iter().take_while(|one| **one).count())
    }

    fn read(&mut self, blocks: &[u64]) {
        if blocks.is_empty() {
            return;
        }
        let request = ReadRequest {
            namespace: self.namespace,
            group: self.group,
            coordinate: self.coordinate,
            keys: keys(blocks),
            layers: None,
            order: Order::Blocks,
            into: self.placed(blocks.len()),
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        };
        let stream = self.store.read(request).unwrap();
        self.machine.wait(async { while !matches!(stream.next().await, ReadEvent::End(_)) {} }).unwrap();
        self.pass(5.0);
    }

    /// Looks up, reads what is here from the first block on, and puts the rest, `each` blocks at a time.
    fn turn(&mut self, blocks: &[u64], each: usize) {
        let (_, usable) = self.kept(blocks);
        for some in blocks[..usable].chunks(64) {
            self.read(some);
        }
        self.put_behind(blocks, usable, each);
    }

    /// Puts what is behind the first `begin` blocks of a chain, `each` at a time.
    fn put_behind(&mut self, blocks: &[u64], begin: usize, each: usize) -> Vec<BlockOutcome> {
        let (mut outcomes, mut at) = (Vec::new(), begin);
        while at < blocks.len() {
            let end = (at + each).min(blocks.len());
            let parent =
                at.checked_sub(1).map_or(Parent::Root, |before| Parent::Key(block_key(blocks[before])));
            outcomes.extend(self.put(&blocks[at..end], parent));
            at = end;
        }
        outcomes
    }

    /// Blocks that are here, and those of them that cannot be used, over all chains.
    fn cut_off(&self, chains: &[Vec<u64>]) -> (usize, usize) {
        let (mut live, mut usable) = (BTreeSet::new(), BTreeSet::new());
        for chain in chains {
            let here = self.here(chain);
            let first = here.iter().take_while(|one| **one).count();
            live.extend(chain.iter().zip(&here).filter(|(_, here)| **here).map(|(block, _)| *block));
            usable.extend(chain.iter().take(first).copied());
        }
        (live.len(), live.len() - usable.len())
    }
}

/// Whether the night's depth is asked for, as `scripts/nightly` does.
fn is_nightly() -> bool {
    std::env::var_os("KVARTS_NIGHTLY").is_some_and(|value| value == "1")
}

/// The last `few` of these, or all where it is.
fn some_of<T>(all: &[T], few: usize) -> &[T] {
    &all[if is_nightly() { 0 } else { all.len() - few }..]
}

/// Every block that is not here was refused for want of room, and none that was stored is gone.
fn told(outcomes: &[BlockOutcome], here: &[bool]) {
    for (at, (outcome, here)) in outcomes.iter().zip(here).enumerate() {
        match outcome {
            BlockOutcome::Stored => assert!(here, "block {at} was stored and is gone"),
            BlockOutcome::Refused(Reason::NoSpace(_)) => assert!(!here, "block {at} was refused and is here"),
            other => panic!("block {at}: {other:?}"),
        }
    }
}

#[test]
fn of_one_chain_longer_than_the_budget_the_beginning_is_kept_and_the_rest_is_refused() {
    for policy in EvictionPolicy::ALL {
        for &(shards, segments) in some_of(&[(1, 64), (4, 64), (2, 12)], 2) {
            let chain: Vec<u64> = (0..segments * 25).collect();
            for &each in some_of(&[16, usize::MAX, 1], 2) {
                let mut desk = Desk::new(&options(policy, shards, segments));
                let outcomes = desk.put_behind(&chain, 0, each.min(chain.len()));
                let (kept, usable) = desk.kept(&chain);
                let note =
                    format!("{}, {shards} shards, {segments} segments, {each} at a time", policy.name());
                println!("{note}: {usable} usable of {kept} kept of {} put", chain.len());
                assert!(10 * usable >= 9 * kept, "{note}: {usable} of {kept}");
                let room = segments as usize * 15;
                assert!(10 * kept >= 6 * room, "{note}: {kept} kept where {room} have room");
                told(&outcomes, &desk.here(&chain));
            }
        }
    }
}

/// What came before it goes, oldest first, as for anything else.
#[test]
fn a_chain_longer_than_the_budget_takes_the_room_of_what_was_there_before() {
    for (policy, shards) in [(EvictionPolicy::Weighted, 1), (EvictionPolicy::Lru, 4)] {
        let mut desk = Desk::new(&options(policy, shards, 64));
        for session in 0..60 {
            let blocks: Vec<u64> = (0..20).map(|n| 1_000_000 + session * 100 + n).collect();
            desk.put_behind(&blocks, 0, 20);
        }
        let chain: Vec<u64> = (0..1600).collect();
        desk.put_behind(&chain, 0, 16);
        let (kept, usable) = desk.kept(&chain);
        println!("{}, {shards} shards: {usable} usable of {kept} kept", policy.name());
        assert!(10 * usable >= 9 * kept && kept > 600, "{}: {usable} of {kept}", policy.name());
    }
}

/// Numbers that follow from a seed.
fn draws(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    move |end| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % end
    }
}

/// Sessions that grow: how many, in how many turns, by how many blocks a turn, blocks that all begin with, and whether
/// they take turns one after another.
struct Shape {
    sessions: u64,
    turns: u64,
    grow: u64,
    common: u64,
    in_turn: bool,
    each: usize,
}

const SHAPES: [Shape; 5] = [
    Shape { sessions: 60, turns: 8, grow: 6, common: 0, in_turn: true, each: 32 },
    Shape { sessions: 60, turns: 4, grow: 12, common: 0, in_turn: false, each: 32 },
    Shape { sessions: 40, turns: 12, grow: 5, common: 24, in_turn: false, each: 1 },
    Shape { sessions: 12, turns: 10, grow: 24, common: 8, in_turn: false, each: 16 },
    Shape { sessions: 400, turns: 3, grow: 3, common: 0, in_turn: false, each: 8 },
];

#[test]
fn sessions_that_grow_leave_next_to_nothing_cut_off() {
    let mut worst = 0.0f64;
    let mut failures = Vec::new();
    for policy in EvictionPolicy::ALL {
        for &shards in some_of(&[1, 2, 4], 1) {
            for (number, shape) in SHAPES.iter().enumerate() {
                if !is_nightly() && number % EvictionPolicy::ALL.len() != policy as usize {
                    continue;
                }
                let mut desk = Desk::new(&options(policy, shards, 64));
                let mut draw = draws(number as u64 + 1);
                let common: Vec<u64> = (0..shape.common).collect();
                let mut sessions = vec![common; shape.sessions as usize];
                let (mut next, mut shares) = (1000, Vec::new());
                for turn in 0..shape.sessions * shape.turns {
                    let which = if shape.in_turn { turn % shape.sessions } else { draw(shape.sessions) };
                    let session = &mut sessions[which as usize];
                    let grown = 1 + draw(2 * shape.grow - 1);
                    session.extend(next..next + grown);
                    next += grown;
                    let blocks = session.clone();
                    desk.turn(&blocks, shape.each);
                    desk.pass(draw(3000) as f64);
                    if turn % 40 == 39 && 2 * turn > shape.sessions * shape.turns {
                        let (live, cut) = desk.cut_off(&sessions);
                        shares.push(cut as f64 / live.max(1) as f64);
                    }
                }
                let evicted = desk.store.stats().counts.blocks_evicted;
                let (mean, most) = (
                    shares.iter().sum::<f64>() / shares.len() as f64,
                    shares.iter().copied().fold(0.0, f64::max),
                );
                let (live, cut) = desk.cut_off(&sessions);
                // What the store says of itself is the same.
                desk.pass(61_000.0);
                assert_eq!(desk.store.cut_off().0, cut as u64, "shape {number}");
                worst = worst.max(mean);
                let note = format!(
                    "{}, {shards} shards, shape {number}: {live} live, {cut} cut off at the end, {mean:.4} on average, \
                     {most:.4} at most, {evicted} evicted",
                    policy.name()
                );
                println!("{note}");
                if mean > 0.02 {
                    failures.push(note);
                }
            }
        }
    }
    println!("worst average {worst:.4}");
    assert!(failures.is_empty(), "{failures:#?}");
}

/// An engine that has a session's beginning in its own memory puts what comes behind it and reads nothing.
#[test]
fn what_a_put_hangs_on_stays_as_long_as_it_does() {
    for shards in [1, 4] {
        for policy in [EvictionPolicy::Weighted, EvictionPolicy::Lru] {
            let mut desk = Desk::new(&options(policy, shards, 64));
            let (mut session, mut next) = ((0..40).collect::<Vec<u64>>(), 1_000_000);
            desk.put_behind(&session, 0, 1);
            for round in 0..120 {
                let begin = session.len();
                session.push(1000 + round);
                let outcomes = desk.put_behind(&session, begin, 1);
                assert_eq!(outcomes, [BlockOutcome::Stored], "round {round}");
                // Three budgets of others in all.
                for _ in 0..13 {
                    let others: Vec<u64> = (next..next + 2).collect();
                    next += 2;
                    desk.put(&others, Parent::Root);
                }
                desk.pass(1000.0);
            }
            let (kept, usable) = desk.kept(&session);
            assert_eq!((kept, usable), (160, 160), "{} in {shards} shards", policy.name());
        }
    }
}

/// One that reads the end of a session alone has its beginning in memory.
#[test]
fn what_a_read_block_hangs_on_stays_as_long_as_it_does() {
    for shards in [1, 4] {
        let mut desk = Desk::new(&options(EvictionPolicy::Lru, shards, 64));
        let (session, mut next) = ((0..60).collect::<Vec<u64>>(), 1_000_000);
        desk.put_behind(&session, 0, 1);
        for _ in 0..120 {
            desk.read(&session[57..]);
            for _ in 0..13 {
                let others: Vec<u64> = (next..next + 2).collect();
                next += 2;
                desk.put(&others, Parent::Root);
            }
            desk.pass(1000.0);
        }
        assert_eq!(desk.kept(&session), (60, 60), "{shards} shards");
    }
}

/// What is told of a store: blocks that are here and of no use.
#[test]
fn blocks_behind_a_gap_are_counted_and_so_is_the_end_of_the_gap() {
    let mut desk = Desk::new(&options(EvictionPolicy::Weighted, 2, 64));
    let (one, other): (Vec<u64>, Vec<u64>) = ((0..30).collect(), (100..140).collect());
    desk.put_behind(&one, 0, 1);
    desk.put_behind(&other, 0, 8);
    let told = |desk: &mut Desk| {
        desk.pass(61_000.0);
        desk.store.cut_off()
    };
    assert_eq!(told(&mut desk), (0, 0));
    for block in [10, 115] {
        let target = Target::Keys { column: None, keys: keys(&[block]) };
        let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
        desk.machine.wait(desk.store.delete(request)).unwrap().unwrap().unwrap();
    }
    // Behind the second one lie three records of eight, and nothing of its own record.
    let (blocks, bytes) = told(&mut desk);
    assert_eq!(blocks, 19 + 24);
    assert!((43 * BLOCK..43 * (BLOCK + 8192)).contains(&bytes), "{bytes}");
    assert_eq!(desk.cut_off(&[one.clone(), other.clone()]).1, 43);
    desk.put(&[10], Parent::Key(block_key(9)));
    desk.put(&[115], Parent::Key(block_key(114)));
    assert_eq!(told(&mut desk), (0, 0));
}

/// `KVARTS_TRACE=FILE` tells the hits of a whole trace by policy and capacity, beside those of a store that knows of no chains:
/// what a change of the policy is judged by.
#[test]
fn hits_on_a_recorded_trace_that_is_named_are_told() {
    let Ok(path) = std::env::var("KVARTS_TRACE") else {
        return eprintln!("SKIPPED: KVARTS_TRACE names no trace");
    };
    let text = std::fs::read(path).unwrap();
    let requests: Vec<_> = kvarts_simulator::trace::Trace::new(&text[..])
        .map(|request| request.map(|one| (one.at_ms, one.blocks)).unwrap())
        .collect();
    let distinct: BTreeSet<u64> = requests.iter().flat_map(|(_, blocks)| blocks.iter().copied()).collect();
    for (policy, part) in
        EvictionPolicy::ALL.into_iter().flat_map(|policy| [50, 20, 9, 4].map(|part| (policy, part)))
    {
        for shards in [1, 4] {
            let settings = Settings {
                capacity_blocks: distinct.len() as u64 / part,
                block_bytes: 128 << 10,
                policy,
                known_parents: true,
                endurance_blocks: None,
            };
            let options = Options { shards_per_directory: shards, ..settings.options() };
            let hits = |bug| {
                kvarts_layout::planted::plant(bug);
                let machine = in_memory();
                let store = machine.open(&options).unwrap();
                let mut replay = Replay::new(Some(&machine), &store, &settings, |_| ()).unwrap();
                for (at, blocks) in &requests {
                    replay.request(*at, blocks).unwrap();
                }
                let figures = replay.figures();
                kvarts_layout::planted::plant(None);
                (figures.hits as f64 / figures.references as f64, figures.refused)
            };
            let ((known, refused), (unknown, _)) = (hits(None), hits(Some("beginnings-go-first")));
            println!(
                "{}, a {part}th, {shards} shards: {known:.4} hit ({refused} refused), {unknown:.4} without chains",
                policy.name()
            );
        }
    }
}
