//! Many entries into a table at once: sorted as the table is, then one pass over both.
//!
//! One at a time, each entry costs a search and the shifting of a run. Fingerprints are uniform and so are their homes:
//! a counting sort by home leaves almost nothing to compare, and the pass that follows writes every slot once.

use super::{BlockFingerprint, LOAD_MAX, Slot, Table, vacant};

/// More than this many times as many entries as there are new ones: they go in one at a time.
const FEW: usize = 4;

/// Memory that one table after the other is filled with: taken once, its pages are made once.
#[derive(Debug, Default)]
pub(in crate::index) struct Scratch {
    sorted: Vec<Slot>,
    ends: Vec<u32>,
}

impl Table {
    /// Inserts each of `found` unless its fingerprint is there by then, and empties it. Of those with the same
    /// fingerprint the first one counts. `refused` gets each that was left out, and what is there instead.
    pub(in crate::index) fn insert_all(
        &mut self,
        found: &mut Vec<Slot>,
        scratch: &mut Scratch,
        mut refused: impl FnMut(&Slot, &Slot),
    ) {
        if found.len() < self.entries / FEW {
            for slot in found.drain(..) {
                let (print, location, heat) = (slot.print(), slot.location(), slot.heat());
                if let Err(there) = self.insert(slot) {
                    refused(&Slot::new(print, super::State::Live, location, heat), there);
                }
            }
            return;
        }
        let entries = self.entries + found.len();
        let homes = entries.saturating_mul(LOAD_MAX.1).div_ceil(LOAD_MAX.0).max(self.homes);
        self.homes = homes;
        self.sort(found, scratch);
        let old = std::mem::replace(&mut self.slots, vacant(homes + super::TAIL));
        let mut old = old.into_iter().filter(|slot| slot.state().is_some()).peekable();
        let mut end = End { next: 0, last: None };
        self.entries = 0;
        for slot in scratch.sorted.drain(..) {
            while let Some(before) = old.next_if(|old| old.print() <= slot.print()) {
                self.append(before, &mut end);
            }
            match end.last.filter(|(print, _)| *print == slot.print()) {
                Some((_, at)) => refused(&slot, &self.slots[at]),
                None => self.append(slot, &mut end),
            }
        }
        old.for_each(|slot| self.append(slot, &mut end));
    }

    /// Two tables, each of which takes a half of the fingerprints that this one may have.
    pub(in crate::index) fn split(self) -> [Self; 2] {
        let bits = self.bits;
        let is_upper = |slot: &Slot| slot.print().first() << bits >> 63 == 1;
        let mut lower: Vec<Slot> = self.slots.into_iter().filter(|slot| slot.state().is_some()).collect();
        let upper = lower.split_off(lower.partition_point(|slot| !is_upper(slot)));
        [lower, upper].map(|half| {
            // With room for a few more, or the next insertion would move all of them again.
            let mut table = Self::new(bits + 1, half.len() + half.len() / 8);
            let mut end = End { next: 0, last: None };
            half.into_iter().for_each(|slot| table.append(slot, &mut end));
            table
        })
    }

    /// Puts a slot that is greater than all there are.
    fn append(&mut self, slot: Slot, end: &mut End) {
        let print = slot.print();
        let at = self.home(print).max(end.next);
        self.put(at, slot);
        self.entries += 1;
        *end = End { next: at + 1, last: Some((print, at)) };
    }

    /// Sorts them into `scratch`, ascending; those with the same fingerprint as they came.
    fn sort(&self, found: &mut Vec<Slot>, scratch: &mut Scratch) {
        let Scratch { sorted, ends } = scratch;
        // After the first pass `ends[h]` is how many there are of home h, after the second where they begin, and each
        // that is placed moves it towards their end.
        ends.clear();
        ends.resize(self.homes, 0);
        for slot in &*found {
            ends[self.home(slot.print())] += 1;
        }
        let mut begin = 0;
        for end in &mut *ends {
            begin += std::mem::replace(end, begin);
        }
        sorted.clear();
        sorted.resize_with(found.len(), Slot::default);
        for slot in found.drain(..) {
            let end = &mut ends[self.home(slot.print())];
            sorted[*end as usize] = slot;
            *end += 1;
        }
        // Few share a home, so few are out of order, and not by far.
        for at in 1..sorted.len() {
            let mut place = at;
            while place > 0 && sorted[place].print() < sorted[place - 1].print() {
                sorted.swap(place, place - 1);
                place -= 1;
            }
        }
    }
}

/// How far a table is filled.
struct End {
    next: usize,
    last: Option<(BlockFingerprint, usize)>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::{check, location, print};
    use super::super::{Slot, State, Table};
    use crate::index::Heat;

    proptest! {
        #[test]
        fn all_at_once_is_as_one_after_another(
            before in prop::collection::vec(print(), 0..200),
            batches in prop::collection::vec(prop::collection::vec(print(), 0..150), 1..4),
        ) {
            let (mut one, mut all) = (Table::new(4, 0), Table::new(4, 0));
            let mut number = 0;
            let mut slots = |prints: &[_]| {
                let slot = |print: &_| {
                    number += 1;
                    Slot::new(*print, State::Live, location(number), Heat { epoch: 7, ..Heat::default() })
                };
                prints.iter().map(slot).collect::<Vec<_>>()
            };
            let copy = |slot: &Slot| Slot::new(slot.print(), State::Live, slot.location(), slot.heat());
            for slot in slots(&before) {
                let _ = all.insert(copy(&slot));
                let _ = one.insert(slot);
            }
            for batch in &batches {
                let mut batch = slots(batch);
                let mut expected = Vec::new();
                for slot in &batch {
                    if let Err(there) = one.insert(copy(slot)) {
                        expected.push((slot.location(), there.location()));
                    }
                }
                let mut refused = Vec::new();
                let refuse = |slot: &Slot, there: &Slot| refused.push((slot.location(), there.location()));
                all.insert_all(&mut batch, &mut super::Scratch::default(), refuse);
                check(&all);
                expected.sort_unstable();
                refused.sort_unstable();
                prop_assert_eq!(refused, expected);
                prop_assert!(batch.is_empty());
                let list = |table: &Table| {
                    table.iter().map(|slot| (slot.print(), slot.location(), slot.heat())).collect::<Vec<_>>()
                };
                prop_assert_eq!(list(&all), list(&one));
            }
        }
    }
}
