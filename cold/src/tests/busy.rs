//! A bucket that asks for fewer requests, or has an outage: what goes on.

use std::time::Duration;

use super::fixture::*;
use crate::access::Limits;
use crate::format::samples;
use crate::restore::{FetchOptions, fetch, plan};
use crate::testing::{Kind, Op};
use crate::withdraw::{Deleted, withdraw};

/// Twenty packs, a range each.
const PACKS: u32 = 20;

/// How many blocks come if the next ranges are answered so.
fn come(world: &World, answers: &[Option<Kind>]) -> usize {
    world.push(&[(1, 0, PACKS * 5)]).unwrap();
    world.faulty.next(Op::Range, answers);
    let tier = &world.tier;
    world.time.run(async {
        let found = tier.locate(samples::namespace_id("r1"), COLUMN, &keys(1, PACKS * 5)).await.unwrap();
        let wanted: Vec<_> = found.into_iter().map(Option::unwrap).enumerate().collect();
        let options = FetchOptions { parallel: 16, ..small_ranges() };
        let mut come = 0;
        let fetched = fetch(tier, plan(&wanted, None, &options), &options, |arrived| {
            come += usize::from(arrived.bytes.is_ok());
        });
        assert!(fetched.await.ranges >= u64::from(PACKS));
        come
    })
}

#[test]
fn a_burst_of_503_of_requests_that_were_made_at_once_halves_what_runs_and_costs_no_block() {
    for asked in [None, Some(Duration::from_secs(2))] {
        let world = World::new().limited(Limits::default());
        assert_eq!(come(&world, &[Some(Kind::Busy(asked)); 20]), PACKS as usize * 5, "{asked:?}");
        let access = world.tier.access();
        assert!(!access.is_paused());
        assert!((4..16).contains(&access.ranges_at_once()), "{}", access.ranges_at_once());
    }
    let well = World::new().limited(Limits::default());
    assert_eq!(come(&well, &[]), PACKS as usize * 5);
    assert_eq!(well.tier.access().ranges_at_once(), 16);
}

#[test]
fn deletes_reach_a_bucket_that_is_left_alone_and_their_answer_ends_that() {
    let world = World::new().limited(Limits::default());
    world.push(&[(1, 0, 12)]).unwrap();
    world.faulty.all(Some(Kind::Busy(None)));
    let of = samples::namespace_id("r1");
    let mut rounds = 0;
    while !world.tier.access().is_paused() {
        assert!(world.time.run(world.tier.read_manifest(of)).is_err() && rounds < 100);
        rounds += 1;
    }
    world.faulty.all(None);
    let deleted = Deleted::Keys(vec![samples::key(1, 3)]);
    assert_eq!(world.time.run(withdraw(&world.tier, of, std::slice::from_ref(&deleted))), Ok(1));
    assert!(!world.tier.access().is_paused());
    assert_eq!(world.good(&world.other(), 1, 12), 7, "one pack of five went");
}

#[test]
fn an_object_that_is_forbidden_is_an_answer_and_no_outage() {
    let world = World::new().limited(Limits { silence_before_pause: Duration::ZERO, ..Limits::default() });
    world.push(&[(1, 0, 12)]).unwrap();
    world.faulty.all(Some(Kind::Forbidden));
    for _ in 0..20 {
        assert!(world.time.run(world.tier.read_manifest(samples::namespace_id("r1"))).is_err());
    }
    assert!(!world.tier.access().is_paused());
    assert_eq!(world.tier.access().spent().retries, 0, "the same answer would come again");
    world.faulty.all(Some(Kind::Denied));
    for _ in 0..8 {
        assert!(world.time.run(world.tier.read_manifest(samples::namespace_id("r1"))).is_err());
    }
    assert!(world.tier.access().is_paused(), "credentials that are refused are refused for everything");
}
