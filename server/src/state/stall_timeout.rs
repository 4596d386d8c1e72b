//! How long the server waits for a client that takes nothing, or asks for nothing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvarts_wire::limits::{FIRST_REQUEST_STALLS, IDLE_STALLS, STALL};

/// How long a client may take nothing of an answer before it loses it: [`STALL`] by default.
#[derive(Debug)]
pub struct StallTimeout(AtomicU64);

impl Default for StallTimeout {
    fn default() -> Self {
        Self(AtomicU64::new(STALL.as_millis() as u64))
    }
}

impl StallTimeout {
    /// The time that is waited now.
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

    /// Waits this long from now on, in whole milliseconds: for tests, which do not wait for [`STALL`].
    pub fn set(&self, stall_timeout: Duration) {
        self.0.store(u64::try_from(stall_timeout.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}
