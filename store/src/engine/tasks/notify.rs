//! Waiting on an executor: for a condition that its other tasks make true, and no longer than until a deadline.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Poll, Waker};

/// Tasks that wait for something to change. The task that changes it calls [`Notify::wake_all`].
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

/// Tasks that wait until something has come so far. Only those are woken that may find it so: each costs its wake and no
/// look of the others.
#[derive(Debug, Default)]
pub(crate) struct Reached {
    waiting: RefCell<BTreeMap<u64, Vec<Waker>>>,
    /// Wakers that were woken, for tests of what they cost.
    woken: Cell<u64>,
}

impl Reached {
    /// Completes with what `look` finds. It is asked now, and again when what is waited for may have come to `place`.
    pub(crate) async fn until<T>(&self, place: u64, mut look: impl FnMut() -> Option<T>) -> T {
        poll_fn(|context| match look() {
            Some(found) => Poll::Ready(found),
            None => {
                // Nothing on this executor runs between the look and this line.
                self.waiting.borrow_mut().entry(place).or_default().push(context.waker().clone());
                Poll::Pending
            }
        })
        .await
    }

    /// Lets those look again that wait for a place up to this one.
    pub(crate) fn wake_up_to(&self, place: u64) {
        let mut waiting = self.waiting.borrow_mut();
        let rest = place.checked_add(1).map_or_else(BTreeMap::new, |next| waiting.split_off(&next));
        let reached = std::mem::replace(&mut *waiting, rest);
        drop(waiting);
        for waker in reached.into_values().flatten() {
            self.woken.set(self.woken.get() + 1);
            waker.wake();
        }
    }

    #[cfg(test)]
    pub(crate) fn woken(&self) -> u64 {
        self.woken.get()
    }
}

/// Something that one task at a time may do.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    taken: Cell<bool>,
    changed: Notify,
}

impl Turn {
    /// Completes when it is this task's turn, which ends when the answer is dropped.
    pub(crate) async fn take(&self) -> Taken<'_> {
        self.changed.until(|| (!self.taken.replace(true)).then_some(())).await;
        Taken(self)
    }

    /// Whether a task has it now.
    pub(crate) fn is_taken(&self) -> bool {
        self.taken.get()
    }
}

/// The turn, while it is held.
#[derive(Debug)]
pub(crate) struct Taken<'a>(&'a Turn);

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.0.taken.set(false);
        self.0.changed.wake_all();
    }
}

/// Completes after other runnable tasks had their turn.
pub(crate) async fn yield_now() {
    let mut asked = false;
    poll_fn(|context| {
        if std::mem::replace(&mut asked, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Units of work that a task does before others have their turn.
const SECTION_UNITS: u64 = 128;

/// How much a task has done since others had their turn. A unit is what takes a few microseconds.
#[derive(Debug, Default)]
pub(crate) struct Section(u64);

impl Section {
    /// The units that handling `bytes` bytes costs, besides one for the step itself.
    pub(crate) fn of_bytes(bytes: u64) -> u64 {
        1 + bytes / (32 << 10)
    }

    /// Counts work that was done; completes after other runnable tasks had their turn, if it is time.
    pub(crate) async fn spend(&mut self, units: u64) {
        self.0 += units;
        if self.0 >= SECTION_UNITS {
            self.0 = 0;
            yield_now().await;
        }
    }
}

/// What `work` gives, or `None` if the deadline comes first. A deadline that is lent serves for more work afterwards.
pub(crate) async fn with_deadline<T>(
    mut work: Pin<&mut impl Future<Output = T>>,
    mut deadline: Option<impl Future<Output = ()> + Unpin>,
) -> Option<T> {
    poll_fn(|context| {
        if let Poll::Ready(value) = work.as_mut().poll(context) {
            return Poll::Ready(Some(value));
        }
        match &mut deadline {
            Some(deadline) => Pin::new(deadline).poll(context).map(|()| None),
            None => Poll::Pending,
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
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

    /// Each write of a segment comes this far: with many durable puts under way, one look each and not one for each.
    #[test]
    fn whoever_waits_for_a_place_is_woken_once_however_many_wait_and_however_often_it_comes_further() {
        let wakes = |count: u64| {
            let (reached, at) = (Reached::default(), Cell::new(0));
            let mut context = Context::from_waker(Waker::noop());
            let wait = |place: u64| {
                Box::pin(reached.until(place, {
                    let at = &at;
                    move || (at.get() >= place).then_some(())
                }))
            };
            let mut waiting: Vec<_> = (1..=count).map(wait).collect();
            assert!(waiting.iter_mut().all(|one| one.as_mut().poll(&mut context).is_pending()));
            for place in 1..=count {
                at.set(place);
                reached.wake_up_to(place);
            }
            assert!(waiting.iter_mut().all(|one| one.as_mut().poll(&mut context).is_ready()));
            reached.wake_up_to(u64::MAX);
            reached.woken()
        };
        assert_eq!((wakes(10), wakes(1000)), (10, 1000));
    }

    #[test]
    fn a_turn_is_given_to_one_task_at_a_time() {
        let turn = Turn::default();
        let mut context = Context::from_waker(Waker::noop());
        let mut first = std::pin::pin!(turn.take());
        let mut second = std::pin::pin!(turn.take());
        let Poll::Ready(taken) = first.as_mut().poll(&mut context) else { panic!("no task has it") };
        assert!(second.as_mut().poll(&mut context).is_pending());
        drop(taken);
        assert!(second.as_mut().poll(&mut context).is_ready());
    }
}
