//! Reads of files straight into a device's memory, past the processor and its memory.
//!
//! Bytes that are read this way are not verified yet: their user compares them with their digests on the device first.

use std::any::Any;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::Memory;
use crate::error::DeviceError;

/// Whether bytes may come another way than the straight one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// The straight way only, and the library is told so for the whole process: other users of it in this process get an error too
    /// where there is no straight way.
    Strict,
    /// The straight way only, as the first read of each file system shows; nothing in the process is changed for it.
    Straight,
    /// Through the processor's memory where there is no straight way.
    Any,
}

/// Reads files into memory of one device. Methods may be called from any thread.
pub trait Files: Send + Sync + fmt::Debug {
    /// Makes memory known, so that reads into it go the straight way. It stays so while a clone of the answer lives.
    fn register(&self, memory: &Memory) -> Result<Registered, DeviceError>;

    /// Makes a file known. The descriptor must stay open until the last clone of the answer is gone.
    fn open(&self, file: BorrowedFd<'_>) -> Result<OpenFile, DeviceError>;

    /// Reads exactly `len` bytes at `offset` of a file to `at` in memory, and waits for them. A file that ends before is
    /// an error. After an error the range holds anything.
    fn read(
        &self,
        file: &OpenFile,
        offset: u64,
        into: &Registered,
        at: u64,
        len: u64,
    ) -> Result<(), DeviceError>;

    /// The same, and an error also if the bytes did not come straight, or if the way they came is unknown. What holds for one
    /// read of a file system holds for the others.
    fn prove(
        &self,
        file: &OpenFile,
        offset: u64,
        into: &Registered,
        at: u64,
        len: u64,
    ) -> Result<(), DeviceError> {
        self.read(file, offset, into, at, len)
    }
}

/// Memory that files are read into.
#[derive(Clone)]
pub struct Registered {
    // Before the memory, which must not go first.
    _raw: Arc<dyn Any + Send + Sync>,
    memory: Memory,
}

impl Registered {
    pub(super) fn new(memory: &Memory, raw: Arc<dyn Any + Send + Sync>) -> Self {
        Self { _raw: raw, memory: memory.clone() }
    }

    /// The memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Refuses a range that leaves the memory.
    pub(super) fn check(&self, at: u64, len: u64) -> Result<(), DeviceError> {
        super::within(&self.memory, &[(at, len)])
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registered({:?})", self.memory)
    }
}

/// A file that is known to a device.
#[derive(Clone)]
pub struct OpenFile(pub(super) Arc<dyn Any + Send + Sync>);

impl fmt::Debug for OpenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OpenFile")
    }
}
