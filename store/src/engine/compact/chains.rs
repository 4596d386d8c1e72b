//! Merges chains of small records: agent sessions seal hundreds of one-block records, which lie in all shards because
//! each is placed by its own key. Consecutive ones become one record in the shard of its first key, so that a layer
//! can be read in one piece again.
//!
//! Memory alone says what follows what: a record has the fingerprint of the block that it hangs on, and the index has the record of
//! that. So a look begins at the records that were put since the last one, which their shards have noted, and goes back from each;
//! a compaction that is asked for begins at every record. Looks are cut: a few thousand records at a time, a few hundred without a
//! turn for others.
//!
//! One task coordinates, on the first executor. It has each chain's blocks gathered by the executors that have them, and written by the
//! one that gets them. Memory is bounded by the records of one look and one record's blocks.
//!
//! Deletes: a tombstone is written in every shard, so what `relocate` says of one shard holds here too. Of blocks that
//! come from another shard, tombstones of the new shard are compared with its sequence at the survey.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use kvarts_layout::Layout;
use kvarts_layout::arrange::LAYOUT_VERSION;
use kvarts_layout::format::body::Parent;
use kvarts_layout::format::{PAGE_BYTES, page_align};

use super::gather::{Gathered, Taken, gather};
use super::head::Head;
use super::relocate::{Moved, expires_ms, write};
use super::room::{live_by_segment, room};
use super::{CompactOptions, CompactReport, Pace};
use crate::engine::shard::Shard;
use crate::engine::shared::Shared;
use crate::engine::shared::record_class::RecordClass;
use crate::engine::shared::record_class::RecordForm;
use crate::engine::tasks::steps::Section;
use crate::engine::volume::noted::NOTED_MAX;
use crate::index::{Lookup, RecordCursor, RecordId};
use kvarts_contract::error::Reason;
use kvarts_contract::ticket::{Reply, ticket};

/// Records that one look meets, and what it goes back of one chain.
const LOOKED_AT: usize = 4 << 10;

/// A small record all of whose blocks are live.
#[derive(Clone, Copy, Debug)]
struct Small {
    record: RecordId,
    shard: u32,
    class: u32,
    /// The first 64 bits of the fingerprint of the block that it hangs on.
    parent: u64,
    blocks: u16,
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
    noted: VecDeque<RecordId>,
}

/// The shards of a store, on whichever executors they are.
pub(crate) trait Shards {
    /// How many there are.
    fn count(&self) -> u32;
    /// Asks for what a shard has noted, and what room it has.
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

/// Says what a shard has noted, which it forgets with that, and what room it has.
pub(crate) fn survey(shard: &Rc<Shard>) -> Survey {
    let (sequence, live) = (shard.volume.sequence.get(), live_by_segment(&shard.volume));
    let noted = shard.volume.noted.take();
    Survey { shard: shard.volume.shard, sequence, room: room(shard, &live), noted }
}

/// A run of small records, in prefix order.
type Chain = Vec<Small>;

/// One look at what follows what.
struct Look<'a> {
    shared: &'a Shared,
    classes: BTreeMap<u32, Option<Arc<RecordClass>>>,
    /// What was met.
    met: BTreeMap<RecordId, Small>,
    /// Which record goes on with which. Where a prefix forks, one branch goes on and the others begin chains of their own.
    follows: BTreeMap<RecordId, RecordId>,
    has_before: BTreeSet<RecordId>,
}

impl<'a> Look<'a> {
    fn new(shared: &'a Shared) -> Self {
        let (classes, met) = (BTreeMap::new(), BTreeMap::new());
        Self { shared, classes, met, follows: BTreeMap::new(), has_before: BTreeSet::new() }
    }

    fn class(&mut self, number: u32) -> Option<&Arc<RecordClass>> {
        let known = self.classes.entry(number).or_insert_with(|| self.shared.classes.get(number));
        known.as_ref()
    }

    /// The record, if it is small and all of it is live.
    fn small(&mut self, record: RecordId) -> Option<Small> {
        let info = self.shared.index.records().get(record)?;
        let most = (self.shared.record_bytes_max / 2).div_ceil(PAGE_BYTES);
        let is_small = info.live == info.blocks.get() && u64::from(info.payload_pages) <= most;
        self.class(info.class).filter(|_| is_small)?;
        let (shard, blocks) = (u32::from(info.shard), info.live);
        Some(Small { record, shard, class: info.class, parent: info.parent, blocks, expires: info.expires })
    }

    /// The small record that another one goes on with.
    fn before(&mut self, one: &Small) -> Option<Small> {
        if one.parent == 0 {
            return None;
        }
        let Lookup::Live(at) = self.shared.index.lookup_first(one.parent) else { return None };
        let before = self.small(at.record)?;
        // Stored chunks are copied as they are, so only records of one encoding are merged.
        let name = |class: &Arc<RecordClass>| {
            (class.namespace.local, class.group, class.coordinate.to_u64(), class.encoding)
        };
        let own = self.class(one.class).map(name);
        let fits = at.block + 1 == before.blocks
            && before.expires == one.expires
            && self.class(before.class).map(name) == own;
        fits.then_some(before)
    }

    /// Goes back from a record, up to one that was met before.
    async fn go_back(&mut self, from: RecordId, section: &mut Section<'_>) {
        let Some(mut at) = self.small(from) else { return };
        self.met.insert(at.record, at);
        let mut passed = 0;
        while passed < LOOKED_AT
            && !self.has_before.contains(&at.record)
            && let Some(before) = self.before(&at)
            && !self.follows.contains_key(&before.record)
        {
            self.follows.insert(before.record, at.record);
            self.has_before.insert(at.record);
            self.met.insert(before.record, before);
            (at, passed) = (before, passed + 1);
            section.step(1).await;
        }
    }

    /// Chains that fit into one record each.
    async fn chains(mut self, least: u32, section: &mut Section<'_>) -> Vec<Chain> {
        let mut chains = Vec::new();
        let (met, most) = (std::mem::take(&mut self.met), self.shared.record_bytes_max);
        let has_before = std::mem::take(&mut self.has_before);
        for start in met.keys().filter(|record| !has_before.contains(*record)).copied() {
            let (mut chain, mut bytes, mut next) = (Chain::new(), 0, Some(start));
            while let Some(one) = next.and_then(|record| met.get(&record)) {
                let block = self.class(one.class).map_or(0, |class| class.shape.block_bytes());
                let more = block.saturating_mul(u64::from(one.blocks));
                if bytes + more > most && !chain.is_empty() {
                    chains.push(std::mem::take(&mut chain));
                    bytes = 0;
                }
                bytes += more;
                chain.push(*one);
                next = self.follows.get(&one.record).copied();
                section.step(1).await;
            }
            chains.push(chain);
        }
        chains.retain(|chain| chain.len() >= least.max(2) as usize);
        chains
    }
}

/// Where chains may be written.
struct Rooms(BTreeMap<u32, (u64, u64)>);

impl Rooms {
    /// Asks every shard; `noted` gets what they have noted.
    async fn ask(shards: &dyn Shards, noted: &mut VecDeque<RecordId>) -> Result<Self, Reason> {
        let mut rooms = BTreeMap::new();
        for shard in 0..shards.count() {
            let (reply, answer) = ticket();
            shards.survey(shard, reply)?;
            let survey = gone(answer.await)?;
            noted.extend(survey.noted);
            rooms.insert(survey.shard, (survey.sequence, survey.room));
        }
        Ok(Self(rooms))
    }

    /// Takes the room that a chain needs in its shard; the sequence that this shard's log had.
    fn take(&mut self, chain: &Chain, class: &RecordClass) -> Option<(u32, u64)> {
        // A record lies in the shard of its first key.
        let shard = chain.first()?.shard;
        let (sequence, room) = self.0.get_mut(&shard)?;
        let blocks: u64 = chain.iter().map(|one| u64::from(one.blocks)).sum();
        let bytes = class.shape.block_bytes().saturating_mul(blocks);
        let bytes = page_align(bytes).unwrap_or(u64::MAX).saturating_add(16 * PAGE_BYTES);
        *room = room.checked_sub(bytes)?;
        Some((shard, *sequence))
    }
}

/// Merges what was put since this was done last, in so far as it goes on with what is here. What is left for want of time is `noted`
/// again. Stops without an error where there is no room.
pub(crate) async fn merge(
    shared: &Arc<Shared>,
    shards: &dyn Shards,
    options: &CompactOptions,
    pace: &mut Pace,
    noted: &mut VecDeque<RecordId>,
) -> Result<CompactReport, Reason> {
    let mut report = CompactReport::default();
    let mut rooms = Rooms::ask(shards, noted).await?;
    let mut some: Vec<RecordId> = Vec::new();
    while !noted.is_empty() && pace.ready().await {
        some.clear();
        some.extend(noted.drain(..noted.len().min(LOOKED_AT)));
        let left =
            merge_from(shared, (shards, &mut rooms), (options, &mut *pace), &some, &mut report).await?;
        noted.extend(left);
    }
    let most = NOTED_MAX.saturating_mul(shards.count() as usize);
    noted.drain(..noted.len().saturating_sub(most));
    Ok(report)
}

/// The same of everything that is here.
pub(crate) async fn merge_all(
    shared: &Arc<Shared>,
    shards: &dyn Shards,
    options: &CompactOptions,
    pace: &mut Pace,
) -> Result<CompactReport, Reason> {
    let mut report = CompactReport::default();
    let mut rooms = Rooms::ask(shards, &mut VecDeque::new()).await?;
    let (mut listed, mut some) = (Vec::new(), Vec::new());
    let mut cursor = Some(RecordCursor::default());
    while let Some(from) = cursor {
        cursor = shared.index.records().snapshot(from, &mut listed);
        some.extend(listed.iter().filter(|(_, info)| info.live > 0).map(|(id, _)| *id));
        if some.len() >= LOOKED_AT || cursor.is_none() {
            if !pace.ready().await {
                break;
            }
            merge_from(shared, (shards, &mut rooms), (options, &mut *pace), &some, &mut report).await?;
            some.clear();
        }
    }
    Ok(report)
}

/// Merges chains that some records are in. Gives the last records of those for which there was no time.
async fn merge_from(
    shared: &Arc<Shared>,
    (shards, rooms): (&dyn Shards, &mut Rooms),
    (options, pace): (&CompactOptions, &mut Pace),
    some: &[RecordId],
    report: &mut CompactReport,
) -> Result<Vec<RecordId>, Reason> {
    let (mut left, mut at) = (Vec::new(), 0);
    while at < some.len() && left.is_empty() {
        let mut section = Section::begin(&shared.work.merges, &*shared.clock);
        let mut look = Look::new(shared);
        while let Some(record) = some.get(at).filter(|_| look.met.len() < LOOKED_AT) {
            look.go_back(*record, &mut section).await;
            section.step(1).await;
            at += 1;
        }
        let chains = look.chains(options.merge_records_min, &mut section).await;
        drop(section);
        left = merge_chains(shared, (shards, &mut *rooms), &mut *pace, chains, report).await?;
    }
    left.extend(some.iter().skip(at));
    Ok(left)
}

/// Merges these chains. Gives the last records of those for which there was no time.
async fn merge_chains(
    shared: &Arc<Shared>,
    (shards, rooms): (&dyn Shards, &mut Rooms),
    pace: &mut Pace,
    chains: Vec<Chain>,
    report: &mut CompactReport,
) -> Result<Vec<RecordId>, Reason> {
    let mut left = Vec::new();
    for chain in chains {
        if !left.is_empty() || !pace.ready().await {
            left.extend(chain.last().map(|one| one.record));
            continue;
        }
        let Some(class) = chain.first().and_then(|first| shared.classes.get(first.class)) else { continue };
        let Some(place) = rooms.take(&chain, &class) else { continue };
        match merge_one(shards, (&chain, &class), place, shared).await {
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
    Ok(left)
}

/// Gathers the records of a chain from their shards and writes them as one.
async fn merge_one(
    shards: &dyn Shards,
    (chain, class): (&Chain, &Arc<RecordClass>),
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
    let Some((head, blocks)) = join((chain, class), &mut found, sequence, shared)? else { return Ok(None) };
    let (reply, answer) = ticket();
    shards.rewrite(shard, Box::new((head, blocks)), reply)?;
    moved.add(gone(answer.await)??);
    // Until here the old records' numbers were held.
    drop(found);
    Ok(Some(moved))
}

/// The new record: the longest beginning of the chain that is still as it was surveyed.
fn join(
    (chain, class): (&Chain, &Arc<RecordClass>),
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
            || gathered.class.encoding != class.encoding
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
