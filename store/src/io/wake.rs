//! Ends a park from another thread, by an eventfd that is written at most once for each park.
//!
//! Two things end a park: a thread called `unpark`, or a worker finished something. Both write the one eventfd;
//! which of them happened is kept apart, so that a completion that has already been reaped does not end the next
//! park. No write is lost: the flag that suppresses further writes is taken back only after the eventfd
//! has been emptied, and the thread that empties it looks at the causes afterwards.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use super::Unpark;
use kvarts_contract::sync::atomic::{AtomicBool, Ordering};
use kvarts_contract::sync::{Event, Race, planted};

/// The wake-up of one [`Io`](super::Io).
#[derive(Debug)]
pub(crate) struct Wake {
    event: Event,
    /// The eventfd has been written and not emptied since.
    signalled: AtomicBool,
    /// `unpark` was called and no park has ended by it yet.
    unparked: AtomicBool,
}

impl Wake {
    pub(crate) fn new() -> std::io::Result<Arc<Self>> {
        let event = Event::new()?;
        Ok(Arc::new(Self { event, signalled: AtomicBool::new(false), unparked: AtomicBool::new(false) }))
    }

    /// Makes the eventfd readable, if it is not already.
    pub(crate) fn signal(&self) {
        if !self.signalled.swap(true, Ordering::SeqCst) {
            self.event.ring();
        }
    }

    /// Whether `unpark` was called since this last said so.
    pub(crate) fn take_unparked(&self) -> bool {
        self.unparked.swap(false, Ordering::SeqCst)
    }

    /// Empties the eventfd. The caller then looks at every cause of a wake-up.
    pub(crate) fn drain(&self) {
        if planted(Race::RearmFirst) {
            self.rearm();
            return self.event.empty();
        }
        self.event.empty();
        self.rearm();
    }

    /// Lets the next signal write the eventfd again.
    fn rearm(&self) {
        self.signalled.store(false, Ordering::SeqCst);
    }

    /// Sleeps until the eventfd is readable or the time is over; says which.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        self.event.wait(timeout)
    }
}

impl Unpark for Wake {
    fn unpark(&self) {
        self.unparked.store(true, Ordering::SeqCst);
        self.signal();
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unpark_is_seen_once_and_leaves_the_eventfd_empty() {
        let wake = Wake::new().unwrap();
        assert!(!wake.wait(Some(Duration::ZERO)));
        wake.unpark();
        wake.unpark();
        assert!(wake.wait(None));
        wake.drain();
        assert!(wake.take_unparked());
        assert!(!wake.take_unparked());
        assert!(!wake.wait(Some(Duration::ZERO)));
    }

    #[test]
    fn a_signal_after_draining_is_written_again() {
        let wake = Wake::new().unwrap();
        wake.signal();
        wake.drain();
        wake.signal();
        assert!(wake.wait(Some(Duration::ZERO)));
        assert!(!wake.take_unparked());
    }
}
