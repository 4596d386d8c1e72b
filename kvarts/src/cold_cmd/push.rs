//! `kvarts cold push`: artifacts of a store into the bucket.
//!
//! One thread writes the export that the store's files give, this one takes it apart into runs for packs: at no time is more in memory
//! than one run and the packs that are not full.

use std::io::{BufReader, BufWriter, PipeReader, Write};

use bytes::Bytes;
use clap::Args;
use kvarts_cold::{PushOptions, Pushed, Pusher};
use kvarts_fsck::export::{Exported, export, planned_bytes};
use kvarts_fsck::window::Tally;
use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::Failure;
use serde::Serialize;

use super::{Asked, Bucket, BucketArgs};
use crate::fsck_cmd::watched;
use crate::offline::export_cmd::Wanted;
use crate::offline::frames::Source;
use crate::offline::{Place, now_ms, write_json};

/// The arguments of `cold push`.
#[derive(Args, Debug)]
pub(super) struct PushArgs {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    wanted: Wanted,
    #[command(flatten)]
    bucket: BucketArgs,
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
    /// A checkpoint cannot be read: what was deleted may be in the bucket.
    deletes_may_be_missing: bool,
    asked: Asked,
}

/// Runs the command. Exit code 1 where something that was wanted is not in the bucket.
pub(super) fn run(arguments: &PushArgs, out: &mut dyn Write) -> Result<(), Failure> {
    arguments.wanted.expect_some("push")?;
    let bucket = arguments.bucket.open()?;
    let tally = Tally::default();
    let (store, contents) = arguments.place.read(&tally)?;
    let wanted = arguments.wanted.selection(&contents);
    let (before, planned) = (tally.bytes(), planned_bytes(&contents, &wanted));
    let (from, to) = std::io::pipe().map_err(|error| Failure::User(format!("a pipe: {error}")))?;
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
            let pushed = push(&bucket, from);
            (exporting.join(), pushed)
        })
    });
    let pushed = pushed?;
    let exported = exported.map_err(|_| Failure::user("the store cannot be read"))?.map_err(Failure::user)?;
    let (store_problems, left_out) = (contents.findings.problem_count, exported.blocks_left_out);
    if exported.totals.blocks == 0 && left_out == 0 && !arguments.wanted.all {
        return Err(Failure::user("nothing in the store is what was asked for"));
    }
    let deletes_may_be_missing = contents.may_have_forgotten_deletes();
    let Pushed { packs, blocks, payload_bytes, already_there, expired, too_large } = pushed;
    let report = Report {
        complete: left_out + too_large == 0 && store_problems == 0 && !deletes_may_be_missing,
        packs,
        blocks,
        payload_bytes,
        already_there,
        expired,
        too_large,
        blocks_left_out: left_out,
        store_problems,
        deletes_may_be_missing,
        asked: bucket.asked(),
    };
    if arguments.bucket.json {
        write_json(&report, out)?
    } else {
        write_text(&report, out)?
    }
    if report.complete { Ok(()) } else { Err(Failure::Problems) }
}

/// Takes an export apart and brings it into the tier.
fn push(bucket: &Bucket, from: PipeReader) -> Result<Pushed, Failure> {
    let mut pusher = Pusher::new(&bucket.tier, PushOptions::default());
    let mut source = Source::new("the store", BufReader::with_capacity(1 << 20, from));
    source.each_run(&mut |source, reading, run| {
        let namespace =
            reading.namespace(run.namespace).ok_or_else(|| source.fault("an unknown namespace"))?;
        let mut payload = vec![0; source.payload_bytes(run)?];
        source.fill(&mut payload)?;
        bucket.wait(pusher.add(namespace, run, &Bytes::from(payload)))
    })?;
    bucket.wait(pusher.finish())
}

fn write_text(report: &Report, out: &mut dyn Write) -> Result<(), Failure> {
    writeln!(
        out,
        "{} blocks, {}, in {} packs; {} were there already; {} requests, {} of them again",
        grouped(report.blocks),
        bytes(report.payload_bytes),
        grouped(report.packs),
        grouped(report.already_there),
        grouped(report.asked.requests),
        grouped(report.asked.retries)
    )?;
    if report.expired > 0 {
        writeln!(out, "{} blocks have expired and were left out.", grouped(report.expired))?;
    }
    if report.too_large > 0 {
        writeln!(out, "{} blocks are larger than a pack may be.", grouped(report.too_large))?;
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
            "The store has {problems} problems; what they hide is not in the bucket. Run kvarts fsck."
        )?;
    }
    if report.deletes_may_be_missing {
        writeln!(out, "A checkpoint cannot be read: what was deleted may be in the bucket.")?;
    }
    Ok(())
}
