//! The plan of one slice of an encoded record: where stored chunks lie is known only from the record's header, so it
//! is made when the header is here, not with the plan of the whole read.
//!
//! As in a plan of raw chunks, a region is a range of whole pages that is read into one staging range, and a chunk
//! never straddles two. Regions are small: one is decoded at a time, between the turns of other tasks.

use kvarts_layout::arrange::Span;
use kvarts_layout::codec::{CodecError, StoredPlaces};
use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::format::body::ENCODING_RAW;
use kvarts_layout::plan::{RangePlace, ReadOptions, ReadRange, Step};

use super::compared::{Compared, RegionIn, damaged};
use super::{OUTSIDE, PartRead};
use crate::engine::read::Reads;
use crate::engine::read::header_cache::Header;
use crate::engine::read::job::ReadJob;
use crate::engine::read::wanted::WantedChunk;
use kvarts_contract::error::Reason;

/// How its extents are formed. Regions are small, unless one stored chunk is longer.
const OPTIONS: ReadOptions =
    ReadOptions { align: PAGE_BYTES as u32, max_extent: 1 << 20, max_region: 256 << 10, max_gap: 16 << 10 };

/// A wanted chunk in its region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct StoredPiece {
    /// Where it lies in the slice.
    place: RangePlace,
    /// Bytes as it is stored.
    stored: u64,
    chunk: WantedChunk,
}

/// The wanted chunks of a slice, region by region.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct StoredPieces(Vec<StoredPiece>);

impl StoredPieces {
    /// Plans the slice of these chunks of a payload that begins at `payload_at`, on a page.
    fn plan(places: &StoredPlaces, payload_at: u64, chunks: &[WantedChunk], step: &mut Step) -> Option<Self> {
        let find = |chunk: &WantedChunk| Some((places.chunk(chunk.block, chunk.part)?, *chunk));
        let mut found = chunks.iter().map(find).collect::<Option<Vec<_>>>()?;
        found.sort_unstable_by_key(|(span, _)| span.offset);
        let spans =
            found.iter().map(|(span, _)| ReadRange { start: payload_at + span.offset, bytes: span.len });
        let placed = step.read_ranges(0, &OPTIONS, spans);
        let piece = |(place, (span, chunk)): (RangePlace, &(Span, WantedChunk))| StoredPiece {
            place,
            stored: span.len,
            chunk: *chunk,
        };
        Some(Self(placed.into_iter().zip(&found).map(piece).collect()))
    }

    /// The chunks of a region.
    pub(super) fn of(&self, region: u32) -> &[StoredPiece] {
        let begin = self.0.partition_point(|piece| piece.place.region < region);
        let end = self.0.partition_point(|piece| piece.place.region <= region);
        self.0.get(begin..end).unwrap_or_default()
    }
}

impl PartRead<'_> {
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
        let stored = header.stored().zip(chunks);
        let mut plan = self.spare.pop().unwrap_or_default();
        let pieces = stored
            .and_then(|(stored, chunks)| StoredPieces::plan(&stored.places, payload_at, &chunks, &mut plan));
        let Some(pieces) = pieces.filter(|pieces| !pieces.0.is_empty()) else {
            // The header was compared with the class, so this is another record than the index says.
            self.job.fail_run(
                wanted.run.clone(),
                &Reason::Bug("a record lacks chunks that its record class has"),
            );
            self.job.slice_done(step);
            return true;
        };
        self.enqueue(step, at, plan, Some(pieces)).await
    }
}

/// Decodes the chunks of a region, verifies them and copies them to where they belong; gives the bytes decoded.
pub(super) fn decode_region(
    reads: &Reads,
    job: &ReadJob,
    region: &RegionIn<'_>,
    pieces: &[StoredPiece],
    sample: &mut u64,
) -> u64 {
    let RegionIn { wanted, header, staging, failed, verify } = region;
    let (Some(stored), Some(staging)) = (header.stored(), *staging) else {
        let unsaid = Reason::Bug("an encoded record lacks the lengths of its chunks");
        job.fail_run(wanted.run.clone(), failed.as_ref().unwrap_or(&unsaid));
        return 0;
    };
    let mut decoded = 0;
    for StoredPiece { place, stored: bytes, chunk } in pieces {
        let WantedChunk { block, part, bytes: len } = *chunk;
        let ordinal = wanted.run.start + (block - u32::from(wanted.location.block));
        if let Some(reason) = failed {
            job.fail(ordinal, reason);
            continue;
        }
        let Some(to) = job.request.into.chunk(part, ordinal, len) else {
            job.fail(ordinal, &OUTSIDE);
            continue;
        };
        let expected = header.digest(block, part);
        let checked = verify.picks(sample) && !kvarts_layout::planted!("decoded-digest-not-compared");
        let source = (staging, place.source as usize, *bytes as usize);
        let copy = |chunk: &[u8]| {
            let found = if checked { crc32fast::hash(chunk) } else { expected.unwrap_or_default() };
            if expected == Some(found) {
                to.copy_in(0, chunk);
            }
            found
        };
        decoded += len;
        match reads.decoder.show(stored.encoding, source, len as usize, copy) {
            Ok(found) if expected == Some(found) => {
                if let Some((digests, digest)) = job.request.into.digests().zip(expected) {
                    digests.set(part, ordinal, digest);
                }
            }
            Ok(found) => damaged(job, wanted, ordinal, Compared { expected, found }, true),
            Err(error @ CodecError::NoMemory) => job.fail(ordinal, &error.into()),
            // Whatever comes out is not the chunk.
            Err(_) => damaged(job, wanted, ordinal, Compared { expected, found: 0 }, true),
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
            let chunk = |block| move |part| WantedChunk { block, part, bytes: 9 };
            let all = (0..4u32).flat_map(|block| (0..6u32).map(chunk(block)));
            let chunks: Vec<_> = all.zip(&wanted).filter(|(_, wanted)| **wanted).map(|(one, _)| one).collect();
            let mut step = Step::new();
            let pieces = StoredPieces::plan(&places, 8192, &chunks, &mut step).unwrap();
            let mut seen = Vec::new();
            for (at, region) in (0..).zip(step.regions()) {
                prop_assert!(region.file_offset % PAGE_BYTES == 0 && region.bytes % PAGE_BYTES == 0);
                prop_assert!(region.bytes <= u64::from(OPTIONS.max_region) || pieces.of(at).len() == 1);
                let extents = step.extents().filter(|extent| extent.region == at);
                let read: u64 = extents.map(|extent| u64::from(extent.len)).sum();
                prop_assert_eq!(read, region.bytes);
                for StoredPiece { place, stored, chunk } in pieces.of(at) {
                    let span = places.chunk(chunk.block, chunk.part).unwrap();
                    prop_assert_eq!(region.file_offset + place.source, 8192 + span.offset);
                    prop_assert!(*stored == span.len && place.source + stored <= region.bytes);
                    seen.push(*chunk);
                }
            }
            seen.sort_unstable_by_key(|chunk| (chunk.block, chunk.part));
            prop_assert_eq!(seen, chunks);
        }
    }
}
