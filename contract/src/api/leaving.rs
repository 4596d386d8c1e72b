//! Blocks that are near their eviction, for a tier below the disks.

use kvarts_layout::format::body::Parent;
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};

/// Neighbouring used blocks of one record that are near their eviction. The information is a snapshot: the store may evict the blocks, or
/// use them again, at any moment.
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
    /// The parent of the first block.
    pub parent: Parent,
    /// The number of blocks of the prefix before the first block, if known.
    pub first_block: Option<u32>,
    /// The time of their first storage, in milliseconds since 1970.
    pub created_ms: u64,
    /// The time of their expiry, in milliseconds since 1970; zero for never.
    pub expires_ms: u64,
}

/// The blocks of a shard in one of its segments.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SegmentBlocks {
    /// The runs of live blocks in the segment.
    pub runs: Vec<Leaving>,
    /// The segment to continue with; `None` at the end.
    pub next: Option<u32>,
}
