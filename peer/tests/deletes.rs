//! What is deleted through one node is gone on all of them, also where a node hears of it late; what was put later stays, and no
//! copies keep each other.
#![allow(clippy::disallowed_methods, reason = "real nodes on loopback")]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{self, GROUP, Stage, key};
use kvarts_cluster::deletes::{Entry, What};
use kvarts_contract::api::{ContainsRequest, DeleteOutcome, DeleteRequest, KvStore, Presence, Target};
use kvarts_layout::{BlockKey, Coordinate};
use kvarts_peer::node::{Beside, ClusterNode, Column, Deleted, Guarded, InMemory, NodeOptions, Underway};
use tokio::net::TcpListener;

fn here(stage: &Stage, keys: &[BlockKey]) -> usize {
    let (namespace, group, coordinate) = (stage.namespace, GROUP, Coordinate::default());
    let asked = ContainsRequest { namespace, group, coordinate, keys, lease: None };
    let reply = stage.store().contains(&asked).unwrap();
    reply.presence.iter().filter(|presence| **presence == Presence::Here).count()
}

/// What look-ups on a node say of deletes.
fn deletes(stage: &Stage, some: &[BlockKey]) -> u64 {
    let (namespace, group, coordinate) = (stage.namespace, GROUP, Coordinate::default());
    let asked = ContainsRequest { namespace, group, coordinate, keys: some, lease: None };
    stage.store().contains(&asked).unwrap().deletes
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(30), "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn until_reached(node: &Arc<ClusterNode>) {
    until("all nodes are reached", || node.status().nodes.iter().all(|node| node.is_reachable)).await;
}

fn knows(node: &ClusterNode, stage: &Stage) {
    let (identity, geometry) = common::model();
    node.know(&identity, &geometry, stage.namespace);
}

async fn delete(node: &Arc<ClusterNode>, stage: &Stage, target: Target) -> Deleted {
    node.delete(DeleteRequest { namespace: stage.namespace, target, deadline: None }).await.unwrap()
}

/// Has a node copy blocks until it has all of them.
async fn copied(node: &Arc<ClusterNode>, stage: &Stage, keys: &[BlockKey]) {
    let begun = Instant::now();
    while here(stage, keys) < keys.len() {
        assert!(begun.elapsed() < Duration::from_secs(30), "not copied");
        copy(node, stage, keys).await;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn copy(node: &Arc<ClusterNode>, stage: &Stage, keys: &[BlockKey]) {
    let (namespace, group, coordinate) = (stage.namespace, GROUP, Coordinate::default());
    let column = Column { namespace, group, coordinate, keys };
    node.replicate(column, &stage.shape, None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_of_copies_end_with_what_they_are_of_however_often_nodes_copy_from_each_other() {
    let [a, b] = ["ends-a", "ends-b"].map(Stage::new);
    let nodes = common::start(&[&a, &b]).await;
    for (node, stage) in nodes.iter().zip([&a, &b]) {
        knows(node, stage);
        until_reached(node).await;
    }
    let keys: Vec<BlockKey> = (0..8).map(key).collect();
    a.put_for(&keys, Some(Duration::from_millis(1500)));
    let begun = Instant::now();
    while here(&a, &keys) + here(&b, &keys) > 0 {
        assert!(begun.elapsed() < Duration::from_secs(30), "two copies keep each other");
        copy(&nodes[1], &b, &keys).await;
        copy(&nodes[0], &a, &keys).await;
    }
    nodes.iter().for_each(|node| node.stop());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_descends_from_a_key_goes_on_every_node_whichever_knows_that_it_does() {
    let stages = ["prefix-a", "prefix-b", "prefix-c"].map(Stage::new);
    let [a, b, c] = &stages;
    let nodes = common::start(&[a, b, c]).await;
    for (node, stage) in nodes.iter().zip(&stages) {
        knows(node, stage);
        until_reached(node).await;
    }
    let keys: Vec<BlockKey> = (0..9).map(key).collect();
    // The second part of the chain was put at another node, and a third one has copies of all, which say nothing of that.
    a.put_behind(&keys[..3], None);
    b.put_behind(&keys[3..6], Some(keys[2]));
    a.put_behind(&keys[6..], None);
    copied(&nodes[2], c, &keys).await;
    let deleted = delete(&nodes[0], a, Target::Prefix(keys[0])).await;
    assert_eq!((deleted.reply.blocks, deleted.away), (12, Vec::new()));
    assert_eq!(stages.each_ref().map(|stage| here(stage, &keys[..6])), [0; 3]);
    assert_eq!((here(a, &keys[6..]), here(c, &keys[6..])), (3, 3), "another chain stays");
    nodes.iter().for_each(|node| node.stop());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_has_nothing_of_what_is_deleted_on_another_says_that_something_was() {
    let stages = ["told-a", "told-b"].map(Stage::new);
    let [a, b] = &stages;
    let nodes = common::start(&[a, b]).await;
    for (node, stage) in nodes.iter().zip(&stages) {
        knows(node, stage);
        until_reached(node).await;
    }
    let keys: Vec<BlockKey> = (0..3).map(key).collect();
    for target in
        [Target::Prefix(keys[0]), Target::Keys { column: None, keys: keys.clone() }, Target::Namespace]
    {
        b.put_behind(&keys, None);
        let before = stages.each_ref().map(|stage| deletes(stage, &keys));
        assert_eq!(before, stages.each_ref().map(|stage| deletes(stage, &keys)));
        let deleted = delete(&nodes[1], b, target.clone()).await;
        assert_eq!((deleted.away, here(a, &keys)), (Vec::new(), 0));
        for (stage, before) in stages.iter().zip(before) {
            assert_ne!(deletes(stage, &keys), before, "{target:?}");
        }
    }
    nodes.iter().for_each(|node| node.stop());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_hears_late_deletes_what_was_put_before_and_nothing_else() {
    for (name, everything) in [("late", false), ("late-all", true)] {
        let [a, b] = ["a", "b"].map(|of| Stage::new(&format!("{name}-{of}")));
        let listeners = [
            TcpListener::bind("127.0.0.1:0").await.unwrap(),
            TcpListener::bind("127.0.0.1:0").await.unwrap(),
        ];
        let members = common::members(1, &[&a, &b], &listeners);
        let [of_a, of_b] = listeners;
        let kept = InMemory::default();
        let options =
            |start| NodeOptions { deletes: Arc::new(kept.clone()), start, ..common::options(&members) };
        let one = ClusterNode::start(a.store().clone(), of_a, options(1)).unwrap();
        let (before, since): (Vec<BlockKey>, Vec<BlockKey>) =
            ((0..4).map(key).collect(), (4..6).map(key).collect());
        b.put(&before);
        let all = [&before[..], &since].concat();
        let target =
            if everything { Target::Namespace } else { Target::Keys { column: None, keys: all.clone() } };
        let deleted = delete(&one, &a, target).await;
        assert_eq!(deleted.away.iter().map(|away| away.node).collect::<Vec<_>>(), [b.id()]);
        // As if it were a while later.
        b.store().produce_after(b.store().wall_ms() + 60_000);
        b.put(&since);
        let other = ClusterNode::start(b.store().clone(), of_b, common::options(&members)).unwrap();
        until_reached(&other).await;
        until_reached(&one).await;
        assert_eq!((here(&b, &before), here(&b, &since)), (0, 2), "everything: {everything}");
        assert_eq!(other.deletes_known(), one.deletes_known());
        // Who has heard of it puts it again.
        b.put(&before);
        let deleted = delete(&other, &b, Target::Keys { column: None, keys: before.clone() }).await;
        assert_eq!(deleted.reply.outcomes, vec![DeleteOutcome::Deleted; 4]);
        assert_eq!(deleted.away, Vec::new());
        other.stop();
        one.stop();
        assert!(kept.bytes().len() > 100, "what was deleted is kept");
    }
}

/// What holds blocks beside a store, and notes what it hears: each entry when the store is about to carry it out, and its name when the
/// store has.
#[derive(Clone, Debug, Default)]
struct Noting(Arc<Mutex<(Vec<Entry>, usize)>>);

impl Noting {
    /// What was heard, if the store has carried out all of it.
    fn heard(&self) -> Vec<Entry> {
        let noted = self.0.lock().unwrap();
        assert_eq!(noted.0.len(), noted.1, "something was begun and not done");
        noted.0.clone()
    }
}

impl Beside for Noting {
    fn carrying<'a>(&'a self, entry: &'a Entry) -> Guarded<'a> {
        self.0.lock().unwrap().0.push(entry.clone());
        let noting = self.clone();
        Box::pin(async move { Box::new(noting) as Box<dyn Underway<'a> + 'a> })
    }
}

impl<'a> Underway<'a> for Noting {
    fn done(self: Box<Self>) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        self.0.lock().unwrap().1 += 1;
        Box::pin(std::future::ready(()))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_holds_blocks_beside_a_store_hears_what_another_node_was_asked_with_its_own_time() {
    let [a, b] = ["beside-a", "beside-b"].map(Stage::new);
    let listeners =
        [TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap()];
    let members = common::members(1, &[&a, &b], &listeners);
    let [of_a, of_b] = listeners;
    let one = ClusterNode::start(a.store().clone(), of_a, common::options(&members)).unwrap();
    let keys: Vec<BlockKey> = (0..6).map(key).collect();
    a.put(&keys);
    b.put(&keys);
    let delete_of = |keys: &[BlockKey]| Target::Keys { column: None, keys: keys.to_vec() };
    let deleted = delete(&one, &a, delete_of(&keys[..2])).await;
    assert_eq!(deleted.away.len(), 1);
    let column = (GROUP, Coordinate::default());
    let hour = Duration::from_secs(3600);
    one.end_sooner(a.namespace, column, keys[2..4].to_vec(), hour).await.unwrap();
    // As if it were a while later, when some of it was put again.
    b.store().produce_after(b.store().wall_ms() + 60_000);
    delete_here(&b, &keys[..1]).await;
    b.put(&keys[..1]);
    let options = NodeOptions { has_tier: true, ..common::options(&members) };
    let (other, noting) = (ClusterNode::start(b.store().clone(), of_b, options).unwrap(), Noting::default());
    // Entries of other nodes wait until the tier is set.
    let taken = until("something is carried out", || !other.deletes_known().is_empty());
    assert!(tokio::time::timeout(Duration::from_millis(500), taken).await.is_err());
    other.set_beside(Arc::new(noting.clone()));
    until_reached(&other).await;
    until_reached(&one).await;
    let heard = noting.heard();
    let [first, second] = &heard[..] else { panic!("{heard:?}") };
    assert_eq!((&first.what, first.below_ms), (&What::Keys(None, keys[..2].to_vec()), deleted.below_ms));
    let What::Sooner(of, shorter, ends_ms) = &second.what else { panic!("{second:?}") };
    assert_eq!((*of, &shorter[..]), (column, &keys[2..4]));
    assert!(*ends_ms > a.store().wall_ms() && *ends_ms <= a.store().wall_ms() + 3_600_000);
    assert!(second.below_ms < b.store().produced_now(), "{second:?}");
    assert_eq!((here(&b, &keys[..1]), here(&b, &keys[1..2])), (1, 0));
    // A member that is there hears of each at once, once; also of blocks that are not here.
    let strange: Vec<BlockKey> = (90..92).map(key).collect();
    for target in [delete_of(&keys[4..]), delete_of(&strange)] {
        let Target::Keys { keys, .. } = target.clone() else { panic!() };
        let deleted = delete(&one, &a, target).await;
        assert_eq!(deleted.away, Vec::new());
        let last = noting.heard().pop().unwrap();
        assert_eq!((last.what, last.below_ms), (What::Keys(None, keys), deleted.below_ms));
    }
    one.end_sooner(a.namespace, column, strange.clone(), hour).await.unwrap();
    let heard = noting.heard();
    assert!(matches!(&heard[4].what, What::Sooner(_, keys, _) if *keys == strange), "{heard:?}");
    assert_eq!(heard.len(), 5, "{heard:?}");
    other.stop();
    one.stop();
}

/// Deletes blocks from one store alone, as before it was a node of a cluster.
async fn delete_here(stage: &Stage, keys: &[BlockKey]) {
    let target = Target::Keys { column: None, keys: keys.to_vec() };
    let request = DeleteRequest { namespace: stage.namespace, target, deadline: None };
    stage.store().delete(request).await.unwrap().unwrap();
}
