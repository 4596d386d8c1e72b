//! The front of the engine: the store as callers see it, and the executors that do its work.

mod column;
pub(crate) mod descent;
pub(crate) mod executor;
pub(crate) mod expiry;
mod free_space;
pub(crate) mod leaving;
pub(crate) mod limits;
mod links;
pub(crate) mod lookup;
pub(crate) mod memory_audit;
pub(crate) mod presence;
pub(crate) mod produced;
pub(crate) mod restore;
pub(crate) mod router;
pub(crate) mod snapshot;
pub(crate) mod store;
