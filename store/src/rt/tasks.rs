//! What every executor of this crate is made of: tasks that never leave their thread, wakers that may, timers,
//! and the flag that an unpark sets. How tasks are picked and how the thread sleeps is the executor's own.
//!
//! A wake from any thread puts the task's id on one mutexed list; the executor moves that list to its run queues
//! before it picks. A task is on the list or in a queue at most once (`TaskWaker::queued`), so both stay as short
//! as the number of tasks and keep their memory: a wake allocates nothing once they have grown.
//!
//! No wake-up is lost: an executor goes to sleep only through [`Tasks::prepare_sleep`], which looks at the list
//! and says "asleep" under the list's lock, and a thread that adds to the list after that unparks it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use super::{LocalTask, Reaper, Runtime};
use crate::io::Unpark;
use kvarts_contract::sync::atomic::{AtomicBool, Ordering};
use kvarts_contract::sync::{Mutex, MutexGuard, Race, planted};
use kvarts_contract::{
    class::Class,
    clock::{Clock, Entropy, Nanos},
};

/// A task of one executor. The generation tells it from later tasks in the same slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TaskId {
    slot: u32,
    generation: u32,
}

/// What other threads may touch.
struct Remote {
    woken: Mutex<Woken>,
    /// An unpark was called and the executor has not seen it yet.
    unparked: AtomicBool,
    io: Arc<dyn Unpark>,
}

#[derive(Default)]
struct Woken {
    tasks: Vec<TaskId>,
    /// The executor sleeps, or is about to: a thread that adds a task must unpark it.
    asleep: bool,
}

impl Remote {
    fn woken(&self) -> MutexGuard<'_, Woken> {
        // Nothing under this lock panics half-way: a poisoned list is a whole list.
        self.woken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self, task: TaskId) {
        let mut woken = self.woken();
        woken.tasks.push(task);
        let asleep = std::mem::take(&mut woken.asleep);
        drop(woken);
        if asleep {
            self.io.unpark();
        }
    }
}

impl Unpark for Remote {
    fn unpark(&self) {
        // If the flag is still up, the thread that put it up has ended the park or is about to.
        if !self.unparked.swap(true, Ordering::AcqRel) {
            self.io.unpark();
        }
    }
}

struct TaskWaker {
    id: TaskId,
    /// The task is on the list or in a queue.
    queued: AtomicBool,
    remote: Arc<Remote>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel) {
            self.remote.wake(self.id);
        }
    }
}

/// A place for a task. Empty slots keep their generation.
struct Slot {
    generation: u32,
    class: Class,
    /// `None` while the task is polled, and when the slot is free.
    task: Option<LocalTask>,
    flag: Option<Arc<TaskWaker>>,
    waker: Waker,
}

#[derive(Default)]
struct Slots {
    all: Vec<Slot>,
    free: Vec<u32>,
    closed: bool,
}

#[derive(Default)]
struct Timers {
    waiting: BTreeMap<(Nanos, u64), Waker>,
    seq: u64,
}

/// The tasks of one executor and everything they wait for.
pub(super) struct Tasks {
    slots: RefCell<Slots>,
    queues: RefCell<[VecDeque<TaskId>; Class::ALL.len()]>,
    /// Who runs a class, waiting for it to become runnable (executors that run each class in a task of its own).
    runners: RefCell<[Option<Waker>; Class::ALL.len()]>,
    /// The other half of the list's double buffer.
    spare: RefCell<Vec<TaskId>>,
    timers: RefCell<Timers>,
    unparked: Cell<bool>,
    unpark_waiters: RefCell<Vec<Waker>>,
    reaper: RefCell<Option<Reaper>>,
    remote: Arc<Remote>,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
}

impl fmt::Debug for Tasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slots = self.slots.borrow();
        f.debug_struct("Tasks").field("live", &(slots.all.len() - slots.free.len())).finish_non_exhaustive()
    }
}

impl Tasks {
    /// No tasks. `io` ends the park of the executor that runs them.
    pub(super) fn new(io: Arc<dyn Unpark>, clock: Arc<dyn Clock>, entropy: Arc<dyn Entropy>) -> Rc<Self> {
        let remote = Arc::new(Remote { woken: Mutex::default(), unparked: AtomicBool::new(false), io });
        Rc::new(Self {
            slots: RefCell::default(),
            queues: RefCell::default(),
            runners: RefCell::default(),
            spare: RefCell::default(),
            timers: RefCell::default(),
            unparked: Cell::new(false),
            unpark_waiters: RefCell::default(),
            reaper: RefCell::default(),
            remote,
            clock,
            entropy,
        })
    }

    /// What other threads unpark the executor by: also completes [`Runtime::unparked`].
    pub(super) fn unparker(&self) -> Arc<dyn Unpark> {
        Arc::clone(&self.remote) as Arc<dyn Unpark>
    }

    /// Adds a runnable task; after [`Tasks::clear`] drops it instead.
    pub(super) fn spawn(&self, class: Class, task: LocalTask) {
        let mut slots = self.slots.borrow_mut();
        if slots.closed {
            drop(slots);
            drop(task);
            return;
        }
        let at = slots.free.pop().unwrap_or(u32::try_from(slots.all.len()).unwrap_or(u32::MAX));
        let generation = slots.all.get(at as usize).map_or(0, |slot| slot.generation);
        let id = TaskId { slot: at, generation };
        let flag =
            Arc::new(TaskWaker { id, queued: AtomicBool::new(true), remote: Arc::clone(&self.remote) });
        let waker = Waker::from(Arc::clone(&flag));
        let new = Slot { generation, class, task: Some(task), flag: Some(flag), waker };
        match slots.all.get_mut(at as usize) {
            Some(slot) => *slot = new,
            None => slots.all.push(new),
        }
        drop(slots);
        self.enqueue(class, id);
    }

    fn enqueue(&self, class: Class, id: TaskId) {
        self.queues.borrow_mut()[class as usize].push_back(id);
        let runner = self.runners.borrow_mut()[class as usize].take();
        if let Some(runner) = runner {
            runner.wake();
        }
    }

    /// Moves what was woken to the run queues and notes an unpark.
    pub(super) fn collect(&self) {
        if self.remote.unparked.load(Ordering::Relaxed) && self.remote.unparked.swap(false, Ordering::AcqRel)
        {
            self.unparked.set(true);
            let waiters = std::mem::take(&mut *self.unpark_waiters.borrow_mut());
            waiters.into_iter().for_each(Waker::wake);
        }
        let mut woken = self.spare.take();
        std::mem::swap(&mut self.remote.woken().tasks, &mut woken);
        for id in woken.drain(..) {
            let class = self.slots.borrow().all.get(id.slot as usize).map(|slot| slot.class);
            if let Some(class) = class {
                self.enqueue(class, id);
            }
        }
        *self.spare.borrow_mut() = woken;
    }

    /// Wakes tasks that wait for a time that has come.
    pub(super) fn fire_timers(&self) {
        if self.timers.borrow().waiting.is_empty() {
            return;
        }
        let now = self.clock.now();
        loop {
            let mut timers = self.timers.borrow_mut();
            let Some(first) = timers.waiting.first_entry().filter(|first| first.key().0 <= now) else {
                return;
            };
            let waker = first.remove();
            drop(timers);
            waker.wake();
        }
    }

    /// When the first timer is due.
    pub(super) fn next_timer(&self) -> Option<Nanos> {
        self.timers.borrow().waiting.first_key_value().map(|((at, _), _)| *at)
    }

    /// How many tasks of the class are runnable (some may have ended since they were woken).
    pub(super) fn runnable(&self, class: Class) -> usize {
        self.queues.borrow()[class as usize].len()
    }

    /// Whether any task is runnable.
    pub(super) fn any_runnable(&self) -> bool {
        self.queues.borrow().iter().any(|queue| !queue.is_empty())
    }

    /// Polls the `nth` runnable task of the class; says whether there was one to poll.
    pub(super) fn poll_one(&self, class: Class, nth: usize) -> bool {
        let id = self.queues.borrow_mut()[class as usize].remove(nth);
        let Some(id) = id else { return false };
        let Some((mut task, waker)) = self.take(id) else { return false };
        let outcome = task.as_mut().poll(&mut Context::from_waker(&waker));
        match outcome {
            Poll::Ready(()) => {
                drop(task);
                self.free(id);
            }
            Poll::Pending => self.put_back(id, task),
        }
        true
    }

    fn take(&self, id: TaskId) -> Option<(LocalTask, Waker)> {
        let mut slots = self.slots.borrow_mut();
        let slot = slots.all.get_mut(id.slot as usize).filter(|slot| slot.generation == id.generation)?;
        let task = slot.task.take()?;
        if let Some(flag) = &slot.flag {
            // Before the poll, so that a wake during the poll queues the task again.
            flag.queued.swap(false, Ordering::AcqRel);
        }
        Some((task, slot.waker.clone()))
    }

    fn put_back(&self, id: TaskId, task: LocalTask) {
        let mut slots = self.slots.borrow_mut();
        let closed = slots.closed;
        match slots.all.get_mut(id.slot as usize) {
            Some(slot) if !closed => slot.task = Some(task),
            // Cleared while it was polled. Its drop may come back here.
            _ => {
                drop(slots);
                drop(task);
            }
        }
    }

    fn free(&self, id: TaskId) {
        let mut slots = self.slots.borrow_mut();
        if let Some(slot) = slots.all.get_mut(id.slot as usize) {
            slot.generation = slot.generation.wrapping_add(1);
            slot.flag = None;
            slot.waker = Waker::noop().clone();
            slots.free.push(id.slot);
        }
    }

    /// Calls the reaper, if there is one.
    pub(super) fn reap(&self) -> usize {
        let Some(mut reaper) = self.reaper.take() else { return 0 };
        let reaped = reaper();
        // Unless it registered another in its place.
        self.reaper.borrow_mut().get_or_insert(reaper);
        reaped
    }

    /// True: nothing is runnable, and the next wake will unpark. Otherwise there is work to do first.
    pub(super) fn prepare_sleep(&self) -> bool {
        if self.any_runnable() || self.remote.unparked.load(Ordering::Acquire) {
            return false;
        }
        let mut woken = self.remote.woken();
        let asleep = woken.tasks.is_empty();
        if planted(Race::SleepInTwoSteps) {
            drop(woken);
            woken = self.remote.woken();
        }
        woken.asleep = asleep;
        asleep
    }

    /// Ends what [`Tasks::prepare_sleep`] began.
    pub(super) fn end_sleep(&self) {
        self.remote.woken().asleep = false;
    }

    /// Drops all tasks and the reaper, and every task that is spawned from now on.
    pub(super) fn clear(&self) {
        let mut slots = self.slots.borrow_mut();
        slots.closed = true;
        let tasks: Vec<_> = slots.all.iter_mut().filter_map(|slot| slot.task.take()).collect();
        drop(slots);
        // Destructors of tasks may wake, spawn and cancel timers, so nothing is borrowed here.
        drop(tasks);
        drop(self.reaper.take());
        let timers = std::mem::take(&mut self.timers.borrow_mut().waiting);
        drop(timers);
    }

    /// Completes when a task of the class is runnable. For the one task that runs the class.
    pub(super) fn class_runnable(&self, class: Class) -> impl Future<Output = ()> + '_ {
        std::future::poll_fn(move |cx| {
            if self.runnable(class) > 0 {
                return Poll::Ready(());
            }
            self.runners.borrow_mut()[class as usize] = Some(cx.waker().clone());
            Poll::Pending
        })
    }
}

/// An executor as its own tasks see it.
#[derive(Debug)]
pub(super) struct Handle(pub(super) Rc<Tasks>);

impl Runtime for Handle {
    fn spawn(&self, class: Class, task: LocalTask) {
        self.0.spawn(class, task);
    }

    fn sleep_until(&self, at: Nanos) -> LocalTask {
        Box::pin(Sleep { tasks: Rc::clone(&self.0), at, key: None })
    }

    fn yield_now(&self) -> LocalTask {
        let mut yielded = false;
        Box::pin(std::future::poll_fn(move |cx| {
            if yielded {
                return Poll::Ready(());
            }
            yielded = true;
            cx.waker().wake_by_ref();
            Poll::Pending
        }))
    }

    fn unparked(&self) -> LocalTask {
        let tasks = Rc::clone(&self.0);
        Box::pin(std::future::poll_fn(move |cx| {
            let seen = tasks.unparked.replace(false);
            // Both, so that one call of unpark completes one future.
            if tasks.remote.unparked.swap(false, Ordering::AcqRel) || seen {
                return Poll::Ready(());
            }
            let mut waiters = tasks.unpark_waiters.borrow_mut();
            if !waiters.iter().any(|waiter| waiter.will_wake(cx.waker())) {
                waiters.push(cx.waker().clone());
            }
            Poll::Pending
        }))
    }

    fn set_reaper(&self, reaper: Reaper) {
        self.0.reaper.replace(Some(reaper));
    }

    fn clock(&self) -> &Arc<dyn Clock> {
        &self.0.clock
    }

    fn entropy(&self) -> &Arc<dyn Entropy> {
        &self.0.entropy
    }
}

/// Waits for a time; leaves no timer behind when dropped.
struct Sleep {
    tasks: Rc<Tasks>,
    at: Nanos,
    key: Option<(Nanos, u64)>,
}

impl Sleep {
    fn cancel(&mut self) {
        if let Some(key) = self.key.take() {
            self.tasks.timers.borrow_mut().waiting.remove(&key);
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.tasks.clock.now() >= self.at {
            self.cancel();
            return Poll::Ready(());
        }
        let key = self.key.unwrap_or_else(|| {
            let mut timers = self.tasks.timers.borrow_mut();
            timers.seq += 1;
            (self.at, timers.seq)
        });
        self.key = Some(key);
        self.tasks.timers.borrow_mut().waiting.insert(key, cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.cancel();
    }
}
