//! How long a load and computing take together: layers arrive on each way in their order, and each is computed when it is
//! there and the one before is computed.
//!
//! The last layer is computed at the latest of: any layer's arrival, and the computing of it and of all behind it. Where
//! neighbouring layers have equal bytes that sum rises or falls evenly from one to the next, so only the first and the
//! last of them can be the latest ([`Knot`]). Most models have few such stretches, however many layers.
//!
//! Without overlap all layers are as the first one: what is computed begins when the last byte of any way is there.

use super::{Link, Links, Overlap, Part, Source};

/// Sources that take time.
pub(super) const WAYS: [Source; 4] = [Source::Dram, Source::Disk, Source::Peer, Source::Cold];

/// Blocks of one part that are loaded from each source.
pub(super) type Loads = [u64; Source::ALL.len()];

/// A layer at which a stretch of layers with equal bytes begins or ends.
#[derive(Clone, Copy, Debug)]
struct Knot {
    /// Layers that are not computed when it arrives: it and those behind it.
    left: f64,
    /// Where its sums begin: bytes of one block of each part up to and with this layer.
    sums: usize,
}

/// The layers of a model, as one question's parts have them.
#[derive(Debug)]
pub(super) struct Pipeline {
    layers: usize,
    parts: usize,
    overlap: Overlap,
    knots: Vec<Knot>,
    sums: Vec<f64>,
}

impl Pipeline {
    pub(super) fn new(parts: &[Part<'_>], layers: usize, overlap: Overlap) -> Self {
        let (count, knots, sums) = (parts.len(), Vec::new(), Vec::new());
        let mut pipeline = Self { layers, parts: count, overlap, knots, sums };
        let mut upto = vec![0.0; parts.len()];
        let bytes = |part: &Part<'_>, layer: usize| part.layer_bytes.get(layer).copied();
        let equal = |one: usize, other: Option<usize>| {
            other.is_some_and(|other| parts.iter().all(|part| bytes(part, one) == bytes(part, other)))
        };
        for layer in 0..layers {
            for (sum, part) in upto.iter_mut().zip(parts) {
                *sum += bytes(part, layer).unwrap_or(0) as f64;
            }
            let within = equal(layer, layer.checked_sub(1)) && equal(layer, Some(layer + 1));
            if !within {
                let (left, sums) = ((layers - layer) as f64, pipeline.sums.len());
                pipeline.knots.push(Knot { left, sums });
                pipeline.sums.extend_from_slice(&upto);
            }
        }
        pipeline
    }

    /// What one look at a time costs, in steps.
    pub(super) fn steps(&self) -> u64 {
        self.sums.len() as u64 + 1
    }

    /// When the last layer is computed.
    pub(super) fn time(&self, loads: &[Loads], links: &Links, compute: f64) -> f64 {
        let share = compute / self.layers as f64;
        let behind = |knot: &Knot| match self.overlap {
            Overlap::Layers => share * knot.left,
            Overlap::None => compute,
        };
        let mut last = compute;
        for source in WAYS {
            let Some(link) = links.get(source) else { continue };
            if !uses(loads, source) {
                continue;
            }
            let wait = link.wait_ms();
            for knot in &self.knots {
                let bytes = self.bytes(knot, loads, source);
                if bytes > 0.0 {
                    last = last.max(wait + bytes / link.bytes_per_ms + behind(knot));
                }
            }
        }
        last
    }

    /// Bytes that are loaded from a source up to a layer.
    fn bytes(&self, knot: &Knot, loads: &[Loads], source: Source) -> f64 {
        let sums = self.sums.get(knot.sums..knot.sums + self.parts).unwrap_or_default();
        let each = sums.iter().zip(loads);
        each.map(|(sum, loads)| sum * loads.get(source as usize).copied().unwrap_or(0) as f64).sum()
    }

    /// The wait for the first layer, those for the others, and when the last byte arrives.
    pub(super) fn waits(
        &self,
        parts: &[Part<'_>],
        loads: &[Loads],
        links: &Links,
        compute: f64,
    ) -> (f64, f64, f64) {
        let used: Vec<(Source, &Link)> = WAYS
            .into_iter()
            .filter_map(|source| Some((source, links.get(source).filter(|_| uses(loads, source))?)))
            .collect();
        let mut bytes = [0u64; WAYS.len()];
        let ready = (0..self.layers).map(|layer| {
            let mut ready = 0.0f64;
            for ((source, link), bytes) in used.iter().zip(&mut bytes) {
                *bytes = bytes.saturating_add(layer_bytes(parts, loads, *source, layer));
                if *bytes > 0 {
                    ready = ready.max(link.wait_ms() + *bytes as f64 / link.bytes_per_ms);
                }
            }
            ready
        });
        let ready: Vec<f64> = ready.collect();
        let transfer = ready.iter().fold(0.0, |last: f64, one| last.max(*one));
        if self.overlap == Overlap::None {
            return (transfer, 0.0, transfer);
        }
        let (mut now, mut first, mut stall) = (0.0f64, 0.0, 0.0);
        for (layer, ready) in ready.into_iter().enumerate() {
            let wait = (ready - now).max(0.0);
            if layer == 0 {
                first = wait
            } else {
                stall += wait
            }
            now += wait + compute / self.layers as f64;
        }
        (first, stall, transfer)
    }
}

fn uses(loads: &[Loads], source: Source) -> bool {
    loads.iter().any(|loads| loads.get(source as usize).is_some_and(|count| *count > 0))
}

/// Bytes that are loaded from a source for one layer.
fn layer_bytes(parts: &[Part<'_>], loads: &[Loads], source: Source, layer: usize) -> u64 {
    let each = parts.iter().zip(loads).map(|(part, loads)| {
        let count = loads.get(source as usize).copied().unwrap_or(0);
        part.layer_bytes.get(layer).copied().unwrap_or(0).saturating_mul(count)
    });
    each.fold(0, u64::saturating_add)
}
