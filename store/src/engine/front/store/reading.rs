//! Reads: of all blocks at once, and tile by tile.

use std::sync::Arc;

use kvarts_layout::plan::Tile;

use super::{FULL, Store};
use crate::engine::front::router::Message;
use crate::engine::read::job::{self, Expected, ReadPart};
use crate::engine::read::request::{self, Subject, Wish};
use crate::engine::read::tile_identity::{TileIdentity, TileOf, TileRuns};
use kvarts_contract::api::{
    Origins, Placed, ReadRequest, ReadStream, TileSource, TiledRead, TiledRequest, read_channel,
};
use kvarts_contract::error::{Error, Reason};

impl Store {
    /// Reads tile by tile, as the caller has memory. It is one read: of each block all tiles are of one production, and a
    /// block that was replaced meanwhile is not here. The blocks of a tile are looked up when it is begun.
    pub fn read_tiles<M>(&self, request: TiledRequest) -> Result<TiledRead<StoreTiles, M>, Error> {
        let (order, blocks) = (request.order, request.keys.len() as u32);
        let source = self.tiles_of(request, None)?;
        let (shape, layers) = (Arc::clone(&source.subject.shape), source.subject.layers.clone());
        Ok(TiledRead::new(source, shape, order, layers, blocks))
    }

    /// Where the tiles of a read come from; `origins` if some of its blocks were met already.
    pub fn tiles_of(
        &self,
        request: TiledRequest,
        origins: Option<Arc<Origins>>,
    ) -> Result<StoreTiles, Error> {
        let shared = &self.0.shared;
        request::check_keys(shared, &request.keys, request.deadline)?;
        let TiledRequest { namespace, group, coordinate, class, .. } = request;
        let (keys, layers) = (&request.keys, Some(&request.layers));
        let subject = request::name(shared, Wish { namespace, group, coordinate, keys, layers, class })?;
        let origins = origins.unwrap_or_else(|| Origins::any(request.keys.len()));
        Ok(StoreTiles { store: self.clone(), request, subject, origins })
    }

    /// Reads as [`KvStore::read`](kvarts_contract::api::KvStore::read) does, and of each block only the production that `origins`
    /// has for it, or the first that is met: a block that was replaced meanwhile is not here. For a read of which other parts
    /// come another way; its first block is number `first` of `origins`.
    pub fn read_part(
        &self,
        request: ReadRequest,
        origins: &Arc<Origins>,
        first: u32,
    ) -> Result<ReadStream, Error> {
        self.begin_read(request, Some(Expected { origins: Arc::clone(origins), first }))
    }

    pub(super) fn begin_read(
        &self,
        request: ReadRequest,
        expected: Option<Expected>,
    ) -> Result<ReadStream, Error> {
        let (sink, stream) = read_channel();
        self.deal(job::begin(&self.0.shared, request, expected, sink)?);
        Ok(stream)
    }

    /// Hands the parts of a read to their executors.
    fn deal(&self, parts: Vec<ReadPart>) {
        for part in parts {
            let Some(sender) = self.0.router.to(part.shard()) else { continue };
            if let Err(error) = sender.try_send(Message::Read(part))
                && let Message::Read(part) = error.into_inner()
            {
                part.refuse(&Reason::Busy(FULL));
            }
        }
    }
}

/// The disks of a store as where tiles come from.
#[derive(Debug)]
pub struct StoreTiles {
    store: Store,
    request: TiledRequest,
    subject: Subject,
    /// What the tiles have met of each block.
    origins: Arc<Origins>,
}

impl StoreTiles {
    /// What is read, and what its tiles have met of each block.
    pub fn whole(&self) -> (&TiledRequest, &Arc<Origins>) {
        (&self.request, &self.origins)
    }

    /// Begins to read a tile as [`TileSource::begin`] does, and tells where its blocks lie: of a tile that then comes whole,
    /// it is what [`StoreTiles::identity`] takes. Nothing if some blocks are not here.
    pub fn begin_known(&self, tile: &Tile, into: Placed) -> Result<(ReadStream, Option<TileRuns>), Reason> {
        let (parts, stream) = self.look_up(tile, into)?;
        // While the parts are here, what they looked up stays where it is.
        let runs = parts.first().and_then(|part| TileRuns::of(&part.job));
        self.store.deal(parts);
        Ok((stream, runs))
    }

    /// What a tile of this read is that came whole and was verified, so that it can be given again
    /// ([`StoreTiles::recall`]).
    pub fn identity(&self, tile: &Tile, runs: TileRuns) -> Option<TileIdentity> {
        self.tile(tile).identity(runs)
    }

    /// Gives a tile that is in memory instead of reading it: its events, if it is what would be read now; nothing if it has
    /// to be read.
    pub fn recall(&self, tile: &Tile, known: &TileIdentity) -> Result<Option<ReadStream>, Reason> {
        let shared = &self.store.0.shared;
        request::check_in_time(shared, self.request.deadline)?;
        let tile = self.tile(tile);
        Ok(if tile.is(known, shared) { tile.give(known, shared) } else { None })
    }

    fn tile<'a>(&'a self, tile: &'a Tile) -> TileOf<'a> {
        let Self { request, subject, origins, .. } = self;
        TileOf { request, prints: &subject.prints, origins, tile }
    }

    /// Looks the blocks of a tile up: what its executors have to do.
    fn look_up(&self, tile: &Tile, into: Placed) -> Result<(Vec<ReadPart>, ReadStream), Reason> {
        let Self { store, request, subject, origins } = self;
        request::check_in_time(&store.0.shared, request.deadline)?;
        let blocks = tile.blocks.start as usize..tile.blocks.end as usize;
        let prints = subject.prints.get(blocks).ok_or(Reason::OutOfBounds)?;
        into.places().check(&subject.shape, tile.layers.clone())?;
        let request = ReadRequest { class: subject.class, ..request.tile(tile, into)? };
        let expected = match kvarts_layout::planted!("tile-with-its-own-origins") {
            true => Expected { origins: Origins::any(prints.len()), first: 0 },
            false => Expected { origins: Arc::clone(origins), first: tile.blocks.start },
        };
        let (sink, stream) = read_channel();
        Ok((job::start(&store.0.shared, request, prints.to_vec(), Some(expected), sink)?, stream))
    }
}

impl TileSource for StoreTiles {
    fn begin(&self, tile: &Tile, into: Placed) -> Result<ReadStream, Reason> {
        let (parts, stream) = self.look_up(tile, into)?;
        self.store.deal(parts);
        Ok(stream)
    }
}
