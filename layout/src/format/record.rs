//! A record: the unit of the log. A header (fixed prefix, body, digest table, padding) and, for blocks, a payload
//! behind it; both fill whole pages.
//!
//! Invariants:
//! - A record stands alone: prefix and rest are proven by their tags, the payload by the digest table. Nothing
//!   in the log has to be read first.
//! - Sequences increase strictly along the log of a shard.
//! - Everything of this segment below `durable_upto` had been flushed when the header was made. Damage there is
//!   damage; above it, a torn write is a legal end of the log.
//! - Lengths come from the proven prefix, so a record of an unknown kind or a newer version is skipped, never
//!   guessed at.
//! - Digests are over canonical (uncompressed) bytes, one per chunk, in `[block][layer][part]` order whatever
//!   the layout: they travel unchanged.

use super::body::{Blocks, Definition, Epoch, Tombstones, from_archive, to_archive};
use super::field::Field;
use super::position::Position;
use super::seal::{
    BODY_BYTES, Draft, KIND, LONG_PREFIX, REST_TAG, Secret, Structure, prove_fixed, prove_long,
    require_readable, require_zero, total_bytes,
};
use super::unsound::{Damage, EncodeError, Unsound};
use super::{MAX_SEGMENT_BYTES, page_align};

/// Bytes of the payload without padding: where the next record begins.
pub const PAYLOAD_BYTES: Field = REST_TAG.then("payload_bytes", 8);
/// Sequence within the shard: which of two records of a block is newer, and replayed ones.
pub const SEQUENCE: Field = PAYLOAD_BYTES.then("sequence", 8);
/// Bytes of this segment known to be flushed: tells a torn tail from damage.
pub const DURABLE_UPTO: Field = SEQUENCE.then("durable_upto", 8);
/// Entries of the digest table.
pub const DIGEST_COUNT: Field = DURABLE_UPTO.then("digest_count", 4);
/// Algorithm of the digests: a later one is told from this one, not misread.
pub const DIGEST_ALGORITHM: Field = DIGEST_COUNT.then("digest_algorithm", 1);
/// Bytes of one digest: a table of an unknown algorithm can still be copied.
pub const DIGEST_WIDTH: Field = DIGEST_ALGORITHM.then("digest_width", 1);
/// Zero: room for later fields; a writer that put something there is noticed.
pub const RESERVED: Field = DIGEST_WIDTH.then("reserved", 2);

/// The fields behind `rest_tag`.
pub const FIELDS: &[Field] =
    &[PAYLOAD_BYTES, SEQUENCE, DURABLE_UPTO, DIGEST_COUNT, DIGEST_ALGORITHM, DIGEST_WIDTH, RESERVED];

const _: () = assert!(RESERVED.end() == LONG_PREFIX);

/// No digest table.
pub const DIGEST_NONE: u8 = 0;
/// CRC-32 (IEEE), four bytes little-endian.
pub const DIGEST_CRC32: u8 = 1;
const CRC32_BYTES: u8 = 4;

/// The kinds of records. Numbers that are not here are skipped by readers of this version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Blocks and their bytes.
    Blocks,
    /// An identity: defines a local namespace id.
    Identity,
    /// A model spec: defines a local spec id.
    Spec,
    /// Deletes.
    Tombstones,
    /// The delete of a whole namespace.
    Epoch,
    /// A kind of a later version.
    Unknown(u16),
}

impl Kind {
    /// The number on disk.
    pub const fn code(self) -> u16 {
        match self {
            Self::Blocks => 1,
            Self::Identity => 2,
            Self::Spec => 3,
            Self::Tombstones => 4,
            Self::Epoch => 5,
            Self::Unknown(code) => code,
        }
    }

    /// The kind that a number names.
    pub const fn from_code(code: u16) -> Self {
        match code {
            1 => Self::Blocks,
            2 => Self::Identity,
            3 => Self::Spec,
            4 => Self::Tombstones,
            5 => Self::Epoch,
            other => Self::Unknown(other),
        }
    }
}

/// The body of a record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Body {
    /// Blocks.
    Blocks(Blocks),
    /// An identity.
    Identity(Definition),
    /// A spec.
    Spec(Definition),
    /// Deletes.
    Tombstones(Tombstones),
    /// The delete of a namespace.
    Epoch(Epoch),
    /// A kind of a later version: skip the record.
    Unknown(u16),
}

impl Body {
    /// The kind that goes with the body.
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Blocks(_) => Kind::Blocks,
            Self::Identity(_) => Kind::Identity,
            Self::Spec(_) => Kind::Spec,
            Self::Tombstones(_) => Kind::Tombstones,
            Self::Epoch(_) => Kind::Epoch,
            Self::Unknown(code) => Kind::Unknown(*code),
        }
    }

    fn check(&self, digest_count: u32, payload_bytes: u64) -> Result<(), &'static str> {
        match self {
            Self::Blocks(blocks) => {
                blocks.check()?;
                return blocks.check_tables(digest_count, payload_bytes);
            }
            Self::Identity(definition) | Self::Spec(definition) => definition.check()?,
            Self::Tombstones(tombstones) => tombstones.check()?,
            Self::Epoch(_) | Self::Unknown(_) => {}
        }
        if digest_count != 0 {
            return Err(DIGEST_COUNT.name);
        }
        if payload_bytes == 0 { Ok(()) } else { Err(PAYLOAD_BYTES.name) }
    }
}

/// What the writer decides about a record beside its body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fields {
    /// Sequence within the shard.
    pub sequence: u64,
    /// Bytes of this segment known to be flushed.
    pub durable_upto: u64,
    /// Bytes of the payload without padding; zero but for blocks.
    pub payload_bytes: u64,
}

/// The header of a record, ready to be written at `position`. `digests` are CRC-32, one per chunk in canonical
/// order; empty but for blocks.
pub fn encode(
    position: &Position,
    secret: &Secret,
    fields: &Fields,
    body: &Body,
    digests: &[u32],
) -> Result<Vec<u8>, EncodeError> {
    let digest_count = u32::try_from(digests.len()).map_err(|_| EncodeError::TooLarge)?;
    body.check(digest_count, fields.payload_bytes).map_err(EncodeError::Field)?;
    check_lengths(position.offset, fields).map_err(EncodeError::Field)?;
    let archive = match body {
        Body::Blocks(blocks) => to_archive(blocks)?,
        Body::Identity(definition) | Body::Spec(definition) => to_archive(definition)?,
        Body::Tombstones(tombstones) => to_archive(tombstones)?,
        Body::Epoch(epoch) => to_archive(epoch)?,
        Body::Unknown(_) => return Err(EncodeError::Field(KIND.name)),
    };
    let table: Vec<u8> = digests.iter().flat_map(|digest| digest.to_le_bytes()).collect();
    let mut draft = Draft::long(Structure::Record, &archive, &table)?;
    let (algorithm, width) = if digests.is_empty() { (DIGEST_NONE, 0) } else { (DIGEST_CRC32, CRC32_BYTES) };
    draft.put(KIND, body.kind().code().to_le_bytes());
    draft.put(PAYLOAD_BYTES, fields.payload_bytes.to_le_bytes());
    draft.put(SEQUENCE, fields.sequence.to_le_bytes());
    draft.put(DURABLE_UPTO, fields.durable_upto.to_le_bytes());
    draft.put(DIGEST_COUNT, digest_count.to_le_bytes());
    draft.put(DIGEST_ALGORITHM, [algorithm]);
    draft.put(DIGEST_WIDTH, [width]);
    Ok(draft.seal(position, secret))
}

fn check_lengths(offset: u64, fields: &Fields) -> Result<(), &'static str> {
    if fields.payload_bytes > MAX_SEGMENT_BYTES {
        return Err(PAYLOAD_BYTES.name);
    }
    if fields.durable_upto > offset { Err(DURABLE_UPTO.name) } else { Ok(()) }
}

/// The proven fixed part of a record: enough to skip it, and to know how much to read for the rest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Prefix {
    /// The version that wrote it. A newer one than [`super::VERSION`] can be skipped but not read.
    pub version: u16,
    /// The kind.
    pub kind: Kind,
    /// Bytes of the header, a multiple of 4096.
    pub header_bytes: u32,
    /// Bytes of the archived body.
    pub body_bytes: u32,
    /// Bytes of the payload without padding.
    pub payload_bytes: u64,
    /// Sequence within the shard.
    pub sequence: u64,
    /// Bytes of this segment that were flushed when this header was made.
    pub durable_upto: u64,
    /// Entries of the digest table.
    pub digest_count: u32,
    /// Algorithm of the digests.
    pub digest_algorithm: u8,
    /// Bytes of one digest.
    pub digest_width: u8,
}

impl Prefix {
    /// Proves the fixed part of the record at `expected`, of this version or a newer one. `bytes` is its first
    /// page at least; [`LONG_PREFIX`] bytes are enough if the page is not empty.
    pub fn open(bytes: &[u8], expected: &Position, secret: &Secret) -> Result<Self, Unsound> {
        let version = prove_fixed(Structure::Record, bytes, expected, secret)?;
        let header_bytes = total_bytes(Structure::Record, bytes)?;
        let fields = Fields {
            sequence: SEQUENCE.get_u64(bytes)?,
            durable_upto: DURABLE_UPTO.get_u64(bytes)?,
            payload_bytes: PAYLOAD_BYTES.get_u64(bytes)?,
        };
        let damaged = |name| Unsound::Damaged { what: Damage::Field(name) };
        check_lengths(expected.offset, &fields).map_err(damaged)?;
        if require_readable(version).is_ok() {
            require_zero(&RESERVED.get::<2>(bytes)?)?;
        }
        Ok(Self {
            version,
            kind: Kind::from_code(KIND.get_u16(bytes)?),
            header_bytes: u32::try_from(header_bytes).unwrap_or(u32::MAX),
            body_bytes: BODY_BYTES.get_u32(bytes)?,
            payload_bytes: fields.payload_bytes,
            sequence: fields.sequence,
            durable_upto: fields.durable_upto,
            digest_count: DIGEST_COUNT.get_u32(bytes)?,
            digest_algorithm: DIGEST_ALGORITHM.get_u8(bytes)?,
            digest_width: DIGEST_WIDTH.get_u8(bytes)?,
        })
    }

    /// Bytes of the whole record on disk, a multiple of 4096. No overflow: both parts are within their limits.
    pub fn record_bytes(&self) -> u64 {
        let payload = page_align(self.payload_bytes).unwrap_or(self.payload_bytes);
        u64::from(self.header_bytes).saturating_add(payload)
    }
}

/// A proven record header whose body has not been copied out: digests can be read at once.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// The fixed part.
    pub prefix: Prefix,
    body: &'a [u8],
    digests: &'a [u8],
}

/// Proves the whole header of the record at `expected`. `bytes` reaches at least to its end, as
/// [`Prefix::header_bytes`] says, or to the end of the file: then the answer is [`Unsound::Torn`].
pub fn open<'a>(bytes: &'a [u8], expected: &Position, secret: &Secret) -> Result<Record<'a>, Unsound> {
    let long = prove_long(Structure::Record, bytes, expected, secret)?;
    let prefix = Prefix::open(bytes, expected, secret)?;
    let damaged = |field: Field| Unsound::Damaged { what: Damage::Field(field.name) };
    let known = match prefix.digest_algorithm {
        DIGEST_NONE => prefix.digest_width == 0 && prefix.digest_count == 0,
        DIGEST_CRC32 => prefix.digest_width == CRC32_BYTES && prefix.digest_count != 0,
        _ => true,
    };
    if !known {
        return Err(damaged(DIGEST_WIDTH));
    }
    // 255 * u32::MAX fits in 64 bits.
    let table_bytes = u64::from(prefix.digest_count).saturating_mul(u64::from(prefix.digest_width));
    let table_bytes = usize::try_from(table_bytes).map_err(|_| damaged(DIGEST_COUNT))?;
    let (digests, padding) = long.table.split_at_checked(table_bytes).ok_or(damaged(DIGEST_COUNT))?;
    // The header is no longer than it must be: there is one encoding.
    if padding.len() >= super::PAGE {
        return Err(damaged(super::seal::TOTAL_BYTES));
    }
    require_zero(padding)?;
    Ok(Record { prefix, body: long.body, digests })
}

impl<'a> Record<'a> {
    /// The body, validated and checked against the digest table and the payload.
    pub fn body(&self) -> Result<Body, Unsound> {
        let body = match self.prefix.kind {
            Kind::Blocks => Body::Blocks(from_archive(self.body)?),
            Kind::Identity => Body::Identity(from_archive(self.body)?),
            Kind::Spec => Body::Spec(from_archive(self.body)?),
            Kind::Tombstones => Body::Tombstones(from_archive(self.body)?),
            Kind::Epoch => Body::Epoch(from_archive(self.body)?),
            Kind::Unknown(code) => return Ok(Body::Unknown(code)),
        };
        body.check(self.prefix.digest_count, self.prefix.payload_bytes)
            .map_err(|name| Unsound::Damaged { what: Damage::Field(name) })?;
        Ok(body)
    }

    /// The CRC-32 of the chunk with this number in canonical order, or `None` past the table or where the
    /// algorithm is another.
    pub fn digest(&self, chunk: usize) -> Option<u32> {
        if self.prefix.digest_algorithm != DIGEST_CRC32 {
            return None;
        }
        self.digests.as_chunks::<4>().0.get(chunk).copied().map(u32::from_le_bytes)
    }

    /// All CRC-32 digests in canonical order; nothing where the algorithm is another.
    pub fn digests(&self) -> impl Iterator<Item = u32> + 'a {
        let known = self.prefix.digest_algorithm == DIGEST_CRC32;
        let table = if known { self.digests } else { &[] };
        table.as_chunks::<4>().0.iter().copied().map(u32::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::body::{ENCODING_ZSTD_PLANES, Extension};
    use super::super::{VERSION, samples};
    use super::*;

    #[test]
    fn every_kind_survives_its_encoding() {
        for (body, digests, payload_bytes) in samples::bodies() {
            let fields = Fields { payload_bytes, ..samples::fields() };
            let position = samples::position(8192);
            let image = encode(&position, &samples::secret(), &fields, &body, &digests).unwrap();
            let record = open(&image, &position, &samples::secret()).unwrap();
            assert_eq!(record.body(), Ok(body));
            assert_eq!(record.digests().collect::<Vec<_>>(), digests);
            assert_eq!(record.digest(digests.len()), None);
            let prefix = Prefix::open(&image[..LONG_PREFIX], &position, &samples::secret()).unwrap();
            assert_eq!(prefix, record.prefix);
            assert_eq!(prefix.record_bytes(), 4096 + payload_bytes.next_multiple_of(4096));
        }
    }

    #[test]
    fn a_record_elsewhere_is_misdirected_and_says_where_it_belongs() {
        let (position, image) = samples::record();
        let other = Position { shard: position.shard + 1, ..position };
        for elsewhere in [position.at(4096), other, Position { segment: 0, ..position }] {
            let found = Prefix::open(&image, &elsewhere, &samples::secret());
            assert_eq!(found, Err(Unsound::Misdirected { claimed: position }));
        }
    }

    #[test]
    fn a_record_of_another_generation_is_stale_or_ahead() {
        let (position, image) = samples::record();
        let generation = position.generation;
        let under = |other| Prefix::open(&image, &position.under(other), &samples::secret());
        assert_eq!(under(generation + 1), Err(Unsound::Stale { generation }));
        assert_eq!(under(generation - 1), Err(Unsound::Ahead { generation }));
    }

    #[test]
    fn a_record_of_another_store_is_foreign() {
        let (position, image) = samples::record();
        let other = Position { store: crate::StoreId([1; 16]), ..position };
        let found = Prefix::open(&image, &other, &Secret::new([1; 32]));
        assert_eq!(found, Err(Unsound::Foreign { store: position.store }));
    }

    #[test]
    fn a_look_alike_under_another_secret_is_not_accepted() {
        let (position, _) = samples::record();
        let (body, digests, payload_bytes) = samples::bodies().remove(0);
        let fields = Fields { payload_bytes, ..samples::fields() };
        let image = encode(&position, &Secret::new([7; 32]), &fields, &body, &digests).unwrap();
        let found = Prefix::open(&image, &position, &samples::secret());
        assert_eq!(found, Err(Unsound::Damaged { what: Damage::Tag }));
    }

    #[test]
    fn a_header_whose_rest_is_missing_or_different_is_torn() {
        let (position, image) = samples::record();
        let open = |image: &[u8]| open(image, &position, &samples::secret()).map(|_| ());
        assert_eq!(open(&image[..2048]), Err(Unsound::Torn));
        let mut old_sector = image.clone();
        old_sector[512..1024].fill(0xaa);
        assert_eq!(open(&old_sector), Err(Unsound::Torn));
        let mut first_missing = image.clone();
        first_missing[..512].fill(0);
        first_missing[700] = 1;
        assert_eq!(open(&first_missing), Err(Unsound::Torn));
        assert_eq!(open(&[0; 4096]), Err(Unsound::Empty));
    }

    #[test]
    fn a_record_of_a_newer_version_can_be_skipped_but_not_read() {
        let (position, mut image) = samples::record();
        super::super::seal::FORMAT_VERSION.put(&mut image, (VERSION + 1).to_le_bytes());
        super::super::seal::reseal(Structure::Record, &mut image, &position, &samples::secret());
        let found = open(&image, &position, &samples::secret()).map(|_| ());
        assert_eq!(found, Err(Unsound::Newer { version: VERSION + 1 }));
        let prefix = Prefix::open(&image, &position, &samples::secret()).unwrap();
        assert_eq!(prefix.record_bytes(), 8192);
    }

    #[test]
    fn a_record_of_an_unknown_kind_can_be_skipped() {
        let (position, mut image) = samples::record();
        KIND.put(&mut image, 999u16.to_le_bytes());
        super::super::seal::reseal(Structure::Record, &mut image, &position, &samples::secret());
        let record = open(&image, &position, &samples::secret()).unwrap();
        assert_eq!(record.body(), Ok(Body::Unknown(999)));
        assert_eq!(record.prefix.record_bytes(), 8192);
    }

    #[test]
    fn only_an_unknown_critical_extension_makes_a_record_unreadable() {
        let mut blocks = samples::blocks();
        assert_eq!(blocks.unknown_critical(), None);
        blocks.extensions.push(Extension { id: 900, critical: false, bytes: vec![] });
        assert_eq!(blocks.unknown_critical(), None);
        blocks.extensions.push(Extension { id: 901, critical: true, bytes: vec![] });
        assert_eq!(blocks.unknown_critical(), Some(901));
    }

    #[test]
    fn what_would_not_decode_is_not_encoded() {
        let good = samples::blocks();
        let encode = |blocks: &Blocks, digests: &[u32], fields: Fields| {
            encode(
                &samples::position(4096),
                &samples::secret(),
                &fields,
                &Body::Blocks(blocks.clone()),
                digests,
            )
        };
        let fields = Fields { payload_bytes: 100, ..samples::fields() };
        assert!(encode(&good, &[1, 2, 3, 4], fields).is_ok());
        let reject = |blocks: &Blocks, digests: &[u32], fields: Fields, name: &'static str| {
            assert_eq!(encode(blocks, digests, fields), Err(EncodeError::Field(name)));
        };
        reject(&good, &[1, 2, 3], fields, "digest_count");
        reject(&good, &[], fields, "digest_count");
        reject(&good, &[1, 2], Fields { payload_bytes: 0, ..fields }, "payload_bytes");
        reject(&good, &[1, 2], Fields { payload_bytes: MAX_SEGMENT_BYTES + 1, ..fields }, "payload_bytes");
        reject(&good, &[1, 2], Fields { durable_upto: 4097, ..fields }, "durable_upto");
        reject(&Blocks { blocks: vec![], ..good.clone() }, &[1], fields, "blocks");
        reject(&Blocks { coordinate: 5, ..good.clone() }, &[1, 2], fields, "coordinate");
        reject(&Blocks { stored_lengths: vec![1, 2], ..good.clone() }, &[1, 2], fields, "stored_lengths");
        let encoded = Blocks { encoding: ENCODING_ZSTD_PLANES, stored_lengths: vec![60, 41], ..good.clone() };
        reject(&encoded, &[1, 2], fields, "stored_lengths");
        for (stored_lengths, fits) in [(vec![60, 40], true), (vec![60, 39], false), (vec![100, 0], false)] {
            let encoded = Blocks { stored_lengths: stored_lengths.clone(), ..encoded.clone() };
            assert_eq!(encode(&encoded, &[1, 2], fields).is_ok(), fits, "{stored_lengths:?}");
            // What else a later encoding stores is not known.
            let later = Blocks { encoding: 77, ..encoded };
            assert!(encode(&later, &[1, 2], fields).is_ok(), "{stored_lengths:?}");
        }
        let mut twice = good.clone();
        twice.extensions.push(twice.extensions[0].clone());
        reject(&twice, &[1, 2], fields, "extensions");
    }

    #[test]
    fn a_header_that_breaks_a_rule_behind_a_valid_tag_is_refused() {
        let (position, image) = samples::record();
        let found = |image: &[u8]| {
            let record = open(image, &position, &samples::secret())?;
            record.body()
        };
        let damaged = |field: Field| Err(Unsound::Damaged { what: Damage::Field(field.name) });
        let u32_field = |field, value: u32| {
            found(&samples::altered(Structure::Record, &image, field, value.to_le_bytes()))
        };
        let u64_field = |field, value: u64| {
            found(&samples::altered(Structure::Record, &image, field, value.to_le_bytes()))
        };
        assert_eq!(u32_field(super::super::seal::TOTAL_BYTES, 0), damaged(super::super::seal::TOTAL_BYTES));
        assert_eq!(u32_field(super::super::seal::TOTAL_BYTES, 100), damaged(super::super::seal::TOTAL_BYTES));
        assert_eq!(u32_field(BODY_BYTES, 5000), damaged(BODY_BYTES));
        assert_eq!(u32_field(DIGEST_COUNT, u32::MAX), damaged(DIGEST_COUNT));
        assert_eq!(u64_field(PAYLOAD_BYTES, u64::MAX), damaged(PAYLOAD_BYTES));
        assert_eq!(u64_field(DURABLE_UPTO, 8193), damaged(DURABLE_UPTO));
        let wide = samples::altered(Structure::Record, &image, DIGEST_WIDTH, [8]);
        assert_eq!(found(&wide), damaged(DIGEST_WIDTH));
        let reserved = samples::altered(Structure::Record, &image, RESERVED, [1, 0]);
        assert_eq!(found(&reserved), Err(Unsound::Damaged { what: Damage::Padding }));
        let other = samples::altered(Structure::Record, &image, DIGEST_ALGORITHM, [9]);
        let record = open(&other, &position, &samples::secret()).unwrap();
        assert_eq!((record.digest(0), record.digests().count()), (None, 0));
        let mut longer = image.clone();
        longer.resize(8192, 0);
        let total = 8192u32.to_le_bytes();
        let longer = samples::altered(Structure::Record, &longer, super::super::seal::TOTAL_BYTES, total);
        assert_eq!(found(&longer), damaged(super::super::seal::TOTAL_BYTES));
    }
}
