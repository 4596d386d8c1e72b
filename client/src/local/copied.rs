//! Reads and puts of memory that is not shared: through windows that are, and a copy by this process.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use kvarts_layout::{BlockShape, OriginId};
use kvarts_store::api::{
    BlockOutcome, Order, Origins, Parent, Placed, PutReply, PutRequest, ReadEnd, ReadEvent, ReadRequest,
    ReadSink, ReadStream, read_channel,
};
use kvarts_store::error::{Error, Reason};
use kvarts_store::io::SharedBuf;
use kvarts_store::rt::mailbox::{Reply, Ticket, ticket};

use super::Inner;
use super::link::Link;
use kvarts_wire::limits::{PUT_PIECE_BYTES, PUT_PIECES_UNDER_WAY};
use kvarts_wire::local::limits::WINDOW_BYTES;
use kvarts_wire::local::parts;
use kvarts_wire::window::{self, Window};
use kvarts_wire::windows::{Stop, Through, Windows};

/// Whether whatever is read or put at once of such blocks fits into a window.
pub(super) fn fits(shape: &BlockShape) -> bool {
    shape.block_bytes() <= WINDOW_BYTES
}

/// A read whose windows are copied.
struct Copying {
    inner: Arc<Inner>,
    /// Not asked for anew on the way: making a connection waits, and may need the thread that this runs on.
    link: Arc<Link>,
    request: ReadRequest,
    shape: BlockShape,
    sink: ReadSink,
    /// Where the chunks of the window lie that is being read.
    placed: Mutex<Option<Placed>>,
    /// In block order: blocks that were announced.
    ready: Mutex<Vec<u32>>,
    /// What its windows have met of each block.
    origins: Arc<Origins>,
}

/// Reads in windows until the end.
pub(super) async fn read(
    (inner, link): (Arc<Inner>, Arc<Link>),
    request: ReadRequest,
    shape: BlockShape,
    sink: ReadSink,
) {
    let layers = request.layers.clone().unwrap_or(0..shape.layers().len() as u32);
    let (order, blocks) = (request.order, request.keys.len() as u32);
    let (placed, ready) = Default::default();
    let origins = Origins::any(request.keys.len());
    let copying = Copying { inner, link, request, shape: shape.clone(), sink, placed, ready, origins };
    let mut windows = Windows::new(copying, shape, order, layers, blocks, WINDOW_BYTES);
    let ended = windows.run().await;
    let end = match ended {
        Ok(()) => windows.end(None),
        Err(Stop::Late) => windows.end(Some(&Reason::DeadlinePassed)),
        Err(Stop::Fault(reason)) => broken(windows.end(Some(&reason)), &windows.through, &reason),
        Err(Stop::Gone) => return,
    };
    windows.through.sink.send(ReadEvent::End(end));
}

/// How a read ends that was broken off: what was announced is good.
fn broken(end: ReadEnd, copying: &Copying, reason: &Reason) -> ReadEnd {
    let ready = copying.ready.lock().unwrap_or_else(PoisonError::into_inner);
    let blocks = copying.request.order == Order::Blocks;
    let leading = (0u32..).zip(ready.iter()).take_while(|(at, block)| at == *block).count() as u32;
    let none = end.usable_layers == 0;
    let failed = |block: &u32| !blocks || ready.binary_search(block).is_err();
    let all = 0..copying.request.keys.len() as u32;
    ReadEnd {
        usable_blocks: if blocks {
            leading
        } else if none {
            0
        } else {
            end.usable_blocks
        },
        failures: all.filter(failed).map(|block| (block, reason.clone())).collect(),
        ..end
    }
}

impl Through for Copying {
    type Fault = Reason;
    type Memory = SharedBuf;

    async fn begin(&self, window: &Window) -> Result<(SharedBuf, ReadStream), Stop<Reason>> {
        if self.sink.is_cancelled() {
            return Err(Stop::Gone);
        }
        let link = &self.link;
        let windows = link.windows.get().cloned().ok_or(Reason::Busy("there are no windows"))?;
        let bytes = usize::try_from(window.bytes(&self.shape)).map_err(|_| Reason::TooMany("bytes"))?;
        let memory = windows.take(bytes).await.ok_or(Reason::TooMany("bytes"))?.share();
        let into = window::place(self.request.order, &self.shape, window, &memory)?;
        *self.placed.lock().unwrap_or_else(PoisonError::into_inner) = Some(into.clone());
        let late = self.request.deadline.is_some_and(|deadline| deadline <= self.inner.remote.clock.now());
        if late {
            return Err(Stop::Late);
        }
        let keys = self.request.keys.get(window.blocks.start as usize..window.blocks.end as usize);
        let request = ReadRequest {
            keys: keys.unwrap_or_default().to_vec(),
            layers: Some(window.layers.clone()),
            into,
            ..self.request.clone()
        };
        let (sink, stream) = read_channel();
        let places = self.inner.places(&request.into, &self.shape, &window.layers);
        let places = places.ok_or(Reason::Bug("a window that is not shared"))?;
        let timeout = self.inner.timeout_us(request.deadline);
        let part = Some((Arc::clone(&self.origins), window.blocks.start));
        link.read((request, self.shape.clone(), part), places, timeout, sink)?;
        Ok((memory, stream.brought_by(link.bring())))
    }

    async fn range(
        &self,
        window: &Window,
        _memory: &SharedBuf,
        layer: u32,
        blocks: Range<u32>,
        _offset: u64,
    ) -> Result<(), Stop<Reason>> {
        let placed = self.placed.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let from = placed.ok_or(Reason::Bug("a window without places"))?;
        let layers = match self.request.order {
            Order::Layers => layer..layer + 1,
            Order::Blocks => window.layers.clone(),
        };
        let chunks = self.shape.layers().iter().flat_map(|layer| &layer.chunks);
        let wanted = parts(&self.shape, &layers);
        for (part, chunk) in (0u32..).zip(chunks).filter(|(part, _)| wanted.contains(part)) {
            for block in blocks.clone() {
                let source = from.chunk(part, block, chunk.bytes).ok_or(Reason::OutOfBounds)?;
                let to = self.request.into.chunk(part, window.blocks.start + block, chunk.bytes);
                to.ok_or(Reason::OutOfBounds)?.copy_from(0, &source, 0, source.len());
            }
        }
        Ok(())
    }

    async fn layer_ready(&self, layer: u32, good: u32) -> Result<(), Stop<Reason>> {
        self.sink.send(ReadEvent::Layer { layer, blocks: good });
        if self.sink.is_cancelled() { Err(Stop::Gone) } else { Ok(()) }
    }

    async fn block_ready(&self, block: u32) -> Result<(), Stop<Reason>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner).push(block);
        self.sink.send(ReadEvent::Block(block));
        if self.sink.is_cancelled() { Err(Stop::Gone) } else { Ok(()) }
    }
}

/// Puts piece by piece and answers for all of it.
pub(super) async fn put(
    (inner, link): (Arc<Inner>, Arc<Link>),
    request: PutRequest,
    shape: BlockShape,
    reply: Reply<Result<PutReply, Error>>,
) {
    let answer = pieces((&inner, &link), &request, &shape, &reply).await;
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
        let windows = link.windows.get().cloned().ok_or(Reason::Busy("there are no windows"))?;
        let bytes = usize::try_from(shape.block_bytes()).unwrap_or(usize::MAX).saturating_mul(keys.len());
        let memory = windows.take(bytes).await.ok_or(Reason::TooMany("bytes"))?.share();
        let from = Placed::blocks(shape, memory, keys.len() as u32)?;
        let sizes = shape.layers().iter().flat_map(|layer| &layer.chunks);
        for (part, chunk) in (0u32..).zip(sizes) {
            for block in 0..keys.len() as u32 {
                let first = (number * each) as u32;
                let source =
                    request.from.chunk(part, first + block, chunk.bytes).ok_or(Reason::OutOfBounds)?;
                let to = from.chunk(part, block, chunk.bytes).ok_or(Reason::OutOfBounds)?;
                to.copy_from(0, &source, 0, source.len());
            }
        }
        let piece = piece(request, number * each, keys.len(), from);
        let (reply, answer) = ticket();
        let places = inner.places(&piece.from, shape, &(0..shape.layers().len() as u32));
        let (places, ..) = places.ok_or(Reason::Bug("a window that is not shared"))?;
        // What cannot be sent is answered with why.
        let message = inner.put_message(&piece, shape, places);
        let _ = link.put(&message, piece.from, reply);
        under_way.push_back((keys.len(), answer));
        take(&mut under_way, PUT_PIECES_UNDER_WAY - 1, &mut outcomes).await?;
    }
    take(&mut under_way, 0, &mut outcomes).await?;
    Ok(outcomes)
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

/// Waits for the oldest pieces until so many are left.
async fn take(
    under_way: &mut VecDeque<Piece>,
    left: usize,
    outcomes: &mut Vec<BlockOutcome>,
) -> Result<(), Reason> {
    while under_way.len() > left {
        let Some((blocks, answer)) = under_way.pop_front() else { return Ok(()) };
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
