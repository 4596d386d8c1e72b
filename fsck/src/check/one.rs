//! The check of one segment: what its ends say, then its records.

use kvarts_layout::format::checkpoint::SEGMENT_FREE;
use kvarts_layout::format::recovery::{Decision, HeaderSeen, Scan, TrailerSeen, segment_row};
use kvarts_layout::format::{PAGE_BYTES, Unsound};

use super::listed;
use super::options::Level;
use super::outcome::{Accounting, Outcome, SegmentReport, Subject};
use crate::disk::DiskFile;
use crate::findings::{self, Finding, Findings};
use crate::segment::{Ends, disagreement};
use crate::walk::{self, Target};
use crate::window::{Tally, Window};

/// Checks one segment.
pub fn check_segment(file: &dyn DiskFile, subject: &Subject<'_>, tally: &Tally) -> SegmentReport {
    let keyring = subject.keyring;
    let mut window = Window::new(file, keyring.segment_bytes, tally);
    // The ends lie far apart: nothing between them is of use yet.
    window.read_ahead(false);
    let mut ends = Ends::read(&mut window, keyring, subject.shard, subject.segment);
    ends.look_behind(&mut window, keyring, subject.known);
    let mut report = SegmentReport::default();
    let mut sighting = ends.sighting(subject.known);
    let mut row = segment_row(&sighting);
    let (mut found, mut about) = (None, None);
    if let (Decision::UseFooter, Ok(trailer)) = (row.decision, &ends.trailer) {
        match ends.footer(&mut window, trailer, &keyring.secret) {
            Ok(footer) => found = Some((*trailer, footer)),
            Err(why) => {
                sighting.trailer = TrailerSeen::FooterLost;
                row = segment_row(&sighting);
                let place = subject.place(Some(trailer.footer_offset));
                about = Some(Finding::at(row, place).expected("a sound footer").found(why));
            }
        }
    }
    window.read_ahead(true);
    let mut about = about.unwrap_or_else(|| about_ends(subject, &ends, row));
    report.outcome = match (row.decision, found) {
        (Decision::UseFooter, Some((trailer, footer))) => {
            if let Some(field) = disagreement(&trailer, &footer) {
                let place = subject.place(Some(ends.trailer_position.offset));
                report.findings.take(Finding::at(findings::TRAILER_DISAGREES, place).found(field));
            }
            listed::check(&mut window, subject, &ends, (trailer, footer), &mut report.findings)
        }
        (Decision::Reuse, _) => Outcome::Free,
        (Decision::ScanTail, _) => {
            walk_through(&mut window, (subject, &ends), (Scan::Tail, false), &mut report.findings)
        }
        (Decision::Rescan, _) => {
            let was_sealed = sighting.may_have_holes() && !kvarts_layout::planted!("fsck-forgets-holes");
            walk_through(&mut window, (subject, &ends), (Scan::Rescan, was_sealed), &mut report.findings)
        }
        _ => Outcome::Quarantined,
    };
    about.uncounted = match about.uncounted {
        Some(_) => Some(subject.listed),
        None => uncounted(subject, &about, &report.outcome),
    };
    report.findings.take(about);
    about_length(file, subject, &ends, &mut report);
    for &(from, to) in window.faults() {
        let finding = Finding::at(findings::MEDIA_ERROR, subject.place(Some(from)));
        report.findings.take(finding.found(format!("{} bytes", to.saturating_sub(from))));
    }
    account(file, &mut report);
    report.ends = Some(ends);
    report
}

/// What damage to the ends of a segment hides: live records that the checkpoint lists and that were not found, or, where
/// nothing was, the cause is not known.
fn uncounted(subject: &Subject<'_>, about: &Finding, outcome: &Outcome) -> Option<u64> {
    if !about.is_problem() {
        return None;
    }
    let Outcome::Walked { scanned, .. } = outcome else { return None };
    let generation = subject.known.map_or(0, |known| known.generation);
    let listed = if scanned.generation > generation { 0 } else { subject.listed };
    let adopted = scanned.adopted.iter().filter(|met| walk::blocks_of(met) > 0).count() as u64;
    let found = adopted.saturating_add(scanned.condemned);
    (found == 0 || listed > found).then(|| listed.saturating_sub(found))
}

/// The length of a file is durable with the first flush of it: before that, a crash may leave any. A free one may have been
/// removed and made again since the checkpoint, and has its length before it has a header.
fn about_length(file: &dyn DiskFile, subject: &Subject<'_>, ends: &Ends, report: &mut SegmentReport) {
    let (len, whole) = (file.len(), subject.keyring.segment_bytes);
    let was_flushed = match &report.outcome {
        Outcome::Walked { scanned, .. } => scanned.durable_upto > 0,
        Outcome::Sealed { .. } => true,
        _ => false,
    };
    let recycled = ends.generation().is_some_and(|generation| generation > 1);
    let in_use = subject.known.is_some_and(|known| known.state != SEGMENT_FREE);
    let label = match len.cmp(&whole) {
        std::cmp::Ordering::Equal => return,
        std::cmp::Ordering::Greater => findings::SEGMENT_TOO_LONG,
        std::cmp::Ordering::Less if was_flushed || recycled || in_use => findings::SEGMENT_TRUNCATED,
        std::cmp::Ordering::Less => findings::SEGMENT_HALF_MADE,
    };
    report.findings.take(Finding::at(label, subject.place(None)).expected(whole).found(len));
}

fn about_ends(
    subject: &Subject<'_>,
    ends: &Ends,
    row: &'static kvarts_layout::format::recovery::Row,
) -> Finding {
    let mut said = Vec::new();
    let mut offset = 0;
    if let Err(unsound) = &ends.trailer {
        said.push(format!("trailer {unsound}"));
        offset = ends.trailer_position.offset;
    }
    if let Err(unsound) = &ends.header {
        said.insert(0, format!("header {unsound}"));
        offset = 0;
    }
    Finding::at(row, subject.place(Some(offset))).found(said.join("; "))
}

fn walk_through(
    window: &mut Window<'_>,
    (subject, ends): (&Subject<'_>, &Ends),
    (scan, was_sealed): (Scan, bool),
    into: &mut Findings,
) -> Outcome {
    let (durable_generation, durable_upto) = ends.durable(subject.known);
    let header = ends.header.as_ref().ok();
    let target = Target {
        scan,
        position: ends.position.under(header.map_or(0, |header| header.position.generation)),
        first_sequence: header.map_or(0, |header| header.first_sequence),
        durable_generation,
        durable_upto,
        end: subject.keyring.trailer_at(),
        was_sealed,
        content_ids: subject.level == Level::Deep,
    };
    let scanned = walk::scan(window, &target, &subject.keyring.secret, into);
    Outcome::Walked { scan, scanned }
}

/// Where the bytes of the segment are, and how much in it counts.
fn account(file: &dyn DiskFile, report: &mut SegmentReport) {
    let mut sum = Accounting {
        segments: 1,
        file_bytes: file.len(),
        allocated_bytes: file.allocated(),
        ..Accounting::default()
    };
    let (mut records, mut blocks) = (0u64, 0u64);
    let mut take = |header: u32, payload: u64, count: usize| {
        sum.header_bytes = sum.header_bytes.saturating_add(u64::from(header));
        sum.payload_bytes = sum.payload_bytes.saturating_add(payload.next_multiple_of(PAGE_BYTES));
        records = records.saturating_add(1);
        blocks = blocks.saturating_add(count as u64);
    };
    let mut frame = 0u64;
    match &report.outcome {
        Outcome::Sealed { trailer, footer, .. } => {
            frame = u64::from(trailer.footer_bytes).saturating_add(2 * PAGE_BYTES);
            for entry in &footer.records {
                take(entry.header_bytes, entry.payload_bytes, listed::blocks_of(entry));
            }
        }
        Outcome::Walked { scanned, .. } => {
            frame = PAGE_BYTES;
            for met in &scanned.adopted {
                take(met.prefix.header_bytes, met.prefix.payload_bytes, walk::blocks_of(met));
            }
        }
        Outcome::Unseen | Outcome::Free | Outcome::Quarantined => {}
    }
    sum.frame_bytes = frame.min(sum.file_bytes);
    let used = sum.frame_bytes.saturating_add(sum.header_bytes).saturating_add(sum.payload_bytes);
    sum.unused_bytes = sum.file_bytes.saturating_sub(used);
    (report.accounting, report.records, report.blocks) = (sum, records, blocks);
}

/// Whether nothing was ever written here, as far as can be seen.
pub(super) fn is_blank(report: &SegmentReport) -> bool {
    let blank = |ends: &Ends| ends.header_seen == HeaderSeen::Empty && ends.trailer == Err(Unsound::Empty);
    report.ends.as_ref().is_some_and(blank) && report.records == 0
}

/// Of a store in use: what the end of an unsealed segment looks like means nothing, what is found in a segment that was
/// recycled meanwhile does not count, and neither does what a second look does not find again: the first one met blocks
/// that were being evicted.
pub(super) fn forgive(report: &mut SegmentReport, subject: &Subject<'_>, again: impl Fn() -> SegmentReport) {
    // A file that was given back and made again: its header is on its way. What a checkpoint calls used is not that.
    let may_be_new = subject.known.is_none_or(|known| known.state == SEGMENT_FREE);
    let is_just_made = |report: &SegmentReport| may_be_new && is_blank(report);
    let is_tail = |report: &SegmentReport| matches!(report.outcome, Outcome::Walked { scan: Scan::Tail, .. });
    if report.findings.is_clean() && !is_tail(report) {
        return;
    }
    let generation = |report: &SegmentReport| report.ends.as_ref().and_then(Ends::generation);
    let (before, was_tail) = (generation(report), is_tail(report));
    let first = std::mem::replace(report, again()).findings;
    if is_tail(report) {
        report.findings = Findings::default();
        report.findings.take(Finding::at(findings::LIVE_TAIL_SKIPPED, subject.place(None)));
    } else if was_tail || before != generation(report) || is_just_made(report) {
        report.findings = Findings::default();
        report.findings.take(Finding::at(findings::LIVE_CHANGED, subject.place(None)));
    } else {
        let (both, changed) = std::mem::take(&mut report.findings).confirmed_of(&first);
        report.findings = both;
        if changed {
            report.findings.take(Finding::at(findings::LIVE_CHANGED, subject.place(None)));
        }
    }
}
