//! Verifies a record's payload against its digests, in one pass over its bytes in the order in which they lie.

use kvarts_layout::format::is_zero;
use kvarts_layout::{Layout, RunLayout};

use crate::window::Window;

/// A chunk that is not what its digest says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BadChunk {
    /// The block within the record.
    pub block: u32,
    /// Where the chunk begins in the file.
    pub offset: u64,
    /// The digest in the record's header.
    pub expected: u32,
    /// The digest of the bytes.
    pub found: u32,
}

/// What a payload turned out to be.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Verified {
    /// The first bad chunk.
    pub bad: Option<BadChunk>,
    /// Blocks that have a bad chunk.
    pub bad_blocks: u64,
    /// Whether the digest table has another number of entries than the layout has chunks.
    pub miscounted: bool,
    /// Where padding that is not zero begins in the file.
    pub dirty: Option<u64>,
    /// Content ids of the blocks, if they were asked for and the payload is whole.
    pub contents: Vec<[u8; 32]>,
}

impl Verified {
    /// Whether every chunk is what was put.
    pub fn is_whole(&self) -> bool {
        self.bad.is_none() && !self.miscounted
    }
}

/// Which part of which block comes next.
struct Order<'a> {
    layout: &'a RunLayout,
    next: u64,
}

impl Iterator for Order<'_> {
    type Item = (u32, usize);

    fn next(&mut self) -> Option<Self::Item> {
        let (blocks, parts) = (u64::from(self.layout.blocks()), u64::from(self.layout.chunk_count()));
        let at = self.next;
        if parts == 0 || at >= blocks.saturating_mul(parts) {
            return None;
        }
        self.next = at.saturating_add(1);
        let by_block = self.layout.layout() == Layout::FullBlock || blocks == 1;
        let (block, part) = if by_block { (at / parts, at % parts) } else { (at % blocks, at / blocks) };
        Some((u32::try_from(block).ok()?, usize::try_from(part).ok()?))
    }
}

/// Reads the payload that begins at `start`. `digests` are in canonical order.
pub fn verify(
    window: &mut Window<'_>,
    start: u64,
    layout: &RunLayout,
    digests: &[u32],
    content_ids: bool,
) -> Verified {
    let mut verified = Verified::default();
    let blocks = layout.blocks() as usize;
    let parts = layout.chunk_count() as usize;
    if digests.len() != blocks.saturating_mul(parts) {
        verified.miscounted = true;
        return verified;
    }
    let mut hashers: Vec<blake3::Hasher> =
        if content_ids { (0..blocks).map(|_| blake3::Hasher::new()).collect() } else { Vec::new() };
    let mut bad_blocks = vec![false; blocks];
    let mut at = start;
    for (block, part) in (Order { layout, next: 0 }) {
        let Some(place) = layout.parts().get(part) else { break };
        let step = place.step.saturating_mul(u64::from(block));
        let from = start.saturating_add(place.offset).saturating_add(step);
        check_zero(window, at, from, &mut verified.dirty);
        let to = from.saturating_add(place.bytes);
        let mut crc = crc32fast::Hasher::new();
        let mut hasher = hashers.get_mut(block as usize);
        at = from;
        while at < to {
            let bytes = window.some(at, to.saturating_sub(at));
            if bytes.is_empty() {
                break;
            }
            crc.update(bytes);
            if let Some(hasher) = &mut hasher {
                hasher.update(bytes);
            }
            at = at.saturating_add(bytes.len() as u64);
        }
        let number = (block as usize).saturating_mul(parts).saturating_add(part);
        let expected = digests.get(number).copied().unwrap_or_default();
        let found = crc.finalize();
        if found != expected || at < to {
            verified.bad.get_or_insert(BadChunk { block, offset: from, expected, found });
            if let Some(bad) = bad_blocks.get_mut(block as usize) {
                *bad = true;
            }
        }
        at = to;
    }
    check_zero(window, at, start.saturating_add(layout.image_bytes()), &mut verified.dirty);
    verified.bad_blocks = bad_blocks.iter().filter(|bad| **bad).count() as u64;
    if verified.is_whole() {
        verified.contents = hashers.iter().map(|hasher| *hasher.finalize().as_bytes()).collect();
    }
    verified
}

fn check_zero(window: &mut Window<'_>, from: u64, to: u64, dirty: &mut Option<u64>) {
    let mut at = from;
    while at < to && dirty.is_none() {
        let bytes = window.some(at, to.saturating_sub(at));
        if bytes.is_empty() {
            return;
        }
        if !is_zero(bytes) {
            let within = bytes.iter().position(|byte| *byte != 0).unwrap_or(0);
            *dirty = Some(at.saturating_add(within as u64));
        }
        at = at.saturating_add(bytes.len() as u64);
    }
}
