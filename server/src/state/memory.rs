//! Backpressure: the memory that requests share, one arena, made at the start, never grown. All bounds: docs/SERVER.md, "Limits
//! of memory".
//!
//! Reads up to a certain size have a part of it to themselves, so that a small one does not wait behind large
//! ones. Who finds it full waits. A piece comes back when the last user of it is done: the device, the engine, or
//! the connection that sends it.
//!
//! What no request has may keep tiles that were read ([`TileCache`]). That memory counts as free: it is given back before a
//! request waits.
//!
//! Where there are several tenants, each has a share of both that no other can take (`parts`), so that slow clients of some
//! tenants leave room for those of others. A share is a range of the memory: pieces are contiguous, and pieces that others hold
//! would leave gaps in it otherwise.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use kvarts_contract::buffers::arena::{Arena, ArenaUse, Within};
use kvarts_contract::buffers::{Buf, BufMut, Region};

use super::parts::{Part, Parts};
use super::tile_cache::{CachedTile, TileCache, TileStart};

const PAGE: usize = 4096;
/// The part of all memory that small requests have to themselves: one byte in this many.
const SMALL_PART: usize = 8;

/// The main part, and the one of small requests, where a part is told by its number.
const MAIN: usize = 0;
const SMALL: usize = 1;

/// The arenas.
#[derive(Clone, Debug)]
pub struct Memory {
    main: Arena,
    small: Arena,
    small_max: u64,
    tiles: Arc<TileCache>,
}

impl Memory {
    /// Takes the memory now; `small_max` is the largest request that counts as small. Of all of it tiles that were read may
    /// have `cache` bytes while no request needs them.
    pub fn new(bytes: usize, small_max: u64, cache: u64) -> io::Result<Self> {
        let small = bytes / SMALL_PART;
        // In large pages where there are some: a device that is told of each small one reads at half its speed.
        let arena = |bytes| Region::anonymous_huge(bytes).map(|(region, _)| Arena::new(region));
        let cache_small = cache / SMALL_PART as u64;
        let tiles = Arc::new(TileCache::new([cache - cache_small, cache_small]));
        Ok(Self { main: arena(bytes - small)?, small: arena(small)?, small_max, tiles })
    }

    /// Tiles that were read, kept in what no request has.
    pub fn tiles(&self) -> &TileCache {
        &self.tiles
    }

    /// Keeps a tile of `len` bytes, which lies in a piece of its own.
    pub fn keep(&self, start: TileStart, tenant: u32, len: u64, tile: CachedTile) {
        // As the arena counts.
        let bytes = len.max(1).next_multiple_of(PAGE as u64);
        self.tiles.keep(start, (self.part_of(len), tenant), bytes, tile);
    }

    /// Which part a piece of `len` bytes belongs to.
    fn part_of(&self, len: u64) -> usize {
        if len <= self.small_max { SMALL } else { MAIN }
    }

    fn arena(&self, part: usize) -> &Arena {
        if part == SMALL { &self.small } else { &self.main }
    }

    /// A piece now, if there is room or can be made by forgetting tiles.
    fn take_now(&self, part: usize, bytes: usize, within: &Within) -> Option<BufMut> {
        let arena = self.arena(part);
        loop {
            let piece = arena.try_take_within(bytes, within);
            if piece.is_some() || !self.tiles.give_back_one(part, |tile| Self::lies(tile, within)) {
                return piece;
            }
        }
    }

    /// Whether the memory of a tile can be had in these ranges once it is given back.
    fn lies(tile: &CachedTile, within: &Within) -> bool {
        let at = tile.buf.offset();
        within.own.contains(&at) || within.shared.contains(&at)
    }

    /// The regions, for registering them with the engine.
    pub fn regions(&self) -> [&Arc<Region>; 2] {
        [self.main.region(), self.small.region()]
    }

    /// The largest piece that one request may ask for: a quarter, so that none can starve all others.
    pub fn piece_max(&self) -> u64 {
        self.main.usage().total as u64 / 4
    }

    /// A piece of exactly `len` bytes as soon as there is room; none if it is larger than any may be.
    pub async fn take(&self, len: u64, within: &Within) -> Option<BufMut> {
        let (bytes, part) = (usize::try_from(len).ok()?, self.part_of(len));
        if part == MAIN && len > self.piece_max() {
            return None;
        }
        if let Some(piece) = self.take_now(part, bytes, within) {
            return Some(piece);
        }
        let _waiting = self.tiles.wait(part, |tile| Self::lies(tile, within));
        self.arena(part).take_within(bytes, within).await
    }

    /// A piece now, if after it half of the memory is still free; not for small requests.
    fn take_spare(&self, len: u64, within: &Within) -> Option<BufMut> {
        let bytes = usize::try_from(len).ok().filter(|_| len > self.small_max)?;
        if self.is_spare(len) { self.take_now(MAIN, bytes, within) } else { None }
    }

    /// Whether half of the memory is still free when a request has this many more bytes.
    pub fn is_spare(&self, len: u64) -> bool {
        let [usage, _] = self.usage();
        (usage.used as u64).saturating_add(len) <= usage.total as u64 / 2
    }

    /// Whether more than half of the memory is used: then every request takes less at a time.
    pub fn is_crowded(&self) -> bool {
        let [usage, _] = self.usage();
        usage.used > usage.total / 2
    }

    /// How full they are of what requests have: the main one and the small one.
    pub fn usage(&self) -> [ArenaUse; 2] {
        let of = |(arena, part): (&Arena, usize)| {
            let usage = arena.usage();
            ArenaUse { used: usage.used.saturating_sub(self.tiles.bytes(part) as usize), ..usage }
        };
        [(&self.main, MAIN), (&self.small, SMALL)].map(of)
    }
}

/// What tenants have of the memory: of the main part and of the small one, in pages. What is set aside for a tenant is a range in which no
/// other has pieces, but for those that were taken before the memory was divided again.
#[derive(Debug)]
pub struct MemoryShares([Parts; 2]);

impl MemoryShares {
    /// All of the memory for these tenants.
    pub fn new(memory: &Memory, tenants: &[u32]) -> Self {
        Self(memory.usage().map(|usage| Parts::new((usage.total / PAGE) as u64, tenants, 0, usize::MAX)))
    }

    /// Divides it among these tenants.
    pub fn divide(&self, tenants: &[u32]) {
        self.0.iter().for_each(|parts| parts.divide(tenants));
    }

    /// A piece of exactly `len` bytes as soon as it is the tenant's turn and there is room; none if it is larger than any may be.
    pub async fn take(&self, memory: &Memory, tenant: u32, len: u64) -> Option<BufMut> {
        let pages = self.charge(memory, tenant, len).await?;
        self.take_charged(memory, tenant, len).await.map(|piece| Self::kept(piece, pages))
    }

    /// The same for a tenant that was charged for it.
    pub async fn take_charged(&self, memory: &Memory, tenant: u32, len: u64) -> Option<BufMut> {
        loop {
            let within = self.within(memory, tenant, len);
            let piece = memory.take(len, &within).await?;
            // Divided again while it waited: there this may be in the range of another one.
            if self.within(memory, tenant, len) == within {
                return Some(piece);
            }
        }
    }

    /// The same now, if after it half of the memory is still free; not for small requests.
    pub fn take_spare(&self, memory: &Memory, tenant: u32, len: u64) -> Option<BufMut> {
        memory.take_spare(len, &self.within(memory, tenant, len))
    }

    /// Where a tenant's pieces of `len` bytes lie.
    fn within(&self, memory: &Memory, tenant: u32, len: u64) -> Within {
        let [own, shared] = self.0[memory.part_of(len)].ranges(tenant);
        let bytes = |pages: Range<u64>| pages.start as usize * PAGE..pages.end as usize * PAGE;
        match kvarts_layout::planted!("shares-without-places") {
            true => Within { own: 0..0, shared: 0..memory.arena(memory.part_of(len)).usage().total },
            false => Within { own: bytes(own), shared: bytes(shared) },
        }
    }

    /// What a piece of `len` bytes takes of a tenant's share, as soon as it is the tenant's turn.
    pub async fn charge(&self, memory: &Memory, tenant: u32, len: u64) -> Option<Part> {
        let (part, pages) = self.part(memory, len)?;
        part.take(tenant, pages).await
    }

    /// The same now, if no request waits for it.
    pub fn try_charge(&self, memory: &Memory, tenant: u32, len: u64) -> Option<Part> {
        let (part, pages) = self.part(memory, len)?;
        part.try_take(tenant, pages)
    }

    /// What a tenant should take at once of the main part, if it may want up to `most`: as much as is set aside for it, so
    /// that it waits only for its own requests, and never less than `least`.
    pub fn at_once(&self, tenant: u32, least: u64, most: u64) -> u64 {
        let [main, _] = &self.0;
        let own = main.own(tenant).map_or(most, |pages| pages * PAGE as u64);
        own.min(most).max(least)
    }

    fn part(&self, memory: &Memory, len: u64) -> Option<(&Parts, u64)> {
        let [main, small] = &self.0;
        if len > memory.piece_max() {
            return None;
        }
        let pages = len.div_ceil(PAGE as u64).max(1);
        Some((if len <= memory.small_max { small } else { main }, pages))
    }

    /// The piece goes back before what it takes of a share.
    fn kept(piece: BufMut, pages: Part) -> BufMut {
        piece.kept_by(Arc::new(pages))
    }
}

/// Bytes of a request's memory that are not written any more: they can be sent as they are.
#[derive(Debug)]
pub struct SharedBytes(Buf);

impl SharedBytes {
    /// The bytes of `buf`, shared and not copied.
    ///
    /// # Safety
    /// Nothing may write to these bytes until the result and all its clones are gone: the read that filled them has
    /// announced them, and this process gave the memory to no other.
    #[allow(unsafe_code, reason = "only this function turns filled memory into bytes to send")]
    pub unsafe fn bytes(buf: Buf) -> Bytes {
        Bytes::from_owner(Self(buf))
    }
}

impl AsRef<[u8]> for SharedBytes {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the range is mapped for as long as the `Buf` in `self` lives, and the caller of
        // `SharedBytes::bytes` promised that nothing writes to it meanwhile.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), self.0.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_contract::blocking::block_on;
    use kvarts_wire::limits;

    /// All of the main part.
    fn all(memory: &Memory) -> Within {
        Within { own: 0..0, shared: 0..memory.usage()[0].total }
    }

    #[test]
    fn shared_bytes_keep_their_piece_and_give_it_back_at_the_end() {
        let memory = Memory::new(1 << 20, 4096, 0).unwrap();
        let mut buf = block_on(memory.take(8192, &all(&memory))).unwrap();
        buf.fill(7);
        // SAFETY: the piece has no other user.
        let bytes = unsafe { SharedBytes::bytes(buf.freeze()) };
        let part = bytes.slice(100..200);
        drop(bytes);
        assert_eq!((&part[..], memory.usage()[0].used), (&[7u8; 100][..], 8192));
        drop(part);
        assert_eq!(memory.usage()[0].used, 0);
    }

    #[test]
    fn spare_memory_is_what_others_are_not_short_of() {
        let memory = Memory::new(1 << 20, 4096, 0).unwrap();
        let half = memory.usage()[0].total as u64 / 2;
        let all = all(&memory);
        assert!(memory.take_spare(4096, &all).is_none(), "small requests are never ahead of their turn");
        let kept = memory.take_spare(half, &all).unwrap();
        assert!(!memory.is_crowded() && memory.take_spare(8192, &all).is_none());
        let more = block_on(memory.take(8192, &all)).unwrap();
        assert!(memory.is_crowded());
        drop((kept, more));
        assert!(!memory.is_crowded() && memory.take_spare(8192, &all).is_some());
    }

    #[test]
    fn whatever_others_hold_each_tenant_has_its_share_of_either_part() {
        for count in [2, 3, 5] {
            let tenants: Vec<u32> = (1..=count).collect();
            let memory = Memory::new(8 << 20, 8192, 0).unwrap();
            let shares = MemoryShares::new(&memory, &tenants);
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            for (at, len) in [(0, 64 << 10), (1, 8192)] {
                let total = memory.usage()[at].total;
                let mut take = |tenant: u32, held: &mut Vec<BufMut>| {
                    let mut taking = std::pin::pin!(shares.take(&memory, tenant, len));
                    match taking.as_mut().poll(&mut context) {
                        std::task::Poll::Ready(piece) => held.push(piece.unwrap()),
                        std::task::Poll::Pending => return false,
                    }
                    true
                };
                let (mut held, mut last) = (Vec::new(), Vec::new());
                for tenant in 1..count {
                    while take(tenant, &mut held) {}
                }
                while take(count, &mut last) {}
                let own = total / 2 / count as usize;
                assert!((last.len() + 1) * len as usize > own, "{count} tenants: {} pieces", last.len());
                // The first piece is of the first tenant's own share.
                drop(held.remove(0));
                assert!(take(1, &mut held), "what came back can be had again");
            }
            assert!(memory.usage().iter().all(|usage| usage.used == 0));
        }
    }

    #[test]
    fn pieces_that_others_hold_leave_no_gaps_in_what_a_tenant_has_of_its_own() {
        let memory = Memory::new(8 << 20, 8192, 0).unwrap();
        let shares = MemoryShares::new(&memory, &[1, 2, 3]);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let mut take = |tenant: u32, len: u64| match std::pin::pin!(shares.take(&memory, tenant, len))
            .poll(&mut context)
        {
            std::task::Poll::Ready(piece) => piece,
            std::task::Poll::Pending => None,
        };
        // Two tenants hold every second piece of all that they can have.
        let mut held = Vec::new();
        for len in [12 << 10, 4096] {
            for _ in 0..2 {
                for tenant in [1, 2] {
                    held.extend(std::iter::from_fn(|| take(tenant, len)));
                }
                let mut at = 0;
                held.retain(|_| {
                    at += 1;
                    at % 2 == 0
                });
            }
        }
        let [main, small] = memory.usage();
        assert!(main.used < main.total / 2 && small.used < small.total / 2, "{main:?}, {small:?}");
        let own = shares.at_once(3, 0, u64::MAX);
        assert_eq!(own, (main.total / 6 / PAGE * PAGE) as u64);
        let piece = take(3, own).expect("all of it at once");
        assert!(take(3, 8192).is_some(), "and of the small part");
        // Divided among more, no tenant has less than is set aside; what is held stays where it is.
        drop(piece);
        shares.divide(&[1, 2, 3, 4]);
        held.clear();
        for tenant in 1..=4 {
            held.extend(take(tenant, shares.at_once(tenant, 0, u64::MAX)));
        }
        assert_eq!(held.len(), 4);
    }

    #[test]
    fn a_request_that_waits_while_the_memory_is_divided_again_lies_in_no_range_of_another_tenant() {
        let memory = Memory::new(8 << 20, 8192, 0).unwrap();
        let shares = MemoryShares::new(&memory, &[1, 2]);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let mut held = Vec::new();
        for tenant in [2, 1] {
            let own = shares.at_once(tenant, 0, u64::MAX);
            held.extend(block_on(shares.take(&memory, tenant, own)));
        }
        // What is left is of the range that both share.
        held.extend(std::iter::from_fn(|| memory.main.try_take(PAGE)));
        let mut waits = std::pin::pin!(shares.take_charged(&memory, 2, 1 << 20));
        assert!(waits.as_mut().poll(&mut context).is_pending());
        shares.divide(&[1, 2, 3]);
        held.clear();
        let std::task::Poll::Ready(Some(piece)) = waits.as_mut().poll(&mut context) else {
            panic!("it has room")
        };
        let [own, _] = shares.0[MAIN].ranges(2);
        let lies = (piece.offset() / PAGE) as u64..((piece.offset() + piece.len()) / PAGE) as u64;
        assert!(own.start <= lies.start && lies.end <= own.end, "{lies:?} is not in {own:?}");
    }

    #[test]
    fn of_many_tenants_each_has_a_piece_of_a_put_and_a_window_of_a_read_whatever_others_hold() {
        let tenants: Vec<u32> = (1..=30).collect();
        let memory = Memory::new(256 << 20, limits::SMALL_READ_BYTES, 0).unwrap();
        let shares = MemoryShares::new(&memory, &tenants);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let mut take = |tenant: u32, len: u64| match std::pin::pin!(shares.take(&memory, tenant, len))
            .poll(&mut context)
        {
            std::task::Poll::Ready(piece) => Some(piece.unwrap()),
            std::task::Poll::Pending => None,
        };
        let mut held = Vec::new();
        for tenant in 1..30 {
            for len in [limits::PUT_PIECE_BYTES, limits::SMALL_TILE_BYTES] {
                held.extend(std::iter::from_fn(|| take(tenant, len)));
            }
        }
        assert!(take(30, limits::PUT_PIECE_BYTES).is_none(), "more than is set aside waits for others");
        for most in [limits::PUT_PIECE_BYTES, limits::TILE_BYTES] {
            let len = shares.at_once(30, limits::SMALL_TILE_BYTES, most);
            assert!(len > 2 << 20 && take(30, len).is_some(), "{len}");
        }
        // A tenant that came later takes what it finds.
        assert_eq!(
            shares.at_once(31, limits::SMALL_TILE_BYTES, limits::PUT_PIECE_BYTES),
            limits::PUT_PIECE_BYTES
        );
    }

    #[test]
    fn small_requests_have_their_own_and_none_may_take_all() {
        let memory = Memory::new(1 << 20, 4096, 0).unwrap();
        let all = all(&memory);
        let _small = block_on(memory.take(4096, &Within { own: 0..0, shared: 0..4096 })).unwrap();
        assert_eq!(memory.usage().map(|usage| usage.used), [0, 4096]);
        assert!(block_on(memory.take(memory.piece_max() + 1, &all)).is_none());
        assert!(block_on(memory.take(u64::MAX, &all)).is_none());
    }
}
