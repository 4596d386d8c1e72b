//! The engine on the caller's thread: executors that are stepped, a clock that is turned, randomness from a seed.
//!
//! A caller that waits for an answer steps the executors until it is there, and after it until none of them can go on. Time
//! stands still meanwhile, unless nothing can happen before a timer does.

use std::cell::RefCell;
use std::fmt;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use kvarts_contract::clock::{Clock, Entropy, Nanos};
use kvarts_contract::clock::{ManualClock, SeededEntropy};
use kvarts_contract::error::Error;
use kvarts_store::engine::{Options, Store};
use kvarts_store::io::Io;
use kvarts_store::rt::local::LocalExecutor;
use kvarts_store::rt::{Body, Join, Launcher};

/// The wall clock at the beginning, in milliseconds since 1970.
const BEGINNING_MS: u64 = 1_800_000_000_000;

/// Makes the way to the disks of an executor.
pub type MakeIo = Box<dyn Fn() -> Result<Rc<RefCell<dyn Io>>, String>>;

/// See the module.
pub struct Machine {
    clock: Arc<ManualClock>,
    entropy: Arc<SeededEntropy>,
    executors: RefCell<Vec<Rc<LocalExecutor>>>,
    make_io: MakeIo,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine").field("clock", &self.clock).finish_non_exhaustive()
    }
}

struct Joined;

impl Join for Joined {
    fn join(self: Box<Self>) -> Result<(), String> {
        Ok(())
    }
}

impl Launcher for Machine {
    fn launch(&self, index: usize, body: Body) -> Result<Box<dyn Join + Send>, String> {
        let executor =
            LocalExecutor::new(index, (self.make_io)()?, Launcher::clock(self), Launcher::entropy(self));
        executor.start(body);
        self.executors.borrow_mut().push(Rc::new(executor));
        Ok(Box::new(Joined))
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.clock) as Arc<dyn Clock>
    }

    fn entropy(&self) -> Arc<dyn Entropy> {
        Arc::clone(&self.entropy) as Arc<dyn Entropy>
    }
}

impl Machine {
    /// A machine whose executors reach the disks by what `make_io` makes.
    pub fn new(seed: u64, make_io: MakeIo) -> Self {
        let (clock, entropy) = (ManualClock::new(BEGINNING_MS), SeededEntropy::new(seed));
        Self { clock, entropy, executors: RefCell::default(), make_io }
    }

    /// Opens a store.
    pub fn open(&self, options: &Options) -> Result<Store, String> {
        let opened: Result<_, Error> = self.wait(Store::open(self, options))?;
        opened.map(|(store, _)| store).map_err(|error| error.to_string())
    }

    /// Moves time on to `at_ms` milliseconds after the beginning, timers and what they start on the way; never back.
    pub fn advance_to(&self, at_ms: f64) {
        let at = Nanos((at_ms.max(0.0) * 1e6) as u64);
        self.settle();
        while let Some(timer) = self.next_timer().filter(|timer| *timer <= at) {
            self.clock.advance_to(timer);
            self.settle();
        }
        self.clock.advance_to(at);
        self.settle();
    }

    /// Steps until the future is done and nothing more can happen at this moment.
    pub fn wait<T>(&self, future: impl Future<Output = T>) -> Result<T, String> {
        let mut future = pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        loop {
            if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
                self.settle();
                return Ok(value);
            }
            if self.step() {
                continue;
            }
            match self.next_timer() {
                Some(timer) => self.clock.advance_to(timer),
                None => {
                    return Err("the engine waits, but no operation or timer is left that could wake the \
                        engine"
                        .to_owned());
                }
            }
        }
    }

    fn settle(&self) {
        while self.step() {}
    }

    fn step(&self) -> bool {
        // An executor that has ended takes no more steps.
        let executors = self.executors.borrow().clone();
        executors.iter().any(|executor| !executor.is_done() && executor.step())
    }

    fn next_timer(&self) -> Option<Nanos> {
        self.executors.borrow().iter().filter_map(|executor| executor.next_timer()).min()
    }
}
