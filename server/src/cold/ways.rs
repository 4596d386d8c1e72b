//! The paths of reads that take what the bucket has: own disks, the bucket, and other nodes where there are any.

use std::sync::Arc;

use kvarts_cluster::dealer::PathSet;
use kvarts_cluster::paths::PathId;
use kvarts_contract::api::{Origins, ReadRequest, ReadStream, TiledRequest};
use kvarts_contract::error::Error;
use kvarts_layout::BlockShape;
use kvarts_peer::read::{Copies, MultiRead, MultiTiles, NodePaths, OWN, OnTokio, Runner, read};
use kvarts_store::engine::Store;
use tokio::runtime::Handle;

use super::ColdTier;
use super::path::BucketPath;
use super::spare::Coming;

/// The name of the bucket's path.
const NAME: &str = "cold tier";

/// The paths of a node, and which of them leads to the bucket.
#[derive(Debug)]
pub(super) struct Ways {
    nodes: Arc<NodePaths>,
    bucket: PathId,
    runner: Arc<dyn Runner>,
}

impl Ways {
    /// The bucket becomes one of these paths, or of some that lead to the own disks besides. Must be called on a runtime.
    pub(super) fn new(
        nodes: Option<Arc<NodePaths>>,
        store: &Store,
        path: &Arc<BucketPath>,
    ) -> Result<Self, String> {
        let nodes = nodes.unwrap_or_else(|| NodePaths::new(Arc::new(store.clone())));
        let bucket = nodes.add(NAME, Arc::clone(path) as _);
        let bucket = bucket.ok_or(
            "cold.bucket: this node cannot read from the bucket, because it already has read paths to the \
            maximum number of other nodes",
        )?;
        let runner = Arc::new(OnTokio::new(Arc::clone(store.clock()), Handle::current()));
        Ok(Self { nodes, bucket, runner })
    }

    /// The path of the bucket.
    pub(super) fn bucket(&self) -> PathId {
        self.bucket
    }

    /// Bytes that were asked of the bucket and have not come.
    pub(super) fn outstanding(&self) -> u64 {
        let all = self.nodes.status(self.runner.now());
        all.iter().find(|path| path.number == self.bucket).map_or(0, |path| path.outstanding)
    }

    /// Where these blocks are: as `known` says, or here; and those that come from the bucket, there. What other nodes do not give is
    /// there at last, if the bucket seems to have it.
    fn copies(&self, blocks: usize, known: Option<Arc<Copies>>, coming: &Coming) -> Arc<Copies> {
        let (own, bucket) = (PathSet::default().with(OWN), PathSet::default().with(self.bucket));
        let comes = |block: usize| coming.blocks.get(block) == Some(&true);
        let here = |block| if comes(block) { PathSet::default() } else { own };
        let copies = known.unwrap_or_else(|| Copies::of((0..blocks).map(here).collect()));
        for (block, _) in (0u32..).zip(0..blocks).filter(|(_, block)| comes(*block)) {
            copies.also(block, bucket);
        }
        coming.spare.iter().for_each(|spare| copies.at_last(Arc::clone(spare) as _));
        coming.reading.iter().for_each(|reading| copies.keep(Arc::clone(reading) as _));
        copies
    }
}

impl ColdTier {
    /// Where the tiles of a read come from of which the bucket brings some blocks (`coming`); `known` says where the others are, if
    /// other nodes have any.
    pub fn tiles(
        &self,
        request: TiledRequest,
        shape: Arc<BlockShape>,
        known: Option<Arc<Copies>>,
        coming: &Coming,
    ) -> MultiTiles {
        let Ways { nodes, runner, .. } = &self.ways;
        let blocks = request.keys.len();
        let (origins, copies) = (Origins::any(blocks), self.ways.copies(blocks, known, coming));
        MultiTiles::new(request, shape, (origins, copies), nodes, runner)
    }

    /// The same for a read that has memory for all of it.
    pub fn read(
        &self,
        request: ReadRequest,
        shape: &Arc<BlockShape>,
        origins: Arc<Origins>,
        known: Option<Arc<Copies>>,
        coming: &Coming,
    ) -> Result<ReadStream, Error> {
        let Ways { nodes, runner, .. } = &self.ways;
        let (request, into) = request.tiled(shape);
        let copies = self.ways.copies(request.keys.len(), known, coming);
        let shape = Arc::clone(shape);
        let what = MultiRead { request, into, shape, origins, copies, first: 0, is_alone: true };
        Ok(read(what, nodes, runner)?)
    }
}
