//! What was deleted in one shard: tombstones and namespace epochs, from its checkpoint and its segments.
//!
//! Invariants:
//! - Of two graves over the same blocks the one that reaches higher stays.
//! - A grave is forgotten only if no record that lies on disk is old enough for it.

use std::collections::BTreeMap;

use kvarts_layout::format::body::{Epoch, Tombstone};
use kvarts_layout::format::footer::Defined;

/// The group and the coordinate that a tombstone is for; `None` for all.
type Scope = (Option<u32>, Option<u64>);
/// Namespace and key.
type Name = ([u8; 32], [u8; 32]);

/// The deletes of one shard.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Graves {
    blocks: BTreeMap<Name, Vec<(Scope, u64)>>,
    namespaces: BTreeMap<[u8; 32], u64>,
}

impl Graves {
    /// Notes that records of a block below a sequence are dead.
    pub(super) fn bury(&mut self, namespace: [u8; 32], tombstone: &Tombstone) {
        let scope = (tombstone.group, tombstone.coordinate);
        let graves = self.blocks.entry((namespace, tombstone.key)).or_default();
        match graves.iter_mut().find(|(known, _)| *known == scope) {
            Some((_, below)) => *below = tombstone.below.max(*below),
            None => graves.push((scope, tombstone.below)),
        }
    }

    /// Notes that records of a namespace below a sequence are dead.
    pub(super) fn bury_all(&mut self, epoch: &Epoch) {
        let below = self.namespaces.entry(epoch.namespace).or_default();
        *below = epoch.below.max(*below);
    }

    /// Whether a block of a record is dead.
    pub(super) fn covers(&self, name: &Name, (group, coordinate): (u32, u64), sequence: u64) -> bool {
        if self.namespaces.get(&name.0).is_some_and(|below| sequence < *below) {
            return true;
        }
        let Some(graves) = self.blocks.get(name) else { return false };
        graves.iter().any(|((for_group, for_coordinate), below)| {
            sequence < *below
                && for_group.is_none_or(|one| one == group)
                && for_coordinate.is_none_or(|one| one == coordinate)
        })
    }

    /// How many there are.
    pub(super) fn len(&self) -> u64 {
        let tombstones: usize = self.blocks.values().map(Vec::len).sum();
        tombstones.saturating_add(self.namespaces.len()) as u64
    }

    /// Those that a record may still be old enough for: none on disk has a sequence below `floor`.
    pub(super) fn above(&self, floor: u64) -> Self {
        let mut left = self.clone();
        left.blocks.retain(|_, graves| {
            graves.retain(|(_, below)| *below > floor);
            !graves.is_empty()
        });
        left.namespaces.retain(|_, below| *below > floor);
        left
    }

    /// As a checkpoint has them.
    pub(super) fn listed(&self) -> (Vec<Defined>, Vec<Tombstone>, Vec<Epoch>) {
        let mut names = Vec::<Defined>::new();
        let mut tombstones = Vec::new();
        let mut next = 0u32;
        for ((namespace, key), graves) in &self.blocks {
            // Sorted by namespace first: each begins a new short id once.
            if names.last().is_none_or(|last| last.id != *namespace) {
                names.push(Defined { local: next, id: *namespace });
                next = next.saturating_add(1);
            }
            let local = next.saturating_sub(1);
            for &((group, coordinate), below) in graves {
                tombstones.push(Tombstone { below, coordinate, namespace: local, group, key: *key });
            }
        }
        let epochs = self.namespaces.iter();
        let epochs = epochs.map(|(namespace, &below)| Epoch { below, namespace: *namespace }).collect();
        (names, tombstones, epochs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graves_kill_what_is_older_in_their_scope_and_are_forgotten_with_the_last_of_it() {
        let tombstone =
            |below, group| Tombstone { below, coordinate: None, namespace: 0, group, key: [1; 32] };
        let mut graves = Graves::default();
        graves.bury([7; 32], &tombstone(10, Some(2)));
        graves.bury([7; 32], &tombstone(8, Some(2)));
        graves.bury_all(&Epoch { below: 5, namespace: [8; 32] });
        let name = ([7; 32], [1; 32]);
        assert!(graves.covers(&name, (2, 0), 9) && !graves.covers(&name, (2, 0), 10));
        assert!(!graves.covers(&name, (3, 0), 1));
        assert!(graves.covers(&([8; 32], [9; 32]), (0, 0), 4));
        assert_eq!((graves.above(4).len(), graves.above(5).len(), graves.above(10).len()), (2, 1, 0));
        let (names, tombstones, epochs) = graves.listed();
        assert_eq!((names.len(), tombstones.len(), epochs.len()), (1, 1, 1));
        assert_eq!(tombstones.first().map(|one| one.below), Some(10));
    }
}
