//! A plan: what is done with each run of blocks, what that takes and gains.

use std::fmt;

use kvarts_layout::Group;
use serde::Serialize;

use super::words::Reason;
use super::{Source, Sources};

/// What is done with some blocks of a part.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Does {
    /// They are used where they are, in device memory.
    Use,
    /// They are loaded.
    Load(Source),
    /// They are rebuilt by running tokens again.
    Recompute,
    /// The model does without.
    LeaveOut,
}

impl fmt::Display for Does {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Use => f.write_str("use from HBM"),
            Self::Load(source) => write!(f, "load from {}", source.name()),
            Self::Recompute => f.write_str("recompute"),
            Self::LeaveOut => f.write_str("leave out"),
        }
    }
}

/// One step of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Action {
    /// The part's group.
    #[serde(serialize_with = "group_number")]
    pub group: Group,
    /// The first block.
    pub from: u32,
    /// One behind the last.
    pub to: u32,
    /// What is done with them.
    pub does: Does,
    /// Their bytes.
    pub bytes: u64,
}

fn group_number<S: serde::Serializer>(group: &Group, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u32(group.0)
}

/// The answer to a [`Question`](super::Question). The module says what the times are.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Plan {
    /// Blocks before the boundary from which the prompt goes on; 0 for none.
    pub boundary_blocks: u32,
    /// Tokens before it.
    pub boundary_tokens: u64,
    /// What is done with what lies before it, by part and block.
    pub actions: Vec<Action>,
    /// Tokens that are run again before the boundary.
    pub recompute_tokens: u64,
    /// Tokens behind the boundary, which are computed in any case.
    pub new_tokens: u64,
    /// The wait for the first layer.
    pub load_ms: f64,
    /// The time of the tokens that are run again.
    pub recompute_ms: f64,
    /// The waits for the other layers.
    pub stall_ms: f64,
    /// The time of all that is computed, tokens that are run again among it.
    pub compute_ms: f64,
    /// When the last byte has arrived.
    pub transfer_ms: f64,
    /// To the first token.
    pub ttft_ms: f64,
    /// To the first token with nothing restored.
    pub from_nothing_ms: f64,
    /// To the first token with what is in device memory alone: `from_nothing_ms` where nothing is.
    pub held_ms: f64,
    /// What is gained: `held_ms` less `ttft_ms`. Never below zero.
    pub benefit_ms: f64,
    /// Why it is this boundary.
    pub reason: Reason,
    /// Whether there is certainly no better plan.
    pub exact: bool,
    /// Plans and bounds whose time was counted: the work.
    pub looked_at: u64,
}

impl Plan {
    /// It gains what it is sooner than this.
    pub(super) fn is_against(&mut self, held_ms: f64) {
        self.held_ms = held_ms;
        self.benefit_ms = (held_ms - self.ttft_ms).max(0.0);
    }

    /// Bytes that are loaded from a source, or used there if it is device memory.
    pub fn bytes_from(&self, source: Source) -> u64 {
        let here = |does: Does| match does {
            Does::Use => source == Source::Hbm,
            Does::Load(from) => from == source,
            Does::Recompute | Does::LeaveOut => false,
        };
        self.actions.iter().filter(|action| here(action.does)).map(|action| action.bytes).sum()
    }

    /// Whether it loads nothing, from wherever.
    pub fn loads_nothing(&self) -> bool {
        !self.actions.iter().any(|action| matches!(action.does, Does::Load(_)))
    }

    /// The sources that it uses.
    pub fn sources(&self) -> Sources {
        let used = Source::ALL.into_iter().filter(|source| self.bytes_from(*source) > 0);
        used.fold(Sources::NONE, Sources::and)
    }
}
