//! Who has which block: the entries of the partitions that this node holds.
//!
//! Entries are hints. Each node's stream of events feeds them; what is lost is rebuilt from a snapshot that the node sends again;
//! a wrong one costs a reader one request in vain. So nothing here is durable, everything is bounded, and entries of nodes that
//! have left go when their partition is next touched.
//!
//! An entry takes 20 bytes, in lists in the order of tags that have an eighth more room than they need at most.

use std::collections::BTreeMap;

use kvarts_layout::planted;

use crate::members::{Members, NodeId};
use crate::partition::{Holders, PARTITIONS, Partition, Tag};

/// Nodes of which one block may be known at once: more are of no use to a reader.
pub const HOLDERS_MAX: usize = 16;

/// Entries of a chunk: it is split when it has as many.
const CHUNK_MAX: usize = 512;

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

/// A copy, as it is kept.
#[derive(Clone, Copy, Debug)]
struct Entry {
    tag: Tag,
    node: u16,
    /// The snapshot of its node that named it last, or that was the last when an event did.
    snapshot: u16,
}

/// Where a block's copies are on a shelf.
#[derive(Clone, Debug)]
struct Found {
    chunk: usize,
    places: std::ops::Range<usize>,
}

/// One partition: chunks in the order of tags, so that an insertion moves the entries of one chunk and not of all. The copies of
/// a block are in one chunk.
#[derive(Clone, Debug, Default)]
struct Shelf {
    chunks: Vec<Vec<Entry>>,
    /// The departures that were applied to it.
    swept: u64,
}

impl Shelf {
    /// The places of a block's copies, or where they would be.
    fn find(&self, tag: &Tag) -> Found {
        let ends_before = |chunk: &Vec<Entry>| chunk.last().is_none_or(|last| last.tag < *tag);
        let chunk = self.chunks.partition_point(ends_before).min(self.chunks.len().saturating_sub(1));
        let entries = self.chunks.get(chunk).map(Vec::as_slice).unwrap_or_default();
        let from = entries.partition_point(|entry| entry.tag < *tag);
        let copies = entries.iter().skip(from).take_while(|entry| entry.tag == *tag).count();
        Found { chunk, places: from..from + copies }
    }

    fn copies(&self, found: &Found) -> &[Entry] {
        self.chunks.get(found.chunk).and_then(|chunk| chunk.get(found.places.clone())).unwrap_or_default()
    }

    fn entry(&mut self, chunk: usize, at: usize) -> Option<&mut Entry> {
        self.chunks.get_mut(chunk)?.get_mut(at)
    }

    /// Behind the copies that were found.
    fn insert(&mut self, found: &Found, entry: Entry) {
        if self.chunks.is_empty() {
            self.chunks.push(Vec::new());
        }
        let Some(chunk) = self.chunks.get_mut(found.chunk) else { return };
        if chunk.len() == chunk.capacity() {
            chunk.reserve_exact(chunk.len() / 8 + 4);
        }
        chunk.insert(found.places.end, entry);
        if chunk.len() < CHUNK_MAX {
            return;
        }
        // Between two blocks: the copies of one stay together.
        let middle = chunk.get(chunk.len() / 2).map(|entry| entry.tag);
        let at = chunk.partition_point(|entry| Some(entry.tag) < middle);
        let second = chunk.split_off(at);
        chunk.shrink_to_fit();
        self.chunks.insert(found.chunk + 1, second);
    }

    fn remove(&mut self, chunk: usize, at: usize) {
        if let Some(entries) = self.chunks.get_mut(chunk) {
            entries.remove(at);
            if entries.is_empty() {
                self.chunks.remove(chunk);
            }
        }
    }

    /// Keeps some entries; the others are told by their nodes.
    fn retain(&mut self, keep: impl Fn(&Entry) -> bool, mut gone: impl FnMut(u16)) {
        for chunk in &mut self.chunks {
            chunk.retain(|entry| {
                let stays = keep(entry);
                if !stays {
                    gone(entry.node);
                }
                stays
            });
        }
        self.chunks.retain(|chunk| !chunk.is_empty());
    }

    fn len(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.len() as u64).sum()
    }

    fn bytes(&self) -> usize {
        let room: usize = self.chunks.iter().map(Vec::capacity).sum();
        room * size_of::<Entry>() + self.chunks.capacity() * size_of::<Vec<Entry>>()
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
        let entries = self.by_node.get(usize::from(node)).copied().unwrap_or(0);
        self.entries < self.most && (entries < self.own || self.beyond < self.beyond_most)
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
        let mut partitions = Vec::new();
        for partition in self.holders.held_by(me) {
            if let Some(place @ None) = self.shelves.0.get_mut(partition.number()) {
                *place = Some(Shelf { chunks: Vec::new(), swept: self.departures });
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
            let found = shelf.find(tag);
            let copies = shelf.copies(&found);
            let at =
                copies.iter().position(|entry| entry.node == number).map(|place| found.places.start + place);
            match (change, at) {
                (Change::Stored(_), Some(at)) => {
                    if let Some(entry) = shelf.entry(found.chunk, at) {
                        entry.snapshot = snapshot;
                    }
                }
                (Change::Stored(_), None) if copies.len() >= HOLDERS_MAX || !self.room.has(number) => {
                    applied.refused += 1;
                    continue;
                }
                (Change::Stored(_), None) => {
                    shelf.insert(&found, Entry { tag: *tag, node: number, snapshot });
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
        }
    }

    /// It has sent everything: what it did not name since it began it does not have.
    pub fn end_snapshot(&mut self, node: NodeId, partition: Partition) {
        let Some(&number) = self.numbers.get(&node) else { return };
        let Some(&snapshot) = self.snapshots.get(&(number, partition)) else { return };
        if let Some(shelf) = self.shelves.get_mut(partition) {
            let room = &mut self.room;
            let stays = |entry: &Entry| {
                entry.node != number || entry.snapshot == snapshot || planted!("snapshot-keeps-the-gone")
            };
            shelf.retain(stays, |node| room.remove(node));
        }
    }

    /// The nodes that are known to have a block. An empty answer does not say that no node has it: entries are hints.
    pub fn copies(&self, tag: &Tag) -> impl Iterator<Item = NodeId> + '_ {
        let shelf = self.shelves.get(tag.partition()).filter(|shelf| !shelf.chunks.is_empty());
        let entries = shelf.map(|shelf| shelf.copies(&shelf.find(tag))).unwrap_or_default();
        let swept = shelf.map_or(0, |shelf| shelf.swept);
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
