//! The engine: one store over its shards.
//!
//! Its rooms, each of which stands on those before it: `tasks` (how tasks wait), `shared` (what all threads share),
//! `volume` (what a shard has on disk), `read`, `space` (segments, eviction), `write` (the log, puts, deletes),
//! `compact`, `recover`, and `front`: the store that callers see, and its executors.
//!
//! `front` checks a put or a read on the caller's thread, against what all threads share; its parts go through
//! mailboxes to the executors that own the shards, where `write` appends records to segments and `read` reads them
//! back; `recover` finds it all again.

mod compact;
mod front;
mod read;
mod recover;
pub(crate) mod shared;
mod space;
pub(crate) mod tasks;
mod volume;
mod write;

use std::time::Duration;

pub use compact::background::Compaction;
pub use compact::{CompactOptions, CompactReport};
pub use front::memory_audit::Table;
pub use front::store::{Executors, Holding, Options, PlannedExtent, Stats, Store, StoreTiles};
pub use recover::{Problem, RecoveryReport};
pub use shared::Counts;
pub use shared::health::Health;
pub use shared::policy::{Candidate, Chosen, EvictionPolicy};
pub use shared::recency::STEPS_PER_BUDGET;
pub use tasks::steps::{Done, WorkDone};

/// What one executor may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Operations and bytes at the device.
    pub io: crate::io::Limits,
    /// Staging memory.
    pub arena_bytes: usize,
    /// Whether the staging memory is registered with the ring.
    pub register: bool,
    /// Bytes that one read may have under way.
    pub read_window_bytes: u64,
    /// Requests that may wait for the executor.
    pub mailbox_messages: usize,
    /// How often recency and expiry are put on disk: after a crash they are as old as this at most.
    pub checkpoint_every: Duration,
    /// How often blocks whose time is over are looked for; whoever looks one up never finds it anyway.
    pub expiry_sweep_every: Duration,
    /// How long a stop waits for what is under way.
    pub stop_patience: Duration,
    /// What it compacts without being asked.
    pub compaction: Compaction,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            io: crate::io::Limits::default(),
            arena_bytes: 64 << 20,
            register: true,
            read_window_bytes: 16 << 20,
            mailbox_messages: 4096,
            checkpoint_every: Duration::from_secs(30),
            expiry_sweep_every: Duration::from_secs(10),
            stop_patience: Duration::from_secs(30),
            compaction: Compaction::default(),
        }
    }
}
