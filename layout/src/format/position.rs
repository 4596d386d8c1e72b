//! The place of a structure: of which store, in which file, and which of the things that lay there in turn.

use std::fmt;

use crate::ids::StoreId;

/// A place on disk, and which of the things that were there in turn.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Position {
    /// The store.
    pub store: StoreId,
    /// The shard. For a superblock: the index of the directory.
    pub shard: u32,
    /// The segment. For a checkpoint: which of the two files. For a superblock: zero.
    pub segment: u32,
    /// Counts what the segment file held in turn. For a checkpoint or superblock: its sequence.
    pub generation: u64,
    /// Bytes from the start of the file, a multiple of 4096.
    pub offset: u64,
}

impl Position {
    /// The same file, generation and store at another offset.
    pub const fn at(self, offset: u64) -> Self {
        Self { offset, ..self }
    }

    /// The same place under another generation.
    pub const fn under(self, generation: u64) -> Self {
        Self { generation, ..self }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store, shard, segment, generation, offset } = self;
        write!(f, "store {store} shard {shard} segment {segment} generation {generation} offset {offset}")
    }
}
