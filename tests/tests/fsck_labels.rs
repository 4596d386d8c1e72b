//! What a defective writer leaves, what is deleted, what a quick check sees: each label that chance damage never makes.

use std::sync::Arc;

use kvarts_fsck::check::{Checked, Level, Options};
use kvarts_fsck::checkpoint::{self, Slot};
use kvarts_fsck::disk::{Disk, MemoryDisk, Step};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::repair::{Repaired, Site, repair};
use kvarts_fsck::segment::{Ends, Keyring};
use kvarts_fsck::store::survey;
use kvarts_fsck::window::{Tally, Window};
use kvarts_layout::format::checkpoint::{CheckpointWriter, Items, RecordState};
use kvarts_layout::format::footer::{self, Content, Footer};
use kvarts_layout::format::seal::{claimed_position, claimed_structure};
use kvarts_layout::format::trailer::{SealReason, Trailer};
use kvarts_layout::format::{PAGE, Structure};
use kvarts_tests::sim::Seed;
use kvarts_tests::witness::{directories, examine, problems, small, worked};

fn store(seed: u64, shards: u32, ops: usize) -> MemoryDisk {
    directories(&worked(Seed(seed), &small(shards), ops, true)).remove(0)
}

/// One with room for many records in a segment.
fn wide(seed: u64, ops: usize) -> MemoryDisk {
    let options = kvarts_store::engine::Options { segment_bytes: 256 << 10, ..small(1) };
    directories(&worked(Seed(seed), &options, ops, true)).remove(0)
}

fn look(disk: &MemoryDisk, level: Level) -> Checked {
    examine(&[disk.fork()], level).unwrap()
}

fn keyring(disk: &MemoryDisk) -> Keyring {
    let disks: [Arc<dyn Disk>; 1] = [Arc::new(disk.clone())];
    survey(&disks, &mut Findings::default()).unwrap().unwrap().keyring
}

fn put_right(disk: &MemoryDisk) -> Repaired {
    let sites = [Site { disk: Arc::new(disk.clone()), writer: Some(Arc::new(disk.clone())) }];
    repair(&sites, &Options { threads: 1, ..Options::default() }, &Tally::default()).unwrap()
}

/// Every page of a store that begins a structure.
fn structures(disk: &MemoryDisk) -> Vec<(String, usize, Structure)> {
    let mut all = Vec::new();
    for path in disk.files() {
        let bytes = disk.contents(&path).unwrap();
        let pages = (0..).step_by(PAGE).zip(bytes.chunks(PAGE));
        all.extend(pages.filter_map(|(at, page)| Some((path.clone(), at, claimed_structure(page)?))));
    }
    all
}

/// A segment of shard 0 that was sealed in order and lists at least four records of blocks.
fn sealed(disk: &MemoryDisk) -> (u32, Ends, Trailer, Footer) {
    let keyring = keyring(disk);
    for segment in 0..100 {
        let Ok(file) = disk.open(&format!("shard-0000/segment-{segment:08}")) else { continue };
        let tally = Tally::default();
        let mut window = Window::new(&*file, keyring.segment_bytes, &tally);
        let ends = Ends::read(&mut window, &keyring, 0, segment);
        let Ok(trailer) = ends.trailer else { continue };
        let footer = ends.footer(&mut window, &trailer, &keyring.secret).unwrap();
        let blocks = footer.records.iter().filter(|entry| matches!(entry.content, Content::Blocks(_)));
        if trailer.reason == SealReason::Normal && blocks.count() >= 4 {
            return (segment, ends, trailer, footer);
        }
    }
    panic!("no segment was sealed in order");
}

/// Writes footer and trailer as a writer would that believes them.
fn write_ends(disk: &MemoryDisk, segment: u32, ends: &Ends, trailer: Trailer, footer: &Footer) {
    let keyring = keyring(disk);
    let image = footer.encode(&ends.trailer_position.at(trailer.footer_offset), &keyring.secret).unwrap();
    let footer_tag = footer::tag_of(&image).unwrap();
    assert!(image.len() <= trailer.footer_bytes as usize);
    let trailer = Trailer { footer_tag, footer_bytes: image.len() as u32, ..trailer };
    let last = trailer.encode(&ends.trailer_position, &keyring.secret).unwrap();
    disk.tamper(&format!("shard-0000/segment-{segment:08}"), |bytes| {
        let at = trailer.footer_offset as usize;
        bytes[at..at + image.len()].copy_from_slice(&image);
        let at = ends.trailer_position.offset as usize;
        bytes[at..at + PAGE].copy_from_slice(&last);
    });
}

/// The problems and notes of a check: label and place.
fn said(checked: &Checked) -> Vec<(&'static str, kvarts_fsck::findings::Place)> {
    let all = checked.findings.problems.iter().chain(&checked.findings.notes);
    all.map(|finding| (finding.label.name, finding.place)).collect()
}

fn expect_repaired(disk: &MemoryDisk, blocks: u64, what: &str) {
    assert_ne!(put_right(disk).actions, [], "{what}: nothing was done");
    let checked = look(disk, Level::Full);
    assert!(checked.findings.is_clean(), "{what}\n{}", problems(&checked));
    assert_eq!(checked.blocks, blocks, "{what}: blocks");
    assert_eq!(put_right(disk).actions, [], "{what}: repaired twice");
}

#[test]
fn a_footer_that_says_something_else_than_its_record_is_named_and_repaired_from_the_record() {
    let disk = wide(41, 90);
    let blocks = look(&disk, Level::Full).blocks;
    let (segment, ends, trailer, mut footer) = sealed(&disk);
    let entry = footer.records.iter_mut().find(|entry| matches!(entry.content, Content::Blocks(_))).unwrap();
    let offset = entry.offset;
    if let Content::Blocks(blocks) = &mut entry.content {
        blocks.created_ms += 1;
    }
    write_ends(&disk, segment, &ends, trailer, &footer);
    let checked = look(&disk, Level::Full);
    let problem = &checked.findings.problems[0];
    assert_eq!((problem.label.name, problem.place.offset), ("footer-disagrees", Some(offset)));
    assert_eq!((checked.findings.problem_count, problem.found.as_deref()), (1, Some("content")));
    expect_repaired(&disk, blocks, "footer");
}

#[test]
fn a_trailer_that_says_something_else_than_its_footer_is_named_and_repaired() {
    let disk = wide(42, 90);
    let blocks = look(&disk, Level::Full).blocks;
    let (segment, ends, trailer, footer) = sealed(&disk);
    for (what, wrong) in [
        ("record_count", Trailer { record_count: trailer.record_count + 1, ..trailer }),
        ("first_sequence", Trailer { first_sequence: trailer.first_sequence - 1, ..trailer }),
        ("last_sequence", Trailer { last_sequence: trailer.last_sequence + 1, ..trailer }),
    ] {
        let disk = disk.fork();
        write_ends(&disk, segment, &ends, wrong, &footer);
        for level in [Level::Quick, Level::Full] {
            let checked = look(&disk, level);
            let problem = &checked.findings.problems[0];
            assert_eq!((problem.label.name, problem.found.as_deref()), ("trailer-disagrees", Some(what)));
            assert_eq!(checked.findings.problem_count, 1, "{}", problems(&checked));
        }
        expect_repaired(&disk, blocks, what);
    }
}

#[test]
fn a_record_that_its_footer_leaves_out_is_named_and_listed_again() {
    let disk = wide(43, 90);
    let blocks = look(&disk, Level::Full).blocks;
    let (segment, ends, trailer, mut footer) = sealed(&disk);
    let is_blocks = |entry: &footer::Entry| matches!(entry.content, Content::Blocks(_));
    let at = footer.records.iter().rposition(is_blocks).unwrap().min(footer.records.len() - 2);
    let at = footer.records[..=at].iter().rposition(is_blocks).unwrap();
    let gone = footer.records.remove(at);
    let records = &footer.records;
    let trailer = Trailer {
        record_count: records.len() as u32,
        first_sequence: records.first().unwrap().sequence,
        last_sequence: records.last().unwrap().sequence,
        ..trailer
    };
    write_ends(&disk, segment, &ends, trailer, &footer);
    let checked = look(&disk, Level::Full);
    let named = checked.findings.problems.iter().find(|one| one.label.name == "record-not-listed").unwrap();
    assert_eq!(named.place.offset, Some(gone.offset));
    assert!(named.blocks > 0 && named.key.is_some());
    expect_repaired(&disk, blocks, "unlisted");
}

/// Writes the newest checkpoint of shard 0 again, with one more record in it.
fn list_in_checkpoint(disk: &MemoryDisk, more: RecordState) {
    let keyring = keyring(disk);
    let tally = Tally::default();
    let known = checkpoint::read(disk, &keyring, 0, (&tally, true), &mut Findings::default());
    let header = known.header.unwrap();
    let slot = header.position.segment;
    let mut all = Vec::new();
    let seen = checkpoint::read_slot(disk, &keyring, (0, slot), &tally, &mut |items| all.push(items));
    assert_eq!(seen, Slot::Whole(header));
    all.push(Items::Records(vec![more]));
    let mut writer = CheckpointWriter::new(&header, &keyring.secret);
    let mut image = writer.header().unwrap();
    all.iter().for_each(|items| image.extend(writer.chunk(items).unwrap()));
    image.extend(writer.end().unwrap());
    disk.plant(&checkpoint::path(0, slot), image);
}

#[test]
fn a_checkpoint_that_lists_a_record_which_its_sealed_segment_lacks_is_named_by_a_deep_check() {
    let disk = wide(44, 90);
    let (segment, ends, trailer, footer) = sealed(&disk);
    let generation = ends.generation().unwrap();
    let state = |offset| RecordState { segment, generation, offset, expires_ms: 0, last_access_s: 1 };
    // One that is there is what a checkpoint is for; one behind the last is in no footer.
    for (offset, expected) in [(footer.records[2].offset, 0), (trailer.log_end, 1)] {
        let disk = disk.fork();
        list_in_checkpoint(&disk, state(offset));
        let deep = look(&disk, Level::Deep);
        assert_eq!(deep.findings.problem_count, expected, "{}", problems(&deep));
        assert_eq!(deep.findings.times("checkpoint-disagrees"), expected);
        for one in &deep.findings.problems {
            assert_eq!((one.place.segment, one.place.offset), (Some(segment), Some(offset)));
        }
        assert!(look(&disk, Level::Full).findings.is_clean(), "only a deep check compares them");
    }
}

#[test]
fn a_deep_check_applies_deletes_before_it_calls_anything_a_copy() {
    let (mut deletes, mut copies) = (0, 0);
    for seed in 70..76 {
        let disk = store(seed, 2, 80);
        let disks: [Arc<dyn Disk>; 1] = [Arc::new(disk.clone())];
        let mut found = Findings::default();
        let whole = survey(&disks, &mut found).unwrap().unwrap();
        let options = Options { threads: 1, ..Options::default() };
        let contents =
            kvarts_fsck::contents::read(&whole, &options, 0, &Tally::default(), Findings::default());
        let fate =
            |fate| contents.runs.iter().flat_map(|run| &run.fates).filter(|one| **one == fate).count() as u64;
        use kvarts_fsck::contents::Fate;
        deletes += fate(Fate::Deleted);
        let deep = look(&disk, Level::Deep).findings;
        let called = deep.times("superseded-copy") + deep.times("copy-of-origin");
        assert_eq!(called, fate(Fate::Copy), "seed {seed}: {:?}", deep.counts);
        copies += called;
    }
    assert!(deletes > 20, "too few deleted blocks to mean anything: {deletes}");
    println!("{deletes} deleted, {copies} copies");
}

#[test]
fn a_definition_that_is_lost_is_written_from_its_copy_in_another_segment() {
    let disk = store(45, 2, 80);
    let whole = look(&disk, Level::Full);
    let mut repaired = 0;
    for (path, at, structure) in structures(&disk) {
        let bytes = disk.contents(&path).unwrap();
        let kind = u16::from_le_bytes(bytes[at + 10..at + 12].try_into().unwrap());
        if structure != Structure::Record || !matches!(kind, 2 | 3) {
            continue;
        }
        let damaged = disk.fork();
        damaged.tamper(&path, |bytes| bytes[at..at + PAGE].fill(0x5a));
        let checked = look(&damaged, Level::Full);
        assert!(!checked.findings.is_clean());
        let done = put_right(&damaged);
        if done.actions.iter().any(|action| action.what.contains("from its copy in another segment")) {
            assert_eq!(damaged.contents(&path).unwrap()[at + 128..at + PAGE], bytes[at + 128..at + PAGE]);
            let again = look(&damaged, Level::Full);
            assert!(again.findings.is_clean(), "{}", problems(&again));
            assert_eq!(again.blocks, whole.blocks, "{path} at {at}: blocks are lost with a definition");
            repaired += 1;
        }
    }
    assert!(repaired >= 4, "{repaired}");
}

#[test]
fn a_quick_check_names_damage_to_metadata_and_does_not_look_at_payloads() {
    let disk = store(46, 2, 40);
    let mut seen = std::collections::BTreeSet::new();
    for (path, at, structure) in structures(&disk) {
        let damaged = disk.fork();
        damaged.tamper(&path, |bytes| bytes[at + 90] ^= 1);
        let quick = look(&damaged, Level::Quick);
        let full = look(&damaged, Level::Full);
        match structure {
            // A sealed segment's footer stands for its records.
            Structure::Record => {
                assert!(quick.findings.is_clean(), "{}", problems(&quick));
                assert!(!full.findings.is_clean());
            }
            // Damage to the older checkpoint looks like one that a crash cut short.
            Structure::CheckpointChunk => {
                assert_eq!(said(&quick), said(&full));
                assert!(!said(&quick).is_empty());
            }
            _ => {
                assert!(!quick.findings.is_clean(), "{structure:?} in {path} at {at}");
                assert_eq!(said(&quick), said(&full), "{structure:?} in {path} at {at}");
            }
        }
        seen.insert(format!("{structure:?}"));
    }
    assert_eq!(seen.len(), Structure::ALL.len(), "{seen:?}");
    let open = directories(&worked(Seed(47), &small(1), 30, false)).remove(0);
    assert!(look(&open, Level::Quick).findings.is_clean(), "a tail is read at every level");
}

#[test]
fn a_store_with_one_superblock_slot_is_clean_and_a_repair_gives_it_the_second() {
    let disk = store(48, 1, 10);
    let image = disk.contents("superblock").unwrap();
    // Power was cut between the two writes that make a store: legal, so it is no problem; but the store would stand on
    // one sector for ever, so a repair, when one is asked for, fills it.
    disk.tamper("superblock", |bytes| bytes[PAGE..].fill(0));
    let checked = look(&disk, Level::Full);
    assert!(checked.findings.is_clean());
    assert_eq!(checked.findings.times("superblock-one-slot"), 1);
    let done = put_right(&disk);
    assert_eq!(done.actions.len(), 1, "{:?}", done.actions);
    assert_eq!(disk.contents("superblock").unwrap(), image);
    assert_eq!(said(&look(&disk, Level::Full)), []);
}

#[test]
fn a_repair_flushes_a_footer_before_it_writes_the_trailer_that_names_it() {
    let disk = store(49, 1, 40);
    let keyring = keyring(&disk);
    let mut trailers = 0;
    for (path, at, structure) in structures(&disk) {
        if !matches!(structure, Structure::Footer | Structure::Trailer | Structure::SegmentHeader) {
            continue;
        }
        let damaged = disk.fork();
        damaged.tamper(&path, |bytes| bytes[at + 200] ^= 4);
        damaged.tamper(&path, |bytes| bytes[at + 20] ^= 4);
        put_right(&damaged);
        let steps = damaged.steps();
        for (number, step) in steps.iter().enumerate() {
            let Step::Write(file, offset, bytes) = step else { continue };
            if claimed_structure(bytes) != Some(Structure::Trailer) {
                continue;
            }
            let position = claimed_position(bytes).unwrap();
            assert_eq!(position.offset, *offset);
            let trailer = Trailer::decode(bytes, &position, &keyring.secret).unwrap();
            let is_footer = |step: &Step| {
                matches!(step, Step::Write(path, at, bytes)
                    if path == file && *at == trailer.footer_offset && footer::tag_of(bytes) == Some(trailer.footer_tag))
            };
            let written = steps[..number].iter().rposition(is_footer).expect("the footer comes first");
            let synced = steps[written..number].iter().any(|step| *step == Step::Sync(file.clone()));
            assert!(synced, "the footer of {path} is not durable before its trailer");
            trailers += 1;
        }
    }
    assert!(trailers > 5, "{trailers}");
}
