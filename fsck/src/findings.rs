//! What a check found: labels that never change, how bad each is, what it means and what to do about it.
//!
//! The rows of the recovery table are one half of the vocabulary; the other is [`LABELS`], for what recovery does not
//! look at. docs/FORMAT.md lists them and a test compares the two.

use std::collections::BTreeMap;

use kvarts_layout::BlockKey;
use kvarts_layout::format::recovery::{RECORD_ROWS, Row, SEGMENT_ROWS, Severity};

/// A label of this program's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Label {
    /// The name.
    pub name: &'static str,
    /// How much it should worry the operator.
    pub severity: Severity,
    /// How it comes about.
    pub cause: &'static str,
}

macro_rules! labels {
    ($($(#[$doc:meta])* $id:ident = $name:literal, $severity:ident, $cause:literal;)+) => {
        $($(#[$doc])* pub const $id: Label = Label { name: $name, severity: Severity::$severity, cause: $cause };)+
        /// Every label that is not a row of the recovery table.
        pub const LABELS: &[Label] = &[$($id),+];
    };
}

/// How much a label should worry the operator. One that is not known is a problem.
pub fn severity(label: &str) -> Severity {
    let rows = RECORD_ROWS.iter().map(|one| &one.row).chain(SEGMENT_ROWS.iter().map(|one| &one.row));
    let of_rows = rows.map(|row| (row.label, row.severity));
    let mut all = of_rows.chain(LABELS.iter().map(|label| (label.name, label.severity)));
    all.find(|(name, _)| *name == label).map_or(Severity::Problem, |(_, severity)| severity)
}

labels! {
    /// A slot of the superblock.
    SUPERBLOCK_SLOT_DAMAGED = "superblock-slot-damaged", Problem,
        "one superblock slot is damaged, although slots are written atomically; the other slot is sound";
    /// A zeroed slot.
    SUPERBLOCK_SLOT_LOST = "superblock-slot-lost", Problem,
        "one superblock slot is zero although the slot had been written: a zeroed sector";
    /// Only one state was ever written.
    SUPERBLOCK_ONE_SLOT = "superblock-one-slot", Note,
        "the second slot was never written: power was cut while the store was being made, or the sector was zeroed";
    /// The file is too short.
    SUPERBLOCK_TRUNCATED = "superblock-truncated", Problem,
        "the superblock's file is shorter than its two slots";
    /// The file is too long.
    SUPERBLOCK_TOO_LONG = "superblock-too-long", Note,
        "bytes follow the superblock's two slots; these bytes are never read";
    /// Neither slot is sound.
    SUPERBLOCK_LOST = "superblock-lost", Problem,
        "neither superblock slot is valid; the segments still contain the store's id and secret";
    /// The slots contradict each other.
    SUPERBLOCK_CONFLICT = "superblock-conflict", Problem,
        "both superblock slots are valid but contradict each other: another program wrote one slot";
    /// A slot of a newer version beside a known one.
    SUPERBLOCK_SLOT_NEWER = "superblock-slot-newer", Problem,
        "one superblock slot needs a newer program, but the other slot does not";
    /// A directory in which making a store was cut short.
    STORE_HALF_MADE = "store-half-made", Note,
        "power was cut while the store was being created; the store never contained a block";
    /// Not all directories are here.
    DIRECTORY_MISSING = "directory-missing", Problem,
        "a directory of the store was not given: a disk or an argument is missing";
    /// A directory that was out.
    DIRECTORY_BEHIND = "directory-behind", Problem,
        "the store was opened without this directory and may have deleted blocks since: the content of this \
        directory is not used before the next start";
    /// A directory whose place another one has taken.
    DIRECTORY_REPLACED = "directory-replaced", Problem,
        "another directory replaced this directory: the content of this directory is not used";
    /// A shard's folder is gone.
    SHARD_MISSING = "shard-missing", Problem,
        "the folder of a shard is missing; a crash cannot be the cause, because the folder was flushed before the superblock \
        was written";
    /// A shard that the superblock does not have.
    SHARD_UNEXPECTED = "shard-unexpected", Problem,
        "the directory contains the folder of a shard of another directory: it was copied or moved here";
    /// A listing that failed.
    FOLDER_UNREADABLE = "folder-unreadable", Problem,
        "a folder of the store cannot be listed: its content was not checked";
    /// A file that cannot be opened.
    FILE_UNREADABLE = "file-unreadable", Problem,
        "a file of the store cannot be opened: its content was not checked";
    /// A data name that is no plain file.
    NOT_A_FILE = "not-a-file", Problem,
        "a file of the store is a link, a folder or a device; its content was not read";
    /// Names of others.
    STRAY_FILES = "stray-files", Note,
        "files have names that the format does not use; a store never reads these files";
    /// Pages that the device does not give.
    MEDIA_ERROR = "media-error", Problem,
        "reads of these pages fail on the device";
    /// A segment that a checkpoint knows.
    SEGMENT_MISSING = "segment-missing", Problem,
        "the checkpoint lists a segment as used, but the file of the segment is missing";
    /// A number without a file.
    SEGMENT_NUMBER_UNUSED = "segment-number-unused", Note,
        "the file of a segment is missing although a file with a higher number exists: normal after a crash, an \
        upgrade, an eviction or a smaller budget";
    /// A used file that is too short.
    SEGMENT_TRUNCATED = "segment-truncated", Problem,
        "the file of a segment in use is shorter than the size of a segment";
    /// A fresh file that is too short.
    SEGMENT_HALF_MADE = "segment-half-made", Note,
        "power was cut before the file of a segment was first flushed; no record in this file had been acknowledged as durable";
    /// A file that is too long.
    SEGMENT_TOO_LONG = "segment-too-long", Note,
        "bytes follow the end of a segment; these bytes are never read";
    /// A checkpoint that cannot be what a crash left.
    CHECKPOINT_DAMAGED = "checkpoint-damaged", Problem,
        "the header of a checkpoint, or a chunk of the newest checkpoint, is damaged";
    /// A checkpoint that a crash may have left.
    CHECKPOINT_HALF_WRITTEN = "checkpoint-half-written", Note,
        "power was cut while this checkpoint was being written; damage to an older checkpoint looks the same";
    /// A checkpoint of a newer version.
    CHECKPOINT_NEWER = "checkpoint-newer", Note,
        "a newer program wrote the checkpoint in a version that this program does not support";
    /// The header of a listed record and the footer differ.
    FOOTER_DISAGREES = "footer-disagrees", Problem,
        "footer and record are both valid but contradict each other: a writer's defect";
    /// The trailer's totals are not those of the footer.
    TRAILER_DISAGREES = "trailer-disagrees", Problem,
        "trailer and footer are both valid but contradict each other: a writer's defect";
    /// A good record that the footer leaves out.
    RECORD_NOT_LISTED = "record-not-listed", Problem,
        "the segment was sealed normally and contains a complete record of its generation, but the footer does not list \
        the record";
    /// Blocks without a namespace.
    RECORD_UNDEFINED = "record-undefined", Problem,
        "no earlier record of the segment defines the record's namespace or spec, or the definition is damaged";
    /// The same where a crash may have done it.
    RECORD_UNDEFINED_TAIL = "record-undefined-tail", Note,
        "power was cut before the record's definitions were written; the record had not been acknowledged as durable";
    /// A definition that is not what its id says.
    DEFINITION_DAMAGED = "definition-damaged", Problem,
        "a definition matches its digest but contradicts itself: a writer's defect";
    /// A payload length that the spec does not give.
    PAYLOAD_LENGTH = "payload-length", Problem,
        "the length of the payload does not match its spec, layout and blocks: a writer's defect";
    /// Blocks of a namespace that a newer program defined.
    DEPENDS_ON_NEWER = "depends-on-newer", Note,
        "a newer program wrote the definition of the record's namespace or spec: the record was neither \
        verified nor changed";
    /// A layout or encoding of later.
    UNKNOWN_ENCODING = "unknown-encoding", Note,
        "a newer program wrote the payload in a layout or encoding that this program skips: the payload was not verified";
    /// A digest algorithm of later.
    UNKNOWN_DIGEST = "unknown-digest", Note,
        "the digests are of an algorithm that this program does not support: the blocks were not verified";
    /// An encrypted payload.
    ENCRYPTED_PAYLOAD = "encrypted-payload", Note,
        "the payload is encrypted and cannot be verified without its key";
    /// Padding that had been flushed.
    PADDING_NOT_ZERO = "padding-not-zero", Problem,
        "padding between or after the chunks of a payload is not zero, although zeros were written and flushed; blocks are not affected";
    /// Padding that a crash may have left.
    PADDING_TORN = "padding-torn", Note,
        "the padding after a complete payload was not written before a power cut; blocks are not affected";
    /// Two records under one sequence.
    SEQUENCE_REPEATED = "sequence-repeated", Problem,
        "two records of one shard have the same sequence number: a writer's defect or a copied record";
    /// Two copies that ought to be equal.
    ORIGIN_CONTENT_DIFFERS = "origin-content-differs", Problem,
        "two copies of a block have the same origin id but different bytes: one copy is wrong";
    /// Two copies of one production.
    COPY_OF_ORIGIN = "copy-of-origin", Note,
        "two copies of a block from the same put exist: an interrupted compaction left both copies";
    /// A block that was put again.
    SUPERSEDED_COPY = "superseded-copy", Note,
        "an older copy of a block from another put exists; the store uses the newer one";
    /// A block in two shards.
    COPY_IN_TWO_SHARDS = "copy-in-two-shards", Note,
        "two shards contain copies of one block from different puts; the store uses one copy";
    /// A parent that is not here.
    PARENT_ABSENT = "parent-absent", Note,
        "the parent of these blocks is absent: the parent was evicted, or is in another store";
    /// The checkpoint lists what is not there.
    CHECKPOINT_DISAGREES = "checkpoint-disagrees", Problem,
        "the checkpoint lists a record that the sealed segment does not contain: a writer's defect";
    /// A tail of a store that is in use.
    LIVE_TAIL_SKIPPED = "live-tail-skipped", Note,
        "the process that has the store open is writing this segment: the end of the segment was not checked";
    /// A segment that changed under the check.
    LIVE_CHANGED = "live-changed", Note,
        "the process that has the store open changed this file during the check: findings in this file \
        are not reliable";
}

/// The severity and cause of a label of either half.
pub fn label(name: &str) -> Option<Label> {
    let from_row = |row: &Row| Label { name: row.label, severity: row.severity, cause: row.cause };
    let rows = RECORD_ROWS.iter().map(|row| &row.row).chain(SEGMENT_ROWS.iter().map(|row| &row.row));
    let known = rows.map(from_row).find(|label| label.name == name);
    known.or_else(|| LABELS.iter().copied().find(|label| label.name == name))
}

impl From<&'static Row> for Label {
    fn from(row: &'static Row) -> Self {
        Self { name: row.label, severity: row.severity, cause: row.cause }
    }
}

/// Where something was found.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Place {
    /// The shard, if it is in one.
    pub shard: Option<u32>,
    /// The segment, if it is in one.
    pub segment: Option<u32>,
    /// Bytes from the start of the file.
    pub offset: Option<u64>,
}

/// One thing that was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// What it is.
    pub label: Label,
    /// Where.
    pub place: Place,
    /// The file, for what lies outside segments.
    pub file: Option<String>,
    /// The first block that it is about.
    pub key: Option<BlockKey>,
    /// What should have been there.
    pub expected: Option<String>,
    /// What was.
    pub found: Option<String>,
    /// Blocks that become misses.
    pub blocks: u64,
    /// Of which model.
    pub model: Option<String>,
    /// The number of lost blocks is not known any more; a checkpoint lists this many live records that are not found.
    pub uncounted: Option<u64>,
}

/// Problems whose cost cannot be counted any more: the lost bytes held, or were, the only list of it.
const UNCOUNTED: [&str; 12] = [
    "directory-missing",
    "shard-missing",
    "folder-unreadable",
    "segment-missing",
    "segment-truncated",
    "header-damaged",
    "hole-before-durable",
    "damage-before-durable",
    "stale-generation",
    "foreign-record",
    "misdirected-record",
    "segment-foreign",
];

impl Finding {
    /// A finding about a place.
    pub fn at(label: impl Into<Label>, place: Place) -> Self {
        let label = label.into();
        let uncounted = UNCOUNTED.contains(&label.name).then_some(0);
        Self {
            label,
            place,
            file: None,
            key: None,
            expected: None,
            found: None,
            blocks: 0,
            model: None,
            uncounted,
        }
    }

    /// A finding about a file outside of segments.
    pub fn of(label: Label, file: impl Into<String>) -> Self {
        Self { file: Some(file.into()), ..Self::at(label, Place::default()) }
    }

    /// Says what was there.
    pub fn found(mut self, found: impl ToString) -> Self {
        self.found = Some(found.to_string());
        self
    }

    /// Says what should have been there.
    pub fn expected(mut self, expected: impl ToString) -> Self {
        self.expected = Some(expected.to_string());
        self
    }

    /// Whether it is damage.
    pub fn is_problem(&self) -> bool {
        self.label.severity == Severity::Problem
    }
}

/// Problems that are kept with their places; more are only counted.
const PROBLEMS_MAX: usize = 10_000;
/// Notes likewise.
const NOTES_MAX: usize = 1_000;

/// All that was found, in bounded memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Findings {
    /// How often each label was met, normal ones included.
    pub counts: BTreeMap<&'static str, u64>,
    /// The first problems.
    pub problems: Vec<Finding>,
    /// The first notes.
    pub notes: Vec<Finding>,
    /// How many problems there are.
    pub problem_count: u64,
    /// Blocks that problems make misses, by model.
    pub lost: BTreeMap<String, u64>,
    /// What problems cost beside that.
    pub uncounted: Uncounted,
}

/// The cost of problems, where it cannot be counted any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct Uncounted {
    /// How many problems.
    pub problems: u64,
    /// Live records that checkpoints list there and that are not found, each of at least one block.
    pub listed_records: u64,
}

impl Uncounted {
    fn add(&mut self, other: Self) {
        self.problems = self.problems.saturating_add(other.problems);
        self.listed_records = self.listed_records.saturating_add(other.listed_records);
    }
}

impl Findings {
    /// Takes one in.
    pub fn take(&mut self, finding: Finding) {
        self.count(finding.label, 1);
        let (list, most) = match finding.label.severity {
            Severity::Normal => return,
            Severity::Note => (&mut self.notes, NOTES_MAX),
            Severity::Problem => {
                self.problem_count = self.problem_count.saturating_add(1);
                if finding.blocks > 0 {
                    let model = finding.model.clone().unwrap_or_else(|| "unknown model".to_owned());
                    let lost = self.lost.entry(model).or_default();
                    *lost = lost.saturating_add(finding.blocks);
                }
                if let Some(listed_records) = finding.uncounted {
                    self.uncounted.add(Uncounted { problems: 1, listed_records });
                }
                (&mut self.problems, PROBLEMS_MAX)
            }
        };
        if list.len() < most {
            list.push(finding);
        }
    }

    /// Counts a label without keeping where.
    pub fn count(&mut self, label: Label, times: u64) {
        let count = self.counts.entry(label.name).or_default();
        *count = count.saturating_add(times);
    }

    /// Takes in what another thread found.
    pub fn merge(&mut self, other: Self) {
        for (label, times) in other.counts {
            let count = self.counts.entry(label).or_default();
            *count = count.saturating_add(times);
        }
        for (model, blocks) in other.lost {
            let lost = self.lost.entry(model).or_default();
            *lost = lost.saturating_add(blocks);
        }
        self.uncounted.add(other.uncounted);
        self.problem_count = self.problem_count.saturating_add(other.problem_count);
        let room = PROBLEMS_MAX.saturating_sub(self.problems.len());
        self.problems.extend(other.problems.into_iter().take(room));
        let room = NOTES_MAX.saturating_sub(self.notes.len());
        self.notes.extend(other.notes.into_iter().take(room));
    }

    /// What both a first look and this one found, and whether that is less than this one did. Notes are this one's.
    pub fn confirmed_of(self, first: &Self) -> (Self, bool) {
        let again = |one: &Finding| {
            first.problems.iter().any(|other| {
                (one.label, one.place, &one.expected) == (other.label, other.place, &other.expected)
            })
        };
        let kept = self.problems.iter().filter(|one| again(one)).count();
        if kept as u64 == self.problem_count {
            return (self, false);
        }
        let mut both = Self::default();
        for (name, times) in &self.counts {
            if label(name).is_none_or(|label| label.severity == Severity::Normal) {
                both.counts.insert(name, *times);
            }
        }
        self.problems
            .iter()
            .filter(|one| again(one))
            .chain(&self.notes)
            .for_each(|one| both.take(one.clone()));
        (both, true)
    }

    /// Puts lists in the order of places, so that reports do not depend on which thread was first.
    pub fn sort(&mut self) {
        let order = |one: &Finding| (one.place, one.label.name, one.file.clone());
        self.problems.sort_by_key(order);
        self.notes.sort_by_key(order);
    }

    /// How often a label was met.
    pub fn times(&self, label: &str) -> u64 {
        self.counts.get(label).copied().unwrap_or(0)
    }

    /// Whether nothing is damaged.
    pub fn is_clean(&self) -> bool {
        self.problem_count == 0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn labels_are_one_vocabulary() {
        let rows =
            RECORD_ROWS.iter().map(|row| row.row.label).chain(SEGMENT_ROWS.iter().map(|row| row.row.label));
        let all: Vec<&str> = rows.chain(LABELS.iter().map(|label| label.name)).collect();
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
        assert_eq!(label("torn-payload").unwrap().severity, Severity::Note);
        assert_eq!(label("media-error"), Some(MEDIA_ERROR));
        assert_eq!(label("nothing"), None);
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a test reads the document it checks")]
    fn the_labels_of_the_document_are_those_of_the_code() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/FORMAT.md");
        let document = String::from_utf8(std::fs::read(path).unwrap()).unwrap();
        let table = document.split("<!-- labels: fsck -->").nth(1).expect("the table of labels");
        let rows: Vec<String> = table
            .lines()
            .skip_while(|line| line.is_empty())
            .take_while(|line| line.starts_with('|'))
            .skip(2)
            .map(str::to_owned)
            .collect();
        let expected: Vec<String> = LABELS
            .iter()
            .map(|label| format!("| `{}` | {} | {} |", label.name, label.severity.label(), label.cause))
            .collect();
        assert_eq!(rows, expected, "\n{}", expected.join("\n"));
    }

    #[test]
    fn what_is_kept_is_bounded_and_what_is_counted_is_not() {
        let mut findings = Findings::default();
        for offset in 0..12_000 {
            let place = Place { offset: Some(offset), ..Place::default() };
            findings.take(Finding { blocks: 2, model: Some("m".into()), ..Finding::at(MEDIA_ERROR, place) });
            findings.take(Finding::at(PADDING_TORN, place));
        }
        assert_eq!((findings.problems.len(), findings.notes.len()), (PROBLEMS_MAX, NOTES_MAX));
        assert_eq!((findings.problem_count, findings.times("padding-torn")), (12_000, 12_000));
        assert_eq!(findings.lost["m"], 24_000);
        let mut sum = Findings::default();
        sum.merge(findings.clone());
        sum.merge(findings);
        assert_eq!((sum.problem_count, sum.problems.len(), sum.lost["m"]), (24_000, PROBLEMS_MAX, 48_000));
        assert!(!sum.is_clean());
    }
}
