//! What a repair must leave: a store in order, in which a second repair finds nothing to do.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvarts_contract::error::Reason;
use kvarts_fsck::check::Options as CheckOptions;
use kvarts_fsck::disk::{MemoryDisk, Step};
use kvarts_fsck::repair::{Site, repair};
use kvarts_fsck::window::Tally as Bytes;
use kvarts_layout::format::Structure;
use kvarts_layout::format::seal::claimed_structure;

use super::stores::{Answers, Prepared, look};
use crate::witness::problems;

/// Repairs a store; a second repair finds nothing to do.
pub(super) fn put_right(disks: &[MemoryDisk]) -> Result<(), String> {
    let site =
        |disk: &MemoryDisk| Site { disk: Arc::new(disk.clone()), writer: Some(Arc::new(disk.clone())) };
    let sites: Vec<Site> = disks.iter().map(site).collect();
    let options = CheckOptions { threads: 1, ..CheckOptions::default() };
    repair(&sites, &options, &Bytes::default()).map_err(|why| why.to_string())?;
    disks.iter().try_for_each(in_order)?;
    let again = repair(&sites, &options, &Bytes::default()).map_err(|why| why.to_string())?;
    let open: Vec<_> = again.actions.iter().filter(|action| action.failed.is_none()).collect();
    if open.is_empty() { Ok(()) } else { Err(format!("repaired twice: {open:?}")) }
}

/// What a trailer names is durable before it.
fn in_order(disk: &MemoryDisk) -> Result<(), String> {
    let mut unsynced = BTreeSet::new();
    for step in disk.steps() {
        match step {
            Step::Write(path, at, bytes) => {
                let trailer = claimed_structure(&bytes) == Some(Structure::Trailer);
                if trailer && unsynced.contains(&path) {
                    return Err(format!("{path}: what the trailer at {at} names is not durable before it"));
                }
                unsynced.insert(path);
            }
            Step::Sync(path) => drop(unsynced.remove(&path)),
            _ => {}
        }
    }
    Ok(())
}

/// A repaired store is clean, opens, serves what it served before and nothing half. Only blocks of records that the
/// checker has counted as lost may go.
pub(super) fn repaired(
    store: &Prepared,
    disks: &[MemoryDisk],
    before: &Answers,
    doomed: u64,
) -> Result<(), String> {
    put_right(disks).map_err(|why| format!("repair: {why}"))?;
    let checked = look(disks).map_err(|why| format!("after repair: {why}"))?;
    if !checked.findings.is_clean() {
        return Err(format!("after repair it is not clean: {}", problems(&checked)));
    }
    let (after, _) = store.ask(disks).map_err(|why| format!("after repair: {why}"))?;
    let mut dropped = Vec::new();
    for (name, answer) in &after.blocks {
        match (&before.blocks[name], answer) {
            (_, Err(reason)) if !matches!(reason, Reason::NotHere(_)) => {
                return Err(format!("after repair {name:?} is half there: {reason}"));
            }
            // What came back with a damaged tombstone may go again with it.
            (Ok(_), Err(_)) if store.sound.blocks[name].is_ok() => dropped.push(*name),
            _ => {}
        }
    }
    let within = dropped.len() as u64 <= doomed;
    if within { Ok(()) } else { Err(format!("repair has dropped {dropped:?}, which were good")) }
}
