//! Deleting here what was deleted at another node. What was put since lives: where anything was, the blocks' own times decide.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use kvarts_cluster::deletes::{Column, Entry, What};
use kvarts_contract::api::{
    DeleteOutcome, DeleteReply, DeleteRequest, KvStore, MAX_REQUEST_BLOCKS, Target, TtlRequest,
};
use kvarts_contract::error::{Error, Kind, Reason};
use kvarts_layout::{BlockKey, NamespaceId};
use kvarts_store::engine::Produced;

use super::super::ClusterNode;
use super::lock;

/// How often something is deleted that is refused for now, and the pause between.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(50);
/// How often blocks are listed again because some were moved meanwhile.
const LISTINGS_MAX: u32 = 8;
/// Blocks of a namespace that are listed at most: of one that has more everything goes.
const LISTED_MAX: usize = 1 << 21;

/// Held while something is deleted, or is given less time to live: dropped where that failed.
pub trait Underway<'a>: Send {
    /// The store has carried it out.
    fn done(self: Box<Self>) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;
}

/// What gives one.
pub type Guarded<'a> = Pin<Box<dyn Future<Output = Box<dyn Underway<'a> + 'a>> + Send + 'a>>;

/// What else holds blocks of a node, such as a tier behind its disks.
pub trait Beside: Send + Sync + fmt::Debug {
    /// The store is about to carry out what another node was asked, some time ago perhaps: nothing of it is to be brought back into the
    /// store that was begun before, until what this gives is done or dropped. What was produced since the entry's time is not meant.
    fn carrying<'a>(&'a self, entry: &'a Entry) -> Guarded<'a>;
}

/// What came of an entry here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Done {
    /// Blocks that were here.
    pub(super) blocks: u64,
    /// Of each key whether there was one, or its end has changed.
    pub(super) were: Vec<bool>,
    /// What descends from the keys and was not named; nothing where that is more than can be.
    pub(super) found: Option<Vec<BlockKey>>,
}

impl Default for Done {
    fn default() -> Self {
        Self { blocks: 0, were: Vec::new(), found: Some(Vec::new()) }
    }
}

impl ClusterNode {
    /// From now on copies that are under way are compared with an entry, and none of them is just being stored.
    pub(super) async fn begin_here(&self, entry: &Arc<Entry>) {
        lock(&self.deletes.recent).begin(Arc::clone(entry));
        self.store.produce_after(entry.below_ms);
        // ends: copies that are being stored end with the store's transfers (`OVERDUE`)
        drop(self.deletes.storing.write().await);
    }

    /// What this node is asked to delete, in as many entries as it takes.
    pub(super) async fn named(&self, namespace: NamespaceId, target: &Target) -> Result<Vec<What>, Error> {
        let root = match target {
            Target::Keys { column, keys } => return Ok(vec![What::Keys(*column, keys.clone())]),
            Target::Namespace => return Ok(vec![What::Everything]),
            Target::Prefix(root) => *root,
        };
        let here = self.produced(namespace).await?;
        let here = here
            .ok_or(Error(Reason::TooMany("blocks in the namespace: delete keys or the whole namespace")))?;
        let keys: Vec<BlockKey> = descend(&[root], &here).into_iter().collect();
        Ok(keys.chunks(MAX_REQUEST_BLOCKS).map(|keys| What::Prefix(keys.to_vec())).collect())
    }

    /// Deletes what this node was asked to delete, which these entries name.
    pub(super) async fn delete_here(
        &self,
        entries: &[Arc<Entry>],
        request: DeleteRequest,
    ) -> Result<DeleteReply, Error> {
        for entry in entries {
            self.begin_here(entry).await;
        }
        let closing = |_| Error(Reason::Busy("the store is closing"));
        let (namespace, deadline) = (request.namespace, request.deadline);
        // ends: the request's deadline, and the store's transfers (`OVERDUE`)
        let mut reply = self.store.delete(request).await.map_err(closing)??;
        for entry in entries {
            if let What::Prefix(keys) = &entry.what {
                // Copies of them that do not say what they stand behind.
                let target = Target::Keys { column: None, keys: keys.clone() };
                let request = DeleteRequest { namespace, target, deadline };
                // ends: the request's deadline, and the store's transfers (`OVERDUE`)
                let of_copies = self.store.delete(request).await.map_err(closing)??;
                if let Some(refused) = of_copies.outcomes.iter().find_map(refusal) {
                    return Err(Error(refused));
                }
                reply.blocks += of_copies.blocks;
            }
        }
        Ok(reply)
    }

    /// Deletes what another node was asked to delete, as far as it was there before that.
    pub(super) async fn carry_out(&self, entry: &Arc<Entry>) -> Result<Done, Error> {
        // Nothing here can be younger: then nothing has to be looked for.
        let all = self.store.produced_now() <= entry.below_ms;
        self.begin_here(entry).await;
        let keys = entry.what.keys();
        let nothing = || Done { were: vec![false; keys.len()], ..Done::default() };
        let mut done = nothing();
        let carried = match (&entry.what, all) {
            (What::Sooner(column, keys, ends_ms), _) => {
                let guard = self.guarded(entry).await?;
                let shortened = self.shorten(entry, *column, keys, *ends_ms, &mut done, all).await;
                finished(shortened, guard).await
            }
            (What::Keys(column, keys), true) => {
                let target = Target::Keys { column: *column, keys: keys.clone() };
                self.delete_all(entry, target, &mut done).await
            }
            (What::Everything, true) => self.delete_all(entry, Target::Namespace, &mut done).await,
            (What::Prefix(_), true) | (_, false) => self.delete_older(entry, &mut done).await,
        };
        match carried {
            // Of a model that was never here nothing is.
            Err(Error(Reason::UnknownNamespace(_))) => Ok(nothing()),
            carried => carried.map(|()| done),
        }
    }

    /// Announces to the tier behind the disks an entry that is about to be carried out. Waits for a tier that is still to be set: it
    /// must not miss one.
    async fn guarded<'a>(&'a self, entry: &'a Entry) -> Result<Option<Box<dyn Underway<'a> + 'a>>, Error> {
        if !self.options.has_tier {
            return Ok(None);
        }
        tokio::select! {
            biased;
            // ends: the tier is set once the server is ready, or the node stops: the next arm
            beside = self.deletes.beside.wait() => Ok(Some(beside.carrying(entry).await)),
            () = self.stopped() => Err(Error(Reason::Busy("this node is stopping"))),
        }
    }

    /// Deletes with whatever else holds blocks.
    async fn delete_all(&self, entry: &Entry, target: Target, done: &mut Done) -> Result<(), Error> {
        let guard = self.guarded(entry).await?;
        let deleted = self.delete_stored(entry.namespace, target, done).await;
        finished(deleted, guard).await
    }

    /// Deletes from the store; what is refused for a moment is tried again.
    async fn delete_stored(
        &self,
        namespace: NamespaceId,
        target: Target,
        done: &mut Done,
    ) -> Result<(), Error> {
        for left in (0..TRIES).rev() {
            let request = DeleteRequest { namespace, target: target.clone(), deadline: None };
            // ends: the store's transfers are given up after `OVERDUE`
            let refused = match self.store.delete(request).await {
                Err(_) => Error(Reason::Busy("the store is closing")),
                Ok(Err(error)) => error,
                Ok(Ok(reply)) => match reply.outcomes.iter().find_map(refusal) {
                    None => {
                        done.blocks += reply.blocks;
                        let deleted = reply.outcomes.iter().map(|one| *one == DeleteOutcome::Deleted);
                        done.were.iter_mut().zip(deleted).for_each(|(were, deleted)| *were |= deleted);
                        break;
                    }
                    Some(refused) => Error(refused),
                },
            };
            if left == 0 || refused.0.kind() != Kind::Retry {
                return Err(refused);
            }
            self.sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Deletes blocks that were produced before an entry's time, by the times of their productions.
    async fn delete_older(&self, entry: &Entry, done: &mut Done) -> Result<(), Error> {
        let (namespace, below_ms) = (entry.namespace, entry.below_ms);
        let told = |what| Entry { namespace, below_ms, what };
        let Some(here) = self.produced(namespace).await? else {
            // Too many to be told apart: all go.
            let what = match &entry.what {
                // Nor is it known what descends from the keys.
                What::Prefix(_) => What::Everything,
                what => what.clone(),
            };
            return self.delete_all(&told(what), Target::Namespace, done).await;
        };
        let places: BTreeMap<BlockKey, usize> = entry.what.keys().iter().copied().zip(0..).collect();
        let mut columns: BTreeMap<Column, Vec<BlockKey>> = BTreeMap::new();
        let mut take = |one: &Produced| columns.entry((one.group, one.coordinate)).or_default().push(one.key);
        let older = here.iter().filter(|one| one.produced_ms < below_ms);
        let mut what = entry.what.clone();
        match &entry.what {
            What::Keys(of, _) => {
                let is_of = |one: &&Produced| of.is_none_or(|of| of == (one.group, one.coordinate));
                older.filter(is_of).filter(|one| places.contains_key(&one.key)).for_each(take);
            }
            What::Prefix(keys) => {
                let all = descend(keys, &here);
                older.filter(|one| all.contains(&one.key)).for_each(take);
                what = What::Keys(None, all.iter().copied().collect());
                let new = all.into_iter().filter(|key| !places.contains_key(key));
                let new: Vec<BlockKey> = new.take(MAX_REQUEST_BLOCKS + 1).collect();
                done.found = (new.len() <= MAX_REQUEST_BLOCKS).then_some(new);
            }
            What::Everything | What::Sooner(..) => older.for_each(&mut take),
        }
        // Also where nothing is here: a restore from the bucket may be under way by a manifest that was read before the delete.
        let told = told(what);
        let guard = self.guarded(&told).await?;
        let deleted = self.delete_columns(namespace, columns, &places, done).await;
        finished(deleted, guard).await
    }

    /// Deletes these blocks, and notes of which of the keys at these places there was one.
    async fn delete_columns(
        &self,
        namespace: NamespaceId,
        columns: BTreeMap<Column, Vec<BlockKey>>,
        places: &BTreeMap<BlockKey, usize>,
        done: &mut Done,
    ) -> Result<(), Error> {
        for (column, keys) in columns {
            for keys in keys.chunks(MAX_REQUEST_BLOCKS) {
                let target = Target::Keys { column: Some(column), keys: keys.to_vec() };
                let mut these = Done { were: vec![false; keys.len()], ..Done::default() };
                self.delete_stored(namespace, target, &mut these).await?;
                done.blocks += these.blocks;
                for (key, _) in keys.iter().zip(these.were).filter(|(_, were)| *were) {
                    if let Some(were) = places.get(key).and_then(|place| done.were.get_mut(*place)) {
                        *were = true;
                    }
                }
            }
        }
        Ok(())
    }

    /// Has blocks end sooner.
    async fn shorten(
        &self,
        entry: &Entry,
        (group, coordinate): Column,
        keys: &[BlockKey],
        ends_ms: u64,
        done: &mut Done,
        all: bool,
    ) -> Result<(), Error> {
        let namespace = entry.namespace;
        let here = if all { None } else { self.produced(namespace).await? };
        let older: Option<BTreeSet<BlockKey>> = here.map(|here| {
            let of_column = here.into_iter().filter(|one| (one.group, one.coordinate) == (group, coordinate));
            of_column.filter(|one| one.produced_ms < entry.below_ms).map(|one| one.key).collect()
        });
        let is_meant = |key: &BlockKey| older.as_ref().is_none_or(|older| older.contains(key));
        let (places, keys): (Vec<usize>, Vec<BlockKey>) =
            (0..).zip(keys).filter(|(_, key)| is_meant(key)).map(|(place, key)| (place, *key)).unzip();
        if keys.is_empty() || kvarts_layout::planted!("shorter-times-stay") {
            return Ok(());
        }
        let ttl = Some(Duration::from_millis(ends_ms.saturating_sub(self.store.wall_ms())));
        let request = TtlRequest { namespace, group, coordinate, keys: &keys, ttl };
        let changed = self.store.shorten_ttl(&request)?.changed;
        for (place, changed) in places.into_iter().zip(changed) {
            if let Some(were) = done.were.get_mut(place) {
                *were = changed;
            }
        }
        Ok(())
    }

    /// When the blocks of a namespace were produced that are here; nothing if they are too many.
    async fn produced(&self, namespace: NamespaceId) -> Result<Option<Vec<Produced>>, Error> {
        let moved = || self.store.stats().counts.blocks_moved;
        let mut found: BTreeMap<(Column, BlockKey), Produced> = BTreeMap::new();
        for _ in 0..LISTINGS_MAX {
            let before = moved();
            for shard in 0..self.store.shards() {
                let mut next = Some(0);
                while let Some(from) = next {
                    // ends: an executor answers from memory, or the store is closed
                    let page = self.store.produced(shard, namespace, from).await;
                    let page = page.map_err(|_| Error(Reason::Busy("the store is closing")))??;
                    for one in page.blocks {
                        let known = found.entry(((one.group, one.coordinate), one.key)).or_insert(one);
                        known.produced_ms = known.produced_ms.min(one.produced_ms);
                        known.parent = known.parent.or(one.parent);
                    }
                    if found.len() > LISTED_MAX {
                        return Ok(None);
                    }
                    next = page.next;
                }
            }
            if moved() == before {
                break;
            }
        }
        Ok(Some(found.into_values().collect()))
    }
}

/// Notifies the tier behind the disks of an entry that the store has carried out.
async fn finished<'a>(
    outcome: Result<(), Error>,
    guard: Option<Box<dyn Underway<'a> + 'a>>,
) -> Result<(), Error> {
    if let Some(guard) = guard.filter(|_| outcome.is_ok()) {
        guard.done().await;
    }
    outcome
}

fn refusal(outcome: &DeleteOutcome) -> Option<Reason> {
    match outcome {
        DeleteOutcome::Refused(reason) => Some(reason.clone()),
        DeleteOutcome::Deleted | DeleteOutcome::NotHere => None,
    }
}

/// These keys, and what is known here to descend from them.
fn descend(roots: &[BlockKey], here: &[Produced]) -> BTreeSet<BlockKey> {
    let links: BTreeSet<(BlockKey, BlockKey)> =
        here.iter().filter_map(|one| Some((one.parent?, one.key))).collect();
    let (mut keys, mut parents): (BTreeSet<BlockKey>, _) = (roots.iter().copied().collect(), roots.to_vec());
    while let Some(parent) = parents.pop() {
        let children = (parent, BlockKey([0; 32]))..=(parent, BlockKey([0xff; 32]));
        let children = links.range(children).map(|(_, child)| *child);
        parents.extend(children.filter(|child| keys.insert(*child)));
    }
    keys
}
