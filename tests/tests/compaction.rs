//! Compaction under puts and reads, with the power cut at its operations and with failing devices: nothing that was
//! acknowledged is lost, nothing is half there, and no byte is served that nobody put.
//!
//! `KVARTS_SEEDS=n` runs n seeds of each instead of the few that every build runs; a failure prints its seed.

use std::cell::RefCell;
use std::time::Duration;

use kvarts_store::engine::{Limits, Options, Store};
use kvarts_tests::campaign::{Driven, Judge, Ledger, defects, drive, read_all, verify, work_compacting};
use kvarts_tests::sim::media::errno::EIO;
use kvarts_tests::sim::{Crash, CrashState, Effect, OpKind, Rule, Seed, SimWorld, When, Which, WorldConfig};

fn seeds(few: u64) -> u64 {
    std::env::var("KVARTS_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(few)
}

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
    /// Segments that were written anew.
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

fn check(note: &str, seed: Seed, run: &Run, some: usize) -> u64 {
    let mut images = 0;
    for crash in crashes(&run.state, seed, some) {
        let image = run.state.image(crash);
        let judge = if run.evicted { Judge::BytesOnly } else { Judge::Strict };
        let checked = verify(seed, &config(seed), &options(seed), image, (&run.ledger, judge));
        if let Err(why) = checked {
            panic!("{note}, {crash:?}: {why}");
        }
        images += 1;
    }
    images
}

#[test]
fn a_power_cut_at_every_operation_under_compaction_loses_nothing_acknowledged() {
    let (mut images, mut moved, mut merged, mut recycled) = (0, 0, 0, 0);
    for seed in (0..seeds(3)).map(Seed) {
        let whole = run(seed, 24, u64::MAX, &[]);
        assert!(whole.done, "seed {}", seed.0);
        assert_eq!(defects(&whole.ledger), Vec::<&_>::new(), "seed {}", seed.0);
        moved += whole.ledger.moved;
        merged += whole.ledger.merged;
        recycled += whole.recycled;
        for cut in 1..=whole.operations {
            let cut_there = run(seed, 24, cut, &[]);
            images += check(&format!("seed {}, cut {cut}", seed.0), seed, &cut_there, 1);
        }
    }
    println!("{images} images, {moved} blocks moved, {merged} records merged, {recycled} segments recycled");
    assert!(images > 300 && moved > 20 && merged > 4, "{images} images, {moved} moved, {merged} merged");
}

#[test]
fn power_cuts_at_random_operations_of_long_compacting_workloads_lose_nothing_acknowledged() {
    for seed in (1000..1000 + seeds(6)).map(Seed) {
        let mut rng = seed.child("cuts").rng();
        let whole = run(seed, 70, u64::MAX, &[]);
        assert!(whole.done, "seed {}", seed.0);
        for _ in 0..3 {
            let cut = rng.between(1, whole.operations);
            check(&format!("seed {}, cut {cut}", seed.0), seed, &run(seed, 70, cut, &[]), 2);
        }
    }
}

#[test]
fn writes_flushes_and_reads_that_fail_under_compaction_lose_nothing_acknowledged() {
    let mut struck = 0;
    for kind in [OpKind::Write, OpKind::Flush, OpKind::Read] {
        for seed in (2000..2000 + seeds(2)).map(Seed) {
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
    assert!(struck > 10, "only {struck} operations failed");
}
