//! Real directories: direct reads where the file system allows them, plain ones elsewhere.
#![allow(
    clippy::disallowed_methods,
    reason = "offline programs access files only here, so that tests can simulate a disk"
)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{FallocateFlags, OFlags, SeekFrom};

use super::{Disk, DiskFile, DiskWriter, Node, NodeKind};

/// The file that a store in use holds a lock on.
const LOCK: &str = "lock";

fn flags(flags: OFlags) -> i32 {
    flags.bits().cast_signed()
}

/// A directory that is only read.
#[derive(Debug)]
pub struct RealDisk {
    root: PathBuf,
    direct: bool,
    /// Held for as long as the check runs, so that no engine opens the store meanwhile.
    _lock: Option<File>,
}

/// Why a directory cannot be looked at.
#[derive(Debug)]
pub enum OpenError {
    /// Another process has the store open.
    InUse,
    /// The operating system says no.
    Io(io::Error),
}

impl From<io::Error> for OpenError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl RealDisk {
    /// A directory. `direct` reads past the page cache where that works. Unless `live`, a store that is open elsewhere
    /// is refused, and kept from being opened until this is dropped.
    pub fn open(root: &Path, direct: bool, live: bool) -> Result<Self, OpenError> {
        let facts = std::fs::metadata(root)?;
        if !facts.is_dir() {
            return Err(io::Error::new(io::ErrorKind::NotADirectory, "not a directory").into());
        }
        let lock = if live { None } else { lock(root, false)? };
        Ok(Self { root: root.to_owned(), direct, _lock: lock })
    }
}

/// Takes the store's lock, shared with other readers or alone; nothing is made, so a directory without one is not
/// locked.
fn lock(root: &Path, alone: bool) -> Result<Option<File>, OpenError> {
    let options = flags(OFlags::NOFOLLOW | OFlags::NONBLOCK);
    let file = match OpenOptions::new().read(true).custom_flags(options).open(root.join(LOCK)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        // A lock that may not be read cannot be asked; a link is none.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    };
    let taken = if alone { file.try_lock() } else { file.try_lock_shared() };
    match taken {
        Ok(()) => Ok(Some(file)),
        Err(std::fs::TryLockError::WouldBlock) => Err(OpenError::InUse),
        Err(std::fs::TryLockError::Error(error)) => Err(error.into()),
    }
}

/// The path of a name in a directory, if no folder on the way to it is a link.
fn below(root: &Path, path: &str) -> io::Result<PathBuf> {
    let mut here = root.to_owned();
    let mut names = path.split('/').peekable();
    while let Some(name) = names.next() {
        here.push(name);
        // What is not there fails by itself.
        let is_link = || here.symlink_metadata().is_ok_and(|facts| facts.is_symlink());
        if names.peek().is_some() && is_link() {
            return Err(rustix::io::Errno::LOOP.into());
        }
    }
    Ok(here)
}

/// The path of a folder, if neither it nor one on the way to it is a link.
fn folder_below(root: &Path, folder: &str) -> io::Result<PathBuf> {
    if folder.is_empty() { Ok(root.to_owned()) } else { below(root, &format!("{folder}/")) }
}

impl Disk for RealDisk {
    fn name(&self) -> String {
        self.root.display().to_string()
    }

    fn visit(&self, folder: &str, each: &mut dyn FnMut(Node)) -> io::Result<()> {
        for entry in std::fs::read_dir(folder_below(&self.root, folder)?)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let kind = match entry.file_type() {
                Ok(kind) if kind.is_file() => NodeKind::File,
                Ok(kind) if kind.is_dir() => NodeKind::Folder,
                Ok(kind) if kind.is_symlink() => NodeKind::Link,
                _ => NodeKind::Other,
            };
            each(Node { name, kind });
        }
        Ok(())
    }

    fn open(&self, path: &str) -> io::Result<Box<dyn DiskFile>> {
        let path = below(&self.root, path)?;
        let plain = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = OpenOptions::new().read(true).custom_flags(flags(plain)).open(&path)?;
        let facts = file.metadata()?;
        if !facts.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path is not a regular file"));
        }
        let direct = if self.direct {
            let past_cache = flags(plain | OFlags::DIRECT);
            OpenOptions::new().read(true).custom_flags(past_cache).open(&path).ok()
        } else {
            None
        };
        Ok(Box::new(RealFile {
            file,
            direct,
            refused: OnceLock::new(),
            len: facts.len(),
            allocated: facts.blocks().saturating_mul(512),
        }))
    }
}

/// A file under both ways of reading it.
#[derive(Debug)]
struct RealFile {
    file: File,
    direct: Option<File>,
    /// Set when the file system turned out to refuse direct reads of this file.
    refused: OnceLock<()>,
    len: u64,
    allocated: u64,
}

impl DiskFile for RealFile {
    fn len(&self) -> u64 {
        self.len
    }

    fn allocated(&self) -> u64 {
        self.allocated
    }

    fn holes(&self) -> Vec<(u64, u64)> {
        let seek = |to| match rustix::fs::seek(&self.file, to) {
            Err(rustix::io::Errno::NXIO) => Some(self.len),
            found => found.ok(),
        };
        let (mut holes, mut at) = (Vec::new(), 0);
        while at < self.len {
            let Some(hole) = seek(SeekFrom::Hole(at)).filter(|hole| *hole < self.len) else { break };
            let Some(data) = seek(SeekFrom::Data(hole)).filter(|data| *data > hole) else { break };
            at = data.min(self.len);
            holes.push((hole, at.saturating_sub(hole)));
        }
        holes
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        if let (Some(direct), None) = (&self.direct, self.refused.get()) {
            match direct.read_at(into, offset) {
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                    let _ = self.refused.set(());
                }
                done => return done,
            }
        }
        self.file.read_at(into, offset)
    }
}

/// A directory that is repaired: it is locked, and everything in it may change.
#[derive(Debug)]
pub struct RealWriter {
    root: PathBuf,
    _lock: Option<File>,
}

impl RealWriter {
    /// Takes the directory for this process alone.
    pub fn open(root: &Path) -> Result<Self, OpenError> {
        // Where no engine has ever been, there is no lock yet: one that comes now must find it taken.
        let options = flags(OFlags::NOFOLLOW | OFlags::NONBLOCK);
        let path = root.join(LOCK);
        if path.symlink_metadata().is_ok_and(|facts| !facts.is_file()) {
            return Err(io::Error::other("the lock file is not a regular file: remove the file").into());
        }
        let made =
            OpenOptions::new().write(true).create(true).truncate(false).custom_flags(options).open(path);
        drop(made?);
        Ok(Self { root: root.to_owned(), _lock: lock(root, true)? })
    }

    fn file(&self, path: &str, make: bool) -> io::Result<File> {
        OpenOptions::new()
            .write(true)
            .create(make)
            .truncate(false)
            .custom_flags(flags(OFlags::NOFOLLOW))
            .open(below(&self.root, path)?)
    }
}

impl DiskWriter for RealWriter {
    fn write_at(&self, path: &str, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file(path, true)?.write_all_at(bytes, offset)
    }

    fn punch(&self, path: &str, offset: u64, bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(self.file(path, true)?, flags, offset, bytes)?)
    }

    fn set_len(&self, path: &str, len: u64) -> io::Result<()> {
        self.file(path, true)?.set_len(len)
    }

    fn sync(&self, path: &str) -> io::Result<()> {
        self.file(path, false)?.sync_all()
    }

    fn make_folder(&self, path: &str) -> io::Result<()> {
        match std::fs::create_dir(self.root.join(path)) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            done => done,
        }
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let no_replace = rustix::fs::RenameFlags::NOREPLACE;
        let here = rustix::fs::CWD;
        Ok(rustix::fs::renameat_with(
            here,
            below(&self.root, from)?,
            here,
            below(&self.root, to)?,
            no_replace,
        )?)
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        match std::fs::remove_file(below(&self.root, path)?) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    fn remove_folder(&self, path: &str) -> io::Result<()> {
        match std::fs::remove_dir(below(&self.root, path)?) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    fn sync_folder(&self, path: &str) -> io::Result<()> {
        File::open(folder_below(&self.root, path)?)?.sync_all()
    }
}
