//! Repair: clean afterwards, nothing good lost, nothing bad adopted, nothing left to do twice, and a power cut in the
//! middle leaves a store that is no worse.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use kvarts_contract::api::BlockOutcome;
use kvarts_fsck::check::{Level, Options, Outcome, each_segment};
use kvarts_fsck::disk::{Disk, MemoryDisk, NodeKind, Step};
use kvarts_fsck::findings::{Finding, Findings};
use kvarts_fsck::repair::{Action, Repaired, Site, repair};
use kvarts_fsck::store::survey;
use kvarts_fsck::walk::{Met, Payload};
use kvarts_fsck::window::Tally;
use kvarts_layout::format::record::Body;
use kvarts_layout::format::seal::claimed_structure;
use kvarts_layout::format::{PAGE, Structure};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::flaky::Flaky;
use kvarts_tests::sim::{Rng, Seed, SimWorld, WorldConfig};
use kvarts_tests::stage::{SimStage, small_options};
use kvarts_tests::witness::{directories, examine, media, problems, small, worked};

const SEGMENT: &str = "shard-0000/segment-00000000";

fn store(seed: u64, ops: usize) -> MemoryDisk {
    directories(&worked(Seed(seed), &small(2), ops, true)).remove(0)
}

fn options() -> Options {
    Options { threads: 1, ..Options::default() }
}

fn put_right(disk: &MemoryDisk, dry: bool) -> Repaired {
    let writer = (!dry).then(|| Arc::new(disk.clone()) as _);
    let sites = [Site { disk: Arc::new(disk.clone()), writer }];
    repair(&sites, &options(), &Tally::default()).unwrap()
}

/// A block and which production of it.
type Block = (u32, [u8; 32], [u8; 16]);

/// Every block whose record counts and whose payload matches its digests.
fn good_blocks(disk: &MemoryDisk) -> BTreeSet<Block> {
    let disks: [Arc<dyn Disk>; 1] = [Arc::new(disk.clone())];
    let store = survey(&disks, &mut Findings::default()).unwrap().unwrap();
    let all = Mutex::new(BTreeSet::new());
    each_segment(&store, &options(), &Tally::default(), &|shard, _, report| {
        let records: Vec<&Met> = match &report.outcome {
            Outcome::Sealed { good, unlisted, .. } => good.iter().chain(unlisted).collect(),
            Outcome::Walked { scanned, .. } => scanned.adopted.iter().collect(),
            _ => Vec::new(),
        };
        for met in records {
            let (Some(Body::Blocks(blocks)), Payload::Read(verified)) = (&met.body, &met.payload) else {
                continue;
            };
            if verified.is_whole() {
                let there = (0..).zip(&blocks.blocks).filter(|(at, _)| !verified.is_gone(*at));
                let named = there.map(|(_, one)| (shard as u32, one.key, one.origin));
                all.lock().unwrap().extend(named);
            }
        }
    });
    all.into_inner().unwrap()
}

/// Repairs and looks at what that came to.
fn expect_repaired(damaged: &MemoryDisk, whole: &BTreeSet<Block>, what: &str) {
    let before = good_blocks(damaged);
    let files: Vec<_> = damaged.files().into_iter().map(|path| damaged.contents(&path)).collect();
    let planned = put_right(damaged, true);
    assert_eq!(damaged.steps(), [], "{what}: a dry run wrote");
    assert_eq!(files, damaged.files().into_iter().map(|path| damaged.contents(&path)).collect::<Vec<_>>());
    let done = put_right(damaged, false);
    let (left, did): (Vec<Action>, Vec<Action>) = done.actions.iter().cloned().partition(is_entwined);
    assert!(did.iter().all(|action| action.failed.is_none()), "{what}: {did:?}");
    if let Some(first) = planned.actions.first() {
        assert!(done.actions.contains(first), "{what}: {first} was planned");
    }
    let checked = examine(std::slice::from_ref(damaged), Level::Full).unwrap();
    // A damaged block that shares every page with sound ones stays, and both say so.
    let stays = |finding: &Finding| finding.label.name == "listed-payload-damaged" && !left.is_empty();
    let all = checked.findings.problems.iter().all(stays);
    assert!(all, "{what}: {:?}\n{}", done.actions, problems(&checked));
    let after = good_blocks(damaged);
    assert!(after.is_superset(&before), "{what}: a good block was dropped");
    assert!(after.is_subset(whole), "{what}: a block came from nowhere");
    assert_eq!(put_right(damaged, false).actions, left, "{what}: it is repaired twice");
}

/// Whether an action says that damage stays because sound blocks would go with it.
fn is_entwined(action: &Action) -> bool {
    action.failed.as_ref().is_some_and(|why| why.contains("share all of their pages with intact blocks"))
}

fn structures(disk: &MemoryDisk) -> Vec<(String, usize, Structure)> {
    let mut all = Vec::new();
    for path in disk.files() {
        let bytes = disk.contents(&path).unwrap();
        let pages = (0..).step_by(PAGE).zip(bytes.chunks(PAGE));
        all.extend(pages.filter_map(|(at, page)| Some((path.clone(), at, claimed_structure(page)?))));
    }
    all
}

#[test]
fn damage_to_any_structure_can_be_put_right() {
    let disk = store(31, 40);
    let whole = good_blocks(&disk);
    assert!(whole.len() > 10);
    assert_eq!(put_right(&disk.fork(), false).actions, [], "a sound store is left alone");
    for (path, at, structure) in structures(&disk) {
        for (what, byte) in [("zeroed", 0), ("burst", 0x5a)] {
            let damaged = disk.fork();
            damaged.tamper(&path, |bytes| bytes[at..at + PAGE].fill(byte));
            expect_repaired(&damaged, &whole, &format!("{structure:?} {what} in {path} at {at}"));
        }
        let flipped = disk.fork();
        flipped.tamper(&path, |bytes| bytes[at + 200] ^= 4);
        expect_repaired(&flipped, &whole, &format!("{structure:?} flipped in {path} at {at}"));
    }
}

#[test]
fn a_segment_that_is_gone_is_told_of_at_each_start_until_it_is_repaired() {
    let mut disk = store(33, 40);
    disk.remove(SEGMENT);
    let start = |disk: &MemoryDisk, run: u64| {
        let world = SimWorld::with_media(7 + run, &WorldConfig::default(), media(&[disk.fork()]));
        let stage = SimStage::open(&world, &small(2)).unwrap();
        let places = stage.engine().recovery().iter().flat_map(|report| report.places.clone());
        let told = places.filter(|one| one.label == "segment-missing").count();
        let desk = Desk::new(&stage, "after");
        for n in run * 10..run * 10 + 6 {
            desk.outcomes(desk.request(pages(), &desk.keys(n..n + 1), 1));
        }
        // A clean stop writes a checkpoint.
        (told, directories(&stage.close().unwrap()).remove(0))
    };
    for run in 0..3 {
        let (told, after) = start(&disk, run);
        assert_eq!(told, 1, "start {run}");
        assert!(after.contents(SEGMENT).is_none(), "its number was taken again");
        disk = after;
    }
    assert!(!put_right(&disk, false).actions.is_empty());
    for run in 3..5 {
        let (told, after) = start(&disk, run);
        assert_eq!(told, 0, "start {run}, repaired");
        disk = after;
    }
}

#[test]
fn damage_to_payloads_costs_their_blocks_and_dirty_padding_nothing() {
    let disk = store(32, 30);
    let whole = good_blocks(&disk);
    let mut lost = 0;
    for (path, at, structure) in structures(&disk) {
        if structure != Structure::Record {
            continue;
        }
        let bytes = disk.contents(&path).unwrap();
        let payload = u64::from_le_bytes(bytes[at + 96..at + 104].try_into().unwrap()) as usize;
        let header = u32::from_le_bytes(bytes[at + 72..at + 76].try_into().unwrap()) as usize;
        if payload == 0 {
            continue;
        }
        let damaged = disk.fork();
        damaged.tamper(&path, |bytes| bytes[at + header + payload / 2] ^= 1);
        expect_repaired(&damaged, &whole, &format!("payload in {path} at {at}"));
        lost += u32::from(good_blocks(&damaged).len() < whole.len());
        if !payload.is_multiple_of(PAGE) {
            let dirty = disk.fork();
            dirty.tamper(&path, |bytes| bytes[at + header + payload] = 9);
            expect_repaired(&dirty, &whole, &format!("padding in {path} at {at}"));
            assert_eq!(good_blocks(&dirty), whole);
        }
    }
    assert!(lost > 3, "{lost}");
}

/// A store with one record of eight blocks that lie in pages of their own: the path of its file, where the payload begins, and the bytes
/// of a block.
fn blocks_in_pages() -> (MemoryDisk, String, usize, usize) {
    let world = SimWorld::new(36, &WorldConfig::default());
    let stage = SimStage::open(&world, &small_options(1)).unwrap();
    let desk = Desk::new(&stage, "block by block");
    assert_eq!(desk.outcomes(desk.request(pages(), &desk.keys(0..8), 1)), vec![BlockOutcome::Stored; 8]);
    let disk = directories(&stage.close().unwrap()).remove(0);
    assert_eq!(good_blocks(&disk).len(), 8);
    let records = structures(&disk).into_iter().filter(|(_, _, one)| *one == Structure::Record);
    let of = |path: &str, at: usize, field: usize| {
        let bytes = disk.contents(path).unwrap();
        u64::from_le_bytes(bytes[at + field..at + field + 8].try_into().unwrap()) as usize
    };
    let (path, at, _) = records.max_by_key(|(path, at, _)| of(path, *at, 96)).unwrap();
    let header = of(&path, at, 72) & 0xffff_ffff;
    let each = of(&path, at, 96) / 8;
    (disk, path, at + header, each)
}

/// The engine serves what is sound of a record in which a block is damaged: so must what is left after a repair.
#[test]
fn a_damaged_block_with_pages_of_its_own_costs_no_other_one() {
    let (disk, path, payload, each) = blocks_in_pages();
    let whole = good_blocks(&disk);
    let chunk = each / 2;
    for (block, bytes) in [(0, 1), (3, 1), (7, 1), (5, 2 * each)] {
        let damaged = disk.fork();
        damaged.tamper(&path, |all| {
            let from = payload + block * each + chunk;
            all[from..from + bytes].iter_mut().for_each(|byte| *byte ^= 1);
        });
        let checked = examine(std::slice::from_ref(&damaged), Level::Full).unwrap();
        let lost: u64 = checked.findings.lost.values().sum();
        expect_repaired(&damaged, &whole, &format!("{bytes} bytes of block {block}"));
        assert_eq!(good_blocks(&damaged).len() as u64, 8 - lost);
        assert!(
            if bytes == 1 { lost == 1 } else { (2..4).contains(&lost) },
            "{lost} blocks of {bytes} bytes"
        );
    }
}

/// Records of blocks of a store, with the damage of one bit in the first page of the payload of each.
fn flipped(disk: &MemoryDisk) -> Vec<(MemoryDisk, String, usize)> {
    let mut all = Vec::new();
    for (path, at, structure) in structures(disk) {
        let bytes = disk.contents(&path).unwrap();
        let field = |field: usize| u64::from_le_bytes(bytes[field..field + 8].try_into().unwrap()) as usize;
        if structure == Structure::Record && field(at + 96) > 0 {
            let byte = at + (field(at + 72) & 0xffff_ffff);
            let damaged = disk.fork();
            damaged.tamper(&path, |bytes| bytes[byte] ^= 1);
            all.push((damaged, path, byte));
        }
    }
    all
}

#[test]
fn a_sound_block_that_shares_its_pages_with_a_damaged_one_is_served_after_a_repair() {
    let mut entwined = 0;
    for (damaged, path, byte) in (32..36).flat_map(|seed| flipped(&store(seed, 30))) {
        let before = good_blocks(&damaged);
        let done = put_right(&damaged, false).actions;
        assert_eq!(good_blocks(&damaged), before, "{path} at {byte}: {done:?}");
        entwined += done.iter().filter(|action| is_entwined(action)).count();
        let checked = examine(std::slice::from_ref(&damaged), Level::Full).unwrap();
        assert_eq!(checked.findings.is_clean(), !done.iter().any(is_entwined), "it stays named");
    }
    assert!(entwined > 3, "{entwined} records have blocks that share pages");
}

#[test]
fn nothing_is_given_up_that_two_readings_do_not_say_alike() {
    let disk = store(32, 30);
    let whole = good_blocks(&disk);
    let (mut told, mut would) = (0, 0);
    for (damaged, path, byte) in flipped(&disk) {
        // If the bit were there, something would be done.
        would += put_right(&damaged, true).actions.len();
        for wrong in 1..4 {
            let flaky = disk.fork();
            let site = Site {
                disk: Arc::new(Flaky::new(&flaky, &path, byte, wrong)),
                writer: Some(Arc::new(flaky.clone())),
            };
            let done = repair(&[site], &options(), &Tally::default()).unwrap().actions;
            let differs = |action: &Action| {
                action.failed.as_ref().is_some_and(|why| why.contains("two reads returned different bytes"))
            };
            told += done.iter().filter(|action| differs(action)).count();
            if wrong < 3 {
                assert_eq!(flaky.steps(), [], "{path} at {byte}, {wrong} wrong readings: {done:?}");
                assert_eq!(good_blocks(&flaky), whole);
            }
        }
    }
    assert!(told > 3 && would > 3, "{told} told, {would} would be done");
}

#[test]
fn a_punch_that_made_no_hole_is_not_called_a_repair() {
    let (disk, path, payload, each) = blocks_in_pages();
    let damaged = disk.fork();
    damaged.tamper(&path, |bytes| bytes[payload + 3 * each] ^= 1);
    let before = good_blocks(&damaged);
    damaged.make_no_holes();
    let done = put_right(&damaged, false).actions;
    let taken = done.iter().find(|action| action.what.contains("are removed")).unwrap();
    assert!(taken.failed.as_ref().is_some_and(|why| why.contains("cannot punch single pages")), "{taken}");
    assert_eq!(good_blocks(&damaged), before, "a sound block was lost");
    let checked = examine(std::slice::from_ref(&damaged), Level::Full).unwrap();
    assert!(!checked.findings.is_clean(), "what is damaged is still said to be so");
}

#[test]
fn a_lost_superblock_is_made_again_from_segments_and_folders() {
    for rest in [0usize, 4096] {
        let disk = store(33, 20);
        let whole = good_blocks(&disk);
        let image = disk.contents("superblock").unwrap();
        disk.tamper("superblock", |bytes| bytes[rest..].fill(0x5a));
        expect_repaired(&disk, &whole, "superblock");
        if rest > 0 {
            assert_eq!(disk.contents("superblock").unwrap(), image);
        }
        assert_eq!(good_blocks(&disk), whole);
    }
    let disk = store(33, 20);
    let whole = good_blocks(&disk);
    disk.remove("superblock");
    expect_repaired(&disk, &whole, "no superblock");
}

#[test]
fn what_lies_in_the_wrong_place_is_moved_and_swapped_files_find_back() {
    let disk = store(34, 30);
    let whole = good_blocks(&disk);
    let (one, two) = (SEGMENT, "shard-0001/segment-00000000");
    let swapped = disk.fork();
    swapped.plant(one, disk.contents(two).unwrap());
    swapped.plant(two, disk.contents(one).unwrap());
    expect_repaired(&swapped, &whole, "swapped");
    assert_eq!(good_blocks(&swapped), whole);
    let other = store(35, 30);
    let foreign = disk.fork();
    foreign.plant("shard-0000/segment-00000077", other.contents(one).unwrap());
    foreign.plant("shard-0000/segment-00000078", Seed(1).rng().bytes(65_536));
    foreign.plant_folder("shard-0009");
    expect_repaired(&foreign, &whole, "foreign");
    assert!(foreign.files().iter().any(|path| path == "quarantine/shard-0000.segment-00000077"));
    assert_eq!(good_blocks(&foreign), whole);
    let odd = disk.fork();
    odd.plant_odd("shard-0000/segment-00000050", NodeKind::Link);
    assert!(put_right(&odd, true).actions.iter().any(|action| action.file.ends_with("segment-00000050")));
}

#[test]
fn a_truncated_or_missing_segment_costs_what_it_held() {
    let disk = store(36, 40);
    let whole = good_blocks(&disk);
    for len in [0usize, 100, 20_000, 40_960, 65_000] {
        let cut = disk.fork();
        cut.tamper(SEGMENT, |bytes| bytes.truncate(len));
        expect_repaired(&cut, &whole, &format!("cut to {len}"));
    }
    let gone = disk.fork();
    gone.remove(SEGMENT);
    expect_repaired(&gone, &whole, "gone");
}

/// What is on the disk if the power fails after these changes: what was synced, and of the rest what chance keeps.
fn cut(start: &MemoryDisk, steps: &[Step], rng: &mut Rng) -> MemoryDisk {
    let disk = start.fork();
    for (at, step) in steps.iter().enumerate() {
        let durable = steps[at..].iter().any(|later| match (step, later) {
            (Step::Write(path, ..) | Step::Punch(path, ..) | Step::SetLen(path, _), Step::Sync(synced)) => {
                path == synced
            }
            (Step::Rename(_, path) | Step::MakeFolder(path), Step::SyncFolder(folder)) => {
                path.rsplit_once('/').map_or("", |(folder, _)| folder) == folder
            }
            _ => false,
        });
        disk.apply(step, &mut || durable || rng.coin());
    }
    disk
}

#[test]
fn a_power_cut_at_any_change_of_a_repair_leaves_a_store_that_is_no_worse() {
    let disk = store(37, 40);
    let whole = good_blocks(&disk);
    let mut damaged = Vec::new();
    for (path, at, structure) in structures(&disk).into_iter().step_by(3) {
        let one = disk.fork();
        one.tamper(&path, |bytes| bytes[at..at + PAGE].fill(0x5a));
        damaged.push((one, format!("{structure:?} in {path} at {at}")));
    }
    let foreign = disk.fork();
    foreign.plant(SEGMENT, store(38, 30).contents(SEGMENT).unwrap());
    damaged.push((foreign, "foreign".to_owned()));
    let mut rng = Seed(5).rng();
    let mut cuts = 0;
    for (start, what) in damaged {
        let before = good_blocks(&start);
        let done = start.fork();
        put_right(&done, false);
        let steps = done.steps();
        for changes in 0..=steps.len() {
            for _ in 0..3 {
                let left = cut(&start, &steps[..changes], &mut rng);
                let what = format!("{what}, cut after {changes} of {}", steps.len());
                let now = good_blocks(&left);
                assert!(now.is_superset(&before), "{what}: a good block is gone");
                assert!(now.is_subset(&whole), "{what}: a block came from nowhere");
                expect_repaired(&left, &whole, &what);
                cuts += 1;
            }
        }
    }
    assert!(cuts > 100, "{cuts}");
}

#[test]
fn a_disk_that_fails_under_a_repair_is_reported_and_can_be_repaired_later() {
    let disk = store(39, 30);
    let whole = good_blocks(&disk);
    let footer = structures(&disk).into_iter().find(|one| one.2 == Structure::Footer).unwrap();
    disk.tamper(&footer.0, |bytes| bytes[footer.1 + 130] ^= 1);
    let failing = disk.fork();
    failing.cut_after(1);
    let failed: Vec<Action> = put_right(&failing, false).actions;
    assert!(failed.iter().any(|action| action.failed.is_some()), "{failed:?}");
    expect_repaired(&failing.fork(), &whole, "after the disk failed");
}

#[test]
fn a_segment_that_is_as_it_was_before_it_was_written_anew_is_repaired_once_and_for_all() {
    // What the checkpoint knows of the later generation is about nothing any more: it must not be found again and again.
    let options = kvarts_store::engine::Options { budget_bytes: 400 << 10, ..small(1) };
    let [before, after] = [100, 150].map(|ops| directories(&worked(Seed(9), &options, ops, true)).remove(0));
    let whole: BTreeSet<Block> = good_blocks(&before).union(&good_blocks(&after)).copied().collect();
    let generation = |disk: &MemoryDisk, path: &str| {
        let bytes = disk.contents(path)?;
        Some(u64::from_le_bytes(bytes[56..64].try_into().unwrap()))
    };
    let mut cases = 0;
    for path in after.files().into_iter().filter(|path| path.contains("segment")) {
        if generation(&before, &path).is_none_or(|old| Some(old) >= generation(&after, &path)) {
            continue;
        }
        let damaged = after.fork();
        damaged.plant(&path, before.contents(&path).unwrap());
        let checked = examine(std::slice::from_ref(&damaged), Level::Full).unwrap();
        assert!(checked.findings.times("header-lost-write") > 0, "{path}: {}", problems(&checked));
        expect_repaired(&damaged, &whole, &path);
        cases += 1;
    }
    assert!(cases > 2, "{cases} segments were rewritten");
}
