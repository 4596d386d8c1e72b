//! `kvarts cold gc`: what is not to be kept any more out of a bucket, in two steps that are a grace apart.

use std::io::Write;
use std::time::Duration;

use clap::Args;
use kvarts_cold::collect::{Collected, GRACE_LEAST, Retention, collect};
use kvarts_layout::NamespaceId;
use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::Failure;
use serde::Serialize;

use super::{Asked, BucketArgs, Trouble, tell, verdict};
use crate::client_cmd::subject::duration;
use crate::offline::write_json;
use crate::sizes;

/// The arguments of `cold gc`.
#[derive(Args, Debug)]
pub(super) struct GcArgs {
    /// Delete packs of this namespace only
    #[arg(long, value_name = "ID")]
    namespace: Option<NamespaceId>,
    /// Delete packs that were added more than this time ago, such as 30d
    #[arg(long, value_name = "TIME", value_parser = duration)]
    older: Option<Duration>,
    /// Keep at most this many bytes of packs in each namespace, such as 100G; the oldest packs are deleted first
    #[arg(long, value_name = "BYTES", value_parser = sizes::bytes)]
    most: Option<u64>,
    /// Time between the removal of a pack from the manifest and its deletion; at least 1h
    #[arg(long, default_value = "24h", value_name = "TIME", value_parser = duration)]
    grace: Duration,
    /// Print the changes without making them
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    bucket: BucketArgs,
}

#[derive(Serialize, Default)]
struct Report {
    dry_run: bool,
    /// Packs that count no longer: their blocks have expired; they are too old; the namespace takes too much.
    expired: u64,
    aged: u64,
    over_budget: u64,
    /// Packs that no manifest names.
    orphans: u64,
    /// Packs whose grace was over.
    deleted: u64,
    deleted_bytes: u64,
    /// Packs that wait for their deletion.
    waiting: u64,
    /// Files of a directory that writers left half-written.
    partial: u64,
    /// Namespaces that were left as they are, and why.
    problems: Vec<Trouble>,
    asked: Option<Asked>,
}

/// Runs the command. Exit code 1 where a namespace was left as it is.
pub(super) fn run(arguments: &GcArgs, out: &mut dyn Write) -> Result<(), Failure> {
    if arguments.grace < GRACE_LEAST {
        return Err(Failure::user(
            "--grace: the time must be at least 1h, because a push can take several minutes",
        ));
    }
    let bucket = arguments.bucket.open()?;
    let retention = Retention {
        age: arguments.older,
        stored_bytes: arguments.most,
        grace: arguments.grace,
        dry_run: arguments.dry_run,
    };
    let mut report = Report { dry_run: arguments.dry_run, ..Report::default() };
    report.problems = bucket.each(&bucket.namespaces(arguments.namespace)?, |namespace| {
        let Collected { expired, aged, over_budget, orphans, deleted, deleted_bytes, waiting } =
            bucket.runtime.block_on(collect(&bucket.tier, namespace, &retention))?;
        report.expired += expired;
        report.aged += aged;
        report.over_budget += over_budget;
        report.orphans += orphans;
        report.deleted += deleted;
        report.deleted_bytes += deleted_bytes;
        report.waiting += waiting;
        Ok(())
    })?;
    report.partial = bucket.wait(bucket.tier.access().tidy(arguments.grace, arguments.dry_run))?;
    report.asked = Some(bucket.asked());
    if arguments.bucket.json {
        write_json(&report, out)?
    } else {
        write_text(&report, out)?
    }
    verdict(&report.problems)
}

fn write_text(report: &Report, out: &mut dyn Write) -> Result<(), Failure> {
    let (stop, go) = if report.dry_run {
        ("would be taken out of use", "would be deleted")
    } else {
        ("were taken out of use", "deleted")
    };
    writeln!(
        out,
        "{} packs {stop}: {} expired, {} too old, {} beyond the limit of bytes, {} from unfinished pushes",
        grouped(report.expired + report.aged + report.over_budget + report.orphans),
        grouped(report.expired),
        grouped(report.aged),
        grouped(report.over_budget),
        grouped(report.orphans)
    )?;
    let (deleted, waiting) = (grouped(report.deleted), grouped(report.waiting));
    writeln!(
        out,
        "{deleted} packs {go}, {}; {waiting} wait for their deletion",
        bytes(report.deleted_bytes)
    )?;
    if report.partial > 0 {
        writeln!(out, "{} files that writers left incomplete {go}", grouped(report.partial))?;
    }
    tell(&report.problems, out)
}
