//! `bench replay`: a trace of requests against the real engine, whose budget holds a part of it.
//!
//! Each line of a trace is a request: `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [..]}`, the
//! ids of its blocks in order, equal where prefixes are (the format of the Mooncake traces). The prefix that is here is
//! matched and read, byte by byte; what is missing behind it is put. A block that was read whole is a hit.
//!
//! Beside the engine's hits stand those of an exact LRU over blocks, which has the engine's whole physical budget for
//! payload alone, and those of a cache without bounds. Blocks are scaled down, so that a trace takes seconds.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use kvarts_layout::{BlockKey, Layout, ModelSpec};
use kvarts_store::api::{
    BlockOutcome, ContainsRequest, Durability, KvStore, Order, Parent, Placed, Presence, PutRequest,
    ReadEvent, ReadRequest, Verify,
};
use kvarts_store::engine::{Compaction, EvictionPolicy, Limits, Options, Stats, Store};
use kvarts_store::error::Reason;
use kvarts_store::io::SharedBuf;
use kvarts_store::rt::Class;
use kvarts_store::rt::blocking::block_on;
use serde::Deserialize;

use super::report::Report;
use super::setup::{self, Common, Scratch, Subject, key, progress};
use crate::cli::Failure;

/// Distinct blocks by which the default capacity is less than all of them.
const DEFAULT_PART: u64 = 9;
/// Segments that the budget has at least, so that what is written anew is a small part.
const SEGMENTS: u64 = 64;
/// Blocks of one put, and of one read, at most; and parts of a segment that a put takes.
const BATCH_MAX: u64 = 32;
const PUT_PARTS: u64 = 4;
/// A capacity that is not asked for is no less.
const CAPACITY_MIN: u64 = 2048;
const SEGMENT_MIN: u64 = 256 << 10;
const SEGMENT_MAX: u64 = 128 << 20;
const PAGE: u64 = 4096;
/// The longest line of a trace.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// The arguments of `bench replay`.
#[derive(Args, Debug)]
pub(super) struct ReplayArgs {
    /// The trace: JSON lines with `hash_ids`
    trace: PathBuf,
    /// Blocks whose bytes are the budget of the store [default: a ninth of the trace's distinct blocks]
    #[arg(long, value_parser = clap::value_parser!(u64).range(32..=1 << 32))]
    capacity_blocks: Option<u64>,
    /// What is evicted first: weighted, lru or s3-fifo
    #[arg(long, default_value = "weighted", value_parser = policy)]
    policy: EvictionPolicy,
    /// Whether puts name the block before them: known or unknown
    #[arg(long, default_value = "known", value_parser = ["known", "unknown"])]
    parents: String,
    /// Blocks whose bytes may be written before only what was put before is stored [default: no limit]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    endurance_blocks: Option<u64>,
    /// KiB of a block
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(4..=1024))]
    block_kib: u64,
    /// Where the store is made, in a directory of its own [default: the current directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn policy(name: &str) -> Result<EvictionPolicy, String> {
    EvictionPolicy::named(name).ok_or_else(|| {
        let names = EvictionPolicy::ALL.map(EvictionPolicy::name);
        format!("no policy is called `{name}`: take one of {}", names.join(", "))
    })
}

/// One line of a trace; the rest of it is of no use here.
#[derive(Deserialize, Debug)]
struct Line {
    hash_ids: Vec<u64>,
}

/// Reads a trace: the blocks of each request.
fn read_trace(path: &PathBuf) -> Result<Vec<Vec<u64>>, Failure> {
    let fault = |what: String| Failure::User(format!("{}: {what}", path.display()));
    let file = std::fs::File::open(path).map_err(|error| fault(error.to_string()))?;
    let mut reader = BufReader::new(file);
    let (mut requests, mut line) = (Vec::new(), Vec::new());
    loop {
        line.clear();
        let mut bounded = std::io::Read::take(&mut reader, LINE_BYTES_MAX);
        let read = bounded.read_until(b'\n', &mut line).map_err(|error| fault(error.to_string()))?;
        if read == 0 {
            return match requests.is_empty() {
                true => Err(fault("it has no requests".to_owned())),
                false => Ok(requests),
            };
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let parsed: Line = serde_json::from_slice(&line)
            .map_err(|error| fault(format!("line {}: {error}", requests.len() + 1)))?;
        requests.push(parsed.hash_ids);
    }
}

/// Hits of an exact LRU over blocks, as leading runs: a request gets what is there before its first miss.
fn lru_hits(requests: &[Vec<u64>], capacity: u64) -> u64 {
    let (mut last, mut order) = (HashMap::<u64, u64>::new(), BTreeMap::<u64, u64>::new());
    let (mut hits, mut clock) = (0, 0u64);
    for request in requests {
        hits += request.iter().take_while(|block| last.contains_key(block)).count() as u64;
        // The blocks before others are used after them: of one request the last leaves first.
        for block in request.iter().rev() {
            clock += 1;
            if let Some(before) = last.insert(*block, clock) {
                order.remove(&before);
            }
            order.insert(clock, *block);
        }
        while last.len() as u64 > capacity {
            if let Some((_, block)) = order.pop_first() {
                last.remove(&block);
            }
        }
    }
    hits
}

fn ideal_hits(requests: &[Vec<u64>]) -> u64 {
    let mut seen = BTreeSet::<u64>::new();
    let mut hits = 0;
    for request in requests {
        hits += request.iter().take_while(|block| seen.contains(block)).count() as u64;
        seen.extend(request);
    }
    hits
}

/// Runs the benchmark.
pub(super) fn run(arguments: &ReplayArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let requests = read_trace(&arguments.trace)?;
    let references: u64 = requests.iter().map(|request| request.len() as u64).sum();
    let distinct = requests.iter().flatten().collect::<BTreeSet<_>>().len() as u64;
    let capacity = arguments.capacity_blocks.unwrap_or((distinct / DEFAULT_PART).max(CAPACITY_MIN));
    let block_bytes = arguments.block_kib << 10;
    let budget = capacity * block_bytes;
    let segment_bytes = (budget / SEGMENTS / PAGE * PAGE).clamp(SEGMENT_MIN, SEGMENT_MAX);
    let common = Common::quiet(arguments.dir.clone(), arguments.json, 3);
    let scratch = Scratch::new(&common, budget + (64 << 20))?;
    let options = options(arguments, budget, segment_bytes);
    let home = setup::open(&common, scratch.path(), options)?;
    let spec = ModelSpec::opaque("replay-pages", block_bytes).map_err(Failure::user)?;
    let batch = (segment_bytes / PUT_PARTS / block_bytes).clamp(1, BATCH_MAX) as usize;
    let mut replay = Replay {
        store: home.store(),
        subject: Subject::new(home.store(), &spec, None)?,
        known: arguments.parents == "known",
        batch,
        source: setup::noise(block_bytes as usize * batch)?,
        into: setup::memory(block_bytes as usize * batch)?,
        hits: 0,
        refused: 0,
        kept_out: BTreeSet::new(),
        missed: 0,
    };
    let begin = Instant::now();
    for (number, request) in requests.iter().enumerate() {
        progress(&format!("replaying: {number} of {} requests", requests.len()));
        replay.request(request)?;
    }
    progress("");
    let seconds = begin.elapsed().as_secs_f64();
    let stats = home.store().stats();
    let io = block_on(home.store().io()).map_err(Failure::user)?;
    let written: u64 = io.iter().map(|(_, metrics)| metrics.bytes_written).sum();
    let counts = stats.counts;
    let part = |hits: u64| hits as f64 / references.max(1) as f64;
    let mut report = Report::new("replay");
    setup::describe(&mut report, &common, &home)?;
    report.fact("policy", arguments.policy.name());
    report.fact("parents", arguments.parents.as_str());
    report.fact("requests", requests.len());
    report.fact("block_references", references);
    report.fact("distinct_blocks", distinct);
    report.fact("capacity_blocks", capacity);
    report.fact("block_bytes", block_bytes);
    report.fact("segment_bytes", segment_bytes);
    report.number("seconds", seconds);
    report.number("hit_rate", part(replay.hits));
    report.number("lru_hit_rate", part(lru_hits(&requests, capacity)));
    // What the same LRU would have with the blocks for which the store had room beside headers and frames: the
    // difference to it is what is evicted, and the rest is what cannot be payload.
    report.number("lru_hit_rate_of_payload", part(lru_hits(&requests, stats.index.blocks as u64)));
    report.number("ideal_hit_rate", part(ideal_hits(&requests)));
    report.number("write_amplification", written as f64 / counts.payload_bytes_stored.max(1) as f64);
    report.number(
        "moved_by_put",
        counts.moved_bytes_written as f64 / counts.payload_bytes_stored.max(1) as f64,
    );
    tell_space(&mut report, &stats, (budget, block_bytes));
    report.fact("blocks_evicted", counts.blocks_evicted);
    report.fact("blocks_damaged", counts.blocks_quarantined);
    report.fact("blocks_refused", replay.refused);
    report.fact("blocks_not_admitted", counts.blocks_not_admitted);
    report.number("hits_lost_to_non_admission", part(replay.missed));
    home.close().map_err(Failure::user)?;
    report.write(arguments.json, out)
}

/// The store of a replay.
fn options(arguments: &ReplayArgs, budget_bytes: u64, segment_bytes: u64) -> Options {
    let block_bytes = arguments.block_kib << 10;
    Options {
        budget_bytes,
        segment_bytes,
        shards_per_directory: 1,
        eviction: arguments.policy,
        // A replay is over before any of it comes back.
        endurance_bytes_per_day: arguments.endurance_blocks.map(|blocks| blocks * block_bytes),
        limits: Limits {
            // What it measures is eviction, not what is done by the clock.
            compaction: Compaction { every: None, ..Compaction::default() },
            ..Limits::default()
        },
        ..Options::default()
    }
}

/// What the budget's bytes are at the end.
fn tell_space(report: &mut Report, stats: &Stats, (budget, block_bytes): (u64, u64)) {
    report.number("allocated_by_budget", stats.allocated_bytes as f64 / budget as f64);
    let shares = &stats.space.total;
    for (name, bytes) in [
        ("live_by_budget", shares.live),
        ("dead_by_budget", shares.dead),
        ("free_by_budget", shares.free),
        ("overhead_by_budget", shares.overhead),
        ("payload_by_budget", stats.index.blocks as u64 * block_bytes),
    ] {
        report.number(name, bytes as f64 / budget as f64);
    }
    report.fact("segments", stats.space.shards.iter().map(|shard| shard.segments).sum::<u64>());
}

/// The replay under way.
struct Replay<'a> {
    store: &'a Store,
    subject: Subject,
    known: bool,
    batch: usize,
    source: SharedBuf,
    into: SharedBuf,
    hits: u64,
    refused: u64,
    /// What was not admitted when it was put last, and how often such a block was asked for again.
    kept_out: BTreeSet<BlockKey>,
    missed: u64,
}

impl Replay<'_> {
    fn request(&mut self, blocks: &[u64]) -> Result<(), Failure> {
        let keys: Vec<BlockKey> = blocks.iter().map(|block| key(17, *block)).collect();
        let mut here = 0;
        for some in keys.chunks(self.batch) {
            let read = self.read(some)?;
            here += read;
            if read < some.len() {
                break;
            }
        }
        self.hits += here as u64;
        let missing = keys.get(here..).unwrap_or_default().iter();
        self.missed += missing.filter(|key| self.kept_out.remove(key)).count() as u64;
        let mut parent = here.checked_sub(1).and_then(|at| keys.get(at)).copied();
        for some in keys.get(here..).unwrap_or_default().chunks(self.batch) {
            self.put(some, parent)?;
            parent = some.last().copied();
        }
        Ok(())
    }

    /// Blocks that are here and whole, from the first on.
    fn read(&self, keys: &[BlockKey]) -> Result<usize, Failure> {
        let Subject { namespace, group, coordinate, .. } = self.subject;
        let found = self.store.contains(&ContainsRequest { namespace, group, coordinate, keys, lease: None });
        let presence = found.map_err(Failure::user)?.presence;
        let here = presence.iter().take_while(|one| **one == Presence::Here).count();
        let Some(keys) = keys.get(..here).filter(|keys| !keys.is_empty()) else { return Ok(0) };
        let len = self.subject.shape.block_bytes() as usize * keys.len();
        let into = self.into.slice(0, len).ok_or_else(|| Failure::user("no memory"))?;
        let placed = Placed::blocks(&self.subject.shape, into, keys.len() as u32);
        let request = ReadRequest {
            namespace,
            group,
            coordinate,
            keys: keys.to_vec(),
            layers: None,
            order: Order::Blocks,
            into: placed.map_err(Failure::user)?,
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        };
        let stream = self.store.read(request).map_err(Failure::user)?;
        loop {
            if let ReadEvent::End(end) = block_on(stream.next()) {
                return Ok(end.failures.iter().map(|(block, _)| *block as usize).min().unwrap_or(here));
            }
        }
    }

    fn put(&mut self, keys: &[BlockKey], parent: Option<BlockKey>) -> Result<(), Failure> {
        let parent = match parent {
            _ if !self.known => Parent::Unknown,
            None => Parent::Root,
            Some(parent) => Parent::Key(parent),
        };
        let len = self.subject.shape.block_bytes() as usize * keys.len();
        let from = self.source.slice(0, len).ok_or_else(|| Failure::user("no memory"))?;
        let request = PutRequest {
            durability: Durability::Relaxed,
            ..self.subject.put(keys.to_vec(), parent, from, Some(Layout::FullBlock))?
        };
        let reply = block_on(self.store.put(request)).map_err(|_| Failure::user("the store ended"))?;
        let outcomes = reply.map_err(Failure::user)?.outcomes;
        let refused = |outcome: &&BlockOutcome| matches!(outcome, BlockOutcome::Refused(_));
        self.refused += outcomes.iter().filter(refused).count() as u64;
        let not_admitted = |outcome: &BlockOutcome| *outcome == BlockOutcome::Refused(Reason::NotAdmitted);
        let places = keys.iter().zip(&outcomes).filter(|(_, outcome)| not_admitted(outcome));
        self.kept_out.extend(places.map(|(key, _)| *key));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_lru_has_the_leading_runs_of_what_was_used_last() {
        let requests = [vec![1, 2, 3], vec![1, 2, 4], vec![5, 6], vec![1, 2, 4], vec![3]];
        // With room for four: 3 leaves for 5 and 6, then 4.
        assert_eq!(lru_hits(&requests, 4), 2 + 2);
        assert_eq!(lru_hits(&requests, 100), ideal_hits(&requests));
        assert_eq!(ideal_hits(&requests), 2 + 3 + 1);
        assert_eq!(lru_hits(&requests, 1), 1);
    }

    #[test]
    fn a_trace_is_read_line_by_line_and_what_is_no_request_is_named() {
        let common = Common::quiet(Some(std::env::temp_dir()), true, 3);
        let scratch = Scratch::new(&common, 0).unwrap();
        let path = scratch.path().join("trace");
        std::fs::write(&path, "{\"timestamp\":1,\"hash_ids\":[1,2]}\n\n{\"hash_ids\":[]}\n").unwrap();
        assert_eq!(read_trace(&path).unwrap(), [vec![1, 2], vec![]]);
        std::fs::write(&path, "{\"hash_ids\":[1]}\n{\"hash\":[1]}\n").unwrap();
        assert!(format!("{:?}", read_trace(&path).unwrap_err()).contains("line 2"));
        std::fs::write(&path, "").unwrap();
        assert!(read_trace(&path).is_err());
    }
}
