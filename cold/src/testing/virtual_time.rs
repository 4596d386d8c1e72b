//! Time that passes when everything waits, and an executor of one thread over it.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use crate::time::{BoxFuture, Time};

#[derive(Debug, Default)]
struct Clock {
    now: Duration,
    next: u64,
    timers: BTreeMap<(Duration, u64), Waker>,
}

/// Virtual time: it begins at a wall clock of 1,700,000,000 s.
#[derive(Clone, Debug, Default)]
pub struct VirtualTime(Arc<Mutex<Clock>>);

struct Woken {
    thread: Thread,
    again: AtomicBool,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.again.store(true, Ordering::SeqCst);
        self.thread.unpark();
    }
}

impl VirtualTime {
    /// Runs a future to its end. Where it waits for timers alone, time passes; where it waits for other threads, this one
    /// sleeps.
    pub fn run<T>(&self, future: impl Future<Output = T>) -> T {
        let woken = Arc::new(Woken { thread: std::thread::current(), again: AtomicBool::new(false) });
        let waker = Waker::from(Arc::clone(&woken));
        let mut context = Context::from_waker(&waker);
        let mut future = pin!(future);
        loop {
            if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
                return value;
            }
            while !woken.again.swap(false, Ordering::SeqCst) {
                if !self.pass_to_next() {
                    std::thread::park();
                }
            }
        }
    }

    /// Lets time pass.
    pub fn pass(&self, long: Duration) {
        let until = self.now() + long;
        while self.0.lock().unwrap().timers.keys().next().is_some_and(|(at, _)| *at <= until) {
            self.pass_to_next();
        }
        self.0.lock().unwrap().now = until;
    }

    fn pass_to_next(&self) -> bool {
        let mut clock = self.0.lock().unwrap();
        let Some(((at, _), waker)) = clock.timers.pop_first() else { return false };
        clock.now = clock.now.max(at);
        drop(clock);
        waker.wake();
        true
    }
}

struct Sleep {
    time: VirtualTime,
    until: Duration,
    timer: Option<(Duration, u64)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: std::pin::Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let shared = Arc::clone(&self.time.0);
        let mut clock = shared.lock().unwrap();
        if let Some(timer) = self.timer.take() {
            clock.timers.remove(&timer);
        }
        if clock.now >= self.until {
            return Poll::Ready(());
        }
        clock.next += 1;
        let timer = (self.until, clock.next);
        clock.timers.insert(timer, context.waker().clone());
        self.timer = Some(timer);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(timer) = self.timer.take() {
            self.time.0.lock().unwrap().timers.remove(&timer);
        }
    }
}

impl Time for VirtualTime {
    fn now(&self) -> Duration {
        self.0.lock().unwrap().now
    }

    fn wall_ms(&self) -> u64 {
        1_700_000_000_000 + self.now().as_millis() as u64
    }

    fn sleep(&self, long: Duration) -> BoxFuture<'static, ()> {
        Box::pin(Sleep { time: self.clone(), until: self.now() + long, timer: None })
    }
}

/// Virtual time with a wall clock that is ahead by this many milliseconds, or behind.
#[derive(Clone, Debug)]
pub struct Skewed(pub VirtualTime, pub i64);

impl Time for Skewed {
    fn now(&self) -> Duration {
        self.0.now()
    }

    fn wall_ms(&self) -> u64 {
        self.0.wall_ms().saturating_add_signed(self.1)
    }

    fn sleep(&self, long: Duration) -> BoxFuture<'static, ()> {
        self.0.sleep(long)
    }
}
