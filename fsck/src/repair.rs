//! Puts a damaged store right, as far as what is good in it goes.
//!
//! What is done: superblock slots are written from the other slot, or from what segments and folders prove; a segment
//! whose ends or footer do not tell what counts in it is sealed again with what does; a definition that was damaged is
//! written from its copy in another segment; padding is zeroed; damaged blocks beside sound ones become holes; files
//! that prove nothing, or belong elsewhere, are moved into the folder `quarantine`, and one that belongs to a place that
//! is empty is moved there.
//!
//! Invariants:
//! - Nothing is invented: every byte written follows from bytes that were proven, or is zero by the format.
//! - No good record is dropped: the new listing has every record that proves itself and of which a block matches. Nor is a
//!   sound block: what is damaged and shares every page with one stays, a miss that each check names.
//! - Nothing of a segment is given up that two readings of it do not say alike.
//! - A power cut leaves a store that is no worse. Records are never written over; a footer goes where the old one is
//!   not, if there is room, and is durable before the trailer that names it; a segment between the two is one that a
//!   scan understands. Names are changed one at a time.
//! - Repairing what is repaired changes nothing.

mod checkpoints;
mod quarantine;
mod segments;
mod superblocks;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use kvarts_layout::format::footer::Content;
use kvarts_layout::format::names::SUPERBLOCK;
use kvarts_layout::format::record::Body;

use crate::check::{Level, Options, Outcome, SegmentReport};
use crate::disk::{Disk, DiskWriter, Node, NodeKind};
use crate::findings::Findings;
use crate::store::{CannotRun, Store, survey};
use crate::walk::Met;
use crate::window::Tally;

/// One thing that is put right, or cannot be.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct Action {
    /// Where: a file, or a folder.
    pub file: String,
    /// What is done.
    pub what: String,
    /// Why it cannot be done; then nothing was.
    pub failed: Option<String>,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown =
            |text: &str| text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>();
        write!(f, "{}: {}", shown(&self.file), shown(&self.what))?;
        match &self.failed {
            Some(why) => write!(f, " NOT DONE: {}", shown(why)),
            None => Ok(()),
        }
    }
}

/// A directory to be repaired. Without a writer nothing is done and everything is said: a dry run.
#[derive(Clone, Debug)]
pub struct Site {
    /// Its files.
    pub disk: Arc<dyn Disk>,
    /// The right to change them.
    pub writer: Option<Arc<dyn DiskWriter>>,
}

impl Site {
    /// Does something, or says that it would.
    fn act(
        &self,
        log: &mut Vec<Action>,
        (file, what): (&str, String),
        act: impl FnOnce(&dyn DiskWriter) -> io::Result<()>,
    ) -> bool {
        let failed = match &self.writer {
            Some(writer) => act(&**writer).err().map(|error| error.to_string()),
            None => None,
        };
        let done = failed.is_none();
        log.push(Action { file: format!("{}/{file}", self.disk.name()), what, failed });
        done
    }

    /// Says what cannot be done.
    fn cannot(&self, log: &mut Vec<Action>, file: &str, why: &str) {
        let file = format!("{}/{file}", self.disk.name());
        log.push(Action { file, what: "is left unchanged".to_owned(), failed: Some(why.to_owned()) });
    }
}

/// What a repair did, or would do.
#[derive(Clone, Debug, Default)]
pub struct Repaired {
    /// In the order in which it was done.
    pub actions: Vec<Action>,
}

/// What all segments of a store say together: what one has lost another may still have.
#[derive(Debug, Default)]
struct Knowledge {
    /// Canonical encodings by the id that is their hash.
    definitions: BTreeMap<[u8; 32], Vec<u8>>,
    /// Segments that have problems: index of the shard, number.
    damaged: Vec<(usize, u32)>,
    /// When the first known generation of any segment began.
    created_ms: Option<u64>,
    /// The highest sequence of each shard.
    last_sequence: BTreeMap<u32, u64>,
}

impl Knowledge {
    fn take(&mut self, shard: usize, number: u32, report: &SegmentReport) {
        let records: Vec<&Met> = report.outcome.records().collect();
        for met in &records {
            if let Some(Body::Identity(definition) | Body::Spec(definition)) = &met.body {
                self.definitions.entry(definition.id).or_insert_with(|| definition.canonical.clone());
            }
        }
        let mut last = records.iter().map(|met| met.prefix.sequence).max().unwrap_or(0);
        match &report.outcome {
            Outcome::Walked { scanned, .. } => last = last.max(scanned.last_sequence),
            Outcome::Sealed { footer, .. } => {
                last = last.max(footer.records.last().map_or(0, |entry| entry.sequence));
            }
            _ => {}
        }
        let Some(ends) = &report.ends else { return };
        let known = self.last_sequence.entry(ends.position.shard).or_default();
        *known = last.max(*known);
        if let Ok(header) = &ends.header {
            let first = self.created_ms.unwrap_or(u64::MAX);
            self.created_ms = Some(first.min(header.created_ms));
        }
        if !report.findings.is_clean() {
            self.damaged.push((shard, number));
        }
    }
}

/// Why nothing is done where two readings are not alike.
const DIFFERS: &str = "two reads returned different bytes: the device, its connection or the memory is \
    faulty, so the repair discards nothing";

/// Rounds of a repair: what one puts right may show what else there is, as a file that came back to its place.
const ROUNDS_MAX: usize = 4;

/// Why nothing can be repaired here: no store, or one that only another program may change. Writes nothing, so a caller
/// asks before it takes the right to write.
pub fn refused(sites: &[Site]) -> Result<(), CannotRun> {
    match look(sites) {
        // A superblock that is no plain file is moved aside: what it stands for is proven by the segments, or is not.
        Err(CannotRun::Refused(_)) if sites.iter().any(|site| has_odd_superblock(&*site.disk)) => Ok(()),
        looked => looked.map(drop),
    }
}

fn has_odd_superblock(disk: &dyn Disk) -> bool {
    let mut odd = false;
    let see = &mut |node: Node| odd |= node.name == SUPERBLOCK && node.kind != NodeKind::File;
    disk.visit("", see).is_ok() && odd
}

/// Repairs a store as far as it can be, or says what a repair would do.
pub fn repair(sites: &[Site], options: &Options, tally: &Tally) -> Result<Repaired, CannotRun> {
    refused(sites)?;
    let mut all = Repaired::default();
    let for_show = sites.iter().any(|site| site.writer.is_none());
    for _ in 0..if for_show { 1 } else { ROUNDS_MAX } {
        let round = one_round(sites, options, tally)?;
        let done = round.actions.iter().all(|action| action.failed.is_some());
        let new = |action: &Action| !all.actions.contains(action);
        let more: Vec<Action> = round.actions.into_iter().filter(new).collect();
        all.actions.extend(more);
        if done {
            break;
        }
    }
    Ok(all)
}

fn one_round(sites: &[Site], options: &Options, tally: &Tally) -> Result<Repaired, CannotRun> {
    let mut log = Vec::new();
    // What lies in the wrong place goes first: the survey after it sees the store without it.
    quarantine::odd_names(sites, &mut log);
    let Some(store) = look(sites)? else { return Ok(Repaired { actions: log }) };
    let (knowledge, checkpoints) = learn(&store, options, tally);
    superblocks::fix(sites, &store, &knowledge, &mut log);
    let (mut moved, mut outdated) = (Vec::new(), Vec::new());
    for &(shard, segment) in &knowledge.damaged {
        let Some(shard) = store.shards.get(shard) else { continue };
        let Some(site) = sites.get(shard.directory) else { continue };
        let known = checkpoints.get(&shard.number).and_then(|known| known.segments.get(&segment));
        let case = segments::Case { site, store: &store, shard, segment, known, knowledge: &knowledge };
        match case.fix(tally, &mut log) {
            segments::Fixed::Moved => moved.push((shard.number, segment)),
            segments::Fixed::InPlace if case.is_behind(tally) => outdated.push((shard.number, segment)),
            segments::Fixed::InPlace | segments::Fixed::Left => {}
        }
    }
    quarantine::restore(sites, &store, &moved, &mut log);
    // Of what went back to an earlier generation, the checkpoint knows as little as of what is gone.
    moved.append(&mut outdated);
    checkpoints::fix(sites, &store, (&knowledge, &checkpoints), &moved, &mut log);
    Ok(Repaired { actions: log })
}

fn look(sites: &[Site]) -> Result<Option<Store>, CannotRun> {
    let disks: Vec<Arc<dyn Disk>> = sites.iter().map(|site| Arc::clone(&site.disk)).collect();
    survey(&disks, &mut Findings::default())
}

/// Reads everything once.
fn learn(
    store: &Store,
    options: &Options,
    tally: &Tally,
) -> (Knowledge, BTreeMap<u32, crate::checkpoint::Known>) {
    let options = Options { level: Level::Full, live: false, ..options.clone() };
    let knowledge = Mutex::new(Knowledge::default());
    let stated = crate::check::each_segment(store, &options, tally, &|shard, number, report| {
        knowledge.lock().unwrap_or_else(PoisonError::into_inner).take(shard, number, report);
    });
    let mut knowledge = knowledge.into_inner().unwrap_or_else(PoisonError::into_inner);
    knowledge.damaged.sort_unstable();
    (knowledge, stated.known)
}

/// Whether an entry of a footer is a definition, and of which id.
fn defined(content: &Content) -> Option<(bool, u32, [u8; 32])> {
    match content {
        Content::Spec(defined) => Some((true, defined.local, defined.id)),
        Content::Identity(defined) => Some((false, defined.local, defined.id)),
        _ => None,
    }
}

#[cfg(test)]
pub(crate) mod tests;
