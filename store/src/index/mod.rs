//! The index: which blocks are here, and where. Shared by all threads, in memory only, no I/O, no clock.
//!
//! A block stands in it under a [`BlockFingerprint`], in one of three states: *pending* (a put is in flight),
//! *live* (at a [`Location`]: a block of a record), *quarantined* (its bytes failed verification; a miss to
//! readers, free to be put again). Absent is the fourth.
//!
//! Invariants:
//! - a fingerprint has at most one entry, and one put at a time owns a pending one, by its [`Ticket`];
//! - an entry that is live points at a record that [`Records`] has, and is counted in that record's `live`;
//! - a block under a lease that is in force does not leave by [`Index::try_evict`].
//!
//! The index may be wrong about a block in two ways, both harmless and both found by the reader, who compares
//! the whole key with the record's header: two keys may share a fingerprint (see [`BlockFingerprint`]), and a
//! location may be out of date by the time it is used. [`Index::locate`] gives location and record as of one
//! moment; a reader must then hold the segment before a later moment can recycle it.
//!
//! Entries lie in partitions (256, unless asked otherwise), each some tables under a reader-writer lock. A lookup
//! takes one lock for reading, a batch takes each lock once, and nothing waits for a device or an executor.
//! The locks guard no call into foreign code, so a panic under one would be a bug of this module; the lock is
//! then used on, since all that a torn table can cause is again a location that the reader's check refuses.
//!
//! Lock order: partition, then its pins, then leases; partition, then a shard of records, then the ledger.

mod chains;
mod changes;
mod gathering;
mod groups;
mod leases;
mod pinning;
mod records;
mod table;
mod tables;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::PoisonError;

pub use crate::memory_ids::{BlockFingerprint, FingerprintKey, RecordId};
pub use chains::{Cut, Descent, Known, Walk};
pub use changes::{Deleted, Reservation, Ticket};
pub use gathering::{Gathering, Recovered};
pub use leases::{LeaseError, LeaseTerms, PINS_MAX, PinShare};
pub use pinning::{Eviction, Swept};
pub use records::{OwnerCursor, RecordCursor, RecordError, RecordInfo, Records};

use groups::{Groups, partition_of};
use leases::{Leases, Pins};
use table::{Slot, State};
use tables::Tables;

use kvarts_contract::sync::atomic::AtomicU32;
use kvarts_contract::sync::{Mutex, MutexGuard, Race, RwLock, RwLockReadGuard, RwLockWriteGuard, planted};

/// Partitions of an index as a power of two, unless asked otherwise.
const PARTITION_BITS: u32 = 8;
/// More partitions than 2^12 would cost more memory than contention.
const PARTITION_BITS_MAX: u32 = 12;
/// Below this many fingerprints a batch is not worth grouping.
const BATCH_MIN: usize = 8;

/// Where a block is: which record, and which of its blocks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Location {
    /// The record.
    pub record: RecordId,
    /// The block's place within it, from zero.
    pub block: u16,
}

/// What the index knows of a block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Lookup {
    /// Nothing.
    Absent,
    /// A put of it is in flight.
    Pending,
    /// It is here.
    Live(Location),
    /// It was here and failed verification: a miss.
    Quarantined,
}

/// How warm a block is, coarsely. The index keeps it and never acts on it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Heat {
    /// Uses since it was last cooled, up to 3.
    pub frequency: u8,
    /// Whether it is known that something hangs on it, or unknown that nothing does.
    pub continued: bool,
    /// The coarse time of its last use, modulo [`EPOCHS`]; the caller says what one step is.
    pub epoch: u16,
}

/// Bytes of a count that stands outside of its entry, about.
const CROWDED_BYTES: usize = 24;

/// How many coarse times there are.
pub const EPOCHS: u16 = 1 << 10;

impl Heat {
    /// Steps from its last use to `now`.
    pub fn age(&self, now: u16) -> u16 {
        now.wrapping_sub(self.epoch) % EPOCHS
    }
}

/// One entry, as a snapshot lists it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The block.
    pub print: BlockFingerprint,
    /// Its state. Never `Absent`.
    pub state: Lookup,
    /// How warm it is.
    pub heat: Heat,
    /// Whether a lease or pin is on it; one that has expired counts until it is swept up.
    pub leased: bool,
}

/// A live block with what is known of its record, as of one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Located {
    /// Where it is.
    pub location: Location,
    /// The record.
    pub record: RecordInfo,
    /// How warm it is.
    pub heat: Heat,
    /// Whether a lease or pin is on it; one that has expired counts until it is swept up.
    pub leased: bool,
    /// How many records and puts hang on it ([`Index::hang`]).
    pub hanging: u32,
}

/// The memory an index takes, with everything counted.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct IndexMemory {
    /// All bytes: tables by their capacity, records by their chunks, locks, and leases (these estimated).
    pub bytes: usize,
    /// Entries, whatever their state.
    pub blocks: usize,
    /// Records.
    pub records: usize,
    /// Bytes of what records have, without memory that is kept for the next.
    pub record_bytes: usize,
    /// Bytes by blocks; zero when there is no block.
    pub bytes_per_block: f64,
}

#[derive(Debug)]
struct Inner {
    table: Tables,
    /// Under a lock of its own, so that leases are taken and ended while others look up.
    pins: Mutex<Pins>,
    /// How many records hang on a block, of those of which an entry cannot count it. By the first 64 bits of its fingerprint.
    crowded: BTreeMap<u64, u32>,
}

/// Aligned so that two partitions' locks do not share a cache line.
#[derive(Debug)]
#[repr(align(64))]
struct Partition(RwLock<Inner>);

/// Which blocks are here. See the module's documentation.
pub struct Index {
    key: FingerprintKey,
    partitions: Box<[Partition]>,
    bits: u32,
    records: Records,
    leases: Leases,
    tickets: AtomicU32,
    /// How many were begun.
    gatherings: AtomicU32,
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Index").field("memory", &self.memory()).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

impl Index {
    /// An empty index whose fingerprints are made under `seed`, which must be random, secret, and the same for
    /// as long as fingerprints are kept anywhere. `expected_blocks` are taken in without growing; it sizes an
    /// allocation, so a number that comes from a disk must have been bounded.
    pub fn new(seed: &[u8; 32], expected_blocks: usize) -> Self {
        Self::with_partitions(seed, expected_blocks, PARTITION_BITS)
    }

    /// The same with `2^bits` partitions, 2^12 at most. More let more threads change the index at once.
    pub fn with_partitions(seed: &[u8; 32], expected_blocks: usize, bits: u32) -> Self {
        let bits = bits.min(PARTITION_BITS_MAX);
        let mean = expected_blocks >> bits;
        // Fingerprints fall into partitions at random: three standard deviations take in the fuller ones.
        let each = if expected_blocks == 0 { 0 } else { mean + 3 * mean.isqrt() + 1 };
        let inner =
            || Inner { table: Tables::new(bits, each), pins: Mutex::default(), crowded: BTreeMap::new() };
        Self {
            key: FingerprintKey::new(seed),
            partitions: (0..1usize << bits).map(|_| Partition(RwLock::new(inner()))).collect(),
            bits,
            records: Records::new(),
            leases: Leases::default(),
            tickets: AtomicU32::new(0),
            gatherings: AtomicU32::new(0),
        }
    }

    /// The key under which this index's fingerprints are made.
    pub fn key(&self) -> &FingerprintKey {
        &self.key
    }

    /// The records that its entries point at.
    pub fn records(&self) -> &Records {
        &self.records
    }

    fn partition(&self, print: BlockFingerprint) -> &RwLock<Inner> {
        // Below `1 << bits`, which is how many there are.
        &self.partitions[partition_of(print, self.bits)].0
    }

    /// What is known of one block.
    pub fn lookup(&self, print: BlockFingerprint) -> Lookup {
        read(self.partition(print)).table.get(print).map_or(Lookup::Absent, Slot::lookup)
    }

    /// Replaces `out` by what is known of each block, in order. Each answer is right at some moment of the
    /// call; the answers are not one moment's.
    pub fn lookup_many(&self, prints: &[BlockFingerprint], out: &mut Vec<Lookup>) {
        out.clear();
        if prints.len() < BATCH_MIN {
            out.extend(prints.iter().map(|print| self.lookup(*print)));
            return;
        }
        out.resize(prints.len(), Lookup::Absent);
        for (partition, places) in Groups::of(prints, self.bits, |print| *print).iter() {
            let inner = read(&self.partitions[partition].0);
            inner.table.warm_all(places.iter().map(|place| prints[*place as usize]));
            for place in places {
                let place = *place as usize;
                if let Some(slot) = inner.table.get(prints[place]) {
                    out[place] = slot.lookup();
                }
            }
        }
    }

    /// The block with all that is known of it; `None` if it is absent.
    pub fn get(&self, print: BlockFingerprint) -> Option<Entry> {
        read(self.partition(print)).table.get(print).map(entry)
    }

    /// A live block's location and record, as of one moment; `None` if it is not live.
    pub fn locate(&self, print: BlockFingerprint) -> Option<Located> {
        // The record is read under the partition's lock: while the entry is there, it is not freed.
        let inner = read(self.partition(print));
        let slot = inner.table.get(print).filter(|slot| slot.state() == Some(State::Live))?;
        let (location, heat, leased) = (slot.location(), slot.heat(), slot.leased());
        let hanging = inner.hanging(slot);
        if planted(Race::RecordAfterLookup) {
            drop(inner);
        }
        Some(Located { location, record: self.records.get(location.record)?, heat, leased, hanging })
    }

    /// Notes a use of each block at the coarse time `epoch`. Absent ones are passed over.
    pub fn touch(&self, prints: &[BlockFingerprint], epoch: u16) {
        self.touch_with(prints, epoch, None);
    }

    /// The same; with a second, it is that of their records' last use.
    pub fn touch_with(&self, prints: &[BlockFingerprint], epoch: u16, second: Option<u32>) {
        let warmer = |heat: Heat| Heat { frequency: heat.frequency.saturating_add(1), epoch, ..heat };
        let mut records = vec![None; if second.is_some() { prints.len() } else { 0 }];
        for (partition, places) in Groups::of(prints, self.bits, |print| *print).iter() {
            let inner = read(&self.partitions[partition].0);
            inner.table.warm_all(places.iter().map(|place| prints[*place as usize]));
            for place in places {
                let Some(slot) = inner.table.get(prints[*place as usize]) else { continue };
                slot.update_heat(warmer);
                if let Some(record) = records.get_mut(*place as usize)
                    && slot.state() == Some(State::Live)
                {
                    *record = Some(slot.location().record);
                }
            }
        }
        // A run of blocks mostly lies in one record, whose lock is taken once then. A number that means another record by now only
        // makes that one look used.
        let Some(second) = second else { return };
        let mut last = None;
        for record in records.into_iter().flatten() {
            if last.replace(record) != Some(record) {
                self.records.note_use(record, second);
            }
        }
    }

    /// Notes of a block, if it is there, that others hang on it.
    pub fn note_continued(&self, print: BlockFingerprint) {
        if let Some(slot) = read(self.partition(print)).table.get(print) {
            slot.update_heat(|heat| Heat { continued: true, ..heat });
        }
    }

    /// The number of partitions.
    pub fn partitions(&self) -> usize {
        self.partitions.len()
    }

    /// Replaces `out` by all entries of one partition as of one moment, in fingerprint order; partitions in
    /// turn give all entries in fingerprint order. Others wait only to change this partition, for
    /// microseconds. A partition that is not there has no entries.
    pub fn snapshot(&self, partition: usize, out: &mut Vec<Entry>) {
        out.clear();
        if let Some(Partition(partition)) = self.partitions.get(partition) {
            let inner = read(partition);
            out.reserve(inner.table.entries());
            out.extend(inner.table.iter().map(entry));
        }
    }

    /// Replaces `out` by at most `most` entries of one partition, those from this fingerprint on, and gives the one with
    /// which to go on, or `None` at the partition's end. What comes or goes meanwhile may or may not be seen.
    pub fn snapshot_part(
        &self,
        partition: usize,
        from: BlockFingerprint,
        most: usize,
        out: &mut Vec<Entry>,
    ) -> Option<BlockFingerprint> {
        out.clear();
        let Partition(partition) = self.partitions.get(partition)?;
        let inner = read(partition);
        let mut slots = inner.table.iter_from(from);
        out.extend(slots.by_ref().take(most).map(entry));
        slots.next().map(Slot::print)
    }

    /// The memory taken now. Reads every partition's size, not its entries.
    pub fn memory(&self) -> IndexMemory {
        let mut blocks = 0;
        let mut bytes = size_of::<Self>() + size_of_val(&*self.partitions);
        for Partition(partition) in &self.partitions {
            let inner = read(partition);
            blocks += inner.table.entries();
            bytes += inner.table.bytes() + lock(&inner.pins).bytes() + inner.crowded.len() * CROWDED_BYTES;
        }
        bytes += self.records.bytes() + self.leases.bytes();
        let bytes_per_block = if blocks == 0 { 0.0 } else { bytes as f64 / blocks as f64 };
        let (records, record_bytes) = (self.records.len(), self.records.held());
        IndexMemory { bytes, blocks, records, record_bytes, bytes_per_block }
    }
}

fn entry(slot: &Slot) -> Entry {
    Entry { print: slot.print(), state: slot.lookup(), heat: slot.heat(), leased: slot.leased() }
}
