//! The calls into the CUDA driver, each with the reason why it may be made.
//!
//! This file may hold `unsafe`. Handles are wrapped so that each lives exactly as long as its owner; the context is
//! the device's primary one, which the engine in the same process shares. It is pushed before every call and popped
//! behind it ([`Entered`]), also on threads of the engine, which find their own context as it was.
//! The calls themselves are looked up in `calls`; handles, structures and constants are those of the bindings.

pub(super) mod events;

use std::ffi::{CStr, c_int, c_void};
use std::marker::PhantomData;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys as cu;
use cudarc::driver::sys::CUpointer_attribute as Ask;
use kvarts_contract::buffers::Region;

use super::super::slots::{SlotMove, SlotShape};
use super::super::{Batch, Direction, Memory, Piece};
use super::calls::{Calls, Code};
use crate::error::DeviceError;

/// Pieces that one launch takes: its table is a kernel parameter, which may have 4096 bytes.
const TABLE: usize = 160;
/// Threads of a block, and blocks of a launch: a few multiprocessors fill a link and leave the rest to the engine.
const THREADS: u32 = 512;
const BLOCKS: u32 = 16;
/// Blocks of a launch that digests, and from how many chunks on each warp has a chunk of its own: as many as keep all
/// multiprocessors of a large device busy.
const DIGEST_BLOCKS: u32 = 1024;
const MANY_CHUNKS: usize = 4096;
/// Threads of a warp.
const WARP: u32 = 32;
/// Threads of a block that moves rows of slots, the most blocks of a launch, and how much of a row a warp takes at a time, as the kernel
/// has it.
const SLOT_THREADS: u32 = 256;
const SLOT_BLOCKS: u64 = 128;
const SLOT_PIECE: u64 = 4096;
/// A launch that fills a device: several blocks for each of its multiprocessors.
const BUSY_BLOCKS: u32 = 1056;
const BUSY_THREADS: u32 = 256;
/// The flag of streams that do not wait for the default stream.
const NON_BLOCKING: u32 = 1;

/// What a call said, as a result.
fn check(call: &'static str, code: Code) -> Result<(), DeviceError> {
    let why = || Calls::get().map_or_else(|_| format!("error {code}"), |calls| calls.name(code));
    match code {
        0 => Ok(()),
        OUT_OF_MEMORY => Err(DeviceError::NoMemory(0)),
        NO_DEVICE | INVALID_DEVICE => Err(DeviceError::Absent(why())),
        _ if LOST.contains(&code) => Err(DeviceError::Lost(format!("{call}: {}", why()))),
        _ => Err(DeviceError::Call { call, why: why() }),
    }
}

const OUT_OF_MEMORY: Code = cu::CUresult::CUDA_ERROR_OUT_OF_MEMORY as Code;
const NO_DEVICE: Code = cu::CUresult::CUDA_ERROR_NO_DEVICE as Code;
const INVALID_DEVICE: Code = cu::CUresult::CUDA_ERROR_INVALID_DEVICE as Code;
const NOT_READY: Code = cu::CUresult::CUDA_ERROR_NOT_READY as Code;
const CAPTURE_UNSUPPORTED: Code = cu::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as Code;
const CAPTURE_IMPLICIT: Code = cu::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT as Code;

const ALREADY_REGISTERED: Code = cu::CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED as Code;

/// Whose memory an address is, as the driver answers.
const HOST: u64 = cu::CUmemorytype_enum::CU_MEMORYTYPE_HOST as u64;
const DEVICE: u64 = cu::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE as u64;

/// What is said because a graph is captured.
const CAPTURES: RangeInclusive<Code> =
    CAPTURE_UNSUPPORTED..=cu::CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD as Code;

/// After these nothing in the context works any more, and no work of it goes on.
const LOST: [Code; 13] = [
    cu::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS as Code,
    cu::CUresult::CUDA_ERROR_LAUNCH_FAILED as Code,
    cu::CUresult::CUDA_ERROR_LAUNCH_TIMEOUT as Code,
    cu::CUresult::CUDA_ERROR_ASSERT as Code,
    cu::CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION as Code,
    cu::CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE as Code,
    cu::CUresult::CUDA_ERROR_INVALID_PC as Code,
    cu::CUresult::CUDA_ERROR_ECC_UNCORRECTABLE as Code,
    cu::CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR as Code,
    cu::CUresult::CUDA_ERROR_MISALIGNED_ADDRESS as Code,
    cu::CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED as Code,
    cu::CUresult::CUDA_ERROR_DEINITIALIZED as Code,
    cu::CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE as Code,
];

/// The library's calls.
fn calls() -> Result<&'static Calls, DeviceError> {
    Calls::get().map_err(DeviceError::Absent)
}

/// How many devices there are.
pub(super) fn count() -> Result<u32, DeviceError> {
    let calls = calls()?;
    let absent = |error: DeviceError| match error {
        DeviceError::Call { call, why } => DeviceError::Absent(format!("{call}: {why}")),
        other => other,
    };
    // SAFETY: the call may be repeated.
    let code = unsafe { (calls.init)(0) };
    if code == cu::CUresult::CUDA_ERROR_STUB_LIBRARY as Code {
        return Err(DeviceError::Absent(super::calls::STUB.to_owned()));
    }
    check("cuInit", code).map_err(absent)?;
    let mut count: c_int = 0;
    // SAFETY: writes one int.
    check("cuDeviceGetCount", unsafe { (calls.device_count)(&raw mut count) }).map_err(absent)?;
    match u32::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(DeviceError::Absent("the driver found no device".to_owned())),
    }
}

/// The primary context of a device.
#[derive(Debug)]
struct Primary {
    raw: cu::CUcontext,
    device: cu::CUdevice,
    ordinal: u32,
    calls: &'static Calls,
}

// SAFETY: the driver's contexts may be made current by any thread, at the same time too.
unsafe impl Send for Primary {}
// SAFETY: as above.
unsafe impl Sync for Primary {}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: retained once in `retain`; everything made in it holds this and is gone.
        let _ = unsafe { (self.calls.release)(self.device) };
    }
}

/// A device's context, held by everything that is made in it.
#[derive(Clone, Debug)]
pub(super) struct Context(Arc<Primary>);

/// A thread inside a context, as long as this lives: then it is where it was before.
///
/// While it is inside, its calls neither fail because the engine captures a graph in another thread, nor break that
/// capture: nothing of ours belongs into a graph.
#[must_use = "the thread leaves the context when this value is dropped"]
pub(super) struct Entered<'a> {
    calls: &'static Calls,
    /// How the thread met captures before, if the driver has a word for that.
    captures: Option<c_int>,
    // It belongs to the thread that entered, and goes before the context.
    _here: PhantomData<(&'a Context, *const ())>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let (Some(mode), Some(swap)) = (&mut self.captures, self.calls.capture_mode) {
            // SAFETY: swaps the thread's mode for the one that it had; an enum of C is an int.
            let _ = unsafe { swap((&raw mut *mode).cast()) };
        }
        let mut left = std::ptr::null_mut();
        // SAFETY: writes one handle: that of the context which `enter` pushed on this thread.
        let _ = unsafe { (self.calls.pop)(&raw mut left) };
    }
}

/// Where memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Allocated,
    Adopted,
    Opened,
}

/// Device memory.
#[derive(Debug)]
pub(super) struct RawMemory {
    context: Context,
    base: cu::CUdeviceptr,
    len: u64,
    kind: Kind,
}

impl RawMemory {
    pub(super) fn base(&self) -> u64 {
        self.base
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }
}

impl Drop for RawMemory {
    fn drop(&mut self) {
        // Without a context the device is lost, and its memory with it.
        let Ok(_inside) = self.context.enter() else { return };
        // No caller is left to be told of an error.
        let _ = match self.kind {
            // SAFETY: made by `allocate` and given back once; freeing waits for the device.
            Kind::Allocated => unsafe { (self.context.calls().free)(self.base) },
            // SAFETY: opened by `import` and closed once.
            Kind::Opened => unsafe { (self.context.calls().ipc_close)(self.base) },
            Kind::Adopted => 0,
        };
    }
}

/// A stream.
#[derive(Debug)]
pub(super) struct RawStream {
    context: Context,
    raw: cu::CUstream,
    owned: bool,
}

impl RawStream {
    /// Its number.
    pub(super) fn handle(&self) -> u64 {
        self.raw.expose_provenance() as u64
    }

    /// Whether it is the default stream, which has no handle of its own (or 1, `CU_STREAM_LEGACY`) and takes no batches.
    pub(super) fn is_default(&self) -> bool {
        self.raw.addr() <= 1
    }
}

// SAFETY: the driver's streams may be used from any thread.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

impl Drop for RawStream {
    fn drop(&mut self) {
        if self.owned
            && let Ok(_inside) = self.context.enter()
        {
            // SAFETY: made by `stream`; the driver does not wait here, and still does what the stream was given.
            let _ = unsafe { (self.context.calls().stream_destroy)(self.raw) };
        }
    }
}

/// A kernel that is loaded.
#[derive(Debug)]
pub(super) struct Kernel {
    context: Context,
    module: cu::CUmodule,
    function: cu::CUfunction,
}

// SAFETY: the driver's modules and functions may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Drop for Kernel {
    fn drop(&mut self) {
        if let Ok(_inside) = self.context.enter() {
            // SAFETY: loaded by `load`; the device that launched from it is gone.
            let _ = unsafe { (self.context.calls().module_unload)(self.module) };
        }
    }
}

impl Kernel {
    /// Loads a kernel from its PTX, a text that ends in zero, which the driver compiles for the device at hand.
    pub(super) fn load(context: &Context, ptx: &CStr, name: &CStr) -> Result<Self, String> {
        let told = |error: DeviceError| error.to_string();
        let _inside = context.enter().map_err(told)?;
        let mut module = std::ptr::null_mut();
        // SAFETY: a text that ends in zero.
        let loaded = unsafe { (context.calls().module_load)(&raw mut module, ptx.as_ptr().cast()) };
        check("cuModuleLoadData", loaded).map_err(told)?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module was loaded; the name is a C string.
        let got = unsafe { (context.calls().module_function)(&raw mut function, module, name.as_ptr()) };
        let kernel = Self { context: context.clone(), module, function };
        check("cuModuleGetFunction", got).map_err(told)?;
        Ok(kernel)
    }
}

/// The kernels that digest: a chunk for each block of threads, and one for each warp.
#[derive(Debug)]
pub(super) struct DigestKernels {
    pub(super) few: Kernel,
    pub(super) many: Kernel,
}

/// Host memory of the driver's own, which it pins: copies with memory that is not may wait inside the driver until the
/// device is done, where no timeout has an effect.
#[derive(Debug)]
struct HostMemory {
    context: Context,
    at: *mut c_void,
    /// Words of eight bytes.
    words: usize,
}

// SAFETY: it owns the memory, whose bytes are reached through `&mut`, or by the device.
unsafe impl Send for HostMemory {}
// SAFETY: as above; through `&` they are only read.
unsafe impl Sync for HostMemory {}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if let Ok(_inside) = self.context.enter() {
            // SAFETY: made by `host_memory` and given back once.
            let _ = unsafe { (self.context.calls().host_free)(self.at) };
        }
    }
}

impl HostMemory {
    /// Writes words from the word `at` on, as many as there is room for.
    fn write(&mut self, at: usize, words: impl Iterator<Item = u64>) {
        // SAFETY: all of the memory, which are pages that the kernel has filled with zeros; this is the only access while
        // it is written.
        let all = unsafe { std::slice::from_raw_parts_mut(self.at.cast::<u64>(), self.words) };
        for (place, word) in all.get_mut(at..).into_iter().flatten().zip(words) {
            *place = word;
        }
    }

    /// The first `count` numbers of four bytes behind the first `behind` words.
    fn read(&self, behind: usize, count: usize) -> Vec<u32> {
        // SAFETY: all of the memory, as above; the device is done with it.
        let all = unsafe { std::slice::from_raw_parts(self.at.cast::<u32>(), self.words * 2) };
        all.get(behind * 2..).and_then(|all| all.get(..count)).unwrap_or_default().to_vec()
    }
}

/// What digests work with: made once, and used again.
#[derive(Debug)]
pub(super) struct Digester {
    stream: RawStream,
    memory: RawMemory,
    /// Chunks that it has room for.
    room: usize,
    /// Two words for each chunk, where it is and how long; then the digests that came back.
    host: HostMemory,
}

impl Digester {
    pub(super) fn fits(&self, count: usize) -> bool {
        count <= self.room
    }

    pub(super) fn stream(&self) -> &RawStream {
        &self.stream
    }

    /// The digests, once an event behind them is done.
    pub(super) fn found(&self, count: usize) -> Vec<u32> {
        self.host.read(self.room * 2, count)
    }
}

/// The gather kernel's parameter.
#[repr(C)]
struct Table {
    count: u64,
    to: [u64; TABLE],
    from: [u64; TABLE],
    len: [u64; TABLE],
}

/// The parameter of the kernel that moves rows of slots.
#[repr(C)]
struct Moved {
    slots: u64,
    ring: u64,
    pool: u64,
    ring_stride: u64,
    pool_stride: u64,
    ring_outer: u64,
    pool_outer: u64,
    ring_inner: u64,
    pool_inner: u64,
    bytes: u64,
    count: u32,
    outer: u32,
    inner: u32,
    to_pool: u32,
}

impl Context {
    pub(super) fn retain(ordinal: u32) -> Result<Self, DeviceError> {
        let number = c_int::try_from(ordinal)
            .map_err(|_| DeviceError::Absent("the number of the device is too large".to_owned()))?;
        let (mut device, calls) = (0, calls()?);
        // SAFETY: writes one handle.
        check("cuDeviceGet", unsafe { (calls.device)(&raw mut device, number) })?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle, released in `Primary::drop`.
        check("cuDevicePrimaryCtxRetain", unsafe { (calls.retain)(&raw mut raw, device) })?;
        Ok(Self(Arc::new(Primary { raw, device, ordinal, calls })))
    }

    fn calls(&self) -> &'static Calls {
        self.0.calls
    }

    /// Whether the driver has `cuMemcpyBatchAsync`.
    pub(super) fn has_batch(&self) -> bool {
        self.calls().copy_batch.is_some()
    }

    pub(super) fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    pub(super) fn name(&self) -> String {
        let mut text = [0 as std::ffi::c_char; 128];
        // SAFETY: writes at most 127 bytes and a zero.
        let named = unsafe { (self.calls().device_name)(text.as_mut_ptr(), 127, self.0.device) };
        if check("cuDeviceGetName", named).is_err() {
            return "unknown".to_owned();
        }
        // SAFETY: the array ends in a zero that the driver did not overwrite.
        unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
    }

    pub(super) fn memory_bytes(&self) -> Option<u64> {
        let mut bytes = 0;
        // SAFETY: writes one number.
        let asked = unsafe { (self.calls().device_bytes)(&raw mut bytes, self.0.device) };
        check("cuDeviceTotalMem", asked).ok().map(|()| bytes as u64)
    }

    /// Makes it the one that this thread's calls are about, until the answer is dropped.
    pub(super) fn enter(&self) -> Result<Entered<'_>, DeviceError> {
        // SAFETY: the context is retained while `self` lives.
        check("cuCtxPushCurrent", unsafe { (self.calls().push)(self.0.raw) })?;
        let mut mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        let captures = self.calls().capture_mode.is_some_and(|swap| {
            // SAFETY: it swaps the thread's mode, and writes the one that it had; an enum of C is an int.
            let swapped = unsafe { swap((&raw mut mode).cast()) };
            check("cuThreadExchangeStreamCaptureMode", swapped).is_ok()
        });
        Ok(Entered { calls: self.calls(), captures: captures.then_some(mode), _here: PhantomData })
    }

    pub(super) fn allocate(&self, bytes: u64) -> Result<RawMemory, DeviceError> {
        let _inside = self.enter()?;
        let mut base = 0;
        let len = usize::try_from(bytes).map_err(|_| DeviceError::NoMemory(bytes))?;
        // SAFETY: writes one address, freed in `RawMemory::drop`.
        check("cuMemAlloc", unsafe { (self.calls().allocate)(&raw mut base, len.max(1)) }).map_err(
            |error| {
                if error == DeviceError::NoMemory(0) { DeviceError::NoMemory(bytes) } else { error }
            },
        )?;
        Ok(RawMemory { context: self.clone(), base, len: bytes, kind: Kind::Allocated })
    }

    pub(super) fn adopt(&self, base: u64, bytes: u64) -> Result<RawMemory, DeviceError> {
        let _inside = self.enter()?;
        self.covers(base, bytes, |at| self.is_here(at))?;
        Ok(RawMemory { context: self.clone(), base, len: bytes, kind: Kind::Adopted })
    }

    /// Refuses a range that is not allocated from begin to end, in memory of the right kind. It may be of several
    /// allocations that touch: memory that grows piece by piece (expandable segments) is told apart by the driver.
    fn covers(
        &self,
        base: u64,
        bytes: u64,
        is_right: impl Fn(u64) -> Result<bool, DeviceError>,
    ) -> Result<(), DeviceError> {
        let end = base.checked_add(bytes).ok_or(DeviceError::OutOfBounds)?;
        let mut at = base;
        loop {
            match is_right(at) {
                Ok(true) => {}
                // Behind one allocation there is none.
                Err(DeviceError::Call { .. }) if at > base => return Err(DeviceError::OutOfBounds),
                Err(error) => return Err(error),
                Ok(false) => return Err(DeviceError::Foreign("memory that is not on this device")),
            }
            let (start, range) = self.allocation(at)?;
            let next = start.saturating_add(range);
            if start > at || next <= at {
                return Err(DeviceError::OutOfBounds);
            }
            if end <= next {
                return Ok(());
            }
            at = next;
        }
    }

    /// What the driver knows of an address, in this context.
    fn ask(&self, at: u64, what: Ask) -> Result<u64, DeviceError> {
        // The answers are numbers of 4 or 8 bytes; little-endian, so that the shorter ones fit the longer.
        let (mut answer, ask) = (0u64, self.calls().pointer_attribute);
        // SAFETY: every attribute asked for here is at most 8 bytes; an address that is none is an error.
        let asked = unsafe { ask((&raw mut answer).cast::<c_void>(), what, at) };
        check("cuPointerGetAttribute", asked).map(|()| answer)
    }

    /// Whether an address is of this device's memory.
    fn is_here(&self, at: u64) -> Result<bool, DeviceError> {
        Ok(self.ask(at, Ask::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)? == DEVICE
            && self.ask(at, Ask::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)? == u64::from(self.0.ordinal))
    }

    /// The allocation that an address is in: where it begins, and its bytes.
    fn allocation(&self, at: u64) -> Result<(u64, u64), DeviceError> {
        let start = self.ask(at, Ask::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)?;
        Ok((start, self.ask(at, Ask::CU_POINTER_ATTRIBUTE_RANGE_SIZE)?))
    }

    pub(super) fn export(&self, (base, bytes): (u64, u64), allocated: bool) -> Result<[u8; 64], DeviceError> {
        // The driver would give a part the name of the whole allocation, and a process that opens it would get other memory.
        let _inside = self.enter()?;
        if !self.is_here(base)? {
            return Err(DeviceError::Foreign("memory that is not on this device"));
        }
        let (start, range) = self.allocation(base)?;
        // The driver may have rounded up what was allocated here. For memory that other code allocated, the size that was
        // asked for is not known.
        let whole = if allocated { bytes <= range } else { bytes == range };
        if start != base || !whole {
            return Err(DeviceError::Foreign(
                "a handle for a part of an allocation: export the whole allocation",
            ));
        }
        let mut handle = cu::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: writes one handle; an address without one is an error.
        check("cuIpcGetMemHandle", unsafe { (self.calls().ipc_name)(&raw mut handle, base) })?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    pub(super) fn import(&self, handle: &[u8; 64], bytes: u64) -> Result<RawMemory, DeviceError> {
        let _inside = self.enter()?;
        let raw = cu::CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
        let mut base = 0;
        let peer_access = cu::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: writes one address, closed in `RawMemory::drop`; a wrong handle is an error.
        check("cuIpcOpenMemHandle", unsafe { (self.calls().ipc_open)(&raw mut base, raw, peer_access) })?;
        // From here on it is closed whatever happens. What was said of its length is compared with the driver's.
        let memory = RawMemory { context: self.clone(), base, len: bytes, kind: Kind::Opened };
        drop(self.adopt(base, bytes)?);
        Ok(memory)
    }

    /// Pins host memory for every device. False if other code in this process has pinned it already: that code unpins it too.
    pub(super) fn pin(&self, region: &Region) -> Result<bool, DeviceError> {
        let _inside = self.enter()?;
        let flags = cu::CU_MEMHOSTREGISTER_PORTABLE | cu::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the region is mapped while it lives, and the arena that pins it unpins it before it goes.
        let pinned = unsafe { (self.calls().host_register)(region.base().cast(), region.len(), flags) };
        let failed = |error: DeviceError| DeviceError::Pin(error.to_string());
        match pinned {
            ALREADY_REGISTERED if self.is_pinned(region) => Ok(false),
            code => check("cuMemHostRegister", code).map(|()| true).map_err(failed),
        }
    }

    /// Whether the driver knows all of the region as pinned, with an address for this device.
    fn is_pinned(&self, region: &Region) -> bool {
        let (mut seen, base) = (0, region.base());
        // SAFETY: writes one address; memory that has none is an error.
        let got = unsafe { (self.calls().host_pointer)(&raw mut seen, base.cast(), 0) };
        let begin = base.expose_provenance() as u64;
        let is_host = |at| Ok(self.ask(at, Ask::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)? == HOST);
        got == 0 && self.covers(begin, region.len() as u64, is_host).is_ok()
    }

    pub(super) fn unpin(&self, region: &Region) {
        if let Ok(_inside) = self.enter() {
            // SAFETY: registered by `pin`, and no copy is under way (the trait's contract).
            let _ = unsafe { (self.calls().host_unregister)(region.base().cast()) };
        }
    }

    /// Whether a call that has to do with no work is answered with the error that is called so. What a driver says of
    /// captures, it says because of them.
    pub(super) fn answers_always(&self, error: &str) -> bool {
        let name = |code| self.calls().name(code);
        let _inside = match self.enter() {
            Ok(inside) => inside,
            Err(DeviceError::Lost(_)) => return true,
            Err(refused) => return matches!(refused, DeviceError::Call { why, .. } if why == error),
        };
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        let code = unsafe { (self.calls().memory_info)(&raw mut free, &raw mut total) };
        code != 0 && !CAPTURES.contains(&code) && (LOST.contains(&code) || name(code) == error)
    }

    pub(super) fn stream(&self) -> Result<RawStream, DeviceError> {
        let _inside = self.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed in `RawStream::drop`.
        check("cuStreamCreate", unsafe { (self.calls().stream_create)(&raw mut raw, NON_BLOCKING) })?;
        Ok(RawStream { context: self.clone(), raw, owned: true })
    }

    /// A stream that other code made. The driver is asked for its state once: for a number that is no stream that is most
    /// likely an error. A stream that is being captured is taken as well: only a driver that is too old for another question
    /// is asked one that breaks the capture.
    pub(super) fn adopt_stream(&self, handle: u64) -> Result<RawStream, DeviceError> {
        let _inside = self.enter()?;
        let address = usize::try_from(handle).map_err(|_| DeviceError::OutOfBounds)?;
        let stream = RawStream {
            context: self.clone(),
            raw: std::ptr::with_exposed_provenance_mut(address),
            owned: false,
        };
        if self.calls().is_capturing.is_none() {
            // SAFETY: the caller's promise (trait): a stream of this device that outlives the answer.
            match unsafe { (self.calls().stream_query)(stream.raw) } {
                NOT_READY => {}
                code => check("cuStreamQuery", code)?,
            }
            return Ok(stream);
        }
        match self.outside_graphs(&stream) {
            Ok(()) | Err(DeviceError::Captured) => Ok(stream),
            Err(error) => Err(error),
        }
    }

    /// Refuses a stream that is being captured into a graph: what it is given would become part of the graph, and so would
    /// every stream that waits for it. Our own never are, because they wait for no such stream.
    fn outside_graphs(&self, stream: &RawStream) -> Result<(), DeviceError> {
        let Some(ask) = self.calls().is_capturing.filter(|_| !stream.owned) else { return Ok(()) };
        let mut status: c_int = 0;
        // SAFETY: it is alive; writes one enum of C, which is an int.
        match unsafe { ask(stream.raw, (&raw mut status).cast()) } {
            // Said of the default stream while another that waits for it is captured.
            CAPTURE_IMPLICIT => Err(DeviceError::Captured),
            0 if status != 0 => Err(DeviceError::Captured),
            code => check("cuStreamIsCapturing", code),
        }
    }

    pub(super) fn copy_each(&self, stream: &RawStream, batch: &Batch<'_>) -> Result<(), DeviceError> {
        let _inside = self.enter()?;
        self.outside_graphs(stream)?;
        for piece in batch.pieces {
            let (device, host) = ends(batch, piece);
            let (pointer, len) = (std::ptr::with_exposed_provenance_mut::<c_void>(host), piece.len as usize);
            let code = match batch.direction {
                // SAFETY: both ranges were checked against memories that the batch holds; the caller keeps the
                // host's side until an event behind the copy is done (trait).
                Direction::ToDevice => unsafe {
                    (self.calls().copy_to_device)(device, pointer.cast_const(), len, stream.raw)
                },
                // SAFETY: as above.
                Direction::ToHost => unsafe { (self.calls().copy_to_host)(pointer, device, len, stream.raw) },
            };
            check("cuMemcpyAsync", code)?;
        }
        Ok(())
    }

    pub(super) fn copy_batch(&self, stream: &RawStream, batch: &Batch<'_>) -> Result<(), DeviceError> {
        let Some(copy_batch) = self.calls().copy_batch else { return self.copy_each(stream, batch) };
        let _inside = self.enter()?;
        self.outside_graphs(stream)?;
        // The driver refuses a batch of nothing, and has no word for a copy of no bytes.
        let pieces = || batch.pieces.iter().filter(|piece| piece.len > 0);
        let ends: Vec<_> = pieces().map(|piece| ends(batch, piece)).collect();
        if ends.is_empty() {
            return Ok(());
        }
        let mut devices: Vec<cu::CUdeviceptr> = ends.iter().map(|end| end.0).collect();
        let mut hosts: Vec<cu::CUdeviceptr> = ends.iter().map(|end| end.1 as u64).collect();
        let mut sizes: Vec<usize> = pieces().map(|piece| piece.len as usize).collect();
        let (to, from) = match batch.direction {
            Direction::ToDevice => (&mut devices, &mut hosts),
            Direction::ToHost => (&mut hosts, &mut devices),
        };
        // SAFETY: a C structure of numbers, for which zeros are valid.
        let mut attributes: cu::CUmemcpyAttributes = unsafe { std::mem::zeroed() };
        attributes.srcAccessOrder = cu::CUmemcpySrcAccessOrder_enum::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        let (mut first, mut failed) = (0usize, usize::MAX);
        // SAFETY: the arrays have one entry for each piece and are read during the call; ranges as in `copy_each`.
        let code = unsafe {
            copy_batch(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                sizes.as_mut_ptr(),
                sizes.len(),
                &raw mut attributes,
                &raw mut first,
                1,
                &raw mut failed,
                stream.raw,
            )
        };
        check("cuMemcpyBatchAsync", code)
    }

    pub(super) fn gather(
        &self,
        kernel: &Kernel,
        stream: &RawStream,
        batch: &Batch<'_>,
    ) -> Result<(), DeviceError> {
        let _inside = self.enter()?;
        let mut seen = 0;
        // SAFETY: the caller has checked that the region is pinned with a mapping for the device.
        check("cuMemHostGetDevicePointer", unsafe {
            (self.calls().host_pointer)(&raw mut seen, batch.host.as_ptr().cast(), 0)
        })?;
        let ends = batch.pieces.iter().map(|piece| {
            let (device, host) = (ends(batch, piece).0, seen.wrapping_add(piece.host));
            match batch.direction {
                Direction::ToDevice => (device, host, piece.len),
                Direction::ToHost => (host, device, piece.len),
            }
        });
        self.launch_gather(kernel, stream, ends)
    }

    /// Copies within the device, by the kernel.
    pub(super) fn spread(
        &self,
        kernel: &Kernel,
        stream: &RawStream,
        from: u64,
        memories: &[Memory],
        pieces: &[Piece],
    ) -> Result<(), DeviceError> {
        let _inside = self.enter()?;
        let ends =
            pieces.iter().map(|piece| (place(memories, piece), from.wrapping_add(piece.host), piece.len));
        self.launch_gather(kernel, stream, ends)
    }

    /// The same, one call for each.
    pub(super) fn spread_each(
        &self,
        stream: &RawStream,
        from: u64,
        memories: &[Memory],
        pieces: &[Piece],
    ) -> Result<(), DeviceError> {
        let _inside = self.enter()?;
        self.outside_graphs(stream)?;
        for piece in pieces {
            let (to, from, len) = (place(memories, piece), from.wrapping_add(piece.host), piece.len as usize);
            // SAFETY: both ranges were checked against memories that the caller keeps until an event behind the copy.
            check("cuMemcpyDtoDAsync", unsafe { (self.calls().copy_within)(to, from, len, stream.raw) })?;
        }
        Ok(())
    }

    /// Launches the kernel for pieces (to, from, bytes), whose ranges were checked and are kept by the caller until an
    /// event behind them.
    fn launch_gather(
        &self,
        kernel: &Kernel,
        stream: &RawStream,
        pieces: impl Iterator<Item = (u64, u64, u64)>,
    ) -> Result<(), DeviceError> {
        self.outside_graphs(stream)?;
        let mut pieces = pieces.peekable();
        while pieces.peek().is_some() {
            let (to, from, len) = ([0; TABLE], [0; TABLE], [0; TABLE]);
            let mut table = Table { count: 0, to, from, len };
            let slots = table.to.iter_mut().zip(&mut table.from).zip(&mut table.len);
            // The slots first: what has no slot must stay for the next launch.
            for (((to, from), len), piece) in slots.zip(pieces.by_ref()) {
                (*to, *from, *len) = piece;
                table.count += 1;
            }
            let mut parameters = [(&raw mut table).cast::<c_void>()];
            // SAFETY: the one parameter is the kernel's own structure, copied during the call; ranges as said above.
            let code = unsafe {
                (self.calls().launch)(
                    kernel.function,
                    BLOCKS,
                    1,
                    1,
                    THREADS,
                    1,
                    1,
                    0,
                    stream.raw,
                    parameters.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            };
            check("cuLaunchKernel", code)?;
        }
        Ok(())
    }
}

impl Context {
    /// Enqueues a move of rows, whose ranges were checked and are kept by the caller until an event behind it.
    pub(super) fn move_slots(
        &self,
        kernel: &Kernel,
        stream: &RawStream,
        moved: &SlotMove<'_>,
    ) -> Result<(), DeviceError> {
        let _inside = self.enter()?;
        self.outside_graphs(stream)?;
        let (slots, first, count) = moved.slots;
        let SlotShape { ring_stride, ring_first, pool_base, pool_stride, outer, inner, row_bytes } =
            moved.shape;
        let mut parameter = Moved {
            slots: slots.base().wrapping_add(u64::from(first) * 4),
            ring: moved.ring.0.base().wrapping_add(moved.ring.1).wrapping_add(ring_first),
            pool: moved.pool.base().wrapping_add(pool_base),
            ring_stride,
            pool_stride,
            ring_outer: outer.ring,
            pool_outer: outer.pool,
            ring_inner: inner.ring,
            pool_inner: inner.pool,
            bytes: row_bytes,
            count,
            outer: outer.count,
            inner: inner.count,
            to_pool: u32::from(moved.direction == Direction::ToDevice),
        };
        // A warp for each piece of a row, but no more blocks than keep the memory busy.
        let rows = u64::from(count) * u64::from(outer.count) * u64::from(inner.count);
        let warps = rows.saturating_mul(row_bytes.div_ceil(SLOT_PIECE));
        let blocks = warps.div_ceil(u64::from(SLOT_THREADS / WARP)).clamp(1, SLOT_BLOCKS) as u32;
        let (mut parameters, none) = ([(&raw mut parameter).cast::<c_void>()], std::ptr::null_mut());
        let (function, raw, parameters) = (kernel.function, stream.raw, parameters.as_mut_ptr());
        // SAFETY: one parameter, the kernel's own structure, copied during the call; ranges as said above.
        let code = unsafe {
            (self.calls().launch)(function, blocks, 1, 1, SLOT_THREADS, 1, 1, 0, raw, parameters, none)
        };
        check("cuLaunchKernel", code)
    }

    /// Enqueues one thread that is busy for so long.
    pub(super) fn launch_wait(
        &self,
        kernel: &Kernel,
        stream: &RawStream,
        time: Duration,
    ) -> Result<(), DeviceError> {
        let _inside = self.enter()?;
        self.outside_graphs(stream)?;
        let mut nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let (mut parameters, none) = ([(&raw mut nanoseconds).cast::<c_void>()], std::ptr::null_mut());
        let (function, raw, parameters) = (kernel.function, stream.raw, parameters.as_mut_ptr());
        // SAFETY: one parameter of eight bytes as the kernel's source names it, copied during the call.
        let code = unsafe { (self.calls().launch)(function, 1, 1, 1, 1, 1, 1, 0, raw, parameters, none) };
        check("cuLaunchKernel", code)
    }

    /// Enqueues threads on all multiprocessors of any device, which compute and read `memory`.
    pub(super) fn launch_busy(
        &self,
        kernel: &Kernel,
        stream: &RawStream,
        memory: &Memory,
        mut rounds: u32,
    ) -> Result<(), DeviceError> {
        let _inside = self.enter()?;
        self.outside_graphs(stream)?;
        // Pieces of 16 bytes, as many as a power of two.
        let mut mask = (memory.len() / 16).checked_ilog2().map_or(0, |bits| (1u64 << bits) - 1);
        let mut base = memory.base;
        let (mut parameters, none) = (
            [
                (&raw mut base).cast::<c_void>(),
                (&raw mut mask).cast::<c_void>(),
                (&raw mut rounds).cast::<c_void>(),
            ],
            std::ptr::null_mut(),
        );
        let (function, raw, parameters) = (kernel.function, stream.raw, parameters.as_mut_ptr());
        let (blocks, threads) = (BUSY_BLOCKS, BUSY_THREADS);
        // SAFETY: the parameters as the kernel's source names them, copied during the call; `memory` is the caller's to keep.
        let code =
            unsafe { (self.calls().launch)(function, blocks, 1, 1, threads, 1, 1, 0, raw, parameters, none) };
        check("cuLaunchKernel", code)
    }

    /// The memory and the stream that digests of `count` chunks need.
    pub(super) fn digester(&self, count: usize) -> Result<Digester, DeviceError> {
        let room = count.next_power_of_two();
        let (stream, memory) = (self.stream()?, self.allocate(room as u64 * 20)?);
        // Two words for each chunk, and half a one for its digest.
        let host = self.host_memory(room * 2 + room.div_ceil(2))?;
        Ok(Digester { stream, memory, room, host })
    }

    fn host_memory(&self, words: usize) -> Result<HostMemory, DeviceError> {
        let _inside = self.enter()?;
        let (mut at, bytes) = (std::ptr::null_mut(), words * 8);
        // SAFETY: writes one address, given back in `HostMemory::drop`.
        check("cuMemAllocHost", unsafe { (self.calls().host_allocate)(&raw mut at, bytes) })?;
        Ok(HostMemory { context: self.clone(), at, words })
    }

    /// Enqueues what digests: the table there, the kernel, what it found back. All in one stream: the driver's other
    /// copies go through the default stream, for which this one does not wait. The caller keeps the digester until an
    /// event behind it in its stream is done.
    pub(super) fn begin_digests(
        &self,
        kernels: &DigestKernels,
        digester: &mut Digester,
        base: u64,
        chunks: &[(u64, u64)],
    ) -> Result<(), DeviceError> {
        let _inside = self.enter()?;
        let Digester { stream, memory, room, host } = digester;
        if chunks.len() > *room {
            return Err(DeviceError::OutOfBounds);
        }
        // Addresses and lengths one behind the other, then digests.
        host.write(0, chunks.iter().map(|chunk| base.wrapping_add(chunk.0)));
        host.write(chunks.len(), chunks.iter().map(|chunk| chunk.1));
        let (mut addresses, mut count) = (memory.base(), chunks.len() as u64);
        let (mut lens, mut digests) = (addresses + count * 8, addresses + *room as u64 * 16);
        let bytes = chunks.len() * 16;
        // SAFETY: both sides are as long (by their allocations), and are kept until the stream is done.
        let code =
            unsafe { (self.calls().copy_to_device)(addresses, host.at.cast_const(), bytes, stream.raw) };
        check("cuMemcpyAsync", code)?;
        let (kernel, each) = match chunks.len() < MANY_CHUNKS {
            true => (&kernels.few, 1),
            false => (&kernels.many, u64::from(crate::crc::THREADS / WARP)),
        };
        let blocks = u32::try_from(count.div_ceil(each)).unwrap_or(u32::MAX).min(DIGEST_BLOCKS);
        let mut parameters = [
            (&raw mut addresses).cast::<c_void>(),
            (&raw mut lens).cast(),
            (&raw mut digests).cast(),
            (&raw mut count).cast(),
        ];
        // SAFETY: four parameters of eight bytes as the kernel's source names them, copied during the call; the chunks
        // were checked against the memory that they are in.
        let code = unsafe {
            let (threads, raw, none) = (crate::crc::THREADS, stream.raw, std::ptr::null_mut());
            (self.calls().launch)(
                kernel.function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                raw,
                parameters.as_mut_ptr(),
                none,
            )
        };
        check("cuLaunchKernel", code)?;
        let bytes = chunks.len() * 4;
        // SAFETY: behind the two words of every chunk there is room for as many digests.
        let found = unsafe { host.at.cast::<u64>().add(*room * 2) };
        // SAFETY: as many bytes on both sides, kept until the stream is done.
        let code = unsafe { (self.calls().copy_to_host)(found.cast(), digests, bytes, stream.raw) };
        check("cuMemcpyAsync", code)
    }
}

/// Both addresses of a piece of a batch that was checked.
fn ends(batch: &Batch<'_>, piece: &Piece) -> (cu::CUdeviceptr, usize) {
    let host = batch.host.as_ptr().expose_provenance();
    (place(batch.memories, piece), host.wrapping_add(piece.host as usize))
}

/// Where a piece that was checked lies in its memory.
fn place(memories: &[Memory], piece: &Piece) -> cu::CUdeviceptr {
    memories.get(piece.memory as usize).map_or(0, Memory::base).wrapping_add(piece.at)
}
