//! The whole way over the CUDA device: a store on a real directory, layers that land and leave again, and devices that
//! fail between two copies of one layer.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::{BlockOutcome, Durability, KvStore, Parent, Placed, PutRequest, Verify};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::class::Class;
use kvarts_gpudirect::device::cuda::Cuda;
use kvarts_gpudirect::device::{Batch, Device, Direction, Memory, Method, Piece, Stream, drain};
use kvarts_gpudirect::error::{DeviceError, EndReason, LandError};
use kvarts_gpudirect::gather::{Curve, Point};
use kvarts_gpudirect::lander::Lander;
use kvarts_gpudirect::pipeline::{LandRequest, LayerStream, Next};
use kvarts_gpudirect::store_layers::StoreRequest;
use kvarts_gpudirect::{Arena, Destination, Pipeline};
use kvarts_layout::identity::{Arrangement, Quantisation, TenantSalt};
use kvarts_layout::plan::{MemoryId, PartTarget};
use kvarts_layout::spec::{Kind, PartGeometry, Role};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId};
use kvarts_store::engine::{Options, Store};
use kvarts_store::home::{Home, HomeOptions};

use crate::copies::pattern;
use crate::standin::{Kit, Standin, here, inside, until};

pub(crate) const BLOCKS: u32 = 5;
pub(crate) const LAYERS: usize = 6;
const GROUP: Group = Group(0);
const ALL: Coordinate = Coordinate::Replicated;

/// Six layers of two parts: a page, and an odd number of bytes.
fn geometry() -> Geometry {
    let part = |kind: &str, bytes| PartGeometry {
        kind: Kind::new(kind).unwrap(),
        role: Role::Stream { bytes, tokens: 1 },
        heads: 0,
        align: 1,
        group: GROUP,
    };
    Geometry::new(&[part("page", 256), part("odd", 13)], &vec![vec![0, 1]; LAYERS]).unwrap()
}

fn identity() -> Identity {
    let text = |text: &str| text.to_owned();
    Identity {
        model: text("small"),
        revision: text("1"),
        tokenizer: text("1"),
        adapter: text("none"),
        kv_dtype: text("bf16"),
        quantisation: Quantisation { recipe: text("none"), scales: text("none") },
        rope: text("none"),
        window: text("none"),
        arrangement: Arrangement { engine: text("test"), layout: text("canonical"), version: text("1") },
        block_tokens: 16,
        spec_fingerprint: geometry().fingerprint(),
        tenant_salt: TenantSalt(Vec::new()),
        extras: BTreeMap::new(),
    }
}

fn keys(chain: u8) -> Vec<BlockKey> {
    (0..BLOCKS as u8).map(|block| BlockKey([chain ^ (block << 4); 32])).collect()
}

/// A store with a chain of blocks, an arena that is pinned, and a device.
pub(crate) struct Site {
    home: Option<Home>,
    path: PathBuf,
    pub(crate) device: Cuda,
    pub(crate) arena: Arena,
    namespace: NamespaceId,
    shape: Arc<BlockShape>,
}

impl Site {
    pub(crate) fn new() -> Self {
        Self::with(true)
    }

    /// The same, with an arena that is pinned or is not.
    pub(crate) fn with(pinned: bool) -> Self {
        let path = std::env::temp_dir().join(format!("kvarts-driver-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        let store = Options {
            segment_bytes: 1 << 20,
            record_bytes_max: 64 << 10,
            budget_bytes: 64 << 20,
            ..Options::default()
        };
        let options = HomeOptions { directories: vec![path.clone()], store, ..HomeOptions::default() };
        let home = Home::open(&options).unwrap();
        let namespace = home.store().register(&identity(), &geometry()).unwrap();
        let device = Cuda::open(0).unwrap();
        let arena = Arena::new(192 << 10).unwrap();
        let shared: Arc<dyn Device> = Arc::new(device.clone());
        if pinned {
            arena.pin(&shared).unwrap();
        }
        let shape = Arc::new(geometry().shape(GROUP, ALL, 16).unwrap());
        let site = Self { home: Some(home), path, device, arena, namespace, shape };
        let bytes = site.shape.block_bytes() * u64::from(BLOCKS);
        let region = Region::anonymous(bytes as usize).unwrap();
        let from = SharedBuf::new(&region, 0, bytes as usize).unwrap();
        from.copy_in(0, &site.blocks().concat());
        let put = site.store().put(PutRequest {
            namespace,
            group: GROUP,
            coordinate: ALL,
            parent: Parent::Root,
            first_block: Some(0),
            keys: keys(1),
            from: Placed::blocks(&site.shape, from, BLOCKS).unwrap(),
            layout: None,
            durability: Durability::Durable,
            expires_after: None,
            origins: None,
            deadline: None,
        });
        let reply = block_on(put).unwrap().unwrap();
        assert!(reply.outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored), "{reply:?}");
        site
    }

    pub(crate) fn store(&self) -> &Store {
        self.home.as_ref().unwrap().store()
    }

    /// The bytes of each block of the chain, chunk after chunk.
    fn blocks(&self) -> Vec<Vec<u8>> {
        (0..u64::from(BLOCKS)).map(|block| pattern(self.shape.block_bytes(), 40 + block)).collect()
    }

    pub(crate) fn pipeline(&self, method: Method) -> Pipeline {
        let curve = Curve::of(vec![Point { piece_bytes: 1, method, bytes_per_second: 1.0 }]);
        let device: Arc<dyn Device> = Arc::new(self.device.clone());
        Pipeline::new(Arc::new(self.store().clone()), device, self.arena.clone(), curve)
            .with_copy_timeout(Duration::from_secs(60))
    }

    /// The same, or one whose layers go through the rings of a lander, which have room for a few chunks.
    fn either(&self, method: Method, through: bool) -> Pipeline {
        let shared: Arc<dyn Device> = Arc::new(self.device.clone());
        let lander = through.then(|| Lander::new(&shared, 48 << 10).unwrap());
        lander.into_iter().fold(self.pipeline(method), Pipeline::with_lander)
    }

    pub(crate) fn land(&self, pipeline: &Pipeline, chain: u8, pool: &Pool) -> Result<LayerStream, LandError> {
        // The store lets go of the last stream's memory on its own threads.
        until("the arena is free", || self.arena.usage().used == 0);
        pipeline.land(self.request(chain, pool))
    }

    pub(crate) fn request(&self, chain: u8, pool: &Pool) -> LandRequest {
        LandRequest {
            namespace: self.namespace,
            group: GROUP,
            coordinate: ALL,
            keys: keys(chain),
            layers: None,
            into: pool.into.clone(),
            after: None,
            depth_bytes: 0,
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        }
    }

    pub(crate) fn leave(&self, chain: u8, pool: &Pool) -> StoreRequest {
        StoreRequest {
            namespace: self.namespace,
            group: GROUP,
            coordinate: ALL,
            parent: Parent::Root,
            first_block: Some(0),
            keys: keys(chain),
            from: pool.into.clone(),
            durability: Durability::Durable,
            deadline: None,
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some(home) = self.home.take() {
            home.close().unwrap();
        }
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// An engine's pool: pages in one memory, the odd parts in another, slots scattered with gaps.
pub(crate) struct Pool {
    memories: [Memory; 2],
    into: Destination,
    /// Where each block's chunks lie: memory, offset and bytes, in the order of the block's bytes.
    places: Vec<Vec<(usize, u64, u64)>>,
}

impl Pool {
    pub(crate) fn new(site: &Site) -> Self {
        let slots: Vec<u32> = (0..BLOCKS).map(|block| (block * 3 + 1) % 7).collect();
        let (mut targets, mut next) = (Vec::new(), [8u64, 8]);
        for (at, chunk) in site.shape.layers().iter().flat_map(|layer| &layer.chunks).enumerate() {
            let memory = at % 2;
            let stride = chunk.bytes + 3;
            targets.push(PartTarget { memory: MemoryId(memory as u32), base: next[memory], stride });
            next[memory] += stride * 7;
        }
        let memories = next.map(|bytes| site.device.allocate(bytes + 8).unwrap());
        let sizes: Vec<u64> =
            site.shape.layers().iter().flat_map(|layer| &layer.chunks).map(|chunk| chunk.bytes).collect();
        let place = |slot: &u32| {
            let chunks = targets.iter().zip(&sizes);
            let at = |target: &PartTarget| target.base + target.stride * u64::from(*slot);
            chunks.map(|(target, bytes)| (target.memory.0 as usize, at(target), *bytes)).collect()
        };
        let places = slots.iter().map(place).collect();
        let into = Destination::paged(&site.shape, memories.to_vec(), &targets, slots).unwrap();
        Self { memories, into, places }
    }

    /// Both memories as they must be when the chain is in them.
    pub(crate) fn expected(&self, site: &Site) -> [Vec<u8>; 2] {
        let mut expected = [0, 1].map(|at: usize| vec![0xd5u8; self.memories[at].len() as usize]);
        for (places, bytes) in self.places.iter().zip(site.blocks()) {
            let mut from = 0;
            for &(memory, at, len) in places {
                let (at, len) = (at as usize, len as usize);
                expected[memory][at..at + len].copy_from_slice(&bytes[from..from + len]);
                from += len;
            }
        }
        expected
    }

    /// Whether every byte of a layer is that of the chain.
    pub(crate) fn has_layer(&self, standin: &Standin, site: &Site, layer: usize) -> bool {
        let mut blocks = self.places.iter().zip(site.blocks());
        blocks.all(|(places, bytes)| {
            let mut from = 0;
            places.iter().enumerate().all(|(at, &(memory, to, len))| {
                let chunk = &bytes[from..from + len as usize];
                from += len as usize;
                // Two parts a layer.
                at / 2 != layer || standin.peek(self.memories[memory].base() + to, len) == chunk
            })
        })
    }

    pub(crate) fn holds(&self, standin: &Standin, expected: &[Vec<u8>; 2]) -> bool {
        let mut both = self.memories.iter().zip(expected);
        both.all(|(memory, expected)| standin.peek(memory.base(), memory.len()) == *expected)
    }
}

/// Takes every layer.
pub(crate) fn take_all(stream: &mut LayerStream, compute: &Stream) {
    for layer in 0..LAYERS as u32 {
        let next = stream.next_layer(compute);
        assert!(matches!(&next, Next::Layer(one) if one.layer == layer), "{next:?}");
    }
    let Next::End(end) = stream.next_layer(compute) else { panic!("more layers than there are") };
    assert_eq!((end.usable_layers, end.usable_blocks, end.reason), (LAYERS as u32, BLOCKS, None));
}

fn there_back_and_there_again(kit: Kit, test: &str) {
    inside(kit, test, |standin| {
        let site = Site::new();
        let compute = site.device.stream().unwrap();
        for (chain, method) in (2..).zip(Method::ALL) {
            let (pipeline, pool) = (site.pipeline(method), Pool::new(&site));
            let mut landing = site.land(&pipeline, 1, &pool).unwrap();
            take_all(&mut landing, &compute);
            drop(landing);
            let expected = pool.expected(&site);
            assert!(pool.holds(standin, &expected), "{method:?}: landed, every byte and no other");
            until("the arena is free", || site.arena.usage().used == 0);
            let mut sink = pipeline.store_layers(site.leave(chain, &pool)).unwrap();
            for layer in 0..LAYERS as u32 {
                sink.store_layer(layer, &compute).unwrap();
            }
            let reply = block_on(sink.seal().unwrap()).unwrap().unwrap();
            assert!(reply.outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored), "{reply:?}");
            let again = Pool::new(&site);
            take_all(&mut site.land(&pipeline, chain, &again).unwrap(), &compute);
            assert!(again.holds(standin, &expected), "{method:?}: what left came back");
        }
    });
}

/// Rings of a few chunks, which are used again for each layer.
#[test]
fn layers_land_through_a_lander_leave_again_and_are_the_same_bytes() {
    inside(Kit::Whole, here!(), |standin| {
        let site = Site::new();
        let compute = site.device.stream().unwrap();
        let (pipeline, pool) = (site.either(Method::Each, true), Pool::new(&site));
        take_all(&mut site.land(&pipeline, 1, &pool).unwrap(), &compute);
        until("it has landed", || standin.pending() == 0);
        let expected = pool.expected(&site);
        assert!(pool.holds(standin, &expected), "landed, every byte and no other");
        until("the arena is free", || site.arena.usage().used == 0);
        let launched = standin.calls("cuLaunchKernel");
        let mut sink = pipeline.store_layers(site.leave(2, &pool)).unwrap();
        for layer in 0..LAYERS as u32 {
            let gathered = sink.store_layer(layer, &compute).unwrap();
            site.device.wait(&compute, &gathered).unwrap();
        }
        assert!(standin.calls("cuLaunchKernel") > launched, "kernels gather");
        let reply = block_on(sink.seal().unwrap()).unwrap().unwrap();
        assert!(reply.outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored), "{reply:?}");
        let again = Pool::new(&site);
        take_all(&mut site.land(&pipeline, 2, &again).unwrap(), &compute);
        until("it has landed again", || standin.pending() == 0);
        assert!(again.holds(standin, &expected), "what left came back");
    });
}

#[test]
fn layers_land_by_every_method_leave_again_and_are_the_same_bytes() {
    there_back_and_there_again(Kit::Whole, here!());
}

#[test]
fn layers_land_with_a_driver_without_batches_and_without_kernels() {
    there_back_and_there_again(Kit::Old, here!());
}

#[test]
fn layers_land_on_a_machine_without_nvrtc() {
    there_back_and_there_again(Kit::Bare, here!());
}

/// The caller's stream waits for a layer's copies, and so does the arena: nothing is read into a place that is not copied.
#[test]
fn a_layer_is_used_after_its_copies_and_its_seat_too() {
    inside(Kit::Whole, here!(), |standin| {
        let site = Site::new();
        let (pipeline, pool) = (site.pipeline(Method::Batch), Pool::new(&site));
        let compute = site.device.stream().unwrap();
        let copies = standin.latest() + 1;
        standin.stand(copies);
        let mut landing = site.land(&pipeline, 1, &pool).unwrap();
        assert!(matches!(landing.next_layer(&compute), Next::Layer(layer) if layer.layer == 0));
        // What the engine's kernels would do: read the layer.
        let (memory, at, len) = pool.places[0][0];
        let (region, host) = crate::copies::host(4096);
        site.device.pin(&region).unwrap();
        let pieces = [Piece { memory: memory as u32, at, host: 0, len }];
        let (direction, method) = (Direction::ToHost, Method::Each);
        let batch = Batch { direction, method, host: &host, memories: &pool.memories, pieces: &pieces };
        site.device.copy(&compute, &batch).unwrap();
        let read = site.device.record(&compute).unwrap();
        assert_eq!(site.device.synchronize_within(&read, Duration::from_millis(20)), Ok(false));
        assert_eq!(landing.landed(), 0);
        standin.go(copies);
        site.device.synchronize(&read).unwrap();
        site.device.unpin(&region);
        assert!(host.to_vec()[..len as usize] == site.blocks()[0][..len as usize]);
        for _ in 1..LAYERS {
            assert!(matches!(landing.next_layer(&compute), Next::Layer(_)));
        }
        assert!(matches!(landing.next_layer(&compute), Next::End(end) if end.reason.is_none()));
        drop(landing);
        assert!(pool.holds(standin, &pool.expected(&site)));
    });
}

/// The kernels that compute the layers have not run when the layers are given.
#[test]
fn a_layer_leaves_when_it_is_computed() {
    inside(Kit::Whole, here!(), |standin| {
        [false, true].into_iter().for_each(|through| leaves_when_computed(standin, through));
    });
}

fn leaves_when_computed(standin: &Standin, through: bool) {
    let site = Site::new();
    let (pipeline, pool) = (site.either(Method::Each, through), Pool::new(&site));
    let compute = site.device.stream().unwrap();
    let number = standin.latest();
    take_all(&mut site.land(&pipeline, 1, &pool).unwrap(), &compute);
    until("it has landed", || standin.pending() == 0);
    until("the arena is free", || site.arena.usage().used == 0);
    let computed = pattern(pool.memories[0].len(), 77);
    let (region, host) = crate::copies::host(computed.len() as u64);
    host.copy_in(0, &computed);
    site.device.pin(&region).unwrap();
    standin.stand(number);
    let pieces = [Piece { memory: 0, at: 0, host: 0, len: computed.len() as u64 }];
    let (direction, method) = (Direction::ToDevice, Method::Each);
    let batch = Batch { direction, method, host: &host, memories: &pool.memories, pieces: &pieces };
    site.device.copy(&compute, &batch).unwrap();
    let mut sink = pipeline.store_layers(site.leave(2, &pool)).unwrap();
    let left = sink.store_layer(0, &compute).unwrap();
    assert_eq!(site.device.synchronize_within(&left, Duration::from_millis(20)), Ok(false));
    standin.go(number);
    for layer in 1..LAYERS as u32 {
        sink.store_layer(layer, &compute).unwrap();
    }
    let reply = block_on(sink.seal().unwrap()).unwrap().unwrap();
    assert!(reply.outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored), "{reply:?}");
    site.device.unpin(&region);
    let again = Pool::new(&site);
    take_all(&mut site.land(&pipeline, 2, &again).unwrap(), &compute);
    let places = again.places.iter().flatten().filter(|(memory, ..)| *memory == 0);
    for &(_, at, len) in places {
        let right = &computed[at as usize..(at + len) as usize];
        assert!(standin.peek(again.memories[0].base() + at, len) == right, "at {at}");
    }
}

#[test]
fn a_device_that_breaks_ends_the_stream_and_everything_comes_back() {
    inside(Kit::Whole, here!(), |standin| {
        standin.only("a device that breaks");
        let site = Site::new();
        let (pipeline, pool) = (site.pipeline(Method::Kernel), Pool::new(&site));
        let compute = site.device.stream().unwrap();
        standin.break_work(3, 700);
        let mut landing = site.land(&pipeline, 1, &pool).unwrap();
        let end = loop {
            if let Next::End(end) = landing.next_layer(&compute) {
                break end;
            }
        };
        assert!(matches!(end.reason, Some(EndReason::Device(DeviceError::Lost(_)))), "{end:?}");
        assert!(end.usable_layers < 3);
        drop(landing);
        until("the arena is free", || site.arena.usage().used == 0);
    });
}

/// The engine's last kernels still use the slots when a request comes.
#[test]
fn nothing_is_written_to_slots_before_the_engine_is_done_with_them() {
    inside(Kit::Whole, here!(), |standin| {
        [false, true].into_iter().for_each(|through| slots_are_idle_first(standin, through));
    });
}

fn slots_are_idle_first(standin: &Standin, through: bool) {
    let site = Site::new();
    let (pipeline, pool) = (site.either(Method::Kernel, through), Pool::new(&site));
    let empty = [0, 1].map(|at: usize| standin.peek(pool.memories[at].base(), pool.memories[at].len()));
    let engine = site.device.stream().unwrap();
    let number = standin.latest();
    let (region, host) = crate::copies::host(64);
    site.device.pin(&region).unwrap();
    standin.stand(number);
    let pieces = [Piece { memory: 0, at: 8, host: 0, len: 64 }];
    let (direction, method) = (Direction::ToHost, Method::Each);
    let batch = Batch { direction, method, host: &host, memories: &pool.memories, pieces: &pieces };
    site.device.copy(&engine, &batch).unwrap();
    let after = Some(site.device.record(&engine).unwrap());
    let compute = site.device.stream().unwrap();
    let mut landing = pipeline.land(LandRequest { after, ..site.request(1, &pool) }).unwrap();
    assert!(matches!(landing.next_layer(&compute), Next::Layer(layer) if layer.layer == 0));
    // Time in which copies that do not wait are done. A real driver frees no memory while a stream stands still, so it
    // does no other work meanwhile.
    if crate::way::is_real() {
        std::thread::sleep(Duration::from_millis(300));
    } else {
        crate::copies::there_and_back(standin, &site.device, Method::Each, true);
    }
    assert!(pool.holds(standin, &empty) && landing.landed() == 0);
    standin.go(number);
    while matches!(landing.next_layer(&compute), Next::Layer(_)) {}
    drop(landing);
    assert!(pool.holds(standin, &pool.expected(&site)));
    assert!(host.to_vec() == vec![0xd5; 64], "what was there before");
    site.device.unpin(&region);
}

/// What was enqueued before the failure still reads the arena: its memory is not handed out, or unpinned, before that is
/// done.
#[test]
fn a_landing_that_fails_between_two_copies_keeps_the_memory_of_the_first() {
    inside(Kit::Whole, here!(), |standin| {
        let site = Site::new();
        let (pipeline, pool) = (site.pipeline(Method::Each), Pool::new(&site));
        // A thread that drops it does not wait for the copies that stand still.
        let pipeline = pipeline.with_copy_timeout(Duration::from_millis(20));
        let compute = site.device.stream().unwrap();
        let copies = standin.latest() + 1;
        standin.stand(copies);
        // The first layer's: no event stands behind its first copy yet.
        standin.fail("cuMemcpyHtoDAsync_v2", 2, 1);
        let mut landing = site.land(&pipeline, 1, &pool).unwrap();
        let end = loop {
            if let Next::End(end) = landing.next_layer(&compute) {
                break end;
            }
        };
        let why = "CUDA_ERROR_INVALID_VALUE".to_owned();
        let failed = DeviceError::Call { call: "cuMemcpyAsync", why };
        assert_eq!(end.reason, Some(EndReason::Device(failed)));
        assert_eq!(end.usable_layers, 0);
        drop(landing);
        // Everybody lets go of what they have: what is under way keeps what it needs.
        let arena = site.arena.clone();
        drop((pipeline, pool, compute, site));
        assert!(arena.usage().used > 0, "the copies still have it");
        drop(arena);
        assert_eq!(standin.misuse(), Vec::<String>::new());
        standin.go(copies);
        until("everything came back", || standin.live().is_empty());
    });
}

#[test]
fn the_part_of_a_layer_that_was_enqueued_is_no_layer() {
    inside(Kit::Whole, here!(), |standin| {
        let site = Site::new();
        let pool = Pool::new(&site);
        let pipeline = site.pipeline(Method::Each);
        let compute = site.device.stream().unwrap();
        standin.fail("cuMemcpyHtoDAsync_v2", 2, 1);
        let mut landing = site.land(&pipeline, 1, &pool).unwrap();
        let none =
            |next: Next| matches!(next, Next::End(end) if end.usable_layers == 0 && end.reason.is_some());
        assert!(none(landing.next_layer(&compute)));
        // The thread that follows the device lets go last.
        until("the arena is free", || site.arena.usage().used == 0);
        assert_eq!(landing.landed(), 0);
        assert!(none(landing.next_layer(&compute)));
    });
}

#[test]
fn layers_that_fail_on_their_way_out_keep_the_memory_of_what_was_enqueued() {
    inside(Kit::Whole, here!(), |standin| {
        let site = Site::new();
        let (pipeline, pool) = (site.pipeline(Method::Each), Pool::new(&site));
        // A thread that drops it does not wait for the copies that stand still.
        let pipeline = pipeline.with_copy_timeout(Duration::from_millis(20));
        let compute = site.device.stream().unwrap();
        let copies = standin.latest() + 1;
        standin.stand(copies);
        let mut sink = pipeline.store_layers(site.leave(2, &pool)).unwrap();
        standin.fail("cuMemcpyDtoHAsync_v2", 2, 1);
        let error = sink.store_layer(0, &compute).unwrap_err();
        assert!(matches!(error, LandError::Device(DeviceError::Call { .. })), "{error:?}");
        // It is over: no other layer is taken, and nothing is sealed.
        assert_eq!(sink.store_layer(0, &compute).unwrap_err(), error);
        drop(sink);
        let arena = site.arena.clone();
        drop((pipeline, pool, compute, site));
        assert!(arena.usage().used > 0, "the copies still have it");
        drop(arena);
        assert_eq!(standin.misuse(), Vec::<String>::new());
        standin.go(copies);
        until("everything came back", || standin.live().is_empty());
    });
}

/// Measuring gives its memory back, whatever fails, when nothing uses it any more.
#[test]
fn a_measurement_that_fails_waits_for_what_it_had_enqueued() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let (region, buf) = crate::copies::host(64 << 10);
        device.pin(&region).unwrap();
        let copies = standin.latest() + 1;
        standin.stand(copies);
        standin.fail("cuMemcpyHtoDAsync_v2", 2, 1);
        let pace = kvarts_gpudirect::pace::RealPace::new();
        std::thread::scope(|scope| {
            let measures = scope.spawn(|| Curve::measure(&device, &*pace, &buf, 64 << 10, 1));
            until("it waits, or does not", || standin.calls("cuEventQuery") > 0 || measures.is_finished());
            standin.go(copies);
            assert!(matches!(measures.join().unwrap(), Err(DeviceError::Call { .. })));
        });
        let stream = device.stream().unwrap();
        drain(&device, &stream).unwrap();
        device.unpin(&region);
    });
}
