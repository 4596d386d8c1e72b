//! Tiles that were read and verified, kept in the memory of requests for as long as no request needs it.
//!
//! A tile is kept when it is read for the second time within a while, as it lies: nothing is copied, and later reads
//! of it send the same bytes. Whether it may be given is asked of the store each time
//! ([`StoreTiles::recall`](kvarts_store::engine::StoreTiles::recall)); a tile that is not what would be read now is
//! forgotten.
//!
//! What is kept takes memory from no request: one that finds no room has tiles forgotten until there is some, and while
//! one waits nothing is kept. The tenant that has most of it loses first, of that one the tile that was not used for
//! longest: so none can push out what the others have below an equal part. What is sent of a tile counts as its reader's
//! own memory as well, kept or not.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvarts_contract::api::Placed;
use kvarts_contract::buffers::SharedBuf;
use kvarts_layout::plan::Tile;
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};
use kvarts_store::engine::TileIdentity;

/// Parts of the memory of requests: the main one and the small one.
pub(super) const PARTS: usize = 2;
/// Beginnings of tiles that are remembered, to know which are read again.
const SEEN: usize = 1 << 14;

/// Where in a read a tile begins: tiles of equal reads that begin alike are the same tile.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct TileStart {
    /// Whose blocks.
    pub namespace: NamespaceId,
    /// Their group.
    pub group: Group,
    /// Their coordinate.
    pub coordinate: Coordinate,
    /// The first block.
    pub key: BlockKey,
    /// The first layer.
    pub layer: u32,
    /// In layer order: how many blocks the read wants, else none.
    pub blocks: Option<u32>,
    /// In block order: the layer behind the last that it wants.
    pub layers_end: Option<u32>,
}

impl TileStart {
    /// Keys are digests: a few of their bits tell them apart.
    fn hash(&self) -> u64 {
        let first = |bytes: &[u8]| bytes.iter().take(8).fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
        let small = [self.layer, self.blocks.unwrap_or(0), self.layers_end.unwrap_or(0), self.group.0];
        let start = first(&self.key.0) ^ first(self.namespace.as_bytes()).rotate_left(32);
        small.iter().fold(start | 1, |sum, one| {
            (sum ^ u64::from(*one)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
        })
    }
}

/// A tile that is kept.
#[derive(Debug)]
pub struct CachedTile {
    /// How many blocks, and which layers: `blocks` counts from zero.
    pub tile: Tile,
    /// Its memory, without what its first reader had to do with it.
    pub buf: SharedBuf,
    /// The places of its chunks there, with their digests.
    pub placed: Placed,
    /// What it was read from.
    pub identity: TileIdentity,
}

#[derive(Debug)]
struct Entry<T> {
    tile: Arc<T>,
    bytes: u64,
    part: usize,
    tenant: u32,
    used: u64,
}

/// What one tenant has of one part.
#[derive(Debug, Default)]
struct Of {
    bytes: u64,
    /// By when they were used last.
    ages: BTreeMap<u64, TileStart>,
}

#[derive(Debug, Default)]
struct Part {
    most: u64,
    bytes: u64,
    tenants: BTreeMap<u32, Of>,
    /// Requests that wait for memory: nothing is kept meanwhile.
    waiting: usize,
}

#[derive(Debug)]
struct State<T> {
    tiles: BTreeMap<TileStart, Entry<T>>,
    parts: [Part; PARTS],
    /// Uses so far.
    uses: u64,
    /// What was read lately, by the low bits.
    seen: Box<[u64]>,
}

/// The tiles. Usable from any thread.
#[derive(Debug)]
pub struct TileCache<T = CachedTile> {
    state: Mutex<State<T>>,
    hits: AtomicU64,
    misses: AtomicU64,
}

/// A request that waits for memory, for as long as this lives.
#[derive(Debug)]
pub struct Waiting<'a, T>(&'a TileCache<T>, usize);

impl<T> TileCache<T> {
    /// Room for this many bytes of each part.
    pub fn new(most: [u64; PARTS]) -> Self {
        let parts = most.map(|most| Part { most, ..Part::default() });
        let (tiles, seen) = (BTreeMap::new(), vec![0; SEEN].into());
        let state = Mutex::new(State { tiles, parts, uses: 0, seen });
        Self { state, hits: AtomicU64::new(0), misses: AtomicU64::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Each change is whole before anything in it can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tile that begins here, if one is kept.
    pub fn find(&self, start: &TileStart) -> Option<Arc<T>> {
        self.lock().touch(start)
    }

    /// A tile of a read was given from here, or had to be read.
    pub fn count(&self, hit: bool) {
        let counter = if hit { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Tiles of reads that were given from here, and those that had to be read.
    pub fn counts(&self) -> (u64, u64) {
        (self.hits.load(Ordering::Relaxed), self.misses.load(Ordering::Relaxed))
    }

    /// Whether a tile that begins here is worth keeping: one did so lately. It is noted that one does.
    pub fn is_wanted(&self, start: &TileStart) -> bool {
        let hash = start.hash();
        let mut state = self.lock();
        if state.parts.iter().all(|part| part.most == 0) {
            return false;
        }
        let slot = state.seen.get_mut(hash as usize % SEEN);
        slot.is_some_and(|slot| std::mem::replace(slot, hash) == hash)
    }

    /// Keeps a tile of `bytes` bytes for its tenant, in place of one that begins alike.
    pub fn keep(&self, start: TileStart, (part, tenant): (usize, u32), bytes: u64, tile: T) {
        let mut gone = Vec::new();
        {
            let mut state = self.lock();
            gone.extend(state.forget(&start));
            while let Some(of) = state.parts.get(part)
                && of.waiting == 0
                && bytes <= of.most
            {
                if of.bytes + bytes <= of.most {
                    state.insert(start, (part, tenant), bytes, tile);
                    break;
                }
                gone.extend(state.forget_one(part, |_| true));
            }
        }
        // Memory goes back outside of the lock: its waiters are woken.
        drop(gone);
    }

    /// Forgets a tile, if it is still the one that is kept.
    pub fn forget(&self, start: &TileStart, tile: &Arc<T>) {
        let mut state = self.lock();
        let is_it = state.tiles.get(start).is_some_and(|entry| Arc::ptr_eq(&entry.tile, tile));
        let gone = if is_it { state.forget(start) } else { None };
        drop(state);
        drop(gone);
    }

    /// Gives the memory of one tile of a part back that helps, unless it is being sent; false if there is none.
    pub fn give_back_one(&self, part: usize, helps: impl Fn(&T) -> bool) -> bool {
        let gone = self.lock().forget_one(part, helps);
        gone.is_some()
    }

    /// A request waits for memory of a part: all of it that helps is given back, and nothing is kept, until this is dropped.
    pub fn wait(&self, part: usize, helps: impl Fn(&T) -> bool) -> Waiting<'_, T> {
        if let Some(part) = self.lock().parts.get_mut(part) {
            part.waiting += 1;
        }
        while self.give_back_one(part, &helps) {}
        Waiting(self, part)
    }

    /// Bytes of a part that are kept.
    pub fn bytes(&self, part: usize) -> u64 {
        self.lock().parts.get(part).map_or(0, |part| part.bytes)
    }
}

impl<T> Drop for Waiting<'_, T> {
    fn drop(&mut self) {
        if let Some(part) = self.0.lock().parts.get_mut(self.1) {
            part.waiting -= 1;
        }
    }
}

impl<T> State<T> {
    fn touch(&mut self, start: &TileStart) -> Option<Arc<T>> {
        let entry = self.tiles.get_mut(start)?;
        self.uses += 1;
        let ages = &mut self.parts.get_mut(entry.part)?.tenants.get_mut(&entry.tenant)?.ages;
        let start = ages.remove(&entry.used)?;
        ages.insert(self.uses, start);
        entry.used = self.uses;
        Some(Arc::clone(&entry.tile))
    }

    fn insert(&mut self, start: TileStart, (part, tenant): (usize, u32), bytes: u64, tile: T) {
        let Some(of_part) = self.parts.get_mut(part) else { return };
        self.uses += 1;
        let used = self.uses;
        of_part.bytes += bytes;
        let of = of_part.tenants.entry(tenant).or_default();
        of.bytes += bytes;
        of.ages.insert(used, start.clone());
        self.tiles.insert(start, Entry { tile: Arc::new(tile), bytes, part, tenant, used });
    }

    fn forget(&mut self, start: &TileStart) -> Option<Entry<T>> {
        let entry = self.tiles.remove(start)?;
        let part = self.parts.get_mut(entry.part)?;
        part.bytes -= entry.bytes;
        if let Some(of) = part.tenants.get_mut(&entry.tenant) {
            of.bytes -= entry.bytes;
            of.ages.remove(&entry.used);
            if of.ages.is_empty() {
                part.tenants.remove(&entry.tenant);
            }
        }
        Some(entry)
    }

    /// Forgets the oldest tile that helps, of the tenant that has most of a part and has one.
    fn forget_one(&mut self, part: usize, helps: impl Fn(&T) -> bool) -> Option<Entry<T>> {
        let mut tenants: Vec<&Of> = self.parts.get(part)?.tenants.values().collect();
        tenants.sort_by_key(|of| of.bytes);
        let is_one = |start: &&TileStart| self.tiles.get(*start).is_some_and(|entry| helps(&entry.tile));
        let start = tenants.iter().rev().find_map(|of| of.ages.values().find(is_one))?.clone();
        self.forget(&start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn start(number: u64) -> TileStart {
        let mut key = [7; 32];
        key[..8].copy_from_slice(&number.to_le_bytes());
        TileStart {
            namespace: NamespaceId([1; 32]),
            group: Group(0),
            coordinate: Coordinate::Replicated,
            key: BlockKey(key),
            layer: 0,
            blocks: None,
            layers_end: Some(1),
        }
    }

    fn has(cache: &TileCache<u64>, numbers: std::ops::Range<u64>) -> Vec<u64> {
        numbers.filter(|number| cache.find(&start(*number)).is_some()).collect()
    }

    #[test]
    fn the_tile_that_was_not_used_for_longest_goes_first_and_no_more_is_kept_than_may_be() {
        let cache = TileCache::new([4 * MIB, MIB]);
        for number in 0..4 {
            cache.keep(start(number), (0, 1), MIB, number);
        }
        assert_eq!(cache.find(&start(0)).as_deref(), Some(&0));
        cache.keep(start(4), (0, 1), MIB, 4);
        assert_eq!((cache.bytes(0), has(&cache, 0..5)), (4 * MIB, vec![0, 2, 3, 4]));
        cache.keep(start(5), (0, 1), 5 * MIB, 5);
        cache.keep(start(6), (1, 1), 2 * MIB, 6);
        assert_eq!((has(&cache, 5..7), cache.bytes(1)), (vec![], 0), "more than a part may have");
        // In place of one that begins alike.
        cache.keep(start(4), (0, 1), 2 * MIB, 40);
        assert_eq!((cache.find(&start(4)).as_deref(), cache.bytes(0)), (Some(&40), 4 * MIB));
    }

    #[test]
    fn of_three_tenants_none_pushes_out_what_another_has_below_a_third() {
        let cache = TileCache::new([30 * MIB, 0]);
        for number in 0..10 {
            cache.keep(start(number), (0, 1), MIB, number);
            cache.keep(start(100 + number), (0, 2), MIB, number);
        }
        for number in 200..1200 {
            cache.keep(start(number), (0, 3), MIB, number);
        }
        assert_eq!((has(&cache, 0..10).len(), has(&cache, 100..110).len()), (10, 10));
        assert_eq!(has(&cache, 200..1200), (1190..1200).collect::<Vec<_>>());
        // One that has nothing takes from the one that has most, and so do requests.
        for number in 2000..2005 {
            cache.keep(start(number), (0, 4), MIB, number);
        }
        assert!((0..12).all(|_| cache.give_back_one(0, |_| true)));
        let left = [0..10, 100..110, 200..1200, 2000..2005].map(|range| has(&cache, range).len());
        assert_eq!((left.iter().sum::<usize>(), left.iter().max(), left[3] >= 4), (18, Some(&5), true));
    }

    #[test]
    fn only_tiles_that_help_are_given_back() {
        let cache = TileCache::new([8 * MIB, MIB]);
        (0..6).for_each(|number| cache.keep(start(number), (0, 1 + number as u32 % 2), MIB, number));
        assert!(!cache.give_back_one(0, |tile| *tile > 9));
        assert_eq!(cache.bytes(0), 6 * MIB);
        assert!(cache.give_back_one(0, |tile| *tile == 3));
        assert_eq!(has(&cache, 0..6), [0, 1, 2, 4, 5]);
        let _waiting = cache.wait(0, |tile| tile.is_multiple_of(2));
        assert_eq!(has(&cache, 0..6), [1, 5]);
    }

    #[test]
    fn while_a_request_waits_nothing_of_its_part_is_kept() {
        let cache = TileCache::new([4 * MIB, 4 * MIB]);
        for part in 0..2 {
            cache.keep(start(part as u64), (part, 1), MIB, 0);
        }
        let (waiting, another) = (cache.wait(0, |_| true), cache.wait(0, |_| true));
        assert_eq!((cache.bytes(0), cache.bytes(1)), (0, MIB));
        drop(waiting);
        cache.keep(start(7), (0, 1), MIB, 7);
        assert_eq!(cache.bytes(0), 0, "another one waits");
        drop(another);
        cache.keep(start(7), (0, 1), MIB, 7);
        assert_eq!(cache.bytes(0), MIB);
    }

    #[test]
    fn what_is_read_once_is_not_worth_keeping_and_what_is_kept_goes_when_it_is_forgotten() {
        let cache = TileCache::new([4 * MIB, 0]);
        assert!(!cache.is_wanted(&start(1)) && !cache.is_wanted(&start(2)));
        assert!(cache.is_wanted(&start(1)) && cache.is_wanted(&start(1)));
        assert!(!cache.is_wanted(&TileStart { layer: 1, ..start(1) }));
        let none = TileCache::<u64>::new([0, 0]);
        assert!(!none.is_wanted(&start(1)) && !none.is_wanted(&start(1)));
        cache.keep(start(1), (0, 1), MIB, 1);
        let found = cache.find(&start(1)).unwrap();
        cache.keep(start(1), (0, 1), MIB, 2);
        cache.forget(&start(1), &found);
        assert_eq!(cache.find(&start(1)).as_deref(), Some(&2), "it is another one by now");
        cache.forget(&start(1), &cache.find(&start(1)).unwrap());
        assert_eq!((cache.bytes(0), has(&cache, 1..2)), (0, vec![]));
    }
}
