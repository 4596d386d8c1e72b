//! A long read in windows that fit into memory: which blocks and layers at a time, and where they lie.
//!
//! The windows of a read, one after the other, are its blocks and layers in the order in which they are delivered.

use std::ops::Range;

use kvarts_layout::plan::{MemoryId, PartTarget};
use kvarts_layout::{BlockShape, ChunkShape};
use kvarts_store::api::{Order, Placed};
use kvarts_store::error::Reason;
use kvarts_store::io::SharedBuf;

/// What is read at a time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Window {
    /// Ordinals of the request.
    pub blocks: Range<u32>,
    /// Layers of the shape.
    pub layers: Range<u32>,
}

impl Window {
    /// Bytes of memory that it takes.
    pub fn bytes(&self, shape: &BlockShape) -> u64 {
        layers_bytes(shape, &self.layers).saturating_mul(self.blocks.len() as u64)
    }
}

/// Bytes of some layers of one block.
pub fn layers_bytes(shape: &BlockShape, layers: &Range<u32>) -> u64 {
    let layers = shape.layers().get(layers.start as usize..layers.end as usize).unwrap_or_default();
    layers.iter().fold(0, |sum, layer| sum.saturating_add(layer.bytes()))
}

/// How many things of `each` bytes fit into `bytes`: at least one.
pub fn fitting(bytes: u64, each: u64) -> u32 {
    u32::try_from(bytes / each.max(1)).unwrap_or(u32::MAX).max(1)
}

/// The leading ones of `layers` of which this many blocks fit into `bytes`: at least one.
pub fn fitting_layers(shape: &BlockShape, layers: &Range<u32>, blocks: u32, bytes: u64) -> Range<u32> {
    let (mut end, mut sum) = (layers.start, 0u64);
    for layer in layers.clone() {
        let more = layers_bytes(shape, &(layer..layer + 1)).saturating_mul(u64::from(blocks));
        sum = sum.saturating_add(more);
        if end > layers.start && sum > bytes {
            break;
        }
        end = layer + 1;
    }
    layers.start..end
}

/// The chunks of a shape with their layers, in canonical order.
fn chunks(shape: &BlockShape) -> impl Iterator<Item = (u32, &ChunkShape)> {
    (0u32..).zip(shape.layers()).flat_map(|(at, layer)| layer.chunks.iter().map(move |chunk| (at, chunk)))
}

/// Gives every chunk of a window its place in `memory`: in block order `[block][layer][part]`, in layer order
/// `[layer][part][block]`.
pub fn place(
    order: Order,
    shape: &BlockShape,
    window: &Window,
    memory: &SharedBuf,
) -> Result<Placed, Reason> {
    let blocks = window.blocks.len() as u64;
    let stride = layers_bytes(shape, &window.layers);
    let mut at = 0u64;
    let mut targets = Vec::with_capacity(shape.chunk_count() as usize);
    for (layer, chunk) in chunks(shape) {
        if !window.layers.contains(&layer) {
            targets.push(None);
            continue;
        }
        let stride = if order == Order::Blocks { stride } else { chunk.bytes };
        targets.push(Some(PartTarget { memory: MemoryId(0), base: at, stride }));
        at = at.saturating_add(if order == Order::Blocks {
            chunk.bytes
        } else {
            chunk.bytes.saturating_mul(blocks)
        });
    }
    let slots = (0..window.blocks.len() as u32).collect();
    Placed::paged(shape, vec![memory.clone()], &targets, slots)
}

/// Where in the window's memory the blocks `blocks` (counted within the window) of what is delivered together lie,
/// range by range in the order in which they are sent. `layer` is the one in layer order.
pub fn ranges(
    order: Order,
    shape: &BlockShape,
    window: &Window,
    layer: u32,
    blocks: Range<u32>,
) -> Vec<(u64, u64)> {
    if order == Order::Blocks {
        let each = layers_bytes(shape, &window.layers);
        return vec![(u64::from(blocks.start) * each, blocks.len() as u64 * each)];
    }
    let all = window.blocks.len() as u64;
    let mut at = layers_bytes(shape, &(window.layers.start..layer)).saturating_mul(all);
    let mut found = Vec::new();
    for chunk in shape.layers().get(layer as usize).map(|layer| &layer.chunks[..]).unwrap_or_default() {
        found.push((at + u64::from(blocks.start) * chunk.bytes, blocks.len() as u64 * chunk.bytes));
        at += chunk.bytes * all;
    }
    found
}

/// The chunks of what [`ranges`] gives, in the same order: bytes, part (canonical index) and block (counted within the
/// window).
pub fn chunks_of(
    order: Order,
    shape: &BlockShape,
    window: &Window,
    layer: u32,
    blocks: Range<u32>,
) -> Vec<(u64, u32, u32)> {
    let layers = if order == Order::Blocks { window.layers.clone() } else { layer..layer + 1 };
    let parts = (0u32..).zip(chunks(shape)).filter(|(_, (at, _))| layers.contains(at));
    let parts: Vec<(u64, u32)> = parts.map(|(part, (_, chunk))| (chunk.bytes, part)).collect();
    let of = |(bytes, part): &(u64, u32), block| (*bytes, *part, block);
    match order {
        Order::Blocks => blocks.flat_map(|block| parts.iter().map(move |part| of(part, block))).collect(),
        Order::Layers => {
            parts.iter().flat_map(|part| blocks.clone().map(move |block| of(part, block))).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_layout::LayerShape;
    use kvarts_store::io::Region;

    fn shape() -> BlockShape {
        let layer = |layer, bytes: &[u64]| LayerShape {
            layer,
            chunks: bytes.iter().map(|&bytes| ChunkShape { bytes, align: 1 }).collect(),
        };
        BlockShape::new(vec![layer(0, &[10, 6]), layer(1, &[4]), layer(2, &[10, 10])]).unwrap()
    }

    #[test]
    fn at_least_one_fits_and_never_more_than_fit() {
        let layers = |layers, blocks, bytes| fitting_layers(&shape(), &layers, blocks, bytes);
        assert_eq!((layers(0..3, 1, 1000), layers(0..3, 2, 40), layers(0..3, 2, 39)), (0..3, 0..2, 0..1));
        assert_eq!((layers(1..3, 1, 24), layers(1..3, 1, 23), layers(2..3, 9, 1)), (1..3, 1..2, 2..3));
        assert_eq!((fitting(100, 30), fitting(10, 30), fitting(u64::MAX, 1)), (3, 1, u32::MAX));
    }

    #[test]
    fn every_wanted_chunk_lies_where_its_range_says() {
        let shape = shape();
        for (order, window) in [
            (Order::Blocks, Window { blocks: 4..7, layers: 1..3 }),
            (Order::Layers, Window { blocks: 4..7, layers: 0..2 }),
            (Order::Layers, Window { blocks: 4..7, layers: 2..3 }),
        ] {
            let memory =
                SharedBuf::new(&Region::anonymous(4096).unwrap(), 0, window.bytes(&shape) as usize).unwrap();
            let placed = place(order, &shape, &window, &memory).unwrap();
            let mut expected = Vec::new();
            for layer in window.layers.clone() {
                let sizes = chunks(&shape).enumerate().filter(|(_, (at, _))| *at == layer);
                for (part, (_, chunk)) in sizes {
                    for block in 0..3 {
                        let found = placed.chunk(part as u32, block, chunk.bytes).unwrap();
                        assert_eq!(found.region().id(), memory.region().id());
                        expected.push((found.offset() as u64, chunk.bytes));
                    }
                }
            }
            let mut told = Vec::new();
            for layer in window.layers.clone() {
                told.extend(ranges(order, &shape, &window, layer, 0..3));
            }
            let bytes = |list: &[(u64, u64)]| -> std::collections::BTreeSet<u64> {
                list.iter().flat_map(|&(at, len)| at..at + len).collect()
            };
            assert_eq!(bytes(&told), bytes(&expected), "{order:?} {window:?}");
            assert_eq!(bytes(&expected).len() as u64, window.bytes(&shape));
        }
    }
}
