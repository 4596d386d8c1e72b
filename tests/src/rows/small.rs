//! Small scope, exhaustively: every script of a few operations from twelve shapes, on a new disk and on a store whose
//! segment is nearly full; the power is cut after every operation of the disk; every subset of the changes that were not
//! durable survives, sector by sector.
//!
//! Nothing is sampled, and that is counted twice. A script of n operations covers the moments of its last one, as those
//! before are the last moments of shorter scripts: so there are (S^(L+1) - 1) / (S - 1) scripts on each of the two disks.
//! A first run of a script adds up 2^k for the k units that each moment could lose by itself; a second one visits the
//! subsets, and both must come to the same number. A moment with more units than [`UNITS_MAX`] would mean that the scope
//! is not closed, and is a violation too.

use std::cell::{Cell, RefCell};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use kvarts_contract::error::Error;
use kvarts_store::engine::{Executors, Limits, Options, Store};

use super::pool::{States, until};
use super::{Ask, Row, Tally, Tier, Violation};
use crate::campaign::{Act, Aim, Driven, Judge, Ledger, Poller, act, defects, drive, observe, verify};
use crate::sim::log::Mixer;
use crate::sim::{CrashState, Media, Seed, SimWorld, WorldConfig};

/// More units than this in one moment, and the subsets are too many to visit.
const UNITS_MAX: usize = 16;
/// The one world of all scripts.
const WORLD: Seed = Seed(2);

/// The group of one state of 1,000 bytes, and the group of odd lengths: blocks of one and two sectors.
const STATE: usize = 2;
const ODD: usize = 1;

/// A step of a script.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Shape {
    Act(Act),
    /// A clean stop and a start.
    Restart,
}

const fn put(column: usize, first: u64, count: u64, producer: u64, durable: bool) -> Poller {
    Poller { column, first, count, producer, durable, skew: 0 }
}

/// All steps that scripts are made of.
const SHAPES: [Shape; 12] = [
    Shape::Act(Act::Put(put(STATE, 0, 1, 1, true))),
    Shape::Act(Act::Put(put(STATE, 0, 1, 2, true))),
    Shape::Act(Act::Put(put(STATE, 1, 1, 1, true))),
    Shape::Act(Act::Put(put(STATE, 0, 1, 3, false))),
    Shape::Act(Act::Put(put(ODD, 0, 2, 1, true))),
    Shape::Act(Act::Pair(put(STATE, 1, 1, 4, true), put(ODD, 2, 1, 4, false))),
    Shape::Act(Act::Delete(Aim::Key(0))),
    Shape::Act(Act::Delete(Aim::Prefix(0))),
    Shape::Act(Act::Delete(Aim::All)),
    Shape::Act(Act::Checkpoint),
    Shape::Act(Act::Compact),
    Shape::Restart,
];

/// Where scripts begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Start {
    NewDisk,
    FullSegment,
}

/// A script: on which disk, and which steps.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Script {
    start: Start,
    steps: Vec<Shape>,
}

/// Scripts of at most `len` steps, on both disks.
fn scripts(len: u32) -> u64 {
    let shapes = SHAPES.len() as u64;
    2 * (shapes.pow(len + 1) - 1) / (shapes - 1)
}

impl Script {
    /// The `n`th script; shorter ones come first.
    fn nth(n: u64) -> Self {
        let start = if n.is_multiple_of(2) { Start::NewDisk } else { Start::FullSegment };
        let (mut n, shapes) = (n / 2, SHAPES.len() as u64);
        let mut len = 0;
        while n >= shapes.pow(len) {
            n -= shapes.pow(len);
            len += 1;
        }
        let step = |place: u32| SHAPES[(n / shapes.pow(place) % shapes) as usize];
        Self { start, steps: (0..len).map(step).collect() }
    }
}

fn config() -> WorldConfig {
    WorldConfig::default()
}

fn options() -> Options {
    Options {
        shards_per_directory: 1,
        segment_bytes: 64 << 10,
        budget_bytes: 48 << 20,
        executors: 1,
        limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
        ..Options::default()
    }
}

/// What a script begins with, and what is known of it.
fn beginning(start: Start) -> (Media, Ledger) {
    static FULL: OnceLock<(Media, Ledger)> = OnceLock::new();
    match start {
        Start::NewDisk => (Media::new(1, config().disk.capacity), Ledger::default()),
        Start::FullSegment => FULL.get_or_init(full).clone(),
    }
}

/// A store with records of each kind, whose segment has room for one small record more.
fn full() -> (Media, Ledger) {
    let world = SimWorld::new(WORLD.child("full").0, &config());
    let launcher = world.launcher();
    let ledger = RefCell::new(Ledger::default());
    let filling = async {
        let (store, _executors) = Store::open(&launcher, &options()).await.expect("a new disk");
        let room = |store: &Store| store.stats().space.total.free;
        let mut n = 4;
        act(&store, &ledger, Act::Put(put(STATE, 0, 2, 7, true))).await;
        while store.segments().len() < 2 && room(&store) > 12 << 10 {
            act(&store, &ledger, Act::Put(put([STATE, ODD][n as usize % 2], n % 12, 1, 7, true))).await;
            n += 1;
        }
        act(&store, &ledger, Act::Delete(Aim::Key(5))).await;
        store.halt().await;
    };
    assert!(matches!(drive(&world, u64::MAX, filling), Driven::Done(())), "it does not end");
    let state = world.cut_power();
    let media = state.image_of(&state.units(), |_| true);
    (media, ledger.into_inner())
}

/// What happens in a script's last step.
struct Last<'a> {
    world: &'a SimWorld,
    ledger: &'a RefCell<Ledger>,
}

/// Runs a script; `look` is called at every moment of its last step.
fn play(script: &Script, look: &mut dyn FnMut(&Last<'_>)) -> Result<(), String> {
    let (media, ledger) = beginning(script.start);
    let world = SimWorld::with_media(WORLD.0, &config(), media);
    let (launcher, options, ledger) = (world.launcher(), options(), RefCell::new(ledger));
    let in_last = Cell::new(script.steps.is_empty());
    let whole = async {
        let mut open: (Store, Executors) = Store::open(&launcher, &options).await?;
        for (at, step) in script.steps.iter().enumerate() {
            in_last.set(at + 1 == script.steps.len());
            match step {
                Shape::Act(one) => act(&open.0, &ledger, *one).await,
                Shape::Restart => {
                    open.0.close().await?;
                    open = Store::open(&launcher, &options).await?;
                }
            }
        }
        Ok::<_, Error>(())
    };
    let last = Last { world: &world, ledger: &ledger };
    let mut watch = || {
        if in_last.get() {
            look(&last);
        }
    };
    match observe(&world, u64::MAX, &mut watch, whole) {
        Driven::Done(Ok(())) => {}
        Driven::Done(Err(error)) => return Err(format!("a caller was told: {error}")),
        other => return Err(format!("it does not end: {other:?}")),
    }
    look(&last);
    let ledger = ledger.borrow();
    defects(&ledger).first().map_or(Ok(()), |reason| Err(format!("a caller was told: {reason}")))
}

/// How many images a script has, from the number of units of each of its moments.
fn expected(script: &Script) -> Result<u64, String> {
    let (mut images, mut widest, mut shown) = (0, 0, String::new());
    play(script, &mut |last| {
        let units = last.world.disk().crash_state().units().len();
        if units > widest {
            widest = units;
            shown = format!(
                "\n{:?}\n{}",
                last.world.disk().crash_state().units(),
                last.world.disk().log().text(12)
            );
        }
        images += 1_u64.checked_shl(units as u32).unwrap_or(0);
    })?;
    if widest > UNITS_MAX {
        return Err(format!("{script:?}: a moment with {widest} units: the scope is not closed{shown}"));
    }
    Ok(images)
}

/// What rows of scripts share.
#[derive(Default)]
struct Seen {
    /// Images with their promises.
    looked: States,
    visited: AtomicU64,
    scripts: AtomicU64,
}

/// Every subset of what the moment could lose.
fn subsets(state: &CrashState, see: &mut dyn FnMut(Media) -> Result<(), String>) -> Result<u64, String> {
    let units = state.units();
    let mut visited = 0u64;
    // One unit changes from each subset to the next (a Gray code), from none to the last one alone.
    let mut kept = vec![false; units.len()];
    loop {
        see(state.image_of(&units, |at| kept[at]))?;
        visited += 1;
        let Some(flip) = Some(visited.trailing_zeros() as usize).filter(|at| *at < units.len()) else {
            return Ok(visited);
        };
        kept[flip] = !kept[flip];
    }
}

fn visit(script: &Script, seen: &Seen, states: &States) -> Result<(), String> {
    let expected = expected(script)?;
    let (mut visited, mut at, mut wrong) = (0, 0, None);
    play(script, &mut |last| {
        at += 1;
        if wrong.is_some() {
            return;
        }
        let ledger = last.ledger.borrow();
        let mut see = |image: Media| {
            let digest = image.digest();
            states.reach(digest);
            let mut both = Mixer::new(0);
            both.bytes(&digest.to_le_bytes());
            ledger.promises(&mut both);
            if !seen.looked.reach(both.value()) {
                return Ok(());
            }
            verify(WORLD.nth(at), &config(), &options(), image, (&ledger, Judge::Strict)).map(drop)
        };
        match subsets(&last.world.disk().crash_state(), &mut see) {
            Ok(some) => visited += some,
            Err(why) => wrong = Some(format!("{script:?}, moment {at}: {why}")),
        }
    })?;
    if let Some(why) = wrong {
        return Err(why);
    }
    seen.visited.fetch_add(visited, Ordering::Relaxed);
    seen.scripts.fetch_add(1, Ordering::Relaxed);
    if visited == expected {
        return Ok(());
    }
    Err(format!("{script:?}: {visited} images were visited, there are {expected}"))
}

/// The most steps of a script, for each tier.
const LEN: [u32; 3] = [1, 3, 4];

fn len(tier: Tier) -> u32 {
    let [merge, nightly, release] = LEN;
    match tier {
        Tier::Merge => merge,
        Tier::Nightly => nightly,
        Tier::Release => release,
    }
}

/// How many scripts a tier has, if the row is the one of this file.
pub(super) fn seeds(row: &str, tier: Tier) -> Option<u64> {
    (row == "R2").then(|| scripts(len(tier)))
}

pub(super) fn small_scope() -> Row {
    Row {
        id: "R2",
        what: "every script of up to one, three or four of twelve steps (by tier), every moment, every subset of non-durable changes",
        counts: "crash images",
        targets: LEN.map(scripts),
        run: |ask, _| small(ask),
    }
}

fn small(ask: &Ask) -> Tally {
    let all = scripts(len(ask.tier));
    let from = ask.seed.min(all);
    let to = ask.end.unwrap_or(all).clamp(from, all);
    let seen = Seen::default();
    let asked = Ask { seed: from, end: Some(to), ..*ask };
    let one = |n: Seed, states: &States| visit(&Script::nth(n.0), &seen, states);
    let mut tally = until(&asked, ask.budget.unwrap_or(u64::MAX), one);
    let scripts = seen.scripts.into_inner();
    if tally.violations.is_empty() && ask.budget.is_none() && scripts != to - from {
        let what = format!("{scripts} scripts of {} were run", to - from);
        tally.violations.push(Violation { seed: from, what });
    }
    tally.visited = seen.visited.into_inner();
    tally
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_are_as_many_as_the_formula_says_and_none_comes_twice() {
        let all = scripts(2);
        assert_eq!(all, 2 * (1 + 12 + 144));
        for n in 0..all {
            let script = Script::nth(n);
            assert!(script.steps.len() <= 2);
            assert!((0..n).all(|other| Script::nth(other) != script), "{n}: {script:?}");
        }
        assert_eq!(Script::nth(all).steps.len(), 3);
    }

    #[test]
    fn every_subset_of_a_moment_is_visited_once() {
        let script = Script { start: Start::NewDisk, steps: vec![SHAPES[5]] };
        let (mut widest, mut images, mut expected) = (0, 0, 0);
        play(&script, &mut |last| {
            let state = last.world.disk().crash_state();
            let units = state.units();
            if units.len() > 12 {
                return;
            }
            widest = widest.max(units.len());
            expected += 1_u64 << units.len();
            let mut seen = std::collections::BTreeSet::new();
            images += subsets(&state, &mut |image| {
                seen.insert(image.digest());
                Ok(())
            })
            .unwrap();
            // The extremes are among them.
            let none = state.image(crate::sim::Crash::LoseAll).digest();
            let all = state.image(crate::sim::Crash::KeepAll).digest();
            assert!(seen.contains(&none) && seen.contains(&all));
        })
        .unwrap();
        assert_eq!(images, expected);
        assert!(widest >= 3, "{widest} units at most");
    }

    #[test]
    fn scripts_of_one_step_survive_every_power_cut_and_are_counted_twice() {
        let seen = Seen::default();
        let states = States::default();
        for n in 0..8 {
            visit(&Script::nth(n), &seen, &states).unwrap();
        }
        assert!(states.len() > 100, "{} images", states.len());
    }
}
