//! Blocks on their way into the index: sorted into the partitions that they go to while they are found.
//!
//! Recovery brings a million blocks in an order that means nothing to the index. Appending each to its partition's
//! list writes a few hundred streams, which caches do well; then every partition is filled at once.

use super::groups::partition_of;
use super::table::Scratch;
use super::{BlockFingerprint, Heat, Index, Location, RecordError, RecordId, Slot, State, entry, write};
use crate::index::Entry;
use kvarts_contract::sync::atomic::Ordering;

/// A block that recovery found on disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recovered {
    /// The block.
    pub print: BlockFingerprint,
    /// Where it is.
    pub location: Location,
    /// How warm it was.
    pub heat: Heat,
}

/// Blocks that are to go into one index.
#[derive(Debug)]
pub struct Gathering {
    bits: u32,
    partitions: Box<[Vec<Slot>]>,
    /// The partition that is filled first.
    first: usize,
    /// How many blocks came of each record, in turn.
    runs: Vec<(RecordId, usize)>,
    len: usize,
}

impl Gathering {
    /// Adds a block. Those of one record should come one after another.
    // Inlined, since a fingerprint that goes through memory in halves is slow to be read again.
    #[inline]
    pub fn push(&mut self, found: Recovered) {
        if let Some(partition) = self.partitions.get_mut(partition_of(found.print, self.bits)) {
            partition.push(Slot::new(found.print, State::Live, found.location, found.heat));
            self.len += 1;
        }
        match self.runs.last_mut() {
            Some((record, blocks)) if *record == found.location.record => *blocks += 1,
            _ => self.runs.push((found.location.record, 1)),
        }
    }

    /// The number of blocks.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn clear(&mut self) {
        self.runs.clear();
        self.len = 0;
    }
}

impl Index {
    /// An empty gathering for this index, with room for about `expected` blocks.
    pub fn gathering(&self, expected: usize) -> Gathering {
        let mean = expected >> self.bits;
        let each = if expected == 0 { 0 } else { mean + 3 * mean.isqrt() + 1 };
        let partitions = (0..self.partitions.len()).map(|_| Vec::with_capacity(each)).collect();
        let gathering = self.gatherings.fetch_add(1, Ordering::Relaxed) as usize;
        // Far from where those before it begin.
        let first = gathering.wrapping_mul((self.partitions.len() * 5 / 8) | 1) % self.partitions.len();
        Gathering { bits: self.bits, partitions, first, runs: Vec::new(), len: 0 }
    }

    /// Takes in what was gathered for this index, and empties the gathering. Where a block has an entry already,
    /// that entry stays, and `conflicts` receives the block with the entry: the caller decides which copy is the
    /// right one and calls [`Index::replace_location`] if it is the new one. On an error nothing was changed.
    ///
    /// The more blocks at once, the more of them each lock and cache miss serves.
    pub fn insert_live(
        &self,
        gathering: &mut Gathering,
        conflicts: &mut Vec<(Recovered, Entry)>,
    ) -> Result<(), RecordError> {
        conflicts.clear();
        for (done, (record, blocks)) in gathering.runs.iter().enumerate() {
            if let Err(error) = self.records.add_live(*record, *blocks) {
                for (record, blocks) in gathering.runs.iter().take(done) {
                    self.records.subtract_live(*record, *blocks);
                }
                return Err(error);
            }
        }
        let mut scratch = Scratch::default();
        // Each gathering begins elsewhere: executors that fill the index at once do not wait for each other at each partition.
        let (last, first) = gathering.partitions.split_at_mut(gathering.first);
        let turn = (gathering.first..).zip(first).chain((0..).zip(last));
        for (number, found) in turn {
            if let Some(partition) = self.partitions.get(number).filter(|_| !found.is_empty()) {
                let lost = |lost: &Slot| Recovered {
                    print: lost.print(),
                    location: lost.location(),
                    heat: lost.heat(),
                };
                let refused = |slot: &Slot, there: &Slot| conflicts.push((lost(slot), entry(there)));
                write(&partition.0).table.insert_all(found, &mut scratch, refused);
            }
        }
        for (lost, _) in &*conflicts {
            self.records.subtract_live(lost.location.record, 1);
        }
        gathering.clear();
        Ok(())
    }
}
