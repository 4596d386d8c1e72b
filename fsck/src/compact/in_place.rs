//! Compaction in place: new segments beside the old ones, and then the old ones go.
//!
//! The order, again and again until all is done: records are written into new segments; these are sealed, every byte
//! durable; each shard's checkpoint says that the old segments are free and what had been deleted; the old files are
//! removed, and their removal is made durable. Only a checkpoint after that may forget a tombstone.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvarts_layout::format::checkpoint::{RecordState, SEGMENT_FREE, SEGMENT_SEALED, SegmentState};
use kvarts_layout::format::names::shard_name;

use super::discard::Discard;
use super::graves::Graves;
use super::inventory::{Inventory, Role, Segment, path};
use super::plan::{Group, Plan};
use super::sink::{Sink, Start, Statement, write_checkpoint};
use super::source::{Made, Reader, shard_of};
use super::{Options, Progress, Refusal, Report};
use crate::disk::DiskWriter;
use crate::store::Store;

/// A directory that may be changed, and how many more bytes may be written there before any are given back.
#[derive(Clone, Debug)]
pub struct Place {
    /// The right to change it; not used in a dry run.
    pub writer: Arc<dyn DiskWriter>,
    /// Bytes.
    pub room_bytes: u64,
}

/// One shard under way.
struct Shard {
    sink: Sink,
    directory: usize,
    /// Where the newest checkpoint lies, and its sequence.
    slot: Option<u32>,
    sequence: u64,
    /// New segments that a checkpoint knows.
    stated: usize,
    /// What the newest checkpoint says is deleted.
    graves: Graves,
}

struct Work<'a> {
    store: &'a Store,
    inventory: &'a Inventory,
    options: &'a Options,
    places: &'a [Place],
    shards: Vec<Shard>,
    room: Vec<u64>,
    /// By segment: groups with a block in it that have not been written.
    waiting: Vec<u32>,
    /// By segment: whether it is to go, and whether it has gone.
    chosen: Vec<bool>,
    gone: Vec<bool>,
}

/// Compacts a sound store where it is. `places` are its directories in the order of the survey.
pub fn in_place(
    store: &Store,
    places: &[Place],
    options: &Options,
    progress: &Progress,
) -> Result<Report, Refusal> {
    let segment_bytes = store.keyring.segment_bytes;
    let inventory = Inventory::take(store, options.now_ms, options.threads)?;
    let mut report = Report::of(&inventory, options, segment_bytes);
    let mut reader = Reader::new(store, &inventory, options)?;
    let pays = if options.zstd_after_s.is_some() {
        reader.probe().map_err(Refusal::before_writing)?
    } else {
        Vec::new()
    };
    let plan = Plan::in_place(&inventory, options, (segment_bytes, &pays));
    progress.planned.store(plan.bytes, Ordering::Relaxed);
    report.records_merged = plan.merged;
    let pretend = |place: &Place| Place { writer: Arc::new(Discard), room_bytes: place.room_bytes };
    let pretended: Vec<Place> = places.iter().map(pretend).collect();
    let places = if options.dry_run { &pretended } else { places };
    let mut work = Work::new(store, &inventory, options, places, &plan)?;
    for group in &plan.groups {
        let made = reader.make(&plan, group)?;
        report.count(&made);
        work.write(&plan, group, made, progress)?;
    }
    work.let_go()?;
    work.forget()?;
    report.bytes_read = reader.bytes_read;
    report.bytes_written = work.shards.iter().map(|shard| shard.sink.bytes_written).sum();
    report.graves_after = work.shards.iter().map(|shard| shard.graves.len()).sum();
    let left = work.gone.iter().filter(|gone| !**gone).count() as u64;
    let made: usize = work.shards.iter().map(|shard| shard.sink.sealed.len()).sum();
    report.segments_after = left.saturating_add(made as u64);
    Ok(report)
}

impl<'a> Work<'a> {
    fn new(
        store: &'a Store,
        inventory: &'a Inventory,
        options: &'a Options,
        places: &'a [Place],
        plan: &Plan,
    ) -> Result<Self, Refusal> {
        let mut shards = Vec::new();
        for (at, (shard, state)) in store.shards.iter().zip(&inventory.shards).enumerate() {
            let place = places.get(shard.directory);
            let place =
                place.ok_or_else(|| Refusal::Cannot("a directory of the store was not given".to_owned()))?;
            let files = inventory.segments.iter().filter(|one| one.shard == at).map(|one| one.number);
            let last = files.chain(state.known.segments.keys().copied()).max();
            let next = last.map_or(0, |last| last.saturating_add(1));
            let start = Start { shard: shard.number, next_number: next, sequence: state.next_sequence };
            shards.push(Shard {
                sink: Sink::new(Arc::clone(&place.writer), &store.keyring, start, options.now_ms),
                directory: shard.directory,
                slot: state.known.header.map(|header| header.position.segment),
                sequence: state.known.sequence(),
                stated: 0,
                graves: state.graves.clone(),
            });
        }
        let mut waiting = vec![0u32; inventory.segments.len()];
        for group in &plan.groups {
            for segment in segments_of(inventory, plan, group) {
                if let Some(waiting) = waiting.get_mut(segment) {
                    *waiting = waiting.saturating_add(1);
                }
            }
        }
        Ok(Self {
            store,
            inventory,
            options,
            places,
            shards,
            room: places.iter().map(|place| place.room_bytes).collect(),
            waiting,
            chosen: plan.chosen.clone(),
            gone: vec![false; inventory.segments.len()],
        })
    }

    /// Writes one record, making room before if it needs another segment.
    fn write(&mut self, plan: &Plan, group: &Group, made: Made, progress: &Progress) -> Result<(), Refusal> {
        let segments = segments_of(self.inventory, plan, group);
        let first = segments.first().and_then(|at| self.inventory.segments.get(*at));
        let mut shard = first.map_or(0, |segment| segment.shard);
        if group.len() > 1 {
            // Merged, it belongs where the engine would put it.
            let count = u32::try_from(self.shards.len()).unwrap_or(1);
            let number = made.blocks.blocks.first().map_or(0, |name| shard_of(&name.key, count));
            shard = self.store.shards.iter().position(|one| one.number == number).unwrap_or(shard);
        }
        let whole = self.store.keyring.segment_bytes;
        let needs = |work: &Self| {
            let one = work.shards.get(shard);
            one.is_some_and(|one| one.sink.needs_segment(&work.inventory.spaces, &made))
        };
        let directory = self.shards.get(shard).map_or(0, |one| one.directory);
        let free = |work: &Self| work.room.get(directory).copied().unwrap_or(0);
        if needs(self) && free(self) < whole {
            self.let_go()?;
            if free(self) < whole {
                let name = self.store.directories.get(directory).map(|one| one.disk.name());
                return Err(Refusal::NoRoom(name.unwrap_or_default(), free(self), whole));
            }
        }
        let Some(one) = self.shards.get_mut(shard) else { return Ok(()) };
        let (before, begun) = (one.sink.bytes_written, one.sink.begun());
        one.sink.write(&self.inventory.spaces, made)?;
        progress.add(one.sink.bytes_written.saturating_sub(before));
        let new = (one.sink.begun().saturating_sub(begun) as u64).saturating_mul(whole);
        if let Some(room) = self.room.get_mut(directory) {
            *room = room.saturating_sub(new);
        }
        for segment in segments {
            if let Some(waiting) = self.waiting.get_mut(segment) {
                *waiting = waiting.saturating_sub(1);
            }
        }
        Ok(())
    }

    /// Seals what is being written and lets go of the segments that nothing depends on any more.
    fn let_go(&mut self) -> Result<(), Refusal> {
        // All of them first: a segment's blocks may have gone into other shards.
        for shard in &mut self.shards {
            shard.sink.seal()?;
        }
        for at in 0..self.shards.len() {
            let going: Vec<usize> = self.going(at);
            let Some(shard) = self.shards.get(at) else { continue };
            if going.is_empty() && shard.stated == shard.sink.sealed.len() {
                continue;
            }
            let floor = self.floor(at, &[]);
            self.checkpoint(at, &going, floor)?;
            self.remove(at, &going)?;
        }
        Ok(())
    }

    /// Segments of a shard whose files may go.
    fn going(&self, shard: usize) -> Vec<usize> {
        let all = self.inventory.segments.iter().enumerate();
        let may = |(at, segment): &(usize, &Segment)| {
            let is_done = self.chosen.get(*at) == Some(&true) && self.waiting.get(*at) == Some(&0);
            segment.shard == shard
                && self.gone.get(*at) == Some(&false)
                && (segment.role == Role::Free || (is_done && segment.role != Role::Fixed))
        };
        all.filter(may).map(|(at, _)| at).collect()
    }

    /// No record in the files of a shard has a lower sequence, when these are gone.
    fn floor(&self, shard: usize, without: &[usize]) -> u64 {
        let all = self.inventory.segments.iter().enumerate();
        let there = all.filter(|(at, segment)| {
            let is_there = self.gone.get(*at) == Some(&false) && !without.contains(at);
            segment.shard == shard && is_there && segment.generation > 0
        });
        there.map(|(_, segment)| segment.first_sequence).min().unwrap_or(u64::MAX)
    }

    fn checkpoint(&mut self, at: usize, going: &[usize], floor: u64) -> Result<(), Refusal> {
        let (Some(state), Some(number)) =
            (self.inventory.shards.get(at), self.store.shards.get(at).map(|shard| shard.number))
        else {
            return Ok(());
        };
        let mut segments = Vec::new();
        let mut records: Vec<RecordState> = Vec::new();
        let free = |segment: u32, generation: u64| SegmentState {
            generation,
            first_sequence: 0,
            last_sequence: 0,
            log_end: 0,
            segment,
            state: SEGMENT_FREE,
        };
        let here = || self.inventory.segments.iter().enumerate().filter(|(_, segment)| segment.shard == at);
        for (place, segment) in here() {
            let leaves = self.gone.get(place) == Some(&true) || going.contains(&place);
            match (segment.role, leaves) {
                // One that was never used is no loss.
                (_, true) if segment.generation == 0 => {}
                (_, true) | (Role::Free, _) => segments.push(free(segment.number, segment.generation)),
                (role, false) => {
                    let sealed = SegmentState {
                        state: SEGMENT_SEALED,
                        first_sequence: segment.first_sequence,
                        last_sequence: segment.first_sequence,
                        ..free(segment.number, segment.generation)
                    };
                    let known = state.stated(segment);
                    segments.extend(known.or((role == Role::Sealed).then_some(sealed)));
                    records.extend(state.records_in(segment));
                }
            }
        }
        // Numbers whose files had gone before.
        let known = state.known.segments.values();
        segments.extend(known.filter(|one| here().all(|(_, segment)| segment.number != one.segment)));
        let Some(shard) = self.shards.get_mut(at) else { return Ok(()) };
        segments.extend(&shard.sink.sealed);
        records.extend(&shard.sink.records);
        shard.graves = shard.graves.above(floor);
        let slot = shard.slot.map_or(0, |newest| 1u32.saturating_sub(newest));
        let sequence = shard.sequence.saturating_add(1);
        let Some(place) = self.places.get(shard.directory) else { return Ok(()) };
        let statement =
            Statement { segments, records, graves: &shard.graves, next_sequence: shard.sink.sequence };
        let position = self.store.keyring.position(number, slot).under(sequence);
        write_checkpoint(&*place.writer, &self.store.keyring, position, self.options.now_ms, statement)?;
        (shard.slot, shard.sequence, shard.stated) = (Some(slot), sequence, shard.sink.sealed.len());
        Ok(())
    }

    fn remove(&mut self, at: usize, going: &[usize]) -> Result<(), Refusal> {
        let (Some(shard), Some(number)) =
            (self.shards.get(at), self.store.shards.get(at).map(|shard| shard.number))
        else {
            return Ok(());
        };
        let Some(place) = self.places.get(shard.directory) else { return Ok(()) };
        for &segment in going {
            if let Some(file) = self.inventory.segments.get(segment) {
                place.writer.remove(&path(self.store, file))?;
            }
        }
        place.writer.sync_folder(&shard_name(number))?;
        for &segment in going {
            if let Some(gone) = self.gone.get_mut(segment) {
                *gone = true;
            }
            if let Some(room) = self.room.get_mut(shard.directory) {
                *room = room.saturating_add(self.store.keyring.segment_bytes);
            }
        }
        Ok(())
    }

    /// Forgets the deletes that no segment is left for.
    fn forget(&mut self) -> Result<(), Refusal> {
        for at in 0..self.shards.len() {
            let floor = self.floor(at, &[]);
            let Some(shard) = self.shards.get(at) else { continue };
            if shard.graves.above(floor) != shard.graves {
                self.checkpoint(at, &[], floor)?;
            }
        }
        Ok(())
    }
}

/// The segments that a group's pieces lie in, each once.
fn segments_of(inventory: &Inventory, plan: &Plan, group: &Group) -> Vec<usize> {
    let pieces = plan.pieces.get(group.clone()).unwrap_or_default();
    let segment = |record: u32| inventory.records.get(record as usize).map(|held| held.segment as usize);
    let mut all: Vec<usize> = Vec::new();
    for at in pieces.iter().filter_map(|piece| segment(piece.record)) {
        if !all.contains(&at) {
            all.push(at);
        }
    }
    all
}
