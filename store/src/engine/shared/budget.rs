//! The budget: bytes are taken of it before they are allocated on disk, and given back after they are gone from
//! there, durably. So what is allocated never passes the budget, whatever a crash undoes.
//!
//! - Checkpoints come first: no segment is made unless, with it, the checkpoints of everything that is here, and of
//!   what one more segment of each shard can bring, still fit. A full store can always write down what it knows.
//! - A lower budget takes effect at once for whatever would grow, and segments are given back until it is kept.
//! - The share of directories that were out when the store was opened is not given to the others: what they hold is still on disk.
//! - What file systems take beside a store's files is part of it: see [`directory_bytes`].

use std::sync::atomic::Ordering::Relaxed;

use kvarts_layout::format::{PAGE_BYTES, page_align, superblock};

use super::batches::Batches;
use super::{Birth, Shared};
use crate::ledger::{ShardSpace, Space, SpaceReport};
use kvarts_contract::error::units::whole_units;
use kvarts_contract::error::{Reason, SpaceCause};
use kvarts_contract::sync::atomic::{AtomicBool, AtomicU64};

/// What two checkpoint files of one shard take besides their items.
const CHECKPOINT_BYTES: u64 = 64 << 10;
/// What both take for a record, or for a segment.
const CHECKPOINT_ITEM_BYTES: u64 = 80;
/// What both take for a tombstone or a namespace epoch, and the name that it may need.
const CHECKPOINT_GRAVE_BYTES: u64 = 240;
/// The smallest record: a page of header, a page of payload.
const RECORD_BYTES_MIN: u64 = 2 * PAGE_BYTES;
/// Segment files with holes that may take the room of one without.
const FILES_PER_SEGMENT: u64 = 4;
/// The entry of a file in its directory, generously.
const ENTRY_BYTES: u64 = 64;

/// What the store may allocate, and has.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: AtomicU64,
    /// Everything, `checkpoints`, `directories` and superblocks included.
    allocated: AtomicU64,
    checkpoints: AtomicU64,
    directories: AtomicU64,
    superblocks: AtomicU64,
    shards: u64,
    /// Directories of the store, and those that were out when it was opened.
    roots: AtomicU64,
    absent: AtomicU64,
    /// What the budget is with all of them.
    asked: AtomicU64,
    segment_bytes: u64,
    /// Segment files that the process has descriptors for.
    files_cap: AtomicU64,
    /// Segments are being given back because the budget is lower than what the store was filled under.
    shrinking: AtomicBool,
}

/// What the directories themselves may take: a page for each of the store's directories, two for each shard's, and
/// the entries of as many segment files as the budget holds. File systems differ; ext4 takes a page for each at
/// first and one more for some hundred names, others take nothing.
fn directory_bytes(roots: u64, shards: u64, files: u64) -> u64 {
    let entries = page_align(files.saturating_mul(ENTRY_BYTES)).unwrap_or(u64::MAX);
    entries.saturating_add((roots + 2 * shards) * PAGE_BYTES)
}

impl Budget {
    pub(crate) fn new(birth: &Birth) -> Self {
        Self {
            limit: AtomicU64::new(birth.budget),
            allocated: AtomicU64::new(0),
            checkpoints: AtomicU64::new(0),
            directories: AtomicU64::new(0),
            superblocks: AtomicU64::new(0),
            shards: u64::from(birth.shards),
            roots: AtomicU64::new(0),
            absent: AtomicU64::new(0),
            asked: AtomicU64::new(birth.budget),
            segment_bytes: birth.segment_bytes,
            files_cap: AtomicU64::new(u64::MAX),
            shrinking: AtomicBool::new(false),
        }
    }

    /// The least budget under which every shard can have a segment.
    fn floor(&self, batches: &Batches) -> u64 {
        let item = CHECKPOINT_ITEM_BYTES + batches.page_share();
        let growth = self.segment_bytes / RECORD_BYTES_MIN * item;
        let each = self.segment_bytes + CHECKPOINT_BYTES + growth;
        let roots = self.roots.load(Relaxed);
        let fixed = self.superblocks.load(Relaxed) + directory_bytes(roots, self.shards, self.shards);
        fixed.saturating_add(each.saturating_mul(self.shards))
    }

    /// Segment files that there may be: more than would fit whole, because holes take no room.
    fn files_max(&self, limit: u64) -> u64 {
        (limit / self.segment_bytes.max(1)).saturating_mul(FILES_PER_SEGMENT)
    }

    fn set_limit(&self, bytes: u64) {
        let (roots, absent) = (self.roots.load(Relaxed).max(1), self.absent.load(Relaxed));
        self.asked.store(bytes, Relaxed);
        let bytes = bytes - bytes / roots * absent;
        let most = directory_bytes(self.roots.load(Relaxed), self.shards, self.files_max(bytes));
        let before = self.directories.swap(most, Relaxed);
        self.allocated.fetch_add(most, Relaxed);
        self.allocated.fetch_sub(before, Relaxed);
        self.limit.store(bytes, Relaxed);
    }

    fn take(&self, bytes: u64, beside: u64) -> Result<(), Reason> {
        let limit = self.limit.load(Relaxed);
        let within = |used: u64| {
            let after = used.checked_add(bytes)?;
            (after.checked_add(beside)? <= limit).then_some(after)
        };
        let taken = self.allocated.fetch_update(Relaxed, Relaxed, within);
        taken.map(drop).map_err(|_| Reason::NoSpace(SpaceCause::Budget { limit }))
    }

    fn give(&self, bytes: u64) {
        // Saturating: a count that is too high is a smaller store, one that wraps none at all.
        let less = |used: u64| Some(used.saturating_sub(bytes));
        let _ = self.allocated.fetch_update(Relaxed, Relaxed, less);
    }
}

impl Shared {
    /// Counts the store's directories and their superblocks; refused if the budget is too small for the store.
    pub(crate) fn begin_budget(&self, superblocks: u64) -> Result<(), Reason> {
        self.budget.superblocks.store(superblocks, Relaxed);
        self.budget.roots.store(superblocks / superblock::FILE_BYTES as u64, Relaxed);
        let absent = self.directories.count().saturating_sub(self.directories.in_use());
        self.budget.absent.store(absent as u64, Relaxed);
        self.charge(superblocks);
        self.set_budget(self.space().1)
    }

    /// A directory that was absent when the store was opened is back: its part of the budget may be used.
    pub(crate) fn add_absent_part(&self) {
        self.budget.absent.fetch_sub(1, Relaxed);
        self.budget.set_limit(self.budget.asked.load(Relaxed));
    }

    /// Takes the bytes of a new segment, leaving room for the checkpoints of everything that is here.
    pub(crate) fn take_segment_budget(&self) -> Result<(), Reason> {
        let most = self.budget.files_cap.load(Relaxed);
        if self.files() >= most && !kvarts_layout::planted!("descriptors-not-counted") {
            return Err(Reason::NoSpace(SpaceCause::Files { most }));
        }
        self.budget.take(self.segment_bytes, self.checkpoint_room())
    }

    /// Takes bytes for a checkpoint. A store whose budget was lowered takes them beyond it, also where what it has fits
    /// and only the checkpoint does not: what it gives back must be called empty first, or it would look lost.
    pub(crate) fn take_checkpoint_budget(&self, bytes: u64) -> Result<(), Reason> {
        let (allocated, limit) = self.space();
        if allocated > limit || self.budget.shrinking.load(Relaxed) {
            self.charge(bytes);
        } else {
            self.budget.take(bytes, 0)?;
        }
        self.budget.checkpoints.fetch_add(bytes, Relaxed);
        Ok(())
    }

    /// Counts bytes of a checkpoint that are on disk already, whatever the budget says.
    pub(crate) fn charge_checkpoint(&self, bytes: u64) {
        self.budget.checkpoints.fetch_add(bytes, Relaxed);
        self.charge(bytes);
    }

    /// Gives bytes of a checkpoint back.
    pub(crate) fn give_checkpoint_budget(&self, bytes: u64) {
        self.budget.checkpoints.fetch_sub(bytes, Relaxed);
        self.give_budget(bytes);
    }

    /// Counts bytes that are on disk already, whatever the budget says.
    pub(crate) fn charge(&self, bytes: u64) {
        self.budget.allocated.fetch_add(bytes, Relaxed);
    }

    /// Gives bytes back that are not allocated any more, or were not after all.
    pub(crate) fn give_budget(&self, bytes: u64) {
        self.budget.give(bytes);
    }

    /// Bytes on disk, and the most there may be.
    pub(crate) fn space(&self) -> (u64, u64) {
        (self.budget.allocated.load(Relaxed), self.budget.limit.load(Relaxed))
    }

    /// Why there is no room where nothing that the budget has may go.
    pub(crate) fn budget_full(&self) -> Reason {
        Reason::NoSpace(SpaceCause::Budget { limit: self.space().1 })
    }

    /// Shards of the store.
    pub(crate) fn shards(&self) -> u64 {
        self.budget.shards
    }

    /// Segments that each shard may have within the budget, about.
    pub(crate) fn segments_of_a_shard(&self) -> u64 {
        self.budget.limit.load(Relaxed) / self.segment_bytes.max(1) / self.budget.shards.max(1)
    }

    /// The least budget that this store can be run with.
    pub(crate) fn budget_floor(&self) -> u64 {
        self.budget.floor(&self.batches)
    }

    /// Changes the budget.
    pub(crate) fn set_budget(&self, bytes: u64) -> Result<(), Reason> {
        let floor = self.budget_floor();
        if bytes < floor {
            let (budget, enough) = (whole_units(bytes), floor.div_ceil(1 << 20));
            return Err(Reason::Config(format!(
                "the budget of {budget} is too small for the shards and segments of this store: use at least \
                {enough} MiB"
            )));
        }
        self.budget.set_limit(bytes);
        Ok(())
    }

    /// Whether segments must be given back: too much is allocated, too little is left for checkpoints, or the index is
    /// short of memory.
    pub(crate) fn must_shrink(&self) -> bool {
        self.excess() > 0
    }

    /// Whether segments must be given back because the budget was lowered; remembered until none must be.
    pub(crate) fn is_shrinking(&self) -> bool {
        // For the sake of the index nothing is taken beyond the budget.
        self.budget.shrinking.store(self.disk_excess() > 0, Relaxed);
        self.must_shrink()
    }

    /// Bytes that must be given back.
    pub(crate) fn excess(&self) -> u64 {
        let excess = self.disk_excess();
        // A segment with all that is in it, as long as the index is short of memory.
        if self.index_is_short() { excess.max(self.segment_bytes) } else { excess }
    }

    fn disk_excess(&self) -> u64 {
        let (allocated, limit) = self.space();
        allocated.saturating_add(self.checkpoint_room()).saturating_sub(limit)
    }

    /// Whether the segment files are too many for more holes to help.
    pub(crate) fn has_too_many_files(&self) -> bool {
        self.files() >= self.files_max().min(self.budget.files_cap.load(Relaxed))
    }

    fn files(&self) -> u64 {
        self.index.records().ledger().segment_count() as u64
    }

    /// Segment files that a full store of this budget may have.
    pub(crate) fn files_max(&self) -> u64 {
        self.budget.files_max(self.space().1)
    }

    /// Has no more segment files made than this.
    pub(crate) fn set_files_cap(&self, files: u64) {
        self.budget.files_cap.store(files, Relaxed);
    }

    /// Bytes that must be given back before another segment can be made.
    pub(crate) fn shortage(&self) -> u64 {
        let (allocated, limit) = self.space();
        let wanted = allocated.saturating_add(self.segment_bytes).saturating_add(self.checkpoint_room());
        wanted.saturating_sub(limit)
    }

    /// What checkpoints may still take.
    fn checkpoint_room(&self) -> u64 {
        let budget = &self.budget;
        let records = self.index.records();
        let coming = budget.shards * (self.segment_bytes / RECORD_BYTES_MIN);
        let items = records.len() as u64 + records.ledger().segment_count() as u64 + coming;
        let need = budget.shards * CHECKPOINT_BYTES
            + items * (CHECKPOINT_ITEM_BYTES + self.batches.page_share())
            + self.buried.load(Relaxed) * (CHECKPOINT_GRAVE_BYTES + self.batches.page_share_of_graves());
        need.saturating_sub(budget.checkpoints.load(Relaxed))
    }

    /// What every byte on disk is.
    pub(crate) fn space_report(&self) -> SpaceReport {
        let ledger = self.index.records().ledger();
        let mut report = SpaceReport {
            superblocks: self.budget.superblocks.load(Relaxed),
            namespaces: ledger.namespaces(),
            ..SpaceReport::default()
        };
        for segment in ledger.segments() {
            if report.shards.last().is_none_or(|last| last.shard != segment.shard) {
                report.shards.push(ShardSpace { shard: segment.shard, ..ShardSpace::default() });
            }
            if let Some(shard) = report.shards.last_mut() {
                shard.segments += 1;
                shard.space += segment.space;
            }
            report.total += segment.space;
        }
        report.checkpoints = self.budget.checkpoints.load(Relaxed);
        report.directories = self.budget.directories.load(Relaxed);
        let fixed = report.checkpoints + report.superblocks + report.directories;
        report.total += Space { allocated: fixed, overhead: fixed, ..Space::default() };
        let (allocated, limit) = self.space();
        report.budget = limit;
        report.reserved = allocated.saturating_sub(report.total.allocated);
        report.total += Space { allocated: report.reserved, free: report.reserved, ..Space::default() };
        report
    }
}
