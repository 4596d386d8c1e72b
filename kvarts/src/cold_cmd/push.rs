//! `kvarts cold push`: artifacts of a store into the bucket; by the server of the store, or out of the files of a store without one.
//!
//! A server pushes into its own bucket, and knows what is deleted meanwhile (`server/src/cold/push.rs`). Out of files one thread writes
//! the export that they give, this one takes it apart into runs for packs: at no time is more in memory
//! than one run and the packs that are not full. What the manifest names as deleted since the store was listed is left out; what a
//! server deletes that does not tell this bucket cannot be known.

use std::collections::BTreeMap;
use std::io::{BufReader, BufWriter, PipeReader, Write};
use std::path::PathBuf;

use bytes::Bytes;
use clap::Args;
use kvarts_client::Via;
use kvarts_cold::push::points;
use kvarts_cold::{Point, PushOptions, Pushed, Pusher};
use kvarts_fsck::disk::{OpenError, RealDisk};
use kvarts_fsck::export::{Exported, export, planned_bytes};
use kvarts_fsck::window::Tally;
use kvarts_layout::NamespaceId;
use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::{Failure, Refusal};
use serde::Serialize;

use super::{Asked, Bucket, BucketArgs};
use crate::client_cmd::ServerArgs;
use crate::fsck_cmd::watched;
use crate::offline::export_cmd::Wanted;
use crate::offline::frames::Source;
use crate::offline::{Place, now_ms, write_json};

/// The arguments of `cold push`.
#[derive(Args, Debug)]
pub(super) struct PushArgs {
    /// All directories of a store; without a directory, a running server pushes its blocks into its own bucket
    #[arg(value_name = "DIR", requires = "bucket")]
    directories: Vec<PathBuf>,
    /// Further directories of the store
    #[arg(long = "dir", value_name = "DIR", requires = "directories")]
    more: Vec<PathBuf>,
    /// Read a store in use by a server without this bucket; blocks deleted during the push may be pushed
    #[arg(long, requires = "directories")]
    live: bool,
    #[command(flatten)]
    wanted: Wanted,
    /// The bucket, for a push of directories: s3://BUCKET/PREFIX, with the usual AWS_ACCESS_KEY_ID,
    /// AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL; or file:///DIRECTORY
    #[arg(long, value_name = "URL", requires = "directories")]
    bucket: Option<String>,
    #[command(flatten)]
    server: ServerArgs,
}

#[derive(Serialize)]
struct Report {
    complete: bool,
    packs: u64,
    blocks: u64,
    payload_bytes: u64,
    already_there: u64,
    expired: u64,
    /// Larger than a pack may be.
    too_large: u64,
    /// Wanted, and damaged in the store.
    blocks_left_out: u64,
    store_problems: u64,
    /// Blocks that were deleted after the store was listed, and are not in the bucket.
    deleted: u64,
    /// What was deleted may be in the bucket: a checkpoint cannot be read, the store is in use, or blocks are older than the deletes that
    /// the bucket knows.
    deletes_may_be_missing: bool,
    /// Of `blocks`, those that are older than the deletes that the bucket knows one by one.
    doubtful: u64,
    /// What a server asks its bucket is in its own counts.
    asked: Option<Asked>,
    /// Namespaces that a server's bucket did not take, and why.
    problems: Vec<String>,
}

/// Runs the command. Exit code 1 where something that was wanted is not in the bucket.
pub(super) fn run(arguments: &PushArgs, out: &mut dyn Write) -> Result<(), Failure> {
    arguments.wanted.expect_some("push")?;
    let directories: Vec<PathBuf> = arguments.directories.iter().chain(&arguments.more).cloned().collect();
    let (report, seen) = match (&arguments.bucket, directories.is_empty()) {
        (Some(bucket), false) => {
            let bucket = BucketArgs { bucket: bucket.clone(), json: arguments.server.json };
            from_files(arguments, &directories, &bucket)?
        }
        _ => (by_server(arguments)?, Seen::default()),
    };
    if arguments.server.json {
        write_json(&report, out)?
    } else {
        write_text(&report, seen, out)?
    }
    if report.complete { Ok(()) } else { Err(Failure::Problems) }
}

/// Why deletes may be missing.
#[derive(Clone, Copy, Default)]
struct Seen {
    is_in_use: bool,
    has_lost_checkpoint: bool,
}

/// A server pushes what it has into its own bucket.
fn by_server(arguments: &PushArgs) -> Result<Report, Failure> {
    let namespace = arguments.wanted.of_server().map_err(Failure::user)?;
    let client = arguments.server.connect(Via::Grpc)?;
    let done = client.cold_push(namespace).map_err(Failure::user)?;
    Ok(Report {
        complete: done.unread + done.too_large == 0 && done.problems.is_empty(),
        packs: done.packs,
        blocks: done.blocks,
        payload_bytes: done.payload_bytes,
        already_there: done.already_there,
        expired: done.expired,
        too_large: done.too_large,
        blocks_left_out: done.unread,
        store_problems: 0,
        deleted: done.deleted,
        deletes_may_be_missing: false,
        doubtful: 0,
        asked: None,
        problems: done.problems,
    })
}

/// Whether a process uses the store. One that is used is refused unless it is to be read all the same.
fn is_in_use(directories: &[PathBuf], live: bool) -> Result<bool, Failure> {
    for directory in directories {
        match RealDisk::open(directory, true, false) {
            Err(OpenError::InUse) if live => return Ok(true),
            Err(OpenError::InUse) => {
                let shown = directory.display();
                return Err(Failure::Refused(Refusal::new(
                    "in-use",
                    format!("{shown} is in use by another process"),
                    "run the command without DIR: the server then pushes into its own bucket; or use \
                    --live, which reads the files of a running server, and may push blocks that are \
                    deleted during the push",
                )));
            }
            // What else is wrong is told where it is read.
            Ok(_) | Err(OpenError::Io(_)) => {}
        }
    }
    Ok(false)
}

/// Out of the files of a store.
fn from_files(
    arguments: &PushArgs,
    directories: &[PathBuf],
    bucket: &BucketArgs,
) -> Result<(Report, Seen), Failure> {
    let is_in_use = is_in_use(directories, arguments.live)?;
    let place = Place::of(directories, is_in_use).ok_or_else(|| {
        Failure::user("no store directory was given: name the directories of the store as DIR")
    })?;
    let bucket = bucket.open()?;
    // Before the store is listed: what is deleted from now on, and told to this bucket, is left out.
    let listed = bucket.wait(points(&bucket.tier))?;
    let tally = Tally::default();
    let (store, contents) = place.read("cold push", &tally)?;
    let wanted = arguments.wanted.selection(&contents);
    let (before, planned) = (tally.bytes(), planned_bytes(&contents, &wanted));
    let (from, to) =
        std::io::pipe().map_err(|error| Failure::User(format!("a pipe could not be created: {error}")))?;
    let (exported, pushed) = watched(&|| (tally.bytes() - before, planned), || {
        std::thread::scope(|scope| {
            let exporting = scope.spawn(|| -> Result<Exported, String> {
                let mut to = BufWriter::with_capacity(1 << 20, to);
                let exported = export(&store, &contents, &wanted, (now_ms(), &tally), &mut to);
                let exported = exported.map_err(|error| error.to_string())?;
                to.flush().map_err(|error| error.to_string())?;
                Ok(exported)
            });
            // With it goes its end of the pipe: if it fails, the export ends too.
            let pushed = push(&bucket, from, listed);
            (exporting.join(), pushed)
        })
    });
    let pushed = pushed?;
    let exported = exported
        .map_err(|_| {
            Failure::user(
                "a defect in kvarts, please report it: the thread that reads the \
            store panicked",
            )
        })?
        .map_err(Failure::user)?;
    let (store_problems, left_out) = (contents.findings.problem_count, exported.blocks_left_out);
    if exported.totals.blocks == 0 && left_out == 0 && !arguments.wanted.all {
        return Err(Failure::user("the store has no matching blocks"));
    }
    let has_lost_checkpoint = contents.may_have_forgotten_deletes();
    let Pushed { packs, blocks, payload_bytes, already_there, expired, too_large, deleted, doubtful } =
        pushed;
    let report = Report {
        complete: left_out + too_large == 0 && store_problems == 0 && !has_lost_checkpoint,
        packs,
        blocks,
        payload_bytes,
        already_there,
        expired,
        too_large,
        blocks_left_out: left_out,
        store_problems,
        deleted,
        deletes_may_be_missing: has_lost_checkpoint || is_in_use || doubtful > 0,
        doubtful,
        asked: Some(bucket.asked()),
        problems: Vec::new(),
    };
    Ok((report, Seen { is_in_use, has_lost_checkpoint }))
}

/// Takes an export apart and brings it into the tier.
fn push(bucket: &Bucket, from: PipeReader, listed: BTreeMap<NamespaceId, Point>) -> Result<Pushed, Failure> {
    let mut pusher = Pusher::new(&bucket.tier, PushOptions::default());
    listed.into_iter().for_each(|(namespace, point)| pusher.listed(namespace, point));
    let mut source = Source::new("the store", BufReader::with_capacity(1 << 20, from));
    source.each_run(&mut |source, reading, run| {
        let namespace = reading
            .namespace(run.namespace)
            .ok_or_else(|| source.fault("the namespace of a run of blocks is not defined in the export"))?;
        let mut payload = vec![0; source.payload_bytes(run)?];
        source.fill(&mut payload)?;
        bucket.wait(pusher.add(namespace, run, &Bytes::from(payload)))
    })?;
    bucket.wait(pusher.finish())
}

fn write_text(report: &Report, seen: Seen, out: &mut dyn Write) -> Result<(), Failure> {
    write!(
        out,
        "{} blocks, {}, in {} packs; {} were stored before",
        grouped(report.blocks),
        bytes(report.payload_bytes),
        grouped(report.packs),
        grouped(report.already_there)
    )?;
    match &report.asked {
        Some(asked) => {
            writeln!(
                out,
                "; {} requests, {} of them repeated",
                grouped(asked.requests),
                grouped(asked.retries)
            )?;
        }
        None => writeln!(out)?,
    }
    if report.deleted > 0 {
        writeln!(out, "{} blocks were deleted during the push and were left out.", grouped(report.deleted))?;
    }
    for problem in &report.problems {
        writeln!(out, "{problem}")?;
    }
    if report.expired > 0 {
        writeln!(out, "{} blocks have expired and were left out.", grouped(report.expired))?;
    }
    if report.too_large > 0 {
        writeln!(
            out,
            "{} blocks are larger than the limit of a pack and were left out.",
            grouped(report.too_large)
        )?;
    }
    if report.blocks_left_out > 0 {
        writeln!(
            out,
            "{} blocks cannot be read from the store. Run kvarts fsck.",
            grouped(report.blocks_left_out)
        )?;
    }
    if report.store_problems > 0 {
        let problems = grouped(report.store_problems);
        writeln!(
            out,
            "The store has {problems} problems; the affected blocks are not in the bucket. Run kvarts fsck."
        )?;
    }
    if seen.has_lost_checkpoint {
        writeln!(out, "A checkpoint cannot be read: deleted blocks may be in the bucket. Run kvarts fsck.")?;
    }
    if seen.is_in_use {
        writeln!(
            out,
            "The store is in use: blocks deleted during the push may be in the bucket, unless the server uses this bucket too."
        )?;
    }
    if report.doubtful > 0 {
        writeln!(
            out,
            "{} blocks are older than the bucket's list of deletes: blocks deleted by another node may be among them.",
            grouped(report.doubtful)
        )?;
    }
    Ok(())
}
