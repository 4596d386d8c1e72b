//! What the own disks gave damaged is read again in the same read, from wherever else it is.
//!
//! The engine has noted the damage and taken the block out of service by then, so the second read does not look for it here: it asks other
//! nodes and the cold tier, as one that begins now would. It begins when the first one has ended and let go of its memory,
//! and nothing of it is told before it has ended. Of each block both give one production.

use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use kvarts_contract::api::{
    Digests, Instead, Order, Origins, Placed, ReadEnd, ReadEvent, ReadSink, ReadStream, ShortTile,
    TiledRequest, read_channel,
};
use kvarts_contract::error::{Kind, Reason};
use kvarts_layout::BlockShape;
use kvarts_layout::plan::Tile;
use tokio::runtime::Handle;

use super::ServerState;

/// The second reads of one read.
#[derive(Debug)]
pub(super) struct Again {
    state: Arc<ServerState>,
    shape: Arc<BlockShape>,
    damaged: Arc<Damaged>,
}

/// Blocks of a read of which some tile was damaged: to the tiles after it they are not here.
#[derive(Debug, Default)]
struct Damaged(Mutex<BTreeSet<u32>>);

impl Damaged {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        // Each change is one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what is damaged of the blocks of a tile that have failed.
    fn note(&self, tile: &Tile, failures: &[(u32, Reason)]) {
        let found = failures.iter().filter(|(_, reason)| reason.kind() == Kind::Corrupt);
        self.lock().extend(found.map(|(block, _)| tile.blocks.start.saturating_add(*block)));
    }

    fn has(&self, tile: &Tile, block: u32) -> bool {
        self.lock().contains(&tile.blocks.start.saturating_add(block))
    }
}

/// A tile that is gone on with.
struct Second {
    state: Arc<ServerState>,
    shape: Arc<BlockShape>,
    request: TiledRequest,
    origins: Arc<Origins>,
    tile: Tile,
    into: Placed,
    told: u32,
    damaged: Arc<Damaged>,
}

impl Again {
    /// For a read of blocks of this shape; nothing where there is no other place for blocks.
    pub(super) fn of(state: &Arc<ServerState>, shape: &Arc<BlockShape>) -> Option<Self> {
        let elsewhere = state.decided.cold.is_some() || state.decided.cluster.is_some();
        let (state, shape) = (Arc::clone(state), Arc::clone(shape));
        elsewhere.then(|| Self { state, shape, damaged: Arc::default() })
    }

    /// As [`TileSource::instead`](kvarts_contract::api::TileSource::instead), for a tile of this read.
    pub(super) fn instead(
        &self,
        (request, origins): (&TiledRequest, &Arc<Origins>),
        short: &ShortTile<'_>,
    ) -> Option<Instead> {
        let known: Vec<(u32, Reason)> = match short.said {
            ReadEvent::End(end) => end.failures.clone(),
            _ => short.stream.first_failure().into_iter().collect(),
        };
        self.damaged.note(short.tile, &known);
        let can_be_told = |block: u32| request.order == Order::Layers || block >= short.told;
        let is_one = |block: u32| can_be_told(block) && self.damaged.has(short.tile, block);
        if !known.iter().any(|(block, _)| is_one(*block)) {
            return None;
        }
        let runtime = Handle::try_current().ok()?;
        let second = Second {
            state: Arc::clone(&self.state),
            shape: Arc::clone(&self.shape),
            request: request.clone(),
            origins: Arc::clone(origins),
            tile: short.tile.clone(),
            into: short.into.clone(),
            told: short.told,
            damaged: Arc::clone(&self.damaged),
        };
        Some(Box::new(move |said, first| {
            let (sink, stream) = read_channel();
            runtime.spawn(second.run(said, first, sink));
            stream
        }))
    }
}

/// The end of a read, once nothing is written to its memory any more; nothing if it is gone, or no reader waits for it.
async fn end_of(said: Option<ReadEvent>, stream: &ReadStream, sink: &ReadSink) -> Option<ReadEnd> {
    let left = |context: &Context<'_>| sink.poll_cancelled(context).is_ready();
    let released = async |end: ReadEnd| {
        let event = poll_fn(|context| match left(context) {
            true => Poll::Ready(None),
            false => stream.poll_next(context).map(Some),
        });
        // ends: the device gives the memory back; or the reader leaves (`left`)
        (event.await == Some(ReadEvent::Released)).then_some(ReadEnd { held_bytes: 0, ..end })
    };
    match said {
        Some(ReadEvent::End(end)) if end.held_bytes == 0 => Some(end),
        Some(ReadEvent::End(end)) => released(end).await,
        _ => {
            let end = poll_fn(|context| match left(context) {
                true => Poll::Ready(None),
                false => stream.poll_end(context).map(Result::ok),
            });
            // ends: the read's deadline; or the reader leaves (`left`)
            end.await
        }
    }
}

impl Second {
    async fn run(self, said: ReadEvent, first: ReadStream, sink: ReadSink) {
        let Some(end) = end_of(Some(said), &first, &sink).await else { return };
        drop(first);
        self.damaged.note(&self.tile, &end.failures);
        match self.request.order {
            Order::Layers => self.layers(end, &sink).await,
            Order::Blocks => self.blocks(end, &sink).await,
        }
    }

    /// From the first block that failed on, the layers that were not told.
    async fn layers(self, mut end: ReadEnd, sink: &ReadSink) {
        let Range { start, end: behind } = self.tile.layers;
        let (good, from) = (end.usable_blocks, start.saturating_add(self.told));
        // One that is late has no layer more of any block.
        let until = start.saturating_add(end.usable_layers);
        let is_first = end.failures.iter().any(|(block, _)| *block == good);
        if until == behind && is_first && self.damaged.has(&self.tile, good) {
            let blocks = good..self.tile.block_count();
            let second = self.read(blocks, from..behind, sink).await;
            if let Some(second) = second.filter(|second| second.usable_layers == behind.saturating_sub(from))
            {
                end.usable_blocks = good.saturating_add(second.usable_blocks);
                let failed =
                    second.failures.into_iter().map(|(block, why)| (good.saturating_add(block), why));
                // What the own disks said of a block counts.
                let own = end.failures.into_iter().filter(|(block, _)| *block >= end.usable_blocks);
                let all: BTreeMap<u32, Reason> = failed.chain(own).collect();
                end.failures = all.into_iter().collect();
            }
        }
        note_first(&end, sink);
        if end.usable_blocks > 0 {
            for layer in from..until {
                sink.send(ReadEvent::Layer { layer, blocks: end.usable_blocks });
            }
        }
        sink.send(ReadEvent::End(end));
    }

    /// The damaged blocks, as far as none behind them was told.
    async fn blocks(self, mut end: ReadEnd, sink: &ReadSink) {
        let wanted = end.failures.iter().map(|(block, _)| *block).filter(|block| *block >= self.told);
        let wanted: Vec<u32> = wanted.filter(|block| self.damaged.has(&self.tile, *block)).collect();
        let mut wanted = wanted.into_iter().peekable();
        while let Some(start) = wanted.next() {
            let mut behind = start.saturating_add(1);
            while wanted.next_if_eq(&behind).is_some() {
                behind = behind.saturating_add(1);
            }
            let Some(second) = self.read(start..behind, self.tile.layers.clone(), sink).await else {
                continue;
            };
            let is_good = |block: u32| {
                let at = block.checked_sub(start).filter(|_| block < behind);
                at.is_some_and(|at| second.failures.iter().all(|(failed, _)| *failed != at))
            };
            end.failures.retain(|(block, _)| !is_good(*block));
        }
        let count = self.tile.block_count();
        end.usable_blocks = end.failures.first().map_or(count, |(block, _)| *block);
        note_first(&end, sink);
        let has_failed = |block: &u32| end.failures.iter().any(|(failed, _)| failed == block);
        (self.told..count)
            .filter(|block| !has_failed(block))
            .for_each(|block| sink.send(ReadEvent::Block(block)));
        sink.send(ReadEvent::End(end));
    }

    /// Reads blocks of the tile from wherever they are now. Nothing is written to their places when this has ended.
    async fn read(&self, blocks: Range<u32>, layers: Range<u32>, sink: &ReadSink) -> Option<ReadEnd> {
        let ordinals: Vec<u32> = blocks.collect();
        let (count, at) = (ordinals.len() as u32, *ordinals.first()?);
        let into = self.into.select(&ordinals).ok()?;
        let digests = self.into.digests().map(|_| Digests::new(&self.shape, count));
        let into = match &digests {
            Some(digests) => into.with_digests(digests.clone()),
            None => into,
        };
        let first = self.tile.blocks.start.saturating_add(at);
        let met = self.origins.met().into_iter().skip(first as usize).take(ordinals.len());
        let origins = Origins::of(met.collect());
        let tile = Tile { blocks: first..first.saturating_add(count), layers };
        let request = self.request.tile(&tile, into).ok()?;
        let stream = self.state.read(request, &self.shape, Some(&origins)).ok()?;
        let mut end = end_of(None, &stream, sink).await?;
        for ((block, met), key) in (0u32..).zip(origins.met()).zip(self.request.keys.get(first as usize..)?) {
            // Another tile may have met another production meanwhile.
            let at = first.saturating_add(block) as usize;
            if met.is_some_and(|origin| !self.origins.admit(at, origin)) {
                end.usable_blocks = end.usable_blocks.min(block);
                end.failures.retain(|(failed, _)| *failed != block);
                end.failures.push((block, Reason::NotHere(*key)));
            }
        }
        end.failures.sort_unstable_by_key(|(block, _)| *block);
        if let Some((from, to)) = digests.as_ref().zip(self.into.digests()) {
            for chunk in 0..self.shape.chunk_count() {
                let known = (0..count).filter_map(|block| Some((block, from.get(chunk, block)?)));
                known.for_each(|(block, digest)| to.set(chunk, at.saturating_add(block), digest));
            }
        }
        Some(end)
    }
}

fn note_first(end: &ReadEnd, sink: &ReadSink) {
    end.failures.first().into_iter().for_each(|(block, reason)| sink.note_failure(*block, reason));
}
