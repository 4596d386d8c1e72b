//! Room for blocks that an engine saves: where they lie before they are put, and afterwards for the next request.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, Durability, MAX_REQUEST_BLOCKS, Order, Parent, Placed, PutReply, PutRequest,
};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::ticket::Ticket;
use kvarts_layout::plan::{Stretch, Tile};
use kvarts_layout::{BlockKey, BlockShape};

use super::Inner;
use super::column::Column;
use super::extent::blocks_of;

/// Room in a pool: see [`Pool::draft`](super::Pool::draft). Dropping it frees the room.
#[derive(Debug)]
pub struct Draft {
    pool: Arc<Inner>,
    column: Column,
    first_block: u32,
    extents: Vec<(u64, Stretch)>,
}

/// The terms of a put, in addition to the blocks.
#[derive(Clone, Debug)]
pub struct DraftTerms {
    /// The predecessor of the first block.
    pub parent: Parent,
    /// When the put is acknowledged.
    pub durability: Durability,
    /// The time to live of the blocks.
    pub expires_after: Option<Duration>,
    /// When the caller stops waiting.
    pub deadline: Option<Nanos>,
}

impl Draft {
    pub(super) fn begin(
        pool: &Arc<Inner>,
        (column, shape): (Column, &Arc<BlockShape>),
        keys: &[BlockKey],
        first_block: u32,
        waits: bool,
    ) -> Result<Self, Error> {
        if keys.is_empty() {
            return Err(Reason::Empty.into());
        }
        if keys.len() > MAX_REQUEST_BLOCKS {
            return Err(Reason::TooMany("blocks").into());
        }
        let book = if waits { Some(pool.book()) } else { pool.book_soon() };
        let mut book = book.ok_or(Reason::Busy("another thread uses the pool: retry"))?;
        book.next_turn();
        let most = blocks_of(shape, book.counts().bytes) as usize;
        let mut extents: Vec<(u64, Stretch)> = Vec::new();
        let mut depth = first_block;
        for some in keys.chunks(most) {
            let Some((number, at)) = book.draft((column, shape), some, depth) else {
                // The room that was found is given back, without waiting for the book again.
                let waker = Waker::from(Arc::clone(&pool.news));
                extents.iter().for_each(|(number, _)| book.let_go(*number, pool.clock.now(), &waker));
                return Err(Reason::Busy(
                    "the pool is full, because other requests hold its blocks: \
                    retry when they end, or use a larger pool",
                )
                .into());
            };
            let count = some.len() as u32;
            extents.push((number, Stretch { at, blocks: count, first: 0, count }));
            depth = depth.saturating_add(count);
        }
        drop(book);
        Ok(Self { pool: Arc::clone(pool), column, first_block, extents })
    }

    /// The places of the blocks, in the order of the keys.
    pub fn stretches(&self) -> Vec<Stretch> {
        self.extents.iter().map(|(_, stretch)| *stretch).collect()
    }

    /// Puts the blocks from their places; their bytes must not change any more. Stages find the stored blocks in the pool from
    /// then on, if the pool has staged blocks of their namespace before.
    pub fn put(self, terms: &DraftTerms) -> Storing {
        let mut requests = Vec::with_capacity(self.extents.len());
        let book = self.pool.book();
        let (mut before, mut first_block) = (None, self.first_block);
        for (number, stretch) in &self.extents {
            let Some(extent) = book.extent(*number) else { continue };
            let tile = Tile { blocks: 0..stretch.count, layers: 0..extent.shape.layers().len() as u32 };
            // The room is not used again before the store has let go of the request.
            let from = Placed::tile(Order::Layers, &extent.shape, &tile, extent.memory.clone());
            let Column { namespace, group, coordinate } = self.column;
            let request = from.map(|from| PutRequest {
                parent: terms.parent.behind(before.as_ref()),
                first_block: Some(first_block),
                durability: terms.durability,
                expires_after: terms.expires_after,
                deadline: terms.deadline,
                ..PutRequest::new(namespace, group, coordinate, extent.keys.clone(), from)
            });
            requests.push(request);
            before = extent.keys.last().copied();
            first_block = first_block.saturating_add(stretch.count);
        }
        let store = book.store();
        drop(book);
        let answer = |(request, (_, stretch)): (Result<PutRequest, Reason>, &(u64, Stretch))| match request {
            Ok(request) => Answer::Waits(store.put(request), stretch.count),
            Err(reason) => Answer::Is(vec![BlockOutcome::Refused(reason); stretch.count as usize]),
        };
        let answers = requests.into_iter().zip(&self.extents).map(answer).collect();
        Storing { draft: Some(self), answers }
    }

    /// The blocks were put from here, and these are the outcomes: what was stored is here for stages from now on. What another one had stored
    /// before is not: its bytes are its own. Nor is any of them where the pool did not know the deletes in the namespace before the put,
    /// that is, where it has staged nothing of it yet.
    pub(super) fn keep(self, outcomes: &[BlockOutcome]) {
        let mut book = self.pool.book();
        let mut outcomes = outcomes.iter();
        for (number, stretch) in &self.extents {
            let some = outcomes.by_ref().take(stretch.count as usize);
            let stored: Vec<bool> = some.map(|outcome| *outcome == BlockOutcome::Stored).collect();
            book.keep(*number, self.column, &stored);
        }
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        let waker = Waker::from(Arc::clone(&self.pool.news));
        let now = self.pool.clock.now();
        let mut book = self.pool.book();
        self.extents.iter().for_each(|(number, _)| book.let_go(*number, now, &waker));
    }
}

#[derive(Debug)]
enum Answer {
    Waits(Ticket<Result<PutReply, Error>>, u32),
    Is(Vec<BlockOutcome>),
}

/// A put from a pool, with an outcome for each block. If it is dropped early, it is unknown which blocks are stored.
#[derive(Debug)]
#[must_use = "the result of the put is known only when the put ends: wait for the put"]
pub struct Storing {
    draft: Option<Draft>,
    answers: Vec<Answer>,
}

impl Future for Storing {
    type Output = Vec<BlockOutcome>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Vec<BlockOutcome>> {
        let mut is_over = true;
        for answer in &mut self.answers {
            let Answer::Waits(ticket, count) = answer else { continue };
            let Poll::Ready(reply) = Pin::new(ticket).poll(context) else {
                is_over = false;
                continue;
            };
            let all = |reason: Reason| vec![BlockOutcome::Refused(reason); *count as usize];
            *answer = Answer::Is(match reply {
                Ok(Ok(reply)) if reply.outcomes.len() == *count as usize => reply.outcomes,
                Ok(Ok(_)) => all(Reason::Bug("the reply has a wrong number of blocks")),
                Ok(Err(error)) => all(error.0),
                Err(_) => all(Reason::Busy("the store is closing")),
            });
        }
        if !is_over {
            return Poll::Pending;
        }
        let outcomes = |answer: &mut Answer| match answer {
            Answer::Is(outcomes) => std::mem::take(outcomes),
            Answer::Waits(..) => Vec::new(),
        };
        let outcomes: Vec<_> = self.answers.iter_mut().flat_map(outcomes).collect();
        if let Some(draft) = self.draft.take() {
            draft.keep(&outcomes);
        }
        Poll::Ready(outcomes)
    }
}
