//! Where reads run, and the time that they go by.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use kvarts_contract::clock::{Clock, Nanos};
use tokio::runtime::Handle;

/// A task that may run anywhere.
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Time, timers and a place to run.
pub trait Runner: Send + Sync + fmt::Debug {
    /// The time, by the clock that deadlines are of.
    fn now(&self) -> Nanos;
    /// Completes at or after `at`.
    fn sleep_until(&self, at: Nanos) -> Task;
    /// Runs a task to its end.
    fn spawn(&self, task: Task);
}

/// Sleeps for a while.
pub(crate) fn sleep(runner: &dyn Runner, time: Duration) -> Task {
    runner.sleep_until(runner.now().plus(time))
}

/// What comes of something, unless it takes longer.
pub(crate) async fn in_time<T>(
    runner: &dyn Runner,
    time: Duration,
    what: impl Future<Output = T>,
) -> Option<T> {
    match select(std::pin::pin!(what), sleep(runner, time)).await {
        Either::Left((done, _)) => Some(done),
        Either::Right(_) => None,
    }
}

/// Reads that run on tokio.
#[derive(Debug)]
pub struct OnTokio {
    clock: Arc<dyn Clock>,
    handle: Handle,
}

impl OnTokio {
    /// With this clock, on this runtime.
    pub fn new(clock: Arc<dyn Clock>, handle: Handle) -> Self {
        Self { clock, handle }
    }
}

impl Runner for OnTokio {
    fn now(&self) -> Nanos {
        self.clock.now()
    }

    fn sleep_until(&self, at: Nanos) -> Task {
        let clock = Arc::clone(&self.clock);
        Box::pin(async move { tokio::time::sleep(at.since(clock.now())).await })
    }

    fn spawn(&self, task: Task) {
        self.handle.spawn(task);
    }
}
