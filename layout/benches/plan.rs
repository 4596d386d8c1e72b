//! What planning costs: time per extent, time to the first layer of a 1M-token prefix, allocations on the way.
//!
//! `cargo bench -p kvarts-layout --bench plan` prints one JSON object for each geometry. Targets: 100 ns per
//! extent, 100 us from the request to the first layer's plan, no allocation while steps are planned into a buffer
//! that has seen a step before. Times are the best and the median of many rounds: a benchmark, not a test.

use kvarts_layout::arrange::{LAYOUT_VERSION, RunLayout, record_header_bytes};
use kvarts_layout::plan::{
    Address, MemoryId, Order, PartTarget, Placement, ReadOptions, ReadPlan, RecordRead, Step, WritePlan,
};
use kvarts_layout::{BlockShape, ChunkShape, LayerShape, Layout};
use std::alloc::{GlobalAlloc, Layout as AllocLayout, System};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The system's allocator, with a count of the calls that hand out memory.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed to the system's allocator unchanged; counting touches no allocated memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: AllocLayout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps `alloc`'s contract, which is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: AllocLayout) {
        // SAFETY: `pointer` came from `System` through this allocator, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: AllocLayout, bytes: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: `pointer` came from `System` through this allocator, with this layout.
        unsafe { System.realloc(pointer, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const PREFIX_BLOCKS: u32 = 4096;
const RECORD_BLOCKS: u32 = 16;
const ROUNDS: usize = 101;

#[allow(clippy::disallowed_methods, reason = "a benchmark measures real time")]
fn now() -> Instant {
    Instant::now()
}

fn shape(layers: impl Iterator<Item = Vec<u64>>) -> BlockShape {
    let layer = |(layer, sizes): (u32, Vec<u64>)| LayerShape {
        layer,
        chunks: sizes.into_iter().map(|bytes| ChunkShape { bytes, align: 1 }).collect(),
    };
    BlockShape::new((0u32..).zip(layers).map(layer).collect()).expect("a shape within its limits")
}

/// 80 layers of 1 MiB per 256-token block.
fn llama_70b() -> BlockShape {
    shape((0..80).map(|_| vec![1 << 20]))
}

/// 61 layers: CSA entries with their indexer alternate with HCA entries.
fn deepseek_v4_pro() -> BlockShape {
    shape((0..61).map(|layer| if layer >= 2 && layer % 2 == 0 { vec![37_376, 8_448] } else { vec![1_168] }))
}

/// A paged pool with a target for each part and slots in no order, as an engine's allocator leaves them.
fn paged(shape: &BlockShape) -> Placement {
    let chunks = shape.layers().iter().flat_map(|layer| &layer.chunks);
    let target = |(memory, chunk): (u32, &ChunkShape)| PartTarget {
        memory: MemoryId(memory),
        base: 0,
        stride: chunk.bytes.next_multiple_of(if chunk.bytes >= 1 << 20 { 4096 } else { 64 }),
    };
    let targets: Vec<_> = (0u32..).zip(chunks).map(target).collect();
    // An odd multiplier permutes the slots of a pool whose size is a power of two.
    let slots =
        (0..PREFIX_BLOCKS).map(|block| block.wrapping_mul(2_654_435_761) % (PREFIX_BLOCKS * 4)).collect();
    Placement::paged(shape, &targets, slots).expect("slots that differ")
}

fn records(layout: &Arc<RunLayout>) -> Vec<RecordRead> {
    let header = record_header_bytes(RECORD_BLOCKS, layout.chunk_count());
    let bytes = header + layout.image_bytes();
    (0..PREFIX_BLOCKS / RECORD_BLOCKS)
        .map(|record| RecordRead {
            layout: Arc::clone(layout),
            payload_offset: u64::from(record) * bytes + header,
            blocks: 0..RECORD_BLOCKS,
            ordinal: record * RECORD_BLOCKS,
        })
        .collect()
}

fn plan(records: Vec<RecordRead>, shape: &BlockShape, placement: &Arc<Placement>, order: Order) -> ReadPlan {
    let layers = 0..shape.layers().len() as u32;
    ReadPlan::new(records, layers, order, Arc::clone(placement), ReadOptions::default())
        .expect("a valid request")
}

/// Best and median of the rounds, in nanoseconds.
fn best_and_median(mut round: impl FnMut() -> Duration) -> (f64, f64) {
    let mut times: Vec<_> = (0..ROUNDS).map(|_| round()).collect();
    times.sort_unstable();
    (times[0].as_nanos() as f64, times[ROUNDS / 2].as_nanos() as f64)
}

/// From a request (records and placement in hand) to the first layer's plan, into a step without memory or into
/// one that has served another prefix, as an engine keeps them.
fn first_layer(
    shape: &BlockShape,
    layout: &Arc<RunLayout>,
    placement: &Arc<Placement>,
    reuse: bool,
) -> (f64, f64) {
    let mut step = Step::new();
    best_and_median(|| {
        let records = records(layout);
        if !reuse {
            step = Step::new();
        }
        let start = now();
        let plan = plan(black_box(records), shape, placement, Order::Layers);
        assert!(plan.plan_step(0, &mut step));
        let elapsed = start.elapsed();
        black_box(&step);
        elapsed
    })
}

/// As `first_layer` into a used step, with the placement and the run's layout made in the same time, and every extent listed.
fn first_layer_from_nothing(shape: &BlockShape, kind: Layout) -> (f64, f64) {
    let layout = Arc::new(RunLayout::new(kind, LAYOUT_VERSION, shape, RECORD_BLOCKS).expect("a valid run"));
    let mut step = Step::new();
    best_and_median(|| {
        let mut records = records(&layout);
        let start = now();
        let layout =
            Arc::new(RunLayout::new(kind, LAYOUT_VERSION, shape, RECORD_BLOCKS).expect("a valid run"));
        records.iter_mut().for_each(|record| record.layout = Arc::clone(&layout));
        let plan = plan(records, shape, &Arc::new(paged(shape)), Order::Layers);
        assert!(plan.plan_step(0, &mut step));
        black_box(step.extents().map(|extent| extent.file_offset).max());
        start.elapsed()
    })
}

/// All steps into one buffer: nanoseconds per extent and per piece, counts, over-read, allocations.
fn steps(name: &str, plan: &ReadPlan) {
    let mut step = Step::new();
    let (mut extents, mut pieces, mut wanted, mut read) = (0u64, 0u64, 0u64, 0u64);
    for index in 0..plan.steps() {
        plan.plan_step(index, &mut step);
        extents += step.extents().count() as u64;
        pieces += (0..step.regions().len() as u32)
            .map(|region| plan.pieces(&step, region).count() as u64)
            .sum::<u64>();
        wanted += step.wanted_bytes();
        read += step.read_bytes();
    }
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    let (planning, planning_median) = best_and_median(|| {
        let start = now();
        for index in 0..plan.steps() {
            plan.plan_step(index, &mut step);
            for extent in step.extents() {
                black_box(extent);
            }
        }
        start.elapsed()
    });
    // One vector of the rounds' times.
    let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before - 1;
    let (expanding, _) = best_and_median(|| {
        let mut total = Duration::ZERO;
        for index in 0..plan.steps() {
            plan.plan_step(index, &mut step);
            let start = now();
            for region in 0..step.regions().len() as u32 {
                for piece in plan.pieces(&step, region) {
                    black_box(piece);
                }
            }
            total += start.elapsed();
        }
        total
    });
    println!(
        "{{\"bench\":\"plan_steps\",\"case\":\"{name}\",\"steps\":{},\"extents\":{extents},\"pieces\":{pieces},\
         \"ns_per_extent\":{:.1},\"ns_per_extent_median\":{:.1},\"ns_per_piece\":{:.1},\
         \"over_read_percent\":{:.3},\"allocations\":{allocations}}}",
        plan.steps(),
        planning / extents as f64,
        planning_median / extents as f64,
        expanding / pieces as f64,
        100.0 * (read - wanted) as f64 / wanted as f64,
    );
}

fn writes(name: &str, shape: &BlockShape, layout: &RunLayout) {
    let at = Address { memory: MemoryId(0), offset: 0 };
    let sources = Placement::canonical_blocks(shape, RECORD_BLOCKS, at).expect("a valid placement");
    let plan = WritePlan::new(layout, &sources, 0).expect("a valid request");
    let summary = plan.summary(4096);
    let (best, _) = best_and_median(|| {
        let start = now();
        for piece in plan.clone() {
            black_box(piece);
        }
        start.elapsed()
    });
    let chunks = f64::from(layout.chunk_count()) * f64::from(RECORD_BLOCKS);
    println!(
        "{{\"bench\":\"plan_write\",\"case\":\"{name}\",\"pieces\":{},\"vectored\":{},\"ns_per_chunk\":{:.1}}}",
        summary.pieces,
        summary.vectored,
        best / chunks,
    );
}

fn main() {
    for (model, shape) in [("llama-70b", llama_70b()), ("deepseek-v4-pro", deepseek_v4_pro())] {
        for (layout_name, kind) in [("layer-block", Layout::LayerBlock), ("full-block", Layout::FullBlock)] {
            let layout =
                Arc::new(RunLayout::new(kind, LAYOUT_VERSION, &shape, RECORD_BLOCKS).expect("a valid run"));
            let placement = Arc::new(paged(&shape));
            let (best, median) = first_layer(&shape, &layout, &placement, true);
            let (best_fresh, median_fresh) = first_layer(&shape, &layout, &placement, false);
            let (best_all, median_all) = first_layer_from_nothing(&shape, kind);
            println!(
                "{{\"bench\":\"plan_first_layer\",\"case\":\"{model}/{layout_name}\",\"records\":{},\
                 \"us\":{:.1},\"us_median\":{:.1},\"us_new_step\":{:.1},\
                 \"us_new_step_median\":{:.1},\"us_with_placement\":{:.1},\
                 \"us_with_placement_median\":{:.1}}}",
                PREFIX_BLOCKS / RECORD_BLOCKS,
                best / 1e3,
                median / 1e3,
                best_fresh / 1e3,
                median_fresh / 1e3,
                best_all / 1e3,
                median_all / 1e3,
            );
            let name = format!("{model}/{layout_name}/paged");
            steps(&name, &plan(records(&layout), &shape, &placement, Order::Layers));
            let buffers = Placement::layer_buffers(&shape, PREFIX_BLOCKS, |layer| Address {
                memory: MemoryId(layer),
                offset: 0,
            });
            let buffers = Arc::new(buffers.expect("a valid placement"));
            let name = format!("{model}/{layout_name}/layer-buffers");
            steps(&name, &plan(records(&layout), &shape, &buffers, Order::Layers));
            let name = format!("{model}/{layout_name}/block-order");
            steps(&name, &plan(records(&layout), &shape, &placement, Order::Blocks));
            writes(&format!("{model}/{layout_name}"), &shape, &layout);
        }
    }
}
