//! Batches of pages: against a scripted store, where each answer comes when the test says so, and on real
//! directories with damage on disk.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, KvStore, LeaseId, MAX_REQUEST_BLOCKS, Placed, Presence, PutReply, ReadEnd, ReadEvent,
    ReadRequest, ReadSink,
};
use kvarts_contract::batch::{
    BatchId, BatchKind, Block, CANCELLED, Completion, EventFds, Lane, Memory, Pages, PagesOptions, Terms,
};
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::{Error, Kind, Reason, SpaceCause};
use kvarts_layout::identity::{Arrangement, Quantisation, TenantSalt};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId};
use kvarts_store::engine::Options;
use kvarts_store::home::{Home, HomeOptions, RuntimeChoice};
use kvarts_store::io::IoChoice;
use kvarts_tests::scripted::Scripted;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const PAGE: usize = 4096;

fn readable(fd: BorrowedFd<'_>, wait_s: i64) -> bool {
    let wait = Timespec { tv_sec: wait_s, tv_nsec: 0 };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&wait)).unwrap() > 0
}

fn key(n: u32) -> BlockKey {
    let mut key = [7; 32];
    key[..4].copy_from_slice(&n.to_le_bytes());
    BlockKey(key)
}

fn memory(pages: usize) -> SharedBuf {
    SharedBuf::new(&Region::anonymous(pages * PAGE).unwrap(), 0, pages * PAGE).unwrap()
}

fn placed(memory: &SharedBuf) -> Placed {
    let blocks = (memory.len() / PAGE) as u32;
    Placed::blocks(&BlockShape::opaque(PAGE as u64).unwrap(), memory.clone(), blocks).unwrap()
}

/// The bytes of page `n`.
fn page(n: u32) -> Vec<u8> {
    let mut state = u64::from(n) * 2 + 1;
    let step = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..PAGE).map(step).collect()
}

fn pages_of(names: &[u32]) -> SharedBuf {
    let memory = memory(names.len());
    for (place, n) in names.iter().enumerate() {
        memory.copy_in(place * PAGE, &page(*n));
    }
    memory
}

fn page_at(memory: &SharedBuf, place: usize) -> Vec<u8> {
    memory.slice(place * PAGE, PAGE).unwrap().to_vec()
}

fn not_here(n: u32) -> Result<(), Reason> {
    Err(Reason::NotHere(key(n)))
}

fn drained(pages: &Pages) -> Vec<Completion> {
    let mut out = Vec::new();
    assert_eq!(pages.drain(&mut out), out.len());
    out
}

fn scripted(change: impl FnOnce(&mut PagesOptions)) -> (Arc<Scripted>, Pages) {
    let store = Arc::new(Scripted::default());
    let mut options = PagesOptions::new(NamespaceId::default());
    change(&mut options);
    let pages = Pages::new(Arc::clone(&store) as Arc<dyn KvStore>, options).unwrap();
    (store, pages)
}

#[test]
fn the_eventfd_is_readable_exactly_while_completions_wait() {
    let (store, pages) = scripted(|_| ());
    let silent = || !readable(pages.event_fd(Lane::Load), 0);
    let keys = [key(1), key(2), key(3)];
    let get = pages.submit_get(&keys, &placed(&memory(3))).unwrap();
    let put = pages.submit_put(&keys, &placed(&memory(3))).unwrap();
    assert!(silent());
    let (_, sink) = store.reads.lock().unwrap().pop().unwrap();
    (0..3).for_each(|block| sink.send(ReadEvent::Block(block)));
    assert!(silent(), "a block that arrived is no completion");
    let failures = vec![(1, Reason::NotHere(key(2)))];
    sink.send(ReadEvent::End(ReadEnd { failures, held_bytes: 9, ..ReadEnd::default() }));
    assert!(silent(), "a device still has the memory");
    sink.send(ReadEvent::Released);
    assert!(!silent());
    let (_, reply) = store.puts.lock().unwrap().pop().unwrap();
    let outcomes = vec![BlockOutcome::Stored, BlockOutcome::InFlight, BlockOutcome::AlreadyThere];
    reply.send(Ok(PutReply { outcomes })).unwrap();
    let found = drained(&pages);
    assert!(silent());
    assert_eq!(found.iter().map(|one| one.id).collect::<Vec<_>>(), [put, get]);
    assert_eq!(found[0].results, [Ok(()), Err(Reason::InFlight), Ok(())]);
    assert_eq!((found[0].written, found[0].usable_prefix()), (1, 1));
    assert_eq!(found[1].results, [Ok(()), not_here(2), Ok(())]);
    assert_eq!(found[1].error(), Some(&Reason::NotHere(key(2))));
    assert_eq!((drained(&pages), pages.under_way()), (vec![], 0));
}

#[test]
fn a_caller_that_read_the_eventfd_itself_is_rung_for_the_next_completion() {
    let (store, pages) = scripted(|_| ());
    *store.presence.lock().unwrap() = vec![Presence::Here];
    pages.submit_exists(&[key(1)]).unwrap();
    let fd = pages.event_fd(Lane::Lookup);
    assert_eq!(rustix::io::read(fd, &mut [0; 8]), Ok(8));
    assert_eq!(rustix::io::read(fd, &mut [0; 8]), Err(rustix::io::Errno::AGAIN));
    pages.submit_exists(&[key(1)]).unwrap();
    assert!(readable(fd, 0));
    assert_eq!(drained(&pages).len(), 2);
    assert!(!readable(fd, 0));
}

#[test]
fn each_lane_has_its_own_eventfd_and_is_drained_by_itself() {
    let (store, pages) = scripted(|options| options.event_fds = EventFds::PerLane);
    *store.presence.lock().unwrap() = vec![Presence::Here, Presence::Pending, Presence::Absent];
    let states = || Lane::ALL.map(|lane| readable(pages.event_fd(lane), 0));
    let keys = [key(1), key(2), key(3)];
    let asked = pages.submit_exists(&keys).unwrap();
    pages.submit_put(&keys[..1], &placed(&memory(1))).unwrap();
    pages.submit_get(&keys[..1], &placed(&memory(1))).unwrap();
    assert_eq!(states(), [false, true, false]);
    store.reads.lock().unwrap()[0].1.send(ReadEvent::End(ReadEnd::default()));
    assert_eq!(states(), [false, true, true]);
    let mut out = Vec::new();
    assert_eq!(pages.drain_lane(Lane::Store, &mut out), 0);
    assert_eq!(pages.drain_lane(Lane::Lookup, &mut out), 1);
    assert_eq!(states(), [false, false, true]);
    let results = vec![Ok(()), Err(Reason::InFlight), not_here(3)];
    let exists = Completion { id: asked, kind: BatchKind::Exists, results, written: 0, lease: None };
    assert_eq!((out[0].usable_prefix(), &out[0]), (1, &exists));
    assert_eq!(pages.drain_lane(Lane::Load, &mut out), 1);
    assert_eq!((states(), pages.under_way()), ([false; 3], 1));
}

#[test]
fn one_eventfd_stays_readable_until_the_last_lane_is_drained() {
    let (store, pages) = scripted(|_| ());
    *store.presence.lock().unwrap() = vec![Presence::Here];
    pages.submit_exists(&[key(1)]).unwrap();
    pages.submit_get(&[key(1)], &placed(&memory(1))).unwrap();
    store.reads.lock().unwrap()[0].1.send(ReadEvent::End(ReadEnd::default()));
    let mut out = Vec::new();
    pages.drain_lane(Lane::Load, &mut out);
    assert!(readable(pages.event_fd(Lane::Load), 0));
    pages.drain_lane(Lane::Lookup, &mut out);
    assert!(!readable(pages.event_fd(Lane::Load), 0));
}

#[test]
fn for_a_caller_with_room_for_one_completions_come_by_the_order_of_their_batches() {
    let (store, pages) = scripted(|options| options.batches_max = 2);
    *store.presence.lock().unwrap() = vec![Presence::Here];
    let get = pages.submit_get(&[key(1)], &placed(&memory(1))).unwrap();
    let asked = pages.submit_exists(&[key(1)]).unwrap();
    assert!(pages.submit_exists(&[key(1)]).is_err(), "no seat");
    store.reads.lock().unwrap()[0].1.send(ReadEvent::End(ReadEnd::default()));
    assert_eq!(pages.drain_one().unwrap().id, get, "the lane of its kind does not count");
    assert!(readable(pages.event_fd(Lane::Load), 0), "another one waits");
    assert_eq!(pages.under_way(), 1);
    assert_eq!(pages.drain_one().unwrap().id, asked);
    assert!(!readable(pages.event_fd(Lane::Load), 0));
    assert_eq!((pages.drain_one(), pages.under_way()), (None, 0));
}

#[test]
fn what_can_be_refused_at_once_is_and_takes_no_seat() {
    let (store, pages) = scripted(|options| options.batches_max = 2);
    let reason = |refused: Result<BatchId, Error>| refused.unwrap_err().0;
    let two = placed(&memory(2));
    assert_eq!(reason(pages.submit_put(&[], &two)), Reason::Empty);
    assert_eq!(reason(pages.submit_exists(&[])), Reason::Empty);
    let many: Vec<_> = (0..=MAX_REQUEST_BLOCKS as u32).map(key).collect();
    assert_eq!(reason(pages.submit_exists(&many)), Reason::TooMany("blocks"));
    assert_eq!(reason(pages.submit_get(&many, &two)), Reason::TooMany("blocks"));
    let length = Reason::Length { expected: 1, found: 2 };
    assert_eq!(reason(pages.submit_get(&[key(1)], &two)), length);
    assert_eq!(reason(pages.submit_put(&[key(1)], &two)), length);
    *store.refuse.lock().unwrap() = Some(Reason::NoSpace(SpaceCause::Disk));
    assert_eq!(reason(pages.submit_put(&[key(1), key(2)], &two)), Reason::NoSpace(SpaceCause::Disk));
    assert_eq!(reason(pages.submit_get(&[key(1), key(2)], &two)), Reason::NoSpace(SpaceCause::Disk));
    *store.refuse.lock().unwrap() = Some(CANCELLED);
    pages.submit_put(&[key(1), key(2)], &two).unwrap();
    pages.submit_get(&[key(1), key(2)], &two).unwrap();
    assert!(drained(&pages).iter().all(|told| told.results == [Err(CANCELLED), Err(CANCELLED)]));
    *store.refuse.lock().unwrap() = None;
    assert_eq!((pages.under_way(), drained(&pages)), (0, vec![]));
    pages.submit_put(&[key(1), key(2)], &two).unwrap();
    pages.submit_put(&[key(3), key(4)], &two).unwrap();
    let busy = pages.submit_get(&[key(5), key(6)], &two).unwrap_err();
    assert_eq!(busy.kind(), Kind::Retry, "{busy}");
    // Ended is not enough: a seat is free again when its completion was drained.
    drop(store.puts.lock().unwrap().pop());
    assert!(pages.submit_exists(&[key(1)]).is_err());
    let found = drained(&pages);
    assert_eq!(found[0].results, vec![Err(Reason::Busy("the store is closing")); 2]);
    assert!(pages.submit_get(&[key(5), key(6)], &two).is_ok());
}

#[test]
fn a_store_that_stops_ends_its_gets() {
    let (store, pages) = scripted(|_| ());
    pages.submit_get(&[key(1), key(2)], &placed(&memory(2))).unwrap();
    store.reads.lock().unwrap().clear();
    assert!(readable(pages.event_fd(Lane::Load), 0));
    assert_eq!(drained(&pages)[0].results, vec![Err(Reason::Busy("the store is closing")); 2]);
}

#[test]
fn a_dropped_handle_cancels_what_is_under_way_and_lets_go_of_its_leases() {
    let (store, pages) = scripted(|_| ());
    *store.presence.lock().unwrap() = vec![Presence::Here, Presence::Here];
    let keys = [key(1), key(2)];
    pages.submit_put(&keys, &placed(&memory(2))).unwrap();
    pages.submit_get(&keys, &placed(&memory(2))).unwrap();
    for hold_s in [10, 20, 30] {
        pages.submit_lookup_and_lock(&keys, Duration::from_secs(hold_s)).unwrap();
    }
    let found = drained(&pages);
    assert_eq!(found[1].lease, Some(LeaseId(20)));
    assert!(pages.unlock(found[1].id) && !pages.unlock(found[1].id));
    pages.unlock_keys(&[key(2), key(1)]);
    assert_eq!(*store.unlocked.lock().unwrap(), [LeaseId(20), LeaseId(10)]);
    drop(pages);
    assert_eq!(*store.unlocked.lock().unwrap(), [LeaseId(20), LeaseId(10), LeaseId(30)]);
    assert!(store.puts.lock().unwrap()[0].1.is_cancelled());
    let reads = store.reads.lock().unwrap();
    assert!(reads[0].1.is_cancelled());
    // A late answer finds no batch that waits, and does no harm.
    reads[0].1.send(ReadEvent::End(ReadEnd::default()));
}

#[test]
fn a_closed_handle_is_silent_and_refuses() {
    let (store, pages) = scripted(|_| ());
    *store.presence.lock().unwrap() = vec![Presence::Here];
    pages.submit_exists(&[key(1)]).unwrap();
    pages.submit_get(&[key(1)], &placed(&memory(1))).unwrap();
    pages.close();
    store.reads.lock().unwrap()[0].1.send(ReadEvent::End(ReadEnd::default()));
    assert!(!readable(pages.event_fd(Lane::Load), 0));
    assert_eq!((drained(&pages), pages.under_way()), (vec![], 0));
    assert_eq!(pages.submit_exists(&[key(1)]).unwrap_err().kind(), Kind::Retry);
    assert_eq!(pages.under_way(), 0);
}

#[test]
fn a_cancelled_batch_is_answered_once_and_when_nobody_has_its_memory_any_more() {
    let (store, pages) = scripted(|_| ());
    let keys = [key(1), key(2)];
    let get = pages.submit_get(&keys, &placed(&memory(2))).unwrap();
    let put = pages.submit_put(&keys, &placed(&memory(2))).unwrap();
    assert!(pages.cancel(get) && pages.cancel(put));
    // The store has the memory, a device writes to it perhaps.
    assert!(!readable(pages.event_fd(Lane::Load), 0) && pages.under_way() == 2 && !pages.is_free());
    assert!(
        store.reads.lock().unwrap()[0].1.is_cancelled() && store.puts.lock().unwrap()[0].1.is_cancelled()
    );
    store.reads.lock().unwrap().clear();
    let told = drained(&pages);
    assert_eq!((told.len(), told[0].id, &told[0].results), (1, get, &vec![Err(CANCELLED); 2]));
    store.puts.lock().unwrap().clear();
    assert_eq!(drained(&pages)[0].id, put);
    assert!(!pages.cancel(get) && pages.is_free() && pages.under_way() == 0);
}

#[test]
fn a_closed_handle_is_free_when_nobody_has_memory_of_its_batches() {
    let (store, pages) = scripted(|_| ());
    pages.submit_get(&[key(1)], &placed(&memory(1))).unwrap();
    pages.close();
    assert!(!pages.is_free());
    store.reads.lock().unwrap().clear();
    assert!(pages.is_free());
}

#[test]
fn where_it_was_asked_for_a_batch_is_answered_when_its_memory_is_nobodys() {
    let (store, pages) = scripted(|options| options.until_free = true);
    pages.submit_get(&[key(1)], &placed(&memory(1))).unwrap();
    store.reads.lock().unwrap()[0].1.send(ReadEvent::End(ReadEnd { usable_blocks: 1, ..ReadEnd::default() }));
    assert!(!readable(pages.event_fd(Lane::Load), 0));
    store.reads.lock().unwrap().clear();
    assert!(drained(&pages)[0].is_ok());
}

#[test]
fn pages_of_a_put_live_as_long_as_it_says_and_else_as_long_as_its_handle_says() {
    let (of_handle, of_put) = (Duration::from_secs(60), Duration::from_secs(5));
    for usual in [None, Some(of_handle)] {
        let (store, pages) = scripted(|options| options.expires_after = usual);
        for expires_after in [None, Some(of_put)] {
            let terms = Terms { expires_after, ..Terms::default() };
            let block = Block { group: Group(0), coordinate: Coordinate::Replicated, key: key(1) };
            let shapes = [(block.group, block.coordinate, BlockShape::opaque(PAGE as u64).unwrap())];
            let places = [memory(1)];
            let memory = Memory::Anywhere(&places, &shapes);
            pages.submit(BatchKind::Put, &[block], &memory, &terms).unwrap();
            let (request, _reply) = store.puts.lock().unwrap().pop().unwrap();
            assert_eq!(request.expires_after, expires_after.or(usual));
        }
    }
}

#[test]
fn blocks_of_several_columns_that_lie_anywhere_are_one_batch() {
    let (store, pages) = scripted(|_| ());
    let (shape, small) = (BlockShape::opaque(PAGE as u64).unwrap(), BlockShape::opaque(100).unwrap());
    let heads = Coordinate::heads(1, 1, 2).unwrap();
    let block = |group, coordinate, n| Block { group: Group(group), coordinate, key: key(n) };
    let plain = Coordinate::Replicated;
    let blocks =
        [block(0, plain, 1), block(7, heads, 1), block(0, plain, 2), block(0, plain, 1), block(7, heads, 3)];
    let all = memory(8);
    let page = |at: usize, len| all.slice(at, len).unwrap();
    let places = [page(5000, PAGE), page(0, 100), page(13_000, PAGE), page(17_200, 4096), page(333, 100)];
    let shapes = [(Group(0), plain, shape), (Group(7), heads, small)];
    let memory = Memory::Anywhere(&places, &shapes);
    let deadline = Some(Nanos::default().plus(Duration::from_secs(9)));
    let terms = Terms { deadline, ..Terms::default() };
    let id = pages.submit(BatchKind::Get, &blocks, &memory, &terms).unwrap();
    let mut reads = std::mem::take(&mut *store.reads.lock().unwrap());
    assert_eq!(reads.len(), 2);
    for (request, _) in &reads {
        assert_eq!(request.deadline, deadline);
        let bytes = if request.group == Group(7) { 100 } else { PAGE as u64 };
        for (block, key) in (0..).zip(&request.keys) {
            let asked = Block { group: request.group, coordinate: request.coordinate, key: *key };
            let place = blocks.iter().position(|block| *block == asked).unwrap();
            assert_eq!(request.into.chunk(0, block, bytes).unwrap().offset(), places[place].offset());
        }
    }
    let failed = |reads: &mut Vec<(ReadRequest, ReadSink)>, group, n, reason: Reason| {
        let at = reads.iter().position(|(request, _)| request.group == Group(group)).unwrap();
        let (request, sink) = reads.remove(at);
        let place = request.keys.iter().position(|known| *known == key(n)).unwrap() as u32;
        sink.send(ReadEvent::End(ReadEnd { failures: vec![(place, reason)], ..ReadEnd::default() }));
    };
    failed(&mut reads, 7, 3, Reason::NotHere(key(3)));
    assert!(!readable(pages.event_fd(Lane::Load), 0), "a part of it is not answered");
    failed(&mut reads, 0, 2, Reason::NotHere(key(2)));
    let [told] = <[Completion; 1]>::try_from(drained(&pages)).unwrap();
    assert_eq!(told.id, id);
    assert_eq!(told.results, [Ok(()), Ok(()), not_here(2), Err(Reason::Duplicate(key(1))), not_here(3)]);
    // Destinations that meet, of whatever columns; a column that is none of the handle's; too few places.
    let meet = [page(0, PAGE), page(4000, 100)];
    let get = |blocks: &[Block], places: &[SharedBuf]| {
        pages.submit(BatchKind::Get, blocks, &Memory::Anywhere(places, &shapes), &terms).unwrap_err().0
    };
    assert_eq!(get(&blocks[..2], &meet), Reason::Overlap);
    assert_eq!(get(&[block(1, plain, 1)], &meet[..1]).kind(), Kind::Invalid);
    assert_eq!(get(&blocks[..1], &meet).kind(), Kind::Invalid);
    assert_eq!(pages.under_way(), 0);
    // The same source twice is two requests.
    let twice = [page(0, PAGE), page(0, PAGE)];
    let both = [block(0, plain, 1), block(0, plain, 2)];
    pages.submit(BatchKind::Put, &both, &Memory::Anywhere(&twice, &shapes), &terms).unwrap();
    assert_eq!(store.puts.lock().unwrap().len(), 2);
}

/// Answers come from two threads at any moment of submitting and draining: each batch completes once, and a
/// caller that only ever waits for the eventfd misses none.
#[test]
#[allow(clippy::disallowed_methods, reason = "the other threads are what is tested")]
fn no_wake_is_lost_when_answers_race_with_submitting_and_draining() {
    const BATCHES: usize = 4000;
    let (store, pages) = scripted(|options| options.batches_max = 16);
    let answering = |reads: bool| {
        let store = Arc::clone(&store);
        std::thread::spawn(move || {
            let mut answered = 0;
            while answered < BATCHES / 2 {
                if reads && let Some((_, sink)) = store.reads.lock().unwrap().pop() {
                    sink.send(ReadEvent::Block(0));
                    sink.send(ReadEvent::End(ReadEnd::default()));
                    answered += 1;
                }
                if !reads && let Some((_, reply)) = store.puts.lock().unwrap().pop() {
                    reply.send(Ok(PutReply { outcomes: vec![BlockOutcome::Stored] })).unwrap();
                    answered += 1;
                }
            }
        })
    };
    let threads = [answering(true), answering(false)];
    let place = placed(&memory(1));
    let (mut submitted, mut out) = (0, Vec::new());
    while out.len() < BATCHES {
        while submitted < BATCHES {
            let batch = match submitted % 2 {
                0 => pages.submit_put(&[key(1)], &place),
                _ => pages.submit_get(&[key(1)], &place),
            };
            match batch {
                Ok(_) => submitted += 1,
                Err(busy) => {
                    assert_eq!(busy.kind(), Kind::Retry);
                    break;
                }
            }
        }
        assert!(readable(pages.event_fd(Lane::Load), 20), "a completion without a ring");
        assert!(pages.drain(&mut out) > 0, "a ring without a completion");
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(!readable(pages.event_fd(Lane::Load), 0));
    let mut ids: Vec<_> = out.iter().map(|one| one.id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!((ids.len(), out.iter().all(Completion::is_ok)), (BATCHES, true));
}

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvarts-batches-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn identity(geometry: &Geometry) -> Identity {
    let text = |text: &str| text.to_owned();
    Identity {
        model: text("pages"),
        revision: text("0123abcd"),
        tokenizer: text("tok-1"),
        adapter: text("none"),
        kv_dtype: text("bf16"),
        quantisation: Quantisation { recipe: text("none"), scales: text("none") },
        rope: text("theta=500000"),
        window: text("none"),
        arrangement: Arrangement { engine: text("test"), layout: text("flat"), version: text("1") },
        block_tokens: 16,
        spec_fingerprint: geometry.fingerprint(),
        tenant_salt: TenantSalt(Vec::new()),
        extras: BTreeMap::new(),
    }
}

fn open(scratch: &Scratch, io: IoChoice) -> (Home, NamespaceId) {
    let home = Home::open(&HomeOptions {
        directories: vec![scratch.0.clone()],
        io,
        runtime: RuntimeChoice::Threads,
        store: Options { segment_bytes: 64 << 20, budget_bytes: 1 << 30, ..Options::default() },
        ..HomeOptions::default()
    })
    .unwrap();
    let geometry = Geometry::opaque(PAGE as u64).unwrap();
    let namespace = home.store().register(&identity(&geometry), &geometry).unwrap();
    (home, namespace)
}

fn handle(home: &Home, options: PagesOptions) -> Pages {
    Pages::new(Arc::new(home.store().clone()), options).unwrap()
}

/// Waits by the eventfd alone until this many batches have completed.
fn wait(pages: &Pages, count: usize) -> BTreeMap<BatchId, Completion> {
    let mut out = Vec::new();
    while out.len() < count {
        assert!(readable(pages.event_fd(Lane::Load), 20), "{} of {count}", out.len());
        pages.drain(&mut out);
    }
    assert!(!readable(pages.event_fd(Lane::Load), 0));
    out.into_iter().map(|one| (one.id, one)).collect()
}

fn put(pages: &Pages, names: &[u32]) -> Completion {
    let keys: Vec<_> = names.iter().map(|n| key(*n)).collect();
    let id = pages.submit_put(&keys, &placed(&pages_of(names))).unwrap();
    wait(pages, 1).remove(&id).unwrap()
}

fn get(pages: &Pages, names: &[u32]) -> (Completion, SharedBuf) {
    let keys: Vec<_> = names.iter().map(|n| key(*n)).collect();
    let into = memory(names.len());
    let id = pages.submit_get(&keys, &placed(&into)).unwrap();
    (wait(pages, 1).remove(&id).unwrap(), into)
}

#[test]
fn thousands_of_pages_in_many_batches_come_back_whole() {
    for (name, io) in [("pool", IoChoice::Pool), ("auto", IoChoice::Auto)] {
        let scratch = Scratch::new(name);
        let (home, namespace) = open(&scratch, io);
        let writer = handle(&home, PagesOptions::new(namespace));
        let reader = handle(&home, PagesOptions::new(namespace));
        let names: Vec<Vec<u32>> = (0..16).map(|batch| (batch * 256..(batch + 1) * 256).collect()).collect();
        for names in &names {
            let keys: Vec<_> = names.iter().map(|n| key(*n)).collect();
            writer.submit_put(&keys, &placed(&pages_of(names))).unwrap();
        }
        let stored = wait(&writer, 16);
        assert!(stored.values().all(|one| one.is_ok() && one.written == 256 && one.results.len() == 256));
        // Another handle reads them, each batch a mix of all that were put and of absent ones, backwards.
        let mut asked = BTreeMap::new();
        for batch in 0..16_u32 {
            let wanted: Vec<u32> = (0..300).rev().map(|n| n * 16 + batch).collect();
            let keys: Vec<_> = wanted.iter().map(|n| key(*n)).collect();
            let into = memory(wanted.len());
            let id = reader.submit_get(&keys, &placed(&into)).unwrap();
            asked.insert(id, (wanted, into));
        }
        let found = wait(&reader, 16);
        for (id, (wanted, into)) in asked {
            for (place, (n, result)) in wanted.iter().zip(&found[&id].results).enumerate() {
                match *n < 4096 {
                    true => assert_eq!((result, page_at(&into, place) == page(*n)), (&Ok(()), true), "{n}"),
                    false => assert_eq!(*result, not_here(*n)),
                }
            }
        }
        drop((writer, reader));
        home.close().unwrap();
    }
}

#[test]
fn keys_that_stand_twice_are_answered_each_for_itself() {
    let scratch = Scratch::new("twice");
    let (home, namespace) = open(&scratch, IoChoice::Pool);
    let pages = handle(&home, PagesOptions::new(namespace));
    let stored = put(&pages, &[4, 8, 4, 15, 8]);
    assert_eq!((stored.is_ok(), stored.results.len(), stored.written), (true, 5, 3));
    let again = put(&pages, &[15, 16]);
    assert_eq!((again.is_ok(), again.written), (true, 1));
    let (found, into) = get(&pages, &[8, 23, 4, 8, 15]);
    let twice = Err(Reason::Duplicate(key(8)));
    assert_eq!(found.results, [Ok(()), not_here(23), Ok(()), twice, Ok(())]);
    for (place, expected) in [(0, page(8)), (2, page(4)), (3, vec![0; PAGE]), (4, page(15))] {
        assert!(page_at(&into, place) == expected, "place {place}");
    }
    pages.submit_exists(&[4, 23, 8, 8].map(key)).unwrap();
    let asked = drained(&pages);
    assert_eq!(asked[0].results, [Ok(()), not_here(23), Ok(()), Ok(())]);
    assert_eq!(asked[0].usable_prefix(), 1);
    drop(pages);
    home.close().unwrap();
}

/// Changes one byte of a page where it lies in its segment file.
#[allow(clippy::disallowed_methods, reason = "the test is the damage")]
fn damage(directory: &Path, n: u32) {
    use std::os::unix::fs::FileExt;
    let wanted = page(n);
    let mut hits = 0;
    let mut folders = vec![directory.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let bytes = std::fs::read(&path).unwrap();
            let Some(at) = bytes.windows(16).position(|found| *found == wanted[..16]) else { continue };
            let file = std::fs::File::options().write(true).open(&path).unwrap();
            file.write_all_at(&[bytes[at + 100] ^ 1], at as u64 + 100).unwrap();
            file.sync_all().unwrap();
            hits += 1;
        }
    }
    assert_eq!(hits, 1);
}

#[test]
fn a_damaged_page_is_told_for_its_key_alone() {
    let scratch = Scratch::new("damage");
    let (home, namespace) = open(&scratch, IoChoice::Pool);
    let pages = handle(&home, PagesOptions::new(namespace));
    let names: Vec<u32> = (0..64).collect();
    assert!(put(&pages, &names).is_ok());
    damage(&scratch.0, 37);
    let (found, into) = get(&pages, &names);
    for (place, result) in found.results.iter().enumerate() {
        match place {
            37 => assert!(matches!(result, Err(Reason::Digest { .. })), "{result:?}"),
            _ => assert_eq!((result, page_at(&into, place) == page(place as u32)), (&Ok(()), true)),
        }
    }
    assert_eq!(found.usable_prefix(), 37);
    // It is out of service, and can be put again.
    pages.submit_exists(&names.iter().map(|n| key(*n)).collect::<Vec<_>>()).unwrap();
    assert_eq!(drained(&pages)[0].error(), Some(&Reason::NotHere(key(37))));
    assert_eq!(put(&pages, &names).written, 1);
    let (found, into) = get(&pages, &[37]);
    assert!(found.is_ok() && page_at(&into, 0) == page(37));
    drop(pages);
    home.close().unwrap();
}

#[test]
fn locks_count_against_the_cap_and_give_it_back() {
    let scratch = Scratch::new("locks");
    let (home, namespace) = open(&scratch, IoChoice::Pool);
    let cap = 2 * PAGE as u64;
    let pages = handle(&home, PagesOptions { pin_cap_bytes: cap, ..PagesOptions::new(namespace) });
    assert!(put(&pages, &[1, 2, 3]).is_ok());
    let hold = Duration::from_secs(600);
    let lock = |names: &[u32]| {
        pages.submit_lookup_and_lock(&names.iter().map(|n| key(*n)).collect::<Vec<_>>(), hold)
    };
    let first = lock(&[1, 99, 2]).unwrap();
    let found = drained(&pages).remove(0);
    assert_eq!((found.id, found.kind, found.lease.is_some()), (first, BatchKind::Lock, true));
    assert_eq!(found.results, [Ok(()), not_here(99), Ok(())]);
    let wanted = 3 * PAGE as u64;
    assert_eq!(lock(&[3]).unwrap_err().0, Reason::PinCap { limit: cap, wanted });
    assert_eq!(pages.under_way(), 0);
    pages.unlock_keys(&[key(1)]);
    assert!(lock(&[3]).is_err(), "the other key still holds the lock");
    pages.unlock_keys(&[key(2)]);
    assert!(lock(&[3]).is_ok());
    let other = handle(&home, PagesOptions { pin_cap_bytes: cap, ..PagesOptions::new(namespace) });
    assert!(other.submit_lookup_and_lock(&[key(1), key(2)], hold).is_err());
    drop(pages);
    assert!(other.submit_lookup_and_lock(&[key(1), key(2)], hold).is_ok());
    assert_eq!(other.submit_lookup_and_lock(&[key(99)], hold).map(|_| drained(&other).len()), Ok(2));
    drop(other);
    home.close().unwrap();
}

#[test]
fn a_handle_dropped_with_batches_under_way_leaves_a_store_that_works_and_closes() {
    let scratch = Scratch::new("dropped");
    let (home, namespace) = open(&scratch, IoChoice::Auto);
    let names: Vec<u32> = (0..512).collect();
    let keys: Vec<_> = names.iter().map(|n| key(*n)).collect();
    for _ in 0..8 {
        let pages = handle(&home, PagesOptions::new(namespace));
        pages.submit_put(&keys, &placed(&pages_of(&names))).unwrap();
        pages.submit_get(&keys, &placed(&memory(512))).unwrap();
    }
    let pages = handle(&home, PagesOptions::new(namespace));
    // A cancelled put may still be on its way out.
    let mut stored = put(&pages, &names);
    for _ in 0..1000 {
        if stored.is_ok() {
            break;
        }
        assert_eq!(stored.error().map(Reason::kind), Some(Kind::Retry), "{:?}", stored.error());
        stored = put(&pages, &names);
    }
    assert!(stored.is_ok(), "{:?}", stored.error());
    let (found, into) = get(&pages, &names);
    assert!(found.is_ok() && into.to_vec() == pages_of(&names).to_vec());
    home.close().unwrap();
    assert!(pages.submit_get(&keys[..1], &placed(&memory(1))).is_ok());
    assert_eq!(wait(&pages, 1).values().next().unwrap().error().map(Reason::kind), Some(Kind::Retry));
}
