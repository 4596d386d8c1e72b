//! The places of a request's blocks in the caller's memory.
//!
//! The same description is a source of puts and a destination of reads. It is checked when it is created: after that, every chunk has its
//! place inside the given memory, and no two chunks share a byte.

use std::any::Any;
use std::sync::Arc;

use kvarts_layout::BlockShape;
use kvarts_layout::plan::{
    Address, MemoryId, Order, PartTarget, Placement, PlacementError, Tile, WritePiece, WriteSource,
};

use super::{Digests, StepGate};
use crate::buffers::region::PAGE;
use crate::buffers::{BufMut, SharedBuf};
use crate::error::Reason;

/// Blocks of one shape and their places in memory. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Placed {
    memory: Arc<[Memory]>,
    places: Arc<Placement>,
    /// Set where layers may share memory: then only one after the other is in it.
    gate: Option<StepGate>,
    /// Where the digests of what is read are left, for a caller that verifies it.
    digests: Option<Digests>,
}

/// One memory of a placement. Plans count its offsets from the page boundary at or before its first byte, so
/// that what looks aligned to them is.
#[derive(Clone, Debug)]
struct Memory {
    buf: SharedBuf,
    /// Bytes from that boundary to the first byte.
    shift: u64,
}

impl Placed {
    /// A paged pool of an engine. For each chunk of the shape in canonical (layer, part) order, `targets` gives the memory, the offset of
    /// slot zero and the distance between slots; `slots` gives a slot for each block. K and V may be separate or fused, and pages may lie
    /// anywhere in the memories. A read needs a target for the chunks of its layers, a put for all chunks.
    pub fn paged<T: Copy + Into<Option<PartTarget>>>(
        shape: &BlockShape,
        memory: Vec<SharedBuf>,
        targets: &[T],
        slots: Vec<u32>,
    ) -> Result<Self, Reason> {
        let memory = shifted(memory)?;
        let targets = targets
            .iter()
            .map(|&target| {
                let Some(target) = target.into() else { return Ok(None) };
                let shift = memory.get(target.memory.0 as usize).ok_or(Reason::OutOfBounds)?.shift;
                let base = target.base.checked_add(shift).ok_or(Reason::OutOfBounds)?;
                Ok(Some(PartTarget { base, ..target }))
            })
            .collect::<Result<Vec<_>, Reason>>()?;
        Self::checked(memory, Placement::paged(shape, &targets, slots))
    }

    /// Whole blocks, one after the other in `pages`, each with its chunks in canonical order without padding.
    pub fn blocks(shape: &BlockShape, pages: impl Into<SharedBuf>, blocks: u32) -> Result<Self, Reason> {
        let pages = pages.into();
        let wanted = shape.block_bytes().saturating_mul(u64::from(blocks));
        expect_len(&pages, wanted)?;
        let memory = shifted(vec![pages])?;
        let offset = memory.first().map_or(0, |memory| memory.shift);
        let start = Address { memory: MemoryId(0), offset };
        Self::checked(memory, Placement::canonical_blocks(shape, blocks, start))
    }

    /// Whole blocks, each in a separate memory of exactly its size, with its chunks in canonical order without padding. The memories may
    /// lie anywhere. One placement covers memories of one region that share no byte, within the range of slot numbers; the call therefore
    /// returns one or more placements, each with the indexes in `pages` of its blocks.
    pub fn scattered(shape: &BlockShape, pages: &[SharedBuf]) -> Result<Vec<(Vec<u32>, Self)>, Reason> {
        for page in pages {
            expect_len(page, shape.block_bytes())?;
        }
        let mut order: Vec<u32> = (0..pages.len() as u32).collect();
        let place = |at: &u32| pages.get(*at as usize).map(|page| (page.region().id(), page.offset()));
        order.sort_unstable_by_key(place);
        let mut found = Vec::new();
        for of_region in order.chunk_by(|a, b| place(a).map(|(id, _)| id) == place(b).map(|(id, _)| id)) {
            let mut left = of_region.to_vec();
            while !left.is_empty() {
                // One behind the other; what meets one of these comes with the next.
                let (mut apart, mut others, mut end) = (Vec::new(), Vec::new(), 0);
                for at in left {
                    let Some(page) = pages.get(at as usize) else { continue };
                    if page.offset() < end {
                        others.push(at);
                    } else {
                        end = page.offset() + page.len();
                        apart.push(at);
                    }
                }
                let mut rest = apart.as_slice();
                while let Some((placed, count)) = Self::scattered_some(shape, pages, rest)? {
                    let (some, later) = rest.split_at(count);
                    found.push((some.to_vec(), placed));
                    rest = later;
                }
                left = others;
            }
        }
        Ok(found)
    }

    /// The first of `order`, which are of one region and go upwards, as many as one placement can be for.
    fn scattered_some(
        shape: &BlockShape,
        pages: &[SharedBuf],
        order: &[u32],
    ) -> Result<Option<(Self, usize)>, Reason> {
        let page = |at: &u32| pages.get(*at as usize);
        let Some(first) = order.first().and_then(page) else { return Ok(None) };
        let (bytes, mut step) = (shape.block_bytes(), 0);
        let mut reach = (1, first.len());
        for (count, at) in (1..).zip(order) {
            let Some(found) = page(at) else { return Err(Reason::OutOfBounds) };
            let distance = found.offset() - first.offset();
            let common = greatest_divisor(step, distance as u64);
            if common > 0 && distance as u64 / common > u64::from(u32::MAX) {
                break;
            }
            (step, reach) = (common, (count, distance + found.len()));
        }
        let (count, bytes_all) = reach;
        let whole = SharedBuf::new(first.region(), first.offset(), bytes_all).ok_or(Reason::OutOfBounds)?;
        let stride = if step == 0 { bytes } else { step };
        let slot = |at: &u32| {
            let distance = page(at).map_or(0, |page| (page.offset() - first.offset()) as u64);
            (distance / stride) as u32
        };
        let slots = order.iter().take(count).map(slot).collect();
        let mut base = 0;
        let targets = shape.layers().iter().flat_map(|layer| &layer.chunks).map(|chunk| {
            let target = PartTarget { memory: MemoryId(0), base, stride };
            base += chunk.bytes;
            target
        });
        let targets: Vec<_> = targets.collect();
        Ok(Some((Self::paged(shape, vec![whole], &targets, slots)?, count)))
    }

    /// The same places. Their memory keeps `keeper` alive until its last user is gone, including operations in progress. Existing keepers
    /// are released first.
    #[must_use]
    pub fn kept_by(self, keeper: &Arc<dyn Any + Send + Sync>) -> Self {
        let keep = |Memory { buf, shift }: &Memory| Memory {
            buf: buf.clone().also_kept_by(Arc::clone(keeper)),
            shift: *shift,
        };
        Self { memory: self.memory.iter().map(keep).collect(), ..self }
    }

    /// A tile of a read, in memory of exactly its size. Blocks count from zero.
    pub fn tile(
        order: Order,
        shape: &BlockShape,
        tile: &Tile,
        memory: impl Into<SharedBuf>,
    ) -> Result<Self, Reason> {
        let memory = memory.into();
        expect_len(&memory, tile.bytes(shape))?;
        let start = Address { memory: MemoryId(0), offset: shift_of(&memory) };
        let targets = tile.targets(order, shape, start);
        Self::checked(unchecked(vec![memory]), Placement::strided(shape, &targets, tile.block_count()))
    }

    /// One buffer for each layer of the shape that has a buffer, with the layout `[part][block]` and no padding.
    pub fn layers<B: Into<Option<SharedBuf>>>(
        shape: &BlockShape,
        layers: Vec<B>,
        blocks: u32,
    ) -> Result<Self, Reason> {
        Self::layer_buffers(shape, layers, blocks, shifted)
    }

    /// As [`Placed::layers`], but buffers of different layers may share bytes. Only for puts by layers
    /// ([`KvStore::put_layers`](super::KvStore::put_layers)): the store reads a layer when it is offered, which opens the gate
    /// (`StepGate::new(0)`) for the layer. If the store may refuse the put, give each layer separate memory, so that the blocks can be put
    /// whole.
    pub fn gated_layers<B: Into<Option<SharedBuf>>>(
        shape: &BlockShape,
        layers: Vec<B>,
        blocks: u32,
        gate: StepGate,
    ) -> Result<Self, Reason> {
        let placed = Self::layer_buffers(shape, layers, blocks, |layers| Ok(unchecked(layers)))?;
        Ok(Self { gate: Some(gate), ..placed })
    }

    fn layer_buffers<B: Into<Option<SharedBuf>>>(
        shape: &BlockShape,
        layers: Vec<B>,
        blocks: u32,
        memories: impl FnOnce(Vec<SharedBuf>) -> Result<Vec<Memory>, Reason>,
    ) -> Result<Self, Reason> {
        if layers.len() != shape.layers().len() {
            return Err(Reason::Length { expected: shape.layers().len() as u64, found: layers.len() as u64 });
        }
        let (mut starts, mut buffers) = (Vec::with_capacity(layers.len()), Vec::new());
        for (layer, buf) in shape.layers().iter().zip(layers) {
            let Some(buf) = buf.into() else {
                starts.push(None);
                continue;
            };
            expect_len(&buf, layer.bytes().saturating_mul(u64::from(blocks)))?;
            let memory = MemoryId(buffers.len() as u32);
            starts.push(Some(Address { memory, offset: shift_of(&buf) }));
            buffers.push(buf);
        }
        let start = |layer: u32| starts.get(layer as usize).copied().flatten();
        let places = Placement::layer_buffers(shape, blocks, start);
        Self::checked(memories(buffers)?, places)
    }

    fn checked(memory: Vec<Memory>, places: Result<Placement, PlacementError>) -> Result<Self, Reason> {
        let places = places.map_err(reason)?;
        for span in places.spans() {
            let memory = memory.get(span.memory.0 as usize).ok_or(Reason::OutOfBounds)?;
            let end = memory.shift.saturating_add(memory.buf.len() as u64);
            if span.start < memory.shift || span.end > end {
                return Err(Reason::OutOfBounds);
            }
        }
        Ok(Self { memory: memory.into(), places: Arc::new(places), gate: None, digests: None })
    }

    /// The places of some of the blocks: block `i` of the result has the place of block `ordinals[i]`. Fails if an ordinal has no place or
    /// occurs twice. The result has no digests, because they count by the whole.
    pub fn select(&self, ordinals: &[u32]) -> Result<Self, Reason> {
        if ordinals.iter().any(|&ordinal| ordinal >= self.block_count()) {
            return Err(Reason::OutOfBounds);
        }
        let places = Arc::new(self.places.select(ordinals).map_err(reason)?);
        Ok(Self { memory: Arc::clone(&self.memory), places, gate: self.gate.clone(), digests: None })
    }

    /// The same places with a table for digests. A read writes the digest of each chunk into it before the chunk is announced. A put takes
    /// the digests that its caller has computed from it; if the bytes have changed since, they count as damaged on disk.
    #[must_use]
    pub fn with_digests(self, digests: Digests) -> Self {
        Self { digests: Some(digests), ..self }
    }

    /// The table of digests, if there is one.
    pub fn digests(&self) -> Option<&Digests> {
        self.digests.as_ref()
    }

    /// The memories, in the given order.
    pub fn memories(&self) -> impl ExactSizeIterator<Item = &SharedBuf> {
        self.memory.iter().map(|memory| &memory.buf)
    }

    /// The places of the chunks of a part, relative to the first byte of the given memory.
    pub fn target(&self, part: u32) -> Option<PartTarget> {
        let target = self.places.target(part)?;
        let shift = self.memory.get(target.memory.0 as usize)?.shift;
        Some(PartTarget { base: target.base.checked_sub(shift)?, ..target })
    }

    /// The slot of each block.
    pub fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.block_count()).filter_map(|block| self.places.slot_of(block))
    }

    /// The gate, if layers share memory.
    pub fn gate(&self) -> Option<&StepGate> {
        self.gate.as_ref()
    }

    /// The number of blocks.
    pub fn block_count(&self) -> u32 {
        self.places.blocks()
    }

    /// The places, in the form that plans use.
    pub fn places(&self) -> &Arc<Placement> {
        &self.places
    }

    /// The memory at an address of the plan, as an owner.
    pub fn slice(&self, at: Address, len: u64) -> Option<SharedBuf> {
        let (memory, offset) = self.find(at, len)?;
        memory.slice(offset, usize::try_from(len).ok()?)
    }

    /// The same, for an immediate access: the memory, and the offset at which `len` bytes begin. It adds no owner, so executors that call
    /// it for every piece share no cache line.
    pub fn find(&self, at: Address, len: u64) -> Option<(&SharedBuf, usize)> {
        let memory = self.memory.get(at.memory.0 as usize)?;
        let offset = usize::try_from(at.offset.checked_sub(memory.shift)?).ok()?;
        let end = offset.checked_add(usize::try_from(len).ok()?)?;
        (end <= memory.buf.len()).then_some((&memory.buf, offset))
    }

    /// The chunk `part` (canonical index in the block) of the block with ordinal `block`.
    pub fn chunk(&self, part: u32, block: u32, bytes: u64) -> Option<SharedBuf> {
        self.slice(self.places.address(part, block)?, bytes)
    }

    /// Whether every memory begins on a page.
    pub fn is_page_aligned(&self) -> bool {
        self.memory.iter().all(|memory| memory.shift == 0)
    }

    /// Copies a piece of a payload to `at` in `to`. `None` if the piece has no place there or here.
    pub fn fill(&self, piece: &WritePiece, to: &mut BufMut, at: usize) -> Option<()> {
        let len = usize::try_from(piece.len).ok()?;
        if at.checked_add(len)? > to.len() {
            return None;
        }
        match piece.source {
            WriteSource::Memory(address) => to.copy_from(at, &self.slice(address, piece.len)?, 0, len),
            WriteSource::Zeros => to.fill_part(at, len, 0),
        }
        Some(())
    }

    /// The same places without memory, which no constructor creates: for tests of stores.
    #[doc(hidden)]
    #[must_use]
    pub fn without_memory(self) -> Self {
        Self { memory: Arc::from([]), ..self }
    }
}

fn reason(error: PlacementError) -> Reason {
    match error {
        PlacementError::Overlap { .. } | PlacementError::DuplicateSlot { .. } => Reason::Overlap,
        PlacementError::Blocks => Reason::Empty,
        PlacementError::Overflow => Reason::OutOfBounds,
        PlacementError::Stride { stride, bytes, .. } => Reason::Length { expected: bytes, found: stride },
        PlacementError::Parts { found, expected } => {
            Reason::Length { expected: u64::from(expected), found: found as u64 }
        }
    }
}

/// Memories with their shifts; refused if two of them share a byte.
fn shifted(memory: Vec<SharedBuf>) -> Result<Vec<Memory>, Reason> {
    let mut ranges: Vec<_> = memory.iter().map(|buf| (buf.as_ptr().addr(), buf.len())).collect();
    ranges.sort_unstable();
    let apart = ranges.windows(2).all(|pair| match pair {
        [(start, len), (next, _)] => start.saturating_add(*len) <= *next,
        _ => true,
    });
    if !apart {
        return Err(Reason::Overlap);
    }
    Ok(unchecked(memory))
}

/// Memories with their shifts, which may share bytes.
fn unchecked(memory: Vec<SharedBuf>) -> Vec<Memory> {
    memory.into_iter().map(|buf| Memory { shift: shift_of(&buf), buf }).collect()
}

/// The greatest number that divides both; of zero and a number, the number.
fn greatest_divisor(a: u64, b: u64) -> u64 {
    let (mut a, mut b) = (a, b);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Bytes from the page boundary before a memory to its first byte.
fn shift_of(buf: &SharedBuf) -> u64 {
    (buf.as_ptr().addr() % PAGE) as u64
}

fn expect_len(buf: &SharedBuf, expected: u64) -> Result<(), Reason> {
    let found = buf.len() as u64;
    if found == expected { Ok(()) } else { Err(Reason::Length { expected, found }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffers::Region;
    use kvarts_layout::{ChunkShape, LayerShape};

    fn shape() -> BlockShape {
        let chunk = |bytes| ChunkShape { bytes, align: 1 };
        BlockShape::new(vec![
            LayerShape { layer: 0, chunks: vec![chunk(10), chunk(6)] },
            LayerShape { layer: 1, chunks: vec![chunk(16)] },
        ])
        .unwrap()
    }

    fn buf(len: usize) -> SharedBuf {
        SharedBuf::new(&Region::anonymous(len.max(1)).unwrap(), 0, len).unwrap()
    }

    fn target(memory: u32, base: u64, stride: u64) -> PartTarget {
        PartTarget { memory: MemoryId(memory), base, stride }
    }

    #[test]
    fn blocks_put_chunks_one_after_the_other() {
        let placed = Placed::blocks(&shape(), buf(64), 2).unwrap();
        let chunk = placed.chunk(2, 1, 16).unwrap();
        assert_eq!((chunk.offset(), chunk.len()), (48, 16));
    }

    #[test]
    fn layers_put_the_blocks_of_a_part_one_after_the_other() {
        let placed = Placed::layers(&shape(), vec![buf(48), buf(48)], 3).unwrap();
        assert_eq!(placed.chunk(1, 2, 6).map(|chunk| chunk.offset()), Some(30 + 12));
        assert_eq!(placed.chunk(2, 2, 16).map(|chunk| chunk.offset()), Some(32));
    }

    #[test]
    fn memory_that_begins_within_a_page_is_found_and_does_not_look_aligned() {
        let whole = buf(PAGE * 2);
        let placed = Placed::blocks(&shape(), whole.slice(100, 32).unwrap(), 1).unwrap();
        assert!(!placed.is_page_aligned());
        assert_eq!(placed.places().address(0, 0).map(|address| address.offset), Some(100));
        assert_eq!(placed.chunk(1, 0, 6).map(|chunk| chunk.offset()), Some(110));
    }

    #[test]
    fn memory_of_the_wrong_length_is_refused() {
        let wrong = Placed::blocks(&shape(), buf(31), 1).unwrap_err();
        assert_eq!(wrong, Reason::Length { expected: 32, found: 31 });
        let few = Placed::layers(&shape(), vec![buf(16)], 1).unwrap_err();
        assert_eq!(few, Reason::Length { expected: 2, found: 1 });
    }

    #[test]
    fn a_layer_without_a_buffer_has_no_place_and_takes_no_memory() {
        let placed = Placed::layers(&shape(), vec![None, Some(buf(48))], 3).unwrap();
        assert_eq!((placed.memories().len(), placed.target(0)), (1, None));
        assert_eq!(placed.chunk(2, 2, 16).map(|chunk| chunk.offset()), Some(32));
        assert!(placed.chunk(0, 0, 10).is_none() && placed.select(&[1]).unwrap().chunk(1, 0, 6).is_none());
    }

    #[test]
    fn scattered_blocks_lie_where_their_memories_do() {
        let (one, other) = (buf(1 << 20), buf(4096));
        let pages: Vec<_> = [(&one, 5000), (&other, 64), (&one, 100), (&one, 132), (&other, 0)]
            .iter()
            .map(|(buf, at)| buf.slice(*at, 32).unwrap())
            .collect();
        let found = Placed::scattered(&shape(), &pages).unwrap();
        assert_eq!(
            found.iter().map(|(which, _)| which.as_slice()).collect::<Vec<_>>(),
            [&[2, 3, 0][..], &[4, 1]]
        );
        for (which, placed) in &found {
            for (block, page) in (0u32..).zip(which) {
                let page = &pages[*page as usize];
                let chunk = placed.chunk(2, block, 16).unwrap();
                assert_eq!((chunk.region().id(), chunk.offset()), (page.region().id(), page.offset() + 16));
            }
        }
        let slice = |at| one.slice(at, 32).unwrap();
        let meeting = [slice(31), slice(0), slice(0), slice(64)];
        let found = Placed::scattered(&shape(), &meeting).unwrap();
        let which: Vec<_> = found.iter().map(|(which, _)| which.as_slice()).collect();
        assert_eq!(which, [&[1, 3][..], &[2, 0][..1], &[0]]);
        let short = Placed::scattered(&shape(), &[one.slice(0, 31).unwrap()]).unwrap_err();
        assert_eq!(short, Reason::Length { expected: 32, found: 31 });
        assert_eq!(Placed::scattered(&shape(), &pages[..1]).unwrap()[0].1.block_count(), 1);
    }

    #[test]
    fn a_keeper_lives_as_long_as_anybody_has_memory_of_a_placement() {
        let (first, second) = (Arc::new(()), Arc::new(()));
        let pages = buf(64).kept_by(Arc::clone(&first) as _);
        let keeper: Arc<dyn Any + Send + Sync> = Arc::clone(&second) as _;
        let placed = Placed::blocks(&shape(), pages, 2).unwrap().kept_by(&keeper);
        drop(keeper);
        let chunk = placed.chunk(0, 1, 10).unwrap();
        drop(placed);
        assert_eq!((Arc::strong_count(&first), Arc::strong_count(&second)), (2, 2));
        drop(chunk);
        assert_eq!((Arc::strong_count(&first), Arc::strong_count(&second)), (1, 1));
    }

    #[test]
    fn a_slot_past_the_pool_is_refused() {
        let targets = [target(0, 0, 32), target(0, 10, 32), target(1, 0, 16)];
        let pool = |slots| Placed::paged(&shape(), vec![buf(96), buf(48)], &targets, slots);
        assert!(pool(vec![2, 0]).is_ok());
        assert_eq!(pool(vec![3, 0]).unwrap_err(), Reason::OutOfBounds);
        assert_eq!(pool(vec![1, 1]).unwrap_err(), Reason::Overlap);
    }

    #[test]
    fn a_selection_keeps_the_places_of_its_blocks_and_no_others() {
        let whole = Placed::blocks(&shape(), buf(96), 3).unwrap();
        let some = whole.select(&[2, 0]).unwrap();
        assert_eq!(some.block_count(), 2);
        assert_eq!(some.chunk(1, 0, 6).map(|chunk| chunk.offset()), Some(64 + 10));
        assert_eq!(some.chunk(1, 1, 6).map(|chunk| chunk.offset()), Some(10));
        assert_eq!(whole.select(&[3]).unwrap_err(), Reason::OutOfBounds);
        assert_eq!(whole.select(&[1, 1]).unwrap_err(), Reason::Overlap);
        assert_eq!(whole.select(&[]).unwrap_err(), Reason::Empty);
    }

    #[test]
    fn two_memories_that_share_bytes_are_refused() {
        let whole = buf(96);
        let (left, right) = (whole.slice(0, 48).unwrap(), whole.slice(40, 48).unwrap());
        let both = vec![left, right];
        assert_eq!(Placed::layers(&shape(), both.clone(), 3).unwrap_err(), Reason::Overlap);
        let in_turns = Placed::gated_layers(&shape(), both, 3, StepGate::new(1)).unwrap();
        assert!(in_turns.gate().is_some() && in_turns.select(&[1]).unwrap().gate().is_some());
    }
}
