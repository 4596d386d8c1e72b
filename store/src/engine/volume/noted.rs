//! Small records that were put since they were asked for: where a look for chains to be merged begins.

use std::cell::RefCell;
use std::collections::VecDeque;

use crate::index::RecordId;

/// Records that a shard notes at most. Of what it forgets, the records behind it tell.
pub(crate) const NOTED_MAX: usize = 4 << 10;

/// The noted records of a shard, in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct Noted(RefCell<VecDeque<RecordId>>);

impl Noted {
    /// Notes one; the oldest is forgotten where there are too many.
    pub(crate) fn note(&self, record: RecordId) {
        let mut noted = self.0.borrow_mut();
        if noted.len() >= NOTED_MAX {
            noted.pop_front();
        }
        noted.push_back(record);
    }

    /// Gives them, and forgets them.
    pub(crate) fn take(&self) -> VecDeque<RecordId> {
        std::mem::take(&mut *self.0.borrow_mut())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.borrow().len()
    }
}
