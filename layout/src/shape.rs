//! The shape of a block: the chunks of one group at one coordinate, layer by layer in execution order.
//!
//! A shape is what layouts and read plans compute with. It is made from a model spec (or is a single opaque
//! chunk) and knows nothing of names, costs or tokens. Every size is checked when a shape is built, so that
//! arithmetic over a shape cannot overflow: `MAX_RUN_BLOCKS` blocks of `MAX_BLOCK_BYTES` fit in 63 bits.

use std::fmt;
use std::ops::Range;

/// The most tokens a block may have.
pub const MAX_BLOCK_TOKENS: u32 = 1 << 20;
/// The most bytes one chunk may have.
pub const MAX_CHUNK_BYTES: u64 = 1 << 32;
/// The most bytes one block may have.
pub const MAX_BLOCK_BYTES: u64 = 1 << 36;
/// The most layers one shape may have.
pub const MAX_LAYERS: usize = 4096;
/// The most chunks one block may have.
pub const MAX_CHUNKS: usize = 1 << 16;
/// The most blocks one record may have.
pub const MAX_RUN_BLOCKS: u32 = 1 << 16;
/// The greatest alignment a chunk may ask for.
pub const MAX_ALIGN: u32 = 4096;

/// How the chunks of a run of blocks are ordered in a record's payload.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Layout {
    /// `[block][layer][part]`: every block is whole and contiguous.
    FullBlock,
    /// `[layer][part][block]`: every layer of the run is contiguous, layers in execution order.
    LayerBlock,
}

/// One part of one layer of one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkShape {
    /// Bytes, never zero.
    pub bytes: u64,
    /// Alignment within the payload that the part asks for: a power of two, at most [`MAX_ALIGN`].
    pub align: u32,
}

/// The chunks of one layer of one block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerShape {
    /// Index of the layer in the model spec. Strictly increasing within a shape: layers that have no part in
    /// this group are absent.
    pub layer: u32,
    /// The chunks, in part order; never empty.
    pub chunks: Vec<ChunkShape>,
}

impl LayerShape {
    /// Bytes of this layer in one block.
    pub fn bytes(&self) -> u64 {
        self.chunks.iter().fold(0u64, |sum, chunk| sum.saturating_add(chunk.bytes))
    }
}

/// The chunks of one block of one group at one coordinate. Within its limits by construction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlockShape {
    layers: Vec<LayerShape>,
    block_bytes: u64,
    chunk_count: u32,
}

/// Why a list of layers is not a shape.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShapeError {
    /// No layer, or a layer without chunks.
    Empty,
    /// Layer indices do not increase.
    Order,
    /// A chunk of no bytes.
    ZeroChunk,
    /// An alignment that is not a power of two up to [`MAX_ALIGN`].
    Align,
    /// A chunk, a block or a count past its limit.
    TooLarge,
}

impl fmt::Display for ShapeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "the shape of a block has no layer, or a layer without chunks",
            Self::Order => "the layer indices of the shape do not increase",
            Self::ZeroChunk => "the shape has a chunk of 0 bytes",
            Self::Align => "the alignment of the shape is not a power of two up to 4096",
            Self::TooLarge => "a chunk, a block or the number of chunks is larger than its limit",
        })
    }
}

impl std::error::Error for ShapeError {}

impl BlockShape {
    /// Checks every limit named in this module.
    pub fn new(layers: Vec<LayerShape>) -> Result<Self, ShapeError> {
        let mut block_bytes = 0u64;
        let mut chunk_count = 0usize;
        let mut previous: Option<u32> = None;
        if layers.is_empty() {
            return Err(ShapeError::Empty);
        }
        if layers.len() > MAX_LAYERS {
            return Err(ShapeError::TooLarge);
        }
        for layer in &layers {
            if previous.is_some_and(|previous| layer.layer <= previous) {
                return Err(ShapeError::Order);
            }
            previous = Some(layer.layer);
            if layer.chunks.is_empty() {
                return Err(ShapeError::Empty);
            }
            chunk_count = chunk_count.saturating_add(layer.chunks.len());
            for chunk in &layer.chunks {
                if chunk.bytes == 0 {
                    return Err(ShapeError::ZeroChunk);
                }
                if !chunk.align.is_power_of_two() || chunk.align > MAX_ALIGN {
                    return Err(ShapeError::Align);
                }
                if chunk.bytes > MAX_CHUNK_BYTES {
                    return Err(ShapeError::TooLarge);
                }
                block_bytes = block_bytes.saturating_add(chunk.bytes);
            }
        }
        if block_bytes > MAX_BLOCK_BYTES || chunk_count > MAX_CHUNKS {
            return Err(ShapeError::TooLarge);
        }
        let chunk_count = u32::try_from(chunk_count).map_err(|_| ShapeError::TooLarge)?;
        Ok(Self { layers, block_bytes, chunk_count })
    }

    /// The shape of an opaque page: one layer, one chunk.
    pub fn opaque(bytes: u64) -> Result<Self, ShapeError> {
        Self::new(vec![LayerShape { layer: 0, chunks: vec![ChunkShape { bytes, align: 1 }] }])
    }

    /// The layers, in execution order.
    pub fn layers(&self) -> &[LayerShape] {
        &self.layers
    }

    /// Bytes of one block in canonical (layer, part) order, without padding.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Bytes of some layers of one block; those that there are not have none.
    pub fn layers_bytes(&self, layers: &Range<u32>) -> u64 {
        let index = |at: u32| usize::try_from(at).unwrap_or(usize::MAX).min(self.layers.len());
        let some = self.layers.get(index(layers.start)..index(layers.end)).unwrap_or_default();
        some.iter().fold(0u64, |sum, layer| sum.saturating_add(layer.bytes()))
    }

    /// Chunks in one block.
    pub fn chunk_count(&self) -> u32 {
        self.chunk_count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(layer: u32, bytes: &[u64]) -> LayerShape {
        LayerShape { layer, chunks: bytes.iter().map(|&bytes| ChunkShape { bytes, align: 1 }).collect() }
    }

    #[test]
    fn a_shape_adds_up_its_chunks() {
        let shape = BlockShape::new(vec![layer(0, &[3, 5]), layer(4, &[7])]).unwrap();
        assert_eq!((shape.block_bytes(), shape.chunk_count()), (15, 3));
    }

    #[test]
    fn what_is_not_a_shape_is_refused() {
        assert_eq!(BlockShape::new(vec![]), Err(ShapeError::Empty));
        assert_eq!(BlockShape::new(vec![layer(0, &[])]), Err(ShapeError::Empty));
        assert_eq!(BlockShape::new(vec![layer(1, &[1]), layer(1, &[1])]), Err(ShapeError::Order));
        assert_eq!(BlockShape::opaque(0), Err(ShapeError::ZeroChunk));
        assert_eq!(BlockShape::opaque(MAX_CHUNK_BYTES + 1), Err(ShapeError::TooLarge));
        let odd = LayerShape { layer: 0, chunks: vec![ChunkShape { bytes: 1, align: 3 }] };
        assert_eq!(BlockShape::new(vec![odd]), Err(ShapeError::Align));
    }
}
