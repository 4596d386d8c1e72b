//! The machine's clocks, and tokio's timers.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kvarts_cold::Time;
use kvarts_cold::time::BoxFuture;

/// Real time.
#[derive(Clone, Copy, Debug)]
pub struct TokioTime(Instant);

impl TokioTime {
    /// Clocks that begin now.
    #[must_use]
    pub fn start() -> Self {
        Self(Instant::now())
    }
}

impl Time for TokioTime {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn wall_ms(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }

    fn sleep(&self, long: Duration) -> BoxFuture<'static, ()> {
        Box::pin(async move { tokio::time::sleep(long).await })
    }
}
