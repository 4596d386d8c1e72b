//! What is made and given back: contexts, memory, pinned memory, streams, events; and that the stand-in sees misuse.

use std::sync::Arc;

use kvarts_contract::buffers::Region;
use kvarts_gpudirect::device::cuda::{Cuda, count};
use kvarts_gpudirect::device::{Batch, Device, Direction, InUse, Method, Piece, drain};
use kvarts_gpudirect::error::DeviceError;

use crate::copies::host;
use crate::standin::{Kit, here, inside, until};
use crate::way::is_real;

#[test]
fn a_device_says_what_it_is_and_its_context_is_released() {
    inside(Kit::Whole, here!(), |standin| {
        standin.only("devices with known names");
        assert_eq!(count(), Ok(2));
        let (first, second) = (Cuda::open(0).unwrap(), Cuda::open(1).unwrap());
        let said = first.describe();
        assert_eq!((said.kind.as_str(), said.name.as_str()), ("cuda:0", "stand-in 0, no GPU"));
        assert_eq!(said.memory_bytes, Some(1 << 30));
        assert_eq!(second.describe().name, "stand-in 1, no GPU");
        assert_eq!(first.methods(), Method::ALL);
        assert_eq!(first.in_use(), InUse::default());
        let error = Cuda::open(2).unwrap_err();
        assert_eq!(
            error,
            DeviceError::Absent("the device cuda:2 does not exist: the number of devices is 2".to_owned())
        );
        // The context belongs to the process: opened twice it is retained twice.
        let again = Cuda::open(0).unwrap();
        assert_eq!(standin.live()[0], "contexts retained: 3");
        drop(again);
        drop((first, second));
    });
}

#[test]
fn a_driver_without_devices_or_that_does_not_start_is_absent() {
    inside(Kit::Whole, here!(), |standin| {
        standin.only("as many devices as are wanted");
        standin.fail("cuInit", 1, 100);
        let error = Cuda::open(0).unwrap_err();
        assert_eq!(error, DeviceError::Absent("CUDA_ERROR_NO_DEVICE".to_owned()));
        standin.fail("cuInit", 1, 999);
        let error = Cuda::open(0).unwrap_err();
        assert_eq!(error, DeviceError::Absent("cuInit: CUDA_ERROR_UNKNOWN".to_owned()));
        standin.devices(0);
        assert_eq!(Cuda::open(0).unwrap_err(), DeviceError::Absent("the driver found no device".to_owned()));
        standin.devices(1);
        assert_eq!(count(), Ok(1));
        standin.fail("cuDevicePrimaryCtxRetain", 1, 2);
        assert_eq!(Cuda::open(0).unwrap_err(), DeviceError::NoMemory(0));
    });
}

#[test]
fn memory_is_freed_with_its_last_clone_on_whatever_thread() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let memory = device.allocate(1000).unwrap();
        assert_eq!((memory.len(), device.in_use().memories), (1000, 1));
        let clone = memory.clone();
        drop(memory);
        assert_eq!(standin.calls("cuMemFree_v2"), 0);
        // A thread that has never called the driver.
        std::thread::spawn(move || drop(clone)).join().unwrap();
        assert_eq!((standin.calls("cuMemFree_v2"), device.in_use().memories), (1, 0));
        // Memory that outlives the device's last name, from a thread without a context.
        let late = std::thread::spawn(move || device.allocate(1).unwrap()).join().unwrap();
        std::thread::spawn(move || drop(late)).join().unwrap();
    });
}

#[test]
fn nothing_is_allocated_where_there_is_no_room() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        standin.room(5000);
        let first = device.allocate(4000).unwrap();
        assert_eq!(device.allocate(4096).unwrap_err(), DeviceError::NoMemory(4096));
        assert_eq!(device.in_use().memories, 1);
        drop(first);
        drop(device.allocate(4096).unwrap());
        // Memory of no bytes is memory all the same.
        assert!(device.allocate(0).unwrap().is_empty());
    });
}

#[test]
fn memory_is_adopted_inside_one_allocation_of_this_device_only() {
    inside(Kit::Whole, here!(), |standin| {
        standin.needs_devices(2);
        let (device, other) = (Cuda::open(0).unwrap(), Cuda::open(1).unwrap());
        let (pool, theirs) = (device.allocate(8192).unwrap(), other.allocate(8192).unwrap());
        let whole = device.adopt(pool.base(), 8192).unwrap();
        let part = device.adopt(pool.base() + 100, 8092).unwrap();
        assert_eq!((part.base(), part.len()), (pool.base() + 100, 8092));
        assert_eq!(device.adopt(pool.base() + 100, 8093).unwrap_err(), DeviceError::OutOfBounds);
        assert_eq!(device.adopt(pool.base() + 100, u64::MAX).unwrap_err(), DeviceError::OutOfBounds);
        assert!(matches!(device.adopt(theirs.base(), 1), Err(DeviceError::Foreign(_))));
        let region = Region::anonymous(4096).unwrap();
        let host = region.base().expose_provenance() as u64;
        assert!(matches!(device.adopt(host, 1), Err(DeviceError::Call { .. })), "host memory");
        device.pin(&region).unwrap();
        assert!(matches!(device.adopt(host, 1), Err(DeviceError::Foreign(_))), "pinned host memory");
        device.unpin(&region);
        drop((whole, part));
        assert_eq!(standin.calls("cuMemFree_v2"), 0, "the engine that allocated it frees it");
        let gone = pool.base();
        drop(pool);
        assert!(matches!(device.adopt(gone, 1), Err(DeviceError::Call { .. })), "memory that was freed");
        drop(theirs);
    });
}

#[test]
fn memory_is_pinned_once_until_whoever_pinned_it_has_unpinned_it() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let (region, other) = (Region::anonymous(8192).unwrap(), Region::anonymous(4096).unwrap());
        let registered = || standin.calls("cuMemHostRegister_v2");
        let unregistered = || standin.calls("cuMemHostUnregister");
        standin.fail("cuMemHostRegister_v2", 1, 2);
        assert!(matches!(device.pin(&region), Err(DeviceError::Pin(_))));
        assert_eq!((device.in_use().pinned, registered()), (0, 1));
        device.unpin(&region);
        assert_eq!(unregistered(), 0, "what failed is not undone");
        device.pin(&region).unwrap();
        device.pin(&region).unwrap();
        device.pin(&other).unwrap();
        assert_eq!((device.in_use().pinned, registered()), (2, 3));
        device.unpin(&region);
        assert_eq!((device.in_use().pinned, unregistered()), (2, 0));
        device.unpin(&region);
        assert_eq!((device.in_use().pinned, unregistered()), (1, 1));
        let (theirs, last) = (device.clone(), Arc::clone(&other));
        std::thread::spawn(move || theirs.unpin(&last)).join().unwrap();
        device.pin(&region).unwrap();
        device.unpin(&region);
        assert_eq!((device.in_use().pinned, unregistered()), (0, 3));
    });
}

#[test]
fn memory_that_grew_piece_by_piece_is_adopted_from_begin_to_end() {
    inside(Kit::Whole, here!(), |standin| {
        standin.grain(4096);
        let (device, other) = (Cuda::open(0).unwrap(), Cuda::open(1).unwrap());
        let pool = device.allocate(5 * 4096 + 10).unwrap();
        let part = device.adopt(pool.base() + 100, 4 * 4096).unwrap();
        assert_eq!((part.base(), part.len()), (pool.base() + 100, 4 * 4096));
        drop(device.adopt(pool.base(), 5 * 4096 + 10).unwrap());
        for (at, len) in [(0, 5 * 4096 + 11), (4096, 5 * 4096), (1, u64::MAX - 1)] {
            assert_eq!(device.adopt(pool.base() + at, len).unwrap_err(), DeviceError::OutOfBounds, "{at}");
        }
        assert!(matches!(other.adopt(pool.base(), 5 * 4096), Err(DeviceError::Foreign(_))));
        // The name of a piece would be that of a part.
        assert!(matches!(device.export(&part), Err(DeviceError::Foreign(_))));
    });
}

#[test]
fn two_devices_pin_the_same_memory_and_the_last_to_leave_unpins_it() {
    inside(Kit::Whole, here!(), |standin| {
        standin.needs_devices(2);
        let [first, second, again] = [0, 1, 0].map(|at| Cuda::open(at).unwrap());
        let (region, buf) = host(4096);
        let moves = |device: &Cuda| {
            let (stream, memories) = (device.stream().unwrap(), [device.allocate(4096).unwrap()]);
            let pieces = [Piece { memory: 0, at: 0, host: 0, len: 4096 }];
            for method in Method::ALL {
                let direction = Direction::ToDevice;
                let batch = Batch { direction, method, host: &buf, memories: &memories, pieces: &pieces };
                device.copy(&stream, &batch).unwrap();
                drain(device, &stream).unwrap();
            }
            assert_eq!((standin.pageable(), device.in_use().pinned), (0, 1));
        };
        [&first, &second, &again].into_iter().for_each(|device| device.pin(&region).unwrap());
        [&first, &second, &again].into_iter().for_each(moves);
        assert_eq!(standin.calls("cuMemHostRegister_v2"), 1);
        // The device that pinned it goes first.
        first.unpin(&region);
        again.unpin(&region);
        drop((first, again));
        assert_eq!(standin.calls("cuMemHostUnregister"), 0);
        moves(&second);
        second.unpin(&region);
        assert_eq!(standin.calls("cuMemHostUnregister"), 1);
        assert_eq!(second.in_use(), InUse::default());
    });
}

#[test]
fn memory_that_the_engine_has_pinned_is_pinned_and_stays_so() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        standin.enter(0);
        let region = Region::anonymous(8192).unwrap();
        let base = region.base().expose_provenance() as u64;
        assert_eq!(standin.direct("cuMemHostRegister_v2", [base, 8192, 3, 0]), 0);
        device.pin(&region).unwrap();
        assert_eq!(device.in_use().pinned, 1);
        device.unpin(&region);
        assert_eq!(standin.direct("cuMemHostUnregister", [base, 0, 0, 0]), 0, "it is the engine's to unpin");
        // Of memory that is pinned in part a copy would not know which it is.
        assert_eq!(standin.direct("cuMemHostRegister_v2", [base, 4096, 3, 0]), 0);
        assert!(matches!(device.pin(&region), Err(DeviceError::Pin(_))));
        assert_eq!(device.in_use().pinned, 0);
        assert_eq!(standin.direct("cuMemHostUnregister", [base, 0, 0, 0]), 0);
        device.pin(&region).unwrap();
        device.unpin(&region);
    });
}

#[test]
fn a_stub_for_building_is_told_apart_from_a_driver_without_devices() {
    inside(Kit::Bare, here!(), |standin| {
        standin.refuse_call("cuInit", 34);
        let why = count().unwrap_err().to_string();
        assert!(why.contains("stub for building"), "{why}");
        standin.refuse_call("cuInit", 0);
        assert!(count().is_ok());
    });
}

#[test]
fn whether_a_driver_is_there_is_seen_without_asking_it() {
    inside(Kit::Whole, here!(), |standin| {
        let shown = kvarts_gpudirect::device::cuda::shown();
        assert_eq!(standin.calls("cuInit"), 0);
        // As the files say; the stand-in has none.
        let files = ["/dev/nvidiactl", "/dev/dxg"].iter().any(|file| std::path::Path::new(file).exists());
        assert_eq!(shown.is_ok(), files, "{shown:?}");
    });
}

#[test]
fn everything_may_go_in_any_order() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let stream = device.stream().unwrap();
        let memory = device.allocate(16).unwrap();
        let event = device.record(&stream).unwrap();
        assert_eq!(device.in_use(), InUse { memories: 1, streams: 1, ..InUse::default() });
        drop(device);
        drop(stream);
        drop(memory);
        assert!(standin.live().contains(&"contexts retained: 1".to_owned()));
        std::thread::spawn(move || drop(event)).join().unwrap();
    });
}

#[test]
fn a_stream_of_the_engine_is_used_and_not_destroyed() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let theirs = device.stream().unwrap();
        let ours = device.adopt_stream(standin.handle(standin.latest())).unwrap();
        let event = device.record(&ours).unwrap();
        drop(ours);
        assert_eq!((standin.calls("cuStreamDestroy_v2"), device.in_use().streams), (0, 1));
        device.synchronize(&event).unwrap();
        // A driver reads what it is told is a stream.
        if !is_real() {
            let none = device.adopt_stream(0x1000);
            assert!(matches!(none, Err(DeviceError::Call { .. })), "it is no stream");
        }
        // The default stream is one as well, and one that stands still is still a stream.
        standin.stand(standin.latest());
        let event = device.record(&device.adopt_stream(0).unwrap()).unwrap();
        device.wait(&theirs, &event).unwrap();
        drop(device.adopt_stream(standin.handle(standin.latest())).unwrap());
        standin.go(standin.latest());
        drop(theirs);
    });
}

#[test]
fn what_another_device_made_is_refused_before_the_driver_is_called() {
    use kvarts_gpudirect::device::emulated::{Emulated, Model};
    inside(Kit::Whole, here!(), |_| {
        let (device, emulated) = (Cuda::open(0).unwrap(), Emulated::new(Model::default()));
        let stream = emulated.stream().unwrap();
        assert!(matches!(device.record(&stream), Err(DeviceError::Foreign(_))));
        let event = emulated.record(&stream).unwrap();
        assert!(matches!(device.synchronize(&event), Err(DeviceError::Foreign(_))));
        let own = device.stream().unwrap();
        assert!(matches!(device.wait(&own, &event), Err(DeviceError::Foreign(_))));
    });
}

/// The stand-in would be of no use if it let pass what it is there to see.
#[test]
fn the_stand_in_sees_misuse() {
    inside(Kit::Whole, here!(), |standin| {
        standin.only("misuse on purpose");
        assert_eq!(standin.direct("cuMemFree_v2", [0; 4]), 3, "before cuInit");
        assert_eq!(standin.misuse(), ["cuMemFree_v2 before cuInit"]);
        let device = Cuda::open(0).unwrap();
        let outside = std::thread::scope(|scope| {
            scope.spawn(|| standin.direct("cuMemFree_v2", [0; 4])).join().unwrap()
        });
        assert_eq!(outside, 201);
        standin.forgive();
        standin.enter(0);
        let expect = |call: &str, arguments: [u64; 4], says: &str| {
            assert_ne!(standin.direct(call, arguments), 0, "{call}");
            assert!(standin.misuse().concat().contains(says), "{call}: {:?}", standin.misuse());
            standin.forgive();
        };
        let memory = device.allocate(100).unwrap();
        let (base, host) = (memory.base(), 1u64 << 20);
        let region = Region::anonymous(4096).unwrap();
        let buffer = region.base().expose_provenance() as u64;
        expect("cuMemFree_v2", [base + 1, 0, 0, 0], "no allocation");
        expect("cuMemFree_v2", [host, 0, 0, 0], "no allocation");
        expect("cuMemcpyHtoDAsync_v2", [buffer, buffer, 8, 0], "no device memory");
        expect("cuMemcpyHtoDAsync_v2", [base, base, 8, 0], "no host memory");
        expect("cuMemcpyHtoDAsync_v2", [base + 96, buffer, 8, 0], "beyond device memory");
        expect("cuMemHostUnregister", [buffer, 0, 0, 0], "not registered");
        expect("cuEventQuery", [base, 0, 0, 0], "an event that is none");
        expect("cuStreamSynchronize", [buffer, 0, 0, 0], "a stream that is none");
        let stream = device.stream().unwrap();
        let (number, handle) = (standin.latest(), standin.handle(standin.latest()));
        // Memory that is not pinned is copied before the call ends.
        device.pin(&region).unwrap();
        standin.stand(number);
        assert_eq!(standin.direct("cuMemcpyHtoDAsync_v2", [base, buffer, 8, handle]), 0);
        assert_eq!(standin.direct("cuMemFree_v2", [base, 0, 0, 0]), 0);
        assert_eq!(standin.misuse(), ["memory is freed while work under way uses it"]);
        standin.go(number);
        until("the copy is done", || standin.pending() == 0);
        device.unpin(&region);
        expect("cuCtxPopCurrent_v2", [buffer, 0, 0, 0], "was not pushed");
        expect("cuMemFreeHost", [buffer, 0, 0, 0], "no host memory of the driver");
        standin.capture(true);
        expect("cuMemFree_v2", [base, 0, 0, 0], "breaks the graph");
        standin.capture(false);
        drop(stream);
        expect("cuStreamSynchronize", [handle, 0, 0, 0], "was destroyed");
        drop(memory);
        assert!(standin.misuse().concat().contains("given back"), "freed twice: {:?}", standin.misuse());
        standin.forgive();
    });
}
