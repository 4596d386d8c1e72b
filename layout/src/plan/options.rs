//! How a read is planned: in which order its bytes are wanted, and how its extents are formed.

use super::error::PlanError;
use crate::arrange::PAGE_BYTES;

/// Longest single device read, unless the options say otherwise.
pub const DEFAULT_MAX_EXTENT: u32 = 1 << 20;

/// Longest region, unless the options say otherwise.
pub const DEFAULT_MAX_REGION: u32 = 8 << 20;

/// Widest bridged gap, unless the options say otherwise.
pub const DEFAULT_MAX_GAP: u32 = 16 << 10;

/// No limit on extents and regions may be greater.
const MAX_LIMIT: u32 = 1 << 30;

/// In which order the bytes are wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Order {
    /// Layer by layer, in execution order, each over all blocks: what a layerwise restore wants.
    #[default]
    Layers,
    /// Block by block, in the order of the request, each with all layers: what flat pages and peers want.
    Blocks,
}

/// How extents are formed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadOptions {
    /// Offsets, lengths and addresses of device reads are multiples of this: a power of two up to 4096.
    pub align: u32,
    /// Longest device read: a multiple of `align`.
    pub max_extent: u32,
    /// Longest region (the unit of staging, verification and completion), unless a single chunk is longer: a
    /// multiple of `align`.
    pub max_region: u32,
    /// Two wanted ranges are read as one if at most this many unwanted bytes of whole pages lie between them.
    pub max_gap: u32,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            align: 4096,
            max_extent: DEFAULT_MAX_EXTENT,
            max_region: DEFAULT_MAX_REGION,
            max_gap: DEFAULT_MAX_GAP,
        }
    }
}

impl ReadOptions {
    /// The most bytes that a step with `pieces` pieces reads beyond the wanted ones: for each piece two page
    /// edges and one gap.
    pub fn over_read_bound(&self, pieces: u64) -> u64 {
        let edges = u64::from(self.align.saturating_sub(1)).saturating_mul(2);
        pieces.saturating_mul(edges.saturating_add(u64::from(self.max_gap)))
    }

    #[inline]
    pub(super) fn mask(&self) -> u64 {
        u64::from(self.align.saturating_sub(1))
    }

    pub(super) fn check(&self) -> Result<(), PlanError> {
        if !self.align.is_power_of_two() || u64::from(self.align) > PAGE_BYTES {
            return Err(PlanError::Align { align: self.align });
        }
        for limit in [self.max_extent, self.max_region] {
            if limit == 0 || limit > MAX_LIMIT || u64::from(limit) & self.mask() != 0 {
                return Err(PlanError::Limit { limit });
            }
        }
        Ok(())
    }
}
