//! The batches of one handle that are under way, those that ended, and the eventfds that say so.
//!
//! One lock guards it all, the eventfds' counts included: a completion is listed and its eventfd written in one
//! step, and the list is emptied and its eventfd read in one step. Hence an eventfd is readable exactly while
//! its list has something, for an engine that looks between two of its steps.
//!
//! Lock order: this lock, then the cell of a ticket or the queue of a stream. A waker is called with neither of
//! those held, but possibly with locks of the store; so nothing here calls the store under the lock, and what is
//! cancelled is dropped outside of it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, PoisonError, Weak};
use std::task::{Poll, Wake, Waker};

use kvarts_layout::BlockKey;
use rustix::event::{EventfdFlags, eventfd};

use super::asked::{Answer, Asked, CANCELLED, CLOSED, Piece, Told, tell};
use super::split::Split;
use super::touched::Touched;
use super::{BatchId, BatchKind, Completion, EventFds, Lane};
use crate::api::LeaseId;
use crate::error::{Error, Kind, Reason};
use crate::sync::{Mutex, MutexGuard};

/// One piece of a batch that was asked for.
struct Part {
    piece: Piece,
    /// Until it is answered.
    asked: Option<Asked>,
    answer: Option<Answer>,
}

/// A batch that was submitted.
pub(super) struct Batch {
    pub(super) kind: BatchKind,
    pub(super) split: Split,
    /// Blocks that the store was asked for, over all pieces.
    pub(super) blocks: usize,
    /// It has ended when its memory is no longer used.
    pub(super) until_free: bool,
}

struct UnderWay {
    batch: Batch,
    parts: Vec<Part>,
    /// Who still uses its memory.
    touched: Touched,
}

struct Ended {
    id: BatchId,
    batch: Batch,
    answers: Vec<(Piece, Answer)>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// Batches that have a place: reserved, under way, or ended and not drained.
    open: usize,
    under_way: BTreeMap<BatchId, UnderWay>,
    /// By lane.
    ended: [VecDeque<Ended>; 3],
    closed: bool,
}

pub(super) struct Desk {
    state: Mutex<State>,
    /// One for all lanes, or one for each.
    bells: Vec<OwnedFd>,
    batches_max: usize,
}

/// What a batch that ended holds.
#[derive(Default)]
pub(super) struct Held {
    pub(super) leases: Vec<LeaseId>,
    pub(super) keys: BTreeSet<BlockKey>,
}

impl Held {
    fn add(&mut self, lease: Option<LeaseId>, keys: &[BlockKey], results: &[Result<(), Reason>]) {
        if let Some(lease) = lease {
            self.leases.push(lease);
            let here = keys.iter().zip(results).filter(|(_, result)| result.is_ok());
            self.keys.extend(here.map(|(key, _)| *key));
        }
    }
}

/// A batch's place, given back when dropped before anything was asked under it.
pub(super) struct Reserved<'a> {
    desk: &'a Arc<Desk>,
    id: BatchId,
    taken: bool,
}

/// Wakes the desk for one batch. It does not keep the desk: a handle that is gone is not woken.
struct Notice {
    desk: Weak<Desk>,
    id: BatchId,
}

impl Wake for Notice {
    fn wake(self: Arc<Self>) {
        if let Some(desk) = self.desk.upgrade() {
            desk.look(self.id, &Waker::from(self));
        }
    }
}

impl UnderWay {
    /// Asks every piece that has not been answered how it is. Ready if the batch has ended; what is not needed any more comes
    /// back, to be dropped without the lock.
    fn poll(&mut self, waker: &Waker, used: &mut Vec<Asked>) -> Poll<()> {
        let mut ready = true;
        for part in &mut self.parts {
            let Some(asked) = &mut part.asked else { continue };
            match asked.poll(waker) {
                Poll::Pending => ready = false,
                Poll::Ready(answer) => {
                    part.answer = Some(answer);
                    used.extend(part.asked.take());
                }
            }
        }
        let ready = ready && (!self.batch.until_free || self.touched.is_over(waker));
        if ready { Poll::Ready(()) } else { Poll::Pending }
    }

    fn end(self, id: BatchId) -> Ended {
        let answers = self.parts.into_iter().filter_map(|part| Some((part.piece, part.answer?)));
        Ended { id, batch: self.batch, answers: answers.collect() }
    }
}

impl Desk {
    pub(super) fn new(fds: EventFds, batches_max: usize) -> std::io::Result<Arc<Self>> {
        let count = match fds {
            EventFds::One => 1,
            EventFds::PerLane => Lane::ALL.len(),
        };
        // Not blocking: a caller that reads one which was drained meanwhile must not hang.
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let bells = (0..count).map(|_| Ok(eventfd(0, flags)?)).collect::<std::io::Result<Vec<_>>>()?;
        Ok(Arc::new(Self { state: Mutex::default(), bells, batches_max }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bell(&self, lane: Lane) -> &OwnedFd {
        // There is always one, and three where it is not the only one.
        self.bells.get(lane.index()).unwrap_or(&self.bells[0])
    }

    pub(super) fn event_fd(&self, lane: Lane) -> BorrowedFd<'_> {
        self.bell(lane).as_fd()
    }

    pub(super) fn open(&self) -> usize {
        self.lock().open
    }

    /// A place for one more batch.
    pub(super) fn reserve(self: &Arc<Self>) -> Result<Reserved<'_>, Reason> {
        let mut state = self.lock();
        if state.closed {
            return Err(CLOSED);
        }
        if state.open >= self.batches_max {
            return Err(Reason::Busy(
                "the limit of batches under way is reached: drain the completions of earlier batches \
                first",
            ));
        }
        state.open += 1;
        state.next += 1;
        Ok(Reserved { desk: self, id: BatchId(state.next), taken: false })
    }

    /// Lists a batch that ended and rings. Under the lock: see the module's documentation.
    fn list(&self, state: &mut State, ended: Ended) {
        let lane = ended.batch.kind.lane();
        state.ended[lane.index()].push_back(ended);
        // Each one rings, although one would do: a caller that reads the eventfd at the wrong moment is rung for
        // again. The write can fail only at a count of 2^64 - 2, where the eventfd is readable anyway.
        let _ = rustix::io::write(self.bell(lane), &one());
    }

    /// Empties the eventfds of which no completion waits any more. Under the lock.
    fn hush(&self, state: &State) {
        for (index, bell) in self.bells.iter().enumerate() {
            let waits = match self.bells.len() {
                1 => state.ended.iter().any(|lane| !lane.is_empty()),
                _ => state.ended.get(index).is_some_and(|lane| !lane.is_empty()),
            };
            if !waits {
                // One that is empty already says so without blocking.
                let _ = rustix::io::read(bell, &mut [0_u8; 8]);
            }
        }
    }

    /// A batch was woken: lists it if it has ended.
    fn look(&self, id: BatchId, waker: &Waker) {
        let mut used = Vec::new();
        let mut state = self.lock();
        let Some(mut under_way) = state.under_way.remove(&id) else { return };
        match under_way.poll(waker, &mut used) {
            Poll::Pending => {
                state.under_way.insert(id, under_way);
            }
            Poll::Ready(()) => self.list(&mut state, under_way.end(id)),
        }
        drop(state);
        drop(used);
    }

    /// Ends a batch early; false if it has ended.
    pub(super) fn cancel(self: &Arc<Self>, id: BatchId) -> bool {
        let mut state = self.lock();
        let Some(under_way) = state.under_way.get_mut(&id) else { return false };
        under_way.batch.until_free = true;
        let mut dropped = Vec::new();
        for part in under_way.parts.iter_mut().filter(|part| part.asked.is_some()) {
            part.answer = Some(Answer::Failed(CANCELLED));
            dropped.extend(part.asked.take());
        }
        drop(state);
        drop(dropped);
        self.look(id, &Waker::from(Arc::new(Notice { desk: Arc::downgrade(self), id })));
        true
    }

    pub(super) fn drain(&self, lanes: &[Lane]) -> Vec<(Completion, Held)> {
        let mut ended = Vec::new();
        let mut state = self.lock();
        for lane in lanes {
            ended.extend(state.ended[lane.index()].drain(..));
        }
        state.open -= ended.len();
        self.hush(&state);
        drop(state);
        ended.into_iter().map(Ended::tell).collect()
    }

    /// The oldest batch that ended, of any lane.
    pub(super) fn drain_one(&self) -> Option<(Completion, Held)> {
        let mut state = self.lock();
        let oldest = state.ended.iter_mut().filter(|lane| !lane.is_empty());
        let ended = oldest.min_by_key(|lane| lane.front().map(|ended| ended.id))?.pop_front()?;
        state.open -= 1;
        self.hush(&state);
        drop(state);
        Some(ended.tell())
    }

    /// Ends everything; gives the leases that were not reported.
    pub(super) fn close(&self) -> Vec<LeaseId> {
        let mut state = self.lock();
        state.closed = true;
        let cancelled = std::mem::take(&mut state.under_way);
        let discarded = std::mem::take(&mut state.ended);
        state.open -= cancelled.len() + discarded.iter().map(VecDeque::len).sum::<usize>();
        self.hush(&state);
        drop(state);
        drop(cancelled);
        discarded.into_iter().flatten().flat_map(|ended| ended.tell().1.leases).collect()
    }
}

impl Reserved<'_> {
    /// Takes the place for something that was asked. What the store refused at once, all of it, and will not take later either,
    /// is refused here, too.
    pub(super) fn watch(
        mut self,
        batch: Batch,
        pieces: Vec<(Piece, Asked)>,
        touched: Touched,
    ) -> Result<BatchId, Reason> {
        let notice = Notice { desk: Arc::downgrade(self.desk), id: self.id };
        let waker = Waker::from(Arc::new(notice));
        let part = |(piece, asked)| Part { piece, asked: Some(asked), answer: None };
        let parts = pieces.into_iter().map(part).collect();
        let mut under_way = UnderWay { batch, parts, touched };
        let mut used = Vec::new();
        let mut state = self.desk.lock();
        if state.closed {
            drop(state);
            return Err(CLOSED);
        }
        // Polled under the lock: a wake that comes now waits for it, and then finds the batch.
        match under_way.poll(&waker, &mut used) {
            Poll::Pending => {
                state.under_way.insert(self.id, under_way);
            }
            Poll::Ready(()) => {
                let mut refusals = under_way.parts.iter().map(|part| match &part.answer {
                    Some(Answer::Put(Ok(Err(Error(reason)))) | Answer::Failed(reason)) => {
                        Some(reason.clone())
                    }
                    Some(Answer::Looked(Ok(Err(Error(reason))))) => Some(reason.clone()),
                    _ => None,
                });
                if let Some(Some(reason)) = refusals.next()
                    && refusals.all(|reason| reason.is_some())
                    && !matches!(reason.kind(), Kind::Retry | Kind::Deadline)
                {
                    drop(state);
                    return Err(reason);
                }
                self.desk.list(&mut state, under_way.end(self.id));
            }
        }
        drop(state);
        drop(used);
        self.taken = true;
        Ok(self.id)
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        if !self.taken {
            self.desk.lock().open -= 1;
        }
    }
}

impl Ended {
    /// Says for each key how it went; and what it holds.
    fn tell(self) -> (Completion, Held) {
        let Self { id, batch: Batch { kind, split, blocks, .. }, mut answers } = self;
        if let Some((piece, answer)) = answers.pop_if(|(piece, _)| piece.at.is_none()) {
            // The usual batch: nothing is to be put in order.
            let Told { results, written, lease } = tell(&piece.keys, answer);
            let mut held = Held::default();
            held.add(lease, &piece.keys, &results);
            return (Completion { id, kind, results: split.expand(kind, results), written, lease }, held);
        }
        let unsaid = || Err(Reason::Bug("no piece of the batch returned a result for a block"));
        let mut results: Vec<_> = std::iter::repeat_with(unsaid).take(blocks).collect();
        let (mut written, mut held) = (0, Held::default());
        for (piece, answer) in answers {
            let told = tell(&piece.keys, answer);
            written += told.written;
            held.add(told.lease, &piece.keys, &told.results);
            for (at, result) in piece.at.iter().flatten().zip(told.results) {
                if let Some(place) = results.get_mut(*at as usize) {
                    *place = result;
                }
            }
        }
        let lease = held.leases.first().copied();
        (Completion { id, kind, results: split.expand(kind, results), written, lease }, held)
    }
}

/// One, as an eventfd counts: in the machine's own byte order.
#[allow(
    clippy::host_endian_bytes,
    reason = "the kernel reads this word in host byte order, and the word is never stored"
)]
fn one() -> [u8; 8] {
    1_u64.to_ne_bytes()
}
