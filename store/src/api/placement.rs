//! Where the blocks of a request lie in the caller's memory.
//!
//! The same description serves as a source of puts and as a destination of reads. It is checked once, against
//! the shape, before anything is begun: afterwards every chunk has its place inside the memory given, and for
//! reads no two chunks share a byte.

use kvarts_layout::BlockShape;

use crate::error::Reason;
use crate::io::Buf;

/// Memory of one (layer, part) of a paged pool: block `i` of the request lies at `slots[i] * stride`.
#[derive(Clone, Debug)]
pub struct PagedPart {
    /// The pool's memory for this part, from slot zero.
    pub memory: Buf,
    /// Bytes from one slot to the next; at least the chunk's bytes.
    pub stride: u64,
}

/// Where the chunks of a run of blocks lie.
#[derive(Clone, Debug)]
pub enum Placement {
    /// One buffer for each block, its chunks in canonical (layer, part) order without padding.
    Pages(Vec<Buf>),
    /// One buffer for each chunk of the shape in canonical order; in it the blocks follow each other.
    Layers(Vec<Buf>),
    /// A paged pool, as engines have them: one base for each chunk of the shape in canonical order, and a slot
    /// for each block.
    Paged {
        /// The parts, in canonical order.
        parts: Vec<PagedPart>,
        /// A slot for each block of the request.
        slots: Vec<u32>,
    },
}

/// A range of the caller's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Which of [`Placement::memory`].
    pub memory: usize,
    /// Where in it.
    pub offset: usize,
}

/// A placement that fits its shape: what the engine works with.
#[derive(Clone, Debug)]
pub struct Placed {
    placement: Placement,
    /// For each chunk of the shape: bytes, and the sum of the bytes before it in the block.
    chunks: Vec<(u64, u64)>,
    blocks: u32,
}

impl Placement {
    /// The buffers, in the order in which [`Place::memory`] counts them.
    fn memory(&self, index: usize) -> Option<&Buf> {
        match self {
            Self::Pages(buffers) | Self::Layers(buffers) => buffers.get(index),
            Self::Paged { parts, .. } => parts.get(index).map(|part| &part.memory),
        }
    }

    fn memories(&self) -> impl Iterator<Item = &Buf> {
        let (buffers, parts): (&[Buf], &[PagedPart]) = match self {
            Self::Pages(buffers) | Self::Layers(buffers) => (buffers, &[]),
            Self::Paged { parts, .. } => (&[], parts),
        };
        buffers.iter().chain(parts.iter().map(|part| &part.memory))
    }
}

impl Placed {
    /// Checks lengths and bounds of `placement` for `blocks` blocks of `shape`; with `exclusive` (reads), also
    /// that no two chunks share a byte.
    pub fn new(
        placement: Placement,
        shape: &BlockShape,
        blocks: u32,
        exclusive: bool,
    ) -> Result<Self, Reason> {
        let mut chunks = Vec::with_capacity(shape.chunk_count() as usize);
        let mut before = 0u64;
        for chunk in shape.layers().iter().flat_map(|layer| &layer.chunks) {
            chunks.push((chunk.bytes, before));
            before = before.saturating_add(chunk.bytes);
        }
        let placed = Self { placement, chunks, blocks };
        placed.check_lengths(shape)?;
        if exclusive {
            placed.check_exclusive()?;
        }
        Ok(placed)
    }

    fn check_lengths(&self, shape: &BlockShape) -> Result<(), Reason> {
        let blocks = u64::from(self.blocks);
        match &self.placement {
            Placement::Pages(pages) => {
                expect_count(pages.len(), u64::from(self.blocks))?;
                pages.iter().try_for_each(|page| expect_len(page, shape.block_bytes()))
            }
            Placement::Layers(layers) => {
                expect_count(layers.len(), u64::from(shape.chunk_count()))?;
                let pairs = layers.iter().zip(&self.chunks);
                pairs.into_iter().try_for_each(|(layer, (bytes, _))| {
                    expect_len(layer, bytes.checked_mul(blocks).ok_or(Reason::TooMany("bytes"))?)
                })
            }
            Placement::Paged { parts, slots } => {
                expect_count(parts.len(), u64::from(shape.chunk_count()))?;
                expect_count(slots.len(), blocks)?;
                let last = u64::from(slots.iter().copied().max().unwrap_or(0));
                parts.iter().zip(&self.chunks).try_for_each(|(part, &(bytes, _))| {
                    if part.stride < bytes {
                        return Err(Reason::Length { expected: bytes, found: part.stride });
                    }
                    let end = last.checked_mul(part.stride).and_then(|at| at.checked_add(bytes));
                    match end {
                        Some(end) if end <= part.memory.len() as u64 => Ok(()),
                        _ => Err(Reason::OutOfBounds),
                    }
                })
            }
        }
    }

    /// Whole buffers must not share bytes, nor two blocks a slot. Parts of a pool may interleave (K and V of one
    /// page): then every chunk is compared.
    fn check_exclusive(&self) -> Result<(), Reason> {
        if let Placement::Paged { slots, .. } = &self.placement {
            let mut sorted = slots.clone();
            sorted.sort_unstable();
            if sorted.windows(2).any(|pair| pair.first() == pair.last()) {
                return Err(Reason::Overlap);
            }
        }
        let whole = self.placement.memories().map(|buf| (buf.as_ptr().addr(), buf.len()));
        if all_disjoint(whole.collect()) {
            return Ok(());
        }
        let mut ranges = Vec::new();
        for block in 0..self.blocks {
            for (chunk, &(bytes, _)) in self.chunks.iter().enumerate() {
                let place = self.place(block, chunk).ok_or(Reason::OutOfBounds)?;
                let buf = self.memory(place.memory).ok_or(Reason::OutOfBounds)?;
                ranges.push((buf.as_ptr().addr().saturating_add(place.offset), bytes as usize));
            }
        }
        if all_disjoint(ranges) { Ok(()) } else { Err(Reason::Overlap) }
    }

    /// Blocks of the request.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// A buffer that places refer to.
    pub fn memory(&self, index: usize) -> Option<&Buf> {
        self.placement.memory(index)
    }

    /// Bytes of a chunk of the shape.
    pub fn chunk_bytes(&self, chunk: usize) -> Option<u64> {
        self.chunks.get(chunk).map(|&(bytes, _)| bytes)
    }

    /// Where chunk `chunk` (in canonical order) of block `block` of the request lies.
    pub fn place(&self, block: u32, chunk: usize) -> Option<Place> {
        let &(bytes, before) = self.chunks.get(chunk)?;
        let (memory, offset) = match &self.placement {
            Placement::Pages(_) => (block as usize, before),
            Placement::Layers(_) => (chunk, bytes.checked_mul(u64::from(block))?),
            Placement::Paged { parts, slots } => {
                let slot = u64::from(*slots.get(block as usize)?);
                (chunk, parts.get(chunk)?.stride.checked_mul(slot)?)
            }
        };
        Some(Place { memory, offset: usize::try_from(offset).ok()? })
    }

    /// The memory of one chunk.
    pub fn chunk(&self, block: u32, chunk: usize) -> Option<Buf> {
        let place = self.place(block, chunk)?;
        let bytes = usize::try_from(self.chunk_bytes(chunk)?).ok()?;
        self.memory(place.memory)?.slice(place.offset, bytes)
    }
}

fn expect_count(found: usize, expected: u64) -> Result<(), Reason> {
    if found as u64 == expected { Ok(()) } else { Err(Reason::Length { expected, found: found as u64 }) }
}

fn expect_len(buf: &Buf, expected: u64) -> Result<(), Reason> {
    let found = buf.len() as u64;
    if found == expected { Ok(()) } else { Err(Reason::Length { expected, found }) }
}

fn all_disjoint(mut ranges: Vec<(usize, usize)>) -> bool {
    ranges.sort_unstable();
    ranges.windows(2).all(|pair| match pair {
        [(at, len), (next, _)] => at.checked_add(*len).is_some_and(|end| end <= *next),
        _ => true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::Region;
    use kvarts_layout::{ChunkShape, LayerShape};

    fn shape() -> BlockShape {
        let chunk = |bytes| ChunkShape { bytes, align: 1 };
        BlockShape::new(vec![
            LayerShape { layer: 0, chunks: vec![chunk(10), chunk(6)] },
            LayerShape { layer: 1, chunks: vec![chunk(16)] },
        ])
        .unwrap()
    }

    fn buf(len: usize) -> Buf {
        Buf::new(&Region::anonymous(len.max(1)).unwrap(), 0, len).unwrap()
    }

    #[test]
    fn pages_put_chunks_one_after_the_other() {
        let placed = Placed::new(Placement::Pages(vec![buf(32), buf(32)]), &shape(), 2, true).unwrap();
        assert_eq!(placed.place(1, 2), Some(Place { memory: 1, offset: 16 }));
        assert_eq!(placed.place(0, 3), None);
    }

    #[test]
    fn layers_put_blocks_one_after_the_other() {
        let layers = vec![buf(30), buf(18), buf(48)];
        let placed = Placed::new(Placement::Layers(layers), &shape(), 3, true).unwrap();
        assert_eq!(placed.place(2, 0), Some(Place { memory: 0, offset: 20 }));
        assert_eq!(placed.chunk(2, 2).map(|chunk| (chunk.offset(), chunk.len())), Some((32, 16)));
    }

    #[test]
    fn memory_of_the_wrong_length_is_refused() {
        let short = Placement::Pages(vec![buf(31)]);
        assert_eq!(
            Placed::new(short, &shape(), 1, true).unwrap_err(),
            Reason::Length { expected: 32, found: 31 }
        );
        let few = Placement::Pages(vec![buf(32)]);
        assert_eq!(
            Placed::new(few, &shape(), 2, true).unwrap_err(),
            Reason::Length { expected: 2, found: 1 }
        );
    }

    #[test]
    fn a_slot_past_the_pool_is_refused() {
        let part = |len, stride| PagedPart { memory: buf(len), stride };
        let pool = |slots| Placement::Paged { parts: vec![part(40, 10), part(40, 8), part(64, 16)], slots };
        assert!(Placed::new(pool(vec![3, 0]), &shape(), 2, true).is_ok());
        assert_eq!(Placed::new(pool(vec![4, 0]), &shape(), 2, true).unwrap_err(), Reason::OutOfBounds);
    }

    #[test]
    fn shared_bytes_are_refused_for_reads_and_allowed_for_puts() {
        let page = buf(48);
        let pages = || Placement::Pages(vec![page.slice(0, 32).unwrap(), page.slice(16, 32).unwrap()]);
        assert_eq!(Placed::new(pages(), &shape(), 2, true).unwrap_err(), Reason::Overlap);
        assert!(Placed::new(pages(), &shape(), 2, false).is_ok());
    }

    #[test]
    fn parts_that_interleave_in_one_page_do_not_overlap() {
        let page = buf(64);
        let part = |at: usize| PagedPart { memory: page.slice(at, 64 - at).unwrap(), stride: 32 };
        let pool = Placement::Paged { parts: vec![part(0), part(10), part(16)], slots: vec![1, 0] };
        assert!(Placed::new(pool, &shape(), 2, true).is_ok());
        let clash = Placement::Paged { parts: vec![part(0), part(9), part(16)], slots: vec![1, 0] };
        assert_eq!(Placed::new(clash, &shape(), 2, true).unwrap_err(), Reason::Overlap);
    }

    #[test]
    fn two_blocks_in_one_slot_overlap() {
        let part = |len, stride| PagedPart { memory: buf(len), stride };
        let pool =
            Placement::Paged { parts: vec![part(40, 10), part(40, 8), part(64, 16)], slots: vec![1, 1] };
        assert_eq!(Placed::new(pool, &shape(), 2, true).unwrap_err(), Reason::Overlap);
    }
}
