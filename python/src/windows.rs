//! Which windows and states of a chain are kept.

use std::num::NonZeroU32;

use kvarts_layout::prefix::{BYTES_PER_SECOND, TOKENS_PER_SECOND, WindowPolicy, expected_window_blocks};
use pyo3::prelude::*;

#[doc = stub!("kept_windows")]
#[pyfunction]
pub(crate) fn kept_windows(
    every: u32,
    window: u32,
    first: u32,
    last: u32,
    block_tokens: u32,
) -> Vec<(u32, u32)> {
    let policy =
        NonZeroU32::new(every).map_or(WindowPolicy::Full, |tokens| WindowPolicy::Periodic { tokens });
    // Blocks of a window that is kept at a boundary behind these are among them.
    let ahead = window.div_ceil(block_tokens.max(1)).saturating_add(every.div_ceil(block_tokens.max(1)));
    let kept = expected_window_blocks(policy, window, last.saturating_add(ahead), block_tokens);
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for block in kept.skip_while(|block| *block < first).take_while(|block| *block < last) {
        match ranges.last_mut() {
            Some((_, end)) if *end == block => *end = block.saturating_add(1),
            _ => ranges.push((block, block.saturating_add(1))),
        }
    }
    ranges
}

// The stub wants numbers.
const _: () = assert!(TOKENS_PER_SECOND == 10_000 && BYTES_PER_SECOND == 2_000_000_000);

#[doc = stub!("window_interval")]
#[pyfunction]
#[pyo3(signature = (nbytes, block_tokens, tokens_per_second=10000, bytes_per_second=2000000000))]
pub(crate) fn window_interval(
    nbytes: u64,
    block_tokens: u32,
    tokens_per_second: u64,
    bytes_per_second: u64,
) -> u32 {
    match WindowPolicy::by_replay(nbytes, block_tokens, tokens_per_second, bytes_per_second) {
        WindowPolicy::Periodic { tokens } => tokens.get(),
        WindowPolicy::Full | WindowPolicy::Zero => 0,
    }
}
