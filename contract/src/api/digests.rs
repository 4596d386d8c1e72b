//! Digests of chunks, for a caller that verifies its reads itself.
//!
//! A device can fill memory that the processor of the store must not access, but the store cannot verify such memory. The owner of the
//! memory verifies it, with the digests of the chunks at their put.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvarts_layout::BlockShape;

/// Set in an entry that is known.
const KNOWN: u64 = 1 << 32;

/// The digest of each chunk of a read, set before the chunk's block or layer is announced. Cheap to clone.
#[derive(Clone)]
pub struct Digests {
    blocks: u32,
    table: Arc<[AtomicU64]>,
}

impl Digests {
    /// Creates a table for this number of blocks of a shape.
    pub fn new(shape: &BlockShape, blocks: u32) -> Self {
        let entries = u64::from(shape.chunk_count()) * u64::from(blocks);
        Self { blocks, table: (0..entries).map(|_| AtomicU64::new(0)).collect() }
    }

    fn entry(&self, part: u32, block: u32) -> Option<&AtomicU64> {
        let at = u64::from(part) * u64::from(self.blocks) + u64::from(block);
        (block < self.blocks).then(|| self.table.get(usize::try_from(at).ok()?)).flatten()
    }

    /// The digest of a chunk (canonical index in the block) of the block with this ordinal, if it is known.
    pub fn get(&self, part: u32, block: u32) -> Option<u32> {
        let found = self.entry(part, block)?.load(Ordering::Acquire);
        (found & KNOWN != 0).then_some(found as u32)
    }

    /// Sets a digest.
    pub fn set(&self, part: u32, block: u32, digest: u32) {
        if let Some(entry) = self.entry(part, block) {
            entry.store(KNOWN | u64::from(digest), Ordering::Release);
        }
    }
}

impl fmt::Debug for Digests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digests({} of {} blocks)", self.table.len(), self.blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_layout::{ChunkShape, LayerShape};

    #[test]
    fn digests_stay_with_their_chunks_and_zero_is_one() {
        let chunk = ChunkShape { bytes: 10, align: 1 };
        let layer = |layer| LayerShape { layer, chunks: vec![chunk; 2] };
        let digests = Digests::new(&BlockShape::new(vec![layer(0), layer(1)]).unwrap(), 3);
        digests.set(3, 2, 0);
        digests.set(0, 1, 7);
        digests.set(0, 3, 9);
        digests.set(4, 0, 9);
        assert_eq!((digests.get(3, 2), digests.get(0, 1)), (Some(0), Some(7)));
        assert_eq!((digests.get(1, 0), digests.get(0, 3), digests.get(4, 0)), (None, None, None));
    }
}
