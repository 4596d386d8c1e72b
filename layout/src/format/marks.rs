//! How far the delete of a namespace has come: marks that a shard keeps beside its epochs.
//!
//! An epoch stands in every shard, and a crash may come between two of them. So each shard writes that the delete has
//! begun before it writes its epoch, and that it has ended when the epochs of all shards are durable. A start may find a
//! shard with the mark of the begin and no mark of the end. Then no caller was told that the delete is done, and nothing
//! was put in the namespace since. The start finishes the delete in every shard, whatever marks that shard has.
//!
//! A mark is a tombstone of a key that no block has, for all groups of one coordinate or all coordinates of one group,
//! which no delete of a caller ever is. So it is kept, listed and forgotten as any tombstone: as long as records may lie
//! on disk that began before it. The mark of the end is the later one, so it is never forgotten first.

use super::body::Tombstone;

/// A key that engines, whose keys are hashes, do not come by.
pub const MARK_KEY: [u8; 32] = *b"kvarts namespace delete mark v01";

/// What a mark says.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Mark {
    /// The delete of the namespace has begun.
    Begun,
    /// The epochs of all shards are durable.
    Ended,
}

impl Mark {
    /// The group and the coordinate of its tombstone.
    pub const fn scope(self) -> (Option<u32>, Option<u64>) {
        match self {
            Self::Begun => (None, Some(0)),
            Self::Ended => (Some(0), None),
        }
    }

    /// Its tombstone, written when the next sequence is `below`.
    pub const fn tombstone(self, namespace: u32, below: u64) -> Tombstone {
        let (group, coordinate) = self.scope();
        Tombstone { below, coordinate, namespace, group, key: MARK_KEY }
    }

    /// The mark that a tombstone is, if it is one.
    pub fn of(tombstone: &Tombstone) -> Option<Self> {
        let scope = (tombstone.group, tombstone.coordinate);
        let marks = [Self::Begun, Self::Ended];
        marks.into_iter().find(|mark| tombstone.key == MARK_KEY && mark.scope() == scope)
    }

    /// Whether a delete has begun and not ended, by what a shard's tombstones of [`MARK_KEY`] reach to.
    pub fn is_half(below: impl Fn(Self) -> Option<u64>) -> bool {
        below(Self::Begun) > below(Self::Ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_sound_tombstones_and_told_from_what_callers_delete() {
        for mark in [Mark::Begun, Mark::Ended] {
            let tombstone = mark.tombstone(3, 9);
            assert_eq!((Mark::of(&tombstone), tombstone.namespace, tombstone.below), (Some(mark), 3, 9));
            assert!(tombstone.check().is_ok());
            assert_eq!(Mark::of(&Tombstone { key: [0; 32], ..tombstone }), None);
            // A caller names a group and a coordinate, or neither.
            assert_eq!(Mark::of(&Tombstone { group: Some(0), coordinate: Some(0), ..tombstone }), None);
            assert_eq!(Mark::of(&Tombstone { group: None, coordinate: None, ..tombstone }), None);
        }
    }

    #[test]
    fn a_delete_is_half_done_from_its_begin_to_its_end() {
        let half = |begun, ended| Mark::is_half(|mark| if mark == Mark::Begun { begun } else { ended });
        assert!(half(Some(5), None) && half(Some(9), Some(7)));
        assert!(!half(None, None) && !half(Some(5), Some(7)) && !half(None, Some(7)));
    }
}
