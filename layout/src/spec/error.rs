//! Why numbers are not a model geometry, or a question to one has no answer.

use std::fmt;

use crate::coord::{Coordinate, TpError};
use crate::ids::Group;
use crate::shape::{MAX_BLOCK_BYTES, MAX_BLOCK_TOKENS, MAX_CHUNK_BYTES, MAX_CHUNKS, MAX_LAYERS, ShapeError};

use super::limits::{MAX_PARTS, MAX_PARTS_PER_LAYER};

/// Why numbers are not a model geometry, or why it has no shape for what was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SpecError {
    /// No layers.
    NoLayers,
    /// More layers than a shape may have.
    TooManyLayers,
    /// A layer without parts, or with more than it may have.
    LayerParts {
        /// Index of the layer.
        layer: u32,
    },
    /// More different parts than a geometry may have.
    TooManyParts,
    /// More parts over all layers than a block may have chunks.
    TooManyChunks,
    /// A layer names a part that is not there.
    UnknownPart {
        /// Index of the layer.
        layer: u32,
    },
    /// A part that no layer has.
    UnusedPart {
        /// Index of the part.
        part: u32,
    },
    /// Bytes of a part that are zero or past the limit of a chunk.
    PartBytes {
        /// The bytes.
        bytes: u64,
    },
    /// Tokens of a part that are zero or past the limit of a block.
    PartTokens {
        /// The tokens.
        tokens: u64,
    },
    /// An alignment that is not a power of two within the limit.
    Align {
        /// The alignment.
        align: u32,
    },
    /// Heads that do not divide the bytes of a part.
    UnevenHeads {
        /// The heads.
        heads: u16,
        /// The bytes.
        bytes: u64,
    },
    /// A group whose parts are not all streams, all windows or all states.
    MixedRoles {
        /// The group.
        group: Group,
    },
    /// A group whose parts differ in their number of heads.
    MixedHeads {
        /// The group.
        group: Group,
    },
    /// The least number of tokens that is whole entries of every stream is past the limit of a block.
    EntryTokens,
    /// The smallest block that is whole entries of every stream is larger than a block may be.
    BlockBytes {
        /// The group.
        group: Group,
    },
    /// A number of block tokens that is zero, too large, or not whole entries of every stream.
    BlockTokens {
        /// The block tokens asked for.
        block_tokens: u32,
        /// What they must be a multiple of.
        multiple_of: u32,
    },
    /// No part is in this group.
    UnknownGroup {
        /// The group.
        group: Group,
    },
    /// A coordinate that does not fit the group's number of heads.
    Coordinate {
        /// The group.
        group: Group,
        /// Heads of the group; 0 when it is replicated.
        heads: u16,
        /// The coordinate asked for.
        coordinate: Coordinate,
    },
    /// Every part of the group is empty at every boundary of blocks of this size.
    NothingStored {
        /// The group.
        group: Group,
    },
    /// A group that is not a window was asked for as one.
    NotAWindow {
        /// The group.
        group: Group,
    },
    /// A number of tensor-parallel ranks that does not fit.
    Ranks(TpError),
    /// A shape past a limit.
    Shape(ShapeError),
    /// A sum that does not fit 64 bits.
    Overflow,
}

impl SpecError {
    /// The key of the spec's text form that is at fault, where it is one key.
    pub fn key(&self) -> Option<&'static str> {
        Some(match self {
            Self::NoLayers | Self::TooManyLayers | Self::TooManyChunks => "layers",
            Self::TooManyParts => "part",
            Self::PartBytes { .. } => "bytes",
            Self::Align { .. } => "align",
            Self::UnevenHeads { .. } => "heads",
            Self::BlockTokens { .. } => "block_tokens",
            _ => return None,
        })
    }
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NoLayers => write!(f, "the model has no layer: give at least one"),
            Self::TooManyLayers => write!(f, "the model has more than {MAX_LAYERS} layers"),
            Self::LayerParts { layer } => {
                write!(f, "layer {layer} must have 1 to {MAX_PARTS_PER_LAYER} parts")
            }
            Self::TooManyParts => write!(f, "the model has more than {MAX_PARTS} different parts"),
            Self::TooManyChunks => write!(f, "the layers together have more than {MAX_CHUNKS} parts"),
            Self::UnknownPart { layer } => write!(f, "layer {layer} has a part that is not defined"),
            Self::UnusedPart { part } => write!(f, "no layer has part {part}"),
            Self::PartBytes { bytes } => {
                write!(f, "the part has {bytes} bytes: a part has 1 to {MAX_CHUNK_BYTES} bytes")
            }
            Self::PartTokens { tokens } => {
                write!(f, "the number of tokens is {tokens}: use 1 to {MAX_BLOCK_TOKENS}")
            }
            Self::Align { align } => {
                write!(f, "the alignment is {align}: use a power of two up to 4096")
            }
            Self::UnevenHeads { heads, bytes } => {
                write!(f, "{bytes} bytes cannot be split evenly over {heads} heads")
            }
            Self::MixedRoles { group } => write!(
                f,
                "group {group} has parts of different kinds (streams, windows or states): use one group for \
                each kind"
            ),
            Self::MixedHeads { group } => {
                write!(
                    f,
                    "the parts of group {group} have different numbers of heads: use one group for \
                    each number of heads"
                )
            }
            Self::EntryTokens => write!(
                f,
                "no block size up to {MAX_BLOCK_TOKENS} tokens gives every stream a whole number of entries"
            ),
            Self::BlockBytes { group } => {
                write!(f, "the smallest block of group {group} is larger than {MAX_BLOCK_BYTES} bytes")
            }
            Self::BlockTokens { block_tokens, multiple_of } => write!(
                f,
                "a block has {block_tokens} tokens: use a multiple of {multiple_of}, up to \
                {MAX_BLOCK_TOKENS}"
            ),
            Self::UnknownGroup { group } => write!(f, "the model has no group {group}"),
            Self::Coordinate { group, heads: 0, coordinate } => {
                write!(f, "group {group} is replicated, so the coordinate {coordinate} does not exist")
            }
            Self::Coordinate { group, heads, coordinate } => {
                write!(
                    f,
                    "group {group} is split over {heads} heads, so the coordinate {coordinate} does \
                    not exist"
                )
            }
            Self::NothingStored { group } => {
                write!(f, "group {group} stores no bytes at boundaries of blocks of this size")
            }
            Self::NotAWindow { group } => write!(f, "group {group} is not a sliding window"),
            Self::Ranks(error) => error.fmt(f),
            Self::Shape(error) => error.fmt(f),
            Self::Overflow => write!(f, "the number of bytes does not fit into 64 bits"),
        }
    }
}

impl std::error::Error for SpecError {}

impl From<ShapeError> for SpecError {
    fn from(error: ShapeError) -> Self {
        Self::Shape(error)
    }
}

impl From<TpError> for SpecError {
    fn from(error: TpError) -> Self {
        Self::Ranks(error)
    }
}
