//! `bench put`: records put durably, alone and in groups, beside a bare loop that writes the same bytes in the same
//! groups into preallocated files and flushes after each.
//!
//! Files that are written for the first time and files that are written again are told apart: file systems keep
//! what was preallocated as unwritten until then, and turning it into written space is part of the first flush.
//! The engine's client keeps two groups under way, as an engine that streams a prefix out does, so the next group's
//! digests and writes overlap the flush; `serial` is a client that waits for each group.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use kvarts_contract::api::{KvStore, Parent, PutReply};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::error::Error;
use kvarts_contract::ticket::Ticket;
use kvarts_layout::ModelSpec;
use kvarts_layout::format::DEFAULT_SEGMENT_BYTES;
use kvarts_store::engine::{Options, Store};
use kvarts_store::io::MetaOp;
use serde_json::json;

use super::bare::{Bare, Extent};
use super::pairs::{Contestant, Rounds, Sample, Summary, cpu_seconds, take_turns};
use super::report::Report;
use super::scratch::Scratch;
use super::setup::{self, Common, Subject, key};
use kvarts_terminal::Failure;

const MIB: f64 = (1u64 << 20) as f64;
/// The records that the issue of a durable put is decided by.
const RECORD_BYTES: u64 = 4 << 20;
/// The header of a record of few blocks.
const HEADER_BYTES: u64 = 4096;
const SMALL_BYTES: [u64; 3] = [64 << 10, 256 << 10, 1 << 20];
const SMALL_GROUP: u64 = 16;
/// MiB of one round of small records.
const SMALL_MIB: u64 = 16;

/// The arguments of `bench put`.
#[derive(Args, Debug)]
pub(super) struct PutArgs {
    #[command(flatten)]
    common: Common,
    /// A shipped model; a block has as many tokens as fit in a record of 4 MiB
    #[arg(long, default_value = "llama-3.1-8b")]
    model: String,
    /// Numbers of concurrent puts to measure, separated by commas
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16])]
    groups: Vec<u64>,
    /// Size of a round of each contestant in MiB
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(16..=4096))]
    mib: u64,
    /// Size of a segment in MiB; the measurement starts after the store has recycled two segments
    #[arg(long, default_value_t = DEFAULT_SEGMENT_BYTES >> 20, value_parser = clap::value_parser!(u64).range(16..=16_384))]
    segment_mib: u64,
}

/// Records of one size, and how many a round and a group have.
#[derive(Clone)]
struct Shape {
    subject: Subject,
    record_bytes: u64,
    group: u64,
    groups: u64,
}

impl Shape {
    fn bytes(&self) -> f64 {
        (self.record_bytes * self.group * self.groups) as f64
    }
}

/// Runs the benchmark.
pub(super) fn run(arguments: &PutArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let common = &arguments.common;
    if let Some(group) = arguments.groups.iter().find(|group| !(1..=64).contains(*group)) {
        return Err(Failure::User(format!("--groups {group}: use 1 to 64")));
    }
    let fresh_bytes = (arguments.mib << 20) * u64::from(common.pairs + 1);
    let segment = arguments.segment_mib << 20;
    // Both shards may be in the middle of a segment, and sealing one takes another; checkpoints need room as well.
    let budget = fresh_bytes.next_multiple_of(segment) + 4 * segment + (16 << 20);
    let scratch = Scratch::new(common, budget + 3 * fresh_bytes + (1 << 30))?;
    let options = Options { budget_bytes: budget, segment_bytes: segment, ..Options::default() };
    let home = setup::open(common, scratch.path(), options)?;
    let store = home.store();
    let spec = setup::model(&arguments.model)?;
    let subject = four_mib(store, &spec)?;
    let source = setup::noise((arguments.mib << 20) as usize)?;
    let registered = block_on(store.register_memory(source.region())).is_ok();
    let files = Files::new(common, scratch.path(), &source)?;
    let mut number = 0;
    let mut report = Report::new("put");
    setup::describe(&mut report, common, &home)?;
    report.fact("model", subject.name.clone());
    report.fact("record_bytes", subject.shape.block_bytes());
    report.fact("registered_engine", registered);
    let shape = |subject: &Subject, group: u64, mib: u64| {
        let record_bytes = subject.shape.block_bytes();
        let groups = ((mib << 20) / (record_bytes * group)).max(1);
        Shape { subject: subject.clone(), record_bytes, group, groups }
    };
    let fresh = shape(&subject, 4, arguments.mib);
    let mut bench = Bench { common, store, source: &source, files: &files, number: &mut number };
    let rounds = bench.race(&fresh, true)?;
    bench.recycle(&fresh)?;
    files.fill()?;
    tell(&mut report, "fresh_group_4", &fresh, &rounds, "control_fresh");
    let mut medians = Vec::new();
    for &group in &arguments.groups {
        let shape = shape(&subject, group, arguments.mib);
        let rounds = bench.race(&shape, false)?;
        tell(&mut report, &format!("group_{group}"), &shape, &rounds, &format!("control_group_{group}"));
        medians.push(rounds.speed("engine", "bare"));
    }
    let mut rows = Vec::new();
    for bytes in SMALL_BYTES {
        let spec = ModelSpec::opaque("bench-pages", bytes).map_err(Failure::user)?;
        let subject = Subject::new(store, &spec, None)?;
        let shape = shape(&subject, SMALL_GROUP, SMALL_MIB.min(arguments.mib));
        let rounds = bench.race(&shape, false)?;
        let (ratio, control) = (rounds.speed("engine", "bare"), rounds.speed("again", "bare"));
        report.median(&format!("small_{}_kib", bytes >> 10), ratio);
        rows.push(json!({ "record_bytes": bytes, "group": SMALL_GROUP, "ratio": ratio, "control": control }));
    }
    report.rows("small", rows);
    report.median("ratio", middle(medians));
    let counts = store.stats().counts;
    report.number("segments_recycled", counts.segments_recycled as f64);
    // What was given back as holes comes from the file system again, never written: then nothing was recycled.
    report.number("bytes_punched", counts.bytes_punched as f64);
    drop(files);
    home.close().map_err(Failure::user)?;
    report.write(common.json, out)
}

/// The figure of the group whose median is the middle one.
fn middle(mut groups: Vec<Summary>) -> Summary {
    groups.sort_by(|a, b| a.median.total_cmp(&b.median));
    let place = groups.len() / 2;
    groups.into_iter().nth(place).unwrap_or(Summary { median: f64::NAN, low: f64::NAN, high: f64::NAN })
}

/// The model with blocks of 4 MiB, or pages of that size if it has no such blocks.
fn four_mib(store: &Store, spec: &ModelSpec) -> Result<Subject, Failure> {
    let one = Subject::new(store, spec, Some(spec.geometry().entry_tokens()))?;
    let tokens = RECORD_BYTES / one.shape.block_bytes().max(1) * u64::from(spec.geometry().entry_tokens());
    let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
    match Subject::new(store, spec, Some(tokens)) {
        Ok(subject) if subject.shape.block_bytes() == RECORD_BYTES => Ok(subject),
        _ => Subject::new(store, &ModelSpec::opaque(spec.name(), RECORD_BYTES).map_err(Failure::user)?, None),
    }
}

fn tell(report: &mut Report, name: &str, shape: &Shape, rounds: &Rounds, control: &str) {
    report.median(&format!("{name}_ratio"), rounds.speed("engine", "bare"));
    if !rounds.of("serial").is_empty() {
        report.median(&format!("{name}_serial_ratio"), rounds.speed("serial", "bare"));
    }
    report.control(control, rounds.speed("again", "bare"));
    report.median(
        &format!("{name}_engine_mib_s"),
        rounds.figure("engine", |one| shape.bytes() / MIB / one.seconds),
    );
    report.median(
        &format!("{name}_bare_mib_s"),
        rounds.figure("bare", |one| shape.bytes() / MIB / one.seconds),
    );
}

struct Bench<'a> {
    common: &'a Common,
    store: &'a Store,
    source: &'a SharedBuf,
    files: &'a Files,
    /// Keys given out.
    number: &'a mut u64,
}

impl Bench<'_> {
    /// The engine against the bare loop. Into fresh files there is one engine only, since it has one store.
    fn race(&mut self, shape: &Shape, fresh: bool) -> Result<Rounds, Failure> {
        setup::progress(&format!(
            "putting records of {} KiB, {} at once",
            shape.record_bytes >> 10,
            shape.group
        ));
        let number = std::cell::RefCell::new(&mut *self.number);
        let (store, source, files) = (self.store, self.source, self.files);
        let engine = |under_way: usize| {
            let number = &number;
            move || put(store, source, shape, under_way, *number.borrow_mut())
        };
        let mut contestants: Vec<Contestant<'_>> = vec![
            ("engine", Box::new(engine(2))),
            ("bare", Box::new(|| files.write(shape, fresh))),
            ("again", Box::new(|| files.write(shape, fresh))),
        ];
        if !fresh {
            contestants.push(("serial", Box::new(engine(1))));
        }
        let rounds = take_turns(self.common.pairs, contestants);
        setup::progress("");
        rounds
    }

    /// Puts until the store writes into files that it has written before.
    fn recycle(&mut self, shape: &Shape) -> Result<(), Failure> {
        // Twice, so that both shards do.
        for _ in 0..1000 {
            if self.store.stats().counts.segments_recycled >= 2 {
                return Ok(());
            }
            put(self.store, self.source, shape, 2, self.number)?;
        }
        Err(Failure::user("the store recycled no segment, so puts into recycled files cannot be measured"))
    }
}

/// One round of the engine: `under_way` groups at once.
fn put(
    store: &Store,
    source: &SharedBuf,
    shape: &Shape,
    under_way: usize,
    number: &mut u64,
) -> Result<Sample, Failure> {
    let mut waiting: VecDeque<Vec<Ticket<Result<PutReply, Error>>>> = VecDeque::new();
    let finish = |group: Vec<Ticket<_>>| {
        group.into_iter().try_for_each(|ticket| setup::expect_stored(&block_on(ticket)))
    };
    let (cpu, begin) = (cpu_seconds(), Instant::now());
    for group in 0..shape.groups {
        let mut tickets = Vec::new();
        for place in 0..shape.group {
            let at = (group * shape.group + place) * shape.record_bytes;
            let memory = source.slice(at as usize, shape.record_bytes as usize);
            let memory = memory
                .ok_or_else(|| Failure::user("the memory of the benchmark is too small for a round"))?;
            *number += 1;
            let request = shape.subject.put(vec![key(3, *number)], Parent::Unknown, memory, None)?;
            tickets.push(store.put(request));
        }
        waiting.push_back(tickets);
        if waiting.len() >= under_way
            && let Some(group) = waiting.pop_front()
        {
            finish(group)?;
        }
    }
    waiting.into_iter().try_for_each(finish)?;
    Ok(Sample { seconds: begin.elapsed().as_secs_f64(), cpu: cpu_seconds() - cpu, first: 0.0 })
}

/// The bare loop's files: one after the other, preallocated.
struct Files {
    bare: Bare,
    source: SharedBuf,
    header: SharedBuf,
    /// Files made, and the next place in the row of them all.
    state: std::cell::RefCell<State>,
}

#[derive(Default)]
struct State {
    made: u64,
    next: u64,
}

/// A file, and what is written into it before it is flushed.
type Group = (Arc<str>, Vec<Extent>);

/// Bytes of one of them: as a segment.
const FILE_BYTES: u64 = kvarts_layout::format::DEFAULT_SEGMENT_BYTES;

impl Files {
    fn new(common: &Common, directory: &std::path::Path, source: &SharedBuf) -> Result<Self, Failure> {
        let bare = Bare::start(common, directory, 1)?;
        let header = setup::noise(HEADER_BYTES as usize)?;
        bare.register(source.region())?;
        bare.register(header.region())?;
        Ok(Self { bare, source: source.clone(), header, state: std::cell::RefCell::default() })
    }

    fn path(number: u64) -> Arc<str> {
        Arc::from(format!("bare-{number}"))
    }

    /// Makes another file and reserves its blocks.
    fn make(&self) -> Result<(), Failure> {
        let mut state = self.state.borrow_mut();
        let path = Self::path(state.made);
        state.made += 1;
        self.bare.on_all(move |_, lane| {
            let file = lane.open(&path, true)?;
            lane.meta(MetaOp::Allocate { file, offset: 0, len: FILE_BYTES }).map(drop)
        })?;
        Ok(())
    }

    /// The groups of one round, each of them in one file; in files never written if `fresh`.
    fn groups(&self, shape: &Shape, fresh: bool) -> Result<Vec<Group>, Failure> {
        let each = shape.record_bytes + HEADER_BYTES;
        let mut groups = Vec::new();
        for group in 0..shape.groups {
            let next = self.state.borrow().next;
            let left = FILE_BYTES - next % FILE_BYTES;
            let mut begin = if left < each * shape.group { next + left } else { next };
            if begin / FILE_BYTES >= self.state.borrow().made {
                match fresh {
                    true => self.make()?,
                    false => begin = 0,
                }
            }
            self.state.borrow_mut().next = begin + each * shape.group;
            let path = Self::path(begin / FILE_BYTES);
            let mut extents = Vec::new();
            for place in 0..shape.group {
                let offset = begin % FILE_BYTES + place * each;
                let at = (group * shape.group + place) * shape.record_bytes;
                let memory = self.source.slice(at as usize, shape.record_bytes as usize);
                let memory = memory
                    .ok_or_else(|| Failure::user("the memory of the benchmark is too small for a round"))?;
                let header = self.header.clone();
                extents.push(Extent { path: Arc::clone(&path), offset, memory: header });
                extents.push(Extent { path: Arc::clone(&path), offset: offset + HEADER_BYTES, memory });
            }
            groups.push((path, extents));
        }
        Ok(groups)
    }

    /// One round of the bare loop: each group written at once, then flushed.
    fn write(&self, shape: &Shape, fresh: bool) -> Result<Sample, Failure> {
        let groups = self.groups(shape, fresh)?;
        let cpu = cpu_seconds();
        let spans = self.bare.on_all(move |_, lane| {
            let begin = Instant::now();
            for (path, extents) in &groups {
                lane.write(extents)?;
                lane.flush(path)?;
            }
            Ok((begin, Instant::now()))
        })?;
        Ok(Sample { seconds: super::bare::seconds(&spans), cpu: cpu_seconds() - cpu, first: 0.0 })
    }

    /// Writes what was never written of the last file, so that all of them are recycled from now on.
    fn fill(&self) -> Result<(), Failure> {
        let (made, source) = (self.state.borrow().made, self.source.clone());
        self.bare.on_all(move |_, lane| {
            for path in (0..made).map(Self::path) {
                for offset in (0..FILE_BYTES).step_by(source.len()) {
                    let len = source.len().min((FILE_BYTES - offset) as usize);
                    let memory =
                        source.slice(0, len).ok_or("the memory of the benchmark is too small for a put")?;
                    lane.write(&[Extent { path: Arc::clone(&path), offset, memory }])?;
                }
                lane.flush(&path)?;
            }
            Ok(())
        })?;
        self.state.borrow_mut().next = 0;
        Ok(())
    }
}
