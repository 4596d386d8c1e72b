//! What changes which blocks are here: puts, recovery, compaction, deletes, failed verification.

use std::sync::atomic::Ordering::Relaxed;

use super::table::{HANGING_MAX, RECORD_BITS};
use super::{
    BlockFingerprint, Groups, Heat, Index, Inner, Location, Lookup, RecordError, RecordId, Slot, State, read,
    write,
};

/// A put's claim on the blocks it reserved. Every put has its own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use = "reserved blocks stay pending until they are committed or abandoned with this ticket"]
pub struct Ticket(u32);

/// What a put may do about one block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reservation {
    /// Write it: it is pending under the put's ticket.
    Reserved,
    /// Nothing: it is here already.
    Live(Location),
    /// Nothing: another put of it is in flight (or this one named it before).
    InFlight,
}

/// What a delete found.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Deleted {
    /// Nothing.
    Absent,
    /// A put in flight, which will find at its commit that the block is lost.
    Pending,
    /// A live block.
    Live {
        /// Where it was.
        location: Location,
        /// Live blocks left in its record.
        left: u16,
    },
    /// A quarantined block.
    Quarantined,
}

/// The location field of a pending slot.
const fn claim(ticket: Ticket) -> Location {
    Location { record: RecordId(ticket.0), block: 0 }
}

impl Inner {
    /// Removes an entry with its pins, and what is counted of it.
    fn take(&mut self, print: BlockFingerprint) {
        let Some(slot) = self.table.remove(print) else { return };
        if slot.leased() {
            self.drop_pins(print);
        }
        if slot.hanging() == HANGING_MAX {
            self.crowded.remove(&print.first());
        }
    }

    fn drop_pins(&mut self, print: BlockFingerprint) {
        self.pins.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).drop_all(print);
    }

    /// Removes what points at `at`, a quarantined entry included; true if it was live.
    pub(super) fn take_at(&mut self, print: BlockFingerprint, at: Location) -> bool {
        let Some(slot) = self.table.get(print) else { return false };
        let live = slot.is(State::Live, at);
        if live || slot.is(State::Quarantined, at) {
            self.take(print);
        }
        live
    }
}

impl Index {
    /// A claim on nothing yet, for [`Index::condemn`].
    pub fn ticket(&self) -> Ticket {
        // 268 million puts later the number comes again, when this put is long gone.
        Ticket(self.tickets.fetch_add(1, Relaxed) % (1 << RECORD_BITS))
    }

    /// Claims each block that is neither here nor in flight for one put, and says so of each in `out`, in
    /// order. A claimed block is pending until [`Index::commit`] or [`Index::abandon`]. Of several puts of
    /// one block at once exactly one gets it. Blocks are claimed one by one, not all at one moment.
    pub fn reserve(&self, prints: &[BlockFingerprint], out: &mut Vec<Reservation>) -> Ticket {
        let ticket = self.ticket();
        out.clear();
        out.resize(prints.len(), Reservation::Reserved);
        for (partition, places) in Groups::of(prints, self.bits, |print| *print).iter() {
            let mut inner = write(&self.partitions[partition].0);
            for place in places.iter().map(|place| *place as usize) {
                let slot = Slot::new(prints[place], State::Pending, claim(ticket), Heat::default());
                let Err(there) = inner.table.insert(slot) else { continue };
                match there.lookup() {
                    Lookup::Live(_) if kvarts_layout::planted!("put-over-live") => {
                        there.settle(State::Pending, claim(ticket))
                    }
                    Lookup::Live(location) => out[place] = Reservation::Live(location),
                    Lookup::Quarantined => {
                        there.settle(State::Pending, claim(ticket));
                        // It comes anew: what hung on the one before was put before it, and may be what it hangs on.
                        there.set_hanging(0);
                        inner.crowded.remove(&prints[place].first());
                    }
                    Lookup::Pending | Lookup::Absent => out[place] = Reservation::InFlight,
                }
            }
        }
        ticket
    }

    /// Makes blocks that were reserved under `ticket` live: `prints[i]` becomes block `i` of `record`, last used
    /// at `epoch`. Gives the places of those that were not reserved under this ticket any more (deleted
    /// meanwhile): they stay as they are. On an error nothing was changed.
    pub fn commit(
        &self,
        ticket: Ticket,
        record: RecordId,
        prints: &[BlockFingerprint],
        epoch: u16,
    ) -> Result<Vec<u16>, RecordError> {
        self.records.add_live(record, prints.len())?;
        let mut lost = Vec::new();
        for (partition, places) in Groups::of(prints, self.bits, |print| *print).iter() {
            let mut inner = write(&self.partitions[partition].0);
            for place in places {
                // `add_live` refuses more than u16::MAX blocks.
                let block = *place as u16;
                match inner.table.get_mut(prints[*place as usize]) {
                    Some(slot) if slot.is(State::Pending, claim(ticket)) => {
                        slot.settle(State::Live, Location { record, block });
                        slot.update_heat(|_| Heat { epoch, ..Heat::default() });
                    }
                    _ => lost.push(block),
                }
            }
        }
        if !lost.is_empty() {
            self.records.subtract_live(record, lost.len());
            lost.sort_unstable();
        }
        Ok(lost)
    }

    /// Gives up what is still pending under `ticket` among these blocks. Others are left alone, so it may be
    /// called with all blocks of the put, and twice.
    pub fn abandon(&self, ticket: Ticket, prints: &[BlockFingerprint]) {
        let prints = if kvarts_layout::planted!("claim-leaked") { &[] } else { prints };
        for (partition, places) in Groups::of(prints, self.bits, |print| *print).iter() {
            let mut inner = write(&self.partitions[partition].0);
            for print in places.iter().map(|place| prints[*place as usize]) {
                if inner.table.get(print).is_some_and(|slot| slot.is(State::Pending, claim(ticket))) {
                    inner.take(print);
                }
            }
        }
    }

    /// Whether all these blocks are still pending under `ticket`.
    pub fn holds(&self, ticket: Ticket, prints: &[BlockFingerprint]) -> bool {
        let held = |slot: &Slot| slot.is(State::Pending, claim(ticket));
        prints.iter().all(|print| read(self.partition(*print)).table.get(*print).is_some_and(held))
    }

    /// Removes blocks whatever their state, leased or not, and claims them: each is pending under the ticket until
    /// [`Index::abandon`], so that no put of it begins meanwhile. Says of each what it was. A put that was in flight
    /// will find at its commit that the block is lost. A block that stands twice was pending the second time.
    pub fn condemn(&self, ticket: Ticket, prints: &[BlockFingerprint]) -> Vec<Deleted> {
        let mut were = vec![Deleted::Absent; prints.len()];
        for (partition, places) in Groups::of(prints, self.bits, |print| *print).iter() {
            let mut inner = write(&self.partitions[partition].0);
            for place in places.iter().map(|place| *place as usize) {
                let print = prints[place];
                let was = inner.table.get(print).map_or(Lookup::Absent, Slot::lookup);
                inner.take(print);
                were[place] = match was {
                    Lookup::Absent => Deleted::Absent,
                    Lookup::Pending => Deleted::Pending,
                    Lookup::Quarantined => Deleted::Quarantined,
                    Lookup::Live(location) => {
                        let left = self.records.subtract_live(location.record, 1);
                        Deleted::Live { location, left }
                    }
                };
                let slot = Slot::new(print, State::Pending, claim(ticket), Heat::default());
                let inserted = inner.table.insert(slot).is_ok();
                debug_assert!(inserted, "the old entry of the block was removed before");
            }
        }
        were
    }

    /// Moves a live block from `old` to `new` if it is at `old`, and then gives the number of live blocks left
    /// in the old record; `None` if it was not there. Leases and heat move with it.
    pub fn replace_location(
        &self,
        print: BlockFingerprint,
        old: Location,
        new: Location,
    ) -> Result<Option<u16>, RecordError> {
        self.records.add_live(new.record, 1)?;
        let moved = match write(self.partition(print)).table.get_mut(print) {
            Some(slot) if slot.is(State::Live, old) || kvarts_layout::planted!("move-without-compare") => {
                slot.settle(State::Live, new);
                true
            }
            _ => false,
        };
        let left = self.records.subtract_live(if moved { old.record } else { new.record }, 1);
        Ok(moved.then_some(left))
    }

    /// Removes a live block if it is at `at`, leased or not, and then gives the number of live blocks left in
    /// its record. A quarantined entry at `at` is removed too, and gives `None` like one that is not there.
    pub fn remove(&self, print: BlockFingerprint, at: Location) -> Option<u16> {
        let live = write(self.partition(print)).take_at(print, at);
        live.then(|| self.records.subtract_live(at.record, 1))
    }

    /// Removes a block whatever its state, leased or not, and says what it was.
    pub fn delete(&self, print: BlockFingerprint) -> Deleted {
        let mut inner = write(self.partition(print));
        let was = inner.table.get(print).map_or(Lookup::Absent, Slot::lookup);
        inner.take(print);
        drop(inner);
        match was {
            Lookup::Absent => Deleted::Absent,
            Lookup::Pending => Deleted::Pending,
            Lookup::Quarantined => Deleted::Quarantined,
            Lookup::Live(location) => {
                Deleted::Live { location, left: self.records.subtract_live(location.record, 1) }
            }
        }
    }

    /// Ends a live block's usefulness if it is at `at`, leased or not: lookups see it as quarantined, and a put
    /// may rewrite it. Gives the number of live blocks left in its record; `None` if it was not there.
    ///
    /// The entry keeps `at`, so that what reclaims the record ([`Index::try_evict`], [`Index::remove`]) clears
    /// it away.
    pub fn quarantine(&self, print: BlockFingerprint, at: Location) -> Option<u16> {
        let mut inner = write(self.partition(print));
        let slot = inner.table.get_mut(print).filter(|slot| slot.is(State::Live, at))?;
        if kvarts_layout::planted!("quarantined-served") {
            return None;
        }
        slot.settle(State::Quarantined, at);
        if slot.leased() {
            slot.hint_leased(false);
            inner.drop_pins(print);
        }
        drop(inner);
        Some(self.records.subtract_live(at.record, 1))
    }
}
