//! What a put does with blocks that another node has: decided from the directory, within a moment.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvarts_cluster::partition::Tag;

use super::{ClusterNode, Column};

/// How long a put waits for the directory at most. A holder that does not answer by then knows of no copy, and the blocks are stored.
const PUT_TIMEOUT: Duration = Duration::from_millis(10);

/// What a put does with blocks that another node has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PutPolicy {
    /// Stores them: the directory is not asked.
    #[default]
    Store,
    /// Stores them as copies that live for so long at most.
    Keep(Duration),
    /// Says that they are held there, and writes nothing.
    Single,
}

/// What puts were told of other nodes.
#[derive(Debug, Default)]
pub(super) struct Puts {
    kept: AtomicU64,
    held: AtomicU64,
    unasked: AtomicU64,
}

/// What became of blocks of puts that other nodes had, for an operator.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PutCounts {
    /// Blocks that were stored for a time, as another node had them.
    pub kept: u64,
    /// Blocks that were not written, as another node had them.
    pub held: u64,
    /// Blocks that were stored because the directory did not answer in time.
    pub unasked: u64,
}

impl Puts {
    pub(super) fn counts(&self) -> PutCounts {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        PutCounts { kept: of(&self.kept), held: of(&self.held), unasked: of(&self.unasked) }
    }
}

impl ClusterNode {
    /// What puts do with blocks that other nodes have.
    pub fn put_policy(&self) -> PutPolicy {
        self.options.put
    }

    /// Which of these blocks, that are to be put here, another node has that can be reached; no block that is here is among them.
    /// Nothing if there is none, or if the policy does not ask.
    pub async fn held_elsewhere(&self, column: Column<'_>) -> Option<Vec<bool>> {
        if self.options.put == PutPolicy::Store {
            return None;
        }
        let mut held = vec![false; column.keys.len()];
        let own = self.own_blocks(&column);
        let missing = own.iter().zip(column.keys).enumerate().filter(|(_, (here, _))| !**here);
        let (places, tags): (Vec<usize>, Vec<Tag>) =
            missing.map(|(place, (_, key))| (place, column.tag(key))).unzip();
        let located = self.locate(&tags, PUT_TIMEOUT).await;
        let is_there = |node: &_| self.link(*node).is_some_and(|link| link.state().is_connected);
        let mut found = 0;
        for (place, nodes) in places.into_iter().zip(&located.copies) {
            if let Some(held) = held.get_mut(place).filter(|_| nodes.iter().any(is_there)) {
                *held = true;
                found += 1;
            }
        }
        let counter = match self.options.put {
            PutPolicy::Single => &self.puts.held,
            _ => &self.puts.kept,
        };
        counter.fetch_add(found, Ordering::Relaxed);
        self.puts.unasked.fetch_add(located.unasked.len() as u64, Ordering::Relaxed);
        (found > 0).then_some(held)
    }
}
