//! The footer index of a sealed segment: everything the in-memory index needs, so that recovery reads no record
//! header of a sealed segment.
//!
//! Invariants:
//! - It lists the records of the segment's generation that count, in log order: offsets and sequences increase,
//!   records do not overlap, all lie between the segment header and the footer.
//! - It repeats the bodies of block records, tombstones and epochs, and the ids that definitions define; digests
//!   and canonical encodings stay with the records.

use rkyv::{Archive, Deserialize, Serialize};

use super::body::{Blocks, Epoch, Tombstones, from_archive, is_frugal, to_archive};
use super::field::Field;
use super::position::Position;
use super::seal::{
    Draft, LONG_PREFIX, REST_TAG, Secret, Structure, TAG, prove_long, require_kind_zero, require_zero,
};
use super::unsound::{Damage, EncodeError, Unsound};
use super::{MAX_HEADER_BYTES, MAX_SEGMENT_BYTES, PAGE, PAGE_BYTES, page_align};

/// Records in the index: bounds a reader's work before the body is looked at.
pub const RECORD_COUNT: Field = REST_TAG.then("record_count", 4);
/// Zero: room for later fields; a writer that put something there is noticed.
pub const RESERVED: Field = RECORD_COUNT.then("reserved", 28);

/// The fields behind `rest_tag`.
pub const FIELDS: &[Field] = &[RECORD_COUNT, RESERVED];

const _: () = assert!(RESERVED.end() == LONG_PREFIX);

/// A local id and what it stands for in this segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
#[rkyv(derive(Debug))]
pub struct Defined {
    /// The short id.
    pub local: u32,
    /// The namespace id, or the spec's id.
    pub id: [u8; 32],
}

/// What a listed record says.
#[derive(Clone, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
#[rkyv(derive(Debug))]
pub enum Content {
    /// Its whole body.
    Blocks(Blocks),
    /// The ids, without the canonical encoding.
    Identity(Defined),
    /// The ids, without the canonical encoding.
    Spec(Defined),
    /// Its whole body.
    Tombstones(Tombstones),
    /// Its whole body.
    Epoch(Epoch),
    /// A record that this version keeps but does not understand: its kind.
    Unknown(u16),
}

/// One record of a sealed segment.
#[derive(Clone, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
#[rkyv(derive(Debug))]
pub struct Entry {
    /// Where its header begins.
    pub offset: u64,
    /// Its sequence.
    pub sequence: u64,
    /// Bytes of its payload without padding.
    pub payload_bytes: u64,
    /// Bytes of its header.
    pub header_bytes: u32,
    /// What it says.
    pub content: Content,
}

/// Bytes of a record in the index, beside the names of its blocks.
pub const ENTRY_BYTES: usize = 152;

/// The index of a sealed segment.
#[derive(Clone, PartialEq, Eq, Debug, Default, Archive, Serialize, Deserialize)]
#[rkyv(derive(Debug))]
pub struct Footer {
    /// The records, in log order.
    pub records: Vec<Entry>,
}

const _: () = assert!(size_of::<rkyv::Archived<Defined>>() == 36);
const _: () = assert!(size_of::<rkyv::Archived<Content>>() == 120);
const _: () = assert!(size_of::<rkyv::Archived<Entry>>() == ENTRY_BYTES);
const _: () = assert!(size_of::<rkyv::Archived<Footer>>() == 8);
const _: () = assert!(is_frugal::<Entry>());

impl Content {
    fn check(&self) -> Result<(), &'static str> {
        match self {
            Self::Blocks(blocks) => blocks.check(),
            Self::Tombstones(tombstones) => tombstones.check(),
            Self::Identity(_) | Self::Spec(_) | Self::Epoch(_) | Self::Unknown(_) => Ok(()),
        }
    }
}

impl Entry {
    /// Bytes that it takes in the index, about.
    pub fn bytes(&self) -> usize {
        let names = match &self.content {
            Content::Blocks(blocks) => blocks.blocks.len().saturating_mul(32),
            Content::Tombstones(tombstones) => tombstones.entries.len().saturating_mul(80),
            _ => 0,
        };
        ENTRY_BYTES.saturating_add(names)
    }

    /// Where the record ends, or `None` if it is longer than a record can be.
    fn end(&self) -> Option<u64> {
        let header_bytes = u64::from(self.header_bytes);
        let whole = header_bytes.is_multiple_of(PAGE_BYTES)
            && (PAGE_BYTES..=MAX_HEADER_BYTES as u64).contains(&header_bytes)
            && self.offset.is_multiple_of(PAGE_BYTES)
            && self.payload_bytes <= MAX_SEGMENT_BYTES;
        let end = self.offset.checked_add(header_bytes)?.checked_add(page_align(self.payload_bytes)?)?;
        whole.then_some(end)
    }
}

/// A footer whose place is not known yet.
pub struct FooterDraft {
    draft: Draft,
    /// Where the last record ends.
    records_end: u64,
}

impl std::fmt::Debug for FooterDraft {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FooterDraft({} bytes)", self.bytes())
    }
}

impl FooterDraft {
    /// Bytes of the image.
    pub fn bytes(&self) -> usize {
        self.draft.bytes()
    }

    /// The image to write at `position`.
    pub fn seal(self, position: &Position, secret: &Secret) -> Result<Vec<u8>, EncodeError> {
        match self.records_end <= position.offset {
            true => Ok(self.draft.seal(position, secret)),
            false => Err(EncodeError::Field("offset")),
        }
    }
}

impl Footer {
    /// Whether the invariants hold for a footer that begins at `own_offset`.
    fn check(&self, own_offset: u64) -> Result<(), &'static str> {
        let mut free_from = PAGE_BYTES;
        let mut sequence = None;
        for record in &self.records {
            let end = record.end().ok_or("record_bytes")?;
            if record.offset < free_from || end > own_offset {
                return Err("offset");
            }
            if sequence.is_some_and(|sequence| record.sequence <= sequence) {
                return Err("sequence");
            }
            record.content.check()?;
            (free_from, sequence) = (end, Some(record.sequence));
        }
        Ok(())
    }

    /// The index to write at `position`. Its tag, for the trailer, is [`tag_of`] the image.
    pub fn encode(&self, position: &Position, secret: &Secret) -> Result<Vec<u8>, EncodeError> {
        self.draft()?.seal(position, secret)
    }

    /// The same for a place that depends on its length.
    pub fn draft(&self) -> Result<FooterDraft, EncodeError> {
        self.check(u64::MAX).map_err(EncodeError::Field)?;
        let count = u32::try_from(self.records.len()).map_err(|_| EncodeError::TooLarge)?;
        let mut draft = Draft::long(Structure::Footer, &to_archive(self)?, &[])?;
        draft.put(RECORD_COUNT, count.to_le_bytes());
        let records_end = self.records.last().and_then(Entry::end).unwrap_or(PAGE_BYTES);
        Ok(FooterDraft { draft, records_end })
    }

    /// The index at `expected`.
    pub fn decode(bytes: &[u8], expected: &Position, secret: &Secret) -> Result<Self, Unsound> {
        let long = prove_long(Structure::Footer, bytes, expected, secret)?;
        require_kind_zero(long.fixed)?;
        require_zero(long.table)?;
        require_zero(&RESERVED.get::<{ RESERVED.bytes }>(long.fixed)?)?;
        let damaged = |name| Unsound::Damaged { what: Damage::Field(name) };
        if long.table.len() >= PAGE {
            return Err(damaged(super::seal::TOTAL_BYTES.name));
        }
        let footer: Self = from_archive(long.body)?;
        if u32::try_from(footer.records.len()) != Ok(RECORD_COUNT.get_u32(long.fixed)?) {
            return Err(damaged(RECORD_COUNT.name));
        }
        footer.check(expected.offset).map_err(damaged)?;
        Ok(footer)
    }
}

/// The tag in a footer's image, for the trailer to name it by.
pub fn tag_of(image: &[u8]) -> Option<[u8; 16]> {
    TAG.get(image).ok()
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    #[test]
    fn an_empty_segment_has_an_empty_footer() {
        let position = samples::position(4096);
        let image = Footer::default().encode(&position, &samples::secret()).unwrap();
        assert_eq!(Footer::decode(&image, &position, &samples::secret()), Ok(Footer::default()));
    }

    #[test]
    fn entries_that_contradict_each_other_are_refused() {
        let good = samples::footer();
        let position = samples::position(1 << 20);
        let refused = |change: &dyn Fn(&mut Footer)| {
            let mut footer = good.clone();
            change(&mut footer);
            footer.encode(&position, &samples::secret()).unwrap_err()
        };
        assert!(good.encode(&position, &samples::secret()).is_ok());
        let field = EncodeError::Field;
        assert_eq!(refused(&|footer| footer.records[0].offset = 0), field("offset"));
        assert_eq!(refused(&|footer| footer.records[1].offset += 1), field("record_bytes"));
        assert_eq!(refused(&|footer| footer.records[1].offset = footer.records[0].offset), field("offset"));
        assert_eq!(
            refused(&|footer| footer.records[1].sequence = footer.records[0].sequence),
            field("sequence")
        );
        assert_eq!(refused(&|footer| footer.records[0].header_bytes = 0), field("record_bytes"));
        assert_eq!(refused(&|footer| footer.records[0].payload_bytes = u64::MAX), field("record_bytes"));
        let early = samples::position(8192);
        assert_eq!(good.encode(&early, &samples::secret()), Err(field("offset")));
    }
}
