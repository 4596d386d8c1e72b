//! How long clients are waited for.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvarts_wire::limits::{FIRST_REQUEST_STALLS, IDLE_STALLS, STALL};

/// How long a client may take nothing of an answer before it loses it: [`STALL`], if nobody says otherwise.
#[derive(Debug)]
pub struct Patience(AtomicU64);

impl Default for Patience {
    fn default() -> Self {
        Self(AtomicU64::new(STALL.as_millis() as u64))
    }
}

impl Patience {
    /// So long.
    pub fn get(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }

    /// How long a connection may be without its first call that is let in.
    pub fn first_request(&self) -> Duration {
        self.get() * FIRST_REQUEST_STALLS
    }

    /// How long a connection may be without a call after that.
    pub fn idle(&self) -> Duration {
        self.get() * IDLE_STALLS
    }

    /// So long from now on, in whole milliseconds: for tests, which do not wait for [`STALL`].
    pub fn set(&self, patience: Duration) {
        self.0.store(u64::try_from(patience.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}
