//! A connection that carries bytes: two directions, each in order, with what the network does to it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvarts_contract::buffers::stream::Stretch;
use kvarts_contract::clock::{Clock, Nanos};
use kvarts_peer::lane::{Ready, Wire};
use rustix::io::Errno;

use super::net::{Fault, Net, Way};

/// Bytes that may be under way in one direction.
const UNDER_WAY_MAX: usize = 128 << 10;

#[derive(Default)]
struct Flow {
    /// What is under way: when it arrives, and how much of it was taken.
    segments: VecDeque<(Nanos, Vec<u8>, usize)>,
    bytes: usize,
    sent: u64,
    busy: Nanos,
    fault: Option<(Fault, u64)>,
    has_ended: bool,
    is_stalled: bool,
    /// The receiver, or a host on the way, has ended it, and the sender is not told.
    is_swallowed: bool,
}

/// One direction of a connection.
pub struct Pipe {
    pub(super) way: Way,
    net: Arc<Net>,
    is_blocked: Arc<AtomicBool>,
    /// Of both directions.
    is_reset: Arc<AtomicBool>,
    flow: Mutex<Flow>,
}

impl std::fmt::Debug for Pipe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pipe({:?})", self.way)
    }
}

impl Pipe {
    fn new(net: &Arc<Net>, way: Way, is_reset: &Arc<AtomicBool>) -> Arc<Self> {
        let flow = Flow { fault: net.planned(way), ..Flow::default() };
        let is_blocked = net.blocked(way);
        let pipe = Arc::new(Self {
            way,
            net: Arc::clone(net),
            is_blocked,
            is_reset: Arc::clone(is_reset),
            flow: Mutex::new(flow),
        });
        net.keep(&pipe);
        pipe
    }

    fn lock(&self) -> MutexGuard<'_, Flow> {
        self.flow.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Both sides are told that it is broken.
    pub(super) fn reset(&self) {
        self.is_reset.store(true, Ordering::SeqCst);
    }

    fn is_open(&self) -> bool {
        !self.is_blocked.load(Ordering::SeqCst)
    }

    /// When there is something to receive, if that is known.
    fn comes_at(&self) -> Option<Nanos> {
        let is_open = self.is_open();
        let flow = self.lock();
        if self.is_reset.load(Ordering::SeqCst) {
            return Some(Nanos(0));
        }
        if flow.is_stalled || !is_open {
            return None;
        }
        let first = flow.segments.front().map(|(at, ..)| *at);
        first.or((flow.has_ended || flow.is_swallowed).then_some(Nanos(0)))
    }

    fn has_room(&self) -> bool {
        let flow = self.lock();
        self.is_reset.load(Ordering::SeqCst)
            || flow.has_ended
            || flow.is_swallowed
            || flow.bytes < UNDER_WAY_MAX
    }

    fn put(&self, bytes: &[u8]) -> Result<usize, Errno> {
        let mut flow = self.lock();
        if self.is_reset.load(Ordering::SeqCst) || flow.has_ended {
            return Err(Errno::PIPE);
        }
        if flow.is_swallowed {
            return Ok(bytes.len());
        }
        let len = bytes.len().min(UNDER_WAY_MAX.saturating_sub(flow.bytes));
        if len == 0 {
            return Err(Errno::AGAIN);
        }
        let mut some = bytes.get(..len).unwrap_or_default().to_vec();
        if let Some((fault, at)) = flow.fault
            && at < flow.sent + len as u64
        {
            flow.fault = None;
            let before = at.saturating_sub(flow.sent) as usize;
            self.net.note("fault", self.way, &[at, fault as u64]);
            match fault {
                Fault::Flip => some[before] ^= 1 << (at % 8),
                Fault::Reset => self.reset(),
                Fault::End => {
                    some.truncate(before);
                    flow.is_swallowed = true;
                }
                Fault::Stall => {
                    some.truncate(before);
                    flow.is_stalled = true;
                }
            }
        }
        flow.sent += len as u64;
        flow.bytes += some.len();
        let mut busy = flow.busy;
        let at = self.net.arrival(self.way, len, &mut busy);
        flow.busy = busy;
        // In order: nothing arrives before what was sent before it.
        let at = flow.segments.back().map_or(at, |(before, ..)| at.max(*before));
        if !some.is_empty() {
            flow.segments.push_back((at, some, 0));
        }
        Ok(len)
    }

    fn take(&self, mut give: impl FnMut(&[u8]) -> usize) -> Result<usize, Errno> {
        let (is_open, now) = (self.is_open(), self.net.clock.now());
        let mut flow = self.lock();
        if self.is_reset.load(Ordering::SeqCst) {
            return Err(Errno::CONNRESET);
        }
        let is_stalled = flow.is_stalled || !is_open;
        let has_ended = flow.has_ended || flow.is_swallowed;
        let taken = match flow.segments.front_mut() {
            _ if is_stalled => return Err(Errno::AGAIN),
            None if has_ended => return Ok(0),
            Some((at, bytes, taken)) if *at <= now => {
                let some = give(bytes.get(*taken..).unwrap_or_default());
                *taken += some;
                if *taken == bytes.len() {
                    flow.segments.pop_front();
                }
                some
            }
            _ => return Err(Errno::AGAIN),
        };
        flow.bytes -= taken;
        drop(flow);
        self.net.note("bytes", self.way, &[taken as u64]);
        Ok(taken)
    }

    fn end(&self) {
        self.lock().has_ended = true;
    }
}

/// One end of a connection.
pub struct End {
    out: Arc<Pipe>,
    back: Arc<Pipe>,
    /// Nothing but a number that no other end has.
    number: OwnedFd,
}

/// A connection: the end of who calls, and of who is called.
pub fn connection(net: &Arc<Net>, (from, to): Way) -> std::io::Result<[Arc<End>; 2]> {
    let is_reset = Arc::default();
    let (there, back) = (Pipe::new(net, (from, to), &is_reset), Pipe::new(net, (to, from), &is_reset));
    let number = || rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC);
    let caller = End { out: Arc::clone(&there), back: Arc::clone(&back), number: number()? };
    let called = End { out: back, back: there, number: number()? };
    Ok([Arc::new(caller), Arc::new(called)])
}

impl End {
    /// By what it is known.
    pub fn number(&self) -> RawFd {
        self.number.as_raw_fd()
    }

    /// Whether something can be done now.
    pub fn is_ready(&self, ready: Ready, now: Nanos) -> bool {
        self.ready_at(ready).is_some_and(|at| at <= now)
    }

    /// When something can be done, if that is known.
    pub fn ready_at(&self, ready: Ready) -> Option<Nanos> {
        let comes = if ready == Ready::ToSend { None } else { self.back.comes_at() };
        let goes = (ready != Ready::ToReceive && self.out.has_room()).then_some(Nanos(0));
        comes.into_iter().chain(goes).min()
    }
}

impl Wire for End {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.number.as_fd()
    }

    fn receive(&self, into: &mut [u8]) -> Result<usize, Errno> {
        self.back.take(|bytes| {
            let len = bytes.len().min(into.len());
            into[..len].copy_from_slice(&bytes[..len]);
            len
        })
    }

    fn receive_into(&self, into: &mut Stretch) -> Result<usize, Errno> {
        self.back.take(|bytes| into.fill(bytes))
    }

    fn send(&self, bytes: &[u8], _more: bool) -> Result<usize, Errno> {
        self.out.put(bytes)
    }

    fn send_from(&self, from: &mut Stretch) -> Result<usize, Errno> {
        if !self.out.has_room() {
            return Err(Errno::AGAIN);
        }
        let mut some = vec![0; 64 << 10];
        // What there is no room for would be lost: so no more is taken than there is.
        let room = UNDER_WAY_MAX.saturating_sub(self.out.lock().bytes).min(some.len());
        let len = from.drain(&mut some[..room]);
        self.out.put(&some[..len])
    }

    fn close(&self) {
        self.out.end();
        // Who still sends does not hear of it before the end arrives there.
        self.back.lock().is_swallowed = true;
    }
}

impl std::fmt::Debug for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "End({:?})", self.out.way)
    }
}
