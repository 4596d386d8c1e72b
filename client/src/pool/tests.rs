//! A pool over a store whose reads arrive when the test says so, in a time that the test turns.

use std::collections::{BTreeMap, BTreeSet};
use std::task::Waker;
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, ContainsReply, ContainsRequest, DeleteReply, DeleteRequest, LeaseId, MatchReply,
    MatchRequest, Missing, Presence, PutReply, PutRequest, ReadEnd, ReadEvent, ReadRequest, ReadSink,
    ReadStream, Sequence, SnapshotCursor, SnapshotPage, Subscription, TtlReply, TtlRequest, read_channel,
};
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::class::Class;
use kvarts_contract::clock::{ManualClock, Nanos, Xoshiro};
use kvarts_contract::ticket::{Reply, Ticket, ticket};
use kvarts_layout::{
    BlockKey, BlockShape, ChunkShape, Coordinate, Geometry, Group, Identity, LayerShape, NamespaceId,
};
use proptest::prelude::*;

use super::*;

/// Bytes of a block: two layers of two chunks.
const CHUNK: u64 = 4096;
const BLOCK: u64 = 4 * CHUNK;
const SILENCE: Duration = Duration::from_secs(5);

/// A store whose reads arrive when the test says so. A block's bytes are those of its key and of how often it was put.
#[derive(Debug, Default)]
struct Slow {
    /// What it has, and the production of each.
    has: Mutex<BTreeMap<BlockKey, u8>>,
    /// Productions of each so far.
    made: Mutex<BTreeMap<BlockKey, u8>>,
    deletes: Mutex<u64>,
    reads: Mutex<Vec<(ReadRequest, Option<ReadSink>)>>,
    is_away: Mutex<bool>,
    /// Look-ups that are answered when the test says so, if it wants to.
    unanswered: Mutex<Option<Vec<Unanswered>>>,
}

/// The keys of a look-up, and whom it is to be told.
type Unanswered = (Vec<BlockKey>, Reply<Result<ContainsReply, Error>>);

fn key(number: u64) -> BlockKey {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&number.to_le_bytes());
    BlockKey(key)
}

fn byte(key: &BlockKey, production: u8, part: u32) -> u8 {
    key.0[0].wrapping_mul(31) ^ key.0[1] ^ production.wrapping_mul(101) ^ (part as u8).wrapping_mul(59)
}

impl Slow {
    fn put(&self, numbers: impl IntoIterator<Item = u64>) {
        for number in numbers {
            // The first put wins.
            let mut has = self.has.lock().unwrap();
            has.entry(key(number)).or_insert_with(|| {
                let mut made = self.made.lock().unwrap();
                let made = made.entry(key(number)).or_default();
                *made += 1;
                *made
            });
        }
    }

    fn delete(&self, number: u64) {
        self.has.lock().unwrap().remove(&key(number));
        *self.deletes.lock().unwrap() += 1;
    }

    /// Reads that have begun and have not ended, of which the pool still wants something.
    fn open(&self) -> Vec<usize> {
        let reads = self.reads.lock().unwrap();
        let is_open = |(_, sink): &(ReadRequest, Option<ReadSink>)| {
            sink.as_ref().is_some_and(|sink| !sink.is_cancelled())
        };
        (0..reads.len()).filter(|at| is_open(&reads[*at])).collect()
    }

    /// Blocks of a read arrive, which are those from `from` on; what the store has no more is passed over. With the last it ends.
    fn arrive(&self, read: usize, from: usize, count: usize) {
        let mut reads = self.reads.lock().unwrap();
        let (request, sink) = &mut reads[read];
        let keys = request.keys.clone();
        let has = self.has.lock().unwrap().clone();
        for (block, key) in keys.iter().enumerate().skip(from).take(count) {
            let Some(production) = has.get(key) else { continue };
            for part in 0..4 {
                let chunk = request.into.chunk(part, block as u32, CHUNK).unwrap();
                chunk.fill(byte(key, *production, part));
            }
            sink.as_ref().unwrap().send(ReadEvent::Block(block as u32));
        }
        if from + count >= keys.len() {
            sink.take().unwrap().send(ReadEvent::End(ReadEnd::default()));
        }
    }

    fn arrive_all(&self) {
        while let Some(read) = self.open().first() {
            self.arrive(*read, 0, usize::MAX);
        }
    }

    /// The devices have let go of the memory of reads that are over.
    fn release(&self) {
        self.reads.lock().unwrap().retain(|(_, sink)| sink.as_ref().is_some_and(|sink| !sink.is_cancelled()));
    }
}

impl KvStore for Slow {
    fn register(&self, _: &Identity, _: &Geometry) -> Result<NamespaceId, Error> {
        unreachable!("a pool does not ask this")
    }
    fn put(&self, _: PutRequest) -> Ticket<Result<PutReply, Error>> {
        unreachable!("a pool does not ask this")
    }
    fn match_prefix(&self, _: &MatchRequest<'_>) -> Result<MatchReply, Error> {
        unreachable!("a pool does not ask this")
    }
    fn contains(&self, request: &ContainsRequest<'_>) -> Result<ContainsReply, Error> {
        if *self.is_away.lock().unwrap() {
            return Err(Error(Reason::Busy("away")));
        }
        let has = self.has.lock().unwrap();
        let of = |key: &BlockKey| if has.contains_key(key) { Presence::Here } else { Presence::Absent };
        let presence = request.keys.iter().map(of).collect();
        let deletes = 1 + *self.deletes.lock().unwrap();
        Ok(ContainsReply { presence, missing: Missing::default(), lease: None, deletes })
    }
    fn look_up(
        &self,
        request: &ContainsRequest<'_>,
        _: Option<Nanos>,
    ) -> Ticket<Result<ContainsReply, Error>> {
        let (reply, answer) = ticket();
        match &mut *self.unanswered.lock().unwrap() {
            Some(unanswered) => unanswered.push((request.keys.to_vec(), reply)),
            None => drop(reply.send(self.contains(request))),
        }
        answer
    }
    fn unlock(&self, _: LeaseId) -> bool {
        unreachable!("a pool does not ask this")
    }
    fn renew(&self, _: LeaseId, _: Duration) -> Result<(), Error> {
        unreachable!("a pool does not ask this")
    }
    fn delete(&self, _: DeleteRequest) -> Ticket<Result<DeleteReply, Error>> {
        unreachable!("a pool does not ask this")
    }
    fn set_ttl(&self, _: &TtlRequest<'_>) -> Result<TtlReply, Error> {
        unreachable!("a pool does not ask this")
    }
    fn set_default_ttl(&self, _: NamespaceId, _: Option<Duration>) -> Result<(), Error> {
        unreachable!("a pool does not ask this")
    }
    fn subscribe(&self, _: Option<Sequence>) -> Subscription {
        unreachable!("a pool does not ask this")
    }
    fn snapshot(&self, _: Option<SnapshotCursor>) -> Ticket<Result<SnapshotPage, Error>> {
        unreachable!("a pool does not ask this")
    }
    fn read(&self, request: ReadRequest) -> Result<ReadStream, Error> {
        let (sink, stream) = read_channel();
        self.reads.lock().unwrap().push((request, Some(sink)));
        Ok(stream)
    }
}

struct World {
    store: Arc<Slow>,
    clock: Arc<ManualClock>,
    pool: Pool,
    shape: Arc<BlockShape>,
}

fn world(blocks: u64) -> World {
    let chunk = ChunkShape { bytes: CHUNK, align: 1 };
    let layer = |layer| LayerShape { layer, chunks: vec![chunk; 2] };
    let shape = Arc::new(BlockShape::new(vec![layer(0), layer(1)]).unwrap());
    let (store, clock) = (Arc::new(Slow::default()), ManualClock::new(0));
    let region = Region::anonymous((blocks * BLOCK) as usize).unwrap();
    let as_clock: Arc<dyn Clock> = clock.clone();
    let pool = Pool::new(store.clone(), &as_clock, &region);
    World { store, clock, pool, shape }
}

fn column(rank: u16) -> Column {
    Column {
        namespace: NamespaceId([1; 32]),
        group: Group(0),
        coordinate: Coordinate::heads(rank, 1, 8).unwrap(),
    }
}

impl World {
    fn stage_of(&self, ranks: u16, numbers: impl IntoIterator<Item = u64>) -> Stage {
        let columns = (0..ranks).map(|rank| (column(rank), Arc::clone(&self.shape))).collect();
        let keys = numbers.into_iter().map(key).collect();
        let request =
            StageRequest { columns, keys, first_block: 0, silence: SILENCE, class: Class::Foreground };
        self.pool.stage(request).unwrap()
    }

    fn stage(&self, numbers: impl IntoIterator<Item = u64>) -> Stage {
        self.stage_of(1, numbers)
    }

    /// The production of each staged block of a column, whose bytes are all right.
    fn productions(&self, stage: &Stage, column: usize, keys: &[u64]) -> Vec<u8> {
        let staged = stage.look().staged as usize;
        let mut found = vec![BTreeSet::new(); staged];
        let stretches = stage.stretches(column);
        assert_eq!(stretches.iter().map(|stretch| stretch.count as usize).sum::<usize>(), staged);
        for part in 0..4 {
            let mut block = 0;
            for stretch in &stretches {
                let (at, bytes) = stretch.part(&self.shape, part).unwrap();
                let all = SharedBuf::new(self.pool.region(), at as usize, bytes as usize).unwrap().to_vec();
                for chunk in all.chunks(CHUNK as usize) {
                    let key = key(keys[block]);
                    let is =
                        (0..=255u8).find(|production| byte(&key, *production, part) == chunk[0]).unwrap();
                    assert!(chunk.iter().all(|byte| *byte == chunk[0]), "block {block}");
                    found[block].insert(is);
                    block += 1;
                }
            }
        }
        found.into_iter().map(|of| of.into_iter().next().filter(|_| true).unwrap()).collect()
    }

    fn free(&self) -> u64 {
        self.pool.counts().free_bytes / BLOCK
    }

    fn draft(&self, numbers: &[u64]) -> Result<Draft, Error> {
        let keys: Vec<_> = numbers.iter().copied().map(key).collect();
        self.pool.draft((column(0), &self.shape), &keys, 0)
    }

    /// An engine saves these blocks in a draft, and they are put from there.
    fn put_from(&self, draft: &Draft, numbers: &[u64]) -> Vec<BlockOutcome> {
        let mut outcomes = Vec::new();
        for (stretch, number) in draft
            .stretches()
            .iter()
            .flat_map(|all| (0..all.count).map(|first| Stretch { first, count: 1, ..*all }))
            .zip(numbers)
        {
            let is_there = self.store.has.lock().unwrap().contains_key(&key(*number));
            let made = self.store.made.lock().unwrap().get(&key(*number)).copied().unwrap_or(0);
            for part in 0..4 {
                let (at, bytes) = stretch.part(&self.shape, part).unwrap();
                let chunk = SharedBuf::new(self.pool.region(), at as usize, bytes as usize).unwrap();
                chunk.fill(byte(&key(*number), made + 1, part));
            }
            self.store.put([*number]);
            outcomes.push(if is_there { BlockOutcome::AlreadyThere } else { BlockOutcome::Stored });
        }
        outcomes
    }
}

fn over(staged: u32) -> Progress {
    Progress { staged, is_over: true }
}

fn coming(staged: u32) -> Progress {
    Progress { staged, is_over: false }
}

#[test]
fn blocks_count_when_they_are_here_in_every_column_and_lie_layer_by_layer() {
    let world = world(64);
    world.store.put(0..6);
    let stage = world.stage_of(2, 0..6);
    assert_eq!(stage.look(), coming(0));
    assert_eq!(world.store.open().len(), 4, "extents of four blocks at most");
    // Of rank 0 all, of rank 1 the first two.
    world.store.arrive(0, 0, 4);
    world.store.arrive(2, 0, 2);
    assert_eq!(stage.look(), coming(0));
    world.store.arrive(1, 0, 2);
    assert_eq!(stage.look(), coming(2));
    world.store.arrive_all();
    assert_eq!(stage.look(), over(6));
    for column in 0..2 {
        assert_eq!(world.productions(&stage, column, &[0, 1, 2, 3, 4, 5]), [1; 6]);
    }
    let at = |stretch: &Stretch| (stretch.blocks, stretch.first, stretch.count);
    assert_eq!(stage.stretches(0).iter().map(at).collect::<Vec<_>>(), [(4, 0, 4), (2, 0, 2)]);
    assert!(stage.stretches(2).is_empty());
    // The next request finds them here, and asks for none of them.
    let reads = world.store.reads.lock().unwrap().len();
    let again = world.stage_of(2, 1..6);
    assert_eq!((again.look(), world.store.reads.lock().unwrap().len()), (over(5), reads));
    assert_eq!(world.productions(&again, 1, &[1, 2, 3, 4, 5]), [1; 5]);
    let counts = world.pool.counts();
    assert_eq!((counts.read, counts.came, counts.hits, counts.shared), (12, 12, 10, 0));
}

#[test]
fn what_one_request_reads_another_one_waits_for_also_when_the_first_is_aborted() {
    let world = world(64);
    world.store.put(0..4);
    let (first, second) = (world.stage(0..4), world.stage(0..3));
    assert_eq!(world.store.open().len(), 1);
    drop(first);
    assert_eq!(world.store.open().len(), 1, "the other one waits for it");
    world.store.arrive_all();
    assert_eq!(second.look(), over(3));
    assert_eq!(world.productions(&second, 0, &[0, 1, 2]), [1; 3]);
    assert_eq!(world.pool.counts().shared, 3);
}

#[test]
fn an_abort_ends_reads_nobody_waits_for_and_their_memory_is_free_when_the_device_lets_go_of_it() {
    let world = world(64);
    world.store.put(0..4);
    let stage = world.stage(0..4);
    assert_eq!(world.free(), 60);
    drop(stage);
    assert!(world.store.open().is_empty());
    assert_eq!(world.free(), 60, "a device may still write to it");
    world.store.release();
    assert_eq!(world.free(), 64);
    // What had come by then stays for the next one.
    let stage = world.stage(0..4);
    world.store.arrive(0, 0, 2);
    assert_eq!(stage.look(), coming(2));
    drop(stage);
    world.store.release();
    let stage = world.stage(0..2);
    assert_eq!((stage.look(), world.store.reads.lock().unwrap().len()), (over(2), 0));
}

#[test]
fn a_stage_ends_when_nothing_comes_and_not_because_it_is_large() {
    let world = world(64);
    world.store.put(0..4);
    let stage = world.stage(0..4);
    for block in 0..3 {
        world.clock.advance(SILENCE - Duration::from_millis(1));
        assert_eq!(stage.look(), coming(block));
        world.store.arrive(0, block as usize, 1);
        assert_eq!(stage.look(), coming(block + 1));
    }
    world.clock.advance(SILENCE);
    assert_eq!(stage.look(), over(3));
    assert_eq!(world.productions(&stage, 0, &[0, 1, 2]), [1; 3]);
    assert_eq!(world.pool.counts().silent, 1);
}

#[test]
fn a_stage_whose_turn_has_not_come_is_not_silent_while_others_read() {
    let world = world(64);
    world.store.put(0..100);
    // As many reads as may be under way, of two blocks each.
    let first: Vec<Stage> = (0..16).map(|at| world.stage(at * 4..at * 4 + 2)).collect();
    let last = world.stage(90..92);
    for (read, stage) in first.iter().take(3).enumerate() {
        world.clock.advance(SILENCE - Duration::from_millis(1));
        world.store.arrive(read, 0, 1);
        assert_eq!((stage.look().staged, last.look()), (1, coming(0)));
        assert_eq!(world.store.reads.lock().unwrap().len(), 16, "its turn has come");
    }
    world.clock.advance(SILENCE);
    assert_eq!(last.look(), over(0));
    assert_eq!(last.why(), Some(Reason::Busy("no more data arrived in time")));
    // When one ends the next begins; the last of them is not wanted any more.
    drop((first, last));
    assert!(world.store.open().is_empty());
}

#[test]
fn a_block_that_was_deleted_is_not_served_from_memory() {
    let world = world(64);
    world.store.put(0..4);
    let before = world.stage(0..4);
    world.store.arrive_all();
    assert_eq!(before.look(), over(4));
    world.store.delete(2);
    let stage = world.stage(0..4);
    assert!(stage.look().staged <= 2);
    world.store.arrive_all();
    assert_eq!(stage.look(), over(2));
    assert_eq!(world.pool.counts().withdrawn, 4, "which of them it was is not told");
    // Put again, it is read again: other bytes.
    world.store.put([2]);
    let stage = world.stage(0..4);
    world.store.arrive_all();
    assert_eq!(stage.look(), over(4));
    assert_eq!(world.productions(&stage, 0, &[0, 1, 2, 3]), [1, 1, 2, 1]);
    // The request that had it before keeps what it had.
    assert_eq!(world.productions(&before, 0, &[0, 1, 2, 3]), [1; 4]);
    // Of a store that cannot say nothing is served from memory, and nothing is lost.
    *world.store.is_away.lock().unwrap() = true;
    assert_eq!(world.stage(0..4).look(), over(0));
    *world.store.is_away.lock().unwrap() = false;
    assert_eq!(world.stage(0..4).look(), over(4));
}

#[test]
fn no_read_begins_before_the_store_has_said_what_was_deleted_until_then() {
    let world = world(64);
    world.store.put(0..2);
    *world.store.unanswered.lock().unwrap() = Some(Vec::new());
    let (first, second) = (world.stage(0..2), world.stage(0..2));
    assert_eq!((first.look(), second.look()), (coming(0), coming(0)));
    assert!(world.store.reads.lock().unwrap().is_empty());
    // A delete that a read might have met before its end: with the old number it is read again.
    let unanswered = world.store.unanswered.lock().unwrap().take().unwrap();
    for (keys, reply) in unanswered {
        let column = column(0);
        let Column { namespace, group, coordinate } = column;
        let request = ContainsRequest { namespace, group, coordinate, keys: &keys, lease: None };
        drop(reply.send(world.store.contains(&request)));
    }
    assert_eq!((first.look(), second.look()), (coming(0), coming(0)));
    assert_eq!(world.store.open().len(), 1);
    world.store.arrive_all();
    assert_eq!(first.look(), over(2));
    assert!(second.look().is_over);
}

#[test]
fn what_was_deleted_makes_room_for_what_is_read_in_its_place_and_what_waits_is_shared() {
    let world = world(32);
    world.store.put(0..100);
    let stage = world.stage(0..20);
    world.store.arrive_all();
    assert_eq!(stage.look(), over(20));
    drop(stage);
    world.store.release();
    world.store.delete(99);
    // All of it is read again, into the place of what is believed no more.
    let stage = world.stage(0..20);
    stage.look();
    let again = world.stage(0..20);
    for _ in 0..4 {
        world.store.arrive_all();
        stage.look();
    }
    assert_eq!((stage.look(), again.look()), (over(20), over(20)));
    assert_eq!(world.productions(&again, 0, &(0..20).collect::<Vec<_>>()), [1; 20]);
    // Reads whose turn has not come are those of both; the second one has none of its own.
    drop((stage, again));
    let wide = world_of_small_extents();
    wide.store.put(0..40);
    let first = wide.stage(0..20);
    let reads = wide.store.reads.lock().unwrap().len();
    let second = wide.stage(0..20);
    assert_eq!((wide.pool.counts().withdrawn, wide.store.reads.lock().unwrap().len()), (0, reads));
    while !wide.store.open().is_empty() {
        wide.store.arrive_all();
        first.look();
    }
    assert_eq!((first.look(), second.look()), (over(20), over(20)));
    assert_eq!(wide.store.reads.lock().unwrap().len(), 20);
}

/// A pool whose extents have one block: more of them than reads are under way at a time.
fn world_of_small_extents() -> World {
    world(31)
}

#[test]
fn a_stage_goes_on_when_what_it_waits_for_comes_while_another_one_looks() {
    let world = world(64);
    world.store.put(0..100);
    *world.store.unanswered.lock().unwrap() = Some(Vec::new());
    let (first, second) = (world.stage(0..2), world.stage(10..12));
    let woken = Arc::new(News::default());
    let waker = std::task::Waker::from(woken.clone());
    let mut context = std::task::Context::from_waker(&waker);
    assert!(first.poll(&mut context).is_pending());
    let before = woken.count();
    for (keys, reply) in world.store.unanswered.lock().unwrap().take().unwrap() {
        let Column { namespace, group, coordinate } = column(0);
        let request = ContainsRequest { namespace, group, coordinate, keys: &keys, lease: None };
        drop(reply.send(world.store.contains(&request)));
    }
    // The second one looks, and begins the reads of both; what comes wakes the first one.
    second.look();
    assert_eq!(world.store.open().len(), 2);
    world.store.arrive_all();
    assert_eq!(second.look(), over(2));
    assert!(woken.count() > before, "it was never told");
    assert_eq!(first.look(), over(2));
}

#[test]
fn where_there_is_no_room_the_beginning_is_kept_and_of_what_is_here_the_oldest_ends_go_first() {
    let world = world(32);
    world.store.put(0..200);
    // Extents of two blocks.
    let older = world.stage(0..16);
    world.store.arrive_all();
    assert_eq!(older.look(), over(16));
    drop(older);
    let newer = world.stage(100..116);
    world.store.arrive_all();
    assert_eq!(newer.look(), over(16));
    drop(newer);
    world.store.release();
    assert_eq!(world.free(), 0);
    let third = world.stage(150..154);
    world.store.arrive_all();
    assert_eq!(third.look(), over(4));
    assert_eq!(world.pool.counts().evicted, 4);
    let reads = || world.store.reads.lock().unwrap().len();
    world.store.release();
    let before = reads();
    assert_eq!(world.stage(0..12).look(), over(12), "the beginning of the older chain is here");
    assert_eq!(world.stage(100..116).look(), over(16));
    assert_eq!(reads(), before);
    // More than there is: everything that no stage holds goes, and the beginning comes.
    let all = world.stage(40..80);
    while !world.store.open().is_empty() {
        world.store.arrive_all();
        all.look();
    }
    assert_eq!(all.look(), over(28), "all but what the third stage holds");
    assert_eq!(third.look(), over(4));
    assert_eq!(world.productions(&third, 0, &[150, 151, 152, 153]), [1; 4]);
    assert!(world.pool.counts().no_room > 0);
}

#[test]
fn a_block_that_is_nowhere_ends_the_stage_and_what_lies_behind_is_read_no_further() {
    let world = world(64);
    world.store.put(0..3);
    world.store.put(4..16);
    let stage = world.stage(0..16);
    let reads = world.store.open();
    assert_eq!(reads.len(), 4);
    world.store.arrive(reads[0], 0, 4);
    assert_eq!(stage.look(), over(3));
    assert!(world.store.open().is_empty(), "the rest is of no use");
    assert_eq!(world.productions(&stage, 0, &[0, 1, 2]), [1; 3]);
}

#[test]
fn a_stage_of_nothing_or_of_more_than_one_question_asks_for_is_refused() {
    let world = world(8);
    let most = kvarts_contract::api::MAX_REQUEST_BLOCKS as u64;
    let columns = vec![(column(0), Arc::clone(&world.shape))];
    for (columns, keys, why) in [
        (Vec::new(), 1, Reason::Empty),
        (columns.clone(), 0, Reason::Empty),
        (columns, most + 1, Reason::TooMany("blocks")),
    ] {
        let keys = (0..keys).map(key).collect();
        let request =
            StageRequest { columns, keys, first_block: 0, silence: SILENCE, class: Class::Foreground };
        assert_eq!(world.pool.stage(request).unwrap_err().0, why);
    }
    assert_eq!((world.free(), world.store.reads.lock().unwrap().len()), (8, 0));
}

#[test]
fn what_was_saved_and_stored_is_here_for_the_next_request_and_what_another_one_stored_is_read() {
    let world = world(64);
    world.store.put([2]);
    // What the store says of deletes is known from now on.
    let asked = world.stage([40]);
    world.store.arrive_all();
    assert_eq!(asked.look(), over(0));
    drop(asked);
    world.store.release();
    let saved = [0, 1, 2, 3, 4, 5];
    let draft = world.draft(&saved).unwrap();
    assert_eq!(draft.stretches().len(), 2, "extents of four blocks at most");
    assert_eq!(world.free(), 64 - 6);
    let outcomes = world.put_from(&draft, &saved);
    assert!(!world.stage(0..6).look().is_over, "nothing is here before it is kept");
    world.store.arrive_all();
    world.pool.0.book().take_in(Nanos::default(), Waker::noop());
    while world.pool.0.book().evict().is_some() {}
    world.store.release();
    let reads = world.store.reads.lock().unwrap().len();
    draft.keep(&outcomes);
    assert_eq!(world.pool.counts().kept, 5);
    let stage = world.stage(0..6);
    assert_eq!(world.store.reads.lock().unwrap().len(), reads + 1, "of the one that was there already");
    world.store.arrive_all();
    assert_eq!(stage.look(), over(6));
    assert_eq!(world.productions(&stage, 0, &saved), [1; 6]);
    drop(stage);
    // A delete of any of them: all are asked for anew.
    world.store.delete(4);
    let stage = world.stage(0..6);
    world.store.arrive_all();
    assert_eq!(stage.look(), over(4));
}

#[test]
fn a_draft_that_is_dropped_gives_its_room_back_and_one_without_room_is_refused() {
    let world = world(16);
    let draft = world.draft(&[0, 1, 2]).unwrap();
    let full: Vec<u64> = (0..20).collect();
    assert!(matches!(world.draft(&full).unwrap_err().0, Reason::Busy(_)));
    assert_eq!(world.free(), 13);
    drop(draft);
    assert_eq!(world.free(), 16);
    // Where the deletes before it are not known nothing is kept of it.
    let draft = world.draft(&[0]).unwrap();
    let outcomes = world.put_from(&draft, &[0]);
    draft.keep(&outcomes);
    assert_eq!((world.free(), world.pool.counts().kept), (16, 0));
    assert_eq!(world.draft(&[]).unwrap_err().0, Reason::Empty);
}

#[test]
fn a_pool_that_is_cleared_forgets_what_no_stage_holds() {
    let world = world(64);
    world.store.put(0..8);
    let (held, other) = (world.stage(0..4), world.stage(4..8));
    world.store.arrive_all();
    assert_eq!((held.look(), other.look()), (over(4), over(4)));
    drop(other);
    world.store.release();
    world.pool.clear();
    assert_eq!((world.free(), world.pool.counts().evicted), (60, 4));
    assert_eq!(world.productions(&held, 0, &[0, 1, 2, 3]), [1; 4]);
    let before = world.pool.counts().read;
    let again = world.stage(0..8);
    world.store.arrive_all();
    assert_eq!((again.look(), world.pool.counts().read - before), (over(8), 4));
}

#[test]
fn a_draft_that_must_not_wait_is_refused_while_another_thread_goes_on_using_the_pool() {
    let world = world(64);
    let draft = |pool: &Pool| pool.draft_now((column(0), &world.shape), &[key(1)], 0);
    let uses = world.pool.0.book();
    let waited = std::thread::scope(|scope| scope.spawn(|| draft(&world.pool).map(drop)).join().unwrap());
    assert_eq!(waited.unwrap_err().0, Reason::Busy("another thread uses the pool: retry"));
    drop(uses);
    assert_eq!(draft(&world.pool).unwrap().stretches().len(), 1);
}

#[test]
fn a_thread_and_a_task_wait_for_the_same() {
    let clock: Arc<dyn Clock> = kvarts_contract::clock::SystemClock::new();
    let world = world(64);
    let pool = Pool::new(world.store.clone(), &clock, world.pool.region());
    world.store.put(0..4);
    let columns = vec![(column(0), Arc::clone(&world.shape))];
    let keys = (0..4).map(key).collect();
    let request = StageRequest { columns, keys, first_block: 0, silence: SILENCE, class: Class::Foreground };
    let (stage, other) = (pool.stage(request.clone()).unwrap(), pool.stage(request).unwrap());
    assert_eq!(stage.wait(Duration::from_millis(1)), coming(0));
    let store = Arc::clone(&world.store);
    let arrives = std::thread::Builder::new().spawn(move || store.arrive_all()).unwrap();
    assert_eq!(stage.wait(Duration::from_secs(60)), over(4));
    let task = std::future::poll_fn(|context| other.poll(context));
    assert_eq!(kvarts_contract::blocking::block_on(task), over(4));
    arrives.join().unwrap();
}

#[test]
fn a_name_is_read_as_it_is_written_and_nothing_else_is_a_name() {
    let name = PoolName::new();
    assert_eq!(name.to_string().parse::<PoolName>().unwrap(), name);
    assert_eq!(format!("{name:?}"), "PoolName");
    for wrong in ["", "00", "zz", &"0".repeat(33), &format!("+{}", "0".repeat(31))] {
        assert!(wrong.parse::<PoolName>().is_err(), "{wrong}");
    }
}

proptest! {
    /// Requests come and go, blocks arrive late or never, are deleted and put again, and devices let go of memory when they like: what a
    /// stage says is here has the right bytes, of a production that was alive when the stage began or came later, and in the end all memory
    /// is free.
    #[test]
    fn whatever_meets_a_staged_block_has_its_bytes_and_no_memory_is_lost(seed in any::<u64>(), blocks in 8u64..80) {
        let world = world(blocks);
        let mut rng = Xoshiro::new(seed);
        let mut below = |most: u64| rng.next_u64() % most;
        let mut stages: Vec<(Stage, Vec<u64>, BTreeMap<u64, u8>)> = Vec::new();
        let mut drafts: Vec<(Draft, Vec<u64>, Vec<BlockOutcome>)> = Vec::new();
        for _ in 0..160 {
            match below(13) {
                0 | 1 => {
                    let begin = below(4) * 20;
                    let keys: Vec<u64> = (begin..begin + 1 + below(20)).collect();
                    let (has, made) = (world.store.has.lock().unwrap(), world.store.made.lock().unwrap());
                    let of = |number: &u64| {
                        let made = made.get(&key(*number)).copied().unwrap_or(0);
                        (*number, made + u8::from(!has.contains_key(&key(*number))))
                    };
                    let least = keys.iter().map(of).collect();
                    drop((has, made));
                    stages.push((world.stage_of(1 + below(2) as u16, keys.clone()), keys, least));
                }
                2 if !stages.is_empty() => drop(stages.swap_remove(below(stages.len() as u64) as usize)),
                3 => world.store.put([below(80)]),
                4 => world.store.delete(below(80)),
                5 => world.store.release(),
                6 => world.clock.advance(SILENCE / 3),
                7 => {
                    let begin = below(76);
                    let numbers: Vec<u64> = (begin..begin + 1 + below(4)).collect();
                    drafts.extend(world.draft(&numbers).ok().map(|draft| (draft, numbers, Vec::new())));
                }
                8 if !drafts.is_empty() => {
                    let one = below(drafts.len() as u64) as usize;
                    if drafts[one].2.is_empty() {
                        let outcomes = world.put_from(&drafts[one].0, &drafts[one].1);
                        drafts[one].2 = outcomes;
                    } else {
                        let (draft, _, outcomes) = drafts.swap_remove(one);
                        if below(4) > 0 {
                            draft.keep(&outcomes);
                        }
                    }
                }
                _ => {
                    let open = world.store.open();
                    if !open.is_empty() {
                        let read = open[below(open.len() as u64) as usize];
                        let (from, count) = (below(4) as usize, 1 + below(8) as usize);
                        world.store.arrive(read, from, count);
                    }
                }
            }
            for (stage, keys, least) in &stages {
                let columns = stage.columns();
                for column in 0..columns {
                    for (number, production) in keys.iter().zip(world.productions(stage, column, keys)) {
                        prop_assert!(production >= least[number], "block {} was deleted before", number);
                    }
                }
            }
        }
        stages.clear();
        drafts.clear();
        world.store.arrive_all();
        world.store.release();
        let stage = world.stage_of(1, [1 << 40]);
        world.store.arrive_all();
        prop_assert_eq!(stage.look(), over(0));
        drop(stage);
        world.store.release();
        // Everything that is here may go.
        while world.pool.0.book().evict().is_some() {}
        prop_assert_eq!(world.free(), blocks);
    }
}
