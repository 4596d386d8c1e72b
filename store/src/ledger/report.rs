//! The ledger as operators and tests see it.

use std::ops::AddAssign;

use super::account::NamespaceSpace;

/// What bytes on disk are. The module's documentation says what each word means.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    /// Bytes allocated.
    pub allocated: u64,
    /// Of these, records that the index points at.
    pub live: u64,
    /// Records that nothing points at.
    pub dead: u64,
    /// Where records can still go.
    pub free: u64,
    /// Everything else.
    pub overhead: u64,
}

impl Space {
    /// The four together; equal to what is allocated.
    pub fn sum(&self) -> u64 {
        self.live + self.dead + self.free + self.overhead
    }
}

impl AddAssign for Space {
    fn add_assign(&mut self, other: Self) {
        self.allocated += other.allocated;
        self.live += other.live;
        self.dead += other.dead;
        self.free += other.free;
        self.overhead += other.overhead;
    }
}

/// What a segment is to its book.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Phase {
    /// It holds nothing.
    #[default]
    Free,
    /// Records are being appended.
    Open,
    /// It takes no more records.
    Full,
    /// It failed, or cannot be told: it takes no more records, and what is not known to be something is dead.
    Lost,
}

/// One segment file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentView {
    /// The shard whose log it belongs to.
    pub shard: u32,
    /// Its number there.
    pub segment: u32,
    /// What it is.
    pub phase: Phase,
    /// Where its records end.
    pub log_end: u64,
    /// Bytes of all records of blocks in it.
    pub records: u64,
    /// Bytes of these that were given back to the file system.
    pub punched: u64,
    /// What its bytes are.
    pub space: Space,
}

/// The segments of one shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ShardSpace {
    /// The shard.
    pub shard: u32,
    /// How many segment files it has.
    pub segments: u64,
    /// What their bytes are.
    pub space: Space,
}

/// What every byte of a store on disk is.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SpaceReport {
    /// The most that may be allocated.
    pub budget: u64,
    /// All bytes of the store: segments and what is listed below.
    pub total: Space,
    /// Bytes of checkpoint files; overhead.
    pub checkpoints: u64,
    /// Bytes of superblocks; overhead.
    pub superblocks: u64,
    /// What directories may take in the file system at most; overhead. The file system tells of no directory's
    /// size through the store's files, so this is a bound and not a measurement.
    pub directories: u64,
    /// Bytes taken of the budget for a file that is being made; free.
    pub reserved: u64,
    /// Segments, shard by shard.
    pub shards: Vec<ShardSpace>,
    /// Live bytes and limits, namespace by namespace.
    pub namespaces: Vec<NamespaceSpace>,
}
