//! One executor's part of a read, of one device: submitting extents, verifying what arrives, copying what was staged.
//!
//! Whatever shards of a device an executor has, what a read wants of them is one part: one message, one task, one order in which
//! extents go, one window. Parts end apart, so that a device that hangs costs its own blocks.
//!
//! Extents go out in the order in which their steps are announced, as far ahead as a window of bytes allows. A
//! record's header travels with its first extents; nothing of a record is delivered before its header has proved
//! that this is the record that the index meant, under the keys that were asked for.
//!
//! While a part runs, its segments are held: they are not rewritten under a device read.
//!
//! Of an encoded record only the header says where chunks lie. The headers of such records go out first, and their
//! slices are planned when they are in (`encoded`); their chunks are decoded one by one into scratch memory, verified
//! there and copied out, and other tasks have their turn in between.

mod arrive;
mod compared;
mod encoded;
mod submit;

use std::collections::VecDeque;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

use kvarts_layout::format::body::ENCODING_RAW;
use kvarts_layout::plan::Step;

use super::header_cache::Header;
use super::job::{MemoryGuard, ReadJob, ReadPart};
use super::single_flight::{Flight, Role};
use super::wanted::Wanted;
use crate::driver::{ExtentDone, ReadBatch};
use crate::engine::read::Reads;
use crate::engine::shared::Shared;
use crate::engine::tasks::notify::{Section, with_deadline};
use crate::engine::volume::Volume;
use crate::engine::volume::segment::{Hold, Segment};
use crate::index::Lookup;
use crate::rt::LocalTask;
use encoded::StoredPieces;
use kvarts_contract::api::Verify;
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::error::{Reason, broken_invariant};
use submit::{ExtentName, Named};

/// A device of which nothing is waited for any more.
const SILENT: Reason = Reason::Busy("a disk has not responded for 10 s");
/// A chunk has no place in the memory that it is to be read into: what checks requests would have refused it.
const OUTSIDE: Reason = Reason::Bug("a chunk lies outside the memory of its read");

/// A record of the part.
struct Record {
    /// Index in the job's list, and in the plan.
    index: u32,
    /// What reads of its shard share.
    reads: Rc<Reads>,
    segment: Rc<Segment>,
    header: HeaderState,
    /// Regions that arrived before the header: (slice, region).
    early: Vec<(usize, u32)>,
    /// Through which other reads may get what is read of it.
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
struct SliceRead {
    step: u32,
    record: usize,
    /// What it reads.
    plan: Step,
    /// Of an encoded record: the stored chunks in what is read.
    stored: Option<StoredPieces>,
    regions: Vec<RegionState>,
    regions_left: u32,
    /// Why the regions that failed did.
    failed: Option<Reason>,
}

/// A region of a slice.
struct RegionState {
    /// None if it lands in its place.
    staging: Option<SharedBuf>,
    /// Extents that have not ended.
    extents_left: u32,
}

/// An extent that waits for the window of its part.
struct QueuedExtent {
    name: ExtentName,
    file_offset: u64,
    len: u64,
    into: SharedBuf,
}

/// A part of a read, at work.
struct PartRead<'a> {
    /// Of one of its shards: all have this driver and this staging memory.
    volume: Rc<Volume>,
    job: &'a Arc<ReadJob>,
    records: Vec<Record>,
    batch: ReadBatch,
    /// Slices under way; a slot is reused when its slice is done.
    slices: Vec<Option<SliceRead>>,
    free: Vec<usize>,
    /// Step buffers that are not in use, and those of their regions.
    spare: Vec<Step>,
    spare_regions: Vec<Vec<RegionState>>,
    /// Extents that were pushed and whose ends have not been taken in.
    under_way: usize,
    /// Bytes of extents that the device, or the queue before it, has.
    in_flight: u64,
    /// Extents that have ended and are to be taken in, and their bytes.
    ended: VecDeque<ExtentDone>,
    ended_bytes: u64,
    /// What is to be submitted next: step, and index into `records`.
    next: (u32, usize),
    /// Extents of the last planned slice that have not been submitted.
    queue: VecDeque<QueuedExtent>,
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
    tally: Tally,
    /// What verifying, copying and decoding has cost since that was counted.
    delivered: u64,
}

/// Steps and bytes of a part that the store's counts do not have yet: executors share those, so not each piece goes there.
struct Tally {
    shared: Arc<Shared>,
    steps: u64,
    bytes: u64,
}

/// Steps that are told together.
const TOLD_TOGETHER: u64 = 64;

impl Tally {
    fn of(job: &ReadJob) -> Self {
        Self { shared: Arc::clone(&job.shared), steps: 0, bytes: 0 }
    }

    fn step(&mut self) {
        self.steps += 1;
        if self.steps >= TOLD_TOGETHER {
            self.tell();
        }
    }

    fn tell(&mut self) {
        self.shared.work.reads.add(std::mem::take(&mut self.steps));
        self.shared.counters.device_bytes_read.fetch_add(std::mem::take(&mut self.bytes), Relaxed);
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        self.tell();
    }
}

/// Does one part of a read; `of_shard` gives what reads of a shard share.
///
/// `deadline` completes when the caller stops waiting: a read that follows another must not wait as long as that one
/// does.
pub(crate) async fn run(
    of_shard: &dyn Fn(u32) -> Option<Rc<Reads>>,
    part: ReadPart,
    window: u64,
    deadline: Option<LocalTask>,
) {
    let ReadPart { job, records, arrival } = part;
    let mut section = Section::default();
    let (records, holds) = open_records(of_shard, &job, &records, &mut section).await;
    drop(arrival);
    let Some(volume) = records.first().map(|record| Rc::clone(&record.reads.volume)) else {
        return job.part_done();
    };
    let (mut own, mut led, mut followed) = (Vec::new(), Vec::new(), Vec::new());
    for record in records {
        section.spend(1).await;
        let Some(wanted) = job.wanted.get(record.index as usize) else {
            broken_invariant("a record does not belong to the read");
            continue;
        };
        let generation = record.segment.generation.get();
        if record.doubted {
            own.push(record);
            continue;
        }
        match record.reads.flights.join(&job, record.index, wanted, generation) {
            Some(Role::Follow(flight)) => {
                job.underway.exclude_from_measurement();
                followed.push((record, flight));
            }
            Some(Role::Lead(flight)) => {
                led.push((Rc::clone(&flight), Rc::clone(&record.reads), generation));
                own.push(Record { flight: Some(flight), ..record });
            }
            None => own.push(record),
        }
    }
    let mut run = PartRead::new(&volume, &job, own);
    let lead = async {
        let ending = run.run_to_end(window).await;
        // At once: who follows must not wait for what this read follows itself.
        for (flight, reads, generation) in led {
            reads.flights.end(&flight, generation);
            section.spend(1).await;
        }
        ending
    };
    let follow = async { with_deadline(pin!(follow_all(&job, followed)), deadline).await.flatten() };
    let (stopped, missed) = both(lead, follow).await;
    run.end();
    if let Some((records, agenda)) = missed {
        let mut run = PartRead::new(&volume, &job, records);
        run.agenda = Some(agenda);
        match stopped {
            Ending::Done => {
                run.run_to_end(window).await;
            }
            // What was followed lies behind the same device.
            Ending::Stopped => run.give_up_if_silent(),
        }
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
    of_shard: &dyn Fn(u32) -> Option<Rc<Reads>>,
    job: &ReadJob,
    indices: &[u32],
    section: &mut Section,
) -> (Vec<Record>, Vec<Hold>) {
    let mut records = Vec::with_capacity(indices.len());
    let mut holds = Vec::with_capacity(indices.len());
    let mut tally = Tally::of(job);
    for &index in indices {
        let Some(wanted) = job.wanted.get(index as usize) else {
            broken_invariant("a record does not belong to the read");
            continue;
        };
        tally.step();
        section.spend(1).await;
        let Some(reads) = of_shard(wanted.shard) else {
            job.fail_run(
                wanted.run.clone(),
                &Reason::Bug("a part of a read reached an executor that does not own the shard"),
            );
            job.end_slices_of(index);
            continue;
        };
        let found = reads.volume.segments.borrow().get(&wanted.segment).map(Rc::clone);
        let Some(segment) = found else {
            // Evicted since, and the file with it.
            wanted.run.clone().for_each(|ordinal| job.fail_as_gone(ordinal));
            job.end_slices_of(index);
            continue;
        };
        holds.push(Hold::new(&segment));
        if !segment.has_written(wanted.offset) {
            // The segment is being rewritten: its content now proves nothing about its content before.
            wanted.run.clone().for_each(|ordinal| job.fail_as_gone(ordinal));
            job.end_slices_of(index);
            continue;
        }
        let doubted = segment.is_holed() && fail_evicted(job, wanted);
        let header = HeaderState::Unread;
        records.push(Record { index, reads, segment, header, early: Vec::new(), flight: None, doubted });
    }
    (records, holds)
}

/// Ends the usefulness of blocks that have left since they were looked up: where they were may be a hole by now. What
/// is still here stays so while the segment is held. True if one is elsewhere: where it was moved, its bytes are still
/// here as well; where it left and was put again, they need not be.
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

impl<'a> PartRead<'a> {
    fn new(volume: &Rc<Volume>, job: &'a Arc<ReadJob>, records: Vec<Record>) -> Self {
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
            volume: Rc::clone(volume),
            job,
            records,
            batch: volume.driver.batch(job.request.class),
            slices: Vec::new(),
            free: Vec::new(),
            spare: Vec::new(),
            spare_regions: Vec::new(),
            under_way: 0,
            in_flight: 0,
            ended: VecDeque::new(),
            ended_bytes: 0,
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
            tally: Tally::of(job),
            delivered: 0,
        }
    }

    /// Lets go. What a device has not given back by now is told to the caller.
    fn end(self) {
        if self.under_way > 0 {
            self.guard.arm(self.in_flight);
        }
    }

    /// Submits and takes in until every slice is done, the caller is gone or the deadline has passed. A device that does not answer
    /// costs the blocks of this part: of what other parts have, layers are announced all the same.
    async fn run_to_end(&mut self, window: u64) -> Ending {
        let ending = self.all(window).await;
        if ending == Ending::Stopped {
            self.give_up_if_silent();
        }
        ending
    }

    /// Of a part that was stopped: gives up, if neither its caller nor a deadline stopped it but a device that does not answer.
    fn give_up_if_silent(&mut self) {
        let is_silent = self.job.request.deadline.is_none() && !self.job.is_cancelled();
        if is_silent && !kvarts_layout::planted!("silent-part-ends-the-read") {
            self.give_up();
        }
    }

    /// Ends the usefulness of all blocks of the part, and all slices that have not ended.
    fn give_up(&mut self) {
        for record in &mut self.records {
            record.header = HeaderState::Bad;
            if let Some(wanted) = self.job.wanted.get(record.index as usize) {
                self.job.fail_run(wanted.run.clone(), &SILENT);
            }
        }
        self.queue.clear();
        for slice in std::mem::take(&mut self.slices).into_iter().flatten() {
            self.job.slice_done(slice.step);
        }
        while let Some((step, _)) = self.next_slice() {
            self.job.slice_done(step);
            self.advance();
        }
    }

    /// Submits and takes in until every slice is done, the caller is gone, or what is waited for does not come in time.
    async fn all(&mut self, window: u64) -> Ending {
        loop {
            if self.job.is_cancelled() {
                self.drain().await;
                return Ending::Stopped;
            }
            // Their room in the window is free now; digests of megabytes are what taking them in costs.
            while let Some(done) = self.batch.try_next() {
                self.has_ended(done);
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
                    self.tally.step();
                    self.take_in(done);
                    let units = 1 + std::mem::take(&mut self.delivered);
                    self.section.spend(units).await;
                }
                Some(Next::Late) => return Ending::Stopped,
                None => return Ending::Done,
            }
        }
    }

    /// The next thing to happen: an extent has ended, or the deadline passes.
    async fn next(&mut self) -> Option<Next> {
        if self.ended.is_empty() {
            let done = match self.job.request.deadline {
                // Where the caller gave no end, the device gives it.
                None => match self.batch.next_answered().await {
                    Ok(done) => done,
                    Err(_) => return Some(Next::Late),
                },
                Some(at) => match self.batch.next_by(at).await {
                    Ok(done) => done,
                    Err(_) => return Some(Next::Late),
                },
            };
            self.has_ended(done?);
        }
        let done = self.ended.pop_front()?;
        self.ended_bytes = self.ended_bytes.saturating_sub(self.bytes_of(&done));
        Some(Next::Extent(done))
    }

    /// The device is done with an extent.
    fn has_ended(&mut self, done: ExtentDone) {
        let bytes = self.bytes_of(&done);
        self.in_flight = self.in_flight.saturating_sub(bytes);
        self.ended_bytes += bytes;
        self.ended.push_back(done);
    }

    fn bytes_of(&self, done: &ExtentDone) -> u64 {
        match ExtentName(done.extent).named() {
            Named::Region { bytes, .. } => bytes,
            Named::Header(at) => {
                let index = self.records.get(at).map(|record| record.index as usize);
                index.and_then(|index| self.job.wanted.get(index)).map_or(0, |wanted| wanted.header_bytes)
            }
        }
    }

    /// Waits for what is under way, so that the caller's memory is its own again.
    async fn drain(&mut self) {
        loop {
            match self.batch.next_answered().await {
                Ok(Some(_)) => {}
                Ok(None) => break,
                // The memory stays with the device.
                Err(_) => return,
            }
        }
        (self.under_way, self.in_flight) = (0, 0);
    }
}
