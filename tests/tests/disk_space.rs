//! Space on real file systems: what they have really allocated is what the store says, and never more than its
//! budget; and a file system that is full passes.
#![allow(clippy::disallowed_methods, reason = "works on real directories, outside the simulation")]

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use kvarts_contract::api::BlockOutcome;
use kvarts_contract::error::{Kind, Reason, SpaceCause};
use kvarts_store::engine::{Options, Store};
use kvarts_store::home::{Home, HomeOptions, RuntimeChoice};
use kvarts_store::io::IoChoice;
use kvarts_tests::audit;
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::stage::{HomeStage, Scratch, Stage, small_options};

const BUDGET: u64 = 6 << 20;

fn options(directories: Vec<PathBuf>, io: IoChoice, budget_bytes: u64) -> HomeOptions {
    HomeOptions {
        directories,
        io,
        runtime: RuntimeChoice::Threads,
        store: Options { budget_bytes, ..small_options(2) },
        ..HomeOptions::default()
    }
}

/// Bytes that the file system has allocated to everything below a directory: for files, and for directories.
fn allocated(below: &Path) -> (u64, u64) {
    let own = std::fs::symlink_metadata(below).expect("it is there");
    let (mut files, mut directories) = (0, own.blocks() * 512);
    for entry in std::fs::read_dir(below).expect("a directory") {
        let path = entry.expect("an entry").path();
        // A file may be removed while it is looked at.
        let Ok(meta) = std::fs::symlink_metadata(&path) else { continue };
        if meta.is_dir() {
            let (inside, itself) = allocated(&path);
            files += inside;
            directories += itself;
        } else {
            files += meta.blocks() * 512;
        }
    }
    (files, directories)
}

fn all(directories: &[PathBuf]) -> (u64, u64) {
    let sum = |(a, b): (u64, u64), (c, d): (u64, u64)| (a + c, b + d);
    directories.iter().map(|one| allocated(one)).fold((0, 0), sum)
}

/// The file system has what the store says, at a moment at which nothing is written.
fn expect_agreement(store: &Store, directories: &[PathBuf]) {
    let report = audit::books(store).unwrap_or_else(|why| panic!("{why}"));
    audit::budget(&report).unwrap_or_else(|why| panic!("{why}"));
    let (files, folders) = all(directories);
    assert_eq!(files, report.total.allocated - report.directories - report.reserved, "{report:?}");
    assert!(
        folders <= report.directories,
        "{folders} bytes of directories, {} were counted",
        report.directories
    );
}

fn fill(desk: &Desk<'_>, keys: std::ops::Range<u64>) -> Vec<BlockOutcome> {
    keys.flat_map(|n| desk.outcomes(desk.request(pages(), &desk.keys(n..n + 1), 1))).collect()
}

/// Waits until the store says so.
fn wait(stage: &HomeStage, what: impl Fn(&Store) -> bool) {
    stage.wait(&mut || what(stage.home().store()));
}

#[test]
fn file_systems_have_allocated_what_the_store_says_and_never_more_than_the_budget() {
    for io in [IoChoice::Auto, IoChoice::Pool] {
        let scratch = Scratch::on_disk("blocks");
        let directories = vec![scratch.below("one"), scratch.below("two")];
        let options = options(directories.clone(), io, BUDGET);
        for session in 0..3u64 {
            let stage = HomeStage::over(&options).unwrap();
            let desk = Desk::new(&stage, "blocks");
            for n in 0..150 {
                fill(&desk, session * 150 + n..session * 150 + n + 1);
                let (files, folders) = all(&directories);
                assert!(files + folders <= BUDGET, "{files} and {folders} bytes of {BUDGET}");
            }
            stage.rest();
            expect_agreement(stage.home().store(), &directories);
            if session == 1 {
                // As a killed process leaves it: the next session counts what is there.
                drop(stage);
            } else {
                stage.close().unwrap();
            }
            let (files, folders) = all(&directories);
            assert!(files + folders <= BUDGET);
        }
    }
}

#[test]
fn a_lower_budget_frees_the_disk() {
    let scratch = Scratch::on_disk("lower");
    let directories = vec![scratch.path().to_owned()];
    let stage = HomeStage::over(&options(directories.clone(), IoChoice::Auto, BUDGET)).unwrap();
    let desk = Desk::new(&stage, "lower");
    fill(&desk, 0..250);
    assert!(all(&directories).0 > 5 << 20);
    stage.home().store().set_budget(3 << 20).unwrap();
    wait(&stage, |store| store.stats().allocated_bytes <= 3 << 20);
    stage.rest();
    let (files, folders) = all(&directories);
    assert!(files + folders <= 3 << 20, "{files} and {folders} bytes");
    expect_agreement(stage.home().store(), &directories);
    assert_eq!(fill(&desk, 300..310), vec![BlockOutcome::Stored; 10]);
    stage.close().unwrap();
}

/// A small file system of its own, unmounted in the end.
struct Mount(PathBuf);

impl Mount {
    /// `None` if this process may not mount.
    fn new(at: &Path, bytes: u64) -> Option<Self> {
        std::fs::create_dir_all(at).ok()?;
        let size = format!("size={bytes}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &size, "kvarts-test"]).arg(at);
        let mounted = mount.output().ok()?.status.success();
        mounted.then(|| Self(at.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let begin = Instant::now();
        // The store's threads may be closing their files.
        while !Command::new("umount").arg(&self.0).status().is_ok_and(|status| status.success())
            && begin.elapsed() < Duration::from_secs(10)
        {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn a_full_file_system_refuses_serves_and_takes_puts_again() {
    let scratch = Scratch::on_disk("tmpfs");
    let Some(mount) = Mount::new(scratch.path(), 8 << 20) else {
        eprintln!("NOT RUN: this process may not mount a file system of its own (it takes root)");
        return;
    };
    let place = mount.0.join("store");
    let larger = options(vec![place.clone()], IoChoice::Auto, 16 << 20);
    let refused = Home::open(&larger).map(drop).expect_err("the budget is larger than the disk");
    assert_eq!(refused.kind(), Kind::Invalid);
    assert!(refused.to_string().contains("does not fit on the disk"), "{refused}");
    let mut allowed = larger;
    allowed.store.budget_beyond_disk = true;
    let stage = HomeStage::over(&allowed).unwrap();
    let desk = Desk::new(&stage, "tmpfs");
    // Another program fills the disk before there is a segment.
    let filler = mount.0.join("filler");
    let full = Command::new("fallocate").args(["-l", "8200000"]).arg(&filler).status().unwrap();
    assert!(full.success());
    for outcome in fill(&desk, 0..5) {
        assert_eq!(outcome, BlockOutcome::Refused(Reason::NoSpace(SpaceCause::Disk)));
    }
    std::fs::remove_file(&filler).unwrap();
    assert_eq!(fill(&desk, 10..20), vec![BlockOutcome::Stored; 10]);
    // The store itself reaches the end of the disk and goes on within it.
    assert_eq!(fill(&desk, 100..500), vec![BlockOutcome::Stored; 400]);
    desk.expect(pages(), &desk.keys(490..500), 1);
    stage.rest();
    let store = stage.home().store();
    assert!(store.stats().allocated_bytes < 9 << 20);
    audit::books(store).unwrap_or_else(|why| panic!("{why}"));
    stage.close().unwrap();
    let stage = HomeStage::over(&allowed).unwrap();
    Desk::new(&stage, "tmpfs").expect(pages(), &desk_keys(&stage), 1);
    stage.close().unwrap();
    drop(mount);
}

fn desk_keys(stage: &HomeStage) -> Vec<kvarts_layout::BlockKey> {
    Desk::new(stage, "tmpfs").keys(490..500)
}
