//! The progress and the end of a read: the same for every source and every reader.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Order, ReadEnd};
use crate::error::Reason;

/// The complete part of a read, and its failed blocks.
#[derive(Clone, Debug)]
pub struct ReadProgress {
    order: Order,
    /// Blocks of the request.
    blocks: u32,
    /// The wanted layers of the shape.
    layers: Range<u32>,
    /// Leading blocks that are good so far.
    good: u32,
    /// In layer order: leading layers that are complete.
    layers_done: u32,
    /// In block order: blocks that are complete, in the order of the request.
    blocks_done: Vec<u32>,
    failures: BTreeMap<u32, Reason>,
}

impl ReadProgress {
    /// The progress of a read of `blocks` blocks that has delivered nothing.
    pub fn new(order: Order, blocks: u32, layers: Range<u32>) -> Self {
        let most = if order == Order::Blocks { blocks as usize } else { 0 };
        let (blocks_done, failures) = (Vec::with_capacity(most), BTreeMap::new());
        Self { order, blocks, layers, good: blocks, layers_done: 0, blocks_done, failures }
    }

    /// The order of delivery.
    pub fn order(&self) -> Order {
        self.order
    }

    /// The wanted layers.
    pub fn layers(&self) -> &Range<u32> {
        &self.layers
    }

    /// Leading blocks that are good so far.
    pub fn good(&self) -> u32 {
        self.good
    }

    /// In layer order: leading layers that are complete.
    pub fn layers_done(&self) -> u32 {
        self.layers_done
    }

    /// In block order: whether this block is complete.
    pub fn is_block_done(&self, block: u32) -> bool {
        self.blocks_done.binary_search(&block).is_ok()
    }

    /// Whether a layer of a block was announced as complete: `at` counts the wanted layers.
    pub fn is_announced(&self, at: u32, block: u32) -> bool {
        match self.order {
            Order::Layers => at < self.layers_done && block < self.good,
            Order::Blocks => self.is_block_done(block),
        }
    }

    /// Limits the number of good leading blocks.
    pub fn keep_leading(&mut self, blocks: u32) {
        self.good = self.good.min(blocks);
    }

    /// Records that the next layer of all good blocks is complete.
    pub fn layer_done(&mut self) {
        self.layers_done = self.layers_done.saturating_add(1).min(self.layers.len() as u32);
    }

    /// Records that a block is complete. False, and nothing is recorded, if a later block was complete before: blocks arrive in the order
    /// of the request.
    pub fn block_done(&mut self, block: u32) -> bool {
        let follows = block < self.blocks && self.blocks_done.last().is_none_or(|last| *last < block);
        if follows {
            self.blocks_done.push(block);
        }
        follows
    }

    /// The first failed block so far, and its reason.
    pub fn first_failure(&self) -> Option<(u32, Reason)> {
        self.failures.first_key_value().map(|(block, reason)| (*block, reason.clone()))
    }

    /// Whether a block failed.
    pub fn has_failed(&self, block: u32) -> bool {
        self.failures.contains_key(&block)
    }

    /// Records that a block failed, so that later blocks are not leading blocks. The first reason stays.
    pub fn fail(&mut self, block: u32, reason: Reason) {
        self.keep_leading(block);
        self.failures.entry(block).or_insert(reason);
    }

    /// The end of a read that reached its end, or that ended early because of its deadline or a missing resource (`early` is the reason):
    /// the results of each block so far stay.
    pub fn end(&self, early: Option<&Reason>) -> ReadEnd {
        let mut failures = self.failures.clone();
        let all = early.is_none() || self.order == Order::Blocks;
        if let Some(reason) = early.filter(|_| self.order == Order::Blocks) {
            // Blocks that were not read to their end have no other reason.
            for block in (0..self.blocks).filter(|&block| !self.is_block_done(block)) {
                failures.entry(block).or_insert_with(|| reason.clone());
            }
        }
        let first_failed = failures.keys().next().copied().filter(|_| self.order == Order::Blocks);
        ReadEnd {
            usable_blocks: self.good.min(first_failed.unwrap_or(self.blocks)),
            usable_layers: if all { self.layers.len() as u32 } else { self.layers_done },
            failures: failures.into_iter().collect(),
            held_bytes: 0,
        }
    }

    /// The end of an interrupted read: announced bytes are good, and no others.
    pub fn broken(&self, reason: &Reason) -> ReadEnd {
        let leading = (0u32..).zip(&self.blocks_done).take_while(|(at, block)| at == *block).count() as u32;
        let (usable_blocks, usable_layers) = match (self.order, self.layers_done) {
            (Order::Blocks, _) => (leading, self.layers.len() as u32),
            (Order::Layers, 0) => (0, 0),
            (Order::Layers, done) => (self.good, done),
        };
        let failed = |block: &u32| self.order == Order::Layers || !self.is_block_done(*block);
        let failures = (0..self.blocks).filter(failed).map(|block| (block, reason.clone())).collect();
        ReadEnd { usable_blocks, usable_layers, failures, held_bytes: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::SpaceCause;

    const LATE: Reason = Reason::DeadlinePassed;

    fn blocks(done: &[u32]) -> ReadProgress {
        let mut progress = ReadProgress::new(Order::Blocks, 4, 0..3);
        done.iter().for_each(|block| assert!(progress.block_done(*block)));
        progress
    }

    #[test]
    fn a_block_that_nothing_was_said_of_failed_for_what_ended_the_read() {
        let mut progress = blocks(&[0, 2]);
        progress.fail(1, Reason::NoSpace(SpaceCause::Disk));
        progress.keep_leading(1);
        let end = progress.end(Some(&LATE));
        assert_eq!((end.usable_blocks, end.usable_layers), (1, 3));
        assert_eq!(end.failures, [(1, Reason::NoSpace(SpaceCause::Disk)), (3, LATE)]);
        assert_eq!(progress.end(None).failures, [(1, Reason::NoSpace(SpaceCause::Disk))]);
        let broken = progress.broken(&LATE);
        assert_eq!((broken.usable_blocks, broken.failures), (1, vec![(1, LATE), (3, LATE)]));
    }

    #[test]
    fn a_read_by_layers_that_ends_early_has_the_layers_that_were_announced() {
        let mut progress = ReadProgress::new(Order::Layers, 4, 2..5);
        assert_eq!(
            progress.broken(&LATE),
            ReadEnd { failures: progress.broken(&LATE).failures, ..ReadEnd::default() }
        );
        progress.layer_done();
        progress.keep_leading(3);
        progress.fail(3, Reason::NoSpace(SpaceCause::Disk));
        let (late, whole, broken) = (progress.end(Some(&LATE)), progress.end(None), progress.broken(&LATE));
        assert_eq!((late.usable_blocks, late.usable_layers, late.failures.len()), (3, 1, 1));
        assert_eq!((whole.usable_blocks, whole.usable_layers), (3, 3));
        assert_eq!((broken.usable_blocks, broken.usable_layers, broken.failures.len()), (3, 1, 4));
        assert!(progress.is_announced(0, 2) && !progress.is_announced(0, 3) && !progress.is_announced(1, 0));
    }

    #[test]
    fn a_block_is_done_once_and_in_order() {
        let mut progress = blocks(&[0, 2]);
        assert_eq!([1, 2, 4, 3].map(|block| progress.block_done(block)), [false, false, false, true]);
        assert_eq!([0, 1, 2].map(|block| progress.is_block_done(block)), [true, false, true]);
    }
}
