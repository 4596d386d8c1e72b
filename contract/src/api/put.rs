//! Puts of blocks: the request, and the outcome for each block.

use std::time::Duration;

use kvarts_layout::{BlockKey, Coordinate, Group, Layout, NamespaceId, OriginId};

use super::Placed;
use crate::clock::Nanos;
use crate::error::Reason;

/// The maximum number of blocks of a request.
pub const MAX_REQUEST_BLOCKS: usize = 1 << 16;

/// The predecessor of the first block of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Parent {
    /// None: the run begins a prompt.
    Root,
    /// The block under this key, in the same namespace.
    Key(BlockKey),
    /// Unknown (flat pages): the blocks need not follow each other.
    Unknown,
}

impl Parent {
    /// The parent of a part of a run with this parent; `before` is the key of the block before the part, if there is one.
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
    /// When data and header are flushed: the block survives a power failure.
    #[default]
    Durable,
    /// When data and header are written: after a power failure the block is completely present or completely absent.
    Relaxed,
}

/// Blocks to store: a run of consecutive blocks of one group and coordinate, or unrelated pages.
#[derive(Clone, Debug)]
pub struct PutRequest {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The group of all blocks.
    pub group: Group,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
    /// The predecessor of the first block.
    pub parent: Parent,
    /// The number of blocks of the prompt before the first block, if known.
    pub first_block: Option<u32>,
    /// One key for each block, in the order of the prompt.
    pub keys: Vec<BlockKey>,
    /// The places of the bytes. The bytes must not change until the put is answered.
    pub from: Placed,
    /// The layout on disk; `None` lets the store choose.
    pub layout: Option<Layout>,
    /// When the put is acknowledged.
    pub durability: Durability,
    /// The time to live of the blocks; `None` leaves them to eviction.
    pub expires_after: Option<Duration>,
    /// The origin of each block that was first produced elsewhere (a peer, an import). With `None` the store generates new origins.
    pub origins: Option<Vec<OriginId>>,
    /// When the caller stops waiting, by the clock of the store (`Store::clock`, `Client::clock`): other clocks have other zero points.
    pub deadline: Option<Nanos>,
}

impl PutRequest {
    /// A durable put of blocks with an unknown parent, which a delete of a prefix does not reach. For blocks of a prompt use
    /// [`PutRequest::prompt`]. The caller may change the other fields.
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

    /// A durable put of the first blocks of a prompt, in order from its beginning. A delete of the prefix that ends at one of these blocks
    /// also deletes the blocks after it. For later blocks of a prompt set `parent` and `first_block`.
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

/// The outcome for one block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BlockOutcome {
    /// The block was written, and is as durable as requested.
    Stored,
    /// The block was stored before, and is as durable as requested. The store did not look at the new bytes: the first put of a key wins.
    AlreadyThere,
    /// Another put of the same key has not ended, and this put wrote nothing. Look-ups report the key as `pending`.
    InFlight,
    /// Another node of the cluster is recorded as a holder, and the block was not written here. There is no guarantee of how long that node
    /// keeps the block, or of its durability there: a caller that needs the block here must put it to a store that keeps its own blocks.
    HeldElsewhere,
    /// The block was not stored, and no part of it is visible.
    Refused(Reason),
}

/// The answer to a put: one outcome for each block, in the order of the request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PutReply {
    /// The outcomes.
    pub outcomes: Vec<BlockOutcome>,
}
