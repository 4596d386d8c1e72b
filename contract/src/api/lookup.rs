//! Look-ups of the prefix that can be restored, without access to a device.

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::time::Duration;

use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId, Requirements, UsablePrefix};
use kvarts_planner::cost::{Times, Told};
use kvarts_planner::plan::{Link, Overlap, Plan, Source};

/// The maximum number of entries of one match: the keys times the coordinates of all required groups, because the store looks up each of
/// them.
pub const MAX_MATCH_ENTRIES: usize = 1 << 20;

/// The number of one lease. The process never reuses it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LeaseId(pub u64);

/// The wanted blocks of a prompt, and the requirements for a prefix that can be restored.
#[derive(Clone, Debug)]
pub struct MatchRequest<'a> {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The keys of the prompt's blocks, in order.
    pub keys: &'a [BlockKey],
    /// The blocks that each group and coordinate must have for a prefix to be usable.
    pub requirements: &'a Requirements,
    /// The maximum number of tokens that the caller would compute again to use a longer prefix.
    pub recompute_tokens_max: u64,
    /// The terms of a lease on the usable prefix; `None` for no lease.
    pub lease: Option<LeaseTerms>,
    /// The terms of a plan of the restore; `None` for no plan.
    pub plan: Option<PlanTerms<'a>>,
}

/// The inputs of the plan of a restore, in addition to the present blocks and the state of their link.
#[derive(Clone, Copy, Debug)]
pub struct PlanTerms<'a> {
    /// The number of tokens of the prompt. The keys belong to its full blocks, or to the first of them.
    pub prompt_tokens: u64,
    /// The computing times of the caller's engine.
    pub times: &'a Times,
    /// Leading blocks of streams, which every later block needs, that the caller has in device memory.
    pub hbm_blocks: u32,
    /// Boundaries, in blocks, at which the caller has the windows and states of all other groups in device memory.
    pub hbm_boundaries: &'a [u32],
    /// Leading blocks that the caller has in host memory, and the link from there.
    pub dram: Option<(u32, Link)>,
    /// Blocks that reads fetch from outside the store's disks, if any.
    pub beyond: Option<&'a Beyond>,
    /// The part of the prompt that the caller's engine computes while the rest is loaded.
    pub overlap: Overlap,
}

impl<'a> PlanTerms<'a> {
    /// Terms of a caller that has no block of the prompt, and whose engine computes each layer when the layer is loaded.
    pub fn new(prompt_tokens: u64, times: &'a Times) -> Self {
        Self {
            prompt_tokens,
            times,
            hbm_blocks: 0,
            hbm_boundaries: &[],
            dram: None,
            beyond: None,
            overlap: Overlap::Layers,
        }
    }
}

/// Blocks that reads fetch from other nodes and from a bucket, and the links to them.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Beyond {
    /// The links of [`Source::Peer`] and [`Source::Cold`].
    pub ways: Vec<(Source, Link)>,
    /// The assumed values of the same links before any transfer. If plans load nothing because of the measured values, the planner makes a
    /// few plans with the assumed values.
    pub assumed: Vec<(Source, Link)>,
    /// The blocks of the requested keys in each column.
    pub columns: BTreeMap<(Group, Coordinate), BeyondColumn>,
}

/// Blocks of a column by the position of their keys. Positions after the end have no block.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BeyondColumn {
    /// Whether another node is recorded as a holder of the block.
    pub peers: Vec<bool>,
    /// Whether the bucket probably has the block.
    pub cold: Vec<bool>,
}

/// A plan, and its inputs.
#[derive(Clone, PartialEq, Debug)]
pub struct Planned {
    /// The decision for the present blocks, and its reason.
    pub plan: Plan,
    /// The link to the store's disks at the time of the plan.
    pub disk: DiskLink,
    /// The computing times, and their quality.
    pub times: Told,
}

/// The link to a store's disks, measured by its reads: from the request for blocks to their verified bytes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DiskLink {
    /// The times of reads, and the bytes that are requested and not delivered now.
    pub link: Link,
    /// The number of measured reads. Before the first read the values of an assumed drive apply.
    pub measured: u64,
}

/// The minimum size with which a held block counts against its tenant's cap: even a small block takes a page on disk, and the record of its
/// lease takes memory.
pub const PIN_BYTES: u64 = 4096;

/// The time and the tenant of a lease on the result of a match.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseTerms {
    /// The duration of the lease.
    pub hold: Duration,
    /// The tenant whose cap on pinned bytes applies.
    pub tenant: u32,
    /// The cap, in bytes.
    pub cap_bytes: u64,
}

impl LeaseTerms {
    /// A lease without an end while the store is open.
    pub const UNLIMITED: Duration = Duration::MAX;
}

/// The reasons for missing blocks, as counts of blocks. A store remembers a bounded number of removed blocks since it was opened. Blocks
/// that it has forgotten, or never had, count as never stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Missing {
    /// Stored, and evicted because other blocks needed the space or the quota.
    pub evicted: u64,
    /// Stored, and expired.
    pub expired: u64,
    /// Stored, and deleted by key or prefix.
    pub deleted: u64,
    /// Damaged, in an executor that has died, or in a lost directory.
    pub out_of_service: u64,
    /// Never stored, according to the memory of the store.
    pub never_stored: u64,
    /// For a match: present, after a missing block.
    pub cut_off: u64,
}

impl Missing {
    /// The reasons with at least one block, as text.
    pub fn told(&self) -> impl Iterator<Item = (u64, &'static str)> {
        let Self { evicted, expired, deleted, out_of_service, never_stored, cut_off } = *self;
        let all = [
            (evicted, "evicted: the space was needed for other blocks"),
            (expired, "expired: their time to live has passed"),
            (deleted, "deleted"),
            (out_of_service, "damaged on disk, or in a part of the store that failed: see the server's log"),
            (never_stored, "never stored, according to this server's records"),
            (cut_off, "stored, but an earlier block of the prefix is missing"),
        ];
        all.into_iter().filter(|(blocks, _)| *blocks > 0)
    }
}

impl AddAssign for Missing {
    fn add_assign(&mut self, other: Self) {
        let Self { evicted, expired, deleted, out_of_service, never_stored, cut_off } = other;
        self.evicted += evicted;
        self.expired += expired;
        self.deleted += deleted;
        self.out_of_service += out_of_service;
        self.never_stored += never_stored;
        self.cut_off += cut_off;
    }
}

/// The result of a match.
#[derive(Clone, PartialEq, Debug)]
pub struct MatchReply {
    /// The prefix that can be restored, its cost, and the present blocks of each group and coordinate.
    pub usable: UsablePrefix,
    /// Blocks after the usable prefix with a put in progress: repeat the match soon.
    pub pending: u32,
    /// The reasons why the other blocks after the usable prefix cannot be used.
    pub missing: Missing,
    /// The lease on the usable prefix, if the request asked for a lease and there is a block to hold.
    pub lease: Option<LeaseId>,
    /// The plan, if the request asked for a plan and the store knows the times of its reads. A lease holds the complete usable prefix, even
    /// if the plan uses less.
    pub plan: Option<Box<Planned>>,
}
