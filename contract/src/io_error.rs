//! What went wrong with one operation, and where.

use std::fmt;

use rustix::io::Errno;

/// A directory the store was opened with, by its place in the list given to the implementation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DirId(pub u16);

/// An open file of one store. Valid until its `Close`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FileId(pub u64);

/// A name below a directory: one or more components joined by `/`, never absolute, never `..`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Name {
    /// The directory.
    pub dir: DirId,
    /// The path below it; empty for the directory itself.
    pub path: Box<str>,
}

/// The kind of an [`IoError`]; what the engine does about it stands in `store/src/io/policy.rs`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum IoErrorKind {
    /// The file ends before the last byte that was asked for.
    Eof,
    /// The file system or a quota is full.
    NoSpace,
    /// The file system does not take writes (any more).
    ReadOnlyFs,
    /// The operating system forbids it to this process.
    Permission,
    /// There is no such name or file.
    NotFound,
    /// The name is taken.
    Exists,
    /// The device or the path to it failed: the bytes are not to be had, or did not become durable.
    Media,
    /// It had not ended when its time was over. It may still take effect; its memory stays with the device.
    Deadline,
    /// The file system or the kernel cannot do this.
    Unsupported,
    /// It passes and says nothing of the disk: too few descriptors or too little memory, an interruption, something in
    /// use.
    Passing,
    /// Anything else, by its number.
    Other(i32),
}

impl IoErrorKind {
    /// The kind of a positive errno.
    pub fn of(errno: i32) -> Self {
        // Whatever else a device answers is no number of the kernel's.
        if !(1..4096).contains(&errno) {
            return Self::Other(errno);
        }
        match Errno::from_raw_os_error(errno) {
            Errno::NOSPC | Errno::DQUOT | Errno::FBIG => Self::NoSpace,
            Errno::ROFS => Self::ReadOnlyFs,
            Errno::PERM | Errno::ACCESS => Self::Permission,
            Errno::NOENT | Errno::NOTDIR | Errno::BADF => Self::NotFound,
            Errno::EXIST => Self::Exists,
            // What block devices, file systems with checksums and network mounts answer when bytes are lost.
            Errno::IO
            | Errno::NXIO
            | Errno::NODEV
            | Errno::UCLEAN
            | Errno::REMOTEIO
            | Errno::ILSEQ
            | Errno::NODATA
            | Errno::BADMSG
            | Errno::TIMEDOUT
            | Errno::STALE
            | Errno::NOLINK => Self::Media,
            Errno::OPNOTSUPP | Errno::NOSYS => Self::Unsupported,
            Errno::MFILE
            | Errno::NFILE
            | Errno::NOMEM
            | Errno::NOBUFS
            | Errno::INTR
            | Errno::AGAIN
            | Errno::BUSY
            | Errno::CANCELED => Self::Passing,
            _ => Self::Other(errno),
        }
    }
}

/// Which operation failed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs, reason = "each variant is named after its operation")]
pub enum OpKind {
    Read,
    Write,
    Flush,
    Open,
    Close,
    Allocate,
    PunchHole,
    Holes,
    Truncate,
    Rename,
    Remove,
    MakeDir,
    SyncDir,
    List,
    Stat,
    Space,
    Compute,
}

impl OpKind {
    /// Whether it moves bytes between a file and memory.
    pub fn is_transfer(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }

    fn verb(self) -> &'static str {
        match self {
            Self::Read => "reading",
            Self::Write => "writing",
            Self::Flush => "flushing",
            Self::Open => "opening",
            Self::Close => "closing",
            Self::Allocate => "allocating blocks of",
            Self::PunchHole => "freeing blocks of",
            Self::Holes => "finding the holes of",
            Self::Truncate => "truncating",
            Self::Rename => "renaming",
            Self::Remove => "removing",
            Self::MakeDir => "making the directory",
            Self::SyncDir => "flushing the directory",
            Self::List => "listing the directory",
            Self::Stat => "reading the metadata of",
            Self::Space => "reading the free space of",
            Self::Compute => "computing for",
        }
    }
}

/// What an operation is about.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Subject {
    /// An open file.
    File(FileId),
    /// A name.
    Name(Box<Name>),
}

/// One operation that failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IoError {
    /// What it means.
    pub kind: IoErrorKind,
    /// Which operation.
    pub op: OpKind,
    /// On what.
    pub subject: Subject,
    /// From where on in the file.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
    /// The number from the kernel; 0 if the kernel reported none.
    pub errno: i32,
}

impl IoError {
    /// There is no memory to stage `bytes` bytes of a write in.
    pub fn out_of_memory(bytes: usize) -> Self {
        let errno = Errno::NOMEM.raw_os_error();
        let subject = Subject::Name(Box::new(Name { dir: DirId(0), path: "".into() }));
        Self { kind: IoErrorKind::Passing, op: OpKind::Write, subject, offset: 0, len: bytes as u64, errno }
    }

    /// Not all of the `bytes` bytes of a write have a place in memory: a defect, and nothing was written.
    pub fn unplaced(bytes: usize) -> Self {
        let errno = Errno::FAULT.raw_os_error();
        Self { kind: IoErrorKind::Other(errno), errno, ..Self::out_of_memory(bytes) }
    }

    /// The open file it is about, if it is about one.
    pub fn file(&self) -> Option<FileId> {
        match self.subject {
            Subject::File(file) => Some(file),
            Subject::Name(_) => None,
        }
    }
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.op.verb())?;
        if self.len > 0 {
            write!(f, " {} bytes at offset {} of", self.len, self.offset)?;
        }
        match &self.subject {
            Subject::File(file) => write!(f, " file {}", file.0)?,
            Subject::Name(name) if name.path.is_empty() => write!(f, " store directory {}", name.dir.0)?,
            Subject::Name(name) => write!(f, " {:?} in store directory {}", name.path, name.dir.0)?,
        }
        match self.kind {
            IoErrorKind::Eof => f.write_str(": the file ends before the end of this range")?,
            IoErrorKind::Deadline => f.write_str(": the time limit passed")?,
            _ if self.errno == 0 => f.write_str(": the device transferred a wrong number of bytes")?,
            _ => write!(f, ": {}", std::io::Error::from_raw_os_error(self.errno))?,
        }
        Ok(())
    }
}

impl std::error::Error for IoError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_what_where_and_why() {
        let errno = Errno::IO.raw_os_error();
        let subject = Subject::File(FileId(7));
        let error = IoError {
            kind: IoErrorKind::of(errno),
            op: OpKind::Read,
            subject,
            offset: 8192,
            len: 4096,
            errno,
        };
        let text = error.to_string();
        for part in ["reading 4096 bytes at offset 8192 of file 7", "Input/output error"] {
            assert!(text.contains(part), "{text}");
        }
        let name = Name { dir: DirId(1), path: "shard/7".into() };
        let subject = Subject::Name(Box::new(name));
        let error =
            IoError { kind: IoErrorKind::NotFound, op: OpKind::Remove, subject, offset: 0, len: 0, errno: 2 };
        assert!(error.to_string().starts_with("removing \"shard/7\" in store directory 1: No such file"));
    }

    #[test]
    fn numbers_have_the_kinds_that_the_policy_knows() {
        let kind = |errno: Errno| IoErrorKind::of(errno.raw_os_error());
        assert_eq!(kind(Errno::NOSPC), IoErrorKind::NoSpace);
        assert_eq!(kind(Errno::DQUOT), IoErrorKind::NoSpace);
        assert_eq!(kind(Errno::ROFS), IoErrorKind::ReadOnlyFs);
        assert_eq!(kind(Errno::ACCESS), IoErrorKind::Permission);
        assert_eq!(kind(Errno::NOENT), IoErrorKind::NotFound);
        assert_eq!(kind(Errno::EXIST), IoErrorKind::Exists);
        assert_eq!(kind(Errno::IO), IoErrorKind::Media);
        assert_eq!(kind(Errno::OPNOTSUPP), IoErrorKind::Unsupported);
        assert_eq!(kind(Errno::INVAL), IoErrorKind::Other(22));
        let passing = [
            Errno::MFILE,
            Errno::NFILE,
            Errno::NOMEM,
            Errno::INTR,
            Errno::AGAIN,
            Errno::BUSY,
            Errno::CANCELED,
        ];
        for errno in passing {
            assert_eq!(kind(errno), IoErrorKind::Passing, "{errno}");
        }
        for odd in [0, -1, 4096, i32::MIN, i32::MAX] {
            assert_eq!(IoErrorKind::of(odd), IoErrorKind::Other(odd));
        }
    }
}
