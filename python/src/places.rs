//! Where the blocks of a request lie, from what a caller gives: a buffer for each, one for all, or slots of a pool.

use std::collections::BTreeMap;

use kvarts_contract::api::Placed;
use kvarts_contract::batch::Memory;
use kvarts_contract::buffers::SharedBuf;
use kvarts_layout::BlockShape;
use kvarts_layout::plan::{MemoryId, PartTarget};
use kvarts_layout::{Coordinate, Group};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::blocks::Asked;
use crate::buffer::{self, Held};
use crate::error::{OrRaise, invalid};
use crate::registry::Registry;

#[doc = stub!("Paged")]
#[pyclass(frozen, module = "kvarts")]
pub(crate) struct Paged {
    parts: Vec<Option<(Py<PyAny>, u64, u64)>>,
    slots: Vec<u32>,
}

#[pymethods]
impl Paged {
    #[new]
    fn new(parts: Vec<Option<(Py<PyAny>, u64, u64)>>, slots: Vec<u32>) -> Self {
        Self { parts, slots }
    }
}

/// A buffer, an offset and a stride for each part that has a place.
type Parts<'py> = Vec<Option<(Bound<'py, PyAny>, u64, u64)>>;

/// The places of a request's blocks.
pub(crate) enum Laid {
    Anywhere(Vec<SharedBuf>),
    Placed(Placed),
}

impl Laid {
    /// As batches take it.
    pub(crate) fn memory<'a>(&'a self, shapes: &'a [(Group, Coordinate, BlockShape)]) -> Memory<'a> {
        match self {
            Self::Anywhere(pages) => Memory::Anywhere(pages, shapes),
            Self::Placed(placed) => Memory::Placed(placed),
        }
    }
}

/// A buffer that was given: known by its address already, or to be kept for this request.
enum Found {
    Known(SharedBuf),
    New { address: usize, len: usize },
}

/// Gathers buffers; those that are not known become one region together.
struct Gather<'a> {
    registry: &'a Registry,
    writable: bool,
    found: Vec<Found>,
    held: Vec<Held>,
}

impl Gather<'_> {
    /// Takes one buffer of exactly `expected` bytes, or of any size if none is expected.
    fn take(&mut self, argument: &str, given: &Bound<'_, PyAny>, expected: Option<usize>) -> PyResult<usize> {
        let py = given.py();
        if let Ok(address) = given.extract::<usize>() {
            let room = self.registry.room(address);
            let len = expected.unwrap_or(room);
            let known = if len == 0 { None } else { self.registry.find(address, len) };
            let known = known.ok_or_else(|| {
                invalid(
                    py,
                    argument,
                    format!(
                        "{len} bytes at {address:#x} are not in registered \
                    memory: register the memory first"
                    ),
                )
            })?;
            self.found.push(Found::Known(known));
            return Ok(len);
        }
        let given = buffer::given(argument, given, self.writable)?;
        if let Some(expected) = expected.filter(|expected| *expected != given.len) {
            return Err(invalid(
                py,
                argument,
                format!("the buffer has {} bytes, but a block has {expected} bytes", given.len),
            ));
        }
        if given.len == 0 {
            return Err(invalid(py, argument, "the buffer is empty"));
        }
        let len = given.len;
        match self.registry.find(given.address, len) {
            // What was made known is kept by that.
            Some(known) => self.found.push(Found::Known(known)),
            None => {
                self.found.push(Found::New { address: given.address, len });
                self.held.push(given.held);
            }
        }
        Ok(len)
    }

    /// The memories, in the order in which they were taken.
    fn memories(self) -> Option<Vec<SharedBuf>> {
        let new = self.found.iter().filter_map(|found| match found {
            Found::New { address, len } => Some((*address, address.checked_add(*len)?)),
            Found::Known(_) => None,
        });
        let bounds = new.fold(None, |bounds: Option<(usize, usize)>, (start, end)| {
            let (low, high) = bounds.unwrap_or((start, end));
            Some((low.min(start), high.max(end)))
        });
        let region = bounds.map(|(low, high)| (low, buffer::region(low, high - low, self.held)));
        let place = |found: Found| match (found, &region) {
            (Found::Known(known), _) => Some(known),
            (Found::New { address, len }, Some((low, (region, shift)))) => {
                SharedBuf::new(region, address - low + shift, len)
            }
            (Found::New { .. }, None) => None,
        };
        self.found.into_iter().map(place).collect()
    }
}

fn bytes(shape: &BlockShape) -> usize {
    usize::try_from(shape.block_bytes()).unwrap_or(usize::MAX)
}

/// The places that a caller gave; memory is written to if `writable`.
pub(crate) fn laid(
    registry: &Registry,
    given: &Bound<'_, PyAny>,
    asked: &Asked<'_>,
    writable: bool,
) -> PyResult<Laid> {
    let py = given.py();
    let gather = Gather { registry, writable, found: Vec::new(), held: Vec::new() };
    if let Ok(paged) = given.cast::<Paged>() {
        return Ok(Laid::Placed(slots(gather, &paged.get().bound(py), asked, py)?));
    }
    let lost = || {
        invalid(
            py,
            "buffers",
            "the first and the last buffer are too far apart in memory: use buffers of one memory region",
        )
    };
    if !given.is_instance_of::<PyList>() && !given.is_instance_of::<PyTuple>() {
        return whole(gather, given, asked);
    }
    let mut gather = gather;
    let count = given.len()?;
    if count != asked.blocks.len() {
        return Err(invalid(
            py,
            "buffers",
            format!("{count} buffers were given for {} keys", asked.blocks.len()),
        ));
    }
    for (at, (one, shape)) in given.try_iter()?.zip(&asked.shapes).enumerate() {
        gather.take(&format!("buffers[{at}]"), &one?, Some(bytes(shape)))?;
    }
    Ok(Laid::Anywhere(gather.memories().ok_or_else(lost)?))
}

/// One buffer with all blocks, one after the other.
fn whole(mut gather: Gather<'_>, given: &Bound<'_, PyAny>, asked: &Asked<'_>) -> PyResult<Laid> {
    let py = given.py();
    let all = asked.shapes.iter().try_fold(0usize, |all, shape| all.checked_add(bytes(shape)));
    let all = all.ok_or_else(|| {
        invalid(
            py,
            "buffers",
            "the size of all blocks together does not fit the address space: read fewer blocks at once",
        )
    })?;
    let address = given.extract::<usize>().is_ok();
    let found = gather.take("buffers", given, if address { Some(all) } else { None })?;
    if found != all {
        let blocks = asked.blocks.len();
        return Err(invalid(
            py,
            "buffers",
            format!("the buffers have {found} bytes, but {blocks} blocks have {all} bytes"),
        ));
    }
    let memory = gather.memories().and_then(|memories| memories.into_iter().next());
    let memory =
        memory.ok_or_else(|| invalid(py, "buffers", "the memory for the blocks could not be allocated"))?;
    let mut at = 0;
    let mut pages = Vec::with_capacity(asked.blocks.len());
    for shape in &asked.shapes {
        pages.extend(memory.slice(at, bytes(shape)));
        at += bytes(shape);
    }
    Ok(Laid::Anywhere(pages))
}

impl Paged {
    fn bound<'py>(&self, py: Python<'py>) -> (Parts<'py>, &[u32]) {
        let part = |part: &Option<(Py<PyAny>, u64, u64)>| {
            part.as_ref().map(|(buffer, offset, stride)| (buffer.bind(py).clone(), *offset, *stride))
        };
        (self.parts.iter().map(part).collect(), &self.slots)
    }
}

/// Slots of a pool.
fn slots(
    mut gather: Gather<'_>,
    (parts, slots): &(Parts<'_>, &[u32]),
    asked: &Asked<'_>,
    py: Python<'_>,
) -> PyResult<Placed> {
    let Some(shape) = asked.shapes.first() else { return Err(invalid(py, "keys", "the list is empty")) };
    if asked.blocks.iter().any(|block| {
        asked
            .blocks
            .first()
            .is_some_and(|first| (block.group, block.coordinate) != (first.group, first.coordinate))
    }) {
        return Err(invalid(py, "group", "slots can be used only with blocks of one group and rank"));
    }
    if slots.len() != asked.blocks.len() {
        return Err(invalid(
            py,
            "slots",
            format!("{} slots were given for {} keys", slots.len(), asked.blocks.len()),
        ));
    }
    let sizes: Vec<u64> =
        shape.layers().iter().flat_map(|layer| &layer.chunks).map(|chunk| chunk.bytes).collect();
    if parts.len() != sizes.len() {
        return Err(invalid(
            py,
            "parts",
            format!("{} parts were given, but a block has {} parts", parts.len(), sizes.len()),
        ));
    }
    let last = u64::from(slots.iter().copied().max().unwrap_or(0));
    for (at, (part, bytes)) in parts.iter().zip(&sizes).enumerate() {
        let Some((buffer, offset, stride)) = part else { continue };
        let argument = format!("parts[{at}]");
        let found = gather.take(&argument, buffer, None)?;
        let end = stride.checked_mul(last).and_then(|end| end.checked_add(*offset)?.checked_add(*bytes));
        if end.is_none_or(|end| end > found as u64) {
            return Err(invalid(
                py,
                &argument,
                format!("slot {last} ends after the {found} bytes of its buffer"),
            ));
        }
    }
    let lost = || invalid(py, "parts", "the memory for the blocks could not be allocated");
    let memories = gather.memories().ok_or_else(lost)?;
    // Parts may be in one buffer: a memory stands for all that is of its region.
    let mut spans: BTreeMap<u64, (SharedBuf, usize, usize)> = BTreeMap::new();
    for memory in &memories {
        let (start, end) = (memory.offset(), memory.offset() + memory.len());
        let span = spans.entry(memory.region().id()).or_insert((memory.clone(), start, end));
        (span.1, span.2) = (span.1.min(start), span.2.max(end));
    }
    let ids: Vec<u64> = spans.keys().copied().collect();
    let whole =
        |(memory, start, end): (SharedBuf, usize, usize)| SharedBuf::new(memory.region(), start, end - start);
    let starts: BTreeMap<u64, usize> = spans.iter().map(|(id, (_, start, _))| (*id, *start)).collect();
    let whole: Option<Vec<SharedBuf>> = spans.into_values().map(whole).collect();
    let mut memories = memories.iter();
    let mut targets = Vec::with_capacity(parts.len());
    for part in parts {
        let Some((_, offset, stride)) = part else {
            targets.push(None);
            continue;
        };
        let memory = memories.next().ok_or_else(lost)?;
        let id = memory.region().id();
        let number = ids.iter().position(|known| *known == id).ok_or_else(lost)?;
        let start = starts.get(&id).copied().unwrap_or_default();
        let base = offset.checked_add((memory.offset() - start) as u64).ok_or_else(lost)?;
        targets.push(Some(PartTarget { memory: MemoryId(number as u32), base, stride: *stride }));
    }
    Placed::paged(shape, whole.ok_or_else(lost)?, &targets, slots.to_vec()).or_raise(py)
}

/// One buffer for each layer of blocks of one shape.
pub(crate) fn by_layer(
    registry: &Registry,
    given: &[Option<Bound<'_, PyAny>>],
    shape: &BlockShape,
    blocks: u32,
    py: Python<'_>,
) -> PyResult<Placed> {
    let mut gather = Gather { registry, writable: true, found: Vec::new(), held: Vec::new() };
    if given.len() != shape.layers().len() {
        let layers = shape.layers().len();
        return Err(invalid(
            py,
            "layer_buffers",
            format!("{} buffers were given for {layers} layers", given.len()),
        ));
    }
    for (at, (buffer, layer)) in given.iter().zip(shape.layers()).enumerate() {
        let Some(buffer) = buffer else { continue };
        let bytes = layer.bytes().saturating_mul(blocks.into());
        let expected = usize::try_from(bytes).unwrap_or(usize::MAX);
        gather.take(&format!("layer_buffers[{at}]"), buffer, Some(expected))?;
    }
    let memories = gather
        .memories()
        .ok_or_else(|| invalid(py, "layer_buffers", "the memory for the blocks could not be allocated"))?;
    let mut memories = memories.into_iter();
    let layers = given.iter().map(|buffer| buffer.as_ref().and_then(|_| memories.next())).collect();
    Placed::layers(shape, layers, blocks).or_raise(py)
}
