//! Places in a client's memory, checked: afterwards each chunk lies inside one shared memory, and no two overlap.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use kvarts_layout::BlockShape;
use kvarts_layout::plan::{MemoryId, PartTarget};
use kvarts_store::api::Placed;
use kvarts_store::error::Reason;
use kvarts_store::io::SharedBuf;

use super::Mode;
use super::memory::Memory;
use kvarts_wire::addresses::Addresses;
use kvarts_wire::fault::{Fault, Outcome};
use kvarts_wire::limits::REQUEST_BYTES_MAX;
use kvarts_wire::proto;

/// The places of a request, and whether some are in memory that the server does not look at. `layers` are those whose
/// chunks must have one; `holder` lives until nobody uses the memory any more.
pub(super) fn place(
    (memories, addresses): (&BTreeMap<u32, Memory>, &Arc<Addresses>),
    shape: &BlockShape,
    layers: &Range<u32>,
    wire: Option<proto::LocalPlaces>,
    blocks: usize,
    holder: &Arc<dyn Any + Send + Sync>,
) -> Outcome<(Placed, bool)> {
    let wire = wire.ok_or_else(|| Fault::malformed("places: there are none"))?;
    let chunks: Vec<(u32, u64)> = (0u32..)
        .zip(shape.layers())
        .flat_map(|(at, layer)| layer.chunks.iter().map(move |chunk| (at, chunk.bytes)))
        .collect();
    if wire.targets.len() != chunks.len() {
        let (expected, found) = (chunks.len() as u64, wire.targets.len() as u64);
        return Err(Reason::Length { expected, found }.into());
    }
    if wire.slots.len() != blocks {
        let (expected, found) = (blocks as u64, wire.slots.len() as u64);
        return Err(Reason::Length { expected, found }.into());
    }
    let slots = wire.slots.iter().max().map_or(0, |last| u64::from(*last) + 1);
    let (mut used, mut numbers) = (Vec::new(), BTreeMap::new());
    let (mut adopted, mut aside) = (false, 0u64);
    let mut targets = Vec::with_capacity(chunks.len());
    for (target, &(layer, bytes)) in wire.targets.iter().zip(&chunks) {
        if target.memory == 0 {
            if layers.contains(&layer) {
                return Err(Fault::malformed("places: a chunk that is wanted has none"));
            }
            // Reserved, and never touched.
            targets.push(PartTarget { memory: MemoryId(u32::MAX), base: aside, stride: bytes });
            aside = aside.saturating_add(bytes.saturating_mul(slots));
            continue;
        }
        let number = match numbers.get(&target.memory) {
            Some(&number) => number,
            None => {
                let memory = memories.get(&target.memory).ok_or_else(|| {
                    Fault::malformed(format!("places: memory {} is not shared", target.memory))
                })?;
                adopted |= memory.mode == Mode::Adopted;
                let whole =
                    SharedBuf::new(&memory.region, 0, memory.region.len()).ok_or(Reason::OutOfBounds)?;
                let number = used.len() as u32;
                used.push(whole.kept_by(Arc::clone(holder)));
                numbers.insert(target.memory, number);
                number
            }
        };
        targets.push(PartTarget { memory: MemoryId(number), base: target.base, stride: target.stride });
    }
    if aside > 0 {
        if aside > REQUEST_BYTES_MAX {
            return Err(Reason::TooMany("bytes").into());
        }
        let number = used.len() as u32;
        used.push(addresses.take(aside)?);
        for target in targets.iter_mut().filter(|target| target.memory.0 == u32::MAX) {
            target.memory.0 = number;
        }
    }
    Ok((Placed::paged(shape, used, &targets, wire.slots)?, adopted))
}
