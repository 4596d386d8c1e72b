//! The engine: one store over its shards.
//!
//! How a request travels: `put` and `read` check it on the caller's thread, against what all threads share
//! (`shared`: index, names, budget); its parts go through mailboxes to the executors that own the shards
//! (`shard`), where `log` appends records to segments and `slice` reads them back; `recover` finds it all again.

mod admission;
mod ages;
pub(crate) mod arrivals;
mod budget;
mod checkpoint;
mod compact;
mod content;
mod delete;
mod descent;
mod directory;
mod due;
mod evict;
mod executor;
mod expiry;
mod flights;
mod headers;
mod health;
mod index_room;
mod lend;
mod listing;
mod log;
mod lookup;
mod names;
mod naming;
mod notify;
mod presence;
mod put;
mod quota;
mod read;
mod reclaim;
mod recover;
mod room;
mod runs;
mod segment;
mod shared;
mod slice;
mod snapshot;
pub(crate) mod steps;
mod store;
mod tables;
mod trouble;
mod unpack;
mod writes;

use std::time::Duration;

pub use ages::STEPS_PER_BUDGET;
pub use compact::background::Compaction;
pub use compact::{CompactOptions, CompactReport};
pub use evict::policy::{Candidate, Chosen, EvictionPolicy};
pub use health::Health;
pub use recover::{Problem, RecoveryReport};
pub use shared::Counts;
pub use steps::{Done, WorkDone};
pub use store::{Executors, Holding, Options, PlannedExtent, Stats, Store};
pub use tables::Table;

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
