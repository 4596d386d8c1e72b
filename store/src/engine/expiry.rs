//! Blocks whose time is over go without being looked up: a sweep by the clock, and changes of that time.
//!
//! Expiry is kept for each record of the index. Blocks of one record whose times come to differ are pointed at
//! through records of their own, which say the same of the bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::log::Log;
use super::shared::Shared;
use crate::api::{MAX_REQUEST_BLOCKS, TtlReply, TtlRequest};
use crate::error::Reason;
use crate::events::{Cause, EventKind};
use crate::index::{BlockFingerprint, Located, RecordCursor, RecordId, RecordInfo};
use crate::rt::Runtime;

/// Takes out every block of a shard whose time is over and that no lease holds. Between two steps, one chunk of
/// records or the blocks of one record, others have their turn.
pub(crate) async fn sweep(log: &Log, rt: &dyn Runtime) {
    let shared = &log.shared;
    if !shared.has_expiring() {
        return;
    }
    let (mut cursor, mut some, mut segments) = (Some(RecordCursor::default()), Vec::new(), BTreeSet::new());
    while let Some(from) = cursor {
        cursor = shared.index.records().snapshot(from, &mut some);
        let over = |record: &RecordInfo| {
            u32::from(record.shard) == log.shard && record.live > 0 && shared.is_expired(record)
        };
        segments.extend(some.iter().filter(|(_, record)| over(record)).map(|(_, record)| record.segment));
        rt.yield_now().await;
    }
    for number in segments {
        let Some(segment) = log.segments.borrow().get(&number).map(Rc::clone) else { continue };
        // What cannot be listed goes when it is looked up, or with its segment.
        let Ok(entries) = log.listing(&segment).await else { continue };
        for entry in &entries {
            let Some((class, named)) = log.live(&segment, entry) else { continue };
            for block in named.iter().filter(|block| shared.is_expired(&block.record)) {
                shared.evict(block.print, block.at, (EventKind::Expired, Cause::Ttl), (&class, block.key));
            }
            rt.yield_now().await;
        }
    }
}

/// Changes how long blocks may live.
pub(crate) fn set_ttl(shared: &Shared, request: &TtlRequest<'_>) -> Result<TtlReply, Reason> {
    if request.keys.len() > MAX_REQUEST_BLOCKS {
        return Err(Reason::TooMany("blocks"));
    }
    let namespace = shared.names.get(request.namespace).ok_or(Reason::UnknownNamespace(request.namespace))?;
    namespace.shape(request.group, request.coordinate)?;
    let key = shared.index.key();
    let prints: Vec<_> = request
        .keys
        .iter()
        .map(|name| key.of(namespace.local, name, request.group, request.coordinate))
        .collect();
    shared.drop_expired(&prints, |place| request.keys.get(place).copied());
    let expires = request.ttl.map_or(0, |ttl| shared.expires_after(ttl).1);
    shared.note_expiry(expires);
    // Nothing else changes the content meanwhile, so that no record's number becomes another's.
    let _change = shared.events.change();
    let mut by_record = BTreeMap::<RecordId, BTreeMap<BlockFingerprint, Located>>::new();
    for print in &prints {
        if let Some(found) = shared.index.locate(*print) {
            by_record.entry(found.location.record).or_default().insert(*print, found);
        }
    }
    let mut changed = BTreeSet::new();
    for (record, blocks) in by_record {
        change(shared, record, &blocks, expires, &mut changed)?;
    }
    Ok(TtlReply { changed: prints.iter().map(|print| changed.contains(print)).collect() })
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
    if info.expires == expires || usize::from(info.live) == blocks.len() {
        records.set_expires(record, expires);
        changed.extend(blocks.keys());
        return Ok(());
    }
    let own = records.insert(RecordInfo { expires, ..info }).map_err(|_| Reason::NoSpace)?;
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
