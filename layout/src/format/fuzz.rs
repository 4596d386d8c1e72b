//! Entry points for fuzzers: any bytes in, no panic, no hang, bounded memory. Each looks at the bytes as they
//! are, and again with version, lengths, position, crc and tags made right, so that the code behind the tag is
//! reached.

use super::checkpoint::{CheckpointHeader, CheckpointReader};
use super::field::Field;
use super::footer::Footer;
use super::names::FileName;
use super::position::Position;
use super::record::{self, Prefix};
use super::seal::{
    BODY_BYTES, FORMAT_VERSION, LONG_PREFIX, Secret, Structure, TOTAL_BYTES, claimed_position,
    claimed_structure, reseal,
};
use super::segment::SegmentHeader;
use super::superblock::{self, Superblock};
use super::trailer::Trailer;
use super::{PAGE, PAGE_BYTES, VERSION};
use crate::ids::StoreId;

/// The key under which the entry points look for structures.
pub const SECRET: Secret = Secret::new([0x5e; 32]);

/// The place at which the entry points look for structures.
pub const POSITION: Position =
    Position { store: StoreId([7; 16]), shard: 1, segment: 1, generation: 3, offset: 16 * PAGE_BYTES };

/// The bytes as a structure that proves itself at [`POSITION`], whatever is in it.
pub fn sealed(structure: Structure, data: &[u8]) -> Vec<u8> {
    let mut image = data.to_vec();
    image.truncate(structure.max_bytes());
    let bytes = image.len().max(1).next_multiple_of(PAGE).min(structure.max_bytes());
    image.resize(bytes, 0);
    FORMAT_VERSION.put(&mut image, VERSION.to_le_bytes());
    let own_secret = |field: Field| field.get(&image).map_or(SECRET, Secret::new);
    let (position, secret) = match structure {
        Structure::Superblock => {
            (superblock::position(POSITION.store, 0, 1, 0), own_secret(superblock::SECRET))
        }
        Structure::SegmentHeader => (POSITION.at(0), SECRET),
        Structure::CheckpointHeader => (POSITION.at(0), SECRET),
        Structure::CheckpointChunk => (POSITION.at(PAGE_BYTES), SECRET),
        Structure::Record | Structure::Footer | Structure::Trailer => (POSITION, SECRET),
    };
    if structure.rest_domain().is_some() {
        let total = u32::try_from(bytes).unwrap_or(u32::MAX);
        TOTAL_BYTES.put(&mut image, total.to_le_bytes());
        let room = total.saturating_sub(u32::try_from(LONG_PREFIX).unwrap_or(0)).saturating_add(1);
        let body = BODY_BYTES.get_u32(&image).ok().and_then(|body| body.checked_rem(room)).unwrap_or(0);
        BODY_BYTES.put(&mut image, body.to_le_bytes());
    }
    reseal(structure, &mut image, &position, &secret);
    image
}

/// Makes an image prove itself at its place, whatever is in it: what a store would write that is mistaken.
pub fn prove(structure: Structure, image: &mut [u8], position: &Position, secret: &Secret) {
    reseal(structure, image, position, secret);
}

fn both(structure: Structure, data: &[u8], look: fn(&[u8])) {
    look(data);
    look(&sealed(structure, data));
}

/// The superblock: each slot and the pair.
pub fn fuzz_superblock(data: &[u8]) {
    both(Structure::Superblock, data, |bytes| {
        let _ = Superblock::decode(bytes, 0, None);
        let _ = Superblock::decode_pair(bytes, Some(POSITION.store));
    });
}

/// The segment header.
pub fn fuzz_segment_header(data: &[u8]) {
    both(Structure::SegmentHeader, data, |bytes| {
        let _ = SegmentHeader::decode(bytes, &POSITION, &SECRET);
        let _ = SegmentHeader::decode_any_generation(bytes, &POSITION, &SECRET);
        let _ = SegmentHeader::decode_unkeyed(bytes);
    });
}

/// A record: its prefix, its header and its body.
pub fn fuzz_record(data: &[u8]) {
    both(Structure::Record, data, |bytes| {
        let _ = Prefix::open(bytes, &POSITION, &SECRET).map(|prefix| prefix.record_bytes());
        if let Ok(record) = record::open(bytes, &POSITION, &SECRET) {
            let _ = record.body();
            let _ = record.digests().count();
        }
    });
}

/// The footer index.
pub fn fuzz_footer(data: &[u8]) {
    both(Structure::Footer, data, |bytes| {
        let _ = Footer::decode(bytes, &POSITION, &SECRET);
    });
}

/// The trailer.
pub fn fuzz_trailer(data: &[u8]) {
    both(Structure::Trailer, data, |bytes| {
        let _ = Trailer::decode(bytes, &POSITION, &SECRET);
    });
}

/// The checkpoint's header.
pub fn fuzz_checkpoint_header(data: &[u8]) {
    both(Structure::CheckpointHeader, data, |bytes| {
        let _ = CheckpointHeader::decode(bytes, &POSITION, &SECRET);
    });
}

/// A checkpoint's chunk.
pub fn fuzz_checkpoint_chunk(data: &[u8]) {
    both(Structure::CheckpointChunk, data, |bytes| {
        let header = CheckpointHeader { position: POSITION.at(0), created_ms: 0, next_sequence: 0 };
        let mut reader = CheckpointReader::new(&header, &SECRET);
        let _ = reader.chunk_bytes(bytes);
        let _ = reader.chunk(bytes);
    });
}

/// File names, and what bytes claim to be.
pub fn fuzz_names(data: &[u8]) {
    let _ = std::str::from_utf8(data).map(FileName::parse);
    let _ = claimed_position(data);
    let _ = claimed_structure(data);
}

/// An entry point.
pub type Target = fn(&[u8]);

/// Every entry point for a structure, by the structure it looks for.
pub const TARGETS: [(Structure, Target); 7] = [
    (Structure::Superblock, fuzz_superblock),
    (Structure::SegmentHeader, fuzz_segment_header),
    (Structure::Record, fuzz_record),
    (Structure::Footer, fuzz_footer),
    (Structure::Trailer, fuzz_trailer),
    (Structure::CheckpointHeader, fuzz_checkpoint_header),
    (Structure::CheckpointChunk, fuzz_checkpoint_chunk),
];
