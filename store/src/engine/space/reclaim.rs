//! Making room where the file system makes no holes (see `evict`), or where holes gave none: the oldest sealed segment
//! that nothing holds is emptied and recycled.
//!
//! A block under a lease keeps its segment; so does a device read, and one that was told of a block there before the
//! block was moved (see `grace`). What is evicted is gone from the index before
//! the segment's header is rewritten, so no read is sent to bytes that are being replaced; and a reader that was
//! sent there before finds another record's header and answers a miss.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use kvarts_layout::format::body::{BlockName, Blocks};
use kvarts_layout::format::footer::{Content, Footer};
use kvarts_layout::{BlockKey, Coordinate, Group};

use super::evict::batch::Made;
use crate::engine::shared::visibility::{BlockOf, Departure};
use crate::engine::space::Space;
use crate::engine::tasks::steps::Section;
use crate::engine::volume::checkpoint;
use crate::engine::volume::segment::{Segment, SegmentState};
use crate::engine::volume::tombstones::TombstoneSet;
use crate::index::{Eviction, Lookup, RecordId};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;

/// Blocks that go without a turn for others.
const BLOCKS_AT_ONCE: usize = 64;

impl Space {
    /// Empties a sealed segment. Those that hold nothing any more go first, then the oldest. Where single blocks can be given back,
    /// only such of which nothing is needed by what hangs on it elsewhere; `any`: others too.
    pub(crate) async fn reclaim(&self, any: bool) -> Result<Made, Reason> {
        let mut sealed: Vec<Rc<Segment>> = self
            .volume
            .segments
            .borrow()
            .values()
            .filter(|segment| segment.state.get() == SegmentState::Sealed && self.volume.is_unread(segment))
            .map(Rc::clone)
            .collect();
        sealed.sort_by_cached_key(|segment| (segment.book.live() > 0, segment.first_sequence.get()));
        for segment in sealed {
            let Ok(footer) = self.volume.read_footer(&segment, Class::Put).await else { continue };
            if (any || self.is_end_of_chains(&segment, &footer).await)
                && self.save_tombstones(&segment, &footer).await
                && self.volume.is_unread(&segment)
                && self.evict_all(&segment, &footer).await
                && self.volume.is_unread(&segment)
                && segment.state.get() == SegmentState::Sealed
                && segment.book.live() == 0
            {
                self.volume.shared.counters.segments_recycled.fetch_add(1, Relaxed);
                segment.state.set(SegmentState::Free);
                if !self.is_hollow(&segment) {
                    return Ok(Made::Segment(segment));
                }
                return match self.remove_hollow().await {
                    Made::Nothing => Err(self.volume.shared.budget_full()),
                    made => Ok(made),
                };
            }
        }
        Err(self.volume.shared.budget_full())
    }

    /// Whether nothing in other segments, and no put under way, hangs on a block of a segment.
    async fn is_end_of_chains(&self, segment: &Segment, footer: &Footer) -> bool {
        let index = &self.volume.shared.index;
        let mut section = Section::begin(&self.volume.shared.work.evictions, &*self.volume.shared.clock);
        let (mut hanging, mut parents) = (BTreeMap::new(), BTreeMap::<RecordId, u64>::new());
        for record in &footer.records {
            let Content::Blocks(blocks) = &record.content else { continue };
            let Some(coordinate) = Coordinate::from_u64(blocks.coordinate) else { continue };
            section.step(blocks.blocks.len() as u64).await;
            let namespace = segment.local(blocks.namespace);
            for name in &blocks.blocks {
                let print = index.key().of(namespace, &BlockKey(name.key), Group(blocks.group), coordinate);
                let Some(found) = index.locate(print) else { continue };
                if !self.volume.is_at(segment, record.offset, &found.record) {
                    continue;
                }
                if found.hanging > 0 {
                    hanging.insert(print.first(), found.hanging);
                }
                if found.record.hangs {
                    parents.insert(found.location.record, found.record.parent);
                }
            }
        }
        for parent in parents.into_values() {
            section.step(1).await;
            if let Some(count) = hanging.get_mut(&parent) {
                *count = u32::saturating_sub(*count, 1);
            }
        }
        hanging.into_values().all(|count| count == 0)
    }

    /// Makes sure that what a segment buries stands elsewhere on disk before the segment is recycled: a record
    /// that it kills may lie in another, and would come back. False if it could not be done.
    pub(crate) async fn save_tombstones(&self, segment: &Segment, footer: &Footer) -> bool {
        if !TombstoneSet::are_in(&footer.records, self.volume.floor())
            || kvarts_layout::planted!("tombstones-recycled")
        {
            return true;
        }
        // What it buries was known when it was sealed: a checkpoint of then or later says it, and no new one is needed.
        let present = self.volume.tombstones.borrow().version();
        let version = match kvarts_layout::planted!("checkpoint-for-each-segment") {
            true => present,
            false => segment.buried_by.get().map_or(present, |sealed| sealed.min(present)),
        };
        loop {
            self.volume.checkpoints.settled().await;
            if self.volume.checkpoints.cover(version) {
                return true;
            }
            match checkpoint::write(&self.volume, Class::Put).await {
                Ok(_) => {}
                Err(Reason::Busy(_)) if !self.volume.is_out() => {}
                Err(_) => return false,
            }
        }
    }

    /// Evicts every block that the segment holds; false, and only some evicted, if one is leased.
    pub(crate) async fn evict_all(&self, segment: &Segment, footer: &Footer) -> bool {
        let mut section = Section::begin(&self.volume.shared.work.evictions, &*self.volume.shared.clock);
        for record in &footer.records {
            let Content::Blocks(blocks) = &record.content else { continue };
            for some in blocks.blocks.chunks(BLOCKS_AT_ONCE) {
                if !self.evict_named(segment, record.offset, (blocks, some)) {
                    return false;
                }
                section.step(some.len() as u64).await;
            }
        }
        true
    }

    /// Evicts some blocks of a record.
    fn evict_named(&self, segment: &Segment, offset: u64, (blocks, some): (&Blocks, &[BlockName])) -> bool {
        let index = &self.volume.shared.index;
        let Some(coordinate) = Coordinate::from_u64(blocks.coordinate) else { return true };
        for name in some {
            let key = BlockKey(name.key);
            let namespace = segment.local(blocks.namespace);
            let print = index.key().of(namespace, &key, Group(blocks.group), coordinate);
            let at = match index.lookup(print) {
                Lookup::Live(at) => at,
                Lookup::Quarantined => {
                    // A miss already; as absent it is one too, and takes no memory.
                    index.delete(print);
                    continue;
                }
                Lookup::Absent | Lookup::Pending => continue,
            };
            let Some(record) = index.records().get(at.record) else { continue };
            let here = self.volume.is_at(segment, offset, &record);
            let Some(class) = self.volume.shared.classes.get(record.class).filter(|_| here) else { continue };
            let why = Departure::Evicted;
            if self.volume.shared.evict(print, at, why, BlockOf { class: &class, key }) == Eviction::Busy {
                return false;
            }
        }
        true
    }
}
