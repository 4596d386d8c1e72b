//! How pieces of a given size are moved best: measured at the start, looked up afterwards.
//!
//! A copy engine moves large pieces well and pays for each call; a batch pays less for each piece; a kernel pays once
//! and gives the link less than all of it. Where they cross depends on the machine, so it is measured on it.

use std::ops::Range;
use std::sync::Arc;

use kvarts_contract::buffers::{Region, SharedBuf};

use crate::device::{Batch, Device, Direction, Method, Piece, Stream, drain};
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
        host: &SharedBuf,
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
                    // What was enqueued before an error uses the memory that goes with it.
                    device.copy(&stream, &batch).and(drain(device, &stream))?;
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
    pub fn scratch(bytes: u64) -> std::io::Result<(Arc<Region>, SharedBuf)> {
        let len = usize::try_from(bytes).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        let region = Region::anonymous(len)?;
        let buf = SharedBuf::new(&region, 0, len).ok_or(std::io::ErrorKind::OutOfMemory)?;
        buf.fill(1);
        Ok((region, buf))
    }

    /// What was measured.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// What one method gives with pieces of a size: that of the measured size nearest to it, by their ratio.
    fn rate(&self, method: Method, bytes: u64) -> Option<f64> {
        let ratio = |point: &&Point| bytes.max(1) as f64 / point.piece_bytes.max(1) as f64;
        let distance = |point: &&Point| ratio(point).max(1.0 / ratio(point));
        let measured =
            self.points.iter().filter(|point| point.method == method && point.bytes_per_second > 0.0);
        measured.min_by(|a, b| distance(a).total_cmp(&distance(b))).map(|point| point.bytes_per_second)
    }

    /// The way that was measured to move pieces of a size best; where two are equal the simpler one.
    pub fn best(&self, bytes: u64) -> Method {
        Sizes::new(self).best(bytes)
    }

    /// Splits pieces by size among the ways that were measured to move that size best. They are put into another order,
    /// so that those of one share are neighbours. A share that saves less than a call costs is not made; without a
    /// measurement, and for a single piece, it is one copy each.
    pub fn split(&self, pieces: &mut [Piece]) -> Shares {
        if self.points.is_empty() || pieces.len() <= 1 {
            return Shares::whole(Method::Each, pieces.len());
        }
        let sizes = &mut Sizes::new(self);
        pieces.sort_unstable_by_key(|piece| (sizes.best(piece.len), piece.memory, piece.at));
        let mut shares = Shares::default();
        for at in 0..pieces.len() {
            shares.add(pieces.get(at).map_or(Method::Each, |piece| sizes.best(piece.len)), at);
        }
        let mut seconds = |share: &Share, method| {
            sizes.seconds(method, pieces.get(share.pieces.clone()).unwrap_or_default())
        };
        let call = self
            .smallest()
            .and_then(|size| Some(size as f64 / self.rate(Method::Each, size)?))
            .unwrap_or(0.0);
        // The share that takes longest keeps its way; the others must be worth a call of their own.
        let mut main: Option<(&Share, f64)> = None;
        for share in shares.iter() {
            let takes = seconds(share, share.method);
            if main.is_none_or(|(_, most)| takes >= most) {
                main = Some((share, takes));
            }
        }
        let Some(main) = main.map(|(share, _)| share.method) else { return shares };
        let mut worth = |share: &Share| seconds(share, main) - seconds(share, share.method) > call;
        if shares.iter().all(|share| share.method == main || worth(share)) {
            return shares;
        }
        let mut fewer = Shares::default();
        for share in shares.iter() {
            let method = if worth(share) { share.method } else { main };
            share.pieces.clone().for_each(|at| fewer.add(method, at));
        }
        fewer
    }

    fn smallest(&self) -> Option<u64> {
        self.points.iter().map(|point| point.piece_bytes).min()
    }
}

/// How long pieces of a size take by each way. A layer's pieces have few sizes and are many: each is looked up once.
struct Sizes<'a> {
    curve: &'a Curve,
    /// The latest: bytes, and seconds by each method.
    known: [(u64, [f64; Method::ALL.len()]); 8],
    next: usize,
}

impl<'a> Sizes<'a> {
    fn new(curve: &'a Curve) -> Self {
        Self { curve, known: [(u64::MAX, [f64::INFINITY; Method::ALL.len()]); 8], next: 0 }
    }

    fn takes(&mut self, bytes: u64) -> [f64; Method::ALL.len()] {
        if let Some((_, takes)) = self.known.iter().find(|(size, _)| *size == bytes) {
            return *takes;
        }
        let takes = Method::ALL
            .map(|method| self.curve.rate(method, bytes).map_or(f64::INFINITY, |rate| bytes as f64 / rate));
        if let Some(oldest) = self.known.get_mut(self.next) {
            *oldest = (bytes, takes);
        }
        self.next = (self.next + 1) % self.known.len();
        takes
    }

    fn best(&mut self, bytes: u64) -> Method {
        let takes = Method::ALL.into_iter().zip(self.takes(bytes));
        // The first of those that are equal is the simplest.
        takes.min_by(|a, b| a.1.total_cmp(&b.1)).map_or(Method::Each, |(method, _)| method)
    }

    fn seconds(&mut self, method: Method, pieces: &[Piece]) -> f64 {
        let at = Method::ALL.iter().position(|one| *one == method).unwrap_or_default();
        pieces.iter().map(|piece| self.takes(piece.len).get(at).copied().unwrap_or(f64::INFINITY)).sum()
    }
}

/// Pieces that are moved by one call, and how.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Share {
    /// How.
    pub method: Method,
    /// Which, by their places in the list.
    pub pieces: Range<usize>,
}

/// All pieces of a layer, split. Two of one method may follow each other only with another between them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Shares([Option<Share>; 3]);

impl Shares {
    fn whole(method: Method, count: usize) -> Self {
        Self([(count > 0).then_some(Share { method, pieces: 0..count }), None, None])
    }

    /// The next piece goes by this way. Ways come in order, so there are never more shares than ways.
    fn add(&mut self, method: Method, at: usize) {
        let last = self.0.iter_mut().rev().find_map(Option::as_mut);
        match last {
            Some(share) if share.method == method => share.pieces.end = at + 1,
            _ => {
                if let Some(free) = self.0.iter_mut().find(|share| share.is_none()) {
                    *free = Some(Share { method, pieces: at..at + 1 });
                }
            }
        }
    }

    /// The shares.
    pub fn iter(&self) -> impl Iterator<Item = &Share> {
        self.0.iter().flatten()
    }
}

/// Enqueues the copies of pieces, each share by its own way.
pub fn copy_split(
    device: &dyn Device,
    stream: &Stream,
    curve: &Curve,
    batch: &Batch<'_>,
    pieces: &mut [Piece],
) -> Result<(), DeviceError> {
    for share in curve.split(pieces).iter() {
        let pieces = pieces.get(share.pieces.clone()).ok_or(DeviceError::OutOfBounds)?;
        device.copy(stream, &Batch { method: share.method, pieces, ..*batch })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::emulated::{Emulated, Faults, Model};
    use crate::pace::ModelPace;
    use proptest::prelude::*;

    #[test]
    fn small_pieces_go_by_kernel_and_large_ones_by_copies_as_measured() {
        let pace = Arc::new(ModelPace::default());
        let device = Emulated::with(Model::default(), Faults::default(), Arc::<ModelPace>::clone(&pace));
        let (_region, host) = Curve::scratch(8 << 20).unwrap();
        let curve = Curve::measure(&device, &*pace, &host, 8 << 20, 1).unwrap();
        assert_eq!(curve.points().len(), SIZES.len() * 3);
        let ways = |sizes: &[(usize, u64)]| {
            let mut pieces: Vec<Piece> = Vec::new();
            sizes.iter().for_each(|&(count, len)| pieces.extend((0..count).map(|at| piece(at as u64, len))));
            curve
                .split(&mut pieces)
                .iter()
                .map(|share| (share.method, share.pieces.len()))
                .collect::<Vec<_>>()
        };
        assert_eq!(ways(&[(1000, 2000)]), [(Method::Kernel, 1000)]);
        assert_eq!(ways(&[(64, 1 << 20)]), [(Method::Batch, 64)]);
        assert_eq!(ways(&[(1, 1000)]), [(Method::Each, 1)]);
        assert_eq!(ways(&[(64, 1 << 20), (500, 1200)]), [(Method::Batch, 64), (Method::Kernel, 500)]);
        assert_eq!(ways(&[(64, 1 << 20), (2, 1200)]), [(Method::Batch, 66)], "two are not worth a call");
        assert_eq!(ways(&[]), []);
        assert_eq!(device.in_use(), crate::device::InUse::default());
    }

    fn piece(at: u64, len: u64) -> Piece {
        Piece { memory: 0, at: at << 24, host: at << 24, len }
    }

    #[test]
    fn a_tie_goes_to_the_simpler_way() {
        let point = |method| Point { piece_bytes: 1, method, bytes_per_second: 1.0 };
        let curve = Curve::of(vec![point(Method::Kernel), point(Method::Each), point(Method::Batch)]);
        let shares = curve.split(&mut [piece(0, 2), piece(1, 2)]);
        assert_eq!(shares, Shares::whole(Method::Each, 2));
        assert_eq!(Curve::default().split(&mut [piece(0, 2), piece(1, 2)]), shares);
    }

    proptest! {
        #[test]
        fn every_piece_is_moved_once_and_no_single_way_would_be_faster(
            lens in prop::collection::vec(1u64..8_000_000, 0..200),
            rates in prop::collection::vec(1u32..100_000, SIZES.len() * 3),
        ) {
            let points = SIZES.iter().flat_map(|&size| Method::ALL.map(|method| (size, method))).zip(&rates);
            let point = |((piece_bytes, method), &rate): ((u64, Method), &u32)| {
                Point { piece_bytes, method, bytes_per_second: f64::from(rate) * 1e6 }
            };
            let curve = Curve::of(points.map(point).collect());
            let mut pieces: Vec<Piece> = (0..).zip(&lens).map(|(at, &len)| piece(at, len)).collect();
            let mut before = pieces.clone();
            let shares = curve.split(&mut pieces);
            let mut at = 0;
            for share in shares.iter() {
                prop_assert_eq!(share.pieces.start, at);
                prop_assert!(!share.pieces.is_empty());
                at = share.pieces.end;
            }
            prop_assert_eq!(at, pieces.len());
            let split: f64 =
                shares.iter().map(|share| Sizes::new(&curve).seconds(share.method, &pieces[share.pieces.clone()])).sum();
            let key = |piece: &Piece| (piece.at, piece.len);
            before.sort_by_key(key);
            let mut after = pieces.clone();
            after.sort_by_key(key);
            prop_assert_eq!(before, after);
            // What is not worth a call may cost that much: two such shares at most.
            let call = SIZES[0] as f64 / curve.rate(Method::Each, SIZES[0]).unwrap();
            for method in Method::ALL.into_iter().filter(|_| lens.len() > 1) {
                prop_assert!(split <= Sizes::new(&curve).seconds(method, &pieces) + 2.0 * call + 1e-9);
            }
        }
    }
}
