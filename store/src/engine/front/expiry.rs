//! Blocks whose time is over go without being looked up: a sweep by the clock, and changes of that time.
//!
//! Expiry is kept for each record of the index. Blocks of one record whose times come to differ are pointed at
//! through records of their own, which say the same of the bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use crate::engine::read::Reads;
use crate::engine::shared::Shared;
use crate::engine::shared::due::{Due, stretch_of};
use crate::engine::shared::visibility::{BlockOf, Departure};
use crate::engine::tasks::steps::{AT_ONCE, Section};
use crate::engine::volume::Volume;
use crate::index::{BlockFingerprint, Eviction, Located, OwnerCursor, RecordId, RecordInfo};
use kvarts_contract::api::{MAX_REQUEST_BLOCKS, TtlReply, TtlRequest};
use kvarts_contract::error::{Reason, SpaceCause};

/// Blocks whose time is changed before others change what is here.
const CHANGED_AT_ONCE: usize = AT_ONCE as usize;

/// Takes out every block of a shard whose time is over and that no lease holds. It looks at the segments alone in which
/// something may have expired. Between the blocks of one record and the next, others have their turn if it is time.
pub(crate) async fn sweep(reads: &Reads) {
    let shared = &reads.volume.shared;
    let now = stretch_of(shared.expiry_now());
    let taken = shared.due.take(reads.volume.shard, now);
    let _sweep = Sweep(&shared.due);
    let mut section = Section::begin(&shared.work.sweeps, &*shared.clock);
    let mut segments = taken.segments;
    if taken.forgotten {
        segments.extend(recall(&reads.volume, now, &mut section).await);
    }
    if kvarts_layout::planted!("sweep-looks-at-all") {
        segments.extend(reads.volume.segments.borrow().keys());
    }
    for number in segments {
        let Some(segment) = reads.volume.segments.borrow().get(&number).map(Rc::clone) else { continue };
        section.pause();
        // What cannot be listed goes when it is looked up, or with its segment.
        let Ok(entries) = reads.listing(&segment).await else {
            shared.due.note((reads.volume.shard, number), now);
            continue;
        };
        let mut later = false;
        for entry in &entries {
            let Some((class, named)) = reads.live(&segment, entry) else { continue };
            for block in &named {
                let name = BlockOf { class: &class, key: block.key };
                let gone = shared.is_expired(&block.record)
                    && shared.evict(block.print, block.at, Departure::Expired, name) != Eviction::Busy;
                // Its time comes within this stretch, or a lease holds it.
                later |= !gone && block.record.expires != 0 && stretch_of(block.record.expires) <= now;
            }
            section.step(1 + named.len() as u64).await;
        }
        if later {
            shared.due.note((reads.volume.shard, number), now);
        }
    }
}

/// A sweep under way.
struct Sweep<'a>(&'a Due);

impl Drop for Sweep<'_> {
    fn drop(&mut self) {
        self.0.swept();
    }
}

/// Notes what the records of a shard say of their times, and gives the segments in which something may be over.
async fn recall(volume: &Volume, now: u32, section: &mut Section<'_>) -> BTreeSet<u32> {
    let (mut segments, mut some) = (BTreeSet::new(), Vec::new());
    let Ok(shard) = u16::try_from(volume.shard) else { return segments };
    let mut cursor = Some(OwnerCursor::default());
    while let Some(from) = cursor {
        cursor = volume.shared.index.records().snapshot_of((shard, None), from, &mut some);
        for (_, record, _) in some.iter().filter(|(_, record, _)| record.expires != 0 && record.live > 0) {
            match stretch_of(record.expires) {
                stretch if stretch <= now => drop(segments.insert(record.segment)),
                stretch => volume.shared.due.note((volume.shard, record.segment), stretch),
            }
        }
        section.step(1 + some.len() as u64).await;
    }
    segments
}

/// Which times are changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    /// All: to an earlier end or a later one.
    Any,
    /// Those that would end later.
    Sooner,
}

/// Changes how long blocks may live.
pub(crate) fn set_ttl(shared: &Shared, request: &TtlRequest<'_>, which: Change) -> Result<TtlReply, Reason> {
    if request.keys.len() > MAX_REQUEST_BLOCKS {
        return Err(Reason::TooMany("blocks"));
    }
    let namespace = shared.names.get(request.namespace).ok_or(Reason::UnknownNamespace(request.namespace))?;
    namespace.shape(request.group, request.coordinate)?;
    let prints = shared.prints_of(&namespace, request.keys, (request.group, request.coordinate));
    let expires = request.ttl.map_or(0, |ttl| shared.expires_after(ttl).1);
    let mut changed = BTreeSet::new();
    for some in by_record(shared, &prints) {
        change_some(shared, &some, (expires, which), &mut changed)?;
        shared.events.let_others();
    }
    Ok(TtlReply { changed: prints.iter().map(|print| changed.contains(print)).collect() })
}

/// The blocks that are here, those of a record together, a few hundred at a time: all other changes of what is here wait for each.
fn by_record(shared: &Shared, prints: &[BlockFingerprint]) -> Vec<Vec<BlockFingerprint>> {
    let record_of = |print: &BlockFingerprint| shared.index.locate(*print).map(|found| found.location.record);
    let mut all: Vec<_> = prints.iter().filter_map(|print| Some((record_of(print)?, *print))).collect();
    all.sort_unstable();
    all.dedup();
    let mut chunks = vec![Vec::new()];
    for run in all.chunk_by(|one, next| one.0 == next.0) {
        let fits = chunks.last().is_some_and(|last: &Vec<_>| last.len() + run.len() <= CHANGED_AT_ONCE);
        for some in run.chunks(CHANGED_AT_ONCE) {
            let some = some.iter().map(|(_, print)| *print);
            match chunks.last_mut().filter(|_| fits) {
                Some(last) => last.extend(some),
                None => chunks.push(some.collect()),
            }
        }
    }
    chunks
}

fn change_some(
    shared: &Shared,
    prints: &[BlockFingerprint],
    (expires, which): (u32, Change),
    changed: &mut BTreeSet<BlockFingerprint>,
) -> Result<(), Reason> {
    // Nothing else changes the content meanwhile, so that no record's number becomes another's.
    let _change = shared.events.change();
    let mut by_record = BTreeMap::<RecordId, BTreeMap<BlockFingerprint, Located>>::new();
    let is_meant = |found: &Located| {
        let until = found.record.expires;
        which == Change::Any || expires != 0 && (until == 0 || until > expires)
    };
    for print in prints {
        if let Some(found) = shared.index.locate(*print).filter(is_meant) {
            by_record.entry(found.location.record).or_default().insert(*print, found);
        }
    }
    for (record, blocks) in by_record {
        change(shared, record, &blocks, expires, changed)?;
    }
    Ok(())
}

/// Changes the time of some blocks of one record.
fn change(
    shared: &Shared,
    record: RecordId,
    blocks: &BTreeMap<BlockFingerprint, Located>,
    expires: u32,
    changed: &mut BTreeSet<BlockFingerprint>,
) -> Result<(), Reason> {
    let records = shared.index.records();
    let Some(info) = records.get(record) else { return Ok(()) };
    shared.note_expiry((u32::from(info.shard), info.segment), expires);
    if info.expires == expires || usize::from(info.live) == blocks.len() {
        records.set_expires(record, expires);
        changed.extend(blocks.keys());
        return Ok(());
    }
    let own =
        records.insert(RecordInfo { expires, ..info }).map_err(|_| Reason::NoSpace(SpaceCause::Records))?;
    records.note_use(own, records.used(record));
    for (print, found) in blocks {
        let new = crate::index::Location { record: own, ..found.location };
        // One that left meanwhile is not here any more: its time does not matter.
        if let Ok(Some(left)) = shared.index.replace_location(*print, found.location, new) {
            changed.insert(*print);
            shared.free_if_empty(record, left);
        }
    }
    shared.free_if_empty(own, records.get(own).map_or(1, |own| own.live));
    Ok(())
}
