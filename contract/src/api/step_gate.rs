//! Flow control of a put whose layers share memory.
//!
//! A put of many layers may have less memory than the layers have bytes: a layer then uses the memory of an earlier, written layer. The
//! gate counts the steps of the put that have their memory; the store does not read a layer before its step is open.

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::task::Waker;

use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{Mutex, MutexGuard, Race, planted};

/// The number of leading steps that have memory. Cheap to clone; all clones are one gate.
#[derive(Clone)]
pub struct StepGate(Arc<Inner>);

struct Inner {
    open: AtomicU32,
    waiting: Mutex<Vec<Waker>>,
}

impl StepGate {
    /// A gate whose first `open` steps are open.
    pub fn new(open: u32) -> Self {
        Self(Arc::new(Inner { open: AtomicU32::new(open), waiting: Mutex::new(Vec::new()) }))
    }

    /// Opens every step below `steps`: their memory belongs to the store until they are announced. An open step stays open.
    pub fn open(&self, steps: u32) {
        if self.0.open.fetch_max(steps, Ordering::AcqRel) < steps {
            self.nudge();
        }
    }

    /// Wakes all waiting tasks to check again, after a change other than an opened step.
    pub fn nudge(&self) {
        let waiting = std::mem::take(&mut *self.waiting());
        waiting.into_iter().for_each(Waker::wake);
    }

    /// The number of open leading steps.
    pub fn opened(&self) -> u32 {
        self.0.open.load(Ordering::Acquire)
    }

    /// Whether both are clones of one gate.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether a step may be read.
    pub fn is_open(&self, step: u32) -> bool {
        step < self.opened()
    }

    /// Whether a step may be read; if not, the next [`StepGate::open`] wakes `waker`.
    pub fn is_open_or_wake(&self, step: u32, waker: &Waker) -> bool {
        let looked = planted(Race::GateLooksFirst).then(|| self.is_open(step));
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

impl fmt::Debug for StepGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StepGate({} open)", self.0.open.load(Ordering::Relaxed))
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
        let (counted, gate) = (Arc::new(Counted::default()), StepGate::new(1));
        let waker = Waker::from(Arc::clone(&counted));
        assert!(gate.is_open(0) && !gate.is_open(1));
        assert!(!gate.is_open_or_wake(1, &waker) && !gate.is_open_or_wake(1, &waker));
        gate.clone().open(2);
        assert_eq!(counted.0.load(Ordering::SeqCst), 1);
        gate.open(1);
        assert!(gate.is_open(1) && !gate.is_open(2));
    }
}
