//! `bench open`: a store of a million blocks opened after a crash, and after a clean stop, beside a bare loop that
//! reads as many bytes of the same files as recovery says it read.
//!
//! A crash is made once and copied for each round, because recovery seals what a crash left open: a second one
//! would have less to do. Copies are flushed and dropped from the page cache before they are opened.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use kvarts_layout::format::is_segment_size;
use kvarts_store::driver::Limits;
use kvarts_store::engine::{Options, RecoveryReport};
use kvarts_store::home::Home;

use super::bare::{Bare, Extent, Plan};
use super::lookup::{fill, room};
use super::pairs::{Contestant, Rounds, Sample, cpu_seconds, take_turns};
use super::report::Report;
use super::scratch::Scratch;
use super::setup::{self, Common};
use kvarts_terminal::Failure;

/// The longest read of the bare loop.
const READ_BYTES: u64 = 1 << 20;

/// The arguments of `bench open`.
#[derive(Args, Debug)]
pub(super) struct OpenArgs {
    #[command(flatten)]
    common: Common,
    /// Blocks in the store
    #[arg(long, default_value_t = 1 << 20, value_parser = clap::value_parser!(u64).range(4096..=1 << 26))]
    blocks: u64,
    /// Size of a segment in MiB; small, so that a store of small blocks has full and unfinished segments
    #[arg(long, default_value_t = 16)]
    segment_mib: u64,
}

/// Runs the benchmark.
pub(super) fn run(arguments: &OpenArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let common = &arguments.common;
    let segment_bytes = arguments.segment_mib.saturating_mul(1 << 20);
    if !is_segment_size(segment_bytes) {
        return Err(Failure::User(format!("--segment-mib {}: use 1 to 16384", arguments.segment_mib)));
    }
    let scratch = Scratch::new(common, room(arguments.blocks) * 4)?;
    let options = Options { budget_bytes: room(arguments.blocks), segment_bytes, ..Options::default() };
    let place = |name: &str| scratch.path().join(name);
    let (crashed, clean, work) = (place("crashed"), place("clean"), place("work"));
    let home = setup::open(common, &crashed, options.clone())?;
    fill(home.store(), arguments.blocks)?;
    home.abandon();
    copy(&crashed, &clean)?;
    setup::open(common, &clean, options.clone())?.close().map_err(Failure::user)?;
    let mut report = Report::new("open");
    // What each way of opening reads, for the bare loop to read as much.
    copy(&crashed, &work)?;
    let home = setup::open(common, &work, options.clone())?;
    expect_blocks(&home, arguments.blocks)?;
    setup::describe(&mut report, common, &home)?;
    report.fact("blocks", arguments.blocks);
    let crash_bytes = tell(&mut report, "crash", home.store().recovery());
    home.abandon();
    let home = setup::open(common, &clean, options.clone())?;
    expect_blocks(&home, arguments.blocks)?;
    let clean_bytes = tell(&mut report, "clean", home.store().recovery());
    home.close().map_err(Failure::user)?;
    let bare = Bare::start(common, scratch.path(), usize::from(common.executors))?;
    let lanes = usize::from(common.executors);
    let crash_plan = plan(scratch.path(), &crashed, crash_bytes, lanes)?;
    let clean_plan = plan(scratch.path(), &clean, clean_bytes, lanes)?;
    bare.open_all(crash_plan.paths())?;
    bare.open_all(clean_plan.paths())?;
    settle(&crashed)?;
    let contestants: Vec<Contestant<'_>> = vec![
        (
            "crash",
            Box::new(|| {
                copy(&crashed, &work)?;
                let (home, sample) = timed(common, &work, &options)?;
                home.abandon();
                Ok(sample)
            }),
        ),
        ("bare", Box::new(|| read(&bare, &crash_plan))),
        ("again", Box::new(|| read(&bare, &crash_plan))),
        (
            "clean",
            Box::new(|| {
                settle(&clean)?;
                let (home, sample) = timed(common, &clean, &options)?;
                home.close().map_err(Failure::user)?;
                Ok(sample)
            }),
        ),
        ("bare_clean", Box::new(|| read(&bare, &clean_plan))),
        (
            "empty",
            Box::new(|| {
                let (home, sample) = timed(common, &place("empty"), &options)?;
                home.close().map_err(Failure::user)?;
                Ok(sample)
            }),
        ),
    ];
    let rounds = take_turns(common.pairs, contestants)?;
    conclude(&mut report, &rounds);
    report.write(common.json, out)
}

/// What the rounds say.
fn conclude(report: &mut Report, rounds: &Rounds) {
    for name in ["crash", "bare", "clean", "bare_clean", "empty"] {
        report.median(&format!("{name}_ms"), rounds.figure(name, |sample| sample.seconds * 1e3));
    }
    report.median("ratio", rounds.speed("bare", "crash"));
    report.control("control", rounds.speed("again", "bare"));
    report.median("clean_ratio", rounds.speed("bare_clean", "clean"));
    report.median("ratio_above_empty", rounds.figure_of_three("crash", "empty", "bare"));
    report.median("clean_ratio_above_empty", rounds.figure_of_three("clean", "empty", "bare_clean"));
}

fn timed(common: &Common, directory: &Path, options: &Options) -> Result<(Home, Sample), Failure> {
    let (cpu, begin) = (cpu_seconds(), Instant::now());
    let home = setup::open(common, directory, options.clone())?;
    let seconds = begin.elapsed().as_secs_f64();
    Ok((home, Sample { seconds, cpu: cpu_seconds() - cpu, first: 0.0 }))
}

fn expect_blocks(home: &Home, expected: u64) -> Result<(), Failure> {
    let found = home.store().stats().index.blocks as u64;
    if found == expected {
        Ok(())
    } else {
        Err(Failure::User(format!("{found} of {expected} blocks were recovered")))
    }
}

/// Notes what recovery read, and gives the bytes of it.
fn tell(report: &mut Report, name: &str, shards: &[RecoveryReport]) -> u64 {
    let metadata: u64 = shards.iter().map(|shard| shard.metadata_bytes).sum();
    let scanned: u64 = shards.iter().map(|shard| shard.scanned_bytes).sum();
    report.fact(&format!("{name}_metadata_bytes"), metadata);
    report.fact(&format!("{name}_scanned_bytes"), scanned);
    report.fact(&format!("{name}_segments"), shards.iter().map(|shard| shard.segments).sum::<u64>());
    metadata + scanned
}

fn read(bare: &Bare, plan: &Plan) -> Result<Sample, Failure> {
    let cpu = cpu_seconds();
    let seconds = bare.read(plan, Limits::default().max_bytes_in_flight, false)?;
    Ok(Sample { seconds, cpu: cpu_seconds() - cpu, first: 0.0 })
}

/// Reads of `bytes` bytes in all from the beginnings of a store's segment files, which are written, shared out
/// evenly. Memory is used in turn, as much as may be in flight.
fn plan(root: &Path, store: &Path, bytes: u64, lanes: usize) -> Result<Plan, Failure> {
    let mut files = Vec::new();
    list(store, &mut files)?;
    files.retain(|(path, len)| *len >= READ_BYTES && path.to_string_lossy().contains("seg"));
    if files.is_empty() {
        return Err(Failure::user("the store has no segment files"));
    }
    let window = Limits::default().max_bytes_in_flight + READ_BYTES;
    let memory = setup::memory(window as usize)?;
    memory.fill(0);
    let each = bytes.div_ceil(files.len() as u64).next_multiple_of(4096);
    let mut by_lane = vec![Vec::new(); lanes];
    let (mut at, mut total) = (0, 0);
    for (number, (path, len)) in files.iter().enumerate() {
        let path = path.strip_prefix(root).unwrap_or(path).to_string_lossy();
        let path: Arc<str> = Arc::from(&*path);
        let end = each.min(*len);
        for offset in (0..end).step_by(READ_BYTES as usize) {
            let bytes = READ_BYTES.min(end - offset);
            at = if at + bytes > window { 0 } else { at };
            let memory = memory
                .slice(at as usize, bytes as usize)
                .ok_or_else(|| Failure::user("the memory of the benchmark is too small for a put"))?;
            at += bytes;
            total += bytes;
            by_lane[number % lanes].push(Extent { path: Arc::clone(&path), offset, memory });
        }
    }
    Ok(Plan { lanes: by_lane.into_iter().map(Arc::from).collect(), bytes: total })
}

/// All files below a directory, with their lengths.
fn list(below: &Path, files: &mut Vec<(PathBuf, u64)>) -> Result<(), Failure> {
    let fault = |error: std::io::Error| Failure::User(format!("{}: {error}", below.display()));
    for entry in std::fs::read_dir(below).map_err(fault)? {
        let entry = entry.map_err(fault)?;
        let meta = entry.metadata().map_err(fault)?;
        match meta.is_dir() {
            true => list(&entry.path(), files)?,
            false => files.push((entry.path(), meta.len())),
        }
    }
    files.sort();
    Ok(())
}

/// Copies a store, replacing what was there.
fn copy(from: &Path, to: &Path) -> Result<(), Failure> {
    let fault = |error: std::io::Error| Failure::User(format!("{}: {error}", to.display()));
    if to.exists() {
        std::fs::remove_dir_all(to).map_err(fault)?;
    }
    std::fs::create_dir_all(to).map_err(fault)?;
    copy_below(from, to).map_err(fault)?;
    settle(to)
}

/// Folders too: one of a shard belongs to the store even if nothing is in it.
fn copy_below(from: &Path, to: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            std::fs::create_dir(&target)?;
            copy_below(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}

/// Flushes a store's files and lets the kernel drop what it has of them.
fn settle(store: &Path) -> Result<(), Failure> {
    let mut files = Vec::new();
    list(store, &mut files)?;
    for (path, _) in files {
        let fault = |error: std::io::Error| Failure::User(format!("{}: {error}", path.display()));
        let file = File::open(&path).map_err(fault)?;
        file.sync_all().map_err(fault)?;
        // Only a hint: direct reads pass the cache by.
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    }
    Ok(())
}
