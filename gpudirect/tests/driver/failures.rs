//! Calls that fail, at once or later, and drivers that lack something: what comes out, and what is given back.

use kvarts_gpudirect::device::cuda::Cuda;
use kvarts_gpudirect::device::{Batch, Device, Direction, InUse, Method, Piece};
use kvarts_gpudirect::error::DeviceError;
use kvarts_gpudirect::gather::Curve;
use kvarts_gpudirect::pace::RealPace;

use crate::copies::{host, pattern, there_and_back};
use crate::standin::{Kit, Standin, here, inside};

/// After these the driver answers every call with the same error, until the process ends.
const LOST: [(i32, &str); 13] = [
    (4, "CUDA_ERROR_DEINITIALIZED"),
    (46, "CUDA_ERROR_DEVICE_UNAVAILABLE"),
    (214, "CUDA_ERROR_ECC_UNCORRECTABLE"),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
    (702, "CUDA_ERROR_LAUNCH_TIMEOUT"),
    (709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"),
    (710, "CUDA_ERROR_ASSERT"),
    (714, "CUDA_ERROR_HARDWARE_STACK_ERROR"),
    (715, "CUDA_ERROR_ILLEGAL_INSTRUCTION"),
    (716, "CUDA_ERROR_MISALIGNED_ADDRESS"),
    (717, "CUDA_ERROR_INVALID_ADDRESS_SPACE"),
    (718, "CUDA_ERROR_INVALID_PC"),
    (719, "CUDA_ERROR_LAUNCH_FAILED"),
];

/// A copy that ends in an error of the device: what its event says, and what is said afterwards.
fn broken(standin: &Standin, method: Method, code: i32) -> (DeviceError, DeviceError) {
    let device = Cuda::open(0).unwrap();
    let (region, buf) = host(4096);
    device.pin(&region).unwrap();
    let (stream, memories) = (device.stream().unwrap(), [device.allocate(4096).unwrap()]);
    let pieces = [Piece { memory: 0, at: 0, host: 0, len: 4096 }];
    let batch =
        Batch { direction: Direction::ToDevice, method, host: &buf, memories: &memories, pieces: &pieces };
    // Held, so that enqueuing succeeds whatever thread is faster.
    let number = standin.latest();
    standin.stand(number);
    standin.break_work(1, code);
    device.copy(&stream, &batch).unwrap();
    let event = device.record(&stream).unwrap();
    standin.go(number);
    let first = device.synchronize(&event).unwrap_err();
    let second = device.copy(&stream, &batch).unwrap_err();
    assert_eq!(device.synchronize(&event), Err(first.clone()), "the event keeps its error");
    device.unpin(&region);
    (first, second)
}

#[test]
fn an_error_of_a_copy_comes_out_at_its_event_and_says_whether_the_device_is_lost() {
    inside(Kit::Whole, here!(), |standin| {
        standin.only("a device that breaks");
        // Each opens the device anew: with its last user the broken context goes, and all that was in it.
        for (at, (code, name)) in LOST.into_iter().enumerate() {
            let (first, second) = broken(standin, Method::ALL[at % 3], code);
            assert_eq!(first, DeviceError::Lost(format!("cuEventQuery: {name}")));
            assert!(matches!(second, DeviceError::Lost(_)), "{second:?}");
            standin.settle();
        }
        let (first, second) = broken(standin, Method::Each, 999);
        let why = "CUDA_ERROR_UNKNOWN".to_owned();
        assert_eq!(first, DeviceError::Call { call: "cuEventQuery", why: why.clone() });
        assert_eq!(second, DeviceError::Call { call: "cuMemcpyAsync", why });
        standin.settle();
        // Codes that the bindings do not have, and that no driver has: numbers like any other.
        for code in [917, 919, 12_345, -1] {
            let (first, _) = broken(standin, Method::Each, code);
            let why = format!("error {code}");
            assert_eq!(first, DeviceError::Call { call: "cuEventQuery", why });
            standin.settle();
        }
        let (first, _) = broken(standin, Method::Each, 100);
        assert_eq!(first, DeviceError::Absent("CUDA_ERROR_NO_DEVICE".to_owned()));
        standin.settle();
        // A context that is made anew works.
        there_and_back(standin, &Cuda::open(0).unwrap(), Method::Kernel, true);
    });
}

#[test]
fn calls_that_fail_are_named_and_leave_nothing() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let (region, buf) = host(4096);
        device.pin(&region).unwrap();
        let (stream, memories) = (device.stream().unwrap(), [device.allocate(4096).unwrap()]);
        // Events stay, to be used again.
        let live =
            || standin.live().into_iter().filter(|line| !line.starts_with("events")).collect::<Vec<_>>();
        let before = (device.in_use(), live());
        let fails = |entry: &str, call: &'static str, work: &dyn Fn() -> Result<(), DeviceError>| {
            standin.fail(entry, 1, 400);
            let why = "CUDA_ERROR_INVALID_HANDLE".to_owned();
            assert_eq!(work(), Err(DeviceError::Call { call, why }), "{entry}");
            assert_eq!((device.in_use(), live()), before, "{entry}");
            assert_eq!(work(), Ok(()), "after {entry}");
            assert_eq!((device.in_use(), live()), before, "after {entry}");
        };
        let event = || device.record(&stream).map(drop);
        fails("cuEventCreate", "cuEventCreate", &event);
        fails("cuEventRecord", "cuEventRecord", &event);
        let made = || device.stream().map(drop);
        fails("cuCtxPushCurrent_v2", "cuCtxPushCurrent", &made);
        fails("cuStreamCreate", "cuStreamCreate", &made);
        fails("cuMemAlloc_v2", "cuMemAlloc", &|| device.allocate(8).map(drop));
        fails("cuPointerGetAttribute", "cuPointerGetAttribute", &|| {
            device.adopt(memories[0].base(), 8).map(drop)
        });
        fails("cuIpcGetMemHandle", "cuIpcGetMemHandle", &|| device.export(&memories[0]).map(drop));
        fails("cuStreamIsCapturing", "cuStreamIsCapturing", &|| device.adopt_stream(0).map(drop));
        fails("cuStreamWaitEvent", "cuStreamWaitEvent", &|| device.wait(&stream, &device.record(&stream)?));
        fails("cuEventQuery", "cuEventQuery", &|| device.synchronize(&device.record(&stream)?));
        let pieces = [Piece { memory: 0, at: 0, host: 0, len: 4096 }];
        for (method, direction, entry, call) in [
            (Method::Each, Direction::ToDevice, "cuMemcpyHtoDAsync_v2", "cuMemcpyAsync"),
            (Method::Each, Direction::ToHost, "cuMemcpyDtoHAsync_v2", "cuMemcpyAsync"),
            (Method::Batch, Direction::ToHost, "cuMemcpyBatchAsync", "cuMemcpyBatchAsync"),
            (Method::Kernel, Direction::ToHost, "cuMemHostGetDevicePointer_v2", "cuMemHostGetDevicePointer"),
            (Method::Kernel, Direction::ToDevice, "cuLaunchKernel", "cuLaunchKernel"),
        ] {
            let batch = Batch { direction, method, host: &buf, memories: &memories, pieces: &pieces };
            fails(entry, call, &|| {
                device.copy(&stream, &batch)?;
                kvarts_gpudirect::device::drain(&device, &stream)
            });
        }
        device.unpin(&region);
    });
}

/// A driver that lacks something moves every byte all the same, and says what it lacks.
fn without(kit: Kit, test: &str, prepare: fn(&Standin), methods: &[Method], says: &str) {
    inside(kit, test, |standin| {
        prepare(standin);
        let device = Cuda::open(0).unwrap();
        assert_eq!(device.methods(), methods);
        let notes = device.describe().notes.join("\n");
        assert!(notes.contains(says) && notes.is_empty() == says.is_empty(), "{notes}");
        for method in Method::ALL {
            there_and_back(standin, &device, method, true);
        }
        let memory = device.allocate(100).unwrap();
        standin.poke(memory.base(), &pattern(100, 1));
        let digests = device.digests(&memory, &[(0, 100)]);
        if methods.contains(&Method::Kernel) {
            assert_eq!(digests, Ok(vec![crc32fast::hash(&pattern(100, 1))]));
        } else {
            assert!(matches!(digests, Err(DeviceError::Foreign(_))), "{digests:?}");
        }
    });
}

#[test]
fn a_driver_without_batches_copies_one_by_one_and_says_so() {
    let methods = [Method::Each, Method::Kernel];
    without(Kit::Old, here!(), |_| {}, &methods, "the driver lacks cuMemcpyBatchAsync");
}

#[test]
fn kernels_need_a_driver_and_nothing_else() {
    let prepare = |_: &Standin| assert!(!kvarts_gpudirect::device::cuda::has_cufile(), "this kit has none");
    // As every kit, this one has no compiler either.
    without(Kit::Bare, here!(), prepare, &Method::ALL, "");
}

#[test]
fn a_driver_that_is_older_than_the_kernels_has_none_and_says_so() {
    let methods = [Method::Each, Method::Batch];
    let says =
        "the kernel for gathering could not be loaded: cuModuleLoadData: CUDA_ERROR_UNSUPPORTED_PTX_VERSION";
    without(Kit::Whole, here!(), |standin| standin.knows_ptx(65), &methods, says);
}

#[test]
fn a_module_that_is_loaded_without_its_kernel_is_unloaded() {
    inside(Kit::Whole, here!(), |standin| {
        // The first two are those of the digests; those of slots and of the gather kernel follow.
        for nth in [1, 2] {
            standin.fail("cuModuleGetFunction", nth, 500);
            let device = Cuda::open(0).unwrap();
            assert_eq!(device.methods(), Method::ALL);
            let notes = device.describe().notes.join("\n");
            assert!(notes.contains("the device cannot compute digests: cuModuleGetFunction"), "{notes}");
            assert_eq!(standin.live(), ["contexts retained: 1", "modules: 2"]);
        }
        standin.fail("cuModuleLoadData", 3, 218);
        let other = Cuda::open(0).unwrap();
        assert_eq!(other.methods(), Method::ALL);
        let notes = other.describe().notes.join("\n");
        assert!(
            notes.contains(
                "the kernel for slots could not be loaded: cuModuleLoadData: CUDA_ERROR_INVALID_PTX"
            ),
            "{notes}"
        );
        drop(other);
        standin.fail("cuModuleLoadData", 4, 218);
        let other = Cuda::open(0).unwrap();
        assert_eq!(other.methods(), [Method::Each, Method::Batch]);
        let notes = other.describe().notes.join("\n");
        assert!(
            notes.contains(
                "the kernel for gathering could not be loaded: cuModuleLoadData: CUDA_ERROR_INVALID_PTX"
            ),
            "{notes}"
        );
        assert_eq!(other.in_use(), InUse::default());
    });
}

#[test]
fn a_curve_is_measured_over_every_method() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let (region, buf) = host(256 << 10);
        device.pin(&region).unwrap();
        let curve = Curve::measure(&device, &*RealPace::new(), &buf, 64 << 10, 1).unwrap();
        let points = curve.points();
        assert!(points.iter().all(|point| point.bytes_per_second.is_normal()), "{points:?}");
        for piece in points.iter().map(|point| point.piece_bytes) {
            // Of each size the way is used that was measured to be the fastest.
            let of = points.iter().filter(move |point| point.piece_bytes == piece);
            let most = of.clone().map(|point| point.bytes_per_second).max_by(f64::total_cmp).unwrap();
            let used = of.clone().find(|point| point.method == curve.best(piece)).unwrap();
            assert_eq!(used.bytes_per_second, most, "{piece} in {points:?}");
        }
        for call in ["cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync", "cuLaunchKernel"] {
            assert!(standin.calls(call) > 0, "{call}");
        }
        device.unpin(&region);
    });
}
