//! A store on a real directory: blocks go in and come back, by both runtimes and both ways to the disks.
#![allow(clippy::disallowed_methods, reason = "works on real directories, outside the simulation")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use kvarts_contract::api::{
    BlockOutcome, Digests, Durability, KvStore, Order, Parent, Placed, PutRequest, ReadRequest, Verify,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::class::Class;
use kvarts_contract::error::Kind;
use kvarts_contract::model::ModelBlocks;
use kvarts_layout::identity::{Arrangement, Quantisation, TenantSalt};
use kvarts_layout::spec::shipped;
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Group, Identity, Layout, NamespaceId};
use kvarts_store::engine::Options;
use kvarts_store::home::{Home, HomeOptions, RuntimeChoice};
use kvarts_store::io::IoChoice;

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvarts-first-light-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn identity(model: &str, block_tokens: u32) -> (Identity, kvarts_layout::ModelSpec) {
    let spec = shipped::load(model).unwrap();
    let text = |text: &str| text.to_owned();
    let identity = Identity {
        model: text(model),
        revision: text("0123abcd"),
        tokenizer: text("tok-1"),
        adapter: text("none"),
        kv_dtype: text("bf16"),
        quantisation: Quantisation { recipe: text("none"), scales: text("none") },
        rope: text("theta=500000"),
        window: text("none"),
        arrangement: Arrangement { engine: text("test"), layout: text("canonical"), version: text("1") },
        block_tokens,
        spec_fingerprint: spec.fingerprint(),
        tenant_salt: TenantSalt(Vec::new()),
        extras: BTreeMap::new(),
    };
    (identity, spec)
}

fn keys(count: u32) -> Vec<BlockKey> {
    (0..count)
        .map(|n| BlockKey(std::array::from_fn(|i| (n as usize * 31 + i * 7) as u8 ^ (n >> 8) as u8)))
        .collect()
}

fn pattern(buf: &SharedBuf, seed: u64) {
    let mut state = seed | 1;
    let bytes: Vec<u8> = (0..buf.len())
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .collect();
    buf.copy_in(0, &bytes);
}

fn memory(len: u64) -> SharedBuf {
    SharedBuf::new(&Region::anonymous(len as usize).unwrap(), 0, len as usize).unwrap()
}

fn round_trip(
    home: &Home,
    namespace: NamespaceId,
    coordinate: Coordinate,
    shape: &BlockShape,
    layout: Layout,
) {
    let blocks = 5;
    let source = memory(shape.block_bytes() * u64::from(blocks));
    pattern(&source, 42);
    let keys = keys(blocks);
    let put = PutRequest {
        namespace,
        group: Group(0),
        coordinate,
        parent: Parent::Root,
        first_block: Some(0),
        keys: keys.clone(),
        from: Placed::blocks(shape, source.clone(), blocks).unwrap(),
        layout: Some(layout),
        durability: Durability::Durable,
        expires_after: None,
        origins: None,
        deadline: None,
    };
    let reply = block_on(home.store().put(put.clone())).unwrap().unwrap();
    assert_eq!(reply.outcomes, vec![BlockOutcome::Stored; 5]);
    let again = block_on(home.store().put(put)).unwrap().unwrap();
    assert_eq!(again.outcomes, vec![BlockOutcome::AlreadyThere; 5]);
    check(home, namespace, coordinate, shape, &source, blocks);
}

fn check(
    home: &Home,
    namespace: NamespaceId,
    coordinate: Coordinate,
    shape: &BlockShape,
    source: &SharedBuf,
    blocks: u32,
) {
    for order in [Order::Layers, Order::Blocks] {
        let into = memory(shape.block_bytes() * u64::from(blocks));
        let read = ReadRequest {
            namespace,
            group: Group(0),
            coordinate,
            keys: keys(blocks),
            layers: None,
            order,
            into: Placed::blocks(shape, into.clone(), blocks).unwrap(),
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        };
        let end = home.store().read(read).unwrap().wait_blocking();
        assert_eq!((end.usable_blocks, end.failures.len()), (blocks, 0), "{:?}", end.failures.first());
        let (found, expected) = (into.to_vec(), source.to_vec());
        let differing: Vec<usize> = (0..found.len())
            .step_by(4096)
            .filter(|&at| found[at..at + 64] != expected[at..at + 64])
            .collect();
        assert!(
            found == expected,
            "{order:?}: {} pages differ, first {:?}, of {}",
            differing.len(),
            differing.first(),
            found.len() / 4096
        );
    }
}

fn options(scratch: &Scratch, io: IoChoice, runtime: RuntimeChoice) -> HomeOptions {
    HomeOptions {
        directories: vec![scratch.0.clone()],
        io,
        runtime,
        store: Options { segment_bytes: 64 << 20, budget_bytes: 1 << 30, ..Options::default() },
        ..HomeOptions::default()
    }
}

#[test]
fn blocks_come_back_as_they_were_put() {
    let ways = [
        (IoChoice::Pool, RuntimeChoice::Threads),
        (IoChoice::Auto, RuntimeChoice::Threads),
        (IoChoice::Auto, RuntimeChoice::Auto),
    ];
    for (way, (io, runtime)) in ways.into_iter().enumerate() {
        for (model, tokens, heads) in [("llama-3.1-8b", 16, 8), ("deepseek-v4-flash", 128, 0)] {
            for layout in [Layout::FullBlock, Layout::LayerBlock] {
                let scratch = Scratch::new(&format!("{way}-{model}-{layout:?}"));
                let mut home = Home::open(&options(&scratch, io, runtime)).unwrap();
                let (identity, spec) = identity(model, tokens);
                let namespace = home.store().register(&identity, spec.geometry()).unwrap();
                let coordinate = match heads {
                    0 => Coordinate::Replicated,
                    heads => Coordinate::heads(0, heads, heads).unwrap(),
                };
                let shape = spec.geometry().shape(Group(0), coordinate, tokens).unwrap();
                round_trip(&home, namespace, coordinate, &shape, layout);
                for clean in [true, false, true] {
                    if clean {
                        home.close().unwrap()
                    } else {
                        home.abandon()
                    }
                    home = Home::open(&options(&scratch, io, runtime)).unwrap();
                    let source = memory(shape.block_bytes() * 5);
                    pattern(&source, 42);
                    check(&home, namespace, coordinate, &shape, &source, 5);
                }
                home.close().unwrap();
            }
        }
    }
}

#[test]
fn a_put_takes_the_digests_that_its_caller_knows_and_computes_the_others() {
    let scratch = Scratch::new("known-digests");
    let home = Home::open(&options(&scratch, IoChoice::Auto, RuntimeChoice::Threads)).unwrap();
    let (identity, spec) = identity("llama-3.1-8b", 16);
    let namespace = home.store().register(&identity, spec.geometry()).unwrap();
    let coordinate = Coordinate::heads(0, 8, 8).unwrap();
    let shape = spec.geometry().shape(Group(0), coordinate, 16).unwrap();
    let source = memory(shape.block_bytes() * 3);
    pattern(&source, 42);
    let from = Placed::blocks(&shape, source, 3).unwrap();
    let digests = Digests::new(&shape, 3);
    let sizes: Vec<u64> = shape.layers().iter().flat_map(|layer| &layer.chunks).map(|c| c.bytes).collect();
    for (part, &bytes) in (0u32..).zip(&sizes) {
        let chunk = from.chunk(part, 0, bytes).unwrap();
        digests.set(part, 0, chunk.crc32(0, chunk.len()));
    }
    // Of the second block one is known, and is that of other bytes.
    digests.set(1, 1, 7);
    let put = PutRequest::new(namespace, Group(0), coordinate, keys(3), from.with_digests(digests));
    let reply = block_on(home.store().put(put)).unwrap().unwrap();
    assert_eq!(reply.outcomes, vec![BlockOutcome::Stored; 3]);
    let into = Placed::blocks(&shape, memory(shape.block_bytes() * 3), 3).unwrap();
    let read = ReadRequest {
        namespace,
        group: Group(0),
        coordinate,
        keys: keys(3),
        layers: None,
        order: Order::Blocks,
        into,
        verify: Verify::Always,
        class: Class::Foreground,
        deadline: None,
    };
    let end = home.store().read(read).unwrap().wait_blocking();
    let failed: Vec<_> = end.failures.iter().map(|(block, reason)| (*block, reason.kind())).collect();
    assert_eq!(failed, [(1, Kind::Corrupt)]);
    home.close().unwrap();
}

#[test]
fn reads_of_one_prefix_at_the_same_time_share_one_load() {
    let scratch = Scratch::new("flight");
    let home = Home::open(&options(&scratch, IoChoice::Auto, RuntimeChoice::Auto)).unwrap();
    let (identity, spec) = identity("llama-3.1-8b", 64);
    let namespace = home.store().register(&identity, spec.geometry()).unwrap();
    let coordinate = Coordinate::heads(0, 8, 8).unwrap();
    let shape = spec.geometry().shape(Group(0), coordinate, 64).unwrap();
    round_trip(&home, namespace, coordinate, &shape, Layout::LayerBlock);
    let before = home.store().stats().counts;
    let source = memory(shape.block_bytes() * 5);
    pattern(&source, 42);
    let start = |into: &SharedBuf| {
        home.store().read(ReadRequest {
            namespace,
            group: Group(0),
            coordinate,
            keys: keys(5),
            layers: None,
            order: Order::Layers,
            into: Placed::blocks(&shape, into.clone(), 5).unwrap(),
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        })
    };
    let destinations: Vec<SharedBuf> = (0..4).map(|_| memory(shape.block_bytes() * 5)).collect();
    let streams: Vec<_> = destinations.iter().map(|into| start(into).unwrap()).collect();
    for (stream, into) in streams.iter().zip(&destinations) {
        let end = stream.wait_blocking();
        assert_eq!((end.usable_blocks, end.failures.len()), (5, 0));
        assert!(into.to_vec() == source.to_vec());
    }
    let after = home.store().stats().counts;
    let (loaded, shared) =
        (after.device_bytes_read - before.device_bytes_read, after.bytes_shared - before.bytes_shared);
    assert_eq!(loaded + shared, 4 * shape.block_bytes() * 5, "every byte was loaded or shared");
    assert!(shared >= 2 * shape.block_bytes() * 5, "{shared} bytes of {loaded} were shared");
    home.close().unwrap();
}

#[test]
fn blocks_of_a_model_are_those_of_one_engine_and_revision_and_an_end_says_what_is_missing() {
    let scratch = Scratch::new("model");
    let home = Home::in_directory(&scratch.0, 256 << 20).unwrap();
    let of = |engine: &str, revision: &str| {
        ModelBlocks::new(home.store().clone(), engine, "llama-3.1-8b", revision, "bf16", 16).unwrap()
    };
    let blocks = of("one", "r1");
    let prompt: Vec<u32> = (0..70).collect();
    let state = memory(4 * blocks.block_bytes() as u64);
    pattern(&state, 7);
    blocks.put(&prompt, state.clone()).unwrap();
    assert_eq!(blocks.matched(&prompt).unwrap(), 4, "the last block is not full");
    // In a block its layers lie one behind the other, in a layer its blocks: this model has one part, keys and values in it.
    let (layer_bytes, mut came) = (blocks.block_bytes() / 32, 0);
    for layer in blocks.read_layers(&prompt, 4).unwrap() {
        let (found, put) = (layer.bytes.to_vec(), state.to_vec());
        for block in 0..4 {
            let from = block * blocks.block_bytes() + layer.layer as usize * layer_bytes;
            let found = &found[block * layer_bytes..][..layer_bytes];
            assert!(found == &put[from..][..layer_bytes], "layer {}, block {block}", layer.layer);
        }
        came += 1;
    }
    assert_eq!(came, 32);
    for other in [of("two", "r1"), of("one", "r2")] {
        assert_eq!(other.matched(&prompt).unwrap(), 0);
        let mut layers = other.read_layers(&prompt, 4).unwrap();
        assert!(layers.by_ref().all(|layer| layer.blocks == 0));
        let end = layers.end().unwrap();
        assert_eq!((end.usable_blocks, end.failures.len()), (0, 4));
    }
    let refused =
        |model| ModelBlocks::new(home.store().clone(), "one", model, "r1", "bf16", 256).unwrap_err();
    assert_eq!(refused("no-such-model").kind(), Kind::Invalid);
    assert_eq!(refused("deepseek-v4-pro").kind(), Kind::Invalid);
    assert_eq!(blocks.read_layers(&prompt, 0).unwrap_err().kind(), Kind::Invalid);
    home.close().unwrap();
}
