//! How a read is cut into pieces.
//!
//! In layer order a piece is some blocks of one layer, or of a few small ones; in block order whole blocks, or some layers of a
//! large one. Its blocks follow each other, and all of them are where its paths lead.

use std::ops::Range;

use kvarts_cluster::dealer::PathSet;
use kvarts_layout::BlockShape;
use kvarts_layout::plan::{Order, Tile};

/// Pieces are not smaller than this for the sake of a path that has some of their blocks: a request costs something too, and
/// what is no longer than [`SMALL_READ_BYTES`](kvarts_contract::api::SMALL_READ_BYTES) goes before other reads at a disk.
pub(crate) const PIECE_BYTES_LEAST: u64 = 512 << 10;
/// Nor larger, however fast the paths are.
const PIECE_BYTES_MOST: u64 = 4 << 20;
/// How long a path should take for a piece.
const PIECE_SECONDS: f64 = 0.002;
/// Into how many pieces a read is cut at least, if they are not too small then.
const PIECES_LEAST: u64 = 16;

/// How long the pieces of a read should be; `slowest` is the rate of its slowest path, `least` the least that one should have.
pub(super) fn piece_bytes(total: u64, slowest: Option<f64>, least: u64) -> u64 {
    let by_rate = slowest.map_or(1 << 20, |rate| (rate * PIECE_SECONDS) as u64);
    by_rate.min(total / PIECES_LEAST).clamp(least, PIECE_BYTES_MOST)
}

/// Where a piece stands in the order of delivery.
pub(super) fn place(order: Order, tile: &Tile) -> u64 {
    let (layer, block) = (u64::from(tile.layers.start), u64::from(tile.blocks.start));
    match order {
        Order::Layers => layer << 32 | block,
        Order::Blocks => block << 32 | layer,
    }
}

/// Where the pieces begin that stand behind what the reader waits for first: a layer, or a block.
pub(super) fn after_first(order: Order, layers: &Range<u32>) -> u64 {
    match order {
        Order::Layers => (u64::from(layers.start) + 1) << 32,
        Order::Blocks => 1 << 32,
    }
}

/// Blocks that follow each other, and the paths that lead to all of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Run {
    pub(super) blocks: Range<u32>,
    pub(super) paths: PathSet,
}

/// Runs of blocks that are in the same places.
pub(super) fn runs(copies: &[PathSet]) -> Vec<Run> {
    let mut found: Vec<Run> = Vec::new();
    for (block, paths) in (0u32..).zip(copies.iter().copied()) {
        match found.last_mut() {
            Some(last) if last.paths == paths => last.blocks.end = block + 1,
            _ => found.push(Run { blocks: block..block + 1, paths }),
        }
    }
    found
}

/// The same, where runs of fewer than `least` blocks go together with their neighbours: not at the cost of a path that leads to
/// a longer one.
fn joined(runs: &[Run], least: u64) -> Vec<Run> {
    let is_small = |run: &Run| u64::from(run.blocks.end - run.blocks.start) < least;
    let mut found: Vec<Run> = Vec::new();
    for run in runs {
        if let Some(last) = found.last_mut() {
            let both = last.paths.and(run.paths);
            let keeps = |run: &Run| is_small(run) || run.paths == both;
            let follows = last.blocks.end == run.blocks.start;
            if follows && !both.is_empty() && (is_small(last) || is_small(run)) && keeps(last) && keeps(run) {
                *last = Run { blocks: last.blocks.start..run.blocks.end, paths: both };
                continue;
            }
        }
        found.push(run.clone());
    }
    found
}

/// What is cut.
#[derive(Clone, Debug)]
pub(super) struct Whole<'a> {
    pub(super) shape: &'a BlockShape,
    pub(super) order: Order,
    pub(super) layers: Range<u32>,
    /// How long a piece should be.
    pub(super) bytes: u64,
    /// And at least, where a path has only some of its blocks.
    pub(super) least: u64,
}

impl Whole<'_> {
    /// The pieces of blocks that are in these places, in the order of delivery.
    pub(super) fn cut(&self, copies: &[PathSet]) -> Vec<(Tile, PathSet)> {
        let mut runs = runs(copies);
        runs.retain(|run| !run.paths.is_empty());
        let mut found = Vec::new();
        let block = self.shape.layers_bytes(&self.layers);
        if self.order == Order::Blocks && block > self.bytes {
            for Run { blocks, paths } in runs {
                for block in blocks {
                    let some = self.bands(1).into_iter();
                    found.extend(some.map(|layers| (Tile { blocks: block..block + 1, layers }, paths)));
                }
            }
            return found;
        }
        let bands = match self.order {
            Order::Blocks => vec![self.layers.clone()],
            Order::Layers => self.bands(copies.len() as u64),
        };
        for layers in bands {
            let each = self.shape.layers_bytes(&layers).max(1);
            for Run { blocks, paths } in joined(&runs, self.least.div_ceil(each)) {
                let count = u64::from(blocks.end - blocks.start);
                let pieces = count.saturating_mul(each).div_ceil(self.bytes).clamp(1, count);
                let at = |piece: u64| blocks.start + (count * piece / pieces) as u32;
                for piece in 0..pieces {
                    let tile = Tile { blocks: at(piece)..at(piece + 1), layers: layers.clone() };
                    found.push((tile, paths));
                }
            }
        }
        found
    }

    /// Layers that go together: as many as are no more than a piece with `blocks` blocks.
    fn bands(&self, blocks: u64) -> Vec<Range<u32>> {
        let mut found: Vec<(Range<u32>, u64)> = Vec::new();
        for layer in self.layers.clone() {
            let bytes = self.shape.layers_bytes(&(layer..layer + 1)).saturating_mul(blocks);
            match found.last_mut() {
                Some((band, sum)) if sum.saturating_add(bytes) <= self.bytes => {
                    (band.end, *sum) = (layer + 1, *sum + bytes);
                }
                _ => found.push((layer..layer + 1, bytes)),
            }
        }
        found.into_iter().map(|(band, _)| band).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_cluster::paths::PathId;
    use kvarts_layout::{ChunkShape, LayerShape};
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn shape(layers: &[u64]) -> BlockShape {
        let layer = |(layer, bytes): (u32, &u64)| LayerShape {
            layer,
            chunks: vec![ChunkShape { bytes: *bytes, align: 1 }],
        };
        BlockShape::new((0..).zip(layers).map(layer).collect()).unwrap()
    }

    fn set(mask: u16) -> PathSet {
        (0..3).filter(|bit| mask >> bit & 1 == 1).fold(PathSet::default(), |set, bit| set.with(PathId(bit)))
    }

    proptest! {
        #[test]
        fn the_pieces_of_a_read_are_all_of_it_once_in_delivery_order_and_where_their_paths_lead(
            layers in prop::collection::vec(1u64..3 << 20, 1..9),
            masks in prop::collection::vec(0u16..8, 1..40),
            order in prop_oneof![Just(Order::Blocks), Just(Order::Layers)],
            bytes in 1000..PIECE_BYTES_MOST,
        ) {
            let (shape, copies): (_, Vec<_>) = (shape(&layers), masks.iter().map(|mask| set(*mask)).collect());
            let whole = Whole { shape: &shape, order, layers: 0..layers.len() as u32, bytes, least: bytes.min(PIECE_BYTES_LEAST) };
            let pieces = whole.cut(&copies);
            let mut cells = BTreeSet::new();
            for (tile, paths) in &pieces {
                let single = tile.block_count() == 1 && tile.layer_count() == 1;
                let most = bytes * 2;
                prop_assert!(tile.bytes(&shape) <= most || single, "{:?}", tile);
                prop_assert!(!paths.is_empty());
                for block in tile.blocks.clone() {
                    prop_assert_eq!(paths.and(copies[block as usize]), *paths);
                    for layer in tile.layers.clone() {
                        prop_assert!(cells.insert((layer, block)), "twice");
                    }
                }
            }
            let here = copies.iter().filter(|paths| !paths.is_empty()).count();
            prop_assert_eq!(cells.len(), here * layers.len());
            prop_assert!(pieces.iter().map(|(tile, _)| place(order, tile)).is_sorted_by(|a, b| a < b));
        }
    }

    #[test]
    fn pieces_are_as_long_as_their_paths_are_fast_and_equally_long() {
        assert_eq!(piece_bytes(1 << 30, None, PIECE_BYTES_LEAST), 1 << 20);
        assert_eq!(piece_bytes(1 << 30, Some(5e9), PIECE_BYTES_LEAST), 4 << 20);
        assert_eq!(piece_bytes(1 << 30, Some(1e8), PIECE_BYTES_LEAST), 512 << 10);
        assert_eq!(piece_bytes(1 << 20, Some(1e9), PIECE_BYTES_LEAST), 512 << 10);
        let shape = shape(&[64 << 10; 4]);
        let whole = Whole {
            shape: &shape,
            order: Order::Layers,
            layers: 0..4,
            bytes: 1 << 20,
            least: PIECE_BYTES_LEAST,
        };
        let lengths: Vec<_> = whole.cut(&[set(1); 40]).iter().map(|(tile, _)| tile.block_count()).collect();
        assert_eq!(lengths, [13, 13, 14].repeat(4));
    }
}
