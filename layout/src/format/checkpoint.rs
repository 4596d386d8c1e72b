//! The index checkpoint: what a shard knows that neither footers nor records say.
//!
//! Footers list every block of a sealed segment, so a checkpoint does not repeat names: it says which segments
//! are free, what was deleted where the log may no longer say so, and for each record when it was last used and
//! when it expires. Losing it costs recency, never a block.
//!
//! Invariants:
//! - A checkpoint is a header page, chunks numbered from zero, and an end chunk that repeats the totals. Without
//!   a sound end chunk it does not count, whatever came before.
//! - The two files are written in turn; the one with the higher sequence that is whole counts. The header is
//!   written after everything else has been flushed, so a proven header stands before chunks of its own sequence.
//! - Chunks are bound to store, shard, file, sequence, offset and chunk number: chunks of two checkpoints never
//!   mix.
//! - It is read and written one chunk at a time: memory is bounded by [`super::MAX_CHUNK_IMAGE_BYTES`].

use rkyv::{Archive, Deserialize, Serialize};

use super::body::{Epoch, Tombstone, first_failure, from_archive, is_frugal, to_archive};
use super::field::Field;
use super::footer::Defined;
use super::position::Position;
use super::seal::{
    Draft, KIND, LONG_PREFIX, Long, OFFSET, REST_TAG, Secret, Structure, TOTAL_BYTES, prove_fixed,
    prove_long, prove_page, require_kind_zero, require_readable, require_zero, total_bytes,
};
use super::unsound::{Damage, EncodeError, Unsound};
use super::{PAGE, PAGE_BYTES};

/// When the checkpoint was begun, in milliseconds since 1970: the age of what it says about recency.
pub const CREATED_MS: Field = OFFSET.then("created_ms", 8);
/// The next sequence of the shard: no sequence is given twice even where the tail of the log is lost.
pub const NEXT_SEQUENCE: Field = CREATED_MS.then("next_sequence", 8);

/// The fields of the header behind the preamble.
pub const HEADER_FIELDS: &[Field] = &[CREATED_MS, NEXT_SEQUENCE];

/// The chunk's number from zero: a lost or doubled chunk is noticed.
pub const CHUNK_INDEX: Field = REST_TAG.then("chunk_index", 4);
/// Items in the chunk: bounds a reader's work before the body is looked at.
pub const ITEM_COUNT: Field = CHUNK_INDEX.then("item_count", 4);
/// Zero: room for later fields; a writer that put something there is noticed.
pub const RESERVED: Field = ITEM_COUNT.then("reserved", 24);

/// The fields of a chunk behind `rest_tag`.
pub const CHUNK_FIELDS: &[Field] = &[CHUNK_INDEX, ITEM_COUNT, RESERVED];

const _: () = assert!(RESERVED.end() == LONG_PREFIX);

/// The most items one chunk may have.
pub const MAX_ITEMS: usize = 1 << 14;

/// State of a segment: nothing in it counts; it may be recycled.
pub const SEGMENT_FREE: u8 = 0;
/// State of a segment: the log is being written there.
pub const SEGMENT_OPEN: u8 = 1;
/// State of a segment: sealed.
pub const SEGMENT_SEALED: u8 = 2;
/// State of a segment: sealed after a failed flush.
pub const SEGMENT_SUSPECT: u8 = 3;
/// State of a segment: kept as it is for inspection, neither read nor recycled.
pub const SEGMENT_QUARANTINED: u8 = 4;

/// What a checkpoint knows about a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
#[rkyv(derive(Debug))]
pub struct SegmentState {
    /// Its generation: what a later generation holds is not covered.
    pub generation: u64,
    /// Sequence of its first record; zero if it has none.
    pub first_sequence: u64,
    /// Sequence of its last record that this checkpoint covers.
    pub last_sequence: u64,
    /// Everything below had been flushed when the checkpoint was made; zero where that is not known.
    pub log_end: u64,
    /// The segment.
    pub segment: u32,
    /// `SEGMENT_FREE` to `SEGMENT_QUARANTINED`.
    pub state: u8,
}

/// What a checkpoint knows about a live record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
#[rkyv(derive(Debug))]
pub struct RecordState {
    /// Generation of the segment: of a later one nothing is said.
    pub generation: u64,
    /// Where the record's header begins.
    pub offset: u64,
    /// When it expires, in milliseconds since 1970; zero for never. May be later than its record says.
    pub expires_ms: u64,
    /// The segment.
    pub segment: u32,
    /// When one of its blocks was last used, in seconds since 1970.
    pub last_access_s: u32,
}

/// What a whole checkpoint has: repeated in its end chunk, compared by the reader.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Archive, Serialize, Deserialize)]
#[rkyv(derive(Debug))]
pub struct Totals {
    /// Segments.
    pub segments: u64,
    /// Namespaces.
    pub namespaces: u64,
    /// Records.
    pub records: u64,
    /// Tombstones.
    pub tombstones: u64,
    /// Epochs.
    pub epochs: u64,
    /// Chunks, the end chunk not counted.
    pub chunks: u64,
}

const _: () = assert!(size_of::<rkyv::Archived<SegmentState>>() == 40);
const _: () = assert!(size_of::<rkyv::Archived<RecordState>>() == 32);
const _: () = assert!(size_of::<rkyv::Archived<Totals>>() == 48);
const _: () = assert!(is_frugal::<SegmentState>() && is_frugal::<RecordState>());
const _: () = assert!(is_frugal::<Defined>() && is_frugal::<Epoch>());

/// The items of one chunk, all of one kind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Items {
    /// Segments.
    Segments(Vec<SegmentState>),
    /// The short ids that the tombstones of this checkpoint use; before them.
    Namespaces(Vec<Defined>),
    /// Live records.
    Records(Vec<RecordState>),
    /// Tombstones; their namespaces are short ids within this checkpoint.
    Tombstones(Vec<Tombstone>),
    /// Namespace epochs.
    Epochs(Vec<Epoch>),
}

const END_KIND: u16 = 6;

impl Items {
    fn kind(&self) -> u16 {
        match self {
            Self::Segments(_) => 1,
            Self::Namespaces(_) => 2,
            Self::Records(_) => 3,
            Self::Tombstones(_) => 4,
            Self::Epochs(_) => 5,
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        match self {
            Self::Segments(items) => items.len(),
            Self::Namespaces(items) => items.len(),
            Self::Records(items) => items.len(),
            Self::Tombstones(items) => items.len(),
            Self::Epochs(items) => items.len(),
        }
    }

    fn check(&self) -> Result<(), &'static str> {
        first_failure(&[((1..=MAX_ITEMS).contains(&self.count()), ITEM_COUNT.name)])?;
        match self {
            Self::Segments(items) => items.iter().try_for_each(SegmentState::check),
            Self::Records(items) => items.iter().try_for_each(RecordState::check),
            Self::Tombstones(items) => items.iter().try_for_each(Tombstone::check),
            Self::Namespaces(_) | Self::Epochs(_) => Ok(()),
        }
    }

    fn archive(&self) -> Result<rkyv::util::AlignedVec, EncodeError> {
        match self {
            Self::Segments(items) => to_archive(items),
            Self::Namespaces(items) => to_archive(items),
            Self::Records(items) => to_archive(items),
            Self::Tombstones(items) => to_archive(items),
            Self::Epochs(items) => to_archive(items),
        }
    }

    fn from_kind(kind: u16, body: &[u8]) -> Result<Self, Unsound> {
        Ok(match kind {
            1 => Self::Segments(from_archive(body)?),
            2 => Self::Namespaces(from_archive(body)?),
            3 => Self::Records(from_archive(body)?),
            4 => Self::Tombstones(from_archive(body)?),
            5 => Self::Epochs(from_archive(body)?),
            _ => return Err(Unsound::Damaged { what: Damage::Field(KIND.name) }),
        })
    }
}

impl SegmentState {
    fn check(&self) -> Result<(), &'static str> {
        first_failure(&[
            (self.state <= SEGMENT_QUARANTINED, "state"),
            (self.log_end.is_multiple_of(PAGE_BYTES), "log_end"),
            (self.first_sequence <= self.last_sequence, "last_sequence"),
        ])
    }
}

impl RecordState {
    fn check(&self) -> Result<(), &'static str> {
        first_failure(&[(self.offset.is_multiple_of(PAGE_BYTES), "offset")])
    }
}

impl Totals {
    fn add(&mut self, items: &Items) {
        let count = items.count() as u64;
        let total = match items {
            Items::Segments(_) => &mut self.segments,
            Items::Namespaces(_) => &mut self.namespaces,
            Items::Records(_) => &mut self.records,
            Items::Tombstones(_) => &mut self.tombstones,
            Items::Epochs(_) => &mut self.epochs,
        };
        *total = total.saturating_add(count);
        self.chunks = self.chunks.saturating_add(1);
    }
}

/// The first page of a checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CheckpointHeader {
    /// Store and shard; `segment` is the file (0 or 1), `generation` the checkpoint's sequence, `offset` zero.
    pub position: Position,
    /// When it was begun.
    pub created_ms: u64,
    /// The next sequence of the shard.
    pub next_sequence: u64,
}

impl CheckpointHeader {
    fn encode(&self, secret: &Secret) -> Result<Vec<u8>, EncodeError> {
        if self.position.offset != 0 {
            return Err(EncodeError::Field(OFFSET.name));
        }
        let mut draft = Draft::page(Structure::CheckpointHeader);
        draft.put(CREATED_MS, self.created_ms.to_le_bytes());
        draft.put(NEXT_SEQUENCE, self.next_sequence.to_le_bytes());
        Ok(draft.seal(&self.position, secret))
    }

    /// The header of the checkpoint in the file at `expected`, of whatever sequence the page proves.
    pub fn decode(page: &[u8], expected: &Position, secret: &Secret) -> Result<Self, Unsound> {
        let claimed = super::seal::claimed_position(page).ok_or(Unsound::Damaged { what: Damage::Length })?;
        let expected = expected.at(0).under(claimed.generation);
        prove_page(Structure::CheckpointHeader, page, &expected, secret)?;
        require_kind_zero(page)?;
        require_zero(page.get(NEXT_SEQUENCE.end()..PAGE).unwrap_or_default())?;
        Ok(Self {
            position: expected,
            created_ms: CREATED_MS.get_u64(page)?,
            next_sequence: NEXT_SEQUENCE.get_u64(page)?,
        })
    }
}

/// Writes a checkpoint chunk by chunk: the images follow each other in the file without gaps.
#[derive(Clone, Debug)]
pub struct CheckpointWriter {
    header: CheckpointHeader,
    secret: Secret,
    next: Position,
    totals: Totals,
}

impl CheckpointWriter {
    /// A checkpoint that begins with `header`.
    pub fn new(header: &CheckpointHeader, secret: &Secret) -> Self {
        let next = header.position.at(PAGE_BYTES);
        Self { header: *header, secret: secret.clone(), next, totals: Totals::default() }
    }

    /// The header page, for offset 0.
    pub fn header(&self) -> Result<Vec<u8>, EncodeError> {
        self.header.encode(&self.secret)
    }

    /// The next chunk. [`EncodeError::TooLarge`]: give it fewer items; nothing has changed.
    pub fn chunk(&mut self, items: &Items) -> Result<Vec<u8>, EncodeError> {
        items.check().map_err(EncodeError::Field)?;
        let image = self.image(items.kind(), items.count(), &items.archive()?)?;
        self.totals.add(items);
        Ok(image)
    }

    /// The last chunk: with it on disk the checkpoint counts.
    pub fn end(mut self) -> Result<Vec<u8>, EncodeError> {
        let totals = to_archive(&self.totals)?;
        self.image(END_KIND, 1, &totals)
    }

    fn image(&mut self, kind: u16, count: usize, body: &[u8]) -> Result<Vec<u8>, EncodeError> {
        let mut draft = Draft::long(Structure::CheckpointChunk, body, &[])?;
        let index = u32::try_from(self.totals.chunks).map_err(|_| EncodeError::TooLarge)?;
        let count = u32::try_from(count).map_err(|_| EncodeError::TooLarge)?;
        draft.put(KIND, kind.to_le_bytes());
        draft.put(CHUNK_INDEX, index.to_le_bytes());
        draft.put(ITEM_COUNT, count.to_le_bytes());
        let image = draft.seal(&self.next, &self.secret);
        self.next = self.next.at(self.next.offset.saturating_add(image.len() as u64));
        Ok(image)
    }
}

/// What one chunk of a checkpoint says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Chunk {
    /// Items; more chunks follow.
    Items(Items),
    /// The end: the checkpoint is whole, and this is what it had.
    End(Totals),
}

/// Reads a checkpoint chunk by chunk in bounded memory.
#[derive(Debug)]
pub struct CheckpointReader {
    secret: Secret,
    next: Position,
    totals: Totals,
}

impl CheckpointReader {
    /// Begins behind a decoded header.
    pub fn new(header: &CheckpointHeader, secret: &Secret) -> Self {
        let next = header.position.at(PAGE_BYTES);
        Self { secret: secret.clone(), next, totals: Totals::default() }
    }

    /// Where the next chunk begins.
    pub fn offset(&self) -> u64 {
        self.next.offset
    }

    /// How many bytes the next chunk has, from its proven first page.
    pub fn chunk_bytes(&self, first_page: &[u8]) -> Result<usize, Unsound> {
        let version = prove_fixed(Structure::CheckpointChunk, first_page, &self.next, &self.secret)?;
        require_readable(version)?;
        total_bytes(Structure::CheckpointChunk, first_page)
    }

    /// The next chunk. Any error ends the checkpoint: what it said before does not count.
    pub fn chunk(&mut self, bytes: &[u8]) -> Result<Chunk, Unsound> {
        let long = prove_long(Structure::CheckpointChunk, bytes, &self.next, &self.secret)?;
        let damaged = |name| Unsound::Damaged { what: Damage::Field(name) };
        self.check_frame(&long)?;
        let kind = KIND.get_u16(long.fixed)?;
        let count = ITEM_COUNT.get_u32(long.fixed)?;
        if kind == END_KIND {
            let totals: Totals = from_archive(long.body)?;
            if totals != self.totals || count != 1 {
                return Err(damaged("totals"));
            }
            return Ok(Chunk::End(totals));
        }
        let items = Items::from_kind(kind, long.body)?;
        if u32::try_from(items.count()) != Ok(count) {
            return Err(damaged(ITEM_COUNT.name));
        }
        items.check().map_err(damaged)?;
        let total = u64::from(TOTAL_BYTES.get_u32(long.fixed)?);
        self.totals.add(&items);
        self.next = self.next.at(self.next.offset.checked_add(total).ok_or(damaged(OFFSET.name))?);
        Ok(Chunk::Items(items))
    }

    fn check_frame(&self, long: &Long<'_>) -> Result<(), Unsound> {
        let damaged = |field: Field| Err(Unsound::Damaged { what: Damage::Field(field.name) });
        require_zero(long.table)?;
        require_zero(&RESERVED.get::<{ RESERVED.bytes }>(long.fixed)?)?;
        if long.table.len() >= PAGE {
            return damaged(TOTAL_BYTES);
        }
        if u64::from(CHUNK_INDEX.get_u32(long.fixed)?) != self.totals.chunks {
            return damaged(CHUNK_INDEX);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    fn reader() -> CheckpointReader {
        CheckpointReader::new(&samples::checkpoint_header(), &samples::secret())
    }

    #[test]
    fn a_checkpoint_says_what_was_written_into_it() {
        let pages = samples::checkpoint();
        let header = samples::checkpoint_header();
        let expected = header.position.under(0);
        assert_eq!(CheckpointHeader::decode(&pages[0], &expected, &samples::secret()), Ok(header));
        let mut reader = reader();
        let mut offset = 4096;
        for (page, items) in pages[1..].iter().zip(samples::items()) {
            assert_eq!(reader.offset(), offset);
            assert_eq!(reader.chunk_bytes(&page[..4096]), Ok(page.len()));
            assert_eq!(reader.chunk(page), Ok(Chunk::Items(items)));
            offset += page.len() as u64;
        }
        let Ok(Chunk::End(totals)) = reader.chunk(pages.last().unwrap()) else { panic!("no end") };
        assert_eq!((totals.records, totals.namespaces, totals.tombstones, totals.chunks), (2, 1, 2, 5));
    }

    #[test]
    fn a_lost_or_doubled_chunk_does_not_count() {
        let pages = samples::checkpoint();
        let mut reader = reader();
        assert!(matches!(reader.chunk(&pages[2]), Err(Unsound::Misdirected { .. })));
        assert!(reader.chunk(&pages[1]).is_ok());
        assert!(matches!(reader.chunk(&pages[1]), Err(Unsound::Misdirected { .. })));
        assert!(matches!(reader.chunk(pages.last().unwrap()), Err(Unsound::Misdirected { .. })));
    }

    #[test]
    fn a_chunk_of_the_checkpoint_before_is_stale() {
        let pages = samples::checkpoint();
        let mut header = samples::checkpoint_header();
        header.position.generation += 2;
        let mut reader = CheckpointReader::new(&header, &samples::secret());
        let generation = header.position.generation - 2;
        assert_eq!(reader.chunk(&pages[1]), Err(Unsound::Stale { generation }));
    }

    #[test]
    fn an_end_with_other_totals_does_not_count() {
        let pages = samples::checkpoint();
        let mut reader = reader();
        for page in &pages[1..pages.len() - 1] {
            reader.chunk(page).unwrap();
        }
        reader.totals.records += 1;
        let found = reader.chunk(pages.last().unwrap());
        assert_eq!(found, Err(Unsound::Damaged { what: Damage::Field("totals") }));
    }

    #[test]
    fn a_chunk_whose_frame_contradicts_it_is_refused() {
        let image = samples::checkpoint().swap_remove(1);
        let alter = |field, value: u32| {
            let image = samples::altered(Structure::CheckpointChunk, &image, field, value.to_le_bytes());
            reader().chunk(&image).unwrap_err()
        };
        let field = |field: Field| Unsound::Damaged { what: Damage::Field(field.name) };
        assert_eq!(alter(CHUNK_INDEX, 1), field(CHUNK_INDEX));
        assert_eq!(alter(ITEM_COUNT, 2), field(ITEM_COUNT));
        let kind = samples::altered(Structure::CheckpointChunk, &image, KIND, [77, 0]);
        assert_eq!(reader().chunk(&kind), Err(field(KIND)));
    }

    #[test]
    fn items_past_their_limits_are_not_written() {
        let mut writer = CheckpointWriter::new(&samples::checkpoint_header(), &samples::secret());
        let mut refused = |items: Items| writer.chunk(&items).unwrap_err();
        let field = EncodeError::Field;
        let all = samples::items();
        let [Items::Segments(segments), _, Items::Records(records), ..] = &all[..] else {
            panic!("other samples")
        };
        let (segment, record) = (segments[0], records[0]);
        assert_eq!(refused(Items::Segments(vec![])), field("item_count"));
        assert_eq!(refused(Items::Segments(vec![segment; MAX_ITEMS + 1])), field("item_count"));
        assert_eq!(refused(Items::Segments(vec![SegmentState { state: 5, ..segment }])), field("state"));
        assert_eq!(refused(Items::Segments(vec![SegmentState { log_end: 1, ..segment }])), field("log_end"));
        assert_eq!(refused(Items::Records(vec![RecordState { offset: 1, ..record }])), field("offset"));
    }

    #[test]
    fn a_chunk_that_is_too_large_changes_nothing() {
        let mut writer = CheckpointWriter::new(&samples::checkpoint_header(), &samples::secret());
        let Items::Tombstones(tombstones) = samples::items().remove(3) else { panic!("not tombstones") };
        let many = vec![tombstones[0]; MAX_ITEMS];
        assert_eq!(writer.chunk(&Items::Tombstones(many)), Err(EncodeError::TooLarge));
        let first = writer.chunk(&samples::items()[0]).unwrap();
        assert_eq!(first, samples::checkpoint()[1]);
    }
}
