//! The end of a node, heard by its tasks and calls in the order in which they began to listen.
//!
//! tokio's `watch` wakes them in an order that it draws for itself: one seed would not go the same way twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// Says that the node stops: when it is told to, and when it is dropped.
#[derive(Debug, Default)]
pub(super) struct Stop(Arc<Heard>);

#[derive(Debug, Default)]
struct Heard {
    is_over: AtomicBool,
    bell: Notify,
}

impl Stop {
    pub(super) fn stop(&self) {
        self.0.is_over.store(true, Ordering::SeqCst);
        self.0.bell.notify_waiters();
    }

    /// Returns once the node stops.
    pub(super) fn stopped(&self) -> impl Future<Output = ()> + Send + 'static {
        let heard = Arc::clone(&self.0);
        async move {
            let mut rung = std::pin::pin!(heard.bell.notified());
            // Before the look: what comes between the two is heard.
            rung.as_mut().enable();
            if !heard.is_over.load(Ordering::SeqCst) {
                // ends: `stop`, or the node is dropped
                rung.await;
            }
        }
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        self.stop();
    }
}
