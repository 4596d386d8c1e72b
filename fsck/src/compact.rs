//! Offline compaction: writes live blocks together, in place or as a new store, and lets go of everything else.
//!
//! What is kept: every live block with its key, origin id, digests, group, coordinate, parent, extensions, creation
//! time, and what the checkpoints say of its last use and expiry. What goes: blocks that were deleted, have expired, or
//! have a newer production in their shard; tombstones and epochs that no record is left for.
//!
//! Invariants:
//! - Nothing is written unless all metadata of the store is sound: what a damaged checkpoint says was deleted would come
//!   back.
//! - Every byte that is moved has been verified on the way. At the first that does not match, compaction stops.
//! - In place, a segment is let go only when everything live in it is durable in a sealed segment, and a durable
//!   checkpoint says that the old one is free and what had been deleted. So each block has a durable copy at every
//!   moment; after a power cut there may be two of one origin, and compacting again goes on.
//! - A tombstone is forgotten only when the last segment that began before it is gone for good.
//! - A new store becomes a store with its last write. Until then its directories have a mark and no superblock, so no
//!   process opens them, and compacting there again starts over. The old store is only read.
//!
//! Memory: what `inventory` says (about 40 bytes for each block and 280 for each record on disk), 48 bytes for each
//! block in the segments that are being written (one for each shard), and three times the largest record.

mod discard;
mod elsewhere;
mod graves;
mod in_place;
mod inventory;
mod plan;
mod refusal;
mod sink;
mod source;
#[cfg(test)]
mod tests;
mod unfinished;

use std::sync::atomic::{AtomicU64, Ordering};

pub use elsewhere::{Target, elsewhere};
pub use in_place::{Place, in_place};
pub use refusal::{Refusal, refuse_unsound};
pub use unfinished::Directory;
pub use unfinished::{expect_free, is_unfinished};

/// How payloads are arranged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LayoutChoice {
    /// As they are.
    #[default]
    Keep,
    /// Whole blocks one after the other.
    FullBlock,
    /// Whole layers one after the other.
    LayerBlock,
    /// By the sizes of layers and runs.
    Auto,
}

/// How a store is compacted.
#[derive(Clone, Debug)]
pub struct Options {
    /// Segments of which less is live are rewritten.
    pub utilisation_percent: u8,
    /// How payloads are arranged.
    pub layout: LayoutChoice,
    /// Whether small records that follow each other become one.
    pub merge: bool,
    /// Records not used for this many seconds are compressed, where that pays.
    pub zstd_after_s: Option<u64>,
    /// The time, in milliseconds since 1970: what has expired by then is left out.
    pub now_ms: u64,
    /// Threads that read metadata.
    pub threads: usize,
    /// Find out what would be done and change nothing: all numbers of the report are those of a real run.
    pub dry_run: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            utilisation_percent: 90,
            layout: LayoutChoice::Keep,
            merge: true,
            zstd_after_s: None,
            now_ms: 0,
            threads: 2,
            dry_run: false,
        }
    }
}

/// Progress, for a display.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    planned: AtomicU64,
}

impl Progress {
    /// Bytes of live records that have been written.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Bytes of live records that will be; zero until it is known.
    pub fn planned(&self) -> u64 {
        self.planned.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// What was done, or would be.
#[derive(Clone, PartialEq, Debug, Default, serde::Serialize)]
pub struct Report {
    /// Nothing was changed.
    pub dry_run: bool,
    /// Blocks that are live.
    pub live_blocks: u64,
    /// Blocks in records that have expired.
    pub expired_blocks: u64,
    /// Blocks on disk that had been deleted.
    pub deleted_blocks: u64,
    /// Blocks on disk of which a newer production, or another copy, counts.
    pub superseded_blocks: u64,
    /// Segment files before.
    pub segments_before: u64,
    /// Segment files afterwards.
    pub segments_after: u64,
    /// Segments that were left as they are because this program cannot write all that is in them.
    pub segments_fixed: u64,
    /// Bytes of one segment.
    pub segment_bytes: u64,
    /// Bytes of records with live blocks, before.
    pub live_bytes: u64,
    /// Records that were written.
    pub records_written: u64,
    /// Records that became part of another.
    pub records_merged: u64,
    /// Records that got another layout.
    pub records_rearranged: u64,
    /// Records that were compressed.
    pub records_compressed: u64,
    /// Bytes of records that were read.
    pub bytes_read: u64,
    /// Bytes of records that were written.
    pub bytes_written: u64,
    /// Tombstones and namespace epochs before.
    pub graves_before: u64,
    /// Those that some segment is still old enough for.
    pub graves_after: u64,
    /// How long it took; zero where it was not measured.
    pub seconds: f64,
    /// Bytes written over that.
    pub gib_per_s: f64,
}

impl Report {
    fn of(inventory: &inventory::Inventory, options: &Options, segment_bytes: u64) -> Self {
        let files = inventory.segments.iter();
        Self {
            dry_run: options.dry_run,
            live_blocks: inventory.live_blocks,
            expired_blocks: inventory.expired_blocks,
            deleted_blocks: inventory.buried_blocks,
            superseded_blocks: inventory.duplicate_blocks,
            segments_before: inventory.segments.len() as u64,
            segments_fixed: files.clone().filter(|one| one.role == inventory::Role::Fixed).count() as u64,
            segment_bytes,
            live_bytes: files.fold(0, |sum, segment| segment.live_bytes.saturating_add(sum)),
            graves_before: inventory.shards.iter().map(|shard| shard.graves.len()).sum(),
            ..Self::default()
        }
    }

    fn count(&mut self, made: &source::Made) {
        self.records_written = self.records_written.saturating_add(1);
        self.records_rearranged = self.records_rearranged.saturating_add(u64::from(made.rearranged));
        self.records_compressed = self.records_compressed.saturating_add(u64::from(made.compressed));
    }

    /// The share of segment files that live records take, in percent: before.
    pub fn utilisation_before(&self) -> f64 {
        percent(self.live_bytes, self.segments_before.saturating_mul(self.segment_bytes))
    }
}

/// Part of a whole, in percent; of nothing, all.
pub fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 100.0 } else { part as f64 * 100.0 / whole as f64 }
}
