//! The audit: what the store's books say is compared with what can be counted.
//!
//! - The four kinds of bytes add up, segment by segment and for the store.
//! - Live bytes are those that the index's entries give, counted one by one, and so are each namespace's together.
//! - What the file system has allocated is never more than the books say, and the books never say more than the
//!   budget (unless it was lowered: then the audit is told so).
//! - In the simulation, where nothing happens meanwhile: what the file system has allocated is what the books say,
//!   to the byte, and what each sealed segment's footer on disk lists is what its book counts.

use std::collections::BTreeMap;

use kvarts_contract::io_error::DirId;
use kvarts_layout::format::footer::{Content, Footer};
use kvarts_layout::format::names::{SUPERBLOCK, segment_name, shard_name};
use kvarts_layout::format::segment::SegmentHeader;
use kvarts_layout::format::superblock::Superblock;
use kvarts_layout::format::trailer::{self, Trailer};
use kvarts_layout::format::{PAGE_BYTES, Position, Secret, page_align};
use kvarts_store::engine::{Store, Table};
use kvarts_store::ledger::{Phase, SegmentView, Space, SpaceReport};

use crate::sim::Media;

/// What was found wrong; `Ok` if nothing.
pub type Finding = Result<(), String>;

fn same<T: PartialEq + std::fmt::Debug>(what: &str, books: &T, counted: &T) -> Finding {
    if books == counted {
        Ok(())
    } else {
        Err(format!("{what}: the books say {books:?}, counted are {counted:?}"))
    }
}

/// What can be asked of any store that is idle at the moment.
pub fn books(store: &Store) -> Result<SpaceReport, String> {
    let report = store.stats().space;
    let segments = store.segments();
    for segment in &segments {
        same(&format!("{segment:?} in all"), &segment.space.allocated, &segment.space.sum())?;
        let inside = segment.log_end - segment.punched <= segment.space.allocated
            && segment.records <= segment.log_end
            && segment.punched <= segment.records;
        if !inside {
            return Err(format!("{segment:?} holds more than it has"));
        }
    }
    same("the store in all", &report.total.allocated, &report.total.sum())?;
    let mut total = Space::default();
    segments.iter().for_each(|segment| total += segment.space);
    let mut shards = Space::default();
    report.shards.iter().for_each(|shard| shards += shard.space);
    same("shards beside segments", &shards, &total)?;
    let beside = report.checkpoints + report.superblocks + report.directories + report.reserved;
    same("all that is allocated", &report.total.allocated, &(total.allocated + beside))?;
    let live: BTreeMap<(u32, u32), u64> = segments
        .iter()
        .filter(|segment| segment.space.live > 0)
        .map(|segment| ((segment.shard, segment.segment), segment.space.live))
        .collect();
    let counted: BTreeMap<_, _> = store.count_live().into_iter().filter(|(_, live)| *live > 0).collect();
    same("live bytes by segment", &live, &counted)?;
    let namespaces: u64 = report.namespaces.iter().map(|namespace| namespace.live).sum();
    same("live bytes of all namespaces", &namespaces, &report.total.live)?;
    Ok(report)
}

/// The counters that all shards share say what the shards have: nothing of a shard that was given up, or of a return that failed, is left
/// in them. Of a store that does nothing, whose tables these are.
pub fn counts(store: &Store, tables: &[Table]) -> Finding {
    let stats = store.stats();
    same("bytes of the budget that belong to nothing", &stats.space.reserved, &0)?;
    let tombstones: u64 = tables.iter().filter(|one| one.name == "tombstones").map(|one| one.size).sum();
    same("tombstones of all shards", &stats.tombstones, &tombstones)
}

/// The budget is kept.
pub fn budget(report: &SpaceReport) -> Finding {
    if report.total.allocated > report.budget {
        return Err(format!("{} bytes where the budget is {}", report.total.allocated, report.budget));
    }
    Ok(())
}

/// The file system has no more than the books say, whatever is under way.
pub fn bound(report: &SpaceReport, media: &Media) -> Finding {
    let (free, total) = media.space();
    let books = report.total.allocated - report.directories;
    if total - free > books {
        return Err(format!("{} bytes on the disk, {books} in the books", total - free));
    }
    Ok(())
}

/// What a simulated disk has beside the books of the store on it. Nothing may be under way. Gives the number of
/// footers that were compared.
pub fn disk(report: &SpaceReport, segments: &[SegmentView], media: &Media) -> Result<usize, String> {
    compare(report, segments, &Disk::new(media)?, 0)
}

/// The same of a store that was opened on what a crash left. A file that the crash robbed of bytes, and that could not have
/// them again within a lowered budget, is counted as if it had.
pub fn disk_recovered(
    report: &SpaceReport,
    segments: &[SegmentView],
    media: &Media,
) -> Result<usize, String> {
    let on_disk = Disk::new(media)?;
    let lacks = |segment: &SegmentView| segment.space.allocated.saturating_sub(on_disk.allocated(segment));
    let robbed = segments.iter().map(lacks).sum();
    compare(report, segments, &on_disk, robbed)
}

fn compare(
    report: &SpaceReport,
    segments: &[SegmentView],
    on_disk: &Disk<'_>,
    robbed: u64,
) -> Result<usize, String> {
    let (free, total) = on_disk.media.space();
    let books = report.total.allocated - report.directories - report.reserved - robbed;
    same("bytes on the disk", &books, &(total - free))?;
    let mut footers = 0;
    for segment in segments.iter().filter(|segment| segment.phase == Phase::Full) {
        // One whose footer cannot be read says nothing: it was sealed under a disk that lies.
        if let Some((log_end, records)) = on_disk.footer(segment) {
            footers += 1;
            same(
                &format!("the footer of {segment:?}"),
                &(segment.log_end, segment.records),
                &(log_end, records),
            )?;
        }
    }
    Ok(footers)
}

/// The files of a store, read without the store.
struct Disk<'a> {
    media: &'a Media,
    secret: Secret,
    superblock: Superblock,
    /// The directory of each shard's files.
    homes: BTreeMap<u32, DirId>,
}

impl<'a> Disk<'a> {
    fn new(media: &'a Media) -> Result<Self, String> {
        let mut homes = BTreeMap::new();
        let mut first = None;
        for dir in (0..).map(DirId) {
            let Some(bytes) = media.contents(dir, SUPERBLOCK) else { break };
            let chosen =
                Superblock::decode_pair(&bytes, None).map_err(|why| format!("superblock: {why:?}"))?;
            homes.extend(chosen.superblock.shards.iter().map(|shard| (*shard, dir)));
            first.get_or_insert(chosen.superblock);
        }
        let superblock = first.ok_or("no superblock")?;
        Ok(Self { media, secret: superblock.secret.clone(), superblock, homes })
    }

    fn path(&self, segment: &SegmentView) -> Option<(DirId, String)> {
        let dir = *self.homes.get(&segment.shard)?;
        Some((dir, format!("{}/{}", shard_name(segment.shard), segment_name(segment.segment))))
    }

    /// Bytes that its file has.
    fn allocated(&self, segment: &SegmentView) -> u64 {
        self.path(segment).and_then(|(dir, path)| self.media.allocated(dir, &path)).unwrap_or(0)
    }

    /// Where the records of a sealed segment end, and the bytes of those of blocks, as its footer has it.
    fn footer(&self, segment: &SegmentView) -> Option<(u64, u64)> {
        let (dir, path) = self.path(segment)?;
        let bytes = self.media.contents(dir, &path)?;
        let place = Position {
            store: self.superblock.store,
            shard: segment.shard,
            segment: segment.segment,
            generation: 0,
            offset: 0,
        };
        let header = SegmentHeader::decode_any_generation(bytes.get(..4096)?, &place, &self.secret).ok()?;
        let position = header.position;
        let len = self.superblock.segment_bytes;
        let last = bytes.get((len - PAGE_BYTES) as usize..)?;
        let trailer = Trailer::decode(last, &trailer::position(&position, len), &self.secret).ok()?;
        let from = trailer.footer_offset as usize;
        let image = bytes.get(from..from + trailer.footer_bytes as usize)?;
        let footer = Footer::decode(image, &position.at(trailer.footer_offset), &self.secret).ok()?;
        let blocks = footer.records.iter().filter(|entry| matches!(entry.content, Content::Blocks(_)));
        let bytes = |entry: &kvarts_layout::format::footer::Entry| {
            u64::from(entry.header_bytes) + page_align(entry.payload_bytes).unwrap_or(0)
        };
        Some((trailer.log_end, blocks.map(bytes).sum()))
    }
}
