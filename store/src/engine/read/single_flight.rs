//! Single flight: reads of the same blocks at the same time share one load from the device.
//!
//! The first read of a run of blocks leads; a later one of the same run, while the first is under way, follows:
//! each step that the leader has in is copied from the leader's memory into the follower's and verified *there*.
//! So it does not matter what the leader's owner does with its memory: a copy that does not match its digests is
//! read from the device instead, as is everything that the leader did not get to.
//!
//! A read follows none that is less urgent: it would wait as long as that has to. It leads beside it, and those that come
//! later follow it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::header_cache::Header;
use super::job::ReadJob;
use super::wanted::{Wanted, WantedChunk};
use crate::engine::tasks::notify::{Notify, Section};
use kvarts_contract::api::{Order, Verify};

/// What must be equal for reads to share: record (segment, generation, offset), blocks of it, layers, order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct FlightKey {
    record: (u32, u64, u64),
    blocks: (u16, u32),
    layers: (u32, u32),
    by_layer: bool,
}

/// A load under way.
pub(crate) struct Flight {
    leader: Arc<ReadJob>,
    /// Index of the run in the leader's list.
    record: u32,
    /// Steps of the leader whose slice of this run is in.
    done: RefCell<BTreeSet<u32>>,
    header: RefCell<Option<Rc<Header>>>,
    ended: Cell<bool>,
    changed: Notify,
}

/// The loads under way in one shard.
#[derive(Default)]
pub(crate) struct SingleFlight(RefCell<BTreeMap<FlightKey, Rc<Flight>>>);

/// Whether a read leads or follows.
pub(crate) enum Role {
    Lead(Rc<Flight>),
    Follow(Rc<Flight>),
}

impl SingleFlight {
    /// Joins the load of this run if that is as urgent, or begins one. A read that does not verify everything neither leads nor
    /// follows: what it got proves nothing.
    pub(crate) fn join(
        &self,
        job: &Arc<ReadJob>,
        record: u32,
        wanted: &Wanted,
        generation: u64,
    ) -> Option<Role> {
        if job.request.verify != Verify::Always {
            return None;
        }
        let key = key(job, wanted, generation);
        let mut flights = self.0.borrow_mut();
        let is_as_urgent = |flight: &&Rc<Flight>| flight.leader.request.class <= job.request.class;
        if let Some(flight) = flights.get(&key).filter(is_as_urgent) {
            return Some(Role::Follow(Rc::clone(flight)));
        }
        let flight = Rc::new(Flight {
            leader: Arc::clone(job),
            record,
            done: RefCell::default(),
            header: RefCell::default(),
            ended: Cell::new(false),
            changed: Notify::default(),
        });
        flights.insert(key, Rc::clone(&flight));
        Some(Role::Lead(flight))
    }

    /// Loads under way.
    pub(crate) fn len(&self) -> usize {
        self.0.borrow().len()
    }

    /// Ends a load. Reads that follow it read the rest themselves.
    pub(crate) fn end(&self, flight: &Rc<Flight>, generation: u64) {
        if let Some(wanted) = flight.leader.wanted.get(flight.record as usize) {
            let (key, mut flights) = (key(&flight.leader, wanted, generation), self.0.borrow_mut());
            // A more urgent one may lead by now.
            if flights.get(&key).is_some_and(|leading| Rc::ptr_eq(leading, flight)) {
                flights.remove(&key);
            }
        }
        flight.ended.set(true);
        flight.changed.wake_all();
    }
}

fn key(job: &ReadJob, wanted: &Wanted, generation: u64) -> FlightKey {
    let layers = job.request.layers.as_ref().map_or((0, u32::MAX), |range| (range.start, range.end));
    FlightKey {
        record: (wanted.segment, generation, wanted.offset),
        blocks: (wanted.location.block, wanted.run.end - wanted.run.start),
        layers,
        by_layer: job.request.order == Order::Layers,
    }
}

impl Flight {
    /// The leader has a slice in: `step` of its own plan.
    pub(crate) fn arrived(&self, step: u32, header: &Rc<Header>) {
        self.header.borrow_mut().get_or_insert_with(|| Rc::clone(header));
        self.done.borrow_mut().insert(step);
        self.changed.wake_all();
    }

    /// Takes every step of this run from the leader as it arrives. Gives the steps that have to be read.
    pub(crate) async fn follow(&self, job: &ReadJob, record: u32, section: &mut Section) -> Vec<u32> {
        let mut missed = Vec::new();
        let (Some(mine), Some(theirs)) =
            (job.wanted.get(record as usize), self.leader.wanted.get(self.record as usize))
        else {
            return missed;
        };
        for (step, from) in steps_of(job, record).zip(steps_of(&self.leader, self.record)) {
            job.shared.work.reads.add(1);
            let is_here = self
                .changed
                .until(|| {
                    let here = self.done.borrow().contains(&from);
                    (here || self.ended.get()).then_some(here)
                })
                .await;
            let copied = match is_here && !job.is_cancelled() {
                true => self.copy(job, step, (mine, theirs)),
                false => None,
            };
            match copied {
                Some(_) => job.slice_done(step),
                None => missed.push(step),
            }
            section.spend(Section::of_bytes(copied.unwrap_or_default())).await;
        }
        missed
    }

    /// Copies the chunks of one step and verifies the copies; gives the bytes, or none if one is not what was put.
    fn copy(&self, job: &ReadJob, step: u32, (mine, theirs): (&Wanted, &Wanted)) -> Option<u64> {
        let header = self.header.borrow().as_ref().map(Rc::clone)?;
        let mut bytes = 0;
        for WantedChunk { block, part, bytes: len } in job.chunks_of(step, mine)? {
            let index = block - u32::from(mine.location.block);
            let source = self.leader.request.into.chunk(part, theirs.run.start + index, len)?;
            let copy = job.request.into.chunk(part, mine.run.start + index, len)?;
            // Read by itself, it will be told that what it began with has left.
            if !job.admits(mine.run.start + index, header.origin(block), (header.created_ms(), mine)) {
                return None;
            }
            copy.copy_from(0, &source, 0, source.len());
            let found = copy.crc32(0, copy.len());
            if header.digest(block, part) != Some(found) {
                return None;
            }
            if let Some(digests) = job.request.into.digests() {
                digests.set(part, mine.run.start + index, found);
            }
            bytes += len;
        }
        job.shared.counters.bytes_shared.fetch_add(bytes, Relaxed);
        Some(bytes)
    }
}

/// The steps of a job that concern one run, in order.
fn steps_of(job: &ReadJob, record: u32) -> Range<u32> {
    if kvarts_layout::planted!("follower-walks-every-step") {
        job.shared.work.reads.add(u64::from(job.plan.steps()));
    }
    job.plan.steps_of(record)
}
