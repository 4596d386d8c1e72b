//! One partition's entries, in tables of bounded size: growing moves a few tens of thousands of entries at once, however many a
//! partition has, and others wait that long for it.
//!
//! A directory leads from the bits of a fingerprint that follow the partition's to the table that has it (extendible hashing): a table
//! that is full is split in two, by one more bit, and the directory is doubled where it tells too few bits apart. Tables follow each
//! other in the directory in the order of their fingerprints. None is ever joined with another: an emptied one takes next to nothing.

use super::BlockFingerprint;
use super::table::{Scratch, Slot, Table};

/// Entries of a table that is split: a fraction of a millisecond to move.
const ENTRIES_MAX: usize = 32 << 10;
/// Bits that tell tables apart at most, the partition's included.
const BITS_MAX: u32 = 56;
/// Places of the directory for each table at most. Fingerprints are uniform, so there are one or two; where many agree in their first
/// bits, their table grows instead.
const PLACES_MAX: usize = 8;

/// The tables of one partition, which hold the fingerprints that agree in their first `bits` bits.
#[derive(Debug)]
pub(super) struct Tables {
    bits: u32,
    /// The directory has a place for each value of this many bits.
    depth: u32,
    /// Which table each value of these bits leads to.
    directory: Vec<u32>,
    tables: Vec<Deep>,
    entries_max: usize,
}

/// A table, and how many of the directory's bits all of its fingerprints share.
#[derive(Debug)]
struct Deep {
    depth: u32,
    table: Table,
}

impl Tables {
    /// Tables that take `expected` entries before they grow.
    pub(super) fn new(bits: u32, expected: usize) -> Self {
        Self::with_tables_of(ENTRIES_MAX, bits, expected)
    }

    fn with_tables_of(entries_max: usize, bits: u32, expected: usize) -> Self {
        let depth = depth_for(expected, entries_max).min(BITS_MAX.saturating_sub(bits));
        let each = if depth == 0 { expected } else { (expected >> depth) + entries_max / 16 };
        let tables = (0..1u32 << depth).map(|_| Deep { depth, table: Table::new(bits + depth, each) });
        Self { bits, depth, directory: (0..1 << depth).collect(), tables: tables.collect(), entries_max }
    }

    /// The directory's place for a fingerprint.
    #[inline]
    fn place(&self, print: BlockFingerprint) -> usize {
        // All 64 bits shifted out (one table) is no shift that `>>` can do.
        (print.first() << self.bits).checked_shr(64 - self.depth).unwrap_or(0) as usize
    }

    #[inline]
    fn table(&self, print: BlockFingerprint) -> &Table {
        &self.tables[self.directory[self.place(print)] as usize].table
    }

    #[inline]
    fn table_mut(&mut self, print: BlockFingerprint) -> &mut Table {
        let place = self.place(print);
        &mut self.tables[self.directory[place] as usize].table
    }

    /// The tables in the order of their fingerprints, from the one to which a place leads.
    fn in_order(&self, place: usize) -> impl Iterator<Item = &Table> {
        let mut next = place;
        std::iter::from_fn(move || {
            let deep = &self.tables[*self.directory.get(next)? as usize];
            // Behind all places that lead to it.
            let spread = 1usize << (self.depth - deep.depth);
            next = next - next % spread + spread;
            Some(&deep.table)
        })
    }

    pub(super) fn entries(&self) -> usize {
        self.tables.iter().map(|deep| deep.table.entries()).sum()
    }

    /// Bytes of memory taken.
    pub(super) fn bytes(&self) -> usize {
        let tables: usize = self.tables.iter().map(|deep| deep.table.bytes()).sum();
        tables + self.tables.capacity() * size_of::<Deep>() + self.directory.capacity() * 4
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Slot> {
        self.in_order(0).flat_map(Table::iter)
    }

    /// Those from this fingerprint on. One of another partition stands for the first.
    pub(super) fn iter_from(&self, from: BlockFingerprint) -> impl Iterator<Item = &Slot> {
        let mut tables = self.in_order(self.place(from));
        let first = tables.next().map(|table| table.iter_from(from));
        first.into_iter().flatten().chain(tables.flat_map(Table::iter))
    }

    /// Reads from the slots where searches begin, for the sake of having them in the cache. Nothing here waits for what it reads, so
    /// the processor has all its cache misses in flight at once; what then looks them up, and branches on what it reads, finds
    /// the lines near.
    #[inline]
    pub(super) fn warm_all(&self, prints: impl Iterator<Item = BlockFingerprint>) {
        let warmed = prints.fold(0, |sum, print| sum ^ self.table(print).warm(print));
        std::hint::black_box(warmed);
    }

    #[inline]
    pub(super) fn get(&self, print: BlockFingerprint) -> Option<&Slot> {
        self.table(print).get(print)
    }

    pub(super) fn get_mut(&mut self, print: BlockFingerprint) -> Option<&mut Slot> {
        self.table_mut(print).get_mut(print)
    }

    /// The entry whose fingerprint has these first 64 bits; of several one.
    pub(super) fn get_first(&self, first: u64) -> Option<&Slot> {
        self.table(BlockFingerprint::from_parts(first, 0)).get_first(first)
    }

    /// The same, to be changed.
    pub(super) fn get_first_mut(&mut self, first: u64) -> Option<&mut Slot> {
        self.table_mut(BlockFingerprint::from_parts(first, 0)).get_first_mut(first)
    }

    /// Inserts `slot` unless its fingerprint is there; then gives what is there.
    pub(super) fn insert(&mut self, slot: Slot) -> Result<(), &mut Slot> {
        let print = slot.print();
        let at = self.directory[self.place(print)] as usize;
        if self.tables[at].table.entries() >= self.entries_max {
            self.split(at);
        }
        self.table_mut(print).insert(slot)
    }

    /// Removes the fingerprint if it is there.
    pub(super) fn remove(&mut self, print: BlockFingerprint) -> Option<Slot> {
        self.table_mut(print).remove(print)
    }

    /// Inserts each of `found` unless its fingerprint is there by then, and empties it. Of those with the same
    /// fingerprint the first one counts. `refused` gets each that was left out, and what is there instead.
    pub(super) fn insert_all(
        &mut self,
        found: &mut Vec<Slot>,
        scratch: &mut Scratch,
        mut refused: impl FnMut(&Slot, &Slot),
    ) {
        let depth = depth_for(self.entries() + found.len(), self.entries_max);
        let mut at = 0;
        while at < self.tables.len() {
            match self.tables[at].depth < depth && self.split(at) {
                // The lower half may have to be split again.
                true => {}
                false => at += 1,
            }
        }
        if let [only] = &mut self.tables[..] {
            return only.table.insert_all(found, scratch, refused);
        }
        let each = found.len() / self.tables.len();
        let mut parts: Vec<Vec<Slot>> =
            self.tables.iter().map(|_| Vec::with_capacity(each + each / 8)).collect();
        for slot in found.drain(..) {
            parts[self.directory[self.place(slot.print())] as usize].push(slot);
        }
        for (deep, part) in self.tables.iter_mut().zip(&mut parts) {
            deep.table.insert_all(part, scratch, &mut refused);
        }
    }

    /// Splits a table in two, by one more bit; false if no more bits are to tell tables apart.
    fn split(&mut self, at: usize) -> bool {
        let depth = self.tables[at].depth;
        let is_crowded = depth == self.depth && self.directory.len() >= PLACES_MAX * self.tables.len();
        if self.bits + depth >= BITS_MAX || is_crowded {
            return false;
        }
        if depth == self.depth {
            self.directory = self.directory.iter().flat_map(|table| [*table; 2]).collect();
            self.depth += 1;
        }
        let whole = std::mem::replace(&mut self.tables[at].table, Table::new(self.bits, 0));
        let [lower, upper] = whole.split();
        let new = self.tables.len() as u32;
        self.tables[at] = Deep { depth: depth + 1, table: lower };
        self.tables.push(Deep { depth: depth + 1, table: upper });
        let half = 1usize << (self.depth - depth - 1);
        for (place, table) in self.directory.iter_mut().enumerate() {
            if *table == at as u32 && place & half != 0 {
                *table = new;
            }
        }
        true
    }
}

/// Bits by which tables must differ to hold this number of entries, half full each.
fn depth_for(entries: usize, entries_max: usize) -> u32 {
    if entries <= entries_max { 0 } else { (2 * entries).div_ceil(entries_max).next_power_of_two().ilog2() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::table::State;
    use super::super::table::tests::{location, print};
    use super::super::{Heat, Location};
    use super::*;

    fn slot(print: BlockFingerprint, n: u32) -> Slot {
        Slot::new(print, State::Live, location(n), Heat::default())
    }

    fn check(tables: &Tables, model: &BTreeMap<BlockFingerprint, Location>) {
        let listed: Vec<_> = tables.iter().map(|slot| (slot.print(), slot.location())).collect();
        let expected: Vec<_> = model.iter().map(|(print, at)| (*print, *at)).collect();
        assert_eq!(listed, expected);
        assert_eq!(tables.entries(), model.len());
        assert_eq!(tables.in_order(0).count(), tables.tables.len(), "each is led to");
        for from in model.keys().step_by(7) {
            let from_there: Vec<_> = tables.iter_from(*from).map(Slot::print).collect();
            assert!(from_there.iter().eq(model.range(from..).map(|(print, _)| print)));
        }
    }

    proptest! {
        #[test]
        fn tables_that_are_split_answer_as_a_sorted_map_does(
            ops in prop::collection::vec((0..5u8, print()), 1..400),
            more in prop::collection::vec(print(), 0..300),
            entries_max in 2..40usize,
            expected in 0..200usize,
        ) {
            let mut tables = Tables::with_tables_of(entries_max, 4, expected);
            let mut model = BTreeMap::new();
            for (n, (op, print)) in (0..).zip(ops) {
                if op > 0 {
                    match tables.insert(slot(print, n)) {
                        Ok(()) => prop_assert_eq!(model.insert(print, location(n)), None),
                        Err(there) => prop_assert_eq!(model.get(&print).copied(), Some(there.location())),
                    }
                } else {
                    prop_assert_eq!(tables.remove(print).map(|slot| slot.location()), model.remove(&print));
                }
            }
            check(&tables, &model);
            let mut found: Vec<Slot> =
                (10_000..).zip(&more).map(|(n, print)| slot(*print, n)).collect();
            let mut refused = Vec::new();
            let refuse = |slot: &Slot, there: &Slot| refused.push((slot.location(), there.location()));
            tables.insert_all(&mut found, &mut Scratch::default(), refuse);
            let mut left_out = Vec::new();
            for (n, print) in (10_000..).zip(&more) {
                match model.get(print) {
                    Some(there) => left_out.push((location(n), *there)),
                    None => drop(model.insert(*print, location(n))),
                }
            }
            refused.sort_unstable();
            left_out.sort_unstable();
            prop_assert_eq!(refused, left_out);
            check(&tables, &model);
            for print in model.keys() {
                prop_assert_eq!(tables.get(*print).map(Slot::location), model.get(print).copied());
                prop_assert_eq!(tables.get_mut(*print).map(|slot| slot.location()), model.get(print).copied());
                prop_assert_eq!(tables.get_first(print.first()).map(|slot| slot.print().first()), Some(print.first()));
            }
        }
    }

    /// Others wait for the partition while a table grows or is split.
    #[test]
    fn growing_moves_no_more_than_a_table_however_many_entries_there_are() {
        let mut tables = Tables::with_tables_of(1000, 0, 0);
        let print = |n: u64| BlockFingerprint::from_parts(n.wrapping_mul(0x9e37_79b9_7f4a_7c15), 0);
        for n in 0..200_000 {
            assert!(tables.insert(slot(print(n), n as u32)).is_ok());
        }
        assert!(tables.tables.iter().all(|deep| deep.table.entries() <= 1000));
        assert!(tables.tables.len() < 200_000 / 400, "half full at least: {}", tables.tables.len());
        assert!(tables.bytes() < 200_000 * 30, "{}", tables.bytes());
    }

    #[test]
    fn fingerprints_that_agree_in_every_bit_of_the_directory_are_all_kept() {
        let mut tables = Tables::with_tables_of(2, 8, 0);
        for rest in 0..200 {
            assert!(tables.insert(slot(BlockFingerprint::from_parts(7, rest), rest)).is_ok());
        }
        assert!(tables.directory.len() <= 2 * PLACES_MAX * tables.tables.len(), "{}", tables.directory.len());
        assert_eq!(tables.entries(), 200);
    }
}
