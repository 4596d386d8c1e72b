//! What an operator sees of a cluster from one of its nodes.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use kvarts_cluster::members::{Member, NodeId};
use kvarts_cluster::paths::PathId;

use super::{ClusterNode, HotCounts, OfferCounts, PutCounts};
use crate::lane::{LaneServer, ServeCounts};
use crate::read::{OWN, PathStatus};

/// One member, as this node sees it.
#[derive(Clone, Debug)]
pub struct NodeStatus {
    /// Who it is, and where.
    pub member: Member,
    /// It is this node.
    pub is_me: bool,
    /// It takes what this node tells of its blocks.
    pub is_reachable: bool,
    /// Why it does not; of this node, why it cannot follow the members.
    pub trouble: String,
    /// Partitions of the directory that it holds.
    pub partitions: u32,
    /// What waits to be told it, and snapshots that were begun.
    pub waiting: u64,
    /// Snapshots of this node's blocks that were begun for it.
    pub snapshots: u64,
    /// The way to its blocks, or to this node's own disks.
    pub path: Option<PathStatus>,
}

/// The cluster, as one node sees it.
#[derive(Clone, Debug)]
pub struct Status {
    /// The epoch of the members.
    pub epoch: u64,
    /// All members.
    pub nodes: Vec<NodeStatus>,
    /// Copies that this node's part of the directory knows, and bytes that they take.
    pub entries: u64,
    /// Bytes of memory.
    pub entry_bytes: u64,
    /// Copies that were left out or dropped for want of room.
    pub left_out: u64,
    /// Partitions in which copies may be missing.
    pub partial: u64,
    /// Chains whose owner this node decides.
    pub chains: u64,
    /// Chains that this node owns.
    pub owned: u64,
    /// Copies that this node made by itself of what it reads often from others.
    pub hot: HotCounts,
    /// Blocks of puts that other nodes had.
    pub puts: PutCounts,
    /// Blocks that were offered to other nodes, and by them.
    pub offers: OfferCounts,
    /// What was served to other nodes.
    pub served: ServeCounts,
    /// Whether the memory for that is registered with the store, once it has answered.
    pub is_registered: Option<bool>,
    /// Models whose blocks other nodes may be asked for.
    pub models: u64,
    /// Nodes whose blocks cannot be read, because there are as many paths as there may be.
    pub without_lane: u64,
}

impl ClusterNode {
    /// The cluster, as this node sees it.
    pub fn status(&self) -> Status {
        let members = self.members();
        let holders = kvarts_cluster::partition::Holders::of(&members);
        let now = self.footing.runner.now();
        let paths: BTreeMap<_, _> =
            self.paths.status(now).into_iter().map(|path| (Some(path.number), path)).collect();
        let lanes = self.lanes();
        let (models, without_lane) = (lanes.models() as u64, lanes.waiting.len() as u64);
        let lanes: BTreeMap<NodeId, PathId> =
            lanes.by_node.iter().map(|(node, lane)| (*node, lane.path)).collect();
        let server = self.lane_server.lock().unwrap_or_else(PoisonError::into_inner);
        let served = server.as_ref().map(LaneServer::counts).unwrap_or_default();
        drop(server);
        let node = |member: &Member| {
            let is_me = member.id == self.me;
            let mut state = self.link(member.id).map(|link| link.state()).unwrap_or_default();
            if is_me {
                state.trouble.clone_from(&self.trouble.lock().unwrap_or_else(PoisonError::into_inner));
            }
            let lane = lanes.get(&member.id).copied();
            let number = if is_me { Some(OWN) } else { lane };
            let (waiting, snapshots) = self.feeder.counts(member.id);
            NodeStatus {
                member: member.clone(),
                is_me,
                is_reachable: is_me || state.is_connected,
                trouble: state.trouble,
                partitions: holders.held_by(member.id).count() as u32,
                waiting,
                snapshots,
                path: paths.get(&number).cloned(),
            }
        };
        let chains = self.chains().len() as u64;
        let owned = self.owned.len(self.now()) as u64;
        let nodes = members.list().iter().map(node).collect();
        let directory = self.directory();
        let (entries, entry_bytes) = (directory.len(), directory.bytes());
        let partial = directory.partial().len() as u64;
        let left_out = self.left_out.copies.load(Ordering::Relaxed);
        let (epoch, is_registered) = (members.epoch(), self.lane_registered.get().copied());
        Status {
            epoch,
            nodes,
            entries,
            entry_bytes,
            left_out,
            partial,
            chains,
            owned,
            hot: self.hot_counts(),
            puts: self.puts.counts(),
            offers: self.offers.counts(),
            served,
            is_registered,
            models,
            without_lane,
        }
    }
}
