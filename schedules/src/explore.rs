//! Running one scene under one schedule, named by a seed.

use std::cell::RefCell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, Once, PoisonError};

use shuttle::scheduler::{Scheduler, Task, TaskId};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};

use crate::scenes::{self, Scene};
use crate::sim::{Rng, Seed};
use crate::uses;
use kvarts_contract::sync::{Race, plant};

/// Decisions after which a schedule is taken to hang.
const STEPS_MAX: usize = 2_000_000;
/// Stack of a scene's thread: the engine's futures are deep in a build without optimisation.
const STACK_BYTES: usize = 1 << 20;
/// A lazy schedule takes the turn from a thread that could go on at one moment in this many, on average.
const LAZY: u64 = 12;

/// What was tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Schedule {
    /// Who went on at each moment, as a digest: two schedules of one scene with the same digest are the same.
    pub digest: u128,
    /// How many decisions there were.
    pub decisions: u64,
}

/// What a scene found wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The panic that ended it: a check that did not hold, or a deadlock, which is what a lost wake-up comes to.
    pub what: String,
    /// Decisions until then, and their digest: the same seed gives the same.
    pub after: Schedule,
}

#[derive(Default)]
struct Trace {
    hasher: blake3::Hasher,
    decisions: u64,
}

impl Trace {
    fn schedule(&self) -> Schedule {
        let hash = self.hasher.finalize();
        let mut digest = [0; 16];
        digest.copy_from_slice(&hash.as_bytes()[..16]);
        Schedule { digest: u128::from_le_bytes(digest), decisions: self.decisions }
    }
}

/// Decides by dice, and notes what it decided.
struct Dice {
    rolls: Rng,
    /// Whether a thread goes on until it waits, but for a few moments.
    lazy: bool,
    played: bool,
    trace: Arc<Mutex<Trace>>,
}

impl Scheduler for Dice {
    fn new_execution(&mut self) -> Option<shuttle::scheduler::Schedule> {
        let first = !std::mem::replace(&mut self.played, true);
        first.then(|| shuttle::scheduler::Schedule::new(0))
    }

    fn next_task(&mut self, runnable: &[&Task], current: Option<TaskId>, yielding: bool) -> Option<TaskId> {
        let goes_on = current.filter(|id| !yielding && runnable.iter().any(|task| task.id() == *id));
        let next = match goes_on {
            Some(current) if self.lazy && self.rolls.below(LAZY) != 0 => current,
            _ => self.rolls.pick(runnable)?.id(),
        };
        let mut trace = self.trace.lock().unwrap_or_else(PoisonError::into_inner);
        trace.decisions += 1;
        uses::note();
        trace.hasher.update(&(usize::from(next) as u64).to_le_bytes());
        Some(next)
    }

    fn next_u64(&mut self) -> u64 {
        self.rolls.next_u64()
    }
}

thread_local! {
    /// The first panic of the scene that runs on this thread: what follows while it unwinds says less.
    static FIRST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
    static EXPLORING: RefCell<bool> = const { RefCell::new(false) };
}

fn catch_quietly() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // The scheduler's own hook, which explains how to use it, comes with its first run: it must be below ours.
        shuttle::check_random(|| (), 1);
        let loud = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if EXPLORING.with_borrow(|exploring| *exploring) {
                let said = info.payload().downcast_ref::<&str>().map(|said| (*said).to_owned());
                let said = said.or_else(|| info.payload().downcast_ref::<String>().cloned());
                let said = said.unwrap_or_else(|| "a panic without a message".to_owned());
                FIRST_PANIC.with_borrow_mut(|first| {
                    first.get_or_insert(said);
                });
            } else {
                loud(info);
            }
        }));
    });
}

/// Runs a scene under the schedule of this seed, with a mistake switched on or none. Even seeds pick any thread at any
/// moment; odd ones let a thread go on for longer.
pub fn run(scene: &Scene, seed: u64, race: Option<Race>) -> Result<Schedule, Failure> {
    let trace = Arc::new(Mutex::new(Trace::default()));
    let dice = Dice {
        rolls: Seed(seed).child("schedule").rng(),
        lazy: seed % 2 == 1,
        played: false,
        trace: Arc::clone(&trace),
    };
    let mut config = Config::new();
    config.stack_size = STACK_BYTES;
    config.max_steps = MaxSteps::FailAfter(STEPS_MAX);
    config.failure_persistence = FailurePersistence::None;
    config.silence_warnings = true;
    plant(race);
    let outcome = caught(|| {
        Runner::new(dice, config).run(scene.play);
    });
    plant(None);
    let schedule = trace.lock().unwrap_or_else(PoisonError::into_inner).schedule();
    match outcome {
        Ok(()) => Ok(schedule),
        Err(what) => Err(Failure { what, after: schedule }),
    }
}

/// How often a read of this many blocks of one record uses what threads share: each lock, each atomic and each wait, of its
/// caller and of the executors.
pub fn uses_of_read(blocks: u64) -> u64 {
    let scene = scenes::read_of(blocks);
    run(&scene, 1, None).expect("it holds");
    scenes::counted()
}

fn caught(what: impl FnOnce()) -> Result<(), String> {
    catch_quietly();
    FIRST_PANIC.set(None);
    EXPLORING.set(true);
    let outcome = panic::catch_unwind(AssertUnwindSafe(what));
    EXPLORING.set(false);
    outcome.map_err(|_| FIRST_PANIC.take().unwrap_or_else(|| "a panic without a message".to_owned()))
}
