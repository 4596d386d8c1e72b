//! The coarse time by which blocks age: a step passes when a 256th of the budget has been written, and every 64
//! seconds at least.
//!
//! What decides how long a block stays is how much is written meanwhile, not what a clock says: so it is written
//! bytes that make blocks old. The table of when each step began gives an age in seconds back, for what is about time
//! (what is cold, what a checkpoint says of the last use).

use std::time::Duration;

use crate::index::EPOCHS;
use crate::rt::Nanos;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A step lasts no longer, in seconds. Blocks found by recovery are as many such steps old as their age says.
pub(crate) const EPOCH_S: u64 = 64;
/// Older blocks look this old: the coarse time is modulo [`EPOCHS`], so older ones would look new again.
pub(crate) const AGE_MAX: u16 = EPOCHS - 128;
/// Parts of the budget that must have been written for a step to pass.
pub(crate) const STEPS_PER_BUDGET: u64 = 256;
/// Steps that pass at once, at most. Twice as many as this, and as many as may pass before ages are clamped, are
/// together fewer than lie between [`AGE_MAX`] and the end of the coarse time.
const STEPS_AT_ONCE: u64 = 32;
/// Steps after which ages must be clamped.
const CLAMP_EVERY: u64 = 32;

const STEP_NANOS: u64 = EPOCH_S * 1_000_000_000;

/// The coarse time of an open store. Usable from any thread; the figures of one moment may be a step apart.
#[derive(Debug)]
pub(crate) struct Ages {
    opened: Nanos,
    /// Steps since opening.
    steps: AtomicU64,
    /// When the present step began.
    began: AtomicU64,
    /// Bytes written in the present step.
    written: AtomicU64,
    /// When each step began, by its number modulo `EPOCHS`.
    times: Box<[AtomicU64]>,
    /// The step at which ages were clamped last.
    clamped: AtomicU64,
}

impl Ages {
    pub(crate) fn new(now: Nanos) -> Self {
        Self {
            opened: now,
            steps: AtomicU64::new(0),
            began: AtomicU64::new(now.0),
            written: AtomicU64::new(0),
            times: (0..EPOCHS).map(|_| AtomicU64::new(now.0)).collect(),
            clamped: AtomicU64::new(0),
        }
    }

    /// Whether so many steps have passed that ages must be clamped before more do. Only one caller is told so.
    pub(crate) fn must_clamp(&self) -> bool {
        let (steps, clamped) = (self.steps.load(Relaxed), self.clamped.load(Relaxed));
        steps.saturating_sub(clamped) >= CLAMP_EVERY
            && self.clamped.compare_exchange(clamped, steps, Relaxed, Relaxed).is_ok()
    }

    /// The step of this moment, modulo [`EPOCHS`].
    pub(crate) fn epoch(&self, now: Nanos) -> u16 {
        let began = self.began.load(Relaxed);
        let due = now.0.saturating_sub(began) / STEP_NANOS;
        if due > 0 {
            let end = began + due * STEP_NANOS;
            // Who loses finds the steps made by another.
            if self.began.compare_exchange(began, end, Relaxed, Relaxed).is_ok() {
                // Of a longer time the steps are longer: a block's age in seconds stays what it is.
                let passing = due.min(STEPS_AT_ONCE);
                (1..=passing).for_each(|step| self.pass(began + step * due / passing * STEP_NANOS));
            }
        }
        (self.steps.load(Relaxed) % u64::from(EPOCHS)) as u16
    }

    /// `bytes` are written; with a budget of so many.
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
                now.since(self.opened) + Duration::from_secs(before * EPOCH_S)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Nanos {
        Nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn a_step_passes_with_a_share_of_the_budget_or_with_time() {
        let ages = Ages::new(at(100));
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
        let ages = Ages::new(at(1000));
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
        let ages = Ages::new(at(0));
        assert_eq!(ages.epoch(at(64 * 3200)), 32);
        assert_eq!(ages.since(32, at(64 * 3200)).as_secs(), 64 * 3100);
        assert_eq!(ages.since(1, at(64 * 3200)).as_secs(), 0);
    }

    /// Ten budgets are written, in pieces of every size, and no clock looks after the ages.
    #[test]
    fn ages_are_clamped_before_they_wrap_however_fast_bytes_are_written() {
        for piece in [1000, 40_000, 900_000, 3_000_000] {
            let ages = Ages::new(at(0));
            // The block was last used in step 0. Clamping makes its age the greatest; nothing else changes it.
            let (mut age, mut before) = (0u64, 0);
            for _ in 0..(40_000_000 / piece).max(40) {
                ages.wrote(piece, 1_000_000, at(0));
                let steps = ages.steps.load(Relaxed);
                age += steps - before;
                before = steps;
                assert!(age < u64::from(EPOCHS), "it looks new again, pieces of {piece}");
                if ages.must_clamp() {
                    age = age.min(u64::from(AGE_MAX));
                }
            }
            assert!(age >= u64::from(AGE_MAX) && !ages.must_clamp());
        }
    }

    #[test]
    fn ages_go_round() {
        let ages = Ages::new(at(0));
        for step in 0..3000u64 {
            assert_eq!(ages.epoch(at(step * 64)), (step % u64::from(EPOCHS)) as u16);
        }
        assert_eq!(ages.since(880, at(2999 * 64)).as_secs(), 879 * 64);
    }
}
