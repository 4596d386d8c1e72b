//! The body of a frame of blocks, and the proof of its payload.

use super::{ExportError, ExportedNamespace, MAX_BODY_BYTES};
use crate::format::body::Parent;
use crate::shape::{BlockShape, MAX_BLOCK_BYTES, MAX_CHUNKS, MAX_RUN_BLOCKS};
use crate::{BlockKey, ContentId, Coordinate, Group, NamespaceId, OriginId};

/// The most payload bytes of a frame of more than one block. A frame of one block has the bytes of that block, up to
/// [`MAX_BLOCK_BYTES`].
pub const RUN_BYTES_MAX: u64 = 32 << 20;
/// Bytes of a body before its blocks.
const FIXED: usize = 120;
/// Bytes of a block's entry: key, origin id, content id.
const ENTRY: usize = 80;
/// CRC-32 (IEEE), four bytes little-endian.
const DIGEST: [u8; 2] = [1, 4];

/// A block of an export.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportedBlock {
    /// Its key.
    pub key: BlockKey,
    /// Which production of its bytes this is.
    pub origin: OriginId,
    /// The hash of its bytes.
    pub content: ContentId,
    /// The CRC-32 of each chunk, in canonical order, as its producer computed them.
    pub digests: Vec<u32>,
}

/// Blocks of one group and one coordinate: consecutive blocks of one prefix, or pages without a known order, whose parent is
/// [`Parent::Unknown`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Run {
    /// The namespace.
    pub namespace: NamespaceId,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
    /// The group of all blocks.
    pub group: Group,
    /// When the blocks were first stored, in milliseconds since 1970.
    pub created_ms: u64,
    /// When they expire, in milliseconds since 1970; zero for never.
    pub expires_ms: u64,
    /// How many blocks of the prefix come before the first, where that is known. Of pages it is not.
    pub first_block: Option<u32>,
    /// What comes before the first block.
    pub parent: Parent,
    /// Bytes of each block.
    pub block_bytes: u64,
    /// The blocks, in the order of the prefix if they are of one; never empty.
    pub blocks: Vec<ExportedBlock>,
}

/// A block whose bytes are not what was exported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BadBlock {
    /// Its key.
    pub key: BlockKey,
    /// The first chunk whose digest does not match, if it is a chunk.
    pub chunk: Option<u32>,
}

impl std::fmt::Display for BadBlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.chunk {
            Some(chunk) => write!(f, "chunk {chunk} of block {} does not match its digest", self.key),
            None => write!(f, "the bytes of block {} do not match its content id", self.key),
        }
    }
}

impl std::error::Error for BadBlock {}

impl Run {
    /// Bytes of its payload; `None` where there are more than there can be.
    pub fn payload_bytes(&self) -> Option<u64> {
        self.block_bytes.checked_mul(self.blocks.len() as u64)
    }

    /// The most blocks of a frame, for blocks of this many bytes and chunks.
    pub fn most_blocks(block_bytes: u64, chunks: u32) -> u32 {
        let by_bytes = RUN_BYTES_MAX.checked_div(block_bytes).unwrap_or(0);
        let entry = (chunks as usize).saturating_mul(4).saturating_add(ENTRY);
        let by_body = MAX_BODY_BYTES.saturating_sub(FIXED).checked_div(entry).unwrap_or(0) as u64;
        u32::try_from(by_bytes.min(by_body)).unwrap_or(u32::MAX).clamp(1, MAX_RUN_BLOCKS)
    }

    fn check(&self) -> Result<(), ExportError> {
        let field = |holds: bool, name| if holds { Ok(()) } else { Err(ExportError::Field(name)) };
        let chunks = self.blocks.first().map_or(0, |block| block.digests.len());
        field((1..=MAX_RUN_BLOCKS as usize).contains(&self.blocks.len()), "blocks")?;
        field((1..=MAX_CHUNKS).contains(&chunks), "chunks")?;
        field(self.blocks.iter().all(|block| block.digests.len() == chunks), "chunks")?;
        field((1..=MAX_BLOCK_BYTES).contains(&self.block_bytes), "block_bytes")?;
        let payload = self.payload_bytes().ok_or(ExportError::Field("block_bytes"))?;
        field(self.blocks.len() == 1 || payload <= RUN_BYTES_MAX, "block_bytes")?;
        let tables = self.blocks.len().saturating_mul(chunks.saturating_mul(4).saturating_add(ENTRY));
        field(FIXED.saturating_add(tables) <= MAX_BODY_BYTES, "blocks")
    }

    pub(super) fn encode(&self) -> Result<Vec<u8>, ExportError> {
        self.check()?;
        let chunks = self.blocks.first().map_or(0, |block| block.digests.len());
        let (parent, parent_key) = match self.parent {
            Parent::Root => (0u8, [0; 32]),
            Parent::Key(key) => (1, key),
            Parent::Unknown => (2, [0; 32]),
        };
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX).to_le_bytes();
        let mut bytes = [0u8; FIXED];
        fill(
            &mut bytes,
            &[
                &self.namespace.0,
                &self.coordinate.to_u64().to_le_bytes(),
                &self.created_ms.to_le_bytes(),
                &self.expires_ms.to_le_bytes(),
                &self.group.0.to_le_bytes(),
                &self.first_block.unwrap_or(0).to_le_bytes(),
                &[u8::from(self.first_block.is_some()), parent],
                &DIGEST,
                &count(self.blocks.len()),
                &count(chunks),
                &[0; 4],
                &self.block_bytes.to_le_bytes(),
                &parent_key,
            ],
        );
        let mut bytes = bytes.to_vec();
        for block in &self.blocks {
            for field in [block.key.0.as_slice(), &block.origin.0, &block.content.0] {
                bytes.extend_from_slice(field);
            }
        }
        for digest in self.blocks.iter().flat_map(|block| &block.digests) {
            bytes.extend_from_slice(&digest.to_le_bytes());
        }
        Ok(bytes)
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, ExportError> {
        let mut taker = Taker::new(bytes);
        let namespace = NamespaceId(taker.array()?);
        let coordinate = Coordinate::from_u64(taker.u64()?).ok_or(ExportError::Field("coordinate"))?;
        let (created_ms, expires_ms) = (taker.u64()?, taker.u64()?);
        let group = Group(taker.u32()?);
        let first = taker.u32()?;
        let [known, variant] = taker.array::<2>()?;
        let first_block = match (known, first) {
            (0, 0) => None,
            (1, first) => Some(first),
            _ => return Err(ExportError::Field("first_block")),
        };
        if taker.array::<2>()? != DIGEST {
            return Err(ExportError::Field("digest_algorithm"));
        }
        let (count, chunks) = (taker.u32()?, taker.u32()?);
        if taker.u32()? != 0 {
            return Err(ExportError::Field("reserved"));
        }
        let block_bytes = taker.u64()?;
        let parent_key = taker.array::<32>()?;
        let parent = match (variant, parent_key) {
            (0, key) if key == [0; 32] => Parent::Root,
            (1, key) => Parent::Key(key),
            (2, key) if key == [0; 32] => Parent::Unknown,
            _ => return Err(ExportError::Field("parent")),
        };
        let per_block = u64::from(chunks).saturating_mul(4).saturating_add(ENTRY as u64);
        // Bounded by what is there before anything is allocated.
        if u64::from(count).checked_mul(per_block) != Some(taker.left() as u64) {
            return Err(ExportError::Field("blocks"));
        }
        let mut blocks = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let key = BlockKey(taker.array()?);
            let (origin, content) = (OriginId(taker.array()?), ContentId(taker.array()?));
            blocks.push(ExportedBlock { key, origin, content, digests: Vec::new() });
        }
        for block in &mut blocks {
            block.digests = (0..chunks).map(|_| taker.u32()).collect::<Result<_, _>>()?;
        }
        taker.end()?;
        let run = Self {
            namespace,
            coordinate,
            group,
            created_ms,
            expires_ms,
            first_block,
            parent,
            block_bytes,
            blocks,
        };
        run.check()?;
        Ok(run)
    }

    /// The shape of its blocks.
    pub fn shape(&self, namespace: &ExportedNamespace) -> Result<BlockShape, ExportError> {
        let tokens = namespace.identity.block_tokens;
        let shape = namespace.geometry.shape(self.group, self.coordinate, tokens);
        shape.map_err(|_| ExportError::Field("group"))
    }

    pub(super) fn check_shape(&self, namespace: &ExportedNamespace) -> Result<(), ExportError> {
        let shape = self.shape(namespace)?;
        let chunks = self.blocks.first().map_or(0, |block| block.digests.len());
        if shape.block_bytes() != self.block_bytes {
            return Err(ExportError::Field("block_bytes"));
        }
        if shape.chunk_count() as usize == chunks { Ok(()) } else { Err(ExportError::Field("chunks")) }
    }

    /// Proves the bytes of one block: every chunk by its digest, all of them by the content id.
    pub fn verify(&self, block: usize, shape: &BlockShape, bytes: &[u8]) -> Result<(), BadBlock> {
        let Some(block) = self.blocks.get(block) else {
            return Err(BadBlock { key: BlockKey([0; 32]), chunk: None });
        };
        let bad = |chunk| BadBlock { key: block.key, chunk };
        if bytes.len() as u64 != shape.block_bytes() {
            return Err(bad(None));
        }
        let mut rest = bytes;
        let chunks = shape.layers().iter().flat_map(|layer| &layer.chunks);
        for (number, (chunk, digest)) in (0u32..).zip(chunks.zip(&block.digests)) {
            let len = usize::try_from(chunk.bytes).unwrap_or(usize::MAX);
            let (own, behind) = rest.split_at_checked(len).ok_or(bad(Some(number)))?;
            if crc32fast::hash(own) != *digest {
                return Err(bad(Some(number)));
            }
            rest = behind;
        }
        let content = blake3::hash(bytes);
        if content.as_bytes() == &block.content.0 { Ok(()) } else { Err(bad(None)) }
    }
}

/// Puts fields one after the other.
pub(super) fn fill(bytes: &mut [u8], fields: &[&[u8]]) {
    let from = fields.iter().flat_map(|field| field.iter());
    bytes.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
}

/// Takes fields from the front of bytes.
pub(super) struct Taker<'a> {
    rest: &'a [u8],
}

impl<'a> Taker<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], ExportError> {
        let (field, rest) = self.rest.split_first_chunk::<N>().ok_or(ExportError::Field("length"))?;
        self.rest = rest;
        Ok(*field)
    }

    pub(super) fn u16(&mut self) -> Result<u16, ExportError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, ExportError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, ExportError> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn left(&self) -> usize {
        self.rest.len()
    }

    pub(super) fn end(&self) -> Result<(), ExportError> {
        if self.rest.is_empty() { Ok(()) } else { Err(ExportError::Field("length")) }
    }
}
