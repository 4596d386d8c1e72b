//! Encodes cold records of segments that nothing else empties: used when space is short.
//!
//! Footers name the blocks, so that what is warm is not read to find that out, and a segment is looked at again only
//! when half of the time has passed that makes blocks cold. What was read and did not pay is remembered, as long as
//! there is room to remember it, and left alone.

use std::rc::Rc;
use std::time::Duration;

use kvarts_layout::format::body::{Blocks, ENCODING_RAW};
use kvarts_layout::format::footer::{Content, Entry};
use kvarts_layout::{BlockKey, Coordinate, Group};

use super::encode::Cold;
use super::relocate::relocate;
use super::room::{live_by_segment, room};
use super::{CompactOptions, CompactReport, Pace};
use crate::engine::shard::Moves;
use crate::engine::shard::Shard;
use crate::engine::volume::Volume;
use crate::engine::volume::segment::{RecordPlace, Segment, SegmentState};
use crate::index::RecordId;
use kvarts_contract::class::Class;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;

/// Records that did not pay that a shard remembers; then it forgets them all.
const KNOWN_MAX: usize = 64 << 10;

/// Encodes what is cold in the sealed segments of a shard, the oldest first, while there is room for it.
pub(super) async fn encode(
    shard: &Rc<Shard>,
    options: &CompactOptions,
    pace: &mut Pace,
) -> Result<CompactReport, Reason> {
    let mut report = CompactReport::default();
    let Some(after) = options.encode_cold_after else { return Ok(report) };
    let cold = Cold { after: options.encode_cold_after, only: true };
    let begun = shard.volume.sequence.get();
    let live = live_by_segment(&shard.volume);
    let mut segments: Vec<_> = shard.volume.segments.borrow().values().map(Rc::clone).collect();
    segments.sort_unstable_by_key(|segment| segment.first_sequence.get());
    for segment in &segments {
        let sealed = segment.state.get() == SegmentState::Sealed && segment.first_sequence.get() < begun;
        let looked = (segment.generation.get(), shard.volume.shared.clock.now());
        if !sealed || !live.contains_key(&segment.number) || !is_due(&shard.moves, segment, looked, after) {
            continue;
        }
        if !pace.ready().await {
            break;
        }
        let mut left = room(shard, &live);
        // What cannot be read is not encoded.
        let Ok(footer) = shard.volume.read_footer(segment, Class::Background).await else { continue };
        shard.moves.looked_at.borrow_mut().insert(segment.number, looked);
        for entry in &footer.records {
            let (number, generation) = (segment.number, segment.generation.get());
            let place = RecordPlace { segment: number, generation, offset: entry.offset };
            let Some(record) = cold_record(&shard.volume, segment, entry, &cold) else { continue };
            // It becomes smaller, or is not written.
            if entry.payload_bytes + u64::from(entry.header_bytes) > left
                || shard.moves.unpaying.borrow().contains(&place)
            {
                continue;
            }
            if !pace.ready().await {
                return Ok(report);
            }
            match relocate(shard, record, &|_| true, &cold).await {
                Ok(moved) => {
                    pace.spend(moved.bytes_read + moved.bytes_written);
                    left = left.saturating_sub(moved.bytes_written);
                    if moved.records_encoded == 0 {
                        remember(&shard.moves, place);
                    }
                    report.take(moved);
                }
                Err(reason @ (Reason::Latched(_) | Reason::NoSpace(_))) => return Err(reason),
                Err(_) => report.records_failed += 1,
            }
        }
    }
    Ok(report)
}

/// Whether a segment of this generation was not looked at lately.
fn is_due(moves: &Moves, segment: &Segment, (generation, now): (u64, Nanos), after: Duration) -> bool {
    let looked_at = moves.looked_at.borrow();
    let before = looked_at.get(&segment.number).filter(|(of, _)| *of == generation);
    before.is_none_or(|(_, at)| at.plus(after / 2) <= now)
}

fn remember(moves: &Moves, place: RecordPlace) {
    let mut known = moves.unpaying.borrow_mut();
    if known.len() >= KNOWN_MAX {
        known.clear();
    }
    known.insert(place);
}

/// The index's record for an entry of a footer, if it is raw and its live blocks are cold.
fn cold_record(volume: &Volume, segment: &Segment, entry: &Entry, cold: &Cold) -> Option<RecordId> {
    let Content::Blocks(blocks) = &entry.content else { return None };
    if blocks.encoding != ENCODING_RAW {
        return None;
    }
    let mut record = None;
    for print in prints(volume, segment, blocks)? {
        let Some(here) = live_here(volume, segment, entry, print) else { continue };
        if !cold.is_cold(volume, print) {
            return None;
        }
        record = Some(here);
    }
    record
}

/// The index's record for an entry of a footer, if this block of it is live there.
pub(super) fn live_here(
    volume: &Volume,
    segment: &Segment,
    entry: &Entry,
    print: crate::index::BlockFingerprint,
) -> Option<RecordId> {
    let found = volume.shared.index.locate(print)?;
    volume.is_at(segment, entry.offset, &found.record).then_some(found.location.record)
}

/// The fingerprints of a footer entry's blocks.
pub(super) fn prints(
    volume: &Volume,
    segment: &Segment,
    blocks: &Blocks,
) -> Option<impl Iterator<Item = crate::index::BlockFingerprint>> {
    let coordinate = Coordinate::from_u64(blocks.coordinate)?;
    let (namespace, group) = (segment.local(blocks.namespace), Group(blocks.group));
    let key = volume.shared.index.key();
    Some(blocks.blocks.iter().map(move |name| key.of(namespace, &BlockKey(name.key), group, coordinate)))
}
