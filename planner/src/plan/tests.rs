//! Plans agree with a search that tries every plan, follow the rules of prefixes, say why, and cost little to find.
use super::*;
use crate::cost::{Kind, Roofline, Told, device, model};
use kvarts_layout::Coordinate;
use kvarts_layout::prefix::{Requirement, Requirements, UNLIMITED};
use proptest::prelude::*;

/// Milliseconds a step, a new token, and a pair.
#[derive(Debug, Clone, Copy)]
struct Formula(f64, f64, f64);

impl Prefill for Formula {
    fn prefill_ms(&self, cached: u64, new: u64) -> f64 {
        let (cached, new) = (cached as f64, new as f64);
        self.0 + self.1 * new + self.2 * new * (cached + new / 2.0)
    }
    fn least_ms(&self, prompt: u64, cached: u64) -> f64 {
        self.prefill_ms(cached, prompt - cached) * (1.0 - 1e-12)
    }
    fn told(&self) -> Told {
        Told { kind: Kind::Roofline, samples: 0, error: None, error_max: None }
    }
}

fn run(from: u32, to: u32, sources: &[Source]) -> Run {
    Run { from, to, sources: sources.iter().fold(Sources::NONE, |all, one| all.and(*one)) }
}

fn stream<'a>(layer_bytes: &'a [u64], runs: &'a [Run]) -> Part<'a> {
    Part { group: Group(0), need: Need::All, absence: Absence::Required, layer_bytes, runs }
}

fn ask(parts: &[Part<'_>], links: &Links, prompt_tokens: u64, prefill: &dyn Prefill) -> Plan {
    Question { block_tokens: 16, prompt_tokens, parts, links, overlap: Overlap::Layers }
        .plan(prefill)
        .unwrap()
}

#[test]
fn a_load_that_is_faster_than_computing_hides_behind_it() {
    // Ten layers of 100 bytes a block; 1000 bytes a ms from disk: 0.1 ms a layer for ten blocks... of 1 ms each.
    let (bytes, runs) = ([100; 10], [run(0, 10, &[Source::Disk])]);
    let links =
        Links::NONE.with(Source::Disk, Link { latency_ms: 0.5, bytes_per_ms: 1000.0, outstanding_bytes: 0 });
    let plan = ask(&[stream(&bytes, &runs)], &links, 161 + 160, &Formula(0.0, 0.2, 0.0));
    assert_eq!((plan.boundary_blocks, plan.boundary_tokens, plan.new_tokens), (10, 160, 161));
    assert_eq!(plan.bytes_from(Source::Disk), 10_000);
    // The first layer is there after the latency and 1000 bytes; the other nine while layers are computed (3.22 ms each).
    assert!((plan.load_ms - 1.5).abs() < 1e-9 && plan.stall_ms.abs() < 1e-9, "{plan:?}");
    assert!((plan.transfer_ms - 10.5).abs() < 1e-9);
    assert!((plan.ttft_ms - (1.5 + 32.2)).abs() < 1e-9);
    assert!((plan.benefit_ms - (64.2 - 33.7)).abs() < 1e-9);
    assert_eq!(plan.reason.to_string(), "all stored blocks are restored");
    assert!(plan.exact);
}

#[test]
fn a_load_that_would_be_slower_than_recomputing_is_said_to_be_so() {
    let (bytes, runs) = ([1000; 4], [run(0, 10, &[Source::Cold])]);
    let links =
        Links::NONE.with(Source::Cold, Link { latency_ms: 50.0, bytes_per_ms: 100.0, outstanding_bytes: 0 });
    let plan = ask(&[stream(&bytes, &runs)], &links, 161, &Formula(0.0, 0.1, 0.0));
    assert_eq!((plan.boundary_blocks, plan.bytes_from(Source::Cold)), (0, 0));
    assert_eq!(plan.benefit_ms, 0.0);
    assert_eq!(
        plan.reason.to_string(),
        "a load is slower than computing: 450.0 ms to the first token with 160 tokens restored, 16.1 ms with none"
    );
}

/// The guide's first example: 70B on four H100, 12 GB/s, 28,672 of 32,768 tokens stored.
#[test]
fn an_engine_that_blocks_until_all_is_loaded_gets_the_best_plan_of_such_an_engine() {
    let roofline = Roofline::new(model("llama-3.1-70b").unwrap(), device("h100").unwrap(), 4);
    let (bytes, runs) = ([4096 * 256; 80], [run(0, 112, &[Source::Disk])]);
    let of = |overlap, rate| {
        let links = Links::NONE.with(Source::Disk, Link::gb_per_s(rate, 0.1));
        let parts = [stream(&bytes, &runs)];
        let question =
            Question { block_tokens: 256, prompt_tokens: 32_768, parts: &parts, links: &links, overlap };
        question.plan(&roofline).unwrap()
    };
    // Layers hide the end of what is stored behind computing it; where nothing is hidden all of it is loaded.
    let (layers, blocking) = (of(Overlap::Layers, 12.0), of(Overlap::None, 12.0));
    assert_eq!((layers.boundary_tokens, blocking.boundary_tokens), (26_368, 28_672));
    // What the plan of the one costs the other.
    let load = |plan: &Plan| 0.1 + plan.bytes_from(Source::Disk) as f64 / 12e6;
    let wrong = load(&layers) + layers.compute_ms;
    assert!(wrong - blocking.ttft_ms > 100.0, "{wrong} and {}", blocking.ttft_ms);
    assert!((blocking.load_ms - blocking.transfer_ms).abs() < 1e-9 && blocking.stall_ms == 0.0);
    assert!((blocking.ttft_ms - load(&blocking) - blocking.compute_ms).abs() < 1e-6, "{blocking:?}");
    // On a drive below break-even a part is free under computing, and worse than nothing where computing waits for it.
    let (layers, blocking) = (of(Overlap::Layers, 2.0), of(Overlap::None, 2.0));
    assert!(layers.boundary_tokens > 4096 && layers.benefit_ms > 0.0, "{layers:?}");
    assert_eq!((blocking.boundary_tokens, blocking.benefit_ms), (0, 0.0));
    assert!(matches!(blocking.reason, Reason::Slower { .. }), "{}", blocking.reason);
}

#[test]
fn only_the_beginning_is_loaded_where_a_queue_makes_the_rest_too_late() {
    let (bytes, runs) = ([100; 10], [run(0, 20, &[Source::Dram]), run(20, 40, &[Source::Disk])]);
    let busy = Link { latency_ms: 0.1, bytes_per_ms: 1000.0, outstanding_bytes: 1_000_000 };
    let links = Links::NONE.with(Source::Dram, Link::gb_per_s(20.0, 0.0)).with(Source::Disk, busy);
    let plan = ask(&[stream(&bytes, &runs)], &links, 650, &Formula(1.0, 0.1, 0.0));
    assert_eq!(plan.boundary_blocks, 20);
    assert!(matches!(plan.reason, Reason::Shorter { longest_tokens: 640, .. }), "{}", plan.reason);
    assert_eq!(plan.actions.len(), 1);
    assert_eq!(plan.actions[0].does, Does::Load(Source::Dram));
    assert!(plan.reason.to_string().starts_with("with a load up to token 640, "));
}

#[test]
fn a_window_is_loaded_or_replayed_whichever_is_sooner_and_a_draft_is_left_out() {
    let (streams, windows, draft) =
        ([run(0, 8, &[Source::Dram])], [run(7, 8, &[Source::Disk])], [run(0, 8, &[Source::Disk])]);
    let parts = |rate: f64| {
        let links = Links::NONE
            .with(Source::Dram, Link::gb_per_s(20.0, 0.0))
            .with(Source::Disk, Link { latency_ms: 0.0, bytes_per_ms: rate, outstanding_bytes: 0 });
        let window = Part {
            group: Group(1),
            need: Need::At,
            absence: Absence::Recompute { tokens: 20 },
            layer_bytes: &[1000; 2],
            runs: &windows,
        };
        let left = Part {
            group: Group(2),
            need: Need::All,
            absence: Absence::Recompute { tokens: 0 },
            layer_bytes: &[1000; 2],
            runs: &draft,
        };
        let plan = ask(&[stream(&[10; 2], &streams), window, left], &links, 140, &Formula(0.0, 1.0, 0.0));
        assert_eq!(plan.boundary_blocks, 8);
        (plan.actions.iter().map(|one| (one.group.0, one.does)).collect::<Vec<_>>(), plan.recompute_tokens)
    };
    let (fast, again) = parts(1e6);
    assert_eq!(again, 0);
    assert_eq!(fast, [(0, Does::Load(Source::Dram)), (2, Does::LeaveOut), (1, Does::Load(Source::Disk))]);
    let (slow, again) = parts(10.0);
    assert_eq!(again, 20);
    assert_eq!(slow, [(0, Does::Load(Source::Dram)), (2, Does::LeaveOut), (1, Does::Recompute)]);
}

/// vLLM holds a hybrid prefix of 100 blocks with its state at block 100; the disk has its streams alone.
#[test]
fn what_is_in_device_memory_is_used_with_its_state_and_is_no_gain() {
    let (hbm, disk) = ([Source::Hbm], [Source::Disk]);
    let (streams, held) = ([run(0, 100, &hbm), run(100, 120, &disk)], [run(99, 100, &hbm)]);
    let links = Links::NONE.with(Source::Disk, Link::gb_per_s(10.0, 0.1));
    let state = |runs| Part {
        group: Group(1),
        need: Need::At,
        absence: Absence::Recompute { tokens: 7808 },
        layer_bytes: &[1000; 2],
        runs,
    };
    let of =
        |runs| ask(&[stream(&[10; 2], &streams), state(runs)], &links, 16 * 125, &Formula(0.0, 1.0, 0.0));
    let plan = of(&held);
    assert_eq!((plan.boundary_blocks, plan.recompute_tokens), (100, 0), "{plan:?}");
    assert!((plan.held_ms - 25.0 * 16.0).abs() < 1e-9 && plan.from_nothing_ms > 1999.0);
    assert_eq!(plan.benefit_ms, 0.0, "the disk has nothing of use: {plan:?}");
    // Without the state nothing can be gone on from.
    assert_eq!(of(&[]).held_ms, 2000.0);
    // A state of the disk's further on is a gain over what is held, not over nothing.
    let both = [run(99, 100, &hbm), run(119, 120, &disk)];
    let plan = of(&both);
    assert_eq!(plan.boundary_blocks, 120);
    assert!((plan.benefit_ms - (400.0 - plan.ttft_ms)).abs() < 1e-9, "{plan:?}");
}

#[test]
fn what_is_missing_is_named() {
    let links = Links::NONE.with(Source::Disk, Link::gb_per_s(10.0, 0.0));
    let bytes = [10];
    let words =
        |runs: &[Run]| ask(&[stream(&bytes, runs)], &links, 161, &Formula(0.0, 1.0, 0.0)).reason.to_string();
    assert_eq!(words(&[]), "no block of the prompt is stored");
    assert_eq!(words(&[run(0, 10, &[Source::Peer])]), "no block of the prompt is stored", "no way to it");
    assert_eq!(
        words(&[run(1, 10, &[Source::Disk])]),
        "the prompt cannot be restored at any block boundary: group 0 lacks block 0"
    );
    assert_eq!(
        words(&[run(0, 4, &[Source::Disk]), run(5, 10, &[Source::Disk])]),
        "all usable blocks are restored; group 0 lacks block 4"
    );
    let state =
        Part { group: Group(7), need: Need::At, absence: Absence::Required, layer_bytes: &bytes, runs: &[] };
    let runs = [run(0, 10, &[Source::Disk])];
    let plan = ask(&[stream(&bytes, &runs), state], &links, 161, &Formula(0.0, 1.0, 0.0));
    assert_eq!(
        plan.reason.to_string(),
        "the prompt cannot be restored at any block boundary: group 7 lacks block 9"
    );
}

#[test]
fn questions_without_sense_are_refused() {
    let links =
        Links::NONE.with(Source::Disk, Link { latency_ms: 0.0, bytes_per_ms: 0.0, outstanding_bytes: 0 });
    let (bytes, overlap) = ([1], [run(0, 4, &[Source::Disk]), run(3, 5, &[Source::Disk])]);
    let refused = |block_tokens, prompt_tokens, parts: &[Part<'_>], links: &Links| {
        Question { block_tokens, prompt_tokens, parts, links, overlap: Overlap::Layers }
            .plan(&Formula(0.0, 1.0, 0.0))
            .unwrap_err()
    };
    let none = Links::NONE;
    assert_eq!(refused(0, 1, &[], &none), PlanError::BlockTokens);
    assert_eq!(refused(1, 0, &[], &none), PlanError::NoPrompt);
    assert_eq!(refused(1, u64::MAX, &[], &none), PlanError::TooLong);
    assert_eq!(refused(1, 9, &[stream(&bytes, &overlap)], &none), PlanError::Runs(Group(0)));
    assert_eq!(
        refused(1, 9, &[stream(&bytes, &[]), stream(&[1, 2], &[])], &none),
        PlanError::Layers(Group(0))
    );
    assert_eq!(
        refused(1, 9, &[], &links).to_string(),
        "the path to disk has a speed that is not valid: the latency must be at least 0 and the rate above 0"
    );
    let question =
        Question { block_tokens: 1, prompt_tokens: 3, parts: &[], links: &none, overlap: Overlap::Layers };
    assert_eq!(question.plan(&Formula(f64::NAN, 0.0, 0.0)), Err(PlanError::Prefill));
}

#[test]
fn the_work_of_a_plan_grows_with_the_number_of_halvings_and_not_with_the_blocks() {
    let roofline = Roofline::new(model("llama-3.1-8b").unwrap(), device("h100").unwrap(), 1);
    let bytes = [1 << 20; 32];
    let looked = |blocks: u32, rate: f64| {
        let runs = [run(0, blocks, &[Source::Disk])];
        let links = Links::NONE.with(Source::Disk, Link::gb_per_s(rate, 0.1));
        let prompt_tokens = u64::from(blocks) * 256 + 100;
        let question = Question {
            block_tokens: 256,
            prompt_tokens,
            parts: &[stream(&bytes, &runs)],
            links: &links,
            overlap: Overlap::Layers,
        };
        question.plan(&roofline).unwrap().looked_at
    };
    for rate in [0.5, 2.0, 4.0, 8.0, 50.0] {
        let (small, large) = (looked(1000, rate), looked(16_000, rate));
        assert!(small <= 150 && large <= small + 100, "{rate} GB/s: {small} and {large}");
    }
}

#[test]
fn the_work_of_a_plan_is_bounded_however_many_alternatives_and_holes_there_are() {
    let table = Formula(0.0, 0.001, 0.0);
    let links = Links::NONE.with(Source::Disk, Link::gb_per_s(0.001, 0.0));
    let broken: Vec<Run> = (0..20_000).map(|n| run(2 * n, 2 * n + 1, &[Source::Disk])).collect();
    let rebuilt = Part {
        group: Group(1),
        need: Need::All,
        absence: Absence::Recompute { tokens: 3 },
        layer_bytes: &[1000; 4],
        runs: &broken,
    };
    let whole = [run(0, 40_000, &[Source::Disk])];
    let plan = ask(&[stream(&[1000; 4], &whole), rebuilt], &links, 640_001, &table);
    assert!(!plan.exact);
    assert!(plan.looked_at <= 1 << 22, "{}", plan.looked_at);
    // No boundary can be used, which is seen at each of them.
    let states = Part { need: Need::At, absence: Absence::Required, runs: &[], ..rebuilt };
    let plan = ask(&[stream(&[1000; 4], &whole), states], &links, 640_001, &table);
    assert_eq!((plan.boundary_blocks, plan.benefit_ms), (0, 0.0));
}

#[test]
fn runs_that_several_have_beyond_what_can_be_tried_are_dealt_out_and_it_is_said() {
    let runs: Vec<Run> = (0..20).map(|n| run(n, n + 1, &[Source::Disk, Source::Peer])).collect();
    let links = Links::NONE
        .with(Source::Disk, Link { latency_ms: 0.0, bytes_per_ms: 10.0, outstanding_bytes: 0 })
        .with(Source::Peer, Link { latency_ms: 0.0, bytes_per_ms: 10.0, outstanding_bytes: 0 });
    let plan = ask(&[stream(&[100], &runs)], &links, 321, &Formula(0.0, 10.0, 0.0));
    assert!(!plan.exact);
    assert_eq!((plan.bytes_from(Source::Disk), plan.bytes_from(Source::Peer)), (1000, 1000));
    assert_eq!(plan.sources(), Sources::of(Source::Disk).and(Source::Peer));
}

#[test]
fn runs_are_what_the_writer_s_policy_keeps() {
    let kept = |need, policy| Run::kept(need, policy, 8, 16, Sources::of(Source::Disk));
    let periodic = WindowPolicy::Periodic { tokens: 64.try_into().unwrap() };
    assert_eq!(kept(Need::All, periodic), [run(0, 8, &[Source::Disk])]);
    assert_eq!(kept(Need::At, periodic), [run(3, 4, &[Source::Disk]), run(7, 8, &[Source::Disk])]);
    assert_eq!(
        kept(Need::Last { tokens: 20 }, periodic),
        [run(2, 4, &[Source::Disk]), run(6, 8, &[Source::Disk])]
    );
    assert!(kept(Need::At, WindowPolicy::Zero).is_empty());
}

#[derive(Debug, Clone)]
struct Case {
    parts: Vec<(Need, Absence, Vec<u64>, Vec<Run>)>,
    links: Links,
    prompt_tokens: u64,
    prefill: Formula,
    overlap: Overlap,
}

const BLOCK: u32 = 4;

fn cases() -> impl Strategy<Value = Case> {
    let need =
        prop_oneof![Just(Need::All), Just(Need::At), (1u32..9).prop_map(|tokens| Need::Last { tokens })];
    let absence = prop_oneof![
        2 => Just(Absence::Required),
        2 => (0u64..12).prop_map(|tokens| Absence::Recompute { tokens }),
        1 => Just(Absence::Recompute { tokens: u64::MAX }),
    ];
    let runs = prop::collection::vec((0u32..2, 1u32..4, 1u8..32), 0..3).prop_map(|raw| {
        let mut at = 0;
        raw.into_iter()
            .map(|(gap, len, mask)| {
                let from = at + gap;
                at = from + len;
                Run { from, to: at, sources: Sources(mask) }
            })
            .collect::<Vec<_>>()
    });
    let part = (need, absence, prop::collection::vec(0u64..300, 3), runs);
    let link = prop::option::of((0.0f64..5.0, 1.0f64..200.0, 0u64..300));
    (
        prop::collection::vec(part, 1..4),
        [link.clone(), link.clone(), link.clone(), link],
        1u64..34,
        (0.0f64..3.0, 0.01f64..2.0, 0.0f64..0.1),
        prop_oneof![Just(Overlap::Layers), Just(Overlap::None)],
    )
        .prop_map(|(parts, raw, prompt_tokens, (a, b, c), overlap)| {
            let mut links = Links::NONE;
            for (source, link) in Source::ALL.into_iter().skip(1).zip(raw) {
                if let Some((latency_ms, bytes_per_ms, outstanding_bytes)) = link {
                    links = links.with(source, Link { latency_ms, bytes_per_ms, outstanding_bytes });
                }
            }
            Case { parts, links, prompt_tokens, prefill: Formula(a, b, c), overlap }
        })
}

/// Tries everything that may be chosen, and counts the time layer by layer.
struct Everything<'a> {
    case: &'a Case,
    boundary: u32,
    /// What is to be decided: (part, blocks, sources, tokens that rebuild the run).
    open: Vec<(usize, u64, Vec<Source>, Option<u64>)>,
    /// Bytes by source and layer.
    bytes: [[f64; 3]; 5],
    holes: u64,
    replay: u64,
    least: f64,
}

impl Everything<'_> {
    fn go(&mut self, at: usize) {
        let Some((part, blocks, sources, tokens)) = self.open.get(at).cloned() else {
            self.least = self.least.min(self.time());
            return;
        };
        for source in sources {
            let layers = self.case.parts[part].2.clone();
            let before = self.bytes;
            for (sum, bytes) in self.bytes[source as usize].iter_mut().zip(&layers) {
                *sum += (bytes * blocks) as f64;
            }
            self.go(at + 1);
            self.bytes = before;
        }
        if let Some(tokens) = tokens {
            self.holes += tokens;
            self.go(at + 1);
            self.holes -= tokens;
        }
    }

    fn time(&self) -> f64 {
        let cached = u64::from(self.boundary * BLOCK);
        let cached = cached - (self.holes + self.replay).min(cached);
        let compute = self.case.prefill.prefill_ms(cached, self.case.prompt_tokens - cached);
        let mut now = 0.0f64;
        for layer in 0..3 {
            // What blocks has its first layer computed when the last one is there.
            let needed = if self.case.overlap == Overlap::None { 2 } else { layer };
            for source in Source::ALL {
                let Some(link) = self.case.links.get(source) else { continue };
                let upto: f64 = self.bytes[source as usize][..=needed].iter().sum();
                if upto > 0.0 {
                    now =
                        now.max(link.latency_ms + (link.outstanding_bytes as f64 + upto) / link.bytes_per_ms);
                }
            }
            now += compute / 3.0;
        }
        now
    }

    /// The least time with this boundary, over all subsets of boundary parts that are rebuilt.
    fn least(case: &Case, boundary: u32) -> f64 {
        let mut least = f64::INFINITY;
        'subsets: for rebuilt in 0u32..1 << case.parts.len() {
            let mut all =
                Everything { case, boundary, open: vec![], bytes: [[0.0; 3]; 5], holes: 0, replay: 0, least };
            for (place, (need, absence, _, runs)) in case.parts.iter().enumerate() {
                let stated = match absence {
                    Absence::Recompute { tokens: u64::MAX } | Absence::Required => None,
                    Absence::Recompute { tokens } => Some(*tokens),
                };
                let from = match need {
                    Need::All => 0,
                    Need::At => boundary.saturating_sub(1),
                    Need::Last { tokens } => boundary.saturating_sub(tokens.div_ceil(BLOCK)),
                };
                if *need != Need::All && boundary > 0 && rebuilt & 1 << place != 0 {
                    match stated {
                        Some(tokens) => all.replay = all.replay.max(tokens),
                        None => continue 'subsets,
                    }
                    continue;
                }
                let mut here = 0;
                for one in runs {
                    let (low, high) = (one.from.max(from), one.to.min(boundary));
                    let reached: Vec<Source> = one
                        .sources
                        .iter()
                        .filter(|source| *source == Source::Hbm || case.links.get(*source).is_some())
                        .collect();
                    if low < high && !reached.is_empty() {
                        let blocks = u64::from(high - low);
                        here += high - low;
                        let again = stated.filter(|_| *need == Need::All).map(|tokens| tokens * blocks);
                        all.open.push((place, blocks, reached, again));
                    }
                }
                let absent = u64::from(boundary - from - here);
                if absent > 0 {
                    match stated {
                        Some(tokens) if *need == Need::All => all.holes += tokens * absent,
                        _ => continue 'subsets,
                    }
                }
            }
            all.go(0);
            least = least.min(all.least);
        }
        least
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn whoever_tries_everything_finds_nothing_sooner(case in cases()) {
        let parts: Vec<Part<'_>> = case.parts.iter().enumerate().map(|(n, (need, absence, bytes, runs))| Part {
            group: Group(n as u32), need: *need, absence: *absence, layer_bytes: bytes, runs,
        }).collect();
        let question = Question { block_tokens: BLOCK, prompt_tokens: case.prompt_tokens, parts: &parts, links: &case.links, overlap: case.overlap };
        let plan = question.plan(&case.prefill).unwrap();
        let blocks = ((case.prompt_tokens - 1) / u64::from(BLOCK)) as u32;
        let least = (0..=blocks).map(|boundary| Everything::least(&case, boundary)).fold(f64::INFINITY, f64::min);
        prop_assert!((plan.ttft_ms - least).abs() < 1e-6 * least.max(1.0), "{plan:?}: {least}");
        prop_assert!(plan.exact);
        // What it says adds up.
        let from_nothing = case.prefill.prefill_ms(0, case.prompt_tokens);
        prop_assert!((plan.from_nothing_ms - from_nothing).abs() < 1e-6);
        let none = Case { links: Links::NONE, ..case.clone() };
        let held = (0..=blocks).map(|boundary| Everything::least(&none, boundary)).fold(f64::INFINITY, f64::min);
        prop_assert!((plan.held_ms - held).abs() < 1e-6 * held.max(1.0), "{plan:?}: {held}");
        let spared = held - case.prefill.prefill_ms(plan.boundary_tokens, plan.new_tokens);
        let benefit = spared - plan.load_ms - plan.recompute_ms - plan.stall_ms;
        prop_assert!((plan.benefit_ms - benefit).abs() < 1e-6, "{plan:?}: {benefit}");
        prop_assert!(plan.benefit_ms >= 0.0 && plan.transfer_ms <= plan.ttft_ms + 1e-9);
        // Actions cover what the boundary needs of each stream, once.
        for (part, (need, ..)) in parts.iter().zip(&case.parts) {
            let mut next = 0;
            for action in plan.actions.iter().filter(|action| action.group == part.group && *need == Need::All) {
                prop_assert_eq!(action.from, next);
                next = action.to;
            }
            prop_assert!(*need != Need::All || next == plan.boundary_blocks);
        }
    }

    /// With ways that take no time a plan has the boundary that saves most by the rules of prefixes.
    #[test]
    fn where_loading_is_free_a_plan_saves_what_the_usable_prefix_does(case in cases()) {
        let free = Link { latency_ms: 0.0, bytes_per_ms: 1e30, outstanding_bytes: 0 };
        let links = Source::ALL.into_iter().fold(Links::NONE, |links, source| links.with(source, free));
        let parts: Vec<Part<'_>> = case.parts.iter().enumerate().map(|(n, (need, absence, bytes, runs))| Part {
            group: Group(n as u32), need: *need, absence: *absence, layer_bytes: bytes, runs,
        }).collect();
        let question = Question { block_tokens: BLOCK, prompt_tokens: case.prompt_tokens, parts: &parts, links: &links, overlap: case.overlap };
        let plan = question.plan(&Formula(0.0, 1.0, 0.0)).unwrap();
        let groups = parts.iter().map(|part| Requirement {
            group: part.group, coordinates: vec![Coordinate::Replicated], need: part.need, absence: part.absence,
        }).collect();
        let requirements = Requirements::new(BLOCK, groups).unwrap();
        let blocks = ((case.prompt_tokens - 1) / u64::from(BLOCK)) as u32;
        let usable = requirements.usable_prefix(blocks, UNLIMITED, |block, group, _| {
            parts[group.0 as usize].runs.iter().any(|run| (run.from..run.to).contains(&block))
        });
        prop_assert_eq!(plan.boundary_tokens - plan.recompute_tokens, usable.cheapest.saved_tokens());
    }
}
