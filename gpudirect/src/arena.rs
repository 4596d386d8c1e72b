//! The arena: one stretch of anonymous host memory that layers pass through on their way.
//!
//! It is mapped once, in huge pages where the kernel has them, registered once with every ring of a store and pinned
//! once for a device. It never grows: its size is a hard limit, and a piece that is not there is a typed error at
//! once. Pieces are powers of two that split and join again with their twin (a buddy system): whatever was taken in
//! whatever order, when everything is back the arena is whole. A stream takes one piece when it begins, of the largest
//! size that it may have, and uses all of it; nothing is taken while layers move.
//!
//! A piece comes back when the last [`Buf`] of it is gone, and an operation under way holds its buffers: so memory
//! that a disk or a device may still write is never handed out again.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvarts_store::engine::Store;
use kvarts_store::io::{Buf, Region};
use kvarts_store::rt::blocking::block_on;

use crate::device::Device;
use crate::error::DeviceError;

/// The smallest piece.
pub const PIECE_MIN: u64 = 64 << 10;

/// How full an arena is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ArenaUse {
    /// Bytes that are handed out.
    pub used: u64,
    /// The most that ever were at once.
    pub used_max: u64,
    /// Bytes of the largest piece that could be had now.
    pub largest_free: u64,
    /// Bytes in all.
    pub total: u64,
}

struct Free {
    /// Offsets of free pieces, by the power of two of their size above the smallest.
    pieces: Vec<BTreeSet<u64>>,
    used: u64,
    used_max: u64,
}

/// Undoes a registration.
type Undo = Box<dyn FnOnce(&Arc<Region>) + Send>;

struct Shared {
    region: Arc<Region>,
    huge: bool,
    free: Mutex<Free>,
    /// What holds the memory registered or pinned.
    holds: Mutex<Vec<Undo>>,
}

/// The arena. Cheap to clone.
#[derive(Clone)]
pub struct Arena(Arc<Shared>);

struct Piece {
    arena: Arc<Shared>,
    offset: u64,
    order: usize,
}

/// Bytes of a piece of an order.
fn size(order: usize) -> u64 {
    PIECE_MIN << order
}

impl Arena {
    /// Maps `bytes`, rounded up to whole smallest pieces.
    pub fn new(bytes: u64) -> std::io::Result<Self> {
        let no = || std::io::Error::from(std::io::ErrorKind::OutOfMemory);
        let total = bytes.max(PIECE_MIN).checked_next_multiple_of(PIECE_MIN).ok_or_else(no)?;
        let (region, huge) = Region::anonymous_huge(usize::try_from(total).map_err(|_| no())?)?;
        let orders = (total / PIECE_MIN).ilog2() as usize + 1;
        let mut pieces = vec![BTreeSet::new(); orders];
        // The largest pieces first: a size that is no power of two is a row of them.
        let mut at = 0;
        for order in (0..orders).rev() {
            while total - at >= size(order) {
                pieces[order].insert(at);
                at += size(order);
            }
        }
        let free = Mutex::new(Free { pieces, used: 0, used_max: 0 });
        Ok(Self(Arc::new(Shared { region, huge, free, holds: Mutex::default() })))
    }

    /// The memory.
    pub fn region(&self) -> &Arc<Region> {
        &self.0.region
    }

    /// Whether the kernel agreed to try huge pages.
    pub fn is_huge(&self) -> bool {
        self.0.huge
    }

    /// Registers the memory with every ring of a store. An error says why it works unregistered, only slower.
    pub fn register(&self, store: &Store) -> Result<(), String> {
        block_on(store.register_memory(&self.0.region))?;
        let store = store.clone();
        self.hold(Box::new(move |region| {
            // Where an executor is too busy to be told, it keeps the memory until the store closes.
            let _ = store.unregister_memory(region);
        }));
        Ok(())
    }

    /// Pins the memory for a device. An error says why copies are slower.
    pub fn pin(&self, device: &Arc<dyn Device>) -> Result<(), DeviceError> {
        device.pin(&self.0.region)?;
        let device = Arc::clone(device);
        self.hold(Box::new(move |region| device.unpin(region)));
        Ok(())
    }

    fn hold(&self, undo: Undo) {
        self.0.holds.lock().unwrap_or_else(PoisonError::into_inner).push(undo);
    }

    /// The largest piece of at most `most` bytes that is free now, if one of at least `least` bytes is.
    pub fn take(&self, least: u64, most: u64) -> Option<Buf> {
        let (offset, order) = {
            let mut free = self.0.lock();
            let least_order = (0..free.pieces.len()).find(|&order| size(order) >= least)?;
            let most_order = (least_order..free.pieces.len()).rev().find(|&order| size(order) <= most);
            let wanted = most_order.unwrap_or(least_order);
            // The smallest free piece that is large enough, or else the largest that will do.
            let larger = (wanted..free.pieces.len()).find(|&order| !free.pieces[order].is_empty());
            let smaller = || (least_order..wanted).rev().find(|&order| !free.pieces[order].is_empty());
            let mut order = larger.or_else(smaller)?;
            let offset = free.pieces[order].pop_first()?;
            while order > wanted {
                order -= 1;
                free.pieces[order].insert(offset + size(order));
            }
            free.used += size(order);
            free.used_max = free.used_max.max(free.used);
            (offset, order)
        };
        let piece = Arc::new(Piece { arena: Arc::clone(&self.0), offset, order });
        Buf::new(&self.0.region, offset as usize, size(order) as usize).map(|buf| buf.kept_by(piece))
    }

    /// How full it is.
    pub fn usage(&self) -> ArenaUse {
        let free = self.0.lock();
        let largest = free.pieces.iter().rposition(|pieces| !pieces.is_empty());
        ArenaUse {
            used: free.used,
            used_max: free.used_max,
            largest_free: largest.map_or(0, size),
            total: self.0.region.len() as u64,
        }
    }

    /// The largest piece that this arena can ever give.
    pub fn piece_max(&self) -> u64 {
        size(self.0.lock().pieces.len() - 1)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Free> {
        // Every change under the lock is whole before anything in it can panic.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let holds = std::mem::take(self.holds.get_mut().unwrap_or_else(PoisonError::into_inner));
        holds.into_iter().for_each(|undo| undo(&self.region));
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let mut free = self.arena.lock();
        free.used -= size(self.order);
        let (mut offset, mut order) = (self.offset, self.order);
        while order + 1 < free.pieces.len() && free.pieces[order].remove(&(offset ^ size(order))) {
            offset &= !size(order);
            order += 1;
        }
        free.pieces[order].insert(offset);
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({:?})", self.usage())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::InUse;
    use crate::device::emulated::{Emulated, Faults, Model};
    use proptest::prelude::*;

    const KIB: u64 = 1 << 10;

    #[test]
    fn a_piece_is_as_large_as_it_may_be_and_no_larger_than_there_is() {
        let arena = Arena::new(1 << 20).unwrap();
        let half = arena.take(1, 700 * KIB).unwrap();
        assert_eq!(half.len(), 512 << 10);
        let rest = arena.take(100 * KIB, u64::MAX).unwrap();
        assert_eq!(rest.len(), 512 << 10);
        assert!(arena.take(1, 1).is_none(), "the limit is hard");
        assert_eq!(arena.usage().used_max, 1 << 20);
        drop(half.slice(0, 1));
        drop((half, rest));
        assert_eq!(arena.usage().largest_free, 1 << 20);
        assert!(arena.take((1 << 20) + 1, u64::MAX).is_none());
    }

    #[test]
    fn a_size_that_is_no_power_of_two_is_used_whole() {
        let arena = Arena::new(5 * PIECE_MIN).unwrap();
        let taken: Vec<_> = (0..5).map(|_| arena.take(1, 1).unwrap()).collect();
        assert!(arena.take(1, 1).is_none());
        assert_eq!(arena.usage().used, 5 * PIECE_MIN);
        drop(taken);
        assert_eq!((arena.usage().used, arena.usage().largest_free), (0, 4 * PIECE_MIN));
    }

    #[test]
    fn what_was_pinned_is_let_go_with_the_last_handle() {
        let emulated = Emulated::new(Model::default());
        let device: Arc<dyn Device> = Arc::new(emulated.clone());
        let arena = Arena::new(1).unwrap();
        arena.pin(&device).unwrap();
        let piece = arena.take(1, 1).unwrap();
        drop(arena);
        assert_eq!(emulated.in_use().pinned, 1, "a piece keeps the arena");
        drop(piece);
        assert_eq!(emulated.in_use(), InUse::default());
        let pace = crate::pace::RealPace::new();
        let stubborn: Arc<dyn Device> =
            Arc::new(Emulated::with(Model::default(), Faults { no_pin: true, ..Faults::default() }, pace));
        assert!(matches!(Arena::new(1).unwrap().pin(&stubborn), Err(DeviceError::Pin(_))));
    }

    proptest! {
        #[test]
        fn pieces_never_share_a_byte_and_the_arena_is_whole_in_the_end(
            steps in prop::collection::vec((0usize..40, 1u64..600_000), 1..120),
            total in 1u64..40,
        ) {
            let arena = Arena::new(total * PIECE_MIN).unwrap();
            let whole = arena.usage();
            let mut held: Vec<Buf> = Vec::new();
            for (pick, bytes) in steps {
                if pick < held.len() {
                    held.swap_remove(pick);
                } else if let Some(buf) = arena.take(bytes, bytes) {
                    prop_assert!(buf.len() as u64 >= bytes);
                    held.push(buf);
                }
                let mut ranges: Vec<_> = held.iter().map(|buf| (buf.offset(), buf.len())).collect();
                ranges.sort_unstable();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
                prop_assert_eq!(arena.usage().used, ranges.iter().map(|range| range.1 as u64).sum::<u64>());
            }
            held.clear();
            prop_assert_eq!(arena.usage().largest_free, whole.largest_free);
            prop_assert_eq!(arena.usage().used, 0);
        }
    }
}
