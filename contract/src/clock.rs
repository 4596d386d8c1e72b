//! Clocks and randomness: the machine's own, and ones that a test turns by hand.
//!
//! This module is the seam: it is the only place of the engine that asks the operating system for the time or for
//! random bytes. Whatever must repeat from a seed uses [`ManualClock`] and [`SeededEntropy`] instead.

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};

/// A point on the monotonic clock, in nanoseconds since an arbitrary start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Nanos(pub u64);

impl Nanos {
    /// This point and `after` later, saturating.
    pub fn plus(self, after: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// How long after `earlier` this is; zero if it is before.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// The clocks. Callable from any thread.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Monotonic: deadlines, leases and TTLs are measured by it while the process lives.
    fn now(&self) -> Nanos;
    /// Milliseconds since 1970 by the wall clock, which may jump: only for what must survive a restart.
    fn unix_millis(&self) -> u64;
}

/// Randomness. Callable from any thread.
pub trait Entropy: Send + Sync + fmt::Debug {
    /// Fills `bytes`.
    fn fill(&self, bytes: &mut [u8]);
}

/// The machine's clocks.
#[derive(Debug)]
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// A clock whose monotonic time is measured from now.
    #[allow(clippy::disallowed_methods, reason = "all other code reads the clock through this type")]
    pub fn new() -> Arc<Self> {
        Arc::new(Self { start: Instant::now() })
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Nanos {
        Nanos::default().plus(self.start.elapsed())
    }

    #[allow(clippy::disallowed_methods, reason = "all other code reads the clock through this type")]
    fn unix_millis(&self) -> u64 {
        // A wall clock before 1970 is broken; zero makes whatever is compared with it old, never young.
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }
}

/// Clocks that stand still until a test moves them. The wall clock moves along with the monotonic one, and can
/// be set apart from it, also backwards.
#[derive(Debug)]
pub struct ManualClock {
    now: AtomicU64,
    /// The wall clock at monotonic zero, in milliseconds; wrapping, so that it can be before 1970.
    wall_base: AtomicU64,
}

impl ManualClock {
    /// Monotonic zero, at the given wall time.
    pub fn new(unix_millis: u64) -> Arc<Self> {
        Arc::new(Self { now: AtomicU64::new(0), wall_base: AtomicU64::new(unix_millis) })
    }

    /// Moves both clocks on.
    pub fn advance(&self, by: Duration) {
        self.advance_to(self.now().plus(by));
    }

    /// Moves both clocks on to `at`; a point in the past changes nothing.
    pub fn advance_to(&self, at: Nanos) {
        self.now.fetch_max(at.0, Ordering::SeqCst);
    }

    /// Sets the wall clock alone.
    pub fn set_unix_millis(&self, unix_millis: u64) {
        self.wall_base.store(unix_millis.wrapping_sub(self.millis()), Ordering::SeqCst);
    }

    fn millis(&self) -> u64 {
        self.now().0 / 1_000_000
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Nanos {
        Nanos(self.now.load(Ordering::SeqCst))
    }

    fn unix_millis(&self) -> u64 {
        self.wall_base.load(Ordering::SeqCst).wrapping_add(self.millis())
    }
}

/// The operating system's randomness.
#[derive(Debug, Default)]
pub struct OsEntropy;

impl OsEntropy {
    /// The operating system's randomness.
    pub fn new() -> Arc<Self> {
        Arc::new(Self)
    }
}

impl Entropy for OsEntropy {
    /// # Panics
    /// If the kernel has no randomness to give, which Linux excludes once it has booted: going on with
    /// guessable ids and keys would be worse.
    fn fill(&self, bytes: &mut [u8]) {
        let mut done = 0;
        while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty()) {
                Ok(n) => done += n,
                Err(rustix::io::Errno::INTR) => {}
                Err(why) => panic!(
                    "the call getrandom failed ({why}): the store needs a kernel with a \
                    source of random numbers"
                ),
            }
        }
    }
}

/// Randomness from a seed: the same seed gives the same bytes in the same order of calls.
#[derive(Debug)]
pub struct SeededEntropy {
    generator: Mutex<Xoshiro>,
}

impl SeededEntropy {
    /// The bytes that belong to `seed`.
    pub fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self { generator: Mutex::new(Xoshiro::new(seed)) })
    }
}

impl Entropy for SeededEntropy {
    fn fill(&self, bytes: &mut [u8]) {
        let mut generator = self.generator.lock().unwrap_or_else(PoisonError::into_inner);
        for part in bytes.chunks_mut(8) {
            let word = generator.next_u64().to_le_bytes();
            for (to, from) in part.iter_mut().zip(word) {
                *to = from;
            }
        }
    }
}

/// The generator xoshiro256**: small, fast and equal on every machine. Not for secrets.
#[derive(Clone, Debug)]
pub struct Xoshiro([u64; 4]);

impl Xoshiro {
    /// A generator whose state is spread from `seed`.
    pub fn new(seed: u64) -> Self {
        let mut state = seed;
        Self(std::array::from_fn(|_| split_mix(&mut state)))
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        let [a, b, c, d] = self.0;
        let result = b.wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let c2 = c ^ a;
        let d2 = d ^ b;
        self.0 = [a ^ d2, b ^ c2, c2 ^ (b << 17), d2.rotate_left(45)];
        result
    }
}

/// SplitMix64: spreads a counter over all 64 bits.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_s_clock_never_goes_back() {
        let clock = SystemClock::new();
        let times: Vec<_> = (0..100).map(|_| clock.now()).collect();
        assert!(times.is_sorted());
        // 2020-01-01: any machine that builds this is past it.
        assert!(clock.unix_millis() > 1_577_836_800_000);
    }

    #[test]
    fn a_manual_clock_moves_only_by_hand_and_its_wall_clock_can_jump_back() {
        let clock = ManualClock::new(1_000_000);
        assert_eq!((clock.now(), clock.unix_millis()), (Nanos(0), 1_000_000));
        clock.advance(Duration::from_millis(1500));
        assert_eq!((clock.now(), clock.unix_millis()), (Nanos(1_500_000_000), 1_001_500));
        clock.advance_to(Nanos(5));
        assert_eq!(clock.now(), Nanos(1_500_000_000));
        clock.set_unix_millis(3);
        clock.advance(Duration::from_millis(4));
        assert_eq!((clock.now(), clock.unix_millis()), (Nanos(1_504_000_000), 7));
    }

    #[test]
    fn the_generator_gives_the_published_sequence() {
        // The reference implementation of xoshiro256** from the state {1, 2, 3, 4}.
        let mut generator = Xoshiro([1, 2, 3, 4]);
        let words: Vec<_> = (0..4).map(|_| generator.next_u64()).collect();
        assert_eq!(words, [11520, 0, 1_509_978_240, 1_215_971_899_390_074_240]);
        // And of SplitMix64 from the seed 1234567.
        let mut state = 1_234_567;
        assert_eq!(split_mix(&mut state), 6_457_827_717_110_365_317);
    }

    #[test]
    fn seeded_bytes_repeat_and_differ_between_seeds() {
        let bytes = |seed| {
            let mut bytes = [0; 37];
            SeededEntropy::new(seed).fill(&mut bytes);
            bytes
        };
        assert_eq!(bytes(1), bytes(1));
        assert_ne!(bytes(1), bytes(2));
        assert_ne!(bytes(1)[32..], [0; 5]);
    }

    #[test]
    fn the_system_s_bytes_fill_the_whole_request() {
        let mut bytes = vec![0; 1000];
        OsEntropy::new().fill(&mut bytes);
        assert!(bytes.chunks(50).all(|part| part.iter().any(|byte| *byte != 0)));
    }
}
