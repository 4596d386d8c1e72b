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
            "the record was written whole; it stands alone, also beyond a hole",
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
            "a footer or checkpoint lists the record and its header is sound; its payload is verified when it is read",
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
            "the header arrived before the cut; whether the payload did is not known yet",
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
            "power was cut after the header arrived and before the payload did; it had not been acknowledged as durable",
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
            "the payload had been flushed and no longer matches its digests: bit rot, a lost or a misdirected write",
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
            "a record is not newer than the one before it: a writer's defect, or part of the file is from a copy",
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
            "a newer program wrote a kind of record that this one may ignore",
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
            "a newer program wrote a record that must not be read without knowing its extension",
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
            "a newer program wrote the record in a version this one does not know",
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
            "the tag holds and the content breaks a rule of the format: a writer's defect",
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
            "power was cut while the header was being written; it had not been acknowledged as durable",
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
            "the header had been flushed and only its first part is still sound; which blocks it had is lost",
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
            "a listed record's header is no longer what was written: bit rot or a misdirected write",
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
            "power was cut after the footer was written and before the trailer was",
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
            "the scan of a sealed segment reached its footer: the log ended before it",
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
            "records of the same generation follow a footer, though nothing is appended to a sealed segment",
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
            "the file has no bytes here: blocks of a sealed segment were evicted, or nothing was ever written",
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
            "bytes behind a hole that prove nothing: power was cut while a record was being evicted, or they are damaged",
        ),
        found: &[Found::Remains],
        scan: SEARCH,
        proof: DURABLE,
        later: ANY_LATER,
    },
    RecordRow {
        row: row(
            "end-of-log",
            Severity::Normal,
            Decision::Stop,
            "nothing was written from here on since the file was made",
        ),
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
            "the file was recycled: from here on it shows what it held before, or a write that never finished",
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
            "power was cut while several records were being written, and a later one arrived first",
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
            "zeros where a record had been flushed: a lost write or a zeroed sector",
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
            "bytes that prove nothing where a record had been flushed: bit rot or a misdirected write",
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
            "what the file held before it was recycled, where a record had been flushed: a lost write",
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
            "another store's record where one of this store had been flushed: a copy or a write went astray",
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
            "zeros where a listed record lay: a lost write or a zeroed sector",
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
            "what the file held before it was recycled, where a listed record lay: a lost write",
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
            "something else where a listed record lay: a copy or a write went astray",
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
            "a record that belongs elsewhere: a write went astray; the place it was meant for is damaged too",
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
            "a record of a later generation than the segment header: the header's write was lost",
        ),
        found: &[Found::Ahead],
        scan: ANY_SCAN,
        proof: ANY_PROOF,
        later: ANY_LATER,
    },
];
