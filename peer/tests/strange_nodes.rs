//! Members that do what no node does. What they cost is their own usefulness: what others have is found and read, leases stay whose
//! they are, and nothing is kept of them beyond what each member may have.
#![allow(clippy::disallowed_methods, reason = "real time, real connections")]

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{self, GROUP, Stage, key, options, strangers};
use kvarts_cluster::members::{Member, Members, NodeId};
use kvarts_cluster::partition::{Holders, Partition, Tag};
use kvarts_contract::api::{Origins, Placed, ReadEnd, ReadRequest};
use kvarts_contract::buffers::{BufMut, SharedBuf};
use kvarts_layout::{BlockKey, Coordinate, StoreId};
use kvarts_peer::node::{ClusterNode, Column, NodeOptions, PutPolicy, VERSION, lease_of};
use kvarts_wire::proto;
use kvarts_wire::proto::nodes_client::NodesClient;
use kvarts_wire::proto::nodes_server::{Nodes, NodesServer};
use proto::chain_reply::What;
use proto::chain_request::Ask;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::Pending;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Server};
use tonic::{Code, Request, Response, Status, Streaming};

/// The member that a test plays.
const STRANGER: NodeId = StoreId(*b"plays a member..");
const TIMEOUT: Duration = Duration::from_secs(60);

fn tag(stage: &Stage, key: &BlockKey) -> Tag {
    Tag::of(&stage.namespace, GROUP, Coordinate::default(), key)
}

/// Waits until it is so.
async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !is_so() {
        assert!(start.elapsed() < TIMEOUT, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Nodes on these stores, and where they are; the stranger, at `stranger`, is a member beside them.
async fn nodes_beside(
    stages: &[&Stage],
    stranger: SocketAddr,
    change: impl Fn(NodeOptions) -> NodeOptions,
) -> (Vec<Arc<ClusterNode>>, Members) {
    let mut listeners = Vec::new();
    for _ in stages {
        listeners.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
    }
    let honest = common::members(1, stages, &listeners);
    let member = Member { id: STRANGER, address: stranger.to_string(), zone: String::new() };
    let members = Members::new(1, honest.list().iter().cloned().chain([member]).collect()).unwrap();
    let start = |(stage, listener): (&&Stage, TcpListener)| {
        ClusterNode::start(stage.store().clone(), listener, change(options(&members))).unwrap()
    };
    (stages.iter().zip(listeners).map(start).collect(), members)
}

async fn calls(members: &Members, to: NodeId) -> NodesClient<Channel> {
    let address = members.get(to).unwrap().address.clone();
    strangers::calls(STRANGER, strangers::SECRET, (address, to)).await.unwrap()
}

/// One look-up, over a call of its own.
async fn look_up(
    client: &mut NodesClient<Channel>,
    tags: bytes::Bytes,
) -> Result<proto::LocateReply, Status> {
    let asked = proto::LocateRequest { tags, ..proto::LocateRequest::default() };
    let (say, said) = mpsc::channel(1);
    say.send(asked).await.unwrap();
    let mut answers = client.locate(ReceiverStream::new(said)).await?.into_inner();
    answers.message().await?.ok_or_else(|| Status::unavailable("no answer"))
}

/// An address at which no server ever answers.
async fn nowhere() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Says that these blocks are, or are not, on the stranger, and stays connected as long as what is given.
async fn announces(
    members: &Members,
    to: NodeId,
    tags: &[Tag],
) -> (mpsc::Sender<proto::FeedMessage>, Streaming<proto::FeedReply>) {
    let (say, said) = mpsc::channel(4);
    let mut client = calls(members, to).await;
    let heard = client.feed(ReceiverStream::new(said)).await.unwrap().into_inner();
    for some in tags.chunks(1024) {
        let changes: Vec<u8> = some.iter().flat_map(|tag| tag.0.into_iter().chain([1])).collect();
        let message = proto::FeedMessage { changes: changes.into(), ..proto::FeedMessage::default() };
        say.send(message).await.unwrap();
    }
    (say, heard)
}

async fn read(node: &Arc<ClusterNode>, stage: &Stage, keys: &[BlockKey]) -> (ReadEnd, SharedBuf) {
    let memory = BufMut::zeroed(stage.shape.block_bytes() as usize * keys.len()).unwrap().share();
    let into = Placed::blocks(&stage.shape, memory.clone(), keys.len() as u32).unwrap();
    let request = ReadRequest::new(stage.namespace, GROUP, Coordinate::default(), keys.to_vec(), into);
    let stream = node.read(request, &stage.shape, &Origins::any(keys.len())).unwrap();
    let end = std::future::poll_fn(|context| stream.poll_end(context)).await.unwrap();
    (end, memory)
}

/// Reads until all of these blocks came, which are what was put.
async fn until_read(node: &Arc<ClusterNode>, stage: &Stage, keys: &[BlockKey]) {
    let start = std::time::Instant::now();
    loop {
        let (end, memory) = read(node, stage, keys).await;
        if end.usable_blocks as usize == keys.len() {
            let bytes = stage.shape.block_bytes() as usize;
            for (block, key) in keys.iter().enumerate() {
                let mut found = vec![0; bytes];
                memory.copy_out(block * bytes, &mut found);
                assert!(found == common::content(key, bytes), "block {block}");
            }
            return;
        }
        assert!(start.elapsed() < TIMEOUT, "{:?}", end.failures);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_claims_to_have_everything_costs_no_block_that_another_has_and_no_room_of_another() {
    let [a, c] = ["claims-a", "claims-c"].map(Stage::new);
    let (_nobody, stranger) = nowhere().await;
    let most = 6000;
    let few = |options| NodeOptions { entries_max: most, ..options };
    let (nodes, members) = nodes_beside(&[&a, &c], stranger, few).await;
    let (identity, geometry) = common::model();
    nodes.iter().for_each(|node| node.know(&identity, &geometry, a.namespace));
    let keys: Vec<BlockKey> = (0..300).map(key).collect();
    // Of all blocks that there will be, and of many that there are not.
    let claimed: Vec<Tag> = (0..30_000).map(|n| tag(&a, &key(n))).collect();
    let mut feeds = Vec::new();
    for node in &nodes {
        feeds.push(announces(&members, node.id(), &claimed).await);
    }
    let is_full = |node: &Arc<ClusterNode>| node.status().left_out > 0;
    until("the directories to have enough of it", || nodes.iter().all(is_full)).await;
    c.put(&keys);
    until_read(&nodes[0], &c, &keys).await;
    until_read(&nodes[1], &c, &keys).await;
    for node in &nodes {
        let status = node.status();
        assert!(status.entries <= most, "{} entries", status.entries);
    }
    // What it alone claims to have is a miss.
    let (end, _) = read(&nodes[0], &a, &(1000..1004).map(key).collect::<Vec<_>>()).await;
    assert!(end.usable_blocks == 0 && !end.failures.is_empty(), "{end:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stolen_a_forged_and_an_old_token_move_no_lease() {
    let [a, c] = ["tokens-a", "tokens-c"].map(Stage::new);
    let (_nobody, stranger) = nowhere().await;
    let (nodes, members) = nodes_beside(&[&a, &c], stranger, |options| options).await;
    let [holder, owner] = &nodes[..] else { panic!("two nodes") };
    let holders = Holders::of(&members);
    let held = |tag: &Tag| holders.holder(tag.partition()) == Some(holder.id());
    let chain = (0..).map(|n| tag(&a, &key(n))).find(held).unwrap();
    let asking = |node: NodeId, ask| proto::ChainRequest {
        ask: Some(ask),
        node: node.0.to_vec().into(),
        tag: chain.0.to_vec().into(),
        ..proto::ChainRequest::default()
    };
    let mut replies = Vec::new();
    for _ in 0..2 {
        // Until a majority has confirmed it, a holder grants nothing.
        replies.push(loop {
            let reply = owner.chain(chain, asking(owner.id(), Ask::ClaimMs(60_000))).await.unwrap();
            match reply.what() {
                What::Granted => break reply,
                What::New | What::Unreachable => tokio::time::sleep(Duration::from_millis(20)).await,
                what => panic!("{what:?}"),
            }
        });
    }
    let tokens: Vec<_> = replies.iter().map(|reply| lease_of(reply).unwrap().1).collect();
    let (old, now) = (tokens[0], tokens[1]);
    let mut stranger = calls(&members, holder.id()).await;
    let with = |epoch, number, request| proto::ChainRequest {
        token_epoch: epoch,
        token_number: number,
        replica: STRANGER.0.to_vec().into(),
        ..request
    };
    let asks = [Ask::ClaimMs(1), Ask::RenewMs(60_000), Ask::Release(true), Ask::ReplicateMs(60_000)];
    for ask in asks {
        // As another node it says nothing at all.
        let stolen = with(now.epoch, now.number, asking(owner.id(), ask));
        let refused = stranger.chain(stolen).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{ask:?}");
        for (epoch, number) in
            [(now.epoch, now.number), (old.epoch, old.number), (u64::MAX, u64::MAX), (now.epoch, u64::MAX)]
        {
            let own = with(epoch, number, asking(STRANGER, ask));
            let reply = stranger.chain(own).await.unwrap().into_inner();
            assert!(matches!(reply.what(), What::Owned | What::Stale), "{ask:?}: {reply:?}");
            assert_eq!(reply.replicas.len(), 0, "{ask:?}");
        }
        let reply = owner.chain(chain, asking(owner.id(), Ask::Look(true))).await.unwrap();
        assert_eq!(lease_of(&reply), Some((owner.id(), now)), "after {ask:?}");
    }
    // An old token of its own is worth no more to the owner itself.
    let late = with(old.epoch, old.number, asking(owner.id(), Ask::RenewMs(60_000)));
    assert!(matches!(owner.chain(chain, late).await.unwrap().what(), What::Owned | What::Stale));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chains_that_a_member_claims_without_end_leave_room_for_those_of_others() {
    let [a, c] = ["chains-a", "chains-c"].map(Stage::new);
    let (_nobody, stranger) = nowhere().await;
    let few = |options| NodeOptions { chains_max: 40, ..options };
    let (nodes, members) = nodes_beside(&[&a, &c], stranger, few).await;
    let [holder, owner] = &nodes[..] else { panic!("two nodes") };
    let holders = Holders::of(&members);
    let held = |tag: &Tag| holders.holder(tag.partition()) == Some(holder.id());
    let mut chains = (0..).map(|n| tag(&a, &key(n))).filter(held);
    let mut client = calls(&members, holder.id()).await;
    let mut full = 0;
    while full < 100 {
        let chain = chains.next().unwrap();
        let asked = proto::ChainRequest {
            ask: Some(Ask::ClaimMs(60_000)),
            node: STRANGER.0.to_vec().into(),
            tag: chain.0.to_vec().into(),
            ..proto::ChainRequest::default()
        };
        let reply = client.chain(asked).await.unwrap().into_inner();
        full += u32::from(reply.what() == What::Full);
    }
    for chain in chains.take(8) {
        let asked = proto::ChainRequest {
            ask: Some(Ask::ClaimMs(60_000)),
            node: owner.id().0.to_vec().into(),
            ..proto::ChainRequest::default()
        };
        loop {
            match owner.chain(chain, asked.clone()).await.unwrap().what() {
                What::Granted => break,
                What::New | What::Unreachable => tokio::time::sleep(Duration::from_millis(20)).await,
                what => panic!("{what:?}"),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_without_end_hold_up_nobody_else_and_leave_nothing() {
    let [a, c] = ["floods-a", "floods-c"].map(Stage::new);
    let (_nobody, stranger) = nowhere().await;
    let (nodes, members) = nodes_beside(&[&a, &c], stranger, |options| options).await;
    let (identity, geometry) = common::model();
    nodes.iter().for_each(|node| node.know(&identity, &geometry, a.namespace));
    let keys: Vec<BlockKey> = (0..50).map(key).collect();
    c.put(&keys);
    until_read(&nodes[0], &c, &keys).await;
    let tags: Vec<u8> = (0..65_536).flat_map(|n: u32| [n as u8, (n >> 8) as u8].repeat(8)).collect();
    let tags = bytes::Bytes::from(tags);
    let (stop, stopped) = watch::channel(false);
    let mut floods = Vec::new();
    for _ in 0..2 {
        let client = calls(&members, nodes[0].id()).await;
        for _ in 0..64 {
            let (mut client, tags, stopped) = (client.clone(), tags.clone(), stopped.clone());
            floods.push(tokio::spawn(async move {
                let mut answered = 0;
                while !*stopped.borrow() {
                    answered += u32::from(look_up(&mut client, tags.clone()).await.is_ok());
                }
                answered
            }));
        }
    }
    for _ in 0..5 {
        until_read(&nodes[0], &c, &keys).await;
        until_read(&nodes[1], &c, &keys).await;
    }
    stop.send(true).unwrap();
    for flood in floods {
        flood.await.unwrap();
    }
    let served = || nodes.iter().map(|node| node.status().served.memory).sum::<u64>();
    until("memory to come back", || served() == 0).await;
}

#[tokio::test]
async fn questions_that_are_none_end_their_call_and_no_other() {
    let a = Stage::new("questions-a");
    let (_nobody, stranger) = nowhere().await;
    let (nodes, members) = nodes_beside(&[&a], stranger, |options| options).await;
    let to = nodes[0].id();
    let mut client = calls(&members, to).await;
    let (say, said) = mpsc::channel(4);
    let mut good = client.locate(ReceiverStream::new(said)).await.unwrap().into_inner();
    for wrong in [vec![1; 15], vec![1; 17], vec![1; (65_536 + 1) * 16]] {
        let refused = look_up(&mut client, wrong.into()).await.unwrap_err();
        assert!(matches!(refused.code(), Code::InvalidArgument | Code::OutOfRange), "{refused}");
    }
    // Answers come in the order of questions, each with the number of its own.
    for number in [7, 3, 3] {
        say.send(proto::LocateRequest { tags: vec![2; 32].into(), number, owners: true }).await.unwrap();
        let answer = good.message().await.unwrap().unwrap();
        assert_eq!((answer.number, &answer.copies[..], answer.owners.len()), (number, &[0, 0][..], 0));
    }
    nodes[0].stop();
    assert!(!matches!(good.message().await, Ok(Some(_))), "it ends with the node");
}

#[tokio::test]
async fn what_a_member_offers_is_bounded_and_of_a_model_that_was_shown() {
    let a = Stage::new("offers-a");
    let (_nobody, stranger) = nowhere().await;
    let (nodes, members) = nodes_beside(&[&a], stranger, |options| options).await;
    let to = nodes[0].id();
    let mut client = calls(&members, to).await;
    let offer = |keys: Vec<u8>, namespace: Vec<u8>, chain: Vec<u8>| {
        let (namespace, keys, chain) = (namespace.into(), keys.into(), chain.into());
        let column = Some(kvarts_wire::convert::wire_column(GROUP, Coordinate::default()));
        proto::OfferRequest { namespace, column, keys, chain, ..Default::default() }
    };
    let namespace = a.namespace.as_bytes().to_vec();
    let keys: Vec<BlockKey> = (0..8).map(key).collect();
    let named: Vec<u8> = keys.iter().flat_map(|key| key.0).collect();
    let taken = async |client: &mut NodesClient<Channel>, offer| {
        client.offer(offer).await.unwrap().into_inner().taken
    };
    assert_eq!(taken(&mut client, offer(named.clone(), namespace.clone(), vec![])).await, 0, "never shown");
    let (identity, geometry) = common::model();
    nodes[0].know(&identity, &geometry, a.namespace);
    a.put(&keys[..3]);
    for (keys, of, chain) in [
        (vec![1; 31], namespace.clone(), vec![]),
        (vec![1; 32 * 4097], namespace.clone(), vec![]),
        (named.clone(), vec![1; 31], vec![]),
        (named.clone(), namespace.clone(), vec![1; 15]),
    ] {
        let refused = client.offer(offer(keys, of, chain)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    }
    assert_eq!(
        taken(&mut client, offer(named.clone(), namespace.clone(), vec![])).await,
        5,
        "but what is here"
    );
    // No node has any of it: what there may be of such offers is bounded.
    let mut sum = 0;
    for _ in 0..200 {
        sum += taken(&mut client, offer(named.clone(), namespace.clone(), vec![])).await;
    }
    assert!((5..=5 * 80).contains(&sum), "{sum}");
    until("an offer to be given up", || nodes[0].status().offers.failed > 0).await;
    assert_eq!(nodes[0].status().offers.copied, 0);
    nodes[0].stop();
}

#[tokio::test]
async fn who_is_no_member_is_refused_before_what_it_sends_is_taken() {
    let a = Stage::new("nobody-a");
    let (_nobody, stranger) = nowhere().await;
    let (nodes, members) = nodes_beside(&[&a], stranger, |options| options).await;
    let to = nodes[0].id();
    let address = members.get(to).unwrap().address.clone();
    // One that says nothing of itself, or not what a member knows, is not heard at all.
    let silent = Channel::from_shared(format!("http://{address}")).unwrap().connect().await;
    let heard = match silent {
        Ok(channel) => NodesClient::new(channel).chain(proto::ChainRequest::default()).await.is_ok(),
        Err(_) => false,
    };
    assert!(!heard);
    let at = || (address.clone(), to);
    assert!(strangers::calls(STRANGER, b"another secret", at()).await.is_err());
    assert!(strangers::calls(STRANGER, strangers::SECRET, (address.clone(), STRANGER)).await.is_err());
    // One that knows the secret and is no member: a body that never comes.
    let other = StoreId(*b"was never member");
    let mut client = strangers::calls(other, strangers::SECRET, at()).await.unwrap();
    let (_say, said) = mpsc::channel::<proto::FeedMessage>(1);
    let refused = client.feed(ReceiverStream::new(said)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let (_say, said) = mpsc::channel::<proto::LocateRequest>(1);
    let refused = client.locate(ReceiverStream::new(said)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(look_up(&mut calls(&members, to).await, bytes::Bytes::new()).await.is_ok());
}

#[tokio::test]
async fn connections_that_show_nothing_keep_no_node_out() {
    let a = Stage::new("crowd-a");
    let (_nobody, stranger) = nowhere().await;
    let (nodes, members) = nodes_beside(&[&a], stranger, |options| options).await;
    let address = members.get(nodes[0].id()).unwrap().address.clone();
    let mut crowd = Vec::new();
    for _ in 0..300 {
        crowd.push(tokio::net::TcpStream::connect(&address).await.unwrap());
    }
    assert!(look_up(&mut calls(&members, nodes[0].id()).await, bytes::Bytes::new()).await.is_ok());
    // Those that came first have gone.
    let mut first = crowd.swap_remove(0);
    let (mut nonce, mut more) = ([0; 32], Vec::new());
    tokio::io::AsyncReadExt::read_exact(&mut first, &mut nonce).await.unwrap();
    let end = tokio::io::AsyncReadExt::read_to_end(&mut first, &mut more);
    assert!(tokio::time::timeout(TIMEOUT, end).await.is_ok() && more.is_empty());
}

/// A holder of the directory that takes nothing until it is told to, and asks what it is told to ask.
struct Holder {
    takes: watch::Receiver<bool>,
    asks: Mutex<Option<mpsc::Receiver<Result<proto::FeedReply, Status>>>>,
    heard: Arc<Mutex<BTreeSet<Tag>>>,
}

#[tonic::async_trait]
impl Nodes for Holder {
    type FeedStream = ReceiverStream<Result<proto::FeedReply, Status>>;
    type LocateStream = Pending<Result<proto::LocateReply, Status>>;

    async fn join(&self, _: Request<proto::JoinRequest>) -> Result<Response<proto::JoinReply>, Status> {
        let node = STRANGER.0.to_vec().into();
        Ok(Response::new(proto::JoinReply { version: VERSION, node, epoch: 1, lane_port: 0 }))
    }

    async fn feed(
        &self,
        request: Request<Streaming<proto::FeedMessage>>,
    ) -> Result<Response<Self::FeedStream>, Status> {
        let (mut messages, mut takes) = (request.into_inner(), self.takes.clone());
        let heard = Arc::clone(&self.heard);
        let asks = self.asks.lock().unwrap().take().ok_or_else(|| Status::unavailable("once"))?;
        tokio::spawn(async move {
            takes.wait_for(|takes| *takes).await.unwrap();
            while let Ok(Some(message)) = messages.message().await {
                let changes = message.changes.as_chunks::<17>().0.iter();
                let stored = changes.filter_map(|[tag @ .., what]| (*what == 1).then_some(Tag(*tag)));
                heard.lock().unwrap().extend(stored);
            }
        });
        Ok(Response::new(ReceiverStream::new(asks)))
    }

    async fn locate(
        &self,
        _: Request<Streaming<proto::LocateRequest>>,
    ) -> Result<Response<Self::LocateStream>, Status> {
        Ok(Response::new(tokio_stream::pending()))
    }

    async fn chain(&self, _: Request<proto::ChainRequest>) -> Result<Response<proto::ChainReply>, Status> {
        Err(Status::unimplemented("it holds and says nothing"))
    }

    async fn offer(&self, _: Request<proto::OfferRequest>) -> Result<Response<proto::OfferReply>, Status> {
        Err(Status::unimplemented("it holds and says nothing"))
    }

    async fn deletes(
        &self,
        _: Request<proto::DeletesRequest>,
    ) -> Result<Response<proto::DeletesReply>, Status> {
        Ok(Response::new(proto::DeletesReply::default()))
    }
}

#[tokio::test]
async fn a_put_does_not_wait_for_a_holder_that_takes_questions_and_answers_none() {
    let a = Stage::new("unanswered-a");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let ((_take, takes), (_ask, asks)) = (watch::channel(true), mpsc::channel(4));
    let holder = Holder { takes, asks: Mutex::new(Some(asks)), heard: Arc::default() };
    let serving = Server::builder().add_service(NodesServer::new(holder));
    tokio::spawn(serving.serve_with_incoming(strangers::called(STRANGER, listener)));
    let put = PutPolicy::Single(Duration::from_secs(60));
    let (nodes, _) = nodes_beside(&[&a], at, |options| NodeOptions { put, ..options }).await;
    let is_reached = || nodes[0].status().nodes.iter().all(|node| node.is_reachable);
    until("the holder to be reached", is_reached).await;
    let keys: Vec<BlockKey> = (0..100).map(key).collect();
    let column =
        Column { namespace: a.namespace, group: GROUP, coordinate: Coordinate::default(), keys: &keys };
    for turn in 1..4 {
        let placed = tokio::time::timeout(Duration::from_secs(4), nodes[0].place(column, None)).await;
        assert_eq!(placed, Ok(None), "what is not known in time is stored");
        assert!(nodes[0].status().puts.unasked >= 20 * turn);
    }
    nodes[0].stop();
}

/// What was taken from the queue for a holder had to wait for room on its way there, and was dropped when the holder asked for
/// something meanwhile. Nothing was wrong with the connection, so nothing was ever said again.
#[tokio::test]
async fn a_message_that_waits_for_its_holder_is_not_lost_when_the_holder_asks_for_something() {
    let a = Stage::new("question-a");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let ((take, takes), (ask, asks)) = (watch::channel(false), mpsc::channel(4));
    let heard = Arc::<Mutex<BTreeSet<Tag>>>::default();
    let holder = Holder { takes, asks: Mutex::new(Some(asks)), heard: Arc::clone(&heard) };
    // As little as possible is on its way.
    let server = Server::builder().initial_stream_window_size(1 << 10);
    let serving = { server }.add_service(NodesServer::new(holder));
    tokio::spawn(serving.serve_with_incoming(strangers::called(STRANGER, listener)));
    let (nodes, members) = nodes_beside(&[&a], at, |options| options).await;
    let holders = Holders::of(&members);
    let held = |key: &BlockKey| holders.holder(tag(&a, key).partition()) == Some(STRANGER);
    let keys: Vec<BlockKey> = (0..).map(key).filter(held).take(200).collect();
    let waiting = || {
        let status = nodes[0].status();
        status.nodes.iter().find(|node| !node.is_me).map_or(0, |node| node.waiting)
    };
    let is_reached = || nodes[0].status().nodes.iter().all(|node| node.is_reachable);
    until("the holder to be reached", is_reached).await;
    // One at a time, until nothing more has room on the way.
    let mut put = 0;
    while put < keys.len() {
        a.put(&keys[put..=put]);
        put += 1;
        let mut still = 0;
        while still < 5 && waiting() > 2 {
            still += 1;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if still == 5 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(put < keys.len(), "the way to the holder never ends");
    let of_keys: BTreeSet<Partition> = keys.iter().map(|key| tag(&a, key).partition()).collect();
    let other = holders.held_by(STRANGER).find(|partition| !of_keys.contains(partition)).unwrap();
    for _ in 0..3 {
        let again = (other.number() as u16).to_le_bytes().to_vec().into();
        ask.send(Ok(proto::FeedReply { again })).await.unwrap();
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    take.send(true).unwrap();
    let tags: BTreeSet<Tag> = keys[..put].iter().map(|key| tag(&a, key)).collect();
    until("everything that was put to be told", || tags.is_subset(&heard.lock().unwrap())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_heard_over_a_new_connection_is_not_heard_over_the_old_one() {
    let a = Stage::new("two-feeds");
    let (_nobody, stranger) = nowhere().await;
    let (nodes, members) = nodes_beside(&[&a], stranger, |options| options).await;
    let holders = Holders::of(&members);
    let tags = (0..).map(|n| tag(&a, &key(n))).filter(|tag| holders.holder(tag.partition()) == Some(a.id()));
    let [first, second] = tags.take(2).collect::<Vec<_>>().try_into().unwrap();
    let (old, mut heard) = announces(&members, a.id(), &[first]).await;
    until("what is said at first", || nodes[0].status().entries == 1).await;
    let _new = announces(&members, a.id(), &[second]).await;
    until("what is said over the new connection", || nodes[0].status().entries == 2).await;
    // What was on its way over the old one comes late.
    let gone = first.0.into_iter().chain([0]).collect::<Vec<u8>>();
    drop(old.send(proto::FeedMessage { changes: gone.into(), ..proto::FeedMessage::default() }).await);
    let ended = tokio::time::timeout(TIMEOUT, heard.message()).await.unwrap();
    assert_eq!(ended.unwrap_err().code(), Code::Aborted);
    assert_eq!(nodes[0].locate(&[first], TIMEOUT).await.copies, [[STRANGER]]);
}
