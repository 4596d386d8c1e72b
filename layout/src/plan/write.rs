//! The write plan: the pieces that make up a payload, in file order.
//!
//! Consecutive chunks that are contiguous in memory too become one piece, gaps between chunks and the tail of the
//! last page become zeros. The pieces cover the payload image exactly once, so writing them one after the other
//! writes the record; where every piece is aligned the device can take them as they lie, without a copy.

use super::PlanError;
use super::placement::{Address, Placement};
use crate::arrange::RunLayout;
use crate::shape::Layout;

/// Where the bytes of a piece come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteSource {
    /// The caller's memory.
    Memory(Address),
    /// Nowhere: the bytes are zero.
    Zeros,
}

/// A range of a payload and its source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WritePiece {
    /// First byte in the payload.
    pub payload_offset: u64,
    /// Bytes, never zero.
    pub len: u64,
    /// Where they come from.
    pub source: WriteSource,
}

/// What a write consists of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WriteSummary {
    /// Number of pieces.
    pub pieces: u64,
    /// Bytes of padding among them.
    pub zero_bytes: u64,
    /// The pieces can be handed to a vectored direct write as they lie: every length and address is aligned.
    /// Otherwise the image has to be put together in a staging buffer first.
    pub vectored: bool,
}

/// The pieces of one payload, in file order and covering it exactly once: an iterator, and cheap to copy.
#[derive(Clone, Debug)]
pub struct WritePlan<'a> {
    layout: &'a RunLayout,
    sources: &'a Placement,
    ordinal: u32,
    /// The next chunk: canonical index of the part, and block.
    part: u32,
    block: u32,
    /// Payload bytes that have been put into pieces.
    done: u64,
    /// A piece that the next chunk may still extend.
    held: Option<WritePiece>,
}

impl<'a> WritePlan<'a> {
    /// A plan that takes the run's blocks from `sources`, where the first of them has `ordinal`.
    pub fn new(layout: &'a RunLayout, sources: &'a Placement, ordinal: u32) -> Result<Self, PlanError> {
        let sizes = layout.parts().iter().map(|part| part.bytes);
        if !sources.is_for(sizes) {
            return Err(PlanError::Shape);
        }
        if let Some(part) = sources.unplaced(0, sources.part_count()) {
            return Err(PlanError::Unplaced { part });
        }
        let needed = ordinal.checked_add(layout.blocks()).ok_or(PlanError::TooLarge)?;
        if needed > sources.blocks() {
            return Err(PlanError::Placement { needed, available: sources.blocks() });
        }
        Ok(Self { layout, sources, ordinal, part: 0, block: 0, done: 0, held: None })
    }

    /// Counts the pieces that are left and says whether a device that wants `align` can take them as they lie.
    pub fn summary(&self, align: u32) -> WriteSummary {
        let mask = u64::from(align.saturating_sub(1));
        let mut summary = WriteSummary { pieces: 0, zero_bytes: 0, vectored: true };
        for piece in self.clone() {
            summary.pieces = summary.pieces.saturating_add(1);
            let mut bits = piece.len;
            match piece.source {
                WriteSource::Zeros => summary.zero_bytes = summary.zero_bytes.saturating_add(piece.len),
                WriteSource::Memory(address) => bits |= address.offset,
            }
            summary.vectored &= bits & mask == 0;
        }
        summary
    }

    /// The next chunk in file order, as a piece.
    fn next_chunk(&mut self) -> Option<WritePiece> {
        let (part, block) = (self.part, self.block);
        let place = self.layout.parts().get(usize::try_from(part).ok()?)?;
        if block >= self.layout.blocks() {
            return None;
        }
        let ordinal = self.ordinal.saturating_add(block);
        let address = self.sources.address(part, ordinal)?;
        (self.part, self.block) = match self.layout.layout() {
            Layout::LayerBlock => step(part, block, self.layout.blocks()),
            Layout::FullBlock => {
                let (block, part) = step(block, part, self.layout.chunk_count());
                (part, block)
            }
        };
        Some(WritePiece {
            payload_offset: place.start(block),
            len: place.bytes,
            source: WriteSource::Memory(address),
        })
    }
}

/// Counts `inner` up to `limit` and carries into `outer`.
fn step(outer: u32, inner: u32, limit: u32) -> (u32, u32) {
    let next = inner.saturating_add(1);
    if next < limit { (outer, next) } else { (outer.saturating_add(1), 0) }
}

impl WritePiece {
    /// Whether `next` continues this piece in the payload and in memory.
    fn continues_with(&self, next: &Self) -> bool {
        match (self.source, next.source) {
            (WriteSource::Memory(this), WriteSource::Memory(that)) => {
                this.memory == that.memory
                    && self.payload_offset.saturating_add(self.len) == next.payload_offset
                    && this.offset.saturating_add(self.len) == that.offset
            }
            _ => false,
        }
    }
}

impl Iterator for WritePlan<'_> {
    type Item = WritePiece;

    fn next(&mut self) -> Option<WritePiece> {
        let image = self.layout.image_bytes();
        let mut current = match self.held.take() {
            Some(held) => held,
            None => match self.next_chunk() {
                Some(chunk) => chunk,
                // Nothing but the last page's tail is left.
                None => WritePiece { payload_offset: image, len: 0, source: WriteSource::Zeros },
            },
        };
        let gap = current.payload_offset.saturating_sub(self.done);
        if gap > 0 {
            let zeros = WritePiece { payload_offset: self.done, len: gap, source: WriteSource::Zeros };
            self.done = current.payload_offset;
            self.held = (current.len > 0).then_some(current);
            return Some(zeros);
        }
        if current.len == 0 {
            return None;
        }
        while let Some(next) = self.next_chunk() {
            if !current.continues_with(&next) {
                self.held = Some(next);
                break;
            }
            current.len = current.len.saturating_add(next.len);
        }
        self.done = self.done.saturating_add(current.len);
        Some(current)
    }
}
