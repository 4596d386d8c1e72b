//! The course of a read: which window comes after which.
//!
//! It is arithmetic on what is asked for, so that windows can be fetched before those in front of them were sent.
//! What goes wrong in a window changes the rest of the course; then what was fetched ahead is thrown away.

use std::ops::Range;

use kvarts_layout::BlockShape;
use kvarts_store::api::Order;

use super::window::{self, Window};

/// Where in a read the next window begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    /// Ordinal of the request.
    pub(crate) block: u32,
    /// Layer of the shape.
    pub(crate) layer: u32,
}

/// What is asked for, as far as it is still of use.
#[derive(Clone, Debug)]
pub(crate) struct Course<'a> {
    pub(crate) order: Order,
    pub(crate) shape: &'a BlockShape,
    pub(crate) layers: Range<u32>,
    /// Leading blocks that are wanted.
    pub(crate) blocks: u32,
    /// Bytes of one window, if a layer of a block is not more.
    pub(crate) budget: u64,
}

impl Course<'_> {
    /// The window at a place, and where the one after it begins; none at the end.
    pub(crate) fn window(&self, at: Place) -> Option<(Window, Place)> {
        match self.order {
            Order::Blocks => self.by_blocks(at),
            Order::Layers => self.by_layers(at),
        }
    }

    /// Whole blocks; of one that is more than a window, some layers at a time.
    fn by_blocks(&self, at: Place) -> Option<(Window, Place)> {
        if at.block >= self.blocks {
            return None;
        }
        let all = self.layers.clone();
        let each = window::layers_bytes(self.shape, &all);
        if at.layer == all.start && each <= self.budget {
            let some = window::fitting(self.budget, each).min(self.blocks - at.block);
            let blocks = at.block..at.block + some;
            let then = Place { block: blocks.end, layer: all.start };
            return Some((Window { blocks, layers: all }, then));
        }
        let layers = window::fitting_layers(self.shape, &(at.layer..all.end), 1, self.budget);
        let then = match layers.end == all.end {
            true => Place { block: at.block + 1, layer: all.start },
            false => Place { block: at.block, layer: layers.end },
        };
        Some((Window { blocks: at.block..at.block + 1, layers }, then))
    }

    /// Whole layers; of one that is more than a window, some blocks at a time.
    fn by_layers(&self, at: Place) -> Option<(Window, Place)> {
        if at.layer >= self.layers.end || at.block >= self.blocks {
            return None;
        }
        if at.block == 0 {
            let left = at.layer..self.layers.end;
            let layers = window::fitting_layers(self.shape, &left, self.blocks, self.budget);
            let window = Window { blocks: 0..self.blocks, layers };
            if window.bytes(self.shape) <= self.budget {
                let then = Place { block: 0, layer: window.layers.end };
                return Some((window, then));
            }
        }
        let layers = at.layer..at.layer + 1;
        let some = window::fitting(self.budget, window::layers_bytes(self.shape, &layers));
        let blocks = at.block..self.blocks.min(at.block.saturating_add(some));
        let then = match blocks.end == self.blocks {
            true => Place { block: 0, layer: layers.end },
            false => Place { block: blocks.end, layer: layers.start },
        };
        Some((Window { blocks, layers }, then))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_layout::{ChunkShape, LayerShape};

    fn shape(layers: &[u64]) -> BlockShape {
        let layer =
            |(layer, &bytes): (u32, &u64)| LayerShape { layer, chunks: vec![ChunkShape { bytes, align: 1 }] };
        BlockShape::new((0..).zip(layers).map(layer).collect()).unwrap()
    }

    /// Every (block, layer) of a read in the order in which its windows come; none is larger than it must be.
    fn all(order: Order, sizes: &[u64], layers: Range<u32>, blocks: u32, budget: u64) -> Vec<(u32, u32)> {
        let shape = shape(sizes);
        let course = Course { order, shape: &shape, layers: layers.clone(), blocks, budget };
        let (mut at, mut found) = (Place { block: 0, layer: layers.start }, Vec::new());
        while let Some((window, then)) = course.window(at) {
            let single = window.blocks.len() == 1 && window.layers.len() == 1;
            assert!(window.bytes(&shape) <= budget || single, "{window:?}");
            match order {
                Order::Blocks => found.extend(
                    window
                        .blocks
                        .clone()
                        .flat_map(|block| window.layers.clone().map(move |one| (block, one))),
                ),
                Order::Layers => found.extend(
                    window
                        .layers
                        .clone()
                        .flat_map(|one| window.blocks.clone().map(move |block| (block, one))),
                ),
            }
            at = then;
        }
        found
    }

    #[test]
    fn the_windows_of_a_read_are_all_of_it_once_and_in_order() {
        for budget in [1, 7, 10, 25, 60, 1000] {
            for (layers, blocks) in [(0..3, 5), (1..3, 1), (2..3, 9), (0..1, 2)] {
                let sizes = [10, 4, 20];
                let expected: Vec<(u32, u32)> =
                    (0..blocks).flat_map(|block| layers.clone().map(move |layer| (block, layer))).collect();
                assert_eq!(all(Order::Blocks, &sizes, layers.clone(), blocks, budget), expected);
                let expected: Vec<(u32, u32)> =
                    layers.clone().flat_map(|layer| (0..blocks).map(move |block| (block, layer))).collect();
                assert_eq!(all(Order::Layers, &sizes, layers.clone(), blocks, budget), expected);
            }
        }
    }

    #[test]
    fn a_read_of_nothing_more_has_ended() {
        let shape = shape(&[10, 10]);
        for order in [Order::Blocks, Order::Layers] {
            let course = Course { order, shape: &shape, layers: 0..2, blocks: 0, budget: 100 };
            assert_eq!(course.window(Place { block: 0, layer: 0 }), None);
        }
        let course = Course { order: Order::Layers, shape: &shape, layers: 0..2, blocks: 3, budget: 100 };
        assert_eq!(course.window(Place { block: 0, layer: 2 }), None);
    }
}
