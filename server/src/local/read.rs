//! A read into a client's memory: the engine's own read, whose announcements travel.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use kvarts_contract::api::{
    Digests, Order, Origins, Placed, ReadEnd, ReadEvent, ReadRequest, ReadStream, SMALL_READ_BYTES, Verify,
};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;
use kvarts_layout::OriginId;
use kvarts_layout::plan::Tile;
use tokio::time::Instant;
use tonic::Code;

use super::frame::{Kind, bare, frame};
use super::limits::{ARRIVED_BYTES, CONFIRM_EVERY, CONFIRMED_MAX};
use super::memory::Memory;
use super::outbox::Outbox;
use super::places;
use crate::calls::call::Call;
use crate::calls::download::{self, Download};
use kvarts_wire::convert::wire_end;
use kvarts_wire::fault::{Fault, Outcome};
use kvarts_wire::limits;
use kvarts_wire::local::parts;
use kvarts_wire::proto;

/// Tells the client that the memory of a read is not written to any more, when that is so.
struct LetGo {
    outbox: Arc<Outbox>,
    id: u64,
    /// It was told with the end.
    told: AtomicBool,
}

impl Drop for LetGo {
    fn drop(&mut self) {
        if !*self.told.get_mut() {
            self.outbox.tell(bare(Kind::Released, self.id));
        }
    }
}

/// The most chunks of a short read: the executor that ends it puts its answer together.
const SHORT_CHUNKS: u64 = 1024;

/// What a client is told whose memory could not be written.
const UNWRITTEN: &str = "unshare this memory, and share writable memory";

/// How many blocks of a session may still be read again because they did not match in its memory. A client that writes to
/// his own memory during reads can make any number of them.
#[derive(Debug)]
pub(super) struct Doubts(Mutex<(u32, Instant)>);

impl Default for Doubts {
    fn default() -> Self {
        Self(Mutex::new((CONFIRMED_MAX, Instant::now())))
    }
}

impl Doubts {
    /// Whether one more may be read again at this time.
    fn may(&self, now: Instant) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (left, at) = &mut *state;
        let more = now.saturating_duration_since(*at).as_nanos() / CONFIRM_EVERY.as_nanos();
        if let Ok(more @ 1..) = u32::try_from(more) {
            (*left, *at) = (left.saturating_add(more).min(CONFIRMED_MAX), now);
        }
        let may = *left > 0;
        *left = left.saturating_sub(1);
        may
    }
}

/// A read that has begun.
pub(super) struct Reading {
    call: Arc<Call>,
    asked: Download,
    into: Placed,
    stream: ReadStream,
    outbox: Arc<Outbox>,
    id: u64,
    /// Of a part of a read: what its end tells.
    origins: Option<Arc<Origins>>,
    doubts: Arc<Doubts>,
    /// Goes after the last word about the read but one.
    let_go: Arc<OnceLock<LetGo>>,
}

/// Announcements that travel in one frame.
#[derive(Default)]
struct Announced {
    wire: proto::LocalArrived,
    /// About how long the frame is.
    size: usize,
    /// Bytes of blocks that are announced.
    bytes: u64,
}

/// Begins a read, or says why not: then the client's memory was not touched.
pub(super) fn begin(
    call: &Arc<Call>,
    memories: &BTreeMap<u32, Memory>,
    (outbox, doubts): (&Arc<Outbox>, &Arc<Doubts>),
    (id, order, wire): (u64, Order, proto::LocalRead),
) -> Outcome<Reading> {
    let asked = Download::asked(call, order, wire.read.unwrap_or_default())?;
    let Download { request, shape, .. } = &asked;
    if asked.bytes() > limits::REQUEST_BYTES_MAX {
        return Err(Reason::TooMany("bytes").into());
    }
    if let Some((number, _)) = memories.iter().find(|(_, memory)| memory.region.has_failed()) {
        return Err(Fault::malformed(format!(
            "the shared memory {number} is not writable for the server: \
            {UNWRITTEN}"
        )));
    }
    // Not `LetGo` before the engine has taken the request: one that is refused has no last word.
    let let_go = Arc::new(OnceLock::<LetGo>::new());
    let holder: Arc<dyn Any + Send + Sync> = Arc::clone(&let_go) as _;
    let (into, client_verifies) =
        places::place(memories, shape, &request.layers, wire.into, request.keys.len(), &holder)?;
    let (into, verify) = if client_verifies {
        (into.with_digests(Digests::new(shape, request.keys.len() as u32)), Verify::Never)
    } else {
        (into, request.verify)
    };
    let origins = match wire.part {
        true => Some(origins_of(&wire.origins, request.keys.len())?),
        false => None,
    };
    let read = ReadRequest { verify, ..request.tile(&request.whole(), into.clone())? };
    let stream = call.state.read(read, shape, origins.as_ref())?;
    // It is set only here.
    let _ = let_go.set(LetGo { outbox: Arc::clone(outbox), id, told: AtomicBool::new(false) });
    let (call, outbox, doubts) = (Arc::clone(call), Arc::clone(outbox), Arc::clone(doubts));
    Ok(Reading { call, asked, into, stream, outbox, id, origins, doubts, let_go })
}

/// What earlier parts of a read told of its blocks.
fn origins_of(wire: &[Bytes], blocks: usize) -> Outcome<Arc<Origins>> {
    if wire.is_empty() {
        return Ok(Origins::any(blocks));
    }
    let one = |bytes: &Bytes| match bytes.len() {
        0 => Ok(None),
        _ => <[u8; 16]>::try_from(&bytes[..]).map(|id| Some(OriginId(id))),
    };
    let known = wire.iter().map(one).collect::<Result<Vec<_>, _>>();
    match known.ok().filter(|known| known.len() == blocks) {
        Some(known) => Ok(Origins::of(known)),
        None => Err(Fault::malformed(
            "origins: the field must have 16 bytes for each block, or be empty".to_owned(),
        )),
    }
}

impl Reading {
    /// Whether the executor that ends it may answer: the read is short enough to go before others, and its tenant has no
    /// bandwidth limit that would slow it down.
    pub(super) fn is_short(&self) -> bool {
        let chunks = u64::from(self.asked.shape.chunk_count()) * self.asked.request.keys.len() as u64;
        let is_slowed = self.call.caller.tenant.has_bandwidth();
        self.asked.bytes() <= SMALL_READ_BYTES && chunks <= SHORT_CHUNKS && !is_slowed
    }

    /// Whether it is over, and then whether everything came and can be answered at once.
    pub(super) fn poll_over(&self, context: &mut Context<'_>) -> Poll<bool> {
        self.stream.poll_over(context).map(|is_whole| is_whole && !self.has_failed())
    }

    /// Whether bytes did not get into the client's memory.
    fn has_failed(&self) -> bool {
        self.into.memories().any(|memory| memory.region().has_failed())
    }

    /// Answers a read that is over and came whole, all in one message: nothing waits here. What is left of it is the caller's
    /// to drop.
    pub(super) fn answer_at_once(self: Box<Self>) -> Box<Self> {
        let (mut announced, mut end) = (Announced::default(), None);
        while let (None, Some(event)) = (&end, self.stream.try_next()) {
            end = self.announce(event, &mut announced);
        }
        self.call.bytes_out.fetch_add(announced.bytes, Ordering::Relaxed);
        let mut answer = Vec::new();
        if !announced.wire.parts.is_empty() {
            answer = frame(Kind::Arrived, self.id, &announced.wire);
        }
        answer.extend(self.end(&end.unwrap_or_default()));
        answer.extend(bare(Kind::Released, self.id));
        if let Some(let_go) = self.let_go.get() {
            let_go.told.store(true, Ordering::Relaxed);
        }
        self.outbox.tell(answer);
        self
    }

    /// Puts what arrived to what is announced next; the end is given back.
    fn announce(&self, event: ReadEvent, announced: &mut Announced) -> Option<ReadEnd> {
        let (layers, blocks, layer, block) = match event {
            ReadEvent::Layer { layer, blocks } => {
                self.call.layer_ready(layer);
                (layer..layer + 1, 0..blocks, Some(proto::LayerReady { layer, blocks }), None)
            }
            ReadEvent::Block(block) => {
                (self.asked.request.layers.clone(), block..block + 1, None, Some(proto::BlockReady { block }))
            }
            ReadEvent::End(end) => return Some(end),
            ReadEvent::Released => return None,
        };
        announced.bytes += self.asked.shape.layers_bytes(&layers) * u64::from(blocks.end - blocks.start);
        let digests = self.digests(layers, blocks);
        announced.size += digests.len() + 16;
        announced.wire.parts.push(proto::local_arrived::Part { layer, digests: digests.into(), block });
        None
    }

    /// The frame that says how it ended; that is counted here.
    fn end(&self, end: &ReadEnd) -> Vec<u8> {
        self.call.end(Code::Ok);
        download::count(&self.call, &self.asked, end, None);
        let origin = |origin: Option<OriginId>| origin.map_or_else(Bytes::new, |id| id.0.to_vec().into());
        let met = self.origins.iter().flat_map(|origins| origins.met());
        let wire = proto::LocalEnd {
            end: Some(wire_end(end)),
            held_bytes: end.held_bytes,
            origins: met.map(origin).collect(),
        };
        frame(Kind::End, self.id, &wire)
    }

    /// Announces until the end. Dropping this cancels the read.
    pub(super) async fn run(self) {
        let end = loop {
            // ends: the read's deadline, which the store keeps; or the session ends
            let (mut next, mut announced) = (Some(self.stream.next().await), Announced::default());
            let end = loop {
                let Some(event) = next else { break None };
                if let Some(end) = self.announce(event, &mut announced) {
                    break Some(end);
                }
                next = if announced.size < ARRIVED_BYTES { self.stream.try_next() } else { None };
            };
            if self.has_failed() {
                // Noted before anything was announced that it concerns.
                break self.unwritten();
            }
            if !announced.wire.parts.is_empty() {
                // At its deadline it ends by itself; what it owes, the tenant's next requests wait for.
                let spent = self.call.caller.tenant.spend(announced.bytes);
                let _ = tokio::time::timeout_at(self.call.deadline, spent).await;
                self.call.bytes_out.fetch_add(announced.bytes, Ordering::Relaxed);
                self.outbox.room().await;
                self.outbox.push(frame(Kind::Arrived, self.id, &announced.wire));
            }
            if let Some(end) = end {
                break end;
            }
        };
        self.finish(end).await;
    }

    async fn finish(self, end: ReadEnd) {
        self.outbox.push(self.end(&end));
        let Self { call, asked, into, stream, doubts, let_go, .. } = self;
        // The client has its answer; its memory is let go before anything else is done.
        drop((into, stream, let_go));
        let suspects = end.failures.iter().filter(|(_, reason)| matches!(reason, Reason::Digest { .. }));
        let some = suspects.map(|(block, _)| *block).take_while(|_| doubts.may(Instant::now()));
        confirm(&call, &asked, some).await;
    }

    /// How it ends when bytes did not get into the client's memory. Devices may still write to other parts of it: all of it
    /// is held until the last word.
    fn unwritten(&self) -> ReadEnd {
        let failure = |block| (block, Reason::Busy(UNWRITTEN));
        let failures = (0..self.asked.request.keys.len() as u32).map(failure).collect();
        let held_bytes = self.into.memories().map(|memory| memory.len() as u64).sum();
        ReadEnd { failures, held_bytes, ..ReadEnd::default() }
    }

    /// The digests of some layers of some blocks, chunk by chunk; nothing where the server verifies itself.
    fn digests(&self, layers: Range<u32>, blocks: Range<u32>) -> Vec<u8> {
        let Some(digests) = self.into.digests() else { return Vec::new() };
        let mut bytes = Vec::new();
        for part in parts(&self.asked.shape, &layers) {
            for block in blocks.clone() {
                // One that is not known matches nothing that a client could compute but by chance.
                bytes.extend_from_slice(&digests.get(part, block).unwrap_or_default().to_le_bytes());
            }
        }
        bytes
    }
}

/// Reads blocks that did not match in a client's memory into memory of the server's own: the engine takes those out of
/// service that do not match there either. What the client has is not changed.
async fn confirm(call: &Arc<Call>, asked: &Download, suspects: impl Iterator<Item = u32>) {
    for block in suspects {
        let tile = Tile { blocks: block..block + 1, layers: asked.request.layers.clone() };
        let bytes = tile.bytes(&asked.shape);
        let taking = call.state.take_memory(&call.caller.tenant, bytes);
        let wait = tokio::time::timeout(limits::WAIT, taking).await;
        let Ok(Some(memory)) = wait else { continue };
        let Ok(into) = Placed::tile(Order::Blocks, &asked.shape, &tile, memory.share()) else { continue };
        let Ok(request) = asked.request.tile(&tile, into) else { continue };
        let request = ReadRequest { order: Order::Blocks, class: Class::Background, ..request };
        if let Ok(stream) = call.state.store().read(request) {
            // ends: the call's deadline, which the request has
            let ended = std::future::poll_fn(|context| stream.poll_end(context)).await;
            // Which block it is is not written down; and a client may make any number of them.
            if call.state.audit.may_tell() {
                let tenant = call.caller.tenant.name.as_str();
                let good = ended.is_ok_and(|end| end.failures.is_empty());
                tracing::info!(
                    tenant,
                    good,
                    "a block did not match its digest in a client's memory, and was read again"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_session_has_as_many_blocks_read_again_as_it_may() {
        let (doubts, start) = (Doubts::default(), Instant::now());
        let many = |now| (0..10 * CONFIRMED_MAX).filter(|_| doubts.may(now)).count() as u32;
        assert_eq!((many(start), many(start)), (CONFIRMED_MAX, 0));
        assert_eq!(many(start + CONFIRM_EVERY * 3), 3);
        assert_eq!(many(start + Duration::from_secs(1 << 30)), CONFIRMED_MAX);
    }
}
