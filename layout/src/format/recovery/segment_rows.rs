//! The rows for a segment as a whole.

use super::{Decision, HeaderSeen, Known, Row, SegmentSighting, Severity, TrailerSeen};

/// A row, and the sightings it is for: every combination of the listed values.
#[derive(Clone, Copy, Debug)]
pub struct SegmentRow {
    /// The row.
    pub row: Row,
    pub(super) header: &'static [HeaderSeen],
    pub(super) trailer: &'static [TrailerSeen],
    pub(super) known: &'static [Known],
}

impl SegmentRow {
    /// Whether the row is for this sighting.
    pub fn matches(&self, sighting: &SegmentSighting) -> bool {
        self.header.contains(&sighting.header)
            && self.trailer.contains(&sighting.trailer)
            && self.known.contains(&sighting.known)
    }
}

use HeaderSeen as H;
use Known as K;
use TrailerSeen as T;

const NOT_NEWER: &[H] = &[H::Sound, H::Empty, H::Damaged, H::Misdirected, H::Foreign];
const SOUND: &[H] = &[H::Sound];
const LOST: &[H] = &[H::Empty, H::Damaged, H::Misdirected, H::Foreign];
const OLD_TRAILERS: &[T] =
    &[T::Sealed, T::FooterLost, T::Empty, T::Damaged, T::Stale, T::Ahead, T::Elsewhere];
const NOT_SEALED: &[T] = &[T::FooterLost, T::Empty, T::Damaged, T::Stale, T::Ahead, T::Elsewhere];
const NOT_PROVEN: &[T] = &[T::Empty, T::Damaged, T::Stale, T::Ahead, T::Elsewhere];
const IN_USE: &[K] = &[K::Nothing, K::Open, K::Sealed, K::Earlier];
const NOT_FREE: &[K] = &[K::Nothing, K::Open, K::Sealed, K::Earlier, K::Later];
const FREE: &[K] = &[K::Free];
const OUTLIVED: &[K] = &[K::Outlived];

const fn row(label: &'static str, severity: Severity, decision: Decision, cause: &'static str) -> Row {
    Row { label, cause, severity, decision }
}

/// Every row for a segment as a whole.
pub static SEGMENT_ROWS: &[SegmentRow] = &[
    SegmentRow {
        row: row(
            "sealed",
            Severity::Normal,
            Decision::UseFooter,
            "the segment was sealed; its footer lists the valid records",
        ),
        header: SOUND,
        trailer: &[T::Sealed],
        known: IN_USE,
    },
    SegmentRow {
        row: row(
            "open-tail",
            Severity::Normal,
            Decision::ScanTail,
            "the segment was being written when the store stopped",
        ),
        header: SOUND,
        trailer: &[T::Empty, T::Stale],
        known: &[K::Nothing, K::Open, K::Earlier],
    },
    SegmentRow {
        row: row(
            "freed",
            Severity::Normal,
            Decision::Reuse,
            "all records of this generation were dead at the checkpoint, and none was written since",
        ),
        header: SOUND,
        trailer: &[T::Sealed, T::Empty, T::Stale],
        known: FREE,
    },
    SegmentRow {
        row: row(
            "freed-trailer-damaged",
            Severity::Note,
            Decision::Reuse,
            "all records of this generation were dead at the checkpoint; the last page or the footer was damaged",
        ),
        header: SOUND,
        trailer: &[T::FooterLost, T::Damaged, T::Elsewhere],
        known: FREE,
    },
    SegmentRow {
        row: row(
            "recycled-header-lost",
            Severity::Problem,
            Decision::Rescan,
            "the segment was free when the checkpoint was made and was used again; the write of its new header was lost",
        ),
        header: NOT_NEWER,
        trailer: OLD_TRAILERS,
        known: OUTLIVED,
    },
    SegmentRow {
        row: row(
            "never-used",
            Severity::Note,
            Decision::Rescan,
            "power was cut after the file was created and before its header was flushed; or both ends of the \
            file were zeroed",
        ),
        header: &[H::Empty],
        trailer: &[T::Empty],
        // Also a free one, whose file may have been removed and made again since the checkpoint.
        known: &[K::Nothing, K::Free],
    },
    SegmentRow {
        row: row(
            "footer-damaged-rescan",
            Severity::Problem,
            Decision::Rescan,
            "the trailer is valid, but the footer, which was flushed before the trailer, is not: bit rot, a lost or a \
            misdirected write",
        ),
        header: SOUND,
        trailer: &[T::FooterLost],
        known: IN_USE,
    },
    SegmentRow {
        row: row(
            "trailer-lost",
            Severity::Problem,
            Decision::Rescan,
            "the checkpoint lists the segment as sealed, but its trailer is gone: a lost write or a zeroed sector",
        ),
        header: SOUND,
        trailer: &[T::Empty, T::Stale],
        known: &[K::Sealed],
    },
    SegmentRow {
        row: row(
            "trailer-damaged-rescan",
            Severity::Problem,
            Decision::Rescan,
            "the last page is not a valid trailer, although only trailers are written to this page and a sector \
            is never torn",
        ),
        header: SOUND,
        trailer: &[T::Damaged],
        known: IN_USE,
    },
    SegmentRow {
        row: row(
            "trailer-misdirected",
            Severity::Problem,
            Decision::Rescan,
            "the last page is another segment's trailer: a misdirected copy or write",
        ),
        header: SOUND,
        trailer: &[T::Elsewhere],
        known: IN_USE,
    },
    SegmentRow {
        row: row(
            "header-lost-write",
            Severity::Problem,
            Decision::Rescan,
            "the checkpoint lists a later generation than the header: the write of the later header was lost",
        ),
        header: SOUND,
        trailer: OLD_TRAILERS,
        known: &[K::Later],
    },
    SegmentRow {
        row: row(
            "header-behind-trailer",
            Severity::Problem,
            Decision::Rescan,
            "the trailer is of a later generation than the header: the write of the later header was lost",
        ),
        header: SOUND,
        trailer: &[T::Ahead],
        known: &[K::Nothing, K::Free, K::Open, K::Sealed, K::Earlier],
    },
    SegmentRow {
        row: row(
            "header-damaged-footer-sound",
            Severity::Problem,
            Decision::UseFooter,
            "the first page was damaged or overwritten; the valid trailer and footer give the generation and \
            the records",
        ),
        header: LOST,
        trailer: &[T::Sealed],
        known: NOT_FREE,
    },
    SegmentRow {
        row: row(
            "free-segment-damaged",
            Severity::Note,
            Decision::Reuse,
            "the first page was damaged; the valid trailer gives the generation, whose records were all dead",
        ),
        header: LOST,
        trailer: &[T::Sealed, T::FooterLost],
        known: FREE,
    },
    SegmentRow {
        row: row(
            "header-lost-rescan",
            Severity::Problem,
            Decision::Rescan,
            "neither header nor footer can be used; the records are verified one by one",
        ),
        header: &[H::Damaged],
        trailer: NOT_SEALED,
        known: NOT_FREE,
    },
    SegmentRow {
        row: row(
            "header-zeroed-rescan",
            Severity::Problem,
            Decision::Rescan,
            "the first page is zero although the segment had been written",
        ),
        header: &[H::Empty],
        trailer: NOT_SEALED,
        known: &[K::Open, K::Sealed, K::Earlier, K::Later],
    },
    SegmentRow {
        row: row(
            "header-zeroed-trailer-seen",
            Severity::Problem,
            Decision::Rescan,
            "the first page is zero but the last page is not: the header was zeroed after use",
        ),
        header: &[H::Empty],
        trailer: &[T::FooterLost, T::Damaged, T::Stale, T::Ahead, T::Elsewhere],
        known: &[K::Nothing],
    },
    SegmentRow {
        row: row(
            "free-header-lost-rescan",
            Severity::Problem,
            Decision::Rescan,
            "the checkpoint lists the segment as free, but neither the header nor the trailer of its file shows what the file contains now",
        ),
        header: &[H::Damaged, H::Misdirected],
        trailer: NOT_PROVEN,
        known: FREE,
    },
    SegmentRow {
        row: row(
            "free-header-zeroed",
            Severity::Problem,
            Decision::Rescan,
            "the segment was free when the checkpoint was made; its first page is zero but its last page is \
            not: the first page was zeroed",
        ),
        header: &[H::Empty],
        trailer: &[T::Damaged, T::Stale, T::Ahead, T::Elsewhere],
        known: FREE,
    },
    SegmentRow {
        row: row(
            "header-misdirected",
            Severity::Problem,
            Decision::Rescan,
            "the first page is another segment's header: a renamed file or a misdirected write",
        ),
        header: &[H::Misdirected],
        trailer: NOT_SEALED,
        known: NOT_FREE,
    },
    SegmentRow {
        row: row(
            "segment-foreign",
            Severity::Problem,
            Decision::Quarantine,
            "the first page belongs to another store, and no other page belongs to this store",
        ),
        header: &[H::Foreign],
        trailer: NOT_SEALED,
        known: NOT_FREE,
    },
    SegmentRow {
        row: row(
            "free-segment-foreign",
            Severity::Problem,
            Decision::Quarantine,
            "a file of another store is in place of a free segment",
        ),
        header: &[H::Foreign],
        trailer: NOT_PROVEN,
        known: FREE,
    },
    SegmentRow {
        row: row(
            "still-quarantined",
            Severity::Note,
            Decision::Quarantine,
            "an earlier start found this segment unusable, and no repair has been made since",
        ),
        header: NOT_NEWER,
        trailer: OLD_TRAILERS,
        known: &[K::Quarantined],
    },
    SegmentRow {
        row: row(
            "segment-newer",
            Severity::Problem,
            Decision::Quarantine,
            "a newer program wrote the segment in a version that this program does not support",
        ),
        header: &[H::Newer],
        trailer: &T::ALL,
        known: &K::ALL,
    },
    SegmentRow {
        row: row(
            "trailer-newer",
            Severity::Problem,
            Decision::Quarantine,
            "a newer program sealed the segment in a version that this program does not support",
        ),
        header: NOT_NEWER,
        trailer: &[T::Newer],
        known: &K::ALL,
    },
];
