//! Work that computes and waits for nothing, and takes longer than an executor may be kept from its other tasks.
//!
//! It runs on the threads for operations on names and files of a directory: the kernel shares them out with the executors, and a device
//! that hangs keeps its own directory's alone.

use std::fmt;
use std::sync::{Arc, PoisonError};

use kvarts_contract::sync::Mutex;

type Work = Box<dyn FnOnce() + Send>;

/// One piece of such work: done once, by whichever thread comes to it first.
#[derive(Clone)]
pub struct Computation(Arc<Mutex<Option<Work>>>);

impl Computation {
    /// This work.
    pub fn new(work: impl FnOnce() + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(Some(Box::new(work)))))
    }

    /// Does it, unless it was done or is being done.
    pub fn run(&self) {
        let work = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(work) = work {
            work();
        }
    }
}

impl PartialEq for Computation {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Computation {}

impl fmt::Debug for Computation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Computation")
    }
}
