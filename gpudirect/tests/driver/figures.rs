//! How fast it is, beside a bare loop in the same process. Each figure is a line for programs, `figure` and JSON behind it. They
//! are taken over the machine's driver as it is, not watched, by `scripts/gpu-run`; over the stand-in only that they are told.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_gpudirect::device::cuda::Cuda;
use kvarts_gpudirect::device::slots::SlotShape;
use kvarts_gpudirect::device::{Batch, Device, Direction, Memory, Method, Piece, drain};
use kvarts_gpudirect::lander::{Column, Lander, Move, RING_BYTES};
use kvarts_gpudirect::pages::{PagePart, Pages};
use kvarts_layout::plan::Stretch;
use kvarts_layout::{BlockShape, ChunkShape, LayerShape};

use crate::bare::Bare;
use crate::standin::{Kit, again};

/// MiB that are moved in a round, if not 256.
const MIB: &str = "KVARTS_FIGURES_MIB";
/// Bytes of a piece: from a page to what a copy engine moves best.
const SIZES: [u64; 10] =
    [4 << 10, 8 << 10, 16 << 10, 28 << 10, 40 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];
/// How long a request may take.
const WAIT: Duration = Duration::from_secs(60);
/// Rounds in which all take turns; the best one counts.
const ROUNDS: usize = 5;
/// Pieces of a round at most: small ones are slow one by one.
const PIECES_MAX: u64 = 8192;

fn bytes() -> u64 {
    let mib: u64 = std::env::var(MIB).map_or(256, |mib| mib.parse().expect("a number of MiB"));
    mib << 20
}

fn tell(figure: &str, facts: &str) {
    println!("figure\t{{\"figure\":\"{figure}\",{facts}}}");
}

fn copied(name: &str, direction: &str, piece: u64, count: u64, seconds: f64) {
    let rate = (piece * count) as f64 / seconds.max(1e-9);
    tell(
        "copy",
        &format!(
            "\"way\":\"{name}\",\"direction\":\"{direction}\",\"piece_bytes\":{piece},\"pieces\":{count},\"bytes_per_second\":{rate:.0}"
        ),
    );
}

/// Seconds that work takes, until the device has done it.
fn timed(work: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    work();
    begin.elapsed().as_secs_f64()
}

#[test]
#[ignore = "a figure: scripts/gpu-run"]
fn copies_by_size_of_pieces() {
    let bytes = bytes();
    let device = Cuda::open(0).unwrap();
    println!("figure\t{{\"figure\":\"device\",\"name\":{:?}}}", device.describe().name);
    let bare = Bare::new(bytes);
    let region = Region::anonymous(bytes as usize).unwrap();
    let host = SharedBuf::new(&region, 0, bytes as usize).unwrap();
    host.fill(1);
    let pinned = timed(|| device.pin(&region).unwrap());
    tell("pin", &format!("\"bytes\":{bytes},\"seconds\":{pinned:.6}"));
    let (stream, memories) = (device.stream().unwrap(), [device.allocate(bytes * 2).unwrap()]);
    for piece in SIZES.into_iter().filter(|piece| *piece <= bytes) {
        let count = (bytes / piece).min(PIECES_MAX);
        let place = |at: u64| Piece { memory: 0, at: at * piece * 2, host: at * piece, len: piece };
        let pieces: Vec<Piece> = (0..count).map(place).collect();
        for (direction, name) in [(Direction::ToDevice, "to device"), (Direction::ToHost, "to host")] {
            let ours = |method| {
                let batch = Batch { direction, method, host: &host, memories: &memories, pieces: &pieces };
                device.copy(&stream, &batch).unwrap();
                drain(&device, &stream).unwrap();
            };
            let mut best = [f64::INFINITY; 4];
            for _ in 0..=ROUNDS {
                best[0] = best[0].min(bare.copies(direction == Direction::ToDevice, piece, count));
                for (at, &method) in (1..).zip(device.methods()) {
                    best[at] = best[at].min(timed(|| ours(method)));
                }
            }
            copied("bare", name, piece, count, best[0]);
            for (at, method) in (1..).zip(device.methods()) {
                copied(method.name(), name, piece, count, best[at]);
            }
        }
    }
    device.unpin(&region);
}

/// Pages of 16 tokens as engines have them, and what a part of one has: keys and values, or what stands for them.
const PAGES: [(&str, &[u64]); 4] = [
    ("llama-3.1-8b tp1", &[32 << 10, 32 << 10]),
    ("llama-3.1-70b tp8", &[4 << 10, 4 << 10]),
    ("deepseek-v3.2 tp1", &[18_432, 2_112]),
    ("deepseek-v4-pro tp1", &[1_168, 1_168]),
];
/// Layers that those bytes are of.
const LAYERS: u32 = 16;
/// Blocks of a stretch, as an extent of a pool has them.
const STRETCH: u32 = 256;

/// A request for as many blocks of `LAYERS` layers of these parts as there are bytes: the columns of its move, and its bytes.
fn request(parts: &[u64], memory: &Memory, bytes: u64) -> (impl Fn() -> Vec<Column>, u64) {
    let chunks = parts.iter().map(|bytes| ChunkShape { bytes: *bytes, align: 1 });
    let layer = |layer| LayerShape { layer, chunks: chunks.clone().collect() };
    let shape = Arc::new(BlockShape::new((0..LAYERS).map(layer).collect()).unwrap());
    let blocks = (bytes / shape.block_bytes()) as u32;
    // An odd step through the slots: no two pages lie beside each other.
    let slots = (0..blocks).map(|at| (u64::from(at) * 7919 % u64::from(blocks)) as u32);
    let slots: Vec<u32> = if blocks.is_multiple_of(7919) { (0..blocks).collect() } else { slots.collect() };
    let mut base = 0;
    let place = |bytes: &u64| {
        let part = PagePart { memory: 0, rows: SlotShape::whole(*bytes, base, *bytes) };
        base += bytes * u64::from(blocks);
        part
    };
    let placed = (0..LAYERS).flat_map(|_| parts).map(place).collect();
    let pages = Pages::new(&shape, vec![memory.clone()], placed, 1, slots).unwrap();
    let stretch = |first: u32| {
        let count = STRETCH.min(blocks - first);
        let at = u64::from(first) * shape.block_bytes();
        Stretch { at, blocks: count, first: 0, count }
    };
    let stretches: Vec<Stretch> = (0..blocks).step_by(STRETCH as usize).map(stretch).collect();
    let columns = move || vec![Column { stretches: stretches.clone(), pages: pages.clone() }];
    (columns, u64::from(blocks) * shape.block_bytes())
}

/// All layers of a request landed from a pool in slots of an engine's pages, and saved from there, beside copies of as many bytes in pieces
/// of 16 MiB; and what the engine's thread spends on a layer.
#[test]
#[ignore = "a figure: scripts/gpu-run"]
fn landing_beside_the_bare_copy() {
    let bytes = bytes();
    let device = Cuda::open(0).unwrap();
    let as_device: Arc<dyn Device> = Arc::new(device.clone());
    let bare = Bare::new(bytes);
    let pool = Region::anonymous(bytes as usize).unwrap();
    SharedBuf::new(&pool, 0, bytes as usize).unwrap().fill(1);
    device.pin(&pool).unwrap();
    let lander = Lander::new(&as_device, RING_BYTES).unwrap();
    let (engine, memory) = (device.stream().unwrap(), device.allocate(bytes).unwrap());
    for (model, parts) in PAGES {
        let (columns, moved) = request(parts, &memory, bytes);
        let what = || Move { pool: Arc::clone(&pool), columns: columns(), keeps: Box::new(()) };
        let piece = moved.min(16 << 20);
        let (mut best, mut on_thread) = ([f64::INFINITY; 4], f64::INFINITY);
        for _ in 0..=ROUNDS {
            best[0] = best[0].min(bare.copies(true, piece, moved / piece));
            best[1] = best[1].min(timed(|| {
                let landed = lander.land(what(), None).unwrap();
                let waits = timed(|| (0..LAYERS).for_each(|layer| landed.wait(layer, &engine).unwrap()));
                on_thread = on_thread.min(waits / f64::from(LAYERS));
                assert_eq!(landed.done().wait(WAIT), Some(Ok(())));
            }));
            drain(&device, &engine).unwrap();
            best[2] = best[2].min(bare.copies(false, piece, moved / piece));
            best[3] = best[3].min(timed(|| {
                let mut saving = lander.save(what()).unwrap();
                (0..LAYERS).for_each(|layer| drop(saving.layer(layer, &engine).unwrap()));
                assert_eq!(saving.finish().unwrap().wait(WAIT), Some(Ok(())));
            }));
        }
        // The bare loop leaves out what is no whole piece.
        let whole = (moved / piece * piece) as f64 / moved as f64;
        let (landed, saved) = (best[0] / whole / best[1], best[2] / whole / best[3]);
        let host = on_thread * 1e6;
        tell(
            "landing",
            &format!(
                "\"model\":\"{model}\",\"page_bytes\":{},\"bytes\":{moved},\"land_of_link\":{landed:.4},\"save_of_link\":{saved:.4},\"host_us_per_layer\":{host:.2}",
                parts.iter().sum::<u64>()
            ),
        );
    }
    device.unpin(&pool);
}

/// Launches of an engine's step, and how long it takes about.
const LAUNCHES: u32 = 32;
const STEP: Duration = Duration::from_millis(40);
/// Pairs of steps: alone, and while requests land.
const PAIRS: usize = 15;

/// How much longer an engine's step takes, whose kernels fill the device, while another request lands; and, as the control, how much one half
/// of the steps that ran alone took longer than the other.
#[test]
#[ignore = "a figure: scripts/gpu-run"]
fn an_engines_step_while_a_request_lands() {
    let bytes = bytes();
    let device = Cuda::open(0).unwrap();
    let as_device: Arc<dyn Device> = Arc::new(device.clone());
    let pool = Region::anonymous(bytes as usize).unwrap();
    SharedBuf::new(&pool, 0, bytes as usize).unwrap().fill(1);
    device.pin(&pool).unwrap();
    let lander = Lander::new(&as_device, RING_BYTES).unwrap();
    let (engine, read) = (device.stream().unwrap(), device.allocate(bytes).unwrap());
    let pages = device.allocate(bytes).unwrap();
    let (columns, moved) = request(PAGES[0].1, &pages, bytes);
    let step = |rounds: u32| {
        timed(|| {
            (0..LAUNCHES).for_each(|_| device.compute_everywhere(&engine, &read, rounds).unwrap());
            drain(&device, &engine).unwrap();
        })
    };
    // The first launch brings the kernel to the device.
    step(1);
    let rounds = (STEP.as_secs_f64() / step(1000).max(1e-6) * 1000.0).clamp(1.0, 1e8) as u32;
    let mut alone = [Vec::new(), Vec::new()];
    let (mut beside, mut landed_bytes, mut landing) = (Vec::new(), 0u64, 0.0);
    for _ in 0..PAIRS {
        alone[0].push(step(rounds));
        // Two are on their way at any time.
        let land = || {
            let what = Move { pool: Arc::clone(&pool), columns: columns(), keeps: Box::new(()) };
            lander.land(what, None).unwrap()
        };
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let lands = scope.spawn(|| {
                let (mut under_way, mut count) = (land(), 0u64);
                let seconds = timed(|| {
                    while !is_over.load(Ordering::Acquire) {
                        let next = land();
                        assert_eq!(under_way.done().wait(WAIT), Some(Ok(())));
                        (under_way, count) = (next, count + 1);
                    }
                    assert_eq!(under_way.done().wait(WAIT), Some(Ok(())));
                });
                (count + 1, seconds)
            });
            beside.push(step(rounds));
            is_over.store(true, Ordering::Release);
            let (count, seconds) = lands.join().unwrap();
            landed_bytes += count * moved;
            landing += seconds;
        });
        alone[1].push(step(rounds));
    }
    let median = |seconds: &mut Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    let [first, second] = alone.each_mut().map(median);
    let slowdown = median(&mut beside) / f64::midpoint(first, second) - 1.0;
    let control = first.max(second) / first.min(second) - 1.0;
    tell(
        "slowdown",
        &format!(
            "\"connections\":{:?},\"step_ms\":{:.3},\"slowdown\":{slowdown:.4},\"control\":{control:.4},\"landed_bytes_per_second\":{:.0}",
            std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").unwrap_or_default(),
            first * 1e3,
            landed_bytes as f64 / landing,
        ),
    );
    device.unpin(&pool);
}

/// Digests of what lies on the device, beside the copy that brought it there.
#[test]
#[ignore = "a figure: scripts/gpu-run"]
fn digests_beside_the_copy() {
    let bytes = bytes();
    let device = Cuda::open(0).unwrap();
    if let Err(why) = device.can_digest() {
        tell("digests", &format!("\"why_not\":{:?}", why.to_string()));
        return;
    }
    let region = Region::anonymous(bytes as usize).unwrap();
    let host = SharedBuf::new(&region, 0, bytes as usize).unwrap();
    host.copy_in(0, &crate::copies::pattern(bytes, 3));
    device.pin(&region).unwrap();
    let (stream, memories) = (device.stream().unwrap(), [device.allocate(bytes).unwrap()]);
    for chunk in [8 << 10, 28 << 10, 256 << 10, 1 << 20] {
        let count = bytes / chunk;
        let piece = |at: u64| Piece { memory: 0, at: at * chunk, host: at * chunk, len: chunk };
        let pieces: Vec<Piece> = (0..count).map(piece).collect();
        let chunks: Vec<(u64, u64)> = (0..count).map(|at| (at * chunk, chunk)).collect();
        let (mut copy, mut digest) = (f64::INFINITY, f64::INFINITY);
        let mut right = true;
        for round in 0..=ROUNDS {
            for &method in device.methods() {
                let direction = Direction::ToDevice;
                let batch = Batch { direction, method, host: &host, memories: &memories, pieces: &pieces };
                copy = copy.min(timed(|| {
                    device.copy(&stream, &batch).unwrap();
                    drain(&device, &stream).unwrap();
                }));
            }
            let mut found = Vec::new();
            digest = digest.min(timed(|| found = device.digests(&memories[0], &chunks).unwrap()));
            if round == 0 {
                let of = |at: u64| host.digest((at * chunk) as usize, chunk as usize, crc32fast::hash);
                right = (0..count).zip(&found).all(|(at, found)| of(at) == *found);
            }
        }
        let share = digest / copy;
        tell(
            "digests",
            &format!(
                "\"chunk_bytes\":{chunk},\"chunks\":{count},\"seconds\":{digest:.6},\"copy_seconds\":{copy:.6},\"share\":{share:.4},\"right\":{right}"
            ),
        );
    }
    device.unpin(&region);
}

#[test]
fn figures_are_told() {
    for (test, mib, least) in [
        ("figures::copies_by_size_of_pieces", "16", SIZES.len() * 2 * (1 + Method::ALL.len())),
        ("figures::digests_beside_the_copy", "2", 4),
        ("figures::landing_beside_the_bare_copy", "4", PAGES.len()),
        ("figures::an_engines_step_while_a_request_lands", "4", 1),
    ] {
        if crate::way::is_real() {
            return;
        }
        let mut command = again(Kit::Whole, test);
        let output = command.arg("--ignored").env(MIB, mib).stderr(Stdio::inherit()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let figures = said.lines().filter(|line| line.contains("figure\t{") && line.ends_with('}')).count();
        assert!(output.status.success() && figures >= least, "{test}: {figures} figures\n{said}");
        assert!(!said.contains("\"right\":false"), "{said}");
    }
}
