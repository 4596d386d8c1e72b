//! The batches of one handle that are under way, those that ended, and the eventfds that say so.
//!
//! One lock guards it all, the eventfds' counts included: a completion is listed and its eventfd written in one
//! step, and the list is emptied and its eventfd read in one step. Hence an eventfd is readable exactly while
//! its list has something, for whoever looks between two steps.
//!
//! Lock order: this lock, then the cell of a ticket or the queue of a stream. A waker is called with neither of
//! those held, but possibly with locks of the store; so nothing here calls the store under the lock, and what is
//! cancelled is dropped outside of it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::{Arc, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};

use rustix::event::{EventfdFlags, eventfd};

use super::split::Split;
use super::{BatchId, BatchKind, Completion, EventFds, Lane};
use crate::api::{BlockOutcome, LeaseId, PutReply, ReadEnd, ReadStream};
use crate::error::{Error, Reason};
use crate::rt::mailbox::{Abandoned, Ticket};
use crate::sync::{Mutex, MutexGuard};

const CLOSED: Reason = Reason::Busy("the handle is closed");
const STOPPED: Reason = Reason::Busy("the store is closing");

/// What a batch waits for.
pub(super) enum Asked {
    Put(Ticket<Result<PutReply, Error>>),
    Get(ReadStream),
}

/// How a batch ended, before it is told key by key.
pub(super) enum Answer {
    Put(Result<Result<PutReply, Error>, Abandoned>),
    Get(Result<ReadEnd, Abandoned>),
    Looked { results: Vec<Result<(), Reason>>, lease: Option<LeaseId> },
}

struct UnderWay {
    kind: BatchKind,
    split: Split,
    /// Keys that the store was asked for.
    keys: usize,
    asked: Asked,
}

struct Ended {
    id: BatchId,
    kind: BatchKind,
    split: Split,
    keys: usize,
    answer: Answer,
}

#[derive(Default)]
struct State {
    next: u64,
    /// Batches that have a reserved: reserved, under way, or ended and not drained.
    open: usize,
    under_way: BTreeMap<BatchId, UnderWay>,
    /// By lane.
    ended: [Vec<Ended>; 3],
    closed: bool,
}

pub(super) struct Desk {
    state: Mutex<State>,
    /// One for all lanes, or one for each.
    bells: Vec<OwnedFd>,
    batches_max: usize,
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

impl Asked {
    fn poll(&mut self, waker: &Waker) -> Poll<Answer> {
        let mut context = Context::from_waker(waker);
        match self {
            Self::Put(ticket) => Pin::new(ticket).poll(&mut context).map(Answer::Put),
            Self::Get(stream) => stream.poll_end(&mut context).map(Answer::Get),
        }
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
            return Err(Reason::Busy("too many batches are under way: drain completions"));
        }
        state.open += 1;
        state.next += 1;
        Ok(Reserved { desk: self, id: BatchId(state.next), taken: false })
    }

    /// Lists a batch that ended and rings. Under the lock: see the module's documentation.
    fn list(&self, state: &mut State, ended: Ended) {
        let lane = ended.kind.lane();
        state.ended[lane.index()].push(ended);
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
        let mut state = self.lock();
        let Some(mut batch) = state.under_way.remove(&id) else { return };
        match batch.asked.poll(waker) {
            Poll::Pending => {
                state.under_way.insert(id, batch);
            }
            Poll::Ready(answer) => {
                let UnderWay { kind, split, keys, asked } = batch;
                self.list(&mut state, Ended { id, kind, split, keys, answer });
                drop(state);
                drop(asked);
            }
        }
    }

    pub(super) fn drain(&self, lanes: &[Lane], out: &mut Vec<Completion>) -> usize {
        let mut ended = Vec::new();
        let mut state = self.lock();
        for lane in lanes {
            ended.append(&mut state.ended[lane.index()]);
        }
        state.open -= ended.len();
        self.hush(&state);
        drop(state);
        let drained = ended.len();
        out.extend(ended.into_iter().map(Ended::tell));
        drained
    }

    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let cancelled = std::mem::take(&mut state.under_way);
        let discarded = std::mem::take(&mut state.ended);
        state.open -= cancelled.len() + discarded.iter().map(Vec::len).sum::<usize>();
        self.hush(&state);
        drop(state);
        drop((cancelled, discarded));
    }
}

impl Reserved<'_> {
    pub(super) fn id(&self) -> BatchId {
        self.id
    }

    /// Takes the reserved for something that was asked. What the store refused at once is refused here, too.
    pub(super) fn watch(
        mut self,
        kind: BatchKind,
        split: Split,
        keys: usize,
        mut asked: Asked,
    ) -> Result<BatchId, Reason> {
        let notice = Notice { desk: Arc::downgrade(self.desk), id: self.id };
        let waker = Waker::from(Arc::new(notice));
        let mut state = self.desk.lock();
        if state.closed {
            drop(state);
            return Err(CLOSED);
        }
        // Polled under the lock: a wake that comes now waits for it, and then finds the batch.
        match asked.poll(&waker) {
            Poll::Pending => {
                state.under_way.insert(self.id, UnderWay { kind, split, keys, asked });
            }
            Poll::Ready(Answer::Put(Ok(Err(Error(reason))))) => {
                drop(state);
                return Err(reason);
            }
            Poll::Ready(answer) => {
                self.desk.list(&mut state, Ended { id: self.id, kind, split, keys, answer })
            }
        }
        drop(state);
        self.taken = true;
        Ok(self.id)
    }

    /// Takes the reserved for something that is answered already.
    pub(super) fn answer(mut self, kind: BatchKind, answer: Answer) -> Result<BatchId, Reason> {
        let mut state = self.desk.lock();
        if state.closed {
            drop(state);
            return Err(CLOSED);
        }
        self.desk.list(&mut state, Ended { id: self.id, kind, split: Split::default(), keys: 0, answer });
        drop(state);
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
    /// Says for each key how it went.
    fn tell(self) -> Completion {
        let Self { id, kind, split, keys, answer } = self;
        let all = |reason: Reason| vec![Err(reason); keys];
        let (mut written, mut held) = (0, None);
        let results = match answer {
            Answer::Put(Ok(Ok(reply))) => {
                written = reply.outcomes.iter().filter(|one| **one == BlockOutcome::Stored).count() as u32;
                reply.outcomes.into_iter().map(stored).collect()
            }
            Answer::Put(Ok(Err(Error(reason)))) => all(reason),
            Answer::Put(Err(Abandoned)) | Answer::Get(Err(Abandoned)) => all(STOPPED),
            Answer::Get(Ok(end)) => {
                let mut results = vec![Ok(()); keys];
                for (place, reason) in end.failures {
                    if let Some(result) = results.get_mut(place as usize) {
                        *result = Err(reason);
                    }
                }
                results
            }
            Answer::Looked { results, lease } => {
                held = lease;
                results
            }
        };
        Completion { id, kind, results: split.expand(kind, results), written, lease: held }
    }
}

fn stored(outcome: BlockOutcome) -> Result<(), Reason> {
    match outcome {
        BlockOutcome::Stored | BlockOutcome::AlreadyThere => Ok(()),
        BlockOutcome::InFlight => Err(Reason::InFlight),
        BlockOutcome::Refused(reason) => Err(reason),
    }
}

/// One, as an eventfd counts: in the machine's own byte order.
#[allow(clippy::host_endian_bytes, reason = "the kernel reads this word in host order; it is never stored")]
fn one() -> [u8; 8] {
    1_u64.to_ne_bytes()
}
