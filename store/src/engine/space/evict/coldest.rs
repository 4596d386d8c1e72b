//! Which segments of a shard are looked at when blocks must go: those whose oldest part is the oldest.
//!
//! Each segment carries the coarse time at which about a sixteenth of a segment's bytes in it was used last, as it was
//! when its blocks were listed last; before that, the time of its oldest record. Uses make it later without a notice,
//! so it is never later than the truth: who lists the earliest of them finds the truth, notes it, and goes on with the
//! next. So a choice costs what a few segments hold, however many blocks and segments there are, and each segment's
//! turn comes.

use kvarts_contract::class::Class;
use std::collections::BTreeMap;
use std::rc::Rc;

use kvarts_layout::format::footer::Footer;

use crate::engine::space::Space;
use crate::engine::tasks::steps::{AT_ONCE, Section};
use crate::engine::volume::Volume;
use crate::engine::volume::segment::{Segment, SegmentState};

/// Segments whose blocks are listed before it is asked whether that is enough. A put that waits for room waits for their
/// footers, behind other puts' writes: in a store that is written round and round the first one is enough.
pub(crate) const LOOKED_AT: usize = 2;
/// The age of a segment is that of such a part of it: less would give it a turn for a few old blocks.
pub(crate) const OLDEST_PARTS: u64 = 16;
/// Segments whose blocks are listed for one choice, at most.
const LISTED_MAX: usize = 64;

/// Footers of segments, with the generation that they were read of.
pub(crate) type Footers = BTreeMap<u32, (u64, Footer)>;

/// Whether blocks of a segment may go and be given back at this moment.
pub(crate) fn is_punchable(volume: &Volume, segment: &Segment) -> bool {
    segment.state.get() == SegmentState::Sealed && volume.is_unread(segment) && !segment.is_unpunchable()
}

/// The segments from which blocks may go, those first of which the oldest part is the oldest; of one age in log order.
pub(crate) async fn coldest(space: &Space, section: &mut Section<'_>) -> Vec<Rc<Segment>> {
    let mut all: Vec<(i64, u64, Rc<Segment>)> = Vec::new();
    let mut next = Some(0);
    while let Some(from) = next.take() {
        let mut looked = 0;
        for (number, segment) in space.volume.segments.borrow().range(from..).take(AT_ONCE as usize) {
            next = number.checked_add(1);
            looked += 1;
            if is_punchable(&space.volume, segment) && segment.book.live() > 0 {
                all.push((segment.coldest.get(), segment.first_sequence.get(), Rc::clone(segment)));
            }
        }
        next = next.filter(|_| looked == AT_ONCE);
        section.step(looked).await;
        if all.len() > 2 * LISTED_MAX {
            keep_first(&mut all);
        }
    }
    if kvarts_layout::planted!("coldest-by-the-log") {
        all.iter_mut().for_each(|one| one.0 = 0);
    }
    keep_first(&mut all);
    all.sort_unstable_by_key(|(coldest, sequence, _)| (*coldest, *sequence));
    all.into_iter().map(|(.., segment)| segment).collect()
}

fn keep_first(all: &mut Vec<(i64, u64, Rc<Segment>)>) {
    if all.len() > LISTED_MAX && !kvarts_layout::planted!("eviction-lists-all") {
        all.select_nth_unstable_by_key(LISTED_MAX, |(coldest, sequence, _)| (*coldest, *sequence));
        all.truncate(LISTED_MAX);
    }
}

/// The blocks of one segment by rank, as a sample of bounded size.
#[derive(Debug, Default)]
pub(crate) struct Sample {
    /// Rank, and bytes that it stands for.
    ranks: Vec<(u32, u64)>,
    every: u64,
    seen: u64,
}

/// Blocks of a segment that are remembered by rank, about.
const SAMPLED: u64 = 1024;

impl Sample {
    /// Of a segment that lists `blocks` blocks.
    pub(crate) fn of(blocks: u64) -> Self {
        Self { ranks: Vec::new(), every: blocks.div_ceil(SAMPLED).max(1), seen: 0 }
    }

    pub(crate) fn add(&mut self, rank: u32, bytes: u64) {
        if self.seen.is_multiple_of(self.every) {
            self.ranks.push((rank, bytes * self.every));
        }
        self.seen += 1;
    }

    /// The rank above which, of ranks up to `most`, `bytes` bytes lie; `None` if there are none.
    pub(crate) fn rank_of(&mut self, bytes: u64, most: u32) -> Option<u32> {
        self.ranks.retain(|(rank, _)| *rank <= most);
        self.ranks.sort_unstable();
        let mut sum = 0u64;
        let enough = self.ranks.iter().rev().find(|(_, share)| {
            sum += share;
            sum >= bytes
        });
        enough.or(self.ranks.first()).map(|(rank, _)| *rank)
    }
}

/// Reads footers for a choice, and keeps them for the task that gives back what was chosen.
pub(crate) async fn footers(volume: &Volume, some: &[Rc<Segment>], footers: &mut Footers) {
    for (segment, footer) in some.iter().zip(volume.read_footers(some, Class::Put).await) {
        if let Ok(footer) = footer {
            footers.insert(segment.number, (segment.generation.get(), footer));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_of_a_large_segment_is_small_and_near_the_truth() {
        let mut sample = Sample::of(100_000);
        (0..100_000u32).for_each(|n| sample.add((n * 7919) % 100_000, 10));
        assert!(sample.ranks.len() <= 1100);
        let rank = sample.rank_of(100_000, 50_000).unwrap();
        assert!((38_000..42_000).contains(&rank), "{rank}");
        assert_eq!(Sample::of(5).rank_of(10, 7), None);
        let mut few = Sample::of(2);
        few.add(3, 1);
        few.add(9, 1);
        assert_eq!(few.rank_of(100, 20), Some(3), "all there is");
    }
}
