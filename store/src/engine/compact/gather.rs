//! Takes live blocks out of a record: read in the background class, every chunk verified.
//!
//! Invariants:
//! - the segment is held while it is read, so it is not rewritten under the device read; the record's number is
//!   held for as long as its blocks are moved, so that a location in it cannot come to mean a later record;
//! - a block comes out only if each of its chunks has the digest that the record's table says; one that does not is
//!   quarantined where it lies;
//! - the chunks of an encoded record are decoded to be verified, and come out as they are stored.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use kvarts_layout::BlockKey;
use kvarts_layout::arrange::{PartPlace, RunLayout, Span};
use kvarts_layout::codec::CodecError;
use kvarts_layout::format::body::{BlockName, Blocks, layout_code};
use kvarts_layout::format::record::{self, Body};
use kvarts_layout::format::{PAGE_BYTES, page_align};

use crate::engine::read::Reads;
use crate::engine::read::decode::{Stored, payload_bytes};
use crate::engine::shard::Shard;
use crate::engine::shared::Shared;
use crate::engine::shared::record_class::RecordClass;
use crate::engine::shared::visibility::BlockOf;
use crate::engine::tasks::notify::yield_now;
use crate::engine::volume::Volume;
use crate::engine::volume::segment::Hold;
use crate::engine::volume::segment::record_range;
use crate::index::{BlockFingerprint, Location, Lookup, RecordId, RecordInfo};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;
use kvarts_contract::{
    buffers::{Buf, BufMut},
    io_error::{FileId, IoError},
};

/// Bytes of one device read: a foreground read that comes meanwhile waits for no more than this.
const EXTENT_BYTES: u64 = 512 << 10;
/// Bytes that are verified or copied before other tasks have their turn.
pub(crate) const SLICE_BYTES: usize = 256 << 10;

/// Keeps a record's number until dropped.
#[derive(Debug)]
pub(crate) struct HeldRecord {
    shared: Arc<Shared>,
    id: RecordId,
}

impl HeldRecord {
    pub(crate) fn new(shared: &Arc<Shared>, id: RecordId) -> Option<(Self, RecordInfo)> {
        let info = shared.index.records().hold(id)?;
        Some((Self { shared: Arc::clone(shared), id }, info))
    }
}

impl Drop for HeldRecord {
    fn drop(&mut self) {
        self.shared.index.release_record(self.id);
    }
}

/// A verified block.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) name: BlockName,
    pub(crate) print: BlockFingerprint,
    /// Where the index had it.
    pub(crate) old: Location,
    pub(crate) digests: Vec<u32>,
    /// The chunks one after the other in canonical order, as they are stored.
    pub(crate) bytes: Vec<u8>,
    /// Their stored lengths, if they are encoded.
    pub(crate) lengths: Vec<u32>,
}

impl Taken {
    /// The chunks as they are stored, in canonical order.
    pub(crate) fn chunks<'a>(&'a self, layout: &'a RunLayout) -> impl Iterator<Item = &'a [u8]> {
        let mut rest = self.bytes.as_slice();
        layout.parts().iter().enumerate().map_while(move |(part, place)| {
            let len = self.lengths.get(part).map_or(place.bytes, |len| u64::from(*len));
            let (chunk, behind) = rest.split_at_checked(len as usize)?;
            rest = behind;
            Some(chunk)
        })
    }
}

/// What was taken out of a record.
#[derive(Debug)]
pub(crate) struct Gathered {
    pub(crate) class: Arc<RecordClass>,
    /// The record's body.
    pub(crate) body: Blocks,
    pub(crate) sequence: u64,
    pub(crate) source: RecordId,
    /// In the record's order.
    pub(crate) blocks: Vec<Taken>,
    pub(crate) damaged: u32,
    pub(crate) bytes_read: u64,
    _held: HeldRecord,
}

/// Takes the live ones among the wanted blocks of a record out of it; `None` if there is no such record in this
/// shard (any more).
pub(crate) async fn gather(
    shard: &Rc<Shard>,
    source: RecordId,
    wanted: &dyn Fn(u16) -> bool,
) -> Result<Option<Gathered>, Reason> {
    let volume = &shard.volume;
    let Some((held, info)) = HeldRecord::new(&volume.shared, source) else { return Ok(None) };
    // Without a live block its segment may have been recycled.
    if u32::from(info.shard) != volume.shard || info.live == 0 {
        return Ok(None);
    }
    let Some(segment) = volume.segments.borrow().get(&info.segment).map(Rc::clone) else {
        return Ok(None);
    };
    let class =
        volume.shared.classes.get(info.class).ok_or(Reason::Bug("a record has an unknown record class"))?;
    let _reading = Hold::new(&segment);
    let (offset, _) = record_range(&info);
    let position = volume.position(&segment, offset);
    let (own, number) = (volume.shard, segment.number);
    let wrong = |what: String| Reason::Header { shard: own, segment: number, offset, what };
    let header =
        read(volume, segment.file, offset, u64::from(info.header_pages) * PAGE_BYTES).await?.to_vec();
    let record =
        record::open(&header, &position, &volume.shared.secret).map_err(|error| wrong(error.to_string()))?;
    let Body::Blocks(mut body) = record.body().map_err(|error| wrong(error.to_string()))? else {
        return Err(wrong("the record and its record class have different kinds".to_owned()));
    };
    body.namespace = segment.local(body.namespace);
    let layout = class.layout_of(u32::from(info.blocks.get()))?;
    let chunks = layout.parts().len();
    if body.namespace != class.namespace.local
        || body.blocks.len() != usize::from(info.blocks.get())
        || record.prefix.digest_count as usize != body.blocks.len() * chunks
        || body.encoding != class.encoding
        || body.layout != layout_code(class.layout)
    {
        return Err(wrong("the record on disk is not the record that the index lists".to_owned()));
    }
    let stored = Stored::of(&body, &layout).map_err(|what| wrong(what.to_owned()))?;
    if payload_bytes(&body, &layout) != Some(record.prefix.payload_bytes) {
        return Err(wrong("the length of the payload does not match the chunks of the record".to_owned()));
    }
    let mut blocks = live(volume, &class, &body, source, wanted);
    for taken in &mut blocks {
        let first = usize::from(taken.old.block) * chunks;
        taken.digests = record.digests().skip(first).take(chunks).collect();
    }
    let payload_at = offset + u64::from(record.prefix.header_bytes);
    let bytes_read = fill(volume, segment.file, payload_at, (&layout, stored.as_ref()), &mut blocks).await?;
    let before = blocks.len();
    verify(shard, &class, (&layout, stored.as_ref()), &mut blocks).await?;
    let damaged = (before - blocks.len()) as u32;
    let bytes_read = bytes_read + header.len() as u64;
    let sequence = record.prefix.sequence;
    Ok(Some(Gathered { class, body, sequence, source, blocks, damaged, bytes_read, _held: held }))
}

/// The wanted blocks that the index has in this record.
fn live(
    volume: &Volume,
    class: &RecordClass,
    body: &Blocks,
    source: RecordId,
    wanted: &dyn Fn(u16) -> bool,
) -> Vec<Taken> {
    let index = &volume.shared.index;
    let mut found = Vec::new();
    for (block, name) in (0u16..).zip(&body.blocks) {
        let old = Location { record: source, block };
        let print = index.key().of(class.namespace.local, &BlockKey(name.key), class.group, class.coordinate);
        if wanted(block) && index.lookup(print) == Lookup::Live(old) {
            let (digests, bytes, lengths) = (Vec::new(), Vec::new(), Vec::new());
            found.push(Taken { name: *name, print, old, digests, bytes, lengths });
        }
    }
    found
}

/// Memory of a move's own: the arena's pieces may be waited for by those who wait for this move.
pub(crate) fn memory(bytes: u64) -> Result<BufMut, Reason> {
    let out_of_memory = || Reason::from(IoError::out_of_memory(bytes as usize));
    let len = usize::try_from(bytes).map_err(|_| out_of_memory())?;
    BufMut::zeroed(len).map_err(|_| out_of_memory())
}

/// Whole pages of a file, a piece at a time.
async fn read(volume: &Volume, file: FileId, offset: u64, bytes: u64) -> Result<Buf, Reason> {
    let mut buf = memory(bytes)?;
    let mut done = 0;
    while done < bytes {
        let len = (bytes - done).min(EXTENT_BYTES);
        let piece = done as usize..(done + len) as usize;
        let read = volume.driver.read_part(Class::Background, file, offset + done, buf, piece);
        buf = read.await?;
        done += len;
    }
    Ok(buf.freeze())
}

/// Where the chunks of a block lie in the payload, in canonical order.
fn spans_of((layout, stored): (&RunLayout, Option<&Stored>), block: u16) -> Option<Vec<Span>> {
    let block = u32::from(block);
    let span = |(part, place): (u32, &PartPlace)| match stored {
        Some(stored) => stored.places.chunk(block, part),
        None => Some(Span { offset: place.offset + place.step * u64::from(block), len: place.bytes }),
    };
    (0u32..).zip(layout.parts()).map(span).collect()
}

/// Reads the span that the blocks lie in and copies their chunks as they are stored; gives the bytes read.
async fn fill(
    volume: &Volume,
    file: FileId,
    payload_at: u64,
    arrangement: (&RunLayout, Option<&Stored>),
    blocks: &mut [Taken],
) -> Result<u64, Reason> {
    let (mut start, mut end) = (u64::MAX, 0);
    let mut spans = Vec::with_capacity(blocks.len());
    for taken in &*blocks {
        let of_block = spans_of(arrangement, taken.old.block).ok_or(Reason::Bug(
            "a block ends after the end of its \
                record",
        ))?;
        for span in &of_block {
            (start, end) = (start.min(span.offset), end.max(span.end()));
        }
        spans.push(of_block);
    }
    if start >= end {
        return Ok(0);
    }
    let start = start - start % PAGE_BYTES;
    let len = page_align(end - start).ok_or(Reason::TooMany("bytes in one record"))?;
    let image = read(volume, file, payload_at + start, len).await?;
    let mut since = 0;
    for (taken, spans) in blocks.iter_mut().zip(spans) {
        let bytes: u64 = spans.iter().map(|span| span.len).sum();
        taken.bytes = vec![0; bytes as usize];
        let mut to = 0;
        for span in &spans {
            let Some(target) = taken.bytes.get_mut(to..to + span.len as usize) else { continue };
            image.copy_out((span.offset - start) as usize, target);
            to += span.len as usize;
        }
        if arrangement.1.is_some() {
            // A stored chunk is no longer than its own length, which fits by the limit of encoded records.
            taken.lengths = spans.iter().map(|span| span.len as u32).collect();
        }
        pause(&mut since, to).await;
    }
    Ok(len)
}

/// Lets others run when enough has been done since the last time.
pub(crate) async fn pause(since: &mut usize, done: usize) {
    *since += done;
    if *since >= SLICE_BYTES {
        *since = 0;
        yield_now().await;
    }
}

/// Quarantines the blocks of which a chunk is not what was put, and leaves the others.
async fn verify(
    shard: &Shard,
    class: &RecordClass,
    arrangement: (&RunLayout, Option<&Stored>),
    blocks: &mut Vec<Taken>,
) -> Result<(), Reason> {
    let (mut since, mut sound) = (0, Vec::with_capacity(blocks.len()));
    for taken in std::mem::take(blocks) {
        if is_sound(&shard.reads, &taken, arrangement, &mut since).await? {
            sound.push(taken);
            continue;
        }
        let shared = &shard.volume.shared;
        shared.counters.chunks_damaged.fetch_add(1, Relaxed);
        if shared.quarantine(taken.print, taken.old, BlockOf { class, key: BlockKey(taken.name.key) }) {
            shared.counters.blocks_quarantined.fetch_add(1, Relaxed);
        }
    }
    *blocks = sound;
    Ok(())
}

async fn is_sound(
    reads: &Reads,
    taken: &Taken,
    (layout, stored): (&RunLayout, Option<&Stored>),
    since: &mut usize,
) -> Result<bool, Reason> {
    let mut digests = taken.digests.iter();
    for (chunk, place) in taken.chunks(layout).zip(layout.parts()) {
        let found = match stored {
            None => Ok(crc32fast::hash(chunk)),
            Some(stored) => reads.decoder.digest(stored.encoding, chunk, place.bytes as usize),
        };
        match (found, digests.next()) {
            (Ok(found), Some(expected)) if found == *expected => {}
            (Err(error @ CodecError::NoMemory), _) => return Err(error.into()),
            _ => return Ok(false),
        }
        pause(since, place.bytes as usize).await;
    }
    Ok(taken.digests.len() == layout.parts().len() && digests.next().is_none())
}
