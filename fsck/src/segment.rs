//! One segment: its two ends, its footer, and what the recovery table says of it.

use kvarts_layout::StoreId;
use kvarts_layout::format::checkpoint::{
    SEGMENT_FREE, SEGMENT_OPEN, SEGMENT_QUARANTINED, SEGMENT_SEALED, SEGMENT_SUSPECT, SegmentState,
};
use kvarts_layout::format::footer::{self, Footer};
use kvarts_layout::format::recovery::{HeaderSeen, Known, SegmentSighting, TrailerSeen, behind_header};
use kvarts_layout::format::seal::claimed_position;
use kvarts_layout::format::segment::SegmentHeader;
use kvarts_layout::format::trailer::{self, SealReason, Trailer};
use kvarts_layout::format::{PAGE, PAGE_BYTES, Position, Secret, Unsound};

use crate::window::Window;

/// What proves the structures of a store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Keyring {
    /// The store.
    pub store: StoreId,
    /// The key of its tags.
    pub secret: Secret,
    /// Bytes of each segment.
    pub segment_bytes: u64,
}

impl Keyring {
    /// The start of a segment, under no generation.
    pub fn position(&self, shard: u32, segment: u32) -> Position {
        Position { store: self.store, shard, segment, generation: 0, offset: 0 }
    }

    /// Where trailers stand.
    pub fn trailer_at(&self) -> u64 {
        self.segment_bytes.saturating_sub(PAGE_BYTES)
    }
}

/// The first and last page of a segment.
#[derive(Clone, Debug)]
pub struct Ends {
    /// The segment, under no generation.
    pub position: Position,
    /// The header, or why it is not sound.
    pub header: Result<SegmentHeader, Unsound>,
    /// The header in the words of the recovery table.
    pub header_seen: HeaderSeen,
    /// The trailer of the header's generation (its own, if there is no header), or why it is not sound.
    pub trailer: Result<Trailer, Unsound>,
    /// Where the trailer stands, under the generation it was looked for.
    pub trailer_position: Position,
    /// The generation that a record on the page behind the header proves, if that page was looked at.
    pub behind: Option<u64>,
}

impl Ends {
    /// Reads both ends.
    pub fn read(window: &mut Window<'_>, keyring: &Keyring, shard: u32, segment: u32) -> Self {
        let position = keyring.position(shard, segment);
        let last = window.bytes(keyring.trailer_at(), PAGE).to_vec();
        let first = window.bytes(0, PAGE);
        let mut header = SegmentHeader::decode_any_generation(first, &position, &keyring.secret);
        let mut header_seen = HeaderSeen::of(&header);
        if header.as_ref().is_ok_and(|header| header.segment_bytes != keyring.segment_bytes) {
            // Sound, and of a store of other segments: nothing in it can be placed.
            header_seen = HeaderSeen::Damaged;
            header = Err(Unsound::Damaged { what: kvarts_layout::format::Damage::Field("segment_bytes") });
        }
        let claimed = claimed_position(&last).map_or(0, |claimed| claimed.generation);
        let generation = header.as_ref().map_or(claimed, |header| header.position.generation);
        let trailer_position = trailer::position(&position.under(generation), keyring.segment_bytes);
        let trailer = Trailer::decode(&last, &trailer_position, &keyring.secret);
        Self { position, header, header_seen, trailer, trailer_position, behind: None }
    }

    /// Looks at the page behind the header, where the checkpoint calls the segment free: a later use may have lost its header.
    pub fn look_behind(&mut self, window: &mut Window<'_>, keyring: &Keyring, known: Option<&SegmentState>) {
        let is_free = known.is_some_and(|known| known.state == SEGMENT_FREE);
        if is_free && !kvarts_layout::planted!("fsck-recycled-header-unseen") {
            self.behind = behind_header(window.bytes(PAGE_BYTES, PAGE), &self.position, &keyring.secret);
        }
    }

    /// The generation that the ends prove: the header's, else the trailer's.
    pub fn generation(&self) -> Option<u64> {
        let header = self.header.as_ref().ok().map(|header| header.position.generation);
        header.or(self.trailer.as_ref().ok().map(|_| self.trailer_position.generation))
    }

    /// The segment in the words of the recovery table; the footer that the trailer names is taken to be sound.
    pub fn sighting(&self, known: Option<&SegmentState>) -> SegmentSighting {
        let trailer = match &self.trailer {
            Ok(_) => TrailerSeen::Sealed,
            Err(unsound) => TrailerSeen::of_unsound(unsound),
        };
        let known = known.map_or(Known::Nothing, |known| self.known(known));
        SegmentSighting { header: self.header_seen, trailer, known }
    }

    fn known(&self, known: &SegmentState) -> Known {
        let own = self.generation().unwrap_or(known.generation);
        match (known.state, known.generation.cmp(&own)) {
            (SEGMENT_QUARANTINED, _) => Known::Quarantined,
            (_, std::cmp::Ordering::Less) => Known::Earlier,
            (_, std::cmp::Ordering::Greater) => Known::Later,
            (SEGMENT_FREE, _) if self.behind.is_some_and(|behind| behind > known.generation) => {
                Known::Outlived
            }
            (SEGMENT_FREE, _) => Known::Free,
            (SEGMENT_OPEN, _) => Known::Open,
            (SEGMENT_SEALED | SEGMENT_SUSPECT, _) => Known::Sealed,
            _ => Known::Nothing,
        }
    }

    /// How far a trailer or the checkpoint says that the segment had been flushed, and of which generation. What recovery
    /// sealed may have torn records among those that count.
    pub fn durable(&self, known: Option<&SegmentState>) -> (u64, u64) {
        match (&self.trailer, known) {
            (Ok(trailer), _) if trailer.reason == SealReason::Normal => {
                (self.trailer_position.generation, trailer.log_end)
            }
            (_, Some(known)) => (known.generation, known.log_end),
            (_, None) => (0, 0),
        }
    }

    /// The footer that a trailer names, or what is wrong with it.
    pub fn footer(
        &self,
        window: &mut Window<'_>,
        trailer: &Trailer,
        secret: &Secret,
    ) -> Result<Footer, String> {
        let bytes = usize::try_from(trailer.footer_bytes).unwrap_or(usize::MAX);
        let image = window.bytes(trailer.footer_offset, bytes);
        if footer::tag_of(image) != Some(trailer.footer_tag) {
            return Err("the footer differs from the footer that the trailer lists".to_owned());
        }
        let position = self.trailer_position.at(trailer.footer_offset);
        Footer::decode(image, &position, secret).map_err(|unsound| unsound.to_string())
    }
}

/// What is wrong between a trailer and the footer that it names, if anything.
pub fn disagreement(trailer: &Trailer, footer: &Footer) -> Option<&'static str> {
    let count = u32::try_from(footer.records.len()).unwrap_or(u32::MAX);
    if trailer.record_count != count {
        return Some("record_count");
    }
    let (Some(first), Some(last)) = (footer.records.first(), footer.records.last()) else { return None };
    if trailer.first_sequence != first.sequence {
        return Some("first_sequence");
    }
    (trailer.last_sequence != last.sequence).then_some("last_sequence")
}
