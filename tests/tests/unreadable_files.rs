//! A segment file that cannot be opened, or of which the file system does not say what it has, costs what it holds, for as long as
//! that lasts: the store opens, the others are served, and what is deleted meanwhile stays so.

use kvarts_contract::api::{ContainsRequest, DeleteOutcome, DeleteRequest, Presence, Target};
use kvarts_store::engine::{Limits, Options};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::sim::{Effect, Media, OpKind, Rule, SimWorld, When, Which, WorldConfig};
use kvarts_tests::stage::{SimStage, Stage, ask, drive};

const SEGMENT: u64 = 128 << 10;
const BLOCKS: u64 = 60;
/// A bad sector under what maps the file; a file without the right; a lower limit of descriptors.
const ERRORS: [i32; 3] = [5, 13, 24];

fn options() -> Options {
    Options {
        segment_bytes: SEGMENT,
        budget_bytes: 32 << 20,
        shards_per_directory: 1,
        limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
        ..Options::default()
    }
}

fn open(seed: u64, media: Media, fault: Option<Rule>) -> (SimWorld, SimStage) {
    let world = SimWorld::with_media(seed, &WorldConfig::default(), media);
    fault.into_iter().for_each(|rule| world.disk().inject(rule));
    let stage = SimStage::open(&world, &options()).expect("one file does not keep a store from opening");
    (world, stage)
}

/// Which of these blocks are here.
fn here(desk: &Desk<'_>, keys: std::ops::Range<u64>) -> Vec<u64> {
    let (group, coordinate) = pages();
    let names = desk.keys(keys.clone());
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &names, lease: None };
    let found = desk.stage.store().contains(&request).expect("a well-formed question").presence;
    keys.zip(found).filter(|(_, found)| *found == Presence::Here).map(|(n, _)| n).collect()
}

fn delete(desk: &Desk<'_>, keys: &[u64]) -> Vec<DeleteOutcome> {
    let keys = keys.iter().flat_map(|&n| desk.keys(n..n + 1)).collect();
    let target = Target::Keys { column: None, keys };
    let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    ask(desk.stage, desk.stage.store().delete(request)).expect("a well-formed delete").outcomes
}

/// A closed store of several segments, of which the second one was full long before its end.
fn filled(seed: u64) -> Media {
    let world = SimWorld::new(seed, &WorldConfig::default());
    let stage = SimStage::open(&world, &options()).unwrap();
    let desk = Desk::new(&stage, "files");
    for n in 0..BLOCKS {
        desk.store(pages(), &desk.keys(n..n + 1), 1, kvarts_layout::Layout::LayerBlock);
    }
    stage.close().unwrap()
}

fn one(seed: u64, kind: OpKind, errno: i32) {
    let media = filled(seed);
    let fault = Rule::new(Which::Kind(kind), When::From(1), Effect::Errno(errno)).named("segment-00000001");
    let (world, stage) = open(seed + 1, media, Some(fault));
    let recovery = stage.engine().recovery()[0].clone();
    assert_eq!(recovery.unreadable, 1, "{kind:?} {errno}: {recovery:?}");
    let desk = Desk::new(&stage, "files");
    let found = here(&desk, 0..BLOCKS);
    let missing: Vec<u64> = (0..BLOCKS).filter(|n| !found.contains(n)).collect();
    assert!(!found.is_empty() && !missing.is_empty(), "{kind:?} {errno}: {found:?}");
    found.iter().for_each(|&n| desk.expect(pages(), &desk.keys(n..n + 1), 1));
    // Half of what is missing is deleted; another producer's bytes of some of the rest are stored.
    let (gone, again) = missing.split_at(missing.len() / 2);
    assert_eq!(delete(&desk, gone), vec![DeleteOutcome::NotHere; gone.len()]);
    let again = &again[..again.len() / 2];
    for &n in again {
        desk.store(pages(), &desk.keys(n..n + 1), 2, kvarts_layout::Layout::LayerBlock);
    }
    // Long enough for tombstones to be forgotten, if anything may be.
    for n in 1000..1200 {
        desk.store(pages(), &desk.keys(n..n + 1), 1, kvarts_layout::Layout::LayerBlock);
        if n % 20 == 0 {
            drive(&world, stage.engine().checkpoint()).expect("it ends").expect("a checkpoint");
        }
    }
    stage.audit();
    let media = stage.close().unwrap();

    // The file is well again.
    let (_, stage) = open(seed + 2, media, None);
    let recovery = stage.engine().recovery()[0].clone();
    assert_eq!((recovery.unreadable, recovery.problems), (0, 0), "{kind:?} {errno}: {recovery:?}");
    let desk = Desk::new(&stage, "files");
    let found = here(&desk, 0..BLOCKS);
    assert!(gone.iter().all(|n| !found.contains(n)), "{kind:?} {errno}: deleted {gone:?}, here {found:?}");
    for &n in &found {
        let producer = if again.contains(&n) { 2 } else { 1 };
        desk.expect(pages(), &desk.keys(n..n + 1), producer);
    }
    let back = missing.iter().filter(|n| found.contains(n) && !again.contains(n)).count();
    assert!(back > 0, "{kind:?} {errno}: nothing of the segment is back");
    stage.audit_all();
    stage.close().unwrap();
}

#[test]
fn a_segment_file_that_cannot_be_opened_costs_its_own_blocks_and_brings_no_delete_back() {
    for (at, kind) in (0..).zip([OpKind::Open, OpKind::Stat, OpKind::Holes]) {
        for (nth, errno) in (0..).zip(ERRORS) {
            one(100 + 10 * at + 3 * nth, kind, errno);
        }
    }
}
