//! Reads the newest whole checkpoint.

use std::collections::BTreeMap;

use kvarts_layout::NamespaceId;
use kvarts_layout::format::checkpoint::{
    CheckpointHeader, CheckpointReader, Chunk, Items, RecordState, SegmentState,
};
use kvarts_layout::format::names::checkpoint_name;
use kvarts_layout::format::{PAGE, PAGE_BYTES, Position};

use crate::engine::tasks::notify::yield_now;
use crate::engine::tasks::steps::AT_ONCE;
use crate::engine::volume::Volume;
use crate::engine::volume::pages::Pages;
use crate::engine::volume::tombstones::TombstoneSet;
use crate::io::{MetaOp, OpenMode};
use kvarts_contract::error::Reason;
use kvarts_contract::io_error::{FileId, IoError};

/// What a checkpoint says of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Recency {
    page: u32,
    pub(crate) last_access_s: u32,
    pub(crate) expires_ms: u64,
}

/// The newest whole checkpoint, or nothing.
#[derive(Debug, Default)]
pub(crate) struct Checkpoint {
    pub(crate) sequence: Option<u64>,
    pub(crate) next_sequence: u64,
    pub(crate) segments: BTreeMap<u32, SegmentState>,
    pub(crate) tombstones: TombstoneSet,
    /// By segment and generation, each sorted by page.
    records: BTreeMap<(u32, u64), Vec<Recency>>,
    pub(crate) bytes_read: u64,
}

impl Checkpoint {
    /// What it says of the record at a position.
    pub(crate) fn recency(&self, at: Position) -> Option<Recency> {
        let records = self.records.get(&(at.segment, at.generation))?;
        let page = u32::try_from(at.offset / PAGE_BYTES).ok()?;
        let place = records.binary_search_by_key(&page, |record| record.page).ok()?;
        records.get(place).copied()
    }

    async fn take(&mut self, items: Items, names: &mut BTreeMap<u32, NamespaceId>) {
        match items {
            Items::Segments(segments) => {
                self.segments.extend(segments.into_iter().map(|segment| (segment.segment, segment)));
            }
            Items::Namespaces(defined) => {
                names.extend(defined.into_iter().map(|one| (one.local, NamespaceId(one.id))));
            }
            Items::Records(records) => records.iter().for_each(|record| self.record(record)),
            Items::Tombstones(tombstones) => {
                for some in tombstones.chunks(AT_ONCE as usize) {
                    for tombstone in some {
                        if let Some(namespace) = names.get(&tombstone.namespace) {
                            self.tombstones.bury(*namespace, tombstone);
                        }
                    }
                    // The store may be open.
                    yield_now().await;
                }
            }
            Items::Epochs(epochs) => epochs.iter().for_each(|epoch| self.tombstones.bury_all(epoch)),
        }
    }

    fn record(&mut self, record: &RecordState) {
        let Ok(page) = u32::try_from(record.offset / PAGE_BYTES) else { return };
        let recency = Recency { page, last_access_s: record.last_access_s, expires_ms: record.expires_ms };
        self.records.entry((record.segment, record.generation)).or_default().push(recency);
    }
}

/// Reads the newest whole checkpoint of a log, and notes in the log what its files hold and take.
pub(crate) async fn read(volume: &Volume, slots: &[u32]) -> Result<Checkpoint, Reason> {
    let mut found = Vec::new();
    let mut bytes_read = 0;
    for &slot in slots {
        let Ok((file, len)) = open(volume, slot).await else { continue };
        let mut pages = Pages::new(volume, file, len);
        let place = Position {
            store: volume.shared.store,
            shard: volume.shard,
            segment: slot,
            generation: 0,
            offset: 0,
        };
        let page = pages.at(0, PAGE).await?;
        let page = page.get(..PAGE).unwrap_or(page);
        if let Ok(header) = CheckpointHeader::decode(page, &place, &volume.shared.secret) {
            let sequence = header.position.generation;
            volume.checkpoints.sequence.set(volume.checkpoints.sequence.get().max(sequence));
            found.push((sequence, header, pages));
        } else {
            bytes_read += pages.bytes_read;
        }
        // The file stays open until all have been looked at.
        volume.checkpoints.charged(slot).set(charged(volume, file).await);
    }
    found.sort_by_key(|(sequence, ..)| std::cmp::Reverse(*sequence));
    let mut newest = Checkpoint::default();
    for (_, header, pages) in &mut found {
        if newest.sequence.is_none()
            && let Some(whole) = read_whole(volume, header, pages).await?
        {
            volume.checkpoints.newest.set(Some(header.position.segment));
            newest = whole;
        }
        bytes_read += pages.bytes_read;
    }
    for (_, _, pages) in found {
        // Nothing depends on it.
        let _ = volume.driver.meta(MetaOp::Close { file: pages.file() }).await;
    }
    newest.bytes_read = bytes_read;
    Ok(newest)
}

async fn open(volume: &Volume, slot: u32) -> Result<(FileId, u64), IoError> {
    let mode = OpenMode { write: false, create: false, direct: true };
    let file = volume.driver.open(volume.file_name(&checkpoint_name(slot)), mode).await?;
    let (len, _) = volume.driver.stat(file).await?;
    Ok((file, len))
}

async fn charged(volume: &Volume, file: FileId) -> u64 {
    let allocated = volume.driver.stat(file).await.map_or(0, |(_, allocated)| allocated);
    volume.shared.charge_checkpoint(allocated);
    allocated
}

/// The checkpoint, or `None` if it does not count.
async fn read_whole(
    volume: &Volume,
    header: &CheckpointHeader,
    pages: &mut Pages<'_>,
) -> Result<Option<Checkpoint>, Reason> {
    let mut reader = CheckpointReader::new(header, &volume.shared.secret);
    let mut names = BTreeMap::new();
    let mut checkpoint = Checkpoint {
        sequence: Some(header.position.generation),
        next_sequence: header.next_sequence,
        ..Checkpoint::default()
    };
    loop {
        let offset = reader.offset();
        let Ok(bytes) = reader.chunk_bytes(pages.at(offset, PAGE).await?) else { return Ok(None) };
        match reader.chunk(pages.at(offset, bytes).await?) {
            Ok(Chunk::Items(items)) => checkpoint.take(items, &mut names).await,
            Ok(Chunk::End(_)) => break,
            Err(_) => return Ok(None),
        }
    }
    for records in checkpoint.records.values_mut() {
        records.sort_unstable_by_key(|record| record.page);
        // Blocks of one record may have had different times: it is kept as long as any of them.
        records.dedup_by(|later, first| {
            let same = later.page == first.page;
            if same {
                first.last_access_s = first.last_access_s.max(later.last_access_s);
                let never = first.expires_ms == 0 || later.expires_ms == 0;
                first.expires_ms = if never { 0 } else { first.expires_ms.max(later.expires_ms) };
            }
            same
        });
    }
    Ok(Some(checkpoint))
}
