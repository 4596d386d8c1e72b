//! Following a device: waiting for events one after the other, and keeping what their copies use until they are done.
//!
//! A copy that does not end within the timeout is called stuck: callers that wait for it are told so and wait no longer.
//! What the copy uses (host memory, the stream, the destination) stays with the follower's thread, which ends when the
//! device has finished after all, or is declared lost: memory that a device may still write to is never given back.
//!
//! A device that is asked and does not say is not done: while an engine captures a graph a driver may refuse every
//! question. Only an error that is an end ([`DeviceError::is_an_end`]) is taken for one; else it is asked again, and when
//! the timeout is over something else is ([`Device::confirm`]): an error that every call answers with is the device's end.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use kvarts_layout::planted;

use crate::device::{Device, Event};
use crate::error::DeviceError;
use crate::pace::{Pace, RealPace, Worker};

/// The default bound on the copy of one layer; a copy that takes longer is stuck.
pub const COPY_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a device that does not say is left alone before it is asked again: within the timeout, and behind it.
const ASK_AGAIN: Duration = Duration::from_millis(1);
const ASK_LATE: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Events may still come, or are waited for within the timeout.
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

/// Says that all is over, also where that is because something panicked.
struct Over(Arc<Shared>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.set(Phase::Over);
    }
}

/// The near end of a thread that follows a device.
#[derive(Debug)]
pub(crate) struct Follower {
    shared: Arc<Shared>,
    worker: Worker,
    /// No caller waits for the thread any more.
    let_go: bool,
}

/// An event that is followed.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) event: Event,
    /// Whether a layer ends with it: of any other it is only told if the device cannot be followed past it.
    pub(crate) ends_layer: bool,
}

/// Whose events are waited for, and how long for each.
#[derive(Clone, Debug)]
pub(crate) struct Followed {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) timeout: Duration,
}

impl Follower {
    /// Follows the events that the answer's other half is sent, in that order. `tell` hears of each layer how it ended, up
    /// to the first failure; `keeps` is held until the last event is done.
    pub(crate) fn start(
        name: &str,
        followed: Followed,
        keeps: Box<dyn Any + Send>,
        mut tell: impl FnMut(Result<(), DeviceError>) + Send + 'static,
    ) -> Result<(Self, Sender<Asked>), String> {
        let shared = Arc::new(Shared { phase: Mutex::new(Phase::Following), changed: Condvar::new() });
        let (events, inbox) = channel();
        let theirs = Arc::clone(&shared);
        let worker = Worker::start(name, move || {
            // Declared first, so dropped last: destructors may give memory back, and the end is announced after that.
            let over = Over(theirs);
            let followed_all = || follow(&followed, &inbox, &over.0, &mut tell);
            match catch_unwind(AssertUnwindSafe(followed_all)) {
                Ok(()) => drop(keeps),
                Err(_) => {
                    // No thread follows the device any more, so it is unknown when the device is done with what is kept.
                    keep_for_good(keeps);
                    let why = "the thread that waits for the device panicked".to_owned();
                    let told = || tell(Err(DeviceError::Call { call: "follow", why }));
                    // If `tell` itself panicked, it wakes the threads that wait before it panics again.
                    let _ = catch_unwind(AssertUnwindSafe(told));
                }
            }
            drop((inbox, followed));
        })?;
        Ok((Self { shared, worker, let_go: false }, events))
    }

    /// Waits until every event is done, or one is stuck. The sender must be gone.
    pub(crate) fn leave(&mut self) {
        while !self.leave_within(Duration::MAX) {}
    }

    /// The same, but no longer than so: false if it is not over then.
    pub(crate) fn leave_within(&mut self, most: Duration) -> bool {
        if self.let_go {
            return true;
        }
        let following = |phase: &mut Phase| *phase == Phase::Following;
        let phase = self.shared.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.shared.changed.wait_timeout_while(phase, most, following);
        let phase = *waited.unwrap_or_else(PoisonError::into_inner).0;
        match phase {
            Phase::Following => return false,
            Phase::Stuck => self.let_go(),
            Phase::Over => self.worker.join(),
        }
        true
    }

    /// Leaves the thread to itself, with what it keeps: it ends when every event is done.
    pub(crate) fn let_go(&mut self) {
        self.let_go = true;
        self.worker.let_go();
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Keeps something for as long as the process lives: a device may still use it, and until when is unknown.
pub(crate) fn keep_for_good<T: Send + 'static>(what: T) {
    Box::leak(Box::new(what));
}

fn follow(
    followed: &Followed,
    inbox: &Receiver<Asked>,
    shared: &Shared,
    tell: &mut impl FnMut(Result<(), DeviceError>),
) {
    while let Ok(Asked { event, ends_layer }) = inbox.recv() {
        let failed = match outcome(followed, &event) {
            Ok(()) if ends_layer => {
                tell(Ok(()));
                continue;
            }
            Ok(()) => continue,
            // The caller that waited for this event itself knows how it ended. What comes behind it may be good.
            Err(error) if !ends_layer && error.is_an_end() && !matches!(error, DeviceError::Lost(_)) => {
                continue;
            }
            Err(error) => error,
        };
        let over = failed.is_an_end();
        tell(Err(failed));
        if !over {
            shared.set(Phase::Stuck);
            wait_for_good(followed, &event);
        }
        // Nothing behind a hole is usable, but until it is done the device may use what it was given.
        for Asked { event, .. } in inbox {
            let late = outcome(followed, &event);
            if late.is_err_and(|error| !error.is_an_end()) {
                shared.set(Phase::Stuck);
                wait_for_good(followed, &event);
            }
        }
        return;
    }
}

/// How the work before an event ended. After an error that is no end the work may still go on, or its state is unknown.
fn outcome(followed: &Followed, event: &Event) -> Result<(), DeviceError> {
    if planted!("done-when-enqueued") {
        return Ok(());
    }
    let Followed { device, timeout } = followed;
    let pace = RealPace::new();
    let give_up = pace.now().plus(*timeout);
    loop {
        let left = give_up.since(pace.now());
        match device.synchronize_within(event, left) {
            Ok(true) => return Ok(()),
            Ok(false) => return Err(DeviceError::stuck(*timeout)),
            Err(error) if error.is_an_end() => return Err(error),
            Err(error) if left.is_zero() => return Err(device.confirm(error)),
            Err(_) => pace.sleep_until(pace.now().plus(ASK_AGAIN.min(left))),
        }
    }
}

/// Returns when the work before an event has ended, however long that takes.
fn wait_for_good(followed: &Followed, event: &Event) {
    let pace = RealPace::new();
    while let Err(error) = followed.device.synchronize(event) {
        if followed.device.confirm(error).is_an_end() {
            return;
        }
        pace.sleep_until(pace.now().plus(ASK_LATE));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::device::emulated::{Emulated, Model};

    #[test]
    fn a_follower_that_panics_lets_nobody_wait_tells_why_and_keeps_what_the_device_may_use() {
        let device: Arc<dyn Device> = Arc::new(Emulated::new(Model::default()));
        let stream = device.stream().unwrap();
        let event = device.record(&stream).unwrap();
        let (kept, heard) = (Arc::new(()), Arc::new(AtomicU32::new(0)));
        let (keeps, hears) = (Box::new(Arc::clone(&kept)), Arc::clone(&heard));
        let followed = Followed { device, timeout: Duration::from_secs(60) };
        let tell = move |ended: Result<(), DeviceError>| {
            assert!(ended.is_err(), "on purpose");
            hears.fetch_add(1, Ordering::AcqRel);
        };
        let (mut follower, events) = Follower::start("panics", followed, keeps, tell).unwrap();
        events.send(Asked { event, ends_layer: true }).unwrap();
        // The sender is still there, so it is not the sender's end that lets the waiting thread go on.
        follower.leave();
        assert_eq!((heard.load(Ordering::Acquire), Arc::strong_count(&kept)), (1, 2));
    }

    #[test]
    fn of_an_event_that_ends_no_layer_nothing_is_told() {
        let device: Arc<dyn Device> = Arc::new(Emulated::new(Model::default()));
        let stream = device.stream().unwrap();
        let told = Arc::new(AtomicU32::new(0));
        let tells = Arc::clone(&told);
        let followed = Followed { device: Arc::clone(&device), timeout: Duration::from_secs(60) };
        let tell = move |_| {
            tells.fetch_add(1, Ordering::AcqRel);
        };
        let (mut follower, events) = Follower::start("samples", followed, Box::new(()), tell).unwrap();
        for ends_layer in [false, true, false] {
            events.send(Asked { event: device.record(&stream).unwrap(), ends_layer }).unwrap();
        }
        drop(events);
        follower.leave();
        assert_eq!(told.load(Ordering::Acquire), 1);
    }
}
