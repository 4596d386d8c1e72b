//! Asking what is here: which prefix can be restored, without touching a device.

use std::time::Duration;

use kvarts_layout::{BlockKey, NamespaceId, Requirements, UsablePrefix};

pub use crate::index::LeaseId;

/// The most entries of one match: keys times the coordinates of all required groups, each of which is looked up.
pub const MAX_MATCH_ENTRIES: usize = 1 << 20;

/// Which blocks of a prompt are wanted, and what a restorable prefix of them needs.
#[derive(Clone, Debug)]
pub struct MatchRequest<'a> {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The keys of the prompt's blocks, in order.
    pub keys: &'a [BlockKey],
    /// What each group and coordinate must have for a prefix to be usable.
    pub requirements: &'a Requirements,
    /// The most tokens that the caller would compute again to use a longer prefix.
    pub recompute_tokens_max: u64,
    /// Whether the usable part is to be held against eviction.
    pub lease: Option<LeaseTerms>,
}

/// What a block that is held counts at least, against its tenant's cap: however small it is, it takes a page on disk, and
/// to remember that it is held takes memory.
pub const PIN_BYTES: u64 = 4096;

/// How long, and for whom, the result of a match is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseTerms {
    /// For how long.
    pub hold: Duration,
    /// Whose cap on pinned bytes it counts against.
    pub tenant: u32,
    /// The cap, in bytes.
    pub cap_bytes: u64,
}

impl LeaseTerms {
    /// A term that does not end while the store is open.
    pub const UNLIMITED: Duration = Duration::MAX;
}

/// What a match found.
#[derive(Clone, PartialEq, Debug)]
pub struct MatchReply {
    /// The prefix that can be restored, what that costs, and what is there of each group and coordinate.
    pub usable: UsablePrefix,
    /// Blocks behind the usable prefix whose put is in flight: ask again soon.
    pub pending: u32,
    /// The lease on the usable prefix, if one was asked for and there is anything to hold.
    pub lease: Option<LeaseId>,
}
