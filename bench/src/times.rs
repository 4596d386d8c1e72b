//! `bench times`: how well a way that was measured with one workload says what reads of another one take.
//!
//! The first workload reads runs of 1, 2, 4 ... blocks, each alone, in turns; from it the store itself learns latency and rate
//! ([`Store::disk_link`](kvarts_store::engine::Store::disk_link)), as plans of matches and the simulator's disks use them. The
//! second reads runs of any length, as requests of agents find them: many short ones and some very long, at other places,
//! some of them while another is under way. What the way says of each, from what is outstanding when it begins, is
//! compared with what it took.

use std::io::Write;
use std::time::Instant;

use clap::Args;
use kvarts_contract::api::{KvStore, Order, Placed, ReadEvent, ReadRequest, ReadStream, Verify};
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::class::Class;
use kvarts_layout::{BlockKey, ModelSpec};
use kvarts_planner::plan::Link;
use kvarts_store::engine::{Options, Store};
use serde_json::json;

use super::report::Report;
use super::scratch::Scratch;
use super::setup::{self, Common, Subject, key, progress};
use kvarts_terminal::Failure;

/// Blocks of one put.
const BATCH: usize = 64;
/// The longest run, as a power of two.
const LONGEST_BITS: u32 = 8;
const LONGEST: u64 = 1 << LONGEST_BITS;

/// The arguments of `bench times`.
#[derive(Args, Debug)]
pub(super) struct TimesArgs {
    #[command(flatten)]
    common: Common,
    /// Size of a block in KiB
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(4..=8192))]
    block_kib: u64,
    /// Blocks in the store
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u64).range(1024..=1 << 20))]
    blocks: u64,
    /// Reads of each workload
    #[arg(long, default_value_t = 900, value_parser = clap::value_parser!(u64).range(90..=100_000))]
    reads: u64,
}

/// A read that has ended.
#[derive(Clone, Copy, Debug)]
struct Timed {
    blocks: u64,
    is_alone: bool,
    /// By the way, and as it was, in milliseconds.
    said: f64,
    took: f64,
}

impl Timed {
    fn off(&self) -> f64 {
        (self.said / self.took - 1.0).abs()
    }
}

struct Reader<'a> {
    store: &'a Store,
    subject: &'a Subject,
    keys: &'a [BlockKey],
    into: [SharedBuf; 2],
    state: u64,
}

impl Reader<'_> {
    fn random(&mut self, below: u64) -> u64 {
        setup::mix(&mut self.state) % below
    }

    /// Begins to read a run at a random place.
    fn begin(&mut self, blocks: u64, into: usize) -> Result<ReadStream, Failure> {
        let at = self.random(self.keys.len() as u64 - blocks) as usize;
        let bytes = self.subject.shape.block_bytes() * blocks;
        let memory = self.into[into]
            .slice(0, bytes as usize)
            .ok_or_else(|| Failure::user("the memory of the benchmark is too small for a read"))?;
        let request = ReadRequest {
            namespace: self.subject.namespace,
            group: self.subject.group,
            coordinate: self.subject.coordinate,
            keys: self.keys[at..at + blocks as usize].to_vec(),
            layers: None,
            order: Order::Layers,
            into: Placed::blocks(&self.subject.shape, memory, blocks as u32).map_err(Failure::user)?,
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        };
        self.store.read(request).map_err(Failure::user)
    }

    /// What the way says of a read that begins now.
    fn said(&self, way: &Link, blocks: u64) -> f64 {
        let outstanding_bytes = self.store.disk_link().link.outstanding_bytes;
        let bytes = self.subject.shape.block_bytes() * blocks;
        Link { outstanding_bytes, ..*way }.wait_ms() + bytes as f64 / way.bytes_per_ms
    }

    /// Reads a run, `beside` another one that was begun before if there is one; the second's time counts from its own beginning.
    fn timed(&mut self, way: &Link, blocks: u64, beside: Option<u64>) -> Result<Timed, Failure> {
        let before = beside.map(|blocks| self.begin(blocks, 1)).transpose()?;
        let said = self.said(way, blocks);
        let asked = Instant::now();
        ended(&self.begin(blocks, 0)?, blocks)?;
        let took = asked.elapsed().as_secs_f64() * 1e3;
        if let (Some(stream), Some(blocks)) = (before, beside) {
            ended(&stream, blocks)?;
        }
        Ok(Timed { blocks, is_alone: beside.is_none(), said, took })
    }
}

/// Waits for the end of a read, which must have brought everything.
fn ended(stream: &ReadStream, blocks: u64) -> Result<(), Failure> {
    loop {
        if let ReadEvent::End(end) = stream.next_blocking() {
            let whole = u64::from(end.usable_blocks) == blocks;
            return if whole { Ok(()) } else { Err(Failure::user("a stored block was not read")) };
        }
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0u32), |(sum, count), value| (sum + value, count + 1));
    sum / f64::from(count.max(1))
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Runs the benchmark.
pub(super) fn run(arguments: &TimesArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let common = &arguments.common;
    let block_bytes = arguments.block_kib << 10;
    let room = arguments.blocks * block_bytes / 3 * 4 + (1 << 30);
    let scratch = Scratch::new(common, room)?;
    let options = Options { budget_bytes: room, ..Options::default() };
    let home = setup::open(common, scratch.path(), options)?;
    let spec = ModelSpec::opaque("bench-pages", block_bytes).map_err(Failure::user)?;
    let subject = Subject::new(home.store(), &spec, None)?;
    let keys: Vec<BlockKey> = (0..arguments.blocks).map(|number| key(9, number)).collect();
    subject.fill(home.store(), &keys, BATCH, None)?;
    let bytes = (block_bytes * LONGEST) as usize;
    let into = [setup::memory(bytes)?, setup::memory(bytes)?];
    let mut reader = Reader { store: home.store(), subject: &subject, keys: &keys, into, state: 5 };
    let nothing = Link::gb_per_s(1.0, 0.0);
    for number in 0..arguments.reads {
        progress(&format!("calibrating: {number} of {} reads", arguments.reads));
        reader.timed(&nothing, 1 << (number % u64::from(LONGEST_BITS + 1)), None)?;
    }
    let learnt = home.store().disk_link();
    let mut reads = Vec::new();
    for number in 0..arguments.reads {
        progress(&format!("reading: {number} of {} reads", arguments.reads));
        // Lengths with equal chances on a logarithmic scale.
        let length = |reader: &mut Reader<'_>| {
            let part = reader.random(1 << 20) as f64 / f64::from(1 << 20);
            ((LONGEST as f64).powf(part).round() as u64).clamp(1, LONGEST)
        };
        let blocks = length(&mut reader);
        let beside = (number % 3 == 2).then(|| length(&mut reader));
        reads.push(reader.timed(&learnt.link, blocks, beside)?);
    }
    progress("");
    let mut report = Report::new("times");
    setup::describe(&mut report, common, &home)?;
    report.fact("block_kib", arguments.block_kib);
    report.fact("reads", arguments.reads);
    report.number("latency_ms", learnt.link.latency_ms);
    report.number("gb_per_s", learnt.link.bytes_per_ms / 1e6);
    tell(&mut report, &reads, block_bytes);
    home.close().map_err(Failure::user)?;
    report.write(common.json, out)
}

/// Errors of single reads, of the median reads of each size, and of all together.
fn tell(report: &mut Report, reads: &[Timed], block_bytes: u64) {
    for (name, is_alone) in [("alone", true), ("beside", false)] {
        let some = || reads.iter().filter(move |one| one.is_alone == is_alone);
        report.number(&format!("{name}_mape"), mean(some().map(Timed::off)));
        report.number(&format!("{name}_median_error"), median(some().map(Timed::off)));
        let sum = |of: fn(&Timed) -> f64| some().map(of).sum::<f64>();
        report.number(&format!("{name}_all_error"), sum(|one| one.said) / sum(|one| one.took) - 1.0);
        let (mut rows, mut errors) = (Vec::new(), Vec::new());
        for bits in 0..=LONGEST_BITS {
            let class = || some().filter(move |one| one.blocks.ilog2() == bits);
            if class().next().is_none() {
                continue;
            }
            let (said, took) = (median(class().map(|one| one.said)), median(class().map(|one| one.took)));
            errors.push((said / took - 1.0).abs());
            rows.push(json!({"kib": block_bytes << bits >> 10, "said_ms": said, "took_ms": took, "reads": class().count()}));
            report.note(format!(
                "{name}, {} KiB and more: predicted {said:.3} ms, measured {took:.3} ms (medians)",
                block_bytes << bits >> 10
            ));
        }
        report.number(&format!("{name}_sizes_mape"), mean(errors.into_iter()));
        report.rows(&format!("{name}_sizes"), rows);
    }
}
