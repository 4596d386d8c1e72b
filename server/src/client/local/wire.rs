//! One connection of the local path as its client sees it: blocking, and good for one side of each call at a time.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use kvarts_store::error::Reason;
use prost::Message;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::grpc::fault;
use crate::local::frame::{Head, Kind, frame};
use crate::local::limits::{HEAD_BYTES, MAGIC, RECEIVE_BYTES, VERSION};
use crate::local::socket;
use crate::proto;

/// What is said when the other end is gone.
pub(super) const GONE: Reason = Reason::Busy("the connection broke off");

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
    patience: Option<Timespec>,
}

impl Default for Inbox {
    fn default() -> Self {
        let scratch = vec![0; RECEIVE_BYTES].into_boxed_slice();
        Self { bytes: Vec::new(), at: 0, descriptors: Vec::new(), scratch, patience: None }
    }
}

impl Inbox {
    /// Waits for frames as long as it takes.
    pub(super) fn wait_for_ever(&mut self) {
        self.patience = None;
    }

    /// A frame that has arrived.
    fn take(&mut self) -> io::Result<Option<(Head, Bytes)>> {
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
            let mut wanted = [PollFd::new(stream, PollFlags::IN)];
            match poll(&mut wanted, self.patience.as_ref()) {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
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

/// Connects and says who this is.
pub(super) fn connect(
    path: &Path,
    token: Option<&str>,
    patience: Duration,
) -> Result<(UnixStream, Inbox), Reason> {
    let fault = |error: io::Error| Reason::Config(format!("{}: {error}", path.display()));
    let stream = UnixStream::connect(path).map_err(fault)?;
    stream.set_write_timeout(Some(patience)).map_err(fault)?;
    let hello = proto::Hello { version: VERSION, token: token.unwrap_or_default().to_owned() };
    let bytes = [&MAGIC[..], &frame(Kind::Hello, 0, &hello)].concat();
    send(&stream, &bytes, None).map_err(fault)?;
    // More than that is for ever.
    let mut inbox = Inbox { patience: Timespec::try_from(patience).ok(), ..Inbox::default() };
    let (head, body) = inbox.next(&stream).map_err(fault)?;
    match head.kind {
        Kind::Welcome => Ok((stream, inbox)),
        Kind::Failed => Err(reason(body)),
        _ => Err(Reason::Config(format!("{}: no server that has a local path", path.display()))),
    }
}

/// Why something failed, from the body of the frame that says so.
pub(super) fn reason(body: Bytes) -> Reason {
    proto::Error::decode(body).map_or(GONE, |error| fault::reason(&error))
}

/// Calls that are answered at once, one at a time.
pub(super) struct Calls {
    stream: UnixStream,
    inbox: Inbox,
    id: u64,
}

impl Calls {
    pub(super) fn new((stream, inbox): (UnixStream, Inbox)) -> Self {
        Self { stream, inbox, id: 0 }
    }

    /// Asks and waits. The first error is the server's answer, the second the connection's end.
    pub(super) fn ask<M: Message + Default>(
        &mut self,
        kind: Kind,
        message: &impl Message,
    ) -> io::Result<Result<M, Reason>> {
        self.id += 1;
        send(&self.stream, &frame(kind, self.id, message), None)?;
        let (head, body) = self.inbox.next(&self.stream)?;
        match head.kind {
            Kind::Done if head.id == self.id => M::decode(body).map(Ok).map_err(io::Error::other),
            Kind::Failed if head.id == self.id => Ok(Err(reason(body))),
            _ => Err(io::Error::other("an answer to something else")),
        }
    }
}
