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

use super::options::ReadOptions;
use super::placement::{MemoryId, PartTarget, Placed, Placement};
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
    /// Bytes, a multiple of the alignment. A staged region needs as many bytes of staging.
    pub bytes: u64,
    /// Where its first byte lands.
    pub landing: Landing,
    /// Index of the record in the plan.
    pub record: u32,
    /// First of its runs in the step; the next region's first run ends them.
    first_run: u32,
}

/// Chunks that follow each other, all in one region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Run {
    /// Offset of the first chunk in the region.
    pub(super) source: u64,
    pub(super) block: u32,
    pub(super) ordinal: u32,
    pub(super) count: u32,
    /// Canonical index of the (first) part; a block has at most 2^16.
    pub(super) chunk: u16,
    pub(super) along: Along,
}

/// What changes from one chunk of a run to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Along {
    /// Block and ordinal, by one each; the part stays.
    Blocks,
    /// The part, by one; the block stays.
    Parts,
}

/// Where the bytes of an extent or a region land.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Landing {
    /// In the region's staging range.
    Staged {
        /// Bytes from the start of that range.
        offset: u64,
    },
    /// In the destination.
    Direct {
        /// The memory.
        memory: MemoryId,
        /// Bytes from its start.
        offset: u64,
    },
}

impl Landing {
    /// Whether the bytes land in the destination.
    pub const fn is_direct(&self) -> bool {
        matches!(self, Self::Direct { .. })
    }

    /// `bytes` further.
    const fn after(self, bytes: u64) -> Self {
        match self {
            Self::Staged { offset } => Self::Staged { offset: offset.saturating_add(bytes) },
            Self::Direct { memory, offset } => Self::Direct { memory, offset: offset.saturating_add(bytes) },
        }
    }
}

/// A range of a file that is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadRange {
    /// First byte in the file.
    pub start: u64,
    /// How many bytes.
    pub bytes: u64,
}

/// Where such a range lies in a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RangePlace {
    /// Index of its region in the step.
    pub region: u32,
    /// Bytes from the region's start.
    pub source: u64,
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

impl Step {
    /// An empty step, without memory until it is filled.
    pub fn new() -> Self {
        Self::default()
    }

    /// Plans staged reads of ranges of one record's file, which are in the order of the file, replacing what was there; gives
    /// where each of them lies. For chunks whose places no layout tells: the step has regions and extents and no pieces.
    pub fn read_ranges(
        &mut self,
        record: u32,
        options: &ReadOptions,
        ranges: impl IntoIterator<Item = ReadRange>,
    ) -> Vec<RangePlace> {
        self.clear(options.max_extent);
        let mut filler =
            Filler { step: self, options, placement: None, record, payload_offset: 0, open: None };
        let mut places = Vec::new();
        for ReadRange { start, bytes } in ranges {
            filler.step.wanted_bytes = filler.step.wanted_bytes.saturating_add(bytes);
            let source = filler.reach_staged(start, bytes);
            // The open region comes behind those that are closed.
            let region = u32::try_from(filler.step.regions.len()).unwrap_or(u32::MAX);
            places.push(RangePlace { region, source });
        }
        filler.close();
        places
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

    /// Bytes read and not wanted: page edges, padding, bridged gaps. At most
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

    pub(super) fn runs_of(&self, region: u32) -> Option<(&Region, &[Run])> {
        let at = usize::try_from(region).ok()?;
        let region = self.regions.get(at)?;
        let end = match self.regions.get(at.checked_add(1)?) {
            Some(next) => usize::try_from(next.first_run).ok()?,
            None => self.runs.len(),
        };
        Some((region, self.runs.get(usize::try_from(region.first_run).ok()?..end)?))
    }
}

impl Region {
    /// The region's device reads, each at most `max_extent` long.
    fn cut(&self, region: u32, max_extent: u32) -> impl Iterator<Item = Extent> + use<> {
        let Self { file_offset, bytes, landing, record, .. } = *self;
        let mut done = 0u64;
        std::iter::from_fn(move || {
            let left = bytes.checked_sub(done).filter(|&left| left > 0)?;
            let len = u32::try_from(left).unwrap_or(u32::MAX).min(max_extent);
            let file_offset = file_offset.saturating_add(done);
            let landing = landing.after(done);
            done = done.saturating_add(u64::from(len));
            (len > 0).then_some(Extent { region, record, file_offset, len, landing })
        })
    }

    /// Whether a direct read of `bytes` can be appended: on disk, in the destination and within the limit.
    fn continues_at(&self, start: u64, landing: Landing, bytes: u64, max_region: u32) -> bool {
        self.landing.is_direct()
            && self.file_offset.saturating_add(self.bytes) == start
            && self.landing.after(self.bytes) == landing
            && self.bytes.saturating_add(bytes) <= u64::from(max_region)
    }
}

/// The chunks of one part that a filler adds: place on disk, place in memory, names.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartRead<'a> {
    pub(super) place: &'a PartPlace,
    pub(super) placed: Placed,
    pub(super) chunk: u16,
    /// Every chunk of this part can land directly: disk and memory offsets and sizes are all aligned.
    pub(super) direct: bool,
}

impl<'a> PartRead<'a> {
    /// The part with canonical index `chunk`, which lies at `place` in the payload.
    pub(super) fn new(
        place: &'a PartPlace,
        placement: &'a Placement,
        chunk: u32,
        options: &ReadOptions,
    ) -> Option<Self> {
        let placed = placement.part(chunk)?;
        let all = place.offset | place.step | place.bytes | placed.target.base | placed.target.stride;
        let chunk = u16::try_from(chunk).ok()?;
        Some(Self { place, placed, chunk, direct: all & options.mask() == 0 })
    }
}

/// Consecutive parts of a block that always make up one staged region when a block is read by itself, so that a
/// step need not look at each of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct WholeBlock {
    first_part: u16,
    parts: u32,
    /// Bytes from the first part's start to the last one's end.
    span: u64,
    /// Bytes of the parts.
    wanted: u64,
}

impl WholeBlock {
    /// `parts` parts from canonical index `first` on, if none is direct, no gap between them would be left out,
    /// and they fit in a region wherever the block lies.
    pub(super) fn new(
        places: &[PartPlace],
        first: u32,
        placement: &Placement,
        options: &ReadOptions,
    ) -> Option<Self> {
        let bridged = options.mask().max(u64::from(options.max_gap));
        // With one step for all parts (full-block layout) every block is like the first.
        let &PartPlace { offset: start, step, .. } = places.first()?;
        let (mut end, mut wanted) = (start, 0u64);
        for (chunk, place) in (first..).zip(places) {
            let gap = place.offset.checked_sub(end)?;
            if gap > bridged || place.step != step || PartRead::new(place, placement, chunk, options)?.direct
            {
                return None;
            }
            end = place.offset.checked_add(place.bytes)?;
            wanted = wanted.checked_add(place.bytes)?;
        }
        let span = end.checked_sub(start)?;
        let longest = span.checked_add(u64::from(options.align))?;
        let (first_part, parts) = (u16::try_from(first).ok()?, u32::try_from(places.len()).ok()?);
        (longest <= u64::from(options.max_region)).then_some(Self { first_part, parts, span, wanted })
    }

    pub(super) fn first_part(&self) -> u32 {
        u32::from(self.first_part)
    }
}

/// Appends the chunks of one record to a step, in file order, merging as it goes.
#[derive(Debug)]
pub(super) struct Filler<'a> {
    step: &'a mut Step,
    options: &'a ReadOptions,
    /// None where everything is staged.
    placement: Option<&'a Placement>,
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
        let placement = Some(placement);
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
            let Some(slot) = self.placement.and_then(|places| places.slot(ordinal)) else { return };
            let start = self.payload_offset.saturating_add(part.place.start(block));
            let PartTarget { memory, .. } = part.placed.target;
            let landing = Landing::Direct { memory, offset: part.placed.offset(slot) };
            let bytes = part.place.bytes;
            match &mut self.open {
                Some(open) if open.continues_at(start, landing, bytes, self.options.max_region) => {
                    let source = open.bytes;
                    open.bytes = open.bytes.saturating_add(bytes);
                    self.push_run(source, part, block, ordinal, 1);
                }
                _ => {
                    self.open_region(start, bytes, landing);
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
            let source = self.reach_staged(start, bytes);
            let limit = u64::from(self.options.max_region);
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
            self.push_run(source, part, block, ordinal, taken);
            block = block.saturating_add(taken);
            ordinal = ordinal.saturating_add(taken);
            count = count.saturating_sub(taken);
        }
    }

    /// Has a staged region reach to the end of a range: the open one, or a new one where that is too far away or too long
    /// already. Gives where the range begins in it.
    fn reach_staged(&mut self, start: u64, bytes: u64) -> u64 {
        let mask = self.options.mask();
        let (floor, end) = (start & !mask, start.saturating_add(bytes));
        let limit = u64::from(self.options.max_region);
        let joins = self.open.as_ref().is_some_and(|open| {
            let reach = open.file_offset.saturating_add(open.bytes);
            !open.landing.is_direct()
                && floor <= reach.saturating_add(u64::from(self.options.max_gap))
                && end <= open.file_offset.saturating_add(limit)
        });
        if !joins {
            self.open_region(floor, 0, Landing::Staged { offset: 0 });
        }
        let Some(open) = &mut self.open else { return 0 };
        let reached = (end.saturating_add(mask) & !mask).saturating_sub(open.file_offset);
        open.bytes = open.bytes.max(reached);
        start.saturating_sub(open.file_offset)
    }

    /// Adds consecutive parts of one block that the plan has found to make up one staged region.
    pub(super) fn add_whole(&mut self, whole: &WholeBlock, place: &PartPlace, block: u32, ordinal: u32) {
        let mask = self.options.mask();
        let start = self.payload_offset.saturating_add(place.start(block));
        let floor = start & !mask;
        let end = start.saturating_add(whole.span).saturating_add(mask) & !mask;
        self.step.wanted_bytes = self.step.wanted_bytes.saturating_add(whole.wanted);
        self.open_region(floor, end.saturating_sub(floor), Landing::Staged { offset: 0 });
        let source = start.saturating_sub(floor);
        let (chunk, count) = (whole.first_part, whole.parts);
        self.step.runs.push(Run { source, block, ordinal, count, chunk, along: Along::Parts });
    }

    /// Blocks are added in the order of their ordinals, so the one after the last block has the next ordinal.
    fn push_run(&mut self, source: u64, part: &PartRead<'_>, block: u32, ordinal: u32, count: u32) {
        let first_run = self.open.as_ref().map_or(u32::MAX, |open| open.first_run);
        if usize::try_from(first_run).is_ok_and(|first| first < self.step.runs.len())
            && let Some(last) = self.step.runs.last_mut()
            && last.chunk == part.chunk
            && last.block.saturating_add(last.count) == block
        {
            last.count = last.count.saturating_add(count);
            return;
        }
        let chunk = part.chunk;
        self.step.runs.push(Run { source, block, ordinal, count, chunk, along: Along::Blocks });
    }

    fn open_region(&mut self, file_offset: u64, bytes: u64, landing: Landing) {
        self.close();
        // A plan refuses steps of more than `MAX_STEP_PIECES` pieces, and no run is without a piece.
        let first_run = u32::try_from(self.step.runs.len()).unwrap_or(u32::MAX);
        self.open = Some(Region { file_offset, bytes, landing, record: self.record, first_run });
    }

    /// Ends the last region. Without it the region is lost.
    pub(super) fn close(&mut self) {
        if let Some(region) = self.open.take() {
            self.step.read_bytes = self.step.read_bytes.saturating_add(region.bytes);
            if !region.landing.is_direct() {
                self.step.staged_bytes = self.step.staged_bytes.saturating_add(region.bytes);
            }
            self.step.regions.push(region);
        }
    }
}
