//! Blocks that other nodes are said to have are asked of the bucket once no path leads to them: their node is gone, has them no more,
//! or gave bytes that are wrong.
//!
//! Nothing is asked of the bucket for their sake before. The read that lost them begins their restore as it does at its
//! beginning for the others, so here as well no piece of a read begins one.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use kvarts_cluster::paths::PathId;
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};
use kvarts_peer::read::LastResort;

use super::ColdTier;
use super::counts::add;
use super::readers::Reading;
use super::wish::Wish;

/// What a read takes of the bucket.
#[derive(Clone, Debug, Default)]
pub struct Coming {
    /// Of its first blocks whether they come from there; of the others none does.
    pub(super) blocks: Vec<bool>,
    pub(super) spare: Option<Arc<Spare>>,
    /// It is a reader of what brings them, while it lives.
    pub(super) reading: Option<Arc<Reading>>,
}

/// Blocks of a read that other nodes are said to have, and that the bucket seems to have.
#[derive(Debug)]
pub(super) struct Spare {
    cold: Weak<ColdTier>,
    path: PathId,
    of: (NamespaceId, Group, Coordinate),
    block_bytes: u64,
    by_layers: bool,
    /// By their places in the read.
    keys: BTreeMap<u32, BlockKey>,
    /// Whether the read is counted among those of which some blocks came from the bucket.
    is_counted: AtomicBool,
    /// The read is a reader of what brings them, from when it asked.
    readings: Mutex<Vec<Reading>>,
}

impl Spare {
    /// Those of a wish's keys of which `is_spare` holds; none if there are none.
    pub(super) fn of(
        cold: &Arc<ColdTier>,
        wish: &Wish<'_>,
        is_spare: impl Fn(&BlockKey) -> bool,
        is_counted: bool,
    ) -> Option<Arc<Self>> {
        let keys = (0u32..).zip(wish.keys).filter(|(_, key)| is_spare(key));
        let keys: BTreeMap<u32, BlockKey> = keys.map(|(place, key)| (place, *key)).collect();
        if keys.is_empty() {
            return None;
        }
        Some(Arc::new(Self {
            cold: Arc::downgrade(cold),
            path: cold.ways.bucket(),
            of: (wish.namespace, wish.group, wish.coordinate),
            block_bytes: wish.block_bytes,
            by_layers: wish.by_layers,
            keys,
            is_counted: AtomicBool::new(is_counted),
            readings: Mutex::default(),
        }))
    }
}

impl LastResort for Spare {
    fn path(&self) -> PathId {
        self.path
    }

    fn leads_to(&self, blocks: &[u32]) -> Vec<bool> {
        let Some(cold) = self.cold.upgrade() else { return Vec::new() };
        let wanted: Vec<Option<BlockKey>> =
            blocks.iter().map(|block| self.keys.get(block).copied()).collect();
        let keys: Vec<BlockKey> = wanted.iter().flatten().copied().collect();
        let ((namespace, group, coordinate), block_bytes, by_layers) =
            (self.of, self.block_bytes, self.by_layers);
        let wish = Wish { namespace, group, coordinate, keys: &keys, block_bytes, by_layers };
        let missing = wish.missing(&cold.store);
        let (coming, reading) = cold.take_off(&wish, &missing);
        self.readings.lock().unwrap_or_else(PoisonError::into_inner).push(reading);
        add(&cold.counts.not_from_nodes_blocks, coming.len() as u64);
        if !coming.is_empty() && !self.is_counted.swap(true, Ordering::Relaxed) {
            add(&cold.counts.waited_reads, 1);
        }
        // What is here by now is given by the bucket's path too.
        let leads = |key: &BlockKey| coming.contains(key) || !missing.iter().any(|(absent, _)| absent == key);
        wanted.iter().map(|key| key.as_ref().is_some_and(leads)).collect()
    }
}
