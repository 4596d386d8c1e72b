//! Reads records, verifies them, and puts new ones together.
//!
//! Invariants:
//! - No byte is written that was not verified against its digest on the way, and digests are copied, never computed.
//! - An encoded record is decoded before it is verified; a record to be encoded is verified first.
//!
//! Memory: the payload of the record that is read, and of the one that is made (twice if it is encoded).

use kvarts_layout::Layout;
use kvarts_layout::arrange::{LAYOUT_VERSION, RunLayout, Span};
use kvarts_layout::codec::{Codec, Encoding, StoredPlaces, pays};
use kvarts_layout::format::body::{BlockName, Blocks, ENCODING_RAW, layout_code, layout_from_code};
use kvarts_layout::format::record::{self, Body};
use kvarts_layout::format::{PAGE, PAGE_BYTES};

use super::inventory::{Held, Inventory, Role, disk_of, path};
use super::plan::{Group, Piece, Plan, is_cold, target_layout};
use super::{Options, Refusal};
use crate::disk::{Aligned, DiskFile};
use crate::store::Store;

/// Chunks that tell whether a record is worth compressing.
const SAMPLES: usize = 4;

/// A record that is to be written; its local ids are set where it goes.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) blocks: Blocks,
    pub(super) digests: Vec<u32>,
    pub(super) space: u32,
    pub(super) payload_bytes: u64,
    /// Padded to whole pages.
    pub(super) image: Vec<u8>,
    pub(super) last_used_s: u64,
    pub(super) compressed: bool,
    pub(super) rearranged: bool,
}

/// A record as it was read.
struct Read {
    /// Whether the payload was: where only sizes are wanted, the header says all.
    has_payload: bool,
    blocks: Blocks,
    digests: Vec<u32>,
    layout: RunLayout,
    stored: Option<(Encoding, StoredPlaces)>,
    /// Header and payload.
    bytes: Aligned,
    payload_at: usize,
}

/// Reads the records of a store.
pub(super) struct Reader<'a> {
    store: &'a Store,
    inventory: &'a Inventory,
    options: &'a Options,
    open: Option<(u32, Box<dyn DiskFile>)>,
    spare: Aligned,
    codec: Codec,
    scratch: Vec<u8>,
    pub(super) bytes_read: u64,
}

impl<'a> Reader<'a> {
    /// A reader of a store.
    pub(super) fn new(
        store: &'a Store,
        inventory: &'a Inventory,
        options: &'a Options,
    ) -> Result<Self, Refusal> {
        let codec = Codec::new().map_err(|error| Refusal::Cannot(error.to_string()))?;
        let (open, spare, scratch) = (None, Aligned::default(), Vec::new());
        Ok(Self { store, inventory, options, open, spare, codec, scratch, bytes_read: 0 })
    }

    fn damaged(&self, held: &Held, why: &str) -> Refusal {
        let file = self.inventory.segments.get(held.segment as usize);
        let file = file.map(|segment| path(self.store, segment)).unwrap_or_default();
        Refusal::Damaged(format!("{file} at {}: {why}", held.offset))
    }

    fn read(&mut self, held: &Held, has_payload: bool) -> Result<Read, Refusal> {
        let whole =
            u64::from(held.header_bytes).saturating_add(held.payload_bytes.next_multiple_of(PAGE_BYTES));
        let len = if has_payload { whole } else { u64::from(held.header_bytes) };
        let len = usize::try_from(len).map_err(|_| self.damaged(held, "a record is too long"))?;
        let segment = self.inventory.segments.get(held.segment as usize);
        let segment =
            segment.ok_or_else(|| self.damaged(held, "the segment of the record is not in the inventory"))?;
        if self.open.as_ref().is_none_or(|(number, _)| *number != held.segment) {
            let disk = disk_of(self.store, segment)
                .ok_or_else(|| self.damaged(held, "the directory of the record was removed"))?;
            let file = disk.open(&path(self.store, segment));
            self.open = Some((held.segment, file.map_err(|error| self.damaged(held, &error.to_string()))?));
        }
        let mut bytes = std::mem::take(&mut self.spare);
        if bytes.bytes().len() < len {
            bytes = Aligned::new(len);
        }
        let bytes_read = whole;
        let whole = match (&self.open, bytes.bytes_mut().get_mut(..len)) {
            (Some((_, file)), Some(into)) => read_whole(&**file, into, held.offset),
            _ => Err(std::io::ErrorKind::UnexpectedEof.into()),
        };
        whole.map_err(|error| self.damaged(held, &error.to_string()))?;
        self.bytes_read = self.bytes_read.saturating_add(bytes_read);
        let shard = self.store.shards.get(segment.shard).map_or(0, |shard| shard.number);
        let position = self.store.keyring.position(shard, segment.number);
        let position = position.under(segment.generation).at(held.offset);
        let opened = record::open(bytes.bytes(), &position, &self.store.keyring.secret)
            .map_err(|unsound| self.damaged(held, &unsound.to_string()))?;
        let digests: Vec<u32> = opened.digests().collect();
        let Ok(Body::Blocks(blocks)) = opened.body() else {
            return Err(self.damaged(held, "the record differs from the record that the footer lists"));
        };
        let space = self.inventory.spaces.get(held.space as usize);
        let shape = space.and_then(|space| space.shape(blocks.group, blocks.coordinate));
        let layout = layout_from_code(blocks.layout).zip(shape).and_then(|(layout, shape)| {
            RunLayout::new(layout, blocks.layout_version, &shape, held.blocks).ok()
        });
        let layout = layout.ok_or_else(|| self.damaged(held, "the shape of a record's blocks is unknown"))?;
        let stored = match Encoding::from_code(blocks.encoding) {
            None => None,
            Some(encoding) => {
                let places = StoredPlaces::new(&layout, &blocks.stored_lengths);
                Some((
                    encoding,
                    places.ok_or_else(|| {
                        self.damaged(held, "the stored lengths of the chunks do not match the record")
                    })?,
                ))
            }
        };
        let expected = stored.as_ref().map_or(layout.payload_bytes(), |(_, places)| places.payload_bytes());
        let chunks = (held.blocks as usize).saturating_mul(layout.chunk_count() as usize);
        if expected != held.payload_bytes || digests.len() != chunks {
            return Err(
                self.damaged(held, "the length of the payload does not match the blocks of the record")
            );
        }
        let payload_at = held.header_bytes as usize;
        Ok(Read { has_payload, blocks, digests, layout, stored, bytes, payload_at })
    }

    /// One verified chunk.
    fn chunk<'b>(
        &mut self,
        held: &Held,
        read: &'b Read,
        (block, part): (u32, u32),
        decoded: &'b mut Vec<u8>,
    ) -> Result<(&'b [u8], u32), Refusal> {
        let place =
            read.layout.parts().get(part as usize).ok_or_else(|| {
                self.damaged(held, "a part of the record is not in the shape of its blocks")
            })?;
        let raw = match &read.stored {
            None => {
                let offset = place.offset.saturating_add(place.step.saturating_mul(u64::from(block)));
                payload(read, Span { offset, len: place.bytes })
            }
            Some((encoding, places)) => {
                let stored = places.chunk(block, part).and_then(|span| payload(read, span));
                let stored = stored.ok_or_else(|| self.damaged(held, "a chunk lies outside its payload"))?;
                decoded.clear();
                decoded.resize(usize::try_from(place.bytes).unwrap_or(0), 0);
                let done = self.codec.decode(*encoding, stored, decoded);
                done.map_err(|error| self.damaged(held, &error.to_string()))?;
                Some(decoded.as_slice())
            }
        };
        let raw = raw.ok_or_else(|| self.damaged(held, "a chunk lies outside its payload"))?;
        let number = (block as usize).saturating_mul(read.layout.chunk_count() as usize);
        let digest = read.digests.get(number.saturating_add(part as usize)).copied().unwrap_or_default();
        if crc32fast::hash(raw) != digest {
            return Err(self.damaged(held, "a chunk does not match its digest"));
        }
        Ok((raw, digest))
    }

    /// Whether a few chunks of each cold record say that compressing it pays, by record.
    pub(super) fn probe(&mut self) -> Result<Vec<bool>, Refusal> {
        let inventory = self.inventory;
        let mut pays = vec![false; inventory.records.len()];
        for (held, pays) in inventory.records.iter().zip(&mut pays) {
            let movable =
                inventory.segments.get(held.segment as usize).is_some_and(|one| one.role != Role::Fixed);
            let live = (0..held.blocks).any(|block| inventory.is_live(held, block));
            if live && movable && held.encoding == ENCODING_RAW && is_cold(self.options, held.last_used_s()) {
                let read = self.read(held, true)?;
                let chunks =
                    read.layout.parts().iter().map(|place| Span { offset: place.offset, len: place.bytes });
                let step = (read.layout.chunk_count() as usize).div_ceil(SAMPLES).max(1);
                let samples = chunks.step_by(step).filter_map(|span| payload(&read, span));
                *pays = self.codec.choose(samples).is_some();
                self.spare = read.bytes;
            }
        }
        Ok(pays)
    }

    /// The record that a group of pieces becomes.
    pub(super) fn make(&mut self, plan: &Plan, group: &Group) -> Result<Made, Refusal> {
        let pieces = plan.pieces.get(group.clone()).unwrap_or_default();
        let Some((first, held)) = pieces.first().and_then(|piece| Some((piece, self.held(piece)?))) else {
            return Err(Refusal::Cannot("a group has no pieces".to_owned()));
        };
        let count: u32 = pieces.iter().map(|piece| piece.count).sum();
        let inventory = self.inventory;
        let own = layout_from_code(held.layout).unwrap_or(Layout::FullBlock);
        let target = target_layout(inventory, self.options, held, count).unwrap_or(own);
        let shape = inventory.spaces.get(held.space as usize);
        let shape = shape.and_then(|space| space.shape(held.group, held.coordinate));
        let layout = shape.and_then(|shape| RunLayout::new(target, LAYOUT_VERSION, &shape, count).ok());
        let layout = layout.ok_or_else(|| self.damaged(held, "the shape of a record's blocks is unknown"))?;
        let image_bytes = usize::try_from(layout.image_bytes()).unwrap_or(0);
        let (mut image, mut head, mut digests) = (vec![0u8; image_bytes], None, Vec::new());
        let sizes_only = self.options.dry_run && self.stay_raw(pieces);
        let (mut names, mut last_used_s, mut created_ms, mut encoding) = (Vec::new(), 0, u64::MAX, None);
        for piece in pieces {
            let held = self.held(piece).ok_or_else(|| Refusal::Cannot("a piece is empty".to_owned()))?;
            let read = self.read(held, !sizes_only)?;
            self.copy(held, piece, &read, (&layout, &mut image), (&mut names, &mut digests))?;
            (last_used_s, created_ms) =
                (held.last_used_s().max(last_used_s), held.created_ms.min(created_ms));
            encoding = encoding.or(read.stored.as_ref().map(|(encoding, _)| *encoding));
            let Read { blocks, bytes, .. } = read;
            self.spare = bytes;
            head.get_or_insert(blocks);
        }
        let head = head.ok_or_else(|| Refusal::Cannot("a group has no pieces".to_owned()))?;
        let mut blocks = heading(&head, first, held);
        blocks.blocks = names;
        blocks.created_ms = created_ms;
        blocks.layout = layout_code(target);
        let mut made = Made {
            blocks,
            digests,
            space: held.space,
            payload_bytes: layout.payload_bytes(),
            image,
            last_used_s,
            compressed: false,
            rearranged: count > 1 && layout_code(target) != held.layout,
        };
        let cold = is_cold(self.options, last_used_s);
        if encoding.is_some() || cold {
            self.encode(&mut made, &layout, encoding)?;
            made.compressed = held.encoding == ENCODING_RAW && made.blocks.encoding != ENCODING_RAW;
        }
        Ok(made)
    }

    /// Whether the record that pieces become is as long as their blocks are, whatever these hold.
    fn stay_raw(&self, pieces: &[Piece]) -> bool {
        let stays = |held: &Held| held.encoding == ENCODING_RAW && !is_cold(self.options, held.last_used_s());
        pieces.iter().all(|piece| self.held(piece).is_some_and(stays))
    }

    fn held(&self, piece: &Piece) -> Option<&'a Held> {
        self.inventory.records.get(piece.record as usize)
    }

    /// Copies the chunks of a piece to their places.
    fn copy(
        &mut self,
        held: &Held,
        piece: &Piece,
        read: &Read,
        (layout, image): (&RunLayout, &mut Vec<u8>),
        (names, digests): (&mut Vec<BlockName>, &mut Vec<u32>),
    ) -> Result<(), Refusal> {
        let mut decoded = std::mem::take(&mut self.scratch);
        for block in (piece.from..piece.to).filter(|block| self.inventory.is_live(held, *block)) {
            let to = names.len() as u64;
            let name = read.blocks.blocks.get(block as usize);
            names.push(*name.ok_or_else(|| {
                self.damaged(
                    held,
                    "the record has fewer blocks than the footer \
                lists",
                )
            })?);
            if !read.has_payload {
                let each = read.layout.chunk_count() as usize;
                let here = (block as usize).saturating_mul(each);
                let known = read.digests.get(here..here.saturating_add(each));
                digests.extend(known.ok_or_else(|| self.damaged(held, "too few digests"))?);
                continue;
            }
            for (part, place) in (0u32..).zip(layout.parts()) {
                let (raw, digest) = self.chunk(held, read, (block, part), &mut decoded)?;
                let at = place.offset.saturating_add(place.step.saturating_mul(to));
                let at = usize::try_from(at).unwrap_or(usize::MAX);
                let Some(into) = image.get_mut(at..at.saturating_add(raw.len())) else {
                    return Err(self.damaged(held, "a chunk is longer than the space for it"));
                };
                into.copy_from_slice(raw);
                digests.push(digest);
            }
        }
        self.scratch = decoded;
        Ok(())
    }

    /// Encodes a raw payload, if that pays.
    fn encode(
        &mut self,
        made: &mut Made,
        layout: &RunLayout,
        known: Option<Encoding>,
    ) -> Result<(), Refusal> {
        let blocks = layout.blocks() as usize;
        let parts = layout.chunk_count() as usize;
        let image = &made.image;
        let raw = |block: usize, part: usize| -> Option<&[u8]> {
            let place = layout.parts().get(part)?;
            let at = place.offset.checked_add(place.step.checked_mul(block as u64)?)?;
            let at = usize::try_from(at).ok()?;
            image.get(at..at.checked_add(usize::try_from(place.bytes).ok()?)?)
        };
        let chunks = blocks.saturating_mul(parts).max(1);
        let samples = (0..chunks)
            .step_by(chunks.div_ceil(SAMPLES))
            .filter_map(|at| raw(at / parts.max(1), at % parts.max(1)));
        let Some(encoding) = known.or_else(|| self.codec.choose(samples)) else { return Ok(()) };
        let (mut out, mut lengths) = (Vec::new(), vec![0u32; chunks]);
        let mut one = |block: usize, part: usize| -> Option<()> {
            let stored = self.codec.encode(encoding, raw(block, part)?, &mut out).ok()?;
            *lengths.get_mut(block.checked_mul(parts)?.checked_add(part)?)? = u32::try_from(stored).ok()?;
            Some(())
        };
        let done = match layout.layout() {
            Layout::FullBlock => {
                (0..blocks).try_for_each(|block| (0..parts).try_for_each(|part| one(block, part)))
            }
            Layout::LayerBlock => {
                (0..parts).try_for_each(|part| (0..blocks).try_for_each(|block| one(block, part)))
            }
        };
        if done.is_none() {
            return Err(Refusal::Cannot("a record cannot be compressed".to_owned()));
        }
        let stored = (out.len() as u64).next_multiple_of(PAGE_BYTES);
        if known.is_none() && !pays(layout.image_bytes(), stored) {
            return Ok(());
        }
        made.payload_bytes = out.len() as u64;
        out.resize(out.len().next_multiple_of(PAGE), 0);
        made.image = out;
        made.blocks.encoding = encoding.code();
        made.blocks.stored_lengths = lengths;
        Ok(())
    }
}

/// What a record that begins with this piece says beside its blocks.
fn heading(head: &Blocks, first: &Piece, held: &Held) -> Blocks {
    let before = (first.from as usize).checked_sub(1).and_then(|at| head.blocks.get(at));
    Blocks {
        parent: head.parent.behind(before),
        first_block: head.first_block.and_then(|number| number.checked_add(first.from)),
        expires_ms: held.expires_ms,
        encoding: ENCODING_RAW,
        stored_lengths: Vec::new(),
        layout_version: LAYOUT_VERSION,
        blocks: Vec::new(),
        ..head.clone()
    }
}

fn payload(read: &Read, span: Span) -> Option<&[u8]> {
    let from = read.payload_at.checked_add(usize::try_from(span.offset).ok()?)?;
    read.bytes.bytes().get(from..from.checked_add(usize::try_from(span.len).ok()?)?)
}

fn read_whole(file: &dyn DiskFile, into: &mut [u8], offset: u64) -> std::io::Result<()> {
    let mut done = 0usize;
    while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, offset.saturating_add(done as u64)) {
            Ok(read) => {
                done = done.saturating_add(read);
                if read == 0 || !done.is_multiple_of(PAGE) {
                    // Behind the end of a file that a crash left short there are zeros.
                    break;
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    into.get_mut(done..).unwrap_or_default().fill(0);
    Ok(())
}

/// Shared by all that write: which shard a record goes to, by its first key.
pub(super) fn shard_of(key: &[u8; 32], shards: u32) -> u32 {
    crc32fast::hash(key).checked_rem(shards).unwrap_or(0)
}
