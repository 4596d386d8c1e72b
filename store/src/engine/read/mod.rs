//! Reads: what is looked up on the caller's thread, and what each shard then reads, proves and announces.

pub(crate) mod decode;
pub(crate) mod header_cache;
pub(crate) mod job;
pub(crate) mod lend;
pub(crate) mod listing;
pub(crate) mod prove;
pub(crate) mod shard_read;
pub(crate) mod single_flight;
