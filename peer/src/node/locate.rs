//! Who has blocks: asked of the nodes that hold their partitions, all at once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::future::join_all;
use kvarts_cluster::members::NodeId;
use kvarts_cluster::partition::Tag;
use kvarts_contract::api::{ContainsRequest, KvStore, Presence};
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId, planted};
use kvarts_wire::proto;

use super::{ClusterNode, wire};

/// How long puts and reads wait for nodes that are asked what they have. A node that has not answered by then counts as one
/// without any of them.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// A put: it stores what it was not told of.
    pub put: Duration,
    /// A read, before it begins.
    pub read: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { put: Duration::from_millis(10), read: Duration::from_millis(25) }
    }
}

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

/// What was asked, and of whom.
#[derive(Debug, Default)]
pub(super) struct Asked {
    pub(super) located: Located,
    /// Holders that did not answer, and the places of the blocks that they were asked for.
    pub(super) silent: Vec<(NodeId, Vec<usize>)>,
    /// Where that was asked for: the places of blocks with which a chain begins that is owned now, and the owners.
    pub(super) owners: Vec<(usize, NodeId)>,
}

/// Blocks of which a holder knows no copy, though there may be some.
#[derive(Debug, Default)]
pub(super) struct Unknown {
    pub(super) places: Vec<usize>,
    /// The nodes that may have some of them: the holder has not been sent everything that they have, or had no room for it.
    pub(super) with: BTreeSet<NodeId>,
}

impl Unknown {
    /// The same of blocks that come behind `first` others.
    fn extend(&mut self, first: usize, other: Self) {
        self.places.extend(other.places.into_iter().map(|at| first + at));
        self.with.extend(other.with);
    }
}

/// What one holder knows of blocks.
#[derive(Debug, Default)]
struct Known {
    copies: Vec<Vec<NodeId>>,
    unknown: Unknown,
    /// Who owns the chains that begin with some of them.
    owners: Vec<(usize, NodeId)>,
}

/// What this node and others have together of some blocks, and can be read here now.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Together {
    /// Of each block whether it can be read.
    pub blocks: Vec<bool>,
    /// Places of blocks that may be with nodes that are not known: who holds their part of the directory did not answer, or is not whole.
    pub unasked: Vec<u32>,
    /// Places of blocks that are not here and that each node has.
    pub with: BTreeMap<NodeId, Vec<u32>>,
    /// Places of those that cannot be read and that each node is said to have to which there is no way now.
    pub unreadable: BTreeMap<NodeId, Vec<u32>>,
}

/// What is known of some blocks' copies.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Located {
    /// For each block the nodes that are said to have it.
    pub copies: Vec<Vec<NodeId>>,
    /// The places of blocks whose copies are unknown: their holder did not answer in time, or knows of none and has not been told of
    /// everything.
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
        self.ask_holders(tags, false, timeout).await.located
    }

    /// The same; and the places of blocks with which a chain begins that is owned now, with the owners.
    pub async fn locate_with_owners(
        &self,
        tags: &[Tag],
        timeout: Duration,
    ) -> (Located, Vec<(usize, NodeId)>) {
        let Asked { located, owners, .. } = self.ask_holders(tags, true, timeout).await;
        (located, owners)
    }

    /// The same; and which holders did not answer in time, and, if `owners` are wanted, who owns the chains that begin with these blocks.
    pub(super) async fn ask_holders(&self, tags: &[Tag], owners: bool, timeout: Duration) -> Asked {
        let mut by_holder = self.directory().by_holder(tags);
        // Others have their question before this node looks at its own part.
        by_holder.sort_by_key(|(holder, _)| *holder == self.me);
        let asked = by_holder.into_iter().map(|(holder, places)| async move {
            let known = if holder == self.me {
                Some(self.known_here(tags, &places, owners))
            } else {
                self.ask(holder, tags, &places, owners, timeout).await
            };
            (holder, places, known)
        });
        let located = Located { copies: vec![Vec::new(); tags.len()], unasked: Vec::new() };
        let mut all = Asked { located, ..Asked::default() };
        for (holder, places, known) in join_all(asked).await {
            let Some(Known { copies, unknown, owners }) = known else {
                all.located.unasked.extend(&places);
                all.silent.push((holder, places));
                continue;
            };
            if self.may_be_with(&unknown.with) && !planted!("holder-taken-for-whole") {
                all.located.unasked.extend(unknown.places.iter().filter_map(|at| places.get(*at)));
            }
            all.owners.extend(owners.iter().filter_map(|(at, owner)| Some((*places.get(*at)?, *owner))));
            for (place, nodes) in places.into_iter().zip(copies) {
                if let Some(of) = all.located.copies.get_mut(place) {
                    *of = nodes;
                }
            }
        }
        all
    }

    /// Which of these blocks a read that begins now can have, of this node or of others. No node is asked about blocks that are here.
    pub async fn presence(&self, column: Column<'_>, timeout: Duration) -> Together {
        let blocks = self.own_blocks(&column);
        let missing = |(_, (here, _)): &(usize, (&bool, &BlockKey))| !**here;
        let missing = blocks.iter().zip(column.keys).enumerate().filter(missing);
        let (places, tags): (Vec<usize>, Vec<Tag>) =
            missing.map(|(place, (_, key))| (place, column.tag(key))).unzip();
        let mut together = Together { blocks, ..Together::default() };
        if tags.is_empty() {
            return together;
        }
        let located = self.locate(&tags, timeout).await;
        let unasked = located.unasked.iter().filter_map(|at| places.get(*at));
        together.unasked = unasked.map(|place| *place as u32).collect();
        let lanes = self.lanes();
        let mut known: BTreeMap<NodeId, bool> = BTreeMap::new();
        for (place, nodes) in places.into_iter().zip(&located.copies) {
            let mut can_read = |node: &NodeId| {
                *known.entry(*node).or_insert_with(|| self.can_read(&lanes, node, &column.namespace))
            };
            let is_there = nodes.iter().any(&mut can_read);
            for node in nodes.iter().filter(|node| **node != self.me) {
                match (is_there, can_read(node)) {
                    (true, true) => together.with.entry(*node).or_default().push(place as u32),
                    (false, _) => together.unreadable.entry(*node).or_default().push(place as u32),
                    (true, false) => {}
                }
            }
            if let Some(there) = together.blocks.get_mut(place) {
                *there = is_there;
            }
        }
        together
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

    /// What this node's own part of the directory knows of the blocks at these places.
    fn known_here(&self, tags: &[Tag], places: &[usize], owners: bool) -> Known {
        let tag = |place: &usize| tags.get(*place).copied();
        let mut known = Known { copies: Vec::with_capacity(places.len()), ..Known::default() };
        for (turn, places) in places.chunks(AT_ONCE).enumerate() {
            let unknown =
                self.look_up(places.iter().filter_map(tag), |copies| known.copies.push(copies.collect()));
            known.unknown.extend(turn * AT_ONCE, unknown);
        }
        if owners {
            known.owners = self.owners(places.iter().filter_map(tag));
        }
        known
    }

    /// Looks blocks up in this node's own part of the directory; `found` has the copies of each.
    pub(super) fn look_up(
        &self,
        tags: impl Iterator<Item = Tag>,
        mut found: impl FnMut(&mut dyn Iterator<Item = NodeId>),
    ) -> Unknown {
        let (mut unknown, mut looked_at) = (Unknown::default(), BTreeSet::new());
        let mut directory = self.directory();
        for (place, tag) in tags.enumerate() {
            let mut copies = directory.asked(&tag).peekable();
            let is_found = copies.peek().is_some();
            found(&mut copies);
            drop(copies);
            let partition = tag.partition();
            if is_found || directory.lacking(partition).next().is_none() {
                continue;
            }
            unknown.places.push(place);
            if looked_at.insert(partition) {
                unknown.with.extend(directory.lacking(partition));
            }
        }
        unknown
    }

    /// Whether a block of which nothing is known may be read here all the same: one of these nodes, which may have it, is not away.
    fn may_be_with(&self, nodes: &BTreeSet<NodeId>) -> bool {
        let mut others = nodes.iter().filter(|node| **node != self.me);
        others.any(|node| self.link(*node).is_some_and(|link| !link.is_away()))
    }

    /// What another holder says of the blocks at these places.
    async fn ask(
        &self,
        holder: NodeId,
        tags: &[Tag],
        places: &[usize],
        owners: bool,
        timeout: Duration,
    ) -> Option<Known> {
        let link = self.link(holder).filter(|link| link.state().is_connected)?;
        let mut known = Known { copies: Vec::with_capacity(places.len()), ..Known::default() };
        for (turn, some) in places.chunks(wire::TAGS_MAX).enumerate() {
            let asked = proto::LocateRequest { tags: wire::tag_bytes(tags, some), number: 0, owners };
            let timeout = if planted!("silent-holder-awaited") { timeout * 400 } else { timeout };
            let reply = link.locate(asked, timeout).await.ok()?;
            let nodes: Vec<NodeId> =
                reply.nodes.as_chunks::<16>().0.iter().map(|id| kvarts_layout::StoreId(*id)).collect();
            let first = turn * wire::TAGS_MAX;
            known.copies.extend(wire::copies(&reply.copies, &nodes, some.len()).ok()?);
            let with = reply.unknown_with.as_chunks::<16>().0.iter().map(|id| kvarts_layout::StoreId(*id));
            let places = wire::places(&reply.unknown, some.len()).ok()?;
            known.unknown.extend(first, Unknown { places, with: with.collect() });
            let owners = wire::owners(&reply.owners, &nodes, some.len()).ok()?;
            known.owners.extend(owners.into_iter().map(|(at, owner)| (first + at, owner)));
        }
        Some(known)
    }
}
