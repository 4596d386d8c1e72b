//! The bucket as a path of reads: what a reader gets before everything has come, what is asked of the bucket and how much at once, and
//! that no fault of the bucket makes a wrong byte.
#![allow(clippy::disallowed_methods, reason = "real stores on real directories, real time")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cold_blocks::world::{PATIENCE, Setting, World};
use crate::cold_blocks::{GROUP, Model, WHOLE, content, key};
use kvarts_bucket::time::TokioTime;
use kvarts_cold::promote::{Wanted, restore_into};
use kvarts_cold::restore::FetchOptions;
use kvarts_cold::testing::{Faulty, Kind, MemoryBucket, Op, Plan};
use kvarts_cold::{Access, Limits, PushOptions, Pusher, Tier, TierOptions};
use kvarts_contract::api::{
    BlockOutcome, Durability, Order, Presence, PutReply, ReadEvent, ReadStream, Target,
};
use kvarts_server::cold::ColdConfig;
use kvarts_tests::scripted::Scripted;
use tokio::runtime::Runtime;

/// The next event of a read that others may keep waiting.
fn next(world: &World, stream: &ReadStream) -> ReadEvent {
    let mut event = None;
    world.until("an event", || {
        event = stream.try_next();
        event.is_some()
    });
    event.unwrap()
}

#[test]
fn a_reader_has_the_first_layers_while_the_last_ones_are_not_sent_yet() {
    let world = World::new("cold-path-layers", 512 << 10, 6);
    // Two layers of each block are one range; the other two are another one.
    world.gate.let_pass(Some(6));
    let (stream, memory) = world.begin(&world.keys, Order::Layers);
    for layer in 0..2 {
        assert_eq!(next(&world, &stream), ReadEvent::Layer { layer, blocks: 6 });
    }
    let each = world.shape.block_bytes() as usize;
    let bytes = memory.to_vec();
    for (block, own) in (0u64..).zip(bytes.chunks(each)) {
        assert!(own[..each / 2] == content(block, each as u64)[..each / 2], "block {block}");
    }
    assert!(stream.try_next().is_none() && world.here() == 0, "nothing else has come");
    world.gate.let_pass(None);
    for layer in 2..4 {
        assert_eq!(next(&world, &stream), ReadEvent::Layer { layer, blocks: 6 });
    }
    let ReadEvent::End(end) = next(&world, &stream) else { panic!("more than the end") };
    assert_eq!((end.usable_blocks, end.failures.len()), (6, 0));
    let expected: Vec<u8> = (0..6).flat_map(|block| content(block, each as u64)).collect();
    assert!(memory.to_vec() == expected);
    world.until("all blocks are stored", || world.here() == 6);
    assert_eq!((world.count("restored_blocks"), world.count("over_read_bytes")), (6, 0));
    assert!(world.count("given_bytes") > 0);
    // From here on the bucket is not needed.
    world.faulty.all(Some(Kind::Outage));
    assert_eq!(world.read(&[0, 1, 2, 3, 4, 5], Order::Layers).0.len(), 6);
}

#[test]
fn a_reader_of_blocks_has_the_first_ones_before_the_last_are_sent() {
    let world = World::new("cold-path-blocks", 256 << 10, 8);
    world.gate.let_pass(Some(2));
    let (stream, _memory) = world.begin(&world.keys, Order::Blocks);
    // Ranges of 2 MiB, since the restore is short: two blocks each.
    for block in 0..4 {
        assert_eq!(next(&world, &stream), ReadEvent::Block(block));
    }
    let passes = world.gate.state.lock().unwrap().passes;
    assert_eq!(passes, Some(0), "both ranges were needed");
    assert!(stream.try_next().is_none());
    world.gate.let_pass(None);
    for block in 4..8 {
        assert_eq!(next(&world, &stream), ReadEvent::Block(block));
    }
}

#[test]
fn no_more_ranges_are_under_way_than_memory_and_turns_allow() {
    // Restores of 32 MiB, which are four first layers, and the others wait for one of these: memory for two restores, and for more than
    // sixteen ranges, which is the bound of a tier.
    for (memory, least) in [(64 << 20, 8), (256 << 20, 16)] {
        let config = ColdConfig { memory, ..Setting::default().config };
        let setting = Setting { layer_bytes: 2 << 20, blocks: 32, config, ..Setting::default() };
        let world = World::with("cold-path-bound", setting);
        world.gate.let_pass(Some(0));
        let (stream, _memory) = world.begin(&world.keys, Order::Layers);
        let now = || world.gate.state.lock().unwrap().now;
        // And one request in ten a second time.
        world.until("ranges are under way", || now() >= least && world.cold.counted().total.hedges >= 1);
        std::thread::sleep(Duration::from_millis(100));
        let hedges = world.cold.counted().total.hedges;
        assert!(now() <= least + hedges && hedges <= 3, "{} ranges, {hedges} twice", now());
        assert_eq!(world.cold.counted().under_way, 32, "what waits is known");
        world.gate.let_pass(None);
        assert_eq!(stream.wait_end().unwrap().usable_blocks, 32);
        let hedges = world.cold.counted().total.hedges;
        assert!(world.gate.state.lock().unwrap().most <= 16 + hedges);
        assert_eq!(world.count("refused_blocks"), 0);
    }
}

#[test]
fn ranges_go_on_while_puts_wait() {
    // With ranges that are shorter than the least that is put at once as well.
    for range_bytes in [8 << 20, 2 << 20] {
        ranges_go_on(&FetchOptions { range_bytes, ..FetchOptions::default() });
    }
}

fn ranges_go_on(options: &FetchOptions) {
    let (model, blocks) = (Model::new(256 << 10), 48);
    let runtime = Runtime::new().unwrap();
    let clock: Arc<dyn kvarts_cold::Time> = Arc::new(TokioTime::start());
    let faulty = Faulty::new(MemoryBucket::new(Arc::clone(&clock)) as _, Arc::clone(&clock), 7);
    let access = Access::new(Arc::clone(&faulty) as _, clock, Limits::default(), 1);
    let tier = Arc::new(Tier::new(access, TierOptions::default()));
    let (run, payload) = model.run(0..blocks);
    runtime.block_on(async {
        let mut pusher = Pusher::new(&tier, PushOptions::default());
        pusher.add(&model.exported(), &run, &payload).await.unwrap();
        pusher.finish().await.unwrap();
    });
    let store = Arc::new(Scripted::default());
    *store.namespace.lock().unwrap() = Some(model.namespace);
    *store.presence.lock().unwrap() = vec![Presence::Absent; blocks as usize];
    let wanted = Wanted {
        namespace: model.namespace,
        group: GROUP,
        coordinate: WHOLE,
        keys: (0..blocks).map(key).collect(),
        durability: Durability::Relaxed,
    };
    let restoring = {
        let (tier, store, options) = (Arc::clone(&tier), Arc::clone(&store), options.clone());
        runtime.spawn(async move { restore_into(&tier, &*store, &wanted, &options).await.unwrap() })
    };
    // No put has an answer, and everything comes: the first 8 MiB are stored at once, then puts of 16 MiB gather while they are. They
    // hold what was put and nothing else.
    let begun = Instant::now();
    let sizes = || -> Vec<usize> {
        store.puts.lock().unwrap().iter().map(|(request, _)| request.keys.len()).collect()
    };
    while sizes().iter().sum::<usize>() < blocks as usize {
        assert!(begun.elapsed() < PATIENCE, "{:?}", sizes());
        std::thread::sleep(Duration::from_millis(2));
    }
    // The first pack has 32 blocks, and a put is of one pack.
    assert_eq!(sizes(), [8, 16, 8, 16]);
    let mut found = Vec::new();
    for (request, reply) in store.puts.lock().unwrap().drain(..) {
        let each = model.shape.block_bytes() as usize;
        for (at, one) in (0u32..).zip(&request.keys) {
            let chunks = (0..model.shape.chunk_count()).map(|chunk| {
                let place = request.from.chunk(chunk, at, each as u64 / 4).unwrap();
                place.to_vec()
            });
            found.push((*one, chunks.flatten().collect::<Vec<u8>>()));
        }
        let outcomes = vec![BlockOutcome::Stored; request.keys.len()];
        reply.send(Ok(PutReply { outcomes })).unwrap();
    }
    let restored = runtime.block_on(restoring).unwrap();
    assert_eq!((restored.stored, restored.refused, restored.lost), (blocks, 0, 0));
    assert_eq!(found.len() as u64, blocks);
    for (block, (own, bytes)) in (0u64..).zip(found) {
        assert!(own == key(block) && bytes == content(block, model.shape.block_bytes()), "block {block}");
    }
}

#[test]
fn what_is_read_beside_what_is_wanted_is_counted_and_at_most_an_eighth() {
    let world = World::new("cold-path-over-read", 8 << 10, 45);
    // A hole behind every eight blocks: it is read with them, and is an eighth of them.
    let wanted: Vec<u64> = (0..45).filter(|block| block % 9 != 8).collect();
    let (good, _) = world.read(&wanted, Order::Blocks);
    assert_eq!(good.len(), 40);
    let each = world.shape.block_bytes();
    world.until("the restore has ended", || world.cold.counted().under_way == 0);
    assert_eq!(world.count("over_read_bytes"), 4 * each);
    assert_eq!(world.gate.state.lock().unwrap().bytes, 44 * each);
    // Every other block: nothing is read beside them.
    let world = World::new("cold-path-no-over-read", 8 << 10, 40);
    let wanted: Vec<u64> = (0..40).step_by(2).collect();
    assert_eq!(world.read(&wanted, Order::Blocks).0.len(), 20);
    world.until("the restore has ended", || world.cold.counted().under_way == 0);
    let bytes = world.gate.state.lock().unwrap().bytes;
    assert_eq!((world.count("over_read_bytes"), bytes), (0, 20 * each));
}

#[test]
fn a_read_does_not_wait_for_a_range_that_does_not_come() {
    for order in [Order::Layers, Order::Blocks] {
        let world = World::new("cold-path-hedged", 512 << 10, 6);
        // The first one is never answered.
        world.faulty.next(Op::Range, &[Some(Kind::Silent)]);
        assert_eq!(world.read(&[0, 1, 2, 3, 4, 5], order).0.len(), 6);
        assert_eq!(world.cold.counted().total.hedges, 1, "{order:?}");
        assert_eq!(world.count("lost_blocks"), 0);
    }
}

#[test]
fn no_fault_of_a_range_makes_a_wrong_byte() {
    let passing = [
        Kind::Outage,
        Kind::Lost,
        Kind::Busy(None),
        Kind::Slow(Duration::from_millis(300)),
        Kind::Truncated,
        Kind::Longer,
        Kind::Altered,
    ];
    for order in [Order::Layers, Order::Blocks] {
        for kind in passing {
            let world = World::new("cold-path-once", 512 << 10, 6);
            // The bucket answers at once, so that a range that is asked for again is the next one.
            world.faulty.next(Op::Range, &[None, Some(kind), None, Some(kind)]);
            assert_eq!(world.read(&[0, 1, 2, 3, 4, 5], order).0.len(), 6, "{kind:?} once");
        }
        for kind in [Kind::Altered, Kind::Truncated, Kind::Missing, Kind::Denied] {
            let world = World::new("cold-path-for-ever", 512 << 10, 6);
            let kinds = [vec![None], vec![Some(kind); 100]].concat();
            world.faulty.next(Op::Range, &kinds);
            let (good, end) = world.read(&[0, 1, 2, 3, 4, 5], order);
            assert!(good.len() < 6 && !end.failures.is_empty(), "{kind:?} for ever: {good:?}");
            // What failed is not asked for again at once, and what came well is served.
            world.faulty.plan(Plan::default());
            let asked = world.faulty.asked(Op::Range);
            let (again, _) = world.read(&[0, 1, 2, 3, 4, 5], order);
            assert!(again.len() < 6 && world.faulty.asked(Op::Range) == asked, "{kind:?}");
        }
    }
}

#[test]
fn what_the_store_does_not_take_is_given_to_the_read_that_waits_for_it() {
    for order in [Order::Layers, Order::Blocks] {
        // No block fits into a segment.
        let world =
            World::with("cold-path-refused", Setting { segment_bytes: 1 << 20, ..Setting::default() });
        assert_eq!(world.read(&[0, 1, 2, 3, 4, 5], order).0.len(), 6, "{order:?}");
        world.until("the restore has ended", || world.cold.counted().under_way == 0);
        assert_eq!((world.here(), world.count("lost_blocks")), (0, 6));
        let given = world.count("given_bytes");
        assert_eq!(given, 6 * world.shape.block_bytes());
    }
}

#[test]
fn what_is_deleted_while_it_is_on_its_way_ends_a_read_and_stays_away() {
    let world = World::new("cold-path-deleted", 512 << 10, 6);
    world.gate.let_pass(Some(2));
    let (stream, _memory) = world.begin(&world.keys, Order::Layers);
    world.until("some of it has come", || world.gate.state.lock().unwrap().passes == Some(0));
    world.runtime.block_on(async {
        let mut deleting = world.cold.delete(world.namespace, &Target::Namespace).await;
        deleting.tell(PATIENCE).await;
        deleting.told().unwrap();
    });
    world.gate.let_pass(None);
    let end = stream.wait_end().unwrap();
    assert!(end.usable_blocks < 6 && !end.failures.is_empty(), "{end:?}");
    assert_eq!((world.here(), world.cold.counted().under_way), (0, 0));
    assert!(world.read(&[0, 1, 2, 3, 4, 5], Order::Blocks).0.is_empty());
}

#[test]
fn a_read_that_is_left_or_late_leaves_the_restore_to_others() {
    let world = World::new("cold-path-left", 512 << 10, 6);
    world.gate.let_pass(Some(0));
    let left = world.begin(&world.keys, Order::Layers);
    let (stream, _memory) = world.begin(&world.keys, Order::Blocks);
    drop(left);
    world.gate.let_pass(None);
    assert_eq!(stream.wait_end().unwrap().usable_blocks, 6);
    world.until("all blocks are stored", || world.here() == 6);
    assert_eq!(world.count("restores"), 1, "both had one restore");
}
