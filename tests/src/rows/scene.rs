//! What a seed stands for: a world, a store's options, a workload; and running it, with every moment kept if asked.
//!
//! A scene has one to three directories, each a device of its own, of which one may lag behind the others; a budget that
//! is ample, or so small that segments are recycled and blocks evicted; in every second seed batches of a few items, so that
//! checkpoints, recoveries and deletes go over several; and a workload with or without compaction and leases. All of them follow from the seed, so a seed alone repeats a run.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::time::Duration;

use kvarts_contract::io_error::DirId;
use kvarts_store::engine::{Batches, Limits, Options, Store};

use crate::campaign::{Budgets, Driven, Ledger, Mix, Work, aftermath, defects, observe, work_on};
use crate::sim::{CrashState, DiskConfig, Effect, Hang, Rule, Seed, SimWorld, When, Which, WorldConfig};

/// The world of a seed.
pub(super) fn config(seed: Seed) -> WorldConfig {
    let mut rng = seed.child("config").rng();
    let step_cost = if rng.coin() { Duration::from_micros(rng.between(1, 40)) } else { Duration::ZERO };
    let disk = DiskConfig { dirs: directories(seed), ..DiskConfig::default() };
    WorldConfig { step_cost, disk, ..WorldConfig::default() }
}

/// Directories of a seed's store: one in every second, two or three in the others.
pub(super) fn directories(seed: Seed) -> u16 {
    [1, 1, 2, 3][seed.child("directories").rng().index(4)]
}

/// The store of a seed that [has a past](has_past), or any other one's.
pub(super) fn options_with_past(seed: Seed) -> Options {
    let options = options(seed);
    if !has_past(seed) {
        return options;
    }
    let options = Options { segment_bytes: 64 << 10, ..options };
    Options { budget_bytes: least(&options), ..options }
}

/// The least budget that all shards of a store can live with, and write checkpoints of what they hold.
fn least(options: &Options) -> u64 {
    let shards = u64::from(options.shards_per_directory) * u64::from(options.directories);
    (4 + 3 * shards) * options.segment_bytes + chunk_pages(options)
}

/// What a budget needs beside its segments where chunks of checkpoints have a few items only: each has a page of its own, in
/// both files.
pub(super) fn chunk_pages(options: &Options) -> u64 {
    let items = options.limits.batches.checkpoint_items as u64;
    if items > 1000 {
        return 0;
    }
    let shards = u64::from(options.shards_per_directory) * u64::from(options.directories);
    // Records have two pages at least.
    let records = 64 + shards * options.segment_bytes / 8192;
    records * (80 + 8192 / items)
}

/// How much is done at a time: in every second seed so little that most of what a store does takes several batches.
pub(super) fn batches(seed: Seed) -> Batches {
    let mut rng = seed.child("batches").rng();
    if rng.coin() {
        return Batches::default();
    }
    let mut few = || rng.between(2, 6) as usize;
    Batches {
        checkpoint_items: few(),
        checkpoint_tombstones: few(),
        recovered_blocks: few(),
        tombstones: 4 * few(),
        removed_together: few() as u32,
        hole_rounds: few() as u32,
    }
}

/// The store of a seed. In every third the budget is so small that segments are recycled.
pub(super) fn options(seed: Seed) -> Options {
    let mut rng = seed.child("options").rng();
    let directories = directories(seed);
    let shards_per_directory = 1 + rng.below(2) as u32;
    let segment_bytes = [64 << 10, 256 << 10][rng.index(2)];
    let is_tight = rng.below(3) == 0;
    let options = Options {
        directories,
        shards_per_directory,
        segment_bytes,
        budget_bytes: 48 << 20,
        executors: 1 + rng.index(2),
        limits: Limits { arena_bytes: 2 << 20, batches: batches(seed), ..Limits::default() },
        ..Options::default()
    };
    if is_tight { Options { budget_bytes: least(&options), ..options } } else { options }
}

/// Whether a seed's store has a past: many operations in small segments under a tight budget, before those that are
/// looked at. Only then are segments sealed beside relaxed puts, emptied, rewritten and removed.
pub(super) fn has_past(seed: Seed) -> bool {
    seed.0 % 4 == 3
}

/// Between which budgets the store of a seed is moved while it is used, if it is, in every third: from the least that its
/// shards can live with up to the one that it was opened with, or where that is the least, up to twice as much.
pub(super) fn budgets(seed: Seed, options: &Options) -> Option<Budgets> {
    let seed = seed.child("budgets");
    let least = least(options);
    let most = if options.budget_bytes > least { options.budget_bytes } else { 2 * least };
    (seed.rng().below(3) == 0).then_some(Budgets { least, most, seed })
}

/// What the workload of a seed consists of.
pub(super) fn mix(seed: Seed) -> Mix {
    Mix::ALL[seed.child("mix").rng().index(Mix::ALL.len())]
}

/// The device that lags behind, if one does: everything takes it this much longer.
fn lagging(seed: Seed) -> Option<Rule> {
    let mut rng = seed.child("lagging").rng();
    let directories = directories(seed);
    let delay = Effect::Delay(Duration::from_micros(rng.between(500, 20_000)));
    let rule =
        Rule::new(Which::Any, When::From(1), delay).on(DirId(rng.below(u64::from(directories)) as u16));
    (directories > 1 && rng.coin()).then_some(rule)
}

/// A moment of a workload: what the disk may become if the power fails now, and what was promised.
#[derive(Debug)]
pub(super) struct Moment {
    pub(super) state: CrashState,
    pub(super) ledger: Ledger,
}

/// How far a workload came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    Opening,
    Working,
    Closing,
}

/// What came of a workload.
#[derive(Debug)]
pub(super) struct Ran {
    /// One for each operation that the disk completed.
    pub(super) moments: Vec<Moment>,
    /// The end.
    pub(super) last: Moment,
    /// Why it did not come to its end, if so.
    pub(super) hang: Option<Hang>,
    /// Operations that rules of the caller struck.
    pub(super) struck: u64,
    /// What was left of trouble that had ended, if anything.
    pub(super) left: Option<String>,
    /// How far it came.
    pub(super) stage: Stage,
    /// Files in which a rule changed what was written, or kept it from being written.
    pub(super) files: BTreeSet<String>,
    /// Segments that were rewritten.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests ask whether seeds reach what they are for"))]
    pub(super) recycled: u64,
    /// Blocks that made room for others.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests ask whether seeds reach what they are for"))]
    pub(super) evicted: u64,
}

/// A workload on a new disk; every moment is kept if asked.
#[cfg(test)]
pub(super) fn run(seed: Seed, ops: usize, rules: &[Rule], keep: bool) -> Ran {
    run_work(seed, Work::new(ops, mix(seed)), rules, keep)
}

/// The same with any workload.
pub(super) fn run_work(seed: Seed, work: Work, rules: &[Rule], keep: bool) -> Ran {
    run_on(seed, &options(seed), work, rules, if keep { 0 } else { usize::MAX })
}

/// The same on any store; every moment from this operation on is kept, and those of stopping.
pub(super) fn run_on(seed: Seed, options: &Options, work: Work, rules: &[Rule], keep_from: usize) -> Ran {
    let world = SimWorld::new(seed.0, &config(seed));
    rules.iter().for_each(|rule| world.disk().inject(*rule));
    // The caller's rules come first: of two that strike, the first one wins.
    let lagging = lagging(seed);
    lagging.into_iter().for_each(|rule| world.disk().inject(rule));
    let launcher = world.launcher();
    let ledger = RefCell::new(Ledger::default());
    let opened: RefCell<Option<Store>> = RefCell::default();
    let counts = RefCell::new((0, 0));
    let stage = Cell::new(Stage::Opening);
    let (left, early) = (RefCell::new(None), Cell::new(0));
    let mut rng = seed.child("work").rng();
    let whole = async {
        match Store::open(&launcher, options).await {
            Ok((store, _executors)) => {
                opened.replace(Some(store.clone()));
                stage.set(Stage::Working);
                work_on(&store, &ledger, &mut rng, work).await;
                if work.passes {
                    early.set(world.disk().struck_by(0..rules.len()));
                    world.disk().heal();
                    left.replace(aftermath(&store, &ledger).await);
                }
                ledger.borrow_mut().allow_evicted_by(&store);
                let done = store.stats().counts;
                counts.replace((done.segments_recycled, done.blocks_evicted));
                stage.set(Stage::Closing);
                // The clean stop is part of what is cut.
                if let Err(error) = store.close().await {
                    ledger.borrow_mut().refusals.push(error.0);
                }
                ledger.borrow_mut().allow_evicted_by(&store);
                opened.take();
            }
            Err(error) => ledger.borrow_mut().refusals.push(error.0),
        }
    };
    let mut moments = Vec::new();
    let mut watch = || {
        // A block that is evicted now may be put again, relaxed, before the row looks: so it looks after every
        // operation.
        if let Some(store) = opened.borrow().as_ref() {
            ledger.borrow_mut().allow_evicted_by(store);
        }
        if ledger.borrow().begun >= keep_from {
            moments.push(Moment { state: world.disk().crash_state(), ledger: ledger.borrow().clone() });
        }
    };
    let driven = observe(&world, u64::MAX, &mut watch, whole);
    let hang = if let Driven::Hung(hang) = driven { Some(hang) } else { None };
    let struck = early.get() + world.disk().struck_by(0..rules.len());
    let files = world.disk().struck_files();
    let last = Moment { state: world.cut_power(), ledger: ledger.into_inner() };
    let (recycled, evicted) = counts.into_inner();
    let (left, stage) = (left.into_inner(), stage.get());
    Ran { moments, last, hang, struck, left, stage, files, recycled, evicted }
}

/// A workload on a sound disk ends, and no caller is told of a defect.
pub(super) fn sound(ran: &Ran) -> Result<(), String> {
    if let Some(hang) = &ran.hang {
        return Err(format!("the workload does not end: {hang}"));
    }
    defects(&ran.last.ledger).first().map_or(Ok(()), |reason| Err(format!("a caller was told: {reason}")))
}
