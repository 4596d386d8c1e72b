//! A store with a run of blocks, an arena, and an engine's pool on an emulated device, for the tests of landing. It is a
//! real store in a real directory: what lands is read by the machine's own threads.

#![allow(
    clippy::disallowed_methods,
    reason = "works on real directories and threads, outside the simulation"
)]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, Durability, KvStore, Parent, Placed, Presence, PutRequest, Verify,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::class::Class;
use kvarts_gpudirect::device::emulated::{Emulated, Faults, Model};
use kvarts_gpudirect::device::{Batch, Device, Direction, Event, Memory, Method, Piece, Stream, drain};
use kvarts_gpudirect::error::{DeviceError, LandError};
use kvarts_gpudirect::gather::Curve;
use kvarts_gpudirect::lander::Lander;
use kvarts_gpudirect::pace::RealPace;
use kvarts_gpudirect::pipeline::{LandRequest, LayerEnd, LayerStream, Next, Pipeline};
use kvarts_gpudirect::store_layers::StoreRequest;
use kvarts_gpudirect::{Arena, Destination};
use kvarts_layout::plan::{MemoryId, PartTarget};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Group, NamespaceId};
use kvarts_store::engine::Options;
use kvarts_store::home::{Home, HomeOptions};

use crate::fixture::{self, ODD, PAGES};
use crate::stage::Scratch;

/// Blocks of the run.
pub const BLOCKS: u32 = 6;

/// How long a test waits for something that must end: if it takes longer, it hangs.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Waits until something is so that must come to be.
pub fn until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "it never is: {what}");
        std::thread::yield_now();
    }
}

/// A store with a run of blocks, and an arena of the smallest size.
#[derive(Debug)]
pub struct Site {
    home: Option<Home>,
    scratch: Scratch,
    /// The run's namespace.
    pub namespace: NamespaceId,
    /// The run's keys.
    pub keys: Vec<BlockKey>,
    /// Where layers land on their way.
    pub arena: Arena,
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some(home) = self.home.take() {
            match std::thread::panicking() {
                true => home.abandon(),
                false => home.close().expect("the store closes"),
            }
        }
    }
}

/// The columns of the run: with whole pages, and with odd sizes.
pub const COLUMNS: [(Group, Coordinate); 2] =
    [(PAGES, Coordinate::Heads { start: 0, count: 2, of: 2 }), (ODD, Coordinate::Replicated)];

impl Site {
    /// A new store that holds the run in both columns.
    pub fn new(name: &str) -> Self {
        let scratch = Scratch::new(&format!("landing-{name}"));
        let store = Options {
            segment_bytes: 1 << 20,
            record_bytes_max: 64 << 10,
            budget_bytes: 256 << 20,
            ..Options::default()
        };
        let options =
            HomeOptions { directories: vec![scratch.path().to_owned()], store, ..HomeOptions::default() };
        let home = Home::open(&options).expect("the store opens");
        let namespace = home
            .store()
            .register(&fixture::identity("landing"), &fixture::geometry())
            .expect("the model is accepted");
        let arena = Arena::new(192 << 10).expect("there is memory");
        let keys = fixture::keys(9, 0..u64::from(BLOCKS));
        let site = Self { home: Some(home), scratch, namespace, keys, arena };
        for column in COLUMNS {
            let reply = block_on(site.store().put(site.put(column)));
            let reply = reply.expect("an answer").expect("blocks");
            assert!(reply.outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored), "{reply:?}");
        }
        site
    }

    /// The directory of the store.
    pub fn path(&self) -> &Path {
        self.scratch.path()
    }

    /// The store.
    pub fn store(&self) -> &kvarts_store::engine::Store {
        self.home.as_ref().expect("open until dropped").store()
    }

    /// What puts the run.
    pub fn put(&self, (group, coordinate): (Group, Coordinate)) -> PutRequest {
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
            from: Placed::blocks(&shape, memory, BLOCKS).expect("a valid placement"),
            layout: Some(kvarts_layout::Layout::LayerBlock),
            durability: Durability::Durable,
            expires_after: None,
            origins: None,
            deadline: None,
        }
    }

    /// A pipeline from here to a device.
    pub fn pipeline(&self, device: &Emulated) -> Pipeline {
        self.pipeline_over(device, &self.arena)
    }

    /// The same through this arena.
    pub fn pipeline_over(&self, device: &Emulated, arena: &Arena) -> Pipeline {
        let device: Arc<dyn Device> = Arc::new(device.clone());
        Pipeline::new(Arc::new(self.store().clone()), device, arena.clone(), Curve::default())
    }

    /// Both ways in which a pipeline brings layers to their places.
    pub const WAYS: [fn(&Self, &Emulated, &Arena) -> Pipeline; 2] =
        [Self::pipeline_over, Self::pipeline_through];

    /// The same through the rings of a lander, which are used again for each layer.
    pub fn pipeline_through(&self, device: &Emulated, arena: &Arena) -> Pipeline {
        let as_device: Arc<dyn Device> = Arc::new(device.clone());
        let lander = Lander::new(&as_device, 64 << 10).expect("a device with room for rings");
        self.pipeline_over(device, arena).with_lander(lander)
    }

    /// Begins to land the run in a pool, once the stream that landed before has let go of the arena.
    pub fn land(&self, pipeline: &Pipeline, pool: &Pool) -> Result<LayerStream, LandError> {
        // The store lets go of the last stream's memory on its own threads.
        self.settle();
        pipeline.land(self.request(pool))
    }

    /// What lands the run in a pool.
    pub fn request(&self, pool: &Pool) -> LandRequest {
        LandRequest {
            namespace: self.namespace,
            group: pool.column.0,
            coordinate: pool.column.1,
            keys: self.keys.clone(),
            layers: None,
            into: pool.into.clone(),
            after: None,
            depth_bytes: 0,
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        }
    }

    /// Waits until disk and device have let go of the arena.
    pub fn settle(&self) {
        until("the arena is free", || self.arena.usage().used == 0);
    }
}

/// An engine's paged pool: each part in a memory of its own, slots scattered with gaps.
#[derive(Debug)]
pub struct Pool {
    /// Whose blocks they are.
    pub column: (Group, Coordinate),
    /// What each is.
    pub shape: Arc<BlockShape>,
    /// The memory of each part.
    pub memories: Vec<Memory>,
    /// Where the blocks of the run go.
    pub into: Destination,
}

/// The slot of a block.
pub fn slot(block: u32) -> u32 {
    (block * 5 + 3) % 13
}

impl Pool {
    /// A pool that holds nothing of the run.
    pub fn new(device: &Emulated, column: (Group, Coordinate)) -> Self {
        let shape = Arc::new(fixture::shape(column.0, column.1));
        let chunks = shape.layers().iter().flat_map(|layer| &layer.chunks);
        let (mut memories, mut targets) = (Vec::new(), Vec::new());
        for (at, chunk) in (0u32..).zip(chunks) {
            let memory = device.allocate(chunk.bytes * 13 + 8).expect("there is memory");
            device.poke(&memory, 0, &vec![0xEE; memory.len() as usize]).expect("it lies inside");
            memories.push(memory);
            targets.push(PartTarget { memory: MemoryId(at), base: 8, stride: chunk.bytes });
        }
        let slots = (0..BLOCKS).map(slot).collect();
        let into = Destination::paged(&shape, memories.clone(), &targets, slots).expect("no two overlap");
        Self { column, shape, memories, into }
    }

    /// The canonical parts of a layer.
    pub fn parts(&self, layer: u32) -> std::ops::Range<usize> {
        let layers = self.shape.layers();
        let first = layers[..layer as usize].iter().map(|layer| layer.chunks.len()).sum();
        first..first + layers[layer as usize].chunks.len()
    }

    /// Whether every byte of a layer is what was put, in its slot, and the gaps are untouched.
    pub fn is_there(&self, site: &Site, device: &Emulated, layer: u32) -> bool {
        self.parts(layer).all(|part| {
            let bytes =
                device.peek(&self.memories[part], 0, self.memories[part].len()).expect("it lies inside");
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
    pub fn touch(&self, device: &Emulated, stream: &Stream, layer: u32) -> Result<(), DeviceError> {
        let mut parts = self.parts(layer);
        parts.try_for_each(|part| device.touch(stream, &self.memories[part], 0, self.memories[part].len()))
    }
}

/// A strict device in real time.
pub fn strict(faults: Faults) -> Emulated {
    // Copies take longer than reads, so that memory which is reused too early is seen.
    let model = Model { strict: true, call: Duration::from_millis(1), ..Model::default() };
    Emulated::with(model, faults, RealPace::new())
}

/// Has an engine's kernel read the whole pool, behind the device's first copy, which is to be a stuck one; the point behind
/// it.
pub fn read_by_the_engine(pool: &Pool, device: &Emulated, engine: &Stream) -> Event {
    let own = [device.allocate(8).unwrap()];
    let host = fixture::memory(8, 0);
    let pieces = [Piece { memory: 0, at: 0, host: 0, len: 8 }];
    let (direction, method) = (Direction::ToDevice, Method::Each);
    let batch = Batch { direction, method, host: &host, memories: &own, pieces: &pieces };
    device.copy(engine, &batch).unwrap();
    for memory in pool.into.memories() {
        device.read_for(engine, memory, (0, memory.len()), Duration::ZERO).unwrap();
    }
    device.record(engine).unwrap()
}

/// Copies of its own, one behind the other: time in which a copy of others that does not wait is done.
pub fn busy_link(device: &Emulated) {
    let (own, host) = ([device.allocate(8).unwrap()], fixture::memory(8, 0));
    let stream = device.stream().unwrap();
    let pieces = [Piece { memory: 0, at: 0, host: 0, len: 8 }];
    let (direction, method) = (Direction::ToDevice, Method::Each);
    for _ in 0..20 {
        let batch = Batch { direction, method, host: &host, memories: &own, pieces: &pieces };
        device.copy(&stream, &batch).unwrap();
        drain(device, &stream).unwrap();
    }
}

/// Lets end what is stuck when the test does, also where that fails: its thread would never end.
#[derive(Debug)]
pub struct Freed<'a>(pub &'a Emulated);

impl Drop for Freed<'_> {
    fn drop(&mut self) {
        self.0.unstick();
    }
}

/// Takes every layer; gives how many came and the end.
pub fn run(stream: &mut LayerStream, pool: &Pool, device: &Emulated, compute: &Stream) -> (u32, LayerEnd) {
    let mut came = 0;
    loop {
        match stream.next_layer(compute) {
            Next::Layer(layer) => {
                assert_eq!(layer.layer, came, "layers come in order");
                came += 1;
                let _ = pool.touch(device, compute, layer.layer);
            }
            Next::Refused(error) => panic!("no graph is captured: {error}"),
            Next::End(end) => return (came, end),
        }
    }
}

/// What the producer of a new chain hands over.
pub fn store_request(site: &Site, pool: &Pool, chain: u64) -> StoreRequest {
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

/// Which blocks are here.
pub fn is_here(site: &Site, pool: &Pool, keys: &[BlockKey]) -> Vec<Presence> {
    let (group, coordinate) = pool.column;
    let request = ContainsRequest { namespace: site.namespace, group, coordinate, keys, lease: None };
    site.store().contains(&request).expect("it can be asked").presence
}
