//! A CUDA device. It builds everywhere, its absence is tested, and its calls are tested over a stand-in for the driver's
//! libraries and over a real driver (`tests/driver`). On which hardware it has run is in `docs/GPU.md`.
//!
//! Libraries are loaded when they are first needed and asked for before: no driver, or one without a device, gives
//! [`DeviceError::Absent`] with the reason, never a panic. Everything that talks to the driver stands in `sys`.
//!
//! - Host memory is pinned with `cuMemHostRegister` over memory that this program mapped, so that it can be a ring's
//!   registered buffer as well, once for all devices. It is ordinary cached memory, not write-combined: the processor digests it.
//! - Batches are `cuMemcpyBatchAsync` where the driver has it, always with the source read in stream order: any other
//!   order is wrong for copies from the device.
//! - The kernel reads pinned memory itself. Memory that is not pinned goes by single copies. Kernels are in this program
//!   as PTX, which the driver compiles for its device when that is opened: no compiler is needed on the machine.

mod calls;
mod files;
mod pins;
mod sys;

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kvarts_contract::buffers::Region;
use kvarts_layout::planted;

use self::sys::events::{Events, RawEvent};
use self::sys::{Context, DigestKernels, Digester, Kernel, RawMemory, RawStream};
use super::{
    Batch, Description, Device, Digests, Event, Files, InUse, IpcHandle, Memory, Method, Piece, Route,
    SlotMove, Stream, check, within,
};
use crate::error::DeviceError;
use crate::follow::keep_for_good;
use crate::pace::{Pace, RealPace};

pub use files::{has_cufile, has_nvidia_fs};

/// How long a wait sleeps between two looks at an event: longer each time, so that short copies are seen soon.
const NAP_MIN: Duration = Duration::from_micros(10);
const NAP_MAX: Duration = Duration::from_micros(200);
/// A nap is this part of what has been waited for, within those bounds.
const NAPS: u32 = 32;
/// How long a wait without an end looks before it looks anew.
const SLICE: Duration = Duration::from_secs(1);

/// The gather kernel, compiled.
const GATHER: &CStr = ptx(concat!(include_str!("../kernels/gather.ptx"), "\0"));
/// The kernel that moves rows of slots, compiled.
const SLOTS: &CStr = ptx(concat!(include_str!("../kernels/slots.ptx"), "\0"));
/// The kernels that digest, compiled.
const DIGESTS: &CStr = ptx(concat!(include_str!("../kernels/crc32.ptx"), "\0"));

/// The kernels that stand for an engine's work, compiled: on one thread, and on all of a device.
const WAIT: &CStr = ptx(concat!(include_str!("../kernels/wait.ptx"), "\0"));
const BUSY: &CStr = ptx(concat!(include_str!("../kernels/busy.ptx"), "\0"));

/// A text that ends in zero, as the driver takes it.
const fn ptx(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("the PTX code has a zero byte"),
    }
}

/// What a device and everything made of it share.
#[derive(Debug)]
struct Core {
    context: Context,
    kernel: Option<Kernel>,
    /// Moves rows of slots, or why it cannot.
    slots: Result<Kernel, String>,
    /// Digests chunks where they lie.
    digests: Option<DigestKernels>,
    /// Stand for an engine's work, once that was asked for.
    work: OnceLock<Result<Kernel, String>>,
    busy: OnceLock<Result<Kernel, String>>,
    methods: Vec<Method>,
    notes: Vec<String>,
    /// How often each region is pinned for this device. Who pinned it is known in `pins`.
    pins: Mutex<BTreeMap<u64, u64>>,
    events: Events,
    /// Idle digesters, each with the event after which the device does not use it any more.
    digesters: Mutex<Vec<(Event, Digester)>>,
    memories: AtomicU64,
    streams: AtomicU64,
    opened: AtomicU64,
    files: AtomicU64,
    /// Why it was declared lost, if it was.
    lost: OnceLock<String>,
}

/// A CUDA device.
#[derive(Clone, Debug)]
pub struct Cuda(Arc<Core>);

struct Owned {
    raw: RawMemory,
    core: Arc<Core>,
}

impl Drop for Owned {
    fn drop(&mut self) {
        match self.raw.kind() {
            sys::Kind::Allocated => drop(self.core.memories.fetch_sub(1, Ordering::AcqRel)),
            sys::Kind::Opened => drop(self.core.opened.fetch_sub(1, Ordering::AcqRel)),
            sys::Kind::Adopted => {}
        }
    }
}

struct OwnedStream {
    raw: RawStream,
    core: Arc<Core>,
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        self.core.streams.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A digester that the device may work with. It goes back with its event, behind which the device does not any more.
struct Busy {
    device: Cuda,
    event: Event,
    digester: Option<Digester>,
}

impl Busy {
    fn found(&self, count: usize) -> Vec<u32> {
        self.digester.as_ref().map_or_else(Vec::new, |digester| digester.found(count))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if let Some(digester) = self.digester.take() {
            self.device.digesters().push((self.event.clone(), digester));
        }
    }
}

/// Whether the machine shows the driver of a device to this process, or why not. Nothing is loaded, and no driver is asked.
pub fn shown() -> Result<(), String> {
    const FILES: [&str; 2] = ["/dev/nvidiactl", "/dev/dxg"];
    if std::env::var_os("CUDA_VISIBLE_DEVICES").is_some_and(|devices| devices.is_empty()) {
        return Err("all devices are hidden by CUDA_VISIBLE_DEVICES".to_owned());
    }
    let is_there = |path: &&str| rustix::fs::access(*path, rustix::fs::Access::EXISTS).is_ok();
    match FILES.iter().any(is_there) {
        true => Ok(()),
        false => Err(format!(
            "the driver of CUDA devices is not loaded, because {} does not exist: install or load the driver",
            FILES.join(" and no ")
        )),
    }
}

/// How many CUDA devices there are, or why none can be used.
pub fn count() -> Result<u32, DeviceError> {
    sys::count()
}

impl Cuda {
    /// Opens a device by its number.
    pub fn open(ordinal: u32) -> Result<Self, DeviceError> {
        let count = count()?;
        if ordinal >= count {
            return Err(DeviceError::Absent(format!(
                "the device cuda:{ordinal} does not exist: the number of devices is {count}"
            )));
        }
        let context = Context::retain(ordinal)?;
        let mut methods = vec![Method::Each];
        let mut notes = Vec::new();
        if context.has_batch() {
            methods.push(Method::Batch);
        } else {
            notes.push(
                "the driver lacks cuMemcpyBatchAsync: install a driver for CUDA 12.8 or newer".to_owned(),
            );
        }
        let load = |name| Kernel::load(&context, DIGESTS, name);
        let both = || Ok(DigestKernels { few: load(c"kvarts_crc32")?, many: load(c"kvarts_crc32_many")? });
        let digests = match both() {
            Ok(kernels) => Some(kernels),
            Err::<_, String>(why) => {
                notes.push(format!("the device cannot compute digests: {why}"));
                None
            }
        };
        let slots = Kernel::load(&context, SLOTS, c"kvarts_slots");
        if let Err(why) = &slots {
            notes.push(format!("the kernel for slots could not be loaded: {why}"));
        }
        let kernel = match Kernel::load(&context, GATHER, c"kvarts_gather") {
            Ok(kernel) => {
                methods.push(Method::Kernel);
                Some(kernel)
            }
            Err(why) => {
                notes.push(format!("the kernel for gathering could not be loaded: {why}"));
                None
            }
        };
        Ok(Self(Arc::new(Core {
            context,
            kernel,
            slots,
            digests,
            work: OnceLock::new(),
            busy: OnceLock::new(),
            methods,
            notes,
            pins: Mutex::new(BTreeMap::new()),
            events: Events::default(),
            digesters: Mutex::new(Vec::new()),
            memories: AtomicU64::new(0),
            streams: AtomicU64::new(0),
            opened: AtomicU64::new(0),
            files: AtomicU64::new(0),
            lost: OnceLock::new(),
        })))
    }

    /// The number of a stream.
    pub fn handle_of(&self, stream: &Stream) -> Result<u64, DeviceError> {
        Ok(raw(stream)?.handle())
    }

    /// Keeps the device busy for so long in a stream, as an engine's kernels would: for measurements.
    pub fn compute(&self, stream: &Stream, time: Duration) -> Result<(), DeviceError> {
        self.alive()?;
        let load = || Kernel::load(&self.0.context, WAIT, c"kvarts_wait");
        match self.0.work.get_or_init(load) {
            Ok(kernel) => self.0.context.launch_wait(kernel, raw(stream)?, time),
            Err(why) => Err(DeviceError::Call { call: "cuModuleLoadData", why: why.clone() }),
        }
    }

    /// Keeps all of the device busy in a stream, with arithmetic and with reads of `memory`, for a time that grows with `rounds`: for
    /// measurements. The memory must stay until an event behind it.
    pub fn compute_everywhere(
        &self,
        stream: &Stream,
        memory: &Memory,
        rounds: u32,
    ) -> Result<(), DeviceError> {
        self.alive()?;
        self.owned(memory)?;
        let load = || Kernel::load(&self.0.context, BUSY, c"kvarts_busy");
        match self.0.busy.get_or_init(load) {
            Ok(kernel) => self.0.context.launch_busy(kernel, raw(stream)?, memory, rounds),
            Err(why) => Err(DeviceError::Call { call: "cuModuleLoadData", why: why.clone() }),
        }
    }

    fn alive(&self) -> Result<(), DeviceError> {
        self.0.lost.get().map_or(Ok(()), |why| Err(DeviceError::Lost(why.clone())))
    }

    fn pins(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        // A count is changed in one step.
        self.0.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is behind memory of this very device.
    fn owned<'a>(&self, memory: &'a Memory) -> Result<&'a Owned, DeviceError> {
        let owned = memory.raw.downcast_ref::<Owned>().filter(|owned| Arc::ptr_eq(&owned.core, &self.0));
        owned.ok_or(DeviceError::Foreign("memory of another device"))
    }

    fn digesters(&self) -> MutexGuard<'_, Vec<(Event, Digester)>> {
        self.0.digesters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An idle digester with room for `count` chunks, which the device is done with.
    fn spare_digester(&self, count: usize) -> Option<Digester> {
        let mut spare = self.digesters();
        let is_free = |event: &Event| {
            raw_event(event).and_then(|event| self.0.context.is_done(event)).is_ok_and(|done| done)
        };
        let at = spare.iter().position(|(event, one)| one.fits(count) && is_free(event))?;
        Some(spare.swap_remove(at).1)
    }

    fn memory(&self, raw: RawMemory) -> Memory {
        let (base, len) = (raw.base(), raw.len());
        match raw.kind() {
            sys::Kind::Allocated => drop(self.0.memories.fetch_add(1, Ordering::AcqRel)),
            sys::Kind::Opened => drop(self.0.opened.fetch_add(1, Ordering::AcqRel)),
            sys::Kind::Adopted => {}
        }
        Memory::new(base, len, Arc::new(Owned { raw, core: Arc::clone(&self.0) }))
    }

    fn wrap(&self, raw: RawStream) -> Stream {
        self.0.streams.fetch_add(1, Ordering::AcqRel);
        Stream(Arc::new(OwnedStream { raw, core: Arc::clone(&self.0) }))
    }
}

fn raw(stream: &Stream) -> Result<&RawStream, DeviceError> {
    let owned = stream.0.downcast_ref::<OwnedStream>();
    owned.map(|owned| &owned.raw).ok_or(DeviceError::Foreign("a stream of another device"))
}

fn raw_event(event: &Event) -> Result<&RawEvent, DeviceError> {
    event.0.downcast_ref().ok_or(DeviceError::Foreign("an event of another device"))
}

impl Device for Cuda {
    fn describe(&self) -> Description {
        Description {
            kind: format!("cuda:{}", self.0.context.ordinal()),
            name: self.0.context.name(),
            memory_bytes: self.0.context.memory_bytes(),
            notes: self.0.notes.clone(),
        }
    }

    fn methods(&self) -> &[Method] {
        &self.0.methods
    }

    fn allocate(&self, bytes: u64) -> Result<Memory, DeviceError> {
        Ok(self.memory(self.0.context.allocate(bytes)?))
    }

    fn adopt(&self, base: u64, bytes: u64) -> Result<Memory, DeviceError> {
        Ok(self.memory(self.0.context.adopt(base, bytes)?))
    }

    fn pin(&self, region: &Arc<Region>) -> Result<(), DeviceError> {
        // Before the device's own count: both change together.
        let mut all = pins::all();
        if !self.pins().contains_key(&region.id()) {
            all.join(&self.0.context, region)?;
        }
        region.keep_pages(true);
        *self.pins().entry(region.id()).or_default() += 1;
        Ok(())
    }

    fn unpin(&self, region: &Arc<Region>) {
        let mut all = pins::all();
        let mut pins = self.pins();
        let Some(count) = pins.get_mut(&region.id()) else { return };
        *count -= 1;
        if *count == 0 {
            pins.remove(&region.id());
            drop(pins);
            all.leave(region);
        }
    }

    fn stream(&self) -> Result<Stream, DeviceError> {
        Ok(self.wrap(self.0.context.stream()?))
    }

    fn adopt_stream(&self, handle: u64) -> Result<Stream, DeviceError> {
        Ok(self.wrap(self.0.context.adopt_stream(handle)?))
    }

    fn copy(&self, stream: &Stream, batch: &Batch<'_>) -> Result<(), DeviceError> {
        self.alive()?;
        batch.check(1)?;
        batch.memories.iter().try_for_each(|memory| self.owned(memory).map(drop))?;
        let (stream, context) = (raw(stream)?, &self.0.context);
        let pinned = self.pins().contains_key(&batch.host.region().id());
        match (batch.method, &self.0.kernel) {
            (Method::Kernel, Some(kernel)) if pinned => context.gather(kernel, stream, batch),
            (Method::Batch, _)
                if pinned && !stream.is_default() && self.0.methods.contains(&Method::Batch) =>
            {
                context.copy_batch(stream, batch)
            }
            _ => context.copy_each(stream, batch),
        }
    }

    fn spread(
        &self,
        stream: &Stream,
        from: &Memory,
        memories: &[Memory],
        pieces: &[Piece],
    ) -> Result<(), DeviceError> {
        self.alive()?;
        check(pieces, from.len, memories, 1)?;
        memories.iter().chain([from]).try_for_each(|memory| self.owned(memory).map(drop))?;
        let (stream, context) = (raw(stream)?, &self.0.context);
        match &self.0.kernel {
            // One launch instead of a call for each.
            Some(kernel) if pieces.len() > 1 => context.spread(kernel, stream, from.base, memories, pieces),
            _ => context.spread_each(stream, from.base, memories, pieces),
        }
    }

    fn owns(&self, memory: &Memory) -> Result<(), DeviceError> {
        self.owned(memory).map(drop)
    }

    fn can_move_slots(&self) -> Result<(), DeviceError> {
        let why = |why: &String| DeviceError::Call { call: "cuModuleLoadData", why: why.clone() };
        self.0.slots.as_ref().map(drop).map_err(why)
    }

    fn move_slots(&self, stream: &Stream, moved: &SlotMove<'_>) -> Result<(), DeviceError> {
        self.alive()?;
        moved.check()?;
        [moved.ring.0, moved.pool, moved.slots.0].into_iter().try_for_each(|memory| self.owns(memory))?;
        match &self.0.slots {
            Ok(kernel) => self.0.context.move_slots(kernel, raw(stream)?, moved),
            Err(why) => Err(DeviceError::Call { call: "cuModuleLoadData", why: why.clone() }),
        }
    }

    fn files(&self, route: Route) -> Result<Arc<dyn Files>, DeviceError> {
        self.alive()?;
        files::open(self, route)
    }

    fn record(&self, stream: &Stream) -> Result<Event, DeviceError> {
        self.alive()?;
        self.0.events.record(&self.0.context, raw(stream)?)
    }

    fn wait(&self, stream: &Stream, event: &Event) -> Result<(), DeviceError> {
        self.alive()?;
        self.0.context.wait(raw(stream)?, raw_event(event)?)
    }

    fn synchronize(&self, event: &Event) -> Result<(), DeviceError> {
        // Within slices: the driver's own wait would not hear that the device was declared lost.
        while !self.synchronize_within(event, SLICE)? {}
        Ok(())
    }

    fn synchronize_within(&self, event: &Event, timeout: Duration) -> Result<bool, DeviceError> {
        let (event, pace) = (raw_event(event)?, RealPace::new());
        let begin = pace.now();
        loop {
            self.alive()?;
            if self.0.context.is_done(event)? {
                return Ok(true);
            }
            let (now, waited) = (pace.now(), pace.now().since(begin));
            let left = timeout.saturating_sub(waited);
            if left.is_zero() {
                return Ok(false);
            }
            // A part of what has been waited for, so that waiting makes no work noticeably longer.
            let nap = (waited / NAPS).clamp(NAP_MIN, NAP_MAX);
            pace.sleep_until(now.plus(nap.min(left)));
        }
    }

    fn confirm(&self, error: DeviceError) -> DeviceError {
        let DeviceError::Call { call, why } = &error else { return error };
        if !self.0.context.answers_always(why) {
            return error;
        }
        self.declare_lost(&format!("{call} failed, and all further calls fail too: {why}"));
        self.alive().err().unwrap_or(error)
    }

    fn declare_lost(&self, why: &str) {
        if planted!("loss-not-declared") {
            return;
        }
        // The first reason stays.
        let _ = self.0.lost.set(why.to_owned());
    }

    fn can_digest(&self) -> Result<(), DeviceError> {
        self.alive()?;
        self.0.digests.as_ref().map(drop).ok_or(super::NO_DIGESTS)
    }

    fn begin_digests(&self, memory: &Memory, chunks: &[(u64, u64)]) -> Result<Digests, DeviceError> {
        self.alive()?;
        within(memory, chunks)?;
        let kernels = self.0.digests.as_ref().ok_or(super::NO_DIGESTS)?;
        let mut digester = match self.spare_digester(chunks.len()) {
            Some(one) => one,
            None => self.0.context.digester(chunks.len())?,
        };
        let begun = match planted!("digests-of-other-chunks") {
            true => {
                let turned: Vec<_> = chunks.iter().rev().copied().collect();
                self.0.context.begin_digests(kernels, &mut digester, memory.base(), &turned)
            }
            false => self.0.context.begin_digests(kernels, &mut digester, memory.base(), chunks),
        };
        let event = match self.0.events.record(&self.0.context, digester.stream()) {
            Ok(event) => event,
            Err(error) => {
                // Without the event it is unknown when the device is done with the digester and the memory.
                keep_for_good((digester, memory.clone()));
                return Err(begun.err().unwrap_or(error));
            }
        };
        let (device, count) = (self.clone(), chunks.len());
        let busy = Busy { device, event: event.clone(), digester: Some(digester) };
        Ok(Digests::new(event, move || begun.map(|()| busy.found(count))))
    }

    fn export(&self, memory: &Memory) -> Result<IpcHandle, DeviceError> {
        let owned = self.owned(memory)?;
        let allocated = owned.raw.kind() == sys::Kind::Allocated;
        self.0.context.export((memory.base, memory.len), allocated).map(IpcHandle)
    }

    fn import(&self, handle: &IpcHandle, bytes: u64) -> Result<Memory, DeviceError> {
        Ok(self.memory(self.0.context.import(&handle.0, bytes)?))
    }

    fn in_use(&self) -> InUse {
        InUse {
            memories: self.0.memories.load(Ordering::Acquire),
            pinned: self.pins().len() as u64,
            streams: self.0.streams.load(Ordering::Acquire),
            opened: self.0.opened.load(Ordering::Acquire),
            files: self.0.files.load(Ordering::Acquire),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_says_so_and_does_not_panic() {
        // On a machine with devices the first that there is not is asked for.
        let ordinal = count().unwrap_or(0);
        let error = Cuda::open(ordinal).unwrap_err();
        assert!(matches!(error, DeviceError::Absent(_)), "{error:?}");
        assert!(error.to_string().starts_with("no CUDA device: "), "{error}");
        let _ = has_cufile();
    }
}
