//! `ListBlocks`: what is here, page by page, to each tenant its own. The pages are the engine's snapshot.
//!
//! A page looks at the blocks of all tenants, so one for a caller with few may have none; a call goes through some of them.

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use kvarts_contract::api::{SnapshotCursor, SnapshotPage};
use kvarts_contract::error::Reason;
use kvarts_contract::events::Sequence;
use kvarts_layout::{IndexKey, NamespaceId};
use tokio::time::Instant;

use super::convert;
use super::fault::{Fault, Outcome};
use super::points::{known, point};
use crate::calls::call::Call;
use crate::state::Model;
use kvarts_wire::proto;
use kvarts_wire::proto::list_blocks_reply::Blocks;

/// Bytes of an answer at most, and what it is made of; of a page that one record makes longer it is more.
const ANSWER_BYTES: usize = 512 << 10;
/// How long a call looks for a page that has blocks.
const LOOK: Duration = Duration::from_millis(200);
/// Bytes of a page's token: four numbers.
const TOKEN_BYTES: usize = 32;

/// Whose blocks are told of. A model that is watched is in use.
pub(super) struct Wanted(Option<Arc<Model>>);

impl Wanted {
    /// Of this model, or of all of the caller's.
    pub(super) fn of(call: &Call, namespace: &[u8]) -> Outcome<Self> {
        if namespace.is_empty() {
            return Ok(Self(None));
        }
        Ok(Self(Some(call.state.models.get(&call.caller, convert::namespace(namespace)?)?)))
    }

    /// Whether these blocks are the caller's, and asked for.
    pub(super) fn has(&self, call: &Call, namespace: NamespaceId) -> bool {
        match &self.0 {
            Some(model) => model.namespace == namespace,
            None => call.state.models.get(&call.caller, namespace).is_ok(),
        }
    }

    /// A page of the engine's, without what is not wanted.
    pub(super) async fn page(
        &self,
        call: &Call,
        cursor: Option<SnapshotCursor>,
    ) -> Result<SnapshotPage, Reason> {
        // ends: an executor answers from memory, or the store is closed
        let page = call.state.store().snapshot(cursor).await;
        let page = page.map_err(|_| Reason::Busy("the store is closing"))?;
        let mut page = page.map_err(|error| error.0)?;
        let mut last = None;
        page.blocks.retain(|block| match last {
            Some((namespace, is_wanted)) if namespace == block.namespace => is_wanted,
            _ => last.insert((block.namespace, self.has(call, block.namespace))).1,
        });
        Ok(page)
    }
}

/// Blocks that follow each other and are of one column.
pub(super) fn columns(blocks: &[IndexKey]) -> impl Iterator<Item = &[IndexKey]> {
    let column = |block: &IndexKey| (block.namespace, block.group, block.coordinate);
    blocks.chunk_by(move |a, b| column(a) == column(b))
}

/// Their keys, one after the other.
pub(super) fn keys<'a>(blocks: impl Iterator<Item = &'a IndexKey>) -> Bytes {
    let mut keys = BytesMut::new();
    for block in blocks {
        keys.put_slice(block.key.as_bytes());
    }
    keys.freeze()
}

/// Serves a page.
pub(super) async fn list(call: Arc<Call>, wire: proto::ListBlocksRequest) -> Outcome<proto::ListBlocksReply> {
    // It costs about what a watcher does.
    let place = call.caller.tenant.watcher();
    let _place = place.ok_or_else(|| Fault::busy("the tenant's limit of watchers is reached"))?;
    let wanted = Wanted::of(&call, &wire.namespace)?;
    call.keep_large(ANSWER_BYTES).await?;
    let until = Instant::now() + LOOK;
    let mut cursor = cursor_of(&call, &wire.page_token)?;
    loop {
        let page = wanted.page(&call, cursor).await?;
        cursor = page.next;
        if cursor.is_none() || !page.blocks.is_empty() || Instant::now() >= until {
            return Ok(proto::ListBlocksReply {
                blocks: columns(&page.blocks).filter_map(told).collect(),
                sequence: Some(point(&call, page.sequence)),
                next_page_token: cursor.map(|next| token_of(&call, next)).unwrap_or_default(),
            });
        }
    }
}

fn told(blocks: &[IndexKey]) -> Option<Blocks> {
    let first = blocks.first()?;
    Some(Blocks {
        namespace: Bytes::copy_from_slice(first.namespace.as_bytes()),
        column: Some(convert::wire_column(first.group, first.coordinate)),
        keys: keys(blocks.iter()),
    })
}

/// Where the next page begins, as the caller may know it: the engine's numbers would tell what others have.
fn token_of(call: &Call, cursor: SnapshotCursor) -> Bytes {
    let stream = cursor.sequence.stream;
    let place = u64::from(cursor.shard) << 32 | u64::from(cursor.segment);
    let hidden = |number| point(call, Sequence { stream, number }).number;
    let mut token = BytesMut::with_capacity(TOKEN_BYTES);
    token.put_u64_le(point(call, cursor.sequence).stream);
    for number in [cursor.sequence.number, place, u64::from(cursor.record)] {
        token.put_u64_le(hidden(number));
    }
    token.freeze()
}

/// The place that a token means. One that the caller made up is some place, or none.
fn cursor_of(call: &Call, token: &[u8]) -> Outcome<Option<SnapshotCursor>> {
    if token.is_empty() {
        return Ok(None);
    }
    let (numbers, rest) = token.as_chunks::<8>();
    let (&[stream, number, place, record], []) = (numbers, rest) else {
        return Err(Fault::malformed(
            "page_token: this server did not issue the token: begin the list again",
        ));
    };
    let stream = u64::from_le_bytes(stream);
    let shown = |number| known(call, proto::Sequence { stream, number: u64::from_le_bytes(number) });
    let (sequence, place, record) = (shown(number), shown(place).number, shown(record).number);
    let record = u32::try_from(record).map_err(|_| {
        Fault::malformed("page_token: this server did not issue the token: begin the list again")
    })?;
    let (shard, segment) = ((place >> 32) as u32, place as u32);
    Ok(Some(SnapshotCursor { sequence, shard, segment, record }))
}
