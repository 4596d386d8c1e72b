//! The stand-in for NVIDIA's libraries: built with the machine's C compiler, loaded in a process of its own, asked what it
//! saw. It is a double (`library/standin.h`): what it shows is the order and the bookkeeping of our calls.
//!
//! The bindings load libraries by name, and a process looks for them where `LD_LIBRARY_PATH` said when it began. So each
//! test runs itself again as a process that begins with the stand-in's folder there; that process is also what keeps
//! tests apart from each other. This file may hold `unsafe`: it calls what the stand-in exports, whose signatures are in
//! `library/`.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use kvarts_gpudirect::device::{Device, Route, cuda};
use libloading::Library;

use crate::way::{self, is_real, not_here};

/// Where the dynamic linker looks first.
const PATH: &str = "LD_LIBRARY_PATH";

/// Set in the process that a test runs in.
const INSIDE: &str = "KVARTS_STANDIN";

/// Which libraries there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kit {
    /// All of them.
    Whole,
    /// A driver that is older than `cuMemcpyBatchAsync`, and a cuFile that cannot be told to read straight only.
    Old,
    /// No cuFile.
    Bare,
}

/// Waits until something is so that must come to be.
pub(crate) fn until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < way::timeout(), "it never is: {what}");
        std::thread::yield_now();
    }
}

/// Whether this process is the one of the test.
pub(crate) fn is_inside(test: &str) -> bool {
    std::env::var(INSIDE).is_ok_and(|name| name == test)
}

/// This program again, for one test, with the stand-in's libraries.
pub(crate) fn again(kit: Kit, test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    // An empty name in the list would be the working directory.
    let before = std::env::var(PATH).map(|path| format!(":{path}")).unwrap_or_default();
    command.env(PATH, format!("{}{before}", folder(kit).display()));
    if is_real() {
        // What watches stands under the name that the driver itself has not.
        command.env("KVARTS_LIBCUDA", "libcuda.so");
    }
    command.env(INSIDE, test).args(["--exact", test, "--nocapture", "--test-threads", "1"]);
    command
}

/// Runs the body of a test in a process of its own, and holds it to it that nothing was misused and nothing is left.
pub(crate) fn inside(kit: Kit, test: &str, body: impl FnOnce(&Standin)) {
    if is_inside(test) {
        crate::planted::plant();
        let standin = Standin::load();
        body(&standin);
        standin.settle();
        return;
    }
    if let Err(said) = way::run(again(kit, test), test) {
        panic!("{test} in a process of its own: {said}");
    }
}

/// The name of the test that this stands in, as the test harness knows it.
macro_rules! here {
    () => {{
        fn place() {}
        let name = std::any::type_name_of_val(&place).trim_end_matches("::place");
        name.split_once("::").map_or(name, |(_, test)| test)
    }};
}
pub(crate) use here;

/// The sources of the driver's library.
const DRIVER: [&str; 5] = ["state.c", "memory.c", "stream.c", "copy.c", "kernel.c"];

/// Where the libraries of a kit lie, built if these sources never were: other processes may run with those that are there.
pub(crate) fn folder(kit: Kit) -> PathBuf {
    let name = way::name(kit, is_real());
    if let Some(folder) = way::libraries() {
        return folder.join(name);
    }
    // Threads of one process must not draft in one place.
    static BUILDING: Mutex<()> = Mutex::new(());
    let _one = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut all = crc32fast::Hasher::new();
    for source in [&DRIVER[..], &["standin.h", "cufile.c", "watch.c"]].concat() {
        all.update(&std::fs::read(sources().join(source)).unwrap());
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{:08x}", all.finalize()));
    if !folder.exists() {
        let draft = folder.with_extension(std::process::id().to_string());
        std::fs::create_dir_all(&draft).unwrap();
        build(kit, is_real(), &draft);
        // Another process may have been faster.
        if std::fs::rename(&draft, &folder).is_err() {
            std::fs::remove_dir_all(&draft).unwrap();
        }
    }
    folder
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/driver/library")
}

pub(crate) fn build(kit: Kit, is_real: bool, folder: &Path) {
    let without = if kit == Kit::Old { &["-DWITHOUT_BATCH"][..] } else { &[] };
    // Libraries of a machine that has them must not be found in their place: an empty file ends the search.
    let absent = |name: &str| std::fs::write(folder.join(name), "").unwrap();
    // Nothing here is compiled for a device but by the driver.
    cudarc::get_lib_name_candidates("nvrtc").iter().for_each(|name| absent(name));
    if kit == Kit::Bare {
        cudarc::get_lib_name_candidates("cufile").iter().for_each(|name| absent(name));
        absent("libcufile.so.0");
    }
    if is_real {
        // Under a name of its own: the driver's is the driver's.
        compile(folder, "libcuda.so", "libkvarts-watch.so", &["watch.c"], without);
        return;
    }
    let link = |name: &str, to: &str| {
        let _ = std::fs::remove_file(folder.join(name));
        std::fs::copy(folder.join(to), folder.join(name)).map(drop).unwrap();
    };
    compile(folder, "libcuda.so.1", "libcuda.so.1", &DRIVER, without);
    if kit != Kit::Bare {
        let without = if kit == Kit::Old { &["-DWITHOUT_PARAMETERS"][..] } else { &[] };
        compile(folder, "libcufile.so.0", "libcufile.so.0", &["cufile.c"], without);
        link("libcufile.so", "libcufile.so.0");
    }
    link("libcuda.so", "libcuda.so.1");
}

fn compile(folder: &Path, name: &str, called: &str, from: &[&str], flags: &[&str]) {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut command = Command::new(compiler);
    command.args([
        "-std=c11",
        "-D_GNU_SOURCE",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-fPIC",
        "-shared",
        "-pthread",
    ]);
    command.args(flags).arg(format!("-Wl,-soname,{called}")).arg("-o").arg(folder.join(name));
    command.args(from.iter().map(|source| sources().join(source))).arg("-ldl");
    let output = command.output().expect("tests need a C compiler, as the build does");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} is not built:\n{said}");
}

/// The stand-in for libcuda, as tests see it.
#[derive(Debug)]
pub(crate) struct Standin {
    cuda: Library,
}

type Report = unsafe extern "C" fn(*mut c_char, usize) -> c_int;

impl Standin {
    fn load() -> Self {
        // SAFETY: the stand-in has no initialisers.
        let cuda = unsafe { Library::new("libcuda.so") }.expect("it was built");
        let standin = Self { cuda };
        // The real one has no such symbol: a test that runs over it by mistake says so.
        assert_eq!(standin.calls("none"), 0);
        standin
    }

    /// What follows only the stand-in can do.
    pub(crate) fn only(&self, why: &str) {
        if is_real() {
            not_here(&format!("stand-in only: {why}"));
        }
    }

    /// What follows needs `count` devices.
    pub(crate) fn needs_devices(&self, count: u32) {
        if is_real() && cuda::count().is_ok_and(|there| there < count) {
            not_here(&format!("it needs {count} devices"));
        }
    }

    /// Whether files can be read straight, or why not.
    pub(crate) fn files(&self) -> Result<(), String> {
        if !is_real() {
            return Ok(());
        }
        let device = cuda::Cuda::open(0).map_err(|error| error.to_string())?;
        let files = device.files(Route::Strict).map_err(|error| error.to_string())?;
        let file = crate::files::file(&[1; 4096]);
        let open = files.open(std::os::fd::AsFd::as_fd(&file)).map_err(|error| error.to_string())?;
        let memory = device.allocate(4096).map_err(|error| error.to_string())?;
        let into = files.register(&memory).map_err(|error| error.to_string())?;
        files.prove(&open, 0, &into, 0, 4096).map_err(|error| error.to_string())
    }

    /// What follows reads files straight.
    pub(crate) fn needs_files(&self) {
        if let Err(why) = self.files() {
            not_here(&format!("files cannot be read straight: {why}"));
        }
    }

    /// What the stand-in exports under a name. `F` must be its type.
    fn symbol<F: Copy>(&self, name: &str) -> F {
        // SAFETY: looked up only; each use below names the type that is in `library/`.
        *unsafe { self.cuda.get::<F>(name.as_bytes()) }.expect("the stand-in has it")
    }

    fn report(&self, name: &str) -> Vec<String> {
        let mut text = vec![0u8; 64 << 10];
        // SAFETY: writes a C string of at most `text.len()` bytes.
        unsafe { self.symbol::<Report>(name)(text.as_mut_ptr().cast(), text.len()) };
        let text = CStr::from_bytes_until_nul(&text).unwrap().to_string_lossy().into_owned();
        text.lines().map(str::to_owned).collect()
    }

    /// What no correct program does.
    pub(crate) fn misuse(&self) -> Vec<String> {
        self.report("standin_misuse")
    }

    /// What was wrong so far was so on purpose.
    pub(crate) fn forgive(&self) {
        self.only("misuse on purpose");
        // SAFETY: takes and gives nothing.
        unsafe { self.symbol::<unsafe extern "C" fn()>("standin_forgive")() };
    }

    /// What is alive, a line each.
    pub(crate) fn live(&self) -> Vec<String> {
        self.report("standin_live")
    }

    /// Nothing was misused, nothing is left, nothing is under way.
    pub(crate) fn settle(&self) {
        until("all work is done", || self.pending() == 0);
        assert_eq!(self.misuse(), Vec::<String>::new(), "misused");
        assert_eq!(self.live(), Vec::<String>::new(), "left");
    }

    /// How often an entry point was called.
    pub(crate) fn calls(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        // SAFETY: reads a C string.
        unsafe { self.symbol::<unsafe extern "C" fn(*const c_char) -> u64>("standin_calls")(name.as_ptr()) }
    }

    /// The `nth` next call of an entry point fails, without doing anything.
    pub(crate) fn fail(&self, name: &str, nth: u64, code: c_int) {
        let name = CString::new(name).unwrap();
        let fail: unsafe extern "C" fn(*const c_char, u64, c_int) = self.symbol("standin_fail");
        // SAFETY: reads a C string.
        unsafe { fail(name.as_ptr(), nth, code) };
    }

    /// Every call of an entry point fails, without doing anything, until the code is 0.
    pub(crate) fn refuse_call(&self, name: &str, code: c_int) {
        let name = CString::new(name).unwrap();
        let refuse: unsafe extern "C" fn(*const c_char, c_int) = self.symbol("standin_refuse_call");
        // SAFETY: reads a C string.
        unsafe { refuse(name.as_ptr(), code) };
    }

    /// An engine captures a graph, in global mode, or does not.
    pub(crate) fn capture(&self, on: bool) {
        // SAFETY: one number.
        unsafe { self.symbol::<unsafe extern "C" fn(c_int)>("standin_capture")(c_int::from(on)) };
    }

    /// What this thread's context is, how many it has pushed, and how it meets captures.
    pub(crate) fn thread(&self) -> (u64, c_int) {
        let mut context = 0u64;
        let to = (&raw mut context).expose_provenance() as u64;
        assert_eq!(self.direct("cuCtxGetCurrent", [to, 0, 0, 0]), 0);
        // SAFETY: gives a number.
        (context, unsafe { self.symbol::<unsafe extern "C" fn() -> c_int>("standin_thread")() })
    }

    /// Copies with host memory that is not pinned.
    pub(crate) fn pageable(&self) -> u64 {
        // SAFETY: gives a number.
        unsafe { self.symbol::<unsafe extern "C" fn() -> u64>("standin_pageable")() }
    }

    /// The `nth` next work that a stream begins breaks its context.
    pub(crate) fn break_work(&self, nth: u64, code: c_int) {
        self.only("a device that breaks");
        // SAFETY: two numbers.
        unsafe { self.symbol::<unsafe extern "C" fn(u64, c_int)>("standin_break")(nth, code) };
    }

    /// Makes as many devices as are wanted.
    pub(crate) fn devices(&self, count: c_int) {
        self.only("as many devices as are wanted");
        // SAFETY: one number.
        unsafe { self.symbol::<unsafe extern "C" fn(c_int)>("standin_devices")(count) };
    }

    /// How much memory both devices have.
    pub(crate) fn room(&self, bytes: usize) {
        self.only("a device with little memory");
        // SAFETY: one number.
        unsafe { self.symbol::<unsafe extern "C" fn(usize)>("standin_room")(bytes) };
    }

    /// The number of the stream that was made last.
    pub(crate) fn latest(&self) -> usize {
        // SAFETY: gives a number.
        unsafe { self.symbol::<unsafe extern "C" fn() -> usize>("standin_streams")() }
    }

    /// The handle of a stream.
    pub(crate) fn handle(&self, number: usize) -> u64 {
        // SAFETY: one number.
        unsafe { self.symbol::<unsafe extern "C" fn(usize) -> u64>("standin_stream")(number) }
    }

    fn stand_still(&self, number: usize, still: c_int) {
        // SAFETY: two numbers.
        unsafe { self.symbol::<unsafe extern "C" fn(usize, c_int)>("standin_stand")(number, still) };
    }

    /// A stream stands still from its next work on; 0 are the default streams, and one that is not made yet may be named.
    pub(crate) fn stand(&self, number: usize) {
        self.stand_still(number, 1);
    }

    /// It goes on.
    pub(crate) fn go(&self, number: usize) {
        self.stand_still(number, 0);
    }

    /// Work that is not done.
    pub(crate) fn pending(&self) -> u64 {
        // SAFETY: gives a number.
        unsafe { self.symbol::<unsafe extern "C" fn() -> u64>("standin_pending")() }
    }

    /// Bytes of device memory, beside all streams.
    pub(crate) fn peek(&self, at: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0u8; len as usize];
        let peek: unsafe extern "C" fn(u64, *mut u8, usize) -> c_int = self.symbol("standin_peek");
        // SAFETY: writes as many bytes as there are.
        assert_eq!(unsafe { peek(at, bytes.as_mut_ptr(), bytes.len()) }, 0, "no device memory");
        bytes
    }

    /// Writes device memory, beside all streams.
    pub(crate) fn poke(&self, at: u64, bytes: &[u8]) {
        let poke: unsafe extern "C" fn(u64, *const u8, usize) -> c_int = self.symbol("standin_poke");
        // SAFETY: reads as many bytes as there are.
        assert_eq!(unsafe { poke(at, bytes.as_ptr(), bytes.len()) }, 0, "no device memory");
    }

    /// The newest PTX that the driver knows, as ten times its version.
    pub(crate) fn knows_ptx(&self, version: u64) {
        // SAFETY: one number.
        unsafe { self.symbol::<unsafe extern "C" fn(u64)>("standin_ptx")(version) };
    }

    /// Memory that is allocated from now on is made of pieces of `bytes` bytes, each an allocation of its own.
    pub(crate) fn grain(&self, bytes: usize) {
        self.only("memory of many mappings");
        // SAFETY: one number.
        unsafe { self.symbol::<unsafe extern "C" fn(usize)>("standin_grain")(bytes) };
    }

    /// The engine captures a graph from a stream, or ends that: whether the graph is good, and of this stream alone.
    pub(crate) fn capture_of(&self, number: usize, on: bool) -> bool {
        let capture: unsafe extern "C" fn(usize, c_int) -> c_int = self.symbol("standin_capture_of");
        // SAFETY: two numbers.
        unsafe { capture(number, c_int::from(on)) != 0 }
    }

    /// A call of the driver that the code under test does not make, or makes wrongly.
    pub(crate) fn direct(&self, name: &str, arguments: [u64; 4]) -> c_int {
        let [a, b, c, d] = arguments;
        // SAFETY: entry points that take at most four numbers or addresses; the stand-in looks at every handle and
        // address before it uses it.
        unsafe { self.symbol::<unsafe extern "C" fn(u64, u64, u64, u64) -> c_int>(name)(a, b, c, d) }
    }

    /// Makes the context of a device current on this thread, as [`Standin::direct`] needs it.
    pub(crate) fn enter(&self, device: u64) {
        let mut context = 0u64;
        let to = (&raw mut context).expose_provenance() as u64;
        assert_eq!(self.direct("cuDevicePrimaryCtxRetain", [to, device, 0, 0]), 0);
        assert_eq!(self.direct("cuCtxSetCurrent", [context, 0, 0, 0]), 0);
        // The caller has a device open, which keeps the context.
        assert_eq!(self.direct("cuDevicePrimaryCtxRelease_v2", [device, 0, 0, 0]), 0);
    }
}

/// What cuFile says, as C gives it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Status {
    pub(crate) code: c_int,
    cuda: c_int,
}

#[repr(C)]
struct Describes {
    kind: c_int,
    of: *mut c_void,
    operations: *const c_void,
}

/// The machine's libcufile cannot be told what to do.
fn only_here() {
    if is_real() {
        not_here("stand-in only: a cuFile that does as a test says");
    }
}

/// The stand-in for libcufile, called as C would.
#[derive(Debug)]
pub(crate) struct Files(Library);

impl Files {
    pub(crate) fn load() -> Self {
        // SAFETY: the stand-in has no initialisers.
        Self(unsafe { Library::new("libcufile.so.0") }.expect("it was built"))
    }

    fn symbol<F: Copy>(&self, name: &str) -> F {
        // SAFETY: as in `Standin`.
        *unsafe { self.0.get::<F>(name.as_bytes()) }.expect("the stand-in has it")
    }

    pub(crate) fn driver(&self, call: &str) -> c_int {
        // SAFETY: opening and closing take nothing.
        unsafe { self.symbol::<unsafe extern "C" fn() -> Status>(call)() }.code
    }

    pub(crate) fn register(&self, file: &std::fs::File) -> Result<usize, c_int> {
        let of = std::ptr::without_provenance_mut(file.as_raw_fd() as usize);
        let (mut handle, mut describes) = (0usize, Describes { kind: 1, of, operations: std::ptr::null() });
        let call: unsafe extern "C" fn(*mut usize, *mut Describes) -> Status =
            self.symbol("cuFileHandleRegister");
        // SAFETY: writes one handle, reads one description.
        let status = unsafe { call(&raw mut handle, &raw mut describes) };
        if status.code == 0 { Ok(handle) } else { Err(status.code) }
    }

    pub(crate) fn deregister(&self, handle: usize) {
        // SAFETY: a handle that is none is recognised.
        unsafe { self.symbol::<unsafe extern "C" fn(usize)>("cuFileHandleDeregister")(handle) };
    }

    pub(crate) fn register_buffer(&self, base: u64, len: u64) -> c_int {
        let call: unsafe extern "C" fn(u64, usize, c_int) -> Status = self.symbol("cuFileBufRegister");
        // SAFETY: an address that is none is recognised.
        unsafe { call(base, len as usize, 0) }.code
    }

    pub(crate) fn deregister_buffer(&self, base: u64) -> c_int {
        // SAFETY: as above.
        unsafe { self.symbol::<unsafe extern "C" fn(u64) -> Status>("cuFileBufDeregister")(base) }.code
    }

    pub(crate) fn read(&self, handle: usize, base: u64, len: u64, at: i64, into: i64) -> isize {
        let call: unsafe extern "C" fn(usize, u64, usize, c_long, c_long) -> isize =
            self.symbol("cuFileRead");
        // SAFETY: as above; the bytes go where the stand-in keeps device memory.
        unsafe { call(handle, base, len as usize, at, into) }
    }

    /// The next `count` reads: 1 give `what` bytes at most, 2 fail with the errno `what`, 3 with the error `what`.
    pub(crate) fn next_reads(&self, how: c_int, what: c_long, count: c_int) {
        only_here();
        let call: unsafe extern "C" fn(c_int, c_long, c_int) = self.symbol("standin_reads");
        // SAFETY: three numbers.
        unsafe { call(how, what, count) };
    }

    /// Files have no straight way from now on.
    pub(crate) fn detour(&self) {
        only_here();
        // SAFETY: one number.
        unsafe { self.symbol::<unsafe extern "C" fn(c_int)>("standin_detours")(1) };
    }

    /// What reads must be aligned to.
    pub(crate) fn align(&self, bytes: usize) {
        only_here();
        // SAFETY: one number.
        unsafe { self.symbol::<unsafe extern "C" fn(usize)>("standin_alignment")(bytes) };
    }
}
