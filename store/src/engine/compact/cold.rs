//! Encodes cold records of segments that nothing else empties: used when space is short.
//!
//! Footers name the blocks, so that what is warm is not read to find that out, and a segment is looked at again only
//! when half of the time has passed that makes blocks cold. What was read and did not pay is remembered, as long as
//! there is room to remember it, and left alone.

use std::rc::Rc;
use std::time::Duration;

use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::format::body::{Blocks, ENCODING_RAW};
use kvarts_layout::format::footer::{Content, Entry};
use kvarts_layout::{BlockKey, Coordinate, Group};

use super::encode::Cold;
use super::relocate::relocate;
use super::segments::{live_by_segment, room};
use super::{CompactOptions, CompactReport, Pace};
use crate::engine::volume::segment::{Segment, SegmentState};
use crate::engine::write::log::Log;
use crate::error::Reason;
use crate::index::RecordId;
use crate::rt::Nanos;

/// Records that did not pay that a shard remembers; then it forgets them all.
const KNOWN_MAX: usize = 64 << 10;

/// A record's segment, the generation of that, and the record's offset.
pub(crate) type Place = (u32, u64, u64);

/// Encodes what is cold in the sealed segments of a shard, the oldest first, while there is room for it.
pub(super) async fn encode(
    log: &Rc<Log>,
    options: &CompactOptions,
    pace: &mut Pace,
) -> Result<CompactReport, Reason> {
    let mut report = CompactReport::default();
    let Some(after) = options.encode_cold_after else { return Ok(report) };
    let cold = Cold { after: options.encode_cold_after, only: true };
    let begun = log.sequence.get();
    let live = live_by_segment(log);
    let mut segments: Vec<_> = log.segments.borrow().values().map(Rc::clone).collect();
    segments.sort_unstable_by_key(|segment| segment.first_sequence.get());
    for segment in &segments {
        let sealed = segment.state.get() == SegmentState::Sealed && segment.first_sequence.get() < begun;
        let looked = (segment.generation.get(), log.shared.clock.now());
        if !sealed || !live.contains_key(&segment.number) || !is_due(log, segment, looked, after) {
            continue;
        }
        if !pace.ready().await {
            break;
        }
        let mut left = room(log, &live);
        // What cannot be read is not encoded.
        let Ok(footer) = log.read_footer(segment).await else { continue };
        log.looked_at.borrow_mut().insert(segment.number, looked);
        for entry in &footer.records {
            let place = (segment.number, looked.0, entry.offset);
            let Some(record) = cold_record(log, segment, entry, &cold) else { continue };
            // It becomes smaller, or is not written.
            if entry.payload_bytes + u64::from(entry.header_bytes) > left
                || log.unpaying.borrow().contains(&place)
            {
                continue;
            }
            if !pace.ready().await {
                return Ok(report);
            }
            match relocate(log, record, &|_| true, &cold).await {
                Ok(moved) => {
                    pace.spend(moved.bytes_read + moved.bytes_written);
                    left = left.saturating_sub(moved.bytes_written);
                    if moved.records_encoded == 0 {
                        remember(log, place);
                    }
                    report.take(moved);
                }
                Err(reason @ (Reason::Latched(_) | Reason::NoSpace)) => return Err(reason),
                Err(_) => report.records_failed += 1,
            }
        }
    }
    Ok(report)
}

/// Whether a segment of this generation was not looked at lately.
fn is_due(log: &Log, segment: &Segment, (generation, now): (u64, Nanos), after: Duration) -> bool {
    let looked_at = log.looked_at.borrow();
    let before = looked_at.get(&segment.number).filter(|(of, _)| *of == generation);
    before.is_none_or(|(_, at)| at.plus(after / 2) <= now)
}

fn remember(log: &Log, place: Place) {
    let mut known = log.unpaying.borrow_mut();
    if known.len() >= KNOWN_MAX {
        known.clear();
    }
    known.insert(place);
}

/// The index's record for an entry of a footer, if it is raw and its live blocks are cold.
fn cold_record(log: &Log, segment: &Segment, entry: &Entry, cold: &Cold) -> Option<RecordId> {
    let Content::Blocks(blocks) = &entry.content else { return None };
    if blocks.encoding != ENCODING_RAW {
        return None;
    }
    let mut record = None;
    for print in prints(log, segment, blocks)? {
        let Some(here) = live_here(log, segment, entry, print) else { continue };
        if !cold.is_cold(log, print) {
            return None;
        }
        record = Some(here);
    }
    record
}

/// The index's record for an entry of a footer, if this block of it is live there.
pub(super) fn live_here(
    log: &Log,
    segment: &Segment,
    entry: &Entry,
    print: crate::index::BlockFingerprint,
) -> Option<RecordId> {
    let found = log.shared.index.locate(print)?;
    let here = u32::from(found.record.shard) == log.shard
        && found.record.segment == segment.number
        && u64::from(found.record.page) * PAGE_BYTES == entry.offset;
    here.then_some(found.location.record)
}

/// The fingerprints of a footer entry's blocks.
pub(super) fn prints(
    log: &Log,
    segment: &Segment,
    blocks: &Blocks,
) -> Option<impl Iterator<Item = crate::index::BlockFingerprint>> {
    let coordinate = Coordinate::from_u64(blocks.coordinate)?;
    let (namespace, group) = (segment.local(blocks.namespace), Group(blocks.group));
    let key = log.shared.index.key();
    Some(blocks.blocks.iter().map(move |name| key.of(namespace, &BlockKey(name.key), group, coordinate)))
}
