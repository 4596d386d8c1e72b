//! Usable prefix: how much of a prompt can be restored from what is there, and what must be run again for it.
//!
//! A lookup does not answer "hit" or "miss". Models mix groups that need every block (attention over all
//! tokens), the last few (a sliding window), or one state at exactly the boundary (recurrent layers,
//! compressor tails), and engines keep each kind for a different time. The answer is a *block boundary* `b`,
//! the end of the first `b` blocks, at which every group's need is met or can be rebuilt.
//!
//! **Presence.** Block `i` holds the tokens `[i * block_tokens, (i + 1) * block_tokens)`. The state valid at
//! boundary `b` is part of block `b - 1`. Nothing is needed at boundary 0.
//!
//! **Cost.** A boundary where every need is met is *complete*; boundary 0 always is. A need that is not met at
//! `b` costs tokens that the model runs again before it goes on at `b`:
//!
//! - what the requirement itself states ([`Absence::Recompute`]), or
//! - the tokens from the last complete boundary before `b`, replayed; whichever is less.
//!
//! Replays start only where *every* group is complete: one group's state at an earlier boundary is of no use
//! while another group's window before that boundary is gone. All replays end at `b`, so groups share one and
//! what the boundary costs is the greatest of them, not the sum. The holes of a stream lie anywhere in the
//! prefix and share nothing: they are added up, and added to the replay. Nothing ever costs more than a replay
//! from the last complete boundary, hence never more than the boundary's own tokens.
//!
//! The work is one pass over blocks x groups x coordinates; nothing is allocated per block.

use crate::coord::Coordinate;
use crate::ids::Group;
use std::fmt;

mod policy;
#[cfg(test)]
mod tests;

pub use policy::{
    BYTES_PER_SECOND, TOKENS_PER_SECOND, WindowPolicy, expected_states, expected_window_blocks,
};

/// The most groups one model may require.
pub const MAX_GROUPS: usize = 256;
/// The most coordinates one lookup may ask for in one group.
pub const MAX_COORDINATES: usize = 4096;
/// A `limit_tokens` that no cost reaches.
pub const UNLIMITED: u64 = u64::MAX;

/// Which blocks of a group a boundary `b` needs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Need {
    /// Every block before it: a stream that is attended to as a whole.
    All,
    /// The blocks that cover the last `tokens` tokens before it, fewer near the start: a window kept as a
    /// stream.
    Last {
        /// Tokens of the window, at least one.
        tokens: u32,
    },
    /// The state valid at exactly this boundary, which is part of block `b - 1`.
    At,
}

/// What it costs that a need is not met, the worst last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Absence {
    /// It can be rebuilt by running `tokens` tokens again: those that end at the boundary, or for [`Need::All`]
    /// that many for each absent block, wherever it lies. 0 means that the engine does without (a draft
    /// model's cache); `u64::MAX` that there is no shorter way than a replay from a complete boundary. One
    /// replay rebuilds everything whose cost it covers: of several costs the largest counts.
    Recompute {
        /// Tokens to run again.
        tokens: u64,
    },
    /// The boundary cannot be used.
    Required,
}

/// What one group requires of a boundary.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Requirement {
    /// The group.
    pub group: Group,
    /// The coordinates that the caller wants. A block counts as there if it is there at all of them.
    pub coordinates: Vec<Coordinate>,
    /// Which blocks are needed.
    pub need: Need,
    /// What it costs if they are absent.
    pub absence: Absence,
}

/// What all groups of a model require. Within its limits by construction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Requirements {
    block_tokens: u32,
    groups: Vec<Requirement>,
}

/// Why a list of requirements cannot be answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequirementsError {
    /// Blocks of no tokens.
    BlockTokens,
    /// No group.
    NoGroups,
    /// More than [`MAX_GROUPS`] groups.
    TooManyGroups,
    /// A group without coordinates.
    NoCoordinates(Group),
    /// A group with more than [`MAX_COORDINATES`] coordinates.
    TooManyCoordinates(Group),
    /// A group that is listed twice.
    RepeatedGroup(Group),
    /// A group that lists a coordinate twice.
    RepeatedCoordinate(Group, Coordinate),
    /// A window of no tokens.
    EmptyWindow(Group),
}

impl fmt::Display for RequirementsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BlockTokens => write!(f, "block_tokens is 0: set it to at least 1"),
            Self::NoGroups => write!(f, "the list of groups is empty: give at least one group"),
            Self::TooManyGroups => write!(
                f,
                "the request has more than {MAX_GROUPS} groups: merge groups \
                with the same requirements"
            ),
            Self::NoCoordinates(group) => write!(f, "group {group} has no coordinates: use `replicated`"),
            Self::TooManyCoordinates(group) => {
                write!(f, "group {group} has more than {MAX_COORDINATES} coordinates: use several requests")
            }
            Self::RepeatedGroup(group) => write!(f, "group {group} is listed twice: merge its coordinates"),
            Self::RepeatedCoordinate(group, coordinate) => {
                write!(f, "group {group} has {coordinate} twice: give each coordinate once")
            }
            Self::EmptyWindow(group) => {
                write!(f, "group {group} has a window of 0 tokens: leave the group out")
            }
        }
    }
}

impl std::error::Error for RequirementsError {}

/// A group whose need is not met at a boundary, and what rebuilding it takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recompute {
    /// The group.
    pub group: Group,
    /// Tokens to run again for it alone; 0 where the engine does without.
    pub tokens: u64,
}

/// A block boundary that can be restored.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Boundary {
    /// Blocks before it.
    pub blocks: u32,
    /// Tokens before it.
    pub tokens: u64,
    /// The groups whose need is not met there, in the order of the requirements.
    pub recompute: Vec<Recompute>,
    /// Tokens to run again in all: every group of `recompute` is rebuilt by no more than these.
    pub recompute_tokens: u64,
}

impl Boundary {
    /// Tokens that need not be run because of this boundary.
    pub fn saved_tokens(&self) -> u64 {
        self.tokens.saturating_sub(self.recompute_tokens)
    }
}

/// How many blocks from the start are there without a gap, for one group and coordinate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Coverage {
    /// The group.
    pub group: Group,
    /// The coordinate.
    pub coordinate: Coordinate,
    /// Leading blocks that are there.
    pub blocks: u32,
}

/// The answer to a lookup.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UsablePrefix {
    /// The longest boundary whose cost is within the limit. Where needs may be rebuilt by replay it can cost
    /// all it saves: a caller that is free to choose takes `cheapest`.
    pub longest: Boundary,
    /// The boundary within the limit that saves the most tokens, the shortest of several.
    pub cheapest: Boundary,
    /// Leading blocks by group and coordinate, in the order of the requirements: what explains a short answer.
    pub coverage: Vec<Coverage>,
}

impl Requirements {
    /// Checks every limit named in this module.
    pub fn new(block_tokens: u32, groups: Vec<Requirement>) -> Result<Self, RequirementsError> {
        if block_tokens == 0 {
            return Err(RequirementsError::BlockTokens);
        }
        if groups.is_empty() {
            return Err(RequirementsError::NoGroups);
        }
        if groups.len() > MAX_GROUPS {
            return Err(RequirementsError::TooManyGroups);
        }
        let mut seen = std::collections::BTreeSet::new();
        for requirement in &groups {
            let group = requirement.group;
            if !seen.insert(group) {
                return Err(RequirementsError::RepeatedGroup(group));
            }
            check_coordinates(group, &requirement.coordinates)?;
            if requirement.need == (Need::Last { tokens: 0 }) {
                return Err(RequirementsError::EmptyWindow(group));
            }
        }
        Ok(Self { block_tokens, groups })
    }

    /// Tokens in one block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// What each group requires.
    pub fn groups(&self) -> &[Requirement] {
        &self.groups
    }

    /// The usable prefix of a prompt of `blocks` full blocks, of which `present(block, group, coordinate)` says
    /// what is there. A boundary that costs more than `limit_tokens` is not used ([`UNLIMITED`]: any cost will
    /// do). `present` is asked in the order of the blocks, at most once for each block, group and coordinate,
    /// and no more once no later boundary can be used and no coverage can grow.
    pub fn usable_prefix(
        &self,
        blocks: u32,
        limit_tokens: u64,
        mut present: impl FnMut(u32, Group, Coordinate) -> bool,
    ) -> UsablePrefix {
        let mut scans: Vec<Scan> =
            self.groups.iter().map(|group| Scan::new(group, self.block_tokens)).collect();
        let mut coverage: Vec<Coverage> = self.groups.iter().flat_map(no_coverage).collect();
        let mut longest = Candidate::new(self.groups.len());
        let mut cheapest = longest.clone();
        let mut complete = 0u32;
        for block in 0..blocks {
            let boundary = block.saturating_add(1);
            let mut growing = false;
            let mut leading = coverage.iter_mut();
            for scan in &mut scans {
                let requirement = scan.requirement;
                let mut everywhere = true;
                for (coordinate, covered) in requirement.coordinates.iter().zip(leading.by_ref()) {
                    let here = present(block, requirement.group, *coordinate);
                    everywhere &= here;
                    if here && covered.blocks == block {
                        covered.blocks = boundary;
                        growing = true;
                    }
                }
                scan.advance(boundary, everywhere);
            }
            if scans.iter().all(|scan| scan.met) {
                complete = boundary;
            }
            if let Some(cost) = price(&mut scans, self.tokens(boundary.saturating_sub(complete))) {
                let saved = self.tokens(boundary).saturating_sub(cost);
                if cost <= limit_tokens {
                    longest.set(boundary, cost, &scans);
                    if saved > self.tokens(cheapest.blocks).saturating_sub(cheapest.cost) {
                        cheapest.set(boundary, cost, &scans);
                    }
                }
            }
            if !growing && scans.iter().any(Scan::is_lost) {
                break;
            }
        }
        UsablePrefix { longest: self.boundary(&longest), cheapest: self.boundary(&cheapest), coverage }
    }

    /// Two factors of 32 bits: the product fits.
    fn tokens(&self, blocks: u32) -> u64 {
        u64::from(blocks).saturating_mul(u64::from(self.block_tokens))
    }

    fn boundary(&self, candidate: &Candidate) -> Boundary {
        let unmet = self.groups.iter().zip(&candidate.costs);
        let recompute = unmet
            .filter_map(|(group, cost)| cost.map(|tokens| Recompute { group: group.group, tokens }))
            .collect();
        Boundary {
            blocks: candidate.blocks,
            tokens: self.tokens(candidate.blocks),
            recompute,
            recompute_tokens: candidate.cost,
        }
    }
}

fn check_coordinates(group: Group, coordinates: &[Coordinate]) -> Result<(), RequirementsError> {
    if coordinates.is_empty() {
        return Err(RequirementsError::NoCoordinates(group));
    }
    if coordinates.len() > MAX_COORDINATES {
        return Err(RequirementsError::TooManyCoordinates(group));
    }
    let mut seen = std::collections::BTreeSet::new();
    match coordinates.iter().find(|coordinate| !seen.insert(**coordinate)) {
        Some(coordinate) => Err(RequirementsError::RepeatedCoordinate(group, *coordinate)),
        None => Ok(()),
    }
}

fn no_coverage(requirement: &Requirement) -> impl Iterator<Item = Coverage> + '_ {
    let group = requirement.group;
    requirement.coordinates.iter().map(move |&coordinate| Coverage { group, coordinate, blocks: 0 })
}

/// A boundary that can be used, with what each unmet group costs there (`None` where the need is met).
#[derive(Clone)]
struct Candidate {
    blocks: u32,
    cost: u64,
    costs: Vec<Option<u64>>,
}

impl Candidate {
    fn new(groups: usize) -> Self {
        Self { blocks: 0, cost: 0, costs: vec![None; groups] }
    }

    fn set(&mut self, blocks: u32, cost: u64, scans: &[Scan<'_>]) {
        self.blocks = blocks;
        self.cost = cost;
        for (slot, scan) in self.costs.iter_mut().zip(scans) {
            *slot = scan.cost;
        }
    }
}

/// One requirement while the blocks go by.
struct Scan<'a> {
    requirement: &'a Requirement,
    /// Blocks that a window covers.
    window_blocks: u32,
    /// Blocks absent so far.
    holes: u64,
    /// Blocks present without a gap up to here.
    streak: u32,
    /// Whether the need is met at the boundary that was reached last.
    met: bool,
    /// What the need costs there, `None` if it is met.
    cost: Option<u64>,
}

impl<'a> Scan<'a> {
    fn new(requirement: &'a Requirement, block_tokens: u32) -> Self {
        let window_blocks = match requirement.need {
            // A block has at least one token: checked when the requirements were built.
            Need::Last { tokens } => tokens.div_ceil(block_tokens.max(1)),
            Need::All | Need::At => 0,
        };
        Self { requirement, window_blocks, holes: 0, streak: 0, met: true, cost: None }
    }

    fn advance(&mut self, boundary: u32, here: bool) {
        self.holes = self.holes.saturating_add(u64::from(!here));
        self.streak = if here { self.streak.saturating_add(1) } else { 0 };
        self.met = match self.requirement.need {
            Need::All => self.holes == 0,
            Need::Last { .. } => self.streak >= self.window_blocks.min(boundary),
            Need::At => here,
        };
    }

    /// True once no later boundary can be used for lack of this group.
    fn is_lost(&self) -> bool {
        self.requirement.need == Need::All && self.requirement.absence == Absence::Required && self.holes > 0
    }
}

/// What the boundary costs in all, given the replay from the last complete one, or `None` if it cannot be used.
/// Leaves each group's own cost in its scan.
fn price(scans: &mut [Scan<'_>], replay: u64) -> Option<u64> {
    let mut holes = 0u64;
    let mut rerun = 0u64;
    for scan in scans {
        scan.cost = None;
        if scan.met {
            continue;
        }
        let Absence::Recompute { tokens } = scan.requirement.absence else { return None };
        let stated =
            if scan.requirement.need == Need::All { tokens.saturating_mul(scan.holes) } else { tokens };
        let cost = stated.min(replay);
        scan.cost = Some(cost);
        if scan.requirement.need == Need::All {
            holes = holes.saturating_add(cost);
        } else {
            rerun = rerun.max(cost);
        }
    }
    Some(holes.saturating_add(rerun).min(replay))
}
