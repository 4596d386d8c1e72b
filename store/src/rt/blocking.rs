//! Waiting for a future on a thread that may sleep: embedding programs and command lines, never an executor.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

struct Unparked(Thread);

impl Wake for Unparked {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs `future` to its end on this thread, which sleeps while it is pending.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unparked(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
        // A wake that came since the poll makes this return at once.
        std::thread::park();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_contract::ticket::ticket;

    #[test]
    #[allow(clippy::disallowed_methods, reason = "the other side must be another thread")]
    fn an_answer_from_another_thread_ends_the_wait() {
        let (reply, answer) = ticket();
        let other = std::thread::spawn(move || reply.send(7));
        assert_eq!(block_on(answer), Ok(7));
        assert_eq!(other.join().unwrap(), Ok(()));
    }
}
