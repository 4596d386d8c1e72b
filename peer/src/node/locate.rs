//! Who has blocks: asked of the nodes that hold their partitions, all at once.

use std::time::Duration;

use futures_util::future::join_all;
use kvarts_cluster::members::NodeId;
use kvarts_cluster::partition::Tag;
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};
use kvarts_store::api::{ContainsRequest, KvStore, Presence};
use kvarts_wire::proto;

use super::{ClusterNode, wire};

/// Blocks of one column.
#[derive(Clone, Copy, Debug)]
pub struct Column<'a> {
    /// Of which model.
    pub namespace: NamespaceId,
    /// Which group.
    pub group: Group,
    /// Which part of it.
    pub coordinate: Coordinate,
    /// The blocks.
    pub keys: &'a [BlockKey],
}

impl Column<'_> {
    /// The name of one of them in the directory.
    pub fn tag(&self, key: &BlockKey) -> Tag {
        Tag::of(&self.namespace, self.group, self.coordinate, key)
    }
}

/// Blocks that are looked up before others have their turn.
pub(super) const AT_ONCE: usize = 1024;

/// Holders that did not answer, and the places of the blocks that they were asked for.
pub(super) type Silent = Vec<(NodeId, Vec<usize>)>;

/// What is known of some blocks' copies.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Located {
    /// For each block the nodes that are said to have it.
    pub copies: Vec<Vec<NodeId>>,
    /// The places of blocks whose holder did not answer in time: their copies are unknown.
    pub unasked: Vec<usize>,
}

impl Located {
    /// For a message: the nodes that are named, and for each block the places of its nodes among them.
    pub fn to_wire(&self) -> (Vec<NodeId>, bytes::Bytes) {
        let mut list = wire::CopyList::default();
        self.copies.iter().for_each(|nodes| list.push(nodes.iter().copied()));
        list.into_parts()
    }
}

impl ClusterNode {
    /// Which nodes are said to have these blocks. A holder that does not answer within `timeout` is one that knows of no copy.
    pub async fn locate(&self, tags: &[Tag], timeout: Duration) -> Located {
        self.locate_by_holder(tags, timeout).await.0
    }

    /// The same; and the holders that did not answer in time, each with the places of its blocks.
    pub(super) async fn locate_by_holder(&self, tags: &[Tag], timeout: Duration) -> (Located, Silent) {
        let mut by_holder = self.directory().by_holder(tags);
        // Others have their question before this node looks at its own part.
        by_holder.sort_by_key(|(holder, _)| *holder == self.me);
        let asked = by_holder.into_iter().map(|(holder, places)| async move {
            let mut of: Vec<Tag> = Vec::with_capacity(places.len());
            of.extend(places.iter().filter_map(|place| tags.get(*place).copied()));
            let known = if holder == self.me {
                Some(self.own_copies(&of))
            } else {
                self.ask(holder, &of, timeout).await
            };
            (holder, places, known)
        });
        let mut located = Located { copies: vec![Vec::new(); tags.len()], unasked: Vec::new() };
        let mut silent = Vec::new();
        for (holder, places, known) in join_all(asked).await {
            let Some(known) = known else {
                located.unasked.extend(&places);
                silent.push((holder, places));
                continue;
            };
            for (place, nodes) in places.into_iter().zip(known) {
                if let Some(of) = located.copies.get_mut(place) {
                    *of = nodes;
                }
            }
        }
        (located, silent)
    }

    /// Of each block whether this node has it, or another one is said to; and of how many others that could not be asked. No
    /// node is asked about blocks that are here.
    pub async fn presence(&self, column: Column<'_>, timeout: Duration) -> (Vec<bool>, u32) {
        let mut there = self.own_blocks(&column);
        let missing = |(_, (here, _)): &(usize, (&bool, &BlockKey))| !**here;
        let missing = there.iter().zip(column.keys).enumerate().filter(missing);
        let (places, tags): (Vec<usize>, Vec<Tag>) =
            missing.map(|(place, (_, key))| (place, column.tag(key))).unzip();
        if tags.is_empty() {
            return (there, 0);
        }
        let located = self.locate(&tags, timeout).await;
        for (place, nodes) in places.into_iter().zip(&located.copies) {
            if let Some(there) = there.get_mut(place) {
                *there = !nodes.is_empty();
            }
        }
        (there, located.unasked.len() as u32)
    }

    /// Which of these blocks can be read here, from memory alone.
    pub(super) fn own_blocks(&self, column: &Column<'_>) -> Vec<bool> {
        let Column { namespace, group, coordinate, keys } = *column;
        let request = ContainsRequest { namespace, group, coordinate, keys, lease: None };
        match self.store.contains(&request) {
            Ok(reply) => reply.presence.iter().map(|presence| *presence == Presence::Here).collect(),
            Err(_) => vec![false; keys.len()],
        }
    }

    fn own_copies(&self, tags: &[Tag]) -> Vec<Vec<NodeId>> {
        let mut found = Vec::with_capacity(tags.len());
        for some in tags.chunks(AT_ONCE) {
            let directory = self.directory();
            found.extend(some.iter().map(|tag| directory.copies(tag).collect::<Vec<_>>()));
        }
        found
    }

    async fn ask(&self, holder: NodeId, tags: &[Tag], timeout: Duration) -> Option<Vec<Vec<NodeId>>> {
        let link = self.link(holder).filter(|link| link.state().is_connected)?;
        let mut found = Vec::with_capacity(tags.len());
        for some in tags.chunks(wire::TAGS_MAX) {
            let asked = proto::LocateRequest { tags: wire::tag_bytes(some.iter()) };
            let reply = link.locate(asked, timeout).await.ok()?;
            let nodes: Vec<NodeId> =
                reply.nodes.as_chunks::<16>().0.iter().map(|id| kvarts_layout::StoreId(*id)).collect();
            found.extend(wire::copies(&reply.copies, &nodes, some.len()).ok()?);
        }
        Some(found)
    }
}
