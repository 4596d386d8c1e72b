//! The cluster, for tenants and routers: who has blocks, who owns a chain, and what an operator sees.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvarts_cluster::members::NodeId;
use kvarts_cluster::partition::Tag;
use kvarts_contract::error::Reason;
use kvarts_layout::BlockKey;
use kvarts_peer::node::{ClusterNode, Column, NodeStatus};
use kvarts_wire::proto;
use kvarts_wire::proto::match_reply::{InCluster, in_cluster};
use tokio::time::Instant;

use super::beyond::{self, Blocks, Together};
use super::call::Call;
use super::convert;
use super::fault::{Fault, Outcome};

/// How long other nodes may take to say who has blocks.
const LOOKUP_TIMEOUT: Duration = Duration::from_millis(50);

fn node(call: &Call) -> Outcome<&Arc<ClusterNode>> {
    let alone = || {
        Reason::Denied("this server belongs to no cluster: start the server with --cluster FILE".to_owned())
    };
    call.state.decided.cluster.as_ref().ok_or_else(|| alone().into())
}

/// The names in the directory of blocks of the caller's model.
fn tags(
    call: &Call,
    namespace: &[u8],
    column: Option<&proto::Column>,
    keys: &[BlockKey],
) -> Outcome<Vec<Tag>> {
    let namespace = convert::namespace(namespace)?;
    // Of a model that is another tenant's nothing is told.
    call.state.models.get(&call.caller, namespace)?;
    let (group, coordinate) = convert::column(column)?;
    Ok(keys.iter().map(|key| Tag::of(&namespace, group, coordinate, key)).collect())
}

/// Bytes a second that came from a node lately.
fn rate(node: &NodeStatus) -> u64 {
    node.path.as_ref().and_then(|path| path.rate).unwrap_or(0.0) as u64
}

/// Which nodes have copies of blocks.
pub(crate) async fn lookup(call: Arc<Call>, wire: proto::LookupRequest) -> Outcome<proto::LookupReply> {
    let node = node(&call)?;
    let keys = convert::keys(&wire.keys)?;
    let tags = tags(&call, &wire.namespace, wire.column.as_ref(), &keys)?;
    let left = call.deadline.saturating_duration_since(Instant::now());
    let located = node.locate(&tags, LOOKUP_TIMEOUT.min(left)).await;
    let status = node.status();
    let known: BTreeMap<NodeId, &NodeStatus> =
        status.nodes.iter().map(|status| (status.member.id, status)).collect();
    let (nodes, copies) = located.to_wire();
    let unasked = located.unasked.len() as u32;
    let cost = |id: &NodeId| {
        let of = known.get(id);
        proto::PathCost {
            node: id.0.to_vec().into(),
            address: of.filter(|of| !of.is_me).map(|of| of.member.address.clone()).unwrap_or_default(),
            zone: of.map(|of| of.member.zone.clone()).unwrap_or_default(),
            bytes_per_second: of.map_or(0, |of| rate(of)),
            outstanding_bytes: of.and_then(|of| of.path.as_ref()).map_or(0, |path| path.outstanding),
            is_reachable: of.is_some_and(|of| of.is_reachable),
        }
    };
    Ok(proto::LookupReply { nodes: nodes.iter().map(cost).collect(), copies, unasked })
}

/// What the nodes of the cluster have of a prompt together, beside what this one has; they are asked unless they were before.
pub(crate) async fn of_cluster(
    call: &Call,
    wire: &proto::MatchRequest,
    own: &proto::MatchReply,
    together: Option<&Together>,
) -> Outcome<Option<InCluster>> {
    let Some(node) = &call.state.decided.cluster else { return Ok(None) };
    let keys = convert::keys(&wire.keys)?;
    if own.longest.as_ref().is_some_and(|longest| longest.blocks as usize == keys.len()) {
        // Everything is here: no other node is asked.
        let (longest, cheapest) = (own.longest.clone(), own.cheapest.clone());
        return Ok(Some(InCluster { longest, cheapest, unasked: 0, holders: Vec::new() }));
    }
    let asked = match together {
        Some(_) => None,
        None => Some(beyond::together(call, node, wire).await?),
    };
    let Some(together) = together.or(asked.as_ref()) else { return Ok(None) };
    let requirements = convert::requirements(wire.block_tokens, &wire.requirements)?;
    let present = |block: u32, group, coordinate| {
        together.columns.get(&(group, coordinate)).and_then(|of| of.get(block as usize)) == Some(&true)
    };
    let most = wire.recompute_tokens_max.unwrap_or(u64::MAX);
    let usable = requirements.usable_prefix(keys.len() as u32, most, present);
    Ok(Some(InCluster {
        longest: Some(convert::wire_boundary(&usable.longest)),
        cheapest: Some(convert::wire_boundary(&usable.cheapest)),
        unasked: together.unasked.count(),
        holders: holders(node, together),
    }))
}

/// The other nodes that are said to have some of these blocks, and why what cannot be read from them cannot.
fn holders(node: &ClusterNode, together: &Together) -> Vec<in_cluster::Holder> {
    if together.with.is_empty() {
        return Vec::new();
    }
    let status = node.status();
    let holder = |(id, (blocks, unreadable)): (&NodeId, &(Blocks, Blocks))| {
        let (blocks, unreadable) = (blocks.count(), unreadable.count());
        let known = status.nodes.iter().find(|known| known.member.id == *id);
        let trouble = match known {
            _ if unreadable == 0 => String::new(),
            Some(known) if !known.trouble.is_empty() => known.trouble.clone(),
            Some(known) if known.path.is_none() => "this node has no connection to the other node".to_owned(),
            Some(_) => "the blocks of the other node cannot be read now".to_owned(),
            None => "the other node is no longer a member of the cluster".to_owned(),
        };
        in_cluster::Holder {
            node: id.0.to_vec().into(),
            address: known.map(|known| known.member.address.clone()).unwrap_or_default(),
            blocks,
            unreadable,
            trouble,
        }
    };
    together.with.iter().map(holder).collect()
}

/// Counts blocks that are absent here as here if another node is said to have them, unless a lease is asked for.
pub(crate) async fn also_elsewhere(
    call: Arc<Call>,
    wire: proto::ExistsRequest,
    mut found: proto::ExistsReply,
) -> Outcome<proto::ExistsReply> {
    let here = i32::from(proto::exists_reply::Presence::Here);
    let absent = i32::from(proto::exists_reply::Presence::Absent);
    let Some(node) = &call.state.decided.cluster else { return Ok(found) };
    if wire.lease_ms > 0 || !found.presence.contains(&absent) {
        return Ok(found);
    }
    let (keys, namespace) = (convert::keys(&wire.keys)?, convert::namespace(&wire.namespace)?);
    let (group, coordinate) = convert::column(wire.column.as_ref())?;
    let missing = keys.iter().zip(&found.presence).filter(|(_, one)| **one == absent);
    let missing: Vec<BlockKey> = missing.map(|(key, _)| *key).collect();
    let column = Column { namespace, group, coordinate, keys: &missing };
    let left = call.deadline.saturating_duration_since(Instant::now());
    let there = node.presence(column, LOOKUP_TIMEOUT.min(left)).await.blocks;
    let absent = found.presence.iter_mut().filter(|one| **one == absent);
    absent.zip(there).filter(|(_, there)| *there).for_each(|(one, _)| *one = here);
    Ok(found)
}

/// Who owns a chain.
pub(crate) async fn chain(call: Arc<Call>, wire: proto::ChainRequest) -> Outcome<proto::ChainReply> {
    let node = node(&call)?;
    let key = match convert::keys(&wire.key)?.as_slice() {
        [key] => *key,
        _ => return Err(Fault::malformed("key: 32 bytes are required".to_owned())),
    };
    let namespace = convert::namespace(&wire.namespace)?;
    // Of a model that is another tenant's nothing is told.
    call.state.models.get(&call.caller, namespace)?;
    let (group, coordinate) = convert::column(wire.column.as_ref())?;
    let asked = proto::ChainRequest { node: node.id().0.to_vec().into(), ..wire };
    node.chain_of((namespace, group, coordinate), key, asked)
        .await
        .map_err(|status| Fault::malformed(status.message().to_owned()))
}

/// Copies blocks of other nodes to this one.
pub(crate) async fn replicate(
    call: Arc<Call>,
    wire: proto::ReplicateRequest,
) -> Outcome<proto::ReplicateReply> {
    let node = node(&call)?;
    let (keys, namespace) = (convert::keys(&wire.keys)?, convert::namespace(&wire.namespace)?);
    let model = call.state.models.get(&call.caller, namespace)?;
    let (group, coordinate) = convert::column(wire.column.as_ref())?;
    let shape = model.shape(group, coordinate)?;
    let hold = (wire.expires_after_ms > 0).then(|| Duration::from_millis(wire.expires_after_ms));
    let column = Column { namespace, group, coordinate, keys: &keys };
    let copied = tokio::time::timeout_at(call.deadline, node.replicate(column, &shape, hold)).await;
    let done = copied.map_err(|_| Reason::DeadlinePassed)??;
    Ok(proto::ReplicateReply { stored: done.stored, here: done.here, missing: done.missing })
}

/// The cluster, as this node sees it.
pub(crate) fn status(call: &Call) -> Outcome<proto::ClusterStatusReply> {
    let status = node(call)?.status();
    let one = |node: &NodeStatus| proto::ClusterNodeStatus {
        node: node.member.id.0.to_vec().into(),
        address: node.member.address.clone(),
        zone: node.member.zone.clone(),
        is_me: node.is_me,
        is_reachable: node.is_reachable,
        partitions: node.partitions,
        waiting_changes: node.waiting,
        snapshots: node.snapshots,
        trouble: node.trouble.clone(),
        read_bytes: node.path.as_ref().map_or(0, |path| path.brought.bytes),
        read_pieces: node.path.as_ref().map_or(0, |path| path.brought.pieces),
        failed_pieces: node.path.as_ref().map_or(0, |path| path.brought.failed),
        bytes_per_second: rate(node),
        outstanding_bytes: node.path.as_ref().map_or(0, |path| path.outstanding),
    };
    Ok(proto::ClusterStatusReply {
        epoch: status.epoch,
        nodes: status.nodes.iter().map(one).collect(),
        entries: status.entries,
        entry_bytes: status.entry_bytes,
        refused_entries: status.left_out,
        chains: status.chains,
        served_bytes: status.served.bytes,
        served_pieces: status.served.pieces,
    })
}
