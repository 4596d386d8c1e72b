//! Which segments hold something whose time will be over, by that time: so that a sweep looks at those alone in which
//! something may have expired, and at nothing while nothing has.
//!
//! A segment is noted for a stretch of ten seconds when a record in it gets an expiry that falls there, and stays noted
//! until a sweep has found nothing more of that stretch in it. Expiry times that are changed over and over would make
//! this grow without bound: beyond a number of entries it is forgotten, and each shard's next sweep notes again what its
//! records say.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;

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
}

/// What is noted, of all shards. Usable from any thread.
#[derive(Debug, Default)]
pub(crate) struct Due(Mutex<Noted>);

/// What a sweep of a shard has to look at.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) segments: BTreeSet<u32>,
    /// Something was forgotten: the shard's records say what.
    pub(crate) forgotten: bool,
}

impl Due {
    fn lock(&self) -> MutexGuard<'_, Noted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something in a segment expires in this stretch.
    pub(crate) fn note(&self, (shard, segment): (u32, u32), stretch: u32) {
        let mut noted = self.lock();
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

    /// Takes the segments of a shard in which something expires in this stretch or before.
    pub(crate) fn take(&self, shard: u32, stretch: u32) -> Taken {
        let mut noted = self.lock();
        let mut taken = Taken { forgotten: noted.forgotten.remove(&shard), ..Taken::default() };
        let over = noted.segments.extract_if((shard, 0)..=(shard, stretch), |_, _| true);
        let over: Vec<_> = over.map(|(_, segments)| segments).collect();
        for segments in over {
            noted.entries -= segments.len();
            taken.segments.extend(segments);
        }
        taken
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
