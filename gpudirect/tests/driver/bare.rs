//! A loop of copies as short as the driver lets it be written, to compare ours with: memory that the driver pinned, one
//! call a piece, one wait at the end. This file may hold `unsafe`: it calls the driver by name.

use std::ffi::{c_int, c_void};
use std::time::Instant;

use libloading::Library;

type Code = c_int;

/// The driver, with memory on both sides.
#[derive(Debug)]
pub(crate) struct Bare {
    cuda: Library,
    host: *mut c_void,
    memory: u64,
    stream: *mut c_void,
    bytes: u64,
}

impl Bare {
    /// Memory of `bytes` bytes on both sides; the first device's context is this thread's from then on.
    pub(crate) fn new(bytes: u64) -> Self {
        // SAFETY: opens a library by name; its initialisers are NVIDIA's, or the stand-in's, which has none.
        let cuda = unsafe { Library::new("libcuda.so.1") }.expect("a driver");
        let none = std::ptr::null_mut();
        let mut bare = Self { cuda, host: none, memory: 0, stream: none, bytes };
        let mut context: *mut c_void = none;
        let len = bytes as usize;
        // SAFETY: the signatures are those of the driver's header; each writes one handle or address.
        unsafe {
            let init: unsafe extern "C" fn(u32) -> Code = bare.symbol("cuInit");
            told("cuInit", init(0));
            let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> Code =
                bare.symbol("cuDevicePrimaryCtxRetain");
            told("cuDevicePrimaryCtxRetain", retain(&raw mut context, 0));
            let current: unsafe extern "C" fn(*mut c_void) -> Code = bare.symbol("cuCtxSetCurrent");
            told("cuCtxSetCurrent", current(context));
            let pinned: unsafe extern "C" fn(*mut *mut c_void, usize) -> Code =
                bare.symbol("cuMemAllocHost_v2");
            told("cuMemAllocHost", pinned(&raw mut bare.host, len));
            std::ptr::write_bytes(bare.host.cast::<u8>(), 1, len);
            let allocate: unsafe extern "C" fn(*mut u64, usize) -> Code = bare.symbol("cuMemAlloc_v2");
            told("cuMemAlloc", allocate(&raw mut bare.memory, len));
            let stream: unsafe extern "C" fn(*mut *mut c_void, u32) -> Code = bare.symbol("cuStreamCreate");
            told("cuStreamCreate", stream(&raw mut bare.stream, 1));
        }
        bare
    }

    fn symbol<F: Copy>(&self, name: &str) -> F {
        // SAFETY: looked up only; each use names the type of the driver's header.
        *unsafe { self.cuda.get::<F>(name.as_bytes()) }.expect("every driver has it")
    }

    /// Seconds of a loop that copies `count` pieces.
    pub(crate) fn copies(&self, to_device: bool, piece: u64, count: u64) -> f64 {
        assert!(piece * count <= self.bytes, "more than there is");
        type There = unsafe extern "C" fn(u64, *const c_void, usize, *mut c_void) -> Code;
        type Back = unsafe extern "C" fn(*mut c_void, u64, usize, *mut c_void) -> Code;
        let (there, back): (There, Back) =
            (self.symbol("cuMemcpyHtoDAsync_v2"), self.symbol("cuMemcpyDtoHAsync_v2"));
        let wait: unsafe extern "C" fn(*mut c_void) -> Code = self.symbol("cuStreamSynchronize");
        let begin = Instant::now();
        for at in 0..count {
            let host = self.host.wrapping_byte_add((at * piece) as usize);
            // SAFETY: inside both memories (checked above), which are kept until the wait below.
            let code = unsafe {
                if to_device {
                    there(self.memory + at * piece, host, piece as usize, self.stream)
                } else {
                    back(host, self.memory + at * piece, piece as usize, self.stream)
                }
            };
            told("cuMemcpyAsync", code);
        }
        // SAFETY: its own stream.
        told("cuStreamSynchronize", unsafe { wait(self.stream) });
        begin.elapsed().as_secs_f64()
    }
}

fn told(call: &str, code: Code) {
    assert_eq!(code, 0, "{call}");
}
