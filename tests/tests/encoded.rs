//! Encoded records, read in every way that a store can be asked: what comes is what was put, what is damaged is named,
//! and what does not come in time is not waited for.

use std::time::Duration;

use kvarts_contract::api::{
    Arrived, ContainsRequest, KvStore, LeaseTerms, Order, ReadEvent, ReadRequest, Verify,
};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::{Kind, Reason};
use kvarts_contract::io_error::DirId;
use kvarts_layout::Layout;
use kvarts_layout::format::seal::claimed_structure;
use kvarts_layout::format::{PAGE, Structure};
use kvarts_layout::plan::Tile;
use kvarts_store::engine::{CompactOptions, CompactReport, Limits, Options};
use kvarts_tests::campaign::reopen;
use kvarts_tests::conformance::Desk;
use kvarts_tests::fixture::{self, Style};
use kvarts_tests::sim::{Crash, Effect, OpKind, Rule, Seed, SimWorld, When, Which, WorldConfig};
use kvarts_tests::stage::{SimStage, Stage, drive};

const BLOCKS: u64 = 12;
/// A producer whose blocks can be compressed, and one whose cannot.
const SOFT: u64 = 1;
const HARD: u64 = 2;

fn options() -> Options {
    Options {
        shards_per_directory: 2,
        segment_bytes: 256 << 10,
        budget_bytes: 48 << 20,
        limits: Limits { arena_bytes: 4 << 20, ..Limits::default() },
        ..Options::default()
    }
}

/// The blocks that can be compressed, of a read of all.
fn soft() -> Vec<u32> {
    (0..BLOCKS as u32).collect()
}

/// Everything is cold.
fn all() -> CompactOptions {
    let encode_cold_after = Some(Duration::ZERO);
    CompactOptions {
        merge_records_min: 0,
        dead_thousandths: 1000,
        encode_cold_after,
        ..CompactOptions::default()
    }
}

fn compact(stage: &SimStage, options: CompactOptions) -> CompactReport {
    drive(stage.world(), stage.engine().compact(options)).expect("it ends").expect("nothing fails")
}

/// Fills segments until those of the blocks put before are sealed.
fn roll(desk: &Desk<'_>) {
    for n in 1000..1040 {
        desk.store(fixture::columns()[0], &desk.keys(n..n + 1), HARD, Layout::FullBlock);
    }
}

/// A store whose blocks 0..5 of each column are encoded.
fn stage(seed: u64, layout: Layout) -> SimStage {
    let stage = SimStage::open(&SimWorld::new(seed, &WorldConfig::default()), &options()).unwrap();
    let desk = Desk::new(&stage, "encoded");
    for column in fixture::columns() {
        desk.store(column, &desk.keys(0..BLOCKS), SOFT, layout);
    }
    roll(&desk);
    let report = compact(&stage, all());
    assert_eq!(report.blocks_moved, 3 * BLOCKS, "{report:?}");
    assert!(report.records_encoded >= 3, "{report:?}");
    assert!(report.encoded_bytes_before * 10 > report.encoded_bytes_after * 11, "{report:?}");
    assert_eq!((report.records_failed, report.blocks_damaged), (0, 0));
    stage
}

#[test]
fn every_kind_of_read_of_encoded_records_gives_what_was_put() {
    for layout in [Layout::FullBlock, Layout::LayerBlock] {
        let stage = stage(1, layout);
        let desk = Desk::new(&stage, "encoded");
        for column in fixture::columns() {
            desk.expect(column, &desk.keys(0..BLOCKS), SOFT);
            for (order, style, skew) in [
                (Order::Layers, Style::Layers, 0),
                (Order::Layers, Style::Paged, 512),
                (Order::Blocks, Style::Blocks, 1),
            ] {
                for verify in [Verify::Always, Verify::Never, Verify::Sample(500)] {
                    // Some blocks, out of the middle, in an order of their own.
                    let keys = [desk.keys(2..4), desk.keys(0..1)].concat();
                    let shape = fixture::shape(column.0, column.1);
                    let into = fixture::place(&shape, 3, style, skew).unwrap();
                    let last = shape.layers().len() as u32;
                    for layers in [None, Some(last - 1..last)] {
                        let (into, layers) = (into.clone(), layers.clone());
                        let request =
                            ReadRequest { order, into, verify, layers, ..desk.read_request(column, &keys) };
                        let (events, end) = desk.read(&request);
                        assert_eq!((end.usable_blocks, end.failures), (3, Vec::new()));
                        let steps = if order == Order::Blocks {
                            3
                        } else {
                            request.layers.clone().map_or(last, |_| 1)
                        };
                        assert_eq!(events.len(), steps as usize, "{events:?}");
                        desk.expect_bytes(&request, &[0, 1, 2], SOFT);
                    }
                }
            }
        }
        stage.audit_all();
    }
}

#[test]
fn raw_and_encoded_records_of_one_prefix_are_read_together_and_what_does_not_pay_stays_raw() {
    let stage = stage(2, Layout::LayerBlock);
    let desk = Desk::new(&stage, "encoded");
    let column = fixture::columns()[0];
    desk.store(column, &desk.keys(BLOCKS..BLOCKS + 3), HARD, Layout::LayerBlock);
    roll_more(&desk);
    let again = compact(&stage, all());
    assert_eq!((again.records_encoded, again.blocks_moved), (0, 0), "{again:?}");
    let read = again.bytes_read;
    // What did not pay once is not even read again.
    assert_eq!(compact(&stage, all()).bytes_read, 0, "{read} bytes at first");
    let request = desk.read_request(column, &desk.keys(0..BLOCKS + 3));
    let (_, end) = desk.read(&request);
    assert_eq!((end.usable_blocks, end.failures), (BLOCKS as u32 + 3, Vec::new()));
    desk.expect_bytes(&request, &soft(), SOFT);
    desk.expect_bytes(&request, &[12, 13, 14], HARD);
}

fn roll_more(desk: &Desk<'_>) {
    for n in 2000..2040 {
        desk.store(fixture::columns()[0], &desk.keys(n..n + 1), HARD, Layout::FullBlock);
    }
}

#[test]
fn concurrent_reads_of_an_encoded_record_share_one_load() {
    let stage = stage(3, Layout::LayerBlock);
    let desk = Desk::new(&stage, "encoded");
    let column = fixture::columns()[0];
    let before = stage.engine().stats().counts;
    let requests = [(); 3].map(|()| desk.read_request(column, &desk.keys(0..BLOCKS)));
    let streams = requests.each_ref().map(|request| stage.store().read(request.clone()).unwrap());
    for (request, stream) in requests.iter().zip(&streams) {
        let (_, end) = stage.events(stream);
        assert_eq!((end.usable_blocks, end.failures), (BLOCKS as u32, Vec::new()));
        desk.expect_bytes(request, &soft(), SOFT);
    }
    let after = stage.engine().stats().counts;
    let raw = fixture::shape(column.0, column.1).block_bytes() * BLOCKS;
    assert_eq!(after.bytes_shared - before.bytes_shared, 2 * raw);
    assert!(after.device_bytes_read - before.device_bytes_read < raw, "less than the raw bytes, once");
}

#[test]
fn layers_of_an_encoded_record_take_turns() {
    let stage = stage(4, Layout::LayerBlock);
    let desk = Desk::new(&stage, "encoded");
    let (group, coordinate) = fixture::columns()[0];
    let shape = fixture::shape(group, coordinate);
    let layers = shape.layers().len() as u32;
    let most = shape.layers().iter().map(|layer| layer.bytes()).max().unwrap() * BLOCKS;
    let shared = fixture::memory(most, 0);
    let request = desk.read_request((group, coordinate), &desk.keys(0..BLOCKS));
    let (request, _) = request.tiled(&shape);
    let order = request.order;
    let content: Vec<_> =
        request.keys.iter().map(|key| fixture::content(key, group, coordinate, SOFT, &shape)).collect();
    let mut read = stage.engine().read_tiles(request).unwrap();
    for layer in 0..layers {
        let tile = Tile { blocks: 0..BLOCKS as u32, layers: layer..layer + 1 };
        let memory = shared.slice(0, tile.bytes(&shape) as usize).unwrap();
        read.grant(tile, memory, ()).unwrap();
        let mut told = None;
        while let Some(arrived) = drive(stage.world(), read.next()).unwrap().unwrap() {
            match arrived {
                Arrived::Bytes(bytes) => {
                    for chunk in bytes.memory.tile.chunks(order, &shape, layer, bytes.blocks) {
                        let found = bytes.memory.placed.chunk(chunk.part, chunk.block, chunk.bytes).unwrap();
                        let expected = &content[chunk.block as usize][chunk.part as usize];
                        assert!(found.to_vec() == *expected, "{chunk:?} of layer {layer}");
                    }
                }
                Arrived::Layer { layer, blocks } => told = Some((layer, blocks)),
                Arrived::Block(_) => {}
            }
        }
        assert_eq!(told, Some((layer, BLOCKS as u32)));
    }
    let end = read.end(None);
    assert_eq!((end.usable_blocks, end.failures), (BLOCKS as u32, Vec::new()));
}

#[test]
fn a_deadline_over_a_disk_that_does_not_answer_ends_a_read_of_an_encoded_record() {
    // The first read is that of the header, the others are those of chunks.
    for nth in [1, 2] {
        let stage = stage(5, Layout::FullBlock);
        let desk = Desk::new(&stage, "encoded");
        drive(stage.world(), stage.engine().forget_headers()).unwrap().unwrap();
        stage.world().disk().inject(Rule::new(Which::Kind(OpKind::Read), When::From(nth), Effect::Stuck));
        let deadline = Some(Nanos(stage.now().0 + 50_000_000));
        let request = desk.read_request(fixture::columns()[0], &desk.keys(0..BLOCKS));
        let (_, end) = desk.read(&ReadRequest { deadline, ..request });
        assert_eq!(end.usable_layers, 0, "{end:?}");
        assert_eq!(end.held_bytes, 0, "the caller's memory is never the device's: chunks are staged");
    }
}

#[test]
fn a_flipped_bit_of_a_stored_chunk_is_a_miss_and_its_block_is_set_aside() {
    for (byte, layout) in [(0, Layout::FullBlock), (301, Layout::FullBlock), (5000, Layout::LayerBlock)] {
        let stage = stage(6, layout);
        let desk = Desk::new(&stage, "encoded");
        let column = fixture::columns()[0];
        let place = payload_of(&stage, &desk);
        let flipped = stage
            .world()
            .disk()
            .tamper(|media| media.corrupt(DirId(0), &place.0, place.1 + byte, |bytes| bytes[0] ^= 4, 1));
        assert!(flipped);
        let request = desk.read_request(column, &desk.keys(0..BLOCKS));
        let (_, end) = desk.read(&request);
        assert_eq!(end.failures.len(), 1, "byte {byte}: {:?}", end.failures);
        let (bad, reason) = end.failures[0].clone();
        assert!(matches!(reason, Reason::Digest { .. }) && reason.kind() == Kind::Corrupt, "{reason:?}");
        let good: Vec<u32> = (0..BLOCKS as u32).filter(|block| *block != bad).collect();
        desk.expect_bytes(&request, &good, SOFT);
        let counts = stage.engine().stats().counts;
        assert_eq!((counts.chunks_damaged, counts.blocks_quarantined), (1, 1));
        // From now on it is a miss, and it can be put again.
        let (_, end) = desk.read(&request);
        assert_eq!(end.failures, vec![(bad, Reason::NotHere(desk.keys(0..BLOCKS)[bad as usize]))]);
    }
}

/// The file of an encoded record of the first column, and where its payload begins. No raw record of that column
/// has such a length, and no record of the others is so long.
fn payload_of(stage: &SimStage, desk: &Desk<'_>) -> (String, u64) {
    let request = desk.read_request(fixture::columns()[0], &desk.keys(0..BLOCKS));
    assert!(
        stage.engine().planned_extents(&request).unwrap().is_empty(),
        "only its header says where chunks lie"
    );
    let media = stage.world().disk().media();
    let mut found = Vec::new();
    for path in media.paths() {
        let Some((_, path)) = path.split_once('/') else { continue };
        let bytes = media.contents(DirId(0), path).unwrap();
        for (at, page) in (0..).step_by(PAGE).zip(bytes.chunks_exact(PAGE)) {
            if claimed_structure(page) != Some(Structure::Record) {
                continue;
            }
            let payload = u64::from_le_bytes(page[96..104].try_into().unwrap());
            let header = u64::from(u32::from_le_bytes(page[72..76].try_into().unwrap()));
            if payload > 12_000 && payload % 24_576 != 0 {
                found.push((path.to_owned(), at + header));
            }
        }
    }
    found.into_iter().next().expect("it was encoded")
}

#[test]
fn a_power_cut_after_an_encoding_and_a_clean_start_find_encoded_records() {
    for clean in [true, false] {
        let stage = stage(7, Layout::LayerBlock);
        let keys = Desk::new(&stage, "encoded").keys(0..BLOCKS);
        let media = if clean { stage.close().unwrap() } else { stage.cut_power().image(Crash::LoseAll) };
        let opened = reopen(Seed(7), &WorldConfig::default(), &options(), media).unwrap();
        let namespace = opened.store.register(&fixture::identity("encoded"), &fixture::geometry()).unwrap();
        for (group, coordinate) in fixture::columns() {
            let shape = fixture::shape(group, coordinate);
            let into = fixture::place(&shape, BLOCKS as u32, Style::Blocks, 0).unwrap();
            let request = ReadRequest {
                namespace,
                group,
                coordinate,
                keys: keys.clone(),
                layers: None,
                order: Order::Layers,
                into: into.clone(),
                verify: Verify::Always,
                class: kvarts_contract::class::Class::Foreground,
                deadline: None,
            };
            let stream = opened.store.read(request).unwrap();
            let mut end = None;
            opened
                .world
                .run_until(1_000_000, || {
                    while let Some(event) = stream.try_next() {
                        if let ReadEvent::End(one) = event {
                            end = Some(one);
                        }
                    }
                    end.is_some()
                })
                .unwrap();
            assert_eq!(end.unwrap().failures, Vec::new(), "clean: {clean}");
            for (at, key) in (0..).zip(&keys) {
                let expected = fixture::content(key, group, coordinate, SOFT, &shape);
                assert!(fixture::read_block(&into, at, &shape) == expected, "block {at}");
            }
        }
        let encoded = opened.store.compact(all());
        let report = drive(&opened.world, encoded).unwrap().unwrap();
        assert_eq!(report.records_encoded, 0, "they are encoded already");
    }
}

#[test]
fn a_leased_block_is_not_encoded_and_encoding_can_be_switched_off() {
    let stage = SimStage::open(&SimWorld::new(8, &WorldConfig::default()), &options()).unwrap();
    let desk = Desk::new(&stage, "encoded");
    let column = fixture::columns()[0];
    desk.store(column, &desk.keys(0..BLOCKS), SOFT, Layout::LayerBlock);
    roll(&desk);
    let off = CompactOptions { encode_cold_after: None, ..all() };
    assert_eq!(compact(&stage, off).records_encoded, 0);
    assert_eq!(compact(&stage, CompactOptions { encode_in_place: false, ..all() }).records_encoded, 0);
    let warm = CompactOptions { encode_cold_after: Some(Duration::from_secs(600)), ..all() };
    assert_eq!(compact(&stage, warm).records_encoded, 0, "it was just put");
    let lease = LeaseTerms { hold: Duration::from_secs(60), tenant: 1, cap_bytes: 1 << 30 };
    let keys = desk.keys(0..BLOCKS);
    let (namespace, (group, coordinate)) = (desk.namespace, column);
    let request = ContainsRequest { namespace, group, coordinate, keys: &keys, lease: Some(lease) };
    assert!(stage.store().contains(&request).unwrap().lease.is_some());
    assert_eq!(compact(&stage, all()).records_encoded, 0, "it is leased");
    let until = stage.now().plus(Duration::from_secs(90));
    stage.wait(&mut || stage.now() >= until);
    assert!(compact(&stage, all()).records_encoded >= 1);
    desk.expect(column, &desk.keys(0..BLOCKS), SOFT);
}
