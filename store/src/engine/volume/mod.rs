//! What one shard has on disk: segment files, checkpoints, tombstones, and the directory that they lie in.

pub(crate) mod checkpoint;
pub(crate) mod directory;
pub(crate) mod pages;
pub(crate) mod segment;
pub(crate) mod tombstones;
