//! A stage: what one request needs, held and on its way.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvarts_contract::api::{ContainsReply, MAX_REQUEST_BLOCKS, Presence};
use kvarts_contract::class::Class;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::ticket::Ticket;
use kvarts_layout::plan::Stretch;
use kvarts_layout::{BlockKey, BlockShape, planted};

use super::Inner;
use super::book::{At, Book};
use super::column::Column;
use super::extent::{State, blocks_of};

/// The blocks of a request.
#[derive(Clone, Debug)]
pub struct StageRequest {
    /// The columns, and the shape of a block in each.
    pub columns: Vec<(Column, Arc<BlockShape>)>,
    /// Consecutive blocks of a chain, the same blocks in every column: at most [`MAX_REQUEST_BLOCKS`].
    pub keys: Vec<BlockKey>,
    /// The number of blocks of the chain before the first.
    pub first_block: u32,
    /// The time without an arrival after which the stage ends with the blocks that have arrived.
    pub silence: Duration,
    /// The class of the reads.
    pub class: Class,
}

/// The progress of a stage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// The number of leading blocks that are in the pool, and held, in every column.
    pub staged: u32,
    /// Whether the stage has ended: no more blocks will arrive.
    pub is_over: bool,
}

const NO_ROOM: &str = "the pool is full, because other requests hold its blocks: retry when they end, \
    or use a larger pool";
const SILENT: &str = "no more data arrived in time";

/// Where a block of a stage is.
#[derive(Clone, Copy, Debug)]
struct Place {
    at: At,
    /// It was in the pool before, and the store has not said yet that it still has it.
    is_unsure: bool,
}

/// A question which of the blocks that were here the store still has: which blocks it is about.
#[derive(Debug)]
struct Asked {
    blocks: Vec<u32>,
    answer: Ticket<Result<ContainsReply, Error>>,
}

/// A column of a stage.
#[derive(Debug)]
struct Part {
    column: Column,
    shape: Arc<BlockShape>,
    /// One for each leading block for which there was room.
    places: Vec<Place>,
    asked: Option<Asked>,
}

#[derive(Debug)]
struct Held {
    parts: Vec<Part>,
    keys: Vec<BlockKey>,
    first_block: u32,
    class: Class,
    /// Extents that it holds, and those of them that were made for it.
    extents: BTreeSet<u64>,
    made: BTreeSet<u64>,
    /// Leading blocks that may come: there is room for them, and the store can be asked.
    within: u32,
    /// Why the store could not be asked of those behind.
    unknown: Option<Reason>,
    /// From this block on they are looked for again, as the store has not all that were here.
    again: Option<u32>,
    staged: u32,
    is_over: bool,
    /// Why it ended before the last block.
    why: Option<Reason>,
    began: Nanos,
    silence: Duration,
}

/// Blocks that are held or being read: see [`Pool::stage`](super::Pool::stage). Dropping the stage releases the blocks, and stops reads
/// that no other stage waits for.
#[derive(Debug)]
pub struct Stage {
    pool: Arc<Inner>,
    held: Mutex<Held>,
}

impl Stage {
    pub(super) fn begin(pool: &Arc<Inner>, request: StageRequest) -> Result<Self, Error> {
        let StageRequest { columns, keys, first_block, silence, class } = request;
        if columns.is_empty() || keys.is_empty() {
            return Err(Reason::Empty.into());
        }
        // One question is asked of all of them.
        if keys.len() > MAX_REQUEST_BLOCKS {
            return Err(Reason::TooMany("blocks").into());
        }
        let now = pool.clock.now();
        let waker = Waker::from(Arc::clone(&pool.news));
        let of = |(column, shape)| Part { column, shape, places: Vec::new(), asked: None };
        let mut held = Held {
            parts: columns.into_iter().map(of).collect(),
            within: keys.len() as u32,
            unknown: None,
            keys,
            first_block,
            class,
            extents: BTreeSet::new(),
            made: BTreeSet::new(),
            again: None,
            staged: 0,
            is_over: false,
            why: None,
            began: now,
            silence,
        };
        let mut book = pool.book();
        book.next_turn();
        let some = held.keys.get(..1).unwrap_or_default();
        for part in &held.parts {
            book.learn(part.column, some, now.plus(silence));
        }
        held.place(&mut book, 0, now, &waker);
        held.go_on(&mut book, now, &waker);
        book.begin_reads(now, &waker);
        tell_others(pool, book);
        Ok(Self { pool: Arc::clone(pool), held: Mutex::new(held) })
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        // Each change is one step.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The progress now, including new arrivals. Does not wait.
    pub fn look(&self) -> Progress {
        let waker = Waker::from(Arc::clone(&self.pool.news));
        let now = self.pool.clock.now();
        let mut held = self.held();
        let mut book = self.pool.book();
        book.take_in(now, &waker);
        held.go_on(&mut book, now, &waker);
        let progress = Progress { staged: held.staged, is_over: held.is_over };
        tell_others(&self.pool, book);
        progress
    }

    /// The same, as a poll: arrivals wake the task until the stage has ended. Silence wakes no task; poll again at [`Stage::silent_at`].
    pub fn poll(&self, context: &mut Context<'_>) -> Poll<Progress> {
        // Before the look: what arrives behind it is not missed.
        self.pool.news.wakes(context.waker());
        let progress = self.look();
        if progress.is_over { Poll::Ready(progress) } else { Poll::Pending }
    }

    /// The same, but blocks the thread until the stage has ended, at most for `most`.
    pub fn wait(&self, most: Duration) -> Progress {
        let give_up = self.pool.clock.now().plus(most);
        loop {
            let count = self.pool.news.count();
            let progress = self.look();
            let now = self.pool.clock.now();
            if progress.is_over || now >= give_up {
                return progress;
            }
            let left = give_up.min(self.silent_at()).since(now);
            // ends: `most`, or sooner when the store has been silent
            self.pool.news.wait(count, left.max(Duration::from_millis(1)));
        }
    }

    /// The reason why the stage ended before the last block: the reason of the first missing block. `None` while the stage runs, and if all
    /// blocks are staged.
    pub fn why(&self) -> Option<Reason> {
        self.held().why.clone()
    }

    /// The number of columns of the request.
    pub fn columns(&self) -> usize {
        self.held().parts.len()
    }

    /// The time at which the stage ends if no block arrives before.
    pub fn silent_at(&self) -> Nanos {
        let held = self.held();
        let book = self.pool.book();
        held.silent_at(&book)
    }

    /// The places of the staged blocks of a column, counted as in the request, in the order of the chain.
    pub fn stretches(&self, column: usize) -> Vec<Stretch> {
        let held = self.held();
        let book = self.pool.book();
        let mut found: Vec<(u64, Stretch)> = Vec::new();
        let places = held.parts.get(column).into_iter().flat_map(|part| &part.places);
        for Place { at: (number, first), .. } in places.take(held.staged as usize) {
            match found.last_mut() {
                Some((last, stretch)) if last == number && stretch.first + stretch.count == *first => {
                    stretch.count += 1;
                }
                _ => {
                    let Some(extent) = book.extent(*number) else { break };
                    let (at, blocks) = (extent.memory.offset() as u64, extent.keys.len() as u32);
                    found.push((*number, Stretch { at, blocks, first: *first, count: 1 }));
                }
            }
        }
        found.into_iter().map(|(_, stretch)| stretch).collect()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let waker = Waker::from(Arc::clone(&self.pool.news));
        let now = self.pool.clock.now();
        let extents = std::mem::take(&mut self.held().extents);
        let mut book = self.pool.book();
        extents.into_iter().for_each(|number| book.let_go(number, now, &waker));
        drop(book);
        // What began in their place is waited for by others.
        self.pool.news.tell();
    }
}

/// Another stage may have come further while this one looked, and what it waits for wakes it no more.
fn tell_others(pool: &Inner, mut book: MutexGuard<'_, Book>) {
    let has_stirred = book.has_stirred();
    drop(book);
    if has_stirred {
        pool.news.tell();
    }
}

impl Held {
    /// Finds a place for each block from this one on, in every column and in the order of the chain, until there is no more room. Of those
    /// that are here the store is asked.
    fn place(&mut self, book: &mut Book, from: u32, now: Nanos, waker: &Waker) {
        let from = from as usize;
        let keys = self.keys.get(from..).unwrap_or_default();
        // First what is here is held, so that nothing of it goes to make room for the rest.
        let mut found: Vec<Vec<Option<At>>> = Vec::with_capacity(self.parts.len());
        for part in &mut self.parts {
            part.places.truncate(from);
            let of_part: Vec<_> = keys.iter().map(|key| book.find(part.column, *key)).collect();
            for (number, _) in of_part.iter().flatten() {
                if self.extents.insert(*number) {
                    book.hold(*number);
                }
            }
            found.push(of_part);
        }
        // What is of no use any more makes room.
        let placed = self.parts.iter().flat_map(|part| &part.places).map(|place| place.at.0);
        let used = placed.chain(found.iter().flatten().flatten().map(|at| at.0));
        let used: BTreeSet<u64> = used.collect();
        let unused: Vec<u64> = self.extents.difference(&used).copied().collect();
        for number in unused {
            self.extents.remove(&number);
            book.let_go(number, now, waker);
        }
        let pool = book.counts().bytes;
        let run = self.parts.iter().map(|part| blocks_of(&part.shape, pool)).min().unwrap_or(1) as usize;
        'all: for begin in (0..keys.len()).step_by(run) {
            let end = keys.len().min(begin + run);
            for (part, found) in self.parts.iter_mut().zip(&found) {
                let mut block = begin;
                while block < end {
                    if let Some(at) = found.get(block).copied().flatten() {
                        // What was read since this stage began is not asked for.
                        part.places.push(Place { at, is_unsure: !self.made.contains(&at.0) });
                        block += 1;
                        continue;
                    }
                    let rest = found.get(block..end).unwrap_or_default();
                    let missing = rest.iter().take_while(|at| at.is_none()).count();
                    let some = keys.get(block..block + missing).unwrap_or_default();
                    let depth = self.first_block.saturating_add((from + block) as u32);
                    let Some(number) = book.make((part.column, &part.shape), some, depth, self.class) else {
                        book.counts.no_room += (keys.len() - block) as u64;
                        break 'all;
                    };
                    self.extents.insert(number);
                    self.made.insert(number);
                    let place = |at| Place { at: (number, at), is_unsure: false };
                    part.places.extend((0..missing as u32).map(place));
                    block += missing;
                }
            }
        }
        let placed = self.parts.iter().map(|part| part.places.len()).min().unwrap_or(0);
        self.within = self.within.min(placed as u32);
        for part in &mut self.parts {
            part.ask(book, (&self.keys, from), now.plus(self.silence));
        }
    }

    /// Counts what has come since, and ends where no more will.
    fn go_on(&mut self, book: &mut Book, now: Nanos, waker: &Waker) {
        if self.is_over {
            return;
        }
        for part in &mut self.parts {
            match part.hear(book, &self.keys, waker) {
                Heard::Nothing => {}
                Heard::Gone(block) => self.again = Some(self.again.map_or(block, |again| again.min(block))),
                Heard::Unknown(block, why) if block < self.within => {
                    (self.within, self.unknown) = (block, Some(why));
                }
                Heard::Unknown(..) => {}
            }
        }
        if let Some(from) = self.again
            && self.parts.iter().all(|part| part.asked.is_none())
        {
            self.again = None;
            self.place(book, from, now, waker);
            book.begin_reads(now, waker);
        }
        let least = self.again.unwrap_or(u32::MAX).min(self.within);
        let mut next = State::Here;
        while self.staged < least && next == State::Here {
            let states = self.parts.iter().map(|part| part.state(book, self.staged));
            next = states.fold(State::Here, worse);
            self.staged += u32::from(next == State::Here);
        }
        self.is_over = self.staged >= self.within || next == State::Failed;
        if !self.is_over && now >= self.silent_at(book) && !planted!("silence-not-kept") {
            self.is_over = true;
            book.counts.silent += 1;
        }
        if self.is_over {
            if (self.staged as usize) < self.keys.len() {
                self.why = Some(self.reason(book));
            }
            // What lies behind is of no use to this request.
            let staged = self.staged as usize;
            let kept = self.parts.iter().flat_map(|part| part.places.iter().take(staged));
            let kept: BTreeSet<u64> = kept.map(|place| place.at.0).collect();
            let gone: Vec<u64> = self.extents.difference(&kept).copied().collect();
            gone.into_iter().for_each(|number| book.let_go(number, now, waker));
            self.extents = kept;
        }
    }

    /// Why the first block that is not staged is not.
    fn reason(&self, book: &Book) -> Reason {
        if let Some(why) = self.unknown.as_ref().filter(|_| self.staged == self.within) {
            return why.clone();
        }
        let places = self.parts.iter().map(|part| part.places.get(self.staged as usize));
        for place in places {
            let Some(Place { at: (number, at), .. }) = place else { return Reason::Busy(NO_ROOM) };
            if let Some(reason) = book.extent(*number).and_then(|extent| extent.reasons.get(at)) {
                return reason.clone();
            }
        }
        Reason::Busy(SILENT)
    }

    fn silent_at(&self, book: &Book) -> Nanos {
        book.heard_of(&self.extents).max(self.began).plus(self.silence)
    }
}

/// How it stands with a block of which these are the states in two columns.
fn worse(one: State, other: State) -> State {
    match (one, other) {
        (State::Failed, _) | (_, State::Failed) => State::Failed,
        (State::Coming, _) | (_, State::Coming) => State::Coming,
        (State::Here, State::Here) => State::Here,
    }
}

/// What the store said of blocks that were here.
enum Heard {
    /// Nothing yet, or that it has all of them.
    Nothing,
    /// From this block on it has not all of them.
    Gone(u32),
    /// It could not say, from this block on.
    Unknown(u32, Reason),
}

impl Part {
    /// Asks the store which of the blocks that are here it still has: what was deleted since or has expired is not served from memory.
    fn ask(&mut self, book: &mut Book, (keys, from): (&[BlockKey], usize), deadline: Nanos) {
        let mut blocks = Vec::new();
        for (block, Place { at, is_unsure }) in self.places.iter().enumerate().skip(from) {
            match (is_unsure, book.state(*at)) {
                (false, _) => book.counts.read += 1,
                (true, State::Here) => book.counts.hits += 1,
                (true, _) => book.counts.shared += 1,
            }
            if *is_unsure {
                blocks.push(block as u32);
            }
        }
        let asked: Vec<_> = blocks.iter().filter_map(|block| keys.get(*block as usize).copied()).collect();
        if !asked.is_empty() {
            self.asked = Some(Asked { blocks, answer: book.ask(self.column, &asked, deadline) });
        }
    }

    /// Takes in what the store says.
    fn hear(&mut self, book: &mut Book, keys: &[BlockKey], waker: &Waker) -> Heard {
        let Some(Asked { answer, .. }) = &mut self.asked else { return Heard::Nothing };
        let Poll::Ready(answer) = Pin::new(answer).poll(&mut Context::from_waker(waker)) else {
            return Heard::Nothing;
        };
        let blocks = self.asked.take().map(|asked| asked.blocks).unwrap_or_default();
        let reply = match answer {
            Ok(Ok(reply)) => reply,
            // They stay for a request of which the store can be asked.
            Ok(Err(error)) => return Heard::Unknown(blocks.first().copied().unwrap_or(0), error.0),
            Err(_) => {
                return Heard::Unknown(
                    blocks.first().copied().unwrap_or(0),
                    Reason::Busy("the store is closing"),
                );
            }
        };
        book.know(self.column.namespace, &reply);
        let mut heard = Heard::Nothing;
        let mut presence = reply.presence.into_iter();
        for block in blocks {
            let is_here = presence.next() == Some(Presence::Here);
            let Some(place) = self.places.get_mut(block as usize) else { continue };
            // One that was put again since a delete is another block.
            let is_there = is_here && book.is_current(place.at, reply.deletes);
            place.is_unsure = !is_there;
            if !is_there && let Some(key) = keys.get(block as usize) {
                book.withdraw(self.column, *key, place.at);
                if matches!(heard, Heard::Nothing) {
                    heard = Heard::Gone(block);
                }
            }
        }
        heard
    }

    /// How it stands with a block.
    fn state(&self, book: &Book, block: u32) -> State {
        match self.places.get(block as usize) {
            Some(place) if place.is_unsure => worse(State::Coming, book.state(place.at)),
            Some(place) => book.state(place.at),
            None => State::Failed,
        }
    }
}
