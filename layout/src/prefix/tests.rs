//! The one-pass answer against the definition read word by word, and the four kinds of model told as stories.

use super::*;
use proptest::collection::vec;
use proptest::prelude::*;
use std::num::NonZeroU32;

const WHOLE: [Coordinate; 1] = [Coordinate::Replicated];

fn requirement(group: u32, need: Need, absence: Absence) -> Requirement {
    Requirement { group: Group(group), coordinates: WHOLE.to_vec(), need, absence }
}

/// The definition, in the order in which the module tells it, with no thought of speed.
struct Naive<'a> {
    requirements: &'a Requirements,
    present: &'a dyn Fn(u32, Group, Coordinate) -> bool,
}

impl Naive<'_> {
    fn block_is_there(&self, requirement: &Requirement, block: u32) -> bool {
        requirement.coordinates.iter().all(|&coordinate| (self.present)(block, requirement.group, coordinate))
    }

    fn needed(&self, need: Need, boundary: u32) -> Vec<u32> {
        let block_tokens = u64::from(self.requirements.block_tokens);
        match need {
            Need::All => (0..boundary).collect(),
            Need::Last { tokens } => {
                let end = u64::from(boundary) * block_tokens;
                let wanted = |token: u64| token < end && token + u64::from(tokens) >= end;
                let holds_one = |block: &u32| {
                    let start = u64::from(*block) * block_tokens;
                    (start..start + block_tokens).any(wanted)
                };
                (0..boundary).filter(holds_one).collect()
            }
            Need::At => boundary.checked_sub(1).into_iter().collect(),
        }
    }

    fn absent(&self, requirement: &Requirement, boundary: u32) -> u64 {
        let needed = self.needed(requirement.need, boundary);
        needed.iter().filter(|&&block| !self.block_is_there(requirement, block)).count() as u64
    }

    fn is_complete(&self, boundary: u32) -> bool {
        self.requirements.groups.iter().all(|requirement| self.absent(requirement, boundary) == 0)
    }

    fn boundary(&self, boundary: u32) -> Option<Boundary> {
        let block_tokens = u64::from(self.requirements.block_tokens);
        let tokens = u64::from(boundary) * block_tokens;
        let complete = (0..=boundary).rev().find(|&earlier| self.is_complete(earlier)).unwrap();
        let replay = u64::from(boundary - complete) * block_tokens;
        let mut recompute = Vec::new();
        let (mut streams, mut ends) = (0u128, 0u128);
        for requirement in &self.requirements.groups {
            let absent = self.absent(requirement, boundary);
            if absent == 0 {
                continue;
            }
            let Absence::Recompute { tokens: stated } = requirement.absence else { return None };
            let stated = match requirement.need {
                Need::All => u128::from(stated) * u128::from(absent),
                Need::Last { .. } | Need::At => u128::from(stated),
            };
            let cost = stated.min(u128::from(replay));
            recompute.push(Recompute { group: requirement.group, tokens: cost as u64 });
            match requirement.need {
                Need::All => streams += cost,
                Need::Last { .. } | Need::At => ends = ends.max(cost),
            }
        }
        let recompute_tokens = (streams + ends).min(u128::from(replay)) as u64;
        Some(Boundary { blocks: boundary, tokens, recompute, recompute_tokens })
    }

    fn usable_prefix(&self, blocks: u32, limit: u64) -> UsablePrefix {
        let usable: Vec<Boundary> = (0..=blocks)
            .filter_map(|boundary| self.boundary(boundary))
            .filter(|boundary| boundary.recompute_tokens <= limit)
            .collect();
        let mut cheapest = usable[0].clone();
        for boundary in &usable {
            if boundary.tokens - boundary.recompute_tokens > cheapest.tokens - cheapest.recompute_tokens {
                cheapest = boundary.clone();
            }
        }
        let mut coverage = Vec::new();
        for requirement in &self.requirements.groups {
            for &coordinate in &requirement.coordinates {
                let there = |&block: &u32| (self.present)(block, requirement.group, coordinate);
                let leading = (0..blocks).take_while(there).count() as u32;
                coverage.push(Coverage { group: requirement.group, coordinate, blocks: leading });
            }
        }
        UsablePrefix { longest: usable.last().unwrap().clone(), cheapest, coverage }
    }
}

fn needs() -> impl Strategy<Value = Need> {
    prop_oneof![Just(Need::All), (1u32..40).prop_map(|tokens| Need::Last { tokens }), Just(Need::At)]
}

fn absences() -> impl Strategy<Value = Absence> {
    let recompute = prop_oneof![0u64..60, Just(u64::MAX)].prop_map(|tokens| Absence::Recompute { tokens });
    prop_oneof![Just(Absence::Required), recompute]
}

fn models() -> impl Strategy<Value = Requirements> {
    let group = (1u16..4, needs(), absences());
    (1u32..12, vec(group, 1..5)).prop_map(|(block_tokens, groups)| {
        let groups = groups.into_iter().enumerate().map(|(index, (ranks, need, absence))| Requirement {
            group: Group(index as u32 * 7),
            coordinates: crate::coord::coordinates(ranks * 2, ranks).unwrap(),
            need,
            absence,
        });
        Requirements::new(block_tokens, groups.collect()).unwrap()
    })
}

/// What is there: long runs with few gaps, as a store has them, or anything at all.
fn presence() -> impl Strategy<Value = Vec<bool>> {
    prop_oneof![
        vec(prop::bool::weighted(0.9), 64..400),
        vec(prop::bool::weighted(0.98), 64..400),
        vec(any::<bool>(), 64..400)
    ]
}

fn check(requirements: &Requirements, blocks: u32, limit: u64, bits: &[bool]) -> Result<(), TestCaseError> {
    let groups = &requirements.groups;
    let present = |block: u32, group: Group, coordinate: Coordinate| {
        let index = groups.iter().position(|requirement| requirement.group == group).unwrap();
        let part = groups[index].coordinates.iter().position(|other| *other == coordinate).unwrap();
        bits[(block as usize * 12 + index * 3 + part) % bits.len()]
    };
    let expected = Naive { requirements, present: &present }.usable_prefix(blocks, limit);
    prop_assert_eq!(requirements.usable_prefix(blocks, limit, present), expected);
    Ok(())
}

proptest! {
    #[test]
    fn any_model_is_answered_as_defined(
        requirements in models(),
        blocks in 0u32..32,
        limit in prop_oneof![Just(UNLIMITED), 0u64..100],
        bits in presence(),
    ) {
        check(&requirements, blocks, limit, &bits)?;
    }

    #[test]
    fn models_as_they_are_built_are_answered_as_defined(
        kind in 0usize..4,
        blocks in 0u32..32,
        limit in prop_oneof![Just(UNLIMITED), 0u64..300],
        bits in presence(),
    ) {
        let requirements = match kind {
            0 => plain(16),
            1 => sliding_window(16, 40, Absence::Required),
            2 => recurrent(16),
            _ => deepseek_v4(16, 8, 96),
        };
        check(&requirements, blocks, limit, &bits)?;
    }
}

fn plain(block_tokens: u32) -> Requirements {
    Requirements::new(block_tokens, vec![requirement(0, Need::All, Absence::Required)]).unwrap()
}

fn sliding_window(block_tokens: u32, window: u32, absence: Absence) -> Requirements {
    let full = requirement(0, Need::All, Absence::Required);
    Requirements::new(block_tokens, vec![full, requirement(1, Need::Last { tokens: window }, absence)])
        .unwrap()
}

fn recurrent(block_tokens: u32) -> Requirements {
    let full = requirement(0, Need::All, Absence::Required);
    let state = requirement(1, Need::At, Absence::Recompute { tokens: u64::MAX });
    Requirements::new(block_tokens, vec![full, state]).unwrap()
}

/// Compressed streams are all needed; windows and compressor tails are rebuilt by window x layers tokens.
fn deepseek_v4(block_tokens: u32, window: u32, rebuild: u64) -> Requirements {
    let absence = Absence::Recompute { tokens: rebuild };
    let groups = vec![
        requirement(0, Need::All, Absence::Required),
        requirement(1, Need::All, Absence::Required),
        requirement(2, Need::Last { tokens: window }, absence),
        requirement(3, Need::At, absence),
    ];
    Requirements::new(block_tokens, groups).unwrap()
}

#[test]
fn a_plain_model_uses_the_blocks_before_the_first_gap() {
    let answer = plain(16).usable_prefix(100, UNLIMITED, |block, _, _| block != 40);
    assert_eq!((answer.longest.blocks, answer.longest.tokens), (40, 640));
    assert_eq!(answer.longest, answer.cheapest);
    assert_eq!(answer.coverage[0].blocks, 40);
}

#[test]
fn a_prefix_is_as_long_as_its_shortest_coordinate() {
    let coordinates = crate::coord::coordinates(8, 2).unwrap();
    let [first, second] = coordinates[..] else { panic!("two ranks") };
    let mut both = requirement(0, Need::All, Absence::Required);
    both.coordinates = coordinates;
    let requirements = Requirements::new(16, vec![both]).unwrap();
    let answer =
        requirements.usable_prefix(10, UNLIMITED, |block, _, part| block < if part == first { 7 } else { 5 });
    assert_eq!(answer.longest.blocks, 5);
    let coverage: Vec<_> =
        answer.coverage.iter().map(|covered| (covered.coordinate, covered.blocks)).collect();
    assert_eq!(coverage, [(first, 7), (second, 5)]);
}

#[test]
fn a_required_window_that_was_trimmed_leaves_its_last_whole_boundary() {
    let requirements = sliding_window(16, 40, Absence::Required);
    // The window needs three blocks; only those that end at boundaries 6 and 7 are left.
    let answer = requirements
        .usable_prefix(10, UNLIMITED, |block, group, _| group == Group(0) || (3..7).contains(&block));
    assert_eq!(answer.longest.blocks, 7);
    // Near the start fewer blocks are needed.
    let answer = requirements.usable_prefix(10, UNLIMITED, |block, group, _| group == Group(0) || block < 2);
    assert_eq!(answer.longest.blocks, 2);
    let answer = requirements.usable_prefix(10, UNLIMITED, |block, group, _| group == Group(0) || block == 2);
    assert_eq!(answer.longest.blocks, 0);
}

#[test]
fn a_recurrent_model_replays_from_its_last_snapshot() {
    let requirements = recurrent(16);
    let answer = requirements.usable_prefix(10, UNLIMITED, |block, group, _| group == Group(0) || block == 5);
    assert_eq!(answer.longest.blocks, 10);
    assert_eq!(answer.longest.recompute, [Recompute { group: Group(1), tokens: 64 }]);
    assert_eq!(answer.cheapest.blocks, 6, "what the replay adds it costs again");
    assert_eq!(answer.cheapest.saved_tokens(), 96);
    let limited = requirements.usable_prefix(10, 20, |block, group, _| group == Group(0) || block == 5);
    assert_eq!((limited.longest.blocks, limited.longest.recompute_tokens), (7, 16));
}

#[test]
fn a_replay_starts_only_where_every_group_is_complete() {
    let requirements = deepseek_v4(16, 8, u64::MAX);
    // The window is there at boundary 4, the tail at boundary 6, both at boundary 2.
    let answer = requirements.usable_prefix(8, UNLIMITED, |block, group, _| match group {
        Group(2) => block == 3 || block == 1,
        Group(3) => block == 5 || block == 1,
        _ => true,
    });
    assert_eq!(answer.longest.blocks, 8);
    assert_eq!(answer.longest.recompute_tokens, 96, "from boundary 2");
    assert_eq!(answer.cheapest.blocks, 2);
}

/// The three policies on one model: windows of 8 tokens, worth 12 blocks of replay when they are absent.
#[test]
fn each_window_policy_has_its_price() {
    let requirements = deepseek_v4(16, 8, 192);
    let answer = |policy: WindowPolicy| {
        let windows: Vec<u32> = expected_window_blocks(policy, 8, 30, 16).collect();
        let states: Vec<u32> = expected_states(policy, 30, 16).collect();
        requirements.usable_prefix(30, UNLIMITED, |block, group, _| match group {
            Group(2) => windows.contains(&block),
            Group(3) => states.contains(&(block + 1)),
            _ => true,
        })
    };
    let cost = |policy| {
        let answer = answer(policy);
        (answer.longest.blocks, answer.longest.recompute_tokens, answer.cheapest.blocks)
    };
    assert_eq!(cost(WindowPolicy::Full), (30, 0, 30));
    // Kept at boundaries 8, 16 and 24: six blocks of 16 tokens are replayed.
    assert_eq!(cost(WindowPolicy::Periodic { tokens: NonZeroU32::new(128).unwrap() }), (30, 96, 24));
    assert_eq!(cost(WindowPolicy::Zero), (30, 192, 30));
    let zero = answer(WindowPolicy::Zero);
    assert_eq!(zero.longest.recompute.len(), 2, "window and tail share one replay");
}

#[test]
fn an_optional_stream_costs_nothing_and_is_named() {
    let draft = requirement(4, Need::All, Absence::Recompute { tokens: 0 });
    let requirements =
        Requirements::new(16, vec![requirement(0, Need::All, Absence::Required), draft]).unwrap();
    let answer = requirements.usable_prefix(9, 0, |_, group, _| group == Group(0));
    assert_eq!((answer.longest.blocks, answer.longest.recompute_tokens), (9, 0));
    assert_eq!(answer.longest.recompute, [Recompute { group: Group(4), tokens: 0 }]);
}

#[test]
fn holes_of_streams_add_up_and_add_to_the_replay() {
    let groups = vec![
        requirement(0, Need::All, Absence::Recompute { tokens: 16 }),
        requirement(1, Need::All, Absence::Recompute { tokens: 5 }),
        requirement(2, Need::At, Absence::Recompute { tokens: 20 }),
        requirement(3, Need::At, Absence::Recompute { tokens: 30 }),
    ];
    let requirements = Requirements::new(16, groups).unwrap();
    let present = |block: u32, group: Group, _| match group {
        Group(0) => block != 1 && block != 3,
        Group(1) => block != 2,
        _ => block < 1,
    };
    let longest = requirements.usable_prefix(20, UNLIMITED, present).longest;
    assert_eq!(longest.blocks, 20);
    assert_eq!(longest.recompute.iter().map(|each| each.tokens).collect::<Vec<_>>(), [32, 5, 20, 30]);
    assert_eq!(longest.recompute_tokens, 32 + 5 + 30);
}

#[test]
fn nothing_is_asked_once_the_answer_cannot_change() {
    let mut asked = 0;
    let requirements = sliding_window(16, 40, Absence::Recompute { tokens: 0 });
    let answer = requirements.usable_prefix(4096, UNLIMITED, |block, _, _| {
        asked += 1;
        block < 3
    });
    assert_eq!((answer.longest.blocks, asked), (3, 8));
}

#[test]
fn no_blocks_and_the_longest_of_prompts_are_answered() {
    assert_eq!(plain(16).usable_prefix(0, 0, |_, _, _| true).longest, Boundary::default());
    let state = requirement(0, Need::At, Absence::Recompute { tokens: u64::MAX });
    let stream = requirement(1, Need::All, Absence::Recompute { tokens: u64::MAX });
    let requirements = Requirements::new(u32::MAX, vec![state, stream]).unwrap();
    let answer = requirements.usable_prefix(1000, UNLIMITED, |_, _, _| false);
    assert_eq!(answer.longest.recompute_tokens, 1000 * u64::from(u32::MAX));
    assert_eq!(answer.cheapest, Boundary::default());
}

#[test]
fn requirements_that_make_no_sense_are_refused() {
    let good = requirement(3, Need::All, Absence::Required);
    let refused = |groups: Vec<Requirement>| Requirements::new(16, groups).unwrap_err();
    assert_eq!(Requirements::new(0, vec![good.clone()]), Err(RequirementsError::BlockTokens));
    assert_eq!(refused(vec![]), RequirementsError::NoGroups);
    assert_eq!(refused(vec![good.clone(), good.clone()]), RequirementsError::RepeatedGroup(Group(3)));
    let many = (0..=MAX_GROUPS as u32).map(|group| requirement(group, Need::At, Absence::Required)).collect();
    assert_eq!(refused(many), RequirementsError::TooManyGroups);
    let coordinates = |coordinates: Vec<Coordinate>| Requirement { coordinates, ..good.clone() };
    assert_eq!(refused(vec![coordinates(vec![])]), RequirementsError::NoCoordinates(Group(3)));
    let repeated = RequirementsError::RepeatedCoordinate(Group(3), Coordinate::Replicated);
    assert_eq!(refused(vec![coordinates(vec![Coordinate::Replicated; 2])]), repeated);
    let many = vec![Coordinate::Replicated; MAX_COORDINATES + 1];
    assert_eq!(refused(vec![coordinates(many)]), RequirementsError::TooManyCoordinates(Group(3)));
    let window = requirement(3, Need::Last { tokens: 0 }, Absence::Required);
    assert_eq!(refused(vec![window]), RequirementsError::EmptyWindow(Group(3)));
}
