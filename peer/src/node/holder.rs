//! What this node answers other nodes: it takes in what they have, and says who has a block.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use kvarts_cluster::directory::Lacks;
use kvarts_cluster::members::NodeId;
use kvarts_cluster::partition::{Partition, Tag};
use kvarts_wire::proto;
use kvarts_wire::proto::nodes_server::{Nodes, NodesServer};
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::codegen::{InterceptedService, Service, http};
use tonic::service::Interceptor;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use super::locate::AT_ONCE;
use super::network::{KEEP_ALIVE, KEEP_ALIVE_TIMEOUT};
use super::stream::Shown;
use super::wire::{self, CopyList};
use super::{ClusterNode, MESSAGE_BYTES_MAX, VERSION, incoming};

/// Partitions that a node is asked for again: it has to be told once for each change of the members, and after a connection it
/// sends everything anyhow.
const AGAIN_WAITING: usize = 4;

/// Connections of other nodes, and of any other process that connects: more wait until one ends.
const CONNECTIONS_MAX: usize = 2 * kvarts_cluster::members::MEMBERS_MAX;

/// Partitions that are looked at, each time, for entries of nodes that left: all of them within about a minute.
const TIDIED_AT_ONCE: usize = 64;
/// See [`TIDIED_AT_ONCE`].
const TIDY_EVERY: Duration = Duration::from_secs(1);

/// Calls that one connection may have under way. A peer opens no more than that many streams, so that each of them is read: of streams
/// that are open and wait for a turn, the bytes that came fill the window of the connection, and those whose turn it is never end.
const CALLS_MAX: u32 = 32;

/// The pause between two lines of the log about callers that were refused.
const QUIET: Duration = Duration::from_secs(10);

/// How to ask a node whose changes this one takes for some again.
#[derive(Clone, Debug)]
pub(super) struct Asking {
    to: mpsc::Sender<Result<proto::FeedReply, Status>>,
    /// Breaks the connection: after the next one the node sends everything.
    cut: Arc<Notify>,
}

impl Asking {
    pub(super) fn cut(&self) {
        self.cut.notify_one();
    }
}

/// Serves other nodes until the task is ended.
pub(super) async fn serve(node: Arc<ClusterNode>, listener: TcpListener) {
    let (stopped, credentials) = (node.stopped(), node.options.credentials.clone());
    // A node that vanished without a word leaves its place.
    let server = Server::builder()
        .max_concurrent_streams(Some(CALLS_MAX))
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE_TIMEOUT))
        .tcp_nodelay(true);
    let greeting = node.greeting();
    let server = { server }.add_service(service(node));
    let incoming = incoming::limited(listener, CONNECTIONS_MAX, credentials, greeting);
    // ends: the node stops (`stopped`)
    if let Err(error) = server.serve_with_incoming_shutdown(incoming, stopped).await {
        tracing::error!(%error, "requests of other nodes are no longer accepted");
    }
}

/// Removes before long the entries of nodes that left, whether or not a call touches them.
pub(super) async fn tidy(node: Arc<ClusterNode>) {
    loop {
        for partition in Partition::all() {
            node.directory().tidy(partition);
            if (partition.number() + 1).is_multiple_of(TIDIED_AT_ONCE) {
                node.sleep(TIDY_EVERY).await;
            }
        }
    }
}

/// Who calls is known before anything else of a call is taken.
#[derive(Clone)]
struct Door(Arc<ClusterNode>);

impl Interceptor for Door {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let caller = self.0.caller(&request).inspect_err(|refused| self.0.tell_refused(refused))?;
        request.extensions_mut().insert(Caller(caller));
        Ok(request)
    }
}

fn service(node: Arc<ClusterNode>) -> InterceptedService<NodesServer<Holder>, Door> {
    let calls = NodesServer::new(Holder(Arc::clone(&node))).max_decoding_message_size(MESSAGE_BYTES_MAX);
    InterceptedService::new(calls, Door(node))
}

impl ClusterNode {
    /// Answers a call of the node `from` that came without a connection of the machine's network.
    pub async fn answer(
        self: Arc<Self>,
        from: NodeId,
        mut call: http::Request<Body>,
    ) -> http::Response<Body> {
        call.extensions_mut().insert(Shown(from));
        let Ok(answer) = service(self).call(call).await;
        answer.map(Body::new)
    }

    /// A call was refused: an operator hears of it, though not of each.
    fn tell_refused(&self, refused: &Status) {
        if self.refusals.may(self.footing.runner.now(), QUIET) {
            tracing::warn!(reason = refused.message(), "a call of another node was refused");
        }
    }

    /// The member that calls: a node that is none is known by the secret alone.
    fn caller(&self, request: &Request<()>) -> Result<NodeId, Status> {
        let shown = request.extensions().get::<Shown>();
        let Shown(from) = *shown.ok_or_else(|| {
            Status::unauthenticated(
                "the other node has not authenticated \
            itself",
            )
        })?;
        match self.members().get(from) {
            Some(_) if from != self.me => Ok(from),
            _ => Err(Status::permission_denied(format!(
                "node {from} is not a member of this cluster, or \
                is this node itself"
            ))),
        }
    }
}

impl ClusterNode {
    /// Asks other nodes for what this node's part of the directory lacks after a change of the members.
    pub(super) fn ask_again(&self, lacks: &Lacks) {
        let held: BTreeSet<Partition> = self.directory().held().collect();
        let new: BTreeSet<Partition> = lacks.partitions.iter().copied().collect();
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        asking.retain(|node, Asking { to, cut }| {
            let wanted = if lacks.members.contains(node) { &held } else { &new };
            let asked = wanted.is_empty() || to.try_send(Ok(wire::again(wanted))).is_ok();
            if !asked {
                cut.notify_one();
            }
            asked
        });
    }
}

/// The member that calls.
#[derive(Clone, Copy)]
struct Caller(NodeId);

struct Holder(Arc<ClusterNode>);

fn caller<T>(request: &Request<T>) -> Result<NodeId, Status> {
    let caller = request.extensions().get::<Caller>();
    caller.map(|caller| caller.0).ok_or_else(|| {
        Status::unauthenticated(
            "the node that sent the call is \
        unknown",
        )
    })
}

type Replies = Pin<Box<ReceiverStream<Result<proto::FeedReply, Status>>>>;
type Answers = Pin<Box<dyn Stream<Item = Result<proto::LocateReply, Status>> + Send>>;

#[tonic::async_trait]
impl Nodes for Holder {
    type FeedStream = Replies;
    type LocateStream = Answers;

    async fn join(&self, request: Request<proto::JoinRequest>) -> Result<Response<proto::JoinReply>, Status> {
        let (asked, node) = (request.into_inner(), &self.0);
        if asked.version != VERSION {
            let version = asked.version;
            return Err(Status::failed_precondition(format!(
                "this node has protocol version {VERSION}, but the caller has version {version}: use one \
                version of kvarts on all nodes"
            )));
        }
        if asked.cluster != node.options.cluster {
            let own = &node.options.cluster;
            return Err(Status::failed_precondition(format!(
                "this node belongs to another cluster, {own:?}"
            )));
        }
        let lane_port = u32::from(node.lane_port);
        let members = node.members();
        let epoch = members.epoch();
        if asked.epoch == epoch && asked.members != members.digest().as_slice() {
            return Err(Status::failed_precondition(format!(
                "this node's list of members for epoch {epoch} differs from the caller's list: give \
                every node the same list"
            )));
        }
        let me = node.me.0.to_vec().into();
        Ok(Response::new(proto::JoinReply { version: VERSION, node: me, epoch, lane_port }))
    }

    async fn feed(
        &self,
        request: Request<Streaming<proto::FeedMessage>>,
    ) -> Result<Response<Replies>, Status> {
        let from = caller(&request)?;
        let (to, replies) = mpsc::channel(AGAIN_WAITING);
        let asking = Asking { to: to.clone(), cut: Arc::default() };
        let cut = Arc::clone(&asking.cut);
        self.0.hear(from, asking);
        let (node, mut messages) = (Arc::clone(&self.0), request.into_inner());
        self.0.footing.runner.spawn(Box::pin(async move {
            let broken = tokio::select! {
                biased;
                () = node.stopped() => Some(Status::unavailable("this node is stopping")),
                // ends: the node stops, or the other one's connection ends: the other arms
                () = cut.notified() => Some(Status::aborted("the other node must send all of its blocks \
                    again")),
                // ends: the other node's connection, which keep-alive ends (`KEEP_ALIVE_TIMEOUT`)
                () = to.closed() => None,
                broken = node.take_all((from, &to), &mut messages) => broken,
            };
            node.hear_no_more(from, &to);
            if let Some(status) = broken {
                // A connection that is gone needs no reason.
                let _ = to.try_send(Err(status));
            }
        }));
        Ok(Response::new(Box::pin(ReceiverStream::new(replies))))
    }

    async fn locate(
        &self,
        request: Request<Streaming<proto::LocateRequest>>,
    ) -> Result<Response<Self::LocateStream>, Status> {
        let from = caller(&request)?;
        let (node, stopped) = (Arc::clone(&self.0), self.0.stopped());
        let answers = request.into_inner().then(move |asked| {
            let node = Arc::clone(&node);
            async move {
                // It may have left since the call began.
                node.members().get(from).ok_or_else(|| {
                    Status::permission_denied(
                        "the other node is no \
                    longer a member",
                    )
                })?;
                node.known(&asked?).await
            }
        });
        Ok(Response::new(Box::pin(answers.take_until(stopped))))
    }

    async fn chain(
        &self,
        request: Request<proto::ChainRequest>,
    ) -> Result<Response<proto::ChainReply>, Status> {
        let from = caller(&request)?;
        let asked = request.into_inner();
        // A node speaks for itself alone.
        if wire::node(&asked.node) != Ok(from) {
            return Err(Status::permission_denied("a node may send this call only in its own name"));
        }
        self.0.decide(&asked).map(Response::new)
    }

    async fn offer(
        &self,
        request: Request<proto::OfferRequest>,
    ) -> Result<Response<proto::OfferReply>, Status> {
        self.0.offered(&request.into_inner()).map(|taken| Response::new(proto::OfferReply { taken }))
    }

    async fn deletes(
        &self,
        request: Request<proto::DeletesRequest>,
    ) -> Result<Response<proto::DeletesReply>, Status> {
        let from = caller(&request)?;
        self.0.told_of_deletes(from, request.into_inner()).await.map(Response::new)
    }
}

impl ClusterNode {
    /// From now on a node is heard over this connection alone: what still comes over one before it is older.
    fn hear(&self, from: NodeId, asking: Asking) {
        // With the lock under which what it says is taken in.
        let mut directory = self.directory();
        directory.expect_all(from);
        let old = self.asking.lock().unwrap_or_else(PoisonError::into_inner).insert(from, asking);
        if let Some(old) = old {
            old.cut();
        }
    }

    /// The connection over which a node was heard is gone.
    fn hear_no_more(&self, from: NodeId, over: &mpsc::Sender<Result<proto::FeedReply, Status>>) {
        let mut directory = self.directory();
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        if asking.get(&from).is_some_and(|now| now.to.same_channel(over)) {
            asking.remove(&from);
            directory.expect_all(from);
        }
    }

    /// Takes in what a node says of its blocks, until it says no more, or says it over another connection. Gives what is wrong with it.
    async fn take_all(
        &self,
        (from, over): (NodeId, &mpsc::Sender<Result<proto::FeedReply, Status>>),
        messages: &mut Streaming<proto::FeedMessage>,
    ) -> Option<Status> {
        // ends: the other node's connection, which keep-alive ends (`KEEP_ALIVE_TIMEOUT`)
        while let Ok(Some(message)) = messages.message().await {
            let all = match wire::feed_messages(&message) {
                Ok(all) => all,
                Err(malformed) => return Some(malformed.into()),
            };
            for message in all {
                let mut directory = self.directory();
                let asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
                if !asking.get(&from).is_some_and(|now| now.to.same_channel(over)) {
                    return Some(Status::aborted("the node has opened a newer connection"));
                }
                drop(asking);
                self.take(&mut directory, from, &message);
            }
        }
        None
    }

    /// Who has these blocks, and who owns the chains that begin with them, as far as this node's part of the directory knows. After
    /// every few others have their turn.
    async fn known(&self, asked: &proto::LocateRequest) -> Result<proto::LocateReply, Status> {
        let tags = wire::tag_slice(&asked.tags)?;
        let (mut list, mut owners) = (CopyList::with_room(tags.len()), Vec::new());
        let (mut unknown, mut unknown_with) = (Vec::<u8>::new(), BTreeSet::new());
        for (turn, some) in tags.chunks(AT_ONCE).enumerate() {
            if turn > 0 {
                tokio::task::yield_now().await;
            }
            let of_these = self.look_up(some.iter().map(|tag| Tag(*tag)), |copies| list.push(copies));
            unknown_with.extend(of_these.with);
            unknown
                .extend(of_these.places.iter().flat_map(|at| ((turn * AT_ONCE + at) as u32).to_le_bytes()));
            if asked.owners {
                let some = some.iter().map(|tag| Tag(*tag));
                for (at, owner) in self.owners(some) {
                    let (place, node) = ((turn * AT_ONCE + at) as u32, list.place_of(owner));
                    owners.extend_from_slice(&place.to_le_bytes());
                    owners.extend_from_slice(&node.to_le_bytes());
                }
            }
        }
        let (nodes, copies) = list.into_parts();
        let nodes = nodes.iter().flat_map(|node| node.0).collect();
        let unknown_with = unknown_with.iter().flat_map(|node: &NodeId| node.0).collect();
        let (number, owners, unknown) = (asked.number, owners.into(), unknown.into());
        Ok(proto::LocateReply { nodes, copies, number, owners, unknown, unknown_with })
    }
}
