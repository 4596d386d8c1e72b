//! Where the chunks of a sequence of blocks lie in the caller's memory: the destination of a read, the source of
//! a write.
//!
//! Every form that engines use is the same line of arithmetic: part `p` of the block with ordinal `i` lies at
//! `base(p) + slot(i) * stride(p)` of a memory. Contiguous layer buffers, whole blocks and paged pools differ
//! only in bases, strides and whether there is a slot list. A memory is a number that the caller gives a meaning;
//! its address zero must be aligned as strictly as the reads that land in it.
//!
//! A part may be without a place: a plan that wants it is refused.
//!
//! No two chunks of a placement overlap: it is checked when it is made, so that no plan has to.

use super::PlanError;
use crate::shape::BlockShape;
use std::fmt;
use std::ops::Range;

/// The most blocks one placement may be for.
pub const MAX_PLACED_BLOCKS: u32 = 1 << 24;

/// The most chunks whose places are compared one by one, where slots lie closer than a chunk is long.
const MAX_SCATTERED_CHUNKS: usize = 1 << 17;

/// A memory of the caller: a registered arena, a pool, a device allocation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct MemoryId(pub u32);

/// A place in a memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address {
    /// The memory.
    pub memory: MemoryId,
    /// Bytes from its start.
    pub offset: u64,
}

/// Where the chunks of one part lie: slot `s` at `base + s * stride`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PartTarget {
    /// The memory.
    pub memory: MemoryId,
    /// Offset of slot zero.
    pub base: u64,
    /// Distance between slots, at least the bytes of a chunk.
    pub stride: u64,
}

/// The part of a memory that a placement touches: the caller compares it with what it has allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemorySpan {
    /// The memory.
    pub memory: MemoryId,
    /// First byte.
    pub start: u64,
    /// The offset after the last byte.
    pub end: u64,
}

/// A part of the shape: the bytes of its chunks, and where they lie if they have a place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PlacedPart {
    pub(super) bytes: u64,
    target: Option<PartTarget>,
}

/// A part's target with the bytes of its chunks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Placed {
    pub(super) target: PartTarget,
    pub(super) bytes: u64,
}

/// Non-overlapping places in memory for the chunks of blocks with ordinals `0 .. blocks`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placement {
    /// In canonical (layer, part) order.
    parts: Vec<PlacedPart>,
    /// The slot of each ordinal; without it an ordinal is its own slot.
    slots: Option<Vec<u32>>,
    blocks: u32,
    spans: Vec<MemorySpan>,
}

impl Placement {
    /// A paged pool: one target for each part of a block in canonical order (or none, where no read or write uses
    /// the part), one slot for each block. Separate K and V pools are two parts with two bases; a fused pool is one.
    /// Blocks that lie anywhere are in slots of a stride that divides all distances, one byte at worst: it may be less than
    /// a chunk where no two chunks of the slots in use meet.
    pub fn paged<T: Copy + Into<Option<PartTarget>>>(
        shape: &BlockShape,
        targets: &[T],
        slots: Vec<u32>,
    ) -> Result<Self, PlacementError> {
        Self::with_targets(shape, targets, Some(slots), 0)
    }

    /// The block with ordinal `i` in slot `i` of every target.
    pub fn strided<T: Copy + Into<Option<PartTarget>>>(
        shape: &BlockShape,
        targets: &[T],
        blocks: u32,
    ) -> Result<Self, PlacementError> {
        Self::with_targets(shape, targets, None, blocks)
    }

    /// One contiguous buffer for each layer, `[part][block]` inside without padding. `buffer` says where the
    /// buffer of a layer starts, if it has one; it is asked once for each layer index, in order.
    pub fn layer_buffers<A: Into<Option<Address>>>(
        shape: &BlockShape,
        blocks: u32,
        mut buffer: impl FnMut(u32) -> A,
    ) -> Result<Self, PlacementError> {
        let mut parts = Vec::new();
        for (index, layer) in (0u32..).zip(shape.layers()) {
            let Some(Address { memory, offset }) = buffer(index).into() else {
                parts
                    .extend(layer.chunks.iter().map(|chunk| PlacedPart { bytes: chunk.bytes, target: None }));
                continue;
            };
            let mut base = offset;
            for chunk in &layer.chunks {
                let target = PartTarget { memory, base, stride: chunk.bytes };
                parts.push(PlacedPart { bytes: chunk.bytes, target: Some(target) });
                let bytes = chunk.bytes.checked_mul(u64::from(blocks)).ok_or(PlacementError::Overflow)?;
                base = base.checked_add(bytes).ok_or(PlacementError::Overflow)?;
            }
        }
        Self::build(parts, None, blocks)
    }

    /// Whole blocks one after the other in canonical (layer, part) order, without padding.
    pub fn canonical_blocks(shape: &BlockShape, blocks: u32, at: Address) -> Result<Self, PlacementError> {
        let mut parts = Vec::new();
        let mut base = at.offset;
        for chunk in shape.layers().iter().flat_map(|layer| &layer.chunks) {
            let target = PartTarget { memory: at.memory, base, stride: shape.block_bytes() };
            parts.push(PlacedPart { bytes: chunk.bytes, target: Some(target) });
            base = base.checked_add(chunk.bytes).ok_or(PlacementError::Overflow)?;
        }
        Self::build(parts, None, blocks)
    }

    /// The places of some of the blocks: ordinal `i` of the result lies where `ordinals[i]` lies here. An ordinal
    /// that has no place, or stands twice, is refused.
    pub fn select(&self, ordinals: &[u32]) -> Result<Self, PlacementError> {
        let slot = |&ordinal: &u32| self.slot(ordinal).ok_or(PlacementError::Blocks);
        let slots = ordinals.iter().map(slot).collect::<Result<Vec<_>, _>>()?;
        Self::build(self.parts.clone(), Some(slots), 0)
    }

    fn with_targets<T: Copy + Into<Option<PartTarget>>>(
        shape: &BlockShape,
        targets: &[T],
        slots: Option<Vec<u32>>,
        blocks: u32,
    ) -> Result<Self, PlacementError> {
        let chunks = shape.layers().iter().flat_map(|layer| &layer.chunks);
        let parts = chunks
            .zip(targets)
            .map(|(chunk, &target)| PlacedPart { bytes: chunk.bytes, target: target.into() });
        let parts = parts.collect();
        if u32::try_from(targets.len()) != Ok(shape.chunk_count()) {
            return Err(PlacementError::Parts { found: targets.len(), expected: shape.chunk_count() });
        }
        Self::build(parts, slots, blocks)
    }

    fn build(
        mut parts: Vec<PlacedPart>,
        slots: Option<Vec<u32>>,
        blocks: u32,
    ) -> Result<Self, PlacementError> {
        let blocks = match &slots {
            Some(slots) => u32::try_from(slots.len()).unwrap_or(u32::MAX),
            None => blocks,
        };
        if blocks == 0 || blocks > MAX_PLACED_BLOCKS {
            return Err(PlacementError::Blocks);
        }
        let (low, high) = match &slots {
            Some(slots) => {
                let low = slots.iter().copied().min().unwrap_or(0);
                let high = slots.iter().copied().max().unwrap_or(0);
                refuse_duplicates(slots, high)?;
                (low, high)
            }
            None => (0, blocks.saturating_sub(1)),
        };
        if high == 0 {
            // One slot has no next one: its stride must not decide whether reads land directly.
            parts.iter_mut().filter_map(|part| part.target.as_mut()).for_each(|target| target.stride = 0);
        }
        let is_close = |part: &PlacedPart| part.target.is_some_and(|target| target.stride < part.bytes);
        let close = if high > 0 { parts.iter().position(is_close) } else { None };
        let spans = match (&slots, close) {
            (Some(slots), Some(part)) => check_scattered(&parts, part, slots)?,
            _ => check_disjoint(&parts, low, high)?,
        };
        Ok(Self { parts, slots, blocks, spans })
    }

    /// Blocks that have a place.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// What the placement touches of each memory, by memory.
    pub fn spans(&self) -> &[MemorySpan] {
        &self.spans
    }

    /// Where a chunk lies: `part` is its canonical index in the block (`RunLayout::layer_parts`).
    pub fn address(&self, part: u32, ordinal: u32) -> Option<Address> {
        let placed = self.part(part)?;
        Some(placed.address(self.slot(ordinal)?))
    }

    /// Where the chunks of a part lie, if they have a place. The stride says nothing where only slot zero is used.
    pub fn target(&self, part: u32) -> Option<PartTarget> {
        Some(self.part(part)?.target)
    }

    /// Whether blocks of these sizes, part by part in canonical order, are of the shape that this placement is for.
    pub(super) fn is_for(&self, sizes: impl Iterator<Item = u64>) -> bool {
        sizes.eq(self.parts.iter().map(|part| part.bytes))
    }

    /// Whether blocks of a shape can be read into these places, or written from them: as many parts of the same sizes,
    /// and a place for each part of the wanted layers.
    pub fn check(&self, shape: &BlockShape, layers: Range<u32>) -> Result<(), PlanError> {
        let chunks = (0u32..).zip(shape.layers());
        let chunks = chunks.flat_map(|(at, layer)| layer.chunks.iter().map(move |chunk| (at, chunk.bytes)));
        if !self.is_for(chunks.clone().map(|(_, bytes)| bytes)) {
            return Err(PlanError::Shape);
        }
        let unplaced = (0u32..)
            .zip(chunks)
            .zip(&self.parts)
            .find(|((_, (layer, _)), part)| layers.contains(layer) && part.target.is_none());
        unplaced.map_or(Ok(()), |((part, _), _)| Err(PlanError::Unplaced { part }))
    }

    /// The first of `count` parts from `first` on that has no place.
    pub(super) fn unplaced(&self, first: u32, count: usize) -> Option<u32> {
        (first..).take(count).find(|&part| self.part(part).is_none())
    }

    /// The slot of a block.
    pub fn slot_of(&self, ordinal: u32) -> Option<u32> {
        self.slot(ordinal)
    }

    #[inline]
    pub(super) fn part(&self, part: u32) -> Option<Placed> {
        self.parts.get(usize::try_from(part).ok()?)?.placed()
    }

    pub(super) fn part_count(&self) -> usize {
        self.parts.len()
    }

    #[inline]
    pub(super) fn slot(&self, ordinal: u32) -> Option<u32> {
        match &self.slots {
            Some(slots) => slots.get(usize::try_from(ordinal).ok()?).copied(),
            None => (ordinal < self.blocks).then_some(ordinal),
        }
    }
}

impl PlacedPart {
    #[inline]
    fn placed(&self) -> Option<Placed> {
        Some(Placed { target: self.target?, bytes: self.bytes })
    }
}

impl Placed {
    #[inline]
    pub(super) fn offset(&self, slot: u32) -> u64 {
        // `check_disjoint` has found the greatest slot's end below 2^63.
        self.target.base.saturating_add(self.target.stride.saturating_mul(u64::from(slot)))
    }

    #[inline]
    pub(super) fn address(&self, slot: u32) -> Address {
        Address { memory: self.target.memory, offset: self.offset(slot) }
    }

    /// First byte and end of all slots from `low` to `high`.
    fn reach(&self, low: u32, high: u32) -> Option<(u64, u64)> {
        let last = self.target.stride.checked_mul(u64::from(high))?.checked_add(self.target.base)?;
        let end = last.checked_add(self.bytes).filter(|&end| i64::try_from(end).is_ok())?;
        Some((self.offset(low), end))
    }
}

/// A bitmap costs less than sorting unless slots are spread very thinly.
fn refuse_duplicates(slots: &[u32], high: u32) -> Result<(), PlacementError> {
    if slots.is_sorted_by(|a, b| a < b) {
        return Ok(());
    }
    let words = usize::try_from(high / 64).unwrap_or(usize::MAX).saturating_add(1);
    if words > slots.len().saturating_mul(4).saturating_add(1024) {
        let mut sorted = slots.to_vec();
        sorted.sort_unstable();
        let doubled = sorted.windows(2).find_map(|pair| match pair {
            [a, b] if a == b => Some(*a),
            _ => None,
        });
        return doubled.map_or(Ok(()), |slot| Err(PlacementError::DuplicateSlot { slot }));
    }
    let mut seen = vec![0u64; words];
    for &slot in slots {
        let bit = 1u64 << (slot % 64);
        if let Some(word) = usize::try_from(slot / 64).ok().and_then(|at| seen.get_mut(at)) {
            if *word & bit != 0 {
                return Err(PlacementError::DuplicateSlot { slot });
            }
            *word |= bit;
        }
    }
    Ok(())
}

/// Refuses parts that overlap and returns what they touch of each memory.
///
/// Parts whose reaches are apart are disjoint. Parts whose reaches cross must have one stride and be apart within
/// it: then they interleave slot by slot and never meet. Anything else is refused without asking which slots are
/// in use, so the check costs a sort of the parts and not a look at every chunk.
fn check_disjoint(parts: &[PlacedPart], low: u32, high: u32) -> Result<Vec<MemorySpan>, PlacementError> {
    let mut reaches = Vec::with_capacity(parts.len());
    for (index, part) in (0u32..).zip(parts) {
        let Some(part) = part.placed() else { continue };
        let PartTarget { stride, .. } = part.target;
        if high > 0 && stride < part.bytes {
            return Err(PlacementError::Stride { part: index, stride, bytes: part.bytes });
        }
        let (start, end) = part.reach(low, high).ok_or(PlacementError::Overflow)?;
        reaches.push((part.target.memory, start, end, part));
    }
    reaches.sort_unstable_by_key(|&(memory, start, ..)| (memory, start));
    let mut spans: Vec<MemorySpan> = Vec::new();
    let mut crossing: Vec<Placed> = Vec::new();
    let mut crossing_end = 0u64;
    for (memory, start, end, part) in reaches {
        let same_memory = spans.last().is_some_and(|span| span.memory == memory);
        if !same_memory || start >= crossing_end {
            check_interleaved(&mut crossing)?;
            crossing_end = 0;
        }
        crossing.push(part);
        crossing_end = crossing_end.max(end);
        match spans.last_mut() {
            Some(span) if span.memory == memory => span.end = span.end.max(end),
            _ => spans.push(MemorySpan { memory, start, end }),
        }
    }
    check_interleaved(&mut crossing)?;
    Ok(spans)
}

/// Refuses chunks that overlap, one by one: for slots that are closer to each other than some chunk is long, as those of `close`
/// are.
fn check_scattered(
    parts: &[PlacedPart],
    close: usize,
    slots: &[u32],
) -> Result<Vec<MemorySpan>, PlacementError> {
    let too_close = || match parts.get(close).and_then(PlacedPart::placed) {
        Some(Placed { target, bytes }) => {
            let part = u32::try_from(close).unwrap_or(u32::MAX);
            PlacementError::Stride { part, stride: target.stride, bytes }
        }
        None => PlacementError::Overflow,
    };
    if parts.len().saturating_mul(slots.len()) > MAX_SCATTERED_CHUNKS {
        return Err(too_close());
    }
    let mut chunks = Vec::with_capacity(parts.len().saturating_mul(slots.len()));
    for part in parts.iter().filter_map(PlacedPart::placed) {
        for &slot in slots {
            let (start, end) = part.reach(slot, slot).ok_or(PlacementError::Overflow)?;
            chunks.push((part.target.memory, start, end));
        }
    }
    chunks.sort_unstable();
    let mut spans: Vec<MemorySpan> = Vec::new();
    for (memory, start, end) in chunks {
        match spans.last_mut().filter(|span| span.memory == memory) {
            Some(span) if start < span.end => return Err(too_close()),
            Some(span) => span.end = end,
            None => spans.push(MemorySpan { memory, start, end }),
        }
    }
    Ok(spans)
}

/// Refuses parts that are not of one stride and apart within it; leaves the list empty.
fn check_interleaved(parts: &mut Vec<Placed>) -> Result<(), PlacementError> {
    if let [first, _, ..] = parts.as_slice() {
        let PartTarget { memory, stride, .. } = first.target;
        let overlap = PlacementError::Overlap { memory };
        let residue = |part: &Placed| part.target.base.checked_rem(stride).ok_or(overlap);
        if parts.iter().any(|part| part.target.stride != stride) {
            return Err(overlap);
        }
        let mut within = Vec::with_capacity(parts.len().saturating_add(1));
        for part in parts.iter() {
            within.push((residue(part)?, part.bytes));
        }
        within.sort_unstable();
        if let Some(&(start, bytes)) = within.first() {
            // Slots repeat: the first part comes again one stride later.
            within.push((start.saturating_add(stride), bytes));
        }
        let apart = within.is_sorted_by(|a, b| a.0.saturating_add(a.1) <= b.0);
        if !apart {
            return Err(overlap);
        }
    }
    parts.clear();
    Ok(())
}

/// Why chunks cannot be placed in memory so.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PlacementError {
    /// No block has a place, or more than a placement may hold.
    Blocks,
    /// The number of targets is not the number of parts in a block.
    Parts {
        /// Targets given.
        found: usize,
        /// Parts in a block.
        expected: u32,
    },
    /// A stride smaller than the chunk it steps over.
    Stride {
        /// Canonical index of the part.
        part: u32,
        /// The stride.
        stride: u64,
        /// Bytes of a chunk of that part.
        bytes: u64,
    },
    /// Two blocks have the same slot.
    DuplicateSlot {
        /// The slot.
        slot: u32,
    },
    /// Two parts of one memory overlap, or interleave with different strides.
    Overlap {
        /// The memory.
        memory: MemoryId,
    },
    /// A chunk would end past 63 bits.
    Overflow,
}

impl fmt::Display for PlacementError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blocks => {
                f.write_str("the number of blocks of the placement is not valid: use 1 to 16777216")
            }
            Self::Parts { found, expected } => {
                write!(
                    f,
                    "{found} targets were given for {expected} parts: give one target for each part of \
                    a block"
                )
            }
            Self::Stride { part, stride, bytes } => {
                write!(
                    f,
                    "part {part} has chunks of {bytes} bytes, but its stride is only {stride} bytes: \
                    use a larger stride"
                )
            }
            Self::DuplicateSlot { slot } => write!(
                f,
                "two blocks have the same slot {slot}: give each block \
                its own slot"
            ),
            Self::Overlap { memory } => {
                write!(f, "two parts overlap in memory {}: move one part", memory.0)
            }
            Self::Overflow => f.write_str(
                "a part ends after the end of the memory: use a larger memory or \
                a smaller offset",
            ),
        }
    }
}

impl std::error::Error for PlacementError {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::{ChunkShape, LayerShape};
    use proptest::prelude::*;

    fn shape(layers: &[&[u64]]) -> BlockShape {
        let chunk = |&bytes: &u64| ChunkShape { bytes, align: 1 };
        let layer = |(layer, chunks): (u32, &&[u64])| LayerShape {
            layer,
            chunks: chunks.iter().map(chunk).collect(),
        };
        BlockShape::new((0u32..).zip(layers).map(layer).collect()).unwrap()
    }

    fn target(memory: u32, base: u64, stride: u64) -> PartTarget {
        PartTarget { memory: MemoryId(memory), base, stride }
    }

    fn at(memory: u32, offset: u64) -> Address {
        Address { memory: MemoryId(memory), offset }
    }

    #[test]
    fn what_nobody_wants_needs_no_place_and_what_is_wanted_does() {
        let shape = shape(&[&[10, 6], &[16]]);
        let targets = [None, None, Some(target(0, 0, 16))];
        let placement = Placement::paged(&shape, &targets, vec![2, 0]).unwrap();
        assert_eq!((placement.address(0, 0), placement.target(1)), (None, None));
        assert_eq!(placement.address(2, 0), Some(Address { memory: MemoryId(0), offset: 32 }));
        assert_eq!(placement.spans(), [MemorySpan { memory: MemoryId(0), start: 0, end: 48 }]);
        assert_eq!(placement.check(&shape, 1..2), Ok(()));
        assert_eq!(placement.check(&shape, 0..2), Err(PlanError::Unplaced { part: 0 }));
        let start = |layer| (layer == 1).then_some(Address { memory: MemoryId(0), offset: 0 });
        assert_eq!(Placement::layer_buffers(&shape, 2, start).unwrap().target(2), Some(target(0, 0, 16)));
    }

    #[test]
    fn the_forms_put_chunks_where_they_say() {
        let shape = shape(&[&[10, 3], &[7]]);
        let layers = Placement::layer_buffers(&shape, 4, |layer| at(layer, 100)).unwrap();
        assert_eq!(layers.address(0, 2), Some(at(0, 120)));
        assert_eq!(layers.address(1, 2), Some(at(0, 146)));
        assert_eq!(layers.address(2, 3), Some(at(1, 121)));
        assert_eq!(layers.address(2, 4), None);
        assert_eq!(layers.address(3, 0), None);
        let blocks = Placement::canonical_blocks(&shape, 4, at(5, 1)).unwrap();
        assert_eq!(blocks.address(2, 1), Some(at(5, 1 + 20 + 13)));
        assert_eq!(blocks.spans(), [MemorySpan { memory: MemoryId(5), start: 1, end: 81 }]);
        let targets = [target(0, 0, 16), target(0, 10, 16), target(1, 64, 8)];
        let paged = Placement::paged(&shape, &targets, vec![9, 2]).unwrap();
        assert_eq!(paged.address(1, 0), Some(at(0, 154)));
        assert_eq!(paged.address(2, 1), Some(at(1, 80)));
        assert_eq!(paged.blocks(), 2);
    }

    #[test]
    fn a_selection_lies_where_its_blocks_lay() {
        let shape = shape(&[&[10, 3], &[7]]);
        let targets = [target(0, 0, 16), target(0, 10, 16), target(1, 64, 8)];
        let paged = Placement::paged(&shape, &targets, vec![9, 2, 5]).unwrap();
        let layers = Placement::layer_buffers(&shape, 3, |layer| at(layer, 100)).unwrap();
        for whole in [paged, layers] {
            let some = whole.select(&[2, 0]).unwrap();
            assert_eq!(some.blocks(), 2);
            for part in 0..3 {
                assert_eq!(some.address(part, 0), whole.address(part, 2));
                assert_eq!(some.address(part, 1), whole.address(part, 0));
            }
            assert_eq!(whole.select(&[3]), Err(PlacementError::Blocks));
            assert_eq!(whole.select(&[]), Err(PlacementError::Blocks));
            assert!(matches!(whole.select(&[1, 1]), Err(PlacementError::DuplicateSlot { .. })));
        }
    }

    #[test]
    fn overlapping_places_are_refused() {
        let shape = shape(&[&[10, 3]]);
        let paged = |targets: &[PartTarget], slots: &[u32]| {
            Placement::paged(&shape, targets, slots.to_vec()).map(|_| ())
        };
        let overlap = Err(PlacementError::Overlap { memory: MemoryId(0) });
        assert_eq!(paged(&[target(0, 0, 16), target(0, 9, 16)], &[0, 1]), overlap);
        assert_eq!(
            paged(&[target(0, 0, 16), target(0, 14, 16)], &[0, 1]),
            overlap,
            "wraps into the next slot"
        );
        assert_eq!(paged(&[target(0, 0, 16), target(0, 10, 20)], &[0, 1]), overlap, "strides differ");
        assert_eq!(paged(&[target(0, 0, 10), target(0, 5, 16)], &[0]), overlap, "one slot");
        assert_eq!(paged(&[target(0, 0, 16), target(0, 13, 16)], &[0, 1]), Ok(()));
        assert_eq!(paged(&[target(0, 0, 16), target(1, 0, 16)], &[0, 1]), Ok(()));
        assert_eq!(
            paged(&[target(0, 0, 9), target(1, 0, 3)], &[0, 1]),
            Err(PlacementError::Stride { part: 0, stride: 9, bytes: 10 })
        );
        let pools = [target(0, 0, 10), target(1, 0, 3)];
        assert_eq!(paged(&pools, &[3, 1, 3]), Err(PlacementError::DuplicateSlot { slot: 3 }));
        let thin = [u32::MAX, 1, u32::MAX];
        assert_eq!(paged(&pools, &thin), Err(PlacementError::DuplicateSlot { slot: u32::MAX }));
        assert_eq!(paged(&pools, &[]), Err(PlacementError::Blocks));
        let one = Err(PlacementError::Parts { found: 1, expected: 2 });
        assert_eq!(paged(&[target(0, 0, 10)], &[0]), one);
        let far = [target(0, u64::MAX - 5, 10), target(1, 0, 3)];
        assert_eq!(paged(&far, &[0]), Err(PlacementError::Overflow));
        let wide = [target(0, 0, u64::MAX / 2), target(1, 0, 3)];
        assert_eq!(paged(&wide, &[3]), Err(PlacementError::Overflow));
    }

    #[test]
    fn blocks_may_lie_anywhere_as_long_as_no_two_meet() {
        let shape = shape(&[&[10, 3]]);
        let paged = |targets: &[PartTarget], slots: &[u32]| Placement::paged(&shape, targets, slots.to_vec());
        let targets = [target(0, 5, 1), target(0, 15, 1)];
        let anywhere = paged(&targets, &[100, 0, 13]).unwrap();
        assert_eq!(anywhere.address(1, 0), Some(at(0, 115)));
        assert_eq!(anywhere.address(0, 2), Some(at(0, 18)));
        assert_eq!(anywhere.spans(), [MemorySpan { memory: MemoryId(0), start: 5, end: 118 }]);
        let close = Err(PlacementError::Stride { part: 0, stride: 1, bytes: 10 });
        assert_eq!(paged(&targets, &[100, 0, 12]), close);
        let twice = Err(PlacementError::DuplicateSlot { slot: 4 });
        assert_eq!(paged(&targets, &[4, 4]), twice);
        let far = [target(0, i64::MAX as u64 - 20, 1), target(1, 0, 1)];
        assert_eq!(paged(&far, &[100, 0]), Err(PlacementError::Overflow));
        let some = anywhere.select(&[2, 0]).unwrap();
        assert_eq!((some.address(0, 0), some.address(0, 1)), (Some(at(0, 18)), Some(at(0, 105))));
        let many: Vec<u32> = (0..=MAX_SCATTERED_CHUNKS as u32 / 2).map(|slot| slot * 13).collect();
        assert_eq!(paged(&targets, &many), close, "too many to be compared");
    }

    proptest! {
        #[test]
        fn an_accepted_placement_has_no_two_chunks_in_one_place(
            sizes in prop::collection::vec(1u64..12, 1..4),
            raw in prop::collection::vec((0u32..2, 0u64..60, 0u64..40), 3),
            slots in prop::collection::vec(0u32..6, 1..5),
        ) {
            let shape = shape(&[sizes.as_slice()]);
            let targets: Vec<_> =
                raw.iter().take(sizes.len()).map(|&(memory, base, stride)| target(memory, base, stride)).collect();
            let slots_count = slots.len() as u32;
            if let Ok(placement) = Placement::paged(&shape, &targets, slots) {
                let mut taken = std::collections::BTreeSet::new();
                for (part, bytes) in (0u32..).zip(&sizes) {
                    for ordinal in 0..slots_count {
                        let place = placement.address(part, ordinal).unwrap();
                        let span = placement.spans().iter().find(|span| span.memory == place.memory).unwrap();
                        prop_assert!(span.start <= place.offset && place.offset + bytes <= span.end);
                        for byte in place.offset..place.offset + bytes {
                            prop_assert!(taken.insert((place.memory, byte)), "{place:?}");
                        }
                    }
                }
            }
        }
    }
}
