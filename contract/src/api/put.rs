//! Putting blocks: what is asked, and what is answered for each block.

use std::time::Duration;

use kvarts_layout::{BlockKey, Coordinate, Group, Layout, NamespaceId, OriginId};

use super::Placed;
use crate::clock::Nanos;
use crate::error::Reason;

/// The most blocks one request may have.
pub const MAX_REQUEST_BLOCKS: usize = 1 << 16;

/// What stands before the first block of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Parent {
    /// Nothing: the run begins a prompt.
    Root,
    /// The block under this key, in the same namespace.
    Key(BlockKey),
    /// The engine does not say (flat pages): the blocks need not follow each other.
    Unknown,
}

impl Parent {
    /// What stands before a part of a run that has this parent, if the block with this key stands before the part.
    #[must_use]
    pub fn behind(self, before: Option<&BlockKey>) -> Self {
        match (self, before) {
            (Self::Unknown, _) => Self::Unknown,
            (_, Some(before)) => Self::Key(*before),
            (parent, None) => parent,
        }
    }
}

/// When a put is acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Durability {
    /// When data and header have been flushed: the block survives a power cut.
    #[default]
    Durable,
    /// When they are written: after a power cut the block is wholly there or wholly absent.
    Relaxed,
}

/// Blocks to be stored: a run of consecutive blocks of one group and coordinate, or unrelated pages.
#[derive(Clone, Debug)]
pub struct PutRequest {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The group of all blocks.
    pub group: Group,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
    /// What stands before the first block.
    pub parent: Parent,
    /// How many blocks of the prompt stand before the first, if known.
    pub first_block: Option<u32>,
    /// One key for each block, in the order of the prompt.
    pub keys: Vec<BlockKey>,
    /// Where the bytes are. They must not change until the put is answered.
    pub from: Placed,
    /// The layout on disk; `None` lets the store choose.
    pub layout: Option<Layout>,
    /// When the put is acknowledged.
    pub durability: Durability,
    /// How long the blocks may live; `None` leaves it to eviction.
    pub expires_after: Option<Duration>,
    /// The origin of each block where it was first produced elsewhere (a peer, an import); otherwise the store
    /// draws new ones.
    pub origins: Option<Vec<OriginId>>,
    /// When the caller stops waiting, by the clock of the store (`Store::clock`, `Client::clock`): other clocks count from elsewhere.
    pub deadline: Option<Nanos>,
}

impl PutRequest {
    /// A durable put of blocks whose parent is unknown: a delete of a prefix does not reach them. For blocks of a prompt see
    /// [`PutRequest::prompt`]; other fields can be changed afterwards.
    pub fn new(
        namespace: NamespaceId,
        group: Group,
        coordinate: Coordinate,
        keys: Vec<BlockKey>,
        from: Placed,
    ) -> Self {
        Self {
            namespace,
            group,
            coordinate,
            parent: Parent::Unknown,
            first_block: None,
            keys,
            from,
            layout: None,
            durability: Durability::default(),
            expires_after: None,
            origins: None,
            deadline: None,
        }
    }

    /// A durable put of the first blocks of a prompt, in order from its beginning: a delete of the prefix that ends at one of them also
    /// deletes those behind it. Blocks of the rest of a prompt have `parent` and `first_block` set.
    pub fn prompt(
        namespace: NamespaceId,
        group: Group,
        coordinate: Coordinate,
        keys: Vec<BlockKey>,
        from: Placed,
    ) -> Self {
        let new = Self::new(namespace, group, coordinate, keys, from);
        Self { parent: Parent::Root, first_block: Some(0), ..new }
    }
}

/// What became of one block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BlockOutcome {
    /// It was written, and is as durable as was asked.
    Stored,
    /// It was here already, and is as durable as was asked. The bytes given were not looked at: the first put of
    /// a key wins.
    AlreadyThere,
    /// Another put of the same key has not finished; this one wrote nothing. The key is `pending` to lookups.
    InFlight,
    /// Another node of the cluster is said to have it, and it was not written here. Nothing is promised of how long that node keeps
    /// it, nor how durable it is there: a caller that needs the block here puts it to a store that keeps its own.
    HeldElsewhere,
    /// It was not stored, and nothing of it is visible.
    Refused(Reason),
}

/// The answer to a put: one outcome for each block, in the order of the request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PutReply {
    /// The outcomes.
    pub outcomes: Vec<BlockOutcome>,
}
