//! A read that has memory for a piece of it at a time.
//!
//! Its reader gives memory for the next tile ([`TiledRead::grant`]) when it has some; that is the only thing that lets the
//! read go on. A tile is dealt to a **source** ([`TileSource`]): the disks of a store, or a server at the other end of a
//! connection. It is begun when its memory is there and runs to its end without its reader, so a reader that is slow
//! holds memory of its own and nothing else: no segment, and nothing in a source. Each tile looks its blocks up again; the
//! source sees to it that all tiles give bytes of one production of a block, or a miss.
//!
//! Tiles that were granted before their turn are under way beside the first one; what arrives is told in order all the
//! same. Where a block fails, those that were cut for it are dropped and cut again.

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

/// Blocks to be read tile by tile.
#[derive(Clone, Debug)]
pub struct TiledRequest {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The group of all blocks.
    pub group: Group,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
    /// The blocks wanted.
    pub keys: Vec<BlockKey>,
    /// Which layers of the shape.
    pub layers: Range<u32>,
    /// In which order they are delivered.
    pub order: Order,
    /// How much is compared with digests.
    pub verify: Verify,
    /// What the read is for.
    pub class: Class,
    /// When the caller stops waiting.
    pub deadline: Option<Nanos>,
}

impl TiledRequest {
    /// All of it as one tile.
    pub fn whole(&self) -> Tile {
        Tile { blocks: 0..self.keys.len() as u32, layers: self.layers.clone() }
    }

    /// The read of one tile of it into these places.
    pub fn tile(&self, tile: &Tile, into: Placed) -> Result<ReadRequest, Reason> {
        let Self { namespace, group, coordinate, order, verify, class, deadline, .. } = *self;
        let keys = self.keys.get(tile.blocks.start as usize..tile.blocks.end as usize);
        let (keys, layers) = (keys.ok_or(Reason::OutOfBounds)?.to_vec(), Some(tile.layers.clone()));
        Ok(ReadRequest { namespace, group, coordinate, keys, layers, order, into, verify, class, deadline })
    }
}

/// Where the bytes of tiles come from.
pub trait TileSource: Send + Sync {
    /// Begins to read a tile. Events count its blocks from zero. Of each block all tiles give bytes of one production.
    fn begin(&self, tile: &Tile, into: Placed) -> Result<ReadStream, Reason>;

    /// Blocks of a tile have failed. A source that may have them all the same gives what goes on with it. Asked until it does.
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

/// A tile of which blocks have failed.
#[derive(Clone, Copy, Debug)]
pub struct ShortTile<'a> {
    /// The tile.
    pub tile: &'a Tile,
    /// Its places.
    pub into: &'a Placed,
    /// How many of its leading layers, or in block order blocks, were told or passed over.
    pub told: u32,
    /// What its stream said last, which tells of the failure.
    pub said: &'a ReadEvent,
    /// Its stream.
    pub stream: &'a ReadStream,
}

/// What goes on with a tile: takes what its stream said last, and the stream, and gives one that says that again or something better,
/// and what follows.
pub type Instead = Box<dyn FnOnce(ReadEvent, ReadStream) -> ReadStream>;

/// A tile in memory, and what the reader keeps with it.
#[derive(Debug)]
pub struct TileMemory<M> {
    /// Which blocks and layers.
    pub tile: Tile,
    /// Its memory: as many bytes as the tile has.
    pub buf: SharedBuf,
    /// The places of its chunks there; blocks count from zero.
    pub placed: Placed,
    /// The reader's own.
    pub with: M,
}

/// Bytes of a tile that are complete.
#[derive(Debug)]
pub struct TileBytes<M> {
    /// The tile.
    pub memory: Arc<TileMemory<M>>,
    /// In layer order: which layer.
    pub layer: u32,
    /// Which blocks, counted within the tile.
    pub blocks: Range<u32>,
    /// Bytes of each of these blocks that came with earlier tiles.
    pub offset: u64,
}

/// Something that arrived.
#[derive(Debug)]
pub enum Arrived<M> {
    /// Bytes that are not written to any more.
    Bytes(TileBytes<M>),
    /// All bytes of this layer of the leading `blocks` blocks were told.
    Layer {
        /// Which layer of the shape.
        layer: u32,
        /// How many leading blocks of the request are good so far.
        blocks: u32,
    },
    /// All bytes of this block of the request were told.
    Block(u32),
}

/// The deadline passed: what was told is what there is.
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

/// A read that goes on as its reader gives it memory. Dropping it cancels what is under way.
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

    /// Where its tiles come from.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// The shape of its blocks.
    pub fn shape(&self) -> &Arc<BlockShape> {
        &self.shape
    }

    /// Tiles under way.
    pub fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// Whether nothing arrives before there is memory for another tile.
    pub fn is_idle(&self) -> bool {
        self.under_way.is_empty() && self.told.is_empty()
    }

    /// Leading blocks that are good so far.
    pub fn good(&self) -> u32 {
        self.progress.good()
    }

    /// The first block that is known to have failed, and why.
    pub fn first_failure(&self) -> Option<(u32, Reason)> {
        let of_tile = |now: &UnderWay<M>| {
            let (block, reason) = now.stream.first_failure()?;
            Some((now.memory.tile.blocks.start.saturating_add(block), reason))
        };
        let said = self.progress.first_failure();
        said.or_else(|| self.under_way.front().and_then(of_tile))
    }

    /// The next tile that wants memory, of at most `bytes` unless one layer of one block is more; none at the end.
    pub fn next_tile(&self, bytes: u64) -> Option<Tile> {
        self.tiles.next(&self.shape, bytes)
    }

    /// Whether a tile can be the next one, however long it is.
    pub fn accepts(&self, tile: &Tile) -> bool {
        self.tiles.accepts(tile)
    }

    /// Where the next tile begins: block and layer.
    pub fn place(&self) -> (u32, u32) {
        self.tiles.place()
    }

    /// Leading blocks that are wanted.
    pub fn wanted_blocks(&self) -> u32 {
        self.tiles.blocks()
    }

    /// The same for a reader that asks after each tile whether it came whole ([`TiledRead::take_whole`]): until then its memory
    /// stays.
    #[must_use]
    pub fn with_whole_tiles(self) -> Self {
        Self { tells_whole: true, ..self }
    }

    /// The tile that ended last, if all of it came: told once.
    pub fn take_whole(&mut self) -> Option<Arc<TileMemory<M>>> {
        self.whole.take()
    }

    /// Begins the next tile: in `buf`, which has its bytes and is the source's until they are told.
    pub fn grant(&mut self, tile: Tile, buf: SharedBuf, with: M) -> Result<(), Reason> {
        self.grant_by(tile, buf, |source, tile, placed| Ok((source.begin(tile, placed)?, with)))
    }

    /// The same, where `begin` has the source begin it, and makes what the reader keeps with it.
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

    /// Takes the next tile from somewhere else than its source: `stream` says what of its memory is complete.
    pub fn give(&mut self, memory: TileMemory<M>, stream: ReadStream) {
        let has_all_blocks = memory.tile.blocks == (0..self.tiles.blocks());
        self.tiles.pass(&memory.tile);
        let memory = Arc::new(memory);
        let (taken, told, is_second, next) = (0, 0, false, None);
        self.under_way.push_back(UnderWay { memory, stream, has_all_blocks, taken, told, is_second, next });
    }

    /// What arrives next of the first tile under way; nothing at its end.
    pub async fn next(&mut self) -> Result<Option<Arrived<M>>, Late> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// The same; until it arrives the waker is woken by it.
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

    /// How the read ended. `early` is why, if it did before its last tile.
    pub fn end(&self, early: Option<&Reason>) -> ReadEnd {
        self.progress.end(early)
    }

    /// How the read ended that was broken off.
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
    /// What is wanted of blocks of this shape, and where.
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
