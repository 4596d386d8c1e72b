//! The digest of the store (CRC-32, IEEE) as a device computes it: a kernel, and the same scheme on the
//! processor, line for line, by which it is tested.
//!
//! One block of [`THREADS`] threads digests one chunk; where there are thousands, each warp of a block does. A CRC without
//! its first and last inversion is linear: of two strings one behind the other it is that of the first, times x to the
//! number of bits of the second, plus that of the second; and zeros in front change nothing. So the chunk counts as if
//! zeros filled it up in front to whole rows, of as many words as there are threads. Each thread takes one word of every row,
//! which neighbours load together; it multiplies what it has by the same constant before each word, by four look-ups in
//! tables that the block makes at its beginning; and at the end it multiplies by the power of x that its place is away from
//! the end, which is the same for chunks of every length. What all threads have is added up by XOR, in any order. The
//! inversions are one more multiplication, by a factor that only the length decides: it is kept for the next chunk.
//!
//! The twin is tested against the digest that the store uses, and `scripts/kernels` runs the kernel's own source on the
//! processor, a thread for each of its threads. What it takes on a GPU is in docs/GPU.md.

/// Threads of a block.
pub const THREADS: u32 = 256;

/// The polynomial, bits reflected: bit 31 is x^0.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// The product of two polynomials modulo the polynomial.
pub const fn multiply(a: u32, mut b: u32) -> u32 {
    let (mut product, mut bit) = (0, 1u32 << 31);
    while bit != 0 {
        if a & bit != 0 {
            product ^= b;
        }
        b = next(b);
        bit >>= 1;
    }
    product
}

/// A polynomial times x.
const fn next(b: u32) -> u32 {
    if b & 1 == 0 { b >> 1 } else { (b >> 1) ^ POLYNOMIAL }
}

/// x to the power of 2^n, for n from 0 on.
pub const POWERS: [u32; 64] = {
    let mut powers = [0; 64];
    // x itself.
    let (mut power, mut n) = (1u32 << 30, 0);
    while n < 64 {
        powers[n] = power;
        power = multiply(power, power);
        n += 1;
    }
    powers
};

/// x to the power of `bits`.
pub fn power(mut bits: u64) -> u32 {
    let (mut product, mut n) = (1u32 << 31, 0);
    while bits != 0 {
        if bits & 1 != 0 {
            product = multiply(product, POWERS.get(n).copied().unwrap_or(0));
        }
        bits >>= 1;
        n += 1;
    }
    product
}

/// `word` times the constant of the tables.
fn step(tables: &[[u32; 256]; 4], word: u32) -> u32 {
    let at = |byte: usize| {
        let value = (word >> (8 * byte)) & 0xff;
        tables.get(byte).and_then(|table| table.get(value as usize)).copied().unwrap_or(0)
    };
    at(0) ^ at(1) ^ at(2) ^ at(3)
}

/// What the kernel computes of one chunk with this number of threads.
pub fn twin(bytes: &[u8], threads: u32) -> u32 {
    let threads = threads.max(1);
    let len = bytes.len() as u64;
    let words = len.div_ceil(4);
    // Phase one: all threads make the tables.
    let mut constant = power(32 * u64::from(threads));
    let mut tables = [[0u32; 256]; 4];
    for bit in (0..32usize).rev() {
        for (value, slot) in tables.get_mut(bit / 8).into_iter().flatten().enumerate() {
            *slot ^= if value >> (bit % 8) & 1 == 0 { 0 } else { constant };
        }
        constant = next(constant);
    }
    // Phase two: each thread by itself; what it has goes into the sum. Words count from the end: the first may be a part of one.
    let (gap, padding) = (words * 4 - len, words.next_multiple_of(u64::from(threads)) - words);
    let mut sum = 0;
    for thread in 0..u64::from(threads) {
        let mut mine = 0;
        let first = if thread < padding { thread + u64::from(threads) } else { thread } - padding;
        for at in (first..words).step_by(threads as usize) {
            mine = step(&tables, mine) ^ word_at(bytes, at * 4, gap);
        }
        sum ^= multiply(mine, power(32 * (u64::from(threads) - thread)));
    }
    // Phase three: the first thread adds the inversions.
    !(sum ^ multiply(u32::MAX, power(8 * len)))
}

fn byte_at(bytes: &[u8], at: u64) -> u8 {
    bytes.get(at as usize).copied().unwrap_or(0)
}

/// The word at `at` of `gap` zeros and the bytes behind them.
fn word_at(bytes: &[u8], at: u64, gap: u64) -> u32 {
    let of = |at: u64| at.checked_sub(gap).map_or(0, |at| byte_at(bytes, at));
    (0..4).fold(0, |word, byte| word | u32::from(of(at + byte)) << (8 * byte))
}

/// The kernel's source: one block of threads for each of `count` chunks, whose addresses, lengths and digests are three
/// arrays in device memory.
#[cfg(test)]
const SOURCE: &str = include_str!("kernels/crc32.cu");

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_twin_is_the_stores_digest_around_every_edge() {
        let bytes: Vec<u8> = (0..5000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for len in (0..70).chain(1020..1030).chain([2047, 2048, 2049, 4095, 4096, 5000]) {
            for threads in [1, 2, 3, 32, THREADS] {
                let digest = crc32fast::hash(&bytes[..len]);
                assert_eq!(twin(&bytes[..len], threads), digest, "{len} bytes, {threads} threads");
            }
        }
    }

    #[test]
    fn powers_are_those_of_the_polynomial() {
        // x^0 .. x^31 are single bits; x^32 is the polynomial.
        assert_eq!((power(0), power(1), power(31), power(32)), (1 << 31, 1 << 30, 1, POLYNOMIAL));
        assert_eq!(multiply(power(100), power(23)), power(123));
    }

    #[test]
    fn the_kernel_has_the_twins_constants() {
        assert_eq!((32 * THREADS, 32 * 32), (1 << 13, 1 << 10));
        for part in [
            "#define THREADS 256\n",
            "#define STRIDE 13\n",
            "#define STRIDE_OF_WARP 10\n",
            "#define POLYNOMIAL 0xedb88320u\n",
            " kvarts_crc32(",
        ] {
            assert!(SOURCE.contains(part), "{part}");
        }
        let table = SOURCE.split_once("POWERS[64] = {").unwrap().1.split_once("};").unwrap().0;
        let powers: Vec<u32> = table
            .split(',')
            .map(|one| {
                u32::from_str_radix(one.trim().trim_start_matches("0x").trim_end_matches('u'), 16).unwrap()
            })
            .collect();
        assert_eq!(powers, POWERS);
    }

    proptest! {
        #[test]
        fn any_bytes_by_any_number_of_threads_give_the_stores_digest(
            bytes in prop::collection::vec(any::<u8>(), 0..3000),
            threads in 1u32..300,
        ) {
            prop_assert_eq!(twin(&bytes, threads), crc32fast::hash(&bytes));
        }
    }
}
