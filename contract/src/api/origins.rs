//! Which production of each block several reads of it are about.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use kvarts_layout::OriginId;

use crate::clock::Nanos;
use crate::sync::{Mutex, MutexGuard};

/// How long a production lives: a copy of it ends no later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Life {
    /// When it was first stored anywhere, in milliseconds since 1970. A delete takes the
    /// productions before its time, and a later one lives.
    pub produced_ms: u64,
    /// When it ends, by the clock of this process; none: never by itself.
    pub ends: Option<Nanos>,
}

impl Life {
    /// What is known of one production from two places, each of which keeps it no longer than it lives: the later end.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        let ends = self.ends.zip(other.ends).map(|(one, other)| one.max(other));
        Self { produced_ms: self.produced_ms.min(other.produced_ms), ends }
    }

    /// The same, and it ends then at the latest.
    #[must_use]
    pub fn until(self, end: Nanos) -> Self {
        Self { ends: Some(self.ends.map_or(end, |own| own.min(end))), ..self }
    }
}

/// What reads share that together are one: of each block they give bytes of one production only, the first that any of
/// them met, or a miss. Without it a block that is taken out and put again by another producer between two reads would be
/// a mix, each part of it as it was put.
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

    /// Of `blocks` blocks, whichever production of each is met first.
    pub fn any(blocks: usize) -> Arc<Self> {
        Self::new(vec![Met::default(); blocks])
    }

    /// Of blocks of which some were met before.
    pub fn of(met: Vec<Option<OriginId>>) -> Arc<Self> {
        let met = met.into_iter().map(|origin| Met { origin, life: None, read: origin.is_some() });
        Self::new(met.collect())
    }

    /// How many blocks there are.
    pub fn len(&self) -> usize {
        self.lock().met.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What was met so far.
    pub fn met(&self) -> Vec<Option<OriginId>> {
        self.lock().met.iter().map(|met| met.origin).collect()
    }

    /// Whether it is known of all these blocks which production is wanted.
    pub fn knows(&self, mut blocks: Range<usize>) -> bool {
        let state = self.lock();
        blocks.all(|block| state.met.get(block).is_some_and(|met| met.origin.is_some()))
    }

    /// Whether bytes of this production of a block may be given: notes it if it is the first. No bytes of a block that
    /// there is not.
    pub fn admit(&self, block: usize, origin: OriginId) -> bool {
        let mut state = self.lock();
        if state.given_up.contains(&(block, origin)) {
            return false;
        }
        state.met.get_mut(block).is_some_and(|met| *met.origin.get_or_insert(origin) == origin)
    }

    /// The same, from where it is known how long the production lives.
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

    /// How long the production of each block lives that was met; nothing where no place that gave of it has said so.
    pub fn lives(&self) -> Vec<Option<Life>> {
        self.lock().met.iter().map(|met| met.life).collect()
    }

    /// The production of a block that was met is not to be had any more, and nothing of it was announced: the next one that is
    /// met counts, and this one is not admitted again. False if none was met.
    pub fn give_up(&self, block: usize) -> bool {
        let mut state = self.lock();
        let lost = state.met.get_mut(block).and_then(|met| {
            met.life = None;
            met.origin.take()
        });
        lost.is_some_and(|origin| state.given_up.insert((block, origin)))
    }

    /// How many of some blocks are delivered now for the first time.
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
