//! Executes [`MetaOp`]s, those of one directory one at a time, on a thread of its own: a device that hangs holds up its own. Only
//! questions about holes are asked by several: a start asks one of each segment.
//!
//! Names are resolved one component at a time below a directory that is open, and no symbolic link is
//! followed on the way or at its end, so that a user who can write into a store's directory cannot lead the store
//! out of it. Files are made readable by their owner alone: they hold what users said to a model.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustix::fs::{
    AtFlags, CWD, Dir, FallocateFlags, FileType, Mode, OFlags, RawMode, SeekFrom, StatxFlags, fallocate,
    fcntl_getfl, fcntl_setfl, fstat, fstatvfs, fsync, ftruncate, mkdirat, openat, renameat, statat, statx,
    unlinkat,
};
use rustix::io::Errno;

use super::files::Files;
use super::workers::{Done, Workers};
use super::{Completion, DirEntry, EntryKind, MetaOp, OpenMode, Reply, Token};
use kvarts_contract::buffers::region::PAGE;
use kvarts_contract::io_error::{DirId, FileId, Name};

/// A directory with more names than this is none of ours.
const LISTING_MAX: usize = 1 << 20;
/// What a name may have; far above what the store uses.
const COMPONENTS_MAX: usize = 16;
const COMPONENT_BYTES_MAX: usize = 255;
/// A file with more holes than this is none of ours: a segment has fewer pages.
const HOLES_MAX: usize = 1 << 22;
/// Threads that ask for holes, of all directories, and at least of each: each waits for the file system alone.
const ASKERS: usize = 4;
const ASKERS_MIN: usize = 2;

const FILE_MODE: RawMode = 0o600;
const DIR_MODE: RawMode = 0o700;

/// One operation on its way to the meta thread.
#[derive(Debug)]
pub(super) struct MetaJob {
    pub(super) token: Token,
    pub(super) op: MetaOp,
}

/// The threads of one executor for [`MetaOp`]s.
#[derive(Debug)]
pub(super) struct MetaThreads {
    files: Arc<Files>,
    lanes: Vec<MetaLane>,
}

/// Those of one directory.
#[derive(Debug)]
struct MetaLane {
    one: Workers<MetaJob>,
    asking: Workers<MetaJob>,
}

impl MetaThreads {
    pub(super) fn start(meta: &Meta, done: &Arc<Done>) -> std::io::Result<Self> {
        let run = |meta: Meta| move |job| meta.run(job);
        let dirs = meta.dirs.len().max(1);
        let askers = (ASKERS / dirs).max(ASKERS_MIN);
        let lane = |dir: usize| {
            Ok(MetaLane {
                one: Workers::start(&format!("kvarts-meta-{dir}"), 1, done, run(meta.clone()))?,
                asking: Workers::start(&format!("kvarts-hole-{dir}"), askers, done, run(meta.clone()))?,
            })
        };
        let lanes = (0..dirs).map(lane).collect::<std::io::Result<_>>()?;
        Ok(Self { files: Arc::clone(&meta.files), lanes })
    }

    /// Queues an operation: in order with others of its directory, unless it changes nothing and may take long.
    pub(super) fn push(&self, token: Token, op: MetaOp) {
        let dir = match &op {
            MetaOp::Open { name, .. }
            | MetaOp::Rename { from: name, .. }
            | MetaOp::Remove { name }
            | MetaOp::MakeDir { name }
            | MetaOp::SyncDir { name }
            | MetaOp::List { name } => name.dir,
            MetaOp::Space { dir } | MetaOp::Reopen { dir } | MetaOp::Compute { dir, .. } => *dir,
            MetaOp::Close { file }
            | MetaOp::Allocate { file, .. }
            | MetaOp::PunchHole { file, .. }
            | MetaOp::Holes { file, .. }
            | MetaOp::Truncate { file, .. }
            | MetaOp::Stat { file } => self.files.dir_of(*file),
        };
        // A directory that is not there is an error whichever thread says so.
        let Some(lane) = self.lanes.get(usize::from(dir.0)).or(self.lanes.first()) else { return };
        let is_beside = matches!(op, MetaOp::Holes { .. } | MetaOp::Compute { .. });
        let threads = if is_beside { &lane.asking } else { &lane.one };
        threads.push(MetaJob { token, op });
    }
}

/// One of the directories.
#[derive(Debug)]
struct Root {
    path: PathBuf,
    /// One that could not be opened keeps the error: nothing in it can be.
    opened: RwLock<Result<Arc<OwnedFd>, Errno>>,
}

impl Root {
    fn open(path: &Path) -> Self {
        Self { path: path.to_owned(), opened: RwLock::new(Self::look(path)) }
    }

    fn look(path: &Path) -> Result<Arc<OwnedFd>, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        openat(CWD, path, flags, Mode::empty()).map(Arc::new)
    }

    fn get(&self) -> Result<Arc<OwnedFd>, Errno> {
        self.opened.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What is there now takes the place of what was there; where nothing is, that stays.
    fn reopen(&self) -> Result<(), Errno> {
        let opened = Self::look(&self.path)?;
        *self.opened.write().unwrap_or_else(PoisonError::into_inner) = Ok(opened);
        Ok(())
    }
}

/// What is needed to execute: the directories and the table of open files.
#[derive(Clone, Debug)]
pub(super) struct Meta {
    dirs: Arc<[Root]>,
    files: Arc<Files>,
    direct: bool,
}

impl Meta {
    /// Opens the directories. `direct` says whether direct I/O may be used at all.
    pub(super) fn new(dirs: &[PathBuf], files: &Arc<Files>, direct: bool) -> Result<Self, String> {
        let dirs: Arc<[Root]> = dirs.iter().map(|path| Root::open(path)).collect();
        let failed = dirs.iter().filter_map(|dir| Some((dir.get().err()?, &dir.path)));
        let mut failed = failed
            .map(|(errno, path)| format!("the directory {} could not be opened: {errno}", path.display()));
        // Some may be out, but not all.
        if let Some(why) = failed.next().filter(|_| dirs.iter().all(|dir| dir.get().is_err())) {
            return Err(why);
        }
        drop(failed);
        Ok(Self { dirs, files: Arc::clone(files), direct })
    }

    /// Executes one operation.
    pub(super) fn run(&self, job: MetaJob) -> Completion {
        let (result, reply) = match self.execute(&job.op) {
            Ok(reply) => (0, reply),
            Err(errno) => (-errno.raw_os_error(), None),
        };
        Completion { token: job.token, result, reply }
    }

    fn execute(&self, op: &MetaOp) -> Result<Option<Reply>, Errno> {
        match op {
            MetaOp::Open { name, mode } => return self.open(name, *mode).map(Some),
            MetaOp::Close { file } => drop(self.files.remove(*file).ok_or(Errno::BADF)?),
            MetaOp::Allocate { file, offset, len } => {
                self.on(*file, |fd| fallocate(fd, FallocateFlags::empty(), *offset, *len))?;
            }
            MetaOp::PunchHole { file, offset, len } => {
                self.on(*file, |fd| punch(fd, *offset, *len))?;
            }
            MetaOp::Holes { file, upto } => return self.on(*file, |fd| holes(fd, *upto)).map(Some),
            MetaOp::Truncate { file, len } => self.on(*file, |fd| ftruncate(fd, *len))?,
            MetaOp::Rename { from, to } => self.rename(from, to)?,
            MetaOp::Remove { name } => self.remove(name)?,
            MetaOp::MakeDir { name } => {
                let (parent, last) = self.parent(name)?;
                mkdirat(parent.as_fd(), last, Mode::from_raw_mode(DIR_MODE))?;
            }
            MetaOp::SyncDir { name } => fsync(self.dir(name)?.as_fd())?,
            MetaOp::List { name } => return list(self.dir(name)?.as_fd()).map(Some),
            MetaOp::Stat { file } => return self.on(*file, stat).map(Some),
            MetaOp::Space { dir } => return self.space(*dir).map(Some),
            MetaOp::Reopen { dir } => self.reopen(*dir)?,
            MetaOp::Compute { work, .. } => work.run(),
        }
        Ok(None)
    }

    fn on<T>(&self, file: FileId, act: impl FnOnce(BorrowedFd<'_>) -> Result<T, Errno>) -> Result<T, Errno> {
        act(self.files.get(file).ok_or(Errno::BADF)?.as_fd())
    }

    fn root(&self, dir: DirId) -> Result<Arc<OwnedFd>, Errno> {
        self.dirs.get(usize::from(dir.0)).ok_or(Errno::BADF)?.get()
    }

    fn reopen(&self, dir: DirId) -> Result<(), Errno> {
        self.dirs.get(usize::from(dir.0)).ok_or(Errno::BADF)?.reopen()
    }

    /// The directory that holds the last component of `name`, and that component.
    fn parent<'a>(&self, name: &'a Name) -> Result<(OwnedFd, &'a str), Errno> {
        let components = components(&name.path)?;
        let (last, above) = components.split_last().ok_or(Errno::INVAL)?;
        Ok((self.descend(name.dir, above)?, *last))
    }

    /// The directory that `name` names.
    fn dir(&self, name: &Name) -> Result<OwnedFd, Errno> {
        self.descend(name.dir, &components(&name.path)?)
    }

    fn descend(&self, dir: DirId, components: &[&str]) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // Opened again, not duplicated: two listings must not share one position.
        let mut at = openat(self.root(dir)?, c".", flags, Mode::empty())?;
        for component in components {
            at = openat(at.as_fd(), *component, flags, Mode::empty())?;
        }
        Ok(at)
    }

    fn open(&self, name: &Name, mode: OpenMode) -> Result<Reply, Errno> {
        let (parent, last) = self.parent(name)?;
        let direct = mode.direct && self.direct;
        // Not blocking until it is known that this is no pipe.
        let mut flags = OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NOCTTY | OFlags::NONBLOCK;
        flags |= if mode.write { OFlags::RDWR } else { OFlags::RDONLY };
        flags.set(OFlags::CREATE, mode.create);
        // Without it the kernel may change the time of access when a read is submitted, and then wait for the disk on the executor's thread.
        // The kernel refuses the flag to a process that does not own the file.
        let open = |flags| {
            let open = |flags| openat(parent.as_fd(), last, flags, Mode::from_raw_mode(FILE_MODE));
            match open(flags | OFlags::NOATIME) {
                Err(Errno::PERM) => open(flags),
                opened => opened,
            }
        };
        let fd = if direct {
            match open(flags | OFlags::DIRECT) {
                Err(errno @ (Errno::INVAL | Errno::OPNOTSUPP)) => {
                    let fd = open(flags)?;
                    self.files.note_cached(format!(
                        "the file system refused direct I/O when a file was \
                        opened: {errno}"
                    ));
                    fd
                }
                opened => opened?,
            }
        } else {
            open(flags)?
        };
        if FileType::from_raw_mode(fstat(&fd)?.st_mode) != FileType::RegularFile {
            return Err(Errno::INVAL);
        }
        let mut kept = fcntl_getfl(&fd)? - OFlags::NONBLOCK;
        if direct && let Some(why) = coarse_alignment(&fd) {
            kept -= OFlags::DIRECT;
            self.files.note_cached(why);
        }
        fcntl_setfl(&fd, kept)?;
        Ok(Reply::Opened(self.files.insert(fd, name.dir)))
    }

    fn rename(&self, from: &Name, to: &Name) -> Result<(), Errno> {
        let (parent, old) = self.parent(from)?;
        let new = components(&to.path)?;
        let (last, above) = new.split_last().ok_or(Errno::INVAL)?;
        let old_above = components(&from.path)?;
        if from.dir != to.dir || old_above.split_last().is_none_or(|(_, old)| old != above) {
            return Err(Errno::INVAL);
        }
        renameat(parent.as_fd(), old, parent.as_fd(), *last)
    }

    fn remove(&self, name: &Name) -> Result<(), Errno> {
        let (parent, last) = self.parent(name)?;
        match unlinkat(parent.as_fd(), last, AtFlags::empty()) {
            Err(Errno::ISDIR) => unlinkat(parent.as_fd(), last, AtFlags::REMOVEDIR),
            removed => removed,
        }
    }

    fn space(&self, dir: DirId) -> Result<Reply, Errno> {
        let space = fstatvfs(self.root(dir)?)?;
        let bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
        let device = fstat(self.root(dir)?)?.st_dev;
        Ok(Reply::Space { free: bytes(space.f_bavail), total: bytes(space.f_blocks), device })
    }
}

/// The components of a name, each of which names something in its directory and nothing elsewhere.
fn components(path: &str) -> Result<Vec<&str>, Errno> {
    if path.is_empty() {
        return Ok(Vec::new());
    }
    let components: Vec<&str> = path.split('/').take(COMPONENTS_MAX + 1).collect();
    if components.len() > COMPONENTS_MAX || components.iter().any(|name| name.len() > COMPONENT_BYTES_MAX) {
        return Err(Errno::NAMETOOLONG);
    }
    let bad = |name: &&str| matches!(*name, "" | "." | "..") || name.contains('\0');
    if components.iter().any(bad) { Err(Errno::INVAL) } else { Ok(components) }
}

/// Why direct I/O in units of a page would not do for this file, as far as the kernel tells (Linux 6.1).
fn coarse_alignment(fd: &OwnedFd) -> Option<String> {
    let facts = statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    if facts.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return None;
    }
    let (memory, offset) = (facts.stx_dio_mem_align, facts.stx_dio_offset_align);
    if memory == 0 || offset == 0 {
        return Some("the file system does not support direct I/O for a file".to_owned());
    }
    let fits = |unit: u32| PAGE.is_multiple_of(unit as usize);
    (!fits(memory) || !fits(offset)).then(|| {
        format!(
            "the device needs memory aligned to {memory} bytes and offsets aligned to {offset} bytes; \
            the store aligns both to {PAGE} bytes"
        )
    })
}

fn list(dir: BorrowedFd<'_>) -> Result<Reply, Errno> {
    let mut entries = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let raw = entry.file_name();
        if matches!(raw.to_bytes(), b"." | b"..") {
            continue;
        }
        if entries.len() >= LISTING_MAX {
            return Err(Errno::OVERFLOW);
        }
        entries.push(describe(dir, raw, entry.file_type()));
    }
    entries.sort();
    Ok(Reply::Listing(entries))
}

fn describe(dir: BorrowedFd<'_>, raw: &CStr, known: FileType) -> DirEntry {
    let kind = match known {
        FileType::Unknown => statat(dir, raw, AtFlags::SYMLINK_NOFOLLOW)
            .map_or(FileType::Unknown, |stat| FileType::from_raw_mode(stat.st_mode)),
        known => known,
    };
    // A name that is no text is not one that the store gave, so it is shown and left alone.
    let kind = match (raw.to_str(), kind) {
        (Ok(_), FileType::RegularFile) => EntryKind::File,
        (Ok(_), FileType::Directory) => EntryKind::Dir,
        _ => EntryKind::Other,
    };
    DirEntry { name: raw.to_string_lossy().into(), kind }
}

/// Gives blocks back.
pub(super) fn punch(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), Errno> {
    fallocate(fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
}

/// What is not there of the first `upto` bytes of a file. A file system that cannot tell says that everything is.
fn holes(fd: BorrowedFd<'_>, upto: u64) -> Result<Reply, Errno> {
    let end = u64::try_from(fstat(fd)?.st_size).map_err(|_| Errno::OVERFLOW)?;
    holes_by((end, upto), |to| seek(fd, to)).map(Reply::Holes)
}

/// A file without holes below `upto` costs one question, and each that it has two more.
fn holes_by(
    (end, upto): (u64, u64),
    mut seek: impl FnMut(SeekFrom) -> Result<Option<u64>, Errno>,
) -> Result<Vec<(u64, u64)>, Errno> {
    let (mut holes, mut at) = (Vec::new(), 0);
    let upto = upto.min(end);
    while at < upto {
        let hole = seek(SeekFrom::Hole(at))?.unwrap_or(end);
        if hole >= upto {
            break;
        }
        at = seek(SeekFrom::Data(hole))?.unwrap_or(end).min(end);
        if at <= hole || holes.len() >= HOLES_MAX {
            return Err(Errno::OVERFLOW);
        }
        holes.push((hole, at - hole));
    }
    Ok(holes)
}

/// `None`: there is no such place before the end.
fn seek(fd: BorrowedFd<'_>, to: SeekFrom) -> Result<Option<u64>, Errno> {
    match rustix::fs::seek(fd, to) {
        Err(Errno::NXIO) => Ok(None),
        found => found.map(Some),
    }
}

fn stat(fd: BorrowedFd<'_>) -> Result<Reply, Errno> {
    let stat = fstat(fd)?;
    let positive = |value: i64| u64::try_from(value).map_err(|_| Errno::OVERFLOW);
    // The kernel counts blocks of 512 bytes here, whatever the file system's own unit.
    Ok(Reply::Stat { len: positive(stat.st_size)?, allocated: positive(stat.st_blocks)?.saturating_mul(512) })
}

#[cfg(test)]
#[path = "meta_tests.rs"]
mod tests;
