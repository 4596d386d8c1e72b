//! The arena: one stretch of anonymous host memory that layers pass through on their way.
//!
//! It is mapped once, in huge pages where the kernel has them, registered once with every ring of a store and pinned
//! once for a device. It never grows: its size is a hard limit, and a piece that is not there is a typed error at
//! once. Pieces are powers of two that split and join again with their twin (`buddy.rs`). A stream takes one piece when it begins, of the largest
//! size that it may have, and uses all of it; nothing is taken while layers move.
//!
//! A piece comes back when the last [`SharedBuf`] of it is gone, and an operation under way holds its buffers: so memory
//! that a disk or a device may still write is never handed out again.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_store::engine::Store;

pub use crate::buddy::{ArenaUse, PIECE_MIN};
use crate::buddy::{Buddy, size};
use crate::device::Device;
use crate::error::DeviceError;

/// Undoes a registration.
type Undo = Box<dyn FnOnce(&Arc<Region>) + Send>;

struct Shared {
    region: Arc<Region>,
    free: Mutex<Buddy>,
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

impl Arena {
    /// Maps `bytes`, rounded up to whole smallest pieces.
    pub fn new(bytes: u64) -> std::io::Result<Self> {
        let no = || std::io::Error::from(std::io::ErrorKind::OutOfMemory);
        let total = bytes.max(PIECE_MIN).checked_next_multiple_of(PIECE_MIN).ok_or_else(no)?;
        let (region, _) = Region::anonymous_huge(usize::try_from(total).map_err(|_| no())?)?;
        let free = Mutex::new(Buddy::new(total));
        Ok(Self(Arc::new(Shared { region, free, holds: Mutex::default() })))
    }

    /// The memory.
    pub fn region(&self) -> &Arc<Region> {
        &self.0.region
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
    pub fn take(&self, least: u64, most: u64) -> Option<SharedBuf> {
        let (offset, order) = self.0.lock().take(least, most)?;
        let piece = Arc::new(Piece { arena: Arc::clone(&self.0), offset, order });
        SharedBuf::new(&self.0.region, offset as usize, size(order) as usize).map(|buf| buf.kept_by(piece))
    }

    /// How full it is.
    pub fn usage(&self) -> ArenaUse {
        self.0.lock().usage()
    }

    /// The largest piece that this arena can ever give.
    pub fn piece_max(&self) -> u64 {
        self.0.lock().piece_max()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Buddy> {
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
        self.arena.lock().give(self.offset, self.order);
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
            let mut held: Vec<SharedBuf> = Vec::new();
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
