//! Footers and trailers of segments that have lost blocks to eviction, damaged. After a start and after a repair the engine
//! serves the blocks that it served before. Evicted blocks are not answered, and no program calls them damaged.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, Durability, KvStore, Order, Presence, PutRequest, ReadEvent, ReadRequest,
    Verify,
};
use kvarts_contract::class::Class;
use kvarts_fsck::check::{Level, Options as CheckOptions};
use kvarts_fsck::contents::{Contents, Fate, State, read};
use kvarts_fsck::disk::{Disk, DiskWriter, MemoryDisk};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::repair::{Site, repair};
use kvarts_fsck::store::survey;
use kvarts_fsck::window::Tally;
use kvarts_layout::format::seal::claimed_structure;
use kvarts_layout::format::{PAGE, Structure};
use kvarts_layout::{BlockKey, Coordinate, Layout, NamespaceId};
use kvarts_store::engine::{EvictionPolicy, Limits, Options, Store};
use kvarts_tests::audit;
use kvarts_tests::campaign::{Driven, drive, reopen};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture::{self, Style};
use kvarts_tests::sim::{Media, Seed, SimWorld, WorldConfig};
use kvarts_tests::stage::{SimStage, Stage};
use kvarts_tests::witness::{directories, examine, media, problems};

const SEGMENT: u64 = 256 << 10;
/// Blocks of a record.
const RUN: u64 = 8;
/// Keys that are put.
const KEYS: u64 = 120 * RUN;
const NAME: &str = "holed";

fn options() -> Options {
    Options {
        shards_per_directory: 2,
        segment_bytes: SEGMENT,
        budget_bytes: 3 << 20,
        eviction: EvictionPolicy::Lru,
        executors: 1,
        limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
        ..Options::default()
    }
}

/// What a store says of its keys.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Found {
    /// Promised.
    here: BTreeSet<u64>,
    /// Read, with the bytes that were put.
    served: BTreeSet<u64>,
}

async fn ask(store: &Store) -> Found {
    let namespace = store.register(&fixture::identity(NAME), &fixture::geometry()).unwrap();
    let (group, coordinate) = pages();
    let keys = fixture::keys(chain(namespace), 0..KEYS);
    let request = ContainsRequest { namespace, group, coordinate, keys: &keys, lease: None };
    let here = store.contains(&request).unwrap().presence;
    let mut found = Found { here: BTreeSet::new(), served: BTreeSet::new() };
    for (n, (key, here)) in (0..).zip(keys.iter().zip(here)) {
        if here == Presence::Here {
            found.here.insert(n);
        }
        if serves(store, namespace, key).await {
            found.served.insert(n);
        }
    }
    found
}

fn chain(namespace: NamespaceId) -> u64 {
    u64::from_le_bytes(namespace.0[..8].try_into().unwrap())
}

async fn serves(store: &Store, namespace: NamespaceId, key: &BlockKey) -> bool {
    let (group, coordinate) = pages();
    let shape = fixture::shape(group, coordinate);
    let into = fixture::place(&shape, 1, Style::Blocks, 0).unwrap();
    let stream = store.read(ReadRequest {
        namespace,
        group,
        coordinate,
        keys: vec![*key],
        layers: None,
        order: Order::Blocks,
        into: into.clone(),
        verify: Verify::Always,
        class: Class::Foreground,
        deadline: None,
    });
    let stream = stream.unwrap();
    let end = loop {
        if let ReadEvent::End(end) = stream.next().await {
            break end;
        }
    };
    let bytes = fixture::content(key, group, coordinate, 1, &shape);
    assert!(!end.failures.is_empty() || fixture::read_block(&into, 0, &shape) == bytes, "other bytes");
    end.failures.is_empty()
}

/// What a store answers that is opened on this image; how much it has allocated, how many problems recovery met, and
/// the image that it leaves.
fn start(image: Media) -> (Found, u64, u64, Media) {
    let opened = reopen(Seed(1), &WorldConfig::default(), &options(), image).unwrap();
    let found = match drive(&opened.world, u64::MAX, ask(&opened.store)) {
        Driven::Done(found) => found,
        other => panic!("{other:?}"),
    };
    audit::bound(&opened.store.stats().space, &opened.world.disk().media()).unwrap();
    let allocated = opened.store.stats().allocated_bytes;
    let problems = opened.store.recovery().iter().map(|report| report.problems).sum();
    (found, allocated, problems, opened.world.kill())
}

/// A store in which most records have lost some of their blocks, stopped in order.
fn holed(durability: Durability) -> Media {
    let world = SimWorld::new(71, &WorldConfig::default());
    let stage = SimStage::open(&world, &options()).unwrap();
    let desk = Desk::new(&stage, NAME);
    for first in (0..KEYS).step_by(RUN as usize) {
        let request = desk.request(pages(), &desk.keys(first..first + RUN), 1);
        desk.outcomes(PutRequest { layout: Some(Layout::FullBlock), durability, ..request });
        stage.advance(Duration::from_secs(20));
        // Of every record the first blocks are used again and again.
        if first % (8 * RUN) == 0 {
            for run in (0..first).step_by(RUN as usize) {
                desk.read(&desk.read_request(pages(), &desk.keys(run..run + 2)));
            }
        }
    }
    let counts = stage.engine().stats().counts;
    assert!(counts.blocks_evicted > 100 && counts.bytes_punched > 1 << 20, "{counts:?}");
    stage.close().unwrap()
}

/// Where the structures of this kind of sealed segments lie of which some blocks were evicted and others not: path and offset.
fn places(disk: &MemoryDisk, structure: Structure) -> Vec<(String, usize)> {
    let contents = offline(disk);
    let holds = |shard: u32, segment: u32, fate: Fate| {
        let runs = contents.runs.iter().filter(|run| (run.shard as u32, run.segment) == (shard, segment));
        runs.flat_map(|run| &run.fates).any(|one| *one == fate)
    };
    // One in which nothing is live may be freed by the start.
    let holed = |shard, segment| holds(shard, segment, Fate::Live) && holds(shard, segment, Fate::Evicted);
    let mut all = Vec::new();
    for one in
        contents.segments.iter().filter(|one| one.state == State::Sealed && holed(one.shard, one.segment))
    {
        let path = format!("shard-{:04}/segment-{:08}", one.shard, one.segment);
        let bytes = disk.contents(&path).unwrap();
        let at = bytes.chunks(PAGE).rposition(|page| claimed_structure(page) == Some(structure)).unwrap();
        all.push((path, at * PAGE));
    }
    all
}

/// What the offline reader finds.
fn offline(disk: &MemoryDisk) -> Contents {
    let disks: [Arc<dyn Disk>; 1] = [Arc::new(disk.clone())];
    let store = survey(&disks, &mut Findings::default()).unwrap().unwrap();
    let options = CheckOptions { threads: 1, ..CheckOptions::default() };
    read(&store, &options, 0, &Tally::default(), Findings::default())
}

/// The keys that it calls live.
fn live(disk: &MemoryDisk) -> BTreeSet<[u8; 32]> {
    let contents = offline(disk);
    let of = |run: &kvarts_fsck::contents::Run| {
        let named = run.blocks.blocks.iter().zip(&run.fates);
        named.filter(|(_, fate)| **fate == Fate::Live).map(|(name, _)| name.key).collect::<Vec<_>>()
    };
    contents.runs.iter().flat_map(of).collect()
}

fn put_right(disk: &MemoryDisk) -> usize {
    let site = Site { disk: Arc::new(disk.clone()), writer: Some(Arc::new(disk.clone())) };
    let options = CheckOptions { threads: 1, ..CheckOptions::default() };
    let repaired = repair(&[site], &options, &Tally::default()).unwrap();
    assert!(repaired.actions.iter().all(|action| action.failed.is_none()), "{:?}", repaired.actions);
    repaired.actions.len()
}

/// The store is damaged at these places and nowhere else, and that costs nothing.
fn expect_no_cost(sound: &MemoryDisk, damaged: &MemoryDisk, places: u64, note: &str) {
    let (before, allocated, _, _) = start(media(std::slice::from_ref(sound)));
    assert_eq!(before.here, before.served, "{note}: a sound store");
    assert!(before.here.len() > 60, "{note}: {} blocks", before.here.len());

    let disks = std::slice::from_ref(damaged);
    let checked = examine(disks, Level::Deep).unwrap();
    assert_eq!(checked.findings.problem_count, places, "{note}\n{}", problems(&checked));
    assert_eq!(live(damaged), live(sound), "{note}: what the offline reader finds");

    let (after, now, problems_met, left) = start(media(disks));
    assert_eq!(after, before, "{note}: a start");
    assert_eq!(problems_met, places, "{note}: recovery");
    // A footer may lie where there was a hole.
    assert!(now <= allocated + places * 4 * PAGE as u64, "{note}: {allocated} bytes, then {now}");
    let checked = examine(&directories(&left), Level::Deep).unwrap();
    assert!(checked.findings.is_clean(), "{note}: after a start\n{}", problems(&checked));
    assert_eq!(start(left).0, before, "{note}: a second start");

    assert!(put_right(damaged) > 0, "{note}");
    let checked = examine(disks, Level::Deep).unwrap();
    assert!(checked.findings.is_clean(), "{note}: after repair\n{}", problems(&checked));
    assert_eq!(put_right(damaged), 0, "{note}: it is repaired twice");
    assert_eq!(live(damaged), live(sound), "{note}: what the offline reader finds after repair");
    assert_eq!(start(media(disks)).0, before, "{note}: after repair");
}

#[test]
fn a_damaged_footer_or_trailer_costs_no_block_and_brings_none_back() {
    for durability in [Durability::Durable, Durability::Relaxed] {
        let sound = directories(&holed(durability)).remove(0);
        for structure in [Structure::Trailer, Structure::Footer] {
            let places = places(&sound, structure);
            assert!(places.len() > 3, "{places:?}");
            for some in [&places[1..2], &places[2..3], &places[..]] {
                let damaged = sound.fork();
                for (path, at) in some {
                    damaged.tamper(path, |bytes| bytes[at + 200] ^= 4);
                }
                let note = format!("{durability:?}, {structure:?}, {some:?}");
                expect_no_cost(&sound, &damaged, some.len() as u64, &note);
            }
        }
    }
}

/// What a footer lists was durable before it: without a trailer, and without a checkpoint that knows of the seal, it still
/// says that what is not there was evicted.
#[test]
fn a_trailer_that_is_zeroed_before_a_checkpoint_knows_of_it_costs_no_block() {
    for durability in [Durability::Durable, Durability::Relaxed] {
        let sound = directories(&holed(durability)).remove(0);
        for path in sound.files().into_iter().filter(|path| path.contains("checkpoint")) {
            sound.remove(&path);
        }
        let (before, ..) = start(media(std::slice::from_ref(&sound)));
        assert!(before.here == before.served && before.here.len() > 60, "{before:?}");
        let damaged = sound.fork();
        let places = places(&sound, Structure::Trailer);
        assert!(places.len() > 3, "{places:?}");
        for (path, at) in &places {
            damaged.tamper(path, |bytes| bytes[*at..at + PAGE].fill(0));
        }
        assert_eq!(live(&damaged), live(&sound), "{durability:?}: what the offline reader finds");
        let (after, _, problems_met, left) = start(media(std::slice::from_ref(&damaged)));
        assert_eq!((after, problems_met), (before.clone(), 0), "{durability:?}: a start");
        let checked = examine(&directories(&left), Level::Deep).unwrap();
        assert!(checked.findings.is_clean(), "{durability:?}: after a start\n{}", problems(&checked));
        assert_eq!(start(left).0, before, "{durability:?}: a second start");
    }
}

/// A power cut in the middle of an eviction leaves some of the pages, in any order; then the trailer is damaged.
#[test]
fn what_is_left_of_an_eviction_that_power_cut_short_is_not_called_damage() {
    let sound = directories(&holed(Durability::Durable)).remove(0);
    let whole = sound.fork();
    let mut left = 0;
    for (path, _) in places(&sound, Structure::Trailer) {
        for (at, len) in sound.holes(&path) {
            if len >= 3 * PAGE as u64 {
                let middle = at as usize + PAGE;
                whole.tamper(&path, |bytes| bytes[middle..middle + PAGE].fill(0x77));
                left += 1;
            }
        }
    }
    assert!(left > 10, "{left}");
    assert!(examine(std::slice::from_ref(&whole), Level::Deep).unwrap().findings.is_clean());
    let damaged = whole.fork();
    let places = places(&sound, Structure::Trailer);
    for (path, at) in &places {
        damaged.tamper(path, |bytes| bytes[at + 200] ^= 4);
    }
    expect_no_cost(&whole, &damaged, places.len() as u64, "half evicted");
}

/// Power was cut while a whole record was being evicted: of its long header a page is a hole, and the first is not.
#[test]
fn a_record_whose_header_is_partly_a_hole_is_gone_whatever_became_of_the_trailer() {
    let world = SimWorld::new(73, &WorldConfig::default());
    let stage = SimStage::open(&world, &options()).unwrap();
    let desk = Desk::new(&stage, NAME);
    let small = (fixture::ODD, Coordinate::Replicated);
    for first in (0..600).step_by(200) {
        let outcomes = desk.outcomes(desk.request(small, &desk.keys(first..first + 200), 1));
        assert_eq!(outcomes, vec![BlockOutcome::Stored; 200]);
    }
    let sound = directories(&stage.close().unwrap()).remove(0);
    let holed = sound.fork();
    let (path, at) = long_header(&holed).expect("a header of several pages");
    DiskWriter::punch(&holed, &path, (at + PAGE) as u64, PAGE as u64).unwrap();
    let damaged = holed.fork();
    damaged.tamper(&path, |bytes| {
        let trailer =
            bytes.chunks(PAGE).rposition(|page| claimed_structure(page) == Some(Structure::Trailer));
        bytes[trailer.unwrap() * PAGE + 200] ^= 4;
    });
    assert!(live(&holed).len() < live(&sound).len(), "nothing went with the hole");
    assert_eq!(live(&damaged), live(&holed), "the offline reader");
    let checked = examine(std::slice::from_ref(&damaged), Level::Deep).unwrap();
    assert_eq!(checked.findings.problem_count, 1, "{}", problems(&checked));
    for (disk, damage) in [(&holed, 0), (&damaged, 1)] {
        let opened = reopen(Seed(1), &WorldConfig::default(), &options(), media(&[disk.fork()])).unwrap();
        let met: u64 = opened.store.recovery().iter().map(|report| report.problems).sum();
        assert_eq!(met, damage);
        let left = directories(&opened.world.kill()).remove(0);
        assert_eq!(live(&left), live(&holed), "{damage}: after a start");
    }
}

/// A record's header of more than a page: file and place.
fn long_header(disk: &MemoryDisk) -> Option<(String, usize)> {
    let word = |page: &[u8]| u32::from_le_bytes(page[72..76].try_into().unwrap()) as usize;
    disk.files().into_iter().filter(|path| path.contains("segment-")).find_map(|path| {
        let bytes = disk.contents(&path)?;
        let long = |page: &[u8]| claimed_structure(page) == Some(Structure::Record) && word(page) > PAGE;
        let at = bytes.chunks(PAGE).position(long)?;
        Some((path, at * PAGE))
    })
}
