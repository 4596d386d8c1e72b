//! One connection of the local path as its client sees it: blocking, and good for one side of each call at a time.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kvarts_contract::error::Reason;
use prost::Message;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustix::net::sockopt::set_socket_send_buffer_size;

use crate::{away, peer};
use kvarts_wire::fault;
use kvarts_wire::local::frame::{Head, Kind, frame};
use kvarts_wire::local::limits::{HEAD_BYTES, MAGIC, RECEIVE_BYTES, VERSION};
use kvarts_wire::local::socket;
use kvarts_wire::proto;

/// What is said when the other end is gone.
pub(super) const GONE: Reason = Reason::Busy("the connection was interrupted");
/// Room for what was sent and is not taken yet: a question of eight thousand keys and more. Less where the kernel allows less.
const SEND_BYTES: usize = 512 << 10;
/// What is said when a look-up was not answered in time.
const LATE: Reason = Reason::DeadlinePassed;

/// Sends all of `bytes`, a descriptor with the first of them.
pub(super) fn send(stream: &UnixStream, bytes: &[u8], descriptor: Option<&OwnedFd>) -> io::Result<()> {
    let (mut rest, mut descriptor) = (bytes, descriptor);
    while !rest.is_empty() {
        match socket::send(stream, &[IoSlice::new(rest)], descriptor) {
            Ok(sent) => {
                rest = rest.get(sent..).unwrap_or_default();
                descriptor = None;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// What has arrived on a connection.
pub(super) struct Inbox {
    bytes: Vec<u8>,
    at: usize,
    pub(super) descriptors: Vec<OwnedFd>,
    scratch: Box<[u8]>,
    /// How long the next frame is waited for; for ever, if nothing is said.
    call_timeout: Option<Timespec>,
    /// Ends the waiting when it can be read.
    wake: Option<Arc<OwnedFd>>,
}

impl Default for Inbox {
    fn default() -> Self {
        let scratch = vec![0; RECEIVE_BYTES].into_boxed_slice();
        Self { bytes: Vec::new(), at: 0, descriptors: Vec::new(), scratch, call_timeout: None, wake: None }
    }
}

impl Inbox {
    /// Waits for frames as long as it takes, or until `wake` can be read.
    pub(super) fn wait_until(&mut self, wake: Arc<OwnedFd>) {
        (self.call_timeout, self.wake) = (None, Some(wake));
    }

    /// A frame that was received with others.
    pub(super) fn take(&mut self) -> io::Result<Option<(Head, Bytes)>> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let head = Head::parse(rest).map_err(|error| io::Error::other(error.to_string()))?;
        let Some(head) = head else { return Ok(None) };
        let Some(body) = rest.get(HEAD_BYTES..HEAD_BYTES + head.length) else { return Ok(None) };
        let body = Bytes::copy_from_slice(body);
        self.at += HEAD_BYTES + head.length;
        if self.at == self.bytes.len() {
            self.bytes.clear();
            self.at = 0;
        }
        Ok(Some((head, body)))
    }

    /// The next frame, waited for.
    pub(super) fn next(&mut self, stream: &UnixStream) -> io::Result<(Head, Bytes)> {
        loop {
            if let Some(frame) = self.try_next(stream)? {
                return Ok(frame);
            }
            // Not in the call that receives: that one is also woken when the other end takes what was sent.
            let wake = self.wake.as_ref().map(|wake| PollFd::new(&**wake, PollFlags::IN));
            let mut wanted: Vec<PollFd<'_>> = wake.into_iter().collect();
            let wakes = wanted.len();
            wanted.push(PollFd::new(stream, PollFlags::IN));
            // ends: `call_timeout`, or `wake` where requests have deadlines of their own
            match poll(&mut wanted, self.call_timeout.as_ref()) {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) if wanted.iter().take(wakes).any(|wake| !wake.revents().is_empty()) => {
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// A frame that is here already.
    pub(super) fn try_next(&mut self, stream: &UnixStream) -> io::Result<Option<(Head, Bytes)>> {
        loop {
            if let Some(frame) = self.take()? {
                return Ok(Some(frame));
            }
            if !self.receive(stream)? {
                return Ok(None);
            }
        }
    }

    /// Takes what is there; whether anything was.
    fn receive(&mut self, stream: &UnixStream) -> io::Result<bool> {
        self.bytes.drain(..self.at);
        self.at = 0;
        match socket::receive(stream, &mut self.scratch, &mut self.descriptors, RecvFlags::DONTWAIT) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.bytes.extend_from_slice(self.scratch.get(..count).unwrap_or_default());
                Ok(true)
            }
            Err(Errno::INTR | Errno::AGAIN) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Where a server is, and who asks.
#[derive(Clone)]
pub(super) struct Whom {
    pub(super) socket: PathBuf,
    pub(super) token: Option<String>,
    pub(super) server_uid: Option<u32>,
    /// How long anything may take that is answered at once.
    pub(super) call_timeout: Duration,
}

/// A connection that a server has welcomed.
pub(super) struct Line {
    pub(super) stream: UnixStream,
    pub(super) inbox: Inbox,
    pub(super) welcome: proto::Welcome,
}

/// Waits until the other end is gone, whatever it still sends.
pub(super) fn wait_closed(stream: &UnixStream) {
    let mut nothing = vec![0; RECEIVE_BYTES];
    loop {
        match rustix::net::recv(stream, &mut nothing, RecvFlags::empty()) {
            Ok((0, _)) => return,
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                // A wait that was cut short is begun again.
                // ends: the server closes it, or its process ends: until then disks may write to the memory
                let _ = poll(&mut [PollFd::new(stream, PollFlags::IN)], None);
            }
            Err(_) => return,
        }
    }
}

/// Connects and says who this is, and by which name this session will be asked for.
pub(super) fn connect(whom: &Whom, session: &[u8]) -> Result<Line, Reason> {
    let path = &whom.socket;
    let fault = |error: io::Error| away::of_io(path.display(), &error);
    let other = || {
        Reason::Config(format!(
            "{}: the server at this address has no local path (shared memory): use its gRPC address",
            path.display()
        ))
    };
    let stream = peer::connect(path, whom.call_timeout).map_err(fault)?;
    if whom.token.is_some() {
        peer::check(&stream, whom.server_uid).map_err(fault)?;
    }
    // As much of it as the kernel allows: without it a thread sends the rest of a large question.
    let _ = set_socket_send_buffer_size(&stream, SEND_BYTES);
    let token = whom.token.clone().unwrap_or_default();
    let hello = proto::Hello { version: VERSION, token, session: session.to_vec().into() };
    let bytes = [&MAGIC[..], &frame(Kind::Hello, 0, &hello)].concat();
    send(&stream, &bytes, None).map_err(fault)?;
    // More than that is for ever.
    let mut inbox = Inbox { call_timeout: Timespec::try_from(whom.call_timeout).ok(), ..Inbox::default() };
    let (head, body) = inbox.next(&stream).map_err(fault)?;
    match head.kind {
        Kind::Welcome => {
            let welcome = proto::Welcome::decode(body).map_err(|_| other())?;
            Ok(Line { stream, inbox, welcome })
        }
        Kind::Failed => Err(reason(body)),
        _ => Err(other()),
    }
}

/// Why something failed, from the body of the frame that says so.
pub(super) fn reason(body: Bytes) -> Reason {
    proto::Error::decode(body).map_or(GONE, |error| fault::reason(&error))
}

/// Calls that are answered at once, one at a time over a connection of their own. One that is not answered in time is given
/// up by itself: its answer is passed over when it comes, and nothing else is touched.
pub(super) struct Calls {
    whom: Whom,
    at: Mutex<At>,
    back: Condvar,
}

/// Where the connection is.
enum At {
    /// Here, with the name of the last call.
    Free(Box<Line>, u64),
    /// With a caller.
    Busy,
    /// It broke: the next call makes another.
    Gone,
}

impl Calls {
    pub(super) fn new(whom: &Whom) -> Result<Self, Reason> {
        let line = connect(whom, &[])?;
        let (at, back) = (Mutex::new(At::Free(Box::new(line), 0)), Condvar::new());
        Ok(Self { whom: whom.clone(), at, back })
    }

    /// Asks and waits, for the connection as well.
    pub(super) fn ask<M: Message + Default>(&self, kind: Kind, message: &impl Message) -> Result<M, Reason> {
        let at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        let is_busy = |at: &mut At| matches!(at, At::Busy);
        let waited = self.back.wait_timeout_while(at, self.whom.call_timeout, is_busy);
        let (mut at, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return Err(LATE);
        }
        let had = std::mem::replace(&mut *at, At::Busy);
        drop(at);
        // Nothing is locked during the wait.
        let ready = match had {
            At::Free(line, id) => Ok((line, id)),
            _ => connect(&self.whom, &[]).map(|line| (Box::new(line), 0)),
        };
        let (now, answer) = match ready {
            Ok((mut line, id)) => {
                let answer = ask(&mut line, id + 1, kind, message);
                let lasts = answer.as_ref().err().is_none_or(|error| error.kind() == io::ErrorKind::TimedOut);
                let now = if lasts { At::Free(line, id + 1) } else { At::Gone };
                let late = |error: io::Error| if lasts { LATE } else { gone(&error) };
                (now, answer.map_err(late).flatten())
            }
            Err(reason) => (At::Gone, Err(reason)),
        };
        *self.at.lock().unwrap_or_else(PoisonError::into_inner) = now;
        self.back.notify_one();
        answer
    }
}

fn gone(error: &io::Error) -> Reason {
    tracing::debug!(%error, "the connection for local look-ups broke");
    GONE
}

/// Asks and waits. The first error is the connection's end, the second the server's answer.
fn ask<M: Message + Default>(
    line: &mut Line,
    id: u64,
    kind: Kind,
    message: &impl Message,
) -> io::Result<Result<M, Reason>> {
    send(&line.stream, &frame(kind, id, message), None)?;
    loop {
        let (head, body) = line.inbox.next(&line.stream)?;
        match head.kind {
            Kind::Done if head.id == id => return M::decode(body).map(Ok).map_err(io::Error::other),
            Kind::Failed if head.id == id => return Ok(Err(reason(body))),
            // Of a call that was given up.
            Kind::Done | Kind::Failed if head.id < id => {}
            _ => return Err(io::Error::other("the answer of the server belongs to another request")),
        }
    }
}
