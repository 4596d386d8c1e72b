//! What lies in a bucket: packs, their indexes, and a manifest for each namespace.
//!
//! docs/COLD.md is the normative description. Every decoder takes any bytes at all and answers with a value or an error; it
//! allocates no more than a small multiple of its input.

pub mod deletions;
pub mod index;
pub mod manifest;
pub mod names;
pub mod pack;
mod taker;

pub use deletions::{Delete, Deletions, Point};
pub use index::{IndexedRun, PackIndex, Place};
pub use manifest::{Manifest, PackEntry};
pub use pack::{Pack, PackBuilder};

use std::fmt;
use std::str::FromStr;

use kvarts_layout::BlockKey;
use kvarts_layout::export::{BadBlock, ExportError};

/// The most bytes of blocks in a pack of more than one block.
pub const PACK_PAYLOAD_MAX: u64 = 64 << 20;
/// The most bytes of a block that is a pack by itself. Larger ones are not kept.
pub const BLOCK_MAX: u64 = 1 << 30;
/// The most bytes of an index: every frame of its pack without the payload.
pub const INDEX_BYTES_MAX: usize = 32 << 20;
/// Hashed before a key for its fingerprint.
const FINGERPRINT_DOMAIN: [u8; 16] = *b"kvarts.coldkey.1";

/// The name of a pack: the chain value of its last frame, which covers every byte of it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackId(pub [u8; 32]);

impl fmt::Display for PackId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for PackId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackId({self})")
    }
}

impl FromStr for PackId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        hex(text).map(Self).ok_or(())
    }
}

/// Exactly 64 lower-case digits: names in a bucket have one spelling.
pub(crate) fn hex(text: &str) -> Option<[u8; 32]> {
    let digits = text.as_bytes();
    if digits.len() != 64 {
        return None;
    }
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let &[high, low] = pair else { return None };
        *byte = value(high)? << 4 | value(low)?;
    }
    Some(bytes)
}

/// What stands for a key in a manifest, beside its pack.
pub fn fingerprint(key: &BlockKey) -> u32 {
    // Its first four bytes.
    wide_fingerprint(key) as u32
}

/// What stands for a key that was deleted: so wide that no other key has the same.
pub fn wide_fingerprint(key: &BlockKey) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&FINGERPRINT_DOMAIN).update(&key.0);
    let [a, b, c, d, e, f, g, h, ..] = *hasher.finalize().as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// Why bytes are not what their name says, or a value cannot be written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FormatError {
    /// A newer program wrote it.
    Newer(u16),
    /// The bytes end too early, go on too long, or are not what was written.
    Damaged,
    /// They are whole and break a rule of the format.
    Rule(&'static str),
    /// A frame of a pack or an index.
    Frame(ExportError),
    /// A block of a pack.
    Block(BadBlock),
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Newer(version) => {
                write!(f, "the object has format version {version}: use a newer kvarts")
            }
            Self::Damaged => f.write_str("the object is damaged: its bytes do not match their digest"),
            Self::Rule(rule) => write!(f, "the object violates a rule of the format ({rule})"),
            Self::Frame(error) => write!(f, "a frame of the object is not valid: {error}"),
            Self::Block(bad) => write!(f, "{bad}"),
        }
    }
}

impl std::error::Error for FormatError {}

impl From<ExportError> for FormatError {
    fn from(error: ExportError) -> Self {
        match error {
            ExportError::Newer(version) => Self::Newer(version),
            ExportError::Damaged | ExportError::NotAnExport => Self::Damaged,
            error @ ExportError::Field(_) => Self::Frame(error),
        }
    }
}

/// For fuzzers: reads bytes as each of the three.
#[doc(hidden)]
pub fn fuzz_cold(data: &[u8]) {
    let _ = PackIndex::decode(data);
    let _ = pack::verify(data);
    // As it is, and with its hash made right.
    for bytes in [data.to_vec(), manifest::sealed(data.to_vec())] {
        let Ok(manifest) = Manifest::decode(&bytes) else { continue };
        let again = manifest.encode();
        debug_assert!(again.as_ref().is_ok_and(|again| Manifest::decode(again).as_ref() == Ok(&manifest)));
        // One of the version before is written as one of this.
        let is_new = bytes.get(8..10) == Some(&manifest::VERSION.to_le_bytes()[..]);
        debug_assert!(!is_new || again.is_ok_and(|again| again == bytes), "a manifest has two encodings");
    }
}

#[cfg(any(test, feature = "testing"))]
#[allow(dead_code, clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
pub(crate) mod samples;
#[cfg(test)]
mod tests;
