//! The seam of time.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

/// A future that may move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Clocks and timers.
pub trait Time: Send + Sync {
    /// Since a start of its own; never goes back.
    fn now(&self) -> Duration;

    /// Milliseconds since 1970.
    fn wall_ms(&self) -> u64;

    /// Ready when this long has passed.
    fn sleep(&self, long: Duration) -> BoxFuture<'static, ()>;
}
