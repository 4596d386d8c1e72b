//! The blocks that a read wants, as runs of records: found in the index, grouped by shard.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use kvarts_layout::BlockKey;
use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::planted;

use crate::engine::shared::Shared;
use crate::engine::shared::record_class::RecordClass;
use crate::engine::volume::segment::record_range;
use crate::index::{BlockFingerprint, Location, Lookup, RecordInfo};
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

    /// Whether a block that was looked up at `at` is the next of the run.
    fn is_continued_by(&self, at: Location, ordinal: u32) -> bool {
        let next = u32::from(self.location.block) + self.run.end - self.run.start;
        self.location.record == at.record
            && u32::from(at.block) == next
            && next < u32::from(self.record_blocks)
            && self.run.end == ordinal
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
///
/// The index is asked for all at once, and for the record of each run once: of a block behind a run's first, the number of its
/// record is as old as the look. If it means another record by now, that record's header shows it, as it does for whatever moves
/// or leaves between the look and the read.
pub(crate) fn find(
    shared: &Shared,
    keys: &[BlockKey],
    prints: &[BlockFingerprint],
    failures: &mut BTreeMap<u32, Reason>,
) -> Result<Vec<Wanted>, Reason> {
    let (mut wanted, mut looked_up): (Vec<Wanted>, _) = (Vec::new(), Vec::new());
    shared.index.lookup_many(prints, &mut looked_up);
    for ((ordinal, key), (print, seen)) in (0u32..).zip(keys).zip(prints.iter().zip(&looked_up)) {
        if let (Some(last), Lookup::Live(at)) = (wanted.last_mut(), seen)
            && last.is_continued_by(*at, ordinal)
        {
            last.run.end = ordinal + 1;
            continue;
        }
        // Together with its record: where a run begins, and where what was seen has moved since.
        let found = match seen {
            Lookup::Live(_) => shared.index.locate(*print),
            _ => None,
        };
        let Some(found) = found.filter(|found| !shared.is_dead(u32::from(found.record.shard))) else {
            failures.insert(ordinal, Reason::NotHere(*key));
            continue;
        };
        if let Some(last) = wanted.last_mut()
            && last.is_continued_by(found.location, ordinal)
        {
            last.run.end = ordinal + 1;
            continue;
        }
        let (offset, _) = record_range(&found.record);
        let class = shared
            .classes
            .get(found.record.class)
            .ok_or(Reason::Bug("a record has an unknown record class"))?;
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

/// Which of the runs lie behind each lane: in those shards of a device that one executor has.
pub(crate) fn by_lane(shared: &Shared, wanted: &[Wanted]) -> BTreeMap<u32, Vec<u32>> {
    let mut by_lane = BTreeMap::<u32, Vec<u32>>::new();
    for (index, wanted) in (0u32..).zip(wanted) {
        let lane = match planted!("part-for-each-shard") {
            true => wanted.shard,
            false => shared.directories.lane_of(wanted.shard),
        };
        by_lane.entry(lane).or_default().push(index);
    }
    by_lane
}

/// Which of the runs lie in each shard.
pub(crate) fn by_shard(wanted: &[Wanted]) -> BTreeMap<u32, Vec<u32>> {
    let mut by_shard = BTreeMap::<u32, Vec<u32>>::new();
    for (index, wanted) in (0u32..).zip(wanted) {
        by_shard.entry(wanted.shard).or_default().push(index);
    }
    by_shard
}
