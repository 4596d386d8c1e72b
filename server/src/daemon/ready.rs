//! What a server needs beside its store before it serves: memory, listeners, other nodes, the bucket. Each of them may be refused.

use std::net::SocketAddr;
use std::sync::Arc;

use kvarts_contract::clock::Entropy;
use kvarts_contract::clock::OsEntropy;
use kvarts_peer::node::ClusterNode;
use kvarts_peer::read::NodePaths;
use kvarts_store::engine::Store;
use kvarts_store::home::Stop;
use rustix::fs::Gid;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::oneshot;

use super::ports::{self, Port, Ports};
use super::{DESCRIPTORS_KEPT, cluster, socket};
use crate::cold::ColdTier;
use crate::config::Config;
use crate::human;
use crate::state::Memory;
use kvarts_wire::limits;
use kvarts_wire::local::limits::MEMORY_FILES_MAX;

/// A listener with its address, if there is to be one.
type Listening = (Option<TcpListener>, Option<SocketAddr>);

/// All of it.
pub(super) struct Ready {
    pub(super) memory: Memory,
    pub(super) grpc: Listening,
    pub(super) metrics: Listening,
    pub(super) unix: Option<(UnixListener, socket::Bound)>,
    /// How many connections there may be.
    pub(super) connections: usize,
    /// How many files of local clients' memories.
    pub(super) memories: u64,
    pub(super) cluster: Option<Arc<ClusterNode>>,
    pub(super) cold: Option<Arc<ColdTier>>,
}

impl Ready {
    /// Has all of it, or says in one line what is wrong and leaves no socket.
    pub(super) async fn make(
        config: &Config,
        (store, stop): (&Store, &Stop),
        (ports, group): (Ports, Option<Gid>),
        named: Option<cluster::Named>,
        notes: &mut Vec<String>,
    ) -> Result<Self, String> {
        let memory = memory(config, store, notes).await?;
        // Before the first put. What the tenants have already counts from the start.
        for tenant in config.gate.tenants() {
            store.set_tenant_quota(&tenant.salt, tenant.limits.disk);
        }
        let grpc = ports::listen(ports.grpc)?;
        let metrics = ports::listen(ports.metrics)?;
        let unix = match config.socket.as_deref() {
            Some(path) => Some(socket::listen(path, group).await?),
            None => None,
        };
        if config.gate.is_open() {
            notes.push("no tokens are configured: every client has all rights".to_owned());
        }
        let (connections, memories) = connections(config, store, notes);
        match tiers(config, (store, stop), ports.nodes, named, notes).await {
            Ok((cluster, cold)) => {
                Ok(Self { memory, grpc, metrics, unix, connections, memories, cluster, cold })
            }
            Err(why) => {
                if let Some((listener, bound)) = unix {
                    drop(listener);
                    bound.remove();
                }
                Err(why)
            }
        }
    }
}

/// The memory of requests.
async fn memory(config: &Config, store: &Store, notes: &mut Vec<String>) -> Result<Memory, String> {
    let bytes = usize::try_from(config.memory)
        .map_err(|_| "limits.memory: the value is too large for this machine".to_owned())?;
    let memory = Memory::new(bytes, limits::SMALL_READ_BYTES, config.cache).map_err(|error| {
        format!(
            "limits.memory: the {} of memory could not be allocated: {error}",
            human::bytes(config.memory)
        )
    })?;
    for region in memory.regions() {
        // ends: an executor answers from memory, or the store is closed
        if let Err(why) = store.register_memory(region).await {
            notes.push(format!(
                "the memory of requests is not registered with the kernel, so reads are \
                slower: {why}"
            ));
            break;
        }
    }
    Ok(memory)
}

type Tiers = (Option<Arc<ClusterNode>>, Option<Arc<ColdTier>>);

/// The other nodes, and the bucket.
async fn tiers(
    config: &Config,
    (store, stop): (&Store, &Stop),
    port: Option<Port>,
    named: Option<cluster::Named>,
    notes: &mut Vec<String>,
) -> Result<Tiers, String> {
    let has_tier = config.cold.is_some();
    let cluster = match config.cluster.as_ref().zip(named) {
        Some((cluster, named)) => {
            let of = (cluster, &config.gate, port, has_tier);
            Some(unless_told(stop, cluster::start(of, named, &config.directories, store, notes)).await?)
        }
        None => None,
    };
    let paths = cluster.as_ref().map(|node| Arc::clone(node.paths()));
    match unless_told(stop, cold(config, store, paths, notes)).await {
        Ok(cold) => {
            if let (Some(node), Some(cold)) = (&cluster, &cold) {
                node.set_beside(Arc::clone(cold) as _);
            }
            Ok((cluster, cold))
        }
        Err(why) => {
            cluster.iter().for_each(|node| node.stop());
            Err(why)
        }
    }
}

/// The result of a part of the start, or an error once `stop` is set.
async fn unless_told<T>(stop: &Stop, part: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    let (tell, told) = oneshot::channel();
    stop.on_told(move || {
        // The part has ended.
        let _ = tell.send(());
    });
    tokio::select! {
        biased;
        // ends: with the part of the start in the other arm, or at a stop
        Ok(()) = told => Err("the start was interrupted".to_owned()),
        // ends: its own limits: `JOIN` to be a member of a cluster, those of the bucket
        made = part => made,
    }
}

/// The cold tier, if there is to be one.
async fn cold(
    config: &Config,
    store: &Store,
    paths: Option<Arc<NodePaths>>,
    notes: &mut Vec<String>,
) -> Result<Option<Arc<ColdTier>>, String> {
    let Some(config) = &config.cold else { return Ok(None) };
    let mut seed = [0; 8];
    OsEntropy::new().fill(&mut seed);
    Ok(Some(ColdTier::start(config, store, paths, u64::from_le_bytes(seed), notes).await?))
}

/// How many connections there may be, and files of local clients' memories: as many as were asked for, if the process has
/// the descriptors. A full store's segment files come first, but leave connections half of them; then the store makes do
/// with fewer files.
fn connections(config: &Config, store: &Store, notes: &mut Vec<String>) -> (usize, u64) {
    let Some(all) = rustix::process::getrlimit(rustix::process::Resource::Nofile).current else {
        return (config.connections, MEMORY_FILES_MAX);
    };
    let (most, files, memories) = shared_out(all, store.files_max(), config.connections as u64);
    store.set_files_cap(files);
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    if most < config.connections {
        notes.push(format!(
            "connections: the limit is {most} instead of {}: raise the limit on open files (ulimit -n)",
            config.connections
        ));
    }
    (most, memories)
}

/// Divides the descriptors: for connections, for segment files, and for memories of local clients.
pub(super) fn shared_out(all: u64, files: u64, connections: u64) -> (u64, u64, u64) {
    let memories = MEMORY_FILES_MAX.min(all / 8);
    let free = all.saturating_sub(DESCRIPTORS_KEPT).saturating_sub(memories);
    let most = connections.min(free.saturating_sub(files).max(free / 2).max(16));
    (most, free.saturating_sub(most).max(16), memories)
}
