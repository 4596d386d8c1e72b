//! Look-ups of many single blocks, without access to a device.

use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};

use super::lookup::{LeaseId, LeaseTerms, Missing};

/// Blocks of one group and coordinate, in any order; a key may occur more than once.
#[derive(Clone, Debug)]
pub struct ContainsRequest<'a> {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The group of all blocks.
    pub group: Group,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
    /// The keys of the blocks.
    pub keys: &'a [BlockKey],
    /// The terms of a lease on the present blocks; `None` for no lease.
    pub lease: Option<LeaseTerms>,
}

/// The state of one block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Presence {
    /// The block can be read.
    Here,
    /// A put of the block is in progress: repeat the look-up soon.
    Pending,
    /// The block cannot be read.
    Absent,
}

/// The state of each block, in the order of the request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ContainsReply {
    /// One answer for each key.
    pub presence: Vec<Presence>,
    /// The reasons for the blocks that are `Absent`.
    pub missing: Missing,
    /// The lease on all blocks that are `Here`, if the request asked for a lease and there is such a block.
    pub lease: Option<LeaseId>,
    /// A number that changes when a delete in the namespace is acknowledged or the store is opened again. Blocks that were read while the
    /// number stayed the same were not deleted in between. 0 means unknown.
    pub deletes: u64,
}
