//! Following a device: waiting for events one after the other, and keeping what their copies use until they are done.
//!
//! A copy that does not end within the patience is called stuck: whoever waits is told, and nobody waits any longer.
//! What the copy uses (host memory, the stream, the destination) stays with the follower's thread, which ends when the
//! device has finished after all, or is declared lost: a device that may still write to memory never loses it.

use std::any::Any;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::device::{Device, Event};
use crate::error::DeviceError;
use crate::pace::Worker;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Events may still come, or are waited for within the patience.
    Following,
    /// A copy is stuck: the thread ends when the device lets it.
    Stuck,
    /// Every event is done.
    Over,
}

#[derive(Debug)]
struct Shared {
    phase: Mutex<Phase>,
    changed: Condvar,
}

impl Shared {
    fn set(&self, phase: Phase) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
        self.changed.notify_all();
    }
}

/// The near end of a thread that follows a device.
#[derive(Debug)]
pub(crate) struct Follower {
    shared: Arc<Shared>,
    worker: Worker,
}

/// Whose events are waited for, and how long for each.
#[derive(Clone, Debug)]
pub(crate) struct Followed {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) patience: Duration,
}

impl Follower {
    /// Follows the events that the answer's other half is sent, in that order. `tell` hears of each how it ended, up
    /// to the first that failed; `keeps` is held until the last is done.
    pub(crate) fn start(
        name: &str,
        followed: Followed,
        keeps: Box<dyn Any + Send>,
        tell: impl FnMut(Result<(), DeviceError>) + Send + 'static,
    ) -> Result<(Self, Sender<Event>), String> {
        let shared = Arc::new(Shared { phase: Mutex::new(Phase::Following), changed: Condvar::new() });
        let (events, inbox) = channel();
        let theirs = Arc::clone(&shared);
        let worker = Worker::start(name, move || {
            follow(&followed, &inbox, &theirs, tell);
            // Its destructors may give memory back: nobody is told that all is over before they have.
            drop(keeps);
            drop((inbox, followed));
            theirs.set(Phase::Over);
        })?;
        Ok((Self { shared, worker }, events))
    }

    /// Waits until every event is done, or one is stuck. The sender must be gone.
    pub(crate) fn leave(&mut self) {
        let mut phase = self.shared.phase.lock().unwrap_or_else(PoisonError::into_inner);
        while *phase == Phase::Following {
            phase = self.shared.changed.wait(phase).unwrap_or_else(PoisonError::into_inner);
        }
        let stuck = *phase == Phase::Stuck;
        drop(phase);
        if stuck { self.worker.let_go() } else { self.worker.join() }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Keeps something for as long as the process lives: what a device may still use, and nobody can say until when.
pub(crate) fn keep_for_good<T: Send + 'static>(what: T) {
    Box::leak(Box::new(what));
}

fn follow(
    followed: &Followed,
    inbox: &Receiver<Event>,
    shared: &Shared,
    mut tell: impl FnMut(Result<(), DeviceError>),
) {
    let Followed { device, patience } = followed;
    while let Ok(event) = inbox.recv() {
        let ended = match device.synchronize_within(&event, *patience) {
            Ok(true) => Ok(()),
            Ok(false) => Err(DeviceError::Stuck { millis: patience.as_millis() as u64 }),
            Err(error) => Err(error),
        };
        let stuck = matches!(ended, Err(DeviceError::Stuck { .. }));
        let failed = ended.is_err();
        tell(ended);
        if stuck {
            shared.set(Phase::Stuck);
            // An error is as good as an end: nothing is written any more.
            let _ = device.synchronize(&event);
        }
        if failed {
            // Nothing behind a hole is usable, but until it is done the device may use what it was given.
            for event in inbox {
                let late = device.synchronize_within(&event, *patience);
                if late == Ok(false) {
                    shared.set(Phase::Stuck);
                    let _ = device.synchronize(&event);
                }
            }
            return;
        }
    }
}
