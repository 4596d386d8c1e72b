//! Reads and puts of memory that is not shared: through windows that are, and a copy by this process.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use kvarts_contract::api::{
    Arrived, BlockOutcome, Late, Order, Origins, Parent, Placed, PutReply, PutRequest, ReadEvent,
    ReadRequest, ReadSink, ReadStream, TileBytes, TileSource, TiledRead, TiledRequest, read_channel,
};
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::ticket::{Reply, Ticket, ticket};
use kvarts_layout::plan::{Tile, TileChunk};
use kvarts_layout::{BlockShape, OriginId};

use super::Inner;
use super::link::Link;
use super::reading::{Part, Wanted};
use kvarts_wire::limits::{PUT_PIECE_BYTES, PUT_PIECES_UNDER_WAY};
use kvarts_wire::local::limits::{DIGEST_BYTES, WINDOW_BYTES};

/// Bytes of a tile. With the tiles beside it, it takes half of the windows.
const TILE_BYTES: u64 = 4 << 20;
/// Tiles of a read that are under way while one is copied: a disk that has one alone stands still between its layers.
const TILES_AHEAD: usize = 3;

/// Whether whatever is read or put at once of such blocks fits into a window.
pub(super) fn fits(shape: &BlockShape) -> bool {
    shape.block_bytes() <= WINDOW_BYTES
}

/// A server's reads into windows as where tiles come from.
struct LinkTiles {
    inner: Arc<Inner>,
    /// Not asked for again on the way: making a connection waits, and may need the thread that this runs on.
    link: Arc<Link>,
    request: TiledRequest,
    shape: Arc<BlockShape>,
    /// What the tiles have met of each block.
    origins: Arc<Origins>,
}

/// Whether a tile of a read of these layers may be under way beside others: the server says at a tile's end which production
/// of a block it met, so one that is about the same blocks must be told that.
fn is_apart(tile: &Tile, order: Order, layers: &Range<u32>, origins: &Origins) -> bool {
    let is_whole = order == Order::Blocks && tile.layers == *layers;
    is_whole || origins.knows(tile.blocks.start as usize..tile.blocks.end as usize)
}

impl TileSource for LinkTiles {
    fn begin(&self, tile: &Tile, into: Placed) -> Result<ReadStream, Reason> {
        let Self { inner, link, request, shape, origins, .. } = self;
        if request.deadline.is_some_and(|deadline| deadline <= inner.remote.clock.now()) {
            return Err(Reason::DeadlineInPast);
        }
        let request = request.tile(tile, into)?;
        let places = inner.places(&request.into, shape, &tile.layers);
        let places =
            places.ok_or(Reason::Bug("a memory window of the read or put is not shared with the server"))?;
        // A reader of tiles looks at the time itself.
        let timeout = (inner.timeout_us(request.deadline), None);
        let part = Some(Part { origins: Arc::clone(origins), first: tile.blocks.start });
        let (sink, stream) = read_channel();
        link.read(Wanted { request, shape: Arc::clone(shape), part }, places, timeout, sink)?;
        Ok(stream.brought_by(link.bring()))
    }
}

/// Why a read stops before its last tile.
enum Stop {
    /// No caller waits for it any more.
    Gone,
    /// The deadline passed: what was announced is what there is.
    Late,
    Broken(Reason),
}

impl From<Reason> for Stop {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::DeadlineInPast => Self::Late,
            reason => Self::Broken(reason),
        }
    }
}

impl From<Late> for Stop {
    fn from(_: Late) -> Self {
        Self::Late
    }
}

/// Reads tile by tile until the end.
pub(super) async fn read(
    (inner, link): (Arc<Inner>, Arc<Link>),
    request: ReadRequest,
    shape: Arc<BlockShape>,
    sink: ReadSink,
) {
    let (request, into) = request.tiled(&shape);
    let (order, blocks, deadline) = (request.order, request.keys.len() as u32, request.deadline);
    let (layers, origins) = (request.layers.clone(), Origins::any(request.keys.len()));
    let clock = Arc::clone(&inner.remote.clock);
    let source = LinkTiles { inner, link: Arc::clone(&link), request, shape: Arc::clone(&shape), origins };
    let mut read = TiledRead::new(source, shape, order, layers, blocks);
    // Memory of a caller that waits no longer is not written to any more: a copy is never cut short.
    let copied = tokio::select! {
        copied = copy_all(&mut read, &link, (order, &into), &sink) => copied,
        () = super::deadlines::passed(&*clock, deadline) => Err(Stop::Late),
        () = super::deadlines::given_up(|| sink.is_cancelled()) => Err(Stop::Gone),
    };
    let end = match copied {
        Ok(()) => read.end(None),
        Err(Stop::Late) => read.end(Some(&Reason::DeadlinePassed)),
        Err(Stop::Broken(reason)) => read.broken(&reason),
        Err(Stop::Gone) => return,
    };
    sink.send(ReadEvent::End(end));
}

/// Copies all tiles. An error says why there were no more.
async fn copy_all(
    read: &mut TiledRead<LinkTiles>,
    link: &Link,
    (order, into): (Order, &Placed),
    sink: &ReadSink,
) -> Result<(), Stop> {
    let windows = link.windows.get().cloned().ok_or(Reason::Busy("the list of memory windows is empty"))?;
    let bytes_of = |tile: &Tile, shape: &BlockShape| {
        usize::try_from(tile.bytes(shape)).map_err(|_| Reason::TooMany("bytes"))
    };
    loop {
        if sink.is_cancelled() {
            return Err(Stop::Gone);
        }
        if read.is_idle() {
            let Some(tile) = read.next_tile(TILE_BYTES) else { return Ok(()) };
            let memory =
                windows.take(bytes_of(&tile, read.shape())?).await.ok_or(Reason::TooMany("bytes"))?;
            read.grant(tile, memory.share(), ())?;
        }
        while read.under_way() <= TILES_AHEAD {
            let LinkTiles { request, origins, .. } = read.source();
            let next = read.next_tile(TILE_BYTES);
            let next = next.filter(|tile| is_apart(tile, order, &request.layers, origins));
            let Some(tile) = next else { break };
            // Only what no other caller waits for.
            let Some(memory) = windows.try_take(bytes_of(&tile, read.shape())?) else { break };
            // What is wrong is told when it is this tile's turn.
            if read.grant(tile, memory.share(), ()).is_err() {
                break;
            }
        }
        // ends: the read's deadline, by `passed` beside it, or its reader leaves
        while let Some(arrived) = read.next().await? {
            let event = match arrived {
                Arrived::Bytes(bytes) => {
                    copy(&bytes, order, read.shape(), into)?;
                    continue;
                }
                Arrived::Layer { layer, blocks } => ReadEvent::Layer { layer, blocks },
                Arrived::Block(block) => ReadEvent::Block(block),
            };
            sink.send(event);
            if sink.is_cancelled() {
                return Err(Stop::Gone);
            }
        }
    }
}

/// Copies what arrived to where it is wanted.
fn copy(bytes: &TileBytes<()>, order: Order, shape: &BlockShape, into: &Placed) -> Result<(), Reason> {
    let TileBytes { memory, layer, blocks, .. } = bytes;
    for TileChunk { part, block, bytes } in memory.tile.chunks(order, shape, *layer, blocks.clone()) {
        let source = memory.placed.chunk(part, block, bytes).ok_or(Reason::OutOfBounds)?;
        let to = into.chunk(part, memory.tile.blocks.start + block, bytes).ok_or(Reason::OutOfBounds)?;
        to.copy_from(0, &source, 0, source.len());
    }
    Ok(())
}

/// Puts piece by piece and answers for all of it.
pub(super) async fn put(
    (inner, link): (Arc<Inner>, Arc<Link>),
    request: PutRequest,
    shape: Arc<BlockShape>,
    reply: Reply<Result<PutReply, Error>>,
) {
    let answer = tokio::select! {
        answer = pieces((&inner, &link), &request, &shape, &reply) => answer,
        () = super::deadlines::passed(&*inner.remote.clock, request.deadline) => Err(Reason::DeadlinePassed),
        () = super::deadlines::given_up(|| reply.is_cancelled()) => return,
    };
    drop(request);
    // A caller that is gone needs no answer.
    let _ = reply.send(answer.map(|outcomes| PutReply { outcomes }).map_err(Error));
}

type Piece = (usize, Ticket<Result<PutReply, Error>>);

async fn pieces(
    (inner, link): (&Arc<Inner>, &Arc<Link>),
    request: &PutRequest,
    shape: &BlockShape,
    reply: &Reply<Result<PutReply, Error>>,
) -> Result<Vec<BlockOutcome>, Reason> {
    let each = usize::try_from(PUT_PIECE_BYTES.min(WINDOW_BYTES) / shape.block_bytes()).unwrap_or(1).max(1);
    let (mut outcomes, mut under_way) = (Vec::new(), VecDeque::<Piece>::new());
    for (number, keys) in request.keys.chunks(each).enumerate() {
        if reply.is_cancelled() {
            return Err(Reason::Busy("the put was cancelled"));
        }
        let windows =
            link.windows.get().cloned().ok_or(Reason::Busy("the list of memory windows is empty"))?;
        let bytes = usize::try_from(shape.block_bytes()).unwrap_or(usize::MAX).saturating_mul(keys.len());
        let memory = windows.take(bytes).await.ok_or(Reason::TooMany("bytes"))?.share();
        let from = Placed::blocks(shape, memory, keys.len() as u32)?;
        let mut crc32 = Vec::with_capacity(keys.len());
        for block in 0..keys.len() as u32 {
            let source = (&request.from, (number * each) as u32 + block);
            crc32.push(copy_in(shape, source, (&from, block)).ok_or(Reason::OutOfBounds)?);
            tokio::task::consume_budget().await;
        }
        let piece = piece(request, number * each, keys.len(), from);
        let (reply, answer) = ticket();
        let places = inner.places(&piece.from, shape, &(0..shape.layers().len() as u32));
        let places = places
            .ok_or(Reason::Bug("a memory window of the read or put is not shared with the server"))?
            .wire;
        // What cannot be sent is answered with why.
        let message = inner.put_message(&piece, places, crc32);
        let _ = link.put(&message, piece.from, None, reply);
        under_way.push_back((keys.len(), answer));
        take(&mut under_way, PUT_PIECES_UNDER_WAY - 1, &mut outcomes).await?;
    }
    take(&mut under_way, 0, &mut outcomes).await?;
    Ok(outcomes)
}

/// Copies a block into a window; its digest, of what the window has.
fn copy_in(shape: &BlockShape, (source, at): (&Placed, u32), (window, block): (&Placed, u32)) -> Option<u32> {
    let mut digest = crc32fast::Hasher::new();
    for (part, chunk) in (0u32..).zip(shape.layers().iter().flat_map(|layer| &layer.chunks)) {
        let from = source.chunk(part, at, chunk.bytes)?;
        let to = window.chunk(part, block, chunk.bytes)?;
        for start in (0..to.len()).step_by(DIGEST_BYTES) {
            let some = DIGEST_BYTES.min(to.len() - start);
            to.copy_from(start, &from, start, some);
            to.digest(start, some, |bytes| digest.update(bytes));
        }
    }
    Some(digest.finalize())
}

/// The request for some of the blocks, which lie in `from`.
fn piece(request: &PutRequest, first: usize, count: usize, from: Placed) -> PutRequest {
    let before = first.checked_sub(1).and_then(|at| request.keys.get(at));
    let parent = match (request.parent, before) {
        (Parent::Unknown, _) => Parent::Unknown,
        (_, Some(before)) => Parent::Key(*before),
        (parent, None) => parent,
    };
    let origins = request.origins.as_ref().and_then(|all| all.get(first..first + count));
    PutRequest {
        parent,
        first_block: request.first_block.and_then(|block| block.checked_add(first as u32)),
        keys: request.keys.get(first..first + count).unwrap_or_default().to_vec(),
        from,
        origins: origins.map(<[OriginId]>::to_vec),
        ..request.clone()
    }
}

/// Waits for the oldest pieces until `left` are left.
async fn take(
    under_way: &mut VecDeque<Piece>,
    left: usize,
    outcomes: &mut Vec<BlockOutcome>,
) -> Result<(), Reason> {
    while under_way.len() > left {
        let Some((blocks, answer)) = under_way.pop_front() else { return Ok(()) };
        // ends: the put's deadline, by `passed` beside it, or its caller leaves
        match answer.await.unwrap_or(Err(Error(super::wire::GONE))) {
            Ok(reply) => outcomes.extend(reply.outcomes),
            // What an earlier piece stored is stored: the answer is given block by block.
            Err(error) if !outcomes.is_empty() => {
                outcomes.extend(std::iter::repeat_n(BlockOutcome::Refused(error.0), blocks));
            }
            Err(error) => return Err(error.0),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_goes_beside_others_only_where_none_can_be_of_another_production_of_its_blocks() {
        let (origins, all) = (Origins::any(4), 0..2);
        let tile = |blocks, layers| Tile { blocks, layers };
        let apart = |tile: Tile, order| is_apart(&tile, order, &all, &origins);
        assert!(apart(tile(0..2, 0..2), Order::Blocks), "no other tile has these blocks");
        assert!(!apart(tile(0..1, 0..1), Order::Blocks), "its other layers are another tile's");
        assert!(!apart(tile(0..2, 0..2), Order::Layers) && !apart(tile(0..2, 1..2), Order::Layers));
        assert!(origins.admit(0, OriginId([1; 16])));
        assert!(!apart(tile(0..2, 1..2), Order::Layers), "of one it is not known");
        assert!(origins.admit(1, OriginId([2; 16])));
        assert!(apart(tile(0..2, 1..2), Order::Layers));
    }
}
