//! The plain executor: order, shares, timers, wakes, and no wake lost.

use std::future::Future;
use std::pin::Pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use proptest::prelude::*;

use super::super::clock::{ManualClock, SeededEntropy, SystemClock};
use super::super::test_io::{TestIo, in_time};
use super::*;
use crate::io::{MetaOp, Op, Token};
use kvarts_contract::io_error::Name;

fn executor() -> (LocalExecutor, Arc<ManualClock>) {
    let clock = ManualClock::new(0);
    (LocalExecutor::new(0, TestIo::new(), clock.clone(), SeededEntropy::new(1)), clock)
}

fn real_time_executor() -> LocalExecutor {
    LocalExecutor::new(0, TestIo::new(), SystemClock::new(), SeededEntropy::new(1))
}

/// A shared list of what happened.
type Trace = Rc<RefCell<Vec<usize>>>;

fn spawn_noting(executor: &LocalExecutor, class: Class, trace: &Trace, note: usize, times: usize) {
    let (rt, trace) = (executor.runtime(), Rc::clone(trace));
    executor.runtime().spawn(
        class,
        Box::pin(async move {
            for _ in 0..times {
                trace.borrow_mut().push(note);
                rt.yield_now().await;
            }
        }),
    );
}

#[test]
fn tasks_of_one_class_run_in_the_order_in_which_they_became_runnable() {
    let (executor, _) = executor();
    let trace = Trace::default();
    for note in 0..3 {
        spawn_noting(&executor, Class::Put, &trace, note, 2);
    }
    assert!(executor.run_until_idle(1000) < 1000);
    assert_eq!(*trace.borrow(), [0, 1, 2, 0, 1, 2]);
}

#[test]
fn classes_that_all_have_work_get_their_shares() {
    let (executor, _) = executor();
    let trace = Trace::default();
    for class in Class::ALL {
        spawn_noting(&executor, class, &trace, class as usize, usize::MAX);
    }
    executor.run_until_idle(24_500);
    for class in Class::ALL {
        let ran = trace.borrow().iter().filter(|note| **note == class as usize).count();
        let due = class.shares() as usize * 10;
        assert!(ran.abs_diff(due) <= 20, "{class:?} ran {ran} times of {due}");
    }
}

#[test]
fn a_class_that_was_idle_earns_nothing_by_it() {
    let (executor, _) = executor();
    let trace = Trace::default();
    spawn_noting(&executor, Class::Foreground, &trace, 0, usize::MAX);
    executor.run_until_idle(10_000);
    trace.borrow_mut().clear();
    spawn_noting(&executor, Class::Background, &trace, 3, usize::MAX);
    executor.run_until_idle(420);
    let background = trace.borrow().iter().filter(|note| **note == 3).count();
    assert!((18..=22).contains(&background), "ran {background} times in 420 at 1 to 20");
}

#[test]
fn timers_fire_in_time_order_and_not_before_their_time() {
    let (executor, clock) = executor();
    let trace = Trace::default();
    for (note, at) in [(0, 30), (1, 10), (2, 10), (3, 20)] {
        let (rt, trace) = (executor.runtime(), Rc::clone(&trace));
        executor.runtime().spawn(
            Class::Background,
            Box::pin(async move {
                rt.sleep_until(Nanos(at)).await;
                trace.borrow_mut().push(note);
            }),
        );
    }
    executor.run_until_idle(100);
    assert_eq!(executor.next_timer(), Some(Nanos(10)));
    clock.advance_to(Nanos(9));
    executor.run_until_idle(100);
    assert!(trace.borrow().is_empty());
    clock.advance_to(Nanos(20));
    executor.run_until_idle(100);
    assert_eq!(*trace.borrow(), [1, 2, 3]);
    clock.advance_to(Nanos(99));
    executor.run_until_idle(100);
    assert_eq!(*trace.borrow(), [1, 2, 3, 0]);
    assert_eq!(executor.next_timer(), None);
}

#[test]
fn a_dropped_sleep_leaves_no_timer() {
    let (executor, _) = executor();
    let rt = executor.runtime();
    let mut sleep = rt.sleep_until(Nanos(50));
    assert!(sleep.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert_eq!(executor.next_timer(), Some(Nanos(50)));
    drop(sleep);
    assert_eq!(executor.next_timer(), None);
}

#[test]
fn a_real_sleep_wakes_from_its_park_after_its_time() {
    let executor = real_time_executor();
    let rt = executor.runtime();
    let begin = rt.clock().now();
    let until = begin.plus(Duration::from_millis(20));
    let sleep = rt.sleep_until(until);
    executor.block_on(sleep);
    assert!(rt.clock().now() >= until);
}

/// Completes once its flag is set; hands its waker out.
struct Handoff(Arc<Mutex<(bool, Option<Waker>)>>);

impl Future for Handoff {
    type Output = ();
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.0.lock().unwrap();
        if std::mem::take(&mut state.0) {
            return Poll::Ready(());
        }
        state.1 = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// Sets the flag and wakes the task that polled last. If no task has polled, it sets the flag alone.
fn fulfil(state: &Mutex<(bool, Option<Waker>)>) {
    let waker = {
        let mut state = state.lock().unwrap();
        state.0 = true;
        state.1.take()
    };
    if let Some(waker) = waker {
        waker.wake();
    }
}

#[test]
#[allow(clippy::disallowed_methods, reason = "the other thread is what is tested")]
fn a_wake_from_another_thread_is_never_lost() {
    const ROUNDS: usize = 2000;
    let there = Arc::new(Mutex::new((false, None)));
    let back = Arc::new((Mutex::new(0), std::sync::Condvar::new()));
    let other = std::thread::spawn({
        let (there, back) = (Arc::clone(&there), Arc::clone(&back));
        move || {
            for round in 0..ROUNDS {
                fulfil(&there);
                let seen = back.0.lock().unwrap();
                drop(back.1.wait_while(seen, |seen| *seen <= round).unwrap());
            }
        }
    });
    in_time(move || {
        let executor = real_time_executor();
        executor.block_on(Box::pin(async move {
            for round in 0..ROUNDS {
                Handoff(Arc::clone(&there)).await;
                *back.0.lock().unwrap() = round + 1;
                back.1.notify_one();
            }
        }));
        other.join().unwrap();
    });
}

#[test]
#[allow(clippy::disallowed_methods, reason = "the other thread is what is tested")]
fn an_unpark_from_another_thread_completes_unparked_and_none_is_lost() {
    const ROUNDS: usize = 2000;
    in_time(|| {
        let executor = real_time_executor();
        let (rt, unparker) = (executor.runtime(), executor.unparker());
        let sent = Arc::new(AtomicUsize::new(0));
        let other = std::thread::spawn({
            let sent = Arc::clone(&sent);
            move || {
                for _ in 0..ROUNDS {
                    sent.fetch_add(1, Ordering::SeqCst);
                    unparker.unpark();
                }
            }
        });
        executor.block_on(Box::pin(async move {
            // Whatever was counted before an unpark is seen after it; several unparks may be one.
            while sent.load(Ordering::SeqCst) < ROUNDS {
                rt.unparked().await;
            }
        }));
        other.join().unwrap();
    });
}

#[test]
fn one_unpark_completes_one_wait() {
    let (executor, _) = executor();
    let (rt, trace) = (executor.runtime(), Trace::default());
    let noted = Rc::clone(&trace);
    executor.runtime().spawn(
        Class::Foreground,
        Box::pin(async move {
            for note in 0..10 {
                rt.unparked().await;
                noted.borrow_mut().push(note);
            }
        }),
    );
    executor.run_until_idle(100);
    assert_eq!(trace.borrow().len(), 0);
    for expected in 1..4 {
        executor.unparker().unpark();
        executor.run_until_idle(100);
        assert_eq!(trace.borrow().len(), expected);
    }
}

#[test]
fn the_reaper_is_called_after_tasks_ran_and_while_they_run_on() {
    let io = TestIo::new();
    let executor = LocalExecutor::new(0, io.clone(), ManualClock::new(0), SeededEntropy::new(1));
    let reaped = Rc::new(Cell::new(0));
    executor.set_reaper(Box::new({
        let (io, reaped) = (Rc::clone(&io), Rc::clone(&reaped));
        move || {
            let mut done = Vec::new();
            io.borrow_mut().reap(&mut done);
            reaped.set(reaped.get() + done.len());
            done.len()
        }
    }));
    let name = Name { dir: kvarts_contract::io_error::DirId(0), path: "x".into() };
    let op = || Op::Meta(MetaOp::List { name: name.clone() });
    io.borrow_mut().submit(Token(1), op());
    executor.run_until_idle(10);
    assert_eq!(reaped.get(), 1);
    // A task that never lets the queue run dry does not keep completions waiting.
    let trace = Trace::default();
    spawn_noting(&executor, Class::Foreground, &trace, 0, usize::MAX);
    io.borrow_mut().submit(Token(2), op());
    executor.run_until_idle(TURN as usize + 2);
    assert_eq!(reaped.get(), 2);
}

#[test]
fn a_timer_fires_while_other_tasks_never_rest() {
    let executor = real_time_executor();
    let trace = Trace::default();
    spawn_noting(&executor, Class::Foreground, &trace, 0, usize::MAX);
    let rt = executor.runtime();
    let until = rt.clock().now().plus(Duration::from_millis(5));
    executor.block_on(rt.sleep_until(until));
    assert!(!trace.borrow().is_empty());
}

#[test]
fn a_woken_task_that_ended_does_not_disturb_the_next_in_its_place() {
    let (executor, _) = executor();
    let state = Arc::new(Mutex::new((true, None)));
    let kept: Rc<RefCell<Option<Waker>>> = Rc::default();
    let keep = Rc::clone(&kept);
    let handoff = Handoff(Arc::clone(&state));
    executor.runtime().spawn(
        Class::Put,
        Box::pin(async move {
            std::future::poll_fn(|cx| {
                *keep.borrow_mut() = Some(cx.waker().clone());
                // Woken during its own last poll: the wake outlives the task.
                cx.waker().wake_by_ref();
                Poll::Ready(())
            })
            .await;
            handoff.await;
        }),
    );
    executor.run_until_idle(100);
    let polls = Rc::new(Cell::new(0));
    let counted = Rc::clone(&polls);
    executor.runtime().spawn(
        Class::Put,
        Box::pin(std::future::poll_fn(move |_| {
            counted.set(counted.get() + 1);
            Poll::Pending
        })),
    );
    executor.run_until_idle(100);
    kept.borrow().as_ref().unwrap().wake_by_ref();
    executor.run_until_idle(100);
    assert_eq!(polls.get(), 1);
}

#[test]
fn dropping_the_executor_drops_its_tasks_even_those_that_hold_the_runtime() {
    struct Noting(Rc<dyn Runtime>, Rc<Cell<usize>>);
    impl Drop for Noting {
        fn drop(&mut self) {
            self.1.set(self.1.get() + 1);
            // Too late for new tasks, and no harm.
            let again = Rc::clone(&self.1);
            self.0.spawn(Class::Put, Box::pin(async move { again.set(100) }));
        }
    }
    let drops = Rc::new(Cell::new(0));
    let (executor, _) = executor();
    for _ in 0..3 {
        let noting = Noting(executor.runtime(), Rc::clone(&drops));
        let sleep = executor.runtime().sleep_until(Nanos(10));
        executor.runtime().spawn(
            Class::Put,
            Box::pin(async move {
                let _held = noting;
                sleep.await;
            }),
        );
    }
    executor.run_until_idle(100);
    drop(executor);
    assert_eq!(drops.get(), 3);
}

#[test]
fn a_chooser_permutes_what_runs_and_the_same_choices_repeat_it() {
    let run = |factor: usize| {
        let (executor, _) = executor();
        let mut state = factor;
        executor.set_chooser(Box::new(move |among| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % among.max(1)
        }));
        let trace = Trace::default();
        for note in 0..8 {
            spawn_noting(&executor, Class::Put, &trace, note, 3);
        }
        executor.run_until_idle(1000);
        trace.take()
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
    let mut sorted = run(1);
    sorted.sort_unstable();
    assert_eq!(sorted, (0..24).map(|n| n / 3).collect::<Vec<_>>());
}

proptest! {
    /// Whatever sleeps, yields and spawns: everything runs to its end exactly once, and the executor is idle then.
    #[test]
    fn every_spawned_task_runs_to_its_end(
        script in prop::collection::vec((0..Class::ALL.len(), 0_u64..50, 0_usize..4), 1..40),
    ) {
        let (executor, clock) = executor();
        let ended = Rc::new(Cell::new(0));
        for (class, sleep, yields) in &script {
            let (rt, ended) = (executor.runtime(), Rc::clone(&ended));
            let (class, sleep, yields) = (Class::ALL[*class], *sleep, *yields);
            executor.runtime().spawn(class, Box::pin(async move {
                for _ in 0..yields {
                    rt.yield_now().await;
                }
                rt.sleep_until(Nanos(sleep)).await;
                let inner = Rc::clone(&ended);
                rt.spawn(Class::Prefetch, Box::pin(async move { inner.set(inner.get() + 1) }));
                ended.set(ended.get() + 1);
            }));
        }
        while executor.run_until_idle(10_000) > 0 || executor.next_timer().is_some() {
            if let Some(next) = executor.next_timer() {
                clock.advance_to(next);
            }
        }
        prop_assert_eq!(ended.get(), script.len() * 2);
    }
}
