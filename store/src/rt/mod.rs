//! The runtime seam: clock, randomness, task spawning and threads, so that a whole store runs from one seed.
//!
//! An *executor* is one thread (real or simulated) that owns shards. It runs tasks that never leave it, each in
//! a [`Class`]; between tasks it reaps its [`Io`] and, when nothing is runnable, parks in it.
//! Three things implement [`Runtime`]: glommio (`glommio`), a plain thread (`local`), and the simulated
//! world (in `kvarts-tests`, which steps the same plain executor under a seeded scheduler).

pub mod blocking;
pub mod clock;

pub mod glommio;
pub mod local;
pub mod mailbox;

mod tasks;
#[cfg(test)]
mod test_io;
pub mod threads;

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::io::{Io, Unpark};

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
    /// Completes when this executor's [`Unpark`] was called since the last such future completed.
    /// For the one task that drains the executor's mailbox.
    fn unparked(&self) -> LocalTask;
    /// Registers what reaps this executor's completions, in place of an earlier one. Without one the executor
    /// sleeps and wakes as usual, and nobody reaps.
    fn set_reaper(&self, reaper: Reaper);
    /// The clock.
    fn clock(&self) -> &Arc<dyn Clock>;
    /// Randomness.
    fn entropy(&self) -> &Arc<dyn Entropy>;
}

/// What an executor's first task is given.
pub struct Seat {
    /// Which executor this is, from zero.
    pub index: usize,
    /// Its runtime.
    pub rt: Rc<dyn Runtime>,
    /// Its way to the disks.
    pub io: Rc<RefCell<dyn Io>>,
    /// Ends its park.
    pub unparker: Arc<dyn Unpark>,
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seat").field("index", &self.index).finish_non_exhaustive()
    }
}

/// An executor's first task. The executor ends when it completes.
pub type Body = Box<dyn FnOnce(Seat) -> LocalTask + Send>;

/// Starts executors: threads, or their simulation.
pub trait Launcher {
    /// Starts executor `index` and runs `body` on it. An error says why it could not start.
    fn launch(&self, index: usize, body: Body) -> Result<Box<dyn Join + Send>, String>;
    /// The clock that all executors share.
    fn clock(&self) -> Arc<dyn Clock>;
    /// The randomness that all executors share.
    fn entropy(&self) -> Arc<dyn Entropy>;
}

/// An executor that was started.
pub trait Join {
    /// Waits until it ended; an error carries what it panicked with.
    fn join(self: Box<Self>) -> Result<(), String>;
}
