//! Which block goes first: a policy ranks.
//!
//! A policy owns nothing and is told of nothing. What it ranks by is what the index keeps of each block in
//! 16 bits, so a use costs one store and no policy can make the index larger. The rules that hold for every policy are
//! kept outside: leases and pins, blocks behind others of their record, coordinates and groups of one block (`choose`,
//! `batch`).

/// What a policy knows of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Candidate {
    /// Steps since its last use: a [`STEPS_PER_BUDGET`](super::recency::STEPS_PER_BUDGET)th of the budget each.
    pub age: u32,
    /// Uses since it was put, up to 3.
    pub frequency: u8,
    /// The last block of its record, as far as is known with nothing behind it: where prompts turn off.
    pub tip: bool,
    /// Not used since it was put, though blocks before it in its record were: who came back went another way.
    pub passed: bool,
    /// State that is good for one boundary only, not for what follows.
    pub boundary: bool,
    /// How much a byte of it costs to compute again, as a power of two against the usual: above 0 for more.
    pub cost: i8,
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
}

impl EvictionPolicy {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Weighted, Self::Lru];

    /// As it is written in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weighted => "weighted",
            Self::Lru => "lru",
        }
    }

    /// The policy of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|policy| policy.name() == name)
    }

    /// How early a block goes: the higher, the earlier.
    pub fn rank(self, block: &Candidate) -> u32 {
        match self {
            Self::Weighted => weighted(block),
            Self::Lru => block.age,
        }
    }

    /// The age at which a block of which nothing is known but its age has this rank.
    pub(crate) fn age_of(self, rank: u32) -> u32 {
        match self {
            Self::Weighted => rank / 16,
            Self::Lru => rank,
        }
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
fn weighted(block: &Candidate) -> u32 {
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

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
