//! The plan of one slice of an encoded record: where stored chunks lie is known only from the record's header, so it
//! is made when the header is here, not with the plan of the whole read.
//!
//! As in a plan of raw chunks, a region is a range of whole pages that is read into one staging range, and a chunk
//! never straddles two. Regions are small: one is decoded at a time, between the turns of other tasks.

use std::ops::Range;

use kvarts_layout::codec::{CodecError, StoredPlaces};
use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::format::body::ENCODING_RAW;

use super::{OUTSIDE, Plan, Run, Slice, damaged, name_extent};
use crate::api::Verify;
use crate::engine::read::Reads;
use crate::engine::read::header_cache::Header;
use crate::engine::read::job::{ReadJob, Wanted};
use crate::error::Reason;
use crate::io::SharedBuf;

/// Bytes of a region, unless one stored chunk is longer.
const REGION_BYTES: u64 = 256 << 10;
/// Longest device read.
const EXTENT_BYTES: u64 = 1 << 20;
/// Unwanted pages between two wanted chunks that are read along.
const GAP_BYTES: u64 = 16 << 10;

/// A wanted chunk in its region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PackedPiece {
    /// Block within the record.
    pub(super) block: u32,
    /// Canonical index of the part.
    pub(super) part: u32,
    /// Bytes from the region's start.
    pub(super) source: u64,
    pub(super) stored: u64,
    /// Bytes of the chunk.
    pub(super) len: u64,
}

/// A range of whole pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PackedRegion {
    pub(super) file_offset: u64,
    pub(super) bytes: u64,
    pieces: Range<usize>,
}

/// What a slice reads.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Packed {
    pub(super) regions: Vec<PackedRegion>,
    pieces: Vec<PackedPiece>,
}

impl Packed {
    /// The regions of these chunks (block, part, bytes) of a payload that begins at `payload_at`, on a page.
    pub(super) fn new(places: &StoredPlaces, payload_at: u64, chunks: &[(u32, u32, u64)]) -> Option<Self> {
        let find =
            |&(block, part, len): &(u32, u32, u64)| Some((places.chunk(block, part)?, block, part, len));
        let mut found = chunks.iter().map(find).collect::<Option<Vec<_>>>()?;
        found.sort_unstable_by_key(|(span, ..)| span.offset);
        let mut packed = Self::default();
        for (span, block, part, len) in found {
            let (start, end) = (payload_at + span.offset, payload_at + span.end());
            let (floor, ceiling) = (start - start % PAGE_BYTES, end.next_multiple_of(PAGE_BYTES));
            let joins = packed.regions.last().is_some_and(|last| {
                floor <= last.file_offset + last.bytes + GAP_BYTES
                    && ceiling <= last.file_offset + REGION_BYTES
            });
            let at = packed.pieces.len();
            if !joins {
                packed.regions.push(PackedRegion { file_offset: floor, bytes: 0, pieces: at..at });
            }
            let last = packed.regions.last_mut()?;
            last.bytes = last.bytes.max(ceiling - last.file_offset);
            last.pieces.end = at + 1;
            let source = start - last.file_offset;
            packed.pieces.push(PackedPiece { block, part, source, stored: span.len, len });
        }
        Some(packed)
    }

    /// Staging that it needs.
    pub(super) fn staged_bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.bytes).sum()
    }

    /// The device reads of a region: offset in the region, bytes.
    pub(super) fn extents(region: &PackedRegion) -> impl Iterator<Item = (u64, u64)> + use<> {
        let bytes = region.bytes;
        (0..bytes).step_by(EXTENT_BYTES as usize).map(move |at| (at, (bytes - at).min(EXTENT_BYTES)))
    }

    /// The chunks of a region.
    pub(super) fn pieces(&self, region: u32) -> &[PackedPiece] {
        let range = self.regions.get(region as usize).map(|region| region.pieces.clone());
        range.and_then(|range| self.pieces.get(range)).unwrap_or_default()
    }
}

impl Run<'_> {
    pub(super) fn is_encoded(&self, at: usize) -> bool {
        let index = self.records.get(at).map(|record| record.index as usize);
        let wanted = index.and_then(|index| self.job.wanted.get(index));
        wanted.is_some_and(|wanted| wanted.class.encoding != ENCODING_RAW)
    }

    /// Asks for the header of an encoded record; false if there is no memory for it while something is under way.
    pub(super) async fn size_up(&mut self, at: usize) -> bool {
        let bytes = self.missing_header(at);
        if bytes > 0 {
            let Some(staging) = self.stage(bytes).await else { return false };
            self.enqueue_header(at, staging.as_ref(), bytes);
            (self.queue_record, self.queue_step) = (at, 0);
        }
        self.unsized_records.pop();
        true
    }

    /// As `enqueue`, of a record whose header says where its chunks lie. A slice without a region is done at once.
    pub(super) async fn enqueue_encoded(&mut self, step: u32, at: usize, header: &Header) -> bool {
        let Some(wanted) = self.records.get(at).and_then(|record| self.job.wanted.get(record.index as usize))
        else {
            return false;
        };
        let chunks = self.job.chunks_of(step, wanted);
        let payload_at = wanted.offset + wanted.header_bytes;
        let packed = header.stored().and_then(|stored| Packed::new(&stored.places, payload_at, &chunks));
        let Some(packed) = packed.filter(|packed| !packed.regions.is_empty()) else {
            // The header was compared with the class, so this is another record than the index says.
            self.job.fail_run(wanted.run.clone(), &Reason::Bug("a record without the chunks of its class"));
            self.job.slice_done(step);
            return true;
        };
        let Some(staging) = self.stage(packed.staged_bytes()).await else { return false };
        let (slot, queued) = (self.free_slot(), self.queue.len());
        let (mut used, mut regions) = (0, Vec::with_capacity(packed.regions.len()));
        for (index, region) in (0u32..).zip(&packed.regions) {
            let memory = staging.as_ref().and_then(|staging| staging.slice(used, region.bytes as usize));
            used += region.bytes as usize;
            let mut left = 0;
            for (from, len) in Packed::extents(region) {
                let buf = memory.as_ref().and_then(|memory| memory.slice(from as usize, len as usize));
                let Some(buf) = buf else {
                    self.queue.truncate(queued);
                    self.free.push(slot);
                    self.fail_slice(step, at);
                    return true;
                };
                left += 1;
                let name = name_extent(slot, index, len as u32);
                self.queue.push_back((name, region.file_offset + from, len, buf));
            }
            regions.push((memory, left));
        }
        (self.queue_record, self.queue_step) = (at, step);
        let regions_left = regions.len() as u32;
        if let Some(slice) = self.slices.get_mut(slot) {
            let plan = Plan::Encoded(packed);
            *slice = Some(Slice { step, record: at, plan, regions, regions_left, failed: None });
        }
        true
    }
}

/// Decodes the chunks of a region, verifies them and copies them to where they belong; gives the bytes decoded.
pub(super) fn unpack(
    log: &Reads,
    job: &ReadJob,
    (wanted, header): (&Wanted, &Header),
    (packed, region): (&Packed, u32),
    (staging, failed): (Option<&SharedBuf>, Option<Reason>),
    (verify, sample): (Verify, &mut u64),
) -> u64 {
    let (Some(stored), Some(staging)) = (header.stored(), staging) else {
        job.fail_run(
            wanted.run.clone(),
            &failed.unwrap_or(Reason::Bug("an encoded record without its lengths")),
        );
        return 0;
    };
    let mut decoded = 0;
    for piece in packed.pieces(region) {
        let ordinal = wanted.run.start + (piece.block - u32::from(wanted.location.block));
        if let Some(reason) = &failed {
            job.fail(ordinal, reason);
            continue;
        }
        let Some(to) = job.request.into.chunk(piece.part, ordinal, piece.len) else {
            job.fail(ordinal, &OUTSIDE);
            continue;
        };
        let expected = header.digest(piece.block, piece.part);
        let checked = verify.picks(sample) && !kvarts_layout::planted!("decoded-digest-not-compared");
        let source = (staging, piece.source as usize, piece.stored as usize);
        let copy = |chunk: &[u8]| {
            let found = if checked { crc32fast::hash(chunk) } else { expected.unwrap_or_default() };
            if expected == Some(found) {
                to.copy_in(0, chunk);
            }
            found
        };
        decoded += piece.len;
        match log.decoder.show(stored.encoding, source, piece.len as usize, copy) {
            Ok(found) if expected == Some(found) => {
                if let Some((digests, digest)) = job.request.into.digests().zip(expected) {
                    digests.set(piece.part, ordinal, digest);
                }
            }
            Ok(found) => damaged(job, wanted, ordinal, (expected, found), true),
            Err(CodecError::NoMemory) => job.fail(ordinal, &Reason::Media(CodecError::NoMemory.to_string())),
            // Whatever comes out is not the chunk.
            Err(_) => damaged(job, wanted, ordinal, (expected, 0), true),
        }
    }
    decoded
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_layout::arrange::{LAYOUT_VERSION, RunLayout};
    use kvarts_layout::{BlockShape, ChunkShape, LayerShape, Layout};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_wanted_chunk_is_in_one_region_and_read_once(
            lengths in prop::collection::vec(1u32..120_000, 24),
            wanted in prop::collection::vec(any::<bool>(), 24),
            layer_block in any::<bool>(),
        ) {
            let chunk = |bytes| ChunkShape { bytes, align: 1 };
            let layer = |layer| LayerShape { layer, chunks: vec![chunk(120_000), chunk(130_000)] };
            let shape = BlockShape::new((0..3).map(layer).collect()).unwrap();
            let layout = if layer_block { Layout::LayerBlock } else { Layout::FullBlock };
            let run = RunLayout::new(layout, LAYOUT_VERSION, &shape, 4).unwrap();
            let places = StoredPlaces::new(&run, &lengths).unwrap();
            let all = (0..4u32).flat_map(|block| (0..6u32).map(move |part| (block, part, 9)));
            let chunks: Vec<_> = all.zip(&wanted).filter(|(_, wanted)| **wanted).map(|(one, _)| one).collect();
            let packed = Packed::new(&places, 8192, &chunks).unwrap();
            let mut seen = Vec::new();
            for (at, region) in (0..).zip(&packed.regions) {
                prop_assert!(region.file_offset % PAGE_BYTES == 0 && region.bytes % PAGE_BYTES == 0);
                prop_assert!(region.bytes <= REGION_BYTES || packed.pieces(at).len() == 1);
                let read: u64 = Packed::extents(region).map(|(_, len)| len).sum();
                prop_assert_eq!(read, region.bytes);
                for piece in packed.pieces(at) {
                    let span = places.chunk(piece.block, piece.part).unwrap();
                    prop_assert_eq!(region.file_offset + piece.source, 8192 + span.offset);
                    prop_assert!(piece.source + piece.stored <= region.bytes);
                    seen.push((piece.block, piece.part, piece.len));
                }
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, chunks);
        }
    }
}
