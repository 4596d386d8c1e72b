//! Which pieces of an arena are free: powers of two that split and join again with their twin.
//!
//! Whatever was taken in whatever order, when everything is back the arena is whole.

use std::collections::BTreeSet;

/// The smallest piece.
pub const PIECE_MIN: u64 = 64 << 10;

/// How full an arena is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ArenaUse {
    /// Bytes that are handed out.
    pub used: u64,
    /// The most that ever were at once.
    pub used_max: u64,
    /// Bytes of the largest piece that could be had now.
    pub largest_free: u64,
    /// Bytes in all.
    pub total: u64,
}

/// Bytes of a piece of an order.
pub(crate) fn size(order: usize) -> u64 {
    PIECE_MIN << order
}

/// The free pieces of a range of memory, by their sizes.
#[derive(Debug)]
pub(crate) struct Buddy {
    /// Offsets of free pieces, by the power of two of their size above the smallest.
    pieces: Vec<BTreeSet<u64>>,
    used: u64,
    used_max: u64,
    total: u64,
}

impl Buddy {
    /// All of `total` bytes, a multiple of the smallest piece.
    pub(crate) fn new(total: u64) -> Self {
        let orders = (total / PIECE_MIN).max(1).ilog2() as usize + 1;
        let mut pieces = vec![BTreeSet::new(); orders];
        // The largest pieces first: a size that is no power of two is a row of them.
        let mut at = 0;
        for (order, free) in pieces.iter_mut().enumerate().rev() {
            while total - at >= size(order) {
                free.insert(at);
                at += size(order);
            }
        }
        Self { pieces, used: 0, used_max: 0, total }
    }

    /// The largest piece of at most `most` bytes that is free, if one of at least `least` bytes is: where it begins,
    /// and its order.
    pub(crate) fn take(&mut self, least: u64, most: u64) -> Option<(u64, usize)> {
        let orders = self.pieces.len();
        let least = (0..orders).find(|&order| size(order) >= least)?;
        let wanted = (least..orders).rev().find(|&order| size(order) <= most).unwrap_or(least);
        // The smallest free piece that is large enough, or else the largest that will do.
        let is_free = |&order: &usize| self.pieces.get(order).is_some_and(|free| !free.is_empty());
        let larger = (wanted..orders).find(is_free);
        let mut order = larger.or_else(|| (least..wanted).rev().find(is_free))?;
        let offset = self.pieces.get_mut(order)?.pop_first()?;
        while order > wanted {
            order -= 1;
            self.pieces.get_mut(order)?.insert(offset + size(order));
        }
        self.used += size(order);
        self.used_max = self.used_max.max(self.used);
        Some((offset, order))
    }

    /// Takes a piece back.
    pub(crate) fn give(&mut self, mut offset: u64, mut order: usize) {
        self.used -= size(order);
        while order + 1 < self.pieces.len()
            && self.pieces.get_mut(order).is_some_and(|free| free.remove(&(offset ^ size(order))))
        {
            offset &= !size(order);
            order += 1;
        }
        if let Some(free) = self.pieces.get_mut(order) {
            free.insert(offset);
        }
    }

    /// How full it is.
    pub(crate) fn usage(&self) -> ArenaUse {
        let largest = self.pieces.iter().rposition(|pieces| !pieces.is_empty());
        ArenaUse {
            used: self.used,
            used_max: self.used_max,
            largest_free: largest.map_or(0, size),
            total: self.total,
        }
    }

    /// The largest piece that there can ever be.
    pub(crate) fn piece_max(&self) -> u64 {
        size(self.pieces.len() - 1)
    }
}
