//! Moves of single records: what they keep, and what may happen between the read and the switch.

use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use kvarts_layout::format::body::{Tombstone, Tombstones};
use kvarts_layout::format::record::Body;
use kvarts_layout::{Coordinate, Group};

use super::encode::Cold;
use super::gather::{Gathered, gather};
use super::relocate::head_of;
use super::relocate::{Moved, relocate, write};
use crate::engine::read::job::{self, ReadPart};
use crate::engine::read::part_read;
use crate::engine::recover::recover;
use crate::engine::recover::tests::harness::{BLOCK_BYTES, Place, World, key};
use crate::engine::space::evict::batch::Made;
use crate::engine::volume::segment::SegmentState;
use crate::index::{BlockFingerprint, Deleted, Heat, LeaseTerms, Location, Lookup, RecordId, Recovered};
use kvarts_contract::api::{
    Order, Placed, ReadEnd, ReadEvent, ReadRequest, ReadStream, Verify, read_channel,
};
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;

/// What is raw stays raw.
pub(in crate::engine) const KEEP: Cold = Cold { after: None, only: false };

/// A place with blocks 0..6 in one record and 10..12 in another, in a segment that is emptied as a whole.
pub(in crate::engine) fn two_records() -> Place {
    let place = Place { no_holes: true, ..Place::new() };
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        world.durable("a", 0, 6).await;
        world.durable("a", 10, 2).await;
    });
    place
}

pub(in crate::engine) fn print(world: &World, number: u64) -> BlockFingerprint {
    let namespace = world.namespace("a");
    world.shared.index.key().of(namespace.local, &key(number), Group(0), Coordinate::Replicated)
}

fn location(world: &World, number: u64) -> Option<Location> {
    match world.shared.index.lookup(print(world, number)) {
        Lookup::Live(at) => Some(at),
        _ => None,
    }
}

pub(in crate::engine) fn record_of(world: &World, number: u64) -> RecordId {
    location(world, number).expect("a live block").record
}

async fn gathered(world: &World, number: u64) -> Gathered {
    gather(&world.shard, record_of(world, number), &|_| true).await.unwrap().unwrap()
}

/// Deletes as a store does: out of the index, then a tombstone.
async fn delete(world: &World, number: u64) {
    assert!(matches!(world.shared.index.delete(print(world, number)), Deleted::Live { .. }));
    let namespace = world.namespace("a");
    let below = world.shard.volume.sequence.get();
    let entry =
        Tombstone { below, coordinate: None, namespace: namespace.local, group: None, key: key(number).0 };
    world.shard.volume.tombstones.borrow_mut().bury(namespace.id, &entry);
    world.say("a", Body::Tombstones(Tombstones { entries: vec![entry] })).await;
}

/// Runs a move up to the moment at which its record has its place, then lets `meanwhile` begin, then the rest of both.
async fn interrupted(world: &World, source: RecordId, meanwhile: impl Future<Output = ()>) -> Moved {
    let sequence = world.shard.volume.sequence.get();
    let mut moving = pin!(relocate(&world.shard, source, &|_| true, &KEEP));
    let early = poll_fn(|context| match moving.as_mut().poll(context) {
        Poll::Ready(moved) => Poll::Ready(Some(moved)),
        Poll::Pending if world.shard.volume.sequence.get() != sequence => Poll::Ready(None),
        Poll::Pending => Poll::Pending,
    })
    .await;
    assert!(early.is_none(), "the move ended before its record was placed");
    // Both go on: what is appended meanwhile is durable only when the move's record is.
    let (mut meanwhile, mut moved) = (Some(Box::pin(meanwhile)), None);
    poll_fn(|context| {
        if meanwhile.as_mut().is_some_and(|task| task.as_mut().poll(context).is_ready()) {
            meanwhile = None;
        }
        if moved.is_none()
            && let Poll::Ready(ended) = moving.as_mut().poll(context)
        {
            moved = Some(ended.unwrap());
        }
        if meanwhile.is_none() && moved.is_some() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    moved.expect("waited for it")
}

#[test]
fn a_move_keeps_everything_but_the_place() {
    let place = two_records();
    let after = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let index = &world.shared.index;
        index.touch(&[print(&world, 2)], 9);
        let heat = index.get(print(&world, 2)).unwrap().heat;
        let before = gathered(&world, 0).await;
        let (from, other) = (world.at("a", 0), world.at("a", 10));
        let source = before.source;
        let (body, digests): (_, Vec<_>) =
            (before.body.clone(), before.blocks.iter().map(|one| one.digests.clone()).collect());
        drop(before);
        let moved = relocate(&world.shard, source, &|_| true, &KEEP).await.unwrap();
        assert_eq!((moved.blocks, moved.gone, moved.damaged), (6, 0, 0));
        assert_eq!(index.records().get(source), None, "the old record is forgotten");
        let after = gathered(&world, 0).await;
        assert_eq!(after.body, body);
        assert_eq!(after.blocks.iter().map(|one| one.digests.clone()).collect::<Vec<_>>(), digests);
        assert_eq!(index.get(print(&world, 2)).unwrap().heat, heat);
        assert_ne!(world.at("a", 0), from);
        assert_eq!(world.at("a", 10), other, "another record was touched");
        drop(after);
        world.contents()
    });
    let (report, contents) = place.recovered();
    assert_eq!((contents, report.duplicates), (after, 6), "recovery takes the newer copy");
}

#[test]
fn only_wanted_blocks_are_moved_and_their_record_is_split_where_one_is_missing_in_a_chain() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let (source, stays) = (record_of(&world, 0), world.at("a", 1));
        let moved = relocate(&world.shard, source, &|block| block != 1, &KEEP).await.unwrap();
        assert_eq!(moved.blocks, 5);
        assert_eq!(world.at("a", 1), stays);
        // The prefix of these blocks is unknown: what is left shares a record.
        assert_eq!(world.at("a", 0), world.at("a", 5));
        world.contents();
    });
}

#[test]
fn a_block_that_is_deleted_before_the_record_has_its_place_is_not_in_it() {
    let place = two_records();
    let expect = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let taken = gathered(&world, 0).await;
        let head = head_of(&world.shard.volume, &taken, &(0..6));
        delete(&world, 3).await;
        let moved = write(&world.shard, &head, &taken.blocks.iter().collect::<Vec<_>>()).await.unwrap();
        assert_eq!((moved.blocks, moved.gone), (5, 1));
        assert!(!world.has("a", 3));
        drop(taken);
        world.contents()
    });
    let (report, contents) = place.recovered();
    assert_eq!(contents, expect, "a deleted block came back, or another went");
    assert_eq!(report.blocks, 7);
}

#[test]
fn a_block_that_is_only_buried_is_not_moved() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let taken = gathered(&world, 0).await;
        let head = head_of(&world.shard.volume, &taken, &(0..6));
        let entry = Tombstone {
            below: world.shard.volume.sequence.get(),
            coordinate: None,
            namespace: 0,
            group: None,
            key: key(2).0,
        };
        // As a delete does that has chosen its sequence and not yet reached the index.
        world.shard.volume.tombstones.borrow_mut().bury(world.namespace("a").id, &entry);
        let moved = write(&world.shard, &head, &taken.blocks.iter().collect::<Vec<_>>()).await.unwrap();
        assert_eq!((moved.blocks, moved.gone), (5, 1));
    });
}

#[test]
fn a_delete_between_the_place_and_the_switch_wins() {
    let place = two_records();
    let expect = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let source = record_of(&world, 0);
        let moved = interrupted(&world, source, delete(&world, 3)).await;
        assert_eq!((moved.blocks, moved.gone), (5, 1));
        assert!(!world.has("a", 3) && world.has("a", 4));
        world.contents()
    });
    let (report, contents) = place.recovered();
    assert_eq!(contents, expect);
    assert!(report.deleted >= 1);
}

#[test]
fn a_block_that_was_put_anew_meanwhile_stays_where_the_put_has_it() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let (source, newer) = (record_of(&world, 0), location(&world, 10).unwrap());
        let index = &world.shared.index;
        let old = location(&world, 3).unwrap();
        let moved = interrupted(&world, source, async {
            index.replace_location(print(&world, 3), old, newer).unwrap();
        })
        .await;
        assert_eq!((moved.blocks, moved.gone), (5, 1));
        assert_eq!(location(&world, 3), Some(newer));
    });
}

#[test]
fn a_record_number_is_not_reused_while_its_blocks_are_moved() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let source = record_of(&world, 10);
        let index = &world.shared.index;
        interrupted(&world, source, async {
            for number in [10, 11] {
                if let Deleted::Live { location, left } = index.delete(print(&world, number)) {
                    world.shared.free_if_empty(location.record, left);
                }
            }
            let info = index.records().get(source).expect("held");
            assert!((0..64).all(|_| index.records().insert(info).unwrap() != source));
        })
        .await;
        assert_eq!(index.records().get(source), None);
    });
}

#[test]
fn a_damaged_block_is_quarantined_and_the_others_are_moved() {
    let place = two_records();
    let at = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let record = world.shared.index.records().get(record_of(&world, 0)).unwrap();
        (record.segment, (u64::from(record.page) + u64::from(record.header_pages)) * 4096 + 2 * BLOCK_BYTES)
    });
    place.damage(&place.segment(at.0), at.1 + 17, &[0xff]);
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let moved = relocate(&world.shard, record_of(&world, 0), &|_| true, &KEEP).await.unwrap();
        assert_eq!((moved.blocks, moved.damaged), (5, 1));
        assert_eq!(world.shared.index.lookup(print(&world, 2)), Lookup::Quarantined);
        assert_eq!(world.shared.counters.counts().blocks_quarantined, 1);
    });
}

#[test]
fn a_lease_follows_its_block_and_a_reader_keeps_the_old_segment() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let (index, source) = (&world.shared.index, record_of(&world, 0));
        let (now, mut found) = (world.shared.clock.now(), Vec::new());
        let terms = LeaseTerms { until: None, tenant: 1, cap_bytes: 1 << 30 };
        index.match_and_lease(&[print(&world, 4)], terms, now, |_| 1, &mut found).unwrap();
        let from = world.at("a", 4).unwrap();
        let segment = Rc::clone(&world.shard.volume.segments.borrow()[&from.0]);
        let reading = crate::engine::volume::segment::Hold::new(&segment);
        relocate(&world.shard, source, &|_| true, &KEEP).await.unwrap();
        assert_ne!(world.at("a", 4), Some(from));
        let evicted = index.try_evict(print(&world, 4), location(&world, 4).unwrap(), now);
        assert_eq!(evicted, crate::index::Eviction::Busy);
        assert_eq!(segment.readers.get(), 1, "only the reader is left");
        drop(reading);
    });
}

/// A read of blocks, looked up and sent to its shard, but not begun there.
fn sent(world: &World, numbers: std::ops::Range<u64>, verify: Verify) -> (ReadStream, ReadPart) {
    sent_into(world, numbers, verify, |into| into)
}

fn sent_into(
    world: &World,
    numbers: std::ops::Range<u64>,
    verify: Verify,
    into: impl Fn(Placed) -> Placed,
) -> (ReadStream, ReadPart) {
    let (count, namespace) = (numbers.end - numbers.start, world.namespace("a"));
    let shape = namespace.shape(Group(0), Coordinate::Replicated).unwrap();
    let bytes = (count * BLOCK_BYTES) as usize;
    let memory = SharedBuf::new(&Region::anonymous(bytes).unwrap(), 0, bytes).unwrap();
    let request = ReadRequest {
        namespace: namespace.id,
        group: Group(0),
        coordinate: Coordinate::Replicated,
        keys: numbers.map(key).collect(),
        layers: None,
        order: Order::Layers,
        into: into(Placed::blocks(&shape, memory, count as u32).unwrap()),
        verify,
        class: Class::Foreground,
        deadline: None,
    };
    let (sink, stream) = read_channel();
    let mut parts = job::begin(&world.shared, request, None, sink).unwrap();
    (stream, parts.pop().expect("all of it is in one shard"))
}

async fn end_of(world: &World, (stream, part): (ReadStream, ReadPart)) -> ReadEnd {
    part_read::run(&|_| Some(Rc::clone(&world.shard.reads)), part, 1 << 20, None).await;
    loop {
        if let ReadEvent::End(end) = stream.next_blocking() {
            return end;
        }
    }
}

#[test]
fn a_block_that_moves_after_it_was_looked_up_is_found_where_it_was() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let (from, _) = (world.at("a", 0).unwrap(), world.at("a", 10).unwrap());
        let reading = sent(&world, 0..6, Verify::Always);
        for number in [0, 10] {
            relocate(&world.shard, record_of(&world, number), &|_| true, &KEEP).await.unwrap();
        }
        // The segment holds nothing any more, and a put needs room.
        let made = world.shard.space.make_room().await;
        assert!(!matches!(made, Made::Segment(_)), "it was emptied before the read came");
        assert_eq!(world.shard.volume.segments.borrow()[&from.0].state.get(), SegmentState::Sealed);
        let end = end_of(&world, reading).await;
        assert_eq!((end.usable_blocks, end.failures), (6, Vec::new()));
        let Made::Segment(segment) = world.shard.space.make_room().await else { panic!("no reader is left") };
        assert_eq!(segment.number, from.0);
    });
}

/// The first blocks leave and are put again, before a read comes that was sent to where they were.
async fn put_anew(world: &World) {
    let before = record_of(world, 0);
    let class = world.shared.index.records().get(before).unwrap().class;
    for number in 0..6 {
        let at = location(world, number).unwrap();
        let left = world.shared.index.try_evict(print(world, number), at, world.shared.clock.now());
        let crate::index::Eviction::Evicted { left } = left else { panic!("{left:?}") };
        world.shared.free_if_empty(at.record, left);
    }
    let written = world.durable("a", 0, 6).await;
    let info = written.info(0, 6, class, 0).unwrap();
    // A number that became free comes again, sooner or later.
    let mut numbers = (0..100).map(|_| world.shared.index.records().insert(info).unwrap());
    let record = numbers.find(|number| *number == before).expect("it is free");
    let mut found = world.shared.index.gathering(6);
    for block in 0..6u16 {
        let location = Location { record, block };
        found.push(Recovered { print: print(world, block.into()), location, heat: Heat::default() });
    }
    world.shared.index.insert_live(&mut found, &mut Vec::new()).unwrap();
}

#[test]
fn a_sound_block_under_the_number_of_a_record_that_left_stays_in_service() {
    let place = two_records();
    let (segment, page) = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        world.at("a", 0).unwrap()
    });
    // A read that is sent there finds no header.
    place.damage(&place.segment(segment), u64::from(page) * 4096, &[7; 64]);
    place.run(move |world| async move {
        recover(&world.shard.log).await.unwrap();
        let reading = sent(&world, 0..6, Verify::Always);
        put_anew(&world).await;
        let end = end_of(&world, reading).await;
        let missed: Vec<_> = (0..6).map(|number| (number, Reason::NotHere(key(number.into())))).collect();
        assert_eq!((end.usable_blocks, end.failures), (0, missed));
        assert_eq!(world.shared.counters.counts().blocks_quarantined, 0);
        let again = end_of(&world, sent(&world, 0..6, Verify::Always)).await;
        assert_eq!((again.usable_blocks, again.failures), (6, Vec::new()));
    });
}

/// The place is the same, the segment's generation is not, and the record there is not written yet.
#[test]
fn a_segment_that_is_written_anew_proves_nothing_of_what_was_in_it() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let reading = sent(&world, 0..6, Verify::Always);
        let (number, _) = world.at("a", 0).unwrap();
        let segment = Rc::clone(&world.shard.volume.segments.borrow()[&number]);
        segment.begin(world.shard.volume.sequence.get());
        let end = end_of(&world, reading).await;
        let missed: Vec<_> = (0..6).map(|number| (number, Reason::NotHere(key(number.into())))).collect();
        assert_eq!((end.usable_blocks, end.failures), (0, missed));
        assert_eq!(world.shared.counters.counts().blocks_quarantined, 0);
    });
}

#[test]
fn what_has_no_place_in_memory_is_not_announced() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        for verify in [Verify::Always, Verify::Never] {
            let (stream, part) = sent_into(&world, 0..6, verify, Placed::without_memory);
            let end = end_of(&world, (stream, part)).await;
            assert!(matches!(&*end.failures, [(0, Reason::Bug(_)), ..]), "{:?}", end.failures);
            assert_eq!((end.usable_blocks, end.failures.len()), (0, 6));
        }
        assert_eq!(world.shared.counters.counts().blocks_quarantined, 0);
    });
}

#[test]
fn a_read_that_comes_when_its_segment_is_gone_is_told_of_misses() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let reading = sent(&world, 0..6, Verify::Always);
        for number in [0, 1, 2, 3, 4, 5, 10, 11] {
            let at = location(&world, number).unwrap();
            world.shared.index.try_evict(print(&world, number), at, world.shared.clock.now());
        }
        let Made::Segment(segment) = world.shard.space.make_room().await else { panic!("it holds nothing") };
        world.shard.space.remove_segment(&segment).await.unwrap();
        let end = end_of(&world, reading).await;
        let missed: Vec<_> = (0..6).map(|number| (number, Reason::NotHere(key(number.into())))).collect();
        assert_eq!((end.usable_blocks, end.failures), (0, missed));
    });
}

#[test]
fn a_block_that_left_a_segment_with_holes_is_read_there_only_if_it_is_whole() {
    let place = two_records();
    let at = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let record = world.shared.index.records().get(record_of(&world, 0)).unwrap();
        let payload = (u64::from(record.page) + u64::from(record.header_pages)) * 4096;
        (record.segment, payload + 3 * BLOCK_BYTES)
    });
    // As a hole would read.
    place.damage(&place.segment(at.0), at.1, &[0; BLOCK_BYTES as usize]);
    place.run(move |world| async move {
        recover(&world.shard.log).await.unwrap();
        let reading = sent(&world, 0..6, Verify::Never);
        world.shard.volume.segments.borrow()[&at.0].set_holed();
        let mut moving = Vec::new();
        for number in 0..6 {
            // Put anew elsewhere, whatever became of the old place.
            let old = location(&world, number).unwrap();
            let new = Location { record: record_of(&world, 10), block: number as u16 + 2 };
            moving.push(world.shared.index.replace_location(print(&world, number), old, new).unwrap());
        }
        let end = end_of(&world, reading).await;
        assert_eq!(end.failures, [(3, Reason::NotHere(key(3)))]);
        assert_eq!(world.shared.counters.counts().blocks_quarantined, 0, "the place proves nothing");
    });
}

#[test]
fn a_move_carries_the_expiry_that_was_set_last() {
    let place = Place::new();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let now = world.shared.clock.unix_millis();
        world.append_until("a", 0, 2, now + 60_000).await;
        let written = world.append_until("a", 10, 2, now + 60_000).await;
        world.shard.log.make_durable(&written).await.unwrap();
    });
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let later = world.shared.expiry_step(world.shared.clock.unix_millis() + 90_000);
        world.shared.index.records().set_expires(record_of(&world, 10), later);
        for number in [0, 10] {
            relocate(&world.shard, record_of(&world, number), &|_| true, &KEEP).await.unwrap();
        }
        let now = world.shared.clock.unix_millis();
        assert_eq!(gathered(&world, 0).await.body.expires_ms, now + 60_000);
        assert_eq!(gathered(&world, 10).await.body.expires_ms, now + 90_000);
    });
}
