//! Places in a client's memory, checked: afterwards each chunk lies inside one shared memory, and no two overlap.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use kvarts_contract::api::Placed;
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::error::Reason;
use kvarts_layout::BlockShape;
use kvarts_layout::plan::{MemoryId, PartTarget};

use super::memory::Memory;
use kvarts_wire::fault::{Fault, Outcome};
use kvarts_wire::proto;

/// The places of a request, and whether some are in memory that the client verifies. `layers` are those whose
/// chunks must have one; `holder` lives until the memory is not used any more.
pub(super) fn place(
    memories: &BTreeMap<u32, Memory>,
    shape: &BlockShape,
    layers: &Range<u32>,
    wire: Option<proto::LocalPlaces>,
    blocks: usize,
    holder: &Arc<dyn Any + Send + Sync>,
) -> Outcome<(Placed, bool)> {
    let wire = wire.ok_or_else(|| Fault::malformed("places: the list is empty"))?;
    let layer_of_chunk =
        (0u32..).zip(shape.layers()).flat_map(|(at, layer)| layer.chunks.iter().map(move |_| at));
    if wire.targets.len() as u64 != u64::from(shape.chunk_count()) {
        let (expected, found) = (u64::from(shape.chunk_count()), wire.targets.len() as u64);
        return Err(Reason::Length { expected, found }.into());
    }
    if wire.slots.len() != blocks {
        let (expected, found) = (blocks as u64, wire.slots.len() as u64);
        return Err(Reason::Length { expected, found }.into());
    }
    let (mut used, mut numbers, mut client_verifies) = (Vec::new(), BTreeMap::new(), false);
    let mut targets = Vec::with_capacity(wire.targets.len());
    for (target, layer) in wire.targets.iter().zip(layer_of_chunk) {
        if target.memory == 0 {
            if layers.contains(&layer) {
                return Err(Fault::malformed(format!(
                    "places: a requested chunk of layer {layer} has no destination in memory"
                )));
            }
            targets.push(None);
            continue;
        }
        let number = match numbers.get(&target.memory) {
            Some(&number) => number,
            None => {
                let memory = memories.get(&target.memory).ok_or_else(|| {
                    Fault::malformed(format!(
                        "places: the client has shared no memory region with the number {}",
                        target.memory
                    ))
                })?;
                client_verifies |= memory.client_verifies;
                let whole =
                    SharedBuf::new(&memory.region, 0, memory.region.len()).ok_or(Reason::OutOfBounds)?;
                let number = used.len() as u32;
                used.push(whole.kept_by(Arc::clone(holder)));
                numbers.insert(target.memory, number);
                number
            }
        };
        let (base, stride) = (target.base, target.stride);
        targets.push(Some(PartTarget { memory: MemoryId(number), base, stride }));
    }
    Ok((Placed::paged(shape, used, &targets, wire.slots)?, client_verifies))
}
