//! Checkpoints of one shard: which segments are free, what was deleted, and for each live record when it was last
//! used and when it expires. Which blocks a record has stays in footers and records.
//!
//! Invariants:
//! - The two files are written in turn, and never the one that holds the newest whole checkpoint.
//! - The header is written last, when everything behind it is durable: chunks of an attempt that a crash ended are
//!   never taken for those of the next one under the same sequence.
//! - Memory is one chunk, and the work is that of the shard's own records.

mod read;
mod write;

use std::cell::Cell;

use crate::engine::shared::Shared;
use crate::engine::tasks::notify::Notify;

pub(crate) use read::{Checkpoint, read};
pub(crate) use write::{prove, write};

/// What a log remembers of its two checkpoint files.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    /// The highest sequence that either file proves.
    sequence: Cell<u64>,
    /// The file that holds the newest whole checkpoint.
    newest: Cell<Option<u32>>,
    /// Bytes of the budget that each file has.
    charged: [Cell<u64>; 2],
    /// One is being written.
    writing: Cell<bool>,
    /// What was buried by then, the newest whole checkpoint of this life says.
    buried: Cell<u64>,
    ended: Notify,
}

impl Slots {
    /// Whether the newest checkpoint says everything that was buried up to this version of the tombstones.
    pub(crate) fn cover(&self, version: u64) -> bool {
        self.buried.get() >= version
    }

    /// What the files have of the budget counts no more.
    pub(crate) fn give_back(&self, shared: &Shared) {
        self.charged.iter().for_each(|charged| shared.give_checkpoint_budget(charged.take()));
    }

    /// Completes when none is being written.
    pub(crate) async fn settled(&self) {
        self.ended.until(|| (!self.writing.get()).then_some(())).await;
    }

    /// The file to write next.
    fn next(&self) -> u32 {
        let over = u32::from(kvarts_layout::planted!("checkpoint-over-the-newest"));
        self.newest.get().map_or(0, |newest| (1 - (newest & 1)) ^ over)
    }

    fn charged(&self, slot: u32) -> &Cell<u64> {
        let [zero, one] = &self.charged;
        if slot & 1 == 0 { zero } else { one }
    }
}

/// What a checkpoint took.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct CheckpointReport {
    pub(crate) sequence: u64,
    pub(crate) bytes: u64,
    pub(crate) segments: u64,
    pub(crate) records: u64,
    /// The version of the tombstones that it lists.
    pub(crate) buried: u64,
}
