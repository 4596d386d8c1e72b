//! Reads that have looked their blocks up and do not hold the segments yet.
//!
//! A read looks up on its caller's thread and takes hold of segments on their executors. Compaction may move a block
//! between the two; the place that the read was told is then kept from being emptied until every read that may have
//! been told of it holds it or is over. Whoever holds a lease on a block would otherwise be told that it is not here.
//!
//! Two counters take turns: reads that begin count in the one of the present turn. A turn ends only while the other
//! counter is at zero; so whoever is counted, in either, lets at most one turn end, and when two have ended after a
//! move, nobody is on the way who looked up before it. Reads that keep coming do not keep it from happening, and
//! nobody waits for anybody.
//!
//! Who moves a block may be another executor than the one whose segment it leaves. So the segment is said to be left
//! before the index is switched: whoever looks at the index first and asks here afterwards never takes a segment for
//! left by everybody because a block has gone that a read is still sent to.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};
use crate::sync::{Mutex, MutexGuard, Race, planted};

/// Counts the reads on their way. Cloned handles are of the same counters.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReaderEpochs(Arc<Turns>);

/// A shard and a segment of it.
pub(crate) type Place = (u32, u32);

/// How a segment was left.
#[derive(Clone, Copy, Debug, Default)]
struct Left {
    /// Moves out of it that are under way.
    moves: u32,
    /// When the last one ended.
    at: u64,
}

/// A move out of a segment, from before the index is switched until after.
#[derive(Debug)]
pub(crate) struct Leaving {
    turns: Arc<Turns>,
    place: Place,
}

#[derive(Debug, Default)]
struct Turns {
    turn: AtomicU64,
    /// Of even turns and of odd ones.
    under_way: [AtomicU64; 2],
    /// Segments that blocks were moved out of, until the reads of then have passed.
    left: Mutex<BTreeMap<Place, Left>>,
    /// How many: mostly none, and then nobody takes the lock.
    left_count: AtomicU64,
}

/// One read on its way, or its part for one shard.
#[derive(Debug)]
pub(crate) struct Arrival {
    turns: Arc<Turns>,
    turn: u64,
}

impl Turns {
    fn counter(&self, turn: u64) -> &AtomicU64 {
        let [even, odd] = &self.under_way;
        if turn.is_multiple_of(2) { even } else { odd }
    }

    fn left(&self) -> MutexGuard<'_, BTreeMap<Place, Left>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReaderEpochs {
    /// A read begins. It looks blocks up afterwards.
    pub(crate) fn begin(&self) -> Arrival {
        let turn = self.0.turn.load(SeqCst);
        // The turn may end before this: in either counter it is one that lets at most one more turn end.
        self.0.counter(turn).fetch_add(1, SeqCst);
        Arrival { turns: Arc::clone(&self.0), turn }
    }

    /// A block is about to be moved out of a segment.
    pub(crate) fn leaving(&self, place: Place) -> Leaving {
        let mut left = self.0.left();
        left.entry(place).or_default().moves += 1;
        self.0.left_count.store(left.len() as u64, SeqCst);
        Leaving { turns: Arc::clone(&self.0), place }
    }

    /// Whether a read may be on its way to a block that was moved out of a segment, or is being moved. Whoever has seen
    /// that blocks are gone asks afterwards.
    pub(crate) fn are_awaited(&self, place: Place) -> bool {
        if self.0.left_count.load(SeqCst) == 0 {
            return false;
        }
        let mut left = self.0.left();
        let Some(how) = left.get(&place).copied() else { return false };
        let awaited = how.moves > 0 || !self.have_passed(how.at);
        if !awaited {
            left.remove(&place);
            self.0.left_count.store(left.len() as u64, SeqCst);
        }
        awaited
    }

    /// The present turn.
    #[cfg(test)]
    fn now(&self) -> u64 {
        self.0.turn.load(SeqCst)
    }

    /// Whether no read is on its way any more that had begun by that moment.
    fn have_passed(&self, moment: u64) -> bool {
        let turns = if planted(Race::OneTurnIsEnough) { 1 } else { 2 };
        for _ in 0..turns {
            let turn = self.0.turn.load(SeqCst);
            if turn >= moment.saturating_add(turns) {
                return true;
            }
            if self.0.counter(turn + 1).load(SeqCst) != 0 {
                return false;
            }
            // Where somebody else ended the turn, so much the better.
            let _ = self.0.turn.compare_exchange(turn, turn + 1, SeqCst, SeqCst);
        }
        self.0.turn.load(SeqCst) >= moment.saturating_add(turns)
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if let Some(left) = self.turns.left().get_mut(&self.place) {
            left.moves -= 1;
            left.at = self.turns.turn.load(SeqCst);
        }
    }
}

impl Clone for Arrival {
    /// Counts where this one does.
    fn clone(&self) -> Self {
        self.turns.counter(self.turn).fetch_add(1, SeqCst);
        Self { turns: Arc::clone(&self.turns), turn: self.turn }
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        self.turns.counter(self.turn).fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_passes_when_the_reads_before_it_are_over_and_not_for_those_after() {
        let arrivals = ReaderEpochs::default();
        assert!(arrivals.have_passed(arrivals.now()), "nobody is on the way");
        for _ in 0..5 {
            let before = arrivals.begin();
            let part = before.clone();
            let moment = arrivals.now();
            let after = arrivals.begin();
            assert!(!arrivals.have_passed(moment));
            drop(before);
            assert!(!arrivals.have_passed(moment), "a part of it is on the way");
            let last = arrivals.begin();
            drop(part);
            // It began in the same turn.
            drop(after);
            assert!(arrivals.have_passed(moment));
            drop(last);
        }
    }

    #[test]
    fn a_segment_is_awaited_while_it_is_left_and_until_the_reads_of_then_have_passed() {
        let arrivals = ReaderEpochs::default();
        assert!(!arrivals.are_awaited((0, 1)));
        let leaving = arrivals.leaving((0, 1));
        assert!(arrivals.are_awaited((0, 1)), "the index may be switched at any moment");
        let read = arrivals.begin();
        drop(leaving);
        assert!(arrivals.are_awaited((0, 1)) && !arrivals.are_awaited((1, 1)));
        drop(read);
        assert!(!arrivals.are_awaited((0, 1)));
        assert!(arrivals.0.left().is_empty());
    }

    #[test]
    fn reads_that_keep_coming_do_not_hold_a_moment_up() {
        let arrivals = ReaderEpochs::default();
        let mut on_the_way = arrivals.begin();
        let moment = arrivals.now();
        for _ in 0..3 {
            let next = arrivals.begin();
            let _ = arrivals.have_passed(moment);
            on_the_way = next;
        }
        assert!(arrivals.have_passed(moment));
        drop(on_the_way);
    }
}
