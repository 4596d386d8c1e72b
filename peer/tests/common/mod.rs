//! Nodes with stores of their own in temporary directories, on this machine's loopback.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::disallowed_methods,
    reason = "shared by several tests; real files and threads"
)]

pub mod certificates;
pub mod strangers;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvarts_cluster::members::{Member, Members, NodeId};
use kvarts_contract::api::{BlockOutcome, DeleteRequest, KvStore, Parent, Placed, PutRequest, Target};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::BufMut;
use kvarts_layout::identity::Arrangement;
use kvarts_layout::spec::{Kind, PartGeometry, Role};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId};
use kvarts_peer::credentials::Credentials;
use kvarts_peer::lane::ServeLimits;
use kvarts_peer::node::{ClusterNode, InMemory, NodeOptions, OFFER_EVERY, Patience, PutPolicy, Secret};
use kvarts_store::engine::{Options, Store};
use kvarts_store::home::{Home, HomeOptions};
use tokio::net::TcpListener;

/// A directory that goes with its owner.
pub struct TempDir(PathBuf);

impl TempDir {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvarts-peer-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A store, and a model of it.
pub struct Stage {
    pub home: Option<Home>,
    pub namespace: NamespaceId,
    pub shape: BlockShape,
    directory: TempDir,
    budget: u64,
}

pub const GROUP: Group = Group(0);

pub fn model() -> (Identity, Geometry) {
    let part = PartGeometry {
        kind: Kind::new("k").unwrap(),
        role: Role::Stream { bytes: 64, tokens: 1 },
        heads: 0,
        align: 1,
        group: GROUP,
    };
    let geometry = Geometry::new(&[part], &vec![vec![0]; 4]).unwrap();
    let arrangement = Arrangement::new("test", "canonical", "1");
    let identity = Identity::new("model", "revision", "bf16", arrangement, &geometry, 64);
    (identity, geometry)
}

impl Stage {
    pub fn new(name: &str) -> Self {
        Self::with_budget(name, 256 << 20)
    }

    /// A store that may allocate this much.
    pub fn with_budget(name: &str, budget: u64) -> Self {
        let directory = TempDir::new(name);
        let mut stage = Self {
            home: None,
            namespace: NamespaceId([0; 32]),
            shape: BlockShape::opaque(1).unwrap(),
            directory,
            budget,
        };
        stage.open();
        stage
    }

    pub fn open(&mut self) {
        let store = Options { budget_bytes: self.budget, segment_bytes: 4 << 20, ..Options::default() };
        let home = Home::open(&HomeOptions {
            directories: vec![self.directory.0.clone()],
            store,
            ..HomeOptions::default()
        });
        let home = home.unwrap();
        let (identity, geometry) = model();
        self.namespace = home.store().register(&identity, &geometry).unwrap();
        self.shape = geometry.shape(GROUP, Coordinate::default(), 64).unwrap();
        self.home = Some(home);
    }

    pub fn store(&self) -> &Store {
        self.home.as_ref().unwrap().store()
    }

    pub fn id(&self) -> NodeId {
        self.store().stats().store
    }

    /// Puts blocks whose bytes follow from their keys.
    pub fn put(&self, keys: &[BlockKey]) {
        self.put_for(keys, None);
    }

    /// The same, for so long at most.
    pub fn put_for(&self, keys: &[BlockKey], expires_after: Option<std::time::Duration>) {
        self.put_as(keys, expires_after, Parent::Unknown);
    }

    /// The same, one behind the other, the first behind `parent` or at the beginning.
    pub fn put_behind(&self, keys: &[BlockKey], parent: Option<BlockKey>) {
        self.put_as(keys, None, parent.map_or(Parent::Root, Parent::Key));
    }

    fn put_as(&self, keys: &[BlockKey], expires_after: Option<std::time::Duration>, parent: Parent) {
        let bytes = self.shape.block_bytes() as usize;
        let mut memory = BufMut::zeroed(bytes * keys.len()).unwrap();
        for (place, key) in keys.iter().enumerate() {
            let block = content(key, bytes);
            memory.copy_in(place * bytes, &block);
        }
        let from = Placed::blocks(&self.shape, memory, keys.len() as u32).unwrap();
        let put = PutRequest {
            expires_after,
            parent,
            ..PutRequest::new(self.namespace, GROUP, Coordinate::default(), keys.to_vec(), from)
        };
        let reply = block_on(self.store().put(put)).unwrap().unwrap();
        assert!(
            reply.outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored),
            "{:?}",
            reply.outcomes
        );
    }

    pub fn delete(&self, keys: &[BlockKey]) {
        let target = Target::Keys { column: None, keys: keys.to_vec() };
        let request = DeleteRequest { namespace: self.namespace, target, deadline: None };
        block_on(self.store().delete(request)).unwrap().unwrap();
    }
}

pub fn content(key: &BlockKey, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    blake3::Hasher::new().update(key.as_bytes()).finalize_xof().fill(&mut out);
    out
}

pub fn key(n: u32) -> BlockKey {
    BlockKey(*blake3::hash(&n.to_le_bytes()).as_bytes())
}

/// Starts a node for each store, all members of one cluster.
pub async fn start(stages: &[&Stage]) -> Vec<Arc<ClusterNode>> {
    start_with(stages, |_| None).await
}

/// The same; each shows what `credentials` gives for its store.
pub async fn start_with(
    stages: &[&Stage],
    credentials: impl Fn(NodeId) -> Option<Arc<Credentials>>,
) -> Vec<Arc<ClusterNode>> {
    let mut listeners = Vec::new();
    for _ in stages {
        listeners.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
    }
    let members = members(1, stages, &listeners);
    let pairs = stages.iter().zip(listeners);
    pairs
        .map(|(stage, listener)| {
            let options = NodeOptions { credentials: credentials(stage.id()), ..patient(&members) };
            ClusterNode::start(stage.store().clone(), listener, options).unwrap()
        })
        .collect()
}

pub fn members(epoch: u64, stages: &[&Stage], listeners: &[TcpListener]) -> Members {
    let one = |(stage, listener): (&&Stage, &TcpListener)| Member {
        id: stage.id(),
        address: listener.local_addr().unwrap().to_string(),
        zone: String::new(),
    };
    Members::new(epoch, stages.iter().zip(listeners).map(one).collect()).unwrap()
}

/// For tests in which every node answers: on a busy machine the default times are too short.
pub fn patient(members: &Members) -> NodeOptions {
    let minute = Duration::from_secs(60);
    NodeOptions { patience: Patience { put: minute, read: minute }, ..options(members) }
}

pub fn options(members: &Members) -> NodeOptions {
    NodeOptions {
        credentials: None,
        cluster: "test".to_owned(),
        members: members.clone(),
        secret: Secret::new(b"a secret of tests"),
        entries_max: 1 << 20,
        chains_max: 1000,
        start: 1,
        deletes: Arc::new(InMemory::default()),
        serve: ServeLimits { memory: 32 << 20, ..ServeLimits::default() },
        put: PutPolicy::Store,
        patience: Patience::default(),
        has_tier: false,
        hot: None,
        lane_port: 0,
        offer_every: OFFER_EVERY,
    }
}
