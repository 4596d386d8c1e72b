//! An eventfd as a bell: rung by any thread, waited for and emptied by one.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// An eventfd, blocking, so that any kind of waiter can use it; this side reads it only when it is readable.
#[derive(Debug)]
pub struct Event(OwnedFd);

impl Event {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC)?))
    }

    /// Makes it readable.
    pub fn ring(&self) {
        // The write can fail only at a count of 2^64 - 1, where it is readable anyway.
        let _ = rustix::io::write(&self.0, &one());
    }

    /// Empties it, if it is readable.
    pub fn empty(&self) {
        if self.wait(Some(Duration::ZERO)) {
            let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
        }
    }

    /// Sleeps until it is readable or the time is over; says which.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        let timeout = timeout.map(timespec);
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut fds, timeout.as_ref()).is_ok_and(|ready| ready > 0)
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() }
}

/// One, as an eventfd counts: in the machine's own byte order.
#[allow(
    clippy::host_endian_bytes,
    reason = "the kernel reads this word in host byte order, and the word is never stored"
)]
fn one() -> [u8; 8] {
    1_u64.to_ne_bytes()
}
