//! Files that are read straight into device memory: cuFile's calls as our code makes them, copies within the device, and
//! the pipeline over both.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::Verify;
use kvarts_gpudirect::DeviceArena;
use kvarts_gpudirect::device::Method;
use kvarts_gpudirect::device::cuda::Cuda;
use kvarts_gpudirect::device::{Device, InUse, Piece, Route, drain};
use kvarts_gpudirect::error::{DeviceError, EndReason};
use kvarts_gpudirect::pipeline::{DirectUse, LandRequest, Next};

use crate::copies::pattern;
use crate::files::file;
use crate::pipeline::{LAYERS, Pool, Site, take_all};
use crate::standin::{Files, Kit, Standin, here, inside, until};

/// cuFile's driver stays open as long as the process: closed here, so that nothing is left.
fn close() {
    assert_eq!(Files::load().driver("cuFileDriverClose_v2"), 0);
}

/// What is said of the handles that are registered.
fn handles(standin: &Standin) -> String {
    let live = standin.live();
    live.into_iter().find(|what| what.starts_with("cuFile handles")).unwrap_or_default()
}

#[test]
fn a_file_is_registered_once_for_all_who_read_it_and_forgotten_with_the_last() {
    inside(Kit::Whole, here!(), |standin| {
        standin.only("cuFile's books");
        let device = Cuda::open(0).unwrap();
        {
            let files = device.files(Route::Strict).unwrap();
            let bytes = pattern(20_000, 2);
            let (one, other) = (file(&bytes), file(&bytes[5000..]));
            let memory = device.allocate(8192).unwrap();
            let into = files.register(&memory).unwrap();
            let first = files.open(one.as_fd()).unwrap();
            let second = device.files(Route::Strict).unwrap().open(one.as_fd()).unwrap();
            let third = files.open(other.as_fd()).unwrap();
            assert_eq!(handles(standin), "cuFile handles: 2");
            assert_eq!(device.in_use(), InUse { memories: 1, files: 4, ..InUse::default() });
            drop(first);
            files.read(&second, 4096, &into, 512, 4096).unwrap();
            assert!(standin.peek(memory.base() + 512, 4096) == bytes[4096..8192]);
            files.read(&third, 0, &into, 0, 512).unwrap();
            assert!(standin.peek(memory.base(), 512) == bytes[5000..5512]);
            assert_eq!(handles(standin), "cuFile handles: 2");
            drop(second);
            assert_eq!(handles(standin), "cuFile handles: 1");
            let again = files.open(one.as_fd()).unwrap();
            assert_eq!(handles(standin), "cuFile handles: 2");
            drop(memory);
            files.read(&again, 0, &into, 0, 8192).unwrap();
        }
        assert_eq!(device.in_use(), InUse::default());
        close();
    });
}

#[test]
fn a_read_is_whole_or_says_why_not() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        standin.only("a cuFile that does as a test says");
        let files = device.files(Route::Strict).unwrap();
        let bytes = pattern(10_000, 3);
        let source = file(&bytes);
        let open = files.open(source.as_fd()).unwrap();
        let into = files.register(&device.allocate(8192).unwrap()).unwrap();
        let why = |ended: Result<(), DeviceError>| match ended {
            Err(DeviceError::Call { call: "cuFileRead", why }) => why,
            other => panic!("{other:?}"),
        };
        Files::load().next_reads(1, 1000, 3);
        files.read(&open, 100, &into, 0, 8192).unwrap();
        assert!(standin.peek(into.memory().base(), 8192) == bytes[100..8292], "in four reads");
        assert!(why(files.read(&open, 9000, &into, 0, 4096)).contains("ends before"));
        Files::load().next_reads(2, 5, 1);
        assert!(why(files.read(&open, 0, &into, 0, 4096)).contains("os error 5"));
        Files::load().next_reads(3, 5030, 1);
        assert!(why(files.read(&open, 0, &into, 0, 4096)).contains("5030"));
        let beyond = [(8192, 1), (1, 8192), (u64::MAX, 1), (0, u64::MAX)];
        for (at, len) in beyond {
            assert_eq!(files.read(&open, 0, &into, at, len), Err(DeviceError::OutOfBounds), "{at} {len}");
        }
        assert!(files.read(&open, u64::MAX, &into, 0, 1).is_err());
        files.read(&open, 0, &into, 8192, 0).unwrap();
        device.declare_lost("told");
        assert!(matches!(files.read(&open, 0, &into, 0, 1), Err(DeviceError::Lost(_))));
        drop((open, into, files));
        close();
    });
}

#[test]
fn what_cannot_be_registered_is_an_error_and_leaves_nothing() {
    inside(Kit::Whole, here!(), |standin| {
        standin.needs_files();
        let device = Cuda::open(0).unwrap();
        {
            let files = device.files(Route::Strict).unwrap();
            let memory = device.allocate(8192).unwrap();
            let into = files.register(&memory).unwrap();
            let twice = files.register(&memory).unwrap_err();
            assert!(
                matches!(&twice, DeviceError::Call { call: "cuFileBufRegister", why } if why.contains("5023"))
            );
            drop(into);
            drop(files.register(&memory).unwrap());
            let other: Arc<dyn Device> =
                Arc::new(kvarts_gpudirect::device::emulated::Emulated::new(Default::default()));
            let foreign = files.register(&other.allocate(64).unwrap());
            assert!(matches!(foreign, Err(DeviceError::Foreign(_))));
        }
        assert_eq!(device.in_use(), InUse::default());
        close();
    });
}

#[test]
fn without_the_library_there_are_no_files_and_the_reason() {
    inside(Kit::Bare, here!(), |_| {
        let device: Arc<dyn Device> = Arc::new(Cuda::open(0).unwrap());
        let error = DeviceArena::new(&device, 1).unwrap_err();
        assert!(error.to_string().contains("libcufile"), "{error}");
        assert_eq!(device.in_use(), InUse::default());
    });
}

/// A kernel that digests and stands still: how its stream ends, and that what it reads comes back behind it.
fn still(standin: &Standin, timeout: Duration, deadline: Option<Duration>) -> Option<EndReason> {
    let site = Site::new();
    let shared: Arc<dyn Device> = Arc::new(site.device.clone());
    let arena = DeviceArena::new(&shared, 256 << 10).unwrap();
    let pipeline = site.pipeline(Method::Each).with_files(site.store().clone(), arena.clone());
    let pipeline = pipeline.with_copy_timeout(timeout);
    let (pool, compute) = (Pool::new(&site), site.device.stream().unwrap());
    // Behind that of the copies.
    let digests = standin.latest() + 2;
    standin.stand(digests);
    let deadline = deadline.map(|time| site.store().clock().now().plus(time));
    let mut landing = pipeline.land(LandRequest { deadline, ..site.request(1, &pool) }).unwrap();
    let Next::End(end) = landing.next_layer(&compute) else { panic!("an unverified layer") };
    assert!(arena.usage().used > 0, "the kernel may still read it");
    if deadline.is_none() {
        drop(landing);
        assert!(arena.usage().used > 0, "and the drop does not wait for it");
    }
    standin.go(digests);
    until("the kernel lets go", || arena.usage().used == 0);
    end.reason
}

#[test]
fn a_digest_that_stands_still_ends_its_stream_and_what_it_reads_comes_back_when_it_is_done() {
    inside(Kit::Whole, here!(), |standin| {
        standin.needs_files();
        let stuck = DeviceError::Stuck { millis: 20 };
        assert_eq!(still(standin, Duration::from_millis(20), None), Some(EndReason::Device(stuck)));
        close();
    });
}

#[test]
fn a_deadline_that_is_nearer_than_the_timeout_ends_the_wait_for_a_digest() {
    inside(Kit::Whole, here!(), |standin| {
        standin.needs_files();
        let ended = still(standin, Duration::from_secs(600), Some(Duration::from_secs(1)));
        assert_eq!(ended, Some(EndReason::Deadline));
        close();
    });
}

#[test]
fn a_copy_back_that_fails_sends_its_layer_through_the_arena() {
    inside(Kit::Whole, here!(), |standin| {
        standin.needs_files();
        standin.knows_ptx(65);
        {
            let site = Site::new();
            let shared: Arc<dyn Device> = Arc::new(site.device.clone());
            let arena = DeviceArena::new(&shared, 256 << 10).unwrap();
            let pipeline = site.pipeline(Method::Each).with_files(site.store().clone(), arena.clone());
            let (pool, compute) = (Pool::new(&site), site.device.stream().unwrap());
            standin.fail("cuMemcpyDtoHAsync_v2", 1, 1);
            let request = LandRequest { verify: Verify::Sample(1000), ..site.request(1, &pool) };
            let mut landing = pipeline.land(request).unwrap();
            take_all(&mut landing, &compute);
            assert_eq!(landing.landed(), LAYERS as u32);
            drop(landing);
            assert!(pool.holds(standin, &pool.expected(&site)));
            let used = pipeline.direct_use().unwrap();
            assert_eq!((used.layers, used.staged), (0, 1), "{used:?}");
            until("reads let go", || arena.usage().used == 0);
        }
        close();
    });
}

/// Pieces of one memory copied to others of the same device.
fn spread(standin: &Standin, count: u64) {
    let device = Cuda::open(0).unwrap();
    let bytes = pattern(400 * 40, 7);
    let from = device.allocate(bytes.len() as u64).unwrap();
    standin.poke(from.base(), &bytes);
    let memories = [device.allocate(20_000).unwrap(), device.allocate(20_000).unwrap()];
    let piece = |n: u64| Piece { memory: (n % 2) as u32, at: n * 45 + 3, host: n * 40, len: 31 + n % 5 };
    let pieces: Vec<Piece> = (0..count).map(piece).collect();
    let stream = device.stream().unwrap();
    device.spread(&stream, &from, &memories, &pieces).unwrap();
    drain(&device, &stream).unwrap();
    for (at, memory) in memories.iter().enumerate() {
        let mut expected = vec![0xd5u8; memory.len() as usize];
        for piece in pieces.iter().filter(|piece| piece.memory as usize == at) {
            let (to, from, len) = (piece.at as usize, piece.host as usize, piece.len as usize);
            expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
        }
        assert!(standin.peek(memory.base(), memory.len()) == expected, "memory {at}");
    }
    let beyond = Piece { memory: 0, at: 0, host: from.len() - 1, len: 2 };
    assert_eq!(device.spread(&stream, &from, &memories, &[beyond]), Err(DeviceError::OutOfBounds));
}

#[test]
fn pieces_are_copied_within_the_device_by_launches_of_a_table_each() {
    inside(Kit::Whole, here!(), |standin| {
        spread(standin, 400);
        assert_eq!((standin.calls("cuLaunchKernel"), standin.calls("cuMemcpyDtoDAsync_v2")), (3, 0));
        spread(standin, 1);
        assert_eq!((standin.calls("cuLaunchKernel"), standin.calls("cuMemcpyDtoDAsync_v2")), (3, 1));
    });
}

#[test]
fn without_a_kernel_they_are_copied_one_by_one() {
    inside(Kit::Whole, here!(), |standin| {
        standin.knows_ptx(65);
        spread(standin, 400);
        assert_eq!((standin.calls("cuLaunchKernel"), standin.calls("cuMemcpyDtoDAsync_v2")), (0, 400));
    });
}

#[test]
fn layers_come_straight_from_files_and_through_the_arena_where_that_fails() {
    inside(Kit::Whole, here!(), |standin| {
        standin.needs_files();
        {
            let site = Site::new();
            let shared: Arc<dyn Device> = Arc::new(site.device.clone());
            let arena = DeviceArena::new(&shared, 256 << 10).unwrap();
            let pipeline = site.pipeline(Method::Each).with_files(site.store().clone(), arena.clone());
            let compute = site.device.stream().unwrap();
            let land = |fault: Option<(i32, i64)>| {
                until("reads let go", || arena.usage().used == 0);
                let pool = Pool::new(&site);
                if let Some((how, what)) = fault {
                    Files::load().next_reads(how, what, 1);
                }
                let mut landing = site.land(&pipeline, 1, &pool).unwrap();
                take_all(&mut landing, &compute);
                drop(landing);
                drain(&site.device, &compute).unwrap();
                assert!(pool.holds(standin, &pool.expected(&site)), "every byte and no other");
                pipeline.direct_use().unwrap()
            };
            let used = land(None);
            assert_eq!((used.layers, used.staged), (LAYERS as u64, 0), "{used:?}");
            assert_eq!(site.arena.usage().used_max, 0, "nothing came through the host");
            standin.only("what follows: a cuFile that does as a test says");
            let used = land(Some((3, 5030)));
            assert!(used.last_reason.as_ref().is_some_and(|why| why.contains("5030")), "{used:?}");
            assert_eq!(used.staged, 1);
            // A short read goes on where it ended.
            let before = used.layers;
            let used = land(Some((1, 4096)));
            assert_eq!((used.layers, used.staged), (before + LAYERS as u64, 1), "{used:?}");
            until("reads let go", || arena.usage().used == 0);
        }
        close();
    });
}

/// Layers of a machine whose files have no straight way, over cuFile, which goes another where it may.
fn without_a_way(standin: &Standin, route: Route) -> DirectUse {
    standin.only("a cuFile that does as a test says");
    // Held, so that it remembers what it was told.
    let cufile = Files::load();
    cufile.detour();
    let site = Site::new();
    let shared: Arc<dyn Device> = Arc::new(site.device.clone());
    let arena = DeviceArena::with_route(&shared, 256 << 10, route).unwrap();
    let pipeline = site.pipeline(Method::Each).with_files(site.store().clone(), arena.clone());
    let (pool, compute) = (Pool::new(&site), site.device.stream().unwrap());
    let mut landing = site.land(&pipeline, 1, &pool).unwrap();
    take_all(&mut landing, &compute);
    drop(landing);
    drain(&site.device, &compute).unwrap();
    assert!(pool.holds(standin, &pool.expected(&site)), "every byte and no other");
    until("reads let go", || arena.usage().used == 0);
    pipeline.direct_use().unwrap()
}

#[test]
fn layers_that_cufile_would_read_through_the_processor_are_not_called_direct() {
    inside(Kit::Whole, here!(), |standin| {
        let used = without_a_way(standin, Route::Strict);
        assert_eq!((used.layers, used.staged), (0, 1), "{used:?}");
        assert!(used.last_reason.as_ref().is_some_and(|why| why.contains("5007")), "{used:?}");
        close();
    });
}

#[test]
fn in_a_process_that_did_not_ask_for_it_cufile_is_told_nothing_of_detours() {
    inside(Kit::Whole, here!(), |standin| {
        let used = without_a_way(standin, Route::Straight);
        assert_eq!((used.layers, used.staged), (0, 1), "{used:?}");
        // It made its detour, and nothing was counted. Told of detours it would have refused the read (5007).
        let why = used.last_reason.unwrap();
        assert!(why.contains("processor") || why.contains("is unknown"), "{why}");
        close();
    });
}

#[test]
fn a_cufile_that_cannot_be_told_the_way_is_held_to_what_is_counted() {
    inside(Kit::Old, here!(), |standin| {
        let used = without_a_way(standin, Route::Strict);
        assert_eq!((used.layers, used.staged), (0, 1), "{used:?}");
        assert!(
            used.last_reason
                .as_ref()
                .is_some_and(|why| why.contains("processor") || why.contains("is unknown"))
        );
        close();
    });
}

#[test]
fn who_asks_for_any_way_gets_one() {
    inside(Kit::Whole, here!(), |standin| {
        let used = without_a_way(standin, Route::Any);
        assert_eq!((used.layers, used.staged), (LAYERS as u64, 0), "{used:?}");
        close();
    });
}
