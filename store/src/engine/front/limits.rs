//! What one executor may use, and how often it does what the clock asks for.

use std::time::Duration;

use crate::engine::compact::background::Compaction;
use crate::engine::shared::batches::Batches;

/// What one executor may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Operations and bytes at the device.
    pub io: crate::driver::Limits,
    /// Staging memory, divided among the directories: 1 MiB each at least.
    pub arena_bytes: usize,
    /// Whether the staging memory is registered with the ring.
    pub register: bool,
    /// Bytes that one read may have under way.
    pub read_window_bytes: u64,
    /// Requests that may wait for the executor.
    pub mailbox_messages: usize,
    /// How often recency and expiry are put on disk: after a crash they are as old as this at most.
    pub checkpoint_every: Duration,
    /// How often expired blocks are looked for; a look-up never returns one in any case.
    pub expiry_sweep_every: Duration,
    /// How long a stop waits for what is under way.
    pub stop_timeout: Duration,
    /// What it compacts without being asked.
    pub compaction: Compaction,
    /// How much it does at a time.
    pub batches: Batches,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            io: crate::driver::Limits::default(),
            arena_bytes: 64 << 20,
            register: true,
            read_window_bytes: 16 << 20,
            mailbox_messages: 4096,
            checkpoint_every: Duration::from_secs(30),
            expiry_sweep_every: Duration::from_secs(10),
            stop_timeout: Duration::from_secs(30),
            compaction: Compaction::default(),
            batches: Batches::default(),
        }
    }
}
