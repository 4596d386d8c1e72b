//! Memory for second requests: a piece that was asked for twice is read into two places, and only one is the reader's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that may still be taken.
#[derive(Debug)]
pub(super) struct Left(AtomicU64);

impl Left {
    pub(super) fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self(AtomicU64::new(bytes)))
    }

    fn take(&self, bytes: u64) -> bool {
        let less = |left: u64| left.checked_sub(bytes);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).is_ok()
    }

    fn give_back(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::AcqRel);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// What one read may take of what its node may.
#[derive(Debug)]
pub(super) struct Scratch {
    node: Arc<Left>,
    read: Arc<Left>,
}

impl Scratch {
    pub(super) fn new(node: &Arc<Left>, bytes: u64) -> Self {
        Self { node: Arc::clone(node), read: Left::new(bytes) }
    }

    /// Whether so many bytes could be taken now.
    pub(super) fn has(&self, bytes: u64) -> bool {
        self.node.get() >= bytes && self.read.get() >= bytes
    }

    /// Takes so many bytes, until the grant is dropped.
    pub(super) fn take(&self, bytes: u64) -> Option<Grant> {
        if !self.read.take(bytes) {
            return None;
        }
        if !self.node.take(bytes) {
            self.read.give_back(bytes);
            return None;
        }
        Some(Grant { node: Arc::clone(&self.node), read: Arc::clone(&self.read), bytes })
    }
}

/// Bytes that were taken.
#[derive(Debug)]
pub(super) struct Grant {
    node: Arc<Left>,
    read: Arc<Left>,
    bytes: u64,
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.node.give_back(self.bytes);
        self.read.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_counts_for_the_read_and_for_the_node_until_it_is_dropped() {
        let node = Left::new(100);
        let (one, other) = (Scratch::new(&node, 80), Scratch::new(&node, 80));
        let taken = one.take(60).unwrap();
        assert!(one.take(30).is_none() && other.take(50).is_none() && other.has(40) && !one.has(21));
        assert_eq!(other.read.get(), 80);
        drop(taken);
        assert!(one.has(80) && node.get() == 100);
    }
}
