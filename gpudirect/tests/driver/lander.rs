//! Landing and saving over a pool: rows of slots by the kernel, order between the engine's stream and ours judged by bytes, and what is left.

use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_gpudirect::device::cuda::Cuda;
use kvarts_gpudirect::device::slots::{Rows, SlotMove, SlotShape};
use kvarts_gpudirect::device::{Batch, Device, Direction, Memory, Method, Piece, Stream, drain};
use kvarts_gpudirect::error::DeviceError;
use kvarts_gpudirect::lander::{Column, Lander, Move};
use kvarts_gpudirect::pages::{PagePart, Pages};
use kvarts_layout::plan::Stretch;
use kvarts_layout::{BlockShape, ChunkShape, LayerShape};

use crate::copies::{host, pattern};
use crate::standin::{Kit, here, inside};

const WAIT: Duration = Duration::from_secs(60);
const LAYERS: u32 = 3;
const CHUNK: u64 = 24 << 10;
const BLOCKS: u32 = 40;

/// Brings bytes into device memory.
fn fill(device: &Cuda, stream: &Stream, memory: &Memory, bytes: &[u8]) -> Arc<Region> {
    let (region, buf) = host(bytes.len() as u64);
    buf.copy_in(0, bytes);
    device.pin(&region).unwrap();
    let (memories, pieces) =
        ([memory.clone()], [Piece { memory: 0, at: 0, host: 0, len: bytes.len() as u64 }]);
    let batch = Batch {
        direction: Direction::ToDevice,
        method: Method::Each,
        host: &buf,
        memories: &memories,
        pieces: &pieces,
    };
    device.copy(stream, &batch).unwrap();
    region
}

/// What lies in device memory when the stream has done what it was given.
fn bytes_of(device: &Cuda, stream: &Stream, memory: &Memory) -> Vec<u8> {
    let (region, buf) = host(memory.len());
    device.pin(&region).unwrap();
    let (memories, pieces) = ([memory.clone()], [Piece { memory: 0, at: 0, host: 0, len: memory.len() }]);
    let batch = Batch {
        direction: Direction::ToHost,
        method: Method::Each,
        host: &buf,
        memories: &memories,
        pieces: &pieces,
    };
    device.copy(stream, &batch).unwrap();
    drain(device, stream).unwrap();
    device.unpin(&region);
    buf.to_vec()
}

/// Slots of an engine's memory, and what moves to them: rows of a third of a chunk, of odd and of even lengths.
fn shapes() -> Vec<SlotShape> {
    let whole = SlotShape::whole(4096, 0, 5000);
    let rows = |row_bytes, ring, pool| SlotShape {
        outer: Rows { count: 3, ring: ring * 4, pool },
        inner: Rows { count: 4, ring, pool: pool * 3 },
        row_bytes,
        ring_first: 2,
        ..SlotShape::whole(4096, 7, 8192)
    };
    vec![whole, rows(64, 80, 64), rows(17, 17, 20), rows(4, 8, 12), SlotShape::whole(10_000, 16, 10_016)]
}

#[test]
fn rows_go_to_their_slots_and_come_back_whatever_their_lengths_and_strides() {
    inside(Kit::Bare, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let stream = device.stream().unwrap();
        let slots: Vec<u32> = (0..20).map(|at| (at * 7 + 3) % 20).collect();
        let (numbers, ring, pool) = (
            device.allocate(100).unwrap(),
            device.allocate(20 * 10_000 + 100).unwrap(),
            device.allocate(20 * 10_016 + 100).unwrap(),
        );
        let words: Vec<u8> = slots.iter().flat_map(|slot| slot.to_le_bytes()).collect();
        let pinned = fill(&device, &stream, &numbers, &words);
        for (number, shape) in (0u64..).zip(shapes()) {
            let (in_ring, in_pool) = (pattern(ring.len(), number), pattern(pool.len(), number + 9));
            for direction in [Direction::ToDevice, Direction::ToHost] {
                let kept = [fill(&device, &stream, &ring, &in_ring), fill(&device, &stream, &pool, &in_pool)];
                let moved = SlotMove {
                    direction,
                    ring: (&ring, 16),
                    pool: &pool,
                    slots: (&numbers, 2, 17),
                    largest: 19,
                    shape,
                };
                device.move_slots(&stream, &moved).unwrap();
                let (mut right_ring, mut right_pool) = (in_ring.clone(), in_pool.clone());
                for (at, slot) in slots[2..19].iter().enumerate() {
                    for outer in 0..u64::from(shape.outer.count) {
                        for inner in 0..u64::from(shape.inner.count) {
                            let ring = 16 + shape.ring_first + at as u64 * shape.ring_stride;
                            let ring = (ring + outer * shape.outer.ring + inner * shape.inner.ring) as usize;
                            let pool = shape.pool_base + u64::from(*slot) * shape.pool_stride;
                            let pool = (pool + outer * shape.outer.pool + inner * shape.inner.pool) as usize;
                            let len = shape.row_bytes as usize;
                            match direction {
                                Direction::ToDevice => {
                                    right_pool[pool..pool + len].copy_from_slice(&in_ring[ring..ring + len]);
                                }
                                Direction::ToHost => {
                                    right_ring[ring..ring + len].copy_from_slice(&in_pool[pool..pool + len]);
                                }
                            }
                        }
                    }
                }
                assert!(bytes_of(&device, &stream, &ring) == right_ring, "{shape:?} {direction:?}");
                assert!(bytes_of(&device, &stream, &pool) == right_pool, "{shape:?} {direction:?}");
                kept.iter().for_each(|region| device.unpin(region));
            }
            // What leaves its memory is not launched.
            let moved = SlotMove {
                direction: Direction::ToDevice,
                ring: (&ring, 16),
                pool: &pool,
                slots: (&numbers, 2, 24),
                largest: 19,
                shape,
            };
            assert_eq!(device.move_slots(&stream, &moved), Err(DeviceError::OutOfBounds));
            let moved = SlotMove { slots: (&numbers, 2, 17), largest: 60, ..moved };
            assert_eq!(device.move_slots(&stream, &moved), Err(DeviceError::OutOfBounds));
        }
        device.unpin(&pinned);
        assert_eq!(standin.misuse(), Vec::<String>::new());
    });
}

struct World {
    device: Cuda,
    as_device: Arc<dyn Device>,
    pool: Arc<Region>,
    memory: Memory,
    pages: Pages,
    stretch: Stretch,
}

/// Blocks of three layers of keys and values, of one page each, whose slots go backwards.
fn world() -> World {
    let device = Cuda::open(0).unwrap();
    let as_device: Arc<dyn Device> = Arc::new(device.clone());
    let chunk = ChunkShape { bytes: CHUNK, align: 1 };
    let layer = |layer| LayerShape { layer, chunks: vec![chunk; 2] };
    let shape = Arc::new(BlockShape::new((0..LAYERS).map(layer).collect()).unwrap());
    let bytes = u64::from(BLOCKS) * shape.block_bytes();
    let pool = Region::anonymous(bytes as usize).unwrap();
    device.pin(&pool).unwrap();
    let memory = device.allocate(bytes).unwrap();
    let pages = pages_of(&shape, &memory);
    let stretch = Stretch { at: 0, blocks: BLOCKS, first: 0, count: BLOCKS };
    World { device, as_device, pool, memory, pages, stretch }
}

/// Pages of all blocks in a memory of their size.
fn pages_of(shape: &Arc<BlockShape>, memory: &Memory) -> Pages {
    let part = |part: u32| {
        let base = u64::from(part) * u64::from(BLOCKS) * CHUNK;
        PagePart { memory: 0, rows: SlotShape::whole(CHUNK, base, CHUNK) }
    };
    let parts = (0..2 * LAYERS).map(part).collect();
    Pages::new(shape, vec![memory.clone()], parts, 1, (0..BLOCKS).rev().collect()).unwrap()
}

impl World {
    fn what(&self) -> Move {
        self.what_of(self.pages.clone())
    }

    fn what_of(&self, pages: Pages) -> Move {
        let columns = vec![Column { stretches: vec![self.stretch], pages }];
        Move { pool: Arc::clone(&self.pool), columns, keeps: Box::new(()) }
    }

    fn in_pool(&self) -> SharedBuf {
        SharedBuf::new(&self.pool, 0, self.pool.len()).unwrap()
    }
}

/// The same bytes with the blocks of each part the other way round, as the slots are.
fn turned(bytes: &[u8]) -> Vec<u8> {
    bytes
        .chunks(BLOCKS as usize * CHUNK as usize)
        .flat_map(|part| part.chunks(CHUNK as usize).rev().flatten().copied())
        .collect()
}

#[test]
fn layers_land_behind_what_still_uses_their_pages_and_before_what_computes_on_them() {
    inside(Kit::Bare, here!(), |standin| {
        let world = world();
        let (old, new) = (pattern(world.memory.len(), 1), pattern(world.memory.len(), 2));
        world.in_pool().copy_in(0, &new);
        // A ring that is used again several times.
        let lander = Lander::new(&world.as_device, 4 * 8 * CHUNK).unwrap();
        let engine = world.device.stream().unwrap();
        let pinned = fill(&world.device, &engine, &world.memory, &old);
        world.device.compute(&engine, Duration::from_millis(60)).unwrap();
        let (region, seen) = host(world.memory.len());
        world.device.pin(&region).unwrap();
        let (memories, pieces) =
            ([world.memory.clone()], [Piece { memory: 0, at: 0, host: 0, len: world.memory.len() }]);
        let batch = Batch {
            direction: Direction::ToHost,
            method: Method::Each,
            host: &seen,
            memories: &memories,
            pieces: &pieces,
        };
        // The last kernel that uses the pages: what it sees is what was there.
        world.device.copy(&engine, &batch).unwrap();
        let after = world.device.record(&engine).unwrap();
        let landed = lander.land(world.what(), Some(&after)).unwrap();
        for layer in 0..LAYERS {
            landed.wait(layer, &engine).unwrap();
        }
        let computed = bytes_of(&world.device, &engine, &world.memory);
        assert!(seen.to_vec() == old, "pages were written while they were read");
        assert!(computed == turned(&new), "a layer was computed on that had not landed");
        assert_eq!(landed.done().wait(WAIT), Some(Ok(())));
        drop(lander);
        [&pinned, &region, &world.pool].into_iter().for_each(|region| world.device.unpin(region));
        assert_eq!(standin.misuse(), Vec::<String>::new());
    });
}

#[test]
fn layers_leave_behind_what_computes_them_and_before_their_pages_are_written_again() {
    inside(Kit::Bare, here!(), |standin| {
        let world = world();
        let (right, next) = (pattern(world.memory.len(), 3), pattern(world.memory.len(), 4));
        let lander = Lander::new(&world.as_device, 4 * 8 * CHUNK).unwrap();
        let engine = world.device.stream().unwrap();
        let mut saving = lander.save(world.what()).unwrap();
        world.device.compute(&engine, Duration::from_millis(60)).unwrap();
        let mut pinned = vec![fill(&world.device, &engine, &world.memory, &right)];
        for layer in 0..LAYERS {
            let left = saving.layer(layer, &engine).unwrap();
            world.device.wait(&engine, &left).unwrap();
        }
        pinned.push(fill(&world.device, &engine, &world.memory, &next));
        assert_eq!(saving.finish().unwrap().wait(WAIT), Some(Ok(())));
        assert!(world.in_pool().to_vec() == turned(&right));
        drain(&world.device, &engine).unwrap();
        drop(lander);
        pinned.push(Arc::clone(&world.pool));
        pinned.iter().for_each(|region| world.device.unpin(region));
        assert_eq!(standin.misuse(), Vec::<String>::new());
    });
}

/// Streams of a lander's rings are made when it is: inward the far and the near one, the same for pages in use, then outward.
const FAR_IN: usize = 1;
const NEAR_IN: usize = 2;
const NEAR_OUT: usize = 6;
/// For how long work that must not run is watched.
const LOOK: Duration = Duration::from_millis(20);

#[test]
fn kernels_wait_for_copies_copies_for_their_segment_and_the_engine_for_its_layer() {
    inside(Kit::Bare, here!(), |standin| {
        for (number, standing) in [(11, FAR_IN), (12, NEAR_IN)] {
            let world = world();
            let new = pattern(world.memory.len(), number);
            world.in_pool().copy_in(0, &new);
            let before = standin.latest();
            let lander = Lander::new(&world.as_device, 4 * 8 * CHUNK).unwrap();
            let engine = world.device.stream().unwrap();
            standin.stand(before + standing);
            let landed = lander.land(world.what(), None).unwrap();
            landed.wait(0, &engine).unwrap();
            let computes = world.device.record(&engine).unwrap();
            assert_eq!(world.device.synchronize_within(&computes, LOOK), Ok(false), "stream {standing}");
            standin.go(before + standing);
            (1..LAYERS).for_each(|layer| landed.wait(layer, &engine).unwrap());
            let computed = bytes_of(&world.device, &engine, &world.memory);
            assert!(computed == turned(&new), "stream {standing}");
            assert_eq!(landed.done().wait(WAIT), Some(Ok(())));
            drop(lander);
            world.device.unpin(&world.pool);
        }
        assert_eq!(standin.misuse(), Vec::<String>::new());
    });
}

#[test]
fn what_leaves_is_copied_when_it_was_gathered() {
    inside(Kit::Bare, here!(), |standin| {
        let world = world();
        let right = pattern(world.memory.len(), 13);
        let before = standin.latest();
        let lander = Lander::new(&world.as_device, 4 * 8 * CHUNK).unwrap();
        let engine = world.device.stream().unwrap();
        let pinned = fill(&world.device, &engine, &world.memory, &right);
        drain(&world.device, &engine).unwrap();
        let mut saving = lander.save(world.what()).unwrap();
        standin.stand(before + NEAR_OUT);
        for layer in 0..LAYERS {
            saving.layer(layer, &engine).unwrap();
        }
        let done = saving.finish().unwrap();
        assert_eq!(done.wait(LOOK), None);
        standin.go(before + NEAR_OUT);
        assert_eq!(done.wait(WAIT), Some(Ok(())));
        assert!(world.in_pool().to_vec() == turned(&right));
        drop(lander);
        [&pinned, &world.pool].into_iter().for_each(|region| world.device.unpin(region));
        assert_eq!(standin.misuse(), Vec::<String>::new());
    });
}

#[test]
fn a_landing_whose_pages_are_in_use_holds_up_no_other() {
    inside(Kit::Bare, here!(), |standin| {
        let world = world();
        let new = pattern(world.memory.len(), 14);
        world.in_pool().copy_in(0, &new);
        let other = world.device.allocate(world.memory.len()).unwrap();
        let pages = pages_of(world.pages.shape(), &other);
        let lander = Lander::new(&world.as_device, 4 * 8 * CHUNK).unwrap();
        let engine = world.device.stream().unwrap();
        let number = standin.latest();
        standin.stand(number);
        world.device.compute(&engine, Duration::from_micros(1)).unwrap();
        let after = world.device.record(&engine).unwrap();
        let waits = lander.land(world.what(), Some(&after)).unwrap();
        let idle = lander.land(world.what_of(pages), None).unwrap();
        assert_eq!(idle.done().wait(WAIT), Some(Ok(())));
        assert_eq!(waits.done().outcome(), None);
        standin.go(number);
        assert_eq!(waits.done().wait(WAIT), Some(Ok(())));
        for memory in [&world.memory, &other] {
            assert!(bytes_of(&world.device, &engine, memory) == turned(&new));
        }
        drop(lander);
        world.device.unpin(&world.pool);
        assert_eq!(standin.misuse(), Vec::<String>::new());
    });
}

#[test]
fn events_are_used_again() {
    inside(Kit::Bare, here!(), |standin| {
        let world = world();
        let lander = Lander::new(&world.as_device, 4 * 8 * CHUNK).unwrap();
        let engine = world.device.stream().unwrap();
        let mut made = Vec::new();
        for _ in 0..3 {
            let landed = lander.land(world.what(), None).unwrap();
            landed.wait(0, &engine).unwrap();
            assert_eq!(landed.done().wait(WAIT), Some(Ok(())));
            let mut saving = lander.save(world.what()).unwrap();
            (0..LAYERS).for_each(|layer| drop(saving.layer(layer, &engine).unwrap()));
            assert_eq!(saving.finish().unwrap().wait(WAIT), Some(Ok(())));
            made.push(standin.calls("cuEventCreate"));
        }
        assert!(made[0] > 0 && made[1] == made[2], "{made:?}");
        drop(lander);
        world.device.unpin(&world.pool);
        assert_eq!(standin.misuse(), Vec::<String>::new());
    });
}
