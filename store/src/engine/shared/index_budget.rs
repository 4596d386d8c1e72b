//! How much memory the index may take. It is a budget beside the disk's, because blocks may be so small that the disk holds
//! more of them than the memory: near the limit blocks are evicted as for want of disk, beyond it nothing is put.
//!
//! What counts is what its entries take at the most that tables grow to, and what records and their owners have; memory that
//! is kept from a larger time does not. It is looked at after every few thousand blocks that are put, and at each segment.

use super::Shared;
use kvarts_contract::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Bytes of an entry in a table that has just grown.
const ENTRY_BYTES: u64 = 29;
/// Blocks put between two looks.
const LOOK_AFTER: u64 = 4096;
/// Part of the limit at which nothing more is put, beyond that at which blocks are evicted.
const BEYOND: u64 = 16;
/// No limit.
const NONE: u64 = u64::MAX;

/// The limit, and where the index stood at the last look.
#[derive(Debug)]
pub(crate) struct IndexBudget {
    limit: AtomicU64,
    /// Blocks put since the last look.
    put: AtomicU64,
    short: AtomicBool,
    full: AtomicBool,
}

impl Default for IndexBudget {
    fn default() -> Self {
        let (short, full) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { limit: AtomicU64::new(NONE), put: AtomicU64::new(0), short, full }
    }
}

impl IndexBudget {
    pub(crate) fn set_limit(&self, bytes: Option<u64>) {
        self.limit.store(bytes.unwrap_or(NONE), Relaxed);
    }

    pub(crate) fn limit(&self) -> Option<u64> {
        Some(self.limit.load(Relaxed)).filter(|limit| *limit != NONE)
    }

    /// Whether blocks must be evicted for it, as of the last look.
    pub(crate) fn is_short(&self) -> bool {
        self.short.load(Relaxed)
    }
}

impl Shared {
    /// Looks whether blocks must be evicted for the sake of the index.
    pub(crate) fn index_is_short(&self) -> bool {
        let Some(limit) = self.index_room.limit() else { return false };
        let memory = self.index.memory();
        let bytes = memory.blocks as u64 * ENTRY_BYTES + memory.record_bytes as u64;
        self.index_room.put.store(0, Relaxed);
        self.index_room.short.store(bytes > limit, Relaxed);
        self.index_room.full.store(bytes > limit.saturating_add(limit / BEYOND), Relaxed);
        bytes > limit && !kvarts_layout::planted!("index-limit-ignored")
    }

    /// The limit, if the index has no room for this many more blocks.
    pub(crate) fn index_is_full(&self, blocks: u64) -> Option<u64> {
        let room = &self.index_room;
        let limit = room.limit()?;
        let put = room.put.fetch_add(blocks, Relaxed).saturating_add(blocks);
        if put >= LOOK_AFTER || room.full.load(Relaxed) {
            self.index_is_short();
        }
        let is_full = room.full.load(Relaxed) && !kvarts_layout::planted!("index-limit-ignored");
        is_full.then_some(limit)
    }
}
