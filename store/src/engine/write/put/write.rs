//! Writing a run of missing blocks: as one record, or as several where a segment ends.
//!
//! A run that does not fit into the open segment fills what room there is and goes on in the next one: without that a
//! segment would end with a gap of half a record, bytes of the budget that hold nothing. A piece that would be short is
//! not cut off; then the gap is the lesser evil.
//!
//! All pieces are on disk, and durable if asked, before the first is visible: a run is there as a whole or refused as a
//! whole. After a power cut in the middle each piece is a record of its own, whole or gone, like records of one put.

use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use kvarts_layout::format::page_align;
use kvarts_layout::format::record::Body;

use super::{HEADER_BLOCK_BYTES, HEADER_BYTES, PutJob};
use crate::engine::volume::Volume;
use crate::engine::write::draft::{Draft, Payload, Written};
use crate::engine::write::log::Log;
use crate::index::{BlockFingerprint, RecordId, RecordInfo};
use crate::ledger::Promise;
use kvarts_contract::api::{Durability, Parent};
use kvarts_contract::class::Class;
use kvarts_contract::error::{Reason, SpaceCause};

/// A run is cut only if the piece that fits has at least this many bytes, and this part of the run.
const PIECE_BYTES_MIN: u64 = 32 << 10;
const PIECE_PART: u64 = 8;

/// A record that a run, or a part of one, was written to.
pub(super) struct Piece {
    run: Range<u32>,
    written: Written,
    expires: u32,
    /// What another header takes of the namespace's quota.
    header: Option<Promise>,
}

impl Piece {
    /// A record whose quota is held elsewhere.
    pub(super) fn new(run: Range<u32>, written: Written, expires: u32) -> Self {
        Self { run, written, expires, header: None }
    }
}

/// Writes a run and makes it live. Gives the places of blocks that a delete has met meanwhile.
pub(super) async fn write(
    log: &Rc<Log>,
    job: &PutJob,
    run: &Range<u32>,
    digests: &[u32],
) -> Result<Vec<u16>, Reason> {
    if let Some(reason) = job.stopped_at(run.start) {
        return Err(reason);
    }
    if !job.is_claimed(run) {
        // The delete may have passed this shard: nothing of the run may be written any more.
        return Err(Reason::Deleted);
    }
    let mut pieces = append_all(log, job, run, digests).await?;
    if job.request.durability == Durability::Durable {
        for at in 0..pieces.len() {
            let Some(piece) = pieces.get(at) else { break };
            if log.make_durable(&piece.written).await.is_err() {
                // The flush failed: the record goes elsewhere, the segment is never flushed again. What there was of it is
                // let go first: its segment may be what has to be emptied.
                let Piece { run: part, header, .. } = pieces.remove(at);
                let again = append(log, job, run, part, digests, header).await?;
                log.make_durable(&again.written).await?;
                pieces.insert(at, again);
            }
        }
    }
    publish(&log.volume, job, run, &pieces)
}

/// Appends a run in as many pieces as segments want of it.
async fn append_all(
    log: &Rc<Log>,
    job: &PutJob,
    run: &Range<u32>,
    digests: &[u32],
) -> Result<Vec<Piece>, Reason> {
    let mut pieces = Vec::with_capacity(1);
    let (mut rest, mut may_cut) = (run.clone(), true);
    while !rest.is_empty() {
        let (end, header) = if may_cut { cut(log, job, &rest)? } else { (rest.end, None) };
        match append(log, job, run, rest.start..end, digests, header).await {
            Ok(piece) => {
                pieces.push(piece);
                rest.start = end;
            }
            // The segment of the first piece may be the only one that could have been emptied, and that piece, a record
            // that is not yet visible, keeps it. So the run goes as a whole into the next segment.
            Err(Reason::NoSpace(_)) if !pieces.is_empty() => {
                pieces.clear();
                (rest, may_cut) = (run.clone(), false);
            }
            Err(reason) => return Err(reason),
        }
    }
    Ok(pieces)
}

/// Where the next piece of a run ends: at the run's end, or where the open segment has no more room.
fn cut(log: &Log, job: &PutJob, rest: &Range<u32>) -> Result<(u32, Option<Promise>), Reason> {
    let all = (rest.end, None);
    let size = |blocks: u32| -> Result<u64, Reason> {
        Ok(header_bytes(job, blocks) + job.class.layout_of(blocks)?.image_bytes())
    };
    let whole = size(rest.len() as u32)?;
    let Some(room) = log.room(&job.class.namespace).filter(|room| !room.takes(whole, rest.len() as u32))
    else {
        return Ok(all);
    };
    let block_bytes = job.class.shape.block_bytes().max(1);
    let least = PIECE_BYTES_MIN.max(rest.len() as u64 * block_bytes / PIECE_PART);
    let most = u32::try_from(room.bytes / block_bytes).unwrap_or(u32::MAX).min(rest.len() as u32 - 1);
    for blocks in (1..=most).rev().take_while(|blocks| u64::from(*blocks) * block_bytes >= least) {
        let piece = size(blocks)?;
        if room.takes(piece, blocks) {
            let more = (piece + size(rest.len() as u32 - blocks)?).saturating_sub(whole);
            let account = job.shared.index.records().ledger().account(job.class.namespace.id);
            // Nothing is evicted for it: at its quota a namespace has its runs in one piece.
            return Ok(account.promise(more).map_or(all, |header| (rest.start + blocks, Some(header))));
        }
    }
    Ok(all)
}

/// An upper bound of what the header of a record of `blocks` blocks takes.
fn header_bytes(job: &PutJob, blocks: u32) -> u64 {
    let chunks: usize = job.class.shape.layers().iter().map(|layer| layer.chunks.len()).sum();
    let bytes = HEADER_BYTES + u64::from(blocks) * (HEADER_BLOCK_BYTES + 4 * chunks as u64);
    page_align(bytes).unwrap_or(bytes)
}

/// Appends a piece of `run`, whose digests are given.
async fn append(
    log: &Rc<Log>,
    job: &PutJob,
    run: &Range<u32>,
    piece: Range<u32>,
    digests: &[u32],
    header: Option<Promise>,
) -> Result<Piece, Reason> {
    let (blocks, expires) = job.body(&piece);
    let each = digests.len() / run.len().max(1);
    let own = (piece.start - run.start) as usize * each..(piece.end - run.start) as usize * each;
    let layout = job.class.layout_of(piece.len() as u32)?;
    let draft = Draft {
        namespace: Some(&job.class.namespace),
        body: Body::Blocks(blocks),
        digests: digests.get(own).ok_or(Reason::Bug("a piece of a run of blocks lacks digests"))?,
        payload: Some(Payload::Placed { layout, from: &job.request.from, ordinal: piece.start }),
    };
    let written = log.append(Class::Put, &draft).await?;
    Ok(Piece { run: piece, written, expires, header })
}

/// Notes in the index that the block before a run is continued. Notes it of the run's last block too, if the same put goes
/// on behind it, or if the put's parent is unknown: then no later put will note it.
fn note_continued(job: &PutJob, run: &Range<u32>, prints: &[BlockFingerprint]) {
    let index = &job.shared.index;
    if let (Parent::Key(parent), 0) = (job.request.parent, run.start) {
        let class = &job.class;
        index.note_continued(index.key().of(class.namespace.local, &parent, class.group, class.coordinate));
    }
    let goes_on = (run.end as usize) < job.request.keys.len();
    if let Some(last) = prints.last().filter(|_| goes_on || job.request.parent == Parent::Unknown) {
        index.note_continued(*last);
    }
}

/// Makes the blocks of a run's records live, all at one moment of this executor. Gives the places in the run of blocks
/// that a delete has met meanwhile.
pub(super) fn publish(
    volume: &Volume,
    job: &PutJob,
    run: &Range<u32>,
    pieces: &[Piece],
) -> Result<Vec<u16>, Reason> {
    let records = job.shared.index.records();
    let mut known: Vec<RecordId> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let info = piece.written.info(volume.shard, piece.run.len(), job.class.number, piece.expires)?;
        let parent = job.before(piece.run.start).first();
        let hangs = match piece.run.start == run.start {
            true => job.take_hold(run.start),
            // Behind a piece of the same run, of which no block is live yet.
            false => job.shared.index.hang(parent),
        };
        let info = RecordInfo { parent, hangs, ..info };
        match records.insert(info) {
            Ok(record) => {
                records.note_use(record, job.shared.second());
                known.push(record);
            }
            Err(_) => {
                if hangs {
                    job.shared.index.let_go(parent);
                }
                for record in known {
                    job.shared.free_if_empty(record, 0);
                }
                return Err(Reason::NoSpace(SpaceCause::Records));
            }
        }
    }
    let payload_bytes: u64 = pieces.iter().map(|piece| piece.written.payload_bytes).sum();
    let is_small =
        job.request.parent != Parent::Unknown && payload_bytes <= volume.shared.record_bytes_max / 2;
    let mut lost = Vec::new();
    for (piece, record) in pieces.iter().zip(known) {
        if is_small {
            volume.noted.note(record);
        }
        job.shared.note_expiry((volume.shard, piece.written.segment.number), piece.expires);
        publish_piece(volume, job, (run, piece), record, &mut lost)?;
    }
    if is_small {
        job.shared.counters.small_records_stored.fetch_add(1, Relaxed);
    }
    match lost.len() == run.len() {
        true => Err(Reason::Deleted),
        false => Ok(lost),
    }
}

/// Makes the blocks of a record live, and adds the places of those that a delete has met.
fn publish_piece(
    volume: &Volume,
    job: &PutJob,
    (run, piece): (&Range<u32>, &Piece),
    record: RecordId,
    lost: &mut Vec<u16>,
) -> Result<(), Reason> {
    let range = piece.run.start as usize..piece.run.end as usize;
    let prints = job.prints.get(range.clone()).unwrap_or_default();
    let keys = job.request.keys.get(range).unwrap_or_default();
    let gone = job
        .shared
        .commit((&job.class, keys), (job.claim, prints), record)
        .map_err(|_| Reason::Bug("a written record is missing in the index"))?;
    let before = (piece.run.start - run.start) as u16;
    lost.extend(gone.iter().map(|place| before + place));
    if gone.len() == piece.run.len() {
        job.shared.free_if_empty(record, 0);
        return Ok(());
    }
    note_continued(job, &piece.run, prints);
    let (written, counters) = (&piece.written, &volume.shared.counters);
    counters.payload_bytes_stored.fetch_add(written.payload_bytes, Relaxed);
    counters.record_bytes_written.fetch_add(written.end - written.offset, Relaxed);
    Ok(())
}
