//! A put from a client's memory: copied out of it piece by piece, compared with the digests that came with the request,
//! and only then stored.
//!
//! A client can rewrite its memory at any moment, also between two looks at it. So what is digested is what is stored:
//! a copy that no other process can reach.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crc32fast::Hasher;
use kvarts_contract::api::{BlockOutcome, Digests, Placed};
use kvarts_contract::buffers::BufMut;
use kvarts_contract::error::Reason;

use super::limits::{COPY_BYTES, DIGEST_BYTES};
use super::memory::Memory;
use super::places;
use crate::calls::call::Call;
use crate::calls::upload::{Pieces, Upload};
use kvarts_wire::convert::wire_outcomes;
use kvarts_wire::fault::{Fault, Outcome};
use kvarts_wire::limits;
use kvarts_wire::proto;

/// What a block is refused with that was changed on the way.
const CHANGED: &str = "the memory of the put changed during the put: write to the memory only after the put \
    has ended, and repeat the put";

/// A put that was checked.
pub(super) struct Putting {
    call: Arc<Call>,
    upload: Upload,
    from: Placed,
    digests: Vec<u32>,
}

impl Putting {
    pub(super) fn check(
        call: &Arc<Call>,
        memories: &BTreeMap<u32, Memory>,
        wire: proto::LocalPut,
    ) -> Outcome<Self> {
        let upload = Upload::check(call, wire.header.unwrap_or_default())?;
        let (expected, found) = (upload.keys.len() as u64, wire.crc32.len() as u64);
        if expected != found {
            return Err(Fault::malformed(format!("crc32: {found} digests were given for {expected} blocks")));
        }
        let holder: Arc<dyn Any + Send + Sync> = Arc::new(());
        let layers = 0..upload.shape.layers().len() as u32;
        let (from, _) =
            places::place(memories, &upload.shape, &layers, wire.from, upload.keys.len(), &holder)?;
        Ok(Self { call: Arc::clone(call), upload, from, digests: wire.crc32 })
    }

    /// Stores what it can.
    pub(super) async fn run(self) -> Outcome<proto::PutReply> {
        let Self { call, mut upload, from, digests } = self;
        upload.place(&call).await;
        let mut pieces = Pieces::default();
        let each = upload.piece_blocks(&call);
        let mut turn = None;
        for first in (0..upload.keys.len()).step_by(each) {
            let count = each.min(upload.keys.len() - first);
            let bytes = upload.shape.block_bytes() * count as u64;
            let tenant = &call.caller.tenant;
            if !call.state.puts.go_on(tenant, bytes, &mut turn).await {
                return Err(Fault::busy("the memory for puts is full"));
            }
            let wait = tokio::time::timeout(limits::WAIT, call.state.take_memory(tenant, bytes)).await;
            let pages = wait.map_err(|_| Fault::busy("the server's memory for requests is full"))?;
            let mut pages = pages.ok_or(Reason::TooMany("bytes"))?;
            let copied = copy(&upload, &from, first, count, &mut pages).await?;
            upload.place_again(&call).await;
            let pages = pages.share();
            call.bytes_in.fetch_add(bytes, Ordering::Relaxed);
            let block_bytes = upload.shape.block_bytes() as usize;
            let same = |block: usize| digests.get(first + block) == copied.blocks.get(block);
            // What changed on the way is refused, block by block; the runs in between are stored.
            let good: Vec<bool> = (0..count).map(same).collect();
            let mut at = 0;
            for run in good.chunk_by(|one, next| one == next) {
                let from = first + at;
                at += run.len();
                if run.first() == Some(&true) {
                    for run in upload.runs(from, from + run.len()) {
                        let within = run.start - first;
                        let part = pages.slice(within * block_bytes, run.len() * block_bytes);
                        let digests = Some(copied.digests(&upload, within, run.len()));
                        pieces.put(&upload, run, part.ok_or(Reason::OutOfBounds)?, digests, &call).await?;
                    }
                } else {
                    pieces.take_until(0).await?;
                    let refused = BlockOutcome::Refused(Reason::Busy(CHANGED));
                    pieces.outcomes.extend(std::iter::repeat_n(refused, run.len()));
                }
            }
        }
        pieces.take_until(0).await?;
        upload.offer(&call, &pieces.outcomes);
        call.state.trouble.put_ended(&pieces.outcomes, || call.state.engine.health());
        Ok(proto::PutReply { outcomes: wire_outcomes(&pieces.outcomes), crc32: 0 })
    }
}

/// What was copied: the digest of each block, and of each of its chunks.
#[derive(Default)]
struct Copied {
    blocks: Vec<u32>,
    chunks: Vec<u32>,
}

impl Copied {
    /// The digests of the chunks of some blocks, for the engine: no thread can change them any more.
    fn digests(&self, upload: &Upload, first: usize, blocks: usize) -> Digests {
        let digests = Digests::new(&upload.shape, blocks as u32);
        let each = upload.shape.chunk_count() as usize;
        for (block, chunks) in (0u32..).zip(self.chunks.chunks(each).skip(first).take(blocks)) {
            (0u32..).zip(chunks).for_each(|(part, digest)| digests.set(part, block, *digest));
        }
        digests
    }
}

/// Copies blocks in canonical order, and digests what it copied while the processor's caches have it.
async fn copy(
    upload: &Upload,
    from: &Placed,
    first: usize,
    blocks: usize,
    pages: &mut BufMut,
) -> Outcome<Copied> {
    let sizes: Vec<u64> =
        upload.shape.layers().iter().flat_map(|layer| &layer.chunks).map(|chunk| chunk.bytes).collect();
    let (mut copied, mut at, mut turn) = (Copied::default(), 0, 0);
    for block in first..first + blocks {
        let mut whole = Hasher::new();
        for (part, &bytes) in (0u32..).zip(&sizes) {
            let chunk = from.chunk(part, block as u32, bytes).ok_or(Reason::OutOfBounds)?;
            let mut digest = Hasher::new();
            for start in (0..chunk.len()).step_by(DIGEST_BYTES) {
                let some = DIGEST_BYTES.min(chunk.len() - start);
                pages.copy_from(at, &chunk, start, some);
                pages.digest(at, some, |bytes| {
                    digest.update(bytes);
                    // A block that is one chunk has its digest.
                    if sizes.len() > 1 {
                        whole.update(bytes);
                    }
                });
                at += some;
            }
            turn += chunk.len();
            copied.chunks.push(digest.finalize());
        }
        let only = copied.chunks.last().copied().filter(|_| sizes.len() == 1);
        copied.blocks.push(only.unwrap_or_else(|| whole.finalize()));
        if turn >= COPY_BYTES {
            turn = 0;
            tokio::task::yield_now().await;
        }
    }
    Ok(copied)
}
