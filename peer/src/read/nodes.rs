//! The paths of a node, for all its reads: what each of them leads to, how fast it is, and what waits there.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use kvarts_cluster::dealer::{Arrived, Dealer, PathSet, READ_PATHS_MAX};
use kvarts_cluster::paths::{PathId, Paths};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::{Kind, Reason};

use super::bell::{Bell, News};
use super::cut::PIECE_BYTES_LEAST;
use super::scratch::Pool;
use crate::path::Path;

/// The own disks of a node.
pub const OWN: PathId = PathId(0);

/// Memory that all reads of a node together may have for pieces that do not go to their places at once.
const SCRATCH_BYTES: u64 = 256 << 20;

/// What a path brought so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Brought {
    /// Pieces that came whole.
    pub pieces: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Pieces of which something was not there.
    pub missing: u64,
    /// Pieces that failed, or were not what they should be.
    pub failed: u64,
    /// Requests that were cancelled, because another path was faster or the read did not need them any more.
    pub cancelled: u64,
    /// Pieces that it was asked for while another path was asked for them as well.
    pub twice: u64,
    /// Pieces that did not come, by [`FAILURES`].
    pub failures: [u64; FAILURES.len()],
}

/// Why a piece did not come, as operators see it: the path had no room or no connection, the connection broke, the deadline
/// passed, bytes were damaged, or something else.
pub const FAILURES: [&str; 5] = ["busy", "broken", "late", "damaged", "other"];

/// Which of [`FAILURES`] a reason is.
pub(super) fn failure(reason: &Reason) -> usize {
    match (reason, reason.kind()) {
        (Reason::Busy(_), _) => 0,
        (_, Kind::Retry) => 1,
        (_, Kind::Deadline) => 2,
        (_, Kind::Corrupt) => 3,
        _ => 4,
    }
}

/// What an operator sees of a path.
#[derive(Clone, Debug)]
pub struct PathStatus {
    /// Its number.
    pub number: PathId,
    /// Where it leads.
    pub name: Arc<str>,
    /// Bytes a second while something is outstanding, if anything has come.
    pub rate: Option<f64>,
    /// Bytes that were asked for and have not come.
    pub outstanding: u64,
    /// Failures in a row.
    pub strikes: u32,
    /// Whether it failed too often and is left alone for a while.
    pub is_left_alone: bool,
    /// Reads that use it now.
    pub reads: u32,
    /// What it brought.
    pub brought: Brought,
}

struct Slot {
    name: Arc<str>,
    /// None once it was taken away: its number is free again when the last read that had it has ended.
    path: Option<Arc<dyn Path>>,
    brought: Brought,
}

struct State {
    slots: Vec<Option<Slot>>,
    paths: Paths,
    /// Reads, by number: they are told when a path goes.
    reads: BTreeMap<u64, Weak<Bell>>,
    next_read: u64,
}

/// The paths of a node. Number zero leads to its own disks.
pub struct NodePaths {
    state: Mutex<State>,
    scratch: Arc<Pool>,
    least_piece: u64,
}

/// Paths by their numbers.
pub(super) type Found = Vec<(PathId, Arc<dyn Path>)>;

/// A read among those of its node.
#[derive(Debug)]
pub(super) struct Joined {
    number: u64,
    used: PathSet,
}

impl NodePaths {
    /// The paths of a node that knows of no others.
    pub fn new(own: Arc<dyn Path>) -> Arc<Self> {
        Self::with(own, SCRATCH_BYTES, PIECE_BYTES_LEAST)
    }

    /// The same, with so much memory for pieces that do not go to their places at once.
    pub fn with_scratch(own: Arc<dyn Path>, bytes: u64) -> Arc<Self> {
        Self::with(own, bytes, PIECE_BYTES_LEAST)
    }

    /// The same, whose reads are cut into pieces of at least `bytes` bytes.
    pub fn with_pieces(own: Arc<dyn Path>, bytes: u64) -> Arc<Self> {
        Self::with(own, SCRATCH_BYTES, bytes)
    }

    fn with(own: Arc<dyn Path>, bytes: u64, least_piece: u64) -> Arc<Self> {
        let slots = (0..READ_PATHS_MAX).map(|_| None).collect();
        let paths = Paths::new(READ_PATHS_MAX as u16);
        let state = State { slots, paths, reads: BTreeMap::new(), next_read: 0 };
        let nodes = Arc::new(Self { state: Mutex::new(state), scratch: Pool::new(bytes), least_piece });
        nodes.add("own disks", own);
        nodes
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Counters and a list: a panic elsewhere leaves them whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more path; none if there are as many as there may be. Reads that are under way do not use it.
    pub fn add(&self, name: &str, path: Arc<dyn Path>) -> Option<PathId> {
        let mut state = self.lock();
        let free = state.slots.iter().position(Option::is_none)?;
        let number = PathId(u16::try_from(free).ok()?);
        *state.slots.get_mut(free)? =
            Some(Slot { name: name.into(), path: Some(path), brought: Brought::default() });
        state.paths.renew(number);
        Some(number)
    }

    /// Whether there may be one more.
    pub fn has_room(&self) -> bool {
        self.lock().slots.iter().any(Option::is_none)
    }

    /// Takes a path away. Reads that use it ask others for what it owes them.
    pub fn remove(&self, number: PathId) {
        let (reads, path) = {
            let mut state = self.lock();
            let path = state.slot(number).and_then(|slot| slot.path.take());
            state.free(number);
            (state.reads.values().filter_map(Weak::upgrade).collect::<Vec<_>>(), path)
        };
        reads.iter().for_each(|bell| bell.ring(News::Changed));
        // Outside the lock: it may be the last one who has it.
        drop(path);
    }

    /// What there is to say of each path.
    pub fn status(&self, now: Nanos) -> Vec<PathStatus> {
        let (state, now) = (self.lock(), since_start(now));
        let numbers = (0..).map(PathId).zip(&state.slots);
        let status = |(number, slot): (PathId, &Option<Slot>)| {
            let slot = slot.as_ref().filter(|slot| slot.path.is_some())?;
            Some(PathStatus {
                number,
                name: Arc::clone(&slot.name),
                rate: state.paths.rate(number, now),
                outstanding: state.paths.outstanding(number),
                strikes: state.paths.strikes(number),
                is_left_alone: !state.paths.is_usable(number, now),
                reads: state.paths.readers(number),
                brought: slot.brought,
            })
        };
        numbers.filter_map(status).collect()
    }

    /// How short a piece may be.
    pub(super) fn least_piece(&self) -> u64 {
        self.least_piece
    }

    /// Memory for pieces that do not go to their places at once, of which all reads take.
    pub(super) fn scratch(&self) -> &Arc<Pool> {
        &self.scratch
    }

    /// A read begins that may use these paths: those of them that there are.
    pub(super) fn join(&self, wanted: PathSet, bell: &Arc<Bell>) -> (Joined, Found) {
        let mut state = self.lock();
        let mut found = Vec::new();
        for number in wanted.iter() {
            if let Some(path) = state.slot(number).and_then(|slot| slot.path.clone()) {
                state.paths.entered(number);
                found.push((number, path));
            }
        }
        let used = found.iter().fold(PathSet::default(), |used, (number, _)| used.with(*number));
        let number = state.next_read;
        state.next_read += 1;
        state.reads.insert(number, Arc::downgrade(bell));
        (Joined { number, used }, found)
    }

    /// A read has ended.
    pub(super) fn leave(&self, joined: &Joined) {
        let mut state = self.lock();
        state.reads.remove(&joined.number);
        for number in joined.used.iter() {
            state.paths.left(number);
            state.free(number);
        }
    }

    /// Which of these paths are not there any more.
    pub(super) fn gone(&self, of: &Joined) -> PathSet {
        let mut state = self.lock();
        let mut gone = of.used;
        for number in of.used.iter() {
            if state.slot(number).is_some_and(|slot| slot.path.is_some()) {
                gone = gone.without(number);
            }
        }
        gone
    }

    /// How fast the slowest of these paths is of those whose rate is known.
    pub(super) fn slowest(&self, of: &Joined, now: Nanos) -> Option<f64> {
        let (state, now) = (self.lock(), since_start(now));
        of.used.iter().filter_map(|number| state.paths.rate(number, now)).reduce(f64::min)
    }

    /// Has a read deal its pieces to paths.
    pub(super) fn deal<T>(&self, now: Nanos, with: impl FnOnce(&mut Paths, Duration) -> T) -> T {
        with(&mut self.lock().paths, since_start(now))
    }

    /// A piece came whole.
    pub(super) fn arrived(&self, dealer: &mut Dealer, request: Request, now: Nanos) -> Arrived {
        let Request { piece, path, bytes } = request;
        let mut state = self.lock();
        if let Some(slot) = state.slot(path) {
            slot.brought.pieces += 1;
            slot.brought.bytes += bytes;
        }
        dealer.arrived(piece, path, &mut state.paths, since_start(now))
    }

    /// A path is asked for a piece that another one was asked for.
    pub(super) fn asked_twice(&self, path: PathId) {
        if let Some(slot) = self.lock().slot(path) {
            slot.brought.twice += 1;
        }
    }

    /// Why a piece did not come.
    pub(super) fn note_failure(&self, path: PathId, failure: usize) {
        if let Some(slot) = self.lock().slot(path)
            && let Some(count) = slot.brought.failures.get_mut(failure)
        {
            *count += 1;
        }
    }

    /// A piece did not come.
    pub(super) fn ended(&self, dealer: &mut Dealer, request: Request, how: Ended, now: Nanos) {
        let (Request { piece, path, .. }, now) = (request, since_start(now));
        let mut state = self.lock();
        if let Some(Slot { brought, .. }) = state.slot(path) {
            match how {
                Ended::Failed | Ended::Again { .. } => brought.failed += 1,
                Ended::Missing => brought.missing += 1,
                Ended::Cancelled => brought.cancelled += 1,
            }
        }
        match how {
            Ended::Failed => dealer.failed(piece, path, &mut state.paths, now),
            Ended::Missing => dealer.missing(piece, path, &mut state.paths, now),
            Ended::Cancelled | Ended::Again { is_fault: false } => {
                dealer.cancelled(piece, path, &mut state.paths, now);
            }
            Ended::Again { is_fault: true } => {
                dealer.cancelled(piece, path, &mut state.paths, now);
                state.paths.failed(path, 0, now);
            }
        }
    }
}

/// A piece that a path was asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) piece: usize,
    pub(super) path: PathId,
    pub(super) bytes: u64,
}

/// Why a piece did not come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ended {
    /// The path failed.
    Failed,
    /// It is not there.
    Missing,
    /// It may be there all the same.
    Again {
        /// The path failed.
        is_fault: bool,
    },
    /// The read does not need it any more.
    Cancelled,
}

impl State {
    fn slot(&mut self, number: PathId) -> Option<&mut Slot> {
        self.slots.get_mut(usize::from(number.0))?.as_mut()
    }

    /// Frees the number of a path that was taken away and that no read has any more.
    fn free(&mut self, number: PathId) {
        let is_gone = self.slot(number).is_some_and(|slot| slot.path.is_none());
        if is_gone
            && self.paths.readers(number) == 0
            && let Some(slot) = self.slots.get_mut(usize::from(number.0))
        {
            *slot = None;
        }
    }
}

/// Rates are measured by one clock, from its start on.
fn since_start(now: Nanos) -> Duration {
    now.since(Nanos::default())
}

impl fmt::Debug for NodePaths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        let names = state.slots.iter().flatten().filter(|slot| slot.path.is_some()).map(|slot| &slot.name);
        f.debug_list().entries(names).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::Piece;
    use kvarts_contract::api::ReadStream;

    struct Nowhere;

    impl Path for Nowhere {
        fn read(&self, _: Piece) -> Result<ReadStream, Reason> {
            Err(Reason::Empty)
        }
    }

    #[test]
    fn the_number_of_a_path_is_not_given_out_again_while_a_read_has_it() {
        let nodes = NodePaths::new(Arc::new(Nowhere));
        let peer = nodes.add("peer", Arc::new(Nowhere)).unwrap();
        let bell = Arc::new(Bell::default());
        let wanted = PathSet::default().with(OWN).with(peer).with(PathId(9));
        let (joined, paths) = nodes.join(wanted, &bell);
        assert_eq!(paths.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [OWN, peer]);
        assert!(nodes.gone(&joined).is_empty());
        nodes.remove(peer);
        assert_eq!((bell.take(), nodes.gone(&joined).iter().next()), (Some(News::Changed), Some(peer)));
        assert_ne!(nodes.add("another", Arc::new(Nowhere)), Some(peer));
        assert_eq!(nodes.status(Nanos(0)).len(), 2);
        nodes.leave(&joined);
        assert_eq!(nodes.add("a third", Arc::new(Nowhere)), Some(peer));
        let count = std::iter::from_fn(|| nodes.add("more", Arc::new(Nowhere))).count();
        assert_eq!(count + 3, READ_PATHS_MAX);
    }
}
