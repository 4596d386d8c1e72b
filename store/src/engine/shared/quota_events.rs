//! Tells of blocks that a quota took out: the index knows fingerprints only, and events carry whole names.
//!
//! A quota makes room in memory, on the executor of the put that meets it. What it takes out is noted here by record, and the
//! executors that own the records read their headers for the names and tell (`read::evicted_names`). So these events alone come a moment after
//! the change; a block that is here again by then is not told of, because what was told of its coming is true.
//! Where a name cannot be had any more (the segment was recycled, the header cannot be read), or too much waits,
//! the stream is broken instead: every reader is told of a gap and takes a snapshot.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use super::Shared;
use super::recently_gone::Gone;
use super::record_class::RecordClass;
use crate::index::{BlockFingerprint, Eviction, Location, RecordInfo};
use kvarts_contract::sync::{Mutex, MutexGuard};

/// Blocks that may wait to be told of.
const WAITING_MAX: usize = 1 << 16;

/// Blocks of one record that were taken out.
#[derive(Debug)]
pub(crate) struct Unnamed {
    pub(crate) info: RecordInfo,
    pub(crate) class: Arc<RecordClass>,
    pub(crate) blocks: Vec<(u16, BlockFingerprint)>,
}

/// What was taken out and not told of.
#[derive(Debug, Default)]
pub(crate) struct QuotaEvents(Mutex<Records>);

#[derive(Debug, Default)]
struct Records {
    /// By where they lie: shard, segment, page.
    by_place: BTreeMap<(u16, u32, u32), Unnamed>,
    /// Blocks of all of them.
    blocks: usize,
}

impl QuotaEvents {
    fn lock(&self) -> MutexGuard<'_, Records> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False, and nothing waits any more, if it was too much.
    fn add(&self, info: RecordInfo, class: Arc<RecordClass>, block: (u16, BlockFingerprint)) -> bool {
        let mut records = self.lock();
        if records.blocks >= WAITING_MAX {
            *records = Records::default();
            return false;
        }
        let place = (info.shard, info.segment, info.page);
        let unnamed = || Unnamed { info, class, blocks: Vec::new() };
        records.by_place.entry(place).or_insert_with(unnamed).blocks.push(block);
        records.blocks += 1;
        true
    }

    /// What was taken out of this shard.
    pub(crate) fn take(&self, shard: u32) -> Vec<Unnamed> {
        let mut records = self.lock();
        let of_shard = records.by_place.extract_if(.., |place, _| u32::from(place.0) == shard);
        let taken: Vec<_> = of_shard.map(|(_, unnamed)| unnamed).collect();
        records.blocks -= taken.iter().map(|unnamed| unnamed.blocks.len()).sum::<usize>();
        taken
    }

    /// Whether there is something to tell.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().by_place.is_empty()
    }
}

/// Has the executors tell of what waits, if anything does.
pub(crate) trait TellEvicted: Send + Sync {
    fn tell_evicted(&self, shared: &Shared);
}

impl Shared {
    /// Takes a live block out whose name is not known, if it is at `at` and no lease holds it.
    pub(crate) fn evict_unnamed(&self, print: BlockFingerprint, at: Location) -> bool {
        let mut change = self.events.change();
        let record = self.index.records().get(at.record);
        let Eviction::Evicted { left } = self.index.try_evict(print, at, self.clock.now()) else {
            return false;
        };
        self.gone.note(print, Gone::Evicted);
        let known = record.and_then(|info| Some((info, self.classes.get(info.class)?)));
        if !known.is_some_and(|(info, class)| self.unnamed.add(info, class, (at.block, print))) {
            change.lose();
        }
        self.free_if_empty(at.record, left);
        true
    }
}
