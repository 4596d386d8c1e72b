//! What proves a byte: the preamble that every structure begins with, and the keyed tag that binds it to its
//! position.
//!
//! Invariants:
//! - Every structure begins with the same 72 bytes (magic, version, kind, crc, tag, claimed position). Their
//!   places and meaning, and the way crc and tag are computed, are the same in every version of the format.
//! - `tag` = the first 16 bytes of BLAKE3, keyed by the store's secret, over `domain (24 bytes) | position (40
//!   bytes) | fixed part with the tag zeroed`. The crc alone proves nothing: it only tells a damaged structure from a
//!   sound one that belongs to another store or another position.
//! - A structure longer than its fixed part (record, footer index, checkpoint chunk) carries in that fixed part
//!   a second tag over the rest. So 128 bytes are enough to prove lengths and position before anything that the
//!   lengths describe is read: a client that plants look-alikes in its payload cannot make a scan hash megabytes
//!   for each page, and a record whose rest is missing is known to be torn.

use std::fmt;

use super::field::Field;
use super::position::Position;
use super::unsound::{Damage, EncodeError, Unsound};
use super::{MAX_CHUNK_IMAGE_BYTES, MAX_FOOTER_BYTES, MAX_HEADER_BYTES, OLDEST, PAGE, SECTOR, VERSION};
use crate::ids::StoreId;

/// The key of every tag of one store. It never leaves the store: its holder can forge records.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A secret from random bytes, or from a superblock.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    pub(super) const fn expose(&self) -> [u8; 32] {
        self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Names the structure: a reader that looks for one never takes another.
pub const MAGIC: Field = Field::first("magic", 8);
/// Version of the format that wrote this structure: an old reader refuses politely.
pub const FORMAT_VERSION: Field = MAGIC.then("version", 2);
/// What kind of record or chunk; zero elsewhere.
pub const KIND: Field = FORMAT_VERSION.then("kind", 2);
/// CRC-32 of the fixed part: tells damage from a sound structure of another store, whose tag cannot be checked.
pub const CRC: Field = KIND.then("crc", 4);
/// Keyed tag of the fixed part and the position: forgeries, misdirected and stale writes.
pub const TAG: Field = CRC.then("tag", 16);
/// Claimed store: a segment file copied from another store.
pub const STORE: Field = TAG.then("store", 16);
/// Claimed shard: a file in the wrong folder.
pub const SHARD: Field = STORE.then("shard", 4);
/// Claimed segment: a file under the wrong name.
pub const SEGMENT: Field = SHARD.then("segment", 4);
/// Claimed generation: what a recycled file held before.
pub const GENERATION: Field = SEGMENT.then("generation", 8);
/// Claimed offset: a write that landed elsewhere in the file.
pub const OFFSET: Field = GENERATION.then("offset", 8);

/// The 72 bytes that every structure begins with.
pub const PREAMBLE_FIELDS: &[Field] =
    &[MAGIC, FORMAT_VERSION, KIND, CRC, TAG, STORE, SHARD, SEGMENT, GENERATION, OFFSET];

/// Bytes of the whole structure, a multiple of 4096: how far to skip what cannot be read.
pub const TOTAL_BYTES: Field = OFFSET.then("total_bytes", 4);
/// Bytes of the rkyv body behind the fixed part: an archive is read from its end.
pub const BODY_BYTES: Field = TOTAL_BYTES.then("body_bytes", 4);
/// Keyed tag of everything behind the fixed part: a torn write is known from a sound one.
pub const REST_TAG: Field = BODY_BYTES.then("rest_tag", 16);

/// What a structure with a body has behind the preamble.
pub const LONG_FIELDS: &[Field] = &[TOTAL_BYTES, BODY_BYTES, REST_TAG];

/// Bytes of the fixed part of a structure that has a body.
pub const LONG_PREFIX: usize = 128;

const _: () = assert!(OFFSET.end() == 72);
const _: () = assert!(REST_TAG.end() == 96);

/// What can stand on disk with a preamble.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Structure {
    /// One slot of the superblock.
    Superblock,
    /// The first page of a segment.
    SegmentHeader,
    /// A record's header.
    Record,
    /// The index of a sealed segment.
    Footer,
    /// The last page of a sealed segment.
    Trailer,
    /// The first page of an index checkpoint.
    CheckpointHeader,
    /// One chunk of an index checkpoint.
    CheckpointChunk,
}

impl Structure {
    /// Every structure.
    pub const ALL: [Self; 7] = [
        Self::Superblock,
        Self::SegmentHeader,
        Self::Record,
        Self::Footer,
        Self::Trailer,
        Self::CheckpointHeader,
        Self::CheckpointChunk,
    ];

    /// Its first eight bytes on disk.
    pub const fn magic(self) -> [u8; 8] {
        *match self {
            Self::Superblock => b"KvartsSB",
            Self::SegmentHeader => b"KvartsSH",
            Self::Record => b"KvartsRC",
            Self::Footer => b"KvartsFI",
            Self::Trailer => b"KvartsTR",
            Self::CheckpointHeader => b"KvartsCH",
            Self::CheckpointChunk => b"KvartsCC",
        }
    }

    /// The domain string of the tag over the fixed part, padded with zeros to 24 bytes.
    pub const fn domain(self) -> &'static [u8; 24] {
        match self {
            Self::Superblock => b"kvarts superblock\0\0\0\0\0\0\0",
            Self::SegmentHeader => b"kvarts segment header\0\0\0",
            Self::Record => b"kvarts record\0\0\0\0\0\0\0\0\0\0\0",
            Self::Footer => b"kvarts footer\0\0\0\0\0\0\0\0\0\0\0",
            Self::Trailer => b"kvarts trailer\0\0\0\0\0\0\0\0\0\0",
            Self::CheckpointHeader => b"kvarts checkpoint header",
            Self::CheckpointChunk => b"kvarts checkpoint chunk\0",
        }
    }

    /// The domain string of the tag over what follows the fixed part, where anything does.
    pub const fn rest_domain(self) -> Option<&'static [u8; 24]> {
        match self {
            Self::Record => Some(b"kvarts record rest\0\0\0\0\0\0"),
            Self::Footer => Some(b"kvarts footer rest\0\0\0\0\0\0"),
            Self::CheckpointChunk => Some(b"kvarts chunk rest\0\0\0\0\0\0\0"),
            Self::Superblock | Self::SegmentHeader | Self::Trailer | Self::CheckpointHeader => None,
        }
    }

    /// Bytes of the fixed part: a whole page, or the prefix of a longer structure.
    pub const fn fixed_bytes(self) -> usize {
        if self.rest_domain().is_some() { LONG_PREFIX } else { PAGE }
    }

    /// The most bytes the whole structure may have.
    pub const fn max_bytes(self) -> usize {
        match self {
            Self::Record => MAX_HEADER_BYTES,
            Self::Footer => MAX_FOOTER_BYTES,
            Self::CheckpointChunk => MAX_CHUNK_IMAGE_BYTES,
            Self::Superblock | Self::SegmentHeader | Self::Trailer | Self::CheckpointHeader => PAGE,
        }
    }
}

/// A structure that is being written: its fields go in, its sealed image comes out.
pub(super) struct Draft {
    structure: Structure,
    image: Vec<u8>,
}

impl Draft {
    /// A structure of one page.
    pub(super) fn page(structure: Structure) -> Self {
        Self { structure, image: vec![0; PAGE] }
    }

    /// A structure with a body at offset 128 and, at the next multiple of 16 behind it, a table.
    pub(super) fn long(structure: Structure, body: &[u8], table: &[u8]) -> Result<Self, EncodeError> {
        let too_large = EncodeError::TooLarge;
        let table_at = table_offset(body.len()).ok_or(too_large)?;
        let used = table_at.checked_add(table.len()).ok_or(too_large)?;
        let total = used.checked_next_multiple_of(PAGE).ok_or(too_large)?;
        if total > structure.max_bytes() {
            return Err(too_large);
        }
        let mut image = Vec::with_capacity(total);
        image.resize(LONG_PREFIX, 0);
        image.extend_from_slice(body);
        image.resize(table_at, 0);
        image.extend_from_slice(table);
        image.resize(total, 0);
        let mut draft = Self { structure, image };
        draft.put(TOTAL_BYTES, u32::try_from(total).map_err(|_| too_large)?.to_le_bytes());
        draft.put(BODY_BYTES, u32::try_from(body.len()).map_err(|_| too_large)?.to_le_bytes());
        Ok(draft)
    }

    pub(super) fn put<const N: usize>(&mut self, field: Field, value: [u8; N]) {
        field.put(&mut self.image, value);
    }

    /// Bytes of the image.
    pub(super) fn bytes(&self) -> usize {
        self.image.len()
    }

    pub(super) fn seal(mut self, position: &Position, secret: &Secret) -> Vec<u8> {
        FORMAT_VERSION.put(&mut self.image, VERSION.to_le_bytes());
        reseal(self.structure, &mut self.image, position, secret);
        self.image
    }
}

/// Where the table behind a body of `body_bytes` lies.
pub(super) fn table_offset(body_bytes: usize) -> Option<usize> {
    LONG_PREFIX.checked_add(body_bytes)?.checked_next_multiple_of(16)
}

/// Writes magic, position, crc and tags into an image whose other fields are in place.
pub(super) fn reseal(structure: Structure, image: &mut [u8], position: &Position, secret: &Secret) {
    MAGIC.put(image, structure.magic());
    STORE.put(image, position.store.0);
    SHARD.put(image, position.shard.to_le_bytes());
    SEGMENT.put(image, position.segment.to_le_bytes());
    GENERATION.put(image, position.generation.to_le_bytes());
    OFFSET.put(image, position.offset.to_le_bytes());
    if let (Some(domain), Some(rest)) = (structure.rest_domain(), image.get(LONG_PREFIX..)) {
        let tag = tag_of(domain, position, secret, &[rest]);
        REST_TAG.put(image, tag);
    }
    let fixed = structure.fixed_bytes();
    if let Some(crc) = image.get(..fixed).map(crc_of_fixed) {
        CRC.put(image, crc.to_le_bytes());
    }
    if let Some(tag) = image.get(..fixed).map(|fixed| tag_of_fixed(structure, fixed, position, secret)) {
        TAG.put(image, tag);
    }
}

/// The position that bytes claim, proven by nothing: a scan that has lost the segment header takes the
/// generation from here and then lets the tag decide.
pub fn claimed_position(bytes: &[u8]) -> Option<Position> {
    let read = || -> Result<Position, Unsound> {
        Ok(Position {
            store: StoreId(STORE.get(bytes)?),
            shard: SHARD.get_u32(bytes)?,
            segment: SEGMENT.get_u32(bytes)?,
            generation: GENERATION.get_u64(bytes)?,
            offset: OFFSET.get_u64(bytes)?,
        })
    };
    read().ok()
}

/// The structure that the first eight bytes name, proven by nothing.
pub fn claimed_structure(bytes: &[u8]) -> Option<Structure> {
    let magic = bytes.get(MAGIC.offset..MAGIC.end())?;
    Structure::ALL.into_iter().find(|structure| structure.magic() == magic)
}

/// Proves the fixed part and returns the version that wrote it. Needs the fixed part; a whole page lets it
/// tell an empty page from a damaged one.
pub(super) fn prove_fixed(
    structure: Structure,
    bytes: &[u8],
    expected: &Position,
    secret: &Secret,
) -> Result<u16, Unsound> {
    let damaged = |what| Unsound::Damaged { what };
    let page = bytes.get(..PAGE).unwrap_or(bytes);
    if page.is_empty() {
        return Err(damaged(Damage::Length));
    }
    if is_zero(page) {
        return Err(Unsound::Empty);
    }
    if page.get(..SECTOR).is_some_and(is_zero) {
        return Err(Unsound::Torn);
    }
    let fixed = bytes.get(..structure.fixed_bytes()).ok_or(damaged(Damage::Length))?;
    if MAGIC.get::<8>(fixed)? != structure.magic() {
        return Err(damaged(Damage::Magic));
    }
    if CRC.get_u32(fixed)? != crc_of_fixed(fixed) {
        return Err(damaged(Damage::Crc));
    }
    let claimed = claimed_position(fixed).ok_or(damaged(Damage::Length))?;
    if claimed.store != expected.store {
        return Err(Unsound::Foreign { store: claimed.store });
    }
    let proven = equal(TAG.get(fixed)?, tag_of_fixed(structure, fixed, &claimed, secret));
    let proven = proven || crate::planted!("tag-not-compared");
    let same_place =
        claimed.under(expected.generation) == *expected || crate::planted!("position-not-compared");
    match (proven, same_place, claimed.generation.cmp(&expected.generation)) {
        (_, true, std::cmp::Ordering::Less) => Err(Unsound::Stale { generation: claimed.generation }),
        (false, ..) => Err(damaged(Damage::Tag)),
        (true, true, std::cmp::Ordering::Greater) => Err(Unsound::Ahead { generation: claimed.generation }),
        (true, false, _) => Err(Unsound::Misdirected { claimed }),
        (true, true, std::cmp::Ordering::Equal) => FORMAT_VERSION.get_u16(fixed),
    }
}

/// Proves a structure of one page written by a version this reader knows.
pub(super) fn prove_page(
    structure: Structure,
    bytes: &[u8],
    expected: &Position,
    secret: &Secret,
) -> Result<(), Unsound> {
    let version = prove_fixed(structure, bytes, expected, secret)?;
    require_readable(version)
}

/// A proven structure with a body.
#[derive(Clone, Copy)]
pub(super) struct Long<'a> {
    /// The fixed part.
    pub(super) fixed: &'a [u8],
    /// The archived body, not yet validated.
    pub(super) body: &'a [u8],
    /// From the table behind the body to the end, padding included.
    pub(super) table: &'a [u8],
}

/// Bytes of the whole structure as its proven fixed part says, within the structure's limit.
pub(super) fn total_bytes(structure: Structure, fixed: &[u8]) -> Result<usize, Unsound> {
    let total = usize::try_from(TOTAL_BYTES.get_u32(fixed)?).unwrap_or(usize::MAX);
    if total == 0 || !total.is_multiple_of(PAGE) || total > structure.max_bytes() {
        return Err(Unsound::Damaged { what: Damage::Field("total_bytes") });
    }
    Ok(total)
}

/// Proves a structure with a body, whole. Bytes behind its end are not looked at.
pub(super) fn prove_long<'a>(
    structure: Structure,
    bytes: &'a [u8],
    expected: &Position,
    secret: &Secret,
) -> Result<Long<'a>, Unsound> {
    let version = prove_fixed(structure, bytes, expected, secret)?;
    require_readable(version)?;
    let total = total_bytes(structure, bytes)?;
    let image = bytes.get(..total).ok_or(Unsound::Torn)?;
    let (fixed, rest) = image.split_at_checked(LONG_PREFIX).ok_or(Unsound::Torn)?;
    let domain = structure.rest_domain().ok_or(Unsound::Torn)?;
    let position =
        claimed_position(fixed).filter(|_| crate::planted!("position-not-compared")).unwrap_or(*expected);
    let whole = equal(REST_TAG.get(fixed)?, tag_of(domain, &position, secret, &[rest]));
    if !whole && !crate::planted!("tag-not-compared") {
        return Err(Unsound::Torn);
    }
    let field = Unsound::Damaged { what: Damage::Field("body_bytes") };
    let body_bytes = usize::try_from(BODY_BYTES.get_u32(fixed)?).map_err(|_| field)?;
    let body = rest.get(..body_bytes).ok_or(field)?;
    let table_at = table_offset(body_bytes).ok_or(field)?;
    let gap = image.get(LONG_PREFIX.saturating_add(body_bytes)..table_at).ok_or(field)?;
    let table = image.get(table_at..).ok_or(field)?;
    require_zero(gap)?;
    Ok(Long { fixed, body, table })
}

/// Whether this reader reads structures of a version.
pub(super) fn require_readable(version: u16) -> Result<(), Unsound> {
    if version > VERSION {
        return Err(Unsound::Newer { version });
    }
    if version < OLDEST { Err(Unsound::Older { version }) } else { Ok(()) }
}

/// Padding and reserved bytes are zero, unless they were overwritten.
pub(super) fn require_zero(bytes: &[u8]) -> Result<(), Unsound> {
    if is_zero(bytes) { Ok(()) } else { Err(Unsound::Damaged { what: Damage::Padding }) }
}

/// The kind is used by records and chunks only.
pub(super) fn require_kind_zero(fixed: &[u8]) -> Result<(), Unsound> {
    require_zero(&KIND.get::<2>(fixed)?)
}

/// Whether every byte is zero, as padding must be.
pub fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

fn crc_of_fixed(fixed: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(fixed.get(..CRC.offset).unwrap_or_default());
    hasher.update(fixed.get(TAG.end()..).unwrap_or_default());
    hasher.finalize()
}

/// A position as the tag's domain has it: its fields in the order of the preamble.
fn bytes_of(position: &Position) -> [u8; 40] {
    let mut bytes = [0u8; 40];
    let start = STORE.offset;
    for (field, value) in [
        (STORE, position.store.0.as_slice()),
        (SHARD, &position.shard.to_le_bytes()),
        (SEGMENT, &position.segment.to_le_bytes()),
        (GENERATION, &position.generation.to_le_bytes()),
        (OFFSET, &position.offset.to_le_bytes()),
    ] {
        let place = bytes.iter_mut().skip(field.offset.saturating_sub(start));
        place.zip(value).for_each(|(place, value)| *place = *value);
    }
    bytes
}

fn tag_of_fixed(structure: Structure, fixed: &[u8], position: &Position, secret: &Secret) -> [u8; 16] {
    let before = fixed.get(..TAG.offset).unwrap_or_default();
    let after = fixed.get(TAG.end()..).unwrap_or_default();
    tag_of(structure.domain(), position, secret, &[before, &[0u8; 16], after])
}

fn tag_of(domain: &[u8; 24], position: &Position, secret: &Secret, content: &[&[u8]]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new_keyed(&secret.0);
    hasher.update(domain);
    hasher.update(&bytes_of(position));
    if crate::planted!("format-drifts") {
        hasher.update(b"x");
    }
    for part in content {
        hasher.update(part);
    }
    let [tag, _] = *hasher.finalize().as_bytes().as_chunks::<16>().0 else { return [0; 16] };
    tag
}

/// Compares in constant time: how far a forged tag matches must not show.
fn equal(found: [u8; 16], computed: [u8; 16]) -> bool {
    (u128::from_le_bytes(found) ^ u128::from_le_bytes(computed)) == 0
}
