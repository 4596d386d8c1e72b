//! A connection as the server and its calls know it: whether anybody on it has shown a token, what is under way on it,
//! and when it ends because nothing is.
//!
//! Until a call was let in, nobody knows who is at the other end. Such a stranger has so many bytes and so long, and is the
//! first to go where all places are taken: whoever has a token finds one.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;

use futures_util::task::AtomicWaker;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::limits;
use crate::state::StallTimeout;

/// Connections on which nobody has shown a token yet, oldest first.
#[derive(Default, Debug)]
pub struct Strangers {
    lines: Mutex<BTreeMap<u64, Weak<LineState>>>,
    next: AtomicU64,
    /// Calls that need no token, under way on all connections.
    calls: AtomicUsize,
}

/// A connection.
#[derive(Clone, Debug)]
pub(super) struct Line(Arc<LineState>);

#[derive(Debug)]
struct LineState {
    number: u64,
    strangers: Arc<Strangers>,
    place: Mutex<Option<OwnedSemaphorePermit>>,
    is_known: AtomicBool,
    is_cut: AtomicBool,
    /// Whoever reads from the connection.
    reader: AtomicWaker,
    /// Calls under way that need no token.
    anybodys: AtomicUsize,
    work: Mutex<Work>,
}

/// What is under way on a connection.
#[derive(Debug)]
struct Work {
    /// When the connection came in.
    since: Instant,
    calls: usize,
    /// When the last call ended.
    rested: Instant,
    /// Answers that the transport has, by when it got them. Numbers grow, so the first is the oldest.
    answers: BTreeMap<u64, Instant>,
    next: u64,
}

/// A call under way on a connection, for as long as it lives.
#[derive(Debug)]
pub(super) struct OnLine(Line);

/// An answer that the transport has, for as long as it lives.
#[derive(Debug)]
pub(super) struct Answered {
    line: Line,
    number: u64,
}

/// A call that needs no token, for as long as it lives.
#[derive(Debug)]
pub(super) struct Anybodys(Line);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Strangers {
    /// Connections of strangers, and calls without a token that are under way on all connections.
    pub fn count(&self) -> (usize, usize) {
        (lock(&self.lines).len(), self.calls.load(Ordering::Relaxed))
    }

    /// The place of the stranger who has been here for longest, who is cut off; none if there is none who has been here for
    /// long enough to have said who it is.
    pub(super) fn displace(&self, now: Instant) -> Option<OwnedSemaphorePermit> {
        loop {
            let (_, line) = lock(&self.lines).pop_first()?;
            let Some(line) = line.upgrade().map(Line) else { continue };
            if now.saturating_duration_since(lock(&line.0.work).since) < limits::STRANGERS_GRACE {
                lock(&self.lines).insert(line.0.number, Arc::downgrade(&line.0));
                return None;
            }
            let place = lock(&line.0.place).take();
            line.cut();
            if place.is_some() {
                return place;
            }
        }
    }
}

impl Line {
    /// A connection that came in now.
    pub(super) fn new(strangers: &Arc<Strangers>, place: Option<OwnedSemaphorePermit>) -> Self {
        let (now, number) = (Instant::now(), strangers.next.fetch_add(1, Ordering::Relaxed));
        let line = Arc::new(LineState {
            number,
            strangers: Arc::clone(strangers),
            place: Mutex::new(place),
            is_known: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
            reader: AtomicWaker::new(),
            anybodys: AtomicUsize::new(0),
            work: Mutex::new(Work { since: now, calls: 0, rested: now, answers: BTreeMap::new(), next: 0 }),
        });
        lock(&strangers.lines).insert(number, Arc::downgrade(&line));
        Self(line)
    }

    /// A call was let in: whoever is there is no stranger any more.
    pub(super) fn begin(&self) -> OnLine {
        if !self.0.is_known.swap(true, Ordering::Relaxed) {
            lock(&self.0.strangers.lines).remove(&self.0.number);
        }
        lock(&self.0.work).calls += 1;
        OnLine(self.clone())
    }

    /// The transport gets an answer.
    pub(super) fn answer(&self) -> Answered {
        let mut work = lock(&self.0.work);
        let number = work.next;
        work.next += 1;
        work.answers.insert(number, Instant::now());
        Answered { line: self.clone(), number }
    }

    /// A call without a token begins, if the connection may have one more of them.
    pub(super) fn anybodys(&self) -> Option<Anybodys> {
        self.0.strangers.calls.fetch_add(1, Ordering::Relaxed);
        let before = self.0.anybodys.fetch_add(1, Ordering::Relaxed);
        let call = Anybodys(self.clone());
        (before < limits::ANYBODYS_CALLS_MAX).then_some(call)
    }

    /// Ends the connection, with all of its streams and what is kept for them.
    pub(super) fn cut(&self) {
        self.0.is_cut.store(true, Ordering::SeqCst);
        self.0.reader.wake();
    }

    pub(super) fn is_cut(&self) -> bool {
        self.0.is_cut.load(Ordering::SeqCst)
    }

    pub(super) fn is_known(&self) -> bool {
        self.0.is_known.load(Ordering::Relaxed)
    }

    /// Whoever reads from the connection is woken when it is cut off.
    pub(super) fn register(&self, waker: &Waker) {
        self.0.reader.register(waker);
    }

    /// By when something must happen on the connection; none while something is under way. `begun` is whether its first
    /// bytes came.
    pub(super) fn until(&self, stall_timeout: &StallTimeout, begun: bool) -> Option<Instant> {
        if !self.is_known() {
            let stall_timeout = if begun { stall_timeout.first_request() } else { stall_timeout.get() };
            return Some(lock(&self.0.work).since + stall_timeout);
        }
        let work = lock(&self.0.work);
        let taken = |at: &Instant| *at + 2 * stall_timeout.get();
        let idle = work.calls == 0 && self.0.anybodys.load(Ordering::Relaxed) == 0;
        let idle = idle.then(|| work.rested + stall_timeout.idle());
        let answers = work.answers.first_key_value().map(|(_, at)| taken(at));
        answers.into_iter().chain(idle).min()
    }

    /// As if all of it had been that much earlier.
    #[cfg(test)]
    pub(super) fn age(&self, by: std::time::Duration) {
        let mut work = lock(&self.0.work);
        work.since -= by;
        work.rested -= by;
        work.answers.values_mut().for_each(|at| *at -= by);
    }
}

impl Drop for LineState {
    fn drop(&mut self) {
        lock(&self.strangers.lines).remove(&self.number);
    }
}

impl Drop for OnLine {
    fn drop(&mut self) {
        let mut work = lock(&self.0.0.work);
        work.calls -= 1;
        work.rested = Instant::now();
    }
}

impl Drop for Answered {
    fn drop(&mut self) {
        lock(&self.line.0.work).answers.remove(&self.number);
    }
}

impl Drop for Anybodys {
    fn drop(&mut self) {
        self.0.0.anybodys.fetch_sub(1, Ordering::Relaxed);
        self.0.0.strangers.calls.fetch_sub(1, Ordering::Relaxed);
    }
}
