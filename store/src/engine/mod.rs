//! The engine: one store over its shards.
//!
//! Its rooms, each of which stands on those before it: `tasks` (how tasks wait), `shared` (what all threads share),
//! `volume` (what a shard has on disk), `read`, `space` (segments, eviction), `write` (the log, puts, deletes),
//! `compact`, `recover`, and `front`: the store that callers see, and its executors.
//!
//! `front` checks a put or a read on the caller's thread, against what all threads share; its parts go through
//! mailboxes to the executors that own the shards, where `write` appends records to segments and `read` reads them
//! back; `recover` finds it all again.

mod compact;
mod front;
mod read;
mod recover;
mod shard;
pub(crate) mod shared;
mod space;
pub(crate) mod tasks;
mod volume;
mod write;

pub use compact::background::Compaction;
pub use compact::{CompactOptions, CompactReport};
pub use front::limits::Limits;
pub use front::memory_audit::Table;
pub use front::produced::{Produced, ProducedPage};
pub(crate) use front::store::DirectoryPlaces;
pub use front::store::{
    Executors, Holding, KnownNamespace, OfTenant, Options, PlannedExtent, SEGMENTS_MIN, Stats, Store,
    StoreTiles, refuse_beyond_disk,
};
pub use read::tile_identity::{TileIdentity, TileRuns};
pub use recover::{Problem, RecoveryReport};
pub use shared::Counts;
pub use shared::batches::Batches;
pub use shared::health::Health;
pub use shared::policy::{Candidate, EvictionPolicy};
pub use shared::recency::STEPS_PER_BUDGET;
pub use tasks::steps::{Done, WorkDone};
