//! A table of entries: open addressing in fingerprint order, at about 20 bytes for 0.7 to 0.875 of a slot.
//!
//! Invariants:
//! - a fingerprint's *home* grows with the fingerprint, no entry lies before its home, and the entries, read
//!   from the first slot to the last, are in strictly ascending order (a sorted array with gaps);
//! - there is no gap between an entry's home and the entry;
//! - entries never wrap around: past the last home lie a few more slots, and more are added when they fill.
//!
//! From these: a search walks from the home until it meets the fingerprint, a greater one, or a gap; an
//! insertion shifts the rest of its run by one; a removal shifts it back, so there are no tombstones; and
//! growing is one pass over both arrays. The capacity is any number (the home is a multiply, not a mask),
//! so a table can grow by a quarter and stay full. Growing costs one table's worth of work, which is bounded ([`super::tables`]).

mod merge;

pub(super) use merge::Scratch;

use super::{EPOCHS, Heat, Location, Lookup, RecordId};
use crate::memory_ids::BlockFingerprint;
use kvarts_contract::sync::PLAIN;
use kvarts_contract::sync::atomic::{AtomicU16, Ordering::Relaxed};

/// Slots past the last home when a table is built, and how many are added when they are used up.
const TAIL: usize = 8;
/// A table never has fewer homes.
const HOMES_MIN: usize = 8;
/// Entries per home before the table grows, as a fraction.
const LOAD_MAX: (usize, usize) = (7, 8);

/// What an occupied slot holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// A put is in flight. The slot's record number is the put's ticket.
    Pending,
    /// The block is at the slot's location.
    Live,
    /// The block at the slot's location failed verification.
    Quarantined,
}

/// How the 16 bits are used: `epoch 10 | continued 1 | frequency 2 | leased 1 | state 2`. A vacant slot is all zero.
const STATE_MASK: u16 = 0b11;
const LEASED: u16 = 0b100;
const FREQUENCY_SHIFT: u32 = 3;
const FREQUENCY_MAX: u16 = 3;
const CONTINUED: u16 = 1 << 5;
const EPOCH_SHIFT: u32 = 6;
const _: () = assert!(EPOCHS as u32 == 1 << (u16::BITS - EPOCH_SHIFT));

/// Bits of a slot that say which record a block is in, or which put has claimed it.
pub(super) const RECORD_BITS: u32 = 28;
const RECORD_MASK: u32 = (1 << RECORD_BITS) - 1;
/// The rest of them count what hangs on the block; from this number on the partition counts it elsewhere.
pub(super) const HANGING_MAX: u32 = (1 << (u32::BITS - RECORD_BITS)) - 1;

const fn state_bits(state: State) -> u16 {
    match state {
        State::Pending => 1,
        State::Live => 2,
        State::Quarantined => 3,
    }
}

const fn heat_bits(heat: Heat) -> u16 {
    let frequency = if heat.frequency as u16 > FREQUENCY_MAX { FREQUENCY_MAX } else { heat.frequency as u16 };
    frequency << FREQUENCY_SHIFT | if heat.continued { CONTINUED } else { 0 } | heat.epoch << EPOCH_SHIFT
}

const fn heat_of(bits: u16) -> Heat {
    Heat {
        frequency: (bits >> FREQUENCY_SHIFT & FREQUENCY_MAX) as u8,
        continued: bits & CONTINUED != 0,
        epoch: bits >> EPOCH_SHIFT,
    }
}

/// One slot. The bits change under the partition's read lock (heat, the lease hint); the rest only under its
/// write lock.
#[derive(Debug, Default)]
pub(super) struct Slot {
    print: BlockFingerprint,
    /// `hanging 4 | record 28`.
    record: u32,
    block: u16,
    bits: AtomicU16,
}

const _: () = assert!(size_of::<Slot>() == 20 || !PLAIN);

impl Slot {
    pub(super) const fn new(print: BlockFingerprint, state: State, location: Location, heat: Heat) -> Self {
        let bits = AtomicU16::new(state_bits(state) | heat_bits(heat));
        Self { print, record: location.record.0, block: location.block, bits }
    }

    pub(super) fn print(&self) -> BlockFingerprint {
        self.print
    }

    /// `None` for a vacant slot.
    #[inline]
    pub(super) fn state(&self) -> Option<State> {
        match self.bits.load(Relaxed) & STATE_MASK {
            0 => None,
            1 => Some(State::Pending),
            2 => Some(State::Live),
            _ => Some(State::Quarantined),
        }
    }

    pub(super) fn is(&self, state: State, location: Location) -> bool {
        self.state() == Some(state) && self.location() == location
    }

    pub(super) fn location(&self) -> Location {
        Location { record: RecordId(self.record & RECORD_MASK), block: self.block }
    }

    /// How many records hang on the block, up to [`HANGING_MAX`].
    pub(super) fn hanging(&self) -> u32 {
        self.record >> RECORD_BITS
    }

    pub(super) fn set_hanging(&mut self, count: u32) {
        self.record = self.record & RECORD_MASK | count.min(HANGING_MAX) << RECORD_BITS;
    }

    #[inline]
    pub(super) fn lookup(&self) -> Lookup {
        match self.state() {
            None => Lookup::Absent,
            Some(State::Pending) => Lookup::Pending,
            Some(State::Live) => Lookup::Live(self.location()),
            Some(State::Quarantined) => Lookup::Quarantined,
        }
    }

    pub(super) fn heat(&self) -> Heat {
        heat_of(self.bits.load(Relaxed))
    }

    pub(super) fn leased(&self) -> bool {
        self.bits.load(Relaxed) & LEASED != 0
    }

    pub(super) fn hint_leased(&self, leased: bool) {
        if leased {
            self.bits.fetch_or(LEASED, Relaxed);
        } else {
            self.bits.fetch_and(!LEASED, Relaxed);
        }
    }

    /// Changes the heat and nothing else, whatever other threads do to the other bits. Does not write a heat
    /// that is there already, so that hot blocks do not pass a cache line between cores.
    pub(super) fn update_heat(&self, change: impl Fn(Heat) -> Heat) {
        let others = STATE_MASK | LEASED;
        let changed = |bits| {
            let next = bits & others | heat_bits(change(heat_of(bits)));
            (next != bits).then_some(next)
        };
        // An error says that there was nothing to change.
        let _unchanged = self.bits.fetch_update(Relaxed, Relaxed, changed);
    }

    /// Gives the slot another state and location; heat, lease hint and the count of what hangs on the block stay.
    pub(super) fn settle(&mut self, state: State, location: Location) {
        let bits = self.bits.get_mut();
        *bits = *bits & !STATE_MASK | state_bits(state);
        self.record = self.record & !RECORD_MASK | location.record.0;
        self.block = location.block;
    }
}

/// A table, which holds the fingerprints that agree in their first `bits` bits.
#[derive(Debug)]
pub(super) struct Table {
    slots: Vec<Slot>,
    homes: usize,
    entries: usize,
    bits: u32,
}

impl Table {
    /// A table that takes `expected` entries before it grows.
    pub(super) fn new(bits: u32, expected: usize) -> Self {
        let homes = expected.saturating_mul(LOAD_MAX.1).div_ceil(LOAD_MAX.0).max(HOMES_MIN);
        Self { slots: vacant(homes + TAIL), homes, entries: 0, bits }
    }

    pub(super) fn entries(&self) -> usize {
        self.entries
    }

    /// Bytes of memory the slots take.
    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter().filter(|slot| slot.state().is_some())
    }

    /// Those from this fingerprint on. One of another partition stands for the first.
    pub(super) fn iter_from(&self, from: BlockFingerprint) -> impl Iterator<Item = &Slot> {
        let slots = self.slots.get(self.home(from)..).unwrap_or_default();
        slots.iter().filter(move |slot| slot.state().is_some() && slot.print >= from)
    }

    #[inline]
    fn home(&self, print: BlockFingerprint) -> usize {
        // The bits that all prints of this table share are shifted out; what is left, as a fraction of 2^64,
        // scales to a home. The product's upper half is below `homes`, so it fits.
        ((u128::from(print.first() << self.bits) * self.homes as u128) >> 64) as usize
    }

    /// Where the fingerprint is, or where it belongs.
    #[inline]
    fn find(&self, print: BlockFingerprint) -> Result<usize, usize> {
        let home = self.home(print);
        let mut at = home;
        for slot in &self.slots[home..] {
            if slot.print >= print || slot.state().is_none() {
                let found = slot.print == print && slot.state().is_some();
                return if found { Ok(at) } else { Err(at) };
            }
            at += 1;
        }
        Err(at)
    }

    /// Reads from the slot where a search for `print` begins, for the sake of having it in the cache.
    #[inline]
    pub(super) fn warm(&self, print: BlockFingerprint) -> u32 {
        self.slots.get(self.home(print)).map_or(0, |slot| slot.print.rest())
    }

    #[inline]
    pub(super) fn get(&self, print: BlockFingerprint) -> Option<&Slot> {
        self.find(print).ok().and_then(|at| self.slots.get(at))
    }

    /// The entry whose fingerprint has these first 64 bits; of several one.
    pub(super) fn get_first_mut(&mut self, first: u64) -> Option<&mut Slot> {
        let (Ok(at) | Err(at)) = self.find(BlockFingerprint::from_parts(first, 0));
        self.slots.get_mut(at).filter(|slot| slot.state().is_some() && slot.print.first() == first)
    }

    /// The same, to be looked at.
    pub(super) fn get_first(&self, first: u64) -> Option<&Slot> {
        let (Ok(at) | Err(at)) = self.find(BlockFingerprint::from_parts(first, 0));
        self.slots.get(at).filter(|slot| slot.state().is_some() && slot.print.first() == first)
    }

    pub(super) fn get_mut(&mut self, print: BlockFingerprint) -> Option<&mut Slot> {
        self.find(print).ok().and_then(|at| self.slots.get_mut(at))
    }

    /// Inserts `slot` unless its fingerprint is there; then gives what is there.
    pub(super) fn insert(&mut self, slot: Slot) -> Result<(), &mut Slot> {
        let mut at = match self.find(slot.print) {
            Ok(at) => return Err(&mut self.slots[at]),
            Err(at) => at,
        };
        if (self.entries + 1) * LOAD_MAX.1 > self.homes * LOAD_MAX.0 {
            self.resize(self.homes + self.homes / 4 + HOMES_MIN);
            at = self.find(slot.print).unwrap_or_else(|at| at);
        }
        let gap = self.slots[at..].iter().position(|slot| slot.state().is_none());
        let gap = gap.map_or(self.slots.len(), |distance| at + distance);
        if gap == self.slots.len() {
            self.slots.reserve_exact(TAIL);
            self.slots.extend((0..TAIL).map(|_| Slot::default()));
        }
        // Runs are short: passing each slot on beats a general rotation.
        let mut passed = slot;
        for slot in &mut self.slots[at..=gap] {
            std::mem::swap(slot, &mut passed);
        }
        self.entries += 1;
        Ok(())
    }

    /// Removes the fingerprint if it is there.
    pub(super) fn remove(&mut self, print: BlockFingerprint) -> Option<Slot> {
        let at = self.find(print).ok()?;
        let stays = |(i, slot): (usize, &Slot)| slot.state().is_none() || self.home(slot.print) == i;
        let run = self.slots.iter().enumerate().skip(at + 1).position(stays);
        let end = run.map_or(self.slots.len(), |length| at + 1 + length);
        self.slots[at..end].rotate_left(1);
        let removed = std::mem::take(&mut self.slots[end - 1]);
        self.entries -= 1;
        if self.homes > 8 * HOMES_MIN && self.entries < self.homes / 3 {
            self.resize(self.homes / 2);
        }
        Some(removed)
    }

    fn resize(&mut self, homes: usize) {
        self.homes = homes;
        let old = std::mem::replace(&mut self.slots, vacant(homes + TAIL));
        let mut next = 0;
        for slot in old.into_iter().filter(|slot| slot.state().is_some()) {
            let at = self.home(slot.print).max(next);
            self.put(at, slot);
            next = at + 1;
        }
    }

    /// Fills the slot at `at`, which may be the first one past the last.
    fn put(&mut self, at: usize, slot: Slot) {
        if at == self.slots.len() {
            self.slots.reserve_exact(TAIL);
            self.slots.extend((0..TAIL).map(|_| Slot::default()));
        }
        self.slots[at] = slot;
    }
}

fn vacant(slots: usize) -> Vec<Slot> {
    let mut all = Vec::with_capacity(slots);
    all.resize_with(slots, Slot::default);
    all
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    pub(super) fn check(table: &Table) {
        let occupied: Vec<_> = table.slots.iter().enumerate().filter(|(_, s)| s.state().is_some()).collect();
        assert_eq!(occupied.len(), table.entries);
        assert!(occupied.windows(2).all(|pair| pair[0].1.print < pair[1].1.print), "out of order");
        for (at, slot) in occupied {
            let home = table.home(slot.print);
            assert!(home <= at, "before its home");
            assert!(table.slots[home..at].iter().all(|s| s.state().is_some()), "a gap before an entry");
        }
        let vacant = table.slots.iter().filter(|slot| slot.state().is_none());
        vacant.for_each(|slot| {
            assert_eq!(slot.print, BlockFingerprint::default(), "a vacant slot has a print")
        });
    }

    pub(in crate::index) fn location(n: u32) -> Location {
        Location { record: RecordId(n), block: n as u16 }
    }

    /// Prints from few homes, the last one included, so that runs are long and reach past the end.
    pub(in crate::index) fn print() -> impl Strategy<Value = BlockFingerprint> {
        let first = prop_oneof![
            (0..6u64).prop_map(|i| i << 54),
            (0..6u64).prop_map(|i| u64::MAX >> 4 & !(i << 5)),
            any::<u64>().prop_map(|any| any >> 4),
        ];
        (first, 0..3u32).prop_map(|(first, rest)| BlockFingerprint::from_parts(first, rest))
    }

    proptest! {
        #[test]
        fn a_table_answers_as_a_sorted_map_does(ops in prop::collection::vec((0..4u8, print()), 1..400)) {
            let mut table = Table::new(4, 0);
            let mut model = BTreeMap::new();
            for (n, (op, print)) in (0..).zip(ops) {
                if op > 0 {
                    let slot = Slot::new(print, State::Live, location(n), Heat::default());
                    match table.insert(slot) {
                        Ok(()) => prop_assert_eq!(model.insert(print, location(n)), None),
                        Err(there) => prop_assert_eq!(model.get(&print).copied(), Some(there.location())),
                    }
                } else {
                    prop_assert_eq!(table.remove(print).map(|slot| slot.location()), model.remove(&print));
                }
                check(&table);
            }
            let listed: BTreeMap<_, _> = table.iter().map(|slot| (slot.print, slot.location())).collect();
            prop_assert_eq!(&listed, &model);
            for print in model.keys() {
                prop_assert_eq!(table.get(*print).map(Slot::location), model.get(print).copied());
            }
        }
    }

    #[test]
    fn a_table_whose_prints_all_share_the_last_home_only_gets_slower() {
        let mut table = Table::new(0, 0);
        for i in 0..500u32 {
            let print = BlockFingerprint::from_parts(u64::MAX, i.wrapping_mul(0x9e37_79b9));
            assert!(table.insert(Slot::new(print, State::Live, location(i), Heat::default())).is_ok());
        }
        check(&table);
        assert!(table.bytes() < 1200 * size_of::<Slot>());
        for i in (0..500u32).rev() {
            let print = BlockFingerprint::from_parts(u64::MAX, i.wrapping_mul(0x9e37_79b9));
            assert_eq!(table.remove(print).map(|slot| slot.location()), Some(location(i)));
        }
        check(&table);
    }

    #[test]
    fn a_table_that_empties_gives_its_memory_back() {
        let mut table = Table::new(0, 0);
        let print = |i: u64| BlockFingerprint::from_parts(i.wrapping_mul(0x9e37_79b9_7f4a_7c15), 0);
        for i in 0..10_000 {
            assert!(table.insert(Slot::new(print(i), State::Live, location(0), Heat::default())).is_ok());
        }
        let full = table.bytes();
        assert!(full <= 10_000 * 30, "{full}");
        (0..9_990).for_each(|i| assert!(table.remove(print(i)).is_some()));
        check(&table);
        assert!(table.bytes() * 50 < full, "{} of {full}", table.bytes());
        (9_990..10_000).for_each(|i| assert!(table.get(print(i)).is_some()));
    }

    #[test]
    fn a_table_made_for_a_number_of_entries_does_not_grow_to_take_them() {
        let mut table = Table::new(0, 5_000);
        let homes = table.homes;
        for i in 0..5_000u64 {
            let print = BlockFingerprint::from_parts(i.wrapping_mul(0x9e37_79b9_7f4a_7c15), 0);
            assert!(table.insert(Slot::new(print, State::Live, location(0), Heat::default())).is_ok());
        }
        assert_eq!(table.homes, homes);
    }

    #[test]
    fn heat_changes_leave_state_and_lease_hint_alone() {
        let heat = Heat { frequency: 1, continued: true, epoch: 1000 };
        for state in [State::Pending, State::Live, State::Quarantined] {
            let slot = Slot::new(BlockFingerprint::default(), state, location(3), heat);
            assert_eq!((slot.state(), slot.heat(), slot.leased()), (Some(state), heat, false));
            slot.hint_leased(true);
            slot.update_heat(|heat| Heat { frequency: heat.frequency + 9, epoch: EPOCHS - 1, ..heat });
            assert_eq!(slot.heat(), Heat { frequency: 3, continued: true, epoch: EPOCHS - 1 });
            assert_eq!((slot.state(), slot.leased()), (Some(state), true));
            slot.hint_leased(false);
            assert_eq!((slot.state(), slot.leased()), (Some(state), false));
        }
    }
}
