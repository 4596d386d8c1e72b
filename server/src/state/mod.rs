//! What a running server is, whatever its clients speak: the store, who may use it, which models and leases are
//! whose, and the memory that requests share.
//!
//! Tenants are kept apart here, in two ways that do not depend on each other: the identity of each model carries
//! the tenant's salt, so equal models of two tenants are two namespaces; and a namespace is only found for the
//! tenant that registered it, by a number that no other tenant ever has, whatever a request claims. Where a model is found
//! both are looked at. A name of another tenant is answered exactly as one that does not exist.

mod again;
mod anywhere;
mod audit;
pub mod auth;
mod bandwidth;
pub(crate) mod connections;
mod event_mask;
mod leases;
pub mod locals;
mod memory;
mod models;
mod node_tiles;
pub mod parts;
mod puts;
mod receiving;
mod recent_reads;
mod reloads;
pub mod scrub;
pub mod sessions;
mod stall_timeout;
pub mod tenant;
mod tile_cache;
mod times;
mod trouble;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kvarts_contract::api::KvStore;
use kvarts_contract::buffers::BufMut;
use kvarts_contract::clock::{Clock, Entropy};
use kvarts_peer::node::ClusterNode;
use kvarts_store::driver::DriveLoad;
use kvarts_store::engine::{OfTenant, Store};
use kvarts_store::index::PinShare;
use tokio::sync::Notify;

pub use audit::Audit;
pub use auth::{Caller, Right, Rights};
pub(crate) use bandwidth::Bandwidth;
pub use connections::Places;
pub use event_mask::EventMask;
pub(crate) use kvarts_wire::lobby::{Guest, Lobby};
pub use leases::{HeldLease, Leases};
pub use locals::Locals;
pub use memory::{Memory, MemoryShares, SharedBytes};
pub use models::{Model, ModelLimits, Models};
pub use node_tiles::NodeTiles;
pub use puts::Puts;
pub use receiving::Receiving;
pub use recent_reads::{LayerTimes, LayeredRead, RecentReads};
pub use reloads::{Reloaded, Reloads};
pub use scrub::Scrub;
pub use sessions::LiveSessions;
pub use stall_timeout::StallTimeout;
pub use tenant::Tenant;
pub use tile_cache::{CachedTile, TileCache, TileStart};
pub use times::KnownTimes;
pub use trouble::Trouble;

use crate::cold::ColdTier;
use crate::counters::Metrics;
use kvarts_wire::limits::{HEAVY_AT_ONCE, HEAVY_WAITING, LOST_DIRECTORY, SMALL_TILE_BYTES};

/// A running server's insides.
#[derive(Debug)]
pub struct ServerState {
    /// The engine.
    pub engine: Store,
    /// Who may do what.
    pub gate: auth::Gatekeeper,
    /// Which models are known, and whose they are.
    pub models: Models,
    /// Which leases are held, and whose they are.
    pub leases: Leases,
    /// Sessions of clients, and the chains that are claimed for them.
    pub sessions: LiveSessions,
    /// The last reads by layers.
    pub recent_reads: RecentReads,
    /// Where it is asked for that the configuration is read again.
    pub reloads: Reloads,
    /// Memory of requests.
    pub memory: Memory,
    /// What each tenant has of it.
    shares: MemoryShares,
    /// Clients on the same host, and the memory that they share.
    pub locals: Arc<Locals>,
    /// Places for connections, and who has them.
    pub connections: Arc<Places>,
    /// Large reads under way over the network.
    pub large_reads: Arc<AtomicU64>,
    /// Large requests over gRPC, and their answers.
    pub receiving: Receiving,
    /// Prefill times that requests came with.
    pub times: KnownTimes,
    /// Turns of work that keeps a processor busy for long.
    pub heavy: parts::Parts,
    /// How long clients that take nothing are waited for.
    pub stall_timeout: Arc<StallTimeout>,
    /// Turns of puts that take bytes.
    pub puts: Puts,
    /// How many lines refused calls have caused.
    pub audit: Audit,
    /// What an operator must hear of.
    pub trouble: Trouble,
    /// How points in the stream of events are shown to tenants.
    pub event_mask: EventMask,
    /// The scrubber, and what it found.
    pub scrub: Scrub,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// What was decided at the start.
    pub decided: Decided,
    entropy: Arc<dyn Entropy>,
    /// Clients are told to go elsewhere; calls are still taken until `draining`.
    leaving: AtomicBool,
    leave: Notify,
    draining: AtomicBool,
    drain: Notify,
    /// Calls that have begun and not ended.
    calls: AtomicU64,
    idle: Notify,
}

/// What a server has decided at its start.
#[derive(Clone, Debug)]
pub struct Decided {
    /// What an operator should know, a sentence each.
    pub notes: Vec<String>,
    /// How files reach the memory of devices on this host.
    pub files: kvarts_gpudirect::cufile::Decision,
    /// How long calls are taken after clients were told to go elsewhere.
    pub lame_duck: Duration,
    /// Limits without a count of their use.
    pub limits: Vec<SetLimit>,
    /// Where the store is.
    pub directories: Vec<PathBuf>,
    /// The cluster that this node belongs to, if any.
    pub cluster: Option<Arc<ClusterNode>>,
    /// The bucket behind this server, if any.
    pub cold: Option<Arc<ColdTier>>,
}

/// A disk that has not answered for so long is named.
const SILENT: Duration = Duration::from_secs(10);

/// A limit that the operator sets.
#[derive(Clone, Copy, Debug)]
pub struct SetLimit {
    /// Its name in the file.
    pub name: &'static str,
    /// None: there is none.
    pub most: Option<u64>,
    /// Of bytes; else a number.
    pub bytes: bool,
}

/// A call that is under way, for as long as it lives.
#[derive(Debug)]
pub struct UnderWay(Arc<ServerState>);

impl ServerState {
    /// A server around an open engine, with at most `connections` connections.
    pub fn new(
        engine: Store,
        gate: auth::Gate,
        memory: Memory,
        locals: Locals,
        connections: usize,
        entropy: Arc<dyn Entropy>,
        decided: Decided,
    ) -> Arc<Self> {
        let mut secret = [0; 32];
        entropy.fill(&mut secret);
        let audit = Audit::new(Arc::clone(engine.clock()));
        let tenants: Vec<u32> = gate.tenants().iter().map(|tenant| tenant.number).collect();
        let state = Arc::new(Self {
            engine,
            connections: Arc::new(Places::new(connections, &tenants)),
            shares: MemoryShares::new(&memory, &tenants),
            large_reads: Arc::default(),
            receiving: Receiving::new(&tenants),
            times: KnownTimes::default(),
            heavy: parts::Parts::new(HEAVY_AT_ONCE, &tenants, HEAVY_AT_ONCE, HEAVY_WAITING),
            stall_timeout: Arc::default(),
            puts: Puts::new(&memory, &tenants),
            audit,
            trouble: Trouble::default(),
            event_mask: EventMask::new(secret),
            scrub: Scrub::default(),
            gate: auth::Gatekeeper::new(gate),
            models: Models::default(),
            leases: Leases::default(),
            sessions: LiveSessions::default(),
            recent_reads: RecentReads::default(),
            reloads: Reloads::default(),
            memory,
            locals: Arc::new(locals),
            metrics: Arc::new(Metrics::default()),
            decided,
            entropy,
            leaving: AtomicBool::new(false),
            leave: Notify::new(),
            draining: AtomicBool::new(false),
            drain: Notify::new(),
            calls: AtomicU64::new(0),
            idle: Notify::new(),
        });
        state.share_pins();
        state.sessions.divide(&state.engine, &[], tenants.len());
        state
    }

    /// Lets in whom another gate does from now on, and divides what tenants share among those. Of tenants that are gone nothing
    /// is kept but what they stored.
    pub fn change_gate(&self, to: &auth::Gate) -> Result<auth::Changed, String> {
        let changed = self.gate.change(to)?;
        let tenants: Vec<u32> = self.gate.tenants().iter().map(|tenant| tenant.number).collect();
        self.shares.divide(&tenants);
        self.receiving.divide(&tenants);
        self.heavy.divide(&tenants);
        self.puts.divide(&tenants);
        self.locals.divide(&tenants);
        self.connections.divide(&tenants);
        self.forget(&changed.gone);
        let gone: Vec<u32> = changed.gone.iter().map(|tenant| tenant.number).collect();
        self.sessions.divide(&self.engine, &gone, tenants.len());
        let names = |some: &'_ [Arc<Tenant>]| some.iter().map(|one| one.name.clone()).collect::<Vec<_>>();
        let (gone, new) = (names(&changed.gone), names(&changed.new));
        self.metrics.tenants_changed(gone.iter().map(String::as_str), new.iter().map(String::as_str));
        self.share_pins();
        Ok(changed)
    }

    /// Takes out what is here of tenants whose tokens work no more: models, leases and pins.
    fn forget(&self, gone: &[Arc<Tenant>]) {
        let numbers: Vec<u32> = gone.iter().map(|tenant| tenant.number).collect();
        self.locals.end(&numbers);
        self.models.forget(&self.engine, &numbers);
        for lease in self.leases.forget(&numbers) {
            self.engine.unlock(lease);
        }
        for number in numbers {
            self.engine.set_pin_cap(number, None);
        }
        self.recent_reads.forget(&gone.iter().map(|tenant| tenant.name.as_str()).collect::<Vec<_>>());
    }

    /// Says anew how much tenants may pin, by the budget as it is now: at most half of it is held by leases and pins, and of
    /// that half is set aside in equal parts. Without a limit of its own a tenant has such a part.
    pub fn share_pins(&self) {
        let tenants = self.gate.tenants();
        let all = self.engine.stats().budget_bytes / 2;
        let count = u32::try_from(tenants.len().max(1)).unwrap_or(u32::MAX);
        let each = all / 2 / u64::from(count);
        for tenant in tenants {
            let cap = tenant.limits.pin_bytes.unwrap_or(each).min(all);
            self.engine.set_pin_cap(tenant.number, Some(cap));
        }
        self.engine.set_pin_share(Some(PinShare { all, each, tenants: count }));
    }

    /// What is stored of whom no token is: of tenants whose salt is none of those that have one, those with the most bytes first.
    pub fn ownerless(&self) -> Vec<OfTenant> {
        let tenants = self.gate.tenants();
        let mut all = self.engine.tenants();
        all.retain(|one| one.live_blocks > 0 && tenants.iter().all(|tenant| tenant.salt != one.salt));
        all.sort_by_key(|one| std::cmp::Reverse(one.live_bytes));
        all
    }

    /// Memory for a request of a tenant as soon as there is room; none if it is larger than any may be.
    pub async fn take_memory(&self, tenant: &Tenant, len: u64) -> Option<BufMut> {
        self.shares.take(&self.memory, tenant.number, len).await
    }

    /// The same for a tenant that was charged for it.
    pub async fn take_charged(&self, tenant: &Tenant, len: u64) -> Option<BufMut> {
        self.shares.take_charged(&self.memory, tenant.number, len).await
    }

    /// The same now, if after it half of the memory is still free.
    pub fn take_spare(&self, tenant: &Tenant, len: u64) -> Option<BufMut> {
        self.shares.take_spare(&self.memory, tenant.number, len)
    }

    /// What `len` bytes of memory take of a tenant's share, as soon as it may have them.
    pub async fn charge(&self, tenant: &Tenant, len: u64) -> Option<parts::Part> {
        self.shares.charge(&self.memory, tenant.number, len).await
    }

    /// The same now, if no request waits for it.
    pub fn try_charge(&self, tenant: &Tenant, len: u64) -> Option<parts::Part> {
        self.shares.try_charge(&self.memory, tenant.number, len)
    }

    /// How much of that a tenant should take at once, of `most`.
    pub fn at_once(&self, tenant: &Tenant, most: u64) -> u64 {
        self.shares.at_once(tenant.number, SMALL_TILE_BYTES, most)
    }

    /// The store as its clients see it.
    pub fn store(&self) -> &dyn KvStore {
        &self.engine
    }

    /// The clock of deadlines and leases.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        self.engine.clock()
    }

    /// A number that cannot be guessed.
    pub fn secret_number(&self) -> u64 {
        let mut bytes = [0; 8];
        self.entropy.fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// Counts a call, or nothing if no more are taken.
    pub fn begin(self: &Arc<Self>) -> Option<UnderWay> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let under_way = UnderWay(Arc::clone(self));
        (!self.draining.load(Ordering::SeqCst)).then_some(under_way)
    }

    /// Tells clients from now on, by its health, that they should go elsewhere. Calls are taken as before.
    pub fn start_leaving(&self) {
        self.leaving.store(true, Ordering::SeqCst);
        self.leave.notify_waiters();
    }

    /// Whether clients are told to go elsewhere.
    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::SeqCst)
    }

    /// Returns when clients are told to go elsewhere.
    pub async fn leave_asked(&self) {
        // Made before the look, so that an asking in between is heard.
        let asked = self.leave.notified();
        if !self.is_leaving() {
            // ends: a stop or a drain; each caller waits beside work of its own
            asked.await;
        }
    }

    /// Takes no more calls from now on.
    pub fn start_drain(&self) {
        self.start_leaving();
        self.draining.store(true, Ordering::SeqCst);
        self.drain.notify_waiters();
    }

    /// Whether no more calls are taken.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Why no client should be sent here, if so.
    pub fn fault(&self) -> Option<String> {
        if self.is_leaving() {
            return Some("the server is stopping".to_owned());
        }
        self.engine.health().fault().map(|why| format!("the store is read-only: {why}"))
    }

    /// Directories of the store that are not in use, each with why: a sentence.
    pub fn lost_directories(&self) -> Vec<String> {
        let told =
            |(at, why): (u16, String)| format!("{LOST_DIRECTORY}{} is out of use: {why}", self.directory(at));
        self.engine.health().out.into_iter().map(told).collect()
    }

    /// Directories in use whose disks do not answer, each with for how long: a sentence.
    pub async fn silent_directories(&self) -> Vec<String> {
        let (out, loads) = (self.engine.health().out, self.engine.drives().await.unwrap_or_default());
        let silent =
            (0u16..).zip(loads).filter(|(at, load)| load.unanswered >= SILENT && !out.contains_key(at));
        let told = |(at, load): (u16, DriveLoad)| {
            let (directory, seconds) = (self.directory(at), load.unanswered.as_secs());
            format!("{LOST_DIRECTORY}{directory} has not responded for {seconds} s")
        };
        silent.map(told).collect()
    }

    /// The path of the store's `at`th directory.
    pub(crate) fn directory(&self, at: u16) -> String {
        let directory = self.decided.directories.get(usize::from(at));
        directory.map_or_else(|| at.to_string(), |path| path.display().to_string())
    }

    /// Returns when a drain was asked for.
    pub async fn drain_asked(&self) {
        // Made before the look, so that an asking in between is heard.
        let asked = self.drain.notified();
        if !self.draining.load(Ordering::SeqCst) {
            // ends: a drain; each caller waits beside work of its own
            asked.await;
        }
    }

    /// Returns when no call is under way.
    pub async fn idle(&self) {
        loop {
            let ended = self.idle.notified();
            if self.calls.load(Ordering::SeqCst) == 0 {
                return;
            }
            // ends: `DRAIN_TIMEOUT`, by its only caller
            ended.await;
        }
    }

    /// Calls that are under way.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if self.0.calls.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}
