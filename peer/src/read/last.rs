//! A path that is taken for blocks to which no other path leads any more.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use kvarts_cluster::dealer::PathSet;
use kvarts_cluster::paths::PathId;

use super::Copies;

/// A path that a read takes where every other one has failed: it is dearer, so nothing is asked of it before.
pub trait LastResort: Send + Sync + fmt::Debug {
    /// Which path it is.
    fn path(&self) -> PathId;

    /// Whether it leads from now on to each of these blocks, by their places in the whole read. Does not wait.
    fn leads_to(&self, blocks: &[u32]) -> Vec<bool>;
}

/// The last resort of some reads, and what it was asked for.
#[derive(Debug)]
pub(super) struct Last {
    resort: Arc<dyn LastResort>,
    asked: Mutex<BTreeSet<u32>>,
}

impl Copies {
    /// Where no path leads to a block any more, this one is asked whether it does: once for each block. The first that is set counts.
    pub fn at_last(&self, resort: Arc<dyn LastResort>) {
        // Of two the second one has no effect.
        let _ = self.last.set(Last { resort, asked: Mutex::default() });
    }

    /// The path of the last resort.
    pub(super) fn last_path(&self) -> PathSet {
        self.last.get().map_or_else(PathSet::default, |last| PathSet::default().with(last.resort.path()))
    }

    /// Asks the last resort for blocks to which no path leads, and that it was not asked for yet: gives those to which it leads now.
    pub(super) fn resort(&self, blocks: impl IntoIterator<Item = u32>) -> Vec<u32> {
        let Some(last) = self.last.get() else { return Vec::new() };
        let blocks: Vec<u32> = {
            // Each change is one step.
            let mut asked = last.asked.lock().unwrap_or_else(PoisonError::into_inner);
            blocks.into_iter().filter(|block| asked.insert(*block)).collect()
        };
        if blocks.is_empty() {
            return blocks;
        }
        let leads = last.resort.leads_to(&blocks);
        let found = blocks.into_iter().zip(leads).filter(|(_, leads)| *leads);
        let found: Vec<u32> = found.map(|(block, _)| block).collect();
        found.iter().for_each(|block| self.also(*block, self.last_path()));
        found
    }
}
