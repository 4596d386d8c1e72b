//! Nodes tell each other what they have: real stores, real connections.

#![allow(clippy::disallowed_methods, reason = "real time")]

use std::time::Duration;

use crate::common::certificates::Authority;
use crate::common::{self, GROUP, Stage, key, start, start_with};
use kvarts_cluster::members::NodeId;
use kvarts_cluster::partition::Tag;
use kvarts_layout::{BlockKey, Coordinate};
use kvarts_peer::credentials::{Credentials, Pem, name};
use kvarts_peer::node::ClusterNode;

const TIMEOUT: Duration = Duration::from_secs(5);

fn tags(stage: &Stage, keys: &[BlockKey]) -> Vec<Tag> {
    keys.iter().map(|key| Tag::of(&stage.namespace, GROUP, Coordinate::default(), key)).collect()
}

/// Waits until a node says that these nodes, and no others, have each of the blocks.
async fn until_located(node: &ClusterNode, stage: &Stage, keys: &[BlockKey], wanted: &[NodeId]) {
    let mut wanted = wanted.to_vec();
    wanted.sort_unstable();
    let mut last = kvarts_peer::node::Located::default();
    for _ in 0..600 {
        let mut located = node.locate(&tags(stage, keys), TIMEOUT).await;
        located.copies.iter_mut().for_each(|nodes| nodes.sort_unstable());
        if located.unasked.is_empty() && located.copies.iter().all(|nodes| *nodes == wanted) {
            return;
        }
        last = located;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let troubles: Vec<_> = node
        .status()
        .nodes
        .into_iter()
        .map(|node| (node.member.id, node.is_reachable, node.trouble))
        .collect();
    panic!("{wanted:?} are wanted, the last answer was {last:?}; {troubles:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_any_node_has_every_node_finds() {
    let [a, b, c] = ["find-a", "find-b", "find-c"].map(Stage::new);
    let (before, after, both): (Vec<_>, Vec<_>, Vec<_>) =
        ((0..200).map(key).collect(), (200..400).map(key).collect(), (400..420).map(key).collect());
    // Some is there when the cluster is made, some comes later.
    a.put(&before);
    let nodes = start(&[&a, &b, &c]).await;
    for node in &nodes {
        until_located(node, &a, &before, &[a.id()]).await;
    }
    b.put(&after);
    a.put(&both);
    c.put(&both);
    for node in &nodes {
        until_located(node, &a, &after, &[b.id()]).await;
        until_located(node, &a, &both, &[a.id(), c.id()]).await;
    }
    a.delete(&both);
    a.delete(&before);
    for node in &nodes {
        until_located(node, &a, &both, &[c.id()]).await;
        until_located(node, &a, &before, &[]).await;
    }
    let status = nodes[0].status();
    assert_eq!(status.nodes.iter().map(|node| node.partitions).sum::<u32>(), 4096);
    assert!(status.nodes.iter().all(|node| node.is_reachable), "{status:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_starts_again_is_told_everything_and_tells_everything() {
    let [a, mut b, c] = ["again-a", "again-b", "again-c"].map(Stage::new);
    let (of_a, of_b): (Vec<_>, Vec<_>) = ((0..100).map(key).collect(), (100..200).map(key).collect());
    let stages = [&a, &b, &c];
    let mut listeners = Vec::new();
    for _ in stages {
        listeners.push(tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap());
    }
    let members = common::members(1, &stages, &listeners);
    let mut nodes = Vec::new();
    for (stage, listener) in stages.iter().zip(listeners) {
        nodes.push(ClusterNode::start(stage.store().clone(), listener, common::options(&members)).unwrap());
    }
    a.put(&of_a);
    b.put(&of_b);
    until_located(&nodes[2], &a, &of_a, &[a.id()]).await;
    until_located(&nodes[2], &a, &of_b, &[b.id()]).await;
    // While it is away its part of the directory is not known; nothing waits for it.
    nodes[1].stop();
    let address = members.get(b.id()).unwrap().address.clone();
    nodes.remove(1);
    b.home.take().unwrap().close().unwrap();
    let located = nodes[0].locate(&tags(&a, &of_a), TIMEOUT).await;
    assert!(located.copies.iter().any(|nodes| *nodes == [a.id()]), "what others hold is known");
    b.open();
    let listener = loop {
        match tokio::net::TcpListener::bind(&address).await {
            Ok(listener) => break listener,
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    let again = ClusterNode::start(b.store().clone(), listener, common::options(&members)).unwrap();
    for node in nodes.iter().chain([&again]) {
        until_located(node, &a, &of_a, &[a.id()]).await;
        until_located(node, &a, &of_b, &[b.id()]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_of_another_cluster_or_with_another_secret_is_told_nothing() {
    use kvarts_peer::node::{NodeOptions, Secret};
    let [a, b, c] = ["apart-a", "apart-b", "apart-c"].map(Stage::new);
    let stages = [&a, &b, &c];
    let mut listeners = Vec::new();
    for _ in stages {
        listeners.push(tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap());
    }
    let members = common::members(1, &stages, &listeners);
    let own = common::options(&members);
    let other_secret = NodeOptions { secret: Secret::new(b"another"), ..own.clone() };
    let other_name = NodeOptions { cluster: "production".to_owned(), ..own.clone() };
    let mut nodes = Vec::new();
    for ((stage, listener), options) in stages.iter().zip(listeners).zip([own, other_secret, other_name]) {
        nodes.push(ClusterNode::start(stage.store().clone(), listener, options).unwrap());
    }
    a.put(&(0..50).map(key).collect::<Vec<_>>());
    let troubles = loop {
        let status = nodes[0].status();
        let others: Vec<_> = status.nodes.into_iter().filter(|node| !node.is_me).collect();
        if others.iter().all(|node| !node.trouble.is_empty()) {
            break others;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let trouble =
        |stage: &Stage| troubles.iter().find(|node| node.member.id == stage.id()).unwrap().trouble.clone();
    assert!(trouble(&b).contains("secret"), "{}", trouble(&b));
    assert!(trouble(&c).contains("production"), "{}", trouble(&c));
    assert_eq!(nodes[1].status().entries + nodes[2].status().entries, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_with_other_lists_of_one_epoch_say_so_and_tell_each_other_nothing() {
    let [a, b] = ["lists-a", "lists-b"].map(Stage::new);
    let stages = [&a, &b];
    let mut listeners = Vec::new();
    for _ in stages {
        listeners.push(tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap());
    }
    let members = common::members(1, &stages, &listeners);
    let mut list = members.list().to_vec();
    list.push(kvarts_cluster::members::Member { id: kvarts_layout::StoreId([9; 16]), ..list[0].clone() });
    list[2].address = "127.0.0.1:9".to_owned();
    let others = kvarts_cluster::members::Members::new(1, list).unwrap();
    let mut nodes = Vec::new();
    for ((stage, listener), members) in stages.iter().zip(listeners).zip([&members, &others]) {
        nodes.push(ClusterNode::start(stage.store().clone(), listener, common::options(members)).unwrap());
    }
    a.put(&(0..50).map(key).collect::<Vec<_>>());
    for node in &nodes {
        let trouble = loop {
            let status = node.status();
            let named = |other: &kvarts_peer::node::NodeStatus| {
                stages.iter().any(|stage| stage.id() == other.member.id)
            };
            let other = status.nodes.into_iter().find(|other| !other.is_me && named(other)).unwrap();
            if !other.trouble.is_empty() {
                break other.trouble;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        assert!(trouble.contains("members for epoch 1"), "{trouble}");
    }
    assert!(nodes[1].status().entries == 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_does_not_answer_costs_its_time_and_its_hints_alone() {
    let [a, b] = ["silent-a", "silent-b"].map(Stage::new);
    // The other member takes connections and never says a word.
    let own = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let listeners = [own, silent];
    let members = common::members(1, &[&a, &b], &listeners);
    let [own, _silent] = listeners;
    let node = ClusterNode::start(a.store().clone(), own, common::options(&members)).unwrap();
    let keys: Vec<BlockKey> = (0..500).map(key).collect();
    a.put(&keys);
    loop {
        let located = node.locate(&tags(&a, &keys), Duration::from_millis(5)).await;
        let known = located.copies.iter().filter(|nodes| **nodes == [a.id()]).count();
        assert!(located.unasked.len() > 100 && known <= 500 - located.unasked.len());
        if known == 500 - located.unasked.len() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Reads blocks by layers on a node.
async fn read(
    node: &std::sync::Arc<ClusterNode>,
    stage: &Stage,
    keys: &[BlockKey],
) -> kvarts_contract::api::ReadEnd {
    use kvarts_contract::api::{Origins, Placed, ReadRequest};
    let memory =
        kvarts_contract::buffers::BufMut::zeroed(stage.shape.block_bytes() as usize * keys.len()).unwrap();
    let into = Placed::blocks(&stage.shape, memory.share(), keys.len() as u32).unwrap();
    let request = ReadRequest::new(stage.namespace, GROUP, Coordinate::default(), keys.to_vec(), into);
    let stream = node.read(request, &stage.shape, &Origins::any(keys.len())).unwrap();
    std::future::poll_fn(|context| stream.poll_end(context)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_by_layers_over_several_nodes_names_every_block_that_is_nowhere() {
    let [a, b] = ["names-a", "names-b"].map(Stage::new);
    let nodes = start(&[&a, &b]).await;
    let (identity, geometry) = common::model();
    nodes.iter().for_each(|node| node.know(&identity, &geometry, a.namespace));
    let all: Vec<BlockKey> = (0..20).map(key).collect();
    let there = |n: &usize| ![5, 12, 17].contains(n);
    b.put(&(0..20).filter(there).map(|n| all[n]).collect::<Vec<_>>());
    let of_b: Vec<BlockKey> = (0..20).filter(there).map(|n| all[n]).collect();
    until_located(&nodes[0], &a, &of_b, &[b.id()]).await;
    let end = loop {
        let end = read(&nodes[0], &a, &all).await;
        // Until there is a connection that carries bytes, what only the other node has is not here.
        if end.usable_blocks > 0 {
            break end;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let failed: Vec<u32> = end.failures.iter().map(|(block, _)| *block).collect();
    assert_eq!((end.usable_blocks, failed), (5, vec![5, 12, 17]), "{end:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_that_come_without_end_cost_bounded_memory_and_the_one_in_use_stays_readable() {
    let [a, b] = ["models-a", "models-b"].map(Stage::new);
    let nodes = start(&[&a, &b]).await;
    let (identity, geometry) = common::model();
    nodes.iter().for_each(|node| node.know(&identity, &geometry, a.namespace));
    let keys: Vec<BlockKey> = (0..4).map(key).collect();
    b.put(&keys);
    until_located(&nodes[0], &a, &keys, &[b.id()]).await;
    for tenant in 0..6000u32 {
        let mut identity = identity.clone();
        identity.tenant_salt = kvarts_layout::identity::TenantSalt(tenant.to_le_bytes().to_vec());
        nodes[0].know(&identity, &geometry, identity.namespace_id().unwrap());
        if tenant % 1000 == 0 {
            read(&nodes[0], &a, &keys).await;
        }
    }
    assert!(nodes[0].status().models <= 2048, "{} models", nodes[0].status().models);
    for _ in 0.. {
        if read(&nodes[0], &a, &keys).await.usable_blocks == 4 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_cannot_start_leaves_no_task_behind() {
    let [a, b] = ["fails-a", "fails-b"].map(Stage::new);
    let listeners = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).map(|listener| {
        listener.set_nonblocking(true).unwrap();
        tokio::net::TcpListener::from_std(listener).unwrap()
    });
    let good = common::members(1, &[&a, &b], &listeners);
    let bad = kvarts_cluster::members::Member {
        id: kvarts_layout::StoreId([0xff; 16]),
        address: "no address:at all".to_owned(),
        zone: String::new(),
    };
    let list = good.list().iter().cloned().chain([bad]).collect();
    let members = kvarts_cluster::members::Members::new(1, list).unwrap();
    let [own, _other] = listeners;
    let alive = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = alive();
    assert!(ClusterNode::start(a.store().clone(), own, common::options(&members)).is_err());
    for _ in 0..1000 {
        if alive() <= before {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{} tasks, {before} before", alive());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_memory_that_serves_other_nodes_is_given_to_the_store() {
    let [a, b] = ["memory-a", "memory-b"].map(Stage::new);
    let nodes = start(&[&a, &b]).await;
    while nodes.iter().any(|node| node.status().is_registered.is_none()) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

mod chains {
    use super::*;
    use kvarts_peer::node::lease_of;
    use kvarts_wire::proto;
    use proto::chain_reply::What;
    use proto::chain_request::Ask;

    async fn ask(node: &ClusterNode, tag: Tag, request: proto::ChainRequest) -> (What, proto::ChainReply) {
        let request = proto::ChainRequest { node: node.id().0.to_vec().into(), ..request };
        let reply = node.chain(tag, request).await.unwrap();
        (reply.what(), reply)
    }

    fn asking(ask: Ask) -> proto::ChainRequest {
        proto::ChainRequest { ask: Some(ask), ..proto::ChainRequest::default() }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_chain_has_one_owner_whichever_node_is_asked_and_tokens_grow() {
        let [a, b, c] = ["own-a", "own-b", "own-c"].map(Stage::new);
        let nodes = start(&[&a, &b, &c]).await;
        // Until a majority has confirmed it, a holder grants nothing.
        let tags = tags(&a, &(0..12).map(key).collect::<Vec<_>>());
        for tag in tags {
            let mut tokens = Vec::new();
            for owner in &nodes {
                let reply = loop {
                    let (what, reply) = ask(owner, tag, asking(Ask::ClaimMs(60_000))).await;
                    match what {
                        What::Granted => break reply,
                        What::New | What::Unreachable => tokio::time::sleep(Duration::from_millis(20)).await,
                        what => panic!("{what:?}"),
                    }
                };
                let (who, token) = lease_of(&reply).unwrap();
                assert_eq!(who, owner.id());
                tokens.push(token);
                for other in nodes.iter().filter(|other| other.id() != owner.id()) {
                    let (what, reply) = ask(other, tag, asking(Ask::ClaimMs(1000))).await;
                    assert_eq!((what, lease_of(&reply).unwrap()), (What::Owned, (owner.id(), token)));
                    // With the token of another one nothing is released.
                    let stolen = proto::ChainRequest {
                        token_epoch: token.epoch,
                        token_number: token.number,
                        ..asking(Ask::Release(true))
                    };
                    assert_eq!(ask(other, tag, stolen).await.0, What::Stale);
                }
                let own = |ask| proto::ChainRequest {
                    token_epoch: token.epoch,
                    token_number: token.number,
                    ..asking(ask)
                };
                assert_eq!(ask(owner, tag, own(Ask::RenewMs(1000))).await.0, What::Granted);
                assert_eq!(ask(owner, tag, own(Ask::Release(true))).await.0, What::Nobody);
            }
            assert!(tokens.is_sorted() && tokens[0] < tokens[1] && tokens[1] < tokens[2], "{tokens:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_holder_without_a_majority_of_its_epoch_grants_nothing() {
        let [a, b, c] = ["alone-a", "alone-b", "alone-c"].map(Stage::new);
        let mut listeners = Vec::new();
        for _ in 0..3 {
            listeners.push(tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap());
        }
        let members = common::members(1, &[&a, &b, &c], &listeners);
        let listener = listeners.remove(0);
        // The other two are not there. At its start a holder was told that it is one: that holds for a few seconds.
        let node = ClusterNode::start(a.store().clone(), listener, common::options(&members)).unwrap();
        let holders = kvarts_cluster::partition::Holders::of(&members);
        let mut own = tags(&a, &(0..100).map(key).collect::<Vec<_>>());
        own.retain(|tag| holders.holder(tag.partition()) == Some(a.id()));
        let mut granted_last = None;
        let start = std::time::Instant::now();
        while start.elapsed() < Duration::from_secs(7) {
            for tag in &own {
                match ask(&node, *tag, asking(Ask::ClaimMs(10))).await.0 {
                    What::Granted => granted_last = Some(start.elapsed()),
                    What::New | What::Unreachable => {}
                    what => panic!("{what:?}"),
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(granted_last.is_none_or(|last| last < Duration::from_millis(5500)), "{granted_last:?}");
    }
}

/// What a node shows: a certificate of `authority` for `named`.
fn shows(authority: &Authority, named: NodeId) -> Pem {
    let made = authority.make(&name(named), false);
    Pem {
        certificate: made.certificate.into_bytes(),
        key: made.key.into_bytes(),
        authority: authority.pem().as_bytes().to_vec(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_with_certificates_find_each_other_s_blocks() {
    let [a, b, c] = ["tls-a", "tls-b", "tls-c"].map(Stage::new);
    let authority = Authority::new();
    let keys: Vec<BlockKey> = (0..100).map(key).collect();
    a.put(&keys);
    let credentials = |node| Credentials::new(node, &shows(&authority, node)).ok();
    for node in &start_with(&[&a, &b, &c], credentials).await {
        until_located(node, &a, &keys, &[a.id()]).await;
    }
}

/// Waits until a node says why it does not reach another one.
async fn until_trouble(node: &ClusterNode, with: NodeId, what: &str) {
    let mut last = Vec::new();
    for _ in 0..600 {
        let status = node.status();
        let found = status.nodes.iter().find(|other| other.member.id == with).unwrap();
        assert!(!found.is_reachable, "{what}");
        if found.trouble.contains(what) {
            return;
        }
        last.push(found.trouble.clone());
        last.dedup();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{what:?} is wanted, told was {last:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_a_certificate_for_itself_is_told_nothing_and_not_believed() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    // What the second node has, and what each of both says of the other one.
    let cases = [
        ("plain", "does not use TLS", ""),
        ("stranger", "another authority", "another authority"),
        ("impostor", "for another name", "for another name"),
    ];
    for (case, here, there) in cases {
        let [a, b] = ["a", "b"].map(|node| Stage::new(&format!("tls-{case}-{node}")));
        let keys: Vec<BlockKey> = (0..20).map(key).collect();
        b.put(&keys);
        let (me, third) = (a.id(), kvarts_layout::StoreId([3; 16]));
        let stages = [&a, &b];
        let nodes = start_with(&stages, |node| match (node == me, case) {
            (true, _) => Credentials::new(node, &shows(&ours, node)).ok(),
            (false, "stranger") => Credentials::new(node, &shows(&theirs, node)).ok(),
            (false, "impostor") => Credentials::new(third, &shows(&ours, third)).ok(),
            _ => None,
        });
        let nodes = nodes.await;
        until_trouble(&nodes[0], b.id(), here).await;
        until_trouble(&nodes[1], a.id(), there).await;
        let located = nodes[0].locate(&tags(&b, &keys), TIMEOUT).await;
        assert!(located.copies.iter().all(Vec::is_empty), "{case}: nothing that it says is taken");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_of_a_node_that_is_gone_are_not_counted_and_a_read_of_them_fails_at_once() {
    use kvarts_contract::api::{Origins, Placed, ReadRequest};
    use kvarts_contract::buffers::BufMut;
    use kvarts_peer::node::{Column, Together};
    let [a, b] = ["gone-a", "gone-b"].map(Stage::new);
    let nodes = start(&[&a, &b]).await;
    let (identity, geometry) = common::model();
    nodes.iter().for_each(|node| node.know(&identity, &geometry, a.namespace));
    let keys: Vec<BlockKey> = (0..64).map(key).collect();
    b.put(&keys);
    let until = async |what: &str, is_so: &dyn Fn(&Together) -> bool| {
        for _ in 0..600 {
            let column = Column {
                namespace: a.namespace,
                group: GROUP,
                coordinate: Coordinate::default(),
                keys: &keys,
            };
            let found = nodes[0].presence(column, TIMEOUT).await;
            if is_so(&found) {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("{what}");
    };
    let found = until("all blocks can be read", &|found| found.blocks.iter().all(|there| *there)).await;
    assert_eq!((found.with, found.unreadable), ([(b.id(), (0..64).collect())].into(), [].into()));
    nodes[1].stop();
    let found = until("none is counted", &|found| !found.blocks.contains(&true)).await;
    assert!(found.with.is_empty() && found.unreadable.keys().eq([&b.id()]), "{found:?}");
    let memory = BufMut::zeroed(a.shape.block_bytes() as usize * keys.len()).unwrap().share();
    let into = Placed::blocks(&a.shape, memory, 64).unwrap();
    let request = ReadRequest::new(a.namespace, GROUP, Coordinate::default(), keys.clone(), into);
    let began = std::time::Instant::now();
    let stream = nodes[0].read(request, &a.shape, &Origins::any(64)).unwrap();
    let end = std::future::poll_fn(|context| stream.poll_end(context)).await.unwrap();
    // Its part of the directory is away as well, and how long nodes are asked is set to a minute here: they are not asked.
    assert!(end.usable_blocks == 0 && began.elapsed() < Duration::from_millis(900), "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_the_members_that_cannot_be_made_changes_nothing_and_can_be_made_right() {
    use kvarts_cluster::members::{Member, Members};
    let [a, b] = ["swap-a", "swap-b"].map(Stage::new);
    let nodes = start(&[&a, &b]).await;
    let before = nodes[0].members();
    let with = |address: &str| {
        let id = kvarts_layout::StoreId([0; 16]);
        let more = Member { id, address: address.to_owned(), zone: String::new() };
        Members::new(2, before.list().iter().cloned().chain([more]).collect()).unwrap()
    };
    assert!(nodes[0].change_members(with("no address:at all")).is_err());
    let status = nodes[0].status();
    assert_eq!((status.epoch, status.nodes.len()), (1, 2), "nothing has changed");
    // The same epoch, put right.
    nodes[0].change_members(with("127.0.0.1:9")).unwrap();
    let status = nodes[0].status();
    assert_eq!((status.epoch, status.nodes.len()), (2, 3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_no_member_any_more_is_not_served_over_the_connections_that_it_has() {
    use kvarts_cluster::members::Members;
    let [a, b] = ["out-a", "out-b"].map(Stage::new);
    let nodes = start(&[&a, &b]).await;
    let (identity, geometry) = common::model();
    nodes.iter().for_each(|node| node.know(&identity, &geometry, a.namespace));
    let keys: Vec<BlockKey> = (0..16).map(key).collect();
    a.put(&keys);
    until_located(&nodes[1], &a, &keys, &[a.id()]).await;
    while read(&nodes[1], &a, &keys).await.usable_blocks != 16 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let alone = nodes[0].members().list().iter().filter(|member| member.id == a.id()).cloned().collect();
    nodes[0].change_members(Members::new(2, alone).unwrap()).unwrap();
    // What it was given before is given no more, whatever it still knows.
    for _ in 0..600 {
        if nodes[0].status().served.connections == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let served = nodes[0].status().served.pieces;
    assert_eq!(read(&nodes[1], &a, &keys).await.usable_blocks, 0);
    assert_eq!(nodes[0].status().served.pieces, served);
}
