//! Threads that run blocking jobs and hand back completions.
//!
//! A job owns its memory while it is queued and while it runs, so a job whose thread hangs in the kernel keeps
//! its memory for exactly as long as the kernel may touch it. How many jobs wait is bounded by the submitter
//! (see [`Io::submit`](super::Io::submit)), so the queue has no limit of its own.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Completion;
use super::wake::Wake;

/// How long dropping waits for jobs that are running; then their threads are left to themselves.
const TIMEOUT: Duration = Duration::from_secs(2);

/// A lock that a panicking thread poisoned still guards data that is whole: no job runs under a lock.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Completions on their way from workers to the one thread that reaps them.
#[derive(Debug)]
pub(super) struct Done {
    list: Mutex<Vec<Completion>>,
    /// As many as the list has; read without the lock on every reap.
    len: AtomicUsize,
    wake: Arc<Wake>,
}

impl Done {
    pub(super) fn new(wake: Arc<Wake>) -> Arc<Self> {
        Arc::new(Self { list: Mutex::new(Vec::new()), len: AtomicUsize::new(0), wake })
    }

    /// Adds one and ends the reaper's park.
    pub(super) fn push(&self, completion: Completion) {
        let mut list = lock(&self.list);
        list.push(completion);
        self.len.store(list.len(), Ordering::SeqCst);
        drop(list);
        self.wake.signal();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len.load(Ordering::SeqCst) == 0
    }

    /// Moves all of them to `out`.
    pub(super) fn take(&self, out: &mut Vec<Completion>) {
        if !self.is_empty() {
            let mut list = lock(&self.list);
            out.append(&mut list);
            self.len.store(0, Ordering::SeqCst);
        }
    }
}

#[derive(Debug)]
struct Queue<J> {
    jobs: VecDeque<J>,
    running: usize,
    closed: bool,
}

#[derive(Debug)]
struct Shared<J> {
    queue: Mutex<Queue<J>>,
    work: Condvar,
    idle: Condvar,
}

/// A fixed number of threads. Dropping it forgets the jobs that have not begun and waits, within a bound, for
/// those that have.
#[derive(Debug)]
pub(super) struct Workers<J> {
    shared: Arc<Shared<J>>,
}

impl<J: Send + 'static> Workers<J> {
    /// Starts `threads` threads, each of which runs `run` on one job after the other.
    pub(super) fn start(
        name: &str,
        threads: usize,
        done: &Arc<Done>,
        run: impl Fn(J) -> Completion + Clone + Send + 'static,
    ) -> std::io::Result<Self> {
        let queue = Mutex::new(Queue { jobs: VecDeque::new(), running: 0, closed: false });
        let workers = Self { shared: Arc::new(Shared { queue, work: Condvar::new(), idle: Condvar::new() }) };
        for index in 0..threads.max(1) {
            let (shared, done, run) = (Arc::clone(&workers.shared), Arc::clone(done), run.clone());
            // A thread that blocks in the kernel is what this module is for; everything else spawns by the
            // runtime seam.
            std::thread::Builder::new()
                .name(format!("{name}-{index}"))
                .spawn(move || work(&shared, &done, &run))?;
        }
        Ok(workers)
    }

    /// Queues one job.
    pub(super) fn push(&self, job: J) {
        lock(&self.shared.queue).jobs.push_back(job);
        self.shared.work.notify_one();
    }
}

impl<J> Drop for Workers<J> {
    fn drop(&mut self) {
        let mut queue = lock(&self.shared.queue);
        queue.closed = true;
        let forgotten = std::mem::take(&mut queue.jobs);
        self.shared.work.notify_all();
        let waited = self.shared.idle.wait_timeout_while(queue, TIMEOUT, |queue| queue.running > 0);
        drop(waited);
        drop(forgotten);
    }
}

fn work<J>(shared: &Shared<J>, done: &Done, run: &impl Fn(J) -> Completion) {
    let mut queue = lock(&shared.queue);
    loop {
        if queue.closed {
            return;
        }
        let Some(job) = queue.jobs.pop_front() else {
            queue = shared.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        queue.running += 1;
        drop(queue);
        done.push(run(job));
        queue = lock(&shared.queue);
        queue.running -= 1;
        shared.idle.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::Token;

    fn completion(token: u64) -> Completion {
        Completion { token: Token(token), result: 0, reply: None }
    }

    #[test]
    fn every_job_completes_once() {
        let wake = Wake::new().unwrap();
        let done = Done::new(Arc::clone(&wake));
        let workers = Workers::start("test", 3, &done, completion).unwrap();
        (0..100).for_each(|token| workers.push(token));
        let mut out = Vec::new();
        while out.len() < 100 {
            assert!(wake.wait(Some(Duration::from_secs(10))), "a worker hangs");
            wake.drain();
            done.take(&mut out);
        }
        let mut tokens: Vec<u64> = out.iter().map(|completion| completion.token.0).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, (0..100).collect::<Vec<_>>());
        assert!(done.is_empty());
    }

    #[test]
    fn dropping_forgets_jobs_that_have_not_begun_and_waits_for_those_that_have() {
        let done = Done::new(Wake::new().unwrap());
        let (begun, has_begun) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(released));
        let workers = Workers::start("test", 1, &done, move |token| {
            let _ = begun.send(());
            // Ends when the sender is gone.
            let _ = lock(&gate).recv();
            completion(token)
        })
        .unwrap();
        (0..10).for_each(|token| workers.push(token));
        has_begun.recv().unwrap();
        let shared = Arc::clone(&workers.shared);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while !lock(&shared.queue).closed {
                    std::thread::yield_now();
                }
                drop(release);
            });
            drop(workers);
        });
        let mut out = Vec::new();
        done.take(&mut out);
        assert_eq!(out.len(), 1, "only the job that had begun ran");
    }
}
