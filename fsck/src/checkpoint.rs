//! The two checkpoint files of a shard: which one counts, and whether the other is what a crash may leave.
//!
//! A checkpoint's header is written last, after everything behind it is durable, and never into the file that holds
//! the newest whole one. So: a header is sound or zero; what follows the header of the newest is whole; what follows
//! an older header may be half of the next attempt.

use std::collections::BTreeMap;
use std::io;

use kvarts_layout::format::checkpoint::{
    CheckpointHeader, CheckpointReader, Chunk, Items, SegmentState, Totals,
};
use kvarts_layout::format::names::{checkpoint_name, shard_name};
use kvarts_layout::format::{PAGE, PAGE_BYTES, Position, Unsound};

use crate::disk::{Disk, DiskFile};
use crate::findings::{self, Finding, Findings, Label, Place};
use crate::segment::Keyring;
use crate::window::{Tally, Window};

/// A record that a checkpoint lists: segment, generation, page of its header.
pub type Listed = (u32, u64, u32);

/// What the newest whole checkpoint of a shard knows.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Known {
    /// Its header and file, if there is one.
    pub header: Option<CheckpointHeader>,
    /// What it has.
    pub totals: Totals,
    /// The segments, by number.
    pub segments: BTreeMap<u32, SegmentState>,
    /// How many live records it lists in a segment.
    pub listed: BTreeMap<u32, u64>,
    /// The records, in order, if they were asked for.
    pub records: Vec<Listed>,
    /// Files that do not hold a whole checkpoint, though they are there.
    pub broken: Vec<u32>,
}

/// One of the two files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Slot {
    /// There is no such file, or nothing is in it.
    Absent,
    /// It begins with zeros.
    Headless,
    /// It is whole.
    Whole(CheckpointHeader),
    /// A newer program wrote it.
    Newer(u16),
    /// Its header is not sound.
    BadHeader(Unsound),
    /// Its header is sound and something behind it is not: where, and what.
    BadChunk(CheckpointHeader, u64, Unsound),
    /// It cannot be opened.
    Unreadable(String),
    /// The device gives nothing for a page of it: where. Whether it counts is not known.
    Media(u64),
}

/// The path of a checkpoint file.
pub fn path(shard: u32, slot: u32) -> String {
    format!("{}/{}", shard_name(shard), checkpoint_name(slot))
}

/// Reads one file from front to back, handing out everything that it says. What was handed out counts only if the
/// answer is [`Slot::Whole`].
pub fn read_slot(
    disk: &dyn Disk,
    keyring: &Keyring,
    (shard, slot): (u32, u32),
    tally: &Tally,
    each: &mut dyn FnMut(Items),
) -> Slot {
    match disk.open(&path(shard, slot)) {
        Ok(file) => read_file(&*file, keyring, (shard, slot), tally, each),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Slot::Absent,
        Err(error) => Slot::Unreadable(error.to_string()),
    }
}

fn read_file(
    file: &dyn DiskFile,
    keyring: &Keyring,
    (shard, slot): (u32, u32),
    tally: &Tally,
    each: &mut dyn FnMut(Items),
) -> Slot {
    let end = file.len() - file.len() % PAGE_BYTES;
    if end == 0 {
        return Slot::Absent;
    }
    let mut window = Window::new(file, end, tally);
    let seen = read_chunks(&mut window, keyring, (shard, slot), each);
    match window.faults().first() {
        // Pages that were not read are not called damaged.
        Some(&(from, _)) if !matches!(seen, Slot::Whole(_)) => Slot::Media(from),
        _ => seen,
    }
}

fn read_chunks(
    window: &mut Window<'_>,
    keyring: &Keyring,
    (shard, slot): (u32, u32),
    each: &mut dyn FnMut(Items),
) -> Slot {
    let place = Position { store: keyring.store, shard, segment: slot, generation: 0, offset: 0 };
    let header = match CheckpointHeader::decode(window.bytes(0, PAGE), &place, &keyring.secret) {
        Ok(header) => header,
        Err(Unsound::Empty) => return Slot::Headless,
        Err(Unsound::Newer { version }) => return Slot::Newer(version),
        Err(unsound) => return Slot::BadHeader(unsound),
    };
    let mut reader = CheckpointReader::new(&header, &keyring.secret);
    loop {
        let offset = reader.offset();
        let chunk = match reader.chunk_bytes(window.bytes(offset, PAGE)) {
            Ok(bytes) => reader.chunk(window.bytes(offset, bytes)),
            Err(unsound) => Err(unsound),
        };
        match chunk {
            Ok(Chunk::Items(items)) => each(items),
            Ok(Chunk::End(_)) => return Slot::Whole(header),
            Err(unsound) => return Slot::BadChunk(header, offset, unsound),
        }
    }
}

/// Reads both files and says what the newest whole one knows.
pub fn read(
    disk: &dyn Disk,
    keyring: &Keyring,
    shard: u32,
    (tally, records): (&Tally, bool),
    into: &mut Findings,
) -> Known {
    let mut newest = Known::default();
    let mut slots = Vec::new();
    for slot in 0..2 {
        let mut known = Known::default();
        let seen = read_slot(disk, keyring, (shard, slot), tally, &mut |items| known.take(items, records));
        if let Slot::Whole(header) = &seen {
            known.header = Some(*header);
            if newest.sequence() < known.sequence() {
                newest = known;
            }
        }
        slots.push(seen);
    }
    newest.records.sort_unstable();
    for (slot, seen) in (0u32..).zip(&slots) {
        let other = slots.get(1usize.saturating_sub(slot as usize)).unwrap_or(&Slot::Absent);
        if let Some((label, offset, why)) = judge(seen, other) {
            let place = Place { shard: Some(shard), segment: None, offset: Some(offset) };
            let finding = Finding::of(label, format!("{}/{}", disk.name(), path(shard, slot)));
            into.take(Finding { place, ..finding.found(why) });
            newest.broken.push(slot);
        }
    }
    newest
}

/// What to say of a file that does not count, given the other one.
fn judge(slot: &Slot, other: &Slot) -> Option<(Label, u64, String)> {
    let others = match other {
        Slot::Whole(header) | Slot::BadChunk(header, ..) => header.position.generation,
        _ => 0,
    };
    let damaged = findings::CHECKPOINT_DAMAGED;
    let half_written = findings::CHECKPOINT_HALF_WRITTEN;
    match slot {
        Slot::Absent | Slot::Whole(_) => None,
        // From the second checkpoint on, both files have had a header.
        Slot::Headless if others >= 2 => Some((damaged, 0, Unsound::Empty.to_string())),
        Slot::Headless => Some((half_written, 0, Unsound::Empty.to_string())),
        Slot::Newer(version) => {
            Some((findings::CHECKPOINT_NEWER, 0, Unsound::Newer { version: *version }.to_string()))
        }
        // One sector holds all of a header: it is never torn.
        Slot::BadHeader(unsound) => Some((damaged, 0, unsound.to_string())),
        Slot::BadChunk(header, offset, unsound) => {
            let older = header.position.generation < others && matches!(other, Slot::Whole(_));
            Some((if older { half_written } else { damaged }, *offset, unsound.to_string()))
        }
        Slot::Unreadable(why) => Some((findings::FILE_UNREADABLE, 0, why.clone())),
        Slot::Media(offset) => Some((findings::MEDIA_ERROR, *offset, "a page of a checkpoint".to_owned())),
    }
}

impl Known {
    /// Its sequence, zero if there is none.
    pub fn sequence(&self) -> u64 {
        self.header.as_ref().map_or(0, |header| header.position.generation)
    }

    fn take(&mut self, items: Items, records: bool) {
        match items {
            Items::Segments(segments) => {
                self.totals.segments = self.totals.segments.saturating_add(segments.len() as u64);
                self.segments.extend(segments.into_iter().map(|state| (state.segment, state)));
            }
            Items::Records(listed) => {
                self.totals.records = self.totals.records.saturating_add(listed.len() as u64);
                let of = |state: &kvarts_layout::format::checkpoint::RecordState| -> Option<Listed> {
                    Some((state.segment, state.generation, u32::try_from(state.offset / PAGE_BYTES).ok()?))
                };
                for state in &listed {
                    let count = self.listed.entry(state.segment).or_default();
                    *count = count.saturating_add(1);
                }
                if records {
                    self.records.extend(listed.iter().filter_map(of));
                }
            }
            Items::Tombstones(tombstones) => {
                self.totals.tombstones = self.totals.tombstones.saturating_add(tombstones.len() as u64);
            }
            Items::Epochs(epochs) => {
                self.totals.epochs = self.totals.epochs.saturating_add(epochs.len() as u64);
            }
            Items::Namespaces(namespaces) => {
                self.totals.namespaces = self.totals.namespaces.saturating_add(namespaces.len() as u64);
            }
        }
    }
}
