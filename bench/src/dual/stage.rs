//! Nodes and their blocks: two that serve, and the one that reads.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvarts_cluster::members::{Member, Members};
use kvarts_contract::api::{KvStore, Origins, Placed, PutRequest, ReadEnd, ReadEvent, ReadRequest};
use kvarts_contract::buffers::{BufMut, SharedBuf};
use kvarts_layout::identity::Arrangement;
use kvarts_layout::spec::shipped;
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId, OriginId};
use kvarts_peer::lane::ServeLimits;
use kvarts_peer::node::{
    ClusterNode, Column, InMemory, NodeOptions, OFFER_EVERY, Patience, PutPolicy, Secret,
};
use kvarts_store::engine::{Options, Store};
use kvarts_store::home::Home;
use kvarts_terminal::Failure;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use super::limits::Limits;
use super::{Bench, PATIENCE, PAUSE};
use crate::pairs::{Sample, cpu_seconds};
use crate::setup;

/// The name of the cluster, and what all nodes know.
pub(super) const CLUSTER: &str = "bench";
pub(super) const SECRET: &[u8] = b"the secret of the benchmark's own cluster";
/// Tokens of a block.
pub(super) const BLOCK_TOKENS: u32 = 64;
/// Blocks of one put.
const PUT_BLOCKS: usize = 4;
/// MiB of a segment.
pub(super) const SEGMENT_MIB: u64 = 64;

/// The model whose blocks are read.
#[derive(Clone)]
pub(super) struct Model {
    pub(super) identity: Identity,
    pub(super) geometry: Geometry,
    pub(super) namespace: NamespaceId,
    pub(super) group: Group,
    pub(super) coordinate: Coordinate,
    pub(super) shape: Arc<BlockShape>,
}

impl Model {
    pub(super) fn new() -> Result<Self, Failure> {
        let spec = shipped::load("llama-3.1-8b")
            .ok_or_else(|| Failure::user("this program has no spec of the model llama-3.1-8b"))?;
        let geometry = spec.geometry().clone();
        let arrangement = Arrangement::new("bench", "canonical", "1");
        let identity = Identity::new("dual", "bench", "bf16", arrangement, &geometry, BLOCK_TOKENS);
        let namespace = identity.namespace_id().map_err(Failure::user)?;
        let group = geometry.groups().first().ok_or_else(|| Failure::user("the model has no state"))?.group;
        let coordinate = geometry.coordinate(group, 1, 0).map_err(Failure::user)?;
        let shape = geometry.shape(group, coordinate, BLOCK_TOKENS).map_err(Failure::user)?;
        Ok(Self { identity, geometry, namespace, group, coordinate, shape: Arc::new(shape) })
    }

    /// Puts blocks into a store, of the same production in each one.
    pub(super) fn put(&self, runtime: &Runtime, store: &Store, keys: &[BlockKey]) -> Result<(), Failure> {
        store.register(&self.identity, &self.geometry).map_err(Failure::user)?;
        for some in keys.chunks(PUT_BLOCKS) {
            let bytes = self.shape.block_bytes() as usize * some.len();
            let mut memory = BufMut::zeroed(bytes).map_err(Failure::user)?;
            memory.fill(0x5a);
            let from = Placed::blocks(&self.shape, memory, some.len() as u32).map_err(Failure::user)?;
            let put = PutRequest::new(self.namespace, self.group, self.coordinate, some.to_vec(), from);
            let put = PutRequest { origins: Some(vec![OriginId([0x5a; 16]); some.len()]), ..put };
            setup::expect_stored(&runtime.block_on(store.put(put)))?;
        }
        Ok(())
    }
}

/// Keys of one chain.
pub(super) fn chain_keys(chain: u64, count: u64) -> Vec<BlockKey> {
    (0..count).map(|n| BlockKey(*blake3::hash(&(chain << 32 | n).to_le_bytes()).as_bytes())).collect()
}

/// Nodes of one cluster; the last is the one that reads.
pub(super) struct Trio {
    pub(super) homes: Vec<Home>,
    pub(super) nodes: Vec<Arc<ClusterNode>>,
    pub(super) model: Model,
}

impl Drop for Trio {
    fn drop(&mut self) {
        self.nodes.iter().for_each(|node| node.stop());
        // Their directories go next: until executors have ended, files of theirs take room on the disk.
        self.homes.drain(..).for_each(Home::abandon);
    }
}

impl Bench<'_> {
    /// Two nodes that serve so much a second, and the one that reads.
    pub(super) fn trio(&self, directory: &Path, rates: [u64; 2]) -> Result<Trio, Failure> {
        let [a, c] = rates.map(Some);
        self.nodes(directory, &[("a", a), ("c", c), ("b", None)])
    }

    /// Nodes of these names, each with what it serves to others a second; the last is the one that reads.
    pub(super) fn nodes(&self, directory: &Path, names: &[(&str, Option<u64>)]) -> Result<Trio, Failure> {
        let homes: Result<_, _> = names.iter().map(|(name, _)| self.home(&directory.join(name))).collect();
        let rates: Vec<Option<u64>> = names.iter().map(|(_, rate)| *rate).collect();
        self.join(homes?, &rates)
    }

    /// A store.
    pub(super) fn home(&self, directory: &Path) -> Result<Home, Failure> {
        let (budget_bytes, segment_bytes) = (self.budget_bytes(), SEGMENT_MIB << 20);
        let options = Options { budget_bytes, segment_bytes, ..Options::default() };
        setup::open(&self.arguments.common, directory, options)
    }

    /// What a store may have. None holds more than the blocks of two reads; nothing that is measured may be evicted.
    pub(super) fn budget_bytes(&self) -> u64 {
        (self.arguments.mib << 20) / 4 * 9 + (4 << 30)
    }

    /// Blocks of a read.
    pub(super) fn count(&self, trio: &Trio) -> u64 {
        self.blocks(&trio.model)
    }

    /// The same, of a model.
    pub(super) fn blocks(&self, model: &Model) -> u64 {
        ((self.arguments.mib << 20) / model.shape.block_bytes()).max(1)
    }

    /// Makes a cluster of these stores, each with what it serves to others a second.
    pub(super) fn join(&self, homes: Vec<Home>, rates: &[Option<u64>]) -> Result<Trio, Failure> {
        let (mut places, mut members) = (Vec::new(), Vec::new());
        for (number, home) in homes.iter().enumerate() {
            let (listener, address) = self.listen(number)?;
            members.push(Member { id: home.store().stats().store, address, zone: String::new() });
            places.push((number, listener));
        }
        self.start(homes, places, members, rates)
    }

    /// Where a node takes connections.
    pub(super) fn listen(&self, number: usize) -> Result<(TcpListener, String), Failure> {
        let bound = TcpListener::bind((Limits::address(number), 0));
        let listener = self.runtime.block_on(bound).map_err(Failure::user)?;
        let address = listener.local_addr().map_err(Failure::user)?.to_string();
        Ok((listener, address))
    }

    /// Starts the nodes of these stores, at their places among all members.
    pub(super) fn start(
        &self,
        homes: Vec<Home>,
        places: Vec<(usize, TcpListener)>,
        members: Vec<Member>,
        rates: &[Option<u64>],
    ) -> Result<Trio, Failure> {
        self.limits.limit(rates).map_err(Failure::User)?;
        let (model, members) = (Model::new()?, Members::new(1, members).map_err(Failure::user)?);
        let mut nodes = Vec::new();
        let _inside = self.runtime.enter();
        for (home, (number, listener)) in homes.iter().zip(places) {
            home.store().register(&model.identity, &model.geometry).map_err(Failure::user)?;
            let bytes_per_second = self.limits.served(rates.get(number).copied().flatten());
            let options = NodeOptions {
                credentials: None,
                cluster: CLUSTER.to_owned(),
                members: members.clone(),
                secret: Secret::new(SECRET),
                entries_max: 16 << 20,
                chains_max: 1,
                start: 1,
                deletes: Arc::new(InMemory::default()),
                serve: ServeLimits { bytes_per_second, ..ServeLimits::default() },
                put: PutPolicy::Store,
                patience: Patience::default(),
                has_tier: false,
                hot: None,
                lane_port: 0,
                offer_every: OFFER_EVERY,
            };
            let node = ClusterNode::start(home.store().clone(), listener, options);
            nodes.push(node.map_err(Failure::User)?);
        }
        nodes.iter().for_each(|node| node.know(&model.identity, &model.geometry, model.namespace));
        Ok(Trio { homes, nodes, model })
    }
}

impl Trio {
    /// Puts blocks into the store of a node.
    pub(super) fn put(&self, runtime: &Runtime, node: usize, keys: &[BlockKey]) -> Result<(), Failure> {
        self.model.put(runtime, self.homes[node].store(), keys)
    }

    /// The node that reads.
    pub(super) fn reader(&self) -> &Arc<ClusterNode> {
        &self.nodes[self.nodes.len() - 1]
    }

    /// Waits until the reader knows of `copies` copies of each block, and no less.
    pub(super) fn until_known(
        &self,
        runtime: &Runtime,
        keys: &[BlockKey],
        copies: usize,
    ) -> Result<(), Failure> {
        let Model { namespace, group, coordinate, .. } = self.model;
        let column = Column { namespace, group, coordinate, keys };
        let begun = Instant::now();
        let tags: Vec<_> = keys.iter().map(|key| column.tag(key)).collect();
        loop {
            let located = runtime.block_on(self.reader().locate(&tags, std::time::Duration::from_secs(1)));
            let fewer = located.copies.iter().filter(|nodes| nodes.len() < copies).count();
            if fewer == 0 {
                return Ok(());
            }
            if begun.elapsed() > PATIENCE {
                let (all, unasked) = (keys.len(), located.unasked.len());
                return Err(Failure::User(format!(
                    "after {} s the directory lists fewer than {copies} copies for {fewer} of {all} blocks; \
                    the look-ups of {unasked} blocks failed; {}",
                    PATIENCE.as_secs(),
                    self.stores()
                )));
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// What became of the stores, for a run that goes no further.
    fn stores(&self) -> String {
        let told = self.homes.iter().enumerate().map(|(number, home)| {
            let stats = home.store().stats();
            format!(
                "store {number} has {} blocks in {} of {} MiB and has evicted {} blocks",
                stats.index.blocks,
                stats.allocated_bytes >> 20,
                stats.budget_bytes >> 20,
                stats.counts.blocks_evicted
            )
        });
        told.collect::<Vec<_>>().join(", ")
    }

    /// One read of these blocks by layers.
    pub(super) fn read(&self, keys: &[BlockKey], memory: &SharedBuf) -> Result<Sample, Failure> {
        // What nodes may send at once after a pause is there for every contestant.
        std::thread::sleep(PAUSE);
        self.reads().read_with(keys, memory, |_| {})
    }

    /// What reads, for a thread of its own.
    pub(super) fn reads(&self) -> Reads {
        Reads { node: Arc::clone(self.reader()), model: self.model.clone() }
    }
}

/// Reads on one node.
pub(super) struct Reads {
    node: Arc<ClusterNode>,
    model: Model,
}

impl Reads {
    /// One read of which everything has to come; each layer is told as it comes.
    pub(super) fn read_with(
        &self,
        keys: &[BlockKey],
        memory: &SharedBuf,
        came: impl FnMut(u32),
    ) -> Result<Sample, Failure> {
        let (sample, end) = self.try_read(keys, memory, came)?;
        match end.usable_blocks as usize == keys.len() {
            true => Ok(sample),
            false => Err(Failure::User(format!("not all blocks were read: {end:?}"))),
        }
    }

    /// One read, and what became of it.
    pub(super) fn try_read(
        &self,
        keys: &[BlockKey],
        memory: &SharedBuf,
        mut came: impl FnMut(u32),
    ) -> Result<(Sample, ReadEnd), Failure> {
        let Model { namespace, group, coordinate, ref shape, .. } = self.model;
        let into = Placed::blocks(shape, memory.clone(), keys.len() as u32).map_err(Failure::user)?;
        let request = ReadRequest::new(namespace, group, coordinate, keys.to_vec(), into);
        let (begun, cpu) = (Instant::now(), cpu_seconds());
        let stream = self.node.read(request, shape, &Origins::any(keys.len())).map_err(Failure::user)?;
        let mut first = 0.0;
        let end = loop {
            match stream.next_blocking() {
                ReadEvent::Layer { layer, .. } => {
                    if layer == 0 {
                        first = begun.elapsed().as_secs_f64();
                    }
                    came(layer);
                }
                ReadEvent::End(end) => break end,
                _ => {}
            }
        };
        Ok((Sample { seconds: begun.elapsed().as_secs_f64(), cpu: cpu_seconds() - cpu, first }, end))
    }
}
