//! What is in a pool: extents, the blocks in them, and the reads that bring them.

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use kvarts_contract::api::{ContainsReply, ContainsRequest, KvStore};
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::class::Class;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Error;
use kvarts_contract::ticket::Ticket;
use kvarts_layout::{BlockKey, BlockShape, NamespaceId, planted};

use super::column::Column;
use super::extent::{Extent, Read, State};
use super::room::Room;

/// Reads that are under way at a time: each is of an extent. Those that wait begin in the order in which they were asked for.
const READS_MAX: usize = 16;

/// The content and the counters of a pool. A block of several columns counts in each column.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// The bytes of the pool.
    pub bytes: u64,
    /// The free bytes.
    pub free_bytes: u64,
    /// Requested blocks that were in the pool.
    pub hits: u64,
    /// Requested blocks that were being read for another stage.
    pub shared: u64,
    /// Requested blocks that had to be read.
    pub read: u64,
    /// The blocks of these that arrived.
    pub came: u64,
    /// Requested blocks for which there was no room.
    pub no_room: u64,
    /// Blocks that an engine saved here, and that stayed after they had been stored.
    pub kept: u64,
    /// Blocks of the pool that the store no longer has: deleted, expired or evicted there.
    pub withdrawn: u64,
    /// Blocks evicted from the pool to make room.
    pub evicted: u64,
    /// Stages that ended because no block arrived in time.
    pub silent: u64,
}

impl Counts {
    /// All values with their names.
    pub fn named(&self) -> [(&'static str, u64); 11] {
        let Self { bytes, free_bytes, hits, shared, read, came, no_room, kept, withdrawn, evicted, silent } =
            *self;
        [
            ("bytes", bytes),
            ("free_bytes", free_bytes),
            ("hits", hits),
            ("shared", shared),
            ("read", read),
            ("came", came),
            ("no_room", no_room),
            ("kept", kept),
            ("withdrawn", withdrawn),
            ("evicted", evicted),
            ("silent", silent),
        ]
    }
}

/// Where a block is: the number of its extent, and which of the extent's blocks it is.
pub(super) type At = (u64, u32);

/// The books of a pool.
pub(super) struct Book {
    store: Arc<dyn KvStore>,
    region: Arc<Region>,
    room: Arc<Room>,
    blocks: BTreeMap<(Column, BlockKey), At>,
    extents: BTreeMap<u64, Extent>,
    /// Those that may go: which one first.
    idle: BTreeSet<(u64, Reverse<u32>, u64)>,
    waiting: VecDeque<u64>,
    going: BTreeSet<u64>,
    /// What the store said last of the deletes in a namespace; none where it could not be asked. No read of a namespace begins before.
    deletes: BTreeMap<NamespaceId, Option<u64>>,
    learning: BTreeMap<NamespaceId, Ticket<Result<ContainsReply, Error>>>,
    /// Something has changed since it was asked last.
    stirred: bool,
    next: u64,
    turn: u64,
    /// When anything came last.
    heard: Nanos,
    pub(super) counts: Counts,
}

impl fmt::Debug for Book {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Book").field("counts", &self.counts).finish_non_exhaustive()
    }
}

impl Book {
    pub(super) fn new(store: Arc<dyn KvStore>, region: &Arc<Region>) -> Self {
        Self {
            store,
            region: Arc::clone(region),
            room: Room::new(region.len() as u64),
            blocks: BTreeMap::new(),
            extents: BTreeMap::new(),
            idle: BTreeSet::new(),
            waiting: VecDeque::new(),
            going: BTreeSet::new(),
            deletes: BTreeMap::new(),
            learning: BTreeMap::new(),
            stirred: false,
            next: 0,
            turn: 0,
            heard: Nanos::default(),
            counts: Counts::default(),
        }
    }

    pub(super) fn counts(&self) -> Counts {
        Counts { bytes: self.region.len() as u64, free_bytes: self.room.bytes(), ..self.counts }
    }

    pub(super) fn store(&self) -> Arc<dyn KvStore> {
        Arc::clone(&self.store)
    }

    /// A stage begins: what it uses is used later than what was before.
    pub(super) fn next_turn(&mut self) {
        self.turn += 1;
    }

    /// Where a block is, here or on its way.
    pub(super) fn find(&self, column: Column, key: BlockKey) -> Option<At> {
        self.blocks.get(&(column, key)).copied()
    }

    pub(super) fn extent(&self, number: u64) -> Option<&Extent> {
        self.extents.get(&number)
    }

    pub(super) fn state(&self, (number, at): At) -> State {
        let state = self.extents.get(&number).and_then(|extent| extent.states.get(at as usize));
        state.copied().unwrap_or(State::Failed)
    }

    /// Asks the store which blocks it has.
    pub(super) fn ask(
        &self,
        Column { namespace, group, coordinate }: Column,
        keys: &[BlockKey],
        deadline: Nanos,
    ) -> Ticket<Result<ContainsReply, Error>> {
        let request = ContainsRequest { namespace, group, coordinate, keys, lease: None };
        self.store.look_up(&request, Some(deadline))
    }

    /// Asks what deletes there were in a column's namespace, if it is not known: no read of it begins before.
    pub(super) fn learn(&mut self, column: Column, some: &[BlockKey], deadline: Nanos) {
        let is_known = matches!(self.deletes.get(&column.namespace), Some(Some(_)));
        if !is_known && !self.learning.contains_key(&column.namespace) {
            let asked = self.ask(column, some, deadline);
            self.learning.insert(column.namespace, asked);
        }
    }

    /// What the store says of them.
    pub(super) fn know(&mut self, namespace: NamespaceId, reply: &ContainsReply) {
        self.deletes.insert(namespace, Some(reply.deletes).filter(|deletes| *deletes != 0));
    }

    /// Takes in what the store says of deletes, or that it cannot; true if reads may begin that could not before.
    fn hear_of_deletes(&mut self, context: &mut Context<'_>) -> bool {
        let mut heard = Vec::new();
        self.learning.retain(|namespace, answer| {
            let Poll::Ready(answer) = Pin::new(answer).poll(context) else { return true };
            heard.push((*namespace, answer.ok().and_then(Result::ok)));
            false
        });
        for (namespace, reply) in &heard {
            match reply {
                Some(reply) => self.know(*namespace, reply),
                None => drop(self.deletes.entry(*namespace).or_insert(None)),
            }
        }
        !heard.is_empty()
    }

    /// Whether a block is one that no delete can have met of which the store has told by this number. One whose read has not begun is read
    /// behind the answer.
    pub(super) fn is_current(&self, (number, _): At, deletes: u64) -> bool {
        let Some(extent) = self.extents.get(&number) else { return false };
        let is_same = extent.deletes == Some(deletes) || planted!("pool-forgets-deletes");
        matches!(extent.read, Read::Waits) || is_same
    }

    /// Whether stages that wait should look: what they wait for may have come while another one looked.
    pub(super) fn has_stirred(&mut self) -> bool {
        std::mem::take(&mut self.stirred)
    }

    /// A stage holds an extent, and uses it.
    pub(super) fn hold(&mut self, number: u64) {
        let Some(extent) = self.extents.get_mut(&number) else { return };
        self.idle.remove(&place(number, extent));
        extent.holders += u32::from(!planted!("shared-extents-not-held"));
        extent.used = self.turn;
    }

    /// A stage holds it no more. If no other one waits for its blocks, they are read no further.
    pub(super) fn let_go(&mut self, number: u64, now: Nanos, waker: &Waker) {
        let Some(extent) = self.extents.get_mut(&number) else { return };
        extent.holders = extent.holders.saturating_sub(1);
        if extent.holders > 0 {
            return;
        }
        if !matches!(extent.read, Read::Over) {
            // This drops the stream, which cancels the read. Its memory is free when no device writes to it any more.
            extent.end();
            self.waiting.retain(|waits| *waits != number);
            self.over(number);
            self.begin_reads(now, waker);
        } else {
            self.rest(number);
        }
    }

    /// A read of an extent is over.
    fn over(&mut self, number: u64) {
        self.going.remove(&number);
        let Some(extent) = self.extents.get(&number) else { return };
        let failed = extent.keys.iter().zip(&extent.states).enumerate();
        for (at, (key, _)) in failed.filter(|(_, (_, state))| **state == State::Failed) {
            remove(&mut self.blocks, (extent.column, *key), (number, at as u32));
        }
        self.rest(number);
    }

    /// Keeps an extent that no stage holds for the next, if there is anything in it.
    fn rest(&mut self, number: u64) {
        let Some(extent) = self.extents.get(&number).filter(|extent| extent.is_free()) else { return };
        if extent.here() == u64::from(extent.withdrawn) {
            self.extents.remove(&number);
        } else {
            self.idle.insert(place(number, extent));
        }
    }

    /// Makes an extent for blocks that are to be read, and holds it. None where there is no room, whatever goes that may.
    pub(super) fn make(
        &mut self,
        of: (Column, &Arc<BlockShape>),
        keys: &[BlockKey],
        depth: u32,
        class: Class,
    ) -> Option<u64> {
        let number = self.extent_of(of, keys, (depth, class), (Read::Waits, State::Coming))?;
        for (at, key) in (0u32..).zip(keys) {
            self.blocks.insert((of.0, *key), (number, at));
        }
        self.waiting.push_back(number);
        Some(number)
    }

    /// Makes an extent for blocks that an engine writes, and holds it; and where it lies. No stage finds them before they are kept.
    pub(super) fn draft(
        &mut self,
        of: (Column, &Arc<BlockShape>),
        keys: &[BlockKey],
        depth: u32,
    ) -> Option<(u64, u64)> {
        let number = self.extent_of(of, keys, (depth, Class::Foreground), (Read::Over, State::Failed))?;
        // No delete behind this leaves the number as it is, and the put comes behind this.
        let deletes = self.deletes.get(&of.0.namespace).copied().flatten();
        let extent = self.extents.get_mut(&number)?;
        extent.deletes = deletes;
        Some((number, extent.memory.offset() as u64))
    }

    /// These blocks of a draft were stored as they lie there: stages find them. Not where the deletes before the put are not known, and not
    /// where another extent has the block.
    pub(super) fn keep(&mut self, number: u64, column: Column, stored: &[bool]) {
        let Some(extent) = self.extents.get_mut(&number).filter(|extent| extent.deletes.is_some()) else {
            return;
        };
        let blocks = extent.keys.iter().zip(&mut extent.states).zip(stored);
        let is_kept = |stored: bool| stored || planted!("draft-keeps-what-was-there");
        for (at, ((key, state), _)) in (0u32..).zip(blocks).filter(|(_, (_, stored))| is_kept(**stored)) {
            if let Entry::Vacant(place) = self.blocks.entry((column, *key)) {
                place.insert((number, at));
                *state = State::Here;
                self.counts.kept += 1;
            }
        }
    }

    /// An extent with room of its own, held.
    fn extent_of(
        &mut self,
        (column, shape): (Column, &Arc<BlockShape>),
        keys: &[BlockKey],
        (depth, class): (u32, Class),
        (read, state): (Read, State),
    ) -> Option<u64> {
        let bytes = shape.block_bytes().checked_mul(keys.len() as u64)?;
        let lease = loop {
            match self.room.take(bytes) {
                Some(lease) => break lease,
                None => self.evict()?,
            }
        };
        let memory =
            SharedBuf::new(&self.region, usize::try_from(lease.start()).ok()?, usize::try_from(bytes).ok()?)?;
        let memory = memory.kept_by(Arc::new(lease));
        let number = self.next;
        self.next += 1;
        let extent = Extent {
            column,
            shape: Arc::clone(shape),
            keys: keys.to_vec(),
            states: vec![state; keys.len()],
            memory,
            read,
            class,
            withdrawn: 0,
            holders: 1,
            used: self.turn,
            depth,
            heard: Nanos::default(),
            deletes: None,
            reasons: BTreeMap::new(),
        };
        self.extents.insert(number, extent);
        Some(number)
    }

    /// Makes room: the extent goes that is worth least of those that no stage holds. None if there is none.
    pub(super) fn evict(&mut self) -> Option<()> {
        let (_, _, number) = self.idle.pop_first()?;
        let extent = self.extents.remove(&number)?;
        self.counts.evicted += extent.here();
        for (at, key) in (0u32..).zip(&extent.keys) {
            remove(&mut self.blocks, (extent.column, *key), (number, at));
        }
        Some(())
    }

    /// A block that is here is the store's no more: no stage finds it.
    pub(super) fn withdraw(&mut self, column: Column, key: BlockKey, at: At) {
        if remove(&mut self.blocks, (column, key), at) {
            self.counts.withdrawn += 1;
            if let Some(extent) = self.extents.get_mut(&at.0) {
                let is_here = extent.states.get(at.1 as usize) == Some(&State::Here);
                extent.withdrawn += u32::from(is_here);
            }
        }
    }

    /// Begins reads whose turn it is. A store's `read` waits for nothing.
    pub(super) fn begin_reads(&mut self, now: Nanos, waker: &Waker) {
        let mut passed = VecDeque::new();
        while self.going.len() < READS_MAX
            && let Some(number) = self.waiting.pop_front()
        {
            let Some(extent) = self.extents.get_mut(&number) else { continue };
            // A number that is older than the read is one that no delete behind the read's beginning leaves as it is.
            let Some(deletes) = self.deletes.get(&extent.column.namespace) else {
                passed.push_back(number);
                continue;
            };
            extent.deletes = *deletes;
            let begun = extent.request().map_err(Error).and_then(|request| self.store.read(request));
            match begun {
                Ok(stream) => {
                    extent.read = Read::Going(stream);
                    (extent.heard, self.heard) = (now, now);
                    self.going.insert(number);
                }
                Err(error) => {
                    let failed = |at| (at, error.0.clone());
                    extent.reasons = (0..extent.keys.len() as u32).map(failed).collect();
                    extent.end();
                    self.stirred = true;
                    self.over(number);
                }
            }
        }
        passed.append(&mut self.waiting);
        self.waiting = passed;
        // From here on each is waited for.
        self.take_in(now, waker);
    }

    /// Takes in what has arrived, begins what can begin then, and has `waker` woken by what arrives next.
    pub(super) fn take_in(&mut self, now: Nanos, waker: &Waker) {
        let mut context = Context::from_waker(waker);
        let may_begin = self.hear_of_deletes(&mut context);
        let mut over = Vec::new();
        for number in &self.going {
            let Some(extent) = self.extents.get_mut(number) else { continue };
            while let Read::Going(stream) = &extent.read
                && let Poll::Ready(event) = stream.poll_next(&mut context)
            {
                let before = extent.here();
                if extent.heard(event, now) {
                    over.push(*number);
                }
                self.counts.came += extent.here() - before;
                (self.heard, self.stirred) = (now, true);
            }
        }
        let may_begin = may_begin || !over.is_empty();
        over.into_iter().for_each(|number| self.over(number));
        if may_begin && !self.waiting.is_empty() {
            self.begin_reads(now, waker);
        }
    }

    /// When something came last of these extents; of any, as long as none of these has been begun.
    pub(super) fn heard_of(&self, numbers: &BTreeSet<u64>) -> Nanos {
        let going = |number: &u64| self.going.contains(number);
        let of = numbers.iter().filter(|number| going(number)).filter_map(|number| self.extents.get(number));
        of.map(|extent| extent.heard).max().unwrap_or(self.heard)
    }
}

/// Where an extent stands among those that may go.
fn place(number: u64, extent: &Extent) -> (u64, Reverse<u32>, u64) {
    (extent.used, Reverse(extent.depth), number)
}

/// Forgets where a block is, if it is there.
fn remove(blocks: &mut BTreeMap<(Column, BlockKey), At>, name: (Column, BlockKey), at: At) -> bool {
    let is_there = blocks.get(&name) == Some(&at);
    if is_there {
        blocks.remove(&name);
    }
    is_there
}
