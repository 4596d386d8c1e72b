//! Short reads: the executor that ends one sends its answer.
//!
//! To wake a session so that it sends the end of a read costs more than the rest of a short read. So no task waits for a
//! short read: the executor that ends it puts its announcements, its end and the last word together and sends them, if
//! nothing else waits for the client and nothing failed. In all other cases the read is handed to the session, which goes
//! on as with any read. The session learns of an answer that was sent when it works next.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use super::outbox::Outbox;
use super::read::Reading;

/// The short reads of a session.
pub(super) struct Shorts {
    outbox: Arc<Outbox>,
    /// Those that have not been answered, nor taken over by the session.
    pub(super) under_way: Arc<AtomicU32>,
    over: Mutex<Vec<Over>>,
    /// The session waits until none is under way.
    is_waited_for: AtomicBool,
}

/// A short read that is not one any more.
pub(super) enum Over {
    /// It was answered.
    Answered(u64),
    /// The session has to answer.
    Left(u64, Box<Reading>),
}

/// A short read.
pub(super) struct Short {
    id: u64,
    /// Nothing once it is over.
    reading: Mutex<Option<Box<Reading>>>,
    all: Arc<Shorts>,
}

impl Shorts {
    pub(super) fn new(outbox: Arc<Outbox>) -> Arc<Self> {
        let (under_way, over, is_waited_for) = Default::default();
        Arc::new(Self { outbox, under_way, over, is_waited_for })
    }

    fn over(&self) -> MutexGuard<'_, Vec<Over>> {
        // Each change is one step.
        self.over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to wait for a read on whichever thread ends it.
    pub(super) fn begin(self: &Arc<Self>, id: u64, reading: Reading) -> Arc<Short> {
        let reading = Mutex::new(Some(Box::new(reading)));
        let short = Arc::new(Short { id, reading, all: Arc::clone(self) });
        self.under_way.fetch_add(1, Ordering::SeqCst);
        short.look();
        short
    }

    /// Those that are over since the last time.
    pub(super) fn take_over(&self) -> Vec<Over> {
        let over = std::mem::take(&mut *self.over());
        let left = over.iter().filter(|over| matches!(over, Over::Left(..))).count() as u32;
        self.under_way.fetch_sub(left, Ordering::SeqCst);
        over
    }

    /// How many are under way.
    pub(super) fn len(&self) -> usize {
        self.under_way.load(Ordering::SeqCst) as usize
    }

    /// From now on the session is woken by each that ends.
    pub(super) fn wait_for_all(&self) {
        self.is_waited_for.store(true, Ordering::SeqCst);
    }

    /// One is not under way any more.
    fn ended(&self) {
        self.under_way.fetch_sub(1, Ordering::SeqCst);
        if self.is_waited_for.load(Ordering::SeqCst) {
            self.outbox.ready.notify_one();
        }
    }
}

impl Short {
    fn reading(&self) -> MutexGuard<'_, Option<Box<Reading>>> {
        // Each change is one step.
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers if the read is over. On any thread, an executor's too: nothing here waits.
    fn look(self: &Arc<Self>) {
        let waker = Waker::from(Arc::clone(self));
        let mut place = self.reading();
        let Some(Poll::Ready(is_whole)) =
            place.as_ref().map(|reading| reading.poll_over(&mut Context::from_waker(&waker)))
        else {
            return;
        };
        let Some(reading) = place.take() else { return };
        drop(place);
        if is_whole && self.all.outbox.is_idle() {
            // Before the answer: its client may use the name again.
            self.all.over().push(Over::Answered(self.id));
            let done = reading.answer_at_once();
            self.all.ended();
            // Counting the call is no part of the answer.
            drop(done);
        } else {
            self.all.over().push(Over::Left(self.id, reading));
            self.all.outbox.ready.notify_one();
        }
    }

    /// Ends it early, if it is not over.
    pub(super) fn cancel(&self) {
        let reading = self.reading().take();
        if reading.is_some() {
            self.all.ended();
        }
    }
}

impl Wake for Short {
    fn wake(self: Arc<Self>) {
        self.look();
    }
}
