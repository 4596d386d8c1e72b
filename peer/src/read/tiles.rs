//! Several paths as where the tiles of a read come from.

use std::sync::Arc;

use kvarts_contract::api::{Origins, Placed, ReadStream, TileSource, TiledRequest};
use kvarts_contract::error::Reason;
use kvarts_layout::BlockShape;
use kvarts_layout::plan::Tile;

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

    /// What is read, and what its tiles have met of each block.
    pub fn whole(&self) -> (&TiledRequest, &Arc<Origins>) {
        (&self.request, &self.origins)
    }
}

impl TileSource for MultiTiles {
    fn begin(&self, tile: &Tile, into: Placed) -> Result<ReadStream, Reason> {
        let part = self.request.tile(tile, into)?;
        let (request, into) = part.tiled(&self.shape);
        let what = MultiRead {
            request,
            into,
            shape: Arc::clone(&self.shape),
            origins: Arc::clone(&self.origins),
            copies: Arc::clone(&self.copies),
            first: tile.blocks.start,
            is_alone: tile.layers == self.request.layers,
        };
        read(what, &self.nodes, &self.runner)
    }
}
