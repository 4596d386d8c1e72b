//! The engine over a disk in memory does what it does over a real one, event for event.
#![allow(clippy::disallowed_methods, reason = "reads a trace that is named in the environment")]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_store::engine::{EvictionPolicy, Store};
use kvarts_store::io::scratch::Scratch;
use kvarts_store::io::{Completion, Features, Io, IoChoice, IoFacts, Op, Reply, Token, Unpark, open_io};

use kvarts_simulator::disk::{Figures, Happened, Lockstep, Machine, MemoryIo, Replay, Settings};

/// Requests of sessions that grow behind a few beginnings, and of strangers.
fn requests(seed: u64, count: usize) -> Vec<(f64, Vec<u64>)> {
    let mut state = seed;
    let mut draw = move |end: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % end
    };
    let (mut sessions, mut next, mut at) = (Vec::<Vec<u64>>::new(), 1000, 0.0);
    let mut all = Vec::new();
    for _ in 0..count {
        at += draw(9000) as f64;
        let grown = 1 + draw(9);
        let fresh = next..next + grown;
        next += grown;
        sessions.truncate(30);
        let which = draw(sessions.len() as u64 + 3) as usize;
        let mut blocks = match sessions.get(which) {
            Some(session) => session.clone(),
            None => (draw(4) * 10..draw(4) * 10 + 40).take(3).collect(),
        };
        blocks.extend(fresh);
        match sessions.get_mut(which) {
            Some(session) => *session = blocks.clone(),
            None => sessions.push(blocks.clone()),
        }
        all.push((at, blocks));
    }
    all
}

fn run(machine: &Machine, settings: &Settings, requests: &[(f64, Vec<u64>)]) -> (Vec<Happened>, Figures) {
    let store: Store = machine.open(&settings.options()).unwrap();
    let mut replay = Replay::new(Some(machine), &store, settings, |_| ()).unwrap();
    let mut all = Vec::new();
    for (at, blocks) in requests {
        all.extend_from_slice(replay.request(*at, blocks).unwrap());
    }
    (all, replay.figures())
}

/// Writes down what goes in and what comes out.
struct Recorded<T>(T, Rc<RefCell<Vec<String>>>);

impl<T: Io> Io for Recorded<T> {
    fn submit(&mut self, token: Token, op: Op) {
        let text = match &op {
            Op::Read { file, offset, into } => format!("read {file:?} {offset} {}", into.len()),
            Op::Write { file, offset, from, sync } => {
                format!("write {file:?} {offset} {} {sync}", from.len())
            }
            Op::WriteV { file, offset, from, sync } => {
                format!("writev {file:?} {offset} {} {sync}", from.iter().map(SharedBuf::len).sum::<usize>())
            }
            other => format!("{other:?}"),
        };
        let text: String =
            text.split("FileId(").map(|part| part.split_once(')').map_or(part, |(_, rest)| rest)).collect();
        self.1.borrow_mut().push(format!("{} {text}", token.0));
        self.0.submit(token, op);
    }
    fn reap(&mut self, out: &mut Vec<Completion>) {
        let before = out.len();
        self.0.reap(out);
        let lines = out[before..].iter().map(|one| match &one.reply {
            Some(Reply::Space { .. }) => format!("{} space", one.token.0),
            Some(Reply::Opened(_)) => format!("{} opened", one.token.0),
            reply => format!("{} gave {} {reply:?}", one.token.0, one.result),
        });
        self.1.borrow_mut().extend(lines);
    }
    fn park(&mut self, timeout: Option<Duration>) {
        self.0.park(timeout);
    }
    fn unparker(&self) -> Arc<dyn Unpark> {
        self.0.unparker()
    }
    fn register(&mut self, region: &Arc<Region>) -> Result<(), String> {
        self.0.register(region)
    }
    fn unregister(&mut self, region: &Arc<Region>) {
        self.0.unregister(region);
    }
    fn facts(&self) -> IoFacts {
        self.0.facts()
    }
}

fn in_memory() -> Machine {
    Machine::new(7, Box::new(|| Ok(Rc::new(RefCell::new(MemoryIo::default())) as Rc<RefCell<dyn Io>>)))
}

fn on_disk(scratch: &Scratch, choice: IoChoice) -> Machine {
    let directory = scratch.path().to_owned();
    let make = move || {
        let io = open_io(choice, std::slice::from_ref(&directory), &Features::default());
        let io = Lockstep::new(io.map_err(|error| error.to_string())?);
        Ok(Rc::new(RefCell::new(io)) as Rc<RefCell<dyn Io>>)
    };
    Machine::new(7, Box::new(make))
}

fn settings(policy: EvictionPolicy) -> Settings {
    Settings {
        capacity_blocks: 1100,
        block_bytes: 16 << 10,
        policy,
        known_parents: true,
        endurance_blocks: None,
    }
}

/// Everything is equal: hits, what is stored and what is evicted, in the same order.
fn expect_equal(choice: IoChoice, settings: &Settings, requests: &[(f64, Vec<u64>)]) {
    let scratch = Scratch::new();
    let (real, figures) = run(&on_disk(&scratch, choice), settings, requests);
    let (simulated, same) = run(&in_memory(), settings, requests);
    let first = real.iter().zip(&simulated).position(|(one, other)| one != other);
    assert_eq!(first, None, "{:?} for {:?}", first.map(|at| simulated[at]), first.map(|at| real[at]));
    assert_eq!((real.len(), figures), (simulated.len(), same));
    assert!(figures.evicted > 500 && figures.hits > 500, "{figures:?}: too little happens to compare");
}

#[test]
fn a_disk_in_memory_gives_the_events_of_a_real_one_for_each_policy() {
    for (seed, policy) in EvictionPolicy::ALL.into_iter().enumerate() {
        expect_equal(IoChoice::Pool, &settings(policy), &requests(seed as u64, 700));
    }
}

#[test]
fn so_it_does_through_the_ring_without_parents_and_with_an_endurance_budget() {
    let unknown = Settings { known_parents: false, ..settings(EvictionPolicy::Weighted) };
    expect_equal(IoChoice::Auto, &unknown, &requests(11, 700));
    let bounded = Settings { endurance_blocks: Some(2000), ..settings(EvictionPolicy::Weighted) };
    expect_equal(IoChoice::Auto, &bounded, &requests(12, 900));
}

/// The first requests of a recorded trace, `most` at most.
fn recorded(text: &[u8], most: usize) -> Vec<(f64, Vec<u64>)> {
    let trace = kvarts_simulator::trace::Trace::new(text).take(most);
    trace.map(|request| request.map(|request| (request.at_ms, request.blocks)).unwrap()).collect()
}

/// The first 500 requests of a published one: `tests/traces/README.md`.
#[test]
fn on_an_excerpt_of_a_recorded_trace_both_are_equal_as_well() {
    let requests = recorded(include_bytes!("traces/mooncake-conversation-500.jsonl"), usize::MAX);
    assert_eq!(requests.len(), 500);
    let settings = Settings { capacity_blocks: 3000, ..settings(EvictionPolicy::Weighted) };
    expect_equal(IoChoice::Auto, &settings, &requests);
}

/// `KVARTS_TRACE=FILE` compares on the first 1,500 requests of a whole one, which is too long to be kept here.
#[test]
fn on_a_recorded_trace_that_is_named_both_are_equal_as_well() {
    let Ok(path) = std::env::var("KVARTS_TRACE") else {
        return eprintln!("SKIPPED: KVARTS_TRACE names no trace (the excerpt in tests/traces was compared)");
    };
    let settings = Settings { capacity_blocks: 3000, ..settings(EvictionPolicy::Weighted) };
    expect_equal(IoChoice::Auto, &settings, &recorded(&std::fs::read(path).unwrap(), 1500));
}

#[test]
fn two_replays_of_one_trace_are_alike_and_one_of_another_is_not() {
    let (requests, others) = (requests(3, 300), requests(4, 300));
    let settings = settings(EvictionPolicy::Weighted);
    let (one, _) = run(&in_memory(), &settings, &requests);
    assert_eq!(one, run(&in_memory(), &settings, &requests).0);
    assert_ne!(one, run(&in_memory(), &settings, &others).0);
}

#[test]
fn the_engine_asks_both_for_the_same_and_hears_the_same() {
    let (settings, requests) = (settings(EvictionPolicy::Weighted), requests(0, 300));
    let heard = |make: Box<dyn Fn() -> Box<dyn Io>>| {
        let lines = Rc::new(RefCell::new(Vec::new()));
        let log = Rc::clone(&lines);
        let make = move || {
            let io = Recorded(make(), Rc::clone(&log));
            Ok(Rc::new(RefCell::new(io)) as Rc<RefCell<dyn Io>>)
        };
        run(&Machine::new(7, Box::new(make)), &settings, &requests);
        lines.take()
    };
    let scratch = Scratch::new();
    let directory = scratch.path().to_owned();
    let real = heard(Box::new(move || {
        let io = open_io(IoChoice::Pool, std::slice::from_ref(&directory), &Features::default());
        Box::new(Lockstep::new(io.unwrap()))
    }));
    let simulated = heard(Box::new(|| Box::new(MemoryIo::default())));
    let differ = simulated.iter().zip(&real).position(|(one, other)| one != other);
    assert_eq!(differ, None, "{:?}", differ.map(|at| (&simulated[at], &real[at])));
    assert_eq!(simulated.len(), real.len());
}
