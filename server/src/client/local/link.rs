//! A pair of connections to a server: one for calls that are answered at once, one for reads and puts, whose answers a
//! thread takes in.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kvarts_layout::BlockShape;
use kvarts_store::api::{Order, Placed, PutReply, ReadRequest, ReadSink};
use kvarts_store::error::{Error, Reason};
use kvarts_store::io::Arena;
use kvarts_store::rt::mailbox::Reply;
use prost::Message;

use super::reading::Reading;
use super::wire::{self, Calls, GONE, Inbox};
use crate::client::upload;
use crate::local::Mode;
use crate::local::frame::{Head, Kind, bare, frame};
use crate::local::limits::QUARANTINE;
use crate::proto;

/// Who is told about reads that went wrong: the path that this link belongs to.
pub(super) trait Owner: Send + Sync {
    /// Blocks of a read did not match in the client's memory: the server should look at them.
    fn suspect(&self, request: ReadRequest, shape: BlockShape, blocks: Vec<u32>);

    /// Does something that may wait for the socket.
    fn later(&self, work: Box<dyn FnOnce() + Send>);
}

/// A message, with the descriptor that may come with it.
type Answer = Result<(Bytes, Option<OwnedFd>), Reason>;

/// The answer to a call that travels with the reads.
#[derive(Default)]
struct Slot {
    answer: Mutex<Option<Answer>>,
    came: Condvar,
}

/// A request under way.
enum Pending {
    Read(Box<Reading>),
    /// A put of so many blocks, whose memory is kept from being used again until it is answered.
    Put(Reply<Result<PutReply, Error>>, usize, Placed),
    Call(Arc<Slot>),
}

/// What the sending sides and the receiving thread share.
struct Shared {
    stream: UnixStream,
    sending: Mutex<()>,
    pending: Mutex<BTreeMap<u64, Pending>>,
    broken: AtomicBool,
}

/// Both connections.
pub(super) struct Link {
    shared: Arc<Shared>,
    calls: Mutex<Calls>,
    next: AtomicU64,
    patience: Duration,
    /// Where bytes stop on their way to memory that is not shared.
    pub(super) windows: std::sync::OnceLock<Arena>,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Link")
    }
}

impl Shared {
    fn pending(&self) -> MutexGuard<'_, BTreeMap<u64, Pending>> {
        // Each change is one step.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, bytes: &[u8], descriptor: Option<&OwnedFd>) -> Result<(), Reason> {
        let _turn = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        wire::send(&self.stream, bytes, descriptor).map_err(|error| self.broke(&error))
    }

    /// Ends the connection: half a frame may have been sent.
    fn broke(&self, error: &io::Error) -> Reason {
        tracing::debug!(%error, "the local connection broke");
        self.broken.store(true, Ordering::SeqCst);
        // Wakes the receiving thread.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        GONE
    }
}

impl Link {
    /// Connects twice.
    pub(super) fn open(
        path: &Path,
        token: Option<&str>,
        patience: Duration,
        owner: std::sync::Weak<dyn Owner>,
    ) -> Result<Arc<Self>, Reason> {
        let calls = Mutex::new(Calls::new(wire::connect(path, token, patience)?));
        let (stream, inbox) = wire::connect(path, token, patience)?;
        let fault = |error: io::Error| Reason::Config(format!("{}: {error}", path.display()));
        // Reads and puts take as long as they take; their deadlines are the server's to keep.
        stream.set_read_timeout(None).map_err(fault)?;
        let shared = Arc::new(Shared {
            stream,
            sending: Mutex::new(()),
            pending: Mutex::new(BTreeMap::new()),
            broken: AtomicBool::new(false),
        });
        let receiver = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("kvarts-local".to_owned())
            .spawn(move || receive(&receiver, inbox, &owner))
            .map_err(fault)?;
        let (next, windows) = (AtomicU64::new(1), std::sync::OnceLock::new());
        Ok(Arc::new(Self { shared, calls, next, patience, windows }))
    }

    pub(super) fn is_broken(&self) -> bool {
        self.shared.broken.load(Ordering::SeqCst)
    }

    /// Asks what is answered at once.
    pub(super) fn ask<M: Message + Default>(&self, kind: Kind, message: &impl Message) -> Result<M, Reason> {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.ask(kind, message).map_err(|error| self.shared.broke(&error))?
    }

    fn id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes memory known; gives the descriptor if the server made it.
    pub(super) fn share(
        &self,
        memory: u32,
        mode: Mode,
        bytes: u64,
        file: Option<&OwnedFd>,
    ) -> Result<Option<OwnedFd>, Reason> {
        let message = proto::ShareRequest { memory, mode: mode.to_wire(), bytes };
        let (id, slot) = (self.id(), Arc::new(Slot::default()));
        self.begin(id, Pending::Call(Arc::clone(&slot)))?;
        self.shared.send(&frame(Kind::Share, id, &message), file)?;
        let answer = slot.answer.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = slot.came.wait_timeout_while(answer, self.patience, |answer| answer.is_none());
        let (mut answer, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let (_, file) = answer.take().unwrap_or(Err(GONE))?;
        Ok(file)
    }

    /// Forgets memory. Its answer is of no interest.
    pub(super) fn unshare(&self, memory: u32) {
        let message = proto::UnshareRequest { memory };
        // A server that is gone has forgotten it.
        let _ = self.shared.send(&frame(Kind::Unshare, self.id(), &message), None);
    }

    /// Begins to read into shared memory.
    pub(super) fn read(
        &self,
        (request, shape): (ReadRequest, BlockShape),
        (places, verifies): (proto::LocalPlaces, bool),
        timeout_us: u64,
        sink: ReadSink,
    ) -> Result<(), Reason> {
        let message = proto::LocalRead {
            read: Some(crate::client::download::message(&request)),
            by_blocks: request.order == Order::Blocks,
            into: Some(places),
            timeout_us,
        };
        let id = self.id();
        let reading = Reading::new(request, shape, sink, verifies);
        self.begin(id, Pending::Read(Box::new(reading)))?;
        self.shared.send(&frame(Kind::Read, id, &message), None)
    }

    /// Begins to put from shared memory.
    pub(super) fn put(
        &self,
        message: &proto::LocalPut,
        from: Placed,
        reply: Reply<Result<PutReply, Error>>,
    ) -> Result<(), Reason> {
        let id = self.id();
        let blocks = from.block_count() as usize;
        self.begin(id, Pending::Put(reply, blocks, from))?;
        self.shared.send(&frame(Kind::Put, id, message), None)
    }

    /// Notes a request before it is sent. Of a connection that broke before, it is answered at once.
    fn begin(&self, id: u64, pending: Pending) -> Result<(), Reason> {
        let mut all = self.shared.pending();
        if self.is_broken() {
            drop(all);
            failed(pending, &GONE);
            return Err(GONE);
        }
        all.insert(id, pending);
        Ok(())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // The receiving thread ends, and the server lets go of everything.
        let _ = self.shared.stream.shutdown(std::net::Shutdown::Both);
    }
}

/// Answers a request that was refused, or never sent.
fn failed(pending: Pending, reason: &Reason) {
    match pending {
        Pending::Read(mut reading) => reading.broken(reason, false),
        // A caller that is gone needs no answer.
        Pending::Put(reply, ..) => drop(reply.send(Err(Error(reason.clone())))),
        Pending::Call(slot) => answer(&slot, Err(reason.clone())),
    }
}

fn answer(slot: &Slot, answer: Result<(Bytes, Option<OwnedFd>), Reason>) {
    *slot.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
    slot.came.notify_all();
}

/// Takes answers in until the connection ends.
fn receive(shared: &Arc<Shared>, mut inbox: Inbox, owner: &std::sync::Weak<dyn Owner>) {
    let ended = loop {
        match inbox.next(&shared.stream) {
            Ok((head, body)) => {
                if let Err(error) = take(shared, head, body, &mut inbox, owner) {
                    break error;
                }
            }
            Err(error) => break error,
        }
    };
    let _ = shared.broke(&ended);
    let mut left = std::mem::take(&mut *shared.pending());
    // The server may live: what it had begun may still be written for a moment.
    let mut held = Vec::new();
    for (_, pending) in std::mem::take(&mut left) {
        match pending {
            Pending::Read(mut reading) => {
                reading.broken(&GONE, true);
                held.push(reading);
            }
            other => failed(other, &GONE),
        }
    }
    if !held.is_empty() {
        std::thread::park_timeout(QUARANTINE);
        held.into_iter().for_each(|reading| reading.released());
    }
}

fn decode<M: Message + Default>(body: Bytes) -> io::Result<M> {
    M::decode(body).map_err(io::Error::other)
}

/// Takes one frame in. An error ends the connection.
fn take(
    shared: &Arc<Shared>,
    head: Head,
    body: Bytes,
    inbox: &mut Inbox,
    owner: &std::sync::Weak<dyn Owner>,
) -> io::Result<()> {
    let mut all = shared.pending();
    match head.kind {
        Kind::Arrived => {
            let arrived = decode(body)?;
            // Taken out meanwhile: verifying takes time.
            let Some(Pending::Read(mut reading)) = all.remove(&head.id) else { return Ok(()) };
            drop(all);
            reading.arrived(&arrived);
            if reading.is_cancelled()
                && let Some(owner) = owner.upgrade()
            {
                let shared = Arc::clone(shared);
                // Not from here: the server may wait for this thread to take something.
                owner.later(Box::new(move || drop(shared.send(&bare(Kind::Cancel, head.id), None))));
            }
            shared.pending().insert(head.id, Pending::Read(reading));
        }
        Kind::End => {
            let end = decode(body)?;
            let Some(Pending::Read(reading)) = all.get_mut(&head.id) else { return Ok(()) };
            reading.end(&end);
            let damaged: Vec<u32> = reading.damaged().collect();
            if !damaged.is_empty()
                && let Some(owner) = owner.upgrade()
            {
                let (request, shape) = (reading.request.clone(), reading.shape.clone());
                drop(all);
                owner.suspect(request, shape, damaged);
            }
        }
        Kind::Released => {
            let done = all.remove(&head.id);
            drop(all);
            if let Some(Pending::Read(reading)) = done {
                reading.released();
            }
        }
        Kind::Done => match all.remove(&head.id) {
            Some(Pending::Put(reply, blocks, from)) => {
                drop(from);
                drop(all);
                let found: proto::PutReply = decode(body)?;
                let outcomes: Vec<_> = found.outcomes.iter().map(upload::outcome).collect();
                let whole = outcomes.len() == blocks;
                let wrong = Reason::Bug("an answer for another number of blocks");
                // A caller that is gone needs no answer.
                let _ = reply.send(if whole { Ok(PutReply { outcomes }) } else { Err(Error(wrong)) });
            }
            Some(Pending::Call(slot)) => {
                let file = (!inbox.descriptors.is_empty()).then(|| inbox.descriptors.remove(0));
                answer(&slot, Ok((body, file)));
            }
            // Of something that nobody waits for.
            _ => {}
        },
        Kind::Failed => {
            let pending = all.remove(&head.id);
            drop(all);
            if let Some(pending) = pending {
                failed(pending, &wire::reason(body));
            }
        }
        _ => return Err(io::Error::other("a frame that is not a server's to send")),
    }
    Ok(())
}
