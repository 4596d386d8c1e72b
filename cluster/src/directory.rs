//! Who has which block: the entries of the partitions that this node holds.
//!
//! Entries are hints. Each node's stream of events feeds them; what is lost is rebuilt from a snapshot that the node sends again;
//! a wrong one costs a reader one request in vain. So nothing here is durable, everything is bounded, and entries of nodes that
//! have left go when their partition is next touched.
//!
//! A partition is a list in the order of tags: an entry takes 40 bytes, and a list has an eighth more room than it needs at most.

use std::collections::BTreeMap;

use kvarts_layout::OriginId;

use crate::members::{Members, NodeId};
use crate::partition::{Holders, PARTITIONS, Partition, Tag};

/// Nodes of which one block may be known at once: more are of no use to a reader.
pub const HOLDERS_MAX: usize = 16;

/// Something that happened to a block on a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// The node has it, produced as `OriginId` says.
    Stored(Tag, OriginId),
    /// The node has it no more.
    Gone(Tag),
}

/// A copy of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Copy {
    /// Which node has it.
    pub node: NodeId,
    /// Which production of the block it is.
    pub origin: OriginId,
}

/// A copy, as it is kept.
#[derive(Clone, Copy, Debug)]
struct Entry {
    tag: Tag,
    origin: OriginId,
    node: u16,
    /// The snapshot of its node that named it last, or that was the last when an event did.
    snapshot: u16,
}

/// One partition.
#[derive(Clone, Debug, Default)]
struct Shelf {
    entries: Vec<Entry>,
    /// The departures that were applied to it.
    swept: u64,
}

impl Shelf {
    /// The places of a block's copies.
    fn range(&self, tag: &Tag) -> std::ops::Range<usize> {
        let from = self.entries.partition_point(|entry| entry.tag < *tag);
        let copies = self.entries.iter().skip(from).take_while(|entry| entry.tag == *tag).count();
        from..from + copies
    }

    fn insert(&mut self, at: usize, entry: Entry) {
        if self.entries.len() == self.entries.capacity() {
            self.entries.reserve_exact(self.entries.len() / 8 + 4);
        }
        self.entries.insert(at, entry);
    }
}

/// What became of changes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Applied {
    /// Changes that were taken in.
    pub taken: u64,
    /// Blocks that there was no room for.
    pub refused: u64,
    /// Changes of partitions that this node does not hold.
    pub elsewhere: u64,
}

/// What a directory lacks after a change of the members, and has to ask for.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Lacks {
    /// Partitions that this node has begun to hold: of every member.
    pub partitions: Vec<Partition>,
    /// Members that have joined: every partition that this node holds.
    pub members: Vec<NodeId>,
}

/// The directory of one node.
#[derive(Debug)]
pub struct Directory {
    me: NodeId,
    holders: Holders,
    shelves: BTreeMap<Partition, Shelf>,
    /// Members by number. Numbers of those who left are used again once their entries are gone.
    nodes: Vec<Option<NodeId>>,
    numbers: BTreeMap<NodeId, u16>,
    /// The snapshot of each node and partition that is under way or was the last.
    snapshots: BTreeMap<(u16, Partition), u16>,
    /// Departures so far, and after how many of them each number of a departed node left.
    departures: u64,
    departed: BTreeMap<u16, u64>,
    entries: u64,
    entries_max: u64,
}

impl Directory {
    /// An empty directory of this node, with room for so many copies.
    pub fn new(me: NodeId, members: &Members, entries_max: u64) -> Self {
        let mut directory = Self {
            me,
            holders: Holders::of(members),
            shelves: BTreeMap::new(),
            nodes: Vec::new(),
            numbers: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            departures: 0,
            departed: BTreeMap::new(),
            entries: 0,
            entries_max,
        };
        directory.change_members(members);
        directory
    }

    /// The members have changed; an older epoch changes nothing.
    pub fn change_members(&mut self, members: &Members) -> Lacks {
        if members.epoch() < self.holders.epoch() {
            return Lacks::default();
        }
        self.holders = Holders::of(members);
        let gone: Vec<NodeId> =
            self.numbers.keys().filter(|node| members.place_of(**node).is_none()).copied().collect();
        for node in gone {
            self.depart(node);
        }
        let joined: Vec<NodeId> = members
            .list()
            .iter()
            .map(|member| member.id)
            .filter(|node| !self.numbers.contains_key(node))
            .collect();
        joined.iter().for_each(|node| self.admit(*node));
        let (me, holders) = (self.me, &self.holders);
        let mut dropped = 0;
        self.shelves.retain(|partition, shelf| {
            let held = holders.holder(*partition) == Some(me);
            dropped += if held { 0 } else { shelf.entries.len() as u64 };
            held
        });
        self.entries -= dropped;
        self.snapshots.retain(|(_, partition), _| holders.holder(*partition) == Some(me));
        let mut partitions = Vec::new();
        for partition in self.holders.held_by(me) {
            if let std::collections::btree_map::Entry::Vacant(vacant) = self.shelves.entry(partition) {
                vacant.insert(Shelf { entries: Vec::new(), swept: self.departures });
                partitions.push(partition);
            }
        }
        Lacks { partitions, members: joined }
    }

    fn admit(&mut self, node: NodeId) {
        let free = self.nodes.iter().position(Option::is_none);
        let number = free.unwrap_or(self.nodes.len());
        match self.nodes.get_mut(number) {
            Some(place) => *place = Some(node),
            None => self.nodes.push(Some(node)),
        }
        // Members are bounded, and so are those whose entries wait to be swept.
        self.numbers.insert(node, number as u16);
    }

    /// A node has left: its number is used again after its entries have gone, here and now if there are too many of those.
    fn depart(&mut self, node: NodeId) {
        let Some(number) = self.numbers.remove(&node) else { return };
        self.departures += 1;
        self.departed.insert(number, self.departures);
        self.snapshots.retain(|(of, _), _| *of != number);
        if self.departed.len() >= crate::members::MEMBERS_MAX {
            let all: Vec<Partition> = self.shelves.keys().copied().collect();
            all.into_iter().for_each(|partition| self.sweep(partition));
            self.forget_departed();
        }
    }

    /// Removes the entries of departed nodes from one partition.
    fn sweep(&mut self, partition: Partition) {
        let Some(shelf) = self.shelves.get_mut(&partition) else { return };
        if shelf.swept == self.departures {
            return;
        }
        let before = shelf.entries.len();
        let (swept, departed) = (shelf.swept, &self.departed);
        shelf.entries.retain(|entry| departed.get(&entry.node).is_none_or(|at| *at <= swept));
        shelf.swept = self.departures;
        self.entries -= (before - shelf.entries.len()) as u64;
    }

    /// Numbers of departed nodes whose entries are gone everywhere may be used again.
    fn forget_departed(&mut self) {
        let swept = self.shelves.values().map(|shelf| shelf.swept).min().unwrap_or(self.departures);
        let nodes = &mut self.nodes;
        self.departed.retain(|number, at| {
            let stays = *at > swept;
            if !stays && let Some(place) = nodes.get_mut(usize::from(*number)) {
                *place = None;
            }
            stays
        });
    }

    /// Sweeps one partition after the other, as a caller that has time does: so what departed is gone before long, whether its
    /// partitions are touched or not. Gives how many entries it looked at.
    pub fn tidy(&mut self, partition: Partition) -> u64 {
        let looked = self.shelves.get(&partition).map_or(0, |shelf| shelf.entries.len() as u64);
        self.sweep(partition);
        if partition.number() + 1 == PARTITIONS {
            self.forget_departed();
        }
        looked
    }

    /// Takes what happened on a node in, in its order. Of a node that is no member nothing is taken.
    pub fn apply(&mut self, node: NodeId, changes: &[Change]) -> Applied {
        let mut applied = Applied::default();
        let Some(&number) = self.numbers.get(&node) else { return applied };
        for change in changes {
            let (Change::Stored(tag, _) | Change::Gone(tag)) = change;
            let partition = tag.partition();
            self.sweep(partition);
            let snapshot = self.snapshots.get(&(number, partition)).copied().unwrap_or(0);
            let Some(shelf) = self.shelves.get_mut(&partition) else {
                applied.elsewhere += 1;
                continue;
            };
            let range = shelf.range(tag);
            let copies = shelf.entries.get(range.clone()).unwrap_or_default();
            let at = copies.iter().position(|entry| entry.node == number).map(|place| range.start + place);
            match (change, at) {
                (Change::Stored(_, origin), Some(at)) => {
                    if let Some(entry) = shelf.entries.get_mut(at) {
                        (entry.origin, entry.snapshot) = (*origin, snapshot);
                    }
                }
                (Change::Stored(..), None)
                    if range.len() >= HOLDERS_MAX || self.entries >= self.entries_max =>
                {
                    applied.refused += 1;
                    continue;
                }
                (Change::Stored(_, origin), None) => {
                    let entry = Entry { tag: *tag, origin: *origin, node: number, snapshot };
                    shelf.insert(range.end, entry);
                    self.entries += 1;
                }
                (Change::Gone(_), Some(at)) => {
                    shelf.entries.remove(at);
                    self.entries -= 1;
                }
                (Change::Gone(_), None) => {}
            }
            applied.taken += 1;
        }
        applied
    }

    /// A node begins to send everything that it has of a partition, as changes.
    pub fn begin_snapshot(&mut self, node: NodeId, partition: Partition) {
        if let (Some(&number), true) = (self.numbers.get(&node), self.shelves.contains_key(&partition)) {
            let snapshot = self.snapshots.entry((number, partition)).or_default();
            *snapshot = snapshot.wrapping_add(1);
        }
    }

    /// It has sent everything: what it did not name since it began it does not have.
    pub fn end_snapshot(&mut self, node: NodeId, partition: Partition) {
        let Some(&number) = self.numbers.get(&node) else { return };
        let Some(&snapshot) = self.snapshots.get(&(number, partition)) else { return };
        if let Some(shelf) = self.shelves.get_mut(&partition) {
            let before = shelf.entries.len();
            shelf.entries.retain(|entry| entry.node != number || entry.snapshot == snapshot);
            self.entries -= (before - shelf.entries.len()) as u64;
        }
    }

    /// Who has a block. Whether anybody else has it cannot be concluded from an empty answer: entries are hints.
    pub fn copies(&self, tag: &Tag) -> impl Iterator<Item = Copy> + '_ {
        let shelf = self.shelves.get(&tag.partition());
        let entries = shelf.and_then(|shelf| shelf.entries.get(shelf.range(tag))).unwrap_or_default();
        let swept = shelf.map_or(0, |shelf| shelf.swept);
        entries.iter().filter_map(move |entry| {
            let is_gone = self.departed.get(&entry.node).is_some_and(|at| *at > swept);
            let node = self.nodes.get(usize::from(entry.node)).copied().flatten();
            node.filter(|_| !is_gone).map(|node| Copy { node, origin: entry.origin })
        })
    }

    /// The partitions that this node holds.
    pub fn held(&self) -> impl Iterator<Item = Partition> + '_ {
        self.shelves.keys().copied()
    }

    /// Who holds the partition of a block.
    pub fn holder_of(&self, tag: &Tag) -> Option<NodeId> {
        self.holders.holder(tag.partition())
    }

    /// Copies that are known, those of departed nodes included until their partition is swept.
    pub fn len(&self) -> u64 {
        self.entries
    }

    /// Whether no copy is known.
    pub fn is_empty(&self) -> bool {
        self.entries == 0
    }

    /// Bytes that the entries take.
    pub fn bytes(&self) -> u64 {
        let room: usize = self.shelves.values().map(|shelf| shelf.entries.capacity()).sum();
        (room * size_of::<Entry>()) as u64
    }
}

#[cfg(test)]
mod tests;
