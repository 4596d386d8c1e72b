//! Where a store under test stands: in the simulation, on a real directory, or nowhere but in memory.
//!
//! A test asks and waits through [`Stage`] and so need not know what makes time pass. Waiting has a bound
//! everywhere: a hang is a failure with the end of the event log, never a test that does not end.
#![allow(clippy::disallowed_methods, reason = "real stages stand outside the simulation")]

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use kvarts_contract::api::{KvStore, PutReply, PutRequest, ReadEnd, ReadEvent, ReadRequest, ReadStream};
use kvarts_contract::clock::ManualClock;
use kvarts_contract::clock::{Clock, Nanos};
use kvarts_contract::error::Error;
use kvarts_contract::events::record::Content;
use kvarts_contract::ticket::Ticket;
use kvarts_store::engine::{EvictionPolicy, Executors, Limits, Options, Store};
use kvarts_store::home::{Home, HomeOptions};

use crate::audit;
use crate::model::Model;
use crate::sim::{CrashState, Media, SimWorld};

/// Steps of a simulated world after which a wait has hung.
pub const STEPS_MAX: u64 = 400_000;
/// How long a real store may take for anything that a test asks.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Where a store under test stands.
pub trait Stage {
    /// The store.
    fn store(&self) -> &dyn KvStore;

    /// Lets things happen until `done`, which is asked again and again.
    fn wait(&self, done: &mut dyn FnMut() -> bool);

    /// Gives whatever is under way time to end.
    fn rest(&self);

    /// The clock that deadlines and leases are measured by.
    fn now(&self) -> Nanos;

    /// Moves time on; false where time cannot be moved.
    fn advance(&self, by: Duration) -> bool;

    /// Compares the store's books with what can be counted at any moment, where there are books. Cheap enough to be
    /// called after every operation of a test; panics with what is wrong.
    fn audit(&self) {}

    /// The answer to a question.
    fn answer(&self, ticket: Ticket<Result<PutReply, Error>>) -> Result<PutReply, Error> {
        let (mut ticket, mut answer) = (ticket, None);
        self.wait(&mut || {
            answer = ticket.try_take();
            answer.is_some()
        });
        answer.expect("waited for it").expect("a put is always answered")
    }

    /// Puts, and waits for the outcomes.
    fn put(&self, request: PutRequest) -> Result<PutReply, Error> {
        self.answer(self.store().put(request))
    }

    /// Every event of a stream up to its end.
    fn events(&self, stream: &ReadStream) -> (Vec<ReadEvent>, ReadEnd) {
        let mut events = Vec::new();
        self.wait(&mut || {
            while let Some(event) = stream.try_next() {
                events.push(event);
            }
            events.iter().any(|event| matches!(event, ReadEvent::End(_)))
        });
        let at = events.iter().position(|event| matches!(event, ReadEvent::End(_))).expect("waited for it");
        let ReadEvent::End(end) = events[at].clone() else { unreachable!("it was found by its kind") };
        if end.held_bytes == 0 {
            assert_eq!(at + 1, events.len(), "events after the end: {events:?}");
        }
        events.truncate(at);
        (events, end)
    }

    /// Reads, and waits for the end.
    fn read(&self, request: ReadRequest) -> Result<(Vec<ReadEvent>, ReadEnd), Error> {
        Ok(self.events(&self.store().read(request)?))
    }
}

/// The answer to any question, when it has come.
pub fn ask<T>(stage: &dyn Stage, mut ticket: Ticket<T>) -> T {
    let mut answer = None;
    stage.wait(&mut || {
        answer = ticket.try_take();
        answer.is_some()
    });
    answer.expect("waited for it").expect("an answer")
}

/// What is here by a snapshot.
pub fn content_of(stage: &dyn Stage) -> Content {
    let (mut content, mut cursor) = (Content::default(), None);
    loop {
        let page = ask(stage, stage.store().snapshot(cursor)).expect("a snapshot");
        content.page(&page);
        cursor = page.next;
        if cursor.is_none() {
            return content;
        }
    }
}

/// The reference model with a clock that is moved by hand.
#[derive(Debug)]
pub struct ModelStage {
    model: Model,
    clock: std::sync::Arc<ManualClock>,
}

impl ModelStage {
    /// An empty model.
    pub fn new() -> Self {
        let clock = ManualClock::new(1_800_000_000_000);
        Self { model: Model::new(clock.clone()), clock }
    }
}

impl Default for ModelStage {
    fn default() -> Self {
        Self::new()
    }
}

impl Stage for ModelStage {
    fn store(&self) -> &dyn KvStore {
        &self.model
    }

    fn wait(&self, done: &mut dyn FnMut() -> bool) {
        assert!(done(), "the model answers at once");
    }

    fn rest(&self) {}

    fn now(&self) -> Nanos {
        self.clock.now()
    }

    fn advance(&self, by: Duration) -> bool {
        self.clock.advance(by);
        true
    }
}

/// The engine in a simulated world.
pub struct SimStage {
    world: SimWorld,
    store: Option<Store>,
    executors: Executors,
}

impl std::fmt::Debug for SimStage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimStage({:?})", self.world)
    }
}

/// A store small enough that a test fills several segments.
pub fn small_options(executors: usize) -> Options {
    Options {
        directories: 1,
        absent: Default::default(),
        replace: Default::default(),
        shards_per_directory: 2,
        segment_bytes: 256 << 10,
        budget_bytes: 48 << 20,
        budget_beyond_disk: false,
        record_bytes_max: 8 << 20,
        eviction: EvictionPolicy::default(),
        endurance_bytes_per_day: None,
        index_bytes_max: None,
        executors,
        limits: Limits { arena_bytes: 4 << 20, ..Limits::default() },
    }
}

/// Steps the world until the future is done. A future that is dropped half-way stays half-way.
pub fn drive<T>(world: &SimWorld, future: impl Future<Output = T>) -> Result<T, crate::sim::Hang> {
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    let mut value = None;
    world.run_until(STEPS_MAX, || {
        if let Poll::Ready(ready) = future.as_mut().poll(&mut context) {
            value = Some(ready);
        }
        value.is_some()
    })?;
    Ok(value.expect("the world ran until there was one"))
}

impl SimStage {
    /// Opens a store in the world.
    pub fn open(world: &SimWorld, options: &Options) -> Result<Self, Error> {
        let launcher = world.launcher();
        let opened = drive(world, Store::open(&launcher, options));
        let (store, executors) = opened.unwrap_or_else(|hang| panic!("opening hung: {hang}"))?;
        Ok(Self { world: world.clone(), store: Some(store), executors })
    }

    /// The store as the engine has it.
    pub fn engine(&self) -> &Store {
        self.store.as_ref().expect("open until it is closed")
    }

    /// The world.
    pub fn world(&self) -> &SimWorld {
        &self.world
    }

    /// A clean stop; returns when every executor has ended.
    pub fn close(mut self) -> Result<Media, Error> {
        let store = self.store.take().expect("open until it is closed");
        let closed = drive(&self.world, store.close());
        let closed = closed.unwrap_or_else(|hang| panic!("closing hung: {hang}"));
        drop(store);
        let ended = self.world.run_until(STEPS_MAX, || self.world.executors() == 0);
        ended.unwrap_or_else(|hang| panic!("an executor did not end: {hang}"));
        for executor in std::mem::take(&mut self.executors) {
            executor.join().expect("an executor that ended well");
        }
        closed.map(|()| self.world.disk().after_kill())
    }

    /// What [`Stage::audit`] finds wrong, if anything.
    pub fn look(&self) -> audit::Finding {
        let report = audit::books(self.engine())?;
        audit::budget(&report)?;
        audit::bound(&report, &self.world.disk().media())
    }

    /// What [`SimStage::audit_all`] finds wrong, if anything.
    pub fn look_closely(&self) -> Result<usize, String> {
        self.world.settle();
        self.look()?;
        let (report, segments) = (self.engine().stats().space, self.engine().segments());
        audit::disk(&report, &segments, &self.world.disk().media())
    }

    /// Lets everything under way end, then audits to the byte, against files and footers on the disk too. Gives the
    /// number of footers that were compared.
    pub fn audit_all(&self) -> usize {
        self.look_closely().unwrap_or_else(|why| panic!("seed {}: {why}", self.world.seed().0))
    }

    /// Cuts the power.
    pub fn cut_power(self) -> CrashState {
        self.world.cut_power()
    }
}

impl Stage for SimStage {
    fn store(&self) -> &dyn KvStore {
        self.engine()
    }

    fn wait(&self, done: &mut dyn FnMut() -> bool) {
        self.world.run_until(STEPS_MAX, done).unwrap_or_else(|hang| panic!("hung: {hang}"));
    }

    fn rest(&self) {
        for _ in 0..2000 {
            self.world.step();
        }
    }

    fn now(&self) -> Nanos {
        self.world.clock().now()
    }

    fn advance(&self, by: Duration) -> bool {
        self.world.clock().advance_to(self.now().plus(by));
        true
    }

    fn audit(&self) {
        self.look().unwrap_or_else(|why| panic!("seed {}: {why}", self.world.seed().0));
    }
}

/// A directory that is removed in the end.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// The path of a directory that does not exist yet.
    pub fn new(name: &str) -> Self {
        Self::below_folder(std::env::temp_dir(), name)
    }

    /// The same where the subject is a disk: below the folder that `KVARTS_DISK` names, if temporary files are in memory.
    pub fn on_disk(name: &str) -> Self {
        let folder = std::env::var_os("KVARTS_DISK").map_or_else(std::env::temp_dir, PathBuf::from);
        Self::below_folder(folder, name)
    }

    fn below_folder(folder: PathBuf, name: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let unique = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("kvarts-{name}-{}-{unique}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }

    /// The path.
    pub fn path(&self) -> &std::path::Path {
        &self.0
    }

    /// A path in it. The directory exists from then on.
    pub fn below(&self, name: &str) -> PathBuf {
        std::fs::create_dir_all(&self.0).expect("the directory for temporary files must be writable");
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The engine on a real directory, with real threads and the machine's clock.
#[derive(Debug)]
pub struct HomeStage {
    home: Option<Home>,
    _scratch: Option<Scratch>,
}

impl HomeStage {
    /// Opens a store in a new directory.
    pub fn open(name: &str, options: &HomeOptions) -> Result<Self, Error> {
        let scratch = Scratch::new(name);
        let options = HomeOptions { directories: vec![scratch.path().to_owned()], ..options.clone() };
        Ok(Self { home: Some(Home::open(&options)?), _scratch: Some(scratch) })
    }

    /// Opens the store in the directories that the options name.
    pub fn over(options: &HomeOptions) -> Result<Self, Error> {
        Ok(Self { home: Some(Home::open(options)?), _scratch: None })
    }

    /// A clean stop.
    pub fn close(mut self) -> Result<(), Error> {
        self.home.take().expect("open until dropped").close()
    }

    /// The store in its directory.
    pub fn home(&self) -> &Home {
        self.home.as_ref().expect("open until dropped")
    }
}

impl Drop for HomeStage {
    fn drop(&mut self) {
        if let Some(home) = self.home.take() {
            home.abandon();
        }
    }
}

impl Stage for HomeStage {
    fn store(&self) -> &dyn KvStore {
        self.home().store()
    }

    fn wait(&self, done: &mut dyn FnMut() -> bool) {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < TIMEOUT, "no answer for {TIMEOUT:?}");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn rest(&self) {
        std::thread::sleep(Duration::from_millis(20));
    }

    fn now(&self) -> Nanos {
        self.home().store().clock().now()
    }

    fn advance(&self, _by: Duration) -> bool {
        false
    }
}
