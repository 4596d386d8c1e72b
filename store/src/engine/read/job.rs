//! Reading blocks: what is shared between the caller's thread and the executors that work for one read.
//!
//! The caller's thread finds the blocks in the index, groups them into runs of records and makes one plan over
//! all of them; each executor works on the slices of its own shards' records (see `shard_read`). A step (a layer, or
//! in block order a block) is announced when the slices of all executors are in, and steps are announced in
//! order: so a layerwise read of a prefix that lies in several shards merges them.
//!
//! A block that fails keeps the others going: its verdict is set, and everything announced from then on says how
//! many leading blocks are still good.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};

use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::plan::{Placement, ReadOptions, ReadPlan, RecordRead};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Group, NamespaceId, OriginId};

use crate::api::{
    MAX_REQUEST_BLOCKS, Order, Origins, ReadEnd, ReadEvent, ReadProgress, ReadRequest, ReadSink,
    SMALL_READ_BYTES,
};
use crate::engine::shared::Shared;
use crate::engine::shared::grace::Arrival;
use crate::engine::shared::record_class::RecordClass;
use crate::engine::volume::segment::record_range;
use crate::error::Reason;
use crate::index::{BlockFingerprint, Location, Lookup, RecordInfo};
use crate::rt::{Class, Nanos};
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use crate::sync::{Mutex, MutexGuard, Race, planted};

/// A run of blocks of one record that a read wants.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) shard: u32,
    pub(crate) segment: u32,
    /// Where the record begins in its segment.
    pub(crate) offset: u64,
    pub(crate) header_bytes: u64,
    /// Blocks that the record was written with.
    pub(crate) record_blocks: u16,
    /// The first block of the run.
    pub(crate) location: Location,
    /// Which ordinals of the request.
    pub(crate) run: Range<u32>,
    pub(crate) class: Arc<RecordClass>,
}

impl Wanted {
    /// Which block of its record a block of the run is.
    pub(crate) fn block_of(&self, ordinal: u32) -> u32 {
        u32::from(self.location.block) + (ordinal - self.run.start)
    }

    /// Whether a record of the index is the one that was looked up. Numbers of records come again.
    fn is(&self, record: &RecordInfo) -> bool {
        let page = u64::from(record.page) * PAGE_BYTES;
        (u32::from(record.shard), record.segment, page) == (self.shard, self.segment, self.offset)
    }

    /// Where a block of the run was when it was looked up.
    pub(crate) fn place_of(&self, ordinal: u32) -> Location {
        Location { record: self.location.record, block: self.block_of(ordinal) as u16 }
    }
}

/// A chunk that a step delivers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WantedChunk {
    /// Block within the record.
    pub(crate) block: u32,
    /// Canonical index of the part.
    pub(crate) part: u32,
    pub(crate) bytes: u64,
}

/// What the executors of one read share.
pub(crate) struct ReadJob {
    pub(crate) shared: Arc<Shared>,
    pub(crate) request: ReadRequest,
    pub(crate) prints: Vec<BlockFingerprint>,
    pub(crate) plan: ReadPlan,
    pub(crate) wanted: Vec<Wanted>,
    /// For each step, how many slices have not ended.
    open_slices: Vec<AtomicU32>,
    /// Parts that have not ended.
    parts_left: AtomicU32,
    state: Mutex<ReadState>,
    sink: ReadSink,
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

/// One shard's share of a read: indices of `wanted`.
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

    /// Ends a part that no executor took.
    pub(crate) fn refuse(self, reason: &Reason) {
        for &index in &self.records {
            if let Some(wanted) = self.job.wanted.get(index as usize) {
                self.job.fail_run(wanted.run.clone(), reason);
            }
        }
        self.job.part_done();
    }
}

/// What is found out of a read once, whatever part of it is read then.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    pub(crate) shape: Arc<BlockShape>,
    /// The wanted layers.
    pub(crate) layers: Range<u32>,
    /// The fingerprint of each block.
    pub(crate) prints: Vec<BlockFingerprint>,
    /// What the read is for: a small one of the foreground is a class of its own.
    pub(crate) class: Class,
}

/// Which blocks are asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish<'a> {
    pub(crate) namespace: NamespaceId,
    pub(crate) group: Group,
    pub(crate) coordinate: Coordinate,
    pub(crate) keys: &'a [BlockKey],
    pub(crate) layers: Option<&'a Range<u32>>,
    pub(crate) class: Class,
}

impl<'a> From<&'a ReadRequest> for Wish<'a> {
    fn from(request: &'a ReadRequest) -> Self {
        let ReadRequest { namespace, group, coordinate, class, .. } = *request;
        Self { namespace, group, coordinate, keys: &request.keys, layers: request.layers.as_ref(), class }
    }
}

/// Checks which blocks are asked for and names them as the index does. It counts as a use of them.
pub(crate) fn name(shared: &Shared, wish: Wish<'_>) -> Result<Subject, Reason> {
    let namespace = shared.names.get(wish.namespace).ok_or(Reason::UnknownNamespace(wish.namespace))?;
    let shape = namespace.shape(wish.group, wish.coordinate)?;
    let count = shape.layers().len();
    wanted_layers(wish.layers, count)?;
    let layers = wish.layers.cloned().unwrap_or(0..count as u32);
    let key = shared.index.key();
    let print = |name: &BlockKey| key.of(namespace.local, name, wish.group, wish.coordinate);
    let prints: Vec<_> = wish.keys.iter().map(print).collect();
    count_use(shared, wish.class, &prints);
    let bytes = shape.layers_bytes(&layers).saturating_mul(wish.keys.len() as u64);
    Ok(Subject { class: class_of(wish.class, bytes), shape, layers, prints })
}

/// Which production of each block is wanted: `first` is where the blocks of a read begin among those of the whole.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    pub(crate) origins: Arc<Origins>,
    pub(crate) first: u32,
}

/// Checks the request, looks its blocks up and makes the plan: a part for each shard that has some of them.
pub(crate) fn begin(
    shared: &Arc<Shared>,
    request: ReadRequest,
    expected: Option<Expected>,
    sink: ReadSink,
) -> Result<Vec<(u32, ReadPart)>, Reason> {
    check(shared, &request)?;
    let subject = name(shared, (&request).into())?;
    let places = request.into.places().check(&subject.shape, subject.layers.clone());
    places.map_err(|error| Reason::Shape(error.to_string()))?;
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
) -> Result<Vec<(u32, ReadPart)>, Reason> {
    let layers = request.layers.clone().unwrap_or_default();
    let mut failures = BTreeMap::new();
    shared.drop_expired(&prints, |place| request.keys.get(place).copied());
    let arrival = shared.arrivals.begin();
    let wanted = find(shared, &request.keys, &prints, &mut failures)?;
    let mut progress = ReadProgress::new(request.order, request.keys.len() as u32, layers.clone());
    failures.into_iter().for_each(|(block, reason)| progress.fail(block, reason));
    if wanted.is_empty() {
        sink.send(ReadEvent::End(progress.end(None)));
        return Ok(Vec::new());
    }
    let plan = make_plan(request.order, request.into.places(), layers, &wanted)?;
    let by_shard = by_shard(&wanted);
    let slices = if request.order == Order::Layers { wanted.len() as u32 } else { 1 };
    let open_slices = (0..plan.steps()).map(|_| AtomicU32::new(slices)).collect();
    let job = Arc::new(ReadJob {
        shared: Arc::clone(shared),
        request,
        prints,
        plan,
        wanted,
        open_slices,
        parts_left: AtomicU32::new(by_shard.len() as u32),
        state: Mutex::new(ReadState { progress, next_step: 0, ended: false, held_bytes: 0, holding: 0 }),
        sink,
        expected,
    });
    let part =
        |(shard, records)| (shard, ReadPart { job: Arc::clone(&job), records, arrival: arrival.clone() });
    Ok(by_shard.into_iter().map(part).collect())
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

fn check(shared: &Shared, request: &ReadRequest) -> Result<(), Reason> {
    check_count(&request.keys)?;
    let (expected, found) = (request.keys.len() as u64, u64::from(request.into.block_count()));
    if expected != found {
        return Err(Reason::Length { expected, found });
    }
    if request.into.gate().is_some() {
        // All layers are read at once.
        return Err(Reason::Overlap);
    }
    check_keys(shared, &request.keys, request.deadline)
}

/// Refuses what can be refused of any read by its keys and its deadline.
pub(crate) fn check_keys(shared: &Shared, keys: &[BlockKey], deadline: Option<Nanos>) -> Result<(), Reason> {
    check_count(keys)?;
    check_in_time(shared, deadline)?;
    check_unequal(keys)
}

/// Refuses a request for no blocks or for too many.
pub(crate) fn check_count(keys: &[BlockKey]) -> Result<(), Reason> {
    match keys.len() {
        0 => Err(Reason::Empty),
        1..=MAX_REQUEST_BLOCKS => Ok(()),
        _ => Err(Reason::TooMany("blocks")),
    }
}

/// Refuses a request whose deadline has passed.
pub(crate) fn check_in_time(shared: &Shared, deadline: Option<Nanos>) -> Result<(), Reason> {
    match deadline.is_some_and(|deadline| deadline <= shared.clock.now()) {
        true => Err(Reason::DeadlineInPast),
        false => Ok(()),
    }
}

/// Refuses a request that has a key twice.
pub(crate) fn check_unequal(keys: &[BlockKey]) -> Result<(), Reason> {
    let mut sorted: Vec<&BlockKey> = keys.iter().collect();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair.first() == pair.last()) {
        Some(pair) => Err(pair.first().map_or(Reason::Empty, |key| Reason::Duplicate(**key))),
        None => Ok(()),
    }
}

/// What a read of so many bytes is for: small ones of the foreground are a class of their own, and no other is.
fn class_of(class: Class, bytes: u64) -> Class {
    match class {
        Class::Small | Class::Foreground if bytes <= SMALL_READ_BYTES => Class::Small,
        Class::Small => Class::Foreground,
        other => other,
    }
}

pub(crate) fn wanted_layers(wanted: Option<&Range<u32>>, layers: usize) -> Result<Range<u32>, Reason> {
    let layers = u32::try_from(layers).unwrap_or(u32::MAX);
    match wanted {
        None => Ok(0..layers),
        Some(range) if range.is_empty() => Err(Reason::Empty),
        Some(range) if range.end > layers => {
            Err(Reason::Shape(format!("layers up to {}, the group has {layers}", range.end)))
        }
        Some(range) => Ok(range.clone()),
    }
}

/// Looks every block up and joins those that follow each other in one record.
pub(crate) fn find(
    shared: &Shared,
    keys: &[BlockKey],
    prints: &[BlockFingerprint],
    failures: &mut BTreeMap<u32, Reason>,
) -> Result<Vec<Wanted>, Reason> {
    let mut wanted: Vec<Wanted> = Vec::new();
    for ((ordinal, key), print) in (0u32..).zip(keys).zip(prints) {
        let found = shared.index.locate(*print);
        let Some(found) = found.filter(|found| !shared.is_dead(u32::from(found.record.shard))) else {
            failures.insert(ordinal, Reason::NotHere(*key));
            continue;
        };
        if let Some(last) = wanted.last_mut() {
            let next = u32::from(last.location.block) + last.run.end - last.run.start;
            if last.location.record == found.location.record
                && u32::from(found.location.block) == next
                && last.run.end == ordinal
            {
                last.run.end = ordinal + 1;
                continue;
            }
        }
        let (offset, _) = record_range(&found.record);
        let class = shared.classes.get(found.record.class).ok_or(Reason::Bug("an unknown record class"))?;
        wanted.push(Wanted {
            shard: u32::from(found.record.shard),
            segment: found.record.segment,
            offset,
            header_bytes: u64::from(found.record.header_pages) * PAGE_BYTES,
            record_blocks: found.record.blocks.get(),
            location: found.location,
            run: ordinal..ordinal + 1,
            class,
        });
    }
    Ok(wanted)
}

/// Counts a use of these blocks. Who only looks whether blocks are well does not use them.
pub(crate) fn count_use(shared: &Shared, class: Class, prints: &[BlockFingerprint]) {
    if class != Class::Background {
        shared.index.touch_with(
            prints,
            shared.policy().renews().then(|| shared.epoch()),
            Some(shared.second()),
        );
    }
}

/// Which of the runs lie in each shard.
pub(crate) fn by_shard(wanted: &[Wanted]) -> BTreeMap<u32, Vec<u32>> {
    let mut by_shard = BTreeMap::<u32, Vec<u32>>::new();
    for (index, wanted) in (0u32..).zip(wanted) {
        by_shard.entry(wanted.shard).or_default().push(index);
    }
    by_shard
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
    ReadPlan::new(records, layers, order, Arc::clone(places), ReadOptions::default())
        .map_err(|error| Reason::Shape(error.to_string()))
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
    pub(crate) fn admits(&self, ordinal: u32, origin: Option<OriginId>) -> bool {
        let Some(Expected { origins, first }) = &self.expected else { return true };
        origin.is_some_and(|origin| origins.admit((*first as usize).saturating_add(ordinal as usize), origin))
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

    /// Takes a damaged block out of service, unless it has moved since it was looked up.
    pub(crate) fn quarantine(&self, wanted: &Wanted, ordinal: u32) {
        let Some(print) = self.prints.get(ordinal as usize) else { return };
        let at = wanted.place_of(ordinal);
        let Some(key) = self.request.keys.get(ordinal as usize) else { return };
        let records = self.shared.index.records();
        // Held, its number means this record until the block is out of service.
        let Some(record) = records.hold(at.record) else { return };
        if wanted.is(&record) && self.shared.quarantine(*print, at, (&wanted.class, *key)) {
            self.shared.counters.blocks_quarantined.fetch_add(1, Relaxed);
        }
        records.release(at.record);
    }

    /// Whether every slice of the first step is in.
    pub(crate) fn first_step_is_in(&self) -> bool {
        self.open_slices.first().is_none_or(|open| open.load(Ordering::Acquire) == 0)
    }

    /// One part has a slice of a step in. Announces every step that is whole, in order.
    pub(crate) fn slice_done(&self, step: u32) {
        let Some(open) = self.open_slices.get(step as usize) else { return };
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

    /// One part has ended. The last one gives the end; what was not delivered by then was not
    /// delivered in time.
    pub(crate) fn part_done(&self) {
        if self.parts_left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let mut state = self.lock();
        state.ended = true;
        let whole = state.next_step == self.plan.steps();
        let early = (!whole).then(|| self.why_early(&mut state.progress));
        let end = state.progress.end(early.as_ref());
        // Sent under the lock: a release that comes now must come after it.
        let held_bytes = if state.holding > 0 { state.held_bytes } else { 0 };
        if whole {
            self.shared.counters.blocks_read.fetch_add(self.first_delivered(&end.failures), Relaxed);
        }
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
        let defect = Reason::Bug("a read that ended before it was whole");
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
