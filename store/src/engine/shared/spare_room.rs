//! Room that other shards have and do not use. All shards share the budget, and files of segments that hold nothing any
//! more keep a part of it: before a shard evicts for want of room, the one that has most of that gives some back.
//!
//! Nothing live goes for another shard's sake, and no shard waits for one that is getting a segment itself: so two
//! that are short at once do not wait for each other.

use std::sync::{Arc, Weak};

use super::Shared;
use crate::rt::mailbox::Ticket;
use crate::sync::OnceLock;

/// The way to the other shards of a store.
pub(crate) trait OtherShards: Send + Sync {
    /// Has a shard give segments that hold nothing back to the budget, until it has this many bytes more. The answer says
    /// whether it gave any; none if it cannot be asked.
    fn give_spare(&self, shard: u32, bytes: u64) -> Option<Ticket<bool>>;
}

/// The way to them, once the store is open.
pub(crate) struct SpareRoom(OnceLock<Weak<dyn OtherShards>>);

impl Default for SpareRoom {
    fn default() -> Self {
        Self(OnceLock::new())
    }
}

impl std::fmt::Debug for SpareRoom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SpareRoom({})", if self.0.get().is_some() { "open" } else { "closed" })
    }
}

impl Shared {
    /// From now on shards can be asked.
    pub(crate) fn set_others(&self, others: &Arc<impl OtherShards + 'static>) {
        let others: Weak<dyn OtherShards> = Arc::downgrade(others) as _;
        let _ = self.spare_room.0.set(others);
    }

    /// Has another shard give back what a segment of this one lacks; true if it gave something. This shard's own comes
    /// first.
    pub(crate) async fn spare_of_others(&self, shard: u32) -> bool {
        let (ledger, shortage) = (self.index.records().ledger(), self.shortage());
        let enough = shortage.min(self.segment_bytes);
        if shortage == 0 || ledger.spare_of(shard) >= enough {
            return false;
        }
        let other = ledger.most_spare_beside(shard).filter(|(_, spare)| *spare >= enough);
        let others = self.spare_room.0.get().and_then(Weak::upgrade);
        let answer = other.zip(others).and_then(|((other, _), others)| others.give_spare(other, shortage));
        match answer {
            Some(answer) => answer.await.unwrap_or(false),
            None => false,
        }
    }
}
