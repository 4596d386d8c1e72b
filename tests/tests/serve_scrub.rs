//! The scrubber: finds damaged blocks on disk that no client has read, makes them misses, and says so.

#![allow(clippy::disallowed_methods, reason = "damages the files of a real server")]

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::served::ClientStage;
use kvarts_contract::api::{ContainsRequest, KvStore, Presence};
use kvarts_layout::{BlockKey, Layout};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture;

/// All files below a directory.
fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap().flatten() {
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => files(&entry.path(), found),
            kind if kind.is_file() => found.push(entry.path()),
            _ => {}
        }
    }
}

/// Flips a bit in the middle of what lies on disk as these bytes.
fn damage(directory: &Path, bytes: &[u8]) {
    let mut all = Vec::new();
    files(directory, &mut all);
    for path in all {
        let image = std::fs::read(&path).unwrap();
        let Some(at) = image.windows(bytes.len()).position(|window| window == bytes) else { continue };
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        let middle = at + bytes.len() / 2;
        file.write_all_at(&[image[middle] ^ 1], middle as u64).unwrap();
        file.sync_all().unwrap();
        return;
    }
    panic!("the block is nowhere on disk");
}

fn here(stage: &ClientStage, desk: &Desk<'_>, keys: &[BlockKey]) -> Vec<bool> {
    let (group, coordinate) = pages();
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys, lease: None };
    let reply = stage.client.contains(&request).unwrap();
    reply.presence.iter().map(|one| *one == Presence::Here).collect()
}

#[test]
fn a_flipped_bit_on_disk_is_found_told_and_served_no_more() {
    let stage = ClientStage::open("scrub");
    let desk = Desk::new(&stage, "scrubbed");
    let keys = desk.keys(0..8);
    desk.store(pages(), &keys, 1, Layout::FullBlock);
    let good = stage.client.scrub().unwrap();
    assert_eq!((good.blocks_checked, good.blocks_damaged, good.blocks_passed_over), (8, 0, 0), "{good:?}");
    let (group, coordinate) = pages();
    let shape = fixture::shape(group, coordinate);
    assert_eq!(good.bytes_checked, 8 * shape.block_bytes());
    let content = fixture::content(&keys[3], group, coordinate, 1, &shape);
    damage(stage.served.scratch.path(), &content[0]);
    assert_eq!(here(&stage, &desk, &keys), [true; 8], "the damage is not known yet");
    let found = stage.client.scrub().unwrap();
    assert_eq!((found.blocks_checked, found.blocks_damaged), (8, 1), "{found:?}");
    let mut expected = [true; 8];
    expected[3] = false;
    assert_eq!(here(&stage, &desk, &keys), expected);
    let after = stage.client.scrub().unwrap();
    assert_eq!((after.blocks_checked, after.blocks_damaged), (7, 0), "{after:?}");
    let metrics = stage.served.metrics();
    for line in
        ["kvarts_scrub_runs_total 3", "kvarts_scrub_blocks_damaged_total 1", "kvarts_scrub_blocks_total 23"]
    {
        assert!(metrics.lines().any(|one| one == line), "{line}: {metrics}");
    }
}

#[test]
fn a_scrub_reads_blocks_whose_model_nobody_has_registered_since_the_start() {
    let mut stage = ClientStage::open("scrub-restart");
    let desk = Desk::new(&stage, "scrubbed");
    desk.store(pages(), &desk.keys(0..5), 1, Layout::LayerBlock);
    let at = stage.served.daemon().grpc().unwrap();
    stage.served.restart_at(at);
    let report = stage.client.scrub().unwrap();
    assert_eq!((report.blocks_checked, report.blocks_damaged), (5, 0), "{report:?}");
}
