//! Which look-ups count blocks that only the bucket has.
//!
//! A look-up with a plan of its own is told what the bucket has beside the rest (`in_cold`), and decides. Others, as connectors of engines
//! make them, ask how much is there and then read it: what is offered to them is what a read can bring in time, and, where the configuration
//! says how fast engines compute, sooner than they do. Nothing is asked of the bucket for an answer.

use std::time::Duration;

use kvarts_contract::api::Presence;

use super::counts::add;
use super::wish::Wish;
use super::{ColdTier, UNMEASURED_RATE};

/// The longest that bringing what is offered may take: half of the time that connectors give a look-up and the load after it, unless they
/// are told otherwise.
pub const OFFERED_MOST: Duration = Duration::from_secs(1);

/// What a way to a bucket is taken to be able to bring at best as long as too little came to say: 100 Gbit/s.
const FASTEST: u64 = 12_500_000_000;

/// What look-ups without a plan are told of blocks that only the bucket has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Offer {
    /// Nothing.
    #[default]
    Never,
    /// That they are there, if they can be brought in time.
    InTime,
    /// The same, if they are brought sooner than engines compute them; the tokens a second that those make.
    SoonerThan(u32),
}

impl ColdTier {
    /// How many bytes of such blocks can be offered to a look-up that has `left` to live: what comes in time behind all that is under way.
    fn offered_bytes(&self, block_bytes: u64, block_tokens: u32, left: Duration) -> u64 {
        let budget = self.tier.access().readable();
        if budget == 0 {
            return 0;
        }
        let (now, latency) = (self.tier.access().time().now(), self.tier.first_byte_time());
        let mut estimate = self.estimate();
        // As long as nothing was brought it is not known how long it takes, and never would be.
        let measured = estimate.rate(now);
        let rate = measured.unwrap_or(UNMEASURED_RATE);
        let pays = match self.config.offer {
            Offer::Never => return 0,
            Offer::InTime => true,
            Offer::SoonerThan(tokens) => {
                let computed = u128::from(tokens) * u128::from(block_bytes);
                // A few short restores do not say what the way can do.
                let at_best = if estimate.is_sure(now) { rate } else { rate.max(FASTEST) };
                measured.is_none() || u128::from(at_best) * u128::from(block_tokens.max(1)) > computed
            }
        };
        let seconds = left.min(OFFERED_MOST).saturating_sub(latency.unwrap_or_default()).as_secs_f64();
        let in_time = ((rate as f64 * seconds) as u64).saturating_sub(self.flights.bytes());
        let offered = if pays { budget.min(in_time) } else { 0 };
        // Something has to come for it to be known that the bucket is faster by now.
        if offered < block_bytes && self.flights.blocks() == 0 && estimate.tries(now) {
            return budget.min(block_bytes);
        }
        offered
    }

    /// Whether look-ups without a plan are told of blocks that only the bucket has.
    pub fn offers(&self) -> bool {
        self.config.offer != Offer::Never
    }

    /// Which of a wish's blocks are offered to a look-up that has `left` to live, the first ones first; `presence` says which are here.
    pub fn offered(
        &self,
        wish: &Wish<'_>,
        presence: &[Presence],
        block_tokens: u32,
        left: Duration,
    ) -> Option<Vec<bool>> {
        if !self.offers() {
            return None;
        }
        let known = self.known(wish.namespace)?;
        let may_come = self.may_come(wish, &known);
        let mut left = self.offered_bytes(wish.block_bytes, block_tokens, left);
        let mut offered = vec![false; presence.len()];
        let absent = presence.iter().zip(may_come).zip(&mut offered);
        for (_, offered) in absent.filter(|((one, comes), _)| **one == Presence::Absent && *comes) {
            let Some(rest) = left.checked_sub(wish.block_bytes) else { break };
            (left, *offered) = (rest, true);
        }
        offered.contains(&true).then_some(offered)
    }

    /// Notes that this number of blocks was offered.
    pub fn has_offered(&self, blocks: usize) {
        add(&self.counts.offered_blocks, blocks as u64);
    }
}
