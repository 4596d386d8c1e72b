//! Blocks leave one by one, their pages are given back, and the next start of the store finds the same blocks gone.

use kvarts_layout::{BlockShape, ChunkShape, LayerShape};

use super::batch::Made;
use crate::engine::recover::recover;
use crate::engine::recover::tests::harness::{Contents, Place, SEGMENT_BYTES, World, key};
use crate::engine::shared::policy::EvictionPolicy;
use crate::index::{BlockFingerprint, LeaseTerms, Location, Lookup, RecordInfo};
use kvarts_contract::class::Class;

/// One layer with parts of these sizes in bytes.
pub(super) fn shape_of(parts: &[u64]) -> BlockShape {
    let chunks = parts.iter().map(|&bytes| ChunkShape { bytes, align: 1 }).collect();
    BlockShape::new(vec![LayerShape { layer: 0, chunks }]).unwrap()
}

fn print(world: &World, number: u64) -> BlockFingerprint {
    let namespace = world.namespace("a").local;
    let (group, coordinate) = (kvarts_layout::Group(0), kvarts_layout::Coordinate::Replicated);
    world.shared.index.key().of(namespace, &key(number), group, coordinate)
}

/// Eight segments, each with records of five blocks; closed.
fn filled() -> Place {
    let place = Place::new();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let mut first = 0;
        while world.shard.volume.segments.borrow().len() < 9 {
            world.durable("a", first, 5).await;
            first += 5;
        }
        world.shard.log.finish().await;
    });
    place
}

/// Blocks that other shards have, in records of ten.
fn strangers(world: &World, blocks: u64) {
    let index = &world.shared.index;
    for record in 0..blocks / 10 {
        let info = crate::index::RecordInfo {
            shard: 7,
            segment: (record / 1000) as u32,
            page: record as u32,
            header_pages: 1,
            payload_pages: 40,
            blocks: std::num::NonZeroU16::new(10).unwrap(),
            live: 0,
            // No class has this number.
            class: u32::MAX,
            expires: 0,
            parent: 0,
            hangs: false,
        };
        let known = index.records().insert(info).unwrap();
        let prints: Vec<_> = (0..10)
            .map(|n| BlockFingerprint::from_parts((record * 10 + n).wrapping_mul(0x9e37_79b9_7f4a_7c15), 5))
            .collect();
        let ticket = index.reserve(&prints, &mut Vec::new());
        assert!(index.commit(ticket, known, &prints, 0).unwrap().is_empty());
    }
}

/// All blocks of the store, by their number, and in which segment each is.
fn segments_of(world: &World) -> Vec<(u64, u32)> {
    let all = 0..world.contents().len() as u64;
    all.map(|number| (number, world.at("a", number).unwrap().0)).collect()
}

/// Makes room until `bytes` bytes have been given back.
async fn give_back(world: &World, bytes: u64) {
    let before = world.shared.space().0;
    while world.shared.space().0 + bytes > before {
        match world.shard.space.make_room().await {
            Made::Segment(segment) => world.shard.space.remove_segment(&segment).await.unwrap(),
            Made::Room => {}
            Made::Nothing => panic!("nothing can be given back"),
        }
    }
}

fn sums(world: &World) {
    let report = world.shared.space_report();
    assert_eq!(report.total.sum(), report.total.allocated, "{report:?}");
    assert_eq!(report.total.allocated, world.shared.space().0);
}

#[test]
fn what_was_evicted_stays_so_and_all_else_is_found_again() {
    for policy in EvictionPolicy::ALL {
        let place = filled();
        let (before, after): (Contents, Contents) = place.run(move |world| async move {
            recover(&world.shard.log).await.unwrap();
            world.shared.set_policy(policy);
            let before = world.contents();
            let epoch = world.shared.epoch();
            // Of every second record the first three blocks are used.
            for first in (0..before.len() as u64).step_by(10) {
                let used: Vec<_> = (first..first + 3).map(|number| print(&world, number)).collect();
                let later = (epoch + 40) % crate::index::EPOCHS;
                world.shared.index.touch_with(&used, later, None);
            }
            (0..40).for_each(|_| world.shared.ages.wrote(1 << 20, 256 << 20, world.shared.clock.now()));
            give_back(&world, 2 * SEGMENT_BYTES).await;
            sums(&world);
            assert!(world.shard.volume.segments.borrow().values().any(|segment| segment.is_holed()));
            for first in (0..before.len() as u64).step_by(10) {
                assert!(
                    world.has("a", first) && world.has("a", first + 2),
                    "{policy:?}: used block of {first}"
                );
            }
            (before, world.contents())
        });
        assert!(after.len() < before.len() && after.iter().all(|(print, at)| before[print] == *at));
        let (report, found) = place.recovered();
        assert_eq!(found, after, "{policy:?}");
        assert_eq!(report.evicted + found.len() as u64, report.evicted + report.blocks);
        assert!(report.evicted > 0 && report.problems == 0, "{report:?}");
        let allocated = place.run(|world| async move {
            recover(&world.shard.log).await.unwrap();
            sums(&world);
            world.shared.space().0
        });
        assert!(allocated <= 8 * SEGMENT_BYTES, "{allocated}: holes are not filled again");
    }
}

/// A hole in the next segment, for the few bytes that the emptied one's header and footer have, would cost that one its
/// file: with holes it is not rewritten.
#[test]
fn what_left_in_the_order_in_which_it_came_leaves_whole_segments_and_no_holes() {
    let place = filled();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        world.shared.set_policy(EvictionPolicy::Lru);
        for number in 0..world.contents().len() as u64 {
            world.shared.ages.wrote(1 << 20, 256 << 20, world.shared.clock.now());
            world.shared.index.touch(&[print(&world, number)], world.shared.epoch());
        }
        for oldest in 0..4 {
            let before = world.contents();
            assert!(matches!(world.shard.space.make_room().await, Made::Room), "{oldest}");
            let Made::Segment(segment) = world.shard.space.make_room().await else {
                panic!("{oldest}: no segment")
            };
            assert_eq!(segment.number, oldest);
            assert!(
                world.shard.volume.segments.borrow().values().all(|segment| !segment.is_holed()),
                "{oldest}"
            );
            let left = before.values().filter(|at| at.1 != oldest).count();
            assert_eq!(world.contents().len(), left, "{oldest}");
            world.shard.space.remove_segment(&segment).await.unwrap();
        }
        sums(&world);
    });
}

#[test]
fn blocks_before_others_stay_as_long_as_those() {
    let place = filled();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        world.shared.set_policy(EvictionPolicy::Lru);
        let before = world.contents().len() as u64;
        (0..40).for_each(|_| world.shared.ages.wrote(1 << 20, 256 << 20, world.shared.clock.now()));
        // The last block of each second record alone was used: who needs it needs those before it.
        for first in (0..before).step_by(10) {
            world.shared.index.touch(&[print(&world, first + 4)], world.shared.epoch());
        }
        give_back(&world, 2 * SEGMENT_BYTES).await;
        for first in (0..before).step_by(10) {
            assert!((first..first + 5).all(|number| world.has("a", number)), "record at {first}");
        }
        for first in (5..before).step_by(10) {
            let here: Vec<bool> = (first..first + 5).map(|number| world.has("a", number)).collect();
            assert!(here.is_sorted_by(|a, b| a >= b), "a parent left before its child: {here:?}");
        }
    });
}

#[test]
fn what_a_lease_holds_stays_and_so_does_a_segment_under_a_read() {
    let place = filled();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let before = world.contents().len() as u64;
        let (now, mut found) = (world.shared.clock.now(), Vec::new());
        let terms = LeaseTerms { until: None, tenant: 1, cap_bytes: 1 << 30 };
        let held: Vec<u64> = (0..before).step_by(7).collect();
        let prints: Vec<_> = held.iter().map(|number| print(&world, *number)).collect();
        world.shared.index.match_and_lease(&prints, terms, now, |_| 1, &mut found).unwrap();
        let read = world.at("a", 1).unwrap().0;
        let segment = std::rc::Rc::clone(&world.shard.volume.segments.borrow()[&read]);
        let hold = crate::engine::volume::segment::Hold::new(&segment);
        let allocated = segment.book.allocated();
        give_back(&world, 3 * SEGMENT_BYTES).await;
        assert!(held.iter().all(|number| world.has("a", *number)));
        assert!(held.iter().filter(|number| **number % 5 == 4).all(|last| world.has("a", last - 4)));
        assert_eq!((segment.book.allocated(), segment.is_holed()), (allocated, false), "under a read");
        drop(hold);
        sums(&world);
    });
}

#[test]
fn what_is_favoured_goes_when_nothing_else_is_left() {
    for policy in EvictionPolicy::ALL {
        filled().run(move |world| async move {
            recover(&world.shard.log).await.unwrap();
            world.shared.set_policy(policy);
            let all = world.contents().len() as u64;
            let now = world.shared.clock.now();
            // The oldest fifth, of which nothing was used, beside blocks that are used again and again.
            let favoured: Vec<u64> = (0..all / 5).collect();
            let prints: Vec<_> = favoured.iter().map(|number| print(&world, *number)).collect();
            let until = now.plus(std::time::Duration::from_secs(3600));
            assert_eq!(world.shared.favoured.add(1, &prints, until, now), prints.len());
            (0..40).for_each(|_| world.shared.ages.wrote(1 << 20, 256 << 20, now));
            let others: Vec<_> = (all / 5..all).map(|number| print(&world, number)).collect();
            world.shared.index.touch(&others, world.shared.epoch());
            give_back(&world, 4 * SEGMENT_BYTES).await;
            assert!(favoured.iter().all(|number| world.has("a", *number)), "{policy:?}");
            assert!(others.iter().any(|print| world.shared.index.lookup(*print) == Lookup::Absent));
            // They are under no lease.
            while !matches!(world.shard.space.make_room().await, Made::Nothing) {
                if favoured.iter().any(|number| !world.has("a", *number)) {
                    return;
                }
            }
            panic!("{policy:?}: favoured blocks stay for ever");
        });
    }
}

#[test]
fn a_segment_with_holes_is_never_written_anew() {
    let place = filled();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let holed = |world: &World| -> Vec<u32> {
            let segments = world.shard.volume.segments.borrow();
            segments.values().filter(|segment| segment.is_holed()).map(|segment| segment.number).collect()
        };
        world.shared.set_policy(EvictionPolicy::Lru);
        // Of each segment something is used, so none is emptied as a whole.
        (0..40).for_each(|_| world.shared.ages.wrote(1 << 20, 256 << 20, world.shared.clock.now()));
        for first in (0..world.contents().len() as u64).step_by(10) {
            world.shared.index.touch(&[print(&world, first)], world.shared.epoch());
        }
        give_back(&world, SEGMENT_BYTES).await;
        assert!(!holed(&world).is_empty());
        for _ in 0..200 {
            match world.shard.space.make_room().await {
                Made::Segment(segment) => {
                    assert!(!segment.is_holed() && segment.book.allocated() >= SEGMENT_BYTES);
                    world.shard.space.remove_segment(&segment).await.unwrap();
                }
                Made::Room => {}
                Made::Nothing => break,
            }
        }
        sums(&world);
    });
}

#[test]
fn a_deleted_or_moved_block_is_given_back_without_evicting_any() {
    let place = filled();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let before = world.contents().len() as u64;
        let gone: Vec<_> =
            (0..before).filter(|number| number % 5 > 1).map(|number| print(&world, number)).collect();
        for print in &gone {
            let _ = world.shared.index.delete(*print);
        }
        let left = world.contents();
        give_back(&world, 2 * SEGMENT_BYTES).await;
        assert_eq!(world.contents(), left);
        assert!(gone.iter().all(|print| world.shared.index.lookup(*print) == Lookup::Absent));
        sums(&world);
    });
}

/// Each block of a record expires at a time of its own: the index has a number for each.
fn part_records(world: &World) {
    let index = &world.shared.index;
    for number in 0..world.contents().len() as u64 {
        let Lookup::Live(at) = index.lookup(print(world, number)) else { panic!("{number}") };
        let info = index.records().get(at.record).unwrap();
        let later = world.shared.expiry_step(world.shared.clock.unix_millis() + 1_000_000);
        let expires = later + u32::try_from(number % 5).unwrap();
        let own = index.records().insert(RecordInfo { expires, live: 0, ..info }).unwrap();
        let new = Location { record: own, ..at };
        let left = index.replace_location(print(world, number), at, new).unwrap().unwrap();
        world.shared.free_if_empty(at.record, left);
    }
}

#[test]
fn blocks_of_one_record_that_expire_at_different_times_go_in_one_round() {
    let evicted = [false, true].map(|parted| {
        filled().run(move |world| async move {
            recover(&world.shard.log).await.unwrap();
            world.shared.set_policy(EvictionPolicy::Lru);
            let before = world.contents().len();
            if parted {
                part_records(&world);
            }
            (0..40).for_each(|_| world.shared.ages.wrote(1 << 20, 256 << 20, world.shared.clock.now()));
            assert!(matches!(world.shard.space.make_room().await, Made::Room));
            before - world.contents().len()
        })
    });
    assert!(evicted[0] >= 15 && evicted[1] >= evicted[0] - 5, "{evicted:?}");
}

#[test]
fn what_room_costs_is_that_of_a_few_segments_and_not_of_all_blocks_and_others_have_their_turn() {
    let place = filled();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let work = &world.shared.work.evictions;
        assert!(matches!(world.shard.space.make_room().await, Made::Room));
        let first = work.done().steps;
        strangers(&world, 200_000);
        assert!(matches!(world.shard.space.make_room().await, Made::Segment(_) | Made::Room));
        assert!(matches!(world.shard.space.make_room().await, Made::Segment(_) | Made::Room));
        let second = work.done().steps - first;
        assert!(first > 0 && second <= 2 * first, "{second} steps after {first}");
        assert!(
            work.done().longest_steps < 2 * crate::engine::tasks::steps::AT_ONCE,
            "{}",
            work.done().longest_steps
        );
    });
}

#[test]
fn a_shard_of_many_segments_looks_at_few_of_them() {
    let place = Place::new();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let mut first = 0;
        let mut steps = Vec::new();
        for segments in [40, 200] {
            while world.shard.volume.segments.borrow().len() < segments {
                world.durable("a", first, 5).await;
                first += 5;
            }
            world.shard.log.settled().await;
            if let Made::Segment(emptied) = world.shard.space.make_room().await {
                world.shard.space.remove_segment(&emptied).await.unwrap();
            }
            let before = world.shared.work.evictions.done().steps;
            assert!(matches!(world.shard.space.make_room().await, Made::Segment(_) | Made::Room));
            steps.push(world.shared.work.evictions.done().steps - before);
        }
        // A look at each segment's book, but not at its blocks.
        assert!(steps[1] <= steps[0] + 200, "{steps:?}");
    });
}

/// What was used an hour, a day, and weeks ago is told apart, before and after a restart; the numbers of segments say
/// nothing.
#[test]
fn after_weeks_what_was_unused_for_longest_goes_first() {
    for restart in [false, true] {
        let place = filled();
        let clock = std::sync::Arc::clone(&place.clock);
        let day = std::time::Duration::from_secs(24 * 60 * 60);
        place.run(move |world| async move {
            recover(&world.shard.log).await.unwrap();
            world.shared.set_policy(EvictionPolicy::Lru);
            let all = segments_of(&world);
            // The second four segments first, then the first four and the last: each segment has its day.
            for segment in [4, 5, 6, 7, 0, 1, 2, 3, 8] {
                clock.advance(4 * day);
                let of = all.iter().filter(|(_, at)| *at == segment);
                let prints: Vec<_> = of.map(|(number, _)| print(&world, *number)).collect();
                world.shared.index.touch_with(&prints, world.shared.epoch(), Some(world.shared.second()));
            }
            clock.advance(2 * day);
            match restart {
                true => world.shard.space.say_free().await.then_some(()).unwrap(),
                false => oldest_first(&world, &all).await,
            }
        });
        if restart {
            let clock = std::sync::Arc::clone(&place.clock);
            clock.set_unix_millis(1_700_000_000_000 + 40 * 24 * 60 * 60 * 1000);
            place.run(move |world| async move {
                recover(&world.shard.log).await.unwrap();
                world.shared.set_policy(EvictionPolicy::Lru);
                oldest_first(&world, &segments_of(&world)).await;
            });
        }
    }
}

async fn oldest_first(world: &World, all: &[(u64, u32)]) {
    for segment in [4, 5, 6, 7, 0, 1] {
        assert!(matches!(world.shard.space.make_room().await, Made::Room));
        let Made::Segment(emptied) = world.shard.space.make_room().await else { panic!("no segment") };
        assert_eq!(emptied.number, segment);
        assert!(all.iter().all(|(number, at)| *at != segment || !world.has("a", *number)));
        world.shard.space.remove_segment(&emptied).await.unwrap();
    }
}

#[test]
fn a_checkpoint_and_a_sweep_look_at_their_shards_own_records_and_at_what_is_due() {
    let place = filled();
    let clock = std::sync::Arc::clone(&place.clock);
    place.run(move |world| async move {
        recover(&world.shard.log).await.unwrap();
        let shared = &world.shared;
        let checkpoint = || shared.work.checkpoints.done().steps;
        assert!(world.shard.space.say_free().await);
        let (first, all) = (checkpoint(), segments_of(&world));
        strangers(&world, 100_000);
        assert!(world.shard.space.say_free().await);
        assert_eq!(checkpoint(), 2 * first, "a checkpoint looks at others' records");
        let sweep = || shared.work.sweeps.done().steps;
        crate::engine::front::expiry::sweep(&world.shard.reads).await;
        assert_eq!(sweep(), 0, "nothing is due");
        // One record of five blocks.
        let record = shared.index.locate(print(&world, 5)).unwrap();
        let (place, expires) = ((world.shard.volume.shard, record.record.segment), shared.expiry_now() + 50);
        assert!(shared.index.records().set_expires(record.location.record, expires));
        shared.note_expiry(place, expires);
        let of_segment = all.iter().filter(|(_, at)| *at == place.1).count() as u64;
        clock.advance(std::time::Duration::from_secs(6));
        crate::engine::front::expiry::sweep(&world.shard.reads).await;
        assert!(!world.has("a", 5) && !world.has("a", 9) && world.has("a", 10));
        let looked = sweep();
        assert!(looked <= 2 * of_segment, "{looked} steps for a segment of {of_segment} blocks");
        clock.advance(std::time::Duration::from_secs(60));
        crate::engine::front::expiry::sweep(&world.shard.reads).await;
        assert_eq!(sweep(), looked, "nothing is due any more");
    });
}

#[test]
fn what_is_put_makes_what_is_here_older() {
    Place::new().run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let before = world.shared.ages.steps();
        for first in (0..200).step_by(5) {
            world.durable("a", first, 5).await;
        }
        // A megabyte of 64, in steps of a 256th of them.
        let passed = world.shared.ages.steps() - before;
        assert!((4..10).contains(&passed), "{passed} steps");
    });
}

#[test]
fn what_ends_within_the_stretch_of_a_sweep_and_what_was_forgotten_go_at_their_time() {
    let place = filled();
    let clock = std::sync::Arc::clone(&place.clock);
    place.run(move |world| async move {
        recover(&world.shard.log).await.unwrap();
        let shared = &world.shared;
        for (number, forgotten) in [(5, false), (15, true)] {
            let into = u64::from(shared.expiry_now() % 100);
            clock.advance(std::time::Duration::from_millis((100 - into) * 100));
            let found = shared.index.locate(print(&world, number)).unwrap();
            let expires = shared.expiry_now() + 50;
            assert!(shared.index.records().set_expires(found.location.record, expires));
            shared.note_expiry((world.shard.volume.shard, found.record.segment), expires);
            if forgotten {
                (0..=1 << 16).for_each(|segment| shared.due.note((7, segment), 9));
            }
            let here = || shared.index.locate(print(&world, number)).is_some();
            crate::engine::front::expiry::sweep(&world.shard.reads).await;
            assert!(here(), "its time has not come");
            clock.advance(std::time::Duration::from_secs(6));
            crate::engine::front::expiry::sweep(&world.shard.reads).await;
            assert!(!here() && world.has("a", number + 5), "forgotten: {forgotten}");
        }
    });
}

/// The record of a block, as a quota chooses it.
fn to_go(world: &World, number: u64) -> (crate::index::RecordId, (u32, u32)) {
    let found = world.shared.index.locate(print(world, number)).unwrap();
    (found.location.record, (found.record.segment, found.record.page))
}

#[test]
fn records_that_a_quota_chose_leave_from_their_ends_up_to_what_may_not_go() {
    let place = filled();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let chosen: Vec<_> = (0..5).map(|record| to_go(&world, record * 5)).collect();
        let [leased, moved, free, hung, other] = chosen[..] else { panic!("five records") };
        let terms = LeaseTerms { until: None, tenant: 1, cap_bytes: 1 << 30 };
        let (now, mut found) = (world.shared.clock.now(), Vec::new());
        world.shared.index.match_and_lease(&[print(&world, 2)], terms, now, |_| 1, &mut found).unwrap();
        assert!(world.shared.index.hang(print(&world, 18).first()));
        let before = world.shard.space.evict_records(&[other], Class::Put, &|| true).await;
        assert_eq!((before.blocks, world.has("a", 24)), (0, true), "no task waits for it");
        // That record number is another one by now.
        let moved = (moved.0, (moved.1.0, moved.1.1 + 1));
        let gone = world.shard.space.evict_records(&[leased, moved, free, hung], Class::Put, &|| false).await;
        let here: Vec<u64> = (0..25).filter(|block| world.has("a", *block)).collect();
        assert_eq!(here, [0, 1, 2, 5, 6, 7, 8, 9, 15, 16, 17, 18, 20, 21, 22, 23, 24]);
        assert_eq!((gone.blocks, gone.records), (8, vec![free.0]));
        sums(&world);
    });
}

#[test]
fn a_segment_of_many_blocks_is_emptied_in_short_sections() {
    use crate::engine::tasks::steps::AT_ONCE;
    use kvarts_layout::format::footer::{Content, Footer};
    let place = filled();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let number = segments_of(&world)[0].1;
        let segment = world.shard.volume.segments.borrow()[&number].clone();
        let mut footer = Footer { records: world.shard.reads.listing(&segment).await.unwrap() };
        for record in &mut footer.records {
            let Content::Blocks(blocks) = &mut record.content else { continue };
            // As many as a large segment has of small blocks.
            blocks.blocks = blocks.blocks.iter().cycle().take(20_000).copied().collect();
        }
        let before = world.shared.work.evictions.done();
        assert!(world.shard.space.evict_all(&segment, &footer).await);
        let done = world.shared.work.evictions.done();
        assert!(done.steps - before.steps >= 20_000 && segment.book.live() == 0, "{done:?}");
        assert!(done.longest_steps <= 2 * AT_ONCE, "{done:?}");
    });
}

#[test]
fn an_index_that_is_full_takes_nothing_more_and_is_short_before() {
    let place = filled();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let shared = &world.shared;
        assert!(shared.index_is_full(1 << 20).is_none() && !shared.must_shrink(), "no limit");
        let memory = shared.index.memory();
        let bytes = memory.blocks as u64 * 29 + memory.record_bytes as u64;
        shared.index_room.set_limit(Some(bytes - 1));
        assert!(shared.must_shrink() && shared.index_room.is_short() && shared.index_is_full(5000).is_none());
        shared.index_room.set_limit(Some(bytes - bytes / 8));
        assert_eq!(shared.index_is_full(5000), shared.index_room.limit());
        while shared.must_shrink() {
            world.shard.space.give_back_one().await.unwrap();
        }
        assert!(shared.index_is_full(1).is_none() && !shared.index_room.is_short());
        sums(&world);
    });
}

/// How old a segment is says what recovery found in it, wherever it lies in the log. Few of many are looked at.
#[test]
fn of_many_segments_the_coldest_goes_first_wherever_it_lies() {
    let place = Place::new();
    let clock = std::sync::Arc::clone(&place.clock);
    let day = std::time::Duration::from_secs(24 * 60 * 60);
    let cold = 100..104;
    let warm = cold.clone();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let mut first = 0;
        while world.shard.volume.segments.borrow().len() < 120 {
            world.durable("a", first, 5).await;
            first += 5;
        }
        world.shard.log.finish().await;
    });
    clock.advance(4 * day);
    place.run(move |world| async move {
        recover(&world.shard.log).await.unwrap();
        let all = segments_of(&world);
        let used = all.iter().filter(|(_, segment)| !warm.contains(segment));
        let prints: Vec<_> = used.map(|(number, _)| print(&world, *number)).collect();
        world.shared.index.touch_with(&prints, world.shared.epoch(), Some(world.shared.second()));
        assert!(world.shard.space.say_free().await);
    });
    clock.advance(day);
    place.run(move |world| async move {
        recover(&world.shard.log).await.unwrap();
        world.shared.set_policy(EvictionPolicy::Lru);
        let all = segments_of(&world);
        give_back(&world, SEGMENT_BYTES).await;
        let gone = all.iter().filter(|(number, _)| !world.has("a", *number));
        let gone: std::collections::BTreeSet<u32> = gone.map(|(_, segment)| *segment).collect();
        assert!(!gone.is_empty() && gone.iter().all(|segment| cold.contains(segment)), "{gone:?}");
    });
}

/// A use makes a segment young, and no list is updated then: the task that lists segments for a choice notes what it found.
#[test]
fn segments_that_were_listed_and_found_young_are_not_listed_again() {
    let place = Place::new();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let mut first = 0;
        while world.shard.volume.segments.borrow().len() < 60 {
            world.durable("a", first, 5).await;
            first += 5;
        }
        world.shard.log.finish().await;
    });
    let clock = std::sync::Arc::clone(&place.clock);
    place.run(move |world| async move {
        recover(&world.shard.log).await.unwrap();
        world.shared.set_policy(EvictionPolicy::Lru);
        clock.advance(std::time::Duration::from_secs(60 * 60));
        let all = segments_of(&world);
        let used = all.iter().filter(|(_, segment)| *segment < 40);
        let prints: Vec<_> = used.map(|(number, _)| print(&world, *number)).collect();
        world.shared.index.touch_with(&prints, world.shared.epoch(), Some(world.shared.second()));
        let mut steps = Vec::new();
        for _ in 0..4 {
            let before = world.shared.work.evictions.done().steps;
            give_back(&world, SEGMENT_BYTES).await;
            steps.push(world.shared.work.evictions.done().steps - before);
        }
        // The first time those are looked at whose records are the oldest.
        assert!(steps[1..].iter().all(|later| *later < steps[0] / 2), "{steps:?}");
    });
}

/// Each file has an entry in its directory, and holes leave files behind.
#[test]
fn with_too_many_files_one_segment_is_emptied_instead_of_holes_in_many() {
    let place = filled();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let all = segments_of(&world);
        // Of each record the first blocks are used: by holes the others would go, in every segment.
        for first in (0..all.len() as u64).step_by(5) {
            let used: Vec<_> = (first..first + 2).map(|number| print(&world, number)).collect();
            world.shared.index.touch(&used, world.shared.epoch());
        }
        (0..40).for_each(|_| world.shared.ages.wrote(1 << 20, 256 << 20, world.shared.clock.now()));
        world.shared.set_files_cap(world.shard.volume.segments.borrow().len() as u64);
        let made = world.shard.space.next_segment().await.unwrap();
        let gone = all.iter().filter(|(number, _)| !world.has("a", *number));
        let gone: std::collections::BTreeSet<u32> = gone.map(|(_, segment)| *segment).collect();
        assert_eq!(gone.into_iter().collect::<Vec<_>>(), [made.number]);
    });
}
