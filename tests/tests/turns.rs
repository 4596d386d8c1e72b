//! Reads whose layers use memory in turns, a tile a layer: what is told is right, and what was taken is left alone.
#![allow(clippy::disallowed_methods, reason = "works on real directories, outside the simulation")]

use std::path::PathBuf;
use std::time::Duration;

use kvarts_contract::api::{
    Arrived, BlockOutcome, Durability, KvStore, Late, Order, Parent, Placed, PutRequest, ReadRequest,
    StepGate, TiledRead, TiledRequest, Verify,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::error::Reason;
use kvarts_contract::{class::Class, clock::Nanos};
use kvarts_layout::plan::Tile;
use kvarts_layout::{BlockKey, BlockShape, NamespaceId};
use kvarts_store::engine::{Options, StoreTiles};
use kvarts_store::home::{Home, HomeOptions};
use kvarts_store::io::IoChoice;
use kvarts_tests::fixture::{self, PAGES, all_heads};

const BLOCKS: u32 = 6;

struct Bench {
    home: Option<Home>,
    path: PathBuf,
    namespace: NamespaceId,
    keys: Vec<BlockKey>,
    shape: BlockShape,
}

impl Drop for Bench {
    fn drop(&mut self) {
        if let Some(home) = self.home.take() {
            home.close().unwrap();
        }
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

impl Bench {
    /// A store with one run of blocks in several shards.
    fn new(name: &str, io: IoChoice) -> Self {
        let path = std::env::temp_dir().join(format!("kvarts-turns-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        let store = Options {
            budget_bytes: 256 << 20,
            segment_bytes: 1 << 20,
            record_bytes_max: 64 << 10,
            ..Options::default()
        };
        let options = HomeOptions { directories: vec![path.clone()], io, store, ..HomeOptions::default() };
        let home = Home::open(&options).unwrap();
        let namespace = home.store().register(&fixture::identity("turns"), &fixture::geometry()).unwrap();
        let (keys, shape) = (fixture::keys(7, 0..u64::from(BLOCKS)), fixture::shape(PAGES, all_heads()));
        let bench = Self { home: Some(home), path, namespace, keys, shape };
        let memory = fixture::memory(bench.shape.block_bytes() * u64::from(BLOCKS), 0);
        let mut at = 0;
        for key in &bench.keys {
            for chunk in fixture::content(key, PAGES, all_heads(), 1, &bench.shape) {
                memory.copy_in(at, &chunk);
                at += chunk.len();
            }
        }
        let reply =
            block_on(bench.store().put(bench.put(Placed::blocks(&bench.shape, memory, BLOCKS).unwrap())));
        assert!(reply.unwrap().unwrap().outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored));
        bench
    }

    fn store(&self) -> &kvarts_store::engine::Store {
        self.home.as_ref().unwrap().store()
    }

    fn put(&self, from: Placed) -> PutRequest {
        PutRequest {
            namespace: self.namespace,
            group: PAGES,
            coordinate: all_heads(),
            parent: Parent::Root,
            first_block: Some(0),
            keys: self.keys.clone(),
            from,
            layout: None,
            durability: Durability::Durable,
            expires_after: None,
            origins: None,
            deadline: None,
        }
    }

    fn read(&self, deadline: Option<Nanos>) -> TiledRead<StoreTiles> {
        let request = TiledRequest {
            namespace: self.namespace,
            group: PAGES,
            coordinate: all_heads(),
            keys: self.keys.clone(),
            layers: 0..self.shape.layers().len() as u32,
            order: Order::Layers,
            verify: Verify::Always,
            class: Class::Foreground,
            deadline,
        };
        self.store().read_tiles(request).unwrap()
    }

    /// Two buffers, each with room for any layer.
    fn shared(&self) -> [SharedBuf; 2] {
        let most = self.shape.layers().iter().map(|layer| layer.bytes()).max().unwrap();
        [(); 2].map(|()| fixture::memory(most * u64::from(BLOCKS), 0))
    }

    /// Gives a read memory for its next layer.
    fn grant(&self, read: &mut TiledRead<StoreTiles>, buf: &SharedBuf) -> Result<(), Reason> {
        let tile = read.next_tile(buf.len() as u64).unwrap();
        let tile = Tile { layers: tile.layers.start..tile.layers.start + 1, ..tile };
        let memory = buf.slice(0, tile.bytes(&self.shape) as usize).unwrap();
        read.grant(tile, memory, ())
    }

    /// What a layer's buffer holds when the layer is there: `[part][block]`.
    fn expected(&self, layer: usize) -> Vec<u8> {
        let first: usize = self.shape.layers()[..layer].iter().map(|layer| layer.chunks.len()).sum();
        let parts = first..first + self.shape.layers()[layer].chunks.len();
        let chunks: Vec<_> =
            (self.keys.iter()).map(|key| fixture::content(key, PAGES, all_heads(), 1, &self.shape)).collect();
        parts.flat_map(|part| chunks.iter().flat_map(move |block| block[part].clone())).collect()
    }
}

/// Waits for the next layer to be told.
fn next_layer(read: &mut TiledRead<StoreTiles>) -> Result<Option<(u32, u32)>, Late> {
    let mut found = None;
    while let Some(arrived) = block_on(read.next())? {
        if let Arrived::Layer { layer, blocks } = arrived {
            found = Some((layer, blocks));
        }
    }
    Ok(found)
}

#[test]
fn layers_that_take_turns_in_two_buffers_arrive_whole() {
    for (name, io) in [("auto", IoChoice::Auto), ("pool", IoChoice::Pool)] {
        let bench = Bench::new(name, io);
        let (shared, mut read) = (bench.shared(), bench.read(None));
        let layers = bench.shape.layers().len();
        assert!(layers > 2, "the shape must reuse a buffer");
        bench.grant(&mut read, &shared[0]).unwrap();
        for layer in 0..layers {
            if layer + 1 < layers {
                bench.grant(&mut read, &shared[(layer + 1) % 2]).unwrap();
            }
            assert_eq!(next_layer(&mut read), Ok(Some((layer as u32, BLOCKS))));
            let expected = bench.expected(layer);
            assert!(
                shared[layer % 2].slice(0, expected.len()).unwrap().to_vec() == expected,
                "layer {layer}"
            );
        }
        assert!(read.is_idle() && read.next_tile(1).is_none());
        assert_eq!(read.end(None).usable_layers, layers as u32);
    }
}

#[test]
fn memory_that_was_taken_is_left_alone_and_nothing_is_begun_behind_the_deadline() {
    let bench = Bench::new("late", IoChoice::Auto);
    let clock = std::sync::Arc::clone(bench.store().clock());
    let deadline = clock.now().plus(Duration::from_millis(400));
    let (shared, mut read) = (bench.shared(), bench.read(Some(deadline)));
    shared.iter().for_each(|buf| bench.grant(&mut read, buf).unwrap());
    for layer in 0..2 {
        assert_eq!(next_layer(&mut read), Ok(Some((layer, BLOCKS))));
    }
    while clock.now() < deadline {
        std::thread::yield_now();
    }
    assert!(read.is_idle(), "nothing is under way for a reader that takes its time");
    assert_eq!(bench.grant(&mut read, &shared[0]), Err(Reason::DeadlineInPast));
    let end = read.end(Some(&Reason::DeadlinePassed));
    assert_eq!((end.usable_layers, end.usable_blocks, end.held_bytes), (2, BLOCKS, 0), "{end:?}");
    for (layer, buf) in shared.iter().enumerate() {
        let expected = bench.expected(layer);
        assert!(buf.slice(0, expected.len()).unwrap().to_vec() == expected, "layer {layer} was overwritten");
    }
}

#[test]
fn a_caller_that_leaves_between_two_tiles_gets_its_memory_back() {
    let bench = Bench::new("left", IoChoice::Auto);
    let (shared, mut read) = (bench.shared(), bench.read(None));
    bench.grant(&mut read, &shared[0]).unwrap();
    assert_eq!(next_layer(&mut read), Ok(Some((0, BLOCKS))));
    bench.grant(&mut read, &shared[1]).unwrap();
    let held = shared.each_ref().map(|buf| buf.region().clone());
    drop((read, shared));
    // The read has let go when nothing but these handles holds the memory.
    for region in held {
        while std::sync::Arc::strong_count(&region) > 1 {
            std::thread::yield_now();
        }
    }
}

#[test]
fn shared_memory_is_refused_where_all_layers_are_needed_at_once() {
    let bench = Bench::new("refused", IoChoice::Auto);
    let shared = bench.shared();
    let buffers = (bench.shape.layers().iter().enumerate())
        .map(|(at, layer)| shared[at % 2].slice(0, (layer.bytes() * u64::from(BLOCKS)) as usize).unwrap())
        .collect::<Vec<_>>();
    let placed = Placed::gated_layers(&bench.shape, buffers, BLOCKS, StepGate::new(99)).unwrap();
    let put = block_on(bench.store().put(bench.put(placed.clone()))).unwrap();
    assert_eq!(put.unwrap_err().0, Reason::Overlap);
    for order in [Order::Layers, Order::Blocks] {
        let request = ReadRequest {
            namespace: bench.namespace,
            group: PAGES,
            coordinate: all_heads(),
            keys: bench.keys.clone(),
            layers: None,
            order,
            into: placed.clone(),
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        };
        assert_eq!(bench.store().read(request).unwrap_err().0, Reason::Overlap);
    }
}
