//! Tiles: a read cut into pieces, for each of which there is memory at a time.
//!
//! A tile is some layers of some blocks. The tiles of a read, one after the other, are its blocks and layers in the order
//! in which they are delivered: whole layers of all blocks or whole blocks while they fit, then some blocks of one layer or
//! some layers of one block. It is arithmetic on what is asked for, so a tile can be cut before those in front of it have
//! been read, each for as many bytes as there are then.
//!
//! A tile's bytes lie in one stretch of memory without padding: in block order `[block][layer][part]`, in layer order
//! `[layer][part][block]`.

use super::{Address, Order, PartTarget};
use crate::shape::{BlockShape, ChunkShape};
use std::ops::Range;

/// Some layers of some blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tile {
    /// Ordinals of the request.
    pub blocks: Range<u32>,
    /// Layers of the shape.
    pub layers: Range<u32>,
}

/// A stretch of a tile's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TileRange {
    /// Bytes from the tile's first one.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
}

/// A chunk of a tile.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TileChunk {
    /// Canonical index of its part in the block.
    pub part: u32,
    /// Its block, counted within the tile.
    pub block: u32,
    /// How many bytes.
    pub bytes: u64,
}

/// What of a read has not been cut into tiles.
#[derive(Clone, Debug)]
pub struct Tiles {
    order: Order,
    layers: Range<u32>,
    /// Leading blocks that are wanted.
    blocks: u32,
    /// The first block and layer of the next tile.
    block: u32,
    layer: u32,
}

impl Tiles {
    /// All of a read of these layers of the leading `blocks` blocks of a request.
    pub fn new(order: Order, layers: Range<u32>, blocks: u32) -> Self {
        let (block, layer) = (0, layers.start);
        Self { order, layers, blocks, block, layer }
    }

    /// Leading blocks that are wanted.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// The next tile: at most `bytes`, unless a layer of one block alone is more; none at the end. It stays the next until
    /// [`Tiles::pass`].
    pub fn next(&self, shape: &BlockShape, bytes: u64) -> Option<Tile> {
        if self.block >= self.blocks || self.layer >= self.layers.end {
            return None;
        }
        Some(match self.order {
            Order::Blocks => self.by_blocks(shape, bytes),
            Order::Layers => self.by_layers(shape, bytes),
        })
    }

    /// Whole blocks; of one that is more than a tile, some layers at a time.
    fn by_blocks(&self, shape: &BlockShape, bytes: u64) -> Tile {
        let each = shape.layers_bytes(&self.layers);
        if self.layer == self.layers.start && each <= bytes {
            let end = self.block.saturating_add(fitting(bytes, each)).min(self.blocks);
            return Tile { blocks: self.block..end, layers: self.layers.clone() };
        }
        let layers = fitting_layers(shape, self.layer..self.layers.end, 1, bytes);
        Tile { blocks: self.block..self.block.saturating_add(1), layers }
    }

    /// Whole layers; of one that is more than a tile, some blocks at a time.
    fn by_layers(&self, shape: &BlockShape, bytes: u64) -> Tile {
        if self.block == 0 {
            let layers = fitting_layers(shape, self.layer..self.layers.end, self.blocks, bytes);
            let tile = Tile { blocks: 0..self.blocks, layers };
            if tile.bytes(shape) <= bytes {
                return tile;
            }
        }
        let layers = self.layer..self.layer.saturating_add(1);
        let some = fitting(bytes, shape.layers_bytes(&layers));
        Tile { blocks: self.block..self.block.saturating_add(some).min(self.blocks), layers }
    }

    /// Whether a tile can be the next one, however long it is.
    pub fn accepts(&self, tile: &Tile) -> bool {
        let begins = tile.layers.start == self.layer && tile.blocks.start == self.block;
        let inside = tile.layers.end <= self.layers.end && tile.blocks.end <= self.blocks;
        let whole = match self.order {
            Order::Blocks => tile.layers == self.layers || tile.block_count() == 1,
            Order::Layers => tile.blocks == (0..self.blocks) || tile.layer_count() == 1,
        };
        begins && inside && whole && !tile.blocks.is_empty() && !tile.layers.is_empty()
    }

    /// Where the next tile begins: block and layer.
    pub fn place(&self) -> (u32, u32) {
        (self.block, self.layer)
    }

    /// Goes on behind a tile.
    pub fn pass(&mut self, tile: &Tile) {
        let (next_block, next_layer) =
            ((tile.blocks.end, self.layers.start), (tile.blocks.start, tile.layers.end));
        (self.block, self.layer) = match self.order {
            Order::Blocks if tile.layers.end >= self.layers.end => next_block,
            Order::Blocks => next_layer,
            Order::Layers if tile.blocks.end >= self.blocks => (0, tile.layers.end),
            Order::Layers => (tile.blocks.end, tile.layers.start),
        };
    }

    /// Goes on behind the blocks of a tile, whatever layers of them are left.
    pub fn pass_blocks(&mut self, tile: &Tile) {
        (self.block, self.layer) = (tile.blocks.end, self.layers.start);
    }

    /// At most this many leading blocks are wanted from now on.
    pub fn keep_leading(&mut self, blocks: u32) {
        self.blocks = self.blocks.min(blocks);
    }
}

/// How many things of `each` bytes fit into `bytes`: at least one.
fn fitting(bytes: u64, each: u64) -> u32 {
    u32::try_from(bytes.checked_div(each).unwrap_or(u64::MAX)).unwrap_or(u32::MAX).max(1)
}

/// The leading ones of `layers` of which this many blocks fit into `bytes`: at least one.
fn fitting_layers(shape: &BlockShape, layers: Range<u32>, blocks: u32, bytes: u64) -> Range<u32> {
    let (mut end, mut sum) = (layers.start, 0u64);
    for layer in layers.clone() {
        let next = layer.saturating_add(1);
        sum = sum.saturating_add(shape.layers_bytes(&(layer..next)).saturating_mul(u64::from(blocks)));
        if end > layers.start && sum > bytes {
            break;
        }
        end = next;
    }
    layers.start..end
}

/// The chunks of a shape with their layers, in canonical order.
fn chunks(shape: &BlockShape) -> impl Iterator<Item = (u32, &ChunkShape)> {
    (0u32..).zip(shape.layers()).flat_map(|(at, layer)| layer.chunks.iter().map(move |chunk| (at, chunk)))
}

impl Tile {
    /// How many blocks.
    pub fn block_count(&self) -> u32 {
        self.blocks.end.saturating_sub(self.blocks.start)
    }

    /// How many layers.
    pub fn layer_count(&self) -> u32 {
        self.layers.end.saturating_sub(self.layers.start)
    }

    /// Bytes of memory that it takes.
    pub fn bytes(&self, shape: &BlockShape) -> u64 {
        shape.layers_bytes(&self.layers).saturating_mul(u64::from(self.block_count()))
    }

    /// Where the chunks of each part lie if the tile's memory begins at `at`: its first block is slot zero. The parts of
    /// other layers have no place.
    pub fn targets(&self, order: Order, shape: &BlockShape, at: Address) -> Vec<Option<PartTarget>> {
        let (block_bytes, blocks) = (shape.layers_bytes(&self.layers), u64::from(self.block_count()));
        let Address { memory, offset: mut base } = at;
        let target = |(layer, chunk): (u32, &ChunkShape)| {
            let (stride, bytes) = match order {
                Order::Blocks => (block_bytes, chunk.bytes),
                Order::Layers => (chunk.bytes, chunk.bytes.saturating_mul(blocks)),
            };
            self.layers.contains(&layer).then(|| {
                let target = PartTarget { memory, base, stride };
                base = base.saturating_add(bytes);
                target
            })
        };
        chunks(shape).map(target).collect()
    }

    /// Where the blocks `blocks` (counted within the tile) of what is delivered together lie, in the order of delivery:
    /// in layer order of one layer, in block order of all layers of the tile.
    pub fn ranges(&self, order: Order, shape: &BlockShape, layer: u32, blocks: Range<u32>) -> Vec<TileRange> {
        let (first, count) = (u64::from(blocks.start), u64::from(blocks.end.saturating_sub(blocks.start)));
        let range = |at: u64, each: u64| TileRange {
            offset: at.saturating_add(first.saturating_mul(each)),
            bytes: count.saturating_mul(each),
        };
        if order == Order::Blocks {
            return vec![range(0, shape.layers_bytes(&self.layers))];
        }
        let all = u64::from(self.block_count());
        let mut at = shape.layers_bytes(&(self.layers.start..layer)).saturating_mul(all);
        let mut found = Vec::new();
        for (_, chunk) in chunks(shape).filter(|(of, _)| *of == layer) {
            found.push(range(at, chunk.bytes));
            at = at.saturating_add(chunk.bytes.saturating_mul(all));
        }
        found
    }

    /// The chunks of what [`Tile::ranges`] gives, in the same order.
    pub fn chunks(&self, order: Order, shape: &BlockShape, layer: u32, blocks: Range<u32>) -> Vec<TileChunk> {
        let layers =
            if order == Order::Blocks { self.layers.clone() } else { layer..layer.saturating_add(1) };
        let parts = (0u32..).zip(chunks(shape)).filter(|(_, (of, _))| layers.contains(of));
        let parts: Vec<(u32, u64)> = parts.map(|(part, (_, chunk))| (part, chunk.bytes)).collect();
        let of = |&(part, bytes): &(u32, u64), block| TileChunk { part, block, bytes };
        match order {
            Order::Blocks => blocks.flat_map(|block| parts.iter().map(move |part| of(part, block))).collect(),
            Order::Layers => {
                parts.iter().flat_map(|part| blocks.clone().map(move |block| of(part, block))).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{MemoryId, Placement};
    use crate::shape::LayerShape;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn shape(layers: &[Vec<u64>]) -> BlockShape {
        let layer = |(layer, sizes): (u32, &Vec<u64>)| LayerShape {
            layer,
            chunks: sizes.iter().map(|&bytes| ChunkShape { bytes, align: 1 }).collect(),
        };
        BlockShape::new((0..).zip(layers).map(layer).collect()).unwrap()
    }

    fn cells(order: Order, layers: Range<u32>, blocks: Range<u32>) -> Vec<(u32, u32)> {
        match order {
            Order::Blocks => {
                blocks.flat_map(|block| layers.clone().map(move |layer| (block, layer))).collect()
            }
            Order::Layers => {
                layers.flat_map(|layer| blocks.clone().map(move |block| (block, layer))).collect()
            }
        }
    }

    /// A shape, the wanted layers, how many blocks, and how many bytes each next tile may have.
    fn cases() -> impl Strategy<Value = (BlockShape, Range<u32>, u32, Vec<u64>)> {
        let shapes = prop::collection::vec(prop::collection::vec(1u64..40, 1..4), 1..7);
        (shapes, 0u32..7, 1u32..8, 1u32..12, prop::collection::vec(1u64..400, 1..9)).prop_map(
            |(layers, first, count, blocks, budgets)| {
                let first = first.min(layers.len() as u32 - 1);
                let end = (first + count).min(layers.len() as u32);
                (shape(&layers), first..end, blocks, budgets)
            },
        )
    }

    fn orders() -> impl Strategy<Value = Order> {
        prop_oneof![Just(Order::Blocks), Just(Order::Layers)]
    }

    proptest! {
        #[test]
        fn the_tiles_of_a_read_are_all_of_it_once_in_delivery_order(
            (shape, layers, blocks, budgets) in cases(),
            order in orders(),
        ) {
            let mut tiles = Tiles::new(order, layers.clone(), blocks);
            let (mut found, mut budgets) = (Vec::new(), budgets.iter().cycle());
            while let Some(tile) = tiles.next(&shape, *budgets.next().unwrap()) {
                prop_assert!(!tile.blocks.is_empty() && !tile.layers.is_empty());
                prop_assert!(tiles.accepts(&tile));
                found.extend(cells(order, tile.layers.clone(), tile.blocks.clone()));
                tiles.pass(&tile);
            }
            prop_assert_eq!(found, cells(order, layers, 0..blocks));
        }

        #[test]
        fn a_tile_has_no_more_bytes_than_it_may_unless_it_is_one_layer_of_one_block(
            (shape, layers, blocks, budgets) in cases(),
            order in orders(),
        ) {
            let mut tiles = Tiles::new(order, layers, blocks);
            for budget in budgets.iter().cycle() {
                let Some(tile) = tiles.next(&shape, *budget) else { break };
                let single = tile.block_count() == 1 && tile.layer_count() == 1;
                prop_assert!(tile.bytes(&shape) <= *budget || single, "{:?} of {}", tile, budget);
                tiles.pass(&tile);
            }
        }

        #[test]
        fn tiles_that_are_accepted_are_all_of_a_read_once_in_delivery_order(
            (shape, layers, blocks, _) in cases(),
            order in orders(),
            ends in prop::collection::vec((0u32..12, 0u32..8), 1..40),
        ) {
            let mut tiles = Tiles::new(order, layers.clone(), blocks);
            let (mut found, mut ends) = (Vec::new(), ends.iter().cycle());
            while let Some(least) = tiles.next(&shape, 0) {
                // What is refused is passed over for the smallest.
                let (more_blocks, more_layers) = *ends.next().unwrap();
                let Tile { blocks, layers } = least.clone();
                let wish = Tile {
                    blocks: blocks.start..blocks.end + more_blocks,
                    layers: layers.start..layers.end + more_layers,
                };
                let tile = if tiles.accepts(&wish) { wish } else { least };
                found.extend(cells(order, tile.layers.clone(), tile.blocks.clone()));
                tiles.pass(&tile);
            }
            prop_assert_eq!(found, cells(order, layers, 0..blocks));
        }

        #[test]
        fn a_read_that_gives_blocks_up_has_all_of_the_others_once(
            (shape, layers, blocks, budgets) in cases(),
            order in orders(),
            (after, keep) in (0usize..6, 0u32..12),
        ) {
            let mut tiles = Tiles::new(order, layers.clone(), blocks);
            let (mut found, mut left) = (Vec::new(), 0..blocks);
            for (at, budget) in budgets.iter().cycle().enumerate() {
                let Some(tile) = tiles.next(&shape, *budget) else { break };
                found.extend(cells(order, tile.layers.clone(), tile.blocks.clone()));
                if at == after {
                    tiles.keep_leading(keep);
                    left = 0..blocks.min(keep);
                }
                tiles.pass(&tile);
            }
            let missed = cells(order, layers, left).into_iter().find(|cell| !found.contains(cell));
            prop_assert_eq!(missed, None);
            let once: BTreeSet<_> = found.iter().collect();
            prop_assert_eq!(once.len(), found.len());
        }

        #[test]
        fn each_chunk_of_a_tile_lies_where_its_ranges_say_and_nothing_else_does(
            (shape, layers, blocks, _) in cases(),
            order in orders(),
            first in 0u32..5,
        ) {
            let tile = Tile { blocks: first..first + blocks, layers: layers.clone() };
            let at = Address { memory: MemoryId(0), offset: 4096 };
            let targets = tile.targets(order, &shape, at);
            let placement = Placement::strided(&shape, &targets, blocks).unwrap();
            let (mut told, mut end) = (Vec::new(), 0);
            let steps: Vec<(u32, Range<u32>)> = match order {
                Order::Layers => layers.map(|layer| (layer, 0..blocks)).collect(),
                Order::Blocks => (0..blocks).map(|block| (0, block..block + 1)).collect(),
            };
            for (layer, some) in steps {
                let mut chunks = tile.chunks(order, &shape, layer, some.clone()).into_iter();
                for TileRange { offset, bytes } in tile.ranges(order, &shape, layer, some) {
                    prop_assert_eq!(offset, end, "ranges follow each other");
                    end += bytes;
                    let mut next = offset;
                    while next < end {
                        let TileChunk { part, block, bytes } = chunks.next().unwrap();
                        prop_assert_eq!(placement.address(part, block).unwrap().offset, 4096 + next);
                        told.push((part, block));
                        next += bytes;
                    }
                    prop_assert_eq!(next, end);
                }
                prop_assert_eq!(chunks.next(), None);
            }
            prop_assert_eq!(end, tile.bytes(&shape));
            told.sort_unstable();
            told.dedup();
            let wanted = targets.iter().flatten().count() * blocks as usize;
            prop_assert_eq!(told.len(), wanted);
        }
    }

    #[test]
    fn a_read_of_nothing_more_has_ended() {
        let shape = shape(&[vec![10], vec![10]]);
        for order in [Order::Blocks, Order::Layers] {
            let mut tiles = Tiles::new(order, 0..2, 3);
            let all = tiles.next(&shape, 1000).unwrap();
            assert_eq!(all, Tile { blocks: 0..3, layers: 0..2 });
            tiles.pass(&all);
            assert_eq!(tiles.next(&shape, 1000), None);
            assert_eq!(Tiles::new(order, 0..2, 0).next(&shape, 1000), None);
        }
    }

    #[test]
    fn the_rest_of_a_block_is_passed_over_with_it() {
        let shape = shape(&[vec![10], vec![10], vec![10]]);
        let mut tiles = Tiles::new(Order::Blocks, 0..3, 2);
        let first = tiles.next(&shape, 10).unwrap();
        assert_eq!(first, Tile { blocks: 0..1, layers: 0..1 });
        tiles.pass_blocks(&first);
        assert_eq!(tiles.next(&shape, 10), Some(Tile { blocks: 1..2, layers: 0..1 }));
    }
}
