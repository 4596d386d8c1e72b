//! The calls about models and blocks that move no bytes: lookups, leases, pins, times, deletion.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvarts_layout::BlockKey;
use kvarts_store::api::{
    ContainsRequest, DeleteOutcome, DeleteRequest, LeaseId, LeaseTerms, MAX_MATCH_ENTRIES, MatchRequest,
    Presence, Target, TtlRequest,
};
use kvarts_store::error::Reason;
use prost::Message;

use super::call::Call;
use super::fault::{Fault, Outcome};
use super::heavy::{self, heavily};
use super::{convert, digest, limits};
use crate::human;
use crate::state::{Model, ModelLimits};
use kvarts_wire::proto;

/// Registers a model for the caller's tenant.
pub(super) async fn register_model(
    call: Arc<Call>,
    wire: proto::RegisterModelRequest,
) -> Outcome<proto::RegisterModelReply> {
    // Small requests may have large answers here.
    if wire.columns.len() > COLUMNS_FEW {
        call.keep_large(limits::SHAPE_PARTS_MAX * PART_BYTES / limits::LARGE_FACTOR).await?;
    }
    heavily(call, heavy::of_registration(&wire), move |call| registered(call, wire)).await
}

/// Columns whose shapes make no large answer.
const COLUMNS_FEW: usize = 8;
/// Bytes of a layer or chunk of a shape in an answer, and what it is made of.
const PART_BYTES: usize = 64;

fn registered(call: &Call, wire: proto::RegisterModelRequest) -> Outcome<proto::RegisterModelReply> {
    if wire.columns.len() > limits::COLUMNS_MAX {
        return Err(Fault::malformed(format!("columns: at most {}", limits::COLUMNS_MAX)));
    }
    let identity = wire.identity.ok_or_else(|| Fault::malformed("identity: it is missing"))?;
    let geometry = convert::geometry(wire.spec)?;
    let salt = call.caller.tenant.salt.clone();
    let identity = convert::identity(identity, salt, geometry.fingerprint())?;
    let (state, caller) = (&call.state, &call.caller);
    // What a list of the tenant's models has of it.
    let listed = convert::wire_identity(&identity).encoded_len() as u64 + LISTED_BYTES;
    let (count, most_listed, memory) =
        (limits::MODELS_MAX, limits::MODELS_BYTES_MAX, limits::MODELS_MEMORY_MAX);
    let most = ModelLimits { count, listed: most_listed, memory };
    let model = state.models.register(state.store(), caller, identity, geometry, (listed, most))?;
    let shapes = shapes(&model, &wire.columns)?;
    tell_waste(call, &shapes);
    let namespace = Bytes::copy_from_slice(model.namespace.as_bytes());
    Ok(proto::RegisterModelReply {
        crc32: digest::of_model(&convert::wire_identity(&model.identity), &namespace),
        namespace,
        spec_fingerprint: model.identity.spec_fingerprint.as_bytes().to_vec().into(),
        shapes,
    })
}

/// Bytes of a model in a list beside its identity: its namespace, its number of layers, and what stands around them.
const LISTED_BYTES: u64 = 64;

/// The shapes of columns, each once: in all no more of them than an answer has room for.
fn shapes(model: &Model, columns: &[proto::Column]) -> Outcome<Vec<proto::Shape>> {
    let (mut seen, mut chunks, mut shapes) = (BTreeSet::new(), 0, Vec::with_capacity(columns.len()));
    for (at, column) in columns.iter().enumerate() {
        let (group, coordinate) = convert::column(Some(column))?;
        if !seen.insert((group, coordinate)) {
            return Err(Fault::malformed(format!("columns: {at} stands there twice")));
        }
        let shape = model.shape(group, coordinate)?;
        chunks += shape.chunk_count() as usize + shape.layers().len();
        if chunks > limits::SHAPE_PARTS_MAX {
            let most = limits::SHAPE_PARTS_MAX;
            return Err(Fault::malformed(format!("columns: more than {most} layers and chunks in all")));
        }
        shapes.push(convert::wire_shape(group, coordinate, &shape));
    }
    Ok(shapes)
}

/// Hundredths of a segment that blocks may leave empty without a word.
const WASTE_MAX: u64 = 20;

/// Tells the log of blocks of which so few fit into a segment that much of the disk stays empty.
fn tell_waste(call: &Call, shapes: &[proto::Shape]) {
    let segment = call.state.engine.segment_bytes();
    for shape in shapes {
        let waste = waste(segment, shape.block_bytes);
        if waste > WASTE_MAX && call.state.audit.may_tell() {
            let (block, segment) = (human::bytes(shape.block_bytes), human::bytes(segment));
            tracing::warn!(
                "blocks of {block} leave {waste}% of each segment of {segment} empty: make the store with larger \
                 segments (--segment, or `kvarts compact --to` for a store that is there)"
            );
        }
    }
}

/// Hundredths of a segment that whole blocks of this size cannot fill. Some pages of a segment are its own.
fn waste(segment_bytes: u64, block_bytes: u64) -> u64 {
    const PAGE: u64 = kvarts_layout::format::PAGE_BYTES;
    let room = segment_bytes.saturating_sub(4 * PAGE);
    100 - (room / block_bytes.max(1)).saturating_mul(block_bytes).saturating_mul(100) / segment_bytes.max(1)
}

/// The models of the caller's tenant.
pub(super) async fn list_models(call: &Call) -> Outcome<proto::ListModelsReply> {
    let listed = call.state.models.used(call.caller.tenant.number).listed as usize;
    if listed > limits::SMALL_REQUEST_BYTES {
        call.keep_large(listed).await?;
    }
    let model = |model: std::sync::Arc<crate::state::Model>| proto::list_models_reply::Model {
        namespace: model.namespace.as_bytes().to_vec().into(),
        identity: Some(convert::wire_identity(&model.identity)),
        layers: model.geometry.layers().len() as u32,
    };
    let models = call.state.models.all(&call.caller).into_iter().map(model).collect();
    Ok(proto::ListModelsReply { models })
}

/// Terms of a lease, if one is wanted and the tenant may have one more.
fn terms(call: &Call, hold: Option<Duration>, cap: Option<u64>) -> Outcome<Option<LeaseTerms>> {
    let Some(hold) = hold else { return Ok(None) };
    let (state, tenant) = (&call.state, &call.caller.tenant);
    if !state.leases.has_room(tenant.number, limits::LEASES_MAX, state.clock().now()) {
        return Err(Reason::TooMany("leases").into());
    }
    let cap_bytes = tenant.limits.pin_bytes.min(cap.unwrap_or(u64::MAX));
    Ok(Some(LeaseTerms { hold, tenant: tenant.number, cap_bytes }))
}

/// The name of a lease for its client; 0 for none.
fn named(call: &Call, lease: Option<LeaseId>, terms: Option<LeaseTerms>) -> u64 {
    let (Some(lease), Some(terms)) = (lease, terms) else { return 0 };
    let ends = call.state.clock().now().plus(terms.hold);
    call.state.leases.add(terms.tenant, call.state.secret_number(), lease, ends)
}

/// Finds the usable prefix.
pub(crate) fn match_prefix(call: &Call, wire: proto::MatchRequest) -> Outcome<proto::MatchReply> {
    let keys = convert::keys(&wire.keys)?;
    let namespace = convert::namespace(&wire.namespace)?;
    call.state.models.get(&call.caller, namespace)?;
    let requirements = convert::requirements(wire.block_tokens, &wire.requirements)?;
    let columns: usize = requirements.groups().iter().map(|group| group.coordinates.len()).sum();
    let entries = keys.len().saturating_mul(columns);
    if entries > MAX_MATCH_ENTRIES {
        let (keys, most) = (keys.len(), MAX_MATCH_ENTRIES);
        return Err(Fault::malformed(format!(
            "{keys} keys times {columns} coordinates are {entries}, at most {most} are looked up at once"
        )));
    }
    let lease = terms(call, convert::hold(wire.lease_ms), wire.lease_cap_bytes)?;
    let request = MatchRequest {
        namespace,
        keys: &keys,
        requirements: &requirements,
        recompute_tokens_max: wire.recompute_tokens_max.unwrap_or(u64::MAX),
        lease,
    };
    let found = call.state.store().match_prefix(&request)?;
    let short = keys.len() as u64 - u64::from(found.usable.longest.blocks).min(keys.len() as u64);
    let pending = u64::from(found.pending).min(short);
    call.state.metrics.missed("MATCH_PENDING", pending);
    call.state.metrics.missed("MATCH_ABSENT", short - pending);
    let coverage = |one: &kvarts_layout::prefix::Coverage| proto::match_reply::Coverage {
        column: Some(convert::wire_column(one.group, one.coordinate)),
        blocks: one.blocks,
    };
    Ok(proto::MatchReply {
        longest: Some(convert::wire_boundary(&found.usable.longest)),
        cheapest: Some(convert::wire_boundary(&found.usable.cheapest)),
        coverage: found.usable.coverage.iter().map(coverage).collect(),
        pending: found.pending,
        lease: named(call, found.lease, lease),
    })
}

/// Says of each block whether it is here.
pub(crate) fn exists(call: &Call, wire: proto::ExistsRequest) -> Outcome<proto::ExistsReply> {
    use proto::exists_reply::Presence as Wire;
    let keys = convert::keys(&wire.keys)?;
    let namespace = convert::namespace(&wire.namespace)?;
    call.state.models.get(&call.caller, namespace)?;
    let (group, coordinate) = convert::column(wire.column.as_ref())?;
    let lease = terms(call, convert::hold(wire.lease_ms), wire.lease_cap_bytes)?;
    let request = ContainsRequest { namespace, group, coordinate, keys: &keys, lease };
    let found = call.state.store().contains(&request)?;
    let count = |wanted| found.presence.iter().filter(|one| **one == wanted).count() as u64;
    call.state.metrics.missed("EXISTS_PENDING", count(Presence::Pending));
    call.state.metrics.missed("EXISTS_ABSENT", count(Presence::Absent));
    let presence = |one: &Presence| match one {
        Presence::Here => Wire::Here.into(),
        Presence::Pending => Wire::Pending.into(),
        Presence::Absent => Wire::Absent.into(),
    };
    Ok(proto::ExistsReply {
        presence: found.presence.iter().map(presence).collect(),
        lease: named(call, found.lease, lease),
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
        return Err(Fault::malformed("hold_ms: say for how long"));
    }
    let (namespace, column, keys) = (wire.namespace, wire.column, wire.keys);
    let asked =
        proto::ExistsRequest { namespace, column, keys, lease_ms: wire.hold_ms, lease_cap_bytes: None };
    let found = exists(call, asked)?;
    let here = i32::from(proto::exists_reply::Presence::Here);
    let held = found.presence.iter().filter(|one| **one == here).count() as u32;
    Ok(proto::PinReply { lease: found.lease, held })
}

/// Changes when a lease of the caller's tenant ends.
pub(crate) fn renew(call: &Call, wire: &proto::RenewRequest) -> Outcome<proto::RenewReply> {
    let hold = convert::hold(wire.hold_ms).ok_or_else(|| Fault::malformed("hold_ms: say for how long"))?;
    let ends = call.state.clock().now().plus(hold);
    let lease = call.state.leases.renew(call.caller.tenant.number, wire.lease, ends);
    call.state.store().renew(lease.ok_or(Reason::LeaseEnded)?, hold)?;
    Ok(proto::RenewReply {})
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
    Ok(proto::SetTtlReply { changed: changed.changed })
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
            let key =
                <[u8; 32]>::try_from(&key[..]).map_err(|_| Fault::malformed("prefix: it has 32 bytes"))?;
            Ok(Target::Prefix(BlockKey(key)))
        }
        Some(Wire::Everything(true)) => Ok(Target::Namespace),
        Some(Wire::Everything(false)) | None => Err(Fault::malformed("target: say what is to be deleted")),
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
    let tenant = call.caller.tenant.name.as_str();
    tracing::info!(target: "audit", tenant, %namespace, all = target == Target::Namespace, "delete");
    let request = DeleteRequest { namespace, target, deadline: Some(call.engine_deadline()) };
    let answer = call.state.store().delete(request).await;
    let reply = answer.map_err(|_| Fault::busy("the store is closing"))??;
    let mut told = super::fault::Told::default();
    let outcome = |outcome: &DeleteOutcome| {
        let (what, error) = match outcome {
            DeleteOutcome::NotHere => (What::NotHere, None),
            DeleteOutcome::Deleted => (What::Deleted, None),
            DeleteOutcome::Refused(reason) => (What::Refused, Some(told.detail(reason))),
        };
        proto::delete_reply::Outcome { what: what.into(), error }
    };
    Ok(proto::DeleteReply { outcomes: reply.outcomes.iter().map(outcome).collect(), blocks: reply.blocks })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_fill_a_segment_badly_are_noticed_and_usual_ones_are_not() {
        const MIB: u64 = 1 << 20;
        assert_eq!(
            [waste(256 * MIB, 2 * MIB) <= WASTE_MAX, waste(256 * MIB, 32 * MIB) <= WASTE_MAX],
            [true; 2]
        );
        assert_eq!(waste(64 * MIB, 32 * MIB), 50, "two of them do not fit");
        assert_eq!(waste(64 * MIB, 64 * MIB), 100, "not even one does");
    }
}
