//! `bench fsck`: a check of all digests beside a bare sequential read of the same files, with as many threads and as
//! large transfers, past the page cache.
//!
//! The ratio is of rates: bytes that each read in a second. Both leave out room that was never written, whose zeros no
//! device has to give.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use kvarts_fsck::check::{Level, Options as CheckOptions, check, read_bare, written_ends};
use kvarts_fsck::disk::{Disk, OpenError, RealDisk};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::store::{Store as Checked, survey};
use kvarts_fsck::window::Tally;
use kvarts_layout::BlockKey;
use kvarts_store::engine::Options;

use super::pairs::{Contestant, Sample, cpu_seconds, take_turns};
use super::report::Report;
use super::scratch::Scratch;
use super::setup::{self, Common, Subject, key};
use kvarts_terminal::Failure;

/// The arguments of `bench fsck`.
#[derive(Args, Debug)]
pub(super) struct FsckArgs {
    #[command(flatten)]
    common: Common,
    /// A shipped model
    #[arg(long, default_value = "llama-3.1-8b")]
    model: String,
    /// Size of the store's content in MiB
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(4..=1 << 20))]
    mib: u64,
    /// Size of a segment in MiB
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=16384))]
    segment_mib: u64,
    /// Threads of each contestant [default: two for each core]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Also check content ids
    #[arg(long)]
    deep: bool,
}

/// Runs the benchmark.
pub(super) fn run(arguments: &FsckArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let common = &arguments.common;
    let bytes = arguments.mib << 20;
    let budget_bytes = bytes * 2 + ((8 * arguments.segment_mib) << 20);
    let scratch = Scratch::new(common, budget_bytes)?;
    let options = Options { budget_bytes, segment_bytes: arguments.segment_mib << 20, ..Options::default() };
    let home = setup::open(common, scratch.path(), options)?;
    let mut report = Report::new("fsck");
    let subject = Subject::new(home.store(), &setup::model(&arguments.model)?, None)?;
    let blocks = bytes.div_ceil(subject.shape.block_bytes());
    let keys: Vec<BlockKey> = (0..blocks).map(|number| key(1, number)).collect();
    subject.fill(home.store(), &keys, 4, None)?;
    home.close().map_err(Failure::user)?;
    let threads = arguments.threads.map_or_else(kvarts_fsck::check::default_threads, usize::from);
    let level = if arguments.deep { Level::Deep } else { Level::Full };
    let options = CheckOptions { level, threads, ..CheckOptions::default() };
    report.fact("threads", threads);
    report.fact("pairs", common.pairs);
    report.fact("level", level.name());
    report.fact("blocks", blocks);
    let directories: Vec<PathBuf> = vec![scratch.path().to_owned()];
    let disks = open(&directories)?;
    let mut found = Findings::default();
    let store = survey(&disks, &mut found).map_err(Failure::user)?;
    let store = store.ok_or_else(|| Failure::user("the directory of the benchmark has no store"))?;
    let written = written_ends(&store, threads);
    setup::progress("checking and reading in turn");
    let contestants: Vec<Contestant<'_>> = vec![
        ("fsck", Box::new(|| checked(&store, &options))),
        ("bare", Box::new(|| Ok(bare(&store, &written, threads)))),
        ("again", Box::new(|| Ok(bare(&store, &written, threads)))),
    ];
    let rounds = take_turns(common.pairs, contestants)?;
    setup::progress("");
    // `first` holds the bytes of a run: what is compared is rates.
    let rate = |sample: &Sample| sample.first / sample.seconds;
    let gib = |sample: &Sample| rate(sample) / f64::from(1 << 30);
    report.median("fsck_gib_per_s", rounds.figure("fsck", gib));
    report.median("bare_gib_per_s", rounds.figure("bare", gib));
    report.median("device_ratio", rounds.paired("fsck", "bare", |fsck, bare| rate(fsck) / rate(bare)));
    report.control("control", rounds.paired("again", "bare", |again, bare| rate(again) / rate(bare)));
    report.median("cpu_ratio", rounds.paired("fsck", "bare", |fsck, bare| fsck.cpu / bare.cpu));
    report.write(common.json, out)
}

/// One check; `first` is the bytes that it read.
fn checked(store: &Checked, options: &CheckOptions) -> Result<Sample, Failure> {
    let (cpu, begin, tally) = (cpu_seconds(), Instant::now(), Tally::default());
    let checked = check(store, options, &tally, Findings::default()).map_err(Failure::user)?;
    let seconds = begin.elapsed().as_secs_f64();
    if !checked.findings.is_clean() {
        return Err(Failure::user("the check found problems in the store of the benchmark"));
    }
    Ok(Sample { seconds, cpu: cpu_seconds() - cpu, first: tally.bytes() as f64 })
}

fn bare(store: &Checked, written: &BTreeMap<(usize, u32), u64>, threads: usize) -> Sample {
    let (cpu, begin, tally) = (cpu_seconds(), Instant::now(), Tally::default());
    read_bare(store, written, threads, &tally);
    let seconds = begin.elapsed().as_secs_f64();
    Sample { seconds, cpu: cpu_seconds() - cpu, first: tally.bytes() as f64 }
}

fn open(directories: &[PathBuf]) -> Result<Vec<Arc<dyn Disk>>, Failure> {
    let opened = |directory: &PathBuf| RealDisk::open(directory, true, false);
    let disk = |directory| opened(directory).map(|disk| Arc::new(disk) as Arc<dyn Disk>);
    directories.iter().map(disk).collect::<Result<_, _>>().map_err(|error| match error {
        OpenError::InUse => Failure::user("another process uses the store of the benchmark"),
        OpenError::Io(error) => Failure::user(error),
    })
}
