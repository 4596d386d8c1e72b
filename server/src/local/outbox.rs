//! What waits for a client to take it: frames in order, bounded, each perhaps with a descriptor. The session sends them;
//! if nothing waits, the thread that has a frame sends it itself, and the session need not be woken.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::limits::{OUTBOX_BYTES, OUTBOX_BYTES_MAX, UNTAKEN_STEP_BYTES};
use super::line::Line;
use super::socket;
use crate::state::parts::Part;

/// Frames that go in one system call.
const TOGETHER: usize = 16;

struct Waiting {
    bytes: Vec<u8>,
    sent: usize,
    /// Goes with the first byte.
    descriptor: Option<OwnedFd>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Waiting>,
    bytes: usize,
    /// Bytes that were ever sent.
    sent: u64,
    closed: bool,
    /// Where everything goes, for those who send themselves. Not beyond the end: the connection must be closed then.
    line: Option<Arc<Line>>,
    /// What it has of the bytes that may wait in all sessions; nothing before its tenant is known.
    part: Option<Part>,
}

impl State {
    /// Has as much of what may wait as there is waiting; false if there is not so much.
    fn count(&mut self) -> bool {
        let beyond = self.bytes.saturating_sub(OUTBOX_BYTES).next_multiple_of(UNTAKEN_STEP_BYTES);
        self.bytes <= OUTBOX_BYTES_MAX && self.part.as_mut().is_none_or(|part| part.set(beyond as u64))
    }
}

/// Frames on their way to one client.
#[derive(Default)]
pub(super) struct Outbox {
    state: Mutex<State>,
    /// Something was put in, or it was closed.
    pub(super) ready: Notify,
    /// Something was taken out, or it was closed.
    room: Notify,
}

impl Outbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is one step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a frame in. One that finds far too many there closes everything: the client takes nothing.
    pub(super) fn push(&self, bytes: Vec<u8>) {
        self.push_with(bytes, None);
    }

    pub(super) fn push_with(&self, bytes: Vec<u8>, descriptor: Option<OwnedFd>) {
        self.put_in(self.lock(), Waiting { bytes, sent: 0, descriptor });
    }

    fn put_in(&self, mut state: MutexGuard<'_, State>, waiting: Waiting) {
        if state.closed {
            return;
        }
        state.bytes += waiting.bytes.len() - waiting.sent;
        state.queue.push_back(waiting);
        let full = !state.count();
        drop(state);
        if full {
            self.close();
        }
        self.ready.notify_one();
    }

    /// From now on frames may be sent by who has them.
    pub(super) fn sends_to(&self, line: &Arc<Line>) {
        self.lock().line = Some(Arc::clone(line));
    }

    /// Whether a frame could be sent now, as far as can be told without waiting.
    pub(super) fn is_idle(&self) -> bool {
        self.state.try_lock().is_ok_and(|state| state.line.is_some() && state.queue.is_empty())
    }

    /// Sends a frame on this thread if nothing waits, and puts in what the socket does not take.
    pub(super) fn tell(&self, bytes: Vec<u8>) {
        let mut state = self.lock();
        let idle = state.line.as_ref().filter(|_| state.queue.is_empty());
        // An error is seen again by the session, which ends then.
        let sent =
            idle.map_or(0, |to| socket::try_send(to.socket(), &[IoSlice::new(&bytes)], None).unwrap_or(0));
        state.sent += sent as u64;
        if sent < bytes.len() {
            self.put_in(state, Waiting { bytes, sent, descriptor: None });
        }
    }

    /// From now on what waits counts among what waits in all sessions.
    pub(super) fn counts_as(&self, part: Part) {
        self.lock().part = Some(part);
    }

    /// Returns when there is room for announcements, or no client to take them.
    pub(super) async fn room(&self) {
        loop {
            let changed = self.room.notified();
            {
                let state = self.lock();
                if state.closed || state.bytes < OUTBOX_BYTES {
                    return;
                }
            }
            // ends: the client takes something, or the session closes it after `STALL`
            changed.await;
        }
    }

    /// Drops everything, also what is still put in.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.bytes = 0;
        (state.part, state.line) = (None, None);
        let dropped = std::mem::take(&mut state.queue);
        drop(state);
        drop(dropped);
        self.ready.notify_one();
        self.room.notify_waiters();
    }

    /// Bytes that were ever sent.
    pub(super) fn sent(&self) -> u64 {
        self.lock().sent
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Sends what the socket takes; whether everything was sent.
    pub(super) fn send(&self, line: &Line) -> io::Result<bool> {
        loop {
            let mut state = self.lock();
            let alone = state.queue.front().is_some_and(|front| front.descriptor.is_some());
            let count = state
                .queue
                .iter()
                .skip(1)
                .take(if alone { 0 } else { TOGETHER - 1 })
                .take_while(|waiting| waiting.descriptor.is_none())
                .count();
            let some = state.queue.iter().take(count + 1);
            let parts: Vec<IoSlice<'_>> = some
                .map(|waiting| IoSlice::new(waiting.bytes.get(waiting.sent..).unwrap_or_default()))
                .collect();
            if parts.is_empty() {
                return Ok(true);
            }
            let descriptor = state.queue.front().and_then(|front| front.descriptor.as_ref());
            let sent = socket::try_send(line.socket(), &parts, descriptor).map_err(io::Error::from);
            drop(parts);
            let mut sent = match sent {
                Ok(sent) => sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            state.bytes = state.bytes.saturating_sub(sent);
            // Less is always granted.
            state.count();
            state.sent += sent as u64;
            while let Some(front) = state.queue.front_mut() {
                front.descriptor = None;
                let left = front.bytes.len() - front.sent;
                if sent < left {
                    front.sent += sent;
                    break;
                }
                sent -= left;
                state.queue.pop_front();
                if sent == 0 {
                    break;
                }
            }
            drop(state);
            self.room.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::parts::Parts;

    fn fill(outbox: &Outbox, bytes: usize) -> usize {
        let mut put_in = 0;
        while put_in < bytes && !outbox.is_closed() {
            outbox.push(vec![0; 64 << 10]);
            put_in += 64 << 10;
        }
        put_in
    }

    #[test]
    fn a_client_that_takes_nothing_is_closed_once_too_much_waits_for_it() {
        let outbox = Outbox::default();
        let most = fill(&outbox, 2 * OUTBOX_BYTES_MAX);
        assert!(outbox.is_closed() && most <= OUTBOX_BYTES_MAX + (64 << 10), "{most}");
        assert_eq!(outbox.lock().bytes, 0, "nothing is kept for it");
    }

    #[test]
    fn what_waits_in_all_sessions_of_a_tenant_is_bounded() {
        let all = OUTBOX_BYTES_MAX as u64 / 2;
        let untaken = Parts::new(all, &[1], 0, 0);
        let sessions = [Outbox::default(), Outbox::default()];
        for session in &sessions {
            session.counts_as(untaken.part(1));
        }
        assert!(fill(&sessions[0], OUTBOX_BYTES_MAX / 2) > 0 && !sessions[0].is_closed());
        fill(&sessions[1], OUTBOX_BYTES_MAX);
        assert!(sessions[1].is_closed() && !sessions[0].is_closed());
        sessions[0].close();
        assert_eq!(untaken.used(), 0);
    }
}
