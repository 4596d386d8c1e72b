//! What changes the content, each change in one step with its event.
//!
//! All code that makes a block live, takes one out or ends its usefulness does it here, under the lock of the event
//! stream: so the events of a block come in the order of its changes.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use kvarts_layout::{BlockKey, Coordinate, Group, IndexKey};

use super::names::Namespace;
use super::recently_gone::Gone;
use super::record_class::RecordClass;
use super::{EXPIRY_STEP_MS, Shared};
use crate::index::{
    BlockFingerprint, Deleted, Eviction, Location, RecordError, RecordId, RecordInfo, Ticket,
};
use kvarts_contract::api::Life;
use kvarts_contract::events::{Cause, EventKind, Subject};

/// A block, by its key in the class of its record.
#[derive(Clone, Copy)]
pub(crate) struct BlockOf<'a> {
    pub(crate) class: &'a RecordClass,
    pub(crate) key: BlockKey,
}

impl BlockOf<'_> {
    fn subject(&self) -> Subject {
        Subject::Block(self.class.name(self.key))
    }
}

/// Why a live block leaves the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Departure {
    /// Its time to live is over.
    Expired,
    /// Other blocks need its room.
    Evicted,
    /// The same, within a quota.
    Quota,
}

/// A block's place before and after a move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Relocation {
    pub(crate) from: Location,
    pub(crate) to: Location,
}

impl RecordClass {
    /// The whole name of a block of this class.
    pub(crate) fn name(&self, key: BlockKey) -> IndexKey {
        IndexKey { namespace: self.namespace.id, key, group: self.group, coordinate: self.coordinate }
    }
}

impl Shared {
    /// Milliseconds since 1970 by the wall clock as it stood at opening, and what has passed since: jumps of the
    /// wall clock change nothing while the store is open.
    pub(crate) fn wall_ms(&self) -> u64 {
        if kvarts_layout::planted!("expiry-by-the-wall-clock") {
            return self.clock.unix_millis();
        }
        let (now, wall_ms) = self.opened;
        let passed = self.clock.now().since(now).as_millis();
        wall_ms.saturating_add(u64::try_from(passed).unwrap_or(u64::MAX))
    }

    /// This moment as expiry counts it, rounded down.
    pub(crate) fn expiry_now(&self) -> u32 {
        let steps = self.wall_ms().saturating_sub(self.created_ms) / EXPIRY_STEP_MS;
        u32::try_from(steps).unwrap_or(u32::MAX)
    }

    /// When a new production is said to be stored: now, and later than every delete that this store was told of
    /// ([`Store::produce_after`](crate::engine::Store::produce_after)).
    pub(crate) fn produced_now(&self) -> u64 {
        self.wall_ms().max(self.produced_after.load(Relaxed).saturating_add(1))
    }

    /// How long blocks of a record live that were produced then and end so, as the index counts it: never longer than they are
    /// found here.
    pub(crate) fn life(&self, produced_ms: u64, expires: u32) -> Life {
        let ends = (expires != 0).then(|| {
            let ends_ms = self.created_ms.saturating_add(u64::from(expires) * EXPIRY_STEP_MS);
            let (opened, wall_ms) = self.opened;
            opened.plus(Duration::from_millis(ends_ms.saturating_sub(wall_ms)))
        });
        Life { produced_ms, ends }
    }

    /// Whether the time of a record's blocks is over.
    pub(crate) fn is_expired(&self, record: &RecordInfo) -> bool {
        // Counted down where expiry was counted up: late by a step at most, never early.
        record.expires != 0
            && record.expires <= self.expiry_now()
            && !kvarts_layout::planted!("expired-served")
    }

    /// Whether a live block can be found: its time is not over, or a lease holds it.
    pub(crate) fn is_here(&self, print: BlockFingerprint, record: &RecordInfo) -> bool {
        !self.is_expired(record) || self.index.is_leased(print, self.clock.now())
    }

    /// Makes blocks of a written record live, and gives the places of those that a delete has met.
    pub(crate) fn commit(
        &self,
        (class, keys): (&RecordClass, &[BlockKey]),
        (claim, prints): (Ticket, &[BlockFingerprint]),
        record: RecordId,
    ) -> Result<Vec<u16>, RecordError> {
        let mut change = self.events.change();
        if !self.names.is_current(&class.namespace) {
            return Ok((0..prints.len()).filter_map(|place| u16::try_from(place).ok()).collect());
        }
        let lost = self.index.commit(claim, record, prints, self.epoch())?;
        let at_ms = self.wall_ms();
        for (place, key) in (0u16..).zip(keys) {
            if lost.binary_search(&place).is_err() {
                change.tell(at_ms, EventKind::Stored, Cause::Put, Subject::Block(class.name(*key)));
            }
        }
        Ok(lost)
    }

    /// Takes a live block out if it is at `at` and no lease holds it.
    pub(crate) fn evict(
        &self,
        print: BlockFingerprint,
        at: Location,
        why: Departure,
        block: BlockOf<'_>,
    ) -> Eviction {
        let mut change = self.events.change();
        let evicted = self.index.try_evict(print, at, self.clock.now());
        if let Eviction::Evicted { left } = evicted {
            let (kind, cause, counter, gone) = match why {
                Departure::Expired => {
                    (EventKind::Expired, Cause::Ttl, &self.counters.blocks_expired, Gone::Expired)
                }
                Departure::Evicted => {
                    (EventKind::Evicted, Cause::Room, &self.counters.blocks_evicted, Gone::Evicted)
                }
                Departure::Quota => {
                    (EventKind::Evicted, Cause::Quota, &self.counters.blocks_evicted, Gone::Evicted)
                }
            };
            self.gone.note(print, gone);
            // What is left of a deleted namespace has its event already, and its name may be another block's by now.
            if self.names.is_current(&block.class.namespace) && !kvarts_layout::planted!("evicted-untold") {
                change.tell(self.wall_ms(), kind, cause, block.subject());
            }
            counter.fetch_add(1, Relaxed);
            self.free_if_empty(at.record, left);
        }
        evicted
    }

    /// Ends a damaged block's usefulness if it is at `at`; true if it was.
    pub(crate) fn quarantine(&self, print: BlockFingerprint, at: Location, block: BlockOf<'_>) -> bool {
        let mut change = self.events.change();
        let Some(left) = self.index.quarantine(print, at) else { return false };
        self.gone.note(print, Gone::OutOfService);
        if self.names.is_current(&block.class.namespace) {
            change.tell(self.wall_ms(), EventKind::Quarantined, Cause::Damage, block.subject());
        }
        self.free_if_empty(at.record, left);
        true
    }

    /// Points the index at the copy of a live block if it is still at `moved.from`, and gives the number of live blocks
    /// left in the old record. A snapshot under way may have passed the copy's segment: so it is told.
    pub(crate) fn relocate(
        &self,
        print: BlockFingerprint,
        moved: Relocation,
        block: BlockOf<'_>,
    ) -> Result<Option<u16>, RecordError> {
        let mut change = self.events.change();
        let left = self.index.replace_location(print, moved.from, moved.to)?;
        if left.is_some() && self.names.is_current(&block.class.namespace) {
            change.tell(self.wall_ms(), EventKind::Stored, Cause::Moved, block.subject());
        }
        Ok(left)
    }

    /// Takes blocks out, leased or not, and keeps puts of them from beginning until the claim is given back
    /// ([`crate::index::Index::abandon`]). Says of each whether it was live. All other changes wait for it, so it is asked for a few
    /// hundred at a time.
    pub(crate) fn condemn(
        &self,
        claim: Ticket,
        prints: &[BlockFingerprint],
        cause: Cause,
        name_of: impl Fn(usize) -> IndexKey,
    ) -> Vec<bool> {
        let mut change = self.events.change();
        let were = self.index.condemn(claim, prints);
        let at_ms = self.wall_ms();
        let live = |(place, was): (usize, Deleted)| {
            let Deleted::Live { location, left } = was else { return false };
            if kvarts_layout::planted!("event-lost") {
                return true;
            }
            if let Some(print) = prints.get(place) {
                self.gone.note(*print, Gone::Deleted);
            }
            change.tell(at_ms, EventKind::Deleted, cause, Subject::Block(name_of(place)));
            self.free_if_empty(location.record, left);
            true
        };
        were.into_iter().enumerate().map(live).collect()
    }

    /// Cuts a namespace off from all it holds. Gives what it was; `None` if that is being done already.
    pub(crate) fn retire(&self, namespace: &Arc<Namespace>) -> Option<Arc<Namespace>> {
        let mut change = self.events.change();
        let retired = self.names.retire(namespace.id)?;
        let subject = Subject::Namespace(retired.id);
        change.tell(self.wall_ms(), EventKind::Deleted, Cause::Namespace, subject);
        Some(retired)
    }

    /// The fingerprints of these blocks; those of them whose time is over are taken out first.
    pub(crate) fn prints_of(
        &self,
        namespace: &Namespace,
        keys: &[BlockKey],
        (group, coordinate): (Group, Coordinate),
    ) -> Vec<BlockFingerprint> {
        let key = self.index.key();
        let prints: Vec<_> =
            keys.iter().map(|name| key.of(namespace.local, name, group, coordinate)).collect();
        self.drop_expired(&prints, |place| keys.get(place).copied());
        prints
    }

    /// Takes those of these blocks out whose time is over, unless a lease holds them. Every look-up calls
    /// it first, so that an expired block is never found.
    pub(crate) fn drop_expired(
        &self,
        prints: &[BlockFingerprint],
        key_of: impl Fn(usize) -> Option<BlockKey>,
    ) {
        if !self.may_be_expired() {
            return;
        }
        for (place, print) in prints.iter().enumerate() {
            if let Some(found) = self.index.locate(*print)
                && self.is_expired(&found.record)
                && let Some(class) = self.classes.get(found.record.class)
                && let Some(key) = key_of(place)
            {
                self.evict(*print, found.location, Departure::Expired, BlockOf { class: &class, key });
            }
        }
    }
}
