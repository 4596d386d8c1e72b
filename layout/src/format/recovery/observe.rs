//! What stands at a page of a segment: one classification for the engine and for the checker.

use super::super::PAGE_BYTES;
use super::super::position::Position;
use super::super::record::{self, Body, Prefix};
use super::super::seal::{
    Secret, Structure, claimed_position, claimed_structure, prove_fixed, require_readable,
};
use super::Found;

/// What was found at a page of a segment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Observed {
    /// The bytes, in the words of the recovery table. A record with a payload is [`Found::RecordUnread`]: the
    /// caller verifies the payload, and compares sequences.
    pub found: Found,
    /// The record's proven fixed part, where there is one: how far to skip.
    pub prefix: Option<Prefix>,
    /// The record's body, where it can be used.
    pub body: Option<Body>,
}

/// Looks at the page of a segment that stands at `expected`. `bytes` begins there and reaches to the end of the
/// header that [`Prefix::open`] proves, or to the end of the file if that comes first.
pub fn observe(bytes: &[u8], expected: &Position, secret: &Secret) -> Observed {
    let only = |found| Observed { found, prefix: None, body: None };
    if claimed_structure(bytes) == Some(Structure::Footer) {
        let proven = prove_fixed(Structure::Footer, bytes, expected, secret).and_then(require_readable);
        return only(proven.map_or_else(|unsound| Found::of_prefix(&unsound), |()| Found::Footer));
    }
    let prefix = match Prefix::open(bytes, expected, secret) {
        Ok(prefix) => prefix,
        Err(unsound) => return only(Found::of_prefix(&unsound)),
    };
    let (found, body) = match record::open(bytes, expected, secret).and_then(|record| record.body()) {
        Err(unsound) => (Found::of_header(&unsound), None),
        Ok(Body::Unknown(_)) => (Found::UnknownKind, None),
        Ok(Body::Blocks(blocks)) if blocks.unknown_critical().is_some() => (Found::UnknownExtension, None),
        Ok(body) if prefix.payload_bytes == 0 => (Found::RecordWhole, Some(body)),
        Ok(body) => (Found::RecordUnread, Some(body)),
    };
    Observed { found, prefix: Some(prefix), body }
}

/// The generation that a record right behind a segment's header proves, if one lies there. `page` is that page of the
/// segment that begins at `segment`, under whatever generation.
pub fn behind_header(page: &[u8], segment: &Position, secret: &Secret) -> Option<u64> {
    let claimed = claimed_position(page)?;
    let expected = segment.under(claimed.generation).at(PAGE_BYTES);
    Prefix::open(page, &expected, secret).is_ok().then_some(claimed.generation)
}

#[cfg(test)]
mod tests {
    use super::super::super::body::Extension;
    use super::super::super::record::Fields;
    use super::super::super::{samples, seal};
    use super::*;

    fn found(bytes: &[u8], expected: &Position) -> (Found, bool, bool) {
        let observe = observe(bytes, expected, &samples::secret());
        (observe.found, observe.prefix.is_some(), observe.body.is_some())
    }

    #[test]
    fn sound_records_are_found_with_their_lengths_and_bodies() {
        for (body, digests, payload_bytes) in samples::bodies() {
            let at = samples::position(8192);
            let fields = Fields { payload_bytes, ..samples::fields() };
            let image = record::encode(&at, &samples::secret(), &fields, &body, &digests).unwrap();
            let expected = if payload_bytes == 0 { Found::RecordWhole } else { Found::RecordUnread };
            assert_eq!(found(&image, &at), (expected, true, true));
        }
    }

    #[test]
    fn what_a_scan_can_meet_is_found_as_what_it_is() {
        let (at, image) = samples::record();
        assert_eq!(found(&[0; 4096], &at), (Found::Empty, false, false));
        assert_eq!(found(&[0x4b; 4096], &at), (Found::Noise, false, false));
        assert_eq!(found(&image[..1000], &at), (Found::Torn, true, false));
        assert_eq!(found(&image, &at.under(at.generation + 1)), (Found::Stale, false, false));
        assert_eq!(found(&image, &at.under(at.generation - 1)), (Found::Ahead, false, false));
        assert_eq!(found(&image, &at.at(4096)), (Found::Misdirected, false, false));
        let mut first_sector_missing = image.clone();
        first_sector_missing[..512].fill(0);
        first_sector_missing[600] = 1;
        assert_eq!(found(&first_sector_missing, &at), (Found::Noise, false, false));
        let (at, image) = samples::footer_image();
        assert_eq!(found(&image, &at), (Found::Footer, false, false));
        assert_eq!(found(&image, &at.under(at.generation + 1)), (Found::Stale, false, false));
    }

    #[test]
    fn only_a_record_that_proves_itself_right_behind_the_header_tells_of_a_use() {
        let (secret, at) = (samples::secret(), samples::position(PAGE_BYTES));
        let (body, digests, payload_bytes) = samples::bodies().swap_remove(0);
        let fields = Fields { payload_bytes, durable_upto: 0, ..samples::fields() };
        let image = |at: &Position| record::encode(at, &secret, &fields, &body, &digests).unwrap();
        let segment = at.at(0).under(0);
        assert_eq!(behind_header(&image(&at), &segment, &secret), Some(at.generation));
        let mut flipped = image(&at);
        flipped[80] ^= 1;
        for other in [flipped, image(&at.at(2 * PAGE_BYTES)), vec![0; 4096], vec![0x5a; 4096], Vec::new()] {
            assert_eq!(behind_header(&other, &segment, &secret), None);
        }
        assert_eq!(behind_header(&samples::footer_image().1, &segment, &secret), None);
    }

    #[test]
    fn what_only_a_newer_program_can_read_is_found_with_its_length() {
        let (at, image) = samples::record();
        for (field, value, expected) in
            [(seal::FORMAT_VERSION, 9u16, Found::Newer), (seal::KIND, 99, Found::UnknownKind)]
        {
            let mut image = image.clone();
            field.put(&mut image, value.to_le_bytes());
            seal::reseal(Structure::Record, &mut image, &at, &samples::secret());
            assert_eq!(found(&image, &at), (expected, true, false));
        }
        let mut blocks = samples::blocks();
        blocks.extensions.push(Extension { id: 901, critical: true, bytes: vec![] });
        let fields = Fields { payload_bytes: 1, ..samples::fields() };
        let image = record::encode(&at, &samples::secret(), &fields, &Body::Blocks(blocks), &[1, 2]).unwrap();
        assert_eq!(found(&image, &at), (Found::UnknownExtension, true, false));
    }

    #[test]
    fn nobody_writes_records_of_a_version_that_was_never_frozen() {
        let (at, mut image) = samples::record();
        seal::FORMAT_VERSION.put(&mut image, 0u16.to_le_bytes());
        seal::reseal(Structure::Record, &mut image, &at, &samples::secret());
        assert_eq!(found(&image, &at), (Found::Malformed, true, false));
        let (at, mut image) = samples::footer_image();
        seal::FORMAT_VERSION.put(&mut image, 0u16.to_le_bytes());
        seal::reseal(Structure::Footer, &mut image, &at, &samples::secret());
        assert_eq!(found(&image, &at).0, Found::Malformed);
    }

    #[test]
    fn a_record_whose_body_breaks_a_rule_is_malformed() {
        let (at, mut image) = samples::record();
        record::DIGEST_COUNT.put(&mut image, 3u32.to_le_bytes());
        seal::reseal(Structure::Record, &mut image, &at, &samples::secret());
        assert_eq!(found(&image, &at).0, Found::Malformed);
    }
}
