//! `--live`: a check beside an engine that is writing. What is sealed is judged, what is being written is not, and
//! nothing that the engine does is called a problem.
#![allow(
    clippy::disallowed_methods,
    reason = "works on real directories and threads, outside the simulation"
)]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvarts_contract::api::{Durability, KvStore, Parent, PutRequest};
use kvarts_contract::blocking::block_on;
use kvarts_fsck::check::{Level, Options as CheckOptions, check};
use kvarts_fsck::contents::read;
use kvarts_fsck::disk::{Disk, OpenError, RealDisk};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::store::survey;
use kvarts_fsck::window::Tally;
use kvarts_store::engine::{Limits, Options, Store};
use kvarts_store::home::{Home, HomeOptions, RuntimeChoice};
use kvarts_store::io::IoChoice;
use kvarts_tests::fixture::{self, Style};

struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn home(directory: &std::path::Path) -> Home {
    let store = Options {
        segment_bytes: 64 << 10,
        // So small that segments are recycled while they are checked.
        budget_bytes: 3 << 20,
        limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
        ..Options::default()
    };
    let directories = vec![directory.to_owned()];
    let options = HomeOptions {
        directories,
        io: IoChoice::Pool,
        runtime: RuntimeChoice::Threads,
        store,
        ..HomeOptions::default()
    };
    Home::open(&options).unwrap()
}

/// Puts the `n`th block of a chain.
fn put(store: &Store, n: u64) {
    let (group, coordinate) = fixture::columns()[0];
    let shape = fixture::shape(group, coordinate);
    let namespace = store.register(&fixture::identity("r1"), &fixture::geometry()).unwrap();
    let placed = fixture::place(&shape, 1, Style::Blocks, 0).unwrap();
    let key = fixture::key(1, n);
    fixture::write_block(&placed, 0, &fixture::content(&key, group, coordinate, 1, &shape));
    let request = PutRequest {
        namespace,
        group,
        coordinate,
        parent: Parent::Unknown,
        first_block: None,
        keys: vec![key],
        from: placed,
        layout: None,
        durability: Durability::Durable,
        expires_after: None,
        origins: None,
        deadline: None,
    };
    block_on(store.put(request)).unwrap().unwrap();
}

/// What a check of a store in use says.
fn look(directory: &std::path::Path, level: Level) -> (Findings, u64) {
    let disk = RealDisk::open(directory, false, true).unwrap();
    let disks: [Arc<dyn Disk>; 1] = [Arc::new(disk)];
    let mut found = Findings::default();
    let store = survey(&disks, &mut found).unwrap().unwrap();
    let options = CheckOptions { level, threads: 2, live: true, ..CheckOptions::default() };
    let contents = read(&store, &options, 0, &Tally::default(), Findings::default());
    assert!(!contents.segments.is_empty());
    let checked = check(&store, &options, &Tally::default(), found).unwrap();
    (checked.findings, checked.records)
}

#[test]
fn a_check_beside_an_engine_that_writes_and_recycles_finds_no_problem() {
    let scratch = Scratch(std::env::temp_dir().join(format!("kvarts-fsck-live-{}", std::process::id())));
    let _ = std::fs::remove_dir_all(&scratch.0);
    let home = home(&scratch.0);
    let store = home.store().clone();
    (0..20).for_each(|n| put(&store, n));
    let refused = RealDisk::open(&scratch.0, false, false);
    assert!(matches!(refused, Err(OpenError::InUse)), "a store in use is checked only when asked for");
    let (stop, puts) = (AtomicBool::new(false), AtomicU64::new(20));
    let mut skipped = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                put(&store, puts.fetch_add(1, Ordering::Relaxed));
            }
        });
        for round in 0..12u64 {
            // Every round sees more of it.
            while puts.load(Ordering::Relaxed) < 20 + round * 25 {
                std::thread::yield_now();
            }
            let level = [Level::Quick, Level::Full, Level::Deep][(round % 3) as usize];
            let (found, records) = look(&scratch.0, level);
            if !found.is_clean() {
                stop.store(true, Ordering::Relaxed);
            }
            assert!(found.is_clean(), "round {round}: {:?}", found.problems);
            assert!(records > 0);
            skipped += found.times("live-tail-skipped") + found.times("live-changed");
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(skipped > 0, "no check met a segment that was being written");
    drop(store);
    home.close().unwrap();
    // Damage in a sealed segment is found beside an engine, too.
    let home = self::home(&scratch.0);
    let segments = std::fs::read_dir(scratch.0.join("shard-0000")).unwrap();
    let mut paths: Vec<PathBuf> = segments.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.to_string_lossy().contains("segment-"));
    paths.sort();
    let mut named = 0;
    for path in paths.iter().take(8) {
        let sound = std::fs::read(path).unwrap();
        let mut damaged = sound.clone();
        damaged[65_536 - 4096 + 80] ^= 1;
        std::fs::write(path, &damaged).unwrap();
        named += look(&scratch.0, Level::Quick).0.problem_count;
        std::fs::write(path, &sound).unwrap();
    }
    assert!(named >= 1, "damage to a trailer beside an engine was not named");
    home.close().unwrap();
}
