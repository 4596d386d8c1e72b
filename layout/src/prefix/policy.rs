//! What a writer keeps of windows and states. Both are worth far less than their bytes at most boundaries, so
//! writers keep them everywhere, at an interval of tokens, or nowhere.

use std::num::NonZeroU32;

/// By which [`WindowPolicy::by_replay`] chooses where nothing better is known: tokens that an engine computes in a second, and bytes that a disk
/// writes.
pub const TOKENS_PER_SECOND: u64 = 10_000;
/// See [`TOKENS_PER_SECOND`].
pub const BYTES_PER_SECOND: u64 = 2_000_000_000;

/// At which boundaries a writer keeps its windows and states.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WindowPolicy {
    /// At every boundary.
    Full,
    /// At an interval of tokens: at the first boundary at or after each multiple of them.
    Periodic {
        /// Tokens from one to the next.
        tokens: NonZeroU32,
    },
    /// At none: what is needed is recomputed.
    Zero,
}

impl WindowPolicy {
    /// The policy by which writing what is kept at a boundary takes as long as replaying half of the way from one to the next, which is what a
    /// prefix that ends anywhere costs: `bytes` of all windows and states at one boundary, how many tokens an engine computes in a second
    /// and how many bytes a disk writes.
    pub fn by_replay(bytes: u64, block_tokens: u32, tokens_per_second: u64, bytes_per_second: u64) -> Self {
        let both_ways = u128::from(tokens_per_second).saturating_mul(2);
        let tokens =
            u128::from(bytes).saturating_mul(both_ways).div_euclid(u128::from(bytes_per_second.max(1)));
        // Whole blocks: windows are kept at the ends of blocks.
        let block = u128::from(block_tokens.max(1));
        let tokens = tokens.div_ceil(block).saturating_mul(block);
        match NonZeroU32::new(u32::try_from(tokens).unwrap_or(u32::MAX)) {
            Some(tokens) if tokens.get() > block_tokens => Self::Periodic { tokens },
            _ => Self::Full,
        }
    }

    /// Whether the state at this boundary is kept. There is none at boundary 0.
    pub fn keeps(self, boundary: u32, block_tokens: u32) -> bool {
        let Some(before) = boundary.checked_sub(1) else { return false };
        match self {
            Self::Full => true,
            Self::Periodic { tokens } => {
                let periods = |blocks: u32| {
                    u64::from(blocks)
                        .saturating_mul(u64::from(block_tokens))
                        .checked_div(u64::from(tokens.get()))
                };
                periods(boundary) > periods(before)
            }
            Self::Zero => false,
        }
    }
}

/// The boundaries among the first `blocks` whose states a writer keeps, in order. The state at boundary `b` is
/// part of block `b - 1`.
pub fn expected_states(policy: WindowPolicy, blocks: u32, block_tokens: u32) -> impl Iterator<Item = u32> {
    (1..=blocks).filter(move |&boundary| policy.keeps(boundary, block_tokens))
}

/// The blocks of a window kept as a stream that a writer keeps, in order: those that cover the last
/// `window_tokens` tokens before a kept boundary.
pub fn expected_window_blocks(
    policy: WindowPolicy,
    window_tokens: u32,
    blocks: u32,
    block_tokens: u32,
) -> impl Iterator<Item = u32> {
    let window_blocks = if block_tokens == 0 { 0 } else { window_tokens.div_ceil(block_tokens) };
    let mut written = 0u32;
    expected_states(policy, blocks, block_tokens).flat_map(move |boundary| {
        // Windows that overlap are kept once.
        let from = boundary.saturating_sub(window_blocks).max(written);
        written = boundary;
        from..boundary
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn periodic(tokens: u32) -> WindowPolicy {
        WindowPolicy::Periodic { tokens: NonZeroU32::new(tokens).unwrap() }
    }

    #[test]
    fn states_are_kept_everywhere_every_so_often_or_nowhere() {
        let states = |policy| expected_states(policy, 8, 128).collect::<Vec<_>>();
        assert_eq!(states(WindowPolicy::Full), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(states(periodic(512)), [4, 8]);
        assert_eq!(states(periodic(300)), [3, 5, 8]);
        assert_eq!(states(periodic(1)), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(states(periodic(1025)), [0; 0]);
        assert_eq!(states(WindowPolicy::Zero), [0; 0]);
        assert!(!WindowPolicy::Full.keeps(0, 128));
    }

    #[test]
    fn an_interval_by_replay_grows_with_what_is_written() {
        let by = |bytes| WindowPolicy::by_replay(bytes, 16, 10_000, 2_000_000_000);
        // A window of 128 tokens in 12 layers of 2 KiB: 1.6 ms of writing, 31 tokens on the way.
        assert_eq!(by(12 * 128 * 2048), periodic(32));
        // States of 75 MiB: 39 ms, 786 tokens.
        assert_eq!(by(75 << 20), periodic(800));
        assert_eq!([by(0), by(1 << 20)], [WindowPolicy::Full; 2]);
        assert_eq!(WindowPolicy::by_replay(u64::MAX, 16, u64::MAX, 0), periodic(u32::MAX));
    }

    #[test]
    fn windows_are_kept_before_the_kept_boundaries() {
        let blocks = |policy, window| expected_window_blocks(policy, window, 8, 128).collect::<Vec<_>>();
        assert_eq!(blocks(WindowPolicy::Full, 1000), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(blocks(periodic(512), 129), [2, 3, 6, 7]);
        assert_eq!(blocks(periodic(512), 4096), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(blocks(WindowPolicy::Zero, 128), [0; 0]);
    }

    proptest! {
        /// Read from the words: a period ends inside the block, or at its end; a window block holds a token
        /// among the last ones before a kept boundary.
        #[test]
        fn what_is_kept_follows_the_words(period in 1u32..50, block in 1u32..12, window in 1u32..40, blocks in 0u32..30) {
            let kept = |b: u32| ((b - 1) * block + 1..=b * block).any(|token| token % period == 0);
            let expected: Vec<u32> = (1..=blocks).filter(|&b| kept(b)).collect();
            prop_assert_eq!(expected_states(periodic(period), blocks, block).collect::<Vec<_>>(), expected.clone());
            let covers = |i: u32, b: u32| {
                (i * block..(i + 1) * block).any(|token| token < b * block && token + window >= b * block)
            };
            let covering: Vec<u32> = (0..blocks).filter(|&i| expected.iter().any(|&b| covers(i, b))).collect();
            prop_assert_eq!(
                expected_window_blocks(periodic(period), window, blocks, block).collect::<Vec<_>>(),
                covering
            );
        }
    }
}
