//! A pair of connections to a server: one for calls that are answered at once, one for reads and puts.
//!
//! Their answers are taken in by one thread at a time: by a caller that blocks on its own answer, so that it needs no other
//! to wake it, or by a thread of the link's where a future or a queue waits, which cannot. A caller that leaves while
//! requests are under way calls that thread; when none are, it sleeps, and looks now and then.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use kvarts_contract::api::{ContainsReply, Order, Placed, Poller, PutReply, ReadRequest, ReadSink};
use kvarts_contract::buffers::Arena;
use kvarts_contract::clock::OsEntropy;
use kvarts_contract::clock::{Entropy, Nanos};
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::ticket::Reply;
use kvarts_layout::{BlockKey, BlockShape};
use prost::Message;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::RecvFlags;

use super::held;
use super::outbox::{Outbox, Sent};
use super::reading::{Reading, SharedPlaces, Wanted, met};
use super::wire::{self, Calls, GONE, Inbox, Whom};
use crate::pool::PoolName;
use crate::{messages, upload};
use kvarts_wire::local::Mode;
use kvarts_wire::local::frame::{Head, Kind, bare, frame, frame_with_keys};
use kvarts_wire::proto;

/// Who is told about reads that went wrong: the path that this link belongs to.
pub(super) trait Owner: Send + Sync {
    /// Blocks of a read did not match in the client's memory: the server should look at them.
    fn suspect(&self, request: ReadRequest, shape: Arc<BlockShape>, blocks: Vec<u32>);

    /// Does something that may wait for the socket.
    fn later(&self, work: Box<dyn FnOnce() + Send>);

    /// Whether the server says that memory of this session is not written to any more; nothing if it is another server than
    /// the one of this name, or none that could tell.
    fn is_settled(&self, session: &[u8], instance: &[u8]) -> Option<bool>;
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
    /// A put and its number of blocks, whose memory is kept from being used again until it is answered. No caller waits for it
    /// once its deadline has passed.
    Put(Option<Reply<Result<PutReply, Error>>>, usize, Placed),
    /// A look-up and its number of keys.
    Look(Reply<Result<ContainsReply, Error>>, usize),
    /// One whose answer brings a descriptor, or not.
    Call(Arc<Slot>, bool),
}

/// How often the link's thread looks at a connection that no caller waits for.
const LOOK: Duration = Duration::from_secs(1);

/// Whose turn it is to take in what arrives.
#[derive(Default)]
struct Turn {
    /// A caller does.
    taken: bool,
    /// The link's thread is wanted.
    called: bool,
}

/// What all who send and take in share.
struct Shared {
    stream: UnixStream,
    outbox: Outbox,
    pending: Mutex<BTreeMap<u64, Pending>>,
    /// When those are to be answered at the latest that are under way and have a deadline.
    deadlines: Mutex<BTreeMap<u64, Nanos>>,
    call_timeout: Duration,
    broken: AtomicBool,
    /// Asked for before `pending`, never after it.
    turn: Mutex<Turn>,
    called: Condvar,
    /// Only for the holder of the turn.
    inbox: Mutex<Inbox>,
    /// Wakes the thread that takes in, for good.
    wake: Arc<OwnedFd>,
    /// This session's name, and the server's.
    session: [u8; 16],
    instance: Bytes,
    /// Bytes of memory that is kept because of ended connections.
    held: Arc<AtomicU64>,
    owner: Weak<dyn Owner>,
    me: Weak<Self>,
}

/// Both connections.
pub(super) struct Link {
    shared: Arc<Shared>,
    calls: Calls,
    next: AtomicU64,
    call_timeout: Duration,
    /// The server leaves it to this side to verify memory of any mode.
    pub(super) lets_verify: bool,
    /// The server knows pools by name.
    has_pools: bool,
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

    /// Sends a frame, now or soon: the caller does not wait for room in the socket.
    fn send(&self, bytes: Vec<u8>, descriptor: Option<&OwnedFd>) -> Result<(), Reason> {
        let sent = self.outbox.send(&self.stream, bytes, descriptor);
        let sent = sent.map_err(|error| self.broke(&error))??;
        if let (Sent::NeedsThread, Some(me)) = (sent, self.me.upgrade()) {
            let run = move || {
                let done = me.outbox.run(&me.stream, me.call_timeout, || me.is_broken());
                if let Err(error) = done {
                    me.broke(&error);
                }
            };
            let spawned = std::thread::Builder::new().name("kvarts-send".to_owned()).spawn(run);
            spawned.map_err(|error| self.broke(&error))?;
        }
        Ok(())
    }

    fn deadlines(&self) -> MutexGuard<'_, BTreeMap<u64, Nanos>> {
        // Each change is one step.
        self.deadlines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers what should have been answered before `now`. What its memory is used for goes on: a put's is read, and a read's
    /// is not released.
    fn late(&self, now: Nanos) {
        let deadlines = self.deadlines();
        let over = deadlines.iter().filter(|(_, deadline)| **deadline < now);
        let over: Vec<u64> = over.map(|(id, _)| *id).collect();
        drop(deadlines);
        for id in over {
            let mut all = self.pending();
            let late = match all.get_mut(&id) {
                // Its digests are being compared: it is looked at again afterwards.
                None => continue,
                Some(Pending::Read(reading)) => {
                    reading.broken(&Reason::DeadlinePassed, true);
                    None
                }
                Some(Pending::Put(reply, blocks, from)) => {
                    reply.take().map(|reply| Pending::Put(Some(reply), *blocks, from.clone()))
                }
                Some(Pending::Look(..)) => all.remove(&id),
                Some(Pending::Call(..)) => None,
            };
            drop(all);
            self.deadlines().remove(&id);
            late.into_iter().for_each(|late| failed(late, &Reason::DeadlinePassed));
        }
    }

    /// Takes a request out that is answered.
    fn take_out(&self, id: u64) -> Option<Pending> {
        let pending = self.pending().remove(&id);
        self.deadlines().remove(&id);
        pending
    }

    /// Ends the connection: half a frame may have been sent.
    fn broke(&self, error: &io::Error) -> Reason {
        tracing::debug!(%error, "the local connection broke");
        self.end();
        GONE
    }

    /// Ends this side of the connection. The other one is still listened to: that it ends as well says that the server has
    /// ended what it did for this session.
    fn end(&self) {
        self.broken.store(true, Ordering::SeqCst);
        // The thread that takes in is woken; if none does, the link's thread clears up.
        let _ = rustix::io::write(&self.wake, &[1; 8]);
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
        self.call();
    }

    fn turn(&self) -> MutexGuard<'_, Turn> {
        // Each change is one step.
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the turn if it is free. Its holder calls the link's thread when it leaves, if it must.
    fn try_turn(&self) -> bool {
        let mut turn = self.turn();
        let free = !turn.taken;
        if free {
            *turn = Turn { taken: true, called: false };
        }
        free
    }

    /// Whether a caller waits for an answer. A read that is over does not count: the server's last message about it, which
    /// says that its memory is released, is taken in with the next answer, or when the link's thread looks.
    fn is_waited_for(&self) -> bool {
        self.pending().values().any(|pending| !matches!(pending, Pending::Read(read) if read.is_over()))
    }

    /// Gives the turn back. The link's thread gets it if a caller still waits for an answer.
    fn leave(&self) {
        let mut turn = self.turn();
        turn.taken = false;
        turn.called |= self.is_broken() || self.is_waited_for();
        if turn.called {
            self.called.notify_one();
        }
    }

    /// Calls the link's thread, unless a caller takes in already, which calls it when it leaves.
    fn call(&self) {
        let mut turn = self.turn();
        if !turn.taken {
            turn.called = true;
            self.called.notify_one();
        }
    }

    fn is_broken(&self) -> bool {
        self.broken.load(Ordering::SeqCst)
    }

    /// Takes in on this thread until `done`, with what came at the same time; what is here, if that is so already. The turn is
    /// the caller's.
    fn take_in(&self, done: &mut dyn FnMut() -> bool) -> io::Result<()> {
        let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        let only_looks = done();
        while !done() {
            let (head, body) = inbox.next(&self.stream)?;
            self.take(head, body, &mut inbox)?;
        }
        while let Some((head, body)) =
            if only_looks { inbox.try_next(&self.stream)? } else { inbox.take()? }
        {
            self.take(head, body, &mut inbox)?;
        }
        Ok(())
    }

    /// Whether the connection ended unseen. Where something else came, it is taken in first.
    fn look(&self) {
        let peek = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(&self.stream, &mut [0; 1], peek) {
            Err(rustix::io::Errno::AGAIN) => {}
            _ if self.try_turn() => {
                if let Err(error) = self.take_in(&mut || true) {
                    self.broke(&error);
                }
                self.leave();
            }
            // The thread that takes in sees it.
            _ => {}
        }
    }
}

impl Poller for Shared {
    fn fetch(&self, done: &mut dyn FnMut() -> bool) {
        if !self.try_turn() {
            return;
        }
        if let Err(error) = self.take_in(done) {
            self.broke(&error);
        }
        self.leave();
    }

    fn attend(&self) {
        self.call();
    }
}

impl Link {
    /// Connects twice.
    pub(super) fn open(
        whom: &Whom,
        held: &Arc<AtomicU64>,
        owner: Weak<dyn Owner>,
    ) -> Result<Arc<Self>, Reason> {
        let calls = Calls::new(whom)?;
        let mut session = [0; 16];
        OsEntropy::new().fill(&mut session);
        let wire::Line { stream, mut inbox, welcome } = wire::connect(whom, &session)?;
        let fault = |error: io::Error| Reason::Config(format!("{}: {error}", whom.socket.display()));
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = Arc::new(eventfd(0, flags).map_err(|error| fault(error.into()))?);
        // Each request has a deadline of its own, which `look_for_late` sees to.
        inbox.wait_until(Arc::clone(&wake));
        let shared = Arc::new_cyclic(|me| Shared {
            stream,
            outbox: Outbox::default(),
            pending: Mutex::new(BTreeMap::new()),
            deadlines: Mutex::default(),
            call_timeout: whom.call_timeout,
            broken: AtomicBool::new(false),
            turn: Mutex::default(),
            called: Condvar::new(),
            inbox: Mutex::new(inbox),
            wake,
            session,
            instance: welcome.instance,
            held: Arc::clone(held),
            owner,
            me: Weak::clone(me),
        });
        let receiver = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("kvarts-local".to_owned())
            .spawn(move || attend(&receiver))
            .map_err(fault)?;
        let (next, windows) = (AtomicU64::new(1), std::sync::OnceLock::new());
        let call_timeout = whom.call_timeout;
        let (lets_verify, has_pools) = (welcome.client_verifies, welcome.pools);
        Ok(Arc::new(Self { shared, calls, next, call_timeout, lets_verify, has_pools, windows }))
    }

    /// Whether the connection has ended, as far as can be seen now.
    pub(super) fn is_broken(&self) -> bool {
        self.shared.look();
        self.shared.is_broken()
    }

    /// Whether it is known already that the connection has ended.
    pub(super) fn is_known_broken(&self) -> bool {
        self.shared.is_broken()
    }

    /// Who fetches what arrives.
    pub(super) fn bring(&self) -> Arc<dyn Poller> {
        Arc::clone(&self.shared) as _
    }

    /// Asks what is answered at once. What is not answered in time disturbs nothing else.
    pub(super) fn ask<M: Message + Default>(&self, kind: Kind, message: &impl Message) -> Result<M, Reason> {
        self.calls.ask(kind, message)
    }

    /// Whether the server says that memory of a session is not written to any more: see [`Owner::is_settled`].
    pub(super) fn is_settled(&self, session: &[u8], instance: &[u8]) -> Option<bool> {
        if instance.is_empty() || self.shared.instance != instance {
            return None;
        }
        let message = proto::SettledRequest { session: session.to_vec().into() };
        let asked = self.ask::<proto::SettledReply>(Kind::Settled, &message);
        Some(asked.is_ok_and(|reply| !reply.under_way))
    }

    fn id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes memory known, by the name of a pool too if it has one; gives its bytes, and the descriptor if it is the server's to give.
    pub(super) fn share(
        &self,
        memory: u32,
        (mode, client_verifies): (Mode, bool),
        (bytes, file): (u64, Option<&OwnedFd>),
        pool: Option<PoolName>,
    ) -> Result<(u64, Option<OwnedFd>), Reason> {
        if pool.is_some() && !self.has_pools {
            return Err(Reason::Config(
                "this server does not support shared pools: use a newer kvarts".to_owned(),
            ));
        }
        let pool = pool.map_or_else(Bytes::new, |PoolName(name)| name.to_vec().into());
        let message = proto::ShareRequest { memory, mode: mode.to_wire(), bytes, client_verifies, pool };
        let (id, slot) = (self.id(), Arc::new(Slot::default()));
        self.begin(id, Pending::Call(Arc::clone(&slot), file.is_none()))?;
        self.shared.send(frame(Kind::Share, id, &message), file)?;
        self.shared.call();
        let answer = slot.answer.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = slot.came.wait_timeout_while(answer, self.call_timeout, |answer| answer.is_none());
        let (mut answer, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let (body, file) = answer.take().unwrap_or(Err(GONE))?;
        let reply = proto::ShareReply::decode(body).map_err(|_| GONE)?;
        Ok((reply.bytes, file))
    }

    /// Forgets memory. Its answer is of no interest.
    pub(super) fn unshare(&self, memory: u32) {
        let message = proto::UnshareRequest { memory };
        // A server that is gone has forgotten it.
        let _ = self.shared.send(frame(Kind::Unshare, self.id(), &message), None);
    }

    /// Begins to read into shared memory. What arrives must be fetched: see [`Link::bring`].
    pub(super) fn read(
        &self,
        wanted: Wanted,
        into: SharedPlaces,
        (timeout_us, late): (u64, Option<Nanos>),
        sink: ReadSink,
    ) -> Result<(), Reason> {
        let Wanted { request, part, .. } = &wanted;
        let message = proto::LocalRead {
            read: Some(crate::download::message(request)),
            by_blocks: request.order == Order::Blocks,
            into: Some(into.wire),
            timeout_us,
            part: part.is_some(),
            origins: part.as_ref().map_or_else(Vec::new, |part| met(part, request.keys.len())),
        };
        let id = self.id();
        let reading = Reading::new(wanted, sink, into.verifies, into.files);
        self.begin_until(id, Pending::Read(Box::new(reading)), late)?;
        self.sent(id, frame(Kind::Read, id, &message))
    }

    /// Sends a request that was noted; one that is refused here is answered with why.
    fn sent(&self, id: u64, frame: Vec<u8>) -> Result<(), Reason> {
        self.shared.send(frame, None).inspect_err(|reason| {
            let pending = self.shared.take_out(id);
            // That of a connection that broke is answered when it is cleared up.
            pending.into_iter().for_each(|pending| failed(pending, reason));
        })
    }

    /// Answers what should have been answered before `now`; whether there is more that has a deadline.
    pub(super) fn late(&self, now: Nanos) -> bool {
        self.shared.late(now);
        !self.shared.deadlines().is_empty()
    }

    /// Asks which of these blocks are here, by a message without them; the answer comes between those to reads.
    pub(super) fn look(
        &self,
        message: &proto::ExistsRequest,
        keys: &[BlockKey],
        late: Option<Nanos>,
        reply: Reply<Result<ContainsReply, Error>>,
    ) -> Result<(), Reason> {
        let id = self.id();
        self.begin_until(id, Pending::Look(reply, keys.len()), late)?;
        self.sent(id, frame_with_keys(Kind::Exists, id, message, messages::ASKED_KEYS, keys))?;
        self.shared.call();
        Ok(())
    }

    /// Begins to put from shared memory.
    pub(super) fn put(
        &self,
        message: &proto::LocalPut,
        from: Placed,
        late: Option<Nanos>,
        reply: Reply<Result<PutReply, Error>>,
    ) -> Result<(), Reason> {
        let id = self.id();
        let blocks = from.block_count() as usize;
        self.begin_until(id, Pending::Put(Some(reply), blocks, from), late)?;
        self.sent(id, frame(Kind::Put, id, message))?;
        self.shared.call();
        Ok(())
    }

    /// Notes a request that is to be answered by `late`.
    fn begin_until(&self, id: u64, pending: Pending, late: Option<Nanos>) -> Result<(), Reason> {
        if let Some(late) = late {
            self.shared.deadlines().insert(id, late);
        }
        self.begin(id, pending)
    }

    /// Notes a request before it is sent. Of a connection that broke before, it is answered at once.
    fn begin(&self, id: u64, pending: Pending) -> Result<(), Reason> {
        let mut all = self.shared.pending();
        if self.shared.is_broken() {
            drop(all);
            self.shared.deadlines().remove(&id);
            failed(pending, &GONE);
            return Err(GONE);
        }
        all.insert(id, pending);
        Ok(())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // The link's thread ends, and the server lets go of everything.
        self.shared.end();
    }
}

/// Answers a request that was refused, or never sent.
fn failed(pending: Pending, reason: &Reason) {
    match pending {
        Pending::Read(mut reading) => reading.broken(reason, false),
        // A caller that is gone needs no answer.
        Pending::Put(reply, ..) => drop(reply.map(|reply| reply.send(Err(Error(reason.clone()))))),
        Pending::Look(reply, ..) => drop(reply.send(Err(Error(reason.clone())))),
        Pending::Call(slot, _) => answer(&slot, Err(reason.clone())),
    }
}

/// Takes in the answer to a request. An error ends the connection.
fn answered(pending: Pending, body: Bytes, inbox: &mut Inbox) -> io::Result<()> {
    match pending {
        Pending::Look(reply, keys) => {
            let found: proto::ExistsReply = decode(body)?;
            // A caller that is gone needs no answer.
            let _ = reply.send(messages::found(&found, keys).map_err(Error));
        }
        Pending::Put(reply, blocks, from) => {
            drop(from);
            let found: proto::PutReply = decode(body)?;
            let outcomes: Vec<_> = found.outcomes.iter().map(upload::outcome).collect();
            let whole = outcomes.len() == blocks;
            let wrong = Reason::Bug("the reply has a wrong number of blocks");
            let told = if whole { Ok(PutReply { outcomes }) } else { Err(Error(wrong)) };
            // A caller that is gone, or was told that it is late, needs no answer.
            let _ = reply.map(|reply| reply.send(told));
        }
        Pending::Call(slot, brings) => {
            // What came with a later frame may have come already: it is not this one's.
            let brings = brings && !inbox.descriptors.is_empty();
            let file = brings.then(|| inbox.descriptors.remove(0));
            answer(&slot, Ok((body, file)));
        }
        // Of something that no caller waits for.
        Pending::Read(_) => {}
    }
    Ok(())
}

fn answer(slot: &Slot, answer: Result<(Bytes, Option<OwnedFd>), Reason>) {
    *slot.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
    slot.came.notify_all();
}

/// What the link's thread does: takes in where it is called, and clears up when the connection has ended.
fn attend(shared: &Shared) {
    loop {
        let mut turn = shared.turn();
        while !turn.called || turn.taken {
            let waited = shared.called.wait_timeout(turn, LOOK);
            let (woken, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            turn = woken;
            // Who began something and never asked for it, and a server that went: both are seen now and then.
            turn.called |= waited.timed_out();
        }
        *turn = Turn { taken: true, called: false };
        drop(turn);
        let taken = shared.take_in(&mut || !shared.is_waited_for());
        if let Err(error) = taken {
            shared.broke(&error);
            // With the turn: nothing is taken in any more.
            return ended(shared);
        }
        shared.leave();
    }
}

/// Answers what was under way when the connection ended.
fn ended(shared: &Shared) {
    let left = std::mem::take(&mut *shared.pending());
    shared.deadlines().clear();
    let mut held = Vec::new();
    for (_, pending) in left {
        match pending {
            Pending::Read(reading) if reading.has_ended() => reading.released(),
            Pending::Read(mut reading) => {
                reading.broken(&GONE, true);
                held.push(*reading);
            }
            other => failed(other, &GONE),
        }
    }
    if held.is_empty() {
        return;
    }
    // What the server had begun may still be written.
    wire::wait_closed(&shared.stream);
    let told = std::cell::Cell::new(0);
    let count = |bytes: u64| {
        shared.held.fetch_add(bytes, Ordering::SeqCst);
        shared.held.fetch_sub(told.replace(bytes), Ordering::SeqCst);
    };
    let settled =
        || shared.owner.upgrade().and_then(|owner| owner.is_settled(&shared.session, &shared.instance));
    held::keep(held, !shared.instance.is_empty(), count, settled);
}

fn decode<M: Message + Default>(body: Bytes) -> io::Result<M> {
    M::decode(body).map_err(io::Error::other)
}

impl Shared {
    /// Takes one frame in. An error ends the connection.
    fn take(&self, head: Head, body: Bytes, inbox: &mut Inbox) -> io::Result<()> {
        match head.kind {
            Kind::Arrived => {
                let arrived = decode(body)?;
                // Taken out meanwhile: verifying takes time. Its deadline stays noted.
                let taken = self.pending().remove(&head.id);
                let Some(Pending::Read(mut reading)) = taken else { return Ok(()) };
                reading.arrived(&arrived);
                if reading.is_cancelled()
                    && let (Some(owner), Some(shared)) = (self.owner.upgrade(), self.me.upgrade())
                {
                    // Not from here: the server may wait for this thread to take something.
                    owner.later(Box::new(move || drop(shared.send(bare(Kind::Cancel, head.id), None))));
                }
                self.pending().insert(head.id, Pending::Read(reading));
            }
            Kind::End => {
                let end = decode(body)?;
                let mut all = self.pending();
                let Some(Pending::Read(reading)) = all.get_mut(&head.id) else { return Ok(()) };
                reading.end(&end);
                let damaged: Vec<u32> = reading.damaged().collect();
                if !damaged.is_empty()
                    && let Some(owner) = self.owner.upgrade()
                {
                    let (request, shape) = (reading.request.clone(), reading.shape.clone());
                    drop(all);
                    owner.suspect(request, shape, damaged);
                }
            }
            Kind::Released => {
                if let Some(Pending::Read(reading)) = self.take_out(head.id) {
                    reading.released();
                }
            }
            Kind::Done => {
                self.take_out(head.id).map_or(Ok(()), |done| answered(done, body, inbox))?;
            }
            Kind::Failed => {
                if let Some(pending) = self.take_out(head.id) {
                    failed(pending, &wire::reason(body));
                }
            }
            _ => return Err(io::Error::other("the server sent a message that only a client may send")),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
