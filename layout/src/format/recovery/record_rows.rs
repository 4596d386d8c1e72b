//! The rows for one page of a segment.

use super::{Decision, Found, Later, Proof, RecordSighting, Row, Scan, Severity};

/// A row, and the sightings it is for: every combination of the listed values.
#[derive(Clone, Copy, Debug)]
pub struct RecordRow {
    /// The row.
    pub row: Row,
    pub(super) found: &'static [Found],
    pub(super) scan: &'static [Scan],
    pub(super) proof: &'static [Proof],
    pub(super) later: &'static [Later],
}

impl RecordRow {
    /// Whether the row is for this sighting.
    pub fn matches(&self, sighting: &RecordSighting) -> bool {
        self.found.contains(&sighting.found)
            && self.scan.contains(&sighting.scan)
            && self.proof.contains(&sighting.proof)
            && self.later.contains(&sighting.later)
    }
}

const ANY_SCAN: &[Scan] = &Scan::ALL;
const SEARCH: &[Scan] = &[Scan::Tail, Scan::Rescan];
const LISTED: &[Scan] = &[Scan::Listed];
const ANY_PROOF: &[Proof] = &Proof::ALL;
const DURABLE: &[Proof] = &[Proof::Durable];
const OPEN: &[Proof] = &[Proof::Open];
const ANY_LATER: &[Later] = &Later::ALL;
const FOLLOWS: &[Later] = &[Later::Follows];
const NOTHING: &[Later] = &[Later::Nothing];

const fn row(label: &'static str, severity: Severity, decision: Decision, cause: &'static str) -> Row {
    Row { label, cause, severity, decision }
}

/// Every row for one page of a segment.
pub static RECORD_ROWS: &[RecordRow] = &[
    RecordRow {
        row: row(
            "record-whole",
            Severity::Normal,
            Decision::Adopt,
            "the record is complete, and the store uses it, even behind a hole in the segment",
        ),
        found: &[Found::RecordWhole],
        scan: ANY_SCAN,
        proof: ANY_PROOF,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "record-durable",
            Severity::Normal,
            Decision::Adopt,
            "the record had been flushed; its payload is verified when it is read",
        ),
        found: &[Found::RecordUnread],
        scan: SEARCH,
        proof: DURABLE,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "record-listed",
            Severity::Normal,
            Decision::Adopt,
            "a footer or checkpoint lists the record, and the record's header is sound; the payload is verified when the record is read",
        ),
        found: &[Found::RecordUnread],
        scan: LISTED,
        proof: ANY_PROOF,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "record-unverified",
            Severity::Normal,
            Decision::Verify,
            "the header was written before a power cut; the payload is not verified yet",
        ),
        found: &[Found::RecordUnread],
        scan: SEARCH,
        proof: OPEN,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "torn-payload",
            Severity::Note,
            Decision::SkipRecord,
            "power was cut after the header was written and before the payload was written; the record had not been acknowledged as durable",
        ),
        found: &[Found::RecordBroken],
        scan: SEARCH,
        proof: OPEN,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "payload-damaged",
            Severity::Problem,
            Decision::Condemn,
            "the payload had been flushed but no longer matches its digests: bit rot, a lost or a misdirected write",
        ),
        found: &[Found::RecordBroken],
        scan: SEARCH,
        proof: DURABLE,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "listed-payload-damaged",
            Severity::Problem,
            Decision::Condemn,
            "the payload of a listed record no longer matches its digests: bit rot, a lost or a misdirected write",
        ),
        found: &[Found::RecordBroken],
        scan: LISTED,
        proof: ANY_PROOF,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "sequence-not-increasing",
            Severity::Problem,
            Decision::Condemn,
            "a record is not newer than the record before it: a writer's defect, or part of the file is from a copy",
        ),
        found: &[Found::OutOfOrder],
        scan: ANY_SCAN,
        proof: ANY_PROOF,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "unknown-kind",
            Severity::Note,
            Decision::SkipRecord,
            "a newer program wrote a kind of record that this program may ignore",
        ),
        found: &[Found::UnknownKind],
        scan: ANY_SCAN,
        proof: ANY_PROOF,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "unknown-extension",
            Severity::Note,
            Decision::SkipRecord,
            "a newer program wrote the record with an extension that this program does not support but must not ignore",
        ),
        found: &[Found::UnknownExtension],
        scan: ANY_SCAN,
        proof: ANY_PROOF,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "newer-record",
            Severity::Note,
            Decision::SkipRecord,
            "a newer program wrote the record in a version that this program does not support",
        ),
        found: &[Found::Newer],
        scan: ANY_SCAN,
        proof: ANY_PROOF,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "malformed-record",
            Severity::Problem,
            Decision::Condemn,
            "the tag is valid, but the content violates a rule of the format: a writer's defect",
        ),
        found: &[Found::Malformed],
        scan: ANY_SCAN,
        proof: ANY_PROOF,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "torn-tail",
            Severity::Note,
            Decision::SkipRecord,
            "power was cut while the header was being written; the record had not been acknowledged as durable",
        ),
        found: &[Found::Torn],
        scan: SEARCH,
        proof: OPEN,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "header-damaged",
            Severity::Problem,
            Decision::SkipRecord,
            "the header had been flushed, but only its first part is still sound; the list of the record's blocks is lost",
        ),
        found: &[Found::Torn],
        scan: SEARCH,
        proof: DURABLE,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "listed-header-damaged",
            Severity::Problem,
            Decision::Condemn,
            "the header of a listed record is damaged: bit rot or a misdirected write",
        ),
        found: &[Found::Torn, Found::Remains, Found::Noise],
        scan: LISTED,
        proof: ANY_PROOF,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "seal-interrupted",
            Severity::Note,
            Decision::Stop,
            "power was cut after the footer was written and before the trailer was written",
        ),
        found: &[Found::Footer],
        scan: &[Scan::Tail],
        proof: ANY_PROOF,
        later: NOTHING,
    },
    RecordRow {
        row: row(
            "footer-found",
            Severity::Normal,
            Decision::Stop,
            "the scan of a sealed segment reached its footer: the log ended before the footer",
        ),
        found: &[Found::Footer],
        scan: &[Scan::Rescan],
        proof: ANY_PROOF,
        later: NOTHING,
    },
    RecordRow {
        row: row(
            "record-behind-footer",
            Severity::Problem,
            Decision::SkipPage,
            "records of the same generation follow a footer, although no record is appended to a sealed segment",
        ),
        found: &[Found::Footer],
        scan: SEARCH,
        proof: ANY_PROOF,
        later: FOLLOWS,
    },
    RecordRow {
        row: row(
            "hole",
            Severity::Normal,
            Decision::SkipPage,
            "the file has a hole here: blocks of a sealed segment were evicted, or these pages were never \
            written",
        ),
        found: &[Found::Hole],
        scan: ANY_SCAN,
        proof: ANY_PROOF,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "evicted-in-part",
            Severity::Note,
            Decision::SkipPage,
            "the bytes behind a hole are not a valid record: a power cut interrupted an eviction, or the \
            bytes are damaged",
        ),
        found: &[Found::Remains],
        scan: SEARCH,
        proof: DURABLE,
        later: ANY_LATER,
    },
    RecordRow {
        row: row("end-of-log", Severity::Normal, Decision::Stop, "the rest of the file was never written"),
        found: &[Found::Empty],
        scan: SEARCH,
        proof: OPEN,
        later: NOTHING,
    },
    RecordRow {
        row: row(
            "end-of-log-over-old-bytes",
            Severity::Normal,
            Decision::Stop,
            "the file was reused: from here on it has old content or an unfinished write",
        ),
        found: &[Found::Noise, Found::Remains, Found::Stale, Found::Foreign],
        scan: SEARCH,
        proof: OPEN,
        later: NOTHING,
    },
    RecordRow {
        row: row(
            "hole-before-record",
            Severity::Note,
            Decision::SkipPage,
            "power was cut while several records were being written, and a later record reached the disk first",
        ),
        found: &[Found::Empty, Found::Remains, Found::Noise, Found::Stale, Found::Foreign],
        scan: SEARCH,
        proof: OPEN,
        later: FOLLOWS,
    },
    RecordRow {
        row: row(
            "hole-before-durable",
            Severity::Problem,
            Decision::SkipPage,
            "zeros are in place of a flushed record: a lost write or a zeroed sector",
        ),
        found: &[Found::Empty],
        scan: SEARCH,
        proof: DURABLE,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "damage-before-durable",
            Severity::Problem,
            Decision::SkipPage,
            "bytes that are not a valid record are in place of a flushed record: bit rot or a misdirected write",
        ),
        found: &[Found::Noise],
        scan: SEARCH,
        proof: DURABLE,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "stale-generation",
            Severity::Problem,
            Decision::SkipPage,
            "old content of the recycled file is in place of a flushed record: a lost write",
        ),
        found: &[Found::Stale],
        scan: SEARCH,
        proof: DURABLE,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "foreign-record",
            Severity::Problem,
            Decision::SkipPage,
            "a record of another store is in place of a flushed record of this store: a misdirected copy or write",
        ),
        found: &[Found::Foreign],
        scan: SEARCH,
        proof: DURABLE,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "listed-record-lost",
            Severity::Problem,
            Decision::Condemn,
            "zeros are in place of a listed record: a lost write or a zeroed sector",
        ),
        found: &[Found::Empty],
        scan: LISTED,
        proof: ANY_PROOF,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "listed-record-stale",
            Severity::Problem,
            Decision::Condemn,
            "old content of the recycled file is in place of a listed record: a lost write",
        ),
        found: &[Found::Stale],
        scan: LISTED,
        proof: ANY_PROOF,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "listed-record-overwritten",
            Severity::Problem,
            Decision::Condemn,
            "other bytes are in place of a listed record: a misdirected copy or write",
        ),
        found: &[Found::Misdirected, Found::Foreign, Found::Footer],
        scan: LISTED,
        proof: ANY_PROOF,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "misdirected-record",
            Severity::Problem,
            Decision::SkipPage,
            "a record belongs to another position: a misdirected write; the right position is damaged, too",
        ),
        found: &[Found::Misdirected],
        scan: SEARCH,
        proof: ANY_PROOF,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "generation-ahead",
            Severity::Problem,
            Decision::RescanAhead,
            "a record has a later generation than the segment header: the write of the header was lost",
        ),
        found: &[Found::Ahead],
        scan: ANY_SCAN,
        proof: ANY_PROOF,
        later: ANY_LATER,
    },
];
