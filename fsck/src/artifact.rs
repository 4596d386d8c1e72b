//! The bytes of a record of blocks, as they were put: read in the order in which they lie, decoded, verified, and handed
//! out block by block with their chunks in canonical order.

use std::fmt;
use std::sync::Arc;

use kvarts_layout::codec::{Codec, Encoding, StoredPlaces};
use kvarts_layout::format::Secret;
use kvarts_layout::format::body::{ENCODING_RAW, EXTENSION_ENCRYPTION, layout_from_code};
use kvarts_layout::format::record::{self, Body, DIGEST_CRC32};
use kvarts_layout::{BlockShape, Coordinate, Group, Layout, RunLayout};

use crate::contents::Run;
use crate::segment::Keyring;
use crate::window::Window;

/// The most bytes of a block that are taken into memory.
pub const BLOCK_BYTES_MAX: u64 = 1 << 30;

/// Why the bytes of a record cannot be had.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Unreadable {
    /// The record's header is not what the segment's footer says.
    Header,
    /// It is in a layout, encoding or digest algorithm that this program does not know.
    Unknown(&'static str),
    /// It is encrypted.
    Encrypted,
    /// Its tables contradict its model: a writer's defect.
    Malformed(&'static str),
    /// One block of it is larger than [`BLOCK_BYTES_MAX`].
    TooLarge,
    /// A chunk is not what was put: the block's place in the record, and the chunk's in the block.
    Damaged(u32, u32),
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header => f.write_str("the header of the artifact is damaged"),
            Self::Unknown(what) => write!(f, "the {what} of the artifact is from a newer program"),
            Self::Encrypted => f.write_str("the artifact is encrypted"),
            Self::Malformed(what) => write!(f, "the {what} of the artifact contradicts its model"),
            Self::TooLarge => write!(f, "a block of the artifact is larger than {BLOCK_BYTES_MAX} bytes"),
            Self::Damaged(block, chunk) => write!(f, "chunk {chunk} of block {block} is damaged"),
        }
    }
}

/// A record whose header was read.
#[derive(Debug)]
pub struct Artifact {
    /// What a block is.
    pub shape: BlockShape,
    layout: Arc<RunLayout>,
    stored: Option<(Encoding, StoredPlaces)>,
    /// Where the payload begins in the file.
    start: u64,
    digests: Vec<u32>,
}

impl Artifact {
    /// Reads the header of a record again and finds out where its chunks lie.
    pub fn open(
        window: &mut Window<'_>,
        (keyring, shard): (&Keyring, u32),
        run: &Run,
    ) -> Result<Self, Unreadable> {
        let position = keyring.position(shard, run.segment).under(run.generation).at(run.offset);
        let digests = header(window, &position, &keyring.secret, run)?;
        let blocks = &run.blocks;
        if blocks.extensions.iter().any(|extension| extension.id == EXTENSION_ENCRYPTION) {
            return Err(Unreadable::Encrypted);
        }
        if blocks.extensions.iter().any(|extension| extension.critical) {
            return Err(Unreadable::Unknown("extension"));
        }
        let coordinate =
            Coordinate::from_u64(blocks.coordinate).ok_or(Unreadable::Malformed("coordinate"))?;
        let namespace = &run.namespace;
        let shape = namespace.geometry.shape(Group(blocks.group), coordinate, namespace.block_tokens);
        let shape = shape.map_err(|_| Unreadable::Malformed("group"))?;
        if shape.block_bytes() > BLOCK_BYTES_MAX {
            return Err(Unreadable::TooLarge);
        }
        let layout = layout_from_code(blocks.layout).ok_or(Unreadable::Unknown("layout"))?;
        let count = u32::try_from(blocks.blocks.len()).unwrap_or(u32::MAX);
        let layout = RunLayout::new(layout, blocks.layout_version, &shape, count);
        let layout = Arc::new(layout.map_err(|_| Unreadable::Unknown("layout version"))?);
        let stored = match Encoding::from_code(blocks.encoding) {
            _ if blocks.encoding == ENCODING_RAW => None,
            None => return Err(Unreadable::Unknown("encoding")),
            Some(encoding) => {
                let places = StoredPlaces::new(&layout, &blocks.stored_lengths);
                Some((encoding, places.ok_or(Unreadable::Malformed("stored lengths"))?))
            }
        };
        let expected = stored.as_ref().map_or(layout.payload_bytes(), |(_, places)| places.payload_bytes());
        if expected != run.payload_bytes {
            return Err(Unreadable::Malformed("payload length"));
        }
        let chunks = (count as usize).saturating_mul(layout.chunk_count() as usize);
        if digests.len() != chunks {
            return Err(Unreadable::Malformed("digest table"));
        }
        let start = run.offset.saturating_add(u64::from(run.header_bytes));
        Ok(Self { shape, layout, stored, start, digests })
    }

    /// Chunks of a block.
    pub fn chunk_count(&self) -> u32 {
        self.layout.chunk_count()
    }

    /// The digests of the chunks of a block, in canonical order.
    pub fn digests(&self, block: u32) -> &[u32] {
        let chunks = self.chunk_count() as usize;
        let from = (block as usize).saturating_mul(chunks);
        self.digests.get(from..from.saturating_add(chunks)).unwrap_or_default()
    }

    /// Where a chunk begins in the file, and how many bytes are stored of it.
    pub fn place(&self, block: u32, part: u32) -> Option<(u64, u64)> {
        let (offset, len) = match &self.stored {
            Some((_, places)) => places.chunk(block, part).map(|span| (span.offset, span.len))?,
            None => {
                let part = self.layout.parts().get(part as usize)?;
                let step = part.step.checked_mul(u64::from(block))?;
                (part.offset.checked_add(step)?, part.bytes)
            }
        };
        Some((self.start.checked_add(offset)?, len))
    }

    /// The bytes of the blocks `from..to`, one after the other, each with its chunks in canonical order. Every chunk is
    /// verified.
    pub fn blocks(&self, window: &mut Window<'_>, from: u32, to: u32) -> Result<Vec<u8>, Unreadable> {
        let each = usize::try_from(self.shape.block_bytes()).unwrap_or(usize::MAX);
        let count = to.saturating_sub(from) as usize;
        let mut bytes = vec![0u8; each.saturating_mul(count)];
        let mut codec = None;
        let parts = self.chunk_count();
        let by_block = self.layout.layout() == Layout::FullBlock || self.layout.blocks() == 1;
        let order: Box<dyn Iterator<Item = (u32, u32)>> = if by_block {
            Box::new((from..to).flat_map(|block| (0..parts).map(move |part| (block, part))))
        } else {
            Box::new((0..parts).flat_map(|part| (from..to).map(move |block| (block, part))))
        };
        // Where a chunk lies in a block without padding.
        let mut offsets = Vec::with_capacity(parts as usize);
        let mut end = 0usize;
        for part in self.layout.parts() {
            let len = usize::try_from(part.bytes).unwrap_or(usize::MAX);
            offsets.push((end, len));
            end = end.saturating_add(len);
        }
        for (block, part) in order {
            let damaged = Unreadable::Damaged(block, part);
            let (offset, len) = offsets.get(part as usize).copied().unwrap_or_default();
            let at = each.saturating_mul(block.saturating_sub(from) as usize).saturating_add(offset);
            let into = bytes.get_mut(at..at.saturating_add(len)).ok_or(Unreadable::Malformed("shape"))?;
            self.chunk(window, (block, part), &mut codec, into).ok_or(damaged.clone())?;
            let digest = self.digests(block).get(part as usize);
            if digest != Some(&crc32fast::hash(into)) {
                return Err(damaged);
            }
        }
        Ok(bytes)
    }

    /// Fills a chunk from what is stored of it.
    fn chunk(
        &self,
        window: &mut Window<'_>,
        (block, part): (u32, u32),
        codec: &mut Option<Codec>,
        into: &mut [u8],
    ) -> Option<()> {
        let (at, len) = self.place(block, part)?;
        let Some((encoding, _)) = &self.stored else { return copy(window, at, into) };
        let mut stored = vec![0u8; usize::try_from(len).ok()?];
        copy(window, at, &mut stored)?;
        if codec.is_none() {
            *codec = Codec::new().ok();
        }
        codec.as_mut()?.decode(*encoding, &stored, into).ok()
    }
}

/// The digests of a record that is still what its segment lists.
fn header(
    window: &mut Window<'_>,
    position: &kvarts_layout::format::Position,
    secret: &Secret,
    run: &Run,
) -> Result<Vec<u32>, Unreadable> {
    let len = usize::try_from(run.header_bytes).unwrap_or(usize::MAX);
    let bytes = window.bytes(position.offset, len);
    let record = record::open(bytes, position, secret).map_err(|_| Unreadable::Header)?;
    match record.body() {
        Ok(Body::Blocks(blocks)) if blocks == run.blocks => {}
        _ => return Err(Unreadable::Header),
    }
    if record.prefix.payload_bytes != run.payload_bytes {
        return Err(Unreadable::Header);
    }
    if record.prefix.digest_algorithm != DIGEST_CRC32 {
        return Err(Unreadable::Unknown("digest algorithm"));
    }
    Ok(record.digests().collect())
}

fn copy(window: &mut Window<'_>, mut at: u64, into: &mut [u8]) -> Option<()> {
    let mut rest = into;
    while !rest.is_empty() {
        let bytes = window.some(at, rest.len() as u64);
        if bytes.is_empty() {
            return None;
        }
        let (now, later) = rest.split_at_mut_checked(bytes.len())?;
        now.copy_from_slice(bytes);
        at = at.checked_add(bytes.len() as u64)?;
        rest = later;
    }
    Some(())
}
