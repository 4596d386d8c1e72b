//! How other threads talk to an executor: a bounded mailbox in, and a cell for each answer out.
//!
//! The mailbox is first in, first out, over all senders. It unparks its executor when a message finds it empty,
//! so the task that drains it takes messages until there is none and only then awaits
//! [`Runtime::unparked`]; [`Mailbox::recv`] does that.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, PoisonError};

use super::Runtime;
use crate::io::Unpark;
use kvarts_contract::sync::{Mutex, MutexGuard, OnceLock, Race, planted};

/// A lock that a panicking thread poisoned still guards whole data: nothing here panics half-way.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why a message was not taken; it comes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SendError<T> {
    /// The mailbox holds as many messages as it may: refuse the request or try again later.
    Full(T),
    /// The executor takes no more messages.
    Closed(T),
}

impl<T> SendError<T> {
    /// The message.
    pub fn into_inner(self) -> T {
        match self {
            Self::Full(message) | Self::Closed(message) => message,
        }
    }
}

impl<T> fmt::Display for SendError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full(_) => "the queue of the executor is full: try again later",
            Self::Closed(_) => "the executor has stopped: reopen the store",
        })
    }
}

struct Shared<T> {
    state: Mutex<State<T>>,
    capacity: usize,
    /// Known once the executor runs.
    unparker: OnceLock<Arc<dyn Unpark>>,
}

struct State<T> {
    messages: VecDeque<T>,
    closed: bool,
}

impl<T> Shared<T> {
    fn unpark(&self) {
        if let Some(unparker) = self.unparker.get() {
            unparker.unpark();
        }
    }
}

/// The senders' end, for any number of threads.
pub struct Sender<T>(Arc<Shared<T>>);

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl<T> Sender<T> {
    /// Puts `message` behind all that were sent before, or gives it back. Never blocks.
    pub fn try_send(&self, message: T) -> Result<(), SendError<T>> {
        self.send_up_to(self.0.capacity, message)
    }

    /// The same for the few messages that must not be refused for want of room.
    pub fn send_over(&self, message: T) -> Result<(), SendError<T>> {
        self.send_up_to(usize::MAX, message)
    }

    fn send_up_to(&self, most: usize, message: T) -> Result<(), SendError<T>> {
        let looked = planted(Race::MailboxLooksFirst).then(|| self.is_empty());
        let mut state = lock(&self.0.state);
        if state.closed {
            return Err(SendError::Closed(message));
        }
        if state.messages.len() >= most {
            return Err(SendError::Full(message));
        }
        let was_empty = looked.unwrap_or(state.messages.is_empty());
        state.messages.push_back(message);
        drop(state);
        if was_empty {
            self.0.unpark();
        }
        Ok(())
    }

    /// Messages that were sent and not taken.
    pub fn len(&self) -> usize {
        lock(&self.0.state).messages.len()
    }

    /// Whether every message was taken.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Refuses messages from now on; those already sent can still be taken, and the executor is woken to do so.
    pub fn close(&self) {
        lock(&self.0.state).closed = true;
        self.0.unpark();
    }
}

/// The executor's end. Dropping it refuses further messages and drops those that were not taken.
pub struct Mailbox<T>(Arc<Shared<T>>);

impl<T> fmt::Debug for Mailbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// A mailbox that holds at most `capacity` messages (at least one).
pub fn mailbox<T>(capacity: usize) -> (Sender<T>, Mailbox<T>) {
    let shared = Arc::new(Shared {
        state: Mutex::new(State { messages: VecDeque::new(), closed: false }),
        capacity: capacity.max(1),
        unparker: OnceLock::new(),
    });
    (Sender(Arc::clone(&shared)), Mailbox(shared))
}

impl<T> Mailbox<T> {
    /// Says by what its executor is unparked. Messages may have been sent before.
    pub fn attach(&self, unparker: Arc<dyn Unpark>) {
        // A second executor cannot have the same mailbox, so a second attach is by the same one.
        let _ = self.0.unparker.set(unparker);
        if !self.is_empty() {
            self.0.unpark();
        }
    }

    /// The oldest message.
    pub fn pop(&self) -> Option<T> {
        lock(&self.0.state).messages.pop_front()
    }

    /// The oldest message, once there is one; `None` once the mailbox is closed and every message was taken.
    pub async fn recv(&self, rt: &dyn Runtime) -> Option<T> {
        loop {
            let (message, closed) = self.pop_or_closed();
            if message.is_some() || closed {
                return message;
            }
            rt.unparked().await;
        }
    }

    fn pop_or_closed(&self) -> (Option<T>, bool) {
        let mut state = lock(&self.0.state);
        (state.messages.pop_front(), state.closed)
    }

    /// Messages that wait.
    pub fn len(&self) -> usize {
        lock(&self.0.state).messages.len()
    }

    /// Whether no message waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether messages are refused.
    pub fn is_closed(&self) -> bool {
        lock(&self.0.state).closed
    }

    /// Refuses messages from now on. Those that wait can still be taken.
    pub fn close(&self) {
        lock(&self.0.state).closed = true;
    }
}

impl<T> Drop for Mailbox<T> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.closed = true;
        let unread = std::mem::take(&mut state.messages);
        drop(state);
        // Outside the lock: a message's destructor may wake its sender.
        drop(unread);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use kvarts_contract::ticket::{Abandoned, Reply, ticket};
    use proptest::prelude::*;

    use super::super::test_io::TestIo;
    use super::super::threads::ThreadLauncher;
    use super::super::{Body, Launcher};
    use super::*;
    use kvarts_contract::clock::{OsEntropy, SystemClock};

    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl Unpark for Counting {
        fn unpark(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_full_mailbox_gives_the_message_back_and_has_room_after_a_pop() {
        let (sender, mailbox) = mailbox(2);
        assert_eq!((sender.try_send(1), sender.try_send(2)), (Ok(()), Ok(())));
        assert_eq!(sender.try_send(3), Err(SendError::Full(3)));
        assert_eq!((mailbox.len(), mailbox.pop()), (2, Some(1)));
        assert_eq!(sender.try_send(3), Ok(()));
        assert_eq!([mailbox.pop(), mailbox.pop(), mailbox.pop()], [Some(2), Some(3), None]);
    }

    #[test]
    fn a_message_into_an_empty_mailbox_unparks_and_one_sent_before_attaching_does_too() {
        let unparker = Arc::new(Counting::default());
        let (sender, mailbox) = mailbox(10);
        sender.try_send(1).unwrap();
        mailbox.attach(unparker.clone());
        assert_eq!(unparker.0.load(Ordering::SeqCst), 1);
        sender.try_send(2).unwrap();
        assert_eq!(unparker.0.load(Ordering::SeqCst), 1);
        while mailbox.pop().is_some() {}
        sender.try_send(3).unwrap();
        assert_eq!(unparker.0.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_closed_mailbox_refuses_and_still_hands_out_what_it_has() {
        let (sender, mailbox) = mailbox(10);
        sender.try_send(1).unwrap();
        mailbox.close();
        assert_eq!(sender.try_send(2), Err(SendError::Closed(2)));
        assert_eq!((mailbox.pop(), mailbox.pop()), (Some(1), None));
        assert!(mailbox.is_closed());
    }

    #[test]
    fn a_dropped_mailbox_abandons_the_questions_in_it() {
        let (sender, mailbox) = mailbox(10);
        let (reply, mut ticket) = ticket::<u8>();
        sender.try_send(reply).unwrap();
        drop(mailbox);
        assert_eq!(ticket.try_take(), Some(Err(Abandoned)));
        assert!(matches!(sender.try_send(kvarts_contract::ticket::ticket().0), Err(SendError::Closed(_))));
    }

    fn echo(mailbox: Mailbox<(u64, Reply<u64>)>) -> Body {
        Box::new(move |context| {
            mailbox.attach(context.unparker);
            Box::pin(async move {
                while let Some((asked, reply)) = mailbox.recv(&*context.rt).await {
                    let _ = reply.send(asked + 1);
                }
            })
        })
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "the other threads are what is tested")]
    fn questions_from_many_threads_are_all_answered_and_closing_ends_the_executor() {
        let launcher =
            ThreadLauncher::new(SystemClock::new(), OsEntropy::new(), Arc::new(|_| Ok(TestIo::new() as _)));
        let (sender, mailbox) = mailbox(4);
        let executor = launcher.launch(0, echo(mailbox)).unwrap();
        let askers: Vec<_> = (0..4)
            .map(|_| {
                let (sender, clock) = (sender.clone(), launcher.clock());
                std::thread::spawn(move || {
                    for asked in 0..500 {
                        let (reply, mut answer) = ticket();
                        let mut message = (asked, reply);
                        while let Err(refused) = sender.try_send(message) {
                            message = refused.into_inner();
                            std::thread::yield_now();
                        }
                        let deadline = clock.now().plus(Duration::from_secs(20));
                        assert_eq!(answer.wait(&*clock, Some(deadline)), Some(Ok(asked + 1)));
                    }
                })
            })
            .collect();
        for asker in askers {
            asker.join().unwrap();
        }
        sender.close();
        executor.join().unwrap();
        assert!(matches!(sender.try_send((1, ticket().0)), Err(SendError::Closed(_))));
    }

    #[test]
    fn a_ticket_is_a_future_that_its_answer_wakes() {
        use std::rc::Rc;
        let io = TestIo::new();
        let executor = super::super::local::LocalExecutor::new(0, io, SystemClock::new(), OsEntropy::new());
        let (reply, asked) = ticket();
        let seen = Rc::new(std::cell::Cell::new(None));
        let note = Rc::clone(&seen);
        executor
            .runtime()
            .spawn(kvarts_contract::class::Class::Put, Box::pin(async move { note.set(Some(asked.await)) }));
        executor.run_until_idle(10);
        assert_eq!(seen.get(), None);
        reply.send(5).unwrap();
        executor.run_until_idle(10);
        assert_eq!(seen.get(), Some(Ok(5)));
    }

    proptest! {
        /// Against a plain queue: the same messages in the same order, the same refusals.
        #[test]
        fn a_mailbox_is_a_bounded_queue(
            capacity in 1_usize..6,
            script in prop::collection::vec(prop::bool::weighted(0.6), 0..60),
        ) {
            let (sender, mailbox) = mailbox(capacity);
            let mut model = VecDeque::new();
            for (n, send) in script.into_iter().enumerate() {
                if send {
                    let expected = if model.len() < capacity { Ok(()) } else { Err(SendError::Full(n)) };
                    prop_assert_eq!(sender.try_send(n), expected);
                    if expected.is_ok() {
                        model.push_back(n);
                    }
                } else {
                    prop_assert_eq!(mailbox.pop(), model.pop_front());
                }
                prop_assert_eq!(sender.len(), model.len());
            }
        }
    }
}
