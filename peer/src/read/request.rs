//! A request for a piece: what a path was asked for, and the memory that it has until it lets go of it.
//!
//! The places of a piece are given to one request at a time. A request for what another one has the places of reads into
//! scratch memory, and what it brings is copied into the places once no other request can write there.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use kvarts_cluster::paths::PathId;
use kvarts_contract::api::{Digests, Order, Placed, ReadEnd, ReadSink, ReadStream};
use kvarts_contract::buffers::{BufMut, SharedBuf};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;
use kvarts_layout::BlockShape;
use kvarts_layout::plan::Tile;

use super::bell::{Bell, News};
use super::nodes::Request;
use super::scratch::Grant;

/// What has become of a request.
#[derive(Debug)]
pub(super) enum State {
    /// The path works on it.
    Running(ReadStream),
    /// It ended without all of it; the path may still have the memory.
    Failed(ReadEnd),
    /// All of it came, into scratch memory; another one has the places.
    Parked,
    /// The read does not need it any more; the path may still have the memory.
    Stopped,
}

/// A request.
#[derive(Debug)]
pub(super) struct Ask {
    pub(super) piece: usize,
    pub(super) path: PathId,
    pub(super) bytes: u64,
    pub(super) state: State,
    pub(super) waker: Waker,
    /// Where it reads to, if not into the places of the piece.
    pub(super) scratch: Option<Placed>,
    /// The digests of its chunks, where the reader wants them.
    pub(super) digests: Option<Digests>,
    /// In block order: which of its blocks came.
    pub(super) blocks: Vec<u32>,
    /// The path has let go of the memory.
    pub(super) is_released: bool,
    /// When it was made.
    pub(super) at: Nanos,
    /// How long nothing may come of it.
    pub(super) patience: Duration,
}

impl Ask {
    /// Whether the dealer counts it as asked for.
    pub(super) fn is_counted(&self) -> bool {
        matches!(self.state, State::Running(_) | State::Failed(_))
    }

    /// Whether the path works on it.
    pub(super) fn is_running(&self) -> bool {
        matches!(self.state, State::Running(_))
    }

    /// What was asked of its path.
    pub(super) fn request(&self) -> Request {
        Request { piece: self.piece, path: self.path, bytes: self.bytes }
    }

    /// Whether the path can write to the places of the piece.
    pub(super) fn has_places(&self) -> bool {
        self.scratch.is_none() && !self.is_released
    }
}

/// Goes with the memory of a request: rings when the last one who has it is gone.
#[derive(Debug)]
pub(super) struct Keeper {
    pub(super) bell: Arc<Bell>,
    pub(super) number: u64,
    /// The way to the reader, who is told that nothing more comes when the last one who has it is gone: not before his memory
    /// is his, whatever became of the read.
    pub(super) _sink: Arc<ReadSink>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.bell.ring(News::Released(self.number));
    }
}

/// Scratch memory for a piece, which counts until the last one who has it is gone.
pub(super) fn scratch(
    order: Order,
    shape: &BlockShape,
    tile: &Tile,
    (memory, grant): (BufMut, Grant),
) -> Result<Placed, Reason> {
    let tile = Tile { blocks: 0..tile.block_count(), layers: tile.layers.clone() };
    let memory = SharedBuf::from(memory).also_kept_by(Arc::new(grant));
    Placed::tile(order, shape, &tile, memory)
}

/// Chunks of the layers of a piece: part of the block, and bytes.
pub(super) fn parts<'a>(shape: &'a BlockShape, tile: &'a Tile) -> impl Iterator<Item = (u32, u64)> + 'a {
    let chunks = (0u32..).zip(shape.layers());
    let chunks = chunks.flat_map(|(at, layer)| layer.chunks.iter().map(move |chunk| (at, chunk.bytes)));
    let parts = (0u32..).zip(chunks).filter(|(_, (layer, _))| tile.layers.contains(layer));
    parts.map(|(part, (_, bytes))| (part, bytes))
}

/// Copies a piece from scratch memory into the places of the whole; false if one has no place.
pub(super) fn copy(shape: &BlockShape, tile: &Tile, from: &Placed, to: &Placed) -> bool {
    parts(shape, tile).all(|(part, bytes)| {
        (0u32..).zip(tile.blocks.clone()).all(|(block, ordinal)| {
            let (from, to) = (from.chunk(part, block, bytes), to.chunk(part, ordinal, bytes));
            let Some((from, to)) = from.zip(to) else { return false };
            to.copy_from(0, &from, 0, from.len());
            true
        })
    })
}

/// Leaves the digests of those blocks of a piece that have come with those of the whole.
pub(super) fn copy_digests(
    shape: &BlockShape,
    tile: &Tile,
    (from, to): (&Digests, &Digests),
    has_come: impl Fn(u32) -> bool,
) {
    for (part, _) in parts(shape, tile) {
        for (block, ordinal) in (0u32..).zip(tile.blocks.clone()).filter(|(block, _)| has_come(*block)) {
            if let Some(digest) = from.get(part, block) {
                to.set(part, ordinal, digest);
            }
        }
    }
}
