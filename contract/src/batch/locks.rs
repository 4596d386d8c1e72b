//! Which batches of a handle hold leases, and on which keys: engines unlock by key.
//!
//! A lease may end by itself without being told, so what stands here can be out of date: ending a lease twice
//! does nothing. The table is bounded; past its limit it forgets its oldest batches, whose leases then end by
//! themselves when their time is over.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;

use kvarts_layout::BlockKey;

use super::BatchId;
use crate::api::LeaseId;
use crate::sync::{Mutex, MutexGuard};

/// The most locked keys that are remembered.
const KEYS_MAX: usize = 1 << 20;

#[derive(Debug)]
struct Locked {
    /// One for each column that it asked for.
    leases: Vec<LeaseId>,
    /// Keys that were not unlocked yet.
    keys: BTreeSet<BlockKey>,
}

#[derive(Debug, Default)]
struct State {
    batches: BTreeMap<BatchId, Locked>,
    by_key: BTreeSet<(BlockKey, BatchId)>,
}

#[derive(Debug, Default)]
pub(super) struct Locks(Mutex<State>);

impl Locks {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn insert(&self, batch: BatchId, leases: Vec<LeaseId>, keys: BTreeSet<BlockKey>) {
        self.lock().insert(batch, Locked { leases, keys }, KEYS_MAX);
    }

    pub(super) fn remove(&self, batch: BatchId) -> Vec<LeaseId> {
        self.lock().remove(batch)
    }

    /// Takes one lock off each key; gives the leases that have no key left.
    pub(super) fn remove_keys(&self, keys: &[BlockKey]) -> Vec<LeaseId> {
        let mut state = self.lock();
        keys.iter().flat_map(|key| state.remove_key(key)).collect()
    }

    pub(super) fn clear(&self) -> Vec<LeaseId> {
        let state = std::mem::take(&mut *self.lock());
        state.batches.into_values().flat_map(|locked| locked.leases).collect()
    }
}

impl State {
    fn insert(&mut self, batch: BatchId, locked: Locked, keys_max: usize) {
        while self.by_key.len() + locked.keys.len() > keys_max {
            let Some(oldest) = self.batches.first_key_value().map(|(batch, _)| *batch) else { break };
            self.remove(oldest);
        }
        self.by_key.extend(locked.keys.iter().map(|key| (*key, batch)));
        self.batches.insert(batch, locked);
    }

    fn remove(&mut self, batch: BatchId) -> Vec<LeaseId> {
        let Some(locked) = self.batches.remove(&batch) else { return Vec::new() };
        for key in locked.keys {
            self.by_key.remove(&(key, batch));
        }
        locked.leases
    }

    fn remove_key(&mut self, key: &BlockKey) -> Vec<LeaseId> {
        let range = (*key, BatchId(0))..=(*key, BatchId(u64::MAX));
        let Some((_, batch)) = self.by_key.range(range).next().copied() else { return Vec::new() };
        self.by_key.remove(&(*key, batch));
        let Some(locked) = self.batches.get_mut(&batch) else { return Vec::new() };
        locked.keys.remove(key);
        if locked.keys.is_empty() { self.remove(batch) } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: u8) -> BlockKey {
        BlockKey([name; 32])
    }

    fn locked(lease: u64, names: &[u8]) -> Locked {
        Locked { leases: vec![LeaseId(lease)], keys: names.iter().map(|name| key(*name)).collect() }
    }

    #[test]
    fn a_lease_is_let_go_with_its_last_key_and_the_oldest_lock_on_a_key_goes_first() {
        let locks = Locks::default();
        locks.lock().insert(BatchId(1), locked(10, &[1, 2]), 100);
        locks.lock().insert(BatchId(2), locked(20, &[2]), 100);
        assert_eq!(locks.remove_keys(&[key(2), key(9)]), []);
        assert_eq!(locks.remove_keys(&[key(2)]), [LeaseId(20)]);
        assert_eq!(locks.remove_keys(&[key(2)]), []);
        assert_eq!(locks.remove_keys(&[key(1)]), [LeaseId(10)]);
        assert_eq!((locks.clear(), locks.lock().by_key.len()), (vec![], 0));
    }

    #[test]
    fn a_full_table_forgets_its_oldest_batches() {
        let mut state = State::default();
        for (batch, lease) in [(1, 10), (2, 20), (3, 30)] {
            state.insert(BatchId(batch), locked(lease, &[1, 2]), 5);
        }
        assert_eq!(state.by_key.len(), 4);
        assert_eq!(state.remove(BatchId(1)), []);
        assert_eq!(state.remove(BatchId(2)), [LeaseId(20)]);
        assert_eq!(state.remove(BatchId(3)), [LeaseId(30)]);
        assert!(state.by_key.is_empty());
    }
}
