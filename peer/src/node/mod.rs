//! One node of a cluster: its part of the directory, what it tells the others, and how it asks them.
//!
//! Nothing here decides about bytes: what the directory says are hints. A node that does not answer in time costs what it would
//! have said.

mod chain;
mod deletes;
mod feeder;
mod following;
mod gather;
mod greeting;
mod holder;
mod incoming;
mod link;
mod locate;
mod network;
mod offering;
mod owned;
mod placing;
mod questions;
mod reading;
mod replicate;
mod seldom;
mod status;
mod stop;
mod stream;
mod warm;
mod wire;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use kvarts_cluster::directory::{Directory, Lacks};
use kvarts_cluster::feed::Message;
use kvarts_cluster::hot::Rule;
use kvarts_cluster::members::{Member, Members, NodeId};
use kvarts_cluster::ownership::Ownership;
use kvarts_cluster::partition::Holders;
use kvarts_contract::buffers::Region;
use kvarts_contract::clock::OsEntropy;
use kvarts_layout::planted;
use kvarts_store::engine::Store;
use kvarts_wire::proto;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

pub use chain::lease_of;
pub use deletes::{
    Away, Beside, Deleted, FILE_BYTES_MAX, Guarded, InMemory, Kept, Shortened, Underway, Written,
};
pub use locate::{Column, Located, Patience, Together};
pub use network::{Called, Calls, Footing, Network};
pub use offering::{OFFER_EVERY, OfferCounts};
pub use placing::{Fate, Placing, PutCounts, PutPolicy};
pub use replicate::Replicated;
pub use status::{NodeStatus, Status};
pub use warm::HotCounts;

use crate::credentials::Credentials;
use crate::etcd::Registered;
use crate::lane::{self, LaneServer, Machine, ServeLimits};
use crate::read::{NodePaths, OnTokio, PIECE_BYTES_LEAST, Task, sleep};
use deletes::Deletes;
use feeder::Feeder;
pub use greeting::Greeting;
use holder::Asking;
use link::Link;
use network::OfTheMachine;
use offering::Offers;
use owned::Owned;
use placing::Puts;
use reading::Lanes;
use seldom::Seldom;
use stop::Stop;
use warm::Warm;

/// The version of what nodes say to each other.
pub const VERSION: u32 = 5;
/// Bytes of one message between nodes.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// The pause between two lines of the log about a directory that is full.
const FULL_SAID_EVERY: Duration = Duration::from_secs(60);

/// What all nodes of a cluster know and other programs do not.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Made of the bytes of a file.
    pub fn new(bytes: &[u8]) -> Self {
        Self(blake3::derive_key("kvarts cluster secret, version 1", bytes))
    }

    /// The secret for other uses: nothing about this one can be found from it.
    pub fn for_use(&self, context: &str) -> [u8; 32] {
        blake3::Hasher::new_derive_key(context).update(&self.0).finalize().into()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(redacted)")
    }
}

/// What a node is told at its start.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// The name of the cluster: nodes of another one are refused.
    pub cluster: String,
    /// The first members.
    pub members: Members,
    /// What all nodes know.
    pub secret: Secret,
    /// This node's certificate; with one, every connection between nodes is encrypted, in both directions.
    pub credentials: Option<Arc<Credentials>>,
    /// Copies that this node's part of the directory may have.
    pub entries_max: u64,
    /// Chains whose owner this node decides.
    pub chains_max: usize,
    /// How often this node has started: greater each time.
    pub start: u64,
    /// Where it keeps what was deleted in the cluster.
    pub deletes: Arc<dyn Kept>,
    /// At which port of its address it serves them; 0: any.
    pub lane_port: u16,
    /// What this node does for the reads of others.
    pub serve: ServeLimits,
    /// What puts do with blocks that another node has.
    pub put: PutPolicy,
    /// How long puts and reads wait for nodes that are asked what they have.
    pub patience: Patience,
    /// Whether [`ClusterNode::set_beside`] will be called: until then no entry of another node is carried out.
    pub has_tier: bool,
    /// When blocks that are read from other nodes are copied here; none: never by themselves.
    pub hot: Option<Rule>,
    /// How often last copies are looked for that are about to be evicted: [`OFFER_EVERY`] but in tests.
    pub offer_every: Duration,
}

/// One node of a cluster, while it runs.
#[derive(Debug)]
pub struct ClusterNode {
    store: Store,
    me: NodeId,
    options: NodeOptions,
    members: RwLock<Arc<Members>>,
    /// Held by who changes them.
    changing: Mutex<()>,
    directory: Mutex<Directory>,
    chains: Mutex<Ownership>,
    feeder: Feeder,
    links: RwLock<BTreeMap<NodeId, Arc<Link>>>,
    /// How to ask nodes whose changes this one takes to send some again.
    asking: Mutex<BTreeMap<NodeId, Asking>>,
    left_out: LeftOut,
    /// Who says that a caller was refused.
    refusals: Seldom,
    /// Turns of calls that copy blocks here.
    copying: Semaphore,
    warm: Option<Warm>,
    puts: Puts,
    offers: Offers,
    owned: Owned,
    deletes: Deletes,
    lane_member: lane::Member,
    lane_server: Mutex<Option<LaneServer>>,
    lane_port: u16,
    /// Whether the memory for what others read is registered, once the store has answered.
    lane_registered: OnceLock<bool>,
    lanes: Mutex<Lanes>,
    paths: Arc<NodePaths>,
    footing: Footing,
    /// Why the members cannot be followed.
    trouble: Mutex<String>,
    stop: Stop,
}

impl ClusterNode {
    /// What this node says on its connections.
    fn greeting(&self) -> Greeting {
        let (secret, entropy) = (self.options.secret.clone(), Arc::clone(&self.footing.entropy));
        Greeting { secret, me: self.me, entropy }
    }

    /// Begins to serve other nodes and to tell them what this one has. On a tokio runtime.
    pub fn start(store: Store, listener: TcpListener, options: NodeOptions) -> Result<Arc<Self>, String> {
        let port = options.lane_port;
        let told = |error: std::io::Error| format!("cluster.lane_port {port}: {error}");
        let host = listener.local_addr().map_err(told)?.ip();
        let at = std::net::TcpListener::bind((host, port)).map_err(told)?;
        let runner = OnTokio::new(Arc::clone(store.clock()), tokio::runtime::Handle::current());
        let (secret, me) = (options.secret.clone(), store.stats().store);
        let greeting = Greeting { secret, me, entropy: OsEntropy::new() };
        let footing = Footing {
            runner: Arc::new(runner),
            host: Arc::new(Machine),
            entropy: OsEntropy::new(),
            network: Arc::new(OfTheMachine { credentials: options.credentials.clone(), greeting }),
            least_piece: PIECE_BYTES_LEAST,
        };
        let serving = |served: Store, member, limits| LaneServer::start(Arc::new(served), at, member, limits);
        let node = Self::start_on(store, footing, serving, options)?;
        tokio::spawn(holder::serve(Arc::clone(&node), listener));
        Ok(node)
    }

    /// The same on any footing. `serving` makes what serves bytes; who calls this node is brought to [`ClusterNode::answer`].
    pub fn start_on(
        store: Store,
        footing: Footing,
        serving: impl FnOnce(Store, lane::Member, ServeLimits) -> std::io::Result<LaneServer>,
        options: NodeOptions,
    ) -> Result<Arc<Self>, String> {
        let me = store.stats().store;
        let members = options.members.clone();
        if members.get(me).is_none() {
            return Err(format!("this node, {me}, is not in the list of members: add it and its address"));
        }
        let directory = Mutex::new(Directory::new(me, &members, options.entries_max));
        let chains = Mutex::new(ownership(&store, &options, &members));
        let lane_member = lane::Member {
            cluster: options.cluster.clone(),
            node: me,
            secret: Some(lane::Secret(options.secret.for_use("kvarts cluster lane, version 1"))),
            credentials: options.credentials.clone(),
            clock: Arc::clone(store.clock()),
            entropy: Arc::clone(&footing.entropy),
            host: Arc::clone(&footing.host),
        };
        let lane_server = serving(store.clone(), lane_member.clone(), options.serve)
            .map_err(|error| format!("the port on which other nodes read from this node: {error}"))?;
        let lane_memory = Arc::clone(lane_server.memory());
        let others: Vec<NodeId> =
            members.list().iter().map(|member| member.id).filter(|id| *id != me).collect();
        let (deletes, below_ms) = Deletes::load(&options.deletes, &others)?;
        store.produce_after(below_ms);
        let (warm, hot_blocks) = options.hot.map(Warm::new).unzip();
        let (offers, queues) = Offers::new();
        let node = Arc::new(Self {
            paths: NodePaths::with_pieces(Arc::new(store.clone()), footing.least_piece),
            footing,
            lanes: Mutex::default(),
            copying: Semaphore::new(replicate::AT_ONCE),
            warm,
            puts: Puts::default(),
            offers,
            owned: Owned::default(),
            deletes,
            lane_port: lane_server.address().port(),
            lane_registered: OnceLock::new(),
            lane_server: Mutex::new(Some(lane_server)),
            lane_member,
            store,
            me,
            members: RwLock::new(Arc::new(members.clone())),
            changing: Mutex::default(),
            options,
            directory,
            chains,
            feeder: Feeder::default(),
            links: RwLock::default(),
            asking: Mutex::default(),
            left_out: LeftOut::default(),
            refusals: Seldom::default(),
            trouble: Mutex::default(),
            stop: Stop::default(),
        });
        if let Err(error) = node.take_members(&Arc::new(members)) {
            // Tasks that were begun have the node.
            node.stop();
            return Err(error);
        }
        node.spawn(register(Arc::clone(&node), lane_memory));
        node.spawn(feeder::read_store(Arc::clone(&node)));
        node.spawn(chain::confirm(Arc::clone(&node)));
        node.spawn(holder::tidy(Arc::clone(&node)));
        offering::begin(&node, queues);
        if let Some(blocks) = hot_blocks {
            node.spawn(warm::copy(Arc::clone(&node), blocks));
        }
        Ok(node)
    }

    /// Serves bytes over one more connection, which did not come over the machine's network. False if nothing is served any more.
    pub fn take_wire(&self, wire: Arc<dyn lane::Wire>) -> bool {
        let server = self.lane_server.lock().unwrap_or_else(PoisonError::into_inner);
        server.as_ref().inspect(|server| server.take(wire)).is_some()
    }

    /// Ends everything; other nodes see their connections break.
    pub fn stop(&self) {
        self.stop.stop();
        self.links.write().unwrap_or_else(PoisonError::into_inner).clear();
        let lanes = std::mem::take(&mut self.lanes().by_node);
        lanes.into_values().for_each(|lane| self.paths.remove(lane.path));
        // Outside the lock: it waits for threads.
        let server = self.lane_server.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(server) = server {
            // Operations under way end as they are, and have the memory until then.
            self.store.unregister_memory(server.memory());
            server.stop();
        }
    }

    /// From now on other nodes get at most `bytes_per_second` from this one.
    pub fn limit_serving(&self, bytes_per_second: Option<u64>) {
        let server = self.lane_server.lock().unwrap_or_else(PoisonError::into_inner);
        server.iter().for_each(|server| server.limit(bytes_per_second));
    }

    /// The name of this node: that of its store.
    pub fn id(&self) -> NodeId {
        self.me
    }

    /// Takes over the members that are registered, as they change, and keeps this node registered.
    pub fn follow(self: &Arc<Self>, registered: Registered) {
        self.spawn(following::follow(Arc::clone(self), registered));
    }

    /// Why the members cannot be followed, for who asks how this node does; empty if they can.
    pub(crate) fn set_trouble(&self, trouble: String) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    /// Its certificate, if nodes have some: for replacing it.
    pub fn credentials(&self) -> Option<&Arc<Credentials>> {
        self.options.credentials.as_ref()
    }

    /// Who belongs to the cluster, as far as this node knows.
    pub fn members(&self) -> Arc<Members> {
        Arc::clone(&self.members.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The members have changed. An older epoch, or the same one, changes nothing; members without this node are refused.
    pub fn change_members(self: &Arc<Self>, members: Members) -> Result<(), String> {
        if members.epoch() <= self.members().epoch() && !planted!("old-members-accepted") {
            return Ok(());
        }
        self.has_me(&members)?;
        self.take_members(&Arc::new(members))
    }

    /// Why these members could not be taken over, if so. Nothing changes.
    pub fn check_members(&self, members: &Members) -> Result<(), String> {
        if members.epoch() <= self.members().epoch() {
            return Ok(());
        }
        self.has_me(members)?;
        for member in members.list().iter().filter(|member| member.id != self.me) {
            Link::new(member.clone(), &self.footing)?;
        }
        Ok(())
    }

    fn has_me(&self, members: &Members) -> Result<(), String> {
        match members.get(self.me) {
            Some(_) => Ok(()),
            None => Err(format!(
                "this node, {}, is not in the list of members of epoch {}",
                self.me,
                members.epoch()
            )),
        }
    }

    /// Takes members over, or changes nothing: what can fail comes first.
    fn take_members(self: &Arc<Self>, members: &Arc<Members>) -> Result<(), String> {
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let new = self.new_links(members)?;
        let lacks = self.swap(members);
        // Before anything connects to them.
        let holders = Holders::of(members);
        let held = members.list().iter().map(|member| (member.id, holders.held_by(member.id).collect()));
        self.feeder.hold(self.me, held.collect());
        let mut links = self.links.write().unwrap_or_else(PoisonError::into_inner);
        let gone = links.extract_if(.., |_, link| members.get(link.id()) != Some(&link.member));
        gone.for_each(|(node, _)| {
            self.close_lane(node);
            self.feeder.disconnect(node);
        });
        for link in new {
            links.insert(link.id(), Arc::clone(&link));
            self.spawn(feeder::send(Arc::clone(self), link));
        }
        drop(links);
        self.serve_members(members);
        self.deletes.keep(|node| members.get(*node).is_some());
        self.ask_again(&lacks);
        Ok(())
    }

    /// Links to members to which there are none.
    fn new_links(&self, members: &Members) -> Result<Vec<Arc<Link>>, String> {
        let is_new = |member: &&Member| {
            let known = self.link(member.id);
            member.id != self.me && known.is_none_or(|link| link.member != **member)
        };
        let others = members.list().iter().filter(is_new);
        others.map(|member| Link::new(member.clone(), &self.footing)).collect()
    }

    /// The directory, the members and the chains that this node decides change in one step: nothing is decided by an owner's lease of one epoch
    /// for a partition that is held in another.
    fn swap(&self, members: &Arc<Members>) -> Lacks {
        let mut chains = self.chains();
        let mut directory = self.directory();
        let lacks = directory.change_members(members);
        if members.epoch() != self.options.members.epoch() {
            // Partitions may have come from another holder.
            *chains = ownership(&self.store, &self.options, members);
        }
        *self.members.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(members);
        lacks
    }

    /// Who is no member any more is not served: its connections are cut, and what it says of its blocks is not heard.
    fn serve_members(&self, members: &Members) {
        let server = self.lane_server.lock().unwrap_or_else(PoisonError::into_inner);
        let others = members.list().iter().map(|member| member.id).filter(|id| *id != self.me);
        server.iter().for_each(|server| server.serve_only(others.clone().collect()));
        drop(server);
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        asking.retain(|node, asking| {
            let stays = members.get(*node).is_some();
            if !stays {
                asking.cut();
            }
            stays
        });
    }

    /// Runs a task until it ends or the node stops.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stopped = self.stopped();
        self.footing.runner.spawn(Box::pin(async move {
            tokio::select! {
                biased;
                // ends: the node stops, or the task is done: the next arm
                () = stopped => {}
                // ends: the node stops: the arm before it
                () = task => {}
            }
        }));
    }

    fn sleep(&self, time: Duration) -> Task {
        sleep(&*self.footing.runner, time)
    }

    /// Returns once the node is to stop.
    fn stopped(&self) -> impl Future<Output = ()> + Send + 'static {
        self.stop.stopped()
    }

    fn directory(&self) -> MutexGuard<'_, Directory> {
        self.directory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn chains(&self) -> MutexGuard<'_, Ownership> {
        self.chains.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn join_request(&self, members: &Members) -> proto::JoinRequest {
        let (cluster, node) = (self.options.cluster.clone(), self.me.0.to_vec().into());
        let (epoch, members) = (members.epoch(), members.digest().to_vec().into());
        proto::JoinRequest { version: VERSION, cluster, node, epoch, members }
    }

    fn links(&self) -> Vec<Arc<Link>> {
        self.links.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    fn link(&self, node: NodeId) -> Option<Arc<Link>> {
        self.links.read().unwrap_or_else(PoisonError::into_inner).get(&node).cloned()
    }

    /// The connection of this link is gone, over which its node was sent this node's blocks. If the node has a newer link, the feed is that one's.
    fn end_feed(&self, link: &Link) {
        let links = self.links.read().unwrap_or_else(PoisonError::into_inner);
        if links.get(&link.id()).is_some_and(|now| std::ptr::eq(&**now, link)) {
            self.feeder.disconnect(link.id());
        }
    }

    /// Whether a link is still that to its node.
    fn is_linked(&self, link: &Link) -> bool {
        self.link(link.id()).is_some_and(|now| std::ptr::eq(&*now, link))
    }

    /// Takes in what another node, or this one, has said of its blocks.
    fn take(&self, directory: &mut Directory, from: NodeId, message: &Message) {
        match message {
            Message::Begin(partitions) => {
                partitions.iter().for_each(|partition| directory.begin_snapshot(from, *partition));
            }
            Message::Changes(changes) => {
                let applied = directory.apply(from, changes);
                self.note_left_out(applied.refused + applied.dropped);
            }
            Message::End(partitions) => {
                partitions.iter().for_each(|partition| directory.end_snapshot(from, *partition));
            }
        }
    }

    /// Copies were left out of the directory, or dropped from it, for want of room: an operator hears of it, though not of each.
    fn note_left_out(&self, copies: u64) {
        let before = self.left_out.copies.fetch_add(copies, Ordering::Relaxed);
        if copies > 0 && self.left_out.said.may(self.footing.runner.now(), FULL_SAID_EVERY) {
            let (left_out, room) = (before + copies, self.options.entries_max);
            tracing::warn!(
                left_out,
                room,
                "this node's part of the directory is full, so some stored blocks are not found: raise cluster.entries on all \
                 nodes"
            );
        }
    }

    /// Takes in what this node holds of its own blocks.
    fn take_own(&self) {
        feeder::own_messages(&self.feeder, self.me).for_each(|message| {
            self.take(&mut self.directory(), self.me, &message);
        });
    }

    /// Monotonic time, as state machines take it.
    fn now(&self) -> Duration {
        Duration::from_nanos(self.store.clock().now().0)
    }
}

/// Copies that the directory has no room for.
#[derive(Debug, Default)]
struct LeftOut {
    copies: AtomicU64,
    /// When the log last said so.
    said: Seldom,
}

/// Registers the memory for what others read with the store: its reads cost less then.
async fn register(node: Arc<ClusterNode>, memory: Arc<Region>) {
    // ends: an executor answers from memory, or the store is closed
    let registered = node.store.register_memory(&memory).await;
    if let Err(why) = &registered {
        tracing::info!(%why, "the memory from which other nodes read could not be registered with the \
            kernel, so their reads are slower");
    }
    // It is set only here.
    let _ = node.lane_registered.set(registered.is_ok());
}

/// The chains of a holder that begins now. Its epoch is later than that of any of its partitions' holders before it: by the epoch of
/// the members, then by how often this node has started. Before the first start in the first epoch there was none.
fn ownership(store: &Store, options: &NodeOptions, members: &Members) -> Ownership {
    let epoch = (members.epoch() << 32).saturating_add(options.start & u64::from(u32::MAX));
    let is_first = members.epoch() == 1 && options.start == 1;
    let now = Duration::from_nanos(store.clock().now().0);
    Ownership::take_over(epoch, is_first, options.chains_max, now)
}
