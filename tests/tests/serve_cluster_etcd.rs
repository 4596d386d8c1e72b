//! Servers that register themselves with a real etcd: one of them is a store as one that stands alone.

#![allow(clippy::disallowed_methods, reason = "real servers stand outside the simulation")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::certificates::Authority;
use crate::served::etcd::{Etcd, Secured};
use crate::served::{Beside, NOT_AMONG_NODES, Served};
use kvarts_cluster::members::Member;
use kvarts_peer::etcd::{EtcdAccess, EtcdOptions, Registered};
use kvarts_tests::conformance::{Desk, all};
use kvarts_tests::stage::Scratch;

/// How long a node is a member without a word.
const LEASE_SECONDS: u32 = 3;

#[test]
fn a_node_of_three_that_registered_themselves_conforms() {
    let Some(etcd) = Etcd::start("conforms") else { return };
    let node = |number: usize| {
        let [.., high, low] = std::process::id().to_be_bytes();
        let address = format!("127.{}.{high}.{low}:7420", 200 + number);
        let members = etcd.members();
        let file =
            format!("[cluster]\nmembers = '{members}'\naddress = '{address}'\nlease = {LEASE_SECONDS}\n");
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

/// What etcd says to a node that it does not let in, within a while.
async fn trouble(options: &EtcdOptions, access: EtcdAccess) -> String {
    let id = kvarts_layout::StoreId([9; 16]);
    let me = Member { id, address: "127.0.0.1:1".to_owned(), zone: String::new() };
    let registered = Registered::start(options.clone(), access, me);
    let start = Instant::now();
    while registered.trouble().is_empty() {
        assert!(start.elapsed() < Duration::from_secs(30), "it was let in");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    registered.trouble()
}

/// From now on etcd wants a name and a password, and the nodes' may do what their guide says.
fn require_passwords(etcd: &Etcd) {
    for (call, message) in [
        ("auth/user/add", r#"{"name":"root","password":"of root"}"#),
        ("auth/role/add", r#"{"name":"root"}"#),
        ("auth/user/grant", r#"{"user":"root","role":"root"}"#),
        ("auth/user/add", r#"{"name":"kvarts","password":"of the nodes"}"#),
        ("auth/role/add", r#"{"name":"kvarts"}"#),
        // From kvarts/test/ to kvarts/test0: what is below the prefix, and nothing else.
        (
            "auth/role/grant",
            r#"{"name":"kvarts","perm":{"permType":"READWRITE","key":"a3ZhcnRzL3Rlc3Qv","range_end":"a3ZhcnRzL3Rlc3Qw"}}"#,
        ),
        ("auth/user/grant", r#"{"user":"kvarts","role":"kvarts"}"#),
        ("auth/enable", "{}"),
    ] {
        etcd.administer(call, message);
    }
}

#[test]
fn nodes_register_themselves_over_tls_with_a_password_and_who_has_another_one_is_refused() {
    let scratch = Scratch::new("etcd-secured");
    std::fs::create_dir_all(scratch.path()).unwrap();
    let write = |name: &str, text: &str| -> PathBuf {
        let path = scratch.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let (authority, other) = (Authority::new(), Authority::new());
    let of_node = authority.make("node", false);
    let pem = write("authority.pem", authority.pem());
    let of_etcd = |address: &str| {
        let shown = authority.make(address, false);
        Secured {
            certificate: write("etcd.pem", &shown.certificate),
            key: write("etcd.key", &shown.key),
            authority: pem.clone(),
        }
    };
    let Some(etcd) = Etcd::start_secured("secured", of_etcd) else { return };
    let file = format!(
        "etcd_authority = '{}'\netcd_certificate = '{}'\netcd_key = '{}'\netcd_password = '{}'\n",
        pem.display(),
        write("node.pem", &of_node.certificate).display(),
        write("node.key", &of_node.key).display(),
        write("password", "kvarts:of the nodes\n").display(),
    );
    require_passwords(&etcd);
    let node = |number: usize| {
        let [.., high, low] = std::process::id().to_be_bytes();
        let (members, address) = (etcd.members(), format!("127.{}.{high}.{low}:7422", 200 + number));
        let file = format!(
            "[cluster]\nmembers = '{members}'\naddress = '{address}'\nlease = {LEASE_SECONDS}\n{file}"
        );
        Served::start(&format!("etcd-secured-{number}"), &file)
    };
    let nodes: Vec<Served> = (0..2).map(node).collect();
    nodes[0].until("two members that reach each other", |_| {
        let status = nodes[0].client(None).cluster_status().unwrap();
        status.nodes.len() == 2 && status.nodes.iter().all(|node| node.is_reachable)
    });
    // Longer than a lease: it is renewed with the same token.
    std::thread::sleep(Duration::from_secs(u64::from(LEASE_SECONDS) * 3 / 2));
    assert_eq!(nodes[1].client(None).cluster_status().unwrap().nodes.len(), 2);
    let options = EtcdOptions {
        endpoints: vec![etcd.endpoint().to_string()],
        prefix: "kvarts/test".to_owned(),
        lease: LEASE_SECONDS,
    };
    let shown = |of: &Authority| {
        let own = Some((of_node.certificate.as_bytes(), of_node.key.as_bytes()));
        EtcdAccess::default().over_tls(of.pem().as_bytes(), own).unwrap()
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let wrong = shown(&authority).with_password("kvarts:another").unwrap();
        let told = trouble(&options, wrong).await;
        assert!(told.contains("password"), "{told}");
        let told = trouble(&options, shown(&other).with_password("kvarts:of the nodes").unwrap()).await;
        assert!(told.contains("certificate"), "{told}");
        let none = EtcdAccess::default().over_tls(authority.pem().as_bytes(), None).unwrap();
        trouble(&options, none).await;
        trouble(&options, EtcdAccess::default()).await;
    });
    assert_eq!(nodes[1].client(None).cluster_status().unwrap().nodes.len(), 2);
}
