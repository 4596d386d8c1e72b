//! Writes under way in a shard, and waiting for those that began before a moment.
//!
//! A delete says from which sequence on records count again. Whatever has claimed blocks before it must have its
//! place in the log by then, or must never get one: so each write is noted here from the message that brings it until
//! it has ended, and a delete waits for those that it finds.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use super::notify::Notify;

/// The writes under way in one shard.
#[derive(Debug, Default)]
pub(crate) struct WriteBarrier {
    under_way: RefCell<BTreeSet<u64>>,
    next: Cell<u64>,
    ended: Notify,
}

/// One write under way, until dropped.
#[derive(Debug)]
pub(crate) struct Write {
    writes: Rc<WriteBarrier>,
    number: u64,
}

impl WriteBarrier {
    /// Notes that a write begins.
    pub(crate) fn begin(self: &Rc<Self>) -> Write {
        let number = self.next.replace(self.next.get() + 1);
        self.under_way.borrow_mut().insert(number);
        Write { writes: Rc::clone(self), number }
    }

    /// How many are under way.
    pub(crate) fn len(&self) -> usize {
        self.under_way.borrow().len()
    }

    /// Completes when every write that is under way now has ended.
    pub(crate) async fn settled(&self) {
        let now = self.next.get();
        let over = || self.under_way.borrow().first().is_none_or(|&first| first >= now);
        self.ended.until(|| over().then_some(())).await;
    }
}

impl Drop for Write {
    fn drop(&mut self) {
        self.writes.under_way.borrow_mut().remove(&self.number);
        self.writes.ended.wake_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::{Context, Waker};

    #[test]
    fn whoever_waits_waits_for_earlier_writes_alone() {
        let writes = Rc::new(WriteBarrier::default());
        let mut context = Context::from_waker(Waker::noop());
        assert!(std::pin::pin!(writes.settled()).poll(&mut context).is_ready());
        let (first, second) = (writes.begin(), writes.begin());
        let mut waiting = std::pin::pin!(writes.settled());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        let later = writes.begin();
        drop(second);
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        drop(first);
        assert!(waiting.as_mut().poll(&mut context).is_ready());
        drop(later);
    }
}
