//! Which path reads which piece of one read.
//!
//! Pieces lie in the order of delivery. A path that has room takes the first piece that it can serve and that nobody was asked
//! for: faster paths have room more often, so nobody computes shares. A piece that will be late is asked for a second time, from
//! the path that brings it soonest: at the end of a read, when nothing else is left for a path, and earlier where the reader
//! waits for it. The first good copy counts; the other request is cancelled. No piece is asked for more than twice at once.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::paths::{PathId, Paths};

/// Paths that a read may have.
pub const READ_PATHS_MAX: usize = 64;
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

    fn without(self, path: PathId) -> Self {
        Self(self.0 & !Self::bit(path))
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

/// Which copies of a block there are: where, and which production of its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Copy<O> {
    /// The path that leads to it.
    pub path: PathId,
    /// Only copies of one origin are mixed within a block.
    pub origin: O,
}

/// Which production of a block is read, and by which paths: the one with the most paths, of equal ones the first named (so
/// callers name their own disks first).
pub fn choose_origin<O: core::marker::Copy + PartialEq>(copies: &[Copy<O>]) -> Option<(O, PathSet)> {
    let paths_of = |origin: O| {
        let same = copies.iter().filter(|copy| copy.origin == origin);
        same.fold(PathSet::default(), |paths, copy| paths.with(copy.path))
    };
    let mut best: Option<(O, PathSet)> = None;
    for copy in copies {
        let paths = paths_of(copy.origin);
        if best.is_none_or(|(_, known)| paths.0.count_ones() > known.0.count_ones()) {
            best = Some((copy.origin, paths));
        }
    }
    best
}

/// A piece of a read: some blocks of one layer, or whole blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
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
    is_here: bool,
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
    /// Another path was faster, or nobody asked: the bytes are of no use.
    Late,
}

/// What is known of one path in this read.
#[derive(Clone, Copy, Default, Debug)]
struct Progress {
    /// The first piece that it may not have been offered.
    next: usize,
    /// Bytes that it was ever asked for, and that it answered.
    asked: u64,
    answered: u64,
}

/// One read.
#[derive(Debug)]
pub struct Dealer {
    pieces: Vec<Piece>,
    states: Vec<State>,
    progress: Vec<Progress>,
    /// Pieces that are asked for and not here.
    under_way: BTreeSet<usize>,
    /// The first piece that is not here.
    first_missing: usize,
    here: usize,
    steps: u64,
}

impl Dealer {
    /// A read of these pieces, in the order of delivery.
    pub fn new(pieces: Vec<Piece>) -> Self {
        let states = vec![State::default(); pieces.len()];
        let progress = vec![Progress::default(); READ_PATHS_MAX];
        Self { pieces, states, progress, under_way: BTreeSet::new(), first_missing: 0, here: 0, steps: 0 }
    }

    /// Pieces at the beginning that are here: what may be delivered.
    pub fn deliverable(&self) -> usize {
        self.first_missing
    }

    /// Whether every piece is here.
    pub fn is_done(&self) -> bool {
        self.here == self.pieces.len()
    }

    /// The first piece that is not here and to which no path leads any more.
    pub fn lost(&self) -> Option<usize> {
        let missing = self.pieces.get(self.first_missing)?;
        let state = self.states.get(self.first_missing)?;
        (missing.paths.is_empty() && !state.is_asked()).then_some(self.first_missing)
    }

    /// Pieces and requests that were looked at so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The next piece that this path should read now, if any. It counts as asked for.
    pub fn take(&mut self, path: PathId, paths: &mut Paths, now: Duration) -> Option<usize> {
        let piece = self
            .urgent(path, paths, now)
            .or_else(|| self.fresh(path, paths, now))
            .or_else(|| self.late(path, paths, now))?;
        let bytes = self.pieces.get(piece)?.bytes;
        let progress = self.progress.get_mut(usize::from(path.0))?;
        progress.asked = progress.asked.saturating_add(bytes);
        let asked = Asked { path, at: now, mark: progress.asked };
        *self.states.get_mut(piece)?.asked.iter_mut().find(|one| one.is_none())? = Some(asked);
        self.under_way.insert(piece);
        paths.asked(path, bytes, now);
        Some(piece)
    }

    /// A good copy of a piece has come by this path.
    pub fn arrived(&mut self, piece: usize, path: PathId, paths: &mut Paths, now: Duration) -> Arrived {
        let Some(bytes) = self.answered(piece, path) else { return Arrived::Late };
        paths.arrived(path, bytes, now);
        let Some(state) = self.states.get_mut(piece).filter(|state| !state.is_here) else {
            return Arrived::Late;
        };
        state.is_here = true;
        let cancel = state.asked.iter().flatten().map(|asked| asked.path).next();
        self.under_way.remove(&piece);
        self.here += 1;
        while self.states.get(self.first_missing).is_some_and(|state| state.is_here) {
            self.first_missing += 1;
        }
        Arrived::First { cancel }
    }

    /// A piece did not come by this path, or what came was wrong: it is not asked for there again.
    pub fn failed(&mut self, piece: usize, path: PathId, paths: &mut Paths, now: Duration) {
        let Some(bytes) = self.answered(piece, path) else { return };
        paths.failed(path, bytes, now);
        if let Some(piece) = self.pieces.get_mut(piece) {
            piece.paths = piece.paths.without(path);
        }
        self.give_back(piece);
    }

    /// A request that was cancelled has ended without bytes. That says nothing about the path.
    pub fn cancelled(&mut self, piece: usize, path: PathId, paths: &mut Paths, now: Duration) {
        if let Some(bytes) = self.answered(piece, path) {
            paths.cancelled(path, bytes, now);
            self.give_back(piece);
        }
    }

    /// A path is gone: everything that it owes is asked for elsewhere.
    pub fn gone(&mut self, path: PathId, paths: &mut Paths, now: Duration) {
        let owed: Vec<usize> = self.under_way.iter().copied().collect();
        for piece in owed {
            self.cancelled(piece, path, paths, now);
        }
        for piece in &mut self.pieces {
            piece.paths = piece.paths.without(path);
        }
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

    /// A piece that nobody reads any more and that is not here is offered to every path again.
    fn give_back(&mut self, piece: usize) {
        if self.states.get(piece).is_some_and(|state| !state.is_here && !state.is_asked()) {
            self.under_way.remove(&piece);
            self.progress.iter_mut().for_each(|progress| progress.next = progress.next.min(piece));
        }
    }

    fn may(&self, piece: usize, path: PathId, paths: &Paths, now: Duration) -> bool {
        self.pieces
            .get(piece)
            .is_some_and(|piece| piece.paths.has(path) && paths.has_room(path, piece.bytes, now))
    }

    /// The first piece that nobody was asked for.
    fn fresh(&mut self, path: PathId, paths: &Paths, now: Duration) -> Option<usize> {
        let mut next = self.progress.get(usize::from(path.0))?.next;
        while let (Some(piece), Some(state)) = (self.pieces.get(next), self.states.get(next)) {
            self.steps += 1;
            if !state.is_here && !state.is_asked() && piece.paths.has(path) {
                break;
            }
            next += 1;
        }
        self.progress.get_mut(usize::from(path.0))?.next = next;
        self.may(next, path, paths, now).then_some(next)
    }

    /// What the reader waits for, if this path brings it much sooner than the one that was asked.
    fn urgent(&mut self, path: PathId, paths: &Paths, now: Duration) -> Option<usize> {
        self.second(self.first_missing, path, URGENT, paths, now)
    }

    /// The first piece that comes later from the path that was asked than from this one.
    fn late(&mut self, path: PathId, paths: &Paths, now: Duration) -> Option<usize> {
        let mut from = 0;
        while let Some(&piece) = self.under_way.range(from..).next() {
            if self.second(piece, path, 1.0, paths, now).is_some() {
                return Some(piece);
            }
            from = piece + 1;
        }
        None
    }

    /// The piece, if it is asked for once, and this path brings it so many times sooner than the one that was asked.
    fn second(
        &mut self,
        piece: usize,
        path: PathId,
        times: f64,
        paths: &Paths,
        now: Duration,
    ) -> Option<usize> {
        self.steps += 1;
        let state = self.states.get(piece).filter(|state| !state.is_here)?;
        let mut asked = state.asked.iter().flatten();
        let (first, None) = (*asked.next()?, asked.next()) else { return None };
        if first.path == path || !self.may(piece, path, paths, now) {
            return None;
        }
        let bytes = self.pieces.get(piece)?.bytes;
        let answered = self.progress.get(usize::from(first.path.0))?.answered;
        // The path may work for other reads as well; what it owes this one up to the piece is the least of it.
        let owed = first.mark.saturating_sub(answered);
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
