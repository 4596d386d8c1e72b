//! `kvarts cold restore`: what a bucket has into a store, as it was produced.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Args;
use kvarts_cold::ColdError;
use kvarts_cold::promote::{Restored, Wanted, restore_into};
use kvarts_cold::restore::FetchOptions;
use kvarts_contract::api::Durability;
use kvarts_layout::NamespaceId;
use kvarts_server::human::{bytes, grouped};
use kvarts_store::home::Home;
use kvarts_terminal::Failure;
use serde::Serialize;

use super::{Asked, Bucket, BucketArgs, Trouble, tell, verdict};
use crate::fsck_cmd::watched;
use crate::offline::import_cmd::Destination;
use crate::offline::write_json;

/// The arguments of `cold restore`.
#[derive(Args, Debug)]
pub(super) struct RestoreArgs {
    #[command(flatten)]
    into: Destination,
    /// Restore only this namespace
    #[arg(long, value_name = "ID", conflicts_with = "all", required_unless_present = "all")]
    namespace: Option<NamespaceId>,
    /// Restore all namespaces of the bucket
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    bucket: BucketArgs,
}

#[derive(Serialize, Default)]
struct Report {
    stored: u64,
    already_there: u64,
    /// Named by the bucket, and gone or expired meanwhile.
    missing: u64,
    /// Damaged, or not read.
    lost: u64,
    refused: u64,
    /// Why the first one was lost or refused.
    why: Option<String>,
    /// Bytes of ranges beside the blocks that were wanted.
    over_read_bytes: u64,
    /// Namespaces that were not restored to their end, and why.
    problems: Vec<Trouble>,
    asked: Option<Asked>,
}

impl Report {
    fn add(&mut self, restored: Restored) {
        self.stored += restored.stored;
        self.already_there += restored.already_there;
        self.missing += restored.missing;
        self.lost += restored.lost;
        self.refused += restored.refused;
        self.over_read_bytes += restored.fetched.over_read_bytes;
        self.why = self.why.take().or(restored.why);
    }
}

/// Runs the command. Exit code 1 where a block did not come into the store.
pub(super) fn run(arguments: &RestoreArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let bucket = arguments.bucket.open()?;
    let (mut planned, mut wanted) = (0, Vec::new());
    let namespaces = bucket.namespaces(arguments.namespace)?;
    if namespaces.is_empty() {
        // No store is made for it either: an address that is wrong is not to look like a restore.
        let address = &bucket.address;
        return Err(Failure::User(format!(
            "the bucket {address} is empty, so no block was restored: check the address"
        )));
    }
    let unread = bucket.each(&namespaces, |namespace| {
        let known = bucket.runtime.block_on(bucket.tier.read_manifest(namespace))?;
        planned += known.manifest.packs.values().map(|pack| pack.payload_bytes).sum::<u64>();
        wanted.push(namespace);
        Ok(())
    })?;
    let home = arguments.into.open(planned)?;
    let far = AtomicU64::new(0);
    let mut report = Report { problems: unread, ..Report::default() };
    let restored = watched(&|| (far.load(Ordering::Relaxed), planned), || {
        bucket.each(&wanted, |namespace| restore(&bucket, &home, namespace, &far, &mut report))
    });
    home.close().map_err(|error| Failure::User(format!("the store could not be closed: {error}")))?;
    report.problems.extend(restored?);
    report.asked = Some(bucket.asked());
    if arguments.bucket.json {
        write_json(&report, out)?
    } else {
        write_text(&report, out)?
    }
    if report.lost + report.refused > 0 { Err(Failure::Problems) } else { verdict(&report.problems) }
}

fn restore(
    bucket: &Bucket,
    home: &Home,
    namespace: NamespaceId,
    far: &AtomicU64,
    report: &mut Report,
) -> Result<(), ColdError> {
    let (tier, options) = (&bucket.tier, FetchOptions::default());
    let known = bucket.runtime.block_on(tier.manifest(namespace))?;
    // Oldest first, as prefixes were put.
    let mut packs: Vec<_> =
        known.manifest.packs.iter().map(|(pack, entry)| (entry.added_ms, *pack, entry)).collect();
    packs.sort_unstable_by_key(|(added_ms, pack, _)| (*added_ms, *pack));
    for (_, pack, entry) in packs {
        let index = match bucket.runtime.block_on(tier.index(namespace, pack)) {
            Ok(index) => index,
            Err(error) => {
                report.lost += u64::from(entry.blocks);
                report.why.get_or_insert_with(|| error.to_string());
                continue;
            }
        };
        for run in index.runs() {
            let run = &run.run;
            let wanted = Wanted {
                namespace,
                group: run.group,
                coordinate: run.coordinate,
                keys: run.blocks.iter().map(|block| block.key).collect(),
                durability: Durability::Durable,
            };
            let restored = restore_into(tier, home.store(), &wanted, &options);
            report.add(bucket.runtime.block_on(restored)?);
            far.fetch_add(run.payload_bytes().unwrap_or(0), Ordering::Relaxed);
        }
    }
    Ok(())
}

fn write_text(report: &Report, out: &mut dyn Write) -> Result<(), Failure> {
    writeln!(
        out,
        "{} blocks restored, every digest verified; {} were already stored; {} of unneeded data were read",
        grouped(report.stored),
        grouped(report.already_there),
        bytes(report.over_read_bytes)
    )?;
    if report.missing > 0 {
        writeln!(
            out,
            "{} blocks expired or were deleted from the bucket during the restore.",
            grouped(report.missing)
        )?;
    }
    if report.lost + report.refused > 0 {
        writeln!(
            out,
            "{} blocks were lost and {} were refused. The first cause: {}. Run kvarts cold fsck.",
            grouped(report.lost),
            grouped(report.refused),
            report.why.as_deref().unwrap_or("the reason is unknown")
        )?;
    }
    tell(&report.problems, out)
}
