//! Where the tiles of a read come from: the disks of this node, or those of several nodes.

use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::{
    Instead, Order, Placed, ReadStream, ShortTile, TileSource, TiledRead, TiledRequest,
};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::plan::Tile;
use kvarts_layout::{BlockKey, BlockShape};
use kvarts_peer::node::Column;
use kvarts_peer::read::MultiTiles;
use kvarts_store::engine::{StoreTiles, TileIdentity, TileRuns};

use super::ServerState;
use super::again::Again;
use crate::cold::{Coming, Wish};

/// The longest that a read waits to hear what the cold tier has.
const BRING_MOST: Duration = Duration::from_secs(60);
/// How long other nodes may take to say what they have.
const LOCATE_TIMEOUT: Duration = Duration::from_millis(50);

/// The source of a read's tiles.
#[derive(Debug)]
pub struct NodeTiles {
    place: Place,
    again: Option<Again>,
}

#[derive(Debug)]
enum Place {
    /// The disks of this node. Its tiles can be kept in memory and given again.
    Own(StoreTiles),
    /// Disks of several nodes.
    Nodes(MultiTiles),
}

impl ServerState {
    /// A read tile by tile: from this node's disks where it has everything, else from every node that has some of it and from the
    /// cold tier.
    pub async fn read_tiles<M>(
        self: &Arc<Self>,
        request: TiledRequest,
        shape: Arc<BlockShape>,
    ) -> Result<TiledRead<NodeTiles, M>, Error> {
        let coming = self.bring(wish(&request, &shape), request.deadline).await;
        let (order, layers, blocks) = (request.order, request.layers.clone(), request.keys.len() as u32);
        let elsewhere = match &self.decided.cluster {
            Some(node) => node.copies_of(&request, &shape).await.map(|copies| (node, copies)),
            None => None,
        };
        let tiles_shape = Arc::clone(&shape);
        let place = match (&self.decided.cold, coming, elsewhere) {
            (Some(cold), Some(coming), elsewhere) => {
                let known = elsewhere.map(|(_, copies)| copies);
                Place::Nodes(cold.tiles(request, tiles_shape, known, &coming))
            }
            (_, _, Some((node, copies))) => Place::Nodes(node.tiles_of(request, tiles_shape, copies)),
            _ => Place::Own(self.engine.tiles_of(request, None)?),
        };
        let source = NodeTiles { place, again: Again::of(self, &shape) };
        Ok(TiledRead::new(source, shape, order, layers, blocks))
    }
}

/// What a read may want of the cold tier.
fn wish<'a>(request: &'a TiledRequest, shape: &BlockShape) -> Wish<'a> {
    let TiledRequest { namespace, group, coordinate, ref keys, order, .. } = *request;
    let (block_bytes, by_layers) = (shape.block_bytes(), order == Order::Layers);
    Wish { namespace, group, coordinate, keys, block_bytes, by_layers }
}

impl ServerState {
    /// Has what is neither here nor on other nodes brought from the cold tier, if there is one and time is left; says what comes
    /// from there.
    pub async fn bring(&self, wish: Wish<'_>, deadline: Option<Nanos>) -> Option<Coming> {
        let cold = self.decided.cold.as_ref()?;
        let left = deadline.map_or(BRING_MOST, |deadline| deadline.since(self.clock().now()));
        let elsewhere = async |keys: &[BlockKey]| match &self.decided.cluster {
            Some(node) => {
                let Wish { namespace, group, coordinate, .. } = wish;
                let column = Column { namespace, group, coordinate, keys };
                node.presence(column, LOCATE_TIMEOUT).await.blocks
            }
            None => Vec::new(),
        };
        cold.bring(wish, left.min(BRING_MOST), elsewhere).await
    }
}

impl NodeTiles {
    /// Whether its tiles can be kept and given again: of blocks that are elsewhere it is not known whether they still are what
    /// was kept.
    pub fn can_be_kept(&self) -> bool {
        matches!(self.place, Place::Own(_))
    }

    /// As [`StoreTiles::begin_known`].
    pub fn begin_known(&self, tile: &Tile, into: Placed) -> Result<(ReadStream, Option<TileRuns>), Reason> {
        match &self.place {
            Place::Own(tiles) => tiles.begin_known(tile, into),
            Place::Nodes(tiles) => Ok((tiles.begin(tile, into)?, None)),
        }
    }

    /// As [`StoreTiles::identity`].
    pub fn identity(&self, tile: &Tile, runs: TileRuns) -> Option<TileIdentity> {
        match &self.place {
            Place::Own(tiles) => tiles.identity(tile, runs),
            Place::Nodes(_) => None,
        }
    }

    /// As [`StoreTiles::recall`].
    pub fn recall(&self, tile: &Tile, known: &TileIdentity) -> Result<Option<ReadStream>, Reason> {
        match &self.place {
            Place::Own(tiles) => tiles.recall(tile, known),
            Place::Nodes(_) => Ok(None),
        }
    }
}

impl TileSource for NodeTiles {
    fn begin(&self, tile: &Tile, into: Placed) -> Result<ReadStream, Reason> {
        match &self.place {
            Place::Own(tiles) => tiles.begin(tile, into),
            Place::Nodes(tiles) => tiles.begin(tile, into),
        }
    }
    fn instead(&self, short: &ShortTile<'_>) -> Option<Instead> {
        let whole = match &self.place {
            Place::Own(tiles) => tiles.whole(),
            Place::Nodes(tiles) => tiles.whole(),
        };
        self.again.as_ref()?.instead(whole, short)
    }
}
