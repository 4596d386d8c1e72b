//! What a model requires of a block boundary: the bridge from a model spec to [`crate::prefix`].
//!
//! One requirement for each group that stores anything in blocks of the size asked for, in the order of the
//! groups. What is needed of it follows from its class and from what the writer keeps:
//!
//! | class | writer keeps | needed at a boundary | what a block of the group holds |
//! |---|---|---|---|
//! | stream | always everything | every block before it | its piece ([`shape`](super::Geometry::shape)) |
//! | window | [`WindowPolicy::Full`] | the blocks that cover the window | its own tokens ([`window_stream_shape`](super::Geometry::window_stream_shape)) |
//! | window | anything less | the block that ends there | the whole window ([`shape`](super::Geometry::shape)) |
//! | state | any | the block that ends there | the whole state ([`shape`](super::Geometry::shape)) |
//!
//! Blocks of a store are cut by `shape` alone, whatever their writer keeps: what is asked of a store is
//! [`ModelSpec::stored_requirements`]. Windows with their own tokens alone are for planning what could be kept.
//!
//! Its absence costs what the worst of its parts costs, parts that store nothing at this block size left out:
//! a tail that is empty at every boundary of such blocks is never missed.

use std::fmt;

use crate::prefix::{Need, Requirement, Requirements, RequirementsError, WindowPolicy};

use super::{GroupGeometry, ModelSpec, RoleClass, SpecError};

/// Why a model has no requirements at such blocks and ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequireError {
    /// Blocks of this many tokens are not possible, or a group does not split over the number of ranks.
    Spec(SpecError),
    /// More groups or coordinates than one lookup may ask for.
    Limit(RequirementsError),
}

impl fmt::Display for RequireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Spec(error) => error.fmt(f),
            Self::Limit(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for RequireError {}

impl ModelSpec {
    /// What every one of `ranks` tensor-parallel ranks together requires of a boundary of blocks that are stored: of windows and
    /// states the one block that ends there has all. Which boundaries have one is the writer's policy, and is seen in the store.
    pub fn stored_requirements(&self, block_tokens: u32, ranks: u16) -> Result<Requirements, RequireError> {
        // What a block holds and which blocks are needed is the same of every policy but the one that keeps windows as streams.
        self.requirements(block_tokens, WindowPolicy::Zero, ranks)
    }

    /// What every one of `ranks` tensor-parallel ranks together requires of a boundary, where blocks have
    /// `block_tokens` tokens and the writer keeps windows and states by `policy`. Answers are exact for that
    /// policy only: what a block of a window group holds depends on it (see the module's table).
    pub fn requirements(
        &self,
        block_tokens: u32,
        policy: WindowPolicy,
        ranks: u16,
    ) -> Result<Requirements, RequireError> {
        self.geometry().check_block_tokens(block_tokens).map_err(RequireError::Spec)?;
        let mut requirements = Vec::new();
        for group in self.geometry().groups() {
            let Some(absence) = self.group_absence(group.group, block_tokens) else { continue };
            requirements.push(Requirement {
                group: group.group,
                coordinates: self.geometry().coordinates(group.group, ranks).map_err(RequireError::Spec)?,
                need: need(group, policy),
                absence,
            });
        }
        Requirements::new(block_tokens, requirements).map_err(RequireError::Limit)
    }
}

fn need(group: &GroupGeometry, policy: WindowPolicy) -> Need {
    match (group.class, policy) {
        (RoleClass::Stream, _) => Need::All,
        (RoleClass::Window, WindowPolicy::Full) => Need::Last { tokens: group.window_tokens },
        (RoleClass::Window, WindowPolicy::Periodic { .. } | WindowPolicy::Zero) => Need::At,
        (RoleClass::State, _) => Need::At,
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::Coordinate;
    use crate::coord::TpError;
    use crate::ids::Group;
    use crate::prefix::Absence;
    use crate::prefix::{Recompute, UNLIMITED, UsablePrefix, expected_states, expected_window_blocks};
    use crate::spec::shipped;

    const STREAMS: Group = Group(0);
    const WINDOWS: Group = Group(1);
    const STATES: Group = Group(2);

    fn periodic(tokens: u32) -> WindowPolicy {
        WindowPolicy::Periodic { tokens: NonZeroU32::new(tokens).unwrap() }
    }

    fn policies() -> [WindowPolicy; 3] {
        [WindowPolicy::Full, periodic(1024), WindowPolicy::Zero]
    }

    fn require(name: &str, block_tokens: u32, policy: WindowPolicy, ranks: u16) -> Requirements {
        shipped::load(name).unwrap().requirements(block_tokens, policy, ranks).unwrap()
    }

    /// Streams of the first `blocks` blocks, and what a writer of this policy keeps of windows and states.
    fn written(
        requirements: &Requirements,
        policy: WindowPolicy,
        blocks: u32,
        window: u32,
    ) -> Vec<(Group, u32)> {
        let size = requirements.block_tokens();
        let windows: Vec<u32> = match policy {
            WindowPolicy::Full => expected_window_blocks(policy, window, blocks, size).collect(),
            _ => expected_states(policy, blocks, size).map(|boundary| boundary - 1).collect(),
        };
        let states = expected_states(policy, blocks, size).map(|boundary| (STATES, boundary - 1));
        let streams = (0..blocks).map(|block| (STREAMS, block));
        streams.chain(windows.into_iter().map(|block| (WINDOWS, block))).chain(states).collect()
    }

    fn usable(requirements: &Requirements, blocks: u32, limit: u64, there: &[(Group, u32)]) -> UsablePrefix {
        requirements.usable_prefix(blocks, limit, |block, group, _| there.contains(&(group, block)))
    }

    /// Blocks and cost of the longest boundary.
    fn longest(requirements: &Requirements, blocks: u32, limit: u64, there: &[(Group, u32)]) -> (u32, u64) {
        let longest = usable(requirements, blocks, limit, there).longest;
        (longest.blocks, longest.recompute_tokens)
    }

    #[test]
    fn llama_restores_its_leading_blocks_whatever_the_policy() {
        for policy in policies() {
            let requirements = require("llama-3.1-8b", 256, policy, 1);
            let expected = Requirement {
                group: STREAMS,
                coordinates: vec![Coordinate::heads(0, 8, 8).unwrap()],
                need: Need::All,
                absence: Absence::Required,
            };
            assert_eq!(requirements.groups(), [expected]);
            let there: Vec<_> = [0, 1, 2, 3, 4, 5, 6, 8, 9].map(|block| (STREAMS, block)).to_vec();
            assert_eq!(longest(&requirements, 10, UNLIMITED, &there), (7, 0));
        }
    }

    #[test]
    fn a_block_that_one_of_eight_ranks_lacks_ends_the_prefix() {
        let requirements = require("llama-3.1-8b", 16, WindowPolicy::Full, 8);
        assert_eq!(requirements.groups()[0].coordinates.len(), 8);
        let lacking = Coordinate::heads(5, 1, 8).unwrap();
        let found = requirements.usable_prefix(6, UNLIMITED, |block, _, at| (block, at) != (3, lacking));
        assert_eq!((found.longest.blocks, found.longest.tokens), (3, 48));
    }

    #[test]
    fn gpt_oss_with_full_windows_needs_the_last_128_tokens() {
        let policy = WindowPolicy::Full;
        let requirements = require("gpt-oss-20b", 64, policy, 1);
        let windows = &requirements.groups()[1];
        assert_eq!(
            (windows.need, windows.absence),
            (Need::Last { tokens: 128 }, Absence::Recompute { tokens: 1536 })
        );
        let mut there = written(&requirements, policy, 10, 128);
        assert_eq!(longest(&requirements, 10, 0, &there), (10, 0));
        // Blocks of 64: the window at boundary b is in blocks b-2 and b-1. Without block 7, boundaries 8 and 9
        // are one and two blocks past the last complete one.
        there.retain(|&place| place != (WINDOWS, 7));
        assert_eq!(longest(&requirements, 9, 0, &there), (7, 0));
        assert_eq!(longest(&requirements, 9, UNLIMITED, &there), (9, 128));
        assert_eq!(longest(&requirements, 10, 0, &there), (10, 0));
    }

    #[test]
    fn gpt_oss_with_periodic_windows_goes_on_from_the_last_kept_one() {
        let policy = periodic(1024);
        let requirements = require("gpt-oss-20b", 256, policy, 1);
        assert_eq!(requirements.groups()[1].need, Need::At);
        let there = written(&requirements, policy, 10, 128);
        // 1024 tokens are 4 blocks: windows at 4 and 8.
        assert_eq!(longest(&requirements, 10, 255, &there), (8, 0));
        assert_eq!(longest(&requirements, 10, 256, &there), (9, 256));
        assert_eq!(longest(&requirements, 10, UNLIMITED, &there), (10, 512));
        // With the window at 4 alone: 6 blocks of replay are 1536 tokens, no less than 12 windows of 128.
        let early: Vec<_> = there.into_iter().filter(|&place| place != (WINDOWS, 7)).collect();
        assert_eq!(longest(&requirements, 10, UNLIMITED, &early), (10, 1536));
        assert_eq!(longest(&requirements, 10, 1279, &early), (8, 1024));
    }

    #[test]
    fn gpt_oss_without_windows_replays_twelve_of_them_or_the_whole_prefix() {
        let policy = WindowPolicy::Zero;
        let requirements = require("gpt-oss-20b", 256, policy, 1);
        let there = written(&requirements, policy, 10, 128);
        let found = usable(&requirements, 10, UNLIMITED, &there);
        assert_eq!((found.longest.tokens, found.longest.saved_tokens()), (2560, 1024));
        assert_eq!(found.longest.recompute, [Recompute { group: WINDOWS, tokens: 1536 }]);
        assert_eq!(found.cheapest, found.longest);
        // Below 1536 tokens only boundaries that cost all they save are left.
        assert_eq!(longest(&requirements, 10, 1535, &there), (5, 1280));
        assert_eq!(usable(&requirements, 10, 1535, &there).cheapest.blocks, 0);
    }

    #[test]
    fn qwen3_next_is_restored_only_where_a_state_was_kept() {
        for (policy, expected) in [(WindowPolicy::Full, 10), (periodic(1024), 8), (WindowPolicy::Zero, 0)] {
            let requirements = require("qwen3-next-80b", 256, policy, 1);
            let [streams, states] = requirements.groups() else { panic!("streams and states") };
            assert_eq!((streams.group, states.group, states.need), (STREAMS, STATES, Need::At));
            assert_eq!(states.absence, Absence::Required);
            let there = written(&requirements, policy, 10, 0);
            assert_eq!(longest(&requirements, 10, UNLIMITED, &there), (expected, 0));
        }
    }

    #[test]
    fn qwen3_next_over_four_ranks_shares_two_kv_heads_and_splits_sixteen_state_heads() {
        let requirements = require("qwen3-next-80b", 256, WindowPolicy::Full, 4);
        let counts: Vec<usize> = requirements.groups().iter().map(|group| group.coordinates.len()).collect();
        assert_eq!(counts, [2, 4]);
    }

    #[test]
    fn deepseek_v4_with_everything_kept_costs_nothing_and_a_lost_state_a_replay() {
        let policy = WindowPolicy::Full;
        let requirements = require("deepseek-v4-pro", 256, policy, 8);
        let [_, windows, states] = requirements.groups() else { panic!("three groups") };
        assert_eq!(windows.need, Need::Last { tokens: 128 });
        // 61 windows of 128; the tail of 8 tokens on top. The tail of 128 is empty at every multiple of 128.
        assert_eq!(windows.absence, Absence::Recompute { tokens: 7808 });
        assert_eq!(states.absence, Absence::Recompute { tokens: 7816 });
        assert_eq!(states.coordinates, [Coordinate::Replicated]);
        let mut there = written(&requirements, policy, 40, 128);
        assert_eq!(longest(&requirements, 40, 0, &there), (40, 0));
        there.retain(|&place| place != (STATES, 39));
        assert_eq!(longest(&requirements, 40, 0, &there), (39, 0));
        let found = usable(&requirements, 40, UNLIMITED, &there);
        assert_eq!(found.longest.recompute, [Recompute { group: STATES, tokens: 256 }]);
    }

    #[test]
    fn deepseek_v4_with_periodic_windows_replays_from_the_last_kept_boundary() {
        let policy = periodic(4096);
        let requirements = require("deepseek-v4-pro", 256, policy, 1);
        let there = written(&requirements, policy, 40, 128);
        // 4096 tokens are 16 blocks: kept at 16 and 32; 8 blocks past that are 2048 tokens.
        assert_eq!(longest(&requirements, 40, 0, &there), (32, 0));
        assert_eq!(longest(&requirements, 40, UNLIMITED, &there), (40, 2048));
    }

    #[test]
    fn deepseek_v4_without_windows_replays_61_of_them_and_a_tail() {
        let policy = WindowPolicy::Zero;
        let requirements = require("deepseek-v4-pro", 256, policy, 1);
        let there = written(&requirements, policy, 40, 128);
        let found = usable(&requirements, 40, UNLIMITED, &there);
        assert_eq!((found.longest.tokens, found.longest.recompute_tokens), (10_240, 7816));
        let expected =
            [Recompute { group: WINDOWS, tokens: 7808 }, Recompute { group: STATES, tokens: 7816 }];
        assert_eq!(found.longest.recompute, expected);
        // 30 blocks are 7680 tokens, 31 are 7936: past the limit, which the replay of 7816 is too.
        assert_eq!(longest(&requirements, 40, 7815, &there), (30, 7680));
        assert_eq!(usable(&requirements, 40, 7815, &there).cheapest.blocks, 0);
    }

    const TAILS: &str = r#"
        name = "tails"
        source = "a test"
        block_tokens = 128
        layers = [{ of = ["all"] }]
        [layer]
        all = ["main", "tail"]
        [part.main]
        kind = "hca"
        role = "stream"
        bytes = 584
        dtype = "fp8"
        [part.tail]
        kind = "compressor_tail"
        role = "state"
        bytes = 4096
        empty_at_multiple_of = 128
        dtype = "fp32"
    "#;

    #[test]
    fn a_group_that_stores_nothing_at_this_block_size_is_not_required() {
        let spec = ModelSpec::parse(TAILS).unwrap();
        let groups = |block_tokens| -> Vec<Group> {
            let requirements = spec.requirements(block_tokens, WindowPolicy::Full, 1).unwrap();
            requirements.groups().iter().map(|requirement| requirement.group).collect()
        };
        assert_eq!(groups(128), [STREAMS]);
        assert_eq!(groups(256), [STREAMS]);
        assert_eq!(groups(64), [STREAMS, STATES]);
    }

    #[test]
    fn of_a_stored_window_the_block_that_ends_at_a_boundary_is_all_that_is_needed() {
        // Windows of 1,024 tokens in blocks of 256: a block has a whole one, not the quarter that its own tokens are.
        let spec = shipped::load("gemma-3-27b").unwrap();
        let requirements = spec.stored_requirements(256, 1).unwrap();
        let windows = requirements.groups().iter().find(|one| one.group == WINDOWS).unwrap();
        assert_eq!(windows.need, Need::At);
        let coordinate = spec.geometry().coordinate(WINDOWS, 1, 0).unwrap();
        let bytes = |shape: crate::BlockShape| shape.block_bytes();
        let whole = bytes(spec.geometry().shape(WINDOWS, coordinate, 256).unwrap());
        let own = bytes(spec.geometry().window_stream_shape(WINDOWS, coordinate, 256).unwrap());
        assert_eq!(whole, 4 * own);
        let mut there: Vec<(Group, u32)> = (0..8).map(|block| (STREAMS, block)).collect();
        there.push((WINDOWS, 7));
        assert_eq!(longest(&requirements, 8, 0, &there), (8, 0));
    }

    #[test]
    fn every_shipped_model_has_requirements_and_impossible_questions_have_errors() {
        for spec in shipped::names().map(|name| shipped::load(name).unwrap()) {
            for policy in policies() {
                let requirements = spec.requirements(spec.default_block_tokens(), policy, 1).unwrap();
                assert!(requirements.groups().iter().any(|group| group.need == Need::All), "{}", spec.name());
            }
        }
        let ask = |name, block_tokens, ranks| {
            shipped::load(name).unwrap().requirements(block_tokens, WindowPolicy::Full, ranks).unwrap_err()
        };
        let uneven = TpError::Uneven { heads: 8, ranks: 3 };
        assert_eq!(ask("llama-3.1-8b", 16, 3), RequireError::Spec(SpecError::from(uneven)));
        let error = SpecError::BlockTokens { block_tokens: 64, multiple_of: 128 };
        assert_eq!(ask("deepseek-v4-pro", 64, 1), RequireError::Spec(error));
        let no_ranks = RequireError::Spec(SpecError::from(TpError::NoRanks));
        assert_eq!(ask("llama-3.1-8b", 16, 0), no_ranks);
    }
}
