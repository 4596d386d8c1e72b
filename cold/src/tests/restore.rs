//! Whatever a bucket answers: a hit may be lost, never bytes.

use std::ops::Range;
use std::time::Duration;

use super::fixture::*;
use crate::format::names::{self, Named};
use crate::format::{PackId, samples};
use crate::restore::{FetchOptions, Fetched, fetch, plan};
use crate::testing::{Kind, Op};
use crate::tier::TierOptions;
use crate::time::Time;

#[test]
fn neighbouring_blocks_are_one_range() {
    let world = World::new();
    world.push(&[(1, 0, 12)]).unwrap();
    let tier = world.other();
    let (blocks, fetched) = world.read(&tier, 1, 12);
    assert!(blocks.iter().all(Option::is_some));
    // Packs of five, five and two.
    assert_eq!(fetched, Fetched { ranges: 3, bytes: 12 * 192, over_read_bytes: 0, lost: 0 });
    assert_eq!(world.faulty.asked(Op::Range), 3);
}

fn of_some(world: &World, wanted: &[usize], layers: Option<Range<u32>>, options: &FetchOptions) -> Fetched {
    let tier = world.other();
    let found = world.time.run(tier.locate(samples::namespace_id("r1"), COLUMN, &keys(1, 12))).unwrap();
    let wanted: Vec<_> = wanted.iter().map(|at| (*at, found[*at].clone().unwrap())).collect();
    let mut arrived_in = Vec::new();
    let fetched = fetch(&tier, plan(&wanted, layers.as_ref(), options), options, |arrived| {
        let whole = samples::bytes_of(1, arrived.part.ordinal as u32);
        let part =
            layers.clone().map_or(0..192, |layers| layers.start as usize * 64..layers.end as usize * 64);
        assert_eq!(arrived.bytes.unwrap().to_vec(), whole[part]);
        arrived_in.push(arrived.part.ordinal);
    });
    let fetched = world.time.run(fetched);
    let order: Vec<usize> = wanted.iter().map(|(at, _)| *at).collect();
    assert_eq!(arrived_in, order);
    fetched
}

#[test]
fn what_is_read_beside_what_is_wanted_is_bounded() {
    let world = World::new();
    world.push(&[(1, 0, 12)]).unwrap();
    let free = FetchOptions { gap_bytes: 1000, over_read: 1000, ..FetchOptions::default() };
    let one = of_some(&world, &[0, 2], None, &free);
    assert_eq!((one.ranges, one.over_read_bytes), (1, 192));
    // A gap that is too long, or too much of the whole, is not read.
    let tight = FetchOptions { gap_bytes: 191, ..free.clone() };
    assert_eq!(of_some(&world, &[0, 2], None, &tight).ranges, 2);
    let frugal = FetchOptions { over_read: 125, ..free.clone() };
    assert_eq!(of_some(&world, &[0, 2], None, &frugal).ranges, 2);
    let short = FetchOptions { range_bytes: 400, ..free.clone() };
    assert_eq!(of_some(&world, &[0, 1, 2, 3], None, &short).ranges, 2);
    // In the order that was asked for, also backwards.
    assert_eq!(of_some(&world, &[3, 1, 2], None, &free).ranges, 2);
}

#[test]
fn some_layers_of_blocks_are_read_alone_and_proven_by_their_chunks() {
    let world = World::new();
    world.push(&[(1, 0, 12)]).unwrap();
    let frugal = FetchOptions { gap_bytes: 1000, over_read: 125, ..FetchOptions::default() };
    for layers in [0..1, 1..2, 1..3, 2..3, 0..3] {
        let fetched = of_some(&world, &[0, 1, 5], Some(layers.clone()), &frugal);
        assert_eq!(fetched.bytes, 3 * 64 * u64::from(layers.end - layers.start));
        assert_eq!(fetched.over_read_bytes, 0);
    }
    for pack in packs(&world) {
        spoil(&world, &pack, 64 + 3);
    }
    let tier = world.other();
    let found = world.time.run(tier.locate(samples::namespace_id("r1"), COLUMN, &keys(1, 1))).unwrap();
    let wanted = vec![(0, found[0].clone().unwrap())];
    for (layer, is_good) in [(0, true), (1, false), (2, true)] {
        let layers = layer..layer + 1;
        let fetches = plan(&wanted, Some(&layers), &frugal);
        let fetched = fetch(&tier, fetches, &frugal, |arrived| assert_eq!(arrived.bytes.is_ok(), is_good));
        assert_eq!(world.time.run(fetched).lost, u64::from(!is_good));
    }
}

fn packs(world: &World) -> Vec<String> {
    let names = world.memory.names();
    names.into_iter().filter(|name| matches!(Named::parse(name), Some(Named::Pack(..)))).collect()
}

/// Changes a byte of the first block of a pack.
fn spoil(world: &World, pack: &str, at: usize) {
    let Some(Named::Pack(namespace, id)) = Named::parse(pack) else { panic!("{pack}") };
    let index = world.memory.bytes(&names::index(namespace, id)).unwrap();
    let index = crate::format::PackIndex::decode(&index).unwrap();
    let mut bytes = world.memory.bytes(pack).unwrap().to_vec();
    bytes[index.runs()[0].payload_at as usize + at] ^= 0x10;
    world.memory.set(pack, bytes);
}

#[test]
fn every_bit_of_a_pack_that_is_changed_costs_its_block_and_no_other() {
    let world = World::new();
    world.push(&[(1, 0, 3)]).unwrap();
    let name = packs(&world).remove(0);
    let sound = world.memory.bytes(&name).unwrap();
    for at in 0..sound.len() {
        let mut bytes = sound.to_vec();
        bytes[at] ^= 1 << (at % 8);
        world.memory.set(&name, bytes);
        // Frames lie between the blocks: a reader has them from the index.
        let good = world.good(&world.other(), 1, 3);
        assert!(good >= 2, "byte {at}");
    }
    world.memory.set(&name, sound.to_vec());
    assert_eq!(world.good(&world.other(), 1, 3), 3);
}

#[test]
fn what_is_wrong_once_is_read_again() {
    for kind in [Kind::Truncated, Kind::Longer, Kind::Altered, Kind::Lost, Kind::Outage, Kind::Busy(None)] {
        let world = World::new();
        world.push(&[(1, 0, 5)]).unwrap();
        let tier = world.other();
        world.faulty.next(Op::Range, &[Some(kind)]);
        assert_eq!(world.good(&tier, 1, 5), 5, "{kind:?}");
        assert_eq!(world.faulty.asked(Op::Range), 2, "{kind:?}");
    }
}

#[test]
fn objects_that_are_wrong_or_gone_are_misses() {
    let world = World::new();
    world.push(&[(1, 0, 12)]).unwrap();
    let namespace = samples::namespace_id("r1");
    let ids: Vec<PackId> = packs(&world)
        .iter()
        .map(|name| match Named::parse(name) {
            Some(Named::Pack(_, id)) => id,
            _ => panic!("{name}"),
        })
        .collect();
    let change = |name: String, bytes: Option<Vec<u8>>| {
        let sound = world.memory.take(&name).unwrap();
        if let Some(bytes) = bytes {
            world.memory.set(&name, bytes);
        }
        let good = world.good(&world.other(), 1, 12);
        world.memory.set(&name, sound.to_vec());
        good
    };
    for id in &ids {
        let index = world.memory.bytes(&names::index(namespace, *id)).unwrap();
        let own = crate::format::PackIndex::decode(&index).unwrap().totals().blocks as usize;
        // Gone, another pack's, cut, or with a bit changed.
        let other = ids.iter().find(|other| *other != id).unwrap();
        let others = world.memory.bytes(&names::index(namespace, *other)).unwrap().to_vec();
        let mut changed = index.to_vec();
        changed[100] ^= 1;
        for bytes in [None, Some(others), Some(index[..50].to_vec()), Some(changed), Some(Vec::new())] {
            assert_eq!(change(names::index(namespace, *id), bytes), 12 - own);
        }
        assert_eq!(change(names::pack(namespace, *id), None), 12 - own);
        assert_eq!(change(names::pack(namespace, *id), Some(vec![0; 10])), 12 - own);
    }
    assert_eq!(change(names::manifest(namespace), None), 0);
    let (tier, name) = (world.other(), names::manifest(namespace));
    world.memory.set(&name, vec![1; 500]);
    assert!(world.time.run(read(&tier, 1, 12)).is_err());
}

#[test]
fn a_pack_that_is_always_wrong_is_not_asked_for_ever() {
    let world = World::new();
    world.push(&[(1, 0, 3)]).unwrap();
    let name = packs(&world).remove(0);
    spoil(&world, &name, 5);
    let tier = world.other();
    for _ in 0..20 {
        let good = world.good(&tier, 1, 3);
        assert!(good == 2 || good == 0);
    }
    // Two requests a read until it is struck out.
    assert_eq!(world.faulty.asked(Op::Range), 6);
}

#[test]
fn a_look_up_asks_the_bucket_once_in_a_while() {
    let world = World::new();
    world.push(&[(1, 0, 12)]).unwrap();
    let tier = world.other();
    let namespace = samples::namespace_id("r1");
    assert_eq!(tier.probe(namespace, &keys(1, 20)), None);
    let before = world.faulty.asked_in_all();
    for _ in 0..100 {
        world.time.run(tier.locate(namespace, COLUMN, &keys(1, 20))).unwrap();
        assert_eq!(tier.probe(namespace, &keys(1, 20)), Some(12));
        assert_eq!(tier.probe(namespace, &keys(9, 20)), Some(0));
    }
    // One manifest and three indexes.
    assert_eq!(world.faulty.asked_in_all() - before, 4);
    world.time.pass(TierOptions::default().refresh);
    world.time.run(tier.locate(namespace, COLUMN, &keys(1, 20))).unwrap();
    assert_eq!(world.faulty.asked_in_all() - before, 5);
}

#[test]
fn what_another_node_pushed_is_seen_within_the_refresh_time() {
    let world = World::new();
    let tier = world.other();
    assert_eq!(world.good(&tier, 1, 5), 0);
    world.push(&[(1, 0, 5)]).unwrap();
    assert_eq!(world.good(&tier, 1, 5), 0);
    world.time.pass(TierOptions::default().refresh);
    assert_eq!(world.good(&tier, 1, 5), 5);
}

#[test]
fn an_outage_leaves_what_is_remembered_and_ends() {
    let world = World::new();
    world.push(&[(1, 0, 5)]).unwrap();
    let tier = world.other();
    assert_eq!(world.good(&tier, 1, 5), 5);
    world.time.pass(TierOptions::default().refresh);
    world.faulty.next(Op::Get, &[Some(Kind::Outage); 4]);
    // The manifest cannot be read again; the old one and the index serve.
    assert_eq!(world.good(&tier, 1, 5), 5);
    world.faulty.all(Some(Kind::Outage));
    world.time.pass(TierOptions::default().refresh);
    assert_eq!(world.good(&tier, 1, 5), 0);
    world.time.pass(TierOptions::default().stale);
    assert!(world.time.run(read(&tier, 1, 5)).is_err());
    world.faulty.all(None);
    assert_eq!(world.good(&tier, 1, 5), 5);
}

#[test]
fn a_late_range_is_asked_for_once_more_and_the_first_answer_counts() {
    let world = World::new();
    world.push(&[(1, 0, 5)]).unwrap();
    let tier = world.other();
    // Other requests, of which one in ten may be doubled.
    (0..12).for_each(|_| assert_eq!(world.good(&tier, 1, 5), 5));
    let before = (world.time.now(), world.faulty.asked(Op::Range));
    world.faulty.next(Op::Range, &[Some(Kind::Slow(Duration::from_secs(9)))]);
    assert_eq!(world.good(&tier, 1, 5), 5);
    assert_eq!(world.faulty.asked(Op::Range) - before.1, 2);
    assert!(world.time.now() - before.0 < Duration::from_secs(2));
    assert_eq!(tier.access().spent().hedges, 1);
    // Where everything is slow, one request in ten is doubled and no more.
    world.faulty.all(Some(Kind::Slow(Duration::from_secs(5))));
    (0..40).for_each(|_| assert_eq!(world.good(&tier, 1, 5), 5));
    let spent = tier.access().spent();
    assert!(spent.hedges * 10 <= spent.requests + 10, "{spent:?}");
}

#[test]
fn a_range_that_comes_slowly_is_not_late_and_one_that_stops_is() {
    let world = World::new();
    world.push(&[(1, 0, 5)]).unwrap();
    let tier = world.other();
    (0..12).for_each(|_| assert_eq!(world.good(&tier, 1, 5), 5));
    // A second is when it would be late: each piece comes before, and all of them take seven times as long.
    let asked = |world: &World| (world.faulty.asked(Op::Range), world.time.now());
    let before = asked(&world);
    world.faulty.next(Op::Range, &[Some(Kind::Trickle(Duration::from_millis(900)))]);
    assert_eq!(world.good(&tier, 1, 5), 5);
    let after = asked(&world);
    assert_eq!((after.0 - before.0, tier.access().spent().hedges), (1, 0));
    assert!(after.1 - before.1 >= Duration::from_millis(7200));
    // A piece came, and then none for too long.
    world.faulty.next(Op::Range, &[Some(Kind::Trickle(Duration::from_millis(4000)))]);
    assert_eq!(world.good(&tier, 1, 5), 5);
    assert_eq!((asked(&world).0 - after.0, tier.access().spent().hedges), (2, 1));
    assert!(asked(&world).1 - after.1 < Duration::from_secs(4));
    // What is usual is how long the first byte takes.
    assert!(tier.first_byte_time().unwrap() < Duration::from_secs(1));
}

#[test]
fn an_answer_that_came_second_and_is_whole_first_is_what_was_put() {
    let world = World::new();
    world.push(&[(1, 0, 5)]).unwrap();
    let tier = world.other();
    (0..12).for_each(|_| assert_eq!(world.good(&tier, 1, 5), 5));
    // The first request has written half of other bytes, and would write the rest, when the second one is whole; and the other way round.
    let (slow, altered) = (Kind::Trickle(Duration::from_millis(1500)), Kind::Altered);
    for kinds in [[Some(slow), None], [Some(slow), Some(altered)], [Some(altered), Some(slow)]] {
        world.faulty.next(Op::Range, &kinds);
        assert_eq!(world.good(&tier, 1, 5), 5, "{kinds:?}");
    }
}

#[test]
fn indexes_take_bounded_memory() {
    let world = World::new();
    for prefix in 0..40 {
        world.push(&[(prefix, 0, 5)]).unwrap();
    }
    let options = TierOptions { index_memory: 20_000, ..TierOptions::default() };
    let access = crate::access::Access::new(
        std::sync::Arc::clone(&world.faulty) as _,
        std::sync::Arc::new(world.time.clone()),
        limits(),
        5,
    );
    let tier = crate::tier::Tier::new(access, options);
    for prefix in 0..40 {
        assert_eq!(world.good(&tier, prefix, 5), 5);
        assert!(tier.index_memory() <= 20_000);
    }
    assert!(tier.index_memory() > 0);
}
