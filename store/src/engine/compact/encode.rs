//! Encodes records whose blocks are cold, while they are moved.
//!
//! Cold blocks were neither read nor put for a while: the index keeps the step of each block's last use and the second
//! of its record's. A block under a lease is never cold. A record is encoded as a whole,
//! only if all of its moved blocks are cold, and only if it takes less than 1/1.1 of the pages afterwards: then its
//! reads take less of the device and more of a core.
//!
//! Digests are not computed again: they are over the bytes before encoding, and `gather` has just verified those.

use std::rc::Rc;
use std::time::Duration;

use kvarts_layout::codec::{Encoding, may_be_encoded, pays};
use kvarts_layout::format::body::ENCODING_RAW;
use kvarts_layout::format::page_align;

use super::gather::{Taken, pause};
use super::relocate::Head;
use crate::engine::read::Reads;
use crate::engine::shard::Shard;
use crate::engine::shared::record_class::{RecordClass, RecordForm};
use crate::engine::volume::Volume;
use crate::index::{BlockFingerprint, Lookup};
use kvarts_contract::error::Reason;

/// Chunks of a record that are tried before all of them are encoded, and the most bytes of each.
const SAMPLES: usize = 4;
const SAMPLE_BYTES: usize = 64 << 10;

/// Which records become encoded ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Cold {
    /// How long a block must have lain unused; `None` encodes nothing.
    pub(crate) after: Option<Duration>,
    /// What would not be encoded stays where it is.
    pub(crate) only: bool,
}

impl Cold {
    /// Whether a block has lain unused for long enough.
    pub(super) fn is_cold(&self, volume: &Volume, print: BlockFingerprint) -> bool {
        let Some(after) = self.after else { return false };
        let Some(entry) = volume.shared.index.get(print) else { return false };
        let Lookup::Live(at) = entry.state else { return false };
        let unused = volume.shared.unused(&entry.heat, volume.shared.index.records().used(at.record));
        !entry.leased && unused >= after
    }
}

/// Payload bytes of a record before and after.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Gain {
    pub(super) raw: u64,
    pub(super) stored: u64,
}

/// Encodes the blocks of a record that is to be written, if they are raw and cold and it pays.
pub(super) async fn encode_run(
    shard: &Rc<Shard>,
    cold: &Cold,
    head: &mut Head,
    blocks: &mut [Taken],
) -> Result<Option<Gain>, Reason> {
    let class = &head.class;
    if class.encoding != ENCODING_RAW
        || blocks.is_empty()
        || !blocks.iter().all(|taken| cold.is_cold(&shard.volume, taken.print))
    {
        return Ok(None);
    }
    let count = u32::try_from(blocks.len()).map_err(|_| Reason::TooMany("blocks in one record"))?;
    let layout = class.layout_of(count)?;
    if !may_be_encoded(&layout) {
        return Ok(None);
    }
    let Some(encoding) = choose(&shard.reads, blocks, &layout) else { return Ok(None) };
    let (mut since, mut all) = (0, Vec::with_capacity(blocks.len()));
    let mut stored = 0u64;
    for taken in &*blocks {
        let (mut bytes, mut lengths) = (Vec::new(), Vec::with_capacity(taken.digests.len()));
        for chunk in taken.chunks(&layout) {
            let len = match shard.reads.decoder.encode(encoding, chunk, &mut bytes) {
                Ok(len) => len,
                // It stays as it is.
                Err(_) => return Ok(None),
            };
            // No longer than the chunk, which is within the limit of encoded records.
            lengths.push(if kvarts_layout::planted!("stored-length-wrong") {
                len as u32 - 1
            } else {
                len as u32
            });
            pause(&mut since, chunk.len()).await;
        }
        stored += bytes.len() as u64;
        all.push((bytes, lengths));
    }
    let raw = layout.payload_bytes();
    // With what the lengths take in the header.
    let table = 4 * u64::from(count) * u64::from(layout.chunk_count());
    let pages = |bytes| page_align(bytes).unwrap_or(u64::MAX);
    if !pays(pages(raw), pages(stored.saturating_add(table))) {
        return Ok(None);
    }
    let RecordClass { layout, layout_version, .. } = **class;
    let form = RecordForm { layout, layout_version, encoding: encoding.code() };
    let column = (class.group, class.coordinate);
    head.class = shard.volume.shared.classes.intern(&class.namespace, column, form)?;
    for (taken, (bytes, lengths)) in blocks.iter_mut().zip(all) {
        (taken.bytes, taken.lengths) = (bytes, lengths);
    }
    Ok(Some(Gain { raw, stored }))
}

/// A look at a few chunks spares the encoding of what will not pay.
fn choose(reads: &Reads, blocks: &[Taken], layout: &kvarts_layout::RunLayout) -> Option<Encoding> {
    let middle = blocks.get(blocks.len() / 2)?;
    let step = layout.parts().len().div_ceil(SAMPLES).max(1);
    let samples = middle.chunks(layout).step_by(step);
    reads.decoder.choose(samples.map(|chunk| chunk.get(..SAMPLE_BYTES).unwrap_or(chunk)))
}
