//! What matches and leases promise.

use std::time::Duration;

use kvarts_contract::api::{
    ContainsRequest, LeaseTerms, MAX_MATCH_ENTRIES, MatchReply, MatchRequest, PIN_BYTES, PlanTerms,
};
use kvarts_contract::error::{Error, Kind, Reason};
use kvarts_layout::prefix::{Absence, Coverage, Need, Requirement, UNLIMITED};
use kvarts_layout::{BlockKey, Coordinate, Group, Layout, Requirements};
use kvarts_planner::cost::{Compute, Device, Prefill, Roofline, Times};
use kvarts_planner::plan::Source;

use super::{Case, Desk, pages};
use crate::fixture;

pub(super) const CASES: &[Case] = &[
    ("a match finds what is there and says how far each column reaches", coverage),
    ("a match of nothing finds nothing", nothing),
    ("a match says what of it is worth restoring, and why", planned),
    ("a match of too many keys at too many coordinates is refused", too_many),
    ("a put in flight is pending and then there", pending),
    ("a lease counts against its tenant's cap until it ends", caps),
    ("a lease ends once, by hand or by itself", lease_ends),
];

fn requirement(group: Group, coordinates: Vec<Coordinate>, need: Need) -> Requirement {
    Requirement { group, coordinates, need, absence: Absence::Required }
}

/// All blocks of the group with heads, the odd group's too, and the state at the boundary.
pub(super) fn needs() -> Requirements {
    let groups = vec![
        requirement(fixture::PAGES, vec![fixture::all_heads()], Need::All),
        requirement(fixture::ODD, vec![Coordinate::Replicated], Need::Last { tokens: 20 }),
        requirement(fixture::STATE, vec![Coordinate::Replicated], Need::At),
    ];
    Requirements::new(fixture::BLOCK_TOKENS, groups).expect("valid requirements")
}

fn pages_only() -> Requirements {
    let groups = vec![requirement(fixture::PAGES, vec![fixture::all_heads()], Need::All)];
    Requirements::new(fixture::BLOCK_TOKENS, groups).expect("valid requirements")
}

fn find(
    desk: &Desk<'_>,
    keys: &[BlockKey],
    requirements: &Requirements,
    lease: Option<LeaseTerms>,
) -> Result<MatchReply, Error> {
    let namespace = desk.namespace;
    let request =
        MatchRequest { namespace, keys, requirements, recompute_tokens_max: UNLIMITED, lease, plan: None };
    desk.stage.store().match_prefix(&request)
}

fn coverage(desk: &Desk<'_>) {
    let keys = desk.keys(0..8);
    let [heads, odd, state] = fixture::columns();
    desk.store(heads, &keys[..6], 1, Layout::LayerBlock);
    desk.store(odd, &keys[2..5], 1, Layout::FullBlock);
    desk.store(state, &[keys[3], keys[6]], 1, Layout::FullBlock);
    let found = find(desk, &keys, &needs(), None).unwrap();
    let covered = |(group, coordinate), blocks| Coverage { group, coordinate, blocks };
    assert_eq!(found.usable.coverage, [covered(heads, 6), covered(odd, 0), covered(state, 0)]);
    assert_eq!((found.usable.longest.blocks, found.usable.cheapest.blocks), (4, 4));
    assert_eq!((found.pending, found.lease), (0, None));
    // Of another namespace nothing is there.
    let other = Desk::new(desk.stage, "coverage, another namespace");
    assert_eq!(find(&other, &keys, &needs(), None).unwrap().usable.longest.blocks, 0);
}

fn nothing(desk: &Desk<'_>) {
    let terms = LeaseTerms { hold: Duration::from_secs(10), tenant: 1, cap_bytes: 0 };
    for keys in [vec![], desk.keys(0..3)] {
        let found = find(desk, &keys, &needs(), Some(terms)).unwrap();
        assert_eq!((found.usable.longest.blocks, found.pending, found.lease), (0, 0, None));
    }
}

/// An engine that computes this many operations a millisecond and reads for nothing.
fn engine(tflops: f64) -> Times {
    let compute = Compute {
        params: 1e9,
        active_params: 1e9,
        weight_bytes: 1e-9,
        attention_flops: 0.0,
        kv_bytes: 0.0,
        sparse: None,
    };
    let (hbm_gb_per_s, hbm_gb, prefill_part, memory_part, step_ms) = (1e9, 80.0, 1.0, 1.0, 0.0);
    let device = Device { tflops, hbm_gb_per_s, hbm_gb, prefill_part, memory_part, step_ms };
    Roofline::new(compute, device, 1).into()
}

fn planned(desk: &Desk<'_>) {
    let keys = desk.keys(0..8);
    let [heads, odd, state] = fixture::columns();
    desk.store(heads, &keys[..6], 1, Layout::LayerBlock);
    desk.store(odd, &keys[2..5], 1, Layout::FullBlock);
    desk.store(state, &[keys[3], keys[6]], 1, Layout::FullBlock);
    // What the disks take is measured.
    desk.read(&desk.read_request(heads, &keys[..6]));
    let prompt_tokens = 8 * u64::from(fixture::BLOCK_TOKENS) + 1;
    let ask = |tflops, hbm_blocks, prompt_tokens, requirements: &Requirements| {
        let times = engine(tflops);
        let plan = Some(PlanTerms { hbm_blocks, ..PlanTerms::new(prompt_tokens, &times) });
        let (namespace, keys, recompute_tokens_max) = (desk.namespace, &keys[..], UNLIMITED);
        let request = MatchRequest { namespace, keys, requirements, recompute_tokens_max, lease: None, plan };
        let found = desk.stage.store().match_prefix(&request)?;
        let planned = found.plan.expect("it was asked for");
        assert_eq!(planned.times.to_string(), engine(tflops).told().to_string());
        assert!(planned.disk.link.bytes_per_ms > 0.0 && planned.disk.link.latency_ms >= 0.0, "{planned:?}");
        Ok::<_, Error>(planned.plan)
    };
    // Two seconds for a token.
    let slow = ask(1e-3, 0, prompt_tokens, &needs()).unwrap();
    assert_eq!((slow.boundary_blocks, slow.recompute_tokens), (4, 0), "{slow:?}");
    let bytes = |(group, coordinate), blocks| fixture::shape(group, coordinate).block_bytes() * blocks;
    // Of the odd group the window's 20 tokens lie in two blocks.
    assert_eq!(slow.bytes_from(Source::Disk), bytes(heads, 4) + bytes(odd, 2) + bytes(state, 1), "{slow:?}");
    assert!(slow.benefit_ms > 0.0 && slow.exact);
    // Nothing is as fast as an engine that computes in no time, which is said.
    let fast = ask(1e18, 0, prompt_tokens, &needs()).unwrap();
    assert_eq!((fast.boundary_blocks, fast.benefit_ms), (0, 0.0), "{fast:?}");
    assert!(fast.reason.to_string().starts_with("a load is slower than computing: "), "{}", fast.reason);
    // What the caller has is used where it is.
    let held = ask(1e18, 3, prompt_tokens, &pages_only()).unwrap();
    assert_eq!((held.boundary_blocks, held.bytes_from(Source::Disk)), (3, 0), "{held:?}");
    // With its windows and states: of a boundary further on than what is here, at once.
    let engine = engine(1.0);
    let terms = PlanTerms { hbm_blocks: 5, hbm_boundaries: &[5], ..PlanTerms::new(prompt_tokens, &engine) };
    let request = MatchRequest {
        namespace: desk.namespace,
        keys: &keys,
        requirements: &needs(),
        recompute_tokens_max: UNLIMITED,
        lease: None,
        plan: Some(terms),
    };
    let held = desk.stage.store().match_prefix(&request).unwrap().plan.expect("it was asked for").plan;
    assert_eq!((held.boundary_blocks, held.recompute_tokens, held.bytes_from(Source::Disk)), (5, 0, 0));
    assert!(held.held_ms < held.from_nothing_ms && held.benefit_ms == 0.0, "{held:?}");
    let refused = ask(1.0, 0, 0, &needs()).unwrap_err();
    assert_eq!(refused.kind(), Kind::Invalid, "{refused}");
}

fn too_many(desk: &Desk<'_>) {
    let of = 17;
    let keys = desk.keys(0..(MAX_MATCH_ENTRIES as u64 / u64::from(of) + 1));
    let coordinates = (0..of).map(|start| Coordinate::Heads { start, count: 1, of });
    let groups = vec![requirement(fixture::PAGES, coordinates.collect(), Need::All)];
    let requirements = Requirements::new(fixture::BLOCK_TOKENS, groups).expect("valid requirements");
    let error = find(desk, &keys, &requirements, None).expect_err("more than are looked up at once");
    assert_eq!(error.kind(), Kind::Invalid, "{error}");
    assert!(error.to_string().contains("times"), "{error}");
}

fn pending(desk: &Desk<'_>) {
    let keys = desk.keys(0..6);
    desk.store(pages(), &keys[..2], 1, Layout::FullBlock);
    let ticket = desk.stage.store().put(desk.request(pages(), &keys[2..5], 1));
    let during = find(desk, &keys, &pages_only(), None).unwrap();
    // On real threads the put may end before the look-up, or while it looks at one block after the other.
    let reached = during.usable.longest.blocks + during.pending;
    assert!((2..=5).contains(&reached), "{during:?}");
    desk.stage.answer(ticket).unwrap();
    let after = find(desk, &keys, &pages_only(), None).unwrap();
    assert_eq!((after.usable.longest.blocks, after.pending), (5, 0));
}

fn caps(desk: &Desk<'_>) {
    let keys = desk.keys(0..4);
    desk.store(pages(), &keys, 1, Layout::FullBlock);
    let each = fixture::shape(pages().0, pages().1).block_bytes();
    // Tenants of different cases are apart.
    let tenant = desk.chain as u32;
    let terms = |cap_bytes| Some(LeaseTerms { hold: Duration::from_secs(60), tenant, cap_bytes });
    let refused = find(desk, &keys, &pages_only(), terms(each * 4 - 1)).unwrap_err();
    assert_eq!(refused.0, Reason::PinCap { limit: each * 4 - 1, wanted: each * 4 });
    assert_eq!(refused.kind(), Kind::Refused);
    let first = find(desk, &keys, &pages_only(), terms(each * 4)).unwrap().lease.unwrap();
    let refused = find(desk, &keys[..1], &pages_only(), terms(each * 4)).unwrap_err();
    assert_eq!(refused.0, Reason::PinCap { limit: each * 4, wanted: each * 5 });
    assert!(desk.stage.store().unlock(first));
    let second = find(desk, &keys[..1], &pages_only(), terms(each)).unwrap().lease.unwrap();
    assert_ne!(first, second);
    assert!(desk.stage.store().unlock(second));
    // However small a block is, it counts as a page.
    let small = (fixture::ODD, Coordinate::Replicated);
    desk.store(small, &keys, 1, Layout::FullBlock);
    let (group, coordinate) = small;
    let hold = |cap_bytes| {
        let (namespace, lease) = (desk.namespace, terms(cap_bytes));
        let request = ContainsRequest { namespace, group, coordinate, keys: &keys, lease };
        desk.stage.store().contains(&request).map(|reply| reply.lease.expect("all are here"))
    };
    let refused = Reason::PinCap { limit: PIN_BYTES * 4 - 1, wanted: PIN_BYTES * 4 };
    assert_eq!(hold(PIN_BYTES * 4 - 1).unwrap_err().0, refused);
    assert!(desk.stage.store().unlock(hold(PIN_BYTES * 4).unwrap()));
    // A lease that ended by itself counts no more.
    if desk.stage.advance(Duration::ZERO) {
        find(desk, &keys, &pages_only(), terms(each * 4)).unwrap().lease.unwrap();
        desk.stage.advance(Duration::from_secs(61));
        let again = find(desk, &keys, &pages_only(), terms(each * 4)).unwrap().lease.unwrap();
        assert!(desk.stage.store().unlock(again));
    }
}

fn lease_ends(desk: &Desk<'_>) {
    let keys = desk.keys(0..2);
    desk.store(pages(), &keys, 1, Layout::FullBlock);
    let store = desk.stage.store();
    let terms = Some(LeaseTerms { hold: Duration::from_secs(5), tenant: 1, cap_bytes: u64::MAX });
    let lease = find(desk, &keys, &pages_only(), terms).unwrap().lease.unwrap();
    assert!(store.unlock(lease));
    assert!(!store.unlock(lease));
    assert!(!store.unlock(kvarts_contract::api::LeaseId(u64::MAX)));
    let lease = find(desk, &keys, &pages_only(), terms).unwrap().lease.unwrap();
    if desk.stage.advance(Duration::from_secs(6)) {
        assert!(!store.unlock(lease), "a lease that ended by itself cannot be ended");
    } else {
        assert!(store.unlock(lease));
    }
    desk.expect(pages(), &keys, 1);
}
