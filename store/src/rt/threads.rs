//! Executors on plain threads: one [`LocalExecutor`] on each, pinned to a core if asked.
//!
//! Works wherever threads do, also where io_uring is forbidden.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

use rustix::thread::{CpuSet, sched_setaffinity};

use super::local::LocalExecutor;
use super::{Body, Join, Launcher};
use crate::io::Io;
use kvarts_contract::clock::{Clock, Entropy};

/// Makes the way to the disks of executor `index`, on the thread that will use it. An error says why it cannot.
pub type MakeIo = Arc<dyn Fn(usize) -> Result<Rc<RefCell<dyn Io>>, String> + Send + Sync>;

/// Starts each executor on a thread of its own.
#[derive(Clone)]
pub struct ThreadLauncher {
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    make_io: MakeIo,
    cores: Vec<usize>,
}

impl fmt::Debug for ThreadLauncher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadLauncher").field("cores", &self.cores).finish_non_exhaustive()
    }
}

impl ThreadLauncher {
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
}

impl Launcher for ThreadLauncher {
    fn launch(&self, index: usize, body: Body) -> Result<Box<dyn Join + Send>, String> {
        let this = self.clone();
        start_thread(index, move |started| {
            let core = this.cores.get(index.checked_rem(this.cores.len()).unwrap_or(0)).copied();
            let ready = core.map_or(Ok(()), pin_to).and_then(|()| (this.make_io)(index));
            let io = match ready {
                Ok(io) => io,
                Err(why) => return drop(started.send(Err(why))),
            };
            let executor = LocalExecutor::new(index, io, this.clock, this.entropy);
            executor.start(body);
            // The receiver is gone only if the launching thread has died.
            drop(started.send(Ok(())));
            executor.run();
        })
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.clock)
    }

    fn entropy(&self) -> Arc<dyn Entropy> {
        Arc::clone(&self.entropy)
    }
}

/// Says whether an executor started, and if not why.
pub(super) type Started = SyncSender<Result<(), String>>;

/// Runs `main` on a new thread and waits until it said whether it started. A panic before that is an error of
/// starting, one after it an error of joining.
pub(super) fn start_thread(
    index: usize,
    main: impl FnOnce(Started) + Send + 'static,
) -> Result<Box<dyn Join + Send>, String> {
    let (started, starting) = sync_channel(1);
    let thread = Builder::new()
        .name(format!("kvarts-{index}"))
        .spawn(move || catch_unwind(AssertUnwindSafe(|| main(started))).map_err(|what| describe(&*what)))
        .map_err(|why| {
            format!(
                "the thread of executor {index} could not be started ({why}): raise the limit on \
                threads (ulimit -u, TasksMax= in systemd)"
            )
        })?;
    let started = starting.recv();
    let thread = Box::new(Thread(thread));
    match started {
        Ok(Ok(())) => Ok(thread),
        Ok(Err(why)) => thread.join().and(Err(why)),
        // It ended without saying anything, so it panicked.
        Err(_) => thread.join().and(Err(format!("executor {index} ended while it was starting"))),
    }
}

struct Thread(JoinHandle<Result<(), String>>);

impl Join for Thread {
    fn join(self: Box<Self>) -> Result<(), String> {
        self.0.join().unwrap_or_else(|what| Err(describe(&*what)))
    }
}

/// What a thread panicked with.
fn describe(what: &(dyn Any + Send)) -> String {
    let text = what.downcast_ref::<&str>().copied();
    let text = text.or_else(|| what.downcast_ref::<String>().map(String::as_str));
    format!("an executor panicked: {}", text.unwrap_or("without a message"))
}

/// Keeps the calling thread on one core.
fn pin_to(core: usize) -> Result<(), String> {
    let mut set = CpuSet::new();
    if core >= CpuSet::MAX_CPU {
        return Err(format!("core {core} does not exist: remove it from the list of cores"));
    }
    set.set(core);
    sched_setaffinity(None, &set).map_err(|why| {
        format!("this process may not use core {core} ({why}): remove it from the list of cores")
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use super::super::test_io::{TestIo, in_time};
    use super::*;
    use kvarts_contract::clock::{OsEntropy, SystemClock};

    fn launcher() -> ThreadLauncher {
        ThreadLauncher::new(SystemClock::new(), OsEntropy::new(), Arc::new(|_| Ok(TestIo::new() as _)))
    }

    #[test]
    fn executors_run_their_bodies_and_end_with_them() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let launcher = launcher();
        let threads: Vec<_> = (0..3)
            .map(|index| {
                let seen = Arc::clone(&seen);
                let body: Body = Box::new(move |context| {
                    Box::pin(async move {
                        context.rt.sleep_until(context.rt.clock().now().plus(Duration::from_millis(1))).await;
                        seen.lock().unwrap().push(context.index);
                    })
                });
                launcher.launch(index, body).unwrap()
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        seen.lock().unwrap().sort_unstable();
        assert_eq!(*seen.lock().unwrap(), [0, 1, 2]);
    }

    #[test]
    fn a_panic_in_a_task_is_what_join_returns() {
        let body: Body = Box::new(|context| {
            Box::pin(async move {
                context.rt.yield_now().await;
                panic!("as planned");
            })
        });
        let ended = launcher().launch(0, body).unwrap().join();
        assert_eq!(ended, Err("an executor panicked: as planned".into()));
    }

    #[test]
    fn an_io_that_cannot_be_made_is_an_error_of_launch() {
        let launcher = ThreadLauncher::new(
            SystemClock::new(),
            OsEntropy::new(),
            Arc::new(|_| Err("no such disk".into())),
        );
        let launched = launcher.launch(0, Box::new(|_| Box::pin(async {})));
        assert_eq!(launched.map(|_| ()), Err("no such disk".into()));
        let panicking =
            ThreadLauncher::new(SystemClock::new(), OsEntropy::new(), Arc::new(|_| panic!("not even that")));
        let launched = panicking.launch(0, Box::new(|_| Box::pin(async {})));
        assert_eq!(launched.map(|_| ()), Err("an executor panicked: not even that".into()));
    }

    #[test]
    fn a_pinned_executor_stays_on_its_core_and_an_impossible_core_is_refused() {
        let allowed = rustix::thread::sched_getaffinity(None).unwrap();
        let core = (0..CpuSet::MAX_CPU).find(|core| allowed.is_set(*core)).unwrap();
        let body: Body = Box::new(move |_| {
            Box::pin(async move {
                let set = rustix::thread::sched_getaffinity(None).unwrap();
                assert!(set.count() == 1 && set.is_set(core));
            })
        });
        launcher().pinned_to(vec![core]).launch(5, body).unwrap().join().unwrap();
        for core in [CpuSet::MAX_CPU - 1, usize::MAX] {
            let refused = launcher().pinned_to(vec![core]).launch(0, Box::new(|_| Box::pin(async {})));
            assert!(refused.is_err_and(|why| why.contains("remove it from the list")));
        }
    }

    #[test]
    fn an_executor_that_sleeps_is_woken_by_its_unparker() {
        let (send, receive) = std::sync::mpsc::channel();
        let body: Body = Box::new(move |context| {
            send.send(Arc::clone(&context.unparker)).unwrap();
            Box::pin(async move { context.rt.unparked().await })
        });
        let thread = launcher().launch(0, body).unwrap();
        receive.recv().unwrap().unpark();
        in_time(|| thread.join()).unwrap();
    }
}
