//! Lending: where blocks lie in segment files, for a reader that reads them himself.
//!
//! A reader whose memory the processor does not see (a GPU that reads from the disk's own memory) cannot be read into.
//! It is told which pages of which files to read, where each chunk goes and which digest it must have. What it reads is
//! proven by those digests and by nothing else: the store looks at headers and reads no payload.

use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};

use crate::io::KeptFile;
use kvarts_contract::api::Origins;
use kvarts_contract::error::Reason;
use kvarts_contract::ticket::Reply;
use kvarts_contract::{class::Class, clock::Nanos};

/// Blocks that the caller reads from their files itself.
#[derive(Clone, Debug)]
pub struct LendRequest {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The group of all blocks.
    pub group: Group,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
    /// The blocks wanted.
    pub keys: Vec<BlockKey>,
    /// Which layers of the shape, counted among the layers that this group has; `None` for all.
    pub layers: Option<Range<u32>>,
    /// What they are for. In [`Class::Background`] it does not count as a use of the blocks.
    pub class: Class,
    /// When the caller stops waiting to be told where they lie. What was lent has no deadline.
    pub deadline: Option<Nanos>,
}

/// Blocks as they lie in files, held: while this lives, the bytes of its ranges are neither overwritten nor given back
/// to the file system. Blocks that are deleted, evicted or moved meanwhile are still there.
///
/// The store's closing ends the hold: it does not wait for who borrowed. Descriptors stay good, but what is read
/// afterwards may be anything that the next to open the store has written there. So every chunk is compared with its
/// digest, whenever it was read.
///
/// What is held is held up: the segments that the ranges lie in, as by a read that stands still. Their space does
/// not come back, so puts may be refused for want of room, a lowered budget is not reached, and what was buried before
/// them is remembered. The rest of the store does not wait for it. No time ends it: give
/// it back when the last range is in. To drop it, on any thread, is to give it back.
#[derive(Debug)]
pub struct PinnedExtents {
    files: Vec<PinnedFile>,
    layers: Vec<PinnedLayer>,
    origins: Arc<Origins>,
    /// What each executor holds ends when its answer is given, or dropped.
    held: Vec<Reply<()>>,
}

impl PinnedExtents {
    pub(crate) fn new(
        files: Vec<PinnedFile>,
        layers: Vec<PinnedLayer>,
        origins: Arc<Origins>,
        held: Vec<Reply<()>>,
    ) -> Self {
        Self { files, layers, origins, held }
    }

    /// The segment files: each once.
    pub fn files(&self) -> &[PinnedFile] {
        &self.files
    }

    /// Which production of each block is lent: for a reader that reads other parts of them in the ordinary way
    /// ([`Store::read_part`](crate::engine::Store::read_part)).
    pub fn origins(&self) -> &Arc<Origins> {
        &self.origins
    }

    /// Whether it is held still: false once the store has closed. What was read while it was held is what was lent.
    pub fn is_held(&self) -> bool {
        !self.held.iter().any(Reply::is_cancelled)
    }

    /// The layers that were asked for, in execution order.
    pub fn layers(&self) -> &[PinnedLayer] {
        &self.layers
    }
}

/// A segment file, open for direct I/O if the store has it so. The store writes through the same descriptor: a borrower
/// reads at offsets, and does nothing else with it.
///
/// It keeps the descriptor open, also when the store has removed the file; the file system has its space back only
/// when all of these are gone. It is no hold: only [`PinnedExtents`] is.
#[derive(Clone, Debug)]
pub struct PinnedFile(KeptFile);

impl PinnedFile {
    pub(crate) fn new(file: KeptFile) -> Self {
        Self(file)
    }

    /// Differs between all files that this process has or had open, and stays the same for as long as the store keeps
    /// this one open: what was registered for it can be kept by this.
    pub fn id(&self) -> u64 {
        self.0.number()
    }
}

impl AsFd for PinnedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A layer of all blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PinnedLayer {
    /// Which layer of the shape.
    pub layer: u32,
    /// What is to be read of it, by block and, within a file's record, by offset.
    pub ranges: Vec<FileRange>,
    /// What of that are its chunks, range by range: each chunk of each block once.
    pub chunks: Vec<PinnedChunk>,
}

/// Whole pages of a file: offset and bytes are multiples of 4096, and no range is longer than
/// [`DEFAULT_MAX_REGION`](kvarts_layout::plan::DEFAULT_MAX_REGION). Two may share a page, where one was cut at that length.
///
/// Where the chunks of a part are whole pages, on the disk and in the layer's bytes, a range is nothing but chunks
/// that follow each other in both: it can be read to where its first chunk goes, and everything is in its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileRange {
    /// Which of [`PinnedExtents::files`].
    pub file: u32,
    /// Where it begins in the file.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

/// A chunk of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PinnedChunk {
    /// Which of the layer's ranges it lies in, wholly.
    pub range: u32,
    /// Which block of the request.
    pub ordinal: u32,
    /// Where it begins in its range.
    pub at: u64,
    /// Its length.
    pub bytes: u64,
    /// Where it goes in the layer's bytes, which are those of all its blocks laid out `[part][block]` without padding.
    pub to: u64,
    /// The digest that it must have (CRC-32).
    pub digest: u32,
}

/// Why blocks are not lent. Nothing is held then, and nothing was changed: read them in the ordinary way, which says of
/// each block what is wrong with it and does about it what is to be done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NotLent {
    /// Some lie in an encoded record: its bytes on the disk are not the blocks'.
    Encoded,
    /// There is no descriptor behind a file: the disk is simulated.
    NotAFile,
    /// What a read would say, of the request or of a block.
    Reason(Reason),
}

impl From<Reason> for NotLent {
    fn from(reason: Reason) -> Self {
        Self::Reason(reason)
    }
}

impl fmt::Display for NotLent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Encoded => {
                f.write_str("the blocks were not pinned, because some of them are stored encoded")
            }
            Self::NotAFile => {
                f.write_str("the blocks were not pinned, because the files of the store have no descriptors")
            }
            Self::Reason(reason) => write!(f, "the blocks were not pinned: {reason}"),
        }
    }
}

impl std::error::Error for NotLent {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lent_goes_to_any_thread() {
        fn goes_anywhere<T: Send + Sync + 'static>() {}
        goes_anywhere::<PinnedExtents>();
        goes_anywhere::<PinnedFile>();
    }

    #[test]
    fn a_refusal_says_why() {
        let text = NotLent::from(Reason::Empty).to_string();
        assert_eq!(text, "the blocks were not pinned: the request has no block or no layer");
    }
}
