//! Where a request should go: of engines what the caller says, and of the stores beside them what this server knows by itself.
//!
//! What the caller gives of a node stands as it is. What is not known is said in the answer, and nothing is held or read for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kvarts_cluster::members::NodeId;
use kvarts_contract::api::{ContainsRequest, MAX_MATCH_ENTRIES, Presence};
use kvarts_layout::prefix::{Absence, Need, Requirement};
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId, Requirements, StoreId};
use kvarts_peer::node::{Column, Located, Status};
use kvarts_planner::plan::Link;
use kvarts_wire::proto;
use kvarts_wire::proto::route_reply::{Filled, filled};
use tokio::time::Instant;

use super::beyond::UNMEASURED;
use super::call::Call;
use super::fault::{Fault, Outcome};
use super::heavy::{self, heavily};
use super::{convert, entries, store};
use crate::state::Model;

/// How long other nodes may take to say who has blocks, all columns together.
const LOOKUP_TIMEOUT: Duration = Duration::from_millis(50);

type ColumnName = (Group, Coordinate);

/// The blocks of a request, and who is said to have them.
struct Prompt {
    model: Arc<Model>,
    keys: Vec<BlockKey>,
    requirements: Requirements,
    located: BTreeMap<ColumnName, Located>,
    /// The node that owns the chain of it that begins last.
    leased_by: Option<NodeId>,
}

/// Says where a request should go.
pub(crate) async fn route(call: Arc<Call>, wire: proto::RouteRequest) -> Outcome<proto::RouteReply> {
    let prompt = match &wire.prompt {
        Some(asked) => Some(located(&call, asked, stores(&wire)?.len()).await?),
        None => None,
    };
    let looked_at = prompt.as_ref().map_or(0, |prompt| prompt.entries() * stores_max(&wire));
    heavily(call, heavy::of_route(&wire) + looked_at, move |call| filled_in(call, wire, prompt.as_ref()))
        .await
}

/// The stores of the nodes that have one.
fn stores(wire: &proto::RouteRequest) -> Outcome<BTreeSet<NodeId>> {
    wire.nodes.iter().filter_map(|node| store_of(node).transpose()).collect()
}

fn stores_max(wire: &proto::RouteRequest) -> usize {
    wire.nodes.iter().filter(|node| !node.store.is_empty()).count()
}

fn store_of(node: &proto::route_request::Node) -> Outcome<Option<NodeId>> {
    match <[u8; 16]>::try_from(&node.store[..]) {
        Ok(id) => Ok(Some(StoreId(id))),
        Err(_) if node.store.is_empty() => Ok(None),
        Err(_) => Err(Fault::malformed(format!(
            "nodes: the store id of node {} has {} bytes instead of 16",
            node.node,
            node.store.len()
        ))),
    }
}

/// Asks the directory who has the blocks of a prompt.
async fn located(call: &Call, asked: &proto::route_request::Prompt, stores: usize) -> Outcome<Prompt> {
    let mut keys = convert::keys(&asked.keys)?;
    // Of a model that is another tenant's nothing is told.
    let model = call.state.models.get(&call.caller, convert::namespace(&asked.namespace)?)?;
    let requirements = match &asked.requirements[..] {
        [] => {
            let usual = usual_requirements(&model)?;
            // How many parts a block has the caller need not know.
            let columns: usize = usual.groups().iter().map(|one| one.coordinates.len()).sum();
            keys.truncate(MAX_MATCH_ENTRIES / columns.saturating_mul(stores).max(1));
            usual
        }
        some => convert::requirements(model.identity.block_tokens, some)?,
    };
    entries::check_entries(keys.len(), &requirements)?;
    let (located, leased_by) = (BTreeMap::new(), None);
    let mut prompt = Prompt { model, keys, requirements, located, leased_by };
    let looked_at = prompt.entries().saturating_mul(stores);
    if looked_at > MAX_MATCH_ENTRIES {
        return Err(Fault::malformed(format!(
            "prompt: the look-up has {looked_at} entries (blocks times coordinates times stores), but the \
            limit is {MAX_MATCH_ENTRIES}"
        )));
    }
    let Some(node) = &call.state.decided.cluster else { return Ok(prompt) };
    let until = call.deadline.min(Instant::now() + LOOKUP_TIMEOUT);
    let mut latest = None;
    for (group, coordinate) in prompt.columns() {
        let column = Column { namespace: prompt.model.namespace, group, coordinate, keys: &prompt.keys };
        let tags: Vec<_> = prompt.keys.iter().map(|key| column.tag(key)).collect();
        let left = until.saturating_duration_since(Instant::now());
        let (located, owners) = node.locate_with_owners(&tags, left).await;
        latest = latest.max(owners.into_iter().max());
        prompt.located.insert((group, coordinate), located);
    }
    prompt.leased_by = latest.map(|(_, owner)| owner);
    Ok(prompt)
}

/// What engines of a model have required last; before that, all blocks of its first group, in as many parts as it can have.
fn usual_requirements(model: &Model) -> Outcome<Requirements> {
    let first_group = || {
        let first = model.geometry.groups().iter().min_by_key(|known| known.group);
        let (group, heads) = first.map_or((Group(0), 0), |known| (known.group, known.heads));
        let coordinates = model.geometry.coordinates(group, heads.max(1));
        let coordinates = coordinates.unwrap_or_else(|_| vec![Coordinate::Replicated]);
        let (need, absence) = (Need::All, Absence::Required);
        Requirements::new(
            model.identity.block_tokens,
            vec![Requirement { group, coordinates, need, absence }],
        )
    };
    let found = model.required().map_or_else(first_group, Ok);
    found.map_err(|error| Fault::malformed(format!("prompt: {error}")))
}

impl Prompt {
    fn columns(&self) -> Vec<ColumnName> {
        let of = |one: &Requirement| {
            let group = one.group;
            one.coordinates.iter().map(move |coordinate| (group, *coordinate)).collect::<Vec<_>>()
        };
        self.requirements.groups().iter().flat_map(of).collect()
    }

    fn entries(&self) -> usize {
        self.keys.len().saturating_mul(self.columns().len())
    }

    fn tokens(&self, blocks: u32) -> u64 {
        u64::from(blocks) * u64::from(self.model.identity.block_tokens)
    }

    fn unasked(&self) -> u32 {
        self.located.values().map(|one| one.unasked.len() as u32).sum()
    }

    /// Bytes of state of a token: those of which a prefix needs all.
    fn token_bytes(&self) -> Outcome<f64> {
        let mut bytes = 0;
        for one in self.requirements.groups().iter().filter(|one| one.need == Need::All) {
            for coordinate in &one.coordinates {
                bytes += self.model.shape(one.group, *coordinate)?.block_bytes();
            }
        }
        Ok(bytes as f64 / f64::from(self.model.identity.block_tokens.max(1)))
    }

    /// Leading blocks that a store can use by itself: this server's by its own look, others' by what is said of them.
    fn blocks_of(&self, call: &Call, here: NodeId, store: NodeId) -> Outcome<u32> {
        let mut columns: BTreeMap<ColumnName, Vec<bool>> = BTreeMap::new();
        for column in self.columns() {
            let there = match (store == here, self.located.get(&column)) {
                (true, _) => own_blocks(call, self.model.namespace, column, &self.keys)?,
                (false, Some(located)) => located.copies.iter().map(|nodes| nodes.contains(&store)).collect(),
                (false, None) => Vec::new(),
            };
            columns.insert(column, there);
        }
        let present = |block: u32, group, coordinate| {
            columns.get(&(group, coordinate)).and_then(|of| of.get(block as usize)) == Some(&true)
        };
        let usable = self.requirements.usable_prefix(self.keys.len() as u32, u64::MAX, present);
        Ok(usable.longest.blocks)
    }
}

fn own_blocks(
    call: &Call,
    namespace: NamespaceId,
    (group, coordinate): ColumnName,
    keys: &[BlockKey],
) -> Outcome<Vec<bool>> {
    let request = ContainsRequest { namespace, group, coordinate, keys, lease: None };
    let found = call.state.store().contains(&request)?;
    Ok(found.presence.iter().map(|one| *one == Presence::Here).collect())
}

/// What this server knows of the stores beside the nodes.
struct Known<'a> {
    call: &'a Call,
    here: NodeId,
    cluster: Option<Status>,
    prompt: Option<&'a Prompt>,
    /// Leading blocks of each store that was looked at.
    blocks: BTreeMap<NodeId, u32>,
}

/// Fills in what is not given, and counts.
fn filled_in(
    call: &Call,
    mut wire: proto::RouteRequest,
    prompt: Option<&Prompt>,
) -> Outcome<proto::RouteReply> {
    let cluster = call.state.decided.cluster.as_ref();
    let here = cluster.map_or_else(|| call.state.engine.stats().store, |node| node.id());
    let cluster = cluster.map(|node| node.status());
    let mut known = Known { call, here, cluster, prompt, blocks: BTreeMap::new() };
    let mut filled = Filled { here: here.0.to_vec().into(), ..Filled::default() };
    for node in &mut wire.nodes {
        if let Some(store) = store_of(node)? {
            filled.nodes.push(known.fill(node, store)?);
        }
    }
    if let Some(prompt) = prompt {
        filled.unasked = prompt.unasked();
        filled.bucket_blocks = in_bucket(call, prompt);
        filled.leased_by = prompt.leased_by.map(|id| id.0.to_vec().into()).unwrap_or_default();
        if wire.owner.is_none() {
            (filled.owner, filled.owner_has_lease) = owner(&wire, prompt.leased_by);
            wire.owner = filled.owner;
            wire.shared_tokens = wire.shared_tokens.max(stays(&wire, filled.owner_has_lease));
        }
        if wire.token_bytes == 0.0 {
            wire.token_bytes = prompt.token_bytes()?;
        }
        if wire.layers == 0 {
            wire.layers = prompt.model.geometry.layers().len() as u32;
        }
    }
    let reply = store::route(call, &wire)?;
    Ok(proto::RouteReply { filled: Some(filled), ..reply })
}

impl Known<'_> {
    fn fill(&mut self, node: &mut proto::route_request::Node, store: NodeId) -> Outcome<filled::Node> {
        let mut told = filled::Node { node: node.node, ..filled::Node::default() };
        let is_member =
            self.cluster.as_ref().is_some_and(|of| of.nodes.iter().any(|one| one.member.id == store));
        if store != self.here && !is_member {
            told.trouble = "the node is not a member of this server's cluster".to_owned();
            return Ok(told);
        }
        if let Some(prompt) = self.prompt {
            let blocks = self.blocks(prompt, store)?;
            told.blocks = Some(blocks);
            node.disk_tokens.get_or_insert(prompt.tokens(blocks).max(node.memory_tokens));
        }
        // Others are taken to have disks like these, and nothing that waits for them.
        let disk = self.call.state.engine.disk_link();
        let queue_ms = if store == self.here { disk.link.wait_ms() } else { disk.link.latency_ms };
        told.disk_is_assumed = node.disk_bytes_per_ms.is_none() && (store != self.here || disk.measured == 0);
        node.disk_bytes_per_ms.get_or_insert(disk.link.bytes_per_ms);
        node.disk_queue_ms.get_or_insert(queue_ms);
        let Some(way) = self.cluster.as_ref().and_then(|of| way(of, store)) else {
            told.trouble = self.why_not_reached(store);
            return Ok(told);
        };
        told.network_is_assumed = node.network_bytes_per_ms.is_none() && !way.1;
        node.network_bytes_per_ms.get_or_insert(way.0.bytes_per_ms);
        node.network_queue_ms.get_or_insert(way.0.wait_ms());
        Ok(told)
    }

    fn blocks(&mut self, prompt: &Prompt, store: NodeId) -> Outcome<u32> {
        if let Some(blocks) = self.blocks.get(&store) {
            return Ok(*blocks);
        }
        let blocks = prompt.blocks_of(self.call, self.here, store)?;
        self.blocks.insert(store, blocks);
        Ok(blocks)
    }

    fn why_not_reached(&self, store: NodeId) -> String {
        let Some(cluster) = &self.cluster else { return String::new() };
        let member = cluster.nodes.iter().find(|one| one.member.id == store && !one.is_me);
        match member {
            Some(member) if !member.trouble.is_empty() => member.trouble.clone(),
            Some(_) => "the node cannot be reached now".to_owned(),
            None => "no other node can be reached".to_owned(),
        }
    }
}

/// The way between a node and the others, and whether it was measured: of another node it is that from there to here; of this node
/// that to another one on average.
fn way(cluster: &Status, store: NodeId) -> Option<(Link, bool)> {
    let is_me = cluster.nodes.iter().any(|one| one.is_me && one.member.id == store);
    let asked = |one: &&kvarts_peer::node::NodeStatus| {
        one.is_reachable && !one.is_me && (is_me || one.member.id == store)
    };
    let ways: Vec<_> = cluster.nodes.iter().filter(asked).collect();
    if ways.is_empty() {
        return None;
    }
    let paths = || ways.iter().filter_map(|one| one.path.as_ref());
    let rates: Vec<f64> =
        paths().filter_map(|path| path.rate).filter(|rate| rate.is_finite() && *rate > 0.0).collect();
    let outstanding = paths().fold(0u64, |all, path| all.saturating_add(path.outstanding));
    let bytes_per_ms = match rates.len() {
        0 => UNMEASURED.bytes_per_ms,
        count => rates.iter().sum::<f64>() / count as f64 / 1e3,
    };
    let outstanding_bytes = outstanding / ways.len() as u64;
    Some((Link { bytes_per_ms, outstanding_bytes, ..UNMEASURED }, !rates.is_empty()))
}

/// Who is counted as the owner, and whether by a lease.
fn owner(
    wire: &proto::RouteRequest,
    leased_by: Option<NodeId>,
) -> (Option<proto::route_request::Owner>, bool) {
    let tokens = |node: &proto::route_request::Node| node.disk_tokens.unwrap_or(0).max(node.memory_tokens);
    let of = |node: &proto::route_request::Node| proto::route_request::Owner {
        node: node.node,
        tokens: tokens(node),
    };
    let leases = |node: &&proto::route_request::Node| {
        leased_by.is_some_and(|id| node.store == id.0[..]) && tokens(node) > 0
    };
    if let Some(node) = wire.nodes.iter().find(leases) {
        return (Some(of(node)), true);
    }
    // Of equal ones the first.
    let most = wire.nodes.iter().rev().max_by_key(|node| tokens(node));
    (most.filter(|node| tokens(node) > 0).map(of), false)
}

/// Tokens that do not leave the owner: what is on its disks alone takes no device memory, and nothing leaves one that only has most.
fn stays(wire: &proto::RouteRequest, has_lease: bool) -> u64 {
    let Some(owner) = wire.owner.filter(|_| has_lease) else {
        return wire.owner.map_or(0, |owner| owner.tokens);
    };
    let node = wire.nodes.iter().find(|node| node.node == owner.node);
    owner.tokens.saturating_sub(node.map_or(0, |node| node.memory_tokens))
}

/// Leading blocks that the bucket seems to have, from memory alone.
fn in_bucket(call: &Call, prompt: &Prompt) -> Option<u32> {
    let cold = call.state.decided.cold.as_ref()?;
    let known = cold.known(prompt.model.namespace).filter(|_| cold.is_asked())?;
    Some(prompt.keys.iter().take_while(|key| known.may_have(key)).count() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(node: u32, store: Option<u8>, memory: u64, disk: Option<u64>) -> proto::route_request::Node {
        proto::route_request::Node {
            node,
            memory_tokens: memory,
            disk_tokens: disk,
            store: store.map(|byte| vec![byte; 16].into()).unwrap_or_default(),
            ..proto::route_request::Node::default()
        }
    }

    #[test]
    fn the_owner_is_who_has_the_lease_or_else_who_has_most_and_of_equals_the_first() {
        let request = |nodes| proto::RouteRequest { nodes, ..proto::RouteRequest::default() };
        let found = |nodes, leased: Option<u8>| {
            let (found, has_lease) = owner(&request(nodes), leased.map(|byte| StoreId([byte; 16])));
            (found.map(|owner| (owner.node, owner.tokens)), has_lease)
        };
        let nodes =
            || vec![node(1, Some(1), 0, Some(16)), node(2, Some(2), 64, Some(32)), node(3, None, 64, None)];
        assert_eq!(found(nodes(), Some(1)), (Some((1, 16)), true));
        assert_eq!(found(nodes(), None), (Some((2, 64)), false));
        assert_eq!(found(nodes(), Some(9)), (Some((2, 64)), false), "the owner is no candidate");
        assert_eq!(found(vec![node(1, Some(1), 0, None)], Some(1)), (None, false), "it has nothing");
        assert_eq!(found(Vec::new(), None), (None, false));
    }

    #[test]
    fn only_what_an_owner_with_a_lease_has_in_memory_can_leave_it() {
        let nodes = vec![node(1, Some(1), 24, Some(64))];
        let owner = Some(proto::route_request::Owner { node: 1, tokens: 64 });
        let request = proto::RouteRequest { nodes, owner, ..proto::RouteRequest::default() };
        assert_eq!((stays(&request, true), stays(&request, false)), (40, 64));
        assert_eq!(stays(&proto::RouteRequest::default(), false), 0);
    }

    #[test]
    fn a_store_is_named_by_sixteen_bytes() {
        assert_eq!(store_of(&node(1, None, 0, None)).unwrap(), None);
        assert_eq!(store_of(&node(1, Some(7), 0, None)).unwrap(), Some(StoreId([7; 16])));
        let short = proto::route_request::Node { store: vec![1; 15].into(), ..node(4, None, 0, None) };
        let told = store_of(&short).unwrap_err().detail.message;
        assert_eq!(told, "nodes: the store id of node 4 has 15 bytes instead of 16");
    }
}
