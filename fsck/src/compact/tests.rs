//! Compaction of stores in memory that are put together here: what the engine does not write yet, or never would.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvarts_layout::Identity;
use kvarts_layout::arrange::LAYOUT_VERSION;
use kvarts_layout::format::VERSION;
use kvarts_layout::format::body::{
    BlockName, Blocks, ENCODING_RAW, EXTENSION_ENCRYPTION, Extension, Parent, Tombstone,
};
use kvarts_layout::format::members::Membership;
use kvarts_layout::format::names::SUPERBLOCK;
use kvarts_layout::format::superblock::Superblock;
use kvarts_layout::identity::{Arrangement, Quantisation, TenantSalt};
use kvarts_layout::spec::Geometry;
use kvarts_layout::{StoreId, format::Secret};

use super::graves::Graves;
use super::inventory::{Inventory, Space};
use super::sink::{Sink, Start, Statement, write_checkpoint};
use super::source::Made;
use super::*;
use crate::check::{Level, Options as CheckOptions, check};
use crate::contents;
use crate::disk::{Disk, MemoryDisk};
use crate::findings::Findings;
use crate::segment::Keyring;
use crate::store::{Store, survey};
use crate::window::Tally;

const BLOCK: usize = 4000;
const NOW_MS: u64 = 2_000_000_000_000;

fn space() -> Space {
    let text = |text: &str| text.to_owned();
    let geometry = Geometry::opaque(BLOCK as u64).unwrap();
    let identity = Identity {
        model: text("small"),
        revision: text("one"),
        tokenizer: text("none"),
        adapter: text("none"),
        kv_dtype: text("bf16"),
        quantisation: Quantisation { recipe: text("none"), scales: text("none") },
        rope: text("none"),
        window: text("none"),
        arrangement: Arrangement { engine: text("test"), layout: text("flat"), version: text("1") },
        block_tokens: 16,
        spec_fingerprint: geometry.fingerprint(),
        tenant_salt: TenantSalt(Vec::new()),
        extras: BTreeMap::new(),
    };
    Space {
        id: identity.namespace_id().unwrap().0,
        identity: identity.encode().unwrap(),
        spec_id: geometry.fingerprint().0,
        spec: geometry.canonical_bytes(),
        geometry,
        block_tokens: 16,
    }
}

fn keyring() -> Keyring {
    Keyring { store: StoreId([3; 16]), secret: Secret::new([5; 32]), segment_bytes: 64 << 10 }
}

/// A record of one block under the key `n`, whose bytes compress well.
fn block(n: u8, parent: Parent) -> Made {
    let mut image = vec![0u8; 4096];
    image[..BLOCK].iter_mut().enumerate().for_each(|(at, byte)| *byte = n ^ (at / 100) as u8);
    let blocks = Blocks {
        coordinate: 0,
        created_ms: NOW_MS - 5_000_000,
        expires_ms: 0,
        namespace: 0,
        spec: 0,
        group: 0,
        blocks: vec![BlockName { key: [n; 32], origin: [n ^ 0xff; 16] }],
        stored_lengths: Vec::new(),
        extensions: Vec::new(),
        first_block: None,
        layout_version: LAYOUT_VERSION,
        layout: 0,
        encoding: ENCODING_RAW,
        parent,
    };
    Made {
        digests: vec![crc32fast::hash(&image[..BLOCK])],
        blocks,
        space: 0,
        payload_bytes: BLOCK as u64,
        image,
        last_used_s: NOW_MS / 1000 - 4000,
        compressed: false,
        rearranged: false,
    }
}

/// A store of one shard: each list of records in a segment of its own.
fn store(segments: Vec<Vec<Made>>, graves: &Graves) -> MemoryDisk {
    let disk = MemoryDisk::new();
    let writer: Arc<dyn crate::disk::DiskWriter> = Arc::new(disk.clone());
    writer.make_folder("shard-0000").unwrap();
    let mut sink =
        Sink::new(Arc::clone(&writer), &keyring(), Start { shard: 0, next_number: 0, sequence: 1 }, NOW_MS);
    let spaces = [space()];
    for records in segments {
        records.into_iter().for_each(|made| sink.write(&spaces, made).unwrap());
        sink.seal().unwrap();
    }
    let (segments, records) = (sink.sealed.clone(), sink.records.clone());
    let statement = Statement { segments, records, graves, next_sequence: sink.sequence };
    write_checkpoint(&*writer, &keyring(), keyring().position(0, 0).under(1), NOW_MS, statement).unwrap();
    let superblock = Superblock {
        store: keyring().store,
        directory: 0,
        sequence: 1,
        secret: keyring().secret,
        created_ms: 1,
        segment_bytes: keyring().segment_bytes,
        min_reader: VERSION,
        clean: false,
        directories: 1,
        shards_total: 1,
        shards: vec![0],
        membership: Membership::default(),
    };
    disk.plant(SUPERBLOCK, [superblock.encode(0).unwrap(), superblock.encode(1).unwrap()].concat());
    disk.fork()
}

fn look(disk: &MemoryDisk) -> Store {
    let disks: [Arc<dyn Disk>; 1] = [Arc::new(disk.clone())];
    survey(&disks, &mut Findings::default()).unwrap().unwrap()
}

fn options() -> Options {
    Options { utilisation_percent: 100, now_ms: NOW_MS, threads: 1, ..Options::default() }
}

fn compact(disk: &MemoryDisk, options: &Options) -> Result<Report, Refusal> {
    let place = Place { writer: Arc::new(disk.clone()), room_bytes: u64::MAX };
    in_place(&look(disk), &[place], options, &Progress::default())
}

fn is_clean(disk: &MemoryDisk) {
    let mut found = Findings::default();
    let disks: [Arc<dyn Disk>; 1] = [Arc::new(disk.clone())];
    let store = survey(&disks, &mut found).unwrap().unwrap();
    let check_options = CheckOptions { level: Level::Deep, threads: 1, ..CheckOptions::default() };
    let checked = check(&store, &check_options, &Tally::default(), found).unwrap();
    assert!(checked.findings.is_clean(), "{:?}", checked.findings.problems);
}

/// Every live block's key, origin, digest, and when it was last used. Reading them decodes and verifies each.
fn live(disk: &MemoryDisk) -> BTreeMap<u8, ([u8; 16], u32, u64)> {
    let (store, options) = (look(disk), options());
    let inventory = Inventory::take(&store, NOW_MS, 1).unwrap();
    let plan = plan::Plan::everything(&inventory, &options, store.keyring.segment_bytes);
    let mut reader = source::Reader::new(&store, &inventory, &options).unwrap();
    let mut all = BTreeMap::new();
    for group in &plan.groups {
        let made = reader.make(&plan, group).unwrap();
        for (name, digest) in made.blocks.blocks.iter().zip(&made.digests) {
            let last = all.insert(name.key[0], (name.origin, *digest, made.last_used_s));
            assert_eq!(last, None, "a block twice");
        }
    }
    all
}

fn chain(numbers: std::ops::Range<u8>) -> Vec<Made> {
    let parent = |n: u8| if n == 0 { Parent::Root } else { Parent::Key([n - 1; 32]) };
    numbers.map(|n| block(n, parent(n))).collect()
}

#[test]
fn cold_blocks_are_compressed_once_and_every_one_decodes_to_what_its_digest_says() {
    let disk = store(vec![chain(0..6), chain(6..10)], &Graves::default());
    let before = live(&disk);
    assert_eq!(before.len(), 10);
    let cold = Options { zstd_after_s: Some(3600), ..options() };
    let report = compact(&disk, &cold).unwrap();
    assert!(report.records_compressed > 0 && report.records_merged > 4, "{report:?}");
    assert!(report.bytes_written * 3 < report.bytes_read, "{report:?}");
    is_clean(&disk);
    assert_eq!(live(&disk), before, "origins, digests and last use are kept");
    let again = disk.fork();
    compact(&again, &cold).unwrap();
    assert_eq!(again.steps(), [], "what is compressed stays as it is");
    // Arranged otherwise it stays compressed.
    let other = Options { layout: LayoutChoice::LayerBlock, ..options() };
    assert!(compact(&disk, &other).unwrap().records_rearranged > 0);
    is_clean(&disk);
    assert_eq!(live(&disk), before);
    let warm = store(vec![chain(0..6)], &Graves::default());
    let hot = Options { zstd_after_s: Some(5000), ..options() };
    assert_eq!(compact(&warm, &hot).unwrap().records_compressed, 0, "used too lately");
}

#[test]
fn a_tombstone_stays_for_as_long_as_a_segment_that_began_before_it() {
    let mut graves = Graves::default();
    // Block 1 of the first segment and block 11 of the second were deleted.
    for key in [1u8, 11] {
        graves.bury(
            space().id,
            &Tombstone { below: 1000, coordinate: None, namespace: 0, group: None, key: [key; 32] },
        );
    }
    let mut locked = block(0, Parent::Unknown);
    locked.blocks.extensions.push(Extension { id: EXTENSION_ENCRYPTION, critical: true, bytes: vec![1] });
    let fixed = store(
        vec![
            vec![locked, block(1, Parent::Unknown)],
            vec![block(11, Parent::Unknown), block(12, Parent::Unknown)],
        ],
        &graves,
    );
    let report = compact(&fixed, &options()).unwrap();
    assert_eq!((report.segments_fixed, report.graves_before, report.graves_after), (1, 2, 2), "{report:?}");
    let inventory = Inventory::take(&look(&fixed), NOW_MS, 1).unwrap();
    assert_eq!((inventory.live_blocks, inventory.buried_blocks), (2, 1), "block 1 did not come back");
    let free = store(
        vec![vec![block(1, Parent::Unknown)], vec![block(11, Parent::Unknown), block(12, Parent::Unknown)]],
        &graves,
    );
    let report = compact(&free, &options()).unwrap();
    assert_eq!((report.graves_before, report.graves_after), (2, 0), "{report:?}");
    assert_eq!(live(&free).into_keys().collect::<Vec<_>>(), [12]);
    is_clean(&free);
    let target = Target {
        directories: vec![(Arc::new(MemoryDisk::new()), Arc::new(MemoryDisk::new()))],
        shards: 1,
        store: StoreId([1; 16]),
        secret: [2; 32],
    };
    let refused = elsewhere(&look(&fixed), &target, &options(), &Progress::default());
    assert!(matches!(refused, Err(Refusal::Cannot(_))), "{refused:?}");
}

#[test]
fn chains_that_bite_their_tails_and_forks_lose_no_block() {
    let circle = vec![
        block(1, Parent::Key([3; 32])),
        block(2, Parent::Key([1; 32])),
        block(3, Parent::Key([2; 32])),
        block(9, Parent::Key([9; 32])),
        block(4, Parent::Key([2; 32])),
        block(5, Parent::Key([2; 32])),
    ];
    let disk = store(vec![circle], &Graves::default());
    let before = live(&disk);
    assert_eq!(before.len(), 6);
    compact(&disk, &options()).unwrap();
    is_clean(&disk);
    assert_eq!(live(&disk), before);
    let again = disk.fork();
    compact(&again, &options()).unwrap();
    assert_eq!(live(&again), before);
}

#[test]
fn a_chunk_that_does_not_match_stops_it_before_its_segment_goes() {
    let disk = store(vec![chain(0..3), chain(3..6)], &Graves::default());
    let path = "shard-0000/segment-00000001";
    let at = disk.contents(path).unwrap().len() / 5;
    let spoilt = disk.fork();
    let find = |bytes: &[u8]| (at..).find(|at| bytes[*at..*at + 8] == [5 ^ 1; 8]).unwrap();
    spoilt.tamper(path, |bytes| {
        let at = find(bytes);
        bytes[at] ^= 1;
    });
    let refused = compact(&spoilt, &options());
    assert!(matches!(&refused, Err(Refusal::Damaged(what)) if what.contains("digest")), "{refused:?}");
    assert!(refused.unwrap_err().to_string().contains("kvarts fsck"));
    for segment in ["shard-0000/segment-00000000", path] {
        assert!(spoilt.contents(segment).is_some(), "{segment} has gone");
    }
    let torn = disk.fork();
    torn.tamper(path, |bytes| bytes[..4096].fill(0x5a));
    assert!(matches!(compact(&torn, &options()), Err(Refusal::Unsound(_))));
    assert_eq!(torn.steps(), [], "damage is refused before anything is written");
}

#[test]
fn what_has_expired_is_left_out_and_what_was_given_longer_stays() {
    let mut records = chain(0..3);
    records[1].blocks.expires_ms = NOW_MS - 1;
    records[2].blocks.expires_ms = NOW_MS + 1;
    let disk = store(vec![records], &Graves::default());
    let report = compact(&disk, &options()).unwrap();
    assert_eq!((report.expired_blocks, report.live_blocks), (1, 2));
    is_clean(&disk);
    assert_eq!(live(&disk).into_keys().collect::<Vec<_>>(), [0, 2]);
    let later = Options { now_ms: NOW_MS + 1, ..options() };
    assert_eq!(compact(&disk, &later).unwrap().live_blocks, 1, "its time goes with it");
}

/// A store whose newest checkpoint alone says that block 1 was deleted; the one before it is there, too.
fn with_a_delete_in_the_newest_checkpoint() -> MemoryDisk {
    let mut graves = Graves::default();
    graves.bury(
        space().id,
        &Tombstone { below: 1000, coordinate: None, namespace: 0, group: None, key: [1; 32] },
    );
    let disk = store(vec![chain(0..3)], &Graves::default());
    let none = Graves::default();
    for (slot, sequence, graves) in [(1, 2, &none), (0, 3, &graves)] {
        let statement = Statement { segments: Vec::new(), records: Vec::new(), graves, next_sequence: 900 };
        write_checkpoint(&disk, &keyring(), keyring().position(0, slot).under(sequence), NOW_MS, statement)
            .unwrap();
    }
    disk.fork()
}

#[test]
fn beside_a_damaged_checkpoint_nothing_is_written_and_nothing_that_was_deleted_comes_back() {
    let sound = with_a_delete_in_the_newest_checkpoint();
    assert_eq!(live(&sound).into_keys().collect::<Vec<_>>(), [0, 2], "block 1 is deleted");
    let path = crate::checkpoint::path(0, 0);
    let flip = |at: usize| {
        let path = path.clone();
        move |disk: &MemoryDisk| disk.tamper(&path, |bytes| bytes[at] ^= 1)
    };
    type Damage<'a> = (&'a str, Box<dyn Fn(&MemoryDisk) + 'a>);
    let damages: Vec<Damage<'_>> = vec![
        ("header", Box::new(flip(100))),
        ("first chunk", Box::new(flip(4096 + 100))),
        ("zeroed", Box::new(|disk| disk.tamper(&path, |bytes| bytes.fill(0)))),
        ("cut off", Box::new(|disk| disk.tamper(&path, |bytes| bytes.truncate(4096)))),
        ("media", Box::new(|disk| disk.spoil(&path, 1))),
        ("may not be opened", Box::new(|disk| disk.refuse(&path))),
    ];
    for (name, damage) in damages {
        let disk = sound.fork();
        damage(&disk);
        let new = MemoryDisk::new();
        let target = Target {
            directories: vec![(Arc::new(new.clone()), Arc::new(new.clone()))],
            shards: 1,
            store: StoreId([1; 16]),
            secret: [2; 32],
        };
        let options = options();
        for refused in [
            compact(&disk, &options),
            compact(&disk, &Options { dry_run: true, ..options.clone() }),
            elsewhere(&look(&disk), &target, &options, &Progress::default()),
        ] {
            let said = match &refused {
                Err(refusal @ (Refusal::Unsound(_) | Refusal::Cannot(_))) => refusal.to_string(),
                other => panic!("{name}: {other:?}"),
            };
            assert!(said.contains(&path) && said.contains("nothing was written"), "{name}: {said}");
            // What cannot be read is not for a repair.
            let helps = matches!(&refused, Err(Refusal::Unsound(_)));
            assert_eq!(helps, said.contains("kvarts fsck --repair"), "{name}: {said}");
            assert_eq!(helps, !["media", "may not be opened"].contains(&name), "{name}: {said}");
        }
        assert_eq!((disk.steps(), new.steps()), (Vec::new(), Vec::new()), "{name}: something was written");
        let quick = CheckOptions { level: Level::Quick, threads: 1, ..CheckOptions::default() };
        let seen = contents::read(&look(&disk), &quick, NOW_MS, &Tally::default(), Findings::default());
        assert!(seen.may_have_forgotten_deletes() && !seen.findings.is_clean(), "{name}: no finding says so");
    }
    let older = sound.fork();
    older.tamper(&crate::checkpoint::path(0, 1), |bytes| bytes[4096 + 100] ^= 1);
    compact(&older, &options()).unwrap();
    assert_eq!(live(&older).into_keys().collect::<Vec<_>>(), [0, 2], "an older one counts for nothing");
}

#[test]
fn what_a_newer_program_wrote_into_a_tail_stays_where_it_is() {
    let disk = store(vec![chain(0..3)], &Graves::default());
    let mut sink = Sink::new(
        Arc::new(disk.clone()),
        &keyring(),
        Start { shard: 0, next_number: 1, sequence: 50 },
        NOW_MS,
    );
    let mut newer = block(9, Parent::Unknown);
    newer.blocks.extensions.push(Extension { id: 0x7777, critical: true, bytes: vec![1] });
    sink.write(&[space()], newer).unwrap();
    let tail = disk.contents("shard-0000/segment-00000001").unwrap();
    let report = compact(&disk, &options()).unwrap();
    assert_eq!(report.segments_fixed, 1, "{report:?}");
    assert_eq!(disk.contents("shard-0000/segment-00000001"), Some(tail), "the only copy of block 9 is gone");
    is_clean(&disk);
}

#[test]
fn a_dry_run_says_to_the_byte_what_a_real_run_does_and_writes_nothing() {
    let mut graves = Graves::default();
    graves.bury(
        space().id,
        &Tombstone { below: 1000, coordinate: None, namespace: 0, group: None, key: [11; 32] },
    );
    let mut locked = block(40, Parent::Unknown);
    locked.blocks.extensions.push(Extension { id: EXTENSION_ENCRYPTION, critical: true, bytes: vec![1] });
    let loose = |n: u8| block(n, Parent::Unknown);
    let stores = [
        ("empty", store(Vec::new(), &Graves::default())),
        ("chains", store(vec![chain(0..6), chain(6..10)], &Graves::default())),
        ("many", store((0..9u8).map(|n| chain(n * 10..n * 10 + 7)).collect(), &graves)),
        ("dead", store(vec![vec![loose(1)], vec![loose(11), loose(12)]], &graves)),
    ];
    let fixed = store(vec![vec![locked, loose(1)], vec![loose(11), loose(12)]], &graves);
    let (cold, all_cold) = (Some(3600), Some(0));
    let (mut wrote, mut compressed) = (0, 0);
    for (name, disk) in stores.iter().chain(&[("fixed", fixed.clone())]) {
        for (layout, zstd_after_s, merge) in [
            (LayoutChoice::Keep, None, true),
            (LayoutChoice::LayerBlock, None, true),
            (LayoutChoice::Keep, None, false),
            (LayoutChoice::Keep, cold, true),
            (LayoutChoice::LayerBlock, all_cold, true),
        ] {
            let real = Options { layout, zstd_after_s, merge, ..options() };
            let dry = Options { dry_run: true, ..real.clone() };
            let note = format!("{name}, {real:?}");
            for room_bytes in [u64::MAX, 3 * keyring().segment_bytes] {
                let disk = disk.fork();
                let place = || [Place { writer: Arc::new(disk.clone()), room_bytes }];
                let said = in_place(&look(&disk), &place(), &dry, &Progress::default()).unwrap();
                assert_eq!(disk.steps(), [], "{note}: a dry run wrote");
                let done = in_place(&look(&disk), &place(), &real, &Progress::default()).unwrap();
                assert_eq!(said, Report { dry_run: true, ..done.clone() }, "{note}, room {room_bytes}");
                (wrote, compressed) = (wrote + done.records_written, compressed + done.records_compressed);
            }
            for shards in (1..4).filter(|_| *name != "fixed") {
                let new = MemoryDisk::new();
                let target = Target {
                    directories: vec![(Arc::new(new.clone()), Arc::new(new.clone()))],
                    shards,
                    store: StoreId([1; 16]),
                    secret: [2; 32],
                };
                let said = elsewhere(&look(disk), &target, &dry, &Progress::default()).unwrap();
                assert_eq!(new.steps(), [], "{note}: a dry run wrote");
                let done = elsewhere(&look(disk), &target, &real, &Progress::default()).unwrap();
                assert_eq!(said, Report { dry_run: true, ..done }, "{note}, {shards} shards");
            }
        }
    }
    assert!(wrote > 50 && compressed > 10, "{wrote} {compressed}");
}
