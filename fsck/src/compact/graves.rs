//! What was deleted in one shard: tombstones and namespace epochs, from its checkpoint and its segments.
//!
//! Invariants:
//! - Of two graves over the same blocks the one that reaches higher stays.
//! - A grave is forgotten only if no record that lies on disk is old enough for it.

use std::collections::{BTreeMap, BTreeSet};

use kvarts_layout::format::body::{Epoch, Tombstone};
use kvarts_layout::format::footer::Defined;
use kvarts_layout::format::marks::{MARK_KEY, Mark};

/// The group and the coordinate that a tombstone is for; `None` for all.
type Scope = (Option<u32>, Option<u64>);
/// Namespace and key.
type Name = ([u8; 32], [u8; 32]);

/// Deletes as a checkpoint has them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Listed {
    /// The namespaces of the tombstones under short ids.
    pub(super) names: Vec<Defined>,
    pub(super) tombstones: Vec<Tombstone>,
    pub(super) epochs: Vec<Epoch>,
}

/// The deletes of one shard.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Graves {
    blocks: BTreeMap<Name, Vec<(Scope, u64)>>,
    namespaces: BTreeMap<[u8; 32], u64>,
    /// Namespaces whose delete began in some shard and did not end: all of it is dead.
    gone: BTreeSet<[u8; 32]>,
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
        if self.gone.contains(&name.0) || self.namespaces.get(&name.0).is_some_and(|below| sequence < *below)
        {
            return true;
        }
        let Some(graves) = self.blocks.get(name) else { return false };
        graves.iter().any(|((for_group, for_coordinate), below)| {
            sequence < *below
                && for_group.is_none_or(|one| one == group)
                && for_coordinate.is_none_or(|one| one == coordinate)
        })
    }

    /// Namespaces whose delete began and did not end, by the marks of this shard.
    pub(super) fn half_deleted(&self) -> impl Iterator<Item = [u8; 32]> + '_ {
        let marked = self.blocks.iter().filter(|((_, key), graves)| *key == MARK_KEY && is_half(graves));
        marked.map(|((namespace, _), _)| *namespace)
    }

    /// What began to be deleted in any shard is dead in this one, too.
    pub(super) fn finish(&mut self, half: &BTreeSet<[u8; 32]>) {
        self.gone.clone_from(half);
    }

    /// How many there are.
    pub(super) fn len(&self) -> u64 {
        let tombstones: usize = self.blocks.values().map(Vec::len).sum();
        tombstones.saturating_add(self.namespaces.len()) as u64
    }

    /// Those that a record may still be old enough for: none on disk has a sequence below `floor`. That a delete did not
    /// end is kept in any case: what it began in other shards is for the engine to finish.
    pub(super) fn above(&self, floor: u64) -> Self {
        let mut left = self.clone();
        left.blocks.retain(|(_, key), graves| {
            if *key == MARK_KEY && is_half(graves) {
                return true;
            }
            graves.retain(|(_, below)| *below > floor);
            !graves.is_empty()
        });
        left.namespaces.retain(|_, below| *below > floor);
        left
    }

    /// As a checkpoint has them.
    pub(super) fn listed(&self) -> Listed {
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
        Listed { names, tombstones, epochs }
    }
}

fn is_half(graves: &[(Scope, u64)]) -> bool {
    let below = |mark: Mark| graves.iter().find(|(scope, _)| *scope == mark.scope());
    Mark::is_half(|mark| below(mark).map(|(_, below)| *below))
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
        let all = graves.listed();
        assert_eq!((all.names.len(), all.tombstones.len(), all.epochs.len()), (1, 1, 1));
        assert_eq!(all.tombstones.first().map(|one| one.below), Some(10));
    }

    #[test]
    fn a_delete_that_did_not_end_kills_all_of_its_namespace_and_is_not_forgotten() {
        let (mut here, mut there) = (Graves::default(), Graves::default());
        here.bury([7; 32], &Mark::Begun.tombstone(0, 10));
        let half: BTreeSet<_> = here.half_deleted().collect();
        assert_eq!(half, BTreeSet::from([[7; 32]]));
        there.finish(&half);
        assert!(there.covers(&([7; 32], [1; 32]), (0, 0), u64::MAX - 1));
        assert!(!there.covers(&([8; 32], [1; 32]), (0, 0), 1));
        assert_eq!((here.above(u64::MAX).len(), there.listed()), (1, Listed::default()));
        here.bury([7; 32], &Mark::Ended.tombstone(0, 12));
        assert_eq!((here.half_deleted().count(), here.above(10).len(), here.above(12).len()), (0, 1, 0));
    }
}
