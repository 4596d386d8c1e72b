//! Runs the real `kvarts fsck`: exit codes, what it prints, and that it leaves everything as it is.

use std::path::Path;
use std::process::Command;

use crate::scratch::Scratch;
use kvarts_layout::StoreId;
use kvarts_layout::format::Secret;
use kvarts_layout::format::members::Membership;
use kvarts_layout::format::superblock::Superblock;
use serde_json::Value;

/// A store that was made and never used.
pub(crate) fn store(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    let superblock = Superblock {
        store: StoreId(*b"a store of tests"),
        directory: 0,
        sequence: 1,
        secret: Secret::new([7; 32]),
        created_ms: 1,
        segment_bytes: 64 << 10,
        min_reader: kvarts_layout::format::VERSION,
        clean: false,
        directories: 1,
        shards_total: 1,
        shards: vec![0],
        membership: Membership::default(),
    };
    let slots = [superblock.encode(0).unwrap(), superblock.encode(1).unwrap()].concat();
    std::fs::write(scratch.0.join("superblock"), slots).unwrap();
    std::fs::create_dir(scratch.0.join("shard-0000")).unwrap();
    scratch
}

fn fsck(directory: &Path, arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvarts"))
        .arg("fsck")
        .arg(directory)
        .args(arguments)
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_sound_store_is_clean_with_exit_code_0() {
    let store = store("sound");
    let (code, out, err) = fsck(&store.0, &[]);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert!(out.contains("clean"), "{out}");
    let (code, out, _) = fsck(&store.0, &["--json", "--deep"]);
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &json["clean"], &json["records"]), (0, &true.into(), &0.into()));
    assert_eq!(json["problems"], Value::Array(Vec::new()));
    for field in ["bytes_scanned", "gib_per_s", "device_ratio", "notes", "store", "level", "accounting"] {
        assert!(json.get(field).is_some(), "{field} in {out}");
    }
}

#[test]
fn damage_has_exit_code_1_and_says_what_to_do() {
    let store = store("damaged");
    let path = store.0.join("superblock");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[4200] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let (code, out, err) = fsck(&store.0, &[]);
    assert_eq!((code, err.as_str()), (1, ""), "{out}");
    assert!(out.contains("superblock-slot-damaged") && out.contains("--repair"), "{out}");
    let (code, out, _) = fsck(&store.0, &["--json"]);
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &json["clean"]), (1, &false.into()));
    let problem = &json["problems"][0];
    for field in ["label", "severity", "shard", "segment", "offset", "key", "expected", "found"] {
        assert!(problem.get(field).is_some(), "{field} in {out}");
    }
    assert_eq!((&problem["severity"], &problem["offset"]), (&"problem".into(), &4096.into()));
}

#[test]
fn what_cannot_be_checked_has_exit_code_2_and_one_line() {
    let empty = Scratch::new("empty");
    let (code, out, err) = fsck(&empty.0, &[]);
    assert_eq!((code, out.as_str(), err.lines().count()), (2, "", 1), "{err}");
    assert!(err.contains("has no store"), "{err}");
    let (code, _, err) = fsck(&empty.0.join("absent"), &[]);
    assert_eq!((code, err.lines().count()), (2, 1), "{err}");
    std::fs::write(empty.0.join("file"), "text").unwrap();
    assert_eq!(fsck(&empty.0.join("file"), &[]).0, 2);
    assert_eq!(fsck(&empty.0, &[]).0, 2, "strangers' files are no store");
    assert_eq!(fsck(&empty.0, &["--quick", "--deep"]).0, 2);
}

#[test]
fn a_store_in_use_is_refused_unless_it_is_asked_for_live() {
    let store = store("in-use");
    let lock = std::fs::File::create(store.0.join("lock")).unwrap();
    lock.lock().unwrap();
    let (code, _, err) = fsck(&store.0, &[]);
    assert!(code == 2 && err.contains("--live"), "{code} {err}");
    assert_eq!(fsck(&store.0, &["--live"]).0, 0);
}

#[test]
fn a_repair_says_what_it_would_do_does_it_and_is_clean_then() {
    let store = store("repair");
    let path = store.0.join("superblock");
    let whole = std::fs::read(&path).unwrap();
    let mut bytes = whole.clone();
    bytes[100] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let (code, out, _) = fsck(&store.0, &["--repair", "--dry-run"]);
    assert!(code == 1 && out.contains("A repair would do this:") && out.contains("slot 0"), "{code} {out}");
    assert!(out.contains("`kvarts fsck --repair DIR`") && !out.contains("--dry-run"), "{out}");
    assert!(out.contains("Findings by label:\n         1  problem  superblock-slot-damaged\n"), "{out}");
    assert_eq!(std::fs::read(&path).unwrap(), bytes, "a dry run writes nothing");
    assert!(!store.0.join("lock").exists(), "nor does it make a lock");
    let (code, out, _) = fsck(&store.0, &["--repair", "--json"]);
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &json["clean"], &json["dry_run"]), (0, &true.into(), &false.into()), "{out}");
    assert_eq!(json["actions"].as_array().unwrap().len(), 1, "{out}");
    assert_eq!(std::fs::read(&path).unwrap(), whole);
    let (code, out, _) = fsck(&store.0, &["--repair"]);
    assert!(code == 0 && out.contains("No repair is needed"), "{out}");
    assert!(out.ends_with("Findings by label: none.\n"), "{out}");
    assert_eq!(fsck(&store.0, &["--dry-run"]).0, 2);
}

#[test]
fn a_repair_of_what_is_no_store_leaves_nothing_behind() {
    let empty = Scratch::new("repair-none");
    let names = || {
        let names = std::fs::read_dir(&empty.0).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).collect::<std::collections::BTreeSet<_>>()
    };
    for what in ["empty", "with a file", "with a folder of a shard"] {
        let before = names();
        for dry in [&["--repair"][..], &["--repair", "--dry-run"]] {
            let (code, out, err) = fsck(&empty.0, dry);
            assert_eq!((code, out.as_str(), err.lines().count()), (2, "", 1), "{what}: {err}");
            assert!(err.contains("has no store"), "{what}: {err}");
            assert_eq!(names(), before, "{what}");
        }
        match what {
            "empty" => std::fs::write(empty.0.join("a file"), "text").unwrap(),
            _ => std::fs::create_dir_all(empty.0.join("shard-0000")).unwrap(),
        }
    }
    // Nor is a store of a newer program touched, or one whose lock is a link to another file.
    let store = store("repair-link");
    std::os::unix::fs::symlink("elsewhere", store.0.join("lock")).unwrap();
    let (code, _, err) = fsck(&store.0, &["--repair"]);
    assert!(code == 2 && err.contains("not a regular file") && !store.0.join("elsewhere").exists(), "{err}");
}

#[test]
fn a_lost_folder_of_a_shard_is_a_problem_and_made_again_by_a_repair() {
    let store = store("lost-folder");
    std::fs::remove_dir(store.0.join("shard-0000")).unwrap();
    let (code, out, _) = fsck(&store.0, &[]);
    assert!(code == 1 && out.contains("shard-missing") && out.contains("is not known"), "{out}");
    let (code, out, _) = fsck(&store.0, &["--repair", "--dry-run"]);
    assert!(
        code == 1 && out.contains("an empty folder for the shard") && !store.0.join("shard-0000").exists(),
        "{out}"
    );
    assert_eq!(fsck(&store.0, &["--repair"]).0, 0);
    assert!(store.0.join("shard-0000").is_dir());
    assert_eq!(fsck(&store.0, &[]).0, 0);
}

#[test]
fn the_socket_of_a_server_is_no_stray() {
    let store = store("socket");
    let _socket = std::os::unix::net::UnixListener::bind(store.0.join("kvarts.sock")).unwrap();
    let (code, out, _) = fsck(&store.0, &["--json"]);
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &json["notes"]), (0, &Value::Array(Vec::new())), "{out}");
    std::fs::write(store.0.join("kvarts.sock.old"), "").unwrap();
    let (code, out, _) = fsck(&store.0, &[]);
    assert!(code == 0 && out.contains("stray-files (1)"), "{out}");
}
