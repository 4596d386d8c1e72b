//! Several paths as where the tiles of a read come from.

use std::sync::Arc;

use kvarts_layout::BlockShape;
use kvarts_layout::plan::Tile;
use kvarts_store::api::{Origins, Placed, ReadRequest, ReadStream, TileSource, TiledRead, TiledRequest};
use kvarts_store::error::Reason;

use super::{Copies, MultiRead, NodePaths, Runner, read};

/// The blocks of a read that goes tile by tile, by several paths. It is one read: of each block all tiles give bytes of one
/// production, and what a path did not have for one tile it is not asked for by the next.
#[derive(Debug)]
pub struct MultiTiles {
    request: TiledRequest,
    shape: Arc<BlockShape>,
    origins: Arc<Origins>,
    copies: Arc<Copies>,
    nodes: Arc<NodePaths>,
    runner: Arc<dyn Runner>,
}

impl MultiTiles {
    /// The blocks of a request, of this shape. `origins` and `copies` count as its keys do.
    pub fn new(
        request: TiledRequest,
        shape: Arc<BlockShape>,
        (origins, copies): (Arc<Origins>, Arc<Copies>),
        nodes: &Arc<NodePaths>,
        runner: &Arc<dyn Runner>,
    ) -> Self {
        let (nodes, runner) = (Arc::clone(nodes), Arc::clone(runner));
        Self { request, shape, origins, copies, nodes, runner }
    }

    /// The read of all of them.
    pub fn read<M>(self) -> TiledRead<Self, M> {
        let (shape, order, layers) =
            (Arc::clone(&self.shape), self.request.order, self.request.layers.clone());
        let blocks = self.request.keys.len() as u32;
        TiledRead::new(self, shape, order, layers, blocks)
    }
}

impl TileSource for MultiTiles {
    fn begin(&self, tile: &Tile, into: Placed) -> Result<ReadStream, Reason> {
        let TiledRequest { namespace, group, coordinate, order, verify, class, deadline, ref keys, .. } =
            self.request;
        let blocks = tile.blocks.start as usize..tile.blocks.end as usize;
        let keys = keys.get(blocks).ok_or(Reason::OutOfBounds)?.to_vec();
        let layers = Some(tile.layers.clone());
        let request =
            ReadRequest { namespace, group, coordinate, keys, layers, order, into, verify, class, deadline };
        let what = MultiRead {
            request,
            shape: Arc::clone(&self.shape),
            origins: Arc::clone(&self.origins),
            copies: Arc::clone(&self.copies),
            first: tile.blocks.start,
            is_alone: tile.layers == self.request.layers,
        };
        read(what, &self.nodes, &self.runner)
    }
}
