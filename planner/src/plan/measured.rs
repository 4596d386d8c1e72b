//! A way's latency and rate, from loads that went over it.
//!
//! Of each load it is known how many bytes were asked of the way when it began, its own among them, and how long it took.
//! By the model of a [`Link`] that is `latency + bytes / rate`: the line through what was measured, by least squares of
//! relative errors, so that a small load counts as much as a large one.
//!
//! Loads are kept in classes by size, and in each class later loads count for more. So a large number of small loads does
//! not make it forget what a large load took. A class that had no load for a long time counts for less than the others.
//! Before the first load, and for sizes about which the measured loads say nothing, it assumes a drive.
//!
//! What was measured ages by the clock of the caller that asks, and after some minutes without a load it is the assumed drive again. A rate
//! that says that nothing pays keeps anything from being loaded, and so from being measured: it must not be said for ever.

use super::Link;

/// Sizes by powers of two.
const CLASSES: usize = 48;
/// Loads of a class that count.
const KEPT: f64 = 16.0;
/// Milliseconds after which a class counts for half of what it did.
const HALF_MS: f64 = 30_000.0;
/// What assumed loads count for, beside one that was measured.
const ASSUMED: f64 = 1e-3;
/// What is assumed of a way before a load was measured.
const DRIVE: Link = Link { latency_ms: 0.2, bytes_per_ms: 2e6, outstanding_bytes: 0 };
/// Sizes of the loads that are assumed.
const ASSUMED_BYTES: [f64; 2] = [65_536.0, 268_435_456.0];

/// Sums of relative least squares: of ones, bytes, their squares, and times, each by the square of the time.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Sums {
    ones: f64,
    bytes: f64,
    squares: f64,
    times: f64,
    products: f64,
}

impl Sums {
    fn add(&mut self, weight: f64, bytes: f64, ms: f64) {
        let weight = weight / (ms * ms);
        self.ones += weight;
        self.bytes += weight * bytes;
        self.squares += weight * bytes * bytes;
        self.times += weight * ms;
        self.products += weight * bytes * ms;
    }

    fn scaled(mut self, by: f64) -> Self {
        for sum in [&mut self.ones, &mut self.bytes, &mut self.squares, &mut self.times, &mut self.products] {
            *sum *= by;
        }
        self
    }

    fn plus(&mut self, other: &Self) {
        self.ones += other.ones;
        self.bytes += other.bytes;
        self.squares += other.squares;
        self.times += other.times;
        self.products += other.products;
    }

    /// Latency and milliseconds for a byte; neither is below zero. Where the best line has one below zero, it is the best
    /// of those with no latency, with the assumed drive's rate, and with no end to the rate.
    fn line(&self) -> (f64, f64) {
        let latency = |slope: f64| ((self.times - slope * self.bytes) / self.ones).max(0.0);
        let determinant = self.ones * self.squares - self.bytes * self.bytes;
        let slope = (self.ones * self.products - self.bytes * self.times) / determinant;
        if slope.is_finite() && slope > 0.0 && self.times >= slope * self.bytes {
            return (latency(slope), slope);
        }
        let drive = 1.0 / DRIVE.bytes_per_ms;
        let lines = [(0.0, self.products / self.squares), (latency(drive), drive), (latency(0.0), 0.0)];
        let off = |(latency, slope): &(f64, f64)| {
            latency * (latency * self.ones - 2.0 * self.times)
                + slope * (slope * self.squares - 2.0 * self.products + 2.0 * latency * self.bytes)
        };
        let best = lines.into_iter().min_by(|one, other| off(one).total_cmp(&off(other)));
        best.unwrap_or((DRIVE.latency_ms, drive))
    }
}

#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Class {
    sums: Sums,
    /// Loads that count, at most [`KEPT`].
    loads: f64,
    last_ms: f64,
}

/// See the module.
#[derive(Clone, PartialEq, Debug)]
pub struct MeasuredLink {
    classes: [Class; CLASSES],
    /// When the last one ended.
    last_ms: f64,
    loads: u64,
}

impl Default for MeasuredLink {
    fn default() -> Self {
        Self { classes: [Class::default(); CLASSES], last_ms: 0.0, loads: 0 }
    }
}

impl MeasuredLink {
    /// A load has ended: bytes that the way was asked for when it began, its own among them, what it took, and when
    /// that was on a clock that does not go back.
    pub fn add(&mut self, bytes: u64, ms: f64, now_ms: f64) {
        if bytes == 0 || !(ms.is_finite() && ms > 0.0 && now_ms.is_finite()) {
            return;
        }
        let size = (bytes.ilog2() as usize).min(CLASSES - 1);
        let Some(class) = self.classes.get_mut(size) else { return };
        class.sums = class.sums.scaled(1.0 - 1.0 / KEPT);
        class.sums.add(1.0, bytes as f64, ms);
        class.loads = class.loads * (1.0 - 1.0 / KEPT) + 1.0;
        class.last_ms = now_ms;
        self.last_ms = self.last_ms.max(now_ms);
        self.loads = self.loads.saturating_add(1);
    }

    /// How many loads were measured.
    pub fn loads(&self) -> u64 {
        self.loads
    }

    /// The way as it is taken to be at this time, with nothing outstanding.
    pub fn link(&self, now_ms: f64) -> Link {
        let now_ms = self.last_ms.max(now_ms);
        let mut all = Sums::default();
        for bytes in ASSUMED_BYTES {
            all.add(ASSUMED, bytes, DRIVE.latency_ms + bytes / DRIVE.bytes_per_ms);
        }
        for class in self.classes.iter().filter(|class| class.loads > 0.0) {
            let age = (now_ms - class.last_ms) / HALF_MS;
            all.plus(&class.sums.scaled((-age).exp2()));
        }
        let (latency_ms, slope) = all.line();
        Link { latency_ms, bytes_per_ms: (1.0 / slope).clamp(1.0, 1e12), outstanding_bytes: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(link: Link, latency_ms: f64, bytes_per_ms: f64) {
        let near = |said: f64, truth: f64| (said / truth - 1.0).abs() < 0.02;
        assert!(near(link.latency_ms, latency_ms) && near(link.bytes_per_ms, bytes_per_ms), "{link:?}");
    }

    #[test]
    fn a_way_is_a_drive_until_it_was_measured_and_then_what_was_measured() {
        let mut way = MeasuredLink::default();
        near(way.link(0.0), DRIVE.latency_ms, DRIVE.bytes_per_ms);
        for n in 0..40u64 {
            let bytes = 1 << (12 + n % 18);
            way.add(bytes, 0.5 + bytes as f64 / 7e6, n as f64);
        }
        near(way.link(39.0), 0.5, 7e6);
        assert_eq!(way.loads(), 40);
        // Nothing that is no load.
        way.add(0, 1.0, 50.0);
        way.add(1, f64::NAN, 50.0);
        way.add(1, 0.0, 50.0);
        assert_eq!(way.loads(), 40);
    }

    #[test]
    fn what_a_way_was_is_forgotten_when_it_changes_but_not_for_many_small_loads() {
        let mut way = MeasuredLink::default();
        let load = |way: &mut MeasuredLink, bytes: u64, rate: f64, at: f64| {
            way.add(bytes, 0.2 + bytes as f64 / rate, at);
        };
        for n in 0..64 {
            load(&mut way, 64 << 20, 10e6, f64::from(n));
            load(&mut way, 4096, 10e6, f64::from(n));
        }
        for n in 0..10_000 {
            load(&mut way, 4096, 10e6, 100.0 + f64::from(n));
        }
        near(way.link(10_100.0), 0.2, 10e6);
        // A drive that is a fifth as fast from now on.
        for n in 0..200 {
            load(&mut way, 64 << 20, 2e6, 20_000.0 + f64::from(n));
        }
        near(way.link(20_200.0), 0.2, 2e6);
    }

    #[test]
    fn a_bad_patch_is_forgotten_by_the_clock_when_nothing_is_loaded_because_of_it() {
        let mut way = MeasuredLink::default();
        // 50 ms a MiB: a compaction, or a drive that collects its garbage.
        for n in 0..32 {
            way.add(64 << 20, 64.0 * 50.0, f64::from(n) * 3_200.0);
        }
        let end = 31.0 * 3_200.0;
        let slow = (1 << 20) as f64 / 50.0;
        assert!(way.link(end).bytes_per_ms < 2.0 * slow, "{:?}", way.link(end));
        // A caller that follows plans loads nothing, and asks each minute for a day.
        let asked: Vec<f64> =
            (0..24 * 60).map(|n| way.link(end + f64::from(n) * 60e3).bytes_per_ms).collect();
        assert!(asked.windows(2).all(|pair| pair[1] >= pair[0] * 0.999), "{asked:?}");
        let back = asked.iter().position(|rate| *rate > 0.9 * DRIVE.bytes_per_ms).unwrap();
        assert!((2..=30).contains(&back), "after {back} minutes");
        near(way.link(end + 86_400e3), DRIVE.latency_ms, DRIVE.bytes_per_ms);
        // A clock that is behind the last load says what that load said.
        assert_eq!(way.link(0.0), way.link(end));
    }

    #[test]
    fn loads_of_one_size_and_loads_that_take_no_longer_for_being_larger_make_a_sound_way() {
        for bytes in [1u64, 4096, 1 << 30, u64::MAX] {
            let mut way = MeasuredLink::default();
            (0..100).for_each(|n| way.add(bytes, 3.0, f64::from(n)));
            let link = way.link(100.0);
            assert!(link.is_sound(), "{bytes}: {link:?}");
            let said = link.wait_ms() + bytes as f64 / link.bytes_per_ms;
            assert!(bytes == u64::MAX || (said / 3.0 - 1.0).abs() < 0.05, "{bytes}: {said} for {link:?}");
        }
        let mut way = MeasuredLink::default();
        (0..64).for_each(|n| way.add(1 << (n % 30), 2.0, f64::from(n as u32)));
        assert!(way.link(64.0).is_sound(), "{:?}", way.link(64.0));
    }
}
