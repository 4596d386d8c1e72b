//! What the writer of a session keeps of windows and states, by what its turn is and by what computing them again takes.
//!
//! On the way they are kept at an interval ([`WindowPolicy::by_replay`]), by the rate that the engine was measured at; at the end of a turn
//! if that is sooner written than computed again. It is advice: the engine writes, and no server knows a window that was not put.

use std::num::NonZeroU32;

use kvarts_layout::prefix::{TOKENS_PER_SECOND, WindowPolicy};

use crate::cost::Prefill;
use crate::route::Class;

/// Tokens over which an engine's rate is taken: single steps say little of it.
const RATE_TOKENS: u64 = 2048;

/// What a turn is, for its windows and states.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// What it is for a cluster.
    pub class: Class,
    /// Its whole prompt.
    pub tokens: u64,
    /// Tokens of a block; at least 1.
    pub block_tokens: u32,
    /// Bytes of all windows and states at one boundary.
    pub boundary_bytes: u64,
    /// How fast a disk takes them.
    pub bytes_per_second: u64,
}

/// What is kept on the way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keep {
    /// The model has neither windows nor states.
    Nothing,
    /// At every block's end.
    EveryBlock,
    /// At the ends of blocks that are this far apart.
    EveryBlocks(NonZeroU32),
    /// Nowhere: the prompt is shorter than the interval.
    Replay,
}

/// What is kept of a turn.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Tail {
    /// On the way.
    pub keep: Keep,
    /// Whether it is kept at the turn's end as well.
    pub tip: bool,
    /// Tokens from the last boundary that is kept on the way to the turn's last one.
    pub replay_tokens: u64,
    /// How long computing those again takes.
    pub replay_ms: f64,
    /// How long writing what is kept at one boundary takes.
    pub write_ms: f64,
}

impl Turn {
    /// What to keep, by an engine's times, or by [`TOKENS_PER_SECOND`] where none are known.
    pub fn tail(&self, times: Option<&dyn Prefill>) -> Tail {
        let block = self.block_tokens.max(1);
        let took = |cached: u64, new: u64| match times {
            Some(times) => times.prefill_ms(cached, new),
            None => new as f64 * 1000.0 / TOKENS_PER_SECOND as f64,
        };
        let write_ms = self.boundary_bytes as f64 * 1000.0 / self.bytes_per_second.max(1) as f64;
        if self.boundary_bytes == 0 {
            return Tail { keep: Keep::Nothing, tip: false, replay_tokens: 0, replay_ms: 0.0, write_ms };
        }
        let ends = self.tokens / u64::from(block) * u64::from(block);
        // As fast as it computes at this prompt's end.
        let some = ends.clamp(u64::from(block), RATE_TOKENS);
        let rate =
            (some as f64 * 1000.0 / took(ends.saturating_sub(some), some).max(f64::MIN_POSITIVE)) as u64;
        let policy = WindowPolicy::by_replay(self.boundary_bytes, block, rate.max(1), self.bytes_per_second);
        let (keep, interval) = match policy {
            WindowPolicy::Full => (Keep::EveryBlock, u64::from(block)),
            WindowPolicy::Periodic { tokens } if u64::from(tokens.get()) <= ends => {
                let blocks = NonZeroU32::new(tokens.get().div_ceil(block)).unwrap_or(NonZeroU32::MIN);
                (Keep::EveryBlocks(blocks), u64::from(blocks.get()) * u64::from(block))
            }
            _ => (Keep::Replay, u64::MAX),
        };
        let replay_tokens = ends % interval;
        let replay_ms = if replay_tokens == 0 { 0.0 } else { took(ends - replay_tokens, replay_tokens) };
        // How often the turn's end is gone on from, as far as its class says.
        let again = match self.class {
            // Several do.
            Class::ForkedRollout => 2.0,
            // The engine has it, and the next turn moves it on before long.
            Class::Continuation => 0.0,
            _ => 1.0,
        };
        Tail { keep, tip: replay_ms * again > write_ms, replay_tokens, replay_ms, write_ms }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::{Sample, Times};

    const DISK: u64 = 2_000_000_000;

    fn turn(class: Class, tokens: u64, boundary_bytes: u64) -> Turn {
        Turn { class, tokens, block_tokens: 16, boundary_bytes, bytes_per_second: DISK }
    }

    fn every(blocks: u32) -> Keep {
        Keep::EveryBlocks(NonZeroU32::new(blocks).unwrap())
    }

    #[test]
    fn a_model_without_windows_keeps_nothing_beside_its_blocks() {
        let tail = turn(Class::NewLongPrefix, 8192, 0).tail(None);
        assert_eq!((tail.keep, tail.tip, tail.replay_ms), (Keep::Nothing, false, 0.0));
    }

    #[test]
    fn an_engine_that_computes_slower_keeps_more_often() {
        // 75 MiB of states: 39 ms of writing, 786 tokens at 10,000 a second.
        let states = turn(Class::NewLongPrefix, 8192 + 500, 75 << 20);
        assert_eq!(states.tail(None).keep, every(50));
        let at = |ms: f64| {
            let sample = |new| Sample { cached: 0, new, ms: ms * new as f64 / 1000.0 };
            Times::new(vec![sample(16), sample(100_000)], None).unwrap()
        };
        assert_eq!(states.tail(Some(&at(1000.0))).keep, every(5));
        // Faster than its whole prompt is worth an interval.
        assert_eq!(turn(Class::SmallTurn, 700, 75 << 20).tail(None).keep, Keep::Replay);
        assert_eq!(turn(Class::SmallTurn, 700, 1000).tail(None).keep, Keep::EveryBlock);
    }

    #[test]
    fn the_end_of_a_turn_is_kept_where_going_on_from_it_costs_more_than_writing() {
        // 39 ms of writing beside 320 tokens, 32 ms: not for one, but for several that go on from it.
        let short = |class| turn(class, 800 * 10 + 320, 75 << 20).tail(None);
        assert!(!short(Class::SmallTurn).tip && short(Class::ForkedRollout).tip);
        let long = |class| turn(class, 800 * 10 + 640, 75 << 20).tail(None);
        assert!(long(Class::SmallTurn).tip && long(Class::ColdResume).tip && !long(Class::Continuation).tip);
        assert_eq!(long(Class::SmallTurn).replay_tokens, 640);
    }
}
