//! Blocks that were evicted: holes in sealed segments.
//!
//! The rule (docs/FORMAT.md): a block of a segment that was sealed is gone if a hole of the file touches its record's
//! header or any of its chunks. That is a decision, not damage. Zeros that are written are damage.

use kvarts_layout::arrange::Span;
use kvarts_layout::codec::{Encoding, StoredPlaces};
use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::format::body::{Blocks, ENCODING_RAW, layout_from_code};
use kvarts_layout::{Coordinate, Geometry, Group, RunLayout};

/// What of a file is not there: (offset, bytes), in order and apart.
pub type Holes = [(u64, u64)];

/// Whether any hole touches a range.
pub fn touched(holes: &Holes, at: u64, len: u64) -> bool {
    let first = holes.partition_point(|(start, bytes)| start.saturating_add(*bytes) <= at);
    len > 0 && holes.get(first).is_some_and(|(start, _)| *start < at.saturating_add(len))
}

/// Where the hole ends that takes part of the page at `at`, in whole pages; `None` if none does.
pub fn hole_end(holes: &Holes, at: u64) -> Option<u64> {
    let first = holes.partition_point(|(start, bytes)| start.saturating_add(*bytes) <= at);
    let (start, bytes) = holes.get(first).filter(|(start, _)| *start < at.saturating_add(PAGE_BYTES))?;
    start.checked_add(*bytes)?.checked_next_multiple_of(PAGE_BYTES)
}

/// Bytes of a range that are holes.
pub fn inside(holes: &Holes, at: u64, len: u64) -> u64 {
    let end = at.saturating_add(len);
    let part = |(start, bytes): &(u64, u64)| {
        let to = start.saturating_add(*bytes).min(end);
        to.saturating_sub((*start).max(at))
    };
    holes.iter().map(part).fold(0, u64::saturating_add)
}

/// Where a chunk lies in its record's payload.
fn chunk(layout: &RunLayout, stored: Option<&StoredPlaces>, block: u32, part: u32) -> Option<Span> {
    match stored {
        Some(stored) => stored.chunk(block, part),
        None => {
            let place = layout.parts().get(part as usize)?;
            let step = place.step.checked_mul(u64::from(block))?;
            Some(Span { offset: place.offset.checked_add(step)?, len: place.bytes })
        }
    }
}

/// Which blocks of a record holes have taken; empty if none. A record that this program cannot lay out is gone as a
/// whole with its first hole.
pub fn gone(
    (offset, header_bytes, payload_bytes): (u64, u32, u64),
    blocks: &Blocks,
    (geometry, block_tokens): (&Geometry, u32),
    holes: &Holes,
) -> Vec<bool> {
    let payload = offset.saturating_add(u64::from(header_bytes));
    let count = blocks.blocks.len();
    if touched(holes, offset, u64::from(header_bytes)) {
        return vec![true; count];
    }
    if !touched(holes, payload, payload_bytes.next_multiple_of(PAGE_BYTES)) {
        return Vec::new();
    }
    let layout = || {
        let coordinate = Coordinate::from_u64(blocks.coordinate)?;
        let shape = geometry.shape(Group(blocks.group), coordinate, block_tokens).ok()?;
        let count = u32::try_from(count).ok()?;
        RunLayout::new(layout_from_code(blocks.layout)?, blocks.layout_version, &shape, count).ok()
    };
    let Some(layout) = layout() else { return vec![true; count] };
    let stored = match blocks.encoding {
        ENCODING_RAW => None,
        _ => match StoredPlaces::new(&layout, &blocks.stored_lengths) {
            Some(stored) if Encoding::from_code(blocks.encoding).is_some() => Some(stored),
            _ => return vec![true; count],
        },
    };
    let is_gone = |block: u32| {
        (0..layout.chunk_count()).any(|part| match chunk(&layout, stored.as_ref(), block, part) {
            Some(span) => touched(holes, payload.saturating_add(span.offset), span.len),
            None => true,
        })
    };
    (0u32..).take(count).map(is_gone).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_touch_and_overlap_by_what_they_share() {
        let holes = [(10, 10), (30, 5)];
        assert!(touched(&holes, 19, 1) && touched(&holes, 0, 11) && touched(&holes, 34, 100));
        assert!(!touched(&holes, 20, 10) && !touched(&holes, 12, 0) && !touched(&[], 0, 9));
        assert_eq!((inside(&holes, 0, 100), inside(&holes, 15, 17), inside(&holes, 20, 10)), (15, 7, 0));
    }
}
