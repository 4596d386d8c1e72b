//! The memory of a server by its parts, each with its bound: what a configuration allows in all.

use kvarts_store::engine::Limits;
use kvarts_wire::limits::{LARGE_BYTES_MAX, MODELS_MEMORY_MAX};
use kvarts_wire::local::limits::{RECEIVING_BYTES_MAX, UNTAKEN_BYTES_MAX};

use super::Config;
use crate::cold::{index_memory, manifest_memory};
use crate::sizes;

/// A part of the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// What it is for.
    pub what: &'static str,
    /// The setting that changes it; none for a bound that is fixed, or follows from others.
    pub setting: Option<&'static str>,
    /// Bytes at most.
    pub bytes: u64,
}

/// What a connection takes without a call, and what it may have sent before one was let in.
const CONNECTION: u64 = 24 << 10;
/// What remembers blocks that were put before, and why blocks went.
const REMEMBERED: u64 = 5 << 20;
/// An entry of the directory of a cluster, about.
const ENTRY: u64 = 20;
/// What was deleted in a cluster, and memory into which own disks are read for reads over several paths.
const DELETES: u64 = 16 << 20;
const SEVERAL_PATHS: u64 = 256 << 20;
/// Packs on their way into the bucket: those that are not finished, and the one that is sent.
const PACKS: u64 = 96 << 20;

impl Config {
    /// The bounds of memory by part, each of which is reached only where everything of it is in use at once. Memory of local clients
    /// (`limits.shared`) is theirs, and bytes in the transport's windows are bounded for each connection: both are left out.
    pub fn memory_parts(&self) -> Vec<Part> {
        let part = |what, setting, bytes| Part { what, setting, bytes };
        let arena = Limits::default().arena_bytes.max(self.directories.len() << 20) as u64;
        let tenants = self.gate.tenants().len().max(1) as u64;
        let mut parts = vec![
            part("reads and puts under way", Some("limits.memory"), self.memory),
            part("staging memory of executors", Some("store.executors"), arena * self.executors as u64),
            part("large requests and their answers", None, LARGE_BYTES_MAX as u64),
            part("models of tenants", None, MODELS_MEMORY_MAX * tenants),
            part("connections", Some("limits.connections"), CONNECTION * self.connections as u64),
            part("records of why blocks were removed", None, REMEMBERED),
        ];
        if let Some(bytes) = self.index.or_else(sizes::index_bytes) {
            parts.insert(1, part("index of blocks", Some("limits.index"), bytes));
        }
        if self.socket.is_some() {
            let bytes = RECEIVING_BYTES_MAX + UNTAKEN_BYTES_MAX;
            parts.push(part("requests and answers of local clients", None, bytes));
        }
        if let Some(cluster) = &self.cluster {
            parts.push(part("directory of the cluster", Some("cluster.entries"), cluster.entries * ENTRY));
            parts.push(part("list of deletes in the cluster", None, DELETES));
            parts.push(part("reads over several paths", None, SEVERAL_PATHS));
        }
        if let Some(cold) = &self.cold {
            let known = (manifest_memory(cold.memory) + index_memory(cold.memory)) as u64;
            parts.push(part("restores from the bucket", Some("cold.memory"), cold.memory));
            parts.push(part("manifests and indexes of the bucket", Some("cold.memory"), known));
            parts.push(part("packs that are being uploaded to the bucket", None, PACKS));
        }
        parts
    }
}
