//! The checker and recovery agree on every image that a power cut may leave: nothing legal is a problem, what recovery
//! calls by a label the checker calls by the same, and after recovery nothing is left to say.

use std::cell::RefCell;

use kvarts_fsck::check::Level;
use kvarts_fsck::store::CannotRun;
use kvarts_store::engine::{Limits, Options, Store};
use kvarts_tests::campaign::{Ledger, drive, reopen, work};
use kvarts_tests::depth::{depth, seeds};
use kvarts_tests::sim::{Crash, CrashState, Media, Seed, SimWorld, WorldConfig};
use kvarts_tests::witness::{
    checkers_rows, directories, examine, problems, recoverys_blocks, recoverys_rows,
};

fn options(seed: Seed) -> Options {
    let mut rng = seed.child("options").rng();
    Options {
        shards_per_directory: 1 + rng.below(2) as u32,
        segment_bytes: [64 << 10, 256 << 10][rng.index(2)],
        budget_bytes: [1 << 20, 48 << 20][rng.index(2)],
        executors: 1 + rng.index(2),
        limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
        ..Options::default()
    }
}

/// A workload up to some operation of the disk; what there is then, and how many operations the whole has.
fn run(seed: Seed, ops: usize, cut: u64) -> (CrashState, u64) {
    let world = SimWorld::new(seed.0, &WorldConfig::default());
    let (launcher, options) = (world.launcher(), options(seed));
    let ledger = RefCell::new(Ledger::default());
    let mut rng = seed.child("work").rng();
    let whole = async {
        if let Ok((store, _executors)) = Store::open(&launcher, &options).await {
            work(&store, &ledger, &mut rng, ops).await;
            let _ = store.close().await;
        }
    };
    let _ = drive(&world, cut, whole);
    let operations = world.disk().operations().1;
    (world.cut_power(), operations)
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

/// Checks one image before and after recovery; false if there is no store in it.
fn agree(seed: Seed, image: Media, note: &str) -> bool {
    let before = match examine(&directories(&image), Level::Deep) {
        Ok(checked) => checked,
        // Nothing was there yet.
        Err(CannotRun::NoStore(_)) => return false,
        Err(other) => panic!("{note}: {other}"),
    };
    assert!(before.findings.is_clean(), "{note}: before recovery\n{}", problems(&before));
    let opened = reopen(seed, &WorldConfig::default(), &options(seed), image).unwrap();
    let reports = opened.store.recovery().to_vec();
    assert_eq!(checkers_rows(&before), recoverys_rows(&reports), "{note}: {reports:?}");
    assert_eq!(before.blocks, recoverys_blocks(&reports), "{note}: blocks\n{before:?}\n{reports:?}");
    let after = examine(&directories(&opened.world.kill()), Level::Deep).unwrap();
    assert!(after.findings.is_clean(), "{note}: after recovery\n{}", problems(&after));
    // A namespace's delete that was under way is finished when the store is opened.
    let finished = reports.iter().any(|report| !report.half_deleted.is_empty());
    let same = after.blocks == before.blocks || finished && after.blocks < before.blocks;
    assert!(
        same,
        "{note}: recovery changed what is there: {} blocks, {} before",
        after.blocks, before.blocks
    );
    true
}

#[test]
fn every_image_of_a_power_cut_is_clean_and_called_what_recovery_calls_it() {
    let mut stores = 0;
    for seed in (0..seeds(1, 4)).map(Seed) {
        let (_, operations) = run(seed, 10, u64::MAX);
        for cut in (1..=operations).step_by(2) {
            let (state, _) = run(seed, 10, cut);
            for crash in crashes(&state, seed.nth(cut), 3) {
                let note = format!("seed {}, cut {cut}, {crash:?}", seed.0);
                stores += u64::from(agree(seed, state.image(crash), &note));
            }
        }
    }
    println!("{stores} images");
    assert!(stores > depth(50, 200), "too few images to mean anything: {stores}");
}

#[test]
fn images_of_long_runs_that_recycle_segments_are_clean_too() {
    let mut labels = std::collections::BTreeMap::<&str, u64>::new();
    for seed in (100..100 + seeds(12, 12)).map(Seed) {
        let (_, operations) = run(seed, 120, u64::MAX);
        let mut rng = seed.child("cuts").rng();
        for _ in 0..6 {
            let cut = rng.between(1, operations);
            let (state, _) = run(seed, 120, cut);
            for (n, crash) in crashes(&state, seed.nth(cut), 3).into_iter().enumerate() {
                let note = format!("seed {}, cut {cut}, {crash:?}", seed.0);
                let image = state.image(crash);
                if let Ok(checked) = examine(&directories(&image), Level::Full) {
                    for (label, times) in checked.findings.counts {
                        *labels.entry(label).or_default() += times;
                    }
                }
                // Before each change one of three: R26 is the same.
                if n % depth(3, 1) == 0 {
                    agree(seed, image, &note);
                }
            }
        }
    }
    println!("{labels:?}");
    for met in ["torn-payload", "hole-before-record", "checkpoint-half-written", "end-of-log-over-old-bytes"]
    {
        assert!(labels.contains_key(met), "{met} was never met: {labels:?}");
    }
}
