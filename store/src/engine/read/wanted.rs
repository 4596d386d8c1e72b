//! The blocks that a read wants, as runs of records: found in the index, grouped by shard.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use kvarts_layout::BlockKey;
use kvarts_layout::format::PAGE_BYTES;

use crate::engine::shared::Shared;
use crate::engine::shared::record_class::RecordClass;
use crate::engine::volume::segment::record_range;
use crate::index::{BlockFingerprint, Location, RecordInfo};
use kvarts_contract::error::Reason;

/// A run of blocks of one record that a read wants.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) shard: u32,
    pub(crate) segment: u32,
    /// Where the record begins in its segment.
    pub(crate) offset: u64,
    pub(crate) header_bytes: u64,
    /// Blocks that the record was written with.
    pub(crate) record_blocks: u16,
    /// The first block of the run.
    pub(crate) location: Location,
    /// Which ordinals of the request.
    pub(crate) run: Range<u32>,
    /// When its blocks end, as the index counts it.
    pub(crate) expires: u32,
    pub(crate) class: Arc<RecordClass>,
}

impl Wanted {
    /// Which block of its record a block of the run is.
    pub(crate) fn block_of(&self, ordinal: u32) -> u32 {
        u32::from(self.location.block) + (ordinal - self.run.start)
    }

    /// Whether a record of the index is the one that was looked up. Numbers of records come again.
    pub(super) fn is(&self, record: &RecordInfo) -> bool {
        let page = u64::from(record.page) * PAGE_BYTES;
        (u32::from(record.shard), record.segment, page) == (self.shard, self.segment, self.offset)
    }

    /// Where a block of the run was when it was looked up.
    pub(crate) fn place_of(&self, ordinal: u32) -> Location {
        Location { record: self.location.record, block: self.block_of(ordinal) as u16 }
    }
}

/// A chunk that a step delivers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WantedChunk {
    /// Block within the record.
    pub(crate) block: u32,
    /// Canonical index of the part.
    pub(crate) part: u32,
    pub(crate) bytes: u64,
}

/// Looks every block up and joins those that follow each other in one record.
pub(crate) fn find(
    shared: &Shared,
    keys: &[BlockKey],
    prints: &[BlockFingerprint],
    failures: &mut BTreeMap<u32, Reason>,
) -> Result<Vec<Wanted>, Reason> {
    let mut wanted: Vec<Wanted> = Vec::new();
    for ((ordinal, key), print) in (0u32..).zip(keys).zip(prints) {
        let found = shared.index.locate(*print);
        let Some(found) = found.filter(|found| !shared.is_dead(u32::from(found.record.shard))) else {
            failures.insert(ordinal, Reason::NotHere(*key));
            continue;
        };
        if let Some(last) = wanted.last_mut() {
            let next = u32::from(last.location.block) + last.run.end - last.run.start;
            if last.location.record == found.location.record
                && u32::from(found.location.block) == next
                && last.run.end == ordinal
            {
                last.run.end = ordinal + 1;
                continue;
            }
        }
        let (offset, _) = record_range(&found.record);
        let class = shared.classes.get(found.record.class).ok_or(Reason::Bug("an unknown record class"))?;
        wanted.push(Wanted {
            shard: u32::from(found.record.shard),
            segment: found.record.segment,
            offset,
            header_bytes: u64::from(found.record.header_pages) * PAGE_BYTES,
            record_blocks: found.record.blocks.get(),
            location: found.location,
            run: ordinal..ordinal + 1,
            expires: found.record.expires,
            class,
        });
    }
    Ok(wanted)
}

/// Which of the runs lie in each shard.
pub(crate) fn by_shard(wanted: &[Wanted]) -> BTreeMap<u32, Vec<u32>> {
    let mut by_shard = BTreeMap::<u32, Vec<u32>>::new();
    for (index, wanted) in (0u32..).zip(wanted) {
        by_shard.entry(wanted.shard).or_default().push(index);
    }
    by_shard
}
