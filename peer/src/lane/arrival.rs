//! One answer as it comes: bytes go to their places, and each chunk is compared there with its digest before anything of its
//! block, or of its layer, is announced.

use std::sync::atomic::Ordering;

use kvarts_contract::api::{Life, ReadEnd, ReadEvent};
use kvarts_contract::buffers::stream::Stretch;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;
use kvarts_layout::plan::Order;
use kvarts_layout::{OriginId, planted};
use kvarts_wire::{fault, proto};
use rustix::io::Errno;

use super::asked;
use super::client::{Counters, Outline, Wanted};
use super::delivery::{Chunk, Delivery};
use super::wire::{Broken, Wire, moved};

/// What a peer that gives no reason is taken to have meant.
const NO_REASON: &str = "the peer sent no reason";

/// A chunk that comes, and what it should be.
#[derive(Clone, Copy)]
struct Due {
    chunk: Chunk,
    digest: u32,
}

/// A piece of which some blocks are not what their digests say.
pub(super) struct Doubted {
    pub(super) wanted: Wanted,
    pub(super) outline: Outline,
    pub(super) blocks: Vec<u32>,
}

/// An answer whose bytes are coming.
pub(super) struct Arrival {
    /// None: no reader waits any more, and its bytes are passed over.
    pub(super) wanted: Option<Wanted>,
    pub(super) outline: Outline,
    stretch: Stretch,
    due: Vec<Due>,
    /// Chunks that were compared.
    checked: usize,
    /// Blocks that come, and the production of each.
    blocks: Vec<u32>,
    origins: Vec<(OriginId, Life)>,
    /// Whether all layers come.
    whole: bool,
    /// Bytes that have not come.
    left: u64,
    /// Blocks that were not what their digests say.
    damaged: Vec<u32>,
}

impl Arrival {
    /// The answer to a piece, if it can be one. If not, who waits for the piece is left in `waits`.
    pub(super) fn new(
        outline: Outline,
        waits: &mut Option<Wanted>,
        answer: &proto::LaneAnswer,
    ) -> Result<Self, Broken> {
        let delivery = delivery(&outline, answer).ok_or(Broken::Protocol(
            "the fields of the answer \
            contradict each other",
        ))?;
        let chunks = delivery.chunks(&outline.shape);
        let fits = answer.bytes == delivery.bytes(&outline.shape)
            && answer.digests.len() as u64 == chunks.saturating_mul(4)
            && answer.origins.len() == delivery.blocks.len().saturating_mul(16)
            && answer.lives.len() == answer.origins.len();
        if !fits {
            return Err(Broken::Protocol("the answer has a wrong length"));
        }
        let whole = delivery.layers.end == outline.layers.end;
        let (mut due, mut stretch) = (Vec::new(), Stretch::default());
        if let Some(wanted) = waits {
            explain(wanted, &outline, answer, &delivery);
            (due, stretch) = (Vec::with_capacity(chunks as usize), Stretch::with_capacity(chunks as usize));
            let mut digests = answer.digests.as_chunks::<4>().0.iter();
            delivery.each(&outline.shape, |chunk| {
                let elsewhere = planted!("peer-piece-misplaced") && (chunk.block | 1) < outline.blocks;
                let block = if elsewhere { chunk.block ^ 1 } else { chunk.block };
                let place = wanted.request.into.chunk(chunk.part, block, chunk.bytes);
                if let (Some(place), Some(digest)) = (place, digests.next()) {
                    stretch.push(place);
                    due.push(Due { chunk, digest: u32::from_le_bytes(*digest) });
                }
            });
        }
        if waits.is_some() && due.len() as u64 != chunks {
            // The places were checked before anything was asked for.
            return Err(Broken::Protocol("some chunks of the answer have no destination"));
        }
        let asked = waits.as_ref().map_or(Nanos(0), |wanted| wanted.asked);
        let lives = answer.lives.as_chunks::<16>().0.iter().map(|life| asked::life(life, asked));
        let origins = answer.origins.as_chunks::<16>().0.iter().copied().map(OriginId).zip(lives).collect();
        let (wanted, blocks, left) = (waits.take(), delivery.blocks, answer.bytes);
        Ok(Self { wanted, outline, stretch, due, checked: 0, blocks, origins, whole, left, damaged: vec![] })
    }

    /// Bytes that have not come.
    pub(super) fn left(&self) -> u64 {
        self.left
    }

    /// Whether all bytes have come.
    pub(super) fn is_whole(&self) -> bool {
        self.left == 0
    }

    /// Takes bytes that have come; false if there are none now.
    pub(super) fn receive(
        &mut self,
        wire: &dyn Wire,
        scratch: &mut [u8],
        counters: &Counters,
    ) -> Result<bool, Broken> {
        if self.wanted.as_ref().is_some_and(|wanted| wanted.sink.is_cancelled()) {
            self.let_go(None, counters);
        }
        let most = usize::try_from(self.left).unwrap_or(usize::MAX);
        let (result, counter) = match &self.wanted {
            Some(_) => (wire.receive_into(&mut self.stretch), &counters.bytes),
            None => {
                let len = most.min(scratch.len());
                (wire.receive(scratch.get_mut(..len).unwrap_or_default()), &counters.unwanted)
            }
        };
        if result == Err(Errno::FAULT) && self.wanted.is_some() {
            // Memory of another process, which has taken it away.
            self.let_go(Some(&Reason::Busy("the destination memory is not writable")), counters);
            return Ok(true);
        }
        let Some(got) = moved(result)? else { return Ok(false) };
        counter.fetch_add(got as u64, Ordering::Relaxed);
        self.left = self.left.saturating_sub(got as u64);
        self.check(counters);
        Ok(true)
    }

    /// Ends the piece for its caller, and leaves its memory alone from here on; what still comes is passed over.
    pub(super) fn let_go(&mut self, reason: Option<&Reason>, counters: &Counters) {
        let Some(wanted) = self.wanted.take() else { return };
        (self.stretch, self.due) = (Stretch::default(), Vec::new());
        end_early(wanted, reason, counters);
    }

    /// Compares the chunks that have come.
    fn check(&mut self, counters: &Counters) {
        let Some(wanted) = &mut self.wanted else { return };
        while self.checked < self.stretch.passed() {
            let (Some(due), Some(range)) = (self.due.get(self.checked), self.stretch.range(self.checked))
            else {
                return;
            };
            let Chunk { part, layer, block, .. } = due.chunk;
            let found = range.crc32(0, range.len());
            if let Some(digests) = wanted.request.into.digests() {
                // For a reader that compares once more, in memory that others write to.
                digests.set(part, block, due.digest);
            }
            if found != due.digest && !planted!("peer-digest-not-compared") {
                counters.damaged.fetch_add(1, Ordering::Relaxed);
                let expected = due.digest;
                let reason = Reason::Digest { shard: 0, segment: 0, offset: 0, expected, found };
                note(wanted, block, reason);
                if self.damaged.last() != Some(&block) && !self.damaged.contains(&block) {
                    self.damaged.push(block);
                }
            }
            self.checked += 1;
            let next = self.due.get(self.checked).map(|due| due.chunk);
            match self.outline.order {
                Order::Blocks if next.is_none_or(|next| next.block != block) => {
                    let at = self.blocks.partition_point(|before| *before < block);
                    if let Some(origin) = self.origins.get(at) {
                        block_came(wanted, block, *origin);
                    }
                }
                Order::Layers if next.is_none_or(|next| next.layer != layer) => {
                    let is_first = layer == self.outline.layers.start;
                    layer_came(wanted, layer, is_first.then_some(&self.origins));
                }
                _ => {}
            }
        }
    }

    /// The end of a piece whose bytes have all come.
    pub(super) fn finish(self, counters: &Counters) -> Option<Doubted> {
        let wanted = self.wanted?;
        let early = (!self.whole).then_some(Reason::DeadlinePassed);
        let end = wanted.progress.end(early.as_ref());
        tell(&wanted, end, counters);
        let (outline, blocks) = (self.outline, self.damaged);
        (!blocks.is_empty()).then_some(Doubted { wanted, outline, blocks })
    }
}

/// What comes, if the answer can be one to this piece.
fn delivery(outline: &Outline, answer: &proto::LaneAnswer) -> Option<Delivery> {
    let Outline { order, layers, blocks, .. } = outline;
    let upwards = answer.failed.is_sorted_by(|a, b| a < b);
    let inside = answer.failed.last().is_none_or(|last| last < blocks);
    let counted = answer.usable_blocks <= *blocks && answer.usable_layers as usize <= layers.len();
    if !upwards || !inside || !counted || answer.failed.len() != answer.reasons.len() {
        return None;
    }
    let nothing = answer.bytes == 0;
    let blocks = match order {
        _ if nothing => Vec::new(),
        Order::Layers => (0..answer.usable_blocks).collect(),
        Order::Blocks => (0..*blocks).filter(|block| answer.failed.binary_search(block).is_err()).collect(),
    };
    let count = match order {
        _ if nothing => 0,
        Order::Layers => answer.usable_layers,
        Order::Blocks => layers.len() as u32,
    };
    Some(Delivery { order: *order, layers: layers.start..layers.start + count, blocks })
}

/// Notes the blocks that do not come.
fn explain(wanted: &mut Wanted, outline: &Outline, answer: &proto::LaneAnswer, delivery: &Delivery) {
    for (block, reason) in answer.failed.iter().zip(&answer.reasons) {
        let key = wanted.request.keys.get(*block as usize);
        let error = proto::Error { reason: *reason, ..proto::Error::default() };
        let reason = match *reason {
            0 => Reason::remote(NO_REASON),
            _ => fault::reason_of_block(&error, key),
        };
        note(wanted, *block, reason);
    }
    let comes = |block: &u32| delivery.blocks.binary_search(block).is_ok();
    let unexplained: Vec<u32> = match outline.order {
        Order::Layers => (answer.usable_blocks..outline.blocks).take(1).collect(),
        Order::Blocks => (0..outline.blocks).filter(|block| !comes(block)).collect(),
    };
    for block in unexplained {
        note(wanted, block, Reason::remote(NO_REASON));
    }
}

/// A block failed. The first reason stays.
fn note(wanted: &mut Wanted, block: u32, reason: Reason) {
    wanted.sink.note_failure(block, &reason);
    wanted.progress.fail(block, reason);
}

/// Whether a block is of the production that is wanted; if not, it is not here.
fn admit(wanted: &mut Wanted, block: u32, (origin, life): (OriginId, Life)) -> bool {
    let at = (wanted.first as usize).saturating_add(block as usize);
    let is_it = wanted.origins.admit_living(at, origin, life) || planted!("peer-origin-not-compared");
    if !is_it {
        let key = wanted.request.keys.get(block as usize).copied().unwrap_or_default();
        note(wanted, block, Reason::NotHere(key));
    }
    is_it
}

/// All chunks of a block have come, in block order.
fn block_came(wanted: &mut Wanted, block: u32, origin: (OriginId, Life)) {
    if !wanted.progress.has_failed(block) && admit(wanted, block, origin) && wanted.progress.block_done(block)
    {
        wanted.sink.send(ReadEvent::Block(block));
    }
}

/// All chunks of a layer have come, in layer order. With the first one it is decided which production of each block this is.
fn layer_came(wanted: &mut Wanted, layer: u32, origins: Option<&Vec<(OriginId, Life)>>) {
    for (block, origin) in (0u32..).zip(origins.into_iter().flatten()) {
        if block >= wanted.progress.good() || !admit(wanted, block, *origin) {
            break;
        }
    }
    wanted.progress.layer_done();
    let blocks = wanted.progress.good();
    wanted.sink.send(ReadEvent::Layer { layer, blocks });
}

/// Ends a piece before its bytes have come: at its deadline, with another reason, or, where no reader waits, without a word.
/// When this returns, its memory is left alone.
pub(super) fn end_early(wanted: Wanted, reason: Option<&Reason>, counters: &Counters) {
    let Some(reason) = reason else { return };
    let end = match reason {
        Reason::DeadlinePassed => wanted.progress.end(Some(reason)),
        _ => wanted.progress.broken(reason),
    };
    tell(&wanted, end, counters);
}

fn tell(wanted: &Wanted, end: ReadEnd, counters: &Counters) {
    let layers = wanted.progress.layers().len() as u32;
    if !end.failures.is_empty() || end.usable_layers < layers {
        counters.failures.fetch_add(1, Ordering::Relaxed);
    }
    wanted.sink.send(ReadEvent::End(end));
}
