//! The segment header: the first page of a segment file, rewritten under the next generation whenever the file
//! is recycled.
//!
//! Invariants:
//! - It is flushed before the first record of its generation is written.
//! - Everything but padding lies in the first sector: it is written whole or not at all.
//! - It repeats the store's secret, so that a lost superblock does not cost the segments.

use super::field::Field;
use super::position::Position;
use super::seal::{
    Draft, OFFSET, Secret, Structure, claimed_position, prove_page, require_kind_zero, require_zero,
};
use super::unsound::{Damage, EncodeError, Unsound};
use super::{PAGE, SECTOR, is_segment_size};

/// The store's secret again: a lost superblock does not cost the segments.
pub const SECRET: Field = OFFSET.then("secret", 32);
/// When this generation began, in milliseconds since 1970: age of the segment for reclaim and for people.
pub const CREATED_MS: Field = SECRET.then("created_ms", 8);
/// Size of the file: finds the trailer without a superblock, and shows a truncated file.
pub const SEGMENT_BYTES: Field = CREATED_MS.then("segment_bytes", 8);
/// No record here has a lower sequence: an older record is a leftover whatever else it claims.
pub const FIRST_SEQUENCE: Field = SEGMENT_BYTES.then("first_sequence", 8);

/// The fields behind the preamble.
pub const FIELDS: &[Field] = &[SECRET, CREATED_MS, SEGMENT_BYTES, FIRST_SEQUENCE];

const _: () = assert!(FIRST_SEQUENCE.end() <= SECTOR, "the header must not need more than one sector");

/// What a segment file holds from here on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SegmentHeader {
    /// Store, shard, segment and generation; the offset is zero.
    pub position: Position,
    /// The store's secret.
    pub secret: Secret,
    /// When this generation began.
    pub created_ms: u64,
    /// Size of the file.
    pub segment_bytes: u64,
    /// The sequence from which its records count.
    pub first_sequence: u64,
}

impl SegmentHeader {
    /// The page to write at offset 0.
    pub fn encode(&self) -> Result<Vec<u8>, EncodeError> {
        if !is_segment_size(self.segment_bytes) {
            return Err(EncodeError::Field(SEGMENT_BYTES.name));
        }
        if self.position.offset != 0 {
            return Err(EncodeError::Field(OFFSET.name));
        }
        let mut draft = Draft::page(Structure::SegmentHeader);
        draft.put(SECRET, self.secret.expose());
        draft.put(CREATED_MS, self.created_ms.to_le_bytes());
        draft.put(SEGMENT_BYTES, self.segment_bytes.to_le_bytes());
        draft.put(FIRST_SEQUENCE, self.first_sequence.to_le_bytes());
        Ok(draft.seal(&self.position, &self.secret))
    }

    /// The header of the segment at `expected`, whose generation the caller knows.
    pub fn decode(page: &[u8], expected: &Position, secret: &Secret) -> Result<Self, Unsound> {
        prove_page(Structure::SegmentHeader, page, &expected.at(0), secret)?;
        let header = Self {
            position: expected.at(0),
            secret: Secret::new(SECRET.get(page)?),
            created_ms: CREATED_MS.get_u64(page)?,
            segment_bytes: SEGMENT_BYTES.get_u64(page)?,
            first_sequence: FIRST_SEQUENCE.get_u64(page)?,
        };
        require_kind_zero(page)?;
        require_zero(page.get(FIRST_SEQUENCE.end()..PAGE).unwrap_or_default())?;
        if header.secret != *secret {
            return Err(Unsound::Damaged { what: Damage::Field(SECRET.name) });
        }
        if !is_segment_size(header.segment_bytes) {
            return Err(Unsound::Damaged { what: Damage::Field(SEGMENT_BYTES.name) });
        }
        Ok(header)
    }

    /// The header of a segment of whatever generation the page proves: how a segment is opened that no
    /// checkpoint knows.
    pub fn decode_any_generation(page: &[u8], expected: &Position, secret: &Secret) -> Result<Self, Unsound> {
        let claimed = claimed_position(page).ok_or(Unsound::Damaged { what: Damage::Length })?;
        Self::decode(page, &expected.under(claimed.generation), secret)
    }

    /// The header sealed by the secret it carries: proves that it is whole, not who wrote it. For repair when
    /// both superblock slots are lost and all segments agree on one secret.
    pub fn decode_unkeyed(page: &[u8]) -> Result<Self, Unsound> {
        let claimed = claimed_position(page).ok_or(Unsound::Damaged { what: Damage::Length })?;
        let secret = Secret::new(SECRET.get(page)?);
        Self::decode(page, &claimed, &secret)
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    #[test]
    fn a_header_of_an_earlier_generation_is_stale_and_of_a_later_one_ahead() {
        let header = samples::segment_header();
        let page = header.encode().unwrap();
        let generation = header.position.generation;
        let under =
            |generation| SegmentHeader::decode(&page, &header.position.under(generation), &header.secret);
        assert_eq!(under(generation + 1), Err(Unsound::Stale { generation }));
        assert_eq!(under(generation - 1), Err(Unsound::Ahead { generation }));
        let any = SegmentHeader::decode_any_generation(&page, &header.position.under(0), &header.secret);
        assert_eq!(any, Ok(header));
    }

    #[test]
    fn a_lost_superblock_is_no_reason_to_lose_the_secret() {
        let header = samples::segment_header();
        assert_eq!(SegmentHeader::decode_unkeyed(&header.encode().unwrap()), Ok(header));
    }

    #[test]
    fn a_header_sealed_by_another_secret_is_not_accepted() {
        let forged = SegmentHeader { secret: Secret::new([1; 32]), ..samples::segment_header() };
        let found = SegmentHeader::decode(&forged.encode().unwrap(), &forged.position, &samples::secret());
        assert_eq!(found, Err(Unsound::Damaged { what: Damage::Tag }));
    }

    #[test]
    fn a_header_that_contradicts_its_store_is_refused() {
        let header = samples::segment_header();
        let image = header.encode().unwrap();
        let decode = |image: &[u8]| SegmentHeader::decode(image, &header.position, &header.secret);
        let damaged = |field: Field| Err(Unsound::Damaged { what: Damage::Field(field.name) });
        let other = samples::altered(Structure::SegmentHeader, &image, SECRET, [1; 32]);
        assert_eq!(decode(&other), damaged(SECRET));
        let odd = samples::altered(Structure::SegmentHeader, &image, SEGMENT_BYTES, 65_537u64.to_le_bytes());
        assert_eq!(decode(&odd), damaged(SEGMENT_BYTES));
        let odd = SegmentHeader { segment_bytes: 0, ..header.clone() };
        assert_eq!(odd.encode(), Err(EncodeError::Field("segment_bytes")));
        let elsewhere = SegmentHeader { position: header.position.at(4096), ..header };
        assert_eq!(elsewhere.encode(), Err(EncodeError::Field("offset")));
    }
}
