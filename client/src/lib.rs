//! The client: a store in another process.
//!
//! [`Client`] is a [`KvStore`]: it has the guarantees of the embedded engine and passes the same conformance suite, except for functions
//! that need the store in the process: puts by layers, tiles and subscriptions are refused or empty. A [`Path`] transfers the bytes: shared
//! memory on the server's own host, otherwise gRPC. The client verifies transferred bytes with a digest before it announces them.
//!
//! Calls of the trait that return a value (`register`, `match_prefix`, `contains`, `unlock`) wait for the server, for a limited time. Any
//! thread except the client's own threads may call them. Batches of opaque pages with an eventfd use [`kvarts_contract::batch::Pages`] over
//! a client, as over any store.
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

/// A path for blocks between this process and a store. Each path is a complete store.
pub trait Path: KvStore + fmt::Debug {
    /// The name of the path in logs and metrics.
    fn name(&self) -> &'static str;

    /// A match as messages, with the additional fields of the messages.
    fn matched(&self, wire: proto::MatchRequest) -> Result<proto::MatchReply, Error>;

    /// Memory for a pool of blocks, at least `bytes` bytes. If the path supports it, the server's disks write directly into this memory,
    /// where the bytes are verified before they are announced.
    fn pool(&self, bytes: usize) -> Result<Arc<Region>, Error> {
        Region::anonymous(bytes).map_err(|error| {
            Error(Reason::Config(format!("the memory for a pool could not be allocated: {error}")))
        })
    }

    /// The file of shared memory, to map it a second time in this process. `None` if the memory belongs to no file.
    fn file_of(&self, region: &Region) -> Option<OwnedFd> {
        let _ = region;
        None
    }

    /// Bytes of shared memory that cannot be reused for now, or ever: a connection ended while disks were writing to them, and it is not
    /// known yet whether the disks have stopped. Reads into this memory have not been released.
    fn held_bytes(&self) -> u64 {
        0
    }

    /// Existing memory of an engine: whole pages of a file in memory (`memfd_create`, `/dev/shm`). The file must not be shortened while it
    /// is shared. If the path supports it, the server's disks write directly into the memory, and this process verifies the bytes.
    fn adopt(&self, file: OwnedFd, bytes: u64) -> Result<Arc<Region>, Error> {
        let region = shared::map_own(&file, bytes, Box::new(()));
        region
            .map_err(|error| Error(Reason::Config(format!("the shared memory could not be mapped: {error}"))))
    }

    /// Memory for a pool of blocks that other processes may use with its name: see [`Client::shared_pool`].
    fn named_pool(&self, bytes: usize, name: PoolName) -> Result<Arc<Region>, Error> {
        let _ = (bytes, name);
        Err(only_local())
    }

    /// The memory of the pool with this name: see [`Client::attach`].
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

/// The result of a match in the server's own store and outside of it.
#[derive(Clone, Debug)]
pub struct Beyond {
    /// The result of [`KvStore::match_prefix`].
    pub own: MatchReply,
    /// The result together with other nodes, if the server belongs to a cluster.
    pub in_cluster: Option<proto::match_reply::InCluster>,
    /// The result together with the bucket, if the bucket probably has more blocks.
    pub in_cold: Option<proto::match_reply::InCold>,
}

/// The paths that blocks may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Via {
    /// The local path if there is one, otherwise gRPC.
    #[default]
    Best,
    /// The local path only.
    Local,
    /// gRPC only.
    Grpc,
}

/// The address and the options of a connection.
#[derive(Clone)]
pub struct ConnectOptions {
    /// `http://HOST:PORT`, `https://HOST:PORT`, or `unix:PATH`.
    pub endpoint: String,
    /// The token, if the server requires one.
    pub token: Option<String>,
    /// For https: the certificate of the authority that signed the server's certificate, PEM.
    pub authority: Option<Vec<u8>>,
    /// For https: the client's own certificate and key, PEM.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
    /// For https: the name in the server's certificate, if it differs from the endpoint's host.
    pub server_name: Option<String>,
    /// The timeout of connecting, and of calls without a deadline.
    pub call_timeout: Duration,
    /// The timeout of the server's first answer, independent of later calls; `None` for no wait. If a server accepts the connection and
    /// does not answer in this time, connecting fails with [`Reason::DeadlinePassed`].
    pub first_answer: Option<Duration>,
    /// The paths that blocks may take.
    pub via: Via,
    /// For `unix:` with a token: the user of the server process. The client sends its token only to a server that runs as this user, as the
    /// administrator (root), or as this process's own user.
    pub server_uid: Option<u32>,
    /// The number of client threads that move bytes, 1 to [`THREADS_MAX`].
    pub threads: usize,
    /// Whether blocks that are recorded on other nodes of the server's cluster count as present, because reads fetch them from there: in
    /// look-ups of single blocks without a lease, and in matches without a plan. A lease of a match holds only blocks on the server itself.
    pub of_cluster: bool,
}

/// The maximum number of threads of a client.
pub const THREADS_MAX: usize = 1024;

impl ConnectOptions {
    /// Options with this endpoint and default values.
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

/// The result of a pin: blocks held against eviction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pinned {
    /// The lease, with which the caller can end the hold earlier; `None` if no block is held.
    pub lease: Option<LeaseId>,
    /// The number of held blocks.
    pub held: u32,
    /// The duration of the hold, which may be shorter than requested; `None` if no block is held, or if the server does not report it.
    pub hold: Option<Duration>,
}

impl Client {
    /// Connects to a server over the best available path, and waits up to `call_timeout`. The client has its own threads, and ends with its
    /// last clone.
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

    /// Bytes of shared memory that cannot be reused now: see [`Path::held_bytes`].
    pub fn held_bytes(&self) -> u64 {
        self.path.held_bytes()
    }

    /// Memory for a pool of blocks: see [`Path::pool`]. Its pages do not change, because a driver may have registered them
    /// (`cudaHostRegister`). If no driver has, the caller may call [`Region::keep_pages`] with false: after a lost connection the client
    /// then replaces the pages of reads in progress, and releases their memory without the server.
    pub fn pool(&self, bytes: usize) -> Result<Arc<Region>, Error> {
        self.path.pool(bytes)
    }

    /// The file of memory of [`Client::pool`] or [`Client::adopt`]: see [`Path::file_of`].
    pub fn file_of(&self, region: &Region) -> Option<OwnedFd> {
        self.path.file_of(region)
    }

    /// Existing memory of an engine: see [`Path::adopt`]. This call seals the file against shrinking if the file allows seals
    /// (`MFD_ALLOW_SEALING`).
    pub fn adopt(&self, file: OwnedFd, bytes: u64) -> Result<Arc<Region>, Error> {
        // A seal turns an engine's mistake into an error of that engine. Files of `/dev/shm` take none.
        let _ = shared::seal(&file);
        self.path.adopt(file, bytes)
    }

    /// Memory for a pool of blocks that the processes of one engine share. The scheduler takes it, and the workers attach to it with its
    /// name ([`Client::attach`]), which cannot be guessed and which no client of another tenant can use. All these processes may read and
    /// write it. It counts once as memory of the tenant, independent of the number of attached processes, and is freed when its last
    /// process ends or drops it.
    ///
    /// The client that reads into the pool verifies the bytes. When this call returns, all pages of the pool are allocated, and they do not
    /// change.
    pub fn shared_pool(&self, bytes: usize) -> Result<(Arc<Region>, PoolName), Error> {
        let name = PoolName::new();
        Ok((self.path.named_pool(bytes, name)?, name))
    }

    /// The memory of a pool that another process of the same tenant has taken on this server ([`Client::shared_pool`]). It stays valid
    /// after that process ends.
    pub fn attach(&self, name: PoolName) -> Result<Arc<Region>, Error> {
        self.path.attach(name)
    }

    /// The path of the blocks.
    pub fn path(&self) -> &dyn Path {
        &*self.path
    }

    /// The store without its location, for code such as `Pages`.
    pub fn store(&self) -> Arc<dyn Path> {
        Arc::clone(&self.path)
    }

    /// The clock of deadlines.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.remote.clock
    }

    /// Reads into memory, and waits for the end of the read.
    pub async fn get_into(&self, request: ReadRequest) -> Result<ReadEnd, Error> {
        let stream = self.read(request)?;
        // ends: the read's deadline or the client's `call_timeout`; the path ends it
        let ended = std::future::poll_fn(|context| stream.poll_end(context)).await;
        ended.map_err(|_| Error(Reason::Busy("the connection was interrupted")))
    }

    /// Reads into memory, and announces each layer when it has arrived.
    pub fn layers(&self, request: ReadRequest) -> Result<ReadStream, Error> {
        self.read(ReadRequest { order: kvarts_contract::api::Order::Layers, ..request })
    }

    /// Holds blocks against eviction, for a day at most. Over the local path a lease ends with the connection at the latest; over gRPC it
    /// may outlive the connection.
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

    /// Lists pins and leases with their remaining time: of the caller's tenant, or of all tenants for a caller with the right to
    /// administer.
    pub fn pins(&self, of_all: bool) -> Result<proto::ListPinsReply, Error> {
        let mut store = self.remote.store();
        let request = self.remote.request(proto::ListPinsRequest { of_all }, None);
        self.remote.ask(async move { store.list_pins(request).await })
    }

    /// Subscribes to the events of the blocks of the caller's tenant.
    pub fn watch(&self, request: proto::WatchRequest) -> Result<Streaming<proto::Event>, Error> {
        let mut admin = self.remote.admin();
        let request = self.remote.endless(request);
        // ends: the connection, of which a server that is silent loses its own (`KEEPALIVE`)
        self.remote.ask_endless(async move { admin.watch(request).await })
    }

    /// A page of the blocks of the caller's tenant: the first page without a token, the next pages with the token of the previous page.
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

    /// The identity and the counters of the server.
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

    /// Makes a read-only store of the server accept writes again, if possible, and makes it use directories again that were out of use.
    /// Returns the reason for the read-only state, and the result for each directory.
    pub fn resume(&self) -> Result<proto::ResumeReply, Error> {
        let mut admin = self.remote.admin();
        let request = self.remote.request(proto::ResumeRequest {}, None);
        self.remote.ask(async move { admin.resume(request).await })
    }

    /// Reads all blocks on the server in the lowest class, and verifies them with their digests.
    pub fn scrub(&self) -> Result<proto::ScrubReply, Error> {
        let mut admin = self.remote.admin();
        let request = self.remote.endless(proto::ScrubRequest {});
        // ends: the server's work; or the connection, once the server is silent (`KEEPALIVE`)
        self.remote.ask_endless(async move { admin.scrub(request).await })
    }

    /// Makes the server copy its blocks into its bucket, all blocks or one namespace. Returns when the copy has ended.
    pub fn cold_push(&self, namespace: Option<NamespaceId>) -> Result<proto::ColdPushReply, Error> {
        let mut admin = self.remote.admin();
        let namespace = namespace.map(|id| id.0.to_vec().into()).unwrap_or_default();
        let request = self.remote.endless(proto::ColdPushRequest { namespace });
        // ends: the server's work; or the connection, once the server is silent (`KEEPALIVE`)
        self.remote.ask_endless(async move { admin.cold_push(request).await })
    }

    /// Makes the server move live blocks together and merge small records. Returns when the compaction has ended.
    pub fn compact(&self) -> Result<proto::CompactReply, Error> {
        let mut admin = self.remote.admin();
        let request = self.remote.endless(proto::CompactRequest {});
        // ends: the server's work; or the connection, once the server is silent (`KEEPALIVE`)
        self.remote.ask_endless(async move { admin.compact(request).await })
    }

    /// Changes the server's budget. Returns the new budget and the number of allocated bytes.
    pub fn set_budget(&self, budget_bytes: u64) -> Result<proto::SetBudgetReply, Error> {
        let mut admin = self.remote.admin();
        let wire = proto::SetBudgetRequest { budget_bytes, budget_percent: 0 };
        let request = self.remote.request(wire, None);
        self.remote.ask(async move { admin.set_budget(request).await })
    }

    /// Changes the server's budget to a part of its disks, in hundredths of their size. Fails on a server that does not support parts.
    pub fn set_budget_part(&self, budget_percent: u32) -> Result<proto::SetBudgetReply, Error> {
        let mut admin = self.remote.admin();
        let wire = proto::SetBudgetRequest { budget_bytes: 0, budget_percent };
        let request = self.remote.request(wire, None);
        self.remote.ask(async move { admin.set_budget(request).await })
    }

    /// Makes the server read tenants, tokens and certificates again. Returns notes for the operator.
    pub fn reload(&self) -> Result<Vec<String>, Error> {
        let mut admin = self.remote.admin();
        let request = self.remote.request(proto::ReloadRequest {}, None);
        self.remote.ask(async move { admin.reload(request).await }).map(|reply| reply.notes)
    }

    /// Deletes all blocks of a tenant, or reports the blocks that it would delete.
    pub fn purge_tenant(&self, wire: proto::PurgeTenantRequest) -> Result<proto::PurgeTenantReply, Error> {
        let mut admin = self.remote.admin();
        let request = self.remote.endless(wire);
        // ends: the server's work; or the connection, once the server is silent (`KEEPALIVE`)
        self.remote.ask_endless(async move { admin.purge_tenant(request).await })
    }

    /// Makes the server complete its calls and stop.
    pub fn drain(&self) -> Result<(), Error> {
        let mut admin = self.remote.admin();
        let request = self.remote.request(proto::DrainRequest {}, None);
        self.remote.ask(async move { admin.drain(request).await }).map(drop)
    }

    /// The state of the server's cluster, as the server sees it.
    pub fn cluster_status(&self) -> Result<proto::ClusterStatusReply, Error> {
        let mut directory = self.remote.directory();
        let request = self.remote.request(proto::ClusterStatusRequest {}, None);
        self.remote.ask(async move { directory.status(request).await })
    }

    /// As [`KvStore::delete`], and returns the nodes of the cluster that have not received the delete yet; they receive it when they are
    /// connected again. With `of_all` the call fails if there are such nodes: deleted blocks stay deleted, but the delete is not
    /// acknowledged.
    pub fn delete_everywhere(
        &self,
        request: DeleteRequest,
        of_all: bool,
    ) -> Ticket<Result<(DeleteReply, Vec<proto::NodeAway>), Error>> {
        grpc_path::delete_everywhere(&self.remote, request, of_all)
    }

    /// As [`KvStore::match_prefix`], and returns also the blocks that a read fetches from outside the server's own store: blocks recorded
    /// on nodes of the cluster, and blocks that the bucket of the server probably has.
    pub fn match_beyond(&self, request: &MatchRequest<'_>) -> Result<Beyond, Error> {
        let found = self.path.matched(messages::matching(request, true))?;
        let own = messages::matched(&found)?;
        Ok(Beyond { own, in_cluster: found.in_cluster, in_cold: found.in_cold })
    }

    /// The nodes of the cluster that are recorded as holders of blocks, and the cost of reads from them. These are hints: a node may have
    /// lost or received a block since.
    pub fn locate(&self, request: proto::LookupRequest) -> Result<proto::LookupReply, Error> {
        let mut directory = self.remote.directory();
        let request = self.remote.request(request, None);
        self.remote.ask(async move { directory.lookup(request).await })
    }

    /// Makes the server copy blocks from other nodes of its cluster.
    pub fn replicate(&self, request: proto::ReplicateRequest) -> Result<proto::ReplicateReply, Error> {
        let mut directory = self.remote.directory();
        let request = self.remote.request(request, None);
        self.remote.ask(async move { directory.replicate(request).await })
    }

    /// Claims, renews, releases or looks up the ownership of a chain for the server's node, and records replicas.
    pub fn chain(&self, request: proto::ChainRequest) -> Result<proto::ChainReply, Error> {
        let mut directory = self.remote.directory();
        let request = self.remote.request(request, None);
        self.remote.ask(async move { directory.chain(request).await })
    }

    /// The node to which a request should go, with the cost at every candidate. The server adds the state of the disks of `this_node`.
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

    /// The same as messages of the protocol. The server adds the state of the nodes' stores that it knows and the request does not contain.
    pub fn route_filled(&self, request: proto::RouteRequest) -> Result<proto::RouteReply, Error> {
        let mut server = self.remote.plans();
        let request = self.remote.request(request, None);
        self.remote.ask(async move { server.route(request).await })
    }

    /// The models of the caller's tenant that were registered since the server started, or that have blocks on it.
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
