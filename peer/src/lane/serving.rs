//! What all connections of the side that serves share, and the place of each among them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvarts_contract::buffers::Arena;
use kvarts_contract::error::Reason;
use kvarts_layout::{BlockShape, Coordinate, Group, NamespaceId, StoreId};
use kvarts_store::engine::Store;

use super::bell::Bell;
use super::hello::Member;
use super::rate::Rate;
use super::wire::Wire;
use crate::path::Path;

/// Where blocks for peers come from.
pub trait Served: Path {
    /// The bytes of a block of a column, or why there is none: [`Reason::UnknownNamespace`] where the namespace is not here.
    fn shape(&self, namespace: NamespaceId, group: Group, at: Coordinate) -> Result<Arc<BlockShape>, Reason>;
}

impl Served for Store {
    fn shape(&self, namespace: NamespaceId, group: Group, at: Coordinate) -> Result<Arc<BlockShape>, Reason> {
        Self::shape(self, namespace, group, at).map_err(|error| error.0)
    }
}

/// How much a node does for others.
#[derive(Clone, Copy, Debug)]
pub struct ServeLimits {
    /// Connections of peers at a time. Beside them there are 64 that have not shown whose they are.
    pub connections: usize,
    /// Bytes of memory that pieces for all peers have together, from the disk until the connection has them.
    pub memory: usize,
    /// Bytes of it that one connection may have.
    pub connection_memory: u64,
    /// Bytes a second, over all connections; none: as many as there are.
    pub bytes_per_second: Option<u64>,
}

impl Default for ServeLimits {
    fn default() -> Self {
        let (memory, connection_memory) = (256 << 20, 64 << 20);
        Self { connections: 256, memory, connection_memory, bytes_per_second: None }
    }
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) let_in: AtomicU64,
    pub(super) cut: AtomicU64,
    pub(super) pieces: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) doubts: AtomicU64,
}

/// Connections that have not shown whose they are: where there are as many, the next one takes the place of the oldest of them.
pub(super) const UNPROVEN_MAX: usize = 64;

/// The connections that there are.
#[derive(Debug, Default)]
pub(super) struct Registry {
    pub(super) wires: BTreeMap<u64, Arc<dyn Wire>>,
    /// Those of them that have not shown whose they are, the oldest first.
    unproven: BTreeSet<u64>,
    /// Whose those are that have. One that had to go is among neither, until its thread has ended.
    nodes: BTreeMap<u64, StoreId>,
    /// Who is served; all who know the secret where none are named.
    members: Option<BTreeSet<StoreId>>,
    pub(super) next: u64,
    pub(super) stopping: bool,
}

impl Registry {
    /// A place for one that has not shown whose it is, and the one that loses its place for that.
    pub(super) fn enter(&mut self, wire: &Arc<dyn Wire>) -> (u64, Option<Arc<dyn Wire>>) {
        let is_full = self.unproven.len() >= UNPROVEN_MAX;
        let oldest = if is_full { self.unproven.pop_first() } else { None };
        let lost = oldest.and_then(|number| self.wires.get(&number).map(Arc::clone));
        self.next += 1;
        self.wires.insert(self.next, Arc::clone(wire));
        self.unproven.insert(self.next);
        (self.next, lost)
    }

    /// It has shown that it is this node's. Says why it is not served, if it is not: it may have had to go, too.
    fn admit(&mut self, number: u64, node: StoreId, most: usize) -> Result<(), &'static str> {
        let has_place = self.unproven.remove(&number);
        if self.members.as_ref().is_some_and(|members| !members.contains(&node)) {
            return Err("the other node is not a member of the cluster");
        }
        if !has_place || self.nodes.len() >= most {
            return Err("the limit of connected peers is reached");
        }
        self.nodes.insert(number, node);
        Ok(())
    }

    pub(super) fn leave(&mut self, number: u64) {
        self.wires.remove(&number);
        self.unproven.remove(&number);
        self.nodes.remove(&number);
    }
}

/// What all connections share.
pub(super) struct Serving {
    pub(super) served: Arc<dyn Served>,
    pub(super) member: Member,
    pub(super) limits: ServeLimits,
    pub(super) arena: Arena,
    pub(super) rate: Rate,
    pub(super) counters: Counters,
    pub(super) registry: Mutex<Registry>,
    /// A connection has ended, or it is time to stop.
    pub(super) changed: Arc<Bell>,
}

impl Serving {
    pub(super) fn lock(&self) -> MutexGuard<'_, Registry> {
        // Every change is one step.
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.lock().stopping
    }

    /// From now on no others are served.
    pub(super) fn serve_only(&self, members: BTreeSet<StoreId>) {
        let mut registry = self.lock();
        let gone = registry.nodes.iter().filter(|(_, node)| !members.contains(*node));
        gone.filter_map(|(number, _)| registry.wires.get(number)).for_each(|wire| wire.close());
        registry.members = Some(members);
    }

    /// A connection is that of this node. Says why it is not served, if it is not.
    pub(super) fn admit(&self, number: u64, node: StoreId) -> Result<(), &'static str> {
        self.lock().admit(number, node, self.limits.connections)
    }
}

/// A place among the connections, given back when the connection has ended.
pub(super) struct Place {
    pub(super) serving: Arc<Serving>,
    pub(super) wire: Arc<dyn Wire>,
    pub(super) number: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.wire.close();
        self.serving.lock().leave(self.number);
        self.serving.changed.ring();
    }
}
