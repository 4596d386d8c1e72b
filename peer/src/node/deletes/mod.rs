//! What is deleted at one node is deleted at all of them, and what is to end sooner ends sooner everywhere.
//!
//! The node that is asked deletes, writes down that it did ([`kept`]), and tells every other one, which answers once it is durable
//! there. Who cannot be told is named, and hears of it when it is connected again: two nodes that meet tell each other what the other
//! lacks before bytes are asked for. Until a node has said that it has all that this one knows of a namespace, nothing of that
//! namespace is read from it.
//!
//! A copy that is under way is compared with what was deleted since it began, and a delete waits for those that are just being stored.

mod carry;
mod kept;
mod noting;
mod tell;
mod wire;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_cluster::deletes::{CLOCKS_APART_MS, Column, CopyFate, Entry, Log, Name, Recent, What};
use kvarts_cluster::members::NodeId;
use kvarts_contract::api::{DeleteOutcome, DeleteReply, DeleteRequest, Life, MAX_REQUEST_BLOCKS, TtlRequest};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::{BlockKey, NamespaceId, planted};
use tokio::sync::{RwLock, RwLockReadGuard, SetOnce, oneshot};

use super::ClusterNode;
use super::link::Link;
pub use carry::{Beside, Guarded, Underway};
pub use kept::{FILE_BYTES_MAX, InMemory, Kept, Written};
use noting::Keeper;

/// How long a delete waits for other nodes at most: one that has not said by then that it has it is named as away.
const TELL_TIMEOUT: Duration = Duration::from_secs(5);

/// A node that is not known to have what was deleted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Away {
    /// Which one.
    pub node: NodeId,
    /// Where it is.
    pub address: String,
    /// Why it does not have it.
    pub trouble: String,
}

/// What came of a delete.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Deleted {
    /// The answer: of all nodes that have it.
    pub reply: DeleteReply,
    /// The others.
    pub away: Vec<Away>,
    /// By which nodes know it ([`ClusterNode::deletes_known`]).
    pub name: Name,
    /// What was produced before this time, in milliseconds since 1970, was meant: nodes say later times of what they produce since.
    pub below_ms: u64,
}

/// What came of a shorter time to live.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shortened {
    /// Of each key whether that changed anything on another node.
    pub were: Vec<bool>,
    /// Nodes that could not be told.
    pub away: Vec<Away>,
    /// By which nodes know it ([`ClusterNode::deletes_known`]).
    pub name: Name,
}

/// What nodes have said of one entry, for whom waits for it.
#[derive(Clone, Debug)]
struct Tally {
    blocks: u64,
    were: Vec<bool>,
    /// What descends from the keys of the entry and it did not name; nothing where that is more than can be named.
    found: Option<Vec<BlockKey>>,
}

impl Default for Tally {
    fn default() -> Self {
        Self { blocks: 0, were: Vec::new(), found: Some(Vec::new()) }
    }
}

/// What was deleted, as far as this node knows.
#[derive(Debug)]
pub(super) struct Deletes {
    log: Mutex<Log>,
    recent: Mutex<Recent>,
    /// Whether every node has everything, for reads, which need not look then.
    is_settled: AtomicBool,
    /// Copies are just being stored: a delete waits for them.
    storing: RwLock<()>,
    /// Entries of other nodes are taken in one after the other.
    taking: tokio::sync::Mutex<()>,
    keeper: Arc<tokio::sync::Mutex<Keeper>>,
    tallies: Mutex<BTreeMap<Name, Tally>>,
    /// The tier behind the disks, where there is one.
    beside: SetOnce<Arc<dyn Beside>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Deletes {
    /// What this node kept; the latest time below which something was deleted.
    pub(super) fn load(kept: &Arc<dyn Kept>, others: &[NodeId]) -> Result<(Self, u64), String> {
        let images = kept.load().map_err(|error| format!("the list of deletes cannot be read: {error}"))?;
        let (found, are_equal) = kept::read_all(&images);
        if !found.is_whole {
            tracing::warn!(
                entries = found.entries.len(),
                "the list of deletes is incomplete; other nodes will send the missing deletes again"
            );
        }
        let (mut log, mut below_ms) = (Log::default(), 0);
        for (name, entry) in found.entries {
            below_ms = entry.below_ms.max(below_ms);
            // Who has it says so at the first connection.
            log.add(name, entry, others.iter().copied());
        }
        let keeper = Keeper {
            kept: Arc::clone(kept),
            is_doubtful: !found.is_whole || !are_equal || images.iter().any(Vec::is_empty),
        };
        let deletes = Self {
            is_settled: AtomicBool::new(log.is_settled()),
            log: Mutex::new(log),
            recent: Mutex::default(),
            storing: RwLock::default(),
            taking: tokio::sync::Mutex::default(),
            keeper: Arc::new(tokio::sync::Mutex::new(keeper)),
            tallies: Mutex::default(),
            beside: SetOnce::new(),
        };
        Ok((deletes, below_ms))
    }

    fn with_log<T>(&self, change: impl FnOnce(&mut Log) -> T) -> T {
        let mut log = lock(&self.log);
        let done = change(&mut log);
        self.is_settled.store(log.is_settled(), Ordering::SeqCst);
        done
    }

    /// Only these nodes are members.
    pub(super) fn keep(&self, is_member: impl Fn(&NodeId) -> bool) {
        self.with_log(|log| log.keep(is_member));
    }

    /// Whether a node is not known to have everything that was deleted of a namespace: what it has of that is not read.
    pub(super) fn lacks_of(&self, node: &NodeId, namespace: &NamespaceId) -> bool {
        !self.is_settled.load(Ordering::SeqCst)
            && lock(&self.log).lacks_of(node, namespace)
            && !planted!("read-from-who-lacks-deletes")
    }

    /// Whether a block may have been deleted lately: hints of others do not count then.
    pub(super) fn names(&self, block: (NamespaceId, Column, &BlockKey), now_ms: u64) -> bool {
        lock(&self.recent).names(block, now_ms)
    }

    /// A copy begins.
    pub(super) fn copy_begins(&self) -> u64 {
        lock(&self.recent).now()
    }

    /// Copies are stored now that began after `since` deletes: no delete goes on before this is dropped.
    pub(super) async fn storing(&self) -> RwLockReadGuard<'_, ()> {
        // ends: a delete has this lock only to wait for those before it
        self.storing.read().await
    }

    /// Until when a copy may live that began after `since` deletes, of what lives so long; nothing if it is not to be stored.
    /// `now` is the time by both clocks.
    pub(super) fn copy_ends(
        &self,
        since: u64,
        block: (NamespaceId, Column, &BlockKey),
        life: Life,
        (now, now_ms): (Nanos, u64),
    ) -> Option<Life> {
        let fate = match planted!("stale-copy-stored") {
            true => CopyFate::Lives,
            false => lock(&self.recent).fate(since, block, life.produced_ms),
        };
        match fate {
            CopyFate::Dies => None,
            CopyFate::Lives => Some(life),
            CopyFate::Ends(ends_ms) => {
                let ends = now.plus(Duration::from_millis(ends_ms.saturating_sub(now_ms)));
                Some(life.until(ends))
            }
        }
    }
}

fn failed(why: String) -> Error {
    Error(Reason::Away(why))
}

impl ClusterNode {
    /// The tier that holds blocks behind this node's disks, and must not bring back what other nodes delete. Once, where the options
    /// say that there is one.
    pub fn set_beside(&self, beside: Arc<dyn Beside>) {
        // A second one is not set.
        let _ = self.deletes.beside.set(beside);
    }

    /// Deletes blocks here and on all other nodes, durably; says which of these could not be told. Whether the caller waits for it or
    /// not, what was begun is done.
    pub async fn delete(self: &Arc<Self>, request: DeleteRequest) -> Result<Deleted, Error> {
        let node = Arc::clone(self);
        // ends: the store's transfers (`OVERDUE`), the list (`NOTED_WITHIN`), other nodes (`TELL_TIMEOUT`)
        self.to_the_end(async move { node.delete_everywhere(request).await }).await
    }

    async fn delete_everywhere(self: &Arc<Self>, request: DeleteRequest) -> Result<Deleted, Error> {
        let (namespace, deadline) = (request.namespace, request.deadline);
        let (named, below_ms) = (self.named(namespace, &request.target).await?, self.below_now());
        let entry = |what| Arc::new(Entry { namespace, below_ms, what });
        let entries: Vec<Arc<Entry>> = named.into_iter().map(entry).collect();
        let mut reply = self.delete_here(&entries, request).await?;
        let (name, tally, away) = self.tell_all(entries, deadline).await?;
        reply.blocks += tally.blocks;
        for (outcome, were) in reply.outcomes.iter_mut().zip(tally.were) {
            if were && *outcome == DeleteOutcome::NotHere {
                *outcome = DeleteOutcome::Deleted;
            }
        }
        Ok(Deleted { reply, away, name, below_ms })
    }

    /// Blocks have less time to live here since now: so they have on all other nodes.
    pub async fn end_sooner(
        self: &Arc<Self>,
        namespace: NamespaceId,
        column: Column,
        keys: Vec<BlockKey>,
        ttl: Duration,
    ) -> Result<Shortened, Error> {
        let node = Arc::clone(self);
        self.to_the_end(async move {
            let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
            let ends_ms = node.store.wall_ms().saturating_add(ttl_ms);
            let what = What::Sooner(column, keys, ends_ms);
            let entry = Arc::new(Entry { namespace, below_ms: node.below_now(), what });
            node.begin_here(&entry).await;
            if let What::Sooner((group, coordinate), keys, _) = &entry.what {
                // Copies that were just being stored have the end of before.
                let (group, coordinate) = (*group, *coordinate);
                let request = TtlRequest { namespace, group, coordinate, keys, ttl: Some(ttl) };
                node.store.shorten_ttl(&request)?;
            }
            let (name, tally, away) = node.tell_all(vec![entry], None).await?;
            Ok(Shortened { were: tally.were, away, name })
        })
        .await
    }

    /// Runs something to its end, even if who waits for it goes.
    async fn to_the_end<T: Send + 'static>(
        &self,
        what: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        let (tell, told) = oneshot::channel();
        self.spawn(async move {
            // Who asked may be gone.
            // ends: what it was given: each wait in it has its own end; or the node stops
            let _ = tell.send(what.await);
        });
        // ends: the task above, which drops the sender, also when the node stops
        told.await.unwrap_or(Err(Error(Reason::Busy("this node is stopping"))))
    }

    /// Later than everything that was produced, as far as this node can know.
    fn below_now(&self) -> u64 {
        let by_clock = self.store.wall_ms().saturating_add(CLOCKS_APART_MS);
        by_clock.max(self.store.produced_now().saturating_add(1))
    }

    /// Numbers an entry of this node and writes it down.
    async fn note_own(self: &Arc<Self>, entry: &Arc<Entry>, others: &[NodeId]) -> Result<Name, Error> {
        let me = self.me;
        // Numbers of one start are all above those of the starts before it, whatever was lost of the list.
        let first = self.options.start.wrapping_shl(32) | 1;
        let mut numbered = None;
        let number = |log: &Log| {
            let name = (me, log.next(&me).max(first));
            // Before any other node can have been told.
            lock(&self.deletes.tallies).insert(name, Tally::default());
            *numbered.insert(name)
        };
        let noted = self.note(number, entry, others).await;
        if noted.is_err() {
            numbered.and_then(|name| lock(&self.deletes.tallies).remove(&name));
            self.note_in_store(entry);
        }
        noted
    }

    /// From here on nothing of it is read from a node that may have it still; what was read until then is not believed any more.
    pub(super) fn note_in_store(&self, entry: &Entry) {
        if !matches!(entry.what, What::Sooner(..)) {
            self.store.note_delete(entry.namespace);
        }
    }

    /// Writes entries down and tells all other nodes, and what these know to descend from them. Gives the last one's name, what they
    /// said, and which of them do not have all.
    async fn tell_all(
        self: &Arc<Self>,
        mut entries: Vec<Arc<Entry>>,
        deadline: Option<Nanos>,
    ) -> Result<(Name, Tally, Vec<Away>), Error> {
        let links = self.links();
        let others: Vec<NodeId> = links.iter().map(|link| link.id()).collect();
        let left = deadline.map_or(TELL_TIMEOUT, |deadline| deadline.since(self.footing.runner.now()));
        let until = self.footing.runner.now().plus(TELL_TIMEOUT.min(left));
        let (mut last, mut all) = ((self.me, 0), Tally::default());
        while !entries.is_empty() {
            let mut told = Vec::new();
            for entry in std::mem::take(&mut entries) {
                last = self.note_own(&entry, &others).await?;
                told.push((last, entry));
            }
            self.tell_each(&links, until.since(self.footing.runner.now())).await;
            for (name, entry) in told {
                let tally = lock(&self.deletes.tallies).remove(&name).unwrap_or_default();
                all.blocks += tally.blocks;
                all.were = tally.were;
                if let Some((found, blocks)) = self.found(&entry, tally.found).await? {
                    all.blocks += blocks;
                    entries.push(found);
                }
            }
        }
        // Who has the last one has those before it.
        let lacks = |link: &&Arc<Link>| lock(&self.deletes.log).lacks_name(&link.id(), &last);
        let away = links.iter().filter(lacks).map(|link| {
            let state = link.state();
            let trouble = match state.is_connected {
                true => {
                    format!(
                        "the node has not confirmed the delete within {:.1} s",
                        TELL_TIMEOUT.min(left).as_secs_f64()
                    )
                }
                false if state.trouble.is_empty() => "the node is not connected".to_owned(),
                false => state.trouble,
            };
            Away { node: link.id(), address: link.member.address.clone(), trouble }
        });
        Ok((last, all, away.collect()))
    }

    /// Deletes here what another node knows to descend from an entry's keys; gives the entry that tells it all others, and the blocks.
    async fn found(
        &self,
        entry: &Entry,
        keys: Option<Vec<BlockKey>>,
    ) -> Result<Option<(Arc<Entry>, u64)>, Error> {
        let what = match keys {
            Some(keys) if keys.is_empty() => return Ok(None),
            Some(keys) if keys.len() <= MAX_REQUEST_BLOCKS => What::Prefix(keys),
            _ => What::Everything,
        };
        let found = Arc::new(Entry { namespace: entry.namespace, below_ms: entry.below_ms, what });
        let blocks = self.carry_out(&found).await?.blocks;
        Ok(Some((found, blocks)))
    }
}
