//! An executor and the threads that talk to it: mailbox, tickets, wakers, and the eventfd that ends its sleep.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use shuttle::thread;

use super::Scene;
use crate::io::wake::Wake;
use crate::io::{Completion, Io, IoFacts, Op, Token, Unpark};
use crate::rt::local::LocalExecutor;
use crate::rt::mailbox::{Mailbox, SendError, Sender, mailbox};
use kvarts_contract::buffers::Region;
use kvarts_contract::clock::{ManualClock, SeededEntropy};
use kvarts_contract::sync::atomic::{AtomicU32, Ordering};
use kvarts_contract::sync::{Event, Race};
use kvarts_contract::ticket::{Abandoned, Reply, ticket};
use kvarts_contract::{class::Class, clock::Clock};

pub(super) fn scenes() -> Vec<Scene> {
    let scene = |name, play, finds, cost| Scene { name, play, finds, cost };
    vec![
        scene(
            "every message is answered and no wake-up is lost",
            questions,
            &[Race::MailboxLooksFirst, Race::SleepInTwoSteps],
            30,
        ),
        scene("a ticket ends as its reply does", tickets, &[Race::TicketWaitsLate], 3),
        scene("every ring of the bell is heard", bell, &[Race::RearmFirst], 5),
    ]
}

/// A way to no disk at all, slept in as the portable one is.
struct NoDisk(Arc<Wake>);

impl Io for NoDisk {
    fn submit(&mut self, _: Token, _: Op) {}

    fn reap(&mut self, _: &mut Vec<Completion>) {}

    fn park(&mut self, timeout: Option<Duration>) {
        while !self.0.take_unparked() && self.0.wait(timeout) {
            self.0.drain();
        }
    }

    fn unparker(&self) -> Arc<dyn Unpark> {
        Arc::clone(&self.0) as Arc<dyn Unpark>
    }

    fn register(&mut self, _: &Arc<Region>) -> Result<(), String> {
        Ok(())
    }

    fn unregister(&mut self, _: &Arc<Region>) {}

    fn facts(&self) -> IoFacts {
        IoFacts { backend: "none", features: Vec::new(), warnings: Vec::new() }
    }
}

type Question = (u32, Reply<u32>);

/// Answers questions until the mailbox is closed. Every answer is given by a task of its own, which another thread
/// lets go on.
fn execute(mailbox: Mailbox<Question>, helper: Sender<Reply<u32>>) {
    let clock: Arc<dyn Clock> = ManualClock::new(0);
    let io = Rc::new(RefCell::new(NoDisk(Wake::new().expect("an eventfd"))));
    let executor = LocalExecutor::new(0, io, clock, SeededEntropy::new(1));
    let rt = executor.runtime();
    mailbox.attach(executor.unparker());
    executor.block_on(Box::pin(async move {
        while let Some((question, reply)) = mailbox.recv(&*rt).await {
            let (let_go, gone_on) = ticket();
            send(&helper, let_go);
            rt.spawn(
                Class::Put,
                Box::pin(async move {
                    let more = gone_on.await.expect("the helper answers");
                    let _ = reply.send(question + more);
                }),
            );
        }
        helper.close();
    }));
}

fn send<T>(sender: &Sender<T>, mut message: T) {
    loop {
        match sender.try_send(message) {
            Ok(()) => return,
            Err(SendError::Full(back)) => message = back,
            Err(SendError::Closed(_)) => panic!("it was closed while a thread sends"),
        }
        thread::yield_now();
    }
}

fn questions() {
    let (sender, inbox) = mailbox::<Question>(2);
    let (helper, helped) = mailbox::<Reply<u32>>(4);
    let executor = thread::spawn(move || execute(inbox, helper));
    let bell = Wake::new().expect("an eventfd");
    let helping = thread::spawn(move || {
        helped.attach(Arc::clone(&bell) as Arc<dyn Unpark>);
        let mut io = NoDisk(bell);
        loop {
            match helped.pop() {
                Some(reply) => drop(reply.send(100)),
                None if helped.is_closed() && helped.is_empty() => return,
                None => io.park(None),
            }
        }
    });
    let asking = |base: u32| {
        let sender = sender.clone();
        move || {
            for n in 0..2 {
                let (reply, mut answer) = ticket();
                send(&sender, (base + n, reply));
                let clock = ManualClock::new(0);
                assert_eq!(answer.wait(&*clock, None), Some(Ok(base + n + 100)));
            }
        }
    };
    let askers = [thread::spawn(asking(10)), thread::spawn(asking(20))];
    askers.into_iter().for_each(|asker| asker.join().expect("it did not panic"));
    sender.close();
    executor.join().expect("it did not panic");
    helping.join().expect("it did not panic");
}

fn tickets() {
    let clock = ManualClock::new(0);
    let (reply, mut answer) = ticket::<Arc<()>>();
    let (left, gone) = ticket::<Arc<()>>();
    let token = Arc::new(());
    let given = Arc::clone(&token);
    let answering = thread::spawn(move || {
        assert!(reply.send(Arc::clone(&given)).is_ok(), "a thread waits for it");
        // Perhaps no thread waits for this one any more: then the answer comes back.
        drop(left.send(given));
    });
    let leaving = thread::spawn(move || drop(gone));
    assert!(matches!(answer.wait(&*clock, None), Some(Ok(_))));
    assert_eq!(answer.try_take().map(|taken| taken.is_err()), Some(true), "an answer was given twice");
    answering.join().expect("it did not panic");
    leaving.join().expect("it did not panic");
    assert_eq!(Arc::strong_count(&token), 1, "an answer was kept");
    let (dropped, mut abandoned) = ticket::<Arc<()>>();
    let dropping = thread::spawn(move || drop(dropped));
    assert!(matches!(abandoned.wait(&*clock, None), Some(Err(Abandoned))));
    dropping.join().expect("it did not panic");
}

fn bell() {
    const ASKED: u32 = 3;
    let wake = Wake::new().expect("an eventfd");
    let asked = Arc::new(AtomicU32::new(0));
    let heard = Arc::new(Event::new().expect("an eventfd"));
    let (asking, ringing, hearing) = (Arc::clone(&asked), Arc::clone(&wake), Arc::clone(&heard));
    let asker = thread::spawn(move || {
        for n in 1..=ASKED {
            asking.store(n, Ordering::SeqCst);
            ringing.unpark();
            // The thread that was asked answers. If it does not, both threads wait for ever.
            hearing.wait(None);
            hearing.empty();
        }
    });
    let disturbing = Arc::clone(&wake);
    let disturber = thread::spawn(move || {
        for _ in 0..3 {
            disturbing.unpark();
        }
    });
    let (mut io, mut answered) = (NoDisk(wake), 0);
    while answered < ASKED {
        let now = asked.load(Ordering::SeqCst);
        if now > answered {
            answered = now;
            heard.ring();
        } else {
            io.park(None);
        }
    }
    asker.join().expect("it did not panic");
    disturber.join().expect("it did not panic");
}
