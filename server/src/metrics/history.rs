//! Takes the samples of the last hour.

use std::sync::Arc;

use crate::counters::history::{EVERY, Sample};
use crate::state::ServerState;

/// Takes samples until the future is dropped.
pub async fn keep(state: Arc<ServerState>) {
    loop {
        let live = state.engine.stats().space.total.live;
        let sample = Sample { live, ..state.metrics.sample() };
        state.metrics.history.add(state.clock().unix_millis(), sample);
        tokio::time::sleep(EVERY).await;
    }
}
