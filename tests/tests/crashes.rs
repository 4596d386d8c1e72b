//! Power cuts and device faults in the simulation: acknowledged blocks are there, blocks that were not acknowledged are
//! whole or absent, and no byte is served that was never put.
//!
//! `KVARTS_SEEDS=n` runs n seeds of each instead of what `kvarts_tests::depth` says; a failure prints its seed.

use std::cell::RefCell;
use std::time::Duration;

use kvarts_contract::error::Reason;
use kvarts_fsck::check::Level;
use kvarts_fsck::store::CannotRun;
use kvarts_store::engine::{Limits, Options, Store};
use kvarts_tests::campaign::{Driven, Judge, Ledger, defects, drive, read_all, reopen, verify, work};
use kvarts_tests::depth::{depth, seeds};
use kvarts_tests::sim::media::errno::{EAGAIN, EINTR, EIO, ENOSPC};
use kvarts_tests::sim::{Crash, CrashState, Effect, OpKind, Rule, Seed, SimWorld, When, Which, WorldConfig};
use kvarts_tests::witness::{directories, examine, media, problems};

fn config(seed: Seed) -> WorldConfig {
    let mut rng = seed.child("config").rng();
    let step_cost = if rng.coin() { Duration::from_micros(rng.between(1, 40)) } else { Duration::ZERO };
    WorldConfig { step_cost, ..WorldConfig::default() }
}

fn options(seed: Seed) -> Options {
    let mut rng = seed.child("options").rng();
    Options {
        shards_per_directory: 1 + rng.below(2) as u32,
        segment_bytes: [64 << 10, 256 << 10][rng.index(2)],
        budget_bytes: 48 << 20,
        executors: 1 + rng.index(2),
        limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
        ..Options::default()
    }
}

/// A workload on a new disk up to some operation of the disk, and what there is then.
struct Run {
    ledger: Ledger,
    state: CrashState,
    /// It came to its end.
    done: bool,
    operations: u64,
    struck: u64,
}

fn run(seed: Seed, ops: usize, cut: u64, rules: &[Rule]) -> Run {
    let world = SimWorld::new(seed.0, &config(seed));
    rules.iter().for_each(|rule| world.disk().inject(*rule));
    let (launcher, options) = (world.launcher(), options(seed));
    let ledger = RefCell::new(Ledger::default());
    let mut rng = seed.child("work").rng();
    let whole = async {
        match Store::open(&launcher, &options).await {
            Ok((store, _executors)) => {
                work(&store, &ledger, &mut rng, ops).await;
                if store.stats().counts.blocks_evicted > 0 {
                    let found = read_all(&store).await;
                    ledger.borrow_mut().allow_evictions(&found);
                }
                // The clean stop is part of what is cut.
                if let Err(error) = store.close().await {
                    ledger.borrow_mut().refusals.push(error.0);
                }
            }
            Err(error) => ledger.borrow_mut().refusals.push(error.0),
        }
    };
    let done = matches!(drive(&world, cut, whole), Driven::Done(()));
    let (operations, struck) = (world.disk().operations().1, world.disk().struck());
    Run { ledger: ledger.into_inner(), state: world.cut_power(), done, operations, struck }
}

/// Ways to lose changes that were not durable: the extremes, and some of the others.
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

/// Checks one image; goes on from it, cuts again, and cuts its recovery, as deep as `depth`.
fn check(seed: Seed, settings: Seed, image: kvarts_tests::sim::Media, ledger: &Ledger, depth: u32) -> u64 {
    let (config, options) = (config(settings), options(settings));
    let checked = verify(seed, &config, &options, image.clone(), (ledger, Judge::Strict));
    let (opened, found, operations) = checked.unwrap_or_else(|why| panic!("seed {}: {why}", settings.0));
    if depth == 0 {
        return 1;
    }
    let mut rng = seed.child("deeper").rng();
    let mut images = 1;
    // The power fails again while the store recovers.
    let world = SimWorld::with_media(seed.child("recovering").0, &config, image);
    let launcher = world.launcher();
    let cut = rng.between(1, operations.max(1));
    let _ = drive(&world, cut, Store::open(&launcher, &options));
    let state = world.cut_power();
    for crash in crashes(&state, seed, 1) {
        images += check(seed.child("in recovery"), settings, state.image(crash), ledger, 0);
    }
    // It recovers, works on, and fails again.
    let mut next = ledger.clone();
    next.adopt(&found, false);
    let ledger = RefCell::new(next);
    let cut = opened.world.disk().operations().1 + rng.between(1, 60);
    let worked = drive(&opened.world, cut, work(&opened.store, &ledger, &mut rng, 10));
    assert!(!matches!(worked, Driven::Hung(_)), "seed {}: {worked:?}", settings.0);
    let state = opened.world.cut_power();
    let ledger = ledger.into_inner();
    for crash in crashes(&state, seed, 1) {
        images += check(seed.child("again"), settings, state.image(crash), &ledger, depth - 1);
    }
    images
}

#[test]
fn a_power_cut_at_every_operation_of_a_short_workload_loses_nothing_acknowledged() {
    let (mut images, mut deletes) = (0, 0);
    for seed in (0..seeds(3, 3)).map(Seed) {
        let whole = run(seed, 6, u64::MAX, &[]);
        deletes += whole.ledger.deletes;
        assert!(whole.done, "seed {}", seed.0);
        assert_eq!(defects(&whole.ledger), Vec::<&_>::new(), "seed {}", seed.0);
        // Before each change every second one, of the next seed the others: R1 cuts at all of them.
        for cut in (1 + seed.0 % depth(2, 1)..=whole.operations).step_by(depth(2, 1)) {
            let run = run(seed, 6, cut, &[]);
            for (n, crash) in (0..).zip(crashes(&run.state, seed.nth(cut), 3)) {
                let image = run.state.image(crash);
                let depth = u32::from(cut % 16 == 0 && n == 2);
                let seed_of = seed.nth(cut).nth(n);
                let note = format!("seed {}, cut {cut}, {crash:?}", seed.0);
                images += noted(&note, || check(seed_of, seed, image, &run.ledger, depth));
            }
        }
    }
    println!("{images} images, {deletes} deletes");
    assert!(deletes > 0, "no delete was cut");
    assert!(images > depth(50, 100), "too few cuts to mean anything: {images}");
}

/// Says what was being done when a check panics.
fn noted<T>(note: &str, what: impl FnOnce() -> T) -> T {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(what)).unwrap_or_else(|panic| {
        eprintln!("{note}");
        std::panic::resume_unwind(panic)
    })
}

#[test]
fn power_cuts_at_random_operations_of_longer_workloads_lose_nothing_acknowledged() {
    for seed in (1000..1000 + seeds(4, 25)).map(Seed) {
        let mut rng = seed.child("cuts").rng();
        let whole = run(seed, 40, u64::MAX, &[]);
        assert!(whole.done, "seed {}", seed.0);
        for _ in 0..3 {
            let cut = rng.between(1, whole.operations);
            let run = run(seed, 40, cut, &[]);
            for crash in crashes(&run.state, seed.nth(cut), 2) {
                let note = format!("seed {}, cut {cut}, {crash:?}", seed.0);
                noted(&note, || check(seed.nth(cut), seed, run.state.image(crash), &run.ledger, 1));
            }
        }
    }
}

/// Lets the `n`th operation of a kind go wrong, for n = 1.. until none is struck any more.
fn every_nth(which: Which, effect: Effect, persistent: bool, judge: Judge) {
    let mut struck = 0;
    for seed in (2000..2000 + seeds(1, 2)).map(Seed) {
        let mut n = 1;
        loop {
            let when = if persistent { When::From(n) } else { When::Nth(n) };
            let run = run(seed, 8, u64::MAX, &[Rule::new(which, when, effect)]);
            let note = format!("seed {}: {which:?} {n} {effect:?}, persistent {persistent}", seed.0);
            if run.struck == 0 {
                break;
            }
            struck += 1;
            assert!(run.done || effect == Effect::Stuck, "{note}: it hangs");
            assert_eq!(defects(&run.ledger), Vec::<&_>::new(), "{note}");
            for crash in crashes(&run.state, seed.nth(n), 1) {
                let image = run.state.image(crash);
                let (config, options) = (config(seed), options(seed));
                let checked = verify(seed.nth(n), &config, &options, image, (&run.ledger, judge));
                let why = checked.err().unwrap_or_default();
                // A disk that lied about a superblock leaves a store that says so and serves nothing.
                let refused = judge == Judge::BytesOnly && why.starts_with("it does not open");
                assert!(why.is_empty() || refused, "{note}, {crash:?}: {why}");
            }
            // The first ones are those of opening; later ones are much like each other.
            n += if n < 12 { 1 } else { 5 };
        }
    }
    assert!(struck > 0, "{which:?} was never struck");
}

#[test]
fn a_write_that_fails_is_not_acknowledged() {
    for persistent in [false, true] {
        every_nth(Which::Kind(OpKind::Write), Effect::Errno(EIO), persistent, Judge::Strict);
        every_nth(Which::Kind(OpKind::Write), Effect::Torn(EIO), persistent, Judge::Strict);
    }
}

#[test]
fn a_write_that_is_interrupted_or_ends_short_is_finished_or_not_acknowledged() {
    for effect in [Effect::Errno(EINTR), Effect::Errno(EAGAIN), Effect::Short, Effect::Zero, Effect::Twice] {
        every_nth(Which::Kind(OpKind::Write), effect, false, Judge::Strict);
    }
}

#[test]
fn a_store_takes_puts_after_any_write_was_interrupted_a_checkpoint_among_them() {
    for errno in [EINTR, EAGAIN] {
        let mut n = 1;
        loop {
            let rule = Rule::new(Which::Kind(OpKind::Write), When::Nth(n), Effect::Errno(errno));
            let run = run(Seed(2000), 8, u64::MAX, &[rule]);
            if run.struck == 0 {
                break;
            }
            let latched = run.ledger.refusals.iter().find(|reason| matches!(reason, Reason::Latched(_)));
            assert!(latched.is_none(), "write {n}, errno {errno}: {latched:?}");
            n += 1;
        }
        assert!(n > 1, "no write was struck");
    }
}

#[test]
fn a_flush_that_fails_acknowledges_nothing_even_if_the_next_succeeds() {
    for persistent in [false, true] {
        every_nth(Which::Kind(OpKind::Flush), Effect::Errno(EIO), persistent, Judge::Strict);
        every_nth(Which::Kind(OpKind::Flush), Effect::DropDirty, persistent, Judge::Strict);
    }
}

#[test]
fn reads_opens_and_directory_changes_that_fail_lose_nothing() {
    let kinds = [OpKind::Read, OpKind::Open, OpKind::SyncDir, OpKind::MakeDir, OpKind::List, OpKind::Stat];
    for which in kinds.map(Which::Kind) {
        // Some kinds are asked once at most, or never: what matters is every one that is.
        let asked = run(Seed(2000), 8, u64::MAX, &[Rule::new(which, When::Nth(1), Effect::Errno(EIO))]);
        for persistent in [false, true] {
            if asked.struck > 0 {
                every_nth(which, Effect::Errno(EIO), persistent, Judge::Strict);
            }
        }
    }
}

#[test]
fn a_full_disk_refuses_and_keeps_what_it_has() {
    for which in [Which::Allocating, Which::Kind(OpKind::Allocate)] {
        for persistent in [false, true] {
            every_nth(which, Effect::Errno(ENOSPC), persistent, Judge::Strict);
        }
    }
}

#[test]
fn an_operation_that_never_ends_costs_nothing_that_was_acknowledged() {
    for kind in [OpKind::Write, OpKind::Flush, OpKind::Read] {
        let asked = Rule::new(Which::Kind(kind), When::Nth(1), Effect::Stuck);
        if run(Seed(2000), 8, u64::MAX, &[asked]).struck > 0 {
            every_nth(Which::Kind(kind), Effect::Stuck, false, Judge::Strict);
        }
    }
}

#[test]
fn writes_that_the_disk_loses_or_misdirects_and_bits_that_flip_never_become_other_bytes() {
    for effect in [Effect::Lost, Effect::Misdirect, Effect::FlipBit] {
        every_nth(Which::Kind(OpKind::Write), effect, false, Judge::BytesOnly);
    }
}

/// Directories of a store are devices of their own: the power may fail while some have a superblock and others none.
#[test]
fn a_store_of_several_directories_whose_making_was_cut_is_finished() {
    let mut config = WorldConfig::default();
    config.disk.dirs = 3;
    let options = Options { directories: 3, ..options(Seed(1)) };
    let (mut between, mut images) = (0, 0);
    for cut in 1.. {
        let world = SimWorld::new(1, &config);
        let launcher = world.launcher();
        let opened = drive(&world, cut, Store::open(&launcher, &options));
        let state = world.cut_power();
        for crash in
            [Crash::LoseAll, Crash::KeepAll, Crash::Lagging(0), Crash::Lagging(2), Crash::Random(cut)]
        {
            let image = state.image(crash);
            let note = format!("cut {cut}, {crash:?}");
            let made = image.paths().iter().filter(|path| path.ends_with("/superblock")).count();
            between += u64::from((1..3).contains(&made));
            images += 1;
            match examine(&directories(&image), Level::Full) {
                Ok(checked) => assert!(checked.findings.is_clean(), "{note}: {}", problems(&checked)),
                Err(CannotRun::NoStore(_)) => assert_eq!(made, 0, "{note}"),
                Err(other) => panic!("{note}: {other}"),
            }
            let opened =
                reopen(Seed(cut), &config, &options, image).unwrap_or_else(|why| panic!("{note}: {why}"));
            assert_eq!(opened.store.recovery().len(), 3 * options.shards_per_directory as usize, "{note}");
        }
        if matches!(opened, Driven::Done(_)) {
            break;
        }
    }
    assert!(between > 10 && images > 60, "{images} images, {between} with some superblocks");
}

#[test]
fn a_directory_that_lost_everything_is_not_made_anew_beside_one_that_was_in_use() {
    let mut config = WorldConfig::default();
    config.disk.dirs = 2;
    let options = Options { directories: 2, ..options(Seed(1)) };
    let world = SimWorld::new(1, &config);
    let launcher = world.launcher();
    assert!(matches!(drive(&world, u64::MAX, Store::open(&launcher, &options)), Driven::Done(Ok(_))));
    let mut disks = directories(&world.cut_power().image(Crash::KeepAll));
    disks[1] = kvarts_fsck::disk::MemoryDisk::default();
    let opened = reopen(Seed(2), &config, &options, media(&disks)).unwrap();
    let out = opened.store.health().out;
    assert!(out[&1].contains("directory 1 is empty, but other directories have a store"), "{out:?}");
    assert!(directories(&opened.world.kill()).get(1).is_none_or(|disk| disk.files().is_empty()));
}
