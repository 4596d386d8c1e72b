//! Digests on the device: the launch, its table, and what comes back.

use std::time::Duration;

use kvarts_gpudirect::device::Device;
use kvarts_gpudirect::device::cuda::Cuda;
use kvarts_gpudirect::error::DeviceError;

use crate::copies::pattern;
use crate::standin::{Kit, here, inside, until};

/// Chunks of lengths around every edge, at every alignment.
fn chunks() -> Vec<(u64, u64)> {
    let lens = [0, 1, 3, 4, 5, 1023, 1024, 1025, 4096, 4097, 9999];
    (0u64..8).flat_map(|skew| lens.map(|len| (skew * 10_007 + skew, len))).collect()
}

#[test]
fn digests_are_the_stores_for_chunks_of_any_length_and_place() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let memory = device.allocate(100_000).unwrap();
        let bytes = pattern(100_000, 3);
        standin.poke(memory.base(), &bytes);
        let chunks = chunks();
        let expected: Vec<u32> = chunks
            .iter()
            .map(|&(at, len)| crc32fast::hash(&bytes[at as usize..(at + len) as usize]))
            .collect();
        assert_eq!(device.digests(&memory, &chunks), Ok(expected.clone()));
        assert_eq!(standin.calls("cuLaunchKernel"), 1);
        // Inside adopted memory chunks count from where that begins.
        let part = device.adopt(memory.base() + 10_008, 20_000).unwrap();
        assert_eq!(device.digests(&part, &[(0, 9999), (0, 0)]), Ok(vec![expected[21], expected[11]]));
        assert_eq!(device.digests(&memory, &[]), Ok(Vec::new()));
        assert_eq!(device.digests(&memory, &[(0, 1), (99_999, 2)]), Err(DeviceError::OutOfBounds));
        assert_eq!(device.digests(&memory, &[(u64::MAX, 2)]), Err(DeviceError::OutOfBounds));
        assert_eq!(standin.calls("cuLaunchKernel"), 2);
        // More chunks than one grid has blocks, and as many as another kernel is for: each of another length, at another place.
        let many = |count: u64| (0..count).map(|at| (at * 19, at % 41)).collect::<Vec<_>>();
        let of = |chunks: &[(u64, u64)]| {
            let hash = |&(at, len): &(u64, u64)| crc32fast::hash(&bytes[at as usize..(at + len) as usize]);
            chunks.iter().map(hash).collect::<Vec<_>>()
        };
        for count in [3000, 5000] {
            assert_eq!(device.digests(&memory, &many(count)), Ok(of(&many(count))), "{count}");
        }
        let many = many(3000);
        // What they work with is made once for as many chunks, and is the device's own.
        let made = standin.calls("cuStreamCreate");
        assert_eq!(device.digests(&memory, &many), Ok(of(&many)));
        assert_eq!((device.in_use().streams, standin.calls("cuStreamCreate")), (0, made));
        // Copies with memory that is not pinned would wait in the driver, where no timeout has an effect.
        assert_eq!(standin.pageable(), 0);
    });
}

/// A synchronous copy goes through the default stream and may return before its bytes are on the device; streams that do
/// not wait for the default stream read what was there before.
#[test]
fn digests_do_not_depend_on_what_the_default_stream_does() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let memory = device.allocate(4096).unwrap();
        let bytes = pattern(4096, 5);
        standin.poke(memory.base(), &bytes);
        // An engine keeps it busy for good.
        standin.stand(0);
        let whole = crc32fast::hash(&bytes);
        assert_eq!(device.digests(&memory, &[(0, 4096), (1, 0)]), Ok(vec![whole, 0]));
        standin.go(0);
    });
}

#[test]
fn digests_that_fail_leave_nothing_behind() {
    inside(Kit::Whole, here!(), |standin| {
        let calls = [
            "cuStreamCreate",
            "cuMemAlloc_v2",
            "cuMemAllocHost_v2",
            "cuMemcpyHtoDAsync_v2",
            "cuLaunchKernel",
            "cuMemcpyDtoHAsync_v2",
        ];
        for call in calls {
            let device = Cuda::open(0).unwrap();
            let memory = device.allocate(4096).unwrap();
            standin.poke(memory.base(), &pattern(4096, 5));
            let right = vec![crc32fast::hash(&pattern(4096, 5))];
            standin.fail(call, 1, 1);
            let failed = device.digests(&memory, &[(0, 4096)]);
            assert!(matches!(failed, Err(DeviceError::Call { .. })), "{call}: {failed:?}");
            assert_eq!(device.digests(&memory, &[(0, 4096)]), Ok(right.clone()), "after {call}");
        }
    });
}

#[test]
fn digests_that_stand_still_are_told_as_such_and_nothing_of_them_is_used_again_before_they_are_done() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let memory = device.allocate(4096).unwrap();
        standin.poke(memory.base(), &pattern(4096, 5));
        let right = vec![crc32fast::hash(&pattern(4096, 5))];
        let first = standin.latest() + 1;
        standin.stand(first);
        let late = device.digests_within(&memory, &[(0, 4096)], Duration::from_millis(20));
        assert_eq!(late, Err(DeviceError::Stuck { millis: 20 }));
        assert_eq!(device.digests(&memory, &[(0, 4096)]), Ok(right.clone()), "by another stream");
        assert_eq!(standin.latest(), first + 1);
        // A declaration that the device is lost reaches the thread that waits.
        standin.stand(first + 1);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| device.digests(&memory, &[(0, 4096)]));
            until("it waits", || standin.pending() > 1);
            device.declare_lost("it does not answer");
            assert!(matches!(waits.join().unwrap(), Err(DeviceError::Lost(_))));
        });
        standin.go(first);
        standin.go(first + 1);
        until("the device is done with it", || standin.pending() == 0);
    });
}
