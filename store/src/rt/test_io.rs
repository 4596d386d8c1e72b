//! For the tests of the runtime: an `Io` without a device, whose operations complete with zero at the next reap,
//! and a limit of time, so that a lost wake-up is a failure and not a hang.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::io::{Completion, Io, IoFacts, Op, Token, Unpark};
use kvarts_contract::buffers::Region;

pub(super) struct TestIo {
    event: Arc<Event>,
    done: Vec<Token>,
    pub(super) parks: usize,
}

struct Event(OwnedFd);

impl Unpark for Event {
    #[allow(
        clippy::host_endian_bytes,
        reason = "the kernel reads this word in host byte order, and the word is never stored"
    )]
    fn unpark(&self) {
        rustix::io::write(&self.0, &1_u64.to_ne_bytes()).unwrap();
    }
}

impl TestIo {
    pub(super) fn new() -> Rc<RefCell<Self>> {
        let event = Arc::new(Event(eventfd(0, EventfdFlags::CLOEXEC).unwrap()));
        Rc::new(RefCell::new(Self { event, done: Vec::new(), parks: 0 }))
    }
}

impl Io for TestIo {
    fn submit(&mut self, token: Token, _: Op) {
        self.done.push(token);
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.extend(self.done.drain(..).map(|token| Completion { token, result: 0, reply: None }));
    }

    fn park(&mut self, timeout: Option<Duration>) {
        self.parks += 1;
        if !self.done.is_empty() {
            return;
        }
        let timeout = timeout.map(|time| Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap(),
            tv_nsec: time.subsec_nanos().into(),
        });
        let mut fds = [PollFd::new(&self.event.0, PollFlags::IN)];
        if poll(&mut fds, timeout.as_ref()).unwrap() > 0 {
            rustix::io::read(&self.event.0, &mut [0_u8; 8]).unwrap();
        }
    }

    fn unparker(&self) -> Arc<dyn Unpark> {
        Arc::clone(&self.event) as Arc<dyn Unpark>
    }

    fn register(&mut self, _: &Arc<Region>) -> Result<(), String> {
        Ok(())
    }

    fn unregister(&mut self, _: &Arc<Region>) {}

    fn facts(&self) -> IoFacts {
        IoFacts { backend: "test", features: Vec::new(), warnings: Vec::new() }
    }
}

/// What `test` returns; panics if that takes longer than any of these tests can.
#[allow(clippy::disallowed_methods, reason = "a watcher of a thread needs a thread of its own")]
pub(super) fn in_time<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = channel();
    let thread = std::thread::spawn(move || {
        let _ = send.send(test());
    });
    match receive.recv_timeout(Duration::from_secs(30)) {
        Ok(result) => result,
        Err(RecvTimeoutError::Disconnected) => std::panic::resume_unwind(thread.join().unwrap_err()),
        Err(RecvTimeoutError::Timeout) => panic!("still not done: a wake-up was lost"),
    }
}
