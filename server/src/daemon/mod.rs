//! The daemon: from a configuration to a server that runs, and to a clean end.
//!
//! The end: no new call is taken, those under way have a bounded time to finish, the store writes a checkpoint and
//! lets go of its directories. What was acknowledged is on disk whatever happens on the way.
#![allow(
    clippy::disallowed_methods,
    reason = "the daemon, which uses sockets and key files, is not simulated"
)]

mod checked;
mod closing;
mod cluster;
mod deletes_file;
mod devices;
mod init;
pub mod notify;
mod opened;
mod ownerless;
mod places;
mod ports;
mod ready;
mod scrubs;
mod sessions;
mod socket;
mod starts;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::clock::Entropy;
use kvarts_contract::clock::OsEntropy;
use kvarts_layout::format::names::SUPERBLOCK;
use kvarts_store::home::{self, Home, Stop};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::config::{Config, charged_group};
use crate::grpc::{self, Listeners, Tls};
use crate::human;
use crate::metrics;
use crate::state::locals::{LocalLimits, Locals};
use crate::state::{Decided, ServerState, SetLimit};
use kvarts_wire::local::limits::{SESSIONS_MAX, UNKNOWN_MAX};

pub use checked::check;
use checked::{Checked, read_tls};
pub use init::init;
pub use opened::Opened;
use ports::Ports;
use ready::Ready;

/// How long calls under way may take to end once a stop was asked for.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(20);
/// Descriptors that are neither for connections, segment files nor memories of local clients: sockets of local clients, known
/// and not yet known, rings, and what else there is.
const DESCRIPTORS_KEPT: u64 = (SESSIONS_MAX + UNKNOWN_MAX) as u64 + 256;

/// A server that runs.
#[derive(Debug)]
pub struct Daemon {
    state: Arc<ServerState>,
    home: Home,
    opened: Opened,
    serving: JoinHandle<Result<(), tonic::transport::Error>>,
    /// Takes another identity of the server, where it has one.
    renew: Option<mpsc::Sender<Tls>>,
    /// Whether it was seen to have ended, and why if it failed.
    over: bool,
    fault: Option<String>,
    /// Those that tell what the server does, and that remember it.
    metrics_tasks: Vec<JoinHandle<()>>,
    scrub_task: Option<JoinHandle<()>>,
    places_task: JoinHandle<()>,
    sessions_task: JoinHandle<()>,
    grpc: Option<SocketAddr>,
    metrics: Option<SocketAddr>,
    socket: Option<socket::Bound>,
}

impl Daemon {
    /// Opens the store and begins to serve. A start that is refused leaves no store that was not there before, and gives one line
    /// that says what is wrong and which directories have none.
    pub async fn start(config: &Config) -> Result<Self, String> {
        Self::start_unless(config, &Stop::default()).await
    }

    /// As [`start`](Self::start), and refused once `stop` is set. A start looks at `stop` where it can wait for long: one that is
    /// past its last such place succeeds.
    pub async fn start_unless(config: &Config, stop: &Stop) -> Result<Self, String> {
        let had = stores(&config.directories);
        let started = Self::begin(config, stop).await;
        started.map_err(|why| format!("{why}{}", left(&config.directories, &had)))
    }

    async fn begin(config: &Config, stop: &Stop) -> Result<Self, String> {
        let Checked { tls, files, group, options, mut notes } = Checked::of(config, stop)?;
        let ports = ports(config).await?;
        let begun = std::time::Instant::now();
        // ends: a directory has 30 s, and transfers `OVERDUE`: it is opened without those that hang
        let opened = tokio::task::spawn_blocking(move || Home::open(&options)).await;
        let home = opened.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
        let opened = Opened::of(home.store(), begun.elapsed());
        notes.extend(home.notes().iter().cloned());
        let me = home.store().stats().store;
        let named = config.cluster.as_ref().map(|config| cluster::Named::of(config, me));
        let named = match named.transpose() {
            Ok(named) => named,
            Err(why) => {
                // The line tells the name that this store has: one that is made anew has another.
                // ends: the store's `stop_timeout`
                let _ = tokio::task::spawn_blocking(move || home.close()).await;
                return Err(why);
            }
        };
        let store = home.store().clone();
        let ready = match Ready::make(config, (&store, stop), (ports, group), named, &mut notes).await {
            Ok(ready) => ready,
            Err(why) => {
                drop(store);
                let beside = [starts::FILE, deletes_file::FILE];
                // ends: the store's `stop_timeout`
                let _ = tokio::task::spawn_blocking(move || home.take_back(&beside)).await;
                return Err(why);
            }
        };
        let Ready { memory, grpc, metrics, unix, connections, memories, cluster, cold } = ready;
        let ((tcp, grpc), (metrics_listener, metrics)) = (grpc, metrics);
        let (unix, socket) = unix.unzip();
        let (gate, mut instance) = (config.gate.clone(), [0; 16]);
        OsEntropy::new().fill(&mut instance);
        let tenants: Vec<u32> = gate.tenants().iter().map(|tenant| tenant.number).collect();
        let limits = LocalLimits { mapped_max: config.shared, files_max: memories, threads: config.threads };
        let locals = Locals::new(limits, &tenants, instance).in_group(charged_group(config));
        let directories = config.directories.clone();
        let (limits, lame_duck) = (uncounted(config), config.lame_duck);
        let decided = Decided { notes, files, lame_duck, limits, directories, cluster, cold };
        let state = ServerState::new(store, gate, memory, locals, connections, OsEntropy::new(), decided);
        let (renew, renewed) = mpsc::channel(1);
        let renew = tls.is_some().then_some(renew);
        let listeners = Listeners { tcp, unix, tls, renewed: Some(renewed) };
        let serving = tokio::spawn(grpc::serve(Arc::clone(&state), listeners));
        let metrics_tasks = metrics_listener
            .map_or(Vec::new(), |listener| serve_metrics(listener, config.open_metrics, &state));
        let scrub_task = start_scrub(config, &state);
        Ok(Self {
            places_task: tokio::spawn(places::keep(home.places())),
            sessions_task: tokio::spawn(sessions::keep(Arc::clone(&state))),
            state,
            home,
            opened,
            serving,
            renew,
            over: false,
            fault: None,
            metrics_tasks,
            scrub_task,
            grpc,
            metrics,
            socket,
        })
    }

    /// The server's insides.
    pub fn state(&self) -> &Arc<ServerState> {
        &self.state
    }

    /// Takes over what of a configuration can change while the server runs: tenants, tokens, certificates, members. Says in one
    /// line each what an operator should know, or what is wrong; then everything stays as it was, because all of it is looked at
    /// before the first of it changes.
    pub async fn reload(&self, config: &Config) -> Result<Vec<String>, String> {
        let tls = config.tls.as_ref().map(read_tls).transpose()?;
        if tls.is_some() != self.renew.is_some() {
            return Err("TLS can be switched on or off only at a start: restart the server".to_owned());
        }
        self.state.gate.check(&config.gate)?;
        let cluster = match (&config.cluster, &self.state.decided.cluster) {
            (Some(config), Some(node)) => Some((cluster::Renewed::check(config, node)?, node)),
            _ => None,
        };
        let members = cluster.map(|(renewed, node)| renewed.take(node)).transpose()?;
        let (state, gate) = (Arc::clone(&self.state), config.gate.clone());
        // A tenant that is gone may have held many blocks.
        // ends: it goes through what tenants have in memory
        let changed = tokio::task::spawn_blocking(move || state.change_gate(&gate)).await;
        let changed = changed.map_err(|error| error.to_string())??;
        for tenant in &changed.new {
            self.home.store().set_tenant_quota(&tenant.salt, tenant.limits.disk);
        }
        if let Some((renew, tls)) = self.renew.as_ref().zip(tls) {
            // Its receiver is gone where nothing is served any more.
            // ends: the receiver takes it at once, or has ended
            let _ = renew.send(tls).await;
        }
        let mut notes = changed.notes;
        notes.extend(ownerless::note(&self.state));
        let budget = self.home.store().stats().budget_bytes;
        if let Some(asked) = config.budget.filter(|asked| *asked != budget) {
            let (asked, budget) = (human::bytes(asked), human::bytes(budget));
            notes.push(format!(
                "store.budget is {asked} in the configuration, but the server uses {budget}: the configured \
                value applies at the next start, or immediately with `kvarts budget \"{asked}\"`"
            ));
        }
        notes.extend(members.into_iter().flatten());
        Ok(notes)
    }

    /// What is stored of whom no token is, if anything: for an operator to know at the start.
    pub fn ownerless(&self) -> Option<String> {
        ownerless::note(&self.state)
    }

    /// Which directories lose everything at a reboot, if any: for an operator to know at the start.
    pub fn in_memory(&self) -> Option<String> {
        let those: Vec<String> =
            self.home.in_memory().iter().map(|path| path.display().to_string()).collect();
        let advice = "a reboot loses all blocks in this directory, durable blocks too; name a directory on a disk (store.directories)";
        (!those.is_empty())
            .then(|| format!("the store is in memory (tmpfs), in {}: {advice}", those.join(", ")))
    }

    /// What opening the store found.
    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    /// Where gRPC listens.
    pub fn grpc(&self) -> Option<SocketAddr> {
        self.grpc
    }

    /// Where metrics are served.
    pub fn metrics(&self) -> Option<SocketAddr> {
        self.metrics
    }

    /// The local socket.
    pub fn socket(&self) -> Option<&Path> {
        self.socket.as_ref().map(socket::Bound::path)
    }

    /// Tells clients by its health that they should go elsewhere, and serves those that still come for `listen.lame_duck`. It may be
    /// stopped at any time.
    pub async fn lame_duck(&self) {
        self.state.start_leaving();
        let most = self.state.decided.lame_duck;
        if !most.is_zero() && !self.state.is_draining() {
            tracing::info!(
                "calls are accepted for {} s more; the health check returns NOT_SERVING",
                most.as_secs()
            );
            let _ = tokio::time::timeout(most, self.state.drain_asked()).await;
        }
    }

    /// Stops cleanly: drains, writes a checkpoint, lets go of the directories.
    pub async fn stop(self) -> Result<(), String> {
        let Self {
            state,
            home,
            mut serving,
            metrics_tasks,
            scrub_task,
            places_task,
            sessions_task,
            socket,
            ..
        } = self;
        state.start_drain();
        places_task.abort();
        sessions_task.abort();
        if let Some(task) = scrub_task {
            task.abort();
        }
        let ended = tokio::time::timeout(DRAIN_TIMEOUT, async {
            state.idle().await;
            // Connections without a call close at once.
            let _ = tokio::time::timeout(Duration::from_secs(2), ended(&mut serving)).await;
        });
        // ends: `DRAIN_TIMEOUT`, of which it is made
        if ended.await.is_err() {
            tracing::warn!(calls = state.calls(), "shutdown timeout: the remaining calls are cancelled");
        }
        serving.abort();
        if let Some(cold) = &state.decided.cold {
            cold.stop().await;
        }
        if let Some(node) = &state.decided.cluster {
            node.stop();
        }
        for task in metrics_tasks {
            task.abort();
        }
        if let Some(bound) = socket {
            bound.remove();
        }
        let directories = state.decided.directories.clone();
        drop(state);
        closing::closed(move || home.close(), &directories, closing::WITHIN).await
    }

    /// Returns when a client asked for a drain, or serving ended by itself; with why, if it failed.
    pub async fn drained(&mut self) -> Result<(), String> {
        // A task that has given its result must not be asked for it again.
        if !self.over {
            tokio::select! {
                () = self.state.leave_asked() => return Ok(()),
                // ends: a drain in the arm before it, or a signal, which drops this
                served = &mut self.serving => {
                    self.over = true;
                    self.fault = match served {
                        Ok(Ok(())) => None,
                        Ok(Err(error)) => Some(format!("serving failed: {error}")),
                        Err(error) => Some(format!("serving failed: {error}")),
                    };
                }
            }
        }
        self.fault.clone().map_or(Ok(()), Err)
    }
}

/// Which of these directories hold a store.
fn stores(directories: &[PathBuf]) -> Vec<bool> {
    directories.iter().map(|directory| directory.join(SUPERBLOCK).exists()).collect()
}

/// What a start that was refused has left, as the end of its line: nothing where stores were there before.
fn left(directories: &[PathBuf], had: &[bool]) -> String {
    let shown = |wanted: (bool, bool)| {
        let states = directories.iter().zip(had.iter().copied().zip(stores(directories)));
        let those = states.filter(|(_, state)| *state == wanted).map(|(path, _)| path.display().to_string());
        those.collect::<Vec<_>>().join(", ")
    };
    match (shown((false, true)), shown((false, false))) {
        (made, _) if !made.is_empty() => format!("; a store was created in {made}, and remains there"),
        (_, unmade) if !unmade.is_empty() => format!("; no store was created in {unmade}"),
        _ => String::new(),
    }
}

/// Where the server will serve, taken before a store is made: one that cannot be served is not to be left behind.
async fn ports(config: &Config) -> Result<Ports, String> {
    // Two servers of one configuration meet at a port first; what is wrong is that there are two.
    let first = |told| match home::refuse_taken(&config.directories) {
        Ok(()) => told,
        Err(taken) => taken.to_string(),
    };
    let ports = Ports::take(config).map_err(first)?;
    // Of a socket in the store's own directory opening the store says more: whose store it is.
    if let Some(path) = config.socket.as_deref().filter(|path| !checked::is_inside(path, config)) {
        socket::refuse_taken(path).await?;
    }
    Ok(ports)
}

/// Looks at all blocks again and again, if that is wanted.
fn start_scrub(config: &Config, state: &Arc<ServerState>) -> Option<JoinHandle<()>> {
    let pace = config.scrub_pace;
    config.scrub_every.map(|every| tokio::spawn(scrubs::keep(Arc::clone(state), every, pace)))
}

/// Tells what the server does at the metrics address, and remembers it for the status page.
fn serve_metrics(listener: TcpListener, is_open: bool, state: &Arc<ServerState>) -> Vec<JoinHandle<()>> {
    vec![
        tokio::spawn(metrics::http::serve(listener, is_open, Arc::clone(state))),
        tokio::spawn(metrics::history::keep(Arc::clone(state))),
    ]
}

/// Returns when a task has ended. A task that has given its result must not be polled again: the code that waits for a drain
/// may have seen serving end before stopping does.
async fn ended<T>(task: &mut JoinHandle<T>) {
    if !task.is_finished() {
        // ends: two seconds, by its only caller
        let _ = task.await;
    }
}

/// Limits without a count of their use.
fn uncounted(config: &Config) -> Vec<SetLimit> {
    let set = |name, most, bytes| SetLimit { name, most, bytes };
    vec![
        set("limits.threads", Some(config.threads as u64), false),
        set("store.endurance", config.endurance, true),
        set("scrub.pace", Some(config.scrub_pace), true),
    ]
}

#[cfg(test)]
mod tests;
