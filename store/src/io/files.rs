//! The open files of one [`Io`](super::Io), shared by its threads.
//!
//! An id is never reused, so an operation on a file that was closed meanwhile finds nothing rather than another
//! file. An operation that found its file keeps the descriptor open until it ends, whatever `Close` does.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::FileId;
use super::slots::{Key, Slots};
use super::workers::lock;

/// One open file.
#[derive(Debug)]
pub(super) struct OpenFile(OwnedFd);

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Why direct I/O was asked for and not used, by the first file where that was so.
pub(super) type Cached = Option<String>;

/// The table. Ids have 32 bits: 16 for the place and 16 for its generation.
#[derive(Debug)]
pub(super) struct Files {
    open: RwLock<Slots<Arc<OpenFile>>>,
    cached: Mutex<Cached>,
}

impl Files {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            open: RwLock::new(Slots::with_generations(u32::from(u16::MAX))),
            cached: Mutex::new(None),
        })
    }

    /// The file, if it is open.
    pub(super) fn get(&self, id: FileId) -> Option<Arc<OpenFile>> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.get(unpack(id)).map(Arc::clone)
    }

    /// Takes a descriptor; `None` if no id is left for it.
    pub(super) fn insert(&self, fd: OwnedFd) -> Option<FileId> {
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        let key = open.insert(Arc::new(OpenFile(fd)));
        let id = pack(key);
        if id.is_none() {
            open.remove(key);
        }
        id
    }

    /// Forgets a file; `None` if it was not open. Its descriptor closes when the last operation on it has ended.
    pub(super) fn remove(&self, id: FileId) -> Option<Arc<OpenFile>> {
        self.open.write().unwrap_or_else(PoisonError::into_inner).remove(unpack(id))
    }

    /// Notes that a file goes through the page cache though direct I/O was asked for.
    pub(super) fn note_cached(&self, why: String) {
        lock(&self.cached).get_or_insert(why);
    }

    /// Why a file goes through the page cache though direct I/O was asked for, if one does.
    pub(super) fn cached(&self) -> Cached {
        lock(&self.cached).clone()
    }
}

fn pack(key: Key) -> Option<FileId> {
    let word = key.pack();
    let (generation, place) = (u16::try_from(word >> 32).ok()?, u16::try_from(word & 0xffff_ffff).ok()?);
    Some(FileId((u32::from(generation) << 16) | u32::from(place)))
}

fn unpack(id: FileId) -> Key {
    Key::unpack((u64::from(id.0 >> 16) << 32) | u64::from(id.0 & 0xffff))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn some_fd() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC).unwrap()
    }

    #[test]
    fn the_id_of_a_closed_file_names_nothing_even_after_its_place_is_reused() {
        let files = Files::new();
        let first = files.insert(some_fd()).unwrap();
        assert!(files.get(first).is_some());
        assert!(files.remove(first).is_some());
        assert!(files.remove(first).is_none());
        let second = files.insert(some_fd()).unwrap();
        assert_ne!(first, second);
        assert!(files.get(first).is_none() && files.get(second).is_some());
    }

    #[test]
    fn more_opens_than_generations_of_one_place_still_find_ids() {
        let files = Files::new();
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..(1_u32 << 16) + 10 {
            let id = files.insert(some_fd()).unwrap();
            assert!(seen.insert(id));
            assert!(files.remove(id).is_some());
        }
    }
}
