//! The order in which chosen records go: each after all others that hang on it, however many shards they lie in.

use std::collections::{BTreeMap, BTreeSet};

use crate::index::RecordId;

/// A chosen record.
#[derive(Debug)]
struct Chosen<T> {
    one: T,
    /// The record that it hangs on.
    parent: Option<RecordId>,
    /// Chosen records that hang on it and are here.
    behind: u32,
}

/// Chosen records, of which those are given out next on which no chosen one hangs, the least first.
#[derive(Debug)]
pub(super) struct Waves<T> {
    waiting: BTreeMap<RecordId, Chosen<T>>,
    /// Records that are not chosen, and how many chosen ones hang on each.
    behind: BTreeMap<RecordId, u32>,
    /// Those on which no chosen one hangs.
    next: BTreeSet<(T, RecordId)>,
}

impl<T: Copy + Ord> Waves<T> {
    pub(super) fn new() -> Self {
        Self { waiting: BTreeMap::new(), behind: BTreeMap::new(), next: BTreeSet::new() }
    }

    pub(super) fn add(&mut self, id: RecordId, one: T) {
        let behind = self.behind.remove(&id).unwrap_or(0);
        self.waiting.insert(id, Chosen { one, parent: None, behind });
    }

    /// A chosen record hangs on another one, which may be chosen later.
    pub(super) fn hangs(&mut self, id: RecordId, parent: RecordId) {
        let Some(record) = self.waiting.get_mut(&id).filter(|_| id != parent) else { return };
        record.parent = Some(parent);
        match self.waiting.get_mut(&parent) {
            Some(before) => before.behind += 1,
            None => *self.behind.entry(parent).or_default() += 1,
        }
    }

    /// Nothing chosen hangs on this one: it goes in the next wave. Asked of each once, when all is known of what hangs on what.
    pub(super) fn is_first(&mut self, id: RecordId) {
        if let Some(record) = self.waiting.get(&id).filter(|record| record.behind == 0) {
            self.next.insert((record.one, id));
        }
    }

    /// The next record, if there is one.
    pub(super) fn take(&mut self) -> Option<(RecordId, T)> {
        self.next.pop_first().map(|(one, id)| (id, one))
    }

    /// A record has gone: what it hung on may go. Gives what it was.
    pub(super) fn gone(&mut self, id: RecordId) -> Option<T> {
        let gone = self.waiting.remove(&id)?;
        let Some(parent) = gone.parent else { return Some(gone.one) };
        if let Some(before) = self.waiting.get_mut(&parent) {
            before.behind -= 1;
            if before.behind == 0 {
                self.next.insert((before.one, parent));
            }
        } else if let Some(behind) = self.behind.get_mut(&parent) {
            *behind -= 1;
        }
        Some(gone.one)
    }

    /// Forgets one of what stays; false if there is nothing left.
    pub(super) fn forget_one(&mut self) -> bool {
        self.next.pop_first();
        self.waiting.pop_first().is_some() | self.behind.pop_first().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Chains with branches; some records stay.
        #[test]
        fn each_goes_after_all_that_hang_on_it_and_stays_with_one_that_stays(
            parents in prop::collection::vec(any::<prop::sample::Index>(), 1..200),
            staying in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
            batch in 1..100u32,
            order in any::<u64>(),
        ) {
            let count = parents.len() as u32;
            let parent = |id: u32| (id > 0).then(|| parents[id as usize].index(id as usize) as u32);
            let staying: BTreeSet<u32> = staying.iter().map(|one| one.index(count as usize) as u32).collect();
            // Chosen in any order, some at a time.
            let mut ids: Vec<u32> = (0..count).collect();
            ids.sort_by_key(|id| (u64::from(*id) + 1).wrapping_mul(order | 1));
            let (mut waves, mut gone) = (Waves::new(), BTreeSet::new());
            for some in ids.chunks(batch as usize) {
                some.iter().for_each(|id| waves.add(RecordId(*id), *id));
                for &id in some {
                    if let Some(parent) = parent(id) {
                        waves.hangs(RecordId(id), RecordId(parent));
                    }
                }
                some.iter().for_each(|id| waves.is_first(RecordId(*id)));
                while let Some((id, one)) = waves.take() {
                    prop_assert_eq!(id.0, one);
                    let mut hang = (0..count).filter(|child| parent(*child) == Some(one));
                    // The store itself lets none go before what hangs on it.
                    if hang.all(|child| gone.contains(&child)) && !staying.contains(&one) {
                        gone.insert(one);
                        waves.gone(id);
                    }
                }
            }
            let mut stays = staying.clone();
            for id in (0..count).rev() {
                if stays.contains(&id) && let Some(parent) = parent(id) {
                    stays.insert(parent);
                }
            }
            prop_assert_eq!(gone, (0..count).filter(|id| !stays.contains(id)).collect());
        }
    }
}
