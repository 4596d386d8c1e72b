//! `Get` and `GetLayers`: the engine's reads as streams, tile by tile, without copying.
//!
//! One task works for each read. It takes memory for a tile, lets the engine fill it, and hands what the engine
//! announces to the connection; memory comes back when the connection has sent it. While one tile is sent the next
//! are read, as long as there is plenty of memory. A few tiles and messages of a read wait at a time, however
//! slow its client is, and one that takes nothing for a while is dropped.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kvarts_contract::api::{
    Arrived, Digests, Late, Order, Placed, ReadEnd, ReadProgress, TileBytes, TileMemory, TileSource,
    TiledRead, TiledRequest,
};
use kvarts_contract::buffers::{BufMut, SharedBuf};
use kvarts_contract::error::Reason;
use kvarts_layout::plan::{Tile, TileChunk, TileRange};
use kvarts_store::engine::TileRuns;
use tokio::sync::mpsc::Sender;
use tokio::time::Instant;
use tonic::Code;

use super::digest::StreamDigest;
use super::fault::{self, Fault, Outcome};
use super::frame::{self, Outgoing, Slot};
use super::unsent::{Unsent, UnsentGuard};
use super::{convert, limits};
use crate::calls::call::Call;
use crate::calls::download::{Download, count};
use crate::state::parts::Part as Charge;
use crate::state::tenant::Paid;
use crate::state::{CachedTile, NodeTiles, SharedBytes, TileStart};
use kvarts_wire::proto;
use kvarts_wire::proto::read_reply::Part;

/// A read whose tiles go to the connection.
type Reading = TiledRead<NodeTiles, WithTile>;

/// What goes with a tile.
#[derive(Debug)]
struct WithTile {
    /// The bandwidth that was taken for it.
    paid: Paid,
    /// Set if the tile is kept in memory once it has come.
    keep: Option<CacheCandidate>,
}

/// A tile that is kept for later reads when it has come whole.
#[derive(Debug)]
struct CacheCandidate {
    start: TileStart,
    /// The tile's memory without the charge and the mark of unsent bytes that belong to this read.
    memory: SharedBuf,
    /// Where its blocks lie.
    runs: TileRuns,
}

/// The next tile of a read, and its bytes if they are kept.
struct Next {
    tile: Tile,
    start: TileStart,
    cached: Option<Arc<CachedTile>>,
}

/// Where the tiles of a read go: to the connection.
struct Sending {
    call: Arc<Call>,
    download: Download,
    to: Sender<Outgoing>,
    slot: Arc<Slot>,
    /// What its memory belongs to until the client has taken it.
    guard: UnsentGuard,
    /// Of the messages sent so far. One task sends them, so this lock is never contended.
    digest: Mutex<StreamDigest>,
    large: LargeReads,
    /// The most bytes of a tile.
    most: u64,
}

/// How many large reads there are; counts one if it is large itself.
struct LargeReads {
    all: Arc<AtomicU64>,
    counted: bool,
}

impl LargeReads {
    fn enter(all: &Arc<AtomicU64>, bytes: u64) -> Self {
        let counted = bytes > limits::SMALL_READ_BYTES;
        if counted {
            all.fetch_add(1, Ordering::Relaxed);
        }
        Self { all: Arc::clone(all), counted }
    }

    fn count(&self) -> u64 {
        self.all.load(Ordering::Relaxed)
    }
}

impl Drop for LargeReads {
    fn drop(&mut self) {
        if self.counted {
            self.all.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Why a read stops before its last tile.
enum Stop {
    /// The client went away, or took nothing for too long.
    Gone,
    /// Nothing can be said of the blocks.
    Fault(Fault),
    /// The deadline passed: what was delivered is what there is.
    Late,
}

impl From<Reason> for Stop {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::DeadlineInPast => Self::Late,
            reason => Self::Fault(reason.into()),
        }
    }
}

impl From<Late> for Stop {
    fn from(_: Late) -> Self {
        Self::Late
    }
}

/// Works for one read until it has ended, or its client is gone, and nothing is held for it. `digest` is that of what it was asked
/// for, and what it sends waits in `slot`.
pub(super) async fn run(
    call: Arc<Call>,
    download: Download,
    digest: StreamDigest,
    (to, slot): (Sender<Outgoing>, Arc<Slot>),
) {
    let (unsent, guard) = Unsent::begin(&call, &slot);
    work(Arc::clone(&call), download, digest, (to, slot), guard).await;
    let cut = || {
        let tenant = call.caller.tenant.name.as_str();
        if call.state.audit.may_tell() {
            tracing::warn!(target: "audit", tenant, "a connection was closed, because its client did not \
                read the data");
        }
        if let Some(connection) = &call.connection {
            connection.cut();
        }
    };
    let stall_timeout = call.state.stall_timeout.get();
    unsent.until_gone(stall_timeout, cut).await;
}

async fn work(
    call: Arc<Call>,
    download: Download,
    digest: StreamDigest,
    (to, slot): (Sender<Outgoing>, Arc<Slot>),
    guard: UnsentGuard,
) {
    let most = call.state.at_once(&call.caller.tenant, limits::TILE_BYTES).min(call.state.memory.piece_max());
    let large = LargeReads::enter(&call.state.large_reads, download.bytes());
    let read = call.state.read_tiles(download.request.clone(), Arc::clone(&download.shape)).await;
    let sending = Sending { call, download, to, slot, guard, digest: Mutex::new(digest), large, most };
    let mut read = match read {
        Ok(read) => read.with_digests().with_whole_tiles(),
        Err(error) => return sending.refused(error.0).await,
    };
    let (ended, early) = match sending.all(&mut read).await {
        Ok(()) => (Ok(()), None),
        Err(Stop::Late) => (Ok(()), Some(Reason::DeadlinePassed)),
        Err(Stop::Fault(fault)) => {
            let reason = fault::reason(&fault.detail);
            (Err(fault), Some(reason))
        }
        Err(Stop::Gone) => return,
    };
    sending.finish(ended, &read.end(early.as_ref()), early.as_ref()).await;
}

impl Sending {
    /// Sends all tiles. An error says why there were no more.
    async fn all(&self, read: &mut Reading) -> Result<(), Stop> {
        loop {
            while read.under_way() == 0 {
                let Some(next) = self.next_tile(read) else { return Ok(()) };
                let (piece, charge) = self.memory(&next).await?;
                self.begin(read, next, piece, charge)?;
            }
            while read.under_way() <= self.ahead() {
                // What is wrong is told when it is this tile's turn. What is here needs no time before it.
                let next = self.next_tile(read).filter(|next| next.cached.is_none());
                let Some(next) = next else { break };
                let Some((piece, charge)) = self.spare_memory(&next) else { break };
                if self.begin(read, next, Some(piece), charge).is_err() {
                    break;
                }
            }
            // ends: the read's deadline; one that is gone has dropped its receiver
            while let Some(arrived) = read.next().await? {
                match arrived {
                    Arrived::Bytes(bytes) => self.bytes(&bytes).await?,
                    Arrived::Layer { layer, blocks } => {
                        self.say(Part::Layer(proto::LayerReady { layer, blocks })).await?;
                        self.call.layer_ready(layer);
                    }
                    Arrived::Block(block) => self.say(Part::Block(proto::BlockReady { block })).await?,
                }
            }
            self.keep(read);
        }
    }

    /// The next tile: as it is kept, or of as many bytes as may be now.
    fn next_tile(&self, read: &Reading) -> Option<Next> {
        let TiledRequest { namespace, group, coordinate, order, ref layers, ref keys, .. } =
            self.download.request;
        let (block, layer) = read.place();
        let (blocks, layers_end) = match order {
            Order::Layers => (Some(read.wanted_blocks()), None),
            Order::Blocks => (None, Some(layers.end)),
        };
        let key = *keys.get(block as usize)?;
        let start = TileStart { namespace, group, coordinate, key, layer, blocks, layers_end };
        let fits = |cached: Arc<CachedTile>| {
            let blocks = block..block.saturating_add(cached.tile.block_count());
            let tile = Tile { blocks, layers: cached.tile.layers.clone() };
            let is_least = tile.block_count() == 1 && tile.layer_count() == 1;
            let fits = is_least || tile.bytes(&self.download.shape) <= self.most;
            (fits && read.accepts(&tile)).then_some((tile, cached))
        };
        let kept = Some(&start).filter(|_| read.source().can_be_kept());
        let kept = kept.and_then(|start| self.call.state.memory.tiles().find(start));
        Some(match kept.and_then(fits) {
            Some((tile, cached)) => Next { tile, start, cached: Some(cached) },
            None => Next { tile: read.next_tile(self.tile_bytes())?, start, cached: None },
        })
    }

    /// Begins the next tile: gives what is kept, if it still is what would be read, or reads. A tile that was kept and is
    /// not what would be read is forgotten, and nothing is begun.
    fn begin(
        &self,
        read: &mut Reading,
        next: Next,
        piece: Option<BufMut>,
        (charge, paid): (Charge, Paid),
    ) -> Result<(), Reason> {
        let (tiles, Next { tile, start, cached }) = (self.call.state.memory.tiles(), next);
        if let Some(cached) = cached {
            let Some(stream) = read.source().recall(&tile, &cached.identity)? else {
                tiles.forget(&start, &cached);
                return Ok(());
            };
            let (buf, placed) = (self.charged(&cached.buf, charge), cached.placed.clone());
            tiles.count(true);
            read.give(TileMemory { tile, buf, placed, with: WithTile { paid, keep: None } }, stream);
            return Ok(());
        }
        let piece = piece.ok_or(Reason::Bug("a tile has no memory"))?.share();
        let buf = self.charged(&piece, charge);
        tiles.count(false);
        read.grant_by(tile, buf, |source, tile, placed| {
            if !source.can_be_kept() || !tiles.is_wanted(&start) {
                return Ok((source.begin(tile, placed)?, WithTile { paid, keep: None }));
            }
            let (stream, runs) = source.begin_known(tile, placed)?;
            Ok((
                stream,
                WithTile { paid, keep: runs.map(|runs| CacheCandidate { start, memory: piece, runs }) },
            ))
        })
    }

    /// Memory as this read has it: it counts as the tenant's until the client has taken it.
    fn charged(&self, piece: &SharedBuf, charge: Charge) -> SharedBuf {
        // The piece goes back before what it takes of a share.
        self.guard.keep(piece.clone().kept_by(Arc::new((piece.clone(), charge))))
    }

    /// Keeps the tile that has just ended, if all of it came and it was read before.
    fn keep(&self, read: &mut Reading) {
        let Some(whole) = read.take_whole() else { return };
        let Some(CacheCandidate { start, memory: piece, runs }) = &whole.with.keep else { return };
        let (tile, order, shape) = (&whole.tile, self.download.request.order, &self.download.shape);
        let placed = Placed::tile(order, shape, tile, piece.clone()).ok();
        let placed = placed.zip(whole.placed.digests()).map(|(placed, all)| placed.with_digests(all.clone()));
        let identity = read.source().identity(tile, runs.clone());
        let Some((placed, identity)) = placed.zip(identity) else { return };
        let (memory, tenant) = (&self.call.state.memory, self.call.caller.tenant.number);
        let bytes = tile.bytes(shape);
        let tile = Tile { blocks: 0..tile.block_count(), layers: tile.layers.clone() };
        let cached = CachedTile { tile, buf: piece.clone(), placed, identity };
        memory.keep(start.clone(), tenant, bytes, cached);
    }

    /// Memory for a tile, as soon as the tenant may have it; of one that is kept, what it takes of the tenant's share.
    async fn memory(&self, next: &Next) -> Result<(Option<BufMut>, (Charge, Paid)), Stop> {
        let bytes = next.tile.bytes(&self.download.shape);
        let (state, tenant, deadline) = (&self.call.state, &self.call.caller.tenant, self.call.deadline);
        // A read that waits for the tenant's own bandwidth keeps nothing from others meanwhile.
        let (paid, toll) = tenant.pay(bytes);
        let begins = Instant::now() + toll;
        let until = deadline.min(begins + limits::WAIT);
        let take = async {
            if !toll.is_zero() {
                tokio::time::sleep_until(begins).await;
            }
            let charge = state.charge(tenant, bytes).await?;
            Some(match next.cached {
                Some(_) => (None, charge),
                None => (Some(state.take_charged(tenant, bytes).await?), charge),
            })
        };
        let wait = tokio::select! {
            wait = tokio::time::timeout_at(until, take) => wait,
            // Who is gone waits for nothing.
            // ends: the time in the arm before it (`until`)
            () = self.to.closed() => return Err(Stop::Gone),
        };
        match wait {
            Ok(taken) => {
                let (piece, charge) = taken.ok_or(Reason::TooMany("bytes"))?;
                Ok((piece, (charge, paid)))
            }
            Err(_) if until == deadline => Err(Stop::Late),
            Err(_) => Err(Stop::Fault(Fault::busy("the server's memory for requests is full"))),
        }
    }

    /// Memory for a tile before its turn: only memory that others are not short of, and without waiting, since the read would
    /// hold other memory while it waits.
    fn spare_memory(&self, next: &Next) -> Option<(BufMut, (Charge, Paid))> {
        let (state, tenant) = (&self.call.state, &self.call.caller.tenant);
        let bytes = next.tile.bytes(&self.download.shape);
        let paid = tenant.try_pay(bytes)?;
        let charge = state.try_charge(tenant, bytes)?;
        Some((state.take_spare(tenant, bytes)?, (charge, paid)))
    }

    /// Bytes of the next tile, as things are now.
    fn tile_bytes(&self) -> u64 {
        let share = limits::UNDER_WAY_BYTES / 2 / self.large.count().max(1);
        let crowded = self.call.state.memory.is_crowded();
        self.most.min(if crowded { 0 } else { share }.max(limits::SMALL_TILE_BYTES))
    }

    /// How many tiles may be under way before their turn, as things are now.
    fn ahead(&self) -> usize {
        let share = limits::UNDER_WAY_BYTES / limits::SMALL_TILE_BYTES / self.large.count().max(1);
        match self.large.count() {
            0 | 1 => limits::TILES_AHEAD,
            _ => usize::from(share > 1),
        }
    }

    /// Sends bytes of a tile as they lie in its memory.
    async fn bytes(&self, bytes: &TileBytes<WithTile>) -> Result<(), Stop> {
        let (order, shape) = (self.download.request.order, &self.download.shape);
        let TileBytes { memory, layer, blocks, offset } = bytes;
        let about = proto::ReadData {
            layer: *layer,
            first_block: memory.tile.blocks.start + blocks.start,
            blocks: blocks.len() as u32,
            offset: *offset,
            ..proto::ReadData::default()
        };
        let digests = memory.placed.digests().ok_or(Reason::Bug("a tile has no digests"))?;
        let left = memory.tile.chunks(order, shape, *layer, blocks.clone()).into_iter();
        let mut chunks = Chunks { left, digests, now: None };
        let mut frame = FrameBuilder::new(about);
        for TileRange { offset: mut at, bytes: mut len } in
            memory.tile.ranges(order, shape, *layer, blocks.clone())
        {
            while len > 0 {
                let some = len.min((limits::FRAME_BYTES - frame.len) as u64);
                let buf = memory.buf.slice(at as usize, some as usize).ok_or(Reason::OutOfBounds)?;
                frame.push(shared_bytes(buf), &mut chunks);
                (at, len) = (at + some, len - some);
                if frame.len == limits::FRAME_BYTES {
                    self.data(&mut frame, &memory.with.paid).await?;
                }
            }
        }
        if frame.len > 0 {
            self.data(&mut frame, &memory.with.paid).await?;
        }
        Ok(())
    }

    async fn data(&self, frame: &mut FrameBuilder, paid: &Paid) -> Result<(), Stop> {
        let bytes = frame.len as u64;
        let outgoing = frame.take(&mut self.digest());
        paid.moved(bytes);
        self.call.bytes_out.fetch_add(bytes, Ordering::Relaxed);
        // ends: `stall_timeout`, by `send`
        self.send(outgoing).await
    }

    fn digest(&self) -> MutexGuard<'_, StreamDigest> {
        self.digest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a message that is no data.
    async fn say(&self, part: Part) -> Result<(), Stop> {
        let crc32 = self.digest().read(&part);
        // ends: `stall_timeout`, by `send`
        self.send(self.guard.follow(frame::message(part, crc32))).await
    }

    async fn send(&self, outgoing: Outgoing) -> Result<(), Stop> {
        match tokio::time::timeout(self.call.state.stall_timeout.get(), self.to.send(outgoing)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(Stop::Gone),
            Err(_) => {
                self.call.end(Code::DeadlineExceeded);
                self.slot.give_up();
                Err(Stop::Gone)
            }
        }
    }

    /// Ends a read of which nothing was begun.
    async fn refused(&self, reason: Reason) {
        let TiledRequest { order, layers, keys, .. } = &self.download.request;
        let nothing = ReadProgress::new(*order, keys.len() as u32, layers.clone());
        let (ended, early) = match reason {
            Reason::DeadlineInPast => (Ok(()), Reason::DeadlinePassed),
            reason => (Err(reason.clone().into()), reason),
        };
        self.finish(ended, &nothing.end(Some(&early)), Some(&early)).await;
    }

    async fn finish(&self, ended: Outcome<()>, end: &ReadEnd, early: Option<&Reason>) {
        self.call.end(ended.as_ref().map_or_else(|fault| fault.code, |()| Code::Ok));
        count(&self.call, &self.download, end, early);
        if ended.is_ok() && self.say(Part::End(convert::wire_end(end))).await.is_err() {
            return;
        }
        // A client that is gone needs no status.
        // ends: `stall_timeout`, by `send`
        let _ = self.send(Outgoing::End(ended)).await;
    }
}

/// Bytes of a tile that the engine has announced, to be sent as they are.
fn shared_bytes(buf: SharedBuf) -> Bytes {
    // SAFETY: the engine announced these bytes as complete, and what was announced stays as it is; the memory was
    // taken from the arena for this tile alone and goes back when the last of its buffers is dropped, so no other
    // code writes to it before the connection is done with it.
    unsafe { SharedBytes::bytes(buf.into()) }
}

/// Chunks from this size on have their digests put together instead of being digested a second time.
const KNOWN_BYTES: usize = 4096;

/// The chunks of a range in the order in which they are sent, each with what was put for it.
struct Chunks<'a> {
    left: std::vec::IntoIter<TileChunk>,
    digests: &'a Digests,
    /// The chunk under way: all of its bytes, those left of them, and its digest.
    now: Option<(usize, usize, Option<u32>)>,
}

impl Chunks<'_> {
    /// The next bytes of the range, `most` at the most: how many there are of one chunk; its digest, if they are all of
    /// it and it is known.
    fn take(&mut self, most: usize) -> (usize, Option<u32>) {
        if self.now.is_none_or(|(_, left, _)| left == 0) {
            let next = self.left.find(|chunk| chunk.bytes > 0);
            self.now = next.map(|TileChunk { part, block, bytes }| {
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                (bytes, bytes, self.digests.get(part, block))
            });
        }
        // What belongs to no chunk is digested as it is.
        let Some((all, left, digest)) = &mut self.now else { return (most, None) };
        let some = most.min(*left);
        *left -= some;
        (some, digest.filter(|_| some == *all && some >= KNOWN_BYTES))
    }
}

/// A message of data that is being put together.
///
/// The digest of its bytes is made of the digests that its chunks were put with, where it has whole ones: the engine has
/// compared them with the bytes, and what happens to the bytes after that is found at the other end.
struct FrameBuilder {
    about: proto::ReadData,
    crc: crc32fast::Hasher,
    bytes: Vec<Bytes>,
    len: usize,
}

impl FrameBuilder {
    fn new(about: proto::ReadData) -> Self {
        Self { about, crc: crc32fast::Hasher::new(), bytes: Vec::new(), len: 0 }
    }

    fn push(&mut self, bytes: Bytes, chunks: &mut Chunks<'_>) {
        let (mut at, mut undigested) = (0, 0);
        let digest = |crc: &mut crc32fast::Hasher, range: Range<usize>| {
            crc.update(bytes.get(range).unwrap_or_default());
        };
        while at < bytes.len() {
            let (some, known) = chunks.take(bytes.len() - at);
            if let Some(known) = known {
                digest(&mut self.crc, undigested..at);
                self.crc.combine(&crc32fast::Hasher::new_with_initial_len(known, some as u64));
                undigested = at + some;
            }
            at += some;
        }
        digest(&mut self.crc, undigested..at);
        self.len += bytes.len();
        self.bytes.push(bytes);
    }

    /// The message; what follows it in the range begins behind it.
    fn take(&mut self, digest: &mut StreamDigest) -> Outgoing {
        let crc32 = digest.read_data(&self.about, &std::mem::take(&mut self.crc), self.len);
        let outgoing = frame::data(&self.about, crc32, std::mem::take(&mut self.bytes));
        self.about.offset += std::mem::take(&mut self.len) as u64;
        outgoing
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_layout::{BlockShape, ChunkShape, LayerShape};
    use proptest::prelude::*;

    /// Messages of at most `most` bytes of a tile of blocks, with the bytes that they carry.
    fn messages(
        order: Order,
        sizes: &[u64],
        blocks: u32,
        most: usize,
        known: &[bool],
    ) -> Vec<(u32, Vec<u8>)> {
        let layer = LayerShape {
            layer: 0,
            chunks: sizes.iter().map(|&bytes| ChunkShape { bytes, align: 1 }).collect(),
        };
        let shape = BlockShape::new(vec![layer]).unwrap();
        let tile = Tile { blocks: 0..blocks, layers: 0..1 };
        let all: Vec<u8> = (0..tile.bytes(&shape)).map(|at| (at * at % 251) as u8).collect();
        let digests = Digests::new(&shape, blocks);
        let mut at = 0;
        let chunks = tile.chunks(order, &shape, 0, 0..blocks);
        for (TileChunk { part, block, bytes }, known) in chunks.iter().zip(known.iter().cycle()) {
            if *known {
                digests.set(*part, *block, crc32fast::hash(&all[at..at + *bytes as usize]));
            }
            at += *bytes as usize;
        }
        assert_eq!(at, all.len(), "the chunks are the range");
        let mut chunks = Chunks { left: chunks.into_iter(), digests: &digests, now: None };
        let mut frame = FrameBuilder::new(proto::ReadData::default());
        let mut found = Vec::new();
        for piece in all.chunks(most) {
            // Each message in two pieces.
            let (one, other) = piece.split_at(piece.len() / 3);
            for part in [one, other] {
                frame.push(Bytes::copy_from_slice(part), &mut chunks);
            }
            found.push((frame.crc.clone().finalize(), piece.to_vec()));
            let _ = frame.take(&mut StreamDigest::default());
        }
        found
    }

    proptest! {
        #[test]
        fn a_messages_digest_is_that_of_its_bytes_however_it_was_found(
            sizes in prop::collection::vec(prop_oneof![1u64..40, Just(4096), 4096u64..9000], 1..5),
            blocks in 1u32..5,
            most in prop_oneof![1usize..50, 4096usize..9000, Just(1 << 20)],
            known in prop::collection::vec(any::<bool>(), 1..4),
            by_blocks in any::<bool>(),
        ) {
            let order = if by_blocks { Order::Blocks } else { Order::Layers };
            for (digest, bytes) in messages(order, &sizes, blocks, most, &known) {
                prop_assert_eq!(digest, crc32fast::hash(&bytes));
            }
        }
    }

    #[test]
    fn bytes_that_changed_after_they_were_compared_are_found_at_the_other_end() {
        let shape = BlockShape::new(vec![LayerShape {
            layer: 0,
            chunks: vec![ChunkShape { bytes: 8192, align: 1 }],
        }])
        .unwrap();
        let digests = Digests::new(&shape, 1);
        digests.set(0, 0, crc32fast::hash(&[7; 8192]));
        let mut chunks = Chunks {
            left: vec![TileChunk { part: 0, block: 0, bytes: 8192 }].into_iter(),
            digests: &digests,
            now: None,
        };
        let mut frame = FrameBuilder::new(proto::ReadData::default());
        let mut bytes = vec![7; 8192];
        bytes[5000] ^= 1;
        frame.push(Bytes::from(bytes.clone()), &mut chunks);
        assert_ne!(frame.crc.finalize(), crc32fast::hash(&bytes));
    }
}
