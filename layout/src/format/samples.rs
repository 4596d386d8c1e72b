//! One small instance of each structure, for tests and golden files. A change here changes the golden files.

use super::body::*;
use super::checkpoint::*;
use super::field::Field;
use super::footer::{self, Content, Defined, Entry, Footer};
use super::members::Membership;
use super::position::Position;
use super::record::{self, Body, Fields};
use super::seal::{Secret, Structure, claimed_position, reseal};
use super::segment::SegmentHeader;
use super::superblock::Superblock;
use super::trailer::{SealReason, Trailer};
use crate::ids::StoreId;

pub(super) const STORE: StoreId = StoreId(*b"kvarts-store-one");
pub(super) const SEGMENT_BYTES: u64 = 64 << 10;

pub(super) fn secret() -> Secret {
    Secret::new(std::array::from_fn(|i| 0xc0 ^ i as u8))
}

pub(super) fn position(offset: u64) -> Position {
    Position { store: STORE, shard: 3, segment: 12, generation: 5, offset }
}

/// The image with one field changed by a writer that then sealed it properly.
pub(super) fn altered<const N: usize>(
    structure: Structure,
    image: &[u8],
    field: Field,
    value: [u8; N],
) -> Vec<u8> {
    let mut image = image.to_vec();
    let position = claimed_position(&image).unwrap();
    assert_eq!(field.bytes, N);
    field.put(&mut image, value);
    reseal(structure, &mut image, &position, &secret());
    image
}

pub(super) fn superblock() -> Superblock {
    Superblock {
        store: STORE,
        directory: 1,
        sequence: 41,
        secret: secret(),
        created_ms: 1_700_000_000_000,
        segment_bytes: SEGMENT_BYTES,
        min_reader: 0,
        clean: true,
        directories: 2,
        shards_total: 8,
        shards: vec![1, 3, 5, 7],
        membership: Membership::default(),
    }
}

pub(super) fn segment_header() -> SegmentHeader {
    SegmentHeader {
        position: position(0),
        secret: secret(),
        created_ms: 1_700_000_001_000,
        segment_bytes: SEGMENT_BYTES,
        first_sequence: 70,
    }
}

pub(super) fn fields() -> Fields {
    Fields { sequence: 77, durable_upto: 4096, payload_bytes: 0 }
}

pub(super) fn blocks() -> Blocks {
    Blocks {
        coordinate: 0x0008_0002_0004,
        created_ms: 1_700_000_002_000,
        expires_ms: 1_700_000_602_000,
        namespace: 1,
        spec: 2,
        group: 3,
        blocks: vec![
            BlockName { key: [0x11; 32], origin: [0x21; 16] },
            BlockName { key: [0x12; 32], origin: [0x22; 16] },
        ],
        stored_lengths: vec![],
        extensions: vec![
            Extension { id: EXTENSION_ENCRYPTION, critical: true, bytes: vec![0xee; 32] },
            Extension { id: EXTENSION_USER, critical: false, bytes: b"agent-7".to_vec() },
        ],
        first_block: Some(16),
        layout_version: 1,
        layout: 1,
        encoding: ENCODING_RAW,
        parent: Parent::Key([0x10; 32]),
    }
}

pub(super) fn tombstones() -> Tombstones {
    Tombstones {
        entries: vec![
            Tombstone { below: 60, coordinate: None, namespace: 1, group: Some(3), key: [0x11; 32] },
            Tombstone { below: 61, coordinate: Some(0), namespace: 1, group: None, key: [0x12; 32] },
        ],
    }
}

/// Every kind of body, with digests and payload bytes that go with it; each header fits in one page.
pub(super) fn bodies() -> Vec<(Body, Vec<u32>, u64)> {
    let encoded = Blocks {
        encoding: ENCODING_ZSTD_PLANES,
        stored_lengths: vec![100, 200, 300, 400],
        parent: Parent::Root,
        first_block: Some(0),
        ..blocks()
    };
    let identity = Definition { local: 1, id: [0x31; 32], canonical: b"an identity".to_vec() };
    let spec = Definition { local: 2, id: [0x32; 32], canonical: b"a spec".to_vec() };
    vec![
        (Body::Blocks(blocks()), vec![0xaaaa_0001, 0xaaaa_0002, 0xaaaa_0003, 0xaaaa_0004], 4000),
        (Body::Blocks(encoded), vec![1, 2, 3, 4], 1000),
        (Body::Identity(identity), vec![], 0),
        (Body::Spec(spec), vec![], 0),
        (Body::Tombstones(tombstones()), vec![], 0),
        (Body::Epoch(Epoch { below: 62, namespace: [0x31; 32] }), vec![], 0),
    ]
}

pub(super) fn record() -> (Position, Vec<u8>) {
    let (body, digests, payload_bytes) = bodies().remove(0);
    let fields = Fields { payload_bytes, ..fields() };
    (position(8192), record::encode(&position(8192), &secret(), &fields, &body, &digests).unwrap())
}

pub(super) fn footer() -> Footer {
    let contents = [
        (Content::Identity(Defined { local: 1, id: [0x31; 32] }), 0),
        (Content::Spec(Defined { local: 2, id: [0x32; 32] }), 0),
        (Content::Blocks(blocks()), 4000),
        (Content::Tombstones(tombstones()), 0),
        (Content::Epoch(Epoch { below: 62, namespace: [0x31; 32] }), 0),
        (Content::Unknown(999), 0),
    ];
    let mut offset = 4096;
    let mut records = vec![];
    for (sequence, (content, payload_bytes)) in (74..).zip(contents) {
        records.push(Entry { offset, sequence, payload_bytes, header_bytes: 4096, content });
        offset += 4096 + u64::next_multiple_of(payload_bytes, 4096);
    }
    Footer { records }
}

pub(super) fn footer_image() -> (Position, Vec<u8>) {
    let position = position(32768);
    (position, footer().encode(&position, &secret()).unwrap())
}

pub(super) fn trailer() -> (Position, Trailer) {
    let (footer_position, image) = footer_image();
    let trailer = Trailer {
        footer_offset: footer_position.offset,
        footer_tag: footer::tag_of(&image).unwrap(),
        footer_bytes: image.len() as u32,
        record_count: 6,
        first_sequence: 74,
        last_sequence: 79,
        log_end: 32768,
        reason: SealReason::Recovery,
    };
    (super::trailer::position(&position(0), SEGMENT_BYTES), trailer)
}

pub(super) fn checkpoint_header() -> CheckpointHeader {
    CheckpointHeader {
        position: Position { store: STORE, shard: 3, segment: 1, generation: 9, offset: 0 },
        created_ms: 1_700_000_003_000,
        next_sequence: 80,
    }
}

pub(super) fn items() -> Vec<Items> {
    let segment = SegmentState {
        segment: 12,
        generation: 5,
        first_sequence: 74,
        last_sequence: 79,
        log_end: 32768,
        state: SEGMENT_SEALED,
    };
    let record = RecordState {
        segment: 12,
        generation: 5,
        offset: 12288,
        expires_ms: 1_700_000_602_000,
        last_access_s: 1_700_000_100,
    };
    vec![
        Items::Segments(vec![segment]),
        Items::Namespaces(vec![Defined { local: 1, id: [0x31; 32] }]),
        Items::Records(vec![record, RecordState { offset: 20480, expires_ms: 0, ..record }]),
        Items::Tombstones(tombstones().entries),
        Items::Epochs(vec![Epoch { below: 62, namespace: [0x31; 32] }]),
    ]
}

/// A whole checkpoint: its header page, then each chunk.
pub(super) fn checkpoint() -> Vec<Vec<u8>> {
    let mut writer = CheckpointWriter::new(&checkpoint_header(), &secret());
    let mut pages = vec![writer.header().unwrap()];
    pages.extend(items().iter().map(|items| writer.chunk(items).unwrap()));
    pages.push(writer.end().unwrap());
    pages
}
