//! Segments are filled to their end: a run of blocks that does not fit is written as two records, and is there as a
//! whole or not at all like any other.

use kvarts_contract::api::{BlockOutcome, Durability, KvStore};
use kvarts_contract::error::Reason;
use kvarts_store::engine::{Limits, Options};
use kvarts_store::ledger::Phase;
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::sim::media::errno::EIO;
use kvarts_tests::sim::{Effect, OpKind, Rule, SimWorld, When, Which, WorldConfig};
use kvarts_tests::stage::{SimStage, Stage, drive};

const SEGMENT: u64 = 1 << 20;
/// Blocks of a put: nearly a quarter of a segment, so three of them leave nearly another one free.
const RUN: u64 = 7;

fn options() -> Options {
    Options {
        segment_bytes: SEGMENT,
        budget_bytes: 64 << 20,
        executors: 1,
        shards_per_directory: 1,
        limits: Limits { arena_bytes: 4 << 20, ..Limits::default() },
        ..Options::default()
    }
}

fn open(seed: u64) -> (SimWorld, SimStage) {
    let world = SimWorld::new(seed, &WorldConfig::default());
    let stage = SimStage::open(&world, &options()).unwrap();
    (world, stage)
}

fn put(desk: &Desk<'_>, run: u64, durability: Durability) -> Vec<BlockOutcome> {
    let mut request = desk.request(pages(), &desk.keys(run * RUN..(run + 1) * RUN), 1);
    request.durability = durability;
    desk.outcomes(request)
}

#[test]
fn a_run_that_does_not_fit_fills_its_segment_and_goes_on_in_the_next() {
    for (seed, durability) in [(1, Durability::Durable), (2, Durability::Relaxed)] {
        let (_world, stage) = open(seed);
        let desk = Desk::new(&stage, "filling");
        for run in 0..30 {
            assert_eq!(put(&desk, run, durability), vec![BlockOutcome::Stored; RUN as usize]);
            stage.audit();
        }
        stage.rest();
        let segments = stage.engine().segments();
        let sealed: Vec<_> = segments.iter().filter(|one| one.phase == Phase::Full).collect();
        assert!(sealed.len() > 3);
        for segment in sealed {
            assert!(segment.records * 100 >= SEGMENT * 92, "a gap at the end of {segment:?}");
        }
        desk.expect(pages(), &desk.keys(0..30 * RUN), 1);
        stage.audit_all();
        let media = stage.close().unwrap();
        let world = SimWorld::with_media(seed + 10, &WorldConfig::default(), media);
        let stage = SimStage::open(&world, &options()).unwrap();
        stage.audit_all();
        let desk = Desk::new(&stage, "filling");
        desk.expect(pages(), &desk.keys(0..30 * RUN), 1);
    }
}

#[test]
fn the_header_of_a_second_piece_is_paid_by_the_quota_or_the_run_is_not_cut() {
    let (_world, stage) = open(3);
    let desk = Desk::new(&stage, "quota");
    for step in 0..8 {
        // What every run of the namespace takes in one piece, and from no page more to several.
        let quota = 3 * RUN * (32 << 10) + step * 4096;
        stage.engine().set_quota(desk.namespace, Some(quota));
        for run in 0..8 {
            let outcomes = put(&desk, step * 8 + run, Durability::Durable);
            assert_eq!(outcomes, vec![BlockOutcome::Stored; RUN as usize], "quota {quota}");
            let report = stage.engine().stats().space;
            let namespace = report.namespaces.iter().find(|one| one.namespace == desk.namespace);
            assert!(namespace.is_some_and(|one| one.live <= quota), "{namespace:?}");
            stage.audit();
        }
    }
}

#[test]
fn a_put_that_meets_its_quota_costs_its_caller_no_look_at_what_is_there() {
    let (world, stage) = open(5);
    let desk = Desk::new(&stage, "quota");
    for run in 0..6 {
        assert_eq!(put(&desk, run, Durability::Relaxed), vec![BlockOutcome::Stored; RUN as usize]);
    }
    let space = stage.engine().stats().space;
    let live = space.namespaces.iter().find(|one| one.namespace == desk.namespace).unwrap().live;
    stage.engine().set_quota(desk.namespace, Some(live));
    let steps = || stage.engine().work_done().quotas.steps;
    let before = steps();
    let request = desk.request(pages(), &desk.keys(6 * RUN..7 * RUN), 1);
    let answer = stage.engine().put(request);
    assert_eq!(steps(), before, "the caller looked");
    let reply = drive(&world, answer).expect("it ends").expect("answered").expect("well formed");
    assert_eq!(reply.outcomes, vec![BlockOutcome::Stored; RUN as usize]);
    assert!(steps() > before);
    let now = stage.engine().stats().space.namespaces;
    assert!(now.iter().all(|one| one.live <= live), "{now:?}");
}

/// A limit that becomes less than a put that waits for room lets nothing go for that put.
#[test]
fn a_put_that_fits_no_more_lets_nothing_go() {
    let (world, stage) = open(6);
    let desk = Desk::new(&stage, "quota");
    let live = || {
        let namespaces = stage.engine().stats().space.namespaces;
        namespaces.iter().find(|one| one.namespace == desk.namespace).map_or(0, |one| one.live)
    };
    for run in 0..6 {
        assert_eq!(put(&desk, run, Durability::Relaxed), vec![BlockOutcome::Stored; RUN as usize]);
    }
    let (runs, single) = (live(), desk.keys(1000..1001));
    stage.advance(std::time::Duration::from_secs(2));
    assert_eq!(desk.outcomes(desk.request(pages(), &single, 1)), [BlockOutcome::Stored]);
    drop(stage.engine().set_quota(desk.namespace, Some(live())));
    let answer = stage.store().put(desk.request(pages(), &desk.keys(6 * RUN..7 * RUN), 1));
    let limit = live() - runs;
    drop(stage.engine().set_quota(desk.namespace, Some(limit)));
    let reply = drive(&world, answer).unwrap().unwrap().unwrap();
    let refused = |one: &BlockOutcome| matches!(one, BlockOutcome::Refused(Reason::Quota { .. }));
    assert!(reply.outcomes.iter().all(refused), "{:?}", reply.outcomes);
    stage.world().settle();
    assert_eq!(live(), limit, "the last block fits");
}

#[test]
fn a_run_whose_second_piece_meets_a_failing_disk_is_whole_elsewhere() {
    let mut cut = 0;
    for at in 0..120 {
        let (world, stage) = open(4);
        let desk = Desk::new(&stage, "failing");
        let rule = Rule::new(Which::Kind(OpKind::Write), When::Nth(at + 1), Effect::Errno(EIO));
        world.disk().inject(rule);
        let mut stored = Vec::new();
        for run in 0..6 {
            let outcomes = put(&desk, run, Durability::Durable);
            let whole = outcomes.iter().all(|one| *one == BlockOutcome::Stored);
            let none = outcomes.iter().all(|one| matches!(one, BlockOutcome::Refused(_)));
            assert!(whole || none, "half of a run at write {at}: {outcomes:?}");
            if whole {
                stored.push(run);
            }
        }
        cut += u64::from(stored.len() == 6);
        for run in stored {
            desk.expect(pages(), &desk.keys(run * RUN..(run + 1) * RUN), 1);
        }
        stage.audit();
    }
    assert!(cut > 0);
}

#[test]
fn a_store_with_room_for_one_segment_stores_run_after_run() {
    let smallest = (0..400).find_map(|n| {
        let options = Options { budget_bytes: SEGMENT + n * (16 << 10), ..options() };
        let world = SimWorld::new(5, &WorldConfig::default());
        SimStage::open(&world, &options).ok().map(|stage| (world, stage))
    });
    let (_world, stage) = smallest.expect("some budget is enough");
    let desk = Desk::new(&stage, "floor");
    for run in 0..40 {
        for durability in [Durability::Durable, Durability::Relaxed] {
            let run = 2 * run + u64::from(durability == Durability::Relaxed);
            assert_eq!(put(&desk, run, durability), vec![BlockOutcome::Stored; RUN as usize], "run {run}");
            stage.audit();
        }
    }
    stage.audit_all();
}
