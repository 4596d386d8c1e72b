//! Ends a park from another thread, by an eventfd that is written at most once for each park.
//!
//! Two things end a park: somebody called `unpark`, or a worker finished something. Both write the one eventfd;
//! which of them happened is kept apart, so that a completion that has already been reaped does not end the next
//! park. A write is lost to nobody: the flag that suppresses further writes is taken back only after the eventfd
//! has been emptied, and whoever empties it looks at the causes afterwards.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::Unpark;

/// The wake-up of one [`Io`](super::Io).
#[derive(Debug)]
pub(crate) struct Wake {
    /// Blocking, so that any kind of waiter can use it; this side reads it only when it is readable.
    fd: OwnedFd,
    /// The eventfd has been written and not emptied since.
    signalled: AtomicBool,
    /// Somebody called `unpark` and no park has ended by it yet.
    unparked: AtomicBool,
}

impl Wake {
    pub(crate) fn new() -> std::io::Result<Arc<Self>> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Arc::new(Self { fd, signalled: AtomicBool::new(false), unparked: AtomicBool::new(false) }))
    }

    /// Makes the eventfd readable, if it is not already.
    pub(crate) fn signal(&self) {
        if !self.signalled.swap(true, Ordering::SeqCst) {
            // The write can fail only at a count of 2^64 - 1, where the eventfd is readable anyway.
            let _ = rustix::io::write(&self.fd, &one());
        }
    }

    /// Whether `unpark` was called since this last said so.
    pub(crate) fn take_unparked(&self) -> bool {
        self.unparked.swap(false, Ordering::SeqCst)
    }

    /// Empties the eventfd. The caller then looks at every cause of a wake-up.
    pub(crate) fn drain(&self) {
        if self.wait(Some(Duration::ZERO)) {
            let _ = rustix::io::read(&self.fd, &mut [0_u8; 8]);
        }
        self.rearm();
    }

    /// Lets the next signal write the eventfd again, where somebody else has emptied it.
    pub(crate) fn rearm(&self) {
        self.signalled.store(false, Ordering::SeqCst);
    }

    /// Sleeps until the eventfd is readable or the time is over; says which.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        let timeout = timeout.map(timespec);
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        poll(&mut fds, timeout.as_ref()).is_ok_and(|ready| ready > 0)
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
        self.fd.as_fd()
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() }
}

/// One, as an eventfd counts: in the machine's own byte order.
#[allow(clippy::host_endian_bytes, reason = "the kernel reads this word in host order; it is never stored")]
fn one() -> [u8; 8] {
    1_u64.to_ne_bytes()
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
