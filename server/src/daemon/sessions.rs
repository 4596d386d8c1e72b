//! Ends sessions whose leases have ended, and keeps the chains of the others, for as long as a server lasts.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::calls::sessions::owning;
use crate::state::ServerState;
use crate::state::sessions::instant;

/// How often what has ended is looked for. What a session held ends by itself at its instant, in the store; this frees its room.
const EVERY: Duration = Duration::from_secs(1);

/// Goes on until the future is dropped.
pub(super) async fn keep(state: Arc<ServerState>) {
    tokio::join!(expiring(&state), owned(&state));
}

async fn expiring(state: &Arc<ServerState>) {
    loop {
        sleep(EVERY).await;
        let state = Arc::clone(state);
        let expire = move || state.sessions.expire(&state.engine, instant(state.clock().now()));
        let expired = tokio::task::spawn_blocking(expire);
        // ends: it goes through leases in memory
        let _ = expired.await;
    }
}

async fn owned(state: &Arc<ServerState>) {
    loop {
        sleep(EVERY).await;
        owning::release(state).await;
        owning::renew(state).await;
    }
}
