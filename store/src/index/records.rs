//! What the index knows of each record: where it lies, how long it is, and how many of its blocks are live.
//!
//! Invariants:
//! - a record's number is given out again only after [`Records::free`], which refuses while blocks are live;
//! - `live` never counts too few: it goes up before an entry points at the record and down after;
//! - memory is taken in chunks of 64 records, the first ones of an owner smaller: there is no doubling, nothing moves. A
//!   chunk without a record is given back, but for a few that the next owner finds;
//! - all records of a chunk have one owner, which is a shard on disk and an account: so the records of either are
//!   walked without a look at the others.
//!
//! Records are spread over 16 locks by number. Under them only the ledger's are taken, which learn of every change
//! of a live count; so these may be taken under a partition's lock, never the other way round.
//!
//! Of each record the second of its last use is kept as well. It changes under a lock for reading.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::num::NonZeroU16;
use std::sync::Arc;

use kvarts_layout::format::PAGE_BYTES;

use super::{read, write};
use crate::ledger::{Ledger, Live};
use crate::memory_ids::RecordId;
use kvarts_contract::sync::atomic::{AtomicU32, Ordering::Relaxed};
use kvarts_contract::sync::{PLAIN, Race, RwLock, planted};

/// Locks, a power of two; the low bits of a record's number choose one.
const SHARDS: u32 = 16;
/// Records a chunk holds.
const CHUNK: usize = 64;
/// Records that the first chunks of an owner hold: most namespaces are small, and each has records in many shards.
const FIRST_CHUNKS: [usize; 2] = [4, 16];
/// Free chunks whose memory is kept, of each lock.
const SPARE_MAX: usize = 8;
/// Bytes of an owner without its chunks, and of what lists a chunk, about.
const OWNER_BYTES: usize = 192;
const LISTED_BYTES: usize = 16;
/// Numbers that there are: those for which an entry of the index has bits.
const NUMBERS: u32 = 1 << super::table::RECORD_BITS;
/// Ends the list of free slots.
const NONE: u32 = u32::MAX;
/// Locks over which the records of one owner are spread.
const LOCKS_EACH: u32 = 4;

/// What the index knows of one record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordInfo {
    /// The shard on disk whose log holds it.
    pub shard: u16,
    /// The segment within the shard.
    pub segment: u32,
    /// Where the record begins in the segment, in 4 KiB.
    pub page: u32,
    /// Length of its header, in 4 KiB.
    pub header_pages: u16,
    /// Length of its payload, in 4 KiB.
    pub payload_pages: u32,
    /// How many blocks it was written with.
    pub blocks: NonZeroU16,
    /// How many of them the index points at as live. The index keeps it; what a caller passes is ignored.
    pub live: u16,
    /// The caller's number for what runs have in common: namespace, group, coordinate, layout.
    pub class: u32,
    /// When it expires, in the caller's steps since the store's epoch; 0 for never. Lookups do not see it: the
    /// code that resolves a location compares, and the expiry task removes.
    pub expires: u32,
    /// The first 64 bits of the fingerprint of the block that its first one hangs on; 0 where that is not known, or where a chain
    /// begins.
    pub parent: u64,
    /// It counts among what hangs on that block ([`super::Index::hang`]); when it is freed, it does not any more.
    pub hangs: bool,
}

impl RecordInfo {
    /// Bytes on disk, header and padding included.
    pub fn bytes(&self) -> u64 {
        (u64::from(self.header_pages) + u64::from(self.payload_pages)) * PAGE_BYTES
    }

    /// The share of them that `live` live blocks account for.
    pub fn share(&self, live: u16) -> u64 {
        // Below 2^61: pages, their size and blocks have 33, 12 and 16 bits.
        self.bytes() * u64::from(live.min(self.blocks.get())) / u64::from(self.blocks.get())
    }
}

/// A record as it is kept: its shard is known from its chunk, and what has a few bits shares a word.
#[derive(Clone, Copy)]
struct Packed {
    /// The page in 24 bits, the payload in 23, whether it hangs on something in one, the header in 16; as two halves, since more
    /// than 4 bytes of alignment would cost each record 4 bytes.
    pages: [u32; 2],
    segment: u32,
    class: u32,
    expires: u32,
    parent: [u32; 2],
    blocks: NonZeroU16,
    live: u16,
}

const fn halves(whole: u64) -> [u32; 2] {
    [whole as u32, (whole >> 32) as u32]
}

const fn whole([low, high]: [u32; 2]) -> u64 {
    low as u64 | (high as u64) << 32
}

impl Packed {
    const PAGE_BITS: u32 = 24;
    const PAYLOAD_BITS: u32 = 23;
    const HANGS: u64 = 1 << (Self::PAGE_BITS + Self::PAYLOAD_BITS);

    /// `None` for a record that lies beyond 64 GiB of a segment, or is longer than 32 GiB.
    fn of(info: &RecordInfo) -> Option<Self> {
        let fits = info.page >> Self::PAGE_BITS == 0 && info.payload_pages >> Self::PAYLOAD_BITS == 0;
        let pages = u64::from(info.page)
            | u64::from(info.payload_pages) << Self::PAGE_BITS
            | if info.hangs { Self::HANGS } else { 0 }
            | u64::from(info.header_pages) << 48;
        let RecordInfo { segment, class, expires, blocks, live, .. } = *info;
        fits.then_some(Self {
            pages: halves(pages),
            segment,
            class,
            expires,
            parent: halves(info.parent),
            blocks,
            live,
        })
    }

    fn info(&self, shard: u16) -> RecordInfo {
        let pages = whole(self.pages);
        RecordInfo {
            shard,
            segment: self.segment,
            page: (pages & ((1 << Self::PAGE_BITS) - 1)) as u32,
            header_pages: (pages >> 48) as u16,
            payload_pages: (pages >> Self::PAGE_BITS & ((1 << Self::PAYLOAD_BITS) - 1)) as u32,
            blocks: self.blocks,
            live: self.live,
            class: self.class,
            expires: self.expires,
            parent: whole(self.parent),
            hangs: pages & Self::HANGS != 0,
        }
    }

    fn set_hangs(&mut self, hangs: bool) {
        let others = whole(self.pages) & !Self::HANGS;
        self.pages = halves(others | if hangs { Self::HANGS } else { 0 });
    }
}

enum Slot {
    Free {
        next: u32,
    },
    /// With the second of its last use.
    Used(Packed, AtomicU32),
}

const _: () = assert!(size_of::<Slot>() == 36 || !PLAIN);

/// Whose the records of a chunk are: the shard on disk, and the number of the account.
type Owner = (u16, u32);

struct Chunk {
    owner: Owner,
    slots: Box<[Slot]>,
    /// The first free slot, or `NONE`.
    free: u32,
    used: u32,
}

impl Chunk {
    fn new(owner: Owner, len: usize) -> Self {
        let next = |at: usize| if at < len { at as u32 } else { NONE };
        let slots = (1..=len).map(|at| Slot::Free { next: next(at) }).collect();
        Self { owner, slots, free: next(0), used: 0 }
    }
}

/// The chunks of one owner, and those of them that have free slots.
#[derive(Default)]
struct Owned {
    chunks: BTreeSet<u32>,
    open: BTreeSet<u32>,
}

/// Why an operation on a record was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RecordError {
    /// No record has this number: it was freed, or never given out. The caller's bookkeeping is wrong.
    Unknown(RecordId),
    /// The record cannot be freed: remove or move these live blocks first.
    InUse {
        /// How many blocks are live.
        live: u16,
    },
    /// The record is held by [`Records::hold`]: it is freed with the release.
    Held,
    /// More blocks would be live than a record can have. The caller passed more blocks than it wrote.
    TooManyBlocks(RecordId),
    /// Every record number is taken. Evict or compact before putting more.
    Full,
}

impl fmt::Display for RecordError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(id) => write!(f, "record {id} is not in the index (a bug: report it)"),
            Self::InUse { live } => {
                write!(f, "the record has {live} live blocks: remove or move the blocks first")
            }
            Self::Held => {
                write!(f, "a reader still uses the record; the record is freed when the reader releases it")
            }
            Self::TooManyBlocks(id) => {
                write!(f, "record {id} would have too many live blocks (a bug: report it)")
            }
            Self::Full => {
                write!(f, "no record number is free: evict blocks or compact the store before the next put")
            }
        }
    }
}

impl std::error::Error for RecordError {}

#[derive(Default)]
struct Shard {
    chunks: Vec<Chunk>,
    owners: BTreeMap<Owner, Owned>,
    /// Free chunks: those with memory, and those without.
    spare: Vec<u32>,
    bare: Vec<u32>,
    used: usize,
    /// Slots of the chunks in use.
    slots: usize,
    /// Records that are held (few at a time): how often, and whether one was to be freed meanwhile.
    held: BTreeMap<u32, (u32, bool)>,
}

impl Shard {
    fn slot(&self, local: u32) -> Option<&Slot> {
        self.chunks.get(local as usize / CHUNK)?.slots.get(local as usize % CHUNK)
    }

    fn info(&self, local: u32) -> Option<RecordInfo> {
        let chunk = self.chunks.get(local as usize / CHUNK)?;
        match chunk.slots.get(local as usize % CHUNK)? {
            Slot::Used(record, _) => Some(record.info(chunk.owner.0)),
            Slot::Free { .. } => None,
        }
    }

    fn slot_mut(&mut self, local: u32) -> Option<&mut Slot> {
        self.chunks.get_mut(local as usize / CHUNK)?.slots.get_mut(local as usize % CHUNK)
    }

    fn packed(&mut self, local: u32) -> Option<&mut Packed> {
        match self.slot_mut(local)? {
            Slot::Used(record, _) => Some(record),
            Slot::Free { .. } => None,
        }
    }

    /// A chunk of `len` slots for this owner.
    fn chunk(&mut self, owner: Owner, len: usize) -> Option<u32> {
        let number = match (len == CHUNK).then(|| self.spare.pop()).flatten() {
            Some(spare) => {
                self.chunks.get_mut(spare as usize)?.owner = owner;
                spare
            }
            None => match self.bare.pop() {
                Some(bare) => {
                    *self.chunks.get_mut(bare as usize)? = Chunk::new(owner, len);
                    bare
                }
                None => {
                    let number = u32::try_from(self.chunks.len()).ok()?;
                    if number >= NUMBERS / SHARDS / CHUNK as u32 {
                        return None;
                    }
                    self.chunks.push(Chunk::new(owner, len));
                    number
                }
            },
        };
        self.slots += len;
        let owned = self.owners.entry(owner).or_default();
        owned.chunks.insert(number);
        owned.open.insert(number);
        Some(number)
    }

    fn insert(&mut self, owner: Owner, info: &RecordInfo) -> Option<u32> {
        let packed = Packed::of(info)?;
        let owned = self.owners.get(&owner);
        let number = match owned.and_then(|owned| owned.open.first().copied()) {
            Some(open) => open,
            None => {
                let chunks = owned.map_or(0, |owned| owned.chunks.len());
                self.chunk(owner, FIRST_CHUNKS.get(chunks).copied().unwrap_or(CHUNK))?
            }
        };
        let chunk = self.chunks.get_mut(number as usize)?;
        let place = chunk.free;
        let slot = chunk.slots.get_mut(place as usize)?;
        let Slot::Free { next } = *slot else { return None };
        *slot = Slot::Used(packed, AtomicU32::new(0));
        chunk.free = next;
        chunk.used += 1;
        self.used += 1;
        if next == NONE {
            self.owners.get_mut(&owner)?.open.remove(&number);
        }
        Some(number * CHUNK as u32 + place)
    }

    fn free(&mut self, local: u32, id: RecordId) -> Result<RecordInfo, RecordError> {
        if let Some((_, free)) = self.held.get_mut(&local).filter(|_| !planted(Race::FreeIgnoresHold)) {
            *free = true;
            return Err(RecordError::Held);
        }
        let unknown = RecordError::Unknown(id);
        let info = self.info(local).ok_or(unknown)?;
        if info.live > 0 {
            return Err(RecordError::InUse { live: info.live });
        }
        let number = local / CHUNK as u32;
        let chunk = self.chunks.get_mut(number as usize).ok_or(unknown)?;
        let place = local % CHUNK as u32;
        let next = std::mem::replace(&mut chunk.free, place);
        if let Some(slot) = chunk.slots.get_mut(place as usize) {
            *slot = Slot::Free { next };
        }
        chunk.used -= 1;
        self.used -= 1;
        let (owner, empty) = (chunk.owner, chunk.used == 0);
        let owned = self.owners.get_mut(&owner).ok_or(unknown)?;
        if !empty {
            owned.open.insert(number);
            return Ok(info);
        }
        owned.open.remove(&number);
        owned.chunks.remove(&number);
        if owned.chunks.is_empty() {
            self.owners.remove(&owner);
        }
        self.slots -= chunk.slots.len();
        if chunk.slots.len() == CHUNK && self.spare.len() < SPARE_MAX {
            self.spare.push(number);
        } else {
            *chunk = Chunk::new(owner, 0);
            self.bare.push(number);
        }
        Ok(info)
    }

    /// The records of one chunk.
    fn list(&self, chunk: usize, lock: u32, out: &mut Vec<(RecordId, RecordInfo, u32)>) {
        let first = (chunk * CHUNK) as u32;
        let slots = self.chunks.get(chunk).map(|chunk| &*chunk.slots).unwrap_or_default();
        let shard = self.chunks.get(chunk).map_or(0, |chunk| chunk.owner.0);
        for (local, slot) in (first..).zip(slots) {
            if let Slot::Used(record, used) = slot {
                out.push((RecordId(local * SHARDS + lock), record.info(shard), used.load(Relaxed)));
            }
        }
    }

    /// Bytes of the chunks in use.
    fn held(&self) -> usize {
        let chunks = self.chunks.len() - self.spare.len() - self.bare.len();
        self.slots * size_of::<Slot>()
            + chunks * (size_of::<Chunk>() + LISTED_BYTES)
            + self.owners.len() * OWNER_BYTES
    }

    fn bytes(&self) -> usize {
        let without = (self.chunks.capacity() - self.chunks.len()) + self.spare.len() + self.bare.len();
        self.held()
            + without * size_of::<Chunk>()
            + self.spare.len() * CHUNK * size_of::<Slot>()
            + (self.spare.capacity() + self.bare.capacity()) * 4
    }
}

/// Where a walk over the records of some owners stands. Start with the default.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OwnerCursor {
    lock: u32,
    owner: Owner,
    /// The first of the owner's chunks that was not looked at.
    chunk: u32,
}

/// Where a walk over all records stands. Start with the default.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RecordCursor {
    shard: u32,
    chunk: usize,
}

/// All records, by number. Callable from any thread.
pub struct Records {
    shards: Box<[RwLock<Shard>]>,
    /// Which shard the next record goes to.
    turn: AtomicU32,
    ledger: Arc<Ledger>,
}

impl fmt::Debug for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Records").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl Records {
    pub(super) fn new() -> Self {
        let shard = || RwLock::new(Shard::default());
        Self {
            shards: (0..SHARDS).map(|_| shard()).collect(),
            turn: AtomicU32::new(0),
            ledger: Arc::default(),
        }
    }

    /// Where the live bytes of all records are counted.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Tells the ledger that the record had `before` live blocks until now.
    fn recount(&self, info: Option<RecordInfo>, before: u16) {
        let Some(info) = info else { return };
        let place = (u32::from(info.shard), info.segment);
        let live = |blocks: u16| Live { bytes: info.share(blocks), blocks: blocks.into() };
        self.ledger.moved(place, info.class, live(before), live(info.live));
    }

    fn shard(&self, id: RecordId) -> (&RwLock<Shard>, u32) {
        // The remainder is below the number of shards.
        (&self.shards[(id.0 % SHARDS) as usize], id.0 / SHARDS)
    }

    /// Takes in a record that no block points at yet, and gives it its number.
    pub fn insert(&self, info: RecordInfo) -> Result<RecordId, RecordError> {
        let owner = (info.shard, self.ledger.number_of(info.class));
        let turn = self.turn.fetch_add(1, Relaxed) % LOCKS_EACH;
        let shard = (u32::from(owner.0) * LOCKS_EACH).wrapping_add(owner.1 * 7).wrapping_add(turn) % SHARDS;
        let info = RecordInfo { live: 0, ..info };
        let local = write(&self.shards[shard as usize]).insert(owner, &info).ok_or(RecordError::Full)?;
        Ok(RecordId(local * SHARDS + shard))
    }

    /// The record with this number.
    pub fn get(&self, id: RecordId) -> Option<RecordInfo> {
        let (shard, local) = self.shard(id);
        read(shard).info(local)
    }

    /// Blocks of the record were used in this second; an earlier one than is known changes nothing.
    pub fn note_use(&self, id: RecordId, second: u32) {
        let (shard, local) = self.shard(id);
        if let Some(Slot::Used(_, used)) = read(shard).slot(local)
            && used.load(Relaxed) < second
        {
            used.fetch_max(second, Relaxed);
        }
    }

    /// The second in which a block of the record was used last; 0 if that was never said.
    pub fn used(&self, id: RecordId) -> u32 {
        let (shard, local) = self.shard(id);
        match read(shard).slot(local) {
            Some(Slot::Used(_, used)) => used.load(Relaxed),
            _ => 0,
        }
    }

    /// Notes of a record whether it counts among what hangs on its parent; false if it is another record by now, or that is known
    /// already.
    pub(super) fn note_hangs(&self, id: RecordId, parent: u64, hangs: bool) -> bool {
        let (shard, local) = self.shard(id);
        let mut shard = write(shard);
        let other = shard.info(local).filter(|info| info.parent == parent && info.hangs != hangs);
        let record = other.and_then(|_| shard.packed(local));
        record.map(|record| record.set_hangs(hangs)).is_some()
    }

    /// Forgets a record that has no live block, and gives what was known of it. Its number may be given out
    /// again at once, so the caller must not use it any more.
    pub(super) fn free(&self, id: RecordId) -> Result<RecordInfo, RecordError> {
        let (shard, local) = self.shard(id);
        write(shard).free(local, id)
    }

    /// Keeps a record's number from being given out again until [`super::Index::release_record`], and gives what is known of
    /// the record; `None` if there is none under this number. While it is held, a location in it means this record
    /// and no later one.
    pub fn hold(&self, id: RecordId) -> Option<RecordInfo> {
        let (shard, local) = self.shard(id);
        let mut shard = write(shard);
        let info = shard.info(local)?;
        shard.held.entry(local).or_default().0 += 1;
        Some(info)
    }

    /// Ends one hold. A record that was to be freed meanwhile is freed with the last one: then it gives what was known of it.
    pub(super) fn release(&self, id: RecordId) -> Option<RecordInfo> {
        let (shard, local) = self.shard(id);
        let mut shard = write(shard);
        let (holds, free) = shard.held.get_mut(&local)?;
        *holds -= 1;
        let (last, free) = (*holds == 0, *free);
        if last {
            shard.held.remove(&local);
        }
        // Refused if a block became live meanwhile: then the change that takes the last one frees it.
        (last && free).then(|| shard.free(local, id).ok()).flatten()
    }

    /// Changes when a record expires; false if there is no such record.
    pub fn set_expires(&self, id: RecordId, expires: u32) -> bool {
        let (shard, local) = self.shard(id);
        write(shard).packed(local).map(|record| record.expires = expires).is_some()
    }

    pub(super) fn add_live(&self, id: RecordId, blocks: usize) -> Result<(), RecordError> {
        let (shard, local) = self.shard(id);
        let mut shard = write(shard);
        let record = shard.packed(local).ok_or(RecordError::Unknown(id))?;
        let sum = u16::try_from(blocks).ok().and_then(|blocks| record.live.checked_add(blocks));
        let before = std::mem::replace(&mut record.live, sum.ok_or(RecordError::TooManyBlocks(id))?);
        self.recount(shard.info(local), before);
        Ok(())
    }

    /// Takes `blocks` from the live count and gives what is left.
    pub(super) fn subtract_live(&self, id: RecordId, blocks: usize) -> u16 {
        let (shard, local) = self.shard(id);
        let mut shard = write(shard);
        let Some(record) = shard.packed(local) else { return 0 };
        debug_assert!(
            usize::from(record.live) >= blocks,
            "record {id} must have at least {blocks} live blocks, but has {}",
            record.live
        );
        let before = record.live;
        let left = before.saturating_sub(u16::try_from(blocks).unwrap_or(u16::MAX));
        record.live = left;
        self.recount(shard.info(local), before);
        left
    }

    /// The number of records.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| read(shard).used).sum()
    }

    /// Whether there is no record.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Replaces `out` by the records of one chunk (at most 64) as they are at one moment, and gives where to
    /// go on, or `None` at the end. A record that is there from the first call to the last is seen exactly
    /// once; others may or may not be. Holds one lock, for microseconds.
    pub fn snapshot(
        &self,
        from: RecordCursor,
        out: &mut Vec<(RecordId, RecordInfo)>,
    ) -> Option<RecordCursor> {
        out.clear();
        let shard = read(self.shards.get(from.shard as usize)?);
        if shard.chunks.len() <= from.chunk {
            return Some(RecordCursor { shard: from.shard + 1, chunk: 0 });
        }
        let mut listed = Vec::with_capacity(CHUNK);
        shard.list(from.chunk, from.shard, &mut listed);
        out.extend(listed.into_iter().map(|(id, info, _)| (id, info)));
        Some(RecordCursor { chunk: from.chunk + 1, ..from })
    }

    /// As [`Records::snapshot`], of one shard's records alone, or of one account's in it, each with the second of its
    /// last use. The work is that of the records listed, however many others there are.
    pub fn snapshot_of(
        &self,
        (shard, account): (u16, Option<u32>),
        from: OwnerCursor,
        out: &mut Vec<(RecordId, RecordInfo, u32)>,
    ) -> Option<OwnerCursor> {
        out.clear();
        let locked = read(self.shards.get(from.lock as usize)?);
        let first = (shard, account.unwrap_or(0)).max(from.owner);
        let last = (shard, account.unwrap_or(u32::MAX));
        let Some((owner, owned)) =
            (first <= last).then(|| locked.owners.range(first..=last).next()).flatten()
        else {
            return Some(OwnerCursor { lock: from.lock + 1, ..OwnerCursor::default() });
        };
        let at = if *owner == from.owner { from.chunk } else { 0 };
        let Some(&chunk) = owned.chunks.range(at..).next() else {
            // Behind the last account of a shard there is the next shard.
            let next = owner.1.checked_add(1).map_or((owner.0.saturating_add(1), 0), |next| (owner.0, next));
            return Some(OwnerCursor { owner: next, chunk: 0, ..from });
        };
        locked.list(chunk as usize, from.lock, out);
        Some(OwnerCursor { lock: from.lock, owner: *owner, chunk: chunk + 1 })
    }

    /// Bytes of what records and their owners have, without memory that is kept for the next.
    pub(super) fn held(&self) -> usize {
        self.shards.iter().map(|shard| read(shard).held()).sum()
    }

    /// Bytes of memory taken, beyond `self`.
    pub(super) fn bytes(&self) -> usize {
        let shards = self.shards.iter().map(|shard| read(shard).bytes()).sum::<usize>();
        shards + size_of_val(&*self.shards)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn info(n: u32) -> RecordInfo {
        RecordInfo {
            shard: (n % 3) as u16,
            segment: n,
            page: n * 2,
            header_pages: 1,
            payload_pages: 17,
            blocks: NonZeroU16::new(16).unwrap(),
            live: 0,
            class: 3,
            expires: 0,
            parent: 0,
            hangs: false,
        }
    }

    fn all(records: &Records) -> Vec<(RecordId, RecordInfo)> {
        let (mut seen, mut some) = (Vec::new(), Vec::new());
        let mut cursor = Some(RecordCursor::default());
        while let Some(from) = cursor {
            cursor = records.snapshot(from, &mut some);
            seen.append(&mut some);
        }
        seen
    }

    proptest! {
        #[test]
        fn records_answer_as_a_map_does(ops in prop::collection::vec((0..6u8, any::<prop::sample::Index>()), 1..300)) {
            let records = Records::new();
            let mut model = BTreeMap::new();
            for (n, (op, which)) in (0..).zip(ops) {
                let ids: Vec<_> = model.keys().copied().collect();
                if op < 3 || ids.is_empty() {
                    let id = records.insert(RecordInfo { live: 9, ..info(n) }).unwrap();
                    prop_assert_eq!(model.insert(id, info(n)), None, "a number in use was given out");
                    continue;
                }
                let id = ids[which.index(ids.len())];
                let known = model.get_mut(&id).unwrap();
                match op {
                    3 => {
                        prop_assert_eq!(records.add_live(id, 2), Ok(()));
                        known.live += 2;
                    }
                    4 if known.live > 0 => {
                        known.live -= 1;
                        prop_assert_eq!(records.subtract_live(id, 1), known.live);
                    }
                    4 => {
                        prop_assert!(records.set_expires(id, n));
                        known.expires = n;
                    }
                    _ if known.live > 0 => {
                        prop_assert_eq!(records.free(id), Err(RecordError::InUse { live: known.live }));
                    }
                    _ => {
                        prop_assert_eq!(records.free(id), Ok(*known));
                        model.remove(&id);
                        prop_assert_eq!(records.get(id), None);
                        prop_assert_eq!(records.free(id), Err(RecordError::Unknown(id)));
                    }
                }
            }
            prop_assert_eq!(records.len(), model.len());
            for (id, known) in &model {
                prop_assert_eq!(records.get(*id), Some(*known));
            }
            prop_assert_eq!(all(&records).into_iter().collect::<BTreeMap<_, _>>(), model);
        }
    }

    #[test]
    fn numbers_of_freed_records_are_given_out_before_memory_is_taken() {
        let records = Records::new();
        let mut ids: Vec<_> = (0..20_000).map(|n| records.insert(info(n)).unwrap()).collect();
        assert_eq!(all(&records).len(), 20_000);
        let bytes = records.bytes();
        assert!(bytes < 20_000 * 37 + 16 * CHUNK * 36 + 8192, "{bytes}");
        for _ in 0..3 {
            ids.iter().for_each(|id| assert!(records.free(*id).is_ok()));
            assert!(records.is_empty());
            ids = (0..20_000).map(|n| records.insert(info(n)).unwrap()).collect();
        }
        assert!(records.bytes() <= bytes + 2048, "{} after {bytes}", records.bytes());
        // Another owner takes what the first one has given back.
        let old = all(&records);
        old.iter().for_each(|(id, _)| assert!(records.free(*id).is_ok()));
        (0..20_000).for_each(|n| assert!(records.insert(RecordInfo { shard: 40, ..info(n) }).is_ok()));
        assert!(records.bytes() <= bytes * 2, "{} after {bytes}", records.bytes());
    }

    #[test]
    fn what_many_small_owners_have_is_little_and_goes_with_their_records() {
        let records = Records::new();
        for account in 0..512 {
            records.ledger().assign(
                account,
                kvarts_layout::NamespaceId([account as u8; 32].map(|one| one ^ (account >> 8) as u8)),
            );
        }
        let one = |class: u32, shard: u16| RecordInfo { class, shard, ..info(1) };
        let each = |class: u32, shards: u16| (0..shards).map(move |shard| one(class, shard));
        let small = |class| each(class, 4).flat_map(|info| [info; 4]);
        (0..512).flat_map(small).for_each(|info| assert!(records.insert(info).is_ok()));
        let count = records.len();
        assert!(records.held() <= count * 512, "{} bytes for {count} records", records.held());
        // One that was large and is small gives back what it does not need any more.
        let before = records.held();
        let ids: Vec<_> = (0..50_000).map(|_| records.insert(one(7, 9)).unwrap()).collect();
        assert!(records.held() - before > 50_000 * 32);
        for (n, id) in ids.into_iter().enumerate() {
            if n % 10_000 != 0 {
                records.free(id).unwrap();
            }
        }
        assert!(records.held() - before < 5 * 4096, "{} for 5 records", records.held() - before);
        assert_eq!(records.len(), count + 5);
        assert!(records.bytes() < records.held() + (1 << 20));
    }

    fn of(records: &Records, owner: (u16, Option<u32>)) -> (Vec<(RecordId, RecordInfo, u32)>, usize) {
        let (mut seen, mut some, mut looks) = (Vec::new(), Vec::new(), 0);
        let mut cursor = Some(OwnerCursor::default());
        while let Some(from) = cursor {
            cursor = records.snapshot_of(owner, from, &mut some);
            looks += 1;
            seen.append(&mut some);
        }
        (seen, looks)
    }

    #[test]
    fn the_records_of_one_shard_and_of_one_account_are_walked_without_a_look_at_others() {
        let records = Records::new();
        let (one, other) = (kvarts_layout::NamespaceId([1; 32]), kvarts_layout::NamespaceId([2; 32]));
        records.ledger().assign(1, one);
        records.ledger().assign(2, other);
        let number = records.ledger().account(other).number();
        let mine: Vec<_> =
            (0..300).map(|n| records.insert(RecordInfo { shard: 7, class: 2, ..info(n) }).unwrap()).collect();
        let looks = of(&records, (7, Some(number))).1;
        for n in 0..20_000 {
            records.insert(RecordInfo { shard: 7, class: 1, ..info(n) }).unwrap();
            records.insert(RecordInfo { shard: 8, class: 2, ..info(n) }).unwrap();
        }
        mine.iter().for_each(|id| records.note_use(*id, 5 + id.0));
        let (found, again) = of(&records, (7, Some(number)));
        assert_eq!(again, looks, "other records are looked at");
        assert_eq!(found.len(), 300);
        assert!(
            found.iter().all(|(id, info, used)| mine.contains(id) && info.class == 2 && *used == 5 + id.0)
        );
        assert_eq!(of(&records, (7, None)).0.len(), 20_300);
        assert_eq!(of(&records, (9, None)).0.len(), 0);
        records.note_use(mine[0], 1);
        assert_eq!(records.used(mine[0]), 5 + mine[0].0, "an earlier use changes nothing");
        let (some, _) = of(&records, (u16::MAX, None));
        assert!(some.is_empty());
    }

    #[test]
    fn the_number_of_a_held_record_is_not_given_out_again() {
        let records = Records::new();
        let id = records.insert(info(1)).unwrap();
        assert_eq!(records.hold(id), Some(info(1)));
        assert_eq!(records.hold(id), Some(info(1)));
        assert_eq!(records.free(id), Err(RecordError::Held));
        assert!((0..64).all(|n| records.insert(info(3 * n + 1)).unwrap() != id));
        records.release(id);
        assert_eq!(records.get(id), Some(info(1)));
        records.release(id);
        assert_eq!(records.get(id), None, "it was asked to be freed and had no live block");
        assert_eq!(records.hold(id), None);
        let live = records.insert(info(2)).unwrap();
        records.add_live(live, 1).unwrap();
        records.hold(live).unwrap();
        assert_eq!(records.free(live), Err(RecordError::Held));
        records.release(live);
        assert!(records.get(live).is_some(), "a block of it is live");
        let fresh = records.insert(info(3)).unwrap();
        records.hold(fresh).unwrap();
        records.release(fresh);
        assert!(records.get(fresh).is_some(), "no caller asked for it to be freed");
    }

    #[test]
    fn a_live_count_that_would_overflow_is_refused() {
        let records = Records::new();
        let id = records.insert(info(0)).unwrap();
        assert_eq!(records.add_live(id, 65_535), Ok(()));
        assert_eq!(records.add_live(id, 1), Err(RecordError::TooManyBlocks(id)));
        assert_eq!(records.subtract_live(id, 65_535), 0);
        assert_eq!(records.add_live(id, 65_536), Err(RecordError::TooManyBlocks(id)));
        let unknown = RecordId(12_345);
        assert_eq!(records.add_live(unknown, 1), Err(RecordError::Unknown(unknown)));
        assert!(!records.set_expires(unknown, 1));
    }
}
