//! Layers leaving an emulated device, copies that never end, and pools of another process.
#![allow(
    clippy::disallowed_methods,
    reason = "works on real directories and processes, outside the simulation"
)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::{BlockOutcome, KvStore, Presence};
use kvarts_contract::blocking::block_on;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;
use kvarts_gpudirect::Arena;
use kvarts_gpudirect::Destination;
use kvarts_gpudirect::device::emulated::{Emulated, Faults, Model};
use kvarts_gpudirect::device::{Device, InUse, IpcHandle, drain};
use kvarts_gpudirect::error::{DeviceError, EndReason, LandError};
use kvarts_gpudirect::gather::Curve;
use kvarts_gpudirect::ipc::Opened;
use kvarts_gpudirect::pace::{Pace, RealPace};
use kvarts_gpudirect::pipeline::{LandRequest, Next, Pipeline};
use kvarts_gpudirect::store_layers::StoreRequest;
use kvarts_tests::fixture;
use kvarts_tests::landed::{BLOCKS, COLUMNS, Freed, Pool, Site, is_here, run, store_request, strict, until};

#[test]
fn layers_leave_the_device_as_they_are_computed_and_come_back_as_they_were() {
    for way in Site::WAYS {
        there_and_back(&way);
    }
}

fn there_and_back(way: &dyn Fn(&Site, &Emulated, &Arena) -> Pipeline) {
    let site = Site::new("back");
    let device = strict(Faults::default());
    let pipeline = way(&site, &device, &site.arena);
    let pool = Pool::new(&device, COLUMNS[0]);
    let compute = device.stream().unwrap();
    drop(run(&mut site.land(&pipeline, &pool).unwrap(), &pool, &device, &compute));
    site.settle();
    let request = store_request(&site, &pool, 31);
    let keys = request.keys.clone();
    // Room for two layers of three: the third takes the place of the first, once that is on disk.
    let big = Arena::new(128 << 10).unwrap();
    let pipeline = way(&site, &device, &big);
    let mut sink = pipeline.store_layers(request).unwrap();
    assert!(sink.is_streamed());
    let (pace, time) = (RealPace::new(), Duration::from_millis(30));
    for layer in 0..pool.shape.layers().len() as u32 {
        let begin = pace.now();
        device.compute(&compute, time).unwrap();
        let taken = sink.store_layer(layer, &compute).unwrap();
        if layer == 0 {
            device.synchronize(&taken).unwrap();
            assert!(pace.now().since(begin) >= time, "a layer is taken behind what computes it");
        }
        assert!(is_here(&site, &pool, &keys).iter().all(|presence| *presence != Presence::Here));
    }
    assert!(sink.store_layer(0, &compute).is_err(), "a layer is taken once");
    let reply = block_on(sink.seal().unwrap()).unwrap().unwrap();
    assert!(reply.outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored), "{reply:?}");
    // The store lets go of the arena on its own threads.
    until("the arena is free", || big.usage().used == 0);
    let second = Pool::new(&device, COLUMNS[0]);
    let mut stream = pipeline.land(LandRequest { keys, ..site.request(&second) }).unwrap();
    let (_, end) = run(&mut stream, &second, &device, &compute);
    assert_eq!(end.reason, None);
    for layer in 0..second.shape.layers().len() as u32 {
        assert!(second.is_there(&site, &device, layer), "the bytes of the first pool");
    }
    drop(stream);
    while big.usage().used > 0 {
        std::thread::yield_now();
    }
}

#[test]
fn layers_whose_time_is_over_are_refused_at_once_and_nothing_is_held() {
    let site = Site::new("late");
    let device = strict(Faults::default());
    let pool = Pool::new(&device, COLUMNS[0]);
    let pipeline = site.pipeline(&device);
    let request = StoreRequest { deadline: Some(Nanos(0)), ..store_request(&site, &pool, 32) };
    let refused = pipeline.store_layers(request).err();
    assert!(matches!(refused, Some(LandError::Store(Reason::DeadlineInPast))), "{refused:?}");
    drop((pipeline, pool));
    site.settle();
    until("the device is let go of", || device.in_use() == InUse::default());
}

#[test]
fn a_store_that_is_given_up_or_fails_leaves_nothing() {
    let site = Site::new("aborted");
    for lost in [None, Some(1)] {
        let device = strict(Faults { lost_at_copy: lost, ..Faults::default() });
        let arena = Arena::new(1 << 20).unwrap();
        {
            let store: Arc<dyn KvStore> = Arc::new(site.store().clone());
            let pipeline = Pipeline::new(store, Arc::new(device.clone()), arena.clone(), Curve::default());
            let pool = Pool::new(&device, COLUMNS[0]);
            let compute = device.stream().unwrap();
            let request = store_request(&site, &pool, 41);
            let keys = request.keys.clone();
            let mut sink = pipeline.store_layers(request.clone()).unwrap();
            sink.store_layer(0, &compute).unwrap();
            drop(sink);
            let mut sink = pipeline.store_layers(request).unwrap();
            if lost.is_none() {
                sink.store_layer(0, &compute).unwrap();
                assert!(matches!(sink.seal(), Err(LandError::Request(_))), "a layer is missing");
            } else {
                let layers = 0..pool.shape.layers().len() as u32;
                let taken =
                    layers.map(|layer| sink.store_layer(layer, &compute)).collect::<Result<Vec<_>, _>>();
                let sealed = taken.and_then(|_| sink.seal());
                assert!(matches!(sealed, Err(LandError::Device(DeviceError::Lost(_)))));
            }
            until("nothing of it is here", || {
                is_here(&site, &pool, &keys).iter().all(|presence| *presence == Presence::Absent)
            });
        }
        // The store lets go of the memory on its own threads.
        while arena.usage().used > 0 {
            std::thread::yield_now();
        }
        assert_eq!(device.in_use(), InUse::default());
    }
}

#[test]
fn a_layer_is_on_disk_before_the_next_is_computed_and_nothing_of_it_is_found() {
    let site = Site::new("early");
    let device = strict(Faults::default());
    let pool = Pool::new(&device, COLUMNS[0]);
    let arena = Arena::new(1 << 20).unwrap();
    let store: Arc<dyn KvStore> = Arc::new(site.store().clone());
    let pipeline = Pipeline::new(store, Arc::new(device.clone()), arena.clone(), Curve::default());
    let compute = device.stream().unwrap();
    let request = store_request(&site, &pool, 51);
    let keys = request.keys.clone();
    let mut sink = pipeline.store_layers(request).unwrap();
    let layers = pool.shape.layers().len() as u32;
    for layer in 0..layers {
        sink.store_layer(layer, &compute).unwrap();
        until("a layer is written", || sink.layers_written() > layer);
        assert!(is_here(&site, &pool, &keys).iter().all(|presence| *presence != Presence::Here));
    }
    assert!(matches!(sink.store_layer(layers, &compute), Err(LandError::Request(_))));
    let reply = block_on(sink.seal().unwrap()).unwrap().unwrap();
    assert!(reply.outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored), "{reply:?}");
    // Blocks that are here are not written layer by layer; the first put of a key wins.
    let mut again = pipeline.store_layers(store_request(&site, &pool, 51)).unwrap();
    assert!(!again.is_streamed());
    (0..layers).for_each(|layer| drop(again.store_layer(layer, &compute).unwrap()));
    let reply = block_on(again.seal().unwrap()).unwrap().unwrap();
    assert!(reply.outcomes.iter().all(|outcome| *outcome == BlockOutcome::AlreadyThere), "{reply:?}");
    until("the arena is free", || arena.usage().used == 0);
}

/// How a stuck copy ends after all.
#[derive(Clone, Copy, Debug)]
enum Rescue {
    ItEnds,
    DeclaredLost,
}

const RESCUES: [Rescue; 2] = [Rescue::ItEnds, Rescue::DeclaredLost];
const TIMEOUT: Duration = Duration::from_millis(30);

fn rescue(device: &Emulated, how: Rescue) {
    match how {
        Rescue::ItEnds => device.unstick(),
        Rescue::DeclaredLost => device.declare_lost("it does not answer"),
    }
}

#[test]
fn a_copy_that_never_ends_ends_the_stream_and_keeps_its_memory_until_it_is_done_or_the_device_lost() {
    let site = Site::new("stuck");
    for how in RESCUES {
        for stuck in 0..3 {
            let device = strict(Faults { stuck_copy: Some(stuck), ..Faults::default() });
            let pool = Pool::new(&device, COLUMNS[0]);
            {
                let pipeline = site.pipeline(&device).with_copy_timeout(TIMEOUT);
                let compute = device.stream().unwrap();
                let _freed = Freed(&device);
                let mut stream = site.land(&pipeline, &pool).unwrap();
                let end = loop {
                    if let Next::End(end) = stream.next_layer(&compute) {
                        break end;
                    }
                };
                let reason = Some(EndReason::Device(DeviceError::Stuck { millis: 30 }));
                // A machine that is busy may take longer than the timeout for an earlier layer too.
                assert!(end.usable_layers <= stuck as u32 && end.reason == reason, "{how:?}: {end:?}");
                drop(stream);
                (0..end.usable_layers).for_each(|layer| assert!(pool.is_there(&site, &device, layer)));
                // What computes waits in its own stream for a layer that was announced.
                assert!(site.arena.usage().used > 0, "the device may still read it");
                rescue(&device, how);
            }
            site.settle();
            drop(pool);
            until("the device is let go of", || device.in_use() == InUse::default());
        }
    }
}

#[test]
fn a_copy_from_the_device_that_never_ends_stores_nothing_and_keeps_its_memory() {
    let site = Site::new("stuck-back");
    for how in RESCUES {
        let device = strict(Faults { stuck_copy: Some(1), ..Faults::default() });
        let arena = Arena::new(1 << 20).unwrap();
        let pool = Pool::new(&device, COLUMNS[0]);
        let request = store_request(&site, &pool, 61);
        let keys = request.keys.clone();
        {
            let store: Arc<dyn KvStore> = Arc::new(site.store().clone());
            let pipeline = Pipeline::new(store, Arc::new(device.clone()), arena.clone(), Curve::default())
                .with_copy_timeout(TIMEOUT);
            let compute = device.stream().unwrap();
            let _freed = Freed(&device);
            let mut sink = pipeline.store_layers(request).unwrap();
            assert!(sink.is_streamed());
            let layers = 0..pool.shape.layers().len() as u32;
            let taken = layers.map(|layer| sink.store_layer(layer, &compute)).collect::<Result<Vec<_>, _>>();
            let sealed = taken.and_then(|_| sink.seal());
            let stuck = matches!(sealed, Err(LandError::Device(DeviceError::Stuck { millis: 30 })));
            assert!(stuck, "{how:?}");
            assert!(arena.usage().used > 0, "the device may still write to it");
        }
        until("nothing of it is here", || {
            is_here(&site, &pool, &keys).iter().all(|presence| *presence == Presence::Absent)
        });
        rescue(&device, how);
        until("the arena is free", || arena.usage().used == 0);
        drop(pool);
        until("the device is let go of", || device.in_use() == InUse::default());
    }
}

#[test]
fn a_deadline_ends_a_seal_that_waits_for_a_copy_and_no_layer_is_called_written_that_is_not() {
    let site = Site::new("late-back");
    let device = strict(Faults { stuck_copy: Some(1), ..Faults::default() });
    let arena = Arena::new(1 << 20).unwrap();
    let pool = Pool::new(&device, COLUMNS[0]);
    {
        let store: Arc<dyn KvStore> = Arc::new(site.store().clone());
        let pipeline = Pipeline::new(store, Arc::new(device.clone()), arena.clone(), Curve::default());
        let pipeline = pipeline.with_copy_timeout(Duration::from_secs(60));
        let compute = device.stream().unwrap();
        let _freed = Freed(&device);
        let clock = site.store().clock();
        let deadline = clock.now().plus(Duration::from_secs(2));
        let request = StoreRequest { deadline: Some(deadline), ..store_request(&site, &pool, 71) };
        let mut sink = pipeline.store_layers(request).unwrap();
        assert!(sink.is_streamed());
        let layers = pool.shape.layers().len() as u32;
        (0..layers).for_each(|layer| drop(sink.store_layer(layer, &compute).unwrap()));
        let (mut written, end) = (0, deadline.plus(Duration::from_millis(100)));
        while clock.now() < end {
            let now = sink.layers_written();
            assert!(written <= now && now <= 1, "only the first has left the device");
            written = now;
            std::thread::yield_now();
        }
        let sealed = sink.seal();
        assert!(matches!(sealed, Err(LandError::Store(Reason::DeadlinePassed))), "{:?}", sealed.err());
        assert!(arena.usage().used > 0, "the device may still write to it");
    }
    until("the arena is free", || arena.usage().used == 0);
    drop(pool);
    until("the device is let go of", || device.in_use() == InUse::default());
}

/// The name under which this program plays the engine whose pool another process uses.
const ENGINE: &str = "KVARTS_TEST_ENGINE";

/// An engine in a process of its own: it has a pool, says how others open it, shows its bytes when asked, and frees it
/// before it ends.
#[test]
fn an_engine_of_another_process() {
    if std::env::var_os(ENGINE).is_none() {
        return;
    }
    let device = Emulated::new(Model::default());
    let bytes: u64 = std::env::var(ENGINE).unwrap().parse().unwrap();
    let pool = device.allocate(bytes).unwrap();
    let handle: String = device.export(&pool).unwrap().0.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("handle {handle}");
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "show" => println!("digest {}", crc32fast::hash(&device.peek(&pool, 0, bytes).unwrap())),
            _ => break,
        }
    }
}

struct Engine {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
    handle: IpcHandle,
}

impl Engine {
    fn start(bytes: u64) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "landing_back::an_engine_of_another_process", "--nocapture"])
            .env(ENGINE, bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap());
        let text = answer(&mut answers, "handle ");
        let mut handle = IpcHandle([0; 64]);
        for (at, byte) in handle.0.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).unwrap();
        }
        Self { child, answers, handle }
    }

    fn show(&mut self) -> u32 {
        writeln!(self.child.stdin.as_mut().unwrap(), "show").unwrap();
        answer(&mut self.answers, "digest ").parse().unwrap()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What follows a word in the next line that has it.
fn answer(from: &mut impl BufRead, word: &str) -> String {
    let mut line = String::new();
    loop {
        line.clear();
        assert!(from.read_line(&mut line).unwrap() > 0, "the engine ended");
        if let Some(at) = line.find(word) {
            return line[at + word.len()..].trim().to_owned();
        }
    }
}

#[test]
fn layers_land_in_the_pool_of_another_process_which_is_opened_once_and_closed_before_it_is_freed() {
    let site = Site::new("processes");
    let device = strict(Faults::default());
    let opened = Opened::new(Arc::new(device.clone()));
    let shape = Arc::new(fixture::shape(COLUMNS[0].0, COLUMNS[0].1));
    let bytes = shape.block_bytes() * u64::from(BLOCKS);
    let mut engine = Engine::start(bytes);
    let empty = engine.show();
    {
        let pool = opened.open(&engine.handle, bytes).unwrap();
        let again = opened.open(&engine.handle, bytes).unwrap();
        assert!(Arc::ptr_eq(&pool, &again) && device.in_use().opened == 1);
        let into = Destination::contiguous(&shape, (*pool).clone(), BLOCKS).unwrap();
        let pipeline = site.pipeline(&device);
        let compute = device.stream().unwrap();
        let own = Pool::new(&device, COLUMNS[0]);
        let request = LandRequest { into, ..site.request(&own) };
        let mut stream = pipeline.land(request).unwrap();
        let end = loop {
            if let Next::End(end) = stream.next_layer(&compute) {
                break end;
            }
        };
        assert_eq!((end.usable_layers, end.reason), (shape.layers().len() as u32, None));
        assert_eq!(device.hazards(), 0);
    }
    site.settle();
    until("the device is let go of", || device.in_use() == InUse::default());
    // Closed here; the engine, which has it still, sees every byte.
    let mut expected = Vec::new();
    let chunks: Vec<_> =
        site.keys.iter().map(|key| fixture::content(key, COLUMNS[0].0, COLUMNS[0].1, 1, &shape)).collect();
    for part in 0..chunks[0].len() {
        chunks.iter().for_each(|block| expected.extend_from_slice(&block[part]));
    }
    let shown = engine.show();
    assert_ne!(shown, empty);
    assert_eq!(shown, crc32fast::hash(&expected));
}

#[test]
fn an_engine_that_dies_in_the_middle_costs_its_stream_and_nothing_else() {
    let site = Site::new("dies");
    // Copies that do not end before they may: the engine dies while one is under way.
    let device = strict(Faults { stuck_copy: Some(1), ..Faults::default() });
    let opened = Opened::new(Arc::new(device.clone()));
    let shape = Arc::new(fixture::shape(COLUMNS[0].0, COLUMNS[0].1));
    let bytes = shape.block_bytes() * u64::from(BLOCKS);
    let engine = Engine::start(bytes);
    let handle = engine.handle;
    {
        let pool = opened.open(&handle, bytes).unwrap();
        let into = Destination::contiguous(&shape, (*pool).clone(), BLOCKS).unwrap();
        let pipeline = site.pipeline(&device);
        let compute = device.stream().unwrap();
        let own = Pool::new(&device, COLUMNS[0]);
        let mut stream = pipeline.land(LandRequest { into, ..site.request(&own) }).unwrap();
        assert!(matches!(stream.next_layer(&compute), Next::Layer(_)));
        drop(engine);
        // The code that watches the engine stops its streams; copies that are under way end in memory that is
        // still open.
        stream.stop();
        device.unstick();
        let end = loop {
            if let Next::End(end) = stream.next_layer(&compute) {
                break end;
            }
        };
        assert!(end.usable_layers >= 1 && end.reason.is_none_or(|reason| reason == EndReason::Stopped));
        drop(stream);
        assert!(drain(&*pipeline.device().clone(), &compute).is_ok());
    }
    site.settle();
    until("the device is let go of", || device.in_use() == InUse::default());
    let error = opened.open(&handle, bytes).unwrap_err();
    assert!(matches!(error, DeviceError::Call { .. }), "a handle of a dead process: {error:?}");
    assert_eq!(device.in_use(), InUse::default());
}
