//! Reads a file front to back through one buffer of bounded size, whatever the device makes of it.
//!
//! Invariants:
//! - Every read is aligned in the file and in memory, so direct reads work.
//! - A page that the device will not give is a fault with a place, and is shown as bytes that prove nothing.
//! - Behind the end of the file there are zeros up to the length that a segment has: a file that a crash left too
//!   short reads so when its store is opened.
//! - Memory is one transfer, or the largest structure that was asked for whole.

use std::sync::atomic::{AtomicU64, Ordering};

use kvarts_layout::format::PAGE;

use crate::disk::{Aligned, DiskFile};

/// Bytes of one transfer.
pub const READ_BYTES: usize = 2 << 20;
/// What an unreadable page is shown as: the first byte of no structure, and not zero.
const UNREADABLE: u8 = 0xee;
/// Ranges of unreadable pages that are kept apart; beyond that the last one grows over what lies between.
const FAULTS_MAX: usize = 1024;
const PAGE_U64: u64 = PAGE as u64;

/// What has been read so far, for progress. Shared by all threads.
#[derive(Debug, Default)]
pub struct Tally {
    bytes: AtomicU64,
}

impl Tally {
    /// Bytes that came from the device.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Pages that the device would not give: from, to.
pub type Fault = (u64, u64);

/// A file and the buffer into it.
#[derive(Debug)]
pub struct Window<'a> {
    file: &'a dyn DiskFile,
    tally: &'a Tally,
    /// Where the file ends for its readers, zeros included.
    end: u64,
    buffer: Aligned,
    /// Where the buffer's first byte lies in the file, a multiple of a page.
    start: u64,
    filled: usize,
    /// Bytes of a transfer at least: more than what was asked for only when one goes front to back.
    ahead: usize,
    faults: Vec<Fault>,
    /// What of the file is not there; asked for once.
    holes: std::cell::OnceCell<Vec<(u64, u64)>>,
}

impl<'a> Window<'a> {
    /// The first `end` bytes of a file, a multiple of a page.
    pub fn new(file: &'a dyn DiskFile, end: u64, tally: &'a Tally) -> Self {
        let buffer = Aligned::default();
        let holes = std::cell::OnceCell::new();
        Self { file, tally, end, buffer, start: 0, filled: 0, ahead: READ_BYTES, faults: Vec::new(), holes }
    }

    /// Whether reads fetch what follows, or only what is asked for.
    pub fn read_ahead(&mut self, ahead: bool) {
        self.ahead = if ahead { READ_BYTES } else { PAGE };
    }

    /// The file.
    pub fn file(&self) -> &'a dyn DiskFile {
        self.file
    }

    /// What of the file is not there.
    pub fn holes(&self) -> &[(u64, u64)] {
        self.holes.get_or_init(|| self.file.holes())
    }

    /// Where the device gave nothing, in the order met.
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }

    /// The bytes from `offset` on, a multiple of a page: `len` of them, or fewer at the end.
    pub fn bytes(&mut self, offset: u64, len: usize) -> &[u8] {
        let len = usize::try_from(self.end.saturating_sub(offset)).map_or(len, |left| left.min(len));
        if !self.holds(offset, len) {
            self.fill(offset, len.max(PAGE));
        }
        let skip = self.place(offset);
        self.buffer.bytes().get(skip..skip.saturating_add(len)).unwrap_or_default()
    }

    /// What the buffer holds from `offset` on, at least a byte and at most `most`, unless the end was reached.
    pub fn some(&mut self, offset: u64, most: u64) -> &[u8] {
        if !self.holds(offset, 1) {
            self.fill(offset - offset % PAGE_U64, PAGE);
        }
        let skip = self.place(offset);
        let held = self.buffer.bytes().get(skip..self.filled).unwrap_or_default();
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        held.get(..most.min(held.len())).unwrap_or_default()
    }

    fn place(&self, offset: u64) -> usize {
        usize::try_from(offset.saturating_sub(self.start)).unwrap_or(usize::MAX).min(self.filled)
    }

    fn holds(&self, offset: u64, len: usize) -> bool {
        let end = self.start.saturating_add(self.filled as u64);
        offset >= self.start && offset.saturating_add(len as u64) <= end
    }

    /// Moves the buffer so that it begins at `offset` and holds at least `want` bytes, unless the end comes first.
    fn fill(&mut self, offset: u64, want: usize) {
        let left = usize::try_from(self.end.saturating_sub(offset)).unwrap_or(usize::MAX);
        let size = want.next_multiple_of(PAGE).max(self.ahead);
        let kept = if self.holds(offset, 0) { self.filled.saturating_sub(self.place(offset)) } else { 0 };
        let from = self.filled.saturating_sub(kept);
        if self.buffer.bytes().len() < size {
            let mut larger = Aligned::new(size.max(READ_BYTES));
            let old = self.buffer.bytes().get(from..self.filled).unwrap_or_default();
            larger.bytes_mut().iter_mut().zip(old).for_each(|(to, from)| *to = *from);
            self.buffer = larger;
        } else {
            self.buffer.bytes_mut().copy_within(from..from.saturating_add(kept), 0);
        }
        self.start = offset;
        self.filled = kept;
        let size = size.min(left);
        if let Some(rest) = self.buffer.bytes_mut().get_mut(kept..size) {
            let at = offset.saturating_add(kept as u64);
            let file = self.file;
            if read_full(file, rest, at, self.tally).is_err() {
                for (page, at) in rest.chunks_mut(PAGE).zip((at..).step_by(PAGE)) {
                    if read_full(file, page, at, self.tally).is_err() {
                        page.fill(UNREADABLE);
                        note_fault(&mut self.faults, at, at.saturating_add(PAGE_U64));
                    }
                }
            }
            self.filled = size;
        }
    }
}

fn note_fault(faults: &mut Vec<Fault>, from: u64, to: u64) {
    if faults.iter().any(|&(start, end)| start <= from && to <= end) {
        return;
    }
    let full = faults.len() >= FAULTS_MAX;
    match faults.last_mut() {
        Some((_, end)) if *end == from || full => *end = to,
        _ => faults.push((from, to)),
    }
}

/// Fills the memory, with zeros behind the file's end.
fn read_full(file: &dyn DiskFile, into: &mut [u8], offset: u64, tally: &Tally) -> std::io::Result<()> {
    let mut done = 0;
    while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let at = offset.saturating_add(done as u64);
        let read = match file.read_at(rest, at) {
            Ok(read) => read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        tally.add(read);
        done = done.saturating_add(read);
        if read == 0 || !done.is_multiple_of(PAGE) {
            break;
        }
    }
    into.get_mut(done..).unwrap_or_default().fill(0);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{Disk, MemoryDisk};

    fn file(bytes: usize) -> (MemoryDisk, Vec<u8>) {
        let disk = MemoryDisk::new();
        let content: Vec<u8> = (0..bytes).map(|at| (at / 7) as u8).collect();
        disk.plant("file", content.clone());
        (disk, content)
    }

    #[test]
    fn bytes_are_the_files_wherever_one_looks() {
        let (disk, content) = file(3 * READ_BYTES + 100);
        let open = disk.open("file").unwrap();
        let tally = Tally::default();
        let end = (content.len() as u64).next_multiple_of(PAGE_U64);
        let mut window = Window::new(&*open, end, &tally);
        for (at, len) in
            [(0, 10), (4096, 4096), (READ_BYTES - 4096, 8192), (8192, READ_BYTES * 2), (4096, 10)]
        {
            assert_eq!(window.bytes(at as u64, len), &content[at..at + len], "{at} {len}");
        }
        let mut at = 5;
        while at < content.len() {
            let some = window.some(at as u64, 70_000);
            assert!(!some.is_empty());
            let here = some.len().min(content.len() - at);
            assert_eq!(some[..here], content[at..at + here]);
            at += some.len();
        }
        assert_eq!(window.bytes(end - 4096, 9000).len(), 4096);
        assert!(window.bytes(end, 1).is_empty() && window.some(end + 5, 1).is_empty());
    }

    #[test]
    fn each_byte_is_read_once_when_one_goes_front_to_back() {
        let (disk, content) = file(2 * READ_BYTES + 8192);
        let open = disk.open("file").unwrap();
        let tally = Tally::default();
        let mut window = Window::new(&*open, content.len() as u64, &tally);
        for at in (0..content.len()).step_by(PAGE) {
            window.bytes(at as u64, 3 * PAGE);
        }
        assert_eq!(tally.bytes(), content.len() as u64);
    }

    #[test]
    fn without_reading_ahead_only_what_is_asked_for_is_read() {
        let (disk, content) = file(2 * READ_BYTES);
        let open = disk.open("file").unwrap();
        let tally = Tally::default();
        let mut window = Window::new(&*open, content.len() as u64, &tally);
        window.read_ahead(false);
        assert_eq!(window.bytes(READ_BYTES as u64, PAGE), &content[READ_BYTES..READ_BYTES + PAGE]);
        assert_eq!(window.bytes(0, PAGE), &content[..PAGE]);
        assert_eq!(tally.bytes(), 2 * PAGE as u64);
        window.read_ahead(true);
        assert_eq!(window.bytes(PAGE as u64, 10), &content[PAGE..PAGE + 10]);
        assert_eq!(tally.bytes(), (2 * PAGE + READ_BYTES) as u64);
    }

    #[test]
    fn behind_the_end_of_a_short_file_there_are_zeros() {
        let (disk, content) = file(5000);
        let open = disk.open("file").unwrap();
        let tally = Tally::default();
        let mut window = Window::new(&*open, 65_536, &tally);
        let bytes = window.bytes(0, 65_536);
        assert_eq!(bytes[..5000], content);
        assert!(bytes.len() == 65_536 && bytes[5000..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn an_unreadable_page_costs_itself_only() {
        let (disk, content) = file(65_536);
        disk.spoil("file", 3);
        disk.spoil("file", 4);
        let open = disk.open("file").unwrap();
        let tally = Tally::default();
        let mut window = Window::new(&*open, 65_536, &tally);
        let bytes = window.bytes(0, 65_536).to_vec();
        assert_eq!(bytes[..3 * 4096], content[..3 * 4096]);
        assert_eq!(bytes[5 * 4096..], content[5 * 4096..]);
        assert!(bytes[3 * 4096..5 * 4096].iter().all(|byte| *byte == UNREADABLE));
        assert_eq!(window.faults(), [(3 * 4096, 5 * 4096)]);
    }
}
