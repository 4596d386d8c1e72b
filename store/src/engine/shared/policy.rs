//! Which block goes first: policies behind one small interface.
//!
//! A policy ranks; it owns nothing and is told of nothing. What it ranks by is what the index keeps of each block in
//! 16 bits, so a use costs one store and no policy can make the index larger. The rules that hold for every policy are
//! kept outside: leases and pins, blocks behind others of their record, coordinates and groups of one block (`choose`,
//! `batch`).

use std::fmt;

use super::recency::STEPS_PER_BUDGET;

/// What a policy knows of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Candidate {
    /// Steps since its last use, or since it entered its queue if the policy does not renew: a
    /// [`STEPS_PER_BUDGET`]th of the budget each.
    pub age: u32,
    /// Uses since it was put, up to 3.
    pub frequency: u8,
    /// Whether it has been let into the main queue.
    pub main: bool,
    /// The last block of its record, as far as is known with nothing behind it: where prompts turn off.
    pub tip: bool,
    /// Not used since it was put, though blocks before it in its record were: who came back went another way.
    pub passed: bool,
    /// State that is good for one boundary only, not for what follows.
    pub boundary: bool,
    /// How much a byte of it costs to compute again, as a power of two against the usual: above 0 for more.
    pub cost: i8,
}

/// What happens to a block that is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Chosen {
    /// It goes.
    Goes,
    /// It stays and starts over, in the main queue, with this frequency.
    Stays(u8),
}

/// Which block goes first.
pub(crate) trait Policy: fmt::Debug + Send + Sync {
    /// The higher, the earlier it goes.
    fn rank(&self, block: &Candidate) -> u32;

    /// A block whose rank is among the highest.
    fn choose(&self, _block: &Candidate) -> Chosen {
        Chosen::Goes
    }

    /// The age at which a block of which nothing is known but its age has this rank.
    fn age_of(&self, rank: u32) -> u32 {
        rank
    }

    /// Whether a use makes a block young.
    fn renews(&self) -> bool {
        true
    }
}

/// How a store chooses what it evicts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum EvictionPolicy {
    /// By what a block is worth for its bytes: recency, whether it was used again, where prompts turn off,
    /// what it costs to compute again.
    #[default]
    Weighted,
    /// Least recently used first.
    Lru,
    /// Two queues in the order of arrival: what is not used early leaves early.
    S3Fifo,
}

impl EvictionPolicy {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Weighted, Self::Lru, Self::S3Fifo];

    /// As it is written in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weighted => "weighted",
            Self::Lru => "lru",
            Self::S3Fifo => "s3-fifo",
        }
    }

    /// The policy of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|policy| policy.name() == name)
    }

    /// How early a block goes by this policy, for those who decide as a store does: the higher, the earlier.
    pub fn rank(self, block: &Candidate) -> u32 {
        self.policy().rank(block)
    }

    /// What happens to a block whose rank is the highest.
    pub fn choose(self, block: &Candidate) -> Chosen {
        self.policy().choose(block)
    }

    /// Whether a use makes a block young.
    pub fn renews(self) -> bool {
        self.policy().renews()
    }

    pub(crate) fn policy(self) -> &'static dyn Policy {
        match self {
            Self::Weighted => &Weighted,
            Self::Lru => &Lru,
            Self::S3Fifo => &S3Fifo,
        }
    }
}

/// See [`EvictionPolicy::Lru`].
#[derive(Debug)]
struct Lru;

impl Policy for Lru {
    fn rank(&self, block: &Candidate) -> u32 {
        block.age
    }
}

/// See [`EvictionPolicy::Weighted`]. A block ages, and evidence makes it age faster or slower:
///
/// - one that was used since it was put ages half as fast;
/// - a record's last block ages four times as fast until it is used: what follows a prefix hangs on the block before
///   the one at which prompts turn off;
/// - one that was passed over ages four times as fast, one that is both as well;
/// - boundary state ages four times as fast: it serves who goes on from that very place, soon;
/// - what costs more to compute for its bytes ages slower, by the square root.
#[derive(Debug)]
struct Weighted;

impl Policy for Weighted {
    fn rank(&self, block: &Candidate) -> u32 {
        // In eighths.
        let mut weight = if block.frequency > 0 { 4 } else { 8 };
        if block.frequency == 0 && (block.tip || block.passed) {
            weight *= 4;
        }
        if block.boundary {
            weight *= 4;
        }
        let weight = match block.cost {
            cost if cost > 0 => weight >> (cost / 2).min(2),
            cost => weight << (-cost / 2).min(2),
        };
        // A block of this very step is older than none.
        block.age.saturating_mul(2).saturating_add(1).saturating_mul(weight)
    }

    fn age_of(&self, rank: u32) -> u32 {
        rank / 16
    }
}

/// See [`EvictionPolicy::S3Fifo`]. The queues are those of S3-FIFO without its list of ghosts: a block is in the small
/// one for the time in which a tenth of the budget is written. Used by then, it goes over to the main one; if not, it
/// leaves. In the main one each use buys one more round.
#[derive(Debug)]
struct S3Fifo;

/// Steps in the small queue.
const SMALL_STEPS: u32 = (STEPS_PER_BUDGET / 10) as u32;
/// Above every rank in the main queue.
const OVERDUE: u32 = 1 << 30;

impl Policy for S3Fifo {
    fn rank(&self, block: &Candidate) -> u32 {
        let age = block.age.min(OVERDUE / 4);
        match block.main {
            true => age + OVERDUE / 4,
            false if block.age >= SMALL_STEPS => age + OVERDUE,
            false => age,
        }
    }

    fn choose(&self, block: &Candidate) -> Chosen {
        match block.main {
            false if block.frequency > 0 => Chosen::Stays(0),
            true if block.frequency > 0 => Chosen::Stays(block.frequency - 1),
            _ => Chosen::Goes,
        }
    }

    fn age_of(&self, rank: u32) -> u32 {
        match rank {
            OVERDUE.. => rank - OVERDUE,
            rank => rank.min(SMALL_STEPS),
        }
    }

    fn renews(&self) -> bool {
        false
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
