//! The on-disk format, version 1: what every byte of a store's files means and what proves it.
//!
//! docs/FORMAT.md is the normative description; each submodule here is one structure of it. Rules that hold for
//! all of them:
//! - A structure begins at a multiple of 4096 and fills whole pages; padding is zero and is checked.
//! - The fixed part is little-endian at fixed offsets; a versioned body, where there is one, is an rkyv archive
//!   that is looked at only after its tag has been verified. Nothing is accepted by its crc alone.
//! - Decoders take any bytes. They never panic, finish in time linear in their input, and allocate at most
//!   [`ALLOCATION_FACTOR`] times their input.
//! - An encoder refuses what its decoder would refuse.

pub mod body;
pub mod checkpoint;
pub mod field;
pub mod footer;
#[doc(hidden)]
pub mod fuzz;
pub mod marks;
pub mod members;
pub mod names;
mod position;
pub mod record;
pub mod recovery;
pub mod seal;
pub mod segment;
pub mod superblock;
pub mod trailer;
pub mod unsound;

#[cfg(test)]
mod document_tests;
#[cfg(test)]
mod golden_tests;
#[cfg(test)]
mod samples;

pub use field::Field;
pub use position::Position;
pub use seal::{Secret, Structure, is_zero};
pub use unsound::{Damage, EncodeError, Unsound};

/// The version of the format that this crate writes, and the newest that it reads. Frozen: what it means never changes.
pub const VERSION: u16 = 1;
/// The oldest version that it reads. What came before was never frozen, and is refused by name.
pub const OLDEST: u16 = 1;
/// Every structure starts at a multiple of this, and fills a multiple of it.
pub const PAGE: usize = 4096;
pub use crate::arrange::PAGE_BYTES;
const _: () = assert!(PAGE as u64 == PAGE_BYTES);
/// The most that a device is trusted to write whole. No field relies on more.
pub const SECTOR: usize = 512;
/// The smallest segment.
pub const MIN_SEGMENT_BYTES: u64 = 64 << 10;
/// The size of a segment unless its store was made with another.
pub const DEFAULT_SEGMENT_BYTES: u64 = 256 << 20;
/// The largest segment.
pub const MAX_SEGMENT_BYTES: u64 = 16 << 30;
/// The most bytes a record's header may have, digests included.
pub const MAX_HEADER_BYTES: usize = 16 << 20;
/// The most bytes a segment's footer index may have.
pub const MAX_FOOTER_BYTES: usize = 64 << 20;
/// The most bytes one chunk of an index checkpoint may have.
pub const MAX_CHUNK_IMAGE_BYTES: usize = 1 << 20;
/// A decoder allocates at most this many times its input. The worst case is a list of empty extensions: 12
/// archived bytes become 32, beside one aligned copy of the body.
pub const ALLOCATION_FACTOR: usize = 4;

const _: () = assert!(PAGE as u64 == PAGE_BYTES);

/// The next multiple of a page, or `None` past the largest offset.
pub const fn page_align(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(PAGE_BYTES)
}

/// Whether a segment may have this size.
pub const fn is_segment_size(bytes: u64) -> bool {
    bytes >= MIN_SEGMENT_BYTES && bytes <= MAX_SEGMENT_BYTES && bytes.is_multiple_of(PAGE_BYTES)
}
