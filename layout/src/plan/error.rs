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
            Self::Nothing => f.write_str(
                "the plan is empty: give at least one record, one block and one \
                layer",
            ),
            Self::OutOfRange { wanted, available } => {
                write!(
                    f,
                    "block or layer {wanted} was requested, but only {available} exist (counted from \
                    0)"
                )
            }
            Self::Order => f.write_str(
                "blocks, layers or destination slots are repeated or not sorted: sort the list, and give \
                each entry once",
            ),
            Self::Shape => f.write_str(
                "the records and the placement have different block shapes: use one \
                shape for all",
            ),
            Self::Placement { needed, available } => {
                write!(
                    f,
                    "the placement has slots for {available} blocks, but {needed} blocks were requested"
                )
            }
            Self::Unplaced { part } => {
                write!(f, "part {part} was requested, but the placement has no target for this part")
            }
            Self::PayloadOffset { offset } => {
                write!(f, "the payload starts at {offset}: it must start at a multiple of 4096")
            }
            Self::Align { align } => write!(
                f,
                "the alignment is {align}: it must be a power of two up to \
                4096"
            ),
            Self::Limit { limit } => {
                write!(
                    f,
                    "the limit of a read is {limit} bytes: it must be a positive multiple of the \
                    alignment, up to 1 GiB"
                )
            }
            Self::TooLarge => f.write_str("the plan is too large: read fewer records or layers at once"),
        }
    }
}

impl std::error::Error for PlanError {}
