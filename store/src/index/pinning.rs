//! Matching under a lease, and eviction, which leases forbid.

use super::{
    BlockFingerprint, Groups, Index, LeaseError, LeaseTerms, Location, Lookup, PinShare, State, lock, read,
    write,
};
use kvarts_contract::api::LeaseId;
use kvarts_contract::clock::Nanos;
use kvarts_contract::sync::{Race, planted};

/// What became of an eviction.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Eviction {
    /// The block is gone.
    Evicted {
        /// Live blocks left in its record.
        left: u16,
    },
    /// A lease or pin is on it: it stays.
    Busy,
    /// The index does not point there (any more).
    Gone,
}

/// What a sweep of leases has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Swept {
    /// Leases that it ended.
    pub leases: usize,
    /// There may be more to do.
    pub more: bool,
}

/// Leases, and blocks of leases, that are swept up at once.
const SWEPT_AT_ONCE: usize = 512;

impl Index {
    /// Looks up all blocks as [`Index::lookup_many`] does and takes a lease on those that are live: each block
    /// that `out` reports live was pinned in the same moment, and no eviction takes it while the lease is in
    /// force. `None` if no block is live. On an error nothing is pinned, and `out` is a plain lookup's. What has
    /// ended by `now` is swept up first, so that it does not count against the cap.
    ///
    /// `bytes_of` says how many bytes the block at a place of `prints` counts against the tenant's cap, at
    /// least one. A block that several leases hold counts in each.
    ///
    /// For a lease on just the usable part of a match, look up first, then call this with that part: what it
    /// reports is what counts.
    pub fn match_and_lease(
        &self,
        prints: &[BlockFingerprint],
        terms: LeaseTerms,
        now: Nanos,
        bytes_of: impl Fn(usize) -> u64,
        out: &mut Vec<Lookup>,
    ) -> Result<Option<LeaseId>, LeaseError> {
        self.expire(now);
        out.clear();
        out.resize(prints.len(), Lookup::Absent);
        let id = self.leases.begin(terms);
        for (partition, places) in Groups::of(prints, self.bits, |print| *print).iter() {
            // Eviction needs this lock for writing, so it comes before all of these pins or after.
            let inner = read(&self.partitions[partition].0);
            let mut pins = lock(&inner.pins);
            for place in places.iter().map(|place| *place as usize) {
                let Some(slot) = inner.table.get(prints[place]) else { continue };
                out[place] = slot.lookup();
                if place == 1 && kvarts_layout::planted!("lease-forgets-one") {
                    continue;
                }
                if slot.state() == Some(State::Live) && !planted(Race::LeaseAfterMatch) {
                    pins.add(prints[place], id);
                    slot.hint_leased(true);
                }
            }
        }
        let (mut held, mut bytes) = (Vec::new(), 0u64);
        for (place, (print, found)) in prints.iter().zip(&*out).enumerate() {
            if matches!(found, Lookup::Live(_)) {
                held.push(*print);
                bytes = bytes.saturating_add(bytes_of(place).max(1));
            }
        }
        if planted(Race::LeaseAfterMatch) {
            held.iter().for_each(|print| lock(&read(self.partition(*print)).pins).add(*print, id));
        }
        if held.is_empty() {
            self.leases.end(id);
            return Ok(None);
        }
        let mut completed = self.leases.complete(id, terms, &held, bytes);
        // What has ended does not count against the cap, however much of it there is.
        while completed.is_err() && self.expire(now).leases > 0 {
            completed = self.leases.complete(id, terms, &held, bytes);
        }
        if completed.is_err() {
            self.leases.end(id);
            self.drop_pins(id, &held);
        }
        completed.map(|()| Some(id))
    }

    /// Ends a lease or pin; false if it had ended already.
    pub fn unlock(&self, id: LeaseId) -> bool {
        self.leases.end(id).map(|prints| self.drop_pins(id, &prints)).is_some()
    }

    /// The same of one that is in force at `now`: what has ended by itself, swept up or not, cannot be ended early.
    pub fn unlock_at(&self, id: LeaseId, now: Nanos) -> bool {
        self.leases.is_in_force(id, now) && self.unlock(id)
    }

    /// Makes a lease (or a pin) that is in force at `now` end at `until`.
    pub fn renew(&self, id: LeaseId, until: Nanos, now: Nanos) -> Result<(), LeaseError> {
        self.leases.renew(id, until, now)
    }

    /// Sweeps up some of what leases that have ended by `now` have left, and says whether there may be more. They have stopped pinning
    /// at their end; this gives their memory and the tenants' bytes back, a few hundred leases and blocks at a time: a tenant may hold
    /// millions.
    pub fn expire(&self, now: Nanos) -> Swept {
        let ended = self.leases.end_expired(now, SWEPT_AT_ONCE);
        let mut dropped = 0;
        while dropped < SWEPT_AT_ONCE
            && let Some((id, prints)) = self.leases.take_ended(SWEPT_AT_ONCE - dropped)
        {
            self.drop_pins(id, &prints);
            dropped += prints.len().max(1);
        }
        Swept { leases: ended, more: ended == SWEPT_AT_ONCE || dropped >= SWEPT_AT_ONCE }
    }

    /// Removes a live block if it is at `at` and no lease that is in force at `now` holds it. A quarantined
    /// entry at `at` is cleared away whatever holds it, and is `Gone`.
    pub fn try_evict(&self, print: BlockFingerprint, at: Location, now: Nanos) -> Eviction {
        let mut inner = write(self.partition(print));
        if inner.table.get(print).is_some_and(|slot| slot.is(State::Live, at) && slot.leased())
            && self.leases.any_in_force(lock(&inner.pins).of(print), now)
            && !kvarts_layout::planted!("lease-ignored")
        {
            return Eviction::Busy;
        }
        let live = inner.take_at(print, at);
        drop(inner);
        match live {
            true => Eviction::Evicted { left: self.records.subtract_live(at.record, 1) },
            false => Eviction::Gone,
        }
    }

    /// Whether a lease or pin that is in force at `now` holds the block.
    pub fn is_leased(&self, print: BlockFingerprint, now: Nanos) -> bool {
        let inner = read(self.partition(print));
        inner.table.get(print).is_some_and(|slot| slot.leased())
            && self.leases.any_in_force(lock(&inner.pins).of(print), now)
    }

    /// Caps what the tenant's leases and pins may hold from now on, whatever their terms say; `None` lifts the cap.
    pub fn set_pin_cap(&self, tenant: u32, bytes: Option<u64>) {
        self.leases.set_cap(tenant, bytes);
    }

    /// Limits what the leases and pins of all tenants hold together from now on; `None` lifts the limit.
    pub fn set_pin_share(&self, share: Option<PinShare>) {
        self.leases.set_share(share);
    }

    /// Bytes that the tenant's leases and pins hold, those that expired and were not swept up included.
    pub fn pinned_bytes(&self, tenant: u32) -> u64 {
        self.leases.pinned_bytes(tenant)
    }

    /// The number of leases and pins, those that expired and were not swept up included.
    pub fn leases(&self) -> usize {
        self.leases.len()
    }

    fn drop_pins(&self, id: LeaseId, prints: &[BlockFingerprint]) {
        for (partition, places) in Groups::of(prints, self.bits, |print| *print).iter() {
            let inner = read(&self.partitions[partition].0);
            let mut pins = lock(&inner.pins);
            for print in places.iter().map(|place| prints[*place as usize]) {
                let held = pins.drop_one(print, id);
                if planted(Race::HintAfterPins) {
                    drop(pins);
                    pins = lock(&inner.pins);
                }
                if let Some(slot) = inner.table.get(print) {
                    slot.hint_leased(held);
                }
            }
        }
    }
}
