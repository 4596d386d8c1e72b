//! Writes records into new segments of one shard.
//!
//! Invariants:
//! - A segment's header is durable before its first record, its records and footer before its trailer, and its name
//!   before anything counts on it.
//! - A segment that was begun and not sealed is what a crash of the engine leaves too: a tail.
//! - Definitions stand before their first use in each segment; sequences increase.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvarts_layout::format::body::Definition;
use kvarts_layout::format::checkpoint::{
    CheckpointHeader, CheckpointWriter, Items, MAX_ITEMS, RecordState, SEGMENT_SEALED, SegmentState,
};
use kvarts_layout::format::footer::{self, Content, Defined, Entry, Footer};
use kvarts_layout::format::names::{segment_name, shard_name};
use kvarts_layout::format::record::{self, Body, Fields};
use kvarts_layout::format::segment::SegmentHeader;
use kvarts_layout::format::trailer::{self, SealReason, Trailer};
use kvarts_layout::format::{MAX_FOOTER_BYTES, PAGE_BYTES, Position};

use super::Refusal;
use super::graves::{Graves, Listed};
use super::inventory::Space;
use super::source::Made;
use crate::checkpoint;
use crate::disk::DiskWriter;
use crate::segment::Keyring;

/// Bytes that a footer needs for a record at most, besides its blocks, stored lengths and extensions.
const FOOTER_RECORD_BYTES: u64 = 256;
/// Tombstones in one chunk of a checkpoint: they are the largest items.
const TOMBSTONES_MAX: usize = 8 << 10;

/// A segment that is being written.
#[derive(Debug)]
struct Open {
    number: u32,
    path: String,
    next: u64,
    first_sequence: u64,
    entries: Vec<Entry>,
    defined: BTreeSet<u32>,
    footer_bytes: u64,
}

/// The end of one shard's log.
#[derive(Debug)]
pub(super) struct Sink {
    writer: Arc<dyn DiskWriter>,
    keyring: Keyring,
    shard: u32,
    now_ms: u64,
    next_number: u32,
    pub(super) sequence: u64,
    open: Option<Open>,
    /// Segments that are sealed and durable.
    pub(super) sealed: Vec<SegmentState>,
    /// What a checkpoint is to say of the records in them.
    pub(super) records: Vec<RecordState>,
    pub(super) bytes_written: u64,
}

fn encoding(error: kvarts_layout::format::EncodeError) -> Refusal {
    Refusal::Cannot(format!("a structure of the store cannot be written: {error}"))
}

fn footer_share(body: &Body) -> u64 {
    let more = match body {
        Body::Blocks(blocks) => {
            let extensions: u64 = blocks.extensions.iter().map(|one| one.bytes.len() as u64 + 16).sum();
            let lengths = (blocks.stored_lengths.len() as u64).saturating_mul(4);
            (blocks.blocks.len() as u64).saturating_mul(48).saturating_add(lengths).saturating_add(extensions)
        }
        _ => 0,
    };
    more.saturating_add(FOOTER_RECORD_BYTES)
}

fn content(body: &Body) -> Content {
    let defined = |definition: &Definition| Defined { local: definition.local, id: definition.id };
    match body {
        Body::Blocks(blocks) => Content::Blocks(blocks.clone()),
        Body::Identity(definition) => Content::Identity(defined(definition)),
        Body::Spec(definition) => Content::Spec(defined(definition)),
        Body::Tombstones(tombstones) => Content::Tombstones(tombstones.clone()),
        Body::Epoch(epoch) => Content::Epoch(*epoch),
        Body::Unknown(code) => Content::Unknown(*code),
    }
}

/// Where a shard goes on: its next segment, and its next record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Start {
    pub(super) shard: u32,
    pub(super) next_number: u32,
    pub(super) sequence: u64,
}

impl Sink {
    /// Goes on behind everything that a shard has.
    pub(super) fn new(
        writer: Arc<dyn DiskWriter>,
        keyring: &Keyring,
        Start { shard, next_number, sequence }: Start,
        now_ms: u64,
    ) -> Self {
        let (open, sealed, records) = (None, Vec::new(), Vec::new());
        let keyring = keyring.clone();
        Self {
            writer,
            keyring,
            shard,
            now_ms,
            next_number,
            sequence,
            open,
            sealed,
            records,
            bytes_written: 0,
        }
    }

    fn position(&self, number: u32) -> Position {
        self.keyring.position(self.shard, number).under(1)
    }

    /// How many segments have been begun.
    pub(super) fn begun(&self) -> usize {
        self.sealed.len().saturating_add(usize::from(self.open.is_some()))
    }

    /// Whether a record goes into a segment that has not been begun.
    pub(super) fn needs_segment(&self, spaces: &[Space], made: &Made) -> bool {
        let Some(open) = &self.open else { return true };
        // More than it takes: a segment too many is asked for, never one too few.
        let header = (made.blocks.blocks.len() as u64)
            .saturating_mul(64)
            .saturating_add((made.digests.len() as u64).saturating_mul(8))
            .saturating_add(4 * PAGE_BYTES);
        let footer = open.footer_bytes.saturating_add(header);
        let end = open.next.saturating_add(header).saturating_add(made.image.len() as u64);
        let space = spaces.get(made.space as usize);
        let definitions =
            space.map_or(0, |space| space.spec.len().saturating_add(space.identity.len()) as u64);
        let rest = footer.saturating_add(definitions).saturating_add(2 * PAGE_BYTES);
        end.saturating_add(rest) > self.keyring.segment_bytes
    }

    /// Appends a record.
    pub(super) fn write(&mut self, spaces: &[Space], mut made: Made) -> Result<(), Refusal> {
        let space = spaces.get(made.space as usize);
        let space = space.ok_or_else(|| Refusal::Cannot("a record has no namespace".to_owned()))?;
        let local = made.space.saturating_add(1);
        (made.blocks.namespace, made.blocks.spec) = (local, local);
        let body = Body::Blocks(made.blocks);
        let definitions = [
            Body::Spec(Definition { local, id: space.spec_id, canonical: space.spec.clone() }),
            Body::Identity(Definition { local, id: space.id, canonical: space.identity.clone() }),
        ];
        for fresh in [false, true] {
            if self.open.is_none() {
                self.begin()?;
            }
            if self.try_write(
                (&body, &made.digests),
                &definitions,
                (&made.image, made.payload_bytes),
                made.last_used_s,
            )? {
                return Ok(());
            }
            if !fresh {
                self.seal()?;
            }
        }
        Err(Refusal::Cannot("a record is longer than a segment".to_owned()))
    }

    fn begin(&mut self) -> Result<(), Refusal> {
        let number = self.next_number;
        self.next_number =
            number.checked_add(1).ok_or_else(|| Refusal::Cannot("no segment number is free".to_owned()))?;
        let folder = shard_name(self.shard);
        let path = format!("{folder}/{}", segment_name(number));
        let header = SegmentHeader {
            position: self.position(number),
            secret: self.keyring.secret.clone(),
            created_ms: self.now_ms,
            segment_bytes: self.keyring.segment_bytes,
            first_sequence: self.sequence,
        };
        let image = header.encode().map_err(encoding)?;
        self.writer.set_len(&path, self.keyring.segment_bytes)?;
        self.writer.write_at(&path, 0, &image)?;
        self.writer.sync(&path)?;
        self.writer.sync_folder(&folder)?;
        self.open = Some(Open {
            number,
            path,
            next: PAGE_BYTES,
            first_sequence: self.sequence,
            entries: Vec::new(),
            defined: BTreeSet::new(),
            footer_bytes: PAGE_BYTES,
        });
        Ok(())
    }

    /// Appends a record with the definitions that it needs; false if it does not fit.
    fn try_write(
        &mut self,
        (body, digests): (&Body, &[u32]),
        definitions: &[Body; 2],
        (image, payload_bytes): (&[u8], u64),
        last_used_s: u64,
    ) -> Result<bool, Refusal> {
        let position = self.open.as_ref().map(|open| self.position(open.number));
        let (Some(open), Some(position)) = (&mut self.open, position) else { return Ok(false) };
        let Body::Blocks(blocks) = body else { return Ok(false) };
        let (mut headers, mut entries, mut sequence) = (Vec::new(), Vec::new(), self.sequence);
        let mut footer_bytes = open.footer_bytes;
        let known = open.defined.contains(&blocks.namespace);
        let before = definitions.iter().filter(|_| !known).map(|one| (one, &[][..], 0));
        for (body, digests, payload_bytes) in before.chain([(body, digests, payload_bytes)]) {
            let offset = open.next.saturating_add(headers.len() as u64);
            let fields = Fields { sequence, durable_upto: 0, payload_bytes };
            let image = record::encode(&position.at(offset), &self.keyring.secret, &fields, body, digests);
            let image = image.map_err(encoding)?;
            footer_bytes = footer_bytes.saturating_add(footer_share(body));
            entries.push(Entry {
                offset,
                sequence,
                payload_bytes,
                header_bytes: u32::try_from(image.len()).unwrap_or(u32::MAX),
                content: content(body),
            });
            headers.extend_from_slice(&image);
            sequence = sequence.saturating_add(1);
        }
        let payload_at = open.next.saturating_add(headers.len() as u64);
        let end = payload_at.saturating_add(image.len() as u64);
        let footer = footer_bytes.next_multiple_of(PAGE_BYTES);
        let fits = end.saturating_add(footer).saturating_add(PAGE_BYTES) <= self.keyring.segment_bytes
            && footer <= MAX_FOOTER_BYTES as u64;
        if !fits {
            return Ok(false);
        }
        open.footer_bytes = footer_bytes;
        self.writer.write_at(&open.path, open.next, &headers)?;
        self.writer.write_at(&open.path, payload_at, image)?;
        open.defined.insert(blocks.namespace);
        self.records.push(RecordState {
            generation: 1,
            offset: entries.last().map_or(0, |entry| entry.offset),
            expires_ms: blocks.expires_ms,
            segment: open.number,
            last_access_s: u32::try_from(last_used_s).unwrap_or(u32::MAX),
        });
        open.entries.extend(entries);
        open.next = end;
        self.sequence = sequence;
        let written = (headers.len() as u64).saturating_add(image.len() as u64);
        self.bytes_written = self.bytes_written.saturating_add(written);
        Ok(true)
    }

    /// Ends the segment that is being written: durable, with its footer and trailer.
    pub(super) fn seal(&mut self) -> Result<(), Refusal> {
        let Some(open) = self.open.take() else { return Ok(()) };
        let position = self.position(open.number);
        let first = open.entries.first().map_or(0, |entry| entry.sequence);
        let last = open.entries.last().map_or(0, |entry| entry.sequence);
        let footer = Footer { records: open.entries };
        let image = footer.encode(&position.at(open.next), &self.keyring.secret).map_err(encoding)?;
        let count = u32::try_from(footer.records.len()).unwrap_or(u32::MAX);
        let trailer = Trailer {
            footer_offset: open.next,
            footer_tag: footer::tag_of(&image)
                .ok_or_else(|| Refusal::Cannot("a footer has no tag".to_owned()))?,
            footer_bytes: u32::try_from(image.len()).unwrap_or(u32::MAX),
            record_count: count,
            first_sequence: first,
            last_sequence: last,
            log_end: open.next,
            reason: SealReason::Normal,
        };
        let place = trailer::position(&position, self.keyring.segment_bytes);
        let last_page = trailer.encode(&place, &self.keyring.secret).map_err(encoding)?;
        self.writer.write_at(&open.path, open.next, &image)?;
        self.writer.sync(&open.path)?;
        self.writer.write_at(&open.path, place.offset, &last_page)?;
        self.writer.sync(&open.path)?;
        self.sealed.push(SegmentState {
            generation: 1,
            first_sequence: open.first_sequence,
            last_sequence: last.max(open.first_sequence),
            log_end: 0,
            segment: open.number,
            state: SEGMENT_SEALED,
        });
        Ok(())
    }
}

/// What a checkpoint is to say.
#[derive(Debug)]
pub(super) struct Statement<'a> {
    pub(super) segments: Vec<SegmentState>,
    pub(super) records: Vec<RecordState>,
    pub(super) graves: &'a Graves,
    pub(super) next_sequence: u64,
}

/// Writes a checkpoint into the slot that is its position's segment, so that at every moment the one before it, or it, counts.
pub(super) fn write_checkpoint(
    writer: &dyn DiskWriter,
    keyring: &Keyring,
    position: Position,
    now_ms: u64,
    mut statement: Statement<'_>,
) -> Result<(), Refusal> {
    let header = CheckpointHeader { position, created_ms: now_ms, next_sequence: statement.next_sequence };
    let mut images = CheckpointWriter::new(&header, &keyring.secret);
    let first = images.header().map_err(encoding)?;
    let path = checkpoint::path(position.shard, position.segment);
    let mut at = PAGE_BYTES;
    let mut put = |items: Items| -> Result<(), Refusal> {
        let image = images.chunk(&items).map_err(encoding)?;
        writer.write_at(&path, at, &image)?;
        at = at.saturating_add(image.len() as u64);
        Ok(())
    };
    statement.records.sort_unstable_by_key(|one| (one.segment, one.offset));
    for some in statement.records.chunks(MAX_ITEMS) {
        put(Items::Records(some.to_vec()))?;
    }
    statement.segments.sort_unstable_by_key(|one| one.segment);
    for some in statement.segments.chunks(MAX_ITEMS) {
        put(Items::Segments(some.to_vec()))?;
    }
    let Listed { names, tombstones, epochs } = statement.graves.listed();
    for some in names.chunks(MAX_ITEMS) {
        put(Items::Namespaces(some.to_vec()))?;
    }
    for some in tombstones.chunks(TOMBSTONES_MAX) {
        put(Items::Tombstones(some.to_vec()))?;
    }
    for some in epochs.chunks(MAX_ITEMS) {
        put(Items::Epochs(some.to_vec()))?;
    }
    let end = images.end().map_err(encoding)?;
    writer.write_at(&path, at, &end)?;
    writer.set_len(&path, at.saturating_add(end.len() as u64))?;
    writer.sync(&path)?;
    writer.write_at(&path, 0, &first)?;
    writer.sync(&path)?;
    Ok(writer.sync_folder(&shard_name(position.shard))?)
}
