//! Blocks that one node offers another: what was put here of a chain that the other one owns, and the last copy of blocks of own
//! chains that are about to be evicted.
//!
//! The other one says which of them it is going to read, and reads them as any copy, in the lowest class. Everything is bounded:
//! what does not fit into a queue, or is asked for when there is no room, is not offered or not taken, and counted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvarts_cluster::hot::ColumnName;
use kvarts_cluster::members::NodeId;
use kvarts_cluster::partition::Tag;
use kvarts_contract::api::Leaving;
use kvarts_contract::clock::Nanos;
use kvarts_layout::{BlockKey, NamespaceId, planted};
use kvarts_wire::{convert, proto};
use tokio::sync::mpsc;
use tonic::Status;

use super::locate::Asked;
use super::replicate::{Held, Terms};
use super::{ClusterNode, Column, wire};

/// Offers that wait to be made, and those of others that wait to be read.
const WAITING: usize = 64;
/// Blocks of one offer.
const BLOCKS_MAX: usize = 4096;
/// How long the other node may take to answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// How long the directory may take.
const LOCATE_TIMEOUT: Duration = Duration::from_millis(25);
/// What is offered may not be known as a copy yet: it is looked for so often, after a pause.
const TRIES: usize = 3;
const PAUSE: Duration = Duration::from_millis(500);
/// How often blocks are looked for that are about to be evicted.
pub const OFFER_EVERY: Duration = Duration::from_secs(5);
/// Hundredths of the budget from which on they are, and nothing that others offer is taken for which room would have to be made.
const FULL: u64 = 80;
/// How often a block must have been used lately to be worth it.
const USES: u8 = 1;
/// Blocks that are offered of one look.
const SWEEP_BLOCKS: usize = 1024;
/// Nodes that they are offered to, one after the other.
const NODES_ASKED: usize = 2;

/// Blocks of one column.
type Blocks = (ColumnName, Vec<BlockKey>);

/// What another node offers.
#[derive(Debug)]
pub(super) struct Offered {
    blocks: Blocks,
    /// The chain that they are of, if this node owns that.
    chain: Option<Tag>,
    /// How long they were put for.
    put: Option<Held>,
}

/// What is offered to an owner.
#[derive(Debug)]
pub(super) struct ToOwner {
    pub(super) owner: NodeId,
    pub(super) chain: Tag,
    pub(super) blocks: Blocks,
    /// How long this node holds them, and when they end by themselves.
    pub(super) held: Held,
}

/// The queues of offers.
#[derive(Debug)]
pub(super) struct Queues {
    to_owners: mpsc::Receiver<ToOwner>,
    offered: mpsc::Receiver<Offered>,
}

/// What is offered, in both directions.
#[derive(Debug)]
pub(super) struct Offers {
    to_owners: mpsc::Sender<ToOwner>,
    offered: mpsc::Sender<Offered>,
    forwarded: AtomicU64,
    last: AtomicU64,
    taken: AtomicU64,
    copied: AtomicU64,
    failed: AtomicU64,
}

/// What became of offers, in blocks, for an operator.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OfferCounts {
    /// Blocks that were put here and offered to the owner of their chain.
    pub forwarded: u64,
    /// Last copies that were offered before their eviction.
    pub last: u64,
    /// Of both, what other nodes said that they would read.
    pub taken: u64,
    /// Blocks of others' offers that were copied here.
    pub copied: u64,
    /// Blocks of others' offers that were not there any more, or that there was no room for.
    pub failed: u64,
}

impl Offers {
    pub(super) fn new() -> (Self, Queues) {
        let (to_owners, out) = mpsc::channel(WAITING);
        let (offered, come) = mpsc::channel(WAITING);
        let [forwarded, last, taken, copied, failed] = [const { AtomicU64::new(0) }; 5];
        let offers = Self { to_owners, offered, forwarded, last, taken, copied, failed };
        (offers, Queues { to_owners: out, offered: come })
    }

    pub(super) fn counts(&self) -> OfferCounts {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        OfferCounts {
            forwarded: of(&self.forwarded),
            last: of(&self.last),
            taken: of(&self.taken),
            copied: of(&self.copied),
            failed: of(&self.failed),
        }
    }

    /// Offers blocks to the owner of their chain, if there is room in the queue.
    pub(super) fn to_owner(&self, mut offer: ToOwner) {
        offer.blocks.1.truncate(BLOCKS_MAX);
        let blocks = offer.blocks.1.len() as u64;
        if self.to_owners.try_send(offer).is_ok() {
            self.forwarded.fetch_add(blocks, Ordering::Relaxed);
        }
    }
}

fn request(
    (namespace, group, coordinate): ColumnName,
    keys: &[BlockKey],
    chain: Option<Tag>,
) -> proto::OfferRequest {
    proto::OfferRequest {
        namespace: namespace.as_bytes().to_vec().into(),
        column: Some(convert::wire_column(group, coordinate)),
        keys: convert::key_bytes(keys),
        chain: chain.map(|chain| chain.0.to_vec().into()).unwrap_or_default(),
        held_ms: 0,
        lives_ms: 0,
    }
}

/// What an end without one is said with.
const ENDLESS: u64 = u64::MAX;

/// A time as another node is told it.
fn left(until: Nanos, now: Nanos) -> u64 {
    u64::try_from(until.since(now).as_millis()).unwrap_or(ENDLESS)
}

/// For how long a block was put, as another node says; nothing if it was put for good.
fn held(offer: &proto::OfferRequest, now: Nanos) -> Option<Held> {
    let at = |ms| now.plus(Duration::from_millis(ms));
    let ends = (offer.lives_ms != ENDLESS).then(|| at(offer.lives_ms));
    (offer.held_ms > 0).then(|| Held { until: at(offer.held_ms), ends })
}

/// Does all of this for as long as the node runs.
pub(super) fn begin(node: &Arc<ClusterNode>, queues: Queues) {
    let Queues { to_owners, offered } = queues;
    node.spawn(forward(Arc::clone(node), to_owners));
    node.spawn(take(Arc::clone(node), offered));
    let sweeping = Arc::clone(node);
    node.spawn(async move {
        loop {
            sweeping.sleep(sweeping.options.offer_every).await;
            if sweeping.owned.any() && sweeping.is_nearly_full() {
                sweeping.offer_last_copies().await;
            }
        }
    });
}

async fn forward(node: Arc<ClusterNode>, mut to_owners: mpsc::Receiver<ToOwner>) {
    // ends: the node stops, which ends the task
    while let Some(ToOwner { owner, chain, blocks: (name, keys), held }) = to_owners.recv().await {
        if !planted!("owner-not-offered") {
            let now = node.footing.runner.now();
            let (held_ms, lives_ms) =
                (left(held.until, now), held.ends.map_or(ENDLESS, |ends| left(ends, now)));
            let offer = proto::OfferRequest { held_ms, lives_ms, ..request(name, &keys, Some(chain)) };
            node.offer(owner, offer).await;
        }
    }
}

/// Reads what others have offered.
async fn take(node: Arc<ClusterNode>, mut offered: mpsc::Receiver<Offered>) {
    while let Some(Offered { blocks: ((namespace, group, coordinate), all), chain, put }) =
        // ends: the node stops, which ends the task
        offered.recv().await
    {
        let mut keys = all.clone();
        for turn in 0..TRIES {
            if turn > 0 {
                node.sleep(PAUSE).await;
            }
            let Ok(shape) = node.store.shape(namespace, group, coordinate) else { break };
            let column = Column { namespace, group, coordinate, keys: &keys };
            let terms = Terms { hold: None, put };
            let Ok(done) = node.replicate_as(column, &shape, terms).await else { continue };
            node.offers.copied.fetch_add(u64::from(done.stored), Ordering::Relaxed);
            if done.missing == 0 {
                keys.clear();
                break;
            }
            let here = node.own_blocks(&column);
            let missing = keys.iter().zip(here).filter(|(_, here)| !here);
            keys = missing.map(|(key, _)| *key).collect();
        }
        node.offers.failed.fetch_add(keys.len() as u64, Ordering::Relaxed);
        if let Some(chain) = chain {
            node.note_of_chain(chain, &Column { namespace, group, coordinate, keys: &all });
        }
    }
}

impl ClusterNode {
    /// Offers blocks to a node; gives how many it is going to read.
    async fn offer(&self, to: NodeId, offer: proto::OfferRequest) -> u32 {
        let Some(link) = self.link(to).filter(|link| link.state().is_connected) else { return 0 };
        let taken = link.offer(offer, TIMEOUT).await.map_or(0, |reply| reply.taken);
        self.offers.taken.fetch_add(u64::from(taken), Ordering::Relaxed);
        taken
    }

    fn is_nearly_full(&self) -> bool {
        let stats = self.store.stats();
        stats.allocated_bytes.saturating_mul(100) >= stats.budget_bytes.saturating_mul(FULL)
    }

    /// Another node offers blocks: gives how many are going to be read. None of a model whose identity this node was never shown.
    pub(super) fn offered(&self, offer: &proto::OfferRequest) -> Result<u32, Status> {
        let (keys, []) = offer.keys.as_chunks::<32>() else {
            return Err(Status::invalid_argument("keys: each key needs 32 bytes"));
        };
        if keys.len() > BLOCKS_MAX {
            return Err(Status::invalid_argument("keys: the limit is 4,096 keys"));
        }
        let namespace = <[u8; 32]>::try_from(&offer.namespace[..]).map(NamespaceId);
        let namespace = namespace.map_err(|_| Status::invalid_argument("namespace: 32 bytes"))?;
        let column = convert::column(offer.column.as_ref());
        let (group, coordinate) =
            column.map_err(|fault| Status::invalid_argument(fault.detail.message.clone()))?;
        let chain = if offer.chain.is_empty() { None } else { Some(wire::tag(&offer.chain)?) };
        let is_known =
            self.lanes().knows(namespace) && self.store.shape(namespace, group, coordinate).is_ok();
        let own = chain.filter(|chain| self.owned.lease(chain, self.now()).is_some());
        if !is_known || own.is_none() && self.is_nearly_full() {
            return Ok(0);
        }
        let keys: Vec<BlockKey> = keys.iter().map(|key| BlockKey(*key)).collect();
        let column = Column { namespace, group, coordinate, keys: &keys };
        let here = self.own_blocks(&column);
        let missing = keys.iter().zip(here).filter(|(_, here)| !here);
        let missing: Vec<BlockKey> = missing.map(|(key, _)| *key).collect();
        let taken = missing.len() as u32;
        let put = held(offer, self.footing.runner.now());
        let offered = Offered { blocks: (column.name(), missing), chain: own, put };
        let is_taken = taken > 0 && self.offers.offered.try_send(offered).is_ok();
        Ok(if is_taken { taken } else { 0 })
    }

    /// Offers blocks of own chains that are about to be evicted, of which no other node has a copy.
    async fn offer_last_copies(&self) {
        let mut columns: BTreeMap<ColumnName, Vec<BlockKey>> = BTreeMap::new();
        for shard in 0..self.store.shards() {
            // A shard that cannot say is asked again the next time.
            // ends: an executor answers from memory, or the store is closed
            let Ok(Ok(leaving)) = self.store.leaving(shard, USES).await else { continue };
            // What has a time to live is a copy, or goes anyhow.
            for one in leaving.into_iter().filter(|one| one.expires_ms == 0) {
                let Leaving { namespace, group, coordinate, keys, .. } = one;
                let favoured = self.store.favoured(namespace, (group, coordinate), &keys);
                let own =
                    keys.into_iter().zip(favoured.unwrap_or_default()).filter(|(_, favoured)| *favoured);
                columns.entry((namespace, group, coordinate)).or_default().extend(own.map(|(key, _)| key));
            }
        }
        let mut left = SWEEP_BLOCKS;
        for ((namespace, group, coordinate), keys) in columns {
            for keys in keys.chunks(BLOCKS_MAX) {
                left -= self.offer_last(&Column { namespace, group, coordinate, keys }, left).await;
                if left == 0 {
                    return;
                }
            }
        }
    }

    /// The same of some of them; gives how many were offered, at most `most`.
    async fn offer_last(&self, column: &Column<'_>, most: usize) -> usize {
        let tags: Vec<Tag> = column.keys.iter().map(|key| column.tag(key)).collect();
        let Asked { located, .. } = self.ask_holders(&tags, false, LOCATE_TIMEOUT).await;
        let mut is_last: Vec<bool> =
            located.copies.iter().map(|nodes| nodes.iter().all(|node| *node == self.me)).collect();
        for place in &located.unasked {
            // It may be anywhere.
            if let Some(is_last) = is_last.get_mut(*place) {
                *is_last = false;
            }
        }
        let last = column.keys.iter().zip(is_last).filter(|(_, is_last)| *is_last).take(most);
        let last: Vec<BlockKey> = last.map(|(key, _)| *key).collect();
        let Some(first) = last.first() else { return 0 };
        self.offers.last.fetch_add(last.len() as u64, Ordering::Relaxed);
        let links = self.links();
        let others = links.iter().filter(|link| link.state().is_connected).map(|link| link.id());
        let others: Vec<NodeId> = others.collect();
        // Not always the same nodes.
        let begin = usize::from(first.0[0]) % others.len().max(1);
        for to in others.iter().cycle().skip(begin).take(NODES_ASKED.min(others.len())) {
            if self.offer(*to, request(column.name(), &last, None)).await as usize >= last.len() {
                break;
            }
        }
        last.len()
    }
}
