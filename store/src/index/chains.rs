//! What blocks hang on: of each block the index counts the records that hang on it, so that a chain can be taken from its end.
//!
//! A record hangs on the block before its first one, if that is here or on its way when the record comes. The count stands in
//! the block's entry: it moves with the block, and goes with it. It is a hint for eviction and no look-up depends on it. It never stays
//! too high: a record that is freed takes back what it added. It is too low where a block was deleted under what hangs on
//! it and then came back.
//!
//! A put under way counts as a record that hangs on what it will hang on: so no room is made of that. Its records take that
//! over. So a block never counts what came before it, and no blocks hang on each other in a circle, whatever parents
//! callers name: such blocks would never go. Moves may make one of blocks that are deleted and put behind what was behind them;
//! the walk that looks for what is cut off ends it.

use std::collections::{BTreeMap, BTreeSet};

use super::groups::partition_of;
use super::table::{HANGING_MAX, Slot};
use super::{
    BlockFingerprint, Index, Inner, Location, Lookup, RecordError, RecordId, RecordInfo, read, write,
};

/// What a record is with regard to the blocks before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// All before it are here, or on their way, or it is not known what is before it.
    Whole,
    /// A block before it is not here.
    Missing,
    /// Its chain leads into itself: keys are the callers' to choose.
    Circle,
}

/// What walks have found of records, so that each is walked once: two bits of each.
#[derive(Debug, Default)]
pub struct Known(BTreeMap<u32, u64>);

impl Known {
    const EACH: u32 = 32;

    /// From 1 to 3; 0 where nothing is known.
    fn bits(&self, record: RecordId) -> u64 {
        let word = self.0.get(&(record.0 / Self::EACH)).copied().unwrap_or_default();
        word >> (2 * (record.0 % Self::EACH)) & 3
    }

    fn set_bits(&mut self, record: RecordId, bits: u64) {
        let at = 2 * (record.0 % Self::EACH);
        let word = self.0.entry(record.0 / Self::EACH).or_default();
        *word = *word & !(3 << at) | bits << at;
    }

    fn get(&self, record: RecordId) -> Option<Cut> {
        match self.bits(record) {
            1 => Some(Cut::Whole),
            2 => Some(Cut::Missing),
            3 => Some(Cut::Circle),
            _ => None,
        }
    }

    fn set(&mut self, record: RecordId, cut: Cut) {
        self.set_bits(record, 1 + cut as u64);
    }
}

/// A search for the records that descend from some blocks.
#[derive(Debug, Default)]
pub struct Descent {
    /// The first 64 bits of the blocks' fingerprints.
    roots: BTreeSet<u64>,
    /// Records with such a block that is live, and the first one's place.
    places: BTreeMap<RecordId, u16>,
    known: Known,
}

const STRANGER: u64 = 1;
const DESCENDANT: u64 = 2;

impl Descent {
    /// How many blocks it looks for the descendants of.
    pub fn roots(&self) -> usize {
        self.roots.len()
    }

    /// Whether it is known of a live block that it is one of them, or descends from them. What has come since is not known.
    pub fn has(&self, at: Location) -> bool {
        self.places.get(&at.record).is_some_and(|first| *first <= at.block)
            || self.known.bits(at.record) == DESCENDANT
    }
}

/// A walk from a record to the beginning of its chain.
#[derive(Debug)]
pub struct Walk {
    at: u64,
    passed: Vec<RecordId>,
}

impl Walk {
    /// From this record.
    pub fn from(id: RecordId, info: &RecordInfo) -> Self {
        Self { at: info.parent, passed: vec![id] }
    }
}

impl Inner {
    pub(super) fn hanging(&self, slot: &Slot) -> u32 {
        match slot.hanging() {
            HANGING_MAX => self.crowded.get(&slot.print().first()).copied().unwrap_or(HANGING_MAX),
            few => few,
        }
    }

    /// Changes the count of a block by one; false if it is not here.
    fn count(&mut self, first: u64, more: bool) -> bool {
        let Some(slot) = self.table.get_first(first) else { return false };
        let before = self.hanging(slot);
        let count = if more { before.saturating_add(1) } else { before.saturating_sub(1) };
        match count {
            HANGING_MAX.. => self.crowded.insert(first, count),
            _ if before == HANGING_MAX => self.crowded.remove(&first),
            _ => None,
        };
        self.table.get_first_mut(first).map(|slot| slot.set_hanging(count)).is_some()
    }
}

impl Index {
    fn count(&self, first: u64, more: bool) -> bool {
        let print = BlockFingerprint::from_parts(first, 0);
        first != 0 && write(&self.partitions[partition_of(print, self.bits)].0).count(first, more)
    }

    /// Something hangs on the block whose fingerprint has these first 64 bits: until [`Index::let_go`] that is counted. False,
    /// and nothing counted, if the block is neither here nor on its way.
    pub fn hang(&self, first: u64) -> bool {
        self.count(first, true)
    }

    /// Ends what [`Index::hang`] has begun.
    pub fn let_go(&self, first: u64) {
        if kvarts_layout::planted!("let-go-forgotten") {
            return;
        }
        self.count(first, false);
    }

    /// How many records and puts hang on a block; 0 for one that is not here.
    pub fn hanging(&self, print: BlockFingerprint) -> u32 {
        let inner = read(self.partition(print));
        inner.table.get(print).map_or(0, |slot| inner.hanging(slot))
    }

    /// Forgets a record that has no live block: it hangs on nothing any more.
    pub fn free_record(&self, id: RecordId) -> Result<RecordInfo, RecordError> {
        let freed = self.records.free(id)?;
        self.freed(&freed);
        Ok(freed)
    }

    /// Ends one hold on a record, which may have been to be freed with the last of them.
    pub fn release_record(&self, id: RecordId) {
        if let Some(freed) = self.records.release(id) {
            self.freed(&freed);
        }
    }

    fn freed(&self, record: &RecordInfo) {
        if record.hangs {
            self.let_go(record.parent);
        }
    }

    /// Goes on with a walk, over `most` records at most, and says what the record is that it began at; `None` if it has not
    /// ended.
    pub fn walk(&self, walk: &mut Walk, known: &mut Known, most: usize) -> Option<Cut> {
        if let [first] = walk.passed[..]
            && let Some(found) = known.get(first)
        {
            return Some(found);
        }
        // Until the walk ends what it has passed counts as a circle: there is one if it comes by again.
        if let Some(last) = walk.passed.last() {
            known.set(*last, Cut::Circle);
        }
        let found = self.walk_on(walk, known, most)?;
        walk.passed.iter().for_each(|id| known.set(*id, found));
        Some(found)
    }

    fn walk_on(&self, walk: &mut Walk, known: &mut Known, most: usize) -> Option<Cut> {
        for _ in 0..most {
            if walk.at == 0 {
                return Some(Cut::Whole);
            }
            let location = match self.lookup_first(walk.at) {
                Lookup::Live(location) => location,
                Lookup::Pending => return Some(Cut::Whole),
                Lookup::Absent | Lookup::Quarantined => return Some(Cut::Missing),
            };
            if let Some(known) = known.get(location.record) {
                return Some(known);
            }
            let Some(record) = self.records.get(location.record) else { return Some(Cut::Whole) };
            walk.passed.push(location.record);
            known.set(location.record, Cut::Circle);
            walk.at = record.parent;
        }
        None
    }

    /// Counts a record among what hangs on its parent, if it does not yet: for one that recovery has taken in, of which it is
    /// not known what was here when it came. One whose chain leads into itself hangs on nothing from now on, or it would never go.
    pub fn hang_record(&self, id: RecordId, info: &RecordInfo, found: Cut) {
        let parent = info.parent;
        match (found, info.hangs) {
            (Cut::Circle, true) if self.records.note_hangs(id, parent, false) => self.let_go(parent),
            (Cut::Whole | Cut::Missing, false)
                if self.hang(parent) && !self.records.note_hangs(id, parent, true) =>
            {
                self.let_go(parent);
            }
            _ => {}
        }
    }

    /// Has a search look for what descends from this block, too.
    pub fn descend_from(&self, descent: &mut Descent, print: BlockFingerprint) {
        descent.roots.insert(print.first());
        if let Lookup::Live(at) = self.lookup(print) {
            let first = descent.places.entry(at.record).or_insert(at.block);
            *first = at.block.min(*first);
        }
    }

    /// Goes on with a walk, over `most` records at most, and says whether the record that it began at has one of the blocks or
    /// descends from one; `None` if it has not ended.
    pub fn descends(&self, walk: &mut Walk, descent: &mut Descent, most: usize) -> Option<bool> {
        if let [first] = walk.passed[..] {
            match descent.known.bits(first) {
                0 => {}
                known => return Some(known == DESCENDANT || descent.places.contains_key(&first)),
            }
        }
        // Until the walk ends what it has passed descends from nothing: it ends if it comes by again.
        let found = self.descends_on(walk, descent, most)?;
        let bits = if found { DESCENDANT } else { STRANGER };
        walk.passed.iter().for_each(|id| descent.known.set_bits(*id, bits));
        Some(found || walk.passed.first().is_some_and(|first| descent.places.contains_key(first)))
    }

    fn descends_on(&self, walk: &mut Walk, descent: &mut Descent, most: usize) -> Option<bool> {
        for _ in 0..most {
            if let Some(last) = walk.passed.last() {
                descent.known.set_bits(*last, STRANGER);
            }
            if walk.at == 0 || descent.roots.contains(&walk.at) {
                return Some(walk.at != 0);
            }
            let Lookup::Live(at) = self.lookup_first(walk.at) else { return Some(false) };
            if descent.has(at) {
                return Some(true);
            }
            if descent.known.bits(at.record) == STRANGER {
                return Some(false);
            }
            let Some(record) = self.records.get(at.record) else { return Some(false) };
            walk.passed.push(at.record);
            walk.at = record.parent;
        }
        None
    }

    /// What is known of the block whose fingerprint has these first 64 bits.
    pub fn lookup_first(&self, first: u64) -> Lookup {
        let print = BlockFingerprint::from_parts(first, 0);
        read(self.partition(print)).table.get_first(first).map_or(Lookup::Absent, Slot::lookup)
    }
}
