//! What a member of a cluster does with the bucket when it hears of what another node was asked: at once, or late.
#![allow(clippy::disallowed_methods, reason = "real stores on real directories, real time")]

use std::sync::Arc;
use std::time::Duration;

use crate::cold_blocks::world::{PATIENCE, World};
use crate::cold_blocks::{GROUP, Model, WHOLE, key};
use kvarts_bucket::time::TokioTime;
use kvarts_cluster::deletes::{Entry, What};
use kvarts_cold::testing::{Kind, Op, Plan};
use kvarts_cold::withdraw::{Deleted, withdraw};
use kvarts_cold::{Access, Bucket, Limits, Tier, TierOptions, Time};
use kvarts_contract::api::Order;
use kvarts_layout::BlockKey;
use kvarts_peer::node::Beside;
use kvarts_server::cold::ColdTier;

const ALL: [u64; 6] = [0, 1, 2, 3, 4, 5];
const HOUR_MS: u64 = 3_600_000;

/// A bucket with six blocks, which the node knows of.
fn world() -> World {
    let world = World::new("cold-members", 4096, 6);
    world.until("the manifest is known", || world.cold.known(world.namespace).is_some());
    world
}

/// When the blocks of the bucket were produced.
fn created_ms() -> u64 {
    Model::new(4096).run(0..1).0.created_ms
}

/// The node carries out what another one was asked.
fn carry_out(world: &World, below_ms: u64, what: What) {
    let entry = Entry { namespace: world.namespace, below_ms, what };
    world.runtime.block_on(async {
        let cold: &ColdTier = &world.cold;
        cold.carrying(&entry).await.done().await;
    });
}

fn keys(blocks: &[u64]) -> Vec<BlockKey> {
    blocks.iter().map(|block| key(*block)).collect()
}

fn sooner(blocks: &[u64]) -> What {
    What::Sooner((GROUP, WHOLE), keys(blocks), TokioTime::start().wall_ms() + HOUR_MS)
}

/// The tier as another node has it.
fn elsewhere(world: &World) -> Tier {
    let bucket = Arc::clone(&world.gate) as Arc<dyn Bucket>;
    Tier::new(Access::new(bucket, Arc::new(TokioTime::start()), Limits::default(), 3), TierOptions::default())
}

fn all_are_there(world: &World) -> bool {
    let known = world.runtime.block_on(elsewhere(world).read_manifest(world.namespace)).unwrap();
    keys(&ALL).iter().all(|key| known.may_have(key))
}

#[test]
fn what_was_put_again_since_a_delete_stays_in_the_bucket_when_a_member_hears_of_it_late() {
    for what in [What::Keys(None, keys(&ALL)), What::Everything] {
        let world = world();
        carry_out(&world, created_ms(), what.clone());
        assert_eq!(world.count("withdrawn_packs"), 0, "{what:?}");
        assert!(all_are_there(&world), "{what:?}");
        assert_eq!(world.read(&ALL, Order::Blocks).0.len(), 6, "{what:?}");
        // What is older than a delete goes.
        let again = World::new("cold-members-again", 4096, 6);
        carry_out(&again, created_ms() + 1, what.clone());
        assert_eq!(again.count("withdrawn_packs"), 1, "{what:?}");
        assert!(!all_are_there(&again) && again.read(&ALL, Order::Blocks).0.is_empty(), "{what:?}");
    }
}

#[test]
fn a_shorter_time_to_live_of_another_node_is_known_before_more_is_brought() {
    let world = world();
    // Another node was asked, and has told the bucket; the manifest that this one knows is older.
    let deleted = Deleted::Later(keys(&[2]), (GROUP, WHOLE), TokioTime::start().wall_ms() + HOUR_MS);
    let (other, deleted) = (elsewhere(&world), [deleted]);
    assert_eq!(world.runtime.block_on(withdraw(&other, world.namespace, &deleted)), Ok(1));
    carry_out(&world, TokioTime::start().wall_ms(), sooner(&[2]));
    assert!(world.read(&ALL, Order::Blocks).0.is_empty(), "brought with the longer time");
    assert_eq!(world.count("delete_failures"), 0);
}

#[test]
fn what_a_member_had_copied_before_it_heard_of_a_shorter_time_to_live_goes() {
    let world = world();
    carry_out(&world, TokioTime::start().wall_ms(), sooner(&[2]));
    assert_eq!(world.count("withdrawn_packs"), 1);
    assert!(!all_are_there(&world) && world.read(&ALL, Order::Blocks).0.is_empty());
}

#[test]
fn a_bucket_that_could_not_be_told_of_a_shorter_time_to_live_is_told_when_it_answers() {
    let world = world();
    world.faulty.next(Op::Swap, &[Some(Kind::Denied); 4]);
    carry_out(&world, TokioTime::start().wall_ms(), sooner(&[2]));
    assert!(world.count("delete_failures") > 0);
    world.faulty.plan(Plan::default());
    let begun = std::time::Instant::now();
    while all_are_there(&world) {
        assert!(begun.elapsed() < PATIENCE, "the bucket was never told");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(world.read(&ALL, Order::Blocks).0.is_empty());
}
