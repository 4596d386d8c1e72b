//! Garbage collection takes what is not to be kept, and nothing else, also while other nodes push, read or collect.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::{join, join_all};

use super::fixture::*;
use crate::check::{Level, check, namespaces};
use crate::collect::{Collected, GRACE_LEAST, Retention, collect};
use crate::format::{names, samples};
use crate::push::Pusher;
use crate::testing::{Kind, Plan};
use crate::tier::Tier;
use crate::time::Time;

const HOUR: Duration = Duration::from_secs(3600);

fn hourly() -> Retention {
    Retention { grace: GRACE_LEAST, ..Retention::default() }
}

fn collected(world: &World, retention: &Retention) -> Collected {
    world.time.run(collect(&world.other(), samples::namespace_id("r1"), retention)).unwrap()
}

#[test]
fn what_is_to_be_kept_is_not_touched() {
    let world = World::new();
    world.push(&[(1, 0, 12)]).unwrap();
    let (names, manifest) = (world.memory.names(), names::manifest(samples::namespace_id("r1")));
    let before = world.memory.bytes(&manifest);
    world.time.pass(100 * HOUR);
    assert_eq!(collected(&world, &hourly()), Collected::default());
    assert_eq!((world.memory.names(), world.memory.bytes(&manifest)), (names, before));
}

#[test]
fn old_packs_stop_counting_first_and_are_deleted_a_grace_later() {
    let world = World::new();
    world.push(&[(1, 0, 12)]).unwrap();
    let reader = world.other();
    assert_eq!(world.good(&reader, 1, 12), 12);
    world.time.pass(3 * HOUR);
    world.push(&[(2, 0, 5)]).unwrap();
    let retention = Retention { age: Some(2 * HOUR), ..hourly() };
    let dry = collected(&world, &Retention { dry_run: true, ..retention.clone() });
    let first = collected(&world, &retention);
    assert_eq!((first.aged, first.deleted, first.waiting), (3, 0, 3));
    assert_eq!((dry.aged, dry.waiting), (3, 3));
    assert_eq!(world.good(&world.other(), 1, 12), 0, "a new reader does not find them");
    world.time.pass(HOUR / 2);
    assert_eq!(collected(&world, &retention).deleted, 0);
    world.time.pass(HOUR);
    let second = collected(&world, &retention);
    assert_eq!((second.deleted, second.waiting), (3, 0));
    assert!(second.deleted_bytes > 12 * samples::BLOCK as u64);
    // A reader that still has the old manifest misses.
    assert_eq!(world.good(&reader, 1, 12), 0);
    assert_eq!(world.good(&world.other(), 2, 5), 5);
    let checked =
        world.time.run(check(&world.other(), samples::namespace_id("r1"), Level::Full, false)).unwrap();
    assert!(checked.found.is_empty() && checked.orphans == 0 && checked.condemned == 0, "{checked:?}");
}

#[test]
fn a_namespace_beyond_its_bytes_loses_what_was_added_first() {
    let world = World::new();
    for prefix in 1..=4 {
        world.push(&[(prefix, 0, 5)]).unwrap();
        world.time.pass(HOUR);
    }
    let stored = world.time.run(world.other().read_manifest(samples::namespace_id("r1"))).unwrap();
    let each = stored.manifest.stored_bytes() / 4;
    let done = collected(&world, &Retention { stored_bytes: Some(each * 2 + each / 2), ..hourly() });
    assert_eq!((done.over_budget, done.waiting), (2, 2));
    let good: Vec<usize> = (1..=4).map(|prefix| world.good(&world.other(), prefix, 5)).collect();
    assert_eq!(good, [0, 0, 5, 5]);
}

#[test]
fn packs_whose_blocks_have_all_expired_go_and_make_room_for_others() {
    let world = World::new();
    let (mut run, payload) = samples::run("r1", 1, 0, 5);
    run.expires_ms = world.time.wall_ms() + 1000;
    let mut pusher = Pusher::new(&world.tier, options());
    world.time.run(pusher.add(&samples::namespace("r1"), &run, &payload)).unwrap();
    world.time.run(pusher.finish()).unwrap();
    world.push(&[(2, 0, 5)]).unwrap();
    world.time.pass(Duration::from_secs(2));
    let stored = world.time.run(world.other().read_manifest(samples::namespace_id("r1"))).unwrap();
    let most = stored.manifest.stored_bytes() * 2 / 3;
    let done = collected(&world, &Retention { stored_bytes: Some(most), ..hourly() });
    assert_eq!((done.expired, done.over_budget), (1, 0));
    assert_eq!(world.good(&world.other(), 2, 5), 5);
}

#[test]
fn what_a_push_left_that_did_not_end_goes_two_graces_later_and_not_before() {
    let world = World::new();
    world.push(&[(1, 0, 5)]).unwrap();
    drop(world.memory.take(&names::manifest(samples::namespace_id("r1"))));
    world.time.run(push(&world.other(), &[(2, 0, 5)], options())).unwrap();
    world.time.pass(HOUR / 2);
    assert_eq!(collected(&world, &hourly()).orphans, 0, "a push may be under way");
    world.time.pass(HOUR);
    let first = collected(&world, &hourly());
    assert_eq!((first.orphans, first.deleted), (1, 0));
    world.time.pass(2 * HOUR);
    assert_eq!(collected(&world, &hourly()).deleted, 1);
    assert_eq!(world.memory.names().len(), 3, "{:?}", world.memory.names());
    assert_eq!(world.good(&world.other(), 2, 5), 5);
}

#[test]
fn what_lies_there_without_a_manifest_is_collected() {
    let world = World::new();
    world.push(&[(1, 0, 12)]).unwrap();
    drop(world.memory.take(&names::manifest(samples::namespace_id("r1"))));
    world.time.pass(2 * HOUR);
    let (mut orphans, mut deleted) = (0, 0);
    for _ in 0..2 {
        let tier = world.other();
        for namespace in world.time.run(namespaces(&tier)).unwrap() {
            let done = world.time.run(collect(&tier, namespace, &hourly())).unwrap();
            (orphans, deleted) = (orphans + done.orphans, deleted + done.deleted);
        }
        world.time.pass(2 * HOUR);
    }
    assert_eq!((orphans, deleted), (3, 3));
    assert_eq!(world.memory.names(), [names::manifest(samples::namespace_id("r1"))]);
}

/// Pushes prefixes of its own and of others over hours; what of it was acknowledged.
async fn pushes(tier: &Tier, time: &dyn Time, number: u8) -> BTreeSet<(u8, u32)> {
    let mut acknowledged = BTreeSet::new();
    for round in 0..8u32 {
        let prefix = if round % 2 == 0 { number } else { 100 };
        let to = 3 + round * 2;
        if push(tier, &[(prefix, 0, to)], options()).await.is_ok() {
            acknowledged.extend((0..to).map(|block| (prefix, block)));
        }
        time.sleep(HOUR / 3 + Duration::from_secs(u64::from(number) * 100)).await;
    }
    acknowledged
}

async fn collects(tier: &Tier, time: &dyn Time) -> u64 {
    let mut deleted = 0;
    for _ in 0..8 {
        let done = collect(tier, samples::namespace_id("r1"), &hourly()).await;
        deleted += done.map_or(0, |done| done.deleted);
        time.sleep(HOUR / 2).await;
    }
    deleted
}

#[test]
fn collectors_beside_pushes_under_faults_take_orphans_and_nothing_that_was_acknowledged() {
    let kinds = vec![
        Kind::Outage,
        Kind::Lost,
        Kind::Busy(None),
        Kind::Slow(Duration::from_secs(30)),
        Kind::Silent,
        Kind::Missing,
        Kind::Changed,
        Kind::Stale,
    ];
    let mut deleted = 0;
    for seed in 0..60 {
        let world = World::seeded(seed);
        world.faulty.plan(Plan {
            thousandths: [200, 500, 650][seed as usize % 3],
            kinds: kinds.clone(),
            ..Plan::default()
        });
        let tiers: Vec<Tier> = (0..5).map(|_| world.other()).collect();
        let nodes = tiers.iter().take(3).zip(1..).map(|(tier, number)| pushes(tier, &world.time, number));
        let collectors = tiers.iter().skip(3).map(|tier| collects(tier, &world.time));
        let (acknowledged, taken) = world.time.run(join(join_all(nodes), join_all(collectors)));
        deleted += taken.iter().sum::<u64>();
        world.faulty.plan(Plan::default());
        let acknowledged: BTreeSet<_> = acknowledged.into_iter().flatten().collect();
        for prefix in acknowledged.iter().map(|(prefix, _)| *prefix).collect::<BTreeSet<_>>() {
            let to = acknowledged.iter().filter(|(other, _)| *other == prefix).count();
            assert_eq!(
                world.good(&world.other(), prefix, to as u32),
                to,
                "seed {seed}: acknowledged and not there"
            );
        }
        for _ in 0..3 {
            world.time.pass(3 * HOUR);
            deleted += collected(&world, &hourly()).deleted;
        }
        let checked =
            world.time.run(check(&world.other(), samples::namespace_id("r1"), Level::Full, false)).unwrap();
        assert!(checked.found.is_empty(), "seed {seed}: {checked:?}");
        assert_eq!((checked.orphans, checked.condemned), (0, 0), "seed {seed}");
    }
    assert!(deleted > 0, "no push left anything");
}
