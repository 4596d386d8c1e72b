//! A turn that one task at a time has, and each of several owners in rotation: an owner that queues a hundred tasks
//! waits for its own, and every other owner for one of them at most.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use super::notify::Notify;

#[derive(Debug)]
struct Queue<K> {
    taken: bool,
    next: u64,
    /// Owners in the order of their turns, each with those of its tasks that wait.
    waiting: VecDeque<(K, VecDeque<u64>)>,
}

/// Something that one task at a time may do.
#[derive(Debug)]
pub(crate) struct FairTurn<K> {
    queue: RefCell<Queue<K>>,
    changed: Notify,
}

impl<K> Default for FairTurn<K> {
    fn default() -> Self {
        let queue = Queue { taken: false, next: 0, waiting: VecDeque::new() };
        Self { queue: RefCell::new(queue), changed: Notify::default() }
    }
}

/// A task's place in the queue, and then its turn.
#[derive(Debug)]
pub(crate) struct Place<'a, K: PartialEq> {
    turn: &'a FairTurn<K>,
    owner: K,
    number: u64,
    has_it: Cell<bool>,
}

impl<K: Clone + PartialEq> FairTurn<K> {
    /// Completes when it is a turn of this owner's and of this task, which ends when the answer is dropped.
    pub(crate) async fn take(&self, owner: &K) -> Place<'_, K> {
        let place = self.enter(owner);
        self.changed.until(|| self.queue.borrow_mut().begin(place.number).then_some(())).await;
        place.has_it.set(true);
        place
    }

    fn enter(&self, owner: &K) -> Place<'_, K> {
        let mut queue = self.queue.borrow_mut();
        queue.next += 1;
        let number = queue.next;
        match queue.waiting.iter_mut().find(|(one, _)| one == owner) {
            Some((_, tasks)) => tasks.push_back(number),
            None => queue.waiting.push_back((owner.clone(), VecDeque::from([number]))),
        }
        Place { turn: self, owner: owner.clone(), number, has_it: Cell::new(false) }
    }
}

impl<K: PartialEq> Queue<K> {
    /// Whether the task has the turn now.
    fn begin(&mut self, number: u64) -> bool {
        let first = self.waiting.front().and_then(|(_, tasks)| tasks.front());
        if self.taken || first != Some(&number) {
            return false;
        }
        self.taken = true;
        if let Some((owner, mut tasks)) = self.waiting.pop_front() {
            tasks.pop_front();
            if !tasks.is_empty() {
                self.waiting.push_back((owner, tasks));
            }
        }
        true
    }

    fn leave(&mut self, owner: &K, number: u64) {
        if let Some((_, tasks)) = self.waiting.iter_mut().find(|(one, _)| one == owner) {
            tasks.retain(|task| *task != number);
        }
        self.waiting.retain(|(_, tasks)| !tasks.is_empty());
    }
}

impl<K: PartialEq> Drop for Place<'_, K> {
    fn drop(&mut self) {
        let mut queue = self.turn.queue.borrow_mut();
        match self.has_it.get() {
            true => queue.taken = false,
            false => queue.leave(&self.owner, self.number),
        }
        drop(queue);
        self.turn.changed.wake_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    type Taking<'a> = Pin<Box<dyn Future<Output = Place<'a, &'static str>> + 'a>>;

    fn poll<'a>(taking: &mut Taking<'a>) -> Poll<Place<'a, &'static str>> {
        taking.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    }

    fn enter<'a>(
        turn: &'a FairTurn<&'static str>,
        owners: &[&'static str],
    ) -> Vec<(&'static str, Taking<'a>)> {
        let take = |owner: &'static str| async move { turn.take(&owner).await };
        let mut all: Vec<(_, Taking<'a>)> = Vec::new();
        for &owner in owners {
            all.push((owner, Box::pin(take(owner))));
        }
        for (owner, taking) in &mut all {
            assert!(poll(taking).is_pending(), "{owner}");
        }
        all
    }

    /// Who has the turns, one after the other.
    fn order(mut waiting: Vec<(&'static str, Taking<'_>)>) -> String {
        let mut order = String::new();
        while !waiting.is_empty() {
            let mut found = Vec::new();
            for (at, (_, taking)) in waiting.iter_mut().enumerate() {
                if let Poll::Ready(place) = poll(taking) {
                    found.push((at, place));
                }
            }
            assert_eq!(found.len(), 1, "one has the turn");
            for (at, place) in found {
                order += waiting[at].0;
                drop(place);
                drop(waiting.remove(at));
            }
        }
        order
    }

    #[test]
    fn each_owner_has_its_turn_however_many_tasks_of_others_came_before() {
        let turn = FairTurn::default();
        let mut first: Taking<'_> = Box::pin(turn.take(&"a"));
        let Poll::Ready(held) = poll(&mut first) else { panic!("no task has it") };
        let waiting = enter(&turn, &["a", "a", "a", "a", "b", "c", "b"]);
        drop(held);
        assert_eq!(order(waiting), "abcabaa");
        assert!(turn.queue.borrow().waiting.is_empty());
    }

    #[test]
    fn who_leaves_keeps_nobody_waiting() {
        let turn = FairTurn::default();
        let mut first: Taking<'_> = Box::pin(turn.take(&"a"));
        let Poll::Ready(held) = poll(&mut first) else { panic!("no task has it") };
        let mut waiting = enter(&turn, &["a", "b", "c", "a"]);
        drop(waiting.remove(1));
        drop(waiting.remove(0));
        drop(held);
        assert_eq!(order(waiting), "ac");
        assert!(!turn.queue.borrow().taken);
    }
}
