//! The one way to the files of a store: directories, files, positioned reads. And, for repair and compaction alone, writes.
//!
//! Invariants:
//! - A [`Disk`] can only read. Only a [`DiskWriter`] can write, and a caller must ask for one.
//! - Symbolic links are never followed below a store's directory, and nothing is opened that is not a plain file: a
//!   pipe would block for ever.
//! - Paths are relative to the directory and made of the format's names.

mod memory;
mod real;

use std::fmt::Debug;
use std::io;

pub use memory::{MemoryDisk, Step};
pub use real::{OpenError, RealDisk, RealWriter};

/// Bytes that reads and their buffers are aligned to.
pub const ALIGN: usize = 4096;

/// What a name in a folder stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NodeKind {
    /// A plain file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link, wherever it leads.
    Link,
    /// A pipe, a socket, a device.
    Other,
}

/// A name in a folder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    /// The name; bytes that are not UTF-8 are replaced, so that it is none of the format's.
    pub name: String,
    /// What it stands for.
    pub kind: NodeKind,
}

/// A file that is open for reading.
pub trait DiskFile: Send + Sync + Debug {
    /// Its length when it was opened.
    fn len(&self) -> u64;

    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that it takes on the device.
    fn allocated(&self) -> u64;

    /// What of it is not there, in order and apart: (offset, bytes). None where the file system cannot tell.
    fn holes(&self) -> Vec<(u64, u64)>;

    /// Reads from `offset`, a multiple of [`ALIGN`], into memory that is aligned likewise; how many bytes came. Fewer
    /// than asked for is no error, none is the end of the file.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize>;
}

/// One directory of a store, to be read.
pub trait Disk: Send + Sync + Debug {
    /// What the directory is called in reports.
    fn name(&self) -> String;

    /// Hands out every entry of a folder, in no order. `""` is the directory itself.
    fn visit(&self, folder: &str, each: &mut dyn FnMut(Node)) -> io::Result<()>;

    /// Opens a plain file.
    fn open(&self, path: &str) -> io::Result<Box<dyn DiskFile>>;
}

/// One directory of a store, to be changed. Every call may be the last before the power fails: nothing is durable
/// before its `sync`.
pub trait DiskWriter: Send + Sync + Debug {
    /// Writes at `offset`; the file is made if it is not there.
    fn write_at(&self, path: &str, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes a hole of whole pages; refused where the file system makes none.
    fn punch(&self, path: &str, offset: u64, bytes: u64) -> io::Result<()>;

    /// Gives a file a length; new bytes are zero.
    fn set_len(&self, path: &str, len: u64) -> io::Result<()>;

    /// Makes the bytes of a file durable.
    fn sync(&self, path: &str) -> io::Result<()>;

    /// Makes a folder, if there is none.
    fn make_folder(&self, path: &str) -> io::Result<()>;

    /// Gives a file another name; refused if that is taken.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Takes a file's name away; one that is not there is no error.
    fn remove(&self, path: &str) -> io::Result<()>;

    /// Takes an empty folder away; one that is not there is no error.
    fn remove_folder(&self, path: &str) -> io::Result<()>;

    /// Makes the names in a folder durable.
    fn sync_folder(&self, path: &str) -> io::Result<()>;
}

/// Memory at a multiple of [`ALIGN`], as direct reads need it.
#[derive(Debug, Default)]
pub struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    /// Zeroed memory.
    pub fn new(len: usize) -> Self {
        let bytes = vec![0u8; len.saturating_add(ALIGN)];
        // Where no aligned place can be found, direct reads are refused and buffered ones work.
        let start = bytes.as_ptr().align_offset(ALIGN).min(ALIGN);
        Self { bytes, start, len }
    }

    /// The memory.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(self.start..self.start.saturating_add(self.len)).unwrap_or_default()
    }

    /// The memory, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.start..self.start.saturating_add(self.len)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
