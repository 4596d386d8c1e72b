//! A read into shared memory as its client sees it: what was announced, and, in adopted memory, whether it is what was
//! put.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::Bytes;
use kvarts_contract::api::{Order, Origins, ReadEnd, ReadEvent, ReadProgress, ReadRequest, ReadSink};
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::error::Reason;
use kvarts_layout::{BlockShape, OriginId};

use kvarts_wire::fault;
use kvarts_wire::local::{Mode, parts};
use kvarts_wire::proto;

/// What a read shares with the others that it is one with.
#[derive(Clone)]
pub(super) struct Part {
    /// What they have met of each block.
    pub(super) origins: Arc<Origins>,
    /// Where the blocks of this one begin there.
    pub(super) first: u32,
}

/// The files that a request's memory lies in, by the numbers of their regions.
pub(super) type Files = Vec<(u64, Mode, Arc<OwnedFd>)>;

/// Where blocks lie in shared memory.
pub(super) struct SharedPlaces {
    /// As the server knows it.
    pub(super) wire: proto::LocalPlaces,
    /// The server does not look at the memory: its digests are compared here.
    pub(super) verifies: bool,
    pub(super) files: Files,
}

/// What a read is of.
pub(super) struct Wanted {
    pub(super) request: ReadRequest,
    pub(super) shape: Arc<BlockShape>,
    /// What it shares with the other reads that it is one of.
    pub(super) part: Option<Part>,
}

/// What parts before this one have met of its blocks, as the server is told.
pub(super) fn met(part: &Part, blocks: usize) -> Vec<Bytes> {
    let all = part.origins.met();
    let some = all.get(part.first as usize..).unwrap_or_default().iter().take(blocks);
    some.map(|id| id.map_or_else(Bytes::new, |id| id.0.to_vec().into())).collect()
}

/// A read under way. It keeps the memory from being used again until the server has let go of it.
pub(super) struct Reading {
    pub(super) request: ReadRequest,
    pub(super) shape: Arc<BlockShape>,
    /// The files that it reads into.
    pub(super) files: Files,
    sink: ReadSink,
    /// The server does not look at the memory: its digests are compared here.
    verifies: bool,
    /// What was announced.
    progress: ReadProgress,
    /// Blocks whose bytes here are not what was put.
    damaged: BTreeMap<u32, Reason>,
    /// What it shares with the other reads that it is one of.
    part: Option<Part>,
    /// An end was announced; whether the device had let go by then.
    ended: Option<bool>,
}

impl Reading {
    pub(super) fn new(wanted: Wanted, sink: ReadSink, verifies: bool, files: Files) -> Self {
        let Wanted { request, shape, part } = wanted;
        let layers = request.layers.clone().unwrap_or(0..shape.layers().len() as u32);
        let progress = ReadProgress::new(request.order, request.keys.len() as u32, layers);
        let (damaged, ended) = (BTreeMap::new(), None);
        Self { request, shape, files, sink, verifies, progress, damaged, part, ended }
    }

    /// Whether no caller waits for it any more.
    pub(super) fn is_cancelled(&self) -> bool {
        self.sink.is_cancelled()
    }

    /// Whether its end was told, with nothing held.
    pub(super) fn has_ended(&self) -> bool {
        self.ended == Some(true)
    }

    /// Whether the read has ended and its caller waits for nothing more of it. A caller that does not fetch the events itself
    /// may still wait for the release of its memory after the end.
    pub(super) fn is_over(&self) -> bool {
        self.has_ended() && !self.sink.is_attended()
    }

    /// The chunks that were not announced: what may still be written to.
    pub(super) fn unannounced(&self) -> Vec<SharedBuf> {
        let (mut left, blocks) = (Vec::new(), self.request.keys.len() as u32);
        for (at, layer) in (0u32..).zip(self.progress.layers().clone()) {
            let sizes = self.shape.layers().get(layer as usize).into_iter().flat_map(|layer| &layer.chunks);
            for (part, chunk) in parts(&self.shape, &(layer..layer + 1)).zip(sizes) {
                let chunks = (0..blocks).filter(|block| !self.progress.is_announced(at, *block));
                left.extend(chunks.filter_map(|block| self.request.into.chunk(part, block, chunk.bytes)));
            }
        }
        left
    }

    /// Blocks that did not match.
    pub(super) fn damaged(&self) -> impl Iterator<Item = u32> {
        self.damaged.keys().copied()
    }

    /// Takes in what has arrived.
    pub(super) fn arrived(&mut self, wire: &proto::LocalArrived) {
        if self.ended.is_some() {
            return;
        }
        for part in &wire.parts {
            if let Some(ready) = &part.layer {
                self.layer(ready.layer, ready.blocks.min(self.request.keys.len() as u32), &part.digests);
            }
            if let Some(ready) = &part.block {
                self.block(ready.block, &part.digests);
            }
        }
    }

    fn layer(&mut self, layer: u32, blocks: u32, digests: &[u8]) {
        self.progress.keep_leading(blocks);
        if self.verifies {
            self.verify(layer..layer + 1, 0..blocks, digests);
        }
        self.progress.layer_done();
        self.sink.send(ReadEvent::Layer { layer, blocks: self.progress.good() });
    }

    fn block(&mut self, block: u32, digests: &[u8]) {
        if self.verifies {
            self.verify(self.progress.layers().clone(), block..block + 1, digests);
        }
        if !self.damaged.contains_key(&block) && self.progress.block_done(block) {
            self.sink.send(ReadEvent::Block(block));
        }
    }

    /// Compares chunks with their digests.
    fn verify(&mut self, layers: Range<u32>, blocks: Range<u32>, digests: &[u8]) {
        let (digests, _) = digests.as_chunks::<4>();
        let sizes: Vec<u64> =
            self.shape.layers().iter().flat_map(|layer| &layer.chunks).map(|chunk| chunk.bytes).collect();
        let mut digests = digests.iter().map(|digest| u32::from_le_bytes(*digest));
        for part in parts(&self.shape, &layers) {
            for block in blocks.clone() {
                let expected = digests.next();
                let bytes = sizes.get(part as usize).copied().unwrap_or_default();
                let chunk = self.request.into.chunk(part, block, bytes);
                let found = chunk.map(|chunk| chunk.digest(0, chunk.len(), crc32fast::hash));
                if expected.is_some() && expected == found {
                    continue;
                }
                let (expected, found) = (expected.unwrap_or_default(), found.unwrap_or_default());
                let reason = Reason::Digest { shard: 0, segment: 0, offset: 0, expected, found };
                self.damaged.entry(block).or_insert(reason);
                if self.request.order == Order::Layers {
                    self.progress.keep_leading(block);
                }
            }
        }
    }

    /// The server's end of it.
    pub(super) fn end(&mut self, wire: &proto::LocalEnd) {
        if self.ended.is_some() {
            return;
        }
        let end = wire.end.clone().unwrap_or_default();
        if let Some(Part { origins, first }) = &self.part {
            for (block, id) in (*first as usize..).zip(&wire.origins) {
                // The server compares; what it met first is what the next part asks for.
                let _ = <[u8; 16]>::try_from(&id[..]).map(|id| origins.admit(block, OriginId(id)));
            }
        }
        let keys = &self.request.keys;
        let failure = |failure: &proto::read_end::Failure| {
            let unsaid = Reason::Bug("the server reported a failure without a reason");
            let key = keys.get(failure.block as usize);
            (failure.block, failure.error.as_ref().map_or(unsaid, |error| fault::reason_of_block(error, key)))
        };
        let mut failures: BTreeMap<u32, Reason> = end.failures.iter().map(failure).collect();
        for (block, reason) in &self.damaged {
            failures.entry(*block).or_insert_with(|| reason.clone());
        }
        let first = self.damaged.keys().next().copied().unwrap_or(u32::MAX);
        self.finish(ReadEnd {
            usable_blocks: end.usable_blocks.min(first),
            usable_layers: end.usable_layers,
            failures: failures.into_iter().collect(),
            held_bytes: wire.held_bytes,
        });
    }

    /// Ends it early: what was announced is good. `held` if a device may still write to the memory.
    pub(super) fn broken(&mut self, reason: &Reason, held: bool) {
        if self.ended.is_some() {
            return;
        }
        let bytes = self.request.into.memories().map(|memory| memory.len() as u64).sum();
        let held_bytes = if held { bytes } else { 0 };
        self.finish(ReadEnd { held_bytes, ..self.progress.broken(reason) });
    }

    fn finish(&mut self, end: ReadEnd) {
        self.ended = Some(end.held_bytes == 0);
        self.sink.send(ReadEvent::End(end));
    }

    /// The memory is not written to any more.
    pub(super) fn released(mut self) {
        self.broken(&Reason::Busy("the read was cancelled"), false);
        if self.ended == Some(false) {
            self.sink.send(ReadEvent::Released);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_contract::api::{Placed, Verify, read_channel};
    use kvarts_contract::buffers::{Region, SharedBuf};
    use kvarts_contract::class::Class;
    use kvarts_layout::{BlockKey, ChunkShape, Coordinate, Group, LayerShape, NamespaceId};

    #[test]
    fn what_one_part_has_met_is_what_the_next_one_asks_for() {
        let chunks = vec![ChunkShape { bytes: 64, align: 1 }];
        let shape = BlockShape::new(vec![LayerShape { layer: 0, chunks }]).unwrap();
        let memory = SharedBuf::new(&Region::anonymous(4096).unwrap(), 0, 128).unwrap();
        let request = ReadRequest {
            namespace: NamespaceId([1; 32]),
            group: Group(0),
            coordinate: Coordinate::Replicated,
            keys: vec![BlockKey([1; 32]), BlockKey([2; 32])],
            layers: None,
            order: Order::Layers,
            into: Placed::blocks(&shape, memory, 2).unwrap(),
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        };
        let (sink, _stream) = read_channel();
        let part = Part { origins: Origins::any(4), first: 1 };
        assert_eq!(met(&part, 2), [Bytes::new(), Bytes::new()]);
        let wanted = Wanted { request, shape: shape.into(), part: Some(part.clone()) };
        let mut reading = Reading::new(wanted, sink, false, Vec::new());
        let origins = vec![Bytes::new(), Bytes::from_static(&[7; 16])];
        reading.end(&proto::LocalEnd { origins: origins.clone(), ..proto::LocalEnd::default() });
        assert_eq!(met(&part, 2), origins);
        assert_eq!(part.origins.met(), [None, None, Some(OriginId([7; 16])), None]);
    }
}
