//! Servers whose nodes have certificates: what is put into one is read from the other, and who has none, or another one's, is
//! told why and gets nothing.
#![allow(clippy::disallowed_methods, reason = "real servers stand outside the simulation")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::certificates::Authority;
use crate::served::{Beside, Served};
use kvarts_client::Client;
use kvarts_layout::{BlockKey, Layout, StoreId};
use kvarts_server::config::{Config, Settings};
use kvarts_server::daemon::Daemon;
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::stage::Scratch;

/// Nodes that are to be of one cluster, and where their files are.
struct Ground {
    nodes: Vec<Served>,
    files: Scratch,
}

impl Ground {
    /// `place` keeps the addresses of tests of one process apart.
    fn new(name: &str, count: usize, place: u8) -> Self {
        let nodes: Vec<Served> = (0..count).map(|n| Served::start(&format!("{name}-{n}"), "")).collect();
        let ground = Self { nodes, files: Scratch::new(&format!("{name}-files")) };
        std::fs::create_dir_all(ground.files.path()).unwrap();
        let mut members = "epoch = 1\n".to_owned();
        for (number, node) in (1u8..).zip(0..count) {
            let [.., high, low] = std::process::id().to_be_bytes();
            let address = format!("127.{}.{high}.{low}:7410", 100 + place * 8 + number);
            members += &format!("[[node]]\nid = \"{}\"\naddress = \"{address}\"\n", ground.id(node));
        }
        ground.write("members.toml", &members);
        ground
    }

    fn id(&self, node: usize) -> StoreId {
        self.nodes[node].daemon().state().engine.stats().store
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.files.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// The configuration of a node, which shows a certificate of `by` for `named` and believes in `trusts`; none for none.
    fn file(&self, node: usize, shown: Option<(&Authority, &Authority, StoreId, bool)>) -> String {
        let members = self.files.path().join("members.toml");
        let mut file = format!("[cluster]\nmembers = '{}'\n", members.display());
        if let Some((by, trusts, named, expired)) = shown {
            let made = by.make(&kvarts_peer_name(named), expired);
            let parts = [
                ("certificate", made.certificate),
                ("key", made.key),
                ("authority", trusts.pem().to_owned()),
            ];
            for (name, pem) in parts {
                let path = self.write(&format!("{name}-{node}.pem"), &pem);
                file += &format!("{name} = '{}'\n", path.display());
            }
        }
        file
    }

    fn client(&self, node: usize) -> Client {
        self.nodes[node].client(None)
    }

    /// Waits until a node says this of another one; empty: that it is reached.
    fn until_said(&self, of: usize, by: usize, what: &str) {
        let (start, id) = (Instant::now(), self.id(of));
        loop {
            let status = self.client(by).cluster_status().unwrap();
            let node = status.nodes.iter().find(|node| node.node[..] == id.0[..]).unwrap();
            if node.is_reachable == what.is_empty() && node.trouble.contains(what) {
                return;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "{what:?}: {node:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Reads until all of these blocks come: a look-up that takes too long misses some. Their bytes are right whenever they come.
fn until_read(desk: &Desk<'_>, keys: &[BlockKey]) {
    let start = Instant::now();
    loop {
        let request = desk.read_request(pages(), keys);
        if desk.read(&request).1.usable_blocks as usize == keys.len() {
            desk.expect_bytes(&request, &(0..keys.len() as u32).collect::<Vec<_>>(), 1);
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "not all blocks are found");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn kvarts_peer_name(node: StoreId) -> String {
    format!("kvarts-{node}")
}

#[test]
fn nodes_with_certificates_read_from_each_other_and_take_new_ones_while_they_run() {
    let (authority, next) = (Authority::new(), Authority::new());
    let mut ground = Ground::new("tls-cluster", 3, 0);
    for node in 0..3 {
        let file = ground.file(node, Some((&authority, &authority, ground.id(node), false)));
        ground.nodes[node].restart_with(&file);
    }
    (0..3).for_each(|by| (0..3).for_each(|of| ground.until_said(of, by, "")));
    let stages: Vec<Beside> = (0..3).map(|n| Beside(ground.client(n))).collect();
    let desks: Vec<Desk<'_>> = stages.iter().map(|stage| Desk::new(stage, "encrypted")).collect();
    for (n, desk) in (0u64..).zip(&desks) {
        desk.store(pages(), &desk.keys(n * 8..n * 8 + 8), 1, Layout::LayerBlock);
    }
    let keys = desks[0].keys(0..24);
    for desk in &desks {
        until_read(desk, &keys);
    }
    // A certificate that is no longer believed counts until its node is called anew.
    let file = ground.file(2, Some((&next, &next, ground.id(2), false)));
    ground.nodes[2].reload(&file).unwrap();
    until_read(&desks[0], &keys);
    let told = ground.nodes[2].reload(&ground.file(2, None)).unwrap_err();
    assert!(told.contains("only at a start"), "{told}");
}

#[test]
fn who_shows_no_certificate_of_its_own_is_refused_and_told_why() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let mut ground = Ground::new("tls-refused", 4, 1);
    let other = StoreId([9; 16]);
    let files = [
        ground.file(0, Some((&ours, &ours, ground.id(0), false))),
        ground.file(1, Some((&theirs, &ours, ground.id(1), false))),
        ground.file(2, Some((&ours, &ours, ground.id(2), true))),
        ground.file(3, None),
    ];
    ground.nodes.iter_mut().zip(&files).for_each(|(node, file)| node.restart_with(file));
    ground.until_said(1, 0, "another authority");
    ground.until_said(2, 0, "has expired");
    ground.until_said(3, 0, "does not use TLS");
    for node in 1..4 {
        let status = ground.client(node).cluster_status().unwrap();
        let zero = ground.id(0);
        let reached = status.nodes.iter().find(|node| node.node[..] == zero.0[..]).unwrap();
        assert!(!reached.is_reachable, "{node}: {reached:?}");
    }
    // A certificate of another node is not even begun with.
    let wrong = ground.file(3, Some((&ours, &ours, other, false)));
    ground.nodes[3].stop();
    let scratch = ground.nodes[3].scratch.path().display().to_string();
    let settings = Settings {
        directories: Some(scratch),
        budget: Some("48 MiB".to_owned()),
        grpc: Some("127.0.0.1:0".to_owned()),
        metrics: Some("none".to_owned()),
        ..Settings::default()
    };
    let named = Some((std::path::Path::new("test.toml"), wrong.as_str()));
    let config = Config::resolve(named, |_| None, &settings).unwrap();
    let told = ground.nodes[3].runtime.block_on(Daemon::start(&config)).unwrap_err();
    assert!(told.starts_with("cluster.certificate") && told.contains("is for another node"), "{told}");
    ground.nodes.truncate(3);
}

#[test]
fn members_on_other_hosts_without_certificates_and_without_a_secret_are_refused() {
    let mut ground = Ground::new("tls-remote", 1, 2);
    let id = ground.id(0);
    ground.write(
        "members.toml",
        &format!("epoch = 1\n[[node]]\nid = \"{id}\"\naddress = \"192.0.2.1:7400\"\n"),
    );
    ground.nodes[0].stop();
    let file = ground.file(0, None);
    let settings = Settings {
        directories: Some(ground.nodes[0].scratch.path().display().to_string()),
        budget: Some("48 MiB".to_owned()),
        grpc: Some("127.0.0.1:0".to_owned()),
        metrics: Some("none".to_owned()),
        ..Settings::default()
    };
    let named = Some((std::path::Path::new("test.toml"), file.as_str()));
    let config = Config::resolve(named, |_| None, &settings).unwrap();
    let told = ground.nodes[0].runtime.block_on(Daemon::start(&config)).unwrap_err();
    assert!(told.contains("cluster.certificate") && told.contains("cluster.secret"), "{told}");
    ground.nodes.clear();
}

/// A secret that everybody knows would let any program of the host read what its tenants have, token or not.
#[test]
fn nodes_of_one_host_without_a_secret_are_refused_where_clients_need_tokens_or_others_can_connect() {
    let mut ground = Ground::new("tls-open", 1, 2);
    let id = ground.id(0);
    let node = format!("epoch = 1\n[[node]]\nid = \"{id}\"\naddress = \"127.0.0.1:7400\"\n");
    ground.write("members.toml", &node);
    ground.nodes[0].stop();
    let members = ground.file(0, None);
    let hash = kvarts_server::state::auth::TokenHash::of("a");
    let tokens =
        format!("[[tenants]]\nname = 'a'\n[[tokens]]\ntenant = 'a'\nrights = ['read']\nhash = '{hash}'\n");
    for (more, why) in [
        (tokens.as_str(), "requires tokens of clients"),
        ("listen = '0.0.0.0:0'\n", "members on other hosts"),
    ] {
        let settings = Settings {
            directories: Some(ground.nodes[0].scratch.path().display().to_string()),
            budget: Some("48 MiB".to_owned()),
            grpc: Some("127.0.0.1:0".to_owned()),
            metrics: Some("none".to_owned()),
            ..Settings::default()
        };
        let file = format!("{members}{more}");
        let config =
            Config::resolve(Some((std::path::Path::new("test.toml"), file.as_str())), |_| None, &settings)
                .unwrap();
        let told = ground.nodes[0].runtime.block_on(Daemon::start(&config)).unwrap_err();
        assert!(told.contains(why) && told.contains("cluster.secret"), "{told}");
    }
    ground.nodes.clear();
}
