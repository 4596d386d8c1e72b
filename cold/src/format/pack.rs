//! A pack: an export file of blocks of one namespace, immutable, under the name that its content gives it.

use std::collections::BTreeSet;

use bytes::Bytes;
use kvarts_layout::export::{ExportedNamespace, HEAD_BYTES, Run, Writing};
use kvarts_layout::{BlockKey, BlockShape, NamespaceId};

use super::index::{Payloads, walk};
use super::{
    BLOCK_MAX, FormatError, INDEX_BYTES_MAX, PACK_PAYLOAD_MAX, PackEntry, PackId, PackIndex, fingerprint,
};

/// What the frames of a run take beside its blocks and digests, at most: its head, its fixed fields.
const RUN_OVERHEAD: usize = HEAD_BYTES + 120;
/// Kept free in an index for its last frame.
const END_BYTES: usize = HEAD_BYTES + 40;

/// A pack that is whole.
#[derive(Clone, Debug)]
pub struct Pack {
    /// Its name.
    pub id: PackId,
    /// Its bytes, in pieces that follow each other.
    pub body: Vec<Bytes>,
    /// The bytes of its index.
    pub index: Bytes,
    /// What a manifest says of it.
    pub entry: PackEntry,
}

/// Makes a pack run by run. It holds the bytes of all of them.
#[derive(Debug)]
pub struct PackBuilder {
    writing: Writing,
    namespace_id: NamespaceId,
    namespace: ExportedNamespace,
    body: Vec<Bytes>,
    index: Vec<u8>,
    payload_bytes: u64,
    blocks: u64,
    seen: BTreeSet<(BlockKey, u32, u64)>,
    expires_ms: Option<u64>,
}

impl PackBuilder {
    /// An empty pack. `begin_ms` goes into its first frame: with another one the same blocks are a pack of another name.
    pub fn new(namespace: &ExportedNamespace, begin_ms: u64) -> Result<Self, FormatError> {
        let mut writing = Writing::new();
        let begin = writing.begin(begin_ms)?;
        let spec = writing.spec(&namespace.geometry)?;
        let identity = writing.identity(&namespace.identity)?;
        let index = [begin, spec, identity].concat();
        if index.len() > INDEX_BYTES_MAX / 2 {
            return Err(FormatError::Rule("the index is larger than its limit"));
        }
        Ok(Self {
            writing,
            namespace_id: namespace.identity.namespace_id().map_err(|_| FormatError::Rule("identity"))?,
            namespace: namespace.clone(),
            body: vec![Bytes::copy_from_slice(&index)],
            index,
            payload_bytes: 0,
            blocks: 0,
            seen: BTreeSet::new(),
            expires_ms: None,
        })
    }

    /// Bytes of blocks so far.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// Blocks so far.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Whether a block is in it.
    pub fn has(&self, key: &BlockKey, run: &Run) -> bool {
        self.seen.contains(&(*key, run.group.0, run.coordinate.to_u64()))
    }

    /// How many blocks of this length and number of chunks fit as one more run, if the pack is to have no more than `target`
    /// bytes of blocks. An empty pack takes one block, whatever its length, up to [`BLOCK_MAX`].
    pub fn room(&self, block_bytes: u64, chunks: u32, target: u64) -> u32 {
        let target = target.min(PACK_PAYLOAD_MAX);
        let by_payload = target.saturating_sub(self.payload_bytes).checked_div(block_bytes).unwrap_or(0);
        let entry = (chunks as usize).saturating_mul(4).saturating_add(80);
        let left = INDEX_BYTES_MAX.saturating_sub(self.index.len() + RUN_OVERHEAD + END_BYTES);
        let by_index = left.checked_div(entry).unwrap_or(0) as u64;
        let fit = by_payload.min(by_index).min(u64::from(Run::most_blocks(block_bytes, chunks)));
        let alone = self.blocks == 0 && block_bytes <= BLOCK_MAX && by_index > 0;
        u32::try_from(fit).unwrap_or(u32::MAX).max(u32::from(alone))
    }

    /// Takes a run with its bytes, every one of which is verified. A run that is refused leaves the pack unusable.
    pub fn add(&mut self, run: &Run, payload: Bytes) -> Result<(), FormatError> {
        if run.namespace != self.namespace_id {
            return Err(FormatError::Rule("the blocks of a pack must have one namespace"));
        }
        let shape = run.shape(&self.namespace)?;
        verify_run(run, &shape, &payload)?;
        for block in &run.blocks {
            if !self.seen.insert((block.key, run.group.0, run.coordinate.to_u64())) {
                return Err(FormatError::Rule("a block is in the pack twice"));
            }
        }
        let frame = self.writing.run(run)?;
        self.index.extend_from_slice(&frame);
        self.payload_bytes = self.payload_bytes.saturating_add(payload.len() as u64);
        self.blocks = self.blocks.saturating_add(run.blocks.len() as u64);
        let most = if self.blocks == 1 { BLOCK_MAX } else { PACK_PAYLOAD_MAX };
        if self.payload_bytes > most || self.index.len() + END_BYTES > INDEX_BYTES_MAX {
            return Err(FormatError::Rule("the number of blocks of a pack is outside its limits"));
        }
        self.body.push(Bytes::from(frame));
        self.body.push(payload);
        let known = self.expires_ms;
        self.expires_ms = Some(match (known, run.expires_ms) {
            (Some(0), _) | (_, 0) => 0,
            (known, expires_ms) => known.unwrap_or(0).max(expires_ms),
        });
        Ok(())
    }

    /// The pack, if there is a block in it.
    pub fn finish(mut self, added_ms: u64) -> Result<Pack, FormatError> {
        if self.blocks == 0 {
            return Err(FormatError::Rule("the number of blocks of a pack is outside its limits"));
        }
        let end = self.writing.end()?;
        self.index.extend_from_slice(&end);
        let mut filter: Vec<u32> = self.seen.iter().map(|(key, _, _)| fingerprint(key)).collect();
        filter.sort_unstable();
        filter.dedup();
        // The head of a frame ends with its chain value.
        let id = end.get(HEAD_BYTES - 32..HEAD_BYTES).and_then(|chain| chain.try_into().ok());
        let id = PackId(id.ok_or(FormatError::Damaged)?);
        let totals = self.writing.totals();
        let entry = PackEntry {
            payload_bytes: self.payload_bytes,
            index_bytes: self.index.len() as u32,
            runs: totals.runs as u32,
            blocks: totals.blocks as u32,
            added_ms,
            expires_ms: self.expires_ms.unwrap_or(0),
            filter,
        };
        self.body.push(Bytes::from(end));
        Ok(Pack { id, body: self.body, index: Bytes::from(self.index), entry })
    }
}

fn verify_run(run: &Run, shape: &BlockShape, payload: &[u8]) -> Result<(), FormatError> {
    if run.payload_bytes() != Some(payload.len() as u64) {
        return Err(FormatError::Damaged);
    }
    let each = usize::try_from(run.block_bytes).unwrap_or(usize::MAX).max(1);
    for (at, bytes) in payload.chunks(each).enumerate() {
        run.verify(at, shape, bytes).map_err(FormatError::Block)?;
    }
    Ok(())
}

/// Verifies every byte of a pack, and makes its index anew.
pub fn verify(bytes: &[u8]) -> Result<(PackIndex, Vec<u8>), FormatError> {
    let mut inline = Inline { index: Vec::new() };
    let index = walk(bytes, &mut inline)?;
    Ok((index, inline.index))
}

/// Payloads lie behind their frames; what lies between them is kept.
struct Inline {
    index: Vec<u8>,
}

impl Payloads for Inline {
    fn take<'a>(
        &mut self,
        (head, body): (&[u8; HEAD_BYTES], &[u8]),
        run: Option<(&Run, &BlockShape)>,
        rest: &'a [u8],
    ) -> Result<&'a [u8], FormatError> {
        self.index.extend_from_slice(head);
        self.index.extend_from_slice(body);
        let Some((run, shape)) = run else { return Ok(rest) };
        let len =
            run.payload_bytes().and_then(|len| usize::try_from(len).ok()).ok_or(FormatError::Damaged)?;
        let (payload, rest) = rest.split_at_checked(len).ok_or(FormatError::Damaged)?;
        verify_run(run, shape, payload)?;
        Ok(rest)
    }
}
