//! What is dead in one shard: tombstones and epochs, from records and from the newest whole checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use kvarts_layout::format::body::{Epoch, Tombstone};
use kvarts_layout::format::checkpoint::Items;
use kvarts_layout::format::marks::{MARK_KEY, Mark};

use crate::checkpoint::{Known, Slot, read_slot};
use crate::store::{Shard, Store};
use crate::window::Tally;

/// When records expire, by segment, generation and offset, where a checkpoint says so.
pub type Remembered = BTreeMap<(u32, u64, u64), u64>;

/// A block's key in its namespace.
type Key = ([u8; 32], [u8; 32]);
/// Which groups and coordinates; `None` for all. And below which sequence.
type Grave = (Option<u32>, Option<u64>, u64);

/// Deletes of one shard.
#[derive(Clone, Debug, Default)]
pub struct Graves {
    blocks: BTreeMap<Key, Vec<Grave>>,
    namespaces: BTreeMap<[u8; 32], u64>,
    /// Namespaces whose delete began in some shard and did not end: all of it is dead.
    gone: BTreeSet<[u8; 32]>,
}

impl Graves {
    /// Takes a tombstone in.
    pub fn bury(&mut self, namespace: [u8; 32], tombstone: &Tombstone) {
        let graves = self.blocks.entry((namespace, tombstone.key)).or_default();
        let scope = (tombstone.group, tombstone.coordinate);
        match graves.iter_mut().find(|grave| (grave.0, grave.1) == scope) {
            Some(grave) => grave.2 = grave.2.max(tombstone.below),
            None => graves.push((tombstone.group, tombstone.coordinate, tombstone.below)),
        }
    }

    /// Takes an epoch in.
    pub fn bury_all(&mut self, epoch: &Epoch) {
        let below = self.namespaces.entry(epoch.namespace).or_default();
        *below = epoch.below.max(*below);
    }

    /// Takes what others know in.
    pub fn merge(&mut self, other: Self) {
        for ((namespace, key), graves) in other.blocks {
            for (group, coordinate, below) in graves {
                self.bury(namespace, &Tombstone { below, coordinate, namespace: 0, group, key });
            }
        }
        for (namespace, below) in other.namespaces {
            self.bury_all(&Epoch { below, namespace });
        }
    }

    /// Whether a block of a record with this sequence is dead.
    pub fn covers(
        &self,
        namespace: &[u8; 32],
        key: &[u8; 32],
        (group, coordinate): (u32, u64),
        sequence: u64,
    ) -> bool {
        if self.gone.contains(namespace)
            || self.namespaces.get(namespace).is_some_and(|below| sequence < *below)
        {
            return true;
        }
        let Some(graves) = self.blocks.get(&(*namespace, *key)) else { return false };
        graves.iter().any(|(for_group, for_coordinate, below)| {
            sequence < *below
                && for_group.is_none_or(|one| one == group)
                && for_coordinate.is_none_or(|one| one == coordinate)
        })
    }

    /// Namespaces whose delete began and did not end, by the marks of this shard.
    pub fn half_deleted(&self) -> impl Iterator<Item = [u8; 32]> + '_ {
        let is_half = |graves: &[Grave]| {
            let below = |mark: Mark| graves.iter().find(|grave| (grave.0, grave.1) == mark.scope());
            Mark::is_half(|mark| below(mark).map(|grave| grave.2))
        };
        let marked = self.blocks.iter().filter(|((_, key), _)| *key == MARK_KEY);
        marked.filter(move |(_, graves)| is_half(graves)).map(|((namespace, _), _)| *namespace)
    }

    /// How many there are.
    pub fn len(&self) -> u64 {
        let tombstones: usize = self.blocks.values().map(Vec::len).sum();
        tombstones.saturating_add(self.namespaces.len()) as u64
    }

    /// Whether nothing is dead.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.namespaces.is_empty() && self.gone.is_empty()
    }
}

/// What began to be deleted in one shard is dead in all: the engine finishes the delete when it opens the store.
pub(super) fn finish(graves: &mut BTreeMap<usize, Graves>) {
    let half: BTreeSet<[u8; 32]> = graves.values().flat_map(Graves::half_deleted).collect();
    graves.values_mut().for_each(|graves| graves.gone.clone_from(&half));
}

/// What the newest whole checkpoint of a shard says of deletes and times.
pub(super) fn of_checkpoint(
    store: &Store,
    shard: &Shard,
    known: &Known,
    tally: &Tally,
) -> (Graves, Remembered) {
    let (mut graves, mut times) = (Graves::default(), Remembered::new());
    let (Some(header), Some(directory)) = (&known.header, store.directories.get(shard.directory)) else {
        return (graves, times);
    };
    let mut names = BTreeMap::new();
    let place = (shard.number, header.position.segment);
    let seen = read_slot(&*directory.disk, &store.keyring, place, tally, &mut |items| match items {
        Items::Namespaces(namespaces) => names.extend(namespaces.iter().map(|one| (one.local, one.id))),
        Items::Records(records) => times
            .extend(records.iter().map(|one| ((one.segment, one.generation, one.offset), one.expires_ms))),
        Items::Tombstones(tombstones) => {
            for tombstone in &tombstones {
                if let Some(namespace) = names.get(&tombstone.namespace) {
                    graves.bury(*namespace, tombstone);
                }
            }
        }
        Items::Epochs(epochs) => epochs.iter().for_each(|epoch| graves.bury_all(epoch)),
        Items::Segments(_) => {}
    });
    if matches!(seen, Slot::Whole(_)) { (graves, times) } else { (Graves::default(), Remembered::new()) }
}
