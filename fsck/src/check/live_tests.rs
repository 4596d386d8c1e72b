//! A store in use: what leaves it between two looks is no problem, what is damaged stays one.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvarts_layout::format::checkpoint::{CheckpointWriter, Items, SEGMENT_FREE};

use super::{Checked, Options, check};
use crate::checkpoint::{self, path, read_slot};
use crate::contents::{self, Fate};
use crate::disk::{Disk, DiskFile, MemoryDisk, Node};
use crate::export::{Selection, export};
use crate::findings::Findings;
use crate::repair::tests::killed;
use crate::store::{Store, survey};
use crate::window::Tally;

const SEGMENT: &str = "shard-0000/segment-00000000";

fn options(live: bool) -> Options {
    Options { threads: 1, live, ..Options::default() }
}

fn surveyed(disk: &MemoryDisk) -> Store {
    let disks: [Arc<dyn Disk>; 1] = [Arc::new(disk.clone())];
    survey(&disks, &mut Findings::default()).unwrap().unwrap()
}

fn look(store: &Store, live: bool) -> Checked {
    check(store, &options(live), &Tally::default(), Findings::default()).unwrap()
}

#[test]
fn a_segment_that_goes_after_it_was_listed_is_a_problem_only_where_nobody_uses_the_store() {
    let disk = killed();
    let store = surveyed(&disk);
    disk.remove(SEGMENT);
    let live = look(&store, true).findings;
    assert!(live.is_clean(), "{:?}", live.problems);
    assert_eq!(live.times("live-changed"), 1);
    assert_eq!(look(&store, false).findings.times("file-unreadable"), 1);
}

#[test]
fn a_segment_that_a_checkpoint_calls_used_and_that_is_blank_is_a_problem_beside_a_store_in_use_too() {
    let disk = killed();
    disk.tamper(SEGMENT, |bytes| bytes.fill(0));
    assert!(!look(&surveyed(&disk), false).findings.is_clean());
    assert!(!look(&surveyed(&disk), true).findings.is_clean());
}

#[test]
fn an_export_beside_a_store_in_use_tells_what_left_from_what_is_damaged() {
    let wrote = |disk: &MemoryDisk, live: bool, change: &dyn Fn()| {
        let store = surveyed(disk);
        let contents = contents::read(&store, &options(live), 0, &Tally::default(), Findings::default());
        let runs = contents.runs.iter().filter(|run| run.segment == 0);
        let there = runs.flat_map(|run| &run.fates).filter(|fate| **fate == Fate::Live).count() as u64;
        change();
        let mut file = Vec::new();
        let done = export(&store, &contents, &Selection::All, (0, &Tally::default()), &mut file).unwrap();
        (there, done.blocks_left_out, done.blocks_gone)
    };
    for live in [true, false] {
        let disk = killed();
        let (there, left_out, gone) = wrote(&disk, live, &|| disk.remove(SEGMENT));
        assert!(there > 0);
        assert_eq!((left_out, gone), if live { (0, there) } else { (there, 0) });
    }
    let disk = killed();
    let damage = || disk.tamper(SEGMENT, |bytes| bytes[20_000..60_000].fill(0x5a));
    let (_, left_out, gone) = wrote(&disk, true, &damage);
    assert!(left_out > 0 && gone == 0, "{left_out} {gone}");
}

/// A disk on which something happens when [`SEGMENT`] is opened for the first time.
#[derive(Debug)]
struct Busy {
    disk: MemoryDisk,
    change: fn(&MemoryDisk),
    happened: AtomicBool,
}

impl Disk for Busy {
    fn name(&self) -> String {
        self.disk.name()
    }

    fn visit(&self, folder: &str, each: &mut dyn FnMut(Node)) -> io::Result<()> {
        self.disk.visit(folder, each)
    }

    fn open(&self, path: &str) -> io::Result<Box<dyn DiskFile>> {
        if path == SEGMENT && !self.happened.swap(true, Ordering::Relaxed) {
            (self.change)(&self.disk);
        }
        self.disk.open(path)
    }
}

/// What a check says of a store in which something changes after its checkpoints were read.
fn look_while(change: fn(&MemoryDisk)) -> Findings {
    let disks: [Arc<dyn Disk>; 1] =
        [Arc::new(Busy { disk: killed(), change, happened: AtomicBool::new(false) })];
    let store = survey(&disks, &mut Findings::default()).unwrap().unwrap();
    look(&store, true).findings
}

/// Writes the next checkpoint, which says that the first segment is free, or the same as the last.
fn write_checkpoint(disk: &MemoryDisk, is_free: bool) {
    let store = surveyed(disk);
    let newest =
        checkpoint::read(disk, &store.keyring, 0, (&Tally::default(), false), &mut Findings::default());
    let before = newest.header.unwrap();
    let mut header = before;
    header.position.segment = 1 - before.position.segment;
    header.position.generation += 1;
    let mut writer = CheckpointWriter::new(&header, &store.keyring.secret);
    let mut image = writer.header().unwrap();
    read_slot(disk, &store.keyring, (0, before.position.segment), &Tally::default(), &mut |mut items| {
        match &mut items {
            Items::Segments(states) if is_free => {
                let first = states.iter_mut().find(|state| state.segment == 0).unwrap();
                first.state = SEGMENT_FREE;
            }
            Items::Records(records) if is_free => records.retain(|record| record.segment != 0),
            _ => {}
        }
        if matches!(&items, Items::Records(records) if records.is_empty()) {
            return;
        }
        image.extend(writer.chunk(&items).unwrap());
    });
    image.extend(writer.end().unwrap());
    disk.plant(&path(0, header.position.segment), image);
}

#[test]
fn a_segment_that_is_made_again_while_it_is_checked_is_no_problem_if_a_newer_checkpoint_calls_it_free() {
    let found = look_while(|disk| {
        write_checkpoint(disk, true);
        disk.tamper(SEGMENT, |bytes| bytes.fill(0));
    });
    assert!(found.is_clean(), "{:?}", found.problems);
    // Without its length, as it is for a moment.
    let found = look_while(|disk| {
        write_checkpoint(disk, true);
        disk.tamper(SEGMENT, Vec::clear);
    });
    assert!(found.is_clean(), "{:?}", found.problems);
    // One that calls it used tells nothing new.
    let found = look_while(|disk| {
        write_checkpoint(disk, false);
        disk.tamper(SEGMENT, |bytes| bytes.fill(0));
    });
    assert!(!found.is_clean());
}
