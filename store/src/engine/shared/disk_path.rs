//! The way to the disks, as reads find it: what is asked for and not delivered, and what reads have taken.
//!
//! A read counts from its look-up to its last verified byte, whatever it waits for in between: that is what the next one
//! is to be told. Counted are reads that came whole, of their own: one that was copied from another's load, ended early
//! or is of a lower class says nothing of what a caller in front will wait for.

use std::sync::{Arc, PoisonError};

use kvarts_planner::plan::{Link, MeasuredLink};

use super::Shared;
use kvarts_contract::api::DiskLink;
use kvarts_contract::sync::Mutex;
use kvarts_contract::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use kvarts_contract::{class::Class, clock::Nanos};

/// Of this number of plans that load nothing because of what was measured, one is made as if nothing had been: what it loads is
/// measured.
const PROBED_EVERY: u64 = 16;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct DiskPath {
    /// Plans that loaded nothing because the ways were too slow.
    declined: AtomicU64,
    outstanding: AtomicU64,
    /// Held for a few sums, never across a wait.
    measured: Mutex<MeasuredLink>,
}

impl DiskPath {
    /// The way as it is at this time.
    pub(crate) fn at(&self, now: Nanos) -> DiskLink {
        let outstanding_bytes = self.outstanding.load(Ordering::Relaxed);
        let measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        DiskLink { link: Link { outstanding_bytes, ..measured.link(ms(now.0)) }, measured: measured.loads() }
    }

    /// The way as it is taken to be before anything was measured.
    pub(crate) fn assumed(&self) -> Link {
        let outstanding_bytes = self.outstanding.load(Ordering::Relaxed);
        Link { outstanding_bytes, ..MeasuredLink::default().link(0.0) }
    }

    /// Whether a plan that loads nothing, because the ways are too slow, is to be made as if nothing were known of them: one in
    /// [`PROBED_EVERY`] is, whichever caller's it is.
    pub(crate) fn probes(&self) -> bool {
        self.declined.fetch_add(1, Ordering::Relaxed) % PROBED_EVERY == PROBED_EVERY - 1
    }
}

fn ms(nanos: u64) -> f64 {
    nanos as f64 / 1e6
}

/// One read that is under way. What it was asked for is outstanding until it is delivered or the read is dropped.
pub(crate) struct Underway {
    shared: Arc<Shared>,
    /// Bytes that each step delivers, on average.
    step_bytes: u64,
    left: AtomicU64,
    /// Bytes that were outstanding when it began, its own among them.
    before: u64,
    begun: Nanos,
    /// Whether what it takes says what another would.
    counts: AtomicBool,
}

impl Underway {
    /// A read of `bytes` bytes in `steps` steps begins.
    pub(crate) fn begin(shared: &Arc<Shared>, class: Class, bytes: u64, steps: u32) -> Self {
        let before = shared.disk_path.outstanding.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        Self {
            shared: Arc::clone(shared),
            step_bytes: bytes.checked_div(u64::from(steps)).unwrap_or(bytes),
            left: AtomicU64::new(bytes),
            before,
            begun: shared.clock.now(),
            counts: AtomicBool::new(matches!(class, Class::Small | Class::Foreground)),
        }
    }

    /// A step was delivered. Steps are delivered one after the other.
    pub(crate) fn step_done(&self) {
        let left = self.left.load(Ordering::Relaxed);
        let step = self.step_bytes.min(left);
        self.left.store(left - step, Ordering::Relaxed);
        self.shared.disk_path.outstanding.fetch_sub(step, Ordering::Relaxed);
    }

    /// Leaves the read out of the measurement: some of its bytes come from another read's load.
    pub(crate) fn exclude_from_measurement(&self) {
        self.counts.store(false, Ordering::Relaxed);
    }

    /// It has ended, whole or not.
    pub(crate) fn end(&self, whole: bool) {
        self.give_back();
        if whole && self.counts.load(Ordering::Relaxed) {
            let (path, now) = (&self.shared.disk_path, self.shared.clock.now());
            let took = ms(now.0.saturating_sub(self.begun.0));
            let mut measured = path.measured.lock().unwrap_or_else(PoisonError::into_inner);
            measured.add(self.before, took, ms(now.0));
        }
    }

    fn give_back(&self) {
        self.shared.disk_path.outstanding.fetch_sub(self.left.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl Drop for Underway {
    fn drop(&mut self) {
        self.give_back();
    }
}
