//! What belongs to the process that made it. After a fork the child has a copy whose locks may be held by threads that it
//! does not have, and whose sockets are the parent's: it is neither used nor dropped there.

use std::mem::ManuallyDrop;

use pyo3::prelude::*;
use rustix::process::{Pid, getpid};

use crate::error::forked;

/// Something of one process.
pub(crate) struct Guarded<T: Send> {
    made_by: Pid,
    /// Always there until it is dropped.
    inner: Option<T>,
}

impl<T: Send> Guarded<T> {
    /// Belongs to this process.
    pub(crate) fn new(inner: T) -> Self {
        Self { made_by: getpid(), inner: Some(inner) }
    }

    /// It, in the process that made it.
    pub(crate) fn get(&self) -> PyResult<&T> {
        self.inner.as_ref().filter(|_| getpid() == self.made_by).ok_or_else(forked)
    }
}

impl<T: Send> Drop for Guarded<T> {
    fn drop(&mut self) {
        let inner = self.inner.take();
        if getpid() != self.made_by {
            let _leaked = ManuallyDrop::new(inner);
            return;
        }
        // What ends may wait, for threads that want the interpreter among others. At the interpreter's own end there is none to
        // be let go of.
        let mut inner = Some(inner);
        let dropped = Python::try_attach(|py| {
            let inner = inner.take();
            py.detach(|| drop(inner));
        });
        if dropped.is_none() {
            drop(inner);
        }
    }
}
