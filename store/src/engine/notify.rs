//! Waiting for a condition that other tasks of the same executor make true.

use std::cell::RefCell;
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// Tasks that wait for something to change. Whoever changes it calls [`Notify::wake_all`].
#[derive(Debug, Default)]
pub(crate) struct Notify(RefCell<Vec<Waker>>);

impl Notify {
    /// Completes with what `look` finds. It is asked now, and again after each [`Notify::wake_all`].
    pub(crate) async fn until<T>(&self, mut look: impl FnMut() -> Option<T>) -> T {
        poll_fn(|context| match look() {
            Some(found) => Poll::Ready(found),
            None => {
                // Nothing on this executor runs between the look and this line.
                self.0.borrow_mut().push(context.waker().clone());
                Poll::Pending
            }
        })
        .await
    }

    /// Lets every waiter look again.
    pub(crate) fn wake_all(&self) {
        let waiting = std::mem::take(&mut *self.0.borrow_mut());
        waiting.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::task::Context;

    #[test]
    fn a_waiter_sees_the_change_after_the_wake() {
        let (notify, value) = (Notify::default(), Cell::new(0));
        let mut context = Context::from_waker(Waker::noop());
        let mut waiting = std::pin::pin!(notify.until(|| (value.get() > 1).then(|| value.get())));
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        value.set(2);
        notify.wake_all();
        assert_eq!(waiting.as_mut().poll(&mut context), Poll::Ready(2));
    }
}
