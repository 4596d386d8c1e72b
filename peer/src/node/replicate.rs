//! Copies of other nodes' blocks, kept here for a time: the same production, so that reads mix their bytes.

use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, Durability, KvStore, MAX_REQUEST_BLOCKS, Order, Origins, Parent, Placed, PutRequest,
    ReadRequest, Verify,
};
use kvarts_contract::buffers::BufMut;
use kvarts_contract::class::Class;
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::{BlockKey, BlockShape, OriginId};

use super::{ClusterNode, Column};

/// Memory that one call has for blocks on their way.
const MEMORY: u64 = 32 << 20;
/// Calls that copy at a time.
pub(super) const AT_ONCE: usize = 2;

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
        let _turn = self.copying.acquire().await.map_err(|_| Reason::Busy("this node stops"))?;
        let own = self.own_blocks(&column);
        let missing = own.iter().zip(column.keys).filter(|(here, _)| !**here);
        let missing: Vec<BlockKey> = missing.map(|(_, key)| *key).collect();
        let mut done = Replicated { here: (own.len() - missing.len()) as u32, ..Replicated::default() };
        let at_once = (MEMORY / shape.block_bytes().max(1)).clamp(1, MAX_REQUEST_BLOCKS as u64) as usize;
        for keys in missing.chunks(at_once) {
            done.stored += self.copy(Column { keys, ..column }, shape, hold).await?;
        }
        done.missing = missing.len() as u32 - done.stored;
        Ok(done)
    }

    /// Copies as many blocks as fit into memory; gives how many were stored.
    async fn copy(
        self: &Arc<Self>,
        column: Column<'_>,
        shape: &BlockShape,
        hold: Option<Duration>,
    ) -> Result<u32, Error> {
        let Column { namespace, group, coordinate, keys } = column;
        let blocks = keys.len() as u32;
        let bytes = usize::try_from(shape.block_bytes().saturating_mul(u64::from(blocks)));
        let memory = BufMut::zeroed(bytes.map_err(|_| Reason::TooMany("bytes"))?);
        let memory = memory.map_err(|error| Reason::Passing(error.to_string()))?.share();
        let into = Placed::blocks(shape, memory, blocks)?;
        let origins = Origins::any(keys.len());
        let request = ReadRequest {
            order: Order::Blocks,
            class: Class::Background,
            verify: Verify::Always,
            ..ReadRequest::new(namespace, group, coordinate, keys.to_vec(), into.clone())
        };
        let stream = self.read(request, shape, &origins)?;
        let end = std::future::poll_fn(|context| stream.poll_end(context)).await;
        let end = end.map_err(|_| Reason::Busy("this node stops"))?;
        let failed = |block: u32| end.failures.iter().any(|(at, _)| *at == block);
        let came: Vec<(u32, OriginId)> = (0..blocks)
            .zip(origins.met())
            .filter_map(|(block, origin)| origin.filter(|_| !failed(block)).map(|origin| (block, origin)))
            .collect();
        if came.is_empty() {
            return Ok(0);
        }
        let (places, origins): (Vec<u32>, Vec<OriginId>) = came.into_iter().unzip();
        let keys = places.iter().filter_map(|place| keys.get(*place as usize).copied()).collect();
        let put = PutRequest {
            durability: Durability::Relaxed,
            expires_after: hold,
            origins: Some(origins),
            parent: Parent::Unknown,
            ..PutRequest::new(namespace, group, coordinate, keys, into.select(&places)?)
        };
        let reply = self.store.put(put).await.map_err(|_| Reason::Busy("this node stops"))??;
        Ok(reply.outcomes.iter().filter(|outcome| **outcome == BlockOutcome::Stored).count() as u32)
    }
}
