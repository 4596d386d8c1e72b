//! The calls about models: registration, and the list of what a tenant has.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use kvarts_layout::identity::nearest;
use kvarts_store::engine::KnownNamespace;
use prost::Message;

use super::fault::{Fault, Outcome};
use super::{convert, digest, limits};
use crate::calls::call::Call;
use crate::calls::heavy::{self, heavily};
use crate::human;
use crate::state::{Model, ModelLimits};
use kvarts_wire::proto;

/// Registers a model for the caller's tenant.
pub(super) async fn register(
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
        return Err(Fault::malformed(format!(
            "columns: the list has {} columns, but the limit is {}",
            wire.columns.len(),
            limits::COLUMNS_MAX
        )));
    }
    let identity = wire.identity.ok_or_else(|| Fault::malformed("identity: the field is missing"))?;
    let geometry = convert::geometry(wire.spec)?;
    let salt = call.caller.tenant.salt.clone();
    let identity = convert::identity(identity, salt, geometry.fingerprint())?;
    let (state, caller) = (&call.state, &call.caller);
    // What a list of the tenant's models has of it.
    let listed = convert::wire_identity(&identity).encoded_len() as u64 + LISTED_BYTES;
    let (count, most_listed, memory) =
        (limits::MODELS_MAX, limits::MODELS_BYTES_MAX, limits::MODELS_MEMORY_MAX);
    let most = ModelLimits { count, listed: most_listed, memory };
    let is_new = identity.namespace_id().is_ok_and(|id| state.models.get(caller, id).is_err());
    let now_ms = state.clock().unix_millis();
    let model = state.models.register(&state.engine, caller, identity, geometry, (listed, most, now_ms))?;
    if let Some(node) = &state.decided.cluster {
        node.know(&model.identity, &model.geometry, model.namespace);
    }
    if let Some(cold) = &state.decided.cold {
        cold.touch(model.namespace);
    }
    if is_new {
        tell_nearest(call, &model);
    }
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
            return Err(Fault::malformed(format!("columns: the list has {at} twice")));
        }
        let shape = model.shape(group, coordinate)?;
        chunks += shape.chunk_count() as usize + shape.layers().len();
        if chunks > limits::SHAPE_PARTS_MAX {
            let most = limits::SHAPE_PARTS_MAX;
            return Err(Fault::malformed(format!(
                "columns: the columns together have more than {most} layers \
                and chunks"
            )));
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
                "blocks of {block} leave {waste}% of each segment of {segment} unused: create the store with \
                larger segments (--segment, or `kvarts compact --to` for an existing store)"
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

/// Stored models that a new one is compared with: those with the most bytes.
const COMPARED_MAX: usize = 256;

/// Tells the log of a new model without blocks that differs in a few fields from one that has some: most often a field
/// that was meant to be equal, and the reason for misses.
fn tell_nearest(call: &Call, model: &Model) {
    let stored = call.state.engine.namespaces(&call.caller.tenant.salt, COMPARED_MAX);
    let mut with_blocks = stored.iter().filter(|one| one.live_bytes > 0);
    if with_blocks.clone().any(|one| one.namespace == model.namespace) {
        return;
    }
    let near = nearest(&model.identity, with_blocks.clone().map(|one| &one.identity));
    let Some((near, there)) = near.and_then(|near| with_blocks.nth(near.at).map(|there| (near, there)))
    else {
        return;
    };
    if call.state.audit.may_tell() {
        let (name, id, bytes) = (&model.identity.model, there.namespace, human::bytes(there.live_bytes));
        tracing::info!(
            "model {name:?} was registered and has no blocks; a similar namespace, {id} with {bytes}, \
            differs from this model in: {near}"
        );
    }
}

/// A list of stored models as work: a few thousand identities are decoded.
const LIST_ENTRIES: usize = limits::LIGHT_ENTRIES + 1;

/// The models of the caller's tenant.
pub(super) async fn list(call: Arc<Call>, wire: proto::ListModelsRequest) -> Outcome<proto::ListModelsReply> {
    let listed = match wire.stored {
        true => limits::MODELS_BYTES_MAX as usize,
        false => call.state.models.used(call.caller.tenant.number).listed as usize,
    };
    if listed > limits::SMALL_REQUEST_BYTES {
        call.keep_large(listed).await?;
    }
    if wire.stored {
        return heavily(call, LIST_ENTRIES, |call| Ok(stored(call))).await;
    }
    let models = registered_here(&call).map(|model| known(&model)).collect();
    Ok(proto::ListModelsReply { models, ..proto::ListModelsReply::default() })
}

fn registered_here(call: &Call) -> impl Iterator<Item = Arc<Model>> {
    call.state.models.all(&call.caller).into_iter()
}

fn known(model: &Model) -> proto::list_models_reply::Model {
    proto::list_models_reply::Model {
        namespace: model.namespace.as_bytes().to_vec().into(),
        identity: Some(convert::wire_identity(&model.identity)),
        layers: model.geometry.layers().len() as u32,
        registered: true,
        live_bytes: 0,
        last_used_ms: model.last_used(),
        live_blocks: None,
    }
}

/// Those that were registered and those that the store has blocks of, the ones with the most bytes first, as far as an answer
/// has room for them.
fn stored(call: &Call) -> proto::ListModelsReply {
    let in_store = call.state.engine.namespaces(&call.caller.tenant.salt, limits::MODELS_MAX);
    let registered: BTreeMap<_, _> =
        registered_here(call).map(|model| (model.namespace, model.last_used())).collect();
    let more = in_store.len() == limits::MODELS_MAX;
    let cold = call.state.decided.cold.is_some();
    let clustered = call.state.decided.cluster.is_some();
    let mut reply = proto::ListModelsReply { models: Vec::new(), of_store: true, more, cold, clustered };
    let mut room = limits::MODELS_BYTES_MAX;
    for one in in_store {
        let last_used = registered.get(&one.namespace).copied();
        if one.live_bytes == 0 && last_used.is_none() {
            continue;
        }
        let model = of_store(&one, last_used);
        let bytes = model.encoded_len() as u64 + LISTED_BYTES;
        if bytes > room {
            reply.more = true;
            break;
        }
        room -= bytes;
        reply.models.push(model);
    }
    reply
}

fn of_store(one: &KnownNamespace, last_used: Option<u64>) -> proto::list_models_reply::Model {
    proto::list_models_reply::Model {
        namespace: one.namespace.as_bytes().to_vec().into(),
        identity: Some(convert::wire_identity(&one.identity)),
        layers: one.layers as u32,
        registered: last_used.is_some(),
        live_bytes: one.live_bytes,
        last_used_ms: last_used.unwrap_or(0),
        live_blocks: Some(one.live_blocks),
    }
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
