//! Compaction: live blocks are moved in the background class, so that what is dead around them can be given back.
//!
//! `relocate` moves blocks of one record; `segments` chooses what to move, `chains` what to merge, `cold` what to
//! encode where it lies, `background` when; `gather` reads and verifies, `encode` encodes. Everything runs under a budget of device bytes a second ([`Pace`]) and one move at a time in each shard, which bounds memory
//! to a few records.

pub(crate) mod background;
pub(crate) mod chains;
pub(crate) mod cold;
pub(crate) mod encode;
#[cfg(test)]
mod encode_tests;
pub(crate) mod gather;
pub(crate) mod relocate;
pub(crate) mod segments;
#[cfg(test)]
pub(super) mod tests;
pub(crate) mod thin;

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use self::relocate::Moved;
use crate::rt::Runtime;
use kvarts_contract::clock::Nanos;

/// What a compaction may do.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CompactOptions {
    /// Thousandths of a sealed segment that must be dead for its live blocks to be moved.
    pub dead_thousandths: u32,
    /// Small records of one chain that must follow each other for them to be merged; 0 merges none.
    pub merge_records_min: u32,
    /// Device bytes a second, read and written together, for each executor.
    pub bytes_per_second: u64,
    /// The most device bytes of this compaction, for each executor.
    pub bytes_max: u64,
    /// How long the blocks of a record must have lain unused for it to be encoded (zstd), if that pays: above a gain of
    /// a tenth. At most some 50 minutes are counted. `None` encodes nothing; what is encoded stays so.
    pub encode_cold_after: Option<Duration>,
    /// Whether cold records are encoded also where nothing else has them moved.
    pub encode_in_place: bool,
}

impl Default for CompactOptions {
    fn default() -> Self {
        Self {
            dead_thousandths: 500,
            merge_records_min: 4,
            bytes_per_second: u64::MAX,
            bytes_max: u64::MAX,
            encode_cold_after: Some(Duration::from_secs(600)),
            encode_in_place: true,
        }
    }
}

/// What a compaction did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CompactReport {
    /// Segments that have no live block left.
    pub segments_emptied: u64,
    /// Small records that became part of a longer one.
    pub records_merged: u64,
    /// Blocks that lie elsewhere now.
    pub blocks_moved: u64,
    /// Blocks that left while they were being moved.
    pub blocks_gone: u64,
    /// Blocks that failed verification: they were not moved, and are not served any more.
    pub blocks_damaged: u64,
    /// Records that could not be read or written: their blocks were left where they are.
    pub records_failed: u64,
    /// Bytes read from devices.
    pub bytes_read: u64,
    /// Bytes of the records written.
    pub bytes_written: u64,
    /// Raw records that were encoded.
    pub records_encoded: u64,
    /// Payload bytes that they had.
    pub encoded_bytes_before: u64,
    /// Payload bytes that they have.
    pub encoded_bytes_after: u64,
}

impl CompactReport {
    fn take(&mut self, moved: Moved) {
        self.blocks_moved += u64::from(moved.blocks);
        self.blocks_gone += u64::from(moved.gone);
        self.blocks_damaged += u64::from(moved.damaged);
        self.bytes_read += moved.bytes_read;
        self.bytes_written += moved.bytes_written;
        self.records_encoded += u64::from(moved.records_encoded);
        self.encoded_bytes_before += moved.bytes_raw;
        self.encoded_bytes_after += moved.bytes_encoded;
    }

    /// Adds what another executor did.
    pub fn add(&mut self, other: Self) {
        self.segments_emptied += other.segments_emptied;
        self.records_merged += other.records_merged;
        self.blocks_moved += other.blocks_moved;
        self.blocks_gone += other.blocks_gone;
        self.blocks_damaged += other.blocks_damaged;
        self.records_failed += other.records_failed;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
        self.records_encoded += other.records_encoded;
        self.encoded_bytes_before += other.encoded_bytes_before;
        self.encoded_bytes_after += other.encoded_bytes_after;
    }
}

/// The budget of device bytes that a compaction keeps to.
pub(crate) struct Pace {
    rt: Rc<dyn Runtime>,
    bytes_per_second: u64,
    left: u64,
    /// Nothing is begun before.
    not_before: Nanos,
    /// Nothing is begun any more.
    stopping: Rc<Cell<bool>>,
}

impl Pace {
    pub(crate) fn new(rt: &Rc<dyn Runtime>, options: &CompactOptions, stopping: Rc<Cell<bool>>) -> Self {
        Self {
            rt: Rc::clone(rt),
            bytes_per_second: options.bytes_per_second.max(1),
            left: options.bytes_max,
            not_before: rt.clock().now(),
            stopping,
        }
    }

    /// As much again may be done; what was done before is still waited for.
    pub(crate) fn renew(&mut self, bytes_max: u64) {
        self.left = bytes_max;
    }

    /// Waits until something may be begun; false if the budget is spent or the executor is stopping.
    pub(crate) async fn ready(&self) -> bool {
        while self.left > 0 && !self.stopping.get() {
            let now = self.rt.clock().now();
            if now >= self.not_before {
                return true;
            }
            // In short sleeps, so that a stop is seen.
            self.rt.sleep_until(self.not_before.min(now.plus(Duration::from_millis(50)))).await;
        }
        false
    }

    /// Notes what was done. The last thing begun may go over the budget by its own size.
    pub(crate) fn spend(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(bytes);
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
        let wait = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.not_before = self.not_before.max(self.rt.clock().now()).plus(wait);
    }
}
