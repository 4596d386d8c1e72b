//! Compaction under puts and reads, with the power cut at its operations and with failing devices: nothing that was
//! acknowledged is lost, no block is half there, and no byte is served that was never put.
//!
//! `KVARTS_SEEDS=n` runs n seeds of each instead of what `kvarts_tests::depth` says; a failure prints its seed.

use std::cell::RefCell;
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteRequest, KvStore, Parent, Presence, PutRequest, Target,
};
use kvarts_fsck::check::Level;
use kvarts_fsck::store::CannotRun;
use kvarts_store::engine::{CompactOptions, Limits, Options, Store};
use kvarts_tests::campaign::{
    Driven, Judge, Ledger, defects, drive, read_all, reopen, verify, work_compacting,
};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::depth::{depth, seeds};
use kvarts_tests::fixture;
use kvarts_tests::sim::media::errno::EIO;
use kvarts_tests::sim::{
    Crash, CrashState, Effect, Media, OpKind, Rule, Seed, SimWorld, When, Which, WorldConfig,
};
use kvarts_tests::stage::{SimStage, Stage, ask};
use kvarts_tests::witness::{directories, examine, problems};

fn config(seed: Seed) -> WorldConfig {
    let mut rng = seed.child("config").rng();
    let step_cost = if rng.coin() { Duration::from_micros(rng.between(1, 40)) } else { Duration::ZERO };
    WorldConfig { step_cost, ..WorldConfig::default() }
}

fn options(seed: Seed) -> Options {
    let mut rng = seed.child("options").rng();
    Options {
        shards_per_directory: 1 + rng.below(3) as u32,
        segment_bytes: 64 << 10,
        // Small enough that some seeds fill it.
        budget_bytes: [768 << 10, 1 << 20, 48 << 20][rng.index(3)],
        executors: 1 + rng.index(2),
        limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
        ..Options::default()
    }
}

struct Run {
    ledger: Ledger,
    state: CrashState,
    done: bool,
    operations: u64,
    struck: u64,
    /// Blocks had been evicted: the ledger cannot know which.
    evicted: bool,
    /// Segments that were rewritten.
    recycled: u64,
}

fn run(seed: Seed, ops: usize, cut: u64, rules: &[Rule]) -> Run {
    let world = SimWorld::new(seed.0, &config(seed));
    rules.iter().for_each(|rule| world.disk().inject(*rule));
    let (launcher, options) = (world.launcher(), options(seed));
    let ledger = RefCell::new(Ledger::default());
    let mut rng = seed.child("work").rng();
    let opened = RefCell::new(None::<Store>);
    let whole = async {
        match Store::open(&launcher, &options).await {
            Ok((store, _executors)) => {
                *opened.borrow_mut() = Some(store.clone());
                work_compacting(&store, &ledger, &mut rng, ops).await;
                let found = read_all(&store).await;
                if store.stats().counts.blocks_evicted > 0 {
                    ledger.borrow_mut().allow_evictions(&found);
                }
                let violation = ledger.borrow().violation(&found, Judge::Strict);
                if rules.is_empty() {
                    assert_eq!(violation, None, "seed {}: while the store was open", seed.0);
                }
                if let Err(error) = store.close().await {
                    ledger.borrow_mut().refusals.push(error.0);
                }
            }
            Err(error) => ledger.borrow_mut().refusals.push(error.0),
        }
    };
    let driven = drive(&world, cut, whole);
    let done = matches!(driven, Driven::Done(()));
    if let Driven::Hung(hang) = driven {
        panic!("seed {}: it hangs: {hang}", seed.0);
    }
    let (operations, struck) = (world.disk().operations().1, world.disk().struck());
    let counts = opened.take().map(|store| store.stats().counts).unwrap_or_default();
    let (evicted, recycled) = (counts.blocks_evicted > 0 && !done, counts.segments_recycled);
    let ledger = ledger.into_inner();
    Run { ledger, state: world.cut_power(), done, operations, struck, evicted, recycled }
}

fn crashes(state: &CrashState, seed: Seed, some: usize) -> Vec<Crash> {
    let mut all = state.enumerate(some, seed);
    let mut rng = seed.child("pick").rng();
    let mut chosen = vec![Crash::LoseAll, Crash::KeepAll];
    for _ in 0..some {
        if !all.is_empty() {
            chosen.push(all.swap_remove(rng.index(all.len())));
        }
    }
    chosen
}

/// What the checker says of it: nothing that is a problem, encoded records included.
fn witness(note: &str, image: &Media) {
    match examine(&directories(image), Level::Full) {
        Ok(checked) => {
            assert!(checked.findings.is_clean(), "{note}: {}", problems(&checked));
            let skipped = checked.findings.counts.contains_key("unknown-encoding");
            assert!(!skipped, "{note}: a record that the checker does not verify");
        }
        Err(CannotRun::NoStore(_)) => {}
        Err(other) => panic!("{note}: {other}"),
    }
}

fn check(note: &str, seed: Seed, run: &Run, some: usize) -> u64 {
    let mut images = 0;
    for crash in crashes(&run.state, seed, some) {
        let image = run.state.image(crash);
        let judge = if run.evicted { Judge::BytesOnly } else { Judge::Strict };
        let checked = verify(seed, &config(seed), &options(seed), image, (&run.ledger, judge));
        if let Err(why) = checked {
            panic!("{note}, {crash:?}: {why}");
        }
        // A failing disk may leave what looks like damage; a power cut may not.
        if run.struck == 0 {
            witness(&format!("{note}, {crash:?}"), &run.state.image(crash));
        }
        images += 1;
    }
    images
}

#[test]
fn a_power_cut_at_every_operation_under_compaction_loses_nothing_acknowledged() {
    let (mut images, mut moved, mut merged, mut encoded, mut recycled) = (0, 0, 0, 0, 0);
    for seed in (0..seeds(3, 3)).map(Seed) {
        let whole = run(seed, 24, u64::MAX, &[]);
        assert!(whole.done, "seed {}", seed.0);
        assert_eq!(defects(&whole.ledger), Vec::<&_>::new(), "seed {}", seed.0);
        moved += whole.ledger.moved;
        merged += whole.ledger.merged;
        encoded += whole.ledger.encoded;
        recycled += whole.recycled;
        // Before each change every third one, of the next seed others: R22 is about the same.
        for cut in (1 + seed.0 % depth(3, 1)..=whole.operations).step_by(depth(3, 1)) {
            let cut_there = run(seed, 24, cut, &[]);
            images += check(&format!("seed {}, cut {cut}", seed.0), seed, &cut_there, 1);
        }
    }
    let done = format!("{moved} blocks moved, {merged} records merged, {encoded} encoded");
    println!("{images} images, {done}, {recycled} segments recycled");
    assert!(images > depth(100, 300) && moved > 20 && merged >= 4 && encoded >= 4, "{images} images, {done}");
}

#[test]
fn power_cuts_at_random_operations_of_long_compacting_workloads_lose_nothing_acknowledged() {
    let mut encoded = 0;
    for seed in (1000..1000 + seeds(6, 6)).map(Seed) {
        let mut rng = seed.child("cuts").rng();
        let whole = run(seed, 70, u64::MAX, &[]);
        assert!(whole.done, "seed {}", seed.0);
        for _ in 0..depth(1, 3) {
            let cut = rng.between(1, whole.operations);
            check(&format!("seed {}, cut {cut}", seed.0), seed, &run(seed, 70, cut, &[]), 2);
        }
        encoded += whole.ledger.encoded;
    }
    println!("{encoded} records encoded");
    assert!(encoded > 10, "{encoded} records encoded");
}

#[test]
fn writes_flushes_and_reads_that_fail_under_compaction_lose_nothing_acknowledged() {
    let mut struck = 0;
    for kind in [OpKind::Write, OpKind::Flush, OpKind::Read] {
        for seed in (2000..2000 + seeds(1, 2)).map(Seed) {
            for n in (1..40).step_by(5) {
                let rule = Rule::new(Which::Kind(kind), When::Nth(n), Effect::Errno(EIO));
                let failed = run(seed, 30, u64::MAX, &[rule]);
                struck += failed.struck;
                let note = format!("seed {}: {kind:?} {n}", seed.0);
                assert!(failed.done, "{note}: it hangs");
                assert_eq!(defects(&failed.ledger), Vec::<&_>::new(), "{note}");
                check(&note, seed, &failed, 1);
            }
        }
    }
    assert!(struck > depth(5, 10), "only {struck} operations failed");
}

/// Every shard takes part in the merge, and each of them has said its epoch when the delete is answered: a copy that is
/// made afterwards would be a resurrection, seen at the latest by the next start.
#[test]
fn a_namespace_that_is_deleted_at_any_moment_of_a_merge_over_shards_stays_deleted() {
    let options = Options {
        shards_per_directory: 3,
        segment_bytes: 256 << 10,
        budget_bytes: 48 << 20,
        executors: 2,
        limits: Limits { arena_bytes: 4 << 20, ..Limits::default() },
        ..Options::default()
    };
    let (mut merged, mut gone) = (0, 0);
    for moment in (0..500).step_by(depth(15, 5)) {
        let (world, note) = (SimWorld::new(17, &WorldConfig::default()), format!("after {moment} steps"));
        let stage = SimStage::open(&world, &options).unwrap();
        let desk = Desk::new(&stage, "merged and deleted");
        let keys = desk.keys(0..9);
        for n in 0..9 {
            let parent = if n == 0 { Parent::Root } else { Parent::Key(keys[n - 1]) };
            let put = PutRequest { parent, first_block: None, ..desk.request(pages(), &keys[n..=n], 1) };
            assert_eq!(desk.outcomes(put), [BlockOutcome::Stored]);
        }
        let deleting = std::cell::RefCell::new(None);
        let (namespace, store) = (desk.namespace, stage.engine());
        let options_of =
            CompactOptions { merge_records_min: 2, dead_thousandths: 1000, ..CompactOptions::default() };
        let mut compacting = std::pin::pin!(store.compact(options_of));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let (mut steps, mut report) = (0, None);
        stage.wait(&mut || {
            steps += 1;
            if steps > moment && deleting.borrow().is_none() {
                let request = DeleteRequest { namespace, target: Target::Namespace, deadline: None };
                *deleting.borrow_mut() = Some(store.delete(request));
            }
            if report.is_none()
                && let std::task::Poll::Ready(done) = compacting.as_mut().poll(&mut context)
            {
                report = Some(done);
            }
            report.is_some() && steps > moment
        });
        let deleted = ask(&stage, deleting.take().expect("asked for by now"));
        assert!(deleted.is_ok(), "{note}: {deleted:?}");
        let report = report.unwrap().unwrap_or_default();
        merged += report.records_merged;
        gone += report.blocks_gone;
        let (group, coordinate) = pages();
        let contains = ContainsRequest { namespace, group, coordinate, keys: &keys, lease: None };
        let found = stage.store().contains(&contains).unwrap().presence;
        assert!(found.iter().all(|one| *one == Presence::Absent), "{note}: {found:?}");
        let state = world.cut_power();
        for crash in [Crash::LoseAll, Crash::KeepAll] {
            let image = state.image(crash);
            let opened = reopen(Seed(17), &WorldConfig::default(), &options, image).unwrap();
            let store = &opened.store;
            store.register(&fixture::identity("merged and deleted"), &fixture::geometry()).unwrap();
            let found = store.contains(&contains).unwrap().presence;
            assert!(found.iter().all(|one| *one == Presence::Absent), "{note}, {crash:?}: {found:?}");
        }
    }
    println!("{merged} records merged, {gone} blocks gone on the way");
    assert!(
        merged > depth(17, 50) && gone > depth(6, 20),
        "{merged} records merged, {gone} blocks gone on the way"
    );
}
