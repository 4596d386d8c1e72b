//! Why a plan was refused. Every variant is the caller's to fix; none is about what lies on disk.

use std::fmt;

/// Why a read or a write cannot be planned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PlanError {
    /// No record, no block or no layer is wanted.
    Nothing,
    /// A wanted block or layer is past the end.
    OutOfRange {
        /// What was asked for.
        wanted: u32,
        /// How many there are.
        available: u32,
    },
    /// A list of blocks or layers, or the places of records in the destination, does not strictly increase.
    Order,
    /// The records are not of one shape, or the placement is for another shape.
    Shape,
    /// The placement has fewer blocks than the plan needs.
    Placement {
        /// Blocks that the plan needs places for.
        needed: u32,
        /// Blocks that have a place.
        available: u32,
    },
    /// A wanted part has no place.
    Unplaced {
        /// Canonical index of the part.
        part: u32,
    },
    /// A payload does not start at a page boundary of its file.
    PayloadOffset {
        /// Where it is said to start.
        offset: u64,
    },
    /// The alignment is not a power of two of at most a page.
    Align {
        /// The alignment asked for.
        align: u32,
    },
    /// An extent or region limit is zero, no multiple of the alignment, or too large.
    Limit {
        /// The limit asked for.
        limit: u32,
    },
    /// A file offset past 63 bits, or more pieces in one step than a plan may hold.
    TooLarge,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing to plan: name at least one record, block and layer"),
            Self::OutOfRange { wanted, available } => {
                write!(f, "number {wanted} is wanted but there are only {available}")
            }
            Self::Order => f.write_str("sort blocks, layers and destination places, without duplicates"),
            Self::Shape => f.write_str("all records and the placement must be of one block shape"),
            Self::Placement { needed, available } => {
                write!(f, "places for {needed} blocks are needed, the placement has {available}")
            }
            Self::Unplaced { part } => write!(f, "part {part} is wanted but has no place"),
            Self::PayloadOffset { offset } => {
                write!(f, "a payload starts at a multiple of 4096, not at {offset}")
            }
            Self::Align { align } => write!(f, "alignment {align} is not a power of two up to 4096"),
            Self::Limit { limit } => {
                write!(f, "limit {limit} is not a positive multiple of the alignment up to 1 GiB")
            }
            Self::TooLarge => f.write_str("the plan is too large: read fewer records or layers at once"),
        }
    }
}

impl std::error::Error for PlanError {}
