//! The trailer: the last page of a sealed segment; finds the footer index and says why the segment was sealed.
//!
//! Invariants:
//! - The footer index is written and flushed before the trailer is written: a sound trailer without a sound
//!   footer is damage, never a crash.
//! - Nothing is written to a sealed segment but the next generation's header.
//! - Everything but padding lies in the first sector: it is written whole or not at all.

use super::field::Field;
use super::position::Position;
use super::seal::{Draft, OFFSET, Secret, Structure, prove_page, require_kind_zero, require_zero};
use super::unsound::{Damage, EncodeError, Unsound};
use super::{MAX_FOOTER_BYTES, MAX_SEGMENT_BYTES, PAGE, PAGE_BYTES, SECTOR};

/// Where the footer index begins.
pub const FOOTER_OFFSET: Field = OFFSET.then("footer_offset", 8);
/// The footer's tag: a sound footer of an interrupted earlier sealing is not taken for the one that counts.
pub const FOOTER_TAG: Field = FOOTER_OFFSET.then("footer_tag", 16);
/// Bytes of the footer index, a multiple of 4096.
pub const FOOTER_BYTES: Field = FOOTER_TAG.then("footer_bytes", 4);
/// Records that the footer lists: a rescan without the footer knows what it should find.
pub const RECORD_COUNT: Field = FOOTER_BYTES.then("record_count", 4);
/// Sequence of the first record; zero if there is none.
pub const FIRST_SEQUENCE: Field = RECORD_COUNT.then("first_sequence", 8);
/// Sequence of the last record; zero if there is none.
pub const LAST_SEQUENCE: Field = FIRST_SEQUENCE.then("last_sequence", 8);
/// Where the last record ends: below it a rescan expects no page that it cannot explain.
pub const LOG_END: Field = LAST_SEQUENCE.then("log_end", 8);
/// Why the segment was sealed: 0 full, 1 by recovery, 2 suspect after a failed flush.
pub const REASON: Field = LOG_END.then("reason", 2);
/// Zero: room for later fields; a writer that put something there is noticed.
pub const RESERVED: Field = REASON.then("reserved", 6);

/// The fields behind the preamble.
pub const FIELDS: &[Field] = &[
    FOOTER_OFFSET,
    FOOTER_TAG,
    FOOTER_BYTES,
    RECORD_COUNT,
    FIRST_SEQUENCE,
    LAST_SEQUENCE,
    LOG_END,
    REASON,
    RESERVED,
];

const _: () = assert!(RESERVED.end() <= SECTOR, "the trailer must not need more than one sector");

/// Why a segment was sealed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SealReason {
    /// It was full, or the store was closed.
    Normal,
    /// Recovery found it unsealed. Its footer lists what recovery adopted.
    Recovery,
    /// A flush failed. Its footer lists what had been acknowledged; what came later was written elsewhere.
    Suspect,
}

/// The end of a sealed segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Trailer {
    /// Where the footer index begins.
    pub footer_offset: u64,
    /// The footer's own tag, as `footer::tag_of` reads it from the footer's image.
    pub footer_tag: [u8; 16],
    /// Bytes of the footer index.
    pub footer_bytes: u32,
    /// Records in the footer.
    pub record_count: u32,
    /// Sequence of the first record.
    pub first_sequence: u64,
    /// Sequence of the last record.
    pub last_sequence: u64,
    /// Where the last record ends.
    pub log_end: u64,
    /// Why the segment was sealed.
    pub reason: SealReason,
}

/// Where the trailer of a segment stands.
pub fn position(segment: &Position, segment_bytes: u64) -> Position {
    segment.at(segment_bytes.saturating_sub(PAGE_BYTES))
}

impl Trailer {
    fn check(&self, own_offset: u64) -> Result<(), &'static str> {
        let footer_bytes = u64::from(self.footer_bytes);
        let footer_fits = self.footer_bytes != 0
            && footer_bytes <= MAX_FOOTER_BYTES as u64
            && footer_bytes.is_multiple_of(PAGE_BYTES)
            && self.footer_offset.checked_add(footer_bytes).is_some_and(|end| end <= own_offset);
        let aligned = |offset: u64| offset.is_multiple_of(PAGE_BYTES) && offset >= PAGE_BYTES;
        let limits = [
            (own_offset < MAX_SEGMENT_BYTES, OFFSET),
            (footer_fits, FOOTER_BYTES),
            (aligned(self.footer_offset), FOOTER_OFFSET),
            (aligned(self.log_end) && self.log_end <= self.footer_offset, LOG_END),
            (self.first_sequence <= self.last_sequence, LAST_SEQUENCE),
        ];
        limits.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, field)| Err(field.name))
    }

    /// The page to write at `position`, the last of the segment.
    pub fn encode(&self, position: &Position, secret: &Secret) -> Result<Vec<u8>, EncodeError> {
        self.check(position.offset).map_err(EncodeError::Field)?;
        let reason: u16 = match self.reason {
            SealReason::Normal => 0,
            SealReason::Recovery => 1,
            SealReason::Suspect => 2,
        };
        let mut draft = Draft::page(Structure::Trailer);
        draft.put(FOOTER_OFFSET, self.footer_offset.to_le_bytes());
        draft.put(FOOTER_TAG, self.footer_tag);
        draft.put(FOOTER_BYTES, self.footer_bytes.to_le_bytes());
        draft.put(RECORD_COUNT, self.record_count.to_le_bytes());
        draft.put(FIRST_SEQUENCE, self.first_sequence.to_le_bytes());
        draft.put(LAST_SEQUENCE, self.last_sequence.to_le_bytes());
        draft.put(LOG_END, self.log_end.to_le_bytes());
        draft.put(REASON, reason.to_le_bytes());
        Ok(draft.seal(position, secret))
    }

    /// The trailer at `expected`.
    pub fn decode(page: &[u8], expected: &Position, secret: &Secret) -> Result<Self, Unsound> {
        prove_page(Structure::Trailer, page, expected, secret)?;
        require_kind_zero(page)?;
        require_zero(page.get(RESERVED.offset..PAGE).unwrap_or_default())?;
        let reason = match REASON.get_u16(page)? {
            0 => SealReason::Normal,
            1 => SealReason::Recovery,
            2 => SealReason::Suspect,
            _ => return Err(Unsound::Damaged { what: Damage::Field(REASON.name) }),
        };
        let trailer = Self {
            footer_offset: FOOTER_OFFSET.get_u64(page)?,
            footer_tag: FOOTER_TAG.get(page)?,
            footer_bytes: FOOTER_BYTES.get_u32(page)?,
            record_count: RECORD_COUNT.get_u32(page)?,
            first_sequence: FIRST_SEQUENCE.get_u64(page)?,
            last_sequence: LAST_SEQUENCE.get_u64(page)?,
            log_end: LOG_END.get_u64(page)?,
            reason,
        };
        let damaged = |name| Unsound::Damaged { what: Damage::Field(name) };
        trailer.check(expected.offset).map_err(damaged)?;
        Ok(trailer)
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    #[test]
    fn a_trailer_survives_its_encoding_whatever_the_reason() {
        let (position, trailer) = samples::trailer();
        for reason in [SealReason::Normal, SealReason::Recovery, SealReason::Suspect] {
            let trailer = Trailer { reason, ..trailer };
            let image = trailer.encode(&position, &samples::secret()).unwrap();
            assert_eq!(Trailer::decode(&image, &position, &samples::secret()), Ok(trailer));
        }
    }

    #[test]
    fn a_trailer_that_points_outside_its_segment_is_refused_by_both_sides() {
        let (position, good) = samples::trailer();
        let image = good.encode(&position, &samples::secret()).unwrap();
        let cases: [(Field, u64); 8] = [
            (FOOTER_OFFSET, 0),
            (FOOTER_OFFSET, good.footer_offset + 1),
            (FOOTER_OFFSET, position.offset),
            (FOOTER_OFFSET, u64::MAX - 4095),
            (LOG_END, 0),
            (LOG_END, good.footer_offset + 4096),
            (LOG_END, good.log_end - 1),
            (FIRST_SEQUENCE, good.last_sequence + 1),
        ];
        for (field, value) in cases {
            let image = samples::altered(Structure::Trailer, &image, field, value.to_le_bytes());
            let found = Trailer::decode(&image, &position, &samples::secret());
            let Err(Unsound::Damaged { what: Damage::Field(name) }) = found else {
                panic!("{field:?}: {found:?}")
            };
            let mut trailer = good;
            match field.name {
                "footer_offset" => trailer.footer_offset = value,
                "log_end" => trailer.log_end = value,
                _ => trailer.first_sequence = value,
            }
            assert_eq!(trailer.encode(&position, &samples::secret()), Err(EncodeError::Field(name)));
        }
        for bytes in [0u32, 4095, 1 << 30] {
            let image = samples::altered(Structure::Trailer, &image, FOOTER_BYTES, bytes.to_le_bytes());
            let found = Trailer::decode(&image, &position, &samples::secret());
            assert_eq!(found, Err(Unsound::Damaged { what: Damage::Field("footer_bytes") }));
        }
        let reason = samples::altered(Structure::Trailer, &image, REASON, [3, 0]);
        let found = Trailer::decode(&reason, &position, &samples::secret());
        assert_eq!(found, Err(Unsound::Damaged { what: Damage::Field("reason") }));
        let far = good.encode(&position.at(MAX_SEGMENT_BYTES), &samples::secret());
        assert_eq!(far, Err(EncodeError::Field("offset")));
    }
}
