//! Asking what is here: which prefix can be restored, without touching a device.

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::time::Duration;

use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId, Requirements, UsablePrefix};
use kvarts_planner::cost::{Times, Told};
use kvarts_planner::plan::{Link, Overlap, Plan, Source};

/// The most entries of one match: keys times the coordinates of all required groups, each of which is looked up.
pub const MAX_MATCH_ENTRIES: usize = 1 << 20;

/// Names one lease. Never given out twice while the process lives.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LeaseId(pub u64);

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
    /// What it is to be planned with what of it is restored, if that is asked.
    pub plan: Option<PlanTerms<'a>>,
}

/// What the plan of a restore follows from, besides what is here and how the way to it is.
#[derive(Clone, Copy, Debug)]
pub struct PlanTerms<'a> {
    /// Tokens of the prompt; the keys are those of its full blocks, or of some of them from the first on.
    pub prompt_tokens: u64,
    /// How long the caller's engine computes.
    pub times: &'a Times,
    /// Leading blocks that the caller has in device memory: of streams, which every later block needs.
    pub hbm_blocks: u32,
    /// Boundaries, in blocks, at which the caller has the windows and states of all other groups in device memory.
    pub hbm_boundaries: &'a [u32],
    /// Leading blocks that the caller has in its host's memory, and the way from there.
    pub dram: Option<(u32, Link)>,
    /// What reads bring from beyond the store's disks, if there is anything.
    pub beyond: Option<&'a Beyond>,
    /// What the caller's engine computes of the prompt while the rest of it is being loaded.
    pub overlap: Overlap,
}

impl<'a> PlanTerms<'a> {
    /// Of a caller that has nothing of the prompt, whose engine computes each layer when it is loaded.
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

/// Blocks that reads bring from other nodes and from a bucket, and the ways there.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Beyond {
    /// The ways: of [`Source::Peer`] and [`Source::Cold`].
    pub ways: Vec<(Source, Link)>,
    /// The same ways as they are taken to be before anything came over them: of plans that load nothing because of what was
    /// measured, a few are made with these.
    pub assumed: Vec<(Source, Link)>,
    /// Of each column the blocks of the asked keys.
    pub columns: BTreeMap<(Group, Coordinate), BeyondColumn>,
}

/// Blocks of a column by the place of their keys; behind the end there are none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BeyondColumn {
    /// Which another node is said to have.
    pub peers: Vec<bool>,
    /// Which the bucket seems to have.
    pub cold: Vec<bool>,
}

/// A plan, and what it was made with.
#[derive(Clone, PartialEq, Debug)]
pub struct Planned {
    /// What to do with what is here, and why.
    pub plan: Plan,
    /// The way to the store's disks when it was made.
    pub disk: DiskLink,
    /// What the times were, and how good.
    pub times: Told,
}

/// The way to a store's disks, as its reads find it: from asking for blocks to their verified bytes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DiskLink {
    /// What reads take, and what is asked for and not delivered now.
    pub link: Link,
    /// Reads that this was measured from; while there are none, a drive is assumed.
    pub measured: u64,
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

/// Why blocks that were asked for cannot be used: counts of blocks. A store remembers a bounded number of departures, since it
/// was opened: what it forgot, or never knew, counts as never stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Missing {
    /// Stored, and evicted: other blocks needed their room, or their quota.
    pub evicted: u64,
    /// Stored, and their time to live is over.
    pub expired: u64,
    /// Stored, and deleted by key or prefix.
    pub deleted: u64,
    /// Damaged, of an executor that has died, or in a directory that was lost.
    pub out_of_service: u64,
    /// Never stored, as far as the store remembers.
    pub never_stored: u64,
    /// Of a match: they are here, behind a block that is not.
    pub cut_off: u64,
}

impl Missing {
    /// Each reason that there is, with its blocks, in words.
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

/// What a match found.
#[derive(Clone, PartialEq, Debug)]
pub struct MatchReply {
    /// The prefix that can be restored, what that costs, and what is there of each group and coordinate.
    pub usable: UsablePrefix,
    /// Blocks behind the usable prefix whose put is in flight: ask again soon.
    pub pending: u32,
    /// Why the others behind the usable prefix cannot be used.
    pub missing: Missing,
    /// The lease on the usable prefix, if one was asked for and there is anything to hold.
    pub lease: Option<LeaseId>,
    /// The plan, if one was asked for and the store knows what its reads take. A lease holds all of the usable prefix,
    /// whatever the plan uses of it.
    pub plan: Option<Box<Planned>>,
}
