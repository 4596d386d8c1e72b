//! Whose turn it is to make room: one task at a time, of whatever executor, the others in the order in which they came.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::task::{Poll, Waker};

use super::lock;
use kvarts_contract::sync::Mutex;

/// The turn. A task that gives up waiting leaves no trace.
#[derive(Debug, Default)]
pub(crate) struct MakingRoom {
    queue: Mutex<Queue>,
    /// Those of tasks that wait for bytes. One that gives up leaves its waker until bytes are freed.
    waiting: Mutex<Vec<Waker>>,
}

#[derive(Debug, Default)]
struct Queue {
    next: u64,
    /// The first has the turn.
    places: BTreeMap<u64, Option<Waker>>,
}

/// A place in the queue, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    queue: &'a Mutex<Queue>,
    number: u64,
}

impl MakingRoom {
    fn place(&self, queue: &mut Queue) -> Place<'_> {
        let number = queue.next;
        queue.next += 1;
        queue.places.insert(number, None);
        Place { queue: &self.queue, number }
    }

    /// Completes when it is this task's turn, which ends when the answer is dropped.
    pub(crate) async fn take(&self) -> Place<'_> {
        let place = self.place(&mut lock(&self.queue));
        poll_fn(|context| {
            let mut queue = lock(&self.queue);
            if queue.places.first_key_value().is_some_and(|(first, _)| *first == place.number) {
                return Poll::Ready(());
            }
            queue.places.insert(place.number, Some(context.waker().clone()));
            Poll::Pending
        })
        .await;
        place
    }
}

impl MakingRoom {
    /// A task waits for bytes: it looks again when some have been freed.
    pub(crate) fn wait(&self, waker: &Waker) {
        let mut waiting = lock(&self.waiting);
        if !waiting.iter().any(|one| one.will_wake(waker)) {
            waiting.push(waker.clone());
        }
    }

    /// Bytes have been freed.
    pub(crate) fn freed(&self) {
        let waiting = std::mem::take(&mut *lock(&self.waiting));
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut queue = lock(self.queue);
        queue.places.remove(&self.number);
        let first = queue.places.first_entry().and_then(|mut first| first.get_mut().take());
        drop(queue);
        if let Some(waker) = first {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::Context;

    #[test]
    fn the_turn_goes_on_in_order_past_those_who_gave_up() {
        let turn = MakingRoom::default();
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(first) = pin!(turn.take()).poll(&mut context) else { panic!("the turn is free") };
        let mut gone = Box::pin(turn.take());
        let mut second = pin!(turn.take());
        assert!(gone.as_mut().poll(&mut context).is_pending());
        assert!(second.as_mut().poll(&mut context).is_pending());
        drop(first);
        assert!(second.as_mut().poll(&mut context).is_pending(), "another task came before");
        drop(gone);
        let Poll::Ready(second) = second.as_mut().poll(&mut context) else { panic!("no task is before") };
        let mut last = pin!(turn.take());
        assert!(last.as_mut().poll(&mut context).is_pending());
        drop(second);
        assert!(last.as_mut().poll(&mut context).is_ready());
    }
}
