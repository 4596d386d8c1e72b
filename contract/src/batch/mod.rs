//! Many keys at once, without waiting: the shape in which engines ask for pages.
//!
//! [`Pages`] is a handle on the blocks of one namespace in any store. A batch is submitted from any thread and answered
//! later, exactly once, with one result for each of its keys, in the order in which the keys were given; an eventfd is
//! readable while answers wait. Its blocks may be of any groups and coordinates, and lie in memory anywhere.
//!
//! Invariants:
//! - A batch that was given an id is answered by one [`Completion`], unless the handle is closed first; one that
//!   was refused has no id and nothing of it was begun.
//! - An eventfd is readable exactly while a completion that it stands for waits to be drained. Both change under
//!   one lock, on the thread that ends the batch: there is no thread in this module, and no polling.
//! - A batch counts as under way until it is drained, so a caller that does not drain is told `Busy` and memory
//!   stays bounded.
//! - Once a get is answered, no device writes to its memory any more. Once a batch that was cancelled is answered, no
//!   operation uses its memory any more. The same holds when a closed handle says so ([`Pages::is_free`]).
//!
//! How an end is noticed: tickets and read streams take wakers, and a batch's waker moves the raw answer to the
//! list of those that ended and writes the eventfd. That is all that runs on an executor; the answer becomes
//! results on the thread that drains.

mod asked;
mod desk;
mod locks;
mod split;
mod touched;

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use kvarts_layout::{BlockKey, BlockShape, Coordinate, Group, Layout, NamespaceId};

use crate::api::{
    ContainsRequest, DeleteRequest, Durability, KvStore, LeaseId, LeaseTerms, MAX_REQUEST_BLOCKS, Order,
    Parent, Placed, PutRequest, ReadRequest, Target, Verify,
};
use crate::buffers::SharedBuf;
use crate::error::{Error, Reason, ShapeCause};
use crate::{class::Class, clock::Nanos};
use asked::{Asked, Piece};
pub use asked::{CANCELLED, CLOSED};
use desk::{Batch, Desk, Held};
use locks::Locks;
use split::Split;
use touched::{InUse, Touched};

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
    /// Deletes pages.
    Delete,
}

/// Which completions an eventfd stands for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Lane {
    /// Those of puts and deletes.
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
            Self::Put | Self::Delete => Lane::Store,
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
    /// - A delete: the page was here and does not come back. [`Reason::NotHere`] if there was none.
    /// - Entries not processed when the batch was cancelled are [`CANCELLED`].
    pub results: Vec<Result<(), Reason>>,
    /// Pages that a put wrote; those that were here already are not counted.
    pub written: u32,
    /// The lease on the pages that a lock found here, the first one if they are of several columns; its time or
    /// [`Pages::unlock`] ends all of them.
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
    /// The group of blocks of which nothing else is said.
    pub group: Group,
    /// The coordinate of blocks of which nothing else is said.
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
    /// Whether a batch is answered only when its memory is not used any more, and not as soon as it is not written to: for
    /// callers whose memory may go away then.
    pub until_free: bool,
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
            until_free: false,
        }
    }
}

/// A block of a batch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Block {
    /// Its group.
    pub group: Group,
    /// Its coordinate.
    pub coordinate: Coordinate,
    /// Its key.
    pub key: BlockKey,
}

/// Where the blocks of a batch lie.
#[derive(Clone, Debug)]
pub enum Memory<'a> {
    /// Nowhere: they are only asked for.
    Nowhere,
    /// All of one group and coordinate, as a placement says.
    Placed(&'a Placed),
    /// Each whole, in a memory of its own of exactly its size; these lie anywhere. Only blocks of the groups and coordinates
    /// of these shapes may be in the batch.
    Anywhere(&'a [SharedBuf], &'a [(Group, Coordinate, BlockShape)]),
}

/// What else is said of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// What stands before the first block of a put whose blocks follow each other. It is used where they are all of one
    /// group, coordinate and placement.
    pub parent: Parent,
    /// How long a lock holds.
    pub hold: Duration,
    /// How long the pages of a put may live; `None`: as the handle says.
    pub expires_after: Option<Duration>,
    /// When the caller stops waiting.
    pub deadline: Option<Nanos>,
}

impl Default for Terms {
    fn default() -> Self {
        Self { parent: Parent::Unknown, hold: Duration::ZERO, expires_after: None, deadline: None }
    }
}

/// Submits batches and hands out their completions. Every method may be called from any thread and none waits
/// for a device. Dropping the handle closes it.
pub struct Pages {
    store: Arc<dyn KvStore>,
    options: PagesOptions,
    desk: Arc<Desk>,
    locks: Locks,
    in_use: Arc<InUse>,
}

impl Pages {
    /// A handle on a store. Handles are independent of each other; they see each other's pages.
    pub fn new(store: Arc<dyn KvStore>, options: PagesOptions) -> Result<Self, Error> {
        let desk = Desk::new(options.event_fds, options.batches_max).map_err(|error| {
            Reason::Config(format!(
                "an eventfd could not be created: {error}: raise the limit on open files (ulimit -n)"
            ))
        })?;
        Ok(Self { store, options, desk, locks: Locks::default(), in_use: Arc::default() })
    }

    /// Stores a page under each key; `from` has a place for each. The memory must not change before the
    /// completion.
    pub fn submit_put(&self, keys: &[BlockKey], from: &Placed) -> Result<BatchId, Error> {
        self.submit(BatchKind::Put, &self.blocks(keys), &Memory::Placed(from), &Terms::default())
    }

    /// Reads the page of each key to its place. The memory must be left alone before the completion.
    pub fn submit_get(&self, keys: &[BlockKey], into: &Placed) -> Result<BatchId, Error> {
        self.submit(BatchKind::Get, &self.blocks(keys), &Memory::Placed(into), &Terms::default())
    }

    /// Asks which pages are here.
    pub fn submit_exists(&self, keys: &[BlockKey]) -> Result<BatchId, Error> {
        self.submit_keys(BatchKind::Exists, self.column(), keys.to_vec(), &Terms::default())
    }

    /// The same, and holds the pages that are here against eviction for as long as `hold`, or until they are
    /// unlocked. [`Reason::PinCap`] if the tenant's cap forbids it: then nothing is held.
    pub fn submit_lookup_and_lock(&self, keys: &[BlockKey], hold: Duration) -> Result<BatchId, Error> {
        let terms = Terms { hold, ..Terms::default() };
        self.submit_keys(BatchKind::Lock, self.column(), keys.to_vec(), &terms)
    }

    fn column(&self) -> (Group, Coordinate) {
        (self.options.group, self.options.coordinate)
    }

    fn blocks(&self, keys: &[BlockKey]) -> Vec<Block> {
        blocks_of(self.column(), keys)
    }

    /// Submits a batch that has no memory, of blocks of one group and coordinate: what schedulers do many times a second. As
    /// [`Pages::submit`] does, with less copying.
    pub fn submit_keys(
        &self,
        kind: BatchKind,
        column: (Group, Coordinate),
        keys: Vec<BlockKey>,
        terms: &Terms,
    ) -> Result<BatchId, Error> {
        let count = keys.len();
        if count == 0 || count > MAX_REQUEST_BLOCKS || !split::all_differ(keys.iter()) {
            return self.submit(kind, &blocks_of(column, &keys), &Memory::Nowhere, terms);
        }
        let reserved = self.desk.reserve()?;
        let asked = self.ask(kind, column, &keys, None, terms);
        let asked = asked.unwrap_or_else(|Error(reason)| Asked::Failed(reason));
        let until_free = self.options.until_free;
        let batch = Batch { kind, split: Split::default(), blocks: count, until_free };
        Ok(reserved.watch(batch, vec![(Piece { keys, at: None }, asked)], Touched::nothing())?)
    }

    /// Submits a batch of any kind. Of one whose blocks are of several groups and coordinates, or lie too far from each other
    /// for one request, some may be refused at once: it is answered then like any other. What is refused as a whole is an
    /// error here, unless it may go well later: that is an answer, however soon it is known.
    pub fn submit(
        &self,
        kind: BatchKind,
        blocks: &[Block],
        memory: &Memory<'_>,
        terms: &Terms,
    ) -> Result<BatchId, Error> {
        check(kind, blocks, memory)?;
        let split = Split::of(blocks);
        let distinct = split.distinct(blocks.len());
        let pieces = pieces(blocks, &distinct, memory)?;
        let reserved = self.desk.reserve()?;
        let (token, touched) = match memory {
            Memory::Nowhere => (None, Touched::nothing()),
            _ => {
                let (token, touched) = Touched::token(&self.in_use);
                (Some(token), touched)
            }
        };
        let parent = if pieces.len() == 1 { terms.parent } else { Parent::Unknown };
        let terms = Terms { parent, ..*terms };
        let ask = |(block, piece, placed): (Block, Piece, Option<Placed>)| {
            let placed = match (&placed, &token) {
                (Some(placed), Some(token)) => Some(placed.clone().kept_by(token)),
                _ => placed,
            };
            let asked = self.ask(kind, (block.group, block.coordinate), &piece.keys, placed, &terms);
            (piece, asked.unwrap_or_else(|Error(reason)| Asked::Failed(reason)))
        };
        let asked = pieces.into_iter().map(ask).collect();
        drop(token);
        let batch = Batch { kind, split, blocks: distinct.len(), until_free: self.options.until_free };
        Ok(reserved.watch(batch, asked, touched)?)
    }

    fn ask(
        &self,
        kind: BatchKind,
        (group, coordinate): (Group, Coordinate),
        keys: &[BlockKey],
        placed: Option<Placed>,
        terms: &Terms,
    ) -> Result<Asked, Error> {
        let (options, deadline) = (&self.options, terms.deadline);
        let namespace = options.namespace;
        let placed = || placed.ok_or(Error(Reason::Bug("a batch has no memory")));
        Ok(match kind {
            BatchKind::Put => Asked::Put(self.store.put(PutRequest {
                parent: terms.parent,
                layout: options.layout,
                durability: options.durability,
                expires_after: terms.expires_after.or(options.expires_after),
                deadline,
                ..PutRequest::new(namespace, group, coordinate, keys.to_vec(), placed()?)
            })),
            BatchKind::Get => Asked::Get(self.store.read(ReadRequest {
                order: Order::Blocks,
                verify: options.verify,
                class: options.class,
                deadline,
                ..ReadRequest::new(namespace, group, coordinate, keys.to_vec(), placed()?)
            })?),
            BatchKind::Exists | BatchKind::Lock => {
                let (tenant, cap_bytes) = (options.tenant, options.pin_cap_bytes);
                let lease = LeaseTerms { hold: terms.hold, tenant, cap_bytes };
                let lease = (kind == BatchKind::Lock).then_some(lease);
                let request = ContainsRequest { namespace, group, coordinate, keys, lease };
                Asked::Look(self.store.look_up(&request, deadline))
            }
            BatchKind::Delete => {
                let target = Target::Keys { column: Some((group, coordinate)), keys: keys.to_vec() };
                Asked::Delete(self.store.delete(DeleteRequest { namespace, target, deadline }))
            }
        })
    }

    /// Ends a batch early: remaining entries are answered with [`CANCELLED`], as soon as no operation uses its memory. False
    /// if it was answered already.
    pub fn cancel(&self, batch: BatchId) -> bool {
        self.desk.cancel(batch)
    }

    /// Whether no batch's memory is in use: of a closed handle it stays so.
    pub fn is_free(&self) -> bool {
        self.in_use.is_none()
    }

    /// Ends what a lock holds, if it was drained; false if that had ended, or was nothing.
    pub fn unlock(&self, batch: BatchId) -> bool {
        let leases = self.locks.remove(batch);
        // Each of them, whatever became of the others.
        leases.into_iter().filter(|lease| self.store.unlock(*lease)).count() > 0
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
        self.drain_lanes(&Lane::ALL, out)
    }

    /// The same for one lane.
    pub fn drain_lane(&self, lane: Lane, out: &mut Vec<Completion>) -> usize {
        self.drain_lanes(&[lane], out)
    }

    /// Gives the completion of the batch that was submitted first of those that wait, for callers with room for one.
    pub fn drain_one(&self) -> Option<Completion> {
        self.desk.drain_one().map(|(completion, held)| self.handed_out(completion, held))
    }

    fn drain_lanes(&self, lanes: &[Lane], out: &mut Vec<Completion>) -> usize {
        let drained = self.desk.drain(lanes);
        let count = drained.len();
        out.extend(drained.into_iter().map(|(completion, held)| self.handed_out(completion, held)));
        count
    }

    fn handed_out(&self, completion: Completion, held: Held) -> Completion {
        if !held.leases.is_empty() {
            self.locks.insert(completion.id, held.leases, held.keys);
        }
        completion
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

    /// Cancels what is under way, discards undrained completions and ends the leases taken; later batches are
    /// refused. The memory of a get that is cancelled stays allocated until the device has let go of it:
    /// [`Pages::is_free`] says when that is so for all.
    pub fn close(&self) {
        for lease in self.desk.close().into_iter().chain(self.locks.clear()) {
            self.store.unlock(lease);
        }
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

fn blocks_of((group, coordinate): (Group, Coordinate), keys: &[BlockKey]) -> Vec<Block> {
    keys.iter().map(|key| Block { group, coordinate, key: *key }).collect()
}

fn check(kind: BatchKind, blocks: &[Block], memory: &Memory<'_>) -> Result<(), Reason> {
    if blocks.is_empty() {
        return Err(Reason::Empty);
    }
    if blocks.len() > MAX_REQUEST_BLOCKS {
        return Err(Reason::TooMany("blocks"));
    }
    let found = match memory {
        Memory::Nowhere => blocks.len(),
        Memory::Placed(placed) => placed.block_count() as usize,
        Memory::Anywhere(pages, _) => pages.len(),
    };
    let (expected, found) = (blocks.len() as u64, found as u64);
    if expected != found {
        return Err(Reason::Length { expected, found });
    }
    match memory {
        // Sources may be the same, destinations not; across several requests only this sees it.
        Memory::Anywhere(pages, _) if kind == BatchKind::Get => apart(pages),
        _ => Ok(()),
    }
}

/// Refuses memories that share a byte.
fn apart(pages: &[SharedBuf]) -> Result<(), Reason> {
    let mut ranges: Vec<_> =
        pages.iter().map(|page| (page.region().id(), page.offset(), page.len())).collect();
    ranges.sort_unstable();
    let is_apart =
        |&[(region, start, len), (other, next, _)]: &[_; 2]| region != other || start + len <= next;
    if ranges.array_windows().all(is_apart) { Ok(()) } else { Err(Reason::Overlap) }
}

/// The requests that a batch is: one for each group and coordinate, and for each placement that its memory needs.
fn pieces(
    blocks: &[Block],
    distinct: &[u32],
    memory: &Memory<'_>,
) -> Result<Vec<(Block, Piece, Option<Placed>)>, Reason> {
    let block = |at: &u32| blocks.get(*at as usize).copied();
    let mut columns: BTreeMap<(Group, Coordinate), Vec<u32>> = BTreeMap::new();
    for (at, block) in (0..).zip(distinct.iter().filter_map(block)) {
        columns.entry((block.group, block.coordinate)).or_default().push(at);
    }
    let place = |at: &u32| distinct.get(*at as usize).copied();
    let key = |at: &u32| Some(block(&place(at)?)?.key);
    let mut found = Vec::new();
    let mut piece = |at: Vec<u32>, placed| {
        let first = at.first().and_then(place).and_then(|at| block(&at)).ok_or(Reason::Empty)?;
        let keys = at.iter().filter_map(key).collect();
        let is_all = at.len() == distinct.len() && at.iter().is_sorted();
        found.push((first, Piece { keys, at: (!is_all).then_some(at) }, placed));
        Ok::<(), Reason>(())
    };
    let single = columns.len() == 1;
    for ((group, coordinate), at) in columns {
        match memory {
            Memory::Nowhere => piece(at, None)?,
            Memory::Placed(placed) if distinct.len() == blocks.len() && single => {
                piece(at, Some(Placed::clone(placed)))?;
            }
            Memory::Placed(placed) => {
                let some = placed.select(&at.iter().filter_map(place).collect::<Vec<_>>())?;
                piece(at, Some(some))?;
            }
            Memory::Anywhere(pages, shapes) => {
                let shape = shapes.iter().find(|(g, c, _)| (*g, *c) == (group, coordinate));
                let shape = shape.map(|(_, _, shape)| shape);
                let shape = shape.ok_or(Reason::Shape(ShapeCause::Column(group, coordinate)))?;
                let page = |at: &u32| pages.get(place(at)? as usize).cloned();
                let pages: Vec<SharedBuf> = at.iter().filter_map(page).collect();
                for (which, placed) in Placed::scattered(shape, &pages)? {
                    piece(
                        which.iter().filter_map(|which| at.get(*which as usize).copied()).collect(),
                        Some(placed),
                    )?;
                }
            }
        }
    }
    Ok(found)
}
