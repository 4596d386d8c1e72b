//! The simulated world: executors, a disk and a clock, and one loop that decides what happens next.
//!
//! Each step is one of: an executor runs one task; an operation of the disk completes; or, when nothing else can
//! happen, time jumps to whatever comes first. All choices come from the seed. A step limit turns a hang into an
//! error that shows the end of the event log.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvarts_contract::clock::SeededEntropy;
use kvarts_contract::clock::{Clock, Entropy, Nanos};
use kvarts_store::rt::local::LocalExecutor;
use kvarts_store::rt::{Body, Join, Launcher};

use super::clock::SimClock;
use super::disk::{DiskConfig, SimDisk};
use super::media::Media;
use super::rng::{Rng, Seed};

/// How many lines of the log a failure shows.
const TAIL: usize = 40;

/// What a world is like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorldConfig {
    /// The disk.
    pub disk: DiskConfig,
    /// Wall time at the beginning, in milliseconds since 1970.
    pub unix_millis: u64,
    /// What running one task costs at most; with zero, computing takes no time at all.
    pub step_cost: Duration,
}

impl Default for WorldConfig {
    fn default() -> Self {
        let unix_millis = 1_800_000_000_000;
        Self { disk: DiskConfig::default(), unix_millis, step_cost: Duration::ZERO }
    }
}

/// Nothing more will happen, or too much did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hang {
    /// The seed of the world.
    pub seed: u64,
    /// Why it was given up.
    pub reason: &'static str,
    /// Steps taken.
    pub steps: u64,
    /// The end of the event log.
    pub tail: String,
}

impl fmt::Display for Hang {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, reason, steps, tail } = self;
        write!(f, "seed {seed}: {reason} after {steps} steps; the last operations were\n{tail}")
    }
}

/// How an executor ended, once it has.
type Ending = Arc<Mutex<Option<Result<(), String>>>>;

struct Seated {
    executor: LocalExecutor,
    ending: Ending,
}

struct Inner {
    seed: Seed,
    clock: Arc<SimClock>,
    entropy: Arc<SeededEntropy>,
    disk: SimDisk,
    choices: RefCell<Rng>,
    step_cost: u64,
    steps: Cell<u64>,
    executors: RefCell<Vec<Rc<Seated>>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A planted bug is meant to be found: its log is of no use.
        if std::thread::panicking() && kvarts_layout::planted::current().is_none() {
            let log = self.disk.log();
            eprintln!("seed {}: {} operations, the last were\n{}", self.seed.0, log.steps(), log.text(TAIL));
        }
    }
}

/// A machine in a box. Clones are the same machine.
#[derive(Clone)]
pub struct SimWorld(Rc<Inner>);

impl fmt::Debug for SimWorld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &self.0;
        f.debug_struct("SimWorld")
            .field("seed", &inner.seed)
            .field("steps", &inner.steps)
            .finish_non_exhaustive()
    }
}

impl SimWorld {
    /// A world with an empty disk.
    pub fn new(seed: u64, config: &WorldConfig) -> Self {
        Self::with_media(seed, config, Media::new(config.disk.dirs, config.disk.capacity))
    }

    /// A world that begins with what an earlier one left on its disk.
    pub fn with_media(seed: u64, config: &WorldConfig, media: Media) -> Self {
        Self::at(SimClock::new(config.unix_millis), seed, config, media)
    }

    /// The same by a clock that it shares with others.
    pub fn at(clock: Arc<SimClock>, seed: u64, config: &WorldConfig, media: Media) -> Self {
        let seed = Seed(seed);
        let disk = SimDisk::with_media(media, config.disk.latency, Arc::clone(&clock), seed.child("disk"));
        Self(Rc::new(Inner {
            seed,
            clock,
            entropy: SeededEntropy::new(seed.child("entropy").0),
            disk,
            choices: RefCell::new(seed.child("schedule").rng()),
            step_cost: u64::try_from(config.step_cost.as_nanos()).unwrap_or(u64::MAX),
            steps: Cell::new(0),
            executors: RefCell::default(),
        }))
    }

    /// The seed.
    pub fn seed(&self) -> Seed {
        self.0.seed
    }

    /// The disk.
    pub fn disk(&self) -> &SimDisk {
        &self.0.disk
    }

    /// The clocks.
    pub fn clock(&self) -> &Arc<SimClock> {
        &self.0.clock
    }

    /// What starts executors in this world.
    pub fn launcher(&self) -> SimLauncher {
        SimLauncher(self.clone())
    }

    /// Steps until `done`, which is asked before each step. `steps_max` counts from here.
    pub fn run_until(&self, steps_max: u64, mut done: impl FnMut() -> bool) -> Result<(), Hang> {
        for _ in 0..steps_max {
            if done() {
                return Ok(());
            }
            if !self.step() {
                return if done() { Ok(()) } else { Err(self.hang("nothing is left that could happen")) };
            }
        }
        if done() { Ok(()) } else { Err(self.hang("the step limit was reached")) }
    }

    fn hang(&self, reason: &'static str) -> Hang {
        let tail = self.0.disk.log().text(TAIL);
        Hang { seed: self.0.seed.0, reason, steps: self.0.steps.get(), tail }
    }

    /// Lets one thing happen. False: nothing is left that could.
    pub fn step(&self) -> bool {
        if self.step_now() {
            return true;
        }
        match self.next_time() {
            Some(next) => {
                self.0.clock.advance_to(next);
                true
            }
            None => false,
        }
    }

    /// Lets one thing happen that needs no time to pass, if there is one.
    pub fn step_now(&self) -> bool {
        let inner = &self.0;
        inner.steps.set(inner.steps.get() + 1);
        // A completion whose time has come may be ahead of tasks that can run, or behind them.
        let now = inner.clock.now();
        let due = inner.disk.next_completion().is_some_and(|due| due <= now);
        if due && inner.choices.borrow_mut().coin() && inner.disk.complete_one() {
            return true;
        }
        if self.run_a_task() {
            let cost = inner.choices.borrow_mut().below(inner.step_cost);
            inner.clock.advance_to(now.plus(Duration::from_nanos(cost)));
            return true;
        }
        inner.disk.complete_one()
    }

    /// Lets everything that has begun come to its end; timers do not fire meanwhile.
    pub fn settle(&self) {
        loop {
            while self.run_a_task() {}
            let Some(next) = self.0.disk.next_completion() else { return };
            self.0.clock.advance_to(next.max(self.0.clock.now()));
            self.0.disk.complete_one();
        }
    }

    fn run_a_task(&self) -> bool {
        let executors = self.0.executors.borrow().clone();
        let first = self.0.choices.borrow_mut().index(executors.len());
        let mut turns = executors.iter().cycle().skip(first).take(executors.len());
        turns.any(|seated| {
            let ran = seated.executor.step();
            if seated.executor.is_done() {
                self.end(seated);
            }
            ran
        })
    }

    fn end(&self, seated: &Rc<Seated>) {
        *seated.ending.lock().unwrap_or_else(PoisonError::into_inner) = Some(Ok(()));
        self.0.executors.borrow_mut().retain(|other| !Rc::ptr_eq(other, seated));
    }

    /// When the next thing happens.
    pub fn next_time(&self) -> Option<Nanos> {
        let executors = self.0.executors.borrow();
        let timers = executors.iter().filter_map(|seated| seated.executor.next_timer());
        timers.chain(self.0.disk.next_completion()).min()
    }

    /// How many executors run.
    pub fn executors(&self) -> usize {
        self.0.executors.borrow().len()
    }

    /// Ends the process without warning: nothing that its destructors still do reaches the disk.
    pub fn kill(&self) -> Media {
        let media = self.0.disk.after_kill();
        self.stop();
        media
    }

    /// Cuts the power: the process is gone, and what the disk may hold afterwards is in the state returned.
    pub fn cut_power(&self) -> super::crash::CrashState {
        let state = self.0.disk.crash_state();
        self.stop();
        state
    }

    fn stop(&self) {
        self.0.disk.disconnect();
        let executors = std::mem::take(&mut *self.0.executors.borrow_mut());
        for seated in &executors {
            let ending = Some(Err("the simulated process was killed".to_owned()));
            *seated.ending.lock().unwrap_or_else(PoisonError::into_inner) = ending;
        }
        drop(executors);
    }
}

/// Starts executors in a [`SimWorld`].
#[derive(Clone, Debug)]
pub struct SimLauncher(SimWorld);

impl Launcher for SimLauncher {
    fn launch(&self, index: usize, body: Body) -> Result<Box<dyn Join + Send>, String> {
        let inner = &self.0.0;
        let io = Rc::new(RefCell::new(inner.disk.io()));
        let executor = LocalExecutor::new(index, io, Launcher::clock(self), Launcher::entropy(self));
        let mut order = inner.seed.child("order").nth(index as u64).rng();
        executor.set_chooser(Box::new(move |among| order.index(among)));
        executor.start(body);
        let ending = Ending::default();
        inner.executors.borrow_mut().push(Rc::new(Seated { executor, ending: Arc::clone(&ending) }));
        Ok(Box::new(SimJoin(ending)))
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.0.0.clock) as Arc<dyn Clock>
    }

    fn entropy(&self) -> Arc<dyn Entropy> {
        Arc::clone(&self.0.0.entropy) as Arc<dyn Entropy>
    }
}

struct SimJoin(Ending);

impl Join for SimJoin {
    /// Does not wait: only stepping the world brings an executor to its end.
    fn join(self: Box<Self>) -> Result<(), String> {
        let ending = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        ending.unwrap_or_else(|| Err("the executor still runs: step the world until it has ended".into()))
    }
}

#[cfg(test)]
#[path = "world_tests.rs"]
mod tests;
