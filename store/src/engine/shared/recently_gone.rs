//! Why blocks went that are not here: the last departures by fingerprint, so that a miss can say "evicted" where it would
//! otherwise only say "not here".
//!
//! Bounded: [`PLACES`] of four bytes, one megabyte, made at the first departure and never again. Blocks fall into sets of
//! [`WAYS`] places by their fingerprint; in a set the oldest departure is forgotten first, on average after [`PLACES`] later
//! ones. Nothing of it is on disk: a store that was opened just now remembers nothing.
//!
//! What is remembered is 29 bits of the fingerprint. A block that never went is taken for one that did with probability
//! 2^-26 at most ([`WAYS`] * 2^-29): one miss of 67 million has a wrong reason. Besides, a put behind a block
//! that was refused for want of room is refused ([`Gone::NoRoom`]): with the same probability one behind a block that was never here.

use std::ops::Range;
use std::sync::PoisonError;

use super::Shared;
use crate::index::{BlockFingerprint, Lookup};
use kvarts_contract::api::Missing;
use kvarts_contract::sync::atomic::{AtomicBool, Ordering};
use kvarts_contract::sync::{PLAIN, RwLock, RwLockReadGuard};

/// Departures that are remembered, about.
const PLACES: usize = if PLAIN { 1 << 18 } else { 64 };
/// The most memory that they take.
pub(crate) const BYTES_MAX: usize = PLACES * size_of::<u32>();
/// Places that a block may be remembered in.
const WAYS: usize = 8;
/// Bits of a place that say why.
const WHY_BITS: u32 = 3;
/// Blocks that are looked at while no departure can be noted.
const AT_ONCE: usize = 512;

/// Why a block is not here any more.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Gone {
    /// Other blocks needed its room, on disk, in the index or within a quota.
    Evicted,
    /// Its time to live was over.
    Expired,
    /// It was deleted by its key or its prefix.
    Deleted,
    /// Its bytes were damaged, or its executor has died, or its directory was lost.
    OutOfService,
    /// It was never here: there was no room for it.
    NoRoom,
}

impl Gone {
    const fn bits(self) -> u32 {
        match self {
            Self::Evicted => 1,
            Self::Expired => 2,
            Self::Deleted => 3,
            Self::OutOfService => 4,
            Self::NoRoom => 5,
        }
    }

    /// Vacant places are zero.
    const fn of(place: u32) -> Option<Self> {
        match place & ((1 << WHY_BITS) - 1) {
            1 => Some(Self::Evicted),
            2 => Some(Self::Expired),
            3 => Some(Self::Deleted),
            4 => Some(Self::OutOfService),
            5 => Some(Self::NoRoom),
            _ => None,
        }
    }
}

/// The last departures. Its lock is taken last of all, and no wait stands under it.
#[derive(Debug, Default)]
pub(crate) struct RecentlyGone {
    places: RwLock<Vec<u32>>,
    /// Something was refused for want of room: most stores refuse nothing, and ask for no parent's reason.
    refused: AtomicBool,
}

/// The first place of a block's set, and what stands for the block there.
fn place_of(print: BlockFingerprint) -> (usize, u32) {
    let sets = PLACES / WAYS;
    (print.first() as usize % sets * WAYS, tag_in(print.rest()))
}

/// The bits that stand for a block.
const fn tag_in(place: u32) -> u32 {
    place >> WHY_BITS << WHY_BITS
}

impl RecentlyGone {
    /// Remembers why a block went.
    pub(crate) fn note(&self, print: BlockFingerprint, why: Gone) {
        if why == Gone::NoRoom {
            self.refused.store(true, Ordering::Relaxed);
        }
        let (first, tag) = place_of(print);
        let mut places = self.places.write().unwrap_or_else(PoisonError::into_inner);
        if places.is_empty() {
            *places = vec![0; PLACES];
        }
        let Some(set) = places.get_mut(first..first + WAYS) else { return };
        let known = set.iter().position(|place| tag_in(*place) == tag && Gone::of(*place).is_some());
        let end = known.unwrap_or(WAYS - 1);
        set.copy_within(..end, 1);
        if let Some(newest) = set.first_mut() {
            *newest = tag | why.bits();
        }
    }

    /// Why a block went, as far as it is remembered.
    pub(crate) fn why(&self, print: BlockFingerprint) -> Option<Gone> {
        self.read().why(print)
    }

    /// Whether anything may have been refused for want of room.
    pub(crate) fn any_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// The memory, to be looked at now. Nothing is noted while it is held.
    fn read(&self) -> Remembered<'_> {
        Remembered(self.places.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Bytes of memory that it takes.
    pub(crate) fn bytes(&self) -> usize {
        self.read().0.len() * size_of::<u32>()
    }
}

/// See [`RecentlyGone::read`].
struct Remembered<'a>(RwLockReadGuard<'a, Vec<u32>>);

impl Remembered<'_> {
    /// Why a block went, as far as it is remembered.
    fn why(&self, print: BlockFingerprint) -> Option<Gone> {
        let (first, tag) = place_of(print);
        let set = self.0.get(first..first + WAYS).unwrap_or_default();
        set.iter().filter(|place| tag_in(**place) == tag).find_map(|place| Gone::of(*place))
    }
}

/// What a block is for a look-up that cannot use it: of several columns' answers the greatest counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Standing {
    /// It is here, behind a block that is not.
    CutOff,
    NeverStored,
    Gone(Gone),
    Pending,
}

impl Shared {
    /// Why these blocks of a look-up cannot be used, each counted once whatever the number of columns; blocks that are being
    /// put are not counted. A column is its blocks' fingerprints and what the index says of each.
    pub(crate) fn missing<'a>(
        &self,
        blocks: Range<usize>,
        columns: impl Iterator<Item = (&'a [BlockFingerprint], &'a [Lookup])> + Clone,
    ) -> Missing {
        let mut missing = Missing::default();
        for begin in blocks.clone().step_by(AT_ONCE) {
            let remembered = self.gone.read();
            for block in begin..blocks.end.min(begin + AT_ONCE) {
                let standing = |(prints, found): (&[BlockFingerprint], &[Lookup])| {
                    let (print, found) = (prints.get(block)?, found.get(block)?);
                    Some(self.standing(*print, *found, &remembered))
                };
                let Some(standing) = columns.clone().filter_map(standing).max() else { continue };
                *match standing {
                    Standing::Pending => continue,
                    Standing::CutOff => &mut missing.cut_off,
                    Standing::NeverStored | Standing::Gone(Gone::NoRoom) => &mut missing.never_stored,
                    Standing::Gone(Gone::Evicted) => &mut missing.evicted,
                    Standing::Gone(Gone::Expired) => &mut missing.expired,
                    Standing::Gone(Gone::Deleted) => &mut missing.deleted,
                    Standing::Gone(Gone::OutOfService) => &mut missing.out_of_service,
                } += 1;
            }
        }
        missing
    }

    fn standing(&self, print: BlockFingerprint, found: Lookup, remembered: &Remembered<'_>) -> Standing {
        match found {
            Lookup::Live(_) => Standing::CutOff,
            Lookup::Pending => Standing::Pending,
            Lookup::Quarantined => Standing::Gone(Gone::OutOfService),
            // Hidden: see `hide_dead`.
            Lookup::Absent if self.any_dead() && matches!(self.index.lookup(print), Lookup::Live(_)) => {
                Standing::Gone(Gone::OutOfService)
            }
            Lookup::Absent => remembered.why(print).map_or(Standing::NeverStored, Standing::Gone),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print(n: u64) -> BlockFingerprint {
        let mixed = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        BlockFingerprint::from_parts(mixed ^ mixed >> 29, (mixed >> 7) as u32)
    }

    #[test]
    fn the_last_reason_counts_and_what_never_went_is_unknown() {
        let gone = RecentlyGone::default();
        assert_eq!((gone.read().why(print(1)), gone.bytes()), (None, 0));
        gone.note(print(1), Gone::Evicted);
        gone.note(print(2), Gone::Expired);
        gone.note(print(1), Gone::Deleted);
        let remembered = gone.read();
        let whys = [1, 2, 3].map(|n| remembered.why(print(n)));
        assert_eq!(whys, [Some(Gone::Deleted), Some(Gone::Expired), None]);
    }

    #[test]
    fn of_a_set_the_oldest_are_forgotten_and_repeated_ones_take_one_place() {
        let gone = RecentlyGone::default();
        let one_set = |n: u32| BlockFingerprint::from_parts(5, n << WHY_BITS);
        (0..3).for_each(|_| gone.note(one_set(0), Gone::Evicted));
        (1..WAYS as u32).for_each(|n| gone.note(one_set(n), Gone::Evicted));
        assert!((0..WAYS as u32).all(|n| gone.read().why(one_set(n)).is_some()));
        gone.note(one_set(0), Gone::Evicted);
        gone.note(one_set(99), Gone::Evicted);
        assert_eq!([0, 1, 99].map(|n| gone.read().why(one_set(n)).is_some()), [true, false, true]);
    }

    #[test]
    fn its_memory_is_bounded_most_of_the_latest_are_known_and_strangers_are_not() {
        let gone = RecentlyGone::default();
        let all = 3 * PLACES as u64;
        (0..all).for_each(|n| gone.note(print(n), Gone::Evicted));
        assert_eq!(gone.bytes(), BYTES_MAX);
        let remembered = gone.read();
        let known =
            |from: u64, to: u64| (from..to).filter(|n| remembered.why(print(*n)).is_some()).count() as u64;
        let last = PLACES as u64 / 2;
        assert!(known(all - last, all) > last * 9 / 10, "{} of {last}", known(all - last, all));
        assert!(known(0, last) < last / 10, "{}", known(0, last));
        assert!(known(all, 4 * all) <= 2, "{}", known(all, 4 * all));
    }
}
