//! The files of a shard: which there are, how long they are, what they take.

use std::time::Duration;

use kvarts_layout::format;
use kvarts_layout::format::names::FileName;

use crate::driver::Meta;
use crate::engine::space::evict::probe;
use crate::engine::volume::Volume;
use crate::engine::volume::directory::refused;
use crate::engine::volume::segment::Segment;
use crate::io::{EntryKind, MetaOp, OpenMode, Reply};
use kvarts_contract::error::{DirectoryCause, Reason};
use kvarts_contract::io_error::{FileId, IoError, IoErrorKind};

/// Operations under way at once.
const AT_ONCE: usize = 64;
/// How often more a segment is opened where something else than the disk is short, and after how long.
const TRIES_MORE: u32 = 3;
const PAUSE: Duration = Duration::from_millis(20);

/// An open segment file.
#[derive(Clone, Copy, Debug)]
pub(super) struct SegmentFile {
    pub(super) number: u32,
    pub(super) file: FileId,
    /// Bytes that may be read.
    pub(super) len: u64,
    /// Bytes of the budget that it has.
    pub(super) allocated: u64,
}

/// What a shard's directory holds.
#[derive(Debug, Default)]
pub(super) struct Files {
    pub(super) segments: Vec<SegmentFile>,
    /// Numbers of segments whose files could not be opened.
    pub(super) unreadable: Vec<u32>,
    /// Slots of checkpoint files.
    pub(super) checkpoints: Vec<u32>,
    pub(super) strays: u64,
}

/// Lists the directory, opens its segments and counts what they take. One that is gone is not made again: it is made
/// before the store is, so it was lost with what was in it, and that would never be reported. A segment that cannot be
/// opened costs what it holds.
pub(super) async fn open(volume: &Volume) -> Result<Files, Reason> {
    let unusable = |error: IoError| refused(&error);
    let listing = match volume.driver.list(volume.home()).await {
        Err(error) if error.kind == IoErrorKind::NotFound => {
            return Err(Reason::Directory(DirectoryCause::LostShard(volume.dir.0, volume.shard)));
        }
        listing => listing.map_err(unusable)?,
    };
    let mut files = Files::default();
    let mut numbers = Vec::new();
    for entry in listing {
        match (entry.kind, FileName::parse(&entry.name)) {
            (EntryKind::File, Some(FileName::Segment(number))) => numbers.push((number, entry.name)),
            (EntryKind::File, Some(FileName::Checkpoint(slot))) => files.checkpoints.push(slot),
            (EntryKind::File, None) if *entry.name == *probe::NAME => {
                // Nothing is lost by it, and bytes that are not counted are given back.
                let _ = volume.driver.meta(MetaOp::Remove { name: volume.file_name(probe::NAME) }).await;
            }
            _ => files.strays += 1,
        }
    }
    for some in numbers.chunks(AT_ONCE) {
        let mode = OpenMode { write: true, create: false, direct: true };
        let opening: Vec<Meta> = some
            .iter()
            .map(|(_, name)| volume.driver.meta(MetaOp::Open { name: volume.file_name(name), mode }))
            .collect();
        let mut opened = Vec::with_capacity(some.len());
        for ((number, _), opening) in some.iter().zip(opening) {
            match opening.await {
                Ok(Some(Reply::Opened(file))) => opened.push((*number, file)),
                Ok(_) => return Err(Reason::Bug("a call that opens a file returned no file")),
                Err(error) => match again(volume, number, error).await {
                    Some(file) => opened.push((*number, file)),
                    None => files.unreadable.push(*number),
                },
            }
        }
        let stats: Vec<Meta> =
            opened.iter().map(|&(_, file)| volume.driver.meta(MetaOp::Stat { file })).collect();
        for ((number, file), stat) in opened.into_iter().zip(stats) {
            let (len, allocated) = match stat.await {
                Ok(Some(Reply::Stat { len, allocated })) => (len, allocated),
                Ok(_) => return Err(Reason::Bug("a call for the metadata of a file returned no metadata")),
                Err(_) => {
                    let _ = volume.driver.meta(MetaOp::Close { file }).await;
                    files.unreadable.push(number);
                    continue;
                }
            };
            let (len, allocated) = lengthen(volume, file, len, allocated).await;
            files.segments.push(SegmentFile { number, file, len, allocated });
        }
    }
    // Whatever they have on disk, it is no more than that.
    volume.charge_unbooked(volume.shared.segment_bytes * files.unreadable.len() as u64);
    Ok(files)
}

/// Opens a segment once more, and again, where what kept it from being opened passes.
async fn again(volume: &Volume, number: &u32, error: IoError) -> Option<FileId> {
    let (name, mut error) = (format::names::segment_name(*number), error);
    let mode = OpenMode { write: true, create: false, direct: true };
    for _ in 0..TRIES_MORE {
        if error.kind != IoErrorKind::Passing {
            return None;
        }
        volume.driver.pause(PAUSE).await;
        match volume.driver.open(volume.file_name(&name), mode).await {
            Ok(file) => return Some(file),
            Err(next) => error = next,
        }
    }
    None
}

/// Charges a segment file with what it has. One that is shorter than a segment, as a crash between its making and its
/// first write leaves it, is given its length if budget and disk have the room; without it, counted in full, it is among
/// the first to be given back.
async fn lengthen(volume: &Volume, file: FileId, len: u64, allocated: u64) -> (u64, u64) {
    let whole = volume.shared.segment_bytes;
    if len >= whole {
        volume.charge_unbooked(allocated);
        return (len, allocated);
    }
    let (used, limit) = volume.shared.space();
    let charged = allocated.max(whole);
    volume.charge_unbooked(charged);
    if used.saturating_add(charged) > limit {
        return (len, charged);
    }
    match volume.driver.meta(MetaOp::Allocate { file, offset: 0, len: whole }).await {
        Ok(_) => (whole, charged),
        Err(_) => (len, charged),
    }
}

/// The same for a segment that was never sealed and lacks bytes of its length: it will get them when it is written. What a
/// sealed one lacks was given back, and stays so.
pub(super) async fn complete(volume: &Volume, segment: &Segment) {
    let (whole, allocated) = (volume.shared.segment_bytes, segment.book.allocated());
    if allocated >= whole {
        return;
    }
    let (used, limit) = volume.shared.space();
    volume.shared.charge(whole - allocated);
    segment.book.set_allocated(whole);
    if used.saturating_add(whole - allocated) <= limit {
        // Without it the segment's writes allocate what they need.
        let _ = volume.driver.meta(MetaOp::Allocate { file: segment.file, offset: 0, len: whole }).await;
    }
}

/// Charges what a segment's file has got by being sealed: footers may lie where there was a hole.
pub(super) async fn recount(volume: &Volume, segment: &Segment) {
    // Unknown, it is counted as before.
    let Ok((_, allocated)) = volume.driver.stat(segment.file).await else { return };
    if let Some(more) = allocated.checked_sub(segment.book.allocated()).filter(|more| *more > 0) {
        volume.shared.charge(more);
        segment.book.set_allocated(allocated);
    }
}
