//! What blocks and records are called in memory: fingerprints and numbers.
//!
//! A fingerprint stands for an index key: 96 bits of a keyed hash of (namespace, block key, group, coordinate).
//!
//! Correctness never rests on a fingerprint alone. It says where a block *should* be; the reader compares the
//! whole key with the one in the record's header, and a difference is a miss. So a collision costs a block its
//! place in the cache and never gives a reader other bytes.
//!
//! How often: the hash is two independently keyed halves, each a sum of products of key-offset words (NH,
//! which collides for two given inputs with probability 2^-64) reduced by a strongly universal
//! multiply-add-shift. Over the choice of the seed, two different keys share all 96 bits with probability at
//! most 2^-94; a lookup among `n` blocks finds a foreign one with at most `n * 2^-94`, which for 100 million
//! blocks is less than 2^-67. The bound holds for keys chosen by an adversary who does not know the seed, which is
//! why it is drawn at random for each store and never leaves it.

use std::fmt;

use kvarts_layout::{BlockKey, Coordinate, Group};

/// Separates the hash's secrets from everything else that may be derived from the same seed.
const DERIVATION: &str = "kvarts store index fingerprint 2025-11";

/// A record's number in memory. It means nothing on disk or after a restart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct RecordId(pub u32);

impl fmt::Display for RecordId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// 96 bits that stand for one index key of one store.
///
/// Two different keys share one with probability at most 2^-94 over the choice of the store's seed, also when
/// the keys are chosen by someone who does not know the seed.
///
/// Ordered by its bits, most significant first; the first ones choose the partition of the index.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct BlockFingerprint {
    /// The most significant 64 bits, as two halves so that the type needs 4-byte alignment only. The less
    /// significant half comes first: on little-endian machines the two are then one load.
    low: u32,
    high: u32,
    /// The least significant 32 bits.
    rest: u32,
}

const _: () = assert!(size_of::<BlockFingerprint>() == 12 && align_of::<BlockFingerprint>() == 4);

impl BlockFingerprint {
    /// The fingerprint with these most significant 64 and least significant 32 bits.
    pub const fn from_parts(first: u64, rest: u32) -> Self {
        Self { low: first as u32, high: (first >> 32) as u32, rest }
    }

    /// The most significant 64 bits.
    #[inline]
    pub const fn first(self) -> u64 {
        self.low as u64 | (self.high as u64) << 32
    }

    /// The least significant 32 bits.
    #[inline]
    pub const fn rest(self) -> u32 {
        self.rest
    }

    /// Twelve bytes, most significant first: they sort as the fingerprint does.
    pub fn to_bytes(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&self.first().to_be_bytes());
        bytes[8..].copy_from_slice(&self.rest.to_be_bytes());
        bytes
    }

    /// The fingerprint that [`BlockFingerprint::to_bytes`] gave. Any bytes are one.
    pub fn from_bytes(bytes: [u8; 12]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l] = bytes;
        Self::from_parts(u64::from_be_bytes([a, b, c, d, e, f, g, h]), u32::from_be_bytes([i, j, k, l]))
    }
}

impl Ord for BlockFingerprint {
    #[inline]
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.first().cmp(&other.first()).then(self.rest.cmp(&other.rest))
    }
}

impl PartialOrd for BlockFingerprint {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Debug for BlockFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockFingerprint({:016x}{:08x})", self.first(), self.rest)
    }
}

/// The secrets of one half of the hash.
#[derive(Clone)]
struct Half {
    /// Added to the six input words.
    offsets: [u64; 6],
    /// Multiply the two halves of the sum of products.
    factors: [u128; 2],
    addend: u128,
}

impl Half {
    #[inline]
    fn hash(&self, words: &[u64; 6]) -> u64 {
        let [a, b, c, d, e, f] = *words;
        let [ka, kb, kc, kd, ke, kf] = self.offsets;
        let product = |x: u64, kx: u64, y: u64, ky: u64| {
            u128::from(x.wrapping_add(kx)).wrapping_mul(u128::from(y.wrapping_add(ky)))
        };
        let sum =
            product(a, ka, b, kb).wrapping_add(product(c, kc, d, kd)).wrapping_add(product(e, ke, f, kf));
        let [low, high] = self.factors;
        let reduced = low
            .wrapping_mul(sum & u128::from(u64::MAX))
            .wrapping_add(high.wrapping_mul(sum >> 64))
            .wrapping_add(self.addend);
        diffuse((reduced >> 64) as u64)
    }
}

/// A bijection after which every bit depends on every bit. It adds nothing to the collision bound and takes
/// nothing from it; it keeps arithmetic progressions of keys from landing in arithmetic progressions of slots.
#[inline]
const fn diffuse(mut x: u64) -> u64 {
    x ^= x >> 32;
    x = x.wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^= x >> 32;
    x = x.wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ x >> 32
}

/// The secret under which one store makes its fingerprints. Two stores agree on none.
#[derive(Clone)]
pub struct FingerprintKey {
    first: Half,
    rest: Half,
}

impl fmt::Debug for FingerprintKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FingerprintKey").finish_non_exhaustive()
    }
}

impl FingerprintKey {
    /// The key that a 32-byte random seed decides. The seed must be secret for the collision bound to hold.
    pub fn new(seed: &[u8; 32]) -> Self {
        let mut stream = blake3::Hasher::new_derive_key(DERIVATION).update(seed).finalize_xof();
        let mut word = || {
            let mut bytes = [0; 8];
            stream.fill(&mut bytes);
            u64::from_le_bytes(bytes)
        };
        let mut half = || {
            let offsets = std::array::from_fn(|_| word());
            let mut wide = || u128::from(word()) | u128::from(word()) << 64;
            Half { offsets, factors: [wide(), wide()], addend: wide() }
        };
        Self { first: half(), rest: half() }
    }

    /// The fingerprint of one index key. `namespace` is the store's own short number of the namespace.
    #[inline]
    pub fn of(
        &self,
        namespace: u32,
        key: &BlockKey,
        group: Group,
        coordinate: Coordinate,
    ) -> BlockFingerprint {
        let mut words = [0; 6];
        words[0] = u64::from(namespace) | u64::from(group.0) << 32;
        words[1] = coordinate.to_u64();
        for (word, bytes) in words[2..].iter_mut().zip(key.0.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        BlockFingerprint::from_parts(self.first.hash(&words), (self.rest.hash(&words) >> 32) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key_from(words: [u64; 4]) -> BlockKey {
        let mut key = BlockKey::default();
        for (bytes, word) in key.0.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
        key
    }

    fn coordinate(of: u16) -> Coordinate {
        Coordinate::heads(of % 8, 1, 8 + of).unwrap()
    }

    #[test]
    fn a_fingerprint_survives_its_bytes_and_sorts_like_them() {
        let one = BlockFingerprint::from_parts(0x0102_0304_0506_0708, 0x090a_0b0c);
        assert_eq!(one.to_bytes(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!(BlockFingerprint::from_bytes(one.to_bytes()), one);
        let hash = FingerprintKey::new(&[3; 32]);
        let some: Vec<_> =
            (0..200).map(|i| hash.of(1, &key_from([i, 0, 0, 0]), Group(0), Coordinate::Replicated)).collect();
        for (a, b) in some.iter().flat_map(|a| some.iter().map(move |b| (a, b))) {
            assert_eq!(a.cmp(b), a.to_bytes().cmp(&b.to_bytes()));
            assert_eq!(BlockFingerprint::from_bytes(a.to_bytes()), *a);
        }
    }

    #[test]
    fn every_field_and_the_seed_decide_the_fingerprint() {
        let hash = FingerprintKey::new(&[1; 32]);
        let key = key_from([1, 2, 3, 4]);
        let base = hash.of(7, &key, Group(9), coordinate(0));
        assert_eq!(FingerprintKey::new(&[1; 32]).of(7, &key, Group(9), coordinate(0)), base);
        let others = [
            hash.of(8, &key, Group(9), coordinate(0)),
            hash.of(9, &key, Group(7), coordinate(0)),
            hash.of(7, &key_from([2, 1, 3, 4]), Group(9), coordinate(0)),
            hash.of(7, &key_from([3, 4, 1, 2]), Group(9), coordinate(0)),
            hash.of(7, &key, Group(8), coordinate(0)),
            hash.of(7, &key, Group(9), coordinate(1)),
            hash.of(7, &key, Group(9), Coordinate::Replicated),
            FingerprintKey::new(&[2; 32]).of(7, &key, Group(9), coordinate(0)),
        ];
        for other in others {
            assert_ne!(other.first(), base.first());
            assert_ne!(other.rest(), base.rest());
        }
    }

    /// Each of the 96 output bits must flip with probability one half for each flipped input bit. With 2,000
    /// keys a fair coin stays within 0.5 +- 0.07 (over six standard deviations) in all 36,864 cells.
    #[test]
    fn flipping_any_input_bit_flips_every_output_bit_half_of_the_time() {
        const KEYS: u64 = 2_000;
        let hash = FingerprintKey::new(&[5; 32]);
        let of = |words: [u64; 6]| {
            let namespace = words[0] as u32;
            let heads = words[1] as u16;
            // `of` reaches 48 of the coordinate's bits at most; its low 12 are enough to flip here.
            let coordinate = Coordinate::heads(heads & 0xfff, 1, u16::MAX).unwrap();
            let key = key_from([words[2], words[3], words[4], words[5]]);
            hash.of(namespace, &key, Group((words[0] >> 32) as u32), coordinate)
        };
        let inputs = (0..64).map(|bit| (0, bit)).chain((0..12).map(|bit| (1, bit)));
        let inputs = inputs.chain((2..6).flat_map(|word| (0..64).map(move |bit| (word, bit))));
        for (word, bit) in inputs {
            let mut flips = [0u32; 96];
            for i in 0..KEYS {
                // Small numbers: the poorest input there is.
                let mut words = [i % 7, i % 5, i, i % 11, 0, i % 3];
                let before = of(words);
                words[word] ^= 1 << bit;
                let after = of(words);
                let first = before.first() ^ after.first();
                let rest = before.rest() ^ after.rest();
                for (place, flip) in flips.iter_mut().enumerate() {
                    let bit = if place < 64 { first >> place } else { u64::from(rest >> (place - 64)) };
                    *flip += (bit & 1) as u32;
                }
            }
            for (place, flip) in flips.iter().enumerate() {
                let share = f64::from(*flip) / KEYS as f64;
                assert!((0.43..0.57).contains(&share), "input {word}:{bit} output {place}: {share}");
            }
        }
    }

    /// Three million keys that differ in few bits of few fields. By chance the first 64 bits of two of them
    /// agree once in four million runs, and the buckets' chi-square stays within six standard deviations.
    #[test]
    fn millions_of_structured_keys_collide_nowhere_and_fill_partitions_evenly() {
        let hash = FingerprintKey::new(&[9; 32]);
        let mut firsts = Vec::with_capacity(3_000_000);
        let mut rests = [0u32; 4096];
        let mut add = |print: BlockFingerprint| {
            firsts.push(print.first());
            rests[(print.rest() >> 20) as usize] += 1;
        };
        for i in 0..1_000_000u64 {
            add(hash.of(1, &key_from([i, 0, 0, 0]), Group(0), Coordinate::Replicated));
            add(hash.of((i % 1000) as u32, &key_from([0, 0, 0, i << 40]), Group(1), Coordinate::Replicated));
            let spread = key_from([1 << (i % 64), i / 64, 0, i % 2]);
            add(hash.of(2, &spread, Group((i % 3) as u32), coordinate((i % 16) as u16)));
        }
        let mut partitions = [0u32; 4096];
        firsts.iter().for_each(|first| partitions[(first >> 52) as usize] += 1);
        for (name, buckets) in [("first", &partitions), ("rest", &rests)] {
            let mean = 3_000_000.0 / 4096.0;
            let chi: f64 = buckets.iter().map(|n| (f64::from(*n) - mean).powi(2) / mean).sum();
            assert!((chi - 4095.0).abs() < 6.0 * (2.0f64 * 4095.0).sqrt(), "{name}: chi-square {chi}");
        }
        firsts.sort_unstable();
        assert!(firsts.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
