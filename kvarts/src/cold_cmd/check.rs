//! `kvarts cold fsck`: whether what is in a bucket is what its manifests say.

use std::io::Write;

use clap::Args;
use kvarts_cold::check::{Level, check};
use kvarts_layout::NamespaceId;
use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::Failure;
use serde::Serialize;

use super::{Asked, BucketArgs, Trouble};
use crate::offline::write_json;

/// The arguments of `cold fsck`.
#[derive(Args, Debug)]
pub(super) struct FsckArgs {
    /// Check only this namespace
    #[arg(long, value_name = "ID")]
    namespace: Option<NamespaceId>,
    /// Check manifests, indexes and lengths only, without reading blocks
    #[arg(long)]
    quick: bool,
    /// Rebuild lost indexes from their packs, and drop packs that are absent or contain deleted blocks from the manifests
    #[arg(long)]
    repair: bool,
    #[command(flatten)]
    bucket: BucketArgs,
}

#[derive(Serialize)]
struct Report {
    clean: bool,
    packs: u64,
    blocks: u64,
    stored_bytes: u64,
    problems: Vec<Problem>,
    /// Objects that no manifest names, left by pushes that did not end.
    orphans: u64,
    orphan_bytes: u64,
    /// Packs that wait for their deletion.
    condemned: u64,
    /// Keys whose deletes the manifests list.
    deletes: u64,
    asked: Option<Asked>,
}

#[derive(Serialize)]
struct Problem {
    namespace: String,
    what: String,
    repaired: bool,
}

/// Runs the command. Exit code 1 where something is wrong and was not repaired.
pub(super) fn run(arguments: &FsckArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let bucket = arguments.bucket.open()?;
    let level = if arguments.quick { Level::Quick } else { Level::Full };
    let mut report = Report {
        clean: true,
        packs: 0,
        blocks: 0,
        stored_bytes: 0,
        problems: Vec::new(),
        orphans: 0,
        orphan_bytes: 0,
        condemned: 0,
        deletes: 0,
        asked: None,
    };
    let troubles = bucket.each(&bucket.namespaces(arguments.namespace)?, |namespace| {
        let check = check(&bucket.tier, namespace, level, arguments.repair);
        let checked = bucket.runtime.block_on(check)?;
        report.clean &= checked.is_clean();
        report.packs += checked.packs;
        report.blocks += checked.blocks;
        report.stored_bytes += checked.stored_bytes;
        report.orphans += checked.orphans;
        report.orphan_bytes += checked.orphan_bytes;
        report.condemned += checked.condemned;
        report.deletes += checked.deletes;
        report.problems.extend(checked.found.into_iter().map(|found| Problem {
            namespace: namespace.to_string(),
            what: found.finding.to_string(),
            repaired: found.is_repaired,
        }));
        Ok(())
    })?;
    report.clean &= troubles.is_empty();
    let problem = |Trouble { namespace, what }| Problem { namespace, what, repaired: false };
    report.problems.extend(troubles.into_iter().map(problem));
    report.asked = Some(bucket.asked());
    if arguments.bucket.json {
        write_json(&report, out)?
    } else {
        write_text(&report, arguments, out)?
    }
    if report.clean { Ok(()) } else { Err(Failure::Problems) }
}

fn write_text(report: &Report, arguments: &FsckArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let read = if arguments.quick { "no block was read" } else { "every byte was verified" };
    writeln!(
        out,
        "{} packs with {} blocks, {}; {read}",
        grouped(report.packs),
        grouped(report.blocks),
        bytes(report.stored_bytes)
    )?;
    for problem in &report.problems {
        let repaired = if problem.repaired { "; repaired" } else { "" };
        writeln!(out, "namespace {}: {}{repaired}", problem.namespace, problem.what)?;
    }
    if report.orphans > 0 {
        let (orphans, taken) = (grouped(report.orphans), bytes(report.orphan_bytes));
        writeln!(out, "{orphans} objects, {taken}, belong to no manifest: kvarts cold gc deletes them.")?;
    }
    if report.condemned > 0 {
        writeln!(out, "{} packs wait for their deletion.", grouped(report.condemned))?;
    }
    if report.deletes > 0 {
        writeln!(
            out,
            "{} deletes of keys are recorded, so that no push uploads the deleted blocks again.",
            grouped(report.deletes)
        )?;
    }
    let left = report.problems.iter().filter(|problem| !problem.repaired).count();
    match (left, arguments.repair) {
        (0, _) => writeln!(out, "clean")?,
        (left, false) => writeln!(out, "{left} problems were found. `--repair` rebuilds lost indexes.")?,
        (left, true) => writeln!(out, "{left} problems remain: blocks of damaged packs are misses.")?,
    }
    Ok(())
}
