//! A read over gRPC: what arrives is checked, put in its place in the caller's memory, and announced.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvarts_layout::BlockShape;
use kvarts_store::api::{Order, ReadEnd, ReadEvent, ReadRequest, ReadSink};
use kvarts_store::error::Reason;
use kvarts_store::rt::Class;
use tonic::{Status, Streaming};

use super::remote::{AGAIN, Remote, while_lost};
use crate::grpc::{fault, wire};
use crate::proto;
use crate::proto::read_reply::Part;

/// How long after its deadline a server may take to say how a read ended.
const GRACE: Duration = Duration::from_millis(500);

/// A caller's patience may be any: no clock has room for all of it.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// What can be said of a read before it is sent; the shape of its blocks.
pub(super) fn check(remote: &Remote, request: &ReadRequest) -> Result<BlockShape, Reason> {
    remote.check(&request.keys, &request.into, request.deadline)?;
    let shape = remote.shape(request.namespace, (request.group, request.coordinate), &request.into)?;
    let layers = shape.layers().len();
    match &request.layers {
        Some(range) if range.is_empty() => Err(Reason::Empty),
        Some(range) if range.end as usize > layers => {
            Err(Reason::Shape(format!("layers up to {}, the group has {layers}", range.end)))
        }
        _ => Ok(shape),
    }
}

/// Reads and announces until the end.
pub(super) async fn run(remote: Arc<Remote>, request: ReadRequest, shape: BlockShape, sink: ReadSink) {
    let layers = request.layers.clone().unwrap_or(0..shape.layers().len() as u32);
    let mut arrival = Arrival::new(&request, &shape, layers);
    let end = match arrival.all(&remote, &sink).await {
        Ok(Some(end)) => end,
        Ok(None) => return,
        Err(reason) => arrival.broken(&reason),
    };
    sink.send(ReadEvent::End(end));
}

pub(super) fn message(request: &ReadRequest) -> proto::ReadRequest {
    let class = match request.class {
        Class::Small | Class::Foreground | Class::Put => proto::ReadClass::ReadForeground,
        Class::Prefetch => proto::ReadClass::ReadPrefetch,
        Class::Background => proto::ReadClass::ReadBackground,
    };
    let range =
        |layers: &Range<u32>| proto::read_request::LayerRange { start: layers.start, end: layers.end };
    proto::ReadRequest {
        namespace: request.namespace.as_bytes().to_vec().into(),
        column: Some(wire::wire_column(request.group, request.coordinate)),
        keys: wire::key_bytes(&request.keys),
        layers: request.layers.as_ref().map(range),
        class: class.into(),
    }
}

async fn open(remote: &Remote, request: &ReadRequest) -> Result<Streaming<proto::ReadReply>, Status> {
    while_lost(AGAIN.map(|_| begin(remote, request))).await
}

async fn begin(remote: &Remote, request: &ReadRequest) -> Result<Streaming<proto::ReadReply>, Status> {
    let call = remote.request(message(request), request.deadline);
    let reply = match request.order {
        Order::Blocks => remote.reads().get(call).await,
        Order::Layers => remote.reads().get_layers(call).await,
    };
    Ok(reply?.into_inner())
}

/// What has arrived of one read.
struct Arrival<'a> {
    request: &'a ReadRequest,
    layers: Range<u32>,
    /// The wanted chunks of a block: layer, canonical index, bytes.
    parts: Vec<(u32, u32, u64)>,
    range: Option<InRange>,
    /// In layer order: layers that were announced, and how many leading blocks the last one had.
    done: (u32, u32),
    /// In block order: blocks that were announced.
    ready: Vec<u32>,
}

/// Where in a range the next byte belongs.
struct InRange {
    layer: u32,
    first_block: u32,
    blocks: u32,
    at: u64,
    /// Which chunk of the range, and where in it.
    chunk: usize,
    within: u64,
}

impl<'a> Arrival<'a> {
    fn new(request: &'a ReadRequest, shape: &BlockShape, layers: Range<u32>) -> Self {
        let chunks = (0u32..).zip(shape.layers());
        let chunks = chunks.flat_map(|(at, layer)| layer.chunks.iter().map(move |chunk| (at, chunk.bytes)));
        let parts = (0u32..).zip(chunks).map(|(part, (layer, bytes))| (layer, part, bytes));
        let parts = parts.filter(|(layer, ..)| layers.contains(layer)).collect();
        let done = (0, request.keys.len() as u32);
        Self { request, layers, parts, range: None, done, ready: Vec::new() }
    }

    /// Takes everything in; nothing if the caller stopped caring.
    async fn all(&mut self, remote: &Remote, sink: &ReadSink) -> Result<Option<ReadEnd>, Reason> {
        let left = remote.left(self.request.deadline).min(LONGEST);
        let until = tokio::time::Instant::now() + left + GRACE;
        let mut opened = open(remote, self.request).await;
        if let Err(Reason::UnknownNamespace(namespace)) = opened.as_ref().map(drop).map_err(fault::reason_of)
        {
            remote.register_again(namespace).await?;
            opened = open(remote, self.request).await;
        }
        let mut stream = opened.map_err(|status| fault::reason_of(&status))?;
        loop {
            // The server keeps the deadline; a network that stands still brings no word of it.
            let next =
                tokio::time::timeout_at(until, stream.message()).await.map_err(|_| Reason::DeadlinePassed)?;
            let Some(reply) = next.map_err(|status| fault::reason_of(&status))? else { break };
            if sink.is_cancelled() {
                return Ok(None);
            }
            match reply.part {
                Some(Part::Data(data)) => self.data(&data)?,
                Some(Part::Layer(ready)) => {
                    self.done = (self.done.0 + 1, self.done.1.min(ready.blocks));
                    sink.send(ReadEvent::Layer { layer: ready.layer, blocks: ready.blocks });
                }
                Some(Part::Block(ready)) => {
                    self.ready.push(ready.block);
                    sink.send(ReadEvent::Block(ready.block));
                }
                Some(Part::End(end)) => return Ok(Some(read_end(&end))),
                None => return Err(Reason::Bug("a message of a read without a part")),
            }
        }
        Err(Reason::Busy("the connection broke off"))
    }

    fn data(&mut self, data: &proto::ReadData) -> Result<(), Reason> {
        let found = crc32fast::hash(&data.data);
        if found != data.crc32 {
            let text =
                format!("bytes of the read were damaged on their way: {found:08x}, {:08x} sent", data.crc32);
            return Err(Reason::Media(text));
        }
        let same = |range: &InRange| {
            (range.layer, range.first_block, range.blocks, range.at)
                == (data.layer, data.first_block, data.blocks, data.offset)
        };
        if !self.range.as_ref().is_some_and(same) {
            self.range = Some(self.begin(data)?);
        }
        let mut rest = &data.data[..];
        while !rest.is_empty() {
            rest = self.take(rest)?;
        }
        Ok(())
    }

    fn begin(&self, data: &proto::ReadData) -> Result<InRange, Reason> {
        let end =
            data.first_block.checked_add(data.blocks).filter(|&end| end as usize <= self.request.keys.len());
        let known = self.request.order == Order::Blocks || self.layers.contains(&data.layer);
        if data.offset != 0 || end.is_none() || data.blocks == 0 || !known {
            return Err(Reason::Bug("data of a read that nobody asked for, or out of order"));
        }
        let (layer, first_block, blocks) = (data.layer, data.first_block, data.blocks);
        Ok(InRange { layer, first_block, blocks, at: 0, chunk: 0, within: 0 })
    }

    /// Puts what belongs into the next chunk there; gives the rest.
    fn take<'b>(&mut self, bytes: &'b [u8]) -> Result<&'b [u8], Reason> {
        let wrong = Reason::Bug("more data of a read than its range has");
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

    /// How a read ended that was broken off: what was announced is good.
    fn broken(&self, reason: &Reason) -> ReadEnd {
        let all = self.request.keys.len() as u32;
        let (usable_blocks, usable_layers, good): (u32, u32, Vec<u32>) = match self.request.order {
            Order::Layers if self.done.0 == 0 => (0, 0, Vec::new()),
            Order::Layers => (self.done.1, self.done.0, Vec::new()),
            Order::Blocks => {
                let leading = (0u32..).zip(&self.ready).take_while(|(at, block)| at == *block).count();
                (leading as u32, self.layers.len() as u32, self.ready.clone())
            }
        };
        let failed = |block: &u32| good.binary_search(block).is_err();
        let failures = (0..all).filter(failed).map(|block| (block, reason.clone())).collect();
        ReadEnd { usable_blocks, usable_layers, failures, held_bytes: 0 }
    }
}

fn read_end(wire: &proto::ReadEnd) -> ReadEnd {
    let failure = |failure: &proto::read_end::Failure| {
        let unsaid = Reason::Bug("a failure without a reason");
        (failure.block, failure.error.as_ref().map_or(unsaid, fault::reason))
    };
    ReadEnd {
        usable_blocks: wire.usable_blocks,
        usable_layers: wire.usable_layers,
        failures: wire.failures.iter().map(failure).collect(),
        held_bytes: 0,
    }
}
