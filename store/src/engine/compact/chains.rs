//! Merges chains of small records: agent sessions seal hundreds of one-block records, which lie in all shards because
//! each is placed by its own key. Consecutive ones become one record in the shard of its first key, so that a layer
//! can be read in one piece again.
//!
//! One task coordinates, on the first executor. It asks each executor which small records lie in its shards (from the
//! footers of its segments), joins them by their parents, has each chain's blocks gathered by the executors that
//! have them, and written by the one that gets them. Memory is bounded by the survey's limit and one record.
//!
//! Deletes: a tombstone is written in every shard, so what `relocate` says of one shard holds here too. Of blocks that
//! come from another shard, tombstones of the new shard are compared with its sequence at the survey.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use kvarts_layout::arrange::LAYOUT_VERSION;
use kvarts_layout::format::body::{Blocks, Parent};
use kvarts_layout::format::footer::{Content, Entry};
use kvarts_layout::format::{PAGE_BYTES, page_align};
use kvarts_layout::{BlockKey, Layout};

use super::gather::{Gathered, Taken, gather};
use super::head::Head;
use super::relocate::{Moved, expires_ms, write};
use super::room::{live_by_segment, room};
use super::{CompactOptions, CompactReport, Pace};
use crate::engine::shard::Shard;
use crate::engine::shared::Shared;
use crate::engine::shared::record_class::RecordClass;
use crate::engine::shared::record_class::RecordForm;
use crate::engine::volume::Volume;
use crate::engine::volume::segment::{Segment, SegmentState};
use crate::index::{Lookup, RecordId};
use kvarts_contract::error::Reason;
use kvarts_contract::ticket::{Reply, ticket};

/// Small records that one survey of a shard lists at most.
const SURVEY_MAX: usize = 64 << 10;

/// A small record all of whose blocks are live.
#[derive(Clone, Debug)]
pub(crate) struct Small {
    record: RecordId,
    shard: u32,
    class: Arc<RecordClass>,
    parent: Parent,
    first: [u8; 32],
    last: [u8; 32],
    blocks: u32,
    expires: u32,
}

/// What a shard has.
#[derive(Debug)]
pub(crate) struct Survey {
    shard: u32,
    /// The next sequence of its log.
    sequence: u64,
    /// Bytes that may be appended without evicting for it.
    room: u64,
    small: Vec<Small>,
}

/// The shards of a store, on whichever executors they are.
pub(crate) trait Shards {
    /// How many there are.
    fn count(&self) -> u32;
    /// Asks for the small records of a shard.
    fn survey(&self, shard: u32, reply: Reply<Survey>) -> Result<(), Reason>;
    /// Asks for these records of a shard.
    fn gather(
        &self,
        shard: u32,
        records: Vec<RecordId>,
        reply: Reply<Result<Vec<Gathered>, Reason>>,
    ) -> Result<(), Reason>;
    /// Has blocks written as a record of a shard.
    fn rewrite(
        &self,
        shard: u32,
        record: Box<(Head, Vec<Taken>)>,
        reply: Reply<Result<Moved, Reason>>,
    ) -> Result<(), Reason>;
}

fn gone<T, E>(answer: Result<T, E>) -> Result<T, Reason> {
    answer.map_err(|_| Reason::Busy("the store is closing"))
}

/// Lists the small records of a shard.
pub(crate) async fn survey(shard: &Rc<Shard>) -> Survey {
    let (sequence, live) = (shard.volume.sequence.get(), live_by_segment(&shard.volume));
    let mut survey =
        Survey { shard: shard.volume.shard, sequence, room: room(shard, &live), small: Vec::new() };
    let segments: Vec<_> = shard.volume.segments.borrow().values().map(Rc::clone).collect();
    for segment in segments.iter().filter(|segment| live.get(&segment.number).is_some_and(|live| *live > 0)) {
        let entries = match segment.state.get() {
            // As the footer will list them.
            SegmentState::Open => segment.tail.borrow().entries.clone(),
            SegmentState::Sealed => match shard.volume.read_footer(segment).await {
                Ok(footer) => footer.records,
                // What cannot be read is not merged.
                Err(_) => continue,
            },
            _ => continue,
        };
        for entry in &entries {
            if survey.small.len() == SURVEY_MAX {
                return survey;
            }
            survey.small.extend(small(&shard.volume, segment, entry));
        }
    }
    survey
}

fn small(volume: &Volume, segment: &Segment, entry: &Entry) -> Option<Small> {
    let Content::Blocks(blocks) = &entry.content else { return None };
    let shared = &volume.shared;
    if blocks.parent == Parent::Unknown || entry.payload_bytes > shared.record_bytes_max / 2 {
        return None;
    }
    let (record, class, expires) = live_record(volume, segment, entry, blocks)?;
    Some(Small {
        record,
        shard: volume.shard,
        class,
        parent: blocks.parent,
        first: blocks.blocks.first()?.key,
        last: blocks.blocks.last()?.key,
        blocks: blocks.blocks.len() as u32,
        expires,
    })
}

/// The index's record for an entry of a footer, if all of its blocks are live.
fn live_record(
    volume: &Volume,
    segment: &Segment,
    entry: &Entry,
    blocks: &Blocks,
) -> Option<(RecordId, Arc<RecordClass>, u32)> {
    let shared = &volume.shared;
    let coordinate = kvarts_layout::Coordinate::from_u64(blocks.coordinate)?;
    let namespace = segment.local(blocks.namespace);
    let key = BlockKey(blocks.blocks.first()?.key);
    let print = shared.index.key().of(namespace, &key, kvarts_layout::Group(blocks.group), coordinate);
    let Lookup::Live(at) = shared.index.lookup(print) else { return None };
    let info = shared.index.records().get(at.record)?;
    let here = volume.is_at(segment, entry.offset, &info)
        && info.live == info.blocks.get()
        && usize::from(info.live) == blocks.blocks.len();
    let class = shared.classes.get(info.class)?;
    (here && class.namespace.local == namespace).then_some((at.record, class, info.expires))
}

/// A run of small records, in prefix order.
type Chain = Vec<Small>;

/// Joins small records by their parents into chains that fit into one record each. Where a prefix forks, one branch
/// goes on and the others begin chains of their own.
fn chains(small: Vec<Small>, shared: &Shared, least: u32) -> Vec<Chain> {
    // Stored chunks are copied as they are, so only records of one encoding are merged.
    let name = |one: &Small| {
        let class = &one.class;
        (class.namespace.local, class.group.0, class.coordinate.to_u64(), class.encoding)
    };
    let mut by_parent = BTreeMap::new();
    for (at, one) in small.iter().enumerate() {
        if let Parent::Key(parent) = one.parent {
            by_parent.entry((name(one), parent, one.expires)).or_insert(at);
        }
    }
    let mut follows = vec![None; small.len()];
    let mut has_before = BTreeSet::new();
    for (at, one) in small.iter().enumerate() {
        if let Some(&next) = by_parent.get(&(name(one), one.last, one.expires))
            && next != at
            && has_before.insert(next)
            && let Some(slot) = follows.get_mut(at)
        {
            *slot = Some(next);
        }
    }
    let mut chains = Vec::new();
    for start in (0..small.len()).filter(|at| !has_before.contains(at)) {
        let (mut chain, mut bytes, mut next) = (Chain::new(), 0, Some(start));
        while let Some(at) = next {
            let Some(one) = small.get(at) else { break };
            let more = one.class.shape.block_bytes().saturating_mul(u64::from(one.blocks));
            if bytes + more > shared.record_bytes_max && !chain.is_empty() {
                chains.push(std::mem::take(&mut chain));
                bytes = 0;
            }
            bytes += more;
            chain.push(one.clone());
            next = follows.get(at).copied().flatten();
        }
        chains.push(chain);
    }
    chains.retain(|chain| chain.len() >= least.max(2) as usize);
    chains
}

/// Finds and merges what there is. Stops without an error where there is no room.
pub(crate) async fn merge(
    shared: &Arc<Shared>,
    shards: &dyn Shards,
    options: &CompactOptions,
    pace: &mut Pace,
) -> Result<CompactReport, Reason> {
    let mut report = CompactReport::default();
    let (mut small, mut room_of) = (Vec::new(), BTreeMap::new());
    for shard in 0..shards.count() {
        let (reply, answer) = ticket();
        shards.survey(shard, reply)?;
        let survey = gone(answer.await)?;
        small.extend(survey.small);
        room_of.insert(survey.shard, (survey.sequence, survey.room));
    }
    for chain in chains(small, shared, options.merge_records_min) {
        if !pace.ready().await {
            break;
        }
        let Some(first) = chain.first() else { continue };
        let shard = shared.shard_for(&BlockKey(first.first));
        let Some((sequence, room)) = room_of.get_mut(&shard) else { continue };
        let blocks: u32 = chain.iter().map(|one| one.blocks).sum();
        let bytes = first.class.shape.block_bytes().saturating_mul(u64::from(blocks));
        let bytes = page_align(bytes).unwrap_or(u64::MAX).saturating_add(16 * PAGE_BYTES);
        if *room < bytes {
            continue;
        }
        *room -= bytes;
        let merged = merge_one(shards, &chain, (shard, *sequence), shared).await;
        match merged {
            Ok(Some(moved)) => {
                report.records_merged += chain.len() as u64;
                report.take(moved);
                pace.spend(moved.bytes_read + moved.bytes_written);
            }
            Ok(None) => {}
            Err(reason @ (Reason::Latched(_) | Reason::NoSpace(_))) => return Err(reason),
            Err(_) => report.records_failed += chain.len() as u64,
        }
    }
    Ok(report)
}

/// Gathers the records of a chain from their shards and writes them as one.
async fn merge_one(
    shards: &dyn Shards,
    chain: &Chain,
    (shard, sequence): (u32, u64),
    shared: &Arc<Shared>,
) -> Result<Option<Moved>, Reason> {
    let mut by_shard = BTreeMap::<u32, Vec<RecordId>>::new();
    for one in chain {
        by_shard.entry(one.shard).or_default().push(one.record);
    }
    let mut found = BTreeMap::<RecordId, Gathered>::new();
    for (shard, records) in by_shard {
        let (reply, answer) = ticket();
        shards.gather(shard, records, reply)?;
        let gathered = gone(answer.await)??;
        found.extend(gathered.into_iter().map(|one| (one.source, one)));
    }
    let mut moved = Moved::default();
    for one in found.values() {
        moved.damaged += one.damaged;
        moved.bytes_read += one.bytes_read;
    }
    let Some((head, blocks)) = join(chain, &mut found, sequence, shared)? else { return Ok(None) };
    let (reply, answer) = ticket();
    shards.rewrite(shard, Box::new((head, blocks)), reply)?;
    moved.add(gone(answer.await)??);
    // Until here the old records' numbers were held.
    drop(found);
    Ok(Some(moved))
}

/// The new record: the longest beginning of the chain that is still as it was surveyed.
fn join(
    chain: &Chain,
    found: &mut BTreeMap<RecordId, Gathered>,
    sequence: u64,
    shared: &Arc<Shared>,
) -> Result<Option<(Head, Vec<Taken>)>, Reason> {
    let Some(first) = chain.first() else { return Ok(None) };
    let Some(body) = found.get(&first.record).map(|one| one.body.clone()) else { return Ok(None) };
    // The oldest of them: what is taken for younger than it is might outlive a delete.
    let (mut blocks, mut created_ms, mut last, mut count) = (Vec::new(), u64::MAX, None, 0);
    for one in chain {
        let Some(gathered) = found.get_mut(&one.record) else { break };
        let follows = last.is_none_or(|last| gathered.body.parent == Parent::Key(last));
        if !follows
            || gathered.blocks.len() != gathered.body.blocks.len()
            || gathered.body.extensions != body.extensions
            || gathered.class.encoding != first.class.encoding
        {
            break;
        }
        last = gathered.body.blocks.last().map(|name| name.key);
        created_ms = gathered.body.created_ms.min(created_ms);
        blocks.append(&mut gathered.blocks);
        count += 1;
    }
    if count < 2 {
        return Ok(None);
    }
    let class = &first.class;
    let layout = Layout::auto(&class.shape, blocks.len() as u32);
    let form = RecordForm { layout, layout_version: LAYOUT_VERSION, encoding: class.encoding };
    let class = shared.classes.intern(&class.namespace, (class.group, class.coordinate), form)?;
    let head = Head {
        class,
        created_ms,
        expires: first.expires,
        expires_ms: expires_ms(shared, body.expires_ms, first.expires),
        extensions: body.extensions,
        first_block: body.first_block,
        parent: body.parent,
        sequence,
    };
    Ok(Some((head, blocks)))
}

/// Takes these records out of a shard.
pub(crate) async fn take(shard: &Rc<Shard>, records: Vec<RecordId>) -> Result<Vec<Gathered>, Reason> {
    let _turn = shard.moves.moving.take().await;
    let mut all = Vec::with_capacity(records.len());
    for record in records {
        all.extend(gather(shard, record, &|_| true).await?);
    }
    Ok(all)
}

/// Writes what was taken out of several shards into this one.
pub(crate) async fn rewrite(shard: &Rc<Shard>, head: &Head, blocks: &[Taken]) -> Result<Moved, Reason> {
    let _turn = shard.moves.moving.take().await;
    write(shard, head, &blocks.iter().collect::<Vec<_>>()).await
}
