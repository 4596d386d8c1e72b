//! What a repair must leave: a store in order, in which a second repair finds nothing to do.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvarts_contract::error::Reason;
use kvarts_fsck::check::Options as CheckOptions;
use kvarts_fsck::disk::{MemoryDisk, Step};
use kvarts_fsck::findings::Finding;
use kvarts_fsck::repair::{Action, Site, repair};
use kvarts_fsck::window::Tally as Bytes;
use kvarts_layout::format::Structure;
use kvarts_layout::format::seal::claimed_structure;

use super::stores::{Answers, Place, Prepared, look};
use crate::flaky::Flaky;
use crate::witness::problems;

/// Why damage stays that cannot be taken out without sound blocks.
const ENTWINED: &str = "share all of their pages with intact blocks";

/// Repairs a store; a second repair finds nothing to do. Gives what was left, with why. Of a place that is `misread` the
/// first two readings are wrong.
pub(super) fn put_right(disks: &[MemoryDisk], misread: Option<&Place>) -> Result<Vec<Action>, String> {
    let site = |(at, disk): (usize, &MemoryDisk)| -> Site {
        let writer = Some(Arc::new(disk.clone()) as _);
        match misread.filter(|place| place.0 == at) {
            Some((_, path, offset)) => Site { disk: Arc::new(Flaky::new(disk, path, *offset, 2)), writer },
            None => Site { disk: Arc::new(disk.clone()), writer },
        }
    };
    let sites: Vec<Site> = disks.iter().enumerate().map(site).collect();
    let options = CheckOptions { threads: 1, ..CheckOptions::default() };
    let repaired = |sites: &[Site]| repair(sites, &options, &Bytes::default()).map_err(|why| why.to_string());
    repaired(&sites)?;
    disks.iter().try_for_each(in_order)?;
    let again = repaired(&sites)?.actions;
    match again.iter().find(|action| action.failed.is_none()) {
        Some(action) => Err(format!("repaired twice: {action}")),
        None => Ok(again),
    }
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

/// A repaired store opens, serves every block that it served before and nothing half. It is clean, but for damaged blocks that
/// share their pages with sound ones, and a repair says which these are.
pub(super) fn repaired(
    store: &Prepared,
    disks: &[MemoryDisk],
    before: &Answers,
    misread: Option<&Place>,
) -> Result<(), String> {
    let left = put_right(disks, misread).map_err(|why| format!("repair: {why}"))?;
    let checked = look(disks).map_err(|why| format!("after repair: {why}"))?;
    let is_told = |finding: &Finding| {
        let (Some(shard), Some(segment)) = (finding.place.shard, finding.place.segment) else { return false };
        let path = format!("shard-{shard:04}/segment-{segment:08}");
        let told = |action: &&Action| action.failed.as_ref().is_some_and(|why| why.contains(ENTWINED));
        finding.label.name == "listed-payload-damaged"
            && left.iter().filter(told).any(|action| action.file.ends_with(&path))
    };
    if !checked.findings.problems.iter().all(is_told) {
        return Err(format!("after repair it is not clean: {}", problems(&checked)));
    }
    let (after, _) = store.ask(disks).map_err(|why| format!("after repair: {why}"))?;
    let mut dropped = Vec::new();
    for (name, answer) in &after.blocks {
        match (&before.blocks[name], answer) {
            // One that was damaged and could not be taken out alone is damaged still.
            (Err(_), Err(Reason::Digest { .. })) if !left.is_empty() => {}
            (_, Err(reason)) if !matches!(reason, Reason::NotHere(_)) => {
                return Err(format!("after repair {name:?} is half there: {reason}"));
            }
            // What came back with a damaged tombstone may go again with it.
            (Ok(_), Err(_)) if store.sound.blocks[name].is_ok() => dropped.push(*name),
            _ => {}
        }
    }
    if dropped.is_empty() {
        Ok(())
    } else {
        Err(format!("repair has dropped {dropped:?}, which were served"))
    }
}
