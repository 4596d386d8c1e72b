//! The restore plan of one request: which boundary of its prompt to go on from, where the bytes before it come
//! from, and what is computed again, so that the first token comes soonest.
//!
//! **The pipeline.** Each way to bytes ([`Source`]) delivers what is asked of it in the order of the layers, and
//! all ways work at once. Layer `i` is computed when it has been loaded and layer `i - 1` is computed. So a load
//! costs nothing where computing takes longer, and what it costs beyond is a wait. An engine that computes nothing of
//! a request before all of it is loaded says so ([`Overlap::None`]): then the whole load is a wait. All layers are taken to be
//! computed in equal times: what a spec knows of a layer is its bytes, not its operations.
//!
//! **What may be chosen.** A boundary; for each run of blocks of a part one of the sources that have it; for parts
//! that are good for one boundary (windows, states, tails) whether they are loaded or rebuilt by running their
//! tokens again; for streams that can be rebuilt, the same for each run. What the model does without
//! ([`Absence::Recompute`] of no tokens) is left out unless it is in device memory already. A part that is
//! [`Absence::Required`] is loaded or the boundary is not used. Rules of presence and cost are those of
//! [`kvarts_layout::prefix`], where a replay from a complete boundary is the same as going on from that boundary.
//!
//! **What it answers.** With `C(c)` the time of a prefill of which `c` tokens are there already:
//! `benefit = C_prefill - C_load - C_recompute - C_stall`, where `C_prefill` is what the boundary spares, `H - C(b)`,
//! `C_load` the wait for the first layer, `C_stall` the waits for the others, and `C_recompute` the time of tokens
//! that are run again. `H` is the least time to the first token with what is in device memory alone, which is `C(0)` where nothing
//! is there: what the caller has already is no gain. It is `H` less the time to the first token.
//!
//! The answer is the least there is ([`Plan::exact`]), unless there is more to try than the search may take steps: then it
//! is the best that was found by then.

mod answer;
mod measured;
mod pipeline;
mod search;
#[cfg(test)]
mod tests;
mod words;

use std::fmt;

use kvarts_layout::Group;
use kvarts_layout::prefix::{Absence, Need, WindowPolicy, expected_states, expected_window_blocks};
use serde::{Deserialize, Serialize};

pub use answer::{Action, Does, Plan};
pub use measured::MeasuredLink;
pub use words::Reason;

use crate::cost::Prefill;

/// The most parts of one question.
pub const MAX_PARTS: usize = 256;
/// The most layers.
pub const MAX_LAYERS: usize = 4096;
/// The most runs of one part.
pub const MAX_RUNS: usize = 1 << 16;
/// The most blocks of a prompt.
pub const MAX_BLOCKS: u32 = 1 << 24;

/// Where bytes are, the nearest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// In the device's memory: used where they are.
    Hbm,
    /// In the host's memory.
    Dram,
    /// On a disk of this node.
    Disk,
    /// In memory or on a disk of another node.
    Peer,
    /// In the cold tier.
    Cold,
}

impl Source {
    /// All of them, the nearest first.
    pub const ALL: [Self; 5] = [Self::Hbm, Self::Dram, Self::Disk, Self::Peer, Self::Cold];

    /// As it is shown.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hbm => "HBM",
            Self::Dram => "DRAM",
            Self::Disk => "disk",
            Self::Peer => "peer",
            Self::Cold => "cold",
        }
    }
}

/// A set of sources.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Sources(u8);

impl Sources {
    /// No source: the bytes are nowhere.
    pub const NONE: Self = Self(0);

    /// One source.
    pub const fn of(source: Source) -> Self {
        Self(1 << source as u8)
    }

    /// This set and one more.
    #[must_use]
    pub const fn and(self, source: Source) -> Self {
        Self(self.0 | 1 << source as u8)
    }

    /// What is in both.
    #[must_use]
    pub const fn both(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Whether it holds this one.
    pub const fn has(self, source: Source) -> bool {
        self.0 & (1 << source as u8) != 0
    }

    /// Whether it holds none.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many it holds.
    pub const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Its members, the nearest first.
    pub fn iter(self) -> impl Iterator<Item = Source> {
        Source::ALL.into_iter().filter(move |source| self.has(*source))
    }
}

/// One way to bytes, as it is now.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// From asking to the first byte on an idle way.
    pub latency_ms: f64,
    /// What it delivers a millisecond.
    pub bytes_per_ms: f64,
    /// What others have asked it for and not got: it comes first.
    #[serde(default)]
    pub outstanding_bytes: u64,
}

impl Link {
    /// A way without a queue, with its rate in GB (1e9 bytes) a second.
    pub fn gb_per_s(gigabytes: f64, latency_ms: f64) -> Self {
        Self { latency_ms, bytes_per_ms: gigabytes * 1e6, outstanding_bytes: 0 }
    }

    /// When the first byte of what is asked now arrives.
    pub fn wait_ms(&self) -> f64 {
        self.latency_ms + self.outstanding_bytes as f64 / self.bytes_per_ms
    }

    fn is_sound(&self) -> bool {
        self.latency_ms.is_finite()
            && self.latency_ms >= 0.0
            && self.bytes_per_ms.is_finite()
            && self.bytes_per_ms > 0.0
    }
}

/// The ways that there are. Device memory needs none.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Links([Option<Link>; Source::ALL.len()]);

impl Links {
    /// No way at all.
    pub const NONE: Self = Self([None; Source::ALL.len()]);

    /// These and one more, in place of an earlier one.
    #[must_use]
    pub fn with(mut self, source: Source, link: Link) -> Self {
        if let Some(place) = self.0.get_mut(source as usize) {
            *place = Some(link);
        }
        self
    }

    /// The way to a source.
    pub fn get(&self, source: Source) -> Option<&Link> {
        self.0.get(source as usize).and_then(Option::as_ref)
    }

    /// The sources that can be reached: device memory always.
    pub fn reached(&self) -> Sources {
        let known = Source::ALL.into_iter().filter(|source| self.get(*source).is_some());
        known.fold(Sources::of(Source::Hbm), Sources::and)
    }
}

/// Consecutive blocks of a part that are at the same places.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// The first block.
    pub from: u32,
    /// One behind the last.
    pub to: u32,
    /// Where they are.
    pub sources: Sources,
}

impl Run {
    /// The blocks that are there of a part of which `stored` leading blocks were written under this policy.
    pub fn kept(
        need: Need,
        policy: WindowPolicy,
        stored: u32,
        block_tokens: u32,
        sources: Sources,
    ) -> Vec<Self> {
        let blocks: Box<dyn Iterator<Item = u32>> = match (need, policy) {
            (Need::All, _) => return vec![Self { from: 0, to: stored, sources }],
            (Need::Last { tokens }, _) => {
                Box::new(expected_window_blocks(policy, tokens, stored, block_tokens))
            }
            (Need::At, _) => {
                let states = expected_states(policy, stored, block_tokens);
                Box::new(states.filter_map(|boundary| boundary.checked_sub(1)))
            }
        };
        let mut runs: Vec<Self> = Vec::new();
        for block in blocks {
            match runs.last_mut() {
                Some(run) if run.to == block => run.to = block.saturating_add(1),
                _ => runs.push(Self { from: block, to: block.saturating_add(1), sources }),
            }
        }
        runs
    }
}

/// One part of a model's state: what a boundary needs of it, how large it is, where it is.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The group it is kept in.
    pub group: Group,
    /// Which blocks a boundary needs.
    pub need: Need,
    /// What it costs that they are absent.
    pub absence: Absence,
    /// Bytes of one block in each layer, in the order in which layers are computed.
    pub layer_bytes: &'a [u64],
    /// Where its blocks are: in order and apart. Blocks in none are absent.
    pub runs: &'a [Run],
}

/// What an engine computes of a request while its blocks are being loaded.
///
/// Engines that load by whole blocks are [`None`](Self::None): what is computed behind a boundary looks at every block before it, in
/// its first layer already. That they compute for others meanwhile brings this request's first token no sooner.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Overlap {
    /// Each layer is computed as soon as it is loaded, and so are those before.
    #[default]
    Layers,
    /// Nothing, until everything is loaded.
    None,
}

/// What a plan is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Tokens of the prompt. At least the last one is computed.
    pub prompt_tokens: u64,
    /// The parts.
    pub parts: &'a [Part<'a>],
    /// The ways to bytes, as they are now.
    pub links: &'a Links,
    /// What is computed while others of its bytes are loaded.
    pub overlap: Overlap,
}

/// Why a question cannot be answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PlanError {
    /// Blocks of no tokens.
    BlockTokens,
    /// A prompt of no tokens.
    NoPrompt,
    /// More than [`MAX_BLOCKS`] blocks.
    TooLong,
    /// More than [`MAX_PARTS`] parts, [`MAX_LAYERS`] layers or [`MAX_RUNS`] runs.
    TooMany(&'static str),
    /// A part has another number of layers than the first one.
    Layers(Group),
    /// Runs of a part that are empty, out of order or overlap.
    Runs(Group),
    /// A way whose latency or rate is no sound number.
    Link(Source),
    /// Prefill times that are negative or no numbers.
    Prefill,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BlockTokens => write!(f, "block_tokens is 0: set it to at least 1"),
            Self::NoPrompt => write!(f, "the prompt has no tokens"),
            Self::TooLong => write!(f, "the prompt has more than {MAX_BLOCKS} blocks"),
            Self::TooMany(what) => write!(f, "the request has too many {what}: use several requests"),
            Self::Layers(group) => {
                write!(f, "group {group} has a different number of layers than the first group")
            }
            Self::Runs(group) => write!(f, "the runs of group {group} are empty, not sorted, or overlap"),
            Self::Link(source) => {
                write!(
                    f,
                    "the path to {} has a speed that is not valid: the latency must be at least 0 and \
                    the rate above 0",
                    source.name()
                )
            }
            Self::Prefill => write!(f, "the prefill times are negative or not finite"),
        }
    }
}

impl std::error::Error for PlanError {}

impl Question<'_> {
    /// The plan that brings the first token soonest; of equal ones that with the longest boundary.
    pub fn plan(&self, prefill: &dyn Prefill) -> Result<Plan, PlanError> {
        self.check()?;
        let mut plan = search::Search::new(self, prefill)?.run()?;
        let held = Question { links: &Links::NONE, ..*self };
        if held.parts.iter().all(search::may_begin_in_device_memory) {
            plan.is_against(search::Search::new(&held, prefill)?.run()?.ttft_ms);
        }
        Ok(plan)
    }

    /// Layers of the model: none where no part is asked for.
    fn layers(&self) -> usize {
        self.parts.first().map_or(0, |part| part.layer_bytes.len())
    }

    /// Blocks of the longest boundary before the prompt's last token.
    fn blocks(&self) -> u32 {
        let blocks = self.prompt_tokens.saturating_sub(1).checked_div(u64::from(self.block_tokens));
        u32::try_from(blocks.unwrap_or(0)).unwrap_or(u32::MAX)
    }

    fn check(&self) -> Result<(), PlanError> {
        if self.block_tokens == 0 {
            return Err(PlanError::BlockTokens);
        }
        if self.prompt_tokens == 0 {
            return Err(PlanError::NoPrompt);
        }
        if self.blocks() > MAX_BLOCKS {
            return Err(PlanError::TooLong);
        }
        if self.parts.len() > MAX_PARTS {
            return Err(PlanError::TooMany("parts"));
        }
        if self.layers() > MAX_LAYERS {
            return Err(PlanError::TooMany("layers"));
        }
        for part in self.parts {
            if part.layer_bytes.len() != self.layers() {
                return Err(PlanError::Layers(part.group));
            }
            if part.runs.len() > MAX_RUNS {
                return Err(PlanError::TooMany("runs"));
            }
            let apart = part.runs.iter().zip(part.runs.iter().skip(1)).all(|(one, next)| one.to <= next.from);
            if !apart || part.runs.iter().any(|run| run.from >= run.to) {
                return Err(PlanError::Runs(part.group));
            }
        }
        let unsound = |source: &Source| self.links.get(*source).is_some_and(|link| !link.is_sound());
        match Source::ALL.into_iter().find(unsound) {
            Some(source) => Err(PlanError::Link(source)),
            None => Ok(()),
        }
    }
}
