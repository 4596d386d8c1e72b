//! What every task of an executor is given: the runtime that it runs on.
//!
//! Devices and runtimes both stand on this; neither knows the other by it. Callers find it all in
//! [`rt`](crate::rt).

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use kvarts_contract::class::Class;
use kvarts_contract::clock::{Clock, Entropy, Nanos};

/// A task that stays on its executor.
pub type LocalTask = Pin<Box<dyn Future<Output = ()>>>;

/// Reaps an executor's completions and wakes the tasks that wait for them; says how many there were.
/// It also hands submissions to the device, so an executor calls it after running tasks and before sleeping.
pub type Reaper = Box<dyn FnMut() -> usize>;

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
