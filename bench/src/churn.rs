//! `bench churn`: a store that is full and stays in use. What it takes must stay flat: bytes on disk, memory,
//! descriptors, and bytes written for each byte put.
//!
//! Blocks are put without end into a store whose budget holds a small part of them, with reads of recent ones among
//! them. When the budget is full and segments are recycled, samples begin. Of each series the report has its mean
//! and its trend: the straight line that fits best, as what it rises or falls over the whole time, in parts of the
//! mean. A series whose trend is below 2% is flat. The index is told beside the resident memory that it is part of:
//! each of its tables is as large as it has ever had to be, so its bytes creep up ever more slowly.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use kvarts_contract::api::{
    Durability, KvStore, Order, Parent, Placed, PutRequest, ReadEvent, ReadRequest, Verify,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::class::Class;
use kvarts_contract::events::{RING_BYTES, ring_events};
use kvarts_layout::{BlockKey, ModelSpec};
use kvarts_store::engine::{Options, Store};
use serde_json::json;

use super::report::Report;
use super::scratch::Scratch;
use super::setup::{self, Common, Subject, key, progress};
use crate::digits::digits;
use kvarts_terminal::Failure;

const MIB: f64 = (1u64 << 20) as f64;
/// A trend below this part of the mean is none.
const FLAT: f64 = 0.02;
/// Blocks of one put.
const BATCH: u64 = 16;
/// The number of puts after which a read of a recent put follows.
const READ_EVERY: u64 = 8;
/// How long the store may take until it is full.
const FILL_MAX: Duration = Duration::from_secs(600);

/// The arguments of `bench churn`.
#[derive(Args, Debug)]
pub(super) struct ChurnArgs {
    #[command(flatten)]
    common: Common,
    /// Seconds of churn after the store is full
    #[arg(long, default_value_t = 25, value_parser = clap::value_parser!(u64).range(3..=86_400))]
    seconds: u64,
    /// Budget of the store in MiB
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(16..=1 << 20))]
    budget_mib: u64,
    /// Size of a segment in MiB; small, so that a small store has many segments
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=1024))]
    segment_mib: u64,
    /// Size of a block in KiB
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=16_384))]
    block_kib: u64,
    /// Number of samples
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(4..=10_000))]
    samples: u32,
}

/// What was found at one moment.
#[derive(Clone, Copy, Debug)]
struct Sample {
    seconds: f64,
    allocated: f64,
    on_disk: f64,
    resident: f64,
    descriptors: f64,
    index: f64,
    payload: f64,
    written: f64,
}

/// Puts and reads without end.
struct Churn<'a> {
    store: &'a Store,
    subject: Subject,
    source: SharedBuf,
    into: SharedBuf,
    puts: u64,
    refused: u64,
}

/// Runs the benchmark.
pub(super) fn run(arguments: &ChurnArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let common = &arguments.common;
    let budget = arguments.budget_mib << 20;
    let scratch = Scratch::new(common, budget + (64 << 20))?;
    let segment_bytes = arguments.segment_mib << 20;
    let options = Options { budget_bytes: budget, segment_bytes, ..Options::default() };
    let home = setup::open(common, scratch.path(), options)?;
    let store = home.store();
    let spec = ModelSpec::opaque("bench-pages", arguments.block_kib << 10).map_err(Failure::user)?;
    let bytes = (arguments.block_kib << 10) * BATCH;
    let mut churn = Churn {
        store,
        subject: Subject::new(store, &spec, None)?,
        source: setup::noise(bytes as usize)?,
        into: setup::memory(bytes as usize)?,
        puts: 0,
        refused: 0,
    };
    let begin = Instant::now();
    // Full, every segment written again, and the ring of events gone round: what only the first use costs is over.
    let segments = (budget / segment_bytes).max(1);
    let events = ring_events(RING_BYTES) as u64;
    let told = || store.subscribe(None).sequence().number;
    while store.stats().counts.segments_recycled < segments || told() < events {
        churn.step()?;
        progress(&format!("filling: {} MiB", store.stats().allocated_bytes >> 20));
        if begin.elapsed() > FILL_MAX {
            return Err(Failure::user(
                "the store was not full after ten minutes: use a smaller --budget-mib",
            ));
        }
    }
    let filled = begin.elapsed().as_secs_f64();
    let samples = churn.watch(arguments, scratch.path())?;
    progress("");
    let mut report = Report::new("churn");
    setup::describe(&mut report, common, &home)?;
    report.fact("budget_bytes", budget);
    report.number("seconds_to_fill", filled);
    conclude(&mut report, &samples, budget, &churn);
    home.close().map_err(Failure::user)?;
    report.write(common.json, out)
}

impl Churn<'_> {
    /// A put of blocks that are new, and now and then a read of some put before.
    fn step(&mut self) -> Result<(), Failure> {
        let keys = self.keys(self.puts);
        let request = PutRequest {
            durability: Durability::Relaxed,
            ..self.subject.put(keys, Parent::Root, self.source.clone(), None)?
        };
        let reply = block_on(self.store.put(request)).map_err(|_| Failure::user("the store has stopped"))?;
        let outcomes = reply.map_err(Failure::user)?.outcomes;
        let stored = |outcome: &_| matches!(outcome, kvarts_contract::api::BlockOutcome::Stored);
        self.refused += outcomes.iter().filter(|outcome| !stored(outcome)).count() as u64;
        self.puts += 1;
        if self.puts.is_multiple_of(READ_EVERY) {
            self.read(self.puts - 1 - self.puts % 7)?;
        }
        Ok(())
    }

    fn keys(&self, put: u64) -> Vec<BlockKey> {
        (put * BATCH..(put + 1) * BATCH).map(|number| key(11, number)).collect()
    }

    fn read(&self, put: u64) -> Result<(), Failure> {
        let placed = Placed::blocks(&self.subject.shape, self.into.clone(), BATCH as u32);
        let request = ReadRequest {
            namespace: self.subject.namespace,
            group: self.subject.group,
            coordinate: self.subject.coordinate,
            keys: self.keys(put),
            layers: None,
            order: Order::Blocks,
            into: placed.map_err(Failure::user)?,
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        };
        let stream = self.store.read(request).map_err(Failure::user)?;
        while !matches!(block_on(stream.next()), ReadEvent::End(_)) {}
        Ok(())
    }

    /// Churns for as long as asked and samples meanwhile.
    fn watch(&mut self, arguments: &ChurnArgs, directory: &Path) -> Result<Vec<Sample>, Failure> {
        let (begin, whole) = (Instant::now(), Duration::from_secs(arguments.seconds));
        let mut samples = Vec::new();
        for number in 0..=arguments.samples {
            let until = whole * number / arguments.samples;
            while begin.elapsed() < until {
                self.step()?;
            }
            progress(&format!("churning: {} of {} s", begin.elapsed().as_secs(), arguments.seconds));
            samples.push(self.sample(begin, directory)?);
        }
        Ok(samples)
    }

    fn sample(&self, begin: Instant, directory: &Path) -> Result<Sample, Failure> {
        let stats = self.store.stats();
        let io = block_on(self.store.io()).map_err(Failure::user)?;
        Ok(Sample {
            seconds: begin.elapsed().as_secs_f64(),
            allocated: stats.allocated_bytes as f64,
            on_disk: on_disk(directory)? as f64,
            resident: resident()?,
            descriptors: count("/proc/self/fd")?,
            index: stats.index.bytes as f64,
            payload: stats.counts.payload_bytes_stored as f64,
            written: io.iter().map(|(_, metrics)| metrics.bytes_written).sum::<u64>() as f64,
        })
    }
}

/// Bytes that the file system has allocated to all files below.
fn on_disk(below: &Path) -> Result<u64, Failure> {
    use std::os::unix::fs::MetadataExt;
    let fault = |error: std::io::Error| Failure::User(format!("{}: {error}", below.display()));
    let mut sum = 0;
    for entry in std::fs::read_dir(below).map_err(fault)? {
        let entry = entry.map_err(fault)?;
        // A file that was given back meanwhile has nothing.
        let Ok(meta) = entry.metadata() else { continue };
        sum += meta.blocks() * 512 + if meta.is_dir() { on_disk(&entry.path())? } else { 0 };
    }
    Ok(sum)
}

/// Bytes of memory that this process has.
fn resident() -> Result<f64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(Failure::user)?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()).and_then(|word| word.parse::<f64>().ok());
    kib.map(|kib| kib * 1024.0)
        .ok_or_else(|| Failure::user("/proc/self/status has no line VmRSS with the resident memory"))
}

fn count(directory: &str) -> Result<f64, Failure> {
    Ok(std::fs::read_dir(directory).map_err(Failure::user)?.count() as f64)
}

/// The mean of a series, and what the line through it rises over its whole time, in parts of the mean.
fn trend(points: &[(f64, f64)]) -> (f64, f64) {
    let n = points.len().max(1) as f64;
    let mean_of = |pick: fn(&(f64, f64)) -> f64| points.iter().map(pick).sum::<f64>() / n;
    let (x0, y0) = (mean_of(|point| point.0), mean_of(|point| point.1));
    let both: f64 = points.iter().map(|(x, y)| (x - x0) * (y - y0)).sum();
    let own: f64 = points.iter().map(|(x, _)| (x - x0).powi(2)).sum();
    let time = points.last().map_or(0.0, |last| last.0) - points.first().map_or(0.0, |first| first.0);
    if own == 0.0 || y0 == 0.0 { (y0, 0.0) } else { (y0, both / own * time / y0) }
}

fn conclude(report: &mut Report, samples: &[Sample], budget: u64, churn: &Churn<'_>) {
    let series = |pick: fn(&Sample) -> f64| -> Vec<(f64, f64)> {
        samples.iter().map(|sample| (sample.seconds, pick(sample))).collect()
    };
    let amplification: Vec<(f64, f64)> = samples
        .windows(2)
        .filter(|pair| pair[1].payload > pair[0].payload)
        .map(|pair| {
            let written = pair[1].written - pair[0].written;
            (pair[1].seconds, written / (pair[1].payload - pair[0].payload))
        })
        .collect();
    let (first, last) = (samples[0], samples[samples.len() - 1]);
    let seconds = last.seconds - first.seconds;
    report.number("seconds", seconds);
    report.number("put_mib_per_second", (last.payload - first.payload) / MIB / seconds.max(1e-9));
    report.fact("blocks_refused", churn.refused);
    let most = samples.iter().map(|sample| sample.on_disk).fold(0.0, f64::max);
    report.number("most_on_disk_by_budget", most / budget as f64);
    let mut all_flat = most <= budget as f64;
    let mut rows = Vec::new();
    for (name, points) in [
        ("allocated_bytes", series(|sample| sample.allocated)),
        ("on_disk_bytes", series(|sample| sample.on_disk)),
        ("resident_bytes", series(|sample| sample.resident)),
        ("descriptors", series(|sample| sample.descriptors)),
        ("index_bytes", series(|sample| sample.index)),
        ("write_amplification", amplification),
    ] {
        let (mean, trend) = trend(&points);
        let flat = trend.abs() < FLAT;
        all_flat &= flat || name == "index_bytes";
        report.number(name, mean);
        report.number(&format!("{name}_trend"), trend);
        report.note(format!(
            "{name}: {} (trend {:+.2}%)",
            if flat { "flat" } else { "NOT FLAT" },
            trend * 100.0
        ));
        let values: Vec<String> = points.iter().map(|point| digits(point.1)).collect();
        rows.push(json!({ "name": name, "mean": mean, "trend": trend, "flat": flat, "values": values }));
    }
    report.fact("flat", all_flat);
    report.rows("series", rows);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_its_rise_and_noise_about_a_mean_has_none() {
        let rising: Vec<(f64, f64)> = (0..=10).map(|n| (f64::from(n), 100.0 + f64::from(n))).collect();
        let (mean, rise) = trend(&rising);
        assert!((mean - 105.0).abs() < 1e-9 && (rise - 10.0 / 105.0).abs() < 1e-9, "{mean} {rise}");
        let saw: Vec<(f64, f64)> = (0..=100).map(|n| (f64::from(n), 100.0 + f64::from(n % 2))).collect();
        assert!(trend(&saw).1.abs() < 1e-3);
        assert_eq!(trend(&[]), (0.0, 0.0));
    }
}
