//! What the segments of a shard hold, with whole names: the index knows fingerprints only.
//!
//! A segment's records are listed by its footer once it is sealed, and in memory before. Where the footer cannot be
//! read, the headers of the records that the index still knows are.

use std::rc::Rc;
use std::sync::Arc;

use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::format::body::Blocks;
use kvarts_layout::format::footer::{Content, Entry};
use kvarts_layout::format::record;
use kvarts_layout::{BlockKey, Coordinate, Group};

use super::Reads;
use crate::engine::shared::record_class::RecordClass;
use crate::engine::tasks::steps::Section;
use crate::engine::volume::segment::{Hold, Segment, SegmentState, entry};
use crate::index::{BlockFingerprint, Location, OwnerCursor, RecordInfo};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;

/// A live block of a record, by its whole name.
pub(crate) struct Named {
    pub(crate) key: BlockKey,
    pub(crate) print: BlockFingerprint,
    pub(crate) at: Location,
    pub(crate) record: RecordInfo,
}

impl Reads {
    /// The segments of the shard in the order of their numbers, from this one on.
    pub(crate) fn segments_from(&self, number: u32) -> Vec<Rc<Segment>> {
        self.volume.segments.borrow().range(number..).map(|(_, segment)| Rc::clone(segment)).collect()
    }

    /// The records that a segment lists. What is written to it meanwhile may be missing.
    pub(crate) async fn listing(&self, segment: &Rc<Segment>) -> Result<Vec<Entry>, Reason> {
        {
            let tail = segment.tail.borrow();
            if let Some(listed) = &tail.sealing {
                return Ok(listed.records.clone());
            }
            if !tail.entries.is_empty() || segment.state.get() == SegmentState::Free {
                return Ok(tail.entries.clone());
            }
        }
        let generation = segment.generation.get();
        let listed = match self.volume.read_footer(segment, Class::Background).await {
            Ok(footer) => Ok(footer.records),
            Err(_) => self.live_headers(segment).await,
        };
        // Recycled meanwhile: what it held is gone.
        if segment.generation.get() == generation { listed } else { Ok(Vec::new()) }
    }

    /// The records of a segment that the index knows, by their headers.
    async fn live_headers(&self, segment: &Segment) -> Result<Vec<Entry>, Reason> {
        let (mut cursor, mut some, mut here) = (Some(OwnerCursor::default()), Vec::new(), Vec::new());
        let shared = &self.volume.shared;
        let mut section = Section::begin(&shared.work.evictions, &*shared.clock);
        while let Some(from) = cursor {
            cursor = shared.index.records().snapshot_of((self.volume.shard as u16, None), from, &mut some);
            let records = some.iter().map(|(_, record, _)| record);
            here.extend(records.filter(|one| one.live > 0 && one.segment == segment.number).copied());
            section.step(some.len().max(1) as u64).await;
        }
        drop(section);
        let mut entries = Vec::new();
        for known in here {
            // The blocks of others cannot be read either.
            entries.extend(self.by_header(&known, Class::Background).await.map(|(_, entry)| entry));
        }
        Ok(entries)
    }

    /// A record of the shard by its header; none if that cannot be read.
    pub(crate) async fn by_header(&self, record: &RecordInfo, class: Class) -> Option<(Rc<Segment>, Entry)> {
        let segment = self.volume.segments.borrow().get(&record.segment).map(Rc::clone)?;
        let _reading = Hold::new(&segment);
        let (offset, bytes) =
            (u64::from(record.page) * PAGE_BYTES, usize::from(record.header_pages) * PAGE_BYTES as usize);
        let buf = self.volume.stage(bytes).await.ok()?;
        let buf = self.volume.driver.read_into(class, segment.file, offset, buf).await.ok()?;
        let image = buf.to_vec();
        let position = self.volume.position(&segment, offset);
        let body = record::open(&image, &position, &self.volume.shared.secret).ok()?.body().ok()?;
        let payload_bytes = u64::from(record.payload_pages) * PAGE_BYTES;
        let entry = entry(offset, 0, image.len(), payload_bytes, &body);
        Some((segment, entry))
    }

    /// The blocks of a listed record that are live there now, and what they have in common.
    pub(crate) fn live(&self, segment: &Segment, entry: &Entry) -> Option<(Arc<RecordClass>, Vec<Named>)> {
        let Content::Blocks(blocks) = &entry.content else { return None };
        let coordinate = Coordinate::from_u64(blocks.coordinate)?;
        let (index, namespace) = (&self.volume.shared.index, segment.local(blocks.namespace));
        let (mut named, mut class) = (Vec::new(), None);
        for name in &blocks.blocks {
            let key = BlockKey(name.key);
            let print = index.key().of(namespace, &key, Group(blocks.group), coordinate);
            let Some(found) =
                index.locate(print).filter(|found| self.volume.is_at(segment, entry.offset, &found.record))
            else {
                continue;
            };
            class = class.or_else(|| self.volume.shared.classes.get(found.record.class));
            named.push(Named { key, print, at: found.location, record: found.record });
        }
        class.map(|class| (class, named))
    }
}

/// The key that stands before a block of a record, if the put said so.
pub(crate) fn parent_of(blocks: &Blocks, place: usize) -> Option<BlockKey> {
    use kvarts_layout::format::body::Parent;
    let before = place.checked_sub(1).and_then(|before| blocks.blocks.get(before));
    match blocks.parent.behind(before) {
        Parent::Key(key) => Some(BlockKey(key)),
        Parent::Unknown | Parent::Root => None,
    }
}
