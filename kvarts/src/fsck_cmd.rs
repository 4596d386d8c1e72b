//! `kvarts fsck`: checks a store offline, and repairs it when asked.
//!
//! Exit codes: 0 clean, 1 problems found, 2 the check could not be made or its report not be written, 141 the reader of
//! the report went away: only a report that was told in full says that a store is clean. The report goes to standard output,
//! progress to standard error and only if that is a terminal.
#![allow(
    clippy::disallowed_methods,
    reason = "an offline command, which measures its own time on a real machine"
)]

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use clap::Args;
use kvarts_fsck::check::{Checked, Level, Options, check, planned_bytes, read_bare, written_ends};
use kvarts_fsck::disk::{Disk, DiskWriter, OpenError, RealDisk, RealWriter};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::needs::Task;
use kvarts_fsck::repair::{self, Action, Site};
use kvarts_fsck::report::Report;
use kvarts_fsck::store::{CannotRun, survey};
use kvarts_fsck::window::Tally;

use crate::exit_codes::EXIT_CODES;
use crate::needs;
use kvarts_server::human;
use kvarts_terminal::{Failure, Refusal};

/// Bytes of one half of what `--measure` reads.
const HALF_BYTES: u64 = 2 << 30;
/// How often progress is shown.
const TICK: Duration = Duration::from_millis(200);

/// The arguments of `fsck`.
#[derive(Args, Debug)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct FsckArgs {
    /// All directories of the store
    #[arg(required = true, value_name = "DIR")]
    directories: Vec<PathBuf>,
    /// Check metadata only: headers, footers, checkpoints, unfinished tails
    #[arg(long, conflicts_with = "deep")]
    quick: bool,
    /// Also check content ids, and compare the shards
    #[arg(long)]
    deep: bool,
    /// Check a running store; only sealed segments are checked
    #[arg(long)]
    live: bool,
    /// Repair the store: valid records are kept, damaged records are moved to a separate folder
    #[arg(long, conflicts_with_all = ["live", "quick"])]
    repair: bool,
    /// With --repair: print the changes without making them
    #[arg(long, requires = "repair")]
    dry_run: bool,
    /// Also read a part of the same files without checks, half before and half after the check, and print the
    /// rate of the check divided by the rate of these reads; bypasses the page cache if the file system allows it
    #[arg(long, conflicts_with_all = ["quick", "repair"])]
    measure: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Threads that read and verify [default: two for each core]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Memory for the comparisons of a deep check, in MiB; the rest goes to temporary files
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    memory_mib: u32,
}

impl FsckArgs {
    fn level(&self) -> Level {
        match (self.quick, self.deep) {
            (true, _) => Level::Quick,
            (_, true) => Level::Deep,
            _ => Level::Full,
        }
    }

    fn options(&self) -> Options {
        Options {
            level: self.level(),
            threads: self.threads.map_or_else(kvarts_fsck::check::default_threads, usize::from),
            live: self.live,
            memory_bytes: (self.memory_mib as usize) << 20,
            ..Options::default()
        }
    }
}

/// Opens directories for reading.
pub(crate) fn open(directories: &[PathBuf], live: bool) -> Result<Vec<Arc<dyn Disk>>, Failure> {
    let mut disks: Vec<Arc<dyn Disk>> = Vec::new();
    for directory in directories {
        let or_live = ", or use --live, which checks only sealed segments";
        let disk = RealDisk::open(directory, true, live);
        let disk = disk.map_err(|error| refused(directory, &error, or_live))?;
        disks.push(Arc::new(disk));
    }
    Ok(disks)
}

/// Why a directory cannot be opened.
fn refused(directory: &std::path::Path, error: &OpenError, live: &str) -> Failure {
    let shown = directory.display();
    Failure::Refused(match error {
        OpenError::InUse => Refusal::new(
            "in-use",
            format!("{shown} is in use by another process"),
            &format!("stop that process{live}"),
        ),
        OpenError::Io(error) => Refusal::new("refused", format!("{shown}: {error}"), ""),
    })
}

/// Runs the command.
pub(crate) fn run(arguments: &FsckArgs, out: &mut dyn Write) -> Result<(), Failure> {
    if arguments.repair {
        return put_right(arguments, out);
    }
    let disks = open(&arguments.directories, arguments.live)?;
    let options = arguments.options();
    if options.level == Level::Deep
        && let Ok(Some(store)) = survey(&disks, &mut Findings::default())
    {
        needs::tell(("fsck --deep", Task::Deep(options.memory_bytes)), &store, &options)?;
    }
    let report = examine(&disks, &arguments.options(), arguments.measure)?;
    let written = write(&report, arguments.json, out);
    verdict(report.clean, written)
}

/// Problems stay problems where the reader goes away before the end; that nothing was found must have been told.
fn verdict(clean: bool, written: Result<(), Failure>) -> Result<(), Failure> {
    match written {
        Err(Failure::Output(error)) if !clean && error.kind() == std::io::ErrorKind::BrokenPipe => {
            Err(Failure::Problems)
        }
        Ok(()) if !clean => Err(Failure::Problems),
        written => written,
    }
}

/// What a repair prints: what it did, and what a check says afterwards (before, if it was only for show).
#[derive(Debug, serde::Serialize)]
struct RepairReport {
    dry_run: bool,
    actions: Vec<Action>,
    #[serde(flatten)]
    report: Report,
}

fn put_right(arguments: &FsckArgs, out: &mut dyn Write) -> Result<(), Failure> {
    refuse_what_is_no_store(&arguments.directories)?;
    let mut sites = Vec::new();
    let mut locks = Vec::new();
    for directory in &arguments.directories {
        let refuse = |error: OpenError| refused(directory, &error, "");
        let writer: Option<Arc<dyn DiskWriter>> = if arguments.dry_run {
            locks.push(RealDisk::open(directory, true, false).map_err(refuse)?);
            None
        } else {
            Some(Arc::new(RealWriter::open(directory).map_err(refuse)?))
        };
        // The lock is held already.
        let disk = RealDisk::open(directory, true, true).map_err(refuse)?;
        sites.push(Site { disk: Arc::new(disk), writer });
    }
    let options = arguments.options();
    let disks: Vec<Arc<dyn Disk>> = sites.iter().map(|site| Arc::clone(&site.disk)).collect();
    let actions = repair::repair(&sites, &options, &Tally::default()).map_err(cannot_run)?.actions;
    let mut report =
        RepairReport { dry_run: arguments.dry_run, actions, report: examine(&disks, &options, false)? };
    report.report.after_dry_run = report.dry_run && !report.actions.is_empty();
    drop(locks);
    let written = write_repair(&report, arguments.json, out);
    verdict(report.report.clean, written)
}

fn write_repair(report: &RepairReport, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    if json {
        serde_json::to_writer_pretty(&mut *out, report).map_err(std::io::Error::from)?;
        return Ok(writeln!(out)?);
    }
    let heading = match (report.actions.is_empty(), report.dry_run) {
        (true, _) => "No repair is needed.",
        (false, true) => "A repair would do this:",
        (false, false) => "Repaired:",
    };
    writeln!(out, "{heading}")?;
    for action in &report.actions {
        writeln!(out, "  {action}")?;
    }
    let then = if report.dry_run { "The store before the repair:" } else { "Result of a second check:" };
    writeln!(out, "{then}")?;
    out.write_all(report.report.text().as_bytes())?;
    write_counts(&report.report, out)
}

/// How often each label was met, a line each: what is left after a repair.
fn write_counts(report: &Report, out: &mut dyn Write) -> Result<(), Failure> {
    let mut counts = report.counts().peekable();
    if counts.peek().is_none() {
        return Ok(writeln!(out, "Findings by label: none.")?);
    }
    writeln!(out, "Findings by label:")?;
    for (label, times, severity) in counts {
        writeln!(out, "  {:>8}  {}  {label}", human::grouped(times), severity.label())?;
    }
    Ok(())
}

/// Looks under readers' locks before anything is made: taking the only lock leaves a file.
fn refuse_what_is_no_store(directories: &[PathBuf]) -> Result<(), Failure> {
    let mut sites = Vec::new();
    for directory in directories {
        let disk = RealDisk::open(directory, true, false).map_err(|error| refused(directory, &error, ""))?;
        sites.push(Site { disk: Arc::new(disk), writer: None });
    }
    repair::refused(&sites).map_err(cannot_run)
}

fn write(report: &Report, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    if json {
        serde_json::to_writer_pretty(&mut *out, report).map_err(std::io::Error::from)?;
        return Ok(writeln!(out)?);
    }
    Ok(out.write_all(report.text().as_bytes())?)
}

/// Checks a store, showing progress.
pub(crate) fn examine(disks: &[Arc<dyn Disk>], options: &Options, measure: bool) -> Result<Report, Failure> {
    let begin = Instant::now();
    let mut found = Findings::default();
    let tally = Tally::default();
    let Some(store) = survey(disks, &mut found).map_err(cannot_run)? else {
        found.sort();
        let checked = Checked { findings: found, ..Checked::default() };
        return Ok(Report::new(&checked, options.level, (0, begin.elapsed().as_secs_f64())));
    };
    let halves = if measure { halves(&written_ends(&store, options.threads)) } else { Halves::default() };
    let (mut bare_bytes, mut bare_seconds) = (0, 0.0);
    let mut bare = |half: &Ends| {
        let (begin, tally) = (Instant::now(), Tally::default());
        read_bare(&store, half, options.threads, &tally);
        bare_bytes += tally.bytes();
        bare_seconds += begin.elapsed().as_secs_f64();
    };
    bare(&halves[0]);
    let begin = if measure { Instant::now() } else { begin };
    let planned = planned_bytes(&store, options.level);
    let checked = watched(&|| (tally.bytes(), planned), || check(&store, options, &tally, found))
        .map_err(Failure::user)?;
    let seconds = begin.elapsed().as_secs_f64();
    bare(&halves[1]);
    let mut report = Report::new(&checked, options.level, (tally.bytes(), seconds));
    report.store = Some(store.keyring.store.to_string());
    report.compare(bare_bytes, bare_seconds);
    Ok(report)
}

/// How far segments were written, by the index of their shard and their number.
type Ends = BTreeMap<(usize, u32), u64>;
type Halves = [Ends; 2];

/// Two samples of a store, each spread evenly over it and of no more than `HALF_BYTES`. Where there is one segment
/// only, it is both.
fn halves(written: &Ends) -> Halves {
    let all: Vec<_> = written.iter().filter(|(_, end)| **end > 0).map(|(at, end)| (*at, *end)).collect();
    let bytes: u64 = all.iter().map(|(_, end)| *end).sum();
    let step = usize::try_from(bytes.div_ceil(2 * HALF_BYTES)).unwrap_or(usize::MAX).max(1);
    let sample: Vec<_> = all.into_iter().step_by(step).collect();
    let half = |odd: usize| -> Ends { sample.iter().copied().skip(odd).step_by(2).collect() };
    let second = if sample.len() > 1 { half(1) } else { half(0) };
    [half(0), second]
}

/// Does something while its progress is shown: bytes of how many.
pub(crate) fn watched<T>(far: &(dyn Fn() -> (u64, u64) + Sync), work: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let (done, is_done) = channel::<()>();
        scope.spawn(move || show_progress(begin, far, &is_done));
        let outcome = work();
        // Dropped, also by a panic, it ends the progress.
        drop(done);
        outcome
    })
}

/// Shows how far something is until it is done: bytes of how many.
pub(crate) fn show_progress(
    begin: Instant,
    far: &dyn Fn() -> (u64, u64),
    done: &std::sync::mpsc::Receiver<()>,
) {
    let line = |seconds: f64| {
        let (bytes, planned) = far();
        progress(bytes, planned, seconds)
    };
    show_lines(begin, TICK, &line, done);
}

/// Shows a line, made anew each time from the seconds since it began, until something is done.
pub(crate) fn show_lines(
    begin: Instant,
    every: Duration,
    line: &dyn Fn(f64) -> String,
    done: &std::sync::mpsc::Receiver<()>,
) {
    let mut err = std::io::stderr();
    let shown = err.is_terminal();
    while let Err(RecvTimeoutError::Timeout) = done.recv_timeout(every) {
        if shown {
            let line = line(begin.elapsed().as_secs_f64());
            // A terminal that is gone misses nothing.
            let _ = write!(err, "\r\x1b[K{line}").and_then(|()| err.flush());
        }
    }
    if shown {
        let _ = write!(err, "\r\x1b[K").and_then(|()| err.flush());
    }
}

/// One line: how far, how fast, how long still.
fn progress(bytes: u64, planned: u64, seconds: f64) -> String {
    if planned == 0 {
        return format!("estimating the work, {seconds:.0} s so far");
    }
    let rate = if seconds > 0.0 { bytes as f64 / seconds } else { 0.0 };
    let percent = (bytes.saturating_mul(100)).checked_div(planned).unwrap_or(100).min(100);
    let left = planned.saturating_sub(bytes) as f64;
    let eta = if rate > 0.0 { format!("at most {:.0} s left", left / rate) } else { "just begun".to_owned() };
    format!("{percent}% of {}, {}/s, {eta}", human::bytes(planned), human::bytes(rate as u64))
}

/// Why a store could not be looked at, as an answer.
pub(crate) fn cannot_run(cannot: CannotRun) -> Failure {
    Failure::Refused(Refusal::new(cannot.kind(), cannot.what(), cannot.advice()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_says_how_far_how_fast_and_how_long_still() {
        assert_eq!(progress(1 << 29, 1 << 30, 2.0), "50% of 1 GiB, 256 MiB/s, at most 2 s left");
        assert_eq!(progress(0, 1 << 30, 0.0), "0% of 1 GiB, 0 B/s, just begun");
        assert_eq!(progress(0, 0, 1.0), "estimating the work, 1 s so far");
    }

    #[test]
    fn what_is_measured_is_spread_over_the_store_and_bounded() {
        let store = |segments: u32, bytes: u64| (0..segments).map(|number| ((0, number), bytes)).collect();
        let [first, second] = halves(&store(4, 1 << 20));
        assert_eq!(first.keys().map(|key| key.1).collect::<Vec<_>>(), [0, 2]);
        assert_eq!(second.keys().map(|key| key.1).collect::<Vec<_>>(), [1, 3]);
        let [first, second] = halves(&store(100, 1 << 30));
        let bytes = |half: &Ends| half.values().sum::<u64>();
        assert!(bytes(&first) <= HALF_BYTES && bytes(&second) <= HALF_BYTES && bytes(&first) > 1 << 30);
        assert!(first.keys().chain(second.keys()).any(|key| key.1 > 70), "the end of the store too");
        assert_eq!(halves(&store(1, 5)), [store(1, 5), store(1, 5)]);
        assert_eq!(halves(&store(0, 5)), Halves::default());
        assert_eq!(halves(&store(3, 0)), Halves::default(), "what was never written is not read");
    }
}
