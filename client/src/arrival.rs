//! What has arrived of a read over gRPC: each message is checked, bytes are put in their places in the caller's memory,
//! and what is complete is announced.
//!
//! Nothing is announced on the server's word alone. A digest that goes on from message to message shows what a wire
//! changed, swallowed or brought from elsewhere (`kvarts_wire::digest`); and what is announced must have come before, in
//! the order of the request and to its last byte, which is counted here.

use std::ops::Range;

use kvarts_contract::api::{Order, ReadEnd, ReadEvent, ReadProgress, ReadRequest, ReadSink};
use kvarts_contract::error::Reason;
use kvarts_layout::{BlockKey, BlockShape};

use kvarts_wire::digest::StreamDigest;
use kvarts_wire::fault;
use kvarts_wire::proto;
use kvarts_wire::proto::read_reply::Part;

/// What has arrived of one read.
pub(super) struct Arrival<'a> {
    request: &'a ReadRequest,
    progress: ReadProgress,
    /// The wanted chunks of a block: layer, canonical index, bytes.
    parts: Vec<(u32, u32, u64)>,
    /// Of all messages so far, from the request on.
    digest: StreamDigest,
    /// The range of the last bytes.
    range: Option<InRange>,
    /// In layer order: leading blocks of which the next layer is here.
    here: u32,
}

/// Where in a range the next byte belongs.
struct InRange {
    layer: u32,
    first_block: u32,
    blocks: u32,
    at: u64,
    /// Which chunk of the range, and where in it; how many chunks it has.
    chunk: usize,
    within: u64,
    chunks: usize,
}

impl InRange {
    fn is_whole(&self) -> bool {
        self.chunk == self.chunks
    }

    fn end(&self) -> u32 {
        self.first_block + self.blocks
    }
}

impl<'a> Arrival<'a> {
    /// Nothing yet. `asked` is what the server was asked for.
    pub(super) fn new(
        request: &'a ReadRequest,
        shape: &BlockShape,
        layers: Range<u32>,
        asked: &proto::ReadRequest,
    ) -> Self {
        let chunks = (0u32..).zip(shape.layers());
        let chunks = chunks.flat_map(|(at, layer)| layer.chunks.iter().map(move |chunk| (at, chunk.bytes)));
        let parts = (0u32..).zip(chunks).map(|(part, (layer, bytes))| (layer, part, bytes));
        let parts = parts.filter(|(layer, ..)| layers.contains(layer)).collect();
        let digest = StreamDigest::of_read(request.order, asked);
        let progress = ReadProgress::new(request.order, request.keys.len() as u32, layers);
        Self { request, progress, parts, digest, range: None, here: 0 }
    }

    /// Takes one message in; gives how the read ended if it was the last.
    pub(super) fn take(
        &mut self,
        reply: &proto::ReadReply,
        sink: &ReadSink,
    ) -> Result<Option<ReadEnd>, Reason> {
        let found = reply.part.as_ref().map(|part| (part, self.digest.read(part)));
        let Some((part, _)) = found.filter(|(_, found)| *found == reply.crc32) else {
            return Err(Reason::remote("a message of the read was damaged in transit"));
        };
        match part {
            Part::Data(data) => self.data(data)?,
            Part::Layer(ready) => {
                self.layer(ready)?;
                sink.send(ReadEvent::Layer { layer: ready.layer, blocks: ready.blocks });
            }
            Part::Block(ready) => {
                self.block(ready.block)?;
                sink.send(ReadEvent::Block(ready.block));
            }
            Part::End(end) => {
                let end = read_end(end, &self.request.keys);
                let good = self.is_end(&end);
                return if good { Ok(Some(end)) } else { Err(Reason::Bug(UNTRUE)) };
            }
        }
        Ok(None)
    }

    fn data(&mut self, data: &proto::ReadData) -> Result<(), Reason> {
        let same = |range: &InRange| {
            (range.layer, range.first_block, range.blocks, range.at)
                == (data.layer, data.first_block, data.blocks, data.offset)
        };
        if !self.range.as_ref().is_some_and(same) {
            self.range = Some(self.begin(data)?);
        }
        let mut rest = &data.data[..];
        while !rest.is_empty() {
            rest = self.place(rest)?;
        }
        if let Some(range) = self.range.as_ref().filter(|range| range.is_whole())
            && self.request.order == Order::Layers
        {
            self.here = range.end();
        }
        Ok(())
    }

    /// The range that begins with these bytes. It follows the ones before it.
    fn begin(&self, data: &proto::ReadData) -> Result<InRange, Reason> {
        let end =
            data.first_block.checked_add(data.blocks).filter(|&end| end as usize <= self.request.keys.len());
        let last = self.range.as_ref();
        let (follows, chunks) = match self.request.order {
            // A block whose rest failed is passed over.
            Order::Blocks => {
                let follows = last.is_none_or(|last| data.first_block >= last.end()) && data.layer == 0;
                (follows, self.parts.len())
            }
            Order::Layers => {
                let whole = last.is_none_or(InRange::is_whole);
                let follows = whole && data.first_block == self.here && self.is_next_layer(data.layer);
                (follows, self.parts.iter().filter(|part| part.0 == data.layer).count())
            }
        };
        if data.offset != 0 || end.is_none() || data.blocks == 0 || !follows {
            return Err(Reason::Bug(
                "the server sent data that was not requested, or sent data out of order",
            ));
        }
        let (layer, first_block, blocks) = (data.layer, data.first_block, data.blocks);
        let chunks = chunks.saturating_mul(blocks as usize);
        Ok(InRange { layer, first_block, blocks, at: 0, chunk: 0, within: 0, chunks })
    }

    fn is_next_layer(&self, layer: u32) -> bool {
        let layers = self.progress.layers();
        layers.contains(&layer) && layer - layers.start == self.progress.layers_done()
    }

    /// Puts what belongs into the next chunk there; gives the rest.
    fn place<'b>(&mut self, bytes: &'b [u8]) -> Result<&'b [u8], Reason> {
        let wrong = Reason::Bug("the server sent more data than the read requested");
        let Some(range) = &mut self.range else { return Err(wrong) };
        let found = match self.request.order {
            Order::Blocks => {
                let (block, part) =
                    (range.chunk / self.parts.len().max(1), range.chunk % self.parts.len().max(1));
                self.parts.get(part).map(|part| (*part, block as u32))
            }
            Order::Layers => {
                let (part, block) =
                    (range.chunk / range.blocks as usize, range.chunk % range.blocks as usize);
                let layer = range.layer;
                self.parts.iter().filter(|part| part.0 == layer).nth(part).map(|part| (*part, block as u32))
            }
        };
        let ((_, part, size), block) =
            found.filter(|(_, block)| *block < range.blocks).ok_or(wrong.clone())?;
        let chunk = self.request.into.chunk(part, range.first_block + block, size).ok_or(wrong.clone())?;
        let some = bytes.len().min(usize::try_from(size - range.within).map_err(|_| wrong.clone())?);
        let (now, rest) = bytes.split_at_checked(some).ok_or(wrong)?;
        chunk.copy_in(range.within as usize, now);
        range.at += some as u64;
        range.within += some as u64;
        if range.within == size {
            (range.chunk, range.within) = (range.chunk + 1, 0);
        }
        Ok(rest)
    }

    /// A layer is said to be complete: it is the next one, and all of it has come.
    fn layer(&mut self, ready: &proto::LayerReady) -> Result<(), Reason> {
        let whole = self.range.as_ref().is_none_or(InRange::is_whole);
        let came =
            self.is_next_layer(ready.layer) && whole && ready.blocks <= self.here.min(self.progress.good());
        if self.request.order != Order::Layers || !came {
            return Err(Reason::Bug(UNTRUE));
        }
        self.progress.keep_leading(ready.blocks);
        self.progress.layer_done();
        self.here = 0;
        Ok(())
    }

    /// A block is said to be complete: it is of the last range, behind those before it, and all of it has come.
    fn block(&mut self, block: u32) -> Result<(), Reason> {
        let of = |range: &&InRange| range.is_whole() && (range.first_block..range.end()).contains(&block);
        let came = self.range.as_ref().filter(of).is_some();
        let good = self.request.order == Order::Blocks && came && self.progress.block_done(block);
        if good { Ok(()) } else { Err(Reason::Bug(UNTRUE)) }
    }

    /// Whether an end calls nothing good that was not announced.
    fn is_end(&self, end: &ReadEnd) -> bool {
        let all = self.request.keys.len() as u32;
        let failed: Vec<u32> = end.failures.iter().map(|(block, _)| *block).collect();
        let sorted =
            failed.array_windows().all(|[a, b]| a < b) && failed.last().is_none_or(|last| *last < all);
        let announced = match self.request.order {
            Order::Layers if end.usable_blocks == 0 => true,
            Order::Layers => {
                end.usable_layers <= self.progress.layers_done() && end.usable_blocks <= self.progress.good()
            }
            Order::Blocks => {
                let is_ready = |block: &u32| self.progress.is_block_done(*block);
                let is_good = |block: &u32| failed.binary_search(block).is_err();
                (0..end.usable_blocks).all(|block| is_ready(&block))
                    && (0..all).filter(is_good).all(|block| is_ready(&block))
            }
        };
        let within = end.usable_blocks <= all && end.usable_layers as usize <= self.progress.layers().len();
        sorted && within && announced
    }

    /// How a read ended that was broken off: what was announced is good.
    pub(super) fn broken(&self, reason: &Reason) -> ReadEnd {
        self.progress.broken(reason)
    }
}

/// What is said and is not so, though its digest is right.
const UNTRUE: &str = "the server reported data as complete, but the data has not arrived";

fn read_end(wire: &proto::ReadEnd, keys: &[BlockKey]) -> ReadEnd {
    let failure = |failure: &proto::read_end::Failure| {
        let unsaid = Reason::Bug("the server reported a failure without a reason");
        let key = keys.get(failure.block as usize);
        (failure.block, failure.error.as_ref().map_or(unsaid, |error| fault::reason_of_block(error, key)))
    };
    ReadEnd {
        usable_blocks: wire.usable_blocks,
        usable_layers: wire.usable_layers,
        failures: wire.failures.iter().map(failure).collect(),
        held_bytes: 0,
    }
}

#[cfg(test)]
mod tests;
