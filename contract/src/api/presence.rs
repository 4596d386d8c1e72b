//! Asking which of many blocks are here, one by one, without touching a device.

use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};

use super::lookup::{LeaseId, LeaseTerms, Missing};

/// Blocks of one group and coordinate, in any order; a key may stand more than once.
#[derive(Clone, Debug)]
pub struct ContainsRequest<'a> {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The group of all blocks.
    pub group: Group,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
    /// The blocks that are asked for.
    pub keys: &'a [BlockKey],
    /// Whether those that are here are to be held against eviction.
    pub lease: Option<LeaseTerms>,
}

/// What is known of one block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Presence {
    /// It can be read.
    Here,
    /// A put of it is in flight: ask again soon.
    Pending,
    /// It cannot be read.
    Absent,
}

/// What is known of each block, in the order of the request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ContainsReply {
    /// One answer for each key.
    pub presence: Vec<Presence>,
    /// Why those that are `Absent` are.
    pub missing: Missing,
    /// The lease on all blocks that are `Here`, if one was asked for and there is any.
    pub lease: Option<LeaseId>,
    /// Another number whenever a delete in the namespace was acknowledged since, or the store was opened again: blocks that were read while it
    /// was the same were not deleted between. 0: not known.
    pub deletes: u64,
}
