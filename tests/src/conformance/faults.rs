//! What is refused, with which reason, and that nothing comes of it.

use kvarts_contract::api::{LeaseTerms, MAX_REQUEST_BLOCKS, MatchRequest, PutRequest, ReadRequest};
use kvarts_contract::error::{Error, Kind, Reason};
use kvarts_layout::{Coordinate, Group, Layout, NamespaceId};

use super::{Case, Desk, lookups, pages, placed};
use crate::fixture;

pub(super) const CASES: &[Case] = &[
    ("a request for no block is refused", no_block),
    ("a key that stands twice is refused", duplicates),
    ("memory for another number of blocks is refused", wrong_count),
    ("memory for blocks of another shape is refused", wrong_shape),
    ("an unknown namespace is refused", unknown_namespace),
    ("a group or coordinate that the model lacks is refused", unknown_column),
    ("a deadline in the past is refused", past_deadline),
    ("layers out of range, or none, are refused", bad_layers),
    ("origins of the wrong number are refused", wrong_origins),
    ("more blocks than a request may have are refused", too_many),
    ("an identity that lacks a field or names another spec is refused", bad_identity),
    ("an identity that is registered twice is one namespace", register_twice),
];

/// Refused, with this reason, and the keys are as absent as before.
fn expect_put(desk: &Desk<'_>, request: PutRequest, reason: &Reason) {
    let error = desk.stage.put(request).expect_err("it must be refused");
    assert_eq!(&error.0, reason);
    expect_untouched(desk);
}

fn expect_read(desk: &Desk<'_>, request: ReadRequest, reason: &Reason) {
    let error = desk.stage.read(request).expect_err("it must be refused");
    assert_eq!(&error.0, reason);
}

/// Nothing of the case's keys is visible.
fn expect_untouched(desk: &Desk<'_>) {
    let keys = desk.keys(0..4);
    let (_, end) = desk.read(&desk.read_request(pages(), &keys));
    assert_eq!(end.failures.len(), 4);
    let requirements = lookups::needs();
    let (namespace, keys, recompute_tokens_max) = (desk.namespace, &keys[..], u64::MAX);
    let request = MatchRequest {
        namespace,
        keys,
        requirements: &requirements,
        recompute_tokens_max,
        lease: None,
        plan: None,
    };
    let found = desk.stage.store().match_prefix(&request).unwrap();
    assert_eq!((found.usable.longest.blocks, found.pending), (0, 0));
}

fn is_shape(result: Result<impl std::fmt::Debug, Error>) {
    let error = result.expect_err("it must be refused");
    assert!(matches!(error.0, Reason::Shape(_)), "{error:?}");
    assert_eq!(error.kind(), Kind::Invalid);
}

fn no_block(desk: &Desk<'_>) {
    let keys = desk.keys(0..1);
    expect_put(desk, PutRequest { keys: vec![], ..desk.request(pages(), &keys, 1) }, &Reason::Empty);
    expect_read(desk, ReadRequest { keys: vec![], ..desk.read_request(pages(), &keys) }, &Reason::Empty);
    let shape = fixture::shape(pages().0, pages().1);
    let none = fixture::place(&shape, 0, fixture::Style::Blocks, 0);
    assert_eq!(none.unwrap_err(), Reason::Empty);
}

fn duplicates(desk: &Desk<'_>) {
    let keys = desk.keys(0..3);
    let twice = vec![keys[0], keys[1], keys[0]];
    let reason = Reason::Duplicate(keys[0]);
    expect_put(desk, PutRequest { keys: twice.clone(), ..desk.request(pages(), &keys, 1) }, &reason);
    expect_read(desk, ReadRequest { keys: twice, ..desk.read_request(pages(), &keys) }, &reason);
}

fn wrong_count(desk: &Desk<'_>) {
    let keys = desk.keys(0..3);
    for blocks in [2, 4] {
        let reason = Reason::Length { expected: 3, found: blocks };
        let from = placed(pages(), blocks as u32);
        expect_put(desk, PutRequest { from, ..desk.request(pages(), &keys, 1) }, &reason);
        let into = placed(pages(), blocks as u32);
        expect_read(desk, ReadRequest { into, ..desk.read_request(pages(), &keys) }, &reason);
    }
}

fn wrong_shape(desk: &Desk<'_>) {
    let keys = desk.keys(0..2);
    let half = (fixture::PAGES, Coordinate::heads(0, 1, 2).unwrap());
    for other in [fixture::columns()[1], half] {
        is_shape(desk.stage.put(PutRequest { from: placed(other, 2), ..desk.request(pages(), &keys, 1) }));
        expect_untouched(desk);
        let request = ReadRequest { into: placed(other, 2), ..desk.read_request(pages(), &keys) };
        is_shape(desk.stage.read(request));
    }
    // Also where there is something to read.
    let keys = desk.keys(10..12);
    desk.store(pages(), &keys, 1, Layout::FullBlock);
    is_shape(desk.stage.read(ReadRequest { into: placed(half, 2), ..desk.read_request(pages(), &keys) }));
}

fn unknown_namespace(desk: &Desk<'_>) {
    let (keys, namespace) = (desk.keys(0..2), NamespaceId([9; 32]));
    let reason = Reason::UnknownNamespace(namespace);
    expect_put(desk, PutRequest { namespace, ..desk.request(pages(), &keys, 1) }, &reason);
    expect_read(desk, ReadRequest { namespace, ..desk.read_request(pages(), &keys) }, &reason);
    let requirements = lookups::needs();
    let (keys, recompute_tokens_max) = (&keys[..], u64::MAX);
    let request = MatchRequest {
        namespace,
        keys,
        requirements: &requirements,
        recompute_tokens_max,
        lease: None,
        plan: None,
    };
    assert_eq!(desk.stage.store().match_prefix(&request).unwrap_err().0, reason);
}

fn unknown_column(desk: &Desk<'_>) {
    let keys = desk.keys(0..2);
    let three = Coordinate::heads(0, 1, 3).unwrap();
    let lacking = [
        (Group(77), Coordinate::Replicated),
        (fixture::PAGES, Coordinate::Replicated),
        (fixture::PAGES, three),
        (fixture::ODD, fixture::all_heads()),
    ];
    for (group, coordinate) in lacking {
        is_shape(desk.stage.put(PutRequest { group, coordinate, ..desk.request(pages(), &keys, 1) }));
        is_shape(desk.stage.read(ReadRequest { group, coordinate, ..desk.read_request(pages(), &keys) }));
        for tenant in [None, Some(1)] {
            is_shape(match_column(desk, group, coordinate, tenant));
        }
    }
    expect_untouched(desk);
}

fn match_column(
    desk: &Desk<'_>,
    group: Group,
    coordinate: Coordinate,
    tenant: Option<u32>,
) -> Result<kvarts_contract::api::MatchReply, Error> {
    use kvarts_layout::prefix::{Absence, Need, Requirement};
    let (coordinates, need, absence) = (vec![coordinate], Need::All, Absence::Required);
    let groups = vec![Requirement { group, coordinates, need, absence }];
    let requirements = kvarts_layout::Requirements::new(fixture::BLOCK_TOKENS, groups).unwrap();
    let terms = |tenant| LeaseTerms { hold: std::time::Duration::from_secs(1), tenant, cap_bytes: u64::MAX };
    desk.stage.store().match_prefix(&MatchRequest {
        namespace: desk.namespace,
        keys: &desk.keys(0..2),
        requirements: &requirements,
        recompute_tokens_max: 0,
        lease: tenant.map(terms),
        plan: None,
    })
}

fn past_deadline(desk: &Desk<'_>) {
    let (keys, deadline) = (desk.keys(0..2), Some(desk.stage.now()));
    let put = PutRequest { deadline, ..desk.request(pages(), &keys, 1) };
    expect_put(desk, put, &Reason::DeadlineInPast);
    let read = ReadRequest { deadline, ..desk.read_request(pages(), &keys) };
    expect_read(desk, read, &Reason::DeadlineInPast);
}

fn bad_layers(desk: &Desk<'_>) {
    let keys = desk.keys(10..12);
    desk.store(pages(), &keys, 1, Layout::FullBlock);
    #[allow(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    for layers in [0..0, 2..1, 3..3] {
        let request = ReadRequest { layers: Some(layers), ..desk.read_request(pages(), &keys) };
        expect_read(desk, request, &Reason::Empty);
    }
    for layers in [0..4, 3..4, 0..u32::MAX, u32::MAX - 1..u32::MAX] {
        is_shape(desk.stage.read(ReadRequest { layers: Some(layers), ..desk.read_request(pages(), &keys) }));
    }
}

fn wrong_origins(desk: &Desk<'_>) {
    let keys = desk.keys(0..3);
    let origins = Some(vec![Default::default(); 2]);
    let reason = Reason::Length { expected: 3, found: 2 };
    expect_put(desk, PutRequest { origins, ..desk.request(pages(), &keys, 1) }, &reason);
}

fn too_many(desk: &Desk<'_>) {
    let keys = desk.keys(0..MAX_REQUEST_BLOCKS as u64 + 1);
    let one = desk.keys(0..1);
    let reason = Reason::TooMany("blocks");
    expect_put(desk, PutRequest { keys: keys.clone(), ..desk.request(pages(), &one, 1) }, &reason);
    expect_read(desk, ReadRequest { keys: keys.clone(), ..desk.read_request(pages(), &one) }, &reason);
    let requirements = lookups::needs();
    let (namespace, keys, recompute_tokens_max) = (desk.namespace, &keys[..], u64::MAX);
    let request = MatchRequest {
        namespace,
        keys,
        requirements: &requirements,
        recompute_tokens_max,
        lease: None,
        plan: None,
    };
    assert_eq!(desk.stage.store().match_prefix(&request).unwrap_err().0, reason);
}

fn bad_identity(desk: &Desk<'_>) {
    let register = |identity: &kvarts_layout::Identity| {
        desk.stage.store().register(identity, &fixture::geometry()).map_err(|error| error.0)
    };
    let good = fixture::identity("bad identity");
    let mut missing = good.clone();
    missing.model.clear();
    assert!(matches!(register(&missing), Err(Reason::Identity(_))));
    let mut other = good.clone();
    other.spec_fingerprint.0[0] ^= 1;
    assert_eq!(register(&other), Err(Reason::SpecMismatch));
    let mut uneven = good.clone();
    uneven.block_tokens = 15;
    assert!(matches!(register(&uneven), Err(Reason::Shape(_))), "15 tokens are not whole entries of 4");
    assert!(register(&good).is_ok());
}

fn register_twice(desk: &Desk<'_>) {
    let again = Desk::new(desk.stage, "an identity that is registered twice is one namespace");
    assert_eq!(again.namespace, desk.namespace);
    desk.store(pages(), &desk.keys(0..1), 1, Layout::FullBlock);
    let third = Desk::new(desk.stage, "an identity that is registered twice is one namespace");
    third.expect(pages(), &desk.keys(0..1), 1);
}
