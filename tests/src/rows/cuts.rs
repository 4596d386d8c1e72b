//! Power cuts: after every operation of the disk, with lost, torn and reordered changes, also while recovering.

use std::cell::RefCell;
use std::time::Duration;

use kvarts_store::engine::{Limits, Options, Store};

use super::pool::{States, until};
use super::{Ask, Row, Tally};
use crate::campaign::{Driven, Judge, Ledger, defects, drive, observe, verify, work};
use crate::sim::log::Mixer;
use crate::sim::{Crash, CrashState, Media, Rule, Seed, SimWorld, WorldConfig};

/// Operations of a workload of the first row.
const OPS: usize = 24;
/// Images of one moment, besides the two extremes.
const IMAGES: usize = 4;

pub(super) fn power_cuts() -> Row {
    Row {
        id: "R1",
        what: "power cuts at every operation of random workloads, also in recovery, three deep",
        counts: "crash images",
        targets: [6_000, 400_000, 4_000_000],
        run: |ask, target| until(ask, target, |seed, states| workload(seed, OPS, IMAGES, states)),
    }
}

pub(super) fn small_scope() -> Row {
    Row {
        id: "R2",
        what: "random workloads of one to three operations, every moment, all subsets where at most ten changes are volatile",
        counts: "crash images",
        targets: [2_000, 50_000, 500_000],
        run: small,
    }
}

/// The world of a seed.
pub(super) fn config(seed: Seed) -> WorldConfig {
    let mut rng = seed.child("config").rng();
    let step_cost = if rng.coin() { Duration::from_micros(rng.between(1, 40)) } else { Duration::ZERO };
    WorldConfig { step_cost, ..WorldConfig::default() }
}

/// The store of a seed. In every third the budget is so small that segments are recycled.
pub(super) fn options(seed: Seed) -> Options {
    let mut rng = seed.child("options").rng();
    let segment_bytes = [64 << 10, 256 << 10][rng.index(2)];
    Options {
        shards_per_directory: 1 + rng.below(2) as u32,
        segment_bytes,
        budget_bytes: if rng.below(3) == 0 { 10 * segment_bytes } else { 48 << 20 },
        executors: 1 + rng.index(2),
        limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
        ..Options::default()
    }
}

/// A moment of a workload: what the disk may become if the power fails now, and what was promised.
pub(super) struct Moment {
    pub(super) state: CrashState,
    pub(super) ledger: Ledger,
}

/// What came of a workload.
pub(super) struct Ran {
    /// One for each operation that the disk completed.
    pub(super) moments: Vec<Moment>,
    /// The end.
    pub(super) last: Moment,
    pub(super) done: bool,
    pub(super) struck: u64,
}

/// A workload on a new disk; every moment is kept if asked.
pub(super) fn run(seed: Seed, ops: usize, rules: &[Rule], keep: bool) -> Ran {
    let world = SimWorld::new(seed.0, &config(seed));
    rules.iter().for_each(|rule| world.disk().inject(*rule));
    let (launcher, options) = (world.launcher(), options(seed));
    let ledger = RefCell::new(Ledger::default());
    let opened: RefCell<Option<Store>> = RefCell::default();
    let mut rng = seed.child("work").rng();
    let whole = async {
        match Store::open(&launcher, &options).await {
            Ok((store, _executors)) => {
                opened.replace(Some(store.clone()));
                work(&store, &ledger, &mut rng, ops).await;
                ledger.borrow_mut().allow_absent(&store);
                opened.take();
                // The clean stop is part of what is cut.
                if let Err(error) = store.close().await {
                    ledger.borrow_mut().refusals.push(error.0);
                }
            }
            Err(error) => ledger.borrow_mut().refusals.push(error.0),
        }
    };
    let mut moments = Vec::new();
    let mut watch = || {
        // What is evicted now may be put again, relaxed, before anybody looks: so look after every operation.
        if let Some(store) = opened.borrow().as_ref() {
            ledger.borrow_mut().allow_absent(store);
        }
        if keep {
            moments.push(Moment { state: world.disk().crash_state(), ledger: ledger.borrow().clone() });
        }
    };
    let done = matches!(observe(&world, u64::MAX, &mut watch, whole), Driven::Done(()));
    let struck = world.disk().struck();
    let last = Moment { state: world.cut_power(), ledger: ledger.into_inner() };
    Ran { moments, last, done, struck }
}

/// Whether this image with these promises was not looked at before. Only images are counted: the promises decide
/// merely whether looking again could show something else.
fn fresh(states: &States, looked: &States, image: &Media, ledger: &Ledger) -> bool {
    let digest = image.digest();
    states.reach(digest);
    let mut both = Mixer::new(0);
    both.bytes(&digest.to_le_bytes());
    both.text(&format!("{ledger:?}"));
    looked.reach(both.value())
}

/// A workload on a sound disk ends, and nobody is told of a defect.
fn sound(ran: &Ran) -> Result<(), String> {
    if !ran.done {
        return Err("the workload does not end".to_owned());
    }
    defects(&ran.last.ledger).first().map_or(Ok(()), |reason| Err(format!("a caller was told: {reason}")))
}

fn workload(seed: Seed, ops: usize, images: usize, states: &States) -> Result<(), String> {
    let ran = run(seed, ops, &[], true);
    sound(&ran)?;
    let looked = States::default();
    for (at, moment) in (0..).zip(&ran.moments) {
        let place = seed.nth(at);
        let mut all = moment.state.enumerate(images, place);
        let mut rng = place.child("pick").rng();
        let mut chosen = vec![Crash::LoseAll, Crash::KeepAll];
        while chosen.len() < images + 2 && !all.is_empty() {
            chosen.push(all.swap_remove(rng.index(all.len())));
        }
        for (n, crash) in (0..).zip(chosen) {
            let image = moment.state.image(crash);
            if fresh(states, &looked, &image, &moment.ledger) {
                let depth = if rng.below(24) == 0 { 2 } else { 0 };
                follow(place.nth(n), seed, image, &moment.ledger, depth, states)
                    .map_err(|why| format!("operation {at}, {crash:?}: {why}"))?;
            }
        }
    }
    Ok(())
}

/// Judges an image, and goes on from it as deep as asked: a cut while it recovers, and a cut of what comes after.
fn follow(
    seed: Seed,
    settings: Seed,
    image: Media,
    ledger: &Ledger,
    depth: u32,
    states: &States,
) -> Result<(), String> {
    let (config, options) = (config(settings), options(settings));
    let (opened, found, operations) =
        verify(seed, &config, &options, image.clone(), (ledger, Judge::Strict))?;
    if depth == 0 {
        return Ok(());
    }
    let mut rng = seed.child("deeper").rng();
    let world = SimWorld::with_media(seed.child("recovering").0, &config, image);
    let launcher = world.launcher();
    let _ = drive(&world, rng.between(1, operations.max(1)), Store::open(&launcher, &options));
    let state = world.cut_power();
    for crash in [Crash::LoseAll, Crash::Random(seed.0)] {
        let image = state.image(crash);
        states.reach(image.digest());
        follow(seed.child("in recovery"), settings, image, ledger, 0, states)
            .map_err(|why| format!("cut while recovering, {crash:?}: {why}"))?;
    }
    let mut next = ledger.clone();
    next.adopt(&found);
    let ledger = RefCell::new(next);
    let cut = opened.world.disk().operations().1 + rng.between(1, 60);
    let mut watch = || ledger.borrow_mut().allow_absent(&opened.store);
    let worked = observe(&opened.world, cut, &mut watch, work(&opened.store, &ledger, &mut rng, 10));
    if let Driven::Hung(hang) = worked {
        return Err(format!("after recovery: {hang}"));
    }
    ledger.borrow_mut().allow_absent(&opened.store);
    let state = opened.world.cut_power();
    let ledger = ledger.into_inner();
    for crash in [Crash::LoseAll, Crash::Random(seed.0)] {
        let image = state.image(crash);
        states.reach(image.digest());
        follow(seed.child("again"), settings, image, &ledger, depth - 1, states)
            .map_err(|why| format!("cut after recovery, {crash:?}: {why}"))?;
    }
    Ok(())
}

/// Every moment of workloads of one to three operations, and all that `enumerate` has of each.
fn small(ask: &Ask, target: u64) -> Tally {
    until(ask, target, |seed, states| {
        let looked = States::default();
        let ran = run(seed, 1 + (seed.0 % 3) as usize, &[], true);
        sound(&ran)?;
        for (at, moment) in (0..).zip(&ran.moments) {
            for crash in moment.state.enumerate(16, seed.nth(at)) {
                let image = moment.state.image(crash);
                if fresh(states, &looked, &image, &moment.ledger) {
                    follow(seed.nth(at), seed, image, &moment.ledger, 0, states)
                        .map_err(|why| format!("operation {at}, {crash:?}: {why}"))?;
                }
            }
        }
        Ok(())
    })
}
