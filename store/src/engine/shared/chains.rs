//! What blocks hang on, and how much of what is here is cut off from its beginning.
//!
//! A live block is cut off if a block before it is not here: it takes room, and no prompt can use it. Eviction takes ends of
//! chains first (`index/chains.rs`), so it cuts nothing off; deletes, faults and lost disks do. They are counted by a walk over the
//! records in memory, in the background: gaps between records are seen, those inside of one (deletes of single keys) are not. The
//! same walk tells the index what those records hang on that recovery has taken in, in any order.

use std::time::Duration;

use kvarts_layout::BlockKey;
use kvarts_layout::format::body::Parent as DiskParent;

use super::Shared;
use super::record_class::RecordClass;
use crate::engine::tasks::steps::Section;
use crate::index::{BlockFingerprint, Cut, Known, RecordCursor, Walk};
use kvarts_contract::api::Parent;
use kvarts_contract::clock::Nanos;
use kvarts_contract::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Records of a chain that are walked over without a turn for others.
const WALKED_AT_ONCE: usize = 128;
/// Blocks are not counted again for this many times as long as it took.
const REST: u32 = 64;

/// Live blocks that are behind a block which is not here, as they were counted last.
#[derive(Debug, Default)]
pub(crate) struct CutOff {
    blocks: AtomicU64,
    bytes: AtomicU64,
    /// Changes of what is here by then.
    changes: AtomicU64,
    /// Before this time they are not counted again.
    not_before: AtomicU64,
    /// A task counts them.
    counting: AtomicBool,
}

impl CutOff {
    /// Blocks, and bytes that they take on disk.
    pub(crate) fn counted(&self) -> (u64, u64) {
        (self.blocks.load(Relaxed), self.bytes.load(Relaxed))
    }
}

impl Shared {
    /// What a record of this class hangs on that has this parent; the default if that is not known, or if there is nothing.
    pub(crate) fn parent_print(&self, class: &RecordClass, parent: DiskParent) -> BlockFingerprint {
        match parent {
            DiskParent::Key(key) if !class.is_boundary() => self.print_in(class, &BlockKey(key)),
            _ => BlockFingerprint::default(),
        }
    }

    /// The same of a request.
    pub(crate) fn asked_parent(&self, class: &RecordClass, parent: Parent) -> BlockFingerprint {
        match parent {
            Parent::Key(key) => self.print_in(class, &key),
            Parent::Root | Parent::Unknown => BlockFingerprint::default(),
        }
    }

    fn print_in(&self, class: &RecordClass, key: &BlockKey) -> BlockFingerprint {
        self.index.key().of(class.namespace.local, key, class.group, class.coordinate)
    }

    /// Counts the blocks that are cut off, if something has come or gone since they were counted last, and not at once again where
    /// it takes long.
    pub(crate) async fn count_cut_off(&self) {
        let counts = self.counters.counts();
        let gone = counts.blocks_evicted + counts.blocks_deleted + counts.blocks_expired;
        let changes = 1 + gone + counts.blocks_stored + counts.blocks_quarantined;
        let began = self.clock.now();
        if self.cut_off.changes.load(Relaxed) == changes
            || began.0 < self.cut_off.not_before.load(Relaxed)
            || self.cut_off.counting.swap(true, Relaxed)
        {
            return;
        }
        let (blocks, bytes) = self.all_cut_off().await;
        self.cut_off.blocks.store(blocks, Relaxed);
        self.cut_off.bytes.store(bytes, Relaxed);
        self.cut_off.changes.store(changes, Relaxed);
        let rest: Duration = self.clock.now().since(began).saturating_mul(REST);
        let Nanos(not_before) = self.clock.now().plus(rest);
        self.cut_off.not_before.store(not_before, Relaxed);
        self.cut_off.counting.store(false, Relaxed);
    }

    async fn all_cut_off(&self) -> (u64, u64) {
        let mut section = Section::begin(&self.work.chains, &*self.clock);
        let (mut known, mut some) = (Known::default(), Vec::new());
        let (mut blocks, mut bytes) = (0, 0);
        let mut cursor = Some(RecordCursor::default());
        while let Some(from) = cursor {
            cursor = self.index.records().snapshot(from, &mut some);
            for (id, info) in some.iter().filter(|(_, info)| info.live > 0 && info.parent != 0) {
                let mut walk = Walk::from(*id, info);
                let found = loop {
                    match self.index.walk(&mut walk, &mut known, WALKED_AT_ONCE) {
                        Some(found) => break found,
                        None => section.step(WALKED_AT_ONCE as u64).await,
                    }
                };
                self.index.hang_record(*id, info, found);
                if found == Cut::Missing {
                    blocks += u64::from(info.live);
                    bytes += info.share(info.live);
                }
                section.step(1).await;
            }
            section.step(1).await;
        }
        (blocks, bytes)
    }
}
