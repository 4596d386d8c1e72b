//! A client's connection. Its session is woken by what arrives, and not each time that the client has taken an answer: that
//! there is room in the socket is news only while something waits for it.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};

use super::foreign;
use crate::state::parts::Part;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::state::locals::Peer;

/// A connected socket that does not block.
pub(super) struct Line {
    watched: AsyncFd<UnixStream>,
    /// Behind the socket, so that it is dropped after it.
    last: Last,
}

/// The last reference to a socket in which there may be descriptors that were sent and not received: the kernel closes them with it.
#[derive(Default)]
struct Last {
    stream: Option<UnixStream>,
    place: OnceLock<Arc<Part>>,
}

impl Drop for Last {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            foreign::close(stream, self.place.take());
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.last.place.get().is_none() {
            return;
        }
        // Nothing more comes into its queue.
        let _ = self.watched.get_ref().shutdown(Shutdown::Read);
        if rustix::io::ioctl_fionread(self.socket()).is_ok_and(|unread| unread > 0) {
            self.last.stream = self.watched.get_ref().try_clone().ok();
        }
    }
}

impl Line {
    /// Belongs to the event loop of the calling thread.
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        Ok(Self { watched: watch(stream, Interest::READABLE)?, last: Last::default() })
    }

    /// It is a session's, which has this place: from now on its client may send descriptors.
    pub(super) fn belongs_to(&self, place: &Arc<Part>) {
        if self.last.place.set(Arc::clone(place)).is_ok() {
            // Of a kernel that cannot refuse them they come anyhow.
            let _ = foreign::allow(self.socket(), true);
        }
    }

    /// The socket.
    pub(super) fn socket(&self) -> impl AsFd {
        self.watched.get_ref()
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
        // ends: the session: `HELLO`, `STALL`, a drain, or its end closes the socket
        self.watched.readable().await.map(drop)
    }

    /// Takes what has arrived.
    pub(super) fn try_receive<T>(&self, take: impl FnOnce(&UnixStream) -> io::Result<T>) -> io::Result<T> {
        self.watched.try_io(Interest::READABLE, take)
    }

    /// Returns when there may be room in the socket.
    pub(super) async fn writable(&self) -> io::Result<()> {
        // ends: the session: `STALL` without anything taken ends it
        watch(self.watched.get_ref().try_clone()?, Interest::WRITABLE)?.writable().await.map(drop)
    }
}

#[allow(unsafe_code, reason = "the registered descriptor stays open as long as its registration")]
fn watch(stream: UnixStream, interest: Interest) -> io::Result<AsyncFd<UnixStream>> {
    // SAFETY: the stream owns its descriptor, and goes with the registration; no code can replace it in between.
    unsafe { Ok(AsyncFd::register_with_interest(stream, interest)?) }
}
