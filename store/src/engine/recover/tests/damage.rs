//! Damage costs what it hits.

use kvarts_contract::class::Class;
use kvarts_layout::StoreId;

use super::harness::{Place, SEGMENT_BYTES, contents_of};
use crate::engine::recover::recover;
use crate::engine::volume::checkpoint;
use crate::engine::volume::segment::SegmentState;

/// Sealed segments and a tail; gives which blocks lie in each segment, by the index.
fn filled() -> (Place, Vec<u64>) {
    let place = Place::new();
    let first = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let mut first = Vec::new();
        for number in 0..40 {
            let written = world.durable("a", number, 1).await;
            if written.segment.number == 1 {
                first.push(number);
            }
        }
        world.shard.log.settled().await;
        first
    });
    assert!(first.len() > 3);
    (place, first)
}

fn all_but(place: &Place, lost: Vec<u64>) {
    place.run(move |world| async move {
        recover(&world.shard.log).await.unwrap();
        for number in 0..40 {
            assert_eq!(world.has("a", number), !lost.contains(&number), "{number}");
        }
    });
}

fn page(place: &Place, segment: u32, offset: u64) -> Vec<u8> {
    let bytes = contents_of(&place.segment(segment));
    bytes[offset as usize..offset as usize + 4096].to_vec()
}

#[test]
fn a_torn_payload_in_the_tail_costs_its_record() {
    let place = Place::new();
    let (offset, header) = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        world.durable("a", 0, 1).await;
        let torn = world.append("a", 1, 1).await;
        world.append("a", 2, 1).await;
        (torn.offset, u64::from(torn.header_bytes))
    });
    place.damage(&place.segment(0), offset + header + 4096, &[0; 512]);
    place.run(|world| async move {
        let report = recover(&world.shard.log).await.unwrap();
        assert_eq!((report.rows["torn-payload"], report.problems), (1, 0), "{report:?}");
        assert!(world.has("a", 0) && !world.has("a", 1) && world.has("a", 2));
    });
    let (report, contents) = place.recovered();
    assert_eq!((report.rows.len(), contents.len()), (1, 2), "{report:?}");
}

#[test]
fn a_header_that_never_arrived_is_a_hole_before_the_records_behind_it() {
    for (bytes, label) in [(512, "hole-before-record"), (4096, "hole-before-record")] {
        let place = Place::new();
        let offset = place.run(|world| async move {
            recover(&world.shard.log).await.unwrap();
            world.append("a", 0, 1).await;
            let torn = world.append("a", 1, 1).await;
            world.append("a", 2, 1).await;
            torn.offset
        });
        place.damage(&place.segment(0), offset, &vec![0; bytes]);
        place.run(move |world| async move {
            let report = recover(&world.shard.log).await.unwrap();
            assert!(report.rows[label] >= 1 && report.problems == 0, "{report:?}");
            assert!(world.has("a", 0) && !world.has("a", 1) && world.has("a", 2));
        });
    }
}

#[test]
fn a_header_of_which_only_the_beginning_arrived_is_a_torn_tail() {
    let place = Place::new();
    let offset = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        world.durable("a", 0, 1).await;
        world.append("a", 1, 1).await.offset
    });
    // Behind the fixed part.
    place.damage(&place.segment(0), offset + 128, &[0; 384]);
    place.run(|world| async move {
        let report = recover(&world.shard.log).await.unwrap();
        assert_eq!((report.rows["torn-tail"], report.problems), (1, 0), "{report:?}");
        assert!(world.has("a", 0) && !world.has("a", 1));
    });
}

#[test]
fn a_hole_below_what_had_been_flushed_is_reported_with_its_place() {
    let place = Place::new();
    let offset = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        world.durable("a", 0, 1).await;
        let lost = world.durable("a", 1, 1).await;
        world.durable("a", 2, 1).await;
        lost.offset
    });
    place.damage(&place.segment(0), offset, &[0; 4096]);
    place.run(move |world| async move {
        let report = recover(&world.shard.log).await.unwrap();
        assert!(report.problems >= 1);
        let first = &report.places[0];
        assert_eq!((first.label, first.segment, first.offset), ("hole-before-durable", 0, offset));
        assert!(world.has("a", 0) && !world.has("a", 1) && world.has("a", 2));
    });
}

#[test]
fn a_damaged_footer_is_made_again_from_the_records() {
    let (place, _) = filled();
    let before = place.recovered().1;
    for offset in [SEGMENT_BYTES - 8192, SEGMENT_BYTES - 4096] {
        place.damage(&place.segment(1), offset + 130, &[0x5a; 32]);
        let (report, contents) = place.recovered();
        let label =
            if offset == SEGMENT_BYTES - 4096 { "trailer-damaged-rescan" } else { "footer-damaged-rescan" };
        assert_eq!((report.rows.get(label), report.sealed_now), (Some(&1), 1), "{report:?}");
        assert_eq!(contents, before);
        let (again, contents) = place.recovered();
        assert_eq!((again.problems, contents), (0, before.clone()));
    }
}

#[test]
fn a_damaged_header_with_a_good_footer_costs_nothing() {
    let (place, _) = filled();
    let before = place.recovered().1;
    place.damage(&place.segment(1), 100, &[0x5a; 32]);
    let (report, contents) = place.recovered();
    assert_eq!(report.rows["header-damaged-footer-sound"], 1);
    assert_eq!(contents, before);
}

#[test]
fn a_segment_without_either_end_is_found_by_its_records() {
    let (place, _) = filled();
    let before = place.recovered().1;
    place.damage(&place.segment(1), 0, &[0x5a; 4096]);
    place.damage(&place.segment(1), SEGMENT_BYTES - 4096, &[0x5a; 4096]);
    let (report, contents) = place.recovered();
    assert_eq!((report.rows["header-lost-rescan"], &contents), (1, &before));
    let (again, contents) = place.recovered();
    assert_eq!((again.rows["header-damaged-footer-sound"], contents), (1, before));
}

#[test]
fn a_damaged_record_in_a_damaged_segment_costs_its_own_blocks() {
    let (place, blocks) = filled();
    let (_, _) = place.recovered();
    let offset = place.run({
        let number = blocks[2];
        move |world| async move {
            recover(&world.shard.log).await.unwrap();
            u64::from(world.at("a", number).unwrap().1) * 4096
        }
    });
    place.damage(&place.segment(1), offset, &[0x5a; 4096]);
    place.damage(&place.segment(1), SEGMENT_BYTES - 8192 + 130, &[0x5a; 32]);
    all_but(&place, vec![blocks[2]]);
    all_but(&place, vec![blocks[2]]);
}

#[test]
fn a_segment_of_another_store_is_set_aside_and_stays_as_it_is() {
    let (place, _) = filled();
    let before = place.recovered().1;
    let other = Place { store: StoreId(*b"one of somebody."), ..Place::new() };
    other.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        for number in 100..103 {
            world.durable("a", number, 1).await;
        }
    });
    let (_, theirs) = other.recovered();
    assert_eq!(theirs.len(), 3);
    std::fs::copy(other.segment(0), place.segment(50)).unwrap();
    place.run(|world| async move {
        let report = recover(&world.shard.log).await.unwrap();
        assert_eq!(report.rows["segment-foreign"], 1);
        assert!(!world.has("a", 100));
        assert_eq!(world.shard.volume.segments.borrow()[&50].state.get(), SegmentState::Suspect);
        for number in 200..220 {
            world.durable("a", number, 1).await;
        }
    });
    assert_eq!(page(&place, 50, 4096), page(&other, 0, 4096));
    let (_, after) = place.recovered();
    assert!(before.iter().all(|(print, at)| after.get(print) == Some(at)));
}

#[test]
fn a_copy_of_a_segment_under_another_number_counts_nowhere() {
    let (place, _) = filled();
    let before = place.recovered().1;
    std::fs::copy(place.segment(1), place.segment(60)).unwrap();
    place.run(move |world| async move {
        let report = recover(&world.shard.log).await.unwrap();
        assert_eq!((report.rows["header-misdirected"], world.contents()), (1, before));
    });
}

#[test]
fn a_header_whose_last_write_was_lost_does_not_hide_the_records_behind_it() {
    // Room for the checkpoint beside three segments.
    let place = Place { budget: 3 * SEGMENT_BYTES + (64 << 10), no_holes: true, ..Place::new() };
    // Generation 1 of segment 0, kept.
    let old = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        world.durable("a", 0, 1).await
    });
    let header = page(&place, old.segment.number, 0);
    drop(old);
    let last = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let mut number = 1;
        loop {
            let written = world.durable("a", number, 3).await;
            world.shard.log.settled().await;
            if written.segment.number == 0 && written.segment.generation.get() == 2 {
                // The checkpoint knows the later generation.
                checkpoint::write(&world.shard.volume, Class::Background).await.unwrap();
                return number;
            }
            number += 3;
        }
    });
    place.damage(&place.segment(0), 0, &header);
    place.run(move |world| async move {
        let report = recover(&world.shard.log).await.unwrap();
        let rows = (report.rows["header-lost-write"], report.rows["generation-ahead"]);
        assert_eq!(rows, (1, 1), "{report:?}");
        assert!(world.has("a", last));
        assert_eq!(world.shard.volume.segments.borrow()[&0].generation.get(), 2);
    });
}

#[test]
fn a_crash_between_footer_and_trailer_leaves_a_store_that_recovers_to_the_same() {
    let (place, _) = filled();
    let before = place.recovered().1;
    let tail = before.values().map(|at| at.1).max().unwrap();
    // Recovery has just sealed the tail; without its trailer it is unsealed again.
    place.damage(&place.segment(tail), SEGMENT_BYTES - 4096, &[0; 4096]);
    let (report, contents) = place.recovered();
    assert_eq!((report.rows["open-tail"], report.problems, &contents), (1, 0, &before), "{report:?}");
    let (again, contents) = place.recovered();
    assert_eq!((again.rows.get("open-tail"), contents), (None, before));
}

#[test]
fn a_new_file_whose_header_never_arrived_gets_one_when_it_is_sealed() {
    let place = Place::new();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        world.append("a", 0, 1).await;
    });
    place.damage(&place.segment(0), 0, &[0; 4096]);
    let (report, contents) = place.recovered();
    assert_eq!((report.rows["never-used"], report.sealed_now, contents.len()), (1, 1, 1), "{report:?}");
    let (again, contents) = place.recovered();
    assert_eq!((again.rows.get("sealed"), again.problems, contents.len()), (Some(&1), 0, 1), "{again:?}");
}

/// No checkpoint knows of the seal, and nothing but the seal says that the records had been flushed.
#[test]
fn blocks_of_a_relaxed_record_that_were_evicted_are_no_damage_without_the_trailer_either() {
    let place = Place::new();
    let payload = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        world.append("a", 0, 5).await;
        world.append("a", 5, 5).await;
        let last = world.append("a", 10, 5).await;
        world.shard.log.finish().await;
        last.offset + u64::from(last.header_bytes)
    });
    place.punch(&place.segment(0), payload, 4096);
    let (report, before) = place.recovered();
    assert_eq!((report.problems, report.evicted, before.len()), (0, 1, 14), "{report:?}");
    place.damage(&place.segment(0), SEGMENT_BYTES - 4096 + 200, &[0x55; 4]);
    let (report, after) = place.recovered();
    assert_eq!((report.problems, report.evicted), (1, 1), "{report:?}");
    assert_eq!(after, before);
}
