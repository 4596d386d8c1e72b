//! The read plan: from wanted blocks and layers of a prefix to device extents, one step at a time.
//!
//! A prefix spans any number of records, each with its own layout and block count but all of one shape. A step is
//! what an engine announces at once: one layer of all wanted blocks ([`Order::Layers`]) or one block
//! ([`Order::Blocks`]). Making a plan looks at each record once and at no chunk; every step is computed from
//! arithmetic alone when it is asked for, in any order, and a step's share of one record can be had by itself. A
//! plan is immutable: share it between the tasks that submit reads and those that verify and copy.
//!
//! How to use it: fill a [`Step`]; submit its extents, those of a direct region into the destination, those of a
//! staged one into a staging range of the region's size; when all extents of a region are in, check the digest of
//! every piece and copy the staged ones to their destinations; when all regions are done, announce the step.

use super::PlanError;
use super::options::{Order, ReadOptions};
use super::pieces::Pieces;
use super::placement::Placement;
use super::step::{Filler, PartRead, Step, WholeBlock};
use crate::arrange::{PAGE_BYTES, RunLayout};
use crate::shape::Layout;
use std::ops::Range;
use std::sync::Arc;

/// The most pieces one step may have.
const MAX_STEP_PIECES: u64 = 1 << 26;

/// What is wanted of one record.
#[derive(Clone, Debug)]
pub struct RecordRead {
    /// Where its chunks lie. Records of one prefix usually share it: an `Arc` that is the same is not looked at
    /// twice.
    pub layout: Arc<RunLayout>,
    /// Where the payload starts in its file: a multiple of 4096.
    pub payload_offset: u64,
    /// Blocks wanted, counted within the record.
    pub blocks: Range<u32>,
    /// Ordinal of the first wanted block in the placement; the others follow.
    pub ordinal: u32,
}

/// What to read for a prefix, and where it goes.
#[derive(Clone, Debug)]
pub struct ReadPlan {
    records: Vec<RecordRead>,
    layers: Range<u32>,
    order: Order,
    placement: Arc<Placement>,
    options: ReadOptions,
    /// In block order: the number of steps before each record.
    first_steps: Vec<u32>,
    /// In block order: for each record, whether its blocks are one region each.
    whole_blocks: Vec<Option<WholeBlock>>,
    blocks: u32,
}

impl ReadPlan {
    /// Checks the request and plans nothing yet: O(records).
    ///
    /// Records must be in the order of their ordinals. `layers` counts the layers of the shape.
    pub fn new(
        records: Vec<RecordRead>,
        layers: Range<u32>,
        order: Order,
        placement: Arc<Placement>,
        options: ReadOptions,
    ) -> Result<Self, PlanError> {
        options.check()?;
        let first = records.first().ok_or(PlanError::Nothing)?;
        check_range(&layers, first.layout.layer_count())?;
        check_shape(&records, &placement)?;
        let mut first_steps = Vec::with_capacity(records.len());
        let (mut blocks, mut next_ordinal) = (0u32, 0u32);
        for record in &records {
            record.check()?;
            if record.ordinal < next_ordinal {
                return Err(PlanError::Order);
            }
            let count = count(&record.blocks);
            next_ordinal = record.ordinal.checked_add(count).ok_or(PlanError::TooLarge)?;
            first_steps.push(blocks);
            blocks = blocks.checked_add(count).ok_or(PlanError::TooLarge)?;
        }
        if next_ordinal > placement.blocks() {
            return Err(PlanError::Placement { needed: next_ordinal, available: placement.blocks() });
        }
        let mut widest = 0;
        for layer in layers.clone() {
            let (first_part, parts) = first.layout.layer_parts(layer).ok_or(PlanError::Shape)?;
            if let Some(part) = placement.unplaced(first_part, parts.len()) {
                return Err(PlanError::Unplaced { part });
            }
            widest = widest.max(parts.len());
        }
        let pieces = u64::try_from(widest).unwrap_or(u64::MAX).saturating_mul(u64::from(blocks));
        if order == Order::Layers && pieces > MAX_STEP_PIECES {
            return Err(PlanError::TooLarge);
        }
        let whole_blocks = match order {
            Order::Blocks => whole_blocks(&records, &layers, &placement, &options),
            Order::Layers => Vec::new(),
        };
        Ok(Self { records, layers, order, placement, options, first_steps, whole_blocks, blocks })
    }

    /// Number of steps: wanted layers in layer order, wanted blocks in block order.
    pub fn steps(&self) -> u32 {
        match self.order {
            Order::Layers => count(&self.layers),
            Order::Blocks => self.blocks,
        }
    }

    /// Number of slices of a step: one for each record in layer order, one in block order.
    pub fn slices(&self) -> u32 {
        match self.order {
            Order::Layers => u32::try_from(self.records.len()).unwrap_or(u32::MAX),
            Order::Blocks => 1,
        }
    }

    /// The records, as given.
    pub fn records(&self) -> &[RecordRead] {
        &self.records
    }

    /// Where the chunks go.
    pub fn placement(&self) -> &Arc<Placement> {
        &self.placement
    }

    /// How extents are formed.
    pub fn options(&self) -> &ReadOptions {
        &self.options
    }

    /// The layer index that a step of a plan in layer order delivers.
    pub fn layer_of(&self, step: u32) -> Option<u32> {
        (self.order == Order::Layers).then(|| nth(&self.layers, step)).flatten()
    }

    /// The record and the block within it that a step of a plan in block order delivers.
    pub fn block_of(&self, step: u32) -> Option<(u32, u32)> {
        if self.order != Order::Blocks || step >= self.blocks {
            return None;
        }
        let record = self.first_steps.partition_point(|&first| first <= step).checked_sub(1)?;
        let position = step.checked_sub(*self.first_steps.get(record)?)?;
        Some((u32::try_from(record).ok()?, nth(&self.records.get(record)?.blocks, position)?))
    }

    /// The steps that deliver something of a record: in layer order all of them, in block order those of its blocks.
    pub fn steps_of(&self, record: u32) -> Range<u32> {
        if self.order == Order::Layers {
            return 0..self.steps();
        }
        let first = |record: Option<usize>| record.and_then(|at| self.first_steps.get(at)).copied();
        let at = usize::try_from(record).ok();
        let Some(begin) = first(at) else { return 0..0 };
        begin..first(at.and_then(|at| at.checked_add(1))).unwrap_or(self.blocks)
    }

    /// Plans one step into `out`, replacing what was there; false, and `out` empty, if there is no such step.
    /// Allocates only while `out` is smaller than the largest step so far.
    pub fn plan_step(&self, step: u32, out: &mut Step) -> bool {
        out.clear(self.options.max_extent);
        match self.order {
            Order::Layers => {
                let Some(layer) = nth(&self.layers, step) else { return false };
                for (index, record) in (0u32..).zip(&self.records) {
                    self.fill_layer(layer, index, record, out);
                }
                true
            }
            Order::Blocks => self.fill_block(step, out),
        }
    }

    /// Plans the share of one record in one step, so that the first reads of a long prefix can be submitted
    /// before the last record is looked at; otherwise as [`ReadPlan::plan_step`].
    pub fn plan_slice(&self, step: u32, slice: u32, out: &mut Step) -> bool {
        out.clear(self.options.max_extent);
        match self.order {
            Order::Layers => {
                let record = usize::try_from(slice).ok().and_then(|at| self.records.get(at));
                let (Some(layer), Some(record)) = (nth(&self.layers, step), record) else { return false };
                self.fill_layer(layer, slice, record, out);
                true
            }
            Order::Blocks => slice == 0 && self.fill_block(step, out),
        }
    }

    fn fill_layer(&self, layer: u32, index: u32, record: &RecordRead, out: &mut Step) {
        let Some((first_chunk, places)) = record.layout.layer_parts(layer) else { return };
        let part_at = |chunk: u32, place| PartRead::new(place, &self.placement, chunk, &self.options);
        let parts = || (first_chunk..).zip(places).filter_map(|(chunk, place)| part_at(chunk, place));
        let mut filler = Filler::new(out, &self.options, &self.placement, index, record.payload_offset);
        match record.layout.layout() {
            Layout::LayerBlock => {
                for part in parts() {
                    filler.add(&part, record.blocks.start, record.ordinal, count(&record.blocks));
                }
            }
            Layout::FullBlock => {
                for (block, position) in record.blocks.clone().zip(0u32..) {
                    for part in parts() {
                        filler.add(&part, block, record.ordinal.saturating_add(position), 1);
                    }
                }
            }
        }
        filler.close();
    }

    fn fill_block(&self, step: u32, out: &mut Step) -> bool {
        let Some((index, block)) = self.block_of(step) else { return false };
        let at = usize::try_from(index).unwrap_or(usize::MAX);
        let (Some(record), Some(&first)) = (self.records.get(at), self.first_steps.get(at)) else {
            return false;
        };
        let ordinal = record.ordinal.saturating_add(step.saturating_sub(first));
        let mut filler = Filler::new(out, &self.options, &self.placement, index, record.payload_offset);
        if let Some(whole) = self.whole_blocks.get(at).copied().flatten() {
            let first_part = usize::try_from(whole.first_part()).unwrap_or(usize::MAX);
            let Some(place) = record.layout.parts().get(first_part) else { return false };
            filler.add_whole(&whole, place, block, ordinal);
            filler.close();
            return true;
        }
        for layer in self.layers.clone() {
            let Some((first_chunk, places)) = record.layout.layer_parts(layer) else { break };
            for (chunk, place) in (first_chunk..).zip(places) {
                if let Some(part) = PartRead::new(place, &self.placement, chunk, &self.options) {
                    filler.add(&part, block, ordinal, 1);
                }
            }
        }
        filler.close();
        true
    }

    /// The chunks of a region of a step that this plan filled, in file order. `region` counts the step's regions.
    pub fn pieces<'a>(&'a self, step: &'a Step, region: u32) -> Pieces<'a> {
        let record_and_runs = step.runs_of(region).and_then(|(region, runs)| {
            Some((self.records.get(usize::try_from(region.record).ok()?)?.layout.parts(), runs))
        });
        let (parts, runs) = record_and_runs.unwrap_or_default();
        Pieces::new(&self.placement, parts, runs)
    }
}

impl RecordRead {
    fn check(&self) -> Result<(), PlanError> {
        if self.payload_offset & PAGE_BYTES.saturating_sub(1) != 0 {
            return Err(PlanError::PayloadOffset { offset: self.payload_offset });
        }
        let end = self.payload_offset.checked_add(self.layout.image_bytes());
        if end.is_none_or(|end| i64::try_from(end).is_err()) {
            return Err(PlanError::TooLarge);
        }
        check_range(&self.blocks, self.layout.blocks())
    }
}

/// How many a range has.
fn count(range: &Range<u32>) -> u32 {
    range.end.saturating_sub(range.start)
}

/// The number at a position of a range, counted from zero.
fn nth(range: &Range<u32>, position: u32) -> Option<u32> {
    range.start.checked_add(position).filter(|number| range.contains(number))
}

/// Refuses an empty range and one that reaches beyond `available`.
fn check_range(range: &Range<u32>, available: u32) -> Result<(), PlanError> {
    match range.end.checked_sub(1) {
        Some(last) if !range.is_empty() && last >= available => {
            Err(PlanError::OutOfRange { wanted: last, available })
        }
        Some(_) if !range.is_empty() => Ok(()),
        _ => Err(PlanError::Nothing),
    }
}

/// All records and the placement are of one shape. Layouts that are one and the same are compared once.
fn check_shape(records: &[RecordRead], placement: &Placement) -> Result<(), PlanError> {
    let Some(first) = records.first() else { return Err(PlanError::Nothing) };
    if !placement.is_for(first.layout.parts().iter().map(|part| part.bytes)) {
        return Err(PlanError::Shape);
    }
    let mut seen = &first.layout;
    for record in records {
        if !Arc::ptr_eq(&record.layout, seen) && !Arc::ptr_eq(&record.layout, &first.layout) {
            if !record.layout.same_shape(&first.layout) {
                return Err(PlanError::Shape);
            }
            seen = &record.layout;
        }
    }
    Ok(())
}

/// For each record whether a block is one region. Looks at a layout that several records share once.
fn whole_blocks<'a>(
    records: &'a [RecordRead],
    layers: &Range<u32>,
    placement: &Placement,
    options: &ReadOptions,
) -> Vec<Option<WholeBlock>> {
    let mut seen: Option<(&'a Arc<RunLayout>, Option<WholeBlock>)> = None;
    let whole_of = |record: &'a RecordRead| match seen {
        Some((layout, whole)) if Arc::ptr_eq(layout, &record.layout) => whole,
        _ => {
            let whole = whole_block(&record.layout, layers, placement, options);
            seen = Some((&record.layout, whole));
            whole
        }
    };
    records.iter().map(whole_of).collect()
}

fn whole_block(
    layout: &RunLayout,
    layers: &Range<u32>,
    placement: &Placement,
    options: &ReadOptions,
) -> Option<WholeBlock> {
    let (first, _) = layout.layer_parts(layers.start)?;
    let (last_first, last_parts) = layout.layer_parts(layers.end.checked_sub(1)?)?;
    let end = usize::try_from(last_first).ok()?.checked_add(last_parts.len())?;
    let places = layout.parts().get(usize::try_from(first).ok()?..end)?;
    WholeBlock::new(places, first, placement, options)
}
