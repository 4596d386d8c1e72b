//! Whole look-ups: of the own store, and of what reads bring from beyond it. Calls over gRPC and over the local path end here.

use std::sync::Arc;

use kvarts_wire::proto;

use super::call::Call;
use super::fault::Outcome;
use super::heavy::{self, heavily};
use super::{beyond, cold, directory, store};

/// What can be restored of a prompt.
pub(crate) async fn matched(call: Arc<Call>, wire: proto::MatchRequest) -> Outcome<proto::MatchReply> {
    cold::prepare(&call, &wire).await;
    // A plan has to know where everything is before it is made.
    let asks = wire.of_cluster && wire.plan.is_some();
    let together = match call.state.decided.cluster.as_ref().filter(|_| asks) {
        Some(node) => Some(Arc::new(beyond::together(&call, node, &wire).await?)),
        None => None,
    };
    let (entries, asked) = (heavy::of_match(&wire), wire.of_cluster.then(|| wire.clone()));
    let known = together.clone();
    let look = move |call: &Call| store::match_prefix(call, wire, known.as_deref());
    let mut found = heavily(Arc::clone(&call), entries, look).await?;
    if let Some(asked) = asked {
        found.in_cluster = directory::of_cluster(&call, &asked, &found, together.as_deref()).await?;
    }
    Ok(found)
}

/// Which single blocks are there.
pub(crate) async fn exists(call: Arc<Call>, wire: proto::ExistsRequest) -> Outcome<proto::ExistsReply> {
    let (entries, asked) = (heavy::of_keys(&wire.keys), wire.of_cluster.then(|| wire.clone()));
    let found = heavily(Arc::clone(&call), entries, move |call| store::exists(call, wire)).await?;
    match asked {
        Some(asked) => directory::also_elsewhere(call, asked, found).await,
        None => Ok(found),
    }
}
