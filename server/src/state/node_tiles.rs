//! Where the tiles of a read come from: the disks of this node, or those of several nodes.

use std::sync::Arc;

use kvarts_layout::BlockShape;
use kvarts_layout::plan::Tile;
use kvarts_peer::read::MultiTiles;
use kvarts_store::api::{Placed, ReadStream, TileSource, TiledRead, TiledRequest};
use kvarts_store::engine::{StoreTiles, TileIdentity, TileRuns};
use kvarts_store::error::{Error, Reason};

use super::ServerState;

/// The source of a read's tiles.
#[derive(Debug)]
pub enum NodeTiles {
    /// The disks of this node. Its tiles can be kept in memory and given again.
    Own(StoreTiles),
    /// Disks of several nodes.
    Nodes(MultiTiles),
}

impl ServerState {
    /// A read tile by tile: from this node's disks where it has everything, else from every node that has some of it.
    pub async fn read_tiles<M>(
        &self,
        request: TiledRequest,
        shape: Arc<BlockShape>,
    ) -> Result<TiledRead<NodeTiles, M>, Error> {
        let (order, layers, blocks) = (request.order, request.layers.clone(), request.keys.len() as u32);
        let of_nodes = match &self.decided.cluster {
            Some(node) => node.tiles(&request, &shape).await,
            None => None,
        };
        let source = match of_nodes {
            Some(tiles) => NodeTiles::Nodes(tiles),
            None => NodeTiles::Own(self.engine.tiles_of(request, None)?),
        };
        Ok(TiledRead::new(source, shape, order, layers, blocks))
    }
}

impl NodeTiles {
    /// Whether its tiles can be kept and given again: of blocks that are elsewhere it is not known whether they still are what
    /// was kept.
    pub fn can_be_kept(&self) -> bool {
        matches!(self, Self::Own(_))
    }

    /// As [`StoreTiles::begin_known`].
    pub fn begin_known(&self, tile: &Tile, into: Placed) -> Result<(ReadStream, Option<TileRuns>), Reason> {
        match self {
            Self::Own(tiles) => tiles.begin_known(tile, into),
            Self::Nodes(tiles) => Ok((tiles.begin(tile, into)?, None)),
        }
    }

    /// As [`StoreTiles::identity`].
    pub fn identity(&self, tile: &Tile, runs: TileRuns) -> Option<TileIdentity> {
        match self {
            Self::Own(tiles) => tiles.identity(tile, runs),
            Self::Nodes(_) => None,
        }
    }

    /// As [`StoreTiles::recall`].
    pub fn recall(&self, tile: &Tile, known: &TileIdentity) -> Result<Option<ReadStream>, Reason> {
        match self {
            Self::Own(tiles) => tiles.recall(tile, known),
            Self::Nodes(_) => Ok(None),
        }
    }
}

impl TileSource for NodeTiles {
    fn begin(&self, tile: &Tile, into: Placed) -> Result<ReadStream, Reason> {
        match self {
            Self::Own(tiles) => tiles.begin(tile, into),
            Self::Nodes(tiles) => tiles.begin(tile, into),
        }
    }
}
