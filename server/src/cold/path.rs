//! The bucket as one of the paths of a read.
//!
//! A piece that is asked for here waits for what its flights bring and takes it from there, block by block and some layers at a
//! time, before and beside its being stored. What a flight has brought and let go of comes from the store. A piece
//! begins no flight itself: the read that it belongs to did, so what is asked of the bucket does not grow with the number of pieces.

use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

use kvarts_contract::api::{
    Digests, Order, Origins, ReadEnd, ReadEvent, ReadProgress, ReadRequest, ReadSink, ReadStream, Verify,
    read_channel,
};
use kvarts_contract::error::Reason;
use kvarts_layout::BlockKey;
use kvarts_peer::path::{Path, Piece};

use super::ColdTier;
use super::counts::add;
use super::landed::{Came, Look};
use super::restore::Flight;

/// The way to a bucket that is opened later.
#[derive(Debug, Default)]
pub(super) struct BucketPath(OnceLock<Weak<ColdTier>>);

impl BucketPath {
    /// The tier that it leads to.
    pub(super) fn leads_to(&self, cold: &Arc<ColdTier>) {
        // It is set once, by the tier itself.
        let _ = self.0.set(Arc::downgrade(cold));
    }
}

impl Path for BucketPath {
    fn read(&self, piece: Piece) -> Result<ReadStream, Reason> {
        let cold = self.0.get().and_then(Weak::upgrade);
        let cold = cold.ok_or_else(|| Reason::Away("the cold tier has stopped".to_owned()))?;
        let (sink, stream) = read_channel();
        let runtime = cold.runtime.clone();
        runtime.spawn(async move { cold.give(piece, &sink).await });
        Ok(stream)
    }
}

/// Where a block of a piece is to be had.
enum Where {
    /// In memory.
    Here(Came),
    /// In the store, if anywhere.
    Store,
    Lost,
}

impl ColdTier {
    /// Gives a piece, or says of each block why not. Nothing is written to its places when this has ended.
    async fn give(&self, Piece { request, origins, first }: Piece, sink: &ReadSink) {
        let cancelled = std::future::poll_fn(|context| sink.poll_cancelled(context));
        let deadline = request.deadline;
        tokio::select! {
            biased;
            // ends: the piece is given, or its reader leaves: one of the two arms
            () = cancelled => {
                if deadline.is_some_and(|deadline| deadline <= self.store.clock().now()) {
                    add(&self.counts.late_pieces, 1);
                }
            }
            end = self.give_all(request, &origins, first, sink) => sink.send(ReadEvent::End(end)),
        }
    }

    async fn give_all(
        &self,
        request: ReadRequest,
        origins: &Arc<Origins>,
        first: u32,
        sink: &ReadSink,
    ) -> ReadEnd {
        let shape = self.store.shape(request.namespace, request.group, request.coordinate);
        let all = shape.as_ref().map_or(0, |shape| shape.layers().len() as u32);
        let layers = request.layers.clone().unwrap_or(0..all);
        let mut progress = ReadProgress::new(request.order, request.keys.len() as u32, layers.clone());
        let mut at = 0u32;
        while let Some(key) = request.keys.get(at as usize) {
            let mut next = at.saturating_add(1);
            let given = match self.find(&request, key, &layers).await {
                Where::Here(came) => self.copy(&request, (at, first), &came, &layers, origins),
                Where::Lost => Err(Reason::NotHere(*key)),
                Where::Store => {
                    next = self.end_of_stored(&request, at);
                    let failed = self.read_stored(&request, (at..next, first), origins).await;
                    let good = (at..next).filter(|block| !failed.iter().any(|(bad, _)| bad == block));
                    good.for_each(|block| tell(&mut progress, block, sink));
                    failed.into_iter().for_each(|(block, reason)| progress.fail(block, reason));
                    at = next;
                    continue;
                }
            };
            match given {
                Ok(()) => tell(&mut progress, at, sink),
                Err(reason) => progress.fail(at, reason),
            }
            at = next;
        }
        progress.end(None)
    }

    /// Waits until it is known where a block is to be had.
    async fn find(&self, request: &ReadRequest, key: &BlockKey, layers: &Range<u32>) -> Where {
        while let Some(Flight { mut over, landed, .. }) = self.flight_of(request, key) {
            // What comes after the look is news.
            over.borrow_and_update();
            match landed.look(key, layers) {
                Look::Here(came) => return self.unless_expired(came),
                Look::InStore => return Where::Store,
                Look::Lost => return Where::Lost,
                // Its sender is gone when the flight is over: then there is no flight of it, or another one.
                // ends: the flight drops its sender, by `FLIGHT_TIMEOUT`; or the reader leaves
                Look::Coming => drop(over.changed().await),
            }
        }
        match self.kept_of(request, key).map(|landed| landed.look(key, layers)) {
            Some(Look::Here(came)) => self.unless_expired(came),
            _ => Where::Store,
        }
    }

    /// A block that came, if it is still to live: its memory is kept for some seconds.
    fn unless_expired(&self, came: Came) -> Where {
        let has_expired = came.has_expired(self.tier.access().time().wall_ms());
        if has_expired { Where::Lost } else { Where::Here(came) }
    }

    /// Where the blocks end that can be read from the store together with this one.
    fn end_of_stored(&self, request: &ReadRequest, at: u32) -> u32 {
        let behind = request.keys.iter().skip(at as usize + 1);
        let stored = behind
            .take_while(|key| self.flight_of(request, key).is_none() && self.kept_of(request, key).is_none())
            .count();
        at.saturating_add(1).saturating_add(stored as u32)
    }

    /// Copies a block that came to its places.
    fn copy(
        &self,
        request: &ReadRequest,
        (at, first): (u32, u32),
        came: &Came,
        layers: &Range<u32>,
        origins: &Origins,
    ) -> Result<(), Reason> {
        let key = request.keys.get(at as usize).copied().ok_or(Reason::OutOfBounds)?;
        let origin = came.origin().ok_or(Reason::NotHere(key))?;
        if !origins.admit(first.saturating_add(at) as usize, origin) {
            return Err(Reason::NotHere(key));
        }
        let mut given = 0;
        for (chunk, bytes) in came.chunks(layers).ok_or(Reason::NotHere(key))? {
            let place = request.into.chunk(chunk, at, bytes.len() as u64).ok_or(Reason::OutOfBounds)?;
            place.copy_from(0, &bytes, 0, bytes.len());
            if let Some((digests, digest)) = request.into.digests().zip(came.digest(chunk)) {
                digests.set(chunk, at, digest);
            }
            given += bytes.len() as u64;
        }
        add(&self.counts.given_bytes, given);
        Ok(())
    }

    /// Reads blocks from the store: those that did not come, and why.
    async fn read_stored(
        &self,
        request: &ReadRequest,
        (blocks, first): (Range<u32>, u32),
        origins: &Arc<Origins>,
    ) -> Vec<(u32, Reason)> {
        let all = |reason: &Reason| blocks.clone().map(|block| (block, reason.clone())).collect();
        let ordinals: Vec<u32> = blocks.clone().collect();
        let keys = request.keys.get(blocks.start as usize..blocks.end as usize).unwrap_or_default().to_vec();
        let into = match request.into.select(&ordinals) {
            Ok(into) => into,
            Err(reason) => return all(&reason),
        };
        let shape = match self.store.shape(request.namespace, request.group, request.coordinate) {
            Ok(shape) => shape,
            Err(error) => return all(&error.0),
        };
        let digests = request.into.digests().map(|_| Digests::new(&shape, ordinals.len() as u32));
        let into = match &digests {
            Some(digests) => into.with_digests(digests.clone()),
            None => into,
        };
        let (order, verify) = (Order::Blocks, Verify::Always);
        let part = ReadRequest { keys, into, order, verify, ..request.clone() };
        let stream = match self.store.read_part(part, origins, first.saturating_add(blocks.start)) {
            Ok(stream) => stream,
            Err(error) => return all(&error.0),
        };
        // ends: the read's deadline; or its reader leaves, which drops this
        let end = std::future::poll_fn(|context| stream.poll_end(context)).await;
        let Ok(end) = end else { return all(&Reason::Passing("the store stopped".to_owned())) };
        if let Some((from, to)) = digests.as_ref().zip(request.into.digests()) {
            for (at, block) in (0u32..).zip(blocks.clone()) {
                for chunk in 0..shape.chunk_count() {
                    from.get(chunk, at).into_iter().for_each(|digest| to.set(chunk, block, digest));
                }
            }
        }
        let failed = end.failures.into_iter();
        failed.map(|(block, reason)| (blocks.start.saturating_add(block), reason)).collect()
    }
}

/// A block is in its places.
fn tell(progress: &mut ReadProgress, block: u32, sink: &ReadSink) {
    if progress.order() == Order::Blocks && progress.block_done(block) {
        sink.send(ReadEvent::Block(block));
    }
}
