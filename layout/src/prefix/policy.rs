//! What a writer keeps of windows and states. Both are worth far less than their bytes at most boundaries, so
//! writers keep them everywhere, at an interval of tokens, or nowhere.

use std::num::NonZeroU32;

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
