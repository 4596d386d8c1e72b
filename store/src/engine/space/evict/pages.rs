//! Which pages of a record are not needed any more, and which blocks a hole has taken.
//!
//! One rule, for the engine, recovery and the checker alike (docs/FORMAT.md): a block is gone if a hole touches its
//! record's header or any of its chunks. So the pages of a block may be given back in one go, in any order, and a
//! power cut in the middle leaves it here or gone, never half.

use std::ops::Range;

use kvarts_layout::arrange::{RunLayout, Span};
use kvarts_layout::codec::StoredPlaces;
use kvarts_layout::format::{PAGE_BYTES, page_align};

/// Ranges of a file, in order and apart: (offset, bytes).
pub(crate) type Holes = [(u64, u64)];

/// Where a record lies, and its chunks in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lying<'a> {
    pub(crate) offset: u64,
    pub(crate) header_bytes: u64,
    pub(crate) payload_bytes: u64,
    pub(crate) layout: &'a RunLayout,
    /// Of an encoded record.
    pub(crate) stored: Option<&'a StoredPlaces>,
}

impl Lying<'_> {
    fn payload_at(&self) -> u64 {
        self.offset + self.header_bytes
    }

    pub(crate) fn range(&self) -> Range<u64> {
        self.offset..self.payload_at() + page_align(self.payload_bytes).unwrap_or(self.payload_bytes)
    }

    /// Where the chunks of a block lie in the file.
    fn chunks(&self, block: u32) -> impl Iterator<Item = Span> + '_ {
        let payload = self.payload_at();
        (0u32..).zip(self.layout.parts()).map(move |(part, place)| {
            let raw = Span { offset: place.offset + place.step * u64::from(block), len: place.bytes };
            let span = self.stored.map_or(Some(raw), |stored| stored.chunk(block, part)).unwrap_or(raw);
            Span { offset: payload + span.offset, len: span.len }
        })
    }

    /// Pages of the payload that a block's chunks touch, by number from the payload's first.
    fn mark(&self, block: u32, pages: &mut [bool]) {
        let payload = self.payload_at();
        for span in self.chunks(block).filter(|span| span.len > 0) {
            let first = (span.offset - payload) / PAGE_BYTES;
            let end = (span.end() - payload).div_ceil(PAGE_BYTES);
            if let Some(touched) = pages.get_mut(first as usize..(end as usize).min(pages.len())) {
                touched.fill(true);
            }
        }
    }

    /// What can be given back when only the blocks for which `live` says so are needed: whole pages, in order. While
    /// any is, the header stays, and so does every page that belongs to no block; and no more is given back than the
    /// books say is not live.
    pub(crate) fn unneeded(&self, live: impl Fn(u16) -> bool) -> Vec<(u64, u64)> {
        let blocks = u16::try_from(self.layout.blocks()).unwrap_or(u16::MAX);
        let range = self.range();
        if !(0..blocks).any(&live) {
            return vec![(range.start, range.end - range.start)];
        }
        if self.stored.is_some() {
            // What is left would be less than its share of the books: stored lengths differ.
            return Vec::new();
        }
        let count = (range.end - self.payload_at()) / PAGE_BYTES;
        let (mut needed, mut dead) = (vec![false; count as usize], vec![false; count as usize]);
        for block in 0..blocks {
            self.mark(u32::from(block), if live(block) { &mut needed } else { &mut dead });
        }
        let lives = (0..blocks).filter(|block| live(*block)).count() as u64;
        let bytes = range.end - range.start;
        let share = bytes * lives / u64::from(blocks.max(1));
        // The last ones, if not all may go.
        let may_go = needed.iter().zip(&dead).filter(|(needed, dead)| !**needed && **dead).count() as u64;
        let mut stay = may_go.saturating_sub((bytes - share) / PAGE_BYTES);
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for ((page, needed), dead) in (0u64..).zip(needed).zip(dead) {
            if !needed && dead {
                if stay > 0 {
                    stay -= 1;
                    continue;
                }
                push(&mut ranges, self.payload_at() + page * PAGE_BYTES, PAGE_BYTES);
            }
        }
        ranges
    }

    /// Whether a hole has taken the block.
    pub(crate) fn is_gone(&self, block: u16, holes: &Holes) -> bool {
        touched(holes, self.offset, self.header_bytes)
            || self.chunks(u32::from(block)).any(|span| touched(holes, span.offset, span.len))
    }
}

/// Adds a range behind the others.
pub(crate) fn push(ranges: &mut Vec<(u64, u64)>, at: u64, len: u64) {
    match ranges.last_mut() {
        Some((start, before)) if *start + *before == at => *before += len,
        _ => ranges.push((at, len)),
    }
}

/// Whether any hole touches a range.
pub(crate) fn touched(holes: &Holes, at: u64, len: u64) -> bool {
    let first = holes.partition_point(|(start, bytes)| start + bytes <= at);
    len > 0 && holes.get(first).is_some_and(|(start, _)| *start < at + len)
}

/// Where the hole ends that takes part of the page at `at`, in whole pages; `None` if none does.
pub(crate) fn hole_end(holes: &Holes, at: u64) -> Option<u64> {
    let first = holes.partition_point(|(start, bytes)| start + bytes <= at);
    let (start, bytes) = holes.get(first).filter(|(start, _)| *start < at + PAGE_BYTES)?;
    Some((start + bytes).next_multiple_of(PAGE_BYTES))
}

/// Bytes of a range that are holes.
pub(crate) fn inside(holes: &Holes, at: u64, len: u64) -> u64 {
    let first = holes.partition_point(|(start, bytes)| start + bytes <= at);
    let some = holes.iter().skip(first).take_while(|(start, _)| *start < at + len);
    some.map(|(start, bytes)| (start + bytes).min(at + len) - (*start).max(at)).sum()
}

/// What of these ranges is no hole yet.
pub(crate) fn without(ranges: &[(u64, u64)], holes: &Holes) -> Vec<(u64, u64)> {
    let mut left = Vec::new();
    for &(start, len) in ranges {
        let (mut at, end) = (start, start + len);
        let first = holes.partition_point(|(start, bytes)| start + bytes <= at);
        for (hole, bytes) in holes.iter().skip(first).take_while(|(hole, _)| *hole < end) {
            if *hole > at {
                push(&mut left, at, hole - at);
            }
            at = at.max(hole + bytes);
        }
        if at < end {
            push(&mut left, at, end - at);
        }
    }
    left
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
