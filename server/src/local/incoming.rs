//! What a client sends, put together into frames: nothing is held for it but what has arrived, and of that no more than
//! there is room for.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rustix::net::RecvFlags;
use tokio::time::Instant;

use super::foreign;
use super::frame::{Head, NoFrame};
use super::limits::{
    BODY_BYTES_MAX, HEAD_BYTES, HELLO_BYTES_MAX, RECEIVE_BYTES, RECEIVING_RATE, RECEIVING_STEP_BYTES, SLOW,
    SMALL_BODY_BYTES, STALL,
};
use super::line::Line;
use super::socket;
use crate::state::locals::Locals;
use crate::state::parts::Part;

/// Why a connection ends.
#[derive(Debug)]
pub(super) enum Ended {
    /// The client left, or was cut off.
    Left,
    /// The server is about to stop.
    Drained,
    /// It sent what cannot be.
    Broken(String),
}

impl From<io::Error> for Ended {
    fn from(_: io::Error) -> Self {
        Self::Left
    }
}

pub(super) fn broken(what: impl ToString) -> Ended {
    Ended::Broken(what.to_string())
}

/// What has arrived and is not used yet.
pub(super) struct Incoming {
    locals: Arc<Locals>,
    pub(super) bytes: Vec<u8>,
    at: usize,
    descriptors: Vec<OwnedFd>,
    /// Those beyond the first, among the files of shared memories.
    files: Option<Part>,
    scratch: Box<[u8]>,
    /// Whose it is, and the longest body that is taken: a short one, until the hello.
    tenant: Option<u32>,
    /// That of its session, which what closes its descriptors keeps.
    place: Option<Arc<Part>>,
    large: Option<Large>,
    /// Since when a frame is incomplete. While it has nothing of what others wait for, its client stalls nothing.
    since: Option<Instant>,
    /// Since when the server takes no more of it, because others have received so much: its client cannot help that.
    waits: Option<Instant>,
}

/// What the large body under way has of what may be received: somewhat more than has arrived of it.
struct Large {
    part: Part,
    /// Its tenant's turn to receive all of a body, whatever others have received: so one of those that wait for each other
    /// always ends.
    turn: Option<Part>,
    /// Bytes that may have arrived.
    amount: u64,
}

/// The next frame, or why there is none.
pub(super) enum Next {
    Frame(Head, Bytes),
    /// More has to arrive.
    More,
    /// More may only be received when others have received theirs.
    Wait,
}

impl Incoming {
    pub(super) fn new(locals: &Arc<Locals>) -> Self {
        let scratch = vec![0; RECEIVE_BYTES].into_boxed_slice();
        let (bytes, descriptors) = (Vec::new(), Vec::new());
        let (tenant, place, large, since, waits) = (None, None, None, None, None);
        let (locals, files) = (Arc::clone(locals), None);
        Self { locals, bytes, at: 0, descriptors, files, scratch, tenant, place, large, since, waits }
    }

    /// The hello has come: from now on bodies may be long, and descriptors come.
    pub(super) fn belongs_to(&mut self, tenant: u32, place: Arc<Part>) {
        self.tenant = Some(tenant);
        self.place = Some(place);
    }

    /// When the rest of a frame comes too late, if one is under way: all of it after [`STALL`], and of a large one as much as
    /// [`RECEIVING_RATE`] says. The time does not count in which the server takes nothing.
    pub(super) fn late(&self) -> Option<Instant> {
        let since = self.since.filter(|_| self.waits.is_none())?;
        let Some(large) = &self.large else { return Some(since + STALL) };
        let steps = large.amount / RECEIVING_STEP_BYTES * (RECEIVING_STEP_BYTES / RECEIVING_RATE);
        Some(since + STALL.min(SLOW + Duration::from_secs(steps)))
    }

    /// Takes what there is.
    pub(super) fn receive(&mut self, line: &Line) -> Result<(), Ended> {
        let Self { scratch, descriptors, bytes, place, .. } = self;
        let got = line.try_receive(|stream| match place {
            Some(_) => Ok(socket::receive(stream, scratch, descriptors, RecvFlags::empty())?),
            // The kernel drops what it is not asked for.
            None => Ok(rustix::net::recv(stream, &mut **scratch, RecvFlags::empty())?.0),
        });
        match got {
            Ok(0) => Err(Ended::Left),
            Ok(count) => {
                bytes.extend_from_slice(scratch.get(..count).unwrap_or_default());
                self.count_descriptors()
            }
            Err(error) if [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted].contains(&error.kind()) => {
                Ok(())
            }
            // A client that closes before it has read everything: no fault of its own.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Err(Ended::Left),
            Err(error) => Err(broken(error)),
        }
    }

    /// The descriptor that came first, of those that wait for their frames.
    pub(super) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        let first = (!self.descriptors.is_empty()).then(|| self.descriptors.remove(0));
        // Fewer are always counted.
        let _ = self.count_descriptors();
        first
    }

    /// Each connection may have one that waits; more of them count among the files of shared memories.
    fn count_descriptors(&mut self) -> Result<(), Ended> {
        let more = self.descriptors.len().saturating_sub(1) as u64;
        if more == 0 {
            self.files = None;
            return Ok(());
        }
        let tenant = self.tenant.unwrap_or_default();
        let files = self.files.get_or_insert_with(|| self.locals.files.part(tenant));
        if files.set(more) { Ok(()) } else { Err(broken("the server's limit of open files is reached")) }
    }

    pub(super) fn next(&mut self) -> Result<Next, Ended> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let Some(head) = Head::parse(rest).map_err(broken)? else {
            if rest.is_empty() {
                // It came with one of the frames that were taken, or in front of one of them.
                if !self.descriptors.is_empty() {
                    return Err(broken("the client sent an unexpected descriptor"));
                }
                self.bytes.clear();
                self.at = 0;
                self.since = None;
            } else {
                self.since.get_or_insert_with(Instant::now);
            }
            return Ok(Next::More);
        };
        if head.length > if self.tenant.is_some() { BODY_BYTES_MAX } else { HELLO_BYTES_MAX } {
            return Err(broken(NoFrame::TooLong));
        }
        let Some(body) = rest.get(HEAD_BYTES..HEAD_BYTES + head.length) else {
            let arrived = rest.len();
            if head.length > SMALL_BODY_BYTES && !self.counts(head.length as u64, arrived as u64) {
                self.waits.get_or_insert_with(Instant::now);
                return Ok(Next::Wait);
            }
            if let (Some(waits), Some(since)) = (self.waits.take(), &mut self.since) {
                *since += waits.elapsed();
            }
            self.since.get_or_insert_with(Instant::now);
            return Ok(Next::More);
        };
        let body = Bytes::copy_from_slice(body);
        self.at += HEAD_BYTES + head.length;
        (self.large, self.since) = (None, None);
        if self.at >= SMALL_BODY_BYTES {
            self.bytes.drain(..self.at);
            self.bytes.shrink_to(SMALL_BODY_BYTES * 4);
            self.at = 0;
        }
        Ok(Next::Frame(head, body))
    }

    /// Has room for what arrives next of a large body; false if others have received so much that there is none.
    fn counts(&mut self, length: u64, arrived: u64) -> bool {
        let next = (arrived + RECEIVE_BYTES as u64).next_multiple_of(RECEIVING_STEP_BYTES).min(length);
        let tenant = self.tenant.unwrap_or_default();
        let large = self.large.get_or_insert_with(|| Large {
            part: self.locals.receiving.part(tenant),
            turn: None,
            amount: 0,
        });
        if large.amount < next {
            if large.turn.is_none() && !large.part.set(next) {
                large.turn = self.locals.whole.try_take(tenant, 1);
                if large.turn.is_none() {
                    if large.amount == 0 {
                        (self.large, self.since) = (None, None);
                    }
                    return false;
                }
            }
            large.amount = next;
        }
        self.bytes.drain(..self.at);
        self.at = 0;
        true
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        let left = std::mem::take(&mut self.descriptors);
        if !left.is_empty() {
            foreign::close(left, self.place.take());
        }
    }
}

#[cfg(test)]
mod tests;
