//! What a thread sleeps at: a bell that others ring, beside a socket that something comes over.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::host::Ready;
use super::wire::Wire;

/// An eventfd that is written once for each time that its thread looked.
#[derive(Debug)]
pub struct Bell {
    event: OwnedFd,
    rung: Arc<AtomicBool>,
}

impl Bell {
    pub(super) fn new() -> std::io::Result<Arc<Self>> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self { event, rung: Arc::default() }))
    }

    /// Wakes the thread, or has it not fall asleep.
    pub(super) fn ring(&self) {
        if !self.rung.swap(true, Ordering::SeqCst) {
            // It fails only where the count is full, and then it wakes as well.
            let _ = rustix::io::write(&self.event, &ONE);
        }
    }

    /// Whether it is rung, for who decides when a thread goes on.
    pub fn rung(&self) -> &Arc<AtomicBool> {
        &self.rung
    }

    /// Whether it was rung since the last time; its thread looks at every cause afterwards.
    pub(super) fn answer(&self) -> bool {
        if !self.rung.load(Ordering::SeqCst) {
            return false;
        }
        let _ = rustix::io::read(&self.event, &mut [0_u8; 8]);
        self.rung.swap(false, Ordering::SeqCst)
    }
}

/// Sleeps until the bell is rung, or until the wire is ready, or the time is over.
pub(super) fn sleep(bell: Option<&Bell>, wire: Option<(&dyn Wire, Ready)>, timeout: Option<Duration>) {
    let timeout = timeout.map(timespec);
    let wire = wire.map(|(wire, ready)| (wire.descriptor(), ready));
    let wire = wire.as_ref().map(|(wire, ready)| PollFd::new(wire, flags(*ready)));
    let bell = bell.map(|bell| PollFd::new(&bell.event, PollFlags::IN));
    // An error is a signal: the caller looks and comes back.
    let _ = match (bell, wire) {
        (Some(bell), Some(wire)) => poll(&mut [bell, wire], timeout.as_ref()),
        (Some(one), None) | (None, Some(one)) => poll(&mut [one], timeout.as_ref()),
        (None, None) => poll(&mut [], timeout.as_ref()),
    };
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.ring();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ring();
    }
}

fn flags(ready: Ready) -> PollFlags {
    match ready {
        Ready::ToReceive => PollFlags::IN,
        Ready::ToSend => PollFlags::OUT,
        Ready::ForBoth => PollFlags::IN | PollFlags::OUT,
    }
}

fn timespec(time: Duration) -> Timespec {
    // A little longer, so that who sleeps until a point in time has passed it then.
    let time = time.saturating_add(Duration::from_micros(50));
    Timespec { tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() }
}

/// One, as an eventfd counts: in the machine's own byte order.
#[allow(clippy::host_endian_bytes, reason = "the kernel reads this word in host order; it is never stored")]
const ONE: [u8; 8] = 1_u64.to_ne_bytes();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bell_that_was_rung_before_its_thread_sleeps_wakes_it_once() {
        let bell = Bell::new().unwrap();
        assert!(!bell.answer());
        bell.ring();
        bell.ring();
        sleep(Some(&bell), None, None);
        assert!(bell.answer() && !bell.answer());
        sleep(Some(&bell), None, Some(Duration::ZERO));
        bell.ring();
        sleep(Some(&bell), None, None);
        assert!(bell.answer());
    }
}
