//! Work that is counted in steps, and long work on an executor in short sections.
//!
//! A step is a look at one block, record or segment: less than a microsecond. Long work counts its steps here, and other tasks
//! have their turn after every [`AT_ONCE`], so that no task waits for the executor for a millisecond.
//! The counts are kept: a test asserts by them how work grows with what is asked, and that no section is longer. They
//! follow from the seed, however busy the machine is.

use super::notify::yield_now;
use kvarts_contract::clock::{Clock, Nanos};
use kvarts_contract::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Steps after which others have their turn.
pub(crate) const AT_ONCE: u64 = 512;

/// What was counted, of all work of one kind.
#[derive(Debug, Default)]
pub(crate) struct Work {
    steps: AtomicU64,
    longest: AtomicU64,
    nanos: AtomicU64,
    longest_nanos: AtomicU64,
}

/// What long work of one kind has taken since the store was opened. Waits for devices and for others do not count.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WorkDone {
    /// Looks at one block, record or segment.
    pub steps: u64,
    /// The most of them without a turn for others.
    pub longest_steps: u64,
    /// Time on executors.
    pub nanos: u64,
    /// The most of it without a turn for others.
    pub longest_nanos: u64,
}

impl Work {
    /// Counts steps done where no other task can have a turn.
    pub(crate) fn add(&self, steps: u64) {
        self.steps.fetch_add(steps, Relaxed);
    }

    pub(crate) fn done(&self) -> WorkDone {
        WorkDone {
            steps: self.steps.load(Relaxed),
            longest_steps: self.longest.load(Relaxed),
            nanos: self.nanos.load(Relaxed),
            longest_nanos: self.longest_nanos.load(Relaxed),
        }
    }
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// The work of one open store, by kind.
        #[derive(Debug, Default)]
        pub(crate) struct Works { $(pub(crate) $name: Work),* }

        /// What the work of one open store has taken, by kind.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct Done { $($(#[$doc])* pub $name: WorkDone),* }

        impl Works {
            pub(crate) fn done(&self) -> Done {
                Done { $($name: self.$name.done()),* }
            }
        }
    };
}

kinds! {
    /// Choosing what is evicted, and taking it out.
    evictions,
    /// Checkpoints.
    checkpoints,
    /// Sweeps of what has expired.
    sweeps,
    /// Deletes of namespaces.
    deletes,
    /// Keeping quotas.
    quotas,
    /// Reads: runs taken up, slices looked at, planned, followed and taken in.
    reads,
    /// What reads ask of executors: parts.
    parts,
    /// Matches: blocks looked at in each column, and columns looked for.
    matches,
    /// Searches for what descends from a key: blocks listed, links taken in and followed.
    searches,
    /// Footers of segments that were read while the store is open.
    footers,
    /// Walks from records to what they hang on.
    chains,
    /// Looks for chains of small records.
    merges,
}

/// One piece of long work.
pub(crate) struct Section<'a> {
    work: &'a Work,
    clock: &'a dyn Clock,
    steps: u64,
    since: Option<Nanos>,
}

impl<'a> Section<'a> {
    pub(crate) fn begin(work: &'a Work, clock: &'a dyn Clock) -> Self {
        Self { work, clock, steps: 0, since: Some(clock.now()) }
    }

    /// Counts steps; other tasks have their turn if it is time.
    pub(crate) async fn step(&mut self, steps: u64) {
        if self.since.is_none() {
            self.since = Some(self.clock.now());
        }
        self.steps += steps;
        if self.steps >= AT_ONCE {
            self.end_turn().await;
        }
    }

    /// Other tasks have their turn now.
    pub(crate) async fn end_turn(&mut self) {
        self.pause();
        yield_now().await;
        self.since = Some(self.clock.now());
    }

    /// Something else is waited for.
    pub(crate) fn pause(&mut self) {
        let steps = std::mem::take(&mut self.steps);
        self.work.steps.fetch_add(steps, Relaxed);
        self.work.longest.fetch_max(steps, Relaxed);
        if let Some(since) = self.since.take() {
            let nanos = self.clock.now().0.saturating_sub(since.0);
            self.work.nanos.fetch_add(nanos, Relaxed);
            self.work.longest_nanos.fetch_max(nanos, Relaxed);
        }
    }
}

impl Drop for Section<'_> {
    fn drop(&mut self) {
        self.pause();
    }
}
