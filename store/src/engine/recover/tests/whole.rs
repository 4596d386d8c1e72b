//! What was written and is whole is found again.

use std::time::Duration;

use super::harness::{Place, SEGMENT_BYTES, World, contents_of, remove};
use crate::engine::recover::recover;
use crate::engine::volume::checkpoint;
use crate::engine::volume::segment::SegmentState;
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;

/// Forty records of two blocks: some sealed segments and an open one.
fn filled() -> Place {
    let place = Place::new();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        for number in 0..40 {
            world.durable("a", number * 2, 2).await;
        }
        world.shard.log.settled().await;
    });
    place
}

/// Bytes of all files.
fn allocated(world: &World) -> u64 {
    world.shard.volume.segments.borrow().values().map(|segment| segment.book.allocated()).sum()
}

#[test]
fn a_new_folder_holds_nothing() {
    let (report, contents) = Place::new().recovered();
    assert!(contents.is_empty() && report.segments == 0 && report.rows.is_empty());
}

#[test]
#[allow(clippy::disallowed_methods, reason = "a test loses a folder behind the store's back")]
fn a_folder_that_is_gone_is_told_and_not_made_again() {
    let place = filled();
    let folder = place.scratch.path().join("shard-0000");
    std::fs::remove_dir_all(&folder).unwrap();
    for _ in 0..2 {
        let refused = place.run(|world| async move { recover(&world.shard.log).await.unwrap_err() });
        let told = refused.to_string();
        assert!(matches!(refused, Reason::Directory(_)) && told.contains("kvarts fsck --repair"), "{told}");
        assert!(told.contains("folder for shard 0") && !folder.exists());
    }
}

#[test]
fn sealed_segments_and_the_open_tail_are_found_and_the_tail_is_sealed() {
    let place = filled();
    let (sealed, found) = place.run(|world| async move {
        let report = recover(&world.shard.log).await.unwrap();
        assert_eq!((report.rows["open-tail"], report.sealed_now, report.problems), (1, 1, 0), "{report:?}");
        assert_eq!((report.blocks, report.records), (80, 40));
        for number in 0..80 {
            assert!(world.has("a", number), "{number}");
        }
        // What the tail was sealed without was given back.
        let whole = report.segments * SEGMENT_BYTES;
        let used = allocated(&world);
        assert!(used < whole && used > whole - SEGMENT_BYTES, "{used} of {whole}");
        assert_eq!(world.shared.space().0, used);
        (report.rows["sealed"], world.contents())
    });
    assert!(sealed > 2);
    let (again, same) = place.recovered();
    assert_eq!((again.rows["sealed"], again.sealed_now), (sealed + 1, 0));
    assert_eq!(same, found);
}

#[test]
fn nothing_is_appended_to_what_recovery_found() {
    let place = filled();
    let (_, before) = place.recovered();
    let segments = before.values().map(|at| at.1).max().unwrap();
    place.run(move |world| async move {
        recover(&world.shard.log).await.unwrap();
        let highest = world.shard.volume.sequence.get();
        let written = world.durable("a", 1000, 1).await;
        assert!(written.segment.number > segments);
        assert!(world.shard.volume.sequence.get() > highest);
    });
    let (report, after) = place.recovered();
    assert_eq!((after.len(), report.problems), (before.len() + 1, 0));
    assert!(before.iter().all(|(print, at)| after.get(print) == Some(at)));
}

#[test]
fn records_that_were_written_and_not_flushed_are_found_by_their_digests() {
    let place = Place::new();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        for number in 0..5 {
            world.append("a", number, 1).await;
        }
    });
    let (report, contents) = place.recovered();
    assert_eq!((report.rows["record-unverified"], report.rows["end-of-log"]), (5, 1), "{report:?}");
    assert_eq!((contents.len(), report.problems), (5, 0));
}

#[test]
fn recycled_segments_are_found_under_their_last_generation() {
    let place = Place { budget: 4 * SEGMENT_BYTES, ..Place::new() };
    let recycled = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        for number in 0..60 {
            world.durable("a", number, 3).await;
            // Reclaim needs a sealed segment.
            world.shard.log.settled().await;
        }
        world.shard.volume.segments.borrow().values().map(|segment| segment.generation.get()).max().unwrap()
    });
    assert!(recycled > 1);
    let (report, contents) = place.run(move |world| async move {
        let report = recover(&world.shard.log).await.unwrap();
        assert!(world.has("a", 59) && !world.has("a", 0));
        assert!(world.shard.volume.segments.borrow().values().any(|one| one.generation.get() == recycled));
        (report, world.contents())
    });
    assert_eq!(report.problems, 0, "{report:?}");
    assert_eq!(place.recovered().1, contents);
}

#[test]
fn a_segment_that_holds_nothing_is_free_and_used_under_a_later_generation() {
    let place = Place::new();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let written = world.durable("a", 0, 1).await;
        written.segment.generation.get()
    });
    // The record is gone as if its write had never happened; the header stays.
    let zeros = vec![0; SEGMENT_BYTES as usize - 4096];
    place.damage(&place.segment(0), 4096, &zeros);
    place.run(|world| async move {
        let report = recover(&world.shard.log).await.unwrap();
        assert_eq!((report.sealed_now, report.blocks), (0, 0));
        let state = world.shard.volume.segments.borrow()[&0].state.get();
        assert_eq!(state, SegmentState::Free);
        let written = world.durable("a", 0, 1).await;
        assert_eq!((written.segment.number, written.segment.generation.get()), (0, 2));
    });
    assert_eq!(place.recovered().1.len(), 1);
}

#[test]
fn stray_names_are_counted_and_left_alone() {
    let place = filled();
    std::fs::create_dir(place.segment(999)).unwrap();
    std::fs::copy(place.segment(0), place.file("segment-0.bak")).unwrap();
    let (report, contents) = place.recovered();
    assert_eq!((report.strays, contents.len(), report.problems), (2, 80, 0));
}

#[test]
fn a_file_without_its_length_gets_it_and_is_free() {
    let place = filled();
    std::fs::File::create_new(place.segment(77)).unwrap();
    place.run(|world| async move {
        let report = recover(&world.shard.log).await.unwrap();
        assert_eq!((report.rows["never-used"], report.problems), (1, 0));
        assert_eq!(world.shared.space().0, allocated(&world));
        assert_eq!(world.shard.volume.segments.borrow()[&77].book.allocated(), SEGMENT_BYTES);
        assert_eq!(world.shard.volume.segments.borrow()[&77].state.get(), SegmentState::Free);
    });
    assert_eq!(std::fs::metadata(place.segment(77)).unwrap().len(), SEGMENT_BYTES);
}

#[test]
fn a_file_that_cannot_have_its_length_is_as_empty_as_if_it_had() {
    let mut place = filled();
    place.budget = place.recovered().0.segments * SEGMENT_BYTES;
    std::fs::File::create_new(place.segment(77)).unwrap();
    let (report, _) = place.recovered();
    assert_eq!(
        (report.rows["never-used"], report.problems, report.unreadable_pages),
        (1, 0, 0),
        "{report:?}"
    );
    assert_eq!(std::fs::metadata(place.segment(77)).unwrap().len(), 0);
}

#[test]
fn an_index_recovered_by_a_checkpoint_is_the_one_recovered_without() {
    let place = filled();
    let (_, plain) = place.recovered();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        world.durable("a", 500, 2).await;
        let before = world.shared.space().0;
        let report = checkpoint::write(&world.shard.volume, Class::Background).await.unwrap();
        assert_eq!((report.sequence, report.records), (1, 40));
        assert_eq!(world.shared.space().0, before + report.bytes);
        world.durable("a", 502, 2).await;
    });
    let (with, contents) = place.recovered();
    assert_eq!((with.checkpoint, with.problems), (Some(1), 0), "{with:?}");
    assert_eq!(contents.len(), plain.len() + 4);
    remove(&place.file("checkpoint-0"));
    let (without, same) = place.recovered();
    assert_eq!((without.checkpoint, same), (None, contents));
}

#[test]
fn recency_and_expiry_survive_by_the_checkpoint() {
    let place = Place::new();
    let minute = Duration::from_secs(60);
    let clock = std::sync::Arc::clone(&place.clock);
    place.run(move |world| async move {
        recover(&world.shard.log).await.unwrap();
        let expires = world.shared.clock.unix_millis() + 1_200_000;
        world.append_until("a", 0, 1, expires).await;
        world.durable("a", 1, 1).await;
        clock.advance(100 * minute);
    });
    let clock = std::sync::Arc::clone(&place.clock);
    clock.set_unix_millis(1_700_000_000_000 + 10 * 60_000);
    place.run(move |world| async move {
        recover(&world.shard.log).await.unwrap();
        let now = world.shared.epoch();
        let print = |number| {
            let key = super::harness::key(number);
            let group = kvarts_layout::Group(0);
            let place = kvarts_layout::Coordinate::Replicated;
            world.shared.index.key().of(world.namespace("a").local, &key, group, place)
        };
        let age = |number| world.shared.index.get(print(number)).unwrap().heat.age(now);
        // Ten minutes since they were made.
        assert_eq!((age(0), age(1)), (9, 9));
        world.shared.index.touch_with(&[print(1)], now, Some(world.shared.second()));
        let record = world.shared.index.locate(print(0)).unwrap().location.record;
        let later = world.shared.expiry_step(1_700_000_000_000 + 7_200_000);
        assert!(world.shared.index.records().set_expires(record, later));
        checkpoint::write(&world.shard.volume, Class::Background).await.unwrap();
    });
    clock.set_unix_millis(1_700_000_000_000 + 40 * 60_000);
    place.run(move |world| async move {
        let report = recover(&world.shard.log).await.unwrap();
        // By its record it would have expired twenty minutes ago.
        assert!(world.has("a", 0) && report.expired == 0);
        let index = &world.shared.index;
        let print = |number| {
            let key = super::harness::key(number);
            let group = kvarts_layout::Group(0);
            index.key().of(world.namespace("a").local, &key, group, kvarts_layout::Coordinate::Replicated)
        };
        let epoch = |number| index.get(print(number)).unwrap().heat.epoch;
        let steps = epoch(1).wrapping_sub(epoch(0)) % crate::index::EPOCHS;
        assert!((8..=10).contains(&steps), "{steps}");
    });
    clock.set_unix_millis(1_700_000_000_000 + 121 * 60_000);
    let (report, contents) = place.recovered();
    assert_eq!((report.expired, contents.len()), (1, 1));
}

#[test]
fn checkpoints_are_written_in_turn_and_a_torn_one_leaves_the_one_before() {
    let place = filled();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        for sequence in 1..=3 {
            assert_eq!(
                checkpoint::write(&world.shard.volume, Class::Background).await.unwrap().sequence,
                sequence
            );
        }
    });
    assert_eq!(place.recovered().0.checkpoint, Some(3));
    let (_, plain) = place.recovered();
    place.damage(&place.file("checkpoint-0"), 4096 + 200, &[0xff; 8]);
    let (report, contents) = place.recovered();
    assert_eq!((report.checkpoint, &contents), (Some(2), &plain));
    // The next one replaces the torn one, above every sequence that was seen.
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        assert_eq!(checkpoint::write(&world.shard.volume, Class::Background).await.unwrap().sequence, 4);
    });
    let header = contents_of(&place.file("checkpoint-0"));
    assert_eq!(header[56], 4);
    assert_eq!(place.recovered().0.checkpoint, Some(4));
}

#[test]
fn a_checkpoint_that_does_not_fit_the_budget_is_refused_unless_the_store_is_over_it_already() {
    let mut place = filled();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        checkpoint::write(&world.shard.volume, Class::Background).await.unwrap();
    });
    // Not a byte is left.
    let used = std::rc::Rc::new(std::cell::Cell::new(0));
    let seen = std::rc::Rc::clone(&used);
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        seen.set(world.shared.space().0);
    });
    place.budget = used.get();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let before = world.shared.space();
        assert_eq!(before.0, before.1);
        let refused = checkpoint::write(&world.shard.volume, Class::Background).await.unwrap_err();
        assert!(matches!(refused, kvarts_contract::error::Reason::NoSpace(_)), "{refused}");
        assert_eq!(world.shared.space(), before);
    });
    assert_eq!(place.recovered().0.checkpoint, Some(1));
    // One whose budget was lowered says first that what it gives back is free.
    place.budget = 1;
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let before = world.shared.space().0;
        checkpoint::write(&world.shard.volume, Class::Background).await.unwrap();
        assert!(world.shared.space().0 > before, "and counts it");
    });
    assert!(place.recovered().0.checkpoint > Some(1));
}
