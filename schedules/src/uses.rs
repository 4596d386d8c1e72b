//! How often what threads share was used.

use std::cell::Cell;

thread_local! {
    /// Decisions of the scenes of this thread: each lock, atomic and wait is one.
    static USES: Cell<u64> = const { Cell::new(0) };
}

/// One more.
pub(crate) fn note() {
    USES.set(USES.get() + 1);
}

/// By the scenes of this thread, on all of their threads.
pub(crate) fn so_far() -> u64 {
    USES.get()
}
