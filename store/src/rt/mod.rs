//! The runtime seam: clock, randomness, task spawning and threads, so that a whole store runs from one seed.
//!
//! An *executor* is one thread (real or simulated) that owns shards. It runs tasks that never leave it, each in
//! a [`Class`](kvarts_contract::class::Class); between tasks it reaps its [`Io`] and, when nothing is runnable, parks in it.
//! Three things implement [`Runtime`]: glommio (`glommio`), a plain thread (`local`), and the simulated
//! world (in `kvarts-tests`, which steps the same plain executor under a seeded scheduler).

pub mod glommio;
pub mod local;
pub mod mailbox;

mod tasks;
#[cfg(test)]
mod test_io;
pub mod threads;

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use kvarts_contract::clock::{Clock, Entropy};

pub use crate::task::{LocalTask, Reaper, Runtime};

use crate::io::{Io, Unpark};

/// What an executor's first task is given.
pub struct ExecutorContext {
    /// Which executor this is, from zero.
    pub index: usize,
    /// Its runtime.
    pub rt: Rc<dyn Runtime>,
    /// Its way to the disks.
    pub io: Rc<RefCell<dyn Io>>,
    /// Ends its park.
    pub unparker: Arc<dyn Unpark>,
}

impl fmt::Debug for ExecutorContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExecutorContext").field("index", &self.index).finish_non_exhaustive()
    }
}

/// An executor's first task. The executor ends when it completes.
pub type Body = Box<dyn FnOnce(ExecutorContext) -> LocalTask + Send>;

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
