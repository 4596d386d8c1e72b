//! Writes a checkpoint that counts where the ones there are do not, or speak of segments that are gone.

use std::collections::BTreeMap;
use std::io;

use kvarts_layout::format::checkpoint::{CheckpointHeader, CheckpointWriter, Items, SEGMENT_FREE};
use kvarts_layout::format::{PAGE_BYTES, Position};

use super::{Action, Knowledge, Site, quarantine};
use crate::checkpoint::{Known, Slot, path, read_slot};
use crate::findings::{self, Findings};
use crate::store::{Shard, Store};
use crate::window::Tally;

/// Makes the checkpoints of all shards good.
pub(super) fn fix(
    sites: &[Site],
    store: &Store,
    (knowledge, checkpoints): (&Knowledge, &BTreeMap<u32, Known>),
    moved: &[(u32, u32)],
    log: &mut Vec<Action>,
) {
    for shard in store.shards.iter().filter(|shard| shard.is_there) {
        let (Some(site), Some(known)) = (sites.get(shard.directory), checkpoints.get(&shard.number)) else {
            continue;
        };
        let read = || {
            let (mut found, tally) = (Findings::default(), Tally::default());
            let disk = &*site.disk;
            let seen =
                crate::checkpoint::read(disk, &store.keyring, shard.number, (&tally, false), &mut found);
            (seen.header, found)
        };
        let (header, found) = read();
        let not_read = [findings::MEDIA_ERROR, findings::FILE_UNREADABLE];
        let mut unread = found.problems.iter().filter(|finding| not_read.contains(&finding.label)).peekable();
        if unread.peek().is_some() {
            for slot in unread.filter_map(|finding| slot_of(finding.file.as_deref()?)) {
                let why = "the checkpoint cannot be read now, so the repair writes no checkpoint of this \
                    shard until all checkpoints can be read";
                site.cannot(log, &path(shard.number, slot), why);
            }
            continue;
        }
        // Deletes stand in checkpoints: none is given up, or written from an older one, on the word of one reading.
        let one_is_enough = kvarts_layout::planted!("repair-believes-one-reading");
        if !one_is_enough && (header != known.header || read() != (header, found.clone())) {
            site.cannot(log, &path(shard.number, 0), super::DIFFERS);
            continue;
        }
        let damaged: Vec<u32> = found
            .problems
            .iter()
            .filter(|finding| finding.label == findings::CHECKPOINT_DAMAGED)
            .filter_map(|finding| slot_of(finding.file.as_deref()?))
            .collect();
        for &slot in &damaged {
            quarantine::set_aside(site, &path(shard.number, slot), "the checkpoint is damaged", log);
        }
        let lost = known.segments.values().any(|state| {
            let is_there = shard.segments.binary_search(&state.segment).is_ok();
            let is_missed = state.state != SEGMENT_FREE && !is_there;
            is_missed || moved.contains(&(shard.number, state.segment))
        });
        let none_left = known.header.is_none() && !damaged.is_empty();
        if lost || none_left {
            rebuild(site, store, shard, (knowledge, known), moved, log);
        }
    }
}

fn slot_of(file: &str) -> Option<u32> {
    file.bytes().last().map(|digit| u32::from(digit == b'1'))
}

/// Writes the next checkpoint: what the newest whole one says, without the segments that are gone.
fn rebuild(
    site: &Site,
    store: &Store,
    shard: &Shard,
    (knowledge, known): (&Knowledge, &Known),
    moved: &[(u32, u32)],
    log: &mut Vec<Action>,
) {
    let newest = known.header.map(|header| header.position.segment);
    let slot = newest.map_or(0, |newest| 1 - newest.min(1));
    let last = knowledge.last_sequence.get(&shard.number).copied().unwrap_or(0);
    let before = known.header.map_or(0, |header| header.next_sequence);
    let header = CheckpointHeader {
        position: Position {
            store: store.keyring.store,
            shard: shard.number,
            segment: slot,
            generation: known.sequence().saturating_add(1),
            offset: 0,
        },
        created_ms: known.header.map_or(0, |header| header.created_ms),
        next_sequence: before.max(last.saturating_add(1)),
    };
    let is_there = |segment: u32| {
        shard.segments.binary_search(&segment).is_ok() && !moved.contains(&(shard.number, segment))
    };
    let file = path(shard.number, slot);
    let what = "a checkpoint with the verified state is written".to_owned();
    site.act(log, (&file, what), |writer| {
        let mut images = CheckpointWriter::new(&header, &store.keyring.secret);
        let first = images.header().map_err(io::Error::other)?;
        let mut at = PAGE_BYTES;
        let mut failed = None;
        if let Some(newest) = newest {
            let tally = Tally::default();
            let seen = read_slot(&*site.disk, &store.keyring, (shard.number, newest), &tally, &mut |items| {
                let Some(items) = kept(items, &is_there) else { return };
                let image = images.chunk(&items).map_err(io::Error::other);
                let written = image.and_then(|image| {
                    writer.write_at(&file, at, &image)?;
                    at = at.saturating_add(image.len() as u64);
                    Ok(())
                });
                failed = failed.take().or(written.err());
            });
            if !matches!(seen, Slot::Whole(_)) {
                return Err(io::Error::other(
                    "the checkpoint was valid at first, but a second read of it \
                    failed: check the disk, then run the repair again",
                ));
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        let end = images.end().map_err(io::Error::other)?;
        writer.write_at(&file, at, &end)?;
        writer.set_len(&file, at.saturating_add(end.len() as u64))?;
        writer.sync(&file)?;
        writer.write_at(&file, 0, &first)?;
        writer.sync(&file)?;
        writer.sync_folder(&kvarts_layout::format::names::shard_name(shard.number))
    });
}

/// The items of a chunk that speak of what is there; `None` if there are none.
fn kept(items: Items, is_there: &dyn Fn(u32) -> bool) -> Option<Items> {
    Some(match items {
        Items::Segments(mut states) => {
            states.retain(|state| is_there(state.segment));
            if states.is_empty() {
                return None;
            }
            Items::Segments(states)
        }
        Items::Records(mut records) => {
            records.retain(|record| is_there(record.segment));
            if records.is_empty() {
                return None;
            }
            Items::Records(records)
        }
        other => other,
    })
}
