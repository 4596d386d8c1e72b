//! The course of a read: pieces are dealt to paths, and what has come is announced in order.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvarts_cluster::dealer::{Arrived, Dealer, PathSet, Piece};
use kvarts_cluster::paths::PathId;
use kvarts_contract::api::{Digests, Order, Placed, ReadEnd, ReadEvent, ReadProgress, ReadSink, ReadStream};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;
use kvarts_layout::plan::Tile;
use kvarts_layout::planted;

use super::bell::{Bell, ForRequest, News};
use super::cut::{Whole, after_first, piece_bytes, place};
use super::nodes::{Ended, Joined, NodePaths, Request};
use super::request::{self, Ask, Keeper, State};
use super::runner::{Runner, Task};
use super::scratch::Scratch;
use super::{MultiRead, OWN};
use crate::path::{self, Path};

/// Requests that a read may have under way, those included whose memory has not come back.
const ASKS_MAX: usize = 128;
/// Memory that a read may have for pieces that do not go to their places at once, and what of it is for those alone that are asked
/// for twice.
const SCRATCH_BYTES: u64 = 64 << 20;
const SCRATCH_BYTES_TWICE: u64 = 16 << 20;
/// How soon, while something is under way, it is looked again whether it will come late.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// A path of this read.
pub(super) struct Member {
    pub(super) number: PathId,
    pub(super) path: Arc<dyn Path>,
    /// How often in a row it had no room, since when, and until when it is not asked again for that.
    pub(super) busy: u32,
    pub(super) busy_since: Option<Nanos>,
    pub(super) pause: Nanos,
    /// When something came of it last.
    pub(super) heard: Nanos,
}

impl Member {
    fn new((number, path): (PathId, Arc<dyn Path>)) -> Self {
        let never = Nanos::default();
        Self { number, path, busy: 0, busy_since: None, pause: never, heard: never }
    }
}

/// A piece.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) tile: Tile,
    pub(super) bytes: u64,
    /// The request that has its places.
    pub(super) places_of: Option<u64>,
    /// The request whose scratch memory is all of it, while another one has its places.
    pub(super) parked: Option<u64>,
}

/// What decides whether another production of a block is read than the one that was met.
pub(super) struct Lost {
    /// The paths that were said to lead to each block.
    pub(super) said: Vec<PathSet>,
    /// Those that had it and failed.
    pub(super) broken: BTreeMap<u32, PathSet>,
    /// Whether its production was known from the beginning.
    pub(super) is_known: Vec<bool>,
}

impl Lost {
    fn of(what: &MultiRead, said: Vec<PathSet>) -> Self {
        let met = what.origins.met();
        let is_known = met.iter().skip(what.first as usize).take(said.len()).map(Option::is_some).collect();
        Self { said, broken: BTreeMap::new(), is_known }
    }
}

/// The layers with which pieces begin.
fn bands(parts: &[Part]) -> Vec<u32> {
    let mut bands: Vec<u32> = parts.iter().map(|part| part.tile.layers.start).collect();
    bands.sort_unstable();
    bands.dedup();
    bands
}

/// A read.
pub(super) struct Reading {
    pub(super) what: MultiRead,
    pub(super) layers: Range<u32>,
    pub(super) nodes: Arc<NodePaths>,
    joined: Joined,
    pub(super) members: Vec<Member>,
    runner: Arc<dyn Runner>,
    bell: Arc<Bell>,
    pub(super) dealer: Dealer,
    /// The pieces, as the dealer numbers them.
    pub(super) parts: Vec<Part>,
    /// Pieces that are not in their places and are wanted, in the order of delivery.
    pub(super) open: BTreeSet<(u64, usize)>,
    /// The longest of all.
    piece_bytes: u64,
    /// The layers with which pieces begin, where there are several blocks in one.
    pub(super) bands: Vec<u32>,
    pub(super) asks: BTreeMap<u64, Ask>,
    /// Parts of a piece whose places a request has that was made for all of it.
    pub(super) heirs: BTreeMap<u64, Vec<usize>>,
    next_ask: u64,
    pub(super) lost: Lost,
    /// Why a block was not had by a path, and whether the own disks had it.
    pub(super) reasons: BTreeMap<u32, (bool, Reason)>,
    pub(super) progress: ReadProgress,
    /// The next layer or block to be announced.
    pub(super) next: u32,
    sink: Arc<ReadSink>,
    scratch: Scratch,
    timer: Option<(Nanos, Task)>,
    /// When something came last.
    pub(super) moved: Nanos,
    /// When it is looked again which paths are late.
    pub(super) late_at: Nanos,
    /// An end was sent; memory has not come back.
    has_ended: bool,
    /// Events, requests and pieces that were looked at.
    pub(super) steps: u64,
}

impl Reading {
    /// A read that was checked.
    pub(super) fn new(
        what: MultiRead,
        nodes: Arc<NodePaths>,
        runner: Arc<dyn Runner>,
        sink: ReadSink,
    ) -> Self {
        let (bell, now, layers) = (Arc::new(Bell::default()), runner.now(), what.request.layers.clone());
        let count = what.request.keys.len() as u32;
        let order = what.request.order;
        let blocks = what.first..what.first.saturating_add(count);
        let said = what.copies.some(blocks.clone());
        let wanted = said.iter().fold(what.copies.last_path(), |all, paths| all.or(*paths));
        let (joined, members) = nodes.join(wanted, &bell);
        let there = members.iter().fold(PathSet::default(), |all, (number, _)| all.with(*number));
        let nowhere = blocks.clone().zip(&said).filter(|(_, paths)| paths.and(there).is_empty());
        what.copies.resort(nowhere.map(|(block, _)| block));
        let said = what.copies.some(blocks);
        let mut copies: Vec<PathSet> = said.into_iter().map(|paths| paths.and(there)).collect();
        let lost = Lost::of(&what, copies.clone());
        let mut progress = ReadProgress::new(order, count, layers.clone());
        for (block, key) in (0u32..).zip(&what.request.keys) {
            if copies.get(block as usize).is_none_or(|paths| paths.is_empty()) {
                progress.fail(block, Reason::NotHere(*key));
            }
        }
        if order == Order::Layers {
            copies.truncate(progress.good() as usize);
        }
        let total = what.shape.layers_bytes(&layers).saturating_mul(copies.len() as u64);
        let least = nodes.least_piece();
        let bytes = piece_bytes(total, nodes.slowest(&joined, now), least);
        let whole = Whole { shape: &what.shape, order, layers: layers.clone(), bytes, least };
        let (mut pieces, mut parts, mut open, mut longest) = (Vec::new(), Vec::new(), BTreeSet::new(), 0);
        for (number, (tile, paths)) in whole.cut(&copies).into_iter().enumerate() {
            let (place, bytes) = (place(order, &tile), tile.bytes(&what.shape));
            pieces.push(Piece { place, bytes, paths });
            open.insert((place, number));
            longest = bytes.max(longest);
            parts.push(Part { tile, bytes, places_of: None, parked: None });
        }
        // Where nothing is here nothing is announced.
        let begins = if order == Order::Layers { layers.start } else { 0 };
        let next = if open.is_empty() { u32::MAX } else { begins };
        let scratch = Scratch::new(nodes.scratch(), SCRATCH_BYTES);
        let dealer = Dealer::new(pieces).with_first(after_first(order, &layers));
        Self {
            layers,
            joined,
            members: members.into_iter().map(Member::new).collect(),
            runner,
            bell,
            dealer,
            bands: bands(&parts),
            parts,
            open,
            piece_bytes: longest,
            asks: BTreeMap::new(),
            heirs: BTreeMap::new(),
            next_ask: 0,
            lost,
            reasons: BTreeMap::new(),
            next,
            progress,
            sink: Arc::new(sink),
            scratch,
            timer: None,
            moved: now,
            late_at: now,
            has_ended: false,
            steps: 0,
            nodes,
            what,
        }
    }

    /// Goes on as far as it can. Ready when it has ended and all of its memory has come back, or its reader is gone.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            self.bell.listen(context.waker());
            if self.sink.poll_cancelled(context).is_ready() {
                return Poll::Ready(());
            }
            let now = self.runner.now();
            self.go_on(now);
            let has_places = self.asks.values().any(Ask::has_places);
            if self.has_ended {
                if has_places {
                    return Poll::Pending;
                }
                self.sink.send(ReadEvent::Released);
                return Poll::Ready(());
            }
            if self.open.is_empty() && !has_places {
                self.sink.send(ReadEvent::End(self.progress.end(None)));
                return Poll::Ready(());
            }
            if self.is_late(now) {
                if self.end_late(now) {
                    return Poll::Ready(());
                }
                continue;
            }
            if self.sleep(now, context).is_pending() {
                return Poll::Pending;
            }
        }
    }

    fn is_late(&self, now: Nanos) -> bool {
        self.what
            .request
            .deadline
            .is_some_and(|deadline| deadline <= now && !planted!("read-past-its-deadline"))
    }

    pub(super) fn now(&self) -> Nanos {
        self.runner.now()
    }

    /// Takes in what has come, deals what there is room for, announces what is whole.
    fn go_on(&mut self, now: Nanos) {
        loop {
            let mut heard = false;
            while let Some(news) = self.bell.take() {
                heard = true;
                self.steps += 1;
                match news {
                    News::Came(number) => self.fetch(number, now),
                    News::Released(number) => self.released(number, now),
                    News::Changed => self.look_for_gone(now),
                }
            }
            self.look_for_late(now);
            self.look_for_silent(now);
            self.settle_lost();
            let asked = !self.has_ended && !self.is_late(now) && self.deal(now);
            if !heard && !asked {
                break;
            }
        }
        self.deliver();
    }

    /// The deadline has passed: what was announced is what there is. Whether all memory has come back.
    fn end_late(&mut self, now: Nanos) -> bool {
        let under_way: Vec<u64> = self.asks.keys().copied().collect();
        under_way.into_iter().for_each(|number| self.stop(number, now));
        let held = self.asks.values().filter(|ask| ask.has_places());
        let held_bytes = held.map(|ask| ask.bytes).sum();
        self.asks.retain(|_, ask| ask.has_places());
        let end = self.progress.end(Some(&Reason::DeadlinePassed));
        self.sink.send(ReadEvent::End(ReadEnd { held_bytes, ..end }));
        self.has_ended = true;
        held_bytes == 0
    }

    /// Waits for the deadline, for a path that is to be asked again, and for what may turn out to be late.
    fn sleep(&mut self, now: Nanos, context: &mut Context<'_>) -> Poll<()> {
        let again = now.plus((now.since(self.moved) / 4).max(LOOK_AGAIN));
        let pauses = self.members.iter().map(|member| member.pause).filter(|pause| *pause > now);
        let deadline = self.what.request.deadline.filter(|_| !planted!("read-past-its-deadline"));
        let at = pauses.chain(deadline).min().map_or(again, |at| at.min(again));
        if self.timer.as_ref().is_none_or(|(known, _)| *known > at || *known <= now) {
            self.timer = Some((at, self.runner.sleep_until(at)));
        }
        let timer = self.timer.as_mut().map(|(_, timer)| timer.as_mut().poll(context));
        if timer == Some(Poll::Ready(())) {
            self.timer = None;
            return Poll::Ready(());
        }
        Poll::Pending
    }

    /// Whether the read does not need a piece any more.
    pub(super) fn is_unwanted(&self, tile: &Tile) -> bool {
        match self.progress.order() {
            Order::Layers => tile.blocks.start >= self.progress.good(),
            Order::Blocks => tile.blocks.clone().all(|block| self.progress.has_failed(block)),
        }
    }

    /// A piece is in its places, or the read does not need it any more.
    pub(super) fn settle(&mut self, piece: usize) {
        self.dealer.withdraw(piece);
        if let Some(part) = self.parts.get(piece) {
            self.open.remove(&(place(self.progress.order(), &part.tile), piece));
        }
    }

    /// Has each path take what it has room for; whether one took something. The path that brings the next piece soonest takes
    /// it: so what the reader waits for is not dealt to one path as long as it has room, or to one that is slow.
    fn deal(&mut self, now: Nanos) -> bool {
        let mut any = false;
        let has_turn = |(_, member): &(usize, &Member)| member.pause <= now;
        let mut open: Vec<(usize, PathId)> = self
            .members
            .iter()
            .enumerate()
            .filter(has_turn)
            .map(|(at, member)| (at, member.number))
            .collect();
        while self.asks.len() < ASKS_MAX {
            let (second, bytes) = (self.scratch.has(self.piece_bytes), self.piece_bytes);
            self.steps += 1 + open.len() as u64;
            let dealer = &mut self.dealer;
            let taken = self.nodes.deal(now, |paths, now| {
                loop {
                    let ends = |(_, number): &&(usize, PathId)| paths.expected(*number, bytes, now);
                    let next = open.iter().min_by(|one, other| ends(one).total_cmp(&ends(other)));
                    let (at, number) = *next?;
                    if let Some(piece) = dealer.take(number, second, paths, now) {
                        return Some((at, piece));
                    }
                    open.retain(|(_, other)| *other != number);
                }
            });
            let Some((at, piece)) = taken else { break };
            let asked = self.ask(piece, at, now);
            any |= asked;
            // What was asked for may have been refused already.
            let has_turn = self.members.get(at).is_some_and(|member| member.pause <= now);
            if !asked || !has_turn {
                open.retain(|(other, _)| *other != at);
            }
        }
        any
    }

    /// Asks a path for a piece that it took. False if there is no memory for it now.
    fn ask(&mut self, piece: usize, member: usize, now: Nanos) -> bool {
        let Some(Part { tile, bytes, places_of, .. }) = self.parts.get(piece).cloned() else { return false };
        let Some((path, number)) = self.members.get(member).map(|it| (Arc::clone(&it.path), it.number))
        else {
            return false;
        };
        let request = Request { piece, path: number, bytes };
        let taken_back = |read: &mut Self| {
            read.nodes.deal(now, |paths, now| read.dealer.cancelled(piece, number, paths, now));
        };
        if self.is_unwanted(&tile) {
            taken_back(self);
            self.settle(piece);
            return true;
        }
        if self.progress.order() == Order::Layers && tile.blocks.end > self.progress.good() {
            // Blocks behind the first that failed are of no use.
            taken_back(self);
            if self.dealer.is_asked(piece) {
                return false;
            }
            let paths = self.dealer.paths_of(piece);
            let blocks = tile.blocks.start..self.progress.good();
            self.replace(piece, [(Tile { blocks, layers: tile.layers }, paths)]);
            return true;
        }
        // A disk that hangs keeps its memory, and nothing takes it back: what others lead to as well does not go to its places.
        let others = self.dealer.paths_of(piece).without(number);
        let may_hang = number == OWN && !others.is_empty();
        let stalls = !others.is_empty() && self.nodes.deal(now, |paths, now| paths.is_stalled(number, now));
        let is_wanted = match places_of {
            Some(_) => !planted!("duplicate-into-the-places"),
            None => stalls || (may_hang && self.scratch.has(bytes.saturating_add(SCRATCH_BYTES_TWICE))),
        };
        let scratch = match is_wanted {
            false => None,
            true => {
                let memory = self.scratch.take(bytes).and_then(|memory| {
                    request::scratch(self.progress.order(), &self.what.shape, &tile, memory).ok()
                });
                if memory.is_none() && (stalls || places_of.is_some()) {
                    taken_back(self);
                    return false;
                }
                memory
            }
        };
        if self.dealer.asked_of(piece) > 1 {
            self.nodes.asked_twice(number);
        }
        self.begin(request, &tile, scratch, path.as_ref());
        self.fetch(self.next_ask - 1, now);
        true
    }

    /// Hands a request to its path.
    fn begin(&mut self, request: Request, tile: &Tile, scratch: Option<Placed>, path: &dyn Path) {
        let (number, at) = (self.next_ask, self.runner.now());
        self.next_ask += 1;
        let bell = Arc::clone(&self.bell);
        let keeper = Keeper { bell: Arc::clone(&bell), number, _sink: Arc::clone(&self.sink) };
        let digests = self.what.into.digests().map(|_| Digests::new(&self.what.shape, tile.block_count()));
        let stream = match self.piece(tile, scratch.as_ref(), digests.clone(), Arc::new(keeper)) {
            Ok(piece) => path.read(piece),
            Err(reason) => Err(reason),
        };
        let refused = |reason: Reason| {
            let failures = (0..tile.block_count()).map(|block| (block, reason.clone())).collect();
            ReadEnd { failures, ..ReadEnd::default() }
        };
        if scratch.is_none()
            && let Some(part) = self.parts.get_mut(request.piece)
        {
            part.places_of = Some(number);
        }
        let ask = Ask {
            piece: request.piece,
            path: request.path,
            bytes: request.bytes,
            state: stream.map_or_else(|reason| State::Failed(refused(reason)), State::Running),
            waker: Waker::from(Arc::new(ForRequest { bell, number })),
            scratch,
            digests,
            blocks: Vec::new(),
            is_released: false,
            at,
            patience: self.patience(request, at),
        };
        self.asks.insert(number, ask);
    }

    /// What a path is asked for.
    fn piece(
        &self,
        tile: &Tile,
        scratch: Option<&Placed>,
        digests: Option<Digests>,
        keeper: Arc<Keeper>,
    ) -> Result<path::Piece, Reason> {
        let MultiRead { request, into, origins, first, .. } = &self.what;
        let places = match scratch {
            Some(scratch) => scratch.clone(),
            None if tile.blocks == request.whole().blocks => into.clone(),
            None => into.select(&tile.blocks.clone().collect::<Vec<_>>())?,
        };
        let places = match digests {
            Some(digests) => places.with_digests(digests),
            None => places,
        };
        let request = request.tile(tile, places.kept_by(&(keeper as _)))?;
        Ok(path::Piece {
            request,
            origins: Arc::clone(origins),
            first: first.saturating_add(tile.blocks.start),
        })
    }

    /// Takes in what has come for a request.
    fn fetch(&mut self, number: u64, now: Nanos) {
        let end = loop {
            let Some(ask) = self.asks.get_mut(&number) else { return };
            let State::Running(stream) = &ask.state else { return };
            let event = poll(stream, &ask.waker);
            if event.is_ready()
                && let Some(member) = self.members.iter_mut().find(|member| member.number == ask.path)
            {
                member.heard = now;
            }
            match event {
                Poll::Pending => return,
                Poll::Ready(ReadEvent::Block(block)) => ask.blocks.push(block),
                Poll::Ready(ReadEvent::Layer { .. } | ReadEvent::Released) => {}
                Poll::Ready(ReadEvent::End(end)) => break end,
            }
            self.steps += 1;
        };
        let Some((ask, part)) = self.asks.get_mut(&number).and_then(|ask| {
            let part = self.parts.get(ask.piece)?;
            Some((ask, part))
        }) else {
            return;
        };
        let is_whole = end.usable_blocks == part.tile.block_count()
            && end.usable_layers == part.tile.layer_count()
            && end.failures.is_empty()
            && end.held_bytes == 0;
        if is_whole {
            self.came(number, now);
        } else {
            ask.state = State::Failed(end);
            if !ask.has_places() {
                self.failed(number, now);
            }
        }
    }

    /// All of a piece came.
    fn came(&mut self, number: u64, now: Nanos) {
        let Some(Ask { piece, path, bytes, .. }) = self.asks.get(&number) else { return };
        let request = Request { piece: *piece, path: *path, bytes: *bytes };
        self.moved = now;
        if let Some(member) = self.members.iter_mut().find(|member| member.number == request.path) {
            (member.busy, member.busy_since) = (0, None);
        }
        let arrived = self.nodes.arrived(&mut self.dealer, request, now);
        let Arrived::First { cancel } = arrived else {
            self.asks.remove(&number);
            return;
        };
        if let Some(other) = cancel {
            let is_other = |ask: &Ask| ask.piece == request.piece && ask.path == other && ask.is_counted();
            let found = self.asks.iter().find(|(_, ask)| is_other(ask)).map(|(number, _)| *number);
            found.into_iter().for_each(|number| self.stop(number, now));
        }
        let Some(ask) = self.asks.get_mut(&number) else { return };
        let Some(part) = self.parts.get_mut(request.piece) else { return };
        if ask.scratch.is_some() && part.places_of.is_some() {
            ask.state = State::Parked;
            part.parked = Some(number);
        } else {
            self.put_in_place(number);
        }
    }

    /// The bytes that a request brought are in their places, or are brought there now: no other request can write to them.
    fn put_in_place(&mut self, number: u64) {
        let Some(Ask { piece, scratch, digests, .. }) = self.asks.remove(&number) else { return };
        let Some(part) = self.parts.get_mut(piece) else { return };
        part.parked = None;
        let MultiRead { into, shape, .. } = &self.what;
        if let Some((from, to)) = digests.as_ref().zip(into.digests()) {
            request::copy_digests(shape, &part.tile, (from, to), |_| true);
        }
        let is_in_place = match &scratch {
            Some(scratch) => request::copy(shape, &part.tile, scratch, into),
            None => true,
        };
        if is_in_place {
            self.settle(piece);
        } else {
            let blocks = part.tile.blocks.clone();
            blocks.for_each(|block| self.fail(block, Reason::Bug("a piece has no destination buffer")));
            self.settle(piece);
        }
    }

    /// The memory of a request has been let go of.
    fn released(&mut self, number: u64, now: Nanos) {
        let Some(ask) = self.asks.get_mut(&number) else { return };
        ask.is_released = true;
        match ask.state {
            State::Failed(_) => self.failed(number, now),
            State::Stopped => self.free_places(number),
            State::Running(_) | State::Parked => {}
        }
    }

    /// A request that has ended is forgotten, and its places are free.
    pub(super) fn free_places(&mut self, number: u64) {
        let Some(Ask { piece, .. }) = self.asks.remove(&number) else { return };
        let heirs = self.heirs.remove(&number).unwrap_or_default();
        for piece in heirs.into_iter().chain([piece]) {
            let Some(part) = self.parts.get_mut(piece).filter(|part| part.places_of == Some(number)) else {
                continue;
            };
            part.places_of = None;
            if let Some(parked) = part.parked {
                self.put_in_place(parked);
            }
        }
    }

    /// The read does not need what a request brings. Its places are free once the path lets go of them.
    pub(super) fn stop(&mut self, number: u64, now: Nanos) {
        let Some(ask) = self.asks.get_mut(&number).filter(|ask| ask.is_counted()) else { return };
        let request = Request { piece: ask.piece, path: ask.path, bytes: ask.bytes };
        let stream = std::mem::replace(&mut ask.state, State::Stopped);
        let is_free = !ask.has_places();
        self.nodes.ended(&mut self.dealer, request, Ended::Cancelled, now);
        if is_free {
            self.free_places(number);
        }
        // Last: its path may let go of the memory at once.
        drop(stream);
    }

    /// Paths that were taken away are not asked any more.
    fn look_for_gone(&mut self, now: Nanos) {
        for path in self.nodes.gone(&self.joined).iter() {
            let Some(at) = self.members.iter().position(|member| member.number == path) else { continue };
            self.members.remove(at);
            let owed = self.asks.iter().filter(|(_, ask)| ask.path == path).map(|(number, _)| *number);
            let owed: Vec<u64> = owed.collect();
            owed.into_iter().for_each(|number| self.stop(number, now));
            let dealer = &mut self.dealer;
            self.nodes.deal(now, |paths, now| dealer.gone(path, paths, now));
        }
    }

    /// Announces what is whole.
    fn deliver(&mut self) {
        if self.has_ended {
            return;
        }
        let end = loop {
            let Some(&(_, first)) = self.open.first() else { break None };
            self.steps += 1;
            match self.parts.get(first).map(|part| &part.tile) {
                Some(tile) if self.is_unwanted(tile) && !self.dealer.is_asked(first) => self.settle(first),
                Some(tile) => break Some(tile),
                None => break None,
            }
        };
        match self.progress.order() {
            Order::Layers => {
                let end = end.map_or(self.layers.end, |tile| tile.layers.start);
                while self.next < end {
                    self.progress.layer_done();
                    self.announce(ReadEvent::Layer { layer: self.next, blocks: self.progress.good() });
                }
            }
            Order::Blocks => {
                let end = end.map_or(self.what.request.keys.len() as u32, |tile| tile.blocks.start);
                while self.next < end {
                    match !self.progress.has_failed(self.next) && self.progress.block_done(self.next) {
                        true => self.announce(ReadEvent::Block(self.next)),
                        false => self.next += 1,
                    }
                }
            }
        }
    }

    fn announce(&mut self, event: ReadEvent) {
        if let Some((block, reason)) = self.progress.first_failure() {
            self.sink.note_failure(block, &reason);
        }
        self.sink.send(event);
        self.next += 1;
    }
}

fn poll(stream: &ReadStream, waker: &Waker) -> Poll<ReadEvent> {
    stream.poll_next(&mut Context::from_waker(waker))
}

impl Drop for Reading {
    fn drop(&mut self) {
        let now = self.runner.now();
        let under_way: Vec<u64> = self.asks.keys().copied().collect();
        under_way.into_iter().for_each(|number| self.stop(number, now));
        self.nodes.leave(&self.joined);
    }
}
