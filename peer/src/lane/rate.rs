//! How many bytes a second are served at most, over all connections.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kvarts_contract::clock::Nanos;

/// What may go out at once after a pause.
const BURST: Duration = Duration::from_millis(50);

/// A bucket of bytes. Who asks first goes first.
#[derive(Debug)]
pub(super) struct Rate {
    /// Bytes a second; zero: as many as there are.
    most: AtomicU64,
    /// When the next may go.
    next: Mutex<Nanos>,
}

impl Rate {
    pub(super) fn new(most: Option<u64>) -> Self {
        Self { most: AtomicU64::new(most.map_or(0, |most| most.max(1))), next: Mutex::default() }
    }

    /// From now on `most` bytes a second may go; none: as many as there are.
    pub(super) fn set(&self, most: Option<u64>) {
        self.most.store(most.map_or(0, |most| most.max(1)), Ordering::Relaxed);
    }

    /// When these bytes may go.
    pub(super) fn take(&self, bytes: u64, now: Nanos) -> Nanos {
        let most = self.most.load(Ordering::Relaxed);
        if most == 0 {
            return now;
        }
        let takes = u128::from(bytes) * 1_000_000_000 / u128::from(most);
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let saved = now.0.saturating_sub(BURST.as_nanos() as u64);
        let due = Nanos(next.0.max(saved));
        *next = Nanos(due.0.saturating_add(u64::try_from(takes).unwrap_or(u64::MAX)));
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_at_their_rate_after_a_short_burst_and_a_pause_saves_no_more_than_that() {
        let second = 1_000_000_000;
        let rate = Rate::new(Some(1000));
        let at = |now| rate.take(100, Nanos(now)).0;
        let start = 10 * second;
        let due: Vec<u64> = (0..10).map(|_| at(start)).collect();
        assert!(due[0] <= start && due[9] > start + second / 2 && due[9] <= start + second, "{due:?}");
        assert!(at(20 * second) <= 20 * second && at(20 * second) > 20 * second, "ten seconds are not saved");
        assert_eq!(Rate::new(None).take(u64::MAX, Nanos(5)), Nanos(5));
        assert!(Rate::new(Some(0)).take(u64::MAX, Nanos(0)) <= Nanos(0));
    }
}
