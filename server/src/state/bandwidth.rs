//! A rate limit: bytes a second, with a second's worth in hand (a token bucket).

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that may pass, refilled as time goes by. May be overdrawn: who overdraws it waits.
#[derive(Debug)]
pub(crate) struct Bandwidth {
    rate: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Negative: overdrawn.
    left: f64,
    at: Instant,
}

#[allow(clippy::disallowed_methods, reason = "the limits of network bandwidth are not simulated")]
fn now() -> Instant {
    Instant::now()
}

impl Bandwidth {
    /// At least one byte a second.
    pub(crate) fn new(rate: u64) -> Self {
        let rate = rate.max(1);
        Self { rate, state: Mutex::new(State { left: rate as f64, at: now() }) }
    }

    /// Takes these bytes and says how long to wait before the next are taken.
    pub(crate) fn spend(&self, bytes: u64) -> Duration {
        self.spend_at(bytes, now())
    }

    /// Takes these bytes if no other has to wait for them.
    pub(crate) fn try_spend(&self, bytes: u64) -> bool {
        let mut state = self.refilled(now());
        let left = state.left - bytes as f64;
        if left >= 0.0 {
            state.left = left;
        }
        left >= 0.0
    }

    /// Gives back what was taken and not used.
    pub(crate) fn give_back(&self, bytes: u64) {
        let mut state = self.refilled(now());
        state.left = (state.left + bytes as f64).min(self.rate as f64);
    }

    fn refilled(&self, now: Instant) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let rate = self.rate as f64;
        let gained = now.saturating_duration_since(state.at).as_secs_f64() * rate;
        state.left = (state.left + gained).min(rate);
        state.at = state.at.max(now);
        state
    }

    fn spend_at(&self, bytes: u64, now: Instant) -> Duration {
        let mut state = self.refilled(now);
        let rate = self.rate as f64;
        state.left -= bytes as f64;
        if state.left >= 0.0 { Duration::ZERO } else { Duration::from_secs_f64(-state.left / rate) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_beyond_a_seconds_worth_wait_their_turn() {
        let share = Bandwidth::new(1000);
        let start = now();
        assert_eq!(share.spend_at(1000, start), Duration::ZERO);
        assert_eq!(share.spend_at(500, start), Duration::from_millis(500));
        assert_eq!(share.spend_at(0, start + Duration::from_millis(500)), Duration::ZERO);
        // What was taken and not used comes back.
        share.give_back(500);
        assert!(share.state.lock().unwrap().left >= 0.0 && !share.try_spend(2000));
        share.state.lock().unwrap().left = 0.0;
        // A long rest fills one second's worth, not more.
        assert_eq!(share.spend_at(2000, start + Duration::from_secs(60)), Duration::from_secs(1));
    }
}
