//! Sessions: opened, forked, extended, renewed, handed over, closed and listed.
//!
//! What a session holds are leases of the store ([`TenantSessions`]). Chains are claimed last (`owning`): a call that is broken off there
//! leaves a session that ends with its lease.

pub(crate) mod owning;
mod turn;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvarts_cluster::sessions::{Name, Refused, Seen};
use kvarts_contract::error::Reason;
use kvarts_wire::{busy, proto};

use super::call::Call;
use super::fault::{Fault, Outcome};
use super::heavy::{self, heavily};
use super::store::may_hold;
use super::{convert, limits};
use crate::state::sessions::holding::{Failed, TenantSessions};
use crate::state::sessions::{Place, instant};

/// Sessions in an answer.
const LISTED_MAX: usize = 1000;

impl From<Failed> for Fault {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Refused(refused) => fault(refused),
            Failed::Store(error) => error.into(),
            Failed::NoKeys(what) => Self::malformed(what),
        }
    }
}

/// A refusal as its caller is told.
fn fault(refused: Refused) -> Fault {
    match refused {
        Refused::Unknown => Reason::LeaseEnded.into(),
        Refused::HandedOver => Fault::forbidden("the session was handed over to another node"),
        Refused::OutOfOrder { from, blocks } => Fault::malformed(format!(
            "first_block: an index from {from} to {blocks} is required, because the keys must follow the \
            blocks of the session"
        )),
        Refused::Diverged => Fault::malformed(
            "keys: the last key differs from the key of the session's block at this position: fork the \
            session instead",
        ),
        Refused::Beyond { blocks } => Fault::malformed(format!(
            "blocks: a number from 0 (all) to {blocks} is required, because the parent has {blocks} blocks"
        )),
        Refused::OtherTip => Fault::malformed("key: the key differs from the key of the parent's last block"),
        Refused::Fewer { blocks } => Fault::malformed(format!(
            "keys: the session with this number has {blocks} blocks: give the keys of all its blocks"
        )),
        Refused::Taken => Fault::malformed(
            "session: the number belongs to an open session, or to a session of another namespace or chain: \
            set 0 to open a new session",
        ),
        Refused::Grants => Fault::malformed(
            "the session's limit of leases is reached: extend the session from the first block that its \
            parent does not share, with the keys of all blocks from there on",
        ),
        Refused::Depth => Fault::malformed("the chain of forked sessions is too long: open a new session"),
        Refused::Full => Fault::busy(busy::SESSIONS),
    }
}

fn name(call: &Call, id: u64) -> Name {
    Name { tenant: call.caller.tenant.number, id }
}

/// The sessions of the caller's tenant.
fn of(call: &Call) -> TenantSessions<'_> {
    TenantSessions::new(&call.state.sessions, &call.state.engine, call.caller.tenant.number)
}

fn now(call: &Call) -> Duration {
    instant(call.state.clock().now())
}

/// How long a session is to last.
fn lease(call: &Call, milliseconds: u64) -> Outcome<Duration> {
    let hold = convert::hold(milliseconds)
        .ok_or_else(|| Fault::malformed("lease_ms: a duration above 0 is required"))?;
    may_hold(call, hold)?;
    Ok(hold)
}

fn columns(wire: &[proto::Column]) -> Outcome<Vec<Place>> {
    if wire.len() > limits::SESSION_COLUMNS_MAX {
        return Err(Reason::TooMany("columns").into());
    }
    wire.iter().map(|column| convert::column(Some(column))).collect()
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Opens a session.
pub(crate) async fn open(call: Arc<Call>, wire: proto::OpenSessionRequest) -> Outcome<proto::SessionReply> {
    let places = columns(&wire.columns)?;
    let (entries, of) = (heavy::of_keys(&wire.keys).saturating_mul(places.len()), places.clone());
    let reply = heavily(Arc::clone(&call), entries, move |call| begin(call, &wire, &of)).await?;
    Ok(owning::claim(&call, name(&call, reply.session), &places, reply).await)
}

fn begin(call: &Call, wire: &proto::OpenSessionRequest, columns: &[Place]) -> Outcome<proto::SessionReply> {
    let (state, lease) = (&call.state, lease(call, wire.lease_ms)?);
    let keys = convert::keys(&wire.keys)?;
    let model = state.models.get(&call.caller, convert::namespace(&wire.namespace)?)?;
    model.used(state.clock().unix_millis());
    let id = if wire.session == 0 { state.secret_number().max(1) } else { wire.session };
    let held = of(call).open(id, model.namespace, (&keys, wire.shared_blocks), columns, lease)?;
    let turn = turn::Facts { before: 0, stored: held.leading, blocks: keys.len() as u32, forked: false };
    let reply = turn.reply(call, &model, wire.turn.as_ref())?;
    Ok(proto::SessionReply { session: id, held: held.blocks, lease_ms: millis(lease), ..reply })
}

/// Opens a session that goes on from blocks of another one.
pub(crate) async fn fork(call: Arc<Call>, wire: proto::ForkSessionRequest) -> Outcome<proto::SessionReply> {
    let (state, lease) = (&call.state, lease(&call, wire.lease_ms)?);
    let seen = of(&call).see(wire.session).ok_or(Reason::LeaseEnded)?;
    let stand = seen.stand;
    let model = state.models.get(&call.caller, stand.namespace)?;
    let blocks = if wire.blocks == 0 { stand.blocks } else { wire.blocks };
    let tip = match convert::keys(&wire.key)?.as_slice() {
        [key] => *key,
        [] if blocks == stand.blocks => stand.tip,
        _ => {
            return Err(Fault::malformed(
                "key: 32 bytes are required: the key of the last block that the fork shares with its parent",
            ));
        }
    };
    let id = state.secret_number().max(1);
    of(&call).fork(id, wire.session, (blocks, tip), lease)?;
    let turn = turn::Facts { before: blocks, stored: blocks, blocks, forked: true };
    let reply = turn.reply(&call, &model, wire.turn.as_ref())?;
    let reply = proto::SessionReply { session: id, lease_ms: millis(lease), ..reply };
    Ok(owning::claim(&call, name(&call, id), &[], reply).await)
}

/// Goes on with a session.
pub(crate) async fn extend(
    call: Arc<Call>,
    wire: proto::ExtendSessionRequest,
) -> Outcome<proto::SessionReply> {
    let places = columns(&wire.columns)?;
    let (entries, of) = (heavy::of_keys(&wire.keys).saturating_mul(places.len()), places.clone());
    let reply = heavily(Arc::clone(&call), entries, move |call| go_on(call, &wire, &of)).await?;
    Ok(owning::claim(&call, name(&call, reply.session), &places, reply).await)
}

fn go_on(call: &Call, wire: &proto::ExtendSessionRequest, columns: &[Place]) -> Outcome<proto::SessionReply> {
    let (sessions, keys) = (of(call), convert::keys(&wire.keys)?);
    let blocks = (wire.first_block, keys.as_slice());
    let known = sessions.may_extend(wire.session, blocks, columns.len())?;
    let model = call.state.models.get(&call.caller, known.stand.namespace)?;
    model.used(call.state.clock().unix_millis());
    let other = if wire.lease_ms > 0 { Some(lease(call, wire.lease_ms)?) } else { None };
    let held = sessions.extend(wire.session, blocks, columns, other)?;
    let before = known.stand.blocks;
    let (stored, end) = (wire.first_block + held.leading, wire.first_block + keys.len() as u32);
    let (stored, blocks) = (before.max(stored), before.max(end));
    let turn = turn::Facts { before, stored, blocks, forked: false };
    let reply = turn.reply(call, &model, wire.turn.as_ref())?;
    let left = sessions.see(wire.session).map_or(Duration::ZERO, |seen| seen.left);
    Ok(proto::SessionReply { session: wire.session, held: held.blocks, lease_ms: millis(left), ..reply })
}

/// Makes a session last longer, or less long.
pub(crate) fn renew(call: &Call, wire: &proto::RenewSessionRequest) -> Outcome<proto::RenewSessionReply> {
    let lease = lease(call, wire.lease_ms)?;
    of(call).renew(wire.session, lease)?;
    Ok(proto::RenewSessionReply { lease_ms: millis(lease) })
}

/// Lets a session go on at another node.
pub(crate) async fn hand_over(
    call: Arc<Call>,
    wire: proto::HandOverSessionRequest,
) -> Outcome<proto::HandOverSessionReply> {
    let (stand, is_chain_free) = of(&call).hand_over(wire.session)?;
    owning::release(&call.state).await;
    let tip = Bytes::copy_from_slice(&stand.tip.0);
    Ok(proto::HandOverSessionReply { blocks: stand.blocks, tip, is_chain_free })
}

/// Ends a session.
pub(crate) async fn close(
    call: Arc<Call>,
    wire: proto::CloseSessionRequest,
) -> Outcome<proto::CloseSessionReply> {
    let ended_now = of(&call).close(wire.session);
    if ended_now {
        owning::release(&call.state).await;
    }
    Ok(proto::CloseSessionReply { ended_now })
}

/// The sessions of the caller's tenant.
pub(crate) fn list(call: &Call, wire: &proto::ListSessionsRequest) -> proto::ListSessionsReply {
    let (table, now) = (call.state.sessions.table(), now(call));
    let mut found = match wire.session {
        0 => table.list(name(call, wire.after.saturating_add(1)), LISTED_MAX + 1, now),
        id => table.see(name(call, id), now).map(|seen| (id, seen)).into_iter().collect(),
    };
    let more = found.len() > LISTED_MAX;
    found.truncate(LISTED_MAX);
    proto::ListSessionsReply { sessions: found.iter().map(|(id, seen)| told(*id, seen)).collect(), more }
}

fn told(session: u64, seen: &Seen) -> proto::list_sessions_reply::Session {
    let (parent, parent_blocks) = seen.parent.unwrap_or_default();
    proto::list_sessions_reply::Session {
        session,
        namespace: Bytes::copy_from_slice(seen.stand.namespace.as_bytes()),
        blocks: seen.stand.blocks,
        tip: Bytes::copy_from_slice(&seen.stand.tip.0),
        parent,
        parent_blocks,
        forks: u32::try_from(seen.forks).unwrap_or(u32::MAX),
        leases: u32::try_from(seen.grants).unwrap_or(u32::MAX),
        left_ms: millis(seen.left),
        is_handed_over: seen.is_handed_over,
    }
}
