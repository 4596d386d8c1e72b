//! The open files of one [`Io`](super::Io), shared by its threads.
//!
//! An id is never reused, so an operation on a file that was closed meanwhile finds nothing rather than another
//! file. An operation that found its file keeps the descriptor open until it ends, whatever `Close` does, and so does
//! whoever keeps it ([`KeptFile`]).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::FileId;
use super::slots::{Key, Slots};
use super::workers::lock;

/// The number of the next file that any table of this process takes in.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// One open file.
#[derive(Debug)]
pub(super) struct OpenFile {
    fd: OwnedFd,
    number: u64,
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// An open file of an [`Io`](super::Io) for somebody who reads it himself: the descriptor stays open for as long as
/// one of these, whatever the `Io` closes. Reading through it moves nothing that others see; whoever has it does
/// nothing else with it.
#[derive(Clone, Debug)]
pub struct KeptFile(Arc<OpenFile>);

impl KeptFile {
    /// Differs between all files that this process has or had open through any `Io`, and stays the same for as long
    /// as this one is open.
    pub fn number(&self) -> u64 {
        self.0.number
    }
}

impl AsFd for KeptFile {
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

    /// The file for somebody who reads it himself, if it is open.
    pub(super) fn keep(&self, id: FileId) -> Option<KeptFile> {
        self.get(id).map(KeptFile)
    }

    /// Takes a descriptor; `None` if no id is left for it.
    pub(super) fn insert(&self, fd: OwnedFd) -> Option<FileId> {
        // It orders nothing: all that counts is that nobody else gets the same.
        let number = NEXT_NUMBER.fetch_add(1, Ordering::Relaxed);
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        let key = open.insert(Arc::new(OpenFile { fd, number }));
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
    fn a_kept_file_outlives_its_close_and_no_two_files_of_any_table_have_one_number() {
        let tables = [Files::new(), Files::new()];
        let ids = tables.each_ref().map(|files| files.insert(some_fd()).unwrap());
        assert_eq!(ids[0], ids[1], "ids are of one table alone");
        let [first, other] = [0, 1].map(|at| tables[at].keep(ids[at]).unwrap());
        assert_ne!(first.number(), other.number());
        assert_eq!(first.number(), tables[0].keep(ids[0]).unwrap().number());
        tables[0].remove(ids[0]).unwrap();
        assert!(tables[0].keep(ids[0]).is_none());
        assert!(rustix::io::fcntl_getfd(&first).is_ok(), "the descriptor was closed under its keeper");
        let next = tables[0].keep(tables[0].insert(some_fd()).unwrap()).unwrap();
        assert!(![first.number(), other.number()].contains(&next.number()));
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
