//! Executors on glommio: its scheduler gives each class its shares of time.
//!
//! Of glommio this uses executors and task queues; not its files, its network, its timers or its blocking pool. Our tasks are not
//! glommio tasks: each class is *run* by one glommio task in the class's queue (a runner), which polls our own tasks. So tasks,
//! wakers, timers and cancellation behave exactly as on the plain executor, and glommio's wakers, whose counts it keeps with care
//! only on their own thread, never leave it.
//!
//! One more glommio task, the pump, turns the device: it reaps, fires timers, and when no runner has work it sleeps in
//! [`Io::park`], as the plain executor does. Nothing else of glommio is runnable then, so glommio itself never sleeps: in its ring, behind an
//! eventfd, each sleep cost about 28 us of processor time more. While runners have work they reap every few tasks (`TURN`).

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use glommio::{Latency, LocalExecutor, LocalExecutorBuilder, Placement, Shares, TaskQueueHandle};

use super::tasks::{Handle, Tasks};
use super::threads::{MakeIo, start_thread};
use super::{Body, ExecutorContext, Join, Launcher, Runtime};
use crate::io::Io;
use kvarts_contract::{
    class::Class,
    clock::{Clock, Entropy},
};

/// What glommio registers with the kernel for its own I/O, of which there is next to none: its least. An executor
/// locks about three times as much, far below the usual limit of 8 MiB.
const IO_MEMORY: usize = 64 << 10;
/// Entries of each of glommio's rings, which has next to none in them.
const RING_DEPTH: usize = 32;
/// After this many tasks a runner looks at the device and lets other classes have their turn; earlier where they have taken so long.
const TURN: u32 = 16;
const TURN_TIME: Duration = Duration::from_micros(250);
/// glommio's preemption timer, set so that it never fires: glommio 0.9 goes to sleep for ever, over runnable tasks,
/// if the timer fires between its look at the rings and its first task. Classes take turns because runners yield, and none of
/// glommio's latency settings (they set the same timer) may be used.
const NEVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// The longest sleep. glommio multiplies the time of each turn of a queue in 64 bits, which overflow after some weeks: so the pump ends its
/// turn between two sleeps of an executor that has nothing to do.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// Starts each executor on a thread of its own, under glommio.
#[derive(Clone)]
pub struct GlommioLauncher {
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    make_io: MakeIo,
    cores: Vec<usize>,
}

impl fmt::Debug for GlommioLauncher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GlommioLauncher").field("cores", &self.cores).finish_non_exhaustive()
    }
}

impl GlommioLauncher {
    /// Executors that run wherever the kernel puts them.
    pub fn new(clock: Arc<dyn Clock>, entropy: Arc<dyn Entropy>, make_io: MakeIo) -> Self {
        Self { clock, entropy, make_io, cores: Vec::new() }
    }

    /// Executor `i` runs on core `cores[i % cores.len()]` only. No cores: wherever the kernel puts it.
    #[must_use]
    pub fn pinned_to(mut self, cores: Vec<usize>) -> Self {
        self.cores = cores;
        self
    }

    /// Whether glommio can run here; the error says why not, and the caller then uses
    /// [`ThreadLauncher`](super::threads::ThreadLauncher).
    pub fn probe() -> Result<(), String> {
        let ended = start_thread(0, |started| {
            let made = make(None);
            drop(started.send(made.as_ref().map(drop).map_err(Clone::clone)));
            if let Ok(executor) = made {
                executor.run(async {});
            }
        });
        ended.and_then(Join::join)
    }

    fn start(self, index: usize, body: Body) -> Result<impl FnOnce(), String> {
        let core = self.cores.get(index.checked_rem(self.cores.len()).unwrap_or(0)).copied();
        let executor = make(core)?;
        let io = (self.make_io)(index)?;
        Ok(move || {
            let tasks = Tasks::new(io.borrow().unparker(), self.clock, self.entropy);
            let shared = Rc::new(Shared {
                tasks,
                io,
                done: Cell::new(false),
                pump: Cell::new(None),
                called: Cell::new(false),
            });
            // Tasks hold the runtime and the runtime holds tasks: also a panic must let them go, or it is not reported.
            let cleared = Cleared(Rc::clone(&shared));
            executor.run(main(Rc::clone(&shared), index, body));
            drop(cleared);
        })
    }
}

impl Launcher for GlommioLauncher {
    fn launch(&self, index: usize, body: Body) -> Result<Box<dyn Join + Send>, String> {
        let this = self.clone();
        start_thread(index, move |started| {
            let ready = this.start(index, body);
            // The receiver is gone only if the launching thread has died.
            drop(started.send(ready.as_ref().map(drop).map_err(Clone::clone)));
            if let Ok(run) = ready {
                run();
            }
        })
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.clock)
    }

    fn entropy(&self) -> Arc<dyn Entropy> {
        Arc::clone(&self.entropy)
    }
}

/// A glommio executor for the calling thread.
fn make(core: Option<usize>) -> Result<LocalExecutor, String> {
    LocalExecutorBuilder::new(core.map_or(Placement::Unbound, Placement::Fixed))
        .name("kvarts")
        .io_memory(IO_MEMORY)
        .ring_depth(RING_DEPTH)
        .preempt_timer(NEVER)
        .make()
        .map_err(|why| {
            format!(
                "the runtime glommio cannot be used ({why}): this runtime needs io_uring and 512 KiB \
                of lockable memory"
            )
        })
}

/// What the pump, the runners and the root task of one executor share.
struct Shared {
    tasks: Rc<Tasks>,
    io: Rc<RefCell<dyn Io>>,
    /// The root task has completed.
    done: Cell<bool>,
    /// The pump, when it waits.
    pump: Cell<Option<Waker>>,
    /// A runner asked for the pump.
    called: Cell<bool>,
}

/// Drops the tasks of an executor that has ended.
struct Cleared(Rc<Shared>);

impl Drop for Cleared {
    fn drop(&mut self) {
        self.0.tasks.clear();
    }
}

impl Shared {
    async fn until_called(&self) {
        std::future::poll_fn(|cx| {
            if self.called.get() {
                return Poll::Ready(());
            }
            self.pump.set(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await;
    }

    fn call_pump(&self) {
        self.called.set(true);
        if let Some(pump) = self.pump.take() {
            pump.wake();
        }
    }
}

/// An executor from its first task to its last.
async fn main(shared: Rc<Shared>, index: usize, body: Body) {
    let handle = Rc::new(Handle(Rc::clone(&shared.tasks)));
    let (io, unparker) = (Rc::clone(&shared.io), shared.tasks.unparker());
    let root = body(ExecutorContext { index, rt: handle, io, unparker });
    let ending = Rc::clone(&shared);
    shared.tasks.spawn(
        Class::Foreground,
        Box::pin(async move {
            root.await;
            ending.done.set(true);
            ending.call_pump();
        }),
    );
    let runners: Vec<_> = Class::ALL
        .into_iter()
        .filter_map(|class| {
            let queue = queue(class.shares(), &format!("{class:?}"));
            glommio::spawn_local_into(run_class(Rc::clone(&shared), class), queue).ok()
        })
        .collect();
    let queue = queue(Class::Foreground.shares(), "pump");
    if let Ok(pump) = glommio::spawn_local_into(pump(shared), queue) {
        pump.await;
    }
    for runner in runners {
        runner.cancel().await;
    }
}

fn queue(shares: u32, name: &str) -> TaskQueueHandle {
    let shares = Shares::Static(usize::try_from(shares).unwrap_or(usize::MAX));
    glommio::executor().create_task_queue(shares, Latency::NotImportant, name)
}

/// Polls the tasks of one class, until the root task has completed.
async fn run_class(shared: Rc<Shared>, class: Class) {
    let tasks = &shared.tasks;
    let handle = Handle(Rc::clone(tasks));
    let clock = handle.clock();
    while !shared.done.get() {
        tasks.class_runnable(class).await;
        let (mut polled, begun) = (0, clock.now());
        while polled < TURN
            && tasks.runnable(class) > 0
            && !shared.done.get()
            && (polled == 0 || clock.now().since(begun) < TURN_TIME)
        {
            polled += u32::from(tasks.poll_one(class, 0));
            tasks.collect();
        }
        if tasks.any_runnable() {
            tasks.fire_timers();
            tasks.reap();
            tasks.collect();
            if tasks.runnable(class) > 0 {
                glommio::executor().yield_task_queue_now().await;
            }
        } else {
            shared.call_pump();
        }
    }
}

/// Turns the device and puts the executor to sleep, until the root task has completed.
async fn pump(shared: Rc<Shared>) {
    let tasks = &shared.tasks;
    let clock = Handle(Rc::clone(tasks));
    let mut has_slept = false;
    while !shared.done.get() {
        shared.called.set(false);
        tasks.fire_timers();
        let reaped = tasks.reap();
        tasks.collect();
        if tasks.any_runnable() {
            // The runner that finds nothing more to do calls.
            shared.until_called().await;
            has_slept = false;
            continue;
        }
        if reaped > 0 {
            continue;
        }
        if std::mem::take(&mut has_slept) {
            glommio::executor().yield_task_queue_now().await;
            continue;
        }
        if !tasks.prepare_sleep() {
            continue;
        }
        has_slept = true;
        let timeout = tasks.next_timer().map(|at| at.since(clock.clock().now()));
        shared.io.borrow_mut().park(Some(timeout.map_or(SLEEP_MAX, |timeout| timeout.min(SLEEP_MAX))));
        tasks.end_sleep();
    }
}

#[cfg(test)]
#[path = "glommio_tests.rs"]
mod tests;
