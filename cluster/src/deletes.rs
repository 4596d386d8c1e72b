//! What was deleted in a cluster, and what is to end sooner: a list of it that every node has, and what keeps copies that are under
//! way from bringing it back.
//!
//! Each node numbers what was deleted through it, and every node has of each other one everything up to some number. So two nodes
//! that meet say how far they have come, and the rest is sent. The list is bounded: of what is oldest nothing is left but the
//! namespaces that it was of, and a node that hears of it then loses more than was deleted, never less.
//!
//! What is deleted is what was produced below a time, which is later than all that the deleting node knows, and than whatever
//! another node may have said of a production by a clock that is ahead by [`CLOCKS_APART_MS`]. A node that has heard of it gives
//! later times from then on.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};

use crate::members::NodeId;

/// How far the clocks of two nodes may be apart: a node that was away, whose clock is ahead by more, may keep what was deleted.
pub const CLOCKS_APART_MS: u64 = 5000;
/// How long after a delete other nodes may have hints to what it took.
const HINTS_MS: u64 = 30_000;
/// Bytes of the list, about, and its entries at most: then the older half becomes shorter.
const BYTES_MAX: usize = 16 << 20;
const ENTRIES_MAX: usize = 1 << 16;
/// What an entry counts beside its keys.
const ENTRY_BYTES: usize = 128;
/// Keys of recent entries that copies are compared with: a copy that began before those that are forgotten is not stored.
const RECENT_KEYS: usize = 1 << 18;
const RECENT_ENTRIES: usize = 1 << 12;

/// Up to which number of each node everything is known that was deleted through it.
pub type Known = BTreeMap<NodeId, u64>;

/// The name of an entry: through which node, and its number there. Numbers grow; some may be left out.
pub type Name = (NodeId, u64);

/// A group and a coordinate.
pub type Column = (Group, Coordinate);

/// What becomes of which blocks of a namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum What {
    /// Those under these keys go, in one column or all.
    Keys(Option<Column>, Vec<BlockKey>),
    /// Those under these keys go, with what descends from them as far as a node knows: copies do not say what they stand behind, so
    /// who knows names it.
    Prefix(Vec<BlockKey>),
    /// All go.
    Everything,
    /// Those under these keys of a column end at this time, in milliseconds since 1970, unless they end before.
    Sooner(Column, Vec<BlockKey>, u64),
}

impl What {
    /// The keys that are named one by one.
    pub fn keys(&self) -> &[BlockKey] {
        match self {
            Self::Keys(_, keys) | Self::Prefix(keys) | Self::Sooner(_, keys, _) => keys,
            Self::Everything => &[],
        }
    }
}

/// Something that was deleted, or is to end sooner.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// In which namespace.
    pub namespace: NamespaceId,
    /// What was produced before this time, in milliseconds since 1970.
    pub below_ms: u64,
    /// What becomes of it.
    pub what: What,
}

impl Entry {
    fn bytes(&self) -> usize {
        ENTRY_BYTES + self.what.keys().len() * 32
    }
}

/// An entry with its number, as one node tells it another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Numbered {
    /// Its name.
    pub name: Name,
    /// The number before it that is known or told: between the two there is nothing.
    pub after: u64,
    /// What it says.
    pub entry: Arc<Entry>,
}

/// What an entry is to the node that receives it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Told {
    /// It is the next one.
    New,
    /// It is known.
    Old,
    /// Something before it is not known.
    Early,
}

/// What another node is not known to have.
#[derive(Clone, Debug, Default)]
struct Lacks {
    names: BTreeSet<Name>,
    /// And how many of them are of each namespace.
    namespaces: BTreeMap<NamespaceId, u32>,
}

/// The list of one node.
#[derive(Clone, Debug, Default)]
pub struct Log {
    entries: BTreeMap<Name, Arc<Entry>>,
    /// In the order in which this node heard of them.
    order: VecDeque<Name>,
    bytes: usize,
    known: Known,
    lacks: BTreeMap<NodeId, Lacks>,
}

impl Log {
    /// Up to where this node has everything.
    pub fn known(&self) -> &Known {
        &self.known
    }

    /// The number that comes after all of a node.
    pub fn next(&self, node: &NodeId) -> u64 {
        self.known.get(node).map_or(1, |last| last.saturating_add(1))
    }

    /// What an entry is to this node.
    pub fn told(&self, (node, sequence): Name, after: u64) -> Told {
        match self.known.get(&node).copied().unwrap_or_default() {
            last if sequence <= last => Told::Old,
            last if after > last => Told::Early,
            _ => Told::New,
        }
    }

    /// Takes an entry in, which these nodes are not known to have.
    pub fn add(&mut self, name: Name, entry: Arc<Entry>, lacking: impl Iterator<Item = NodeId>) {
        let last = self.known.entry(name.0).or_default();
        *last = name.1.max(*last);
        for node in lacking {
            self.lacks.entry(node).or_default().add(name, entry.namespace);
        }
        self.bytes += entry.bytes();
        if self.entries.insert(name, entry).is_none() {
            self.order.push_back(name);
        }
    }

    /// What a node lacks that has come this far, in the order in which it is to be told: about `bytes_max` bytes of it, and whether there is
    /// more.
    pub fn beyond(&self, known: &Known, bytes_max: usize) -> (Vec<Numbered>, bool) {
        let (mut found, mut bytes) = (Vec::new(), 0);
        for node in self.known.keys() {
            let mut after = known.get(node).copied().unwrap_or_default();
            let range = (*node, after.saturating_add(1))..=(*node, u64::MAX);
            for (name, entry) in self.entries.range(range) {
                bytes += entry.bytes();
                if bytes > bytes_max && !found.is_empty() {
                    return (found, true);
                }
                found.push(Numbered { name: *name, after, entry: Arc::clone(entry) });
                after = name.1;
            }
        }
        (found, false)
    }

    /// A node has come this far.
    pub fn has(&mut self, node: NodeId, known: &Known) {
        let Some(lacks) = self.lacks.get_mut(&node) else { return };
        for (of, last) in known {
            let range = (*of, 0)..=(*of, *last);
            let names: Vec<Name> = lacks.names.range(range).copied().collect();
            for name in names {
                if let Some(entry) = self.entries.get(&name) {
                    lacks.remove(&name, &entry.namespace);
                }
            }
        }
        if lacks.names.is_empty() {
            self.lacks.remove(&node);
        }
    }

    /// These are the other nodes from now on.
    pub fn keep(&mut self, is_member: impl Fn(&NodeId) -> bool) {
        self.lacks.retain(|node, _| is_member(node));
    }

    /// Whether a node lacks anything, as far as is known.
    pub fn lacks(&self, node: &NodeId) -> bool {
        self.lacks.contains_key(node)
    }

    /// Whether a node lacks this entry, as far as is known.
    pub fn lacks_name(&self, node: &NodeId, name: &Name) -> bool {
        self.lacks.get(node).is_some_and(|lacks| lacks.names.contains(name))
    }

    /// Whether a node lacks anything of a namespace, as far as is known: what it has of that may be deleted.
    pub fn lacks_of(&self, node: &NodeId, namespace: &NamespaceId) -> bool {
        self.lacks.get(node).is_some_and(|lacks| lacks.namespaces.contains_key(namespace))
    }

    /// Whether every node has everything.
    pub fn is_settled(&self) -> bool {
        self.lacks.is_empty()
    }

    /// An entry.
    pub fn entry(&self, name: &Name) -> Option<&Arc<Entry>> {
        self.entries.get(name)
    }

    /// Entries that there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All entries, in an order in which they can be taken in again.
    pub fn entries(&self) -> impl Iterator<Item = (&Name, &Arc<Entry>)> {
        self.order.iter().filter_map(|name| Some((name, self.entries.get(name)?)))
    }

    /// If the list is too long, its older half becomes one entry for each node and namespace. True if it did.
    pub fn shorten(&mut self) -> bool {
        self.shorten_to(BYTES_MAX, ENTRIES_MAX)
    }

    fn shorten_to(&mut self, bytes_max: usize, entries_max: usize) -> bool {
        if self.bytes <= bytes_max && self.order.len() <= entries_max {
            return false;
        }
        let mut joined: BTreeMap<(NodeId, NamespaceId), (u64, u64, BTreeSet<NodeId>)> = BTreeMap::new();
        let old: Vec<Name> = self.order.drain(..self.order.len().div_ceil(2)).collect();
        for name in old {
            let Some(entry) = self.entries.remove(&name) else { continue };
            self.bytes -= entry.bytes();
            let (last, below, nodes) = joined.entry((name.0, entry.namespace)).or_default();
            (*last, *below) = (name.1.max(*last), entry.below_ms.max(*below));
            for (node, lacks) in &mut self.lacks {
                if lacks.remove(&name, &entry.namespace) {
                    nodes.insert(*node);
                }
            }
        }
        for ((of, namespace), (last, below_ms, nodes)) in joined {
            let entry = Arc::new(Entry { namespace, below_ms, what: What::Everything });
            self.add((of, last), entry, nodes.into_iter());
        }
        self.lacks.retain(|_, lacks| !lacks.names.is_empty());
        true
    }
}

impl Lacks {
    fn add(&mut self, name: Name, namespace: NamespaceId) {
        if self.names.insert(name) {
            *self.namespaces.entry(namespace).or_default() += 1;
        }
    }

    fn remove(&mut self, name: &Name, namespace: &NamespaceId) -> bool {
        let was_there = self.names.remove(name);
        if let Some(count) = self.namespaces.get_mut(namespace).filter(|_| was_there) {
            *count -= 1;
            if *count == 0 {
                self.namespaces.remove(namespace);
            }
        }
        was_there
    }
}

/// What becomes of a copy that was read while things were deleted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyFate {
    /// It is stored.
    Lives,
    /// It is stored, and ends at this time at the latest, in milliseconds since 1970.
    Ends(u64),
    /// It is not stored.
    Dies,
}

/// What was deleted lately: copies that began before are compared with it.
#[derive(Clone, Debug, Default)]
pub struct Recent {
    begun: u64,
    entries: VecDeque<(u64, Arc<Entry>)>,
    keys: usize,
    /// Up to here entries are forgotten.
    forgotten: u64,
}

impl Recent {
    /// A copy begins: what it is to be compared with comes after this.
    pub fn now(&self) -> u64 {
        self.begun
    }

    /// A delete begins here, or comes here: before anything goes.
    pub fn begin(&mut self, entry: Arc<Entry>) {
        self.begun += 1;
        self.keys += entry.what.keys().len();
        self.entries.push_back((self.begun, entry));
        while self.keys > RECENT_KEYS || self.entries.len() > RECENT_ENTRIES {
            let Some((number, entry)) = self.entries.pop_front() else { return };
            self.keys -= entry.what.keys().len();
            self.forgotten = number;
        }
    }

    /// What becomes of a copy that began after `since` others, of a block that was produced at this time.
    pub fn fate(
        &self,
        since: u64,
        (namespace, column, key): (NamespaceId, Column, &BlockKey),
        produced_ms: u64,
    ) -> CopyFate {
        if since < self.forgotten {
            return CopyFate::Dies;
        }
        let mut fate = CopyFate::Lives;
        for (number, entry) in self.entries.iter().rev() {
            if *number <= since {
                break;
            }
            if entry.namespace != namespace || entry.below_ms <= produced_ms {
                continue;
            }
            match &entry.what {
                What::Keys(of, keys) if of.is_none_or(|of| of == column) && keys.contains(key) => {
                    return CopyFate::Dies;
                }
                // What descends from a key is known to who has the blocks between alone.
                What::Prefix(_) | What::Everything => return CopyFate::Dies,
                What::Sooner(of, keys, ends_ms) if *of == column && keys.contains(key) => {
                    fate = match fate {
                        CopyFate::Ends(before) => CopyFate::Ends(before.min(*ends_ms)),
                        _ => CopyFate::Ends(*ends_ms),
                    };
                }
                What::Keys(..) | What::Sooner(..) => {}
            }
        }
        fate
    }

    /// Whether this block may have been deleted within the last half minute, so that other nodes may have hints to it still.
    pub fn names(&self, (namespace, column, key): (NamespaceId, Column, &BlockKey), now_ms: u64) -> bool {
        let is_named = |(_, entry): &(u64, Arc<Entry>)| {
            entry.namespace == namespace
                && now_ms < entry.below_ms.saturating_add(HINTS_MS)
                && match &entry.what {
                    What::Keys(of, keys) => of.is_none_or(|of| of == column) && keys.contains(key),
                    What::Prefix(_) | What::Everything => true,
                    What::Sooner(..) => false,
                }
        };
        self.entries.iter().any(is_named)
    }
}

#[cfg(test)]
mod tests;
