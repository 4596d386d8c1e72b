//! What the two threads of a connection share at its server.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::asked::Asked;
use super::bell::Bell;

/// What was heard and not seen to yet.
#[derive(Debug, Default)]
pub(super) struct Heard {
    pub(super) pieces: VecDeque<(u64, Asked)>,
    /// Blocks that did not match at the receiver.
    pub(super) doubts: VecDeque<Asked>,
    pub(super) cancelled: Vec<u64>,
    pub(super) pings: u32,
    /// Pieces that have no answer yet.
    pub(super) open: BTreeSet<u64>,
    /// The connection has ended.
    pub(super) gone: bool,
}

/// What the two threads of a connection share.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) heard: Mutex<Heard>,
    /// Wakes the one that sends.
    pub(super) bell: Arc<Bell>,
}

impl Connection {
    pub(super) fn lock(&self) -> MutexGuard<'_, Heard> {
        // Every change is one step.
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the other thread.
    pub(super) fn end(&self) {
        self.lock().gone = true;
        self.bell.ring();
    }
}
