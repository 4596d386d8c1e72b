//! Grace periods of reads that have looked their blocks up and do not hold the segments yet (as in SRCU).
//!
//! A read looks up on its caller's thread and takes hold of segments on their executors. Compaction may move a block
//! between the two; the segment that the read was told of is then not emptied before every read that may have been told of
//! it holds it or is over. A client with a lease on the block would otherwise be told that the block is not here.
//!
//! Two counters alternate by epoch: a read that begins counts in the counter of the present epoch. An epoch ends only while
//! the other counter is at zero; so a read that is counted, in either, lets at most one epoch end, and when two epochs have
//! ended after a move, no read is left that looked up before it. Reads that keep coming do not prevent that, and no read
//! waits.
//!
//! The executor that moves a block may be another than that of the segment which the block leaves. So the segment is marked
//! as left before the index is switched: a task that looks at the index first and asks here afterwards never takes a segment
//! for free of readers because a block is gone to which a read is still on its way.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use kvarts_contract::sync::atomic::{AtomicU64, Ordering::SeqCst};
use kvarts_contract::sync::{Mutex, MutexGuard, Race, planted};

/// Counts the reads on their way. Cloned handles are of the same counters.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReaderEpochs(Arc<Epochs>);

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
    epochs: Arc<Epochs>,
    place: Place,
}

#[derive(Debug, Default)]
struct Epochs {
    epoch: AtomicU64,
    /// Of even epochs and of odd ones.
    under_way: [AtomicU64; 2],
    /// Segments that blocks were moved out of, until the reads of then have passed.
    left: Mutex<BTreeMap<Place, Left>>,
    /// Their number: mostly none, and then the lock is not taken.
    left_count: AtomicU64,
}

/// One read on its way, or its part for one shard.
#[derive(Debug)]
pub(crate) struct Arrival {
    epochs: Arc<Epochs>,
    epoch: u64,
}

impl Epochs {
    fn counter(&self, epoch: u64) -> &AtomicU64 {
        let [even, odd] = &self.under_way;
        if epoch.is_multiple_of(2) { even } else { odd }
    }

    fn left(&self) -> MutexGuard<'_, BTreeMap<Place, Left>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReaderEpochs {
    /// A read begins. It looks blocks up afterwards.
    pub(crate) fn begin(&self) -> Arrival {
        let epoch = self.0.epoch.load(SeqCst);
        // The epoch may end before this: in either counter it is one that lets at most one more epoch end.
        self.0.counter(epoch).fetch_add(1, SeqCst);
        Arrival { epochs: Arc::clone(&self.0), epoch }
    }

    /// A block is about to be moved out of a segment.
    pub(crate) fn leaving(&self, place: Place) -> Leaving {
        let mut left = self.0.left();
        left.entry(place).or_default().moves += 1;
        self.0.left_count.store(left.len() as u64, SeqCst);
        Leaving { epochs: Arc::clone(&self.0), place }
    }

    /// Whether a read may be on its way to a block that was moved out of a segment, or is being moved. A caller that has seen
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

    /// The present epoch.
    #[cfg(test)]
    fn now(&self) -> u64 {
        self.0.epoch.load(SeqCst)
    }

    /// Whether no read is on its way any more that had begun by that moment.
    fn have_passed(&self, moment: u64) -> bool {
        let epochs = if planted(Race::OneEpochIsEnough) { 1 } else { 2 };
        for _ in 0..epochs {
            let epoch = self.0.epoch.load(SeqCst);
            if epoch >= moment.saturating_add(epochs) {
                return true;
            }
            if self.0.counter(epoch + 1).load(SeqCst) != 0 {
                return false;
            }
            // Another thread may have ended the epoch: the result is the same.
            let _ = self.0.epoch.compare_exchange(epoch, epoch + 1, SeqCst, SeqCst);
        }
        self.0.epoch.load(SeqCst) >= moment.saturating_add(epochs)
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if let Some(left) = self.epochs.left().get_mut(&self.place) {
            left.moves -= 1;
            left.at = self.epochs.epoch.load(SeqCst);
        }
    }
}

impl Clone for Arrival {
    /// Counts where this one does.
    fn clone(&self) -> Self {
        self.epochs.counter(self.epoch).fetch_add(1, SeqCst);
        Self { epochs: Arc::clone(&self.epochs), epoch: self.epoch }
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        self.epochs.counter(self.epoch).fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_passes_when_the_reads_before_it_are_over_and_not_for_those_after() {
        let epochs = ReaderEpochs::default();
        assert!(epochs.have_passed(epochs.now()), "no read is on the way");
        for _ in 0..5 {
            let before = epochs.begin();
            let part = before.clone();
            let moment = epochs.now();
            let after = epochs.begin();
            assert!(!epochs.have_passed(moment));
            drop(before);
            assert!(!epochs.have_passed(moment), "a part of it is on the way");
            let last = epochs.begin();
            drop(part);
            // It began in the same epoch.
            drop(after);
            assert!(epochs.have_passed(moment));
            drop(last);
        }
    }

    #[test]
    fn a_segment_is_awaited_while_it_is_left_and_until_the_reads_of_then_have_passed() {
        let epochs = ReaderEpochs::default();
        assert!(!epochs.are_awaited((0, 1)));
        let leaving = epochs.leaving((0, 1));
        assert!(epochs.are_awaited((0, 1)), "the index may be switched at any moment");
        let read = epochs.begin();
        drop(leaving);
        assert!(epochs.are_awaited((0, 1)) && !epochs.are_awaited((1, 1)));
        drop(read);
        assert!(!epochs.are_awaited((0, 1)));
        assert!(epochs.0.left().is_empty());
    }

    #[test]
    fn reads_that_keep_coming_do_not_hold_a_moment_up() {
        let epochs = ReaderEpochs::default();
        let mut on_the_way = epochs.begin();
        let moment = epochs.now();
        for _ in 0..3 {
            let next = epochs.begin();
            let _ = epochs.have_passed(moment);
            on_the_way = next;
        }
        assert!(epochs.have_passed(moment));
        drop(on_the_way);
    }
}
