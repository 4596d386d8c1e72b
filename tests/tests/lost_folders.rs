//! The folders of a store's shards are durable before its superblock is: a folder that is gone was lost, whatever else is
//! there. The checker and the engine say so, and only a repair makes the folder again.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvarts_contract::api::{DeleteOutcome, DeleteRequest, Target};
use kvarts_contract::io_error::DirId;
use kvarts_fsck::check::{Level, Options as CheckOptions};
use kvarts_fsck::disk::MemoryDisk;
use kvarts_fsck::findings::Findings;
use kvarts_fsck::repair::{Repaired, Site, repair};
use kvarts_fsck::store::CannotRun;
use kvarts_fsck::window::Tally;
use kvarts_layout::format::superblock::FILE_BYTES;
use kvarts_store::engine::{Options, Store};
use kvarts_tests::campaign::{Driven, drive, reopen};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::sim::media::errno::EIO;
use kvarts_tests::sim::{Effect, Rule, Seed, SimWorld, When, Which, WorldConfig};
use kvarts_tests::stage::{SimStage, Stage, ask};
use kvarts_tests::witness::{directories, examine, media, problems, small, worked};

fn put_right(disks: &[MemoryDisk]) -> Repaired {
    let site =
        |disk: &MemoryDisk| Site { disk: Arc::new(disk.clone()), writer: Some(Arc::new(disk.clone())) };
    let sites: Vec<Site> = disks.iter().map(site).collect();
    repair(&sites, &CheckOptions { threads: 1, ..CheckOptions::default() }, &Tally::default()).unwrap()
}

fn config(directories: u16) -> WorldConfig {
    let mut config = WorldConfig::default();
    config.disk.dirs = directories;
    config
}

/// What an engine says of these directories, and what it leaves there.
fn open(disks: &[MemoryDisk], options: &Options) -> (Result<usize, String>, Vec<MemoryDisk>) {
    let config = config(disks.len() as u16);
    match reopen(Seed(1), &config, options, media(disks)) {
        Ok(opened) => (Ok(opened.store.recovery().len()), directories(&opened.world.kill())),
        Err(why) => (Err(why), disks.to_vec()),
    }
}

/// Which directories are out, and why.
fn out(disks: &[MemoryDisk], options: &Options) -> BTreeMap<u16, String> {
    reopen(Seed(1), &config(disks.len() as u16), options, media(disks)).unwrap().store.health().out
}

fn labels(found: &Findings) -> Vec<(&'static str, Option<u32>)> {
    found.problems.iter().map(|one| (one.label.name, one.place.shard)).collect()
}

#[test]
fn a_store_that_lost_all_folders_of_its_shards_is_not_called_clean_and_not_opened_as_an_empty_one() {
    let options = small(2);
    let worked = directories(&worked(Seed(61), &options, 40, true));
    let unused = unused(1, &options);
    for (what, disks) in [("used", worked), ("never used", unused)] {
        let folders = ["shard-0000", "shard-0001"];
        folders.iter().for_each(|folder| disks[0].remove_folder(folder));
        for level in [Level::Quick, Level::Full, Level::Deep] {
            let checked = examine(&disks, level).unwrap();
            let expected = [("shard-missing", Some(0)), ("shard-missing", Some(1))];
            assert_eq!(labels(&checked.findings), expected, "{what}");
        }
        let (opened, left) = open(&disks, &options);
        let why = opened.unwrap_err();
        assert!(why.contains("no folder for shard") && why.contains("kvarts fsck --repair"), "{what}: {why}");
        assert_eq!(labels(&examine(&left, Level::Full).unwrap().findings).len(), 2, "{what}: made silently");
        let done = put_right(&disks).actions;
        assert_eq!(done.len(), 2, "{what}: {done:?}");
        let checked = examine(&disks, Level::Deep).unwrap();
        assert!(checked.findings.is_clean() && checked.blocks == 0, "{what}: {}", problems(&checked));
        assert_eq!(put_right(&disks).actions, [], "{what}");
        assert_eq!(open(&disks, &options).0, Ok(2), "{what}");
    }
}

#[test]
fn one_folder_that_is_gone_costs_what_was_in_it_and_nothing_else() {
    let options = Options { directories: 2, ..small(2) };
    let disks = directories(&worked(Seed(62), &options, 60, true));
    let others: u64 = {
        let without = disks.iter().map(MemoryDisk::fork).collect::<Vec<_>>();
        without[1].remove_folder("shard-0003");
        without[1].plant_folder("shard-0003");
        examine(&without, Level::Full).unwrap().blocks
    };
    assert!(others > 0 && others < examine(&disks, Level::Full).unwrap().blocks);
    disks[1].remove_folder("shard-0003");
    let checked = examine(&disks, Level::Full).unwrap();
    assert_eq!(labels(&checked.findings), [("shard-missing", Some(3))]);
    assert_eq!(checked.blocks, others);
    let out = out(&disks, &options);
    assert!(out[&1].contains("directory 1 has no folder for shard 3"), "{out:?}");
    assert_eq!(open(&disks, &options).0, Ok(2), "its directory is out as a whole");
    put_right(&disks);
    let checked = examine(&disks, Level::Deep).unwrap();
    assert!(checked.findings.is_clean() && checked.blocks == others, "{}", problems(&checked));
    assert_eq!(open(&disks, &options).0, Ok(4));
}

/// A store that was made and never used.
fn unused(directories: u16, options: &Options) -> Vec<MemoryDisk> {
    let world = SimWorld::new(1, &config(directories));
    let launcher = world.launcher();
    assert!(matches!(drive(&world, u64::MAX, Store::open(&launcher, options)), Driven::Done(Ok(_))));
    kvarts_tests::witness::directories(&world.kill())
}

#[test]
fn a_store_whose_making_was_cut_is_finished_only_where_nothing_can_have_been_lost() {
    let options = Options { directories: 2, ..small(2) };
    let whole = unused(2, &options);
    // One superblock did not arrive: every folder was there before.
    for superblock in [None, Some(vec![0; FILE_BYTES])] {
        let disks: Vec<MemoryDisk> = whole.iter().map(MemoryDisk::fork).collect();
        disks[1].remove("superblock");
        superblock.into_iter().for_each(|bytes| disks[1].plant("superblock", bytes));
        let checked = examine(&disks, Level::Full).unwrap();
        assert!(checked.findings.is_clean(), "{}", problems(&checked));
        assert_eq!(checked.findings.times("store-half-made"), 1);
        let (opened, left) = open(&disks, &options);
        assert_eq!(opened, Ok(4));
        assert!(examine(&left, Level::Full).unwrap().findings.is_clean());
        // Without the folders it is another directory.
        disks[1].remove_folder("shard-0002");
        disks[1].remove_folder("shard-0003");
        assert!(out(&disks, &options).contains_key(&1));
        match examine(&disks, Level::Full) {
            Ok(checked) => assert!(!checked.findings.is_clean()),
            Err(error) => assert!(matches!(error, CannotRun::NoStore(_)), "{error}"),
        }
    }
    // Neither arrived.
    let disks: Vec<MemoryDisk> = whole.iter().map(MemoryDisk::fork).collect();
    disks.iter().for_each(|disk| disk.plant("superblock", vec![0; FILE_BYTES]));
    assert!(examine(&disks, Level::Full).unwrap().findings.is_clean());
    assert_eq!(open(&disks, &options).0, Ok(4));
    // With other settings the folders that are there would belong to no shard.
    let why = open(&disks, &Options { shards_per_directory: 1, ..options.clone() }).0.unwrap_err();
    assert!(why.contains("shard-0001") && why.contains("remove the folder"), "{why}");
}

#[test]
fn a_zeroed_superblock_beside_files_that_prove_nothing_is_not_a_store_that_was_being_made() {
    let options = small(1);
    let disks = directories(&worked(Seed(63), &options, 20, true));
    disks[0].plant("superblock", vec![0; FILE_BYTES]);
    for path in disks[0].files().iter().filter(|path| path.contains("segment-")) {
        disks[0].tamper(path, |bytes| bytes.fill(0x5a));
    }
    assert!(matches!(examine(&disks, Level::Full), Err(CannotRun::NoStore(_))));
    let why = open(&disks, &options).0.unwrap_err();
    assert!(why.contains("has no superblock any more"), "{why}");
}

/// What follows is done without the last of three directories, whose blocks are deleted meanwhile.
fn without_the_last(options: &Options, disks: &[MemoryDisk]) -> Vec<MemoryDisk> {
    let world = SimWorld::with_media(7, &config(3), media(disks));
    world.disk().inject(Rule::new(Which::Any, When::From(1), Effect::Errno(EIO)).on(DirId(2)));
    let stage = SimStage::open(&world, options).unwrap();
    let desk = Desk::new(&stage, "lost");
    let target = Target::Keys { column: None, keys: desk.keys(0..12) };
    let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    let reply = ask(&stage, stage.store().delete(request)).unwrap();
    assert!(reply.outcomes.iter().all(|one| !matches!(one, DeleteOutcome::Refused(_))), "{reply:?}");
    world.disk().heal();
    directories(&stage.close().unwrap())
}

/// A directory that was out holds what was deleted without it. The checker counts nothing of it until a start has told it.
#[test]
fn the_checker_counts_nothing_of_a_directory_that_was_out_or_was_replaced() {
    let options = Options { directories: 3, ..small(1) };
    let world = SimWorld::new(6, &config(3));
    let stage = SimStage::open(&world, &options).unwrap();
    let desk = Desk::new(&stage, "lost");
    for n in 0..12 {
        desk.store(pages(), &desk.keys(n..n + 1), 1, kvarts_layout::Layout::LayerBlock);
    }
    let whole = directories(&stage.close().unwrap());
    assert_eq!(examine(&whole, Level::Full).unwrap().blocks, 12);
    let behind = without_the_last(&options, &whole);
    let names = |checked: &kvarts_fsck::check::Checked| {
        checked.findings.problems.iter().map(|one| one.label.name).collect::<Vec<_>>()
    };
    let checked = examine(&behind, Level::Full).unwrap();
    assert_eq!((names(&checked), checked.blocks), (vec!["directory-behind"], 9), "those of the others");
    let (opened, told) = open(&behind, &options);
    assert_eq!(opened, Ok(3));
    let checked = examine(&told, Level::Deep).unwrap();
    assert!(checked.findings.is_clean() && checked.blocks == 12, "{}", problems(&checked));
    // An empty one takes its place.
    let mut replaced = behind.clone();
    let old = std::mem::take(&mut replaced[2]);
    let options = Options { replace: [2].into(), ..options };
    let (opened, replaced) = open(&replaced, &options);
    assert_eq!(opened, Ok(3));
    let checked = examine(&replaced, Level::Deep).unwrap();
    assert!(checked.findings.is_clean() && checked.blocks == 9, "{}", problems(&checked));
    let checked = examine(&[replaced[0].clone(), replaced[1].clone(), old], Level::Full).unwrap();
    assert_eq!(names(&checked), ["directory-replaced"]);
}
