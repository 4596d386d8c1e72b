//! Layers landing in the memory of an emulated device, and leaving it: bytes, order, faults, and what is left behind.
#![allow(clippy::disallowed_methods, reason = "works on real directories, outside the simulation")]

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvarts_gpudirect::device::emulated::{Emulated, Faults, Model};
use kvarts_gpudirect::device::{Device, InUse, Memory, Stream, drain};
use kvarts_gpudirect::error::{DeviceError, EndReason, LandError};
use kvarts_gpudirect::gather::Curve;
use kvarts_gpudirect::pace::{Pace, RealPace};
use kvarts_gpudirect::pipeline::{LandRequest, LayerEnd, LayerStream, Next, Pipeline};
use kvarts_gpudirect::store_layers::StoreRequest;
use kvarts_gpudirect::{Arena, Destination};
use kvarts_layout::plan::{MemoryId, PartTarget};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Group, NamespaceId};
use kvarts_store::api::{
    BlockOutcome, ContainsRequest, Durability, KvStore, Order, Parent, Placed, Presence, PutRequest,
    ReadRequest, Verify,
};
use kvarts_store::engine::Options;
use kvarts_store::error::{Kind, Reason};
use kvarts_store::home::{Home, HomeOptions};
use kvarts_store::rt::Class;
use kvarts_store::rt::blocking::block_on;
use kvarts_tests::fixture::{self, ODD, PAGES, all_heads};

const BLOCKS: u32 = 6;

/// A store with a run of blocks, and an arena of the smallest size.
struct Site {
    home: Option<Home>,
    path: PathBuf,
    namespace: NamespaceId,
    keys: Vec<BlockKey>,
    arena: Arena,
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some(home) = self.home.take() {
            home.close().unwrap();
        }
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

const COLUMNS: [(Group, Coordinate); 2] =
    [(PAGES, Coordinate::Heads { start: 0, count: 2, of: 2 }), (ODD, Coordinate::Replicated)];

impl Site {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvarts-landing-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        let store = Options { segment_bytes: 1 << 20, record_bytes_max: 64 << 10, ..Options::default() };
        let options = HomeOptions { directories: vec![path.clone()], store, ..HomeOptions::default() };
        let home = Home::open(&options).unwrap();
        let namespace = home.store().register(&fixture::identity("landing"), &fixture::geometry()).unwrap();
        let arena = Arena::new(192 << 10).unwrap();
        let keys = fixture::keys(9, 0..u64::from(BLOCKS));
        let site = Self { home: Some(home), path, namespace, keys, arena };
        for column in COLUMNS {
            let reply = block_on(site.store().put(site.put(column))).unwrap().unwrap();
            assert!(reply.outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored), "{reply:?}");
        }
        site
    }

    fn store(&self) -> &kvarts_store::engine::Store {
        self.home.as_ref().unwrap().store()
    }

    fn put(&self, (group, coordinate): (Group, Coordinate)) -> PutRequest {
        let shape = fixture::shape(group, coordinate);
        let memory = fixture::memory(shape.block_bytes() * u64::from(BLOCKS), 0);
        let mut at = 0;
        for key in &self.keys {
            for chunk in fixture::content(key, group, coordinate, 1, &shape) {
                memory.copy_in(at, &chunk);
                at += chunk.len();
            }
        }
        PutRequest {
            namespace: self.namespace,
            group,
            coordinate,
            parent: Parent::Root,
            first_block: Some(0),
            keys: self.keys.clone(),
            from: Placed::blocks(&shape, memory, BLOCKS).unwrap(),
            layout: Some(kvarts_layout::Layout::LayerBlock),
            durability: Durability::Durable,
            expires_after: None,
            origins: None,
            deadline: None,
        }
    }

    fn pipeline(&self, device: &Emulated) -> Pipeline {
        let device: Arc<dyn Device> = Arc::new(device.clone());
        Pipeline::new(Arc::new(self.store().clone()), device, self.arena.clone(), Curve::default())
    }

    fn land(&self, pipeline: &Pipeline, pool: &Pool) -> Result<LayerStream, LandError> {
        // The store lets go of the last stream's memory on its own threads.
        self.settle();
        pipeline.land(self.request(pool))
    }

    fn request(&self, pool: &Pool) -> LandRequest {
        LandRequest {
            namespace: self.namespace,
            group: pool.column.0,
            coordinate: pool.column.1,
            keys: self.keys.clone(),
            layers: None,
            into: pool.into.clone(),
            depth_bytes: 0,
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        }
    }

    /// Waits until disk and device have let go of the arena. One that keeps it for ever fails by never ending.
    fn settle(&self) {
        while self.arena.usage().used > 0 {
            std::thread::yield_now();
        }
    }
}

/// An engine's paged pool: each part in a memory of its own, slots scattered with gaps.
struct Pool {
    column: (Group, Coordinate),
    shape: Arc<BlockShape>,
    memories: Vec<Memory>,
    into: Destination,
}

/// The slot of a block.
fn slot(block: u32) -> u32 {
    (block * 5 + 3) % 13
}

impl Pool {
    fn new(device: &Emulated, column: (Group, Coordinate)) -> Self {
        let shape = Arc::new(fixture::shape(column.0, column.1));
        let chunks = shape.layers().iter().flat_map(|layer| &layer.chunks);
        let (mut memories, mut targets) = (Vec::new(), Vec::new());
        for (at, chunk) in (0u32..).zip(chunks) {
            let memory = device.allocate(chunk.bytes * 13 + 8).unwrap();
            device.poke(&memory, 0, &vec![0xEE; memory.len() as usize]).unwrap();
            memories.push(memory);
            targets.push(PartTarget { memory: MemoryId(at), base: 8, stride: chunk.bytes });
        }
        let slots = (0..BLOCKS).map(slot).collect();
        let into = Destination::paged(&shape, memories.clone(), &targets, slots).unwrap();
        Self { column, shape, memories, into }
    }

    /// The canonical parts of a layer.
    fn parts(&self, layer: u32) -> std::ops::Range<usize> {
        let layers = self.shape.layers();
        let first = layers[..layer as usize].iter().map(|layer| layer.chunks.len()).sum();
        first..first + layers[layer as usize].chunks.len()
    }

    /// Whether every byte of a layer is what was put, in its slot, and the gaps are untouched.
    fn is_there(&self, site: &Site, device: &Emulated, layer: u32) -> bool {
        self.parts(layer).all(|part| {
            let bytes = device.peek(&self.memories[part], 0, self.memories[part].len()).unwrap();
            let mut expected = vec![0xEE; bytes.len()];
            for (block, key) in (0..).zip(&site.keys) {
                let chunk = &fixture::content(key, self.column.0, self.column.1, 1, &self.shape)[part];
                let at = 8 + slot(block) as usize * chunk.len();
                expected[at..at + chunk.len()].copy_from_slice(chunk);
            }
            bytes == expected
        })
    }

    /// What an engine's kernels of a layer do: read all of it.
    fn touch(&self, device: &Emulated, stream: &Stream, layer: u32) -> Result<(), DeviceError> {
        let mut parts = self.parts(layer);
        parts.try_for_each(|part| device.touch(stream, &self.memories[part], 0, self.memories[part].len()))
    }
}

fn strict(faults: Faults) -> Emulated {
    // Copies take longer than reads, so that memory which is reused too early is seen.
    let model = Model { strict: true, call: Duration::from_millis(1), ..Model::default() };
    Emulated::with(model, faults, RealPace::new())
}

/// Takes every layer; gives how many came and the end.
fn run(stream: &mut LayerStream, pool: &Pool, device: &Emulated, compute: &Stream) -> (u32, LayerEnd) {
    let mut came = 0;
    loop {
        match stream.next_layer(compute) {
            Next::Layer(layer) => {
                assert_eq!(layer.layer, came, "layers come in order");
                came += 1;
                let _ = pool.touch(device, compute, layer.layer);
            }
            Next::End(end) => return (came, end),
        }
    }
}

#[test]
fn every_layer_lands_in_its_slots_before_it_is_used_and_nothing_is_left_behind() {
    let site = Site::new("whole");
    for column in COLUMNS {
        let device = strict(Faults::default());
        {
            let pipeline = site.pipeline(&device);
            let pool = Pool::new(&device, column);
            let compute = device.stream().unwrap();
            let mut stream = site.land(&pipeline, &pool).unwrap();
            assert!(
                site.arena.usage().used < pool.shape.block_bytes() * u64::from(BLOCKS) || column.0 == ODD
            );
            let (came, end) = run(&mut stream, &pool, &device, &compute);
            let layers = pool.shape.layers().len() as u32;
            assert_eq!(came, layers);
            assert_eq!(end, LayerEnd { usable_layers: layers, usable_blocks: BLOCKS, reason: None });
            drain(&device, &compute).unwrap();
            assert_eq!(device.hazards(), 0);
            (0..layers).for_each(|layer| assert!(pool.is_there(&site, &device, layer), "layer {layer}"));
        }
        site.settle();
        assert_eq!(device.in_use(), InUse::default());
        assert_eq!(site.arena.usage().largest_free, 128 << 10);
    }
}

#[test]
fn a_range_of_layers_lands_alone_and_a_contiguous_buffer_serves_as_well() {
    let site = Site::new("range");
    let device = strict(Faults::default());
    let pipeline = site.pipeline(&device);
    let shape = Arc::new(fixture::shape(PAGES, all_heads()));
    let memory = device.allocate(shape.block_bytes() * u64::from(BLOCKS)).unwrap();
    let compute = device.stream().unwrap();
    let pool = Pool::new(&device, COLUMNS[0]);
    let into = Destination::contiguous(&shape, memory.clone(), BLOCKS).unwrap();
    let request = LandRequest { layers: Some(1..2), into, ..site.request(&pool) };
    let mut stream = pipeline.land(request).unwrap();
    assert!(matches!(stream.next_layer(&compute), Next::Layer(layer) if layer.layer == 1));
    assert!(matches!(
        stream.next_layer(&compute),
        Next::End(LayerEnd { usable_layers: 1, reason: None, .. })
    ));
    let before = shape.layers()[0].bytes() * u64::from(BLOCKS);
    assert!(
        device.peek(&memory, 0, before).unwrap().iter().all(|&byte| byte == 0),
        "layer 0 was not asked for"
    );
    let first = &fixture::content(&site.keys[0], PAGES, all_heads(), 1, &shape)[pool.parts(1).start];
    assert_eq!(&device.peek(&memory, before, first.len() as u64).unwrap(), first);
}

#[test]
fn a_damaged_layer_ends_the_stream_with_what_is_usable_and_why() {
    let site = Site::new("damaged");
    let device = strict(Faults::default());
    let pool = Pool::new(&device, COLUMNS[0]);
    let whole = fixture::memory(pool.shape.block_bytes() * u64::from(BLOCKS), 0);
    let planned = site.store().planned_extents(&ReadRequest {
        namespace: site.namespace,
        group: PAGES,
        coordinate: all_heads(),
        keys: site.keys.clone(),
        layers: None,
        order: Order::Layers,
        into: Placed::blocks(&pool.shape, whole, BLOCKS).unwrap(),
        verify: Verify::Always,
        class: Class::Foreground,
        deadline: None,
    });
    let extent = planned.unwrap().into_iter().find(|extent| extent.step == 2).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(site.path.join(&extent.path)).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, extent.offset + 7).unwrap();
    file.write_all_at(&[byte[0] ^ 4], extent.offset + 7).unwrap();
    let pipeline = site.pipeline(&device);
    let compute = device.stream().unwrap();
    let mut stream = site.land(&pipeline, &pool).unwrap();
    let (came, end) = run(&mut stream, &pool, &device, &compute);
    assert!(came <= 2 && end.usable_layers == came, "{end:?}");
    assert!(matches!(&end.reason, Some(EndReason::Store(Reason::Digest { .. }))), "{end:?}");
    assert_eq!(end.reason.unwrap().kind(), Kind::Corrupt);
    (0..came).for_each(|layer| assert!(pool.is_there(&site, &device, layer)));
    drop(stream);
    site.settle();
}

#[test]
fn a_block_that_is_not_here_and_a_deadline_are_told_as_such() {
    let site = Site::new("absent");
    let device = strict(Faults::default());
    let pool = Pool::new(&device, COLUMNS[0]);
    let pipeline = site.pipeline(&device);
    let compute = device.stream().unwrap();
    let absent = fixture::key(77, 0);
    let mut request = site.request(&pool);
    request.keys[3] = absent;
    let mut stream = pipeline.land(request).unwrap();
    let Next::End(end) = stream.next_layer(&compute) else { panic!("a layer came") };
    assert_eq!((end.usable_blocks, end.reason), (3, Some(EndReason::Store(Reason::NotHere(absent)))));
    drop(stream);
    // A link so slow that the ring is not free before the deadline.
    let slow = Emulated::new(Model { bytes_per_second: 100_000, ..Model::default() });
    let pool = Pool::new(&slow, COLUMNS[0]);
    let compute = slow.stream().unwrap();
    let now = site.store().clock().now();
    site.settle();
    let request = LandRequest { deadline: Some(now.plus(Duration::from_millis(150))), ..site.request(&pool) };
    let mut stream = site.pipeline(&slow).land(request).unwrap();
    let (came, end) = run(&mut stream, &pool, &slow, &compute);
    assert_eq!(end.reason, Some(EndReason::Deadline));
    assert!(came <= 2 && end.usable_layers == came, "the ring has two seats: {end:?}");
    drop((stream, compute));
    site.settle();
}

#[test]
fn whatever_the_device_does_bytes_are_right_or_there_is_an_error_and_all_comes_back() {
    let site = Site::new("faults");
    let layers = fixture::shape(PAGES, all_heads()).layers().len() as u64;
    let mut cases = vec![Faults { no_pin: true, ..Faults::default() }];
    for copy in 0..layers {
        cases.push(Faults { partial_copy: Some(copy), ..Faults::default() });
        cases.push(Faults { lost_at_copy: Some(copy), ..Faults::default() });
    }
    for faults in cases {
        let device = strict(faults.clone());
        {
            let pool = Pool::new(&device, COLUMNS[0]);
            let pipeline = site.pipeline(&device);
            let arena = Arena::new(1).unwrap();
            assert_eq!(arena.pin(pipeline.device()).is_err(), faults.no_pin);
            let compute = device.stream().unwrap();
            let mut stream = site.land(&pipeline, &pool).unwrap();
            let (_, end) = run(&mut stream, &pool, &device, &compute);
            let failed = faults.partial_copy.or(faults.lost_at_copy);
            assert_eq!(u64::from(end.usable_layers), failed.unwrap_or(layers), "{faults:?}: {end:?}");
            match (failed, end.reason) {
                (None, None) => {}
                (Some(_), Some(EndReason::Device(DeviceError::Partial { .. }))) => {
                    assert!(faults.partial_copy.is_some());
                }
                (Some(_), Some(EndReason::Device(DeviceError::Lost(_)))) => {
                    assert!(faults.lost_at_copy.is_some());
                }
                (_, other) => panic!("{faults:?}: {other:?}"),
            }
            for layer in 0..end.usable_layers {
                assert!(pool.is_there(&site, &device, layer), "{faults:?}: layer {layer}");
            }
        }
        site.settle();
        assert_eq!(device.in_use(), InUse::default(), "{faults:?}");
    }
}

#[test]
fn what_cannot_begin_says_why_and_takes_nothing() {
    let site = Site::new("begin");
    let crooked = Emulated::new(Model { align: 16, ..Model::default() });
    let pool = Pool::new(&crooked, COLUMNS[0]);
    let compute = crooked.stream().unwrap();
    let mut stream = site.land(&site.pipeline(&crooked), &pool).unwrap();
    let (came, end) = run(&mut stream, &pool, &crooked, &compute);
    let misaligned = matches!(end.reason, Some(EndReason::Device(DeviceError::Misaligned { align: 16, .. })));
    assert!(came == 0 && misaligned, "{end:?}");
    drop(stream);
    let mute = strict(Faults { no_stream: true, ..Faults::default() });
    let pool = Pool::new(&mute, COLUMNS[0]);
    let refused = site.land(&site.pipeline(&mute), &pool).unwrap_err();
    assert!(matches!(refused, LandError::Device(DeviceError::Call { .. })));
    let device = strict(Faults::default());
    let pool = Pool::new(&device, COLUMNS[0]);
    let pipeline = site.pipeline(&device);
    site.settle();
    let held = (site.arena.take(1, 128 << 10).unwrap(), site.arena.take(1, 1).unwrap());
    let full = pipeline.land(site.request(&pool)).unwrap_err();
    assert_eq!((full.kind(), matches!(full, LandError::ArenaFull { free: 0, .. })), (Kind::Retry, true));
    drop(held);
    let tiny = Arena::new(1).unwrap();
    let store: Arc<dyn KvStore> = Arc::new(site.store().clone());
    let small = Pipeline::new(store, Arc::new(device.clone()), tiny.clone(), Curve::default());
    let refused = site.land(&small, &pool).unwrap_err();
    assert!(matches!(refused, LandError::ArenaTooSmall { total: 65_536, .. }), "{refused:?}");
    let keys = fixture::keys(9, 0..2);
    let few = pipeline.land(LandRequest { keys, ..site.request(&pool) }).unwrap_err();
    assert!(matches!(few, LandError::Request(_)));
    assert_eq!((site.arena.usage().used, tiny.usage().used), (0, 0));
}

#[test]
fn a_caller_that_leaves_early_gives_everything_back() {
    let site = Site::new("leave");
    let device = strict(Faults::default());
    for takes in 0..3 {
        let pipeline = site.pipeline(&device);
        let pool = Pool::new(&device, COLUMNS[0]);
        let compute = device.stream().unwrap();
        let mut stream = site.land(&pipeline, &pool).unwrap();
        for _ in 0..takes {
            assert!(matches!(stream.next_layer(&compute), Next::Layer(_)));
        }
        stream.stop();
        drop(stream);
        assert!(drain(&device, &compute).is_ok());
    }
    site.settle();
    assert_eq!(device.in_use(), InUse::default());
}

/// What the producer of a new chain hands over.
fn store_request(site: &Site, pool: &Pool, chain: u64) -> StoreRequest {
    StoreRequest {
        namespace: site.namespace,
        group: pool.column.0,
        coordinate: pool.column.1,
        parent: Parent::Root,
        first_block: Some(0),
        keys: fixture::keys(chain, 0..u64::from(BLOCKS)),
        from: pool.into.clone(),
        durability: Durability::Durable,
        deadline: None,
    }
}

fn is_here(site: &Site, pool: &Pool, keys: &[BlockKey]) -> Vec<Presence> {
    let (group, coordinate) = pool.column;
    let request = ContainsRequest { namespace: site.namespace, group, coordinate, keys, lease: None };
    site.store().contains(&request).unwrap().presence
}

#[test]
fn layers_leave_the_device_as_they_are_computed_and_come_back_as_they_were() {
    let site = Site::new("back");
    let device = strict(Faults::default());
    let pipeline = site.pipeline(&device);
    let pool = Pool::new(&device, COLUMNS[0]);
    let compute = device.stream().unwrap();
    drop(run(&mut site.land(&pipeline, &pool).unwrap(), &pool, &device, &compute));
    site.settle();
    let request = store_request(&site, &pool, 31);
    let keys = request.keys.clone();
    let big = Arena::new(1 << 20).unwrap();
    let pipeline = Pipeline::new(
        Arc::new(site.store().clone()),
        Arc::new(device.clone()),
        big.clone(),
        Curve::default(),
    );
    let mut sink = pipeline.store_layers(request).unwrap();
    let (pace, time) = (RealPace::new(), Duration::from_millis(30));
    for layer in 0..pool.shape.layers().len() as u32 {
        let begin = pace.now();
        device.compute(&compute, time).unwrap();
        let taken = sink.store_layer(layer, &compute).unwrap();
        if layer == 0 {
            device.synchronize(&taken).unwrap();
            assert!(pace.now().since(begin) >= time, "a layer is taken behind what computes it");
        }
        assert!(is_here(&site, &pool, &keys).iter().all(|presence| *presence == Presence::Absent));
    }
    assert!(sink.store_layer(0, &compute).is_err(), "a layer is taken once");
    let reply = block_on(sink.seal().unwrap()).unwrap().unwrap();
    assert!(reply.outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored), "{reply:?}");
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
            assert!(is_here(&site, &pool, &keys).iter().all(|presence| *presence == Presence::Absent));
        }
        assert_eq!((device.in_use(), arena.usage().used), (InUse::default(), 0));
    }
}
