//! A disk of which the first readings of one place are wrong: a fault between the device and the memory that damages nothing.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvarts_fsck::disk::{Disk, DiskFile, MemoryDisk, Node};

/// Such a disk. What is written to the one behind it is not affected.
#[derive(Debug)]
pub struct Flaky {
    disk: MemoryDisk,
    path: String,
    offset: u64,
    /// Readings that will be wrong.
    wrong: Arc<AtomicU64>,
}

impl Flaky {
    /// A disk of which the first readings of this byte of a file, `wrong` of them, have one bit that is not there.
    pub fn new(disk: &MemoryDisk, path: &str, offset: usize, wrong: u64) -> Self {
        let wrong = Arc::new(AtomicU64::new(wrong));
        Self { disk: disk.clone(), path: path.to_owned(), offset: offset as u64, wrong }
    }
}

impl Disk for Flaky {
    fn name(&self) -> String {
        self.disk.name()
    }

    fn visit(&self, folder: &str, each: &mut dyn FnMut(Node)) -> io::Result<()> {
        self.disk.visit(folder, each)
    }

    fn open(&self, path: &str) -> io::Result<Box<dyn DiskFile>> {
        let file = self.disk.open(path)?;
        if path != self.path {
            return Ok(file);
        }
        Ok(Box::new(FlakyFile { file, offset: self.offset, wrong: Arc::clone(&self.wrong) }))
    }
}

#[derive(Debug)]
struct FlakyFile {
    file: Box<dyn DiskFile>,
    offset: u64,
    wrong: Arc<AtomicU64>,
}

impl DiskFile for FlakyFile {
    fn len(&self) -> u64 {
        self.file.len()
    }

    fn allocated(&self) -> u64 {
        self.file.allocated()
    }

    fn holes(&self) -> Vec<(u64, u64)> {
        self.file.holes()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let read = self.file.read_at(into, offset)?;
        let within = self.offset.checked_sub(offset).and_then(|at| usize::try_from(at).ok());
        let byte = within.filter(|at| *at < read).and_then(|at| into.get_mut(at));
        let less = |wrong: u64| wrong.checked_sub(1);
        if let Some(byte) = byte
            && self.wrong.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
        {
            *byte ^= 0x10;
        }
        Ok(read)
    }
}
