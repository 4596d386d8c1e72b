//! Which segments hold something whose time will be over, by that time: so that a sweep looks at those alone in which
//! something may have expired, and at nothing while nothing has; and so that a look-up looks for expired blocks only where the first time
//! of all may be over.
//!
//! A segment is noted for a stretch of ten seconds when a record in it gets an expiry that falls there, and stays noted
//! until a sweep has found nothing more of that stretch in it. Expiry times that are changed over and over would make
//! this grow without bound: beyond a number of entries it is forgotten, and each shard's next sweep notes again what its
//! records say.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;

use kvarts_contract::sync::atomic::{AtomicU32, Ordering};
use kvarts_contract::sync::{Mutex, MutexGuard};

/// Steps of expiry in one stretch: ten seconds.
const STRETCH: u32 = 100;
/// Segments noted for some stretch, at most.
const NOTED_MAX: usize = 1 << 16;

/// The stretch of a time, as expiry counts it.
pub(crate) fn stretch_of(expires: u32) -> u32 {
    expires / STRETCH
}

#[derive(Debug, Default)]
struct Noted {
    /// By shard and stretch.
    segments: BTreeMap<(u32, u32), BTreeSet<u32>>,
    entries: usize,
    /// Shards of which something was forgotten.
    forgotten: BTreeSet<u32>,
    /// Sweeps that have taken something and have not ended.
    sweeps: usize,
}

/// What is noted, of all shards. Usable from any thread.
#[derive(Debug)]
pub(crate) struct Due {
    noted: Mutex<Noted>,
    /// Nothing that is here expires in a stretch before this one.
    first: AtomicU32,
}

impl Default for Due {
    fn default() -> Self {
        Self { noted: Mutex::default(), first: AtomicU32::new(u32::MAX) }
    }
}

/// What a sweep of a shard has to look at.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) segments: BTreeSet<u32>,
    /// Something was forgotten: the shard's records say what.
    pub(crate) forgotten: bool,
}

impl Due {
    fn lock(&self) -> MutexGuard<'_, Noted> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the time of something may be over in this stretch.
    pub(crate) fn may_be_over(&self, stretch: u32) -> bool {
        self.first.load(Ordering::Acquire) <= stretch
    }

    /// Something in a segment expires in this stretch. Noted before it can be found.
    pub(crate) fn note(&self, (shard, segment): (u32, u32), stretch: u32) {
        let mut noted = self.lock();
        self.first.fetch_min(stretch, Ordering::AcqRel);
        if noted.entries >= NOTED_MAX {
            let segments = std::mem::take(&mut noted.segments);
            noted.forgotten.extend(segments.into_keys().map(|(shard, _)| shard));
            noted.forgotten.insert(shard);
            noted.entries = 0;
        }
        if noted.segments.entry((shard, stretch)).or_default().insert(segment) {
            noted.entries += 1;
        }
    }

    /// Takes the segments of a shard in which something expires in this stretch or before. The sweep that does must end
    /// ([`Due::swept`]).
    pub(crate) fn take(&self, shard: u32, stretch: u32) -> Taken {
        let mut noted = self.lock();
        noted.sweeps += 1;
        let mut taken = Taken { forgotten: noted.forgotten.remove(&shard), ..Taken::default() };
        let over = noted.segments.extract_if((shard, 0)..=(shard, stretch), |_, _| true);
        let over: Vec<_> = over.map(|(_, segments)| segments).collect();
        for segments in over {
            noted.entries -= segments.len();
            taken.segments.extend(segments);
        }
        taken
    }

    /// A sweep has taken out what it found expired, or noted it again.
    pub(crate) fn swept(&self) {
        let mut noted = self.lock();
        noted.sweeps = noted.sweeps.saturating_sub(1);
        // What another sweep has taken is noted nowhere.
        if noted.sweeps > 0 {
            return;
        }
        let first = noted.segments.keys().map(|(_, stretch)| *stretch).min();
        let first = if noted.forgotten.is_empty() { first.unwrap_or(u32::MAX) } else { 0 };
        self.first.store(first, Ordering::Release);
    }

    /// Segments that are noted for some stretch.
    pub(crate) fn len(&self) -> usize {
        self.lock().entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_due_is_taken_once_and_of_its_shard_alone() {
        let due = Due::default();
        for (place, stretch) in [((1, 7), 3), ((1, 7), 3), ((1, 8), 4), ((1, 7), 5), ((2, 9), 3)] {
            due.note(place, stretch);
        }
        assert_eq!(due.len(), 4);
        assert_eq!(due.take(1, 2), Taken::default());
        assert_eq!(due.take(1, 4).segments, BTreeSet::from([7, 8]));
        assert_eq!(due.take(1, 4), Taken::default());
        assert_eq!((due.take(2, 9).segments, due.len()), (BTreeSet::from([9]), 1));
    }

    /// One life of a day costs the look-ups of others nothing.
    #[test]
    fn nothing_may_be_over_before_the_first_time_of_all() {
        let due = Due::default();
        assert!(!due.may_be_over(u32::MAX - 1));
        due.note((1, 7), 50);
        due.note((2, 7), 30);
        assert!(due.may_be_over(30) && !due.may_be_over(29));
        // While one sweep is under way, another shard's end says nothing.
        assert_eq!(due.take(2, 30).segments, BTreeSet::from([7]));
        assert_eq!(due.take(1, 30), Taken::default());
        due.swept();
        assert!(due.may_be_over(30));
        due.swept();
        assert!(due.may_be_over(50) && !due.may_be_over(49));
        // What was forgotten may be over at any time.
        for stretch in 60..60 + NOTED_MAX as u32 {
            due.note((1, 8), stretch);
        }
        due.take(2, 0);
        due.swept();
        assert!(due.may_be_over(0));
        due.take(1, 0);
        due.swept();
        assert!(!due.may_be_over(0));
    }

    #[test]
    fn times_that_change_over_and_over_take_bounded_memory() {
        let due = Due::default();
        for stretch in 0..3 * NOTED_MAX as u32 {
            due.note((stretch % 2, 1), stretch);
            assert!(due.len() <= NOTED_MAX);
        }
        assert!(due.take(0, 0).forgotten && due.take(1, 0).forgotten && !due.take(1, 0).forgotten);
    }
}
