//! A stream of the emulated device: a thread that does what it is given, in order.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use kvarts_contract::buffers::SharedBuf;

use super::super::{Direction, Piece};
use super::{Core, lock};
use crate::error::DeviceError;
use crate::pace::{Pace, RealPace, Worker};

/// One thing to do.
pub(super) enum Op {
    Copy {
        number: u64,
        direction: Direction,
        time: Duration,
        host: SharedBuf,
        memories: Vec<SharedBuf>,
        pieces: Vec<Piece>,
    },
    Record(Arc<EventState>),
    Wait(Arc<EventState>),
    Compute(Duration),
    /// A read of these addresses.
    Touch(u64, u64),
    /// A kernel by its number that reads memory for so long.
    Read(u64, Duration),
    /// A kernel whose reads are told.
    Sample(Sample),
    /// A kernel that writes.
    Write(SharedBuf, Vec<u8>),
    Slots(SlotOp),
}

/// What a kernel has seen, once it has run.
#[derive(Clone, Debug, Default)]
pub struct Sampled(Arc<Mutex<Option<Seen>>>);

/// At its beginning, and at its end.
type Seen = (Vec<u8>, Vec<u8>);

impl Sampled {
    /// The bytes that it saw. None if it has not run, or if they changed while it did.
    pub fn seen(&self) -> Option<Vec<u8>> {
        let seen = lock(&self.0).clone();
        seen.and_then(|(before, after)| (before == after).then_some(before))
    }
}

/// A read that is to be told.
pub(super) struct Sample {
    pub(super) of: SharedBuf,
    pub(super) time: Duration,
    pub(super) seen: Sampled,
}

/// A move of rows.
pub(super) struct SlotOp {
    pub(super) direction: Direction,
    pub(super) time: Duration,
    pub(super) ring: SharedBuf,
    pub(super) pool: SharedBuf,
    /// Where the pool lies, as the engine's kernels name it.
    pub(super) pool_base: u64,
    pub(super) slots: SharedBuf,
    pub(super) first: u32,
    /// Of each slot, were it number zero.
    pub(super) rows: Vec<Vec<(u64, u64)>>,
    pub(super) pool_stride: u64,
    pub(super) row_bytes: u64,
}

impl SlotOp {
    /// Each row, in the stretch and in the pool, as the numbers of the slots are now.
    fn places(&self) -> impl Iterator<Item = (u64, u64)> {
        self.rows.iter().enumerate().flat_map(|(ordinal, rows)| {
            let mut number = [0; 4];
            self.slots.copy_out((self.first as usize + ordinal) * 4, &mut number);
            let slot = u64::from(u32::from_le_bytes(number)) * self.pool_stride;
            rows.iter().map(move |(ring, pool)| (*ring, pool + slot))
        })
    }

    /// False if a number leads out of the pool.
    fn run(&self, core: &Core) -> bool {
        let len = self.row_bytes as usize;
        if self.direction == Direction::ToDevice {
            let written = |(_, pool)| (self.pool_base + pool, self.pool_base + pool + self.row_bytes);
            core.check_written(self.places().map(written));
        }
        for (ring, pool) in self.places() {
            let (ring, pool) = (ring as usize, pool as usize);
            if pool + len > self.pool.len() {
                return false;
            }
            match self.direction {
                Direction::ToDevice => self.pool.copy_from(pool, &self.ring, ring, len),
                Direction::ToHost => self.ring.copy_from(ring, &self.pool, pool, len),
            }
        }
        true
    }
}

/// Whether an event is done, and how what came before it ended.
#[derive(Debug, Default)]
pub(super) struct EventState {
    done: Mutex<Option<Result<(), DeviceError>>>,
    changed: Condvar,
}

impl EventState {
    /// An event with nothing before it.
    pub(super) fn done() -> Arc<Self> {
        let state = Self::default();
        state.set(Ok(()));
        Arc::new(state)
    }

    fn set(&self, outcome: Result<(), DeviceError>) {
        lock(&self.done).get_or_insert(outcome);
        self.changed.notify_all();
    }

    pub(super) fn wait(&self) -> Result<(), DeviceError> {
        let mut done = lock(&self.done);
        loop {
            if let Some(outcome) = &*done {
                return outcome.clone();
            }
            done = self.changed.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// False if it is not done within the timeout. Modelled time passes only while a thread waits for it, so the timeout is
    /// always real time.
    pub(super) fn wait_within(&self, timeout: Duration) -> Result<bool, DeviceError> {
        let pace = RealPace::new();
        let give_up = pace.now().plus(timeout);
        let mut done = lock(&self.done);
        loop {
            if let Some(outcome) = &*done {
                return outcome.clone().map(|()| true);
            }
            let left = give_up.since(pace.now());
            if left.is_zero() {
                return Ok(false);
            }
            done = self.changed.wait_timeout(done, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The near end of a stream. Dropping it waits until the stream has done everything.
#[derive(Debug)]
pub(super) struct Queue {
    ops: Option<Sender<Op>>,
    worker: Worker,
    core: Arc<Core>,
}

impl Queue {
    pub(super) fn start(core: &Arc<Core>) -> Result<Self, DeviceError> {
        let (ops, inbox) = channel();
        let theirs = Arc::clone(core);
        let worker = Worker::start("emulated-stream", move || serve(&theirs, &inbox))
            .map_err(|why| DeviceError::Call { call: "stream", why })?;
        core.streams.fetch_add(1, Ordering::AcqRel);
        Ok(Self { ops: Some(ops), worker, core: Arc::clone(core) })
    }

    pub(super) fn push(&self, op: Op) -> Result<(), DeviceError> {
        let sent = self.ops.as_ref().is_some_and(|ops| ops.send(op).is_ok());
        if sent { Ok(()) } else { Err(DeviceError::Lost("the thread of the stream ended".to_owned())) }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.ops = None;
        self.worker.join();
        self.core.streams.fetch_sub(1, Ordering::AcqRel);
    }
}

fn serve(core: &Core, inbox: &Receiver<Op>) {
    // As with CUDA, an error stays: everything behind it in the stream has it.
    let mut failed: Result<(), DeviceError> = Ok(());
    while let Ok(op) = inbox.recv() {
        if let Err(lost) = core.alive() {
            failed = Err(lost);
        }
        match op {
            Op::Record(event) => event.set(failed.clone()),
            Op::Wait(event) => failed = failed.and(event.wait()),
            Op::Read(number, time) => {
                if failed.is_ok() {
                    core.pace.sleep_until(core.pace.now().plus(time));
                }
                core.has_read(number);
            }
            _ if failed.is_err() => {}
            Op::Sample(Sample { of, time, seen }) => {
                let before = of.to_vec();
                core.pace.sleep_until(core.pace.now().plus(time));
                *lock(&seen.0) = Some((before, of.to_vec()));
            }
            Op::Write(into, bytes) => into.copy_in(0, &bytes),
            Op::Slots(op) => {
                core.pace.sleep_until(core.pace.now().plus(op.time));
                if !op.run(core) {
                    let lost = DeviceError::Lost("the device accessed an illegal address".to_owned());
                    core.lose(lost.clone());
                    failed = Err(lost);
                }
            }
            Op::Compute(time) => core.pace.sleep_until(core.pace.now().plus(time)),
            Op::Touch(start, end) => touch(core, start, end),
            Op::Copy { number, direction, time, host, memories, pieces } => {
                failed = copy(core, number, direction, time, &host, &memories, &pieces);
                lock(&core.unfinished).retain(|(other, _)| *other != number);
            }
        }
    }
}

fn touch(core: &Core, start: u64, end: u64) {
    let unfinished = lock(&core.unfinished);
    let mut ranges = unfinished.iter().flat_map(|(_, ranges)| ranges);
    if ranges.any(|&(from, to)| from < end && start < to) {
        core.hazards.fetch_add(1, Ordering::AcqRel);
    }
}

fn copy(
    core: &Core,
    number: u64,
    direction: Direction,
    time: Duration,
    host: &SharedBuf,
    memories: &[SharedBuf],
    pieces: &[Piece],
) -> Result<(), DeviceError> {
    let until = {
        let mut free = lock(&core.link[usize::from(direction == Direction::ToHost)]);
        *free = (*free).max(core.pace.now()).plus(time);
        *free
    };
    let wanted: u64 = pieces.iter().map(|piece| piece.len).sum();
    let is = |fault: Option<u64>| fault == Some(number);
    let cut = is(core.faults.partial_copy) || is(core.faults.lost_at_copy);
    let allowed = if cut { wanted / 2 } else { wanted };
    if core.model.strict {
        core.pace.sleep_until(until);
    }
    if is(core.faults.stuck_copy) {
        core.stick();
        core.alive()?;
    }
    core.check_readers(number);
    let moved = transfer(direction, host, memories, pieces, allowed);
    core.pace.sleep_until(until);
    if is(core.faults.lost_at_copy) {
        let lost = DeviceError::Lost("the emulated device is set to be lost during a copy".to_owned());
        core.lose(lost.clone());
        return Err(lost);
    }
    if moved == wanted { Ok(()) } else { Err(DeviceError::Partial { wanted, moved }) }
}

/// Moves at most `allowed` bytes; gives how many it moved.
fn transfer(
    direction: Direction,
    host: &SharedBuf,
    memories: &[SharedBuf],
    pieces: &[Piece],
    allowed: u64,
) -> u64 {
    let mut left = allowed;
    for piece in pieces {
        let len = piece.len.min(left) as usize;
        let Some(memory) = memories.get(piece.memory as usize) else { break };
        match direction {
            Direction::ToDevice => memory.copy_from(piece.at as usize, host, piece.host as usize, len),
            Direction::ToHost => host.copy_from(piece.host as usize, memory, piece.at as usize, len),
        }
        left -= len as u64;
    }
    allowed - left
}
