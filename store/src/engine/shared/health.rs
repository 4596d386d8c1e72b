//! How the store is: why it takes no writes, if so, and what cannot be reached because an executor died.
//!
//! A fault of what the store lives on latches it: no write is begun any more. Who knows that the cause is gone has it
//! resume ([`Store::resume`](crate::engine::Store::resume)), which proves it first.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, PoisonError};

use super::Shared;
use crate::index::Lookup;
use kvarts_contract::error::{LatchCause, Reason};
use kvarts_contract::io_error::IoError;
use kvarts_contract::sync::Mutex;
use kvarts_contract::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How an open store is.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Health {
    /// Why it takes no writes, if so.
    pub latched: Option<String>,
    /// Executors that have died. What lies in their shards is not here until the store is opened again.
    pub dead_executors: u64,
    /// Shards that refuse puts because their device fails writes wherever it was asked, and what it said last. Reads
    /// go on, and each put asks again.
    pub failing: BTreeMap<u32, String>,
    /// Directories that are out, by the order in which they were given, each with why: what lies there is not here until it is back.
    pub out: BTreeMap<u16, String>,
    /// What the disks lack for the budget, if they lacked it when the store was opened or its budget changed. It serves what it
    /// has; puts find room where blocks may go.
    pub short_of_disk: Option<String>,
}

impl Health {
    /// What is wrong, in a line; `None` of a store that is well.
    pub fn fault(&self) -> Option<&str> {
        self.latched.as_deref()
    }

    /// Why the store should be opened anew, if so. A store that is read-only, and a disk that is slow, hangs or is lost, are no
    /// reasons: opening it again cures neither, and takes the other disks away meanwhile.
    pub fn cured_by_a_restart(&self) -> Option<String> {
        (self.dead_executors > 0).then(|| {
            format!(
                "{} executors ended with a panic; the blocks of their shards are misses until a restart",
                self.dead_executors
            )
        })
    }
}

/// What [`Health`] is told from.
#[derive(Debug, Default)]
pub(crate) struct State {
    latch: Mutex<Option<LatchCause>>,
    /// How often something was met that latches.
    latches: AtomicU64,
    dead: Mutex<Dead>,
    /// Whether any executor died: asked at each look at the index.
    any_dead: AtomicBool,
    failing: Mutex<BTreeMap<u32, String>>,
    any_failing: AtomicBool,
    short_of_disk: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct Dead {
    executors: u64,
    shards: BTreeSet<u32>,
}

impl Shared {
    /// Makes the store read-only: an error said that the directory takes no writes.
    pub(crate) fn latch(&self, error: &IoError) -> Reason {
        self.latch_for(LatchCause::Device(Box::new(error.clone())))
    }

    /// The same, because this directory of the store was taken away.
    pub(crate) fn latch_taken_away(&self, directory: &Path) -> Reason {
        self.latch_for(LatchCause::TakenAway(directory.to_owned()))
    }

    fn latch_for(&self, why: LatchCause) -> Reason {
        let mut latch = self.health.latch.lock().unwrap_or_else(PoisonError::into_inner);
        self.health.latches.fetch_add(1, Ordering::AcqRel);
        // The first cause is what operators see; who asked is told what he met.
        latch.get_or_insert_with(|| why.clone());
        Reason::Latched(why)
    }

    /// Why nothing is written any more, if so.
    pub(crate) fn latched(&self) -> Option<Reason> {
        self.health.latch.lock().unwrap_or_else(PoisonError::into_inner).clone().map(Reason::Latched)
    }

    /// How often something was met that latches the store.
    pub(crate) fn latches(&self) -> u64 {
        self.health.latches.load(Ordering::Acquire)
    }

    /// Takes writes again, unless an executor is dead or something else was met since it had been met `latches` times.
    pub(crate) fn lift_latch(&self, latches: u64) -> Result<(), Reason> {
        let dead = self.health.dead.lock().unwrap_or_else(PoisonError::into_inner);
        let mut latch = self.health.latch.lock().unwrap_or_else(PoisonError::into_inner);
        if (dead.executors > 0 || self.latches() != latches)
            && let Some(why) = &*latch
        {
            return Err(Reason::Latched(why.clone()));
        }
        *latch = None;
        Ok(())
    }

    pub(crate) fn health(&self) -> Health {
        let dead_executors = self.health.dead.lock().unwrap_or_else(PoisonError::into_inner).executors;
        let latched = self
            .health
            .latch
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map(ToString::to_string);
        let failing = self.health.failing.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let out = self.directories.out();
        Health { latched, dead_executors, failing, out, short_of_disk: self.short_of_disk() }
    }

    /// What the disks lack for the budget, as far as it was looked at.
    pub(crate) fn short_of_disk(&self) -> Option<String> {
        self.health.short_of_disk.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The disks have room for the budget, or not.
    pub(crate) fn set_short_of_disk(&self, short: Option<String>) {
        *self.health.short_of_disk.lock().unwrap_or_else(PoisonError::into_inner) = short;
    }

    /// Whether the device of a shard fails writes wherever it was asked.
    pub(crate) fn set_failing(&self, shard: u32, error: Option<&IoError>) {
        if error.is_none() && !self.health.any_failing.load(Ordering::Acquire) {
            return;
        }
        let mut failing = self.health.failing.lock().unwrap_or_else(PoisonError::into_inner);
        match error {
            Some(error) => drop(failing.insert(shard, error.to_string())),
            None => drop(failing.remove(&shard)),
        }
        self.health.any_failing.store(!failing.is_empty(), Ordering::Release);
    }

    /// Whether the device of a shard was found to fail writes.
    pub(crate) fn is_failing(&self, shard: u32) -> bool {
        self.health.any_failing.load(Ordering::Acquire)
            && self.health.failing.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&shard)
    }

    /// No executor answers for these shards any more.
    fn executor_died(&self, executor: usize, shards: &[u32]) {
        let mut dead = self.health.dead.lock().unwrap_or_else(PoisonError::into_inner);
        self.health.any_dead.store(true, Ordering::Release);
        self.latch_for(LatchCause::Executor(executor));
        // Last, and under the lock: who sees the number sees the cause too, and finds no block of these shards.
        dead.executors += 1;
        dead.shards.extend(shards);
    }

    /// Blocks of a shard without an executor, or without its directory, are not here.
    pub(crate) fn hide_dead(&self, found: &mut [Lookup]) {
        if !self.any_dead() {
            return;
        }
        let records = self.index.records();
        for one in found {
            if let Lookup::Live(at) = one
                && records.get(at.record).is_some_and(|record| self.is_dead(u32::from(record.shard)))
            {
                *one = Lookup::Absent;
            }
        }
    }

    /// Whether any executor has died, or any directory is out.
    pub(crate) fn any_dead(&self) -> bool {
        self.health.any_dead.load(Ordering::Acquire) || self.directories.any_out()
    }

    /// Whether no executor answers for a shard, or its directory is out.
    pub(crate) fn is_dead(&self, shard: u32) -> bool {
        let died = || {
            self.health.any_dead.load(Ordering::Acquire)
                && self.health.dead.lock().unwrap_or_else(PoisonError::into_inner).shards.contains(&shard)
        };
        self.is_gone(shard) || died()
    }
}

/// Tells the others of the store when an executor's tasks go without its having been stopped: by a panic.
#[derive(Debug)]
pub(crate) struct Vigil {
    executor: usize,
    over: RefCell<Option<(Arc<Shared>, Vec<u32>)>>,
}

impl Vigil {
    pub(crate) fn new(executor: usize) -> Self {
        Self { executor, over: RefCell::default() }
    }

    /// The executor answers for these shards too from now on.
    pub(crate) fn begin(&self, shared: &Arc<Shared>, shards: Vec<u32>) {
        self.over.borrow_mut().get_or_insert_with(|| (Arc::clone(shared), Vec::new())).1.extend(shards);
    }

    /// It ends as it should.
    pub(crate) fn end(&self) {
        self.over.take();
    }
}

impl Drop for Vigil {
    fn drop(&mut self) {
        if let Some((shared, shards)) = self.over.take() {
            shared.executor_died(self.executor, &shards);
        }
    }
}
