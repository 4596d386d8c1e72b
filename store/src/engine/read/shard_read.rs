//! One executor's part of a read: submitting extents, verifying what arrives, copying what was staged.
//!
//! Extents go out in the order in which their steps are announced, as far ahead as a window of bytes allows. A
//! record's header travels with its first extents; nothing of a record is delivered before its header has proved
//! that this is the record that the index meant, under the keys that were asked for.
//!
//! While a part runs, its segments are held: they are not written anew under a device read.
//!
//! Of an encoded record only the header says where chunks lie. The headers of such records go out first, and their
//! slices are planned when they are in (`encoded`); their chunks are decoded one by one into scratch memory, verified
//! there and copied out, and other tasks have their turn in between.

mod encoded;

use std::collections::VecDeque;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::format::body::ENCODING_RAW;
use kvarts_layout::plan::{Address, Extent, Landing, Pieces, Step};

use super::header_cache::Header;
use super::job::{MemoryGuard, ReadJob, ReadPart, Wanted};
use super::prove;
use super::single_flight::{Flight, Role};
use crate::api::{Order, Verify};
use crate::engine::read::Reads;
use crate::engine::tasks::notify::{Section, before};
use crate::engine::volume::segment::{Hold, Segment};
use crate::error::Reason;
use crate::index::Lookup;
use crate::io::{BufMut, ExtentDone, IoError, ReadBatch, SharedBuf};
use crate::rt::LocalTask;
use encoded::StoredPieces;

/// Bytes of later steps' extents that a part has under way until the first step is in: the first layer should not
/// queue behind the tenth, nor behind those of shards that have less of it to read.
const AHEAD_BYTES: u64 = 512 << 10;

/// Decoding costs so many times as much as copying.
const DECODE_COST: u64 = 16;

/// A chunk has no place in the memory that it is to be read into: what checks requests would have refused it.
const OUTSIDE: Reason = Reason::Bug("a chunk outside the memory of its read");

/// Marks the extent of a record's header.
const HEADER: u64 = 1 << 63;

/// A record of the part.
struct Record {
    /// Index in the job's list, and in the plan.
    index: u32,
    segment: Rc<Segment>,
    header: HeaderState,
    /// Regions that arrived before the header: (slice, region).
    early: Vec<(usize, u32)>,
    /// Who else may want what is read of it.
    flight: Option<Rc<Flight>>,
    /// A block of it is elsewhere by now: what is read is verified whatever the read asks for.
    doubted: bool,
}

enum HeaderState {
    Unread,
    Reading(SharedBuf),
    Good(Rc<Header>),
    /// The run has failed; its bytes are thrown away.
    Bad,
}

/// A slice under way.
struct Slice {
    step: u32,
    record: usize,
    /// What it reads.
    plan: Step,
    /// Of an encoded record: the stored chunks in what is read.
    stored: Option<StoredPieces>,
    /// For each region: its staging (none if it lands directly) and the extents that have not ended.
    regions: Vec<(Option<SharedBuf>, u32)>,
    regions_left: u32,
    /// Why the regions that failed did.
    failed: Option<Reason>,
}

struct Run<'a> {
    log: &'a Rc<Reads>,
    job: &'a Arc<ReadJob>,
    records: Vec<Record>,
    batch: ReadBatch,
    /// Slices under way; a slot is reused when its slice is done.
    slices: Vec<Option<Slice>>,
    free: Vec<usize>,
    /// Step buffers that are not in use.
    spare: Vec<Step>,
    /// Extents that were pushed and whose ends have not been taken in.
    under_way: usize,
    /// Bytes of extents under way.
    in_flight: u64,
    /// What is to be submitted next: step, and index into `records`.
    next: (u32, usize),
    /// Extents of the last planned slice that have not been submitted: (name, extent, segment's record).
    queue: VecDeque<(u64, u64, u64, SharedBuf)>,
    queue_record: usize,
    queue_step: u32,
    /// The slices to read, if not all of all records.
    agenda: Option<Agenda>,
    /// Held by every device read into the caller's memory.
    guard: Arc<MemoryGuard>,
    /// State of the sampling of digests.
    sample: u64,
    /// Encoded records whose headers have not been asked for, last first.
    unsized_records: Vec<usize>,
    /// The deadline has passed while this waited for memory.
    is_late: bool,
    section: Section,
    /// What verifying, copying and decoding has cost since that was counted.
    delivered: u64,
}

/// Does one shard's part of a read.
///
/// `deadline` completes when the caller stops waiting: whoever follows another read must not wait as long as that
/// one does.
pub(crate) async fn run(log: &Rc<Reads>, part: ReadPart, window: u64, deadline: Option<LocalTask>) {
    let ReadPart { job, records, arrival } = part;
    let mut section = Section::default();
    let (records, holds) = open_records(log, &job, &records, &mut section).await;
    drop(arrival);
    let (mut own, mut led, mut followed) = (Vec::new(), Vec::new(), Vec::new());
    for record in records {
        section.spend(1).await;
        let Some(wanted) = job.wanted.get(record.index as usize) else { continue };
        let generation = record.segment.generation.get();
        if record.doubted {
            own.push(record);
            continue;
        }
        match log.flights.join(&job, record.index, wanted, generation) {
            Some(Role::Follow(flight)) => followed.push((record, flight)),
            Some(Role::Lead(flight)) => {
                led.push((Rc::clone(&flight), generation));
                own.push(Record { flight: Some(flight), ..record });
            }
            None => own.push(record),
        }
    }
    let mut run = Run::new(log, &job, own);
    let lead = async {
        let ending = run.all(window).await;
        // At once: who follows must not wait for what this read follows itself.
        for (flight, generation) in led {
            log.flights.end(&flight, generation);
            section.spend(1).await;
        }
        ending
    };
    let follow = async { before(pin!(follow_all(&job, followed)), deadline).await.flatten() };
    let (stopped, missed) = both(lead, follow).await;
    run.end();
    if let (Ending::Done, Some((records, agenda))) = (stopped, missed) {
        let mut run = Run::new(log, &job, records);
        run.agenda = Some(agenda);
        run.all(window).await;
        run.end();
    }
    drop(holds);
    job.part_done();
}

/// Why a run ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    Done,
    /// The caller is gone, or the deadline has passed.
    Stopped,
}

/// What a run waited for.
enum Next {
    Extent(ExtentDone),
    Late,
}

/// Slices that a follower has to read itself: (step, index of the record).
type Agenda = VecDeque<(u32, usize)>;

/// Follows all flights at once; gives the records and slices that are left to read.
async fn follow_all(
    job: &Arc<ReadJob>,
    followed: Vec<(Record, Rc<Flight>)>,
) -> Option<(Vec<Record>, Agenda)> {
    let (mut records, mut agenda, mut section) = (Vec::new(), Vec::new(), Section::default());
    for (record, flight) in followed {
        let missed = flight.follow(job, record.index, &mut section).await;
        if !missed.is_empty() {
            agenda.extend(missed.into_iter().map(|step| (step, records.len())));
            records.push(record);
        }
    }
    agenda.sort_unstable();
    (!agenda.is_empty()).then(|| (records, agenda.into()))
}

/// Runs two futures on one task.
async fn both<A, B>(a: impl Future<Output = A>, b: impl Future<Output = B>) -> (A, B) {
    let (mut a, mut b) = (std::pin::pin!(a), std::pin::pin!(b));
    let (mut a_done, mut b_done) = (None, None);
    std::future::poll_fn(|context| {
        if a_done.is_none()
            && let Poll::Ready(value) = a.as_mut().poll(context)
        {
            a_done = Some(value);
        }
        if b_done.is_none()
            && let Poll::Ready(value) = b.as_mut().poll(context)
        {
            b_done = Some(value);
        }
        match (a_done.take(), b_done.take()) {
            (Some(a), Some(b)) => Poll::Ready((a, b)),
            (a, b) => {
                (a_done, b_done) = (a, b);
                Poll::Pending
            }
        }
    })
    .await
}

async fn open_records(
    log: &Rc<Reads>,
    job: &ReadJob,
    indices: &[u32],
    section: &mut Section,
) -> (Vec<Record>, Vec<Hold>) {
    let mut records = Vec::with_capacity(indices.len());
    let mut holds = Vec::with_capacity(indices.len());
    for &index in indices {
        let Some(wanted) = job.wanted.get(index as usize) else { continue };
        job.shared.work.reads.add(1);
        section.spend(1).await;
        let found = log.segments.borrow().get(&wanted.segment).map(Rc::clone);
        let Some(segment) = found else {
            // Evicted since, and the file with it.
            wanted.run.clone().for_each(|ordinal| job.fail_as_gone(ordinal));
            continue;
        };
        holds.push(Hold::new(&segment));
        if !segment.has_written(wanted.offset) {
            // The segment is being written anew: what is there now proves nothing about what was.
            wanted.run.clone().for_each(|ordinal| job.fail_as_gone(ordinal));
            continue;
        }
        let doubted = segment.is_holed() && fail_evicted(job, wanted);
        let header = HeaderState::Unread;
        records.push(Record { index, segment, header, early: Vec::new(), flight: None, doubted });
    }
    (records, holds)
}

/// Ends the usefulness of blocks that have left since they were looked up: where they were may be a hole by now. What
/// is still here stays so while the segment is held. True if one is elsewhere: where it was moved, its bytes are still
/// here as well; where it left and was put anew, they need not be.
fn fail_evicted(job: &ReadJob, wanted: &Wanted) -> bool {
    let mut elsewhere = false;
    for ordinal in wanted.run.clone() {
        match job.print(ordinal).map(|print| job.shared.index.lookup(print)) {
            Some(Lookup::Live(at)) => elsewhere |= at != wanted.place_of(ordinal),
            _ => job.fail_as_gone(ordinal),
        }
    }
    elsewhere
}

impl<'a> Run<'a> {
    fn new(log: &'a Rc<Reads>, job: &'a Arc<ReadJob>, records: Vec<Record>) -> Self {
        let mut seed = [0; 8];
        if matches!(job.request.verify, Verify::Sample(_)) {
            job.shared.entropy.fill(&mut seed);
        }
        let encoded = |record: &Record| {
            job.wanted.get(record.index as usize).is_some_and(|wanted| wanted.class.encoding != ENCODING_RAW)
        };
        let unsized_records =
            (0..records.len()).rev().filter(|&at| records.get(at).is_some_and(encoded)).collect();
        Self {
            log,
            job,
            records,
            batch: log.driver.batch(job.request.class),
            slices: Vec::new(),
            free: Vec::new(),
            spare: Vec::new(),
            under_way: 0,
            in_flight: 0,
            next: (0, 0),
            queue: VecDeque::new(),
            queue_record: 0,
            queue_step: 0,
            agenda: None,
            guard: MemoryGuard::new(job),
            sample: u64::from_le_bytes(seed),
            unsized_records,
            is_late: false,
            section: Section::default(),
            delivered: 0,
        }
    }

    /// Lets go. What a device has not given back by now is told to the caller.
    fn end(self) {
        if self.under_way > 0 {
            self.guard.arm(self.in_flight);
        }
    }

    /// Submits and takes in until every slice is done, the caller is gone or the deadline has passed.
    async fn all(&mut self, window: u64) -> Ending {
        loop {
            if self.job.is_cancelled() {
                self.drain().await;
                return Ending::Stopped;
            }
            self.submit(window).await;
            if self.is_late {
                return Ending::Stopped;
            }
            if self.under_way == 0 {
                return Ending::Done;
            }
            match self.next().await {
                Some(Next::Extent(done)) => {
                    self.under_way -= 1;
                    self.job.shared.work.reads.add(1);
                    self.take_in(done);
                    let units = 1 + std::mem::take(&mut self.delivered);
                    self.section.spend(units).await;
                }
                Some(Next::Late) => return Ending::Stopped,
                None => return Ending::Done,
            }
        }
    }

    /// The next thing to happen: an extent ends, or the deadline passes.
    async fn next(&mut self) -> Option<Next> {
        match self.job.request.deadline {
            None => self.batch.next().await.map(Next::Extent),
            Some(at) => match self.batch.next_by(at).await {
                Ok(done) => done.map(Next::Extent),
                Err(_) => Some(Next::Late),
            },
        }
    }

    /// Waits for what is under way, so that the caller's memory is its own again.
    async fn drain(&mut self) {
        while self.batch.next().await.is_some() {}
        (self.under_way, self.in_flight) = (0, 0);
    }

    /// Submits extents while the window has room.
    async fn submit(&mut self, window: u64) {
        loop {
            let step = if self.queue.is_empty() { self.next.0 } else { self.queue_step };
            if self.in_flight >= self.room(step, window) {
                break;
            }
            if self.queue.is_empty() && !self.plan_next().await {
                break;
            }
            let Some((name, offset, len, buf)) = self.queue.pop_front() else { continue };
            let Some(record) = self.records.get(self.queue_record) else { break };
            self.batch.push(name, record.segment.file, offset, buf);
            self.under_way += 1;
            self.in_flight += len;
        }
        self.batch.submit();
    }

    /// How much may be under way for an extent of this step to go.
    fn room(&self, step: u32, window: u64) -> u64 {
        if step == 0 || self.job.first_step_is_in() { window } else { window.min(AHEAD_BYTES) }
    }

    /// Plans the next slice of this part into the queue; false if there is none left, or if there is no staging memory
    /// while something is under way that will return some.
    async fn plan_next(&mut self) -> bool {
        if let Some(&at) = self.unsized_records.last() {
            // What it cannot have memory for now it asks for again when something has returned.
            return self.size_up(at).await;
        }
        loop {
            self.job.shared.work.reads.add(1);
            self.section.spend(1).await;
            let Some((step, at)) = self.next_slice() else { return false };
            let Some(record) = self.records.get(at) else { return false };
            let slice = match self.job.request.order {
                Order::Layers => record.index,
                Order::Blocks => 0,
            };
            let header = match &record.header {
                HeaderState::Bad => {
                    self.job.slice_done(step);
                    self.advance();
                    continue;
                }
                HeaderState::Good(header) => Some(Rc::clone(header)),
                HeaderState::Unread | HeaderState::Reading(_) => None,
            };
            let encoded = self.is_encoded(at);
            let planned = match header {
                // It is on its way.
                None if encoded => return false,
                Some(header) if encoded => self.enqueue_encoded(step, at, &header).await,
                _ => {
                    let mut plan = self.spare.pop().unwrap_or_default();
                    self.job.plan.plan_slice(step, slice, &mut plan);
                    self.enqueue(step, at, plan, None).await
                }
            };
            if planned {
                self.advance();
            }
            return planned;
        }
    }

    /// The next slice of this part: its step, and the index of its record. In layer order each step has a slice of
    /// every record, in block order each record has steps of its own.
    fn next_slice(&mut self) -> Option<(u32, usize)> {
        if let Some(agenda) = &self.agenda {
            self.next = *agenda.front()?;
            return Some(self.next);
        }
        let (step, at) = self.next;
        self.next = match self.job.request.order {
            Order::Layers if at < self.records.len() => (step, at),
            Order::Layers => (step + 1, 0),
            Order::Blocks => {
                let of = |at: usize| Some(self.job.plan.steps_of(self.records.get(at)?.index));
                let steps = of(at)?;
                if step < steps.end { (step.max(steps.start), at) } else { (of(at + 1)?.start, at + 1) }
            }
        };
        (self.next.0 < self.job.plan.steps()).then_some(self.next)
    }

    fn advance(&mut self) {
        if let Some(agenda) = &mut self.agenda {
            agenda.pop_front();
            return;
        }
        let (step, at) = self.next;
        self.next = if self.job.request.order == Order::Blocks { (step + 1, at) } else { (step, at + 1) };
    }

    /// Finds memory for a slice and queues its extents, the header's first. All memory is taken in one piece, so
    /// that two reads never hold half of what each needs.
    async fn enqueue(&mut self, step: u32, at: usize, plan: Step, stored: Option<StoredPieces>) -> bool {
        let header_bytes = self.missing_header(at);
        let staged_bytes = plan.staged_bytes();
        let Some(staging) = self.stage(header_bytes + staged_bytes).await else {
            self.spare.push(plan);
            return false;
        };
        if header_bytes > 0 {
            self.enqueue_header(at, staging.as_ref(), header_bytes);
        }
        let mut used = header_bytes as usize;
        let mut regions = Vec::with_capacity(plan.regions().len());
        for region in plan.regions() {
            let memory = if region.landing.is_direct() {
                None
            } else {
                let len = region.bytes as usize;
                used += len;
                staging.as_ref().and_then(|staging| staging.slice(used - len, len))
            };
            regions.push((memory, 0));
        }
        let (slot, queued) = (self.free_slot(), self.queue.len());
        (self.queue_record, self.queue_step) = (at, step);
        for extent in plan.extents() {
            let region = regions.get_mut(extent.region as usize);
            let landing =
                region.and_then(|(memory, left)| Some((self.landing(&extent, memory.as_ref())?, left)));
            let Some((buf, left)) = landing else {
                self.queue.truncate(queued);
                self.free.push(slot);
                self.fail_slice(step, at);
                return true;
            };
            *left += 1;
            let name = name_extent(slot, extent.region, extent.len);
            self.queue.push_back((name, extent.file_offset, u64::from(extent.len), buf));
        }
        let regions_left = regions.len() as u32;
        if let Some(slice) = self.slices.get_mut(slot) {
            *slice = Some(Slice { step, record: at, plan, stored, regions, regions_left, failed: None });
        }
        true
    }

    fn free_slot(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.slices.push(None);
            self.slices.len() - 1
        })
    }

    /// Ends a slice of which a part has no place in memory, before anything of it is read.
    fn fail_slice(&self, step: u32, at: usize) {
        let index = self.records.get(at).map(|record| record.index as usize);
        let wanted = index.and_then(|index| self.job.wanted.get(index));
        // Where nobody knows of which blocks it is, none may be announced.
        let run = wanted.map_or(0..self.job.request.keys.len() as u32, |wanted| wanted.run.clone());
        self.job.fail_run(run, &OUTSIDE);
        self.job.slice_done(step);
    }

    fn landing(&self, extent: &Extent, staging: Option<&SharedBuf>) -> Option<SharedBuf> {
        match extent.landing {
            Landing::Direct { memory, offset } => {
                let into = self.job.request.into.slice(Address { memory, offset }, u64::from(extent.len))?;
                // Its own keeper, if it has one, lives in the job that the guard holds.
                Some(into.kept_by(Arc::<MemoryGuard>::clone(&self.guard)))
            }
            Landing::Staged { offset } => staging?.slice(offset as usize, extent.len as usize),
        }
    }

    /// Staging memory, `Some(None)` if none is needed. While something of this part is under way, a full arena is
    /// answered by taking that in first; otherwise other tasks hold it and will return it.
    async fn stage(&mut self, bytes: u64) -> Option<Option<SharedBuf>> {
        let bytes = bytes as usize;
        if bytes == 0 {
            return Some(None);
        }
        // Extents fill it in parts, and what has come in is delivered while others are read: it is shared.
        let taken = match self.log.arena.try_take(bytes) {
            Some(buf) => Some(buf),
            None if self.under_way > 0 => None,
            None if bytes > self.log.arena.usage().total => {
                // Larger than the arena: rare enough for memory of its own.
                BufMut::zeroed(bytes).ok()
            }
            None => {
                let deadline = self.job.request.deadline.map(|at| self.log.driver.sleep_until(at));
                let taken = before(pin!(self.log.arena.take(bytes)), deadline).await;
                self.is_late = taken.is_none();
                taken.flatten()
            }
        };
        taken.map(|buf| Some(buf.share()))
    }

    /// Bytes of the record's header if it has to be read first; zero if it is here or on its way.
    fn missing_header(&mut self, at: usize) -> u64 {
        let Some(record) = self.records.get(at) else { return 0 };
        if !matches!(record.header, HeaderState::Unread) {
            return 0;
        }
        let Some(wanted) = self.job.wanted.get(record.index as usize) else { return 0 };
        match prove::known(self.log, &record.segment, wanted) {
            Some(header) => {
                self.header_found(at, header);
                0
            }
            None => wanted.header_bytes,
        }
    }

    fn enqueue_header(&mut self, at: usize, staging: Option<&SharedBuf>, bytes: u64) {
        let Some(buf) = staging.and_then(|staging| staging.slice(0, bytes as usize)) else { return };
        let Some(record) = self.records.get_mut(at) else { return };
        let Some(wanted) = self.job.wanted.get(record.index as usize) else { return };
        self.queue.push_back((HEADER | at as u64, wanted.offset, bytes, buf.clone()));
        record.header = HeaderState::Reading(buf);
    }

    /// Takes in one extent that ended.
    fn take_in(&mut self, done: ExtentDone) {
        let ExtentDone { extent, result } = done;
        if extent & HEADER != 0 {
            return self.take_header((extent & !HEADER) as usize, result);
        }
        let (slot, region, len) = extent_named(extent);
        self.in_flight = self.in_flight.saturating_sub(len);
        let Some(Some(slice)) = self.slices.get_mut(slot) else { return };
        let Some(bytes) = slice.plan.regions().get(region as usize).map(|region| region.bytes) else {
            return;
        };
        if let Err(error) = &result {
            slice.failed = Some(Reason::Media(error.to_string()));
        }
        let Some((_, left)) = slice.regions.get_mut(region as usize) else { return };
        *left -= 1;
        if *left > 0 {
            return;
        }
        self.job.shared.counters.device_bytes_read.fetch_add(bytes, Relaxed);
        let record = slice.record;
        match self.records.get_mut(record) {
            Some(Record { header: HeaderState::Good(_) | HeaderState::Bad, .. }) => {
                self.finish_region(slot, region)
            }
            Some(record) => record.early.push((slot, region)),
            None => {}
        }
    }

    fn take_header(&mut self, at: usize, result: Result<(), IoError>) {
        let Some(record) = self.records.get_mut(at) else { return };
        let HeaderState::Reading(buf) = std::mem::replace(&mut record.header, HeaderState::Bad) else {
            return;
        };
        let Some(wanted) = self.job.wanted.get(record.index as usize) else { return };
        self.in_flight = self.in_flight.saturating_sub(wanted.header_bytes);
        let opened = result.map_err(|error| Reason::Media(error.to_string()));
        match opened.and_then(|()| prove::open(self.log, &record.segment, wanted, &buf)) {
            Ok(header) => self.header_found(at, header),
            Err(reason) => {
                for ordinal in wanted.run.clone() {
                    self.job.fail_there(wanted, ordinal, &reason);
                    if matches!(reason, Reason::Header { .. }) {
                        self.job.quarantine(wanted, ordinal);
                    }
                }
            }
        }
        let early = self.records.get_mut(at).map(|record| std::mem::take(&mut record.early));
        for (slot, region) in early.unwrap_or_default() {
            self.finish_region(slot, region);
        }
    }

    /// Takes a header in that was opened, and what it proves of the blocks of its run.
    fn header_found(&mut self, at: usize, header: Rc<Header>) {
        let Some(record) = self.records.get_mut(at) else { return };
        let Some(wanted) = self.job.wanted.get(record.index as usize) else { return };
        let job = self.job;
        // What this read is a part of may have begun with another production, which has left.
        let admits = |ordinal, origin| job.admits(ordinal, origin);
        let proved =
            prove::run(&header, wanted, &job.request.keys, admits, |ordinal| job.fail_as_gone(ordinal));
        record.header = if proved { HeaderState::Good(header) } else { HeaderState::Bad };
    }

    /// Verifies a region that is in and copies what was staged.
    fn finish_region(&mut self, slot: usize, region: u32) {
        let Some(Some(slice)) = self.slices.get_mut(slot) else { return };
        let staging = slice.regions.get_mut(region as usize).and_then(|(staging, _)| staging.take());
        let (record, step, failed) = (slice.record, slice.step, slice.failed.clone());
        slice.regions_left -= 1;
        let last = slice.regions_left == 0;
        self.deliver(slot, region, staging.as_ref(), failed, record);
        if last && let Some(Some(slice)) = self.slices.get_mut(slot).map(Option::take) {
            self.spare.push(slice.plan);
            self.free.push(slot);
            if let Some(Record { flight: Some(flight), header: HeaderState::Good(header), .. }) =
                self.records.get(record)
            {
                flight.arrived(step, header);
            }
            self.job.slice_done(step);
        }
    }

    /// Hands a region that is in to what compares its chunks with their digests: [`copy_out`], or [`encoded`] for records
    /// that are.
    fn deliver(
        &mut self,
        slot: usize,
        region: u32,
        staging: Option<&SharedBuf>,
        failed: Option<Reason>,
        record: usize,
    ) {
        let slice = self.slices.get(slot).and_then(Option::as_ref);
        let record = self.records.get(record);
        let wanted = record.and_then(|record| self.job.wanted.get(record.index as usize));
        let (Some(slice), Some(record), Some(wanted)) = (slice, record, wanted) else {
            // Nobody knows of which blocks these bytes are: none may be announced.
            let all = 0..self.job.request.keys.len() as u32;
            return self.job.fail_run(all, &Reason::Bug("bytes of a slice that nobody planned"));
        };
        let HeaderState::Good(header) = &record.header else {
            // A bad one has failed its run already.
            let reason = failed.unwrap_or(Reason::Bug("bytes of a record without its header"));
            return self.job.fail_run(wanted.run.clone(), &reason);
        };
        let verify = if record.doubted { Verify::Always } else { self.job.request.verify };
        let bytes = slice.plan.regions().get(region as usize).map_or(0, |region| region.bytes);
        let arrived = RegionIn { wanted, header, staging, failed, verify };
        if let Some(pieces) = &slice.stored {
            let decoded = encoded::unpack(self.log, self.job, &arrived, pieces.of(region), &mut self.sample);
            self.delivered += Section::of_bytes(decoded * DECODE_COST);
        } else {
            copy_out(self.job, &arrived, self.job.plan.pieces(&slice.plan, region), &mut self.sample);
            self.delivered += Section::of_bytes(bytes);
        }
    }
}

/// A region that is in, and what its chunks are compared with.
struct RegionIn<'a> {
    wanted: &'a Wanted,
    header: &'a Header,
    /// Where it was read to; none if it landed in its place.
    staging: Option<&'a SharedBuf>,
    /// Why it was not read, if so.
    failed: Option<Reason>,
    verify: Verify,
}

/// Verifies the chunks of a region and copies what was staged.
fn copy_out(job: &ReadJob, region: &RegionIn<'_>, mut pieces: Pieces<'_>, sample: &mut u64) {
    let RegionIn { wanted, header, staging, failed, verify } = region;
    let into = &job.request.into;
    for piece in pieces.by_ref() {
        if let Some(reason) = failed {
            job.fail(piece.ordinal, reason);
            continue;
        }
        let len = piece.len as usize;
        // What cannot be shown cannot be verified: it is not announced.
        let Some(place) = into.slice(piece.destination, piece.len) else {
            job.fail(piece.ordinal, &OUTSIDE);
            continue;
        };
        let (source, at) = match staging {
            Some(buf) => (*buf, piece.source as usize),
            None => (&place, 0),
        };
        if at.checked_add(len).is_none_or(|end| end > source.len()) {
            job.fail(piece.ordinal, &OUTSIDE);
            continue;
        }
        let expected = header.digest(piece.block, piece.chunk);
        if verify.picks(sample) {
            let found = source.crc32(at, len);
            if expected != Some(found) && !kvarts_layout::planted!("digest-not-compared") {
                // What another process may write to proves nothing about the disk.
                let certain = staging.is_some() || !source.region().is_shared();
                damaged(job, wanted, piece.ordinal, (expected, found), certain);
                continue;
            }
        }
        if let Some((digests, digest)) = into.digests().zip(expected) {
            digests.set(piece.chunk, piece.ordinal, digest);
        }
        if staging.is_some() {
            place.copy_from(0, source, at, len);
        }
    }
    if !pieces.is_done() {
        // What was passed over was neither compared nor copied.
        job.fail_run(wanted.run.clone(), &OUTSIDE);
    }
}

/// Notes a chunk that is not what was put. Where it is not `certain` that it was read so, its block stays in service:
/// a read into memory of our own will tell.
fn damaged(
    job: &ReadJob,
    wanted: &Wanted,
    ordinal: u32,
    (expected, found): (Option<u32>, u32),
    certain: bool,
) {
    if job.has_failed(ordinal) {
        return;
    }
    let expected = expected.unwrap_or_default();
    let (shard, segment, offset) = (wanted.shard, wanted.segment, wanted.offset);
    let reason = Reason::Digest { shard, segment, offset, expected, found };
    let still_there = job.fail_there(wanted, ordinal, &reason);
    if certain && still_there {
        job.shared.counters.chunks_damaged.fetch_add(1, Relaxed);
        job.quarantine(wanted, ordinal);
    }
}

/// Bits of an extent's name that hold its length in pages, and its region.
const LEN_BITS: u32 = 19;
const REGION_BITS: u32 = 24;

/// Slice, region and length of an extent in one word. A slice has fewer regions than 2^24 (its pieces are
/// bounded), and no extent is longer than a gigabyte (by the plan's limit).
fn name_extent(slot: usize, region: u32, len: u32) -> u64 {
    let pages = u64::from(len) / PAGE_BYTES;
    (slot as u64) << (LEN_BITS + REGION_BITS) | u64::from(region) << LEN_BITS | pages
}

fn extent_named(name: u64) -> (usize, u32, u64) {
    let pages = name & ((1 << LEN_BITS) - 1);
    let region = (name >> LEN_BITS) & ((1 << REGION_BITS) - 1);
    ((name >> (LEN_BITS + REGION_BITS)) as usize, region as u32, pages * PAGE_BYTES)
}
