//! What recovery met and did, counted by the labels of the recovery table.

use std::collections::BTreeMap;

use kvarts_layout::NamespaceId;
use kvarts_layout::format::recovery::{Row, Severity};

/// Places of problems that a report keeps; more are only counted.
const PLACES_MAX: usize = 64;

/// A problem, and where it was met.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// What the checker calls it: a row's label, or `segment-missing`.
    pub label: &'static str,
    /// Which segment.
    pub segment: u32,
    /// Where in it.
    pub offset: u64,
}

/// What the recovery of one shard met and did.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RecoveryReport {
    /// Which shard.
    pub shard: u32,
    /// How often each row of the table was taken, by label.
    pub rows: BTreeMap<&'static str, u64>,
    /// Rows that were problems, and segments that are missing.
    pub problems: u64,
    /// The first of these.
    pub places: Vec<Problem>,
    /// Names in the directory that are none of the format's.
    pub strays: u64,
    /// Segment files.
    pub segments: u64,
    /// Segments whose files could not be opened, or of which the file system does not say what they have: what they hold is a miss
    /// until a start finds them readable.
    pub unreadable: u64,
    /// Segments that were sealed now.
    pub sealed_now: u64,
    /// Segments whose records were taken in but that could not be sealed: they are scanned again next time.
    pub unsealed: u64,
    /// The sequence of the checkpoint that was used.
    pub checkpoint: Option<u64>,
    /// Records in the index.
    pub records: u64,
    /// Blocks in the index.
    pub blocks: u64,
    /// Records that had expired.
    pub expired: u64,
    /// Blocks that a tombstone or a namespace epoch kills.
    pub deleted: u64,
    /// Namespaces whose delete a crash stopped between two shards: opening the store finishes it.
    pub half_deleted: Vec<NamespaceId>,
    /// Blocks whose pages were given back to the file system: evicted before.
    pub evicted: u64,
    /// Blocks of which another copy was there already: a newer one of this shard, or one of another shard.
    pub duplicates: u64,
    /// Records without a definition of their namespace in their segment.
    pub undefined: u64,
    /// Records that the model's spec, or this version, cannot read.
    pub unusable: u64,
    /// Pages that the device would not give.
    pub unreadable_pages: u64,
    /// Bytes of headers, trailers, footers, definitions and checkpoints that were read.
    pub metadata_bytes: u64,
    /// Bytes of unsealed or damaged segments that were read.
    pub scanned_bytes: u64,
}

/// What the checker calls a segment in use whose file is gone. No row of the table: there is nothing to look at.
const SEGMENT_MISSING: &str = "segment-missing";
/// A segment that is there and cannot be opened: what the checker says is of another moment, with other rights.
const SEGMENT_UNREADABLE: &str = "segment-unreadable";

impl RecoveryReport {
    /// Counts a segment that the checkpoint has in use and whose file is gone.
    pub(super) fn miss(&mut self, segment: u32) {
        self.problem(SEGMENT_MISSING, segment, 0);
    }

    /// Counts a segment whose file could not be used.
    pub(super) fn pass_over(&mut self, segment: u32) {
        self.unreadable += 1;
        self.problem(SEGMENT_UNREADABLE, segment, 0);
    }

    fn problem(&mut self, label: &'static str, segment: u32, offset: u64) {
        self.problems += 1;
        if self.places.len() < PLACES_MAX {
            self.places.push(Problem { label, segment, offset });
        }
    }

    /// Counts a row.
    pub(super) fn take(&mut self, row: &'static Row, segment: u32, offset: u64) {
        *self.rows.entry(row.label).or_default() += 1;
        if row.severity == Severity::Problem {
            self.problem(row.label, segment, offset);
        }
    }
}
