//! Memory of Python objects that was dropped, perhaps by a thread of a device, and waits for one that has the interpreter's lock.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

/// What is given back with the interpreter's lock.
pub(crate) trait Leaving: Send {
    /// Gives it back.
    fn release(self: Box<Self>, py: Python<'_>);
}

/// What waits for a thread that has the interpreter's lock.
static LEFT: Mutex<Vec<Box<dyn Leaving>>> = Mutex::new(Vec::new());

/// Leaves it for the thread that has the interpreter's lock next.
pub(crate) fn leave(held: Box<dyn Leaving>) {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner).push(held);
}

/// Gives back what was left.
pub(crate) fn settle(py: Python<'_>) {
    let left = std::mem::take(&mut *LEFT.lock().unwrap_or_else(PoisonError::into_inner));
    left.into_iter().for_each(|held| held.release(py));
}
