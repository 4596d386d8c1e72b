//! The recovery table: everything that recovery and the checker can meet on disk, why it can be there, and what
//! is done about it. As data: the engine acts on it, the checker prints the same labels.
//!
//! Policy:
//! - Every record stands alone. One that is proven is adopted wherever it lies, also beyond a hole: writes of
//!   one epoch may reach the device in any order, and what is whole is whole.
//! - Durable acknowledgements within a segment are given in log order, so what lies below the `durable_upto` of
//!   any proven record had been flushed. A hole there is damage and is reported; above it, a hole is what a
//!   power cut leaves.
//! - Nothing is appended to a tail found at start: it is sealed (by recovery) and a new segment is opened.
//! - A damaged segment costs its own blocks only, a damaged record only its own.
//! - What a segment that was sealed has no bytes of was evicted, also where its footer or trailer is damaged.
//! - Nothing is recycled on the word of damaged bytes: a segment without a sound header is scanned first.
//! - Nor on the word of old ones: the page behind the header of a segment that a checkpoint calls free is looked at
//!   ([`behind_header`]), for its use since then may have lost its header.
//!
//! A scan visits a segment page by page, or from record to record where lengths are proven, and collects
//! sightings; [`Proof`] and [`Later`] are known only when it has reached the end, so rows are looked up then.
//! Every combination matches exactly one row.

mod observe;
mod record_rows;
mod segment_rows;

pub use observe::{Observed, behind_header, observe};
pub use record_rows::{RECORD_ROWS, RecordRow};
pub use segment_rows::{SEGMENT_ROWS, SegmentRow};

use super::unsound::Unsound;

/// How much a sighting should worry the operator.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Severity {
    /// What a healthy store looks like.
    Normal,
    /// What a crash or a newer program legally leaves behind; counted.
    Note,
    /// Damage: data that was acknowledged may be lost. Reported with its place.
    Problem,
}

/// What is done about a sighting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decision {
    /// The record counts: index it and go on behind it.
    Adopt,
    /// Read the payload, verify its digests, and look again.
    Verify,
    /// The record does not count; go on behind it, as its proven lengths say.
    SkipRecord,
    /// Nothing here counts; go on at the next page.
    SkipPage,
    /// The record's blocks are lost: they are dead from now on, its bytes are kept for inspection.
    Condemn,
    /// The log ends here.
    Stop,
    /// Start over under the later generation that was proven.
    RescanAhead,
    /// Take the records from the footer.
    UseFooter,
    /// Scan for records, then seal the segment.
    ScanTail,
    /// Scan for records under the highest generation that any of them proves; seal the segment if it has any,
    /// reuse it if it has none.
    Rescan,
    /// Nothing in the segment counts: it may be recycled.
    Reuse,
    /// Keep the segment as it is: neither read nor recycled.
    Quarantine,
}

impl Severity {
    /// A stable name for reports.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::Note => "note",
            Self::Problem => "problem",
        }
    }
}

impl Decision {
    /// A stable name for reports.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Adopt => "adopt",
            Self::Verify => "verify",
            Self::SkipRecord => "skip-record",
            Self::SkipPage => "skip-page",
            Self::Condemn => "condemn",
            Self::Stop => "stop",
            Self::RescanAhead => "rescan-ahead",
            Self::UseFooter => "use-footer",
            Self::ScanTail => "scan-tail",
            Self::Rescan => "rescan",
            Self::Reuse => "reuse",
            Self::Quarantine => "quarantine",
        }
    }
}

/// One row of the table: what it is called, how it comes about, what is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// A stable name: reports, tests and docs/FORMAT.md use it.
    pub label: &'static str,
    /// How it comes about.
    pub cause: &'static str,
    /// How much it should worry the operator.
    pub severity: Severity,
    /// What is done.
    pub decision: Decision,
}

/// What the bytes at a page of a segment are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// A proven record whose payload is verified, or that has none.
    RecordWhole,
    /// A proven record whose payload has not been read.
    RecordUnread,
    /// A proven record whose payload does not match its digests.
    RecordBroken,
    /// A proven record whose sequence is not above that of the record before it in the segment.
    OutOfOrder,
    /// A proven record of a kind that this version does not know.
    UnknownKind,
    /// A proven record with a critical extension that this version does not know.
    UnknownExtension,
    /// A proven record of a newer version.
    Newer,
    /// A proven record that breaks a rule of the format.
    Malformed,
    /// A proven prefix of a record whose rest is not what the prefix describes.
    Torn,
    /// A proven footer index.
    Footer,
    /// All zero.
    Empty,
    /// Not there, says the file system: a page, or part of a record's header, in a segment in which holes count.
    Hole,
    /// Zeros or bytes that prove nothing right behind a hole.
    Remains,
    /// Anything else that proves nothing.
    Noise,
    /// A record of an earlier generation, for this place.
    Stale,
    /// A record of a later generation, for this place.
    Ahead,
    /// A record for another place.
    Misdirected,
    /// A record that claims another store.
    Foreign,
}

impl Found {
    /// Everything that can be found.
    pub const ALL: [Self; 18] = [
        Self::RecordWhole,
        Self::RecordUnread,
        Self::RecordBroken,
        Self::OutOfOrder,
        Self::UnknownKind,
        Self::UnknownExtension,
        Self::Newer,
        Self::Malformed,
        Self::Torn,
        Self::Footer,
        Self::Empty,
        Self::Hole,
        Self::Remains,
        Self::Noise,
        Self::Stale,
        Self::Ahead,
        Self::Misdirected,
        Self::Foreign,
    ];

    /// What a page is whose record prefix is not sound. A first sector of zeros proves nothing there.
    pub fn of_prefix(unsound: &Unsound) -> Self {
        match unsound {
            Unsound::Torn => Self::Noise,
            other => Self::of_header(other),
        }
    }

    /// What a record is whose prefix is sound and whose header or body is not.
    pub fn of_header(unsound: &Unsound) -> Self {
        match unsound {
            Unsound::Empty => Self::Empty,
            Unsound::Torn => Self::Torn,
            Unsound::Stale { .. } => Self::Stale,
            Unsound::Ahead { .. } => Self::Ahead,
            Unsound::Misdirected { .. } => Self::Misdirected,
            Unsound::Foreign { .. } => Self::Foreign,
            Unsound::Newer { .. } => Self::Newer,
            Unsound::Older { .. } => Self::Malformed,
            Unsound::Damaged { what } if what.is_writers_fault() => Self::Malformed,
            Unsound::Damaged { .. } => Self::Noise,
        }
    }
}

/// Why this place is looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scan {
    /// Looking for the end of an unsealed segment's log.
    Tail,
    /// Looking for records in a segment that was sealed, or may have been.
    Rescan,
    /// A footer or checkpoint says that a record begins here.
    Listed,
}

impl Scan {
    /// Every reason.
    pub const ALL: [Self; 3] = [Self::Tail, Self::Rescan, Self::Listed];
}

/// Whether this place is known to have been flushed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Proof {
    /// It lies below the `durable_upto` of a proven record of this generation, or below the `log_end` of its trailer
    /// or of a checkpoint that covers it. What was flushed last, with nothing written after it, is not known to
    /// have been: damage there looks like a torn tail.
    Durable,
    /// Nothing says so.
    Open,
}

impl Proof {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Durable, Self::Open];
}

/// Whether a proven record of this generation lies at a higher offset of the segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Later {
    /// One does.
    Follows,
    /// None does.
    Nothing,
}

impl Later {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Follows, Self::Nothing];
}

/// What a scan met at one page of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordSighting {
    /// What the bytes are.
    pub found: Found,
    /// Why they were looked at.
    pub scan: Scan,
    /// Whether they are known to have been flushed.
    pub proof: Proof,
    /// Whether anything proven follows.
    pub later: Later,
}

/// What the first page of a segment is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeaderSeen {
    /// A segment header for this place.
    Sound,
    /// All zero.
    Empty,
    /// Anything else that proves nothing.
    Damaged,
    /// The header of another segment.
    Misdirected,
    /// A header that claims another store.
    Foreign,
    /// A header of a newer version.
    Newer,
}

impl HeaderSeen {
    /// Everything that can be seen.
    pub const ALL: [Self; 6] =
        [Self::Sound, Self::Empty, Self::Damaged, Self::Misdirected, Self::Foreign, Self::Newer];

    /// What a header decoded under its own claimed generation is.
    pub fn of<T>(decoded: &Result<T, Unsound>) -> Self {
        match decoded {
            Ok(_) => Self::Sound,
            Err(Unsound::Empty) => Self::Empty,
            Err(Unsound::Misdirected { .. }) => Self::Misdirected,
            Err(Unsound::Foreign { .. }) => Self::Foreign,
            Err(Unsound::Newer { .. }) => Self::Newer,
            Err(
                Unsound::Torn
                | Unsound::Stale { .. }
                | Unsound::Ahead { .. }
                | Unsound::Older { .. }
                | Unsound::Damaged { .. },
            ) => Self::Damaged,
        }
    }
}

/// What the last page of a segment is, and the footer index that it names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TrailerSeen {
    /// A trailer of the header's generation (of its own, if the header is not sound), and its footer.
    Sealed,
    /// Such a trailer, but the footer that it names is not sound or has another tag.
    FooterLost,
    /// All zero.
    Empty,
    /// Anything else that proves nothing.
    Damaged,
    /// A trailer of an earlier generation.
    Stale,
    /// A trailer of a later generation.
    Ahead,
    /// A trailer of another segment or store.
    Elsewhere,
    /// A trailer of a newer version.
    Newer,
}

impl TrailerSeen {
    /// Everything that can be seen.
    pub const ALL: [Self; 8] = [
        Self::Sealed,
        Self::FooterLost,
        Self::Empty,
        Self::Damaged,
        Self::Stale,
        Self::Ahead,
        Self::Elsewhere,
        Self::Newer,
    ];

    /// What a trailer is that is not sound.
    pub fn of_unsound(unsound: &Unsound) -> Self {
        match unsound {
            Unsound::Empty => Self::Empty,
            Unsound::Stale { .. } => Self::Stale,
            Unsound::Ahead { .. } => Self::Ahead,
            Unsound::Misdirected { .. } | Unsound::Foreign { .. } => Self::Elsewhere,
            Unsound::Newer { .. } => Self::Newer,
            Unsound::Torn | Unsound::Older { .. } | Unsound::Damaged { .. } => Self::Damaged,
        }
    }
}

/// What the newest whole checkpoint knows about a segment. Generations are compared with the header's, else with
/// the trailer's, else taken as equal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Known {
    /// There is no checkpoint, or it does not know the segment.
    Nothing,
    /// This generation: free.
    Free,
    /// The same, and a record right behind the header proves a later one.
    Outlived,
    /// This generation: open.
    Open,
    /// This generation: sealed, suspect or not.
    Sealed,
    /// Any generation: quarantined.
    Quarantined,
    /// An earlier generation.
    Earlier,
    /// A later generation.
    Later,
}

impl Known {
    /// Everything that can be known.
    pub const ALL: [Self; 8] = [
        Self::Nothing,
        Self::Free,
        Self::Outlived,
        Self::Open,
        Self::Sealed,
        Self::Quarantined,
        Self::Earlier,
        Self::Later,
    ];
}

/// What recovery met when it opened a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentSighting {
    /// The first page.
    pub header: HeaderSeen,
    /// The last page and the footer.
    pub trailer: TrailerSeen,
    /// What the checkpoint says.
    pub known: Known,
}

impl SegmentSighting {
    /// Whether anything says that the segment was sealed: then blocks of it may have been evicted, and what it has no bytes of
    /// was given back. In any other a hole is what was never written. The seal of an earlier use says nothing.
    pub fn may_have_holes(&self) -> bool {
        use TrailerSeen as T;
        if self.known == Known::Outlived {
            return false;
        }
        let seen = matches!(self.trailer, T::Sealed | T::FooterLost | T::Damaged | T::Ahead | T::Elsewhere);
        seen || self.known == Known::Sealed
    }
}

/// No combination reaches it: the tests see to that.
static UNLISTED: Row = Row {
    label: "unlisted",
    cause: "no row of the recovery table describes this segment: a defect of this program",
    severity: Severity::Problem,
    decision: Decision::Quarantine,
};

/// The row for what a scan met at one page of a segment.
pub fn record_row(sighting: &RecordSighting) -> &'static Row {
    RECORD_ROWS.iter().find(|row| row.matches(sighting)).map_or(&UNLISTED, |row| &row.row)
}

/// The row for what recovery met when it opened a segment.
pub fn segment_row(sighting: &SegmentSighting) -> &'static Row {
    SEGMENT_ROWS.iter().find(|row| row.matches(sighting)).map_or(&UNLISTED, |row| &row.row)
}

#[cfg(test)]
mod tests;
