//! Calls of the file system outside of the seam, each on a thread of its own: where a drive hangs, the call does not return, and only
//! that thread waits for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::time::Duration;

/// How long a directory may take to answer: as long as other calls for metadata.
pub(super) const WITHIN: Duration = Duration::from_secs(30);

/// What `ask` gives; `None` if that takes longer. What it gives later is dropped.
#[allow(clippy::disallowed_methods, reason = "outside of the seams: a simulated disk has no such calls")]
pub(super) fn answered<T: Send + 'static>(
    within: Duration,
    ask: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (tell, told) = channel();
    let name = "directory".to_owned();
    let thread = std::thread::Builder::new().name(name).spawn(move || drop(tell.send(ask())));
    thread.ok().and_then(|_| told.recv_timeout(within).ok())
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
        answered(within, move || {
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
