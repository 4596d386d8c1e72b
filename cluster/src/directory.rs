//! Who has which block: the entries of the partitions that this node holds.
//!
//! Entries are hints. Each node's stream of events feeds them; what is lost is rebuilt from a snapshot that the node sends again;
//! a wrong one costs a reader one request in vain. So nothing here is durable, everything is bounded, and entries of nodes that
//! have left go when their partition is next touched.
//!
//! An entry takes 20 bytes, in lists in the order of tags that have an eighth more room than they need at most.

use std::collections::{BTreeMap, BTreeSet};

mod shelf;
mod wholeness;

use kvarts_layout::planted;
use shelf::{Entry, Found, Shelf};
use wholeness::Lacking;

use crate::members::{Members, NodeId};
use crate::partition::{Holders, PARTITIONS, Partition, Tag};

/// Nodes of which one block may be known at once: more are of no use to a reader.
pub const HOLDERS_MAX: usize = 16;

/// Something that happened to a block on a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// The node has it.
    Stored(Tag),
    /// The node has it no more.
    Gone(Tag),
}

impl Change {
    /// Which block it is about.
    pub fn tag(&self) -> Tag {
        let (Self::Stored(tag) | Self::Gone(tag)) = self;
        *tag
    }
}

/// The partitions that are held, by their number: a look-up asks for thousands, and goes to each at once.
#[derive(Debug)]
struct Shelves(Vec<Option<Shelf>>);

impl Default for Shelves {
    fn default() -> Self {
        Self(vec![None; PARTITIONS])
    }
}

impl Shelves {
    fn get(&self, partition: Partition) -> Option<&Shelf> {
        self.0.get(partition.number())?.as_ref()
    }

    fn get_mut(&mut self, partition: Partition) -> Option<&mut Shelf> {
        self.0.get_mut(partition.number())?.as_mut()
    }

    fn all(&self) -> impl Iterator<Item = &Shelf> {
        self.0.iter().flatten()
    }

    fn held(&self) -> impl Iterator<Item = Partition> + '_ {
        Partition::all().filter(|partition| self.get(*partition).is_some())
    }
}

/// What became of changes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Applied {
    /// Changes that were taken in.
    pub taken: u64,
    /// Blocks that there was no room for.
    pub refused: u64,
    /// Copies that were dropped for others, which are newer: nothing had asked for them lately.
    pub dropped: u64,
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
    shelves: Shelves,
    /// Members by number. Numbers of those who left are used again once their entries are gone.
    nodes: Vec<Option<NodeId>>,
    numbers: BTreeMap<NodeId, u16>,
    /// The snapshot of each node and partition that is under way or was the last.
    snapshots: BTreeMap<(u16, Partition), u16>,
    lacking: Lacking,
    /// Departures so far, and after how many of them each number of a departed node left.
    departures: u64,
    departed: BTreeMap<u16, u64>,
    room: Room,
}

/// How many entries there are and may be. Half of the room is for the nodes that come first, the other is each member's own in
/// equal parts: a node that announces without end takes no other's.
#[derive(Debug)]
struct Room {
    entries: u64,
    most: u64,
    /// Entries of each node, by number.
    by_node: Vec<u64>,
    /// What each member has for itself.
    own: u64,
    /// Entries beyond that, of all nodes, and how many there may be.
    beyond: u64,
    beyond_most: u64,
}

impl Room {
    fn new(most: u64) -> Self {
        Self { entries: 0, most, by_node: Vec::new(), own: 0, beyond: 0, beyond_most: most }
    }

    /// There are `members` members.
    fn share(&mut self, members: usize) {
        let members = members.max(1) as u64;
        self.own = self.most / 2 / members;
        self.beyond_most = self.most - self.own * members;
        self.beyond = self.by_node.iter().map(|entries| entries.saturating_sub(self.own)).sum();
    }

    fn has(&self, node: u16) -> bool {
        self.entries < self.most && (self.of(node) < self.own || self.beyond < self.beyond_most)
    }

    /// Whether a copy of this node may make room for one of another node, or of its own: it is not of what the node has for itself, and the
    /// other one has no more. So a node that announces without end drops its own.
    fn may_drop(&self, node: u16, room_for: u16) -> bool {
        self.of(node) > self.own && self.of(node) >= self.of(room_for)
    }

    fn of(&self, node: u16) -> u64 {
        self.by_node.get(usize::from(node)).copied().unwrap_or(0)
    }

    fn add(&mut self, node: u16) {
        let at = usize::from(node);
        if self.by_node.len() <= at {
            self.by_node.resize(at + 1, 0);
        }
        self.entries += 1;
        if let Some(entries) = self.by_node.get_mut(at) {
            self.beyond += u64::from(*entries >= self.own);
            *entries += 1;
        }
    }

    fn remove(&mut self, node: u16) {
        self.entries -= 1;
        if let Some(entries) = self.by_node.get_mut(usize::from(node)) {
            *entries -= 1;
            self.beyond -= u64::from(*entries >= self.own);
        }
    }
}

impl Directory {
    /// An empty directory of this node, with room for `entries_max` copies.
    pub fn new(me: NodeId, members: &Members, entries_max: u64) -> Self {
        let mut directory = Self {
            me,
            holders: Holders::of(members),
            shelves: Shelves::default(),
            nodes: Vec::new(),
            numbers: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            lacking: Lacking::default(),
            departures: 0,
            departed: BTreeMap::new(),
            room: Room::new(entries_max),
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
        let (me, holders, room) = (self.me, &self.holders, &mut self.room);
        for (partition, place) in Partition::all().zip(&mut self.shelves.0) {
            if holders.holder(partition) != Some(me)
                && let Some(mut shelf) = place.take()
            {
                shelf.retain(|_| false, |node| room.remove(node));
            }
        }
        room.share(members.list().len());
        self.snapshots.retain(|(_, partition), _| holders.holder(*partition) == Some(me));
        self.lacking.keep_partitions(|partition| holders.holder(partition) == Some(me));
        let mut partitions = Vec::new();
        for partition in self.holders.held_by(me) {
            if let Some(place @ None) = self.shelves.0.get_mut(partition.number()) {
                *place = Some(Shelf::empty(self.departures));
                partitions.push(partition);
            }
        }
        for partition in &partitions {
            self.numbers.values().for_each(|number| self.lacking.expect_snapshot(*number, *partition));
        }
        joined.iter().for_each(|node| self.expect_all(*node));
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
        self.lacking.forget(number);
        if self.departed.len() >= crate::members::MEMBERS_MAX {
            let all: Vec<Partition> = self.shelves.held().collect();
            all.into_iter().for_each(|partition| self.sweep(partition));
            self.forget_departed();
        }
    }

    /// Removes the entries of departed nodes from one partition.
    fn sweep(&mut self, partition: Partition) {
        let Some(shelf) = self.shelves.get_mut(partition) else { return };
        if shelf.swept == self.departures {
            return;
        }
        let (swept, departed) = (shelf.swept, &self.departed);
        let room = &mut self.room;
        shelf.retain(
            |entry| departed.get(&entry.node).is_none_or(|at| *at <= swept),
            |node| room.remove(node),
        );
        shelf.swept = self.departures;
    }

    /// Numbers of departed nodes whose entries are gone everywhere may be used again.
    fn forget_departed(&mut self) {
        let swept = self.shelves.all().map(|shelf| shelf.swept).min().unwrap_or(self.departures);
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
        let looked = self.shelves.get(partition).map_or(0, Shelf::len);
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
            let tag = &change.tag();
            let partition = tag.partition();
            self.sweep(partition);
            let snapshot = self.snapshots.get(&(number, partition)).copied().unwrap_or(0);
            let Some(shelf) = self.shelves.get_mut(partition) else {
                applied.elsewhere += 1;
                continue;
            };
            let mut found = shelf.find(tag);
            let copies = shelf.copies(&found);
            let at =
                copies.iter().position(|entry| entry.node == number).map(|place| found.places.start + place);
            match (change, at) {
                (Change::Stored(_), Some(at)) => {
                    if let Some(entry) = shelf.entry(found.chunk, at) {
                        entry.name(snapshot);
                    }
                }
                (Change::Stored(_), None) if copies.len() >= HOLDERS_MAX => {
                    applied.refused += 1;
                    continue;
                }
                (Change::Stored(_), None) => {
                    if !self.room.has(number) {
                        let room = &self.room;
                        let Some(of) = shelf.drop_beside(&found, |node| room.may_drop(node, number)) else {
                            self.lacking.leave_out(number, partition);
                            applied.refused += 1;
                            continue;
                        };
                        self.room.remove(of);
                        self.lacking.leave_out(of, partition);
                        applied.dropped += 1;
                        found = shelf.find(tag);
                    }
                    shelf.insert(&found, Entry::new(*tag, number, snapshot));
                    self.room.add(number);
                }
                (Change::Gone(_), Some(at)) => {
                    shelf.remove(found.chunk, at);
                    self.room.remove(number);
                }
                (Change::Gone(_), None) => {}
            }
            applied.taken += 1;
        }
        applied
    }

    /// A node begins to send everything that it has of a partition, as changes.
    pub fn begin_snapshot(&mut self, node: NodeId, partition: Partition) {
        if let (Some(&number), true) = (self.numbers.get(&node), self.shelves.get(partition).is_some()) {
            let snapshot = self.snapshots.entry((number, partition)).or_default();
            *snapshot = snapshot.wrapping_add(1);
            self.lacking.expect_snapshot(number, partition);
        }
    }

    /// It has sent everything: what it did not name since it began it does not have.
    pub fn end_snapshot(&mut self, node: NodeId, partition: Partition) {
        let Some(&number) = self.numbers.get(&node) else { return };
        let Some(&snapshot) = self.snapshots.get(&(number, partition)) else { return };
        if let Some(shelf) = self.shelves.get_mut(partition) {
            let room = &mut self.room;
            let stays = |entry: &Entry| {
                entry.node != number || entry.is_of(snapshot) || planted!("snapshot-keeps-the-gone")
            };
            shelf.retain(stays, |node| room.remove(node));
        }
        self.lacking.end_snapshot(number, partition);
    }

    /// What a node has is not heard any more: until it has sent everything again, copies of it may be missing.
    pub fn expect_all(&mut self, node: NodeId) {
        let Some(&number) = self.numbers.get(&node) else { return };
        let lacking = &mut self.lacking;
        self.shelves.held().for_each(|partition| lacking.expect_snapshot(number, partition));
    }

    /// The nodes of which copies may be missing in a partition: their snapshot has not ended, or there was no room.
    pub fn lacking(&self, partition: Partition) -> impl Iterator<Item = NodeId> + '_ {
        self.lacking.of(partition).filter_map(|number| self.nodes.get(usize::from(number)).copied().flatten())
    }

    /// The partitions in which copies may be missing.
    pub fn partial(&self) -> BTreeSet<Partition> {
        self.lacking.partitions()
    }

    /// The nodes that are known to have a block. An empty answer does not say that no node has it: entries are hints.
    pub fn copies(&self, tag: &Tag) -> impl Iterator<Item = NodeId> + '_ {
        let shelf = self.shelves.get(tag.partition()).filter(|shelf| !shelf.is_empty());
        self.nodes_of(shelf.map(|shelf| (shelf, shelf.find(tag))))
    }

    /// The same, for a reader: copies that are asked for stay longer than others where room is short.
    pub fn asked(&mut self, tag: &Tag) -> impl Iterator<Item = NodeId> + '_ {
        let shelf = self.shelves.get_mut(tag.partition()).filter(|shelf| !shelf.is_empty());
        let found = shelf.map(|shelf| {
            let found = shelf.find(tag);
            shelf.note_asked(&found);
            found
        });
        self.nodes_of(self.shelves.get(tag.partition()).zip(found))
    }

    fn nodes_of<'a>(&'a self, found: Option<(&'a Shelf, Found)>) -> impl Iterator<Item = NodeId> + 'a {
        let swept = found.as_ref().map_or(0, |(shelf, _)| shelf.swept);
        let entries = found.map(|(shelf, found)| shelf.copies(&found)).unwrap_or_default();
        entries.iter().filter_map(move |entry| {
            let is_gone = self.departed.get(&entry.node).is_some_and(|at| *at > swept);
            self.nodes
                .get(usize::from(entry.node))
                .copied()
                .flatten()
                .filter(|_| !is_gone || planted!("departed-still-listed"))
        })
    }

    /// The partitions that this node holds.
    pub fn held(&self) -> impl Iterator<Item = Partition> + '_ {
        self.shelves.held()
    }

    /// Who holds the partition of a block.
    pub fn holder_of(&self, tag: &Tag) -> Option<NodeId> {
        self.holders.holder(tag.partition())
    }

    /// Blocks by who holds their partition.
    pub fn by_holder(&self, tags: &[Tag]) -> Vec<(NodeId, Vec<usize>)> {
        self.holders.split(tags)
    }

    /// Copies that are known, those of departed nodes included until their partition is swept.
    pub fn len(&self) -> u64 {
        self.room.entries
    }

    /// Copies that are known of one member.
    pub fn len_of(&self, node: NodeId) -> u64 {
        let number = self.numbers.get(&node);
        number.and_then(|number| self.room.by_node.get(usize::from(*number))).copied().unwrap_or(0)
    }

    /// Whether no copy is known.
    pub fn is_empty(&self) -> bool {
        self.room.entries == 0
    }

    /// Bytes that the entries take.
    pub fn bytes(&self) -> u64 {
        self.shelves.all().map(|shelf| shelf.bytes() as u64).sum()
    }
}

#[cfg(test)]
mod tests;
