//! An export of encoded records: their chunks are decoded and verified, whatever layout they lie in.

use std::sync::Arc;

use kvarts_fsck::check::Options;
use kvarts_fsck::contents::read;
use kvarts_fsck::disk::{Disk, MemoryDisk};
use kvarts_fsck::export::{Exported, Selection, export};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::store::survey;
use kvarts_fsck::window::Tally;
use kvarts_layout::codec::{Codec, Encoding};
use kvarts_layout::export::{Frame, HEAD_BYTES, Head, Reading};
use kvarts_layout::format::body::{BlockName, Blocks, Definition, Epoch, Parent};
use kvarts_layout::format::members::Membership;
use kvarts_layout::format::record::{self, Body, Fields};
use kvarts_layout::format::segment::SegmentHeader;
use kvarts_layout::format::superblock::Superblock;
use kvarts_layout::format::{Position, Secret, VERSION};
use kvarts_layout::{OriginId, StoreId};
use kvarts_tests::fixture;

const SEGMENT_BYTES: u64 = 256 << 10;
const BLOCKS: u32 = 3;

/// A chunk that compresses well, and differs from every other.
fn chunk(block: u32, part: u32, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| (at / 97) as u8 ^ (block * 31 + part) as u8).collect()
}

/// The payload of an encoded record, its stored lengths and its digests.
fn encoded(encoding: Encoding, layout: u8, sizes: &[u64]) -> (Vec<u8>, Vec<u32>, Vec<u32>) {
    let mut codec = Codec::new().unwrap();
    let parts = sizes.len() as u32;
    let order: Vec<(u32, u32)> = match layout {
        0 => (0..BLOCKS).flat_map(|block| (0..parts).map(move |part| (block, part))).collect(),
        _ => (0..parts).flat_map(|part| (0..BLOCKS).map(move |block| (block, part))).collect(),
    };
    let count = (BLOCKS * parts) as usize;
    let (mut payload, mut lengths, mut digests) = (Vec::new(), vec![0; count], vec![0; count]);
    for (block, part) in order {
        let raw = chunk(block, part, sizes[part as usize]);
        let place = (block * parts + part) as usize;
        lengths[place] = codec.encode(encoding, &raw, &mut payload).unwrap() as u32;
        digests[place] = crc32fast::hash(&raw);
    }
    (payload, lengths, digests)
}

fn superblock() -> Superblock {
    Superblock {
        store: StoreId([3; 16]),
        directory: 0,
        sequence: 1,
        secret: Secret::new([9; 32]),
        created_ms: 1,
        segment_bytes: SEGMENT_BYTES,
        min_reader: VERSION,
        clean: false,
        directories: 1,
        shards_total: 1,
        shards: vec![0],
        membership: Membership::default(),
    }
}

/// A store with one encoded record that had been flushed, written by hand.
fn store(encoding: Encoding, layout: u8) -> (MemoryDisk, usize) {
    let superblock = superblock();
    let (id, secret) = (superblock.store, superblock.secret.clone());
    let segment = Position { store: id, shard: 0, segment: 0, generation: 1, offset: 0 };
    let header = SegmentHeader {
        position: segment,
        secret: secret.clone(),
        created_ms: 1,
        segment_bytes: SEGMENT_BYTES,
        first_sequence: 1,
    };
    let (identity, geometry) = (fixture::identity("r1"), fixture::geometry());
    let namespace = identity.namespace_id().unwrap();
    let definition = |local, id, canonical| Definition { local, id, canonical };
    let spec = definition(1, geometry.fingerprint().0, geometry.canonical_bytes());
    let named = definition(2, namespace.0, identity.encode().unwrap());
    let (group, coordinate) = fixture::columns()[0];
    let shape = fixture::shape(group, coordinate);
    let sizes: Vec<u64> =
        shape.layers().iter().flat_map(|layer| &layer.chunks).map(|chunk| chunk.bytes).collect();
    let (payload, stored_lengths, digests) = encoded(encoding, layout, &sizes);
    let name = |n: u32| BlockName { key: fixture::key(1, n.into()).0, origin: [n as u8; 16] };
    let blocks = Blocks {
        coordinate: coordinate.to_u64(),
        created_ms: 5,
        expires_ms: 0,
        namespace: 2,
        spec: 1,
        group: group.0,
        blocks: (0..BLOCKS).map(name).collect(),
        stored_lengths,
        extensions: vec![],
        first_block: Some(0),
        layout_version: 1,
        layout,
        encoding: encoding.code(),
        parent: Parent::Root,
    };
    let mut image = header.encode().unwrap();
    let mut start = 0;
    let bodies = [
        (Body::Spec(spec), vec![], &[][..]),
        (Body::Identity(named), vec![], &[]),
        (Body::Blocks(blocks), digests, &payload),
        // Says that everything before it had been flushed.
        (Body::Epoch(Epoch { below: 1, namespace: [1; 32] }), vec![], &[]),
    ];
    for (sequence, (body, digests, payload)) in (1..).zip(bodies) {
        let offset = image.len() as u64;
        let fields = Fields { sequence, durable_upto: offset, payload_bytes: payload.len() as u64 };
        image.extend(record::encode(&segment.at(offset), &secret, &fields, &body, &digests).unwrap());
        if !payload.is_empty() {
            start = image.len();
        }
        image.extend(payload);
        image.resize(image.len().next_multiple_of(4096), 0);
    }
    image.resize(SEGMENT_BYTES as usize, 0);
    let disk = MemoryDisk::new();
    disk.plant("superblock", [superblock.encode(0).unwrap(), superblock.encode(1).unwrap()].concat());
    disk.plant("shard-0000/segment-00000000", image);
    (disk, start)
}

fn exported(disk: &MemoryDisk) -> (Exported, Vec<u8>) {
    let disks: [Arc<dyn Disk>; 1] = [Arc::new(disk.clone())];
    let store = survey(&disks, &mut Findings::default()).unwrap().unwrap();
    let options = Options { threads: 1, ..Options::default() };
    let contents = read(&store, &options, 0, &Tally::default(), Findings::default());
    let mut file = Vec::new();
    let done = export(&store, &contents, &Selection::All, (1, &Tally::default()), &mut file).unwrap();
    (done, file)
}

/// Looks at every byte of an export; gives how many blocks it has.
fn blocks_of(file: &[u8]) -> u32 {
    let mut reading = Reading::new();
    let mut rest = file;
    let mut seen = 0;
    while let Some((head, behind)) = rest.split_first_chunk::<HEAD_BYTES>() {
        let head = Head::decode(head).unwrap();
        let (body, behind) = behind.split_at(head.body_bytes());
        let (payload, behind) = behind.split_at(head.payload_bytes() as usize);
        rest = behind;
        let Frame::Run(run) = reading.frame(&head, body).unwrap() else { continue };
        let shape = run.shape(reading.namespace(run.namespace).unwrap()).unwrap();
        let sizes = shape.layers().iter().flat_map(|layer| &layer.chunks).map(|chunk| chunk.bytes);
        let sizes: Vec<u64> = sizes.collect();
        for (at, bytes) in payload.chunks(run.block_bytes as usize).enumerate() {
            run.verify(at, &shape, bytes).unwrap();
            // Which block it is its producer says.
            let OriginId([block, ..]) = run.blocks[at].origin;
            assert_eq!(run.blocks[at].origin, OriginId([block; 16]));
            let parts = (0..).zip(&sizes).flat_map(|(part, size)| chunk(u32::from(block), part, *size));
            assert_eq!(bytes, parts.collect::<Vec<u8>>());
            seen += 1;
        }
    }
    seen
}

#[test]
fn encoded_records_are_exported_as_the_bytes_that_were_put() {
    for encoding in [Encoding::Planes, Encoding::Plain] {
        for layout in [0, 1] {
            let (disk, start) = store(encoding, layout);
            let (done, file) = exported(&disk);
            assert_eq!(
                (done.totals.blocks, done.blocks_left_out),
                (u64::from(BLOCKS), 0),
                "{:?}",
                done.left_out
            );
            assert_eq!(blocks_of(&file), BLOCKS);
            // A stored byte that is changed decodes to something else, or not at all: never into the file. The blocks beside it
            // are sound.
            disk.tamper("shard-0000/segment-00000000", |bytes| bytes[start + 9] ^= 0x10);
            let (done, file) = exported(&disk);
            assert_eq!((done.totals.blocks, blocks_of(&file)), (u64::from(BLOCKS) - 1, BLOCKS - 1));
        }
    }
}
