//! Copies of other nodes' blocks, kept here for a time: the same production, so that reads mix their bytes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, Durability, KvStore, Life, MAX_REQUEST_BLOCKS, Order, Origins, Parent, Placed, PutRequest,
    ReadRequest, Verify,
};
use kvarts_contract::buffers::BufMut;
use kvarts_contract::class::Class;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::{BlockKey, BlockShape, OriginId, planted};

use super::{ClusterNode, Column};

/// Memory that one call has for blocks on their way.
const MEMORY: u64 = 32 << 20;
/// Less than this a copy does not live, and so much sooner it ends than what it is a copy of: a store rounds ends up, by less. So copies
/// of copies end ever sooner, and no two of them keep each other.
const ROUNDED_UP: Duration = Duration::from_millis(100);
/// Calls that copy at a time.
pub(super) const AT_ONCE: usize = 2;

/// How much sooner than it was held for a put may seem to end at the node that stored it.
const ABOUT: Duration = Duration::from_secs(2);

/// What the node that stored a put says of it, which holds it for another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Held {
    /// Until when it holds it.
    pub(super) until: Nanos,
    /// When it ends by itself.
    pub(super) ends: Option<Nanos>,
}

impl Held {
    /// How long the blocks live of which that node says this: what it holds them for does not count, an end that was set since does.
    fn own(self, life: Life) -> Life {
        match life.ends {
            Some(ends) if ends.plus(ABOUT) < self.until => life,
            _ => Life { ends: self.ends, ..life },
        }
    }
}

/// How copies are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Terms {
    /// For how long at most.
    pub(super) hold: Option<Duration>,
    /// They are of a put that another node holds for this one.
    pub(super) put: Option<Held>,
}

/// When blocks were produced, and how long copies of them live.
type Lives = (u64, Option<Duration>);

/// What became of blocks that were to be copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Replicated {
    /// Blocks that are here now and were not.
    pub stored: u32,
    /// Blocks that were here.
    pub here: u32,
    /// Blocks that no node gave, or that there was no room for.
    pub missing: u32,
}

impl ClusterNode {
    /// Copies blocks that other nodes have into this node's store, for `hold`: each is the production that was read, and is
    /// verified on the way as every read is.
    pub async fn replicate(
        self: &Arc<Self>,
        column: Column<'_>,
        shape: &BlockShape,
        hold: Option<Duration>,
    ) -> Result<Replicated, Error> {
        self.replicate_as(column, shape, Terms { hold, put: None }).await
    }

    /// The same, of what was put at another node.
    pub(super) async fn replicate_as(
        self: &Arc<Self>,
        column: Column<'_>,
        shape: &BlockShape,
        terms: Terms,
    ) -> Result<Replicated, Error> {
        // ends: copies before it end: their reads by `read`, their puts with the store's transfers (`OVERDUE`)
        let _turn = self.copying.acquire().await.map_err(|_| Reason::Busy("this node is stopping"))?;
        let own = self.own_blocks(&column);
        let missing = own.iter().zip(column.keys).filter(|(here, _)| !**here);
        let missing: Vec<BlockKey> = missing.map(|(_, key)| *key).collect();
        let mut done = Replicated { here: (own.len() - missing.len()) as u32, ..Replicated::default() };
        let at_once = (MEMORY / shape.block_bytes().max(1)).clamp(1, MAX_REQUEST_BLOCKS as u64) as usize;
        for keys in missing.chunks(at_once) {
            done.stored += self.copy(Column { keys, ..column }, shape, terms).await?;
        }
        done.missing = missing.len() as u32 - done.stored;
        Ok(done)
    }

    /// Copies as many blocks as fit into memory; gives how many were stored.
    async fn copy(
        self: &Arc<Self>,
        column: Column<'_>,
        shape: &BlockShape,
        terms: Terms,
    ) -> Result<u32, Error> {
        let Column { namespace, group, coordinate, keys } = column;
        let blocks = keys.len() as u32;
        let bytes = usize::try_from(shape.block_bytes().saturating_mul(u64::from(blocks)));
        let memory = BufMut::zeroed(bytes.map_err(|_| Reason::TooMany("bytes"))?);
        let memory = memory.map_err(|error| Reason::Passing(error.to_string()))?.share();
        let into = Placed::blocks(shape, memory, blocks)?;
        let (origins, since) = (Origins::any(keys.len()), self.deletes.copy_begins());
        let request = ReadRequest {
            order: Order::Blocks,
            class: Class::Background,
            verify: Verify::Always,
            ..ReadRequest::new(namespace, group, coordinate, keys.to_vec(), into.clone())
        };
        let stream = self.read(request, shape, &origins)?;
        // ends: other nodes that are silent are given up by the read itself (`GIVEN_UP`)
        let end = std::future::poll_fn(|context| stream.poll_end(context)).await;
        let end = end.map_err(|_| Reason::Busy("this node is stopping"))?;
        let failed = |block: u32| end.failures.iter().any(|(at, _)| *at == block);
        let came: Vec<(u32, OriginId, Life)> = (0..blocks)
            .zip(origins.met().into_iter().zip(origins.lives()))
            .filter(|(block, _)| !failed(*block))
            .filter_map(|(block, (origin, life))| Some((block, origin?, life?)))
            .collect();
        self.store_copies(column, &into, came, (since, terms)).await
    }

    /// Stores blocks that were read elsewhere since `since` deletes had begun: none that was deleted meanwhile, and none for longer than
    /// the production lives, or for longer than `hold`.
    async fn store_copies(
        &self,
        Column { namespace, group, coordinate, keys }: Column<'_>,
        from: &Placed,
        came: Vec<(u32, OriginId, Life)>,
        (since, terms): (u64, Terms),
    ) -> Result<u32, Error> {
        let _storing = self.deletes.storing().await;
        let now = self.footing.runner.now();
        let mut runs: BTreeMap<Lives, Vec<(u32, OriginId)>> = BTreeMap::new();
        for (place, origin, life) in came {
            let Some(key) = keys.get(place as usize) else { continue };
            let block = (namespace, (group, coordinate), key);
            let life = terms.put.map_or(life, |put| put.own(life));
            let Some(life) = self.deletes.copy_ends(since, block, life, (now, self.store.wall_ms())) else {
                continue;
            };
            let ends = life.ends.filter(|_| !planted!("copy-without-the-end"));
            let left = match ends.map(|ends| ends.since(now).checked_sub(ROUNDED_UP)) {
                None => terms.hold,
                // It is over.
                Some(None | Some(Duration::ZERO)) => continue,
                Some(Some(left)) => Some(terms.hold.map_or(left, |hold| hold.min(left))),
            };
            runs.entry((life.produced_ms, left)).or_default().push((place, origin));
        }
        let mut puts = Vec::new();
        for ((produced_ms, expires_after), run) in runs {
            let (places, origins): (Vec<u32>, Vec<OriginId>) = run.into_iter().unzip();
            let keys = places.iter().filter_map(|place| keys.get(*place as usize).copied()).collect();
            let put = PutRequest {
                durability: Durability::Relaxed,
                expires_after,
                origins: Some(origins),
                parent: Parent::Unknown,
                ..PutRequest::new(namespace, group, coordinate, keys, from.select(&places)?)
            };
            puts.push(self.store.put_copies(put, produced_ms));
        }
        let mut stored = 0;
        for put in puts {
            // ends: the store's transfers are given up after `OVERDUE`
            let reply = put.await.map_err(|_| Reason::Busy("this node is stopping"))??;
            let outcomes = reply.outcomes.iter();
            stored += outcomes.filter(|outcome| **outcome == BlockOutcome::Stored).count() as u32;
        }
        Ok(stored)
    }
}
