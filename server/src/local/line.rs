//! A client's connection. Its session is woken by what arrives, and not each time that the client has taken an answer: that
//! there is room in the socket is news only while something waits for it.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::state::locals::Peer;

/// A connected socket that does not block.
pub(super) struct Line(AsyncFd<UnixStream>);

impl Line {
    /// Belongs to the event loop of the calling thread.
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        watch(stream, Interest::READABLE).map(Self)
    }

    /// The socket.
    pub(super) fn socket(&self) -> impl AsFd {
        self.0.get_ref()
    }

    /// Which process is at the other end.
    pub(super) fn peer(&self) -> Peer {
        let unknown = Peer { pid: 0, uid: u32::MAX };
        rustix::net::sockopt::socket_peercred(self.socket()).map_or(unknown, |cred| Peer {
            pid: u32::try_from(cred.pid.as_raw_nonzero().get()).unwrap_or_default(),
            uid: cred.uid.as_raw(),
        })
    }

    /// Returns when something may have arrived.
    pub(super) async fn readable(&self) -> io::Result<()> {
        self.0.readable().await.map(drop)
    }

    /// Takes what has arrived.
    pub(super) fn try_receive<T>(&self, take: impl FnOnce(&UnixStream) -> io::Result<T>) -> io::Result<T> {
        self.0.try_io(Interest::READABLE, take)
    }

    /// Returns when there may be room in the socket.
    pub(super) async fn writable(&self) -> io::Result<()> {
        watch(self.0.get_ref().try_clone()?, Interest::WRITABLE)?.writable().await.map(drop)
    }
}

#[allow(unsafe_code, reason = "the registration is of a descriptor that it owns")]
fn watch(stream: UnixStream, interest: Interest) -> io::Result<AsyncFd<UnixStream>> {
    // SAFETY: the stream owns its descriptor, and goes with the registration; no code can replace it in between.
    unsafe { Ok(AsyncFd::register_with_interest(stream, interest)?) }
}
