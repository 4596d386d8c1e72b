//! Stores as earlier programs wrote them: where they lie, and what is in one as the checker's crate reads it.
#![allow(clippy::disallowed_methods, reason = "golden files, outside any store")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvarts_fsck::check::Options as CheckOptions;
use kvarts_fsck::contents::{Fate, read};
use kvarts_fsck::disk::{Disk, MemoryDisk};
use kvarts_fsck::export::{Selection, export};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::store::survey;
use kvarts_fsck::window::Tally;
use kvarts_layout::export::{Frame, HEAD_BYTES, Head, Reading};

/// The folder of all images that are kept.
pub fn home() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/stores")
}

/// The folders of all images, of every version.
pub fn folders() -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = match std::fs::read_dir(home()) {
        Ok(entries) => entries.filter_map(|entry| Some(entry.ok()?.path())).collect(),
        Err(_) => Vec::new(),
    };
    all.sort();
    all
}

/// An image, in memory.
pub fn load(folder: &Path) -> MemoryDisk {
    let disk = MemoryDisk::new();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        if entry.file_type().unwrap().is_dir() {
            disk.plant_folder(&name);
            for file in std::fs::read_dir(entry.path()).unwrap().map(Result::unwrap) {
                let path = format!("{name}/{}", file.file_name().into_string().unwrap());
                disk.plant(&path, std::fs::read(file.path()).unwrap());
            }
        } else if name != "content.txt" {
            disk.plant(&name, std::fs::read(entry.path()).unwrap());
        }
    }
    disk
}

/// Every block that counts, a line each: namespace, key, group, coordinate, origin id, content id.
pub fn content(disk: &MemoryDisk) -> String {
    let disks: [Arc<dyn Disk>; 1] = [Arc::new(disk.clone())];
    let store = survey(&disks, &mut Findings::default()).unwrap().unwrap();
    let options = CheckOptions { threads: 1, ..CheckOptions::default() };
    let contents = read(&store, &options, 0, &Tally::default(), Findings::default());
    let mut file = Vec::new();
    export(&store, &contents, &Selection::All, (0, &Tally::default()), &mut file).unwrap();
    let mut reading = Reading::new();
    let mut lines = BTreeSet::new();
    let mut rest = file.as_slice();
    while let Some((head, behind)) = rest.split_first_chunk::<HEAD_BYTES>() {
        let head = Head::decode(head).unwrap();
        let (body, behind) = behind.split_at(head.body_bytes());
        rest = &behind[head.payload_bytes() as usize..];
        let Frame::Run(run) = reading.frame(&head, body).unwrap() else { continue };
        for block in &run.blocks {
            let (namespace, column) = (run.namespace, run.coordinate.to_u64());
            lines.insert(format!(
                "{namespace} {} {} {column} {} {}\n",
                block.key, run.group.0, block.origin, block.content
            ));
        }
    }
    let live = contents.runs.iter().flat_map(|run| &run.fates).filter(|fate| **fate == Fate::Live).count();
    assert_eq!(lines.len(), live);
    lines.into_iter().collect()
}
