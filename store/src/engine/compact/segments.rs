//! Empties sealed segments in which little is live: what expired is dropped, what is live is moved, and then the
//! segment is the cheapest that reclaim can find.
//!
//! Nothing is moved that would make reclaim evict live blocks for its sake: a segment is only begun when what is
//! live in it fits into what is free.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use kvarts_layout::format::footer::{Content, Entry};

use super::cold;
use super::encode::Cold;
use super::relocate::relocate;
use super::room::{live_by_segment, room};
use super::{CompactOptions, CompactReport, Pace};
use crate::engine::shard::Shard;
use crate::engine::tasks::steps::Section;
use crate::engine::volume::Volume;
use crate::engine::volume::segment::{Segment, SegmentState};
use crate::index::{OwnerCursor, RecordId};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;

/// The records of a segment that have live blocks, in the order in which they lie: chains stay together. The footer
/// names them; where it cannot be read, the shard's records are looked through.
pub(super) async fn live_records(volume: &Volume, number: u32) -> Vec<RecordId> {
    let segment = volume.segments.borrow().get(&number).map(Rc::clone);
    let mut section = Section::begin(&volume.shared.work.evictions, &*volume.shared.clock);
    let (mut found, mut some) = (Vec::new(), Vec::new());
    if let Some(segment) = segment {
        section.pause();
        if let Ok(footer) = volume.read_footer(&segment, Class::Background).await {
            for entry in &footer.records {
                let before = found.len();
                found.extend(records_of(volume, &segment, entry));
                section.step(1 + (found.len() - before) as u64).await;
            }
            return found;
        }
    }
    let Ok(shard) = u16::try_from(volume.shard) else { return found };
    let (mut cursor, mut by_page) = (Some(OwnerCursor::default()), Vec::new());
    while let Some(from) = cursor {
        cursor = volume.shared.index.records().snapshot_of((shard, None), from, &mut some);
        let here = some.iter().filter(|(_, record, _)| record.segment == number && record.live > 0);
        by_page.extend(here.map(|(id, record, _)| (record.page, *id)));
        section.step(some.len().max(1) as u64).await;
    }
    by_page.sort_unstable();
    by_page.into_iter().map(|(_, id)| id).collect()
}

/// The index's records for an entry of a footer: where the times of its blocks differ there are several.
fn records_of(volume: &Volume, segment: &Segment, entry: &Entry) -> BTreeSet<RecordId> {
    let Content::Blocks(blocks) = &entry.content else { return BTreeSet::new() };
    let prints = cold::prints(volume, segment, blocks).into_iter().flatten();
    prints.filter_map(|print| cold::live_here(volume, segment, entry, print)).collect()
}

/// Empties what is worth it in each of these shards.
pub(crate) async fn empty_all(
    shards: &[Rc<Shard>],
    options: &CompactOptions,
    pace: &mut Pace,
) -> Result<CompactReport, Reason> {
    let mut report = CompactReport::default();
    for shard in shards.iter().filter(|shard| !shard.volume.is_out()) {
        report.add(empty(shard, options, pace).await?);
        if options.encode_in_place {
            report.add(cold::encode(shard, options, pace).await?);
        }
    }
    Ok(report)
}

/// Empties the segments of a shard that are worth it, the emptiest first.
async fn empty(
    shard: &Rc<Shard>,
    options: &CompactOptions,
    pace: &mut Pace,
) -> Result<CompactReport, Reason> {
    let mut report = CompactReport::default();
    // Segments that this compaction fills itself are not for it to empty.
    let begun = shard.volume.sequence.get();
    let mut tried = Vec::new();
    while pace.ready().await {
        if let Some(reason) = shard.volume.refuses_writes() {
            return Err(reason);
        }
        let live = live_by_segment(&shard.volume);
        let Some(segment) = choose(shard, options, &live, (begun, &tried)) else { break };
        tried.push(segment);
        if empty_one(shard, segment, (options, &mut *pace), &mut report).await? {
            report.segments_emptied += 1;
        }
    }
    Ok(report)
}

/// The sealed segment with the fewest live bytes, if enough of it is dead and there is room for the rest.
fn choose(
    shard: &Shard,
    options: &CompactOptions,
    live: &BTreeMap<u32, u64>,
    (begun, tried): (u64, &[u32]),
) -> Option<u32> {
    let segment_bytes = shard.volume.shared.segment_bytes;
    let keep = 1000u64.saturating_sub(u64::from(options.dead_thousandths));
    let most = segment_bytes.saturating_mul(keep) / 1000;
    let room = room(shard, live);
    let segments = shard.volume.segments.borrow();
    let worth = |(number, bytes): &(&u32, &u64)| {
        let sealed = segments
            .get(*number)
            .is_some_and(|one| one.state.get() == SegmentState::Sealed && one.first_sequence.get() < begun);
        sealed && **bytes > 0 && **bytes <= most && **bytes <= room && !tried.contains(number)
    };
    live.iter().filter(worth).min_by_key(|(_, bytes)| **bytes).map(|(number, _)| *number)
}

/// Moves what is live in a segment; true if nothing is left in it.
async fn empty_one(
    shard: &Rc<Shard>,
    segment: u32,
    (options, pace): (&CompactOptions, &mut Pace),
    report: &mut CompactReport,
) -> Result<bool, Reason> {
    let cold = Cold { after: options.encode_cold_after, only: false };
    for record in live_records(&shard.volume, segment).await {
        if !pace.ready().await {
            return Ok(false);
        }
        match relocate(shard, record, &|_| true, &cold).await {
            Ok(moved) => {
                pace.spend(moved.bytes_read + moved.bytes_written);
                report.take(moved);
            }
            Err(reason @ (Reason::Latched(_) | Reason::NoSpace(_))) => return Err(reason),
            Err(_) => report.records_failed += 1,
        }
    }
    Ok(live_by_segment(&shard.volume).get(&segment).is_none_or(|live| *live == 0))
}
