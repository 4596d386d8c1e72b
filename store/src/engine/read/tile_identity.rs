//! What a tile in memory was read from.
//!
//! A tile that was read and verified may be given again, without a look at the device, while the index says of each of its
//! blocks that it lies where it was read from, and the segment is in the same use. A block that was deleted, evicted or
//! moved is not found there; one that was put again lies elsewhere, or in a segment that was recycled. So who keeps
//! tiles is told of none of this: it asks.
//!
//! What is promised of such a tile: it has the bytes that were compared with their digests when it was read. What happens to
//! the disk afterwards is found by the next read there, the scrubber's for example; a block that was found damaged is
//! out of service, and so is every tile with it.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::plan::Tile;
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId, OriginId};

use super::job::ReadJob;
use crate::engine::shared::Shared;
use crate::index::BlockFingerprint;
use kvarts_contract::api::{
    Order, Origins, ReadEnd, ReadEvent, ReadStream, TiledRequest, Verify, read_channel,
};

/// Blocks that follow each other in a record, and the use of the segment in which it lies.
#[derive(Clone, Debug)]
struct Run {
    shard: u32,
    segment: u32,
    /// Which use of the segment.
    incarnation: u64,
    /// Where the record begins in it.
    offset: u64,
    /// The first block, counted in the record.
    block: u16,
    count: u32,
}

/// Where the blocks of a tile were when its read began.
#[derive(Clone, Debug)]
pub struct TileRuns(Vec<Run>);

/// What a tile in memory was read from: its blocks, layers and order, and where each block lay.
#[derive(Clone, Debug)]
pub struct TileIdentity {
    namespace: NamespaceId,
    group: Group,
    coordinate: Coordinate,
    order: Order,
    layers: Range<u32>,
    keys: Vec<BlockKey>,
    /// Which production of each block it has.
    origins: Vec<OriginId>,
    runs: Vec<Run>,
}

/// A read of which a tile is a part.
#[derive(Clone, Copy)]
pub(crate) struct TileOf<'a> {
    pub(crate) request: &'a TiledRequest,
    pub(crate) prints: &'a [BlockFingerprint],
    pub(crate) origins: &'a Origins,
    pub(crate) tile: &'a Tile,
}

impl TileRuns {
    /// Where the blocks of a read lie that has begun and holds what it looked up; nothing if some are not here, or are read
    /// without being verified.
    pub(crate) fn of(job: &ReadJob) -> Option<Self> {
        let blocks: usize = job.wanted.iter().map(|wanted| wanted.run.len()).sum();
        if blocks < job.request.keys.len() || job.request.verify != Verify::Always {
            return None;
        }
        let ledger = job.shared.index.records().ledger();
        let runs = job.wanted.iter().map(|wanted| {
            Some(Run {
                shard: wanted.shard,
                segment: wanted.segment,
                incarnation: ledger.incarnation(wanted.shard, wanted.segment)?,
                offset: wanted.offset,
                block: wanted.location.block,
                count: wanted.run.end - wanted.run.start,
            })
        });
        runs.collect::<Option<_>>().map(Self)
    }
}

impl<'a> TileOf<'a> {
    fn range(&self) -> Range<usize> {
        self.tile.blocks.start as usize..self.tile.blocks.end as usize
    }

    fn keys(&self) -> Option<&'a [BlockKey]> {
        self.request.keys.get(self.range())
    }

    /// What a tile is that came whole.
    pub(crate) fn identity(&self, runs: TileRuns) -> Option<TileIdentity> {
        let TiledRequest { namespace, group, coordinate, order, .. } = *self.request;
        let met = self.origins.met();
        Some(TileIdentity {
            namespace,
            group,
            coordinate,
            order,
            layers: self.tile.layers.clone(),
            keys: self.keys()?.to_vec(),
            origins: met.get(self.range())?.iter().copied().collect::<Option<_>>()?,
            runs: runs.0,
        })
    }

    /// Whether a tile in memory is what a read of this one would give now.
    pub(crate) fn is(&self, known: &TileIdentity, shared: &Shared) -> bool {
        let TiledRequest { namespace, group, coordinate, order, .. } = *self.request;
        let same = (namespace, group, coordinate, order)
            == (known.namespace, known.group, known.coordinate, known.order)
            && self.tile.layers == known.layers
            && self.keys() == Some(&known.keys[..]);
        same && self.lies_there(known, shared)
    }

    /// Whether all blocks lie where they lay, as the index has it now. The uses of the segments are asked for after
    /// that: a segment that is recycled in between is in another use by then.
    fn lies_there(&self, known: &TileIdentity, shared: &Shared) -> bool {
        let Some(prints) = self.prints.get(self.range()) else { return false };
        if kvarts_layout::planted!("kept-tile-not-looked-up") {
            return true;
        }
        shared.drop_expired(prints, |at| known.keys.get(at).copied());
        let ledger = shared.index.records().ledger();
        let mut left = prints.iter();
        known.runs.iter().all(|run| {
            let blocks = u32::from(run.block)..u32::from(run.block) + run.count;
            // Blocks first: the check that ends first takes nothing from the other.
            let found = blocks.zip(left.by_ref()).all(|(block, print)| {
                shared.index.locate(*print).is_some_and(|found| {
                    let record = found.record;
                    let at = (u32::from(record.shard), record.segment, u64::from(record.page) * PAGE_BYTES);
                    at == (run.shard, run.segment, run.offset) && u32::from(found.location.block) == block
                })
            });
            let same_use = ledger.incarnation(run.shard, run.segment) == Some(run.incarnation);
            found
                && !shared.is_dead(run.shard)
                && (same_use || kvarts_layout::planted!("kept-tile-of-a-reused-segment"))
        })
    }

    /// Gives a tile that is in memory, as one that was just read: nothing if another tile of the read was of another
    /// production of a block.
    pub(crate) fn give(&self, known: &TileIdentity, shared: &Shared) -> Option<ReadStream> {
        let admits = |(block, origin): (usize, &OriginId)| self.origins.admit(block, *origin);
        if !self.range().zip(&known.origins).all(admits) {
            return None;
        }
        shared.counters.blocks_read.fetch_add(self.origins.delivered(self.range()), Relaxed);
        let (sink, stream) = read_channel();
        let blocks = self.tile.block_count();
        match self.request.order {
            Order::Layers => {
                self.tile.layers.clone().for_each(|layer| sink.send(ReadEvent::Layer { layer, blocks }));
            }
            Order::Blocks => (0..blocks).for_each(|block| sink.send(ReadEvent::Block(block))),
        }
        let usable_layers = self.tile.layer_count();
        sink.send(ReadEvent::End(ReadEnd { usable_blocks: blocks, usable_layers, ..ReadEnd::default() }));
        Some(stream)
    }
}
