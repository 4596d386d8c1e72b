//! What happened to blocks: a bounded, sequenced stream, for those who keep a picture of the content elsewhere.
//!
//! Each event names the whole key. A change of the index and its event are one step under the stream's lock, so the
//! events of a block come in the order of its changes; no task waits for a reader, which copies a bounded number of
//! events at a time and keeps his own place.
//!
//! Invariants:
//! - numbers of a stream begin at one and have no holes; a store that is opened again begins another stream;
//! - the ring keeps the newest events, in no more than its bytes; a reader whose next event is gone is told so;
//! - a snapshot's pages, changed by every event behind its sequence, are the content: blocks that compaction moves
//!   are announced as [`Cause::Moved`], so that none is missed between two pages.

mod log;
pub mod record;
#[cfg(test)]
mod tests;

use std::fmt;

use kvarts_layout::{IndexKey, NamespaceId};

pub use log::{EventLog, RING_BYTES, Subscription, ring_events};

/// A point in a stream of events: everything up to this number is known.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Sequence {
    /// Which stream: another one each time the store is opened.
    pub stream: u64,
    /// The number of the last event known; zero before the first.
    pub number: u64,
}

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum EventKind {
    /// The block is here.
    Stored,
    /// It went to make room.
    Evicted,
    /// Its time was over.
    Expired,
    /// It was deleted.
    Deleted,
    /// Its bytes were found damaged: a miss.
    Quarantined,
}

/// Why it happened.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Cause {
    /// A put.
    Put,
    /// Compaction moved it: it was here before.
    Moved,
    /// Its segment was needed.
    Room,
    /// Its namespace or tenant had more than its share.
    Quota,
    /// Its time to live.
    Ttl,
    /// A delete of its key.
    Key,
    /// A delete of a prefix that it descends from.
    Prefix,
    /// A delete of its namespace.
    Namespace,
    /// A digest did not match.
    Damage,
}

/// What an event is about.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Subject {
    /// One block.
    Block(IndexKey),
    /// Every block of a namespace.
    Namespace(NamespaceId),
}

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// Its place in the stream.
    pub sequence: Sequence,
    /// When, in milliseconds since 1970: the wall clock's time at opening and what has passed since.
    pub at_ms: u64,
    /// What happened.
    pub kind: EventKind,
    /// Why.
    pub cause: Cause,
    /// To what.
    pub subject: Subject,
}

/// Events are missing: begin a new snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gap {
    /// The first event that is still there, if there is any of this stream: where to resume without a snapshot if
    /// what is missing does not matter.
    pub resume: Sequence,
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "events before event number {} are missing: start a new snapshot", self.resume.number + 1)
    }
}

impl std::error::Error for Gap {}

/// Where a snapshot stands. Means something to the store that gave it, for as long as it is open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SnapshotCursor {
    /// The sequence at which the snapshot was begun.
    pub sequence: Sequence,
    /// The shard whose segments are read.
    pub shard: u32,
    /// The segment.
    pub segment: u32,
    /// Records of it that were passed.
    pub record: u32,
}

/// Some of what is here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SnapshotPage {
    /// Events behind this point are to be applied; the same on every page.
    pub sequence: Sequence,
    /// Blocks; one may stand on several pages.
    pub blocks: Vec<IndexKey>,
    /// Asks for the next page; `None` on the last.
    pub next: Option<SnapshotCursor>,
}

/// Blocks that a page has at most, but for those of one record.
pub const PAGE_BLOCKS: usize = 4096;
