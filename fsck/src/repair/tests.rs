//! What a repair must leave alone: what cannot be read now, what is of a newer program, what is no store.
#![allow(clippy::disallowed_methods, reason = "golden files, outside any store")]

use std::path::Path;

use kvarts_layout::format::VERSION;
use kvarts_layout::format::superblock::Superblock;

use super::*;
use crate::check::{Checked, check};
use crate::disk::MemoryDisk;

const SEGMENT: &str = "shard-0000/segment-00000000";

/// A store as a killed process left it, from the images that are kept.
pub(crate) fn killed() -> MemoryDisk {
    let home = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/testdata/stores/version-1-killed");
    let disk = MemoryDisk::new();
    for folder in ["", "shard-0000"] {
        for entry in std::fs::read_dir(home.join(folder)).unwrap().map(Result::unwrap) {
            let name = entry.file_name().into_string().unwrap();
            if entry.file_type().unwrap().is_file() && name != "content.txt" {
                let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
                disk.plant(&path, std::fs::read(entry.path()).unwrap());
            }
        }
    }
    disk
}

fn look(disk: &MemoryDisk) -> Checked {
    let disks: [Arc<dyn Disk>; 1] = [Arc::new(disk.clone())];
    let mut found = Findings::default();
    let store = survey(&disks, &mut found).unwrap().unwrap();
    check(&store, &Options { threads: 1, ..Options::default() }, &Tally::default(), found).unwrap()
}

fn put_right(disk: &MemoryDisk) -> Result<Repaired, CannotRun> {
    let sites = [Site { disk: Arc::new(disk.clone()), writer: Some(Arc::new(disk.clone())) }];
    repair(&sites, &Options { threads: 1, ..Options::default() }, &Tally::default())
}

/// Repairs and expects that nothing was written and each thing that was not done is told.
fn left_alone(disk: &MemoryDisk, what: &str) -> Vec<Action> {
    let done = put_right(disk).unwrap().actions;
    assert_eq!(disk.steps(), [], "{what}: {done:?}");
    assert!(done.iter().all(|action| action.failed.is_some()), "{what}: {done:?}");
    done
}

#[test]
fn a_checkpoint_that_the_device_refuses_is_a_media_error_and_stays_where_it_is() {
    for (slot, pages) in [("shard-0000/checkpoint-0", 4), ("shard-0000/checkpoint-1", 6)] {
        for page in 0..pages {
            let disk = killed();
            disk.spoil(slot, page);
            let found = look(&disk).findings;
            assert_eq!(found.times("media-error"), 1, "{slot} {page}: {:?}", found.counts);
            assert_eq!(found.times("checkpoint-damaged"), 0, "{slot} {page}: {:?}", found.counts);
            let done = left_alone(&disk, slot);
            assert!(done.iter().any(|action| action.file.ends_with(slot)), "{slot} {page}: {done:?}");
        }
    }
}

#[test]
fn a_segment_of_which_pages_cannot_be_read_keeps_its_list_of_records() {
    let disk = killed();
    let records = look(&disk).records;
    for page in 0..16 {
        let spoiled = disk.fork();
        spoiled.spoil(SEGMENT, page);
        if look(&spoiled).findings.times("media-error") == 0 {
            continue;
        }
        let done = left_alone(&spoiled, &format!("page {page}"));
        assert!(done.iter().any(|action| action.file.ends_with(SEGMENT)), "{done:?}");
        // The device gives the page again: nothing is lost.
        let again = MemoryDisk::new();
        spoiled.files().iter().for_each(|path| again.plant(path, spoiled.contents(path).unwrap()));
        assert_eq!(look(&again).records, records, "page {page}");
    }
}

/// Makes a record header one of a later version, proven by the store's secret.
fn make_newer(page: &mut [u8], secret: &[u8; 32]) {
    page[8..10].copy_from_slice(&2u16.to_le_bytes());
    let mut crc = crc32fast::Hasher::new();
    crc.update(&page[..12]);
    crc.update(&page[32..128]);
    let crc = crc.finalize();
    page[12..16].copy_from_slice(&crc.to_le_bytes());
    let mut domain = [0u8; 24];
    domain[..13].copy_from_slice(b"kvarts record");
    let mut tag = blake3::Hasher::new_keyed(secret);
    tag.update(&domain).update(&page[32..72]);
    tag.update(&page[..16]).update(&[0; 16]).update(&page[32..128]);
    page[16..32].copy_from_slice(&tag.finalize().as_bytes()[..16]);
}

#[test]
fn records_that_depend_on_what_a_newer_program_wrote_are_left_as_they_are() {
    let disk = killed();
    let before = look(&disk);
    disk.tamper(SEGMENT, |bytes| {
        let secret: [u8; 32] = bytes[72..104].try_into().unwrap();
        assert_eq!(&bytes[8192..8200], b"KvartsRC");
        make_newer(&mut bytes[8192..12288], &secret);
    });
    let checked = look(&disk);
    let counts = &checked.findings.counts;
    assert_eq!(checked.findings.times("newer-record"), 1, "{counts:?}");
    assert!(checked.findings.times("depends-on-newer") >= 5, "{counts:?}");
    assert_eq!(checked.findings.times("record-undefined"), 0, "{counts:?}");
    assert!(checked.findings.is_clean(), "{counts:?}");
    assert_eq!(checked.blocks, before.blocks, "they are listed as before");
    left_alone(&disk, "newer");
    // With damage elsewhere in the segment it is sealed again, and they stay listed.
    disk.tamper(SEGMENT, |bytes| bytes[4..100].fill(0x5a));
    assert!(!look(&disk).findings.is_clean());
    let _ = put_right(&disk).unwrap();
    assert_eq!(look(&disk).blocks, before.blocks);
}

#[test]
fn a_lock_that_is_no_plain_file_is_named() {
    for kind in [NodeKind::Link, NodeKind::Folder, NodeKind::Other] {
        let disk = killed();
        disk.plant_odd("lock", kind);
        let found = look(&disk).findings;
        assert_eq!((found.times("not-a-file"), found.problem_count), (1, 1), "{:?}", found.counts);
    }
}

#[test]
fn what_is_no_store_or_of_another_version_is_refused_before_anything_is_moved() {
    let empty = MemoryDisk::new();
    empty.plant_odd("shard-0007", NodeKind::Link);
    assert!(matches!(put_right(&empty), Err(CannotRun::NoStore(_))));
    assert_eq!(empty.steps(), []);
    let newer = killed();
    newer.plant_odd("shard-0007", NodeKind::Link);
    let bytes = newer.contents(SUPERBLOCK).unwrap();
    let superblock = Superblock::decode_pair(&bytes, None).unwrap().superblock;
    let later = Superblock { min_reader: VERSION + 1, ..superblock };
    newer.plant(SUPERBLOCK, [later.encode(0).unwrap(), later.encode(1).unwrap()].concat());
    assert!(matches!(put_right(&newer), Err(CannotRun::Newer(_))));
    assert_eq!(newer.steps(), [], "something in it was moved");
}
