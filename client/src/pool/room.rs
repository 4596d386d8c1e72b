//! Which bytes of a pool are free.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvarts_contract::buffers::region::PAGE;

/// The free ranges of a pool, in whole pages: where each begins, and its end. No two touch.
#[derive(Debug)]
pub(super) struct Room(Mutex<BTreeMap<u64, u64>>);

/// A range that is taken. Its last user's end gives it back; a read under way that may still write to it is a user.
#[derive(Debug)]
pub(super) struct Lease {
    room: Arc<Room>,
    range: Range<u64>,
}

impl Room {
    /// All of this many bytes.
    pub(super) fn new(bytes: u64) -> Arc<Self> {
        let end = bytes / PAGE as u64 * PAGE as u64;
        let all = (end > 0).then_some((0, end));
        Arc::new(Self(Mutex::new(all.into_iter().collect())))
    }

    fn free(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        // Each change is one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the first range that is long enough.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Option<Lease> {
        let bytes = bytes.max(1).checked_next_multiple_of(PAGE as u64)?;
        let mut free = self.free();
        let (start, end) =
            free.iter().map(|(start, end)| (*start, *end)).find(|(start, end)| end - start >= bytes)?;
        free.remove(&start);
        if end > start + bytes {
            free.insert(start + bytes, end);
        }
        Some(Lease { room: Arc::clone(self), range: start..start + bytes })
    }

    /// Bytes that are free.
    pub(super) fn bytes(&self) -> u64 {
        self.free().iter().map(|(start, end)| end - start).sum()
    }
}

impl Lease {
    /// Where it begins.
    pub(super) fn start(&self) -> u64 {
        self.range.start
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut free = self.room.free();
        let Range { mut start, mut end } = self.range;
        if let Some((&before, &touches)) = free.range(..start).next_back()
            && touches == start
        {
            free.remove(&before);
            start = before;
        }
        if let Some(behind) = free.remove(&end) {
            end = behind;
        }
        free.insert(start, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_taken_is_apart_and_comes_back_as_one(
            steps in prop::collection::vec((any::<bool>(), 1u64..9 * 4096), 1..80),
        ) {
            let room = Room::new(64 * 4096 + 5);
            let mut taken: Vec<Lease> = Vec::new();
            for (gives, bytes) in steps {
                if gives && !taken.is_empty() {
                    taken.swap_remove(bytes as usize % taken.len());
                } else if let Some(lease) = room.take(bytes) {
                    prop_assert!(lease.range.end - lease.range.start >= bytes && lease.range.end <= 64 * 4096);
                    let apart = |other: &Lease| other.range.end <= lease.range.start || lease.range.end <= other.range.start;
                    prop_assert!(taken.iter().all(apart));
                    taken.push(lease);
                }
                let used: u64 = taken.iter().map(|lease| lease.range.end - lease.range.start).sum();
                prop_assert_eq!(room.bytes(), 64 * 4096 - used);
            }
            taken.clear();
            prop_assert_eq!(room.free().clone().into_iter().collect::<Vec<_>>(), [(0, 64 * 4096)]);
        }
    }
}
