//! Whatever a directory holds: a clear answer, no panic, no hang, and not a byte changed.
#![allow(clippy::disallowed_methods, reason = "real directories, made bad on purpose")]

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvarts_fsck::check::{Checked, Level, Options, check};
use kvarts_fsck::disk::{Disk, MemoryDisk, NodeKind, RealDisk};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::store::{CannotRun, survey};
use kvarts_fsck::window::Tally;
use kvarts_layout::format::superblock::Superblock;
use kvarts_layout::format::{PAGE, VERSION};
use kvarts_tests::sim::Seed;
use kvarts_tests::witness::{directories, dump, examine, problems, small, worked};

/// A real directory that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvarts-fsck-bad-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn store(name: &str) -> Self {
        let scratch = Self::new(name);
        dump(&stored(), &scratch.0).unwrap();
        scratch
    }

    fn file(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn stored() -> MemoryDisk {
    directories(&worked(Seed(21), &small(2), 30, true)).remove(0)
}

const SEGMENT: &str = "shard-0000/segment-00000000";

/// Length, time of the last change and bytes of a file.
type Facts = (u64, i64, i64, Option<Vec<u8>>);

/// Everything about every file that a write would change.
fn snapshot(root: &Path) -> BTreeMap<PathBuf, Facts> {
    let mut all = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let facts = path.symlink_metadata().unwrap();
            if facts.is_dir() {
                folders.push(path.clone());
            }
            let bytes = facts.is_file().then(|| std::fs::read(&path).unwrap());
            all.insert(path, (facts.len(), facts.mtime(), facts.mtime_nsec(), bytes));
        }
    }
    all
}

/// Checks a real directory at every level: the answers have to be alike, and nothing may change.
fn look(root: &Path) -> Result<Checked, CannotRun> {
    let before = snapshot(root);
    let mut last = None;
    for level in [Level::Quick, Level::Full, Level::Deep] {
        let disk: Arc<dyn Disk> = Arc::new(RealDisk::open(root, true, false).expect("it is a directory"));
        let mut found = Findings::default();
        let checked = survey(&[disk], &mut found).map(|store| match store {
            Some(store) => {
                let options = Options { level, threads: 3, ..Options::default() };
                check(&store, &options, &Tally::default(), found).unwrap()
            }
            None => Checked { findings: found, ..Checked::default() },
        });
        last = Some(checked);
    }
    assert!(before == snapshot(root), "something was written");
    last.unwrap()
}

/// Checks a directory that has these labels and, if they are only notes, is clean.
fn expect(root: &Path, labels: &[&str]) -> Checked {
    let checked = look(root).unwrap();
    for label in labels {
        assert!(checked.findings.times(label) > 0, "{label}: {:?}", checked.findings);
    }
    checked
}

#[test]
fn a_sound_store_is_clean_and_stays_as_it_is() {
    let scratch = Scratch::store("sound");
    let checked = expect(&scratch.0, &["sealed", "record-whole"]);
    assert!(checked.findings.is_clean() && checked.records > 10, "{}", problems(&checked));
    assert!(checked.blocks > 10 && checked.accounting.payload_bytes > 0);
    let sum = checked.accounting;
    let parts = sum.frame_bytes + sum.header_bytes + sum.payload_bytes + sum.unused_bytes;
    assert_eq!(parts, sum.file_bytes, "{sum:?}");
}

#[test]
fn a_directory_that_is_no_store_is_refused() {
    let scratch = Scratch::new("none");
    assert!(matches!(look(&scratch.0), Err(CannotRun::NoStore(_))));
    std::fs::write(scratch.file("a text"), "hello").unwrap();
    std::fs::create_dir(scratch.file("a folder")).unwrap();
    assert!(matches!(look(&scratch.0), Err(CannotRun::NoStore(_))));
    // A shard's folder alone proves nothing.
    std::fs::create_dir(scratch.file("shard-0000")).unwrap();
    std::fs::write(scratch.file(SEGMENT), vec![0x4b; 65_536]).unwrap();
    assert!(matches!(look(&scratch.0), Err(CannotRun::NoStore(_))));
    std::fs::write(scratch.file("superblock"), vec![0x4b; 8192]).unwrap();
    assert!(matches!(look(&scratch.0), Err(CannotRun::NoStore(_))));
}

#[test]
fn a_store_whose_making_was_cut_short_is_clean() {
    let scratch = Scratch::new("half");
    for len in [0, 100, 4096, 8192] {
        std::fs::write(scratch.file("superblock"), vec![0; len]).unwrap();
        let checked = expect(&scratch.0, &["store-half-made"]);
        assert!(checked.findings.is_clean() && checked.records == 0);
    }
}

fn superblock(scratch: &Scratch) -> Superblock {
    Superblock::decode_pair(&std::fs::read(scratch.file("superblock")).unwrap(), None).unwrap().superblock
}

#[test]
fn a_newer_format_is_refused_with_its_version() {
    let scratch = Scratch::store("newer");
    let newer = Superblock { min_reader: VERSION + 1, ..superblock(&scratch) };
    let slots = [newer.encode(0).unwrap(), newer.encode(1).unwrap()].concat();
    std::fs::write(scratch.file("superblock"), slots).unwrap();
    let Err(error) = look(&scratch.0) else { panic!("it was read") };
    assert_eq!(error, CannotRun::Newer(VERSION + 1));
    assert!(error.to_string().contains("newer kvarts"), "{error}");
}

#[test]
fn a_truncated_superblock_costs_nothing_as_long_as_a_slot_is_left() {
    let scratch = Scratch::store("truncated");
    let whole = std::fs::read(scratch.file("superblock")).unwrap();
    let records = expect(&scratch.0, &[]).records;
    std::fs::write(scratch.file("superblock"), &whole[..4096]).unwrap();
    assert_eq!(expect(&scratch.0, &["superblock-truncated"]).records, records);
    std::fs::write(scratch.file("superblock"), &whole[..5000]).unwrap();
    assert_eq!(expect(&scratch.0, &["superblock-truncated"]).records, records);
    // Neither slot is left: the segments know the store.
    for rest in [&whole[..0], &whole[..1000], &[0u8; 8192], &[0x5a; 8192]] {
        std::fs::write(scratch.file("superblock"), rest).unwrap();
        assert_eq!(expect(&scratch.0, &["superblock-lost"]).records, records);
    }
    std::fs::remove_file(scratch.file("superblock")).unwrap();
    assert_eq!(expect(&scratch.0, &["superblock-lost"]).records, records);
    let longer = [&whole[..], b"more"].concat();
    std::fs::write(scratch.file("superblock"), longer).unwrap();
    assert!(expect(&scratch.0, &["superblock-too-long"]).findings.is_clean());
}

#[test]
fn segments_of_another_store_are_named_and_not_read() {
    let scratch = Scratch::store("foreign");
    let other = directories(&worked(Seed(22), &small(2), 30, true)).remove(0);
    let records = expect(&scratch.0, &[]).records;
    std::fs::write(scratch.file("shard-0001/segment-00000099"), other.contents(SEGMENT).unwrap()).unwrap();
    let checked = expect(&scratch.0, &["segment-foreign", "segment-number-unused"]);
    assert_eq!((checked.records, checked.findings.problem_count), (records, 1), "{}", problems(&checked));
}

#[test]
fn links_folders_and_pipes_are_named_and_not_followed() {
    let scratch = Scratch::store("links");
    let elsewhere = Scratch::store("elsewhere");
    symlink(elsewhere.file(SEGMENT), scratch.file("shard-0000/segment-00000090")).unwrap();
    symlink("/dev/zero", scratch.file("shard-0000/segment-00000091")).unwrap();
    std::fs::create_dir(scratch.file("shard-0000/segment-00000092")).unwrap();
    symlink(elsewhere.file("shard-0001"), scratch.file("shard-0007")).unwrap();
    symlink("nowhere", scratch.file("a stray link")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(scratch.file("shard-0001/checkpoint-1.x")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        scratch.file("shard-0001/segment-00000080"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    let checked = expect(&scratch.0, &["not-a-file", "stray-files"]);
    assert_eq!(checked.findings.times("not-a-file"), 5, "{}", problems(&checked));
    assert_eq!(checked.findings.problem_count, 5, "{}", problems(&checked));
    // A superblock that is a link is none.
    std::fs::rename(scratch.file("superblock"), scratch.file("moved")).unwrap();
    symlink("moved", scratch.file("superblock")).unwrap();
    assert!(matches!(look(&scratch.0), Err(CannotRun::Refused(_))));
}

#[test]
fn files_that_may_not_be_opened_and_pages_that_cannot_be_read_are_findings() {
    let disk = stored();
    disk.refuse(SEGMENT);
    disk.refuse("shard-0001/checkpoint-0");
    disk.spoil("shard-0001/segment-00000000", 2);
    disk.spoil("superblock", 1);
    let checked = examine(std::slice::from_ref(&disk), Level::Full).unwrap();
    assert_eq!(checked.findings.times("file-unreadable"), 2, "{}", problems(&checked));
    assert_eq!(checked.findings.times("media-error"), 2, "{}", problems(&checked));
    let media = checked.findings.problems.iter().find(|one| one.label.name == "media-error");
    assert!(media.is_some_and(|one| one.place.offset.is_some()));
    disk.refuse("superblock");
    let refused = examine(std::slice::from_ref(&disk), Level::Full);
    assert!(matches!(refused, Err(CannotRun::Refused(_))) && disk.steps().is_empty());
    let odd = stored();
    odd.plant_odd("shard-0000/segment-00000090", NodeKind::Other);
    assert_eq!(examine(&[odd], Level::Full).unwrap().findings.times("not-a-file"), 1);
}

#[test]
fn a_hundred_thousand_stray_files_are_one_note() {
    let disk = stored();
    let records = examine(std::slice::from_ref(&disk), Level::Full).unwrap().records;
    for number in 0..100_000 {
        disk.plant(&format!("shard-0000/segment-{number}.bak"), Vec::new());
    }
    let checked = examine(std::slice::from_ref(&disk), Level::Full).unwrap();
    assert!(checked.findings.is_clean() && checked.records == records);
    assert_eq!(checked.findings.notes.len(), 1, "{:?}", checked.findings.notes);
    assert!(checked.findings.notes[0].found.as_ref().unwrap().starts_with("100000: "));
    assert!(disk.steps().is_empty(), "something was written");
}

#[test]
fn segments_of_no_bytes_or_of_random_bytes_cost_themselves_only() {
    let scratch = Scratch::store("random");
    let records = expect(&scratch.0, &[]).records;
    let path = scratch.file("shard-0000/segment-00000070");
    std::fs::write(&path, []).unwrap();
    let checked = expect(&scratch.0, &["never-used", "segment-half-made"]);
    assert!(checked.findings.is_clean() && checked.records == records, "{}", problems(&checked));
    let mut rng = Seed(7).rng();
    let noise = rng.bytes(65_536);
    std::fs::write(&path, &noise).unwrap();
    let checked = expect(&scratch.0, &["header-lost-rescan"]);
    assert_eq!((checked.findings.problem_count, checked.records), (1, records), "{}", problems(&checked));
    std::fs::write(&path, noise.repeat(3)).unwrap();
    expect(&scratch.0, &["header-lost-rescan", "segment-too-long"]);
}

#[test]
fn a_payload_full_of_forged_records_is_never_adopted() {
    // Real records of this very store, at the wrong places, in a segment that has lost everything that says what it is.
    let disk = stored();
    let bytes = disk.contents(SEGMENT).unwrap();
    let blocks = examine(std::slice::from_ref(&disk), Level::Full).unwrap().blocks;
    let record = (PAGE..bytes.len()).step_by(PAGE).find(|at| bytes[*at..].starts_with(b"KvartsRC")).unwrap();
    let page = bytes[record..record + PAGE].to_vec();
    let mut forged = page.repeat(65_536 / PAGE);
    disk.plant("shard-0000/segment-00000060", forged.clone());
    let checked = examine(std::slice::from_ref(&disk), Level::Deep).unwrap();
    assert!(checked.findings.times("misdirected-record") > 0 && checked.blocks == blocks);
    // The same under another secret, each at the place it claims: only the tag gives them away.
    for (at, page) in (0u64..).step_by(PAGE).zip(forged.chunks_mut(PAGE)) {
        page[52..56].copy_from_slice(&60u32.to_le_bytes());
        page[64..72].copy_from_slice(&at.to_le_bytes());
        let mut crc = crc32fast::Hasher::new();
        crc.update(&page[..12]);
        crc.update(&page[32..128]);
        let crc = crc.finalize();
        page[12..16].copy_from_slice(&crc.to_le_bytes());
    }
    disk.plant("shard-0000/segment-00000060", forged);
    let checked = examine(std::slice::from_ref(&disk), Level::Deep).unwrap();
    assert_eq!(checked.blocks, blocks);
    assert!(disk.steps().is_empty(), "something was written");
    assert!(checked.findings.times("header-lost-rescan") == 1, "{}", problems(&checked));
}

#[test]
fn directories_that_do_not_belong_together_are_refused_and_missing_ones_are_named() {
    let one = stored();
    let other = directories(&worked(Seed(22), &small(2), 10, true)).remove(0);
    assert!(matches!(examine(&[one.clone(), other], Level::Quick), Err(CannotRun::Mixed(_))));
    assert!(matches!(examine(&[one.clone(), one.fork()], Level::Quick), Err(CannotRun::Mixed(_))));
    let options = kvarts_store::engine::Options { directories: 2, ..small(1) };
    let both = directories(&worked(Seed(23), &options, 10, true));
    assert!(examine(&both, Level::Full).unwrap().findings.is_clean());
    let checked = examine(&both[..1], Level::Full).unwrap();
    assert_eq!(checked.findings.times("directory-missing"), 1, "{}", problems(&checked));
}
