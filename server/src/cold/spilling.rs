//! What a sweep has in memory to be copied, and what is deleted meanwhile: that is never named in the bucket.
//!
//! A sweep lists the blocks that go next, reads them, and names their copies some time later; a delete takes the blocks out of the store,
//! and the copies out of the bucket then. What is being deleted when a sweep begins, or later, is not copied by that sweep,
//! wherever it has got to: it may have listed a block, or read it, before the store deleted it or gave it less time to live. The manifest
//! would keep it from being named too, and at last; here it is neither read nor put.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_cold::withdraw::Deleted;
use kvarts_layout::{BlockKey, NamespaceId};

/// Less than a pack of a namespace is copied only when nothing of it was for so long.
const LITTLE_EVERY: Duration = Duration::from_secs(15 * 60);
/// Keys of deleted blocks that are remembered during a sweep; of a namespace that has more it copies nothing more.
const GONE_MOST: usize = 1 << 16;

/// Blocks of a namespace that are not to be copied.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Gone {
    Keys(BTreeSet<BlockKey>),
    All,
}

impl Gone {
    fn of(deleted: &Deleted) -> Self {
        match deleted {
            Deleted::Keys(keys) | Deleted::Later(keys, ..) if keys.len() <= GONE_MOST => {
                Self::Keys(keys.iter().copied().collect())
            }
            // What descends from a key is not known here.
            Deleted::Keys(_) | Deleted::Later(..) | Deleted::Prefix(_) | Deleted::Namespace => Self::All,
        }
    }

    fn join(&mut self, other: &Self) {
        match (&mut *self, other) {
            (Self::Keys(own), Self::Keys(others)) if own.len() + others.len() <= GONE_MOST => {
                own.extend(others.iter().copied());
            }
            _ => *self = Self::All,
        }
    }

    fn has(&self, key: &BlockKey) -> bool {
        match self {
            Self::Keys(keys) => keys.contains(key),
            Self::All => true,
        }
    }
}

#[derive(Debug, Default)]
struct State {
    /// Deletes that are under way: the store may have their blocks yet.
    deletes: BTreeMap<u64, (NamespaceId, Gone)>,
    next: u64,
    /// While there is a sweep, what was being deleted when it began, or has been since.
    gone: Option<BTreeMap<NamespaceId, Gone>>,
    /// Namespaces of which the sweep has blocks in memory.
    open: BTreeSet<NamespaceId>,
    /// When something of a namespace was copied last.
    pushed: BTreeMap<NamespaceId, Duration>,
}

impl State {
    fn note(&mut self, namespace: NamespaceId, more: &Gone) {
        let Some(gone) = &mut self.gone else { return };
        gone.entry(namespace).and_modify(|gone| gone.join(more)).or_insert_with(|| more.clone());
    }
}

/// What the sweep has, and what was deleted meanwhile.
#[derive(Debug, Default)]
pub(super) struct Spilling {
    state: Mutex<State>,
    /// One sweep at a time.
    turn: tokio::sync::Mutex<()>,
}

/// A delete that is under way, until the store has carried it out.
#[derive(Debug)]
pub(super) struct Withdrawing<'a> {
    spilling: &'a Spilling,
    number: u64,
}

impl Drop for Withdrawing<'_> {
    fn drop(&mut self) {
        self.spilling.state().deletes.remove(&self.number);
    }
}

/// A sweep that is under way. At its end, however that comes, it has nothing in memory any more.
#[derive(Debug)]
pub(super) struct Sweep<'a> {
    spilling: &'a Spilling,
    _turn: tokio::sync::MutexGuard<'a, ()>,
}

impl Drop for Sweep<'_> {
    fn drop(&mut self) {
        let mut state = self.spilling.state();
        state.gone = None;
        state.open.clear();
    }
}

impl Sweep<'_> {
    /// It is about to have blocks of this namespace in memory.
    pub(super) fn open(&self, namespace: NamespaceId) {
        self.spilling.state().open.insert(namespace);
    }

    /// It has none any more.
    pub(super) fn close(&self, namespace: NamespaceId) {
        self.spilling.state().open.remove(&namespace);
    }

    /// It has copied blocks of this namespace.
    pub(super) fn has_pushed(&self, namespace: NamespaceId, now: Duration) {
        let mut state = self.spilling.state();
        state.pushed.retain(|_, at| now.saturating_sub(*at) < LITTLE_EVERY);
        state.pushed.insert(namespace, now);
    }

    /// Whether a block is not to be copied.
    pub(super) fn is_gone(&self, namespace: NamespaceId, key: &BlockKey) -> bool {
        let state = self.spilling.state();
        let gone = state.gone.as_ref().and_then(|gone| gone.get(&namespace));
        gone.is_some_and(|gone| gone.has(key))
    }
}

impl Spilling {
    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is one step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A sweep begins, before it looks at the store.
    pub(super) async fn begin(&self) -> Sweep<'_> {
        // ends: the sweep before it: reads of `READ_TIMEOUT`, requests of their time (`patience`)
        let turn = self.turn.lock().await;
        let mut state = self.state();
        let deletes: Vec<(NamespaceId, Gone)> = state.deletes.values().cloned().collect();
        state.gone = Some(BTreeMap::new());
        deletes.iter().for_each(|(namespace, gone)| state.note(*namespace, gone));
        Sweep { spilling: self, _turn: turn }
    }

    /// Whether less than a pack of a namespace may be copied.
    pub(super) fn may_push_little(&self, namespace: NamespaceId, now: Duration) -> bool {
        let state = self.state();
        state.pushed.get(&namespace).is_none_or(|at| now.saturating_sub(*at) >= LITTLE_EVERY)
    }

    /// Something is about to be deleted: no sweep names it that is under way now, or begins before the store has deleted it.
    pub(super) fn withdraw(&self, namespace: NamespaceId, deleted: &Deleted) -> Withdrawing<'_> {
        let mut state = self.state();
        let gone = Gone::of(deleted);
        state.note(namespace, &gone);
        let number = state.next;
        state.next += 1;
        state.deletes.insert(number, (namespace, gone));
        Withdrawing { spilling: self, number }
    }

    /// Whether copies of these blocks may be named: none of them was deleted since the sweep began.
    pub(super) fn may_name(&self, namespace: NamespaceId, keys: &[BlockKey]) -> bool {
        let state = self.state();
        let Some(gone) = &state.gone else { return false };
        state.open.contains(&namespace)
            && gone.get(&namespace).is_none_or(|gone| !keys.iter().any(|key| gone.has(key)))
    }
}
