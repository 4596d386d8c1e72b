//! One client's connection: who it is, what it holds, and its requests from the socket to the engine and back.
//!
//! A session is one task. It takes frames in, answers lookups itself, and works for its reads, which mostly wait for the
//! engine: so what an executor announces is sent by the task that it wakes, or, of a short read, by the executor (`short`).
//! Puts copy, and have tasks of their own. What they have to say they send themselves where nothing else waits, and
//! otherwise put it into the outbox, which the session sends. When the connection ends, for whatever
//! reason, the session is dropped, and with it everything that the client held.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{self, Abortable};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use kvarts_contract::api::Order;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;
use prost::Message;
use tokio::runtime::Handle;
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::Instant;
use tonic::Code;

use super::foreign;
use super::frame::{Head, Kind, frame};
use super::incoming::{Ended, Incoming, Next, broken};
use super::limits::{HELLO, LEASES_MAX, MAGIC, MEMORIES_MAX, REQUESTS_MAX, STALL, VERSION};
use super::line::Line;
use super::memory::Memory;
use super::outbox::Outbox;
use super::put::Putting;
use super::read::{Doubts, Reading};
use super::short::{Over, Short, Shorts};
use super::{Mode, read};
use crate::calls::call::{self, Call};
use crate::calls::heavy::{self, heavily};
use crate::calls::methods::{self, Method};
use crate::calls::{lookups, store};
use crate::state::auth::Refusal;
use crate::state::locals::named::{self, Named};
use crate::state::locals::{ClientFacts, End, Entry, Peer};
use crate::state::parts::Part;
use crate::state::{Guest, Right, ServerState};
use kvarts_wire::busy;
use kvarts_wire::codec::decode;
use kvarts_wire::fault::{Fault, Outcome};
use kvarts_wire::limits::LIGHT_ENTRIES;
use kvarts_wire::proto;

/// How often a session that waits for its turn to receive a large frame asks again.
const ASK_AGAIN: Duration = Duration::from_millis(10);
/// Sharing memory is not in the contract: its right is that of a reader.
const SHARE: Method = Method::new("", "share", Right::Read);

/// By what a request is ended early.
enum Ending {
    Read(future::AbortHandle),
    Short(Arc<Short>),
    Put(AbortHandle),
}

impl Ending {
    fn end(self) {
        match self {
            Self::Read(read) => read.abort(),
            Self::Short(short) => short.cancel(),
            Self::Put(put) => put.abort(),
        }
    }
}

/// How something is looked up.
struct LookUp<Q, A> {
    /// How much a request looks at.
    entries: fn(&Q) -> usize,
    /// The time of the lease that it asks for.
    hold: fn(&Q) -> u64,
    work: fn(&Call, Q) -> Outcome<A>,
    /// Whether it waits for other nodes too, and the whole of it then.
    of_cluster: fn(&Q) -> bool,
    whole: fn(Arc<Call>, Q) -> Whole<A>,
}

/// A look-up that waits.
type Whole<A> = Pin<Box<dyn Future<Output = Outcome<A>> + Send>>;

/// The answer to a look-up, and the lease that it took, if it did.
struct Looked {
    bytes: Vec<u8>,
    name: u64,
    hold: u64,
}

/// A client.
struct Session {
    state: Arc<ServerState>,
    /// Where work is done that keeps a processor busy.
    elsewhere: Handle,
    /// As in a header of gRPC.
    authorization: Option<Vec<u8>>,
    tenant: u32,
    peer: Peer,
    outbox: Arc<Outbox>,
    memories: BTreeMap<u32, Memory>,
    modes: BTreeSet<Mode>,
    /// By name, with when they end by themselves.
    leases: BTreeMap<u64, Nanos>,
    reads: FuturesUnordered<Abortable<Pin<Box<dyn Future<Output = u64> + Send>>>>,
    shorts: Arc<Shorts>,
    puts: JoinSet<u64>,
    /// Those that take long.
    look_ups: FuturesUnordered<Pin<Box<dyn Future<Output = Looked> + Send>>>,
    requests: BTreeMap<u64, Ending>,
    doubts: Arc<Doubts>,
    /// What it ever shared and what is still in use.
    named: Named,
    entry: Entry,
    place: Arc<Part>,
}

/// Works for one connection until it ends. Puts are worked for `elsewhere`; `unknown` is its place until it has said who it
/// is.
pub(super) async fn run(state: Arc<ServerState>, (line, unknown): (Line, Guest), elsewhere: Handle) {
    let peer = line.peer();
    let mut incoming = Incoming::new(&state.locals);
    let hello = unknown.unless_lost(tokio::time::timeout(HELLO, hello(&line, &mut incoming))).await;
    let (id, hello) = match hello {
        Some(Ok(Ok(hello))) => hello,
        other => {
            tracing::debug!(?peer, ?other, "a local connection sent no first message");
            return;
        }
    };
    drop(unknown);
    let line = Arc::new(line);
    let (outbox, server) = (Arc::new(Outbox::default()), Arc::clone(&state));
    let ended = match Session::open((state, elsewhere), peer, Arc::clone(&outbox), &hello) {
        Ok(mut session) => {
            let limits = proto::Welcome {
                version: VERSION,
                requests_max: REQUESTS_MAX as u32,
                memories_max: MEMORIES_MAX as u32,
                instance: server.locals.instance.to_vec().into(),
                client_verifies: true,
                pools: true,
            };
            incoming.belongs_to(session.tenant, Arc::clone(&session.place));
            line.belongs_to(&session.place);
            outbox.push(frame(Kind::Welcome, id, &limits));
            outbox.sends_to(&line);
            let Err(ended) = session.serve(&line, &mut incoming).await;
            // Before the connection is closed: that it is closed says that its memory is out of reach.
            session.close().await;
            ended
        }
        Err(fault) => {
            outbox.push(frame(Kind::Failed, id, &*fault.detail));
            // A client that does not take it at once need not know.
            let _ = outbox.send(&line);
            return;
        }
    };
    if let Ended::Broken(what) = &ended
        && server.audit.may_tell()
    {
        tracing::warn!(target: "audit", pid = peer.pid, uid = peer.uid, what, "a local connection was closed \
            by the server");
    }
    tracing::debug!(?peer, ?ended, "a local session ended");
}

/// What every connection begins with.
async fn hello(line: &Line, incoming: &mut Incoming) -> Result<(u64, proto::Hello), Ended> {
    let mut begun = false;
    loop {
        if !begun && let Some((magic, rest)) = incoming.bytes.split_first_chunk::<8>() {
            if magic != MAGIC {
                return Err(broken("the connection does not begin with the magic number of the protocol"));
            }
            incoming.bytes = rest.to_vec();
            begun = true;
        }
        if begun {
            match incoming.next()? {
                Next::Frame(Head { kind: Kind::Hello, id, .. }, body) => {
                    return Ok((id, proto::Hello::decode(body).map_err(broken)?));
                }
                Next::Frame(..) => return Err(broken("a request arrived before the first message (Hello)")),
                Next::More | Next::Wait => {}
            }
        }
        // ends: `HELLO`, around all of it
        line.readable().await?;
        incoming.receive(line)?;
    }
}

fn micros(time: u64) -> Option<Duration> {
    (time > 0).then(|| Duration::from_micros(time))
}

impl Session {
    fn open(
        (state, elsewhere): (Arc<ServerState>, Handle),
        peer: Peer,
        outbox: Arc<Outbox>,
        hello: &proto::Hello,
    ) -> Outcome<Self> {
        if hello.version != VERSION {
            return Err(Fault::malformed(format!(
                "the client's protocol version is {}, but this server supports only {VERSION}",
                hello.version
            )));
        }
        let authorization = (!hello.token.is_empty()).then(|| format!("Bearer {}", hello.token).into_bytes());
        let now = state.clock().unix_millis() / 1000;
        let caller = state.gate.caller(authorization.as_deref(), now).map_err(|refusal| {
            let (pid, uid) = (peer.pid, peer.uid);
            if state.audit.may_tell() {
                tracing::warn!(target: "audit", pid, uid, why = refusal.text(), "local session refused");
            }
            state.metrics.refused("hello", "token");
            Fault::unauthenticated(refusal.text())
        })?;
        let facts = ClientFacts {
            tenant: caller.tenant.name.clone(),
            peer,
            modes: BTreeSet::new(),
            shared_bytes: 0,
            under_way: 0,
            leases: 0,
        };
        let tenant = caller.tenant.number;
        let place = state.locals.sessions.try_take(tenant, 1);
        let place = place.ok_or_else(|| Fault::busy("the limit of local sessions is reached"))?;
        let named = state.locals.names.begin(&hello.session);
        let named = named.ok_or_else(|| {
            Fault::malformed("session: an id of 16 bytes is required that no other session uses")
        })?;
        let shorts = Shorts::new(Arc::clone(&outbox));
        let ends = Arc::clone(&outbox);
        let end = End::new(tenant, move || ends.close());
        let entry = Entry::new(&state.locals, facts, &shorts.under_way, end);
        // A tenant that was taken away before the session could be found there.
        if state.gate.caller(authorization.as_deref(), now).is_err() {
            return Err(Fault::unauthenticated(Refusal::Unknown.text()));
        }
        outbox.counts_as(state.locals.untaken.part(tenant));
        let (memories, modes, leases) = Default::default();
        let (reads, puts, look_ups, requests, doubts) = Default::default();
        Ok(Self {
            state,
            elsewhere,
            authorization,
            tenant,
            peer,
            outbox,
            memories,
            modes,
            leases,
            reads,
            shorts,
            puts,
            look_ups,
            requests,
            doubts,
            named,
            entry,
            place: Arc::new(place),
        })
    }

    /// Takes requests and sends answers until the connection ends.
    async fn serve(
        &mut self,
        line: &Line,
        incoming: &mut Incoming,
    ) -> Result<std::convert::Infallible, Ended> {
        let state = Arc::clone(&self.state);
        let mut drained = std::pin::pin!(state.drain_asked());
        let (mut draining, mut untaken) = (false, None::<Instant>);
        loop {
            // All of them, not one for each time that something arrives.
            self.take_ended();
            // Before anything is sent: a short read that ends from here on may have put something in.
            let nothing_left = self.under_way() == 0;
            let mut waits = false;
            let before = self.outbox.sent();
            let mut all = self.outbox.send(line)?;
            while all {
                match incoming.next()? {
                    Next::Frame(Head { kind: Kind::Share, id, .. }, body) => {
                        self.take_share(id, body, incoming).await?;
                    }
                    Next::Frame(head, body) => self.take(head, body)?,
                    Next::More => break,
                    Next::Wait => {
                        waits = true;
                        break;
                    }
                }
                all = self.outbox.send(line)?;
            }
            if self.outbox.is_closed() {
                return Err(broken("the client does not read its answers"));
            }
            if all {
                untaken = None;
            } else if untaken.is_none() || self.outbox.sent() != before {
                untaken = Some(Instant::now());
            }
            if draining && all && nothing_left && self.under_way() == 0 {
                return Err(Ended::Drained);
            }
            let late = [untaken.map(|since| since + STALL), incoming.late()].into_iter().flatten().min();
            let stalled = tokio::time::sleep_until(late.unwrap_or_else(Instant::now));
            tokio::select! {
                // ends: the client, its end, a drain, or `STALL` where it owes something
                ready = line.readable(), if all && !waits => {
                    ready?;
                    incoming.receive(line)?;
                }
                // ends: `STALL`, the last arm
                ready = line.writable(), if !all => ready?,
                // ends: the client, its end, a drain, or `STALL` where it owes something
                () = self.outbox.ready.notified() => {}
                Some(ended) = self.reads.next() => self.ended(ended.ok()),
                // ends: the puts' deadlines
                Some(ended) = self.puts.join_next() => self.put_ended(ended),
                Some(looked) = self.look_ups.next() => {
                    self.looked(looked);
                    self.count();
                }
                // ends: the client's end; with calls under way, their deadlines
                () = &mut drained, if !draining => {
                    draining = true;
                    self.shorts.wait_for_all();
                }
                () = tokio::time::sleep(ASK_AGAIN), if waits => {}
                // ends: it is `STALL` itself
                () = stalled, if late.is_some() => return Err(broken("the client made no progress for too \
                    long")),
            }
        }
    }

    /// Takes those that have ended without waiting for one.
    fn take_ended(&mut self) {
        while let Some(Some(ended)) = self.reads.next().now_or_never() {
            self.ended(ended.ok());
        }
        while let Some(ended) = self.puts.try_join_next() {
            self.put_ended(ended);
        }
        for over in self.shorts.take_over() {
            match over {
                Over::Answered(id) => drop(self.requests.remove(&id)),
                // One that was cancelled meanwhile is not wanted any more.
                Over::Left(id, reading) if self.requests.contains_key(&id) => self.go_on(id, *reading),
                Over::Left(..) => {}
            }
        }
    }

    fn put_ended(&mut self, ended: Result<u64, JoinError>) {
        // One that was cancelled was removed then.
        if let Some(error) = ended.as_ref().err().filter(|error| error.is_panic()) {
            tracing::error!(%error, "a put of the local path panicked");
        }
        self.ended(ended.ok());
    }

    /// A request has ended; none if it was ended early.
    fn ended(&mut self, id: Option<u64>) {
        if let Some(id) = id {
            self.requests.remove(&id);
        }
        self.count();
    }

    /// Requests that hold something.
    fn under_way(&self) -> usize {
        self.shorts.len() + self.others_under_way()
    }

    /// The same without short reads, which count themselves.
    fn others_under_way(&self) -> usize {
        self.reads.len() + self.puts.len() + self.look_ups.len()
    }

    fn count(&self) {
        let under_way = self.others_under_way() as u32;
        self.entry.change(|facts| facts.under_way = under_way);
    }

    /// Takes a frame that a descriptor may have come with.
    async fn take_share(&mut self, id: u64, body: Bytes, incoming: &mut Incoming) -> Result<(), Ended> {
        let file = match incoming.take_descriptor() {
            Some(file) => foreign::looked_at(file, Arc::clone(&self.place)).await.map_err(broken)?.map(Some),
            None => Ok(None),
        };
        if let Err(fault) = file.and_then(|file| self.share(id, body, file)) {
            self.failed(id, &fault);
        }
        Ok(())
    }

    /// Takes one other frame.
    fn take(&mut self, head: Head, body: Bytes) -> Result<(), Ended> {
        let id = head.id;
        match head.kind {
            Kind::Unshare => {
                let answer = decode(body).map(|wire: proto::UnshareRequest| {
                    self.memories.remove(&wire.memory);
                    self.shared();
                    proto::UnshareReply {}
                });
                self.answer(id, answer);
            }
            Kind::Read | Kind::Put => {
                if self.requests.contains_key(&id) {
                    return Err(broken("a second request with the same id"));
                }
                if self.under_way() >= REQUESTS_MAX {
                    self.take_ended();
                }
                // Also those count that were cancelled and have not ended yet: they hold what they hold.
                if self.under_way() >= REQUESTS_MAX {
                    self.failed(id, &Fault::busy("the client's limit of concurrent requests is reached"));
                    return Ok(());
                }
                let begun = if head.kind == Kind::Read { self.read(id, body) } else { self.put(id, body) };
                if let Err(fault) = begun {
                    self.failed(id, &fault);
                }
                self.count();
            }
            Kind::Cancel => self.requests.remove(&id).into_iter().for_each(Ending::end),
            Kind::Settled => {
                let answer = decode(body).map(|wire: proto::SettledRequest| {
                    let under_way = self.state.locals.names.is_under_way(&wire.session);
                    proto::SettledReply { under_way }
                });
                self.answer(id, answer);
            }
            Kind::Match | Kind::Exists | Kind::Unlock | Kind::Renew => self.lookup(head.kind, id, body),
            Kind::Hello
            | Kind::Share
            | Kind::Welcome
            | Kind::Done
            | Kind::Failed
            | Kind::Arrived
            | Kind::End
            | Kind::Released => return Err(broken("the client sent a message that only a server may send")),
        }
        Ok(())
    }

    /// Answers what waits for nothing.
    fn lookup(&mut self, kind: Kind, id: u64, body: Bytes) {
        match kind {
            Kind::Match => {
                let how = LookUp {
                    entries: heavy::of_match,
                    hold: |wire: &proto::MatchRequest| wire.lease_ms,
                    work: |call, wire| store::match_prefix(call, wire, None),
                    of_cluster: |wire| wire.of_cluster,
                    whole: |call, wire| Box::pin(lookups::matched(call, wire)),
                };
                self.look_up("/kvarts.v1.Store/Match", (id, body), how);
            }
            Kind::Exists => {
                let how = LookUp {
                    entries: |wire: &proto::ExistsRequest| heavy::of_keys(&wire.keys),
                    hold: |wire: &proto::ExistsRequest| wire.lease_ms,
                    work: store::exists,
                    of_cluster: |wire| wire.of_cluster,
                    whole: |call, wire| Box::pin(lookups::exists(call, wire)),
                };
                self.look_up("/kvarts.v1.Store/Exists", (id, body), how);
            }
            Kind::Unlock => {
                let answer = self.call("/kvarts.v1.Store/Unlock", |session, call| {
                    let wire: proto::UnlockRequest = decode(body)?;
                    session.leases.remove(&wire.lease);
                    Ok(store::unlock(call, &wire))
                });
                self.answer(id, answer);
            }
            Kind::Renew => {
                let answer = self.call("/kvarts.v1.Store/Renew", |session, call| {
                    let wire: proto::RenewRequest = decode(body)?;
                    let reply = store::renew(call, &wire)?;
                    session.renewed(wire.lease, wire.hold_ms);
                    Ok(reply)
                });
                self.answer(id, answer);
            }
            _ => {}
        }
    }

    /// Looks something up: here if it is little, and otherwise elsewhere in its tenant's turn, while this thread works for
    /// others.
    fn look_up<Q: Message + Default + 'static, A: Message + heavy::Answer>(
        &mut self,
        path: &str,
        (id, body): (u64, Bytes),
        LookUp { entries, hold, work, of_cluster, whole }: LookUp<Q, A>,
    ) {
        let method: Outcome<_> =
            methods::method(path).ok_or_else(|| Reason::Bug("the table of methods lacks a method").into());
        let begun = method.and_then(|method| self.admit(method, None)).and_then(|call| {
            let ready = self.has_room_for_leases().and_then(|()| decode::<Q>(body));
            let ready = ready.inspect_err(|fault| call.end(fault.code));
            Ok((call, ready?))
        });
        let (call, wire) = match begun {
            Ok(begun) => begun,
            Err(fault) => return self.failed(id, &fault),
        };
        let (many, hold) = (entries(&wire), hold(&wire));
        let told = move |call: &Call, answer: Outcome<A>| {
            call.end(answer.as_ref().map_or_else(|fault| fault.code, |_| Code::Ok));
            let name = answer.as_ref().map_or(0, A::lease);
            let bytes = match answer {
                Ok(reply) => frame(Kind::Done, id, &reply),
                Err(fault) => frame(Kind::Failed, id, &*fault.detail),
            };
            Looked { bytes, name, hold }
        };
        let waits = of_cluster(&wire);
        if many <= LIGHT_ENTRIES && !waits {
            let answer = work(&call, wire);
            return self.looked(told(&call, answer));
        }
        if self.under_way() >= REQUESTS_MAX {
            return self.failed(id, &Fault::busy("the client's limit of concurrent requests is reached"));
        }
        self.look_ups.push(Box::pin(async move {
            let answer = match waits {
                true => whole(Arc::clone(&call), wire).await,
                false => heavily(Arc::clone(&call), many, move |call| work(call, wire)).await,
            };
            told(&call, answer)
        }));
        self.count();
    }

    /// A look-up has its answer.
    fn looked(&mut self, looked: Looked) {
        self.leased(looked.name, looked.hold);
        self.outbox.push(looked.bytes);
    }

    fn answer<M: Message>(&self, id: u64, answer: Outcome<M>) {
        match answer {
            Ok(reply) => self.outbox.push(frame(Kind::Done, id, &reply)),
            Err(fault) => self.failed(id, &fault),
        }
    }

    fn failed(&self, id: u64, fault: &Fault) {
        self.outbox.push(frame(Kind::Failed, id, &*fault.detail));
    }

    /// Admits a call as calls over gRPC are admitted.
    fn admit(&self, method: &Method, timeout: Option<Duration>) -> Outcome<Arc<Call>> {
        call::admit(&self.state, "local", method, self.authorization.as_deref(), timeout).map(Arc::new)
    }

    /// Does a call that waits for nothing.
    fn call<M>(&mut self, path: &str, work: impl FnOnce(&mut Self, &Arc<Call>) -> Outcome<M>) -> Outcome<M> {
        let method = methods::method(path).ok_or(Reason::Bug("the table of methods lacks a method"))?;
        let call = self.admit(method, None)?;
        let answer = work(self, &call);
        call.end(answer.as_ref().map_or_else(|fault| fault.code, |_| Code::Ok));
        answer
    }

    fn share(&mut self, id: u64, body: Bytes, file: Option<OwnedFd>) -> Outcome<()> {
        let call = self.admit(&SHARE, None)?;
        let wire: proto::ShareRequest = decode(body)?;
        if wire.memory == 0 || self.memories.contains_key(&wire.memory) {
            return Err(Fault::malformed("share: the number of the memory region is 0, missing or in use"));
        }
        if self.memories.len() >= MEMORIES_MAX {
            return Err(Reason::TooMany("memories").into());
        }
        let from = (&self.state.locals, self.tenant, &self.state.engine, &self.elsewhere);
        let (memory, file, ready) = Memory::share(from, &wire, file)?;
        self.named.shares(&memory.region);
        let bytes = memory.region.len() as u64;
        tracing::debug!(pid = self.peer.pid, mode = memory.mode.name(), bytes, "memory shared");
        self.memories.insert(wire.memory, memory);
        self.shared();
        call.end(Code::Ok);
        let (reply, outbox) = (proto::ShareReply { bytes }, Arc::clone(&self.outbox));
        let answer = frame(Kind::Done, id, &reply);
        match ready {
            None => outbox.push_with(answer, file),
            Some(ready) => drop(self.elsewhere.spawn(async move {
                // ends: `TIMEOUT`, by its `wait`
                ready.wait().await;
                outbox.push_with(answer, file);
            })),
        }
        Ok(())
    }

    /// What is shared has changed.
    fn shared(&mut self) {
        let modes: BTreeSet<Mode> = self.memories.values().map(|memory| memory.mode).collect();
        for mode in modes.difference(&self.modes) {
            self.state.metrics.client(mode.name(), 1);
        }
        for mode in self.modes.difference(&modes) {
            self.state.metrics.client(mode.name(), -1);
        }
        self.modes.clone_from(&modes);
        let bytes = self.memories.values().map(|memory| memory.region.len() as u64).sum();
        self.entry.change(|facts| (facts.modes, facts.shared_bytes) = (modes, bytes));
    }

    fn read(&mut self, id: u64, body: Bytes) -> Outcome<()> {
        let wire: proto::LocalRead = decode(body)?;
        let (order, path) = match wire.by_blocks {
            true => (Order::Blocks, "/kvarts.v1.Reads/Get"),
            false => (Order::Layers, "/kvarts.v1.Reads/GetLayers"),
        };
        let method = methods::method(path).ok_or(Reason::Bug("the table of methods lacks a method"))?;
        let call = self.admit(method, micros(wire.timeout_us))?;
        let begun = read::begin(&call, &self.memories, (&self.outbox, &self.doubts), (id, order, wire));
        let reading = begun.inspect_err(|fault| call.end(fault.code))?;
        if reading.is_short() {
            let short = self.shorts.begin(id, reading);
            self.requests.insert(id, Ending::Short(short));
        } else {
            self.go_on(id, reading);
        }
        Ok(())
    }

    /// Works for a read until it has ended.
    fn go_on(&mut self, id: u64, reading: Reading) {
        let run = async move {
            reading.run().await;
            id
        };
        let (run, ending) = future::abortable(Box::pin(run) as _);
        self.reads.push(run);
        self.requests.insert(id, Ending::Read(ending));
    }

    fn put(&mut self, id: u64, body: Bytes) -> Outcome<()> {
        let wire: proto::LocalPut = decode(body)?;
        let method = methods::method("/kvarts.v1.Store/Put")
            .ok_or(Reason::Bug("the table of methods lacks a method"))?;
        let call = self.admit(method, micros(wire.timeout_us))?;
        let checked = Putting::check(&call, &self.memories, wire);
        let putting = checked.inspect_err(|fault| call.end(fault.code))?;
        let outbox = Arc::clone(&self.outbox);
        let run = async move {
            let answer = tokio::time::timeout_at(call.deadline, putting.run()).await;
            let answer = answer.unwrap_or_else(|_| Err(Fault::late("the deadline passed")));
            call.end(answer.as_ref().map_or_else(|fault| fault.code, |_| Code::Ok));
            outbox.tell(match answer {
                Ok(reply) => frame(Kind::Done, id, &reply),
                Err(fault) => frame(Kind::Failed, id, &*fault.detail),
            });
            id
        };
        let task = self.puts.spawn_on(run, &self.elsewhere);
        self.requests.insert(id, Ending::Put(task));
        Ok(())
    }

    fn has_room_for_leases(&mut self) -> Outcome<()> {
        if self.leases.len() >= LEASES_MAX {
            let now = self.state.clock().now();
            self.leases.retain(|_, ends| *ends > now);
        }
        match self.leases.len() < LEASES_MAX {
            true => Ok(()),
            false => Err(Fault::busy(busy::LEASES_OF_SESSION)),
        }
    }

    /// A lease was taken: it ends with the session.
    fn leased(&mut self, name: u64, hold_ms: u64) {
        if name != 0 {
            self.leases.insert(name, self.state.clock().now().plus(Duration::from_millis(hold_ms)));
            let leases = self.leases.len() as u32;
            self.entry.change(|facts| facts.leases = leases);
        }
    }

    fn renewed(&mut self, name: u64, hold_ms: u64) {
        if let Some(ends) = self.leases.get_mut(&name) {
            *ends = self.state.clock().now().plus(Duration::from_millis(hold_ms));
        }
    }
}

impl Session {
    /// Ends what is under way, and then every way into the client's memory but that of devices that write already.
    async fn close(&mut self) {
        self.give_up();
        let left = self.named.in_use();
        if left.is_empty() {
            return;
        }
        // Elsewhere: it may be gigabytes, and there are others on this thread.
        let cut = self.elsewhere.spawn_blocking(move || named::cut_off(&left));
        // ends: the kernel has taken the pages away
        if cut.await.unwrap_or(false) {
            return;
        }
        // As good, and later: it is not used any more.
        while !self.named.in_use().is_empty() {
            tokio::time::sleep(ASK_AGAIN).await;
        }
    }

    fn give_up(&mut self) {
        self.outbox.close();
        std::mem::take(&mut self.requests).into_values().for_each(Ending::end);
        self.reads.clear();
        self.puts.abort_all();
        self.look_ups.clear();
        self.memories.clear();
        self.shared();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.give_up();
        // A session dropped before its end was not closed; otherwise it was done.
        named::cut_off(&self.named.in_use());
        for name in self.leases.keys() {
            if let Some(lease) = self.state.leases.take(self.tenant, *name) {
                self.state.store().unlock(lease);
            }
        }
    }
}
