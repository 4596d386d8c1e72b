//! The state of the driver: a slot for each operation, from the moment it is asked for until it is not needed any more.
//!
//! Invariants:
//! - a slot in state `InFlight` keeps its buffers whatever its owner does; nothing but its completion frees it;
//! - each submission has a tag of its own in its token, so a second completion, or one of an earlier submission of
//!   the same slot, matches nothing;
//! - what a lane counts as in flight is the sum of `charged` over its slots, `in_flight_bytes` that of all lanes.
//!
//! An urgent read, small or foreground, may not find more than a bounded number of bytes of less urgent transfers in
//! front of it at the device ([`Limits`]): they go few at a time, and in small pieces, for a number of their bytes after
//! the last urgent read was asked for. So it holds for a reader that asks for one thing after the other, too: between
//! its reads the device would otherwise fill up with puts.
//!
//! Nothing here wakes or submits by itself while the state is borrowed: wakers are collected in `to_wake` and woken
//! by the caller, since a waker may run code that comes back.

use std::collections::{BTreeMap, VecDeque};
use std::task::Waker;
use std::time::Duration;

use super::devices::OVERDUE;
use super::lane::Lane;
use super::{Devices, DriveLoad, Limits, Metrics};
use crate::io::describe;
use crate::io::ring::{MOVED_MAX, RANGES_MAX};
use crate::io::slots::{Key, Slots};
use crate::io::{Completion, Io, MetaOp, Op, Reply, Token};
use kvarts_contract::buffers::buf::SharedBuf;
use kvarts_contract::buffers::region::PAGE;
use kvarts_contract::class::Class;
use kvarts_contract::clock::{Clock, Nanos};
use kvarts_contract::io_error::FileId;
use kvarts_contract::io_error::{IoError, IoErrorKind, OpKind, Subject};

/// How often an interrupted transfer is tried again.
const TRIES_MAX: u16 = 16;
/// How often the rest of a short transfer is asked for.
const SHORTS_MAX: u16 = 64;
const EINTR: i32 = 4;
const EAGAIN: i32 = 11;
const EFAULT: i32 = 14;
/// Bits of a token that name the slot; the others hold the tag.
const INDEX_BITS: u32 = 24;
const TAG_MASK: u64 = (1 << (64 - INDEX_BITS)) - 1;
/// Slots at most, of all lanes and whatever the limits say: an index must fit its bits.
pub(super) const OPS_MAX: usize = 1 << 20;
/// The same of what is not a transfer: some file systems take their time for a large file.
const OVERDUE_META: Duration = Duration::from_secs(30);
/// The error of a transfer that a lane refuses: the device is busy with what it never answered.
const EBUSY: i32 = 16;

/// What an operation does.
#[derive(Debug)]
pub(super) enum Work {
    Read(FileId, SharedBuf),
    Write(FileId, SharedBuf, bool),
    WriteV(FileId, Box<[SharedBuf]>, bool),
    Flush(FileId),
    /// Taken when it is submitted.
    Meta(Option<MetaOp>),
    /// Ended: it holds no memory any more.
    Nothing,
}

impl Work {
    /// Whether its bytes are durable when it ends.
    fn is_durable(&self) -> bool {
        matches!(self, Self::Write(_, _, true) | Self::WriteV(_, _, true))
    }
}

/// One operation that is asked for.
#[derive(Debug)]
pub(super) struct Request {
    class: Class,
    kind: OpKind,
    subject: Subject,
    offset: u64,
    len: u64,
    work: Work,
    aligned: bool,
}

impl Request {
    pub(super) fn transfer(class: Class, offset: u64, work: Work) -> Self {
        let (kind, file) = match &work {
            Work::Read(file, _) => (OpKind::Read, *file),
            Work::Write(file, ..) | Work::WriteV(file, ..) => (OpKind::Write, *file),
            Work::Flush(file) => (OpKind::Flush, *file),
            Work::Meta(_) | Work::Nothing => (OpKind::Flush, FileId(u64::MAX)),
        };
        let bufs = bufs(&work);
        let len = bufs.iter().map(|buf| buf.len() as u64).sum();
        let aligned = offset.is_multiple_of(PAGE as u64) && bufs.iter().all(SharedBuf::is_aligned);
        Self { class, kind, subject: Subject::File(file), offset, len, work, aligned }
    }

    pub(super) fn meta(op: MetaOp) -> Self {
        let (kind, subject, offset, len) = describe(&op);
        let (class, work) = (Class::Background, Work::Meta(Some(op)));
        Self { class, kind, subject, offset, len, work, aligned: false }
    }

    /// Whether there is nothing to move.
    pub(super) fn is_empty(&self) -> bool {
        self.kind.is_transfer() && self.len == 0
    }

    pub(super) fn error(&self, kind: IoErrorKind, errno: i32) -> IoError {
        IoError {
            kind,
            op: self.kind,
            subject: self.subject.clone(),
            offset: self.offset,
            len: self.len,
            errno,
        }
    }
}

fn bufs(work: &Work) -> &[SharedBuf] {
    match work {
        Work::Read(_, buf) | Work::Write(_, buf, _) => std::slice::from_ref(buf),
        Work::WriteV(_, bufs, _) => bufs,
        Work::Flush(_) | Work::Meta(_) | Work::Nothing => &[],
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// In the schedule, or in `unsent`.
    Waiting,
    InFlight,
    Done,
}

/// Who learns of the end.
#[derive(Debug)]
enum Owner {
    /// A future, with the waker of the task that polled it last.
    Future(Option<Waker>),
    /// A batch, and the extent's name in it.
    Batch(Key, u64),
    /// Pending, but dropped by its caller. `counted` as such: what is past its deadline is counted as stuck.
    Dropped { counted: bool },
}

/// What an operation ended with.
pub(super) type Outcome = Result<Option<Reply>, IoError>;

#[derive(Debug)]
struct Slot {
    request: Request,
    /// The number of its lane.
    lane: usize,
    state: State,
    owner: Owner,
    tag: u64,
    /// Bytes moved for certain.
    moved: u64,
    /// Where in the request the present submission begins, and how many bytes it asked for.
    from: u64,
    asked: u64,
    /// The most bytes that one submission of it asks for.
    piece: u64,
    /// Its part of `in_flight_bytes`: as many, unless it is stuck.
    charged: u64,
    /// When its present piece went to the device.
    sent: Nanos,
    /// Whether its lane counts it as stuck: past its deadline, or at the device for too long.
    is_stuck: bool,
    tries: u16,
    shorts: u16,
    outcome: Option<Outcome>,
}

/// One batch of reads.
#[derive(Debug, Default)]
pub(super) struct BatchState {
    /// Extents for which there was no slot yet.
    pub(super) unslotted: VecDeque<(u64, Request)>,
    pub(super) done: VecDeque<(u64, Result<(), IoError>)>,
    pub(super) waker: Option<Waker>,
    /// Pushed and not in `done` yet.
    pub(super) outstanding: usize,
    /// In `Core::starved`.
    starved: bool,
}

#[derive(Debug)]
pub(super) struct Core {
    limits: Limits,
    /// The most bytes that go in one submission; larger transfers go piece by piece, so that every one fits.
    piece: u64,
    slots: Slots<Slot>,
    /// One for each directory, by its number.
    lanes: Vec<Lane>,
    /// In which directory the open files are.
    files: BTreeMap<FileId, usize>,
    /// Operations that could not be handed over because the `Io` was in use, in order.
    unsent: VecDeque<u32>,
    batches: Slots<BatchState>,
    /// Emptied batches, whose queues keep their memory.
    spare: Vec<BatchState>,
    /// Batches with extents that have no slot.
    starved: VecDeque<Key>,
    /// Tasks that wait for a slot.
    slot_waiters: Vec<Waker>,
    pub(super) to_wake: Vec<Waker>,
    next_tag: u64,
    metrics: Metrics,
    devices: Devices,
}

impl Core {
    pub(super) fn new(limits: Limits, devices: Devices) -> Self {
        let room = limits.max_bytes_in_flight.saturating_sub(limits.foreground_reserve);
        let piece = room.min(u64::from(MOVED_MAX)).max(PAGE as u64);
        Self {
            limits,
            piece: piece - piece % PAGE as u64,
            slots: Slots::new(),
            lanes: vec![Lane::new(0, &devices)],
            files: BTreeMap::new(),
            unsent: VecDeque::new(),
            batches: Slots::new(),
            spare: Vec::new(),
            starved: VecDeque::new(),
            slot_waiters: Vec::new(),
            to_wake: Vec::new(),
            next_tag: 1,
            metrics: Metrics::default(),
            devices,
        }
    }

    pub(super) fn metrics(&self) -> Metrics {
        Metrics {
            slots: self.slots.len() as u64,
            waiting_ops: self.lanes.iter().map(|lane| lane.schedule.len()).sum::<usize>() as u64
                + self.unsent.len() as u64,
            ..self.metrics
        }
    }

    pub(super) fn places(&self) -> (usize, usize) {
        (self.slots.places(), self.batches.places() + self.spare.len())
    }

    /// Gives a future's operation a slot, or the request back if there is none.
    pub(super) fn admit(&mut self, request: Request) -> Result<Key, Request> {
        let lane = self.lane_of(&request);
        if self.is_full(lane) {
            return Err(request);
        }
        let refused = self.refused(lane, &request);
        let key = self.place(request, lane, Owner::Future(None));
        if let Some(error) = refused {
            self.lanes[lane].schedule.remove(key.index);
            self.finish(key.index, Err(error));
        }
        Ok(key)
    }

    /// Why a transfer is not even queued: its device has no room and will have none.
    fn refused(&self, lane: usize, request: &Request) -> Option<IoError> {
        let is_out = request.kind.is_transfer() && self.lanes[lane].is_out(&self.limits);
        is_out.then(|| request.error(IoErrorKind::Passing, EBUSY))
    }

    /// The number of the lane that an operation goes on: that of its directory.
    fn lane_of(&mut self, request: &Request) -> usize {
        let number = match &request.subject {
            _ if kvarts_layout::planted!("one-lane") => 0,
            Subject::File(file) => self.files.get(file).copied().unwrap_or(0),
            Subject::Name(name) => usize::from(name.dir.0),
        };
        while self.lanes.len() <= number {
            self.lanes.push(Lane::new(self.lanes.len(), &self.devices));
        }
        number
    }

    fn is_full(&self, lane: usize) -> bool {
        self.lanes[lane].slots >= self.limits.max_ops || self.slots.len() >= OPS_MAX
    }

    fn place(&mut self, request: Request, lane: usize, owner: Owner) -> Key {
        let (class, len, kind) = (request.class, request.len, request.kind);
        let slot = Slot {
            request,
            lane,
            state: State::Waiting,
            owner,
            tag: 0,
            moved: 0,
            from: 0,
            asked: 0,
            piece: 0,
            charged: 0,
            sent: Nanos(0),
            is_stuck: false,
            tries: 0,
            shorts: 0,
            outcome: None,
        };
        let key = self.slots.insert(slot);
        self.lanes[lane].slots += 1;
        if kind == OpKind::Read {
            self.devices.note_read(lane, class);
        }
        // Flushes and the like move no bytes of ours, and an acknowledgement waits for them: they do not queue.
        if kind.is_transfer() {
            self.lanes[lane].schedule.push(key.index, class, len.min(self.piece));
        } else {
            self.unsent.push_back(key.index);
        }
        key
    }

    /// Wakes the task when a slot is free.
    pub(super) fn wait_for_slot(&mut self, waker: &Waker) {
        if !self.slot_waiters.iter().any(|known| known.will_wake(waker)) {
            self.slot_waiters.push(waker.clone());
        }
    }

    /// Hands over what may go.
    pub(super) fn dispatch(&mut self, io: &mut dyn Io, clock: &dyn Clock) {
        self.serve_starved();
        if !self.unsent.is_empty() {
            let now = clock.now();
            while let Some(index) = self.unsent.pop_front() {
                if let Some(slot) = self.slots.at(index).filter(|slot| slot.sent == Nanos(0)) {
                    slot.sent = now;
                }
                self.send(io, index);
            }
        }
        for number in 0..self.lanes.len() {
            self.dispatch_lane(io, clock, number);
            self.lanes[number].tell(number, &self.devices, clock);
        }
    }

    fn dispatch_lane(&mut self, io: &mut dyn Io, clock: &dyn Clock, number: usize) {
        if self.lanes[number].schedule.len() == 0 {
            return;
        }
        let now = clock.now();
        self.lanes[number].look_at_urgent(number, &self.devices, &self.limits);
        loop {
            let lane = &mut self.lanes[number];
            let beside = lane.beside_urgent(&self.limits, self.piece);
            let Some(index) = lane.next(&self.limits, &beside) else {
                if lane.schedule.len() > 0 && lane.may_look(now) && self.look_for_stuck(number, now) {
                    continue;
                }
                return;
            };
            if let Some(slot) = self.slots.at(index) {
                slot.sent = now;
                let (class, len) = (slot.request.class, slot.request.len);
                let few = beside.iter().flatten().find(|beside| beside.urgent < class);
                // Not so durable writes: each piece of one is made durable.
                let few = few.filter(|_| !slot.request.work.is_durable());
                slot.piece = len.min(few.map_or(self.piece, |beside| beside.piece));
                slot.charged = slot.piece;
                self.metrics.in_flight_bytes += slot.charged;
                lane.charge(class, slot.charged, len);
            }
            self.send(io, index);
        }
    }

    /// Whether the device of a lane has not answered something for [`OVERDUE`], and of the others one does, or they have nothing to
    /// answer: a machine that stands still is no fault of one of them.
    pub(super) fn is_silent_alone(&self, lane: usize, now: Nanos) -> bool {
        self.is_silent(lane, now) && !self.devices.none_answers_beside(lane, now)
    }

    /// What each device has.
    pub(super) fn loads(&self, now: Nanos) -> Vec<DriveLoad> {
        let mut loads: Vec<DriveLoad> = self.lanes.iter().map(Lane::load).collect();
        for (_, slot) in self.slots.iter().filter(|(_, slot)| slot.state == State::InFlight) {
            if let Some(load) = loads.get_mut(slot.lane) {
                load.unanswered = load.unanswered.max(now.since(slot.sent));
            }
        }
        loads
    }

    /// Whether a lane has no operation.
    pub(super) fn is_idle(&self, lane: usize) -> bool {
        self.lanes.get(lane).is_none_or(|lane| lane.slots == 0)
    }

    /// Whether the device of a lane has not answered something for too long.
    pub(super) fn is_silent(&self, lane: usize, now: Nanos) -> bool {
        self.slots.iter().any(|(_, slot)| slot.lane == lane && slot.is_overdue(now))
    }

    /// Whether an extent of a batch has been at its device for too long.
    pub(super) fn is_batch_overdue(&self, key: Key, now: Nanos) -> bool {
        let is_own = |slot: &Slot| matches!(slot.owner, Owner::Batch(batch, _) if batch == key);
        self.slots.iter().any(|(_, slot)| is_own(slot) && slot.is_overdue(now))
    }

    /// Counts what has been at a device for too long as stuck, although its caller still waits for it: else it would keep out what
    /// its device may answer. Whether there was any.
    fn look_for_stuck(&mut self, lane: usize, now: Nanos) -> bool {
        let is_old = |slot: &Slot| {
            slot.lane == lane
                && slot.state == State::InFlight
                && slot.charged > 0
                && !slot.is_stuck
                && now.since(slot.sent) >= OVERDUE
        };
        let old: Vec<Key> = self.slots.iter().filter(|(_, slot)| is_old(slot)).map(|(key, _)| key).collect();
        old.iter().for_each(|key| self.stick(*key));
        !old.is_empty()
    }

    /// Its lane counts a transfer at the device as stuck.
    fn stick(&mut self, key: Key) {
        let Some(slot) = self.slots.get_mut(key).filter(|slot| !slot.is_stuck) else { return };
        slot.is_stuck = true;
        let (lane, class, len, charged) = (slot.lane, slot.request.class, slot.request.len, slot.charged);
        if self.lanes[lane].stick(len, charged, &self.limits) {
            slot.charged = 0;
            self.uncharge(lane, class, charged);
        }
        self.count_orphan(true, len, true);
    }

    /// Takes that back, of a transfer that its device has answered or that is not at the device.
    fn unstick(&mut self, index: u32) {
        let Some(slot) = self.slots.at(index).filter(|slot| slot.is_stuck) else { return };
        slot.is_stuck = false;
        let (lane, len, charged) = (slot.lane, slot.request.len, slot.charged);
        self.lanes[lane].unstick(len, charged);
        self.count_orphan(true, len, false);
    }

    /// Takes back what a transfer was charged.
    fn uncharge(&mut self, lane: usize, class: Class, charged: u64) {
        self.metrics.in_flight_bytes -= charged;
        self.lanes[lane].uncharge(class, charged);
    }

    fn send(&mut self, io: &mut dyn Io, index: u32) {
        let Some(slot) = self.slots.at(index) else { return };
        let Some(op) = slot.next_op(slot.piece) else { return };
        slot.tag = self.next_tag & TAG_MASK;
        self.next_tag += 1;
        slot.state = State::InFlight;
        let token = Token((slot.tag << INDEX_BITS) | u64::from(index));
        self.metrics.submitted += 1;
        self.metrics.in_flight_ops += 1;
        let lane = &mut self.lanes[slot.lane];
        lane.has_begun |= lane.at_work == 0;
        lane.at_work += 1;
        io.submit(token, op);
    }

    /// Takes the end of a submission. What must be submitted again goes to `unsent`.
    pub(super) fn complete(&mut self, completion: Completion) {
        let (index, tag) = (completion.token.0 & ((1 << INDEX_BITS) - 1), completion.token.0 >> INDEX_BITS);
        let slot = u32::try_from(index).ok().and_then(|index| self.slots.at(index));
        let Some(slot) = slot.filter(|slot| slot.state == State::InFlight && slot.tag == tag) else {
            self.metrics.unknown_completions += 1;
            return;
        };
        let index = index as u32;
        self.metrics.in_flight_ops -= 1;
        let lane = &mut self.lanes[slot.lane];
        lane.at_work -= 1;
        lane.has_answered = true;
        let step = slot.judge(completion.result);
        let dropped = matches!(slot.owner, Owner::Dropped { .. });
        match step {
            Step::Ended => {
                match (&completion.reply, &slot.request.subject) {
                    (Some(Reply::Opened(file)), Subject::Name(name)) => {
                        self.files.insert(*file, usize::from(name.dir.0));
                    }
                    (None, Subject::File(file)) if slot.request.kind == OpKind::Close => {
                        self.files.remove(file);
                    }
                    _ => {}
                }
                self.finish(index, Ok(completion.reply));
            }
            Step::Failed(kind, errno) => {
                let error = slot.request.error(kind, errno);
                self.finish(index, Err(error));
            }
            // The rest is not wanted any more.
            Step::Again | Step::Rest if dropped => self.finish(index, Ok(None)),
            Step::Again => {
                self.metrics.retried += 1;
                self.send_again(index);
            }
            Step::Rest => {
                self.metrics.short += 1;
                self.send_again(index);
            }
        }
    }

    fn send_again(&mut self, index: u32) {
        // Its device has answered after all.
        self.unstick(index);
        if let Some(slot) = self.slots.at(index) {
            slot.state = State::Waiting;
            slot.sent = Nanos(0);
            self.unsent.push_back(index);
        }
    }

    fn finish(&mut self, index: u32, outcome: Outcome) {
        let Some(key) = self.slots.key_at(index) else { return };
        self.unstick(index);
        let Some(slot) = self.slots.get_mut(key) else { return };
        slot.state = State::Done;
        let (lane, class) = (slot.lane, slot.request.class);
        let charged = std::mem::take(&mut slot.charged);
        match &outcome {
            Ok(_) if slot.request.kind == OpKind::Read => self.metrics.bytes_read += slot.moved,
            Ok(_) if slot.request.kind == OpKind::Write => self.metrics.bytes_written += slot.moved,
            Ok(_) => {}
            Err(_) => self.metrics.failed += 1,
        }
        self.metrics.completed += 1;
        // The memory goes back to its owner now, whenever the future is polled.
        slot.request.work = Work::Nothing;
        let len = slot.request.len;
        self.uncharge(lane, class, charged);
        let Some(slot) = self.slots.get_mut(key) else { return };
        match &mut slot.owner {
            Owner::Future(waker) => {
                self.to_wake.extend(waker.take());
                slot.outcome = Some(outcome);
            }
            Owner::Batch(batch, extent) => {
                let (batch, extent) = (*batch, *extent);
                if let Some(batch) = self.batches.get_mut(batch) {
                    batch.outstanding -= 1;
                    batch.done.push_back((extent, outcome.map(drop)));
                    self.to_wake.extend(batch.waker.take());
                }
                self.free(key);
            }
            Owner::Dropped { counted } => {
                let counted = *counted;
                self.metrics.late_completions += 1;
                if counted {
                    self.count_orphan(false, len, false);
                }
                self.free(key);
            }
        }
    }

    fn count_orphan(&mut self, stuck: bool, len: u64, begins: bool) {
        let (ops, bytes) = match stuck {
            true => (&mut self.metrics.stuck_ops, &mut self.metrics.stuck_bytes),
            false => (&mut self.metrics.dropped_ops, &mut self.metrics.dropped_bytes),
        };
        if begins {
            *ops += 1;
            *bytes += len;
        } else {
            *ops -= 1;
            *bytes -= len;
        }
    }

    fn free(&mut self, key: Key) {
        let Some(slot) = self.slots.remove(key) else { return };
        self.lanes[slot.lane].slots -= 1;
        self.serve_starved();
        if !self.is_full(slot.lane) {
            self.to_wake.append(&mut self.slot_waiters);
        }
    }

    /// Gives free slots to batches that wait for some, in turn; a batch whose next lane has none lets others pass.
    fn serve_starved(&mut self) {
        let mut passed = 0;
        while passed < self.starved.len() {
            let Some(key) = self.starved.pop_front() else { return };
            let Some(batch) = self.batches.get_mut(key) else { continue };
            let Some((extent, request)) = batch.unslotted.pop_front() else {
                batch.starved = false;
                continue;
            };
            self.starved.push_back(key);
            let lane = self.lane_of(&request);
            let refused = self.refused(lane, &request);
            let is_full = self.is_full(lane);
            let Some(batch) = self.batches.get_mut(key) else { continue };
            if let Some(error) = refused {
                batch.outstanding -= 1;
                batch.done.push_back((extent, Err(error)));
                self.to_wake.extend(batch.waker.take());
            } else if is_full {
                batch.unslotted.push_front((extent, request));
                passed += 1;
                continue;
            } else {
                self.place(request, lane, Owner::Batch(key, extent));
            }
            passed = 0;
        }
    }

    /// What a future's operation ended with, after which its slot is free; `None` while it has not ended.
    pub(super) fn poll(&mut self, key: Key, waker: &Waker) -> Option<Outcome> {
        let slot = self.slots.get_mut(key)?;
        if let Some(outcome) = slot.outcome.take() {
            self.free(key);
            return Some(outcome);
        }
        if let Owner::Future(known) = &mut slot.owner {
            match known {
                Some(known) if known.will_wake(waker) => {}
                known => *known = Some(waker.clone()),
            }
        }
        None
    }

    /// What [`IoErrorKind::Deadline`] is reported with for an operation that has a slot.
    pub(super) fn overdue(&self, key: Key) -> Option<IoError> {
        Some(self.slots.get(key)?.request.error(IoErrorKind::Deadline, 0))
    }

    /// Gives an operation up. If the device has it, it keeps its slot and its memory until its completion.
    pub(super) fn abandon(&mut self, key: Key, stuck: bool) {
        let Some(slot) = self.slots.get_mut(key) else { return };
        let (lane, class) = (slot.lane, slot.request.class);
        match slot.state {
            State::Waiting => {
                // Something that was already once at the device and waits to go there again has its charge.
                let charged = std::mem::take(&mut slot.charged);
                self.uncharge(lane, class, charged);
                if !self.lanes[lane].schedule.remove(key.index) {
                    self.unsent.retain(|index| *index != key.index);
                }
                self.free(key);
            }
            State::Done => self.free(key),
            State::InFlight => {
                slot.owner = Owner::Dropped { counted: !stuck };
                let len = slot.request.len;
                if stuck {
                    self.stick(key);
                } else {
                    self.count_orphan(false, len, true);
                }
            }
        }
    }

    pub(super) fn open_batch(&mut self) -> Key {
        let batch = self.spare.pop().unwrap_or_default();
        self.batches.insert(batch)
    }

    pub(super) fn batch(&mut self, key: Key) -> Option<&mut BatchState> {
        self.batches.get_mut(key)
    }

    /// Adds an extent to a batch.
    pub(super) fn push(&mut self, key: Key, extent: u64, request: Request) {
        let lane = self.lane_of(&request);
        let (full, refused) = (self.is_full(lane), self.refused(lane, &request));
        let Some(batch) = self.batches.get_mut(key) else { return };
        if request.is_empty() {
            batch.done.push_back((extent, Ok(())));
            return;
        }
        if let Some(error) = refused {
            batch.done.push_back((extent, Err(error)));
            return;
        }
        batch.outstanding += 1;
        // Extents of the same batch that wait already are not overtaken.
        if full || !batch.unslotted.is_empty() {
            batch.unslotted.push_back((extent, request));
            if !std::mem::replace(&mut batch.starved, true) {
                self.starved.push_back(key);
            }
        } else {
            self.place(request, lane, Owner::Batch(key, extent));
        }
    }

    /// Gives up what a batch has outstanding; the batch itself stays.
    pub(super) fn abandon_batch(&mut self, key: Key, stuck: bool) {
        let Some(batch) = self.batches.get_mut(key) else { return };
        batch.unslotted.clear();
        let any = std::mem::take(&mut batch.outstanding) > 0;
        if any {
            let owned: Vec<Key> = self
                .slots
                .iter()
                .filter(|(_, slot)| matches!(slot.owner, Owner::Batch(batch, _) if batch == key))
                .map(|(slot, _)| slot)
                .collect();
            owned.into_iter().for_each(|slot| self.abandon(slot, stuck));
        }
    }

    pub(super) fn close_batch(&mut self, key: Key) {
        self.abandon_batch(key, false);
        if let Some(mut batch) = self.batches.remove(key) {
            batch.done.clear();
            batch.waker = None;
            batch.starved = false;
            self.spare.push(batch);
        }
    }
}

/// What follows from a raw result.
enum Step {
    Ended,
    Failed(IoErrorKind, i32),
    /// The same again: nothing was moved, and nothing is wrong.
    Again,
    /// The rest.
    Rest,
}

impl Slot {
    /// Whether its device has had it for too long.
    fn is_overdue(&self, now: Nanos) -> bool {
        let is_meta = !self.request.kind.is_transfer() && self.request.kind != OpKind::Flush;
        let within = if is_meta { OVERDUE_META } else { OVERDUE };
        self.state == State::InFlight && now.since(self.sent) >= within
    }

    /// The next submission; `None` if there is nothing to submit.
    fn next_op(&mut self, piece: u64) -> Option<Op> {
        // Direct I/O takes no odd offsets: after an odd short transfer the last page is moved again.
        let unit = if self.request.aligned { PAGE as u64 } else { 1 };
        self.from = self.moved - self.moved % unit;
        let offset = self.request.offset.checked_add(self.from)?;
        let part = |bufs: &[SharedBuf]| part(bufs, self.from, piece);
        let one = |buf: &SharedBuf| {
            let len = (buf.len() as u64).checked_sub(self.from)?.min(piece);
            buf.slice(usize::try_from(self.from).ok()?, usize::try_from(len).ok()?)
        };
        let op = match &mut self.request.work {
            Work::Read(file, into) => Op::Read { file: *file, offset, into: one(into)? },
            Work::Write(file, from, sync) => Op::Write { file: *file, offset, from: one(from)?, sync: *sync },
            Work::WriteV(file, from, sync) => {
                Op::WriteV { file: *file, offset, from: part(from), sync: *sync }
            }
            Work::Flush(file) => Op::Flush { file: *file },
            Work::Meta(op) => Op::Meta(op.take()?),
            Work::Nothing => return None,
        };
        self.asked = match &op {
            Op::Read { into: buf, .. } | Op::Write { from: buf, .. } => buf.len() as u64,
            Op::WriteV { from: bufs, .. } => bufs.iter().map(|buf| buf.len() as u64).sum(),
            Op::Flush { .. } | Op::Meta(_) => 0,
        };
        Some(op)
    }

    fn judge(&mut self, result: i32) -> Step {
        let kind = self.request.kind;
        let Ok(result) = u64::try_from(result) else { return self.judge_error(result.saturating_neg()) };
        if !kind.is_transfer() {
            return Step::Ended;
        }
        let reached = self.from.saturating_add(result);
        if result > self.asked {
            return Step::Failed(IoErrorKind::Other(0), 0);
        }
        if 0 < result && reached < self.moved {
            // Less of the page that is moved again than was there before: that is no end of the file.
            self.shorts += 1;
            let given_up = self.shorts > SHORTS_MAX;
            return if given_up { Step::Failed(IoErrorKind::Other(0), 0) } else { Step::Rest };
        }
        if reached <= self.moved {
            let kind = if kind == OpKind::Read { IoErrorKind::Eof } else { IoErrorKind::Other(0) };
            return Step::Failed(kind, 0);
        }
        self.moved = reached;
        let short = kind == OpKind::Read && kvarts_layout::planted!("short-read-taken-for-whole");
        if self.moved >= self.request.len || short {
            return Step::Ended;
        }
        if result < self.asked {
            self.shorts += 1;
            if self.shorts > SHORTS_MAX {
                return Step::Failed(IoErrorKind::Other(0), 0);
            }
        }
        Step::Rest
    }

    fn judge_error(&mut self, errno: i32) -> Step {
        if kvarts_layout::planted!("failed-write-taken-for-done") && self.request.kind == OpKind::Write {
            return Step::Ended;
        }
        // A flush is never repeated, nor a write that is one: what failed may have been the flush, and the kernel
        // would report success for bytes that it has dropped. Operations on names may have been done.
        let repeatable = match &self.request.work {
            Work::Read(..) => true,
            Work::Write(_, _, sync) | Work::WriteV(_, _, sync) => !*sync,
            Work::Flush(_) | Work::Meta(_) | Work::Nothing => false,
        };
        if repeatable && matches!(errno, EINTR | EAGAIN) && self.tries < TRIES_MAX {
            self.tries += 1;
            return Step::Again;
        }
        // A client took away the memory that it shares: nothing is wrong with the disk.
        if errno == EFAULT
            && let Work::Read(_, into) = &self.request.work
            && into.region().note_failure()
        {
            return Step::Failed(IoErrorKind::Passing, errno);
        }
        Step::Failed(IoErrorKind::of(errno), errno)
    }
}

/// What is left of `bufs` after the first `from` bytes, as far as one submission takes: `piece` bytes.
fn part(bufs: &[SharedBuf], from: u64, piece: u64) -> Box<[SharedBuf]> {
    let (mut gone, mut room) = (from, piece);
    let rest = bufs.iter().filter_map(|buf| {
        let len = buf.len() as u64;
        let skipped = gone.min(len);
        gone -= skipped;
        let taken = (len - skipped).min(room);
        room -= taken;
        if taken == 0 { None } else { buf.slice(skipped as usize, taken as usize) }
    });
    rest.take(RANGES_MAX).collect()
}
