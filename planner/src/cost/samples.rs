//! Times between those that an engine has measured.
//!
//! A prefill of `n` new tokens behind `c` is close to `a + b n + d n (c + n / 2)`: a step, the new tokens, and the pairs
//! that attention looks at. That is fitted first (least squares of relative errors, no factor below zero), and then
//! multiplied by how far the samples nearby are off it: the nearest ones on a logarithmic scale, by the inverse square
//! of their distance. On a sample it is the sample.

use std::fmt;

use super::{Kind, MAX_SAMPLES, Prefill, Sample, Told, errors};

/// Samples nearby that are looked at.
const NEAREST: usize = 4;

/// Why samples make no table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SampleError {
    /// There are none.
    None,
    /// More than [`MAX_SAMPLES`].
    TooMany,
    /// A sample, by its place from 1, whose time is no positive number or that has no new tokens.
    Unsound(usize),
    /// Two samples, by their places, of equal tokens: which one is meant?
    Twice(usize, usize),
    /// No factor fits.
    NoFit,
}

impl fmt::Display for SampleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => write!(f, "the list of samples is empty"),
            Self::TooMany => write!(
                f,
                "the list has more than {MAX_SAMPLES} samples: leave samples \
                out"
            ),
            Self::Unsound(at) => {
                write!(f, "sample {at}: `ms` must be above 0 and `new` at least 1")
            }
            Self::Twice(one, other) => {
                write!(
                    f,
                    "samples {one} and {other} have the same token counts: replace them by one sample with \
                    the median of their times"
                )
            }
            Self::NoFit => write!(
                f,
                "the times of the data sheet cannot be scaled to the samples, because no factor fits: \
                measure more samples"
            ),
        }
    }
}

impl std::error::Error for SampleError {}

pub(super) fn check(samples: &[Sample]) -> Result<(), SampleError> {
    if samples.is_empty() {
        return Err(SampleError::None);
    }
    if samples.len() > MAX_SAMPLES {
        return Err(SampleError::TooMany);
    }
    let unsound = |one: &Sample| !(one.ms.is_finite() && one.ms > 0.0) || one.new == 0;
    if let Some(at) = samples.iter().position(unsound) {
        return Err(SampleError::Unsound(at + 1));
    }
    let mut seen = std::collections::BTreeMap::new();
    for (at, one) in samples.iter().enumerate() {
        if let Some(before) = seen.insert((one.cached, one.new), at) {
            return Err(SampleError::Twice(before + 1, at + 1));
        }
    }
    Ok(())
}

/// See the module.
#[derive(Clone, PartialEq, Debug)]
pub struct Interpolated {
    fit: [f64; 3],
    /// Where a sample is, and how far it is off the fit.
    off: Vec<([f64; 2], f64)>,
    off_least: f64,
    told: Told,
}

/// What a prefill's time is made of.
fn terms(cached: u64, new: u64) -> [f64; 3] {
    let (cached, new) = (cached as f64, new as f64);
    [1.0, new, new * (cached + new / 2.0)]
}

fn dot(a: &[f64; 3], b: &[f64; 3]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn place(cached: u64, new: u64) -> [f64; 2] {
    // A block more or less matters in a short prompt alone.
    [(cached as f64 + 256.0).ln(), (new as f64 + 16.0).ln()]
}

impl Interpolated {
    /// A table of at least one sample.
    pub fn new(samples: &[Sample]) -> Result<Self, SampleError> {
        check(samples)?;
        let fit = Normal::of(samples.iter()).fit();
        let off = samples.iter().map(|one| (place(one.cached, one.new), off_by(&fit, one)));
        let off: Vec<_> = off.collect();
        let off_least = off.iter().map(|(_, off)| *off).fold(f64::INFINITY, f64::min);
        // Each is predicted from the others; of many, some.
        let step = samples.len().div_ceil(64).max(1);
        let places: Vec<[f64; 2]> = off.iter().map(|(place, _)| *place).collect();
        let left_out = (0..samples.len()).step_by(step).filter(|_| samples.len() > 1).filter_map(|at| {
            let one = samples.get(at)?;
            let others = || samples.iter().enumerate().filter(|(other, _)| *other != at);
            let fit = Normal::of(others().map(|(_, sample)| sample)).fit();
            let near = places.iter().zip(samples).enumerate().filter(|(other, _)| *other != at);
            let off = off_near(near.map(|(_, near)| near), *places.get(at)?, |sample| off_by(&fit, sample));
            Some((dot(&fit, &terms(one.cached, one.new)) * off, one.ms))
        });
        let (error, error_max) = errors(left_out);
        let told = Told { kind: Kind::Interpolated, samples: samples.len(), error, error_max };
        Ok(Self { fit, off, off_least, told })
    }
}

/// How far a sample is off a fit.
fn off_by(fit: &[f64; 3], one: &Sample) -> f64 {
    let said = dot(fit, &terms(one.cached, one.new));
    if said > 0.0 { one.ms / said } else { 1.0 }
}

/// How far times near this place are off the fit: of what lies there, the mean of the nearest by how near they are.
fn off_near<'a, T: 'a>(
    all: impl Iterator<Item = (&'a [f64; 2], &'a T)>,
    at: [f64; 2],
    off: impl Fn(&T) -> f64,
) -> f64 {
    let mut near = [(f64::INFINITY, None); NEAREST];
    for (place, one) in all {
        let square: f64 = place.iter().zip(at).map(|(a, b)| (a - b) * (a - b)).sum();
        if square < 1e-18 {
            return off(one);
        }
        if let Some(after) = near.iter().position(|(other, _)| square < *other)
            && let Some(rest) = near.get_mut(after..)
        {
            rest.rotate_right(1);
            if let Some(first) = rest.first_mut() {
                *first = (square, Some(one));
            }
        }
    }
    let weighed = near.iter().filter_map(|(square, one)| Some((square, off((*one)?))));
    let (sum, all) =
        weighed.fold((0.0, 0.0), |(sum, all), (square, off)| (sum + off / square, all + 1.0 / square));
    if all > 0.0 { sum / all } else { 1.0 }
}

impl Prefill for Interpolated {
    fn prefill_ms(&self, cached: u64, new: u64) -> f64 {
        if new == 0 {
            return 0.0;
        }
        let near = self.off.iter().map(|(place, off)| (place, off));
        dot(&self.fit, &terms(cached, new)) * off_near(near, place(cached, new), |off| *off)
    }

    /// The fit falls, and no time is further below it than a sample is: a weighed mean of them is not.
    fn least_ms(&self, prompt: u64, cached: u64) -> f64 {
        dot(&self.fit, &terms(cached, prompt.saturating_sub(cached))) * self.off_least * (1.0 - 1e-9)
    }

    fn told(&self) -> Told {
        self.told
    }
}

/// Sums of relative least squares: what fits follow from, whichever terms they have.
#[derive(Clone, Copy, Debug, Default)]
struct Normal {
    matrix: [[f64; 3]; 3],
    right: [f64; 3],
    count: f64,
}

impl Normal {
    fn of<'a>(samples: impl Iterator<Item = &'a Sample>) -> Self {
        let mut sums = Self::default();
        for one in samples {
            let row = terms(one.cached, one.new).map(|term| term / one.ms);
            for ((line, sum), term) in sums.matrix.iter_mut().zip(&mut sums.right).zip(row) {
                line.iter_mut().zip(row).for_each(|(cell, other)| *cell += term * other);
                *sum += term;
            }
            sums.count += 1.0;
        }
        sums
    }

    /// Least squares without a factor below zero: of all choices of terms that are left out, the one that fits best. There
    /// are seven.
    fn fit(&self) -> [f64; 3] {
        let mut best = (f64::INFINITY, [0.0; 3]);
        for mask in 1u8..8 {
            let used = |term: usize| mask & (1 << term) != 0;
            let (mut matrix, mut right) = (self.matrix, self.right);
            for (i, (line, sum)) in matrix.iter_mut().zip(&mut right).enumerate() {
                for (j, cell) in line.iter_mut().enumerate().filter(|(j, _)| !(used(i) && used(*j))) {
                    *cell = if i == j { 1.0 } else { 0.0 };
                }
                *sum = if used(i) { *sum } else { 0.0 };
            }
            let Some(found) = solve(matrix, right).filter(|found| found.iter().all(|factor| *factor >= 0.0))
            else {
                continue;
            };
            let squares = self.squares(&found);
            if squares < best.0 {
                best = (squares, found);
            }
        }
        best.1
    }

    /// The squares of relative errors of a fit, summed.
    fn squares(&self, fit: &[f64; 3]) -> f64 {
        let lines = fit.iter().zip(&self.matrix).map(|(factor, line)| factor * dot(line, fit));
        lines.sum::<f64>() - 2.0 * dot(&self.right, fit) + self.count
    }
}

/// Solves three equations, by the greatest pivot.
fn solve(mut matrix: [[f64; 3]; 3], mut right: [f64; 3]) -> Option<[f64; 3]> {
    // Columns of very different size would hide that there is a solution.
    let scale =
        [0, 1, 2].map(|i: usize| matrix.get(i).and_then(|line| line.get(i)).copied().unwrap_or(0.0).sqrt());
    if scale.iter().any(|one| !one.is_finite() || *one <= 0.0) {
        return None;
    }
    for ((line, sum), by) in matrix.iter_mut().zip(&mut right).zip(scale) {
        line.iter_mut().zip(scale).for_each(|(cell, other)| *cell /= by * other);
        *sum /= by;
    }
    for at in 0..3 {
        let pivot =
            (at..3).max_by(|a, b| cell(&matrix, *a, at).abs().total_cmp(&cell(&matrix, *b, at).abs()))?;
        matrix.swap(at, pivot);
        right.swap(at, pivot);
        let top = cell(&matrix, at, at);
        if top.abs() < 1e-12 {
            return None;
        }
        let (line, sum) = (*matrix.get(at)?, *right.get(at)?);
        for row in 0..3 {
            let by = cell(&matrix, row, at) / top;
            if row != at && by != 0.0 {
                matrix.get_mut(row)?.iter_mut().zip(line).for_each(|(cell, above)| *cell -= by * above);
                *right.get_mut(row)? -= by * sum;
            }
        }
    }
    let mut found = [0.0; 3];
    for (at, (place, by)) in found.iter_mut().zip(scale).enumerate() {
        *place = right.get(at)? / cell(&matrix, at, at) / by;
    }
    Some(found)
}

fn cell(matrix: &[[f64; 3]; 3], row: usize, column: usize) -> f64 {
    matrix.get(row).and_then(|line| line.get(column)).copied().unwrap_or(0.0)
}
