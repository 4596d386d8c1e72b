//! Reads a file by bytes through one window of bounded size, whatever the device makes of it.
//!
//! A page that the device will not give is shown as bytes that prove nothing: the recovery table then says what
//! its loss means.

use std::collections::VecDeque;

use crate::driver::ReadInto;
use crate::engine::volume::Volume;
use kvarts_contract::buffers::region::PAGE;
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;
use kvarts_contract::{
    buffers::BufMut,
    io_error::{FileId, IoError},
};

/// Bytes of one read.
const WINDOW_BYTES: usize = 1 << 20;
/// Reads under way ahead of the window.
const WINDOWS_AHEAD: usize = 4;
/// What an unreadable page is shown as: the first byte of no structure, and not zero.
const UNREADABLE: u8 = 0xee;
/// All callers wait for recovery.
pub(crate) const CLASS: Class = Class::Foreground;

/// Memory for one transfer. It never waits for the arena, because the pieces it would wait for may be the caller's
/// own.
pub(crate) fn memory(volume: &Volume, bytes: usize) -> Result<BufMut, Reason> {
    let own = || BufMut::zeroed(bytes).ok();
    let out_of_memory = || Reason::from(IoError::out_of_memory(bytes));
    volume.arena.try_take(bytes).or_else(own).ok_or_else(out_of_memory)
}

/// A file and the window into it.
pub(crate) struct Pages<'a> {
    volume: &'a Volume,
    file: FileId,
    /// Whole pages of the file that may be looked at.
    len: u64,
    start: u64,
    bytes: Vec<u8>,
    /// Reads of what follows the window, in order: where, and how many bytes.
    ahead: VecDeque<(u64, usize, ReadInto)>,
    /// How many of them: more the longer nothing is skipped.
    eager: usize,
    pub(crate) bytes_read: u64,
    pub(crate) unreadable: u64,
}

impl<'a> Pages<'a> {
    /// The first `len` bytes of a file, as far as they fill whole pages.
    pub(crate) fn new(volume: &'a Volume, file: FileId, len: u64) -> Self {
        let len = len - len % PAGE as u64;
        Self {
            volume,
            file,
            len,
            start: 0,
            bytes: Vec::new(),
            ahead: VecDeque::new(),
            eager: 1,
            bytes_read: 0,
            unreadable: 0,
        }
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

    /// Moves the window so that it begins in the page of `offset` and holds `want` bytes from there. What follows
    /// the old window is on its way already; anything else begins again.
    async fn fill(&mut self, offset: u64, want: usize) -> Result<(), Reason> {
        let start = offset - offset % PAGE as u64;
        let end = self.start + self.bytes.len() as u64;
        if (self.start..=end).contains(&start) {
            self.bytes.drain(..(start - self.start) as usize);
            self.eager = (self.eager * 2).min(WINDOWS_AHEAD);
        } else {
            self.eager = 1;
            self.bytes.clear();
            // A read that was begun ends in memory of its own, unseen.
            self.ahead.clear();
        }
        self.start = start;
        let wanted = (offset - start) as usize + want.max(PAGE);
        let wanted = (wanted as u64).min(self.len.saturating_sub(start)) as usize;
        while self.bytes.len() < wanted {
            self.read_ahead(self.eager)?;
            let Some((at, len, read)) = self.ahead.pop_front() else { return Ok(()) };
            let old = self.bytes.len();
            self.bytes.resize(old + len, 0);
            match read.await {
                Ok(memory) => memory.copy_out(0, &mut self.bytes[old..]),
                Err(_) => self.fill_by_page(at, old).await?,
            }
        }
        // Under way while the caller looks at what is here: not yet where it has just jumped to.
        self.read_ahead(if self.eager > 1 { self.eager } else { 0 })
    }

    /// Begins the reads of what follows.
    fn read_ahead(&mut self, windows: usize) -> Result<(), Reason> {
        while self.ahead.len() < windows {
            let behind = self.ahead.back().map(|(at, len, _)| at + *len as u64);
            let at = behind.unwrap_or(self.start + self.bytes.len() as u64);
            let len = (self.len.saturating_sub(at)).min(WINDOW_BYTES as u64) as usize;
            if len == 0 {
                break;
            }
            let memory = memory(self.volume, len)?;
            self.bytes_read += len as u64;
            let read = self.volume.driver.read_into(CLASS, self.file, at, memory);
            self.ahead.push_back((at, len, read));
        }
        Ok(())
    }

    /// Reads what is to lie from `old` on page by page, losing only the pages that cannot be read.
    async fn fill_by_page(&mut self, at: u64, old: usize) -> Result<(), Reason> {
        let mut offset = at;
        for page in self.bytes[old..].chunks_mut(PAGE) {
            let memory = memory(self.volume, page.len())?;
            match self.volume.driver.read_into(CLASS, self.file, offset, memory).await {
                Ok(memory) => memory.copy_out(0, page),
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
