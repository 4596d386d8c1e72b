//! Clocks that differ, and listings that are not of now: hits may be lost, and nothing that counts is deleted.

use std::time::Duration;

use super::fixture::*;
use crate::check::{Checked, Finding, Level, check};
use crate::collect::{CLOCKS_APART, Collected, GRACE_LEAST, Retention, collect};
use crate::error::ColdError;
use crate::format::names::{self, Named};
use crate::format::samples;
use crate::testing::{Kind, Op, Plan};
use crate::tier::Tier;

const HOUR: Duration = Duration::from_secs(3600);
const HOUR_MS: i64 = 3_600_000;

fn older_than_two_hours() -> Retention {
    Retention { age: Some(2 * HOUR), grace: GRACE_LEAST, ..Retention::default() }
}

fn collected(world: &World, by: &Tier) -> Result<Collected, ColdError> {
    world.time.run(collect(by, samples::namespace_id("r1"), &older_than_two_hours()))
}

fn checked(world: &World, level: Level, repairs: bool) -> Checked {
    world.time.run(check(&world.other(), samples::namespace_id("r1"), level, repairs)).unwrap()
}

/// Listings are from now on what they are now.
fn listings_stay(world: &World) {
    world.time.run(world.faulty.remember_listings());
    let next = [(Op::List, vec![Some(Kind::Old); 64])].into();
    world.faulty.plan(Plan { next, ..Plan::default() });
}

#[test]
fn a_collector_whose_clock_is_not_the_buckets_changes_nothing() {
    for ahead_ms in [-30 * HOUR_MS, -3 * HOUR_MS, 3 * HOUR_MS, 30 * HOUR_MS] {
        let world = World::skewed(1, ahead_ms);
        world.push(&[(1, 0, 12)]).unwrap();
        let before = world.memory.names();
        world.time.pass(100 * HOUR);
        let apart = ColdError::Clocks(ahead_ms.unsigned_abs());
        assert_eq!(collected(&world, &world.other()), Err(apart.clone()));
        assert!(apart.to_string().contains("set the local clock"), "{apart}");
        // What was pushed meanwhile and what is old is read by every node, whatever the bucket's clock says.
        world.push(&[(2, 0, 5)]).unwrap();
        assert_eq!((world.good(&world.other(), 1, 12), world.good(&world.other(), 2, 5)), (12, 5));
        assert!(before.iter().all(|name| world.memory.bytes(name).is_some()));
    }
    let apart = CLOCKS_APART.as_millis() as i64;
    let world = World::skewed(1, apart);
    world.push(&[(1, 0, 5)]).unwrap();
    world.time.pass(3 * HOUR);
    assert_eq!(collected(&world, &world.other()).unwrap().aged, 1, "clocks are never quite the same");
}

#[test]
fn of_two_collectors_the_one_whose_clock_runs_ahead_deletes_nothing_early() {
    let world = World::new();
    world.push(&[(1, 0, 5)]).unwrap();
    world.time.pass(3 * HOUR);
    assert_eq!(collected(&world, &world.other()).unwrap().waiting, 1);
    let ahead = world.other_with_clock(5 * HOUR_MS);
    assert!(matches!(collected(&world, &ahead), Err(ColdError::Clocks(_))));
    assert_eq!(world.memory.names().len(), 3, "the grace has not passed");
}

#[test]
fn what_a_node_with_a_slow_clock_pushed_is_not_old_for_that() {
    let world = World::new();
    let slow = world.other_with_clock(-5 * HOUR_MS);
    world.time.run(push(&slow, &[(1, 0, 5)], options())).unwrap();
    assert_eq!(collected(&world, &world.other()).unwrap(), Collected::default());
    assert_eq!(world.good(&world.other(), 1, 5), 5);
    let fast = world.other_with_clock(5 * HOUR_MS);
    world.time.run(push(&fast, &[(2, 0, 5)], options())).unwrap();
    world.time.pass(3 * HOUR);
    assert_eq!(collected(&world, &world.other()).unwrap().aged, 1, "the other one is old by both clocks");
    world.time.pass(5 * HOUR);
    assert_eq!(collected(&world, &world.other()).unwrap().aged, 1, "it stays for longer, not for ever");
}

#[test]
fn a_listing_that_lacks_new_packs_costs_them_nothing() {
    let world = World::new();
    world.push(&[(1, 0, 5)]).unwrap();
    listings_stay(&world);
    world.push(&[(2, 0, 5), (3, 0, 5)]).unwrap();
    assert_eq!(collected(&world, &world.other()).unwrap(), Collected::default());
    let found = checked(&world, Level::Full, true);
    assert!(found.found.is_empty() && found.packs == 3, "{found:?}");
    world.time.pass(3 * HOUR);
    // The two that are not listed are not known to be old.
    assert_eq!(collected(&world, &world.other()).unwrap().aged, 1);
    assert_eq!((2..4).map(|prefix| world.good(&world.other(), prefix, 5)).sum::<usize>(), 10);
    world.faulty.plan(Plan::default());
    assert_eq!(collected(&world, &world.other()).unwrap().aged, 2, "by the next listing they are");
}

#[test]
fn a_listing_that_shows_deleted_packs_brings_none_back_and_takes_nothing_else() {
    let world = World::new();
    world.push(&[(1, 0, 12)]).unwrap();
    world.time.pass(3 * HOUR);
    assert_eq!(collected(&world, &world.other()).unwrap().waiting, 3);
    world.time.pass(2 * HOUR);
    listings_stay(&world);
    assert_eq!(collected(&world, &world.other()).unwrap().deleted, 3);
    world.push(&[(2, 0, 5)]).unwrap();
    // To another collector they look like what a push left; they are condemned again, and then they are gone again.
    let again = collected(&world, &world.other()).unwrap();
    assert_eq!((again.orphans, again.deleted), (3, 0));
    assert_eq!(world.good(&world.other(), 1, 12), 0);
    world.time.pass(HOUR + HOUR / 2);
    assert_eq!(collected(&world, &world.other()).unwrap().deleted, 3);
    world.faulty.plan(Plan::default());
    let done = collected(&world, &world.other()).unwrap();
    assert_eq!((done.waiting, done.orphans), (0, 0));
    assert_eq!((world.good(&world.other(), 2, 5), world.memory.names().len()), (5, 3));
}

#[test]
fn a_pack_that_is_gone_is_found_though_a_listing_shows_it() {
    let world = World::new();
    world.push(&[(1, 0, 12)]).unwrap();
    listings_stay(&world);
    let names = world.memory.names();
    let gone = names.iter().find_map(|name| match Named::parse(name) {
        Some(Named::Pack(_, pack)) => Some(pack),
        _ => None,
    });
    let gone = gone.unwrap();
    let namespace = samples::namespace_id("r1");
    world.memory.take(&names::pack(namespace, gone)).unwrap();
    let found = checked(&world, Level::Full, true);
    assert_eq!(found.found.len(), 1, "{found:?}");
    assert_eq!(found.found[0].finding, Finding::MissingPack(gone));
    assert!(found.found[0].is_repaired);
}
