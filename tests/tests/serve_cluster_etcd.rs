//! Servers that register themselves with a real etcd: one of them is a store as one that stands alone.

mod served;

use kvarts_tests::conformance::{Desk, all};
use served::etcd::Etcd;
use served::{Beside, NOT_AMONG_NODES, Served};

#[test]
fn a_node_of_three_that_registered_themselves_conforms() {
    let Some(etcd) = Etcd::start("conforms") else { return };
    let node = |number: usize| {
        let [.., high, low] = std::process::id().to_be_bytes();
        let address = format!("127.{}.{high}.{low}:7420", 200 + number);
        let members = etcd.members();
        let file = format!("[cluster]\nmembers = '{members}'\naddress = '{address}'\nlease = 5\n");
        Served::start(&format!("etcd-conforms-{number}"), &file)
    };
    let nodes: Vec<Served> = (0..3).map(node).collect();
    nodes[1].until("three members that reach each other", |_| {
        let status = nodes[1].client(None).cluster_status().unwrap();
        status.nodes.len() == 3 && status.nodes.iter().all(|node| node.is_reachable)
    });
    let stage = Beside(nodes[1].client(None));
    for (name, case) in all().into_iter().filter(|(name, _)| !NOT_AMONG_NODES.contains(name)) {
        eprintln!("guarantee: {name}");
        case(&Desk::new(&stage, name));
    }
}
