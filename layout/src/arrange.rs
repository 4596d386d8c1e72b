//! Where every byte of a run of blocks lies in a record's payload: version 1 of the two layouts.
//!
//! Nothing of this is stored. Layout, layout version, shape and the number of blocks decide every offset, so a
//! change to the arithmetic below is a new layout version and never an edit: the rules stand in `docs/FORMAT.md`.
//!
//! Both layouts come down to one line: the chunk of part `p` in block `b` starts at `offset(p) + b * step(p)`.
//! Full-block layout steps by a block, layer-block layout by a chunk. Chunks are packed with their own alignment
//! only; a block or a layer is moved up to a page boundary when that costs at most 1/256 of its size, so that
//! direct I/O can use it and small states do not pay for pages.

use crate::shape::{BlockShape, Layout, MAX_RUN_BLOCKS};
use std::fmt;

mod overhead;
#[cfg(test)]
pub(crate) mod tests;

pub use overhead::{DIGEST_BYTES, Overhead, record_header_bytes};

/// The only layout version there is so far, of both layouts.
pub const LAYOUT_VERSION: u16 = 1;
/// A payload starts at a multiple of this many bytes in its file and is zero-padded to a multiple of it.
pub const PAGE_BYTES: u64 = 4096;
/// A block or a layer is page-aligned if the padding is at most its size divided by this.
pub const ALIGN_WASTE_DIVISOR: u64 = 256;
/// `auto` takes full-block layout from this many bytes per layer of a block: the size from which reading a layer block by
/// block was as fast as reading it in one go in every run that may be quoted (`kvarts bench crossover`). Below it the two
/// are within a fifth of each other down to 32 KiB, and block by block costs 1.3 to 1.9 times the processor time.
pub const AUTO_FULL_BLOCK_BYTES: u64 = 512 << 10;

/// `value` rounded up to a multiple of `align`, a power of two. Saturates at the last multiple.
pub(crate) const fn round_up(value: u64, align: u64) -> u64 {
    let mask = align.saturating_sub(1);
    value.saturating_add(mask) & !mask
}

impl Layout {
    /// The layout for `blocks` blocks of this shape: full-block where a layer of one block is large enough to be
    /// read by itself, and where the two layouts hardly differ (one block, or one layer); layer-block elsewhere.
    pub fn auto(shape: &BlockShape, blocks: u32) -> Self {
        let layers = u64::try_from(shape.layers().len()).unwrap_or(u64::MAX);
        let mean_layer_bytes = shape.block_bytes().checked_div(layers).unwrap_or(0);
        if blocks <= 1 || layers <= 1 || mean_layer_bytes >= AUTO_FULL_BLOCK_BYTES {
            Self::FullBlock
        } else {
            Self::LayerBlock
        }
    }
}

/// A range of bytes within a payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

impl Span {
    /// The offset after the last byte.
    pub const fn end(self) -> u64 {
        self.offset.saturating_add(self.len)
    }
}

/// Where one part's chunks lie: block `b`'s starts at `offset + b * step`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PartPlace {
    /// Offset of the first block's chunk in the payload.
    pub offset: u64,
    /// Distance from one block's chunk to the next one's; zero in a run of one block.
    pub step: u64,
    /// Bytes of one chunk.
    pub bytes: u64,
}

impl PartPlace {
    /// Where the chunk of `block` starts. The caller has checked that the block is in the run.
    pub(crate) const fn start(&self, block: u32) -> u64 {
        // A payload stays below 2^53 bytes by the limits of `shape`, so nothing saturates.
        self.offset.saturating_add(self.step.saturating_mul(block as u64))
    }
}

/// Why there is no such arrangement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunLayoutError {
    /// A layout version that this build does not know.
    Version {
        /// The version asked for.
        found: u16,
    },
    /// No blocks, or more than a record may have.
    Blocks {
        /// The number asked for.
        found: u32,
    },
}

impl fmt::Display for RunLayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version { found } => {
                write!(
                    f,
                    "the layout version of the record is {found}: this program reads only version \
                    {LAYOUT_VERSION}"
                )
            }
            Self::Blocks { found } => {
                write!(f, "the record has {found} blocks: a record has 1 to {MAX_RUN_BLOCKS} blocks")
            }
        }
    }
}

impl std::error::Error for RunLayoutError {}

/// The place of every chunk of a run of blocks: built in one pass over the parts of a block, answers in O(1).
///
/// Equal inputs give equal places on every machine and in every build that knows the layout version.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunLayout {
    layout: Layout,
    blocks: u32,
    /// Per layer: index of its first part in `parts`; one more entry closes the last layer.
    first_parts: Vec<u32>,
    /// All parts of a block, in canonical (layer, part) order.
    parts: Vec<PartPlace>,
    block_bytes: u64,
    payload_bytes: u64,
}

impl RunLayout {
    /// The arrangement of `blocks` blocks in a payload.
    pub fn new(
        layout: Layout,
        version: u16,
        shape: &BlockShape,
        blocks: u32,
    ) -> Result<Self, RunLayoutError> {
        if version != LAYOUT_VERSION {
            return Err(RunLayoutError::Version { found: version });
        }
        if blocks == 0 || blocks > MAX_RUN_BLOCKS {
            return Err(RunLayoutError::Blocks { found: blocks });
        }
        let mut first_parts = Vec::with_capacity(shape.layers().len().saturating_add(1));
        first_parts.push(0u32);
        let mut last = 0u32;
        for layer in shape.layers() {
            // A shape has at most 2^16 chunks.
            last = last.saturating_add(u32::try_from(layer.chunks.len()).unwrap_or(u32::MAX));
            first_parts.push(last);
        }
        let (parts, payload_bytes) = match layout {
            // A run of one block is the same image in both layouts.
            Layout::LayerBlock if blocks > 1 => place_by_layer(shape, blocks),
            Layout::LayerBlock | Layout::FullBlock => place_by_block(shape, blocks),
        };
        Ok(Self { layout, blocks, first_parts, parts, block_bytes: shape.block_bytes(), payload_bytes })
    }

    /// The layout.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The version of the layout's rules.
    pub fn version(&self) -> u16 {
        LAYOUT_VERSION
    }

    /// Blocks in the run, at least one.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Layers in a block, at least one.
    pub fn layer_count(&self) -> u32 {
        u32::try_from(self.first_parts.len().saturating_sub(1)).unwrap_or(u32::MAX)
    }

    /// Chunks in one block.
    pub fn chunk_count(&self) -> u32 {
        u32::try_from(self.parts.len()).unwrap_or(u32::MAX)
    }

    /// All parts of a block in canonical (layer, part) order.
    pub fn parts(&self) -> &[PartPlace] {
        &self.parts
    }

    /// Canonical index of a layer's first part and the layer's parts, or `None` past the last layer: a block's digests lie in
    /// the order of canonical indices.
    pub fn layer_parts(&self, layer: u32) -> Option<(u32, &[PartPlace])> {
        let at = usize::try_from(layer).ok()?;
        let first = *self.first_parts.get(at)?;
        let end = *self.first_parts.get(at.checked_add(1)?)?;
        let range = usize::try_from(first).ok()?..usize::try_from(end).ok()?;
        Some((first, self.parts.get(range)?))
    }

    /// The layer of the part with this canonical index.
    pub fn layer_of_part(&self, part: u32) -> Option<u32> {
        let layer = self.first_parts.partition_point(|&first| first <= part).checked_sub(1)?;
        u32::try_from(layer).ok().filter(|&layer| layer < self.layer_count())
    }

    /// The bytes of one chunk, or `None` if the run has no such block, layer or part.
    pub fn chunk(&self, block: u32, layer: u32, part: u32) -> Option<Span> {
        let (_, parts) = self.layer_parts(layer)?;
        let place = parts.get(usize::try_from(part).ok()?)?;
        (block < self.blocks).then(|| Span { offset: place.start(block), len: place.bytes })
    }

    /// The bytes of one layer of the whole run, padding between its chunks included; `None` where they are not
    /// contiguous (full-block layout of several blocks) or there is no such layer.
    pub fn layer_span(&self, layer: u32) -> Option<Span> {
        if self.layout == Layout::FullBlock && self.blocks > 1 {
            return None;
        }
        let (_, parts) = self.layer_parts(layer)?;
        self.span_of(parts.first()?.start(0), parts.last()?, self.blocks.saturating_sub(1))
    }

    /// The bytes of one whole block, padding between its chunks included; `None` where they are not contiguous
    /// (layer-block layout of several blocks) or there is no such block.
    pub fn block_span(&self, block: u32) -> Option<Span> {
        if block >= self.blocks || (self.layout == Layout::LayerBlock && self.blocks > 1) {
            return None;
        }
        self.span_of(self.parts.first()?.start(block), self.parts.last()?, block)
    }

    fn span_of(&self, offset: u64, last: &PartPlace, block: u32) -> Option<Span> {
        let end = last.start(block).checked_add(last.bytes)?;
        Some(Span { offset, len: end.checked_sub(offset)? })
    }

    /// Bytes from the first chunk's first byte to the last chunk's last.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// Bytes that the payload takes on disk: `payload_bytes` padded with zeros to whole pages.
    pub fn image_bytes(&self) -> u64 {
        round_up(self.payload_bytes, PAGE_BYTES)
    }

    /// Bytes of all chunks, without padding.
    pub fn content_bytes(&self) -> u64 {
        self.block_bytes.saturating_mul(u64::from(self.blocks))
    }

    /// Whether the other run is made of blocks of the same shape, as far as bytes are concerned.
    pub fn same_shape(&self, other: &Self) -> bool {
        self.first_parts == other.first_parts
            && self.parts.iter().map(|part| part.bytes).eq(other.parts.iter().map(|part| part.bytes))
    }
}

/// Padding needed to bring `at` to a page boundary, if that costs at most its share of `bytes`.
fn affordable_padding(at: u64, bytes: u64) -> Option<u64> {
    let padding = round_up(at, PAGE_BYTES).saturating_sub(at);
    (padding <= bytes.checked_div(ALIGN_WASTE_DIVISOR)?).then_some(padding)
}

/// `[block][layer][part]`: the places of the parts in a block, and the payload's length.
fn place_by_block(shape: &BlockShape, blocks: u32) -> (Vec<PartPlace>, u64) {
    let mut parts = Vec::new();
    let mut end = 0u64;
    let mut block_align = 1u64;
    for chunk in shape.layers().iter().flat_map(|layer| &layer.chunks) {
        let align = u64::from(chunk.align);
        let offset = round_up(end, align);
        parts.push(PartPlace { offset, step: 0, bytes: chunk.bytes });
        end = offset.saturating_add(chunk.bytes);
        block_align = block_align.max(align);
    }
    if blocks > 1 {
        let step = match affordable_padding(end, end) {
            Some(padding) => end.saturating_add(padding),
            None => round_up(end, block_align),
        };
        parts.iter_mut().for_each(|part| part.step = step);
        end = end.saturating_add(step.saturating_mul(u64::from(blocks.saturating_sub(1))));
    }
    (parts, end)
}

/// `[layer][part][block]`: the places of the parts in the run, and the payload's length.
fn place_by_layer(shape: &BlockShape, blocks: u32) -> (Vec<PartPlace>, u64) {
    let mut parts = Vec::new();
    let mut end = 0u64;
    for layer in shape.layers() {
        // Only a layer's start is moved to a page; its parts follow with their own alignment.
        let bytes = layer.bytes().saturating_mul(u64::from(blocks));
        end = end.saturating_add(affordable_padding(end, bytes).unwrap_or(0));
        for chunk in &layer.chunks {
            let align = u64::from(chunk.align);
            let offset = round_up(end, align);
            let step = round_up(chunk.bytes, align);
            parts.push(PartPlace { offset, step, bytes: chunk.bytes });
            let before_last = step.saturating_mul(u64::from(blocks.saturating_sub(1)));
            end = offset.saturating_add(before_last).saturating_add(chunk.bytes);
        }
    }
    (parts, end)
}
