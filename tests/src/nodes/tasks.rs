//! Tasks and timers of simulated time. Each task belongs to an owner and ends with it.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};

use kvarts_contract::clock::{Clock, Nanos};
use kvarts_peer::read::{Runner, Task};

use crate::sim::{Rng, SimClock};

struct One {
    owner: u64,
    body: Mutex<Option<Task>>,
    is_queued: AtomicBool,
    tasks: Weak<Tasks>,
}

impl Wake for One {
    fn wake(self: Arc<Self>) {
        if !self.is_queued.swap(true, Ordering::SeqCst)
            && let Some(tasks) = self.tasks.upgrade()
        {
            tasks.lock().queue.push(self);
        }
    }
}

#[derive(Default)]
struct State {
    queue: Vec<Arc<One>>,
    all: BTreeMap<u64, Arc<One>>,
    next: u64,
    timers: BTreeMap<(Nanos, u64), Waker>,
    /// Owners whose tasks stand still.
    stopped: BTreeSet<u64>,
}

/// The tasks of a simulation.
pub struct Tasks {
    clock: Arc<SimClock>,
    state: Mutex<State>,
}

impl Tasks {
    /// None yet.
    pub fn new(clock: &Arc<SimClock>) -> Arc<Self> {
        Arc::new(Self { clock: Arc::clone(clock), state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more task of this owner.
    pub fn spawn(self: &Arc<Self>, owner: u64, task: Task) {
        let one = Arc::new(One {
            owner,
            body: Mutex::new(Some(task)),
            is_queued: AtomicBool::new(true),
            tasks: Arc::downgrade(self),
        });
        let mut state = self.lock();
        state.next += 1;
        let number = state.next;
        state.all.insert(number, Arc::clone(&one));
        state.queue.push(one);
    }

    /// Runs a task that can go on, if there is one.
    pub fn step(&self, rng: &mut Rng) -> bool {
        let now = self.clock.now();
        let due: Vec<Waker> = {
            let mut state = self.lock();
            let later = state.timers.split_off(&(Nanos(now.0.saturating_add(1)), 0));
            std::mem::replace(&mut state.timers, later).into_values().collect()
        };
        due.into_iter().for_each(Waker::wake);
        let one = {
            let mut state = self.lock();
            let State { queue, stopped, .. } = &mut *state;
            let is_free = |at: &usize| queue.get(*at).is_some_and(|one| !stopped.contains(&one.owner));
            let free: Vec<usize> = (0..queue.len()).filter(is_free).collect();
            if free.is_empty() {
                return false;
            }
            let at = free[rng.index(free.len())];
            queue.swap_remove(at)
        };
        one.is_queued.store(false, Ordering::SeqCst);
        let waker = Waker::from(Arc::clone(&one));
        let body = one.body.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut body) = body else { return true };
        if body.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            *one.body.lock().unwrap_or_else(PoisonError::into_inner) = Some(body);
        } else {
            self.lock().all.retain(|_, other| !Arc::ptr_eq(other, &one));
        }
        true
    }

    /// When the next timer is due.
    pub fn next_time(&self) -> Option<Nanos> {
        self.lock().timers.first_key_value().map(|((at, _), _)| *at)
    }

    /// Tasks that have not ended.
    pub fn count(&self) -> usize {
        self.lock().all.len()
    }

    /// The tasks of this owner stand still, or go on.
    pub fn stop(&self, owner: u64, stops: bool) {
        let mut state = self.lock();
        if stops {
            state.stopped.insert(owner);
        } else {
            state.stopped.remove(&owner);
        }
    }

    /// The tasks of this owner end where they are.
    pub fn drop_all_of(&self, owner: u64) {
        let gone: Vec<Arc<One>> = {
            let mut state = self.lock();
            state.queue.retain(|one| one.owner != owner);
            state.all.extract_if(.., |_, one| one.owner == owner).map(|(_, one)| one).collect()
        };
        for one in gone {
            let body = one.body.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(body);
        }
    }

    /// All of them end.
    pub fn close(&self) {
        loop {
            let Some(owner) = self.lock().all.values().next().map(|one| one.owner) else { return };
            self.drop_all_of(owner);
        }
    }
}

impl std::fmt::Debug for Tasks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tasks({})", self.count())
    }
}

/// An owner of tasks that run here.
#[derive(Clone, Debug)]
pub struct Owner {
    /// Where.
    pub tasks: Arc<Tasks>,
    /// Who.
    pub number: u64,
}

struct Sleep {
    tasks: Arc<Tasks>,
    until: Nanos,
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.tasks.clock.now() >= self.until {
            return Poll::Ready(());
        }
        let mut state = self.tasks.lock();
        state.next += 1;
        let number = state.next;
        state.timers.insert((self.until, number), context.waker().clone());
        Poll::Pending
    }
}

impl Runner for Owner {
    fn now(&self) -> Nanos {
        self.tasks.clock.now()
    }

    fn sleep_until(&self, until: Nanos) -> Task {
        Box::pin(Sleep { tasks: Arc::clone(&self.tasks), until })
    }

    fn spawn(&self, task: Task) {
        self.tasks.spawn(self.number, task);
    }
}
