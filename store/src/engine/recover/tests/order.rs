//! Which of two records counts, and which of none.

use kvarts_contract::class::Class;
use kvarts_layout::NamespaceId;
use kvarts_layout::format::body::{Epoch, Tombstone, Tombstones};
use kvarts_layout::format::record::Body;

use super::harness::{Place, key, remove};
use crate::engine::recover::recover;
use crate::engine::volume::checkpoint;

fn tombstone(namespace: u32, number: u64, below: u64) -> Body {
    let entry = Tombstone { below, coordinate: None, namespace, group: Some(0), key: key(number).0 };
    Body::Tombstones(Tombstones { entries: vec![entry] })
}

#[test]
fn of_two_records_of_a_block_the_later_counts() {
    for far in [false, true] {
        let place = Place::new();
        let page = place.run(move |world| async move {
            recover(&world.shard.log).await.unwrap();
            world.durable("a", 0, 2).await;
            if far {
                // Into another segment, and a sealed one behind.
                for number in 100..130 {
                    world.durable("a", number, 2).await;
                }
            }
            let second = world.durable("a", 0, 1).await;
            world.shard.log.settled().await;
            (second.segment.number, (second.offset / 4096) as u32)
        });
        place.run(move |world| async move {
            let report = recover(&world.shard.log).await.unwrap();
            assert_eq!((world.at("a", 0), report.problems), (Some(page), 0));
            assert_ne!(world.at("a", 1), Some(page));
            assert!(report.duplicates >= 1);
            world.contents();
        });
    }
}

#[test]
fn a_record_all_of_whose_blocks_were_written_again_is_not_kept() {
    let place = Place::new();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        world.durable("a", 0, 2).await;
        world.durable("a", 0, 2).await;
    });
    let (report, contents) = place.recovered();
    assert_eq!((report.records, report.blocks, report.duplicates, contents.len()), (1, 2, 2, 2));
}

#[test]
fn what_was_deleted_stays_deleted_and_what_was_put_after_stays() {
    let place = Place::new();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        world.durable("a", 0, 2).await;
        let local = world.namespace("a").local;
        let below = world.shard.volume.sequence.get();
        world.say("a", tombstone(local, 0, below)).await;
        world.say("a", tombstone(local, 7, below)).await;
        world.durable("a", 7, 1).await;
    });
    for round in 0..3 {
        place.run(move |world| async move {
            let report = recover(&world.shard.log).await.unwrap();
            assert!(!world.has("a", 0) && world.has("a", 1) && world.has("a", 7), "{round}");
            assert_eq!(report.deleted, 1);
            world.contents();
            // The second round has the tombstones from the checkpoint too.
            checkpoint::write(&world.shard.volume, Class::Background).await.unwrap();
        });
    }
}

#[test]
fn tombstones_outlive_the_segment_that_held_them_by_the_checkpoint() {
    let place = Place::new();
    let number = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        for number in 0..20 {
            world.durable("a", number, 2).await;
        }
        let below = world.shard.volume.sequence.get();
        let local = world.namespace("a").local;
        while world.shard.log.open_segment().unwrap().tail.borrow().entries.len() > 4 {
            world.durable("b", 1000, 2).await;
        }
        let segment = world.shard.log.open_segment().unwrap().number;
        world.say("a", tombstone(local, 0, below)).await;
        let epoch = Epoch { below: 3, namespace: [9; 32] };
        world.say("a", Body::Epoch(epoch)).await;
        world.shard.log.settled().await;
        segment
    });
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        checkpoint::write(&world.shard.volume, Class::Background).await.unwrap();
    });
    remove(&place.segment(number));
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        assert!(!world.has("a", 0) && world.has("a", 2));
        assert!(world.shard.volume.tombstones.borrow().covers(NamespaceId([9; 32]), 2));
    });
}

#[test]
fn an_epoch_ends_everything_in_its_namespace_before_it() {
    let place = Place::new();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        for number in 0..30 {
            world.durable("a", number, 1).await;
            world.durable("b", number, 1).await;
        }
        let epoch = Epoch { below: world.shard.volume.sequence.get(), namespace: world.namespace("a").id.0 };
        world.say("a", Body::Epoch(epoch)).await;
        world.durable("a", 100, 1).await;
        world.shard.log.settled().await;
    });
    place.run(|world| async move {
        let report = recover(&world.shard.log).await.unwrap();
        assert_eq!((report.deleted, report.blocks), (30, 31));
        assert!((0..30).all(|number| !world.has("a", number) && world.has("b", number)));
        assert!(world.has("a", 100));
    });
}

#[test]
fn expired_records_are_left_out() {
    let place = Place::new();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let now = world.shared.clock.unix_millis();
        world.append_until("a", 0, 1, now + 1000).await;
        world.append_until("a", 1, 1, now + 5000).await;
    });
    place.clock.advance(std::time::Duration::from_secs(2));
    place.run(|world| async move {
        let report = recover(&world.shard.log).await.unwrap();
        assert!(!world.has("a", 0) && world.has("a", 1) && report.expired == 1);
        let (_, record) = world.contents().pop_first().unwrap();
        assert_eq!(record.5, 50);
    });
}

#[test]
fn a_short_id_that_means_another_namespace_by_now_still_finds_its_own() {
    let place = Place::new();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        world.durable("a", 0, 1).await;
        world.durable("b", 0, 2).await;
    });
    place.run(|world| async move {
        // Here "c" is given the short id that "a" has on disk.
        assert_eq!(world.namespace("c").local, 1);
        recover(&world.shard.log).await.unwrap();
        assert!(!world.has("c", 0) && world.has("a", 0) && world.has("b", 1));
        let (a, b) = (world.namespace("a").local, world.namespace("b").local);
        assert!(a != 1 && b != 1 && a != b);
        assert_eq!(world.shard.volume.segments.borrow()[&0].local(1), a);
        let written = world.durable("c", 5, 1).await;
        assert_eq!(written.segment.local(1), 1);
    });
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        assert!(world.has("c", 5) && world.has("a", 0) && !world.has("c", 0));
    });
}
