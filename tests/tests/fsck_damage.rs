//! Damage is named with its place: every byte of every structure, sectors and pages that are zeroed, stale, swapped or
//! copied within a shard, between shards and between stores.
//!
//! `KVARTS_BITS=1` flips every bit instead of one of each byte.

use std::time::Duration;

use kvarts_fsck::check::{Checked, Level};
use kvarts_fsck::disk::{Disk, MemoryDisk};
use kvarts_fsck::findings::{Finding, Findings};
use kvarts_fsck::store::survey;
use kvarts_fsck::window::Tally;
use kvarts_layout::Layout;
use kvarts_layout::format::seal::claimed_structure;
use kvarts_layout::format::{PAGE, Structure, is_zero};
use kvarts_store::engine::CompactOptions;
use kvarts_tests::conformance::Desk;
use kvarts_tests::depth::depth;
use kvarts_tests::fixture::columns;
use kvarts_tests::sim::{Seed, SimWorld, WorldConfig};
use kvarts_tests::stage::{SimStage, drive};
use kvarts_tests::witness::{directories, examine, problems, small, worked};

fn store(seed: u64, shards: u32, ops: usize) -> MemoryDisk {
    let image = worked(Seed(seed), &small(shards), ops, true);
    let disk = directories(&image).remove(0);
    let checked = look(&disk);
    assert!(checked.findings.is_clean() && checked.findings.notes.is_empty(), "{}", problems(&checked));
    disk
}

fn look(disk: &MemoryDisk) -> Checked {
    examine(&[disk.fork()], Level::Full).unwrap()
}

/// Every page of a store that begins a structure: file, offset, what it is.
fn structures(disk: &MemoryDisk) -> Vec<(String, usize, Structure)> {
    let mut all = Vec::new();
    for path in disk.files() {
        let bytes = disk.contents(&path).unwrap();
        for (at, page) in (0..).step_by(PAGE).zip(bytes.chunks(PAGE)) {
            if let Some(structure) = claimed_structure(page) {
                all.push((path.clone(), at, structure));
            }
        }
    }
    all
}

/// Whether the finding names this file and a place in the page.
fn names(finding: &Finding, path: &str, at: usize) -> bool {
    let in_page = finding.place.offset.is_some_and(|offset| offset as usize / PAGE == at / PAGE);
    match (finding.place.shard, finding.place.segment) {
        (Some(shard), Some(segment)) => path == format!("shard-{shard:04}/segment-{segment:08}") && in_page,
        _ => finding.file.as_ref().is_some_and(|file| file.ends_with(path)),
    }
}

fn expect_named(checked: &Checked, path: &str, at: usize, what: &str) {
    let all = || checked.findings.problems.iter().chain(&checked.findings.notes);
    assert!(
        all().any(|one| names(one, path, at)),
        "{what} in {path} at {at}: {:?}",
        all().collect::<Vec<_>>()
    );
}

#[test]
fn a_flipped_bit_anywhere_in_a_structure_is_named_with_its_place() {
    let disk = store(3, 1, 6);
    let bits: &[u8] =
        if std::env::var_os("KVARTS_BITS").is_some() { &[1, 2, 4, 8, 16, 32, 64, 128] } else { &[] };
    let structures = structures(&disk);
    let mut flips = 0;
    let mut seen = Vec::new();
    for (path, at, structure) in &structures {
        // One of each kind is looked at byte by byte in its first sector (before each change at every third byte: R6 flips all bits
        // in turn), the others at some of their bytes.
        let step = if seen.contains(structure) { 331 } else { depth(3, 1) };
        seen.push(*structure);
        let whole = if bits.is_empty() { 512 } else { PAGE };
        for byte in (0..whole).step_by(step).chain((whole..PAGE).step_by(depth(997, 101))) {
            let rotating = [1u8 << (byte % 8)];
            for bit in if bits.is_empty() { &rotating[..] } else { bits } {
                disk.tamper(path, |bytes| bytes[at + byte] ^= bit);
                let checked = examine(std::slice::from_ref(&disk), Level::Full).unwrap();
                disk.tamper(path, |bytes| bytes[at + byte] ^= bit);
                let label = format!("{structure:?} byte {byte} bit {bit}");
                assert!(
                    !checked.findings.is_clean() || *structure == Structure::CheckpointChunk,
                    "{label}: unseen"
                );
                expect_named(&checked, path, *at, &label);
                flips += 1;
            }
        }
    }
    for structure in Structure::ALL {
        assert!(seen.contains(&structure), "{structure:?} was not there to be damaged");
    }
    println!("{flips} flips");
}

#[test]
fn a_flipped_bit_of_a_payload_or_its_padding_is_named_with_its_record() {
    let disk = store(4, 1, 14);
    let all = structures(&disk);
    let records: Vec<_> = all.iter().filter(|(_, _, structure)| *structure == Structure::Record).collect();
    let mut flips = 0;
    for (path, at, _) in records {
        let bytes = disk.contents(path).unwrap();
        let payload = u64::from_le_bytes(bytes[at + 96..at + 104].try_into().unwrap()) as usize;
        let header = u32::from_le_bytes(bytes[at + 72..at + 76].try_into().unwrap()) as usize;
        for byte in (0..payload.next_multiple_of(PAGE)).step_by(depth(389, 97)) {
            let place = at + header + byte;
            disk.tamper(path, |bytes| bytes[place] ^= 1 << (byte % 8));
            let checked = examine(std::slice::from_ref(&disk), Level::Full).unwrap();
            disk.tamper(path, |bytes| bytes[place] ^= 1 << (byte % 8));
            let problem = &checked.findings.problems[0];
            assert_eq!(checked.findings.problem_count, 1, "{}", problems(&checked));
            match problem.label.name {
                "listed-payload-damaged" => {
                    assert_eq!(problem.place.offset, Some(*at as u64));
                    assert!(problem.blocks > 0 && problem.key.is_some() && problem.expected.is_some());
                }
                "padding-not-zero" => assert_eq!(problem.place.offset, Some(place as u64)),
                other => panic!("{other}"),
            }
            flips += 1;
        }
    }
    assert!(flips > depth(60, 300), "{flips}");
}

/// Puts a page elsewhere.
fn copy(from: &MemoryDisk, (path, at): (&str, usize), to: &MemoryDisk, (into, place): (&str, usize)) {
    let page = from.contents(path).unwrap()[at..at + PAGE].to_vec();
    to.tamper(into, |bytes| bytes[place..place + PAGE].copy_from_slice(&page));
}

#[test]
fn pages_that_are_zeroed_swapped_or_from_elsewhere_are_named_and_never_adopted() {
    let disk = store(5, 2, 40);
    let other = store(6, 2, 40);
    let blocks = look(&disk).blocks;
    let theirs = structures(&other);
    let ours = structures(&disk);
    let mut cases = 0;
    for (path, at, structure) in &ours {
        if *structure == Structure::CheckpointChunk {
            continue;
        }
        let mut expect = |damaged: MemoryDisk, what: &str| {
            if damaged.contents(path) == disk.contents(path) {
                return;
            }
            let checked = look(&damaged);
            expect_named(&checked, path, *at, what);
            // A store's only checkpoint and its second slot look then as a crash leaves them at their first writing.
            let first = matches!(structure, Structure::CheckpointHeader | Structure::Superblock);
            let may_be_legal = what == "zeroed" && first;
            assert!(
                may_be_legal || !checked.findings.is_clean(),
                "{what} over {structure:?} in {path} at {at}"
            );
            assert!(checked.blocks <= blocks, "{what}: blocks came from nowhere");
            cases += 1;
        };
        let zeroed = disk.fork();
        zeroed.tamper(path, |bytes| bytes[*at..at + PAGE].fill(0));
        expect(zeroed, "zeroed");
        let burst = disk.fork();
        burst.tamper(path, |bytes| bytes[*at..at + PAGE].fill(0x5a));
        expect(burst, "burst");
        let same = |all: &[(String, usize, Structure)], skip: usize| {
            let mut found = all.iter().filter(|one| one.2 == *structure && (&one.0, one.1) != (path, *at));
            found.nth(skip).map(|one| (one.0.clone(), one.1))
        };
        for skip in [0, 3, 7] {
            if let Some((from, place)) = same(&ours, skip) {
                let copied = disk.fork();
                copy(&disk, (&from, place), &copied, (path, *at));
                expect(copied, "copied from the same store");
            }
            if let Some((from, place)) = same(&theirs, skip) {
                let copied = disk.fork();
                copy(&other, (&from, place), &copied, (path, *at));
                expect(copied, "copied from another store");
            }
        }
    }
    assert!(cases > 200, "{cases}");
}

#[test]
fn whole_files_that_are_swapped_renamed_or_from_another_store_are_named() {
    let disk = store(5, 2, 40);
    let other = store(6, 2, 40);
    let segment = |shard: u32, number: u32| format!("shard-{shard:04}/segment-{number:08}");
    let (one, two) = (segment(0, 0), segment(1, 0));
    let swapped = disk.fork();
    swapped.plant(&one, disk.contents(&two).unwrap());
    swapped.plant(&two, disk.contents(&one).unwrap());
    let foreign = disk.fork();
    foreign.plant(&one, other.contents(&one).unwrap());
    let renamed = disk.fork();
    renamed.plant(&segment(0, 40), disk.contents(&one).unwrap());
    let cut = disk.fork();
    cut.tamper(&one, |bytes| bytes.truncate(32 << 10));
    let gone = disk.fork();
    gone.remove(&one);
    for (damaged, label, path) in [
        (&swapped, "header-misdirected", &one),
        (&swapped, "header-misdirected", &two),
        (&foreign, "segment-foreign", &one),
        (&renamed, "header-misdirected", &segment(0, 40)),
        (&cut, "segment-truncated", &one),
        (&gone, "segment-missing", &one),
    ] {
        let checked = look(damaged);
        let found = checked.findings.problems.iter().any(|one| {
            let (shard, number) = (one.place.shard.unwrap_or(99), one.place.segment.unwrap_or(99));
            one.label.name == label && segment(shard, number) == *path
        });
        assert!(found, "{label} {path}:\n{}", problems(&checked));
    }
}

/// A segment goes when a checkpoint calls it free, and its number may come again with a new file: nothing was lost.
#[test]
fn a_blank_file_of_a_segment_that_was_free_is_a_note_and_one_of_a_used_segment_is_not() {
    let options = kvarts_store::engine::Options { budget_bytes: 400 << 10, ..small(1) };
    let (mut free, mut used) = (0, 0);
    for seed in 0..24 {
        let disk = directories(&worked(Seed(seed), &options, 150, true)).remove(0);
        assert!(look(&disk).findings.is_clean(), "seed {seed}");
        for number in 0..20 {
            let path = format!("shard-0000/segment-{number:08}");
            let Some(bytes) = disk.contents(&path) else { continue };
            let gone = disk.fork();
            gone.remove(&path);
            let is_free = look(&gone).findings.is_clean();
            // A new file may not have its length yet.
            for len in [bytes.len(), 0] {
                let blank = disk.fork();
                blank.plant(&path, vec![0; len]);
                let checked = look(&blank);
                let problems = problems(&checked);
                assert_eq!(
                    checked.findings.is_clean(),
                    is_free,
                    "seed {seed}, {path}, {len} bytes: {problems}"
                );
                assert_eq!(problems.contains("segment-truncated"), !is_free && len == 0, "{problems}");
                if is_free {
                    assert!(checked.findings.counts.contains_key("never-used"), "seed {seed}, {path}");
                }
            }
            free += u32::from(is_free);
            used += u32::from(!is_free);
        }
    }
    assert!(free > 2 && used > 20, "{free} free, {used} used");
}

#[test]
fn a_lost_write_that_leaves_the_generation_before_is_named() {
    // A small budget, so that segments are written more than once.
    let options = kvarts_store::engine::Options { budget_bytes: 400 << 10, ..small(1) };
    let before = directories(&worked(Seed(9), &options, 150, true)).remove(0);
    let recycled: Vec<(String, usize)> = structures(&before)
        .into_iter()
        .filter(|(path, at, structure)| {
            let bytes = before.contents(path).unwrap();
            let generation = u64::from_le_bytes(bytes[at + 56..at + 64].try_into().unwrap());
            *structure == Structure::SegmentHeader && generation > 1
        })
        .map(|(path, at, _)| (path, at))
        .collect();
    assert!(!recycled.is_empty(), "nothing was recycled");
    let (blocks, mut named) = (look(&before).blocks, 0);
    for (path, at) in recycled {
        let damaged = before.fork();
        // The header's sector is lost.
        damaged.tamper(&path, |bytes| bytes[at..at + 512].fill(0));
        let checked = look(&damaged);
        if checked.findings.is_clean() {
            // A segment that the checkpoint calls free: nothing was lost with its header.
            assert_eq!(checked.blocks, blocks, "{path}");
            continue;
        }
        named += 1;
        expect_named(&checked, &path, at, "header lost");
        assert!(!is_zero(&damaged.contents(&path).unwrap()));
    }
    assert!(named > 0, "every segment was free");
}

/// A store in which most records of blocks are encoded.
pub(crate) fn encoded_store() -> MemoryDisk {
    let stage = SimStage::open(&SimWorld::new(9, &WorldConfig::default()), &small(1)).unwrap();
    let desk = Desk::new(&stage, "encoded");
    for (column, n) in columns().into_iter().cycle().zip((0..24).step_by(2)) {
        // Producer 1 makes what can be compressed.
        desk.store(
            column,
            &desk.keys(n..n + 2),
            1,
            [Layout::FullBlock, Layout::LayerBlock][n as usize / 2 % 2],
        );
    }
    let options = CompactOptions {
        merge_records_min: 0,
        encode_cold_after: Some(Duration::ZERO),
        ..CompactOptions::default()
    };
    let report = drive(stage.world(), stage.engine().compact(options)).unwrap().unwrap();
    assert!(report.records_encoded > 6, "{report:?}");
    let disk = directories(&stage.close().unwrap()).remove(0);
    let checked = look(&disk);
    assert!(checked.findings.is_clean() && checked.findings.notes.is_empty(), "{}", problems(&checked));
    disk
}

#[test]
fn a_flipped_bit_of_a_stored_chunk_is_named_with_its_record_and_never_a_panic() {
    let disk = encoded_store();
    let (mut flips, mut records, mut harmless) = (0, 0, 0);
    for (path, at, _) in structures(&disk).iter().filter(|(_, _, one)| *one == Structure::Record) {
        let bytes = disk.contents(path).unwrap();
        let payload = u64::from_le_bytes(bytes[at + 96..at + 104].try_into().unwrap()) as usize;
        let header = u32::from_le_bytes(bytes[at + 72..at + 76].try_into().unwrap()) as usize;
        // Raw records have whole blocks of one of the shapes.
        if payload == 0 || [24_576, 416, 1000].iter().any(|block| payload.is_multiple_of(*block)) {
            continue;
        }
        records += 1;
        // The beginning of a stored chunk is what decoders look at first.
        let beginning = (0..payload.min(40)).step_by(depth(3, 1));
        for byte in beginning.chain((40..payload.next_multiple_of(PAGE)).step_by(997)) {
            let place = at + header + byte;
            let flip = |bytes: &mut Vec<u8>| bytes[place] ^= 1 << (byte % 8);
            disk.tamper(path, flip);
            let checked = examine(std::slice::from_ref(&disk), Level::Full).unwrap();
            disk.tamper(path, flip);
            flips += 1;
            if checked.findings.is_clean() {
                // What decodes to the same bytes is not damage: the head of a frame has a bit that means nothing.
                harmless += 1;
                continue;
            }
            assert_eq!(checked.findings.problem_count, 1, "byte {byte}: {}", problems(&checked));
            let problem = &checked.findings.problems[0];
            let (label, offset) = match byte < payload {
                true => ("listed-payload-damaged", *at),
                false => ("padding-not-zero", place),
            };
            assert_eq!(
                (problem.label.name, problem.place.offset),
                (label, Some(offset as u64)),
                "byte {byte}"
            );
        }
    }
    assert!(records > 6 && flips > depth(60, 200), "{records} records, {flips} flips");
    assert!(harmless <= records, "{harmless} of {flips} flips in {records} records went unseen");
}

/// What people are told of a damaged store.
fn told(disk: &MemoryDisk) -> (Checked, String) {
    let checked = look(disk);
    let text = kvarts_fsck::report::Report::new(&checked, Level::Full, (0, 0.0)).text();
    (checked, text)
}

#[test]
fn the_total_loss_of_a_segment_is_not_told_as_the_loss_of_no_block() {
    let disk = store(5, 2, 40);
    let whole = look(&disk).blocks;
    let disks: [std::sync::Arc<dyn Disk>; 1] = [std::sync::Arc::new(disk.fork())];
    let keyring = survey(&disks, &mut Findings::default()).unwrap().unwrap().keyring;
    let about = (&Tally::default(), false);
    let known = kvarts_fsck::checkpoint::read(&disk, &keyring, 0, about, &mut Findings::default());
    let (segment, most) = known.listed.iter().max_by_key(|(_, records)| **records).expect("live records");
    let path = &format!("shard-0000/segment-{segment:08}");
    let noise = disk.fork();
    noise.tamper(path, |bytes| bytes.fill(0x5a));
    let zeroed = disk.fork();
    zeroed.tamper(path, |bytes| bytes.fill(0));
    let gone = disk.fork();
    gone.remove(path);
    let foreign = disk.fork();
    foreign.plant(path, store(6, 2, 40).contents(path).unwrap());
    for (what, damaged) in [("noise", noise), ("zeroed", zeroed), ("gone", gone), ("foreign", foreign)] {
        let (checked, text) = told(&damaged);
        assert!(checked.blocks < whole && checked.findings.lost.is_empty(), "{what}: {text}");
        let uncounted = checked.findings.uncounted;
        assert!(uncounted.problems > 0 && uncounted.listed_records == *most, "{what}: {uncounted:?}");
        let line =
            format!("checkpoints list {} live records at the damaged positions", uncounted.listed_records);
        assert!(text.contains("the number of lost blocks is not known") && text.contains(&line), "{text}");
        assert!(!text.contains("no block is lost"), "{what}: {text}");
        // Without a checkpoint not even that is known.
        (0..2).for_each(|slot| damaged.remove(&format!("shard-0000/checkpoint-{slot}")));
        let (checked, text) = told(&damaged);
        if !checked.findings.is_clean() {
            assert!(checked.findings.uncounted.problems > 0, "{what}: {text}");
            assert_eq!(checked.findings.uncounted.listed_records, 0, "{what}: {text}");
        }
    }
    // Where every block that is lost has a name, or none is, nothing else is said.
    let slot = disk.fork();
    slot.tamper("superblock", |bytes| bytes[100] ^= 1);
    let (checked, text) = told(&slot);
    assert!(text.contains("  no block is lost") && checked.findings.uncounted.problems == 0, "{text}");
    let records = structures(&disk);
    let (path, at, _) = records.iter().rfind(|(_, _, structure)| *structure == Structure::Record).unwrap();
    let named = disk.fork();
    named.tamper(path, |bytes| bytes[at + 20] ^= 1);
    let (checked, text) = told(&named);
    assert!(checked.findings.lost.values().sum::<u64>() > 0, "{text}");
    assert!(text.contains("become misses") && !text.contains("is not known"), "{text}");
}
