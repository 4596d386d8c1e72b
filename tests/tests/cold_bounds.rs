//! What bounds restores: budgets of the day, sizes, times, what is deleted meanwhile; and what is told of them.
#![allow(clippy::disallowed_methods, reason = "real stores on real directories, real time")]

use std::sync::Arc;
use std::time::Duration;

use crate::cold_blocks::world::{PATIENCE, Setting, World};
use crate::cold_blocks::{GROUP, Model, WHOLE, content, key};
use kvarts_bucket::time::TokioTime;
use kvarts_cold::testing::{Kind, Op, Plan};
use kvarts_cold::{Access, Bucket, Limits, PushOptions, Pusher, Tier, TierOptions, Time};
use kvarts_contract::api::{
    DeleteOutcome, DeleteReply, Digests, Order, Origins, Placed, Presence, ReadRequest, Target,
};
use kvarts_contract::buffers::BufMut;
use kvarts_contract::error::Reason;
use kvarts_layout::BlockKey;
use kvarts_server::cold::{ColdConfig, Offer, Wish};

const ALL: [u64; 6] = [0, 1, 2, 3, 4, 5];

fn configured(change: impl Fn(&mut ColdConfig)) -> World {
    let mut setting = Setting::default();
    change(&mut setting.config);
    World::with("cold-bounds", setting)
}

fn wish<'a>(world: &World, keys: &'a [BlockKey]) -> Wish<'a> {
    let block_bytes = world.shape.block_bytes();
    Wish { namespace: world.namespace, group: GROUP, coordinate: WHOLE, keys, block_bytes, by_layers: true }
}

fn brings(world: &World, left: Duration) -> bool {
    let elsewhere = async |_: &[BlockKey]| Vec::new();
    world.runtime.block_on(world.cold.bring(wish(world, &world.keys), left, elsewhere)).is_some()
}

#[test]
fn no_more_is_asked_of_the_bucket_in_a_day_than_is_allowed() {
    let each = Setting::default().layer_bytes * 4;
    // A manifest, an index, and three ranges of two layers of a block.
    let world = configured(|config| config.read = 2 * each);
    let (good, _) = world.read(&ALL, Order::Blocks);
    assert!(good.len() <= 1, "{good:?}");
    let counted = world.cold.counted();
    assert!(counted.today.read_bytes <= 2 * each && counted.total.read_bytes > 0, "{counted:?}");
    let world = configured(|config| config.requests = 3);
    let before = world.faulty.asked_in_all();
    let (good, _) = world.read(&ALL, Order::Layers);
    assert!(good.len() < 6 && world.faulty.asked_in_all() - before <= 3, "{good:?}");
    assert_eq!(world.cold.counted().today.requests, 3);
}

#[test]
fn blocks_that_take_too_much_memory_are_not_brought() {
    let world = World::new("cold-bounds-large", 17 << 20, 1);
    world.until("the manifest is known", || world.cold.known(world.namespace).is_some());
    assert!(!world.cold.may_bring(&wish(&world, &world.keys)));
    assert!(!brings(&world, PATIENCE));
    assert_eq!(world.count("restores"), 0);
}

#[test]
fn a_read_without_time_begins_nothing_and_one_whose_time_ends_is_counted() {
    let world = configured(|_| {});
    assert!(!brings(&world, Duration::ZERO));
    assert_eq!((world.count("restores"), world.cold.counted().under_way), (0, 0));
    world.gate.let_pass(Some(0));
    let deadline = Some(world.store().clock().now().plus(Duration::from_millis(200)));
    let memory = BufMut::zeroed(world.shape.block_bytes() as usize * 6).unwrap().share();
    let into = Placed::blocks(&world.shape, memory, 6).unwrap();
    let request = ReadRequest::new(world.namespace, GROUP, WHOLE, world.keys.clone(), into);
    let request = ReadRequest { order: Order::Blocks, deadline, ..request };
    let stream = world.runtime.block_on(async {
        let coming = world.bring(&world.keys, Order::Blocks, |_| false).await.unwrap();
        world.cold.read(request, &world.shape, Origins::any(6), None, &coming).unwrap()
    });
    let end = stream.wait_end().unwrap();
    assert_eq!((end.usable_blocks, end.failures.len()), (0, 6));
    world.until("late pieces are counted", || world.count("late_pieces") > 0);
}

#[test]
fn a_manifest_that_does_not_come_keeps_no_read_waiting_for_long() {
    let world = configured(|_| {});
    // The request is given up and made again after ten seconds, and succeeds: a read that waits for that would have blocks.
    world.faulty.next(Op::Get, &[Some(Kind::Silent)]);
    assert!(!brings(&world, PATIENCE));
}

#[test]
fn manifests_are_read_again_by_time_and_failures_are_counted() {
    let world = configured(|config| config.refresh = Duration::from_millis(50));
    world.until("the manifest is known", || world.cold.known(world.namespace).is_some());
    let generation = || world.cold.known(world.namespace).unwrap().manifest.generation;
    let before = generation();
    world.push(100..104);
    world.until("what another one pushed is known", || generation() > before);
    world.faulty.all(Some(Kind::Outage));
    world.until("failures are counted", || world.count("manifest_failures") > 0);
    // After some more of them the bucket is left alone, and no look-up is told of it.
    world.until("the bucket is left alone", || {
        // A namespace that is not used is not asked for.
        world.cold.touch(world.namespace);
        !world.cold.is_asked()
    });
    assert!(world.cold.counted().is_paused);
    world.faulty.plan(Plan::default());
}

#[test]
fn nothing_of_a_namespace_is_brought_while_something_of_it_is_deleted() {
    let world = configured(|_| {});
    world.until("the manifest is known", || world.cold.known(world.namespace).is_some());
    // The bucket cannot be told, so that its blocks stay named.
    world.faulty.next(Op::Swap, &[Some(Kind::Denied); 100]);
    let target = Target::Keys { column: None, keys: vec![key(0)] };
    let mut deleting = world.runtime.block_on(world.cold.delete(world.namespace, &target));
    world.runtime.block_on(deleting.tell(PATIENCE));
    assert!(deleting.told().is_err());
    let reply = DeleteReply { outcomes: vec![DeleteOutcome::Deleted], ..DeleteReply::default() };
    let outcomes = deleting.answer(reply).unwrap().outcomes;
    assert!(matches!(outcomes[..], [DeleteOutcome::Refused(Reason::Away(_))]), "{outcomes:?}");
    assert!(!brings(&world, PATIENCE));
    assert_eq!((world.count("restores"), world.count("delete_failures")), (0, 1));
    drop(deleting);
    assert_eq!(world.read(&ALL, Order::Blocks).0.len(), 6, "afterwards it is");
}

#[test]
fn a_delete_in_a_namespace_that_was_not_in_use_reaches_what_others_pushed_meanwhile() {
    let world = configured(|config| config.refresh = Duration::from_millis(50));
    world.until("the manifest is known", || world.cold.known(world.namespace).is_some());
    let reads = || world.faulty.asked(Op::Get);
    let mut before = 0;
    world.until("it is not read again any more", || {
        std::thread::sleep(Duration::from_millis(300));
        std::mem::replace(&mut before, reads()) == reads()
    });
    world.push(100..104);
    let target = Target::Keys { column: None, keys: vec![key(100)] };
    let mut deleting = world.runtime.block_on(world.cold.delete(world.namespace, &target));
    world.runtime.block_on(deleting.tell(PATIENCE));
    deleting.told().unwrap();
    drop(deleting);
    assert_eq!(world.count("withdrawn_packs"), 1);
    assert!(world.read(&[100], Order::Blocks).0.is_empty(), "it came back");
}

#[test]
fn what_was_brought_is_given_to_no_read_after_its_time() {
    let world = configured(|config| config.refresh = Duration::from_millis(50));
    let clock = TokioTime::start();
    let expires_ms = clock.wall_ms() + 1500;
    let model = Model::new(world.shape.block_bytes() / 4);
    let (mut run, payload) = model.run(100..104);
    run.expires_ms = expires_ms;
    let bucket = Arc::clone(&world.gate) as Arc<dyn Bucket>;
    let access = Access::new(bucket, Arc::new(TokioTime::start()), Limits::default(), 2);
    let tier = Tier::new(access, TierOptions::default());
    world.runtime.block_on(async {
        let mut pusher = Pusher::new(&tier, PushOptions::default());
        pusher.add(&model.exported(), &run, &payload).await.unwrap();
        pusher.finish().await.unwrap();
    });
    world.until("the manifest is known", || {
        world.cold.known(world.namespace).is_some_and(|known| known.may_have(&key(100)))
    });
    let come = || world.read(&[100, 101, 102, 103], Order::Blocks).0.len();
    let (first, was_in_time) = (come(), clock.wall_ms() < expires_ms);
    assert!(first == 4 || !was_in_time, "{first}");
    // The store expires blocks in steps of a tenth of a second; what was brought is kept in memory for five.
    while clock.wall_ms() <= expires_ms + 500 {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!((come(), come(), come()), (0, 0, 0));
}

#[test]
fn a_delete_waits_for_a_bucket_that_stands_still_as_long_as_it_may() {
    let world = configured(|_| {});
    world.until("the manifest is known", || world.cold.known(world.namespace).is_some());
    world.faulty.all(Some(Kind::Silent));
    let left = Duration::from_millis(200);
    let mut deleting = world.runtime.block_on(world.cold.delete(world.namespace, &Target::Namespace));
    world.runtime.block_on(deleting.tell(left));
    let told = deleting.told().unwrap_err().to_string();
    assert!(told.contains("the bucket has not responded within 0.2 s"), "{told}");
    drop(deleting);
    world.faulty.plan(Plan::default());
}

#[test]
fn copies_that_would_outlive_a_shorter_time_are_taken_out() {
    let world = configured(|_| {});
    world.until("the manifest is known", || world.cold.known(world.namespace).is_some());
    let hour = Duration::from_secs(3600);
    let shorten = |keys: &[BlockKey]| {
        world.runtime.block_on(async {
            let column = (GROUP, WHOLE);
            let mut shortening = world.cold.shorten(world.namespace, column, keys, hour).await;
            shortening.tell(PATIENCE).await;
            shortening.told().unwrap();
        });
    };
    shorten(&[key(500)]);
    assert_eq!(world.count("withdrawn_packs"), 0, "nothing of it is there");
    shorten(&[key(2)]);
    assert_eq!(world.count("withdrawn_packs"), 1);
    assert!(world.read(&ALL, Order::Blocks).0.is_empty(), "the copies never expire");
}

#[test]
fn no_more_blocks_are_under_way_than_may_wait() {
    // Of four chunks of a word each.
    let world = World::new("cold-bounds-many", 16, 70_000);
    world.gate.let_pass(Some(0));
    let waiting = world.keys.chunks(40_000).map(|keys| {
        let coming = world.runtime.block_on(world.bring(keys, Order::Blocks, |_| false));
        assert!(coming.is_some());
        (coming, world.cold.counted().under_way)
    });
    let waiting: Vec<_> = waiting.collect();
    assert_eq!([waiting[0].1, waiting[1].1], [40_000, 65_536]);
    assert_eq!(world.count("refused_blocks"), 70_000 - 65_536);
}

#[test]
fn a_restore_whose_readers_have_left_before_its_turn_is_dropped_and_the_others_come() {
    let mut setting = Setting { blocks: 12, ..Setting::default() };
    // For one of three restores.
    setting.config.memory = 4 * Model::new(setting.layer_bytes).shape.block_bytes();
    let world = World::with("cold-bounds-left", setting);
    world.until("the manifest is known", || world.cold.known(world.namespace).is_some());
    world.gate.let_pass(Some(0));
    let bring = |keys: std::ops::Range<usize>| {
        world.runtime.block_on(world.bring(&world.keys[keys], Order::Blocks, |_| false))
    };
    let under_way = || world.cold.counted().under_way;
    let first = bring(0..4);
    world.until("the first one has its turn", || world.gate.state.lock().unwrap().now > 0);
    let (second, third) = (bring(4..8), bring(8..12));
    assert!(first.is_some() && second.is_some() && third.is_some());
    // Another read of the second one, so that it has a reader when the first of them leaves.
    let again = bring(4..8);
    drop(second);
    assert_eq!((under_way(), world.count("abandoned_blocks")), (12, 0));
    drop((again, third));
    assert_eq!((under_way(), world.count("abandoned_blocks")), (4, 8));
    // One whose turn has come goes on without readers: its bytes are on their way.
    drop(first);
    assert_eq!(under_way(), 4);
    // What was dropped did not fail: who wants it has it.
    let back = bring(8..12);
    assert_eq!(under_way(), 8);
    world.gate.let_pass(None);
    let all = world.read(&(0..12).collect::<Vec<u64>>(), Order::Blocks);
    assert_eq!(all.0.len(), 12);
    drop(back);
}

/// Blocks that are offered to a look-up of all of them.
fn offered(world: &World, left: Duration) -> u64 {
    let presence = vec![Presence::Absent; world.keys.len()];
    let offered = world.cold.offered(&wish(world, &world.keys), &presence, 16, left);
    offered.unwrap_or_default().into_iter().filter(|one| *one).count() as u64
}

#[test]
fn no_more_is_offered_than_comes_in_time_and_than_may_be_read_today() {
    let offering = |read: u64| {
        let mut setting = Setting { blocks: 24, ..Setting::default() };
        (setting.config.offer, setting.config.read) = (Offer::InTime, read);
        let world = World::with("cold-bounds-offer", setting);
        world.until("the manifest is known", || world.cold.known(world.namespace).is_some());
        world
    };
    let world = offering(u64::MAX);
    let each = world.shape.block_bytes();
    assert_eq!(offered(&world, PATIENCE), 24, "it is not known how long it takes");
    // Both blocks are one range, which takes so long at least.
    world.faulty.next(Op::Range, &[Some(Kind::Slow(Duration::from_millis(400))); 8]);
    assert_eq!(world.read(&[0, 1], Order::Blocks).0.len(), 2);
    world.until("it was measured", || world.cold.takes(each).is_some());
    let in_time = offered(&world, PATIENCE);
    assert!(in_time * each <= 10 << 20, "{in_time} blocks in a second");
    assert!(world.cold.takes(each).unwrap() > Duration::from_millis(100));
    assert_eq!(offered(&world, Duration::from_millis(100)), 0);
    let world = offering(5 * each);
    assert_eq!(offered(&world, PATIENCE), 4, "a manifest was read");
}

#[test]
fn one_short_restore_does_not_end_what_is_offered_and_what_is_under_way_is_not_offered_twice() {
    let mut setting = Setting { blocks: 24, ..Setting::default() };
    setting.config.offer = Offer::SoonerThan(50_000);
    let world = World::with("cold-bounds-short", setting);
    world.until("the manifest is known", || world.cold.known(world.namespace).is_some());
    world.faulty.next(Op::Range, &[Some(Kind::Slow(Duration::from_millis(100))); 1]);
    assert_eq!(world.read(&[0], Order::Blocks).0.len(), 1);
    world.until("it was measured", || world.cold.takes(1).is_some());
    assert!(offered(&world, PATIENCE) > 0, "a block that took 100 ms does not say what the way can do");
    // What waits is in front of what is offered.
    let before = offered(&world, PATIENCE);
    world.gate.let_pass(Some(0));
    let coming = world.runtime.block_on(world.bring(&world.keys[1..], Order::Blocks, |_| false));
    assert!(coming.is_some() && offered(&world, PATIENCE) < before.max(1));
}

#[test]
fn bytes_of_the_bucket_come_with_the_digests_of_their_chunks() {
    for order in [Order::Layers, Order::Blocks] {
        let world = configured(|_| {});
        let memory = BufMut::zeroed(world.shape.block_bytes() as usize * 6).unwrap().share();
        let digests = Digests::new(&world.shape, 6);
        let into = Placed::blocks(&world.shape, memory, 6).unwrap().with_digests(digests.clone());
        let request = ReadRequest::new(world.namespace, GROUP, WHOLE, world.keys.clone(), into);
        let request = ReadRequest { order, ..request };
        let stream = world.runtime.block_on(async {
            let coming = world.bring(&world.keys, order, |_| false).await.unwrap();
            world.cold.read(request, &world.shape, Origins::any(6), None, &coming).unwrap()
        });
        assert_eq!(stream.wait_end().unwrap().usable_blocks, 6);
        for block in 0..6u64 {
            let bytes = content(block, world.shape.block_bytes());
            for (chunk, own) in (0u32..).zip(bytes.chunks(bytes.len() / 4)) {
                assert_eq!(digests.get(chunk, block as u32), Some(crc32fast::hash(own)), "{order:?} {block}");
            }
        }
    }
}
