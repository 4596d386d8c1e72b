//! Frames on their way to the server. A sender does not wait for room in the socket: what does not fit is sent by a
//! thread that runs while something waits.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_contract::error::Reason;
use kvarts_wire::local::socket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Bytes of frames that may wait: a server that takes nothing is not asked for more.
const WAITING_BYTES_MAX: usize = 64 << 20;
/// What is said when there are more.
const FULL: Reason = Reason::Busy("the server cannot accept requests now");
/// How often the thread looks whether the connection has ended meanwhile.
const LOOK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A frame of which not everything is sent.
struct Rest {
    bytes: Vec<u8>,
    at: usize,
    descriptor: Option<OwnedFd>,
}

impl Rest {
    /// Sends as much as there is room for; whether that was all.
    fn send(&mut self, stream: &UnixStream) -> io::Result<bool> {
        while let Some(rest) = self.bytes.get(self.at..).filter(|rest| !rest.is_empty()) {
            match socket::try_send(stream, &[IoSlice::new(rest)], self.descriptor.as_ref()) {
                Ok(sent) => {
                    self.at += sent;
                    self.descriptor = None;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Rest>,
    bytes: usize,
    /// A thread sends them.
    sent_by_thread: bool,
}

/// What waits, and who sends it.
#[derive(Default)]
pub(super) struct Outbox(Mutex<State>);

/// What becomes of a frame.
pub(super) enum Sent {
    /// It is sent, or being sent.
    Cared,
    /// It waits, and a thread is needed that runs [`Outbox::run`].
    NeedsThread,
}

impl Outbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a frame. The first error is a refusal, nothing of it was sent; the second the connection's end.
    pub(super) fn send(
        &self,
        stream: &UnixStream,
        bytes: Vec<u8>,
        descriptor: Option<&OwnedFd>,
    ) -> io::Result<Result<Sent, Reason>> {
        let mut state = self.lock();
        let mut rest = Rest { bytes, at: 0, descriptor: descriptor.map(OwnedFd::try_clone).transpose()? };
        if state.waiting.is_empty() && rest.send(stream)? {
            return Ok(Ok(Sent::Cared));
        }
        let left = rest.bytes.len() - rest.at;
        if rest.at == 0 && state.bytes.saturating_add(left) > WAITING_BYTES_MAX {
            return Ok(Err(FULL));
        }
        state.bytes += left;
        state.waiting.push_back(rest);
        let needs = !std::mem::replace(&mut state.sent_by_thread, true);
        Ok(Ok(if needs { Sent::NeedsThread } else { Sent::Cared }))
    }

    /// Sends what waits, until nothing does. An error is the connection's end.
    pub(super) fn run(
        &self,
        stream: &UnixStream,
        call_timeout: Duration,
        is_over: impl Fn() -> bool,
    ) -> io::Result<()> {
        let mut stood_still = Duration::ZERO;
        loop {
            let mut state = self.lock();
            if is_over() {
                *state = State::default();
                return Ok(());
            }
            let Some(mut rest) = state.waiting.pop_front() else {
                state.sent_by_thread = false;
                return Ok(());
            };
            let before = rest.at;
            let done = rest.send(stream);
            state.bytes -= rest.at - before;
            if rest.at > before {
                stood_still = Duration::ZERO;
            }
            if !done? {
                state.waiting.push_front(rest);
                drop(state);
                // ends: `LOOK`, and then the session after `call_timeout` in which nothing was taken
                match poll(&mut [PollFd::new(stream, PollFlags::OUT)], Some(&LOOK)) {
                    Ok(0) => stood_still += Duration::from_secs(1),
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
                if stood_still > call_timeout {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn whoever_sends_to_one_who_takes_nothing_does_not_wait_and_everything_comes_in_order() {
        let (here, mut there) = UnixStream::pair().unwrap();
        let outbox = Outbox::default();
        let frames: Vec<Vec<u8>> = (0..200u8).map(|number| vec![number; 10_000]).collect();
        let mut needed = 0;
        for frame in &frames {
            // It comes back although not a byte was read.
            let sent = outbox.send(&here, frame.clone(), None).unwrap().unwrap();
            needed += usize::from(matches!(sent, Sent::NeedsThread));
        }
        assert_eq!(needed, 1);
        std::thread::scope(|scope| {
            scope.spawn(|| outbox.run(&here, Duration::from_secs(60), || false).unwrap());
            let mut got = vec![0; 200 * 10_000];
            there.read_exact(&mut got).unwrap();
            assert!(got == frames.concat());
        });
        assert!(outbox.lock().waiting.is_empty() && outbox.lock().bytes == 0);
    }

    #[test]
    fn what_waits_is_bounded_and_a_refused_frame_leaves_nothing_behind() {
        let (here, _there) = UnixStream::pair().unwrap();
        let outbox = Outbox::default();
        let mut refused = 0;
        for _ in 0..10 {
            refused += u32::from(outbox.send(&here, vec![0; 16 << 20], None).unwrap().is_err());
        }
        assert!((5..10).contains(&refused), "{refused}");
        assert!(outbox.lock().bytes <= WAITING_BYTES_MAX);
        outbox.run(&here, Duration::from_secs(60), || true).unwrap();
        assert_eq!(outbox.lock().bytes, 0);
    }
}
