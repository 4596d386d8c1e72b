//! A namespace that is deleted goes whole or not at all, whatever instant the power fails at: in the delete, or while
//! an opening store finishes one. What is put after the answer stays.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteRequest, Parent, Presence, PutRequest, Target,
};
use kvarts_fsck::check::Options as CheckOptions;
use kvarts_fsck::contents::{Fate, read};
use kvarts_fsck::disk::Disk;
use kvarts_fsck::findings::Findings;
use kvarts_fsck::store::survey;
use kvarts_fsck::window::Tally;
use kvarts_store::engine::{Options, Store};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::depth::seeds;
use kvarts_tests::sim::{Crash, CrashState, Media, Seed, SimWorld, WorldConfig};
use kvarts_tests::stage::{SimStage, Stage, ask};
use kvarts_tests::witness::{directories, small};

const BLOCKS: u64 = 10;
const OTHERS: u64 = 3;

fn options() -> Options {
    Options { executors: 2, ..small(4) }
}

fn open(seed: u64, media: Media) -> (SimWorld, SimStage) {
    let world = SimWorld::with_media(seed, &WorldConfig::default(), media);
    let stage = SimStage::open(&world, &options()).unwrap();
    (world, stage)
}

fn put(desk: &Desk<'_>, keys: std::ops::Range<u64>, producer: u64) {
    for n in keys {
        // One by one: they fall into all shards.
        let request = desk.request(pages(), &desk.keys(n..n + 1), producer);
        let request =
            PutRequest { parent: kvarts_contract::api::Parent::Unknown, first_block: None, ..request };
        assert_eq!(desk.outcomes(request), [BlockOutcome::Stored]);
    }
}

fn here(desk: &Desk<'_>, keys: std::ops::Range<u64>) -> u64 {
    let (group, coordinate) = pages();
    let keys = desk.keys(keys);
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &keys, lease: None };
    let found = desk.stage.store().contains(&request).unwrap().presence;
    found.iter().filter(|one| **one == Presence::Here).count() as u64
}

fn delete(desk: &Desk<'_>) -> DeleteRequest {
    DeleteRequest { namespace: desk.namespace, target: Target::Namespace, deadline: None }
}

/// A store with blocks of two namespaces in all shards, stopped cleanly.
fn made(seed: Seed) -> Media {
    let world = SimWorld::new(seed.0, &WorldConfig::default());
    let stage = SimStage::open(&world, &options()).unwrap();
    let (goes, stays) = (Desk::new(&stage, "goes"), Desk::new(&stage, "stays"));
    put(&goes, 0..BLOCKS, 1);
    put(&stays, 0..OTHERS, 2);
    stage.close().unwrap()
}

/// Blocks of each namespace that the checker's reader of metadata counts: of the one that goes, of the other.
fn counted(media: &Media, goes: [u8; 32]) -> (u64, u64) {
    let disks = directories(media);
    let shared: Vec<Arc<dyn Disk>> = disks.iter().map(|disk| Arc::new(disk.clone()) as _).collect();
    let mut found = Findings::default();
    let store = survey(&shared, &mut found).unwrap().unwrap();
    let options = CheckOptions { threads: 1, ..CheckOptions::default() };
    let contents = read(&store, &options, 0, &Tally::default(), found);
    let mut names = [BTreeSet::new(), BTreeSet::new()];
    for run in &contents.runs {
        let live = run.blocks.blocks.iter().zip(&run.fates).filter(|(_, fate)| **fate == Fate::Live);
        names[usize::from(run.namespace.id.0 != goes)].extend(live.map(|(name, _)| name.key));
    }
    (names[0].len() as u64, names[1].len() as u64)
}

/// What a power cut left: the namespace is there or not, in the store that is opened and for the checker before; and it
/// can be used. Gives whether it is there, and whether opening had a delete to finish.
fn judge(seed: Seed, media: &Media, note: &str) -> (bool, bool) {
    let (_, stage) = open(seed.child("open").0, media.clone());
    let (goes, stays) = (Desk::new(&stage, "goes"), Desk::new(&stage, "stays"));
    let found = here(&goes, 0..BLOCKS);
    assert!(found == 0 || found == BLOCKS, "{note}: {found} of {BLOCKS} blocks are there");
    assert_eq!(counted(media, goes.namespace.0), (found, OTHERS), "{note}: the checker says otherwise");
    assert_eq!(here(&stays, 0..OTHERS), OTHERS, "{note}: another namespace");
    stays.expect(pages(), &stays.keys(0..OTHERS), 2);
    let half = stage.engine().recovery().iter().any(|shard| !shard.half_deleted.is_empty());
    // It takes blocks at once, and these are there after the next start, and the one after that.
    put(&goes, 100..103, 3);
    let mut media = stage.world().kill();
    for again in 0..2 {
        let (_, stage) = open(seed.child("again").nth(again).0, media);
        let (goes, stays) = (Desk::new(&stage, "goes"), Desk::new(&stage, "stays"));
        let halves: usize = stage.engine().recovery().iter().map(|shard| shard.half_deleted.len()).sum();
        assert_eq!(halves, 0, "{note}: the delete was finished before");
        assert_eq!((here(&goes, 0..BLOCKS), here(&goes, 100..103)), (found, 3), "{note}, start {again}");
        goes.expect(pages(), &goes.keys(100..103), 3);
        assert_eq!(here(&stays, 0..OTHERS), OTHERS, "{note}");
        stage.audit_all();
        media = stage.close().unwrap();
    }
    (found > 0, half)
}

/// One of the images that a power cut may leave.
fn left(state: CrashState, seed: Seed) -> Media {
    let all = state.enumerate(8, seed);
    let crash = seed.rng().pick(&all).copied().unwrap_or(Crash::KeepAll);
    state.image(crash)
}

/// Power cuts in a delete, one after every `stride`th of its steps; the seed decides the first. Gives what each left.
fn cuts(seed: Seed, stride: usize, each: &mut dyn FnMut(u64, Media)) {
    let before = made(seed);
    for step in (seed.0 * 7 % stride as u64..).step_by(stride) {
        let (world, stage) = open(seed.child("cut").0, before.clone());
        let desk = Desk::new(&stage, "goes");
        let mut answer = stage.store().delete(delete(&desk));
        let mut steps = 0;
        let answered = RefCell::new(false);
        let ran = world.run_until(100_000, || {
            *answered.borrow_mut() |= answer.try_take().is_some();
            steps += 1;
            steps > step || *answered.borrow()
        });
        ran.unwrap_or_else(|hang| panic!("{hang}"));
        let done = answered.into_inner();
        drop((answer, desk));
        each(step, left(stage.cut_power(), seed.child("power").nth(step)));
        if done {
            return;
        }
    }
}

#[test]
fn a_power_cut_at_any_step_of_a_delete_leaves_a_namespace_whole_or_gone() {
    let (mut there, mut gone, mut finished) = (0, 0, 0);
    for seed in (0..seeds(3, 3)).map(Seed) {
        cuts(seed, 19, &mut |step, media| {
            let (is_there, half) = judge(seed.nth(step), &media, &format!("seed {}, step {step}", seed.0));
            there += u32::from(is_there);
            gone += u32::from(!is_there);
            finished += u32::from(half);
        });
    }
    println!("there {there}, gone {gone}, finished when the store was opened {finished}");
    assert!(there > 2 && gone > 2 && finished > 2, "{there} {gone} {finished}");
}

#[test]
fn a_power_cut_while_a_delete_is_finished_leaves_it_to_be_finished() {
    let mut cut_again = 0;
    for seed in (0..seeds(1, 1)).map(|seed| Seed(seed + 50)) {
        let mut halves = Vec::new();
        cuts(seed, 17, &mut |step, media| {
            let world = SimWorld::with_media(1, &WorldConfig::default(), media.clone());
            let stage = SimStage::open(&world, &options()).unwrap();
            if stage.engine().recovery().iter().any(|shard| !shard.half_deleted.is_empty()) {
                halves.push((step, media));
            }
            world.kill();
        });
        for (step, media) in halves.into_iter().step_by(5) {
            for stop in (10 + step % 40..500).step_by(60) {
                let world = SimWorld::with_media(stop, &WorldConfig::default(), media.clone());
                let (launcher, options) = (world.launcher(), options());
                let mut opening = Box::pin(Store::open(&launcher, &options));
                let mut context = std::task::Context::from_waker(std::task::Waker::noop());
                let (mut steps, mut opened) = (0, false);
                let ran = world.run_until(100_000, || {
                    opened |= !opened && opening.as_mut().poll(&mut context).is_ready();
                    steps += 1;
                    steps > stop || opened
                });
                ran.unwrap_or_else(|hang| panic!("{hang}"));
                let left = left(world.cut_power(), seed.child("again").nth(stop));
                drop(opening);
                let note = format!("seed {}, step {step}, opening cut at {stop}", seed.0);
                let (is_there, half) = judge(seed.nth(stop), &left, &note);
                assert!(!is_there, "{note}: what was gone is back");
                cut_again += u32::from(half);
                if opened {
                    break;
                }
            }
        }
    }
    assert!(cut_again > 2, "{cut_again}");
}

#[test]
fn a_namespace_is_deleted_again_and_again_with_starts_between() {
    let mut media = made(Seed(9));
    for round in 0..4u64 {
        let (_, stage) = open(round, media);
        let goes = Desk::new(&stage, "goes");
        ask(&stage, stage.store().delete(delete(&goes))).unwrap();
        assert_eq!(here(&goes, 0..200), 0, "round {round}");
        put(&goes, round * 10..round * 10 + 5, round);
        assert_eq!(here(&goes, 0..200), 5, "round {round}");
        // Killed, or stopped cleanly.
        media = if round % 2 == 0 { stage.world().kill() } else { stage.close().unwrap() };
        assert_eq!(counted(&media, goes_id()), (5, OTHERS), "round {round}");
    }
    let (_, stage) = open(99, media);
    assert_eq!(here(&Desk::new(&stage, "goes"), 0..200), 5);
}

fn goes_id() -> [u8; 32] {
    kvarts_tests::fixture::identity("goes").namespace_id().unwrap().0
}

/// Of a record the block in the middle goes first. What follows it there descends from it still, and so does what hangs on that.
#[test]
fn what_descends_from_a_block_that_is_gone_goes_with_its_prefix() {
    let world = SimWorld::new(5, &WorldConfig::default());
    let stage = SimStage::open(&world, &options()).unwrap();
    let desk = Desk::new(&stage, "a gap");
    let keys = desk.keys(0..8);
    let put_behind = |parent, keys: &[_]| {
        let request = PutRequest { parent, first_block: None, ..desk.request(pages(), keys, 1) };
        assert_eq!(desk.outcomes(request), vec![BlockOutcome::Stored; keys.len()]);
    };
    put_behind(Parent::Root, &keys[..4]);
    put_behind(Parent::Key(keys[3]), &keys[4..6]);
    put_behind(Parent::Key(keys[0]), &keys[6..8]);
    let delete = |target| {
        let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
        ask(&stage, stage.store().delete(request)).unwrap().blocks
    };
    assert_eq!(delete(Target::Keys { column: None, keys: vec![keys[1]] }), 1);
    assert_eq!(delete(Target::Prefix(keys[1])), 4, "two of its record, two that hang on the last");
    assert_eq!(here(&desk, 0..8), 3);
}
