//! Threads of which one runs at a time, until it sleeps: who goes on is decided by the seed, and sleep is simulated time.
#![allow(clippy::disallowed_methods, reason = "real threads, held so that one runs at a time")]

use std::any::Any;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_contract::clock::{Clock, Nanos};
use kvarts_layout::planted;
use kvarts_peer::lane::{Join, Ready};

use super::wire::End;
use crate::sim::SimClock;

thread_local! {
    /// Which of the simulated threads this is.
    static ME: Cell<Option<u64>> = const { Cell::new(None) };
}

/// What a thread sleeps for.
#[derive(Clone, Default)]
struct Asleep {
    rung: Option<Arc<AtomicBool>>,
    wire: Option<(Arc<End>, Ready)>,
    until: Option<Nanos>,
    end_of: Option<u64>,
}

struct Thread {
    /// The node that it is of.
    place: usize,
    asleep: Asleep,
    wakes: Arc<Condvar>,
}

#[derive(Default)]
struct State {
    threads: BTreeMap<u64, Thread>,
    next: u64,
    /// Nodes whose threads stand still.
    stopped: BTreeSet<usize>,
    /// The thread that runs. If none does, the simulation decides.
    running: Option<u64>,
    /// A thread that is woken now ends.
    closing: bool,
    panics: Vec<String>,
}

/// The threads of a simulation.
pub struct Threads {
    clock: Arc<SimClock>,
    state: Mutex<State>,
    decides: Condvar,
}

/// How a thread ends that is ended from outside.
struct Ended;

fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

impl Threads {
    /// None yet.
    pub fn new(clock: &Arc<SimClock>) -> Arc<Self> {
        Arc::new(Self { clock: Arc::clone(clock), state: Mutex::default(), decides: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more thread of a node. It begins when it is its turn.
    pub fn start(self: &Arc<Self>, place: usize, body: Box<dyn FnOnce() + Send>) -> std::io::Result<Join> {
        let (number, wakes) = {
            let mut state = self.lock();
            state.next += 1;
            let (number, wakes) = (state.next, Arc::new(Condvar::new()));
            let asleep = Asleep { until: Some(Nanos(0)), ..Asleep::default() };
            state.threads.insert(number, Thread { place, asleep, wakes: Arc::clone(&wakes) });
            (number, wakes)
        };
        let (threads, bug) = (Arc::clone(self), planted::current());
        std::thread::Builder::new().stack_size(256 << 10).spawn(move || {
            ME.set(Some(number));
            planted::plant(bug);
            let ended = catch_unwind(AssertUnwindSafe(|| {
                threads.wait_for_turn(number, &wakes);
                body();
            }));
            let mut state = threads.lock();
            if let Err(panic) = ended
                && !panic.is::<Ended>()
            {
                state.panics.push(said(&*panic));
            }
            state.threads.remove(&number);
            state.running = None;
            threads.decides.notify_one();
        })?;
        let threads = Arc::clone(self);
        Ok(Box::new(move || threads.park(Asleep { end_of: Some(number), ..Asleep::default() })))
    }

    fn wait_for_turn(&self, number: u64, wakes: &Condvar) {
        let mut state = self.lock();
        while state.running != Some(number) {
            state = wakes.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let closing = state.closing;
        drop(state);
        if closing && !std::thread::panicking() {
            resume_unwind(Box::new(Ended));
        }
    }

    /// The thread that runs sleeps.
    pub fn sleep(
        &self,
        rung: Option<Arc<AtomicBool>>,
        wire: Option<(Arc<End>, Ready)>,
        timeout: Option<Duration>,
    ) {
        let until = timeout.map(|timeout| self.clock.now().plus(timeout));
        self.park(Asleep { rung, wire, until, end_of: None });
    }

    fn park(&self, asleep: Asleep) {
        let Some(number) = ME.get() else { panic!("the simulation itself sleeps") };
        if std::thread::panicking() {
            return;
        }
        let wakes = {
            let mut state = self.lock();
            let Some(thread) = state.threads.get_mut(&number) else { return };
            thread.asleep = asleep;
            let wakes = Arc::clone(&thread.wakes);
            state.running = None;
            wakes
        };
        self.decides.notify_one();
        self.wait_for_turn(number, &wakes);
    }

    /// Who could go on now.
    pub fn ready(&self) -> Vec<u64> {
        let (state, now) = (self.lock(), self.clock.now());
        let is_ready = |thread: &Thread| {
            let Asleep { rung, wire, until, end_of } = &thread.asleep;
            rung.as_ref().is_some_and(|rung| rung.load(Ordering::SeqCst))
                || until.is_some_and(|until| until <= now)
                || end_of.is_some_and(|other| !state.threads.contains_key(&other))
                || wire.as_ref().is_some_and(|(wire, ready)| wire.is_ready(*ready, now))
        };
        let all = state.threads.iter().filter(|(_, thread)| !state.stopped.contains(&thread.place));
        all.filter(|(_, thread)| is_ready(thread)).map(|(number, _)| *number).collect()
    }

    /// When the next could go on.
    pub fn next_time(&self) -> Option<Nanos> {
        let state = self.lock();
        let of = |thread: &Thread| {
            let Asleep { wire, until, .. } = &thread.asleep;
            let wire = wire.as_ref().and_then(|(wire, ready)| wire.ready_at(*ready));
            wire.into_iter().chain(*until).min()
        };
        let all = state.threads.values().filter(|thread| !state.stopped.contains(&thread.place));
        all.filter_map(of).min()
    }

    /// The threads of a node stand still, or go on.
    pub fn stop(&self, place: usize, stops: bool) {
        let mut state = self.lock();
        if stops {
            state.stopped.insert(place);
        } else {
            state.stopped.remove(&place);
        }
    }

    /// Lets a thread go on until it sleeps.
    pub fn run(&self, number: u64) {
        let mut state = self.lock();
        let Some(thread) = state.threads.get(&number) else { return };
        let wakes = Arc::clone(&thread.wakes);
        state.running = Some(number);
        wakes.notify_one();
        while state.running.is_some() {
            state = self.decides.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Threads that there are.
    pub fn count(&self) -> usize {
        self.lock().threads.len()
    }

    /// What panics said.
    pub fn panics(&self) -> Vec<String> {
        self.lock().panics.clone()
    }

    /// Ends all of them.
    pub fn close(&self) {
        self.lock().closing = true;
        loop {
            let Some(number) = self.lock().threads.keys().next().copied() else { return };
            self.run(number);
        }
    }
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Threads({})", self.count())
    }
}
