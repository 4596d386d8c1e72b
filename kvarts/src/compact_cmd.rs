//! `kvarts compact`: writes what is live in a store together, offline, in place or as a new store; or has a running server do
//! that (`client_cmd::compact`).
//!
//! Exit codes: 0 done, 1 it stopped at damage that it met on the way, 2 it could not be done; nothing is lost either way.
//! The report goes to standard output, progress to standard error and only if that is a terminal.
#![allow(
    clippy::disallowed_methods,
    reason = "an offline command, which measures its own time on a real machine"
)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use clap::{Args, ValueEnum};
use kvarts_fsck::check;
use kvarts_fsck::compact::{
    Directory, LayoutChoice, Options, Place, Progress, Refusal, Report, Target, elsewhere, expect_free,
    in_place, is_unfinished, percent, refuse_unsound,
};
use kvarts_fsck::disk::{Disk, DiskWriter, OpenError, RealDisk, RealWriter};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::needs::Task;
use kvarts_fsck::store::{Store, survey};
use kvarts_layout::StoreId;

use crate::client_cmd::{self, ServerArgs};
use crate::fsck_cmd::{cannot_run, open, show_progress};
use crate::needs;
use kvarts_server::human;
use kvarts_terminal::Failure;

/// Part of the free space that compaction leaves alone: checkpoints, and what else is written there.
const SPARED_BYTES: u64 = 64 << 20;

/// The layouts by their names.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum LayoutName {
    Keep,
    FullBlock,
    LayerBlock,
    Auto,
}

/// The arguments of `compact`.
#[derive(Args, Debug)]
pub(crate) struct CompactArgs {
    /// All directories of a store that no server uses; without a directory, a running server compacts its store
    #[arg(value_name = "DIR")]
    directories: Vec<PathBuf>,
    /// Write a new store into this directory, and leave the old store unchanged; give --to once for each directory of the new store
    #[arg(long, value_name = "DIR", requires = "directories")]
    to: Vec<PathBuf>,
    /// Shards of the new store [default: as in the old store]
    #[arg(long, requires = "to", value_parser = clap::value_parser!(u32).range(1..=4096))]
    shards: Option<u32>,
    /// Rewrite segments with less than this percentage of live bytes
    #[arg(long, default_value_t = 90, requires = "directories", value_parser = clap::value_parser!(u8).range(1..=100))]
    utilisation: u8,
    /// Layout of the payloads of records
    #[arg(long, value_enum, requires = "directories", default_value_t = LayoutName::Keep)]
    layout: LayoutName,
    /// Do not merge small records
    #[arg(long, requires = "directories")]
    no_merge: bool,
    /// Compress records without recent use, if the compressed records are smaller
    #[arg(long, requires = "directories")]
    zstd: bool,
    /// With --zstd: how long a record must have been unused, in seconds
    #[arg(long, default_value_t = 86_400, requires = "zstd")]
    cold_after: u64,
    /// Extra disk space in each directory during compaction, in MiB [default: most of the free space]
    #[arg(long, conflicts_with = "to", requires = "directories")]
    room_mib: Option<u64>,
    /// Only print what would be done, and change nothing
    #[arg(long, requires = "directories")]
    dry_run: bool,
    /// Threads that read metadata [default: two for each core]
    #[arg(long, requires = "directories", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    #[command(flatten)]
    server: ServerArgs,
}

impl CompactArgs {
    fn options(&self) -> Options {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Options {
            utilisation_percent: self.utilisation,
            layout: match self.layout {
                LayoutName::Keep => LayoutChoice::Keep,
                LayoutName::FullBlock => LayoutChoice::FullBlock,
                LayoutName::LayerBlock => LayoutChoice::LayerBlock,
                LayoutName::Auto => LayoutChoice::Auto,
            },
            merge: !self.no_merge,
            zstd_after_s: self.zstd.then_some(self.cold_after),
            now_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            threads: self.threads.map_or_else(kvarts_fsck::check::default_threads, usize::from),
            dry_run: self.dry_run,
        }
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &CompactArgs, out: &mut dyn Write) -> Result<(), Failure> {
    if arguments.directories.is_empty() {
        return client_cmd::compact(&arguments.server, out);
    }
    if arguments.server.server.is_some() {
        return Err(Failure::user(
            "DIR and the options for a server cannot be combined. With DIR, this program rewrites the \
            files itself; without DIR, a running server compacts its store",
        ));
    }
    let begin = Instant::now();
    let options = arguments.options();
    let disks = open_store(&arguments.directories)?;
    let progress = Progress::default();
    let looked = look(&disks)?;
    if let Ok(store) = &looked {
        let reading = check::Options { threads: options.threads, ..check::Options::default() };
        needs::tell(("compact", Task::Compact), store, &reading)?;
    }
    let done = match looked {
        Err(refusal) => Err(refusal),
        Ok(store) if !arguments.to.is_empty() => to_another(arguments, &store, &options, &progress)?,
        Ok(store) if arguments.dry_run => {
            let place = |directory| -> Result<Place, Failure> {
                Ok(Place { writer: nowhere(), room_bytes: room_bytes(arguments, directory)? })
            };
            let places: Vec<Place> =
                arguments.directories.iter().map(|one| place(one)).collect::<Result<_, _>>()?;
            watch(&progress, || in_place(&store, &places, &options, &progress))?
        }
        Ok(store) => {
            // From readers' locks to the only one.
            drop((store, disks));
            here(arguments, &options, &progress)?
        }
    };
    let mut report = match done {
        Ok(report) => report,
        Err(Refusal::Damaged(what)) => {
            damaged(&what, arguments.server.json, out)?;
            return Err(Failure::Problems);
        }
        Err(refusal) => return Err(Failure::user(refusal)),
    };
    report.seconds = begin.elapsed().as_secs_f64();
    report.gib_per_s = report.bytes_written as f64 / report.seconds.max(1e-9) / f64::from(1 << 30);
    if arguments.server.json {
        serde_json::to_writer_pretty(&mut *out, &report).map_err(std::io::Error::from)?;
        return Ok(writeln!(out)?);
    }
    Ok(out.write_all(text(&report).as_bytes())?)
}

fn damaged(what: &str, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    let refusal = Refusal::Damaged(what.to_owned());
    if json {
        let said = serde_json::json!({ "damaged": what, "hint": "run kvarts fsck --repair, then continue" });
        return Ok(writeln!(out, "{said:#}")?);
    }
    Ok(writeln!(out, "{refusal}")?)
}

/// The directories, if no process has them open.
fn open_store(directories: &[PathBuf]) -> Result<Vec<Arc<dyn Disk>>, Failure> {
    for directory in directories {
        if let Err(OpenError::InUse) = RealDisk::open(directory, false, false) {
            return Err(in_use(directory));
        }
    }
    open(directories, false)
}

fn in_use(directory: &Path) -> Failure {
    Failure::User(format!(
        "{} is in use by another process: stop that process. If it is a server, run `kvarts compact` \
        without a directory instead: the server then compacts its store",
        directory.display()
    ))
}

/// The store that the directories hold, or where it is damaged.
fn look(disks: &[Arc<dyn Disk>]) -> Result<Result<Store, Refusal>, Failure> {
    let mut found = Findings::default();
    let store = survey(disks, &mut found).map_err(cannot_run)?;
    found.sort();
    if let Err(refusal) = refuse_unsound(store.as_ref(), &found) {
        return Ok(Err(refusal));
    }
    let store = store
        .ok_or_else(|| Failure::user("the store has never contained a block: there is nothing to compact"));
    Ok(Ok(store?))
}

/// What a dry run is given: nothing that could be written.
fn nowhere() -> Arc<dyn DiskWriter> {
    Arc::new(kvarts_fsck::disk::MemoryDisk::new())
}

/// Bytes that may be written in a directory before any are given back.
fn room_bytes(arguments: &CompactArgs, directory: &Path) -> Result<u64, Failure> {
    Ok(match arguments.room_mib {
        Some(mib) => mib.saturating_mul(1 << 20),
        // Directories may share a file system.
        None => free_bytes(directory)?.saturating_sub(SPARED_BYTES) / arguments.directories.len() as u64,
    })
}

type Done = Result<Report, Refusal>;

fn here(arguments: &CompactArgs, options: &Options, progress: &Progress) -> Result<Done, Failure> {
    let mut places = Vec::new();
    let mut disks: Vec<Arc<dyn Disk>> = Vec::new();
    for directory in &arguments.directories {
        let refuse = |error: OpenError| refused(directory, error);
        let writer = RealWriter::open(directory).map_err(refuse)?;
        let room_bytes = room_bytes(arguments, directory)?;
        places.push(Place { writer: Arc::new(writer), room_bytes });
        // The lock is held already.
        disks.push(Arc::new(RealDisk::open(directory, true, true).map_err(refuse)?));
    }
    let store = match look(&disks)? {
        Ok(store) => store,
        Err(refusal) => return Ok(Err(refusal)),
    };
    watch(progress, || in_place(&store, &places, options, progress))
}

fn free_bytes(directory: &Path) -> Result<u64, Failure> {
    let space = rustix::fs::statvfs(directory);
    let space = space.map_err(|error| Failure::User(format!("{}: {error}", directory.display())))?;
    Ok(space.f_bavail.saturating_mul(space.f_frsize))
}

fn to_another(
    arguments: &CompactArgs,
    store: &Store,
    options: &Options,
    progress: &Progress,
) -> Result<Done, Failure> {
    // Looked at before they get a lock: what is refused stays as it is.
    let mut places = targets(arguments)?;
    if !arguments.dry_run {
        let disks: Vec<Arc<dyn Disk>> = places.drain(..).map(|(disk, _)| disk).collect();
        expect_free(&disks).map_err(Failure::user)?;
        drop(disks);
        for directory in &arguments.to {
            let refuse = |error: OpenError| refused(directory, error);
            let writer = RealWriter::open(directory).map_err(refuse)?;
            let disk = RealDisk::open(directory, false, true).map_err(refuse)?;
            places.push((Arc::new(disk), Arc::new(writer)));
        }
    }
    let (mut id, mut secret) = ([0u8; 16], [0u8; 32]);
    for bytes in [&mut id[..], &mut secret[..]] {
        let got = rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::empty());
        if got.map_err(Failure::user)? != bytes.len() {
            return Err(Failure::user("the system has no source of random numbers"));
        }
    }
    let shards = arguments.shards.unwrap_or(store.shards.len() as u32);
    let target = Target { directories: places, shards, store: StoreId(id), secret };
    let done = watch(progress, || elsewhere(store, &target, options, progress))?;
    let is_begun = || target.directories.iter().any(|(disk, _)| is_unfinished(&**disk));
    Ok(match done {
        Err(refusal) if !matches!(refusal, Refusal::Damaged(_)) && is_begun() => {
            Err(Refusal::Cannot(format!(
                "{refusal}; the new store is not finished: run the same command again, or delete the \
                directories of the new store"
            )))
        }
        done => done,
    })
}

/// The directories of the new store to be looked at, made if they are to be written; writers that write nothing.
fn targets(arguments: &CompactArgs) -> Result<Vec<Directory>, Failure> {
    let mut places = Vec::new();
    for directory in &arguments.to {
        let refuse = |error: OpenError| refused(directory, error);
        if !arguments.dry_run {
            kvarts_store::home::make(directory).map_err(|error| refuse(error.into()))?;
        }
        let disk: Arc<dyn Disk> = match directory.exists() {
            true => Arc::new(RealDisk::open(directory, false, false).map_err(refuse)?),
            false => Arc::new(kvarts_fsck::disk::MemoryDisk::new()),
        };
        places.push((disk, nowhere()));
    }
    Ok(places)
}

fn refused(directory: &Path, error: OpenError) -> Failure {
    match error {
        OpenError::InUse => in_use(directory),
        OpenError::Io(error) => Failure::User(format!("{}: {error}", directory.display())),
    }
}

/// Does the work and shows how far it is.
fn watch(progress: &Progress, work: impl FnOnce() -> Done + Send) -> Result<Done, Failure> {
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let (done, is_done) = channel();
        let work = scope.spawn(move || {
            let result = work();
            // If the progress is gone, no receiver waits any more.
            let _ = done.send(());
            result
        });
        show_progress(begin, &|| (progress.done(), progress.planned()), &is_done);
        work.join().map_err(|_| {
            Failure::user(
                "a defect in kvarts, please report it: a thread of the \
            compaction panicked",
            )
        })
    })
}

/// The report for people.
fn text(report: &Report) -> String {
    let whole = |segments: u64| segments.saturating_mul(report.segment_bytes);
    let would = if report.dry_run { "would be " } else { "" };
    let mut lines = vec![
        format!(
            "{} live blocks; left out: {} deleted, {} expired, {} superseded or duplicate",
            human::grouped(report.live_blocks),
            human::grouped(report.deleted_blocks),
            human::grouped(report.expired_blocks),
            human::grouped(report.superseded_blocks)
        ),
        format!(
            "segments: {} ({}, {:.0}% live) before, {}{} ({}, {:.0}% live) after",
            human::grouped(report.segments_before),
            human::bytes(whole(report.segments_before)),
            report.utilisation_before(),
            would,
            human::grouped(report.segments_after),
            human::bytes(whole(report.segments_after)),
            percent(report.live_bytes, whole(report.segments_after)).min(100.0)
        ),
        format!(
            "{} records {would}written ({}): {} merged into others, {} rearranged, {} compressed",
            human::grouped(report.records_written),
            human::bytes(report.bytes_written),
            human::grouped(report.records_merged),
            human::grouped(report.records_rearranged),
            human::grouped(report.records_compressed)
        ),
        format!(
            "remembered deletes: {} before the compaction, {} after",
            human::grouped(report.graves_before),
            human::grouped(report.graves_after)
        ),
    ];
    if report.segments_fixed > 0 {
        lines.push(format!(
            "{} segments were not changed, because this program does not support some of their records",
            human::grouped(report.segments_fixed)
        ));
    }
    if !report.dry_run {
        lines.push(format!("{:.1} s, {:.2} GiB/s", report.seconds, report.gib_per_s));
    }
    lines.push(String::new());
    lines.join("\n")
}
