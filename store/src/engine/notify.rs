//! Waiting on an executor: for a condition that its other tasks make true, and no longer than until a deadline.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Poll, Waker};

use crate::rt::LocalTask;

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

/// What `work` gives, or `None` if the deadline comes first.
pub(crate) async fn before<T>(
    mut work: Pin<&mut impl Future<Output = T>>,
    mut deadline: Option<LocalTask>,
) -> Option<T> {
    poll_fn(|context| {
        if let Poll::Ready(value) = work.as_mut().poll(context) {
            return Poll::Ready(Some(value));
        }
        match &mut deadline {
            Some(deadline) => deadline.as_mut().poll(context).map(|()| None),
            None => Poll::Pending,
        }
    })
    .await
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
