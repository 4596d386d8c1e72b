//! `bench scale`: what the engine's own work costs among a million, ten and a hundred million blocks.
//!
//! A small store is really there and full: what is put evicts. Blocks that lie nowhere come to its index, as
//! recovery brings them, until it has as many as that. What evictions, checkpoints and sweeps then take of the executor
//! is counted by the engine, in steps and in time without waits for the device, so it is theirs alone; and the memory is
//! that of the real index. A machine that cannot hold the largest index gets its row from what was measured last, and it
//! says so.
//!
//! Then a store of many small records is filled, and small reads go on beside what could stop an executor ([`stalls`]).

mod bare_reader;
mod stalls;
mod waiting;

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use kvarts_contract::api::{ContainsRequest, KvStore, Presence, TtlRequest};
use kvarts_contract::blocking::block_on;
use kvarts_layout::{BlockKey, ModelSpec};
use kvarts_store::engine::{Compaction, Done, Limits, Options, Store, WorkDone};
use serde_json::{Value, json};

use super::report::Report;
use super::scratch::Scratch;
use super::setup::{self, Common, Subject, key, progress};
use kvarts_server::human;
use kvarts_terminal::Failure;

/// Bytes that are evicted for one figure.
const EVICTED_BYTES: u64 = 256 << 20;
const SEGMENT_BYTES: u64 = 16 << 20;
/// Segments of the store that is there.
const SEGMENTS: u64 = 48;
/// What a checkpoint keeps of the budget for a record, and blocks of a record that lies nowhere.
const CHECKPOINT_ITEM_BYTES: u64 = 80;
const RECORD_BLOCKS: u64 = 16;
/// Memory that an index takes for a block, generously: what this machine can hold is decided by it.
const BLOCK_MEMORY: u64 = 40;
/// Look-ups for one figure, and keys of each.
const LOOK_UPS: u64 = 4000;
const LOOKED_UP: u64 = 512;
const SWEEPS: Duration = Duration::from_millis(100);

/// The arguments of `bench scale`.
#[derive(Args, Debug)]
pub(super) struct ScaleArgs {
    /// Blocks in the index, in ascending order
    #[arg(long, value_delimiter = ',', default_value = "1000000,10000000,100000000")]
    blocks: Vec<u64>,
    /// Size of a block of the store in KiB
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(4..=1024))]
    block_kib: u64,
    /// Maximum memory of the index in bytes; larger indexes are computed from the last measured index
    #[arg(long, default_value_t = 6 << 30)]
    memory: u64,
    /// Records in a second store for timed small reads, each with one block and 8 KiB on disk; 0 skips these reads
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(0..=100_000_000))]
    records: u64,
    /// Directories of the second store, each with 16 shards
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u16).range(1..=64))]
    directories: u16,
    /// Executors of the second store
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    executors: u16,
    /// Parent of the store's directory [default: the current directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What one index showed.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    blocks: u64,
    measured: bool,
    index_bytes: u64,
    open_ns_per_block: f64,
    evict_ns_per_byte: f64,
    evict_steps_per_mib: f64,
    checkpoint: WorkDone,
    sweep: WorkDone,
    longest: WorkDone,
    /// Keys that were looked up in a second, and how long one look-up of many keys took.
    keys_per_second: f64,
    look_up_p99_us: f64,
}

/// The store that is there.
struct Bench<'a> {
    store: &'a Store,
    subject: Subject,
    block_bytes: u64,
    put: u64,
    strangers: u64,
    budget: u64,
}

/// Runs the benchmark.
pub(super) fn run(arguments: &ScaleArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let common = Common::quiet(arguments.dir.clone(), arguments.json, 3);
    let budget = SEGMENTS * SEGMENT_BYTES;
    let scratch = Scratch::new(&common, budget + (1 << 30))?;
    let compaction = Compaction { every: None, ..Compaction::default() };
    let limits = Limits { compaction, expiry_sweep_every: SWEEPS, ..Limits::default() };
    let options = Options {
        budget_bytes: budget,
        budget_beyond_disk: true,
        segment_bytes: SEGMENT_BYTES,
        shards_per_directory: 1,
        limits,
        ..Options::default()
    };
    let part = scratch.part("full")?;
    let home = setup::open(&common, &part.path().join("store"), options)?;
    let block_bytes = arguments.block_kib << 10;
    let spec = ModelSpec::opaque("scale-pages", block_bytes).map_err(Failure::user)?;
    let subject = Subject::new(home.store(), &spec, None)?;
    let mut bench = Bench { store: home.store(), subject, block_bytes, put: 0, strangers: 0, budget };
    // Full, and a turn of it evicted once.
    bench.put(2 * budget)?;
    let mut rows: Vec<Row> = Vec::new();
    for &blocks in &arguments.blocks {
        let row = match blocks.saturating_mul(BLOCK_MEMORY) <= arguments.memory {
            true => bench.row(blocks)?,
            false => computed(blocks, rows.last().copied()),
        };
        rows.push(row);
    }
    let mut report = Report::new("scale");
    setup::describe(&mut report, &common, &home)?;
    report.fact("block_bytes", block_bytes);
    tell(&mut report, &rows);
    home.close().map_err(Failure::user)?;
    drop(part);
    if arguments.records > 0 {
        let ScaleArgs { records, directories, executors, .. } = *arguments;
        stalls::measure(&mut report, &common, &scratch, stalls::Size { records, directories, executors })?;
    }
    report.write(arguments.json, out)
}

/// A row that this machine cannot hold: what the last one took of each block, and of each byte.
fn computed(blocks: u64, last: Option<Row>) -> Row {
    let last = last.unwrap_or_default();
    let each = last.index_bytes as f64 / last.blocks.max(1) as f64;
    Row { blocks, measured: false, index_bytes: (each * blocks as f64) as u64, ..last }
}

fn less(after: WorkDone, before: WorkDone) -> WorkDone {
    WorkDone { steps: after.steps - before.steps, nanos: after.nanos - before.nanos, ..after }
}

impl Bench<'_> {
    /// Puts blocks of `bytes` bytes together, as prompts of a few records each.
    fn put(&mut self, bytes: u64) -> Result<(), Failure> {
        let end = self.put + bytes / self.block_bytes;
        while self.put < end {
            let until = end.min(self.put + 128);
            let keys: Vec<BlockKey> = (self.put..until).map(|number| key(3, number)).collect();
            let batch = ((2 << 20) / self.block_bytes).clamp(1, 64) as usize;
            self.subject.fill(self.store, &keys, batch, None)?;
            self.put = until;
        }
        Ok(())
    }

    fn row(&mut self, blocks: u64) -> Result<Row, Failure> {
        progress(&format!("an index of {blocks} blocks"));
        let here = self.store.stats().index.blocks as u64;
        let more = blocks.saturating_sub(here) / RECORD_BLOCKS * RECORD_BLOCKS;
        let begin = Instant::now();
        self.store.add_strangers(self.strangers, more).map_err(Failure::user)?;
        let open_ns_per_block = begin.elapsed().as_nanos() as f64 / more.max(1) as f64;
        self.strangers += more;
        // Checkpoints of the records that lie nowhere are not to cost the store its room.
        let kept = self.strangers / RECORD_BLOCKS * CHECKPOINT_ITEM_BYTES;
        self.store.set_budget(self.budget + kept).map_err(Failure::user)?;
        let before = self.store.work_done().evictions;
        let evicted = self.store.stats().counts.blocks_evicted;
        self.put(EVICTED_BYTES)?;
        let after = self.store.work_done().evictions;
        let freed = (self.store.stats().counts.blocks_evicted - evicted) * self.block_bytes;
        let evictions = less(after, before);
        let before = self.store.work_done().checkpoints;
        block_on(self.store.checkpoint()).map_err(Failure::user)?;
        let Done { evictions: longest, checkpoints: after, .. } = self.store.work_done();
        let (keys_per_second, look_up_p99_us) = self.look_ups()?;
        let sweep = self.sweep()?;
        let index = self.store.stats().index;
        Ok(Row {
            blocks: index.blocks as u64,
            measured: true,
            index_bytes: index.bytes as u64,
            open_ns_per_block,
            evict_ns_per_byte: evictions.nanos as f64 / freed.max(1) as f64,
            evict_steps_per_mib: evictions.steps as f64 / (freed.max(1) as f64 / f64::from(1 << 20)),
            checkpoint: less(after, before),
            sweep,
            longest,
            keys_per_second,
            look_up_p99_us,
        })
    }

    /// Look-ups by one thread, each of some keys of which nearly every second one is here: keys in a second, and the 99th percentile of a look-up.
    fn look_ups(&self) -> Result<(f64, f64), Failure> {
        let (mut times, mut all, mut found) = (Vec::new(), Duration::ZERO, 0);
        // The newest ones, of which few are evicted yet.
        let here = self.budget / self.block_bytes / 8;
        for number in 0..LOOK_UPS {
            let keys: Vec<BlockKey> = (0..LOOKED_UP)
                .map(|at| match at % 2 {
                    0 => key(3, self.put - 1 - (number * LOOKED_UP + at) % here),
                    _ => key(5, number * LOOKED_UP + at),
                })
                .collect();
            let request = ContainsRequest {
                namespace: self.subject.namespace,
                group: self.subject.group,
                coordinate: self.subject.coordinate,
                keys: &keys,
                lease: None,
            };
            let begin = Instant::now();
            let reply = self.store.contains(&request).map_err(Failure::user)?;
            let took = begin.elapsed();
            all += took;
            times.push(took);
            found += reply.presence.iter().filter(|one| **one == Presence::Here).count() as u64;
        }
        if found < LOOK_UPS * LOOKED_UP / 2 / 10 * 9 {
            return Err(Failure::user(format!(
                "only {found} of the looked-up keys were found instead of every second one"
            )));
        }
        times.sort_unstable();
        let p99 = times.get(times.len() * 99 / 100).copied().unwrap_or_default();
        Ok(((LOOK_UPS * LOOKED_UP) as f64 / all.as_secs_f64(), p99.as_secs_f64() * 1e6))
    }

    /// The newest blocks expire; what the sweep takes that finds them.
    fn sweep(&self) -> Result<WorkDone, Failure> {
        let keys: Vec<BlockKey> = (self.put - 64..self.put).map(|number| key(3, number)).collect();
        let before = self.store.work_done().sweeps;
        let request = TtlRequest {
            namespace: self.subject.namespace,
            group: self.subject.group,
            coordinate: self.subject.coordinate,
            keys: &keys,
            ttl: Some(Duration::from_millis(100)),
        };
        self.store.set_ttl(&request).map_err(Failure::user)?;
        let expired = self.store.stats().counts.blocks_expired;
        for _ in 0..100 {
            std::thread::sleep(SWEEPS);
            if self.store.stats().counts.blocks_expired >= expired + keys.len() as u64 {
                break;
            }
        }
        let after = self.store.work_done().sweeps;
        Ok(less(after, before))
    }
}

fn tell(report: &mut Report, rows: &[Row]) {
    let mut all: Vec<Value> = Vec::new();
    for row in rows {
        let each = row.index_bytes as f64 / row.blocks.max(1) as f64;
        all.push(json!({
            "blocks": row.blocks, "measured": row.measured, "index_bytes": row.index_bytes, "bytes_per_block": each,
            "open_index_ns_per_block": row.open_ns_per_block,
            "look_up_keys_per_second": row.keys_per_second, "look_up_p99_us": row.look_up_p99_us,
            "evict_ns_per_byte": row.evict_ns_per_byte, "evict_steps_per_mib": row.evict_steps_per_mib,
            "checkpoint_steps": row.checkpoint.steps, "checkpoint_us": row.checkpoint.nanos / 1000,
            "sweep_steps": row.sweep.steps, "sweep_us": row.sweep.nanos / 1000,
            "longest_steps": row.longest.longest_steps.max(row.checkpoint.longest_steps),
            "longest_us": row.longest.longest_nanos.max(row.checkpoint.longest_nanos) / 1000,
        }));
        report.note(format!(
            "{} blocks{}: the index takes {} ({each:.1} bytes per block); a look-up of {LOOKED_UP} keys takes {:.0} us (99th \
            percentile), {:.1} million keys per second; eviction takes {:.4} ns per byte and {:.1} steps per MiB",
            row.blocks,
            if row.measured { "" } else { " (computed, because the index does not fit into memory)" },
            human::bytes(row.index_bytes),
            row.look_up_p99_us,
            row.keys_per_second / 1e6,
            row.evict_ns_per_byte,
            row.evict_steps_per_mib,
        ));
    }
    report.rows("indexes", all);
    if let (Some(first), Some(last)) = (rows.first(), rows.last()) {
        report.number("evict_cost_ratio", last.evict_ns_per_byte / first.evict_ns_per_byte);
        report.number("evict_steps_ratio", last.evict_steps_per_mib / first.evict_steps_per_mib);
        report.number("index_bytes_per_block", last.index_bytes as f64 / last.blocks.max(1) as f64);
        report.fact("index_bytes_of_the_largest", last.index_bytes);
    }
}
