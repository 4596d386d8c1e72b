//! Room that other shards have and do not use. All shards share the budget, and files of segments that hold nothing any
//! more keep a part of it: before a shard evicts for want of room, the one that has most of that gives some back.
//!
//! Nothing live goes for another shard's sake, and a shard that is getting a segment itself gives nothing: so two that are
//! short at once do not wait for each other. The wait for an answer is bounded: a shard whose device or executor hangs
//! costs the others one wait, and is then left alone for a while.

use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvarts_layout::planted;

use super::Shared;
use crate::engine::tasks::notify::with_deadline;
use crate::rt::LocalTask;
use kvarts_contract::clock::Nanos;
use kvarts_contract::sync::OnceLock;
use kvarts_contract::sync::atomic::{AtomicU64, Ordering};
use kvarts_contract::ticket::Ticket;

/// How long a shard waits for what another one gives. It takes a checkpoint and a change of the directory, milliseconds
/// on a device that works.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);
/// How long no shard is asked after one did not answer in time.
const ASKED_AGAIN_AFTER: Duration = Duration::from_secs(30);

/// The way to the other shards of a store.
pub(crate) trait OtherShards: Send + Sync {
    /// Has a shard give segments that hold nothing back to the budget, until it has this many bytes more. The answer says
    /// whether it gave any; none if it cannot be asked.
    fn give_spare(&self, shard: u32, bytes: u64) -> Option<Ticket<bool>>;
}

/// The way to them, once the store is open.
pub(crate) struct SpareRoom {
    others: OnceLock<Weak<dyn OtherShards>>,
    /// When a shard may be asked again, in nanoseconds of the store's clock.
    not_before: AtomicU64,
}

impl Default for SpareRoom {
    fn default() -> Self {
        Self { others: OnceLock::new(), not_before: AtomicU64::new(0) }
    }
}

impl SpareRoom {
    fn not_before(&self) -> Nanos {
        Nanos(self.not_before.load(Ordering::Relaxed))
    }

    fn leave_alone_until(&self, at: Nanos) {
        self.not_before.store(at.0, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for SpareRoom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SpareRoom({})", if self.others.get().is_some() { "open" } else { "closed" })
    }
}

impl Shared {
    /// From now on shards can be asked.
    pub(crate) fn set_others(&self, others: &Arc<impl OtherShards + 'static>) {
        let others: Weak<dyn OtherShards> = Arc::downgrade(others) as _;
        let _ = self.spare_room.others.set(others);
    }

    /// Has another shard give back what a segment of this one lacks; true if it gave something in time, for which
    /// `timer` is a timer. This shard's own comes first.
    pub(crate) async fn spare_of_others(&self, shard: u32, timer: impl FnOnce(Nanos) -> LocalTask) -> bool {
        let now = self.clock.now();
        let (ledger, shortage) = (self.index.records().ledger(), self.shortage());
        let enough = shortage.min(self.segment_bytes);
        if shortage == 0 || ledger.spare_of(shard) >= enough || now < self.spare_room.not_before() {
            return false;
        }
        let other = ledger.most_spare_beside(shard).filter(|(_, spare)| *spare >= enough);
        let others = self.spare_room.others.get().and_then(Weak::upgrade);
        let answer = other.zip(others).and_then(|((other, _), others)| others.give_spare(other, shortage));
        let Some(answer) = answer else { return false };
        let within = if planted!("spare-room-waits") { Duration::from_secs(3600) } else { ANSWER_WITHIN };
        match with_deadline(pin!(answer), Some(timer(now.plus(within)))).await {
            Some(given) => given.unwrap_or(false),
            None => {
                self.spare_room.leave_alone_until(self.clock.now().plus(ASKED_AGAIN_AFTER));
                false
            }
        }
    }
}
