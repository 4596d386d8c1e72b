//! Reads whose layers use memory in turns: what is announced is right, and what is not open is left alone.
#![allow(clippy::disallowed_methods, reason = "works on real directories, outside the simulation")]

use std::path::PathBuf;
use std::time::Duration;

use kvarts_layout::{BlockKey, BlockShape, NamespaceId};
use kvarts_store::api::{
    BlockOutcome, Durability, KvStore, Order, Parent, Placed, PutRequest, ReadEvent, ReadRequest, Turns,
    Verify,
};
use kvarts_store::engine::Options;
use kvarts_store::error::Reason;
use kvarts_store::home::{Home, HomeOptions};
use kvarts_store::io::{IoChoice, SharedBuf};
use kvarts_store::rt::Class;
use kvarts_store::rt::blocking::block_on;
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

    fn read(&self, into: Placed) -> ReadRequest {
        ReadRequest {
            namespace: self.namespace,
            group: PAGES,
            coordinate: all_heads(),
            keys: self.keys.clone(),
            layers: None,
            order: Order::Layers,
            into,
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        }
    }

    /// Buffers of all layers, of which each second one is the same memory.
    fn shared(&self) -> [SharedBuf; 2] {
        let most = self.shape.layers().iter().map(|layer| layer.bytes()).max().unwrap();
        [(); 2].map(|()| fixture::memory(most * u64::from(BLOCKS), 0))
    }

    fn in_turns(&self, shared: &[SharedBuf; 2], turns: &Turns) -> Placed {
        let buffers = (self.shape.layers().iter().enumerate())
            .map(|(at, layer)| shared[at % 2].slice(0, (layer.bytes() * u64::from(BLOCKS)) as usize).unwrap())
            .collect();
        Placed::layers_in_turns(&self.shape, buffers, BLOCKS, turns.clone()).unwrap()
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

#[test]
fn layers_that_take_turns_in_two_buffers_arrive_whole() {
    for (name, io) in [("auto", IoChoice::Auto), ("pool", IoChoice::Pool)] {
        let bench = Bench::new(name, io);
        let (shared, turns) = (bench.shared(), Turns::new(0));
        let stream = bench.store().read(bench.read(bench.in_turns(&shared, &turns))).unwrap();
        let layers = bench.shape.layers().len();
        assert!(layers > 2, "the shape must reuse a buffer");
        for layer in 0..layers {
            turns.open(layer as u32 + 1);
            let there = ReadEvent::Layer { layer: layer as u32, blocks: BLOCKS };
            assert_eq!(stream.next_blocking(), there);
            let expected = bench.expected(layer);
            assert!(
                shared[layer % 2].slice(0, expected.len()).unwrap().to_vec() == expected,
                "layer {layer}"
            );
        }
        assert_eq!(stream.wait_blocking().usable_layers, layers as u32);
    }
}

#[test]
fn memory_whose_turn_never_comes_is_left_alone_and_the_deadline_ends_the_wait() {
    let bench = Bench::new("late", IoChoice::Auto);
    let (shared, turns) = (bench.shared(), Turns::new(2));
    let mut request = bench.read(bench.in_turns(&shared, &turns));
    request.deadline = Some(bench.store().clock().now().plus(Duration::from_millis(400)));
    let end = bench.store().read(request).unwrap().wait_blocking();
    assert_eq!((end.usable_layers, end.usable_blocks, end.held_bytes), (2, BLOCKS, 0), "{end:?}");
    for (layer, buf) in shared.iter().enumerate() {
        let expected = bench.expected(layer);
        assert!(buf.slice(0, expected.len()).unwrap().to_vec() == expected, "layer {layer} was overwritten");
    }
}

#[test]
fn a_caller_that_leaves_while_the_store_waits_for_a_turn_is_noticed() {
    let bench = Bench::new("left", IoChoice::Auto);
    let (shared, turns) = (bench.shared(), Turns::new(1));
    let stream = bench.store().read(bench.read(bench.in_turns(&shared, &turns))).unwrap();
    assert!(matches!(stream.next_blocking(), ReadEvent::Layer { layer: 0, .. }));
    let held = shared[0].region().clone();
    drop((stream, turns, shared));
    // The read has let go when nothing but this handle holds the memory. A read that waits for ever never does.
    while std::sync::Arc::strong_count(&held) > 1 {
        std::thread::yield_now();
    }
}

#[test]
fn shared_memory_is_refused_where_all_layers_are_needed_at_once() {
    let bench = Bench::new("refused", IoChoice::Auto);
    let (shared, turns) = (bench.shared(), Turns::new(99));
    let placed = bench.in_turns(&shared, &turns);
    let put = block_on(bench.store().put(bench.put(placed.clone()))).unwrap();
    assert_eq!(put.unwrap_err().0, Reason::Overlap);
    let request = ReadRequest { order: Order::Blocks, ..bench.read(placed) };
    assert_eq!(bench.store().read(request).unwrap_err().0, Reason::Overlap);
}
