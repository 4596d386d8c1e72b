//! How pieces of a given size are moved best: measured at the start, looked up afterwards.
//!
//! A copy engine moves large pieces well and pays for each call; a batch pays less for each piece; a kernel pays once
//! and gives the link less than all of it. Where they cross depends on the machine, so it is measured on it.

use std::sync::Arc;

use kvarts_store::io::{Buf, Region};

use crate::device::{Batch, Device, Direction, Method, Piece, drain};
use crate::error::DeviceError;
use crate::pace::Pace;

/// The sizes that are measured.
pub const SIZES: [u64; 8] = [1 << 10, 4 << 10, 16 << 10, 28 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];

/// What one way gave with pieces of one size.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Point {
    /// Bytes of a piece.
    pub piece_bytes: u64,
    /// How it was moved.
    pub method: Method,
    /// Bytes a second: the best of the rounds.
    pub bytes_per_second: f64,
}

/// A measured curve.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Curve {
    points: Vec<Point>,
}

impl Curve {
    /// A curve that is known.
    pub fn of(points: Vec<Point>) -> Self {
        Self { points }
    }

    /// Measures a device: pieces scattered over memory with a piece's room between, `bytes` in each round. It takes
    /// about a hundred milliseconds on a device that moves gigabytes a second.
    pub fn measure(
        device: &dyn Device,
        pace: &dyn Pace,
        host: &Buf,
        bytes: u64,
        rounds: u32,
    ) -> Result<Self, DeviceError> {
        let bytes = bytes.min(host.len() as u64);
        let memories = [device.allocate(bytes.saturating_mul(2))?];
        let stream = device.stream()?;
        let mut points = Vec::new();
        for piece_bytes in SIZES.into_iter().filter(|&size| size <= bytes) {
            let piece = |at: u64| Piece {
                memory: 0,
                at: at * piece_bytes * 2,
                host: at * piece_bytes,
                len: piece_bytes,
            };
            // Small pieces are slow one by one: a thousand of them say what a million would.
            let count = (bytes / piece_bytes).min(1024);
            let pieces: Vec<Piece> = (0..count).map(piece).collect();
            for &method in device.methods() {
                let batch = Batch {
                    direction: Direction::ToDevice,
                    method,
                    host,
                    memories: &memories,
                    pieces: &pieces,
                };
                let mut best = 0.0f64;
                for round in 0..=rounds {
                    let begin = pace.now();
                    device.copy(&stream, &batch)?;
                    drain(device, &stream)?;
                    let seconds = pace.now().since(begin).as_secs_f64().max(1e-9);
                    if round > 0 {
                        best = best.max(batch.bytes() as f64 / seconds);
                    }
                }
                points.push(Point { piece_bytes, method, bytes_per_second: best });
            }
        }
        Ok(Self { points })
    }

    /// Memory to measure with, where there is no arena yet.
    pub fn scratch(bytes: u64) -> std::io::Result<(Arc<Region>, Buf)> {
        let len = usize::try_from(bytes).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        let region = Region::anonymous(len)?;
        let buf = Buf::new(&region, 0, len).ok_or(std::io::ErrorKind::OutOfMemory)?;
        buf.fill(1);
        Ok((region, buf))
    }

    /// What was measured.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// The best way to move `count` pieces of `bytes` in all: that of the measured size nearest to theirs. Without a
    /// measurement, and for a single piece, one copy each.
    pub fn choose(&self, count: u64, bytes: u64) -> Method {
        if count <= 1 {
            return Method::Each;
        }
        let mean = (bytes / count).max(1) as f64;
        let distance = |point: &Point| (mean / point.piece_bytes.max(1) as f64).ln().abs();
        let Some(nearest) = self.points.iter().map(distance).min_by(f64::total_cmp) else {
            return Method::Each;
        };
        let near = self.points.iter().filter(|point| distance(point) <= nearest);
        near.max_by(|a, b| {
            // Where two are equal the simpler one is taken.
            a.bytes_per_second.total_cmp(&b.bytes_per_second).then(b.method.cmp(&a.method))
        })
        .map_or(Method::Each, |point| point.method)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::emulated::{Emulated, Faults, Model};
    use crate::pace::ModelPace;

    #[test]
    fn small_pieces_go_by_kernel_and_large_ones_by_copies_as_measured() {
        let pace = Arc::new(ModelPace::default());
        let device = Emulated::with(Model::default(), Faults::default(), Arc::<ModelPace>::clone(&pace));
        let (_region, host) = Curve::scratch(8 << 20).unwrap();
        let curve = Curve::measure(&device, &*pace, &host, 8 << 20, 1).unwrap();
        assert_eq!(curve.points().len(), SIZES.len() * 3);
        assert_eq!(curve.choose(1000, 1000 * 2000), Method::Kernel);
        assert_eq!(curve.choose(64, 64 << 20), Method::Batch);
        assert_eq!(curve.choose(1, 1000), Method::Each);
        assert_eq!(Curve::default().choose(1000, 1000), Method::Each);
        assert_eq!(device.in_use(), crate::device::InUse::default());
    }

    #[test]
    fn a_tie_goes_to_the_simpler_way() {
        let point = |method| Point { piece_bytes: 1, method, bytes_per_second: 1.0 };
        let curve = Curve::of(vec![point(Method::Kernel), point(Method::Each), point(Method::Batch)]);
        assert_eq!(curve.choose(2, 2), Method::Each);
    }
}
