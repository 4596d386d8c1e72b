//! A client of a server promises what the embedded engine promises.

use crate::served::ClientStage;
use kvarts_contract::api::{BlockOutcome, KvStore};
use kvarts_contract::error::Kind;
use kvarts_planner::cost::{Roofline, Times, device, model};
use kvarts_planner::route::{Action, Candidate, NodeView, Question, Route, Weights};
use kvarts_tests::conformance::{Desk, all, pages};
use kvarts_tests::fixture;
use kvarts_tests::stage::Stage;

/// Over gRPC every lease is the token's tenant's, so a case that counts a tenant's leases needs a server of its own.
const COUNTS_LEASES: &str = "a lease counts against its tenant's cap until it ends";

/// Events come by `Watch` over gRPC, not by the trait: `serve_watch.rs` looks at them.
const EVENTS: [&str; 2] = [
    "events tell of each block, in order, and a snapshot with them is the content",
    "a point of another stream is a gap",
];

/// Two calls that are under way at once reach the server in either order, so which of them is first is not the caller's
/// to say: these cases need the order in which they called.
const NEEDS_ORDER: [&str; 2] = [
    "a put that a delete meets is refused, and stays away",
    "of two puts of one key at once one stores it whole",
];

/// The guarantees that hold over gRPC on a server that other cases use, too.
fn shared(name: &str) -> bool {
    name != COUNTS_LEASES && !NEEDS_ORDER.contains(&name) && !EVENTS.contains(&name)
}

fn run(stage: &dyn Stage, wanted: impl Fn(&str) -> bool) -> usize {
    let cases: Vec<_> = all().into_iter().filter(|(name, _)| wanted(name)).collect();
    for (name, case) in &cases {
        eprintln!("guarantee: {name}");
        case(&Desk::new(stage, name));
    }
    cases.len()
}

#[test]
fn a_client_over_grpc_conforms() {
    let stage = ClientStage::open("serve-grpc");
    assert_eq!(run(&stage, shared), all().len() - 5);
    assert_eq!(run(&ClientStage::open("serve-leases"), |name| name == COUNTS_LEASES), 1);
}

#[test]
fn a_client_over_the_local_socket_conforms() {
    let stage = ClientStage::over_socket("serve-unix");
    assert_eq!(run(&stage, shared), all().len() - 5);
}

#[test]
fn a_route_over_grpc_is_the_library_s_and_the_server_says_its_own_disks() {
    let stage = ClientStage::open("serve-route");
    let times: Times = Roofline::new(model("llama-3.1-8b").unwrap(), device("h100").unwrap(), 1).into();
    let node = |node: u32, memory_tokens: u64| NodeView {
        node,
        decodes: true,
        queue_ms: 3.0,
        decoding: 2,
        memory_tokens,
        device_tokens: memory_tokens / 2,
        memory_bytes_per_ms: 2e7,
        disk_tokens: 12_000,
        disk_bytes_per_ms: 1e6,
        disk_queue_ms: 1.0,
        network_bytes_per_ms: 5e7,
        network_queue_ms: 0.5,
    };
    let nodes = [node(1, 0), node(2, 4000), NodeView { decodes: false, ..node(7, 100) }];
    let question = Question {
        prompt_tokens: 16_384,
        token_bytes: 131_072.0,
        layers: 32,
        owner: Some((2, 12_000)),
        shared_tokens: 700,
        forked: false,
        nodes: &nodes,
        weights: Weights { lambda_ms_per_gb: 3.0, mu: 0.1 },
    };
    assert_eq!(stage.client.route(&question, &times, None).unwrap(), question.route(&times));
    // Of the disks of the server that is asked nothing was measured: a drive is assumed, and one that waits for nothing.
    let live = stage.client.route(&question, &times, Some(1)).unwrap();
    let restore = |route: &Route| {
        let from_disk = |one: &&Candidate| one.node == 1 && one.action == Action::FromDisk;
        route.candidates.iter().find(from_disk).unwrap().restore_ms
    };
    assert!(restore(&live) < restore(&question.route(&times)));
    let bad = Question { prompt_tokens: 0, ..question };
    let error = stage.client.route(&bad, &times, None).unwrap_err();
    assert!(error.kind() == Kind::Invalid && error.to_string().contains("prompt"), "{error}");
}

#[test]
fn of_two_clients_that_put_one_key_at_once_one_stores_it_whole() {
    use BlockOutcome::{AlreadyThere, InFlight, Stored};
    let stage = ClientStage::open("serve-race");
    let other = stage.served.client(None);
    let desk = Desk::new(&stage, "two clients");
    other.register(&fixture::identity("two clients"), &fixture::geometry()).unwrap();
    let (group, coordinate) = pages();
    let shape = fixture::shape(group, coordinate);
    for round in 0..20 {
        let keys = desk.keys(round * 4..round * 4 + 4);
        let first = stage.client.put(desk.request(pages(), &keys, 1));
        let second = other.put(desk.request(pages(), &keys, 2));
        let (first, second) = (stage.answer(first).unwrap().outcomes, stage.answer(second).unwrap().outcomes);
        let request = desk.read_request(pages(), &keys);
        assert_eq!(desk.read(&request).1.usable_blocks, 4);
        for (at, key) in (0u32..).zip(&keys) {
            let pair = (&first[at as usize], &second[at as usize]);
            let winner = match pair {
                (Stored, AlreadyThere | InFlight) => 1,
                (AlreadyThere | InFlight, Stored) => 2,
                other => panic!("{other:?}"),
            };
            let expected = fixture::content(key, group, coordinate, winner, &shape);
            assert_eq!(fixture::read_block(&request.into, at, &shape), expected);
        }
    }
}
