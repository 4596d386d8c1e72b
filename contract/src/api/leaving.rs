//! Blocks that are near their eviction, for a tier behind the disks.

use kvarts_layout::format::body::Parent;
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};

/// Neighbouring blocks of one record that are near their eviction and were used. What is said holds when it is said: they may
/// go, or be used again, at any moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Leaving {
    /// Their namespace.
    pub namespace: NamespaceId,
    /// Their group.
    pub group: Group,
    /// Their coordinate.
    pub coordinate: Coordinate,
    /// Their keys, in prefix order; never empty.
    pub keys: Vec<BlockKey>,
    /// What comes before the first.
    pub parent: Parent,
    /// How many blocks of the prefix come before the first, where that is known.
    pub first_block: Option<u32>,
    /// When they were first stored, in milliseconds since 1970.
    pub created_ms: u64,
    /// When they expire, in milliseconds since 1970; zero for never.
    pub expires_ms: u64,
}

/// Blocks that a shard has, of one of its segments.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SegmentBlocks {
    /// The stretches of records that are live there.
    pub runs: Vec<Leaving>,
    /// The segment to go on with; none: there are no more.
    pub next: Option<u32>,
}
