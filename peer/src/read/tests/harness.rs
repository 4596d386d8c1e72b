//! Paths that follow a script, and a reader that looks at every event and at its memory.
//!
//! A chunk has marks at its two ends, so that a read of a GiB costs little: which production of which block, and which part.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use kvarts_cluster::dealer::PathSet;
use kvarts_cluster::paths::PathId;
use kvarts_contract::api::{
    Order, Origins, Placed, ReadEnd, ReadEvent, ReadRequest, ReadSink, ReadStream, read_channel,
};
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;
use kvarts_layout::{BlockKey, BlockShape, ChunkShape, Coordinate, Group, LayerShape, NamespaceId, OriginId};

use crate::path::{Path, Piece};
use crate::read::drive::Reading;
use crate::read::runner::{Runner, Task};
use crate::read::{Copies, LastResort, MultiRead, NodePaths};

pub(super) const MIB: u64 = 1 << 20;
pub(super) const TICK: Duration = Duration::from_micros(50);
const MARK: usize = 8;

/// Where a chunk lies: its region, and from where on.
type Spot = (u64, usize);

/// What all sides share: time, timers, and which memory is whose.
#[derive(Default)]
pub(super) struct World {
    now: Mutex<Nanos>,
    timers: Mutex<Vec<(Nanos, Waker)>>,
    /// Chunks of the reader's memory that were announced, or are the reader's again at the end.
    readers: Mutex<BTreeMap<Spot, &'static str>>,
    /// Chunks that a path has, by how many of its jobs.
    held: Mutex<BTreeMap<Spot, u32>>,
    /// The regions of the reader's memory.
    places: Mutex<Vec<u64>>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("World")
    }
}

impl World {
    pub(super) fn time(&self) -> Duration {
        self.now.lock().unwrap().since(Nanos::default())
    }

    fn tick(&self) {
        let now = self.now.lock().unwrap().plus(TICK);
        *self.now.lock().unwrap() = now;
        let due: Vec<_> = self.timers.lock().unwrap().extract_if(.., |(at, _)| *at <= now).collect();
        due.into_iter().for_each(|(_, waker)| waker.wake());
    }

    fn is_place(&self, spot: Spot) -> bool {
        self.places.lock().unwrap().contains(&spot.0)
    }

    /// A path writes to a chunk.
    fn write(&self, chunk: &SharedBuf, mark: [u8; MARK]) {
        let spot = (chunk.region().id(), chunk.offset());
        let readers = self.readers.lock().unwrap();
        assert!(!readers.contains_key(&spot), "written to after it was {}", readers[&spot]);
        chunk.copy_in(0, &mark);
        chunk.copy_in(chunk.len() - MARK, &mark);
    }

    fn hold(&self, request: &ReadRequest, shape: &BlockShape) {
        for chunk in chunks(request, shape).map(|(_, _, chunk)| chunk) {
            let spot = (chunk.region().id(), chunk.offset());
            let mut held = self.held.lock().unwrap();
            let count = held.entry(spot).or_default();
            *count += 1;
            assert!(*count == 1 || !self.is_place(spot), "two requests may write to one place");
        }
    }

    fn let_go(&self, request: &ReadRequest, shape: &BlockShape) {
        for chunk in chunks(request, shape).map(|(_, _, chunk)| chunk) {
            *self.held.lock().unwrap().get_mut(&(chunk.region().id(), chunk.offset())).unwrap() -= 1;
        }
    }
}

impl Runner for World {
    fn now(&self) -> Nanos {
        *self.now.lock().unwrap()
    }

    fn sleep_until(&self, _: Nanos) -> Task {
        unreachable!("by its Arc")
    }

    fn spawn(&self, _: Task) {
        unreachable!("reads are polled by hand")
    }
}

/// The world as reads see it.
#[derive(Debug)]
pub(super) struct InWorld(pub(super) Arc<World>);

impl Runner for InWorld {
    fn now(&self) -> Nanos {
        self.0.now()
    }

    fn sleep_until(&self, at: Nanos) -> Task {
        Box::pin(Timer { world: Arc::clone(&self.0), at })
    }

    fn spawn(&self, _: Task) {
        unreachable!("reads are polled by hand")
    }
}

struct Timer {
    world: Arc<World>,
    at: Nanos,
}

impl Future for Timer {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.world.now() >= self.at {
            return Poll::Ready(());
        }
        self.world.timers.lock().unwrap().push((self.at, context.waker().clone()));
        Poll::Pending
    }
}

/// The chunks that a request wants: part, block and memory.
fn chunks<'a>(
    request: &'a ReadRequest,
    shape: &'a BlockShape,
) -> impl Iterator<Item = (u32, u32, SharedBuf)> + 'a {
    let layers = request.layers.clone().unwrap_or(0..shape.layers().len() as u32);
    let chunks = (0u32..)
        .zip(shape.layers())
        .flat_map(|(at, layer)| layer.chunks.iter().map(move |it| (at, it.bytes)));
    let parts = (0u32..).zip(chunks).filter(move |(_, (layer, _))| layers.contains(layer));
    parts.flat_map(move |(part, (_, bytes))| {
        (0..request.keys.len() as u32)
            .map(move |block| (part, block, request.into.chunk(part, block, bytes).expect("a place")))
    })
}

fn mark(production: u8, key: &BlockKey, part: u32) -> [u8; MARK] {
    [production, key.0[0], key.0[1], part as u8, (part >> 8) as u8, 0xA5, 0x5A, 1]
}

pub(super) fn origin(production: u8) -> OriginId {
    OriginId([production; 16])
}

/// What goes wrong with a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fault {
    None,
    /// One of its blocks is damaged.
    Damage(u32),
    /// The path ends it without a word.
    Abandon,
    /// The path has no room.
    Busy,
}

/// What a path does.
pub(super) struct Script {
    /// MiB a second at a time.
    pub(super) speed: Box<dyn Fn(Duration) -> f64 + Send>,
    /// Which production of a block it has.
    pub(super) has: Box<dyn Fn(u32) -> Option<u8> + Send>,
    /// What goes wrong with the piece of this number.
    pub(super) fault: Box<dyn Fn(u64) -> Fault + Send>,
    /// How long it keeps the memory of a piece that was cancelled, and writes to it at the end of that.
    pub(super) lingers: Duration,
    /// When it dies.
    pub(super) dies: Option<Duration>,
    /// From when until when it has no connection.
    pub(super) away: Option<(Duration, Duration)>,
    /// Whether it writes marks.
    pub(super) writes: bool,
}

pub(super) fn steady(speed: f64) -> Script {
    at_speed(move |_| speed)
}

pub(super) fn at_speed(speed: impl Fn(Duration) -> f64 + Send + 'static) -> Script {
    Script {
        speed: Box::new(speed),
        has: Box::new(|_| Some(1)),
        fault: Box::new(|_| Fault::None),
        lingers: Duration::ZERO,
        dies: None,
        away: None,
        writes: true,
    }
}

struct Job {
    request: ReadRequest,
    origins: Arc<Origins>,
    first: u32,
    sink: Option<ReadSink>,
    fault: Fault,
    left: f64,
}

/// A job that is over, while its memory is still the path's.
struct Leaving {
    request: ReadRequest,
    sink: Option<ReadSink>,
    until: Duration,
    spoils: bool,
    /// It may still be written to.
    is_held: bool,
}

struct Work {
    script: Script,
    jobs: Vec<Job>,
    leaving: Vec<Leaving>,
    asked: u64,
    brought: u64,
}

pub(super) struct Fake {
    world: Arc<World>,
    shape: Arc<BlockShape>,
    work: Mutex<Work>,
}

impl Fake {
    pub(super) fn new(world: &Arc<World>, shape: &Arc<BlockShape>, script: Script) -> Arc<Self> {
        let work = Work { script, jobs: Vec::new(), leaving: Vec::new(), asked: 0, brought: 0 };
        Arc::new(Self { world: Arc::clone(world), shape: Arc::clone(shape), work: Mutex::new(work) })
    }

    /// Bytes that it brought, and pieces that it was asked for.
    pub(super) fn told(&self) -> (u64, u64) {
        let work = self.work.lock().unwrap();
        (work.brought, work.asked)
    }

    fn is_idle(&self) -> bool {
        let work = self.work.lock().unwrap();
        work.jobs.is_empty() && work.leaving.is_empty()
    }

    fn advance(&self) {
        let now = self.world.time();
        let mut work = self.work.lock().unwrap();
        let work = &mut *work;
        let is_away = work.script.away.is_some_and(|(from, to)| (from..to).contains(&now));
        let is_dead = is_away || work.script.dies.is_some_and(|dies| now >= dies);
        let mut gone = |job: &mut Job| {
            let late = job.request.deadline.is_some_and(|at| at.since(Nanos::default()) <= now);
            is_dead || late || job.sink.as_ref().is_some_and(ReadSink::is_cancelled)
        };
        // What is first is with the device already.
        let mut with_device = !is_dead && work.jobs.first_mut().is_some_and(&mut gone);
        let over: Vec<Job> = work.jobs.extract_if(.., gone).collect();
        for job in over {
            self.leave(work, job, now, std::mem::take(&mut with_device));
        }
        let speed = if is_dead { 0.0 } else { (work.script.speed)(now) };
        let mut budget = speed * MIB as f64 * TICK.as_secs_f64();
        while let Some(job) = work.jobs.first_mut() {
            if job.left > budget {
                job.left -= budget;
                break;
            }
            budget -= job.left;
            let job = work.jobs.remove(0);
            self.finish(work, job, now);
        }
        let over: Vec<Leaving> = work.leaving.extract_if(.., |it| it.until <= now).collect();
        for Leaving { request, sink, spoils, is_held, .. } in over {
            if spoils && work.script.writes {
                chunks(&request, &self.shape)
                    .for_each(|(_, _, chunk)| self.world.write(&chunk, [0xEE; MARK]));
            }
            if is_held {
                self.world.let_go(&request, &self.shape);
            }
            drop(request);
            sink.into_iter().for_each(|sink| sink.send(ReadEvent::Released));
        }
    }

    /// A job is over before its time.
    fn leave(&self, work: &mut Work, job: Job, now: Duration, with_device: bool) {
        let Job { request, sink, .. } = job;
        let until = if with_device { now + work.script.lingers } else { now };
        let is_late = request.deadline.is_some_and(|at| at.since(Nanos::default()) <= now);
        let sink = sink.filter(|sink| is_late && !sink.is_cancelled());
        if let Some(sink) = &sink {
            let failures = (0..request.keys.len() as u32).map(|block| (block, Reason::DeadlinePassed));
            let held_bytes = if with_device { 1 } else { 0 };
            let end = ReadEnd { failures: failures.collect(), held_bytes, ..ReadEnd::default() };
            sink.send(ReadEvent::End(end));
        }
        work.leaving.push(Leaving { request, sink, until, spoils: with_device, is_held: true });
    }

    fn finish(&self, work: &mut Work, job: Job, now: Duration) {
        let Job { request, origins, first, sink, fault, .. } = job;
        let sink = sink.expect("a job that runs");
        let mut failures: BTreeMap<u32, Reason> = BTreeMap::new();
        let mut productions = BTreeMap::new();
        for (block, key) in (0u32..).zip(&request.keys) {
            let has = (work.script.has)(u32::from(key.0[0]) | u32::from(key.0[1]) << 8);
            match has.filter(|it| origins.admit((first + block) as usize, origin(*it))) {
                Some(production) => drop(productions.insert(block, production)),
                None => drop(failures.insert(block, Reason::NotHere(*key))),
            }
        }
        if let Fault::Damage(block) = fault {
            let block = block % request.keys.len() as u32;
            failures.insert(block, Reason::Config("damaged".to_owned()));
        }
        if work.script.writes {
            for (part, block, chunk) in chunks(&request, &self.shape) {
                let key = request.keys[block as usize];
                match productions.get(&block) {
                    _ if failures.contains_key(&block) => self.world.write(&chunk, [0xDD; MARK]),
                    Some(production) => self.world.write(&chunk, mark(*production, &key, part)),
                    None => {}
                }
            }
        }
        if fault != Fault::Abandon {
            work.brought +=
                self.shape.layers_bytes(&request.layers.clone().unwrap()) * request.keys.len() as u64;
            answer(&sink, &request, failures);
        }
        // Nothing is written any more, though the memory is let go of later.
        self.world.let_go(&request, &self.shape);
        work.leaving.push(Leaving {
            request,
            sink: None,
            until: now + TICK * 3,
            spoils: false,
            is_held: false,
        });
    }
}

fn answer(sink: &ReadSink, request: &ReadRequest, failures: BTreeMap<u32, Reason>) {
    let (blocks, layers) = (request.keys.len() as u32, request.layers.clone().unwrap());
    let leading = failures.keys().next().copied().unwrap_or(blocks);
    match request.order {
        Order::Layers => {
            for layer in layers.clone() {
                sink.send(ReadEvent::Layer { layer, blocks: leading });
            }
        }
        Order::Blocks => {
            for block in (0..blocks).filter(|block| !failures.contains_key(block)) {
                sink.send(ReadEvent::Block(block));
            }
        }
    }
    let (usable_blocks, usable_layers) = (leading, layers.len() as u32);
    let failures = failures.into_iter().collect();
    sink.send(ReadEvent::End(ReadEnd { usable_blocks, usable_layers, failures, held_bytes: 0 }));
}

impl Path for Fake {
    fn read(&self, piece: Piece) -> Result<ReadStream, Reason> {
        let mut work = self.work.lock().unwrap();
        let fault = (work.script.fault)(work.asked);
        work.asked += 1;
        if work.script.dies.is_some_and(|dies| self.world.time() >= dies) {
            return Err(Reason::Passing("no connection".to_owned()));
        }
        if work.script.away.is_some_and(|(from, to)| (from..to).contains(&self.world.time())) {
            return Err(Reason::Busy("the peer is away"));
        }
        if fault == Fault::Busy {
            return Err(Reason::Busy("no room"));
        }
        let Piece { request, origins, first } = piece;
        self.world.hold(&request, &self.shape);
        let left =
            (self.shape.layers_bytes(&request.layers.clone().unwrap()) * request.keys.len() as u64) as f64;
        let (sink, stream) = read_channel();
        work.jobs.push(Job { request, origins, first, sink: Some(sink), fault, left });
        Ok(stream)
    }

    fn away_since(&self) -> Option<Nanos> {
        let (from, to) = self.work.lock().unwrap().script.away?;
        (from..to).contains(&self.world.time()).then(|| Nanos::default().plus(from))
    }
}

/// Which blocks of which layers, and where.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) order: Order,
    pub(super) blocks: u32,
    /// Bytes of each part of a layer.
    pub(super) layers: Vec<Vec<u64>>,
    pub(super) deadline: Option<Duration>,
}

pub(super) fn shape(layers: &[Vec<u64>]) -> Arc<BlockShape> {
    let layer = |(layer, chunks): (u32, &Vec<u64>)| LayerShape {
        layer,
        chunks: chunks.iter().map(|&bytes| ChunkShape { bytes, align: 1 }).collect(),
    };
    Arc::new(BlockShape::new((0..).zip(layers).map(layer).collect()).unwrap())
}

/// How a read went.
#[derive(Debug)]
pub(super) struct Went {
    pub(super) end: ReadEnd,
    /// When it ended, and when its first layer or block was announced.
    pub(super) took: Duration,
    pub(super) first: Option<Duration>,
    pub(super) blocks: Vec<u32>,
    pub(super) layers: Vec<(u32, u32)>,
    pub(super) steps: u64,
    pub(super) met: Vec<Option<OriginId>>,
}

#[derive(Default)]
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A read over paths that follow scripts.
pub(super) struct Stage {
    pub(super) world: Arc<World>,
    pub(super) shape: Arc<BlockShape>,
    pub(super) fakes: Vec<Arc<Fake>>,
    pub(super) nodes: Arc<NodePaths>,
    /// What is asked at last.
    pub(super) last: Option<Arc<dyn LastResort>>,
    wanted: Wanted,
    into: Placed,
    checks: bool,
}

impl Stage {
    pub(super) fn new(wanted: Wanted, scripts: Vec<Script>) -> Self {
        let (world, shape) = (Arc::new(World::default()), shape(&wanted.layers));
        let checks = scripts.iter().all(|script| script.writes);
        let fakes: Vec<_> = scripts.into_iter().map(|script| Fake::new(&world, &shape, script)).collect();
        let nodes = NodePaths::new(Arc::clone(&fakes[0]) as _);
        for fake in &fakes[1..] {
            nodes.add("peer", Arc::clone(fake) as _).unwrap();
        }
        let buf = |bytes: u64| {
            let region = Region::anonymous(bytes as usize).unwrap();
            world.places.lock().unwrap().push(region.id());
            SharedBuf::new(&region, 0, bytes as usize).unwrap()
        };
        let buffers = shape.layers().iter().map(|layer| buf(layer.bytes() * u64::from(wanted.blocks)));
        let into = Placed::layers(&shape, buffers.collect(), wanted.blocks).unwrap();
        Self { world, shape, fakes, nodes, last: None, wanted, into, checks }
    }

    /// The same, where all reads together have so much scratch memory.
    pub(super) fn with_scratch(self, bytes: u64) -> Self {
        let nodes = NodePaths::with_scratch(Arc::clone(&self.fakes[0]) as _, bytes);
        for fake in &self.fakes[1..] {
            nodes.add("peer", Arc::clone(fake) as _).unwrap();
        }
        Self { nodes, ..self }
    }

    pub(super) fn keys(&self) -> Vec<BlockKey> {
        let key = |block: u32| {
            let mut bytes = [0; 32];
            (bytes[0], bytes[1]) = (block as u8, (block >> 8) as u8);
            BlockKey(bytes)
        };
        (0..self.wanted.blocks).map(key).collect()
    }

    /// All paths are said to have all blocks.
    pub(super) fn all(&self) -> Vec<PathSet> {
        let all = (0..self.fakes.len() as u16).fold(PathSet::default(), |all, path| all.with(PathId(path)));
        vec![all; self.wanted.blocks as usize]
    }

    pub(super) fn begin(&self, copies: Vec<PathSet>) -> (Reading, ReadStream, Arc<Origins>) {
        let mut request = ReadRequest::new(
            NamespaceId::default(),
            Group(0),
            Coordinate::Replicated,
            self.keys(),
            self.into.clone(),
        );
        request.order = self.wanted.order;
        request.deadline = self.wanted.deadline.map(|at| Nanos::default().plus(at));
        let origins = Origins::any(self.wanted.blocks as usize);
        let (shape, copies) = (Arc::clone(&self.shape), Copies::of(copies));
        let (request, into) = request.tiled(&shape);
        let known = Arc::clone(&origins);
        self.last.iter().for_each(|last| copies.at_last(Arc::clone(last)));
        let what = MultiRead { request, into, shape, origins: known, copies, first: 0, is_alone: true };
        let (sink, stream) = read_channel();
        what.check(self.world.now()).unwrap();
        let runner = Arc::new(InWorld(Arc::clone(&self.world)));
        (Reading::new(what, Arc::clone(&self.nodes), runner, sink), stream, origins)
    }

    /// Lets time pass without a read.
    pub(super) fn pass(&self, time: Duration) {
        let end = self.world.time() + time;
        while self.world.time() < end {
            self.world.tick();
            self.fakes.iter().for_each(|fake| fake.advance());
        }
    }

    /// Reads, and `at` each tick does something.
    pub(super) fn run_with(&self, copies: Vec<PathSet>, mut at: impl FnMut(Duration)) -> Went {
        let (mut reading, stream, origins) = self.begin(copies);
        let flag = Arc::new(Flag(AtomicBool::new(true)));
        let waker = Waker::from(Arc::clone(&flag));
        let begin = self.world.time();
        let mut went = Went {
            end: ReadEnd::default(),
            took: begin,
            first: None,
            blocks: Vec::new(),
            layers: Vec::new(),
            steps: 0,
            met: Vec::new(),
        };
        let (mut is_over, mut has_ended) = (false, false);
        while !is_over || !self.fakes.iter().all(|fake| fake.is_idle()) {
            let now = self.world.time();
            let is_stuck = now - begin > Duration::from_secs(8);
            assert!(!is_stuck, "a read that does not end: {went:?} {:?} {:?}", reading.open, reading.asks);
            if !is_over && flag.0.swap(false, Ordering::SeqCst) {
                is_over = reading.poll(&mut Context::from_waker(&waker)).is_ready();
            }
            while let Some(event) = stream.try_next() {
                has_ended |= matches!(event, ReadEvent::End(_));
                self.take(event, &mut went, &origins, now - begin);
            }
            at(now - begin);
            self.world.tick();
            self.fakes.iter().for_each(|fake| fake.advance());
        }
        assert!(has_ended, "no end");
        (went.steps, went.met) = (reading.steps + reading.dealer.steps(), origins.met());
        drop(reading);
        self.look_at_all(&went, &origins);
        self.world.readers.lock().unwrap().clear();
        for status in self.nodes.status(self.world.now()) {
            assert_eq!((status.outstanding, status.reads), (0, 0), "what nobody counts: {status:?}");
        }
        went
    }

    pub(super) fn run(&self, copies: Vec<PathSet>) -> Went {
        self.run_with(copies, |_| {})
    }

    fn take(&self, event: ReadEvent, went: &mut Went, origins: &Origins, now: Duration) {
        let (order, count) = (self.wanted.order, self.shape.layers().len() as u32);
        match event {
            ReadEvent::Layer { layer, blocks } => {
                assert_eq!((order, layer as usize), (Order::Layers, went.layers.len()));
                assert!(went.layers.last().is_none_or(|(_, before)| blocks <= *before));
                self.announced(layer..layer + 1, 0..blocks, origins);
                went.layers.push((layer, blocks));
                went.first.get_or_insert(now);
            }
            ReadEvent::Block(block) => {
                assert_eq!(order, Order::Blocks);
                assert!(went.blocks.last().is_none_or(|before| *before < block));
                self.announced(0..count, block..block + 1, origins);
                went.blocks.push(block);
                went.first.get_or_insert(now);
            }
            ReadEvent::End(end) => {
                went.took = now;
                if end.held_bytes == 0 {
                    self.mine("the reader's at the end");
                }
                went.end = end;
            }
            ReadEvent::Released => {
                assert!(went.end.held_bytes > 0, "a release of nothing");
                self.mine("released");
            }
        }
    }

    /// All memory is the reader's again.
    fn mine(&self, why: &'static str) {
        for (layer, _) in (0..).zip(self.shape.layers()) {
            self.each(layer..layer + 1, 0..self.wanted.blocks, |_, _, chunk| {
                let spot = (chunk.region().id(), chunk.offset());
                self.world.readers.lock().unwrap().entry(spot).or_insert(why);
            });
        }
    }

    fn each(
        &self,
        layers: std::ops::Range<u32>,
        blocks: std::ops::Range<u32>,
        mut look: impl FnMut(u32, u32, SharedBuf),
    ) {
        if !self.checks {
            return;
        }
        let chunks = (0u32..).zip(self.shape.layers());
        let chunks = chunks.flat_map(|(at, layer)| layer.chunks.iter().map(move |it| (at, it.bytes)));
        for (part, (_, bytes)) in (0u32..).zip(chunks).filter(|(_, (layer, _))| layers.contains(layer)) {
            for block in blocks.clone() {
                look(part, block, self.into.chunk(part, block, bytes).unwrap());
            }
        }
    }

    fn announced(&self, layers: std::ops::Range<u32>, blocks: std::ops::Range<u32>, origins: &Origins) {
        let (met, keys) = (origins.met(), self.keys());
        self.each(layers, blocks, |part, block, chunk| {
            let production = met[block as usize].expect("met").0[0];
            let mut found = [0; MARK];
            for at in [0, chunk.len() - MARK] {
                chunk.copy_out(at, &mut found);
                assert_eq!(found, mark(production, &keys[block as usize], part), "block {block} part {part}");
            }
            let spot = (chunk.region().id(), chunk.offset());
            self.world.readers.lock().unwrap().insert(spot, "announced");
        });
    }

    /// Everything that was announced is still in its place, and the end says the same as the events.
    fn look_at_all(&self, went: &Went, origins: &Origins) {
        let Went { end, blocks, layers, .. } = went;
        match self.wanted.order {
            Order::Layers => {
                for (layer, blocks) in layers {
                    self.announced(*layer..layer + 1, 0..*blocks, origins);
                }
                let has_all = layers.len() == self.shape.layers().len();
                if let Some((_, last)) = layers.last() {
                    assert!(end.usable_blocks <= *last);
                    assert_eq!(end.usable_layers as usize, layers.len());
                }
                assert!(has_all || end.usable_blocks == 0 || self.wanted.deadline.is_some());
            }
            Order::Blocks => {
                for block in blocks {
                    self.announced(0..self.shape.layers().len() as u32, *block..block + 1, origins);
                }
                let failed: Vec<u32> = end.failures.iter().map(|(block, _)| *block).collect();
                let mut all: Vec<u32> = blocks.iter().copied().chain(failed).collect();
                all.sort_unstable();
                assert_eq!(
                    all,
                    (0..self.wanted.blocks).collect::<Vec<_>>(),
                    "each block came or failed, once"
                );
                let leading = (0u32..).zip(blocks).take_while(|(at, block)| at == *block).count();
                assert_eq!(end.usable_blocks as usize, leading);
            }
        }
        assert!(end.failures.is_sorted_by(|a, b| a.0 < b.0));
    }
}
