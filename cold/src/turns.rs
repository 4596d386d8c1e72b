//! Turns of ranges: how many are read at once. A bucket that asks for fewer requests has half of them, and more again as ranges come.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

#[derive(Debug)]
struct State {
    most: f64,
    /// How many may be read at once now; one at least.
    allowed: f64,
    /// Below zero for moments: a range that was asked for twice has one turn, and both may step aside.
    running: i64,
    /// Those who wait, in their order.
    waiting: VecDeque<(u64, Waker)>,
    next: u64,
    /// When it was halved last. What was asked for before that tells nothing new.
    cut_at: Option<Duration>,
}

impl State {
    fn has_room(&self) -> bool {
        (self.running as f64) < self.allowed.floor()
    }

    fn wake_first(&self) {
        if self.has_room()
            && let Some((_, waker)) = self.waiting.front()
        {
            waker.wake_by_ref();
        }
    }
}

/// The turns of one bucket.
#[derive(Debug)]
pub(crate) struct Turns(Mutex<State>);

/// A turn, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn<'a>(&'a Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.changed(-1);
    }
}

/// A turn that is lent to others while its range waits to be asked for again. Its range has it back when this is dropped.
#[derive(Debug)]
pub(crate) struct Aside<'a>(&'a Turns);

impl Drop for Aside<'_> {
    fn drop(&mut self) {
        self.0.changed(1);
    }
}

/// A place among those who wait, which goes with who gives up.
struct Place<'a>(&'a Turns, Option<u64>);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.1 {
            let mut state = self.0.lock();
            state.waiting.retain(|(other, _)| *other != number);
            state.wake_first();
        }
    }
}

impl Turns {
    /// This number of them at once.
    pub(crate) fn new(most: usize) -> Self {
        let most = most.max(1) as f64;
        Self(Mutex::new(State {
            most,
            allowed: most,
            running: 0,
            waiting: VecDeque::new(),
            next: 0,
            cut_at: None,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self, by: i64) {
        let mut state = self.lock();
        state.running = state.running.saturating_add(by);
        state.wake_first();
    }

    /// A turn, when those who asked before have had theirs.
    pub(crate) async fn take(&self) -> Turn<'_> {
        let mut place = Place(self, None);
        // ends: those before it have turns no longer than their requests' time (`patience`)
        std::future::poll_fn(|context| self.poll(&mut place, false, context)).await
    }

    /// Lends a turn to others until `wait` is over, and then until there is room for it, before those who have had none yet.
    pub(crate) async fn step_aside(&self, wait: impl Future<Output = ()>) {
        let aside = Aside(self);
        self.changed(-1);
        // ends: the caller's sleep: `longest_wait` at most
        wait.await;
        let mut place = Place(self, None);
        // ends: those before it have turns no longer than their requests' time (`patience`)
        let turn = std::future::poll_fn(|context| self.poll(&mut place, true, context)).await;
        // Its own is back before the other one goes, so no one else is woken for it.
        drop(aside);
        drop(turn);
    }

    fn poll<'a>(&'a self, place: &mut Place<'a>, is_first: bool, context: &Context<'_>) -> Poll<Turn<'a>> {
        let mut state = self.lock();
        let before = state.waiting.iter().position(|(number, _)| Some(*number) == place.1);
        let is_next = before.unwrap_or(if is_first { 0 } else { state.waiting.len() }) == 0;
        if is_next && state.has_room() {
            state.running = state.running.saturating_add(1);
            if before.is_some() {
                state.waiting.pop_front();
            }
            place.1 = None;
            state.wake_first();
            return Poll::Ready(Turn(self));
        }
        let waker = context.waker().clone();
        match before.and_then(|at| state.waiting.get_mut(at)) {
            Some(own) => own.1 = waker,
            None => {
                let number = state.next;
                state.next += 1;
                place.1 = Some(number);
                if is_first {
                    state.waiting.push_front((number, waker));
                } else {
                    state.waiting.push_back((number, waker));
                }
            }
        }
        Poll::Pending
    }

    /// The bucket asked for fewer requests, of one that was made at `begun`: half of them from now on. Of requests that were made at once
    /// only the first one says it: gives whether it did.
    pub(crate) fn halve(&self, begun: Duration, now: Duration) -> bool {
        let mut state = self.lock();
        let is_new = state.cut_at.is_none_or(|cut| begun > cut);
        if is_new {
            state.allowed = (state.allowed / 2.0).max(1.0);
            state.cut_at = Some(now);
        }
        is_new
    }

    /// A range came: one more at once, when as many have come as are read at once.
    pub(crate) fn grow(&self) {
        let mut state = self.lock();
        state.allowed = (state.allowed + 1.0 / state.allowed).min(state.most);
        state.wake_first();
    }

    /// How many may be read at once now.
    pub(crate) fn allowed(&self) -> usize {
        self.lock().allowed as usize
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn polled<F: Future>(future: std::pin::Pin<&mut F>) -> Option<F::Output> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(done) => Some(done),
            Poll::Pending => None,
        }
    }

    #[test]
    fn turns_go_in_their_order_and_who_gives_up_leaves_no_place() {
        let turns = Turns::new(1);
        let first = polled(pin!(turns.take())).unwrap();
        let (mut second, mut third) = (Box::pin(turns.take()), pin!(turns.take()));
        assert!(polled(second.as_mut()).is_none() && polled(third.as_mut()).is_none());
        drop(first);
        assert!(polled(third.as_mut()).is_none(), "the second one is first");
        drop(second);
        assert!(polled(third.as_mut()).is_some());
    }

    #[test]
    fn a_bucket_that_asks_for_fewer_has_half_once_for_requests_that_were_made_at_once_and_more_again_by_and_by()
     {
        let turns = Turns::new(16);
        let new = (0..8).filter(|_| turns.halve(MS, 2 * MS)).count();
        assert_eq!(new, 1);
        assert_eq!(turns.allowed(), 8);
        assert!(turns.halve(3 * MS, 4 * MS) && turns.allowed() == 4);
        (5..20).for_each(|at| assert!(turns.halve(at * MS, at * MS)));
        assert_eq!(turns.allowed(), 1, "never none");
        (0..400).for_each(|_| turns.grow());
        assert_eq!(turns.allowed(), 16);
    }

    #[test]
    fn a_range_that_waits_to_be_asked_for_again_lends_its_turn_and_has_it_back_before_new_ones() {
        let turns = Turns::new(1);
        let own = polled(pin!(turns.take())).unwrap();
        let (tell, told) = tokio::sync::oneshot::channel::<()>();
        let mut aside = Box::pin(turns.step_aside(async { drop(told.await) }));
        let (mut second, mut third) = (Box::pin(turns.take()), Box::pin(turns.take()));
        assert!(polled(aside.as_mut()).is_none());
        let lent = polled(second.as_mut()).expect("the turn is lent");
        assert!(polled(third.as_mut()).is_none());
        drop(tell);
        assert!(polled(aside.as_mut()).is_none(), "another one has the turn");
        drop(lent);
        assert!(polled(third.as_mut()).is_none() && polled(aside.as_mut()).is_some());
        // Given up in between it has its turn back as well.
        let mut aside = Box::pin(turns.step_aside(std::future::pending()));
        assert!(polled(aside.as_mut()).is_none());
        drop(aside);
        assert!(polled(third.as_mut()).is_none());
        drop(own);
        assert!(polled(third.as_mut()).is_some());
    }
}
