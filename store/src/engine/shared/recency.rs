//! The coarse time by which blocks age: a step passes when a 256th of the budget has been written, and every 64
//! seconds at least, or every 512th of the time since opening if that is longer.
//!
//! What decides how long a block stays is how much is written meanwhile, not what a clock says: so it is written
//! bytes that make blocks old. The table of when each step began gives an age in seconds back, for what is about time
//! (what is cold), and for a time of long ago an age in steps.
//!
//! A block keeps its step modulo [`EPOCHS`], its record the second of its last use. The steps tell blocks apart that
//! were used within the last three budgets' worth of writing, or within most of the time since opening; whatever was
//! used before is told apart by the second: after weeks, and after a restart ([`RecencyClock::age`]).

use std::time::Duration;

use crate::index::EPOCHS;
use kvarts_contract::clock::Nanos;
use kvarts_contract::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A step lasts no longer, in seconds, in a store that was opened not long ago.
pub(crate) const EPOCH_S: u64 = 64;
/// Steps of [`EPOCH_S`] before the opening; as many that are twice as long lie before those, and so on.
const STEPS_ALIKE: u64 = 512;
/// From this many steps since a record's last use on, its blocks have the record's age.
pub(crate) const AGE_MAX: u16 = EPOCHS - 128;
/// Parts of the budget that must have been written for a step to pass.
pub const STEPS_PER_BUDGET: u64 = 256;
/// Steps that pass at once, at most.
const STEPS_AT_ONCE: u64 = 32;
/// Parts of the time since opening that a step may last.
const STEPS_OPEN: u64 = 512;

const STEP_NANOS: u64 = EPOCH_S * 1_000_000_000;

/// The coarse time of an open store. Usable from any thread; the figures of one moment may be a step apart.
#[derive(Debug)]
pub(crate) struct RecencyClock {
    opened: Nanos,
    /// Steps since opening.
    steps: AtomicU64,
    /// When the present step began.
    began: AtomicU64,
    /// Bytes written in the present step.
    written: AtomicU64,
    /// When each step began, by its number modulo `EPOCHS`.
    times: Box<[AtomicU64]>,
}

impl RecencyClock {
    pub(crate) fn new(now: Nanos) -> Self {
        Self {
            opened: now,
            steps: AtomicU64::new(0),
            began: AtomicU64::new(now.0),
            written: AtomicU64::new(0),
            times: (0..EPOCHS).map(|_| AtomicU64::new(now.0)).collect(),
        }
    }

    /// Steps since opening.
    pub(crate) fn steps(&self) -> u64 {
        self.steps.load(Relaxed)
    }

    /// The step of this moment, modulo [`EPOCHS`].
    pub(crate) fn epoch(&self, now: Nanos) -> u16 {
        let began = self.began.load(Relaxed);
        let step = STEP_NANOS.max(now.0.saturating_sub(self.opened.0) / STEPS_OPEN);
        let due = now.0.saturating_sub(began) / step;
        if due > 0 {
            let end = began + due * step;
            // Who loses finds the steps made by another.
            if self.began.compare_exchange(began, end, Relaxed, Relaxed).is_ok() {
                // Of a longer time the steps are longer: a block's age in seconds stays what it is.
                let passing = due.min(STEPS_AT_ONCE);
                (1..=passing).for_each(|one| self.pass(began + one * due / passing * step));
            }
        }
        (self.steps.load(Relaxed) % u64::from(EPOCHS)) as u16
    }

    /// Counts `bytes` as written, against a budget of `budget` bytes.
    pub(crate) fn wrote(&self, bytes: u64, budget: u64, now: Nanos) {
        let step = (budget / STEPS_PER_BUDGET).max(1);
        let before = self.written.fetch_add(bytes, Relaxed);
        if (before + bytes) / step > before / step {
            self.began.store(now.0, Relaxed);
            let passed = (before + bytes) / step - before / step;
            (0..passed.min(STEPS_AT_ONCE)).for_each(|_| self.pass(now.0));
        }
    }

    fn pass(&self, at: u64) {
        let step = self.steps.fetch_add(1, Relaxed) + 1;
        if let Some(time) = self.times.get((step % u64::from(EPOCHS)) as usize) {
            time.store(at, Relaxed);
        }
    }

    /// How long ago a step ended that was `age` steps before this moment's: at least so long was a block unused.
    pub(crate) fn since(&self, age: u16, now: Nanos) -> Duration {
        let steps = self.steps.load(Relaxed);
        let Some(after) = u64::from(age).checked_sub(1) else { return Duration::ZERO };
        match steps.checked_sub(after) {
            // The step behind it began when it ended.
            Some(next) if next > 0 => {
                let at =
                    self.times.get((next % u64::from(EPOCHS)) as usize).map_or(now.0, |at| at.load(Relaxed));
                Duration::from_nanos(now.0.saturating_sub(at))
            }
            // Before the store was opened: as recovery counted it.
            _ => {
                let before = after.saturating_sub(steps) + 1;
                now.since(self.opened) + Duration::from_secs(seconds_before(before))
            }
        }
    }

    /// How many steps ago something was used last that has been unused for so long: never too many. Of two times the
    /// longer one gives no fewer steps, and before the last [`EPOCHS`] steps an estimate.
    pub(crate) fn steps_in(&self, unused: Duration, now: Nanos) -> u32 {
        let (steps, open) = (self.steps(), now.since(self.opened));
        if let Some(before) = unused.checked_sub(open).filter(|before| !before.is_zero()) {
            let more = steps_before(before.as_secs());
            return u32::try_from(steps.saturating_add(more)).unwrap_or(u32::MAX);
        }
        // The last age that ended before it: a binary search, since the older the longer ago.
        let (mut low, mut high) = (0, steps.min(u64::from(EPOCHS) - 1) as u16);
        let (oldest, known) = (high, self.since(high, now));
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if self.since(middle, now) < unused { low = middle } else { high = middle - 1 }
        }
        let beyond = steps - u64::from(oldest);
        if low < oldest || beyond == 0 {
            return u32::from(low);
        }
        let part = (unused.saturating_sub(known)).as_micros() * u128::from(beyond);
        let more = part / open.saturating_sub(known).as_micros().max(1);
        u32::from(low).saturating_add(u32::try_from(more).unwrap_or(u32::MAX))
    }

    /// The age of a block whose step of its last use was `steps` ago, modulo [`EPOCHS`], in a record whose last use was
    /// `record` steps ago at least: no block was used after its record.
    pub(crate) fn age(steps: u16, record: u32) -> u32 {
        match record >= u32::from(AGE_MAX) {
            true => record,
            false => record.max(u32::from(steps)),
        }
    }
}

/// Converts seconds before the opening into steps before it. The scale does not depend on what
/// recovery finds, or finds first: minutes are told apart within hours, days within months.
pub(crate) fn steps_before(seconds: u64) -> u64 {
    let alike = seconds / EPOCH_S;
    match (alike / STEPS_ALIKE).checked_ilog2() {
        None => alike,
        // Between one power of two and the next lie as many steps as before the first, less those of that.
        Some(power) => {
            STEPS_ALIKE * (u64::from(power) + 2) / 2 + ((alike - (STEPS_ALIKE << power)) >> (power + 1))
        }
    }
}

/// Converts steps before the opening into seconds before it: when that step ended.
fn seconds_before(steps: u64) -> u64 {
    if steps <= STEPS_ALIKE {
        return steps * EPOCH_S;
    }
    let beyond = steps - STEPS_ALIKE;
    let power = (beyond / (STEPS_ALIKE / 2)).min(32);
    let part = beyond - power * (STEPS_ALIKE / 2);
    ((STEPS_ALIKE << power) + (part << (power + 1))) * EPOCH_S
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Nanos {
        Nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn a_step_passes_with_a_share_of_the_budget_or_with_time() {
        let ages = RecencyClock::new(at(100));
        assert_eq!(ages.epoch(at(100)), 0);
        ages.wrote(999, 256_000, at(110));
        assert_eq!(ages.epoch(at(110)), 0);
        ages.wrote(1, 256_000, at(120));
        assert_eq!(ages.epoch(at(120)), 1);
        ages.wrote(2500, 256_000, at(121));
        assert_eq!(ages.epoch(at(121)), 3);
        // The time of a step is counted from its own beginning.
        assert_eq!((ages.epoch(at(121 + 63)), ages.epoch(at(121 + 64))), (3, 4));
        assert_eq!(ages.epoch(at(121 + 64 * 3)), 6);
    }

    #[test]
    fn an_age_in_steps_is_an_age_in_seconds_again_and_never_too_much() {
        let ages = RecencyClock::new(at(1000));
        ages.wrote(1000, 256_000, at(1010));
        ages.wrote(1000, 256_000, at(1030));
        let since = |age| ages.since(age, at(1050)).as_secs();
        // Used in the present step, in the one that ended at 1030, in the first.
        assert_eq!((since(0), since(1), since(2)), (0, 20, 40));
        // Before opening.
        assert_eq!((since(3), since(12)), (50 + 64, 50 + 640));
    }

    #[test]
    fn after_a_long_time_without_a_look_the_steps_were_longer() {
        let ages = RecencyClock::new(at(0));
        assert_eq!(ages.epoch(at(64 * 3200)), 32);
        assert_eq!(ages.since(32, at(64 * 3200)).as_secs(), 64 * 3100);
        assert_eq!(ages.since(1, at(64 * 3200)).as_secs(), 0);
    }

    #[test]
    fn steps_grow_with_the_time_since_opening_so_that_they_tell_most_of_it_apart() {
        let ages = RecencyClock::new(at(0));
        let (mut minutes, mut before) = (0, 0);
        // Ninety days in which nothing is written.
        while minutes < 90 * 24 * 60 {
            minutes += 1;
            ages.epoch(at(minutes * 60));
            let steps = ages.steps();
            assert!(steps >= before && steps - before <= 1);
            before = steps;
        }
        let days = |age: u32| ages.steps_in(Duration::from_secs(u64::from(age) * 86_400), at(minutes * 60));
        for age in 1..90 {
            assert!(days(age) > days(age - 1), "days {age} and before");
            assert!(age > 70 || days(age) < u32::from(AGE_MAX), "blocks by themselves, {age} days");
        }
        assert_eq!(u64::from(days(90)), before);
        assert!(days(400) > days(365) && days(365) > days(90), "before opening");
    }

    #[test]
    fn a_time_in_steps_is_never_too_long_and_keeps_the_order() {
        let ages = RecencyClock::new(at(1000));
        for second in 1000..1200 {
            ages.wrote(if second % 7 == 0 { 3000 } else { 400 }, 256_000, at(second));
        }
        let now = at(1200);
        for age in 0..u16::try_from(ages.steps()).unwrap() {
            // What was used just before that step ended.
            let steps = ages.steps_in(ages.since(age, now), now);
            assert!(steps <= u32::from(age), "{steps} steps, used {age} steps ago");
        }
        let steps: Vec<_> =
            (0..5000).map(|age| ages.steps_in(Duration::from_millis(age * 100), now)).collect();
        assert!(steps.is_sorted());
        assert_eq!(ages.steps_in(Duration::from_secs(200 + 640), now), ages.steps() as u32 + 10);
    }

    #[test]
    fn the_time_before_opening_is_told_apart_for_years_and_in_one_order() {
        let mut before = 0;
        for minutes in 0..2 * 365 * 24 * 60 {
            let steps = steps_before(minutes * 60);
            assert!(steps == before || steps == before + 1, "{minutes} minutes");
            before = steps;
        }
        for steps in 1..before {
            let ended = seconds_before(steps);
            assert_eq!((steps_before(ended), steps_before(ended - 1)), (steps, steps - 1));
        }
        let (day, days) = (steps_before(24 * 60 * 60), steps_before(5 * 24 * 60 * 60));
        assert!(day < u64::from(AGE_MAX) && u64::from(AGE_MAX) < days, "{day} {days}");
        let hugest = (steps_before(u64::MAX), seconds_before(u64::from(u16::MAX)));
        assert!(hugest.0 < 20_000 && hugest.1 > 0, "{hugest:?}");
    }

    #[test]
    fn a_block_is_as_old_as_its_step_says_and_in_an_old_record_as_that() {
        assert_eq!(
            (RecencyClock::age(7, 3), RecencyClock::age(3, 7), RecencyClock::age(5, 5000)),
            (7, 7, 5000)
        );
    }

    #[test]
    fn ages_go_round() {
        let ages = RecencyClock::new(at(0));
        let mut written = 0;
        while ages.steps() < 3000 {
            ages.wrote(1000, 256_000, at(written));
            written += 1;
            assert_eq!(u64::from(ages.epoch(at(written - 1))), ages.steps() % u64::from(EPOCHS));
        }
        assert_eq!(ages.since(880, at(2999)).as_secs(), 879);
    }
}
