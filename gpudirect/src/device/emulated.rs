//! A device made of host memory, for machines without one and for tests.
//!
//! Each stream is a thread that does what it is given in order. A copy occupies the one link of its direction for as
//! long as the [`Model`] says, in honest sleeps: it is never done early, and a sleep that took too long is told as it
//! was. With [`Model::strict`] bytes move only at the end of that time, and a read of memory that a copy has not
//! finished writing is counted as a [hazard](Emulated::hazards): an engine would have computed on garbage. So is a copy
//! into memory that a kernel, enqueued before it, has not finished reading.
//!
//! [`Faults`] make it fail the ways a real device does.

mod files;
mod memory;
mod stream;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::clock::Nanos;

use self::memory::Shared as SharedMemory;
pub use self::stream::Sampled;
use self::stream::{EventState, Op, Queue, Sample, SlotOp};
use super::{
    Batch, Description, Device, Digests, Direction, Event, Files, InUse, IpcHandle, Memory, Method, Piece,
    Route, SlotMove, Stream, check, within,
};
use crate::crc;
use crate::error::DeviceError;
use crate::pace::{Pace, RealPace};

/// Memory within the device is so much faster than the link.
const WITHIN: u64 = 32;

/// How fast the device is. The defaults are round numbers in the region of one PCIe 4.0 link; no device was measured
/// for them.
#[derive(Clone, Debug)]
pub struct Model {
    /// Bytes a second of the link, in each direction.
    pub bytes_per_second: u64,
    /// What a call costs, whatever it moves.
    pub call: Duration,
    /// What each further piece of one call costs, by [`Method::Batch`].
    pub batch_piece: Duration,
    /// How much of the link a kernel gets, in hundredths.
    pub kernel_percent: u32,
    /// What every device address and length must be a multiple of.
    pub align: u64,
    /// Whether bytes move at the end of a copy's time, not at its beginning, and reads are checked.
    pub strict: bool,
    /// Bytes of memory.
    pub memory_bytes: u64,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            bytes_per_second: 20_000_000_000,
            call: Duration::from_micros(5),
            batch_piece: Duration::from_nanos(400),
            kernel_percent: 80,
            align: 1,
            strict: false,
            memory_bytes: 16 << 30,
        }
    }
}

impl Model {
    /// How long a copy occupies the link.
    pub fn time(&self, method: Method, pieces: u64, bytes: u64) -> Duration {
        let wire = |percent: u64| {
            let nanos = u128::from(bytes) * 100_000_000_000
                / (u128::from(self.bytes_per_second.max(1)) * u128::from(percent.max(1)));
            Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
        };
        let times = |each: Duration| each.saturating_mul(u32::try_from(pieces).unwrap_or(u32::MAX));
        match method {
            Method::Each => wire(100).saturating_add(times(self.call)),
            Method::Batch => wire(100).saturating_add(self.call).saturating_add(times(self.batch_piece)),
            Method::Kernel => wire(u64::from(self.kernel_percent)).saturating_add(self.call),
        }
    }
}

/// What is to go wrong. Copies are counted from the device's beginning, calls of [`Device::copy`] each.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Host memory cannot be pinned.
    pub no_pin: bool,
    /// This copy moves only half of its bytes, and says so.
    pub partial_copy: Option<u64>,
    /// The device is lost in the middle of this copy.
    pub lost_at_copy: Option<u64>,
    /// This copy does not end before [`Emulated::unstick`], or the device is declared lost.
    pub stuck_copy: Option<u64>,
    /// Streams cannot be made.
    pub no_stream: bool,
    /// Files cannot be read straight into its memory.
    pub no_files: bool,
    /// This read of a file fails, counted from the device's beginning.
    pub failed_read: Option<u64>,
    /// This read of a file brings a wrong byte and says nothing.
    pub garbled_read: Option<u64>,
    /// This read of a file does not end before [`Emulated::unstick`], or the device is declared lost.
    pub stuck_read: Option<u64>,
    /// It cannot compute digests.
    pub no_digests: bool,
}

/// A copy by its number, and the addresses that it writes; or a kernel, and what it reads.
type Unfinished = (u64, Vec<(u64, u64)>);

/// What the streams of a device share.
#[derive(Debug)]
struct Core {
    model: Model,
    faults: Faults,
    pace: Arc<dyn Pace>,
    copies: AtomicU64,
    lost: Mutex<Option<DeviceError>>,
    /// Reads of files that were begun.
    reads: AtomicU64,
    /// Whether every read of a file fails.
    reads_fail: AtomicBool,
    /// Files that are open, and memories that they are read into.
    files: AtomicU64,
    /// Whether what is stuck may end.
    unstuck: Mutex<bool>,
    /// The device was lost, or a copy may end.
    stirred: Condvar,
    /// When the link of each direction is free.
    link: [Mutex<Nanos>; 2],
    /// Copies that are not finished, while reads are checked.
    unfinished: Mutex<Vec<Unfinished>>,
    /// Kernels that read memory, counted from the device's beginning, and those that have not ended.
    kernels: AtomicU64,
    reading: Mutex<Vec<Unfinished>>,
    hazards: AtomicU64,
    memories: AtomicU64,
    allocated: AtomicU64,
    opened: AtomicU64,
    streams: AtomicU64,
    pins: Mutex<Vec<u64>>,
    /// Streams by their numbers.
    queues: Mutex<Vec<(u64, std::sync::Weak<dyn Any + Send + Sync>)>>,
    /// What was allocated, for those who adopt it by its address.
    table: Mutex<Vec<(u64, std::sync::Weak<SharedMemory>)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Everything under these locks is changed in one step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The device.
#[derive(Clone, Debug)]
pub struct Emulated(Arc<Core>);

impl Emulated {
    /// A device in real time that does not fail.
    pub fn new(model: Model) -> Self {
        Self::with(model, Faults::default(), RealPace::new())
    }

    /// A device in a time of the caller's choice that fails as it is told.
    pub fn with(model: Model, faults: Faults, pace: Arc<dyn Pace>) -> Self {
        Self(Arc::new(Core {
            model,
            faults,
            pace,
            copies: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            reads_fail: AtomicBool::new(false),
            files: AtomicU64::new(0),
            lost: Mutex::new(None),
            unstuck: Mutex::new(false),
            stirred: Condvar::new(),
            link: [Mutex::new(Nanos(0)), Mutex::new(Nanos(0))],
            unfinished: Mutex::new(Vec::new()),
            kernels: AtomicU64::new(0),
            reading: Mutex::new(Vec::new()),
            hazards: AtomicU64::new(0),
            memories: AtomicU64::new(0),
            allocated: AtomicU64::new(0),
            opened: AtomicU64::new(0),
            streams: AtomicU64::new(0),
            pins: Mutex::new(Vec::new()),
            queues: Mutex::new(Vec::new()),
            table: Mutex::new(Vec::new()),
        }))
    }

    /// Memory of this process as memory of the device: an engine's that computes on the processor.
    pub fn over(&self, buf: &SharedBuf) -> Memory {
        let memory = Arc::new(SharedMemory::over(&self.0, buf));
        let base = memory.base();
        handed_out(memory, base, buf.len() as u64)
    }

    /// The number of a stream, by which [`Device::adopt_stream`] knows it as long as it lives.
    pub fn handle_of(&self, stream: &Stream) -> Result<u64, DeviceError> {
        queue_of(stream).map(number_of)
    }

    /// Enqueues work that takes `time`: an engine's kernels of one layer.
    pub fn compute(&self, stream: &Stream, time: Duration) -> Result<(), DeviceError> {
        self.push(stream, Op::Compute(time))
    }

    /// Enqueues a kernel that reads memory for so long. A copy into that memory that begins before it has ended is counted
    /// as a hazard, from this call on.
    pub fn read_for(
        &self,
        stream: &Stream,
        memory: &Memory,
        (at, len): (u64, u64),
        time: Duration,
    ) -> Result<(), DeviceError> {
        let start = memory.base.saturating_add(at);
        let number = self.0.kernels.fetch_add(1, Ordering::AcqRel);
        lock(&self.0.reading).push((number, vec![(start, start.saturating_add(len))]));
        let pushed = self.push(stream, Op::Read(number, time));
        if pushed.is_err() {
            self.0.has_read(number);
        }
        pushed
    }

    /// Enqueues a read of memory, as a kernel would: counted as a hazard if a copy to it is not finished then.
    pub fn touch(&self, stream: &Stream, memory: &Memory, at: u64, len: u64) -> Result<(), DeviceError> {
        let start = memory.base.saturating_add(at);
        self.push(stream, Op::Touch(start, start.saturating_add(len)))
    }

    /// Enqueues a kernel that reads memory for so long: the answer tells later what it has seen there. Bytes that come too late, or that are
    /// replaced too early, are seen as what they are.
    pub fn sample(
        &self,
        stream: &Stream,
        memory: &Memory,
        (at, len): (u64, u64),
        time: Duration,
    ) -> Result<Sampled, DeviceError> {
        let outside = || DeviceError::OutOfBounds;
        let (at, len) =
            (usize::try_from(at).map_err(|_| outside())?, usize::try_from(len).map_err(|_| outside())?);
        let of = memory_of(memory)?.slice(at, len).ok_or_else(outside)?;
        let sampled = Sampled::default();
        self.push(stream, Op::Sample(Sample { of, time, seen: sampled.clone() }))?;
        Ok(sampled)
    }

    /// Enqueues a kernel that writes bytes into memory.
    pub fn write(
        &self,
        stream: &Stream,
        memory: &Memory,
        at: u64,
        bytes: Vec<u8>,
    ) -> Result<(), DeviceError> {
        let at = usize::try_from(at).map_err(|_| DeviceError::OutOfBounds)?;
        let into = memory_of(memory)?.slice(at, bytes.len()).ok_or(DeviceError::OutOfBounds)?;
        self.push(stream, Op::Write(into, bytes))
    }

    /// Reads of files that were begun.
    pub fn reads(&self) -> u64 {
        self.0.reads.load(Ordering::Acquire)
    }

    /// Has every read of a file fail from now on, or none but what [`Faults`] say.
    pub fn fail_reads(&self, fail: bool) {
        self.0.reads_fail.store(fail, Ordering::Release);
    }

    /// Lets end what is stuck.
    pub fn unstick(&self) {
        *lock(&self.0.unstuck) = true;
        self.0.stirred.notify_all();
    }

    /// How many reads met memory whose copy was not finished, and how many copies memory that was being read.
    pub fn hazards(&self) -> u64 {
        self.0.hazards.load(Ordering::Acquire)
    }

    /// The bytes that device memory holds now.
    pub fn peek(&self, memory: &Memory, at: u64, len: u64) -> Option<Vec<u8>> {
        let buf = memory_of(memory).ok()?;
        Some(buf.slice(usize::try_from(at).ok()?, usize::try_from(len).ok()?)?.to_vec())
    }

    /// Puts bytes into device memory at once, as an engine's kernels would have.
    pub fn poke(&self, memory: &Memory, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let at = usize::try_from(at).map_err(|_| DeviceError::OutOfBounds)?;
        let buf = memory_of(memory)?.slice(at, bytes.len()).ok_or(DeviceError::OutOfBounds)?;
        buf.copy_in(0, bytes);
        Ok(())
    }

    fn push(&self, stream: &Stream, op: Op) -> Result<(), DeviceError> {
        self.0.alive()?;
        queue_of(stream)?.push(op)
    }

    /// Enqueues a copy between `near` and memories.
    fn move_pieces(
        &self,
        stream: &Stream,
        (direction, method): (Direction, Method),
        near: SharedBuf,
        memories: &[Memory],
        pieces: &[Piece],
    ) -> Result<(), DeviceError> {
        let bufs = memories.iter().map(memory_of).collect::<Result<Vec<_>, _>>()?;
        let number = self.0.copies.fetch_add(1, Ordering::AcqRel);
        if self.0.model.strict && direction == Direction::ToDevice {
            let range = |piece: &Piece| {
                let base = memories.get(piece.memory as usize).map_or(0, |memory| memory.base);
                (base + piece.at, base + piece.at + piece.len)
            };
            lock(&self.0.unfinished).push((number, pieces.iter().map(range).collect()));
        }
        let bytes = pieces.iter().map(|piece| piece.len).sum();
        queue_of(stream)?.push(Op::Copy {
            number,
            direction,
            time: self.0.model.time(method, pieces.len() as u64, bytes),
            host: near,
            memories: bufs,
            pieces: pieces.to_vec(),
        })
    }
}

impl Core {
    fn lose(&self, lost: DeviceError) {
        lock(&self.lost).get_or_insert(lost);
        // A thread that looks between the change and the notification holds this lock, so no thread misses it.
        drop(lock(&self.unstuck));
        self.stirred.notify_all();
    }

    /// Returns when a stuck copy may end, or the device is lost.
    fn stick(&self) {
        let mut unstuck = lock(&self.unstuck);
        while !*unstuck && self.alive().is_ok() {
            unstuck = self.stirred.wait(unstuck).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A kernel reads its memory no longer.
    fn has_read(&self, number: u64) {
        lock(&self.reading).retain(|(other, _)| *other != number);
    }

    /// Counts a copy that writes what a kernel still reads.
    fn check_readers(&self, copy: u64) {
        let unfinished = lock(&self.unfinished);
        let writes = unfinished.iter().filter(|(number, _)| *number == copy).flat_map(|(_, ranges)| ranges);
        self.check_written(writes.copied());
    }

    /// The same of any work that writes there.
    fn check_written(&self, mut writes: impl Iterator<Item = (u64, u64)>) {
        let reading = lock(&self.reading);
        let is_read = |(from, to): (u64, u64)| {
            reading.iter().flat_map(|(_, ranges)| ranges).any(|&(start, end)| from < end && start < to)
        };
        if !reading.is_empty() && writes.any(is_read) {
            self.hazards.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn alive(&self) -> Result<(), DeviceError> {
        lock(&self.lost).clone().map_or(Ok(()), Err)
    }

    fn allocation(self: &Arc<Self>, bytes: u64) -> Result<SharedMemory, DeviceError> {
        let before = self.allocated.fetch_add(bytes, Ordering::AcqRel);
        if before.saturating_add(bytes) > self.model.memory_bytes {
            self.allocated.fetch_sub(bytes, Ordering::AcqRel);
            return Err(DeviceError::NoMemory(bytes));
        }
        let made = SharedMemory::create(self, bytes);
        if made.is_err() {
            self.allocated.fetch_sub(bytes, Ordering::AcqRel);
        }
        made
    }
}

/// The host memory that stands for device memory.
fn memory_of(memory: &Memory) -> Result<SharedBuf, DeviceError> {
    let shared =
        memory.raw.downcast_ref::<Adopted>().ok_or(DeviceError::Foreign("memory of another device"))?;
    let at = memory.base.checked_sub(shared.0.base()).and_then(|at| usize::try_from(at).ok());
    let len = usize::try_from(memory.len).ok();
    at.zip(len).and_then(|(at, len)| shared.0.buf().slice(at, len)).ok_or(DeviceError::OutOfBounds)
}

fn queue_of(stream: &Stream) -> Result<&Queue, DeviceError> {
    stream.0.downcast_ref().ok_or(DeviceError::Foreign("a stream of another device"))
}

/// Where it lies says which one it is, as long as it lives.
fn number_of(queue: &Queue) -> u64 {
    std::ptr::from_ref(queue).addr() as u64
}

fn state_of(event: &Event) -> Result<&Arc<EventState>, DeviceError> {
    event.0.downcast_ref().ok_or(DeviceError::Foreign("an event of another device"))
}

/// A share in memory that the device allocated or opened.
struct Adopted(Arc<SharedMemory>);

fn handed_out(memory: Arc<SharedMemory>, base: u64, bytes: u64) -> Memory {
    Memory::new(base, bytes, Arc::new(Adopted(memory)))
}

impl Device for Emulated {
    fn describe(&self) -> Description {
        Description {
            kind: "emulated".to_owned(),
            name: format!("host memory, {} MB/s", self.0.model.bytes_per_second / 1_000_000),
            memory_bytes: Some(self.0.model.memory_bytes),
            notes: vec![
                "this device is emulated: its times come from a model, and no device was measured".to_owned(),
            ],
        }
    }

    fn methods(&self) -> &[Method] {
        &Method::ALL
    }

    fn allocate(&self, bytes: u64) -> Result<Memory, DeviceError> {
        self.0.alive()?;
        let memory = Arc::new(self.0.allocation(bytes)?);
        let base = memory.base();
        let mut table = lock(&self.0.table);
        table.retain(|(_, memory)| memory.strong_count() > 0);
        table.push((base, Arc::downgrade(&memory)));
        drop(table);
        Ok(handed_out(memory, base, bytes))
    }

    fn adopt(&self, base: u64, bytes: u64) -> Result<Memory, DeviceError> {
        let end = base.checked_add(bytes).ok_or(DeviceError::OutOfBounds)?;
        let table = lock(&self.0.table);
        let known = table.iter().filter_map(|(_, memory)| memory.upgrade());
        let mut holds = known.filter(|memory| memory.base() <= base && end <= memory.base() + memory.len());
        let memory = holds.next().ok_or(DeviceError::OutOfBounds)?;
        Ok(handed_out(memory, base, bytes))
    }

    fn pin(&self, region: &Arc<Region>) -> Result<(), DeviceError> {
        if self.0.faults.no_pin {
            return Err(DeviceError::Pin("the emulated device is set to refuse pinning".to_owned()));
        }
        lock(&self.0.pins).push(region.id());
        Ok(())
    }

    fn unpin(&self, region: &Arc<Region>) {
        let mut pins = lock(&self.0.pins);
        if let Some(at) = pins.iter().position(|&id| id == region.id()) {
            pins.swap_remove(at);
        }
    }

    fn stream(&self) -> Result<Stream, DeviceError> {
        self.0.alive()?;
        if self.0.faults.no_stream {
            return Err(DeviceError::Call {
                call: "stream",
                why: "the emulated device is set to refuse streams".to_owned(),
            });
        }
        let queue = Arc::new(Queue::start(&self.0)?);
        let mut queues = lock(&self.0.queues);
        queues.retain(|(_, queue)| queue.strong_count() > 0);
        let weak = Arc::downgrade(&queue);
        queues.push((number_of(&queue), weak as std::sync::Weak<dyn Any + Send + Sync>));
        Ok(Stream(queue))
    }

    fn adopt_stream(&self, handle: u64) -> Result<Stream, DeviceError> {
        let queues = lock(&self.0.queues);
        let known =
            queues.iter().find(|(number, _)| *number == handle).and_then(|(_, queue)| queue.upgrade());
        let queue = known.ok_or(DeviceError::Foreign(
            "a stream of another device: create the stream with the emulated device",
        ))?;
        Ok(Stream(queue))
    }

    fn copy(&self, stream: &Stream, batch: &Batch<'_>) -> Result<(), DeviceError> {
        self.0.alive()?;
        batch.check(self.0.model.align)?;
        let how = (batch.direction, batch.method);
        self.move_pieces(stream, how, batch.host.clone(), batch.memories, batch.pieces)
    }

    fn spread(
        &self,
        stream: &Stream,
        from: &Memory,
        memories: &[Memory],
        pieces: &[Piece],
    ) -> Result<(), DeviceError> {
        self.0.alive()?;
        check(pieces, from.len, memories, self.0.model.align)?;
        self.move_pieces(stream, (Direction::ToDevice, Method::Kernel), memory_of(from)?, memories, pieces)
    }

    fn owns(&self, memory: &Memory) -> Result<(), DeviceError> {
        memory_of(memory).map(drop)
    }

    fn can_move_slots(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn move_slots(&self, stream: &Stream, moved: &SlotMove<'_>) -> Result<(), DeviceError> {
        self.0.alive()?;
        moved.check()?;
        let (slots, first, count) = moved.slots;
        // The rows of each slot count from zero; where the slot lies is known when the move runs.
        let rows = |ordinal| moved.rows(ordinal, 0).collect();
        let time = self.0.model.time(Method::Kernel, 1, moved.bytes() / WITHIN);
        queue_of(stream)?.push(Op::Slots(SlotOp {
            direction: moved.direction,
            time,
            ring: memory_of(moved.ring.0)?,
            pool: memory_of(moved.pool)?,
            pool_base: moved.pool.base,
            slots: memory_of(slots)?,
            first,
            rows: (0..count).map(rows).collect(),
            pool_stride: moved.shape.pool_stride,
            row_bytes: moved.shape.row_bytes,
        }))
    }

    fn files(&self, _: Route) -> Result<Arc<dyn Files>, DeviceError> {
        files::open(&self.0)
    }

    fn record(&self, stream: &Stream) -> Result<Event, DeviceError> {
        let state = Arc::new(EventState::default());
        self.push(stream, Op::Record(Arc::clone(&state)))?;
        Ok(Event(Arc::new(state)))
    }

    fn wait(&self, stream: &Stream, event: &Event) -> Result<(), DeviceError> {
        self.push(stream, Op::Wait(Arc::clone(state_of(event)?)))
    }

    fn synchronize(&self, event: &Event) -> Result<(), DeviceError> {
        state_of(event)?.wait()
    }

    fn synchronize_within(&self, event: &Event, timeout: Duration) -> Result<bool, DeviceError> {
        state_of(event)?.wait_within(timeout)
    }

    fn declare_lost(&self, why: &str) {
        self.0.lose(DeviceError::Lost(why.to_owned()));
    }

    fn can_digest(&self) -> Result<(), DeviceError> {
        self.0.alive()?;
        if self.0.faults.no_digests { Err(super::NO_DIGESTS) } else { Ok(()) }
    }

    fn begin_digests(&self, memory: &Memory, chunks: &[(u64, u64)]) -> Result<Digests, DeviceError> {
        self.can_digest()?;
        within(memory, chunks)?;
        let buf = memory_of(memory)?;
        let digest = |&(at, len): &(u64, u64)| {
            buf.digest(at as usize, len as usize, |bytes| crc::twin(bytes, crc::THREADS))
        };
        let found = chunks.iter().map(digest).collect();
        Ok(Digests::new(Event(Arc::new(EventState::done())), move || Ok(found)))
    }

    fn export(&self, memory: &Memory) -> Result<IpcHandle, DeviceError> {
        let adopted = memory.raw.downcast_ref::<Adopted>().ok_or(DeviceError::Foreign("this memory"))?;
        if !adopted.0.has_file() {
            return Err(DeviceError::Foreign("memory that was not allocated on this device"));
        }
        if memory.base != adopted.0.base() {
            return Err(DeviceError::Foreign(
                "a handle for a part of an allocation: export the whole allocation",
            ));
        }
        Ok(adopted.0.handle())
    }

    fn import(&self, handle: &IpcHandle, bytes: u64) -> Result<Memory, DeviceError> {
        let memory = Arc::new(SharedMemory::open(&self.0, handle, bytes)?);
        let base = memory.base();
        Ok(handed_out(memory, base, bytes))
    }

    fn in_use(&self) -> InUse {
        InUse {
            memories: self.0.memories.load(Ordering::Acquire),
            pinned: lock(&self.0.pins).len() as u64,
            streams: self.0.streams.load(Ordering::Acquire),
            opened: self.0.opened.load(Ordering::Acquire),
            files: self.0.files.load(Ordering::Acquire),
        }
    }
}
