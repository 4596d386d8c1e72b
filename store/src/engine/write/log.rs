//! A shard's log: appending records, filling segments, sealing them.
//!
//! A record is given a place, encoded for that place, written together with the definitions it needs, and then
//! made durable if asked. All of it is one pass: the offset is known before the first byte is written, and the
//! caller's memory is written from where it lies wherever its alignment allows.
//!
//! What a crash may leave: any subset of the sectors of records that were not yet flushed, in any segment that has
//! no footer. Each record proves itself (header tag, payload digests), so recovery adopts the whole ones.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use kvarts_layout::format::PAGE;
use kvarts_layout::plan::{WritePlan, WriteSource};

use super::draft::{Draft, Payload, Written};
use super::image::Image;
use crate::engine::space::Space;
use crate::engine::tasks::write_barrier::WriteBarrier;
use crate::engine::volume::Volume;
use crate::engine::volume::segment::{Segment, fault};
use crate::io::policy::{Action, Stage, decide};
use kvarts_contract::api::StepGate;
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;
use kvarts_contract::{
    buffers::{Buf, BufMut},
    io_error::IoError,
};

/// The most buffers of one vectored write: what the kernel takes at once.
const VECTOR_MAX: usize = 1000;
/// A payload up to this size is copied behind its header and written with it: that costs less than another
/// operation.
const COPY_BYTES_MAX: u64 = 64 << 10;
/// How often a write is tried again that failed for something which passes, and how long to wait before the first of these
/// tries; each waits four times as long as the one before: half a second in all.
const PAUSES: u32 = 4;
const PAUSE: Duration = Duration::from_millis(5);

/// The log of one shard: where records are appended, and segments rolled and sealed.
pub(crate) struct Log {
    pub(crate) volume: Rc<Volume>,
    /// Where its segments come from.
    pub(crate) space: Rc<Space>,
    pub(crate) open: RefCell<Option<Rc<Segment>>>,
    /// Puts by layers under way, by what they wait for. Each has a segment of its own.
    pub(crate) layered: RefCell<Vec<StepGate>>,
    /// The last blocks of thin segments are being moved.
    pub(crate) thinning: Cell<bool>,
    /// Nothing is begun in the background any more.
    pub(crate) closing: Cell<bool>,
    /// Bytes of records that were put here.
    pub(crate) put_bytes: Cell<u64>,
    /// Segments whose seal has not ended.
    pub(crate) sealing: Cell<u32>,
    /// Writes under way, for which deletes wait.
    pub(crate) writes: Rc<WriteBarrier>,
    /// Told of each segment that is begun.
    begun: OnceCell<Box<dyn Fn(u32)>>,
}

impl Log {
    /// The log of a shard, without an open segment.
    pub(crate) fn new(volume: Rc<Volume>, space: Rc<Space>) -> Self {
        Self {
            volume,
            space,
            open: RefCell::default(),
            layered: RefCell::default(),
            thinning: Cell::new(false),
            closing: Cell::new(false),
            put_bytes: Cell::new(0),
            sealing: Cell::new(0),
            writes: Rc::default(),
            begun: OnceCell::new(),
        }
    }

    /// From now on, tells of each segment that is begun, by its number. Once.
    pub(crate) fn tell_begun(&self, tell: impl Fn(u32) + 'static) {
        let _ = self.begun.set(Box::new(tell));
    }

    /// Writes a record and returns when its bytes have been written, not flushed. A segment that fails is left
    /// behind and the record is written once more elsewhere.
    pub(crate) async fn append(self: &Rc<Self>, class: Class, draft: &Draft<'_>) -> Result<Written, Reason> {
        let mut again = true;
        loop {
            let pieces = draft.payload.as_ref().and_then(|payload| self.vectored(payload));
            let (image, staging) = self.give_place(draft, pieces.is_none()).await?;
            let (segment, offset) = (Rc::clone(&image.segment), image.offset);
            let Err(error) = self.write(class, &image, draft, (pieces, staging)).await else {
                segment.wrote(offset);
                return Ok(image.written);
            };
            self.give_up(&segment, &error);
            segment.wrote(offset);
            match decide(&error, Stage::PutData) {
                Action::LatchReadOnly => return Err(self.volume.latch(&error)),
                Action::SealSuspect if again => again = false,
                _ => return Err(fault(&error)),
            }
        }
    }

    /// Nothing more is written to a segment in which something failed. What comes next looks first whether the device
    /// takes writes.
    pub(crate) fn give_up(&self, segment: &Rc<Segment>, error: &IoError) {
        segment.break_off(fault(error));
        self.abandon(segment);
        self.space.note_trouble(segment);
    }

    /// Makes a written record durable.
    pub(crate) async fn make_durable(&self, written: &Written) -> Result<(), Reason> {
        let flushed = written.segment.durable(&self.volume.driver, written.end).await;
        if flushed.is_err() {
            self.abandon(&written.segment);
            self.space.note_trouble(&written.segment);
        } else {
            self.space.wrote_well();
        }
        flushed
    }

    /// Lets go of a broken segment, so that the next record finds another.
    pub(crate) fn abandon(&self, segment: &Rc<Segment>) {
        let mut open = self.open.borrow_mut();
        if open.as_ref().is_some_and(|open| Rc::ptr_eq(open, segment)) {
            *open = None;
        }
    }

    /// Gives the record a place in the open segment, rolling to another where it does not fit, and encodes it
    /// for that place. The memory that it is written from, with its payload or without, comes first: what has a place and
    /// waits for memory would hold back everything behind it.
    async fn give_place(
        self: &Rc<Self>,
        draft: &Draft<'_>,
        with_payload: bool,
    ) -> Result<(Image, BufMut), Reason> {
        let payload = draft.payload.as_ref().filter(|_| with_payload).map_or(0, Payload::image_bytes);
        let (mut fresh, mut memory) = (false, None::<BufMut>);
        loop {
            if let Some(reason) = self.volume.refuses_writes() {
                return Err(reason);
            }
            let open = self.open.borrow().as_ref().map(Rc::clone);
            if let Some(segment) = &open {
                if let Some(sheet) = self.fitting(segment, draft)? {
                    let bytes = sheet.headers.len() + payload as usize;
                    let staging = match memory.take().and_then(|memory| memory.first(bytes)) {
                        Some(staging) => Some(staging),
                        None => self.volume.arena.try_take(bytes),
                    };
                    if let Some(staging) = staging {
                        return Ok((self.take_place(segment, draft, sheet), staging));
                    }
                    // Whatever the segment is by then.
                    let no_memory = |_| Reason::Busy("the executor has no free memory for the write");
                    (memory, fresh) = (Some(self.volume.stage(bytes).await.map_err(no_memory)?), false);
                    continue;
                }
                if fresh {
                    return Err(Reason::TooMany("bytes for one segment"));
                }
            }
            // What makes room needs memory, too.
            memory = None;
            fresh = self.roll(open).await?;
        }
    }

    /// Writes headers and payload at their place; for as long as what hinders it passes, again after a while.
    async fn write(
        &self,
        class: Class,
        image: &Image,
        draft: &Draft<'_>,
        (mut pieces, staging): (Option<Vec<Buf>>, BufMut),
    ) -> Result<(), IoError> {
        let lies = pieces.is_some();
        let staging = filled(image, draft.payload.as_ref().filter(|_| !lies), staging)?;
        let mut pause = PAUSE;
        for _ in 0..PAUSES {
            match self.write_once(class, image, (pieces, staging.clone())).await {
                Err(error) if decide(&error, Stage::PutData) == Action::NotNow => {}
                done => return done,
            }
            self.volume.driver.pause(pause).await;
            pause *= 4;
            pieces = draft.payload.as_ref().filter(|_| lies).and_then(|payload| self.vectored(payload));
            if lies && pieces.is_none() {
                return Err(IoError::unplaced(staging.len()));
            }
        }
        self.write_once(class, image, (pieces, staging)).await
    }

    /// The payload from the caller's memory if it is aligned and large, otherwise it is in what is staged.
    async fn write_once(
        &self,
        class: Class,
        image: &Image,
        (pieces, staging): (Option<Vec<Buf>>, Buf),
    ) -> Result<(), IoError> {
        let file = image.segment.file;
        match pieces {
            Some(mut pieces) => {
                // Two operations, because one over both memories could not use what is registered of either.
                let at = image.offset + image.headers.len() as u64;
                let header = self.volume.driver.write(class, file, image.offset, staging, false);
                let payload = match (pieces.len(), pieces.pop()) {
                    (1, Some(only)) => self.volume.driver.write(class, file, at, only, false),
                    (_, last) => {
                        pieces.extend(last);
                        self.volume.driver.write_v(class, file, at, pieces, false)
                    }
                };
                // Both must have ended before the place may be called written, or given up.
                let (header, payload) = (header.await, payload.await);
                header.and(payload)?;
            }
            None => self.volume.driver.write(class, file, image.offset, staging, false).await?,
        }
        Ok(())
    }

    /// The payload as buffers of the caller, if the device can take them as they lie.
    fn vectored(&self, payload: &Payload<'_>) -> Option<Vec<Buf>> {
        if payload.image_bytes() <= COPY_BYTES_MAX {
            return None;
        }
        let (layout, from, ordinal) = match payload {
            Payload::Placed { layout, from, ordinal } => (layout, from, *ordinal),
            Payload::Image { pages, .. } => return Some(vec![pages.clone()]),
            Payload::There(_) => return None,
        };
        let plan = WritePlan::new(layout, from.places(), ordinal).ok()?;
        let summary = plan.summary(PAGE as u32);
        if !summary.vectored || summary.pieces as usize > VECTOR_MAX || !from.is_page_aligned() {
            return None;
        }
        plan.map(|piece| match piece.source {
            WriteSource::Memory(address) => from.slice(address, piece.len).map(Buf::from),
            WriteSource::Zeros => self.volume.shared.zeros(piece.len),
        })
        .collect()
    }

    /// Replaces the open segment `full` by another; true if one was opened by this call. One task does it; the
    /// others wait and look again.
    async fn roll(self: &Rc<Self>, full: Option<Rc<Segment>>) -> Result<bool, Reason> {
        if self.space.rolling.get() {
            self.volume.changed.until(|| (!self.space.rolling.get()).then_some(())).await;
            return Ok(false);
        }
        let same = match (&*self.open.borrow(), &full) {
            (Some(open), Some(full)) => Rc::ptr_eq(open, full),
            (None, None) => true,
            _ => false,
        };
        if !same {
            return Ok(false);
        }
        self.space.rolling.set(true);
        let mut opened = self.open_next().await;
        if let Some(full) = full
            && matches!(opened, Ok(()) | Err(Reason::NoSpace(_)))
        {
            self.abandon(&full);
            self.seal_in_background(full);
            if opened.is_err() {
                // It may be all that the shard has: sealed, it can be emptied like any other.
                self.volume.changed.until(|| (self.sealing.get() == 0).then_some(())).await;
                opened = self.open_next().await;
            }
        }
        self.space.rolling.set(false);
        self.volume.changed.wake_all();
        opened.map(|()| true)
    }

    /// Opens a segment that holds nothing.
    async fn open_next(self: &Rc<Self>) -> Result<(), Reason> {
        let parked = self.space.parked.borrow_mut().pop();
        let next = match parked {
            Some(segment) => segment,
            None => self.begin_segment().await?,
        };
        next.first_sequence.set(self.volume.sequence.get());
        *self.open.borrow_mut() = Some(next);
        Ok(())
    }

    /// Appends to this segment from now on; the one before it is sealed. No task may be looking for the next one.
    pub(crate) fn append_to(self: &Rc<Self>, segment: &Rc<Segment>) {
        let before = self.open.borrow_mut().replace(Rc::clone(segment));
        if let Some(before) = before {
            self.seal_in_background(before);
        }
    }

    /// Begins a free segment, or a new file, and writes its header. In a new file records behind it may be written at
    /// once: a flush covers the header before it covers them, and without it they are found by their own tags. A
    /// recycled one has a sound footer of what it held: its header is durable first, or a crash could leave that
    /// footer in force over records that are overwritten. One task at a time calls it.
    pub(crate) async fn begin_segment(self: &Rc<Self>) -> Result<Rc<Segment>, Reason> {
        let segment = self.space.next_segment().await?;
        // Before it is begun: without memory for its header it stays as it is.
        let mut staging = self.volume.stage(PAGE).await.map_err(|error| fault(&error))?;
        segment.begin(self.volume.sequence.get());
        segment.note_cold(self.volume.shared.ages.steps() as i64);
        self.space.reads.headers.forget_segment(segment.number);
        // Begun, it is no spare one any more. What is moved is appended, so it must not be waited for here.
        if let Some(begun) = self.begun.get() {
            begun(segment.number);
        }
        staging.copy_in(0, &self.volume.header_image(&segment)?);
        if segment.generation.get() > 1 && !kvarts_layout::planted!("recycled-header-late") {
            let written = self.volume.driver.write(Class::Put, segment.file, 0, staging, true).await;
            segment.wrote(0);
            return match written {
                Ok(()) => {
                    segment.header_is_durable();
                    Ok(segment)
                }
                Err(error) => {
                    segment.misses.set(segment.misses.get() + 1);
                    self.give_up(&segment, &error);
                    match decide(&error, Stage::PutFlush) {
                        Action::LatchReadOnly => Err(self.volume.latch(&error)),
                        _ => Err(fault(&error)),
                    }
                }
            };
        }
        let (log, writing) = (Rc::clone(self), Rc::clone(&segment));
        self.volume.spawn(Box::pin(async move {
            if let Err(error) = log.volume.driver.write(Class::Put, writing.file, 0, staging, false).await {
                log.give_up(&writing, &error);
            }
            writing.wrote(0);
        }));
        Ok(segment)
    }

    /// Seals the open segment, so that the next open has no tail to scan. Nothing is appended afterwards.
    pub(crate) async fn finish(self: &Rc<Self>) {
        self.closing.set(true);
        self.layered.borrow().iter().for_each(StepGate::nudge);
        self.volume.changed.until(|| self.layered.borrow().is_empty().then_some(())).await;
        self.settled().await;
        let open = self.open.borrow_mut().take();
        if let Some(segment) = open {
            self.seal_in_background(segment);
            self.settled().await;
        }
    }

    /// Completes when no segment is being sealed, and none thinned out.
    pub(crate) async fn settled(&self) {
        let quiet = || self.sealing.get() == 0 && !self.space.rolling.get() && !self.thinning.get();
        self.volume.changed.until(|| quiet().then_some(())).await;
    }

    /// The segment that records are being appended to.
    #[cfg(test)]
    pub(crate) fn open_segment(&self) -> Option<Rc<Segment>> {
        self.open.borrow().as_ref().map(Rc::clone)
    }
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Log({:?})", self.volume)
    }
}

/// The headers, and behind them the payload if it is given, as they are to be written.
fn filled(image: &Image, payload: Option<&Payload<'_>>, mut staging: BufMut) -> Result<Buf, IoError> {
    staging.copy_in(0, &image.headers);
    let filled = payload.is_none_or(|payload| fill(&mut staging, image.headers.len(), payload).is_some());
    if filled { Ok(staging.freeze()) } else { Err(IoError::unplaced(staging.len())) }
}

/// Puts the payload together behind the headers, padding included; `None` if not all of it has a place in memory.
fn fill(staging: &mut BufMut, at: usize, payload: &Payload<'_>) -> Option<()> {
    let (layout, from, ordinal) = match payload {
        Payload::Placed { layout, from, ordinal } => (layout, from, *ordinal),
        Payload::Image { pages, .. } => {
            staging.copy_from(at, pages, 0, pages.len());
            return Some(());
        }
        Payload::There(_) => return Some(()),
    };
    for piece in WritePlan::new(layout, from.places(), ordinal).ok()? {
        from.fill(&piece, staging, at + piece.payload_offset as usize)?;
    }
    Some(())
}
