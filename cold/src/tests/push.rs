//! Nothing is visible before it is whole, writers do not lose each other's packs, and nothing goes on without a bound.

use std::time::Duration;

use futures_util::future::join;

use super::fixture::*;
use crate::access::Limits;
use crate::error::ColdError;
use crate::fault::Fault;
use crate::format::manifest::{FINGERPRINTS_MAX, PACKS_MAX};
use crate::format::names::{self, Named};
use crate::format::{Manifest, PackBuilder, PackId, PackIndex, pack, samples};
use crate::push::PushOptions;
use crate::testing::{Kind, Op, Plan};
use crate::time::Time;

fn manifest_of(world: &World) -> Option<Manifest> {
    let bytes = world.memory.bytes(&names::manifest(samples::namespace_id("r1")))?;
    Some(Manifest::decode(&bytes).unwrap())
}

/// Whatever a manifest names is there, whole, under its name.
fn expect_whole(world: &World) -> usize {
    let Some(manifest) = manifest_of(world) else { return 0 };
    for (id, entry) in &manifest.packs {
        let bytes = world.memory.bytes(&names::pack(manifest.namespace, *id)).expect("a named pack is there");
        let (index, own) = pack::verify(&bytes).unwrap();
        assert_eq!((index.id(), bytes.len() as u64), (*id, entry.pack_bytes()));
        let index = world.memory.bytes(&names::index(manifest.namespace, *id)).expect("its index is there");
        assert_eq!(index, own);
        assert_eq!(PackIndex::decode(&index).unwrap().id(), *id);
    }
    manifest.packs.len()
}

#[test]
fn what_was_pushed_is_in_packs_that_a_manifest_names() {
    let world = World::new();
    let pushed = world.push(&[(1, 0, 12), (2, 0, 1)]).unwrap();
    assert_eq!((pushed.packs, pushed.blocks, pushed.payload_bytes), (3, 13, 13 * 192));
    assert_eq!(expect_whole(&world), 3);
    assert_eq!((world.good(&world.other(), 1, 12), world.good(&world.other(), 2, 3)), (12, 1));
}

#[test]
fn what_is_there_already_is_not_pushed_again() {
    let world = World::new();
    world.push(&[(1, 0, 7)]).unwrap();
    let names = world.memory.names();
    let again = world.push(&[(1, 0, 7), (1, 0, 7)]).unwrap();
    assert_eq!((again.packs, again.blocks, again.already_there), (0, 0, 14));
    assert_eq!(world.memory.names(), names);
    let longer = world.time.run(push(&world.other(), &[(1, 2, 9)], options())).unwrap();
    assert_eq!((longer.blocks, longer.already_there), (2, 5));
    assert_eq!(world.good(&world.other(), 1, 9), 9);
}

#[test]
fn a_run_that_comes_twice_in_one_push_is_packed_once() {
    let world = World::new();
    let pushed = world.push(&[(1, 0, 3), (1, 0, 4)]).unwrap();
    assert_eq!((pushed.blocks, pushed.already_there), (4, 3));
    assert_eq!(world.good(&world.other(), 1, 4), 4);
}

#[test]
fn parents_and_places_of_a_run_survive_its_cuts() {
    let world = World::new();
    world.push(&[(1, 0, 12)]).unwrap();
    let tier = world.other();
    let found = world.time.run(tier.locate(samples::namespace_id("r1"), COLUMN, &keys(1, 12))).unwrap();
    for (block, found) in (0u32..).zip(found) {
        let found = found.unwrap();
        let run = &found.run().unwrap().run;
        assert_eq!(run.first_block, Some(block - found.place.block));
        let parent = match run.first_block.unwrap() {
            0 => kvarts_layout::format::body::Parent::Root,
            first => kvarts_layout::format::body::Parent::Key(samples::key(1, first - 1).0),
        };
        assert_eq!(run.parent, parent);
    }
}

#[test]
fn a_failure_at_any_request_leaves_nothing_half_visible() {
    // How many requests a push makes without faults.
    let world = World::new();
    world.push(&[(1, 0, 12)]).unwrap();
    let all = world.faulty.asked_in_all();
    assert!(all > 8);
    for kind in [Kind::Outage, Kind::Lost, Kind::Denied] {
        for fails_from in 0..all {
            let world = World::new();
            // The requests before go well; this one and every later one fails.
            world.faulty.fail_from(fails_from, kind);
            assert!(world.push(&[(1, 0, 12)]).is_err());
            let whole = expect_whole(&world);
            world.faulty.plan(Plan::default());
            assert_eq!(world.good(&world.other(), 1, 12), (whole * 5).min(12));
            // And the next push brings the rest.
            world.time.run(push(&world.other(), &[(1, 0, 12)], options())).unwrap();
            expect_whole(&world);
            assert_eq!(world.good(&world.other(), 1, 12), 12);
        }
    }
}

#[test]
fn a_manifest_whose_answer_was_lost_is_not_written_twice() {
    let world = World::new();
    world.faulty.next(Op::Swap, &[Some(Kind::Lost)]);
    let pushed = world.push(&[(1, 0, 3)]).unwrap();
    assert_eq!(pushed.packs, 1);
    let manifest = manifest_of(&world).unwrap();
    assert_eq!((manifest.generation, manifest.packs.len()), (1, 1));
}

#[test]
fn a_writer_that_is_not_told_that_it_has_lost_a_race_looks_again() {
    let (unheard, two) = ([Some(Kind::Outage); 3], [(2, 0, 3)]);
    let world = World::new();
    let other = world.other();
    // Of the first writer's manifest no attempt has an answer, and the second one's goes through meanwhile.
    world.faulty.next(Op::Swap, &[&[Some(Kind::Outage), None], &unheard[..]].concat());
    let (one, two) =
        world.time.run(join(push(&world.tier, &[(1, 0, 3)], options()), push(&other, &two, options())));
    assert_eq!((one.unwrap().packs, two.unwrap().packs, expect_whole(&world)), (1, 1, 2));
    // Where there was no race, the fault is told.
    let world = World::new();
    world.faulty.next(Op::Swap, &[&[Some(Kind::Outage)], &unheard[..]].concat());
    assert!(matches!(world.push(&[(1, 0, 3)]), Err(ColdError::Bucket(_, Fault::Unreachable(_)))));
    assert_eq!((world.faulty.asked(Op::Swap), expect_whole(&world)), (4, 0));
}

#[test]
fn two_writers_do_not_lose_each_others_packs() {
    let world = World::new();
    let other = world.other();
    // Each request takes a while, so that both are under way at once.
    world.faulty.all(Some(Kind::Slow(Duration::from_millis(20))));
    let (one, two) = world
        .time
        .run(join(push(&world.tier, &[(1, 0, 40)], options()), push(&other, &[(2, 0, 40)], options())));
    assert_eq!((one.unwrap().packs, two.unwrap().packs), (8, 8));
    assert_eq!(expect_whole(&world), 16);
    assert_eq!(manifest_of(&world).unwrap().generation, 16);
    world.faulty.all(None);
    assert_eq!((world.good(&world.other(), 1, 40), world.good(&world.other(), 2, 40)), (40, 40));
}

#[test]
fn a_writer_that_always_loses_gives_up_after_its_bound() {
    let world = World::new();
    world.faulty.plan(Plan { next: [(Op::Swap, vec![Some(Kind::Changed); 100])].into(), ..Plan::default() });
    assert!(matches!(world.push(&[(1, 0, 3)]), Err(ColdError::Contended(_))));
    assert_eq!(world.faulty.asked(Op::Swap), 32);
}

#[test]
fn a_pack_that_was_condemned_meanwhile_gets_another_name() {
    let world = World::new();
    // The name that the first pack of this push will have: nothing else happens at this time.
    let mut builder = PackBuilder::new(&samples::namespace("r1"), world.time.wall_ms()).unwrap();
    let (run, payload) = samples::run("r1", 1, 0, 3);
    builder.add(&run, payload).unwrap();
    let name = builder.finish(0).unwrap().id;
    let condemn = world.tier.change(samples::namespace_id("r1"), |manifest| {
        manifest.condemned.insert(name, 1);
        Ok(Some(()))
    });
    world.time.run(condemn).unwrap();
    let pushed = world.push(&[(1, 0, 3)]).unwrap();
    assert_eq!(pushed.packs, 1);
    let manifest = manifest_of(&world).unwrap();
    assert!(!manifest.packs.contains_key(&name) && manifest.condemned.contains_key(&name));
    assert_eq!(world.good(&world.other(), 1, 3), 3);
}

#[test]
fn a_pack_whose_upload_took_too_long_gets_another_name() {
    let world = World::new();
    world.faulty.next(Op::Put, &[Some(Kind::Slow(Duration::from_secs(9)))]);
    let options = PushOptions { upload_time: Duration::from_secs(8), ..options() };
    world.time.run(push(&world.tier, &[(1, 0, 3)], options)).unwrap();
    let packs = world
        .memory
        .names()
        .iter()
        .filter(|name| matches!(Named::parse(name), Some(Named::Pack(..))))
        .count();
    assert_eq!((packs, expect_whole(&world)), (2, 1));
    assert_eq!(world.good(&world.other(), 1, 3), 3);
}

#[test]
fn budgets_of_a_day_end_a_push_and_come_back_the_next_day() {
    let world = World::new().limited(Limits { requests_a_day: 6, ..limits() });
    assert_eq!(world.push(&[(1, 0, 12)]), Err(ColdError::Budget("requests")));
    assert_eq!(world.faulty.asked_in_all(), 6);
    expect_whole(&world);
    world.time.pass(Duration::from_secs(86_400));
    assert_eq!(world.push(&[(1, 0, 5)]).map(|_| ()), Ok(()));
    let world = World::new().limited(Limits { written_bytes_a_day: 2000, ..limits() });
    assert_eq!(world.push(&[(1, 0, 12)]), Err(ColdError::Budget("bytes written")));
    assert!(world.tier.access().spent().written_bytes <= 2000);
}

#[test]
fn budgets_of_a_day_end_reads_and_come_back_the_next_day() {
    let world = World::new();
    world.push(&[(1, 0, 12)]).unwrap();
    for limits in [
        // A manifest, three indexes and one range.
        Limits { requests_a_day: 5, ..limits() },
        Limits { read_bytes_a_day: 6000, ..limits() },
    ] {
        let reader = world.other_with_limits(limits.clone());
        let first = world.good(&reader, 1, 12);
        assert!((1..12).contains(&first), "{first} blocks with {limits:?}");
        let asked = world.faulty.asked_in_all();
        for _ in 0..20 {
            let (_, fetched) = world.read(&reader, 1, 12);
            assert!(fetched.lost > 0, "misses");
        }
        let spent = reader.access().today();
        assert!(spent.requests <= limits.requests_a_day && spent.read_bytes <= limits.read_bytes_a_day);
        if limits.requests_a_day == 5 {
            assert_eq!(world.faulty.asked_in_all(), asked, "nothing is asked any more");
        }
        world.time.pass(Duration::from_secs(86_400));
        assert!(world.good(&reader, 1, 12) >= first, "another day");
    }
}

#[test]
fn a_busy_bucket_is_asked_again_when_it_says_and_not_for_ever() {
    let world = World::new();
    world.faulty.next(Op::Get, &[Some(Kind::Busy(Some(Duration::from_secs(7))))]);
    world.push(&[(1, 0, 3)]).unwrap();
    assert!(world.time.now() >= Duration::from_secs(7));
    let world = World::new();
    world.faulty.all(Some(Kind::Busy(Some(Duration::from_secs(3600)))));
    let error = world.push(&[(1, 0, 3)]).unwrap_err();
    assert!(matches!(error, ColdError::Bucket(_, Fault::Busy(_))));
    assert_eq!(world.faulty.asked_in_all(), 4);
    // A wait is never longer than its bound, whatever the bucket asks for.
    assert!(world.time.now() <= Duration::from_secs(31));
}

#[test]
fn a_silent_bucket_is_given_up_in_bounded_time() {
    let world = World::new();
    world.faulty.all(Some(Kind::Silent));
    let silent = world.push(&[(1, 0, 3)]).unwrap_err();
    assert!(matches!(silent, ColdError::Bucket(_, Fault::Unreachable(_))));
    assert!(silent.to_string().contains("the bucket has not responded within "), "{silent}");
    assert!(world.time.now() <= Duration::from_secs(60));
}

/// A name of a pack.
const PACK: &str = "kvarts-cold-1/packs/one";

#[test]
fn after_an_outage_the_bucket_is_left_alone_and_asked_now_and_then() {
    let world = World::new().limited(Limits::default());
    world.push(&[(1, 0, 3)]).unwrap();
    world.faulty.all(Some(Kind::Outage));
    let access = world.tier.access();
    let begun = world.time.now();
    while !access.is_paused() {
        assert!(world.time.run(access.get(PACK, 10)).is_err());
    }
    let after = world.time.now() - begun;
    assert!((Duration::from_secs(3)..Duration::from_secs(5)).contains(&after), "{after:?}");
    // Blocks are not asked for, but for a request now and then.
    let asked = world.faulty.asked_in_all();
    for _ in 0..600 {
        let refused = world.time.run(access.get(PACK, 10)).unwrap_err();
        assert!(matches!(refused, ColdError::Paused | ColdError::Bucket(_, Fault::Unreachable(_))));
        world.time.pass(Duration::from_millis(100));
    }
    let probes = world.faulty.asked_in_all() - asked;
    assert!((4..10).contains(&probes), "{probes}");
    // The first useful answer ends it, whatever was asked for.
    world.faulty.all(None);
    world.push(&[(2, 0, 3)]).unwrap();
    assert!(!access.is_paused());
}

#[test]
fn blocks_that_have_expired_are_not_pushed_and_not_found() {
    let world = World::new();
    let expires_ms = world.time.wall_ms() + 5000;
    let go = async {
        let mut pusher = crate::push::Pusher::new(&world.tier, options());
        let (mut run, payload) = samples::run("r1", 1, 0, 3);
        run.expires_ms = expires_ms;
        pusher.add(&samples::namespace("r1"), &run, &payload).await?;
        pusher.finish().await
    };
    assert_eq!(world.time.run(go).unwrap().blocks, 3);
    assert_eq!(world.good(&world.other(), 1, 3), 3);
    world.time.pass(Duration::from_secs(6));
    assert_eq!(world.good(&world.other(), 1, 3), 0);
    let go = async {
        let mut pusher = crate::push::Pusher::new(&world.tier, options());
        let (mut run, payload) = samples::run("r1", 2, 0, 3);
        run.expires_ms = expires_ms;
        pusher.add(&samples::namespace("r1"), &run, &payload).await?;
        pusher.finish().await
    };
    let pushed = world.time.run(go).unwrap();
    assert_eq!((pushed.blocks, pushed.expired), (0, 3));
}

/// A manifest without room for another pack.
fn fill(world: &World, tier: &crate::Tier) {
    let full = tier.change(samples::namespace_id("r1"), |manifest| {
        for pack in 0..PACKS_MAX as u32 {
            let mut id = [0x55; 32];
            id[..4].copy_from_slice(&pack.to_be_bytes());
            manifest.packs.insert(PackId(id), samples::pack().entry);
        }
        Ok(Some(()))
    });
    world.time.run(full).unwrap();
}

#[test]
fn what_a_full_namespace_has_no_room_for_is_not_put() {
    let world = World::new();
    let namespace = samples::namespace_id("r1");
    fill(&world, &world.tier);
    let names = world.memory.names();
    // Whether that is known before or not.
    assert_eq!(world.push(&[(7, 0, 3)]), Err(ColdError::Full(namespace)));
    let other = world.other();
    assert_eq!(world.time.run(push(&other, &[(7, 0, 3)], options())), Err(ColdError::Full(namespace)));
    assert_eq!(world.memory.names(), names);
    assert_eq!(world.faulty.asked(Op::Put), 0);
    // As soon as there is room it is used, also by who has an old manifest.
    let made = world.other();
    let room = made.change(namespace, |manifest| Ok(manifest.packs.pop_first().map(|_| ())));
    world.time.run(room).unwrap();
    assert_eq!(world.push(&[(7, 0, 3)]).map(|pushed| pushed.packs), Ok(1));
    assert_eq!(world.time.run(push(&other, &[(8, 0, 3)], options())), Err(ColdError::Full(namespace)));
}

#[test]
fn a_namespace_has_room_for_as_many_packs_and_fingerprints_as_a_manifest() {
    let mut manifest = samples::manifest();
    let entry = samples::pack().entry;
    let least = entry.filter.len();
    assert!(manifest.has_room(FINGERPRINTS_MAX - manifest.fingerprints()));
    assert!(!manifest.has_room(FINGERPRINTS_MAX - manifest.fingerprints() + 1));
    while manifest.has_room(least) {
        let mut id = [0x55; 32];
        id[..4].copy_from_slice(&(manifest.packs.len() as u32).to_be_bytes());
        manifest.packs.insert(PackId(id), entry.clone());
        assert!(manifest.check().is_ok() || manifest.packs.len() > PACKS_MAX);
    }
    assert_eq!((manifest.packs.len(), manifest.check()), (PACKS_MAX, Ok(())));
}

#[test]
fn what_was_abandoned_is_not_brought_into_the_tier() {
    let world = World::new();
    let go = async {
        let mut pusher = crate::push::Pusher::new(&world.tier, options());
        for prefix in [1, 2] {
            let (run, payload) = samples::run("r1", prefix, 0, 3);
            pusher.add(&samples::namespace("r1"), &run, &payload).await?;
            if prefix == 1 {
                pusher.abandon();
            }
        }
        pusher.finish().await
    };
    assert_eq!(world.time.run(go).map(|pushed| (pushed.packs, pushed.blocks)), Ok((1, 3)));
    assert_eq!((world.good(&world.other(), 1, 3), world.good(&world.other(), 2, 3)), (0, 3));
}
