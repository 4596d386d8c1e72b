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

/// Headers that are read at once.
const HEADERS_AT_ONCE: usize = 32;

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
        for some in here.chunks(HEADERS_AT_ONCE) {
            // The blocks of others cannot be read either.
            let listed = self.by_headers(some, Class::Background).await;
            entries.extend(listed.into_iter().flatten().map(|(_, entry)| entry));
        }
        Ok(entries)
    }

    /// Records of the shard, by their headers, which are read at once; none for one that cannot be read.
    pub(crate) async fn by_headers(
        &self,
        records: &[RecordInfo],
        class: Class,
    ) -> Vec<Option<(Rc<Segment>, Entry)>> {
        let mut reading = Vec::with_capacity(records.len());
        for record in records {
            let segment = self.volume.segments.borrow().get(&record.segment).map(Rc::clone);
            let bytes = usize::from(record.header_pages) * PAGE_BYTES as usize;
            reading.push(match (segment, self.volume.stage(bytes).await) {
                (Some(segment), Ok(buf)) => {
                    let (hold, offset) = (Hold::new(&segment), u64::from(record.page) * PAGE_BYTES);
                    let read = self.volume.driver.read_into(class, segment.file, offset, buf);
                    Some((segment, hold, read))
                }
                _ => None,
            });
        }
        let mut listed = Vec::with_capacity(records.len());
        for (record, reading) in records.iter().zip(reading) {
            let Some((segment, hold, read)) = reading else {
                listed.push(None);
                continue;
            };
            let read = read.await;
            drop(hold);
            let image = read.map(|buf| buf.to_vec()).unwrap_or_default();
            let offset = u64::from(record.page) * PAGE_BYTES;
            let position = self.volume.position(&segment, offset);
            let opened = record::open(&image, &position, &self.volume.shared.secret);
            let body = opened.ok().and_then(|opened| opened.body().ok());
            let payload_bytes = u64::from(record.payload_pages) * PAGE_BYTES;
            listed.push(body.map(|body| {
                let entry = entry(offset, 0, image.len(), payload_bytes, &body);
                (segment, entry)
            }));
        }
        listed
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
