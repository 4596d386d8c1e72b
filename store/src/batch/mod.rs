//! Many keys at once, without waiting: the shape in which engines ask for pages.
//!
//! [`Pages`] is a handle on the blocks of one namespace, group and coordinate in any store. A batch is submitted
//! from any thread and answered later, exactly once, with one result for each of its keys, in the order in which
//! the keys were given; an eventfd is readable while answers wait.
//!
//! Invariants:
//! - A batch that was given an id is answered by one [`Completion`], unless the handle is closed first; one that
//!   was refused has no id and nothing of it was begun.
//! - An eventfd is readable exactly while a completion that it stands for waits to be drained. Both change under
//!   one lock, on the thread that ends the batch: there is no thread in this module, and no polling.
//! - A batch counts as under way until it is drained, so a caller that does not drain is told `Busy` and memory
//!   stays bounded.
//! - Once a get is answered, no device writes to its memory any more.
//!
//! How an end is noticed: tickets and read streams take wakers, and a batch's waker moves the raw answer to the
//! list of those that ended and writes the eventfd. That is all that runs on an executor; the answer becomes
//! results on the thread that drains.

mod desk;
mod locks;
mod split;

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use kvarts_layout::{BlockKey, Coordinate, Group, Layout, NamespaceId};

use crate::api::{
    ContainsRequest, Durability, KvStore, LeaseId, LeaseTerms, MAX_REQUEST_BLOCKS, Order, Placed, Presence,
    PutRequest, ReadRequest, Verify,
};
use crate::error::{Error, Reason};
use crate::rt::Class;
use desk::{Answer, Asked, Desk};
use locks::Locks;
use split::Split;

/// Names one batch of a handle. Never given out twice by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BatchId(pub u64);

/// What a batch does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BatchKind {
    /// Stores pages.
    Put,
    /// Reads pages.
    Get,
    /// Asks which pages are here.
    Exists,
    /// Asks which pages are here and holds those.
    Lock,
}

/// Which completions an eventfd stands for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Lane {
    /// Those of puts.
    Store,
    /// Those of `exists` and of lookups that lock.
    Lookup,
    /// Those of gets.
    Load,
}

impl Lane {
    /// Every lane.
    pub const ALL: [Self; 3] = [Self::Store, Self::Lookup, Self::Load];

    fn index(self) -> usize {
        match self {
            Self::Store => 0,
            Self::Lookup => 1,
            Self::Load => 2,
        }
    }
}

impl BatchKind {
    /// The lane in which batches of this kind complete.
    pub fn lane(self) -> Lane {
        match self {
            Self::Put => Lane::Store,
            Self::Get => Lane::Load,
            Self::Exists | Self::Lock => Lane::Lookup,
        }
    }
}

/// How many eventfds a handle has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum EventFds {
    /// One for everything.
    #[default]
    One,
    /// One for each [`Lane`].
    PerLane,
}

/// The answer to a batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Completion {
    /// Which batch.
    pub id: BatchId,
    /// What it did.
    pub kind: BatchKind,
    /// One result for each key, in the order of the request.
    ///
    /// - A put: the page is stored, as durably as was asked, now or already. [`Reason::InFlight`] if another put
    ///   of it has not finished. A key that stands again has the result of its first place: the first put wins.
    /// - A get: the page is complete and verified in memory. A key that stands again is
    ///   [`Reason::Duplicate`] there, and that memory is untouched.
    /// - A lookup: the page is here. [`Reason::InFlight`] if a put of it has not finished,
    ///   [`Reason::NotHere`] if there is none.
    pub results: Vec<Result<(), Reason>>,
    /// Pages that a put wrote; those that were here already are not counted.
    pub written: u32,
    /// The lease on the pages that a lock found here; its time or [`Pages::unlock`] ends it.
    pub lease: Option<LeaseId>,
}

impl Completion {
    /// Leading keys that went well.
    pub fn usable_prefix(&self) -> u32 {
        self.results.iter().take_while(|result| result.is_ok()).count() as u32
    }

    /// Whether every key went well.
    pub fn is_ok(&self) -> bool {
        self.results.iter().all(Result::is_ok)
    }

    /// The first reason why a key did not go well.
    pub fn error(&self) -> Option<&Reason> {
        self.results.iter().find_map(|result| result.as_ref().err())
    }
}

/// Which blocks a handle is for, and how it treats them.
#[derive(Clone, Debug)]
pub struct PagesOptions {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The group of all blocks.
    pub group: Group,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
    /// When a put is acknowledged.
    pub durability: Durability,
    /// The layout on disk; `None` lets the store choose.
    pub layout: Option<Layout>,
    /// How long pages may live; `None` leaves it to eviction.
    pub expires_after: Option<Duration>,
    /// How much of what is read is compared with its digests.
    pub verify: Verify,
    /// What gets are for.
    pub class: Class,
    /// Whose cap on pinned bytes locks count against.
    pub tenant: u32,
    /// The cap, in bytes.
    pub pin_cap_bytes: u64,
    /// The most batches that may be under way, those that wait to be drained among them.
    pub batches_max: usize,
    /// How many eventfds there are.
    pub event_fds: EventFds,
}

impl PagesOptions {
    /// Group 0, replicated, durable, verified, 256 batches, one eventfd, no cap on locks.
    pub fn new(namespace: NamespaceId) -> Self {
        Self {
            namespace,
            group: Group(0),
            coordinate: Coordinate::Replicated,
            durability: Durability::default(),
            layout: None,
            expires_after: None,
            verify: Verify::default(),
            class: Class::Foreground,
            tenant: 0,
            pin_cap_bytes: u64::MAX,
            batches_max: 256,
            event_fds: EventFds::default(),
        }
    }
}

/// Submits batches and hands out their completions. Every method may be called from any thread and none waits
/// for a device. Dropping the handle closes it.
pub struct Pages {
    store: Arc<dyn KvStore>,
    options: PagesOptions,
    desk: Arc<Desk>,
    locks: Locks,
}

impl Pages {
    /// A handle on a store. Handles are independent of each other; they see each other's pages.
    pub fn new(store: Arc<dyn KvStore>, options: PagesOptions) -> Result<Self, Error> {
        let desk = Desk::new(options.event_fds, options.batches_max)
            .map_err(|error| Reason::Config(format!("no eventfd, raise the descriptor limit: {error}")))?;
        Ok(Self { store, options, desk, locks: Locks::default() })
    }

    /// Stores a page under each key; `from` has a place for each. The memory must not change before the
    /// completion.
    pub fn submit_put(&self, keys: &[BlockKey], from: &Placed) -> Result<BatchId, Error> {
        check(keys, Some(from))?;
        let split = Split::of(keys);
        let (keys, from) = split.distinct(keys, from)?;
        let count = keys.len();
        let reserved = self.desk.reserve()?;
        let options = &self.options;
        let request = PutRequest::new(options.namespace, options.group, options.coordinate, keys, from);
        let ticket = self.store.put(PutRequest {
            layout: options.layout,
            durability: options.durability,
            expires_after: options.expires_after,
            ..request
        });
        Ok(reserved.watch(BatchKind::Put, split, count, Asked::Put(ticket))?)
    }

    /// Reads the page of each key to its place. The memory must be left alone before the completion.
    pub fn submit_get(&self, keys: &[BlockKey], into: &Placed) -> Result<BatchId, Error> {
        check(keys, Some(into))?;
        let split = Split::of(keys);
        let (keys, into) = split.distinct(keys, into)?;
        let count = keys.len();
        let reserved = self.desk.reserve()?;
        let options = &self.options;
        let request = ReadRequest::new(options.namespace, options.group, options.coordinate, keys, into);
        let (verify, class) = (options.verify, options.class);
        let stream = self.store.read(ReadRequest { order: Order::Blocks, verify, class, ..request })?;
        Ok(reserved.watch(BatchKind::Get, split, count, Asked::Get(stream))?)
    }

    /// Asks which pages are here. It is answered before this returns, and completes like any other batch.
    pub fn submit_exists(&self, keys: &[BlockKey]) -> Result<BatchId, Error> {
        check(keys, None)?;
        let reserved = self.desk.reserve()?;
        let (results, _) = self.look(keys, None)?;
        Ok(reserved.answer(BatchKind::Exists, Answer::Looked { results, lease: None })?)
    }

    /// The same, and holds the pages that are here against eviction for as long as `hold`, or until they are
    /// unlocked. [`Reason::PinCap`] if the tenant's cap forbids it: then nothing is held.
    pub fn submit_lookup_and_lock(&self, keys: &[BlockKey], hold: Duration) -> Result<BatchId, Error> {
        check(keys, None)?;
        let reserved = self.desk.reserve()?;
        let options = &self.options;
        let terms = LeaseTerms { hold, tenant: options.tenant, cap_bytes: options.pin_cap_bytes };
        let (results, lease) = self.look(keys, Some(terms))?;
        let id = reserved.id();
        if let Some(lease) = lease {
            let here = keys.iter().zip(&results).filter(|(_, result)| result.is_ok()).map(|(key, _)| *key);
            self.locks.insert(id, lease, here.collect());
        }
        let answered = reserved.answer(BatchKind::Lock, Answer::Looked { results, lease });
        if answered.is_err() {
            // The handle was closed meanwhile, perhaps before it knew of this lease.
            self.unlock(id);
        }
        Ok(answered?)
    }

    /// Ends what a lock holds; false if it had ended, or held nothing.
    pub fn unlock(&self, batch: BatchId) -> bool {
        self.locks.remove(batch).is_some_and(|lease| self.store.unlock(lease))
    }

    /// Takes one lock off each key, the oldest of this handle that is on it. What a lock holds is let go
    /// together, with the last of its keys.
    pub fn unlock_keys(&self, keys: &[BlockKey]) {
        for lease in self.locks.remove_keys(keys) {
            // One that has ended by itself needs no ending.
            self.store.unlock(lease);
        }
    }

    /// Appends the completions that wait to `out` and gives their number. Each is handed out once.
    pub fn drain(&self, out: &mut Vec<Completion>) -> usize {
        self.desk.drain(&Lane::ALL, out)
    }

    /// The same for one lane.
    pub fn drain_lane(&self, lane: Lane, out: &mut Vec<Completion>) -> usize {
        self.desk.drain(&[lane], out)
    }

    /// Readable exactly while completions of this lane (of any, if there is one eventfd) wait to be drained.
    /// Draining empties it. A caller that reads it all the same does so before draining, never after; it does
    /// not block.
    pub fn event_fd(&self, lane: Lane) -> BorrowedFd<'_> {
        self.desk.event_fd(lane)
    }

    /// Batches that were submitted and not drained.
    pub fn under_way(&self) -> usize {
        self.desk.open()
    }

    /// Cancels what is under way, discards what was not drained and ends the leases taken; later batches are
    /// refused. The memory of a get that is cancelled stays allocated until the device has let go of it.
    pub fn close(&self) {
        self.desk.close();
        for lease in self.locks.clear() {
            self.store.unlock(lease);
        }
    }

    #[allow(clippy::type_complexity, reason = "used twice, right here")]
    fn look(
        &self,
        keys: &[BlockKey],
        lease: Option<LeaseTerms>,
    ) -> Result<(Vec<Result<(), Reason>>, Option<LeaseId>), Error> {
        let options = &self.options;
        let reply = self.store.contains(&ContainsRequest {
            namespace: options.namespace,
            group: options.group,
            coordinate: options.coordinate,
            keys,
            lease,
        })?;
        let result = |(key, presence): (&BlockKey, &Presence)| match presence {
            Presence::Here => Ok(()),
            Presence::Pending => Err(Reason::InFlight),
            Presence::Absent => Err(Reason::NotHere(*key)),
        };
        Ok((keys.iter().zip(&reply.presence).map(result).collect(), reply.lease))
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages")
            .field("options", &self.options)
            .field("under_way", &self.under_way())
            .finish_non_exhaustive()
    }
}

fn check(keys: &[BlockKey], places: Option<&Placed>) -> Result<(), Reason> {
    if keys.is_empty() {
        return Err(Reason::Empty);
    }
    if keys.len() > MAX_REQUEST_BLOCKS {
        return Err(Reason::TooMany("blocks"));
    }
    let (expected, found) = (keys.len() as u64, places.map(|places| u64::from(places.block_count())));
    match found {
        Some(found) if found != expected => Err(Reason::Length { expected, found }),
        _ => Ok(()),
    }
}
