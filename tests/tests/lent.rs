//! Blocks that are lent as they lie in files: who reads the ranges himself has what a read would have given him, and
//! it stays there until he gives it back.
#![allow(clippy::disallowed_methods, reason = "reads the files of a store on a real directory")]

use std::collections::BTreeSet;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::task::{Context, Waker};
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteRequest, Durability, KvStore, Parent, Placed, Presence, PutRequest,
    ReadRequest, Target,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::error::Reason;
use kvarts_contract::{class::Class, clock::Nanos};
use kvarts_layout::plan::DEFAULT_MAX_REGION;
use kvarts_layout::{BlockKey, Coordinate, Geometry, Group, Identity, Layout, NamespaceId};
use kvarts_store::engine::{CompactOptions, Compaction, Limits, Options, Store};
use kvarts_store::home::{Home, HomeOptions};
use kvarts_store::io::IoChoice;
use kvarts_store::lend::{LendRequest, NotLent, PinnedExtents, PinnedLayer};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture::{self, ODD, Style};
use kvarts_tests::landed::until;
use kvarts_tests::sim::{SimWorld, WorldConfig};
use kvarts_tests::stage::{HomeStage, Scratch, SimStage, ask, drive, small_options};

const BLOCKS: u64 = 24;

type Column = (Group, Coordinate);

/// Small segments and records, so that a prefix lies in many; two executors, and nothing happens by itself.
fn options(io: IoChoice) -> HomeOptions {
    let compaction = Compaction { every: None, ..Compaction::default() };
    let limits = Limits { arena_bytes: 4 << 20, compaction, ..Limits::default() };
    let store = Options {
        shards_per_directory: 3,
        segment_bytes: 256 << 10,
        budget_bytes: 8 << 20,
        record_bytes_max: 64 << 10,
        executors: 2,
        limits,
        ..Options::default()
    };
    HomeOptions { io, store, ..HomeOptions::default() }
}

fn open(name: &str, io: IoChoice) -> HomeStage {
    HomeStage::open(&format!("lent-{name}"), &options(io)).unwrap()
}

fn engine(stage: &HomeStage) -> &Store {
    stage.home().store()
}

/// Puts the run in pieces, of which each goes to the shard of its first key.
fn fill(desk: &Desk<'_>, column: Column, layout: Layout) {
    for first in (0..BLOCKS).step_by(5) {
        desk.store(column, &desk.keys(first..(first + 5).min(BLOCKS)), 2, layout);
    }
}

fn request(namespace: NamespaceId, (group, coordinate): Column, keys: &[BlockKey]) -> LendRequest {
    let (layers, class, deadline) = (None, Class::Foreground, None);
    LendRequest { namespace, group, coordinate, keys: keys.to_vec(), layers, class, deadline }
}

fn lend(store: &Store, request: LendRequest) -> PinnedExtents {
    block_on(store.lend(request)).unwrap_or_else(|why| panic!("{why}"))
}

fn refusal(store: &Store, request: LendRequest) -> NotLent {
    block_on(store.lend(request)).map(drop).unwrap_err()
}

/// The bytes of each range of a layer, through its descriptor.
fn ranges(lent: &PinnedExtents, layer: &PinnedLayer) -> Vec<Vec<u8>> {
    let read = |range: &kvarts_store::lend::FileRange| {
        assert!(range.offset.is_multiple_of(4096) && range.bytes.is_multiple_of(4096), "{range:?}");
        assert!(range.bytes > 0 && range.bytes <= u64::from(DEFAULT_MAX_REGION), "{range:?}");
        // Aligned memory, as for any direct read.
        let mut memory = vec![0; range.bytes as usize + 4096];
        let skew = memory.as_ptr().align_offset(4096);
        let bytes = &mut memory[skew..skew + range.bytes as usize];
        let file = &lent.files()[range.file as usize];
        assert_eq!(rustix::io::pread(file, &mut *bytes, range.offset), Ok(bytes.len()));
        bytes.to_vec()
    };
    layer.ranges.iter().map(read).collect()
}

/// A layer's bytes, put together; every chunk has its digest, and every byte comes once.
fn assembled(lent: &PinnedExtents, layer: &PinnedLayer, bytes: usize) -> Vec<u8> {
    let read = ranges(lent, layer);
    let mut whole: Vec<Option<u8>> = vec![None; bytes];
    for chunk in &layer.chunks {
        let range = &read[chunk.range as usize];
        let found = &range[chunk.at as usize..(chunk.at + chunk.bytes) as usize];
        assert_eq!(crc32fast::hash(found), chunk.digest, "{chunk:?}");
        for (place, byte) in whole[chunk.to as usize..].iter_mut().zip(found) {
            assert_eq!(place.replace(*byte), None, "{chunk:?} lies over another");
        }
    }
    whole.into_iter().map(|byte| byte.expect("a byte that no chunk gives")).collect()
}

/// Compares what is lent with an ordinary read of the same.
fn compare(
    desk: &Desk<'_>,
    lent: &PinnedExtents,
    column: Column,
    keys: &[BlockKey],
    layers: &Option<Range<u32>>,
) {
    let shape = fixture::shape(column.0, column.1);
    let into = fixture::place(&shape, keys.len() as u32, Style::Layers, 0).unwrap();
    let read = ReadRequest { layers: layers.clone(), into, ..desk.read_request(column, keys) };
    let (_, end) = desk.read(&read);
    assert_eq!((end.usable_blocks as usize, end.failures), (keys.len(), Vec::new()));
    let all: Vec<_> = read.into.memories().collect();
    let wanted: Vec<u32> = layers.clone().unwrap_or(0..all.len() as u32).collect();
    assert_eq!(lent.layers().iter().map(|layer| layer.layer).collect::<Vec<_>>(), wanted);
    for layer in lent.layers() {
        let expected = all[layer.layer as usize].to_vec();
        assert!(assembled(lent, layer, expected.len()) == expected, "layer {} of {column:?}", layer.layer);
        // The ordinal is the one whose place it is.
        let part_bytes = shape.layers()[layer.layer as usize].chunks[0].bytes;
        let first = layer.chunks.iter().filter(|chunk| chunk.to < part_bytes * keys.len() as u64);
        assert!(first.clone().count() == keys.len());
        assert!(first.into_iter().all(|chunk| chunk.to == u64::from(chunk.ordinal) * part_bytes));
    }
}

/// Readers of segments, of all shards.
fn readers(store: &Store) -> u64 {
    let tables = block_on(store.tables()).unwrap();
    tables.iter().find(|table| table.name == "readers of segments").expect("it is counted").size
}

fn wait_for_no_readers(store: &Store) {
    until("no reader is left", || readers(store) == 0);
}

#[test]
fn who_reads_what_he_was_lent_has_what_a_read_gives() {
    for io in [IoChoice::Pool, IoChoice::Auto] {
        let stage = open("bytes", io);
        for layout in [Layout::FullBlock, Layout::LayerBlock] {
            let desk = Desk::new(&stage, &format!("{layout:?}"));
            let half = (fixture::PAGES, Coordinate::heads(1, 1, 2).unwrap());
            for column in fixture::columns().into_iter().chain([half]) {
                fill(&desk, column, layout);
                let last = fixture::shape(column.0, column.1).layers().len() as u32;
                // Whole, and some of it in an order of its own.
                let some = [desk.keys(11..19), desk.keys(2..4), desk.keys(23..24), desk.keys(4..5)].concat();
                for keys in [desk.keys(0..BLOCKS), some, desk.keys(7..8)] {
                    for layers in [None, Some(last - 1..last), Some(0..1)] {
                        let request =
                            LendRequest { layers: layers.clone(), ..request(desk.namespace, column, &keys) };
                        let lent = lend(engine(&stage), request);
                        compare(&desk, &lent, column, &keys, &layers);
                        if keys.len() as u64 == BLOCKS && column == pages() {
                            assert!(lent.files().len() > 2, "a prefix of several segments and shards");
                        }
                    }
                }
            }
        }
        wait_for_no_readers(engine(&stage));
        stage.close().unwrap();
    }
}

#[test]
fn chunks_of_whole_pages_lie_in_their_stretch_as_in_the_layer() {
    let stage = open("direct", IoChoice::Auto);
    for layout in [Layout::FullBlock, Layout::LayerBlock] {
        let desk = Desk::new(&stage, &format!("{layout:?}"));
        fill(&desk, pages(), layout);
        let lent = lend(engine(&stage), request(desk.namespace, pages(), &desk.keys(0..BLOCKS)));
        for layer in lent.layers() {
            let bytes = layer.ranges.iter().map(|range| range.bytes).sum::<u64>();
            assert_eq!(bytes, 2 * 4096 * BLOCKS, "nothing but chunks");
            for (at, range) in (0..).zip(&layer.ranges) {
                let inside: Vec<_> = layer.chunks.iter().filter(|chunk| chunk.range == at).collect();
                let to = inside[0].to;
                assert!(inside.iter().all(|chunk| chunk.to - chunk.at == to), "{range:?}: {inside:?}");
            }
        }
    }
    stage.close().unwrap();
}

#[test]
fn what_cannot_be_lent_whole_is_refused_and_nothing_is_held() {
    let stage = open("refused", IoChoice::Auto);
    let (desk, store) = (Desk::new(&stage, "refused"), engine(&stage));
    fill(&desk, pages(), Layout::LayerBlock);
    let keys = desk.keys(0..BLOCKS);
    let good = || request(desk.namespace, pages(), &keys);
    let missing = desk.keys(BLOCKS..BLOCKS + 1)[0];
    let with = |key| LendRequest { keys: [&keys[..], &[key]].concat(), ..good() };
    let unknown = NamespaceId([7; 32]);
    let late = Some(store.clock().now());
    let refused: Vec<(LendRequest, Reason)> = vec![
        (with(missing), Reason::NotHere(missing)),
        (with(keys[3]), Reason::Duplicate(keys[3])),
        (LendRequest { keys: Vec::new(), ..good() }, Reason::Empty),
        (LendRequest { namespace: unknown, ..good() }, Reason::UnknownNamespace(unknown)),
        (LendRequest { deadline: late, ..good() }, Reason::DeadlineInPast),
        (LendRequest { layers: Some(1..1), ..good() }, Reason::Empty),
    ];
    for (request, reason) in refused {
        assert_eq!(refusal(store, request), NotLent::Reason(reason));
    }
    for request in [LendRequest { layers: Some(0..4), ..good() }, LendRequest { group: Group(9), ..good() }] {
        assert!(matches!(refusal(store, request), NotLent::Reason(Reason::Shape(_))));
    }
    assert_eq!(readers(store), 0);
    let target = Target::Keys { column: None, keys: keys[5..6].to_vec() };
    let delete = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    ask(&stage, store.delete(delete)).unwrap();
    assert_eq!(refusal(store, good()), NotLent::Reason(Reason::NotHere(keys[5])));
    let far = Some(Nanos(u64::MAX));
    drop(lend(store, LendRequest { keys: keys[..5].to_vec(), deadline: far, ..good() }));
    wait_for_no_readers(store);
    stage.close().unwrap();
}

#[test]
fn encoded_records_are_not_lent_and_raw_ones_beside_them_are() {
    let stage = open("encoded", IoChoice::Auto);
    let (desk, store) = (Desk::new(&stage, "encoded"), engine(&stage));
    // What an odd producer makes can be compressed. Then segments are filled until those are sealed.
    desk.store(pages(), &desk.keys(0..6), 1, Layout::LayerBlock);
    for first in (100..160).step_by(2) {
        desk.store(pages(), &desk.keys(first..first + 2), 2, Layout::LayerBlock);
    }
    drop(lend(store, request(desk.namespace, pages(), &desk.keys(0..6))));
    let all = CompactOptions {
        merge_records_min: 0,
        dead_thousandths: 1000,
        encode_cold_after: Some(Duration::ZERO),
        ..CompactOptions::default()
    };
    let report = block_on(store.compact(all)).unwrap();
    assert!(report.records_encoded > 0, "{report:?}");
    assert_eq!(refusal(store, request(desk.namespace, pages(), &desk.keys(0..6))), NotLent::Encoded);
    let mixed = [desk.keys(100..102), desk.keys(3..4)].concat();
    assert_eq!(refusal(store, request(desk.namespace, pages(), &mixed)), NotLent::Encoded);
    let lent = lend(store, request(desk.namespace, pages(), &desk.keys(100..102)));
    compare(&desk, &lent, pages(), &desk.keys(100..102), &None);
    stage.close().unwrap();
}

#[test]
fn a_simulated_disk_has_nothing_to_lend() {
    let stage = SimStage::open(&SimWorld::new(1, &WorldConfig::default()), &small_options(2)).unwrap();
    let desk = Desk::new(&stage, "simulated");
    fill(&desk, pages(), Layout::FullBlock);
    let whole = request(desk.namespace, pages(), &desk.keys(0..BLOCKS));
    let answer = drive(stage.world(), stage.engine().lend(whole)).unwrap();
    assert_eq!(answer.map(drop), Err(NotLent::NotAFile));
    stage.world().settle();
    let tables = drive(stage.world(), stage.engine().tables()).unwrap().unwrap();
    assert!(tables.iter().all(|table| table.name != "readers of segments" || table.size == 0));
    stage.close().unwrap();
}

/// Flips a bit in the header of the record that a block lies in.
fn damage(folder: &Path, lent: &PinnedExtents) {
    let range = lent.layers()[0].ranges[0];
    let id = rustix::fs::fstat(&lent.files()[range.file as usize]).unwrap().st_ino;
    let mut found: Option<PathBuf> = None;
    for shard in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        for file in std::fs::read_dir(&shard).into_iter().flatten().map(|entry| entry.unwrap().path()) {
            if rustix::fs::stat(&file).unwrap().st_ino == id {
                found = Some(file);
            }
        }
    }
    let file = std::fs::OpenOptions::new().read(true).write(true).open(found.unwrap()).unwrap();
    // The first layer's first chunk lies at the beginning of the payload, which is behind one page of header.
    let (mut byte, at) = ([0], range.offset - 4096 + 200);
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn a_damaged_header_is_not_lent_and_the_read_that_follows_says_what_is_wrong() {
    let scratch = Scratch::new("lent-damaged");
    let options = HomeOptions { directories: vec![scratch.path().to_owned()], ..options(IoChoice::Auto) };
    let stage = HomeStage::over(&options).unwrap();
    let (desk, store) = (Desk::new(&stage, "damaged"), engine(&stage));
    let keys = desk.keys(0..2);
    desk.store(pages(), &keys, 2, Layout::LayerBlock);
    let whole = || request(desk.namespace, pages(), &keys);
    damage(scratch.path(), &lend(store, whole()));
    // The header that was proven is remembered, and the payload is as it was.
    compare(&desk, &lend(store, whole()), pages(), &keys, &None);
    block_on(store.forget_headers()).unwrap();
    assert!(matches!(refusal(store, whole()), NotLent::Reason(Reason::Header { .. })));
    let (group, coordinate) = pages();
    let asked = ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &keys, lease: None };
    assert_eq!(store.contains(&asked).unwrap().presence, [Presence::Here; 2], "nothing was taken out");
    let (_, end) = desk.read(&desk.read_request(pages(), &keys));
    assert!(matches!(end.failures[..], [(0, Reason::Header { .. }), (1, Reason::Header { .. })]));
    assert_eq!(refusal(store, whole()), NotLent::Reason(Reason::NotHere(keys[0])), "in quarantine by now");
    wait_for_no_readers(store);
    stage.close().unwrap();
}

#[test]
fn what_was_lent_stays_while_everything_around_it_is_written_anew() {
    let stage = open("held", IoChoice::Auto);
    let (desk, store) = (Desk::new(&stage, "held"), engine(&stage));
    fill(&desk, pages(), Layout::LayerBlock);
    let keys = desk.keys(0..6);
    let lent = lend(store, request(desk.namespace, pages(), &keys));
    let before: Vec<_> = lent.layers().iter().map(|layer| ranges(&lent, layer)).collect();
    let target = Target::Keys { column: None, keys: desk.keys(0..BLOCKS) };
    let delete = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    ask(&stage, store.delete(delete)).unwrap();
    let dead = CompactOptions { dead_thousandths: 1, ..CompactOptions::default() };
    block_on(store.compact(dead)).unwrap();
    let mut number = 1000;
    let mut churn = |until: u64| {
        while store.stats().counts.segments_recycled < until {
            desk.store(pages(), &desk.keys(number..number + 5), 2, Layout::LayerBlock);
            number += 5;
        }
    };
    // Three times what the whole store has room for.
    churn(100);
    for (layer, before) in lent.layers().iter().zip(before) {
        assert!(ranges(&lent, layer) == before, "layer {} was given away", layer.layer);
    }
    let held = lent.files().len() as u64;
    assert!(readers(store) >= held);
    // From another thread than the one that borrowed.
    std::thread::scope(|scope| scope.spawn(|| drop(lent)).join().unwrap());
    wait_for_no_readers(store);
    churn(200);
    assert_eq!(
        refusal(store, request(desk.namespace, pages(), &keys)),
        NotLent::Reason(Reason::NotHere(keys[0]))
    );
    stage.close().unwrap();
}

#[test]
fn a_budget_that_was_lowered_is_reached_when_what_was_lent_is_back() {
    let stage = open("budget", IoChoice::Auto);
    let (desk, store) = (Desk::new(&stage, "budget"), engine(&stage));
    for first in (0..150).step_by(5) {
        desk.store(pages(), &desk.keys(first..first + 5), 2, Layout::LayerBlock);
    }
    let keys = desk.keys(0..150);
    let lent = lend(store, request(desk.namespace, pages(), &keys));
    let files = store.segments().len();
    assert!(lent.files().len() >= files - 1, "all but what is open and empty: {files}");
    let half = store.stats().allocated_bytes / 2;
    store.set_budget(half).unwrap();
    for layer in lent.layers() {
        assert_eq!(assembled(&lent, layer, 150 * 2 * 4096).len(), 150 * 2 * 4096);
    }
    assert_eq!(store.segments().len(), files, "a file that was lent has gone");
    drop(lent);
    until("the budget is kept", || store.stats().allocated_bytes <= half);
    stage.close().unwrap();
}

#[test]
fn a_store_closes_while_it_has_lent_something_and_can_be_opened_again() {
    let scratch = Scratch::new("lent-closed");
    let options = HomeOptions { directories: vec![scratch.path().to_owned()], ..options(IoChoice::Auto) };
    let home = Home::open(&options).unwrap();
    let namespace = home.store().register(&fixture::identity("closed"), &fixture::geometry()).unwrap();
    home.close().unwrap();
    let stage = HomeStage::over(&options).unwrap();
    let desk = Desk::new(&stage, "closed");
    assert_eq!(desk.namespace, namespace);
    fill(&desk, pages(), Layout::LayerBlock);
    let keys = desk.keys(0..BLOCKS);
    let lent = lend(engine(&stage), request(namespace, pages(), &keys));
    let store = engine(&stage).clone();
    stage.close().unwrap();
    // Nothing is held any more, the descriptors are good, and nothing was written there yet.
    for layer in lent.layers() {
        assembled(&lent, layer, BLOCKS as usize * 2 * 4096);
    }
    assert!(matches!(refusal(&store, request(namespace, pages(), &keys)), NotLent::Reason(Reason::Busy(_))));
    drop(store);
    let stage = HomeStage::over(&options).unwrap();
    let desk = Desk::new(&stage, "closed");
    let again = lend(engine(&stage), request(namespace, pages(), &keys));
    compare(&desk, &again, pages(), &keys, &None);
    let ids = |lent: &PinnedExtents| lent.files().iter().map(|file| file.id()).collect::<BTreeSet<_>>();
    assert!(ids(&lent).is_disjoint(&ids(&again)), "the same files, opened anew");
    drop((lent, again));
    wait_for_no_readers(engine(&stage));
    stage.close().unwrap();
}

#[test]
fn a_file_has_one_id_while_it_is_open_and_no_other_file_has_it() {
    let (stage, other) = (open("ids", IoChoice::Auto), open("other-ids", IoChoice::Pool));
    let mut seen = BTreeSet::new();
    for stage in [&stage, &other] {
        let (desk, store) = (Desk::new(stage, "ids"), engine(stage));
        fill(&desk, pages(), Layout::LayerBlock);
        fill(&desk, (ODD, Coordinate::Replicated), Layout::FullBlock);
        let whole = || lend(store, request(desk.namespace, pages(), &desk.keys(0..BLOCKS)));
        let of = |lent: &PinnedExtents| -> BTreeSet<(u64, u64)> {
            let inode = |file| rustix::fs::fstat(file).unwrap().st_ino;
            lent.files().iter().map(|file| (file.id(), inode(file))).collect()
        };
        let first = whole();
        let pairs = of(&first);
        assert_eq!(pairs.len(), first.files().len(), "a file stands twice");
        assert_eq!(pairs, of(&whole()));
        drop(first);
        assert_eq!(pairs, of(&whole()));
        for (id, _) in pairs {
            assert!(seen.insert(id), "two stores' files with one id");
        }
    }
    stage.close().unwrap();
    other.close().unwrap();
}

#[test]
fn loans_leave_nothing_behind() {
    let stage = open("tables", IoChoice::Auto);
    let (desk, store) = (Desk::new(&stage, "tables"), engine(&stage));
    fill(&desk, pages(), Layout::LayerBlock);
    let sizes = || {
        wait_for_no_readers(store);
        block_on(store.tables()).unwrap()
    };
    let borrow = |rounds: u64| {
        for round in 0..rounds {
            let keys = desk.keys(round % 7..BLOCKS);
            drop(lend(store, request(desk.namespace, pages(), &keys)));
            let missing = desk.keys(BLOCKS - 1..BLOCKS + 1);
            refusal(store, request(desk.namespace, pages(), &missing));
            // One that was begun and is not waited for.
            let mut left = Box::pin(store.lend(request(desk.namespace, pages(), &keys)));
            let _ = left.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            drop(left);
            if round % 10 == 0 {
                block_on(store.forget_headers()).unwrap();
            }
        }
    };
    borrow(50);
    let before = sizes();
    borrow(400);
    for (before, after) in before.iter().zip(sizes()) {
        // Places for operations grow with how many there were at once, which a busy machine decides.
        assert!(after.size <= before.size + before.size / 8 + 100, "{before:?} became {after:?}");
    }
    stage.close().unwrap();
}

/// Registers a model of one layer with one part of `bytes` bytes a block.
fn opaque(store: &Store, bytes: u64) -> NamespaceId {
    let geometry = Geometry::opaque(bytes).unwrap();
    let identity = Identity { spec_fingerprint: geometry.fingerprint(), ..fixture::identity("opaque") };
    store.register(&identity, &geometry).unwrap()
}

/// Puts blocks of one chunk each and gives their bytes.
fn put_opaque(store: &Store, namespace: NamespaceId, keys: &[BlockKey], bytes: u64) -> Vec<u8> {
    let (group, coordinate) = (Group(0), Coordinate::Replicated);
    let shape = store.shape(namespace, group, coordinate).unwrap();
    let memory = fixture::memory(bytes * keys.len() as u64, 0);
    for (at, _) in keys.iter().enumerate() {
        memory.copy_in(at * bytes as usize, &vec![at as u8 + 1; bytes as usize]);
        memory.copy_in(at * bytes as usize + bytes as usize / 2, &[0xEE]);
    }
    let put = PutRequest {
        namespace,
        group,
        coordinate,
        parent: Parent::Root,
        first_block: Some(0),
        keys: keys.to_vec(),
        from: Placed::blocks(&shape, memory.clone(), keys.len() as u32).unwrap(),
        layout: Some(Layout::LayerBlock),
        durability: Durability::Relaxed,
        expires_after: None,
        origins: None,
        deadline: None,
    };
    let reply = block_on(store.put(put)).unwrap().unwrap();
    assert!(reply.outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored), "{reply:?}");
    memory.to_vec()
}

#[test]
fn long_layers_are_cut_into_stretches_and_a_chunk_that_is_longer_is_not_lent() {
    let mut options = options(IoChoice::Auto);
    options.store.segment_bytes = 64 << 20;
    options.store.budget_bytes = 512 << 20;
    options.store.record_bytes_max = 48 << 20;
    let stage = HomeStage::open("lent-long", &options).unwrap();
    let (store, column) = (engine(&stage), (Group(0), Coordinate::Replicated));
    let keys = fixture::keys(3, 0..5);
    for bytes in [3_000_001, u64::from(DEFAULT_MAX_REGION)] {
        let namespace = opaque(store, bytes);
        let expected = put_opaque(store, namespace, &keys, bytes);
        let lent = lend(store, request(namespace, column, &keys));
        let layer = &lent.layers()[0];
        assert!(layer.ranges.len() >= 3, "{:?}", layer.ranges);
        assert!(assembled(&lent, layer, expected.len()) == expected);
    }
    // With the pages at its ends it is longer than a range may be.
    let bytes = u64::from(DEFAULT_MAX_REGION) + 1;
    let namespace = opaque(store, bytes);
    put_opaque(store, namespace, &keys[..1], bytes);
    let refused = refusal(store, request(namespace, column, &keys[..1]));
    assert!(matches!(refused, NotLent::Reason(Reason::TooMany(_))), "{refused}");
    wait_for_no_readers(store);
    stage.close().unwrap();
}
