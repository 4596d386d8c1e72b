//! A record that is to be written, where it went, and whether it fits.

use std::num::NonZeroU16;
use std::rc::Rc;
use std::sync::Arc;

use kvarts_layout::arrange::RunLayout;
use kvarts_layout::format::footer::{Content, Entry};
use kvarts_layout::format::record::Body;
use kvarts_layout::format::{PAGE_BYTES, page_align};

use crate::engine::shared::names::Namespace;
use crate::engine::volume::segment::{Hold, Segment};
use crate::index::RecordInfo;
use kvarts_contract::api::Placed;
use kvarts_contract::buffers::Buf;
use kvarts_contract::error::Reason;

/// Bytes that a footer needs for a record at most, besides its blocks and extensions.
const FOOTER_RECORD_BYTES: u64 = 256;
/// Bytes that a footer needs for a block.
const FOOTER_BLOCK_BYTES: u64 = 48;

/// The bytes of a record's blocks, where they lie now.
pub(crate) enum Payload<'a> {
    /// In memory of a caller.
    Placed {
        layout: Arc<RunLayout>,
        from: &'a Placed,
        /// Ordinal of the record's first block in the placement.
        ordinal: u32,
    },
    /// Put together already, as they will lie on disk.
    Image {
        /// Bytes of the payload; `pages` pads them with zeros.
        bytes: u64,
        pages: Buf,
        /// Asked at the moment at which the record gets its place and sequence: whether it is still wanted as it is.
        still: &'a dyn Fn() -> bool,
    },
    /// On disk already, behind the place of the header.
    There(Arc<RunLayout>),
}

impl Payload<'_> {
    /// Without padding.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Placed { layout, .. } | Self::There(layout) => layout.payload_bytes(),
            Self::Image { bytes, .. } => *bytes,
        }
    }

    /// With padding.
    pub(crate) fn image_bytes(&self) -> u64 {
        match self {
            Self::Placed { layout, .. } | Self::There(layout) => layout.image_bytes(),
            Self::Image { pages, .. } => pages.len() as u64,
        }
    }
}

impl std::fmt::Debug for Payload<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Payload({} bytes)", self.bytes())
    }
}

/// A record that is to be written.
#[derive(Debug)]
pub(crate) struct Draft<'a> {
    /// What must be defined in the segment before the record.
    pub(crate) namespace: Option<&'a Namespace>,
    pub(crate) body: Body,
    pub(crate) digests: &'a [u32],
    pub(crate) payload: Option<Payload<'a>>,
}

/// Where a record went.
#[derive(Clone, Debug)]
pub(crate) struct Written {
    pub(crate) segment: Rc<Segment>,
    pub(crate) offset: u64,
    pub(crate) header_bytes: u32,
    pub(crate) payload_bytes: u64,
    /// Where the next record begins: durable once everything below is.
    pub(crate) end: u64,
    /// Until the record is visible, or given up, its segment is not recycled: reclaim would not find it.
    pub(crate) _hold: Rc<Hold>,
}

impl Written {
    /// What the index is told of a record of `blocks` blocks.
    pub(crate) fn info(
        &self,
        shard: u32,
        blocks: usize,
        class: u32,
        expires: u32,
    ) -> Result<RecordInfo, Reason> {
        let too_large = || Reason::Bug("a record exceeds the limits of the index");
        Ok(RecordInfo {
            shard: u16::try_from(shard).map_err(|_| too_large())?,
            segment: self.segment.number,
            page: u32::try_from(self.offset / PAGE_BYTES).map_err(|_| too_large())?,
            header_pages: u16::try_from(u64::from(self.header_bytes) / PAGE_BYTES)
                .map_err(|_| too_large())?,
            payload_pages: u32::try_from(self.payload_bytes.div_ceil(PAGE_BYTES)).map_err(|_| too_large())?,
            blocks: u16::try_from(blocks).ok().and_then(NonZeroU16::new).ok_or_else(too_large)?,
            live: 0,
            class,
            expires,
            parent: 0,
            hangs: false,
        })
    }
}

/// What a segment has left, its footer included.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub(crate) bytes: u64,
    pub(crate) footer_bytes: u64,
}

impl Room {
    /// Whether a record of this many bytes and blocks fits.
    pub(crate) fn takes(&self, bytes: u64, blocks: u32) -> bool {
        let share = FOOTER_RECORD_BYTES + u64::from(blocks) * FOOTER_BLOCK_BYTES;
        let footer = page_align(self.footer_bytes + share + PAGE_BYTES).unwrap_or(u64::MAX);
        bytes.saturating_add(footer) <= self.bytes
    }
}

/// An upper estimate of what a record adds to its segment's footer.
pub(super) fn footer_share(entry: &Entry) -> u64 {
    let lists = match &entry.content {
        Content::Blocks(blocks) => {
            let extensions: u64 = blocks.extensions.iter().map(|one| 16 + one.bytes.len() as u64).sum();
            blocks.blocks.len() as u64 * FOOTER_BLOCK_BYTES
                + blocks.stored_lengths.len() as u64 * 4
                + extensions
        }
        Content::Tombstones(tombstones) => tombstones.entries.len() as u64 * 80,
        _ => 0,
    };
    FOOTER_RECORD_BYTES + lists
}
