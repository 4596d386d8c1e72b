//! Requests against an open store: the prefix that is here is read, byte by byte; what is missing behind it is put.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::sync::Arc;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, Durability, KvStore, Order, Parent, Placed, Presence, PutReply,
    PutRequest, ReadEnd, ReadEvent, ReadRequest, ReadStream, Subscription, Verify,
};
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::class::Class;
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::events::Subject;
use kvarts_layout::identity::{Arrangement, Quantisation, TenantSalt};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Group, Identity, Layout, ModelSpec, NamespaceId};
use kvarts_store::engine::{Compaction, EvictionPolicy, Limits, Options, Store};

use super::events::{Happened, Kind, Tally, block_of, key_of};
use super::machine::Machine;

/// Segments that the budget has at least, so that what is written anew is a small part.
const SEGMENTS: u64 = 64;
/// Blocks of one put, and of one read, at most; and parts of a segment that a put takes.
const BATCH_MAX: u64 = 32;
const PUT_PARTS: u64 = 4;
const SEGMENT_MIN: u64 = 256 << 10;
const SEGMENT_MAX: u64 = 128 << 20;
const PAGE: u64 = 4096;
/// Events that are taken at once.
const EVENTS: usize = 4096;

/// The key of a block of a trace.
pub fn block_key(block: u64) -> BlockKey {
    key_of(block)
}

/// What a replay is told.
#[derive(Clone, PartialEq, Debug)]
pub struct Settings {
    /// Blocks whose bytes are the budget of the store.
    pub capacity_blocks: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// What is evicted first.
    pub policy: EvictionPolicy,
    /// Whether puts name the block before them.
    pub known_parents: bool,
    /// Blocks whose bytes may be written a day before only what was put before is stored.
    pub endurance_blocks: Option<u64>,
}

impl Settings {
    /// Bytes of the store.
    pub fn budget_bytes(&self) -> u64 {
        self.capacity_blocks.saturating_mul(self.block_bytes)
    }

    /// Bytes of a segment.
    pub fn segment_bytes(&self) -> u64 {
        (self.budget_bytes() / SEGMENTS / PAGE * PAGE).clamp(SEGMENT_MIN, SEGMENT_MAX)
    }

    fn batch(&self) -> usize {
        (self.segment_bytes() / PUT_PARTS / self.block_bytes.max(1)).clamp(1, BATCH_MAX) as usize
    }

    /// The store of a replay.
    pub fn options(&self) -> Options {
        Options {
            budget_bytes: self.budget_bytes(),
            segment_bytes: self.segment_bytes(),
            shards_per_directory: 1,
            executors: 1,
            eviction: self.policy,
            endurance_bytes_per_day: self.endurance_blocks.map(|blocks| blocks * self.block_bytes),
            limits: Limits {
                // What it measures is eviction, not what is done by the clock.
                compaction: Compaction { every: None, ..Compaction::default() },
                ..Limits::default()
            },
            ..Options::default()
        }
    }
}

/// What a replay has counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Figures {
    /// Requests.
    pub requests: u64,
    /// Blocks of all requests.
    pub references: u64,
    /// Blocks that were found and read whole.
    pub hits: u64,
    /// Blocks that were refused.
    pub refused: u64,
    /// Blocks asked for again that were not admitted when they were put last.
    pub missed: u64,
    /// Events that the engine told.
    pub stored: u64,
    /// Of these, evictions.
    pub evicted: u64,
}

/// Waits for the engine's answers.
type Waits<'a> = &'a Machine;

/// A replay under way.
#[derive(Debug)]
pub struct Replay<'a> {
    machine: Option<Waits<'a>>,
    store: &'a Store,
    known: bool,
    namespace: NamespaceId,
    shape: Arc<BlockShape>,
    coordinate: Coordinate,
    group: Group,
    batch: usize,
    source: SharedBuf,
    into: SharedBuf,
    events: Subscription,
    tally: Tally,
    kept_out: BTreeSet<u64>,
    figures: Figures,
    happened: Vec<Happened>,
}

fn memory(bytes: u64) -> Result<SharedBuf, String> {
    let len = usize::try_from(bytes).map_err(|_| "a block is too large".to_owned())?;
    let region = Region::anonymous(len)
        .map_err(|error| format!("{} MiB of memory could not be allocated: {error}", len >> 20))?;
    SharedBuf::new(&region, 0, len)
        .ok_or_else(|| "the memory of the simulator is too small for a block".to_owned())
}

/// An identity of a model that only its spec tells from others.
pub fn identity(spec: &ModelSpec) -> Identity {
    let text = |text: &str| text.to_owned();
    Identity {
        model: text(spec.name()),
        revision: text("bench"),
        tokenizer: text("bench"),
        adapter: text("none"),
        kv_dtype: text("bench"),
        quantisation: Quantisation { recipe: text("none"), scales: text("none") },
        rope: text("none"),
        window: text("none"),
        arrangement: Arrangement { engine: text("bench"), layout: text("canonical"), version: text("1") },
        block_tokens: spec.default_block_tokens(),
        spec_fingerprint: spec.geometry().fingerprint(),
        tenant_salt: TenantSalt(Vec::new()),
        extras: BTreeMap::new(),
    }
}

impl<'a> Replay<'a> {
    /// A replay against an open store. Without a machine the store runs by itself, on threads and clocks of its own, and
    /// no two replays are alike. `fill` fills the memory that blocks are put from.
    pub fn new(
        machine: Option<&'a Machine>,
        store: &'a Store,
        settings: &Settings,
        fill: impl FnOnce(&SharedBuf),
    ) -> Result<Self, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let spec = ModelSpec::opaque("replay-pages", settings.block_bytes).map_err(|error| text(&error))?;
        let (geometry, tokens) = (spec.geometry(), spec.default_block_tokens());
        let group = geometry.groups().first().map_or(Group(0), |group| group.group);
        let coordinate = geometry.coordinate(group, 1, 0).map_err(|error| text(&error))?;
        let shape = geometry.shape(group, coordinate, tokens).map_err(|error| text(&error))?;
        let namespace = store.register(&identity(&spec), geometry).map_err(|error| text(&error))?;
        let batch = settings.batch();
        let source = memory(settings.block_bytes * batch as u64)?;
        fill(&source);
        Ok(Self {
            machine,
            store,
            known: settings.known_parents,
            namespace,
            shape: Arc::new(shape),
            coordinate,
            group,
            batch,
            source,
            into: memory(settings.block_bytes * batch as u64)?,
            events: store.subscribe(None),
            tally: Tally::default(),
            kept_out: BTreeSet::new(),
            figures: Figures::default(),
            happened: Vec::new(),
        })
    }

    /// What was counted so far.
    pub fn figures(&self) -> Figures {
        self.figures
    }

    /// All events so far as one number, and how many there were.
    pub fn digest(&self) -> (String, u64) {
        (self.tally.digest(), self.tally.count)
    }

    fn wait<T>(&self, future: impl Future<Output = T>) -> Result<T, String> {
        match self.machine {
            Some(machine) => machine.wait(future),
            None => Ok(kvarts_contract::blocking::block_on(future)),
        }
    }

    /// The next request; what happened to blocks because of it, in order.
    pub fn request(&mut self, at_ms: f64, blocks: &[u64]) -> Result<&[Happened], String> {
        self.happened.clear();
        self.figures.requests += 1;
        self.figures.references += blocks.len() as u64;
        if let Some(machine) = self.machine {
            machine.advance_to(at_ms);
        }
        self.take_events()?;
        let keys: Vec<BlockKey> = blocks.iter().map(|block| key_of(*block)).collect();
        let mut here = 0;
        for some in keys.chunks(self.batch) {
            let read = self.read(some)?;
            here += read;
            if read < some.len() {
                break;
            }
        }
        self.figures.hits += here as u64;
        for block in blocks.iter().take(here) {
            self.happened(Kind::Hit, *block);
        }
        let missing = blocks.get(here..).unwrap_or_default().iter();
        self.figures.missed += missing.filter(|block| self.kept_out.remove(block)).count() as u64;
        let mut parent = here.checked_sub(1).and_then(|at| keys.get(at)).copied();
        for some in keys.get(here..).unwrap_or_default().chunks(self.batch) {
            self.put(some, parent)?;
            parent = some.last().copied();
            self.take_events()?;
        }
        Ok(&self.happened)
    }

    fn happened(&mut self, kind: Kind, block: u64) {
        let event = Happened { request: self.figures.requests, kind, block };
        self.tally.add(&event);
        self.happened.push(event);
    }

    fn take_events(&mut self) -> Result<(), String> {
        loop {
            let events = self.events.try_next(EVENTS).map_err(|gap| gap.to_string())?;
            if events.is_empty() {
                return Ok(());
            }
            for event in events {
                let kind = Kind::of(event.kind);
                self.figures.stored += u64::from(kind == Kind::Stored);
                self.figures.evicted += u64::from(kind == Kind::Evicted);
                if let Subject::Block(key) = event.subject {
                    self.happened(kind, block_of(&key.key));
                }
            }
        }
    }

    /// Blocks that are here and whole, from the first on.
    fn read(&self, keys: &[BlockKey]) -> Result<usize, String> {
        let Self { namespace, group, coordinate, .. } = *self;
        let found = self.store.contains(&ContainsRequest { namespace, group, coordinate, keys, lease: None });
        let presence = found.map_err(|error| error.to_string())?.presence;
        let here = presence.iter().take_while(|one| **one == Presence::Here).count();
        let Some(keys) = keys.get(..here).filter(|keys| !keys.is_empty()) else { return Ok(0) };
        let len = self.shape.block_bytes() as usize * keys.len();
        let into = self.into.slice(0, len).ok_or("the memory of the simulator is too small for a block")?;
        let request = ReadRequest {
            namespace,
            group,
            coordinate,
            keys: keys.to_vec(),
            layers: None,
            order: Order::Blocks,
            into: Placed::blocks(&self.shape, into, keys.len() as u32).map_err(|error| error.to_string())?,
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        };
        let stream = self.store.read(request).map_err(|error| error.to_string())?;
        let end = self.wait(end_of(&stream))?;
        Ok(end.failures.iter().map(|(block, _)| *block as usize).min().unwrap_or(here))
    }

    fn put(&mut self, keys: &[BlockKey], parent: Option<BlockKey>) -> Result<(), String> {
        let parent = match parent {
            _ if !self.known => Parent::Unknown,
            None => Parent::Root,
            Some(parent) => Parent::Key(parent),
        };
        let len = self.shape.block_bytes() as usize * keys.len();
        let from = self.source.slice(0, len).ok_or("the memory of the simulator is too small for a block")?;
        let request = PutRequest {
            namespace: self.namespace,
            group: self.group,
            coordinate: self.coordinate,
            parent,
            first_block: None,
            keys: keys.to_vec(),
            from: Placed::blocks(&self.shape, from, keys.len() as u32).map_err(|error| error.to_string())?,
            layout: Some(Layout::FullBlock),
            durability: Durability::Relaxed,
            expires_after: None,
            origins: None,
            deadline: None,
        };
        let reply = self.wait(self.store.put(request))?.map_err(|_| "the store has stopped")?;
        let reply: Result<PutReply, Error> = reply;
        let outcomes = reply.map_err(|error| error.to_string())?.outcomes;
        for (key, outcome) in keys.iter().zip(&outcomes) {
            self.figures.refused += u64::from(matches!(outcome, BlockOutcome::Refused(_)));
            if *outcome == BlockOutcome::Refused(Reason::NotAdmitted) {
                self.kept_out.insert(block_of(key));
            }
        }
        Ok(())
    }
}

async fn end_of(stream: &ReadStream) -> ReadEnd {
    loop {
        if let ReadEvent::End(end) = stream.next().await {
            return end;
        }
    }
}
