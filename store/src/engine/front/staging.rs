//! The staging memory of an executor. Its pages are made and registered with the ring behind the first requests: a start
//! does not wait while the kernel clears them, and what moves meanwhile moves through unregistered memory.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::engine::tasks::notify::Notify;
use crate::io::{Arena, Io};
use crate::rt::Runtime;

/// Pages of so many bytes are made without a turn for others: about a millisecond.
const MADE_AT_ONCE: usize = 2 << 20;

/// Whether the staging memory is registered.
#[derive(Debug, Default)]
pub(super) struct Registration {
    begun: Cell<bool>,
    done: RefCell<Option<Result<(), String>>>,
    changed: Notify,
}

impl Registration {
    /// Makes the pages and registers them.
    pub(super) async fn make(&self, arena: &Arena, io: &Rc<RefCell<dyn Io>>, rt: &dyn Runtime) {
        if self.begun.replace(true) {
            return;
        }
        let region = arena.region();
        for at in (0..region.len()).step_by(MADE_AT_ONCE) {
            // What cannot be made here is made, or refused, below.
            let _ = region.populate_part(at, MADE_AT_ONCE);
            rt.yield_now().await;
        }
        let done = io.borrow_mut().register(region);
        self.done.replace(Some(done));
        self.changed.wake_all();
    }

    /// Why it is not registered, if it should be and is not, once that is known.
    pub(super) async fn failure(&self) -> Option<String> {
        if !self.begun.get() {
            return None;
        }
        self.changed.until(|| self.done.borrow().clone()).await.err()
    }
}
