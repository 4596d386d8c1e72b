//! Taking blocks out on purpose: deletes of keys, of a prefix, of a namespace; and how long blocks may live.

use std::time::Duration;

use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};

use crate::clock::Nanos;
use crate::error::Reason;

/// What is to be deleted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Target {
    /// The blocks under these keys; a key may stand more than once.
    Keys {
        /// One group and coordinate, or all of them.
        column: Option<(Group, Coordinate)>,
        /// The keys.
        keys: Vec<BlockKey>,
    },
    /// The block under this key and everything known to descend from it, in all groups and coordinates.
    ///
    /// A block descends from its parent where its put said who that is: by its place behind another block of the
    /// same request, or as the first block behind [`super::Parent::Key`]. The store follows these links through
    /// blocks that are here; the key itself need not be. What was put with an unknown parent, and what hangs behind
    /// a block that is not here any more, is not known to descend from anything and stays. So may blocks that are
    /// put while the delete runs.
    Prefix(BlockKey),
    /// Everything in the namespace. It stays registered: what is put afterwards is kept.
    Namespace,
}

/// Blocks to be deleted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeleteRequest {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// What of it.
    pub target: Target,
    /// When the caller stops waiting, by the clock of the store. A delete that was begun goes on, but was not acknowledged.
    pub deadline: Option<Nanos>,
}

/// What became of one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DeleteOutcome {
    /// At least one block was under it. None is any more, and none comes back.
    Deleted,
    /// No block was under it. What an earlier crash might have brought back stays away, too.
    NotHere,
    /// Not acknowledged: blocks under it cannot be found any more, but may be after a restart. Delete again.
    Refused(Reason),
}

/// The answer to a delete.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeleteReply {
    /// Of keys: one outcome each, in the order of the request. Of a prefix or namespace: none.
    pub outcomes: Vec<DeleteOutcome>,
    /// Blocks that were here and are not any more, each group and coordinate counted.
    pub blocks: u64,
}

/// Blocks whose time to live is to change.
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
    /// How long they may live from now; `None` leaves it to eviction.
    pub ttl: Option<Duration>,
}

/// The answer to a change of a time to live.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TtlReply {
    /// For each key, whether the block is here and its time was changed.
    pub changed: Vec<bool>,
}
