//! Classes of work: what a request is for decides what it waits behind.

/// What a task works for. Classes share an executor by weight; see [`Class::shares`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Class {
    /// Reads that an engine waits for and that are so small ([`SMALL_READ_BYTES`](crate::api::SMALL_READ_BYTES)) that
    /// a place behind large ones would be all of their time. The engine makes them of foreground reads itself.
    Small,
    /// Reads that an engine waits for.
    Foreground,
    /// Puts.
    Put,
    /// Reads ahead of need, and reads for peers.
    Prefetch,
    /// Reclaim, compaction, scrub, checkpoints.
    Background,
}

impl Class {
    /// All classes, most urgent first.
    pub const ALL: [Self; 5] = [Self::Small, Self::Foreground, Self::Put, Self::Prefetch, Self::Background];

    /// The weight of the class when all have work.
    pub const fn shares(self) -> u32 {
        match self {
            Self::Small | Self::Foreground => 1000,
            Self::Put => 300,
            Self::Prefetch => 100,
            Self::Background => 50,
        }
    }
}
