//! The production of each block that several reads must share.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use kvarts_layout::OriginId;

use crate::clock::Nanos;
use crate::sync::{Mutex, MutexGuard};

/// The lifetime of a production: a copy of it ends no later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Life {
    /// The time of its first storage on any node, in milliseconds since 1970. A delete removes the productions before its time, and keeps
    /// later ones.
    pub produced_ms: u64,
    /// The time of its end, by the clock of this process; `None` if it has no end of its own.
    pub ends: Option<Nanos>,
}

impl Life {
    /// Combines the lifetimes of one production from two places, neither of which keeps it longer than it lives: the later end counts.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        let ends = self.ends.zip(other.ends).map(|(one, other)| one.max(other));
        Self { produced_ms: self.produced_ms.min(other.produced_ms), ends }
    }

    /// The same lifetime, with an end at `end` or before.
    #[must_use]
    pub fn until(self, end: Nanos) -> Self {
        Self { ends: Some(self.ends.map_or(end, |own| own.min(end))), ..self }
    }
}

/// The state shared by reads that together form one read. For each block they return bytes of one production only, the first production
/// that any of them finds, or a miss. Without this state, a block that is removed and put again by another producer between two reads would
/// be a mix of both productions.
#[derive(Debug)]
pub struct Origins(Mutex<State>);

#[derive(Debug)]
struct State {
    met: Vec<Met>,
    /// Productions that are not to be had any more.
    given_up: BTreeSet<(usize, OriginId)>,
}

/// A block of reads that together are one.
#[derive(Clone, Copy, Debug, Default)]
struct Met {
    origin: Option<OriginId>,
    /// What is known of how long it lives.
    life: Option<Life>,
    /// Whether one of the reads has delivered something of it.
    read: bool,
}

impl Origins {
    fn new(met: Vec<Met>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State { met, given_up: BTreeSet::new() })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A state for `blocks` blocks, which admits the first production found of each block.
    pub fn any(blocks: usize) -> Arc<Self> {
        Self::new(vec![Met::default(); blocks])
    }

    /// A state for blocks of which the productions of some are known.
    pub fn of(met: Vec<Option<OriginId>>) -> Arc<Self> {
        let met = met.into_iter().map(|origin| Met { origin, life: None, read: origin.is_some() });
        Self::new(met.collect())
    }

    /// The number of blocks.
    pub fn len(&self) -> usize {
        self.lock().met.len()
    }

    /// Whether there are no blocks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The productions found so far.
    pub fn met(&self) -> Vec<Option<OriginId>> {
        self.lock().met.iter().map(|met| met.origin).collect()
    }

    /// Whether the production of each of these blocks is known.
    pub fn knows(&self, mut blocks: Range<usize>) -> bool {
        let state = self.lock();
        blocks.all(|block| state.met.get(block).is_some_and(|met| met.origin.is_some()))
    }

    /// Whether the reads may return bytes of this production of a block. Records the production if it is the first. False for a block
    /// outside the state.
    pub fn admit(&self, block: usize, origin: OriginId) -> bool {
        let mut state = self.lock();
        if state.given_up.contains(&(block, origin)) {
            return false;
        }
        state.met.get_mut(block).is_some_and(|met| *met.origin.get_or_insert(origin) == origin)
    }

    /// The same, for a source that knows the lifetime of the production.
    pub fn admit_living(&self, block: usize, origin: OriginId, life: Life) -> bool {
        let mut state = self.lock();
        if state.given_up.contains(&(block, origin)) {
            return false;
        }
        let Some(met) = state.met.get_mut(block) else { return false };
        let is_it = *met.origin.get_or_insert(origin) == origin;
        if is_it {
            met.life = Some(met.life.map_or(life, |known| known.with(life)));
        }
        is_it
    }

    /// The lifetime of the production of each block; `None` if no source has reported it.
    pub fn lives(&self) -> Vec<Option<Life>> {
        self.lock().met.iter().map(|met| met.life).collect()
    }

    /// Gives up the production of a block that can no longer be read, if none of its bytes was announced: the next production found counts,
    /// and this production is not admitted again. False if no production was recorded.
    pub fn give_up(&self, block: usize) -> bool {
        let mut state = self.lock();
        let lost = state.met.get_mut(block).and_then(|met| {
            met.life = None;
            met.origin.take()
        });
        lost.is_some_and(|origin| state.given_up.insert((block, origin)))
    }

    /// The number of these blocks that are delivered for the first time.
    pub fn delivered(&self, blocks: impl Iterator<Item = usize>) -> u64 {
        let mut state = self.lock();
        let mut first = 0;
        for block in blocks {
            if let Some(met) = state.met.get_mut(block) {
                first += u64::from(!std::mem::replace(&mut met.read, true));
            }
        }
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_production_that_is_met_is_the_only_one() {
        let origins = Origins::any(2);
        let [one, other] = [OriginId([1; 16]), OriginId([2; 16])];
        assert!(origins.admit(1, one) && origins.admit(1, one) && !origins.admit(1, other));
        assert!(!origins.admit(2, one), "there is no such block");
        assert_eq!(origins.met(), [None, Some(one)]);
        assert!(origins.knows(1..2) && !origins.knows(0..2) && !origins.knows(1..3));
        assert!(!Origins::of(origins.met()).admit(1, other) && origins.admit(0, other));
        assert!(origins.give_up(1) && !origins.give_up(1) && !origins.give_up(2));
        assert!(!origins.admit(1, one) && origins.admit(1, other), "what was given up does not come back");
        assert_eq!(origins.met(), [Some(other); 2]);
    }

    #[test]
    fn of_one_production_the_later_end_counts_and_none_of_another() {
        let origins = Origins::any(1);
        let [one, other] = [OriginId([1; 16]), OriginId([2; 16])];
        let life = |produced_ms, ends: Option<u64>| Life { produced_ms, ends: ends.map(Nanos) };
        assert_eq!(origins.lives(), [None]);
        assert!(origins.admit_living(0, one, life(9, Some(4))));
        assert!(origins.admit_living(0, one, life(7, Some(5))));
        assert!(!origins.admit_living(0, other, life(1, Some(1))) && origins.admit(0, one));
        assert!(origins.admit_living(0, one, life(8, Some(3))));
        assert_eq!(origins.lives(), [Some(life(7, Some(5)))]);
        assert!(origins.admit_living(0, one, life(8, None)));
        assert_eq!(origins.lives(), [Some(life(7, None))], "a place that keeps it has it for good");
        assert_eq!(life(7, None).until(Nanos(4)), life(7, Some(5)).until(Nanos(4)));
        assert!(origins.give_up(0) && !origins.admit_living(0, one, life(7, None)));
        assert!(origins.admit(0, other));
        assert_eq!(origins.lives(), [None], "nothing was said of this one");
    }

    #[test]
    fn a_block_that_several_reads_deliver_is_counted_once() {
        let origins = Origins::any(3);
        assert_eq!([origins.delivered(0..2), origins.delivered(1..4), origins.delivered(0..3)], [2, 1, 0]);
    }
}
