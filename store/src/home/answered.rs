//! Calls of the file system outside of the seam, each on a thread of its own: where a drive hangs, the call does not return, and only
//! that thread waits for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::time::Duration;

use super::stop::Stop;

/// How long a directory may take to answer: as long as other calls for metadata.
pub(super) const WITHIN: Duration = Duration::from_secs(30);

/// How long an answer is waited for after the start was told to stop: a directory that does not hang has given it by then.
const SOON: Duration = Duration::from_millis(200);

/// What `ask` gives; `None` if that takes longer, or the start is told to stop before. What it gives later is dropped.
#[allow(
    clippy::disallowed_methods,
    reason = "waits for a call of the system that may hang, which is not simulated"
)]
pub(super) fn answered<T: Send + 'static>(
    within: Duration,
    stop: &Stop,
    ask: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    if stop.is_told() {
        return None;
    }
    let (tell, told) = channel();
    let stopped = tell.clone();
    let name = "directory".to_owned();
    let thread = std::thread::Builder::new().name(name).spawn(move || drop(tell.send(Some(ask()))));
    stop.on_told(move || drop(stopped.send(None)));
    let answer = thread.ok().and_then(|_| told.recv_timeout(within).ok())?;
    // What is being made at this moment would stay behind.
    answer.or_else(|| told.recv_timeout(SOON).ok().flatten())
}

/// Asks the same thing again and again, and not while an earlier answer is still to come: what hangs takes one thread.
#[derive(Clone, Debug, Default)]
pub(super) struct Asking(Arc<AtomicBool>);

impl Asking {
    /// As [`answered`]; `None` also while the last question waits.
    pub(super) fn answered<T: Send + 'static>(
        &self,
        within: Duration,
        ask: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        if self.0.swap(true, Relaxed) {
            return None;
        }
        let waits = Waits(Arc::clone(&self.0));
        answered(within, &Stop::default(), move || {
            let answer = ask();
            drop(waits);
            answer
        })
    }
}

/// An answer is still to come; no more when this is dropped.
struct Waits(Arc<AtomicBool>);

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.store(false, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_that_is_told_to_stop_waits_for_no_call() {
        let (stop, late) = (Stop::default(), Duration::from_secs(600));
        assert_eq!(answered(late, &stop, || 1), Some(1));
        let ((go, gone), told) = (channel::<()>(), stop.clone());
        let hangs = move || {
            told.tell();
            let _ = gone.recv();
        };
        assert_eq!(answered(late, &stop, hangs), None);
        drop(go);
        assert_eq!(answered(late, &stop, || panic!("a stopped start asks")), None::<()>);
        // What comes just after it was told counts: it may have made something.
        let stop = Stop::default();
        let told = stop.clone();
        let soon = move || {
            told.tell();
            2
        };
        assert_eq!(answered(late, &stop, soon), Some(2));
    }

    #[test]
    fn a_call_that_does_not_return_costs_its_limit_once_and_one_thread() {
        let (go, gone) = channel::<()>();
        let (asking, soon, late) = (Asking::default(), Duration::from_millis(5), Duration::from_secs(60));
        assert_eq!(asking.answered(late, || 1), Some(1));
        let (ended, end) = channel();
        let hangs = move || {
            let _ = gone.recv();
            ended.send(())
        };
        assert!(asking.answered(soon, hangs).is_none());
        // No other thread is made for it, and it is not waited for again.
        assert_eq!(asking.answered(late, || 2), None);
        go.send(()).unwrap();
        end.recv().unwrap();
        let again = std::iter::repeat_with(|| asking.answered(late, || 3)).flatten().next();
        assert_eq!(again, Some(3));
    }
}
