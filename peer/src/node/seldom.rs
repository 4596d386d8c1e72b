//! What may happen thousands of times a second and is said in the log now and then.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kvarts_contract::clock::Nanos;

/// Until when nothing is said.
#[derive(Debug, Default)]
pub(super) struct Seldom(Mutex<Nanos>);

impl Seldom {
    /// Whether it may be said now: not within `pause` after the last time.
    pub(super) fn may(&self, now: Nanos, pause: Duration) -> bool {
        let mut quiet_until = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let may = *quiet_until <= now;
        if may {
            *quiet_until = now.plus(pause);
        }
        may
    }
}
