//! How many parts a spec may have.

/// The most different parts a geometry may have.
pub const MAX_PARTS: usize = 1024;
/// The most parts one layer may have.
pub const MAX_PARTS_PER_LAYER: usize = 64;
