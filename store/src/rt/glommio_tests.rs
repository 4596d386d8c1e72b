//! The glommio executor: classes, timers, wakes from other threads, clean ends.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::super::LocalTask;
use super::super::mailbox::mailbox;
use super::super::test_io::{TestIo, in_time};
use super::*;
use crate::io::{MetaOp, Op, Token};
use kvarts_contract::clock::{Nanos, OsEntropy, SystemClock};
use kvarts_contract::io_error::{DirId, Name};
use kvarts_contract::ticket::ticket;

fn launcher() -> GlommioLauncher {
    GlommioLauncher::new(SystemClock::new(), OsEntropy::new(), Arc::new(|_| Ok(TestIo::new() as _)))
}

/// Each executor locks memory, of which an ordinary user has little: one test at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Keeps other tests out; `None` where glommio cannot run, with the reason on the terminal.
fn alone() -> Option<MutexGuard<'static, ()>> {
    let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Err(why) = GlommioLauncher::probe() else { return Some(alone) };
    assert!(why.contains("io_uring"), "{why}");
    eprintln!("SKIPPED: {why}");
    None
}

/// Runs a body to its end; false where glommio cannot run.
fn run(body: impl FnOnce(ExecutorContext) -> LocalTask + Send + 'static) -> bool {
    let Some(_alone) = alone() else { return false };
    in_time(|| launcher().launch(0, Box::new(body)).unwrap().join().unwrap());
    true
}

#[test]
fn tasks_of_all_classes_run_and_the_executor_ends_with_its_first_task() {
    let ran = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&ran);
    let could = run(move |context| {
        Box::pin(async move {
            let left = Rc::new(Cell::new(Class::ALL.len()));
            for class in Class::ALL {
                let (rt, left, seen) = (Rc::clone(&context.rt), Rc::clone(&left), Arc::clone(&seen));
                let task = async move {
                    for _ in 0..100 {
                        rt.yield_now().await;
                    }
                    seen.lock().unwrap().push(class);
                    left.set(left.get() - 1);
                };
                context.rt.spawn(class, Box::pin(task));
            }
            // One that never ends does not keep the executor.
            let rt = Rc::clone(&context.rt);
            context.rt.spawn(
                Class::Background,
                Box::pin(async move {
                    loop {
                        rt.yield_now().await;
                    }
                }),
            );
            while left.get() > 0 {
                context.rt.yield_now().await;
            }
        })
    });
    let mut ran = ran.lock().unwrap().clone();
    ran.sort();
    assert!(!could || ran == Class::ALL);
}

#[test]
fn tasks_of_one_class_run_in_the_order_in_which_they_were_spawned() {
    run(|context| {
        Box::pin(async move {
            let order = Rc::new(RefCell::new(Vec::new()));
            for n in 0..100 {
                let order = Rc::clone(&order);
                context.rt.spawn(Class::Put, Box::pin(async move { order.borrow_mut().push(n) }));
            }
            while order.borrow().len() < 100 {
                context.rt.yield_now().await;
            }
            assert!(order.borrow().is_sorted());
        })
    });
}

#[test]
fn timers_fire_in_order_and_not_early_also_while_nothing_else_happens() {
    run(|context| {
        Box::pin(async move {
            let rt = &context.rt;
            let begin = rt.clock().now();
            let order = Rc::new(RefCell::new(Vec::new()));
            for (note, millis) in [(2, 30), (0, 10), (1, 20)] {
                let (order, at) = (Rc::clone(&order), begin.plus(Duration::from_millis(millis)));
                let (sleep, clock) = (rt.sleep_until(at), Arc::clone(rt.clock()));
                let task = async move {
                    sleep.await;
                    assert!(clock.now() >= at);
                    order.borrow_mut().push(note);
                };
                rt.spawn(Class::Background, Box::pin(task));
            }
            rt.sleep_until(begin.plus(Duration::from_millis(40))).await;
            assert_eq!(*order.borrow(), [0, 1, 2]);
        })
    });
}

#[test]
#[allow(clippy::disallowed_methods, reason = "the other thread is what is tested")]
fn an_unpark_from_another_thread_is_never_lost() {
    const ROUNDS: usize = 2000;
    run(|context| {
        let sent = Arc::new(AtomicUsize::new(0));
        let other = std::thread::spawn({
            let (sent, unparker) = (Arc::clone(&sent), Arc::clone(&context.unparker));
            move || {
                for round in 0..ROUNDS {
                    sent.fetch_add(1, Ordering::SeqCst);
                    unparker.unpark();
                    if round % 64 == 0 {
                        std::thread::sleep(Duration::from_micros(200));
                    }
                }
            }
        });
        Box::pin(async move {
            while sent.load(Ordering::SeqCst) < ROUNDS {
                context.rt.unparked().await;
            }
            other.join().unwrap();
        })
    });
}

#[test]
fn questions_from_another_thread_are_answered_one_by_one() {
    let Some(_alone) = alone() else { return };
    let (sender, mailbox) = mailbox(4);
    let launcher = launcher();
    let body: Body = Box::new(move |context| {
        mailbox.attach(context.unparker);
        Box::pin(async move {
            while let Some((asked, reply)) = mailbox.recv(&*context.rt).await {
                let reply: kvarts_contract::ticket::Reply<u32> = reply;
                let _ = reply.send(asked + 1);
            }
        })
    });
    let executor = launcher.launch(0, body).unwrap();
    let clock = launcher.clock();
    for asked in 0..500_u32 {
        let (reply, mut answer) = ticket();
        sender.try_send((asked, reply)).unwrap();
        let deadline = clock.now().plus(Duration::from_secs(20));
        assert_eq!(answer.wait(&*clock, Some(deadline)), Some(Ok(asked + 1)));
    }
    sender.close();
    executor.join().unwrap();
}

#[test]
fn submissions_are_reaped_without_anybody_asking() {
    run(|context| {
        let done = Rc::new(Cell::new(0));
        let waiting: Rc<Cell<Option<Waker>>> = Rc::default();
        context.rt.set_reaper(Box::new({
            let (io, done, waiting) = (Rc::clone(&context.io), Rc::clone(&done), Rc::clone(&waiting));
            move || {
                let mut completions = Vec::new();
                io.borrow_mut().reap(&mut completions);
                done.set(done.get() + completions.len());
                waiting.take().filter(|_| !completions.is_empty()).into_iter().for_each(Waker::wake);
                completions.len()
            }
        }));
        Box::pin(async move {
            for round in 1..200 {
                let name = Name { dir: DirId(0), path: "".into() };
                context.io.borrow_mut().submit(Token(1), Op::Meta(MetaOp::List { name }));
                std::future::poll_fn(|cx| {
                    if done.get() == round {
                        return Poll::Ready(());
                    }
                    waiting.set(Some(cx.waker().clone()));
                    Poll::Pending
                })
                .await;
            }
        })
    });
}

#[test]
fn a_panic_in_a_task_is_what_join_returns() {
    let Some(_alone) = alone() else { return };
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
fn ending_drops_the_tasks_that_still_wait() {
    struct Noting(std::sync::mpsc::Sender<()>);
    impl Drop for Noting {
        fn drop(&mut self) {
            self.0.send(()).unwrap();
        }
    }
    let (dropped, drops) = channel();
    let could = run(move |context| {
        let (rt, noting) = (Rc::clone(&context.rt), Noting(dropped));
        let task = async move {
            let _held = noting;
            rt.sleep_until(Nanos(u64::MAX)).await;
        };
        context.rt.spawn(Class::Background, Box::pin(task));
        Box::pin(async move {
            let later = context.rt.clock().now().plus(Duration::from_millis(1));
            context.rt.sleep_until(later).await;
        })
    });
    if could {
        drops.try_recv().unwrap();
    }
}

/// Each ends the executor's turn of glommio's queue, which comes back to it.
#[test]
#[allow(clippy::disallowed_methods, reason = "the other thread is what is tested")]
fn sleeps_that_end_without_work_are_slept_again() {
    run(|context| {
        let unparker = Arc::clone(&context.unparker);
        let other = std::thread::spawn(move || {
            for _ in 0..200 {
                unparker.unpark();
                std::thread::sleep(Duration::from_micros(50));
            }
        });
        Box::pin(async move {
            let later = context.rt.clock().now().plus(Duration::from_millis(50));
            context.rt.sleep_until(later).await;
            other.join().unwrap();
        })
    });
}

#[test]
fn a_core_that_does_not_exist_is_an_error_of_launch() {
    let Some(_alone) = alone() else { return };
    let launched = launcher().pinned_to(vec![4000]).launch(0, Box::new(|_| Box::pin(async {})));
    assert!(launched.is_err());
}
