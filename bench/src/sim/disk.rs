//! `kvarts sim disk`: the disk tier alone, and what it shares with `bench replay`.

use std::cell::RefCell;
use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

use clap::Args;
use kvarts_simulator::disk::{Distinct, Happened, IdealHits, LruHits, Machine, MemoryIo, Replay, Settings};
use kvarts_simulator::trace::{Request, Trace};
use kvarts_store::driver::Metrics;
use kvarts_store::engine::{EvictionPolicy, Store};
use kvarts_store::io::{Io, IoFacts};

use crate::report::Report;
use crate::setup::progress;
use kvarts_terminal::Failure;

/// Distinct blocks by which the default capacity is less than all of them.
const DEFAULT_PART: u64 = 9;
/// A capacity that is not asked for is no less.
const CAPACITY_MIN: u64 = 2048;
/// Requests between two signs of progress.
const SHOWN_EVERY: u64 = 64;

/// The store that a trace is replayed against.
#[derive(Args, Debug)]
pub(crate) struct StoreArgs {
    /// Budget of the store, in blocks [default: a ninth of the trace's distinct blocks]
    #[arg(long, value_parser = clap::value_parser!(u64).range(32..=1 << 32))]
    capacity_blocks: Option<u64>,
    /// Eviction policy: weighted or lru
    #[arg(long, default_value = "weighted", value_parser = policy)]
    policy: EvictionPolicy,
    /// Whether puts name their parent block: known or unknown
    #[arg(long, default_value = "known", value_parser = ["known", "unknown"])]
    parents: String,
    /// Limit of daily writes, in blocks; above it the store only accepts blocks that were put before [default: no limit]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    endurance_blocks: Option<u64>,
    /// Size of a block in KiB
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(4..=1024))]
    block_kib: u64,
}

fn policy(name: &str) -> Result<EvictionPolicy, String> {
    EvictionPolicy::named(name).ok_or_else(|| {
        let names = EvictionPolicy::ALL.map(EvictionPolicy::name);
        format!("no policy is named `{name}`: use one of {}", names.join(", "))
    })
}

impl StoreArgs {
    /// For a trace of `distinct` different blocks.
    pub(crate) fn settings(&self, distinct: u64) -> Settings {
        Settings {
            capacity_blocks: self.capacity_blocks.unwrap_or((distinct / DEFAULT_PART).max(CAPACITY_MIN)),
            block_bytes: self.block_kib << 10,
            policy: self.policy,
            known_parents: self.parents == "known",
            endurance_blocks: self.endurance_blocks,
        }
    }
}

/// The arguments of `sim disk`.
#[derive(Args, Debug)]
pub(crate) struct DiskArgs {
    /// The trace: JSON lines with `timestamp`, `input_length`, `output_length` and `hash_ids`
    trace: PathBuf,
    #[command(flatten)]
    store: StoreArgs,
    /// Write the events of blocks in order, one JSON object per line
    #[arg(long, value_name = "FILE")]
    events: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A replay, and what it stands beside.
#[derive(Debug)]
pub(crate) struct Beside<'a> {
    replay: Replay<'a>,
    settings: Settings,
    distinct: &'a Distinct,
    lru: LruHits,
    ideal: IdealHits,
    /// Hits of an LRU that has what the store had for payload.
    pub(crate) lru_of_payload: u64,
    /// How long it took.
    pub(crate) seconds: f64,
}

impl<'a> Beside<'a> {
    pub(crate) fn new(replay: Replay<'a>, settings: Settings, distinct: &'a Distinct) -> Self {
        let lru = LruHits::new(settings.capacity_blocks);
        let ideal = IdealHits::default();
        Self { replay, settings, distinct, lru, ideal, lru_of_payload: 0, seconds: 0.0 }
    }

    /// The next request.
    pub(crate) fn request(&mut self, at_ms: f64, blocks: &[u64]) -> Result<&[Happened], Failure> {
        self.lru.request(blocks);
        self.ideal.request(blocks);
        self.replay.request(at_ms, blocks).map_err(Failure::User)
    }

    /// Tells what was found.
    pub(crate) fn tell(
        &self,
        report: &mut Report,
        store: &Store,
        io: Vec<(IoFacts, Metrics)>,
    ) -> Result<(), Failure> {
        let (figures, settings, stats) = (self.replay.figures(), &self.settings, store.stats());
        let counts = stats.counts;
        let written: u64 = io.iter().map(|(_, metrics)| metrics.bytes_written).sum();
        let part = |hits: u64| hits as f64 / figures.references.max(1) as f64;
        report.fact("policy", settings.policy.name());
        report.fact("parents", if settings.known_parents { "known" } else { "unknown" });
        report.fact("requests", figures.requests);
        report.fact("block_references", figures.references);
        report.fact("distinct_blocks", self.distinct.blocks());
        report.fact("capacity_blocks", settings.capacity_blocks);
        report.fact("block_bytes", settings.block_bytes);
        report.fact("segment_bytes", settings.segment_bytes());
        report.number("seconds", self.seconds);
        report.number("hit_rate", part(figures.hits));
        report.number("lru_hit_rate", part(self.lru.hits));
        report.number("lru_hit_rate_of_payload", part(self.lru_of_payload));
        report.number("ideal_hit_rate", part(self.ideal.hits));
        let payload = counts.payload_bytes_stored.max(1) as f64;
        report.number("write_amplification", written as f64 / payload);
        report.number("moved_by_put", counts.moved_bytes_written as f64 / payload);
        let budget = settings.budget_bytes();
        report.number("allocated_by_budget", stats.allocated_bytes as f64 / budget as f64);
        let shares = &stats.space.total;
        for (name, bytes) in [
            ("live_by_budget", shares.live),
            ("dead_by_budget", shares.dead),
            ("free_by_budget", shares.free),
            ("overhead_by_budget", shares.overhead),
            ("payload_by_budget", stats.index.blocks as u64 * settings.block_bytes),
        ] {
            report.number(name, bytes as f64 / budget as f64);
        }
        report.fact("segments", stats.space.shards.iter().map(|shard| shard.segments).sum::<u64>());
        report.fact("blocks_evicted", counts.blocks_evicted);
        report.fact("blocks_damaged", counts.blocks_quarantined);
        report.fact("blocks_refused", figures.refused);
        report.fact("blocks_not_admitted", counts.blocks_not_admitted);
        report.number("hits_lost_to_non_admission", part(figures.missed));
        let (digest, events) = self.replay.digest();
        report.fact("events", events);
        report.fact("events_digest", digest);
        Ok(())
    }
}

/// Opens a trace, or says on one line why not.
pub(crate) fn open(path: &Path) -> Result<Trace<BufReader<File>>, Failure> {
    let file = File::open(path).map_err(|error| fault(path, error))?;
    Ok(Trace::new(BufReader::with_capacity(1 << 20, file)))
}

fn fault(path: &Path, what: impl std::fmt::Display) -> Failure {
    Failure::User(format!("{}: {what}", path.display()))
}

/// Each request of a trace, streamed.
pub(crate) fn each(
    path: &Path,
    what: &str,
    mut then: impl FnMut(&Request) -> Result<(), Failure>,
) -> Result<u64, Failure> {
    let mut count = 0u64;
    for request in open(path)? {
        let request = request.map_err(|error| fault(path, error))?;
        if count.is_multiple_of(SHOWN_EVERY) {
            progress(&format!("{what}: {count} requests"));
        }
        count += 1;
        then(&request)?;
    }
    progress("");
    if count == 0 { Err(fault(path, "the trace has no requests")) } else { Ok(count) }
}

/// Runs `sim disk`.
pub(super) fn run(arguments: &DiskArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let mut distinct = Distinct::default();
    each(&arguments.trace, "counting", |request| {
        distinct.request(&request.blocks);
        Ok(())
    })?;
    let settings = arguments.store.settings(distinct.blocks());
    let mut events = match &arguments.events {
        Some(path) => Some(BufWriter::new(File::create(path).map_err(|error| fault(path, error))?)),
        None => None,
    };
    let make = || Ok(Rc::new(RefCell::new(MemoryIo::default())) as Rc<RefCell<dyn Io>>);
    let machine = Machine::new(1, Box::new(make));
    let store = machine.open(&settings.options()).map_err(Failure::User)?;
    let replay = Replay::new(Some(&machine), &store, &settings, |_| ()).map_err(Failure::User)?;
    let mut beside = Beside::new(replay, settings, &distinct);
    let begin = Instant::now();
    each(&arguments.trace, "simulating", |request| {
        let happened = beside.request(request.at_ms, &request.blocks)?;
        if let (Some(file), Some(path)) = (&mut events, &arguments.events) {
            for line in happened {
                writeln!(file, "{line}").map_err(|error| fault(path, error))?;
            }
        }
        Ok(())
    })?;
    beside.seconds = begin.elapsed().as_secs_f64();
    if let (Some(file), Some(path)) = (&mut events, &arguments.events) {
        file.flush().map_err(|error| fault(path, error))?;
    }
    let mut payload = LruHits::new(store.stats().index.blocks as u64);
    each(&arguments.trace, "comparing", |request| {
        payload.request(&request.blocks);
        Ok(())
    })?;
    beside.lru_of_payload = payload.hits;
    let mut report = Report::new("sim disk");
    report.fact("backend", "memory");
    let io = machine.wait(store.io()).map_err(Failure::User)?.map_err(Failure::user)?;
    beside.tell(&mut report, &store, io)?;
    machine.wait(store.close()).map_err(Failure::User)?.map_err(Failure::user)?;
    report.write(arguments.json, out)
}
