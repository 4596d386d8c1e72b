//! What was deleted while a push was under way is not named by it, whichever program deleted it; what was put again is.

use kvarts_layout::BlockKey;

use super::fixture::*;
use crate::check::{Finding, Level, check};
use crate::error::ColdError;
use crate::format::deletions::KEYS_MAX;
use crate::format::{Point, names, samples};
use crate::push::{Pushed, Pusher};
use crate::tier::Tier;
use crate::time::Time;
use crate::withdraw::{Deleted, withdraw};

const HOUR_MS: u64 = 3_600_000;

fn delete(world: &World, deleted: Deleted) {
    world.time.run(withdraw(&world.other(), samples::namespace_id("r1"), &[deleted])).unwrap();
}

/// The state of the manifest that a writer knows when it lists its blocks.
fn point(world: &World) -> Point {
    world.time.run(world.other().point(samples::namespace_id("r1"))).unwrap()
}

/// Pushes blocks that were listed at this point and produced then.
fn push_listed(
    world: &World,
    tier: &Tier,
    (prefix, to): (u8, u32),
    (listed, created_ms): (Point, u64),
) -> Result<Pushed, ColdError> {
    world.time.run(async {
        let mut pusher = Pusher::new(tier, options());
        pusher.listed(samples::namespace_id("r1"), listed);
        let (mut run, payload) = samples::run("r1", prefix, 0, to);
        run.created_ms = created_ms;
        pusher.add(&samples::namespace("r1"), &run, &payload).await?;
        pusher.finish().await
    })
}

/// Which blocks of a prefix a node finds that remembers nothing.
fn found(world: &World, prefix: u8, to: u32) -> Vec<u32> {
    let found = world.other();
    let found = world.time.run(found.locate(samples::namespace_id("r1"), COLUMN, &keys(prefix, to)));
    (0..).zip(found.unwrap()).filter(|(_, found)| found.is_some()).map(|(block, _)| block).collect()
}

#[test]
fn what_was_deleted_while_a_push_was_under_way_does_not_come_back_with_it() {
    let key = |block| samples::key(1, block);
    let all: Vec<u32> = (0..12).collect();
    for (deleted, stays) in [
        (Deleted::Keys(vec![key(3), key(11)]), vec![0, 1, 2, 4, 5, 6, 7, 8, 9, 10]),
        (Deleted::Later(vec![key(0)], COLUMN, 1), (1..12).collect()),
        (Deleted::Prefix(key(7)), vec![]),
        (Deleted::Namespace, vec![]),
        (Deleted::Keys(vec![samples::key(2, 3)]), all.clone()),
    ] {
        for was_there in [false, true] {
            let world = World::new();
            if was_there {
                world.push(&[(3, 0, 5)]).unwrap();
            }
            // By its own clock the blocks are younger than any delete.
            let (listed, created_ms) = (point(&world), world.time.wall_ms() + HOUR_MS);
            delete(&world, deleted.clone());
            let pushed = push_listed(&world, &world.other(), (1, 12), (listed, created_ms)).unwrap();
            assert_eq!(found(&world, 1, 12), stays, "{deleted:?}");
            assert_eq!((pushed.blocks, pushed.deleted), (stays.len() as u64, 12 - stays.len() as u64));
            // What is listed now is what the store has now.
            let again = push_listed(&world, &world.other(), (1, 12), (point(&world), created_ms)).unwrap();
            assert_eq!((again.deleted, found(&world, 1, 12)), (0, all.clone()), "{deleted:?}");
        }
    }
}

#[test]
fn a_delete_that_comes_between_pack_and_manifest_is_seen_by_the_change_that_names_the_pack() {
    let world = World::new();
    let (listed, created_ms) = (point(&world), world.time.wall_ms() + HOUR_MS);
    let (pusher, deleter) = (world.other(), world.other());
    // The pusher knows the manifest of before, so it puts the pack and meets the delete in its change.
    world.time.run(pusher.read_manifest(samples::namespace_id("r1"))).unwrap();
    let deleted = [Deleted::Keys(vec![samples::key(1, 1)])];
    world.time.run(withdraw(&deleter, samples::namespace_id("r1"), &deleted)).unwrap();
    let pushed = push_listed(&world, &pusher, (1, 4), (listed, created_ms)).unwrap();
    assert_eq!((pushed.packs, pushed.deleted, found(&world, 1, 4)), (1, 1, vec![0, 2, 3]));
    let packs = world.memory.names().iter().filter(|name| name.starts_with(names::PACKS)).count();
    assert_eq!(packs, 2, "the first one is for the collector");
}

#[test]
fn a_copy_that_was_produced_before_its_delete_is_not_named_though_it_was_listed_afterwards() {
    let world = World::new();
    let created_ms = world.time.wall_ms();
    world.time.pass(std::time::Duration::from_secs(1));
    delete(&world, Deleted::Keys(vec![samples::key(1, 1)]));
    let pushed = push_listed(&world, &world.other(), (1, 3), (point(&world), created_ms)).unwrap();
    assert_eq!((pushed.deleted, found(&world, 1, 3)), (1, vec![0, 2]));
    delete(&world, Deleted::Namespace);
    let pushed = push_listed(&world, &world.other(), (2, 3), (point(&world), created_ms)).unwrap();
    assert_eq!((pushed.deleted, pushed.blocks), (3, 0));
    let pushed =
        push_listed(&world, &world.other(), (2, 3), (point(&world), world.time.wall_ms() + 1)).unwrap();
    assert_eq!((pushed.deleted, pushed.blocks), (0, 3), "it was put again");
}

#[test]
fn what_was_listed_before_the_oldest_delete_that_is_known_is_refused_and_later_ones_are_not() {
    let world = World::new();
    world.push(&[(3, 0, 5)]).unwrap();
    let (listed, created_ms) = (point(&world), world.time.wall_ms() + HOUR_MS);
    delete(&world, Deleted::Keys(vec![samples::key(1, 1)]));
    let between = point(&world);
    let many = (0..KEYS_MAX as u32).map(|block| samples::key(9, block)).collect();
    delete(&world, Deleted::Keys(many));
    let pushed = push_listed(&world, &world.other(), (1, 3), (listed, created_ms)).unwrap();
    assert_eq!((pushed.blocks, pushed.deleted), (0, 3), "of the first delete it is known that there was one");
    let pushed = push_listed(&world, &world.other(), (1, 3), (between, created_ms)).unwrap();
    assert_eq!((pushed.blocks, pushed.deleted, pushed.doubtful), (3, 0, 0));
    // What was produced before a delete that is forgotten may have been deleted by it.
    let old = push_listed(&world, &world.other(), (2, 3), (between, 1)).unwrap();
    assert_eq!((old.blocks, old.doubtful), (3, 3));
}

#[test]
fn a_manifest_that_was_begun_anew_knows_no_deletes_so_what_was_listed_before_is_refused() {
    let world = World::new();
    world.push(&[(3, 0, 5)]).unwrap();
    let listed = point(&world);
    delete(&world, Deleted::Keys(vec![samples::key(1, 1)]));
    world.memory.take(&names::manifest(samples::namespace_id("r1")));
    world.time.pass(std::time::Duration::from_secs(1));
    for other in [4, 5, 6, 7] {
        world.time.run(push(&world.other(), &[(other, 0, 5)], options())).unwrap();
    }
    let created_ms = world.time.wall_ms() + HOUR_MS;
    let pushed = push_listed(&world, &world.other(), (1, 3), (listed, created_ms));
    assert_eq!(pushed, Err(ColdError::Anew(samples::namespace_id("r1"))));
    assert!(found(&world, 1, 3).is_empty());
    push_listed(&world, &world.other(), (1, 3), (point(&world), created_ms)).unwrap();
    assert_eq!(found(&world, 1, 3).len(), 3, "what is listed again is named");
}

#[test]
fn deletes_that_are_told_together_are_one_change() {
    let world = World::new();
    world.push(&[(1, 0, 5), (2, 0, 5)]).unwrap();
    let before = point(&world).generation;
    let several = [
        Deleted::Keys(vec![samples::key(1, 1)]),
        Deleted::Keys(vec![BlockKey([7; 32])]),
        Deleted::Later(vec![samples::key(2, 0)], COLUMN, 1),
    ];
    let gone = world.time.run(withdraw(&world.other(), samples::namespace_id("r1"), &several));
    assert_eq!((gone, point(&world).generation), (Ok(2), before + 1));
}

#[test]
fn a_check_finds_a_pack_with_deleted_blocks_and_a_repair_takes_it_out() {
    let world = World::new();
    let created_ms = world.time.wall_ms();
    push_listed(&world, &world.other(), (1, 5), (Point::default(), created_ms)).unwrap();
    let manifest = names::manifest(samples::namespace_id("r1"));
    let known = world.time.run(world.other().read_manifest(samples::namespace_id("r1"))).unwrap();
    world.time.pass(std::time::Duration::from_secs(1));
    delete(&world, Deleted::Keys(vec![samples::key(1, 1), samples::key(1, 2)]));
    // A writer whose bucket ignores conditions writes its packs over the delete, which it has read and does not heed.
    let mut back = known.manifest.clone();
    let now = world.time.run(world.other().read_manifest(samples::namespace_id("r1"))).unwrap();
    (back.generation, back.deletions) = (now.manifest.generation, now.manifest.deletions.clone());
    world.memory.set(&manifest, back.encode().unwrap());
    assert_eq!(found(&world, 1, 5).len(), 5);
    let checked = |repairs| {
        let tier = world.other();
        world.time.run(check(&tier, samples::namespace_id("r1"), Level::Quick, repairs)).unwrap()
    };
    let seen = checked(false);
    let findings: Vec<&Finding> = seen.found.iter().map(|found| &found.finding).collect();
    assert!(matches!(findings[..], [Finding::DeletedBlocks(_, 2)]), "{findings:?}");
    assert!(!seen.is_clean() && seen.deletes == 2);
    assert!(checked(true).is_clean());
    assert_eq!((found(&world, 1, 5).len(), checked(false).found.len()), (0, 0));
}
