//! Waiting without the interpreter's lock, and not deaf to Ctrl-C.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use kvarts_contract::clock::{Clock, Nanos};
use pyo3::prelude::*;

use crate::error::invalid;

/// How often a thread that waits looks for signals: only the main thread of Python is told of them.
const LOOK: Duration = Duration::from_millis(50);
/// How soon a thread looks again for something that wakes no thread, first and later.
const AGAIN: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(10));

/// How often it is looked whether memory of an interrupted call is free: two seconds.
const FREE_TRIES: u32 = 200;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A time that a caller gave, in seconds.
pub(crate) fn duration(py: Python<'_>, argument: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| invalid(py, argument, "the value must be a finite number of seconds, not negative"))
}

/// Runs a future to its end; Ctrl-C ends it before.
pub(crate) fn run<T: Send>(py: Python<'_>, future: impl Future<Output = T> + Send) -> PyResult<T> {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = polled(py, future.as_mut(), LOOK) {
            return Ok(value);
        }
        py.check_signals()?;
    }
}

/// Runs a future until it ends, or until `deadline`: nothing then. Ctrl-C ends it before.
pub(crate) fn run_until<T: Send>(
    py: Python<'_>,
    clock: &dyn Clock,
    deadline: Nanos,
    future: impl Future<Output = T> + Send,
) -> PyResult<Option<T>> {
    let mut future = pin!(future);
    loop {
        let left = Duration::from_nanos(deadline.0.saturating_sub(clock.now().0));
        if let Poll::Ready(value) = polled(py, future.as_mut(), left.min(LOOK)) {
            return Ok(Some(value));
        }
        py.check_signals()?;
        if left.is_zero() {
            return Ok(None);
        }
    }
}

/// Polls a future, and once more when it says so or after `pause`.
fn polled<T: Send>(
    py: Python<'_>,
    mut future: Pin<&mut (impl Future<Output = T> + Send)>,
    pause: Duration,
) -> Poll<T> {
    py.detach(|| {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => Poll::Ready(value),
            Poll::Pending => {
                std::thread::park_timeout(pause);
                future.as_mut().poll(&mut context)
            }
        }
    })
}

/// Waits until `done`, or until the deadline: whether it is done.
pub(crate) fn until(
    py: Python<'_>,
    clock: &dyn Clock,
    deadline: Option<Nanos>,
    done: impl Fn() -> bool + Sync,
) -> PyResult<bool> {
    let mut pause = AGAIN.0;
    loop {
        if py.detach(&done) {
            return Ok(true);
        }
        if deadline.is_some_and(|deadline| deadline <= clock.now()) {
            return Ok(false);
        }
        py.check_signals()?;
        py.detach(|| std::thread::park_timeout(pause));
        pause = (pause * 2).min(AGAIN.1);
    }
}

/// Waits until `done`, deaf to signals but not for ever: an exception is under way already.
pub(crate) fn until_free(py: Python<'_>, done: impl Fn() -> bool + Sync) {
    py.detach(|| {
        for _ in 0..FREE_TRIES {
            if done() {
                return;
            }
            std::thread::park_timeout(AGAIN.1);
        }
    });
}
