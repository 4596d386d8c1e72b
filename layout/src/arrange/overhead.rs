//! What a record costs beyond the bytes it keeps: header pages, digests, padding.

use super::{PAGE_BYTES, RunLayout, round_up};

/// Bytes of one chunk's digest in a record header.
pub const DIGEST_BYTES: u64 = 4;
/// What a header needs besides its per-block and per-chunk tables, rounded up.
const HEADER_FIXED_BYTES: u64 = 512;
/// What a header needs for one block (key 32, origin 16), rounded up.
const HEADER_BLOCK_BYTES: u64 = 64;

/// An upper estimate of the header of a record, in whole pages: fixed fields, 64 bytes for each block and
/// [`DIGEST_BYTES`] for each chunk. A record with larger extension fields (user metadata) may need more.
pub fn record_header_bytes(blocks: u32, chunks_per_block: u32) -> u64 {
    let digests = u64::from(chunks_per_block).saturating_mul(DIGEST_BYTES);
    let tables = u64::from(blocks).saturating_mul(digests.saturating_add(HEADER_BLOCK_BYTES));
    round_up(tables.saturating_add(HEADER_FIXED_BYTES), PAGE_BYTES)
}

/// Bytes of a record that are not content, by cause.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Overhead {
    /// Header pages without the digests in them.
    pub header: u64,
    /// Digests of the chunks.
    pub digests: u64,
    /// Zero bytes between chunks and after the last one.
    pub padding: u64,
    /// Bytes of all chunks: what the overhead is compared with.
    pub content: u64,
}

impl Overhead {
    /// All bytes that are not content.
    pub fn total(&self) -> u64 {
        self.header.saturating_add(self.digests).saturating_add(self.padding)
    }

    /// Overhead per byte of content: 0.02 is two percent.
    pub fn ratio(&self) -> f64 {
        self.total() as f64 / self.content as f64
    }
}

impl RunLayout {
    /// The overhead of a record that keeps this run behind a header of `header_bytes` (digest table included,
    /// see [`record_header_bytes`]).
    pub fn overhead(&self, header_bytes: u64) -> Overhead {
        let chunks = u64::from(self.chunk_count()).saturating_mul(u64::from(self.blocks()));
        let digests = chunks.saturating_mul(DIGEST_BYTES).min(header_bytes);
        Overhead {
            header: header_bytes.saturating_sub(digests),
            digests,
            padding: self.image_bytes().saturating_sub(self.content_bytes()),
            content: self.content_bytes(),
        }
    }
}
