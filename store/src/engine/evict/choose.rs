//! Which blocks of a shard go: those that the policy ranks highest, for as many bytes as are wanted.
//!
//! Four walks over the index, each a partition at a time: what was used of each record; which rank it has at least; how
//! many bytes each rank has, which gives the rank that is enough; the blocks at that rank and above. So the choice is
//! exact, a use of a block costs nothing beyond its heat, and memory is that of a few numbers for each record while it
//! lasts. The walks are paid by what they free: at least a segment's worth.
//!
//! What holds for every policy:
//! - a block under a lease stays, and so do those before it in its record;
//! - a block does not go before those behind it in its record: children before parents. Of equal rank the later goes;
//! - where single blocks cannot be given back (layer-block layout, encoded records) a record goes as a whole, when the
//!   last of its blocks may.

use std::collections::{BTreeMap, BTreeSet};

use kvarts_layout::Layout;
use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::format::body::ENCODING_RAW;

use super::batch::is_boundary;
use super::policy::{Candidate, Chosen, Policy};
use crate::engine::log::Log;
use crate::engine::notify::yield_now;
use crate::engine::runs::RunClass;
use crate::engine::segment::{Segment, SegmentState};
use crate::index::{BlockFingerprint, Entry, Heat, Location, Lookup, RecordCursor, RecordInfo};

/// Ranks above count as this one.
const RANK_MAX: u32 = (1 << 16) - 1;
/// Bytes a token that cost as much as usual to compute anew.
const USUAL_BYTES_A_TOKEN: u64 = 64 << 10;

/// Blocks of one record that go. Where they expire at different times, the index has several numbers for it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Leaving {
    pub(crate) blocks: Vec<(Location, BlockFingerprint)>,
}

/// What goes, by segment and by the page at which the record begins.
pub(crate) type Victims = BTreeMap<u32, BTreeMap<u32, Leaving>>;

/// What is known of a record while blocks are chosen.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    segment: u32,
    page: u32,
    /// Bytes that a block gives back; 0 for a record that nothing is chosen of.
    share: u32,
    /// The first block that was used since it was put, plus one; 0 for none.
    used: u16,
    /// How many blocks it was written with.
    blocks: u16,
    /// The lowest rank of its blocks, and one behind the last that has it: none before that one goes earlier.
    least: u32,
    least_end: u16,
    whole: bool,
    boundary: bool,
    cost: i8,
    /// One behind the last block that stays.
    keep: u16,
}

/// Whether blocks of a segment may go and be given back at this moment.
pub(crate) fn is_punchable(log: &Log, segment: &Segment) -> bool {
    segment.state.get() == SegmentState::Sealed && log.is_unread(segment) && !segment.is_unpunchable()
}

fn boundary_and_cost(class: &RunClass) -> (bool, i8) {
    let bytes = class.layout_of(1).map_or(0, |layout| layout.content_bytes());
    let tokens = u64::from(class.namespace.block_tokens).max(1);
    let each = (bytes / tokens).max(1);
    // Fewer bytes for a token: each of them is worth more.
    let cost = USUAL_BYTES_A_TOKEN.ilog2() as i8 - each.ilog2() as i8;
    (is_boundary(class), cost)
}

struct Choice<'a> {
    log: &'a Log,
    policy: &'a dyn Policy,
    /// By the record's number.
    known: Vec<Known>,
    /// Segments of which some block stays.
    in_use: BTreeSet<u32>,
    now: u16,
}

impl<'a> Choice<'a> {
    fn new(log: &'a Log, policy: &'a dyn Policy, wanted: &dyn Fn(&RunClass) -> bool) -> Self {
        let mut known = Vec::new();
        let (mut cursor, mut some) = (Some(RecordCursor::default()), Vec::new());
        let segments = log.segments.borrow();
        let mut classes = BTreeMap::new();
        while let Some(from) = cursor {
            cursor = log.shared.index.records().snapshot(from, &mut some);
            for (id, record) in &some {
                let ours = u32::from(record.shard) == log.shard
                    && segments.get(&record.segment).is_some_and(|segment| is_punchable(log, segment));
                if !ours || record.live == 0 {
                    continue;
                }
                let class = classes.entry(record.class).or_insert_with(|| {
                    let class = log.shared.classes.get(record.class).filter(|class| wanted(class));
                    class.map(|class| {
                        let whole = class.encoding != ENCODING_RAW || class.layout == Layout::LayerBlock;
                        (whole, boundary_and_cost(&class))
                    })
                });
                let Some((whole, (boundary, cost))) = *class else { continue };
                let at = id.0 as usize;
                if known.len() <= at {
                    known.resize(at + 1, Known::default());
                }
                if let Some(slot) = known.get_mut(at) {
                    *slot = Known { share: share_of(record, whole), ..Known::default() };
                    (slot.segment, slot.page) = (record.segment, record.page);
                    (slot.whole, slot.boundary, slot.cost) = (whole, boundary, cost);
                    (slot.blocks, slot.least) = (record.blocks.get(), RANK_MAX);
                }
            }
        }
        Self { log, policy, known, in_use: BTreeSet::new(), now: log.shared.epoch() }
    }

    /// Shows every live block of a record of which something may go.
    async fn each(&mut self, mut look: impl FnMut(&mut Self, &Entry, Location)) {
        let mut entries = Vec::new();
        let index = &self.log.shared.index;
        for partition in 0..index.partitions() {
            index.snapshot(partition, &mut entries);
            for entry in &entries {
                let Lookup::Live(at) = entry.state else { continue };
                if self.known.get(at.record.0 as usize).is_some_and(|known| known.share > 0) {
                    look(self, entry, at);
                }
            }
            // Nobody waits longer for the executor than one partition takes.
            yield_now().await;
        }
    }

    fn known(&mut self, at: Location) -> Option<&mut Known> {
        self.known.get_mut(at.record.0 as usize)
    }

    fn candidate(&self, heat: Heat, at: Location) -> Candidate {
        let known = self.known.get(at.record.0 as usize).copied().unwrap_or_default();
        Candidate {
            age: heat.age(self.now),
            frequency: heat.frequency,
            main: heat.main,
            tip: !known.whole && at.block + 1 == known.blocks && !heat.main,
            passed: !known.whole && known.used > 0 && heat.frequency == 0 && at.block >= known.used,
            boundary: known.boundary,
            cost: known.cost,
        }
    }

    /// Zero for a block under a lease.
    fn own_rank(&self, entry: &Entry, at: Location) -> u32 {
        match entry.leased {
            true => 0,
            false => self.policy.rank(&self.candidate(entry.heat, at)).clamp(1, RANK_MAX),
        }
    }

    /// No higher than that of the blocks behind it, as far as one number for each record tells; `None` if it stays.
    fn rank(&self, entry: &Entry, at: Location) -> Option<u32> {
        let known = self.known.get(at.record.0 as usize)?;
        let rank = match known.whole || at.block < known.least_end {
            true => known.least,
            false => self.own_rank(entry, at),
        };
        (rank > 0).then_some(rank)
    }
}

/// Bytes that go with a block: of a record that goes as a whole its header as well.
fn share_of(record: &RecordInfo, whole: bool) -> u32 {
    let bytes = match whole {
        true => record.share(record.live) / u64::from(record.live.max(1)),
        false => u64::from(record.payload_pages) * PAGE_BYTES / u64::from(record.blocks.get()),
    };
    u32::try_from(bytes).unwrap_or(u32::MAX).max(1)
}

/// Blocks that together have about `wanted` bytes, those of the highest rank. Whom the policy spares begins anew, and
/// others are taken for it.
pub(crate) async fn choose(
    log: &Log,
    policy: &dyn Policy,
    of: &dyn Fn(&RunClass) -> bool,
    wanted: u64,
) -> Victims {
    let mut choice = Choice::new(log, policy, of);
    choice
        .each(|choice, entry, at| {
            let Some(known) = choice.known(at) else { return };
            if entry.heat.frequency > 0 {
                known.used = if known.used == 0 { at.block + 1 } else { known.used.min(at.block + 1) };
            }
        })
        .await;
    choice
        .each(|choice, entry, at| {
            let rank = choice.own_rank(entry, at);
            let Some(known) = choice.known(at) else { return };
            let end = if rank < known.least { 0 } else { known.least_end };
            if rank <= known.least {
                (known.least, known.least_end) = (rank, end.max(at.block + 1));
            }
        })
        .await;
    let mut bytes = vec![0u64; RANK_MAX as usize + 1];
    choice
        .each(|choice, entry, at| {
            let share = choice.known(at).map_or(0, |known| u64::from(known.share));
            if let Some(rank) = choice.rank(entry, at)
                && let Some(sum) = bytes.get_mut(rank as usize)
            {
                *sum += share;
            }
        })
        .await;
    let mut sum = 0u64;
    let enough = (1..=RANK_MAX).rev().find(|rank| {
        sum += bytes.get(*rank as usize).copied().unwrap_or(0);
        sum >= wanted
    });
    let enough = enough.unwrap_or(1);
    let above = sum.saturating_sub(bytes.get(enough as usize).copied().unwrap_or(0));
    drop(bytes);
    collect(choice, enough, wanted.saturating_sub(above), wanted).await
}

/// A block that is to go.
struct Picked {
    rank: u32,
    at: Location,
    print: BlockFingerprint,
    heat: Heat,
}

/// The blocks above a rank, and of those at it as many as have `rest` bytes.
async fn collect(mut choice: Choice<'_>, enough: u32, rest: u64, wanted: u64) -> Victims {
    let (mut above, mut level) = (Vec::new(), Vec::new());
    choice
        .each(|choice, entry, at| match choice.rank(entry, at) {
            Some(rank) if rank >= enough => {
                let block = Picked { rank, at, print: entry.print, heat: entry.heat };
                if rank == enough { level.push(block) } else { above.push(block) }
            }
            _ => choice.stays(at),
        })
        .await;
    // Those that are all that is left of their segment first, then the later in the log: what hangs on others was put
    // after them.
    level.sort_unstable_by_key(|block| {
        let known = choice.known.get(block.at.record.0 as usize).copied().unwrap_or_default();
        let last = !choice.in_use.contains(&known.segment);
        std::cmp::Reverse((last, known.segment, known.page, block.at.block))
    });
    let mut left = rest;
    for block in level {
        let Some(known) = choice.known(block.at).map(|known| *known) else { continue };
        // A record that goes as a whole is not left in the middle.
        if left > 0 || known.whole {
            left = left.saturating_sub(u64::from(known.share));
            above.push(block);
        } else {
            choice.stays(block.at);
        }
    }
    let mut spared = Vec::new();
    above.retain(|block| match choice.policy.choose(&choice.candidate(block.heat, block.at)) {
        Chosen::Goes => true,
        Chosen::Stays(frequency) => {
            spared.push((block.at, block.print, Heat { frequency, main: true, epoch: choice.now }));
            false
        }
    });
    for (at, print, heat) in spared {
        choice.log.shared.index.set_heat(print, at, heat);
        choice.stays(at);
    }
    choice.spare_others(&above, wanted);
    choice.victims(&above)
}

impl Choice<'_> {
    /// The block stays, and so do those before it in its record.
    fn stays(&mut self, at: Location) {
        let Some(known) = self.known(at) else { return };
        known.keep = known.keep.max(at.block + 1);
        let segment = known.segment;
        self.in_use.insert(segment);
    }

    fn goes(&self, at: Location) -> bool {
        let known = self.known.get(at.record.0 as usize).copied().unwrap_or_default();
        at.block >= known.keep && !(known.whole && known.keep > 0)
    }

    /// If enough segments are emptied as a whole, what ranks no higher than all that was in them stays elsewhere until
    /// the next time. A segment is more than what lives in it, so emptying one as a rule leaves a little to be had of
    /// the next: a hole there would be the end of that one's file, whose blocks the file system takes back, finds again
    /// for another one, and writes for the first time.
    fn spare_others(&mut self, picked: &[Picked], wanted: u64) {
        let mut least = BTreeMap::new();
        for block in picked {
            let Some(segment) = self.known.get(block.at.record.0 as usize).map(|known| known.segment) else {
                continue;
            };
            if self.goes(block.at) {
                let rank = least.entry(segment).or_insert(block.rank);
                *rank = block.rank.min(*rank);
            } else {
                self.in_use.insert(segment);
            }
        }
        let segments = self.log.segments.borrow();
        let hollow = |number| segments.get(number).is_none_or(|segment| self.log.is_hollow(segment));
        let emptied = least.iter().filter(|(number, _)| !self.in_use.contains(number) && !hollow(number));
        let mut ranks: Vec<u32> = emptied.map(|(_, rank)| *rank).collect();
        drop(segments);
        ranks.sort_unstable();
        let enough = usize::try_from(wanted.div_ceil(self.log.shared.segment_bytes)).unwrap_or(usize::MAX);
        let Some(rank) = ranks.len().checked_sub(enough.max(1)).and_then(|at| ranks.get(at)) else { return };
        for block in picked.iter().filter(|block| block.rank <= *rank) {
            let segment = self.known.get(block.at.record.0 as usize).map(|known| known.segment);
            if segment.is_some_and(|segment| self.in_use.contains(&segment)) {
                self.stays(block.at);
            }
        }
    }

    /// Those that go, where they are looked for.
    fn victims(&self, picked: &[Picked]) -> Victims {
        let mut victims = Victims::new();
        for block in picked.iter().filter(|block| self.goes(block.at)) {
            let Some(known) = self.known.get(block.at.record.0 as usize) else { continue };
            let records = victims.entry(known.segment).or_default();
            let leaving = records.entry(known.page).or_default();
            leaving.blocks.push((block.at, block.print));
        }
        victims
    }
}
