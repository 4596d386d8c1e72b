//! A client of a server promises what the embedded engine promises.

mod served;

use kvarts_tests::conformance::{Desk, all};
use kvarts_tests::stage::Stage;
use served::ClientStage;

/// Over gRPC every lease is the token's tenant's, so a case that counts a tenant's leases needs a server of its own.
const COUNTS_LEASES: &str = "a lease counts against its tenant's cap until it ends";

/// Events come by `Watch` over gRPC, not by the trait: `serve_watch.rs` looks at them.
const EVENTS: [&str; 2] = [
    "events tell of each block, in order, and a snapshot with them is the content",
    "a point of another stream is a gap",
];

/// Two calls that are under way at once reach the server in either order, so which of them meets the other is not the
/// caller's to say: this case needs the order in which it called.
const NEEDS_ORDER: &str = "a put that a delete meets is refused, and stays away";

/// The guarantees that hold over gRPC on a server that other cases use, too.
fn shared(name: &str) -> bool {
    name != COUNTS_LEASES && name != NEEDS_ORDER && !EVENTS.contains(&name)
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
    assert_eq!(run(&stage, shared), all().len() - 4);
    assert_eq!(run(&ClientStage::open("serve-leases"), |name| name == COUNTS_LEASES), 1);
}

#[test]
fn a_client_over_the_local_socket_conforms() {
    let stage = ClientStage::over_socket("serve-unix");
    assert_eq!(run(&stage, shared), all().len() - 4);
}
