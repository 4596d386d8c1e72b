//! What the two ends of a segment say.

use kvarts_layout::format::checkpoint::{
    SEGMENT_FREE, SEGMENT_OPEN, SEGMENT_QUARANTINED, SEGMENT_SEALED, SEGMENT_SUSPECT, SegmentState,
};
use kvarts_layout::format::recovery::{HeaderSeen, Known, SegmentSighting, TrailerSeen, behind_header};
use kvarts_layout::format::seal::claimed_position;
use kvarts_layout::format::segment::SegmentHeader;
use kvarts_layout::format::trailer::{self, SealReason, Trailer};
use kvarts_layout::format::{PAGE, PAGE_BYTES, Position, Unsound};

use super::Recovery;
use super::files::SegmentFile;
use crate::engine::volume::Volume;
use crate::engine::volume::checkpoint::Checkpoint;
use crate::engine::volume::pages::{CLASS, memory};
use kvarts_contract::error::Reason;

/// Segments whose ends are read at once.
const AT_ONCE: usize = 64;

/// A page in which nothing was ever written.
static EMPTY: [u8; PAGE] = [0; PAGE];

/// The first and last page of a segment.
#[derive(Clone, Debug)]
pub(super) struct Ends {
    /// The segment, under no generation.
    pub(super) position: Position,
    pub(super) header_seen: HeaderSeen,
    trailer_seen: TrailerSeen,
    /// The header, if it is sound.
    pub(super) header: Option<SegmentHeader>,
    /// The trailer, if it is sound and goes with the header.
    pub(super) trailer: Option<Trailer>,
    /// Where the trailer stands, under its own generation.
    pub(super) trailer_position: Position,
    /// The highest generation that either end proves.
    proven: u64,
    /// The generation that a record on the page behind the header proves: looked for only in a free segment.
    behind: Option<u64>,
    /// Bytes of the file.
    pub(super) len: u64,
}

/// Reads the ends of all segments.
pub(super) async fn ends(recovery: &mut Recovery<'_>, files: &[SegmentFile]) -> Result<Vec<Ends>, Reason> {
    let volume = recovery.volume;
    let last = volume.shared.segment_bytes - PAGE_BYTES;
    let mut all = Vec::with_capacity(files.len());
    for some in files.chunks(AT_ONCE) {
        let mut reads = Vec::with_capacity(some.len());
        for file in some {
            // One piece for all: whichever the device gives, the others are looked at.
            let is_free = is_free(&recovery.checkpoint, file);
            let pages = memory(volume, if is_free { 3 * PAGE } else { 2 * PAGE })?.share();
            let page = |at| pages.slice(at, PAGE).ok_or(Reason::Bug("a page lies outside its buffer"));
            let first = volume.driver.read(CLASS, file.file, 0, page(0)?);
            let last = volume.driver.read(CLASS, file.file, last, page(PAGE)?);
            let behind = match is_free {
                true => Some(volume.driver.read(CLASS, file.file, PAGE_BYTES, page(2 * PAGE)?)),
                false => None,
            };
            reads.push((pages, first, last, behind));
        }
        for (file, (pages, first, last, behind)) in some.iter().zip(reads) {
            let ok = (first.await.is_ok(), last.await.is_ok());
            let behind = match behind {
                Some(behind) => Some(behind.await.is_ok()),
                None => None,
            };
            let bytes = pages.to_vec();
            let (first, rest) = bytes.split_at(PAGE);
            let (last, second) = rest.split_at(PAGE);
            // What a file has not got, because it could not be given its length, is as empty as what was never written;
            // what the device does not give is damaged: no byte of it proves anything.
            let beyond = (file.len == 0, file.len <= volume.shared.segment_bytes - PAGE_BYTES);
            let first = match () {
                () if beyond.0 => &EMPTY,
                () if ok.0 && file.len >= PAGE_BYTES => first,
                () => &[],
            };
            let last = match () {
                () if beyond.1 => &EMPTY,
                () if ok.1 => last,
                () => &[],
            };
            recovery.report.unreadable_pages += u64::from(!ok.0 && !beyond.0) + u64::from(!ok.1 && !beyond.1);
            recovery.report.metadata_bytes += bytes.len() as u64;
            let ends = Ends { len: file.len, ..Ends::of(volume, file.number, first, last) };
            let second = if behind == Some(true) { second } else { &[] };
            let behind = behind_header(second, &ends.position, &volume.shared.secret);
            all.push(Ends { behind, ..ends });
        }
    }
    Ok(all)
}

/// Whether the newest checkpoint calls a segment free.
fn is_free(checkpoint: &Checkpoint, file: &SegmentFile) -> bool {
    let known = checkpoint.segments.get(&file.number);
    known.is_some_and(|known| known.state == SEGMENT_FREE)
        && !kvarts_layout::planted!("recycled-header-unseen")
}

impl Ends {
    fn of(volume: &Volume, number: u32, first: &[u8], last: &[u8]) -> Self {
        let shared = &volume.shared;
        let position =
            Position { store: shared.store, shard: volume.shard, segment: number, generation: 0, offset: 0 };
        let header = SegmentHeader::decode_any_generation(first, &position, &shared.secret);
        let mut header_seen = HeaderSeen::of(&header);
        let header = header.ok().filter(|header| header.segment_bytes == shared.segment_bytes);
        if header.is_none() && header_seen == HeaderSeen::Sound {
            header_seen = HeaderSeen::Damaged;
        }
        let claimed = claimed_position(last).map_or(0, |claimed| claimed.generation);
        let generation = header.as_ref().map_or(claimed, |header| header.position.generation);
        let trailer_position = trailer::position(&position.under(generation), shared.segment_bytes);
        let decoded = Trailer::decode(last, &trailer_position, &shared.secret);
        let mut proven = header.as_ref().map_or(0, |header| header.position.generation);
        if let Ok(_) | Err(Unsound::Ahead { .. }) = &decoded {
            proven = proven.max(claimed);
        }
        let trailer_seen = match &decoded {
            Ok(_) => TrailerSeen::Sealed,
            Err(unsound) => TrailerSeen::of_unsound(unsound),
        };
        Self {
            position,
            header_seen,
            trailer_seen,
            header,
            trailer: decoded.ok(),
            trailer_position,
            proven,
            behind: None,
            len: 0,
        }
    }

    /// The generation that the ends prove: the header's, else the trailer's.
    fn own(&self) -> Option<u64> {
        let header = self.header.as_ref().map(|header| header.position.generation);
        header.or(self.trailer.map(|_| self.trailer_position.generation))
    }

    /// The segment in the words of the recovery table; its footer is taken to be sound.
    pub(super) fn sighting(&self, checkpoint: &Checkpoint) -> SegmentSighting {
        let known = checkpoint.segments.get(&self.position.segment);
        SegmentSighting {
            header: self.header_seen,
            trailer: self.trailer_seen,
            known: known.map_or(Known::Nothing, |known| self.known(known)),
        }
    }

    fn known(&self, known: &SegmentState) -> Known {
        let own = self.own().unwrap_or(known.generation);
        match known.state {
            SEGMENT_QUARANTINED => Known::Quarantined,
            _ if known.generation < own => Known::Earlier,
            _ if known.generation > own => Known::Later,
            SEGMENT_FREE if self.behind.is_some_and(|behind| behind > known.generation) => Known::Outlived,
            SEGMENT_FREE => Known::Free,
            SEGMENT_OPEN => Known::Open,
            SEGMENT_SEALED | SEGMENT_SUSPECT => Known::Sealed,
            _ => Known::Nothing,
        }
    }

    /// No lower generation than this may be written next.
    pub(super) fn floor(&self, checkpoint: &Checkpoint) -> u64 {
        let known = checkpoint.segments.get(&self.position.segment).map_or(0, |known| known.generation);
        self.proven.max(known)
    }

    /// How far a trailer or the checkpoint says that the segment had been flushed, and of which generation. What recovery
    /// sealed may have torn records among those that count.
    pub(super) fn durable(&self, checkpoint: &Checkpoint) -> (u64, u64) {
        if let Some(trailer) = self.trailer.filter(|trailer| trailer.reason == SealReason::Normal) {
            return (self.trailer_position.generation, trailer.log_end);
        }
        let known = checkpoint.segments.get(&self.position.segment);
        known.map_or((0, 0), |known| (known.generation, known.log_end))
    }
}
