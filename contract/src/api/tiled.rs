//! A read with memory for one piece at a time.
//!
//! The reader grants memory for the next tile ([`TiledRead::grant`]) when it has some, and only this lets the read continue. A tile is read
//! by a **source** ([`TileSource`]): the disks of a store, or a server at the other end of a connection. The source begins a tile when the
//! memory of the tile is there, and completes the tile without the reader. A slow reader therefore holds only its own memory: no segment,
//! and nothing in a source. Each tile looks its blocks up again; the source guarantees that all tiles return bytes of one production of a
//! block, or a miss.
//!
//! Tiles that were granted early are read at the same time as the first tile, but arrivals are reported in order. If a block fails, the
//! read drops the tiles that were cut for it, and cuts them again.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use kvarts_layout::plan::{Tile, Tiles};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Group, NamespaceId};

use super::{
    Digests, Order, Placed, ReadEnd, ReadEvent, ReadProgress, ReadRequest, ReadStream, Verify, read_channel,
};
use crate::buffers::SharedBuf;
use crate::error::Reason;
use crate::{class::Class, clock::Nanos};

/// A read of blocks, tile by tile.
#[derive(Clone, Debug)]
pub struct TiledRequest {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The group of all blocks.
    pub group: Group,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
    /// The keys of the wanted blocks.
    pub keys: Vec<BlockKey>,
    /// The layers of the shape.
    pub layers: Range<u32>,
    /// The order of delivery.
    pub order: Order,
    /// The share of bytes to verify.
    pub verify: Verify,
    /// The class of the read.
    pub class: Class,
    /// When the caller stops waiting.
    pub deadline: Option<Nanos>,
}

impl TiledRequest {
    /// The whole read as one tile.
    pub fn whole(&self) -> Tile {
        Tile { blocks: 0..self.keys.len() as u32, layers: self.layers.clone() }
    }

    /// The read of one of its tiles into these places.
    pub fn tile(&self, tile: &Tile, into: Placed) -> Result<ReadRequest, Reason> {
        let Self { namespace, group, coordinate, order, verify, class, deadline, .. } = *self;
        let keys = self.keys.get(tile.blocks.start as usize..tile.blocks.end as usize);
        let (keys, layers) = (keys.ok_or(Reason::OutOfBounds)?.to_vec(), Some(tile.layers.clone()));
        Ok(ReadRequest { namespace, group, coordinate, keys, layers, order, into, verify, class, deadline })
    }
}

/// A source of the bytes of tiles.
pub trait TileSource: Send + Sync {
    /// Begins to read a tile. Its events count the tile's blocks from zero. All tiles return bytes of one production of a block.
    fn begin(&self, tile: &Tile, into: Placed) -> Result<ReadStream, Reason>;

    /// Called when blocks of a tile have failed. A source that may still have these blocks returns a continuation. The reader calls it
    /// until it returns one.
    fn instead(&self, _short: &ShortTile<'_>) -> Option<Instead> {
        None
    }
}

impl<S: TileSource + ?Sized> TileSource for Box<S> {
    fn begin(&self, tile: &Tile, into: Placed) -> Result<ReadStream, Reason> {
        (**self).begin(tile, into)
    }

    fn instead(&self, short: &ShortTile<'_>) -> Option<Instead> {
        (**self).instead(short)
    }
}

/// A tile with failed blocks.
#[derive(Clone, Copy, Debug)]
pub struct ShortTile<'a> {
    /// The tile.
    pub tile: &'a Tile,
    /// Its places.
    pub into: &'a Placed,
    /// The number of its leading layers, or blocks in block order, that were reported or skipped.
    pub told: u32,
    /// The last event of its stream, which reports the failure.
    pub said: &'a ReadEvent,
    /// Its stream.
    pub stream: &'a ReadStream,
}

/// The continuation of a tile. It takes the last event and the stream, and returns a stream that repeats or improves that event, followed
/// by the rest.
pub type Instead = Box<dyn FnOnce(ReadEvent, ReadStream) -> ReadStream>;

/// A tile in memory, and the reader's data for it.
#[derive(Debug)]
pub struct TileMemory<M> {
    /// The blocks and layers of the tile.
    pub tile: Tile,
    /// Its memory, of exactly the size of the tile.
    pub buf: SharedBuf,
    /// The places of its chunks there; blocks count from zero.
    pub placed: Placed,
    /// The reader's data.
    pub with: M,
}

/// Complete bytes of a tile.
#[derive(Debug)]
pub struct TileBytes<M> {
    /// The tile.
    pub memory: Arc<TileMemory<M>>,
    /// In layer order: the layer.
    pub layer: u32,
    /// The blocks, counted within the tile.
    pub blocks: Range<u32>,
    /// The number of bytes of each of these blocks that arrived with earlier tiles.
    pub offset: u64,
}

/// An arrival.
#[derive(Debug)]
pub enum Arrived<M> {
    /// Bytes that no longer change.
    Bytes(TileBytes<M>),
    /// All bytes of this layer of the first `blocks` blocks were reported.
    Layer {
        /// Which layer of the shape.
        layer: u32,
        /// The number of good leading blocks of the request so far.
        blocks: u32,
    },
    /// All bytes of this block of the request were reported.
    Block(u32),
}

/// The deadline passed: nothing arrives after the reported data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Late;

struct UnderWay<M> {
    memory: Arc<TileMemory<M>>,
    stream: ReadStream,
    /// In layer order: it has all the blocks that were wanted.
    has_all_blocks: bool,
    /// Blocks of it that were told.
    taken: u32,
    /// Its leading layers, or blocks, that were told or passed over.
    told: u32,
    /// Its source has given another stream for it.
    is_second: bool,
    /// An event that was looked at before its turn.
    next: Option<ReadEvent>,
}

impl<M> UnderWay<M> {
    /// Whether an event tells that blocks have failed, and the source has not been given its second try.
    fn is_short(&self, event: &ReadEvent) -> bool {
        !self.is_second
            && match event {
                ReadEvent::Layer { blocks, .. } => *blocks < self.memory.tile.block_count(),
                ReadEvent::Block(block) => *block != self.told,
                ReadEvent::End(end) => !end.failures.is_empty(),
                ReadEvent::Released => false,
            }
    }

    /// Has the source go on, if it can; otherwise the event is given back.
    fn again(&mut self, source: &impl TileSource, said: ReadEvent) -> Option<ReadEvent> {
        let TileMemory { tile, placed: into, .. } = &*self.memory;
        let short = ShortTile { tile, into, told: self.told, said: &said, stream: &self.stream };
        let Some(instead) = source.instead(&short) else { return Some(said) };
        let (_, nothing) = read_channel();
        self.stream = instead(said, std::mem::replace(&mut self.stream, nothing));
        self.is_second = true;
        None
    }
}

/// A read that continues when its reader grants memory. Dropping it cancels the tiles in progress.
pub struct TiledRead<S, M = ()> {
    source: S,
    shape: Arc<BlockShape>,
    /// Whether the digests of chunks are wanted beside their bytes.
    with_digests: bool,
    tiles: Tiles,
    progress: ReadProgress,
    under_way: VecDeque<UnderWay<M>>,
    /// What is to be told; a tile ends where there is nothing.
    told: VecDeque<Option<Arrived<M>>>,
    /// Whether [`TiledRead::take_whole`] is called after each tile.
    tells_whole: bool,
    /// The tile that ended last, if all of it came.
    whole: Option<Arc<TileMemory<M>>>,
}

impl<S: TileSource, M> TiledRead<S, M> {
    /// A read of the leading `blocks` blocks of a shape.
    pub fn new(source: S, shape: Arc<BlockShape>, order: Order, layers: Range<u32>, blocks: u32) -> Self {
        let (under_way, told) = (VecDeque::new(), VecDeque::new());
        let tiles = Tiles::new(order, layers.clone(), blocks);
        let progress = ReadProgress::new(order, blocks, layers);
        Self {
            source,
            shape,
            with_digests: false,
            tiles,
            progress,
            under_way,
            told,
            tells_whole: false,
            whole: None,
        }
    }

    /// The same, with the digest of each chunk in the places of each tile ([`Placed::digests`]).
    #[must_use]
    pub fn with_digests(self) -> Self {
        Self { with_digests: true, ..self }
    }

    /// The source of its tiles.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// The shape of its blocks.
    pub fn shape(&self) -> &Arc<BlockShape> {
        &self.shape
    }

    /// The number of tiles in progress.
    pub fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// Whether nothing arrives before the reader grants memory for another tile.
    pub fn is_idle(&self) -> bool {
        self.under_way.is_empty() && self.told.is_empty()
    }

    /// The number of good leading blocks so far.
    pub fn good(&self) -> u32 {
        self.progress.good()
    }

    /// The first block that is known to have failed, and its reason.
    pub fn first_failure(&self) -> Option<(u32, Reason)> {
        let of_tile = |now: &UnderWay<M>| {
            let (block, reason) = now.stream.first_failure()?;
            Some((now.memory.tile.blocks.start.saturating_add(block), reason))
        };
        let said = self.progress.first_failure();
        said.or_else(|| self.under_way.front().and_then(of_tile))
    }

    /// The next tile that needs memory, of at most `bytes` unless one layer of one block is larger; `None` at the end.
    pub fn next_tile(&self, bytes: u64) -> Option<Tile> {
        self.tiles.next(&self.shape, bytes)
    }

    /// Whether a tile, of any length, can be the next tile.
    pub fn accepts(&self, tile: &Tile) -> bool {
        self.tiles.accepts(tile)
    }

    /// The block and the layer at which the next tile begins.
    pub fn place(&self) -> (u32, u32) {
        self.tiles.place()
    }

    /// The number of wanted leading blocks.
    pub fn wanted_blocks(&self) -> u32 {
        self.tiles.blocks()
    }

    /// The same for a reader that checks after each tile whether the tile arrived completely ([`TiledRead::take_whole`]). The memory of the
    /// tile is kept until then.
    #[must_use]
    pub fn with_whole_tiles(self) -> Self {
        Self { tells_whole: true, ..self }
    }

    /// The last ended tile, if it arrived completely. Returned once.
    pub fn take_whole(&mut self) -> Option<Arc<TileMemory<M>>> {
        self.whole.take()
    }

    /// Begins the next tile in `buf`, which has exactly its size. `buf` belongs to the source until its bytes are reported.
    pub fn grant(&mut self, tile: Tile, buf: SharedBuf, with: M) -> Result<(), Reason> {
        self.grant_by(tile, buf, |source, tile, placed| Ok((source.begin(tile, placed)?, with)))
    }

    /// The same, but `begin` starts the tile at the source and creates the reader's data.
    pub fn grant_by(
        &mut self,
        tile: Tile,
        buf: SharedBuf,
        begin: impl FnOnce(&S, &Tile, Placed) -> Result<(ReadStream, M), Reason>,
    ) -> Result<(), Reason> {
        let placed = Placed::tile(self.progress.order(), &self.shape, &tile, buf.clone())?;
        let placed = match self.with_digests {
            true => placed.with_digests(Digests::new(&self.shape, tile.block_count())),
            false => placed,
        };
        let (stream, with) = begin(&self.source, &tile, placed.clone())?;
        self.give(TileMemory { tile, buf, placed, with }, stream);
        Ok(())
    }

    /// Reads the next tile from another place than its source: `stream` reports the complete bytes of its memory.
    pub fn give(&mut self, memory: TileMemory<M>, stream: ReadStream) {
        let has_all_blocks = memory.tile.blocks == (0..self.tiles.blocks());
        self.tiles.pass(&memory.tile);
        let memory = Arc::new(memory);
        let (taken, told, is_second, next) = (0, 0, false, None);
        self.under_way.push_back(UnderWay { memory, stream, has_all_blocks, taken, told, is_second, next });
    }

    /// The next arrival of the first tile in progress; `None` at its end.
    pub async fn next(&mut self) -> Result<Option<Arrived<M>>, Late> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// The same, as a poll: the next arrival wakes the waker.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Arrived<M>>, Late>> {
        loop {
            if let Some(told) = self.told.pop_front() {
                return Poll::Ready(Ok(told));
            }
            let Some(now) = self.under_way.front_mut() else { return Poll::Ready(Ok(None)) };
            let event = match now.next.take() {
                Some(event) => event,
                None => ready!(now.stream.poll_next(context)),
            };
            let event = match now.is_short(&event) {
                false => event,
                true => match now.again(&self.source, event) {
                    Some(event) => event,
                    None => continue,
                },
            };
            match event {
                ReadEvent::Layer { layer, blocks } => self.layer(layer, blocks),
                ReadEvent::Block(block) => self.blocks(block),
                ReadEvent::End(end) => {
                    if let Err(late) = self.ended(end) {
                        return Poll::Ready(Err(late));
                    }
                }
                ReadEvent::Released => {}
            }
        }
    }

    /// The end of the read. `early` is the reason if the read ended before its last tile.
    pub fn end(&self, early: Option<&Reason>) -> ReadEnd {
        self.progress.end(early)
    }

    /// The end of an interrupted read.
    pub fn broken(&self, reason: &Reason) -> ReadEnd {
        self.progress.broken(reason)
    }

    /// A layer of the first `blocks` blocks of the first tile is complete.
    fn layer(&mut self, layer: u32, blocks: u32) {
        let Some(now) = self.under_way.front_mut() else { return };
        now.told = now.told.saturating_add(1);
        let (memory, has_all_blocks) = (Arc::clone(&now.memory), now.has_all_blocks);
        if blocks < memory.tile.block_count() {
            self.progress.keep_leading(memory.tile.blocks.start.saturating_add(blocks));
        }
        if blocks > 0 {
            self.told.push_back(Some(Arrived::Bytes(TileBytes {
                memory,
                layer,
                blocks: 0..blocks,
                offset: 0,
            })));
        }
        if has_all_blocks {
            self.layer_done(layer);
        }
    }

    fn layer_done(&mut self, layer: u32) {
        self.progress.layer_done();
        self.told.push_back(Some(Arrived::Layer { layer, blocks: self.progress.good() }));
    }

    /// A block of the first tile is complete. Those that follow and are there already go together.
    fn blocks(&mut self, first: u32) {
        let Some(now) = self.under_way.front_mut() else { return };
        let mut end = first.saturating_add(1);
        now.next = now.stream.try_next();
        while now.next == Some(ReadEvent::Block(end)) {
            end = end.saturating_add(1);
            now.next = now.stream.try_next();
        }
        now.taken = now.taken.saturating_add(end.saturating_sub(first));
        now.told = end;
        let memory = Arc::clone(&now.memory);
        let (start, layers) = (memory.tile.blocks.start, memory.tile.layers.clone());
        let all = self.progress.layers().clone();
        let offset = self.shape.layers_bytes(&(all.start..layers.start));
        self.told.push_back(Some(Arrived::Bytes(TileBytes { memory, layer: 0, blocks: first..end, offset })));
        if layers.end == all.end {
            for block in (first..end).map(|block| start.saturating_add(block)) {
                if self.progress.block_done(block) {
                    self.told.push_back(Some(Arrived::Block(block)));
                }
            }
        }
    }

    /// The first tile has ended.
    fn ended(&mut self, end: ReadEnd) -> Result<(), Late> {
        let Some(now) = self.under_way.pop_front() else { return Ok(()) };
        let tile = &now.memory.tile;
        if end.usable_blocks < tile.block_count() {
            self.progress.keep_leading(tile.blocks.start.saturating_add(end.usable_blocks));
        }
        for (block, reason) in end.failures {
            self.progress.fail(tile.blocks.start.saturating_add(block), reason);
        }
        if end.usable_layers != tile.layer_count() {
            return Err(Late);
        }
        let is_whole = self.tells_whole && end.usable_blocks == tile.block_count() && end.held_bytes == 0;
        self.whole = is_whole.then(|| Arc::clone(&now.memory));
        let good = self.progress.good();
        match self.progress.order() {
            // A block of which some layers are missing is not worth its other layers.
            Order::Blocks if now.taken == 0 && tile.layers.end < self.progress.layers().end => {
                self.under_way.clear();
                self.tiles.pass_blocks(tile);
            }
            Order::Blocks => {}
            Order::Layers => {
                if !now.has_all_blocks && tile.blocks.end >= good {
                    self.layer_done(tile.layers.start);
                }
                if good < self.tiles.blocks() {
                    // Blocks behind the first that failed are of no use.
                    self.under_way.clear();
                    self.tiles.keep_leading(good);
                    self.tiles.pass(tile);
                }
            }
        }
        self.told.push_back(None);
        Ok(())
    }
}

impl<S, M> fmt::Debug for TiledRead<S, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TiledRead")
            .field("under_way", &self.under_way.len())
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}

impl ReadRequest {
    /// The tiled request for blocks of this shape, and its places.
    pub fn tiled(self, shape: &BlockShape) -> (TiledRequest, Placed) {
        let Self { namespace, group, coordinate, keys, order, into, verify, class, deadline, .. } = self;
        let layers = self.layers.unwrap_or(0..shape.layers().len() as u32);
        let tiled =
            TiledRequest { namespace, group, coordinate, keys, layers, order, verify, class, deadline };
        (tiled, into)
    }
}

#[cfg(test)]
mod tests;
