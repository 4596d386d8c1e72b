//! Devices behind one small trait: memory, batches of copies, streams, events.
//!
//! The words are CUDA's. A stream does what it is given in order; an event is a point in a stream; another stream or
//! the processor can wait for it. The caller that enqueues a copy keeps its host memory unchanged until an event behind
//! the copy is done. An error of a copy is reported at that event at the latest.

pub mod cuda;
pub mod emulated;
mod files;
pub mod name;
pub mod slots;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::buffers::{Region, SharedBuf};

use crate::error::DeviceError;

pub use files::{Files, OpenFile, Registered, Route};
use slots::SlotMove;

/// What a device is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Description {
    /// `emulated`, or `cuda:0` and so on.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// Bytes of memory, if known.
    pub memory_bytes: Option<u64>,
    /// What an operator should know.
    pub notes: Vec<String>,
}

/// A way to move many pieces.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Method {
    /// One asynchronous copy for each piece.
    Each,
    /// One call for all pieces (`cuMemcpyBatchAsync`).
    Batch,
    /// A small kernel that reads pinned host memory.
    Kernel,
}

impl Method {
    /// All of them, the simplest first.
    pub const ALL: [Self; 3] = [Self::Each, Self::Batch, Self::Kernel];

    /// As it is printed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Each => "each",
            Self::Batch => "batch",
            Self::Kernel => "kernel",
        }
    }
}

/// Which way a copy goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From host memory to the device.
    ToDevice,
    /// From the device to host memory.
    ToHost,
}

/// Memory of a device. Cheap to clone; the last clone gives it back, unless it was adopted.
#[derive(Clone)]
pub struct Memory {
    base: u64,
    len: u64,
    raw: Arc<dyn Any + Send + Sync>,
}

impl Memory {
    fn new(base: u64, len: u64, raw: Arc<dyn Any + Send + Sync>) -> Self {
        Self { base, len, raw }
    }

    /// The address, as the device counts.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes)", self.len)
    }
}

/// A queue of work on a device.
#[derive(Clone)]
pub struct Stream(Arc<dyn Any + Send + Sync>);

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stream")
    }
}

/// A point in a stream.
#[derive(Clone)]
pub struct Event(Arc<dyn Any + Send + Sync>);

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Event")
    }
}

/// One stretch of bytes on both sides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Which of the batch's memories.
    pub memory: u32,
    /// Where in that memory.
    pub at: u64,
    /// Where in the batch's host buffer.
    pub host: u64,
    /// Bytes.
    pub len: u64,
}

/// Pieces that are copied together.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Which way.
    pub direction: Direction,
    /// How.
    pub method: Method,
    /// The host's side.
    pub host: &'a SharedBuf,
    /// The device's side.
    pub memories: &'a [Memory],
    /// What goes where.
    pub pieces: &'a [Piece],
}

impl Batch<'_> {
    /// Bytes in all.
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len).sum()
    }

    /// Refuses a piece that leaves its memory on either side, or that the device cannot take as it lies.
    pub fn check(&self, align: u64) -> Result<(), DeviceError> {
        check(self.pieces, self.host.len() as u64, self.memories, align)
    }
}

/// The same for pieces whose other side has `bytes` bytes.
fn check(pieces: &[Piece], bytes: u64, memories: &[Memory], align: u64) -> Result<(), DeviceError> {
    for piece in pieces {
        let memory = memories.get(piece.memory as usize).ok_or(DeviceError::OutOfBounds)?;
        let inside = |at: u64, len: u64| at.checked_add(piece.len).is_some_and(|end| end <= len);
        if !inside(piece.at, memory.len) || !inside(piece.host, bytes) {
            return Err(DeviceError::OutOfBounds);
        }
        if let Some(&at) = [memory.base.wrapping_add(piece.at), piece.len].iter().find(|at| *at % align != 0)
        {
            return Err(DeviceError::Misaligned { at, align });
        }
    }
    Ok(())
}

/// How long digests may take, unless a call says otherwise.
const DIGEST_TIMEOUT: Duration = Duration::from_secs(30);

/// What a device says that cannot compute digests.
const NO_DIGESTS: DeviceError = DeviceError::Foreign("kernels for digests of chunks");

/// Digests that a device was asked for, which it may still compute. The caller that asked keeps the memory until the event
/// is done, and keeps this value until it has taken the digests.
pub struct Digests {
    event: Event,
    found: Box<dyn FnOnce() -> Result<Vec<u32>, DeviceError> + Send>,
}

impl Digests {
    fn new(event: Event, found: impl FnOnce() -> Result<Vec<u32>, DeviceError> + Send + 'static) -> Self {
        Self { event, found: Box::new(found) }
    }

    /// Behind all that the device does for them.
    pub fn event(&self) -> &Event {
        &self.event
    }

    /// The digests, in the order of the chunks. Only right once the event is done.
    pub fn found(self) -> Result<Vec<u32>, DeviceError> {
        (self.found)()
    }
}

impl fmt::Debug for Digests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Digests")
    }
}

/// Refuses a chunk that leaves its memory.
fn within(memory: &Memory, chunks: &[(u64, u64)]) -> Result<(), DeviceError> {
    let inside = |chunk: &(u64, u64)| chunk.0.checked_add(chunk.1).is_some_and(|end| end <= memory.len);
    if chunks.iter().all(inside) { Ok(()) } else { Err(DeviceError::OutOfBounds) }
}

/// What of a device is in use. Tests compare it before and after.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct InUse {
    /// Memories that were allocated and not given back.
    pub memories: u64,
    /// Regions of host memory that are pinned.
    pub pinned: u64,
    /// Streams.
    pub streams: u64,
    /// Memories of other processes that are open.
    pub opened: u64,
    /// Files that are open for it, and memories that they are read into.
    pub files: u64,
}

/// The name of device memory for another process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct IpcHandle(pub [u8; 64]);

/// A device. Methods may be called from any thread; none but [`Device::synchronize`],
/// [`Device::synchronize_within`] and [`Device::digests_within`] waits for the device's work. Reads of files wait as well.
pub trait Device: Send + Sync + fmt::Debug {
    /// What it is.
    fn describe(&self) -> Description;
    /// The ways it has to move many pieces.
    fn methods(&self) -> &[Method];
    /// Memory of its own.
    fn allocate(&self, bytes: u64) -> Result<Memory, DeviceError>;
    /// Memory that other code in this process allocated on this device: an engine's pool. It must stay until the last clone
    /// of the answer is gone. An address that is not this device's is refused.
    fn adopt(&self, base: u64, bytes: u64) -> Result<Memory, DeviceError>;
    /// Pins host memory, so that copies from it need no other copy. Pinning it again counts again.
    fn pin(&self, region: &Arc<Region>) -> Result<(), DeviceError>;
    /// Ends one [`Device::pin`]. No copy from the region may be under way.
    fn unpin(&self, region: &Arc<Region>);
    /// A new stream.
    fn stream(&self) -> Result<Stream, DeviceError>;
    /// A stream of the engine, by its handle (`CUstream` as a number). It must stay until the answer is gone.
    fn adopt_stream(&self, handle: u64) -> Result<Stream, DeviceError>;
    /// Enqueues copies. The host's side must stay as it is until an event behind them is done.
    fn copy(&self, stream: &Stream, batch: &Batch<'_>) -> Result<(), DeviceError>;
    /// Enqueues copies from one memory of this device to others of it, as [`Device::copy`] does; a piece's `host` is its
    /// offset in `from`, which must stay as it is until an event behind them is done.
    fn spread(
        &self,
        stream: &Stream,
        from: &Memory,
        memories: &[Memory],
        pieces: &[Piece],
    ) -> Result<(), DeviceError>;
    /// Whether memory is this device's own, or an error that says that it is not.
    fn owns(&self, memory: &Memory) -> Result<(), DeviceError>;
    /// Whether [`Device::move_slots`] works here, or why not.
    fn can_move_slots(&self) -> Result<(), DeviceError>;
    /// Enqueues a move of rows between two memories of this device, which must both stay until an event behind it is done. The numbers of
    /// the slots are read when the move runs.
    fn move_slots(&self, stream: &Stream, moved: &SlotMove<'_>) -> Result<(), DeviceError>;
    /// Reads of files into this device's memory, or why it has none.
    fn files(&self, route: Route) -> Result<Arc<dyn Files>, DeviceError>;
    /// A point behind everything that was enqueued.
    fn record(&self, stream: &Stream) -> Result<Event, DeviceError>;
    /// What is enqueued from now on runs after the event. The caller's thread does not wait.
    fn wait(&self, stream: &Stream, event: &Event) -> Result<(), DeviceError>;
    /// Waits on this thread until the event is done; an error is that of the work before it, or of a device that does
    /// not say ([`DeviceError::is_an_end`] tells which).
    fn synchronize(&self, event: &Event) -> Result<(), DeviceError>;
    /// The same for so long at most: false if it is not done by then.
    fn synchronize_within(&self, event: &Event, timeout: Duration) -> Result<bool, DeviceError>;
    /// Judges an error with which the device answered until the timeout was over. The device is lost if a call that has to do
    /// with no work is answered in the same way. Any other error is returned as it is.
    fn confirm(&self, error: DeviceError) -> DeviceError {
        error
    }
    /// Declares the device lost: callers that wait for it are told so, and every later call fails. Meant for a device that
    /// does not answer: only its operator can know that it writes to nothing any more.
    fn declare_lost(&self, why: &str);
    /// Whether it can compute digests, or why not.
    fn can_digest(&self) -> Result<(), DeviceError>;
    /// Begins to compute the store's digest of chunks of memory (where they begin, and their bytes), where they lie. The
    /// memory must stay as it is until the answer's event is done.
    fn begin_digests(&self, memory: &Memory, chunks: &[(u64, u64)]) -> Result<Digests, DeviceError>;
    /// The same, and waits for them, but no longer than `timeout`: then the device is [`DeviceError::Stuck`], and may
    /// still read the memory.
    fn digests_within(
        &self,
        memory: &Memory,
        chunks: &[(u64, u64)],
        timeout: Duration,
    ) -> Result<Vec<u32>, DeviceError> {
        self.can_digest()?;
        if chunks.is_empty() {
            return Ok(Vec::new());
        }
        let asked = self.begin_digests(memory, chunks)?;
        match self.synchronize_within(asked.event(), timeout)? {
            true => asked.found(),
            false => Err(DeviceError::stuck(timeout)),
        }
    }
    /// The same, with a timeout of half a minute.
    fn digests(&self, memory: &Memory, chunks: &[(u64, u64)]) -> Result<Vec<u32>, DeviceError> {
        self.digests_within(memory, chunks, DIGEST_TIMEOUT)
    }
    /// A name of memory that this device allocated, for another process.
    fn export(&self, memory: &Memory) -> Result<IpcHandle, DeviceError>;
    /// Memory of another process. Use [`crate::ipc::Opened`], which opens each once.
    fn import(&self, handle: &IpcHandle, bytes: u64) -> Result<Memory, DeviceError>;
    /// What is in use.
    fn in_use(&self) -> InUse;
}

/// Waits until everything that was enqueued on a stream is done.
pub fn drain(device: &dyn Device, stream: &Stream) -> Result<(), DeviceError> {
    device.synchronize(&device.record(stream)?)
}
