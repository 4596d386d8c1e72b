//! A shard's log: appending records, filling segments, sealing them.
//!
//! A record is given a place, encoded for that place, written together with the definitions it needs, and then
//! made durable if asked. All of it is one pass: the offset is known before the first byte is written, and the
//! caller's memory is written from where it lies wherever its alignment allows.
//!
//! What a crash may leave: any subset of the sectors of records that were not yet flushed, in any segment that has
//! no footer. Each record proves itself (header tag, payload digests), so recovery adopts the whole ones.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU16;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use kvarts_layout::arrange::RunLayout;
use kvarts_layout::format::footer::{self, Content, Defined, Entry, Footer};
use kvarts_layout::format::record::{self, Body, Fields};
use kvarts_layout::format::segment::SegmentHeader;
use kvarts_layout::format::trailer::{self, SealReason, Trailer};
use kvarts_layout::format::{self, PAGE, PAGE_BYTES, Position, page_align};
use kvarts_layout::plan::{WritePlan, WriteSource};

use crate::api::{Placed, Turns};
use crate::engine::compact::cold::Place;
use crate::engine::read::decode::Decoder;
use crate::engine::read::header_cache::HeaderCache;
use crate::engine::read::shard_read::Hold;
use crate::engine::read::single_flight::SingleFlight;
use crate::engine::shared::Shared;
use crate::engine::shared::names::Namespace;
use crate::engine::space::trouble::Detours;
use crate::engine::tasks::notify::{Notify, Turn};
use crate::engine::tasks::write_barrier::WriteBarrier;
use crate::engine::volume::checkpoint::Slots;
use crate::engine::volume::segment::{Segment, SegmentState, fault, record_bytes};
use crate::engine::volume::tombstones::TombstoneSet;
use crate::error::Reason;
use crate::index::RecordInfo;
use crate::io::policy::{Action, Stage, decide};
use crate::io::{Arena, Buf, BufMut, DirId, Driver, IoError, Name};
use crate::rt::{Class, Nanos};

/// The most buffers of one vectored write: what the kernel takes at once.
const VECTOR_MAX: usize = 1000;
/// A payload up to this size is copied behind its header and written with it: that costs less than another
/// operation.
const COPY_BYTES_MAX: u64 = 64 << 10;
/// How often a write is tried again that failed for something which passes, and how long to wait before the first of these
/// tries; each waits four times as long as the one before: half a second in all.
const PAUSES: u32 = 4;
const PAUSE: Duration = Duration::from_millis(5);
/// Bytes that a footer needs for a record at most, besides its blocks and extensions.
const FOOTER_RECORD_BYTES: u64 = 256;
/// Bytes that a footer needs for a block.
const FOOTER_BLOCK_BYTES: u64 = 48;

/// The bytes of a record's blocks, where they lie now.
pub(crate) enum Payload<'a> {
    /// In memory of a caller.
    Placed {
        layout: Arc<RunLayout>,
        from: &'a Placed,
        /// Ordinal of the record's first block in the placement.
        ordinal: u32,
    },
    /// Put together already, as they will lie on disk.
    Image {
        /// Bytes of the payload; `pages` pads them with zeros.
        bytes: u64,
        pages: Buf,
        /// Asked at the moment at which the record gets its place and sequence: whether it is still wanted as it is.
        still: &'a dyn Fn() -> bool,
    },
    /// On disk already, behind the place of the header.
    There(Arc<RunLayout>),
}

impl Payload<'_> {
    /// Without padding.
    fn bytes(&self) -> u64 {
        match self {
            Self::Placed { layout, .. } | Self::There(layout) => layout.payload_bytes(),
            Self::Image { bytes, .. } => *bytes,
        }
    }

    /// With padding.
    fn image_bytes(&self) -> u64 {
        match self {
            Self::Placed { layout, .. } | Self::There(layout) => layout.image_bytes(),
            Self::Image { pages, .. } => pages.len() as u64,
        }
    }
}

impl std::fmt::Debug for Payload<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Payload({} bytes)", self.bytes())
    }
}

/// A record that is to be written.
#[derive(Debug)]
pub(crate) struct Draft<'a> {
    /// What must be defined in the segment before the record.
    pub(crate) namespace: Option<&'a Namespace>,
    pub(crate) body: Body,
    pub(crate) digests: &'a [u32],
    pub(crate) payload: Option<Payload<'a>>,
}

/// Where a record went.
#[derive(Clone, Debug)]
pub(crate) struct Written {
    pub(crate) segment: Rc<Segment>,
    pub(crate) offset: u64,
    pub(crate) header_bytes: u32,
    pub(crate) payload_bytes: u64,
    /// Where the next record begins: durable once everything below is.
    pub(crate) end: u64,
    /// Until the record is visible, or given up, its segment is not written anew: reclaim would not find it.
    _hold: Rc<Hold>,
}

impl Written {
    /// What the index is told of a record of so many blocks.
    pub(crate) fn info(
        &self,
        shard: u32,
        blocks: usize,
        class: u32,
        expires: u32,
    ) -> Result<RecordInfo, Reason> {
        let too_large = || Reason::Bug("a record past the limits of the index");
        Ok(RecordInfo {
            shard: u16::try_from(shard).map_err(|_| too_large())?,
            segment: self.segment.number,
            page: u32::try_from(self.offset / PAGE_BYTES).map_err(|_| too_large())?,
            header_pages: u16::try_from(u64::from(self.header_bytes) / PAGE_BYTES)
                .map_err(|_| too_large())?,
            payload_pages: u32::try_from(self.payload_bytes.div_ceil(PAGE_BYTES)).map_err(|_| too_large())?,
            blocks: u16::try_from(blocks).ok().and_then(NonZeroU16::new).ok_or_else(too_large)?,
            live: 0,
            class,
            expires,
        })
    }
}

/// What a segment has left, its footer included.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub(crate) bytes: u64,
    footer_bytes: u64,
}

impl Room {
    /// Whether a record of so many bytes and blocks fits.
    pub(crate) fn takes(&self, bytes: u64, blocks: u32) -> bool {
        let share = FOOTER_RECORD_BYTES + u64::from(blocks) * FOOTER_BLOCK_BYTES;
        let footer = page_align(self.footer_bytes + share + PAGE_BYTES).unwrap_or(u64::MAX);
        bytes.saturating_add(footer) <= self.bytes
    }
}

/// The log of one shard.
pub(crate) struct Log {
    pub(crate) shard: u32,
    pub(crate) dir: DirId,
    pub(crate) shared: Arc<Shared>,
    pub(crate) driver: Rc<Driver>,
    pub(crate) arena: Arena,
    pub(crate) segments: RefCell<BTreeMap<u32, Rc<Segment>>>,
    /// The last generation of each segment whose file is gone.
    pub(crate) retired: RefCell<BTreeMap<u32, u64>>,
    /// What the last checkpoint said of each segment that was in use and whose file is gone.
    pub(crate) lost: RefCell<BTreeMap<u32, kvarts_layout::format::checkpoint::SegmentState>>,
    /// Bytes of the budget that files have which could not be made, and not be removed.
    pub(crate) residue: Cell<u64>,
    /// Proved headers, for reads.
    pub(crate) headers: HeaderCache,
    /// Reads that others may share.
    pub(crate) flights: SingleFlight,
    /// Encodes and decodes chunks.
    pub(crate) unpacker: Decoder,
    /// Raw records that encoding would not make smaller.
    pub(crate) unpaying: RefCell<BTreeSet<Place>>,
    /// When segments, of which generation, were looked at for what is cold.
    pub(crate) looked_at: RefCell<BTreeMap<u32, (u64, Nanos)>>,
    open: RefCell<Option<Rc<Segment>>>,
    /// Open segments without a record that puts by layers have left: the next of them, or the next roll, takes one.
    pub(crate) parked: RefCell<Vec<Rc<Segment>>>,
    /// Puts by layers under way, by what they wait for. Each has a segment of its own.
    pub(crate) layered: RefCell<Vec<Turns>>,
    /// In which segment a write or flush failed last, until the device was seen to take writes again.
    pub(crate) trouble: RefCell<Option<Rc<Segment>>>,
    /// How often it was not, and writes went elsewhere.
    pub(crate) detours: Cell<Detours>,
    /// A task is getting the next segment; others wait.
    pub(crate) rolling: Cell<bool>,
    /// Segments are being given back.
    pub(crate) shrinking: Cell<bool>,
    /// The file system makes no holes: segments are emptied as a whole.
    pub(crate) no_holes: Cell<bool>,
    /// It was seen to make holes of single pages.
    pub(crate) has_holes: Cell<bool>,
    /// It is being asked.
    pub(crate) probing: Turn,
    /// How many segments had been recycled when hollow ones were removed last.
    pub(crate) hollow_removed_at: Cell<u64>,
    /// The last blocks of thin segments are being moved.
    pub(crate) thinning: Cell<bool>,
    /// Nothing is begun in the background any more.
    pub(crate) closing: Cell<bool>,
    /// Bytes of records that were put here, and that were moved out of thin segments.
    pub(crate) put_bytes: Cell<u64>,
    pub(crate) thin_bytes: Cell<u64>,
    /// Segments whose seal has not ended.
    sealing: Cell<u32>,
    pub(crate) sequence: Cell<u64>,
    /// What was deleted, for as long as its records may lie on disk.
    pub(crate) graves: RefCell<TombstoneSet>,
    /// Writes under way, for which deletes wait.
    pub(crate) writes: Rc<WriteBarrier>,
    pub(crate) checkpoints: Slots,
    /// Blocks are being moved: one move at a time bounds the memory that moves take.
    pub(crate) moving: Turn,
    pub(crate) changed: Notify,
    spawn: Box<dyn Fn(crate::rt::LocalTask)>,
}

/// A record's images in the order in which they are written, at its place.
pub(crate) struct Image {
    segment: Rc<Segment>,
    /// Where the headers begin, those of definitions that come with it included.
    pub(crate) offset: u64,
    pub(crate) headers: Vec<u8>,
    pub(crate) written: Written,
}

/// What a record would be at a place.
pub(crate) struct Sheet {
    pub(crate) headers: Vec<u8>,
    entries: Vec<Entry>,
    /// Where the record's own header begins.
    offset: u64,
    header_bytes: u32,
    payload_bytes: u64,
    /// Headers and payload.
    pub(crate) len: u64,
    pub(crate) footer_bytes: u64,
    /// The sequence after its own.
    next_sequence: u64,
}

impl Log {
    /// The log over segments that recovery found; `sequence` is the next to be given out.
    pub(crate) fn new(
        (shard, dir): (u32, DirId),
        shared: Arc<Shared>,
        (driver, arena): (Rc<Driver>, Arena),
        spawn: Box<dyn Fn(crate::rt::LocalTask)>,
    ) -> Self {
        Self {
            shard,
            dir,
            shared,
            driver,
            arena,
            segments: RefCell::default(),
            retired: RefCell::default(),
            lost: RefCell::default(),
            residue: Cell::new(0),
            headers: HeaderCache::default(),
            flights: SingleFlight::default(),
            unpacker: Decoder::default(),
            unpaying: RefCell::default(),
            looked_at: RefCell::default(),
            open: RefCell::default(),
            parked: RefCell::default(),
            layered: RefCell::default(),
            trouble: RefCell::default(),
            detours: Cell::default(),
            rolling: Cell::new(false),
            shrinking: Cell::new(false),
            no_holes: Cell::new(false),
            has_holes: Cell::new(false),
            probing: Turn::default(),
            hollow_removed_at: Cell::new(0),
            thinning: Cell::new(false),
            closing: Cell::new(false),
            put_bytes: Cell::new(0),
            thin_bytes: Cell::new(0),
            sealing: Cell::new(0),
            sequence: Cell::new(1),
            graves: RefCell::default(),
            writes: Rc::default(),
            checkpoints: Slots::default(),
            moving: Turn::default(),
            changed: Notify::default(),
            spawn,
        }
    }

    /// The position of an offset in a segment.
    pub(crate) fn position(&self, segment: &Segment, offset: u64) -> Position {
        Position {
            store: self.shared.store,
            shard: self.shard,
            segment: segment.number,
            generation: segment.generation.get(),
            offset,
        }
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
                Action::LatchReadOnly => return Err(self.shared.latch(&error)),
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
        self.note_trouble(segment);
    }

    fn note_trouble(&self, segment: &Rc<Segment>) {
        if segment.broken().is_some_and(|reason| reason != Reason::NoSpace) {
            *self.trouble.borrow_mut() = Some(Rc::clone(segment));
        }
    }

    /// Makes a written record durable.
    pub(crate) async fn make_durable(&self, written: &Written) -> Result<(), Reason> {
        let flushed = written.segment.durable(&self.driver, written.end).await;
        if flushed.is_err() {
            self.abandon(&written.segment);
            self.note_trouble(&written.segment);
        } else {
            self.wrote_well();
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
            if let Some(reason) = self.shared.latched() {
                return Err(reason);
            }
            let open = self.open.borrow().as_ref().map(Rc::clone);
            if let Some(segment) = &open {
                if let Some(sheet) = self.fitting(segment, draft)? {
                    let bytes = sheet.headers.len() + payload as usize;
                    let staging = match memory.take().and_then(|memory| memory.first(bytes)) {
                        Some(staging) => Some(staging),
                        None => self.arena.try_take(bytes),
                    };
                    if let Some(staging) = staging {
                        return Ok((self.take_place(segment, draft, sheet), staging));
                    }
                    // Whatever the segment is by then.
                    let no_memory = |_| Reason::Busy("there is no memory to write from");
                    (memory, fresh) = (Some(self.stage(bytes).await.map_err(no_memory)?), false);
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

    /// The record's image at the end of `segment`, or `None` if it does not fit. Nothing is awaited in here, so
    /// records get their places, sequences and positions in one order.
    pub(crate) fn try_place(
        &self,
        segment: &Rc<Segment>,
        draft: &Draft<'_>,
    ) -> Result<Option<Image>, Reason> {
        Ok(self.fitting(segment, draft)?.map(|sheet| self.take_place(segment, draft, sheet)))
    }

    /// What the record would be at the end of `segment`, if it fits.
    fn fitting(&self, segment: &Segment, draft: &Draft<'_>) -> Result<Option<Sheet>, Reason> {
        if let Some(Payload::Image { still, .. }) = &draft.payload
            && !still()
        {
            return Err(Reason::Busy("what was to be moved has left meanwhile"));
        }
        let start = segment.tail.borrow().next;
        let sheet = self.sheet(segment, draft, start, true)?;
        Ok(self.fits(segment, sheet.len, sheet.footer_bytes).then_some(sheet))
    }

    /// Gives the record the place that its sheet is for. Nothing was awaited since that was made.
    fn take_place(&self, segment: &Rc<Segment>, draft: &Draft<'_>, sheet: Sheet) -> Image {
        let start = segment.tail.borrow().next;
        let Sheet { headers, mut entries, offset, header_bytes, payload_bytes, len, .. } = sheet;
        let mut tail = segment.tail.borrow_mut();
        tail.footer_bytes += sheet.footer_bytes;
        for entry in &entries {
            match &entry.content {
                Content::Spec(defined) => tail.defined.insert((true, defined.local)),
                Content::Identity(defined) => tail.defined.insert((false, defined.local)),
                _ => false,
            };
        }
        let records = record_bytes(&entries);
        segment.book.append(len, records);
        self.shared.admission.spend(len);
        if matches!(draft.payload, Some(Payload::Placed { .. } | Payload::There(_))) {
            self.put_bytes.set(self.put_bytes.get() + records);
            self.shared.wrote(records);
        }
        tail.entries.append(&mut entries);
        let given = tail.give_out(len);
        debug_assert_eq!(given, start);
        self.sequence.set(sheet.next_sequence);
        let segment = Rc::clone(segment);
        let end = start + len;
        let _hold = Rc::new(Hold::new(&segment));
        let written =
            Written { segment: Rc::clone(&segment), offset, header_bytes, payload_bytes, end, _hold };
        Image { segment, offset: start, headers, written }
    }

    /// What the record would be at `start`. With `define`, what the segment has not defined comes before it.
    pub(crate) fn sheet(
        &self,
        segment: &Segment,
        draft: &Draft<'_>,
        start: u64,
        define: bool,
    ) -> Result<Sheet, Reason> {
        let mut headers = Vec::new();
        let mut entries = Vec::new();
        let mut sequence = self.sequence.get();
        if let Some(namespace) = draft.namespace.filter(|_| define) {
            let tail = segment.tail.borrow();
            let [spec, identity] = namespace.definitions();
            for (is_spec, definition) in [(true, spec), (false, identity)] {
                if tail.defined.contains(&(is_spec, definition.local)) {
                    continue;
                }
                let body = if is_spec { Body::Spec(definition) } else { Body::Identity(definition) };
                let offset = start + headers.len() as u64;
                let header = self.encode(segment, offset, sequence, &body, &[], 0)?;
                entries.push(entry(offset, sequence, header.len(), 0, &body));
                headers.extend_from_slice(&header);
                sequence += 1;
            }
        }
        let payload_bytes = draft.payload.as_ref().map_or(0, Payload::bytes);
        let offset = start + headers.len() as u64;
        let header = self.encode(segment, offset, sequence, &draft.body, draft.digests, payload_bytes)?;
        entries.push(entry(offset, sequence, header.len(), payload_bytes, &draft.body));
        let header_bytes =
            u32::try_from(header.len()).map_err(|_| Reason::TooMany("blocks in one record"))?;
        headers.extend_from_slice(&header);
        let image_bytes = page_align(payload_bytes).ok_or(Reason::TooMany("bytes in one record"))?;
        let len = headers.len() as u64 + image_bytes;
        let footer_bytes: u64 = entries.iter().map(footer_share).sum();
        let next_sequence = sequence + 1;
        Ok(Sheet { headers, entries, offset, header_bytes, payload_bytes, len, footer_bytes, next_sequence })
    }

    fn encode(
        &self,
        segment: &Segment,
        offset: u64,
        sequence: u64,
        body: &Body,
        digests: &[u32],
        payload_bytes: u64,
    ) -> Result<Vec<u8>, Reason> {
        let durable_upto = segment.tail.borrow().durable_upto;
        let fields = Fields { sequence, durable_upto, payload_bytes };
        record::encode(&self.position(segment, offset), &self.shared.secret, &fields, body, digests)
            .map_err(|error| Reason::Shape(error.to_string()))
    }

    /// Whether `len` more bytes leave room for the footer and the trailer.
    pub(crate) fn fits(&self, segment: &Segment, len: u64, footer_bytes: u64) -> bool {
        let tail = segment.tail.borrow();
        let footer = page_align(tail.footer_bytes + footer_bytes + PAGE_BYTES).unwrap_or(u64::MAX);
        let end = tail.next.saturating_add(len).saturating_add(footer).saturating_add(PAGE_BYTES);
        end <= self.shared.segment_bytes
            && tail.footer_bytes + footer_bytes + PAGE_BYTES <= format::MAX_FOOTER_BYTES as u64
            && segment.state.get() == SegmentState::Open
    }

    /// What the open segment has left for a record of this namespace; `None` without a segment, or with one in which
    /// nothing of the namespace lies yet: what it must define first is small, and so is what is lost by not asking.
    pub(crate) fn room(&self, namespace: &Namespace) -> Option<Room> {
        let open = self.open.borrow();
        let segment = open.as_ref().filter(|segment| segment.state.get() == SegmentState::Open)?;
        let tail = segment.tail.borrow();
        let [spec, identity] = namespace.definitions();
        if !tail.defined.contains(&(true, spec.local)) || !tail.defined.contains(&(false, identity.local)) {
            return None;
        }
        let bytes = self.shared.segment_bytes.saturating_sub(tail.next + PAGE_BYTES);
        Some(Room { bytes, footer_bytes: tail.footer_bytes })
    }

    /// Whether records of so many bytes find room in the open segment.
    pub(crate) fn takes(&self, bytes: u64) -> bool {
        let open = self.open.borrow();
        // A footer lists each block, each header has a page of its own: an eighth is more than either takes.
        open.as_ref().is_some_and(|segment| self.fits(segment, bytes + bytes / 8, bytes / 8))
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
            self.driver.pause(pause).await;
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
                let header = self.driver.write(class, file, image.offset, staging, false);
                let payload = match (pieces.len(), pieces.pop()) {
                    (1, Some(only)) => self.driver.write(class, file, at, only, false),
                    (_, last) => {
                        pieces.extend(last);
                        self.driver.write_v(class, file, at, pieces, false)
                    }
                };
                // Both must have ended before the place may be called written, or given up.
                let (header, payload) = (header.await, payload.await);
                header.and(payload)?;
            }
            None => self.driver.write(class, file, image.offset, staging, false).await?,
        }
        Ok(())
    }

    /// Memory to read into or to write from, as soon as there is some.
    pub(crate) async fn stage(&self, bytes: usize) -> Result<BufMut, IoError> {
        match self.arena.take(bytes).await {
            Some(buf) => Ok(buf),
            // Larger than the arena: rare enough for memory of its own.
            None => BufMut::zeroed(bytes).map_err(|_| IoError::out_of_memory(bytes)),
        }
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
            WriteSource::Zeros => self.shared.zeros(piece.len),
        })
        .collect()
    }

    /// The directory of the shard's files.
    pub(crate) fn home(&self) -> Name {
        Name { dir: self.dir, path: format::names::shard_name(self.shard).into() }
    }

    /// A file of the shard.
    pub(crate) fn file_name(&self, name: &str) -> Name {
        let home = format::names::shard_name(self.shard);
        Name { dir: self.dir, path: format!("{home}/{name}").into() }
    }

    /// Replaces the open segment `full` by another; true if one was opened by this call. One task does it; the
    /// others wait and look again.
    async fn roll(self: &Rc<Self>, full: Option<Rc<Segment>>) -> Result<bool, Reason> {
        if self.rolling.get() {
            self.changed.until(|| (!self.rolling.get()).then_some(())).await;
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
        self.rolling.set(true);
        let mut opened = self.open_next().await;
        if let Some(full) = full
            && matches!(opened, Ok(()) | Err(Reason::NoSpace))
        {
            self.abandon(&full);
            self.seal_in_background(full);
            if opened.is_err() {
                // It may be all that the shard has: sealed, it can be emptied like any other.
                self.changed.until(|| (self.sealing.get() == 0).then_some(())).await;
                opened = self.open_next().await;
            }
        }
        self.rolling.set(false);
        self.changed.wake_all();
        opened.map(|()| true)
    }

    /// Opens a segment that holds nothing.
    async fn open_next(self: &Rc<Self>) -> Result<(), Reason> {
        let parked = self.parked.borrow_mut().pop();
        let next = match parked {
            Some(segment) => segment,
            None => self.begin_segment().await?,
        };
        next.first_sequence.set(self.sequence.get());
        *self.open.borrow_mut() = Some(next);
        Ok(())
    }

    /// Appends to this segment from now on; the one before it is sealed. Nobody may be looking for the next one.
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
        let segment = self.next_segment().await?;
        // Before it is begun: without memory for its header it stays as it is.
        let mut staging = self.stage(PAGE).await.map_err(|error| fault(&error))?;
        segment.begin(self.sequence.get());
        segment.note_cold(self.shared.ages.steps() as i64);
        self.forget_segment(segment.number);
        // Begun, it is no spare one any more. What is moved is appended, so it must not be waited for here.
        self.thin_out_in_background();
        staging.copy_in(0, &self.header_image(&segment)?);
        if segment.generation.get() > 1 && !kvarts_layout::planted!("recycled-header-late") {
            let written = self.driver.write(Class::Put, segment.file, 0, staging, true).await;
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
                        Action::LatchReadOnly => Err(self.shared.latch(&error)),
                        _ => Err(fault(&error)),
                    }
                }
            };
        }
        let (log, writing) = (Rc::clone(self), Rc::clone(&segment));
        (self.spawn)(Box::pin(async move {
            if let Err(error) = log.driver.write(Class::Put, writing.file, 0, staging, false).await {
                log.give_up(&writing, &error);
            }
            writing.wrote(0);
        }));
        Ok(segment)
    }

    /// The header of a segment as it is now.
    pub(crate) fn header_image(&self, segment: &Segment) -> Result<Vec<u8>, Reason> {
        let header = SegmentHeader {
            position: self.position(segment, 0),
            secret: self.shared.secret.clone(),
            created_ms: self.shared.clock.unix_millis(),
            segment_bytes: self.shared.segment_bytes,
            first_sequence: segment.first_sequence.get(),
        };
        header.encode().map_err(|_| Reason::Bug("a segment header that cannot be encoded"))
    }

    fn seal_in_background(self: &Rc<Self>, segment: Rc<Segment>) {
        segment.state.set(SegmentState::Sealing);
        self.sealing.set(self.sealing.get() + 1);
        let log = Rc::clone(self);
        (self.spawn)(Box::pin(async move {
            // A segment that could not be sealed is scanned by recovery: nothing is lost by it.
            if let Err(reason) = log.seal(&segment, SealReason::Normal).await {
                segment.break_off(reason);
            }
            log.sealing.set(log.sealing.get() - 1);
            log.changed.wake_all();
        }));
    }

    /// Writes the footer and the trailer, durably. Everything they list is durable before they are written.
    pub(crate) async fn seal(&self, segment: &Rc<Segment>, reason: SealReason) -> Result<(), Reason> {
        segment.quiet().await;
        let end = segment.tail.borrow().next;
        if !kvarts_layout::planted!("seal-before-flush") {
            segment.durable(&self.driver, end).await?;
        }
        // Listed in memory until the footer can be read.
        let listed = Footer { records: segment.tail.borrow().entries.clone() };
        let (footer, trailer) = self.seal_images(segment, &listed, end, reason)?;
        let footer_at = (self.shared.segment_bytes - PAGE_BYTES - footer.len() as u64, footer.len() as u32);
        // The footer is durable before the trailer that names it: a trailer without its footer is always damage.
        let trailer_at = self.shared.segment_bytes - PAGE_BYTES;
        let mut images = [(trailer_at - footer.len() as u64, footer), (trailer_at, trailer)];
        if kvarts_layout::planted!("trailer-before-footer") {
            images.reverse();
        }
        for (at, image) in images {
            let fault = |error: IoError| fault(&error);
            let mut staging = self.stage(image.len()).await.map_err(fault)?;
            staging.copy_in(0, &image);
            self.driver.write(Class::Background, segment.file, at, staging, true).await.map_err(fault)?;
        }
        segment.tail.borrow_mut().entries = Vec::new();
        segment.sealed_at(end, footer_at, reason);
        // One that is full lacks less than a record: it keeps that, and is written anew as it is.
        if self.closing.get() || reason == SealReason::Recovery {
            self.give_rest_back(segment, &listed.records).await;
        }
        segment.state.set(SegmentState::Sealed);
        Ok(())
    }

    /// The footer and the trailer, as they are written.
    fn seal_images(
        &self,
        segment: &Segment,
        footer: &Footer,
        log_end: u64,
        reason: SealReason,
    ) -> Result<(Vec<u8>, Vec<u8>), Reason> {
        let bug = |_| Reason::Bug("a footer that cannot be encoded");
        let secret = &self.shared.secret;
        let trailer_at = self.shared.segment_bytes - PAGE_BYTES;
        // The footer ends where the trailer begins, so its length must be known before its position.
        let probe = footer.encode(&self.position(segment, trailer_at), secret).map_err(bug)?;
        let footer_offset = trailer_at - probe.len() as u64;
        let image = footer.encode(&self.position(segment, footer_offset), secret).map_err(bug)?;
        let footer_bytes = u32::try_from(image.len()).map_err(|_| Reason::Bug("a footer of 4 GiB"))?;
        let sequence =
            |entry: Option<&Entry>| entry.map_or(segment.first_sequence.get(), |entry| entry.sequence);
        let trailer = Trailer {
            footer_offset,
            footer_tag: footer::tag_of(&image).ok_or(Reason::Bug("a footer without a tag"))?,
            footer_bytes,
            record_count: footer.records.len() as u32,
            first_sequence: sequence(footer.records.first()),
            last_sequence: sequence(footer.records.last()),
            log_end,
            reason,
        };
        let position = trailer::position(&self.position(segment, 0), self.shared.segment_bytes);
        let trailer = trailer.encode(&position, secret).map_err(bug)?;
        Ok((image, trailer))
    }

    /// Seals the open segment, so that the next open has no tail to scan. Nothing is appended afterwards.
    pub(crate) async fn finish(self: &Rc<Self>) {
        self.closing.set(true);
        self.layered.borrow().iter().for_each(Turns::nudge);
        self.changed.until(|| self.layered.borrow().is_empty().then_some(())).await;
        self.settled().await;
        let open = self.open.borrow_mut().take();
        if let Some(segment) = open {
            self.seal_in_background(segment);
            self.settled().await;
        }
    }

    /// Completes when no segment is being sealed, and none thinned out.
    pub(crate) async fn settled(&self) {
        let quiet = || self.sealing.get() == 0 && !self.rolling.get() && !self.thinning.get();
        self.changed.until(|| quiet().then_some(())).await;
    }

    /// Runs a task beside what else is done.
    pub(crate) fn spawn(&self, task: crate::rt::LocalTask) {
        (self.spawn)(task);
    }

    /// The segment that records are being appended to.
    #[cfg(test)]
    pub(crate) fn open_segment(&self) -> Option<Rc<Segment>> {
        self.open.borrow().as_ref().map(Rc::clone)
    }
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Log(shard {}, {} segments)", self.shard, self.segments.borrow().len())
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

/// An upper estimate of what a record adds to its segment's footer.
fn footer_share(entry: &Entry) -> u64 {
    let lists = match &entry.content {
        Content::Blocks(blocks) => {
            let extensions: u64 = blocks.extensions.iter().map(|one| 16 + one.bytes.len() as u64).sum();
            blocks.blocks.len() as u64 * FOOTER_BLOCK_BYTES
                + blocks.stored_lengths.len() as u64 * 4
                + extensions
        }
        Content::Tombstones(tombstones) => tombstones.entries.len() as u64 * 80,
        _ => 0,
    };
    FOOTER_RECORD_BYTES + lists
}
