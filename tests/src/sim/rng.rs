//! Seeds that branch, and what is drawn from them.
//!
//! Each part of a simulation draws from its own branch, so that one more draw in one part leaves the others as
//! they were: a shrunk or extended workload meets the same disk.

use kvarts_contract::clock::Xoshiro;

use super::log::Mixer;

/// A seed from which any number of others are derived by name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seed(pub u64);

impl Seed {
    /// The seed of the part called `name`. Different names give unrelated seeds.
    #[must_use]
    pub fn child(self, name: &str) -> Self {
        let mut mixer = Mixer::new(self.0);
        mixer.text(name);
        Self(mixer.low())
    }

    /// The seed of the `n`th of many like parts.
    #[must_use]
    pub fn nth(self, n: u64) -> Self {
        let mut mixer = Mixer::new(self.0);
        mixer.word(n);
        Self(mixer.low())
    }

    /// What is drawn from this seed.
    pub fn rng(self) -> Rng {
        Rng(Xoshiro::new(self.0))
    }
}

/// Draws from a seed.
#[derive(Clone, Debug)]
pub struct Rng(Xoshiro);

impl Rng {
    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `bound`; zero if that is zero. The bias, below `bound / 2^64`, is of no concern here.
    pub fn below(&mut self, bound: u64) -> u64 {
        let wide = u128::from(self.next_u64()) * u128::from(bound);
        u64::try_from(wide >> 64).unwrap_or(0)
    }

    /// An index into something that long.
    pub fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).unwrap_or(0)
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below((high - low).saturating_add(1))
    }

    /// True this often in a million.
    pub fn odds(&mut self, per_million: u32) -> bool {
        per_million > 0 && self.below(1_000_000) < u64::from(per_million)
    }

    /// True every other time.
    pub fn coin(&mut self) -> bool {
        self.next_u64() >> 63 == 1
    }

    /// One of `all`, if there is one.
    pub fn pick<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        all.get(self.index(all.len()))
    }

    /// Random bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next_u64().to_le_bytes()[0]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branches_are_stable_and_unrelated() {
        let seed = Seed(7);
        assert_eq!(seed.child("disk"), seed.child("disk"));
        let mut all = vec![seed, seed.child("disk"), seed.child("dis"), seed.nth(0), seed.nth(1)];
        all.push(Seed(8).child("disk"));
        all.sort_by_key(|seed| seed.0);
        all.dedup();
        assert_eq!(all.len(), 6);
    }

    #[test]
    fn draws_stay_in_their_bounds_and_reach_both_ends() {
        let mut rng = Seed(1).rng();
        let drawn: Vec<_> = (0..1000).map(|_| rng.between(3, 6)).collect();
        for expected in 3..=6 {
            assert!(drawn.contains(&expected));
        }
        assert!(drawn.iter().all(|n| (3..=6).contains(n)));
        assert_eq!(rng.below(0), 0);
        assert!(rng.between(0, u64::MAX) != rng.between(0, u64::MAX));
    }

    #[test]
    fn odds_come_true_about_as_often_as_they_say() {
        let mut rng = Seed(2).rng();
        let hits = (0..100_000).filter(|_| rng.odds(50_000)).count();
        assert!((4_500..5_500).contains(&hits), "{hits}");
        assert!((0..1000).all(|_| !rng.odds(0) && rng.odds(1_000_000)));
    }
}
