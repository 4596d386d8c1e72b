//! Which nodes have a block, by rule: hot blocks are copied and lost again, a put knows what others have, and a chain's owner has its
//! blocks go last.
#![allow(clippy::disallowed_methods, reason = "real nodes on loopback")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{self, GROUP, Stage, key};
use kvarts_cluster::hot::Rule;
use kvarts_cluster::members::NodeId;
use kvarts_contract::api::{ContainsRequest, KvStore, Origins, Placed, Presence, ReadEnd, ReadRequest};
use kvarts_layout::{BlockKey, Coordinate};
use kvarts_peer::node::{ClusterNode, Column, Fate, NodeOptions, OfferCounts, PutPolicy};
use kvarts_wire::proto;
use proto::chain_reply::What;
use proto::chain_request::Ask;
use tokio::net::TcpListener;

fn column<'a>(stage: &Stage, keys: &'a [BlockKey]) -> Column<'a> {
    Column { namespace: stage.namespace, group: GROUP, coordinate: Coordinate::default(), keys }
}

/// How often a node looks for what is about to be evicted: seldom enough for what it offers to be copied, and known, before it
/// looks again.
const LOOKS_EVERY: Duration = Duration::from_millis(1500);
/// How long copies of puts live.
const HOLD: Duration = Duration::from_secs(5);

/// What a put of these blocks does with them.
async fn fates(
    node: &ClusterNode,
    stage: &Stage,
    keys: &[BlockKey],
    parent: Option<BlockKey>,
) -> Option<Vec<Fate>> {
    node.place(column(stage, keys), parent).await.map(|placing| placing.fates().to_vec())
}

/// Nodes of one cluster with options of their own.
async fn start(stages: &[&Stage], change: impl Fn(NodeOptions) -> NodeOptions) -> Vec<Arc<ClusterNode>> {
    let mut listeners = Vec::new();
    for _ in stages {
        listeners.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
    }
    let members = common::members(1, stages, &listeners);
    let (identity, geometry) = common::model();
    let node = |(stage, listener): (&&Stage, TcpListener)| {
        let options = change(common::patient(&members));
        let node = ClusterNode::start(stage.store().clone(), listener, options).unwrap();
        node.know(&identity, &geometry, stage.namespace);
        node
    };
    stages.iter().zip(listeners).map(node).collect()
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(30), "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn until_located(node: &ClusterNode, stage: &Stage, keys: &[BlockKey], on: NodeId) {
    let begun = Instant::now();
    loop {
        let tags: Vec<_> = keys.iter().map(|key| column(stage, keys).tag(key)).collect();
        let located = node.locate(&tags, Duration::from_secs(1)).await;
        if located.copies.iter().all(|nodes| nodes.contains(&on)) {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{located:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn here(stage: &Stage, keys: &[BlockKey]) -> usize {
    let (namespace, group, coordinate) = (stage.namespace, GROUP, Coordinate::default());
    let asked = ContainsRequest { namespace, group, coordinate, keys, lease: None };
    let reply = stage.store().contains(&asked).unwrap();
    reply.presence.iter().filter(|presence| **presence == Presence::Here).count()
}

async fn read(node: &Arc<ClusterNode>, stage: &Stage, keys: &[BlockKey]) -> ReadEnd {
    let bytes = stage.shape.block_bytes() as usize * keys.len();
    let memory = kvarts_contract::buffers::BufMut::zeroed(bytes).unwrap().share();
    let into = Placed::blocks(&stage.shape, memory.clone(), keys.len() as u32).unwrap();
    let request = ReadRequest::new(stage.namespace, GROUP, Coordinate::default(), keys.to_vec(), into);
    let stream = node.read(request, &stage.shape, &Origins::any(keys.len())).unwrap();
    let end = std::future::poll_fn(|context| stream.poll_end(context)).await.unwrap();
    let content: Vec<u8> =
        keys.iter().flat_map(|key| common::content(key, stage.shape.block_bytes() as usize)).collect();
    if end.failures.is_empty() {
        assert_eq!(memory.to_vec(), content);
    }
    end
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_read_often_from_another_node_is_copied_for_a_time_and_lost_when_it_is_not() {
    let [a, b] = ["hot-a", "hot-b"].map(Stage::new);
    let hold = Duration::from_secs(3);
    let nodes =
        start(&[&a, &b], |options| NodeOptions { hot: Some(Rule { reads_per_second: 2, hold }), ..options })
            .await;
    let keys: Vec<BlockKey> = (0..20).map(key).collect();
    a.put(&keys);
    until_located(&nodes[1], &b, &keys, a.id()).await;
    let (hot, cold) = keys.split_at(8);
    // Two reads a second are 23 that count.
    for _ in 0..5 {
        assert_eq!(read(&nodes[1], &b, cold).await.failures, []);
    }
    for _ in 0..40 {
        assert_eq!(read(&nodes[1], &b, hot).await.failures, []);
    }
    until("hot blocks are copied", || here(&b, hot) == hot.len()).await;
    assert_eq!(here(&b, cold), 0, "what is read now and then is not");
    until_located(&nodes[0], &a, hot, b.id()).await;
    let counts = nodes[1].status().hot;
    assert_eq!((counts.copied, counts.now, counts.failed), (8, 8, 0));
    let before = nodes[0].status().served.pieces;
    assert_eq!(read(&nodes[1], &b, hot).await.failures, []);
    assert_eq!(nodes[0].status().served.pieces, before, "nothing is asked of the other node");
    assert_eq!(nodes[0].status().hot.counted, 0, "a node's own blocks are not counted");
    until("copies of what is not read any more go", || here(&b, hot) == 0).await;
    assert_eq!(here(&a, &keys), keys.len());
    assert_eq!(read(&nodes[1], &b, hot).await.failures, []);
    nodes.iter().for_each(|node| node.stop());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_knows_what_another_node_has_that_can_be_reached_and_waits_a_moment_at_most() {
    let [a, b] = ["placing-a", "placing-b"].map(Stage::new);
    let nodes = start(&[&a, &b], |options| NodeOptions { put: PutPolicy::Single(HOLD), ..options }).await;
    let keys: Vec<BlockKey> = (0..40).map(key).collect();
    a.put(&keys[..20]);
    b.put(&keys[10..15]);
    until_located(&nodes[1], &b, &keys[..20], a.id()).await;
    let found = fates(&nodes[1], &b, &keys, None).await.unwrap();
    let fate = |n| if n < 20 && !(10..15).contains(&n) { Fate::Held } else { Fate::Stored };
    let expected: Vec<Fate> = (0..40).map(fate).collect();
    assert_eq!(found, expected, "what is here is stored here, and so is what is nowhere");
    assert_eq!(nodes[1].status().puts.held, 15);
    assert_eq!(fates(&nodes[1], &b, &keys[20..], None).await, None);
    nodes[0].stop();
    until("the other node is away", || nodes[1].status().nodes.iter().any(|node| !node.is_reachable)).await;
    let begun = Instant::now();
    let found = fates(&nodes[1], &b, &keys, None).await;
    assert_eq!(found, None, "what is said to be on a node that is gone");
    assert!(begun.elapsed() < Duration::from_secs(1));
    nodes[1].stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_whose_holder_says_nothing_goes_on_and_is_counted() {
    let [a, b] = ["placing-silent-a", "placing-silent-b"].map(Stage::new);
    // The other member takes connections and never says a word.
    let listeners =
        [TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap()];
    let members = common::members(1, &[&a, &b], &listeners);
    let [own, _silent] = listeners;
    let options = NodeOptions { put: PutPolicy::Single(HOLD), ..common::options(&members) };
    let node = ClusterNode::start(a.store().clone(), own, options).unwrap();
    let keys: Vec<BlockKey> = (0..100).map(key).collect();
    let begun = Instant::now();
    assert_eq!(fates(&node, &a, &keys, None).await, None);
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    // Neither of those whose part of the directory it holds, nor of the others: it has not said what it has.
    assert_eq!(node.status().puts.unasked, 100);
    node.stop();
}

async fn ask(
    node: &ClusterNode,
    stage: &Stage,
    first: BlockKey,
    ask: Ask,
    token: (u64, u64),
) -> proto::ChainReply {
    let asked = proto::ChainRequest {
        node: node.id().0.to_vec().into(),
        ask: Some(ask),
        token_epoch: token.0,
        token_number: token.1,
        ..proto::ChainRequest::default()
    };
    node.chain_of((stage.namespace, GROUP, Coordinate::default()), first, asked).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_blocks_of_an_own_chain_go_last_while_it_is_owned() {
    let [a, b] = ["owned-a", "owned-b"].map(Stage::new);
    let nodes = start(&[&a, &b], |options| options).await;
    let keys: Vec<BlockKey> = (0..12).map(key).collect();
    let favoured = |stage: &Stage| {
        stage.store().favoured(stage.namespace, (GROUP, Coordinate::default()), &keys).unwrap()
    };
    a.put(&keys);
    nodes[0].note_use(&column(&a, &keys), None);
    assert_eq!(favoured(&a), [false; 12], "it owns nothing");
    // The chain begins at the fourth block.
    let begun = Instant::now();
    let lease = loop {
        let reply = ask(&nodes[0], &a, keys[3], Ask::ClaimMs(2000), (0, 0)).await;
        if reply.what() == What::Granted {
            break reply.lease.unwrap();
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{reply:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let token = (lease.token_epoch, lease.token_number);
    nodes[0].note_use(&column(&a, &keys[..8]), None);
    let up_to = |end: usize| -> Vec<bool> { (0..12).map(|n| (3..end).contains(&n)).collect() };
    assert_eq!(favoured(&a), up_to(8), "what stands before it is not of it");
    // What is put behind a block of it is of it, what is put behind another one is not.
    nodes[0].note_use(&column(&a, &keys[10..]), Some(keys[1]));
    nodes[0].note_use(&column(&a, &keys[8..10]), Some(keys[7]));
    assert_eq!(favoured(&a), up_to(10));
    let other = ask(&nodes[1], &b, keys[3], Ask::ClaimMs(2000), (0, 0)).await;
    assert_eq!(other.what(), What::Owned);
    nodes[1].note_use(&column(&b, &keys), None);
    assert_eq!(favoured(&b), [false; 12], "another node owns it");
    assert_eq!((nodes[0].status().owned, nodes[1].status().owned), (1, 0));
    // As long as the lease goes on, used or not.
    assert_eq!(ask(&nodes[0], &a, keys[3], Ask::RenewMs(30_000), token).await.what(), What::Granted);
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(favoured(&a), up_to(10));
    ask(&nodes[0], &a, keys[3], Ask::Release(true), token).await;
    assert_eq!((favoured(&a), nodes[0].status().owned), (vec![false; 12], 0));
    nodes.iter().for_each(|node| node.stop());
}

async fn claim(node: &ClusterNode, stage: &Stage, first: BlockKey, hold_ms: u64) -> (u64, u64) {
    let begun = Instant::now();
    loop {
        let reply = ask(node, stage, first, Ask::ClaimMs(hold_ms), (0, 0)).await;
        if let (What::Granted, Some(lease)) = (reply.what(), &reply.lease) {
            return (lease.token_epoch, lease.token_number);
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{reply:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn puts_of_a_chain_go_by_its_lease_and_what_the_owner_lacks_comes_to_it() {
    let [a, b] = ["lease-a", "lease-b"].map(Stage::new);
    let nodes = start(&[&a, &b], |options| NodeOptions { put: PutPolicy::Single(HOLD), ..options }).await;
    let keys: Vec<BlockKey> = (0..12).map(key).collect();
    let token = claim(&nodes[0], &a, keys[0], 60_000).await;
    // The owner's puts go by the lease, whatever others have.
    b.put(&keys[2..3]);
    until_located(&nodes[0], &a, &keys[2..3], b.id()).await;
    let own = nodes[0].place(column(&a, &keys[..4]), None).await.unwrap();
    assert_eq!((own.fates(), own.own().len()), (&[Fate::Stored; 4][..], 1));
    assert_eq!(nodes[0].status().puts.owned, 1);
    a.put(&keys[..4]);
    until_located(&nodes[1], &b, &keys[..4], a.id()).await;
    // Another node writes nothing that is there, and the rest for a time.
    let placing = nodes[1].place(column(&b, &keys[..8]), None).await.unwrap();
    let copied = Fate::Copied(HOLD);
    let (held, stored) = (Fate::Held, Fate::Stored);
    assert_eq!(placing.fates(), [held, held, stored, held, copied, copied, copied, copied]);
    assert!(placing.own().is_empty() && nodes[1].stands(&placing));
    b.put(&keys[4..8]);
    nodes[1].offer_to_owners(column(&b, &keys[..8]), &placing, None, |place| (4..8).contains(&place));
    until("the owner has what it lacked", || here(&a, &keys[..8]) == 8).await;
    assert_eq!((nodes[1].status().offers.forwarded, nodes[1].status().offers.taken), (4, 4));
    until("it counts them", || nodes[0].status().offers.copied == 4).await;
    let at = (GROUP, Coordinate::default());
    let favoured = || a.store().favoured(a.namespace, at, &keys[..8]).unwrap();
    until("they are of its chain", || favoured()[4..] == [true; 4]).await;
    // What hangs on a block that was put behind it is of the chain.
    assert_eq!(fates(&nodes[1], &b, &keys[8..10], Some(keys[7])).await.unwrap(), [copied; 2]);
    assert_eq!(fates(&nodes[1], &b, &keys[10..12], None).await, None, "it is not known of which chain");
    // The lease ends: what was decided by it is to be decided again, and another node's counts.
    assert!(nodes[0].stands(&own));
    ask(&nodes[0], &a, keys[0], Ask::Release(true), token).await;
    assert!(!nodes[0].stands(&own));
    claim(&nodes[1], &b, keys[0], 60_000).await;
    assert_eq!(
        fates(&nodes[0], &a, &keys[8..9], Some(keys[7])).await.unwrap(),
        [copied],
        "it came from there"
    );
    assert_eq!(fates(&nodes[0], &a, &keys[9..10], Some(keys[11])).await, None, "behind what is of no chain");
    assert_eq!(fates(&nodes[1], &b, &keys[8..9], Some(keys[7])).await.unwrap(), [stored]);
    // The owner is gone: its lease keeps no other node from storing.
    nodes[1].stop();
    until("the owner is away", || nodes[0].status().nodes.iter().any(|node| !node.is_reachable)).await;
    assert_eq!(fates(&nodes[0], &a, &keys[8..9], Some(keys[0])).await, None);
    nodes[0].stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_copy_of_what_an_owner_uses_is_offered_before_it_may_be_evicted() {
    let a = Stage::with_budget("last-a", 32 << 20);
    let b = Stage::new("last-b");
    // This one is full itself.
    let c = Stage::with_budget("last-c", 32 << 20);
    let fill = |stage: &Stage, from: u32| {
        for first in (from..).step_by(64) {
            let stats = stage.store().stats();
            if stats.allocated_bytes * 100 >= stats.budget_bytes * 82 {
                return (from..first).map(key).filter(|key| here(stage, &[*key]) == 1).collect::<Vec<_>>();
            }
            stage.put(&(first..first + 64).map(key).collect::<Vec<_>>());
        }
        unreachable!("it is full some time")
    };
    let passing: Vec<BlockKey> = (9000..9016).map(key).collect();
    a.put_for(&passing, Some(Duration::from_secs(3600)));
    let keys = fill(&a, 0);
    fill(&c, 5000);
    let small: Vec<BlockKey> = (7000..7010).map(key).collect();
    b.put(&small);
    let nodes = start(&[&a, &b, &c], |options| NodeOptions { offer_every: LOOKS_EVERY, ..options }).await;
    let (used, unused): (Vec<BlockKey>, Vec<BlockKey>) = {
        let (used, unused): (Vec<_>, Vec<_>) = keys.iter().enumerate().partition(|(n, _)| n % 16 == 0);
        let keys = |of: Vec<(usize, &BlockKey)>| of.into_iter().map(|(_, key)| *key).collect();
        (keys(used), keys(unused))
    };
    assert_eq!(read(&nodes[0], &a, &used).await.failures, []);
    assert_eq!(read(&nodes[0], &a, &passing).await.failures, []);
    assert_eq!(read(&nodes[1], &b, &small).await.failures, []);
    let others = |keys: &[BlockKey]| here(&b, keys) + here(&c, keys);
    let offers = || nodes[0].status().offers;
    // Of a chain that is no node's nothing is offered.
    tokio::time::sleep(LOOKS_EVERY * 4 / 3).await;
    assert_eq!((offers().last, others(&keys)), (0, 0));
    // One that has room owns a chain as well.
    claim(&nodes[1], &b, small[0], 60_000).await;
    nodes[1].note_use(&column(&b, &small), None);
    claim(&nodes[0], &a, keys[0], 60_000).await;
    let (of_chain, of_none) = keys.split_at(keys.len() / 2);
    nodes[0].note_use(&column(&a, of_chain), None);
    nodes[0].note_use(&column(&a, &passing), Some(keys[0]));
    until("last copies are offered", || offers().last > 0).await;
    // Where a holder was late, those that it knows of are offered at a later look. What another node has is the last copy no more.
    let begun = Instant::now();
    loop {
        until("they are taken and read", || {
            let copied: u64 = nodes[1..].iter().map(|node| node.status().offers.copied).sum();
            let OfferCounts { last, taken, .. } = offers();
            let copied_here = others(&used) as u64;
            taken == last && copied == taken && copied_here == copied
        })
        .await;
        let before = offers().last;
        tokio::time::sleep(LOOKS_EVERY * 2).await;
        if offers().last == before {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", offers());
    }
    assert!(offers().last <= used.len() as u64, "{:?}", offers());
    assert_eq!((others(&unused), here(&a, &keys)), (0, keys.len()), "what was not used is not worth it");
    assert_eq!(others(of_none), 0, "nor is what is of no own chain");
    assert_eq!(
        (others(&passing), nodes[1].status().offers.last),
        (0, 0),
        "nor what goes anyhow, or has room"
    );
    assert_eq!(here(&c, &keys), 0, "a node without room takes nothing");
    nodes.iter().for_each(|node| node.stop());
}
