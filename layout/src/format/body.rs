//! The versioned bodies of records: rkyv archives of fixed-width integers, byte arrays and lists.
//!
//! Invariants:
//! - A body's bytes are looked at only after the tag over them has been verified.
//! - What `check` refuses is neither written nor accepted: every count is bounded before it is used.
//! - Fields and their order are the format: a change is a new version with structs of its own.

use rkyv::api::high::{HighDeserializer, HighSerializer, HighValidator};
use rkyv::bytecheck::CheckBytes;
use rkyv::rancor::Failure;
use rkyv::ser::allocator::ArenaHandle;
use rkyv::util::AlignedVec;
use rkyv::{Archive, Deserialize, Portable, Serialize};

use super::unsound::{Damage, EncodeError, Unsound};
use crate::coord::Coordinate;
use crate::shape::{Layout, MAX_CHUNKS, MAX_RUN_BLOCKS};

/// The most extensions one record may have.
pub const MAX_EXTENSIONS: usize = 64;
/// The most bytes one extension may have.
pub const MAX_EXTENSION_BYTES: usize = 4096;
/// The most bytes the canonical encoding of an identity or a spec may have.
pub const MAX_DEFINITION_BYTES: usize = 1 << 20;
/// The most tombstones one record may have.
pub const MAX_TOMBSTONES: usize = 1 << 16;

/// Payload chunks lie as they are.
pub const ENCODING_RAW: u8 = 0;
/// Each chunk is compressed on its own by zstd over byte planes; one whose stored length equals its own length
/// is stored as it is.
pub const ENCODING_ZSTD_PLANES: u8 = 1;
/// The same over the bytes as they are.
pub const ENCODING_ZSTD: u8 = 2;

/// Extension: encryption of the payload (key id, then the authentication tag). Critical.
pub const EXTENSION_ENCRYPTION: u16 = 1;
/// Extension: the session or group that the record was made in.
pub const EXTENSION_SESSION: u16 = 2;
/// Extension: metadata of the user, opaque to the store.
pub const EXTENSION_USER: u16 = 3;
/// Extensions that this version understands or may ignore safely.
pub const KNOWN_EXTENSIONS: [u16; 3] = [EXTENSION_ENCRYPTION, EXTENSION_SESSION, EXTENSION_USER];

/// The byte that names a layout on disk.
pub const fn layout_code(layout: Layout) -> u8 {
    match layout {
        Layout::FullBlock => 0,
        Layout::LayerBlock => 1,
    }
}

/// The layout that a byte names, or `None` if a later version of the format gave it a meaning.
pub const fn layout_from_code(code: u8) -> Option<Layout> {
    match code {
        0 => Some(Layout::FullBlock),
        1 => Some(Layout::LayerBlock),
        _ => None,
    }
}

/// What comes before a record's first block in its prefix.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
#[rkyv(derive(Debug))]
pub enum Parent {
    /// Nothing: the first block begins the prefix.
    Root,
    /// The block with this key.
    Key([u8; 32]),
    /// The producer did not say.
    Unknown,
}

impl Parent {
    /// What comes before a part of a run that has this parent, if this block of the run stands before the part.
    #[must_use]
    pub fn behind(self, before: Option<&BlockName>) -> Self {
        match (self, before) {
            (Self::Unknown, _) => Self::Unknown,
            (_, Some(before)) => Self::Key(before.key),
            (parent, None) => parent,
        }
    }
}

/// One block of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
#[rkyv(derive(Debug))]
pub struct BlockName {
    /// The block's key.
    pub key: [u8; 32],
    /// Which production of its bytes this is: bytes of two origins are never mixed.
    pub origin: [u8; 16],
}

/// A field that only some records have.
#[derive(Clone, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
#[rkyv(derive(Debug))]
pub struct Extension {
    /// What it is: see the constants of this module.
    pub id: u16,
    /// Whether a reader that does not know the id must leave the record alone.
    pub critical: bool,
    /// Its content.
    pub bytes: Vec<u8>,
}

/// Body of a record of blocks: a run of consecutive blocks of one prefix, group and coordinate.
#[derive(Clone, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
#[rkyv(derive(Debug))]
pub struct Blocks {
    /// [`Coordinate::to_u64`].
    pub coordinate: u64,
    /// When the record was first made, in milliseconds since 1970. Compaction keeps it.
    pub created_ms: u64,
    /// When it expires, in milliseconds since 1970; zero for never.
    pub expires_ms: u64,
    /// Local id of the namespace: an identity record earlier in the same segment defines it.
    pub namespace: u32,
    /// Local id of the spec: a spec record earlier in the same segment defines it.
    pub spec: u32,
    /// The engine's KV cache group.
    pub group: u32,
    /// The blocks, in prefix order; never empty.
    pub blocks: Vec<BlockName>,
    /// Stored length of each chunk in the order of the digest table if the payload is encoded, else empty.
    pub stored_lengths: Vec<u32>,
    /// Ascending by id, none twice.
    pub extensions: Vec<Extension>,
    /// How many blocks of the prefix come before the first one, where that is known.
    pub first_block: Option<u32>,
    /// Version of the layout's offset computation.
    pub layout_version: u16,
    /// [`layout_code`].
    pub layout: u8,
    /// [`ENCODING_RAW`], [`ENCODING_ZSTD_PLANES`] or [`ENCODING_ZSTD`].
    pub encoding: u8,
    /// What comes before the first block.
    pub parent: Parent,
}

/// Body of an identity or spec record: gives a local id its meaning from here to the end of the segment.
#[derive(Clone, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
#[rkyv(derive(Debug))]
pub struct Definition {
    /// The short id that later records of this segment use.
    pub local: u32,
    /// The namespace id, or the spec's id.
    pub id: [u8; 32],
    /// The canonical encoding of the identity or spec, opaque here.
    pub canonical: Vec<u8>,
}

/// One delete.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
#[rkyv(derive(Debug))]
pub struct Tombstone {
    /// Every record of this block with a lower sequence is dead.
    pub below: u64,
    /// The coordinate, or all of them.
    pub coordinate: Option<u64>,
    /// Local id of the namespace.
    pub namespace: u32,
    /// The group, or all of them.
    pub group: Option<u32>,
    /// The block's key.
    pub key: [u8; 32],
}

/// Body of a tombstone record.
#[derive(Clone, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
#[rkyv(derive(Debug))]
pub struct Tombstones {
    /// The deletes; never empty.
    pub entries: Vec<Tombstone>,
}

/// Body of a namespace epoch: the delete of everything in a namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
#[rkyv(derive(Debug))]
pub struct Epoch {
    /// Every record of the namespace with a lower sequence is dead.
    pub below: u64,
    /// The namespace's full id: the epoch must hold where no identity record is left.
    pub namespace: [u8; 32],
}

// The sizes on disk: a dependency that flips one of rkyv's format features breaks the build here.
const _: () = assert!(size_of::<rkyv::Archived<BlockName>>() == 48);
const _: () = assert!(size_of::<rkyv::Archived<Extension>>() == 12);
const _: () = assert!(size_of::<rkyv::Archived<Parent>>() == 33);
const _: () = assert!(size_of::<rkyv::Archived<Blocks>>() == 112);
const _: () = assert!(size_of::<rkyv::Archived<Definition>>() == 44);
const _: () = assert!(size_of::<rkyv::Archived<Tombstone>>() == 72);
const _: () = assert!(size_of::<rkyv::Archived<Tombstones>>() == 8);
const _: () = assert!(size_of::<rkyv::Archived<Epoch>>() == 40);

/// Whether a list of `T` in memory takes at most three times what it takes on disk: with one aligned copy of the
/// body that makes [`super::ALLOCATION_FACTOR`].
pub(super) const fn is_frugal<T: Archive>() -> bool {
    size_of::<T>() <= size_of::<T::Archived>().saturating_mul(super::ALLOCATION_FACTOR.saturating_sub(1))
}

const _: () = assert!(is_frugal::<BlockName>() && is_frugal::<Extension>() && is_frugal::<Tombstone>());
const _: () = assert!(is_frugal::<u32>() && is_frugal::<u8>());

impl Extension {
    /// Whether a reader of this version may use a record that carries this extension.
    pub fn is_readable(&self) -> bool {
        !self.critical || KNOWN_EXTENSIONS.contains(&self.id)
    }
}

impl Blocks {
    /// Whether every limit holds: the name of the field that breaks one otherwise.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        let extensions = self.extensions.is_sorted_by(|a, b| a.id < b.id)
            && self.extensions.iter().all(|extension| extension.bytes.len() <= MAX_EXTENSION_BYTES);
        let blocks = 1..=usize::try_from(MAX_RUN_BLOCKS).unwrap_or(usize::MAX);
        first_failure(&[
            (blocks.contains(&self.blocks.len()), "blocks"),
            (Coordinate::from_u64(self.coordinate).is_some(), "coordinate"),
            (self.extensions.len() <= MAX_EXTENSIONS && extensions, "extensions"),
        ])
    }

    /// Whether the body agrees with the digest table and the payload of its record.
    pub(super) fn check_tables(&self, digest_count: u32, payload_bytes: u64) -> Result<(), &'static str> {
        let digests = usize::try_from(digest_count).unwrap_or(usize::MAX);
        let chunks = digests.checked_div(self.blocks.len()).unwrap_or(0);
        let whole = digests.is_multiple_of(self.blocks.len().max(1));
        let stored =
            self.stored_lengths.iter().fold(0u64, |sum, bytes| sum.saturating_add(u64::from(*bytes)));
        let lengths = if self.encoding == ENCODING_RAW { 0 } else { digests };
        // What a later encoding keeps beside its chunks is not known here.
        let known = matches!(self.encoding, ENCODING_ZSTD_PLANES | ENCODING_ZSTD);
        let fills = if known {
            stored == payload_bytes && !self.stored_lengths.contains(&0)
        } else {
            stored <= payload_bytes
        };
        first_failure(&[
            (whole && (1..=MAX_CHUNKS).contains(&chunks), "digest_count"),
            (payload_bytes > 0, "payload_bytes"),
            (self.stored_lengths.len() == lengths && fills, "stored_lengths"),
        ])
    }

    /// The first critical extension that this version does not know: the record must be skipped, not read.
    pub fn unknown_critical(&self) -> Option<u16> {
        self.extensions.iter().find(|extension| !extension.is_readable()).map(|extension| extension.id)
    }
}

impl Definition {
    pub(super) fn check(&self) -> Result<(), &'static str> {
        first_failure(&[(self.canonical.len() <= MAX_DEFINITION_BYTES, "canonical")])
    }
}

impl Tombstone {
    /// Whether the coordinate, where one is named, is one.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        let coordinate = self.coordinate.is_none_or(|raw| Coordinate::from_u64(raw).is_some());
        first_failure(&[(coordinate, "coordinate")])
    }
}

impl Tombstones {
    pub(super) fn check(&self) -> Result<(), &'static str> {
        first_failure(&[((1..=MAX_TOMBSTONES).contains(&self.entries.len()), "entries")])?;
        self.entries.iter().try_for_each(Tombstone::check)
    }
}

/// The field of the first pair that does not hold.
pub(super) fn first_failure(limits: &[(bool, &'static str)]) -> Result<(), &'static str> {
    limits.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, name)| Err(*name))
}

/// Archives a body that has passed its `check`.
pub(super) fn to_archive<T>(value: &T) -> Result<AlignedVec, EncodeError>
where
    T: for<'a> Serialize<HighSerializer<AlignedVec, ArenaHandle<'a>, Failure>>,
{
    rkyv::to_bytes::<Failure>(value).map_err(|_| EncodeError::TooLarge)
}

/// What every archive may be read at.
const ALIGNMENT: usize = 16;

/// Validates and copies out an archive whose tag has been verified.
pub(super) fn from_archive<T>(bytes: &[u8]) -> Result<T, Unsound>
where
    T: Archive,
    T::Archived:
        Portable + for<'a> CheckBytes<HighValidator<'a, Failure>> + Deserialize<T, HighDeserializer<Failure>>,
{
    let damaged = |_: Failure| Unsound::Damaged { what: Damage::Body };
    let mut aligned = AlignedVec::<ALIGNMENT>::new();
    let bytes = if bytes.as_ptr().addr().is_multiple_of(ALIGNMENT) {
        bytes
    } else {
        aligned.extend_from_slice(bytes);
        &aligned
    };
    let archived = rkyv::access::<T::Archived, Failure>(bytes).map_err(damaged)?;
    rkyv::deserialize::<T, Failure>(archived).map_err(damaged)
}
