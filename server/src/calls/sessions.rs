//! Sessions: opened, forked, extended, renewed, handed over, closed and listed.
//!
//! What a session holds are leases of the store, taken before the table hears of them and given back if it refuses them. Chains are
//! claimed last (`owning`): a call that is broken off there leaves a session that ends with its lease.

pub(crate) mod owning;
mod turn;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use kvarts_cluster::sessions::{Grant, Name, Refused, Seen, Stand};
use kvarts_contract::api::{ContainsRequest, LeaseId, LeaseTerms, MAX_MATCH_ENTRIES, Presence};
use kvarts_contract::error::Reason;
use kvarts_layout::BlockKey;
use kvarts_wire::{busy, proto};

use super::call::Call;
use super::fault::{Fault, Outcome};
use super::heavy::{self, heavily};
use super::store::may_hold;
use super::{convert, limits};
use crate::state::Model;
use crate::state::sessions::{Place, instant};

/// Sessions in an answer.
const LISTED_MAX: usize = 1000;

/// A refusal as its caller is told.
fn fault(refused: Refused) -> Fault {
    match refused {
        Refused::Unknown => Reason::LeaseEnded.into(),
        Refused::HandedOver => Fault::forbidden("the session was handed over: it goes on at another node"),
        Refused::OutOfOrder { from, blocks } => Fault::malformed(format!(
            "blocks: those of the session are {from} to {blocks}, and others follow on them or go on from them"
        )),
        Refused::Diverged => Fault::malformed(
            "another block stands there, or another session has that number: fork the session instead",
        ),
        Refused::Grants => Fault::malformed(
            "the session has as many leases as it may: extend it from the first of its own blocks, with all of them",
        ),
        Refused::Depth => Fault::malformed("too many sessions stand one on the other: open one"),
        Refused::Full => Fault::busy(busy::SESSIONS),
    }
}

fn name(call: &Call, id: u64) -> Name {
    Name { tenant: call.caller.tenant.number, id }
}

fn now(call: &Call) -> Duration {
    instant(call.state.clock().now())
}

/// How long a session is to last.
fn lease(call: &Call, milliseconds: u64) -> Outcome<Duration> {
    let hold = convert::hold(milliseconds).ok_or_else(|| Fault::malformed("lease_ms: say for how long"))?;
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

/// Leases that were taken for a session, and are given back unless it has them.
struct Holding<'a> {
    call: &'a Call,
    grants: Vec<Grant>,
    /// Of the blocks those that are held in all columns, and how many of them from the first on.
    held: u32,
    leading: u32,
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        let leases: Vec<u64> = self.grants.iter().map(|grant| grant.lease).collect();
        self.call.state.sessions.give_back(&self.call.state.engine, &leases);
    }
}

/// Holds what is here of blocks of a session, from its block `first` on.
fn hold<'a>(
    call: &'a Call,
    model: &Model,
    columns: &[Place],
    (first, keys): (u32, &[BlockKey]),
    hold: Duration,
) -> Outcome<Holding<'a>> {
    let to = u32::try_from(keys.len()).ok().and_then(|count| first.checked_add(count));
    let to = to.ok_or(Reason::TooMany("blocks"))?;
    if keys.len().saturating_mul(columns.len()) > MAX_MATCH_ENTRIES {
        return Err(Reason::TooMany("blocks").into());
    }
    let mut holding = Holding { call, grants: Vec::new(), held: 0, leading: 0 };
    let mut here = vec![!columns.is_empty(); keys.len()];
    let terms = LeaseTerms { hold, tenant: call.caller.tenant.number, cap_bytes: u64::MAX };
    for &(group, coordinate) in columns {
        let namespace = model.namespace;
        let request = ContainsRequest { namespace, group, coordinate, keys, lease: Some(terms) };
        let found = call.state.store().contains(&request)?;
        let lease = found.lease.map(|lease| Grant { lease: lease.0, from: first, to });
        holding.grants.extend(lease);
        let presence = found.presence.iter().map(|one| *one == Presence::Here);
        here.iter_mut().zip(presence).for_each(|(all, one)| *all &= one);
    }
    holding.held = here.iter().filter(|here| **here).count() as u32;
    holding.leading = here.iter().take_while(|here| **here).count() as u32;
    Ok(holding)
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
    let (Some(&head), Some(&tip)) = (keys.get(wire.shared_blocks as usize), keys.last()) else {
        return Err(Fault::malformed("keys: there is none behind the shared blocks"));
    };
    let model = state.models.get(&call.caller, convert::namespace(&wire.namespace)?)?;
    model.used(state.clock().unix_millis());
    let id = if wire.session == 0 { state.secret_number().max(1) } else { wire.session };
    let (name, now) = (name(call, id), now(call));
    state.sessions.expire(&state.engine, now);
    if !state.sessions.table().has_room(name.tenant, columns.len()) {
        return Err(fault(Refused::Full));
    }
    let mut holding = hold(call, &model, columns, (0, &keys), lease)?;
    let stand = Stand { namespace: model.namespace, head, tip, blocks: keys.len() as u32 };
    let opened = state.sessions.table().open(name, stand, holding.grants.clone(), lease, now);
    opened.map_err(fault)?;
    holding.grants.clear();
    state.sessions.counts.opened.fetch_add(1, Ordering::Relaxed);
    let turn = turn::Facts { before: 0, stored: holding.leading, blocks: stand.blocks, forked: false };
    let reply = turn.reply(call, &model, wire.turn.as_ref())?;
    Ok(proto::SessionReply { session: id, held: holding.held, lease_ms: millis(lease), ..reply })
}

/// Opens a session that goes on from blocks of another one.
pub(crate) async fn fork(call: Arc<Call>, wire: proto::ForkSessionRequest) -> Outcome<proto::SessionReply> {
    let state = &call.state;
    let (lease, now) = (lease(&call, wire.lease_ms)?, now(&call));
    let parent = name(&call, wire.session);
    state.sessions.expire(&state.engine, now);
    let seen = state.sessions.table().see(parent, now).ok_or(Reason::LeaseEnded)?;
    let stand = seen.stand;
    let model = state.models.get(&call.caller, stand.namespace)?;
    let blocks = if wire.blocks == 0 { stand.blocks } else { wire.blocks };
    let tip = match convert::keys(&wire.key)?.as_slice() {
        [key] => *key,
        [] if blocks == stand.blocks => stand.tip,
        _ => return Err(Fault::malformed("key: that of the fork's last block, 32 bytes")),
    };
    let new = Name { id: state.secret_number().max(1), ..parent };
    let held = state.sessions.table().fork(new, parent.id, (blocks, tip), lease, now).map_err(fault)?;
    state.sessions.counts.forked.fetch_add(1, Ordering::Relaxed);
    keep(&call, new, &held, lease)?;
    let turn = turn::Facts { before: blocks, stored: blocks, blocks, forked: true };
    let reply = turn.reply(&call, &model, wire.turn.as_ref())?;
    let reply = proto::SessionReply { session: new.id, lease_ms: millis(lease), ..reply };
    Ok(owning::claim(&call, new, &[], reply).await)
}

/// Has the store keep leases of a session for as long as it lasts. One that the store no longer has ends the session: what stands on it
/// is not held.
fn keep(call: &Call, of: Name, leases: &[u64], hold: Duration) -> Outcome<()> {
    let sessions = &call.state.sessions;
    for lease in leases {
        let Err(error) = call.state.store().renew(LeaseId(*lease), hold) else { continue };
        // Another call may have put a new one in its place.
        let ended = {
            let mut table = sessions.table();
            if table.has(of, *lease) { table.close(of, now(call)) } else { continue }
        };
        sessions.give_back(&call.state.engine, &ended.unwrap_or_default().leases);
        return Err(error.into());
    }
    Ok(())
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
    let (sessions, name) = (&call.state.sessions, name(call, wire.session));
    let keys = convert::keys(&wire.keys)?;
    let (first, count) = (wire.first_block, keys.len() as u32);
    let tip = *keys.last().ok_or(Fault::malformed("keys: there is none"))?;
    let known = {
        let (table, now) = (sessions.table(), now(call));
        table.may_extend(name, (first, count, tip), columns.len(), now).map_err(fault)?;
        table.see(name, now).ok_or(Reason::LeaseEnded)?
    };
    let model = call.state.models.get(&call.caller, known.stand.namespace)?;
    model.used(call.state.clock().unix_millis());
    if wire.lease_ms > 0 {
        renew(call, &proto::RenewSessionRequest { session: wire.session, lease_ms: wire.lease_ms })?;
    }
    let begun = now(call);
    let left = sessions.table().left(name, begun).map_err(fault)?;
    let mut holding = hold(call, &model, columns, (first, &keys), left)?;
    let (over, later) = {
        let (mut table, now) = (sessions.table(), now(call));
        let over = table.extend(name, (first, count, tip), holding.grants.clone(), now).map_err(fault)?;
        // Meanwhile it may have been renewed, or forked for longer.
        let left_now = table.left(name, now).map_err(fault)?;
        (over, (now + left_now > begun + left).then_some(left_now))
    };
    sessions.give_back(&call.state.engine, &over);
    let new: Vec<u64> = std::mem::take(&mut holding.grants).iter().map(|grant| grant.lease).collect();
    if let Some(left) = later {
        keep(call, name, &new, left)?;
    }
    sessions.counts.extended.fetch_add(1, Ordering::Relaxed);
    let before = known.stand.blocks;
    let (stored, blocks) = (before.max(first + holding.leading), before.max(first + count));
    let turn = turn::Facts { before, stored, blocks, forked: false };
    let reply = turn.reply(call, &model, wire.turn.as_ref())?;
    let left = sessions.table().see(name, now(call)).map_or(Duration::ZERO, |seen| seen.left);
    Ok(proto::SessionReply { session: wire.session, held: holding.held, lease_ms: millis(left), ..reply })
}

/// Makes a session last longer, or less long.
pub(crate) fn renew(call: &Call, wire: &proto::RenewSessionRequest) -> Outcome<proto::RenewSessionReply> {
    let (name, lease) = (name(call, wire.session), lease(call, wire.lease_ms)?);
    let leases = call.state.sessions.table().renew(name, lease, now(call)).map_err(fault)?;
    keep(call, name, &leases, lease)?;
    Ok(proto::RenewSessionReply { lease_ms: millis(lease) })
}

/// Lets a session go on at another node.
pub(crate) async fn hand_over(
    call: Arc<Call>,
    wire: proto::HandOverSessionRequest,
) -> Outcome<proto::HandOverSessionReply> {
    let sessions = &call.state.sessions;
    let (stand, is_chain_free) =
        sessions.table().hand_over(name(&call, wire.session), now(&call)).map_err(fault)?;
    sessions.counts.handed_over.fetch_add(1, Ordering::Relaxed);
    owning::release(&call.state).await;
    let tip = Bytes::copy_from_slice(&stand.tip.0);
    Ok(proto::HandOverSessionReply { blocks: stand.blocks, tip, is_chain_free })
}

/// Ends a session.
pub(crate) async fn close(
    call: Arc<Call>,
    wire: proto::CloseSessionRequest,
) -> Outcome<proto::CloseSessionReply> {
    let state = &call.state;
    let ended = state.sessions.table().close(name(&call, wire.session), now(&call));
    if let Some(ended) = &ended {
        state.sessions.counts.closed.fetch_add(1, Ordering::Relaxed);
        state.sessions.give_back(&state.engine, &ended.leases);
        owning::release(state).await;
    }
    Ok(proto::CloseSessionReply { ended_now: ended.is_some() })
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
