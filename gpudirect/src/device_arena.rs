//! Device memory that files are read into on their way to where an engine wants them.
//!
//! Allocated once, registered once with what reads files, never grown; what is taken of it comes back with the last
//! handle. What an engine's pool looks like therefore does not matter to the disk: its blocks are put in their places
//! by copies within the device, after they were compared with their digests.

use std::collections::BTreeSet;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::buddy::{ArenaUse, Buddy, PIECE_MIN, size};
use crate::device::{Device, Files, OpenFile, Registered, Route};
use crate::error::DeviceError;

struct Shared {
    files: Arc<dyn Files>,
    memory: Registered,
    free: Mutex<Buddy>,
    route: Route,
    /// File systems of which a read has been seen to come the straight way.
    proven: Mutex<BTreeSet<u64>>,
}

/// The arena. Cheap to clone.
#[derive(Clone)]
pub struct DeviceArena(Arc<Shared>);

/// A piece of it, which comes back when this is dropped.
pub(crate) struct DevicePiece {
    arena: DeviceArena,
    offset: u64,
    order: usize,
}

impl DeviceArena {
    /// Allocates `bytes` on a device, rounded up to whole smallest pieces, and registers them for reads that come straight
    /// or are an error. Says why not where the device cannot read files.
    pub fn new(device: &Arc<dyn Device>, bytes: u64) -> Result<Self, DeviceError> {
        Self::with_route(device, bytes, Route::Strict)
    }

    /// The same for reads that may come another way.
    pub fn with_route(device: &Arc<dyn Device>, bytes: u64, route: Route) -> Result<Self, DeviceError> {
        let files = device.files(route)?;
        let no = DeviceError::NoMemory(bytes);
        let bytes = bytes.max(PIECE_MIN).checked_next_multiple_of(PIECE_MIN).ok_or(no)?;
        let memory = files.register(&device.allocate(bytes)?)?;
        let (free, proven) = (Mutex::new(Buddy::new(bytes)), Mutex::default());
        Ok(Self(Arc::new(Shared { files, memory, free, route, proven })))
    }

    /// How full it is.
    pub fn usage(&self) -> ArenaUse {
        self.lock().usage()
    }

    /// The largest piece that this arena can ever give.
    pub fn piece_max(&self) -> u64 {
        self.lock().piece_max()
    }

    pub(crate) fn files(&self) -> &Arc<dyn Files> {
        &self.0.files
    }

    pub(crate) fn memory(&self) -> &Registered {
        &self.0.memory
    }

    /// Reads a file to `at` in the memory. The first read of each file system must be seen to come the straight way, unless
    /// it may come any.
    pub(crate) fn read(
        &self,
        (file, open): (BorrowedFd<'_>, &OpenFile),
        offset: u64,
        at: u64,
        len: u64,
    ) -> Result<(), DeviceError> {
        let Shared { files, memory, proven, .. } = &*self.0;
        let call = "fstat of a file";
        let failed = |error: rustix::io::Errno| DeviceError::Call { call, why: error.to_string() };
        let system = rustix::fs::fstat(file).map_err(failed)?.st_dev;
        let proven = || proven.lock().unwrap_or_else(PoisonError::into_inner);
        if self.0.route == Route::Any || proven().contains(&system) {
            return files.read(open, offset, memory, at, len);
        }
        files.prove(open, offset, memory, at, len)?;
        proven().insert(system);
        Ok(())
    }

    /// The largest piece of at most `most` bytes that is free now, if one of at least `least` bytes is.
    pub(crate) fn take(&self, least: u64, most: u64) -> Option<DevicePiece> {
        let (offset, order) = self.lock().take(least, most)?;
        Some(DevicePiece { arena: self.clone(), offset, order })
    }

    fn lock(&self) -> MutexGuard<'_, Buddy> {
        // Every change under the lock is whole before anything in it can panic.
        self.0.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DevicePiece {
    /// Where in the arena's memory it begins.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes.
    pub(crate) fn len(&self) -> u64 {
        size(self.order)
    }
}

impl Drop for DevicePiece {
    fn drop(&mut self) {
        self.arena.lock().give(self.offset, self.order);
    }
}

impl fmt::Debug for DeviceArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceArena({:?})", self.usage())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::InUse;
    use crate::device::emulated::{Emulated, Faults, Model};
    use crate::pace::RealPace;

    #[test]
    fn pieces_come_back_and_the_memory_with_the_last_of_them() {
        let emulated = Emulated::new(Model::default());
        let device: Arc<dyn Device> = Arc::new(emulated.clone());
        let arena = DeviceArena::new(&device, 3 * PIECE_MIN).unwrap();
        let first = arena.take(1, 1).unwrap();
        let second = arena.take(PIECE_MIN + 1, u64::MAX).unwrap();
        assert!(arena.take(1, 1).is_none());
        assert!(first.offset() >= second.offset() + second.len() || second.offset() >= PIECE_MIN);
        drop(second);
        assert_eq!((arena.usage().used, arena.usage().largest_free), (PIECE_MIN, 2 * PIECE_MIN));
        drop(arena);
        assert_eq!((emulated.in_use().memories, emulated.in_use().files), (1, 1));
        drop(first);
        assert_eq!(emulated.in_use(), InUse::default());
    }

    #[test]
    fn a_device_that_cannot_read_files_says_so() {
        let faults = Faults { no_files: true, ..Faults::default() };
        let device: Arc<dyn Device> = Arc::new(Emulated::with(Model::default(), faults, RealPace::new()));
        assert!(matches!(DeviceArena::new(&device, 1), Err(DeviceError::Foreign(_))));
        assert_eq!(device.in_use(), InUse::default());
    }
}
