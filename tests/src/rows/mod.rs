//! The fault campaign: rows that anyone can run again, each with the promise that it tries to break.
//!
//! A row draws everything from seeds, counts the distinct states that it reached, and lists what it found wrong. It
//! never passes by doing nothing: a row that cannot run says why, and a caller may treat that as a failure.

mod again;
mod bits;
mod buckets;
mod buried;
mod clocks;
mod copies;
mod costs;
mod cuts;
mod devices;
mod drives;
mod ends;
mod faults;
mod goldens;
pub mod growth;
mod kills;
mod leaving;
mod lost_drives;
mod nodes;
mod noise;
pub mod planted;
mod pool;
mod prefixes;
mod real;
mod registered;
mod repaired;
mod scene;
mod schedules;
pub mod scripts;
mod sessions;
mod small;
mod staged;
mod stores;
mod swaps;
mod tiles;

use std::fmt;
use std::ops::Range;

/// How much is run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tier {
    /// Before every change lands: minutes.
    Merge,
    /// Once a night: hours.
    Nightly,
    /// Before a release: a day, in pieces.
    Release,
}

impl Tier {
    /// As it is asked for.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Merge => "merge",
            Self::Nightly => "nightly",
            Self::Release => "release",
        }
    }
}

/// What a row is asked to do.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// How much.
    pub tier: Tier,
    /// The first seed; the following ones are used as needed.
    pub seed: u64,
    /// Exactly the seeds before this one, instead of as many as it takes.
    pub end: Option<u64>,
    /// Distinct states to reach, instead of the tier's number.
    pub budget: Option<u64>,
    /// Threads that run seeds.
    pub workers: usize,
    /// Whether it is told on standard error how far it has come.
    pub progress: bool,
}

/// Something that must not happen, and how to see it again.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The seed that shows it.
    pub seed: u64,
    /// What was wrong.
    pub what: String,
}

/// What a row did.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Distinct states reached.
    pub distinct: u64,
    /// States looked at, where that is counted beside the distinct ones: a closed scope says how many there must be.
    pub visited: u64,
    /// The seeds that were run.
    pub seeds: Range<u64>,
    /// What was found wrong; at most a few are kept.
    pub violations: Vec<Violation>,
    /// Why the row could not run, if so.
    pub skipped: Option<String>,
}

/// One row of the campaign.
pub struct Row {
    /// Its name, as `docs/RELIABILITY.md` lists it.
    pub id: &'static str,
    /// What is tried, in a line.
    pub what: &'static str,
    /// What is counted.
    pub counts: &'static str,
    /// Distinct states for each tier; with none the row is not in the tier.
    pub targets: [u64; 3],
    run: fn(&Ask, u64) -> Tally,
}

impl fmt::Debug for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Row({})", self.id)
    }
}

impl Row {
    /// How many distinct states are asked for. A row that is not in the tier does as much as in the first that it is in.
    /// Exactly these seeds means all of them, however many states they have.
    pub fn target(&self, ask: &Ask) -> u64 {
        let from = match ask.tier {
            Tier::Merge => 0,
            Tier::Nightly => 1,
            Tier::Release => 2,
        };
        let of_tier = self.targets.iter().skip(from).find(|target| **target > 0);
        let most = if ask.end.is_some() { u64::MAX } else { of_tier.copied().unwrap_or(0) };
        ask.budget.unwrap_or(most)
    }

    /// Whether it is part of a tier.
    pub fn is_in(&self, tier: Tier) -> bool {
        let [merge, nightly, release] = self.targets;
        let target = match tier {
            Tier::Merge => merge,
            Tier::Nightly => nightly,
            Tier::Release => release,
        };
        target > 0
    }

    /// How many seeds a tier has, where it goes through all there are.
    pub fn seeds(&self, tier: Tier) -> Option<u64> {
        small::seeds(self.id, tier)
    }

    /// Runs it.
    pub fn run(&self, ask: &Ask) -> Tally {
        (self.run)(ask, self.target(ask))
    }
}

/// All rows, in the order in which they are run.
pub fn all() -> Vec<Row> {
    let mut rows = vec![cuts::power_cuts(), small::small_scope()];
    rows.extend(real::rows());
    rows.push(kills::kills());
    rows.extend(faults::rows());
    rows.push(schedules::schedules());
    rows.extend(scripts::rows());
    rows.extend([bits::row(), swaps::row(), leaving::row(), clocks::row(), noise::row(), goldens::row()]);
    rows.extend(again::rows());
    rows.push(devices::row());
    rows.extend([growth::row(), tiles::row(), costs::row(), nodes::row(), registered::row(), copies::row()]);
    rows.push(buckets::row());
    rows.push(staged::row());
    rows.push(sessions::row());
    rows.push(drives::row());
    rows.push(lost_drives::row());
    rows.push(nodes::trouble::row());
    rows.push(planted::row());
    rows
}
