//! The one I/O seam: an operation goes in, a completion with a raw result comes out.
//!
//! It stands at submission/completion level, not at read/write level, because what goes wrong with a disk goes
//! wrong there: short and out-of-order completions, completions that never come, errors of one operation in a
//! batch. Three things implement [`Io`]: the real ring (`ring`), a portable pool of threads (`pool`) and
//! the simulated disk (in `kvarts-tests`). Everything above it goes through [`crate::driver`].
//!
//! Invariants that every implementation keeps:
//! - each submitted operation completes at most once, with the token it was submitted under;
//! - the memory of an operation is held (through its [`SharedBuf`]s) until its completion has been reaped;
//! - results are raw: bytes moved, or a negative errno. Nothing is retried and no length is compared here.

mod compute;
#[cfg(any(test, feature = "testing"))]
pub mod conformance;
mod describe;
mod features;
mod files;
mod meta;
pub mod policy;
mod pool;
mod probe;
pub(crate) mod ring;
mod ring_buffers;
mod ring_setup;
#[cfg(any(test, feature = "testing"))]
pub mod scratch;
pub(crate) mod slots;
pub(crate) mod wake;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::io_error::{DirId, FileId, Name};

pub use compute::Computation;
pub(crate) use describe::describe;
pub use features::{Feature, Features, UnknownFeature};
pub use files::KeptFile;
pub use probe::{IoChoice, OpenError, open_io};
pub use ring::leaked;

/// Chosen by the submitter; comes back in the completion.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Token(pub u64);

/// How a file is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenMode {
    /// Opened for writing as well as reading.
    pub write: bool,
    /// Made if absent (and then empty).
    pub create: bool,
    /// Past the page cache where the file system can (offset, length and memory aligned to 4 KiB);
    /// an implementation falls back to cached I/O where it cannot, and says so in [`Io::facts`].
    pub direct: bool,
}

/// One operation. The doc of each variant says what its fields mean.
#[derive(Debug)]
#[allow(missing_docs, reason = "the documentation of each variant describes its fields")]
pub enum Op {
    /// Reads `into.len()` bytes at `offset`. Result: bytes read.
    Read { file: FileId, offset: u64, into: SharedBuf },
    /// Writes `from` at `offset`; with `sync`, also durably (data and what is needed to read it back).
    /// Result: bytes written.
    Write { file: FileId, offset: u64, from: SharedBuf, sync: bool },
    /// Writes several buffers in turn at `offset`. Result: bytes written in all.
    WriteV { file: FileId, offset: u64, from: Box<[SharedBuf]>, sync: bool },
    /// Makes every write that completed before this submission durable (fdatasync). Result: 0.
    Flush { file: FileId },
    /// Whatever is not on a hot path.
    Meta(MetaOp),
}

/// Operations on names and files. They may be slow: implementations run them off the executor's thread.
#[allow(missing_docs, reason = "the documentation of each variant describes its fields")]
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MetaOp {
    /// Result: 0, and [`Reply::Opened`].
    Open { name: Name, mode: OpenMode },
    /// Result: 0.
    Close { file: FileId },
    /// Reserves blocks for `offset .. offset + len` and makes the file at least that long. Result: 0 or -ENOSPC.
    Allocate { file: FileId, offset: u64, len: u64 },
    /// Gives blocks back to the file system; reads of the range then find zeros. Several of one file may be under
    /// way at once. Durable after `Flush`. Result: 0, or -EOPNOTSUPP where the file system cannot.
    PunchHole { file: FileId, offset: u64, len: u64 },
    /// What begins below `upto` of what is not there. Several of one file, and of many, may be under way at once: they
    /// are asked side by side. Result: 0, and [`Reply::Holes`].
    Holes { file: FileId, upto: u64 },
    /// Result: 0.
    Truncate { file: FileId, len: u64 },
    /// Replaces `to` if it is there; both in one directory. Durable after `SyncDir`. Result: 0.
    Rename { from: Name, to: Name },
    /// Durable after `SyncDir`. Result: 0.
    Remove { name: Name },
    /// Makes one directory. Result: 0 or -EEXIST.
    MakeDir { name: Name },
    /// Makes names made, renamed and removed in this directory durable. Result: 0.
    SyncDir { name: Name },
    /// Result: 0, and [`Reply::Listing`].
    List { name: Name },
    /// Result: 0, and [`Reply::Stat`].
    Stat { file: FileId },
    /// Result: 0, and [`Reply::Space`].
    Space { dir: DirId },
    /// Names in this directory mean from now on what is below its path now: another file system may have been mounted there.
    /// Result: 0.
    Reopen { dir: DirId },
    /// Work for this directory that is no operation at all, and takes too long for an executor. Several may be under way at once.
    /// Result: 0.
    Compute { dir: DirId, work: Computation },
}

/// The room of a file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskSpace {
    /// Free bytes.
    pub free: u64,
    /// All bytes.
    pub total: u64,
    /// Which file system it is.
    pub device: u64,
}

/// What a [`MetaOp`] answers besides its result.
#[allow(missing_docs, reason = "the documentation of each variant describes its fields")]
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    /// The file is open under this id.
    Opened(FileId),
    /// The names in a directory, sorted.
    Listing(Vec<DirEntry>),
    /// Length and physically allocated bytes of a file.
    Stat { len: u64, allocated: u64 },
    /// The holes of a file, in order, as (offset, bytes): ranges below its end that were punched or never written.
    Holes(Vec<(u64, u64)>),
    /// Bytes of the file system that holds a directory: free to this process, and in all.
    /// `device` is the file system's own: directories on the same one share its bytes.
    Space { free: u64, total: u64, device: u64 },
}

/// One name in a directory.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct DirEntry {
    /// The last component.
    pub name: Box<str>,
    /// What it names.
    pub kind: EntryKind,
}

/// What a name stands for. Symbolic links are never followed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// Anything else: the store leaves it alone.
    Other,
}

/// The end of one operation.
#[derive(Debug)]
pub struct Completion {
    /// The token it was submitted under.
    pub token: Token,
    /// Bytes moved or zero, or a negative errno.
    pub result: i32,
    /// What a [`MetaOp`] answers besides.
    pub reply: Option<Reply>,
}

/// Ends a [`Io::park`] from any thread.
pub trait Unpark: Send + Sync {
    /// The next (or the present) park returns at once. Never blocks.
    fn unpark(&self);
}

/// What an implementation found out about where it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IoFacts {
    /// `ring`, `pool` or `sim`.
    pub backend: &'static str,
    /// Features in use, and features that are off, each with the reason.
    pub features: Vec<(&'static str, Result<(), String>)>,
    /// Lines that an operator should read, each saying what to do.
    pub warnings: Vec<String>,
}

/// One thread's way to the disks. Not `Send`: it is made on the thread that uses it.
pub trait Io {
    /// Takes one operation. It never blocks and never fails: what goes wrong arrives as a completion.
    /// The caller bounds how many operations and bytes are under way.
    fn submit(&mut self, token: Token, op: Op);

    /// Hands submissions to the device and appends the completions that have arrived. Never blocks.
    fn reap(&mut self, out: &mut Vec<Completion>);

    /// Hands submissions to the device now, for a caller that has other work before it reaps. Never blocks.
    fn send(&mut self) {}

    /// Sleeps until a completion can be reaped, an [`Unpark`] is called or `timeout` passes.
    /// An unpark that came since the last park makes it return at once.
    fn park(&mut self, timeout: Option<Duration>);

    /// The handle by which other threads end a park.
    fn unparker(&self) -> Arc<dyn Unpark>;

    /// Registers memory for faster transfers; operations on registered and other memory give equal results.
    /// An error says why the region is used unregistered; it is never fatal.
    fn register(&mut self, region: &Arc<Region>) -> Result<(), String>;

    /// Forgets a registered region. The region itself lives on until its last range is dropped.
    fn unregister(&mut self, region: &Arc<Region>);

    /// What was found out about the machine.
    fn facts(&self) -> IoFacts;

    /// An open file, for a caller that reads it itself past this seam. `None`: it is not open, or there is no
    /// descriptor behind it, as on a simulated disk.
    fn keep_file(&self, file: FileId) -> Option<KeptFile> {
        let _ = file;
        None
    }
}

/// So that what [`open_io`] returns goes where an `Rc<RefCell<dyn Io>>` is wanted.
impl<T: Io + ?Sized> Io for Box<T> {
    fn submit(&mut self, token: Token, op: Op) {
        (**self).submit(token, op);
    }
    fn reap(&mut self, out: &mut Vec<Completion>) {
        (**self).reap(out);
    }
    fn send(&mut self) {
        (**self).send();
    }
    fn park(&mut self, timeout: Option<Duration>) {
        (**self).park(timeout);
    }
    fn unparker(&self) -> Arc<dyn Unpark> {
        (**self).unparker()
    }
    fn register(&mut self, region: &Arc<Region>) -> Result<(), String> {
        (**self).register(region)
    }
    fn unregister(&mut self, region: &Arc<Region>) {
        (**self).unregister(region);
    }
    fn facts(&self) -> IoFacts {
        (**self).facts()
    }
    fn keep_file(&self, file: FileId) -> Option<KeptFile> {
        (**self).keep_file(file)
    }
}
