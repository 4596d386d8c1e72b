//! The calls of libcuda, whose results are numbers.
//!
//! This file may hold `unsafe`: it looks symbols up by name. Of the bindings (`cudarc`)
//! handles, structures, constants and signatures are used; each signature here is compared with theirs when this is
//! compiled. Only the result is another: theirs is a closed enum, and a driver newer than the bindings answers with codes
//! that it does not have, which as such a value would be undefined behaviour. The same holds for enums that the driver
//! writes: they are read as numbers.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys as cu;
use libloading::Library;

/// What a call says: zero, or why not.
pub(super) type Code = c_int;

macro_rules! calls {
    (
        needed { $($name:ident = $symbol:ident($($argument:ty),*);)* }
        newer { $($newer:ident = $newer_symbol:ident($($newer_argument:ty),*);)* }
    ) => {
        /// What is called of the library: what every driver has, and what older ones lack.
        #[derive(Debug)]
        pub(super) struct Calls {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> Code,)*
            $(pub(super) $newer: Option<unsafe extern "C" fn($($newer_argument),*) -> Code>,)*
            error_name: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
        }

        // As the bindings have them, but for the result.
        $(const _: unsafe fn($($argument),*) -> cu::CUresult = cu::$symbol;)*
        $(const _: unsafe fn($($newer_argument),*) -> cu::CUresult = cu::$newer_symbol;)*

        impl Calls {
            /// Looks everything up.
            ///
            /// # Safety
            /// The library must be libcuda.
            unsafe fn find(library: &Library) -> Result<Self, String> {
                // SAFETY: the types are those that the bindings have for these names, with a number for the result.
                unsafe {
                    Ok(Self {
                        $($name: symbol(library, stringify!($symbol))?,)*
                        $($newer: symbol(library, stringify!($newer_symbol)).ok(),)*
                        error_name: symbol(library, "cuGetErrorName")?,
                    })
                }
            }
        }
    };
}

calls! {
    needed {
        init = cuInit(c_uint);
        device_count = cuDeviceGetCount(*mut c_int);
        device = cuDeviceGet(*mut cu::CUdevice, c_int);
        device_name = cuDeviceGetName(*mut c_char, c_int, cu::CUdevice);
        device_bytes = cuDeviceTotalMem_v2(*mut usize, cu::CUdevice);
        retain = cuDevicePrimaryCtxRetain(*mut cu::CUcontext, cu::CUdevice);
        release = cuDevicePrimaryCtxRelease_v2(cu::CUdevice);
        push = cuCtxPushCurrent_v2(cu::CUcontext);
        pop = cuCtxPopCurrent_v2(*mut cu::CUcontext);
        memory_info = cuMemGetInfo_v2(*mut usize, *mut usize);
        allocate = cuMemAlloc_v2(*mut cu::CUdeviceptr, usize);
        free = cuMemFree_v2(cu::CUdeviceptr);
        pointer_attribute = cuPointerGetAttribute(*mut c_void, cu::CUpointer_attribute, cu::CUdeviceptr);
        ipc_name = cuIpcGetMemHandle(*mut cu::CUipcMemHandle, cu::CUdeviceptr);
        ipc_open = cuIpcOpenMemHandle_v2(*mut cu::CUdeviceptr, cu::CUipcMemHandle, c_uint);
        ipc_close = cuIpcCloseMemHandle(cu::CUdeviceptr);
        host_register = cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        host_unregister = cuMemHostUnregister(*mut c_void);
        host_allocate = cuMemAllocHost_v2(*mut *mut c_void, usize);
        host_free = cuMemFreeHost(*mut c_void);
        host_pointer = cuMemHostGetDevicePointer_v2(*mut cu::CUdeviceptr, *mut c_void, c_uint);
        stream_create = cuStreamCreate(*mut cu::CUstream, c_uint);
        stream_destroy = cuStreamDestroy_v2(cu::CUstream);
        stream_query = cuStreamQuery(cu::CUstream);
        stream_wait = cuStreamWaitEvent(cu::CUstream, cu::CUevent, c_uint);
        event_create = cuEventCreate(*mut cu::CUevent, c_uint);
        event_record = cuEventRecord(cu::CUevent, cu::CUstream);
        event_query = cuEventQuery(cu::CUevent);
        event_destroy = cuEventDestroy_v2(cu::CUevent);
        module_load = cuModuleLoadData(*mut cu::CUmodule, *const c_void);
        module_unload = cuModuleUnload(cu::CUmodule);
        module_function = cuModuleGetFunction(*mut cu::CUfunction, cu::CUmodule, *const c_char);
        copy_to_device = cuMemcpyHtoDAsync_v2(cu::CUdeviceptr, *const c_void, usize, cu::CUstream);
        copy_to_host = cuMemcpyDtoHAsync_v2(*mut c_void, cu::CUdeviceptr, usize, cu::CUstream);
        copy_within = cuMemcpyDtoDAsync_v2(cu::CUdeviceptr, cu::CUdeviceptr, usize, cu::CUstream);
        launch = cuLaunchKernel(
            cu::CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, cu::CUstream, *mut *mut c_void,
            *mut *mut c_void
        );
    }
    newer {
        // 12.8.
        copy_batch = cuMemcpyBatchAsync(
            *mut cu::CUdeviceptr, *mut cu::CUdeviceptr, *mut usize, usize, *mut cu::CUmemcpyAttributes, *mut usize, usize,
            *mut usize, cu::CUstream
        );
        // 10.1: how this thread meets captures.
        capture_mode = cuThreadExchangeStreamCaptureMode(*mut cu::CUstreamCaptureMode);
        // 10.0.
        is_capturing = cuStreamIsCapturing(cu::CUstream, *mut cu::CUstreamCaptureStatus);
    }
}

/// A symbol of the library.
///
/// # Safety
/// `T` must be the type of the function of this name.
unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| {
        format!(
            "the function {name} is missing in libcuda: the driver \
        is too old"
        )
    })
}

/// What is said of a library that is none.
pub(super) const STUB: &str = "the library found is a stub for building, not the driver: remove its folder \
    from LD_LIBRARY_PATH";

/// Opens libcuda: the driver's by the name that only the driver has. Images for building have a library `libcuda.so` that is a stub, in
/// folders that are searched first. `KVARTS_LIBCUDA` names another one: a test's, for example.
fn load() -> Result<Library, String> {
    let given = std::env::var_os("KVARTS_LIBCUDA");
    let names = given.map_or_else(|| vec!["libcuda.so.1".into(), "libcuda.so".into()], |name| vec![name]);
    for name in &names {
        // SAFETY: its initialisers are NVIDIA's, or those of the library that was named.
        if let Ok(library) = unsafe { Library::new(name) } {
            return Ok(library);
        }
    }
    Err(format!("the library {} cannot be loaded: install the driver", names[0].display()))
}

impl Calls {
    /// Those of this process's library, or why there are none. Loads it; calls nothing.
    pub(super) fn get() -> Result<&'static Self, String> {
        static CALLS: OnceLock<Result<Calls, String>> = OnceLock::new();
        let calls = CALLS.get_or_init(|| {
            // Its functions are used until the process ends.
            static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
            let library = LIBRARY.get_or_init(load).as_ref().map_err(Clone::clone)?;
            // SAFETY: it is libcuda.
            unsafe { Self::find(library) }
        });
        calls.as_ref().map_err(Clone::clone)
    }

    /// What a code is called, if the driver knows it.
    pub(super) fn name(&self, code: Code) -> String {
        let mut name = std::ptr::null();
        // SAFETY: writes the address of a text that stays, or none.
        let told = unsafe { (self.error_name)(code, &raw mut name) };
        if told != 0 || name.is_null() {
            return format!("error {code}");
        }
        // SAFETY: a text that ends in zero.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}
