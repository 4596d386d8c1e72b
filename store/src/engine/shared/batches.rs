//! How much the engine does at a time, where a crash between two batches parts what belongs together.

use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::format::checkpoint::MAX_ITEMS;

/// How much of something is done, written or kept at a time. All of it is decided by the engine and the same in every store;
/// tests make it small, because what lies between two of them is where a crash can part what belongs together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Batches {
    /// Items of one chunk of a checkpoint.
    pub checkpoint_items: usize,
    /// Tombstones in one: they are the largest items, 72 bytes.
    pub checkpoint_tombstones: usize,
    /// Blocks that recovery puts into the index at once: the more, the better the caches serve; a million take 24 MiB
    /// meanwhile.
    pub recovered_blocks: usize,
    /// Tombstones of a shard beyond which whole segments are emptied, the oldest first.
    pub tombstones: usize,
    /// Segments that a store which is over its budget empties for one checkpoint.
    pub removed_together: u32,
    /// How often room is made by holes for one segment, before one is emptied for it.
    pub hole_rounds: u32,
}

impl Default for Batches {
    fn default() -> Self {
        Self {
            checkpoint_items: MAX_ITEMS,
            checkpoint_tombstones: 8 << 10,
            recovered_blocks: 1 << 20,
            tombstones: 16 << 10,
            removed_together: 16,
            hole_rounds: 8,
        }
    }
}

impl Batches {
    /// What the pages of a checkpoint's chunks take beside its items, for each item, in both files: nothing where chunks are as
    /// large as the format has them.
    pub(crate) fn page_share(&self) -> u64 {
        2 * PAGE_BYTES / self.checkpoint_items.max(1) as u64
    }

    /// The same for each tombstone.
    pub(crate) fn page_share_of_graves(&self) -> u64 {
        2 * PAGE_BYTES / self.checkpoint_tombstones.max(1) as u64
    }
}
