//! The ring of events, and readers' places in it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};

use super::{Cause, Event, EventKind, Gap, Sequence, Subject};
use crate::sync::atomic::{AtomicU32, Ordering::Relaxed};
use crate::sync::{Mutex, MutexGuard};

/// Bytes of events that a stream keeps unless asked otherwise: about eighty thousand.
pub const RING_BYTES: usize = 8 << 20;
/// How many events a ring of `ring_bytes` bytes keeps: at least one.
pub const fn ring_events(ring_bytes: usize) -> usize {
    let events = ring_bytes / size_of::<(u64, EventKind, Cause, Subject)>();
    if events == 0 { 1 } else { events }
}

/// Events that a reader takes at once at most, so that no task waits for its copying.
const TAKEN_MAX: usize = 256;
/// Wakers that wait for the next event at most. One more wakes them all: those of readers who are gone do not come
/// back.
const WAITING_MAX: usize = 1024;

/// Looks at most whether others still wait, a microsecond or a time slice of another thread each.
const LOOKS_MAX: u32 = 4096;

#[derive(Debug)]
struct Ring {
    events: VecDeque<(u64, EventKind, Cause, Subject)>,
    /// Number of the last event given out.
    last: u64,
    waiting: Vec<Waker>,
    closed: bool,
}

/// One stream of events.
pub struct EventLog {
    stream: u64,
    capacity: usize,
    ring: Mutex<Ring>,
    /// Threads that found the lock taken and wait for it.
    waiting: AtomicU32,
}

/// The stream's lock, held across a change and the events that tell of it.
pub struct Change<'a> {
    log: &'a EventLog,
    ring: MutexGuard<'a, Ring>,
    woken: Vec<Waker>,
}

impl EventLog {
    /// A stream of this id that keeps `ring_bytes` bytes of events, at least one event.
    pub fn new(stream: u64, ring_bytes: usize) -> Arc<Self> {
        let capacity = ring_events(ring_bytes);
        // All of it at once: it never grows while a change holds the lock.
        let ring =
            Ring { events: VecDeque::with_capacity(capacity), last: 0, waiting: Vec::new(), closed: false };
        Arc::new(Self { stream, capacity, ring: Mutex::new(ring), waiting: AtomicU32::new(0) })
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        // Each push is one step: a panic elsewhere leaves the ring whole.
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a change. The lock is held until it is dropped: for changes of memory, never across a device wait, and of a few hundred
    /// blocks at most.
    pub fn change(&self) -> Change<'_> {
        let ring = match self.ring.try_lock() {
            Ok(ring) => ring,
            Err(_) => {
                self.waiting.fetch_add(1, Relaxed);
                let ring = self.lock();
                self.waiting.fetch_sub(1, Relaxed);
                ring
            }
        };
        Change { log: self, ring, woken: Vec::new() }
    }

    /// Between changes of one piece of work: those that wait for the lock have it first. The lock is not fair, and without this a
    /// thread that takes it again and again would keep it from others throughout.
    pub fn let_others(&self) {
        let mut looks = 0;
        while self.waiting.load(Relaxed) > 0 && looks < LOOKS_MAX {
            std::thread::yield_now();
            looks += 1;
        }
    }

    /// The point after the last event.
    pub fn sequence(&self) -> Sequence {
        Sequence { stream: self.stream, number: self.lock().last }
    }

    /// Reads from a point, or from now on.
    pub fn subscribe(self: &Arc<Self>, from: Option<Sequence>) -> Subscription {
        Subscription { next: from.unwrap_or_else(|| self.sequence()), log: Arc::clone(self) }
    }

    /// Which stream it is.
    pub fn stream(&self) -> u64 {
        self.stream
    }

    /// Ends the stream: readers who have read everything are told.
    pub fn close(&self) {
        let mut ring = self.lock();
        ring.closed = true;
        let waiting = std::mem::take(&mut ring.waiting);
        drop(ring);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Bytes that the ring takes.
    pub fn bytes(&self) -> usize {
        self.lock().events.capacity() * size_of::<(u64, EventKind, Cause, Subject)>()
    }
}

impl fmt::Debug for EventLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EventLog(up to {:?})", self.sequence())
    }
}

impl Change<'_> {
    /// Tells of one change, made at this time.
    pub fn tell(&mut self, at_ms: u64, kind: EventKind, cause: Cause, subject: Subject) {
        let ring = &mut *self.ring;
        if ring.events.len() >= self.log.capacity {
            ring.events.pop_front();
        }
        ring.events.push_back((at_ms, kind, cause, subject));
        ring.last += 1;
        self.woken.append(&mut ring.waiting);
    }

    /// Something changed, and what it was is not known: every reader meets a gap here.
    pub fn lose(&mut self) {
        let ring = &mut *self.ring;
        ring.events.clear();
        ring.last += 1;
        self.woken.append(&mut ring.waiting);
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        // Woken under the lock: wakers only note that a task is runnable.
        self.woken.drain(..).for_each(Waker::wake);
    }
}

impl fmt::Debug for Change<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Change")
    }
}

/// A reader's place in a stream.
pub struct Subscription {
    log: Arc<EventLog>,
    next: Sequence,
}

impl Subscription {
    /// Everything up to this point was read.
    pub fn sequence(&self) -> Sequence {
        self.next
    }

    /// The events that are there, at most `max` and a few hundred; none if there is nothing new. After a gap it
    /// stays where it is: subscribe again.
    pub fn try_next(&mut self, max: usize) -> Result<Vec<Event>, Gap> {
        let log = Arc::clone(&self.log);
        self.take(&log.lock(), max)
    }

    /// The next events, as a future; `None` when the store was closed and everything was read.
    pub fn next(&mut self, max: usize) -> impl Future<Output = Option<Result<Vec<Event>, Gap>>> + '_ {
        std::future::poll_fn(move |context| self.poll_next(context, max))
    }

    /// The same, as a poll.
    pub fn poll_next(
        &mut self,
        context: &mut Context<'_>,
        max: usize,
    ) -> Poll<Option<Result<Vec<Event>, Gap>>> {
        let log = Arc::clone(&self.log);
        let mut ring = log.lock();
        match self.take(&ring, max) {
            Ok(events) if !events.is_empty() => Poll::Ready(Some(Ok(events))),
            Err(gap) => Poll::Ready(Some(Err(gap))),
            Ok(_) if ring.closed => Poll::Ready(None),
            Ok(_) => {
                if ring.waiting.len() >= WAITING_MAX {
                    std::mem::take(&mut ring.waiting).into_iter().for_each(Waker::wake);
                }
                if !ring.waiting.iter().any(|waiting| waiting.will_wake(context.waker())) {
                    ring.waiting.push(context.waker().clone());
                }
                Poll::Pending
            }
        }
    }

    fn take(&mut self, ring: &Ring, max: usize) -> Result<Vec<Event>, Gap> {
        let stream = self.log.stream;
        let before_first = ring.last - ring.events.len() as u64;
        let known = self.next.number;
        if self.next.stream != stream || known < before_first || known > ring.last {
            return Err(Gap { resume: Sequence { stream, number: before_first } });
        }
        let skip = (known - before_first) as usize;
        let numbered = (known + 1..).zip(ring.events.range(skip..)).take(max.min(TAKEN_MAX));
        let event = |(number, &(at_ms, kind, cause, subject)): (u64, &(u64, EventKind, Cause, Subject))| {
            Event { sequence: Sequence { stream, number }, at_ms, kind, cause, subject }
        };
        let events: Vec<_> = numbered.map(event).collect();
        self.next.number += events.len() as u64;
        Ok(events)
    }
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Subscription(after {:?})", self.next)
    }
}
