//! Offline compaction of stores on real directories: several namespaces and groups, chains, deletes and expiry, in
//! place and into two directories, opened by the engine afterwards.
#![allow(clippy::disallowed_methods, reason = "works on real directories, outside the simulation")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvarts_contract::api::{BlockOutcome, DeleteRequest, Parent, PutRequest, Target as Dead};
use kvarts_fsck::check::{Level, Options as CheckOptions, check};
use kvarts_fsck::compact::{LayoutChoice, Options, Place, Progress, Target, elsewhere, in_place};
use kvarts_fsck::disk::{Disk, DiskWriter, RealDisk, RealWriter};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::store::{Store, survey};
use kvarts_fsck::window::Tally;
use kvarts_layout::{Coordinate, Group, Layout, StoreId};
use kvarts_store::home::{HomeOptions, RuntimeChoice};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture;
use kvarts_tests::stage::{HomeStage, Scratch, ask, small_options};

const ODD: (Group, Coordinate) = (fixture::ODD, Coordinate::Replicated);

fn home(directories: &[&Path]) -> HomeStage {
    let options = HomeOptions {
        directories: directories.iter().map(|path| (*path).to_owned()).collect(),
        runtime: RuntimeChoice::Threads,
        store: small_options(1),
        ..HomeOptions::default()
    };
    HomeStage::over(&options).unwrap()
}

fn delete(desk: &Desk<'_>, target: Dead) {
    let ticket =
        desk.stage.store().delete(DeleteRequest { namespace: desk.namespace, target, deadline: None });
    ask(desk.stage, ticket).unwrap();
}

/// Puts what the test is about.
fn fill(stage: &HomeStage) {
    let (one, two, gone) = (Desk::new(stage, "one"), Desk::new(stage, "two"), Desk::new(stage, "gone"));
    one.store(pages(), &one.keys(0..12), 1, Layout::LayerBlock);
    one.store(ODD, &one.keys(0..12), 2, Layout::FullBlock);
    // A session: one block after the other.
    for n in 0..10 {
        let parent = if n == 0 { Parent::Root } else { Parent::Key(two.keys(n - 1..n)[0]) };
        let request = two.request(pages(), &two.keys(n..n + 1), 3);
        let request = PutRequest { parent, first_block: Some(n as u32), ..request };
        assert_eq!(two.outcomes(request), [BlockOutcome::Stored]);
    }
    let short = Some(Duration::from_secs(3600));
    let request = PutRequest { expires_after: short, ..two.request(ODD, &two.keys(0..4), 4) };
    assert_eq!(two.outcomes(request).len(), 4);
    gone.store(pages(), &gone.keys(0..8), 5, Layout::FullBlock);
    delete(&gone, Dead::Namespace);
    delete(&one, Dead::Keys { column: Some(pages()), keys: one.keys(3..6) });
    delete(&one, Dead::Keys { column: Some(ODD), keys: one.keys(0..2) });
    // Again under a key that was deleted, by another producer.
    let again =
        PutRequest { parent: Parent::Unknown, first_block: None, ..one.request(ODD, &one.keys(1..2), 6) };
    assert_eq!(one.outcomes(again), [BlockOutcome::Stored]);
}

fn absent(desk: &Desk<'_>, column: (Group, Coordinate), range: std::ops::Range<u64>) {
    let count = range.end - range.start;
    let (_, end) = desk.read(&desk.read_request(column, &desk.keys(range)));
    assert_eq!(end.failures.len() as u64, count, "{:?}", end.failures);
}

/// What must be there, two hours later.
fn expect(stage: &HomeStage) {
    let (one, two, gone) = (Desk::new(stage, "one"), Desk::new(stage, "two"), Desk::new(stage, "gone"));
    one.expect(pages(), &one.keys(0..3), 1);
    one.expect(pages(), &one.keys(6..12), 1);
    absent(&one, pages(), 3..6);
    one.expect(ODD, &one.keys(2..12), 2);
    one.expect(ODD, &one.keys(1..2), 6);
    absent(&one, ODD, 0..1);
    two.expect(pages(), &two.keys(0..10), 3);
    absent(&two, ODD, 0..4);
    absent(&gone, pages(), 0..8);
}

fn look(directories: &[&Path]) -> Store {
    let open = |path: &&Path| Arc::new(RealDisk::open(path, true, true).unwrap()) as Arc<dyn Disk>;
    let disks: Vec<Arc<dyn Disk>> = directories.iter().map(open).collect();
    let mut found = Findings::default();
    let store = survey(&disks, &mut found).unwrap().unwrap();
    let options = CheckOptions { level: Level::Deep, ..CheckOptions::default() };
    let checked = check(&store, &options, &Tally::default(), found).unwrap();
    assert!(checked.findings.is_clean(), "{:?}", checked.findings.problems);
    store
}

fn in_two_hours(layout: LayoutChoice) -> Options {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + Duration::from_secs(7200);
    Options { utilisation_percent: 100, layout, now_ms: now.as_millis() as u64, ..Options::default() }
}

fn writer(path: &Path) -> Arc<dyn DiskWriter> {
    std::fs::create_dir_all(path).unwrap();
    Arc::new(RealWriter::open(path).unwrap())
}

/// An empty directory for a new store.
fn pair(path: &Path) -> (Arc<dyn Disk>, Arc<dyn DiskWriter>) {
    let writer = writer(path);
    (Arc::new(RealDisk::open(path, true, true).unwrap()), writer)
}

#[test]
fn a_store_with_all_that_may_be_in_it_is_compacted_in_place_and_moved_to_two_directories() {
    let scratch = Scratch::new("compact");
    let at = |name: &str| scratch.below(name);
    let (old, a, b) = (at("old"), at("a"), at("b"));
    let stage = home(&[&old]);
    fill(&stage);
    stage.close().unwrap();
    let place = Place { writer: writer(&old), room_bytes: u64::MAX };
    let report =
        in_place(&look(&[&old]), &[place], &in_two_hours(LayoutChoice::FullBlock), &Progress::default())
            .unwrap();
    assert_eq!((report.live_blocks, report.expired_blocks, report.graves_after), (30, 4, 0), "{report:?}");
    assert!(report.records_merged >= 5 && report.records_rearranged > 0, "{report:?}");
    look(&[&old]);
    let stage = home(&[&old]);
    expect(&stage);
    stage.close().unwrap();
    let target =
        Target { directories: vec![pair(&a), pair(&b)], shards: 4, store: StoreId([8; 16]), secret: [6; 32] };
    elsewhere(&look(&[&old]), &target, &in_two_hours(LayoutChoice::LayerBlock), &Progress::default())
        .unwrap();
    drop(target);
    look(&[&a, &b]);
    for directories in [&[a.as_path(), b.as_path()][..], &[old.as_path()]] {
        let stage = home(directories);
        expect(&stage);
        stage.close().unwrap();
    }
}
