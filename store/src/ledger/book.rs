//! What the bytes of one segment file are.

use std::sync::Arc;

use super::lock;
use super::report::{SegmentView, Space};
use kvarts_contract::sync::Mutex;
use kvarts_contract::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What a segment is to its book.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Phase {
    /// It holds nothing.
    #[default]
    Free,
    /// Records are being appended.
    Open,
    /// It takes no more records.
    Full,
    /// It failed, or cannot be told: it takes no more records, and what is not known to be something is dead.
    Lost,
}

#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    phase: Phase,
    /// Bytes of the budget that the file has.
    allocated: u64,
    /// Where the next record would go.
    log_end: u64,
    /// Bytes of records of blocks below that.
    records: u64,
    /// Bytes of these that were given back to the file system: neither live nor dead, and not allocated.
    punched: u64,
    /// Live bytes of these.
    live: u64,
    /// Which of all uses of all segments this is.
    incarnation: u64,
}

/// The book of one segment.
#[derive(Debug, Default)]
pub struct Book {
    figures: Mutex<Figures>,
    /// What all books of a store number the uses of segments by.
    uses: Arc<AtomicU64>,
    /// Bytes of segments of its shard that hold nothing.
    spare: Arc<AtomicU64>,
}

impl Book {
    /// An empty book. Uses of segments are numbered by what all books of a store share.
    pub(super) fn new(uses: &Arc<AtomicU64>, spare: &Arc<AtomicU64>) -> Self {
        let incarnation = uses.fetch_add(1, Relaxed);
        let figures = Mutex::new(Figures { incarnation, ..Figures::default() });
        Self { figures, uses: Arc::clone(uses), spare: Arc::clone(spare) }
    }

    /// Which of all uses of all segments of a store this is, since it was opened: what was read of a segment in one use
    /// is what lies there as long as this stays the same.
    pub fn incarnation(&self) -> u64 {
        lock(&self.figures).incarnation
    }

    fn change(&self, change: impl FnOnce(&mut Figures)) {
        let mut book = lock(&self.figures);
        let before = book.spare();
        change(&mut book);
        let after = book.spare();
        if before != after {
            self.spare.fetch_add(after, Relaxed);
            self.spare.fetch_sub(before, Relaxed);
        }
    }

    /// The file has `bytes` bytes of the budget.
    pub fn set_allocated(&self, bytes: u64) {
        self.change(|book| book.allocated = bytes);
    }

    /// Bytes of the budget that the file has.
    pub fn allocated(&self) -> u64 {
        lock(&self.figures).allocated
    }

    /// Bytes of the budget that the file has, and those of its records that were given back.
    pub fn accounted(&self) -> u64 {
        let book = lock(&self.figures);
        book.allocated + book.punched
    }

    /// Of its records, `punched` bytes are holes; the file has `allocated` bytes of the budget.
    pub fn set_punched(&self, allocated: u64, punched: u64) {
        self.change(|book| {
            book.allocated = allocated;
            book.punched = punched;
        });
    }

    /// A new use begins with a header of this size.
    pub fn begin(&self, header_bytes: u64) {
        self.change(|book| {
            book.phase = Phase::Open;
            book.incarnation = self.uses.fetch_add(1, Relaxed);
            book.log_end = header_bytes;
            book.records = 0;
            book.punched = 0;
        });
    }

    /// `bytes` were given out, of which `records` to records of blocks.
    pub fn append(&self, bytes: u64, records: u64) {
        let mut book = lock(&self.figures);
        book.log_end += bytes;
        book.records += records;
    }

    /// Recovery found so much in the file.
    pub fn restore(&self, log_end: u64, records: u64) {
        let mut book = lock(&self.figures);
        book.log_end = log_end;
        book.records = records;
    }

    /// The segment is something else from now on. A free one holds nothing.
    pub fn turn(&self, phase: Phase) {
        self.change(|book| {
            book.phase = phase;
            if phase == Phase::Free {
                book.log_end = 0;
                book.records = 0;
                book.punched = 0;
            }
        });
    }

    /// Its file is gone: what it had is no shard's spare room.
    pub(super) fn close(&self) {
        self.change(|book| book.phase = Phase::Lost);
    }

    pub(super) fn moved(&self, before: u64, after: u64) {
        self.change(|book| book.live = (book.live + after).saturating_sub(before));
    }

    /// Live bytes, for a choice among segments.
    pub fn live(&self) -> u64 {
        lock(&self.figures).live
    }

    /// What the bytes are, as of one moment.
    pub fn space(&self) -> Space {
        lock(&self.figures).space()
    }

    pub(super) fn view(&self, shard: u32, segment: u32) -> SegmentView {
        let book = *lock(&self.figures);
        let Figures { phase, log_end, records, punched, .. } = book;
        SegmentView { shard, segment, phase, log_end, records, punched, space: book.space() }
    }
}

impl Figures {
    /// Unused bytes of it: a segment that holds nothing, or nothing live any more.
    fn spare(&self) -> u64 {
        match self.phase {
            Phase::Free => self.allocated,
            Phase::Full if self.live == 0 => self.allocated,
            _ => 0,
        }
    }

    fn space(&self) -> Space {
        let Self { phase, allocated, log_end, records, punched, live, .. } = *self;
        let records = records.saturating_sub(punched);
        let log_end = log_end.saturating_sub(punched);
        let inside = log_end.saturating_sub(records);
        let (dead, free, overhead) = match phase {
            Phase::Free => (0, allocated, 0),
            Phase::Open => (records.saturating_sub(live), allocated.saturating_sub(log_end), inside),
            Phase::Full => (records.saturating_sub(live), 0, allocated.saturating_sub(records)),
            Phase::Lost => (allocated.saturating_sub(inside).saturating_sub(live), 0, inside),
        };
        Space { allocated, live, dead, free, overhead }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_back_is_neither_dead_nor_allocated() {
        let book = Book::default();
        book.set_allocated(100_000);
        book.begin(4096);
        book.append(81_920, 73_728);
        book.moved(0, 20_000);
        book.turn(Phase::Full);
        book.set_punched(50_848, 49_152);
        let space = book.space();
        assert_eq!((space.allocated, space.live, space.dead), (50_848, 20_000, 4576));
        assert_eq!((space.overhead, space.sum()), (26_272, 50_848));
        assert_eq!(book.view(0, 0).punched, 49_152);
        book.moved(20_000, 0);
        book.turn(Phase::Free);
        assert_eq!(book.space().free, 50_848);
    }

    #[test]
    fn the_four_add_up_in_every_phase() {
        let book = Book::default();
        book.set_allocated(100_000);
        assert_eq!(book.space(), Space { allocated: 100_000, free: 100_000, ..Space::default() });
        book.begin(4096);
        book.append(20_480, 16_384);
        book.moved(0, 10_000);
        let open = book.space();
        assert_eq!((open.live, open.dead, open.free, open.overhead), (10_000, 6384, 75_424, 8192));
        book.turn(Phase::Full);
        let full = book.space();
        assert_eq!((full.live, full.dead, full.free, full.overhead), (10_000, 6384, 0, 83_616));
        book.turn(Phase::Lost);
        let lost = book.space();
        assert_eq!((lost.live, lost.dead, lost.free, lost.overhead), (10_000, 81_808, 0, 8192));
        book.moved(10_000, 0);
        book.turn(Phase::Free);
        for space in [open, full, lost, book.space()] {
            assert_eq!(space.sum(), space.allocated);
        }
    }
}
