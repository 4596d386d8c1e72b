//! Time and threads, as this room sees them: the one place where either is made.
//!
//! The emulated device sleeps as long as a real one would work, and the pipeline has a thread that follows the
//! store's announcements. Both come from here, so that a test can let modelled time pass without waiting for it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvarts_contract::clock::SystemClock;
use kvarts_contract::clock::{Clock, Nanos};

/// A clock that can be waited for.
pub trait Pace: Send + Sync + fmt::Debug {
    /// Now.
    fn now(&self) -> Nanos;
    /// Returns when it is `at`, never before.
    fn sleep_until(&self, at: Nanos);
}

/// Real time and real sleeps.
#[derive(Debug)]
pub struct RealPace(Arc<dyn Clock>);

impl RealPace {
    /// The system's monotonic clock.
    pub fn new() -> Arc<Self> {
        Arc::new(Self(SystemClock::new()))
    }
}

impl Pace for RealPace {
    fn now(&self) -> Nanos {
        self.0.now()
    }

    #[allow(
        clippy::disallowed_methods,
        reason = "all other code uses the real time and real threads through these functions"
    )]
    fn sleep_until(&self, at: Nanos) {
        loop {
            let left = at.since(self.now());
            if left == Duration::ZERO {
                return;
            }
            std::thread::sleep(left);
        }
    }
}

/// Time that passes only when a caller waits for it: no thread ever sleeps.
#[derive(Debug, Default)]
pub struct ModelPace(AtomicU64);

impl Pace for ModelPace {
    fn now(&self) -> Nanos {
        Nanos(self.0.load(Ordering::Acquire))
    }

    fn sleep_until(&self, at: Nanos) {
        self.0.fetch_max(at.0, Ordering::AcqRel);
    }
}

/// A thread that is joined when its owner goes, unless it was let go.
#[derive(Debug)]
pub(crate) struct Worker(Option<JoinHandle<()>>);

impl Worker {
    /// Runs `work` on a thread of its own.
    #[allow(
        clippy::disallowed_methods,
        reason = "all other code uses the real time and real threads through these functions"
    )]
    pub(crate) fn start(name: &str, work: impl FnOnce() + Send + 'static) -> Result<Self, String> {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
        Ok(Self(Some(thread.map_err(|error| format!("the thread {name} could not be started: {error}"))?)))
    }

    /// Leaves it to itself: it ends when what it waits for does.
    pub(crate) fn let_go(&mut self) {
        self.0 = None;
    }

    /// Waits until it has ended.
    pub(crate) fn join(&mut self) {
        if let Some(thread) = self.0.take() {
            // What made it panic has been said on standard error; its channels are closed, so waiters know.
            let _ = thread.join();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.join();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn real_sleep_never_ends_early_and_modelled_time_does_not_wait() {
        let pace = RealPace::new();
        let at = pace.now().plus(Duration::from_micros(300));
        pace.sleep_until(at);
        assert!(pace.now() >= at);
        let model = ModelPace::default();
        model.sleep_until(Nanos(1 << 60));
        model.sleep_until(Nanos(5));
        assert_eq!(model.now(), Nanos(1 << 60));
    }
}
