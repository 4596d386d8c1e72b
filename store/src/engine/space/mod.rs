//! Space: where the next segment comes from, and how blocks leave to make room for it.

pub(crate) mod evict;
pub(crate) mod reclaim;
pub(crate) mod segment_alloc;
pub(crate) mod trouble;
