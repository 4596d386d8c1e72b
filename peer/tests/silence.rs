//! What says nothing: the disk with the list of deletes, and another node. Who waits is told after a while what it is, and how long it has
//! been silent.
#![allow(clippy::disallowed_methods, reason = "a real store beside a double of the file")]

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{self, Stage, key};
use kvarts_cluster::members::{Member, Members};
use kvarts_contract::api::{DeleteRequest, Target};
use kvarts_contract::clock::{Nanos, OsEntropy};
use kvarts_layout::StoreId;
use kvarts_peer::lane::{LaneServer, Machine};
use kvarts_peer::node::{Called, Calls, ClusterNode, Footing, InMemory, Kept, Network, NodeOptions, Written};
use kvarts_peer::read::{OnTokio, Runner, Task};
use tokio::sync::watch;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, StdError, http};

/// A file that writes once it is let.
#[derive(Clone, Debug)]
struct Slow(InMemory, watch::Receiver<bool>);

impl Slow {
    fn once_it_is_let(
        &self,
        write: impl FnOnce(InMemory) -> Written<'static> + Send + 'static,
    ) -> Written<'static> {
        let (file, mut may) = (self.0.clone(), self.1.clone());
        Box::pin(async move {
            may.wait_for(|may| *may).await.map_err(io::Error::other)?;
            write(file).await
        })
    }
}

impl Kept for Slow {
    fn load(&self) -> io::Result<Vec<Vec<u8>>> {
        self.0.load()
    }

    fn append(&self, bytes: Vec<u8>) -> Written<'_> {
        self.once_it_is_let(|file| Box::pin(async move { file.append(bytes).await }))
    }

    fn replace(&self, bytes: Vec<u8>) -> Written<'_> {
        self.once_it_is_let(|file| Box::pin(async move { file.replace(bytes).await }))
    }
}

/// Time goes by a hundred times as fast for who sleeps.
#[derive(Debug)]
struct Hasty(OnTokio);

impl Runner for Hasty {
    fn now(&self) -> Nanos {
        self.0.now()
    }

    fn sleep_until(&self, at: Nanos) -> Task {
        self.0.sleep_until(self.now().plus(at.since(self.now()) / 100))
    }

    fn spawn(&self, task: Task) {
        self.0.spawn(task);
    }
}

/// Other nodes take calls and never answer.
#[derive(Debug)]
struct Silence;

impl Called for Silence {
    fn call(&self, _: http::Request<Body>) -> BoxFuture<http::Response<Body>, StdError> {
        Box::pin(std::future::pending())
    }
}

impl Network for Silence {
    fn calls(&self, _: &Member) -> Result<Calls, String> {
        Ok(Calls::Given(Arc::new(Self)))
    }

    fn address(&self, member: &Member, _: u16) -> BoxFuture<SocketAddr, String> {
        Box::pin(std::future::ready(Err(member.address.clone())))
    }
}

fn start(stage: &Stage, others: &[Member], deletes: Arc<dyn Kept>) -> Arc<ClusterNode> {
    let store = stage.store().clone();
    let runner = OnTokio::new(Arc::clone(store.clock()), tokio::runtime::Handle::current());
    let footing = Footing {
        runner: Arc::new(Hasty(runner)),
        host: Arc::new(Machine),
        entropy: OsEntropy::new(),
        network: Arc::new(Silence),
        least_piece: 1 << 20,
    };
    let me = Member { id: stage.id(), address: "127.0.0.1:1".to_owned(), zone: String::new() };
    let members = Members::new(1, [&[me], others].concat()).unwrap();
    let options = NodeOptions { deletes, ..common::options(&members) };
    let at = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let serving = |served, member, limits| LaneServer::start(Arc::new(served), at, member, limits);
    ClusterNode::start_on(store, footing, serving, options).unwrap()
}

#[tokio::test]
async fn a_list_that_is_not_written_is_told_to_who_deletes_and_counts_when_it_is_written_after_all() {
    let stage = Stage::new("slow-list");
    let file = InMemory::default();
    let (let_it, may) = watch::channel(false);
    let node = start(&stage, &[], Arc::new(Slow(file.clone(), may)));
    let delete = |number| {
        let target = Target::Keys { column: None, keys: vec![key(number)] };
        node.delete(DeleteRequest { namespace: stage.namespace, target, deadline: None })
    };
    for (number, what) in [(1, "has not been written for 10 s"), (2, "has accepted no new entry for 10 s")] {
        let told = delete(number).await.unwrap_err().to_string();
        assert!(told.contains("the list of deletes") && told.contains(what), "{told}");
    }
    assert!(file.bytes().is_empty() && node.deletes_known().is_empty());
    let_it.send_replace(true);
    let begun = Instant::now();
    while node.deletes_known().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(30), "what was written does not count");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let first = node.deletes_known();
    let third = delete(3).await.unwrap();
    assert!(first.values().all(|known| *known + 1 == third.name.1), "{first:?} {:?}", third.name);
}

#[tokio::test]
async fn a_node_that_never_answers_is_named_with_its_address_and_the_time_that_it_had() {
    let (stage, id) = (Stage::new("silence"), StoreId([7; 16]));
    let other = Member { id, address: "10.1.2.3:7442".to_owned(), zone: String::new() };
    let node = start(&stage, &[other], Arc::new(InMemory::default()));
    let trouble = || node.status().nodes.iter().find(|other| other.member.id == id).unwrap().trouble.clone();
    let begun = Instant::now();
    while trouble().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(30), "nothing is told of it");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(trouble(), format!("node {id} at 10.1.2.3:7442 has not responded within 4.0 s"));
}
