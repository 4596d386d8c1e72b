//! Moves live blocks of one record to the end of the shard's log.
//!
//! What a move keeps: keys, origin ids, digests, parent, group, coordinate, expiry, creation time and extensions; in
//! memory also heat and leases. Chunks of an encoded record are copied as they are stored; a raw record whose blocks
//! are cold may become an encoded one (`encode`). It is in this order: read and verify; append; flush; switch the index block by block,
//! each only if it still is where it was read. So:
//!
//! - a block that was deleted, evicted, quarantined or put again meanwhile stays as that left it;
//! - what the index points at is durable, and the old record may be recycled when the switch is done and those reads
//!   that were sent to it before hold its segment (`grace`);
//! - a crash leaves the old record, or both. Both hold the same bytes under the same origin ids, and recovery takes
//!   the newer.
//!
//! Deletes: at the moment at which the new record gets its sequence, every block of it is still live where it was read
//! and not buried in this shard; otherwise it is left out. So a delete must take the block out of the index, or bury
//! it in the shard's tombstones, before it chooses the sequence below which records are dead: then either the move leaves
//! the block out, or the tombstone covers the new record as well.
//!
//! A move appends, so it may wait for a segment: never call it from what makes room for one.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use kvarts_layout::BlockKey;
use kvarts_layout::codec::StoredPlaces;
use kvarts_layout::format::body::{Blocks, ENCODING_RAW, Parent, layout_code};
use kvarts_layout::format::page_align;
use kvarts_layout::format::record::Body;

use super::encode::{Cold, encode_run};
use super::gather::{Gathered, Taken, gather, memory, pause};
use super::head::Head;
use crate::engine::shard::Shard;
use crate::engine::shared::visibility::{BlockOf, Relocation};
use crate::engine::shared::{EXPIRY_STEP_MS, Shared};
use crate::engine::volume::Volume;
use crate::engine::write::draft::{Draft, Payload, Written};
use crate::index::{BlockFingerprint, Location, Lookup, RecordId, RecordInfo};
use kvarts_contract::buffers::Buf;
use kvarts_contract::class::Class;
use kvarts_contract::error::{Reason, SpaceCause};

/// What a move did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Moved {
    /// Blocks that are in the new record now.
    pub(crate) blocks: u32,
    /// Wanted blocks that had left before they could be moved.
    pub(crate) gone: u32,
    /// Blocks that failed verification and were quarantined.
    pub(crate) damaged: u32,
    /// Bytes read from the device.
    pub(crate) bytes_read: u64,
    /// Bytes of the new records.
    pub(crate) bytes_written: u64,
    /// Records that were raw and are encoded now.
    pub(crate) records_encoded: u32,
    /// Payload bytes that they had.
    pub(crate) bytes_raw: u64,
    /// Payload bytes that they have.
    pub(crate) bytes_encoded: u64,
}

impl Moved {
    /// Adds what another move did.
    pub(crate) fn add(&mut self, other: Self) {
        self.blocks += other.blocks;
        self.gone += other.gone;
        self.damaged += other.damaged;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
        self.records_encoded += other.records_encoded;
        self.bytes_raw += other.bytes_raw;
        self.bytes_encoded += other.bytes_encoded;
    }
}

/// Moves the live ones among the wanted blocks of a record of this shard. A record whose prefix is known is split
/// where blocks are missing, so that each new record is again a run of consecutive blocks. What is cold is encoded.
///
/// An error leaves the blocks that were not moved where they are.
pub(crate) async fn relocate(
    shard: &Rc<Shard>,
    source: RecordId,
    wanted: &dyn Fn(u16) -> bool,
    cold: &Cold,
) -> Result<Moved, Reason> {
    let _turn = shard.moves.moving.take().await;
    let Some(mut gathered) = gather(shard, source, wanted).await? else { return Ok(Moved::default()) };
    let (damaged, bytes_read) = (gathered.damaged, gathered.bytes_read);
    let mut moved = Moved { damaged, bytes_read, ..Moved::default() };
    let runs = runs(&gathered.body, &gathered.blocks).into_iter();
    let runs: Vec<_> = runs.map(|run| (head_of(&shard.volume, &gathered, &run), run)).collect();
    for (mut head, run) in runs {
        let blocks = gathered.blocks.get_mut(run).unwrap_or_default();
        let gain = encode_run(shard, cold, &mut head, blocks).await?;
        if gain.is_none() && cold.only {
            continue;
        }
        let written = write(shard, &head, &blocks.iter().collect::<Vec<_>>()).await?;
        moved.add(written);
        if let Some(gain) = gain.filter(|_| written.blocks > 0) {
            let counters = &shard.volume.shared.counters;
            counters.records_encoded.fetch_add(1, Relaxed);
            counters.encoded_bytes_before.fetch_add(gain.raw, Relaxed);
            counters.encoded_bytes_after.fetch_add(gain.stored, Relaxed);
            moved.add(Moved {
                records_encoded: 1,
                bytes_raw: gain.raw,
                bytes_encoded: gain.stored,
                ..Moved::default()
            });
        }
    }
    Ok(moved)
}

/// Runs of taken blocks that may share a record: all of them where nothing is known of their prefix.
fn runs(body: &Blocks, blocks: &[Taken]) -> Vec<Range<usize>> {
    let chained = body.parent != Parent::Unknown || body.first_block.is_some();
    let mut runs = Vec::new();
    let mut start = 0;
    for (at, pair) in (1..).zip(blocks.windows(2)) {
        if let [before, after] = pair
            && chained
            && before.old.block + 1 != after.old.block
        {
            runs.push(start..at);
            start = at;
        }
    }
    if start < blocks.len() {
        runs.push(start..blocks.len());
    }
    runs
}

pub(super) fn head_of(volume: &Volume, gathered: &Gathered, run: &Range<usize>) -> Head {
    let body = &gathered.body;
    let first = gathered.blocks.get(run.start).map_or(0, |taken| taken.old.block);
    let before = usize::from(first).checked_sub(1).and_then(|at| body.blocks.get(at));
    let parent = body.parent.behind(before);
    let expires = volume.shared.index.records().get(gathered.source).map_or(0, |info| info.expires);
    Head {
        class: Arc::clone(&gathered.class),
        created_ms: body.created_ms,
        expires,
        expires_ms: expires_ms(&volume.shared, body.expires_ms, expires),
        extensions: body.extensions.clone(),
        first_block: body.first_block.and_then(|number| number.checked_add(u32::from(first))),
        parent,
        sequence: gathered.sequence,
    }
}

/// When a record expires, as the header says it: as it said before, unless it was changed since.
pub(crate) fn expires_ms(shared: &Shared, written: u64, expires: u32) -> u64 {
    match expires {
        0 => 0,
        _ if written != 0 && shared.expiry_step(written) == expires => written,
        _ => shared.created_ms.saturating_add(u64::from(expires) * EXPIRY_STEP_MS),
    }
}

/// Writes blocks as one record, durably, and switches the index to it. Blocks that leave before the record gets its
/// place are left out; where that makes a hole in a chain, what is behind it becomes a record of its own.
pub(crate) async fn write(shard: &Rc<Shard>, head: &Head, blocks: &[&Taken]) -> Result<Moved, Reason> {
    let mut moved = Moved::default();
    let mut todo = vec![(head.clone(), blocks.to_vec())];
    while let Some((head, blocks)) = todo.pop() {
        if blocks.is_empty() {
            continue;
        }
        let image = compose(&head, &blocks).await?;
        match append(shard, &head, &blocks, &image).await {
            Ok(written) => moved.add(switch(&shard.volume, &head, &blocks, &written)?),
            Err(reason) => {
                let still: Vec<bool> =
                    blocks.iter().map(|taken| is_there(&shard.volume, &head, taken)).collect();
                if still.iter().all(|there| *there) {
                    return Err(reason);
                }
                moved.gone += still.iter().filter(|there| !**there).count() as u32;
                todo.extend(split(&head, &blocks, &still));
            }
        }
    }
    Ok(moved)
}

/// The parts of a run that are left when some of its blocks have gone.
fn split<'a>(head: &Head, blocks: &[&'a Taken], still: &[bool]) -> Vec<(Head, Vec<&'a Taken>)> {
    let chained = head.parent != Parent::Unknown || head.first_block.is_some();
    let mut parts: Vec<(Head, Vec<&Taken>)> = Vec::new();
    let mut open = false;
    for (at, (taken, there)) in (0u32..).zip(blocks.iter().zip(still)) {
        if !there {
            open = open && !chained;
            continue;
        }
        if !open {
            let before = (at as usize).checked_sub(1).and_then(|at| blocks.get(at));
            let parent = head.parent.behind(before.map(|taken| &taken.name));
            let first_block = head.first_block.and_then(|number| number.checked_add(at));
            parts.push((Head { parent, first_block, ..head.clone() }, Vec::new()));
            open = true;
        }
        if let Some((_, run)) = parts.last_mut() {
            run.push(taken);
        }
    }
    parts
}

/// Whether a block is still where it was read, and neither it nor its namespace deleted.
fn is_there(volume: &Volume, head: &Head, taken: &Taken) -> bool {
    let class = &head.class;
    let dead = volume.tombstones.borrow();
    let buried = !dead.is_empty()
        && (dead.covers(class.namespace.id, head.sequence)
            || dead.covers_block(
                (class.namespace.id, BlockKey(taken.name.key)),
                (class.group.0, class.coordinate.to_u64()),
                head.sequence,
            ));
    // A namespace that was deleted has another short id by now, long before its blocks have left the index; an epoch
    // of another shard would not cover a copy that is made here.
    !buried
        && volume.shared.names.is_current(&class.namespace)
        && volume.shared.index.lookup(taken.print) == Lookup::Live(taken.old)
}

/// The payload of a record, as it will lie on disk.
struct Image {
    body: Blocks,
    digests: Vec<u32>,
    bytes: u64,
    pages: Buf,
}

async fn compose(head: &Head, blocks: &[&Taken]) -> Result<Image, Reason> {
    let count = u32::try_from(blocks.len()).map_err(|_| Reason::TooMany("blocks in one record"))?;
    let layout = head.class.layout_of(count)?;
    let other_shape = Reason::Bug("a block and its record have different shapes");
    let stored_lengths: Vec<u32> = blocks.iter().flat_map(|taken| taken.lengths.iter().copied()).collect();
    let stored = match head.class.encoding {
        ENCODING_RAW => None,
        _ => Some(StoredPlaces::new(&layout, &stored_lengths).ok_or(other_shape.clone())?),
    };
    let bytes = stored.as_ref().map_or(layout.payload_bytes(), StoredPlaces::payload_bytes);
    let mut pages = memory(page_align(bytes).ok_or(Reason::TooMany("bytes in one record"))?)?;
    let (mut since, mut digests) = (0, Vec::with_capacity(blocks.len() * layout.parts().len()));
    for (block, taken) in (0u32..).zip(blocks) {
        let mut chunks = taken.chunks(&layout);
        for (part, place) in (0u32..).zip(layout.parts()) {
            let at = match &stored {
                None => Some(place.offset + place.step * u64::from(block)),
                Some(stored) => stored.chunk(block, part).map(|span| span.offset),
            };
            let (Some(chunk), Some(at)) = (chunks.next(), at) else { return Err(other_shape) };
            pages.copy_in(at as usize, chunk);
        }
        digests.extend_from_slice(&taken.digests);
        pause(&mut since, taken.bytes.len()).await;
    }
    let class = &head.class;
    let body = Blocks {
        coordinate: class.coordinate.to_u64(),
        created_ms: head.created_ms,
        expires_ms: head.expires_ms,
        namespace: class.namespace.local,
        spec: class.namespace.spec.local,
        group: class.group.0,
        blocks: blocks.iter().map(|taken| taken.name).collect(),
        stored_lengths,
        extensions: head.extensions.clone(),
        first_block: head.first_block,
        layout_version: class.layout_version,
        layout: layout_code(class.layout),
        encoding: class.encoding,
        parent: head.parent,
    };
    Ok(Image { body, digests, bytes, pages: pages.freeze() })
}

/// Appends and flushes; a flush that failed has the record written once more elsewhere.
async fn append(shard: &Rc<Shard>, head: &Head, blocks: &[&Taken], image: &Image) -> Result<Written, Reason> {
    let still = || blocks.iter().all(|taken| is_there(&shard.volume, head, taken));
    let draft = Draft {
        namespace: Some(&head.class.namespace),
        body: Body::Blocks(image.body.clone()),
        digests: &image.digests,
        payload: Some(Payload::Image { bytes: image.bytes, pages: image.pages.clone(), still: &still }),
    };
    let mut again = true;
    loop {
        let written = shard.log.append(Class::Background, &draft).await?;
        match shard.log.make_durable(&written).await {
            Ok(()) => return Ok(written),
            Err(_) if again => again = false,
            Err(reason) => return Err(reason),
        }
    }
}

/// Whether a block came behind `parent` where it lies now: a copy hangs on nothing that came later. In the middle of a record the
/// block before it is its parent.
fn came_behind(shared: &Shared, parent: BlockFingerprint, block: &Taken) -> bool {
    let record = shared.index.records().get(block.old.record);
    block.old.block > 0 || record.is_some_and(|record| record.hangs && record.parent == parent.first())
}

/// Blocks are being pointed elsewhere, and are not counted as moved yet.
struct Switching<'a>(&'a Shared);

impl<'a> Switching<'a> {
    fn begin(shared: &'a Shared) -> Self {
        shared.switching.fetch_add(1, SeqCst);
        Self(shared)
    }
}

impl Drop for Switching<'_> {
    fn drop(&mut self) {
        self.0.switching.fetch_sub(1, SeqCst);
    }
}

/// Points the index at the new record, block by block.
fn switch(volume: &Volume, head: &Head, blocks: &[&Taken], written: &Written) -> Result<Moved, Reason> {
    let shared = &volume.shared;
    let info = written.info(volume.shard, blocks.len(), head.class.number, head.expires)?;
    let parent = shared.parent_print(&head.class, head.parent);
    let hangs = blocks.first().is_some_and(|first| came_behind(shared, parent, first))
        && shared.index.hang(parent.first());
    let parent = parent.first();
    let info = RecordInfo { parent, hangs, ..info };
    let record = shared.index.records().insert(info).map_err(|_| {
        if hangs {
            shared.index.let_go(parent);
        }
        Reason::NoSpace(SpaceCause::Records)
    })?;
    shared.note_expiry((volume.shard, written.segment.number), head.expires);
    let mut moved = Moved { bytes_written: written.end - written.offset, ..Moved::default() };
    let _switching = Switching::begin(shared);
    for (block, taken) in (0u16..).zip(blocks) {
        let new = Location { record, block };
        // A read already sent to the old place still finds it there; later look-ups lead to the copy.
        let source = shared.index.records().get(taken.old.record);
        let _leaving = source.map(|info| shared.arrivals.leaving((u32::from(info.shard), info.segment)));
        let block_of = BlockOf { class: &head.class, key: BlockKey(taken.name.key) };
        let left = shared
            .relocate(taken.print, Relocation { from: taken.old, to: new }, block_of)
            .map_err(|_| Reason::Bug("a moved record is missing in the index"))?;
        match left {
            Some(left) => {
                moved.blocks += 1;
                let used = shared.index.records().used(taken.old.record);
                shared.index.records().note_use(record, used);
                written.segment.note_cold(shared.step_of(used));
                shared.free_if_empty(taken.old.record, left);
            }
            None => moved.gone += 1,
        }
    }
    if moved.blocks == 0 {
        shared.free_if_empty(record, 0);
    }
    shared.counters.blocks_moved.fetch_add(u64::from(moved.blocks), SeqCst);
    shared.counters.moved_bytes_written.fetch_add(moved.bytes_written, Relaxed);
    Ok(moved)
}
