//! The machine that the lane's threads run on: its threads, connections and sleep.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::bell::Bell;
use super::wire::{Host, Join, Plain, Ready, Wire};

/// The machine that this runs on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Machine;

impl Host for Machine {
    fn thread(&self, name: &'static str, body: Box<dyn FnOnce() + Send>) -> io::Result<Join> {
        let thread = Builder::new().name(name.to_owned()).spawn(body)?;
        // A panic in it was reported.
        // ends: the thread, which its owner has told to stop and woken
        Ok(Box::new(move || drop(thread.join())))
    }

    fn connect(&self, address: SocketAddr, within: Duration) -> io::Result<Arc<dyn Wire>> {
        Ok(Arc::new(Plain::new(TcpStream::connect_timeout(&address, within)?)))
    }

    fn sleep(&self, bell: Option<&Bell>, wire: Option<(&dyn Wire, Ready)>, timeout: Option<Duration>) {
        sleep(bell, wire, timeout);
    }
}

/// Sleeps until the bell is rung, or until the wire is ready, or the time is over.
pub(super) fn sleep(bell: Option<&Bell>, wire: Option<(&dyn Wire, Ready)>, timeout: Option<Duration>) {
    let timeout = timeout.map(timespec);
    let wire = wire.map(|(wire, ready)| (wire.descriptor(), ready));
    let wire = wire.as_ref().map(|(wire, ready)| PollFd::new(wire, flags(*ready)));
    let bell = bell.map(|bell| PollFd::new(&bell.event, PollFlags::IN));
    // An error is a signal: the caller looks and comes back.
    let _ = match (bell, wire) {
        // ends: the bell, which its owner rings to stop; the wire closes; or the time
        (Some(bell), Some(wire)) => poll(&mut [bell, wire], timeout.as_ref()),
        // ends: the bell, which its owner rings to stop; the wire closes; or the time
        (Some(one), None) | (None, Some(one)) => poll(&mut [one], timeout.as_ref()),
        // ends: the time, which a thread without bell and wire has
        (None, None) => poll(&mut [], timeout.as_ref()),
    };
}

fn flags(ready: Ready) -> PollFlags {
    match ready {
        Ready::ToReceive => PollFlags::IN,
        Ready::ToSend => PollFlags::OUT,
        Ready::ForBoth => PollFlags::IN | PollFlags::OUT,
    }
}

fn timespec(time: Duration) -> Timespec {
    // A little longer, so that who sleeps until a point in time has passed it then.
    let time = time.saturating_add(Duration::from_micros(50));
    Timespec { tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bell_that_was_rung_before_its_thread_sleeps_wakes_it_once() {
        let bell = Bell::new().unwrap();
        assert!(!bell.answer());
        bell.ring();
        bell.ring();
        sleep(Some(&bell), None, None);
        assert!(bell.answer() && !bell.answer());
        sleep(Some(&bell), None, Some(Duration::ZERO));
        bell.ring();
        sleep(Some(&bell), None, None);
        assert!(bell.answer());
    }
}
