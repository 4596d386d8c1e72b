//! The plain executor: one thread, tasks in classes, timers, and a sleep in its [`Io`].
//!
//! It picks by stride: each class has a position that moves by `1 / shares` with every task it runs, and the class
//! that lags most goes next; a class that was idle rejoins at the present position, so that idling earns nothing.
//! Within a class tasks run in the order in which they became runnable. A weight counts polls, not time: tasks are
//! expected to yield often.
//!
//! The same executor runs in three ways: [`LocalExecutor::run`] on a thread of its own (see
//! [`threads`](super::threads)), [`LocalExecutor::block_on`] for tests and tools, and one [`LocalExecutor::step`]
//! at a time in a simulation, which may also inject a [`Chooser`] that permutes what is picked.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use super::tasks::{Handle, Tasks};
use super::{Body, ExecutorContext, LocalTask, Reaper, Runtime};
use crate::io::{Io, Unpark};
use kvarts_contract::{
    class::Class,
    clock::{Clock, Entropy, Nanos},
};

/// How many tasks run between two looks at the device.
const TURN: u32 = 64;

/// A multiple of every class's shares, so that strides are whole.
const SCALE: u64 = 3000;

/// Given how many things could be picked, says which one is. For schedule exploration: with a chooser, the order of
/// runnable tasks within a class and the moments at which completions are reaped are its to decide.
pub type Chooser = Box<dyn FnMut(usize) -> usize>;

/// Runs tasks on the thread that made it. Dropping it drops its tasks.
pub struct LocalExecutor {
    index: usize,
    tasks: Rc<Tasks>,
    handle: Rc<Handle>,
    io: Rc<RefCell<dyn Io>>,
    positions: RefCell<Positions>,
    chooser: RefCell<Option<Chooser>>,
    polls_since_reap: Cell<u32>,
    done: Rc<Cell<bool>>,
}

/// Where each class is in its share of the executor.
#[derive(Debug, Default)]
struct Positions {
    class: [u64; Class::ALL.len()],
    /// The position of the last pick: where an idle class rejoins.
    present: u64,
}

impl Positions {
    /// The class to run, of those with something runnable; it is charged for one task.
    fn pick(&mut self, runnable: impl Fn(Class) -> bool) -> Option<Class> {
        let present = self.present;
        let mut best: Option<(u64, Class)> = None;
        for class in Class::ALL {
            if runnable(class) {
                let position = self.class[class as usize].max(present);
                // Strictly less: of equals, the most urgent goes first.
                if best.is_none_or(|(least, _)| position < least) {
                    best = Some((position, class));
                }
            }
        }
        let (position, class) = best?;
        self.present = position;
        self.class[class as usize] = position + SCALE / u64::from(class.shares());
        Some(class)
    }
}

impl fmt::Debug for LocalExecutor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalExecutor")
            .field("index", &self.index)
            .field("tasks", &self.tasks)
            .field("done", &self.done.get())
            .finish_non_exhaustive()
    }
}

impl LocalExecutor {
    /// An executor without tasks, that sleeps in `io`.
    pub fn new(
        index: usize,
        io: Rc<RefCell<dyn Io>>,
        clock: Arc<dyn Clock>,
        entropy: Arc<dyn Entropy>,
    ) -> Self {
        let unparker = io.borrow().unparker();
        let tasks = Tasks::new(unparker, clock, entropy);
        Self {
            index,
            handle: Rc::new(Handle(Rc::clone(&tasks))),
            tasks,
            io,
            positions: RefCell::default(),
            chooser: RefCell::default(),
            polls_since_reap: Cell::new(0),
            done: Rc::new(Cell::new(false)),
        }
    }

    /// The executor as its tasks see it.
    pub fn runtime(&self) -> Rc<dyn Runtime> {
        Rc::clone(&self.handle) as Rc<dyn Runtime>
    }

    /// What other threads end the executor's sleep by.
    pub fn unparker(&self) -> Arc<dyn Unpark> {
        self.tasks.unparker()
    }

    /// What the executor's first task is given.
    pub fn context(&self) -> ExecutorContext {
        ExecutorContext {
            index: self.index,
            rt: self.runtime(),
            io: Rc::clone(&self.io),
            unparker: self.unparker(),
        }
    }

    /// As [`Runtime::set_reaper`].
    pub fn set_reaper(&self, reaper: Reaper) {
        self.handle.set_reaper(reaper);
    }

    /// Hands the order in which things are picked to `chooser`.
    pub fn set_chooser(&self, chooser: Chooser) {
        self.chooser.replace(Some(chooser));
    }

    /// Starts the task whose completion ends the executor.
    pub fn start(&self, body: Body) {
        self.spawn_root(body(self.context()));
    }

    fn spawn_root(&self, root: LocalTask) {
        self.done.set(false);
        let done = Rc::clone(&self.done);
        self.tasks.spawn(
            Class::Foreground,
            Box::pin(async move {
                root.await;
                done.set(true);
            }),
        );
    }

    /// Whether the task given to [`LocalExecutor::start`] or [`LocalExecutor::block_on`] has completed.
    pub fn is_done(&self) -> bool {
        self.done.get()
    }

    /// Runs `root`, and whatever it spawned, until `root` completes. Other tasks stay as they are.
    pub fn block_on(&self, root: LocalTask) {
        self.spawn_root(root);
        self.run();
    }

    /// Runs until the first task completes, sleeping when there is nothing to do.
    pub fn run(&self) {
        while !self.is_done() {
            if !self.step() && !self.is_done() {
                self.sleep();
            }
        }
    }

    fn sleep(&self) {
        if !self.tasks.prepare_sleep() {
            return;
        }
        let timeout = self.next_timer().map(|at| at.since(self.handle.clock().now()));
        self.io.borrow_mut().park(timeout);
        self.tasks.end_sleep();
    }

    /// Runs one runnable task, or reaps completions if none is. False: nothing can be done before a completion
    /// arrives, a timer is due or another thread wakes something.
    pub fn step(&self) -> bool {
        let due = self.polls_since_reap.get() >= TURN;
        if (due || self.choose(4) == Some(3)) && self.reap() {
            return true;
        }
        self.tasks.collect();
        if self.poll_next() {
            self.polls_since_reap.set(self.polls_since_reap.get().saturating_add(1));
            return true;
        }
        self.tasks.fire_timers();
        let reaped = self.reap();
        self.tasks.collect();
        reaped || self.tasks.any_runnable()
    }

    fn reap(&self) -> bool {
        self.polls_since_reap.set(0);
        // Timers are looked at as often as the device: at least once in a turn.
        self.tasks.fire_timers();
        self.tasks.reap() > 0
    }

    fn poll_next(&self) -> bool {
        loop {
            let picked = self.positions.borrow_mut().pick(|class| self.tasks.runnable(class) > 0);
            let Some(class) = picked else { return false };
            let runnable = self.tasks.runnable(class);
            let nth = self.choose(runnable).map_or(0, |nth| nth % runnable.max(1));
            // False for a task that has ended since it was woken.
            if self.tasks.poll_one(class, nth) {
                return true;
            }
        }
    }

    fn choose(&self, among: usize) -> Option<usize> {
        self.chooser.borrow_mut().as_mut().map(|choose| choose(among))
    }

    /// Steps until nothing can be done or `steps_max` steps were taken; says how many were.
    pub fn run_until_idle(&self, steps_max: usize) -> usize {
        (0..steps_max).take_while(|_| self.step()).count()
    }

    /// When the first timer is due.
    pub fn next_timer(&self) -> Option<Nanos> {
        self.tasks.next_timer()
    }
}

impl Drop for LocalExecutor {
    fn drop(&mut self) {
        // Tasks hold the runtime and the runtime holds tasks.
        self.tasks.clear();
    }
}

#[cfg(test)]
#[path = "local_tests.rs"]
mod tests;
