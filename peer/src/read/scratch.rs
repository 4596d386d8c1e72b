//! Memory of the node for pieces that do not go to their places at once: those that are asked for twice, and those of a disk that
//! may hang.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvarts_contract::buffers::{Arena, BufMut, Region};

/// What all reads of a node take of. Pages come as they are first used, and stay for the next piece.
#[derive(Debug)]
pub(super) struct Pool(Option<Arena>);

impl Pool {
    /// Of `bytes` bytes; of none where there is no memory.
    pub(super) fn new(bytes: u64) -> Arc<Self> {
        let len = usize::try_from(bytes).ok().filter(|len| *len > 0);
        Arc::new(Self(len.and_then(|len| Region::anonymous(len).ok()).map(Arena::new)))
    }

    fn left(&self) -> u64 {
        self.0.as_ref().map_or(0, |arena| {
            let usage = arena.usage();
            usage.total.saturating_sub(usage.used) as u64
        })
    }
}

/// What one read may take of what its node may.
#[derive(Debug)]
pub(super) struct Scratch {
    node: Arc<Pool>,
    left: Arc<AtomicU64>,
}

impl Scratch {
    pub(super) fn new(node: &Arc<Pool>, bytes: u64) -> Self {
        Self { node: Arc::clone(node), left: Arc::new(AtomicU64::new(bytes)) }
    }

    /// Whether `bytes` bytes are left.
    pub(super) fn has(&self, bytes: u64) -> bool {
        self.left.load(Ordering::Acquire) >= bytes && self.node.left() >= bytes
    }

    /// `bytes` bytes, and what counts them until it is dropped.
    pub(super) fn take(&self, bytes: u64) -> Option<(BufMut, Grant)> {
        let less = |left: u64| left.checked_sub(bytes);
        self.left.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).ok()?;
        let grant = Grant { left: Arc::clone(&self.left), bytes };
        let memory = self.node.0.as_ref()?.try_take(usize::try_from(bytes).ok()?)?;
        Some((memory, grant))
    }
}

/// Bytes that were taken.
#[derive(Debug)]
pub(super) struct Grant {
    left: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.left.fetch_add(self.bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_counts_for_the_read_and_for_the_node_until_it_is_dropped() {
        let page = 4096;
        let node = Pool::new(100 * page);
        let (one, other) = (Scratch::new(&node, 80 * page), Scratch::new(&node, 80 * page));
        let taken = one.take(60 * page).unwrap();
        assert!(one.take(30 * page).is_none() && other.take(50 * page).is_none());
        assert!(other.has(40 * page) && !one.has(21 * page) && !other.has(41 * page));
        drop(taken);
        assert!(one.has(80 * page) && other.has(80 * page) && node.left() == 100 * page);
        assert!(Scratch::new(&Pool::new(0), page).take(page).is_none());
    }
}
