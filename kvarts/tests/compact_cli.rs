//! Runs the real `kvarts compact`: exit codes, what it prints, and what it refuses.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::scratch::Scratch;
use kvarts_store::home::{Home, HomeOptions};
use serde_json::Value;

fn store(scratch: &Scratch) -> PathBuf {
    let path = scratch.0.join("store");
    Home::open(&options(&path)).unwrap().close().unwrap();
    path
}

fn options(path: &Path) -> HomeOptions {
    let store = kvarts_store::engine::Options { budget_bytes: 1 << 30, ..Default::default() };
    HomeOptions { directories: vec![path.to_owned()], store, ..HomeOptions::default() }
}

/// Every file below a directory with its bytes.
fn walk(folder: &Path) -> std::collections::BTreeMap<PathBuf, Vec<u8>> {
    let mut all = std::collections::BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(walk(&path));
        } else {
            all.insert(path.clone(), std::fs::read(&path).unwrap());
        }
    }
    all
}

fn kvarts(arguments: &[&str], directory: &Path) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
    let output = command.arg(arguments[0]).arg(directory).args(&arguments[1..]).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_sound_store_is_compacted_with_exit_code_0_and_silently() {
    let scratch = Scratch::new("sound");
    let store = store(&scratch);
    let (code, out, err) = kvarts(&["compact", "--dry-run"], &store);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    let (code, out, err) = kvarts(&["compact", "--json"], &store);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    let json: Value = serde_json::from_str(&out).unwrap();
    for field in
        ["live_blocks", "segments_before", "segments_after", "bytes_written", "gib_per_s", "graves_after"]
    {
        assert!(json.get(field).is_some(), "{field} in {out}");
    }
    let (code, out, _) = kvarts(&["compact"], &store);
    assert!(code == 0 && out.contains("live blocks"), "{out}");
    Home::open(&options(&store)).unwrap().close().unwrap();
}

#[test]
fn a_new_store_goes_into_an_empty_directory_only() {
    let scratch = Scratch::new("to");
    let (store, new) = (store(&scratch), scratch.0.join("new"));
    let to = new.to_str().unwrap();
    assert_eq!(kvarts(&["compact", "--to", to, "--shards", "3", "--zstd"], &store).0, 0);
    assert_eq!(kvarts(&["fsck", "--deep"], &new).0, 0);
    Home::open(&options(&new)).unwrap().close().unwrap();
    let (code, out, err) = kvarts(&["compact", "--to", to], &store);
    assert_eq!((code, out.as_str(), err.lines().count()), (2, "", 1), "{err}");
    assert!(err.contains("not empty"), "{err}");
    assert_eq!(kvarts(&["compact", "--shards", "3"], &store).0, 2, "only of a new store");
    assert_eq!(
        kvarts(&["compact", "--to", scratch.0.join("x").to_str().unwrap(), "--shards", "65"], &store).0,
        2
    );
}

#[test]
fn an_interrupted_copy_is_named_in_one_sentence_and_begun_anew() {
    let scratch = Scratch::new("interrupted");
    let (store, new) = (store(&scratch), scratch.0.join("new"));
    let to = new.to_str().unwrap();
    assert_eq!(kvarts(&["compact", "--to", to], &store).0, 0);
    std::fs::rename(new.join("superblock"), new.join("superblock.new")).unwrap();
    std::fs::write(new.join("unfinished-copy"), "?").unwrap();
    for arguments in [&["fsck"][..], &["fsck", "--repair"], &["inspect"], &["compact"]] {
        let (code, _, err) = kvarts(arguments, &new);
        let named = err.contains("unfinished copy of a store") && err.contains("kvarts compact --to");
        assert!(code == 2 && named && err.lines().count() == 1, "{arguments:?}: {code} {err}");
    }
    let refused = Home::open(&options(&new)).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(refused.contains("unfinished copy of a store"), "{refused}");
    assert_eq!(kvarts(&["compact", "--dry-run", "--to", to], &store).0, 0);
    assert!(new.join("unfinished-copy").exists(), "a dry run removed it");
    assert_eq!(kvarts(&["compact", "--to", to, "--shards", "2"], &store).0, 0);
    assert_eq!(kvarts(&["fsck", "--deep"], &new).0, 0);
    Home::open(&options(&new)).unwrap().close().unwrap();
}

#[test]
fn what_is_open_or_damaged_or_no_store_is_refused() {
    let scratch = Scratch::new("refused");
    let store = store(&scratch);
    let home = Home::open(&options(&store)).unwrap();
    let (code, _, err) = kvarts(&["compact"], &store);
    assert!(code == 2 && err.contains("in use"), "{code} {err}");
    home.close().unwrap();
    let path = store.join("superblock");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[4200] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let files = || walk(&store);
    let before = files();
    for arguments in [&["compact"][..], &["compact", "--json"], &["compact", "--dry-run"]] {
        let (code, _, err) = kvarts(arguments, &store);
        assert!(
            code == 2 && err.contains("kvarts fsck --repair") && err.contains("superblock"),
            "{code} {err}"
        );
        assert!(err.contains("nothing was written"), "{err}");
    }
    assert!(files() == before, "something was written");
    let (code, out, err) = kvarts(&["compact"], &scratch.0);
    assert_eq!((code, out.as_str(), err.lines().count()), (2, "", 1), "{err}");
    assert!(!scratch.0.join("lock").exists(), "it left something in a directory that is no store's");
}
