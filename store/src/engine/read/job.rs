//! Reading blocks: what is shared between the caller's thread and the executors that work for one read.
//!
//! The caller's thread finds the blocks in the index, groups them into runs of records and makes one plan over
//! all of them; each executor works on the slices of its own shards' records (see `part_read`), those of one device apart from
//! those of another. A step (a layer, or
//! in block order a block) is announced when the slices of all executors are in, and steps are announced in
//! order: so a layerwise read of a prefix that lies in several shards merges them.
//!
//! A block that fails keeps the others going: its verdict is set, and everything announced from then on says how
//! many leading blocks are still good.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};

use kvarts_layout::OriginId;
use kvarts_layout::plan::{Placement, ReadOptions, ReadPlan, RecordRead};

use super::request::{Subject, check, name};
use super::wanted::{Wanted, WantedChunk, by_lane, find};
use crate::engine::shared::Shared;
use crate::engine::shared::disk_path::Underway;
use crate::engine::shared::grace::Arrival;
use crate::engine::shared::visibility::BlockOf;
use crate::index::{BlockFingerprint, Lookup};
use kvarts_contract::api::{Order, Origins, ReadEnd, ReadEvent, ReadProgress, ReadRequest, ReadSink};
use kvarts_contract::error::{Reason, broken_invariant};
use kvarts_contract::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use kvarts_contract::sync::{Mutex, MutexGuard, Race, planted};
use kvarts_contract::{class::Class, clock::Nanos};

/// What the executors of one read share.
pub(crate) struct ReadJob {
    pub(crate) shared: Arc<Shared>,
    pub(crate) request: ReadRequest,
    pub(crate) prints: Vec<BlockFingerprint>,
    pub(crate) plan: ReadPlan,
    pub(crate) wanted: Vec<Wanted>,
    /// For each step, how many slices have not ended.
    open_slices: Vec<AtomicU32>,
    /// Its parts, and those that have not ended.
    pub(crate) parts: u32,
    parts_left: AtomicU32,
    state: Mutex<ReadState>,
    sink: ReadSink,
    /// What it adds to what the disks are asked for.
    pub(crate) underway: Underway,
    /// Which production of each block is wanted, if the read is a part of another.
    expected: Option<Expected>,
}

struct ReadState {
    progress: ReadProgress,
    /// The next step to be announced.
    next_step: u32,
    ended: bool,
    /// Bytes of the caller's memory that devices may still write, of parts that ended without them.
    held_bytes: u64,
    /// Those parts.
    holding: u32,
}

/// What a read wants of those shards of a device that one executor has: indices of `wanted`, some.
pub(crate) struct ReadPart {
    pub(crate) job: Arc<ReadJob>,
    pub(crate) records: Vec<u32>,
    /// Until the segments are held.
    pub(crate) arrival: Arrival,
}

impl ReadPart {
    /// What the read is for.
    pub(crate) fn class(&self) -> Class {
        self.job.request.class
    }

    /// When the caller stops waiting.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        self.job.request.deadline
    }

    /// One of its shards: its executor has all of them.
    pub(crate) fn shard(&self) -> u32 {
        let first = self.records.first().and_then(|first| self.job.wanted.get(*first as usize));
        first.map_or(0, |wanted| wanted.shard)
    }

    /// Ends a part that no executor took.
    pub(crate) fn refuse(self, reason: &Reason) {
        for &index in &self.records {
            if let Some(wanted) = self.job.wanted.get(index as usize) {
                self.job.fail_run(wanted.run.clone(), reason);
            }
            self.job.end_slices_of(index);
        }
        self.job.part_done();
    }
}

/// Which production of each block is wanted: `first` is where the blocks of a read begin among those of the whole.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    pub(crate) origins: Arc<Origins>,
    pub(crate) first: u32,
}

/// Checks the request, looks its blocks up and makes the plan: a part for each lane that has some of them.
pub(crate) fn begin(
    shared: &Arc<Shared>,
    request: ReadRequest,
    expected: Option<Expected>,
    sink: ReadSink,
) -> Result<Vec<ReadPart>, Reason> {
    check(shared, &request)?;
    let subject = name(shared, (&request).into())?;
    request.into.places().check(&subject.shape, subject.layers.clone())?;
    let request = ReadRequest { class: subject.class, layers: Some(subject.layers), ..request };
    start(shared, request, subject.prints, expected, sink)
}

/// Looks the blocks of a request up that was checked, and makes the plan. Its layers are named.
pub(crate) fn start(
    shared: &Arc<Shared>,
    request: ReadRequest,
    prints: Vec<BlockFingerprint>,
    expected: Option<Expected>,
    sink: ReadSink,
) -> Result<Vec<ReadPart>, Reason> {
    let layers = request.layers.clone().unwrap_or_default();
    let mut failures = BTreeMap::new();
    shared.drop_expired(&prints, |place| request.keys.get(place).copied());
    let arrival = shared.arrivals.begin();
    let wanted = find(shared, &request.keys, &prints, &mut failures)?;
    let wanted_layers = layers.clone();
    let mut progress = ReadProgress::new(request.order, request.keys.len() as u32, layers.clone());
    failures.into_iter().for_each(|(block, reason)| progress.fail(block, reason));
    if wanted.is_empty() {
        sink.send(ReadEvent::End(progress.end(None)));
        return Ok(Vec::new());
    }
    let plan = make_plan(request.order, request.into.places(), layers, &wanted)?;
    let by_lane = by_lane(shared, &wanted);
    let parts = by_lane.len() as u32;
    shared.work.parts.add(u64::from(parts));
    let bytes_of =
        |run: &Wanted| run.class.shape.layers_bytes(&wanted_layers).saturating_mul(run.run.len() as u64);
    let bytes = wanted.iter().map(bytes_of).fold(0, u64::saturating_add);
    let underway = Underway::begin(shared, request.class, bytes, plan.steps());
    let slices = if request.order == Order::Layers { wanted.len() as u32 } else { 1 };
    let open_slices = (0..plan.steps()).map(|_| AtomicU32::new(slices)).collect();
    let job = Arc::new(ReadJob {
        shared: Arc::clone(shared),
        request,
        prints,
        plan,
        wanted,
        open_slices,
        parts,
        parts_left: AtomicU32::new(parts),
        state: Mutex::new(ReadState { progress, next_step: 0, ended: false, held_bytes: 0, holding: 0 }),
        sink,
        underway,
        expected,
    });
    let part = |records| ReadPart { job: Arc::clone(&job), records, arrival: arrival.clone() };
    Ok(by_lane.into_values().map(part).collect())
}

/// What a read of these blocks would read now, and from which records.
pub(crate) fn look_up(shared: &Shared, request: &ReadRequest) -> Result<(ReadPlan, Vec<Wanted>), Reason> {
    let Subject { layers, prints, .. } = name(shared, request.into())?;
    let wanted = find(shared, &request.keys, &prints, &mut BTreeMap::new())?;
    if wanted.is_empty() {
        return Err(Reason::Empty);
    }
    Ok((make_plan(request.order, request.into.places(), layers, &wanted)?, wanted))
}

pub(crate) fn make_plan(
    order: Order,
    places: &Arc<Placement>,
    layers: Range<u32>,
    wanted: &[Wanted],
) -> Result<ReadPlan, Reason> {
    let record = |wanted: &Wanted| {
        let block = u32::from(wanted.location.block);
        Ok(RecordRead {
            layout: wanted.class.layout_of(u32::from(wanted.record_blocks))?,
            payload_offset: wanted.offset + wanted.header_bytes,
            blocks: block..block + (wanted.run.end - wanted.run.start),
            ordinal: wanted.run.start,
        })
    };
    let records = wanted.iter().map(record).collect::<Result<Vec<_>, Reason>>()?;
    Ok(ReadPlan::new(records, layers, order, Arc::clone(places), ReadOptions::default())?)
}

impl ReadJob {
    fn lock(&self) -> MutexGuard<'_, ReadState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is no use in going on.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.sink.is_cancelled()
    }

    /// The fingerprint of a block that was asked for.
    pub(crate) fn print(&self, ordinal: u32) -> Option<BlockFingerprint> {
        self.prints.get(ordinal as usize).copied()
    }

    /// Whether a block's usefulness has ended.
    pub(crate) fn has_failed(&self, ordinal: u32) -> bool {
        self.lock().progress.has_failed(ordinal)
    }

    /// Ends a block's usefulness. The first reason stays.
    pub(crate) fn fail(&self, ordinal: u32, reason: &Reason) {
        self.lock().progress.fail(ordinal, reason.clone());
    }

    /// Ends the usefulness of a block that is not here any more.
    pub(crate) fn fail_as_gone(&self, ordinal: u32) {
        if let Some(key) = self.request.keys.get(ordinal as usize) {
            self.fail(ordinal, &Reason::NotHere(*key));
        }
    }

    /// Whether this is the production of the block that is wanted, or the first that is met.
    pub(crate) fn admits(
        &self,
        ordinal: u32,
        origin: Option<OriginId>,
        (created_ms, wanted): (u64, &Wanted),
    ) -> bool {
        let Some(Expected { origins, first }) = &self.expected else { return true };
        let life = self.shared.life(created_ms, wanted.expires);
        let at = (*first as usize).saturating_add(ordinal as usize);
        origin.is_some_and(|origin| origins.admit_living(at, origin, life))
    }

    /// Ends the usefulness of a block for what was found where it was looked up; false if it is not there any more,
    /// and what was found proves nothing.
    pub(crate) fn fail_there(&self, wanted: &Wanted, ordinal: u32, reason: &Reason) -> bool {
        let index = &self.shared.index;
        let there = self.print(ordinal).is_some_and(|print| match index.locate(print) {
            Some(found) => found.location == wanted.place_of(ordinal) && wanted.is(&found.record),
            // Another read may have found the same.
            None => index.lookup(print) == Lookup::Quarantined,
        });
        match there {
            true => self.fail(ordinal, reason),
            false => self.fail_as_gone(ordinal),
        }
        there
    }

    /// Ends the usefulness of a run of blocks.
    pub(crate) fn fail_run(&self, run: Range<u32>, reason: &Reason) {
        let mut state = self.lock();
        for ordinal in run {
            state.progress.fail(ordinal, reason.clone());
        }
    }

    /// Nothing is read of a run: what it has of each step is in, so that steps are announced for the blocks of others.
    pub(crate) fn end_slices_of(&self, index: u32) {
        self.plan.steps_of(index).for_each(|step| self.slice_done(step));
    }

    /// Takes a damaged block out of service, unless it has moved since it was looked up.
    pub(crate) fn quarantine(&self, wanted: &Wanted, ordinal: u32) {
        let Some(print) = self.prints.get(ordinal as usize) else { return };
        let at = wanted.place_of(ordinal);
        let Some(key) = self.request.keys.get(ordinal as usize) else { return };
        let records = self.shared.index.records();
        // Held, its number means this record until the block is out of service.
        let Some(record) = records.hold(at.record) else { return };
        if wanted.is(&record)
            && self.shared.quarantine(*print, at, BlockOf { class: &wanted.class, key: *key })
        {
            self.shared.counters.blocks_quarantined.fetch_add(1, Relaxed);
        }
        self.shared.index.release_record(at.record);
    }

    /// Whether every slice of the first step is in.
    pub(crate) fn first_step_is_in(&self) -> bool {
        self.open_slices.first().is_none_or(|open| open.load(Ordering::Acquire) == 0)
    }

    /// One part has a slice of a step in. Announces every step that is whole, in order.
    pub(crate) fn slice_done(&self, step: u32) {
        let Some(open) = self.open_slices.get(step as usize) else {
            return broken_invariant("a slice belongs to a step that is not in the plan of the read");
        };
        if open.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let mut state = self.lock();
        while let Some(open) = self.open_slices.get(state.next_step as usize) {
            if open.load(Ordering::Acquire) != 0 || state.ended {
                break;
            }
            let step = state.next_step;
            state.next_step += 1;
            if planted(Race::AnnounceInTwoSteps) {
                drop(state);
                state = self.lock();
            }
            self.underway.step_done();
            self.announce(&mut state.progress, step);
        }
    }

    fn announce(&self, progress: &mut ReadProgress, step: u32) {
        if let Some((ordinal, reason)) = progress.first_failure() {
            self.sink.note_failure(ordinal, &reason);
        }
        match self.plan.layer_of(step) {
            Some(layer) => {
                progress.layer_done();
                self.sink.send(ReadEvent::Layer { layer, blocks: progress.good() });
            }
            None => {
                if let Some(ordinal) = self.ordinal_of(step)
                    && !progress.has_failed(ordinal)
                    && progress.block_done(ordinal)
                {
                    self.sink.send(ReadEvent::Block(ordinal));
                }
            }
        }
    }

    /// The block of the request that a step of a read in block order delivers.
    pub(crate) fn ordinal_of(&self, step: u32) -> Option<u32> {
        let (record, block) = self.plan.block_of(step)?;
        let wanted = self.wanted.get(record as usize)?;
        Some(wanted.run.start + (block - u32::from(wanted.location.block)))
    }

    /// One part has ended. The last one gives the end; blocks not delivered by then are late.
    pub(crate) fn part_done(&self) {
        if self.parts_left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let mut state = self.lock();
        state.ended = true;
        let whole = state.next_step == self.plan.steps();
        let early = (!whole).then(|| self.why_early(&mut state.progress));
        let end = state.progress.end(early.as_ref());
        let held_bytes = if state.holding > 0 { state.held_bytes } else { 0 };
        self.underway.end(whole && end.failures.is_empty());
        if whole {
            self.shared.counters.blocks_read.fetch_add(self.first_delivered(&end.failures), Relaxed);
        }
        // Where a release comes it comes after the end, which is then sent under the lock. Otherwise it is not: a caller that
        // is told does its own work on this thread.
        let _until_sent = (state.holding > 0).then_some(state);
        self.sink.send(ReadEvent::End(ReadEnd { held_bytes, ..end }));
    }

    /// Blocks that nothing was delivered of before: a block whose layers come by several reads is one block.
    fn first_delivered(&self, failures: &[(u32, Reason)]) -> u64 {
        let blocks = self.request.keys.len();
        let Some(Expected { origins, first }) = &self.expected else {
            return blocks.saturating_sub(failures.len()) as u64;
        };
        let failed =
            |block: &usize| failures.binary_search_by_key(block, |(block, _)| *block as usize).is_ok();
        origins.delivered((0..blocks).filter(|block| !failed(block)).map(|block| *first as usize + block))
    }

    /// Why a read ended early: for its deadline or because its caller is gone; anything else is a defect, and must not
    /// look like a short answer.
    fn why_early(&self, progress: &mut ReadProgress) -> Reason {
        if self.request.deadline.is_some() || self.is_cancelled() {
            return Reason::DeadlinePassed;
        }
        let defect = Reason::Bug("a read ended before all of its bytes had arrived");
        if self.request.order == Order::Layers {
            progress.fail(0, defect.clone());
        }
        defect
    }

    /// The chunks that a step delivers of a run; `None` if they cannot be told, which must not look like none.
    pub(crate) fn chunks_of(&self, step: u32, wanted: &Wanted) -> Option<Vec<WantedChunk>> {
        let layout = wanted.class.layout_of(u32::from(wanted.record_blocks)).ok()?;
        let first = u32::from(wanted.location.block);
        let (blocks, layers) = match self.plan.layer_of(step) {
            Some(layer) => (first..first + (wanted.run.end - wanted.run.start), layer..layer + 1),
            None => {
                let (_, block) = self.plan.block_of(step)?;
                (block..block + 1, self.request.layers.clone().unwrap_or(0..layout.layer_count()))
            }
        };
        let mut chunks = Vec::new();
        for layer in layers {
            let (first_part, places) = layout.layer_parts(layer)?;
            for (part, place) in (first_part..).zip(places) {
                let chunk = |block| WantedChunk { block, part, bytes: place.bytes };
                chunks.extend(blocks.clone().map(chunk));
            }
        }
        Some(chunks)
    }
}

/// Watches the caller's memory: each device read into it holds one. When the last is gone after the end of a
/// read whose deadline passed, the caller is told.
pub(crate) struct MemoryGuard {
    /// Keeps the memory alive as well.
    job: Arc<ReadJob>,
    armed: AtomicBool,
}

impl MemoryGuard {
    pub(crate) fn new(job: &Arc<ReadJob>) -> Arc<Self> {
        Arc::new(Self { job: Arc::clone(job), armed: AtomicBool::new(false) })
    }

    /// The part ends while devices may still write `bytes` bytes.
    pub(crate) fn arm(&self, bytes: u64) {
        let mut state = self.job.lock();
        state.held_bytes += bytes;
        state.holding += 1;
        self.armed.store(true, Relaxed);
    }
}

impl Drop for MemoryGuard {
    fn drop(&mut self) {
        if !*self.armed.get_mut() {
            return;
        }
        let mut state = self.job.lock();
        state.holding -= 1;
        if state.holding == 0 && state.ended {
            self.job.sink.send(ReadEvent::Released);
        }
    }
}
