//! What a segment is looked at as, and what was found of it.

use kvarts_layout::format::checkpoint::SegmentState;
use kvarts_layout::format::footer::Footer;
use kvarts_layout::format::recovery::Scan;
use kvarts_layout::format::trailer::Trailer;

use super::options::Level;
use crate::findings::{Findings, Place};
use crate::segment::{Ends, Keyring};
use crate::walk::{Met, Scanned};

/// Where the bytes of the segments are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct Accounting {
    /// Segment files.
    pub segments: u64,
    /// Bytes of these files.
    pub file_bytes: u64,
    /// Bytes that they take on the device.
    pub allocated_bytes: u64,
    /// Segment headers, trailers and footers.
    pub frame_bytes: u64,
    /// Headers of records that count.
    pub header_bytes: u64,
    /// Payloads of records that count, padding included.
    pub payload_bytes: u64,
    /// Everything else: room that was not used, and what no longer counts.
    pub unused_bytes: u64,
}

impl Accounting {
    /// Adds another.
    pub fn add(&mut self, other: &Self) {
        let sum = |mine: &mut u64, theirs: u64| *mine = mine.saturating_add(theirs);
        sum(&mut self.segments, other.segments);
        sum(&mut self.file_bytes, other.file_bytes);
        sum(&mut self.allocated_bytes, other.allocated_bytes);
        sum(&mut self.frame_bytes, other.frame_bytes);
        sum(&mut self.header_bytes, other.header_bytes);
        sum(&mut self.payload_bytes, other.payload_bytes);
        sum(&mut self.unused_bytes, other.unused_bytes);
    }
}

/// Which segment, and what is known of it.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// What proves it.
    pub keyring: &'a Keyring,
    /// Its shard.
    pub shard: u32,
    /// Its number.
    pub segment: u32,
    /// What the newest whole checkpoint says.
    pub known: Option<&'a SegmentState>,
    /// How many live records that checkpoint lists in it.
    pub listed: u64,
    /// How much is looked at.
    pub level: Level,
}

impl Subject<'_> {
    /// A place in it.
    pub fn place(&self, offset: Option<u64>) -> Place {
        Place { shard: Some(self.shard), segment: Some(self.segment), offset }
    }
}

/// What the recovery table made of a segment.
#[derive(Debug, Default)]
pub enum Outcome {
    /// The file could not be looked at.
    #[default]
    Unseen,
    /// Nothing in it counts.
    Free,
    /// It is neither read nor recycled.
    Quarantined,
    /// Its footer counts; the records were looked at unless the check was quick.
    Sealed {
        /// The generation.
        generation: u64,
        /// The trailer.
        trailer: Trailer,
        /// The footer.
        footer: Footer,
        /// The records that are as the footer says, if they were looked at.
        good: Vec<Met>,
        /// Whole records that the footer leaves out.
        unlisted: Vec<Met>,
    },
    /// It was walked.
    Walked {
        /// Why: a tail, or a rescan.
        scan: Scan,
        /// What was found.
        scanned: Scanned,
    },
}

impl Outcome {
    /// The records that count, as far as they were looked at.
    pub fn records(&self) -> impl Iterator<Item = &Met> {
        let (first, second): (&[Met], &[Met]) = match self {
            Self::Sealed { good, unlisted, .. } => (good, unlisted),
            Self::Walked { scanned, .. } => (&scanned.adopted, &[]),
            Self::Unseen | Self::Free | Self::Quarantined => (&[], &[]),
        };
        first.iter().chain(second)
    }
}

/// What the check of one segment found.
#[derive(Debug, Default)]
pub struct SegmentReport {
    /// What was found.
    pub findings: Findings,
    /// Records that count.
    pub records: u64,
    /// Blocks in them.
    pub blocks: u64,
    /// Where the bytes are.
    pub accounting: Accounting,
    /// What the segment is.
    pub outcome: Outcome,
    /// Both ends, if they were read.
    pub ends: Option<Ends>,
}
