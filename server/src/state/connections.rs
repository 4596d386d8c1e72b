//! A connection as the server and its calls know it: whether its client has shown a token, which calls and answers are
//! under way on it, and by when it is closed because nothing happens.
//!
//! Before its first call with a token a connection is a stranger: its bytes and its time are limited, and it is the first
//! to lose its place when all are taken, so that clients with a token find one.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;

use futures_util::task::AtomicWaker;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::StallTimeout;
use kvarts_wire::limits;

/// Connections whose client has shown no token yet, oldest first.
#[derive(Default, Debug)]
pub struct Strangers {
    connections: Mutex<BTreeMap<u64, Weak<ConnectionState>>>,
    next: AtomicU64,
    /// Calls that need no token, under way on all connections.
    calls: AtomicUsize,
}

/// A connection.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionHandle(Arc<ConnectionState>);

#[derive(Debug)]
struct ConnectionState {
    number: u64,
    strangers: Arc<Strangers>,
    place: Mutex<Option<OwnedSemaphorePermit>>,
    is_known: AtomicBool,
    is_cut: AtomicBool,
    /// The task that reads from the connection.
    reader: AtomicWaker,
    /// Calls under way that need no token.
    open_calls: AtomicUsize,
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
pub(crate) struct ConnectionCall(ConnectionHandle);

/// An answer that the transport has, for as long as it lives.
#[derive(Debug)]
pub(crate) struct Answered {
    connection: ConnectionHandle,
    number: u64,
}

/// A call that needs no token, for as long as it lives.
#[derive(Debug)]
pub(crate) struct OpenCall(ConnectionHandle);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Strangers {
    /// Connections of strangers, and calls without a token that are under way on all connections.
    pub fn count(&self) -> (usize, usize) {
        (lock(&self.connections).len(), self.calls.load(Ordering::Relaxed))
    }

    /// Cuts off the oldest stranger and returns its place; none if no stranger has had long enough to show a token.
    pub(crate) fn displace(&self, now: Instant) -> Option<OwnedSemaphorePermit> {
        loop {
            let (_, connection) = lock(&self.connections).pop_first()?;
            let Some(connection) = connection.upgrade().map(ConnectionHandle) else { continue };
            if now.saturating_duration_since(lock(&connection.0.work).since) < limits::STRANGERS_GRACE {
                lock(&self.connections).insert(connection.0.number, Arc::downgrade(&connection.0));
                return None;
            }
            let place = lock(&connection.0.place).take();
            connection.cut();
            if place.is_some() {
                return place;
            }
        }
    }
}

impl ConnectionHandle {
    /// A connection that came in now.
    pub(crate) fn new(strangers: &Arc<Strangers>, place: Option<OwnedSemaphorePermit>) -> Self {
        let (now, number) = (Instant::now(), strangers.next.fetch_add(1, Ordering::Relaxed));
        let connection = Arc::new(ConnectionState {
            number,
            strangers: Arc::clone(strangers),
            place: Mutex::new(place),
            is_known: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
            reader: AtomicWaker::new(),
            open_calls: AtomicUsize::new(0),
            work: Mutex::new(Work { since: now, calls: 0, rested: now, answers: BTreeMap::new(), next: 0 }),
        });
        lock(&strangers.connections).insert(number, Arc::downgrade(&connection));
        Self(connection)
    }

    /// A call was admitted: the client is a stranger no longer.
    pub(crate) fn begin(&self) -> ConnectionCall {
        if !self.0.is_known.swap(true, Ordering::Relaxed) {
            lock(&self.0.strangers.connections).remove(&self.0.number);
        }
        lock(&self.0.work).calls += 1;
        ConnectionCall(self.clone())
    }

    /// The transport gets an answer.
    pub(crate) fn answer(&self) -> Answered {
        let mut work = lock(&self.0.work);
        let number = work.next;
        work.next += 1;
        work.answers.insert(number, Instant::now());
        Answered { connection: self.clone(), number }
    }

    /// A call without a token begins, if the connection may have one more of them.
    pub(crate) fn open_call(&self) -> Option<OpenCall> {
        self.0.strangers.calls.fetch_add(1, Ordering::Relaxed);
        let before = self.0.open_calls.fetch_add(1, Ordering::Relaxed);
        let call = OpenCall(self.clone());
        (before < limits::OPEN_CALLS_MAX).then_some(call)
    }

    /// Ends the connection, with all of its streams and what is kept for them.
    pub(crate) fn cut(&self) {
        self.0.is_cut.store(true, Ordering::SeqCst);
        self.0.reader.wake();
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.0.is_cut.load(Ordering::SeqCst)
    }

    pub(crate) fn is_known(&self) -> bool {
        self.0.is_known.load(Ordering::Relaxed)
    }

    /// Registers the task that reads from the connection, to be woken when it is cut off.
    pub(crate) fn register(&self, waker: &Waker) {
        self.0.reader.register(waker);
    }

    /// When the connection is closed unless something happens; none while something is under way. `begun` tells whether its
    /// first bytes have come.
    pub(crate) fn until(&self, stall_timeout: &StallTimeout, begun: bool) -> Option<Instant> {
        if !self.is_known() {
            let stall_timeout = if begun { stall_timeout.first_request() } else { stall_timeout.get() };
            return Some(lock(&self.0.work).since + stall_timeout);
        }
        let work = lock(&self.0.work);
        let taken = |at: &Instant| *at + 2 * stall_timeout.get();
        let idle = work.calls == 0 && self.0.open_calls.load(Ordering::Relaxed) == 0;
        let idle = idle.then(|| work.rested + stall_timeout.idle());
        let answers = work.answers.first_key_value().map(|(_, at)| taken(at));
        answers.into_iter().chain(idle).min()
    }

    /// As if all of it had been that much earlier.
    #[cfg(test)]
    pub(crate) fn age(&self, by: std::time::Duration) {
        let mut work = lock(&self.0.work);
        work.since -= by;
        work.rested -= by;
        work.answers.values_mut().for_each(|at| *at -= by);
    }
}

impl Drop for ConnectionState {
    fn drop(&mut self) {
        lock(&self.strangers.connections).remove(&self.number);
    }
}

impl Drop for ConnectionCall {
    fn drop(&mut self) {
        let mut work = lock(&self.0.0.work);
        work.calls -= 1;
        work.rested = Instant::now();
    }
}

impl Drop for Answered {
    fn drop(&mut self) {
        lock(&self.connection.0.work).answers.remove(&self.number);
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.0.0.open_calls.fetch_sub(1, Ordering::Relaxed);
        self.0.0.strangers.calls.fetch_sub(1, Ordering::Relaxed);
    }
}
