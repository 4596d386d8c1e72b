//! What is lent is proven and held on the shard's executor, whatever happens to its blocks meanwhile.

use std::collections::BTreeMap;
use std::ops::Range;
use std::task::{Context, Waker};

use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::{Coordinate, Group, NamespaceId};

use super::*;
use crate::engine::compact::relocate::relocate;
use crate::engine::compact::tests::{KEEP, print, record_of, two_records};
use crate::engine::recover::recover;
use crate::engine::recover::tests::harness::{BLOCK_BYTES, Place, World, contents_of, key};
use crate::engine::space::evict::batch::Made;
use crate::engine::volume::segment::SegmentState;
use crate::index::{LeaseTerms, Location};

/// All blocks of the two records.
const ALL: [u64; 8] = [0, 1, 2, 3, 4, 5, 10, 11];

fn request(namespace: NamespaceId, numbers: Range<u64>) -> LendRequest {
    LendRequest {
        namespace,
        group: Group(0),
        coordinate: Coordinate::Replicated,
        keys: numbers.map(key).collect(),
        layers: None,
        class: Class::Foreground,
        deadline: None,
    }
}

/// A loan that was looked up and sent to its shard, but not begun there.
struct Sent {
    job: Arc<LendJob>,
    part: LendPart,
    answer: Answer,
}

fn sent(world: &World, numbers: Range<u64>) -> Sent {
    send(world, request(world.namespace("a").id, numbers))
}

fn send(world: &World, request: LendRequest) -> Sent {
    let mut begun = begin(&world.shared, request).unwrap_or_else(|why| panic!("{why}"));
    let ((_, part), answer) = (begun.parts.pop().unwrap(), begun.answers.pop().unwrap());
    assert!(begun.parts.is_empty(), "all of it is in one shard");
    Sent { job: begun.job, part, answer }
}

async fn proved(world: &World, sent: Sent) -> Result<(PinnedExtents, HeldExtents), NotLent> {
    let Sent { job, part, mut answer } = sent;
    let held = prove(&world.shard.reads, part, None).await;
    let proven = answer.try_take().expect("an answer").expect("it was not abandoned")?;
    Ok((job.lend(vec![proven])?, held.expect("what is lent is held")))
}

async fn lent(world: &World, numbers: Range<u64>) -> (PinnedExtents, HeldExtents) {
    let sent = sent(world, numbers);
    proved(world, sent).await.unwrap_or_else(|why| panic!("{why}"))
}

fn evict(world: &World, numbers: &[u64]) {
    for &number in numbers {
        let Lookup::Live(at) = world.shared.index.lookup(print(world, number)) else { panic!("{number}") };
        world.shared.index.try_evict(print(world, number), at, world.shared.clock.now());
    }
}

/// The chunks of what is lent, read through its descriptors: by block.
fn chunks_of(lent: &PinnedExtents) -> BTreeMap<u32, Vec<u8>> {
    let mut chunks = BTreeMap::new();
    for layer in lent.layers() {
        for chunk in &layer.chunks {
            let range = layer.ranges[chunk.range as usize];
            let mut memory = vec![0; range.bytes as usize + 4096];
            let skew = memory.as_ptr().align_offset(4096);
            let bytes = &mut memory[skew..skew + range.bytes as usize];
            let file = &lent.files()[range.file as usize];
            assert_eq!(rustix::io::pread(file, &mut *bytes, range.offset), Ok(bytes.len()));
            let chunk_bytes = bytes[chunk.at as usize..(chunk.at + chunk.bytes) as usize].to_vec();
            assert_eq!(crc32fast::hash(&chunk_bytes), chunk.digest, "block {}", chunk.ordinal);
            chunks.insert(chunk.ordinal, chunk_bytes);
        }
    }
    chunks
}

fn expected(numbers: Range<u64>) -> BTreeMap<u32, Vec<u8>> {
    (0..).zip(numbers.map(|number| vec![(number % 251) as u8 + 1; BLOCK_BYTES as usize])).collect()
}

#[test]
fn what_was_lent_is_neither_written_anew_nor_given_back_until_it_is_returned() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let (number, _) = world.at("a", 0).unwrap();
        let (lent, held) = lent(&world, 0..6).await;
        let segment = Rc::clone(&world.shard.volume.segments.borrow()[&number]);
        let is = |readers| segment.readers.get() == readers && segment.state.get() == SegmentState::Sealed;
        assert!(is(1));
        // Everything in it is gone, and its space is wanted: by holes, by emptying, by removing.
        evict(&world, &ALL);
        assert!(!matches!(world.shard.space.make_room().await, Made::Segment(_)));
        assert!(matches!(world.shard.space.reclaim(true).await.unwrap_err(), Reason::NoSpace(_)));
        assert!(world.shard.space.give_back_one().await.is_err());
        assert!(is(1) && !segment.is_holed());
        assert_eq!(chunks_of(&lent), expected(0..6));
        let mut returned = pin!(held.until_given_back());
        assert!(returned.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert!(is(1));
        drop(lent);
        returned.await;
        assert!(is(0));
        let Made::Segment(empty) = world.shard.space.make_room().await else {
            panic!("no reader holds it any more")
        };
        assert_eq!(empty.number, number);
    });
}

#[test]
fn pages_of_what_was_lent_are_not_punched_until_it_is_returned() {
    let place = Place { no_holes: false, ..two_records() };
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let (number, _) = world.at("a", 0).unwrap();
        let segment = Rc::clone(&world.shard.volume.segments.borrow()[&number]);
        let (lent, held) = lent(&world, 0..6).await;
        // One block is leased, so the segment is not emptied as a whole.
        let (now, mut found) = (world.shared.clock.now(), Vec::new());
        let terms = LeaseTerms { until: None, tenant: 1, cap_bytes: 1 << 30 };
        world.shared.index.match_and_lease(&[print(&world, 0)], terms, now, |_| 1, &mut found).unwrap();
        evict(&world, &ALL[1..]);
        assert!(matches!(world.shard.space.make_room().await, Made::Nothing));
        assert!(!segment.is_holed());
        assert_eq!(chunks_of(&lent), expected(0..6));
        drop(lent);
        held.until_given_back().await;
        assert!(matches!(world.shard.space.make_room().await, Made::Room));
        assert!(segment.is_holed());
    });
}

#[test]
fn an_answer_that_nobody_takes_holds_nothing() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let Sent { part, answer, .. } = sent(&world, 0..6);
        drop(answer);
        let held = prove(&world.shard.reads, part, None).await;
        held.expect("it was proven").until_given_back().await;
        // And one that was answered before its asker left.
        let Sent { part, answer, .. } = sent(&world, 0..6);
        let held = prove(&world.shard.reads, part, None).await.expect("it was proven");
        drop(answer);
        held.until_given_back().await;
        assert!(world.shard.volume.segments.borrow().values().all(|segment| segment.readers.get() == 0));
    });
}

#[test]
fn blocks_that_move_after_they_were_looked_up_are_lent_where_they_were() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let sent = sent(&world, 0..6);
        for number in [0, 10] {
            relocate(&world.shard, record_of(&world, number), &|_| true, &KEEP).await.unwrap();
        }
        // The segment holds nothing any more, and room is wanted. The loan is on its way to the segment.
        assert!(!matches!(world.shard.space.make_room().await, Made::Segment(_)));
        let (lent, held) = proved(&world, sent).await.unwrap();
        assert!(!matches!(world.shard.space.make_room().await, Made::Segment(_)));
        assert_eq!(chunks_of(&lent), expected(0..6));
        drop(lent);
        held.until_given_back().await;
        assert!(matches!(world.shard.space.make_room().await, Made::Segment(_)));
    });
}

#[test]
fn what_is_gone_before_it_is_held_is_not_lent() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let early = sent(&world, 0..6);
        let late = sent(&world, 0..6);
        evict(&world, &ALL);
        let Made::Segment(segment) = world.shard.space.make_room().await else { panic!("it holds nothing") };
        // Written anew under the next generation: other blocks are where these were.
        segment.begin(world.shard.volume.sequence.get());
        assert!(proved(&world, early).await.is_err());
        segment.state.set(SegmentState::Free);
        world.shard.space.remove_segment(&segment).await.unwrap();
        assert_eq!(proved(&world, late).await.unwrap_err(), NotLent::Reason(Reason::NotHere(key(0))));
    });
}

#[test]
fn the_same_blocks_in_another_record_at_the_same_place_are_not_taken_for_those() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let (number, _) = world.at("a", 0).unwrap();
        let sent = sent(&world, 0..5);
        evict(&world, &ALL);
        assert!(matches!(world.shard.space.make_room().await, Made::Segment(_)));
        // One block fewer: what the plan says of its bytes is not so any more.
        world.durable("a", 0, 5).await;
        let segment = Rc::clone(&world.shard.volume.segments.borrow()[&number]);
        assert_eq!(segment.state.get(), SegmentState::Open, "the same one, rewritten");
        assert_eq!(proved(&world, sent).await.unwrap_err(), NotLent::Reason(Reason::NotHere(key(0))));
        assert_eq!(segment.readers.get(), 0);
    });
}

#[test]
fn a_record_that_a_block_has_left_is_not_lent_from_a_segment_with_holes() {
    let place = two_records();
    place.run(move |world| async move {
        recover(&world.shard.log).await.unwrap();
        let (number, _) = world.at("a", 0).unwrap();
        let (here, moved, left) = (sent(&world, 0..6), sent(&world, 0..6), sent(&world, 0..6));
        world.shard.volume.segments.borrow()[&number].set_holed();
        assert!(proved(&world, here).await.is_ok(), "all of them are where they were");
        let Lookup::Live(old) = world.shared.index.lookup(print(&world, 3)) else { panic!("a live block") };
        let new = Location { record: record_of(&world, 10), block: 2 };
        world.shared.index.replace_location(print(&world, 3), old, new).unwrap();
        assert!(matches!(proved(&world, moved).await, Err(NotLent::Reason(Reason::Busy(_)))));
        world.shared.index.replace_location(print(&world, 3), new, old).unwrap();
        evict(&world, &[3]);
        assert_eq!(proved(&world, left).await.unwrap_err(), NotLent::Reason(Reason::NotHere(key(3))));
        assert_eq!(world.shard.volume.segments.borrow()[&number].readers.get(), 0);
    });
}

#[test]
fn a_header_that_is_not_sound_is_told_and_its_blocks_stay_in_service() {
    let place = two_records();
    let (segment, at) = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let (segment, page) = world.at("a", 0).unwrap();
        (segment, u64::from(page) * PAGE_BYTES)
    });
    let file = place.segment(segment);
    let byte = contents_of(&file)[at as usize + 200] ^ 1;
    // Sealed by the run before, so that opening reads no header.
    place.damage(&file, at + 200, &[byte]);
    place.run(move |world| async move {
        recover(&world.shard.log).await.unwrap();
        let sent = sent(&world, 0..6);
        let why = proved(&world, sent).await.unwrap_err();
        let NotLent::Reason(Reason::Header { segment: found, offset, .. }) = &why else { panic!("{why}") };
        assert_eq!((*found, *offset), (segment, at));
        assert!((0..6).all(|number| world.has("a", number)));
        assert_eq!(world.shared.counters.counts().blocks_quarantined, 0);
        assert_eq!(world.shard.volume.segments.borrow()[&segment].readers.get(), 0);
        let (lent, _held) = lent(&world, 10..12).await;
        assert_eq!(chunks_of(&lent), expected(10..12), "another record");
    });
}

#[test]
fn another_block_in_the_place_of_one_is_not_lent_for_it() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        // As a fingerprint that two keys share would have it.
        let Lookup::Live(old) = world.shared.index.lookup(print(&world, 3)) else { panic!("a live block") };
        let new = Location { record: record_of(&world, 10), block: 0 };
        world.shared.index.replace_location(print(&world, 3), old, new).unwrap();
        for _ in 0..2 {
            // The second time the header is known.
            let sent = sent(&world, 3..4);
            assert_eq!(proved(&world, sent).await.unwrap_err(), NotLent::Reason(Reason::NotHere(key(3))));
        }
    });
}

#[test]
fn a_deadline_that_passes_while_headers_are_read_ends_it_and_nothing_is_held() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let Sent { part, mut answer, .. } = sent(&world, 0..6);
        assert!(prove(&world.shard.reads, part, Some(Box::pin(async {}))).await.is_none());
        let answer = answer.try_take().expect("an answer").expect("it was not abandoned");
        assert_eq!(answer.unwrap_err(), NotLent::Reason(Reason::DeadlinePassed));
        assert!(world.shard.volume.segments.borrow().values().all(|segment| segment.readers.get() == 0));
    });
}

#[test]
fn what_is_lent_counts_as_used_once_and_what_is_refused_does_not() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let uses = || world.shared.index.locate(print(&world, 0)).unwrap().heat.frequency;
        assert_eq!(uses(), 0);
        let mut more = request(world.namespace("a").id, 0..6);
        more.keys.push(key(99));
        assert!(begin(&world.shared, more).is_err());
        let late = sent(&world, 0..6);
        prove(&world.shard.reads, late.part, Some(Box::pin(async {}))).await;
        assert_eq!(uses(), 0);
        drop(lent(&world, 0..6).await);
        assert_eq!(uses(), 1);
        let looking = LendRequest { class: Class::Background, ..request(world.namespace("a").id, 0..6) };
        drop(proved(&world, send(&world, looking)).await.unwrap());
        assert_eq!(uses(), 1);
    });
}

#[test]
fn many_headers_come_in_with_little_memory() {
    let place = Place::new();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        for number in 0..20 {
            world.durable("a", number, 1).await;
        }
    });
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        // All but a page of the memory is taken.
        let usage = world.shard.volume.arena.usage();
        let _taken = world.shard.volume.arena.try_take(usage.total - usage.used - 4096).expect("it is free");
        let (lent, held) = lent(&world, 0..20).await;
        assert_eq!(chunks_of(&lent), expected(0..20));
        assert_eq!(lent.layers()[0].ranges.len(), 20, "a record each");
        assert!(lent.files().len() < 5, "each file once: {}", lent.files().len());
        drop(lent);
        held.until_given_back().await;
    });
}
