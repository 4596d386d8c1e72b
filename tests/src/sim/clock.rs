//! The simulated clocks: a monotonic one that only the world moves, and a wall clock that can misbehave.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use kvarts_contract::clock::{Clock, Nanos};

/// Time as a simulated machine sees it.
#[derive(Debug)]
pub struct SimClock {
    now: AtomicU64,
    /// Wall time in milliseconds when the monotonic clock stood at zero, plus every jump since.
    wall: AtomicI64,
    /// How much faster the wall clock runs, in millionths.
    drift: AtomicI64,
    frozen: AtomicBool,
    frozen_at: AtomicI64,
}

impl SimClock {
    /// Monotonic zero, at the given wall time.
    pub fn new(unix_millis: u64) -> Arc<Self> {
        Arc::new(Self {
            now: AtomicU64::new(0),
            wall: AtomicI64::new(unix_millis.cast_signed()),
            drift: AtomicI64::new(0),
            frozen: AtomicBool::new(false),
            frozen_at: AtomicI64::new(0),
        })
    }

    /// Moves time on to `at`; a point in the past changes nothing.
    pub fn advance_to(&self, at: Nanos) {
        self.now.fetch_max(at.0, Ordering::SeqCst);
    }

    /// Sets the wall clock forward, or back.
    pub fn jump_wall(&self, by_millis: i64) {
        self.wall.fetch_add(by_millis, Ordering::SeqCst);
    }

    /// Lets the wall clock run faster (or slower) than the monotonic one: by `millionths` millionths of the time so far.
    pub fn drift_wall(&self, millionths: i64) {
        self.drift.store(millionths, Ordering::SeqCst);
    }

    /// Stops the wall clock where it is, or lets it go on from where it would be by now.
    pub fn freeze_wall(&self, frozen: bool) {
        self.frozen_at.store(self.running_wall(), Ordering::SeqCst);
        self.frozen.store(frozen, Ordering::SeqCst);
    }

    fn running_wall(&self) -> i64 {
        let nanos = i128::from(self.now.load(Ordering::SeqCst));
        let drift = nanos * i128::from(self.drift.load(Ordering::SeqCst)) / 1_000_000;
        let millis = i64::try_from((nanos + drift) / 1_000_000).unwrap_or(i64::MAX);
        self.wall.load(Ordering::SeqCst).saturating_add(millis)
    }
}

impl Clock for SimClock {
    fn now(&self) -> Nanos {
        Nanos(self.now.load(Ordering::SeqCst))
    }

    fn unix_millis(&self) -> u64 {
        let frozen = self.frozen.load(Ordering::SeqCst);
        let wall = if frozen { self.frozen_at.load(Ordering::SeqCst) } else { self.running_wall() };
        u64::try_from(wall).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wall_clock_jumps_drifts_and_freezes_while_the_monotonic_one_goes_on() {
        let clock = SimClock::new(1000);
        clock.advance_to(Nanos(2_000_000_000));
        assert_eq!(clock.unix_millis(), 3000);
        clock.jump_wall(-2500);
        assert_eq!((clock.now(), clock.unix_millis()), (Nanos(2_000_000_000), 500));
        clock.drift_wall(100_000);
        assert_eq!(clock.unix_millis(), 700);
        clock.freeze_wall(true);
        clock.advance_to(Nanos(9_000_000_000));
        assert_eq!((clock.now(), clock.unix_millis()), (Nanos(9_000_000_000), 700));
        clock.freeze_wall(false);
        assert_eq!(clock.unix_millis(), 8400);
        clock.jump_wall(-100_000);
        assert_eq!(clock.unix_millis(), 0);
    }
}
