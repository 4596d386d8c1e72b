//! Where the blocks of a request lie in device memory, as engines have it.
//!
//! Checked once, when it is made: afterwards every chunk has its place inside the memory given, and no two share a
//! byte. The same description serves both ways.

use std::sync::Arc;

use kvarts_layout::BlockShape;
use kvarts_layout::plan::{Address, MemoryId, PartTarget, Placement, PlacementError};

use crate::device::slots::SlotShape;
use crate::device::{Memory, Piece};
use crate::error::LandError;
use crate::pages::{PagePart, Pages};

/// Blocks of one shape and their places in device memory. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Destination {
    shape: Arc<BlockShape>,
    memories: Arc<[Memory]>,
    places: Arc<Placement>,
    /// The same as parts and slots.
    targets: Arc<[PartTarget]>,
    slots: Arc<[u32]>,
}

impl Destination {
    /// A paged pool: for each chunk of the shape in canonical (layer, part) order, the memory it is in, the offset of
    /// slot zero and the distance between slots; and a slot for each block, in any order. K and V may be memories
    /// of their own, or parts of one slot.
    pub fn paged(
        shape: &Arc<BlockShape>,
        memories: Vec<Memory>,
        targets: &[PartTarget],
        slots: Vec<u32>,
    ) -> Result<Self, LandError> {
        let places = Placement::paged(shape, targets, slots.clone());
        Self::checked(shape, memories, places, (targets.to_vec(), slots))
    }

    /// One buffer: layer after layer, in each part after part, in each block after block, without padding.
    pub fn contiguous(shape: &Arc<BlockShape>, memory: Memory, blocks: u32) -> Result<Self, LandError> {
        let mut next = 0u64;
        let mut starts = Vec::with_capacity(shape.layers().len());
        for layer in shape.layers() {
            starts.push(next);
            next = next.saturating_add(layer.bytes().saturating_mul(u64::from(blocks)));
        }
        let start = |layer: u32| {
            let offset = starts.get(layer as usize).copied().unwrap_or(u64::MAX);
            Address { memory: MemoryId(0), offset }
        };
        let mut targets = Vec::new();
        for (layer, mut base) in shape.layers().iter().zip(&starts).map(|(layer, start)| (layer, *start)) {
            for chunk in &layer.chunks {
                targets.push(PartTarget { memory: MemoryId(0), base, stride: chunk.bytes });
                base = base.saturating_add(chunk.bytes.saturating_mul(u64::from(blocks)));
            }
        }
        let places = Placement::layer_buffers(shape, blocks, start);
        Self::checked(shape, vec![memory], places, (targets, (0..blocks).collect()))
    }

    /// The same as pages that kernels move; nothing if the parts are such that they cannot.
    pub(crate) fn pages(&self) -> Option<Pages> {
        let chunks = self.shape.layers().iter().flat_map(|layer| &layer.chunks);
        let part = |(target, bytes): (&PartTarget, u64)| PagePart {
            memory: target.memory.0,
            rows: SlotShape::whole(bytes, target.base, target.stride),
        };
        let parts = self.targets.iter().zip(chunks.map(|chunk| chunk.bytes)).map(part).collect();
        Pages::new(&self.shape, self.memories.to_vec(), parts, 1, self.slots.to_vec()).ok()
    }

    fn checked(
        shape: &Arc<BlockShape>,
        memories: Vec<Memory>,
        places: Result<Placement, PlacementError>,
        (targets, slots): (Vec<PartTarget>, Vec<u32>),
    ) -> Result<Self, LandError> {
        let wrong = |what: String| LandError::Request(what);
        let places = places.map_err(|error| wrong(format!("the destination is not valid: {error:?}")))?;
        for (at, memory) in memories.iter().enumerate() {
            let end = memory.base().saturating_add(memory.len());
            let shares = |other: &Memory| {
                memory.base() < other.base().saturating_add(other.len()) && other.base() < end
            };
            if memories.iter().skip(at + 1).any(shares) {
                return Err(wrong("two memory regions of the destination overlap".to_owned()));
            }
        }
        for span in places.spans() {
            let memory = memories.get(span.memory.0 as usize);
            if memory.is_none_or(|memory| span.end > memory.len()) {
                return Err(wrong(format!(
                    "the destination ends at byte {} of memory {}, which is shorter or does not exist",
                    span.end, span.memory.0
                )));
            }
        }
        let memories = memories.into();
        let (shape, places) = (Arc::clone(shape), Arc::new(places));
        Ok(Self { shape, memories, places, targets: targets.into(), slots: slots.into() })
    }

    /// The shape of a block.
    pub fn shape(&self) -> &Arc<BlockShape> {
        &self.shape
    }

    /// Blocks that have a place.
    pub fn blocks(&self) -> u32 {
        self.places.blocks()
    }

    /// The memories.
    pub fn memories(&self) -> &[Memory] {
        &self.memories
    }

    /// Bytes of each layer, of all blocks.
    pub fn layer_bytes(&self) -> Vec<u64> {
        let blocks = u64::from(self.blocks());
        self.shape.layers().iter().map(|layer| layer.bytes().saturating_mul(blocks)).collect()
    }

    /// Adds the piece of a block's chunk that begins `to` bytes into its layer, were that laid out `[part][block]`, that
    /// has `bytes` bytes, and that lies at `from` now. `None` if there is no such chunk.
    pub fn add_piece(
        &self,
        (layer, block): (u32, u32),
        (to, bytes): (u64, u64),
        from: u64,
        pieces: &mut Vec<Piece>,
    ) -> Option<()> {
        let layers = self.shape.layers();
        let before = layers.iter().take(layer as usize).map(|layer| layer.chunks.len()).sum::<usize>();
        let mut begin = 0;
        for (part, chunk) in (before as u32..).zip(&layers.get(layer as usize)?.chunks) {
            let is_it = to == begin + chunk.bytes * u64::from(block) && bytes == chunk.bytes;
            if is_it && block < self.blocks() {
                push(pieces, self.places.address(part, block)?, from, chunk.bytes);
                return Some(());
            }
            begin += chunk.bytes * u64::from(self.blocks());
        }
        None
    }

    /// The pieces of one layer of the first `blocks` blocks, whose host side lies `[part][block]` with room for all
    /// blocks. What is contiguous on both sides is one piece. `pieces` is emptied first; its memory is kept.
    pub fn pieces(&self, layer: u32, blocks: u32, pieces: &mut Vec<Piece>) {
        pieces.clear();
        let layers = self.shape.layers();
        let before = layers.iter().take(layer as usize).map(|layer| layer.chunks.len()).sum::<usize>();
        let Some(shape) = layers.get(layer as usize) else { return };
        let mut host = 0u64;
        for (part, chunk) in (before as u32..).zip(&shape.chunks) {
            for block in 0..blocks.min(self.blocks()) {
                let Some(address) = self.places.address(part, block) else { continue };
                push(pieces, address, host + chunk.bytes * u64::from(block), chunk.bytes);
            }
            host += chunk.bytes * u64::from(self.blocks());
        }
    }
}

/// Adds a piece; what is contiguous with the last on both sides makes that longer.
fn push(pieces: &mut Vec<Piece>, address: Address, here: u64, len: u64) {
    match pieces.last_mut() {
        Some(last)
            if last.memory == address.memory.0
                && last.at + last.len == address.offset
                && last.host + last.len == here =>
        {
            last.len += len;
        }
        _ => pieces.push(Piece { memory: address.memory.0, at: address.offset, host: here, len }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::device::emulated::{Emulated, Model};
    use kvarts_layout::{ChunkShape, LayerShape};

    fn shape() -> Arc<BlockShape> {
        let chunk = |bytes| ChunkShape { bytes, align: 1 };
        let layers = vec![
            LayerShape { layer: 0, chunks: vec![chunk(8), chunk(8)] },
            LayerShape { layer: 1, chunks: vec![chunk(5)] },
        ];
        Arc::new(BlockShape::new(layers).unwrap())
    }

    fn pieces_of(to: &Destination, layer: u32, blocks: u32) -> Vec<(u32, u64, u64, u64)> {
        let mut pieces = Vec::new();
        to.pieces(layer, blocks, &mut pieces);
        pieces.iter().map(|piece| (piece.memory, piece.at, piece.host, piece.len)).collect()
    }

    fn target(memory: u32, base: u64, stride: u64) -> PartTarget {
        PartTarget { memory: MemoryId(memory), base, stride }
    }

    #[test]
    fn slots_may_be_any_and_neighbours_become_one_piece() {
        let device = Emulated::new(Model::default());
        let memories = || [64, 64, 64].map(|bytes| device.allocate(bytes).unwrap()).to_vec();
        let apart = [target(0, 0, 8), target(1, 0, 8), target(2, 0, 5)];
        let to = Destination::paged(&shape(), memories(), &apart, vec![4, 5, 1]).unwrap();
        assert_eq!(pieces_of(&to, 0, 3), [(0, 32, 0, 16), (0, 8, 16, 8), (1, 32, 24, 16), (1, 8, 40, 8)]);
        assert_eq!(pieces_of(&to, 1, 2), [(2, 20, 0, 10)]);
        let fused = [target(0, 0, 16), target(0, 8, 16), target(1, 3, 6)];
        let to = Destination::paged(&shape(), memories(), &fused, vec![1, 0]).unwrap();
        assert_eq!(pieces_of(&to, 0, 2), [(0, 16, 0, 8), (0, 0, 8, 8), (0, 24, 16, 8), (0, 8, 24, 8)]);
        assert_eq!(pieces_of(&to, 1, 2), [(1, 9, 0, 5), (1, 3, 5, 5)]);
    }

    #[test]
    fn a_contiguous_layer_is_one_piece() {
        let device = Emulated::new(Model::default());
        let to = Destination::contiguous(&shape(), device.allocate(63).unwrap(), 3).unwrap();
        assert_eq!(pieces_of(&to, 0, 3), [(0, 0, 0, 48)]);
        assert_eq!(pieces_of(&to, 1, 3), [(0, 48, 0, 15)]);
        assert_eq!(to.layer_bytes(), [48, 15]);
    }

    #[test]
    fn a_destination_past_its_memory_or_over_itself_is_refused() {
        let device = Emulated::new(Model::default());
        let refused = |result: Result<Destination, LandError>| {
            assert!(matches!(result, Err(LandError::Request(_))), "{result:?}");
        };
        refused(Destination::contiguous(&shape(), device.allocate(62).unwrap(), 3));
        let memory = device.allocate(64).unwrap();
        let targets = [target(0, 0, 8), target(0, 4, 8), target(1, 0, 5)];
        let two = vec![memory.clone(), device.allocate(64).unwrap()];
        refused(Destination::paged(&shape(), two, &targets, vec![0, 1]));
        let apart = [target(0, 0, 8), target(1, 0, 8), target(1, 32, 5)];
        refused(Destination::paged(&shape(), vec![memory.clone(), memory], &apart, vec![0]));
    }
}
