//! A connection that ends at any page of an upload or a download, or brings other bytes than were sent: both ends are told
//! the truth, no block is half there, other clients are served, and nothing is kept of the clients that are gone.

#![allow(clippy::disallowed_methods, reason = "real servers stand outside the simulation")]

use std::collections::BTreeMap;

use crate::proxied::{Cut, Proxy, Way, panics};
use crate::served::{Beside, Served};
use kvarts_client::{Client, ConnectOptions, Via};
use kvarts_contract::api::{BlockOutcome, KvStore, Order, PutReply, ReadEnd, ReadRequest};
use kvarts_contract::error::{Error, Kind, Reason};
use kvarts_layout::BlockKey;
use kvarts_store::engine::Holding;
use kvarts_tests::audit;
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::depth::depth;
use kvarts_tests::fixture;
use kvarts_tests::stage::Stage;

/// How far apart cuts are.
const STEP: usize = 4096;
/// Before each change one of this many cuts is tried, by night all of them. No multiple of 3: a cut's number says how it is made.
const EVERY: usize = 4;
/// What one call's bytes differ by from another's on the same wire: headers that were said before, window updates.
const SLACK: usize = 512;
/// Blocks of a request, of 24 KiB each.
const BLOCKS: u64 = 12;

/// A server, a client whose wire is cut, and one beside it who reads its own blocks all the while.
struct Scene {
    served: Served,
    proxy: Proxy,
    through: Beside,
    beside: Beside,
    panics: usize,
    holding: Holding,
    turns: (u64, usize),
}

/// The blocks of who is beside.
fn undisturbed(desk: &Desk<'_>) -> Vec<BlockKey> {
    desk.keys(0..4)
}

impl Scene {
    fn open(name: &str) -> Self {
        let panics = panics();
        // A tile that is kept goes out in one piece, of which a cut leaves nothing: what is asked here is about pieces.
        let served = Served::start(name, "[limits]\ncache = \"0\"\n");
        let proxy = Proxy::start(served.daemon().grpc().unwrap());
        let options = ConnectOptions { via: Via::Grpc, ..ConnectOptions::to(proxy.endpoint()) };
        let through = Beside(Client::connect(&options).unwrap());
        let beside = Beside(served.client(None));
        let desk = Desk::new(&beside, "undisturbed");
        let stored = desk.outcomes(desk.request(pages(), &undisturbed(&desk), 1));
        assert_eq!(stored, vec![BlockOutcome::Stored; 4]);
        let state = served.daemon().state();
        let (holding, turns) = (state.engine.holding(), state.puts.left());
        Self { served, proxy, through, beside, panics, holding, turns }
    }

    /// Makes a call whose connection ends after `bytes` more that way. A call may be given to a connection that is over
    /// and not yet known to be: that one says so itself (`is_lost`), nothing of it goes by, and it is made again.
    fn cut<T>(
        &self,
        (way, bytes, cut): (Way, usize, Cut),
        call: impl Fn() -> T,
        is_lost: impl Fn(&T) -> bool,
    ) -> T {
        for _ in 0..4 {
            self.proxy.cut_after(way, bytes, cut);
            let answer = call();
            if self.proxy.was_cut() {
                return answer;
            }
            assert!(
                is_lost(&answer),
                "the cut after {bytes} bytes {way:?} never came, and the call went well"
            );
        }
        panic!("the cut after {bytes} bytes {way:?} never came, in four calls");
    }

    /// A put on a wire that holds. The connection that it is given to may be over already.
    fn put_again(&self, desk: &Desk<'_>, keys: &[BlockKey], producer: u64) -> Vec<BlockOutcome> {
        for _ in 0..4 {
            let answer = self.through.put(desk.request(pages(), keys, producer));
            if !is_lost_put(&answer) {
                return answer.unwrap().outcomes;
            }
        }
        panic!("four puts were lost on a wire that holds");
    }

    /// Nothing is kept of who was cut off, and the other is served.
    fn expect_undisturbed(&self) {
        let desk = Desk::new(&self.beside, "undisturbed");
        desk.expect(pages(), &undisturbed(&desk), 1);
        self.served.until("everything comes back", |daemon| {
            let state = daemon.state();
            state.memory.usage().iter().all(|usage| usage.used == 0)
                && state.calls() == 0
                && state.puts.left() == self.turns
                && state.engine.holding() == self.holding
                // Both clients have one connection, or are about to have one again.
                && state.connections.all() - state.connections.free() <= 2
        });
    }

    /// The end: no panic, no status that means a defect, and books that match.
    fn end(mut self) {
        let desk = Desk::new(&self.beside, "undisturbed");
        desk.expect(pages(), &undisturbed(&desk), 1);
        let state = self.served.daemon().state();
        audit::books(&state.engine).unwrap();
        let stats = state.engine.stats();
        assert_eq!((stats.counts.chunks_damaged, stats.counts.blocks_quarantined), (0, 0));
        let metrics = self.served.metrics();
        let defects = |line: &&str| line.starts_with("kvarts_calls_total") && line.contains("INTERNAL");
        assert_eq!(metrics.lines().find(defects), None);
        self.served.stop();
        assert_eq!(panics(), self.panics, "something panicked");
    }
}

/// Whether a put came to nothing with its connection.
fn is_lost_put(answer: &Result<PutReply, Error>) -> bool {
    answer.as_ref().is_err_and(|error| error.kind() == Kind::Retry)
}

/// Which of these blocks are there; each of those has its bytes.
fn there(desk: &Desk<'_>, keys: &[BlockKey], producer: u64) -> Vec<u32> {
    let request = ReadRequest { order: Order::Blocks, ..desk.read_request(pages(), keys) };
    let (_, end) = desk.read(&request);
    for (block, reason) in &end.failures {
        assert!(matches!(reason, Reason::NotHere(_)), "block {block}: {reason:?}");
    }
    let failed = |block: &u32| end.failures.iter().any(|(failed, _)| failed == block);
    let there: Vec<u32> = (0..keys.len() as u32).filter(|block| !failed(block)).collect();
    desk.expect_bytes(&request, &there, producer);
    there
}

#[test]
fn an_upload_that_is_cut_at_any_page_leaves_no_block_and_nothing_else() {
    let scene = Scene::open("cut-uploads");
    let (desk, other) = (Desk::new(&scene.through, "cut"), Desk::new(&scene.beside, "cut"));
    let keys = |round: u64| desk.keys(round * BLOCKS..(round + 1) * BLOCKS);
    // One that is not cut: how many bytes it has.
    scene.proxy.carried();
    assert_eq!(
        desk.outcomes(desk.request(pages(), &keys(0), 1)),
        vec![BlockOutcome::Stored; BLOCKS as usize]
    );
    let bytes = scene.proxy.carried().0.len();
    let cuts = bytes.saturating_sub(SLACK).div_ceil(STEP);
    assert!(bytes as u64 > BLOCKS * 24 * 1024 && cuts > 70, "{bytes} bytes");
    for cut in (0..cuts).step_by(depth(EVERY, 1)) {
        let keys = keys(cut as u64 + 1);
        let put = || scene.through.put(desk.request(pages(), &keys, 1));
        let answer = scene.cut((Way::Up, cut * STEP, Cut::turn(cut)), put, is_lost_put);
        let error = answer.expect_err("it was cut off");
        assert_eq!(error.kind(), Kind::Retry, "cut {cut}: {error:?}");
        scene.expect_undisturbed();
        assert_eq!(there(&other, &keys, 1), Vec::<u32>::new(), "cut {cut}");
        if cut % 8 == 0 {
            // The same again, on a wire that holds.
            let stored = scene.put_again(&desk, &keys, 1);
            assert_eq!(stored, vec![BlockOutcome::Stored; BLOCKS as usize]);
            other.expect(pages(), &keys, 1);
        }
    }
    scene.end();
}

#[test]
fn an_upload_in_pieces_that_is_cut_leaves_each_block_whole_or_absent() {
    const LONG: u64 = 800;
    let scene = Scene::open("cut-pieces");
    let (desk, other) = (Desk::new(&scene.through, "cut"), Desk::new(&scene.beside, "cut"));
    let keys = desk.keys(0..LONG);
    // Who brought a block first: its bytes are its producer's, also where a later put brought it again.
    let mut seen = BTreeMap::new();
    for (round, bytes) in [4 << 20, (8 << 20) + (200 << 10), (16 << 20) + (700 << 10)].into_iter().enumerate()
    {
        let producer = round as u64 + 1;
        let put = || scene.through.put(desk.request(pages(), &keys, producer));
        let answer = scene.cut((Way::Up, bytes, Cut::turn(round)), put, is_lost_put);
        let error = answer.expect_err("it was cut off");
        assert_eq!(error.kind(), Kind::Retry, "{error:?}");
        scene.expect_undisturbed();
        let there = present(&other, &keys);
        assert!(there.len() <= bytes / (24 << 10), "{} blocks of {bytes} bytes", there.len());
        assert!(round > 0 || there.is_empty(), "a part of a piece");
        for block in &there {
            seen.entry(*block).or_insert(producer);
        }
        assert_eq!(there.len(), seen.len(), "blocks that were there are gone");
        for (block, producer) in seen.iter().step_by(37) {
            other.expect(pages(), &keys[*block as usize..=*block as usize], *producer);
        }
    }
    assert!(!seen.is_empty(), "nothing of what was whole before the cut is there");
    // What is missing can be brought; what is there stays what it was.
    let outcomes = scene.put_again(&desk, &keys, 4);
    let already = outcomes.iter().filter(|outcome| **outcome == BlockOutcome::AlreadyThere).count();
    assert_eq!(already, seen.len());
    scene.end();
}

/// Which of these blocks a look-up finds.
fn present(desk: &Desk<'_>, keys: &[BlockKey]) -> Vec<u32> {
    use kvarts_contract::api::{ContainsRequest, Presence};
    let (group, coordinate) = pages();
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys, lease: None };
    let found = desk.stage.store().contains(&request).unwrap().presence;
    (0u32..).zip(found).filter(|(_, presence)| *presence == Presence::Here).map(|(block, _)| block).collect()
}

/// What an end calls good has its bytes; whether that is everything.
fn expect_honest(desk: &Desk<'_>, request: &ReadRequest, end: &ReadEnd) -> bool {
    for (block, reason) in &end.failures {
        let known = reason.kind() == Kind::Retry || matches!(reason, Reason::Media(_));
        assert!(known, "block {block}: {reason:?}");
    }
    let failed = |block: &u32| end.failures.iter().any(|(failed, _)| failed == block);
    match request.order {
        Order::Blocks => {
            let good: Vec<u32> = (0..request.keys.len() as u32).filter(|block| !failed(block)).collect();
            assert!(good.iter().zip(0..end.usable_blocks).all(|(block, at)| *block == at));
            desk.expect_bytes(request, &good, 1);
        }
        Order::Layers => {
            let layers = ReadRequest { layers: Some(0..end.usable_layers), ..request.clone() };
            desk.expect_bytes(&layers, &(0..end.usable_blocks).collect::<Vec<_>>(), 1);
        }
    }
    end.failures.is_empty()
}

#[test]
fn a_download_that_is_cut_at_any_page_never_says_more_than_has_arrived() {
    let scene = Scene::open("cut-downloads");
    let (desk, other) = (Desk::new(&scene.through, "cut"), Desk::new(&scene.beside, "cut"));
    let keys = desk.keys(0..BLOCKS);
    assert_eq!(other.outcomes(other.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; BLOCKS as usize]);
    for (first, order) in [(0, Order::Blocks), (EVERY / 2, Order::Layers)] {
        let request = || ReadRequest { order, ..desk.read_request(pages(), &keys) };
        scene.proxy.carried();
        assert_eq!(desk.read(&request()).1.failures, []);
        let bytes = scene.proxy.carried().1;
        let cuts = bytes.saturating_sub(SLACK).div_ceil(STEP);
        assert!(bytes as u64 > BLOCKS * 24 * 1024 && cuts > 70, "{bytes} bytes");
        let (mut partly, mut whole) = (0, 0);
        for cut in (depth(first, 0)..cuts).step_by(depth(EVERY, 1)) {
            let read = || {
                let request = request();
                let (_, end) = desk.read(&request);
                (request, end)
            };
            let is_lost = |(_, end): &(ReadRequest, ReadEnd)| {
                !end.failures.is_empty()
                    && end.usable_blocks == 0
                    && end.failures.iter().all(|(_, reason)| reason.kind() == Kind::Retry)
            };
            let (request, end) = scene.cut((Way::Down, cut * STEP, Cut::turn(cut)), read, is_lost);
            let all = expect_honest(&desk, &request, &end);
            whole += usize::from(all);
            partly += usize::from(!all && end.usable_blocks > 0);
            scene.expect_undisturbed();
            // A wire that holds brings everything.
            if cut % 8 == 0 {
                desk.expect(pages(), &keys, 1);
            }
        }
        // The first one is asked again, before anything of an answer; the last may miss no more than the end.
        // What a reset finds in the receiver's own queue is lost with it.
        assert!(
            whole <= 2 && partly > depth(1, 4),
            "{order:?}: {partly} in part and {whole} whole of {cuts}"
        );
    }
    scene.end();
}

#[test]
fn what_may_be_asked_twice_is_asked_again_when_its_connection_turns_out_to_be_over() {
    let scene = Scene::open("cut-before");
    let (desk, other) = (Desk::new(&scene.through, "cut"), Desk::new(&scene.beside, "cut"));
    let keys = desk.keys(0..BLOCKS);
    assert_eq!(other.outcomes(other.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; BLOCKS as usize]);
    for round in 0..6 {
        // The connection ends with the first byte of the request.
        scene.proxy.cut_after(Way::Up, 0, Cut::turn(round));
        match round % 2 {
            0 => desk.expect(pages(), &keys, 1),
            _ => assert_eq!(present(&desk, &keys), (0..BLOCKS as u32).collect::<Vec<_>>()),
        }
        assert!(scene.proxy.was_cut());
        scene.expect_undisturbed();
    }
    scene.end();
}

#[test]
fn a_put_whose_answer_is_lost_is_there_and_can_be_asked_for_again() {
    let scene = Scene::open("cut-answers");
    let (desk, other) = (Desk::new(&scene.through, "cut"), Desk::new(&scene.beside, "cut"));
    for round in 0..9u64 {
        let keys = desk.keys(round * BLOCKS..(round + 1) * BLOCKS);
        let cut = Cut::turn(round as usize);
        // Nothing of the answer comes, or its beginning.
        let before = scene.served.daemon().state().engine.stats().counts.blocks_stored;
        let ticket = scene.through.0.put(desk.request(pages(), &keys, 1));
        scene.served.until("the put arrives", |daemon| {
            let state = daemon.state();
            state.engine.stats().counts.blocks_stored > before || state.calls() > 0
        });
        scene.proxy.cut_after(Way::Down, round as usize * 3, cut);
        let answer = scene.through.answer(ticket);
        let was_cut = scene.proxy.was_cut();
        scene.expect_undisturbed();
        match answer {
            Ok(reply) => assert_eq!(reply.outcomes, vec![BlockOutcome::Stored; BLOCKS as usize]),
            Err(error) => assert!(was_cut && error.kind() == Kind::Retry, "{error:?}"),
        }
        let found = there(&other, &keys, 1).len();
        assert!(found == 0 || found == BLOCKS as usize, "{found} of a put that is one piece");
        let again = scene.put_again(&desk, &keys, 1);
        let expected = if found == 0 { BlockOutcome::Stored } else { BlockOutcome::AlreadyThere };
        assert_eq!(again, vec![expected; BLOCKS as usize]);
    }
    scene.end();
}

#[test]
fn bytes_that_a_wire_changes_are_neither_stored_nor_called_good() {
    let scene = Scene::open("cut-spoiled");
    let (desk, other) = (Desk::new(&scene.through, "cut"), Desk::new(&scene.beside, "cut"));
    let (group, coordinate) = pages();
    let shape = fixture::shape(group, coordinate);
    let (mut up, mut down) = (0, 0);
    for round in 0..12u64 {
        let keys = desk.keys(round * BLOCKS..(round + 1) * BLOCKS);
        let bytes = fixture::content(&keys[5], group, coordinate, 1, &shape).concat();
        let pattern = &bytes[round as usize * 1999..][..24];
        scene.proxy.spoil(Way::Up, pattern);
        let answer = scene.through.put(desk.request(pages(), &keys, 1));
        // It may have come in two parts, and not have been known.
        if scene.proxy.was_spoiled() {
            up += 1;
            let error = answer.expect_err("it was changed on its way");
            assert!(matches!(error.0, Reason::Media(_)), "{error:?}");
            assert_eq!(there(&other, &keys, 1), Vec::<u32>::new());
            scene.put_again(&desk, &keys, 1);
        }
        for order in [Order::Blocks, Order::Layers] {
            scene.proxy.spoil(Way::Down, pattern);
            let request = ReadRequest { order, ..desk.read_request(pages(), &keys) };
            let (_, end) = desk.read(&request);
            if scene.proxy.was_spoiled() {
                down += 1;
                assert!(end.failures.iter().any(|(_, reason)| matches!(reason, Reason::Media(_))), "{end:?}");
            }
            expect_honest(&desk, &request, &end);
        }
        // The wire's fault, not the disk's: a read over another connection has them all.
        other.expect(pages(), &keys, 1);
        scene.expect_undisturbed();
    }
    assert!(up > 6 && down > 12, "{up} uploads and {down} downloads were changed");
    scene.end();
}

#[test]
fn an_answer_that_stands_still_in_its_middle_ends_by_the_callers_timeout() {
    let scene = Scene::open("cut-still");
    let other = Desk::new(&scene.beside, "cut");
    let keys = other.keys(0..BLOCKS);
    assert_eq!(other.outcomes(other.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; BLOCKS as usize]);
    // Of an answer comes nothing, the head, and a part of the message.
    for third in 0..3 {
        let call_timeout = std::time::Duration::from_secs(2);
        let options =
            ConnectOptions { via: Via::Grpc, call_timeout, ..ConnectOptions::to(scene.proxy.endpoint()) };
        let client = Beside(Client::connect(&options).unwrap());
        let desk = Desk::new(&client, "cut");
        let all = (0..BLOCKS as u32).collect::<Vec<_>>();
        assert_eq!(present(&desk, &keys), all);
        scene.proxy.carried();
        assert_eq!(present(&desk, &keys), all);
        let bytes = scene.proxy.carried().1 * third / 3;
        scene.proxy.cut_after(Way::Down, bytes, Cut::Still);
        let asked = client.0.contains(&kvarts_contract::api::ContainsRequest {
            namespace: desk.namespace,
            group: pages().0,
            coordinate: pages().1,
            keys: &keys,
            lease: None,
        });
        assert!(scene.proxy.was_cut(), "after {bytes} bytes");
        assert_eq!(asked.unwrap_err(), Error(Reason::DeadlinePassed), "after {bytes} bytes");
    }
    scene.end();
}
