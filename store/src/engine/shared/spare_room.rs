//! Room that other shards have and do not use. All shards share the budget, and files of segments that hold nothing any
//! more keep a part of it: before a shard evicts for want of room, the one that has most of that gives some back.
//!
//! Something live goes for another shard's sake only where nothing there may go: all that it has is needed by what hangs on
//! it in others. A shard that is getting a segment itself gives no spare room, and one that asks others makes none for them: so
//! two that are short at once do not wait for each other. The wait for an answer is bounded: a shard whose device or executor hangs
//! costs the others one wait, and is then left alone for a while.

use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvarts_layout::planted;

use super::Shared;
use super::quota::{Gone, QuotaScope, ToGo};
use crate::engine::tasks::notify::with_deadline;
use crate::rt::LocalTask;
use kvarts_contract::class::Class;
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
    /// Has a shard evict for another one. The answer says whether that made room; none if it cannot be asked.
    fn make_room(&self, shard: u32) -> Option<Ticket<bool>>;
    /// Has an executor make room for these bytes within a quota. The answer says whether there is or may be some; none if it cannot be
    /// asked.
    fn make_quota_room(&self, shared: &Arc<Shared>, scope: QuotaScope, bytes: u64) -> Option<Ticket<bool>>;
    /// Has a shard evict the blocks of these records, for a quota, as work of a class. The answer says what went; none if it cannot be asked.
    fn evict_records(&self, shard: u32, records: (Vec<ToGo>, Class)) -> Option<Ticket<Gone>>;
    /// Tells all executors that a directory was lost.
    fn tell_lost(&self, shared: &Arc<Shared>);
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

    /// The way to the executors, once the store is open and while it is.
    pub(crate) fn others(&self) -> Option<Arc<dyn OtherShards>> {
        self.spare_room.others.get().and_then(Weak::upgrade)
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
        let answer =
            other.zip(self.others()).and_then(|((other, _), others)| others.give_spare(other, shortage));
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

    /// Has other shards evict, one after the other, until one of them has made room. Only for a shard in which nothing may go.
    pub(crate) async fn room_of_others(&self, shard: u32, timer: impl Fn(Nanos) -> LocalTask) -> bool {
        let shards = u32::try_from(self.shards()).unwrap_or(u32::MAX).max(1);
        for other in (1..shards).map(|step| shard.wrapping_add(step) % shards) {
            if self.clock.now() < self.spare_room.not_before() {
                return false;
            }
            let Some(answer) = self.others().and_then(|others| others.make_room(other)) else { continue };
            let within = timer(self.clock.now().plus(ANSWER_WITHIN));
            match with_deadline(pin!(answer), Some(within)).await {
                Some(Ok(true)) => return true,
                Some(_) => {}
                None => self.spare_room.leave_alone_until(self.clock.now().plus(ASKED_AGAIN_AFTER)),
            }
        }
        false
    }
}
