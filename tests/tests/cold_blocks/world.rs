//! An empty store with a cold tier over a bucket that faults and gates stand before.
#![allow(clippy::disallowed_methods, reason = "real stores on real directories, real time")]

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvarts_bucket::time::TokioTime;
use kvarts_cold::testing::{Faulty, MemoryBucket};
use kvarts_cold::time::BoxFuture;
use kvarts_cold::{
    Access, Bucket, Condition, Facts, Fault, Limits, Listed, Places, PushOptions, Pusher, Tag, Tier,
    TierOptions,
};
use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, KvStore, Order, Origins, Placed, Presence, PutRequest, ReadEnd,
    ReadRequest, ReadStream,
};
use kvarts_contract::buffers::{BufMut, SharedBuf};
use kvarts_layout::{BlockKey, BlockShape, NamespaceId};
use kvarts_peer::read::{Copies, NodePaths};
use kvarts_server::cold::{ColdConfig, ColdTier, Coming, Offer, Wish};
use kvarts_store::engine::{Options, Store};
use kvarts_store::home::{Home, HomeOptions};
use kvarts_tests::stage::Scratch;
use tokio::runtime::Runtime;
use tokio::sync::Notify;

use super::{GROUP, Model, WHOLE, content, key};

/// How long anything may take that is waited for.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A bucket that keeps ranges waiting, and counts those that are under way.
pub(crate) struct Gated {
    inner: Arc<dyn Bucket>,
    pub(crate) state: Mutex<Gate>,
    changed: Notify,
}

#[derive(Default)]
pub(crate) struct Gate {
    /// Ranges that may pass yet; none: all.
    pub(crate) passes: Option<u64>,
    pub(crate) now: u64,
    pub(crate) most: u64,
    pub(crate) bytes: u64,
}

impl Gated {
    fn new(inner: Arc<dyn Bucket>) -> Arc<Self> {
        Arc::new(Self { inner, state: Mutex::default(), changed: Notify::new() })
    }

    pub(crate) fn let_pass(&self, passes: Option<u64>) {
        self.state.lock().unwrap().passes = passes;
        self.changed.notify_waiters();
    }

    fn has_turn(&self) -> bool {
        let mut state = self.state.lock().unwrap();
        let Some(passes) = &mut state.passes else { return true };
        let has_turn = *passes > 0;
        *passes = passes.saturating_sub(1);
        has_turn
    }
}

/// One range that is under way.
struct UnderWay<'a>(&'a Gated);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.state.lock().unwrap().now -= 1;
    }
}

impl Bucket for Gated {
    fn get<'a>(&'a self, name: &'a str, most: u64) -> BoxFuture<'a, Result<(Bytes, Tag), Fault>> {
        self.inner.get(name, most)
    }

    fn get_range<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
        into: &'a Places,
    ) -> BoxFuture<'a, Result<u64, Fault>> {
        Box::pin(async move {
            {
                let mut state = self.state.lock().unwrap();
                state.now += 1;
                state.most = state.most.max(state.now);
                state.bytes += range.end - range.start;
            }
            let _under_way = UnderWay(self);
            loop {
                let changed = self.changed.notified();
                if self.has_turn() {
                    break;
                }
                changed.await;
            }
            self.inner.get_range(name, range, into).await
        })
    }

    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Facts, Fault>> {
        self.inner.head(name)
    }

    fn put<'a>(
        &'a self,
        name: &'a str,
        body: Vec<Bytes>,
        condition: Condition,
    ) -> BoxFuture<'a, Result<Tag, Fault>> {
        self.inner.put(name, body, condition)
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), Fault>> {
        self.inner.delete(name)
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        most: usize,
    ) -> BoxFuture<'a, Result<Vec<Listed>, Fault>> {
        self.inner.list(prefix, after, most)
    }
}

/// An empty store, and a bucket that has blocks of four layers.
pub(crate) struct World {
    pub(crate) runtime: Runtime,
    home: Option<Home>,
    scratch: Scratch,
    pub(crate) faulty: Arc<Faulty>,
    pub(crate) gate: Arc<Gated>,
    pub(crate) cold: Arc<ColdTier>,
    pub(crate) namespace: NamespaceId,
    pub(crate) shape: Arc<BlockShape>,
    pub(crate) keys: Vec<BlockKey>,
}

/// Makes the paths of a node over its store.
type Paths = Box<dyn FnOnce(&Store) -> Arc<NodePaths>>;

/// What of a world is not as usual.
pub(crate) struct Setting {
    /// The length of a layer.
    pub(crate) layer_bytes: u64,
    pub(crate) blocks: u64,
    pub(crate) segment_bytes: u64,
    /// The paths of the node, made over its store.
    pub(crate) paths: Option<Paths>,
    pub(crate) config: ColdConfig,
}

impl Default for Setting {
    fn default() -> Self {
        let config = ColdConfig {
            bucket: String::new(),
            requests: u64::MAX,
            written: u64::MAX,
            read: u64::MAX,
            refresh: Duration::from_secs(60),
            memory: 128 << 20,
            spill: false,
            uses: 0,
            age: Duration::ZERO,
            token_bytes: None,
            rate: 1 << 30,
            offer: Offer::Never,
        };
        Self { layer_bytes: 512 << 10, blocks: 6, segment_bytes: 16 << 20, paths: None, config }
    }
}

impl World {
    /// Blocks of layers of this length.
    pub(crate) fn new(name: &str, layer_bytes: u64, blocks: u64) -> Self {
        Self::with(name, Setting { layer_bytes, blocks, ..Setting::default() })
    }

    /// The bucket has all blocks, the store none.
    pub(crate) fn with(name: &str, setting: Setting) -> Self {
        let Setting { layer_bytes, blocks, segment_bytes, paths, config } = setting;
        let model = Model::new(layer_bytes);
        let runtime = Runtime::new().unwrap();
        let clock: Arc<dyn kvarts_cold::Time> = Arc::new(TokioTime::start());
        let objects = MemoryBucket::new(Arc::clone(&clock));
        let faulty = Faulty::new(objects as Arc<dyn Bucket>, Arc::clone(&clock), 7);
        let gate = Gated::new(Arc::clone(&faulty) as Arc<dyn Bucket>);
        let (run, payload) = model.run(0..blocks);
        let bucket = Arc::clone(&gate) as Arc<dyn Bucket>;
        let tier = Tier::new(Access::new(bucket, clock, Limits::default(), 1), TierOptions::default());
        runtime.block_on(async {
            let mut pusher = Pusher::new(&tier, PushOptions::default());
            pusher.add(&model.exported(), &run, &payload).await.unwrap();
            assert_eq!(pusher.finish().await.unwrap().blocks, blocks);
        });
        let scratch = Scratch::new(name);
        let store = Options { budget_bytes: 1 << 30, segment_bytes, ..Options::default() };
        let directories = vec![scratch.path().to_owned()];
        let home = Home::open(&HomeOptions { directories, store, ..HomeOptions::default() }).unwrap();
        home.store().register(&model.identity, &model.geometry).unwrap();
        let bucket = Arc::clone(&gate) as Arc<dyn Bucket>;
        let paths = paths.map(|paths| paths(home.store()));
        let cold =
            runtime.block_on(async { ColdTier::over(bucket, &config, home.store(), paths, 1) }).unwrap();
        let keys = (0..blocks).map(key).collect();
        let Model { namespace, shape, .. } = model;
        Self { runtime, home: Some(home), scratch, faulty, gate, cold, namespace, shape, keys }
    }

    pub(crate) fn store(&self) -> &Store {
        self.home.as_ref().unwrap().store()
    }

    pub(crate) fn begin(&self, keys: &[BlockKey], order: Order) -> (ReadStream, SharedBuf) {
        self.begin_where(keys, order, |_| false, None)
    }

    /// The same, where other nodes are said to have some of the blocks, and `known` where all of them are.
    pub(crate) fn begin_where(
        &self,
        keys: &[BlockKey],
        order: Order,
        is_elsewhere: impl Fn(&BlockKey) -> bool,
        known: Option<Arc<Copies>>,
    ) -> (ReadStream, SharedBuf) {
        let memory = BufMut::zeroed(self.shape.block_bytes() as usize * keys.len()).unwrap().share();
        let into = Placed::blocks(&self.shape, memory.clone(), keys.len() as u32).unwrap();
        let request = ReadRequest::new(self.namespace, GROUP, WHOLE, keys.to_vec(), into);
        let request = ReadRequest { order, ..request };
        let stream = self.runtime.block_on(async {
            let coming = self.bring(keys, order, is_elsewhere).await.unwrap_or_default();
            self.cold.read(request, &self.shape, Origins::any(keys.len()), known, &coming).unwrap()
        });
        (stream, memory)
    }

    pub(crate) async fn bring(
        &self,
        keys: &[BlockKey],
        order: Order,
        is_elsewhere: impl Fn(&BlockKey) -> bool,
    ) -> Option<Coming> {
        let wish = Wish {
            namespace: self.namespace,
            group: GROUP,
            coordinate: WHOLE,
            keys,
            block_bytes: self.shape.block_bytes(),
            by_layers: order == Order::Layers,
        };
        let elsewhere = async |keys: &[BlockKey]| keys.iter().map(is_elsewhere).collect();
        self.cold.bring(wish, PATIENCE, elsewhere).await
    }

    /// Reads; every block that came is what was put.
    pub(crate) fn read(&self, blocks: &[u64], order: Order) -> (BTreeSet<u64>, ReadEnd) {
        let keys: Vec<BlockKey> = blocks.iter().map(|block| key(*block)).collect();
        self.finish(blocks, order, self.begin(&keys, order))
    }

    /// What a read of these blocks brought; all of it is what was put.
    pub(crate) fn finish(
        &self,
        blocks: &[u64],
        order: Order,
        (stream, memory): (ReadStream, SharedBuf),
    ) -> (BTreeSet<u64>, ReadEnd) {
        let end = stream.wait_end().unwrap();
        let bytes = memory.to_vec();
        let mut good = BTreeSet::new();
        let each = self.shape.block_bytes() as usize;
        for (at, block) in (0u32..).zip(blocks) {
            let has_failed = end.failures.iter().any(|(failed, _)| *failed == at);
            let came = match order {
                Order::Layers => at < end.usable_blocks,
                Order::Blocks => !has_failed,
            };
            if came {
                let own = &bytes[at as usize * each..(at as usize + 1) * each];
                assert!(own == content(*block, each as u64), "a wrong byte of block {block}");
                good.insert(*block);
            }
        }
        (good, end)
    }

    /// Has another program push blocks into the bucket.
    pub(crate) fn push(&self, blocks: std::ops::Range<u64>) {
        let model = Model::new(self.shape.block_bytes() / 4);
        let (run, payload) = model.run(blocks);
        let bucket = Arc::clone(&self.gate) as Arc<dyn Bucket>;
        let access = Access::new(bucket, Arc::new(TokioTime::start()), Limits::default(), 2);
        let tier = Tier::new(access, TierOptions::default());
        self.runtime.block_on(async {
            let mut pusher = Pusher::new(&tier, PushOptions::default());
            pusher.add(&model.exported(), &run, &payload).await.unwrap();
            pusher.finish().await.unwrap();
        });
    }

    /// Puts blocks into the store, as a client does.
    pub(crate) fn put(&self, blocks: std::ops::Range<u64>, expires_after: Option<Duration>) {
        let (each, count) = (self.shape.block_bytes(), blocks.end - blocks.start);
        let memory = BufMut::zeroed((each * count) as usize).unwrap().share();
        for (at, block) in blocks.clone().enumerate() {
            memory.copy_in(at * each as usize, &content(block, each));
        }
        let from = Placed::blocks(&self.shape, memory, count as u32).unwrap();
        let keys = blocks.map(key).collect();
        let request =
            PutRequest { expires_after, ..PutRequest::new(self.namespace, GROUP, WHOLE, keys, from) };
        let outcomes = self.runtime.block_on(self.store().put(request)).unwrap().unwrap().outcomes;
        assert!(outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored), "{outcomes:?}");
    }

    /// Where the store is.
    pub(crate) fn directory(&self) -> &std::path::Path {
        self.scratch.path()
    }

    pub(crate) fn count(&self, name: &str) -> u64 {
        let counted = self.cold.counted();
        counted.counts.iter().find(|(known, ..)| *known == name).unwrap().2
    }

    pub(crate) fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !done() {
            assert!(begun.elapsed() < PATIENCE, "{what}: {:?}", self.cold.counted());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn here(&self) -> usize {
        let request = ContainsRequest {
            namespace: self.namespace,
            group: GROUP,
            coordinate: WHOLE,
            keys: &self.keys,
            lease: None,
        };
        let presence = self.store().contains(&request).unwrap().presence;
        presence.iter().filter(|one| **one == Presence::Here).count()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.gate.let_pass(None);
        self.runtime.block_on(self.cold.stop());
        self.home.take().unwrap().close().unwrap();
    }
}
