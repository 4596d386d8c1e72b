//! Which bytes of a piece follow its answer, and in which order: the same on both sides.

use std::ops::Range;

use kvarts_layout::BlockShape;
use kvarts_layout::plan::Order;

/// Some layers of some blocks of a piece, in the order in which their bytes travel.
#[derive(Clone, Debug)]
pub(super) struct Delivery {
    pub(super) order: Order,
    pub(super) layers: Range<u32>,
    /// Upwards.
    pub(super) blocks: Vec<u32>,
}

/// One chunk of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Chunk {
    pub(super) layer: u32,
    /// Canonical index in the block.
    pub(super) part: u32,
    pub(super) block: u32,
    pub(super) bytes: u64,
}

/// How many chunks some layers of one block have.
pub(super) fn chunk_count(shape: &BlockShape, layers: &Range<u32>) -> u64 {
    kvarts_wire::local::parts(shape, layers).len() as u64
}

impl Delivery {
    /// All its chunks, one after the other.
    pub(super) fn each(&self, shape: &BlockShape, mut look: impl FnMut(Chunk)) {
        let mut part = 0;
        let mut parts = Vec::new();
        for (layer, of) in (0u32..).zip(shape.layers()) {
            for chunk in &of.chunks {
                if self.layers.contains(&layer) {
                    parts.push((layer, part, chunk.bytes));
                }
                part += 1;
            }
        }
        let of = |block, (layer, part, bytes)| Chunk { layer, part, block, bytes };
        match self.order {
            Order::Blocks => {
                for &block in &self.blocks {
                    parts.iter().for_each(|&part| look(of(block, part)));
                }
            }
            Order::Layers => {
                for &part in &parts {
                    self.blocks.iter().for_each(|&block| look(of(block, part)));
                }
            }
        }
    }

    /// How many bytes that is.
    pub(super) fn bytes(&self, shape: &BlockShape) -> u64 {
        shape.layers_bytes(&self.layers).saturating_mul(self.blocks.len() as u64)
    }

    /// How many chunks.
    pub(super) fn chunks(&self, shape: &BlockShape) -> u64 {
        chunk_count(shape, &self.layers).saturating_mul(self.blocks.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_layout::{ChunkShape, LayerShape};

    #[test]
    fn chunks_travel_by_blocks_or_by_layers() {
        let chunk = |bytes| ChunkShape { bytes, align: 1 };
        let layer =
            |layer, sizes: &[u64]| LayerShape { layer, chunks: sizes.iter().map(|&b| chunk(b)).collect() };
        let shape = BlockShape::new(vec![layer(0, &[1]), layer(1, &[2, 3]), layer(4, &[5])]).unwrap();
        let told = |order| {
            let delivery = Delivery { order, layers: 1..3, blocks: vec![0, 7] };
            let mut found = Vec::new();
            delivery.each(&shape, |chunk| found.push((chunk.block, chunk.layer, chunk.part, chunk.bytes)));
            assert_eq!((delivery.bytes(&shape), delivery.chunks(&shape)), (20, 6));
            found
        };
        let blocks = [(0, 1, 1, 2), (0, 1, 2, 3), (0, 2, 3, 5), (7, 1, 1, 2), (7, 1, 2, 3), (7, 2, 3, 5)];
        assert_eq!(told(Order::Blocks), blocks);
        let layers = [(0, 1, 1, 2), (7, 1, 1, 2), (0, 1, 2, 3), (7, 1, 2, 3), (0, 2, 3, 5), (7, 2, 3, 5)];
        assert_eq!(told(Order::Layers), layers);
    }
}
