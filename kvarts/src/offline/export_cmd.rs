//! `kvarts export`: artifacts of a store into one portable file.
//!
//! The file appears under its name when it is whole and durable; until then it stands beside it under another one.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use kvarts_fsck::check::Options;
use kvarts_fsck::contents::counted::{Counted, count};
use kvarts_fsck::contents::{Contents, may_have_forgotten_deletes};
use kvarts_fsck::export::{Exported, Failed, LeftOut, Selection, export, export_counted, planned_bytes};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::needs::Task;
use kvarts_fsck::store::Store;
use kvarts_fsck::tree::lineage;
use kvarts_fsck::window::Tally;
use kvarts_layout::{BlockKey, NamespaceId};
use serde::Serialize;

use super::{Place, now_ms, shown, write_json};
use crate::files;
use crate::fsck_cmd::watched;
use crate::needs;
use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::Failure;

/// The arguments of `export`.
#[derive(Args, Debug)]
pub(crate) struct ExportArgs {
    #[command(flatten)]
    place: Place,
    /// The new file; the command fails if the file exists
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
    #[command(flatten)]
    wanted: Wanted,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Which artifacts.
#[derive(Args, Debug)]
pub(crate) struct Wanted {
    /// Select only the blocks of this namespace
    #[arg(long, value_name = "ID", conflicts_with_all = ["prefix", "all"])]
    namespace: Option<NamespaceId>,
    /// Select only the prefix that ends with this key, and the descendants of the prefix
    #[arg(long, value_name = "KEY", conflicts_with = "all")]
    prefix: Option<BlockKey>,
    /// Select all blocks of the store
    #[arg(long)]
    pub(crate) all: bool,
}

impl Wanted {
    /// That something was named; `verb` says what for.
    pub(crate) fn expect_some(&self, verb: &str) -> Result<(), Failure> {
        if self.all || self.namespace.is_some() || self.prefix.is_some() {
            return Ok(());
        }
        Err(Failure::User(format!(
            "the blocks to {verb} are not given: use --all, --namespace ID or --prefix \
            KEY"
        )))
    }

    /// What a server is asked for: all, or a namespace.
    pub(crate) fn of_server(&self) -> Result<Option<NamespaceId>, &'static str> {
        match self.prefix {
            Some(_) => Err("--prefix needs DIR: a server pushes one namespace or all"),
            None => Ok(self.namespace),
        }
    }

    /// What that is of a store.
    pub(crate) fn selection(&self, contents: &Contents) -> Selection {
        match (self.namespace, self.prefix) {
            (Some(namespace), _) => Selection::Namespace(namespace),
            (None, Some(key)) => Selection::Blocks(lineage(contents, key)),
            (None, None) => Selection::All,
        }
    }
}

#[derive(Serialize)]
struct Report {
    file: String,
    complete: bool,
    namespaces: u64,
    artifacts: u64,
    blocks: u64,
    payload_bytes: u64,
    blocks_left_out: u64,
    blocks_gone: u64,
    extensions_left_out: u64,
    store_problems: u64,
    /// A checkpoint cannot be read: what was deleted may be in the file.
    deletes_may_be_missing: bool,
    left_out: Vec<LeftOut>,
}

/// Runs the command.
pub(crate) fn run(arguments: &ExportArgs, out: &mut dyn Write) -> Result<(), Failure> {
    arguments.wanted.expect_some("export")?;
    files::refuse_existing(&arguments.to, false)?;
    let tally = Tally::default();
    let source = Source::of(arguments, &tally)?;
    let partial = files::Partial::new(&arguments.to)?;
    let mut writer = BufWriter::with_capacity(1 << 20, partial.file());
    let (before, planned) = (tally.bytes(), source.planned_bytes());
    let exported = watched(&|| (tally.bytes() - before, planned), || source.export(&tally, &mut writer));
    let exported = exported.map_err(Failure::user)?;
    writer.flush().map_err(|error| cannot(&arguments.to, &error))?;
    drop(writer);
    if exported.totals.blocks == 0 && exported.blocks_left_out == 0 && !arguments.wanted.all {
        return Err(Failure::user("the store has no matching blocks"));
    }
    partial.finish(false)?;
    let report = report(arguments, exported, source.findings());
    if arguments.json {
        write_json(&report, out)?;
    } else {
        write_text(&report, out)?;
    }
    if report.complete { Ok(()) } else { Err(Failure::Problems) }
}

fn cannot(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::User(format!("{}: {error}", path.display()))
}

/// What is exported, found out from metadata.
enum Source {
    /// A prefix: what descends from it is found in all that the store has.
    Listed { store: Store, contents: Contents, wanted: Selection },
    /// The rest: what the store has is not held.
    Counted { store: Store, options: Options, counted: Counted, wanted: Selection },
}

impl Source {
    fn of(arguments: &ExportArgs, tally: &Tally) -> Result<Self, Failure> {
        let wanted = match (arguments.wanted.namespace, arguments.wanted.prefix) {
            (_, Some(_)) => {
                let (store, contents) = arguments.place.read("export", tally)?;
                let wanted = arguments.wanted.selection(&contents);
                return Ok(Self::Listed { store, contents, wanted });
            }
            (Some(namespace), None) => Selection::Namespace(namespace),
            (None, None) => Selection::All,
        };
        let (store, options, found) = arguments.place.open()?;
        needs::tell(("export", Task::Export), &store, &options)?;
        let counted = count(&store, &options, now_ms(), tally, found).map_err(Failure::user)?;
        Ok(Self::Counted { store, options, counted, wanted })
    }

    /// Bytes that will be read, about.
    fn planned_bytes(&self) -> u64 {
        match self {
            Self::Listed { contents, wanted, .. } => planned_bytes(contents, wanted),
            Self::Counted { counted, .. } => counted.bytes,
        }
    }

    fn export(&self, tally: &Tally, out: &mut (dyn Write + Send)) -> Result<Exported, Failed> {
        let now = (now_ms(), tally);
        match self {
            Self::Listed { store, contents, wanted } => export(store, contents, wanted, now, out),
            Self::Counted { store, options, counted, wanted } => {
                export_counted((store, options), counted, wanted, now, out)
            }
        }
    }

    fn findings(&self) -> &Findings {
        match self {
            Self::Listed { contents, .. } => &contents.findings,
            Self::Counted { counted, .. } => &counted.findings,
        }
    }
}

fn report(arguments: &ExportArgs, exported: Exported, findings: &Findings) -> Report {
    let store_problems = findings.problem_count;
    let deletes_may_be_missing = may_have_forgotten_deletes(findings);
    let Exported { totals, left_out, blocks_left_out, blocks_gone, extensions_left_out } = exported;
    Report {
        file: arguments.to.display().to_string(),
        complete: blocks_left_out == 0 && store_problems == 0 && !deletes_may_be_missing,
        namespaces: totals.identities,
        artifacts: totals.runs,
        blocks: totals.blocks,
        payload_bytes: totals.payload_bytes,
        blocks_left_out,
        blocks_gone,
        extensions_left_out,
        store_problems,
        deletes_may_be_missing,
        left_out,
    }
}

fn write_text(report: &Report, out: &mut dyn Write) -> Result<(), Failure> {
    writeln!(
        out,
        "{}: {} blocks in {} artifacts of {} namespaces, {}, every digest verified",
        report.file,
        grouped(report.blocks),
        grouped(report.artifacts),
        grouped(report.namespaces),
        bytes(report.payload_bytes)
    )?;
    for one in &report.left_out {
        writeln!(
            out,
            "left out: {} blocks at shard {} segment {} offset {}: {}",
            one.blocks,
            one.shard,
            one.segment,
            one.offset,
            shown(&one.why)
        )?;
    }
    if report.blocks_left_out > 0 {
        writeln!(out, "{} blocks are not in the file.", grouped(report.blocks_left_out))?;
    }
    if report.blocks_gone > 0 {
        writeln!(
            out,
            "{} blocks were removed from the store during the export.",
            grouped(report.blocks_gone)
        )?;
    }
    if report.extensions_left_out > 0 {
        writeln!(out, "{} extensions of records are not in the file.", grouped(report.extensions_left_out))?;
    }
    if report.store_problems > 0 {
        writeln!(
            out,
            "The store has {} problems; the affected blocks are not in the file. Run kvarts fsck.",
            grouped(report.store_problems)
        )?;
    }
    if report.deletes_may_be_missing {
        writeln!(out, "A checkpoint cannot be read: deleted blocks may be in the file. Run kvarts fsck.")?;
    }
    Ok(())
}
