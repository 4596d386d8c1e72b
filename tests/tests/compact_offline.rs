//! Offline compaction of stores that the engine made: afterwards the engine finds every live block with its bytes and
//! nothing that was deleted, the checker finds nothing wrong, and a power cut at any write changes neither.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use kvarts_fsck::check::{Level, Options as CheckOptions, Outcome, each_segment};
use kvarts_fsck::compact::{
    LayoutChoice, Options as CompactOptions, Place, Progress, Refusal, Report, Target, elsewhere, in_place,
};
use kvarts_fsck::disk::{Disk, DiskWriter, MemoryDisk, Step};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::store::survey;
use kvarts_fsck::walk::Met;
use kvarts_fsck::window::Tally;
use kvarts_layout::StoreId;
use kvarts_layout::format::record::Body;
use kvarts_store::engine::{Options, Store};
use kvarts_tests::campaign::{Driven, Judge, Ledger, drive, read_all, reopen, verify, work_compacting};
use kvarts_tests::sim::{Media, Seed, SimWorld, WorldConfig};
use kvarts_tests::witness::{cut, directories, examine, media, problems, small};

/// A store after a workload, and what it holds.
struct Made {
    disks: Vec<MemoryDisk>,
    ledger: Ledger,
    options: Options,
    blocks: usize,
}

/// A store of the simulation, stopped cleanly or killed. What it holds is what the engine finds in it.
fn store(seed: Seed, (dirs, shards): (u16, u32), ops: usize, close: bool) -> Made {
    let options = Options { directories: dirs, ..small(shards) };
    let mut config = WorldConfig::default();
    config.disk.dirs = dirs;
    let world = SimWorld::new(seed.0, &config);
    let launcher = world.launcher();
    let ledger = RefCell::new(Ledger::default());
    let mut rng = seed.child("work").rng();
    let whole = async {
        let (store, _executors) = Store::open(&launcher, &options).await.expect("a fresh disk");
        work_compacting(&store, &ledger, &mut rng, ops).await;
        if close {
            store.close().await.expect("nothing fails");
        }
    };
    assert!(matches!(drive(&world, u64::MAX, whole), Driven::Done(())), "the workload does not end");
    let image = world.kill();
    let opened = reopen(seed, &config, &options, image.clone()).unwrap();
    let Driven::Done(found) = drive(&opened.world, u64::MAX, read_all(&opened.store)) else {
        panic!("reads")
    };
    let mut ledger = ledger.into_inner();
    ledger.adopt(&found, false);
    let blocks = found.values().filter(|state| state.is_ok()).count();
    Made { disks: directories(&image), ledger, options, blocks }
}

fn wanted() -> CompactOptions {
    CompactOptions {
        utilisation_percent: 100,
        now_ms: 4_000_000_000_000,
        threads: 1,
        ..CompactOptions::default()
    }
}

fn shared(disks: &[MemoryDisk]) -> Vec<Arc<dyn Disk>> {
    disks.iter().map(|disk| Arc::new(disk.clone()) as _).collect()
}

fn compact(disks: &[MemoryDisk], options: &CompactOptions, room: u64) -> Result<Report, Refusal> {
    let store = survey(&shared(disks), &mut Findings::default()).unwrap().unwrap();
    let places: Vec<Place> = disks
        .iter()
        .map(|disk| Place { writer: Arc::new(disk.clone()) as Arc<dyn DiskWriter>, room_bytes: room })
        .collect();
    in_place(&store, &places, options, &Progress::default())
}

/// A directory to read and to write.
fn pair(disk: &MemoryDisk) -> (Arc<dyn Disk>, Arc<dyn DiskWriter>) {
    (Arc::new(disk.clone()), Arc::new(disk.clone()))
}

fn to(disks: &[MemoryDisk], targets: &[MemoryDisk], shards: u32, options: &CompactOptions) -> Report {
    let store = survey(&shared(disks), &mut Findings::default()).unwrap().unwrap();
    let target = Target {
        directories: targets.iter().map(pair).collect(),
        shards,
        store: StoreId([9; 16]),
        secret: [7; 32],
    };
    elsewhere(&store, &target, options, &Progress::default()).unwrap()
}

/// What is known of a block beside its bytes: origin and digests.
type Proof = ([u8; 16], Vec<u32>);
/// Namespace, key, group, coordinate.
type Name = ([u8; 32], [u8; 32], u32, u64);

/// Every production of every block in records that count.
fn productions(disks: &[MemoryDisk]) -> BTreeMap<Name, BTreeSet<Proof>> {
    let store = survey(&shared(disks), &mut Findings::default()).unwrap().unwrap();
    let all = Mutex::new(BTreeMap::<Name, BTreeSet<Proof>>::new());
    let options = CheckOptions { threads: 1, ..CheckOptions::default() };
    each_segment(&store, &options, &Tally::default(), &|shard, segment, report| {
        let (generation, records): (u64, Vec<&Met>) = match &report.outcome {
            Outcome::Sealed { good, generation, .. } => (*generation, good.iter().collect()),
            Outcome::Walked { scanned, .. } => (scanned.generation, scanned.adopted.iter().collect()),
            _ => return,
        };
        for met in records {
            let (Some(Body::Blocks(blocks)), Some(namespace)) = (&met.body, met.namespace) else { continue };
            let one = &store.shards[shard];
            let path = format!("shard-{:04}/segment-{segment:08}", one.number);
            let file = disks[one.directory].contents(&path).unwrap();
            let position = store.keyring.position(one.number, segment).under(generation).at(met.offset);
            let header = &file[met.offset as usize..][..met.prefix.header_bytes as usize];
            let record =
                kvarts_layout::format::record::open(header, &position, &store.keyring.secret).unwrap();
            let digests: Vec<u32> = record.digests().collect();
            let each = digests.len() / blocks.blocks.len();
            for (name, digests) in blocks.blocks.iter().zip(digests.chunks(each)) {
                let key = (namespace, name.key, blocks.group, blocks.coordinate);
                all.lock().unwrap().entry(key).or_default().insert((name.origin, digests.to_vec()));
            }
        }
    });
    all.into_inner().unwrap()
}

/// The engine and the checker find in `disks` what the ledger says and nothing else.
fn expect_same(seed: Seed, made: &Made, disks: &[MemoryDisk], options: &Options, note: &str) {
    let checked = examine(disks, Level::Deep).unwrap();
    assert!(checked.findings.is_clean(), "{note}\n{}", problems(&checked));
    let mut config = WorldConfig::default();
    config.disk.dirs = disks.len() as u16;
    let image: Media = media(disks);
    if let Err(why) = verify(seed, &config, options, image, (&made.ledger, Judge::Strict)) {
        panic!("{note}: {why}");
    }
}

fn proofs_are_kept(before: &[MemoryDisk], after: &[MemoryDisk], blocks: usize, note: &str) {
    let (before, after) = (productions(before), productions(after));
    for (name, proofs) in &after {
        assert_eq!(proofs.len(), 1, "{note}: one production is left");
        assert!(
            before.get(name).is_some_and(|known| proofs.is_subset(known)),
            "{note}: another origin or digest"
        );
    }
    assert_eq!(after.len(), blocks, "{note}: the blocks that the engine served");
}

const LAYOUTS: [LayoutChoice; 4] =
    [LayoutChoice::Keep, LayoutChoice::FullBlock, LayoutChoice::LayerBlock, LayoutChoice::Auto];

#[test]
fn compacted_in_place_a_store_holds_what_it_held_and_nothing_dead() {
    let (mut merged, mut graves, mut rearranged) = (0, 0, 0);
    for seed in (0..12).map(Seed) {
        let shape = [(1, 1), (1, 3), (2, 2)][seed.0 as usize % 3];
        let made = store(seed, shape, 60, seed.0 % 2 == 0);
        let before: Vec<MemoryDisk> = made.disks.iter().map(MemoryDisk::fork).collect();
        let note = format!("seed {}", seed.0);
        let options = CompactOptions { layout: LAYOUTS[seed.0 as usize % 4], ..wanted() };
        let planned =
            compact(&made.disks, &CompactOptions { dry_run: true, ..options.clone() }, u64::MAX).unwrap();
        assert!(made.disks.iter().all(|disk| disk.steps().is_empty()), "{note}: a dry run wrote");
        let report = compact(&made.disks, &options, u64::MAX).unwrap();
        assert_eq!(planned, Report { dry_run: true, ..report.clone() }, "{note}");
        assert_eq!(report.live_blocks as usize, made.blocks, "{note}");
        assert!(report.segments_after <= report.segments_before, "{note}: {report:?}");
        expect_same(seed, &made, &made.disks, &made.options, &note);
        proofs_are_kept(&before, &made.disks, made.blocks, &note);
        assert_eq!(report.graves_after, 0, "{note}: nothing older is left");
        let again: Vec<MemoryDisk> = made.disks.iter().map(MemoryDisk::fork).collect();
        let second = compact(&again, &options, u64::MAX).unwrap();
        assert!(again.iter().all(|disk| disk.steps().is_empty()), "{note}: compacted twice: {second:?}");
        merged += report.records_merged;
        graves += report.graves_before;
        rearranged += report.records_rearranged;
    }
    assert!(merged > 5 && graves > 10 && rearranged > 2, "{merged} merged, {graves} graves, {rearranged}");
}

#[test]
fn compacted_into_another_store_it_holds_the_same_over_other_shards_and_layouts() {
    for seed in (20..26).map(Seed) {
        let made = store(seed, [(1, 1), (1, 3), (2, 2)][seed.0 as usize % 3], 60, seed.0 % 2 == 0);
        for (dirs, shards) in [(1u16, 1u32), (2, 6), (1, 2)] {
            let targets: Vec<MemoryDisk> = (0..dirs).map(|_| MemoryDisk::new()).collect();
            let layout = LAYOUTS[(seed.0 as usize + usize::from(dirs)) % 4];
            let zstd_after_s = (seed.0 % 2 == 0).then_some(0);
            let real = CompactOptions { layout, zstd_after_s, ..wanted() };
            let said = to(&made.disks, &targets, shards, &CompactOptions { dry_run: true, ..real.clone() });
            assert!(targets.iter().all(|disk| disk.steps().is_empty()), "a dry run wrote");
            let done = to(&made.disks, &targets, shards, &real);
            assert_eq!(said, Report { dry_run: true, ..done }, "seed {}, {shards} shards", seed.0);
            let note = format!("seed {}, {dirs} directories, {shards} shards, {layout:?}", seed.0);
            assert!(
                made.disks.iter().all(|disk| disk.steps().is_empty()),
                "{note}: the old store was written"
            );
            let options = Options {
                directories: dirs,
                shards_per_directory: shards / u32::from(dirs),
                ..made.options.clone()
            };
            expect_same(seed, &made, &targets, &options, &note);
            proofs_are_kept(&made.disks, &targets, made.blocks, &note);
        }
    }
}

/// The changes of several directories are not ordered among each other here: one directory only.
fn cuts(seed: Seed, made: &Made, options: &CompactOptions, room: u64) -> u64 {
    let start = made.disks[0].fork();
    let done = start.fork();
    compact(std::slice::from_ref(&done), options, room).unwrap();
    let steps = done.steps();
    let mut rng = seed.child("cuts").rng();
    let mut images = 0;
    for changes in 0..=steps.len() {
        for _ in 0..2 {
            let left = cut(&start, &steps[..changes], &mut rng);
            let note = format!(
                "seed {}, cut after {changes} of {}: {:?}",
                seed.0,
                steps.len(),
                steps.get(changes).map(name)
            );
            expect_same(seed, made, std::slice::from_ref(&left), &made.options, &note);
            let again = compact(std::slice::from_ref(&left.fork()), options, u64::MAX);
            assert!(again.is_ok(), "{note}: it does not go on: {again:?}");
            images += 1;
        }
    }
    images
}

fn name(step: &Step) -> String {
    match step {
        Step::Write(path, at, bytes) => format!("{} bytes of {path} at {at}", bytes.len()),
        other => format!("{other:?}"),
    }
}

#[test]
fn a_power_cut_at_any_write_in_place_loses_nothing_and_brings_nothing_back() {
    let mut images = 0;
    // Seeds whose stores have chains over both shards, deletes, and tails.
    for (at, seed) in [40, 66, 82, 87].map(Seed).into_iter().enumerate() {
        let made = store(seed, (1, 2), 40, seed.0 % 2 == 0);
        let options = CompactOptions { layout: LAYOUTS[seed.0 as usize % 4], ..wanted() };
        // With little room it goes in rounds.
        let room = if at < 2 { u64::MAX } else { 3 * made.options.segment_bytes };
        images += cuts(seed, &made, &options, room);
    }
    println!("{images} images");
    assert!(images > 200, "{images}");
}

#[test]
fn with_no_room_it_stops_before_anything_is_lost_and_says_how_much_it_needs() {
    let seed = Seed(60);
    let made = store(seed, (1, 2), 60, true);
    compact(&made.disks, &CompactOptions { layout: LayoutChoice::FullBlock, ..wanted() }, u64::MAX).unwrap();
    // Nothing in it is dead now: there is nothing to let go first.
    let other = CompactOptions { layout: LayoutChoice::LayerBlock, ..wanted() };
    let refused = compact(&made.disks, &other, made.options.segment_bytes / 2);
    assert!(matches!(refused, Err(Refusal::NoRoom(..))), "{refused:?}");
    expect_same(seed, &made, &made.disks, &made.options, "no room");
    compact(&made.disks, &other, 3 * made.options.segment_bytes).unwrap();
    expect_same(seed, &made, &made.disks, &made.options, "in rounds");
}

#[test]
fn beside_a_damaged_checkpoint_it_writes_nothing_or_brings_nothing_back() {
    let (mut refused, mut done) = (0, 0);
    for seed in [40, 66, 82, 87].map(Seed) {
        let made = store(seed, (1, 2), 40, true);
        let files = made.disks[0].files();
        for path in files.iter().filter(|path| path.contains("/checkpoint-")) {
            for at in [100usize, 4096 + 100] {
                let disk = made.disks[0].fork();
                disk.tamper(path, |bytes| bytes.get_mut(at).into_iter().for_each(|byte| *byte ^= 1));
                let note = format!("seed {}, {path} at {at}", seed.0);
                match compact(std::slice::from_ref(&disk), &wanted(), u64::MAX) {
                    Ok(_) => {
                        done += 1;
                        // The older of two says nothing that the newer does not.
                        disk.remove(path);
                        expect_same(seed, &made, &[disk], &made.options, &note);
                    }
                    Err(Refusal::Unsound(what)) => {
                        refused += 1;
                        assert!(what.contains(path.as_str()), "{note}: {what}");
                        assert_eq!(disk.steps(), [], "{note}");
                    }
                    Err(other) => panic!("{note}: {other}"),
                }
            }
        }
    }
    assert!(refused > 10, "{refused} refused, {done} done");
}
