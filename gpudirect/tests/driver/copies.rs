//! Copies by every method, both ways; what each method calls; order within a stream and between streams; waiting.

use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_gpudirect::device::cuda::Cuda;
use kvarts_gpudirect::device::{Batch, Device, Direction, Memory, Method, Piece, Stream, drain};
use kvarts_gpudirect::error::DeviceError;

use crate::standin::{Kit, Standin, here, inside, until};

/// Bytes that differ from place to place.
pub(crate) fn pattern(len: u64, seed: u64) -> Vec<u8> {
    (0..len).map(|at| ((at ^ (seed << 3)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// Zeroed host memory.
pub(crate) fn host(len: u64) -> (Arc<Region>, SharedBuf) {
    let region = Region::anonymous(len as usize).unwrap();
    let buf = SharedBuf::new(&region, 0, len as usize).unwrap();
    (region, buf)
}

/// More pieces than two tables of a launch have, of odd and of even sizes, scattered over two memories, with gaps.
fn scattered() -> Vec<Piece> {
    let sizes = [1, 16, 17, 256, 4096, 33, 5000, 64];
    let (mut pieces, mut host, mut at) = (Vec::new(), 0, [0u64; 2]);
    for (n, len) in (0u32..401).zip(sizes.into_iter().cycle()) {
        let memory = n % 2;
        pieces.push(Piece { memory, at: at[memory as usize], host, len });
        at[memory as usize] += len + 48;
        host += len + u64::from(n % 3);
    }
    pieces
}

/// Copies, and waits until it is done.
pub(crate) fn copy(
    device: &Cuda,
    stream: &Stream,
    direction: Direction,
    method: Method,
    (host, memories, pieces): (&SharedBuf, &[Memory], &[Piece]),
) -> Result<(), DeviceError> {
    device.copy(stream, &Batch { direction, method, host, memories, pieces })?;
    drain(device, stream)
}

/// Every byte of both memories and of the host, after a copy there and one back.
pub(crate) fn there_and_back(standin: &Standin, device: &Cuda, method: Method, pinned: bool) {
    let pieces = scattered();
    let len = pieces.iter().map(|piece| piece.host + piece.len).max().unwrap();
    let size = pieces.iter().map(|piece| piece.at + piece.len).max().unwrap() + 100;
    let ((first, from), (second, back)) = (host(len), host(len));
    let bytes = pattern(len, method as u64);
    from.copy_in(0, &bytes);
    if pinned {
        device.pin(&first).unwrap();
        device.pin(&second).unwrap();
    }
    let memories = [device.allocate(size).unwrap(), device.allocate(size).unwrap()];
    let stream = device.stream().unwrap();
    copy(device, &stream, Direction::ToDevice, method, (&from, &memories, &pieces)).unwrap();
    let mut expected = [vec![0xd5u8; size as usize], vec![0xd5u8; size as usize]];
    let mut expected_back = vec![0u8; len as usize];
    for piece in &pieces {
        let source = &bytes[piece.host as usize..(piece.host + piece.len) as usize];
        let to = &mut expected[piece.memory as usize];
        to[piece.at as usize..(piece.at + piece.len) as usize].copy_from_slice(source);
        expected_back[piece.host as usize..(piece.host + piece.len) as usize].copy_from_slice(source);
    }
    for (memory, expected) in memories.iter().zip(&expected) {
        assert!(standin.peek(memory.base(), size) == *expected, "{method:?}, pinned {pinned}: to the device");
    }
    copy(device, &stream, Direction::ToHost, method, (&back, &memories, &pieces)).unwrap();
    assert!(back.to_vec() == expected_back, "{method:?}, pinned {pinned}: to the host");
    if pinned {
        device.unpin(&first);
        device.unpin(&second);
    }
}

/// Calls of a copy there and one back, by the entry points of the three methods.
fn calls(standin: &Standin) -> [u64; 3] {
    let both = standin.calls("cuMemcpyHtoDAsync_v2") + standin.calls("cuMemcpyDtoHAsync_v2");
    [both, standin.calls("cuMemcpyBatchAsync"), standin.calls("cuLaunchKernel")]
}

#[test]
fn each_method_moves_every_byte_both_ways_and_no_other() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let mut before = [0; 3];
        for (method, expected) in Method::ALL.into_iter().zip([[802, 0, 0], [0, 2, 0], [0, 0, 6]]) {
            there_and_back(standin, &device, method, true);
            let after = calls(standin);
            assert_eq!([0, 1, 2].map(|at| after[at] - before[at]), expected, "{method:?}");
            before = after;
        }
    });
}

#[test]
fn memory_that_is_not_pinned_goes_by_single_copies() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        for method in Method::ALL {
            there_and_back(standin, &device, method, false);
        }
        assert_eq!(calls(standin), [3 * 802, 0, 0]);
        assert_eq!(standin.pageable(), 3 * 802, "each waits in the driver");
    });
}

#[test]
fn nothing_is_copied_by_every_method_without_an_error() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let (region, buf) = host(4096);
        buf.copy_in(0, &pattern(4096, 7));
        device.pin(&region).unwrap();
        let (stream, memories) = (device.stream().unwrap(), [device.allocate(4096).unwrap()]);
        for (at, method) in (0..).zip(Method::ALL) {
            copy(&device, &stream, Direction::ToDevice, method, (&buf, &memories, &[])).unwrap();
            // A piece of no bytes, at the very end too, beside one with bytes.
            let pieces = [
                Piece { memory: 0, at: 4096, host: 4096, len: 0 },
                Piece { memory: 0, at: at * 8, host: 0, len: 8 },
                Piece { memory: 0, at: 0, host: 0, len: 0 },
            ];
            copy(&device, &stream, Direction::ToDevice, method, (&buf, &memories, &pieces)).unwrap();
            copy(&device, &stream, Direction::ToDevice, method, (&buf, &memories, &pieces[..1])).unwrap();
            assert_eq!(standin.peek(memories[0].base() + at * 8, 8), pattern(8, 7), "{method:?}");
        }
        device.unpin(&region);
    });
}

#[test]
fn pieces_that_leave_their_memory_are_refused_before_the_driver_is_called() {
    use kvarts_gpudirect::device::emulated::{Emulated, Model};
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let (region, buf) = host(4096);
        device.pin(&region).unwrap();
        let (stream, memories) = (device.stream().unwrap(), [device.allocate(100).unwrap()]);
        let piece = Piece { memory: 0, at: 0, host: 0, len: 100 };
        let wrong = [
            Piece { at: 1, ..piece },
            Piece { at: u64::MAX, ..piece },
            Piece { host: 4000, ..piece },
            Piece { memory: 1, ..piece },
            Piece { len: 101, ..piece },
        ];
        let theirs = [Emulated::new(Model::default()).allocate(100).unwrap()];
        for method in Method::ALL {
            for wrong in wrong {
                let pieces = [piece, wrong];
                let copied = copy(&device, &stream, Direction::ToHost, method, (&buf, &memories, &pieces));
                assert_eq!(copied, Err(DeviceError::OutOfBounds), "{method:?} {wrong:?}");
            }
            let copied = copy(&device, &stream, Direction::ToHost, method, (&buf, &theirs, &[piece]));
            assert!(matches!(copied, Err(DeviceError::Foreign(_))));
        }
        assert_eq!(calls(standin), [0; 3]);
        device.unpin(&region);
    });
}

#[test]
fn the_default_stream_takes_copies_by_every_method() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let (region, buf) = host(4096);
        device.pin(&region).unwrap();
        let memories = [device.allocate(4096).unwrap()];
        let pieces = [Piece { memory: 0, at: 8, host: 0, len: 4000 }];
        for handle in [0, 1] {
            let stream = device.adopt_stream(handle).unwrap();
            for (seed, method) in (handle * 8..).zip(Method::ALL) {
                buf.copy_in(0, &pattern(4096, seed));
                copy(&device, &stream, Direction::ToDevice, method, (&buf, &memories, &pieces)).unwrap();
                assert!(standin.peek(memories[0].base() + 8, 4000) == pattern(4096, seed)[..4000]);
            }
        }
        device.unpin(&region);
    });
}

/// What is read must be read when the stream comes to it: a batch whose sources are read earlier would give what was
/// there before.
#[test]
fn each_method_reads_its_source_in_the_order_of_the_stream() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let ((first, from), (second, back)) = (host(4096), host(4096));
        device.pin(&first).unwrap();
        device.pin(&second).unwrap();
        let (stream, memories) = (device.stream().unwrap(), [device.allocate(4096).unwrap()]);
        let number = standin.latest();
        let pieces = [0, 1].map(|half| Piece { memory: 0, at: half * 2048, host: half * 2048, len: 2048 });
        for (seed, method) in (20..).zip(Method::ALL) {
            from.copy_in(0, &pattern(4096, seed));
            standin.stand(number);
            let batch =
                |direction, host| Batch { direction, method, host, memories: &memories, pieces: &pieces };
            device.copy(&stream, &batch(Direction::ToDevice, &from)).unwrap();
            device.copy(&stream, &batch(Direction::ToHost, &back)).unwrap();
            let event = device.record(&stream).unwrap();
            assert_eq!(device.synchronize_within(&event, Duration::ZERO), Ok(false));
            standin.go(number);
            device.synchronize(&event).unwrap();
            assert!(back.to_vec() == pattern(4096, seed), "{method:?}");
        }
        device.unpin(&first);
        device.unpin(&second);
    });
}

#[test]
fn a_stream_that_waits_runs_after_the_event_and_nobody_elses_thread_waits() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let (region, buf) = host(8192);
        device.pin(&region).unwrap();
        buf.copy_in(0, &pattern(4096, 1));
        let memories = [device.allocate(4096).unwrap()];
        let piece = |host| [Piece { memory: 0, at: 0, host, len: 4096 }];
        let (there, back) = (device.stream().unwrap(), device.stream().unwrap());
        let number = standin.latest() - 1;
        standin.stand(number);
        let (first, second) = (piece(0), piece(4096));
        let batch = |direction, pieces| Batch {
            direction,
            method: Method::Batch,
            host: &buf,
            memories: &memories,
            pieces,
        };
        device.copy(&there, &batch(Direction::ToDevice, &first)).unwrap();
        let event = device.record(&there).unwrap();
        device.wait(&back, &event).unwrap();
        device.copy(&back, &batch(Direction::ToHost, &second)).unwrap();
        let done = device.record(&back).unwrap();
        // What waits for an event keeps what it needs of it.
        drop(event);
        // Recorded before anything was enqueued there: done, whatever the other stream does.
        let other = device.stream().unwrap();
        device.synchronize(&device.record(&other).unwrap()).unwrap();
        assert_eq!(device.synchronize_within(&done, Duration::from_millis(2)), Ok(false));
        assert!(buf.slice(4096, 4096).unwrap().to_vec().iter().all(|byte| *byte == 0));
        standin.go(number);
        device.synchronize(&done).unwrap();
        assert!(buf.slice(4096, 4096).unwrap().to_vec() == pattern(4096, 1));
        device.unpin(&region);
    });
}

#[test]
fn whoever_waits_for_a_device_that_is_declared_lost_is_told() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let (region, buf) = host(4096);
        device.pin(&region).unwrap();
        let (stream, memories) = (device.stream().unwrap(), [device.allocate(4096).unwrap()]);
        let pieces = [Piece { memory: 0, at: 0, host: 0, len: 4096 }];
        let batch = Batch {
            direction: Direction::ToDevice,
            method: Method::Each,
            host: &buf,
            memories: &memories,
            pieces: &pieces,
        };
        let number = standin.latest();
        standin.stand(number);
        device.copy(&stream, &batch).unwrap();
        let event = device.record(&stream).unwrap();
        let (theirs, late) = (device.clone(), event.clone());
        let waits = std::thread::spawn(move || theirs.synchronize(&late));
        until("the thread has looked", || standin.calls("cuEventQuery") > 2);
        device.declare_lost("it was pulled out");
        device.declare_lost("a second reason");
        let lost = Err(DeviceError::Lost("it was pulled out".to_owned()));
        until("it is told", || waits.is_finished());
        assert_eq!(waits.join().unwrap(), lost);
        assert_eq!(device.copy(&stream, &batch), lost);
        assert_eq!(device.wait(&stream, &event), lost);
        assert_eq!(device.record(&stream).map(drop), lost);
        assert_eq!(device.digests(&memories[0], &[(0, 1)]).map(drop), lost);
        // What it held is given back all the same, once the test's copy is done.
        standin.go(number);
        until("the copy is done", || standin.pending() == 0);
        device.unpin(&region);
    });
}

#[test]
fn threads_copy_at_once_each_in_its_stream() {
    inside(Kit::Whole, here!(), |standin| {
        standin.needs_devices(2);
        let device = Cuda::open(0).unwrap();
        let other = Cuda::open(1).unwrap();
        std::thread::scope(|scope| {
            for method in Method::ALL {
                // The second device on the same threads: each call makes its own context current.
                let (device, other) = (&device, &other);
                scope.spawn(move || {
                    there_and_back(standin, device, method, true);
                    there_and_back(standin, other, method, true);
                });
            }
        });
    });
}
