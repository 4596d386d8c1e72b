//! `kvarts import`: the artifacts of an exported file into a store.
//!
//! The file is read twice. The first time everything in it is verified and nothing is changed; the second time
//! everything is verified again and handed to the engine. So budget, placement, durability and the first put of a key are
//! the engine's, as for any put, and the same file can be imported again after an interruption.

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Args;
use kvarts_contract::api::{BlockOutcome, Durability, KvStore, Parent, Placed, PutRequest};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_layout::export::{Reading, Run, Totals};
use kvarts_layout::format::{DEFAULT_SEGMENT_BYTES, body};
use kvarts_layout::{BlockKey, NamespaceId};
use kvarts_store::engine::Options;
use kvarts_store::home::{Home, HomeOptions, RuntimeChoice};
use kvarts_store::io::IoChoice;
use serde::Serialize;

use super::frames::Source;
use super::{now_ms, write_json};
use crate::fsck_cmd::watched;
use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::Failure;

/// Refused blocks that are named; the others are only counted.
const NAMED_MAX: usize = 20;

/// Segments that a budget allows beside what is here and what comes: open and half-full ones of every shard.
const SEGMENTS_BESIDE: u64 = 256;

/// The arguments of `import`.
#[derive(Args, Debug)]
pub(crate) struct ImportArgs {
    /// A file of `kvarts export`
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    into: Destination,
    /// Only verify the file
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The store that artifacts are put into.
#[derive(Args, Debug)]
pub(crate) struct Destination {
    /// All directories of the store
    #[arg(long, required = true, value_name = "DIR")]
    into: Vec<PathBuf>,
    /// Create a store in empty directories
    #[arg(long)]
    create: bool,
    /// With --create: size of a segment in MiB
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=16384))]
    segment_mib: Option<u64>,
    /// With --create: shards in each directory
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    shards: u32,
    /// Disk budget of the store in GiB; if the budget is too small, the store evicts blocks [default: enough to evict none]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    budget_gib: Option<u64>,
    /// Runtime of the executors: auto, glommio or threads
    #[arg(long, default_value = "auto")]
    runtime: RuntimeChoice,
    /// Interface to the disks: auto, ring or pool
    #[arg(long, default_value = "auto")]
    io: IoChoice,
}

#[derive(Serialize, Default)]
struct Report {
    file: String,
    dry_run: bool,
    /// Blocks in the file.
    blocks: u64,
    payload_bytes: u64,
    /// Of these: written, here before, past their time, refused.
    stored: u64,
    already_there: u64,
    expired: u64,
    refused: u64,
    refusals: Vec<Refusal>,
}

#[derive(Serialize)]
struct Refusal {
    key: String,
    why: String,
}

impl Report {
    fn refuse(&mut self, key: BlockKey, why: impl ToString) {
        self.refused = self.refused.saturating_add(1);
        if self.refusals.len() < NAMED_MAX {
            self.refusals.push(Refusal { key: key.to_string(), why: why.to_string() });
        }
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &ImportArgs, out: &mut dyn Write) -> Result<(), Failure> {
    // What cannot be asked for its length is refused when it is opened.
    let len = std::fs::metadata(&arguments.file).map_or(0, |facts| facts.len());
    let planned = if arguments.dry_run { len } else { len.saturating_mul(2) };
    let far = AtomicU64::new(0);
    let report = watched(&|| (far.load(Ordering::Relaxed), planned), || import(arguments, &far))?;
    if arguments.json {
        write_json(&report, out)?;
    } else {
        write_text(&report, out)?;
    }
    if report.refused == 0 { Ok(()) } else { Err(Failure::Problems) }
}

fn import(arguments: &ImportArgs, far: &AtomicU64) -> Result<Report, Failure> {
    let (totals, chain) = pass(&arguments.file, far, &mut |_, _, _| Ok(()))?;
    let mut report = Report {
        file: arguments.file.display().to_string(),
        dry_run: arguments.dry_run,
        blocks: totals.blocks,
        payload_bytes: totals.payload_bytes,
        ..Report::default()
    };
    if !arguments.dry_run {
        let home = arguments.into.open(totals.payload_bytes)?;
        let put = pass(&arguments.file, far, &mut |reading, run, payload| {
            put(&home, reading, run, &payload, &mut report)
        });
        let closed =
            home.close().map_err(|error| Failure::User(format!("the store could not be closed: {error}")));
        let (_, again) = put?;
        closed?;
        if again != chain {
            return Err(Failure::user("the file changed during the import: run the import again"));
        }
    }
    Ok(report)
}

/// A file that says how much of it was read.
struct Counted<'a> {
    file: File,
    far: &'a AtomicU64,
}

impl Read for Counted<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let read = self.file.read(into)?;
        self.far.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// What is done with a run that was verified.
type Each<'a> = &'a mut dyn FnMut(&Reading, &Run, SharedBuf) -> Result<(), Failure>;

/// Reads and verifies a file from front to back; what it holds, and the value that names it.
fn pass(path: &Path, far: &AtomicU64, each: Each<'_>) -> Result<(Totals, [u8; 32]), Failure> {
    let fault = |what: &dyn std::fmt::Display| Failure::User(format!("{}: {what}", path.display()));
    let file = File::open(path).map_err(|error| fault(&error))?;
    if !file.metadata().map_err(|error| fault(&error))?.is_file() {
        return Err(fault(&"the path is not a regular file"));
    }
    let file = BufReader::with_capacity(1 << 20, Counted { file, far });
    Source::new(path.display(), file).each_run(&mut |source, reading, run| {
        let payload = payload(source, reading, run)?;
        each(reading, run, payload)
    })
}

/// Reads the payload of a run block by block, verifies each, and puts it where the engine can take it from.
fn payload(source: &mut Source<impl Read>, reading: &Reading, run: &Run) -> Result<SharedBuf, Failure> {
    let namespace = reading
        .namespace(run.namespace)
        .ok_or_else(|| source.fault("the namespace of a run of blocks is not defined in the export"))?;
    let shape = run.shape(namespace).map_err(|error| source.fault(error))?;
    let whole = source.payload_bytes(run)?;
    let memory = Region::anonymous(whole.max(1)).ok().and_then(|region| SharedBuf::new(&region, 0, whole));
    let memory =
        memory.ok_or_else(|| source.fault("the memory for a run of blocks could not be allocated"))?;
    let mut block = vec![0; usize::try_from(run.block_bytes).unwrap_or(0)];
    for at in 0..run.blocks.len() {
        source.fill(&mut block)?;
        run.verify(at, &shape, &block).map_err(|error| source.fault(error))?;
        memory.copy_in(at.saturating_mul(block.len()), &block);
    }
    Ok(memory)
}

impl Destination {
    /// Opens the store, with a budget under which nothing has to go for what comes.
    pub(crate) fn open(&self, payload_bytes: u64) -> Result<Home, Failure> {
        let is_store = |directory: &PathBuf| directory.join("superblock").exists();
        if !self.create && !self.into.iter().all(is_store) {
            return Err(Failure::user("these directories have no store: use --create to create a store"));
        }
        let segment_bytes = self.segment_mib.map_or(DEFAULT_SEGMENT_BYTES, |mib| mib << 20);
        let (mut held, mut largest) = (0u64, segment_bytes);
        for directory in &self.into {
            each_file(directory, &mut |len| {
                held = held.saturating_add(len);
                largest = largest.max(len);
            });
        }
        let enough = held
            .saturating_add(payload_bytes.saturating_mul(2))
            .saturating_add(largest.saturating_mul(SEGMENTS_BESIDE));
        let options = HomeOptions {
            directories: self.into.clone(),
            io: self.io,
            runtime: self.runtime,
            store: Options {
                shards_per_directory: self.shards,
                segment_bytes,
                budget_bytes: self.budget_gib.map_or(enough, |gib| gib << 30),
                budget_beyond_disk: true,
                ..Options::default()
            },
            ..HomeOptions::default()
        };
        Home::open(&options).map_err(|error| Failure::User(format!("the store cannot be opened: {error}")))
    }
}

/// Calls for every file of a store's directory with its length.
fn each_file(directory: &Path, each: &mut dyn FnMut(u64)) {
    // What cannot be listed is refused when the store is opened.
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.metadata() {
            Ok(facts) if facts.is_file() => each(facts.len()),
            Ok(facts) if facts.is_dir() => {
                for entry in std::fs::read_dir(entry.path()).into_iter().flatten().flatten() {
                    entry
                        .metadata()
                        .into_iter()
                        .filter(|facts| facts.is_file())
                        .for_each(|facts| each(facts.len()));
                }
            }
            _ => {}
        }
    }
}

/// Hands one run to the engine.
fn put(
    home: &Home,
    reading: &Reading,
    run: &Run,
    payload: &SharedBuf,
    report: &mut Report,
) -> Result<(), Failure> {
    let now = now_ms();
    if run.expires_ms != 0 && run.expires_ms <= now {
        report.expired = report.expired.saturating_add(run.blocks.len() as u64);
        return Ok(());
    }
    let store = home.store();
    let namespace = registered(home, reading, run.namespace)?;
    let known = reading
        .namespace(run.namespace)
        .ok_or_else(|| Failure::user("the namespace of a run of blocks is not defined in the export"))?;
    let shape = run.shape(known).map_err(Failure::user)?;
    let count = u32::try_from(run.blocks.len()).unwrap_or(u32::MAX);
    let from = Placed::blocks(&shape, payload.clone(), count);
    let from = from.map_err(|reason| {
        Failure::User(format!(
            "a run of blocks cannot be placed in memory: \
        {reason:?}"
        ))
    })?;
    let left = std::time::Duration::from_millis(run.expires_ms.saturating_sub(now));
    let request = PutRequest {
        namespace,
        group: run.group,
        coordinate: run.coordinate,
        parent: match run.parent {
            body::Parent::Root => Parent::Root,
            body::Parent::Key(key) => Parent::Key(BlockKey(key)),
            body::Parent::Unknown => Parent::Unknown,
        },
        first_block: run.first_block,
        keys: run.blocks.iter().map(|block| block.key).collect(),
        from,
        layout: None,
        durability: Durability::Durable,
        expires_after: (run.expires_ms != 0).then_some(left),
        origins: Some(run.blocks.iter().map(|block| block.origin).collect()),
        deadline: None,
    };
    let reply = match block_on(store.put(request)) {
        Ok(Ok(reply)) => reply,
        Ok(Err(error)) => {
            run.blocks.iter().for_each(|block| report.refuse(block.key, &error));
            return Ok(());
        }
        Err(_) => return Err(Failure::user("the store stopped")),
    };
    for (block, outcome) in run.blocks.iter().zip(reply.outcomes) {
        match outcome {
            BlockOutcome::Stored => report.stored = report.stored.saturating_add(1),
            BlockOutcome::AlreadyThere => report.already_there = report.already_there.saturating_add(1),
            BlockOutcome::HeldElsewhere => report.refuse(block.key, "another node has the block"),
            BlockOutcome::InFlight => report.refuse(block.key, "another put of the block is under way"),
            BlockOutcome::Refused(reason) => report.refuse(block.key, reason),
        }
    }
    Ok(())
}

fn registered(home: &Home, reading: &Reading, id: NamespaceId) -> Result<NamespaceId, Failure> {
    let known = reading
        .namespace(id)
        .ok_or_else(|| Failure::user("the namespace of a run of blocks is not defined in the export"))?;
    let named = home.store().register(&known.identity, &known.geometry);
    named.map_err(|error| Failure::User(format!("a namespace was refused: {error}")))
}

fn write_text(report: &Report, out: &mut dyn Write) -> Result<(), Failure> {
    writeln!(
        out,
        "{}: {} blocks, {}; every digest and content id verified",
        report.file,
        grouped(report.blocks),
        bytes(report.payload_bytes)
    )?;
    if report.dry_run {
        return Ok(writeln!(out, "Nothing was imported: this was a dry run.")?);
    }
    writeln!(
        out,
        "{} stored, {} already stored, {} expired, {} refused",
        grouped(report.stored),
        grouped(report.already_there),
        grouped(report.expired),
        grouped(report.refused)
    )?;
    for one in &report.refusals {
        writeln!(out, "refused: {}: {}", one.key, super::shown(&one.why))?;
    }
    Ok(())
}
