//! The cold tier: an object storage behind the disks that keeps what outlives them.
//!
//! docs/COLD.md is the normative description. Invariants:
//! - Nothing that comes out of a bucket is believed: an index is proven by its pack's name, a block by its digests and its
//!   content id, a manifest by its hash. What cannot be proven is a miss.
//! - A pack is written before its index, and the index before the manifest that names it. Who reads begins at the manifest,
//!   so nothing is visible before it is whole.
//! - Packs never change, and a name that was condemned is not used again. Manifests change by compare-and-set alone.
//! - Requests, bytes, retries and memory are bounded; time, randomness and the network come through seams.
//!
//! Which file answers what:
//! - [`mod@format`]: the bytes in a bucket, pure;
//! - [`bucket`], [`time`]: the seams; [`places`]: memory that a range goes to; [`access`]: retries, budgets, with `outage`: when a bucket is
//!   left alone, and `turns`: how many ranges are read at once;
//! - [`tier`]: manifests and indexes in bounded memory, look-ups, changes by compare-and-set; [`mod@conditions`]: whether a bucket has that;
//! - [`check`]: what is wrong in a bucket; [`collect`]: what is not to be kept;
//! - [`withdraw`]: what was deleted goes out of the tier;
//! - [`push`]: blocks into packs; [`restore`]: packs into blocks, [`promote`]: and into a store.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

pub mod access;
pub mod bucket;
pub mod check;
pub mod collect;
pub mod conditions;
pub mod error;
pub mod fault;
pub mod format;
mod outage;
pub mod places;
pub mod promote;
pub mod push;
pub mod restore;
#[cfg(any(test, feature = "testing"))]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
pub mod testing;
pub mod tier;
pub mod time;
mod turns;
pub mod withdraw;

pub use access::{Access, Limits, Spent};
pub use bucket::{Bucket, Condition, Facts, Listed, Tag};
pub use conditions::Conditions;
pub use error::ColdError;
pub use fault::Fault;
pub use format::Point;
pub use places::Places;
pub use push::{PushOptions, Pushed, Pusher};
pub use tier::{Found, Tier, TierOptions};
pub use time::Time;

#[cfg(test)]
mod tests;
