//! Servers, and the blocks of an identity there.

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::sync::Arc;

use kvarts_client::{Client as Remote, ConnectOptions, pool};
use kvarts_contract::api::KvStore;
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::cut::{Cut, CutError, Wanted};
use kvarts_layout::{BlockKey, BlockShape, NamespaceId};

use crate::said::{Status, call, free, given, hand_over, leave_several, several, text, wrong};

/// `kvarts_client`.
pub(crate) struct Client {
    pub(crate) remote: Remote,
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_connect(
    endpoint: *const c_char,
    token: *const c_char,
    client: *mut *mut Client,
) -> Status {
    call(|| {
        let endpoint = text(endpoint, "endpoint")?
            .ok_or_else(|| wrong("endpoint is null: the call requires a text of the form unix:PATH"))?;
        let token = text(token, "token")?.map(str::to_owned);
        let remote = Remote::connect(&ConnectOptions { token, ..ConnectOptions::to(endpoint) })?;
        hand_over(client, Client { remote }, "client")
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_client_free(client: *mut Client) {
    free(client);
}

/// `kvarts_identity`.
#[repr(C)]
struct Identity {
    model: *const c_char,
    revision: *const c_char,
    dtype: *const c_char,
    engine: *const c_char,
    layout: *const c_char,
    layout_version: *const c_char,
    tokenizer: *const c_char,
    adapter: *const c_char,
    quantisation: *const c_char,
    scales: *const c_char,
    rope: *const c_char,
    window: *const c_char,
    spec: *const c_char,
    page_bytes: u64,
    block_tokens: u32,
    tp_size: u16,
    tp_rank: u16,
}

/// `kvarts_blocks`.
pub(crate) struct Blocks {
    pub(crate) cut: Cut,
    pub(crate) namespace: NamespaceId,
}

fn cannot_be(error: CutError) -> Error {
    wrong(error.to_string())
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_blocks_of(
    client: *const Client,
    identity: *const Identity,
    blocks: *mut *mut Blocks,
) -> Status {
    call(|| {
        let Client { remote } = given(client, "client")?;
        let said = given(identity, "identity")?;
        let word = |pointer, name| text(pointer, name).map(|text| text.unwrap_or_default().to_owned());
        let or_none = |pointer, name| text(pointer, name).map(|text| text.unwrap_or("none").to_owned());
        let wanted = Wanted {
            model: word(said.model, "model")?,
            revision: word(said.revision, "revision")?,
            dtype: word(said.dtype, "dtype")?,
            engine: word(said.engine, "engine")?,
            layout: word(said.layout, "layout")?,
            layout_version: word(said.layout_version, "layout_version")?,
            block_tokens: said.block_tokens,
            tokenizer: or_none(said.tokenizer, "tokenizer")?,
            adapter: or_none(said.adapter, "adapter")?,
            quantisation: or_none(said.quantisation, "quantisation")?,
            scales: or_none(said.scales, "scales")?,
            rope: or_none(said.rope, "rope")?,
            window: or_none(said.window, "window")?,
            extras: BTreeMap::new(),
            tp_size: said.tp_size,
            tp_rank: said.tp_rank,
            windows: BTreeMap::new(),
        };
        let page_bytes = (said.page_bytes > 0).then(|| BTreeMap::from([(0, said.page_bytes)]));
        let cut = Cut::new(page_bytes, text(said.spec, "spec")?, wanted).map_err(cannot_be)?;
        let namespace = remote.register(&cut.identity, &cut.geometry)?;
        hand_over(blocks, Blocks { cut, namespace }, "blocks")
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_blocks_free(blocks: *mut Blocks) {
    free(blocks);
}

/// `kvarts_column`.
#[repr(C)]
pub(crate) struct Column {
    blocks: *const Blocks,
    group: u32,
    rank: i32,
}

impl Column {
    /// As pools know it, and the shape of its blocks.
    pub(crate) fn find(&self) -> Result<(pool::Column, Arc<BlockShape>), Error> {
        let Blocks { cut, namespace } = given(self.blocks, "blocks")?;
        let rank = match self.rank {
            -1 => None,
            rank => Some(u16::try_from(rank).map_err(|_| {
                wrong(format!(
                    "rank {rank} is not valid: a rank is 0 or more, or -1 for the rank of the identity"
                ))
            })?),
        };
        let (group, coordinate, shape) = cut.column(self.group, rank).map_err(cannot_be)?;
        Ok((pool::Column { namespace: *namespace, group, coordinate }, Arc::new(shape.clone())))
    }
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_column_parts(
    column: *const Column,
    bytes: *mut u64,
    room: usize,
    count: *mut usize,
) -> Status {
    call(|| {
        let (_, shape) = given(column, "column")?.find()?;
        let chunks = shape.layers().iter().flat_map(|layer| &layer.chunks);
        let all: Vec<u64> = chunks.map(|chunk| chunk.bytes).collect();
        leave_several(&all, (bytes, room), count)
    })
}

/// Keys that lie one after the other, 32 bytes each.
pub(crate) fn keys(keys: *const u8, count: usize) -> Result<Vec<BlockKey>, Error> {
    let bytes = count.checked_mul(32).ok_or(Error(Reason::TooMany("keys")))?;
    let (keys, _) = several(keys, bytes, "keys")?.as_chunks();
    Ok(keys.iter().copied().map(BlockKey).collect())
}
