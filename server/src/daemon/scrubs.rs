//! Runs of the scrubber, one after the other, for as long as a server lasts.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::state::ServerState;

/// How long a server waits before its first run, if runs are not more often than that.
const FIRST: Duration = Duration::from_secs(3600);

/// Runs again and again, so long after each other, until the future is dropped.
pub(super) async fn keep(state: Arc<ServerState>, every: Duration, pace: u64) {
    let mut wait = every.min(FIRST);
    loop {
        sleep(wait).await;
        wait = every;
        match state.scrub.run(&state.engine, Some(pace)).await {
            Ok(report) => tracing::info!(
                blocks = report.blocks_checked,
                bytes = report.bytes_checked,
                damaged = report.blocks_damaged,
                passed_over = report.blocks_passed_over,
                "scrubbed"
            ),
            Err(reason) => tracing::warn!(%reason, "the scrub was interrupted"),
        }
    }
}
