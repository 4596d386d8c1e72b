//! Copies of what is read often from other nodes: what is hot is decided in [`kvarts_cluster::hot`], here it is copied.
//!
//! Reads wait for none of this: what is to be copied is queued, and where the queue is full the block has to become hot again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvarts_cluster::hot::{ColumnName, Hot, Rule};
use kvarts_layout::{BlockKey, planted};
use tokio::sync::mpsc;

use super::{ClusterNode, Column};

/// Reads whose blocks wait to be copied.
const WAITING: usize = 64;

/// Blocks of one column that are hot.
pub(super) type HotBlocks = (ColumnName, Vec<BlockKey>);

/// What is hot here, and the way to who copies it.
#[derive(Debug)]
pub(super) struct Warm {
    hot: Mutex<Hot>,
    to: mpsc::Sender<HotBlocks>,
    copied: AtomicU64,
    failed: AtomicU64,
}

/// Copies of hot blocks, for an operator.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HotCounts {
    /// Blocks whose reads from other nodes are counted.
    pub counted: u64,
    /// Blocks whose copy is under way, or here and within its time.
    pub now: u64,
    /// Blocks that were copied so far.
    pub copied: u64,
    /// Blocks that were hot and could not be copied.
    pub failed: u64,
}

impl Warm {
    pub(super) fn new(rule: Rule) -> (Self, mpsc::Receiver<HotBlocks>) {
        let (to, blocks) = mpsc::channel(WAITING);
        let hot = Mutex::new(Hot::new(rule));
        (Self { hot, to, copied: AtomicU64::new(0), failed: AtomicU64::new(0) }, blocks)
    }

    fn lock(&self) -> MutexGuard<'_, Hot> {
        // Counts are hints: every change is one step.
        self.hot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, column: ColumnName, keys: &[BlockKey]) {
        self.lock().failed(column, keys);
        self.failed.fetch_add(keys.len() as u64, Ordering::Relaxed);
    }
}

impl Column<'_> {
    pub(super) fn name(&self) -> ColumnName {
        (self.namespace, self.group, self.coordinate)
    }
}

impl ClusterNode {
    /// A read goes to these blocks of other nodes, or to blocks that are here.
    pub(super) fn note_read<'a>(
        &self,
        column: &Column<'_>,
        blocks: impl Iterator<Item = (&'a BlockKey, bool)>,
    ) {
        let Some(warm) = &self.warm else { return };
        let hot = warm.lock().read(column.name(), blocks, self.now());
        if hot.is_empty() {
            return;
        }
        if let Err(error) = warm.to.try_send((column.name(), hot)) {
            let (column, keys) = error.into_inner();
            warm.failed(column, &keys);
        }
    }

    /// Whether anything is counted of which copies may be here.
    pub(super) fn counts_own_reads(&self) -> bool {
        self.warm.as_ref().is_some_and(|warm| !warm.lock().is_empty())
    }

    pub(super) fn hot_counts(&self) -> HotCounts {
        let Some(warm) = &self.warm else { return HotCounts::default() };
        let hot = warm.lock();
        HotCounts {
            counted: hot.len() as u64,
            now: hot.copied(self.now()) as u64,
            copied: warm.copied.load(Ordering::Relaxed),
            failed: warm.failed.load(Ordering::Relaxed),
        }
    }
}

/// Copies what is hot, for as long as the node runs.
pub(super) async fn copy(node: Arc<ClusterNode>, mut blocks: mpsc::Receiver<HotBlocks>) {
    // ends: the node stops, which ends the task
    while let Some((name, keys)) = blocks.recv().await {
        let Some(warm) = &node.warm else { return };
        let (namespace, group, coordinate) = name;
        let column = Column { namespace, group, coordinate, keys: &keys };
        let hold = Some(warm.lock().hold()).filter(|_| !planted!("hot-copies-stay"));
        let copied = match node.store.shape(namespace, group, coordinate) {
            Ok(shape) => node.replicate(column, &shape, hold).await,
            Err(error) => Err(error),
        };
        match copied {
            Ok(done) => {
                warm.copied.fetch_add(u64::from(done.stored), Ordering::Relaxed);
                if done.missing > 0 {
                    let here = node.own_blocks(&Column { keys: &keys, ..column });
                    let missing = keys.iter().zip(here).filter(|(_, here)| !here);
                    let missing: Vec<BlockKey> = missing.map(|(key, _)| *key).collect();
                    warm.failed(name, &missing);
                }
            }
            Err(error) => {
                tracing::debug!(%error, "hot blocks were not copied");
                warm.failed(name, &keys);
            }
        }
    }
}
