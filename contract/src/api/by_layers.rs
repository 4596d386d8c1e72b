//! A put of layers that arrive one after the other: the store writes each layer when it is offered.
//!
//! The layers share the caller's memory ([`Placed::gated_layers`]). The caller offers a layer, the store writes it, and the caller may then
//! use the memory for a later layer. No part of the blocks is visible, in memory or after a crash, before the put is sealed. A put that is
//! dropped unsealed leaves nothing.

use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll};

use kvarts_layout::BlockShape;

use super::{Placed, PutReply, StepGate};
use crate::error::{Error, Reason, ShapeCause};
use crate::sync::Mutex;
use crate::ticket::{Ticket, ticket};

/// The state that both ends of a put by layers share.
#[derive(Debug)]
pub struct Progress {
    /// The number of leading layers that the store may write; one more when the put is sealed.
    pub offered: StepGate,
    /// The number of leading layers that the store has written; the maximum number when the put has ended.
    pub written: StepGate,
    /// The digest of each chunk, block by block, each in canonical order; empty if one has no memory, which would be a
    /// defect: nothing is stored then.
    digests: Mutex<Vec<u32>>,
}

impl Progress {
    /// The digests of all blocks.
    pub fn digests(&self) -> Vec<u32> {
        self.digests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Marks the end of all writes.
    pub fn end(&self) {
        self.written.open(u32::MAX);
    }
}

/// A put of layers that arrive one after the other. Dropping it unsealed stores nothing. Offered memory belongs to the store until
/// [`LayeredPut::written`] reports its layers, or until its last buffer is dropped.
pub struct LayeredPut {
    from: Placed,
    shape: Arc<BlockShape>,
    offered: u32,
    progress: Arc<Progress>,
    answer: Option<Ticket<Result<PutReply, Error>>>,
}

impl LayeredPut {
    /// Creates the caller's end, and the store's end.
    pub fn new(
        from: Placed,
        shape: Arc<BlockShape>,
        offered: StepGate,
        answer: Ticket<Result<PutReply, Error>>,
    ) -> (Self, Arc<Progress>) {
        let chunks: usize = shape.layers().iter().map(|layer| layer.chunks.len()).sum();
        let digests = Mutex::new(vec![0; chunks * from.block_count() as usize]);
        let progress = Arc::new(Progress { offered, written: StepGate::new(0), digests });
        (Self { from, shape, offered: 0, progress: Arc::clone(&progress), answer: Some(answer) }, progress)
    }

    /// Offers every layer below `layers`. Their bytes must be in their places, and must not change until they have been written. This
    /// thread computes the digests of the new layers.
    pub fn offer(&mut self, layers: u32) {
        let layers = layers.min(self.shape.layers().len() as u32);
        {
            let mut digests = self.progress.digests.lock().unwrap_or_else(PoisonError::into_inner);
            let before = |layer: u32| {
                let earlier = self.shape.layers().iter().take(layer as usize);
                earlier.map(|layer| layer.chunks.len() as u32).sum::<u32>()
            };
            let (chunks, first) = (before(u32::MAX), before(self.offered));
            let sizes = self.shape.layers().iter().flat_map(|layer| &layer.chunks).map(|chunk| chunk.bytes);
            let new =
                (0u32..).zip(sizes).skip(first as usize).take((before(layers).max(first) - first) as usize);
            for (part, bytes) in new {
                for block in 0..self.from.block_count() {
                    let chunk = self.from.chunk(part, block, bytes);
                    let Some(chunk) = chunk else {
                        digests.clear();
                        continue;
                    };
                    let digest = chunk.digest(0, chunk.len(), crc32fast::hash);
                    if let Some(slot) = digests.get_mut((block * chunks + part) as usize) {
                        *slot = digest;
                    }
                }
            }
        }
        self.offered = self.offered.max(layers);
        self.progress.offered.open(self.offered);
    }

    /// The number of leading layers whose memory the caller may use again. After the end of the put it exceeds the number of layers.
    pub fn layers_written(&self) -> u32 {
        self.progress.written.opened()
    }

    /// Completes when every layer below `layers` has been written, or the put has ended.
    pub async fn written(&self, layers: u32) {
        self.written_so_far().until(layers).await;
    }

    /// The progress of the put, for a thread other than the offering thread.
    pub fn written_so_far(&self) -> Written {
        Written(Arc::clone(&self.progress))
    }

    /// Completes the blocks. Every layer must have been offered; otherwise nothing is stored, and the answer reports it. The answer is the
    /// same as of any put, and dropping the ticket cancels the work that has not begun.
    pub fn seal(mut self) -> Ticket<Result<PutReply, Error>> {
        let layers = self.shape.layers().len() as u32;
        if self.offered == layers
            && let Some(answer) = self.answer.take()
        {
            self.progress.offered.open(layers + 1);
            return answer;
        }
        let (reply, answer) = ticket();
        let unfinished = ShapeCause::Unfinished { offered: self.offered, count: layers };
        let _ = reply.send(Err(Reason::Shape(unfinished).into()));
        answer
    }

    /// The answer, with the reason, if the put ended before it was sealed.
    pub fn ended(&mut self) -> Option<Result<PutReply, Error>> {
        self.answer.as_mut()?.try_take()?.ok()
    }
}

/// The number of written layers of a put.
#[derive(Clone, Debug)]
pub struct Written(Arc<Progress>);

impl Written {
    /// Completes when every layer below `layers` has been written, or the put has ended.
    pub async fn until(&self, layers: u32) {
        poll_fn(|context| self.poll(layers, context)).await;
    }

    fn poll(&self, layers: u32, context: &mut Context<'_>) -> Poll<()> {
        let Some(last) = layers.checked_sub(1) else { return Poll::Ready(()) };
        if self.0.written.is_open_or_wake(last, context.waker()) { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for LayeredPut {
    fn drop(&mut self) {
        // A ticket that is gone stops the put; the task that waits for the next layer must look.
        self.answer = None;
        self.progress.offered.nudge();
    }
}

impl fmt::Debug for LayeredPut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LayeredPut({} of {} layers offered)", self.offered, self.shape.layers().len())
    }
}
