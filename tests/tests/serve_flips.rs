//! A wire that changes one byte of a conversation, each in turn: of what is in front of bytes as well as of bytes, of what
//! announces them, of what asks for them. Whatever it is, no other bytes are stored or called good.
//!
//! What a changed bit makes of each message by itself is tried without a server, bit by bit: `kvarts_wire::digest` and the
//! client's `arrival`. Here it is a whole conversation, frames and all, of which each run changes other places: one byte in
//! some, each of them by night. `KVARTS_FLIPS=all` changes each bit of each byte by itself, otherwise one bit of a byte.

#![allow(clippy::disallowed_methods, reason = "real servers stand outside the simulation")]

use std::ops::Range;
use std::time::Duration;

use crate::proxied::{Proxy, Way, panics};
use crate::served::{Beside, Served};
use kvarts_client::{Client, ConnectOptions, Via};
use kvarts_contract::api::{BlockOutcome, KvStore, Order, PutRequest, ReadEnd, ReadEvent, ReadRequest};
use kvarts_contract::error::{Kind, Reason};
use kvarts_layout::{BlockKey, Coordinate, Group};
use kvarts_tests::audit;
use kvarts_tests::conformance::Desk;
use kvarts_tests::depth::{depth, is_nightly};
use kvarts_tests::fixture::{self, ODD, STATE};
use kvarts_tests::stage::Stage;

/// Blocks of a request.
const BLOCKS: u64 = 3;
/// How long a call waits for the rest of a frame whose length was changed.
const TIMEOUT: Duration = Duration::from_millis(200);
/// How long one may take of which nothing is changed.
const PATIENCE: Duration = Duration::from_secs(60);
/// Of a block one byte in this many is changed.
const STEP: usize = 61;
/// Before each change one place in this many is changed of those that the night changes.
const EVERY: usize = 4;

/// A server, a wire to it, and a client that has another one.
struct Scene {
    served: Served,
    proxy: Proxy,
    beside: Beside,
    panics: usize,
}

/// What became of calls whose bytes were changed.
#[derive(Default, Debug)]
struct Tally {
    whole: usize,
    damaged: usize,
    other: usize,
}

/// The columns whose blocks are small: their messages are most of what is said.
fn columns() -> [(Group, Coordinate); 2] {
    [(ODD, Coordinate::Replicated), (STATE, Coordinate::Replicated)]
}

/// Whether each bit is to be changed.
fn all_bits() -> bool {
    std::env::var("KVARTS_FLIPS").is_ok_and(|value| value == "all")
}

/// Of a registration one byte in this many is changed: many of the changes are waited for until the timeout.
fn step() -> usize {
    if all_bits() { 1 } else { depth(11, 5) }
}

/// How long a call waits of which this is changed.
fn patience(flip: Option<(usize, u8)>) -> Duration {
    if flip.is_some() { TIMEOUT } else { PATIENCE }
}

/// The least number of changes that are found damaged: this, where all places have their turn.
fn of_all(damaged: usize) -> usize {
    if is_nightly() || all_bits() { damaged } else { damaged / (2 * EVERY) }
}

/// Bits to change one after the other at this byte.
fn bits(at: usize) -> Vec<u8> {
    if all_bits() {
        return (0..8).map(|bit| 1 << bit).collect();
    }
    // Low bits more often than high ones: it is they that make a number another one that may be.
    vec![1 << [0, 1, 2, 0, 1, 3, 0, 4, 1, 5, 0, 6, 2, 7][at % 14]]
}

impl Scene {
    fn open(name: &str) -> Self {
        let panics = panics();
        let served = Served::start(name, "");
        let proxy = Proxy::start(served.daemon().grpc().unwrap());
        let beside = Beside(served.client(None));
        Self { served, proxy, beside, panics }
    }

    /// A client of its own for each call: no other call uses a connection whose frames are out of step.
    fn through(&self) -> Beside {
        self.through_within(Duration::from_secs(60))
    }

    /// One who waits no longer for an answer.
    fn through_within(&self, call_timeout: Duration) -> Beside {
        let options =
            ConnectOptions { via: Via::Grpc, call_timeout, ..ConnectOptions::to(self.proxy.endpoint()) };
        // It is also how long connecting may take, which is not what is tried.
        let connected = (0..100).find_map(|_| Client::connect(&options).ok());
        Beside(connected.expect("a connection"))
    }

    fn end(mut self) {
        let state = self.served.daemon().state();
        audit::books(&state.engine).unwrap();
        let stats = state.engine.stats();
        assert_eq!((stats.counts.chunks_damaged, stats.counts.blocks_quarantined), (0, 0));
        self.served.stop();
        assert_eq!(panics(), self.panics, "something panicked");
    }
}

/// Where bytes are changed of a call of this length: nearly all of its first and last ones, where messages are that
/// carry no bytes of blocks, and some of those between. Of these places each run has others than its neighbours.
fn places(length: usize, run: usize) -> impl Iterator<Item = usize> {
    let all = (0..length).filter(move |at| *at < 300 || at + 300 > length || at % STEP == 0);
    let every = if is_nightly() || all_bits() { 1 } else { EVERY };
    all.skip(run % every).step_by(every)
}

/// What an end and the announcements before it call good has its bytes.
fn expect_honest(desk: &Desk<'_>, request: &ReadRequest, (events, end): &(Vec<ReadEvent>, ReadEnd)) {
    let all = request.keys.len() as u32;
    let failed = |block: &u32| end.failures.iter().any(|(failed, _)| failed == block);
    let shape = fixture::shape(request.group, request.coordinate);
    let layers = request.layers.clone().unwrap_or(0..shape.layers().len() as u32);
    for event in events {
        match event {
            ReadEvent::Layer { layer, blocks } => {
                let of = ReadRequest { layers: Some(*layer..layer + 1), ..request.clone() };
                desk.expect_bytes(&of, &(0..*blocks).collect::<Vec<_>>(), 1);
            }
            ReadEvent::Block(block) => desk.expect_bytes(request, &[*block], 1),
            ReadEvent::End(_) | ReadEvent::Released => {}
        }
    }
    match request.order {
        Order::Blocks => {
            let good: Vec<u32> = (0..all).filter(|block| !failed(block)).collect();
            assert!((0..end.usable_blocks).all(|block| good.contains(&block)), "{end:?}");
            desk.expect_bytes(request, &good, 1);
        }
        Order::Layers => {
            let usable: Range<u32> = layers.start..layers.start + end.usable_layers;
            let of = ReadRequest { layers: Some(usable), ..request.clone() };
            desk.expect_bytes(&of, &(0..end.usable_blocks).collect::<Vec<_>>(), 1);
        }
    }
}

impl Tally {
    fn count(&mut self, reasons: &[&Reason]) {
        let damaged = |reason: &&&Reason| matches!(reason, Reason::Media(_));
        match reasons {
            [] => self.whole += 1,
            some if some.iter().any(|reason| damaged(&reason)) => self.damaged += 1,
            some => {
                let bugs = |reason: &&&Reason| reason.kind() == Kind::Bug;
                assert_eq!(some.iter().find(bugs), None, "a wire is no defect of the store");
                self.other += 1;
            }
        }
    }
}

/// Reads with each byte changed that goes this way.
fn reads(
    scene: &Scene,
    (way, order): (Way, Order),
    column: (Group, Coordinate),
    layers: Option<Range<u32>>,
    run: usize,
) -> Tally {
    let mut tally = Tally::default();
    let read = |flip: Option<(usize, u8)>| {
        let through = scene.through();
        let desk = Desk::new(&through, "flips");
        let keys = desk.keys(0..BLOCKS);
        let mut request = ReadRequest { order, layers: layers.clone(), ..desk.read_request(column, &keys) };
        scene.proxy.carried();
        if let Some((at, bits)) = flip {
            scene.proxy.flip(way, at, bits);
        }
        eprintln!("{way:?} {order:?} {column:?} {flip:?}");
        // Counted from here on: making the request takes longer than that on a busy machine.
        request.deadline = Some(through.now().plus(patience(flip)));
        let found = desk.read(&request);
        let was_flipped = scene.proxy.was_flipped();
        expect_honest(&desk, &request, &found);
        (found.1, was_flipped, scene.proxy.carried())
    };
    let (end, _, (up, down)) = read(None);
    assert_eq!(end.failures, []);
    let length = if way == Way::Up { up.len() } else { down };
    for (at, bits) in places(length, run).flat_map(|at| bits(at).into_iter().map(move |bits| (at, bits))) {
        let (end, was_flipped, _) = read(Some((at, bits)));
        if was_flipped {
            tally.count(&end.failures.iter().map(|(_, reason)| reason).collect::<Vec<_>>());
        }
    }
    eprintln!("{way:?} {order:?} {column:?}: {tally:?} of {length} bytes");
    tally
}

/// A server on which the same keys have other blocks in each column.
fn filled(name: &str) -> Scene {
    let scene = Scene::open(name);
    let desk = Desk::new(&scene.beside, "flips");
    for column in columns() {
        let stored = desk.outcomes(desk.request(column, &desk.keys(0..BLOCKS), 1));
        assert_eq!(stored, vec![BlockOutcome::Stored; BLOCKS as usize]);
    }
    scene
}

#[test]
fn an_answer_with_any_byte_changed_never_brings_a_wrong_byte() {
    let scene = filled("flips-answers");
    let both = [Order::Blocks, Order::Layers].into_iter();
    let all = both.flat_map(|order| columns().map(|column| (order, column)));
    for (run, (order, column)) in all.enumerate() {
        let tally = reads(&scene, (Way::Down, order), column, None, run);
        assert!(tally.damaged > of_all(100), "{tally:?}");
    }
    scene.end();
}

#[test]
fn a_request_with_any_byte_changed_never_brings_what_was_not_asked_for() {
    let scene = filled("flips-requests");
    for (run, order) in [Order::Blocks, Order::Layers].into_iter().enumerate() {
        // One of two layers of the same size: the other one's bytes would fit.
        let tally = reads(&scene, (Way::Up, order), columns()[0], Some(0..1), run);
        assert!(tally.damaged > 0 && tally.other > of_all(50), "{tally:?}");
    }
    scene.end();
}

#[test]
fn a_registration_with_any_byte_changed_gives_the_name_of_no_other_model() {
    let scene = Scene::open("flips-models");
    let expected = Desk::new(&scene.beside, "flips").namespace;
    let register = |way: Way, flip: Option<(usize, u8)>| {
        let through = scene.through_within(patience(flip));
        scene.proxy.carried();
        if let Some((at, bits)) = flip {
            scene.proxy.flip(way, at, bits);
        }
        let found = through.0.register(&fixture::identity("flips"), &fixture::geometry());
        (found, scene.proxy.was_flipped(), scene.proxy.carried())
    };
    let (_, _, (up, down)) = register(Way::Up, None);
    for (way, length) in [(Way::Up, up.len()), (Way::Down, down)] {
        let mut tally = Tally::default();
        for (at, bits) in
            (0..length).step_by(step()).flat_map(|at| bits(at).into_iter().map(move |bits| (at, bits)))
        {
            let (found, was_flipped, _) = register(way, Some((at, bits)));
            if let Ok(found) = &found {
                assert_eq!(*found, expected, "{way:?} {at} {bits}: the name of another model");
            }
            if was_flipped {
                tally.count(&found.as_ref().err().map(|error| &error.0).into_iter().collect::<Vec<_>>());
            }
        }
        eprintln!("{way:?}: {tally:?} of {length} bytes");
        // Of few bytes none may have cost the connection: by which error a change is noticed is not the question.
        assert!(tally.damaged + tally.other > of_all(2), "{tally:?}");
    }
    scene.end();
}

#[test]
fn a_put_with_any_byte_changed_stores_what_was_put_or_nothing() {
    let scene = Scene::open("flips-puts");
    let other = Desk::new(&scene.beside, "flips");
    let (mut tally, mut round) = (Tally::default(), 0);
    let mut put = |flip: Option<(usize, u8)>| {
        let through = scene.through();
        let desk = Desk::new(&through, "flips");
        let keys: Vec<BlockKey> = desk.keys(round * 2..round * 2 + 2);
        round += 1;
        let deadline = Some(through.now().plus(patience(flip)));
        let request = PutRequest { deadline, ..desk.request(columns()[1], &keys, 1) };
        let stored = || scene.served.daemon().state().engine.stats().counts.blocks_stored;
        let before = stored();
        scene.proxy.carried();
        if let Some((at, bits)) = flip {
            scene.proxy.flip(Way::Up, at, bits);
        }
        let answer = through.answer(through.0.put(request));
        let was_flipped = scene.proxy.was_flipped();
        drop(through);
        scene.served.until("nothing is under way", |daemon| {
            let holding = daemon.state().engine.holding();
            daemon.state().calls() == 0 && (holding.claims, holding.promised, holding.reserved) == (0, 0, 0)
        });
        // What is there under its keys is what was put, and nothing is there under others.
        let there = expect_there(&other, &keys);
        assert_eq!(stored() - before, there, "{flip:?}: blocks under other names");
        if let Ok(reply) = &answer {
            let kept = reply.outcomes.iter().filter(|outcome| **outcome == BlockOutcome::Stored).count();
            assert!(kept as u64 <= there, "{flip:?}: {reply:?}, {there} are there");
        }
        (answer, was_flipped, scene.proxy.carried().0.len())
    };
    let (answer, _, length) = put(None);
    assert!(answer.is_ok());
    for (at, bits) in places(length, 0).flat_map(|at| bits(at).into_iter().map(move |bits| (at, bits))) {
        let (answer, was_flipped, _) = put(Some((at, bits)));
        if was_flipped {
            tally.count(&answer.as_ref().err().map(|error| &error.0).into_iter().collect::<Vec<_>>());
        }
    }
    eprintln!("{tally:?} of {length} bytes");
    assert!(tally.damaged > of_all(100), "{tally:?}");
    scene.end();
}

#[test]
fn an_answer_to_a_put_with_any_byte_changed_is_what_was_answered_or_an_error() {
    let scene = filled("flips-outcomes");
    let again = |flip: Option<(usize, u8)>| {
        let through = scene.through();
        let desk = Desk::new(&through, "flips");
        let deadline = Some(through.now().plus(patience(flip)));
        let request = PutRequest { deadline, ..desk.request(columns()[1], &desk.keys(0..BLOCKS), 1) };
        scene.proxy.carried();
        if let Some((at, bits)) = flip {
            scene.proxy.flip(Way::Down, at, bits);
        }
        let answer = through.answer(through.0.put(request));
        (answer, scene.proxy.was_flipped(), scene.proxy.carried().1)
    };
    let (_, _, length) = again(None);
    let mut tally = Tally::default();
    for (at, bits) in places(length, 0).flat_map(|at| bits(at).into_iter().map(move |bits| (at, bits))) {
        let (answer, was_flipped, _) = again(Some((at, bits)));
        if let Ok(reply) = &answer {
            assert_eq!(
                reply.outcomes,
                [const { BlockOutcome::AlreadyThere }; BLOCKS as usize],
                "{at} {bits}"
            );
        }
        if was_flipped {
            tally.count(&answer.as_ref().err().map(|error| &error.0).into_iter().collect::<Vec<_>>());
        }
    }
    eprintln!("{tally:?} of {length} bytes");
    assert!(tally.damaged > of_all(5), "{tally:?}");
    scene.end();
}

/// How many of these blocks are there, each with its bytes.
fn expect_there(desk: &Desk<'_>, keys: &[BlockKey]) -> u64 {
    let request = ReadRequest { order: Order::Blocks, ..desk.read_request(columns()[1], keys) };
    let (_, end) = desk.read(&request);
    let failed = |block: &u32| end.failures.iter().any(|(failed, _)| failed == block);
    let there: Vec<u32> = (0..keys.len() as u32).filter(|block| !failed(block)).collect();
    desk.expect_bytes(&request, &there, 1);
    there.len() as u64
}
