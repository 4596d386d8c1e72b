//! Long work on an executor in short sections, each counted in steps.
//!
//! A step is a look at one block, record or segment: less than a microsecond. Whoever has many to look at counts them
//! here, and others have their turn after every [`AT_ONCE`], so that nobody waits for the executor for a millisecond.
//! The counts are kept: a test asserts by them how work grows and that no section is longer.

use super::notify::yield_now;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Steps after which others have their turn.
pub(crate) const AT_ONCE: u64 = 512;

/// What was counted, of all work of one kind.
#[derive(Debug, Default)]
pub(crate) struct Work {
    steps: AtomicU64,
    longest: AtomicU64,
}

impl Work {
    /// All steps since opening.
    pub(crate) fn steps(&self) -> u64 {
        self.steps.load(Relaxed)
    }

    /// The most steps of one section.
    pub(crate) fn longest(&self) -> u64 {
        self.longest.load(Relaxed)
    }
}

/// One piece of long work.
#[derive(Debug)]
pub(crate) struct Section<'a> {
    work: &'a Work,
    since: u64,
}

impl<'a> Section<'a> {
    pub(crate) fn begin(work: &'a Work) -> Self {
        Self { work, since: 0 }
    }

    /// So many steps were done; others have their turn if it is time.
    pub(crate) async fn step(&mut self, steps: u64) {
        self.since += steps;
        if self.since >= AT_ONCE {
            self.end();
            yield_now().await;
        }
    }

    fn end(&mut self) {
        let steps = std::mem::take(&mut self.since);
        self.work.steps.fetch_add(steps, Relaxed);
        self.work.longest.fetch_max(steps, Relaxed);
    }
}

impl Drop for Section<'_> {
    fn drop(&mut self) {
        self.end();
    }
}
