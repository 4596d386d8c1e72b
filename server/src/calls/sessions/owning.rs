//! The chains of sessions: claimed for this node in a cluster, renewed as long as a session stands on them, and released with the last one.
//!
//! A lease of a chain lasts for a minute. A node that dies owns nothing after that.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, future, stream};
use kvarts_cluster::ownership::{LEASE_MAX, Token};
use kvarts_cluster::sessions::{ChainName, Name};
use kvarts_peer::node::{ClusterNode, lease_of};
use kvarts_wire::proto;
use proto::chain_reply::What;
use proto::chain_request::Ask;

use super::super::call::Call;
use crate::state::ServerState;
use crate::state::sessions::{Place, instant};

/// How old a lease of a chain is when it is renewed.
const RENEW_AFTER: Duration = Duration::from_secs(20);
/// Questions about chains at a time.
const ASKED_AT_ONCE: usize = 32;

async fn ask(
    node: &Arc<ClusterNode>,
    (namespace, head): ChainName,
    (group, coordinate): Place,
    (ask, token): (Ask, Token),
) -> Option<proto::ChainReply> {
    let asked = proto::ChainRequest {
        node: node.id().0.to_vec().into(),
        ask: Some(ask),
        token_epoch: token.epoch,
        token_number: token.number,
        ..proto::ChainRequest::default()
    };
    node.chain_of((namespace, group, coordinate), head, asked).await.ok()
}

fn hold_ms() -> u64 {
    u64::try_from(LEASE_MAX.as_millis()).unwrap_or(u64::MAX)
}

/// Claims the chain on which a session stands, as far as this node does not own it, and tells who does.
pub(super) async fn claim(
    call: &Call,
    name: Name,
    places: &[Place],
    mut reply: proto::SessionReply,
) -> proto::SessionReply {
    let state = &call.state;
    let Some(node) = &state.decided.cluster else { return reply };
    let now = || instant(state.clock().now());
    let Some(seen) = state.sessions.table().see(name, now()) else { return reply };
    let chain = (name.tenant, (seen.stand.namespace, seen.stand.head));
    let owned = state.sessions.claim(&chain);
    let is_owned = |place: &Place| owned.as_ref().is_some_and(|claim| claim.tokens.contains_key(place));
    let asked = now();
    let wanted = places.iter().filter(|place| !is_owned(place)).map(|place| async {
        let claimed = ask(node, chain.1, *place, (Ask::ClaimMs(hold_ms()), Token::default())).await;
        (*place, claimed)
    });
    for (place, answer) in future::join_all(wanted).await {
        let Some(answer) = answer else { continue };
        let own = lease_of(&answer).filter(|(owner, _)| *owner == node.id()).map(|(_, token)| token);
        if let Some(token) = own.filter(|_| answer.what() == What::Granted) {
            state.sessions.claimed(chain, place, token, asked);
        }
        reply.owner = answer.lease.or(reply.owner);
    }
    if let Some(claim) = state.sessions.claim(&chain) {
        reply.is_owner = places.iter().all(|place| claim.tokens.contains_key(place));
        if let Some(token) = claim.tokens.values().next().filter(|_| reply.is_owner) {
            let left = (claim.asked + LEASE_MAX).saturating_sub(now());
            reply.owner = Some(proto::OwnerLease {
                node: node.id().0.to_vec().into(),
                token_epoch: token.epoch,
                token_number: token.number,
                left_ms: left.as_millis().try_into().unwrap_or(u64::MAX),
            });
        }
    }
    reply
}

/// Releases the chains on which no session of this node stands any more.
pub(crate) async fn release(state: &Arc<ServerState>) {
    let Some(node) = &state.decided.cluster else { return };
    let over: Vec<_> = state.sessions.free();
    let each = over.iter().flat_map(|(chain, claim)| claim.tokens.iter().map(move |of| (*chain, of)));
    let asked = each.map(|(chain, (place, token))| ask(node, chain, *place, (Ask::Release(true), *token)));
    let asked: Vec<_> = asked.collect();
    // Each question has a time of its own between nodes.
    stream::iter(asked).buffer_unordered(ASKED_AT_ONCE).for_each(|_| future::ready(())).await;
}

/// Renews the leases of chains on which sessions stand. One that is another's meanwhile is not claimed again before a session goes on.
pub(crate) async fn renew(state: &Arc<ServerState>) {
    let Some(node) = &state.decided.cluster else { return };
    let now = instant(state.clock().now());
    let old = state.sessions.to_renew(now.saturating_sub(RENEW_AFTER));
    let each = old.iter().flat_map(|(chain, claim)| claim.tokens.iter().map(move |of| (*chain, of)));
    let asked = each.map(|(chain, (place, token))| async move {
        let answer = ask(node, chain.1, *place, (Ask::RenewMs(hold_ms()), *token)).await;
        match answer.map(|answer| answer.what()) {
            Some(What::Granted) => state.sessions.renewed(chain, *place, *token, Some(now)),
            Some(What::Stale | What::Owned) => state.sessions.renewed(chain, *place, *token, None),
            // Asked again: the node that decides is new, or away.
            _ => {}
        }
    });
    let asked: Vec<_> = asked.collect();
    // Each question has a time of its own between nodes.
    stream::iter(asked).buffer_unordered(ASKED_AT_ONCE).for_each(|()| future::ready(())).await;
}
