//! `bench mixed`: layer reads while puts run at a share of what the device takes, on a nearly full store, with reclaim
//! and compaction at work; beside the same reads on the same store when nothing else runs.
//!
//! Idle and busy phases take turns, so that a machine that changes meanwhile favours neither. A read is one layer of a
//! prefix, asked for when the one before has come: what an engine waits for. The blocks that are read are leased, so
//! every read is a hit; what is put are one-block continuations of prefixes, as agent sessions seal them, which is
//! what compaction merges.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use kvarts_contract::api::{
    ContainsRequest, KvStore, LeaseTerms, Order, Parent, Placed, PutReply, ReadEvent, ReadRequest, Verify,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::class::Class;
use kvarts_contract::error::Error;
use kvarts_contract::ticket::Ticket;
use kvarts_layout::BlockKey;
use kvarts_store::engine::{CompactOptions, CompactReport, Counts, Options, Store};

use super::report::Report;
use super::scratch::Scratch;
use super::setup::{self, Common, Subject, expect_stored, key, mix};
use kvarts_terminal::Failure;

const MIB: f64 = (1u64 << 20) as f64;
/// Blocks of a prefix that is read, and of one that is put.
const PREFIX_BLOCKS: u64 = 16;
/// Puts that the writer has under way.
const PUTS_MAX: usize = 4;

/// The arguments of `bench mixed`.
#[derive(Args, Debug)]
pub(super) struct MixedArgs {
    #[command(flatten)]
    common: Common,
    /// A shipped model
    #[arg(long, default_value = "llama-3.1-8b")]
    model: String,
    /// Tokens of a block
    #[arg(long, default_value_t = 16)]
    block_tokens: u32,
    /// Budget of the store in MiB
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(64..=1 << 20))]
    mib: u64,
    /// Layer reads of each kind
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(100..=1_000_000))]
    reads: u32,
    /// Phases of each kind
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=100))]
    phases: u32,
    /// Rate of puts, in percent of the measured write rate
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(0..=100))]
    put_percent: u32,
    /// Maximum rate of reads and writes of compaction in MiB/s; 0 disables compaction
    #[arg(long, default_value_t = 32)]
    compact_mib_s: u64,
    /// Milliseconds for which the write rate is measured
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    rate_ms: u64,
}

impl MixedArgs {
    /// Reads of one phase.
    fn each(&self) -> u32 {
        self.reads.div_ceil(self.phases)
    }
}

/// What the writer and the compaction look at, and tell.
#[derive(Default)]
struct Load {
    busy: AtomicBool,
    done: AtomicBool,
    put_bytes: AtomicU64,
}

/// The reads of one kind of phase.
#[derive(Default)]
struct Side {
    /// How long each took.
    seconds: Vec<f64>,
    bytes: f64,
    time: f64,
}

impl Side {
    /// The 99th percentile of every second phase by that of the others: what nothing but time makes of it. Asked for before the reads are
    /// sorted.
    fn control(&self, each: usize) -> f64 {
        let every_second = |first: usize| {
            let phases = self.seconds.chunks(each).skip(first).step_by(2);
            Self { seconds: phases.flatten().copied().collect(), ..Self::default() }.percentile(990)
        };
        every_second(1) / every_second(0)
    }

    /// The value that `thousandths` of a thousand reads do not pass.
    fn percentile(&mut self, thousandths: usize) -> f64 {
        self.seconds.sort_by(f64::total_cmp);
        let at = (self.seconds.len() * thousandths / 1000).min(self.seconds.len().saturating_sub(1));
        self.seconds.get(at).copied().unwrap_or(f64::NAN)
    }
}

/// Runs the benchmark.
pub(super) fn run(arguments: &MixedArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let common = &arguments.common;
    let budget = arguments.mib << 20;
    let scratch = Scratch::new(common, budget + (256 << 20))?;
    // Small enough that reclaim is at work all the time.
    let segment_bytes = (budget / 64).next_power_of_two().clamp(1 << 20, 64 << 20);
    let record_bytes_max = (8 << 20).min(segment_bytes / 2);
    let options = Options { budget_bytes: budget, segment_bytes, record_bytes_max, ..Options::default() };
    let home = setup::open(common, scratch.path(), options)?;
    let store = home.store();
    let subject = Subject::new(store, &setup::model(&arguments.model)?, Some(arguments.block_tokens))?;
    let prefixes = (budget / 4 / (subject.shape.block_bytes() * PREFIX_BLOCKS)).max(2);
    let hot = Hot::new(store, &subject, prefixes)?;
    let writer = Writer::new(store, &subject)?;
    writer.fill(budget / 100 * 95)?;
    let rate = writer.rate(Duration::from_millis(arguments.rate_ms))?;
    let before = store.stats().counts;
    let (mut idle, mut busy) = (Side::default(), Side::default());
    let load = Load::default();
    let wanted = rate * f64::from(arguments.put_percent) / 100.0;
    let compacted = std::thread::scope(|threads| {
        let putting = threads.spawn(|| writer.run(&load, wanted));
        let compacting = threads.spawn(|| compact(store, &load, arguments.compact_mib_s << 20));
        let measured = phases(arguments, store, &hot, &load, (&mut idle, &mut busy));
        load.done.store(true, Ordering::Release);
        let put = putting.join().map_err(|_| Failure::user("the writer failed"))?;
        let compacted = compacting.join().map_err(|_| Failure::user("the compaction failed"))?;
        measured.and(put)?;
        compacted
    })?;
    let mut report = Report::new("mixed");
    setup::describe(&mut report, common, &home)?;
    report.fact("model", subject.name.clone());
    report.fact("block_bytes", subject.shape.block_bytes());
    report.fact("budget_mib", arguments.mib);
    let (allocated, after) = (store.stats().allocated_bytes, store.stats().counts);
    report.number("full", allocated as f64 / budget as f64);
    report.fact("layer_bytes", hot.layer_bytes);
    report.fact("reads", arguments.reads);
    report.number("write_mib_s", rate / MIB);
    tell(&mut report, arguments.each() as usize, &mut idle, &mut busy);
    report.number("put_mib_s", load.put_bytes.load(Ordering::Relaxed) as f64 / MIB / busy.time);
    report.number("put_mib_s_wanted", wanted / MIB);
    work(&mut report, &before, &after, &compacted);
    home.close().map_err(Failure::user)?;
    report.write(common.json, out)
}

fn tell(report: &mut Report, each: usize, idle: &mut Side, busy: &mut Side) {
    report.number("p99_control", idle.control(each));
    for (name, thousandths) in [("p50", 500), ("p99", 990), ("p999", 999)] {
        let (quiet, loud) = (idle.percentile(thousandths), busy.percentile(thousandths));
        report.number(&format!("{name}_ms_idle"), quiet * 1e3);
        report.number(&format!("{name}_ms_busy"), loud * 1e3);
        report.number(&format!("{name}_ratio"), loud / quiet);
    }
    report.number("read_mib_s_idle", idle.bytes / MIB / idle.time);
    report.number("read_mib_s_busy", busy.bytes / MIB / busy.time);
    report.number("busy_seconds", busy.time);
}

/// What reclaim and compaction did meanwhile: figures of a run in which they did nothing mean something else.
fn work(report: &mut Report, before: &Counts, after: &Counts, compacted: &CompactReport) {
    report.fact("segments_recycled", after.segments_recycled - before.segments_recycled);
    report.fact("blocks_evicted", after.blocks_evicted - before.blocks_evicted);
    report.fact("records_merged", compacted.records_merged);
    report.fact("records_failed", compacted.records_failed);
    report.fact("blocks_moved", after.blocks_moved - before.blocks_moved);
    let moved = after.moved_bytes_written - before.moved_bytes_written;
    report.number("compaction_written_mib", moved as f64 / MIB);
}

/// Idle and busy phases in turn.
fn phases(
    arguments: &MixedArgs,
    store: &Store,
    hot: &Hot,
    load: &Load,
    (idle, busy): (&mut Side, &mut Side),
) -> Result<(), Failure> {
    let each = arguments.each();
    let mut state = 7;
    // One phase of each that does not count.
    hot.read_some(store, each / 4, &mut state, &mut Side::default())?;
    for phase in 0..arguments.phases {
        setup::progress(&format!("phase {} of {}", phase + 1, arguments.phases));
        hot.read_some(store, each, &mut state, idle)?;
        load.busy.store(true, Ordering::Release);
        let measured = hot.read_some(store, each, &mut state, busy);
        load.busy.store(false, Ordering::Release);
        measured?;
        // What was begun ends before the next idle phase.
        std::thread::sleep(Duration::from_millis(150));
    }
    setup::progress("");
    Ok(())
}

/// Compacts in busy phases, a little at a time.
fn compact(store: &Store, load: &Load, bytes_per_second: u64) -> Result<CompactReport, Failure> {
    let mut all = CompactReport::default();
    while !load.done.load(Ordering::Acquire) {
        if bytes_per_second > 0 && load.busy.load(Ordering::Acquire) {
            let bytes_max = bytes_per_second / 4;
            let options = CompactOptions {
                bytes_per_second,
                bytes_max,
                merge_records_min: 2,
                ..CompactOptions::default()
            };
            all.add(block_on(store.compact(options)).map_err(Failure::user)?);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(all)
}

/// The prefixes that are read, leased for the time of the run.
struct Hot {
    subject: Subject,
    prefixes: u64,
    into: SharedBuf,
    layer_bytes: u64,
}

impl Hot {
    fn new(store: &Store, subject: &Subject, prefixes: u64) -> Result<Self, Failure> {
        for prefix in 0..prefixes {
            let keys: Vec<BlockKey> = Self::keys(prefix);
            subject.fill(store, &keys, PREFIX_BLOCKS as usize, None)?;
            let terms = LeaseTerms { hold: Duration::from_secs(3600), tenant: 1, cap_bytes: u64::MAX };
            let request = ContainsRequest {
                namespace: subject.namespace,
                group: subject.group,
                coordinate: subject.coordinate,
                keys: &keys,
                lease: Some(terms),
            };
            store.contains(&request).map_err(Failure::user)?;
        }
        let layer = subject.shape.layers().iter().map(|layer| layer.bytes()).max().unwrap_or(0);
        let into = setup::memory((subject.shape.block_bytes() * PREFIX_BLOCKS) as usize)?;
        into.fill(0);
        block_on(store.register_memory(into.region())).ok();
        Ok(Self { subject: subject.clone(), prefixes, into, layer_bytes: layer * PREFIX_BLOCKS })
    }

    fn keys(prefix: u64) -> Vec<BlockKey> {
        (0..PREFIX_BLOCKS).map(|number| key(1 + prefix, number)).collect()
    }

    /// Reads `count` layers of prefixes at random, one after the other.
    fn read_some(&self, store: &Store, count: u32, state: &mut u64, side: &mut Side) -> Result<(), Failure> {
        let layers = self.subject.shape.layers().len() as u64;
        let begin = Instant::now();
        for _ in 0..count {
            let (prefix, layer) = (mix(state) % self.prefixes, (mix(state) % layers) as u32);
            let request = ReadRequest {
                namespace: self.subject.namespace,
                group: self.subject.group,
                coordinate: self.subject.coordinate,
                keys: Self::keys(prefix),
                layers: Some(layer..layer + 1),
                order: Order::Layers,
                into: Placed::blocks(&self.subject.shape, self.into.clone(), PREFIX_BLOCKS as u32)
                    .map_err(Failure::user)?,
                verify: Verify::Always,
                class: Class::Foreground,
                deadline: None,
            };
            let asked = Instant::now();
            let stream = store.read(request).map_err(Failure::user)?;
            let end = loop {
                if let ReadEvent::End(end) = stream.next_blocking() {
                    break end;
                }
            };
            side.seconds.push(asked.elapsed().as_secs_f64());
            if u64::from(end.usable_blocks) != PREFIX_BLOCKS {
                let why = end.failures.first().map(|(_, reason)| reason.to_string());
                return Err(Failure::User(format!("a leased block was not read: {why:?}")));
            }
            side.bytes += self.layer_bytes as f64;
        }
        side.time += begin.elapsed().as_secs_f64();
        Ok(())
    }
}

/// Puts one-block continuations of ever new prefixes.
struct Writer<'a> {
    store: &'a Store,
    subject: Subject,
    source: SharedBuf,
    next: AtomicU64,
}

type Under = VecDeque<Ticket<Result<PutReply, Error>>>;

impl<'a> Writer<'a> {
    fn new(store: &'a Store, subject: &Subject) -> Result<Self, Failure> {
        let source = setup::noise(subject.shape.block_bytes() as usize)?;
        block_on(store.register_memory(source.region())).ok();
        Ok(Self { store, subject: subject.clone(), source, next: AtomicU64::new(0) })
    }

    /// Puts one more, when one of those under way has ended.
    fn put(&self, under_way: &mut Under) -> Result<u64, Failure> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (chain, block) = (1_000_000 + number / PREFIX_BLOCKS, number % PREFIX_BLOCKS);
        let parent = block.checked_sub(1).map_or(Parent::Root, |before| Parent::Key(key(chain, before)));
        let request = self.subject.put(vec![key(chain, block)], parent, self.source.clone(), None)?;
        while under_way.len() >= PUTS_MAX {
            self.settle(under_way)?;
        }
        under_way.push_back(self.store.put(request));
        Ok(self.subject.shape.block_bytes())
    }

    fn settle(&self, under_way: &mut Under) -> Result<(), Failure> {
        under_way.pop_front().map_or(Ok(()), |ticket| expect_stored(&block_on(ticket)))
    }

    /// Puts until the store has `bytes` bytes on disk.
    fn fill(&self, bytes: u64) -> Result<(), Failure> {
        let mut under_way = Under::new();
        while self.store.stats().allocated_bytes < bytes {
            setup::progress(&format!("filling: {} MiB", self.store.stats().allocated_bytes >> 20));
            self.put(&mut under_way)?;
        }
        while !under_way.is_empty() {
            self.settle(&mut under_way)?;
        }
        setup::progress("");
        Ok(())
    }

    /// Bytes a second that puts reach when nothing else runs.
    fn rate(&self, time: Duration) -> Result<f64, Failure> {
        let (mut under_way, mut bytes, begin) = (Under::new(), 0, Instant::now());
        while begin.elapsed() < time {
            bytes += self.put(&mut under_way)?;
        }
        while !under_way.is_empty() {
            self.settle(&mut under_way)?;
        }
        Ok(bytes as f64 / begin.elapsed().as_secs_f64())
    }

    /// Puts at a rate in busy phases.
    fn run(&self, load: &Load, bytes_per_second: f64) -> Result<(), Failure> {
        let mut under_way = Under::new();
        while !load.done.load(Ordering::Acquire) {
            let (begin, mut bytes) = (Instant::now(), 0u64);
            while load.busy.load(Ordering::Acquire) && bytes_per_second > 0.0 {
                let due = Duration::from_secs_f64(bytes as f64 / bytes_per_second);
                match due.checked_sub(begin.elapsed()) {
                    Some(early) => std::thread::sleep(early.min(Duration::from_millis(5))),
                    None => {
                        let put = self.put(&mut under_way)?;
                        bytes += put;
                        load.put_bytes.fetch_add(put, Ordering::Relaxed);
                    }
                }
            }
            while !under_way.is_empty() {
                self.settle(&mut under_way)?;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}
