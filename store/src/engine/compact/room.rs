//! What is live in each segment of a shard, and how much may be appended without evicting any of it.

use std::collections::BTreeMap;

use crate::engine::shard::Shard;
use crate::engine::volume::Volume;
use crate::engine::volume::segment::SegmentState;

/// Live bytes of each segment of a shard that has some, by its book.
pub(crate) fn live_by_segment(volume: &Volume) -> BTreeMap<u32, u64> {
    let segments = volume.segments.borrow();
    let live = segments.iter().map(|(number, segment)| (*number, segment.book.live()));
    live.filter(|(_, bytes)| *bytes > 0).collect()
}

/// Bytes that can be appended before reclaim would have to evict live blocks for it. Segments that are mostly dead
/// count with what is dead in them: they are recycled next.
pub(crate) fn room(shard: &Shard, live: &BTreeMap<u32, u64>) -> u64 {
    let segment_bytes = shard.volume.shared.segment_bytes;
    let (allocated, budget) = shard.volume.shared.space();
    let (mut free, mut open) = (0, 0);
    for (number, segment) in &*shard.volume.segments.borrow() {
        match segment.state.get() {
            SegmentState::Open => open = segment_bytes.saturating_sub(segment.tail.borrow().next),
            SegmentState::Sealed => {
                let allocated = segment.book.allocated();
                let dead = allocated.saturating_sub(live.get(number).copied().unwrap_or(0));
                free += if dead >= segment_bytes / 2 { dead } else { 0 };
            }
            SegmentState::Free if !shard.space.is_hollow(segment) => free += segment_bytes,
            _ => {}
        }
    }
    free + open + budget.saturating_sub(allocated)
}
