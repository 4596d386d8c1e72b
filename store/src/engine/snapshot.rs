//! What is here, by whole names: pages of a snapshot, and what descends from a key.
//!
//! Both read what the segments list, on the executor that owns them, and ask the index what of it is live.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use kvarts_layout::{BlockKey, NamespaceId};

use super::delete::{self, Answer};
use super::executor::{Message, Router};
use super::log::Log;
use super::names::Namespace;
use super::notify::before;
use super::shared::Shared;
use crate::api::{DeleteRequest, SnapshotCursor, SnapshotPage};
use crate::error::Reason;
use crate::events::PAGE_BLOCKS;
use crate::rt::mailbox::ticket;
use crate::rt::{Nanos, Runtime};

/// How often a search is repeated because blocks were moved under it.
const REPEATS_MAX: u32 = 8;

/// The page at a cursor: blocks of one segment of the cursor's shard, and where the next begins.
pub(crate) async fn page(log: &Log, shards: u32, cursor: SnapshotCursor) -> Result<SnapshotPage, Reason> {
    let mut page = SnapshotPage { sequence: cursor.sequence, blocks: Vec::new(), next: None };
    let mut first = cursor.record as usize;
    for segment in log.segments_from(cursor.segment) {
        let entries = log.listing(&segment).await?;
        let passed = if segment.number == cursor.segment { first } else { 0 };
        for (place, entry) in entries.iter().enumerate().skip(passed) {
            if page.blocks.len() >= PAGE_BLOCKS {
                let record = u32::try_from(place).unwrap_or(u32::MAX);
                page.next = Some(SnapshotCursor { segment: segment.number, record, ..cursor });
                return Ok(page);
            }
            let Some((class, named)) = log.live(&segment, entry) else { continue };
            if log.shared.names.is_current(&class.namespace) {
                page.blocks.extend(named.iter().map(|block| class.name(block.key)));
            }
        }
        first = 0;
    }
    let next = cursor.shard + 1;
    page.next = (next < shards).then_some(SnapshotCursor { shard: next, segment: 0, record: 0, ..cursor });
    Ok(page)
}

/// The keys of live blocks of a namespace in this shard that descend from these keys.
pub(crate) async fn descendants(
    log: &Log,
    namespace: NamespaceId,
    known: &BTreeSet<BlockKey>,
    rt: &dyn Runtime,
) -> Result<BTreeSet<BlockKey>, Reason> {
    let mut found = BTreeSet::new();
    for segment in log.segments_from(0) {
        for entry in log.listing(&segment).await? {
            let Some((class, named)) = log.live(&segment, &entry) else { continue };
            if class.namespace.id != namespace || !log.shared.names.is_current(&class.namespace) {
                continue;
            }
            for block in &named {
                let here = log.shared.is_here(block.print, &block.record);
                let follows = |parent: BlockKey| known.contains(&parent) || found.contains(&parent);
                if here && block.parent.is_some_and(follows) {
                    found.insert(block.key);
                }
            }
            rt.yield_now().await;
        }
    }
    Ok(found)
}

/// Finds everything that descends from a key, in all shards, and deletes it with the key. A device that does not answer
/// keeps the caller no longer than its deadline.
pub(crate) async fn delete_prefix(
    shared: &Arc<Shared>,
    router: &Router,
    (request, root): (DeleteRequest, BlockKey),
    reply: Answer,
    rt: &dyn Runtime,
) {
    let mut finding = pin!(async {
        let namespace = delete::check(shared, &request)?;
        let keys = all_descendants(router, &namespace, root, (shared, request.deadline)).await?;
        Ok::<_, Reason>((namespace, keys))
    });
    let deadline = request.deadline.map(|at| rt.sleep_until(at));
    match before(finding.as_mut(), deadline).await.unwrap_or(Err(Reason::DeadlinePassed)) {
        Ok(found) => {
            for (shard, part) in delete::begin_found(shared, router.shards(), found, request.deadline, reply)
            {
                router.delete(shard, part);
            }
        }
        // A caller that is gone needs no answer.
        Err(reason) => drop(reply.send(Err(reason.into()))),
    }
}

/// Asks every shard again and again, until none finds more: a prefix's records spread over all of them.
async fn all_descendants(
    router: &Router,
    namespace: &Namespace,
    root: BlockKey,
    (shared, deadline): (&Shared, Option<Nanos>),
) -> Result<BTreeSet<BlockKey>, Reason> {
    let moved = || shared.counters.blocks_moved.load(Relaxed);
    let (mut keys, mut quiet) = (BTreeSet::from([root]), 0);
    let (mut before_round, mut repeats) = (moved(), 0);
    while quiet < router.shards() {
        for shard in 0..router.shards() {
            if deadline.is_some_and(|deadline| deadline <= shared.clock.now()) {
                return Err(Reason::DeadlinePassed);
            }
            let (reply, answer) = ticket();
            router.send(shard, Message::Descendants(shard, namespace.id, Arc::new(keys.clone()), reply))?;
            let closing = |_| Reason::Busy("the store is closing");
            let found = answer.await.map_err(closing)??;
            let before = keys.len();
            keys.extend(found);
            quiet = if keys.len() == before { quiet + 1 } else { 0 };
            if quiet >= router.shards() {
                break;
            }
            if quiet == 0 {
                before_round = moved();
            }
        }
        // What compaction moved meanwhile may have passed from what was not read yet to what was.
        if quiet >= router.shards() && moved() != before_round && repeats < REPEATS_MAX {
            (quiet, before_round, repeats) = (0, moved(), repeats + 1);
        }
    }
    Ok(keys)
}
