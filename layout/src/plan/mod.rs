//! Plans: which bytes move between a record's payload and the caller's memory, and how.
//!
//! A plan is arithmetic over a [`RunLayout`](crate::arrange::RunLayout) (where chunks lie on disk) and a
//! [`Placement`] (where they lie in memory). A [`ReadPlan`] turns wanted blocks and layers of any number of
//! records into aligned device extents and the scatter list behind them, step by step; a [`WritePlan`] lists the
//! pieces of a payload in file order. Neither holds data, and neither does work for a step before it is asked.

mod error;
mod options;
mod pieces;
mod placement;
mod read;
mod step;
mod stretch;
mod tiles;
mod write;

#[cfg(test)]
mod tests;

pub use error::PlanError;
pub use options::{DEFAULT_MAX_EXTENT, DEFAULT_MAX_GAP, DEFAULT_MAX_REGION, Order, ReadOptions};
pub use pieces::{Piece, Pieces};
pub use placement::{
    Address, MAX_PLACED_BLOCKS, MemoryId, MemorySpan, PartTarget, Placement, PlacementError,
};
pub use read::{ReadPlan, RecordRead};
pub use step::{Extent, Landing, RangePlace, ReadRange, Region, Step};
pub use stretch::Stretch;
pub use tiles::{Tile, TileChunk, TileRange, Tiles};
pub use write::{WritePiece, WritePlan, WriteSource, WriteSummary};
