//! The local path: blocks go through memory that this process shares with the server on the same host.
//!
//! Where the caller's memory is shared, disks write into it. Where it is not, bytes go through windows that are, and are
//! copied by this process. Lookups and leases go over the same socket; whatever is rare goes over gRPC, on it too.
//!
//! A connection that broke is made again by the next call, as after a restart of the server: models are registered and
//! memories shared again. Leases ended with it. Memory of reads that were under way is kept until it cannot be written to.

mod copied;
mod deadlines;
mod held;
mod large_pages;
mod link;
mod looks;
mod outbox;
mod reading;
mod wire;

#[cfg(test)]
mod standstill_tests;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use kvarts_contract::api::{
    ContainsReply, ContainsRequest, DeleteReply, DeleteRequest, KvStore, LeaseId, MatchReply, MatchRequest,
    Order, Placed, PutReply, PutRequest, ReadRequest, ReadStream, Sequence, SnapshotCursor, SnapshotPage,
    Subscription, TtlReply, TtlRequest, read_channel,
};
use kvarts_contract::buffers::region::PAGE;
use kvarts_contract::buffers::{Arena, Region, SharedBuf, shared};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::ticket::{Ticket, ticket};
use kvarts_layout::{BlockKey, BlockShape, Geometry, Identity, NamespaceId};

use super::grpc_path::GrpcPath;
use super::remote::Remote;
use super::{ConnectOptions, Path, PoolName, download, messages, upload};
use kvarts_wire::local::Mode;
use kvarts_wire::local::frame::Kind;
use kvarts_wire::local::limits::{PINNED_BYTES_MAX, WINDOWS_BYTES};
use kvarts_wire::proto;
use link::{Link, Owner};
use looks::Soon;
use reading::{Files, SharedPlaces, Wanted};

use wire::Whom;

/// A memory that is shared for as long as it is in use.
struct Known {
    number: u32,
    mode: Mode,
    /// Digests are compared here, not by the server.
    verifies: bool,
    bytes: u64,
    file: Arc<OwnedFd>,
    region: Weak<Region>,
    /// By which other processes share it.
    pool: Option<PoolName>,
}

/// What is to be shared.
enum Which {
    /// A file in memory that is made for it, of this many bytes.
    New(u64),
    /// The first bytes of a file that there is, this many.
    Given(OwnedFd, u64),
    /// What another process of the tenant shares by the name that goes with it.
    Attached,
}

/// The connection.
enum Slot {
    /// There never was one.
    None,
    /// This one, which may have broken.
    Some(Arc<Link>),
    /// One is being made.
    Making,
    /// The last one broke.
    Lost,
}

/// What the path's parts share.
struct Inner {
    remote: Arc<Remote>,
    whom: Whom,
    link: Mutex<Slot>,
    /// A connection was made, or could not be.
    made: Condvar,
    /// Bytes of memory that is kept because of ended connections.
    held: Arc<AtomicU64>,
    /// By the number of the region in this process.
    memories: Mutex<BTreeMap<u64, Known>>,
    next: AtomicU32,
    /// The connection that is being made for those who cannot wait; and with windows.
    soon: Mutex<[Soon; 2]>,
    /// A thread looks for deadlines that have passed.
    looks: AtomicBool,
    me: Weak<Self>,
}

/// Forgets a memory when its last user is gone.
struct Forget {
    inner: Weak<Inner>,
    number: u32,
}

impl Drop for Forget {
    fn drop(&mut self) {
        let Some(inner) = self.inner.upgrade() else { return };
        inner.memories().retain(|_, known| known.number != self.number);
        let (number, remote) = (self.number, Arc::clone(&inner.remote));
        remote.spawn(async move {
            // Where a connection is being made at the moment, only what is still in use is shared over it.
            if let Some(link) = inner.here() {
                link.unshare(number);
            }
        });
    }
}

impl Inner {
    fn memories(&self) -> MutexGuard<'_, BTreeMap<u64, Known>> {
        self.memories.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        // Each change is one step.
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection as it is.
    fn here(&self) -> Option<Arc<Link>> {
        match &*self.slot() {
            Slot::Some(link) => Some(Arc::clone(link)),
            _ => None,
        }
    }

    /// The connection, made again if it broke. One caller makes it, without a lock; others wait for that, but not for ever.
    fn link(&self) -> Result<Arc<Link>, Reason> {
        let here = self.here().filter(|link| !link.is_broken());
        if let Some(link) = here {
            return Ok(link);
        }
        let slot = self.slot();
        let waited =
            self.made.wait_timeout_while(slot, self.whom.call_timeout, |slot| matches!(slot, Slot::Making));
        let (mut slot, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let again = match std::mem::replace(&mut *slot, Slot::Making) {
            Slot::None => false,
            Slot::Lost => true,
            // Another caller made it, or it is not known yet that it broke.
            Slot::Some(link) => {
                if !link.is_known_broken() {
                    *slot = Slot::Some(Arc::clone(&link));
                    return Ok(link);
                }
                true
            }
            Slot::Making => return Err(wire::GONE),
        };
        drop(slot);
        let made = self.make(again);
        *self.slot() = match &made {
            Ok(link) => Slot::Some(Arc::clone(link)),
            Err(_) if again => Slot::Lost,
            Err(_) => Slot::None,
        };
        self.made.notify_all();
        made
    }

    fn make(&self, again: bool) -> Result<Arc<Link>, Reason> {
        let owner: Weak<dyn Owner> = self.me.clone() as _;
        let gone = |reason| if again { wire::GONE } else { reason };
        let link = Link::open(&self.whom, &self.held, owner).map_err(gone)?;
        if again {
            self.remote.register_all()?;
        }
        let share = |known: &Known| {
            let file = (known.bytes, Arc::clone(&known.file));
            (known.number, (known.mode, known.verifies), file, known.pool)
        };
        let is_used = |known: &&Known| known.region.strong_count() > 0;
        let known: Vec<_> = self.memories().values().filter(is_used).map(share).collect();
        for (number, mode, (bytes, file), pool) in known {
            link.share(number, mode, (bytes, Some(&file)), pool)?;
        }
        Ok(link)
    }

    /// The connection, with windows.
    fn link_with_windows(&self) -> Result<Arc<Link>, Reason> {
        let link = self.link()?;
        if link.windows.get().is_none() {
            // Two that ask at once make two; one of them is dropped, and forgotten.
            let region = self.share(&link, Mode::Copied, Which::New(WINDOWS_BYTES), None)?;
            let _ = link.windows.set(Arena::new(region));
        }
        Ok(link)
    }

    /// Shares memory, by the name of a pool too if it has one. A file that is made for it is this process's own, in large pages and all
    /// there.
    fn share(
        &self,
        link: &Link,
        mode: Mode,
        which: Which,
        pool: Option<PoolName>,
    ) -> Result<Arc<Region>, Reason> {
        let fault = |error: std::io::Error| {
            Reason::Config(format!("the shared memory could not be created: {error}"))
        };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        // The server would take a copy of a window to look at it.
        let verifies = mode == Mode::Adopted || (mode == Mode::Copied && link.lets_verify);
        let forget = Box::new(Forget { inner: self.me.clone(), number });
        let is_new = matches!(which, Which::New(_));
        let (file, bytes, is_known) = match which {
            Which::New(bytes) => (shared::sealed(bytes).map_err(fault)?, bytes, false),
            Which::Given(file, bytes) => (file, bytes, false),
            Which::Attached => {
                let (bytes, file) = link.share(number, (mode, verifies), (0, None), pool)?;
                (file.ok_or(Reason::Bug("a pool has no descriptor"))?, bytes, true)
            }
        };
        // An engine's file perhaps cannot be sealed; that of a pool is, whatever process made it.
        let map = if mode == Mode::Adopted && pool.is_none() { shared::map_own } else { shared::map };
        let region = map(&file, bytes, forget).map_err(fault)?;
        if is_new {
            region.populate().map_err(fault)?;
            if bytes <= PINNED_BYTES_MAX && !region.collapse() {
                tracing::debug!(bytes, "the shared memory is only partly in large pages");
            }
        }
        // A driver or an engine may rely on these very pages; it cannot be known here.
        region.keep_pages(true);
        let file = Arc::new(file);
        if !is_known {
            link.share(number, (mode, verifies), (bytes, Some(&file)), pool)?;
        }
        // Windows belong to one connection: what a broken one may still write is never used again.
        let kept = if mode == Mode::Copied { Weak::new() } else { Arc::downgrade(&region) };
        let known = Known { number, mode, verifies, bytes, file: Arc::clone(&file), region: kept, pool };
        self.memories().insert(region.id(), known);
        // Those of a pool are put together by the process that made it.
        if mode == Mode::Adopted && !is_known {
            large_pages::begin(&region, &file);
        }
        Ok(region)
    }

    /// The places of blocks as the server knows them, whether it is this side that verifies, and the files that they lie in;
    /// nothing if a chunk of `layers` lies in memory that is not shared.
    fn places(&self, placed: &Placed, shape: &BlockShape, layers: &Range<u32>) -> Option<SharedPlaces> {
        let mut files = Files::new();
        let known: Vec<Option<(u32, bool, u64)>> = {
            let memories = self.memories();
            let mut of = |buf: &SharedBuf| {
                let id = buf.region().id();
                let known = memories.get(&id)?;
                files.push((id, known.mode, Arc::clone(&known.file)));
                Some((known.number, known.verifies, buf.offset() as u64))
            };
            placed.memories().map(&mut of).collect()
        };
        let mut targets = Vec::with_capacity(shape.chunk_count() as usize);
        let of_layer = (0u32..).zip(shape.layers());
        let of_chunk = of_layer.flat_map(|(at, layer)| layer.chunks.iter().map(move |_| at));
        for (part, layer) in (0u32..).zip(of_chunk) {
            let target = placed.target(part);
            let memory = target.and_then(|target| *known.get(target.memory.0 as usize)?);
            match target.zip(memory) {
                Some((target, (number, _, offset))) => {
                    targets.push(proto::local_places::Target {
                        memory: number,
                        base: offset.checked_add(target.base)?,
                        stride: target.stride,
                    });
                }
                None if layers.contains(&layer) => return None,
                None => targets.push(proto::local_places::Target::default()),
            }
        }
        // The server looks at no memory of a request of which some is verified here.
        let verifies = known.iter().flatten().any(|(_, verifies, _)| *verifies);
        let wire = proto::LocalPlaces { targets, slots: placed.slots().collect() };
        Some(SharedPlaces { wire, verifies, files })
    }

    /// Has the server verify a block; `like` says everything but its key and place.
    fn look_again(&self, key: BlockKey, like: &ReadRequest, shape: &Arc<BlockShape>) -> Result<(), Reason> {
        let link = self.link()?;
        let length = usize::try_from(shape.block_bytes()).map_err(|_| Reason::TooMany("bytes"))?;
        let pages = length.checked_next_multiple_of(PAGE).ok_or(Reason::TooMany("bytes"))?;
        let region = self.share(&link, Mode::Direct, Which::New(pages as u64), None)?;
        let memory = SharedBuf::new(&region, 0, length).ok_or(Reason::OutOfBounds)?;
        let into = Placed::blocks(shape, memory, 1)?;
        let request = ReadRequest { keys: vec![key], into, ..like.clone() };
        let layers = request.layers.clone().unwrap_or(0..shape.layers().len() as u32);
        let places = self.places(&request.into, shape, &layers);
        let places = places.ok_or(Reason::Bug("the memory is not shared with the server"))?;
        let (sink, stream) = read_channel();
        let timeouts = (self.timeout_us(request.deadline), deadlines::late(request.deadline));
        let deadline = request.deadline;
        let wanted = Wanted { request, shape: Arc::clone(shape), part: None };
        link.read(wanted, places, timeouts, sink)?;
        self.look(deadline);
        stream.brought_by(link.bring()).wait_end().map(drop).map_err(|_| wire::GONE)
    }

    /// By when a request is to be answered: over this path as over gRPC none waits for ever for a server that stands still.
    fn by(&self, deadline: Option<Nanos>) -> Option<Nanos> {
        deadline.or_else(|| Some(self.remote.clock.now().plus(self.whom.call_timeout)))
    }

    /// How long is left; 0 for as long as the server allows.
    fn timeout_us(&self, deadline: Option<Nanos>) -> u64 {
        let left = deadline.map(|deadline| deadline.since(self.remote.clock.now()));
        left.map_or(0, |left| u64::try_from(left.as_micros()).unwrap_or(u64::MAX).max(1))
    }

    /// The digest of each block of a put as it is now. Others go on between two blocks.
    async fn digests(&self, request: &PutRequest, shape: &BlockShape) -> Vec<u32> {
        let sizes: Vec<u64> =
            shape.layers().iter().flat_map(|layer| &layer.chunks).map(|chunk| chunk.bytes).collect();
        let digest = |block: u32| {
            let mut hasher = crc32fast::Hasher::new();
            for (part, &bytes) in (0u32..).zip(&sizes) {
                if let Some(chunk) = request.from.chunk(part, block, bytes) {
                    chunk.digest(0, chunk.len(), |bytes| hasher.update(bytes));
                }
            }
            hasher.finalize()
        };
        let mut crc32 = Vec::with_capacity(request.keys.len());
        for block in 0..request.keys.len() as u32 {
            crc32.push(digest(block));
            tokio::task::consume_budget().await;
        }
        crc32
    }

    /// A put whose blocks have these digests.
    fn put_message(
        &self,
        request: &PutRequest,
        places: proto::LocalPlaces,
        crc32: Vec<u32>,
    ) -> proto::LocalPut {
        proto::LocalPut {
            header: Some(upload::header(request)),
            from: Some(places),
            crc32,
            timeout_us: self.timeout_us(request.deadline),
        }
    }
}

impl Owner for Inner {
    /// The server reads them again into memory that it verifies itself, and takes those out of service that do not match there
    /// either.
    fn suspect(&self, request: ReadRequest, shape: Arc<BlockShape>, blocks: Vec<u32>) {
        let Some(me) = self.me.upgrade() else { return };
        let key = |block: &u32| request.keys.get(*block as usize).copied();
        let keys: Vec<_> = blocks.iter().filter_map(key).collect();
        let again = ReadRequest { keys: Vec::new(), order: Order::Blocks, deadline: me.by(None), ..request };
        let look = move || {
            let looked = keys.iter().try_for_each(|key| me.look_again(*key, &again, &shape));
            if let Err(why) = looked {
                tracing::debug!(%why, "blocks whose digests did not match were not read again");
            }
        };
        // Rare, and it may wait: not on a thread that others need. Without one it is not looked at now.
        let _ = std::thread::Builder::new().name("kvarts-suspect".to_owned()).spawn(look);
    }

    fn later(&self, work: Box<dyn FnOnce() + Send>) {
        self.remote.spawn(async move { work() });
    }

    fn is_settled(&self, session: &[u8], instance: &[u8]) -> Option<bool> {
        // Without a server it is not known yet.
        self.link().map_or(Some(false), |link| link.is_settled(session, instance))
    }
}

/// The path.
pub(super) struct LocalPath {
    inner: Arc<Inner>,
    grpc: GrpcPath,
}

impl fmt::Debug for LocalPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalPath({})", self.inner.whom.socket.display())
    }
}

impl LocalPath {
    /// Connects, or says why there is no local path.
    pub(super) fn connect(options: &ConnectOptions, remote: &Arc<Remote>) -> Result<Self, Reason> {
        let socket = options.endpoint.strip_prefix("unix:");
        let socket = socket.ok_or_else(|| {
            Reason::Config(format!(
                "{}: the local path requires an address of the form unix:PATH",
                options.endpoint
            ))
        })?;
        let inner = Arc::new_cyclic(|me| Inner {
            remote: Arc::clone(remote),
            whom: Whom {
                socket: PathBuf::from(socket.strip_prefix("//").unwrap_or(socket)),
                token: options.token.clone(),
                server_uid: options.server_uid,
                call_timeout: options.call_timeout,
            },
            link: Mutex::new(Slot::None),
            made: Condvar::new(),
            held: Arc::default(),
            memories: Mutex::new(BTreeMap::new()),
            next: AtomicU32::new(1),
            soon: Mutex::default(),
            looks: AtomicBool::new(false),
            me: me.clone(),
        });
        inner.link()?;
        Ok(Self { inner, grpc: GrpcPath(Arc::clone(remote)) })
    }
}

/// This many bytes, in whole pages.
fn whole_pages(bytes: usize) -> Result<u64, Reason> {
    let bytes = bytes.max(1).checked_next_multiple_of(PAGE).ok_or(Reason::TooMany("bytes"))?;
    Ok(bytes as u64)
}

impl Path for LocalPath {
    fn name(&self) -> &'static str {
        "local"
    }

    fn matched(&self, wire: proto::MatchRequest) -> Result<proto::MatchReply, Error> {
        Ok(self.inner.link()?.ask(Kind::Match, &wire)?)
    }

    fn pool(&self, bytes: usize) -> Result<Arc<Region>, Error> {
        let link = self.inner.link()?;
        Ok(self.inner.share(&link, Mode::Direct, Which::New(whole_pages(bytes)?), None)?)
    }

    fn adopt(&self, file: OwnedFd, bytes: u64) -> Result<Arc<Region>, Error> {
        let link = self.inner.link()?;
        Ok(self.inner.share(&link, Mode::Adopted, Which::Given(file, bytes), None)?)
    }

    fn named_pool(&self, bytes: usize, name: PoolName) -> Result<Arc<Region>, Error> {
        let link = self.inner.link()?;
        Ok(self.inner.share(&link, Mode::Adopted, Which::New(whole_pages(bytes)?), Some(name))?)
    }

    fn attach(&self, name: PoolName) -> Result<Arc<Region>, Error> {
        let link = self.inner.link()?;
        Ok(self.inner.share(&link, Mode::Adopted, Which::Attached, Some(name))?)
    }

    fn file_of(&self, region: &Region) -> Option<OwnedFd> {
        let file = Arc::clone(&self.inner.memories().get(&region.id())?.file);
        file.try_clone().ok()
    }

    fn held_bytes(&self) -> u64 {
        self.inner.held.load(Ordering::SeqCst)
    }
}

impl KvStore for LocalPath {
    fn register(&self, identity: &Identity, geometry: &Geometry) -> Result<NamespaceId, Error> {
        self.grpc.register(identity, geometry)
    }

    fn put(&self, request: PutRequest) -> Ticket<Result<PutReply, Error>> {
        let request = PutRequest { deadline: self.inner.by(request.deadline), ..request };
        let (reply, answer) = ticket();
        match upload::check(&self.inner.remote, &request) {
            // Digests take time, and so may a connection: not the caller's.
            Ok(shape) => self.inner.remote.spawn(looks::put(Arc::clone(&self.inner), request, shape, reply)),
            // The asking end is still here.
            Err(reason) => drop(reply.send(Err(Error(reason)))),
        }
        answer
    }

    fn match_prefix(&self, request: &MatchRequest<'_>) -> Result<MatchReply, Error> {
        let of_cluster = self.inner.remote.of_cluster;
        Ok(messages::matched_together(&self.matched(messages::matching(request, of_cluster))?)?)
    }

    fn contains(&self, request: &ContainsRequest<'_>) -> Result<ContainsReply, Error> {
        let message = messages::asking(request, self.inner.remote.of_cluster);
        let found: proto::ExistsReply = self.inner.link()?.ask(Kind::Exists, &message)?;
        Ok(messages::found(&found, request.keys.len())?)
    }

    fn look_up(
        &self,
        request: &ContainsRequest<'_>,
        deadline: Option<Nanos>,
    ) -> Ticket<Result<ContainsReply, Error>> {
        let ((reply, answer), deadline) = (ticket(), self.inner.by(deadline));
        let message = messages::asking_without_keys(request, self.inner.remote.of_cluster);
        match self.inner.ready() {
            Some(link) => {
                // What cannot be sent is answered with why.
                let _ = link.look(&message, request.keys, deadlines::late(deadline), reply);
                self.inner.look(deadline);
            }
            None => self.inner.remote.spawn(looks::look(
                Arc::clone(&self.inner),
                message,
                (request.keys.to_vec(), deadline),
                reply,
            )),
        }
        answer
    }

    fn unlock(&self, lease: LeaseId) -> bool {
        let message = proto::UnlockRequest { lease: lease.0 };
        let asked = self.inner.link().and_then(|link| link.ask::<proto::UnlockReply>(Kind::Unlock, &message));
        // A server that cannot be asked has ended it with the connection.
        asked.is_ok_and(|reply| reply.ended_now)
    }

    fn renew(&self, lease: LeaseId, hold: Duration) -> Result<(), Error> {
        let message = proto::RenewRequest { lease: lease.0, hold_ms: messages::millis(hold) };
        self.inner.link()?.ask::<proto::RenewReply>(Kind::Renew, &message)?;
        Ok(())
    }

    fn delete(&self, request: DeleteRequest) -> Ticket<Result<DeleteReply, Error>> {
        self.grpc.delete(request)
    }

    fn set_ttl(&self, request: &TtlRequest<'_>) -> Result<TtlReply, Error> {
        self.grpc.set_ttl(request)
    }

    fn set_default_ttl(&self, namespace: NamespaceId, ttl: Option<Duration>) -> Result<(), Error> {
        self.grpc.set_default_ttl(namespace, ttl)
    }

    /// As over gRPC: events come by [`Client::watch`](super::Client::watch).
    fn subscribe(&self, from: Option<Sequence>) -> Subscription {
        self.grpc.subscribe(from)
    }

    fn snapshot(&self, cursor: Option<SnapshotCursor>) -> Ticket<Result<SnapshotPage, Error>> {
        self.grpc.snapshot(cursor)
    }

    fn read(&self, request: ReadRequest) -> Result<ReadStream, Error> {
        let request = ReadRequest { deadline: self.inner.by(request.deadline), ..request };
        let shape = download::check(&self.inner.remote, &request)?;
        let (sink, stream) = read_channel();
        let layers = request.layers.clone().unwrap_or(0..shape.layers().len() as u32);
        let places = self.inner.places(&request.into, &shape, &layers);
        if places.is_none() && !copied::fits(&shape) {
            return self.grpc.read(request);
        }
        match (places, self.inner.ready()) {
            (Some(places), Some(link)) => {
                let deadline = request.deadline;
                let timeouts = (self.inner.timeout_us(deadline), deadlines::late(deadline));
                link.read(Wanted { request, shape, part: None }, places, timeouts, sink)?;
                self.inner.look(deadline);
                Ok(stream.brought_by(link.bring()))
            }
            (places, _) => {
                self.inner.remote.spawn(looks::read(Arc::clone(&self.inner), request, shape, places, sink));
                Ok(stream)
            }
        }
    }
}
