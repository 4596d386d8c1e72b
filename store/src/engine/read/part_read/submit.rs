//! What a part of a read submits: slices are planned in the order of delivery, get memory, and go out extent by
//! extent.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::plan::{Address, Extent, Landing, Step};

use super::encoded::StoredPieces;
use super::{HeaderState, OUTSIDE, PartRead, QueuedExtent, RegionState, SliceRead};
use crate::engine::read::job::MemoryGuard;
use crate::engine::read::prove;
use crate::engine::tasks::notify::with_deadline;
use kvarts_contract::api::Order;
use kvarts_contract::buffers::{BufMut, SharedBuf};
use kvarts_contract::error::broken_invariant;

/// Bytes of later steps' extents that the parts of a read have under way, together, until the first step is in: the first layer
/// should not queue behind the tenth, nor behind those of parts that have less of it to read. Each part has its share, and one
/// extent if that is less: to count what all have under way would cost each extent a count that executors share.
const AHEAD_BYTES: u64 = 512 << 10;

/// Marks the extent of a record's header.
const HEADER: u64 = 1 << 63;

impl PartRead<'_> {
    /// Submits extents while the window has room.
    pub(super) async fn submit(&mut self, window: u64) {
        loop {
            let step = if self.queue.is_empty() { self.next.0 } else { self.queue_step };
            // What has come and was not looked at holds staging memory too, of which others want some.
            if self.in_flight >= self.room(step, window) || self.ended_bytes >= window {
                break;
            }
            if self.queue.is_empty() && !self.plan_next().await {
                break;
            }
            let Some(QueuedExtent { name, file_offset, len, into }) = self.queue.pop_front() else {
                continue;
            };
            let Some(record) = self.records.get(self.queue_record) else {
                broken_invariant("an extent belongs to a record that is not in its part of the read");
                break;
            };
            self.batch.push(name.0, record.segment.file, file_offset, into);
            self.under_way += 1;
            self.in_flight += len;
        }
        self.batch.submit();
    }

    /// How much may be under way for an extent of this step to go.
    fn room(&self, step: u32, window: u64) -> u64 {
        let ahead = || (AHEAD_BYTES / u64::from(self.job.parts.max(1))).max(1);
        if step == 0 || self.job.first_step_is_in() { window } else { window.min(ahead()) }
    }

    /// Plans the next slice of this part into the queue; false if there is none left, or if there is no staging memory
    /// while something is under way that will return some.
    async fn plan_next(&mut self) -> bool {
        if let Some(&at) = self.unsized_records.last() {
            // What it cannot have memory for now it asks for again when something has returned.
            return self.size_up(at).await;
        }
        loop {
            self.tally.step();
            self.section.spend(1).await;
            let Some((step, at)) = self.next_slice() else { return false };
            let Some(record) = self.records.get(at) else { return false };
            let slice = match self.job.request.order {
                Order::Layers => record.index,
                Order::Blocks => 0,
            };
            let header = match &record.header {
                HeaderState::Bad => {
                    self.job.slice_done(step);
                    self.advance();
                    continue;
                }
                HeaderState::Good(header) => Some(Rc::clone(header)),
                HeaderState::Unread | HeaderState::Reading(_) => None,
            };
            let encoded = self.is_encoded(at);
            let planned = match header {
                // It is on its way.
                None if encoded => return false,
                Some(header) if encoded => self.enqueue_encoded(step, at, &header).await,
                _ => {
                    let mut plan = self.spare.pop().unwrap_or_default();
                    self.job.plan.plan_slice(step, slice, &mut plan);
                    self.enqueue(step, at, plan, None).await
                }
            };
            if planned {
                self.advance();
            }
            return planned;
        }
    }

    /// The next slice of this part: its step, and the index of its record. In layer order each step has a slice of
    /// every record, in block order each record has steps of its own.
    pub(super) fn next_slice(&mut self) -> Option<(u32, usize)> {
        if let Some(agenda) = &self.agenda {
            self.next = *agenda.front()?;
            return Some(self.next);
        }
        let (step, at) = self.next;
        self.next = match self.job.request.order {
            Order::Layers if at < self.records.len() => (step, at),
            Order::Layers => (step + 1, 0),
            Order::Blocks => {
                let of = |at: usize| Some(self.job.plan.steps_of(self.records.get(at)?.index));
                let steps = of(at)?;
                if step < steps.end { (step.max(steps.start), at) } else { (of(at + 1)?.start, at + 1) }
            }
        };
        (self.next.0 < self.job.plan.steps()).then_some(self.next)
    }

    pub(super) fn advance(&mut self) {
        if let Some(agenda) = &mut self.agenda {
            agenda.pop_front();
            return;
        }
        let (step, at) = self.next;
        self.next = if self.job.request.order == Order::Blocks { (step + 1, at) } else { (step, at + 1) };
    }

    /// Finds memory for a slice and queues its extents, the header's first. All memory is taken in one piece, so
    /// that two reads never hold half of what each needs.
    pub(super) async fn enqueue(
        &mut self,
        step: u32,
        at: usize,
        plan: Step,
        stored: Option<StoredPieces>,
    ) -> bool {
        let header_bytes = self.missing_header(at);
        let staged_bytes = plan.staged_bytes();
        let Some(staging) = self.stage(header_bytes + staged_bytes).await else {
            self.spare.push(plan);
            return false;
        };
        if header_bytes > 0 {
            self.enqueue_header(at, staging.as_ref(), header_bytes);
        }
        let mut used = header_bytes as usize;
        let mut regions = self.spare_regions.pop().unwrap_or_default();
        regions.reserve(plan.regions().len());
        for region in plan.regions() {
            let staging = if region.landing.is_direct() {
                None
            } else {
                let len = region.bytes as usize;
                used += len;
                staging.as_ref().and_then(|staging| staging.slice(used - len, len))
            };
            regions.push(RegionState { staging, extents_left: 0 });
        }
        let (slot, queued) = (self.free_slot(), self.queue.len());
        (self.queue_record, self.queue_step) = (at, step);
        for extent in plan.extents() {
            let region = regions.get_mut(extent.region as usize);
            let landing = region.and_then(|region| {
                Some((self.landing(&extent, region.staging.as_ref())?, &mut region.extents_left))
            });
            let Some((into, left)) = landing else {
                self.queue.truncate(queued);
                self.free.push(slot);
                self.fail_slice(step, at);
                return true;
            };
            *left += 1;
            let name = ExtentName::of(slot, extent.region, extent.len);
            let (file_offset, len) = (extent.file_offset, u64::from(extent.len));
            self.queue.push_back(QueuedExtent { name, file_offset, len, into });
        }
        let regions_left = regions.len() as u32;
        if let Some(slice) = self.slices.get_mut(slot) {
            *slice = Some(SliceRead { step, record: at, plan, stored, regions, regions_left, failed: None });
        }
        true
    }

    fn free_slot(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.slices.push(None);
            self.slices.len() - 1
        })
    }

    /// Ends a slice of which a part has no place in memory, before anything of it is read.
    fn fail_slice(&self, step: u32, at: usize) {
        let index = self.records.get(at).map(|record| record.index as usize);
        let wanted = index.and_then(|index| self.job.wanted.get(index));
        // Where its blocks are not known, none may be announced.
        let run = wanted.map_or(0..self.job.request.keys.len() as u32, |wanted| wanted.run.clone());
        self.job.fail_run(run, &OUTSIDE);
        self.job.slice_done(step);
    }

    fn landing(&self, extent: &Extent, staging: Option<&SharedBuf>) -> Option<SharedBuf> {
        match extent.landing {
            Landing::Direct { memory, offset } => {
                let into = self.job.request.into.slice(Address { memory, offset }, u64::from(extent.len))?;
                // Its own keeper, if it has one, lives in the job that the guard holds.
                Some(into.kept_by(Arc::<MemoryGuard>::clone(&self.guard)))
            }
            Landing::Staged { offset } => staging?.slice(offset as usize, extent.len as usize),
        }
    }

    /// Staging memory, `Some(None)` if none is needed. While something of this part is under way, a full arena is
    /// answered by taking that in first; otherwise other tasks hold it and will return it.
    pub(super) async fn stage(&mut self, bytes: u64) -> Option<Option<SharedBuf>> {
        let bytes = bytes as usize;
        if bytes == 0 {
            return Some(None);
        }
        // Extents fill it in parts, and what has come in is delivered while others are read: it is shared.
        let taken = match self.volume.arena.try_take(bytes) {
            Some(buf) => Some(buf),
            None if self.under_way > 0 => None,
            None if bytes > self.volume.arena.usage().total => {
                // Larger than the arena: rare enough for memory of its own.
                BufMut::zeroed(bytes).ok()
            }
            None => {
                let (volume, deadline) = (&self.volume, self.job.request.deadline);
                // What holds it may be with a device that hangs.
                let late = pin!(async {
                    match deadline {
                        Some(at) => volume.driver.sleep_until(at).await,
                        None => volume.driver.silence(volume.dir).await,
                    }
                });
                let taken = with_deadline(pin!(volume.arena.take(bytes)), Some(late)).await;
                self.is_late = taken.is_none();
                taken.flatten()
            }
        };
        taken.map(|buf| Some(buf.share()))
    }

    /// Bytes of the record's header if it has to be read first; zero if it is here or on its way.
    pub(super) fn missing_header(&mut self, at: usize) -> u64 {
        let Some(record) = self.records.get(at) else { return 0 };
        if !matches!(record.header, HeaderState::Unread) {
            return 0;
        }
        let Some(wanted) = self.job.wanted.get(record.index as usize) else { return 0 };
        match prove::known(&record.reads, &record.segment, wanted) {
            Some(header) => {
                self.header_found(at, header);
                0
            }
            None => wanted.header_bytes,
        }
    }

    pub(super) fn enqueue_header(&mut self, at: usize, staging: Option<&SharedBuf>, bytes: u64) {
        let Some(buf) = staging.and_then(|staging| staging.slice(0, bytes as usize)) else { return };
        let Some(record) = self.records.get_mut(at) else { return };
        let Some(wanted) = self.job.wanted.get(record.index as usize) else { return };
        let (name, file_offset, into) = (ExtentName::of_header(at), wanted.offset, buf.clone());
        self.queue.push_back(QueuedExtent { name, file_offset, len: bytes, into });
        record.header = HeaderState::Reading(buf);
    }
}

/// Bits of an extent's name that hold its length in pages, and its region.
const LEN_BITS: u32 = 19;
const REGION_BITS: u32 = 24;

/// What an extent is, in one word. A slice has fewer regions than 2^24 (its pieces are bounded), and no extent is longer
/// than a gigabyte (by the plan's limit).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ExtentName(pub(super) u64);

/// What an extent's name says.
pub(super) enum Named {
    /// The header of a record of the part.
    Header(usize),
    /// An extent of a slice's region, with its length.
    Region { slot: usize, region: u32, bytes: u64 },
}

impl ExtentName {
    fn of(slot: usize, region: u32, len: u32) -> Self {
        let pages = u64::from(len) / PAGE_BYTES;
        Self((slot as u64) << (LEN_BITS + REGION_BITS) | u64::from(region) << LEN_BITS | pages)
    }

    fn of_header(at: usize) -> Self {
        Self(HEADER | at as u64)
    }

    pub(super) fn named(self) -> Named {
        if self.0 & HEADER != 0 {
            return Named::Header((self.0 & !HEADER) as usize);
        }
        let pages = self.0 & ((1 << LEN_BITS) - 1);
        let region = ((self.0 >> LEN_BITS) & ((1 << REGION_BITS) - 1)) as u32;
        let slot = (self.0 >> (LEN_BITS + REGION_BITS)) as usize;
        Named::Region { slot, region, bytes: pages * PAGE_BYTES }
    }
}
