//! Which path reads which piece of one read.
//!
//! Pieces lie in the order of delivery. A path that has room takes the first piece that it can serve and that no path was asked
//! for: faster paths have room more often, so no shares are computed. A piece that will be late is asked for a second time, from
//! the path that brings it soonest: at the end of a read, when nothing else is left for a path, and earlier where the reader
//! waits for it. The first good copy counts; the other request is cancelled. No piece is asked for more than twice at once.
//!
//! Until what the reader waits for first is here, a path has little else to do: disks read side by side what they were asked for,
//! so what is asked for behind it comes at its cost.
//!
//! A piece may be cut while no path is asked for it: where some of its blocks turn out to be elsewhere than the others.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::paths::{PathId, Paths};

/// Paths that a read may have.
pub const READ_PATHS_MAX: usize = 64;
/// Of a path's queue the part that may be filled with what comes after the first layer while that is not here: enough that the path
/// is not idle then.
const BESIDE_FIRST: u64 = 4;
/// How much later than from another path a piece must come before it is asked for twice although there is other work.
const URGENT: f64 = 3.0;

/// Some of the paths of a node, by number.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PathSet(u64);

impl PathSet {
    /// With one more; paths past [`READ_PATHS_MAX`] are not used.
    #[must_use]
    pub fn with(self, path: PathId) -> Self {
        Self(self.0 | Self::bit(path))
    }

    /// With one less.
    #[must_use]
    pub fn without(self, path: PathId) -> Self {
        Self(self.0 & !Self::bit(path))
    }

    /// Those that are in both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Those that are in either.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// All of them, the lowest number first.
    pub fn iter(self) -> impl Iterator<Item = PathId> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let lowest = (left != 0).then(|| left.trailing_zeros() as u16)?;
            left &= left - 1;
            Some(PathId(lowest))
        })
    }

    /// Whether this path is among them.
    pub fn has(self, path: PathId) -> bool {
        self.0 & Self::bit(path) != 0
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    fn bit(path: PathId) -> u64 {
        if usize::from(path.0) < READ_PATHS_MAX { 1 << path.0 } else { 0 }
    }
}

/// A piece of a read: some blocks of one layer, or whole blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Where it stands in the order of delivery.
    pub place: u64,
    /// How long it is.
    pub bytes: u64,
    /// Which paths lead to it.
    pub paths: PathSet,
}

/// A request for a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Asked {
    path: PathId,
    at: Duration,
    /// Bytes that the path had ever been asked for in this read, this piece's included: paths answer in order.
    mark: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct State {
    asked: [Option<Asked>; 2],
    /// It is here, or the read does not need it any more, or other pieces stand for it.
    is_settled: bool,
}

impl State {
    fn is_asked(&self) -> bool {
        self.asked.iter().any(Option::is_some)
    }

    fn take(&mut self, path: PathId) -> bool {
        let found = self.asked.iter_mut().find(|one| one.is_some_and(|asked| asked.path == path));
        found.is_some_and(|one| one.take().is_some())
    }
}

/// What an arrival means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrived {
    /// It is the first copy. The other path need not send its own.
    First {
        /// The path that was asked as well.
        cancel: Option<PathId>,
    },
    /// Another path was faster, or this one was not asked: the bytes are of no use.
    Late,
}

/// What is known of one path in this read.
#[derive(Clone, Default, Debug)]
struct Progress {
    /// Of the pieces of the beginning, the first that it may not have been offered.
    next: usize,
    /// Pieces before that which are to be offered again, and pieces that were cut, by their places.
    again: BTreeSet<(u64, usize)>,
    /// Bytes that it was ever asked for, and that it answered.
    asked: u64,
    answered: u64,
}

/// One read.
#[derive(Debug)]
pub struct Dealer {
    pieces: Vec<Piece>,
    states: Vec<State>,
    /// How many pieces there were at the beginning, in the order of their places.
    beginning: usize,
    /// Where what the reader waits for first ends, and how many pieces of it are not here.
    first: u64,
    first_open: usize,
    progress: Vec<Progress>,
    /// Pieces that are asked for and not here, by their places.
    under_way: BTreeSet<(u64, usize)>,
    settled: usize,
    /// Pieces to which no path leads any more.
    lost: Vec<usize>,
    steps: u64,
}

impl Dealer {
    /// A read of these pieces, in the order of delivery.
    pub fn new(pieces: Vec<Piece>) -> Self {
        let states = vec![State::default(); pieces.len()];
        let progress = vec![Progress::default(); READ_PATHS_MAX];
        let lost = (0..pieces.len()).filter(|at| pieces.get(*at).is_some_and(|piece| piece.paths.is_empty()));
        let (lost, beginning) = (lost.collect(), pieces.len());
        let (under_way, first, first_open) = (BTreeSet::new(), 0, 0);
        Self { pieces, states, beginning, first, first_open, progress, under_way, settled: 0, lost, steps: 0 }
    }

    /// The same, where the reader waits first for what has its place before this one.
    #[must_use]
    pub fn with_first(mut self, first: u64) -> Self {
        self.first = first;
        self.first_open = self.pieces.iter().filter(|piece| piece.place < first).count();
        self
    }

    /// Whether every piece is here or not wanted any more.
    pub fn is_done(&self) -> bool {
        self.settled == self.pieces.len()
    }

    /// A piece to which no path leads any more and that no path is asked for: told once.
    pub fn take_lost(&mut self) -> Option<usize> {
        while let Some(piece) = self.lost.pop() {
            if self.is_lost(piece) {
                return Some(piece);
            }
        }
        None
    }

    /// Whether a path is asked for a piece.
    pub fn is_asked(&self, piece: usize) -> bool {
        self.states.get(piece).is_some_and(State::is_asked)
    }

    /// How many paths are asked for a piece.
    pub fn asked_of(&self, piece: usize) -> usize {
        self.states.get(piece).map_or(0, |state| state.asked.iter().flatten().count())
    }

    /// The paths that are known to lead to a piece.
    pub fn paths_of(&self, piece: usize) -> PathSet {
        self.pieces.get(piece).map_or(PathSet::default(), |piece| piece.paths)
    }

    /// Pieces and requests that were looked at so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The next piece that this path should read now, if any. It counts as asked for. A piece that another path was asked for
    /// is only given where there may be `second` requests.
    pub fn take(&mut self, path: PathId, second: bool, paths: &mut Paths, now: Duration) -> Option<usize> {
        let urgent = self.urgent(path, second, paths, now);
        let piece = match urgent.or_else(|| self.fresh(path)) {
            Some(piece) => self.may(piece, path, paths, now).then_some(piece)?,
            None => self.late(path, second, paths, now)?,
        };
        let Piece { bytes, place, .. } = *self.pieces.get(piece)?;
        let progress = self.progress.get_mut(usize::from(path.0))?;
        progress.asked = progress.asked.saturating_add(bytes);
        let asked = Asked { path, at: now, mark: progress.asked };
        *self.states.get_mut(piece)?.asked.iter_mut().find(|one| one.is_none())? = Some(asked);
        self.under_way.insert((place, piece));
        paths.asked(path, bytes, now);
        Some(piece)
    }

    /// A good copy of a piece has come by this path.
    pub fn arrived(&mut self, piece: usize, path: PathId, paths: &mut Paths, now: Duration) -> Arrived {
        let Some(bytes) = self.answered(piece, path) else { return Arrived::Late };
        paths.arrived(path, bytes, now);
        let Some(state) = self.states.get(piece).filter(|state| !state.is_settled) else {
            return Arrived::Late;
        };
        let cancel = state.asked.iter().flatten().map(|asked| asked.path).next();
        self.withdraw(piece);
        Arrived::First { cancel }
    }

    /// A piece did not come by this path, or what came was wrong: it is not asked for there again.
    pub fn failed(&mut self, piece: usize, path: PathId, paths: &mut Paths, now: Duration) {
        let Some(bytes) = self.answered(piece, path) else { return };
        paths.failed(path, bytes, now);
        self.without(piece, path);
        self.give_back(piece);
    }

    /// A piece is not where this path leads: it is not asked for there again. That says nothing else about the path.
    pub fn missing(&mut self, piece: usize, path: PathId, paths: &mut Paths, now: Duration) {
        let Some(bytes) = self.answered(piece, path) else { return };
        paths.cancelled(path, bytes, now);
        self.without(piece, path);
        self.give_back(piece);
    }

    /// A request that was cancelled has ended without bytes. That says nothing about the path.
    pub fn cancelled(&mut self, piece: usize, path: PathId, paths: &mut Paths, now: Duration) {
        if let Some(bytes) = self.answered(piece, path) {
            paths.cancelled(path, bytes, now);
            self.give_back(piece);
        }
    }

    /// A path does not lead to a piece any more. Who was asked may still answer.
    pub fn without(&mut self, piece: usize, path: PathId) {
        if let Some(found) = self.pieces.get_mut(piece) {
            found.paths = found.paths.without(path);
        }
        self.note_lost(piece);
    }

    /// A path is gone: everything that it owes is asked for elsewhere.
    pub fn gone(&mut self, path: PathId, paths: &mut Paths, now: Duration) {
        let owed: Vec<usize> = self.under_way.iter().map(|(_, piece)| *piece).collect();
        for piece in owed {
            self.cancelled(piece, path, paths, now);
        }
        (0..self.pieces.len()).for_each(|piece| self.without(piece, path));
    }

    /// The read does not need a piece any more. Requests for it stay counted until they are answered or cancelled.
    pub fn withdraw(&mut self, piece: usize) {
        let Some((state, known)) = self.states.get_mut(piece).zip(self.pieces.get(piece)) else { return };
        if !std::mem::replace(&mut state.is_settled, true) {
            self.settled += 1;
            self.first_open -= usize::from(known.place < self.first);
            self.under_way.remove(&(known.place, piece));
        }
    }

    /// Other pieces stand for one that no path is asked for: the number of the first of them. They follow it in the order of
    /// delivery, before what followed it.
    pub fn replace(&mut self, piece: usize, with: impl IntoIterator<Item = Piece>) -> usize {
        self.withdraw(piece);
        let first = self.pieces.len();
        for piece in with {
            let number = self.pieces.len();
            self.first_open += usize::from(piece.place < self.first);
            self.pieces.push(piece);
            self.states.push(State::default());
            self.offer_again(number);
            self.note_lost(number);
        }
        first
    }

    /// A path has answered a request; how long the piece is, if there was such a request.
    fn answered(&mut self, piece: usize, path: PathId) -> Option<u64> {
        let bytes = self.pieces.get(piece)?.bytes;
        if !self.states.get_mut(piece)?.take(path) {
            return None;
        }
        self.progress.get_mut(usize::from(path.0))?.answered += bytes;
        Some(bytes)
    }

    /// A piece that no path is asked for any more and that is not here is offered to every path again.
    fn give_back(&mut self, piece: usize) {
        if self.states.get(piece).is_some_and(|state| !state.is_settled && !state.is_asked()) {
            self.offer_again(piece);
            self.note_lost(piece);
        }
    }

    fn offer_again(&mut self, piece: usize) {
        let Some(Piece { place, paths, .. }) = self.pieces.get(piece).copied() else { return };
        self.under_way.remove(&(place, piece));
        for path in paths.iter() {
            self.steps += 1;
            if let Some(progress) = self.progress.get_mut(usize::from(path.0)) {
                progress.again.insert((place, piece));
            }
        }
    }

    fn is_lost(&self, piece: usize) -> bool {
        let state = self.states.get(piece).filter(|state| !state.is_settled && !state.is_asked());
        state.is_some() && self.paths_of(piece).is_empty()
    }

    fn note_lost(&mut self, piece: usize) {
        if self.is_lost(piece) {
            self.lost.push(piece);
        }
    }

    /// Bytes that a path owes this read.
    fn owes(&self, path: PathId) -> u64 {
        let progress = self.progress.get(usize::from(path.0));
        progress.map_or(0, |progress| progress.asked.saturating_sub(progress.answered))
    }

    /// Whether a path may be asked for a piece now. One that is left alone is asked where no other path is left.
    fn may(&self, piece: usize, path: PathId, paths: &Paths, now: Duration) -> bool {
        let Some(piece) = self.pieces.get(piece).filter(|piece| piece.paths.has(path)) else { return false };
        let is_last = || !piece.paths.iter().any(|other| paths.is_usable(other, now));
        let is_beside = self.first_open > 0 && piece.place >= self.first;
        let part = if is_beside { BESIDE_FIRST } else { 1 };
        (paths.is_usable(path, now) || is_last())
            && paths.has_room(path, piece.bytes, (self.owes(path), part), now)
    }

    /// Whether a path may be offered a piece: it leads there, and no path is asked for the piece.
    fn is_open(&mut self, piece: usize, path: PathId) -> bool {
        self.steps += 1;
        let state = self.states.get(piece).zip(self.pieces.get(piece));
        state.is_some_and(|(state, piece)| !state.is_settled && !state.is_asked() && piece.paths.has(path))
    }

    /// The first piece that this path may be offered.
    fn fresh(&mut self, path: PathId) -> Option<usize> {
        let at = usize::from(path.0);
        let again = loop {
            let Some(&first) = self.progress.get(at)?.again.first() else { break None };
            if self.is_open(first.1, path) {
                break Some(first);
            }
            self.progress.get_mut(at)?.again.remove(&first);
        };
        let mut next = self.progress.get(at)?.next;
        while next < self.beginning && !self.is_open(next, path) {
            next += 1;
        }
        self.progress.get_mut(at)?.next = next;
        let in_order = (next < self.beginning).then_some(next);
        let in_order = in_order.and_then(|piece| Some((self.pieces.get(piece)?.place, piece)));
        again.into_iter().chain(in_order).min().map(|(_, piece)| piece)
    }

    /// What the reader waits for, if this path brings it much sooner than the one that was asked.
    fn urgent(&mut self, path: PathId, second: bool, paths: &Paths, now: Duration) -> Option<usize> {
        let &(_, first) = self.under_way.first().filter(|_| second)?;
        self.second(first, path, URGENT, paths, now)
    }

    /// The first piece that comes later from the path that was asked than from this one.
    fn late(&mut self, path: PathId, second: bool, paths: &Paths, now: Duration) -> Option<usize> {
        let mut from = (0, 0);
        while let Some(&(place, piece)) = self.under_way.range(from..).next().filter(|_| second) {
            if self.second(piece, path, 1.0, paths, now).is_some() {
                return Some(piece);
            }
            from = (place, piece + 1);
        }
        None
    }

    /// The piece, if one path is asked for it, and this path brings it more than `times` times sooner than that one.
    fn second(
        &mut self,
        piece: usize,
        path: PathId,
        times: f64,
        paths: &Paths,
        now: Duration,
    ) -> Option<usize> {
        self.steps += 1;
        let state = self.states.get(piece).filter(|state| !state.is_settled)?;
        let mut asked = state.asked.iter().flatten();
        let (first, None) = (*asked.next()?, asked.next()) else { return None };
        if first.path == path || !self.may(piece, path, paths, now) {
            return None;
        }
        let bytes = self.pieces.get(piece)?.bytes;
        let answered = self.progress.get(usize::from(first.path.0))?.answered;
        // The path may work for other reads as well; what it owes this one up to the piece is the least of it. What was asked
        // for behind the piece may have been cancelled.
        let owed = first.mark.saturating_sub(answered).max(bytes);
        let theirs = match paths.rate(first.path, now) {
            Some(rate) => owed as f64 / rate,
            // From where nothing has ever come it takes as long again.
            None => now.saturating_sub(first.at).as_secs_f64(),
        };
        let ours = paths.time_of(path, bytes, now)?.as_secs_f64();
        (theirs > ours * times).then_some(piece)
    }
}

#[cfg(test)]
mod tests;
