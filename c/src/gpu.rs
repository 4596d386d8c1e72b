//! Landing and saving.

use std::any::Any;
use std::ffi::c_char;
use std::sync::{Arc, Mutex, PoisonError};

use kvarts_contract::buffers::region::PAGE;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::error::{Error, Reason};
use kvarts_gpudirect::device;
use kvarts_gpudirect::device::name::{DeviceName, Opened};
use kvarts_gpudirect::device::slots::{Rows as SlotRows, SlotShape};
use kvarts_gpudirect::error::{DeviceError, LandError};
use kvarts_gpudirect::lander::{self, Done, Move};
use kvarts_gpudirect::pages::{self, PagePart};

use crate::blocks::Column;
use crate::memory::Memory;
use crate::pool::{Draft, Stage, Stretch};
use crate::said::{Status, call, free, given, hand_over, leave, milliseconds, perhaps, several, text, wrong};

fn of_device(error: DeviceError) -> Error {
    Error(Reason::Passing(format!("error of the device: {error}")))
}

fn raised(error: LandError) -> Error {
    match error {
        LandError::Store(reason) => Error(reason),
        LandError::Device(error) => of_device(error),
        other => wrong(other.to_string()),
    }
}

/// `kvarts_lander`.
pub(crate) struct Lander {
    lander: lander::Lander,
    opened: Opened,
    streams: Mutex<Vec<device::Stream>>,
}

impl Lander {
    fn stream(&self, handle: u64) -> Result<device::Stream, Error> {
        self.opened.device().adopt_stream(handle).map_err(of_device)
    }

    /// Memory of the device, or of this process where the device is an emulated one.
    fn memory(&self, span: &Span) -> Result<device::Memory, Error> {
        let Span { address, nbytes } = *span;
        let Opened::Emulated(emulated) = &self.opened else {
            return self.opened.device().adopt(address, nbytes).map_err(of_device);
        };
        let cannot = || {
            wrong(format!(
                "span of {nbytes} bytes at {address:#x}: the span is empty or not in the address space"
            ))
        };
        let (start, len) =
            (usize::try_from(address).map_err(|_| cannot())?, usize::try_from(nbytes).map_err(|_| cannot())?);
        let base = start / PAGE * PAGE;
        let end = start.checked_add(len).and_then(|end| end.checked_next_multiple_of(PAGE));
        let end = end.filter(|_| start > 0 && len > 0).ok_or_else(cannot)?;
        // SAFETY: the header: these bytes stay for as long as anything lands in them; a page of which some bytes are there is there whole,
        // and nothing touches the region but these bytes.
        let region =
            unsafe { Region::adopt(std::ptr::with_exposed_provenance_mut(base), end - base, Box::new(())) };
        let buf = SharedBuf::new(&region, start - base, len).ok_or_else(cannot)?;
        Ok(emulated.over(&buf))
    }
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_lander_open(
    device: *const c_char,
    ring_bytes: u64,
    timeout_ms: u64,
    lander: *mut *mut Lander,
) -> Status {
    call(|| {
        let name = text(device, "device")?
            .ok_or_else(|| wrong("device is null: the call requires a name, cuda:N or emulated"))?;
        let opened = name.parse::<DeviceName>().map_err(wrong)?.open().map_err(of_device)?;
        let ring_bytes = if ring_bytes == 0 { lander::RING_BYTES } else { ring_bytes };
        let made = lander::Lander::with_timeout(&opened.device(), ring_bytes, milliseconds(timeout_ms));
        let made = Lander { lander: made.map_err(raised)?, opened, streams: Mutex::default() };
        hand_over(lander, made, "lander")
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_lander_free(lander: *mut Lander) {
    free(lander);
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_lander_pin(lander: *const Lander, memory: *const Memory) -> Status {
    call(|| {
        let region = given(memory, "memory")?.region();
        given(lander, "lander")?.opened.device().pin(region).map_err(of_device)
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_lander_stream(lander: *const Lander, stream: *mut u64) -> Status {
    call(|| {
        let Lander { opened, streams, .. } = given(lander, "lander")?;
        let made = opened.device().stream().map_err(of_device)?;
        leave(stream, opened.handle_of(&made).map_err(of_device)?, "stream")?;
        streams.lock().unwrap_or_else(PoisonError::into_inner).push(made);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_lander_synchronize(lander: *const Lander, stream: u64) -> Status {
    call(|| {
        let lander = given(lander, "lander")?;
        device::drain(&*lander.opened.device(), &lander.stream(stream)?).map_err(of_device)
    })
}

/// `kvarts_span`.
#[repr(C)]
struct Span {
    address: u64,
    nbytes: u64,
}

/// `kvarts_rows`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Rows {
    count: u32,
    in_block: u64,
    in_page: u64,
}

impl From<Rows> for SlotRows {
    fn from(Rows { count, in_block, in_page }: Rows) -> Self {
        Self { count, ring: in_block, pool: in_page }
    }
}

/// `kvarts_part`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Part {
    memory: u32,
    first_in_block: u64,
    base: u64,
    stride: u64,
    outer: Rows,
    inner: Rows,
    row_bytes: u64,
}

/// `kvarts_pages`.
pub(crate) struct Pages {
    pages: pages::Pages,
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_pages_describe(
    lander: *const Lander,
    column: *const Column,
    spans: *const Span,
    span_count: usize,
    parts: *const Part,
    part_count: usize,
    slots: *const u32,
    slot_count: usize,
    per_block: u32,
    pages: *mut *mut Pages,
) -> Status {
    call(|| {
        let lander = given(lander, "lander")?;
        let (_, shape) = given(column, "column")?.find()?;
        let spans = several(spans, span_count, "spans")?;
        let memories = spans.iter().map(|span| lander.memory(span)).collect::<Result<Vec<_>, _>>()?;
        let chunks: Vec<u64> =
            shape.layers().iter().flat_map(|layer| &layer.chunks).map(|chunk| chunk.bytes).collect();
        let parts = several(parts, part_count, "parts")?;
        if parts.len() != chunks.len() {
            return Err(wrong(format!(
                "{} parts were given, but a block has {} parts",
                parts.len(),
                chunks.len()
            )));
        }
        let part = |(part, chunk): (&Part, u64)| PagePart {
            memory: part.memory,
            rows: SlotShape {
                ring_stride: chunk / u64::from(per_block.max(1)),
                ring_first: part.first_in_block,
                pool_base: part.base,
                pool_stride: part.stride,
                outer: part.outer.into(),
                inner: part.inner.into(),
                row_bytes: part.row_bytes,
            },
        };
        let parts = parts.iter().zip(chunks).map(part).collect();
        let slots = several(slots, slot_count, "slots")?.to_vec();
        let described = pages::Pages::new(&shape, memories, parts, per_block, slots).map_err(raised)?;
        hand_over(pages, Pages { pages: described }, "pages")
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_pages_free(pages: *mut Pages) {
    free(pages);
}

/// `kvarts_move`.
#[repr(C)]
struct OneMove {
    stretches: *const Stretch,
    count: usize,
    pages: *const Pages,
}

fn what(
    memory: *const Memory,
    (moves, count): (*const OneMove, usize),
    keeps: Box<dyn Any + Send>,
) -> Result<Move, Error> {
    let column = |one: &OneMove| {
        let stretches = several(one.stretches, one.count, "stretches")?;
        let stretches = stretches.iter().copied().map(Into::into).collect();
        Ok::<_, Error>(lander::Column { stretches, pages: given(one.pages, "pages")?.pages.clone() })
    };
    let columns = several(moves, count, "moves")?.iter().map(column).collect::<Result<Vec<_>, _>>()?;
    Ok(Move { pool: Arc::clone(given(memory, "memory")?.of_pool()?), columns, keeps })
}

/// `kvarts_landed`.
pub(crate) struct Landed {
    landed: lander::Landed,
    opened: Opened,
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_land(
    lander: *const Lander,
    memory: *const Memory,
    moves: *const OneMove,
    count: usize,
    after: *const u64,
    stage: *const Stage,
    landed: *mut *mut Landed,
) -> Status {
    call(|| {
        let lander = given(lander, "lander")?;
        let keeps = Box::new(perhaps(stage).map(|stage| Arc::clone(&stage.stage)));
        let what = what(memory, (moves, count), keeps)?;
        let after = perhaps(after).map(|handle| lander.stream(*handle)).transpose()?;
        let after = after.map(|stream| lander.opened.device().record(&stream)).transpose();
        let begun = lander.lander.land(what, after.map_err(of_device)?.as_ref()).map_err(raised)?;
        hand_over(landed, Landed { landed: begun, opened: lander.opened.clone() }, "landed")
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_landed_free(landed: *mut Landed) {
    free(landed);
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_landed_wait(landed: *const Landed, layer: u32, stream: u64) -> Status {
    call(|| {
        let Landed { landed, opened } = given(landed, "landed")?;
        let stream = opened.device().adopt_stream(stream).map_err(of_device)?;
        landed.wait(layer, &stream).map_err(raised)
    })
}

fn ended(done: &Done, timeout_ms: u64, is_done: *mut bool) -> Result<(), Error> {
    let outcome = done.wait(milliseconds(timeout_ms));
    let is_over = outcome.is_some();
    outcome.unwrap_or(Ok(())).map_err(of_device)?;
    leave(is_done, is_over, "is_done")
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_landed_done(landed: *const Landed, timeout_ms: u64, is_done: *mut bool) -> Status {
    call(|| ended(given(landed, "landed")?.landed.done(), timeout_ms, is_done))
}

/// `kvarts_saving`.
pub(crate) struct Saving {
    state: Mutex<SaveState>,
    opened: Opened,
}

enum SaveState {
    Leaves(Box<lander::Saving>),
    Left(Done),
    /// It could not be finished.
    Broken,
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_save(
    lander: *const Lander,
    memory: *const Memory,
    moves: *const OneMove,
    count: usize,
    draft: *const Draft,
    saving: *mut *mut Saving,
) -> Status {
    call(|| {
        let lander = given(lander, "lander")?;
        let keeps = Box::new(perhaps(draft).map(|draft| Arc::clone(&draft.draft)));
        let begun = lander.lander.save(what(memory, (moves, count), keeps)?).map_err(raised)?;
        let state = Mutex::new(SaveState::Leaves(Box::new(begun)));
        hand_over(saving, Saving { state, opened: lander.opened.clone() }, "saving")
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_saving_free(saving: *mut Saving) {
    free(saving);
}

fn no_more() -> Error {
    wrong("the save has already ended: begin a new save with kvarts_save")
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_saving_layer(saving: *const Saving, layer: u32, stream: u64) -> Status {
    call(|| {
        let Saving { state, opened } = given(saving, "saving")?;
        let device = opened.device();
        let stream = device.adopt_stream(stream).map_err(of_device)?;
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let SaveState::Leaves(saving) = &mut *state else { return Err(no_more()) };
        let left = saving.layer(layer, &stream).map_err(raised)?;
        device.wait(&stream, &left).map_err(of_device)
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_saving_finish(saving: *const Saving) -> Status {
    call(|| {
        let mut state = given(saving, "saving")?.state.lock().unwrap_or_else(PoisonError::into_inner);
        let SaveState::Leaves(saving) = std::mem::replace(&mut *state, SaveState::Broken) else {
            return Err(no_more());
        };
        *state = SaveState::Left(saving.finish().map_err(raised)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_saving_done(saving: *const Saving, timeout_ms: u64, is_done: *mut bool) -> Status {
    call(|| {
        let state = given(saving, "saving")?.state.lock().unwrap_or_else(PoisonError::into_inner);
        let done = match &*state {
            SaveState::Left(done) => done.clone(),
            SaveState::Leaves(_) => {
                return Err(wrong("the save has not ended: call kvarts_saving_finish first"));
            }
            SaveState::Broken => return Err(no_more()),
        };
        drop(state);
        ended(&done, timeout_ms, is_done)
    })
}
