//! A check finds whatever is wrong in a bucket, repairs what can be repaired, and takes nothing that can still be read.

use std::time::Duration;

use kvarts_layout::NamespaceId;

use super::fixture::*;
use crate::access::Limits;
use crate::check::{Checked, Finding, Level, check, namespaces};
use crate::error::ColdError;
use crate::format::names::{self, Named};
use crate::format::{PackId, samples};
use crate::testing::{Kind, Op};

fn pushed() -> World {
    let world = World::new();
    world.push(&[(1, 0, 12), (2, 0, 1)]).unwrap();
    world
}

fn checked(world: &World, level: Level, repairs: bool) -> Checked {
    world.time.run(check(&world.other(), samples::namespace_id("r1"), level, repairs)).unwrap()
}

fn findings(checked: &Checked) -> Vec<Finding> {
    checked.found.iter().map(|found| found.finding.clone()).collect()
}

/// The name of the first object of a kind.
fn first(world: &World, is_it: impl Fn(&Named) -> bool) -> (String, Named) {
    let named = world.memory.names().into_iter().map(|name| (Named::parse(&name).unwrap(), name));
    let (named, name) = { named }.find(|(named, _)| is_it(named)).unwrap();
    (name, named)
}

fn is_pack(named: &Named) -> bool {
    matches!(named, Named::Pack(..))
}

fn is_index(named: &Named) -> bool {
    matches!(named, Named::Index(..))
}

#[test]
fn nothing_is_wrong_with_what_a_push_left() {
    let world = pushed();
    assert_eq!(world.time.run(namespaces(&world.other())).unwrap(), [samples::namespace_id("r1")]);
    for level in [Level::Quick, Level::Full] {
        let checked = checked(&world, level, true);
        assert!(checked.is_clean() && checked.found.is_empty(), "{checked:?}");
        assert_eq!((checked.packs, checked.blocks, checked.orphans, checked.condemned), (3, 13, 0, 0));
        let lying: usize = world.memory.names().iter().filter(|name| !name.contains("manifests")).count();
        assert_eq!(lying, 6);
    }
}

/// R6 for a bucket.
#[test]
fn a_bit_that_flips_anywhere_in_any_object_is_found_and_gives_no_wrong_byte() {
    let world = pushed();
    let names = world.memory.names();
    let mut flipped = 0;
    for name in &names {
        let good = world.memory.bytes(name).unwrap().to_vec();
        for at in (0..good.len()).step_by(7) {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            world.memory.set(name, bad);
            let checked = checked(&world, Level::Full, false);
            assert!(!checked.is_clean(), "{name}: byte {at} of {}", good.len());
            // What is read is right, or is not there; the manifest of another version, or none, is an error.
            let tier = world.other();
            match world.time.run(read(&tier, 1, 12)) {
                Ok(_) => drop(world.good(&tier, 1, 12)),
                Err(error) => assert!(matches!(error, ColdError::Object(..)), "{error}"),
            }
            flipped += 1;
        }
        world.memory.set(name, good);
    }
    assert!(flipped > 500, "{flipped}");
    assert!(checked(&world, Level::Full, false).found.is_empty());
}

#[test]
fn an_index_that_is_gone_or_damaged_is_made_again_as_it_was() {
    let world = pushed();
    let (name, named) = first(&world, is_index);
    let Named::Index(_, pack) = named else { unreachable!() };
    let good = world.memory.take(&name).unwrap();
    assert_eq!(findings(&checked(&world, Level::Quick, false)), [Finding::MissingIndex(pack)]);
    assert!(world.memory.bytes(&name).is_none(), "a check without repair changed the bucket");
    for bad in [None, Some(vec![7; good.len()]), Some(Vec::new())] {
        drop(world.memory.take(&name));
        bad.into_iter().for_each(|bad| world.memory.set(&name, bad));
        assert!(checked(&world, Level::Quick, true).is_clean());
        assert_eq!(world.memory.bytes(&name).unwrap(), good);
    }
    assert_eq!(world.good(&world.other(), 1, 12), 12);
}

#[test]
fn an_index_is_not_made_from_a_damaged_pack() {
    let world = pushed();
    let (name, named) = first(&world, is_index);
    let Named::Index(namespace, pack) = named else { unreachable!() };
    drop(world.memory.take(&name));
    let mut bytes = world.memory.bytes(&names::pack(namespace, pack)).unwrap().to_vec();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    world.memory.set(&names::pack(namespace, pack), bytes);
    let checked = checked(&world, Level::Quick, true);
    assert!(!checked.is_clean() && world.memory.bytes(&name).is_none(), "{checked:?}");
    assert!(matches!(findings(&checked)[..], [Finding::MissingIndex(_), Finding::DamagedPack(..)]));
}

#[test]
fn a_pack_that_is_gone_is_named_no_longer_and_the_others_are_read() {
    let world = pushed();
    let (name, named) = first(&world, is_pack);
    let Named::Pack(_, pack) = named else { unreachable!() };
    drop(world.memory.take(&name));
    assert_eq!(findings(&checked(&world, Level::Quick, false)), [Finding::MissingPack(pack)]);
    assert!(checked(&world, Level::Quick, true).is_clean());
    let after = checked(&world, Level::Full, false);
    assert_eq!(
        (after.packs, after.found.len(), after.orphans),
        (2, 0, 1),
        "its index is an orphan: {after:?}"
    );
    let left = world.good(&world.other(), 1, 12) + world.good(&world.other(), 2, 1);
    assert_eq!(left as u64, after.blocks);
}

#[test]
fn a_damaged_pack_stays_as_its_other_blocks_can_be_read() {
    let world = pushed();
    let pack = world.memory.names().into_iter().find(|name| {
        Named::parse(name).is_some_and(|named| is_pack(&named))
            && world.memory.bytes(name).unwrap().len() > 900
    });
    let pack = pack.unwrap();
    let mut bytes = world.memory.bytes(&pack).unwrap().to_vec();
    // In the payload, which ends where the last frame begins.
    let at = bytes.len() - 64 - 192;
    bytes[at] ^= 4;
    world.memory.set(&pack, bytes);
    assert!(checked(&world, Level::Quick, true).is_clean(), "lengths and indexes are right");
    assert!(!checked(&world, Level::Full, true).is_clean());
    let good = world.good(&world.other(), 1, 12) + world.good(&world.other(), 2, 1);
    assert_eq!(good, 12);
    assert_eq!(checked(&world, Level::Full, true).packs, 3);
}

#[test]
fn what_the_bucket_does_not_answer_is_no_finding() {
    let world = pushed();
    world.faulty.all(Some(Kind::Outage));
    let tier = world.other();
    let outcome = world.time.run(check(&tier, samples::namespace_id("r1"), Level::Full, true));
    assert!(matches!(outcome, Err(ColdError::Bucket(..) | ColdError::Paused)), "{outcome:?}");
    world.faulty.all(None);
    assert!(checked(&world, Level::Full, true).found.is_empty());
}

#[test]
fn a_namespace_is_found_by_anything_that_it_has() {
    let world = pushed();
    let ours = samples::namespace_id("r1");
    let named = |world: &World| world.time.run(namespaces(&world.other())).unwrap();
    let gone = |is_it: fn(&Named) -> bool| {
        for name in world.memory.names() {
            if is_it(&Named::parse(&name).unwrap()) {
                world.memory.take(&name);
            }
        }
    };
    gone(|named| matches!(named, Named::Manifest(_)));
    assert_eq!(named(&world), [ours]);
    gone(is_pack);
    assert_eq!(named(&world), [ours], "by its indexes");
    gone(is_index);
    assert!(named(&world).is_empty());
    // More packs than an answer of a listing has: the next namespace is found, and the rest of this one is not listed.
    for number in 0u32..5000 {
        let mut id = [1; 32];
        id[..4].copy_from_slice(&number.to_be_bytes());
        world.memory.set(&names::pack(ours, PackId(id)), vec![1]);
    }
    let last = NamespaceId([0xff; 32]);
    world.memory.set(&names::pack(last, PackId([0; 32])), vec![1]);
    let before = world.faulty.asked_in_all();
    assert_eq!(named(&world), [ours, last]);
    assert_eq!(world.faulty.asked_in_all() - before, 4, "manifests, packs twice, indexes");
}

#[test]
fn a_long_pack_over_a_slow_link_has_the_time_that_its_bytes_take() {
    let slowest_rate = 100;
    let world = World::new().limited(Limits { slowest_rate, ..limits() });
    world.push(&[(1, 0, 5)]).unwrap();
    let pack = world.memory.names().into_iter().find(|name| name.contains("/packs/")).unwrap();
    let bytes = world.memory.bytes(&pack).unwrap().len() as u64;
    let takes = Duration::from_secs(bytes / slowest_rate);
    assert!(takes > Limits::default().patience, "{takes:?}");
    // Manifest, index and pack: the last one takes as long as the slowest rate says, all but a second.
    world.faulty.next(Op::Get, &[None, None, Some(Kind::Late(takes - Duration::from_secs(1)))]);
    let checked =
        world.time.run(check(&world.tier, samples::namespace_id("r1"), Level::Full, false)).unwrap();
    assert!(checked.is_clean() && checked.packs == 1, "{checked:?}");
    assert_eq!(world.tier.access().spent().retries, 0);
}
