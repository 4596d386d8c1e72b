//! What a lane stands on. A host: the machine's threads, connections and sleep ([`super::host`]), or those of a simulation, where
//! one thread runs at a time and time passes only while all of them sleep. A wire: what the lane's bytes go over, a TCP connection
//! as it is or encrypted ([`super::secured`]).
//!
//! Nothing here waits. Who has nothing to do sleeps at the descriptor ([`super::bell`]).

use std::fmt;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::buffers::stream::Stretch;
use kvarts_contract::clock::{Clock, Nanos};
use kvarts_layout::StoreId;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, sockopt};

use super::bell::Bell;

/// A stream of bytes in both directions. [`Errno::AGAIN`] says that there is nothing to receive now, or no room to send: who
/// could not send comes again with the same bytes.
pub trait Wire: Send + Sync + fmt::Debug {
    /// Makes the stream ready, if there is anything to do for it: both sides show who they are. Waits until `until` at most.
    fn greet(&self, _host: &dyn Host, _clock: &dyn Clock, _until: Nanos) -> Result<(), Broken> {
        Ok(())
    }
    /// Whether the other side may say that it is this node, as far as the stream can know.
    fn is_of(&self, _node: StoreId) -> bool {
        true
    }
    /// What becomes ready when there is something to do.
    fn descriptor(&self) -> BorrowedFd<'_>;
    /// Receives some bytes; none at the end of the stream.
    fn receive(&self, into: &mut [u8]) -> Result<usize, Errno>;
    /// Receives some bytes to their places; none at the end of the stream.
    fn receive_into(&self, into: &mut Stretch) -> Result<usize, Errno>;
    /// Sends some bytes; `more` says that others follow at once.
    fn send(&self, bytes: &[u8], more: bool) -> Result<usize, Errno>;
    /// Sends some bytes from their places.
    fn send_from(&self, from: &mut Stretch) -> Result<usize, Errno>;
    /// Ends the stream in both directions: a thread that sleeps at it wakes.
    fn close(&self);
}

/// What of a wire is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ready {
    /// That something comes.
    ToReceive,
    /// That there is room.
    ToSend,
    /// Either.
    ForBoth,
}

/// Waits for the end of a thread.
pub type Join = Box<dyn FnOnce() + Send>;

/// Threads, connections and sleep.
pub trait Host: Send + Sync + fmt::Debug {
    /// Starts a thread.
    fn thread(&self, name: &'static str, body: Box<dyn FnOnce() + Send>) -> io::Result<Join>;
    /// Makes a connection to a node that serves bytes.
    fn connect(&self, address: SocketAddr, within: Duration) -> io::Result<Arc<dyn Wire>>;
    /// Sleeps until the bell is rung, or the wire is ready, or the time is over; perhaps not as long.
    fn sleep(&self, bell: Option<&Bell>, wire: Option<(&dyn Wire, Ready)>, timeout: Option<Duration>);
}

/// A TCP connection as it is.
#[derive(Debug)]
pub(super) struct Plain(TcpStream);

impl Plain {
    pub(super) fn new(stream: TcpStream) -> Self {
        // Each of these is refused by no kernel that this runs on; without them a connection is slower, or its end is noticed
        // later.
        let _ = stream.set_nodelay(true);
        let _ = sockopt::set_socket_keepalive(&stream, true);
        let _ = sockopt::set_tcp_keepidle(&stream, Duration::from_secs(10));
        let _ = sockopt::set_tcp_keepintvl(&stream, Duration::from_secs(5));
        let _ = sockopt::set_tcp_keepcnt(&stream, 3);
        let of_this_host = |peer: SocketAddr| peer.ip().to_canonical().is_loopback();
        if stream.peer_addr().is_ok_and(of_this_host) {
            // Where the host's congestion control paces, its timers would hold back bytes that cross no network.
            let _ = sockopt::set_tcp_congestion(&stream, "reno");
        }
        Self(stream)
    }
}

impl Wire for Plain {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn receive(&self, into: &mut [u8]) -> Result<usize, Errno> {
        rustix::net::recv(&self.0, into, RecvFlags::DONTWAIT).map(|(got, _)| got)
    }

    fn receive_into(&self, into: &mut Stretch) -> Result<usize, Errno> {
        into.receive(&self.0)
    }

    fn send(&self, bytes: &[u8], more: bool) -> Result<usize, Errno> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        rustix::net::send(&self.0, bytes, if more { flags | SendFlags::MORE } else { flags })
    }

    fn send_from(&self, from: &mut Stretch) -> Result<usize, Errno> {
        from.send(&self.0)
    }

    fn close(&self) {
        // Closed already is as good.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// Why a connection cannot go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Broken {
    /// It has ended, or the network gave an error.
    Gone,
    /// The other side owes something and says nothing, or does not take what it is sent.
    Silent,
    /// The other side did what no peer does.
    Protocol(&'static str),
    /// One of both does not want the other.
    Refused(&'static str),
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone => f.write_str("the connection has ended"),
            Self::Silent => f.write_str("the other node does not respond"),
            Self::Protocol(what) => write!(f, "the other node violated the protocol ({what})"),
            Self::Refused(what) => write!(f, "the connection between the nodes was refused: {what}"),
        }
    }
}

/// What became of a transfer: nothing now, or some bytes.
pub(super) fn moved(result: Result<usize, Errno>) -> Result<Option<usize>, Broken> {
    match result {
        Ok(0) => Err(Broken::Gone),
        Ok(bytes) => Ok(Some(bytes)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(_) => Err(Broken::Gone),
    }
}
