//! The calls about blocks that move no bytes: lookups, leases, pins, times, deletion.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvarts_contract::api::{
    ContainsRequest, DeleteOutcome, DeleteReply, DeleteRequest, LeaseId, LeaseTerms, MatchRequest, Missing,
    Presence, Target, TtlRequest,
};
use kvarts_contract::error::Reason;
use kvarts_layout::{BlockKey, NamespaceId};
use kvarts_peer::node::{Away, Column, Deleted};

use super::beyond::{self, Together};
use super::call::Call;
use super::entries::check_entries;
use super::fault::{Fault, Outcome};
use super::{cold, convert, limits};
use crate::counters::Lookup;
use crate::state::{HeldLease, Model, Right};
use kvarts_wire::{busy, plans, proto};

/// Terms of a lease, if one is wanted and the tenant may have one more. How much it may hold the store knows.
fn terms(call: &Call, hold: Option<Duration>, cap: Option<u64>) -> Outcome<Option<LeaseTerms>> {
    let Some(hold) = hold else { return Ok(None) };
    let (state, tenant) = (&call.state, &call.caller.tenant);
    may_hold(call, hold)?;
    if !state.leases.has_room(tenant.number, limits::LEASES_MAX, state.clock().now()) {
        return Err(Fault::busy(busy::LEASES));
    }
    let cap_bytes = cap.unwrap_or(u64::MAX);
    Ok(Some(LeaseTerms { hold, tenant: tenant.number, cap_bytes }))
}

/// Who may read holds what it reads for as long as that takes; for longer than that it needs the right to pin.
pub(super) fn may_hold(call: &Call, hold: Duration) -> Outcome<()> {
    if hold <= limits::READERS_LEASE_MAX || call.caller.rights.has(Right::Pin) {
        return Ok(());
    }
    let most = limits::READERS_LEASE_MAX.as_secs();
    Err(Fault::forbidden(format!(
        "the token lacks the right `pin`: without this right, a lease can last at most {most} s"
    )))
}

/// The name of a lease for its client; 0 for none. It holds this many blocks of the model.
fn named(
    call: &Call,
    (lease, terms): (Option<LeaseId>, Option<LeaseTerms>),
    (model, blocks): (&Arc<Model>, u64),
) -> u64 {
    let (Some(lease), Some(terms)) = (lease, terms) else { return 0 };
    let ends = call.state.clock().now().plus(terms.hold);
    let (method, path) = call.way();
    let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
    let held = HeldLease { lease, ends, model: Arc::clone(model), blocks, method, path };
    let name = call.state.leases.add(terms.tenant, call.state.secret_number(), held);
    name.unwrap_or_else(|| {
        // The tenant was taken away meanwhile.
        call.state.store().unlock(lease);
        0
    })
}

/// The model whose blocks are looked up. Where there is none of that name, that is what became of them.
fn model(call: &Call, namespace: &[u8], blocks: usize) -> Outcome<Arc<Model>> {
    let found = call.state.models.get(&call.caller, convert::namespace(namespace)?);
    match &found {
        Ok(model) => model.used(call.state.clock().unix_millis()),
        Err(_) => call.state.metrics.looked_up_unregistered(&call.caller.tenant.name, blocks as u64),
    }
    Ok(found?)
}

/// Counts what a lookup found.
fn looked_up(call: &Call, model: &Model, found: Lookup) {
    call.state.metrics.looked_up(&call.caller.tenant.name, &model.identity.model, found);
}

/// How many blocks are missing.
fn in_all(missing: &Missing) -> u64 {
    let Missing { evicted, expired, deleted, out_of_service, never_stored, cut_off } = *missing;
    evicted + expired + deleted + out_of_service + never_stored + cut_off
}

fn wire_missing(missing: &Missing) -> proto::Missing {
    let Missing { evicted, expired, deleted, out_of_service, never_stored, cut_off } = *missing;
    proto::Missing { evicted, expired, deleted, out_of_service, never_stored, cut_off }
}

/// Finds the usable prefix. Its plan counts the bucket's blocks too, and other nodes' if it is told what the cluster has together.
pub(crate) fn match_prefix(
    call: &Call,
    wire: proto::MatchRequest,
    together: Option<&Together>,
) -> Outcome<proto::MatchReply> {
    let keys = convert::keys(&wire.keys)?;
    let model = model(call, &wire.namespace, keys.len())?;
    let namespace = model.namespace;
    let requirements = convert::requirements(wire.block_tokens, &wire.requirements)?;
    check_entries(keys.len(), &requirements)?;
    model.requires(&requirements);
    let lease = terms(call, convert::hold(wire.lease_ms), wire.lease_cap_bytes)?;
    let times = wire.plan.as_ref().map(|plan| call.state.times.of(plan.times.as_ref())).transpose()?;
    let request = MatchRequest {
        namespace,
        keys: &keys,
        requirements: &requirements,
        recompute_tokens_max: wire.recompute_tokens_max.unwrap_or(u64::MAX),
        lease,
        plan: None,
    };
    let beyond = wire.plan.as_ref().and_then(|_| beyond::of_plan(call, &request, together));
    let plan = wire.plan.as_ref().zip(times.as_deref());
    let plan = plan.map(|(plan, times)| plans::terms(plan, times, beyond.as_ref())).transpose()?;
    let request = MatchRequest { plan, ..request };
    if let Some(node) = &call.state.decided.cluster {
        for group in requirements.groups() {
            for &coordinate in &group.coordinates {
                node.note_use(&Column { namespace, group: group.group, coordinate, keys: &keys }, None);
            }
        }
    }
    let found = call.state.store().match_prefix(&request)?;
    let here = u64::from(found.usable.longest.blocks).min(keys.len() as u64);
    let missing = found.missing;
    let pending = (keys.len() as u64 - here).saturating_sub(in_all(&missing));
    looked_up(call, &model, Lookup { here, pending, missing, unregistered: 0 });
    let own = found.usable.longest.blocks;
    let usable = cold::offered_prefix(call, &request, &model, own)?.unwrap_or(found.usable);
    let coverage = |one: &kvarts_layout::prefix::Coverage| proto::match_reply::Coverage {
        column: Some(convert::wire_column(one.group, one.coordinate)),
        blocks: one.blocks,
    };
    Ok(proto::MatchReply {
        longest: Some(convert::wire_boundary(&usable.longest)),
        cheapest: Some(convert::wire_boundary(&usable.cheapest)),
        coverage: usable.coverage.iter().map(coverage).collect(),
        pending: found.pending,
        lease: named(call, (found.lease, lease), (&model, here)),
        plan: found.plan.as_deref().map(plans::wire_planned),
        in_cluster: None,
        in_cold: cold::in_cold(call, &request, own)?,
        missing: Some(wire_missing(&found.missing)),
    })
}

/// Says where a request should go, by nodes that are filled in.
pub(crate) fn route(call: &Call, wire: &proto::RouteRequest) -> Outcome<proto::RouteReply> {
    let times = call.state.times.of(wire.times.as_ref())?;
    let mut nodes = plans::nodes(&wire.nodes);
    if let Some(this) = wire.this_node {
        let disk = call.state.engine.disk_link().link;
        for node in nodes.iter_mut().filter(|node| node.node == this) {
            (node.disk_bytes_per_ms, node.disk_queue_ms) = (disk.bytes_per_ms, disk.wait_ms());
        }
    }
    let route = plans::question(wire, &nodes)?.route(&*times);
    Ok(plans::wire_route(&route, if wire.explain { usize::MAX } else { 1 }))
}

/// Says of each block whether it is here.
pub(crate) fn exists(call: &Call, wire: proto::ExistsRequest) -> Outcome<proto::ExistsReply> {
    use proto::exists_reply::Presence as Wire;
    let keys = convert::keys(&wire.keys)?;
    let model = model(call, &wire.namespace, keys.len())?;
    let namespace = model.namespace;
    let (group, coordinate) = convert::column(wire.column.as_ref())?;
    let lease = terms(call, convert::hold(wire.lease_ms), wire.lease_cap_bytes)?;
    let request = ContainsRequest { namespace, group, coordinate, keys: &keys, lease };
    let found = call.state.store().contains(&request)?;
    let count = |wanted| found.presence.iter().filter(|one| **one == wanted).count() as u64;
    let (here, pending) = (count(Presence::Here), count(Presence::Pending));
    looked_up(call, &model, Lookup { here, pending, missing: found.missing, unregistered: 0 });
    // What is to be held must be here.
    let offered = match lease {
        None => cold::offered(call, &request, &model, &found.presence)?,
        Some(_) => None,
    };
    let mut offered = offered.unwrap_or_default().into_iter();
    let presence = |one: &Presence| match (one, offered.next() == Some(true)) {
        (Presence::Here, _) | (Presence::Absent, true) => Wire::Here.into(),
        (Presence::Pending, _) => Wire::Pending.into(),
        (Presence::Absent, false) => Wire::Absent.into(),
    };
    Ok(proto::ExistsReply {
        presence: found.presence.iter().map(presence).collect(),
        lease: named(call, (found.lease, lease), (&model, here)),
        missing: Some(wire_missing(&found.missing)),
        deletes: found.deletes,
    })
}

/// Ends a lease or a pin of the caller's tenant.
pub(crate) fn unlock(call: &Call, wire: &proto::UnlockRequest) -> proto::UnlockReply {
    let lease = call.state.leases.take(call.caller.tenant.number, wire.lease);
    proto::UnlockReply { ended_now: lease.is_some_and(|lease| call.state.store().unlock(lease)) }
}

/// Holds blocks.
pub(crate) fn pin(call: &Call, wire: proto::PinRequest) -> Outcome<proto::PinReply> {
    if wire.hold_ms == 0 {
        return Err(Fault::malformed("hold_ms: a duration above 0 is required"));
    }
    let (namespace, column, keys) = (wire.namespace, wire.column, wire.keys);
    let hold_ms = convert::hold(wire.hold_ms).map_or(0, millis);
    let asked = proto::ExistsRequest {
        namespace,
        column,
        keys,
        lease_ms: hold_ms,
        ..proto::ExistsRequest::default()
    };
    let found = exists(call, asked)?;
    let here = i32::from(proto::exists_reply::Presence::Here);
    let held = found.presence.iter().filter(|one| **one == here).count() as u32;
    Ok(proto::PinReply { lease: found.lease, held, hold_ms: if found.lease == 0 { 0 } else { hold_ms } })
}

/// Whole milliseconds.
fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Pins in an answer.
const PINS_MAX: usize = 1000;

/// What is pinned or leased: of the caller's tenant, or of all for whom may administer.
pub(crate) fn list_pins(call: &Call, wire: &proto::ListPinsRequest) -> Outcome<proto::ListPinsReply> {
    let (state, own) = (&call.state, &call.caller.tenant);
    if wire.of_all && !call.caller.rights.has(Right::Admin) {
        return Err(Fault::forbidden(
            "the token lacks the right `admin`, which is required to list the pins of all tenants",
        ));
    }
    let tenants = match wire.of_all {
        true => state.gate.tenants(),
        false => vec![Arc::clone(own)],
    };
    let now = state.clock().now();
    let numbers: Vec<u32> = tenants.iter().map(|tenant| tenant.number).collect();
    let (listed, more) = state.leases.list(&numbers, now, PINS_MAX);
    let pin = |(tenant, lease, held): (u32, u64, HeldLease)| proto::list_pins_reply::Pin {
        lease: if tenant == own.number { lease } else { 0 },
        tenant: tenants.iter().find(|one| one.number == tenant).map_or("", |one| &one.name).to_owned(),
        namespace: Bytes::copy_from_slice(held.model.namespace.as_bytes()),
        model: held.model.identity.model.clone(),
        blocks: held.blocks,
        ends_in_ms: held.ends.since(now).as_millis().try_into().unwrap_or(u64::MAX),
        method: held.method.to_owned(),
        path: held.path.to_owned(),
    };
    Ok(proto::ListPinsReply { pins: listed.into_iter().map(pin).collect(), more })
}

/// Changes when a lease of the caller's tenant ends.
pub(crate) fn renew(call: &Call, wire: &proto::RenewRequest) -> Outcome<proto::RenewReply> {
    let hold = convert::hold(wire.hold_ms)
        .ok_or_else(|| Fault::malformed("hold_ms: a duration above 0 is required"))?;
    may_hold(call, hold)?;
    let ends = call.state.clock().now().plus(hold);
    let lease = call.state.leases.renew(call.caller.tenant.number, wire.lease, ends);
    call.state.store().renew(lease.ok_or(Reason::LeaseEnded)?, hold)?;
    Ok(proto::RenewReply { hold_ms: millis(hold) })
}

/// Changes how long blocks may live.
pub(crate) fn set_ttl(call: &Call, wire: proto::SetTtlRequest) -> Outcome<proto::SetTtlReply> {
    let keys = convert::keys(&wire.keys)?;
    let namespace = convert::namespace(&wire.namespace)?;
    call.state.models.get(&call.caller, namespace)?;
    let (group, coordinate) = convert::column(wire.column.as_ref())?;
    let ttl = wire.expires_after_ms.map(Duration::from_millis);
    let changed =
        call.state.store().set_ttl(&TtlRequest { namespace, group, coordinate, keys: &keys, ttl })?;
    Ok(proto::SetTtlReply { changed: changed.changed, away: Vec::new() })
}

/// Has other nodes keep none of these blocks for longer than they may live from now on, which the store knows by now.
pub(crate) async fn shorten_elsewhere(
    call: &Call,
    wire: &proto::SetTtlRequest,
    mut reply: proto::SetTtlReply,
) -> Outcome<proto::SetTtlReply> {
    let (Some(node), Some(ttl)) = (&call.state.decided.cluster, wire.expires_after_ms) else {
        return Ok(reply);
    };
    let (keys, namespace) = (convert::keys(&wire.keys)?, convert::namespace(&wire.namespace)?);
    let column = convert::column(wire.column.as_ref())?;
    if keys.is_empty() {
        return Ok(reply);
    }
    let told = node.end_sooner(namespace, column, keys, Duration::from_millis(ttl));
    let told = tokio::time::timeout_at(call.deadline, told).await;
    let told = told.map_err(|_| Reason::DeadlinePassed)??;
    reply.changed.iter_mut().zip(told.were).for_each(|(here, there)| *here |= there);
    reply.away = wire_away(&told.away);
    Ok(reply)
}

/// Nodes that could not be told, for an answer.
fn wire_away(away: &[Away]) -> Vec<proto::NodeAway> {
    let one = |away: &Away| proto::NodeAway {
        node: away.node.0.to_vec().into(),
        address: away.address.clone(),
        trouble: away.trouble.clone(),
    };
    away.iter().map(one).collect()
}

/// Keeps the cold tier from copying these blocks with the time that they had to live; what is wrong with the call is told by the
/// call itself. What it gives is told when the store knows the new time.
pub(crate) async fn shorten_in_cold<'a>(
    call: &'a Call,
    wire: &proto::SetTtlRequest,
) -> Option<crate::cold::Deleting<'a>> {
    let (cold, ttl) = (call.state.decided.cold.as_ref()?, wire.expires_after_ms?);
    let (keys, namespace) = (convert::keys(&wire.keys).ok()?, convert::namespace(&wire.namespace).ok()?);
    call.state.models.get(&call.caller, namespace).ok()?;
    let column = convert::column(wire.column.as_ref()).ok()?;
    Some(cold.shorten(namespace, column, &keys, Duration::from_millis(ttl)).await)
}

/// Changes how long blocks may live whose put does not say.
pub(crate) fn set_default_ttl(
    call: &Call,
    wire: &proto::SetDefaultTtlRequest,
) -> Outcome<proto::SetDefaultTtlReply> {
    let namespace = convert::namespace(&wire.namespace)?;
    call.state.models.get(&call.caller, namespace)?;
    call.state.store().set_default_ttl(namespace, wire.expires_after_ms.map(Duration::from_millis))?;
    Ok(proto::SetDefaultTtlReply {})
}

fn target(wire: Option<proto::delete_request::Target>) -> Outcome<Target> {
    use proto::delete_request::Target as Wire;
    match wire {
        Some(Wire::OfKeys(of)) => {
            let column = of.column.as_ref().map(|column| convert::column(Some(column))).transpose()?;
            Ok(Target::Keys { column, keys: convert::keys(&of.keys)? })
        }
        Some(Wire::Prefix(key)) => {
            let key = <[u8; 32]>::try_from(&key[..])
                .map_err(|_| Fault::malformed("prefix: 32 bytes are required"))?;
            Ok(Target::Prefix(BlockKey(key)))
        }
        Some(Wire::Everything(true)) => Ok(Target::Namespace),
        Some(Wire::Everything(false)) | None => {
            Err(Fault::malformed("target: the target is missing: set keys, prefix or everything"))
        }
    }
}

/// Deletes blocks for good.
pub(crate) async fn delete(
    call: std::sync::Arc<Call>,
    wire: proto::DeleteRequest,
) -> Outcome<proto::DeleteReply> {
    use proto::delete_reply::What;
    let target = target(wire.target)?;
    let namespace = convert::namespace(&wire.namespace)?;
    call.state.models.get(&call.caller, namespace)?;
    let (mut reply, away) = deleted(&call, namespace, target).await?;
    if let Some(first) = away.first().filter(|_| wire.of_all) {
        let others = away.len() - 1;
        refuse(&mut reply, &Reason::Away(format!("{} ({}; {others} others)", first.address, first.trouble)))?;
    }
    let mut told = super::fault::Told::default();
    let outcome = |outcome: &DeleteOutcome| {
        let (what, error) = match outcome {
            DeleteOutcome::NotHere => (What::NotHere, None),
            DeleteOutcome::Deleted => (What::Deleted, None),
            DeleteOutcome::Refused(reason) => (What::Refused, Some(told.detail(reason))),
        };
        proto::delete_reply::Outcome { what: what.into(), error }
    };
    Ok(proto::DeleteReply {
        outcomes: reply.outcomes.iter().map(outcome).collect(),
        blocks: reply.blocks,
        away: wire_away(&away),
    })
}

/// Deletes blocks of a namespace for good, in the bucket and on all nodes too, of which those are named that were away. Whose the
/// namespace is was looked at before.
pub(super) async fn deleted(
    call: &Call,
    namespace: NamespaceId,
    target: Target,
) -> Outcome<(DeleteReply, Vec<Away>)> {
    let tenant = call.caller.tenant.name.as_str();
    tracing::info!(target: "audit", tenant, %namespace, all = target == Target::Namespace, "delete");
    let mut tier = match &call.state.decided.cold {
        Some(cold) => Some(cold.delete(namespace, &target).await),
        None => None,
    };
    let request = DeleteRequest { namespace, target, deadline: Some(call.engine_deadline()) };
    let (mut reply, away) = match &call.state.decided.cluster {
        Some(node) => {
            let deleted = tokio::time::timeout_at(call.deadline, node.delete(request)).await;
            let Deleted { reply, away, below_ms, .. } = deleted.map_err(|_| Reason::DeadlinePassed)??;
            tier.iter_mut().for_each(|tier| tier.of_cluster(below_ms));
            (reply, away)
        }
        None => {
            // ends: the call's deadline, which the request has, too
            let answer = call.state.store().delete(request).await;
            (answer.map_err(|_| Fault::busy("the store is closing"))??, Vec::new())
        }
    };
    if let Some(tier) = &mut tier {
        // What is listed from now on is what the store has now.
        tier.tell(call.left()).await;
        reply = tier.answer(reply)?;
    }
    Ok((reply, away))
}

/// What was deleted here is not acknowledged.
fn refuse(reply: &mut DeleteReply, why: &Reason) -> Outcome<()> {
    if reply.outcomes.is_empty() {
        return Err(why.clone().into());
    }
    let acknowledged = reply.outcomes.iter_mut().filter(|one| !matches!(one, DeleteOutcome::Refused(_)));
    acknowledged.for_each(|one| *one = DeleteOutcome::Refused(why.clone()));
    Ok(())
}
