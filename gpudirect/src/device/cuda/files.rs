//! cuFile: reads of files straight into device memory. **On hardware it has read files in compatibility mode only**
//! (docs/GPU.md).
//!
//! This file may hold `unsafe`. The library is loaded by this module and not by the bindings: they do not know the name
//! that an installation without development files has, they panic where a symbol is missing, and they make numbers that
//! they do not know into values of a closed enum. Here an error is a number, and every symbol is there before any is
//! called.
//!
//! Where a file system, a disk or the machine has no straight way cuFile reads through the processor's memory and says
//! nothing. It is told not to, before its driver is opened; one that cannot be told is held to what nvidia-fs counts.
//!
//! cuFile's driver is opened once for the process and stays open: closing it while another user of the same library in
//! this process reads would fail that one's reads.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;
use rustix::fs::{Mode, OFlags};

use super::super::{Files, Memory, OpenFile, Registered, Route};
use super::sys::Kind;
use super::{Core, Cuda};
use crate::error::DeviceError;

/// The library's names: of an installation without development files, with them, and as it was once.
const NAMES: [&str; 3] = ["libcufile.so.0", "libcufile.so", "libcufile.so.1"];

/// What a call says: cuFile's code and the driver's. Zero is success.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Said {
    code: c_int,
    cuda: c_int,
}

/// Which file is meant, as `CUfileDescr_t`: a kind (1: a descriptor), the descriptor, and operations for other kinds.
#[repr(C)]
struct Described {
    kind: c_int,
    file: DescribedFile,
    operations: *const c_void,
}

#[repr(C)]
union DescribedFile {
    descriptor: c_int,
    _pointer: *mut c_void,
}

const DESCRIPTOR: c_int = 1;

/// The call that registers a file, and the code with which it answers where it cannot tell the file system.
const REGISTER_FILE: &str = "cuFileHandleRegister";
const UNKNOWN_FILE: c_int = 5027;

type Handle = *mut c_void;

/// Parameters of the library: whether it may read through the processor's memory, whether it must, and whether the kernel
/// may move bytes between disk and device without nvidia-fs.
const MAY_DETOUR: c_int = 1;
const MUST_DETOUR: c_int = 2;
const KERNEL_MOVES: c_int = 7;

/// What nvidia-fs tells of itself.
const VERSION: &str = "/proc/driver/nvidia-fs/version";
const COUNTS: &str = "/proc/driver/nvidia-fs/stats";

/// Whether the nvidia-fs module is loaded.
pub fn has_nvidia_fs() -> bool {
    rustix::fs::access(VERSION, rustix::fs::Access::READ_OK).is_ok()
}

/// Reads that nvidia-fs has counted, if it counts any: the text is `Reads : n=7 ok=7 ...`.
fn reads_in(counts: &str) -> Option<u64> {
    let line = counts.lines().find_map(|line| line.trim_start().strip_prefix("Reads"))?;
    line.split_whitespace().find_map(|word| word.strip_prefix("n="))?.parse().ok()
}

/// What of a read is known that cuFile could not be told about, from the reads that were counted before and behind it.
fn judge(before: Option<u64>, behind: Option<u64>) -> Result<(), DeviceError> {
    match (before, behind) {
        (Some(before), Some(behind)) if behind > before => Ok(()),
        (Some(_), Some(_)) => Err(failed(
            "the read went through host memory, or nvidia-fs does not count reads (rw_stats_enabled)"
                .to_owned(),
        )),
        _ => Err(failed(
            "it is unknown whether the read was direct: this cuFile cannot be restricted to direct reads, \
            and nvidia-fs does not count reads"
                .to_owned(),
        )),
    }
}

/// The library's calls.
#[derive(Debug)]
struct Calls {
    /// Whether it was told not to read through the processor's memory.
    is_straight: bool,
    register_file: unsafe extern "C" fn(*mut Handle, *mut Described) -> Said,
    forget_file: unsafe extern "C" fn(Handle),
    register_memory: unsafe extern "C" fn(*const c_void, usize, c_int) -> Said,
    forget_memory: unsafe extern "C" fn(*const c_void) -> Said,
    read: unsafe extern "C" fn(Handle, *mut c_void, usize, i64, i64) -> isize,
    /// Files that are registered, by descriptor: a second time cuFile refuses one.
    files: Mutex<BTreeMap<c_int, Shared>>,
    _library: Library,
}

/// A handle that several use.
#[derive(Debug)]
struct Shared {
    handle: Handle,
    users: u64,
    /// What cuFile was given, open for as long as it has it.
    _file: OwnedFd,
}

// SAFETY: cuFile's handles may be used from any thread, at the same time too.
unsafe impl Send for Shared {}

fn load() -> Result<Library, String> {
    let mut why = Vec::new();
    for name in NAMES {
        // SAFETY: opens a library by name; its initialisers are NVIDIA's.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => why.push(error.to_string()),
        }
    }
    Err(format!("libcufile cannot be loaded: {}", why.join("; ")))
}

/// Whether libcufile can be loaded.
pub fn has_cufile() -> bool {
    load().is_ok()
}

/// A symbol of the library.
///
/// # Safety
/// `T` must be the type of the function of this name.
unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| format!("the function {name} is missing in libcufile"))
}

/// Tells the library to read straight or not at all. That is possible only until its driver is opened in this process. Gives
/// whether the library took the setting.
fn forbid_detours(library: &Library) -> bool {
    type Set = unsafe extern "C" fn(c_int, bool) -> Said;
    // SAFETY: the type is that of the library's published header.
    let Ok(set) = (unsafe { symbol::<Set>(library, "cuFileSetParameterBool") }) else { return false };
    // SAFETY: two numbers.
    let told = |what, is| unsafe { set(what, is) }.code == 0;
    if !has_nvidia_fs() {
        // Where the kernel cannot do it either, opening the driver says so.
        told(KERNEL_MOVES, true);
    }
    told(MAY_DETOUR, false) && told(MUST_DETOUR, false)
}

impl Calls {
    /// Loads the library and opens its driver.
    fn open(route: Route) -> Result<Self, String> {
        let library = load()?;
        let is_straight = route == Route::Strict && forbid_detours(&library);
        // SAFETY: the types are those of the library's published header.
        let calls = unsafe {
            let open: unsafe extern "C" fn() -> Said = symbol(&library, "cuFileDriverOpen")?;
            let calls = Self {
                is_straight,
                register_file: symbol(&library, "cuFileHandleRegister")?,
                forget_file: symbol(&library, "cuFileHandleDeregister")?,
                register_memory: symbol(&library, "cuFileBufRegister")?,
                forget_memory: symbol(&library, "cuFileBufDeregister")?,
                read: symbol(&library, "cuFileRead")?,
                files: Mutex::default(),
                _library: library,
            };
            // With a device's context current, as the caller has seen to.
            told("cuFileDriverOpen", open()).map_err(|error| error.to_string())?;
            calls
        };
        Ok(calls)
    }

    /// The one of this process, or why there is none: asked once, and told then which way it may go.
    fn get(route: Route) -> Result<&'static Self, DeviceError> {
        static CALLS: OnceLock<Result<Calls, String>> = OnceLock::new();
        let calls = CALLS.get_or_init(|| Self::open(route));
        calls.as_ref().map_err(|why| DeviceError::Call { call: "cuFile", why: why.clone() })
    }
}

impl Calls {
    fn files(&self) -> MutexGuard<'_, BTreeMap<c_int, Shared>> {
        // A file and its number of users change together.
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The handle of a file, registered by its first user.
    fn join(&self, file: BorrowedFd<'_>) -> Result<Handle, DeviceError> {
        let descriptor = file.as_raw_fd();
        // Locked while cuFile is asked: who comes meanwhile must find the answer.
        let mut files = self.files();
        if let Some(shared) = files.get_mut(&descriptor) {
            shared.users += 1;
            return Ok(shared.handle);
        }
        let again = open_again(file)?;
        let file = DescribedFile { descriptor: again.as_raw_fd() };
        let mut described = Described { kind: DESCRIPTOR, file, operations: std::ptr::null() };
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: writes one handle and reads the description during the call; the descriptor is open, and is kept so
        // while the handle lives.
        let said = unsafe { (self.register_file)(&raw mut handle, &raw mut described) };
        told(REGISTER_FILE, said)?;
        files.insert(descriptor, Shared { handle, users: 1, _file: again });
        Ok(handle)
    }

    /// One user less; the last one's leaving forgets the file.
    fn leave(&self, descriptor: c_int) {
        let mut files = self.files();
        let Some(shared) = files.get_mut(&descriptor) else { return };
        shared.users -= 1;
        if shared.users == 0 {
            // SAFETY: registered by `join` and forgotten once, before its number can mean another file: the caller that
            // opened it keeps the descriptor until this returns. No read uses it any more, since reads are users.
            unsafe { (self.forget_file)(shared.handle) };
            files.remove(&descriptor);
        }
    }
}

/// The same file, opened anew for reading and nothing else: cuFile refused the store's, which are opened with `O_NOFOLLOW`,
/// for a flag of theirs (its error 5019).
fn open_again(file: BorrowedFd<'_>) -> Result<OwnedFd, DeviceError> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    // Whether reads are direct was decided by who opened it.
    let open = |kept: OFlags| {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | (kept & OFlags::DIRECT);
        rustix::fs::open(path.as_str(), flags, Mode::empty())
    };
    let opened = rustix::fs::fcntl_getfl(file).and_then(open);
    opened.map_err(|error| DeviceError::Call { call: "open for cuFile", why: error.to_string() })
}

fn told(call: &'static str, said: Said) -> Result<(), DeviceError> {
    match said {
        // What cuFile's own log says of it: it could not tell the file system of the disk.
        Said { code: UNKNOWN_FILE, .. } if call == REGISTER_FILE => Err(DeviceError::Call {
            call,
            why: format!(
                "cuFile failed with error {UNKNOWN_FILE}: cuFile reads the type of the file system \
                from udev (ID_FS_USAGE), and refuses every file without udev, or in a container \
                without /run/udev"
            ),
        }),
        Said { code: 0, .. } => Ok(()),
        Said { code, cuda: 0 } => Err(DeviceError::Call { call, why: format!("cuFile's error {code}") }),
        Said { code, cuda } => Err(DeviceError::Call {
            call,
            why: format!(
                "cuFile failed with error {code}, and the driver \
                with error {cuda}"
            ),
        }),
    }
}

/// The files of a device.
#[derive(Debug)]
struct Straight {
    device: Cuda,
    calls: &'static Calls,
}

/// Memory that is registered.
struct Known {
    calls: &'static Calls,
    core: Arc<Core>,
    base: usize,
}

/// A user of a file.
struct Open {
    calls: &'static Calls,
    core: Arc<Core>,
    descriptor: c_int,
    handle: Handle,
}

// SAFETY: as of `Shared`.
unsafe impl Send for Open {}
// SAFETY: as of `Shared`.
unsafe impl Sync for Open {}

impl Drop for Known {
    fn drop(&mut self) {
        self.core.files.fetch_sub(1, Ordering::AcqRel);
        if let Ok(_inside) = self.core.context.enter() {
            // SAFETY: registered by `register` and forgotten once; reads into it hold it.
            let _ = unsafe { (self.calls.forget_memory)(std::ptr::with_exposed_provenance(self.base)) };
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.core.files.fetch_sub(1, Ordering::AcqRel);
        // A device that is lost is no reason to keep a file.
        let _inside = self.core.context.enter();
        self.calls.leave(self.descriptor);
    }
}

pub(super) fn open(device: &Cuda, route: Route) -> Result<Arc<dyn Files>, DeviceError> {
    let _inside = device.0.context.enter()?;
    Ok(Arc::new(Straight { device: device.clone(), calls: Calls::get(route)? }))
}

impl Files for Straight {
    fn register(&self, memory: &Memory) -> Result<Registered, DeviceError> {
        let core = &self.device.0;
        if self.device.owned(memory)?.raw.kind() != Kind::Allocated {
            return Err(DeviceError::Foreign("memory that was not allocated on this device for reads"));
        }
        let _inside = core.context.enter()?;
        let no = |_| DeviceError::OutOfBounds;
        let (base, len) =
            (usize::try_from(memory.base).map_err(no)?, usize::try_from(memory.len).map_err(no)?);
        // SAFETY: this device allocated the memory, which stays so while the answer, which holds it, lives.
        let said = unsafe { (self.calls.register_memory)(std::ptr::with_exposed_provenance(base), len, 0) };
        told("cuFileBufRegister", said)?;
        core.files.fetch_add(1, Ordering::AcqRel);
        let known: Arc<dyn Any + Send + Sync> =
            Arc::new(Known { calls: self.calls, core: Arc::clone(core), base });
        Ok(Registered::new(memory, known))
    }

    fn open(&self, file: BorrowedFd<'_>) -> Result<OpenFile, DeviceError> {
        let core = &self.device.0;
        let _inside = core.context.enter()?;
        let descriptor = file.as_raw_fd();
        let handle = self.calls.join(file)?;
        core.files.fetch_add(1, Ordering::AcqRel);
        Ok(OpenFile(Arc::new(Open { calls: self.calls, core: Arc::clone(core), descriptor, handle })))
    }

    fn read(
        &self,
        file: &OpenFile,
        offset: u64,
        into: &Registered,
        at: u64,
        len: u64,
    ) -> Result<(), DeviceError> {
        self.device.alive()?;
        into.check(at, len)?;
        let open = file.0.downcast_ref::<Open>();
        let open = open.ok_or(DeviceError::Foreign("a file of another device"))?;
        let no = |_| DeviceError::OutOfBounds;
        let base = usize::try_from(into.memory().base).map_err(no)?;
        let _inside = self.device.0.context.enter()?;
        let mut done = 0;
        while done < len {
            let (from, to) = (offset.saturating_add(done), at + done);
            let (from, to) = (i64::try_from(from).map_err(no)?, i64::try_from(to).map_err(no)?);
            let left = usize::try_from(len - done).map_err(no)?;
            // SAFETY: the handle is registered, and so is the memory, by its base; the range is inside it (checked
            // above). Both are held by the caller until this returns.
            let read = unsafe {
                (self.calls.read)(open.handle, std::ptr::with_exposed_provenance_mut(base), left, from, to)
            };
            match u64::try_from(read) {
                Ok(0) => return Err(failed("the file ends before the end of the read".to_owned())),
                Ok(more) => done += more.min(len - done),
                Err(_) if read == -1 => {
                    return Err(failed(std::io::Error::last_os_error().to_string()));
                }
                Err(_) => return Err(failed(format!("cuFile's error {}", read.unsigned_abs()))),
            }
        }
        Ok(())
    }

    fn prove(
        &self,
        file: &OpenFile,
        offset: u64,
        into: &Registered,
        at: u64,
        len: u64,
    ) -> Result<(), DeviceError> {
        if self.calls.is_straight {
            return self.read(file, offset, into, at, len);
        }
        let counted = || std::fs::read_to_string(COUNTS).ok().and_then(|counts| reads_in(&counts));
        let before = counted();
        self.read(file, offset, into, at, len)?;
        judge(before, counted())
    }
}

fn failed(why: String) -> DeviceError {
    DeviceError::Call { call: "cuFileRead", why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_whose_file_system_is_not_known_is_refused_with_what_to_look_at() {
        let why = |call| told(call, Said { code: UNKNOWN_FILE, cuda: 0 }).unwrap_err().to_string();
        assert!(
            why(REGISTER_FILE).contains("5027: cuFile reads the type of the file system from udev"),
            "{}",
            why(REGISTER_FILE)
        );
        assert!(why("cuFileBufRegister").ends_with("cuFile's error 5027"), "{}", why("cuFileBufRegister"));
    }

    #[test]
    fn a_read_that_nvidia_fs_has_not_counted_did_not_come_straight() {
        let counts = |reads: &str| {
            format!("GDS Version: 1.13\nNVFS statistics(ver: 4.0)\nReads : n={reads} ok=7 err=0\n")
        };
        assert_eq!((reads_in(&counts("7")), reads_in(&counts("x")), reads_in("")), (Some(7), None, None));
        assert_eq!(judge(Some(7), Some(8)), Ok(()));
        for (before, behind) in [(Some(7), Some(7)), (Some(7), Some(0)), (None, Some(1)), (None, None)] {
            assert!(judge(before, behind).is_err(), "{before:?} {behind:?}");
        }
    }
}
