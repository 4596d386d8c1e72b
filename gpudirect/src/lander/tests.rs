//! Landings and saves on the emulated device, judged by the bytes that the engine's stream sees.

use std::sync::atomic::{AtomicU32, Ordering};

use kvarts_layout::{BlockShape, ChunkShape, LayerShape};

use super::*;
use crate::device::Memory;
use crate::device::emulated::{Emulated, Faults, Model, Sampled};
use crate::device::slots::{Rows, SlotShape};
use crate::pace::RealPace;
use crate::pages::PagePart;

const LAYERS: u32 = 5;
/// Tokens of a block and of a page, heads, and bytes of a head.
const TOKENS: u64 = 8;
const PAGE: u64 = 2;
const HEADS: u64 = 4;
const HEAD: u64 = 32;
const CHUNK: u64 = TOKENS * HEADS * HEAD;
const BLOCKS: u32 = 6;
const WAIT: Duration = Duration::from_secs(60);

/// Keys and values of each layer.
fn shape() -> Arc<BlockShape> {
    let chunk = ChunkShape { bytes: CHUNK, align: 1 };
    let layer = |layer| LayerShape { layer, chunks: vec![chunk; 2] };
    Arc::new(BlockShape::new((0..LAYERS).map(layer).collect()).unwrap())
}

fn byte(part: u32, block: u32, at: u64) -> u8 {
    (part as u64 * 7919 + u64::from(block) * 104_729 + at * 31 + at / 256).wrapping_mul(2_654_435_761) as u8
}

fn chunk(part: u32, block: u32) -> Vec<u8> {
    (0..CHUNK).map(|at| byte(part, block, at)).collect()
}

struct World {
    device: Emulated,
    as_device: Arc<dyn Device>,
    lander: Lander,
    pool: Arc<Region>,
    stretches: Vec<Stretch>,
    memory: Memory,
    pages: Pages,
    heads: (u64, u64),
    /// How much of its own the world still has to keep.
    kept: Arc<AtomicU32>,
}

/// Says when it goes.
struct Keeps(Arc<AtomicU32>);

impl Drop for Keeps {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn model() -> Model {
    Model { bytes_per_second: 50_000_000, strict: true, ..Model::default() }
}

/// Blocks in two extents of a pool, of which some lie in the middle; and an engine whose pages have heads before tokens, of which this rank has
/// two of four, in slots anywhere. `ring` is for both directions.
fn world(faults: Faults, ring: u64, timeout: Duration) -> World {
    world_of((1, 2), faults, ring, timeout)
}

/// The same with these heads of four: the first, and how many.
fn world_of((first, heads): (u64, u64), faults: Faults, ring: u64, timeout: Duration) -> World {
    let device = Emulated::with(model(), faults, RealPace::new());
    let as_device: Arc<dyn Device> = Arc::new(device.clone());
    let lander = Lander::with_timeout(&as_device, ring, timeout).unwrap();
    let pool = Region::anonymous(1 << 20).unwrap();
    as_device.pin(&pool).unwrap();
    let block = CHUNK * 2 * u64::from(LAYERS);
    let stretches = vec![
        Stretch { at: 4096, blocks: 5, first: 1, count: 4 },
        Stretch { at: 4096 + 5 * block, blocks: 2, first: 0, count: 2 },
    ];
    // Both halves of each layer in one memory, layer by layer.
    let (slots, page, per_block) = (40u64, PAGE * heads * HEAD, (TOKENS / PAGE) as u32);
    let memory = as_device.allocate(u64::from(LAYERS) * 2 * slots * page).unwrap();
    let part = |part: u32| {
        let rows = SlotShape {
            ring_stride: CHUNK / u64::from(per_block),
            ring_first: first * HEAD,
            pool_base: u64::from(part) * slots * page,
            pool_stride: page,
            outer: Rows { count: heads as u32, ring: HEAD, pool: PAGE * HEAD },
            inner: Rows { count: PAGE as u32, ring: HEADS * HEAD, pool: HEAD },
            row_bytes: HEAD,
        };
        PagePart { memory: 0, rows }
    };
    let numbers = (0..BLOCKS * per_block).map(|page| (page * 23 + 5) % 40).collect();
    let parts = (0..2 * LAYERS).map(part).collect();
    let pages = Pages::new(&shape(), vec![memory.clone()], parts, per_block, numbers).unwrap();
    let heads = (first, heads);
    World { device, as_device, lander, pool, stretches, memory, pages, heads, kept: Arc::default() }
}

impl World {
    /// Writes all blocks into the pool, or takes them out of it.
    fn each_chunk(&self, mut with: impl FnMut(u32, u32, SharedBuf)) {
        for part in 0..2 * LAYERS {
            let mut block = 0;
            for stretch in &self.stretches {
                let (at, _) = stretch.part(&shape(), part).unwrap();
                for of in 0..u64::from(stretch.count) {
                    let place = (at + of * CHUNK) as usize;
                    with(part, block, SharedBuf::new(&self.pool, place, CHUNK as usize).unwrap());
                    block += 1;
                }
            }
        }
    }

    fn fill(&self) {
        self.each_chunk(|part, block, buf| buf.copy_in(0, &chunk(part, block)));
    }

    fn what(&self) -> Move {
        self.kept.fetch_add(1, Ordering::SeqCst);
        let columns = vec![Column { stretches: self.stretches.clone(), pages: self.pages.clone() }];
        Move { pool: Arc::clone(&self.pool), columns, keeps: Box::new(Keeps(Arc::clone(&self.kept))) }
    }

    /// What the engine's memory has of a layer when it is right.
    fn right(&self, layer: u32) -> (u64, Vec<u8>) {
        let (first, heads) = self.heads;
        let (page, per_block) = (PAGE * heads * HEAD, (TOKENS / PAGE) as u32);
        let begin = u64::from(layer) * 2 * 40 * page;
        let mut bytes = vec![0; (2 * 40 * page) as usize];
        for half in 0..2u32 {
            for (at, slot) in (0u32..).zip(self.pages.slots()) {
                let (block, of) = (at / per_block, u64::from(at % per_block));
                for head in 0..heads {
                    for token in 0..PAGE {
                        let from = ((of * PAGE + token) * HEADS + head + first) * HEAD;
                        let to = u64::from(half) * 40 * page
                            + u64::from(*slot) * page
                            + (head * PAGE + token) * HEAD;
                        for byte_at in 0..HEAD {
                            bytes[(to + byte_at) as usize] = byte(2 * layer + half, block, from + byte_at);
                        }
                    }
                }
            }
        }
        (begin, bytes)
    }

    /// A kernel of the engine that reads all of a layer's pages, slowly.
    fn compute(&self, stream: &Stream, layer: u32) -> Sampled {
        let (at, bytes) = self.right(layer);
        let range = (at, bytes.len() as u64);
        self.device.sample(stream, &self.memory, range, Duration::from_millis(2)).unwrap()
    }

    fn drain(&self, stream: &Stream) {
        crate::device::drain(&*self.as_device, stream).unwrap();
    }
}

/// Small enough that segments are used again and that a layer needs several.
const SMALL: u64 = 4 * 3 * CHUNK;

#[test]
fn each_layer_is_whole_when_the_engine_computes_it_and_what_was_used_is_let_go_of() {
    for ring in [SMALL, RING_BYTES] {
        let world = world(Faults::default(), ring, WAIT);
        world.fill();
        let engine = world.as_device.stream().unwrap();
        let landed = world.lander.land(world.what(), None).unwrap();
        assert_eq!(world.kept.load(Ordering::SeqCst), 1);
        let seen: Vec<Sampled> = (0..LAYERS)
            .map(|layer| {
                landed.wait(layer, &engine).unwrap();
                world.compute(&engine, layer)
            })
            .collect();
        world.drain(&engine);
        for (layer, seen) in (0..).zip(seen) {
            assert_eq!(seen.seen().as_ref(), Some(&world.right(layer).1), "layer {layer}");
        }
        assert_eq!(landed.done().wait(WAIT), Some(Ok(())));
        assert_eq!(world.kept.load(Ordering::SeqCst), 0);
    }
}

#[test]
fn pages_that_the_engine_still_reads_are_written_behind_that() {
    let world = world(Faults::default(), SMALL, WAIT);
    world.fill();
    let engine = world.as_device.stream().unwrap();
    // Another request's layers, which a kernel reads that takes longer than all copies.
    let before = vec![9u8; world.memory.len() as usize];
    world.device.poke(&world.memory, 0, &before).unwrap();
    let range = (0, world.memory.len());
    let read = world.device.sample(&engine, &world.memory, range, Duration::from_millis(80)).unwrap();
    let after = world.as_device.record(&engine).unwrap();
    let landed = world.lander.land(world.what(), Some(&after)).unwrap();
    landed.wait(LAYERS - 1, &engine).unwrap();
    world.drain(&engine);
    assert_eq!(read.seen(), Some(before), "they were replaced while they were read");
    for layer in 0..LAYERS {
        let (at, right) = world.right(layer);
        let is = world.device.peek(&world.memory, at, right.len() as u64).unwrap();
        let slots = world.pages.slots().iter().map(|slot| u64::from(*slot) * PAGE * 2 * HEAD);
        for at in slots.flat_map(|slot| slot as usize..(slot + PAGE * 2 * HEAD) as usize) {
            assert_eq!(is[at], right[at]);
        }
    }
}

#[test]
fn landings_of_several_requests_share_the_ring_and_each_gets_its_own() {
    let world = world(Faults::default(), SMALL, WAIT);
    world.fill();
    let engine = world.as_device.stream().unwrap();
    let landed: Vec<Landed> = (0..6).map(|_| world.lander.land(world.what(), None).unwrap()).collect();
    for landed in &landed {
        landed.wait(LAYERS - 1, &engine).unwrap();
    }
    let seen = world.compute(&engine, 2);
    world.drain(&engine);
    assert_eq!(seen.seen().as_ref(), Some(&world.right(2).1));
    let before = world.as_device.in_use();
    assert!(landed.iter().all(|landed| landed.done().wait(WAIT) == Some(Ok(()))));
    // Memory for numbers is used again.
    drop(world.lander.land(world.what(), None).unwrap());
    assert_eq!(world.as_device.in_use(), before);
    assert_eq!(before.streams, 7, "two for each ring, and the engine's");
}

#[test]
fn layers_leave_behind_what_computes_them_and_are_in_the_pool_when_all_have() {
    for ring in [SMALL, RING_BYTES] {
        let world = world_of((0, HEADS), Faults::default(), ring, WAIT);
        let engine = world.as_device.stream().unwrap();
        let mut saving = world.lander.save(world.what()).unwrap();
        for layer in 0..LAYERS {
            // The kernel that computes a layer is busy before it writes.
            world.device.compute(&engine, Duration::from_millis(3)).unwrap();
            let (at, right) = world.right(layer);
            world.device.write(&engine, &world.memory, at, right.clone()).unwrap();
            let left = saving.layer(layer, &engine).unwrap();
            // Behind the event the pages are another request's.
            world.as_device.wait(&engine, &left).unwrap();
            world.device.write(&engine, &world.memory, at, vec![0xee; right.len()]).unwrap();
        }
        let done = saving.finish().unwrap();
        assert_eq!(done.wait(WAIT), Some(Ok(())));
        assert_eq!(world.kept.load(Ordering::SeqCst), 0);
        world.each_chunk(|part, block, buf| {
            assert_eq!(buf.to_vec(), chunk(part, block), "part {part} of block {block}");
        });
    }
}

#[test]
fn a_save_that_is_not_whole_is_none() {
    let some = world(Faults::default(), SMALL, WAIT);
    let refused = some.lander.save(some.what()).unwrap_err().to_string();
    assert!(refused.contains("bytes of a block"), "{refused}");
    let world = world_of((0, HEADS), Faults::default(), SMALL, WAIT);
    let engine = world.as_device.stream().unwrap();
    let mut saving = world.lander.save(world.what()).unwrap();
    assert!(saving.layer(1, &engine).is_err(), "layers come in order");
    saving.layer(0, &engine).unwrap();
    assert!(saving.finish().unwrap_err().to_string().contains("layer 1"));
    let saving = world.lander.save(world.what()).unwrap();
    drop(saving);
    // What was enqueued ends, and is let go of.
    drop(world.lander);
    assert_eq!(world.kept.load(Ordering::SeqCst), 0);
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_enqueued() {
    let world = world(Faults::default(), SMALL, WAIT);
    let refused = |what: Move, why: &str| {
        let refused = world.lander.land(what, None).unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    };
    let with = |change: &dyn Fn(&mut Move)| {
        let mut what = world.what();
        change(&mut what);
        what
    };
    refused(with(&|what| what.columns.clear()), "has no block");
    refused(
        with(&|what| what.columns[0].stretches[0].count = 3),
        "5 blocks were given, but the pages are for 6 blocks",
    );
    refused(with(&|what| what.columns[0].stretches[0].first = 2), "outside the pool");
    refused(with(&|what| what.columns[0].stretches[0].at = (1 << 20) - 4096), "outside the pool");
    let tiny = Lander::new(&world.as_device, 2048).unwrap();
    assert!(tiny.land(world.what(), None).unwrap_err().to_string().contains("the ring copies"));
    assert_eq!(world.kept.load(Ordering::SeqCst), 0);
}

#[test]
fn of_a_device_that_is_lost_or_stuck_everything_is_kept_and_every_later_call_says_so() {
    let lost = Faults { lost_at_copy: Some(3), ..Faults::default() };
    let stuck = Faults { stuck_copy: Some(3), ..Faults::default() };
    for (faults, timeout) in [(lost, WAIT), (stuck, Duration::from_millis(200))] {
        let is_stuck = faults.stuck_copy.is_some();
        let world = world(faults, SMALL, timeout);
        world.fill();
        let landed = world.lander.land(world.what(), None).unwrap();
        let outcome = landed.done().wait(WAIT).unwrap();
        assert_eq!(matches!(outcome, Err(DeviceError::Stuck { .. })), is_stuck, "{outcome:?}");
        assert!(outcome.is_err());
        let later = world.lander.land(world.what(), None);
        assert!(matches!(later, Err(LandError::Device(_))), "{later:?}");
        // The first one's, for good; the second was never begun.
        assert_eq!(world.kept.load(Ordering::SeqCst), 1);
        world.device.unstick();
        drop(world.lander);
        assert_eq!(world.kept.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn a_layer_costs_calls_as_it_has_megabytes_and_not_as_it_has_pages() {
    let few = calls_of(2);
    let many = calls_of(200);
    assert_eq!(few, many, "one copy and one kernel for each part, two events, two waits");
}

fn calls_of(blocks: u32) -> usize {
    let device: Arc<dyn Device> = Arc::new(Emulated::new(Model::default()));
    let pages = u64::from(blocks);
    let memory = device.allocate(pages * CHUNK * 2 * u64::from(LAYERS)).unwrap();
    let part = |part: u32| {
        let base = u64::from(part) * pages * CHUNK;
        PagePart { memory: 0, rows: SlotShape::whole(CHUNK, base, CHUNK) }
    };
    let parts = (0..2 * LAYERS).map(part).collect();
    let pages = Pages::new(&shape(), vec![memory], parts, 1, (0..blocks).rev().collect()).unwrap();
    let stretch = Stretch { at: 0, blocks, first: 0, count: blocks };
    let lander = Lander::new(&device, RING_BYTES).unwrap();
    let columns = [Column { stretches: vec![stretch], pages }];
    let mut lane = lock(&lander.0.inward);
    let count = lane.cut(&columns, 0, Lies::InExtents);
    lane.fills[..count].iter().map(|fill| fill.copies.len() + fill.launches.len()).sum()
}
