//! The open files of one [`Io`](super::Io), shared by its threads.
//!
//! An id is never reused, so an operation on a file that was closed meanwhile finds nothing rather than another
//! file. An operation that found its file keeps the descriptor open until it ends, whatever `Close` does, and so does
//! its holder ([`KeptFile`]).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::features::Feature;
use super::slots::{Key, Slots};
use super::workers::lock;
use kvarts_contract::io_error::{DirId, FileId};

/// The number of the next file that any table of this process takes in.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// One open file.
#[derive(Debug)]
pub(super) struct OpenFile {
    fd: OwnedFd,
    number: u64,
    /// The directory that it was opened in.
    dir: DirId,
}

impl OpenFile {
    /// The directory that it was opened in.
    pub(super) fn dir(&self) -> DirId {
        self.dir
    }
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// An open file of an [`Io`](super::Io) for a caller that reads it itself: the descriptor stays open for as long as
/// one of these, whatever the `Io` closes. Reading through it moves nothing that others see; its holder does
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

/// The table.
#[derive(Debug)]
pub(super) struct Files {
    open: RwLock<Slots<Arc<OpenFile>>>,
    cached: Mutex<Cached>,
}

impl Files {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { open: RwLock::new(Slots::new()), cached: Mutex::new(None) })
    }

    /// The file, if it is open.
    pub(super) fn get(&self, id: FileId) -> Option<Arc<OpenFile>> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.get(unpack(id)).map(Arc::clone)
    }

    /// The file for a caller that reads it itself, if it is open.
    pub(super) fn keep(&self, id: FileId) -> Option<KeptFile> {
        self.get(id).map(KeptFile)
    }

    /// The directory that an open file was opened in; the first one for what is not open.
    pub(super) fn dir_of(&self, id: FileId) -> DirId {
        self.get(id).map_or(DirId(0), |file| file.dir())
    }

    /// Takes a descriptor.
    pub(super) fn insert(&self, fd: OwnedFd, dir: DirId) -> FileId {
        // It orders nothing: all that counts is that no other gets the same.
        let number = NEXT_NUMBER.fetch_add(1, Ordering::Relaxed);
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        pack(open.insert(Arc::new(OpenFile { fd, number, dir })))
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

fn pack(key: Key) -> FileId {
    FileId(key.pack())
}

fn unpack(id: FileId) -> Key {
    Key::unpack(id.0)
}

/// Adds what is known of direct I/O.
pub(super) fn note_direct(
    files: &Files,
    features: &mut Vec<(&'static str, Result<(), String>)>,
    warnings: &mut Vec<String>,
) {
    let name = Feature::DirectIo.name();
    if features.iter().any(|(known, _)| *known == name) {
        return;
    }
    let cached = files.cached();
    if let Some(why) = &cached {
        warnings.push(format!(
            "files are read through the page cache, which costs a copy of each byte and extra memory: {why}; \
            use a directory on ext4 or xfs on a local disk"
        ));
    }
    features.push((name, cached.map_or(Ok(()), Err)));
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
        let first = files.insert(some_fd(), DirId(0));
        assert!(files.get(first).is_some());
        assert!(files.remove(first).is_some());
        assert!(files.remove(first).is_none());
        let second = files.insert(some_fd(), DirId(0));
        assert_ne!(first, second);
        assert!(files.get(first).is_none() && files.get(second).is_some());
    }

    #[test]
    fn a_kept_file_outlives_its_close_and_no_two_files_of_any_table_have_one_number() {
        let tables = [Files::new(), Files::new()];
        let ids = tables.each_ref().map(|files| files.insert(some_fd(), DirId(0)));
        assert_eq!(ids[0], ids[1], "ids are of one table alone");
        let [first, other] = [0, 1].map(|at| tables[at].keep(ids[at]).unwrap());
        assert_ne!(first.number(), other.number());
        assert_eq!(first.number(), tables[0].keep(ids[0]).unwrap().number());
        tables[0].remove(ids[0]).unwrap();
        assert!(tables[0].keep(ids[0]).is_none());
        assert!(rustix::io::fcntl_getfd(&first).is_ok(), "the descriptor was closed under its keeper");
        let next = tables[0].keep(tables[0].insert(some_fd(), DirId(0))).unwrap();
        assert!(![first.number(), other.number()].contains(&next.number()));
    }

    /// A full store of some TiB has more files than fit 16 bits, and every one of them has an id.
    #[test]
    fn ids_of_more_files_than_any_machine_has_descriptors_differ_and_find_their_files() {
        let (mut open, files) = (Slots::new(), 3u32 << 16);
        let ids: Vec<FileId> = (0..files).map(|at| pack(open.insert(at))).collect();
        for (at, id) in (0..).zip(&ids) {
            assert_eq!(open.get(unpack(*id)), Some(&at));
        }
        assert_eq!(ids.into_iter().collect::<std::collections::BTreeSet<_>>().len(), files as usize);
    }
}
