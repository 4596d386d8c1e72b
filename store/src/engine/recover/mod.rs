//! Recovery of one shard: from its files to the index, by the recovery table of the format.
//!
//! 1. The directory is listed and every segment file opened; the newest whole checkpoint is read.
//! 2. The first and last page of each segment say what it is. Unsealed and damaged ones are scanned at once, and
//!    sealed with what counts in them, or freed. Nothing is ever appended to them.
//! 3. Segments are taken into the index newest first, from their footers.
//!
//! Invariants:
//! - Every decision is a row of `format::recovery`; the report counts each row by its label.
//! - Nothing but footers and trailers of recovered segments is written, and the header of one whose own never
//!   arrived, and the rests of short segments are given back; each is what the next recovery would find by the scan: a crash in the middle leaves a store that recovers to the same, and so does a second
//!   recovery.
//! - A segment that cannot be told costs its own blocks only, and is not recycled.
//! - No record header of a sealed segment is read, but one definition for each namespace and spec.

mod adopt;
mod files;
mod footers;
mod observe;
mod report;
mod scan;
#[cfg(test)]
pub(super) mod tests;

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use kvarts_layout::format::checkpoint::SEGMENT_FREE;
use kvarts_layout::format::footer::{Content, Entry, Footer};
use kvarts_layout::format::recovery::{Decision, HeaderSeen, Scan, TrailerSeen, segment_row};
use kvarts_layout::format::trailer::{SealReason, Trailer};

pub use report::{Problem, RecoveryReport};

pub(crate) use self::adopt::Batch;
use self::files::{Files, SegmentFile};
use self::footers::Ahead;
use self::scan::Target;
use crate::engine::space::evict::batch::punched_bytes;
use crate::engine::tasks::steps::AT_ONCE;
use crate::engine::volume::Volume;
use crate::engine::volume::checkpoint::{self, Checkpoint};
use crate::engine::volume::pages::{CLASS, memory};
use crate::engine::volume::segment::{Segment, SegmentState};
use crate::engine::volume::tombstones::Graves;
use crate::engine::write::log::Log;
use crate::io::{MetaOp, Reply};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;
use kvarts_contract::io_error::{FileId, IoError, IoErrorKind};
use observe::Ends;

/// Footers that are read ahead of the one being taken in, and questions for holes beside them.
const FOOTERS_AHEAD: usize = 4;

/// The recovery of one shard, under way.
struct Recovery<'a> {
    volume: &'a Volume,
    log: &'a Rc<Log>,
    report: RecoveryReport,
    checkpoint: Checkpoint,
    batch: &'a mut Batch,
    now_ms: u64,
    /// Whether some segment cannot be told.
    untold: bool,
}

/// More sequences than records fit on any disk.
const SEQUENCES_UNKNOWN: u64 = 1 << 36;

/// Bytes of a footer for a block at least: its key and its origin.
const NAME_BYTES: usize = 48;

/// A segment whose records count, and where they are listed.
struct Source {
    segment: Rc<Segment>,
    first_sequence: u64,
    listed: Listed,
}

impl Source {
    /// About how many blocks it lists: a little more than there can be, so that the index finds gaps near.
    fn blocks_about(&self) -> usize {
        match &self.listed {
            Listed::Footer(_, trailer) => trailer.footer_bytes as usize / NAME_BYTES,
            Listed::Scanned(entries) => {
                let blocks = |entry: &Entry| match &entry.content {
                    Content::Blocks(blocks) => blocks.blocks.len(),
                    _ => 0,
                };
                entries.iter().map(blocks).sum::<usize>() * 9 / 8
            }
        }
    }
}

#[allow(
    clippy::large_enum_variant,
    reason = "there is one value for each segment, and only during a recovery"
)]
enum Listed {
    Scanned(Vec<Entry>),
    Footer(Box<Ends>, Trailer),
}

/// The holes that a file system tells of, or none if it does not say which there are.
fn found_holes(reply: Result<Option<Reply>, IoError>) -> Result<Option<Vec<(u64, u64)>>, Reason> {
    match reply {
        Ok(Some(Reply::Holes(holes))) => Ok(Some(holes)),
        // Such a file system makes none.
        Err(error) if error.kind == IoErrorKind::Unsupported => Ok(Some(Vec::new())),
        Err(_) => Ok(None),
        Ok(_) => Err(Reason::Bug("a search for holes returned the reply of another operation")),
    }
}

/// Finds everything that an empty log's directory holds. Called once, before anything else uses the log.
#[cfg(test)]
pub(crate) async fn recover(log: &Rc<Log>) -> Result<RecoveryReport, Reason> {
    let mut batch = Batch::new(1);
    let mut report = [recover_told(log, None, &mut batch).await?];
    batch.finish(&log.volume.shared, &mut report)?;
    let [report] = report;
    Ok(report)
}

/// Finds everything that an empty log's directory holds. Called once, before anything else uses the log. Its blocks are in the index, and
/// counted in the report, when the batch is finished. What others know to be deleted counts as deleted behind everything that is
/// found, and is durable when this returns.
pub(crate) async fn recover_told(
    log: &Rc<Log>,
    told: Option<&Graves>,
    batch: &mut Batch,
) -> Result<RecoveryReport, Reason> {
    let volume = &*log.volume;
    let found = files::open(volume).await?;
    let mut checkpoint = checkpoint::read(volume, &found.checkpoints).await?;
    let report = RecoveryReport {
        shard: volume.shard,
        strays: found.strays,
        segments: (found.segments.len() + found.unreadable.len()) as u64,
        checkpoint: checkpoint.sequence,
        metadata_bytes: checkpoint.bytes_read,
        ..RecoveryReport::default()
    };
    volume.sequence.set(volume.sequence.get().max(checkpoint.next_sequence));
    volume.tombstones.replace(std::mem::take(&mut checkpoint.tombstones));
    let now_ms = volume.shared.clock.unix_millis();
    let mut recovery = Recovery { volume, log, report, checkpoint, batch, now_ms, untold: false };
    recovery.retire(&found);
    let mut sources = recovery.classify(&found.segments).await?;
    recovery.pass_over_sequences();
    if let Some(told) = told.filter(|_| !kvarts_layout::planted!("behind-not-told")) {
        let (below, mut behind) = (volume.sequence.get(), None);
        loop {
            let at_once = (behind, AT_ONCE as usize);
            behind = volume.tombstones.borrow_mut().bury_told(told, below, at_once);
            if behind.is_none() {
                break;
            }
            recovery.batch.let_others().await;
        }
    }
    // Newest first: see `adopt`.
    sources.sort_by_key(|source| std::cmp::Reverse(source.first_sequence));
    recovery.take_in(sources).await?;
    volume.shared.buried.fetch_add(volume.tombstones.borrow().len() as u64, Relaxed);
    volume.is_counted.set(true);
    if told.is_some() {
        recovery.batch.flush(&volume.shared)?;
        checkpoint::write(volume, Class::Background).await?;
    }
    let half_deleted = volume.tombstones.borrow().half_deleted();
    Ok(RecoveryReport { half_deleted, ..recovery.report })
}

impl Recovery<'_> {
    /// Says of each segment what it is, and gives those whose records count.
    async fn classify(&mut self, files: &[SegmentFile]) -> Result<Vec<Source>, Reason> {
        let mut sources = Vec::new();
        for (file, ends) in files.iter().zip(observe::ends(self, files).await?) {
            let sighting = ends.sighting(&self.checkpoint);
            let row = segment_row(&sighting);
            let segment = self.segment(file, ends.floor(&self.checkpoint));
            if let Some(header) = &ends.header {
                self.saw(header.first_sequence.saturating_sub(1));
            }
            if let (Decision::UseFooter, Some(trailer)) = (row.decision, ends.trailer) {
                // The row is taken when the footer has been read: it may be lost.
                let first_sequence = trailer.first_sequence;
                self.saw(trailer.last_sequence);
                sources.push(Source {
                    segment,
                    first_sequence,
                    listed: Listed::Footer(Box::new(ends), trailer),
                });
                continue;
            }
            self.report.take(row, file.number, 0);
            match row.decision {
                Decision::Reuse => {
                    let first = ends.header.as_ref().map_or(0, |header| header.first_sequence);
                    segment.first_sequence.set(first);
                    segment.state.set(SegmentState::Free);
                }
                Decision::ScanTail => sources.extend(self.scan(segment, &ends, Scan::Tail).await?),
                Decision::Rescan => sources.extend(self.scan(segment, &ends, Scan::Rescan).await?),
                // Neither read nor recycled.
                _ => self.untold = true,
            }
        }
        Ok(sources)
    }

    /// Notes which bytes of its records a segment does not have any more.
    fn note_holes(&self, segment: &Segment, holes: Vec<(u64, u64)>, entries: &[Entry]) {
        let punched = punched_bytes(entries, &holes);
        segment.found_holes(holes, punched, segment.book.allocated());
    }

    /// Notes the generations of segments whose files are gone, so that their numbers go on where they were; one that was in use
    /// is lost.
    fn retire(&mut self, files: &Files) {
        let mut retired = self.volume.retired.borrow_mut();
        for &number in &files.unreadable {
            self.pass_over(number);
            let known = self.checkpoint.segments.get(&number).copied();
            self.volume.unreadable.borrow_mut().insert(number, known);
        }
        let there = files.segments.iter().map(|file| file.number);
        let there: BTreeSet<u32> = there.chain(files.unreadable.iter().copied()).collect();
        for (&number, known) in &self.checkpoint.segments {
            if !there.contains(&number) {
                retired.insert(number, known.generation);
                if known.state != SEGMENT_FREE {
                    self.report.miss(number);
                    // Told at each start until the store is repaired: checkpoints go on to say it.
                    self.volume.lost.borrow_mut().insert(number, *known);
                }
            }
        }
    }

    /// A segment cannot be used until the next start.
    fn pass_over(&mut self, segment: u32) {
        self.report.pass_over(segment);
        self.volume.shared.directories.note_unreadable();
    }

    /// A segment of which nothing is known yet.
    fn segment(&self, file: &SegmentFile, generation: u64) -> Rc<Segment> {
        let book = self.volume.shared.index.records().ledger().open(self.volume.shard, file.number);
        book.set_allocated(file.allocated);
        self.volume.unbooked.set(self.volume.unbooked.get().saturating_sub(file.allocated));
        let segment =
            Rc::new(Segment::new((file.number, book), file.file, generation, SegmentState::Suspect));
        self.volume.segments.borrow_mut().insert(file.number, Rc::clone(&segment));
        segment
    }

    /// What cannot be read may hold records of any sequence that this shard ever gave. What is written from now on is later all the same, and
    /// what is deleted from now on is dead there too.
    fn pass_over_sequences(&self) {
        let any = self.untold || !self.volume.unreadable.borrow().is_empty();
        if any && !kvarts_layout::planted!("sequence-not-passed-over") {
            let sequence = &self.volume.sequence;
            sequence.set(sequence.get().saturating_add(SEQUENCES_UNKNOWN));
        }
    }

    fn saw(&self, sequence: u64) {
        let sequence = if kvarts_layout::planted!("sequence-not-restored") { 0 } else { sequence };
        self.volume.sequence.set(self.volume.sequence.get().max(sequence.saturating_add(1)));
    }

    /// What a segment has no bytes of. Without knowing it, what was evicted would look damaged.
    async fn holes(&self, file: FileId) -> Result<Option<Vec<(u64, u64)>>, Reason> {
        found_holes(self.volume.driver.meta(MetaOp::Holes { file, upto: u64::MAX }).await)
    }

    /// Scans a segment; seals it if it holds anything, frees it if not. One that was sealed has lost what it has no bytes of
    /// by decision, and they are not given to it again.
    async fn scan(
        &mut self,
        segment: Rc<Segment>,
        ends: &Ends,
        scan: Scan,
    ) -> Result<Option<Source>, Reason> {
        let (durable_generation, durable_upto) = ends.durable(&self.checkpoint);
        let was_sealed = scan == Scan::Rescan && ends.sighting(&self.checkpoint).may_have_holes();
        let ask = (was_sealed || scan == Scan::Tail) && !kvarts_layout::planted!("rescan-forgets-holes");
        let holes = if ask { self.holes(segment.file).await? } else { Some(Vec::new()) };
        let Some(mut holes) = holes else {
            self.pass_over(segment.number);
            return Ok(None);
        };
        let target = Target {
            file: segment.file,
            holes: if was_sealed { &holes } else { &[] },
            if_sealed: if was_sealed { &[] } else { &holes },
            len: ends.len,
            scan,
            position: ends
                .position
                .under(ends.header.as_ref().map_or(0, |header| header.position.generation)),
            first_sequence: ends.header.as_ref().map_or(0, |header| header.first_sequence),
            durable_upto,
            durable_generation,
        };
        let scanned = scan::scan(self, &target).await?;
        let was_sealed = was_sealed || scanned.was_sealed;
        if !was_sealed || kvarts_layout::planted!("holes-filled-again") {
            holes.clear();
            files::complete(self.volume, &segment).await;
        }
        self.saw(scanned.last_sequence);
        let floor = segment.generation.get().max(scanned.generation);
        if !scanned.is_worth_sealing() {
            // Kept, so that the next use is under a later one than anything that was written here.
            segment.generation.set(floor);
            if !holes.is_empty() {
                segment.set_holed();
            }
            segment.state.set(SegmentState::Free);
            return Ok(None);
        }
        segment.generation.set(scanned.generation);
        let entries = scanned.entries;
        let first_sequence = entries.first().map_or(scanned.last_sequence, |entry| entry.sequence);
        segment.first_sequence.set(first_sequence);
        segment.found(scanned.log_end, &entries);
        self.note_holes(&segment, holes, &entries);
        {
            let mut tail = segment.tail.borrow_mut();
            tail.next = scanned.log_end;
            tail.entries.clone_from(&entries);
        }
        segment.state.set(SegmentState::Sealing);
        let sealed = match self.replace_header(&segment, ends).await {
            Ok(()) => self.log.seal(&segment, SealReason::Recovery).await,
            Err(reason) => Err(reason),
        };
        if was_sealed {
            files::recount(self.volume, &segment).await;
        }
        match sealed {
            Ok(()) => self.report.sealed_now += 1,
            Err(reason) => {
                // What the records say holds all the same; the next recovery scans it again.
                segment.break_off(reason);
                self.report.unsealed += 1;
            }
        }
        Ok(Some(Source { segment, first_sequence, listed: Listed::Scanned(entries) }))
    }

    /// Writes the header of a new file whose records arrived before it did: sealed without one, the segment would
    /// look damaged from then on.
    async fn replace_header(&self, segment: &Segment, ends: &Ends) -> Result<(), Reason> {
        if ends.header_seen != HeaderSeen::Empty || kvarts_layout::planted!("lost-header-not-written") {
            return Ok(());
        }
        let image = self.volume.header_image(segment)?;
        let mut page = memory(self.volume, image.len())?;
        page.copy_in(0, &image);
        let written = self.volume.driver.write(CLASS, segment.file, 0, page, true).await;
        written.map_err(Reason::from)
    }

    /// Takes segments into the index, in this order, reading and decoding footers ahead.
    async fn take_in(&mut self, sources: Vec<Source>) -> Result<(), Reason> {
        let blocks = sources.iter().map(Source::blocks_about).sum();
        self.batch.begin(&self.volume.shared, self.volume.shard, blocks);
        let mut ahead = Ahead::default();
        let mut begun = sources.iter();
        for (at, source) in sources.iter().enumerate() {
            while begun.len() + at + FOOTERS_AHEAD > sources.len()
                && let Some(source) = begun.next()
            {
                if let Listed::Footer(ends, trailer) = &source.listed {
                    ahead.begin(footers::find(self.volume, &source.segment, (ends, *trailer))?);
                }
            }
            match &source.listed {
                Listed::Scanned(entries) => self.adopt(&source.segment, entries).await?,
                Listed::Footer(ends, trailer) => {
                    self.report.metadata_bytes += u64::from(trailer.footer_bytes);
                    let (footer, holes) = ahead.next().await;
                    match holes? {
                        Some(holes) => {
                            self.take_in_footer(source, (ends, trailer), footer, holes).await?;
                        }
                        // It stays suspect: neither read nor recycled.
                        None => self.pass_over(source.segment.number),
                    }
                }
            }
        }
        Ok(())
    }

    async fn take_in_footer(
        &mut self,
        source: &Source,
        (ends, trailer): (&Ends, &Trailer),
        footer: Option<Footer>,
        holes: Vec<(u64, u64)>,
    ) -> Result<(), Reason> {
        let segment = &source.segment;
        let mut sighting = ends.sighting(&self.checkpoint);
        match footer {
            Some(footer) => {
                self.report.take(segment_row(&sighting), segment.number, 0);
                segment.generation.set(ends.trailer_position.generation);
                segment.first_sequence.set(trailer.first_sequence);
                segment.found(trailer.log_end, &footer.records);
                self.note_holes(segment, holes, &footer.records);
                segment.sealed_at(
                    (trailer.log_end, None),
                    (trailer.footer_offset, trailer.footer_bytes),
                    trailer.reason,
                );
                if segment.is_short(self.volume.shared.segment_bytes) {
                    // A crash came before that was done, or an earlier program sealed it.
                    self.log.space.give_rest_back(segment, &footer.records).await;
                }
                segment.state.set(SegmentState::Sealed);
                self.adopt(segment, &footer.records).await
            }
            None => {
                sighting.trailer = TrailerSeen::FooterLost;
                let row = segment_row(&sighting);
                self.report.take(row, segment.number, trailer.footer_offset);
                if row.decision != Decision::Rescan {
                    return Ok(());
                }
                match self.scan(Rc::clone(segment), ends, Scan::Rescan).await? {
                    Some(Source { listed: Listed::Scanned(entries), .. }) => {
                        self.adopt(segment, &entries).await
                    }
                    _ => Ok(()),
                }
            }
        }
    }
}
