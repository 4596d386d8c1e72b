//! How fast each path is, and how much waits there. A path is a way to bytes: own disks, a peer, the cold tier.
//!
//! A rate is what arrived over the time in which something was outstanding, older arrivals counting less. Time without an
//! arrival counts as it passes: the rate of a path that stalls falls before anything fails.

use std::time::Duration;

use kvarts_layout::planted;

/// Over what time an arrival loses most of its weight.
const DECAY: Duration = Duration::from_millis(250);
/// How long a path's queue should be.
const QUEUE: Duration = Duration::from_millis(20);
/// What may be outstanding on any path, however slow: less would leave it idle between two pieces.
const OUTSTANDING_MIN: u64 = 2 << 20;
/// Failures in a row after which a path is left alone.
const STRIKES_MAX: u32 = 3;
/// How long it is.
const LEFT_ALONE: Duration = Duration::from_secs(10);

/// Bytes a second of a path from which nothing has come yet, for comparing it with others.
const UNKNOWN_RATE: f64 = 1e9;
/// After what time without an arrival a path stalls that was asked for something.
const STALLED: Duration = Duration::from_millis(100);

/// After what time without a question the rate of a path is not known any more. While one says that nothing pays, nothing is asked
/// of the path, and so nothing would tell that it has become fast.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// The number of a path among those of a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PathId(pub u16);

/// What is known of one path.
#[derive(Clone, Debug, Default)]
struct Path {
    outstanding: u64,
    /// Bytes that arrived, and seconds in which something was outstanding, both decayed.
    arrived: f64,
    busy: f64,
    /// Until when `busy` has been counted.
    counted: Duration,
    /// Since when nothing has arrived of what was asked for, whether that is still wanted or not.
    silent_since: Option<Duration>,
    /// Something was given up that did not come, and nothing has come since.
    is_given_up: bool,
    strikes: u32,
    left_alone_until: Duration,
    /// Reads that use it now.
    readers: u32,
}

impl Path {
    /// Decayed bytes and busy seconds at this time.
    fn at(&self, now: Duration) -> (f64, f64) {
        let passed = now.saturating_sub(self.counted).as_secs_f64();
        if self.outstanding == 0 {
            return (self.arrived, self.busy);
        }
        let keep = (-passed / DECAY.as_secs_f64()).exp();
        // What passed is weighted as what was counted before it.
        (self.arrived * keep, self.busy * keep + (1.0 - keep) * DECAY.as_secs_f64())
    }

    fn count(&mut self, now: Duration) {
        (self.arrived, self.busy) = self.at(now);
        self.counted = self.counted.max(now);
    }

    fn rate(&self, now: Duration) -> Option<f64> {
        let is_forgotten = self.outstanding == 0 && now.saturating_sub(self.counted) >= FORGOTTEN;
        let (arrived, busy) = self.at(now);
        (!is_forgotten && arrived > 0.0 && busy > 0.0).then(|| arrived / busy)
    }
}

/// The paths of a node, for all its reads.
#[derive(Clone, Debug, Default)]
pub struct Paths(Vec<Path>);

impl Paths {
    /// `count` paths of which nothing is known yet.
    pub fn new(count: u16) -> Self {
        Self(vec![Path::default(); usize::from(count)])
    }

    fn get(&self, path: PathId) -> Option<&Path> {
        self.0.get(usize::from(path.0))
    }

    fn of(&mut self, path: PathId) -> Option<&mut Path> {
        self.0.get_mut(usize::from(path.0))
    }

    /// Bytes a second, if anything has arrived.
    pub fn rate(&self, path: PathId, now: Duration) -> Option<f64> {
        self.get(path)?.rate(now)
    }

    /// Bytes that were asked for and have not arrived.
    pub fn outstanding(&self, path: PathId) -> u64 {
        self.get(path).map_or(0, |path| path.outstanding)
    }

    /// How long `bytes` bytes take behind what is outstanding; nothing where the rate is not known.
    pub fn time_of(&self, path: PathId, bytes: u64, now: Duration) -> Option<Duration> {
        let path = self.get(path)?;
        let seconds = path.outstanding.saturating_add(bytes) as f64 / path.rate(now)?;
        Some(Duration::from_secs_f64(seconds.min(1e6)))
    }

    /// Seconds until `bytes` bytes have come behind what is outstanding, for comparing paths. One whose rate is not known is
    /// taken to be fast: so it becomes known.
    pub fn expected(&self, path: PathId, bytes: u64, now: Duration) -> f64 {
        let rate = self.rate(path, now).unwrap_or(UNKNOWN_RATE);
        self.outstanding(path).saturating_add(bytes) as f64 / rate
    }

    /// Whether it may be asked at all: it has not failed several times in a row.
    pub fn is_usable(&self, path: PathId, now: Duration) -> bool {
        self.get(path).is_some_and(|path| now >= path.left_alone_until)
    }

    /// Whether it was asked for something long ago and has brought nothing since.
    pub fn is_stalled(&self, path: PathId, now: Duration) -> bool {
        self.silent_for(path, now) >= STALLED
    }

    /// How long nothing has come of what it was asked for first since it brought something.
    pub fn silent_for(&self, path: PathId, now: Duration) -> Duration {
        let silent_since = self.get(path).and_then(|path| path.silent_since);
        silent_since.map_or(Duration::ZERO, |since| now.saturating_sub(since))
    }

    /// What it was asked for did not come, and is not waited for any more.
    pub fn give_up(&mut self, path: PathId) {
        if let Some(path) = self.of(path) {
            path.is_given_up = true;
        }
    }

    /// Whether something was given up there, and nothing has come since.
    pub fn is_given_up(&self, path: PathId) -> bool {
        self.get(path).is_some_and(|path| path.is_given_up)
    }

    /// Failures in a row so far.
    pub fn strikes(&self, path: PathId) -> u32 {
        self.get(path).map_or(0, |path| path.strikes)
    }

    /// Whether a read that the path owes `owes` bytes may ask it for `bytes` now, up to a part of its queue: reads share that
    /// equally, and each may have one request there, so that none waits for another to end.
    pub fn has_room(&self, path: PathId, bytes: u64, (owes, part): (u64, u64), now: Duration) -> bool {
        let Some(known) = self.get(path) else { return false };
        let queue = known.rate(now).map_or(0.0, |rate| rate * QUEUE.as_secs_f64()) as u64;
        let share = queue.max(OUTSTANDING_MIN) / u64::from(known.readers.max(1)) / part.max(1);
        owes == 0 || owes.saturating_add(bytes) <= share
    }

    /// One more read uses a path.
    pub fn entered(&mut self, path: PathId) {
        if let Some(path) = self.of(path) {
            path.readers = path.readers.saturating_add(1);
        }
    }

    /// A read does not use a path any more.
    pub fn left(&mut self, path: PathId) {
        if let Some(path) = self.of(path) {
            path.readers = path.readers.saturating_sub(1);
        }
    }

    /// Reads that use a path now.
    pub fn readers(&self, path: PathId) -> u32 {
        self.get(path).map_or(0, |path| path.readers)
    }

    /// Another path has this number now: nothing is known of it.
    pub fn renew(&mut self, path: PathId) {
        if let Some(path) = self.of(path) {
            *path = Path::default();
        }
    }

    /// `bytes` bytes were asked for.
    pub fn asked(&mut self, path: PathId, bytes: u64, now: Duration) {
        if let Some(path) = self.of(path) {
            path.count(now);
            path.silent_since.get_or_insert(now);
            path.outstanding = path.outstanding.saturating_add(bytes);
        }
    }

    /// `bytes` bytes arrived, and are what they should be.
    pub fn arrived(&mut self, path: PathId, bytes: u64, now: Duration) {
        if let Some(path) = self.of(path) {
            path.count(now);
            path.outstanding = path.outstanding.saturating_sub(bytes);
            path.arrived += bytes as f64;
            path.silent_since = None;
            path.is_given_up = false;
            path.strikes = 0;
        }
    }

    /// `bytes` bytes will not arrive, because the read does not need them any more.
    pub fn cancelled(&mut self, path: PathId, bytes: u64, now: Duration) {
        if let Some(path) = self.of(path) {
            path.count(now);
            let back = if planted!("cancelled-bytes-owed") { 0 } else { bytes };
            path.outstanding = path.outstanding.saturating_sub(back);
        }
    }

    /// `bytes` bytes did not arrive, or were wrong. After a few in a row the path is left alone for a while.
    pub fn failed(&mut self, path: PathId, bytes: u64, now: Duration) {
        self.cancelled(path, bytes, now);
        if let Some(path) = self.of(path) {
            path.strikes += 1;
            if path.strikes >= STRIKES_MAX {
                path.strikes = 0;
                path.left_alone_until = now + LEFT_ALONE;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const ONE: PathId = PathId(0);

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// A path that brings a MiB every `every` milliseconds, from one time to another.
    fn steady(paths: &mut Paths, from: u64, to: u64, every: u64) {
        for millis in (from..to).step_by(every as usize) {
            paths.asked(ONE, MIB, at(millis));
            paths.arrived(ONE, MIB, at(millis + every));
        }
    }

    #[test]
    fn a_rate_is_what_arrived_over_busy_time_and_idle_time_does_not_count() {
        let mut paths = Paths::new(1);
        assert_eq!(paths.rate(ONE, at(0)), None);
        steady(&mut paths, 0, 1000, 4);
        let busy = paths.rate(ONE, at(1000)).unwrap() / MIB as f64;
        assert!((240.0..270.0).contains(&busy), "{busy}");
        let idle = paths.rate(ONE, at(60_000)).unwrap() / MIB as f64;
        assert!((idle - busy).abs() < 1.0, "{idle} after a minute without requests, {busy} before");
    }

    #[test]
    fn a_rate_at_which_nothing_pays_is_not_known_any_more_when_nothing_was_asked_for_ten_minutes() {
        let mut paths = Paths::new(1);
        paths.asked(ONE, MIB, at(0));
        paths.arrived(ONE, MIB, at(5_000));
        assert!(paths.rate(ONE, at(5_000)).is_some());
        // A caller that asks each minute and reads nothing.
        let known =
            (0..24 * 60).filter(|minute| paths.rate(ONE, at(5_000 + minute * 60_000)).is_some()).count();
        assert_eq!(known, 10);
        // While something is outstanding the path itself tells.
        paths.asked(ONE, MIB, at(10_000_000));
        assert!(paths.rate(ONE, at(10_000_001)).is_some());
    }

    #[test]
    fn the_rate_of_a_path_that_stalls_falls_without_any_arrival() {
        let mut paths = Paths::new(1);
        steady(&mut paths, 0, 1000, 4);
        paths.asked(ONE, MIB, at(1000));
        let (before, after) = (paths.rate(ONE, at(1000)).unwrap(), paths.rate(ONE, at(1500)).unwrap());
        assert!(after < before / 5.0, "{after} after half a second, {before} before");
    }

    #[test]
    fn a_queue_holds_what_arrives_in_its_time_and_never_less_than_keeps_a_path_busy() {
        let mut paths = Paths::new(1);
        let fill = |paths: &mut Paths, now| {
            let mut asked = 0;
            while paths.has_room(ONE, MIB, (asked, 1), now) {
                paths.asked(ONE, MIB, now);
                asked += MIB;
            }
            paths.cancelled(ONE, asked, now);
            asked
        };
        assert_eq!(fill(&mut paths, at(0)), OUTSTANDING_MIN);
        steady(&mut paths, 0, 1000, 1);
        let fast = fill(&mut paths, at(1000)) / MIB;
        assert!((18..=20).contains(&fast), "{fast}");
        // Four reads share it.
        (0..4).for_each(|_| paths.entered(ONE));
        assert_eq!(fill(&mut paths, at(1000)) / MIB, fast / 4);
        (0..4).for_each(|_| paths.left(ONE));
        assert_eq!(fill(&mut paths, at(1000)) / MIB, fast);
    }

    #[test]
    fn three_failures_in_a_row_leave_a_path_alone_for_a_while() {
        let mut paths = Paths::new(1);
        for n in 0..6 {
            paths.asked(ONE, MIB, at(n));
            if n % 2 == 0 { paths.failed(ONE, MIB, at(n)) } else { paths.arrived(ONE, MIB, at(n)) }
        }
        assert!(paths.is_usable(ONE, at(6)), "failures with successes between them");
        for n in 6..9 {
            paths.asked(ONE, MIB, at(n));
            paths.failed(ONE, MIB, at(n));
        }
        assert!(!paths.is_usable(ONE, at(9)));
        assert!(paths.is_usable(ONE, at(9) + LEFT_ALONE));
    }
}
