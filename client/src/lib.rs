//! The client: a store that is somewhere else.
//!
//! [`Client`] is a [`KvStore`]: it promises what the embedded engine promises, and passes the same conformance
//! suite, but for what needs the store in the process: puts by layers, tiles and subscriptions are refused or empty. Which way the bytes go is a [`Path`]: shared memory on the server's own host, else gRPC. Whatever has
//! travelled is compared with a digest before anything is announced.
//!
//! Calls of the trait that answer at once (`register`, `match_prefix`, `contains`, `unlock`) wait for the server, with
//! a bound. They may be called from any thread but the client's own. Batches of opaque pages with an eventfd are
//! [`kvarts_contract::batch::Pages`] over a client, as over any store.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

mod answers;
mod arrival;
mod away;
mod download;
mod grpc_path;
mod local;
mod messages;
mod peer;
pub mod pool;
mod remote;
pub mod session;
mod timeouts;
mod upload;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvarts_contract::api::{
    ContainsReply, ContainsRequest, DeleteReply, DeleteRequest, KvStore, LeaseId, LeaseTerms, MatchReply,
    MatchRequest, Presence, PutReply, PutRequest, ReadEnd, ReadRequest, ReadStream, Sequence, SnapshotCursor,
    SnapshotPage, Subscription, TtlReply, TtlRequest,
};
use kvarts_contract::buffers::{Region, shared};
use kvarts_contract::clock::{Clock, Nanos};
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::ticket::Ticket;
use kvarts_layout::{BlockKey, Coordinate, Geometry, Group, Identity, NamespaceId};

use grpc_path::GrpcPath;
use kvarts_planner::cost::Times;
use kvarts_planner::route::{self, Route};
use kvarts_wire::{convert, limits, plans, proto};
use local::LocalPath;
pub use pool::PoolName;
use remote::Remote;
pub use remote::endpoint;
use tonic::Streaming;

/// The name of the path over gRPC.
pub(crate) const GRPC: &str = "grpc";

/// A way for blocks between this process and a store. Each is a whole store in itself.
pub trait Path: KvStore + fmt::Debug {
    /// Its name, in logs and metrics.
    fn name(&self) -> &'static str;

    /// A match as messages: with what they can ask for and tell besides.
    fn matched(&self, wire: proto::MatchRequest) -> Result<proto::MatchReply, Error>;

    /// Memory for a pool of blocks, at least `bytes` bytes of it. Where there is a way to, the server's disks write
    /// straight into it, and it is verified there before it is announced.
    fn pool(&self, bytes: usize) -> Result<Arc<Region>, Error> {
        Region::anonymous(bytes).map_err(|error| {
            Error(Reason::Config(format!("the memory for a pool could not be allocated: {error}")))
        })
    }

    /// The file that shared memory lies in, to map it a second time in this process. None where it lies in no file.
    fn file_of(&self, region: &Region) -> Option<OwnedFd> {
        let _ = region;
        None
    }

    /// Bytes of shared memory that cannot be used again for now, or for good: a connection ended while disks were writing
    /// to them, and it is not known yet that they do not any more. Reads of them have not been released.
    fn held_bytes(&self) -> u64 {
        0
    }

    /// Memory that an engine has already: whole pages of a file in memory (`memfd_create`, `/dev/shm`), which is not shortened as
    /// long as it is shared. Where there is a way to, the server's disks write straight into it, and this process verifies.
    fn adopt(&self, file: OwnedFd, bytes: u64) -> Result<Arc<Region>, Error> {
        let region = shared::map_own(&file, bytes, Box::new(()));
        region
            .map_err(|error| Error(Reason::Config(format!("the shared memory could not be mapped: {error}"))))
    }

    /// Memory for a pool of blocks that other processes may use by its name: see [`Client::shared_pool`].
    fn named_pool(&self, bytes: usize, name: PoolName) -> Result<Arc<Region>, Error> {
        let _ = (bytes, name);
        Err(only_local())
    }

    /// The pool of this name: see [`Client::attach`].
    fn attach(&self, name: PoolName) -> Result<Arc<Region>, Error> {
        let _ = name;
        Err(only_local())
    }
}

/// What other paths than the local one say of pools that processes share.
fn only_local() -> Error {
    let why =
        "processes can share a pool only over the local path: connect with unix:PATH, on the server's host";
    Error(Reason::Config(why.to_owned()))
}

/// What a match found, of the server's own store and beyond it.
#[derive(Clone, Debug)]
pub struct Beyond {
    /// As [`KvStore::match_prefix`] says it.
    pub own: MatchReply,
    /// Together with other nodes, if the server belongs to a cluster.
    pub in_cluster: Option<proto::match_reply::InCluster>,
    /// Together with the bucket, if it seems to have more.
    pub in_cold: Option<proto::match_reply::InCold>,
}

/// Which way blocks may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Via {
    /// The local path where there is one, else gRPC.
    #[default]
    Best,
    /// The local path, or none.
    Local,
    /// gRPC.
    Grpc,
}

/// How to reach a server.
#[derive(Clone)]
pub struct ConnectOptions {
    /// `http://HOST:PORT`, `https://HOST:PORT`, or `unix:PATH`.
    pub endpoint: String,
    /// The token, if the server asks for one.
    pub token: Option<String>,
    /// For https: the authority that signed the server's certificate, PEM.
    pub authority: Option<Vec<u8>>,
    /// For https: the client's own certificate and key, PEM.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
    /// For https: the name in the server's certificate, where it is not the endpoint's host.
    pub server_name: Option<String>,
    /// How long a call without a deadline may take, and connecting.
    pub call_timeout: Duration,
    /// How long the server may take for its first answer, whatever calls may take later; none: it is not waited for. A server that accepts
    /// the connection and answers nothing in this time makes connecting fail with [`Reason::DeadlinePassed`].
    pub first_answer: Option<Duration>,
    /// Which way blocks may take.
    pub via: Via,
    /// For `unix:`, where there is a token: the user whose process the server is. The administrator and this process's own
    /// user are trusted anyhow; the token is shown to no other.
    pub server_uid: Option<u32>,
    /// Threads of the client that move bytes, 1 to [`THREADS_MAX`].
    pub threads: usize,
    /// What other nodes of the server's cluster are said to have counts as here, because reads take it from there: in look-ups of single
    /// blocks without a lease, and in matches without a plan. A lease of a match holds what is on the server itself.
    pub of_cluster: bool,
}

/// The most threads of a client.
pub const THREADS_MAX: usize = 1024;

impl ConnectOptions {
    /// An endpoint and nothing else.
    pub fn to(endpoint: impl Into<String>) -> Self {
        Self {
            endpoint: endpoint.into(),
            token: None,
            authority: None,
            identity: None,
            server_name: None,
            call_timeout: Duration::from_secs(60),
            first_answer: None,
            via: Via::Best,
            server_uid: None,
            threads: 2,
            of_cluster: false,
        }
    }
}

impl fmt::Debug for ConnectOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectOptions").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// A connection to a server. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Client {
    remote: Arc<Remote>,
    path: Arc<dyn Path>,
}

/// Blocks that are held against eviction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pinned {
    /// What ends it sooner; none where nothing is held.
    pub lease: Option<LeaseId>,
    /// Blocks that are held.
    pub held: u32,
    /// How long they are, which may be shorter than was asked for; none where nothing is held, and from servers that do not
    /// say.
    pub hold: Option<Duration>,
}

impl Client {
    /// Connects to a server by the best path there is; waits up to `call_timeout`. It has threads of its own, and ends with its last clone.
    pub fn connect(options: &ConnectOptions) -> Result<Self, Error> {
        let remote = Arc::new(Remote::connect(options)?);
        let local = match options.via {
            Via::Grpc => None,
            Via::Local => Some(LocalPath::connect(options, &remote)?),
            Via::Best if options.endpoint.starts_with("unix:") => LocalPath::connect(options, &remote)
                .inspect_err(|why| {
                    tracing::info!(%why, "the local path is not available: blocks are sent \
                    over gRPC")
                })
                .ok(),
            Via::Best => None,
        };
        let path: Arc<dyn Path> = match local {
            Some(local) => Arc::new(local),
            None => Arc::new(GrpcPath(Arc::clone(&remote))),
        };
        Ok(Self { remote, path })
    }

    /// Bytes of shared memory that are kept from being used: see [`Path::held_bytes`].
    pub fn held_bytes(&self) -> u64 {
        self.path.held_bytes()
    }

    /// Memory for a pool of blocks: see [`Path::pool`]. Its pages stay the ones they are, because a driver may know them
    /// (`cudaHostRegister`). A caller that knows that none does may say so by [`Region::keep_pages`] (false): after a connection
    /// that broke, pages of reads under way are then replaced by new ones, and their memory is released without the server.
    pub fn pool(&self, bytes: usize) -> Result<Arc<Region>, Error> {
        self.path.pool(bytes)
    }

    /// The file that memory of [`Client::pool`] or [`Client::adopt`] lies in: see [`Path::file_of`].
    pub fn file_of(&self, region: &Region) -> Option<OwnedFd> {
        self.path.file_of(region)
    }

    /// Memory that an engine has already: see [`Path::adopt`]. Its file is sealed against shrinking here if it was made to
    /// allow that (`MFD_ALLOW_SEALING`).
    pub fn adopt(&self, file: OwnedFd, bytes: u64) -> Result<Arc<Region>, Error> {
        // A seal turns an engine's mistake into an error of that engine. Files of `/dev/shm` take none.
        let _ = shared::seal(&file);
        self.path.adopt(file, bytes)
    }

    /// Memory for a pool of blocks that the processes of one engine share: its scheduler takes it, and its workers attach to it by the
    /// name ([`Client::attach`]), which cannot be guessed and which no other tenant's client can use. All of them may read and write it.
    /// It counts once as memory of the tenant, however many processes attach to it, and is gone with the last process that has it.
    ///
    /// What is read into it is verified by the client that reads. Its pages are all there when this returns, and stay the ones they are.
    pub fn shared_pool(&self, bytes: usize) -> Result<(Arc<Region>, PoolName), Error> {
        let name = PoolName::new();
        Ok((self.path.named_pool(bytes, name)?, name))
    }

    /// The memory of a pool that another process of the same tenant has taken on this server ([`Client::shared_pool`]). It stays when that
    /// process ends.
    pub fn attach(&self, name: PoolName) -> Result<Arc<Region>, Error> {
        self.path.attach(name)
    }

    /// The way that blocks take.
    pub fn path(&self) -> &dyn Path {
        &*self.path
    }

    /// The store as code sees it that does not care where it is: for `Pages`, for example.
    pub fn store(&self) -> Arc<dyn Path> {
        Arc::clone(&self.path)
    }

    /// The clock of deadlines.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.remote.clock
    }

    /// Reads into memory and waits for the end.
    pub async fn get_into(&self, request: ReadRequest) -> Result<ReadEnd, Error> {
        let stream = self.read(request)?;
        // ends: the read's deadline or the client's `call_timeout`; the path ends it
        let ended = std::future::poll_fn(|context| stream.poll_end(context)).await;
        ended.map_err(|_| Error(Reason::Busy("the connection was interrupted")))
    }

    /// Reads into memory; each layer is announced when it is there.
    pub fn layers(&self, request: ReadRequest) -> Result<ReadStream, Error> {
        self.read(ReadRequest { order: kvarts_contract::api::Order::Layers, ..request })
    }

    /// Holds blocks against eviction, a day at most. Over the local path a lease ends with the connection at the latest, over
    /// gRPC it may outlive it.
    pub fn pin(
        &self,
        namespace: NamespaceId,
        (group, coordinate): (Group, Coordinate),
        keys: &[BlockKey],
        hold: Duration,
    ) -> Result<Pinned, Error> {
        if self.path.name() == GRPC {
            let wire = proto::PinRequest {
                namespace: namespace.as_bytes().to_vec().into(),
                column: Some(convert::wire_column(group, coordinate)),
                keys: convert::key_bytes(keys),
                hold_ms: messages::millis(hold),
            };
            let reply = self.remote.ask_again(|| {
                let (mut store, request) = (self.remote.store(), self.remote.request(wire.clone(), None));
                // ends: the client's `call_timeout`, by `ask`
                async move { store.pin(request).await }
            })?;
            let hold = (reply.hold_ms > 0).then(|| Duration::from_millis(reply.hold_ms));
            return Ok(Pinned { lease: remote::lease(reply.lease), held: reply.held, hold });
        }
        let terms = LeaseTerms { hold, tenant: 0, cap_bytes: u64::MAX };
        let request = ContainsRequest { namespace, group, coordinate, keys, lease: Some(terms) };
        let reply = self.path.contains(&request)?;
        let held = reply.presence.iter().filter(|presence| **presence == Presence::Here).count() as u32;
        let hold = reply.lease.map(|_| hold.min(limits::LEASE_MAX));
        Ok(Pinned { lease: reply.lease, held, hold })
    }

    /// What is pinned or leased, and for how long: of the caller's tenant, or of all for whom may administer.
    pub fn pins(&self, of_all: bool) -> Result<proto::ListPinsReply, Error> {
        let mut store = self.remote.store();
        let request = self.remote.request(proto::ListPinsRequest { of_all }, None);
        self.remote.ask(async move { store.list_pins(request).await })
    }

    /// Follows what happens to the blocks of the caller's tenant.
    pub fn watch(&self, request: proto::WatchRequest) -> Result<Streaming<proto::Event>, Error> {
        let mut admin = self.remote.admin();
        let request = self.remote.endless(request);
        // ends: the connection, of which a server that is silent loses its own (`KEEPALIVE`)
        self.remote.ask_endless(async move { admin.watch(request).await })
    }

    /// A page of what is here of the caller's tenant: the first without a token, the next with that of the page before.
    pub fn list_blocks(
        &self,
        namespace: Option<NamespaceId>,
        page_token: Bytes,
    ) -> Result<proto::ListBlocksReply, Error> {
        let namespace = namespace.map(|id| Bytes::copy_from_slice(id.as_bytes())).unwrap_or_default();
        let wire = proto::ListBlocksRequest { namespace, page_token };
        self.remote.ask_again(|| {
            let (mut admin, request) = (self.remote.admin(), self.remote.request(wire.clone(), None));
            // ends: the client's `call_timeout`, by `ask`
            async move { admin.list_blocks(request).await }
        })
    }

    /// What the server is and has done.
    pub fn stats(&self) -> Result<proto::StatsReply, Error> {
        let mut admin = self.remote.admin();
        let request = self.remote.request(proto::StatsRequest {}, None);
        self.remote.ask(async move { admin.stats(request).await })
    }

    /// Writes a checkpoint on the server.
    pub fn checkpoint(&self) -> Result<(), Error> {
        let mut admin = self.remote.admin();
        let request = self.remote.request(proto::CheckpointRequest {}, None);
        self.remote.ask(async move { admin.checkpoint(request).await }).map(drop)
    }

    /// Has a server whose store latched read-only take writes again, if it can, and use directories again that were out. Gives why it took
    /// none, and what came of each directory.
    pub fn resume(&self) -> Result<proto::ResumeReply, Error> {
        let mut admin = self.remote.admin();
        let request = self.remote.request(proto::ResumeRequest {}, None);
        self.remote.ask(async move { admin.resume(request).await })
    }

    /// Reads everything on the server in the lowest class and compares it with its digests.
    pub fn scrub(&self) -> Result<proto::ScrubReply, Error> {
        let mut admin = self.remote.admin();
        let request = self.remote.endless(proto::ScrubRequest {});
        // ends: the server's work; or the connection, once the server is silent (`KEEPALIVE`)
        self.remote.ask_endless(async move { admin.scrub(request).await })
    }

    /// Has the server copy what it has into its bucket, all of it or a namespace. Answers when that is done.
    pub fn cold_push(&self, namespace: Option<NamespaceId>) -> Result<proto::ColdPushReply, Error> {
        let mut admin = self.remote.admin();
        let namespace = namespace.map(|id| id.0.to_vec().into()).unwrap_or_default();
        let request = self.remote.endless(proto::ColdPushRequest { namespace });
        // ends: the server's work; or the connection, once the server is silent (`KEEPALIVE`)
        self.remote.ask_endless(async move { admin.cold_push(request).await })
    }

    /// Has the server move live blocks together and merge small records. Answers when that is done.
    pub fn compact(&self) -> Result<proto::CompactReply, Error> {
        let mut admin = self.remote.admin();
        let request = self.remote.endless(proto::CompactRequest {});
        // ends: the server's work; or the connection, once the server is silent (`KEEPALIVE`)
        self.remote.ask_endless(async move { admin.compact(request).await })
    }

    /// Changes the server's budget; answers with what it is now and how much is allocated.
    pub fn set_budget(&self, budget_bytes: u64) -> Result<proto::SetBudgetReply, Error> {
        let mut admin = self.remote.admin();
        let wire = proto::SetBudgetRequest { budget_bytes, budget_percent: 0 };
        let request = self.remote.request(wire, None);
        self.remote.ask(async move { admin.set_budget(request).await })
    }

    /// Changes the server's budget to a part of its disks, in hundredths of their size. A server that does not know parts
    /// refuses.
    pub fn set_budget_part(&self, budget_percent: u32) -> Result<proto::SetBudgetReply, Error> {
        let mut admin = self.remote.admin();
        let wire = proto::SetBudgetRequest { budget_bytes: 0, budget_percent };
        let request = self.remote.request(wire, None);
        self.remote.ask(async move { admin.set_budget(request).await })
    }

    /// Has the server read tenants, tokens and certificates again; gives what an operator should know of it.
    pub fn reload(&self) -> Result<Vec<String>, Error> {
        let mut admin = self.remote.admin();
        let request = self.remote.request(proto::ReloadRequest {}, None);
        self.remote.ask(async move { admin.reload(request).await }).map(|reply| reply.notes)
    }

    /// Deletes everything that a tenant has stored, or says what would go.
    pub fn purge_tenant(&self, wire: proto::PurgeTenantRequest) -> Result<proto::PurgeTenantReply, Error> {
        let mut admin = self.remote.admin();
        let request = self.remote.endless(wire);
        // ends: the server's work; or the connection, once the server is silent (`KEEPALIVE`)
        self.remote.ask_endless(async move { admin.purge_tenant(request).await })
    }

    /// Asks the server to finish and stop.
    pub fn drain(&self) -> Result<(), Error> {
        let mut admin = self.remote.admin();
        let request = self.remote.request(proto::DrainRequest {}, None);
        self.remote.ask(async move { admin.drain(request).await }).map(drop)
    }

    /// The cluster that the server belongs to, as the server sees it.
    pub fn cluster_status(&self) -> Result<proto::ClusterStatusReply, Error> {
        let mut directory = self.remote.directory();
        let request = self.remote.request(proto::ClusterStatusRequest {}, None);
        self.remote.ask(async move { directory.status(request).await })
    }

    /// As [`KvStore::delete`]; and which nodes of the cluster do not have it yet, which hear of it when they are connected again. With
    /// `of_all` it is refused where there are some: what was deleted stays so, and is not acknowledged.
    pub fn delete_everywhere(
        &self,
        request: DeleteRequest,
        of_all: bool,
    ) -> Ticket<Result<(DeleteReply, Vec<proto::NodeAway>), Error>> {
        grpc_path::delete_everywhere(&self.remote, request, of_all)
    }

    /// As [`KvStore::match_prefix`], and beside it what a read brings that is not in the server's own store: what nodes of the
    /// cluster are said to have, and what the bucket behind the server seems to have.
    pub fn match_beyond(&self, request: &MatchRequest<'_>) -> Result<Beyond, Error> {
        let found = self.path.matched(messages::matching(request, true))?;
        let own = messages::matched(&found)?;
        Ok(Beyond { own, in_cluster: found.in_cluster, in_cold: found.in_cold })
    }

    /// Which nodes of the cluster are said to have blocks, and what reading from them would cost. Hints: a node may have lost a
    /// block, or have got one, since.
    pub fn locate(&self, request: proto::LookupRequest) -> Result<proto::LookupReply, Error> {
        let mut directory = self.remote.directory();
        let request = self.remote.request(request, None);
        self.remote.ask(async move { directory.lookup(request).await })
    }

    /// Has the server copy blocks that other nodes of its cluster have.
    pub fn replicate(&self, request: proto::ReplicateRequest) -> Result<proto::ReplicateReply, Error> {
        let mut directory = self.remote.directory();
        let request = self.remote.request(request, None);
        self.remote.ask(async move { directory.replicate(request).await })
    }

    /// Claims, renews, releases or looks up the owner of a chain for the server's node; notes replicas.
    pub fn chain(&self, request: proto::ChainRequest) -> Result<proto::ChainReply, Error> {
        let mut directory = self.remote.directory();
        let request = self.remote.request(request, None);
        self.remote.ask(async move { directory.chain(request).await })
    }

    /// Where a request should go, with every candidate's terms. Of `this_node` the server says the disks itself.
    pub fn route(
        &self,
        question: &route::Question<'_>,
        times: &Times,
        this_node: Option<u32>,
    ) -> Result<Route, Error> {
        let mut server = self.remote.plans();
        let request = self.remote.request(plans::wire_question(question, times, this_node), None);
        let reply = self.remote.ask(async move { server.route(request).await })?;
        Ok(plans::route(&reply))
    }

    /// The same, in the words of the contract: of the nodes' stores the server fills in what it knows and the request does not give.
    pub fn route_filled(&self, request: proto::RouteRequest) -> Result<proto::RouteReply, Error> {
        let mut server = self.remote.plans();
        let request = self.remote.request(request, None);
        self.remote.ask(async move { server.route(request).await })
    }

    /// The models of the caller's tenant that were registered since the server started, or that it has blocks of.
    pub fn models(&self) -> Result<proto::ListModelsReply, Error> {
        let mut models = self.remote.models();
        let request = self.remote.request(proto::ListModelsRequest { stored: true }, None);
        self.remote.ask(async move { models.list_models(request).await })
    }
}

impl KvStore for Client {
    fn register(&self, identity: &Identity, geometry: &Geometry) -> Result<NamespaceId, Error> {
        self.path.register(identity, geometry)
    }

    fn put(&self, request: PutRequest) -> Ticket<Result<PutReply, Error>> {
        self.path.put(request)
    }

    fn match_prefix(&self, request: &MatchRequest<'_>) -> Result<MatchReply, Error> {
        self.path.match_prefix(request)
    }

    fn contains(&self, request: &ContainsRequest<'_>) -> Result<ContainsReply, Error> {
        self.path.contains(request)
    }

    fn look_up(
        &self,
        request: &ContainsRequest<'_>,
        deadline: Option<Nanos>,
    ) -> Ticket<Result<ContainsReply, Error>> {
        self.path.look_up(request, deadline)
    }

    fn unlock(&self, lease: LeaseId) -> bool {
        self.path.unlock(lease)
    }

    fn renew(&self, lease: LeaseId, hold: Duration) -> Result<(), Error> {
        self.path.renew(lease, hold)
    }

    fn delete(&self, request: DeleteRequest) -> Ticket<Result<DeleteReply, Error>> {
        self.path.delete(request)
    }

    fn set_ttl(&self, request: &TtlRequest<'_>) -> Result<TtlReply, Error> {
        self.path.set_ttl(request)
    }

    fn set_default_ttl(&self, namespace: NamespaceId, ttl: Option<Duration>) -> Result<(), Error> {
        self.path.set_default_ttl(namespace, ttl)
    }

    fn subscribe(&self, from: Option<Sequence>) -> Subscription {
        self.path.subscribe(from)
    }

    fn snapshot(&self, cursor: Option<SnapshotCursor>) -> Ticket<Result<SnapshotPage, Error>> {
        self.path.snapshot(cursor)
    }

    fn read(&self, request: ReadRequest) -> Result<ReadStream, Error> {
        self.path.read(request)
    }
}
