//! What a thread sleeps at: a bell that others ring, beside a socket that something comes over (`host.rs`).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;

use rustix::event::{EventfdFlags, eventfd};

/// An eventfd that is written once for each time that its thread looked.
#[derive(Debug)]
pub struct Bell {
    pub(super) event: OwnedFd,
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

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.ring();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ring();
    }
}

/// One, as an eventfd counts: in the machine's own byte order.
#[allow(
    clippy::host_endian_bytes,
    reason = "the kernel reads this word in host byte order, and the word is never stored"
)]
const ONE: [u8; 8] = 1_u64.to_ne_bytes();
