//! Runs the real `kvarts fsck` on whatever a directory may hold: the right exit code, a report that names it, no panic, no
//! hang, and not a name or byte changed, at every level and also where only the metadata is looked at.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::depth::depth;
use crate::scratch::Scratch;
use kvarts_layout::StoreId;
use kvarts_layout::format::members::Membership;
use kvarts_layout::format::segment::SegmentHeader;
use kvarts_layout::format::superblock::Superblock;
use kvarts_layout::format::{PAGE, Position, Secret, VERSION};
use serde_json::Value;

const SEGMENT_BYTES: u64 = 64 << 10;
const SEGMENT: &str = "shard-0000/segment-00000000";

/// A store that was made, with one segment that was begun.
fn store(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    write(&scratch, "superblock", &slots(VERSION, VERSION));
    std::fs::create_dir(scratch.0.join("shard-0000")).unwrap();
    write(&scratch, SEGMENT, &segment(ID));
    scratch
}

fn write(scratch: &Scratch, path: &str, bytes: &[u8]) {
    std::fs::write(scratch.0.join(path), bytes).unwrap();
}

const ID: StoreId = StoreId(*b"a store of tests");

fn slots(first: u16, second: u16) -> Vec<u8> {
    let state = |min_reader| Superblock {
        store: ID,
        directory: 0,
        sequence: 1,
        secret: Secret::new([7; 32]),
        created_ms: 1,
        segment_bytes: SEGMENT_BYTES,
        min_reader,
        clean: false,
        directories: 1,
        shards_total: 1,
        shards: vec![0],
        membership: Membership::default(),
    };
    [state(first).encode(0).unwrap(), state(second).encode(1).unwrap()].concat()
}

fn segment(store: StoreId) -> Vec<u8> {
    let header = SegmentHeader {
        position: Position { store, shard: 0, segment: 0, generation: 1, offset: 0 },
        secret: Secret::new([7; 32]),
        created_ms: 1,
        segment_bytes: SEGMENT_BYTES,
        first_sequence: 1,
    };
    let mut image = header.encode().unwrap();
    image.resize(SEGMENT_BYTES as usize, 0);
    image
}

/// Bytes that mean nothing, the same each time.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Length, seconds and nanoseconds of the last change, mode, and the bytes of a plain file.
type Trace = (u64, i64, i64, u32, Option<Vec<u8>>);

/// Everything about every name that a write would change.
fn snapshot(root: &Path) -> BTreeMap<PathBuf, Trace> {
    let mut all = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        for entry in entries {
            let path = entry.unwrap().path();
            let facts = path.symlink_metadata().unwrap();
            if facts.is_dir() {
                folders.push(path.clone());
            }
            let bytes = if facts.is_file() { std::fs::read(&path).ok() } else { None };
            all.insert(path, (facts.len(), facts.mtime(), facts.mtime_nsec(), facts.mode(), bytes));
        }
    }
    all
}

/// Runs a check at every level: the exit code, and each label or word in the report, or else in the line that says why
/// there is none.
fn expect(scratch: &Scratch, code: i32, words: &[&str]) {
    let before = snapshot(&scratch.0);
    for level in [&["--quick"][..], &[], &["--deep"], &["--json"], &["--repair", "--dry-run"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_kvarts"))
            .arg("fsck")
            .arg(&scratch.0)
            .args(level)
            .output()
            .unwrap();
        let out = String::from_utf8(output.stdout).unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        let shown = format!("{level:?}: {out}{err}");
        assert_eq!(output.status.code(), Some(code), "{shown}");
        assert_eq!(err.lines().count(), usize::from(code == 2), "{shown}");
        assert!(words.iter().all(|word| out.contains(word) || err.contains(word)), "{words:?} in {shown}");
        if level == ["--json"] {
            let json: Value = serde_json::from_str(&out).unwrap();
            assert_eq!((json.get("error").is_some(), json["clean"] == true), (code == 2, code == 0), "{out}");
        }
    }
    assert!(before == snapshot(&scratch.0), "something was written");
}

#[test]
fn what_is_no_store_has_exit_code_2() {
    let scratch = Scratch::new("none");
    expect(&scratch, 2, &["has no store"]);
    write(&scratch, "a file", b"text");
    std::fs::create_dir(scratch.0.join("shard-0000")).unwrap();
    expect(&scratch, 2, &["has no store"]);
    write(&scratch, SEGMENT, &noise(SEGMENT_BYTES as usize));
    expect(&scratch, 2, &["has no store"]);
}

#[test]
fn a_newer_format_has_exit_code_2() {
    let store = store("newer");
    write(&store, "superblock", &slots(VERSION + 1, VERSION + 1));
    expect(&store, 2, &["newer kvarts"]);
}

#[test]
fn superblocks_that_were_cut_have_exit_code_1_as_long_as_a_segment_names_the_store() {
    let store = store("cut");
    expect(&store, 0, &["clean"]);
    let whole = slots(VERSION, VERSION);
    for len in [PAGE, PAGE + 700] {
        write(&store, "superblock", &whole[..len]);
        expect(&store, 1, &["superblock-truncated"]);
    }
    for bytes in [&whole[..0], &whole[..700], &[0; 2 * PAGE], &noise(2 * PAGE)] {
        write(&store, "superblock", bytes);
        expect(&store, 1, &["superblock-lost"]);
    }
    std::fs::remove_file(store.0.join(SEGMENT)).unwrap();
    write(&store, "superblock", &noise(2 * PAGE));
    expect(&store, 2, &["has no store"]);
}

#[test]
fn segments_of_another_store_of_no_bytes_or_of_noise_have_the_codes_that_they_deserve() {
    let store = store("segments");
    let more = "shard-0000/segment-00000001";
    write(&store, more, b"");
    expect(&store, 0, &["segment-half-made"]);
    write(&store, more, &noise(SEGMENT_BYTES as usize));
    expect(&store, 1, &["header-lost-rescan"]);
    write(&store, more, &segment(StoreId(*b"another store of")));
    expect(&store, 1, &["segment-foreign"]);
}

#[test]
fn links_and_other_things_that_are_no_files_have_exit_code_1() {
    let store = store("links");
    symlink("/dev/zero", store.0.join("shard-0000/segment-00000001")).unwrap();
    symlink("/", store.0.join("shard-0003")).unwrap();
    std::fs::create_dir(store.0.join("shard-0000/checkpoint-0")).unwrap();
    expect(&store, 1, &["not-a-file"]);
    std::fs::rename(store.0.join("superblock"), store.0.join("moved")).unwrap();
    symlink("moved", store.0.join("superblock")).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_kvarts")).arg("fsck").arg(&store.0).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn files_that_may_not_be_read_have_exit_code_1_where_the_user_is_not_allowed_everything() {
    let store = store("unreadable");
    let close = |path: &str, mode| {
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(store.0.join(path), permissions).unwrap();
    };
    close(SEGMENT, 0);
    if std::fs::read(store.0.join(SEGMENT)).is_err() {
        expect(&store, 1, &["file-unreadable"]);
        close(SEGMENT, 0o600);
        close("shard-0000", 0);
        expect(&store, 1, &["folder-unreadable"]);
        close("shard-0000", 0o700);
        close("superblock", 0);
        expect(&store, 2, &["could not be opened"]);
    }
    close(SEGMENT, 0o600);
}

#[test]
fn thousands_of_stray_files_have_exit_code_0_and_one_line() {
    let count = depth(2_000, 100_000);
    let store = store("strays");
    for number in 0..count {
        std::fs::File::create(store.0.join(format!("shard-0000/segment-{number:08}.bak"))).unwrap();
    }
    let output = Command::new(env!("CARGO_BIN_EXE_kvarts")).arg("fsck").arg(&store.0).output().unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{out}");
    assert!(out.contains("stray-files (1)") && out.contains(&format!("{count}: ")), "{out}");
    assert!(out.lines().count() < 12, "{out}");
    assert_eq!(std::fs::read_dir(store.0.join("shard-0000")).unwrap().count(), count + 1);
}
