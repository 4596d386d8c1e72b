//! Who still uses the memory of a batch: everything that has a range of it keeps a token, an operation under way among
//! them, and the last one says so.

use std::any::Any;
use std::sync::{Arc, PoisonError};
use std::task::Waker;

use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};

/// The number of a handle's batches whose memory is in use.
#[derive(Debug, Default)]
pub(super) struct InUse(AtomicU64);

impl InUse {
    /// Whether no batch's memory is in use.
    pub(super) fn is_none(&self) -> bool {
        self.0.load(Ordering::SeqCst) == 0
    }
}

enum State {
    /// Its memory is in use; the waker to wake when it is not any more.
    Used(Option<Waker>),
    Over,
}

struct Shared {
    state: Mutex<State>,
    in_use: Arc<InUse>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lives as long as memory of one batch is in use.
struct Token(Arc<Shared>);

impl Drop for Token {
    fn drop(&mut self) {
        let before = std::mem::replace(&mut *self.0.lock(), State::Over);
        self.0.in_use.0.fetch_sub(1, Ordering::SeqCst);
        if let State::Used(Some(waker)) = before {
            waker.wake();
        }
    }
}

/// The batch's look at its token. It keeps no memory.
pub(super) struct Touched(Option<Arc<Shared>>);

impl Touched {
    /// For a batch without memory.
    pub(super) fn nothing() -> Self {
        Self(None)
    }

    /// What the memory of a batch is kept by, and who looks at it.
    pub(super) fn token(in_use: &Arc<InUse>) -> (Arc<dyn Any + Send + Sync>, Self) {
        in_use.0.fetch_add(1, Ordering::SeqCst);
        let shared = Arc::new(Shared { state: Mutex::new(State::Used(None)), in_use: Arc::clone(in_use) });
        (Arc::new(Token(Arc::clone(&shared))), Self(Some(shared)))
    }

    /// Whether the batch's memory is no longer in use; otherwise the waker is woken when that is so.
    pub(super) fn is_over(&self, waker: &Waker) -> bool {
        let Some(shared) = &self.0 else { return true };
        match &mut *shared.lock() {
            State::Over => true,
            State::Used(wakes) => {
                *wakes = Some(waker.clone());
                false
            }
        }
    }
}
