//! Deletes of keys, of a prefix and of a namespace, and the time to live of blocks.

use std::time::Duration;

use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};

use crate::clock::Nanos;
use crate::error::Reason;

/// The blocks to delete.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Target {
    /// The blocks under these keys; a key may occur more than once.
    Keys {
        /// One group and coordinate, or all of them.
        column: Option<(Group, Coordinate)>,
        /// The keys.
        keys: Vec<BlockKey>,
    },
    /// The block under this key and all blocks known to descend from it, in all groups and coordinates.
    ///
    /// A block descends from its parent if its put named the parent: by the block's position after another block of the same request, or as
    /// the first block after [`super::Parent::Key`]. The store follows these links through present blocks; the block of the key itself may
    /// be absent. Blocks that were put with an unknown parent, and blocks after an absent block, are not known to descend from any block,
    /// and stay. Blocks that are put while the delete runs may stay, too.
    Prefix(BlockKey),
    /// All blocks of the namespace. The namespace stays registered, and later puts are kept.
    Namespace,
}

/// Blocks to be deleted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeleteRequest {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The blocks to delete.
    pub target: Target,
    /// When the caller stops waiting, by the clock of the store. A delete that has begun continues after the deadline, but is not
    /// acknowledged.
    pub deadline: Option<Nanos>,
}

/// The outcome for one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DeleteOutcome {
    /// At least one block was stored under the key. Now none is, and none comes back.
    Deleted,
    /// No block was stored under the key. Blocks that an earlier crash could have brought back stay deleted, too.
    NotHere,
    /// Not acknowledged: look-ups no longer find blocks under the key, but may find them after a restart. Delete the key again.
    Refused(Reason),
}

/// The answer to a delete.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeleteReply {
    /// One outcome for each key, in the order of the request. Empty for a prefix or a namespace.
    pub outcomes: Vec<DeleteOutcome>,
    /// The number of deleted blocks; each group and coordinate counts.
    pub blocks: u64,
}

/// A change of the time to live of blocks.
#[derive(Clone, Debug)]
pub struct TtlRequest<'a> {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The group of all blocks.
    pub group: Group,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
    /// The blocks.
    pub keys: &'a [BlockKey],
    /// The time to live, from now; `None` leaves the blocks to eviction.
    pub ttl: Option<Duration>,
}

/// The answer to a change of a time to live.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TtlReply {
    /// For each key, whether the block is present and its time was changed.
    pub changed: Vec<bool>,
}
