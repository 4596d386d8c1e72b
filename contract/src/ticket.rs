//! Answers that come later: a ticket for the side that asked, a reply for the side that answers.
//!
//! An answer is given at most once. A question whose [`Ticket`] was dropped is cancelled, which the other side can see; one
//! whose [`Reply`] was dropped is [`Abandoned`]. So neither side waits for one that is gone.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::clock::{Clock, Nanos};
use crate::sync::{Condvar, Mutex, MutexGuard, Race, planted};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The other side went away without an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abandoned;

impl fmt::Display for Abandoned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the executor ended before the request was complete: reopen the store")
    }
}

impl std::error::Error for Abandoned {}

/// Where an answer is on its way.
enum Answer<T> {
    /// No answer yet; the waker of the last poll.
    Open(Option<Waker>),
    /// Answered and not taken.
    Here(T),
    /// Taken, or the reply was dropped.
    Gone,
    /// The ticket was dropped.
    Cancelled,
}

struct Cell<T> {
    answer: Mutex<Answer<T>>,
    arrived: Condvar,
}

impl<T> Cell<T> {
    /// Leaves `answer` for a ticket that still waits; gives it back if there is none.
    fn settle(&self, answer: Answer<T>) -> Result<(), Answer<T>> {
        let mut state = lock(&self.answer);
        let Answer::Open(waker) = &mut *state else { return Err(answer) };
        let waker = waker.take();
        *state = answer;
        drop(state);
        self.arrived.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok(())
    }
}

/// A question's two ends.
pub fn ticket<T>() -> (Reply<T>, Ticket<T>) {
    let cell = Arc::new(Cell { answer: Mutex::new(Answer::Open(None)), arrived: Condvar::new() });
    (Reply(Arc::clone(&cell)), Ticket(cell))
}

/// The answering end. Dropping it unanswered tells the ticket [`Abandoned`].
pub struct Reply<T>(Arc<Cell<T>>);

impl<T> fmt::Debug for Reply<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reply").field("cancelled", &self.is_cancelled()).finish()
    }
}

impl<T> Reply<T> {
    /// Answers. An answer whose ticket is gone comes back.
    pub fn send(self, answer: T) -> Result<(), T> {
        match self.0.settle(Answer::Here(answer)) {
            Err(Answer::Here(answer)) => Err(answer),
            _ => Ok(()),
        }
    }

    /// Whether the ticket was dropped: the work for the answer can stop.
    pub fn is_cancelled(&self) -> bool {
        matches!(*lock(&self.0.answer), Answer::Cancelled)
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        // Refused after an answer or a cancellation, which then stands.
        let _ = self.0.settle(Answer::Gone);
    }
}

/// The asking end: a future, a blocking wait, or a poll. Dropping it cancels the question.
///
/// The answer is given once; afterwards every way of asking says [`Abandoned`].
pub struct Ticket<T>(Arc<Cell<T>>);

impl<T> fmt::Debug for Ticket<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let open = matches!(*lock(&self.0.answer), Answer::Open(_));
        f.debug_struct("Ticket").field("open", &open).finish()
    }
}

impl<T> Ticket<T> {
    /// The answer, if it is there.
    pub fn try_take(&mut self) -> Option<Result<T, Abandoned>> {
        take(&mut lock(&self.0.answer))
    }

    /// Blocks the thread until the answer is there; `None` when `deadline` has passed by `clock`, and the ticket
    /// is then as good as before. Never on an executor's thread and never in a simulation, where time stands
    /// still while anything blocks.
    pub fn wait(&mut self, clock: &dyn Clock, deadline: Option<Nanos>) -> Option<Result<T, Abandoned>> {
        let mut state = lock(&self.0.answer);
        loop {
            if let Some(answer) = take(&mut state) {
                return Some(answer);
            }
            if planted(Race::TicketWaitsLate) {
                drop(state);
                state = lock(&self.0.answer);
            }
            state = match deadline {
                None => self.0.arrived.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.since(clock.now());
                    if left.is_zero() {
                        return None;
                    }
                    self.0.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

/// Takes the answer if it is there.
fn take<T>(state: &mut Answer<T>) -> Option<Result<T, Abandoned>> {
    if matches!(state, Answer::Open(_)) {
        return None;
    }
    match std::mem::replace(state, Answer::Gone) {
        Answer::Here(answer) => Some(Ok(answer)),
        _ => Some(Err(Abandoned)),
    }
}

impl<T> Future for Ticket<T> {
    type Output = Result<T, Abandoned>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = lock(&self.0.answer);
        if let Some(answer) = take(&mut state) {
            return Poll::Ready(answer);
        }
        if let Answer::Open(waker) = &mut *state
            && !waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()))
        {
            *waker = Some(cx.waker().clone());
        }
        Poll::Pending
    }
}

impl<T> Drop for Ticket<T> {
    fn drop(&mut self) {
        let unread = std::mem::replace(&mut *lock(&self.0.answer), Answer::Cancelled);
        // Outside the lock: an answer's destructor may do anything.
        drop(unread);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::clock::SystemClock;

    #[test]
    fn an_answer_is_taken_once_and_a_dropped_reply_is_abandoned() {
        let (reply, mut asked) = ticket();
        assert_eq!(asked.try_take(), None);
        assert_eq!(reply.send(7), Ok(()));
        assert_eq!(asked.try_take(), Some(Ok(7)));
        assert_eq!(asked.try_take(), Some(Err(Abandoned)));
        let (reply, mut asked) = ticket::<u8>();
        drop(reply);
        assert_eq!(asked.wait(&*SystemClock::new(), None), Some(Err(Abandoned)));
    }

    #[test]
    fn a_dropped_ticket_is_seen_by_the_reply_and_its_answer_comes_back() {
        let (reply, asked) = ticket();
        assert!(!reply.is_cancelled());
        drop(asked);
        assert!(reply.is_cancelled());
        assert_eq!(reply.send(7), Err(7));
    }

    #[test]
    fn a_wait_ends_at_its_deadline_and_can_be_repeated() {
        let clock = SystemClock::new();
        let (reply, mut asked) = ticket();
        let deadline = clock.now().plus(Duration::from_millis(5));
        assert_eq!(asked.wait(&*clock, Some(deadline)), None);
        assert!(clock.now() >= deadline);
        reply.send(1).unwrap();
        // An answer that is there is given, also after the deadline.
        assert_eq!(asked.wait(&*clock, Some(deadline)), Some(Ok(1)));
    }
}
