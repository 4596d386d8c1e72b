//! Chained block keys against raw BLAKE3 over the same bytes.
//!
//! `cargo bench -p kvarts-layout --bench keys` prints one line of JSON for each block size. `raw` hashes, block
//! by block, messages that already lie in memory as bytes: what a chain adds is turning tokens into bytes and
//! feeding each key into the next. `whole` is one hash over all of them, which no chain can reach: a key needs
//! the one before it. The two sides of a pair are run one after the other, in turn first, and the ratio is the
//! median over the pairs, so that a slow moment of the machine does not favour either.

use kvarts_layout::KeyChain;
use std::hint::black_box;
use std::time::Duration;

/// Domain, parent key and the two lengths of a block's message.
const FRAME_BYTES: usize = 64;

#[allow(clippy::disallowed_methods, reason = "a benchmark measures real time")]
fn timed(work: impl FnOnce()) -> Duration {
    let start = std::time::Instant::now();
    work();
    start.elapsed()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn compare(block_tokens: u32, total_tokens: u32, pairs: usize) {
    let tokens: Vec<u32> = (0..total_tokens).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let message_bytes = block_tokens as usize * 4 + FRAME_BYTES;
    let blocks = (total_tokens / block_tokens) as usize;
    let bytes: Vec<u8> = (0..message_bytes * blocks).map(|i| (i * 31) as u8).collect();

    let chained = || {
        timed(|| {
            let mut chain = KeyChain::new();
            chain.push_all(
                black_box(&tokens),
                block_tokens,
                |_| &[],
                |key| {
                    black_box(key);
                },
            );
        })
    };
    let pushed = || {
        timed(|| {
            let mut chain = KeyChain::new();
            for block in black_box(&tokens).chunks_exact(block_tokens as usize) {
                black_box(chain.push(block, &[]));
            }
        })
    };
    let raw = || {
        timed(|| {
            for message in black_box(&bytes).chunks_exact(message_bytes) {
                black_box(blake3::hash(message));
            }
        })
    };
    let whole = || timed(|| _ = black_box(blake3::hash(black_box(&bytes))));

    let (mut ratios, mut push_ratios, mut rates, mut raw_rates, mut whole_rates) =
        (vec![], vec![], vec![], vec![], vec![]);
    let rate = |time: Duration| bytes.len() as f64 / time.as_secs_f64() / 1e9;
    for pair in 0..pairs {
        let (ours, theirs) = if pair % 2 == 0 {
            let ours = chained();
            (ours, raw())
        } else {
            let theirs = raw();
            (chained(), theirs)
        };
        ratios.push(theirs.as_secs_f64() / ours.as_secs_f64());
        push_ratios.push(theirs.as_secs_f64() / pushed().as_secs_f64());
        rates.push(rate(ours));
        raw_rates.push(rate(theirs));
        whole_rates.push(rate(whole()));
    }
    println!(
        "{{\"bench\":\"keys\",\"block_tokens\":{block_tokens},\"blocks\":{blocks},\"message_bytes\":{message_bytes},\
         \"pairs\":{pairs},\"ratio_of_raw\":{:.3},\"ratio_of_raw_one_by_one\":{:.3},\"gb_per_s\":{:.3},\
         \"raw_gb_per_s\":{:.3},\"whole_gb_per_s\":{:.3},\"ns_per_key\":{:.0}}}",
        median(ratios),
        median(push_ratios),
        median(rates.clone()),
        median(raw_rates),
        median(whole_rates),
        message_bytes as f64 / median(rates),
    );
}

fn main() {
    // Without `--bench` (a test run builds and starts benchmarks too) one short pair shows that it works.
    let (total_tokens, pairs) =
        if std::env::args().any(|argument| argument == "--bench") { (1 << 18, 101) } else { (1 << 13, 1) };
    for block_tokens in [16, 64, 256, 512, 2048, 8192] {
        compare(block_tokens, total_tokens, pairs);
    }
}
