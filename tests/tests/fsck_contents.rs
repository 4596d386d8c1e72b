//! What the offline reader says a store has is what the engine finds again, and what it exports is that and nothing else.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::fsck_damage::encoded_store;
use kvarts_contract::api::KvStore;
use kvarts_fsck::check::Options as CheckOptions;
use kvarts_fsck::contents::counted::count;
use kvarts_fsck::contents::{Contents, Fate, read};
use kvarts_fsck::disk::{Disk, MemoryDisk};
use kvarts_fsck::export::{Exported, Selection, export, export_counted};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::store::{Store as Offline, survey};
use kvarts_fsck::tree::{lineage, trees};
use kvarts_fsck::window::Tally;
use kvarts_layout::export::{Frame, HEAD_BYTES, Head, Reading};
use kvarts_layout::format::body::Parent;
use kvarts_layout::{BlockKey, Coordinate, Group, IndexKey};
use kvarts_tests::campaign::{Driven, drive, reopen};
use kvarts_tests::sim::{Media, Seed, WorldConfig};
use kvarts_tests::witness::{directories, small, worked};

fn offline(disk: &MemoryDisk) -> (Offline, Contents) {
    let disks: [Arc<dyn Disk>; 1] = [Arc::new(disk.clone())];
    let store = survey(&disks, &mut Findings::default()).unwrap().unwrap();
    let options = CheckOptions { threads: 1, ..CheckOptions::default() };
    let contents = read(&store, &options, 0, &Tally::default(), Findings::default());
    (store, contents)
}

fn live(contents: &Contents) -> BTreeSet<IndexKey> {
    let mut all = BTreeSet::new();
    for run in &contents.runs {
        for (name, fate) in run.blocks.blocks.iter().zip(&run.fates) {
            let key = IndexKey {
                namespace: run.namespace.id,
                key: BlockKey(name.key),
                group: Group(run.blocks.group),
                coordinate: Coordinate::from_u64(run.blocks.coordinate).unwrap(),
            };
            if *fate == Fate::Live {
                assert!(all.insert(key), "a block is live twice");
            }
        }
    }
    all
}

/// Everything that the engine finds on an image.
fn found_again(seed: Seed, image: Media, shards: u32) -> BTreeSet<IndexKey> {
    let opened = reopen(seed, &WorldConfig::default(), &small(shards), image).unwrap();
    let listed = async {
        let mut all = BTreeSet::new();
        let mut cursor = None;
        loop {
            let page = opened.store.snapshot(cursor).await.unwrap().unwrap();
            all.extend(page.blocks);
            match page.next {
                Some(next) => cursor = Some(next),
                None => return all,
            }
        }
    };
    match drive(&opened.world, u64::MAX, listed) {
        Driven::Done(all) => all,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_counts_offline_is_what_the_engine_finds_again() {
    let mut dead = 0;
    for seed in 0..12u64 {
        let shards = 1 + (seed % 2) as u32;
        let image = worked(Seed(seed), &small(shards), 70, seed % 3 != 0);
        let (_, contents) = offline(&directories(&image).remove(0));
        let expected = found_again(Seed(seed), image, shards);
        assert_eq!(live(&contents), expected, "seed {seed}");
        dead += contents.runs.iter().flat_map(|run| &run.fates).filter(|fate| **fate != Fate::Live).count();
        let sum = |view: &kvarts_fsck::contents::SegmentView| {
            view.live_bytes + view.dead_bytes + view.overhead_bytes + view.free_bytes
        };
        assert!(contents.segments.iter().all(|view| sum(view) == view.bytes), "seed {seed}");
    }
    assert!(dead > 100, "too little was deleted to mean anything: {dead}");
}

/// Every block of an export, verified.
fn exported(file: &[u8]) -> BTreeSet<IndexKey> {
    let mut reading = Reading::new();
    let mut all = BTreeSet::new();
    let mut rest = file;
    while let Some((head, behind)) = rest.split_first_chunk::<HEAD_BYTES>() {
        let head = Head::decode(head).unwrap();
        let (body, behind) = behind.split_at(head.body_bytes());
        let (payload, behind) = behind.split_at(head.payload_bytes() as usize);
        rest = behind;
        let Frame::Run(run) = reading.frame(&head, body).unwrap() else { continue };
        let shape = run.shape(reading.namespace(run.namespace).unwrap()).unwrap();
        for (at, bytes) in payload.chunks(run.block_bytes as usize).enumerate() {
            run.verify(at, &shape, bytes).unwrap();
        }
        for block in &run.blocks {
            let (namespace, group, coordinate) = (run.namespace, run.group, run.coordinate);
            assert!(all.insert(IndexKey { namespace, key: block.key, group, coordinate }), "twice");
        }
    }
    assert!(reading.has_ended());
    all
}

#[test]
fn an_export_has_what_counts_whatever_layout_it_lies_in_and_nothing_that_is_deleted() {
    for seed in 20..26u64 {
        let disk = directories(&worked(Seed(seed), &small(2), 70, true)).remove(0);
        let (store, contents) = offline(&disk);
        let mut file = Vec::new();
        let done = export(&store, &contents, &Selection::All, (5, &Tally::default()), &mut file).unwrap();
        assert_eq!((done.blocks_left_out, done.left_out.len()), (0, 0));
        assert_eq!(exported(&file), live(&contents), "seed {seed}");
        assert_eq!(disk.steps(), [], "an export wrote into the store");
    }
}

/// The blocks of an export that holds nothing of the store, and what it came to.
fn counted(store: &Offline) -> (BTreeSet<IndexKey>, Exported) {
    let (options, tally) = (CheckOptions { threads: 2, ..CheckOptions::default() }, Tally::default());
    let counted = count(store, &options, 0, &tally, Findings::default()).unwrap();
    let mut file = Vec::new();
    let done = export_counted((store, &options), &counted, &Selection::All, (5, &tally), &mut file).unwrap();
    (exported(&file), done)
}

#[test]
fn an_export_that_holds_nothing_of_a_store_has_the_blocks_that_count() {
    let worked =
        |seed: u64| directories(&worked(Seed(seed), &small(2), 70, seed.is_multiple_of(2))).remove(0);
    // What compaction has written anew lies there twice.
    let all = (20..32).map(worked).chain([encoded_store()]);
    let mut copies = 0;
    for (number, disk) in all.enumerate() {
        let (store, contents) = offline(&disk);
        let (found, done) = counted(&store);
        assert_eq!((done.blocks_left_out, done.blocks_gone), (0, 0));
        assert_eq!(found, live(&contents), "store {number}");
        let of_runs = contents.runs.iter().flat_map(|run| &run.fates);
        copies += of_runs.filter(|fate| **fate == Fate::Copy).count();
        assert_eq!(disk.steps(), [], "an export wrote into the store");
    }
    assert!(copies > 0, "no block of any store has another copy");
}

#[test]
fn damage_is_left_out_of_an_export_and_named() {
    let disk = directories(&worked(Seed(30), &small(1), 40, true)).remove(0);
    let (_, contents) = offline(&disk);
    let all = live(&contents);
    let mut left = 0;
    for run in contents.runs.iter().filter(|run| run.live() > 0) {
        let damaged = disk.fork();
        let path = format!("shard-0000/segment-{:08}", run.segment);
        let at = (run.offset + u64::from(run.header_bytes) + run.payload_bytes / 2) as usize;
        damaged.tamper(&path, |bytes| bytes[at] ^= 8);
        let (store, contents) = offline(&damaged);
        let mut file = Vec::new();
        let done = export(&store, &contents, &Selection::All, (5, &Tally::default()), &mut file).unwrap();
        let found = exported(&file);
        assert!(found.is_subset(&all));
        // Padding between chunks may have been hit: then nothing is lost.
        assert_eq!(found.len() as u64 + done.blocks_left_out, all.len() as u64);
        assert!(done.left_out.iter().all(|one| (one.segment, one.offset) == (run.segment, run.offset)));
        left += done.blocks_left_out;
        let (again, counted) = counted(&store);
        assert_eq!((&again, counted.left_out), (&found, done.left_out));
    }
    assert!(left > 5, "{left}");
}

#[test]
fn a_tree_shows_every_key_once_even_if_records_name_each_other_as_parents() {
    let keys = |contents: &Contents| -> u64 {
        let all: BTreeSet<_> = live(contents).into_iter().map(|key| (key.namespace, key.key)).collect();
        all.len() as u64
    };
    let shown = |contents: &Contents| -> u64 {
        trees(contents, None, usize::MAX)
            .iter()
            .flat_map(|tree| &tree.branches)
            .map(|branch| branch.keys)
            .sum()
    };
    let disks = (31..60).map(|seed| directories(&worked(Seed(seed), &small(2), 60, true)).remove(0));
    let all = disks.map(|disk| offline(&disk).1);
    let mut contents = all.max_by_key(|contents| keys(contents)).unwrap();
    assert!(keys(&contents) > 5);
    assert_eq!(shown(&contents), keys(&contents));
    // Every record's parent becomes its own last block.
    for run in &mut contents.runs {
        if let Some(last) = run.blocks.blocks.last() {
            run.blocks.parent = Parent::Key(last.key);
        }
    }
    assert_eq!(shown(&contents), keys(&contents));
    let some = contents.runs[0].blocks.blocks[0].key;
    assert!(lineage(&contents, BlockKey(some)).len() as u64 <= keys(&contents) + 1);
    let few = trees(&contents, None, 2);
    let counted: u64 = few.iter().map(|tree| tree.branches.len() as u64 + tree.left_out).sum();
    let all: usize = trees(&contents, None, usize::MAX).iter().map(|tree| tree.branches.len()).sum();
    assert!(few.iter().all(|tree| tree.branches.len() <= 2) && counted == all as u64);
}
