//! Why a compaction does not begin, or stops.
//!
//! A store of which a part is damaged or unknown is refused before anything is written: what lies there may say that
//! blocks elsewhere were deleted.

use std::fmt;
use std::io;

use kvarts_layout::format::names::{segment_name, shard_name};

use crate::findings::{CHECKPOINT_NEWER, Finding, Findings};
use crate::remedy::{Remedy, advice, missing_directories, remedy};
use crate::store::Store;

/// Why nothing, or no more, was done. Whatever was done is safe.
#[derive(Debug)]
pub enum Refusal {
    /// The store is damaged there; nothing was written.
    Unsound(String),
    /// The store is damaged there, which was met on the way.
    Damaged(String),
    /// There is not enough room in a directory: bytes that are free, bytes that are needed.
    NoRoom(String, u64, u64),
    /// It cannot be done.
    Cannot(String),
    /// The operating system says no.
    Io(io::Error),
}

impl Refusal {
    /// The same where nothing has been written yet.
    pub(super) fn before_writing(self) -> Self {
        match self {
            Self::Damaged(what) => Self::Unsound(what),
            other => other,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsound(what) => write!(
                f,
                "nothing was written, because the store has problems that may hide deletes or blocks \
                 ({what}): run `kvarts fsck --repair` first"
            ),
            Self::Damaged(what) => {
                write!(
                    f,
                    "the compaction found damage ({what}) and stopped; no block was lost: run `kvarts fsck \
                    --repair`, then compact again"
                )
            }
            Self::NoRoom(directory, free, needed) => write!(
                f,
                "{directory} has {free} bytes free, but {needed} are needed: free space on its disk, raise \
                --room-mib, or use --to"
            ),
            Self::Cannot(what) => write!(f, "{what}"),
            Self::Io(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for Refusal {}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Refuses a store with problems, and one whose newest deletes only a newer program can read. `findings` are sorted.
pub fn refuse_unsound(store: Option<&Store>, findings: &Findings) -> Result<(), Refusal> {
    let is_newer = |finding: &&Finding| finding.label == CHECKPOINT_NEWER;
    if findings.times(CHECKPOINT_NEWER.name) > 0 {
        let first = findings.notes.iter().find(is_newer).map(|finding| place_of(store, finding));
        return Err(Refusal::Cannot(format!(
            "nothing was written, because {} is from a newer version: use a newer kvarts",
            first.unwrap_or_else(|| "a checkpoint".to_owned())
        )));
    }
    if let Some(what) = missing_directories(findings) {
        return Err(Refusal::Cannot(what));
    }
    let Some(first) = findings.problems.first() else {
        return if findings.is_clean() { Ok(()) } else { Err(Refusal::Unsound("unnamed".to_owned())) };
    };
    let more = match findings.problem_count.saturating_sub(1) {
        0 => String::new(),
        more => format!(", and {more} others"),
    };
    let what = format!("{}: {}{more}", first.label.name, place_of(store, first));
    let remedies = || findings.problems.iter().map(|one| remedy(one.label.name));
    match remedies().find(|one| *one != Remedy::Repair).and_then(advice) {
        // Where part of it cannot be repaired, that comes first.
        Some(advice) => Err(Refusal::Cannot(format!(
            "nothing was written, because the store has problems that may hide deletes or blocks ({what}): {advice}"
        ))),
        None => Err(Refusal::Unsound(what)),
    }
}

/// The file that a finding is about, as far as it is about one.
fn place_of(store: Option<&Store>, finding: &Finding) -> String {
    let number = finding.place.shard;
    let shard = store.and_then(|store| store.shards.iter().find(|shard| Some(shard.number) == number));
    let directory = store.zip(shard).and_then(|(store, shard)| store.directories.get(shard.directory));
    let directory = directory.map_or(String::new(), |directory| format!("{}/", directory.disk.name()));
    match (&finding.file, finding.place.shard, finding.place.segment) {
        (Some(file), ..) => file.clone(),
        (None, Some(shard), Some(segment)) => {
            format!("{directory}{}/{}", shard_name(shard), segment_name(segment))
        }
        (None, Some(shard), None) => format!("{directory}{}", shard_name(shard)),
        (None, None, _) => {
            let found = finding.found.as_ref().map(|found| format!("found {found}"));
            let expected = finding.expected.as_ref().map(|expected| format!("{expected} expected, "));
            format!("{}{}", expected.unwrap_or_default(), found.unwrap_or_default())
        }
    }
}
