//! What every task of an executor is given: the clocks, randomness, its class, and the runtime that it runs on.
//!
//! Devices and runtimes both stand on this; neither knows the other by it. Callers find it all in
//! [`rt`](crate::rt).

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// A task that stays on its executor.
pub type LocalTask = Pin<Box<dyn Future<Output = ()>>>;

/// Reaps an executor's completions and wakes the tasks that wait for them; says how many there were.
/// It also hands submissions to the device, so an executor calls it after running tasks and before sleeping.
pub type Reaper = Box<dyn FnMut() -> usize>;

/// A point on the monotonic clock, in nanoseconds since an arbitrary start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Nanos(pub u64);

impl Nanos {
    /// This point and `after` later, saturating.
    pub fn plus(self, after: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// How long after `earlier` this is; zero if it is before.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// What a task works for. Classes share an executor by weight; see [`Class::shares`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Class {
    /// Reads that an engine waits for and that are so small ([`SMALL_READ_BYTES`](kvarts_contract::api::SMALL_READ_BYTES)) that
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

/// The clocks. Callable from any thread.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Monotonic: deadlines, leases and TTLs are measured by it while the process lives.
    fn now(&self) -> Nanos;
    /// Milliseconds since 1970 by the wall clock, which may jump: only for what must survive a restart.
    fn unix_millis(&self) -> u64;
}

/// Randomness. Callable from any thread.
pub trait Entropy: Send + Sync + fmt::Debug {
    /// Fills `bytes`.
    fn fill(&self, bytes: &mut [u8]);
}

/// One executor, as its own tasks see it.
pub trait Runtime {
    /// Runs `task` on this executor. Tasks of one class run in the order in which they became runnable.
    fn spawn(&self, class: Class, task: LocalTask);
    /// Completes at or after `at`.
    fn sleep_until(&self, at: Nanos) -> LocalTask;
    /// Completes after other runnable tasks had their turn.
    fn yield_now(&self) -> LocalTask;
    /// Completes when this executor's [`Unpark`](crate::io::Unpark) was called since the last such future completed.
    /// For the one task that drains the executor's mailbox.
    fn unparked(&self) -> LocalTask;
    /// Registers what reaps this executor's completions, in place of an earlier one. Without one the executor
    /// sleeps and wakes as usual, and completions are not reaped.
    fn set_reaper(&self, reaper: Reaper);
    /// The clock.
    fn clock(&self) -> &Arc<dyn Clock>;
    /// Randomness.
    fn entropy(&self) -> &Arc<dyn Entropy>;
}
