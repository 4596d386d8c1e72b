//! Compaction that the store begins by itself: it begins where there is a need, keeps to its share, ends when the store
//! stops, and does the same for the same seed.

use std::time::Duration;

use kvarts_contract::api::{BlockOutcome, DeleteRequest, Parent, PutRequest, Target};
use kvarts_contract::clock::Clock;
use kvarts_layout::{Coordinate, Group, Layout};
use kvarts_store::engine::{Compaction, Counts, Limits, Options};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture;
use kvarts_tests::sim::{SimWorld, WorldConfig};
use kvarts_tests::stage::{SimStage, Stage, ask};

/// A producer whose blocks can be compressed.
const SOFT: u64 = 1;

/// Small blocks.
const ODD: (Group, Coordinate) = (fixture::ODD, Coordinate::Replicated);

/// Looks every second, and finds a need in everything unless a test says otherwise.
fn eager() -> Compaction {
    Compaction {
        every: Some(Duration::from_secs(1)),
        bytes_per_second: 1 << 30,
        dead_thousandths: 1,
        merge_after_records: u64::MAX,
        short_thousandths: 0,
        encode_cold_after: None,
    }
}

fn open(seed: u64, compaction: Compaction) -> SimStage {
    let options = Options {
        shards_per_directory: 2,
        segment_bytes: 256 << 10,
        budget_bytes: 8 << 20,
        executors: 2,
        limits: Limits { arena_bytes: 4 << 20, compaction, ..Limits::default() },
        ..Options::default()
    };
    SimStage::open(&SimWorld::new(seed, &WorldConfig::default()), &options).unwrap()
}

/// Puts forty blocks one by one, so that several segments are sealed, and deletes most of them.
fn mostly_dead(stage: &SimStage) -> Desk<'_> {
    let desk = Desk::new(stage, "alone");
    for n in 0..40 {
        desk.store(pages(), &desk.keys(n..n + 1), SOFT, Layout::FullBlock);
    }
    let keys = (0..40).filter(|n| n % 5 != 0).flat_map(|n| desk.keys(n..n + 1)).collect();
    let target = Target::Keys { column: Some(pages()), keys };
    let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    ask(stage, stage.store().delete(request)).unwrap();
    desk
}

fn pass(stage: &SimStage, seconds: u64) -> Counts {
    let until = stage.now().plus(Duration::from_secs(seconds));
    stage.wait(&mut || stage.now() >= until);
    stage.engine().stats().counts
}

fn live(desk: &Desk<'_>) {
    for n in (0..40).step_by(5) {
        desk.expect(pages(), &desk.keys(n..n + 1), SOFT);
    }
}

#[test]
fn dead_space_above_the_threshold_is_emptied_and_the_same_seed_does_the_same() {
    let run = |compaction| {
        let stage = open(1, compaction);
        let desk = mostly_dead(&stage);
        let counts = pass(&stage, 5);
        live(&desk);
        stage.audit_all();
        (counts, stage.world().disk().operations())
    };
    let (counts, operations) = run(eager());
    assert!(counts.blocks_moved >= 4, "{counts:?}");
    assert_eq!(run(eager()), (counts, operations), "the same seed");
    // The threshold, the room that is left, and the switch.
    for quiet in [
        Compaction { dead_thousandths: 900, ..eager() },
        Compaction { short_thousandths: 999, ..eager() },
        Compaction { every: None, ..eager() },
    ] {
        assert_eq!(run(quiet).0.blocks_moved, 0, "{quiet:?}");
    }
}

#[test]
fn cold_records_are_encoded_when_space_is_short_and_not_when_it_is_switched_off() {
    let run = |compaction| {
        let stage = open(2, compaction);
        let desk = mostly_dead(&stage);
        let counts = pass(&stage, 5);
        live(&desk);
        counts
    };
    let cold = Compaction { dead_thousandths: 1000, encode_cold_after: Some(Duration::ZERO), ..eager() };
    let counts = run(cold);
    assert!(counts.records_encoded > 4, "{counts:?}");
    assert!(counts.encoded_bytes_after * 11 < counts.encoded_bytes_before * 10, "{counts:?}");
    for off in [
        Compaction { encode_cold_after: None, ..cold },
        Compaction { encode_cold_after: Some(Duration::from_secs(600)), ..cold },
        Compaction { short_thousandths: 999, ..cold },
    ] {
        assert_eq!(run(off).records_encoded, 0, "{off:?}");
    }
}

#[test]
fn many_small_chained_records_are_merged() {
    let compaction = Compaction { merge_after_records: 32, dead_thousandths: 1000, ..eager() };
    for (puts, merged) in [(40u64, true), (20, false)] {
        let stage = open(3, compaction);
        let desk = Desk::new(&stage, "alone");
        for n in 0..puts {
            let parent = if n == 0 { Parent::Root } else { Parent::Key(desk.keys(n - 1..n)[0]) };
            let request =
                PutRequest { parent, first_block: None, ..desk.request(ODD, &desk.keys(n..n + 1), SOFT) };
            assert_eq!(desk.outcomes(request), [BlockOutcome::Stored]);
        }
        let counts = pass(&stage, 4);
        assert_eq!(counts.blocks_moved > 8, merged, "{puts} puts: {counts:?}");
        desk.expect(ODD, &desk.keys(0..puts), SOFT);
        stage.audit_all();
    }
}

#[test]
fn it_keeps_to_its_bytes_a_second_and_does_not_hold_up_a_stop() {
    const RATE: u64 = 16 << 10;
    let stage = open(4, Compaction { bytes_per_second: RATE, ..eager() });
    mostly_dead(&stage);
    let counts = pass(&stage, 10);
    // Reads count as well, so each executor writes half of it, and may go over by one record of 28 KiB.
    let most = 2 * (10 * RATE / 2 + (32 << 10));
    assert!(counts.blocks_moved > 0 && counts.moved_bytes_written <= most, "{counts:?}, at most {most}");
    let before = stage.now();
    let world = stage.world().clone();
    stage.close().unwrap();
    let took = Duration::from_nanos(world.clock().now().0 - before.0);
    assert!(took < Duration::from_secs(1), "a stop took {took:?}");
}
