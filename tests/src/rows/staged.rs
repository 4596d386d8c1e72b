//! A pool over a store in simulated time: stages and drafts of two tenants' models meet puts, deletes, expiry, eviction, reads that hang for ever,
//! restarts and power cuts, in an order that the seed draws.
//!
//! What a stage says is here has, for as long as it is held, the bytes of a production of that block, and of none that a delete had met, or whose
//! time was over, before the stage began. What a draft keeps are bytes that were stored from it. A stage of which nothing comes ends by its silence.
//! In the end all memory can be had again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvarts_client::pool::{Column, Draft, DraftTerms, Pool, Stage as Staged, StageRequest, Storing};
use kvarts_contract::api::{
    BlockOutcome, ContainsReply, ContainsRequest, DeleteReply, DeleteRequest, Durability, KvStore, LeaseId,
    MatchReply, MatchRequest, PutReply, PutRequest, ReadRequest, ReadStream, Sequence, SnapshotCursor,
    SnapshotPage, Subscription, Target, TtlReply, TtlRequest,
};
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::class::Class;
use kvarts_contract::clock::{Clock, Nanos};
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::ticket::{Ticket, ticket};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId};
use kvarts_store::engine::{Limits, Options, Store};

use super::pool::{States, until};
use super::{Row, Tally};
use crate::conformance::Desk;
use crate::fixture;
use crate::sim::log::Mixer;
use crate::sim::{
    Crash, Effect, Latency, Media, OpKind, Rng, Rule, Seed, SimWorld, When, Which, WorldConfig,
};
use crate::stage::{SimStage, Stage};

/// Operations of a course.
const OPS: u64 = 90;
/// Blocks of a chain.
const BLOCKS: u64 = 24;
/// Models, each of a tenant of its own.
const MODELS: usize = 2;
const SILENCE: Duration = Duration::from_secs(2);
const TTL: Duration = Duration::from_secs(30);

/// The server as a client has it: the store that is open now, or none while it is away.
#[derive(Debug, Default)]
struct Server(Mutex<Option<Store>>);

const AWAY: Reason = Reason::Busy("the server is away");

impl Server {
    fn now(&self) -> Result<Store, Error> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(Error(AWAY))
    }

    fn set(&self, store: Option<Store>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = store;
    }
}

/// What is answered at once.
fn at_once<T>(answer: T) -> Ticket<T> {
    let (reply, ticket) = ticket();
    // The asking end is right here.
    let _ = reply.send(answer);
    ticket
}

impl KvStore for Server {
    fn register(&self, identity: &Identity, geometry: &Geometry) -> Result<NamespaceId, Error> {
        self.now()?.register(identity, geometry)
    }

    fn put(&self, request: PutRequest) -> Ticket<Result<PutReply, Error>> {
        self.now().map_or_else(|error| at_once(Err(error)), |store| store.put(request))
    }

    fn match_prefix(&self, request: &MatchRequest<'_>) -> Result<MatchReply, Error> {
        self.now()?.match_prefix(request)
    }

    fn contains(&self, request: &ContainsRequest<'_>) -> Result<ContainsReply, Error> {
        self.now()?.contains(request)
    }

    fn unlock(&self, lease: LeaseId) -> bool {
        self.now().is_ok_and(|store| store.unlock(lease))
    }

    fn renew(&self, lease: LeaseId, hold: Duration) -> Result<(), Error> {
        self.now()?.renew(lease, hold)
    }

    fn delete(&self, request: DeleteRequest) -> Ticket<Result<DeleteReply, Error>> {
        self.now().map_or_else(|error| at_once(Err(error)), |store| store.delete(request))
    }

    fn set_ttl(&self, request: &TtlRequest<'_>) -> Result<TtlReply, Error> {
        self.now()?.set_ttl(request)
    }

    fn set_default_ttl(&self, namespace: NamespaceId, ttl: Option<Duration>) -> Result<(), Error> {
        self.now()?.set_default_ttl(namespace, ttl)
    }

    fn subscribe(&self, from: Option<Sequence>) -> Subscription {
        self.now().expect("nothing subscribes while it is away").subscribe(from)
    }

    fn snapshot(&self, cursor: Option<SnapshotCursor>) -> Ticket<Result<SnapshotPage, Error>> {
        self.now().map_or_else(|error| at_once(Err(error)), |store| store.snapshot(cursor))
    }

    fn read(&self, request: ReadRequest) -> Result<ReadStream, Error> {
        self.now()?.read(request)
    }
}

/// Blocks of a model and a column, by their numbers.
type Place = (usize, usize, u64);

/// What is known of a block.
#[derive(Clone, Debug, Default)]
struct Block {
    /// Productions that were put, and may have been stored; and when each was put, in turns.
    made: Vec<(u64, u64)>,
    /// The first turn whose production no delete has met.
    floor: u64,
    /// When the production that was stored last ends, and its turn.
    ends: Option<(u64, Nanos)>,
}

struct Held {
    stage: Staged,
    model: usize,
    columns: Vec<usize>,
    keys: Vec<u64>,
    /// The first turn of each block whose production may be seen, by column and block.
    floors: Vec<Vec<u64>>,
}

enum Saved {
    Room(Draft),
    Put(Storing),
}

struct Save {
    saved: Option<Saved>,
    model: usize,
    column: usize,
    keys: Vec<u64>,
    production: u64,
    /// How often the server had come back when it was put.
    restarts: u64,
}

struct Course {
    stage: Option<SimStage>,
    server: Arc<Server>,
    pool: Pool,
    options: Options,
    seed: Seed,
    blocks: BTreeMap<Place, Block>,
    /// Counts puts and deletes: a put's number is its production's, too.
    productions: u64,
    held: Vec<Held>,
    saves: Vec<Save>,
    /// A read of the disk hangs, or one of the next will.
    hangs: bool,
    restarts: u64,
}

fn world(seed: Seed, clock: Option<Arc<crate::sim::SimClock>>, media: Option<Media>) -> SimWorld {
    let mut config = WorldConfig::default();
    config.disk.latency =
        Latency { read: (1000, 90_000), write: (1000, 90_000), flush: (1000, 300_000), meta: (1000, 90_000) };
    let media = media.unwrap_or_else(|| Media::new(config.disk.dirs, config.disk.capacity));
    match clock {
        Some(clock) => SimWorld::at(clock, seed.0, &config, media),
        None => SimWorld::with_media(seed.0, &config, media),
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn column(which: usize) -> (Group, Coordinate) {
    fixture::columns()[which]
}

fn shape(which: usize) -> Arc<BlockShape> {
    let (group, coordinate) = column(which);
    Arc::new(fixture::shape(group, coordinate))
}

impl Course {
    fn new(seed: Seed) -> Result<Self, String> {
        let mut rng = seed.child("options").rng();
        let options = Options {
            shards_per_directory: 1 + rng.index(2) as u32,
            segment_bytes: 256 << 10,
            budget_bytes: 4 << 20,
            executors: 1,
            limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
            ..Options::default()
        };
        let stage = SimStage::open(&world(seed, None, None), &options).map_err(text)?;
        let server = Arc::new(Server::default());
        server.set(Some(stage.engine().clone()));
        let bytes = shape(0).block_bytes() * rng.between(16, 90);
        let region = Region::anonymous(bytes.next_multiple_of(4096) as usize).map_err(text)?;
        let clock: Arc<dyn Clock> = stage.world().clock().clone();
        let pool = Pool::new(server.clone(), &clock, &region);
        Ok(Self {
            stage: Some(stage),
            server,
            pool,
            options,
            seed,
            blocks: BTreeMap::new(),
            productions: 0,
            held: Vec::new(),
            saves: Vec::new(),
            hangs: false,
            restarts: 0,
        })
    }

    fn stage(&self) -> &SimStage {
        self.stage.as_ref().expect("open but while it restarts")
    }

    fn desk(&self, model: usize) -> Desk<'_> {
        Desk::new(self.stage(), ["staged by one", "staged by another"][model])
    }

    fn keys(&self, model: usize, numbers: &[u64]) -> Vec<BlockKey> {
        let desk = self.desk(model);
        numbers.iter().flat_map(|number| desk.keys(*number..number + 1)).collect()
    }

    fn column(&self, model: usize, which: usize) -> Column {
        let (group, coordinate) = column(which);
        Column { namespace: self.desk(model).namespace, group, coordinate }
    }

    fn production(&mut self) -> u64 {
        self.productions += 1;
        self.productions
    }

    fn block(&mut self, place: Place) -> &mut Block {
        self.blocks.entry(place).or_default()
    }

    fn put(&mut self, rng: &mut Rng) -> Result<(), String> {
        let (model, which) = (rng.index(MODELS), rng.index(2));
        let numbers = run(rng, 6);
        let production = self.production();
        let keys = self.keys(model, &numbers);
        let durability = if rng.coin() { Durability::Durable } else { Durability::Relaxed };
        let expires_after = (rng.below(4) == 0).then_some(TTL);
        let desk = self.desk(model);
        let request = desk.request(column(which), &keys, production);
        let request = PutRequest { durability, expires_after, ..request };
        let reply = self.stage().put(request).map_err(text)?;
        let ends = expires_after.map(|ttl| self.stage().now().plus(ttl));
        for (number, outcome) in numbers.iter().zip(&reply.outcomes) {
            if *outcome == BlockOutcome::Stored {
                let block = self.block((model, which, *number));
                block.made.push((production, production));
                block.ends = ends.map(|ends| (production, ends));
            }
        }
        Ok(())
    }

    fn delete(&mut self, rng: &mut Rng) -> Result<(), String> {
        let (model, which) = (rng.index(MODELS), rng.index(2));
        let numbers = run(rng, 3);
        let keys = self.keys(model, &numbers);
        let namespace = self.desk(model).namespace;
        let target = Target::Keys { column: Some(column(which)), keys };
        let request = DeleteRequest { namespace, target, deadline: None };
        crate::stage::ask(self.stage(), self.stage().engine().delete(request)).map_err(text)?;
        // Acknowledged: nothing that was put before is seen by a stage that begins now.
        let floor = self.production();
        for number in numbers {
            self.block((model, which, number)).floor = floor;
        }
        Ok(())
    }

    fn begin(&mut self, rng: &mut Rng) -> Result<(), String> {
        let model = rng.index(MODELS);
        let columns = if rng.coin() { vec![0, 1] } else { vec![rng.index(2)] };
        let numbers = run(rng, 10);
        let now = self.stage().now();
        let floor = |which: &usize, number: &u64| {
            let block = self.blocks.get(&(model, *which, *number)).cloned().unwrap_or_default();
            // Times to live are counted in tenths of a second.
            let over = block.ends.filter(|(_, ends)| ends.plus(Duration::from_millis(200)) <= now);
            block.floor.max(over.map_or(0, |(turn, _)| turn + 1))
        };
        let floors =
            columns.iter().map(|which| numbers.iter().map(|number| floor(which, number)).collect()).collect();
        let request = StageRequest {
            columns: columns.iter().map(|which| (self.column(model, *which), shape(*which))).collect(),
            keys: self.keys(model, &numbers),
            first_block: numbers[0] as u32,
            silence: SILENCE,
            class: Class::Foreground,
        };
        let stage = self.pool.stage(request).map_err(text)?;
        self.held.push(Held { stage, model, columns, keys: numbers, floors });
        Ok(())
    }

    /// Room for a save, which is written at once with bytes of a production that is put later.
    fn draft(&mut self, rng: &mut Rng) {
        let (model, which) = (rng.index(MODELS), rng.index(2));
        let numbers = run(rng, 6);
        let keys = self.keys(model, &numbers);
        let made = self.pool.draft((self.column(model, which), &shape(which)), &keys, numbers[0] as u32);
        let Ok(draft) = made else { return };
        let production = self.production();
        let (group, coordinate) = column(which);
        let mut at = keys.iter();
        for stretch in draft.stretches() {
            for first in 0..stretch.count {
                let key = at.next().expect("as many blocks as keys");
                let content = fixture::content(key, group, coordinate, production, &shape(which));
                for (part, chunk) in (0u32..).zip(&content) {
                    let one = kvarts_layout::plan::Stretch { first, count: 1, ..stretch };
                    let (start, bytes) = one.part(&shape(which), part).expect("a part of the shape");
                    let place = SharedBuf::new(self.pool.region(), start as usize, bytes as usize);
                    place.expect("inside of the pool").copy_in(0, chunk);
                }
            }
        }
        self.saves.push(Save {
            saved: Some(Saved::Room(draft)),
            model,
            column: which,
            keys: numbers,
            production,
            restarts: 0,
        });
    }

    /// One save goes on: it is put, or looked at, or given up.
    fn save(&mut self, rng: &mut Rng) {
        if self.saves.is_empty() {
            return;
        }
        let at = rng.index(self.saves.len());
        let give_up = rng.below(8) == 0;
        let save = &mut self.saves[at];
        match save.saved.take() {
            Some(Saved::Room(draft)) if !give_up => {
                let (model, which, production) = (save.model, save.column, save.production);
                self.productions += 1;
                for number in &save.keys {
                    let block = self.blocks.entry((model, which, *number)).or_default();
                    block.made.push((production, self.productions));
                }
                let terms = DraftTerms {
                    parent: kvarts_contract::api::Parent::Unknown,
                    durability: if rng.coin() { Durability::Durable } else { Durability::Relaxed },
                    expires_after: None,
                    deadline: None,
                };
                self.saves[at].restarts = self.restarts;
                self.saves[at].saved = Some(Saved::Put(draft.put(&terms)));
            }
            Some(Saved::Put(mut storing)) => {
                let polled = std::pin::Pin::new(&mut storing).poll(&mut Context::from_waker(Waker::noop()));
                match polled {
                    Poll::Pending if !give_up => save.saved = Some(Saved::Put(storing)),
                    Poll::Pending => {}
                    Poll::Ready(outcomes) => {
                        let Save { model, column, keys, production, restarts, .. } =
                            self.saves.swap_remove(at);
                        for (number, outcome) in keys.iter().zip(outcomes) {
                            let block = self.blocks.entry((model, column, *number)).or_default();
                            match outcome {
                                BlockOutcome::Stored => block.ends = None,
                                // The answer went with the server, and the put may have been done.
                                BlockOutcome::Refused(_) if restarts != self.restarts => {}
                                // These bytes are no block's.
                                _ => block.made.retain(|(made, _)| *made != production),
                            }
                        }
                        return;
                    }
                }
            }
            _ => {}
        }
        if self.saves[at].saved.is_none() {
            self.saves.swap_remove(at);
        }
    }

    /// The server ends, cleanly or not, and comes back with what its disks have.
    fn restart(&mut self, rng: &mut Rng) -> Result<(), String> {
        self.restarts += 1;
        self.server.set(None);
        let stage = self.stage.take().expect("it is open");
        let clock = Arc::clone(stage.world().clock());
        // One that hangs is not waited for.
        let media = match if std::mem::take(&mut self.hangs) { 2 } else { rng.below(3) } {
            0 => stage.close().map_err(text)?,
            1 => stage.cut_power().image(Crash::LoseAll),
            _ => stage.world().kill(),
        };
        let seed = self.seed.nth(self.productions);
        let stage = SimStage::open(&world(seed, Some(clock), Some(media)), &self.options).map_err(text)?;
        self.server.set(Some(stage.engine().clone()));
        self.stage = Some(stage);
        Ok(())
    }

    /// One of the next reads of the disk never ends.
    fn hang(&mut self, rng: &mut Rng) {
        let when = When::Nth(1 + rng.below(4));
        self.stage().world().disk().inject(Rule::new(Which::Kind(OpKind::Read), when, Effect::Stuck));
        self.hangs = true;
    }

    /// Some silences later all stages are over: each look may take in what came of one read, and begin the next.
    fn over(&self) -> Result<(), String> {
        let waits = || self.held.iter().filter(|held| !held.stage.look().is_over).count();
        for _ in 0..10 {
            if waits() == 0 {
                return Ok(());
            }
            self.stage().advance(SILENCE);
        }
        Err(format!("{} stages wait behind their silence", waits()))
    }

    /// Everything that is held has bytes that it may have.
    fn judge(&self) -> Result<(), String> {
        for held in &self.held {
            let staged = held.stage.look().staged as usize;
            for (at, which) in held.columns.iter().enumerate() {
                self.judge_column(held, at, *which, staged)?;
            }
        }
        Ok(())
    }

    fn judge_column(&self, held: &Held, at: usize, which: usize, staged: usize) -> Result<(), String> {
        let shape = shape(which);
        let stretches = held.stage.stretches(at);
        let blocks = stretches.iter().flat_map(|all| {
            (0..all.count).map(|one| kvarts_layout::plan::Stretch {
                first: all.first + one,
                count: 1,
                ..*all
            })
        });
        let blocks: Vec<_> = blocks.collect();
        if blocks.len() != staged {
            return Err(format!("{staged} blocks are staged, and {} have a place", blocks.len()));
        }
        let (group, coordinate) = column(which);
        for ((stretch, number), floor) in blocks.iter().zip(&held.keys).zip(&held.floors[at]) {
            let mut found = Vec::new();
            for part in 0..shape.chunk_count() {
                let (start, bytes) = stretch.part(&shape, part).expect("a part of the shape");
                let place = SharedBuf::new(self.pool.region(), start as usize, bytes as usize);
                found.push(place.expect("inside of the pool").to_vec());
            }
            let key = self.keys(held.model, &[*number])[0];
            let block = self.blocks.get(&(held.model, which, *number)).cloned().unwrap_or_default();
            let of = |(production, _): &&(u64, u64)| {
                found == fixture::content(&key, group, coordinate, *production, &shape)
            };
            match block.made.iter().rev().find(of) {
                Some((_, turn)) if turn >= floor => {}
                Some((_, turn)) => {
                    return Err(format!(
                        "block {number} of column {which} was put in turn {turn}, and had ended: {floor} is the first that may be seen"
                    ));
                }
                None => {
                    return Err(format!("block {number} of column {which} has bytes that were never stored"));
                }
            }
        }
        Ok(())
    }

    /// When nothing is held any more all memory can be had.
    fn ends(mut self) -> Result<(), String> {
        self.held.clear();
        self.saves.clear();
        if self.hangs {
            let mut rng = self.seed.child("end").rng();
            self.restart(&mut rng)?;
        }
        self.stage().world().settle();
        // Reads that were cancelled have let go of their memory; what they told is taken in with the next look.
        let keys = self.keys(0, &[9_000]);
        let columns = vec![(self.column(0, 0), shape(0))];
        let request =
            StageRequest { columns, keys, first_block: 0, silence: SILENCE, class: Class::Foreground };
        let last = self.pool.stage(request).map_err(text)?;
        self.stage().wait(&mut || last.look().is_over);
        drop(last);
        self.stage().world().settle();
        let counts = self.pool.counts();
        let all = counts.bytes / shape(0).block_bytes();
        let numbers: Vec<u64> = (10_000..10_000 + all * 3 / 4).collect();
        let keys = self.keys(0, &numbers);
        let draft = self.pool.draft((self.column(0, 0), &shape(0)), &keys, 0);
        draft
            .map(drop)
            .map_err(|error| format!("three quarters of the pool cannot be had: {error}; {counts:?}"))?;
        self.stage().look()
    }
}

/// Some blocks that follow each other.
fn run(rng: &mut Rng, most: u64) -> Vec<u64> {
    let begin = rng.below(BLOCKS - 1);
    (begin..(begin + 1 + rng.below(most)).min(BLOCKS)).collect()
}

fn course(seed: Seed, states: &States) -> Result<(), String> {
    let mut course = Course::new(seed)?;
    let mut rng = seed.child("course").rng();
    for number in 0..OPS {
        let kind = rng.below(40);
        let note = |what: String| format!("operation {number} of kind {kind}: {what}");
        match kind {
            0..9 => course.put(&mut rng).map_err(note)?,
            9..12 => course.delete(&mut rng).map_err(note)?,
            12..21 => course.begin(&mut rng).map_err(note)?,
            21..26 if !course.held.is_empty() => {
                let one = rng.index(course.held.len());
                drop(course.held.swap_remove(one));
            }
            26..30 => course.draft(&mut rng),
            30..37 => course.save(&mut rng),
            37 => {
                course.stage().advance(SILENCE / 2);
            }
            38 => {
                course.stage().advance(TTL);
                course.over().map_err(note)?;
            }
            _ => match rng.below(3) {
                0 => course.restart(&mut rng).map_err(note)?,
                1 => course.hang(&mut rng),
                _ => {}
            },
        }
        for _ in 0..rng.below(60) {
            course.stage().world().step();
        }
        course.judge().map_err(note)?;
    }
    let counts = course.pool.counts();
    let mut state = Mixer::new(counts.hits);
    [counts.shared, counts.came, counts.kept, counts.withdrawn, counts.evicted]
        .iter()
        .for_each(|one| state.word(*one));
    state.bytes(&course.stage().world().disk().log().digest().to_le_bytes());
    states.reach(state.value());
    course.ends()
}

/// Row R42.
pub(super) fn row() -> Row {
    Row {
        id: "R42",
        what: "stages and drafts of a pool under puts, deletes, expiry, eviction, reads that hang, restarts and power cuts",
        counts: "courses with different event logs",
        targets: [150, 20_000, 200_000],
        run: |ask, target| -> Tally { until(ask, target, course) },
    }
}
