//! Tasks and threads that wait for what arrives in a pool. All reads of a pool wake one of these, and it wakes all that wait for any of them:
//! so a read that several stages wait for needs not know them.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};
use std::time::Duration;

#[derive(Debug, Default)]
struct State {
    /// How often something has arrived.
    count: u64,
    wakers: Vec<Waker>,
}

#[derive(Debug, Default)]
pub(super) struct News {
    state: Mutex<State>,
    came: Condvar,
}

impl News {
    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is one step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How often something has arrived until now.
    pub(super) fn count(&self) -> u64 {
        self.state().count
    }

    /// Has a task woken by what arrives next.
    pub(super) fn wakes(&self, waker: &Waker) {
        let mut state = self.state();
        if !state.wakers.iter().any(|known| known.will_wake(waker)) {
            state.wakers.push(waker.clone());
        }
    }

    /// Blocks the thread until something has arrived since it was `count` times, or for so long.
    pub(super) fn wait(&self, count: u64, most: Duration) {
        let waits = |state: &mut State| state.count == count;
        let _ = self.came.wait_timeout_while(self.state(), most, waits);
    }

    /// Something has arrived.
    pub(super) fn tell(&self) {
        let mut state = self.state();
        state.count += 1;
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        self.came.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Wake for News {
    fn wake(self: Arc<Self>) {
        self.tell();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.tell();
    }
}
