//! Blocks of a pool that lie beside each other.

use crate::BlockShape;

/// Some blocks of an extent: of a run of blocks that lie `[part][block]` in one piece of memory, with the parts of all layers in the order of
/// the shape. What a part has of these blocks is one stretch of memory, whatever the size of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stretch {
    /// Where the extent begins in its memory.
    pub at: u64,
    /// Blocks of the extent.
    pub blocks: u32,
    /// Which of them these are: the first.
    pub first: u32,
    /// And how many.
    pub count: u32,
}

impl Stretch {
    /// Where the chunks of a part lie in the memory, and their bytes in all; parts count through all layers of the shape. None for a part
    /// that the shape has not, and for blocks that the extent has not.
    pub fn part(&self, shape: &BlockShape, part: u32) -> Option<(u64, u64)> {
        let mut chunks = shape.layers().iter().flat_map(|layer| &layer.chunks);
        let mut before = 0u64;
        for chunk in chunks.by_ref().take(part as usize) {
            before = before.checked_add(chunk.bytes)?;
        }
        let chunk = chunks.next()?;
        let end = self.first.checked_add(self.count).filter(|end| *end <= self.blocks)?;
        let part = self.at.checked_add(before.checked_mul(u64::from(self.blocks))?)?;
        let of = |blocks: u32| chunk.bytes.checked_mul(u64::from(blocks));
        let (start, end) = (part.checked_add(of(self.first)?)?, part.checked_add(of(end)?)?);
        Some((start, end.checked_sub(start)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Order, Tile};
    use crate::{ChunkShape, LayerShape};

    #[test]
    fn a_stretch_is_where_the_tile_of_its_extent_has_its_chunks() {
        let chunk = |bytes| ChunkShape { bytes, align: 1 };
        let layers = vec![
            LayerShape { layer: 0, chunks: vec![chunk(8), chunk(24)] },
            LayerShape { layer: 3, chunks: vec![chunk(5)] },
        ];
        let shape = BlockShape::new(layers).unwrap();
        let stretch = Stretch { at: 1000, blocks: 7, first: 2, count: 3 };
        let tile = Tile { blocks: 0..7, layers: 0..2 };
        let start = crate::plan::Address { memory: crate::plan::MemoryId(0), offset: 1000 };
        for (part, target) in (0u32..).zip(tile.targets(Order::Layers, &shape, start)) {
            let target = target.unwrap();
            let (at, bytes) = stretch.part(&shape, part).unwrap();
            assert_eq!((at, bytes), (target.base + 2 * target.stride, 3 * target.stride));
        }
        assert_eq!(stretch.part(&shape, 3), None);
        assert_eq!(Stretch { first: 5, ..stretch }.part(&shape, 0), None);
        assert_eq!(Stretch { at: u64::MAX - 4, ..stretch }.part(&shape, 0), None);
    }
}
