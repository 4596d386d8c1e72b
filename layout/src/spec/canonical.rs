//! The canonical encoding of a geometry, and the fingerprint over it.
//!
//! Every geometry has exactly one encoding and every accepted encoding is the one of its geometry, so that equal
//! fingerprints mean equal bytes on disk. All integers are little-endian:
//!
//! ```text
//! u8   version = 1
//! u16  number of parts, in the order in which layers first use them, no two equal
//!      each part:
//!        u8   bytes of the kind, then the kind
//!        u8   role: 1 stream, 2 page, 3 window, 4 state
//!        u64  bytes: of an entry, a page, a token of a window, a state
//!        u32  tokens: of an entry, 0 for a page, of a window, or `empty_at_multiple_of` of a state (0 for never)
//!        u16  heads, 0 for replicated
//!        u32  alignment
//!        u32  group
//! u16  number of layers, in execution order
//!      each layer:
//!        u8   number of parts
//!        u16  index of each part
//! ```
//!
//! Nothing follows the last layer. A decoded geometry takes at most 64 bytes of memory for each byte of input.

use std::fmt;
use std::num::NonZeroU32;

use crate::ids::{Fingerprint, Group};
use crate::shape::MAX_LAYERS;

use super::error::SpecError;
use super::geometry::{Geometry, PartGeometry, Role};
use super::kind::{Kind, MAX_KIND_BYTES};
use super::limits::{MAX_PARTS, MAX_PARTS_PER_LAYER};

/// The most bytes a canonical encoding may have: no geometry within its limits needs more.
pub const MAX_CANONICAL_BYTES: usize = 1 << 18;
/// Names what is hashed, so that no other hash of the same bytes is a fingerprint.
const FINGERPRINT_CONTEXT: &str = "kvarts model geometry fingerprint v1";
const VERSION: u8 = 1;

/// Why bytes are not the canonical encoding of a geometry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CanonicalError {
    /// More than [`MAX_CANONICAL_BYTES`].
    TooLarge,
    /// A version this program does not know; a newer one may.
    Version(u8),
    /// The bytes end within a field.
    Truncated,
    /// Bytes follow the last layer.
    Trailing,
    /// A kind that is not a valid name.
    Kind,
    /// A role with an unknown number, or a page with tokens.
    Role,
    /// A count past its limit.
    Count,
    /// The geometry is valid but is encoded differently.
    NotCanonical,
    /// The numbers are not a geometry.
    Spec(SpecError),
}

impl fmt::Display for CanonicalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge => write!(
                f,
                "the encoded geometry is longer than the limit of \
                {MAX_CANONICAL_BYTES} bytes"
            ),
            Self::Version(version) => write!(f, "version {version} of the geometry encoding is not known"),
            Self::Truncated => f.write_str("the encoded geometry ends within a field"),
            Self::Trailing => f.write_str("bytes follow the encoded geometry"),
            Self::Kind => f.write_str("a part's kind is not a valid name"),
            Self::Role => f.write_str("a part's role is not known"),
            Self::Count => f.write_str("the number of parts or of layers exceeds the limit"),
            Self::NotCanonical => f.write_str("the encoding of the geometry is not the canonical one"),
            Self::Spec(error) => write!(f, "the encoded numbers are not a valid geometry: {error}"),
        }
    }
}

impl std::error::Error for CanonicalError {}

impl Geometry {
    /// The one encoding of this geometry: what the store keeps, and what the fingerprint covers.
    pub fn canonical_bytes(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        put_u16(&mut out, self.parts().len());
        for part in self.parts() {
            let kind = part.kind.as_str().as_bytes();
            put_u8(&mut out, kind.len());
            out.extend_from_slice(kind);
            let (tag, bytes, tokens) = match part.role {
                Role::Stream { bytes, tokens } => (1, bytes, tokens),
                Role::Page { bytes } => (2, bytes, 0),
                Role::Window { bytes, tokens } => (3, bytes, tokens),
                Role::State { bytes, empty_at_multiple_of } => {
                    (4, bytes, empty_at_multiple_of.map_or(0, NonZeroU32::get))
                }
            };
            out.push(tag);
            out.extend_from_slice(&bytes.to_le_bytes());
            out.extend_from_slice(&tokens.to_le_bytes());
            out.extend_from_slice(&part.heads.to_le_bytes());
            out.extend_from_slice(&part.align.to_le_bytes());
            out.extend_from_slice(&part.group.0.to_le_bytes());
        }
        put_u16(&mut out, self.layers().len());
        for layer in self.layers() {
            put_u8(&mut out, layer.len());
            layer.iter().for_each(|part| out.extend_from_slice(&part.to_le_bytes()));
        }
        out
    }

    /// The geometry that [`Geometry::canonical_bytes`] encoded; any other bytes are refused.
    pub fn decode_canonical(bytes: &[u8]) -> Result<Self, CanonicalError> {
        if bytes.len() > MAX_CANONICAL_BYTES {
            return Err(CanonicalError::TooLarge);
        }
        let mut input = Input(bytes);
        let version = input.u8()?;
        if version != VERSION {
            return Err(CanonicalError::Version(version));
        }
        let part_count = input.u16()?;
        if usize::from(part_count) > MAX_PARTS {
            return Err(CanonicalError::Count);
        }
        let mut parts = Vec::new();
        for _ in 0..part_count {
            parts.push(input.part()?);
        }
        let layer_count = input.u16()?;
        if usize::from(layer_count) > MAX_LAYERS {
            return Err(CanonicalError::Count);
        }
        let mut layers = Vec::new();
        for _ in 0..layer_count {
            let part_count = input.u8()?;
            if usize::from(part_count) > MAX_PARTS_PER_LAYER {
                return Err(CanonicalError::Count);
            }
            layers.push((0..part_count).map(|_| input.u16()).collect::<Result<Vec<_>, _>>()?);
        }
        if !input.0.is_empty() {
            return Err(CanonicalError::Trailing);
        }
        let geometry = Self::new(&parts, &layers).map_err(CanonicalError::Spec)?;
        if geometry.parts() != parts || geometry.layers() != layers {
            return Err(CanonicalError::NotCanonical);
        }
        Ok(geometry)
    }

    /// BLAKE3, in key derivation mode with a context of its own, over the canonical encoding.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint(blake3::derive_key(FINGERPRINT_CONTEXT, &self.canonical_bytes()))
    }
}

// The counts below are within their types: a geometry checked them when it was built.

fn put_u8(out: &mut Vec<u8>, count: usize) {
    out.push(u8::try_from(count).unwrap_or(u8::MAX));
}

fn put_u16(out: &mut Vec<u8>, count: usize) {
    out.extend_from_slice(&u16::try_from(count).unwrap_or(u16::MAX).to_le_bytes());
}

/// What is left of the input.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], CanonicalError> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(CanonicalError::Truncated)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], CanonicalError> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(CanonicalError::Truncated)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u8(&mut self) -> Result<u8, CanonicalError> {
        self.array().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Result<u16, CanonicalError> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, CanonicalError> {
        self.array().map(u32::from_le_bytes)
    }

    fn part(&mut self) -> Result<PartGeometry, CanonicalError> {
        let kind_bytes = usize::from(self.u8()?);
        if kind_bytes > MAX_KIND_BYTES {
            return Err(CanonicalError::Kind);
        }
        let kind = std::str::from_utf8(self.take(kind_bytes)?).ok().and_then(Kind::new);
        let kind = kind.ok_or(CanonicalError::Kind)?;
        let tag = self.u8()?;
        let bytes = u64::from_le_bytes(self.array()?);
        let tokens = self.u32()?;
        let role = match (tag, tokens) {
            (1, tokens) => Role::Stream { bytes, tokens },
            (2, 0) => Role::Page { bytes },
            (3, tokens) => Role::Window { bytes, tokens },
            (4, tokens) => Role::State { bytes, empty_at_multiple_of: NonZeroU32::new(tokens) },
            _ => return Err(CanonicalError::Role),
        };
        Ok(PartGeometry { kind, role, heads: self.u16()?, align: self.u32()?, group: Group(self.u32()?) })
    }
}
