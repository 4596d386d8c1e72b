//! Staging memory is shared fairly: reads that never stop keep neither a large put waiting, nor, through it, the small
//! ones behind it; and who waits for memory waits no longer than until his deadline.

use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, Order, Parent, PutRequest, ReadEnd, ReadEvent, ReadRequest, ReadStream,
};
use kvarts_contract::error::Reason;
use kvarts_layout::{Coordinate, Group};
use kvarts_store::engine::{Limits, Options};
use kvarts_tests::conformance::Desk;
use kvarts_tests::fixture;
use kvarts_tests::sim::{DiskConfig, Effect, OpKind, Rule, SimWorld, When, Which, WorldConfig};
use kvarts_tests::stage::{SimStage, Stage};

/// Blocks of 416 bytes: none can be read or written without staging.
const ODD: (Group, Coordinate) = (fixture::ODD, Coordinate::Replicated);
const READERS: u64 = 8;
/// Blocks of one read: 213 KiB.
const READ: u64 = 512;
/// Blocks of the large put: more than half of the arena.
const LARGE: u64 = 1600;
const ARENA: usize = 1 << 20;

fn open(seed: u64) -> SimStage {
    open_with(seed, Limits { arena_bytes: ARENA, ..Limits::default() })
}

fn open_with(seed: u64, limits: Limits) -> SimStage {
    let disk = DiskConfig { capacity: 256 << 20, ..DiskConfig::default() };
    let world = SimWorld::new(seed, &WorldConfig { disk, ..WorldConfig::default() });
    let options = Options {
        shards_per_directory: 1,
        segment_bytes: 4 << 20,
        budget_bytes: 64 << 20,
        executors: 1,
        limits,
        ..Options::default()
    };
    SimStage::open(&world, &options).unwrap()
}

fn put(desk: &Desk<'_>, keys: std::ops::Range<u64>) -> PutRequest {
    let request = desk.request(ODD, &desk.keys(keys), 1);
    PutRequest { parent: Parent::Unknown, first_block: None, ..request }
}

/// The end of a read, if it has come.
fn end_of(stream: &ReadStream) -> Option<ReadEnd> {
    while let Some(event) = stream.try_next() {
        if let ReadEvent::End(end) = event {
            return Some(end);
        }
    }
    None
}

#[test]
fn reads_that_never_stop_keep_a_large_put_and_small_ones_beside_it_no_longer_than_a_few_reads() {
    for seed in 0..4 {
        let stage = open(seed);
        let desk = Desk::new(&stage, "staging");
        let requests: Vec<ReadRequest> = (0..READERS)
            .map(|reader| {
                let keys = reader * READ..(reader + 1) * READ;
                assert!(stage.put(put(&desk, keys.clone())).is_ok());
                ReadRequest { order: Order::Layers, ..desk.read_request(ODD, &desk.keys(keys)) }
            })
            .collect();
        let mut streams: Vec<_> =
            requests.iter().map(|request| stage.store().read(request.clone()).unwrap()).collect();
        let (mut reads, mut next, mut asked_at, mut longest) = (0u64, 100_000, 0, 0);
        let mut small = stage.store().put(put(&desk, next..next + 1));
        let mut large = None;
        let world = stage.world().clone();
        let ran = world.run_until(400_000, || {
            for (stream, request) in streams.iter_mut().zip(&requests) {
                if let Some(end) = end_of(stream) {
                    assert!(end.failures.is_empty(), "{:?}", end.failures);
                    reads += 1;
                    *stream = stage.store().read(request.clone()).unwrap();
                }
            }
            if let Some(answer) = small.try_take() {
                assert_eq!(answer.unwrap().unwrap().outcomes, [BlockOutcome::Stored]);
                longest = longest.max(reads - asked_at);
                (next, asked_at) = (next + 1, reads);
                small = stage.store().put(put(&desk, next..next + 1));
            }
            if large.is_none() && reads >= 40 {
                large = Some((stage.store().put(put(&desk, 200_000..200_000 + LARGE)), reads));
            }
            let Some((ticket, since)) = &mut large else { return false };
            assert!(reads - *since <= 60, "seed {seed}: {} reads went before it", reads - *since);
            match ticket.try_take() {
                Some(answer) => {
                    let stored = answer.unwrap().unwrap().outcomes;
                    assert!(stored.iter().all(|one| *one == BlockOutcome::Stored));
                    true
                }
                None => false,
            }
        });
        ran.unwrap_or_else(|hang| panic!("{hang}"));
        let longest = longest.max(reads - asked_at);
        assert!(longest <= 60, "seed {seed}: a small put waited for {longest} reads");
    }
}

/// A disk may be faster than digests: what it has brought holds staging memory until it was looked at.
#[test]
fn a_read_has_no_more_than_two_windows_of_which_nothing_was_looked_at() {
    const PAGE: u64 = 4096;
    const WINDOW: u64 = 256 * PAGE;
    const BLOCKS: u64 = 1500;
    let limits = Limits { read_window_bytes: WINDOW, ..Limits::default() };
    let stage = open_with(11, limits);
    let desk = Desk::new(&stage, "windows");
    // A record each, so that each is an extent of a page.
    (0..BLOCKS).for_each(|block| drop(stage.put(put(&desk, block..block + 1)).unwrap()));
    let request = ReadRequest { order: Order::Blocks, ..desk.read_request(ODD, &desk.keys(0..BLOCKS)) };
    let world = stage.world().clone();
    let now = || (world.disk().operations().0, stage.engine().stats().counts.device_bytes_read / PAGE);
    let before = now();
    let stream = stage.store().read(request).unwrap();
    let (mut seen, mut end) = (Vec::new(), None);
    let ran = world.run_until(400_000, || {
        let (asked, taken) = now();
        seen.push((asked - before.0, taken - before.1));
        end = end_of(&stream);
        end.is_some()
    });
    ran.unwrap_or_else(|hang| panic!("{hang}"));
    assert!(end.unwrap().failures.is_empty());
    let (asked, taken) = *seen.last().unwrap();
    assert_eq!(taken, BLOCKS);
    // With headers or, where they are known, without.
    let each = asked / BLOCKS;
    assert!((1..=2).contains(&each), "{asked} reads");
    let most = seen.iter().map(|(asked, taken)| (asked / each).saturating_sub(*taken)).max().unwrap() * each;
    assert!(most > WINDOW / PAGE, "the disk was not faster: {most}");
    assert!(most <= 2 * WINDOW / PAGE + 2 * each, "{most} pages");
}

#[test]
fn who_waits_for_memory_that_a_stuck_disk_holds_is_answered_at_the_deadline() {
    let stage = open(9);
    let desk = Desk::new(&stage, "stuck");
    for reader in 0..READERS {
        stage.put(put(&desk, reader * READ..(reader + 1) * READ)).unwrap();
    }
    let stuck = Rule::new(Which::Kind(OpKind::Read), When::From(1), Effect::Stuck);
    stage.world().disk().inject(stuck);
    let read = |reader: u64, deadline| {
        let request = desk.read_request(ODD, &desk.keys(reader * READ..(reader + 1) * READ));
        stage.store().read(ReadRequest { deadline, ..request }).unwrap()
    };
    let _held: Vec<_> = (0..READERS - 1).map(|reader| read(reader, None)).collect();
    stage.rest();
    let deadline = stage.now().plus(Duration::from_millis(3));
    let late = read(READERS - 1, Some(deadline));
    let mut end = None;
    stage.wait(&mut || {
        end = end_of(&late);
        end.is_some()
    });
    let end = end.unwrap();
    assert_eq!((end.usable_layers, end.held_bytes), (0, 0), "nothing was begun for it");
    assert!(stage.now() < deadline.plus(Duration::from_millis(3)));
    let deadline = Some(stage.now().plus(Duration::from_millis(3)));
    let large = PutRequest { deadline, ..put(&desk, 200_000..200_000 + LARGE) };
    let outcomes = stage.put(large).unwrap().outcomes;
    let late = BlockOutcome::Refused(Reason::DeadlinePassed);
    assert!(outcomes.iter().all(|one| *one == late), "{:?}", outcomes[0]);
}
