//! The engine: one store over its shards.
//!
//! How a request travels: `put` and `read` check it on the caller's thread, against what all threads share
//! (`shared`: index, names, budget); its parts go through mailboxes to the executors that own the shards
//! (`shard`), where `log` appends records to segments and `slice` reads them back; `recover` finds it all again.

mod headers;
mod log;
mod names;
mod notify;
mod put;
mod read;
mod reclaim;
mod runs;
mod segment;
mod shared;
mod slice;

pub use shared::Counts;
