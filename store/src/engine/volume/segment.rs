//! One segment of a shard's log, while the process lives: where the next record goes, what has been written, and
//! what has been flushed.
//!
//! Invariants:
//! - offsets are given out in log order and never twice; a record's range is *in flight* from then until its
//!   write has completed;
//! - everything below [`Tail::written_upto`] has been written; everything below `durable_upto` has been flushed
//!   by a flush that was submitted after its write completed;
//! - durable acknowledgements are given in log order: a record is durable only when `durable_upto` has passed its
//!   end, hence when everything before it in the segment is durable too;
//! - a segment whose write or flush failed is *broken* for good: nothing more is given out or acknowledged in
//!   it, and no flush of it is tried again, because the kernel may have dropped the dirty bytes and call the
//!   second flush a success.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use kvarts_layout::format::footer::{Content, Defined, Entry, Footer};
use kvarts_layout::format::record::Body;
use kvarts_layout::format::trailer::SealReason;
use kvarts_layout::format::{PAGE_BYTES, page_align};

use crate::driver::Driver;
use crate::engine::tasks::notify::{Notify, Reached};
use crate::index::RecordInfo;
use crate::ledger::{Book, Phase};
use kvarts_contract::error::{Reason, SpaceCause};
use kvarts_contract::io_error::{FileId, IoError, IoErrorKind};

/// What a segment is to its shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SegmentState {
    /// Holds nothing: it may be recycled under the next generation.
    Free,
    /// Records are being appended.
    Open,
    /// Full; its footer is being written.
    Sealing,
    /// Full, with a durable footer.
    Sealed,
    /// A write or flush failed: what was acknowledged in it stays readable, nothing is added.
    Suspect,
}

impl SegmentState {
    fn phase(self) -> Phase {
        match self {
            Self::Free => Phase::Free,
            Self::Open => Phase::Open,
            Self::Sealing | Self::Sealed => Phase::Full,
            Self::Suspect => Phase::Lost,
        }
    }
}

/// A segment's state, which its book follows.
#[derive(Debug)]
pub(crate) struct State {
    state: Cell<SegmentState>,
    book: Arc<Book>,
}

impl State {
    pub(crate) fn get(&self) -> SegmentState {
        self.state.get()
    }

    pub(crate) fn set(&self, state: SegmentState) {
        self.state.set(state);
        self.book.turn(state.phase());
    }
}

/// What a caller is told of a write or flush that failed.
pub(crate) fn fault(error: &IoError) -> Reason {
    match error.kind {
        IoErrorKind::NoSpace => Reason::NoSpace(SpaceCause::Disk),
        IoErrorKind::Passing => Reason::Passing(error.to_string()),
        _ => error.clone().into(),
    }
}

/// Bytes of those entries that are records of blocks.
pub(crate) fn record_bytes(entries: &[Entry]) -> u64 {
    let bytes = |entry: &Entry| match entry.content {
        Content::Blocks(_) => {
            u64::from(entry.header_bytes) + page_align(entry.payload_bytes).unwrap_or(entry.payload_bytes)
        }
        _ => 0,
    };
    entries.iter().map(bytes).sum()
}

/// Where a record begins and ends in its segment.
pub(crate) fn record_range(record: &RecordInfo) -> (u64, u64) {
    let page = kvarts_layout::format::PAGE_BYTES;
    let start = u64::from(record.page) * page;
    (start, start + (u64::from(record.header_pages) + u64::from(record.payload_pages)) * page)
}

/// A record as the footer will list it.
pub(crate) fn entry(
    offset: u64,
    sequence: u64,
    header_bytes: usize,
    payload_bytes: u64,
    body: &Body,
) -> Entry {
    let content = match body {
        Body::Blocks(blocks) => Content::Blocks(blocks.clone()),
        Body::Identity(definition) => {
            Content::Identity(Defined { local: definition.local, id: definition.id })
        }
        Body::Spec(definition) => Content::Spec(Defined { local: definition.local, id: definition.id }),
        Body::Tombstones(tombstones) => Content::Tombstones(tombstones.clone()),
        Body::Epoch(epoch) => Content::Epoch(*epoch),
        Body::Unknown(code) => Content::Unknown(*code),
    };
    Entry { offset, sequence, payload_bytes, header_bytes: header_bytes as u32, content }
}

/// The growing end of a segment.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    /// Where the next record goes.
    pub(crate) next: u64,
    /// Ranges given out whose writes have not completed: start to end.
    in_flight: BTreeMap<u64, u64>,
    /// Everything below is flushed.
    pub(crate) durable_upto: u64,
    flushing: bool,
    /// What the footer will list.
    pub(crate) entries: Vec<Entry>,
    /// The same while the footer is made and written.
    pub(crate) sealing: Option<Arc<Footer>>,
    /// Upper estimate of the footer's bytes.
    pub(crate) footer_bytes: u64,
    /// Local ids that the segment has defined: (is a spec, id).
    pub(crate) defined: BTreeSet<(bool, u32)>,
    broken: Option<Reason>,
}

impl Tail {
    /// Everything below this offset has been written.
    pub(crate) fn written_upto(&self) -> u64 {
        self.in_flight.first_key_value().map_or(self.next, |(&start, _)| start)
    }

    /// Gives out the next `len` bytes.
    pub(crate) fn give_out(&mut self, len: u64) -> u64 {
        let offset = self.next;
        self.next += len;
        self.in_flight.insert(offset, self.next);
        offset
    }
}

/// One segment file.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) number: u32,
    pub(crate) file: FileId,
    /// Of what it holds now; a free segment is written next under the one after.
    pub(crate) generation: Cell<u64>,
    pub(crate) first_sequence: Cell<u64>,
    pub(crate) state: State,
    /// What its bytes are.
    pub(crate) book: Arc<Book>,
    pub(crate) tail: RefCell<Tail>,
    /// Device reads under way: the segment is not recycled while there are any.
    pub(crate) readers: Cell<u32>,
    /// What of its file is not there, as the file system told last.
    pub(crate) holes: RefCell<Vec<(u64, u64)>>,
    /// Dead bytes that could not be given back when that was tried last.
    pub(crate) unpunchable_bytes: Cell<u64>,
    /// The coarse time of the last use of the oldest of what it holds, in steps since opening: not after the truth.
    pub(crate) coldest: Cell<i64>,
    /// Where its footer lies, if that is known: offset and bytes.
    pub(crate) footer_at: Cell<Option<(u64, u32)>>,
    /// What stands empty between its records and its footer: offset and bytes.
    pub(crate) gap: Cell<Option<(u64, u64)>>,
    /// It has been tried to give that back.
    gap_tried: Cell<bool>,
    /// The generation of which a durable checkpoint says that everything in it is dead.
    freed_generation: Cell<u64>,
    /// The least sequence of what the file held before this generation, until the header of this one is durable: a
    /// crash could bring it back.
    before: Cell<Option<u64>>,
    /// How often it could not be begun although the device took other writes.
    pub(crate) misses: Cell<u32>,
    /// Of a segment sealed in order, where its records end: everything below was flushed and is listed. Else zero.
    sealed_upto: Cell<u64>,
    /// The version of what the shard had buried when it was sealed, if that was in this life.
    pub(crate) buried_by: Cell<Option<u64>>,
    holed: Cell<bool>,
    unpunchable: Cell<bool>,
    /// Short ids of namespaces on disk that mean another one in memory.
    renamed: RefCell<BTreeMap<u32, u32>>,
    changed: Notify,
    /// Who waits for what lies below a place to be durable.
    flushed: Reached,
}

impl Segment {
    /// A segment in this state, with nothing under way.
    pub(crate) fn new(
        (number, book): (u32, Arc<Book>),
        file: FileId,
        generation: u64,
        state: SegmentState,
    ) -> Self {
        book.turn(state.phase());
        Self {
            number,
            file,
            generation: Cell::new(generation),
            first_sequence: Cell::new(0),
            state: State { state: Cell::new(state), book: Arc::clone(&book) },
            book,
            tail: RefCell::default(),
            readers: Cell::new(0),
            holes: RefCell::default(),
            unpunchable_bytes: Cell::new(0),
            coldest: Cell::new(i64::MAX),
            footer_at: Cell::new(None),
            gap: Cell::new(None),
            gap_tried: Cell::new(false),
            freed_generation: Cell::new(0),
            before: Cell::new(None),
            misses: Cell::new(0),
            sealed_upto: Cell::new(0),
            buried_by: Cell::new(None),
            holed: Cell::new(false),
            unpunchable: Cell::new(false),
            renamed: RefCell::default(),
            changed: Notify::default(),
            flushed: Reached::default(),
        }
    }

    /// Begins a new generation. Its header page counts as the first bytes given out.
    pub(crate) fn begin(&self, first_sequence: u64) {
        if self.generation.get() > 0 {
            let held = self.first_sequence.get();
            self.before.set(Some(self.before.get().map_or(held, |before| before.min(held))));
        }
        let reused = kvarts_layout::planted!("generation-reused") && self.generation.get() > 0;
        self.generation.set(if reused { self.generation.get() } else { self.generation.get() + 1 });
        self.first_sequence.set(first_sequence);
        self.state.set(SegmentState::Open);
        self.book.begin(PAGE_BYTES);
        let mut tail = Tail::default();
        tail.give_out(PAGE_BYTES);
        self.tail.replace(tail);
        self.holes.replace(Vec::new());
        self.unpunchable_bytes.set(0);
        self.coldest.set(i64::MAX);
        self.footer_at.set(None);
        self.gap.set(None);
        self.gap_tried.set(false);
        self.sealed_upto.set(0);
        self.buried_by.set(None);
        self.unpunchable.set(false);
        self.renamed.borrow_mut().clear();
    }

    /// Notes what recovery found that the segment holds.
    pub(crate) fn found(&self, log_end: u64, entries: &[Entry]) {
        self.book.restore(log_end, record_bytes(entries));
    }

    /// It holds something that was used last in this step.
    pub(crate) fn note_cold(&self, step: i64) {
        self.coldest.set(self.coldest.get().min(step));
    }

    /// Notes where the records of a sealed segment end and where its footer lies.
    /// `version` is that of what the shard had buried by then.
    pub(crate) fn sealed_at(
        &self,
        (log_end, version): (u64, Option<u64>),
        (footer, bytes): (u64, u32),
        reason: SealReason,
    ) {
        self.buried_by.set(version);
        self.footer_at.set(Some((footer, bytes)));
        self.sealed_upto.set(if reason == SealReason::Normal { log_end } else { 0 });
        self.gap.set(footer.checked_sub(log_end).filter(|len| *len > 0).map(|len| (log_end, len)));
    }

    /// Offset and length of the unused gap between the records of a sealed segment and its footer, if it is at least `bytes_min`
    /// long and was not punched yet. Pages never written are holes to the file system, given back or not: only the
    /// books tell them apart.
    pub(crate) fn punchable_gap(&self, bytes_min: u64, segment_bytes: u64) -> Option<(u64, u64)> {
        let (at, len) = self.gap.get()?;
        let there = self.book.accounted().saturating_add(len / 2) > segment_bytes;
        (there && len >= bytes_min && !self.gap_tried.get()).then_some((at, len))
    }

    /// It has been tried to give the rest back.
    pub(crate) fn tried_rest(&self) {
        self.gap_tried.set(true);
    }

    /// Whether it was sealed with so much of it unused that three more like it would fit in.
    pub(crate) fn is_short(&self, segment_bytes: u64) -> bool {
        self.gap.get().is_some_and(|(_, len)| len >= segment_bytes / 4 * 3)
    }

    /// Whether what begins at `offset` has been written in this generation. While the segment is being filled, a place
    /// that was looked up in an earlier generation may not have been.
    pub(crate) fn has_written(&self, offset: u64) -> bool {
        if self.state.get() != SegmentState::Open {
            return true;
        }
        let tail = self.tail.borrow();
        let before = tail.in_flight.range(..=offset).next_back();
        offset < tail.next && before.is_none_or(|(_, end)| *end <= offset)
    }

    /// The header of this generation is durable: nothing of an earlier one comes back.
    pub(crate) fn header_is_durable(&self) {
        self.before.set(None);
        self.misses.set(0);
    }

    /// The least sequence of an earlier generation that a crash could bring back, if any.
    pub(crate) fn may_come_back(&self) -> Option<u64> {
        self.before.get()
    }

    /// Up to where nothing that cannot be explained lies in it, now that it is sealed; zero if that is not known.
    pub(crate) fn sealed_upto(&self) -> u64 {
        self.sealed_upto.get()
    }

    /// A durable checkpoint says of this generation that everything in it is dead.
    pub(crate) fn say_free(&self, generation: u64) {
        self.freed_generation.set(generation);
    }

    /// Whether its file may go without looking lost: it never had a record, or a checkpoint says that all are dead.
    pub(crate) fn may_be_missing(&self) -> bool {
        self.freed_generation.get() == self.generation.get()
    }

    /// Pages of records have been given back, or are about to be.
    pub(crate) fn set_holed(&self) {
        self.holed.set(true);
    }

    /// Whether pages of records may be gone.
    pub(crate) fn is_holed(&self) -> bool {
        self.holed.get()
    }

    /// It is emptied only as a whole from now on.
    pub(crate) fn set_unpunchable(&self) {
        self.unpunchable.set(true);
    }

    /// Whether it is emptied only as a whole.
    pub(crate) fn is_unpunchable(&self) -> bool {
        self.unpunchable.get()
    }

    /// Notes what of a sealed segment is not there: holes, and the bytes that its file has.
    pub(crate) fn found_holes(&self, holes: Vec<(u64, u64)>, punched: u64, allocated: u64) {
        self.book.set_punched(allocated, punched);
        self.holed.set(punched > 0);
        self.holes.replace(holes);
    }

    /// Notes what a short id of a namespace in this segment is in memory.
    pub(crate) fn rename(&self, on_disk: u32, in_memory: u32) {
        let mut renamed = self.renamed.borrow_mut();
        if on_disk == in_memory {
            renamed.remove(&on_disk);
        } else {
            renamed.insert(on_disk, in_memory);
        }
    }

    /// How many short ids mean another namespace in memory.
    pub(crate) fn renamed(&self) -> usize {
        self.renamed.borrow().len()
    }

    /// What a short id of a namespace in this segment is in memory.
    pub(crate) fn local(&self, on_disk: u32) -> u32 {
        self.renamed.borrow().get(&on_disk).copied().unwrap_or(on_disk)
    }

    /// The write of what was given out at `offset` has completed.
    pub(crate) fn wrote(&self, offset: u64) {
        self.tail.borrow_mut().in_flight.remove(&offset);
        self.changed.wake_all();
        self.wake_written();
    }

    /// Lets puts look again that may lead a flush now. While one is under way no other can be led: its end
    /// wakes them.
    fn wake_written(&self) {
        let tail = self.tail.borrow();
        let (flushing, upto) = (tail.flushing, tail.written_upto());
        drop(tail);
        if !flushing {
            self.flushed.wake_up_to(upto);
        }
    }

    /// A write or flush failed: ends the segment's use for good. The first reason stays.
    pub(crate) fn break_off(&self, reason: Reason) {
        self.tail.borrow_mut().broken.get_or_insert(reason);
        self.state.set(SegmentState::Suspect);
        self.changed.wake_all();
        self.flushed.wake_up_to(u64::MAX);
    }

    /// Why the segment is broken, if it is.
    pub(crate) fn broken(&self) -> Option<Reason> {
        self.tail.borrow().broken.clone()
    }

    /// Whether no write and no flush is under way.
    pub(crate) fn is_quiet(&self) -> bool {
        let tail = self.tail.borrow();
        tail.in_flight.is_empty() && !tail.flushing
    }

    /// Completes when no write is under way.
    pub(crate) async fn quiet(&self) {
        self.changed.until(|| self.tail.borrow().in_flight.is_empty().then_some(())).await;
    }

    /// Makes what lies below `end` in this segment durable if it is not yet.
    pub(crate) async fn settle(&self, driver: &Driver, end: u64) -> Result<(), Reason> {
        let done = matches!(self.state.get(), SegmentState::Sealed | SegmentState::Free);
        if done || kvarts_layout::planted!("relaxed-called-durable") {
            return Ok(());
        }
        // The segment may have been recycled since `end` was looked up: then it is no end of this one.
        let end = end.min(self.tail.borrow().next);
        self.durable(driver, end).await
    }

    /// Group commit: completes when everything below `end` is durable, or with why it never will be.
    ///
    /// A put that finds no flush under way leads one for all puts whose record has been written by then, so
    /// concurrent puts share flushes and the writes of the next group overlap the flush of this one.
    pub(crate) async fn durable(&self, driver: &Driver, end: u64) -> Result<(), Reason> {
        loop {
            // What was durable before the segment broke stays so.
            let lead = |tail: &mut Tail| match &tail.broken {
                _ if tail.durable_upto >= end || kvarts_layout::planted!("ack-before-flush") => {
                    Some(Ok(None))
                }
                Some(reason) => Some(Err(reason.clone())),
                None if !tail.flushing && tail.written_upto() >= end => {
                    tail.flushing = true;
                    Some(Ok(Some(tail.written_upto())))
                }
                None => None,
            };
            let Some(target) = self.flushed.until(end, || lead(&mut self.tail.borrow_mut())).await? else {
                return Ok(());
            };
            let wrong =
                kvarts_layout::planted!("flush-of-another-file").then(|| FileId(self.file.0.wrapping_sub(1)));
            let flushed = driver.flush(wrong.unwrap_or(self.file)).await;
            let again = flushed.is_err() && kvarts_layout::planted!("failed-flush-repeated");
            let flushed = if again { driver.flush(self.file).await } else { flushed };
            let mut tail = self.tail.borrow_mut();
            tail.flushing = false;
            match flushed {
                Ok(()) => {
                    tail.durable_upto = tail.durable_upto.max(target);
                    self.header_is_durable();
                }
                Err(error) => {
                    drop(tail);
                    self.break_off(fault(&error));
                    continue;
                }
            }
            drop(tail);
            self.wake_written();
        }
    }
}

/// Where a record lies, for as long as its segment is of this generation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct RecordPlace {
    pub(crate) segment: u32,
    pub(crate) generation: u64,
    pub(crate) offset: u64,
}

/// Returns what a segment's readers hold when dropped.
#[derive(Debug)]
pub(crate) struct Hold(Rc<Segment>);

impl Hold {
    pub(crate) fn new(segment: &Rc<Segment>) -> Self {
        segment.readers.set(segment.readers.get() + 1);
        Self(Rc::clone(segment))
    }

    /// What is held.
    pub(crate) fn segment(&self) -> &Rc<Segment> {
        &self.0
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.readers.set(self.0.readers.get() - 1);
    }
}
