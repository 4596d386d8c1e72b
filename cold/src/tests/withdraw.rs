//! What was deleted is in no pack that a manifest names, also while other nodes push.

use std::sync::atomic::{AtomicBool, Ordering};

use kvarts_layout::BlockKey;

use super::fixture::*;
use crate::error::ColdError;
use crate::format::deletions::Listed;
use crate::format::manifest::CONDEMNED_MAX;
use crate::format::{PackEntry, PackId, samples, wide_fingerprint};
use crate::push::Pusher;
use crate::testing::{Kind, Op};
use crate::time::Time;
use crate::withdraw::{Deleted, Told, When, withdraw, withdraw_told};

fn delete(world: &World, deleted: &Deleted) -> Result<u64, ColdError> {
    world.time.run(withdraw(&world.other(), samples::namespace_id("r1"), std::slice::from_ref(deleted)))
}

/// Blocks of two prefixes that a node finds which remembers nothing.
fn left(world: &World) -> (usize, usize) {
    (world.good(&world.other(), 1, 12), world.good(&world.other(), 2, 5))
}

#[test]
fn the_packs_of_deleted_blocks_go_and_others_stay() {
    let world = World::new();
    world.push(&[(1, 0, 10)]).unwrap();
    world.push(&[(2, 0, 5)]).unwrap();
    assert_eq!(delete(&world, &Deleted::Keys(vec![BlockKey([77; 32])])), Ok(0));
    assert_eq!(left(&world), (10, 5));
    assert_eq!(delete(&world, &Deleted::Keys(vec![samples::key(1, 7)])), Ok(1));
    assert_eq!(left(&world), (5, 5), "the pack of the blocks 5 to 9 went");
    assert_eq!(delete(&world, &Deleted::Namespace), Ok(2));
    assert_eq!(left(&world), (0, 0));
    // The store's delete may be asked again.
    assert_eq!(delete(&world, &Deleted::Namespace), Ok(0));
}

#[test]
fn copies_that_would_outlive_their_blocks_go_and_others_stay() {
    let world = World::new();
    let now = world.time.wall_ms();
    for (prefix, expires_ms) in [(1, 0), (2, now + 10_000), (3, now + 50_000)] {
        let (mut run, payload) = samples::run("r1", prefix, 0, 5);
        run.expires_ms = expires_ms;
        let mut pusher = Pusher::new(&world.tier, options());
        world.time.run(pusher.add(&samples::namespace("r1"), &run, &payload)).unwrap();
        world.time.run(pusher.finish()).unwrap();
    }
    let later = |prefixes: &[u8]| {
        let keys = prefixes.iter().flat_map(|prefix| keys(*prefix, 2)).collect();
        delete(&world, &Deleted::Later(keys, COLUMN, now + 20_000))
    };
    assert_eq!(later(&[2, 9]), Ok(0), "it goes sooner by itself");
    assert_eq!(later(&[1, 2]), Ok(1));
    assert_eq!(later(&[3]), Ok(1));
    let good: Vec<usize> = (1..4).map(|prefix| world.good(&world.other(), prefix, 5)).collect();
    assert_eq!(good, [0, 5, 0]);
}

fn tell(world: &World, deleted: &Deleted, when: When) -> Result<u64, ColdError> {
    let told = [Told { deleted: deleted.clone(), when }];
    world.time.run(withdraw_told(&world.other(), samples::namespace_id("r1"), &told))
}

/// Pushes blocks of a prefix that were produced then.
fn push_of(world: &World, (prefix, from, to): (u8, u32, u32), created_ms: u64) {
    let (mut run, payload) = samples::run("r1", prefix, from, to);
    run.created_ms = created_ms;
    let tier = world.other();
    world.time.run(async {
        let mut pusher = Pusher::new(&tier, options());
        pusher.listed(samples::namespace_id("r1"), tier.point(samples::namespace_id("r1")).await.unwrap());
        pusher.add(&samples::namespace("r1"), &run, &payload).await.unwrap();
        pusher.finish().await.unwrap();
    });
}

/// What a manifest knows, and how many blocks of the first prefix are found.
fn known(world: &World) -> (u64, usize) {
    let known = world.time.run(world.other().read_manifest(samples::namespace_id("r1"))).unwrap();
    (known.manifest.generation, world.good(&world.other(), 1, 5))
}

#[test]
fn what_was_put_again_since_a_delete_stays_when_the_delete_is_heard_of_late() {
    let all = [
        Deleted::Keys(keys(1, 5)),
        Deleted::Prefix(samples::key(1, 0)),
        Deleted::Namespace,
        Deleted::Later(keys(1, 5), COLUMN, 1),
    ];
    for deleted in all {
        let world = World::new();
        push_of(&world, (1, 0, 5), world.time.wall_ms());
        let at_ms = world.time.wall_ms();
        assert_eq!(tell(&world, &deleted, When::NowUntil(at_ms)), Ok(1), "{deleted:?}");
        world.time.pass(std::time::Duration::from_secs(60));
        push_of(&world, (1, 0, 5), world.time.wall_ms());
        let before = known(&world);
        assert_eq!(before.1, 5);
        world.time.pass(std::time::Duration::from_secs(60));
        assert_eq!(tell(&world, &deleted, When::Until(at_ms)), Ok(0), "{deleted:?}");
        let after = known(&world);
        assert_eq!(after.1, 5, "{deleted:?}");
        // Of what is known nothing is written again.
        let is_known = matches!(deleted, Deleted::Keys(_) | Deleted::Namespace);
        assert_eq!(after.0 > before.0, !is_known, "{deleted:?}");
        // Nor is that hidden which is put again and was not pushed yet.
        let known = world.time.run(world.other().read_manifest(samples::namespace_id("r1"))).unwrap();
        let fingerprint = wide_fingerprint(&samples::key(1, 0));
        let again = Listed { since: Some(u64::MAX), fingerprint, created_ms: at_ms + 1 };
        assert!(!known.manifest.deletions.hides(again), "{deleted:?}");
    }
}

#[test]
fn of_a_delete_that_no_one_told_what_is_older_goes_and_what_is_younger_stays() {
    let namespace = samples::namespace_id("r1");
    for deleted in [
        Deleted::Keys(keys(1, 5).into_iter().chain(keys(2, 5)).collect()),
        Deleted::Prefix(samples::key(1, 0)),
        Deleted::Namespace,
        Deleted::Later(keys(1, 5).into_iter().chain(keys(2, 5)).collect(), COLUMN, 1),
    ] {
        let world = World::new();
        let at_ms = world.time.wall_ms() + 500;
        push_of(&world, (1, 0, 5), at_ms);
        world.time.pass(std::time::Duration::from_secs(60));
        push_of(&world, (2, 0, 5), at_ms + 1);
        assert_eq!(tell(&world, &deleted, When::Until(at_ms)), Ok(1), "{deleted:?}");
        assert_eq!(left(&world), (0, 5), "{deleted:?}");
        // The manifest has it as it was.
        let known = world.time.run(world.other().read_manifest(namespace)).unwrap();
        let deletions = &known.manifest.deletions;
        let last = deletions.keys.values().map(|delete| delete.at_ms).max().unwrap_or(0);
        let expected = if matches!(deleted, Deleted::Later(..)) { 0 } else { at_ms };
        assert_eq!(last.max(deletions.made_after_ms), expected, "{deleted:?}");
    }
}

#[test]
fn of_a_namespace_whose_delete_is_heard_of_late_everything_goes_where_there_is_too_much_to_look_at() {
    let world = World::new();
    let now_ms = world.time.wall_ms();
    claim(&world, 1025, |entry| entry.added_ms = now_ms);
    assert_eq!(tell(&world, &Deleted::Namespace, When::Until(now_ms - 60_000)), Ok(1025));
    // What was added before has nothing that is younger, and is not looked at.
    let world = World::new();
    claim(&world, 1025, |entry| entry.added_ms = now_ms - 10_000);
    push_of(&world, (7, 0, 5), now_ms + 1);
    let before = world.faulty.asked(Op::Get);
    assert_eq!(tell(&world, &Deleted::Namespace, When::Until(now_ms)), Ok(1025));
    assert_eq!(world.faulty.asked(Op::Get) - before, 3, "the manifest, one index, and the manifest again");
    assert_eq!(world.good(&world.other(), 7, 5), 5);
}

#[test]
fn what_descends_from_a_deleted_block_goes_with_it_over_packs() {
    let world = World::new();
    world.push(&[(1, 0, 12)]).unwrap();
    world.push(&[(2, 0, 5)]).unwrap();
    let before = left(&world);
    assert_eq!(before, (12, 5));
    delete(&world, &Deleted::Prefix(samples::key(1, 6))).unwrap();
    let (first, second) = left(&world);
    assert!(first <= 5, "{first} blocks are left, and 6 to 11 were to go");
    assert_eq!(second, 5, "another prefix stays");
}

#[test]
fn where_the_bucket_fails_nothing_is_said_to_be_done() {
    let world = World::new();
    world.push(&[(1, 0, 5)]).unwrap();
    world.faulty.all(Some(Kind::Outage));
    assert!(delete(&world, &Deleted::Namespace).is_err());
    world.faulty.all(None);
    // The manifest is read, and its change is not known to have happened.
    world.faulty.next(Op::Swap, &[Some(Kind::Lost); 4]);
    let unknown = delete(&world, &Deleted::Namespace);
    assert!(unknown.is_err() || left(&world).0 == 0, "{unknown:?}");
    delete(&world, &Deleted::Namespace).unwrap();
    assert_eq!(left(&world).0, 0);
}

#[test]
fn a_pack_whose_index_is_gone_counts_as_one_that_has_it() {
    let world = World::new();
    world.push(&[(1, 0, 5)]).unwrap();
    let names = world.memory.names();
    let index = names.iter().find(|name| name.contains("/indexes/")).unwrap();
    world.memory.take(index);
    assert_eq!(delete(&world, &Deleted::Keys(vec![samples::key(1, 0)])), Ok(1));
}

#[test]
fn a_pusher_that_was_told_names_nothing_even_if_it_looked_before() {
    let world = World::new();
    let told = AtomicBool::new(false);
    let namespace = samples::namespace_id("r1");
    let (pusher, deleter) = (world.other(), world.other());
    let mut pushing =
        Pusher::new(&pusher, options()).guarded(|of, _| of != namespace || !told.load(Ordering::SeqCst));
    let (run, payload) = samples::run("r1", 1, 0, 4);
    world.time.run(pushing.add(&samples::namespace("r1"), &run, &payload)).unwrap();
    told.store(true, Ordering::SeqCst);
    assert_eq!(
        world.time.run(withdraw(&deleter, namespace, std::slice::from_ref(&Deleted::Namespace))),
        Ok(0)
    );
    assert_eq!(world.time.run(pushing.flush()), Err(ColdError::Withdrawn));
    assert_eq!(left(&world).0, 0);
}

#[test]
fn of_a_delete_and_a_push_that_cross_the_pushed_blocks_are_gone() {
    // The pusher asks whether it may, then the delete runs to its end, then the pusher's change arrives: it meets another manifest.
    let world = World::new();
    let told = AtomicBool::new(false);
    let namespace = samples::namespace_id("r1");
    let pusher = world.other();
    let crossed = AtomicBool::new(false);
    let may_name = |_, _: &[BlockKey]| {
        let may = !told.load(Ordering::SeqCst);
        if may && !crossed.swap(true, Ordering::SeqCst) {
            told.store(true, Ordering::SeqCst);
            // Another bucket client, in the middle of the pusher's change.
            let manifest = crate::format::names::manifest(namespace);
            let mut changed = crate::format::Manifest::empty(namespace);
            changed.generation = 1;
            world.memory.set(&manifest, changed.encode().unwrap());
        }
        may
    };
    let mut pushing = Pusher::new(&pusher, options()).guarded(may_name);
    let (run, payload) = samples::run("r1", 1, 0, 4);
    world.time.run(pushing.add(&samples::namespace("r1"), &run, &payload)).unwrap();
    assert_eq!(world.time.run(pushing.flush()), Err(ColdError::Withdrawn));
    assert_eq!(left(&world).0, 0);
}

#[test]
fn manifests_in_memory_are_bounded_by_bytes() {
    let world = World::new();
    world.push(&[(1, 0, 5)]).unwrap();
    let options = crate::tier::TierOptions { manifest_memory: 1, ..crate::tier::TierOptions::default() };
    let access = crate::access::Access::new(
        std::sync::Arc::clone(&world.faulty) as std::sync::Arc<dyn crate::Bucket>,
        std::sync::Arc::new(world.time.clone()),
        limits(),
        5,
    );
    let tier = crate::Tier::new(access, options);
    let (first, second) = (samples::namespace_id("r1"), samples::namespace_id("r2"));
    world.time.run(tier.read_manifest(first)).unwrap();
    assert!(tier.remembered(first).is_some_and(|known| known.memory_bytes() > 100));
    world.time.run(tier.read_manifest(second)).unwrap();
    assert!(tier.remembered(first).is_none() && tier.remembered(second).is_some());
}

/// A manifest that has these packs besides, of which nothing lies in the bucket.
fn claim(world: &World, packs: u32, change: impl Fn(&mut PackEntry)) {
    let claimed = world.tier.change(samples::namespace_id("r1"), |manifest| {
        for pack in 0..packs {
            let mut id = [0x33; 32];
            id[..4].copy_from_slice(&pack.to_be_bytes());
            let mut entry = samples::pack().entry;
            change(&mut entry);
            manifest.packs.insert(PackId(id), entry);
        }
        Ok(Some(()))
    });
    world.time.run(claimed).unwrap();
}

/// Packs that count.
fn packs(world: &World) -> usize {
    let known = world.time.run(world.other().read_manifest(samples::namespace_id("r1")));
    known.unwrap().manifest.packs.len()
}

#[test]
fn the_delete_of_a_prefix_leaves_others_also_where_there_are_many_packs() {
    let world = World::new();
    world.push(&[(1, 0, 500)]).unwrap();
    world.push(&[(2, 0, 5)]).unwrap();
    assert_eq!(delete(&world, &Deleted::Prefix(samples::key(2, 0))), Ok(1));
    assert_eq!(delete(&world, &Deleted::Prefix(samples::key(3, 0))), Ok(0), "nothing of it was ever there");
    assert_eq!(packs(&world), 100);
    assert_eq!(delete(&world, &Deleted::Prefix(samples::key(1, 250))), Ok(50));
    assert_eq!((packs(&world), world.good(&world.other(), 1, 250)), (50, 250));
}

#[test]
fn what_may_descend_goes_and_what_certainly_does_not_stays() {
    let world = World::new();
    for blocks in [(1, 0, 5), (1, 5, 10), (1, 10, 15), (2, 0, 5)] {
        world.push(&[blocks]).unwrap();
    }
    // Of prefix 1 the blocks 5 to 9 are not in the bucket any more: to what 10 to 14 belong is not known.
    assert_eq!(delete(&world, &Deleted::Keys(vec![samples::key(1, 7)])), Ok(1));
    assert_eq!(delete(&world, &Deleted::Prefix(samples::key(9, 0))), Ok(1));
    assert_eq!((world.good(&world.other(), 1, 15), world.good(&world.other(), 2, 5)), (5, 5));
}

#[test]
fn of_a_prefix_everything_goes_where_there_is_too_much_to_follow() {
    for (packs, index_bytes) in [(1025, 400), (2, 17 << 20)] {
        let world = World::new();
        claim(&world, packs, |entry| entry.index_bytes = index_bytes);
        let before = world.faulty.asked(Op::Get);
        assert_eq!(delete(&world, &Deleted::Prefix(samples::key(2, 0))), Ok(u64::from(packs)));
        assert_eq!(world.faulty.asked(Op::Get) - before, 2, "the manifest, and no index");
    }
}

#[test]
fn indexes_are_read_several_at_once_for_a_delete() {
    let world = World::new();
    world.push(&[(1, 0, 160)]).unwrap();
    let keys = keys(1, 160);
    for deleted in [Deleted::Prefix(samples::key(8, 0)), Deleted::Keys(keys)] {
        world.faulty.all(Some(Kind::Slow(std::time::Duration::from_secs(1))));
        let before = world.time.now();
        delete(&world, &deleted).unwrap();
        let took = world.time.now() - before;
        world.faulty.all(None);
        // 32 indexes, eight at once; manifest, its reading again, and its change.
        assert!(took.as_secs() <= 7, "{took:?}");
    }
}

#[test]
fn where_too_many_packs_wait_for_their_deletion_a_delete_says_so() {
    let world = World::new();
    world.push(&[(1, 0, 5)]).unwrap();
    let namespace = samples::namespace_id("r1");
    let waiting = world.tier.change(namespace, |manifest| {
        for pack in 0..CONDEMNED_MAX as u32 {
            let mut id = [0x44; 32];
            id[..4].copy_from_slice(&pack.to_be_bytes());
            manifest.condemned.insert(PackId(id), 1);
        }
        Ok(Some(()))
    });
    world.time.run(waiting).unwrap();
    assert_eq!(delete(&world, &Deleted::Namespace), Err(ColdError::Waiting(namespace)));
    assert_eq!(delete(&world, &Deleted::Keys(vec![samples::key(7, 0)])), Ok(0));
}
