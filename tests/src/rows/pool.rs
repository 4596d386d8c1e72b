//! Running seeds on all cores until enough distinct states were reached, and catching what goes wrong on the way.
#![allow(
    clippy::disallowed_methods,
    reason = "the campaign's own threads run many simulations; none is inside one"
)]

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::time::Duration;

use kvarts_layout::planted;

use super::{Ask, Tally, Violation};
use crate::sim::Seed;

/// Violations after which a row stops looking: more would say the same.
const VIOLATIONS_MAX: usize = 5;
/// Seeds beyond twice the wanted states after which no new state is expected.
const SEEDS_SPARE: u64 = 1000;

/// States that were reached, by digest.
#[derive(Debug, Default)]
pub(super) struct States(Mutex<BTreeSet<u128>>);

impl States {
    /// Notes a state; true if it is new.
    pub(super) fn reach(&self, digest: u128) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(digest)
    }

    pub(super) fn len(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len() as u64
    }
}

thread_local! {
    /// What the last panic of this thread said: while a seed runs, it is a violation and not a message.
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
    static CATCHING: RefCell<bool> = const { RefCell::new(false) };
}

fn catch_quietly() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let loud = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if CATCHING.with_borrow(|catching| *catching) {
                LAST_PANIC.set(Some(info.to_string()));
            } else {
                loud(info);
            }
        }));
    });
}

/// What came of `what`; a panic is an error with its message.
pub(super) fn caught<T>(what: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_quietly();
    CATCHING.set(true);
    let outcome = panic::catch_unwind(AssertUnwindSafe(what));
    CATCHING.set(false);
    outcome
        .unwrap_or_else(|_| Err(LAST_PANIC.take().unwrap_or_else(|| "a panic without a message".to_owned())))
}

/// Runs seed after seed until `target` distinct states are reached, or all seeds that were asked for. A row that cannot
/// reach its states says so as a violation, instead of running for ever.
pub(super) fn until(
    ask: &Ask,
    target: u64,
    one: impl Fn(Seed, &States) -> Result<(), String> + Sync,
) -> Tally {
    let states = States::default();
    let next = AtomicU64::new(ask.seed);
    let violations: Mutex<Vec<Violation>> = Mutex::default();
    let spare = target.saturating_mul(2).saturating_add(SEEDS_SPARE);
    let end = ask.end.unwrap_or(ask.seed.saturating_add(spare));
    // A planted bug is on this thread alone: it goes along to those that run seeds, and is found once.
    let bug = planted::current();
    let most = if bug.is_some() { 1 } else { VIOLATIONS_MAX };
    let enough = || {
        let found = violations.lock().unwrap_or_else(PoisonError::into_inner).len();
        states.len() >= target || found >= most
    };
    let running = AtomicUsize::new(ask.workers.max(1));
    std::thread::scope(|scope| {
        for _ in 0..ask.workers.max(1) {
            scope.spawn(|| {
                planted::plant(bug);
                while !enough() {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        break;
                    }
                    if let Err(what) = caught(|| one(Seed(seed), &states)) {
                        let mut all = violations.lock().unwrap_or_else(PoisonError::into_inner);
                        all.push(Violation { seed, what });
                    }
                }
                running.fetch_sub(1, Ordering::Relaxed);
            });
        }
        while ask.progress && running.load(Ordering::Relaxed) > 0 {
            std::thread::sleep(Duration::from_millis(200));
            let seed = next.load(Ordering::Relaxed);
            eprint!("\r\x1b[K     {} states, seed {seed}", states.len());
        }
    });
    if ask.progress {
        eprint!("\r\x1b[K");
    }
    let mut violations = violations.into_inner().unwrap_or_else(PoisonError::into_inner);
    if states.len() < target && violations.is_empty() && ask.end.is_none() {
        let what = format!("only {} of {target} distinct states were reached", states.len());
        violations.push(Violation { seed: ask.seed, what });
    }
    let seeds = ask.seed..next.into_inner().min(end);
    Tally { distinct: states.len(), visited: 0, seeds, violations, skipped: None }
}
