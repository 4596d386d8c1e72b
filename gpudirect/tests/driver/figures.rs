//! How fast it is, beside a bare loop in the same process. Each figure is a line for programs, `figure` and JSON behind it. They
//! are taken over the machine's driver as it is, not watched, by `scripts/gpu-run`; over the stand-in only that they are told.

use std::process::Stdio;
use std::time::Instant;

use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_gpudirect::device::cuda::Cuda;
use kvarts_gpudirect::device::{Batch, Device, Direction, Method, Piece, drain};

use crate::bare::Bare;
use crate::standin::{Kit, again};

/// MiB that are moved in a round, if not 256.
const MIB: &str = "KVARTS_FIGURES_MIB";
/// Bytes of a piece: from a page to what a copy engine moves best.
const SIZES: [u64; 10] =
    [4 << 10, 8 << 10, 16 << 10, 28 << 10, 40 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];
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
