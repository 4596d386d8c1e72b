//! Reads a file by bytes through one window of bounded size, whatever the device makes of it.
//!
//! A page that the device will not give is shown as bytes that prove nothing: the recovery table then says what
//! its loss means.

use crate::engine::log::Log;
use crate::error::Reason;
use crate::io::mem::PAGE;
use crate::io::{Buf, FileId, IoError, Region};
use crate::rt::Class;

/// Bytes of one read.
const WINDOW_BYTES: usize = 1 << 20;
/// What an unreadable page is shown as: the first byte of no structure, and not zero.
const UNREADABLE: u8 = 0xee;
/// Recovery is what everybody waits for.
pub(crate) const CLASS: Class = Class::Foreground;

/// Memory for one transfer. It never waits for the arena, because the pieces it would wait for may be the caller's
/// own.
pub(crate) fn memory(log: &Log, bytes: usize) -> Result<Buf, Reason> {
    let own = || Region::anonymous(bytes).ok().and_then(|region| Buf::new(&region, 0, bytes));
    let out_of_memory = || Reason::Media(IoError::out_of_memory(bytes).to_string());
    log.arena.try_take(bytes).or_else(own).ok_or_else(out_of_memory)
}

/// A file and the window into it.
pub(crate) struct Pages<'a> {
    log: &'a Log,
    file: FileId,
    /// Whole pages of the file that may be looked at.
    len: u64,
    start: u64,
    bytes: Vec<u8>,
    pub(crate) bytes_read: u64,
    pub(crate) unreadable: u64,
}

impl<'a> Pages<'a> {
    /// The first `len` bytes of a file, as far as they fill whole pages.
    pub(crate) fn new(log: &'a Log, file: FileId, len: u64) -> Self {
        let len = len - len % PAGE as u64;
        Self { log, file, len, start: 0, bytes: Vec::new(), bytes_read: 0, unreadable: 0 }
    }

    /// The file.
    pub(crate) fn file(&self) -> FileId {
        self.file
    }

    /// The bytes from `offset` on: at least `want` of them, unless the file ends before.
    pub(crate) async fn at(&mut self, offset: u64, want: usize) -> Result<&[u8], Reason> {
        let available = self.len.saturating_sub(offset).min(want as u64);
        let inside = offset >= self.start && offset + available <= self.start + self.bytes.len() as u64;
        if !inside {
            self.fill(offset, want).await?;
        }
        let skip = offset.saturating_sub(self.start) as usize;
        Ok(self.bytes.get(skip..).unwrap_or_default())
    }

    async fn fill(&mut self, offset: u64, want: usize) -> Result<(), Reason> {
        self.start = offset - offset % PAGE as u64;
        let want = (offset - self.start) as usize + want;
        let len = want.max(WINDOW_BYTES).next_multiple_of(PAGE) as u64;
        let len = len.min(self.len.saturating_sub(self.start)) as usize;
        self.bytes.resize(len, 0);
        if len == 0 {
            return Ok(());
        }
        let memory = memory(self.log, len)?;
        self.bytes_read += len as u64;
        let read = self.log.driver.read(CLASS, self.file, self.start, memory.clone()).await;
        if read.is_err() {
            return self.fill_by_page().await;
        }
        memory.copy_out(0, &mut self.bytes);
        Ok(())
    }

    /// The same, losing only the pages that cannot be read.
    async fn fill_by_page(&mut self) -> Result<(), Reason> {
        let mut offset = self.start;
        for page in self.bytes.chunks_mut(PAGE) {
            let memory = memory(self.log, page.len())?;
            match self.log.driver.read(CLASS, self.file, offset, memory.clone()).await {
                Ok(()) => memory.copy_out(0, page),
                Err(_) => {
                    self.unreadable += 1;
                    page.fill(UNREADABLE);
                }
            }
            offset += PAGE as u64;
        }
        Ok(())
    }
}
