//! Reads that take what other nodes have: which paths there are, and which of them lead to a block.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, MutexGuard, PoisonError};

use kvarts_cluster::dealer::PathSet;
use kvarts_cluster::members::NodeId;
use kvarts_cluster::partition::Tag;
use kvarts_cluster::paths::PathId;
use kvarts_contract::api::{Origins, ReadRequest, ReadStream, TiledRequest, read_channel};
use kvarts_contract::error::Error;
use kvarts_layout::{BlockShape, Geometry, Identity, NamespaceId};

use super::locate::Asked;
use super::{ClusterNode, Column};
use crate::lane::LaneClient;
use crate::path::Path;
use crate::read::{BUSY_FOR, Copies, MultiRead, MultiTiles, NodePaths, OWN, begin};

/// From this size on a read takes what other nodes have besides what is here.
const SHARED_BYTES: u64 = 16 << 20;

/// Nodes that are asked for a block whose holder is away: which nodes have it is not known then.
const ASKED_BLINDLY: usize = 8;

/// Models whose blocks other nodes may be asked for: the one that was used longest ago makes room for another.
const MODELS_MAX: usize = 2048;

/// A way to another node's blocks.
#[derive(Clone)]
pub(super) struct Lane {
    address: SocketAddr,
    pub(super) client: Arc<LaneClient>,
    pub(super) path: PathId,
}

/// Which ways there are, and whose blocks may be asked for.
#[derive(Default)]
pub(super) struct Lanes {
    pub(super) by_node: BTreeMap<NodeId, Lane>,
    /// Nodes that serve bytes and to which there is no way: there are as many paths as there may be.
    pub(super) waiting: BTreeMap<NodeId, SocketAddr>,
    models: BTreeMap<NamespaceId, Model>,
    /// Grows with each use of a model.
    uses: u64,
}

struct Model {
    identity: Identity,
    geometry: Geometry,
    /// When it was used last.
    used: u64,
}

impl Lanes {
    pub(super) fn models(&self) -> usize {
        self.models.len()
    }

    /// Whether the identity of a model was shown to this node.
    pub(super) fn knows(&self, namespace: NamespaceId) -> bool {
        self.models.contains_key(&namespace)
    }

    /// A model is used; false if it is not known.
    fn touch(&mut self, namespace: NamespaceId) -> bool {
        self.uses += 1;
        let model = self.models.get_mut(&namespace);
        model.map(|model| model.used = self.uses).is_some()
    }

    /// One model more than there may be: the one that was used longest ago goes.
    fn make_room(&mut self) {
        if self.models.len() < MODELS_MAX {
            return;
        }
        let Some((&oldest, _)) = self.models.iter().min_by_key(|(_, model)| model.used) else { return };
        self.models.remove(&oldest);
        self.by_node.values().for_each(|lane| lane.client.forget(oldest));
    }
}

impl fmt::Debug for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lanes({} nodes, {} models)", self.by_node.len(), self.models.len())
    }
}

impl ClusterNode {
    pub(super) fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks of this model may be asked of other nodes from now on: they are shown its whole identity, without which none is
    /// given.
    pub fn know(&self, identity: &Identity, geometry: &Geometry, namespace: NamespaceId) {
        let mut lanes = self.lanes();
        if lanes.touch(namespace) {
            return;
        }
        lanes.make_room();
        for lane in lanes.by_node.values() {
            // A node that takes no more models is one that has none of its blocks.
            let _ = lane.client.open(identity, geometry);
        }
        let (identity, geometry, used) = (identity.clone(), geometry.clone(), lanes.uses);
        lanes.models.insert(namespace, Model { identity, geometry, used });
    }

    /// A node serves bytes at this address. Where there are as many paths as there may be, its blocks cannot be read until
    /// another one is gone.
    pub(super) fn open_lane(&self, node: NodeId, address: SocketAddr) -> Result<(), String> {
        let mut lanes = self.lanes();
        if lanes.by_node.get(&node).is_some_and(|lane| lane.address == address) {
            return Ok(());
        }
        if let Some(old) = lanes.by_node.remove(&node) {
            self.paths.remove(old.path);
        }
        lanes.waiting.insert(node, address);
        self.open_waiting(&mut lanes)
    }

    /// Makes ways to nodes that wait for one, as long as there is room.
    fn open_waiting(&self, lanes: &mut Lanes) -> Result<(), String> {
        while self.paths.has_room()
            && let Some((node, address)) = lanes.waiting.pop_first()
        {
            let client = LaneClient::connect(address, node, self.lane_member.clone());
            let client = client.map_err(|error| format!("{address}: {error}"))?;
            for Model { identity, geometry, .. } in lanes.models.values() {
                let _ = client.open(identity, geometry);
            }
            let Some(path) = self.paths.add(&node.to_string(), Arc::clone(&client) as _) else {
                lanes.waiting.insert(node, address);
                return Ok(());
            };
            lanes.by_node.insert(node, Lane { address, client, path });
        }
        Ok(())
    }

    /// A node is no member any more.
    pub(super) fn close_lane(&self, node: NodeId) {
        let mut lanes = self.lanes();
        lanes.waiting.remove(&node);
        if let Some(lane) = lanes.by_node.remove(&node) {
            self.paths.remove(lane.path);
        }
    }

    /// Whether a read that begins now can have blocks of a model from a node that is said to have them: there is a way to it, which
    /// leads there or has for as short a time not as a read waits, its blocks may be asked for, and it has been told of all deletes.
    pub(super) fn can_read(&self, lanes: &Lanes, node: &NodeId, namespace: &NamespaceId) -> bool {
        let now = self.footing.runner.now();
        let leads_there =
            |lane: &Lane| lane.client.away_since().is_none_or(|since| now.since(since) < BUSY_FOR);
        lanes.by_node.get(node).is_some_and(leads_there)
            && lanes.knows(*namespace)
            && !self.deletes.lacks_of(node, namespace)
    }

    /// The paths of this node's reads.
    pub fn paths(&self) -> &Arc<NodePaths> {
        &self.paths
    }

    /// Where the blocks of a read are, if other nodes have some of them: nothing where this node has all of them and the read
    /// is small; then no other node is asked.
    pub async fn copies_of(&self, request: &TiledRequest, shape: &BlockShape) -> Option<Arc<Copies>> {
        let TiledRequest { namespace, group, coordinate, ref keys, .. } = *request;
        let column = Column { namespace, group, coordinate, keys };
        let own = self.needs_others(&column, shape.layers_bytes(&request.layers))?;
        self.copies(&column, &own).await
    }

    /// Where the tiles of a read come from whose blocks are there.
    pub fn tiles_of(&self, request: TiledRequest, shape: Arc<BlockShape>, copies: Arc<Copies>) -> MultiTiles {
        let origins = Origins::any(request.keys.len());
        MultiTiles::new(request, shape, (origins, copies), &self.paths, &self.footing.runner)
    }

    /// Reads as [`KvStore::read`](kvarts_contract::api::KvStore::read) does, and takes what other nodes have.
    pub fn read(
        self: &Arc<Self>,
        request: ReadRequest,
        shape: &BlockShape,
        origins: &Arc<Origins>,
    ) -> Result<ReadStream, Error> {
        let ReadRequest { namespace, group, coordinate, ref keys, .. } = request;
        let column = Column { namespace, group, coordinate, keys };
        let layers = request.layers.clone().unwrap_or(0..shape.layers().len() as u32);
        let Some(own) = self.needs_others(&column, shape.layers_bytes(&layers)) else {
            return self.store.read_part(request, origins, 0);
        };
        let copies = Copies::of(vec![PathSet::default().with(OWN); own.len()]);
        let (shape, origins) = (Arc::new(shape.clone()), Arc::clone(origins));
        let (request, into) = request.tiled(&shape);
        let what = MultiRead { request, into, shape, origins, copies, first: 0, is_alone: true };
        what.check(self.footing.runner.now())?;
        let ((sink, stream), node) = (read_channel(), Arc::clone(self));
        self.footing.runner.spawn(Box::pin(async move {
            let column = Column { namespace, group, coordinate, keys: &what.request.keys };
            let elsewhere = node.copies(&column, &own).await;
            let copies = elsewhere.unwrap_or_else(|| Arc::clone(&what.copies));
            begin(MultiRead { copies, ..what }, &node.paths, &node.footing.runner, sink);
        }));
        Ok(stream)
    }

    /// Whether a read of these blocks is to ask other nodes; then which of the blocks are here.
    fn needs_others(&self, column: &Column<'_>, block_bytes: u64) -> Option<Vec<bool>> {
        {
            let mut lanes = self.lanes();
            lanes.touch(column.namespace);
            // A path may have become free since; a node to which no way can be made is tried again by the next read.
            let _ = self.open_waiting(&mut lanes);
            if lanes.by_node.is_empty() {
                return None;
            }
        }
        self.note_use(column, None);
        let own = self.own_blocks(column);
        if self.counts_own_reads() {
            self.note_read(column, column.keys.iter().zip(own.iter().copied()).filter(|(_, here)| *here));
        }
        let is_large = block_bytes.saturating_mul(column.keys.len() as u64) >= SHARED_BYTES;
        (is_large || own.contains(&false)).then_some(own)
    }

    /// Which paths lead to these blocks; nothing if all of those that are anywhere are here alone. `own` says which are here:
    /// they are asked for here first.
    async fn copies(&self, column: &Column<'_>, own: &[bool]) -> Option<Arc<Copies>> {
        let tags: Vec<Tag> = column.keys.iter().map(|key| column.tag(key)).collect();
        let Asked { located, silent, .. } = self.ask_holders(&tags, false, self.options.patience.read).await;
        let unsaid = silent.iter().flat_map(|(_, places)| places);
        let unsaid: Vec<usize> = unsaid.copied().filter(|place| own.get(*place) == Some(&false)).collect();
        // What no node is said to have may be here by now; if not, it is known at once that it is nowhere.
        let nowhere = own.iter().zip(&located.copies).any(|(here, nodes)| !here && nodes.is_empty());
        let own_now = if nowhere { self.own_blocks(column) } else { own.to_vec() };
        let mut elsewhere = false;
        // What others were not told of yet may be deleted.
        let is_told = |node: &&NodeId| !self.deletes.lacks_of(node, &column.namespace);
        let lanes = self.lanes();
        let paths = own_now.iter().zip(&located.copies).map(|(here, nodes)| {
            let others = nodes.iter().filter(is_told).filter_map(|node| lanes.by_node.get(node));
            let others = others.fold(PathSet::default(), |paths, lane| paths.with(lane.path));
            elsewhere |= !others.is_empty();
            if *here { others.with(OWN) } else { others }
        });
        let mut paths: Vec<PathSet> = paths.collect();
        // Whose holder did not say may be anywhere, whether the holder is late or dies in this moment: a node that does not have it says so at
        // the price of one message.
        let anywhere = lanes.by_node.iter().filter(|(node, _)| is_told(node)).map(|(_, lane)| lane);
        let anywhere = anywhere.filter(|lane| lane.client.counts().connected).take(ASKED_BLINDLY);
        let anywhere = anywhere.fold(PathSet::default(), |paths, lane| paths.with(lane.path));
        for place in unsaid {
            if let Some(of) = paths.get_mut(place) {
                *of = of.or(anywhere);
                elsewhere |= !anywhere.is_empty();
            }
        }
        drop(lanes);
        if elsewhere {
            let gone = own_now.iter().zip(&located.copies).map(|(here, nodes)| !here && !nodes.is_empty());
            let gone = column.keys.iter().zip(gone).filter(|(_, gone)| *gone);
            self.note_read(column, gone.map(|(key, _)| (key, false)));
        }
        elsewhere.then(|| Copies::of(paths))
    }
}
