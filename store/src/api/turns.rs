//! Memory that the layers of a put use in turns.
//!
//! A put of many layers may have less memory than the layers have bytes: a layer then lies where an earlier one
//! lay that was written. Turns say how far the put may go; the store does not read a layer before it is opened.

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::task::Waker;

use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{Mutex, MutexGuard, Race, planted};

/// How many leading steps have memory. Cheap to clone; clones are the same turns.
#[derive(Clone)]
pub struct Turns(Arc<Inner>);

struct Inner {
    open: AtomicU32,
    waiting: Mutex<Vec<Waker>>,
}

impl Turns {
    /// Turns of which the first `open` steps have begun.
    pub fn new(open: u32) -> Self {
        Self(Arc::new(Inner { open: AtomicU32::new(open), waiting: Mutex::new(Vec::new()) }))
    }

    /// Opens every step below `steps`: their memory is the store's from now until they are announced. What was
    /// opened stays open.
    pub fn open(&self, steps: u32) {
        if self.0.open.fetch_max(steps, Ordering::AcqRel) < steps {
            self.nudge();
        }
    }

    /// Lets whoever waits look again: something else than a step has changed.
    pub(crate) fn nudge(&self) {
        let waiting = std::mem::take(&mut *self.waiting());
        waiting.into_iter().for_each(Waker::wake);
    }

    /// How many leading steps are open.
    pub fn opened(&self) -> u32 {
        self.0.open.load(Ordering::Acquire)
    }

    /// Whether both are the same turns.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether a step may be read.
    pub fn is_open(&self, step: u32) -> bool {
        step < self.opened()
    }

    /// Whether a step may be read; if not, `waker` is woken by the next [`Turns::open`].
    pub(crate) fn is_open_or_wake(&self, step: u32, waker: &Waker) -> bool {
        let looked = planted(Race::TurnLooksFirst).then(|| self.is_open(step));
        {
            // Registered before the look, so that an opening in between wakes.
            let mut waiting = self.waiting();
            if !waiting.iter().any(|known| known.will_wake(waker)) {
                waiting.push(waker.clone());
            }
        }
        looked.unwrap_or_else(|| self.is_open(step))
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Waker>> {
        // A push is one step: a panic elsewhere leaves the list whole.
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Turns({} open)", self.0.open.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    #[derive(Default)]
    struct Counted(AtomicUsize);

    impl Wake for Counted {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn an_opening_wakes_who_waits_and_never_closes() {
        let (counted, turns) = (Arc::new(Counted::default()), Turns::new(1));
        let waker = Waker::from(Arc::clone(&counted));
        assert!(turns.is_open(0) && !turns.is_open(1));
        assert!(!turns.is_open_or_wake(1, &waker) && !turns.is_open_or_wake(1, &waker));
        turns.clone().open(2);
        assert_eq!(counted.0.load(Ordering::SeqCst), 1);
        turns.open(1);
        assert!(turns.is_open(1) && !turns.is_open(2));
    }
}
