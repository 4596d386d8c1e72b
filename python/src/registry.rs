//! Stretches of this process's memory that a store knows by their addresses.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use kvarts_contract::buffers::{Region, SharedBuf};

use crate::buffer::Held;

/// A stretch of this process's memory that the store knows.
pub(crate) struct Known {
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) region: Arc<Region>,
    /// Where in the region the stretch begins.
    pub(crate) origin: usize,
    /// What keeps the stretch where it is, if the region does not.
    #[allow(dead_code, reason = "the value is never read, and its drop releases the memory")]
    pub(crate) held: Option<Held>,
}

/// All of them, by address. None overlaps another.
#[derive(Default)]
pub(crate) struct Registry(RwLock<BTreeMap<usize, Arc<Known>>>);

impl Registry {
    /// The bytes at an address, if they are known.
    pub(crate) fn find(&self, address: usize, len: usize) -> Option<SharedBuf> {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let (_, known) = all.range(..=address).next_back()?;
        let at = address - known.start;
        if at.checked_add(len)? > known.len {
            return None;
        }
        SharedBuf::new(&known.region, known.origin.checked_add(at)?, len)
    }

    /// Bytes that are known from an address on.
    pub(crate) fn room(&self, address: usize) -> usize {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let known = all.range(..=address).next_back();
        known.map_or(0, |(_, known)| known.len.saturating_sub(address - known.start))
    }

    /// Makes a stretch known; nothing if it meets another.
    pub(crate) fn insert(&self, known: Known) -> Option<Arc<Known>> {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let end = known.start.checked_add(known.len)?;
        if all.range(..end).next_back().is_some_and(|(start, other)| start + other.len > known.start) {
            return None;
        }
        let known = Arc::new(known);
        all.insert(known.start, Arc::clone(&known));
        Some(known)
    }

    pub(crate) fn remove(&self, known: &Arc<Known>) {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if all.get(&known.start).is_some_and(|here| Arc::ptr_eq(here, known)) {
            all.remove(&known.start);
        }
    }
}
