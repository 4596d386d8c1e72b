//! One step of a read: the device extents to submit, and where their bytes go.
//!
//! A step consists of regions. A **region** is a range of one record, aligned for direct I/O, that is read as a
//! whole: its extents are the range cut into reads, and its pieces are the chunks in it. The bytes of a region
//! land contiguously, either straight in the destination (then the range is nothing but wanted chunks that follow
//! each other there too) or in one staging range from which the pieces are verified and copied. So a chunk may
//! straddle two extents but never two regions, and *a region's chunks are ready to be verified when all of its
//! extents are in*.
//!
//! Pieces are not stored: a region keeps runs of blocks, and the plan expands them when asked.

use super::placement::{Address, Placed, Placement};
use super::read::ReadOptions;
use crate::arrange::PartPlace;

/// What is announced at once, and how to read it. A buffer: it is filled again and again, and keeps its memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Step {
    pub(super) regions: Vec<Region>,
    pub(super) runs: Vec<Run>,
    pub(super) wanted_bytes: u64,
    pub(super) read_bytes: u64,
    pub(super) staged_bytes: u64,
    pub(super) max_extent: u32,
}

/// A range of a record that is read as a whole and lands contiguously.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// First byte in the record's file, aligned.
    pub file_offset: u64,
    /// Bytes, a multiple of the alignment.
    pub bytes: u64,
    /// The destination, if the region lands there directly; otherwise it needs `bytes` of staging.
    pub direct: Option<Address>,
    /// Index of the record in the plan.
    pub record: u32,
    /// First of its runs in the step.
    pub(super) first_run: u32,
    /// Number of its runs.
    pub(super) run_count: u32,
}

/// Chunks of one part in consecutive blocks with consecutive ordinals, all in one region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Run {
    /// Offset of the first chunk in the region.
    pub(super) source: u64,
    pub(super) block: u32,
    pub(super) ordinal: u32,
    pub(super) count: u32,
    /// Canonical index of the part.
    pub(super) chunk: u32,
    pub(super) layer: u32,
}

/// Where the bytes of an extent land.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Landing {
    /// In the region's staging range.
    Staged {
        /// Bytes from the start of that range.
        offset: u64,
    },
    /// In the destination.
    Direct(Address),
}

/// One read of the device: offset, length and landing place are all aligned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Index of its region in the step.
    pub region: u32,
    /// Index of the record in the plan.
    pub record: u32,
    /// First byte in the record's file.
    pub file_offset: u64,
    /// Bytes to read.
    pub len: u32,
    /// Where they land.
    pub landing: Landing,
}

/// One wanted chunk: where it lies in its region, and where it belongs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Block within the record.
    pub block: u32,
    /// Block within the whole plan: what the placement counts by.
    pub ordinal: u32,
    /// Layer index within the block.
    pub layer: u32,
    /// Canonical index of the part within the block: where its digest is.
    pub chunk: u32,
    /// Bytes from the region's start.
    pub source: u64,
    /// Bytes of the chunk.
    pub len: u64,
    /// Where the chunk belongs. In a direct region it is there already.
    pub destination: Address,
}

impl Step {
    /// An empty step, without memory until it is filled.
    pub fn new() -> Self {
        Self::default()
    }

    /// The regions, by record and offset. Two of one record overlap only where one was cut at the region limit
    /// in the middle of a page: then both read that page.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// All device reads of the step, by record and offset.
    pub fn extents(&self) -> impl Iterator<Item = Extent> + '_ {
        (0u32..).zip(&self.regions).flat_map(|(index, region)| region.cut(index, self.max_extent))
    }

    /// Bytes of the wanted chunks.
    pub fn wanted_bytes(&self) -> u64 {
        self.wanted_bytes
    }

    /// Bytes that the extents read.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes
    }

    /// Bytes read that nobody wanted: page edges, padding, bridged gaps. At most
    /// [`ReadOptions::over_read_bound`].
    pub fn over_read_bytes(&self) -> u64 {
        self.read_bytes.saturating_sub(self.wanted_bytes)
    }

    /// Bytes of staging that the step needs if all its regions are in flight at once.
    pub fn staged_bytes(&self) -> u64 {
        self.staged_bytes
    }

    pub(super) fn clear(&mut self, max_extent: u32) {
        self.regions.clear();
        self.runs.clear();
        (self.wanted_bytes, self.read_bytes, self.staged_bytes) = (0, 0, 0);
        self.max_extent = max_extent;
    }

    pub(super) fn runs_of(&self, region: &Region) -> &[Run] {
        let first = usize::try_from(region.first_run).unwrap_or(usize::MAX);
        let count = usize::try_from(region.run_count).unwrap_or(usize::MAX);
        self.runs.get(first..first.saturating_add(count)).unwrap_or_default()
    }
}

impl Region {
    /// The region's device reads, each at most `max_extent` long.
    fn cut(&self, region: u32, max_extent: u32) -> impl Iterator<Item = Extent> + use<> {
        let Self { file_offset, bytes, direct, record, .. } = *self;
        let mut done = 0u64;
        std::iter::from_fn(move || {
            let left = bytes.checked_sub(done).filter(|&left| left > 0)?;
            let len = u32::try_from(left).unwrap_or(u32::MAX).min(max_extent);
            let landing = match direct {
                None => Landing::Staged { offset: done },
                Some(Address { memory, offset }) => {
                    Landing::Direct(Address { memory, offset: offset.saturating_add(done) })
                }
            };
            let extent =
                Extent { region, record, file_offset: file_offset.saturating_add(done), len, landing };
            done = done.saturating_add(u64::from(len));
            (len > 0).then_some(extent)
        })
    }
}

/// The chunks of one part that a filler adds: place on disk, place in memory, names.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartRead<'a> {
    pub(super) place: &'a PartPlace,
    pub(super) placed: &'a Placed,
    pub(super) chunk: u32,
    pub(super) layer: u32,
    /// Every chunk of this part can land directly: disk and memory offsets and sizes are all aligned.
    pub(super) direct: bool,
}

impl<'a> PartRead<'a> {
    pub(super) fn new(
        place: &'a PartPlace,
        placed: &'a Placed,
        chunk: u32,
        layer: u32,
        options: &ReadOptions,
    ) -> Self {
        let all = place.offset | place.step | place.bytes | placed.target.base | placed.target.stride;
        Self { place, placed, chunk, layer, direct: all & options.mask() == 0 }
    }
}

/// Appends the chunks of one record to a step, in file order, merging as it goes.
#[derive(Debug)]
pub(super) struct Filler<'a> {
    step: &'a mut Step,
    options: &'a ReadOptions,
    placement: &'a Placement,
    record: u32,
    payload_offset: u64,
    open: Option<Region>,
}

impl<'a> Filler<'a> {
    pub(super) fn new(
        step: &'a mut Step,
        options: &'a ReadOptions,
        placement: &'a Placement,
        record: u32,
        payload_offset: u64,
    ) -> Self {
        Self { step, options, placement, record, payload_offset, open: None }
    }

    /// Adds the chunks of one part in `count` consecutive blocks, which lie behind everything added before. With
    /// `count` above one, the chunks must follow each other without another part's chunk in between.
    #[inline]
    pub(super) fn add(&mut self, part: &PartRead<'_>, block: u32, ordinal: u32, count: u32) {
        let wanted = part.place.bytes.saturating_mul(u64::from(count));
        self.step.wanted_bytes = self.step.wanted_bytes.saturating_add(wanted);
        if part.direct {
            self.add_direct(part, block, ordinal, count);
        } else {
            self.add_staged(part, block, ordinal, count);
        }
    }

    fn add_direct(&mut self, part: &PartRead<'_>, block: u32, ordinal: u32, count: u32) {
        for index in 0..count {
            let (block, ordinal) = (block.saturating_add(index), ordinal.saturating_add(index));
            // The plan has checked that the placement covers every ordinal.
            let Some(slot) = self.placement.slot(ordinal) else { return };
            let start = self.payload_offset.saturating_add(part.place.start(block));
            let to = Address { memory: part.placed.target.memory, offset: part.placed.offset(slot) };
            let bytes = part.place.bytes;
            match &mut self.open {
                Some(open) if open.continues_at(start, to, bytes, self.options.max_region) => {
                    let source = open.bytes;
                    open.bytes = open.bytes.saturating_add(bytes);
                    self.push_run(source, part, block, ordinal, 1);
                }
                _ => {
                    self.open_region(start, bytes, Some(to));
                    self.push_run(0, part, block, ordinal, 1);
                }
            }
        }
    }

    fn add_staged(&mut self, part: &PartRead<'_>, mut block: u32, mut ordinal: u32, mut count: u32) {
        let mask = self.options.mask();
        let (step, bytes) = (part.place.step, part.place.bytes);
        // Padding between neighbours that any two ranges would be merged across: no need to look at each.
        let bridged = step.saturating_sub(bytes) <= mask.max(u64::from(self.options.max_gap));
        while count > 0 {
            let start = self.payload_offset.saturating_add(part.place.start(block));
            let floor = start & !mask;
            let limit = u64::from(self.options.max_region);
            let joins = self.open.as_ref().is_some_and(|open| {
                let reach = open.file_offset.saturating_add(open.bytes);
                open.direct.is_none()
                    && floor <= reach.saturating_add(u64::from(self.options.max_gap))
                    && start.saturating_add(bytes) <= open.file_offset.saturating_add(limit)
            });
            if !joins {
                self.open_region(floor, 0, None);
            }
            let Some(open) = &mut self.open else { return };
            // The region limit is a multiple of the alignment, so what ends below it ends below it rounded up.
            let room = open.file_offset.saturating_add(limit).saturating_sub(start.saturating_add(bytes));
            let more = u64::from(count.saturating_sub(1));
            let taken = if !bridged {
                1
            } else if step.saturating_mul(more) <= room {
                count
            } else {
                let fit = room.checked_div(step).unwrap_or(0).min(more);
                u32::try_from(fit).unwrap_or(u32::MAX).saturating_add(1)
            };
            let last = start.saturating_add(step.saturating_mul(u64::from(taken.saturating_sub(1))));
            let end = last.saturating_add(bytes).saturating_add(mask) & !mask;
            open.bytes = end.saturating_sub(open.file_offset);
            let source = start.saturating_sub(open.file_offset);
            self.push_run(source, part, block, ordinal, taken);
            block = block.saturating_add(taken);
            ordinal = ordinal.saturating_add(taken);
            count = count.saturating_sub(taken);
        }
    }

    fn push_run(&mut self, source: u64, part: &PartRead<'_>, block: u32, ordinal: u32, count: u32) {
        let Some(open) = &mut self.open else { return };
        if open.run_count > 0
            && let Some(last) = self.step.runs.last_mut()
            && last.chunk == part.chunk
            && last.block.saturating_add(last.count) == block
            && last.ordinal.saturating_add(last.count) == ordinal
        {
            last.count = last.count.saturating_add(count);
            return;
        }
        open.run_count = open.run_count.saturating_add(1);
        self.step.runs.push(Run { source, block, ordinal, count, chunk: part.chunk, layer: part.layer });
    }

    fn open_region(&mut self, file_offset: u64, bytes: u64, direct: Option<Address>) {
        self.close();
        // A plan refuses steps of more than `MAX_STEP_PIECES` pieces, and no run is without a piece.
        let first_run = u32::try_from(self.step.runs.len()).unwrap_or(u32::MAX);
        self.open = Some(Region { file_offset, bytes, direct, record: self.record, first_run, run_count: 0 });
    }

    /// Ends the last region. Without it the region is lost.
    pub(super) fn close(&mut self) {
        if let Some(region) = self.open.take() {
            self.step.read_bytes = self.step.read_bytes.saturating_add(region.bytes);
            if region.direct.is_none() {
                self.step.staged_bytes = self.step.staged_bytes.saturating_add(region.bytes);
            }
            self.step.regions.push(region);
        }
    }
}

impl Region {
    /// Whether a direct read of `bytes` can be appended: on disk, in the destination and within the limit.
    fn continues_at(&self, start: u64, to: Address, bytes: u64, max_region: u32) -> bool {
        let Some(address) = self.direct else { return false };
        let total = self.bytes.saturating_add(bytes);
        self.file_offset.saturating_add(self.bytes) == start
            && address.memory == to.memory
            && address.offset.saturating_add(self.bytes) == to.offset
            && total <= u64::from(max_region)
    }
}
