//! Block keys: chained from tokens, or taken over from an engine; and the index key they become part of.
//!
//! A chained key names a block *and everything before it*:
//!
//! ```text
//! key_i = BLAKE3( KEY_DOMAIN | key_{i-1} | tokens: u64 | token u32 ... | bytes: u64 | extra ... )
//!                 16         | 32        | 8           | 4 each         | 8          | bytes
//! ```
//!
//! with every number little-endian and [`ROOT_KEY`] before the first block. Both lengths are in it, so no two
//! lists of tokens and extras are hashed from the same bytes. The domains of this crate all have sixteen bytes
//! and differ, so that a key is never a namespace id or a foreign key's image.
//!
//! To the store a key is opaque. What two engines would share must be decided by the identity, because
//! [`BlockKey::from_foreign`] keeps keys of 32 bytes as they are.

use crate::coord::Coordinate;
use crate::ids::{BlockKey, Group, NamespaceId};
use std::fmt;

mod extra;
#[cfg(test)]
mod tests;

pub use extra::{BlockExtra, ExtraError, MAX_EXTRA_ITEM_BYTES, MAX_EXTRA_ITEMS};

/// What the hashed bytes of every chained key begin with.
pub const KEY_DOMAIN: [u8; 16] = *b"kvarts.block.v1\0";
/// What is hashed to make [`ROOT_KEY`].
pub const ROOT_DOMAIN: [u8; 16] = *b"kvarts.root.v1\0\0";
/// What the hashed bytes of a mapped foreign key begin with.
pub const FOREIGN_DOMAIN: [u8; 16] = *b"kvarts.fkey.v1\0\0";
/// The key before the first block: BLAKE3 of [`ROOT_DOMAIN`].
pub const ROOT_KEY: BlockKey = BlockKey([
    0xf6, 0xfd, 0xf8, 0x4d, 0x9b, 0x09, 0x6b, 0x5b, 0x32, 0xb7, 0xf3, 0xd9, 0x44, 0xe7, 0x32, 0x84, 0xde,
    0x6a, 0x7a, 0x82, 0xf8, 0xc4, 0x16, 0xf1, 0x8c, 0x05, 0x77, 0xb6, 0xa7, 0x9c, 0x33, 0x4c,
]);
/// The most bytes a foreign key may have.
pub const MAX_FOREIGN_KEY_BYTES: usize = 4096;

/// Scratch is cleared for every single key, so there is some of each size that blocks commonly have: up to 112
/// tokens, up to 496, and any.
const SMALL_SCRATCH_BYTES: usize = 512;
const MEDIUM_SCRATCH_BYTES: usize = 2048;
/// The widest BLAKE3 hashes sixteen pieces of 1 KiB at once, if it is handed them in one slice.
const LARGE_SCRATCH_BYTES: usize = 16 * 1024;
/// Domain, parent and the number of tokens.
const HEAD_BYTES: usize = 56;
/// Those and the length of the extra.
const FRAME_BYTES: usize = 64;

/// Hands out the keys of a prefix's blocks, one after the other. Equal tokens and extras in the same blocks
/// give equal keys on every machine; a copy of the chain is a fork that shares what was pushed before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyChain {
    last: BlockKey,
}

impl Default for KeyChain {
    fn default() -> Self {
        Self::new()
    }
}

impl KeyChain {
    /// A chain before its first block.
    pub const fn new() -> Self {
        Self { last: ROOT_KEY }
    }

    /// A chain that continues after the block with this key.
    pub const fn after(key: BlockKey) -> Self {
        Self { last: key }
    }

    /// The key of the block that was pushed last, [`ROOT_KEY`] before the first.
    pub const fn last(&self) -> BlockKey {
        self.last
    }

    /// The key of the next block. `extra` is what else decides its state ([`BlockExtra`]), empty for plain text.
    pub fn push(&mut self, tokens: &[u32], extra: &[u8]) -> BlockKey {
        let bytes = tokens.len().saturating_mul(4).saturating_add(extra.len()).saturating_add(FRAME_BYTES);
        self.last = if bytes <= SMALL_SCRATCH_BYTES {
            chained_key(&self.last, tokens, extra, &mut [0; SMALL_SCRATCH_BYTES])
        } else if bytes <= MEDIUM_SCRATCH_BYTES {
            chained_key(&self.last, tokens, extra, &mut [0; MEDIUM_SCRATCH_BYTES])
        } else {
            chained_key(&self.last, tokens, extra, &mut [0; LARGE_SCRATCH_BYTES])
        };
        self.last
    }

    /// Pushes every full block of `tokens` and hands each key to `found`; the tokens of an unfinished block at
    /// the end are left out. `extra(i)` is the extra of the i-th block of this call. Returns how many blocks
    /// were pushed: none if `block_tokens` is zero. Allocates nothing.
    pub fn push_all<'a>(
        &mut self,
        tokens: &[u32],
        block_tokens: u32,
        mut extra: impl FnMut(usize) -> &'a [u8],
        mut found: impl FnMut(BlockKey),
    ) -> usize {
        let Some(block_tokens) = usize::try_from(block_tokens).ok().filter(|&tokens| tokens > 0) else {
            return 0;
        };
        let mut scratch = [0; LARGE_SCRATCH_BYTES];
        let mut blocks = 0;
        for (index, block) in tokens.chunks_exact(block_tokens).enumerate() {
            self.last = chained_key(&self.last, block, extra(index), &mut scratch);
            found(self.last);
            blocks = index.saturating_add(1);
        }
        blocks
    }
}

/// The keys of every full block of a plain text from the root: one allocation in all. Empty if `block_tokens`
/// is zero.
pub fn text_keys(tokens: &[u32], block_tokens: u32) -> Vec<BlockKey> {
    let blocks =
        usize::try_from(block_tokens).ok().and_then(|block| tokens.len().checked_div(block)).unwrap_or(0);
    let mut keys = Vec::with_capacity(blocks);
    KeyChain::new().push_all(tokens, block_tokens, |_| &[], |key| keys.push(key));
    keys
}

fn chained_key(parent: &BlockKey, tokens: &[u32], extra: &[u8], scratch: &mut [u8]) -> BlockKey {
    let mut message = Message { filled: write_head(parent, tokens.len(), scratch), scratch, hasher: None };
    message.tokens(tokens);
    // A slice's length fits in 64 bits.
    message.bytes(&(extra.len() as u64).to_le_bytes());
    message.bytes(extra);
    message.finish()
}

/// Everything before the tokens, as arrays: at 16 tokens a block, copying it bytewise would cost a quarter.
fn write_head(parent: &BlockKey, tokens: usize, scratch: &mut [u8]) -> usize {
    let Some((domain, rest)) = scratch.split_first_chunk_mut() else { return 0 };
    let Some((key, rest)) = rest.split_first_chunk_mut() else { return 0 };
    let Some((length, _)) = rest.split_first_chunk_mut() else { return 0 };
    *domain = KEY_DOMAIN;
    *key = *parent.as_bytes();
    *length = (tokens as u64).to_le_bytes();
    HEAD_BYTES
}

/// Gathers a message in as few large slices as its scratch allows. One that fits is hashed in a single call:
/// setting up an incremental hasher costs as much as hashing several hundred bytes.
struct Message<'a> {
    /// Length a multiple of four, so that no token is torn between two slices.
    scratch: &'a mut [u8],
    filled: usize,
    hasher: Option<blake3::Hasher>,
}

impl Message<'_> {
    fn bytes(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = self.scratch.get_mut(self.filled..).unwrap_or_default();
            let taken = room.len().min(bytes.len());
            if taken == 0 {
                self.flush();
                continue;
            }
            let (head, rest) = bytes.split_at(taken);
            // Both are `taken` bytes long.
            if let Some(room) = room.get_mut(..taken) {
                room.copy_from_slice(head);
            }
            self.filled = self.filled.saturating_add(taken);
            bytes = rest;
        }
    }

    /// Called where `filled` is a multiple of four.
    fn tokens(&mut self, mut tokens: &[u32]) {
        while !tokens.is_empty() {
            let (slots, _) = self.scratch.get_mut(self.filled..).unwrap_or_default().as_chunks_mut::<4>();
            let taken = slots.len().min(tokens.len());
            if taken == 0 {
                self.flush();
                continue;
            }
            let (head, rest) = tokens.split_at(taken);
            for (slot, token) in slots.iter_mut().zip(head) {
                *slot = token.to_le_bytes();
            }
            self.filled = self.filled.saturating_add(taken.saturating_mul(4));
            tokens = rest;
        }
    }

    fn flush(&mut self) {
        let full = self.scratch.get(..self.filled).unwrap_or_default();
        self.hasher.get_or_insert_with(blake3::Hasher::new).update(full);
        self.filled = 0;
    }

    fn finish(mut self) -> BlockKey {
        if self.hasher.is_some() {
            self.flush();
        }
        let hash = match self.hasher {
            Some(hasher) => hasher.finalize(),
            None => blake3::hash(self.scratch.get(..self.filled).unwrap_or_default()),
        };
        BlockKey(*hash.as_bytes())
    }
}

/// Why an engine's key is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForeignKeyError {
    /// It has no bytes.
    Empty,
    /// It is past [`MAX_FOREIGN_KEY_BYTES`].
    TooLong {
        /// The bytes it has.
        bytes: usize,
    },
    /// It has no block hash before its four bytes of group.
    NoGroup {
        /// The bytes it has.
        bytes: usize,
    },
}

impl fmt::Display for ForeignKeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => write!(f, "the foreign key is empty: use the engine's block hash"),
            Self::TooLong { bytes } => write!(
                f,
                "the foreign key has {bytes} bytes, but the limit is {MAX_FOREIGN_KEY_BYTES}: hash \
                the key to 32 bytes first"
            ),
            Self::NoGroup { bytes } => write!(
                f,
                "the offload key has {bytes} bytes, but it must have a block hash of at least one \
                byte and 4 bytes for the group"
            ),
        }
    }
}

impl std::error::Error for ForeignKeyError {}

impl BlockKey {
    /// The key of a block that an engine named itself. Thirty-two bytes are kept as they are; any other number
    /// up to [`MAX_FOREIGN_KEY_BYTES`] is mapped by `BLAKE3(FOREIGN_DOMAIN | length: u32 LE | bytes)`; none is
    /// refused. Text is taken as its bytes: to mean the 32 bytes behind 64 digits, decode them first. A
    /// group, rank or model name within the engine's key belongs into its own field before this is called.
    pub fn from_foreign(bytes: &[u8]) -> Result<Self, ForeignKeyError> {
        if let Ok(kept) = <[u8; 32]>::try_from(bytes) {
            return Ok(Self(kept));
        }
        let too_long = ForeignKeyError::TooLong { bytes: bytes.len() };
        let length = u32::try_from(bytes.len()).map_err(|_| too_long)?;
        if bytes.is_empty() {
            return Err(ForeignKeyError::Empty);
        }
        if bytes.len() > MAX_FOREIGN_KEY_BYTES {
            return Err(too_long);
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(&FOREIGN_DOMAIN).update(&length.to_le_bytes()).update(bytes);
        Ok(Self(*hasher.finalize().as_bytes()))
    }
}

/// The block and the group that a vLLM offload key names: a block hash, then the group as four bytes
/// big-endian. The hash is taken by [`BlockKey::from_foreign`], the group stays a field of its own.
pub fn split_vllm_offload_key(bytes: &[u8]) -> Result<(BlockKey, Group), ForeignKeyError> {
    match bytes.split_last_chunk::<4>() {
        Some((hash, group)) if !hash.is_empty() => {
            Ok((BlockKey::from_foreign(hash)?, Group(u32::from_be_bytes(*group))))
        }
        _ => Err(ForeignKeyError::NoGroup { bytes: bytes.len() }),
    }
}

/// What the index knows a block by. Two different index keys never encode to the same bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct IndexKey {
    /// Whose bytes.
    pub namespace: NamespaceId,
    /// Which block.
    pub key: BlockKey,
    /// Which of the engine's groups.
    pub group: Group,
    /// Which part of a tensor-parallel state.
    pub coordinate: Coordinate,
}

impl IndexKey {
    /// The number of bytes an index key is encoded in.
    pub const BYTES: usize = 76;

    /// `namespace: 32 | key: 32 | group: u32 LE | coordinate: u64 LE` (see [`Coordinate::to_u64`]).
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let group = self.group.0.to_le_bytes();
        let coordinate = self.coordinate.to_u64().to_le_bytes();
        let fields = [self.namespace.as_bytes().as_slice(), self.key.as_bytes(), &group, &coordinate];
        for (slot, byte) in out.iter_mut().zip(fields.into_iter().flatten()) {
            *slot = *byte;
        }
        out
    }

    /// The one index key that encodes to exactly these bytes, or `None` if none does: another length, or a
    /// coordinate that is none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (namespace, rest) = bytes.split_first_chunk::<32>()?;
        let (key, rest) = rest.split_first_chunk::<32>()?;
        let (group, rest) = rest.split_first_chunk::<4>()?;
        let coordinate = u64::from_le_bytes(rest.try_into().ok()?);
        Some(Self {
            namespace: NamespaceId(*namespace),
            key: BlockKey(*key),
            group: Group(u32::from_le_bytes(*group)),
            coordinate: Coordinate::from_u64(coordinate)?,
        })
    }
}
