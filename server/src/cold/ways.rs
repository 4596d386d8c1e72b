//! The paths of reads that take what the bucket has: own disks, the bucket, and other nodes where there are any.

use std::sync::Arc;

use kvarts_cluster::dealer::PathSet;
use kvarts_cluster::paths::PathId;
use kvarts_layout::BlockShape;
use kvarts_peer::read::{Copies, MultiRead, MultiTiles, NodePaths, OWN, OnTokio, Runner, read};
use kvarts_store::api::{Origins, ReadRequest, ReadStream, TiledRequest};
use kvarts_store::engine::Store;
use kvarts_store::error::Error;
use tokio::runtime::Handle;

use super::ColdTier;
use super::path::BucketPath;

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
        let bucket = bucket.ok_or("cold.bucket: this node reads from as many others as it can")?;
        let runner = Arc::new(OnTokio::new(Arc::clone(store.clock()), Handle::current()));
        Ok(Self { nodes, bucket, runner })
    }

    /// Where the blocks are: as `known` says, or here; and those that come from the bucket, there.
    fn copies(&self, known: Option<Arc<Copies>>, coming: &[bool]) -> Arc<Copies> {
        let own = PathSet::default().with(OWN);
        let here = |comes: &bool| if *comes { PathSet::default() } else { own };
        let copies = known.unwrap_or_else(|| Copies::of(coming.iter().map(here).collect()));
        let bucket = PathSet::default().with(self.bucket);
        for (block, _) in (0u32..).zip(coming).filter(|(_, comes)| **comes) {
            copies.also(block, bucket);
        }
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
        coming: &[bool],
    ) -> MultiTiles {
        let Ways { nodes, runner, .. } = &self.ways;
        let (origins, copies) = (Origins::any(request.keys.len()), self.ways.copies(known, coming));
        MultiTiles::new(request, shape, (origins, copies), nodes, runner)
    }

    /// The same for a read that has memory for all of it.
    pub fn read(
        &self,
        request: ReadRequest,
        shape: &Arc<BlockShape>,
        origins: Arc<Origins>,
        known: Option<Arc<Copies>>,
        coming: &[bool],
    ) -> Result<ReadStream, Error> {
        let Ways { nodes, runner, .. } = &self.ways;
        let (request, into) = request.tiled(shape);
        let (shape, copies) = (Arc::clone(shape), self.ways.copies(known, coming));
        let what = MultiRead { request, into, shape, origins, copies, first: 0, is_alone: true };
        Ok(read(what, nodes, runner)?)
    }
}
