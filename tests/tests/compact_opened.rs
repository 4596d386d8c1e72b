//! What offline compaction writes, opened by the engine: compressed or not, in place or as a new store, in every layout
//! and over other shards and directories. Every block is read back in both orders with its bytes; origin ids, times to
//! live and deletes are as they were, and pins have ended with the process that held them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteRequest, Order, Parent, Presence, PutRequest, ReadRequest,
    Target as Dead,
};
use kvarts_fsck::check::{Level, Options as CheckOptions};
use kvarts_fsck::compact::{
    LayoutChoice, Options as CompactOptions, Place, Progress, Report, Target, elsewhere, in_place,
};
use kvarts_fsck::contents::{Fate, read};
use kvarts_fsck::disk::{Disk, DiskWriter, MemoryDisk};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::store::survey;
use kvarts_fsck::window::Tally;
use kvarts_layout::format::body::ENCODING_RAW;
use kvarts_layout::{Coordinate, Group, Layout, OriginId, StoreId};
use kvarts_store::engine::Options;
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture;
use kvarts_tests::sim::{SimWorld, WorldConfig};
use kvarts_tests::stage::{SimStage, Stage, ask};
use kvarts_tests::witness::{directories, examine, media, problems, small};

const ODD: (Group, Coordinate) = (fixture::ODD, Coordinate::Replicated);
const STATE: (Group, Coordinate) = (fixture::STATE, Coordinate::Replicated);
const HOUR: Duration = Duration::from_secs(3600);
/// Those of odd numbers can be compressed.
const PRODUCERS: [u64; 4] = [1, 3, 2, 5];

fn config(directories: u16, hours: u32) -> WorldConfig {
    let mut config = WorldConfig::default();
    config.disk.dirs = directories;
    config.unix_millis += (HOUR * hours).as_millis() as u64;
    config
}

fn origin(n: u64) -> OriginId {
    let mut bytes = [0x5a; 16];
    bytes[..8].copy_from_slice(&n.to_le_bytes());
    OriginId(bytes)
}

/// Puts what the tests are about, and stops cleanly.
fn made() -> (Vec<MemoryDisk>, Options) {
    let options = small(2);
    let world = SimWorld::new(7, &config(1, 0));
    let stage = SimStage::open(&world, &options).unwrap();
    let (one, two) = (Desk::new(&stage, "one"), Desk::new(&stage, "two"));
    one.store(pages(), &one.keys(0..12), PRODUCERS[0], Layout::LayerBlock);
    one.store(ODD, &one.keys(0..12), PRODUCERS[1], Layout::FullBlock);
    one.store(STATE, &one.keys(0..3), PRODUCERS[2], Layout::FullBlock);
    // A session, brought from elsewhere: one block after the other, each with its origin.
    for n in 0..10 {
        let parent = if n == 0 { Parent::Root } else { Parent::Key(two.keys(n - 1..n)[0]) };
        let request = two.request(pages(), &two.keys(n..n + 1), PRODUCERS[3]);
        let origins = Some(vec![origin(n)]);
        let request = PutRequest { parent, first_block: Some(n as u32), origins, ..request };
        assert_eq!(two.outcomes(request), [BlockOutcome::Stored]);
    }
    for (keys, hours) in [(0..4, 1), (4..8, 3)] {
        let request = two.request(ODD, &two.keys(keys), PRODUCERS[1]);
        let parent = Parent::Unknown;
        let request = PutRequest { expires_after: Some(HOUR * hours), parent, first_block: None, ..request };
        assert_eq!(two.outcomes(request), vec![BlockOutcome::Stored; 4]);
    }
    let target = Dead::Keys { column: Some(pages()), keys: one.keys(3..6) };
    let delete = DeleteRequest { namespace: one.namespace, target, deadline: None };
    ask(&stage, stage.store().delete(delete)).unwrap();
    let (group, coordinate) = pages();
    let keys = two.keys(0..10);
    let pinned = ContainsRequest { namespace: two.namespace, group, coordinate, keys: &keys, lease: None };
    assert!(stage.store().pin(&pinned, 1, u64::MAX).unwrap().lease.is_some());
    (directories(&stage.close().unwrap()), options)
}

/// The origin of each block, by namespace, key and group.
type Origins = BTreeMap<([u8; 32], [u8; 32], u32), [u8; 16]>;

/// The origin of each block that counts two hours later, and how many records are encoded.
fn origins(disks: &[MemoryDisk]) -> (Origins, usize) {
    let shared: Vec<Arc<dyn Disk>> = disks.iter().map(|disk| Arc::new(disk.clone()) as _).collect();
    let mut found = Findings::default();
    let store = survey(&shared, &mut found).unwrap().unwrap();
    let options = CheckOptions { threads: 1, ..CheckOptions::default() };
    let contents = read(&store, &options, config(1, 2).unix_millis, &Tally::default(), found);
    let encoded = contents.runs.iter().filter(|run| run.blocks.encoding != ENCODING_RAW && run.live() > 0);
    let encoded = encoded.count();
    let named = contents.runs.iter().flat_map(|run| {
        let live = run.blocks.blocks.iter().zip(&run.fates).filter(|(_, fate)| **fate == Fate::Live);
        live.map(|(name, _)| ((run.namespace.id.0, name.key, run.blocks.group), name.origin))
    });
    (named.collect(), encoded)
}

/// What must be there two hours after it was put, and one that ends an hour later.
fn expect(disks: &[MemoryDisk], options: &Options, note: &str) {
    let checked = examine(disks, Level::Deep).unwrap();
    assert!(checked.findings.is_clean(), "{note}\n{}", problems(&checked));
    let world = SimWorld::with_media(11, &config(disks.len() as u16, 2), media(disks));
    let stage = SimStage::open(&world, options).unwrap();
    let (one, two) = (Desk::new(&stage, "one"), Desk::new(&stage, "two"));
    for order in [Order::Layers, Order::Blocks] {
        let good = |desk: &Desk<'_>, column, keys: std::ops::Range<u64>, producer| {
            let count = (keys.end - keys.start) as u32;
            let request = ReadRequest { order, ..desk.read_request(column, &desk.keys(keys)) };
            let (_, end) = desk.read(&request);
            assert_eq!((end.usable_blocks, &end.failures[..]), (count, &[][..]), "{note}, {order:?}");
            desk.expect_bytes(&request, &(0..count).collect::<Vec<_>>(), producer);
        };
        good(&one, pages(), 0..3, PRODUCERS[0]);
        good(&one, pages(), 6..12, PRODUCERS[0]);
        good(&one, ODD, 0..12, PRODUCERS[1]);
        good(&one, STATE, 0..3, PRODUCERS[2]);
        good(&two, pages(), 0..10, PRODUCERS[3]);
        good(&two, ODD, 4..8, PRODUCERS[1]);
    }
    // One layer alone: of an encoded record nothing else is decoded.
    let middle = ReadRequest { layers: Some(1..2), ..two.read_request(pages(), &two.keys(0..10)) };
    assert_eq!(two.read(&middle).1.usable_blocks, 10, "{note}");
    two.expect_bytes(&middle, &(0..10).collect::<Vec<_>>(), PRODUCERS[3]);
    assert_eq!(absent(&one, pages(), 0..12), [3, 4, 5], "{note}: what was deleted");
    assert_eq!(absent(&two, ODD, 0..8), [0, 1, 2, 3], "{note}: what has expired");
    assert!(stage.engine().stats().index.blocks > 0 && stage.engine().stats().counts.chunks_damaged == 0);
    stage.advance(HOUR + HOUR / 10);
    assert_eq!(absent(&two, ODD, 0..8).len(), 8, "{note}: the other four end an hour later");
    assert_eq!(absent(&two, pages(), 0..10), [0; 0], "{note}: what has no time stays");
    // Compaction kept no pin: the blocks can be deleted by room as any others. A new lease is the only one.
    let (group, coordinate) = pages();
    let keys = two.keys(0..10);
    let pinned = ContainsRequest { namespace: two.namespace, group, coordinate, keys: &keys, lease: None };
    let lease = stage.store().pin(&pinned, 1, u64::MAX).unwrap().lease.unwrap();
    assert!(stage.store().unpin(lease) && !stage.store().unpin(lease), "{note}");
    stage.audit_all();
    stage.close().unwrap();
}

fn absent(
    desk: &Desk<'_>,
    (group, coordinate): (Group, Coordinate),
    range: std::ops::Range<u64>,
) -> Vec<u64> {
    let keys = desk.keys(range.clone());
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &keys, lease: None };
    let found = desk.stage.store().contains(&request).unwrap().presence;
    range.zip(found).filter(|(_, one)| *one == Presence::Absent).map(|(n, _)| n).collect()
}

fn wanted(layout: LayoutChoice, zstd: bool) -> CompactOptions {
    CompactOptions {
        utilisation_percent: 100,
        layout,
        zstd_after_s: zstd.then_some(0),
        now_ms: config(1, 2).unix_millis,
        threads: 1,
        ..CompactOptions::default()
    }
}

fn compacted(disks: &[MemoryDisk], to: Option<(&[MemoryDisk], u32)>, options: &CompactOptions) -> Report {
    let shared: Vec<Arc<dyn Disk>> = disks.iter().map(|disk| Arc::new(disk.clone()) as _).collect();
    let store = survey(&shared, &mut Findings::default()).unwrap().unwrap();
    let writer = |disk: &MemoryDisk| Arc::new(disk.clone()) as Arc<dyn DiskWriter>;
    match to {
        None => {
            let place = |disk| Place { writer: writer(disk), room_bytes: u64::MAX };
            let places: Vec<_> = disks.iter().map(place).collect();
            in_place(&store, &places, options, &Progress::default()).unwrap()
        }
        Some((targets, shards)) => {
            let pair = |disk: &MemoryDisk| (Arc::new(disk.clone()) as Arc<dyn Disk>, writer(disk));
            let directories = targets.iter().map(pair).collect();
            let target = Target { directories, shards, store: StoreId([9; 16]), secret: [7; 32] };
            elsewhere(&store, &target, options, &Progress::default()).unwrap()
        }
    }
}

#[test]
fn the_engine_reads_every_block_of_what_compaction_wrote() {
    let (disks, options) = made();
    let (before, none) = origins(&disks);
    assert_eq!((before.len(), none), (9 + 12 + 3 + 10 + 4, 0));
    let layouts = [LayoutChoice::Keep, LayoutChoice::FullBlock, LayoutChoice::LayerBlock, LayoutChoice::Auto];
    for layout in layouts {
        for zstd in [false, true] {
            for (dirs, shards) in [(0u16, 0u32), (1, 1), (1, 5), (2, 4)] {
                let note = format!("{layout:?}, zstd {zstd}, {shards} shards in {dirs} directories");
                let from: Vec<MemoryDisk> = disks.iter().map(MemoryDisk::fork).collect();
                let new: Vec<MemoryDisk> = (0..dirs).map(|_| MemoryDisk::new()).collect();
                let to = (dirs > 0).then_some((&new[..], shards));
                let report = compacted(&from, to, &wanted(layout, zstd));
                assert_eq!((report.live_blocks, report.expired_blocks), (38, 4), "{note}: {report:?}");
                assert_eq!(report.records_compressed > 0, zstd, "{note}: {report:?}");
                let (written, options) = match dirs {
                    0 => (&from, options.clone()),
                    _ => {
                        let shards_per_directory = shards / u32::from(dirs);
                        (&new, Options { directories: dirs, shards_per_directory, ..options.clone() })
                    }
                };
                let (after, encoded) = origins(written);
                assert!(after == before, "{note}: a block has another origin, or is another");
                assert_eq!(encoded as u64, report.records_compressed, "{note}");
                expect(written, &options, &note);
            }
        }
    }
}

#[test]
fn what_was_compressed_is_read_after_it_was_compacted_again_in_another_layout() {
    let (disks, options) = made();
    let packed = [MemoryDisk::new()];
    compacted(&disks, Some((&packed, 2)), &wanted(LayoutChoice::Keep, true));
    for layout in [LayoutChoice::Keep, LayoutChoice::FullBlock, LayoutChoice::LayerBlock] {
        let again = [MemoryDisk::new(), MemoryDisk::new()];
        compacted(&packed, Some((&again, 2)), &wanted(layout, false));
        let options = Options { directories: 2, shards_per_directory: 1, ..options.clone() };
        expect(&again, &options, &format!("compressed, then {layout:?}"));
    }
}
