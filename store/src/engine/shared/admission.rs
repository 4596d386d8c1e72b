//! Admission: what is let in when a device has been written as much as it may be.
//!
//! Off unless a budget of bytes a day is set. Until that is used up everything is let in, because most of what a cache
//! is worth lies in blocks that are used exactly twice, and a rule that waits for the second asking loses the first
//! use of each. From then on a block is let in when it has been asked for before, as far as a sketch of fixed size
//! remembers: a count-min of small counters that are halved by and by. How often before follows from what its bytes are worth
//! beside those that others ask for ([`askings`]): where several models share a device, bytes that spare little wait. Whatever
//! is let in then is an overdraft, and at an eighth of a day's budget nothing is let in any more. So over any time `t` no more bytes of
//! records are written than `budget * (9/8 day + t)`, what puts under way had been promised and what compaction moves
//! aside; footers and checkpoints are not counted.
//!
//! The budget comes back evenly with time, by the injected clock. A store begins with a day's budget, also after a
//! restart: what was written before is not remembered.

use std::sync::PoisonError;
use std::time::Duration;

use kvarts_planner::keep::askings;

use crate::index::BlockFingerprint;
use kvarts_contract::clock::Nanos;
use kvarts_contract::sync::Mutex;
use kvarts_contract::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Rows of the sketch, and counters of each: four MiB altogether.
const ROWS: usize = 4;
const ROW: usize = 1 << 20;
/// Counters go no higher.
const COUNT_MAX: u8 = 15;
/// Askings after which all counters are halved.
const HALVED_AFTER: u32 = ROW as u32 / 4;
/// What one asking more counts in the mean of what askings are worth.
const WORTH_PART: f64 = 1.0 / 4096.0;
/// Part of a day's budget that may be overdrawn.
const OVERDRAFT_PARTS: i64 = 8;
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// How much of a budget is left, and what was asked for.
#[derive(Debug)]
struct Meter {
    /// Bytes a day.
    daily: i64,
    left: i64,
    at: Nanos,
    counts: Vec<u8>,
    asked: u32,
    /// The mean of what is asked for ([`worth`](kvarts_planner::keep::worth)), of the last few thousand blocks.
    worth: Option<f64>,
}

/// What is let in. Usable from any thread.
#[derive(Debug, Default)]
pub(crate) struct Admission {
    on: AtomicBool,
    meter: Mutex<Option<Meter>>,
}

impl Admission {
    /// Sets the budget; `None` lets everything in.
    pub(crate) fn set(&self, daily: Option<u64>, now: Nanos) {
        let mut meter = self.meter.lock().unwrap_or_else(PoisonError::into_inner);
        *meter = daily.map(|bytes| {
            let daily = i64::try_from(bytes).unwrap_or(i64::MAX);
            Meter { daily, left: daily, at: now, counts: vec![0; ROWS * ROW], asked: 0, worth: None }
        });
        self.on.store(meter.is_some(), Relaxed);
    }

    /// Counts bytes as written.
    pub(crate) fn spend(&self, bytes: u64) {
        if self.on.load(Relaxed)
            && let Some(meter) = &mut *self.meter.lock().unwrap_or_else(PoisonError::into_inner)
        {
            meter.left = meter.left.saturating_sub(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }

    /// How many of these blocks, in the order of their prefix, are let in: those behind one that is not would be of no
    /// use. Every one of them has been asked for. Each of their bytes is worth so much.
    pub(crate) fn admit(
        &self,
        prints: impl Iterator<Item = BlockFingerprint>,
        worth: i8,
        now: Nanos,
    ) -> usize {
        if !self.on.load(Relaxed) {
            return usize::MAX;
        }
        let mut meter = self.meter.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(meter) = &mut *meter else { return usize::MAX };
        meter.refill(now);
        let (mut admitted, mut refused) = (0, false);
        for print in prints {
            let asked = meter.ask(print, worth);
            refused |= !meter.lets_in(asked, worth);
            admitted += usize::from(!refused);
        }
        admitted
    }
}

impl Meter {
    fn refill(&mut self, now: Nanos) {
        let passed = i128::try_from(now.since(self.at).as_nanos()).unwrap_or(i128::MAX);
        let earned = passed.saturating_mul(i128::from(self.daily)) / DAY.as_nanos() as i128;
        if earned > 0 {
            let left = i128::from(self.left).saturating_add(earned).min(i128::from(self.daily));
            self.left = i64::try_from(left).unwrap_or(self.daily);
            self.at = now;
        }
    }

    /// Counts one asking and says how many there were, at least as many as there were lately.
    fn ask(&mut self, print: BlockFingerprint, worth: i8) -> u8 {
        let mean = self.worth.get_or_insert(f64::from(worth));
        *mean += (f64::from(worth) - *mean) * WORTH_PART;
        let (first, rest) = (print.first(), u64::from(print.rest()));
        let mut least = COUNT_MAX;
        for row in 0..ROWS {
            let place = (first >> (12 * row)).wrapping_add(rest >> (8 * row)) as usize % ROW;
            if let Some(count) = self.counts.get_mut(row * ROW + place) {
                *count = (*count + 1).min(COUNT_MAX);
                least = least.min(*count);
            }
        }
        self.asked += 1;
        if self.asked == HALVED_AFTER {
            self.asked = 0;
            self.counts.iter_mut().for_each(|count| *count /= 2);
        }
        least
    }

    fn lets_in(&self, asked: u8, worth: i8) -> bool {
        let needed = askings(worth, self.worth.unwrap_or(f64::from(worth)));
        self.left > 0 || (asked >= needed && self.left > -(self.daily / OVERDRAFT_PARTS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prints(range: std::ops::Range<u64>) -> impl Iterator<Item = BlockFingerprint> {
        range.map(|n| {
            BlockFingerprint::from_parts(n.wrapping_mul(0x9e37_79b9_7f4a_7c15), (n * 2_654_435_761) as u32)
        })
    }

    fn at(seconds: u64) -> Nanos {
        Nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn everything_is_let_in_until_the_days_budget_is_used_up_and_then_what_was_asked_for_before() {
        let admission = Admission::default();
        assert_eq!(admission.admit(prints(0..3), 0, at(0)), usize::MAX, "off by default");
        admission.set(Some(86_400), at(0));
        assert_eq!(admission.admit(prints(0..10), 0, at(0)), 10);
        admission.spend(86_400);
        assert_eq!(admission.admit(prints(10..20), 0, at(0)), 0, "never asked for");
        assert_eq!(admission.admit(prints(10..20), 0, at(0)), 10, "asked for before");
        assert_eq!(admission.admit(prints(5..25), 0, at(0)), 15, "up to the first that was not");
        assert_eq!(admission.admit(prints(20..25).chain(prints(0..5)), 0, at(0)), 10);
        admission.set(None, at(0));
        assert_eq!(admission.admit(prints(90..91), 0, at(0)), usize::MAX);
    }

    #[test]
    fn where_several_models_share_a_device_bytes_that_spare_little_wait_and_those_that_spare_much_do_not() {
        let admission = Admission::default();
        admission.set(Some(86_400), at(0));
        admission.admit(prints(0..2000), 0, at(0));
        admission.spend(86_400);
        let asked = |from: u64, worth, times: usize| {
            (0..times).map(|_| admission.admit(prints(from..from + 10), worth, at(0))).collect::<Vec<_>>()
        };
        assert_eq!(asked(5000, 4, 1), [10], "worth sixteen times as much: at once");
        assert_eq!(asked(6000, 0, 2), [0, 10], "as much as most");
        assert_eq!(asked(7000, -2, 3), [0, 0, 10], "a fourth");
        // A store of one model only: what is usual is what it has.
        admission.set(Some(86_400), at(0));
        admission.spend(86_400);
        assert_eq!(asked(8000, -2, 2), [0, 10]);
    }

    #[test]
    fn the_overdraft_ends_and_time_brings_the_budget_back() {
        let admission = Admission::default();
        admission.set(Some(86_400), at(0));
        admission.admit(prints(0..5), 0, at(0));
        admission.spend(86_400 + 86_400 / 8);
        assert_eq!(admission.admit(prints(0..5), 0, at(0)), 0, "overdrawn by an eighth of a day");
        // A byte a second.
        assert_eq!(admission.admit(prints(0..5), 0, at(10)), 5);
        assert_eq!(admission.admit(prints(50..55), 0, at(10_800)), 0);
        assert_eq!(admission.admit(prints(60..65), 0, at(10_801)), 5);
        // No more than a day's is saved up.
        assert_eq!(admission.admit(prints(70..71), 0, at(10_000_000)), 1);
        admission.spend(86_400);
        assert_eq!(admission.admit(prints(80..81), 0, at(10_000_000)), 0);
    }

    #[test]
    fn what_was_asked_for_long_ago_is_forgotten_and_the_sketch_seldom_takes_one_block_for_another() {
        let admission = Admission::default();
        admission.set(Some(1000), at(0));
        admission.spend(1001);
        assert_eq!(admission.admit(prints(0..1), 0, at(0)), 0);
        let strangers = (1..50_000).filter(|n| admission.admit(prints(*n..*n + 1), 0, at(0)) > 0).count();
        assert!(strangers < 500, "{strangers} of 50,000 were let in as other blocks");
        for n in 0..2 * u64::from(HALVED_AFTER) / 1000 {
            admission.admit(prints(1_000_000 + n * 1000..1_001_000 + n * 1000), 0, at(0));
        }
        assert_eq!(admission.admit(prints(0..1), 0, at(0)), 0, "it is as if no put had asked for it");
    }
}
