//! Writes a checkpoint while the store is in use.
//!
//! The index changes meanwhile. What is written holds all the same: each record is looked up at one moment together
//! with its segment's generation, and of a later generation nothing is said.

use kvarts_layout::format::checkpoint::{
    CheckpointHeader, CheckpointWriter, Items, RecordState, SEGMENT_FREE, SEGMENT_OPEN, SEGMENT_SEALED,
    SegmentState as Stated,
};
use kvarts_layout::format::footer::Defined;
use kvarts_layout::format::names::checkpoint_name;
use kvarts_layout::format::{EncodeError, PAGE_BYTES, Position};

use super::CheckpointReport;
use crate::engine::shared::EXPIRY_STEP_MS;
use crate::engine::tasks::steps::{AT_ONCE, Section};
use crate::engine::volume::Volume;
use crate::engine::volume::segment::{Segment, SegmentState, fault};
use crate::engine::volume::tombstones::{Behind, Listed};
use crate::index::{OwnerCursor, RecordInfo};
use crate::io::policy::{Action, Stage, decide};
use crate::io::{MetaOp, OpenMode};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;
use kvarts_contract::io_error::{FileId, IoError};

/// Bytes of the largest item, a tombstone.
const ITEM_BYTES: usize = 72;
/// How often a checkpoint is begun again because of something transient.
const TRIES_MAX: u32 = 3;

/// A file being written.
struct Output<'a> {
    volume: &'a Volume,
    file: FileId,
    slot: u32,
    at: u64,
    class: Class,
}

/// Writes a checkpoint, for work of this class. On an error the one before still counts.
pub(crate) async fn write(volume: &Volume, class: Class) -> Result<CheckpointReport, Reason> {
    if let Some(reason) = volume.refuses_writes() {
        return Err(reason);
    }
    prove(volume, class).await
}

/// The same, also where the store takes no writes: it shows whether it could.
pub(crate) async fn prove(volume: &Volume, class: Class) -> Result<CheckpointReport, Reason> {
    if volume.checkpoints.writing.replace(true) {
        return Err(Reason::Busy("a checkpoint is being written"));
    }
    let mut written = write_next(volume, class).await;
    for _ in 1..TRIES_MAX {
        if !matches!(written, Err(Reason::Passing(_))) {
            break;
        }
        written = write_next(volume, class).await;
    }
    volume.checkpoints.writing.set(false);
    volume.checkpoints.ended.wake_all();
    written
}

async fn write_next(volume: &Volume, class: Class) -> Result<CheckpointReport, Reason> {
    let slots = &volume.checkpoints;
    let slot = slots.next();
    let sequence = slots.sequence.get() + 1;
    // Taken even if this fails: the header of a failed attempt may be on disk, and the next one writes over its
    // chunks, which must not be taken for chunks of that header.
    slots.sequence.set(sequence);
    let header = CheckpointHeader {
        position: Position {
            store: volume.shared.store,
            shard: volume.shard,
            segment: slot,
            generation: sequence,
            offset: 0,
        },
        created_ms: volume.shared.clock.unix_millis(),
        next_sequence: volume.sequence.get(),
    };
    let name = volume.file_name(&checkpoint_name(slot));
    let mode = OpenMode { write: true, create: true, direct: true };
    let file = volume.driver.open(name, mode).await.map_err(|error| failed(volume, &error))?;
    let mut output = Output { volume, file, slot, at: PAGE_BYTES, class };
    let written = write_into(&mut output, &header).await;
    if written.is_err() {
        output.recount().await;
    }
    let closed = volume.driver.meta(MetaOp::Close { file }).await;
    let report = written?;
    closed.map_err(|error| failed(volume, &error))?;
    slots.newest.set(Some(slot));
    slots.buried.set(report.buried);
    Ok(report)
}

/// What is to be done about a failed write: a full disk postpones the checkpoint, what passes has it written again as a
/// whole (nothing is flushed twice in hope), anything else latches the store.
fn failed(volume: &Volume, error: &IoError) -> Reason {
    match decide(error, Stage::Metadata) {
        Action::RefuseNoSpace | Action::NotNow => fault(error),
        _ => volume.latch(error),
    }
}

async fn write_into(output: &mut Output<'_>, header: &CheckpointHeader) -> Result<CheckpointReport, Reason> {
    let volume = output.volume;
    let mut writer = CheckpointWriter::new(header, &volume.shared.secret);
    if kvarts_layout::planted!("checkpoint-header-first") {
        output.put(0, &writer.header().map_err(unencodable)?, true).await?;
    }
    let mut report = CheckpointReport { sequence: header.position.generation, ..Default::default() };
    report.records = write_records(output, &mut writer).await?;
    let mut segments: Vec<Stated> = volume.segments.borrow().values().filter_map(|one| stated(one)).collect();
    segments.extend(volume.lost.borrow().values());
    segments.extend(volume.unreadable.borrow().values().flatten());
    segments.sort_unstable_by_key(|one| one.segment);
    report.segments = segments.len() as u64;
    let most = volume.shared.batches.checkpoint_items.max(1);
    for some in segments.chunks(most) {
        output.chunk(&mut writer, Items::Segments(some.to_vec())).await?;
    }
    volume.prune_tombstones().await;
    report.buried = volume.tombstones.borrow().version();
    let Listed { names, epochs } = volume.tombstones.borrow().listed();
    for some in names.chunks(most) {
        output.chunk(&mut writer, Items::Namespaces(some.to_vec())).await?;
    }
    write_tombstones(output, &mut writer, &names).await?;
    for some in epochs.chunks(most) {
        output.chunk(&mut writer, Items::Epochs(some.to_vec())).await?;
    }
    let first = writer.header().map_err(unencodable)?;
    output.append(&writer.end().map_err(unencodable)?).await?;
    report.bytes = output.finish(&first).await?;
    let known = volume.segments.borrow();
    for free in segments.iter().filter(|one| one.state == SEGMENT_FREE) {
        if let Some(segment) = known.get(&free.segment) {
            segment.say_free(free.generation);
        }
    }
    Ok(report)
}

/// Writes the tombstones of these namespaces. What is buried meanwhile may be among them: the next checkpoint has it.
async fn write_tombstones(
    output: &mut Output<'_>,
    writer: &mut CheckpointWriter,
    names: &[Defined],
) -> Result<(), Reason> {
    let (volume, mut chunk) = (output.volume, Vec::new());
    let most = volume.shared.batches.checkpoint_tombstones.max(1);
    let mut section = Section::begin(&volume.shared.work.checkpoints, &*volume.shared.clock);
    for name in names {
        let mut behind = Behind::default();
        loop {
            let room = (most - chunk.len()).min(AT_ONCE as usize);
            let some = volume.tombstones.borrow().some(name, &mut behind, room);
            if some.is_empty() {
                break;
            }
            section.step(some.len() as u64).await;
            chunk.extend(some);
            if chunk.len() == most {
                section.pause();
                output.chunk(writer, Items::Tombstones(std::mem::take(&mut chunk))).await?;
                if kvarts_layout::planted!("first-chunk-alone") {
                    return Ok(());
                }
            }
        }
    }
    section.pause();
    if chunk.is_empty() { Ok(()) } else { output.chunk(writer, Items::Tombstones(chunk)).await }
}

/// What is said of a segment; `None` if nothing is.
fn stated(segment: &Segment) -> Option<Stated> {
    let generation = segment.generation.get();
    let durable_upto = segment.tail.borrow().durable_upto;
    let (state, log_end) = match segment.state.get() {
        // A file that was never used looks so.
        SegmentState::Free if generation == 0 => return None,
        SegmentState::Free => (SEGMENT_FREE, 0),
        SegmentState::Sealed => (SEGMENT_SEALED, segment.sealed_upto()),
        // A new file of which nothing has been flushed, not even the header: a crash may leave it empty, and known
        // to be in use it would look as if it had been zeroed.
        SegmentState::Open | SegmentState::Sealing | SegmentState::Suspect
            if generation == 1 && durable_upto == 0 =>
        {
            return None;
        }
        SegmentState::Open | SegmentState::Sealing => (SEGMENT_OPEN, durable_upto),
        // Broken off here: what is on disk of it is what an open one has.
        SegmentState::Suspect if segment.broken().is_some() => (SEGMENT_OPEN, durable_upto),
        // Set aside by recovery, which will see again why.
        SegmentState::Suspect => return None,
    };
    let first_sequence = segment.first_sequence.get();
    Some(Stated {
        generation,
        first_sequence,
        last_sequence: first_sequence,
        log_end,
        segment: segment.number,
        state,
    })
}

/// Writes all live records of the shard and says how many there are. Those of other shards are not looked at.
async fn write_records(output: &mut Output<'_>, writer: &mut CheckpointWriter) -> Result<u64, Reason> {
    let volume = output.volume;
    let shard = u16::try_from(volume.shard)
        .map_err(|_| Reason::Bug("the number of a shard exceeds the limit of the index"))?;
    let mut section = Section::begin(&volume.shared.work.checkpoints, &*volume.shared.clock);
    let most = volume.shared.batches.checkpoint_items.max(1);
    let mut written = 0;
    let mut items = Vec::new();
    let mut some = Vec::new();
    let mut cursor = Some(OwnerCursor::default());
    while let Some(from) = cursor {
        cursor = volume.shared.index.records().snapshot_of((shard, None), from, &mut some);
        section.step(1 + some.len() as u64).await;
        if kvarts_layout::planted!("checkpoint-looks-at-all") {
            section.step(volume.shared.index.memory().records as u64).await;
        }
        items.extend(some.iter().filter_map(|(_, record, used)| record_state(volume, record, *used)));
        while items.len() >= most || (cursor.is_none() && !items.is_empty()) {
            section.pause();
            let rest = items.split_off(most.min(items.len()));
            written += items.len() as u64;
            output.chunk(writer, Items::Records(std::mem::replace(&mut items, rest))).await?;
        }
    }
    Ok(written)
}

fn record_state(volume: &Volume, record: &RecordInfo, used: u32) -> Option<RecordState> {
    if record.live == 0 {
        return None;
    }
    let generation = volume.segments.borrow().get(&record.segment)?.generation.get();
    let expires_ms = match record.expires {
        0 => 0,
        steps => volume.shared.created_ms.saturating_add(u64::from(steps) * EXPIRY_STEP_MS),
    };
    Some(RecordState {
        generation,
        offset: u64::from(record.page) * PAGE_BYTES,
        expires_ms,
        segment: record.segment,
        last_access_s: used,
    })
}

fn unencodable(_: EncodeError) -> Reason {
    Reason::Bug("a checkpoint cannot be encoded")
}

impl Output<'_> {
    async fn chunk(&mut self, writer: &mut CheckpointWriter, items: Items) -> Result<(), Reason> {
        let (bytes, mut own) = (items.count().saturating_mul(ITEM_BYTES), writer.clone());
        let encode = move || {
            let image = own.chunk(&items);
            (own, image)
        };
        let volume = self.volume;
        let encoded = volume.driver.compute(volume.dir, bytes, encode).await;
        let (own, image) = encoded.map_err(|error| failed(volume, &error))?;
        *writer = own;
        self.append(&image.map_err(unencodable)?).await
    }

    async fn append(&mut self, image: &[u8]) -> Result<(), Reason> {
        let charged = self.volume.checkpoints.charged(self.slot);
        let end = self.at + image.len() as u64;
        if let Some(more) = end.checked_sub(charged.get()).filter(|&more| more > 0) {
            self.volume.shared.take_checkpoint_budget(more)?;
            charged.set(end);
        }
        self.put(self.at, image, false).await?;
        self.at = end;
        Ok(())
    }

    /// Gives back what an attempt took that the file did not get.
    async fn recount(&self) {
        let charged = self.volume.checkpoints.charged(self.slot);
        // Unknown, it stays as it is: never too little.
        if let Ok((_, allocated)) = self.volume.driver.stat(self.file).await {
            let less = charged.get().saturating_sub(allocated);
            self.volume.shared.give_checkpoint_budget(less);
            charged.set(charged.get() - less);
        }
    }

    async fn put(&self, at: u64, image: &[u8], sync: bool) -> Result<(), Reason> {
        let volume = self.volume;
        let mut staging = volume.stage(image.len()).await.map_err(|error| failed(volume, &error))?;
        staging.copy_in(0, image);
        let written = volume.driver.write(self.class, self.file, at, staging, sync).await;
        written.map_err(|error| failed(volume, &error))
    }

    /// Makes everything durable and then the header; gives the bytes of the file.
    async fn finish(&self, header: &[u8]) -> Result<u64, Reason> {
        let volume = self.volume;
        let failed = |error: IoError| failed(volume, &error);
        volume.driver.meta(MetaOp::Truncate { file: self.file, len: self.at }).await.map_err(failed)?;
        volume.driver.flush(self.file).await.map_err(failed)?;
        self.put(0, header, true).await?;
        volume.driver.meta(MetaOp::SyncDir { name: volume.home() }).await.map_err(failed)?;
        let charged = volume.checkpoints.charged(self.slot);
        volume.shared.give_checkpoint_budget(charged.get().saturating_sub(self.at));
        charged.set(self.at);
        Ok(self.at)
    }
}
