//! How long things took, in buckets that double.

use std::time::Duration;

/// Buckets: up to 64 us, 128 us, ... 134 s, and longer.
const BUCKETS: usize = 23;
/// The first bucket's bound.
const FIRST_MICROS: u64 = 64;

/// Counts by how long things took.
#[derive(Clone, Debug, Default)]
pub(crate) struct Histogram {
    counts: [u64; BUCKETS],
    sum: Duration,
}

impl Histogram {
    /// Counts one.
    pub(crate) fn add(&mut self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = (0..BUCKETS - 1).find(|&at| micros <= FIRST_MICROS << at).unwrap_or(BUCKETS - 1);
        if let Some(count) = self.counts.get_mut(bucket) {
            *count += 1;
        }
        self.sum = self.sum.saturating_add(took);
    }

    /// The bound of each bucket in seconds (none for the last), and how many took no longer.
    pub(crate) fn cumulative(&self) -> impl Iterator<Item = (Option<f64>, u64)> + '_ {
        let mut total = 0;
        self.counts.iter().enumerate().map(move |(at, count)| {
            total += count;
            ((at < BUCKETS - 1).then(|| (FIRST_MICROS << at) as f64 / 1e6), total)
        })
    }

    /// How long all of them took together, in seconds.
    pub(crate) fn sum(&self) -> f64 {
        self.sum.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_counted_in_the_first_bucket_that_holds_it() {
        let mut histogram = Histogram::default();
        for micros in [0, 64, 65, 1_000_000_000] {
            histogram.add(Duration::from_micros(micros));
        }
        let counts: Vec<_> = histogram.cumulative().collect();
        assert_eq!(counts[0], (Some(64e-6), 2));
        assert_eq!(counts[1], (Some(128e-6), 3));
        assert_eq!(counts[BUCKETS - 1], (None, 4));
        assert!((histogram.sum() - 1000.000129).abs() < 1e-9);
    }
}
